// What one of a product's two kernels computes (matmul_parts.h).
#pragma once

#include <cstdint>

namespace wonly {

// Outputs from `first` on, with whole tiles of 64 before it; as many as `outputs`, which fill the kernel's tiles, or,
// if that is 0, all that follow.
struct Part {
  int first = 0, outputs = 0;

  int64_t count(int64_t n) const { return outputs > 0 ? outputs : n - first; }
};

}  // namespace wonly
