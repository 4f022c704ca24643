#include "cuda/matmul_resident.cuh"

namespace wonly::resident {

cudaError_t launch_f32(const MatmulArgs& args, const Config& config, int shared_bytes, cudaStream_t stream) {
  return launch_typed<float>(args, config, shared_bytes, stream);
}

}  // namespace wonly::resident
