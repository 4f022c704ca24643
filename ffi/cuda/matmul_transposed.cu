// Which kernel computes which transposed product, of one weight or of experts.
#include <algorithm>

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

// From which on two CTAs for a strip of float32, or with a table, are faster than one.
constexpr int64_t kSharedOutputs = 4096;

// For `blocks` strips of inputs and tiles of tokens.
transposed_stream::Config stream_config(int token_tiles, DType dy_type, bool table, int64_t blocks, int64_t outputs,
                                        const Device& device) {
  transposed_stream::Config config{};
  config.token_tiles = token_tiles;
  config.warps = transposed_stream::kMostWarps;
  config.cluster = 1;
  if (device.architecture >= 90) {  // as many as leave every CTA a multiprocessor, and all fit at once
    config.cluster = static_cast<int>(std::clamp<int64_t>(device.multiprocessors / std::max<int64_t>(blocks, 1), 1, 4));
    while (config.cluster > 1 && blocks > most_clusters(config.cluster, device)) --config.cluster;
  }
  // CTAs that could share a multiprocessor do so, even where there is one for each.
  bool alone = blocks * config.cluster <= device.multiprocessors;
  const int size = dy_type == DType::kF32 ? 4 : 2;
  if (device.architecture >= 90 && (table || (size == 4 && token_tiles == 1)) && config.cluster == 1 && alone &&
      outputs >= kSharedOutputs) {  // bound by instructions: eight warps do not hide what each of them waits for
    config.cluster = 2;
    alone = false;
  }
  config.shared_bytes = shared_share(device, alone ? 1 : transposed_stream::most_ctas(token_tiles, size));
  return config;
}

// Calls `launch(config)`; with less shared memory than the tuned device has again with all that there is, then with
// fewer warps, until two stages fit.
template <typename Launch>
cudaError_t launch_fitting(transposed_stream::Config config, const Device& device, Launch&& launch) {
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

// Tiles of tokens that share a pass over one of so many weights.
int stream_tiles(int64_t tokens, int64_t weights, bool table) {
  return tokens <= 8 * weights ? 1 : tokens <= 16 * weights || table ? transposed_stream::kTableTiles : 4;
}

// Rows up to which the streaming kernel is faster. Of more float32 dy float zeros and offsets are a dense product of
// their own (primitives/matmul.py).
int64_t most_streamed(const MatmulArgs& args, const Device& device) {
  const bool table = args.shift_mode == ShiftMode::kTable;
  if (args.x_dtype == DType::kF32) {
    return has_small_groups(args) ? costs::kTransposedStreamTokens : costs::kTransposedStreamTokensFloat32;
  }
  // More where its kernel for them knows the scheme, and all strips run at once; a table has two passes.
  const bool symmetric = args.shift_mode == ShiftMode::kNone && args.scale_dtype == args.x_dtype;
  const int64_t strips = args.batch * ceil_div(args.k, transposed_stream::kStripK);
  if ((table || (symmetric && log2_group_blocks(args) != 0)) && strips * (table ? 2 : 1) <= device.multiprocessors) {
    return args.bits == 4 ? costs::kTransposedStreamWaveTokens : costs::kTransposedStreamWaveTokensOfEightBits;
  }
  return costs::kTransposedStreamTokens;
}

}  // namespace

cudaError_t launch_matmul_transposed(const MatmulArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(&device); error != cudaSuccess) return error;
  if (device.architecture < 80) return cudaErrorNotSupported;
  const bool float32 = args.x_dtype == DType::kF32;
  const bool streams = transposed_stream::supports(args), table = args.shift_mode == ShiftMode::kTable;
  const bool many = args.m > most_streamed(args, device);
  if (device.architecture == 90 && (many || !streams) && transposed_warpgroup::supports(args) &&
      (!float32 || (!has_float_shift(args) && transposed_warpgroup::float32_rows(args) > 0))) {
    if (!float32) {
      const transposed_warpgroup::Config config = warpgroup_config(args, device);
      return args.x_dtype == DType::kF16 ? transposed_warpgroup::launch_f16(args, config, stream)
                                         : transposed_warpgroup::launch_bf16(args, config, stream);
    }
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
  const int tiles = stream_tiles(args.m, 1, table);
  const int64_t blocks = args.batch * ceil_div(args.k, transposed_stream::kStripK) * ceil_div(args.m, 8 * tiles);
  return launch_fitting(stream_config(tiles, args.x_dtype, table, blocks, args.n, device), device,
                        [&](const transposed_stream::Config& config) {
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
  // The same for rows of an expert, were they spread evenly.
  const int64_t few = !float32                        ? costs::kTransposedStreamRowsOfExpert
                      : has_float_shift(args.product) ? costs::kTransposedStreamRowsOfExpertShiftedFloat32
                                                      : costs::kTransposedStreamRowsOfExpertFloat32;
  const bool streams = transposed_stream::supports(args.product);
  const bool table = args.product.shift_mode == ShiftMode::kTable;
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
    const bool f16 = product.x_dtype == DType::kF16;
    const auto launch = f16 ? transposed_warpgroup::launch_ragged_f16 : transposed_warpgroup::launch_ragged_bf16;
    return launch(product, work, device.multiprocessors, stream);
  }
  if (!streams) return cudaErrorNotSupported;
  const int tiles = stream_tiles(args.m, args.experts, table);
  if (cudaError_t error = ragged::plan(args, 8 * tiles, false, shared, stream, &work); error != cudaSuccess) {
    return error;
  }
  // The tiles that there will be at least, if rows have different experts.
  const int64_t least = std::max(std::min(args.m, args.experts), ceil_div(args.m, 8 * tiles));
  const int64_t blocks = least * ceil_div(args.product.k, transposed_stream::kStripK);
  return launch_fitting(stream_config(tiles, args.product.x_dtype, table, blocks, 0, device), device,
                        [&](const transposed_stream::Config& config) {
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
