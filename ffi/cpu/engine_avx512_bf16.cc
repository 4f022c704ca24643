// AVX-512 with VNNI, and with vdpbf16ps, which multiplies pairs of bfloat16 and flushes their denormals.
#define WONLY_PLANES 1
#define WONLY_BF16_PAIRS 1
// clang-format off: the kernels are written over Ops
#include "cpu/ops_avx512.h"
#include "cpu/engine_impl.h"
// clang-format on

namespace wonly::cpu {

const Engine& avx512_bf16_engine() {
  static constexpr Engine engine = make_engine("avx512_bf16", true);
  return engine;
}

}  // namespace wonly::cpu
