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
  // Where it was so many stages ago, no more of them than there are slots.
  __device__ RingPosition before(int stages) const {
    const int back = slot - stages;
    return back < 0 ? RingPosition{back + kStages, phase ^ 1} : RingPosition{back, phase};
  }
};

}  // namespace wonly
