#include <algorithm>

#include "cuda/costs.h"
#include "cuda/matmul_resident.h"
#include "cuda/matmul_warpgroup.h"
#include "layout.h"

namespace wonly::resident {
namespace {

constexpr int kRowBytes = 128;            // of activations, half a stage of a token
constexpr int kMostTiles = 16;            // of tokens
constexpr int64_t kTiledBytes = 1 << 23;  // of weights that several tiles read; more were not measured
constexpr int64_t kMostInputs = 1 << 20;  // whose activations would fit no cluster's shared memory
constexpr int kTurnRows = kShiftRows * kShiftWarps / (kMostPassAtoms / 2);  // of sums, of all teams that add those

// Whether activations are of 16 bits, and scales, and float zeros or offsets, of their type.
bool has_own_types(const MatmulArgs& args) {
  return args.x_dtype != DType::kF32 && args.scale_dtype == args.x_dtype &&
         (!has_float_shift(args) || args.shift_dtype == args.x_dtype);
}

// And there is no table.
bool is_alike(const MatmulArgs& args) { return has_own_types(args) && args.shift_mode != ShiftMode::kTable; }

// Whether there are kernels of few blocks.
bool has_few_blocks(const MatmulArgs& args) {
  return args.m <= 8 && args.shift_mode != ShiftMode::kTable &&
         (is_alike(args) || !has_small_groups(args) || has_float_shift(args));
}

// Rows of sums of a stage's activations.
int stage_rows(const MatmulArgs& args) { return has_small_groups(args) ? 4 >> log2_group_blocks(args) : 1; }

// Whether there is a kernel in which pieces of the activations take turns, for where all have no room, and a warp has
// more blocks.
bool has_turns(const MatmulArgs& args, const Config& config) {
  return config.pass_atoms == kMostPassAtoms && args.m <= 8 && is_alike(args);
}

}  // namespace

int blocks_of(const MatmulArgs& args, const Config& config) {
  const int64_t stages = ceil_div(ceil_div(args.k, kStageInputs), config.cluster);
  if (!has_few_blocks(args)) return 0;
  if (ceil_div(args.n, kAtomN) > int64_t{config.parts} * config.pass_atoms) return 0;
  const int64_t blocks = ceil_div(stages * config.pass_atoms, ahead(args.bits) * kWarps);
  return blocks <= 2 ? static_cast<int>(blocks) : 0;
}

Layout layout(const MatmulArgs& args, const Config& config, int shared_bytes) {
  const int64_t atoms = ceil_div(args.n, kAtomN), stages = ceil_div(args.k, kStageInputs);
  Layout layout{};
  layout.atoms_each = static_cast<int>(atoms / config.parts);
  layout.atoms_over = static_cast<int>(atoms % config.parts);
  layout.stages_each = static_cast<int>(ceil_div(stages, config.cluster));
  layout.blocks = blocks_of(args, config);
  // Activations, as many as mma.sync reads, and sums of a strip. float32 ones have two rows each and a factor for a
  // stage, and the last rows that are read may lie behind them.
  const int tokens = args.m > 8 ? 16 : 8, m = static_cast<int>(args.m);
  const bool split = args.x_dtype == DType::kF32;
  const bool shifts = has_float_shift(args) && !shifts_beside_weights(args.bits, layout.blocks);
  const int columns = args.m > 4 ? 16 : 8, rows = split ? 2 * m : tokens;
  const int stage_bytes = rows * kStageInputs * 2, strip_bytes = tokens * kAtomN * 4;
  const int x_at = activations_at(args.shift_mode == ShiftMode::kTable);
  // A pass has a strip for each warp of a team, shared out among the cluster.
  const int shift_teams = shifts ? kShiftWarps / std::max(config.pass_atoms / 2, 1) : 0;
  const int teams = kWarps / config.pass_atoms + shift_teams;
  const int pass_bytes = std::max(config.pass_atoms, config.cluster) * teams * strip_bytes;
  const int passes = static_cast<int>(ceil_div(layout.atoms_each + (layout.atoms_over > 0), config.pass_atoms));
  const auto in_pieces = [&](int log2_piece) {
    layout.log2_piece = log2_piece;
    layout.pieces = static_cast<int>(ceil_div(layout.stages_each, 1 << log2_piece));
  };
  const auto place_sums = [&] {
    layout.sums_at = x_at + (layout.slots << layout.log2_piece) * stage_bytes;
    if (split) layout.sums_at += (columns - rows) * kRowBytes;
    layout.strips_at = layout.sums_at;
    if (shifts) {
      layout.shifts_at = layout.sums_at + sum_rows(layout.stages_each, stage_rows(args)) * (kSumPieces * kSumRowBytes);
      layout.strips_at = layout.shifts_at + kShiftBytes;
    }
    if (split) layout.strips_at += layout.stages_each * columns / 2 * static_cast<int>(sizeof(float));
    layout.passes = std::min(std::max(shared_bytes - layout.strips_at, 0) / pass_bytes, passes);
    layout.bytes = layout.strips_at + layout.passes * pass_bytes;
  };
  const int log2_block = log2_block_stages(args.bits, config.pass_atoms);
  int log2_piece = log2_block;
  while (kMostPieces << log2_piece < layout.stages_each) ++log2_piece;
  in_pieces(log2_piece);
  layout.slots = static_cast<int8_t>(layout.pieces);
  place_sums();
  if (layout.passes > 0 || passes > 1) return layout;
  if (std::max(layout.strips_at, x_at + pass_bytes) <= shared_bytes) {
    layout.bytes = std::max(layout.strips_at, x_at + pass_bytes);
    layout.strips_at = x_at;
    layout.passes = 1;
    layout.over_activations = true;
    return layout;
  }
  if (layout.blocks > 0 || !has_turns(args, config)) return layout;
  in_pieces(log2_block);
  for (int slots = std::min(kMostPieces, layout.pieces - 1); slots >= kLeastSlots; --slots) {
    layout.slots = static_cast<int8_t>(slots);
    place_sums();
    if (layout.passes > 0) break;
  }
  return layout;
}

bool supports(const MatmulArgs& args) {
  const bool split = args.x_dtype == DType::kF32;
  const int tokens = split || has_float_shift(args) ? 8 : kMaxTokens;
  if (args.m <= 0 || args.m > tokens || args.k <= 0 || args.k % 64 != 0) return false;
  if (args.k > kMostInputs) return false;
  if (has_own_types(args)) return true;
  const bool floats = has_float_shift(args);
  if (floats && args.n * element_size(args.shift_dtype) % 4 != 0) return false;
  return !(split && floats) && args.n * element_size(args.scale_dtype) % 4 == 0;
}

bool has_passes(const MatmulArgs& args, const Config& config) {
  const bool few = blocks_of(args, config) > 0;
  if (config.pass_atoms == kMostPassAtoms) return true;
  return args.x_dtype != DType::kF32 && (few || (config.pass_atoms == 2 && is_alike(args)));
}

bool mixes_shifts(const MatmulArgs& args) { return has_float_shift(args) && !has_own_types(args); }

namespace {

// A product of tiles as a batch of products by the same weights.
MatmulArgs as_batch(const MatmulArgs& args, int64_t tiles) {
  MatmulArgs batch = args;
  batch.batch = tiles;
  batch.m = ceil_div(args.m, tiles);
  batch.x_batch_stride = batch.m * args.k;
  batch.qw_batch_stride = batch.scales_batch_stride = batch.shift_batch_stride = batch.bias_batch_stride = 0;
  return batch;
}

float choose_in_one(const MatmulArgs& args, int multiprocessors, int shared_bytes, Config* config) {
  const bool split = args.x_dtype == DType::kF32;
  const Costs& costs = args.bits == 8 ? (split ? costs::kEightBitSplitResident : costs::kEightBitResident)
                                      : (split ? costs::kSplitResident : costs::kResident);
  const int64_t all_stages = ceil_div(args.k, kStageInputs), atoms = ceil_div(args.n, kAtomN);
  const bool small_groups = has_small_groups(args), sums = has_float_shift(args);
  float stage = costs.stages;
  if (small_groups) stage += costs.groups;
  const bool table = args.shift_mode == ShiftMode::kTable;
  if (sums) stage += small_groups ? costs.group_sums : costs.sums;
  if (table) stage += costs.table;
  if (args.m > (split ? 4 : 8)) stage += costs.wide + (table ? costs.wide_table : 0.f);
  float least = 0.f;
  for (const warpgroup::ClusterCost& cluster : costs::kResidentClusters) {
    const int64_t clusters = static_cast<int64_t>(static_cast<float>(multiprocessors) * cluster.share) / cluster.ctas;
    const int64_t parts = std::min(atoms, clusters / args.batch), stages = ceil_div(all_stages, cluster.ctas);
    if (parts == 0) continue;
    const int64_t part_atoms = ceil_div(atoms, parts);
    for (int pass_atoms = kMostPassAtoms; pass_atoms > 0; pass_atoms /= 2) {
      const Config candidate{cluster.ctas, static_cast<int>(parts), pass_atoms};
      const int teams = kWarps / pass_atoms;
      const int64_t passes = ceil_div(part_atoms, pass_atoms), each = ceil_div(stages, teams);
      if (!has_passes(args, candidate)) continue;
      const Layout laid_out = layout(args, candidate, shared_bytes);
      if (laid_out.passes == 0) continue;
      // Of sixteen tokens half passes were faster where they are the only ones.
      if (args.m > 8 && pass_atoms < kMostPassAtoms && passes > 1) continue;
      float us = costs.start + (table ? costs.filling : 0.f) + cluster.start +
                 (costs.passes + (sums ? costs.adding : 0.f)) * static_cast<float>(passes) +
                 costs.turns * static_cast<float>(passes * ceil_div(each, 2 * ahead(args.bits))) +
                 stage * static_cast<float>(passes * each) + costs.rows * static_cast<float>(args.m * each) +
                 costs.words * static_cast<float>(part_atoms * stages) / kWarps;
      us += costs.teams * static_cast<float>(cluster.ctas * (teams - kWarps / kMostPassAtoms));
      if (laid_out.blocks == 1) us -= costs.one_block;
      if (pass_atoms == 1) us -= costs.narrow;
      if (laid_out.blocks == 0 && pass_atoms < kMostPassAtoms) us += costs.half_passes;
      if (laid_out.slots < laid_out.pieces) {
        us += costs.slots * static_cast<float>(passes * each);
        if (sums) us += costs.slot_sums * static_cast<float>(ceil_div(stages * stage_rows(args), kTurnRows));
      }
      if (least == 0.f || us < least) {
        least = us;
        *config = candidate;
      }
    }
  }
  return least;
}

}  // namespace

// Small layers leave most multiprocessors idle, so that more tiles take hardly longer than one, and less than kernels
// for many tokens take to begin (docs/performance.md, log 184). As many tokens as make eight columns, of float32 also
// those that make sixteen.
float choose(const MatmulArgs& args, int multiprocessors, int shared_bytes, Config* config) {
  float least = supports(args) ? choose_in_one(args, multiprocessors, shared_bytes, config) : 0.f;
  if (args.batch > 1 || args.n * args.k * args.bits / 8 > kTiledBytes) return least;
  for (const int tokens : {8, 4}) {
    const int64_t tiles = ceil_div(args.m, tokens);
    if (tiles < 2 || tiles > kMostTiles || (tokens == 4 && args.x_dtype != DType::kF32)) continue;
    const MatmulArgs batch = as_batch(args, tiles);
    if (!supports(batch)) continue;
    Config candidate;
    const float us = choose_in_one(batch, multiprocessors, shared_bytes, &candidate);
    if (us > 0.f && (least == 0.f || us < least)) {
      least = us;
      *config = candidate;
      config->tiles = static_cast<int>(tiles);
    }
  }
  return least;
}

cudaError_t launch(const MatmulArgs& args, const Config& config, int shared_bytes, cudaStream_t stream) {
  const MatmulArgs tiles = config.tiles > 1 ? as_batch(args, config.tiles) : args;
  const int64_t rows = args.batch * args.m;
  return args.bits == 8 ? launch_eight_bits(tiles, rows, config, shared_bytes, stream)
                        : launch_four_bits(tiles, rows, config, shared_bytes, stream);
}

}  // namespace wonly::resident
