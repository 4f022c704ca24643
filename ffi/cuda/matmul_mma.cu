#include "cuda/costs.h"
#include "cuda/matmul_mma.cuh"
#include "cuda/matmul_tiled.h"

namespace wonly::mma {
namespace {

constexpr int kSumThreads = 256;
constexpr int kFours = kCtaOutputs / 4;  // groups of four outputs of a tile

// Adds the sums of the CTAs that shared a tile, four outputs to a thread.
__global__ void __launch_bounds__(kSumThreads) add_splits(const __grid_constant__ Params params, int tokens) {
  const MatmulArgs& args = params.args;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
  const int n = static_cast<int>(index % kFours) * 4;
  const int token = static_cast<int>(index / kFours % tokens), shared_tile = static_cast<int>(index / kFours / tokens);
  if (shared_tile >= params.shared_tiles) return;
  const int of_batch = params.token_tiles * params.output_tiles, tile = params.whole + shared_tile;
  const tiles::Place place = tiles::place_of(tile % of_batch, params.token_tiles, params.output_tiles);
  const int64_t m = static_cast<int64_t>(place.row) * tokens + token, to = place.column * kCtaOutputs + n;
  if (m >= args.m || to >= args.n) return;
  const float* from =
      static_cast<const float*>(args.scratch) + (static_cast<int64_t>(shared_tile) * tokens + token) * kCtaOutputs + n;
  float sums[4] = {};
#pragma unroll 4
  for (int split = 0; split < params.splits; ++split) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    sums[0] += v.x, sums[1] += v.y, sums[2] += v.z, sums[3] += v.w;
    from += static_cast<int64_t>(params.shared_tiles) * tokens * kCtaOutputs;
  }
  finish4(args, tile / of_batch, m, to, sums);
}

}  // namespace

Params params_of(const MatmulArgs& args, const Config& config) {
  Params params{};
  params.args = args;
  params.stages = static_cast<int>(ceil_div(args.k, kStageK));
  params.token_tiles = static_cast<int>(ceil_div(args.m, config.tokens));
  params.output_tiles = static_cast<int>(ceil_div(args.n, kCtaOutputs));
  params.shared_tiles = config.shared_tiles;
  params.splits = config.splits;
  params.whole = static_cast<int>(args.batch * params.token_tiles * params.output_tiles) - config.shared_tiles;
  params.log2_group_blocks = log2_group_blocks(args);
  params.rows_of_16 = args.n * 2 % 16 == 0 && args.n * shift_bytes(args) % 16 == 0;
  params.whole_stages = static_cast<int>(args.k / kStageK);
  params.x_step = static_cast<uint32_t>(32 * args.k);
  params.sets = params.log2_group_blocks == 0 ? 2 : 1;
  params.slot_bytes = scales_at(args.bits, config.tokens) +
                      static_cast<int>(ceil_div(params.sets * kCtaOutputs * (2 + shift_bytes(args)), 128)) * 128;
  for (const int depth : {kShallow, kDeep, kDeepest}) {
    if (depth * params.slot_bytes <= config.shared_bytes) params.depth = depth;
  }
  return params;
}

bool supports(const MatmulArgs& args) {
  const bool shift =
      args.shift_mode == ShiftMode::kNone || args.shift_dtype == DType::kU8 || args.shift_dtype == args.x_dtype;
  return tiled::supports(args) && args.scale_dtype == args.x_dtype && shift && args.shift_mode != ShiftMode::kTable;
}

float choose(const MatmulArgs& args, const Device& device, Config* config) {
  const Costs& costs = costs::kMma;
  const int64_t stages = ceil_div(args.k, kStageK);
  const float reading = static_cast<float>(args.batch * args.n * args.k * args.bits / 8) / costs.memory;
  float least = 0.f;
  for (int i = 0; i < costs.stage_count; ++i) {
    const Costs::Stage& cost = costs.stages[i];
    Config tried{cost.tokens, 0, 1, shared_share(device, kCtas)};
    int64_t places = kCtas * device.multiprocessors;
    if (params_of(args, tried).depth == 0) {
      places = device.multiprocessors;
      tried.shared_bytes = shared_share(device, 1);
      if (params_of(args, tried).depth == 0) continue;
    }
    const int64_t tiles = args.batch * ceil_div(args.m, cost.tokens) * ceil_div(args.n, kCtaOutputs);
    const int64_t waves = tiles / places, rest = tiles % places;
    const auto wave_us = [&](int64_t ctas, int splits) {
      const float stage = ctas > device.multiprocessors ? cost.shared : cost.alone;
      return costs.wave + static_cast<float>(stages) / static_cast<float>(splits) * stage;
    };
    for (int splits = 1; splits <= costs.most_splits; ++splits) {
      tried.splits = splits;
      tried.shared_tiles = splits == 1 ? 0 : static_cast<int>(rest);
      if (splits > 1 && (rest == 0 || rest * splits > places || stages < splits * costs.least_stages ||
                         scratch_bytes(tried) > args.scratch_bytes)) {
        break;
      }
      float us = static_cast<float>(waves) * wave_us(places, 1);
      if (rest > 0) us += wave_us(rest * splits, splits);
      us = costs.start + std::max(us, reading);
      if (splits > 1) us += costs.sums + static_cast<float>(scratch_bytes(tried)) / costs.sum_bytes;
      if (least == 0.f || us < least) {
        least = us;
        *config = tried;
      }
    }
  }
  return least;
}

cudaError_t launch(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  if (scratch_bytes(config) > args.scratch_bytes || config.splits > ceil_div(args.k, kStageK)) {
    return cudaErrorInvalidConfiguration;
  }
  const cudaError_t error =
      args.x_dtype == DType::kF16 ? launch_f16(args, config, stream) : launch_bf16(args, config, stream);
  if (error != cudaSuccess || config.shared_tiles == 0) return error;
  const int64_t threads = static_cast<int64_t>(config.shared_tiles) * config.tokens * kFours;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(ceil_div(threads, kSumThreads)));
  shape.threads = kSumThreads;
  return launch_kernel(add_splits, shape, stream, params_of(args, config), config.tokens);
}

}  // namespace wonly::mma
