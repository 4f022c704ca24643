#pragma once

#include <cstdint>

namespace wonly {

// A slot of a ring of stages, and how often, modulo 2, the walk has been around.
template <int kStages>
struct RingPosition {
  int slot = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    if (++slot == kStages) {
      slot = 0;
      phase ^= 1;
    }
  }
};

}  // namespace wonly
