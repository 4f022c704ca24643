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

// Numbers as two of fp16 each, `apart` numbers from each other; what is not finite is the first.
__device__ __forceinline__ void store_two(float value, uint16_t* to, int apart) {
  const __half high = __float2half_rn(value);
  const float rest = isfinite(value) ? value - __half2float(high) : 0.f;
  to[0] = __half_as_ushort(high);
  to[apart] = __half_as_ushort(__float2half_rn(rest));
}

// A group's scales, the first at `scales_at`, and its zeros or offsets, if there are any, as Float32Params says; what
// undoes the scales' power of two but for kUnscale.
template <typename Scale>
__device__ __forceinline__ void prepare_group(const MatmulArgs& args, int64_t scales_at, int64_t shift_at,
                                              uint16_t* rows, float* undo) {
  const Scale* const scales = static_cast<const Scale*>(args.scales) + scales_at;
  const int n = static_cast<int>(args.n);
  const bool shifted = has_float_shift(args);
  const float middle = static_cast<float>(bias_of(args.bits));
  const auto shift_of = [&](int i) { return load_element(args.shift, shift_at + i, args.shift_dtype); };
  // What is added to (code - middle) * scale.
  const auto added_to = [&](int i, float scale) { return weight_of(args.shift_mode, middle, scale, shift_of(i)); };
  uint32_t largest = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const float scale = to_float(scales[i]);
    largest = larger_finite(largest, scale);
    if (shifted) largest = larger_finite(largest, added_to(i, scale) * (1.f / (1 << kShiftBeyond)));
  }
  const uint32_t power = split_power(largest_of_cta(largest));
  if (threadIdx.x == 0) *undo = __uint_as_float(power);
  const float up = split_factor(power) * (1.f / (1 << (kSplitTop - kScaleTop)));
#pragma unroll 4
  for (int i = threadIdx.x; i < (n + kRunN - 1) / kRunN * kRunN; i += blockDim.x) {
    const bool there = i < n;
    const float scale = there ? to_float(scales[i]) : 0.f;
    uint16_t* const at = rows + i / kRunN * (parameter_rows(shifted) * kRunN) + i % kRunN;
    store_two(scale * up, at, kRunN);
    if (shifted) {
      store_two(there ? added_to(i, scale) * up : 0.f, at + 2 * kRunN, kRunN);
    } else {
      const float zero = there && args.shift_mode == ShiftMode::kZeros ? shift_of(i) : middle;
      at[2 * kRunN] = __half_as_ushort(__float2half_rn(-1024.f - zero));
    }
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
  const int64_t row_length = (n + kRunN - 1) / kRunN * (parameter_rows(has_float_shift(args)) * kRunN);
  const auto of_type = [&](auto type) {
    prepare_group<decltype(type)>(args, entry * args.scales_batch_stride + of_entry,
                                  entry * args.shift_batch_stride + of_entry, to.parameters + group * row_length,
                                  to.scale_undo + group);
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

// Enqueues that kernel, for parameters of `entries` weights; where it leaves what it makes.
inline cudaError_t launch_prepare(const MatmulArgs& args, int64_t entries, const Rows& rows, cudaStream_t stream,
                                  Float32Params* params) {
  const int64_t groups = entries * args.groups, stages = ceil_div(args.n, kRunN);
  const int64_t of_stage = parameter_rows(has_float_shift(args)) * kRunN;
  Prepared to{};
  to.pieces = static_cast<uint4*>(args.scratch);
  to.parameters = reinterpret_cast<uint16_t*>(to.pieces + 2 * rows.tokens * (args.n / kSplitEach));
  to.dy_undo = reinterpret_cast<float*>(to.parameters + groups * stages * of_stage);
  to.scale_undo = to.dy_undo + rows.tokens;
  *params = {to.dy_undo, to.scale_undo, to.parameters, entries == 1 ? 0 : args.groups, static_cast<int>(stages)};
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(rows.tokens + groups));
  shape.threads = std::clamp(static_cast<int>(args.n / kSplitEach + 31) / 32 * 32, 128, kMostPreparingThreads);
  return launch_kernel(prepare, shape, stream, args, to, rows);
}

// Calls `launch` with a null pointer to the kernel's shape for blocks of `tokens` tokens. kShifts: float zeros and
// offsets, too.
template <typename Source, bool kShifts, typename Launch>
cudaError_t with_float32_shape(const MatmulArgs& args, int tokens, Launch&& launch) {
  const auto with = [&](auto bits, auto codes) {
    return tokens == 64 ? launch(static_cast<Float32Shape<Source, bits.value, 64, codes.value>*>(nullptr))
                        : launch(static_cast<Float32Shape<Source, bits.value, 128, codes.value>*>(nullptr));
  };
  constexpr std::integral_constant<int, 4> four;
  constexpr std::integral_constant<int, 8> eight;
  constexpr std::integral_constant<Float32Codes, Float32Codes::kNumbers> numbers;
  constexpr std::integral_constant<Float32Codes, Float32Codes::kShifted> shifted;
  if constexpr (kShifts) {
    if (has_float_shift(args)) return args.bits == 4 ? with(four, shifted) : with(eight, shifted);
  }
  if (args.bits == 8) return with(eight, numbers);
  if (args.shift_mode == ShiftMode::kTable) {
    return with(four, std::integral_constant<Float32Codes, Float32Codes::kOfTable>{});
  }
  // A symmetric code has three bits, and a bf16 scale eight, which are the eleven of fp16.
  const bool exact = args.shift_mode == ShiftMode::kNone && args.scale_dtype == DType::kBF16;
  return exact ? with(four, std::integral_constant<Float32Codes, Float32Codes::kExact>{}) : with(four, numbers);
}

}  // namespace wonly::transposed_warpgroup
