// Codes as 16-bit weights, rounded once as a dequantized weight is, for kernels whose tensor cores take those.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/ptx.cuh"
#include "dequant/convert.h"
#include "layout.h"

namespace wonly {

// What turns the codes of one output and group into weights: code * scale + offset where the codes' zero is a power of
// two (or offsets are given, which are the same), else (code - zero) * scale; table[code] * scale with a table. Each in
// both halves of a register.
struct alignas(16) Affine {
  uint32_t scale, scale_of_odd;  // of even and odd pairs of int4, whose masked codes count 16 times as much
  uint32_t offset, minus_zero;
};

enum class Codes { kNumbers, kWithZeros, kOfTable };

// What Convert asks of a kernel's shape, where that is not of one type and one kind of codes.
template <typename X_, int kBits_, Codes kCodes>
struct ConvertShape {
  using X = X_;
  static constexpr int kBits = kBits_;
  static constexpr bool kZeros = kCodes == Codes::kWithZeros, kTable = kCodes == Codes::kOfTable;
};

// The type of an array of shifts that is not there.
struct NoShift {
  __device__ operator float() const { return 0.f; }
};

// bf16: a masked code is the number code * 2^-133 (convert.h). Without zeros the scale makes it a weight in one step,
// in units of 2^-64, which the sum gives back. With zeros the first step counts units of 2^-6. fp16 has no exponents to
// spare, but mantissa enough to count codes from 1024.
template <typename S>
struct Convert {
  using X = typename S::X;
  static constexpr bool kBf16 = std::is_same_v<X, __nv_bfloat16>;
  static constexpr bool kOneStep = kBf16 && !S::kZeros && !S::kTable;
  static constexpr float kUnit = kOneStep ? 0x1p-64f : 1.f;  // of the weights
  static constexpr float kCodeUnit = !kBf16 ? 1.f : S::kZeros ? 0x1p-6f : 1.f;
  static constexpr uint32_t kFactor = 0x7f007f00u, kFactorOfOdd = 0x7d007d00u;  // 2^127, 2^123

  __device__ static uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    return kBf16 ? fma_bf16x2(a, b, c) : fma_f16x2(a, b, c);
  }
  __device__ static uint32_t pair(float value) { return from_float2<X>(value, value); }
  // 2^exponent.
  __device__ static constexpr uint32_t power(int exponent) {
    return 0x00010001u * static_cast<uint32_t>(kBf16 ? (127 + exponent) << 7 : (15 + exponent) << 10);
  }
  // Without zeros `shift` is an offset, if it is anything.
  template <typename Shift>
  __device__ static Affine affine(float scale, Shift shift) {
    constexpr bool kOffsets = !S::kZeros && !std::is_same_v<Shift, NoShift>;
    const float zero = S::kZeros ? to_float(shift) : static_cast<float>(bias_of(S::kBits));
    const float offset = kOffsets ? to_float(shift) : -zero * scale;
    Affine to;
    if constexpr (S::kTable) {
      to.scale = pair(scale);
      to.scale_of_odd = to.offset = to.minus_zero = 0;
    } else if constexpr (kOneStep) {
      to.scale = pair(scale * 0x1p+69f);
      to.scale_of_odd = pair(scale * 0x1p+65f);
      to.offset = pair(offset * kUnit);
      to.minus_zero = 0;
    } else {
      to.scale = to.scale_of_odd = pair(scale / kCodeUnit);
      to.offset = pair(S::kZeros ? 0.f : offset);
      to.minus_zero = pair(-zero * kCodeUnit);
    }
    return to;
  }

  // Of a float32 zero, or offset: (code - bias) * scale + what that leaves, which is small where codes lie on both
  // sides of the bias. Rounding the zero or the offset itself would move all weights of a group alike by more.
  __device__ static Affine centred(float scale, float shift, bool is_offset) {
    static_assert(S::kZeros);
    constexpr float kBias = static_cast<float>(bias_of(S::kBits));
    Affine to = affine(scale, kBias);
    to.offset = pair(is_offset ? fmaf(kBias, scale, shift) : (kBias - shift) * scale);
    return to;
  }

  // The same of a scale and a shift of type X in both halves of a register each, without float32 in between: factors
  // are powers of two.
  template <typename Shift>
  __device__ static Affine affine_of_pairs(uint32_t scale, Shift shift) {
    constexpr bool kOffsets = !S::kZeros && !std::is_same_v<Shift, NoShift>;
    constexpr int kLog2Bias = S::kBits == 4 ? 3 : 7;
    constexpr uint32_t kMinus = 0x80008000u;
    const auto times = [](uint32_t a, uint32_t factor) { return fma(a, factor, kMinus); };
    Affine to;
    if constexpr (kOneStep) {
      to.scale = times(scale, power(69));
      to.scale_of_odd = times(scale, power(65));
      if constexpr (kOffsets) {
        to.offset = times(shift, power(-64));
      } else {
        to.offset = times(scale, power(kLog2Bias - 64) | kMinus);
      }
      to.minus_zero = 0;
    } else {
      to.scale = to.scale_of_odd = kBf16 && S::kZeros ? times(scale, power(6)) : scale;
      to.offset = to.minus_zero = 0;
      if constexpr (kOffsets) {
        to.offset = shift;
      } else if constexpr (!S::kZeros) {
        to.offset = times(scale, power(kLog2Bias) | kMinus);
      } else {
        to.minus_zero = kBf16 ? times(shift, power(-6) | kMinus) : shift ^ kMinus;
      }
    }
    return to;
  }

  // The same where what the shift is shows at run time, in what it is multiplied by: without zeros an offset, or the
  // scale once more, with them a number of type X, or a byte, which counts as a code does.
  __device__ static uint32_t shift_factor(bool offsets, bool bytes) {
    if constexpr (!S::kZeros) return pair((offsets ? 1.f : -static_cast<float>(bias_of(S::kBits))) * kUnit);
    if constexpr (kBf16) return (bytes ? kFactor : power(-6)) | 0x80008000u;
    return bytes ? power(12) : power(0);  // twice, as fp16 has no 2^24
  }
  // kFew: both scales by one instruction, as those that take them take a half of it for both of theirs. These then all
  // wait for one pipe, which costs more where there are no new scales in each stage.
  template <bool kFew>
  __device__ static Affine affine_of_bits(uint32_t scale, uint32_t shift, uint32_t factor) {
    Affine to = affine_of_pairs(scale, shift);
    if constexpr (kOneStep && kFew) {
      const uint32_t scales = fma(scale, (power(69) & 0xffffu) | (power(65) & 0xffff0000u), 0x80008000u);
      to.scale = ptx::low_twice(scales);
      to.scale_of_odd = ptx::high_twice(scales);
    }
    if constexpr (!S::kZeros) {
      to.offset = fma(shift, factor, 0x80008000u);
    } else if constexpr (kBf16) {
      to.minus_zero = fma(shift, factor, 0x80008000u);
    } else {
      to.minus_zero = fma(fma(shift, factor, 0x80008000u), factor ^ 0x80008000u, 0x80008000u);
    }
    return to;
  }

  // A table of float32 numbers, rounded.
  __device__ static ByteTable table(const float* entries) {
    ByteTable table;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(entries) + i);
      const uint32_t low = pack_pair(from_float<X>(four.x), from_float<X>(four.y));
      const uint32_t high = pack_pair(from_float<X>(four.z), from_float<X>(four.w));
      table.low[i] = byte_permute(low, high, 0x6420);
      table.high[i] = byte_permute(low, high, 0x7531);
    }
    return table;
  }

  // The codes of a word as weights, pairs of neighbouring inputs: 4 of them for int4, 2 for int8.
  __device__ static void weights(uint32_t word, const Affine& affine, const ByteTable& table,
                                 uint32_t (&out)[16 / S::kBits]) {
    if constexpr (S::kTable) {
      look_up(word, table, out);
#pragma unroll
      for (uint32_t& pair : out) pair = fma(pair, affine.scale, 0x80008000u);
      return;
    }
    if constexpr (kBf16 && S::kBits == 4) {
      uint4_to_subnormal(word, out);
    } else if constexpr (kBf16) {
      uint8_to_subnormal(word, out);
    } else if constexpr (S::kBits == 4) {
      uint4_to_f16(word, out);
    } else {
      uint8_to_f16(word, out);
    }
#pragma unroll
    for (int i = 0; i < 16 / S::kBits; ++i) {
      const bool odd = kBf16 && S::kBits == 4 && i % 2 == 1;
      if constexpr (S::kZeros) {
        out[i] = fma(out[i], !kBf16 ? 0x3c003c00u : odd ? kFactorOfOdd : kFactor, affine.minus_zero);
      }
      out[i] = fma(out[i], odd ? affine.scale_of_odd : affine.scale, affine.offset);
    }
  }
};

}  // namespace wonly
