// What happens to a finished float32 sum: bias, activation, rounding, store.
#pragma once

#include "cuda/element.cuh"
#include "cuda/matmul.h"

namespace wonly {

// gelu in its tanh form, whose (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)): an exponential and a quotient for both. Where
// the exponential is 2^126 or more, which makes 10^-36 or less of v, the result is zero.
__device__ __forceinline__ float apply(Activation activation, float v) {
  if (activation == Activation::kGelu || activation == Activation::kSilu) {
    const float of = activation == Activation::kSilu ? v : 1.5957691216057308f * (v + 0.044715f * v * v * v);
    return __fdividef(v, 1.f + expf(-of));
  }
  if (activation != Activation::kNone && v < 0.f) return 0.f;  // NaN stays NaN
  return activation == Activation::kRelu6 && v > 6.f ? 6.f : v;
}

// What finishing a sum takes of a product, for an entry of its batch.
struct Finish {
  void* y;
  const void* bias;
  int64_t n, first_row, first_bias;
  DType y_dtype, bias_dtype;
  Activation activation;
  bool has_bias;

  __device__ __forceinline__ Finish(const MatmulArgs& args, int64_t batch)
      : y(args.y),
        bias(args.bias),
        n(args.n),
        first_row(batch * args.m),
        first_bias(batch * args.bias_batch_stride),
        y_dtype(args.y_dtype),
        bias_dtype(args.bias_dtype),
        activation(args.activation),
        has_bias(args.has_bias) {}
};

// y[batch, m, n] from its sum; outputs beyond the last are dropped.
__device__ __forceinline__ void finish(const MatmulArgs& args, int64_t batch, int64_t m, int64_t n, float sum) {
  if (n >= args.n) return;
  if (args.has_bias) {
    float bias[1];
    load_elements(args.bias, args.bias_dtype, bias, [&](int) { return batch * args.bias_batch_stride + n; });
    sum += bias[0];
  }
  store_float(args.y, (batch * args.m + m) * args.n + n, apply(args.activation, sum), args.y_dtype);
}

// Outputs n .. n + 3, n a multiple of 4: in one store where a row's address allows it. Every kernel has this code, most
// of which none of its products may need: it is kept short.
__device__ __forceinline__ void finish4(const Finish& of, int64_t m, int64_t n, const float (&sum)[4]) {
  float value[4] = {sum[0], sum[1], sum[2], sum[3]};
  if (of.has_bias) {
    float bias[4];
    const int last = static_cast<int>(min(of.n - n, int64_t{4})) - 1;
    load_elements(of.bias, of.bias_dtype, bias, [&](int i) { return of.first_bias + n + min(i, last); });
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] += bias[i];
  }
  const auto in_turns = [&](auto&& change) {
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const float next = change(i, value[0]);
      value[0] = value[1], value[1] = value[2], value[2] = value[3], value[3] = next;
    }
  };
  if (of.activation != Activation::kNone) {
    in_turns([&](int, float v) { return apply(of.activation, v); });
  }
  const int64_t at = (of.first_row + m) * of.n + n;
  if (of.n % 4 != 0) {
    in_turns([&](int i, float v) {
      if (n + i < of.n) store_float(of.y, at + i, v, of.y_dtype);
      return v;
    });
  } else if (of.y_dtype == DType::kF32) {
    *reinterpret_cast<float4*>(static_cast<float*>(of.y) + at) = {value[0], value[1], value[2], value[3]};
  } else {
    const bool f16 = of.y_dtype == DType::kF16;
    const auto pack = [&](int i) {
      return f16 ? from_float2<__half>(value[i], value[i + 1]) : from_float2<__nv_bfloat16>(value[i], value[i + 1]);
    };
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(of.y) + at) = {pack(0), pack(2)};
  }
}
__device__ __forceinline__ void finish4(const MatmulArgs& args, int64_t batch, int64_t m, int64_t n,
                                        const float (&sum)[4]) {
  finish4(Finish(args, batch), m, n, sum);
}

}  // namespace wonly
