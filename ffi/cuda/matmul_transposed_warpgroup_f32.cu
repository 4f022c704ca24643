// float32 dy: written to scratch as two fp16 numbers each, as are scales, for the kernel of
// matmul_transposed_warpgroup.cuh.
#include <algorithm>

#include "cuda/element.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_transposed_warpgroup.cuh"
#include "cuda/split_row.cuh"

namespace wonly::transposed_warpgroup {
namespace {

constexpr int kMostThreads = 1024;

// In the order of scratch (float32_rows in matmul_transposed.cu).
struct Prepared {
  uint4* pieces;         // [2, batch, M, N] fp16 numbers
  uint16_t* parameters;  // as Float32Params says
  float *dy_undo, *scale_undo;
};

// A group's scales, and zeros if there are any, as Float32Params says; what undoes the scales' power of two.
template <typename Scale>
__device__ __forceinline__ void prepare_group(const Scale* scales, const uint8_t* zeros, int n, float bias,
                                              uint16_t* rows, float* undo) {
  uint32_t largest = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < n; i += blockDim.x) largest = larger_finite(largest, to_float(scales[i]));
  const uint32_t power = split_power(largest_of_cta(largest));
  if (threadIdx.x == 0) *undo = __uint_as_float(power);
  const float up = split_factor(power) * (0.5f / (1 << kSplitTop));
#pragma unroll 4
  for (int i = threadIdx.x; i < (n + kRunN - 1) / kRunN * kRunN; i += blockDim.x) {
    const bool there = i < n;
    const float scale = there ? to_float(scales[i]) * up : 0.f;
    const float zero = there && zeros != nullptr ? static_cast<float>(zeros[i]) : bias;
    const __half high = __float2half_rn(scale);
    const float rest = isfinite(scale) ? scale - __half2float(high) : 0.f;
    uint16_t* const at = rows + i / kRunN * (kParameterRows * kRunN) + i % kRunN;
    at[0] = __half_as_ushort(high);
    at[kRunN] = __half_as_ushort(__float2half_rn(rest));
    at[2 * kRunN] = __half_as_ushort(__float2half_rn(-1024.f - zero));
  }
}

// A CTA takes a token of dy, or a group of scales.
__global__ void __launch_bounds__(kMostThreads)
    prepare(const __grid_constant__ MatmulArgs args, const __grid_constant__ Prepared to, int64_t tokens) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  ptx::let_next_kernel_begin();
  const int64_t row = blockIdx.x;
  const int n = static_cast<int>(args.n);
  if (row < tokens) {
    const int vectors = n / kSplitEach;
    uint4* const high = to.pieces + row * vectors;
    split_row(reinterpret_cast<const float4*>(static_cast<const float*>(args.x) + row * n), high,
              high + tokens * vectors, to.dy_undo + row, vectors);
    // The scales' power is another factor of two: with the largest below one no product is beyond fp16.
    if (threadIdx.x == 0) to.dy_undo[row] *= 2.f;
    return;
  }
  const int64_t group = row - tokens, entry = group / args.groups, of_entry = group % args.groups * n;
  const int64_t at = entry * args.scales_batch_stride + of_entry;
  const uint8_t* const zeros = args.shift_mode == ShiftMode::kNone ? nullptr
                                                                   : static_cast<const uint8_t*>(args.shift) +
                                                                         entry * args.shift_batch_stride + of_entry;
  const auto of_type = [&](auto type) {
    prepare_group(static_cast<const decltype(type)*>(args.scales) + at, zeros, n,
                  static_cast<float>(bias_of(args.bits)),
                  to.parameters + group * ((n + kRunN - 1) / kRunN) * (kParameterRows * kRunN), to.scale_undo + group);
  };
  if (args.scale_dtype == DType::kF32) {
    of_type(float{});
  } else if (args.scale_dtype == DType::kF16) {
    of_type(__half{});
  } else {
    of_type(__nv_bfloat16{});
  }
#else
  __trap();
#endif
}

}  // namespace

cudaError_t launch_f32(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  const int64_t tokens = (args.x_batch_stride == 0 ? 1 : args.batch) * args.m;
  const int64_t groups = parameter_batch(args) * args.groups, stages = ceil_div(args.n, kRunN);
  Prepared to{};
  to.pieces = static_cast<uint4*>(args.scratch);
  to.parameters = reinterpret_cast<uint16_t*>(to.pieces + 2 * tokens * (args.n / kSplitEach));
  to.dy_undo = reinterpret_cast<float*>(to.parameters + groups * stages * (kParameterRows * kRunN));
  to.scale_undo = to.dy_undo + tokens;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(tokens + groups));
  shape.threads = std::clamp(static_cast<int>(args.n / kSplitEach + 31) / 32 * 32, 128, kMostThreads);
  if (cudaError_t error = launch_kernel(prepare, shape, stream, args, to, tokens); error != cudaSuccess) return error;
  Params<Consecutive> params = make_params<Consecutive>(args);
  params.float32 = {to.dy_undo, to.scale_undo, to.parameters, parameter_batch(args) == 1 ? 0 : args.groups,
                    static_cast<int>(stages)};
  const auto launch = [&](auto bits, auto exact) {
    return config.tokens == 64 ? launch_shape<Float32Shape<bits.value, 64, exact.value>>(params, config, stream)
                               : launch_shape<Float32Shape<bits.value, 128, exact.value>>(params, config, stream);
  };
  constexpr std::integral_constant<int, 4> four;
  if (args.bits == 8) return launch(std::integral_constant<int, 8>{}, std::false_type{});
  // A symmetric code has three bits, and a bf16 scale eight, which are the eleven of fp16.
  const bool exact = args.shift_mode == ShiftMode::kNone && args.scale_dtype == DType::kBF16;
  return exact ? launch(four, std::true_type{}) : launch(four, std::false_type{});
}

}  // namespace wonly::transposed_warpgroup
