// Which kernel computes which transposed product, of one weight or of experts.
#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <utility>

#include "cuda/costs.h"
#include "cuda/device.h"
#include "cuda/matmul_transposed.h"
#include "cuda/ragged.h"
#include "layout.h"

namespace wonly {
namespace {

// Of all multiprocessors, those that clusters of that many CTAs can use: a cluster lies in one part of the chip.
constexpr float kClusterShare[] = {1.f, 1.f, 1.f, 39 * 3 / 132.f, 30 * 4 / 132.f, 0.f, 17 * 6 / 132.f};

int most_clusters(int ctas, const Device& device) {
  return static_cast<int>(static_cast<float>(device.multiprocessors) * kClusterShare[ctas]) / ctas;
}

// From which on two CTAs for a strip are faster than one, where weights wait for instructions.
constexpr int64_t kSharedOutputs = 4096;

// Whether choices of types, a look-up or the three pieces of a number keep weights waiting.
bool waits_for_instructions(const MatmulArgs& args) {
  return args.x_dtype == DType::kF32 || args.shift_mode == ShiftMode::kTable || args.scale_dtype != args.x_dtype;
}

constexpr int64_t kAnyOutputs = std::numeric_limits<int64_t>::max();

// How the strips of a transposed_stream lie: a cluster of CTAs for each, so many warps of a CTA, and CTAs that a
// multiprocessor has at once; for so many outputs, and tiles of tokens.
struct Sharing {
  int cluster, warps, ctas;
  int64_t least_outputs = 0, most_outputs = kAnyOutputs;
  int least_tiles = 0;
};

// CTAs of all the warps that there are, for `blocks` strips of inputs and tiles of tokens.
Sharing usual_sharing(const MatmulArgs& args, int token_tiles, int64_t blocks, const Device& device) {
  Sharing usual{1, transposed_stream::kMostWarps, 1};
  const bool clusters = device.architecture >= 90;
  if (clusters) {  // as many as leave every CTA a multiprocessor, and all fit at once
    usual.cluster = static_cast<int>(std::clamp<int64_t>(device.multiprocessors / std::max<int64_t>(blocks, 1), 1, 4));
    while (usual.cluster > 1 && blocks > most_clusters(usual.cluster, device)) --usual.cluster;
  }
  // CTAs that could share a multiprocessor do so, even where there is one for each.
  const int most_ctas = transposed_stream::most_ctas(token_tiles, element_size(args.x_dtype));
  bool alone = blocks * usual.cluster <= device.multiprocessors;
  if (clusters && alone && usual.cluster == 1 && most_ctas > 1 && args.n >= kSharedOutputs &&
      waits_for_instructions(args)) {  // eight warps do not hide what each of them waits for
    usual.cluster = 2;
    alone = false;
  }
  if (!alone) usual.ctas = most_ctas;
  return usual;
}

// Others, of fewer warps, so that more CTAs are there at once and strips are dealt out more evenly, or in fewer waves.
// Sums of a cluster take longer than few outputs, and of many outputs memory is what all wait for.
constexpr int64_t kFewOutputs = 2560, kManyOutputs = 4096;
constexpr Sharing kSharings[] = {{4, 4, 3, kFewOutputs},
                                 {2, 4, 3, kFewOutputs},
                                 {2, 3, 5, kFewOutputs},
                                 {1, 4, 3},
                                 {1, 4, 4, 0, kManyOutputs},
                                 {1, 2, 8, 0, kManyOutputs},
                                 {3, 4, 2, kManyOutputs, kAnyOutputs, 4}};

bool fits(const MatmulArgs& args, int token_tiles, int64_t blocks, const Sharing& sharing, const Device& device) {
  const int most_ctas = transposed_stream::most_ctas(token_tiles, element_size(args.x_dtype));
  if (sharing.warps * sharing.ctas > transposed_stream::kMostWarps * most_ctas) return false;
  if (args.n < sharing.least_outputs || args.n > sharing.most_outputs || token_tiles < sharing.least_tiles)
    return false;
  const int64_t ctas = blocks * sharing.cluster, places = int64_t{device.multiprocessors} * sharing.ctas;
  // No fewer warps to a multiprocessor than one CTA usually has, and no second wave of long ones.
  if (ceil_div(ctas, device.multiprocessors) * sharing.warps < transposed_stream::kMostWarps) return false;
  if (ctas > places && (sharing.cluster > 1 || args.n > kManyOutputs)) return false;
  constexpr float kTaken = 0.85f;  // of all places, up to which clusters of four fit
  return sharing.cluster <= 2 || static_cast<float>(ctas) <= kTaken * static_cast<float>(places);
}

// Microseconds, for one tile of tokens and for more: a wave, a stage for each warp that a multiprocessor has and what
// its warp waits for besides, and sums of a cluster. Of a last wave at least such a part is added to those before, as
// it begins before they end; all of it where it has a CTA for 30% of the multiprocessors (docs/performance.md, log
// 182).
struct StreamCost {
  float wave, stage, waiting, cluster, least_of_last;
  float of_eight_bits, of_instructions, waiting_for_instructions;  // more
};
constexpr StreamCost kStreamCosts[] = {{3.1f, 0.056f, 0.16f, 0.3f, 0.6f, 0.047f, 0.f, 0.55f},
                                       {2.7f, 0.084f, 0.2f, 1.f, 0.35f, 0.036f, 0.022f, 0.f}};
constexpr float kOfLast = 2.2f;
constexpr float kLessTime = 0.95f;  // for which another sharing is taken

// What differs between them.
float stream_us(const MatmulArgs& args, int token_tiles, int64_t blocks, const Sharing& sharing, const Device& device) {
  StreamCost cost = kStreamCosts[token_tiles > 1];
  if (args.bits == 8) cost.stage += cost.of_eight_bits;
  if (args.shift_mode != ShiftMode::kTable && waits_for_instructions(args)) {
    cost.stage += cost.of_instructions;
    cost.waiting += cost.waiting_for_instructions;
  }
  const int64_t stages = ceil_div(args.n, transposed_stream::kStageN);
  const auto each = static_cast<float>(ceil_div(stages, sharing.cluster * sharing.warps));  // of a warp
  const auto wave = [&](int64_t ctas) {
    return cost.wave + each * (static_cast<float>(ctas * sharing.warps) * cost.stage + cost.waiting);
  };
  const int64_t ctas = blocks * sharing.cluster, places = int64_t{device.multiprocessors} * sharing.ctas;
  const int64_t waves = ctas / places, rest = ctas % places;
  float us = static_cast<float>(waves) * wave(sharing.ctas) + (sharing.cluster > 1 ? cost.cluster : 0.f);
  if (rest > 0) {
    const float share = static_cast<float>(rest) / static_cast<float>(device.multiprocessors);
    const float part = waves == 0 ? 1.f : std::min(1.f, cost.least_of_last + kOfLast * share);
    us += part * wave(ceil_div(rest, device.multiprocessors));
  }
  return us;
}

// Calls `launch(config)` with the fastest sharing that has room for its stages; in the usual one with less shared
// memory than the tuned device has again with all that there is, then with fewer warps, until two stages fit. `known`:
// as many blocks as there are, and not at least.
template <typename Launch>
cudaError_t launch_stream(const MatmulArgs& args, int token_tiles, int64_t blocks, bool known, const Device& device,
                          Launch&& launch) {
  const auto config_of = [&](const Sharing& sharing) {
    return transposed_stream::Config{token_tiles, sharing.warps, sharing.cluster, shared_share(device, sharing.ctas)};
  };
  const Sharing usual = usual_sharing(args, token_tiles, blocks, device);
  if (device.architecture >= 90) {
    // This is the host's time for a gradient: most do not fit, and are not asked what they take.
    const float most = kLessTime * stream_us(args, token_tiles, blocks, usual, device);
    std::array<std::pair<float, const Sharing*>, std::size(kSharings)> others;
    auto end = others.begin();
    for (const Sharing& other : kSharings) {
      if ((other.cluster > 1 && !known) || !fits(args, token_tiles, blocks, other, device)) continue;
      const float us = stream_us(args, token_tiles, blocks, other, device);
      if (us <= most) *end++ = {us, &other};
    }
    std::sort(others.begin(), end);
    for (auto other = others.begin(); other != end; ++other) {
      const cudaError_t error = launch(config_of(*other->second));
      if (error != cudaErrorInvalidConfiguration) return error;
    }
  }
  transposed_stream::Config config = config_of(usual);
  const int all = shared_share(device, 1);
  cudaError_t error = launch(config);
  while (error == cudaErrorInvalidConfiguration && (config.shared_bytes < all || config.warps > 1)) {
    if (config.shared_bytes == all) config.warps /= 2;
    config.shared_bytes = all;
    error = launch(config);
  }
  return error;
}

// Microseconds of transposed_warpgroup: a stage, what a block adds, the kernel, and what it takes to add the sums of a
// block that is split in two, or in more; with weights in shared memory, with float32 dy, and with weights in
// registers.
struct WarpgroupCost {
  int tokens;
  float stage, block, sums_of_two, sums;
};
constexpr WarpgroupCost kSharedCosts[] = {
    {64, 0.345f, 4.0f, 1.0f, 1.9f}, {128, 0.42f, 3.6f, 1.8f, 3.4f}, {256, 0.645f, 3.0f, 3.0f, 0.f}};
// Stages of symmetric codes, with zeros, with offsets, and of tables.
struct RegisterCost {
  int tokens;
  float symmetric, zeros, offsets, table, block, sums_of_two, sums;
};
constexpr RegisterCost kRegisterCosts[] = {{32, 0.445f, 0.44f, 0.465f, 0.49f, 4.2f, 1.1f, 1.3f},
                                           {64, 0.313f, 0.375f, 0.353f, 0.4f, 3.0f, 0.9f, 1.6f},
                                           {128, 0.765f, 0.89f, 0.855f, 0.96f, 2.6f, 1.6f, 3.0f},
                                           {256, 0.645f, 0.716f, 0.7f, 0.744f, 2.0f, 2.6f, 0.f}};
// What a stage takes at least: the thread that copies, and a row of scales, zeros or offsets.
constexpr float kCopy = 0.237f, kRowCopy = 0.021f;
constexpr WarpgroupCost kFloat32Costs[] = {{64, 0.62f, 4.0f, 9.0f, 12.0f}, {128, 0.94f, 4.0f, 8.0f, 14.0f}};
constexpr float kWarpgroupStart = 0.5f;
constexpr int kSplits[] = {2, 3, 4, 6};
constexpr int kLeastOutputs = 256;  // of a CTA

WarpgroupCost cost_in_registers(const MatmulArgs& args, const RegisterCost& cost) {
  const bool zeros = args.shift_mode == ShiftMode::kZeros, offsets = args.shift_mode == ShiftMode::kOffsets;
  const float stage = zeros                                  ? cost.zeros
                      : offsets                              ? cost.offsets
                      : args.shift_mode == ShiftMode::kTable ? cost.table
                                                             : cost.symmetric;
  const int log2 = log2_group_blocks(args), blocks = transposed_warpgroup::block_inputs(cost.tokens, true) / 32;
  const int rows = (log2 < 0 ? 1 : std::max(1, blocks >> log2)) * (zeros || offsets ? 2 : 1);
  return {cost.tokens, std::max(stage, kCopy + kRowCopy * static_cast<float>(rows)), cost.block, cost.sums_of_two,
          cost.sums};
}

transposed_warpgroup::Config warpgroup_config(const MatmulArgs& args, const Device& device) {
  const bool float32 = args.x_dtype == DType::kF32, in_registers = transposed_warpgroup::in_registers(args);
  transposed_warpgroup::Config config{};
  float least = 0.f;
  const auto consider = [&](const transposed_warpgroup::Config& other, float us) {
    if (least == 0.f || us < least) {
      least = us;
      config = other;
    }
  };
  const auto consider_blocks = [&](const WarpgroupCost& cost) {
    const int64_t stages = ceil_div(args.n, transposed_warpgroup::stage_outputs(cost.tokens, in_registers));
    const int64_t token_blocks = args.batch * ceil_div(args.m, cost.tokens);
    const int64_t k_blocks = ceil_div(args.k, transposed_warpgroup::block_inputs(cost.tokens, in_registers));
    const auto walk = [&](int64_t count) { return static_cast<float>(count) * cost.stage + cost.block; };
    for (int partners = 1; partners <= (k_blocks > 1 ? 2 : 1); ++partners) {
      const int clusters = device.multiprocessors / partners;
      if (clusters == 0) continue;
      const int64_t groups = token_blocks * ceil_div(k_blocks, partners), rest = groups % clusters;
      const float waves = static_cast<float>(groups / clusters) * walk(stages) + kWarpgroupStart;
      consider({cost.tokens, partners, partners, clusters, false}, waves + (rest > 0 ? walk(stages) : 0.f));
      if (partners == 2 && rest > 0 && 2 * rest <= clusters && args.n >= 2 * kLeastOutputs) {
        consider({cost.tokens, 2, 2, clusters, true}, waves + walk(ceil_div(stages, 2)) + cost.sums_of_two);
      }
    }
    for (const int cluster : kSplits) {
      const int clusters = most_clusters(cluster, device);
      if (token_blocks * k_blocks > clusters || args.n < cluster * kLeastOutputs) continue;
      if (cost.tokens == 256 && cluster > 2) continue;  // whose sums shared memory does not hold
      consider({cost.tokens, cluster, 1, clusters, true},
               kWarpgroupStart + walk(ceil_div(stages, cluster)) + (cluster == 2 ? cost.sums_of_two : cost.sums));
    }
  };
  if (float32) {
    for (const WarpgroupCost& cost : kFloat32Costs) consider_blocks(cost);
  } else if (in_registers) {
    for (const RegisterCost& cost : kRegisterCosts) {
      if (cost.tokens > transposed_warpgroup::most_register_tokens(args.bits)) continue;
      consider_blocks(cost_in_registers(args, cost));
    }
  } else {
    for (const WarpgroupCost& cost : kSharedCosts) consider_blocks(cost);
  }
  return config;
}

// Rows of a block of experts' 16-bit rows. Routing that is nearly even has experts with a quarter more rows than
// others, for which a second block would take as long as the first; of 256 rows as many are multiplied as there are
// (docs/performance.md, ragged list, 15 and 16).
int experts_rows(const RaggedArgs& args, const Device& device) {
  const auto holds = [&](int rows) { return 5 * args.m <= 4 * rows * args.experts; };
  // With weights in registers two blocks of 64 rows take little longer than one of 128, but where they are another wave
  // of few.
  const int64_t blocks = args.experts * ceil_div(args.product.k, transposed_warpgroup::kLowInputs);
  const bool low = transposed_warpgroup::experts_in_registers(args.product) && args.m <= 64 * args.experts &&
                   blocks > 4 * device.multiprocessors;
  return low || holds(64) ? 64 : holds(128) ? 128 : 256;
}

// Tiles of tokens that share a pass over one of so many weights. Experts with few outputs take more passes of fewer
// rows each, which more CTAs have at once; so do those of float32, whose kernel for more leaves no room for a second
// CTA.
int stream_tiles(const MatmulArgs& args, int64_t tokens, int64_t weights, bool experts) {
  constexpr int kLone = 24;  // rows up to which passes of eight are no slower with any outputs
  const bool passes = experts && args.n <= kManyOutputs, table = args.shift_mode == ShiftMode::kTable;
  if (tokens <= 8 * weights) return 1;
  if (experts && args.x_dtype == DType::kF32 && (passes || tokens <= kLone * weights)) return 1;
  return tokens <= 16 * weights || table || passes ? transposed_stream::kTableTiles : 4;
}

// Whether the streaming kernel for more than two tiles of tokens knows the scheme.
bool is_known_for_more(const MatmulArgs& args) {
  return args.shift_mode == ShiftMode::kNone && args.scale_dtype == args.x_dtype && log2_group_blocks(args) != 0;
}

// Rows up to which the streaming kernel is faster. Of more float32 dy float zeros and offsets are a dense product of
// their own (primitives/matmul.py).
int64_t most_streamed(const MatmulArgs& args, const Device& device) {
  const bool table = args.shift_mode == ShiftMode::kTable;
  if (args.x_dtype == DType::kF32) {
    return has_small_groups(args) ? costs::kTransposedStreamTokens : costs::kTransposedStreamTokensFloat32;
  }
  // More where all strips run at once; a table has two passes.
  const int64_t strips = args.batch * ceil_div(args.k, transposed_stream::kStripK);
  if ((table || is_known_for_more(args)) && strips * (table ? 2 : 1) <= device.multiprocessors) {
    return args.bits == 4 ? costs::kTransposedStreamWaveTokens : costs::kTransposedStreamWaveTokensOfEightBits;
  }
  return costs::kTransposedStreamTokens;
}

// The same of an expert's, were they spread evenly.
int64_t most_streamed_of_expert(const MatmulArgs& args) {
  if (args.x_dtype == DType::kF32) {
    return has_float_shift(args) ? costs::kTransposedStreamRowsOfExpertShiftedFloat32
                                 : costs::kTransposedStreamRowsOfExpertFloat32;
  }
  return args.bits == 8 && is_known_for_more(args) ? costs::kTransposedStreamRowsOfExpertOfEightBits
                                                   : costs::kTransposedStreamRowsOfExpert;
}

}  // namespace

cudaError_t launch_matmul_transposed(const MatmulArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(&device); error != cudaSuccess) return error;
  if (device.architecture < 80) return cudaErrorNotSupported;
  const bool float32 = args.x_dtype == DType::kF32;
  const bool streams = transposed_stream::supports(args);
  const bool many = args.m > most_streamed(args, device);
  if (device.architecture == 90 && (many || !streams) && transposed_warpgroup::supports(args) &&
      (!float32 || (!has_float_shift(args) && transposed_warpgroup::float32_rows(args) > 0))) {
    if (!float32) return transposed_warpgroup::launch(args, warpgroup_config(args, device), stream);
    // As many at a time as the scratch holds, in even parts.
    const int64_t parts = ceil_div(args.m, transposed_warpgroup::float32_rows(args));
    const int64_t rows =
        ceil_div(args.m, parts * transposed_warpgroup::kFloat32Block) * transposed_warpgroup::kFloat32Block;
    MatmulArgs some = args;
    cudaError_t error = cudaSuccess;
    for (int64_t first = 0; first < args.m && error == cudaSuccess; first += rows) {
      some.m = std::min(rows, args.m - first);
      some.x = static_cast<const float*>(args.x) + first * args.n;
      some.y = static_cast<float*>(args.y) + first * args.k;
      error = transposed_warpgroup::launch_f32(some, warpgroup_config(some, device), stream);
    }
    return error;
  }
  if (!streams) return cudaErrorNotSupported;
  const int tiles = stream_tiles(args, args.m, 1, false);
  const int64_t blocks = args.batch * ceil_div(args.k, transposed_stream::kStripK) * ceil_div(args.m, 8 * tiles);
  return launch_stream(args, tiles, blocks, true, device, [&](const transposed_stream::Config& config) {
    switch (args.x_dtype) {
      case DType::kF16:
        return transposed_stream::launch_f16(args, config, stream);
      case DType::kBF16:
        return transposed_stream::launch_bf16(args, config, stream);
      default:
        return transposed_stream::launch_f32(args, config, stream);
    }
  });
}

cudaError_t launch_ragged_matmul_transposed(const RaggedArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(&device); error != cudaSuccess) return error;
  if (device.architecture < 80) return cudaErrorNotSupported;
  const bool ids = args.row_mode == RowMode::kIds;
  const int shared = shared_share(device, 1);
  RaggedArgs rows = args;  // those of dy have as many numbers as there are outputs
  rows.product.k = args.product.n;
  ragged::Work work;
  const bool float32 = args.product.x_dtype == DType::kF32;
  const int64_t few = most_streamed_of_expert(args.product);
  const bool streams = transposed_stream::supports(args.product);
  const int64_t bytes =
      float32 ? transposed_warpgroup::float32_bytes(args.product, args.m,
                                                    transposed_warpgroup::parameter_entries(args.product, args.experts))
              : 0;
  if (device.architecture == 90 && (args.m > few * args.experts || !streams) &&
      transposed_warpgroup::supports(args.product) &&
      (float32 ? ragged::room_behind_plan(args) >= bytes : !ids || ragged::can_order(rows))) {
    const int tokens = !float32 ? experts_rows(args, device) : args.m <= 64 * args.experts ? 64 : 128;
    if (cudaError_t error = ragged::plan(args, tokens, ids, shared, stream, &work); error != cudaSuccess) return error;
    MatmulArgs product = args.product;
    if (float32) {
      product.scratch = ragged::ordered_rows(args);
      return transposed_warpgroup::launch_ragged_f32(product, work, device.multiprocessors, stream);
    }
    if (ids) {
      if (cudaError_t error = ragged::order(rows, work, &product.x, stream); error != cudaSuccess) return error;
    }
    return transposed_warpgroup::launch_ragged(product, work, device.multiprocessors, stream);
  }
  if (!streams) return cudaErrorNotSupported;
  const int tiles = stream_tiles(args.product, args.m, args.experts, true);
  if (cudaError_t error = ragged::plan(args, 8 * tiles, false, shared, stream, &work); error != cudaSuccess) {
    return error;
  }
  // The tiles that there will be at least, if rows have different experts.
  const int64_t least = std::max(std::min(args.m, args.experts), ceil_div(args.m, 8 * tiles));
  const int64_t blocks = least * ceil_div(args.product.k, transposed_stream::kStripK);
  return launch_stream(args.product, tiles, blocks, false, device, [&](const transposed_stream::Config& config) {
    switch (args.product.x_dtype) {
      case DType::kF16:
        return transposed_stream::launch_ragged_f16(args.product, work, config, stream);
      case DType::kBF16:
        return transposed_stream::launch_ragged_bf16(args.product, work, config, stream);
      default:
        return transposed_stream::launch_ragged_f32(args.product, work, config, stream);
    }
  });
}

namespace transposed_stream {

bool supports(const MatmulArgs& args) {
  // Of tables numbers of 16 bits: pairs of them, and of fp16, whose products with other scales may have no exponent.
  return args.shift_mode != ShiftMode::kTable || args.x_dtype == DType::kBF16 ||
         (args.x_dtype == DType::kF16 && args.scale_dtype == DType::kF16);
}

}  // namespace transposed_stream

namespace transposed_warpgroup {

bool supports(const MatmulArgs& args) {
  if (args.n % 8 != 0) return false;  // rows of dy are what the copy engine takes: multiples of 16 bytes
  return args.x_dtype != DType::kF32 || args.shift_mode != ShiftMode::kTable || args.shift_batch_stride == 0;
}

int64_t float32_bytes(const MatmulArgs& args, int64_t rows, int64_t entries) {
  const int64_t of_output = 2 * parameter_rows(has_float_shift(args));
  return rows * (4 * args.n + 4) + entries * args.groups * (4 + ceil_div(args.n, kTileN) * kTileN * of_output);
}

int64_t float32_rows(const MatmulArgs& args) {
  const int64_t entries = args.x_batch_stride == 0 ? 1 : args.batch;
  const int64_t room = args.scratch_bytes - float32_bytes(args, 0, parameter_entries(args, args.batch));
  const int64_t rows = room / float32_bytes(args, entries, 0);  // a row of every entry
  if (rows >= args.m) return args.m;
  return args.batch > 1 ? 0 : rows / kFloat32Block * kFloat32Block;
}

namespace {

// Scales, and zeros or offsets, are such as the kernel with weights in registers takes.
bool has_own_parameters(const MatmulArgs& args) {
  // Rows of parameters are copied 16 bytes at a time.
  const auto aligned = [](const void* array) { return reinterpret_cast<uintptr_t>(array) % 16 == 0; };
  if (args.x_dtype == DType::kF32 || args.scale_dtype != args.x_dtype || !aligned(args.scales)) return false;
  if (args.shift_mode == ShiftMode::kNone || args.shift_mode == ShiftMode::kTable) return true;
  if (!aligned(args.shift)) return false;
  return args.shift_mode == ShiftMode::kOffsets ? args.shift_dtype == args.x_dtype
                                                : args.shift_dtype == DType::kU8 && args.n % 16 == 0;
}

}  // namespace

bool in_registers(const MatmulArgs& args) {
  // Of eight bits and more rows weights in shared memory are mostly faster, by up to 15%.
  if (args.bits == 8 && args.m > most_register_tokens(8)) return false;
  // Blocks of 64 tokens, of four bits and one zero for many inputs, are 2 to 5% faster there.
  const bool shared =
      args.bits == 4 && args.shift_mode == ShiftMode::kZeros && args.m > 32 && args.m <= 64 && !has_small_groups(args);
  return !shared && has_own_parameters(args);
}

bool experts_in_registers(const MatmulArgs& args) { return args.bits == 4 && has_own_parameters(args); }

}  // namespace transposed_warpgroup

}  // namespace wonly
