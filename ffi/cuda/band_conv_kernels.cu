#include "cuda/band_conv.cuh"

namespace wonly::bands {

cudaError_t launch_f16(const DirectConvArgs& args, int multiprocessors, cudaStream_t stream) {
  return launch_typed<__half>(args, multiprocessors, stream);
}

cudaError_t launch_bf16(const DirectConvArgs& args, int multiprocessors, cudaStream_t stream) {
  return launch_typed<__nv_bfloat16>(args, multiprocessors, stream);
}

}  // namespace wonly::bands
