// What happens to a finished float32 sum: bias, activation, rounding, store.
#pragma once

#include "cuda/element.cuh"
#include "cuda/matmul.h"

namespace wonly {

__device__ __forceinline__ float apply(Activation activation, float v) {
  switch (activation) {
    case Activation::kNone:
      return v;
    case Activation::kRelu:
      return v < 0.f ? 0.f : v;  // NaN stays NaN
    case Activation::kRelu6:
      return v < 0.f ? 0.f : v > 6.f ? 6.f : v;
    case Activation::kGelu:
      return 0.5f * v * (1.f + tanhf(0.7978845608028654f * (v + 0.044715f * v * v * v)));
    case Activation::kSilu:
      return v / (1.f + expf(-v));
  }
  return v;
}

// y[batch, m, n] from its sum; outputs beyond the last are dropped.
__device__ __forceinline__ void finish(const MatmulArgs& args, int64_t batch, int64_t m, int64_t n, float sum) {
  if (n >= args.n) return;
  if (args.has_bias) sum += load_element(args.bias, batch * args.bias_batch_stride + n, args.bias_dtype);
  store_element(args.y, (batch * args.m + m) * args.n + n, apply(args.activation, sum), args.y_dtype);
}

// Outputs n .. n + 3, n a multiple of 4: in one store where a row's address allows it.
__device__ __forceinline__ void finish4(const MatmulArgs& args, int64_t batch, int64_t m, int64_t n,
                                        const float (&sum)[4]) {
  // One question for all four: each would be a constant to load and branches to take.
  float value[4] = {sum[0], sum[1], sum[2], sum[3]};
  if (args.has_bias) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t at = min(n + i, args.n - 1);
      value[i] += load_element(args.bias, batch * args.bias_batch_stride + at, args.bias_dtype);
    }
  }
  if (args.activation != Activation::kNone) {
    // In turns: the code for an activation is long, and every kernel has it.
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const float next = apply(args.activation, value[0]);
      value[0] = value[1], value[1] = value[2], value[2] = value[3], value[3] = next;
    }
  }
  if (args.n % 4 != 0 || args.y_dtype == DType::kF32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (n + i < args.n) store_element(args.y, (batch * args.m + m) * args.n + n + i, value[i], args.y_dtype);
    }
    return;
  }
  uint2 packed;
  if (args.y_dtype == DType::kF16) {
    packed.x = pack_pair(from_float<__half>(value[0]), from_float<__half>(value[1]));
    packed.y = pack_pair(from_float<__half>(value[2]), from_float<__half>(value[3]));
  } else {
    packed.x = pack_pair(from_float<__nv_bfloat16>(value[0]), from_float<__nv_bfloat16>(value[1]));
    packed.y = pack_pair(from_float<__nv_bfloat16>(value[2]), from_float<__nv_bfloat16>(value[3]));
  }
  *reinterpret_cast<uint2*>(static_cast<uint16_t*>(args.y) + (batch * args.m + m) * args.n + n) = packed;
}

}  // namespace wonly
