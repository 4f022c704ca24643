// vdpbf16ps, which multiplies pairs of bfloat16 and flushes their denormals.
// clang-format off: the kernels are written over Ops
#include "cpu/ops_avx512.h"
#include "cpu/pairs_impl.h"
// clang-format on

namespace wonly::cpu {

const PairsKernels& avx512_bf16_pairs() { return kPairsKernels; }

}  // namespace wonly::cpu
