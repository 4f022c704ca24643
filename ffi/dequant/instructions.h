// The GPU instructions that the conversions are made of, each with a portable body that returns the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "layout.h"

namespace wonly {

WONLY_HOST_DEVICE float as_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

WONLY_HOST_DEVICE uint32_t as_bits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

// Any function of three bits, for all 32 positions at once. kTable is that function of 0xf0, 0xcc and 0xaa.
template <uint32_t kTable>
WONLY_HOST_DEVICE uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, %4;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(kTable & 0xff));
  return d;
#else
  uint32_t d = 0;
  for (uint32_t row = 0; row < 8; ++row) {
    if (kTable >> row & 1) d |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
  }
  return d;
#endif
}

// Byte i of the result is byte (selector >> 4i & 7) of a (0 to 3) and b (4 to 7). A nibble of 8 or more would mean
// something else to a GPU; the selector's upper half does not count.
WONLY_HOST_DEVICE uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
#else
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t d = 0;
  for (int i = 0; i < 4; ++i) d |= static_cast<uint32_t>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return d;
#endif
}

#if !defined(__CUDA_ARCH__)
namespace portable {

// A 16-bit float of kExponentBits and kMantissaBits, finite. Every one is a double.
template <int kExponentBits, int kMantissaBits>
struct Float16 {
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;

  static double power(int exponent) {  // 2^exponent, for the normal doubles
    const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

  static double decode(uint32_t half) {
    const int exponent = static_cast<int>(half >> kMantissaBits & ((1u << kExponentBits) - 1));
    const uint32_t fraction = half & ((1u << kMantissaBits) - 1);
    const uint32_t significand = exponent == 0 ? fraction : fraction | 1u << kMantissaBits;
    const double value = significand * power((exponent == 0 ? 1 : exponent) - kBias - kMantissaBits);
    return half & 0x8000u ? -value : value;
  }

  // To nearest, ties to even.
  static uint32_t encode(double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = static_cast<uint32_t>(bits >> 63) << 15;
    const double magnitude = value < 0 ? -value : value;
    const int binade = static_cast<int>(bits >> 52 & 0x7ff) - 1023;
    const int exponent = binade < 1 - kBias ? 1 - kBias : binade;
    const double units = magnitude * power(kMantissaBits - exponent);
    uint32_t significand = static_cast<uint32_t>(units);
    const double rest = units - significand;
    if (rest > 0.5 || (rest == 0.5 && significand % 2 == 1)) ++significand;
    if (significand < 1u << kMantissaBits) return sign | significand;
    // A carry out of the significand goes on into the exponent, up to infinity.
    const uint32_t infinity = ((1u << kExponentBits) - 1) << kMantissaBits;
    const uint64_t pattern =
        (static_cast<uint64_t>(exponent + kBias) << kMantissaBits) + (significand - (1u << kMantissaBits));
    return sign | (pattern > infinity ? infinity : static_cast<uint32_t>(pattern));
  }

  // a * b + c on both halves. The product of two is a double; so is the sum, wherever the operands are within 2^30 of
  // each other, as all of those here are.
  static uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    const uint32_t low = encode(decode(a & 0xffff) * decode(b & 0xffff) + decode(c & 0xffff));
    const uint32_t high = encode(decode(a >> 16) * decode(b >> 16) + decode(c >> 16));
    return low | high << 16;
  }
  static uint32_t sub(uint32_t a, uint32_t b) {
    const uint32_t low = encode(decode(a & 0xffff) - decode(b & 0xffff));
    const uint32_t high = encode(decode(a >> 16) - decode(b >> 16));
    return low | high << 16;
  }
};

using Half = Float16<5, 10>;
using Bfloat = Float16<8, 7>;

}  // namespace portable
#endif

WONLY_HOST_DEVICE uint32_t sub_f16x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t d;
  asm("sub.f16x2 %0, %1, %2;\n" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  return portable::Half::sub(a, b);
#endif
}

WONLY_HOST_DEVICE uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
#else
  return portable::Half::fma(a, b, c);
#endif
}

// sm_80 and newer.
WONLY_HOST_DEVICE uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
  uint32_t d = 0;
#if __CUDA_ARCH__ >= 800
  asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#endif
  return d;
#else
  return portable::Bfloat::fma(a, b, c);
#endif
}

// sm_80 has no packed subtraction of bf16, but an fma, which rounds the same difference; sm_75 has neither.
WONLY_HOST_DEVICE uint32_t sub_bf16x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
#if __CUDA_ARCH__ >= 900
  uint32_t d;
  asm("sub.rn.bf16x2 %0, %1, %2;\n" : "=r"(d) : "r"(a), "r"(b));
  return d;
#elif __CUDA_ARCH__ >= 800
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(b), "r"(0xbf80bf80u), "r"(a));  // a - 1 * b
  return d;
#else
  // Exact for the integers of up to eight bits that the conversions subtract: the lower half of each difference is
  // zero.
  const float low = as_float(a << 16) - as_float(b << 16);
  const float high = as_float(a & 0xffff0000u) - as_float(b & 0xffff0000u);
  return byte_permute(as_bits(low), as_bits(high), 0x7632u);
#endif
#else
  return portable::Bfloat::sub(a, b);
#endif
}

}  // namespace wonly
