// Array elements of 16 and 32 bits (and uint8 zeros) as floats and back: one switch over DType for all CUDA kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "abi.h"

namespace wonly {

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(uint8_t value) { return static_cast<float>(value); }

// Rounds to nearest, ties to even; beyond the largest finite value, to infinity.
template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// Two values in one 32-bit register, the first in the low half.
__device__ __forceinline__ uint32_t pack_pair(__half low, __half high) {
  return __half_as_ushort(low) | static_cast<uint32_t>(__half_as_ushort(high)) << 16;
}
__device__ __forceinline__ uint32_t pack_pair(__nv_bfloat16 low, __nv_bfloat16 high) {
  return __bfloat16_as_ushort(low) | static_cast<uint32_t>(__bfloat16_as_ushort(high)) << 16;
}

// The same of two values, which one instruction rounds.
template <typename T>
__device__ __forceinline__ uint32_t from_float2(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 both = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(both);
  } else {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(both);
  }
}

// And back.
template <typename X>
__device__ __forceinline__ float2 to_floats(uint32_t pair) {
  if constexpr (std::is_same_v<X, __nv_bfloat16>) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
}

// What a float32 is beyond the bf16 number in its upper half. It is exactly the sum of three such numbers, split by
// truncation: 24 = 8 + 8 + 8 bits.
__device__ __forceinline__ float beyond_bf16(float value) {
  return value - __uint_as_float(__float_as_uint(value) & 0xffff0000u);
}

// A float32 as two fp16 numbers, in units of a power of two that makes the largest around it 2^kSplitTop or more, below
// twice that, or smaller, if it was below 2^-100.
constexpr int kSplitTop = 14;
// The bits of that largest one's power of two, from those of its magnitude (the unit is 2^kSplitTop smaller); and what
// to multiply by first.
__device__ __forceinline__ uint32_t split_power(uint32_t largest) { return max(largest & 0x7f800000u, 27u << 23); }
__device__ __forceinline__ float split_factor(uint32_t power) {
  return __uint_as_float((254u + kSplitTop << 23) - power);
}
// The first number of two that were so multiplied, and what they are beyond it.
__device__ __forceinline__ float2 beyond_fp16(float2 raised, uint32_t* first) {
  *first = from_float2<__half>(raised.x, raised.y);
  const float2 rounded = __half22float2(*reinterpret_cast<const __half2*>(first));
  return {raised.x - rounded.x, raised.y - rounded.y};
}

// Sixteen bytes of an array that are not aligned for a vector copy, or that its end cuts: zeros after `left` elements.
template <typename T>
__device__ __noinline__ uint4 load_some(const T* from, int64_t left) {
  union {
    uint4 vector;
    T elements[16 / sizeof(T)];
  } chunk;
  chunk.vector = {};
  for (int i = 0; i < static_cast<int>(16 / sizeof(T)) && i < left; ++i) chunk.elements[i] = from[i];
  return chunk.vector;
}

__device__ __forceinline__ float load_element(const void* array, int64_t index, DType type) {
  switch (type) {
    case DType::kF16:
      return to_float(static_cast<const __half*>(array)[index]);
    case DType::kBF16:
      return to_float(static_cast<const __nv_bfloat16*>(array)[index]);
    case DType::kU8:
      return to_float(static_cast<const uint8_t*>(array)[index]);
    default:
      return static_cast<const float*>(array)[index];
  }
}

// An element of a floating type from its bits, as they lie in memory.
__device__ __forceinline__ float from_bits(uint32_t bits, DType type) {
  const float single = __uint_as_float(bits << (type == DType::kF32 ? 0 : 16));
  return type == DType::kF16 ? to_float(__ushort_as_half(static_cast<uint16_t>(bits))) : single;
}

// The weight that a code stands for; symmetric codes have their bias as `shift`.
__device__ __forceinline__ float weight_of(ShiftMode mode, float code, float scale, float shift) {
  const bool offsets = mode == ShiftMode::kOffsets;
  return fmaf(offsets ? code : code - shift, scale, offsets ? shift : 0.f);
}

// Several elements of a floating type at once: one choice of type. `index(i)`: where element i is.
template <int kCount, typename Index>
__device__ __forceinline__ void load_elements(const void* array, DType type, float (&to)[kCount], Index&& index) {
  uint32_t bits[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    bits[i] = type == DType::kF32 ? static_cast<const uint32_t*>(array)[index(i)]
                                  : static_cast<const uint16_t*>(array)[index(i)];
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = from_bits(bits[i], type);
}

// `left` of them, from one on, and zeros.
template <int kCount>
__device__ __forceinline__ void load_some_elements(const void* array, DType type, int64_t first, int left,
                                                   float (&to)[kCount]) {
  uint32_t bits[kCount] = {};
  // One address for all of them.
  const auto load = [&](const auto* from) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < left) bits[i] = from[i];
    }
  };
  if (type == DType::kF32) {
    load(static_cast<const uint32_t*>(array) + first);
  } else {
    load(static_cast<const uint16_t*>(array) + first);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = from_bits(bits[i], type);
}

// Zero, of 16 bits or 32.
__device__ __forceinline__ void store_zero(void* array, int64_t index, DType type) {
  if (type == DType::kF32) {
    static_cast<uint32_t*>(array)[index] = 0;
  } else {
    static_cast<uint16_t*>(array)[index] = 0;
  }
}

// A uint8 array takes integers of 0 to 255.
__device__ __forceinline__ void store_element(void* array, int64_t index, float value, DType type) {
  switch (type) {
    case DType::kF16:
      static_cast<__half*>(array)[index] = from_float<__half>(value);
      return;
    case DType::kBF16:
      static_cast<__nv_bfloat16*>(array)[index] = from_float<__nv_bfloat16>(value);
      return;
    case DType::kU8:
      static_cast<uint8_t*>(array)[index] = static_cast<uint8_t>(value);
      return;
    default:
      static_cast<float*>(array)[index] = value;
  }
}

// Of a floating type.
__device__ __forceinline__ void store_float(void* array, int64_t index, float value, DType type) {
  if (type == DType::kF32) {
    static_cast<float*>(array)[index] = value;
  } else {
    static_cast<uint16_t*>(array)[index] = static_cast<uint16_t>(
        type == DType::kF16 ? from_float2<__half>(value, 0.f) : from_float2<__nv_bfloat16>(value, 0.f));
  }
}

// `value` as it reads back after being stored as `type`, which is a floating one.
__device__ __forceinline__ float round_to(DType type, float value) {
  switch (type) {
    case DType::kF16:
      return to_float(from_float<__half>(value));
    case DType::kBF16:
      return to_float(from_float<__nv_bfloat16>(value));
    default:
      return value;
  }
}

// Largest finite value of a floating type.
__device__ __forceinline__ float largest_finite(DType type) {
  switch (type) {
    case DType::kF16:
      return 65504.0f;
    case DType::kBF16:
      return __uint_as_float(0x7f7f0000u);
    default:
      return __uint_as_float(0x7f7fffffu);
  }
}

// Eight consecutive elements in registers, as they lie in memory.
template <typename T>
struct Row8 {
  static constexpr int kVectors = sizeof(T) * 8 / sizeof(uint4);  // 1 for 16-bit types, 2 for float
  union {
    uint4 vectors[kVectors];
    T elements[8];
  };

  __device__ Row8() {}

  // `source` is 16-byte aligned.
  __device__ __forceinline__ void load(const T* source) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) vectors[i] = __ldg(reinterpret_cast<const uint4*>(source) + i);
  }
  __device__ __forceinline__ void store(T* target) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) reinterpret_cast<uint4*>(target)[i] = vectors[i];
  }
  // Of a row that ends after `count` elements, or is not aligned; the rest reads as zero and is not written.
  __device__ __forceinline__ void load_some(const T* source, int count) {
#pragma unroll
    for (int i = 0; i < 8; ++i) elements[i] = i < count ? source[i] : from_float<T>(0.0f);
  }
  __device__ __forceinline__ void store_some(T* target, int count) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < count) target[i] = elements[i];
    }
  }
};

// Calls `body` with a null pointer to the C++ type of `type`: a kernel's template argument is then its pointee.
template <typename Body>
cudaError_t dispatch_float(DType type, Body&& body) {
  switch (type) {
    case DType::kF16:
      return body(static_cast<__half*>(nullptr));
    case DType::kBF16:
      return body(static_cast<__nv_bfloat16*>(nullptr));
    case DType::kF32:
      return body(static_cast<float*>(nullptr));
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace wonly
