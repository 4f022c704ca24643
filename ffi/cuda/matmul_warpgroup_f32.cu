// float32 activations: written to scratch as two fp16 numbers each, then multiplied by the kernel of
// matmul_warpgroup.cuh.
#include <algorithm>

#include "cuda/element.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_warpgroup.cuh"

namespace wonly::warpgroup {
namespace {

constexpr int kMostSplitThreads = 1024, kEach = 8;  // activations of a thread

// A CTA takes a token: its activations times the power of two that makes the largest finite one 2^kSplitTop or more,
// as two fp16 numbers each, and in `powers` what undoes it. The numbers are exact to 2^-22 of an activation, or 2^-39
// of that largest one. `vectors`: of kEach inputs, of a token.
__global__ void __launch_bounds__(kMostSplitThreads)
    split_activations(const float4* x, uint4* pieces, float* powers, int vectors) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  ptx::let_next_kernel_begin();
  __shared__ uint32_t largest_of[32];
  const int64_t row = blockIdx.x, first = row * vectors;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t largest = 0;  // bits of the magnitude
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 four = x[2 * (first + i) + half];
      for (const float value : {four.x, four.y, four.z, four.w}) {
        const uint32_t magnitude = __float_as_uint(fabsf(value));
        if (magnitude < 0x7f800000u) largest = max(largest, magnitude);
      }
    }
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (lane == 0) largest_of[warp] = largest;
  __syncthreads();
  largest = __reduce_max_sync(0xffffffffu, lane < static_cast<int>(blockDim.x / 32) ? largest_of[lane] : 0u);
  const uint32_t power = split_power(largest);
  const float up = split_factor(power);
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    const float4 two[2] = {x[2 * (first + i)], x[2 * (first + i) + 1]};
    uint32_t high[kEach / 2], low[kEach / 2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      for (int j = 0; j < 2; ++j) {
        const float2 raised = {(j == 0 ? two[half].x : two[half].z) * up, (j == 0 ? two[half].y : two[half].w) * up};
        float2 left = beyond_fp16(raised, &high[2 * half + j]);
        if (!isfinite(raised.x)) left.x = 0.f;  // what is not finite is the first number's
        if (!isfinite(raised.y)) left.y = 0.f;
        low[2 * half + j] = from_float2<__half>(left.x, left.y);
      }
    }
    pieces[first + i] = {high[0], high[1], high[2], high[3]};
    pieces[first + i + static_cast<int64_t>(gridDim.x) * vectors] = {low[0], low[1], low[2], low[3]};
  }
  if (threadIdx.x == 0) powers[row] = __uint_as_float(power - (kSplitTop << 23));
#else
  __trap();
#endif
}

template <int kBits, int kFlushes>
cudaError_t launch_split(const SplitParams& params, const Config& config, cudaStream_t stream) {
  const auto launch = [&](auto tokens) {
    using S = Shape<SplitRows, __half, kBits, tokens.value, 2, kFlushes, Kind::kOther>;
    return launch_shape<S>(params, config, stream);
  };
  if (config.warpgroups != 2) return cudaErrorInvalidConfiguration;
  if constexpr (kBits == 8 && kFlushes == 1) {  // so few of four bits are matmul_resident's
    if (config.tokens == 8) return launch(std::integral_constant<int, 8>{});
  }
  if (config.tokens == 16) return launch(std::integral_constant<int, 16>{});
  if (config.tokens == 32) return launch(std::integral_constant<int, 32>{});
  if (config.tokens == 64) return launch(std::integral_constant<int, 64>{});
  if constexpr (kBits == 4 && kFlushes == 1) {
    if (config.tokens == 48) return launch(std::integral_constant<int, 48>{});
    if (config.tokens == 96) return launch(std::integral_constant<int, 96>{});
  }
  return cudaErrorInvalidConfiguration;
}

template <int kBits>
cudaError_t launch_bits(const SplitParams& params, const Config& config, cudaStream_t stream) {
  const int log2 = params.log2_group_blocks;
  return log2 == 0   ? launch_split<kBits, 4>(params, config, stream)
         : log2 == 1 ? launch_split<kBits, 2>(params, config, stream)
                     : launch_split<kBits, 1>(params, config, stream);
}

}  // namespace

cudaError_t launch_f32(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  SplitParams params{};
  params.args = args;
  params.cluster = config.cluster;
  params.log2_group_blocks = log2_group_blocks(args);
  const int64_t rows = split_rows(args);
  const int64_t x_batch = args.x_batch_stride == 0 ? 1 : args.batch;
  const int vectors = static_cast<int>(args.k / kEach);
  for (int64_t first = 0; first < args.m; first += rows) {
    params.args.m = std::min(rows, args.m - first);
    params.args.x = static_cast<const float*>(args.x) + first * args.k;
    params.args.y = static_cast<uint8_t*>(args.y) + first * args.n * element_size(args.y_dtype);
    const int64_t tokens = x_batch * params.args.m;
    auto* const pieces = static_cast<uint4*>(args.scratch);
    auto* const powers = reinterpret_cast<float*>(pieces + SplitRows::kPieces * tokens * vectors);
    params.powers = powers;
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(tokens));
    shape.threads = std::clamp((vectors + 31) / 32 * 32, 128, kMostSplitThreads);
    cudaError_t error = launch_kernel(split_activations, shape, stream, static_cast<const float4*>(params.args.x),
                                      pieces, powers, vectors);
    if (error == cudaSuccess) {
      error = args.bits == 4 ? launch_bits<4>(params, config, stream) : launch_bits<8>(params, config, stream);
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace wonly::warpgroup
