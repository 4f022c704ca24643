// clang-format off: the kernels are written over Ops
#include "cpu/ops_avx2.h"
#include "cpu/engine_impl.h"
#include "cpu/planes_impl.h"
// clang-format on

namespace wonly::cpu {

const Engine& avx2_engine() {
  static constexpr Engine engine = make_engine("avx2", &kPlanesKernels);
  return engine;
}

}  // namespace wonly::cpu
