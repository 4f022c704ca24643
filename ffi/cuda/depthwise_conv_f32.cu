#include "cuda/depthwise_conv.cuh"

namespace wonly::depthwise {

cudaError_t launch_f32(const DirectConvArgs& args, const Config& config, int multiprocessors, cudaStream_t stream) {
  return launch_typed<float>(args, config, multiprocessors, stream);
}

}  // namespace wonly::depthwise
