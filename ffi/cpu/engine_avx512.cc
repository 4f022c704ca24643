// clang-format off: the kernels are written over Ops
#include "cpu/ops_avx512.h"
#include "cpu/engine_impl.h"
// clang-format on

namespace wonly::cpu {

const Engine& avx512_engine() {
  static constexpr Engine engine = make_engine("avx512");
  return engine;
}

}  // namespace wonly::cpu
