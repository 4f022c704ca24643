#include "cuda/depthwise_conv.cuh"

namespace wonly::depthwise {

cudaError_t launch_f16(const DirectConvArgs& args, const Config& config, int multiprocessors, cudaStream_t stream) {
  return launch_typed<__half>(args, config, multiprocessors, stream);
}

cudaError_t launch_bf16(const DirectConvArgs& args, const Config& config, int multiprocessors, cudaStream_t stream) {
  return launch_typed<__nv_bfloat16>(args, config, multiprocessors, stream);
}

cudaError_t launch_f32(const DirectConvArgs& args, const Config& config, int multiprocessors, cudaStream_t stream) {
  return launch_typed<float>(args, config, multiprocessors, stream);
}

}  // namespace wonly::depthwise
