// What happens to a finished float32 sum: bias, activation, rounding, store.
#pragma once

#include "cuda/element.cuh"
#include "cuda/matmul.h"
#include "cuda/ptx.cuh"

namespace wonly {

// gelu in its tanh form, whose (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)): an exponential and a quotient for both it and
// silu. Where the exponential is 2^126 or more, which makes 10^-36 or less of v, the result is zero.
__device__ __forceinline__ bool is_smooth(Activation activation) {
  return activation == Activation::kGelu || activation == Activation::kSilu;
}
constexpr float kGeluLinear = 1.5957691216057308f, kGeluCubic = 0.044715f;
__device__ __forceinline__ float smooth(Activation activation, float v) {
  const float of = activation == Activation::kSilu ? v : kGeluLinear * (v + kGeluCubic * v * v * v);
  return v * ptx::reciprocal(1.f + expf(-of));
}
// NaN stays NaN. high: that of relu6.
__device__ __forceinline__ float clamp(float v, float high) { return ptx::least_of(ptx::largest_of(v, 0.f), high); }
__device__ __forceinline__ float highest(Activation activation) {
  return activation == Activation::kRelu6 ? 6.f : __int_as_float(0x7f800000);
}

__device__ __forceinline__ float apply(Activation activation, float v) {
  if (activation == Activation::kNone) return v;
  return is_smooth(activation) ? smooth(activation, v) : clamp(v, highest(activation));
}
// What smooth(activation, v) is, to 2^-16 of it, in fewer instructions: the exponents are those of two, and both
// functions are the same but for two numbers.
template <int kCount>
__device__ __forceinline__ void smooth_rounded(Activation activation, float (&v)[kCount]) {
  constexpr float kLog2E = 1.4426950408889634f;
  const bool silu = activation == Activation::kSilu;
  const float linear = silu ? -kLog2E : -kLog2E * kGeluLinear;
  const float cubic = silu ? 0.f : -kLog2E * kGeluLinear * kGeluCubic;
#pragma unroll
  for (float& of_one : v) {
    const float square = fminf(of_one * of_one, 0x1p127f);  // finite: times zero it is zero
    of_one *= ptx::reciprocal(1.f + ptx::power_of_two(of_one * fmaf(cubic, square, linear)));
  }
}
// Of several sums at once: one choice of function. rounded: they are rounded to 16 bits next.
template <int kCount>
__device__ __forceinline__ void apply(Activation activation, float (&v)[kCount], bool rounded = false) {
  if (activation == Activation::kNone) return;
  if (!is_smooth(activation)) {
    const float high = highest(activation);
#pragma unroll
    for (float& of_one : v) of_one = clamp(of_one, high);
  } else if (rounded) {
    smooth_rounded(activation, v);
  } else {
    // Four at a time, one after the other, as every kernel has this code: those that are next move to the front.
    constexpr int kAtOnce = kCount < 4 ? kCount : 4;
#pragma unroll 1
    for (int turn = 0; turn < kCount / kAtOnce; ++turn) {
      float done[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) done[i] = smooth(activation, v[i]);
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = i + kAtOnce < kCount ? v[i + kAtOnce] : done[i + kAtOnce - kCount];
    }
  }
}

// Asks for the bias of `count` outputs from n on, by threads that are numbered from zero: it is needed at the very end,
// and in a model other weights have driven it out of the L2.
__device__ __forceinline__ void prefetch_bias(const MatmulArgs& args, int64_t batch, int64_t n, int count, int thread) {
  constexpr int kLine = 32;  // outputs whose bias has 128 bytes or less
  if (__builtin_expect(!args.has_bias, 1) || thread * kLine >= count + kLine) return;
  const int64_t at = batch * args.bias_batch_stride + min(n + thread * kLine, args.n - 1);
  ptx::prefetch_line(static_cast<const uint8_t*>(args.bias) + at * (args.bias_dtype == DType::kF32 ? 4 : 2));
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

// The bias of an output, or zero: loaded before a sum is there, it keeps nobody waiting.
__device__ __forceinline__ float output_bias(const MatmulArgs& args, int64_t batch, int64_t n) {
  if (!args.has_bias || n >= args.n) return 0.f;
  float bias[1];
  load_elements(args.bias, args.bias_dtype, bias, [&](int) { return batch * args.bias_batch_stride + n; });
  return bias[0];
}
// y[batch, m, n] from its sum and bias; outputs beyond the last are dropped.
__device__ __forceinline__ void finish(const MatmulArgs& args, int64_t batch, int64_t m, int64_t n, float sum,
                                       float bias) {
  if (n >= args.n) return;
  store_float(args.y, (batch * args.m + m) * args.n + n, apply(args.activation, sum + bias), args.y_dtype);
}
__device__ __forceinline__ void finish(const MatmulArgs& args, int64_t batch, int64_t m, int64_t n, float sum) {
  finish(args, batch, m, n, sum, output_bias(args, batch, n));
}

// The bias of outputs n to n + kCount - 1, or zeros.
template <int kCount>
__device__ __forceinline__ void load_biases(const Finish& of, int64_t n, float (&bias)[kCount]) {
#pragma unroll
  for (float& of_one : bias) of_one = 0.f;
  if (!of.has_bias) return;
  const int left = static_cast<int>(min(of.n - n, int64_t{kCount}));
  load_some_elements(of.bias, of.bias_dtype, of.first_bias + n, left, bias);
}

// Outputs n to n + kCount - 1, 4 or 8, n a multiple of that, from sums and biases: in whole vectors where a row's
// address allows it. Every kernel has this code, most of which none of its products may need: that of four, which few
// results of 16 bits come to, has no functions of their own for those.
template <int kCount>
__device__ __forceinline__ void finish(const Finish& of, int64_t m, int64_t n, float (&value)[kCount],
                                       const float (&bias)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) value[i] += bias[i];
  apply(of.activation, value, kCount == 8 && of.y_dtype != DType::kF32);
  const int64_t at = (of.first_row + m) * of.n + n;
  if (of.n % kCount != 0 && of.y_dtype == DType::kF32) {
    float* const y = static_cast<float*>(of.y) + at;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (n + i < of.n) y[i] = value[i];
    }
  } else if (of.n % kCount != 0) {
#pragma unroll 1
    for (int i = 0; i < kCount && n + i < of.n; ++i) {
      store_float(of.y, at + i, value[0], of.y_dtype);
#pragma unroll
      for (int j = 1; j < kCount; ++j) value[j - 1] = value[j];
    }
  } else if (of.y_dtype == DType::kF32) {
    float4* const y = reinterpret_cast<float4*>(static_cast<float*>(of.y) + at);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) y[i] = {value[4 * i], value[4 * i + 1], value[4 * i + 2], value[4 * i + 3]};
  } else {
    const bool f16 = of.y_dtype == DType::kF16;
    uint32_t pairs[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      pairs[i] = f16 ? from_float2<__half>(value[2 * i], value[2 * i + 1])
                     : from_float2<__nv_bfloat16>(value[2 * i], value[2 * i + 1]);
    }
    uint16_t* const y = static_cast<uint16_t*>(of.y) + at;
    if constexpr (kCount == 8) {
      *reinterpret_cast<uint4*>(y) = {pairs[0], pairs[1], pairs[2], pairs[3]};
    } else {
      *reinterpret_cast<uint2*>(y) = {pairs[0], pairs[1]};
    }
  }
}
__device__ __forceinline__ void finish4(const Finish& of, int64_t m, int64_t n, const float (&sum)[4]) {
  float value[4] = {sum[0], sum[1], sum[2], sum[3]}, bias[4];
  load_biases(of, n, bias);
  finish(of, m, n, value, bias);
}
__device__ __forceinline__ void finish4(const MatmulArgs& args, int64_t batch, int64_t m, int64_t n,
                                        const float (&sum)[4]) {
  finish4(Finish(args, batch), m, n, sum);
}

}  // namespace wonly
