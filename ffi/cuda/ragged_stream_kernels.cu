#include "cuda/matmul_stream.cuh"

namespace wonly::stream {

cudaError_t launch_ragged_f16(const MatmulArgs& args, const ragged::Work& work, const Config& config,
                              cudaStream_t stream) {
  return launch_typed<__half>(args, Ragged{work, 0, 0}, config, stream);
}

cudaError_t launch_ragged_bf16(const MatmulArgs& args, const ragged::Work& work, const Config& config,
                               cudaStream_t stream) {
  return launch_typed<__nv_bfloat16>(args, Ragged{work, 0, 0}, config, stream);
}

cudaError_t launch_ragged_f32(const MatmulArgs& args, const ragged::Work& work, const Config& config,
                              cudaStream_t stream) {
  return launch_typed<float>(args, Ragged{work, 0, 0}, config, stream);
}

cudaError_t launch_ragged_table(const MatmulArgs& args, const ragged::Work& work, const Config& config,
                                cudaStream_t stream) {
  const RaggedOfTable source{{work, 0, 0}};
  switch (args.x_dtype) {
    case DType::kF16:
      return launch_typed<__half>(args, source, config, stream);
    case DType::kBF16:
      return launch_typed<__nv_bfloat16>(args, source, config, stream);
    case DType::kF32:
      return launch_typed<float>(args, source, config, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace wonly::stream
