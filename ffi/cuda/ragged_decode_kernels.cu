#include "cuda/matmul_decode.cuh"

namespace wonly::decode {

cudaError_t launch_ragged(const MatmulArgs& args, const ragged::Work& work, int ctas, int shared_bytes,
                          cudaStream_t stream) {
  return launch_bits<8>(args, Ragged{work, 0}, {1, ctas}, shared_bytes, stream);
}

}  // namespace wonly::decode
