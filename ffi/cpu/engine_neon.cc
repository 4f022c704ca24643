// clang-format off: the kernels are written over Ops
#include "cpu/ops_neon.h"
#include "cpu/engine_impl.h"
// clang-format on

namespace wonly::cpu {

const Engine& neon_engine() {
  static constexpr Engine engine = make_engine("neon");
  return engine;
}

}  // namespace wonly::cpu
