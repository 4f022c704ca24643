#include "cuda/band_conv.cuh"

namespace wonly::bands {

cudaError_t launch_f16(const DirectConvArgs& args, int multiprocessors, cudaStream_t stream) {
  return launch_typed<__half>(args, multiprocessors, stream);
}

}  // namespace wonly::bands
