// A row of float32 numbers as two fp16 numbers each.
#pragma once

#include <cuda_fp16.h>

#include "cuda/element.cuh"
#include "cuda/ptx.cuh"

namespace wonly {

// The largest finite magnitude of those that the threads of a CTA of whole warps have seen, as its bits, for all.
__device__ __forceinline__ uint32_t largest_of_cta(uint32_t largest) {
  __shared__ uint32_t largest_of[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (lane == 0) largest_of[warp] = largest;
  __syncthreads();
  return __reduce_max_sync(0xffffffffu, lane < static_cast<int>(blockDim.x / 32) ? largest_of[lane] : 0u);
}
// The larger of it and a number's.
__device__ __forceinline__ uint32_t larger_finite(uint32_t largest, float value) {
  const uint32_t magnitude = __float_as_uint(fabsf(value));
  return magnitude < 0x7f800000u ? max(largest, magnitude) : largest;
}

// What undoes the power of two of split_power.
__device__ __forceinline__ float split_undo(uint32_t power) { return __uint_as_float(power - (kSplitTop << 23)); }

// The largest magnitude of the numbers of a warp's lanes, as its bits, or those of a NaN.
__device__ __forceinline__ uint32_t largest_of_warp(const uint4& numbers) {
  const auto magnitude = [](uint32_t bits) { return fabsf(__uint_as_float(bits)); };
  const float of_lane = ptx::largest_of(ptx::largest_of(magnitude(numbers.x), magnitude(numbers.y)),
                                        ptx::largest_of(magnitude(numbers.z), magnitude(numbers.w)));
  return __reduce_max_sync(0xffffffffu, __float_as_uint(of_lane));
}

// Four numbers times `up` as two fp16 numbers each.
__device__ __forceinline__ void split_four(const uint4& numbers, float up, uint2* first, uint2* second) {
  const auto split = [&](uint32_t a, uint32_t b, uint32_t& of_first, uint32_t& of_second) {
    const float2 left = beyond_fp16({__uint_as_float(a) * up, __uint_as_float(b) * up}, &of_first);
    of_second = from_float2<__half>(left.x, left.y);
  };
  split(numbers.x, numbers.y, first->x, second->x);
  split(numbers.z, numbers.w, first->y, second->y);
}

// What undoes the power of two that split_power has of `largest`, times 2^more, as bits; a NaN where not all is finite.
__device__ __forceinline__ uint32_t split_undo(uint32_t largest, uint32_t power, int more) {
  return largest >= 0x7f800000u ? 0x7fffffffu : power + ((more - kSplitTop) << 23);
}

constexpr int kSplitEach = 8;  // numbers that a thread takes at a time

// kSplitEach numbers times `up` as two fp16 numbers each. Returns the sum of what they are then.
__device__ __forceinline__ float split_vector(const float4* x, float up, uint4* high, uint4* low) {
  const float4 two[2] = {x[0], x[1]};
  uint32_t first[kSplitEach / 2], second[kSplitEach / 2];
  float sum = 0.f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    for (int j = 0; j < 2; ++j) {
      const float2 raised = {(j == 0 ? two[half].x : two[half].z) * up, (j == 0 ? two[half].y : two[half].w) * up};
      float2 left = beyond_fp16(raised, &first[2 * half + j]);
      if (!isfinite(raised.x)) left.x = 0.f;  // what is not finite is the first number's
      if (!isfinite(raised.y)) left.y = 0.f;
      second[2 * half + j] = from_float2<__half>(left.x, left.y);
      sum += raised.x + raised.y;
    }
  }
  *high = {first[0], first[1], first[2], first[3]};
  *low = {second[0], second[1], second[2], second[3]};
  return sum;
}

// By all threads of a CTA: the numbers times the power of two that makes the largest finite one 2^kSplitTop or more, as
// two fp16 numbers each, and what undoes it. They are exact to 2^-22 of a number, or 2^-39 of that largest one.
// `vectors`: of kSplitEach numbers. of_vector(i, sum): by whole warps, with the sum of vector i in units of that power,
// zero beyond the last.
template <typename OfVector>
__device__ __forceinline__ void split_row(const float4* x, uint4* high, uint4* low, float* undo, int vectors,
                                          OfVector&& of_vector) {
  uint32_t largest = 0;
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 four = x[2 * i + half];
      for (const float value : {four.x, four.y, four.z, four.w}) largest = larger_finite(largest, value);
    }
  }
  const uint32_t power = split_power(largest_of_cta(largest));
  const float up = split_factor(power);
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i - lane < vectors; i += blockDim.x) {
    of_vector(i, i < vectors ? split_vector(x + 2 * i, up, high + i, low + i) : 0.f);
  }
  if (threadIdx.x == 0) *undo = split_undo(power);
}
__device__ __forceinline__ void split_row(const float4* x, uint4* high, uint4* low, float* undo, int vectors) {
  split_row(x, high, low, undo, vectors, [](int, float) {});
}

}  // namespace wonly
