// float32 dy for matmul_transposed_warpgroup.cuh: written to scratch as two fp16 numbers each, as are scales, by a
// kernel before, also rows of experts in the order of a plan.
#pragma once

#include <algorithm>

#include "cuda/division.h"
#include "cuda/element.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_transposed_warpgroup.cuh"
#include "cuda/split_row.cuh"

namespace wonly::transposed_warpgroup {

constexpr int kMostPreparingThreads = 1024;

// In the order of scratch (float32_bytes in matmul_transposed.cu).
struct Prepared {
  uint4* pieces;         // [2, batch, M, N] fp16 numbers
  uint16_t* parameters;  // as Float32Params says
  float *dy_undo, *scale_undo;
};
// Which row of dy is token `row`: that one, or of order[row] / repeat.
struct Rows {
  int64_t tokens;
  const int* order;
  Divisor repeat;
};

// A group's scales, and zeros if there are any, as Float32Params says; what undoes the scales' power of two but for
// kUnscale.
template <typename Scale>
__device__ __forceinline__ void prepare_group(const Scale* scales, const uint8_t* zeros, int n, float bias,
                                              uint16_t* rows, float* undo) {
  uint32_t largest = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < n; i += blockDim.x) largest = larger_finite(largest, to_float(scales[i]));
  const uint32_t power = split_power(largest_of_cta(largest));
  if (threadIdx.x == 0) *undo = __uint_as_float(power);
  const float up = split_factor(power) * (1.f / (1 << (kSplitTop - kScaleTop)));
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
static __global__ void __launch_bounds__(kMostPreparingThreads)
    prepare(const __grid_constant__ MatmulArgs args, const __grid_constant__ Prepared to,
            const __grid_constant__ Rows rows) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  ptx::let_next_kernel_begin();
  const int64_t row = blockIdx.x;
  const int n = static_cast<int>(args.n);
  if (row < rows.tokens) {
    const int vectors = n / kSplitEach;
    int rest;
    const int64_t of_dy = rows.order == nullptr ? row : rows.repeat.divide(rows.order[row], &rest);
    uint4* const high = to.pieces + row * vectors;
    split_row(reinterpret_cast<const float4*>(static_cast<const float*>(args.x) + of_dy * n), high,
              high + rows.tokens * vectors, to.dy_undo + row, vectors);
    return;
  }
  const int64_t group = row - rows.tokens, entry = group / args.groups, of_entry = group % args.groups * n;
  const int64_t at = entry * args.scales_batch_stride + of_entry;
  const uint8_t* const zeros = args.shift_mode == ShiftMode::kZeros ? static_cast<const uint8_t*>(args.shift) +
                                                                          entry * args.shift_batch_stride + of_entry
                                                                    : nullptr;
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

// Enqueues that kernel, for scales and zeros of `entries` weights; where it leaves what it makes.
inline cudaError_t launch_prepare(const MatmulArgs& args, int64_t entries, const Rows& rows, cudaStream_t stream,
                                  Float32Params* params) {
  const int64_t groups = entries * args.groups, stages = ceil_div(args.n, kRunN);
  Prepared to{};
  to.pieces = static_cast<uint4*>(args.scratch);
  to.parameters = reinterpret_cast<uint16_t*>(to.pieces + 2 * rows.tokens * (args.n / kSplitEach));
  to.dy_undo = reinterpret_cast<float*>(to.parameters + groups * stages * (kParameterRows * kRunN));
  to.scale_undo = to.dy_undo + rows.tokens;
  *params = {to.dy_undo, to.scale_undo, to.parameters, entries == 1 ? 0 : args.groups, static_cast<int>(stages)};
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(rows.tokens + groups));
  shape.threads = std::clamp(static_cast<int>(args.n / kSplitEach + 31) / 32 * 32, 128, kMostPreparingThreads);
  return launch_kernel(prepare, shape, stream, args, to, rows);
}

// Calls `launch` with a null pointer to the kernel's shape for blocks of `tokens` tokens.
template <typename Source, typename Launch>
cudaError_t with_float32_shape(const MatmulArgs& args, int tokens, Launch&& launch) {
  const auto with = [&](auto bits, auto codes) {
    return tokens == 64 ? launch(static_cast<Float32Shape<Source, bits.value, 64, codes.value>*>(nullptr))
                        : launch(static_cast<Float32Shape<Source, bits.value, 128, codes.value>*>(nullptr));
  };
  constexpr std::integral_constant<int, 4> four;
  constexpr std::integral_constant<Float32Codes, Float32Codes::kNumbers> numbers;
  if (args.bits == 8) return with(std::integral_constant<int, 8>{}, numbers);
  if (args.shift_mode == ShiftMode::kTable) {
    return with(four, std::integral_constant<Float32Codes, Float32Codes::kOfTable>{});
  }
  // A symmetric code has three bits, and a bf16 scale eight, which are the eleven of fp16.
  const bool exact = args.shift_mode == ShiftMode::kNone && args.scale_dtype == DType::kBF16;
  return exact ? with(four, std::integral_constant<Float32Codes, Float32Codes::kExact>{}) : with(four, numbers);
}

}  // namespace wonly::transposed_warpgroup
