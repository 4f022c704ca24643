// Division by a number that a kernel is launched with: a multiplication and a shift instead of some twenty
// instructions.
#pragma once

#include <cstdint>

#include "layout.h"

namespace wonly {

struct Divisor {
  uint32_t divisor = 1, multiplier = 0;
  int shift = 0;

  Divisor() = default;
  explicit Divisor(int by) : divisor(static_cast<uint32_t>(by)) {
    if (by <= 1) return;
    while ((uint64_t{1} << shift) < divisor) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + divisor - 1) / divisor);
    --shift;
  }

#if defined(__CUDACC__)
  // Of what is neither negative nor 2^31 or more; `rest` is what remains.
  __device__ __forceinline__ int divide(int value, int* rest) const {
    const int quotient =
        divisor == 1 ? value : static_cast<int>(__umulhi(static_cast<uint32_t>(value), multiplier) >> shift);
    *rest = value - quotient * static_cast<int>(divisor);
    return quotient;
  }
#endif
};

}  // namespace wonly
