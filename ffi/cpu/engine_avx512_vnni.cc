// AVX-512 with VNNI, which multiplies unsigned by signed bytes: float32 and float16 rows run in fixed point on exact
// codes.
#define WONLY_PLANES 1
// clang-format off: the kernels are written over Ops
#include "cpu/ops_avx512.h"
#include "cpu/engine_impl.h"
// clang-format on

namespace wonly::cpu {

const Engine& avx512_vnni_engine() {
  static constexpr Engine engine = make_engine("avx512_vnni", false);
  return engine;
}

}  // namespace wonly::cpu
