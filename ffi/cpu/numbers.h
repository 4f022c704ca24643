// Conversions between float32 and the 16-bit types, over short rows, as branch-free loops that compilers vectorise.
//
// Included by files compiled for different instruction sets, hence the anonymous namespace: a shared inline function
// could be linked from the widest of them and run on a machine without it. Nothing here has denormal float32 operands,
// because XLA runs handlers with denormals flushed to zero and float16 denormals must survive.
#pragma once

#include <cstdint>
#include <cstring>

#include "abi.h"

namespace wonly {
namespace {

inline float as_float(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline uint32_t as_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

inline float bf16_to_f32(uint16_t h) { return as_float(uint32_t{h} << 16); }

inline uint16_t f32_to_bf16(float f) {
  const uint32_t u = as_bits(f);
  const uint32_t rounded = u + 0x7fffu + ((u >> 16) & 1u);  // to nearest, ties to even
  const uint32_t quiet_nan = u | 0x400000u;
  return static_cast<uint16_t>(((u & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded) >> 16);
}

inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = uint32_t{h & 0x8000u} << 16;
  const uint32_t magnitude = uint32_t{h & 0x7fffu} << 13;
  // Denormals: put the fraction below a leading one of 2^-14 and take that one away again.
  const float tiny = as_float(magnitude + 0x38800000u) - as_float(0x38800000u);
  const uint32_t finite = magnitude + 0x38000000u;
  const uint32_t special = magnitude + 0x70000000u;
  const uint32_t large = magnitude >= 0x0f800000u ? special : finite;
  return as_float((magnitude < 0x00800000u ? as_bits(tiny) : large) | sign);
}

inline uint16_t f32_to_f16(float f) {
  const uint32_t u = as_bits(f);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t a = u & 0x7fffffffu;
  // Below 2^-14: adding 0.5 lines the result's last place up with float32's, which then rounds to nearest even.
  const uint32_t tiny = as_bits(as_float(a) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  const uint32_t special = a > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = a < 0x38800000u ? tiny : normal;
  return static_cast<uint16_t>((a >= 0x477ff000u ? special : finite) | sign);  // 65520 and above round to infinity
}

// out[i] = row[offset + i] as float32, i < count.
inline void load_row(const void* row, DType type, int64_t offset, int64_t count, float* __restrict out) {
  switch (type) {
    case DType::kF32: {
      std::memcpy(out, static_cast<const float*>(row) + offset, 4 * static_cast<size_t>(count));
      break;
    }
    case DType::kF16: {
      const uint16_t* in = static_cast<const uint16_t*>(row) + offset;
      for (int64_t i = 0; i < count; ++i) out[i] = f16_to_f32(in[i]);
      break;
    }
    case DType::kBF16: {
      const uint16_t* in = static_cast<const uint16_t*>(row) + offset;
      for (int64_t i = 0; i < count; ++i) out[i] = bf16_to_f32(in[i]);
      break;
    }
    case DType::kU8: {
      const uint8_t* in = static_cast<const uint8_t*>(row) + offset;
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(in[i]);
      break;
    }
  }
}

// row[offset + i] = values[i] rounded to the type (kU8: values are integers 0..255), i < count.
inline void store_row(const float* __restrict values, int64_t count, void* row, DType type, int64_t offset) {
  switch (type) {
    case DType::kF32: {
      std::memcpy(static_cast<float*>(row) + offset, values, 4 * static_cast<size_t>(count));
      break;
    }
    case DType::kF16: {
      uint16_t* out = static_cast<uint16_t*>(row) + offset;
      for (int64_t i = 0; i < count; ++i) out[i] = f32_to_f16(values[i]);
      break;
    }
    case DType::kBF16: {
      uint16_t* out = static_cast<uint16_t*>(row) + offset;
      for (int64_t i = 0; i < count; ++i) out[i] = f32_to_bf16(values[i]);
      break;
    }
    case DType::kU8: {
      uint8_t* out = static_cast<uint8_t*>(row) + offset;
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<uint8_t>(static_cast<int32_t>(values[i]));
      break;
    }
  }
}

inline float round_to(DType type, float f) {
  if (type == DType::kF16) return f16_to_f32(f32_to_f16(f));
  if (type == DType::kBF16) return bf16_to_f32(f32_to_bf16(f));
  return f;
}

inline float largest_finite(DType type) {
  if (type == DType::kF16) return 65504.0f;
  if (type == DType::kBF16) return as_float(0x7f7f0000u);
  return as_float(0x7f7fffffu);
}

}  // namespace
}  // namespace wonly
