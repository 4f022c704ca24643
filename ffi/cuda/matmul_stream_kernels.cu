#include "cuda/matmul_stream.cuh"

namespace wonly::stream {

cudaError_t launch_f16(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  return launch_typed<__half>(args, Consecutive{}, config, stream);
}

cudaError_t launch_bf16(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  return launch_typed<__nv_bfloat16>(args, Consecutive{}, config, stream);
}

cudaError_t launch_f32(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  return launch_typed<float>(args, Consecutive{}, config, stream);
}

}  // namespace wonly::stream
