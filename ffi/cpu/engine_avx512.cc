#include "cpu/ops_avx512.h"

#include "cpu/engine_impl.h"

namespace wonly::cpu {

const Engine& avx512_engine() {
  static constexpr Engine engine = make_engine("avx512", false);
  return engine;
}

}  // namespace wonly::cpu
