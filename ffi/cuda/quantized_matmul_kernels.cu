#include "cuda/quantized_matmul.cuh"

namespace wonly::quantized {

cudaError_t launch_w4a8(const QuantizedMatmulArgs& args, int multiprocessors, cudaStream_t stream) {
  return launch_codes<4, false>(args, multiprocessors, stream);
}

cudaError_t launch_w4f8(const QuantizedMatmulArgs& args, int multiprocessors, cudaStream_t stream) {
  return launch_codes<4, true>(args, multiprocessors, stream);
}

cudaError_t launch_w8a8(const QuantizedMatmulArgs& args, int multiprocessors, cudaStream_t stream) {
  return launch_codes<8, false>(args, multiprocessors, stream);
}

}  // namespace wonly::quantized
