#include <algorithm>
#include <limits>

#include "cuda/matmul_warpgroup.h"
#include "layout.h"

namespace wonly::warpgroup {

constexpr int kSplitBytes = 4;          // of an activation in pieces, of a token's power of two, and of a sum
constexpr int kSplitTokens = 64;        // of the largest tile of such
constexpr int kMostTokens = 216;        // of a tile
constexpr int64_t kShiftedTokens = 64;  // of one with float zeros or offsets, of nine tokens or more (measured)
constexpr float kSurely = 0.999f;       // whatever sums of float32 are rounded to

int64_t sum_count(const MatmulArgs& args) {
  if (!has_float_shift(args)) return 0;
  const int log2 = log2_group_blocks(args);
  return ceil_div(args.k, 128) * (log2 == 0 ? 4 : log2 == 1 ? 2 : 1);
}

int64_t split_rows(const MatmulArgs& args) {
  const bool each = args.x_batch_stride != 0;  // of the batch has its own
  const int64_t entry_bytes = args.scratch_bytes / (each ? args.batch : 1), sums = sum_count(args);
  const int64_t rest = kSplitBytes * (kSumAlignment - 1) * (sums + 1);  // what alignment may take
  const int64_t room = (entry_bytes - (sums > 0 ? rest : 0)) / (kSplitBytes * (args.k + 1 + sums));
  if (room >= args.m) return args.m;
  return args.batch > 1 ? 0 : room / kSplitTokens * kSplitTokens;
}

bool supports(const MatmulArgs& args) {
  const bool aligned = args.k % 8 == 0 && args.k > 0 && args.m > 0;
  // Rows of scales and of zeros or offsets are copied in pieces of 16 bytes.
  const bool aligned_scales = args.groups == 1 || args.parameter_row * element_size(args.scale_dtype) % 16 == 0;
  const bool shifted = args.shift_mode != ShiftMode::kNone;
  const bool aligned_shifts =
      args.groups == 1 || !shifted || args.parameter_row * element_size(args.shift_dtype) % 16 == 0;
  if (!aligned || !aligned_scales) return false;
  if (args.shift_mode != ShiftMode::kTable && !aligned_shifts) return false;
  return args.x_dtype != DType::kF32 || split_rows(args) > 0;
}

bool is_plain(const MatmulArgs& args) {
  const bool zeros = args.shift_mode == ShiftMode::kZeros && args.shift_dtype == DType::kU8;
  return args.x_dtype != DType::kF32 && args.scale_dtype == args.x_dtype && args.parameter_row % 8 == 0 &&
         (args.shift_mode == ShiftMode::kNone || (zeros && args.parameter_row % 16 == 0));
}

namespace {

// The tokens of a CTA from which on it rounds weights.
int rounds_from(const MatmulArgs& args) {
  constexpr int kNever = std::numeric_limits<int>::max();
  const bool shifted = args.shift_mode != ShiftMode::kNone;
  if (args.x_dtype == DType::kF32) return kNever;
  if (shifted && args.shift_dtype == args.x_dtype) {
    return args.scale_dtype == args.x_dtype && args.parameter_row % 8 == 0 ? 0 : kNever;
  }
  if (!is_plain(args)) return kNever;
  if (has_small_groups(args)) return args.bits == 4 && (log2_group_blocks(args) == 0 || !shifted) ? 32 : 64;
  return args.bits == 4 ? 72 : 96;
}

}  // namespace

bool rounds(const MatmulArgs& args, int tokens) { return tokens >= rounds_from(args); }

float choose(const MatmulArgs& args, int multiprocessors, const Costs& costs, Config* config, bool whole) {
  const float stages = static_cast<float>(ceil_div(args.k, 128));
  const int log2 = log2_group_blocks(args);
  const float groups = log2 == 0 ? 4.f : log2 == 1 ? 2.f : 1.f;  // that end in a stage
  const bool sums = has_float_shift(args);
  const bool table = args.shift_mode == ShiftMode::kTable;
  const int rounded_from = rounds_from(args);
  const bool any_shape = is_plain(args) || args.x_dtype == DType::kF32 || table;
  const bool alike = args.x_dtype != DType::kF32 && (is_plain(args) || kMostTokens >= rounded_from);
  const float reading =
      static_cast<float>(args.batch * args.n * args.k) * static_cast<float>(args.bits) / 8 / costs.memory;
  int64_t most_tokens = 2 * args.m + 31;  // of more most work would be for other tokens, and is not recorded
  if (sums && rounded_from == 0 && args.m > 8 && args.batch == 1) most_tokens = std::max(most_tokens, kShiftedTokens);
  float least = 0.f;
  const auto compare = [&](const Config& of, float us) {
    if (least > 0.f && us >= least) return;
    least = us;
    *config = of;
  };
  const auto consider = [&](const Cost& cost, float more) {
    if (cost.tokens < costs.one_pass && args.m > cost.tokens) return;  // would read the weights again
    if (cost.tokens > most_tokens) return;
    if (groups > 1.f && cost.group == 0.f) return;
    if (cost.bits != 0 && cost.bits != args.bits) return;
    if (whole && args.n % (64 * cost.warpgroups) != 0) return;
    const int64_t row_tiles = ceil_div(args.n, 64 * cost.warpgroups);
    const int64_t blocks = args.batch * row_tiles * ceil_div(args.m, cost.tokens);
    // Most shapes are out of the question however many CTAs share the inputs: this is the host's time for a product.
    float stage_least = cost.stage;
    if (cost.shared_stage > 0.f) stage_least = std::min(stage_least, 0.5f * cost.shared_stage);
    if (cost.paired > 0.f) stage_least = std::min(stage_least, cost.paired);
    const float work = static_cast<float>(blocks) * stages * (stage_least + more) / static_cast<float>(multiprocessors);
    if (least > 0.f && kSurely * (std::max(work, reading) + cost.start) > least) return;
    for (int j = 0; j < costs.cluster_count; ++j) {
      const ClusterCost& cluster = costs.clusters[j];
      if (cluster.ctas > costs.alone_ctas && cost.shared_stage == 0.f) continue;
      if (cluster.ctas > 1 && !shares_inputs(cost.warpgroups)) continue;
      const int64_t ctas = blocks * cluster.ctas;
      const int64_t places = static_cast<int64_t>(static_cast<float>(multiprocessors) * cluster.share);
      // As few as there are multiprocessors are kept apart, even if clusters then do not all fit.
      const bool shares = cost.shared_stage > 0.f && ctas > multiprocessors;
      const float waves = static_cast<float>(ceil_div(ctas, shares ? 2 * places : places));
      const bool paired = cost.paired > 0.f && cluster.ctas == 1 &&
                          has_pairs(cost.tokens, cost.warpgroups, args.bits, groups > 1.f) &&
                          pairs(blocks, row_tiles, multiprocessors);
      const float stage = shares ? cost.shared_stage + 2.f * more : (paired ? cost.paired : cost.stage) + more;
      const float walking = waves * stages / static_cast<float>(cluster.ctas) * stage;
      const auto of_teams = [&](int teams) {
        return Config{cost.tokens, cost.warpgroups, cluster.ctas, multiprocessors, teams};
      };
      compare(of_teams(1), std::max(walking, reading) + waves * (cost.start + cluster.start));
      const bool teams = costs.team > 0.f && has_teams(cost.tokens) && cost.warpgroups == 2 && cluster.ctas > 1 &&
                         groups == 1.f && alike && args.batch == 1 && 2 * ctas <= places &&
                         team_bytes(blocks, cluster.ctas, cost.tokens) <= args.scratch_bytes;
      if (teams) {
        compare(of_teams(2), std::max(0.5f * walking, reading) + cost.start + cluster.start + costs.team);
      }
    }
    const bool other = args.x_dtype != DType::kF32 && !table && !is_plain(args) && cost.tokens < rounded_from;
    if (whole || other || args.batch > 1 || args.m < costs.even_least) return;
    const int64_t token_tiles = ceil_div(args.m, cost.tokens);
    if (token_tiles > costs.even_tiles) return;
    const bool has_zeros = args.shift_mode == ShiftMode::kZeros, split = args.x_dtype == DType::kF32;
    if (!shares_evenly(cost.tokens, cost.warpgroups, args.bits, groups > 1.f, has_zeros, table, split)) return;
    for (int ctas = 1; ctas <= (cost.shared_stage > 0.f ? 2 : 1); ++ctas) {  // of a multiprocessor
      const int places = ctas * multiprocessors;
      if (blocks > places) continue;
      MatmulArgs others = args;
      others.scratch_bytes = even_at(args.scratch_bytes, places, cost.tokens, cost.warpgroups);
      if (others.scratch_bytes < 0 || (split && split_rows(others) < args.m)) continue;
      const int64_t parts = ceil_div(places, blocks);  // of a tile
      const float each = static_cast<float>(ceil_div(blocks * static_cast<int64_t>(stages), places));
      const float stage = ctas > 1 ? cost.shared_stage + 2.f * more : cost.stage + more;
      const float walking = each * stage * (args.bits == 8 ? costs.even_eight_bits : 1.f);
      const float meeting =
          costs.even * static_cast<float>(token_tiles) + costs.even_token * static_cast<float>(parts * cost.tokens);
      compare({cost.tokens, cost.warpgroups, kEvenly, multiprocessors, ctas},
              std::max(walking, reading) + cost.start + meeting);
    }
  };
  for (int i = 0; i < costs.shape_count; ++i) {
    const Cost& cost = costs.shapes[i];
    if (costs.rounded_count > 0 && cost.tokens >= rounded_from) continue;
    if (!any_shape && cost.sum == 0.f) continue;
    consider(cost, (groups - 1.f) * cost.group + (sums ? groups * cost.sum : 0.f));
  }
  const bool zeros = args.shift_mode == ShiftMode::kZeros;
  const float halves = args.x_dtype != DType::kF16 ? 0.f : zeros ? 2.f : 1.f;
  for (int i = 0; i < costs.rounded_count; ++i) {
    const Cost& cost = costs.rounded[i];
    if (cost.tokens < rounded_from || (zeros && cost.sum == 0.f)) continue;
    consider(cost, (groups > 1.f ? cost.group : 0.f) + (zeros ? cost.sum : 0.f) + halves * cost.half);
  }
  return least;
}

cudaError_t launch(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  return args.x_dtype == DType::kF16    ? launch_f16(args, config, stream)
         : args.x_dtype == DType::kBF16 ? launch_bf16(args, config, stream)
                                        : launch_f32(args, config, stream);
}

}  // namespace wonly::warpgroup
