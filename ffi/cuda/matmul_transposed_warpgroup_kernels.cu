#include "cuda/matmul_transposed_warpgroup.cuh"

namespace wonly::transposed_warpgroup {

cudaError_t launch_f16(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  return launch_typed<__half>(args, config, stream);
}

cudaError_t launch_bf16(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  return launch_typed<__nv_bfloat16>(args, config, stream);
}

}  // namespace wonly::transposed_warpgroup
