// AVX-VNNI, which multiplies unsigned by signed bytes in the registers of AVX2.
// clang-format off: the kernels are written over Ops
#include "cpu/ops_avx2.h"
#include "cpu/planes_impl.h"
// clang-format on

namespace wonly::cpu {

const PlanesKernels& avx2_vnni_planes() { return kPlanesKernels; }

}  // namespace wonly::cpu
