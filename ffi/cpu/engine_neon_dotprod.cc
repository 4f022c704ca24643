// NEON with products of signed bytes: float32 and float16 rows run in fixed point on exact codes.
// clang-format off: the kernels are written over Ops
#include "cpu/ops_neon.h"
#include "cpu/planes_impl.h"
// clang-format on

namespace wonly::cpu {

const PlanesKernels& neon_dotprod_planes() { return kPlanesKernels; }

}  // namespace wonly::cpu
