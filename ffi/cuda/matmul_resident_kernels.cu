#include "cuda/matmul_resident.cuh"

namespace wonly::resident {

cudaError_t launch_four_bits(const MatmulArgs& args, int64_t rows, const Config& config, int shared_bytes,
                             cudaStream_t stream) {
  return launch_of<4>(args, rows, config, shared_bytes, stream);
}

}  // namespace wonly::resident
