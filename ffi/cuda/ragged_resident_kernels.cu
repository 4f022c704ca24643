#include "cuda/ragged_resident.cuh"

namespace wonly::ragged_resident {

cudaError_t launch_f16(const RaggedArgs& args, const Device& device, cudaStream_t stream) {
  return launch_typed<__half>(args, device, stream);
}

cudaError_t launch_bf16(const RaggedArgs& args, const Device& device, cudaStream_t stream) {
  return launch_typed<__nv_bfloat16>(args, device, stream);
}

cudaError_t launch_f32(const RaggedArgs& args, const Device& device, cudaStream_t stream) {
  return launch_typed<float>(args, device, stream);
}

}  // namespace wonly::ragged_resident
