#include "cuda/matmul_transposed_stream.cuh"

namespace wonly::transposed_stream {

cudaError_t launch_ragged_f16(const MatmulArgs& args, const ragged::Work& work, const Config& config,
                              cudaStream_t stream) {
  return launch_typed<__half>(args, Ragged{work, 0}, config, stream);
}

cudaError_t launch_ragged_bf16(const MatmulArgs& args, const ragged::Work& work, const Config& config,
                               cudaStream_t stream) {
  return launch_typed<__nv_bfloat16>(args, Ragged{work, 0}, config, stream);
}

cudaError_t launch_ragged_f32(const MatmulArgs& args, const ragged::Work& work, const Config& config,
                              cudaStream_t stream) {
  return launch_typed<float>(args, Ragged{work, 0}, config, stream);
}

}  // namespace wonly::transposed_stream
