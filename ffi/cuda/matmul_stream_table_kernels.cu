#include "cuda/matmul_stream.cuh"

namespace wonly::stream {

cudaError_t launch_table(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  switch (args.x_dtype) {
    case DType::kF16:
      return launch_typed<__half>(args, ConsecutiveOfTable{}, config, stream);
    case DType::kBF16:
      return launch_typed<__nv_bfloat16>(args, ConsecutiveOfTable{}, config, stream);
    case DType::kF32:
      return launch_typed<float>(args, ConsecutiveOfTable{}, config, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace wonly::stream
