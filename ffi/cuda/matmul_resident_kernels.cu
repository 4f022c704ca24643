#include "cuda/matmul_resident.cuh"

namespace wonly::resident {

cudaError_t launch_f16(const MatmulArgs& args, const Config& config, int shared_bytes, cudaStream_t stream) {
  return launch_typed<__half>(args, config, shared_bytes, stream);
}

cudaError_t launch_bf16(const MatmulArgs& args, const Config& config, int shared_bytes, cudaStream_t stream) {
  return launch_typed<__nv_bfloat16>(args, config, shared_bytes, stream);
}

cudaError_t launch_f32(const MatmulArgs& args, const Config& config, int shared_bytes, cudaStream_t stream) {
  return launch_typed<float>(args, config, shared_bytes, stream);
}

}  // namespace wonly::resident
