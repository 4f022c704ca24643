#include "cuda/matmul_decode.cuh"

namespace wonly::decode {

cudaError_t launch_int4(const MatmulArgs& args, const Config& config, int shared_bytes, cudaStream_t stream) {
  return launch_bits<4>(args, Consecutive{}, config, shared_bytes, stream);
}

cudaError_t launch_int8(const MatmulArgs& args, const Config& config, int shared_bytes, cudaStream_t stream) {
  return launch_bits<8>(args, Consecutive{}, config, shared_bytes, stream);
}

}  // namespace wonly::decode
