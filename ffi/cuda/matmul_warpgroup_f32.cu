// float32 activations: written to scratch as three bf16 numbers each, then multiplied by the kernel of
// matmul_warpgroup.cuh.
#include "cuda/element.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_warpgroup.cuh"

namespace wonly::warpgroup {
namespace {

constexpr int kSplitThreads = 128, kEach = 8;  // activations of a thread

__global__ void __launch_bounds__(kSplitThreads) split_activations(const float4* x, uint4* pieces, int64_t vectors) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  ptx::let_next_kernel_begin();
#endif
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kSplitThreads + threadIdx.x;
  if (at >= vectors) return;
  const float4 two[2] = {x[2 * at], x[2 * at + 1]};
  float left[kEach] = {two[0].x, two[0].y, two[0].z, two[0].w, two[1].x, two[1].y, two[1].z, two[1].w};
#pragma unroll
  for (int piece = 0; piece < SplitRows::kPieces; ++piece) {
    uint32_t bits[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      bits[i] = isnan(left[i]) ? 0x7fff0000u : __float_as_uint(left[i]);
      left[i] = isfinite(left[i]) ? beyond_bf16(left[i]) : 0.f;
    }
    const auto pair = [&](int i) { return __byte_perm(bits[i], bits[i + 1], 0x7632); };
    pieces[piece * vectors + at] = {pair(0), pair(2), pair(4), pair(6)};
  }
}

template <int kBits, int kFlushes>
cudaError_t launch_split(const Params& params, const Config& config, cudaStream_t stream) {
  const auto launch = [&](auto tokens) {
    using S = Shape<SplitRows, __nv_bfloat16, kBits, tokens.value, 2, kFlushes, Kind::kOther>;
    return launch_shape<S>(params, config, stream);
  };
  if (config.warpgroups != 2) return cudaErrorInvalidConfiguration;
  if constexpr (kBits == 8 && kFlushes == 1) {  // so few of four bits are matmul_resident's
    if (config.tokens == 8) return launch(std::integral_constant<int, 8>{});
  }
  if (config.tokens == 16) return launch(std::integral_constant<int, 16>{});
  if (config.tokens == 32) return launch(std::integral_constant<int, 32>{});
  if (config.tokens == 64) return launch(std::integral_constant<int, 64>{});
  return cudaErrorInvalidConfiguration;
}

template <int kBits>
cudaError_t launch_bits(const Params& params, const Config& config, cudaStream_t stream) {
  const int log2 = params.log2_group_blocks;
  return log2 == 0   ? launch_split<kBits, 4>(params, config, stream)
         : log2 == 1 ? launch_split<kBits, 2>(params, config, stream)
                     : launch_split<kBits, 1>(params, config, stream);
}

}  // namespace

cudaError_t launch_f32(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  Params params{};
  params.args = args;
  params.cluster = config.cluster;
  params.log2_group_blocks = log2_group_blocks(args);
  const int64_t rows = split_rows(args);
  const int64_t x_batch = args.x_batch_stride == 0 ? 1 : args.batch;
  for (int64_t first = 0; first < args.m; first += rows) {
    params.args.m = std::min(rows, args.m - first);
    params.args.x = static_cast<const float*>(args.x) + first * args.k;
    params.args.y = static_cast<uint8_t*>(args.y) + first * args.n * element_size(args.y_dtype);
    const int64_t vectors = x_batch * params.args.m * args.k / kEach;
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(ceil_div(vectors, kSplitThreads)));
    shape.threads = kSplitThreads;
    cudaError_t error = launch_kernel(split_activations, shape, stream, static_cast<const float4*>(params.args.x),
                                      static_cast<uint4*>(args.scratch), vectors);
    if (error == cudaSuccess) {
      error = args.bits == 4 ? launch_bits<4>(params, config, stream) : launch_bits<8>(params, config, stream);
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace wonly::warpgroup
