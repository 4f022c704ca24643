// VNNI, which multiplies unsigned by signed bytes: float32 and float16 rows run in fixed point on exact codes.
// clang-format off: the kernels are written over Ops
#include "cpu/ops_avx512.h"
#include "cpu/planes_impl.h"
// clang-format on

namespace wonly::cpu {

const PlanesKernels& avx512_vnni_planes() { return kPlanesKernels; }

}  // namespace wonly::cpu
