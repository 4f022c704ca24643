// Vectors that lie across two.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace wonly {

// Sixteen of the 32 bytes of two vectors, from byte `first` on, which is less than 16.
__device__ __forceinline__ uint4 bytes_from(const uint4& low, const uint4& high, uint32_t first) {
  uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) words[i] = first & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) words[i] = first & 4 ? words[i + 1] : words[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], first % 4 * 8);
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace wonly
