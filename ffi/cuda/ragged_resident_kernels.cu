#include "cuda/ragged_resident.cuh"

namespace wonly::ragged_resident {

cudaError_t launch_f16(const RaggedArgs& args, int multiprocessors, int shared_bytes, cudaStream_t stream) {
  return launch_typed<__half>(args, multiprocessors, shared_bytes, stream);
}

cudaError_t launch_bf16(const RaggedArgs& args, int multiprocessors, int shared_bytes, cudaStream_t stream) {
  return launch_typed<__nv_bfloat16>(args, multiprocessors, shared_bytes, stream);
}

cudaError_t launch_f32(const RaggedArgs& args, int multiprocessors, int shared_bytes, cudaStream_t stream) {
  return launch_typed<float>(args, multiprocessors, shared_bytes, stream);
}

}  // namespace wonly::ragged_resident
