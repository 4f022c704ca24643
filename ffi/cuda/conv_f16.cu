#include "cuda/conv.cuh"

namespace wonly::conv {

cudaError_t launch_f16(const ConvArgs& args, const Config& config, int multiprocessors, cudaStream_t stream) {
  return launch_typed<__half>(args, config, multiprocessors, stream);
}

}  // namespace wonly::conv
