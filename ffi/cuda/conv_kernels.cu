#include "cuda/conv.cuh"
#include "cuda/conv_warpgroup.cuh"

namespace wonly::conv {

cudaError_t launch_f16(const ConvArgs& args, const tiled::Config& config, cudaStream_t stream) {
  return launch_typed<__half>(args, config, stream);
}

cudaError_t launch_f16(const ConvArgs& args, const warpgroup::Config& config, cudaStream_t stream) {
  return launch_warpgroups<__half>(args, config, stream);
}

cudaError_t launch_bf16(const ConvArgs& args, const tiled::Config& config, cudaStream_t stream) {
  return launch_typed<__nv_bfloat16>(args, config, stream);
}

cudaError_t launch_bf16(const ConvArgs& args, const warpgroup::Config& config, cudaStream_t stream) {
  return launch_warpgroups<__nv_bfloat16>(args, config, stream);
}

}  // namespace wonly::conv
