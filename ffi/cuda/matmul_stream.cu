#include "cuda/matmul_stream.h"

namespace wonly::stream {

cudaError_t launch(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  if (args.shift_mode == ShiftMode::kTable) return launch_table(args, config, stream);
  switch (args.x_dtype) {
    case DType::kF16:
      return launch_f16(args, config, stream);
    case DType::kBF16:
      return launch_bf16(args, config, stream);
    case DType::kF32:
      return launch_f32(args, config, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t launch_ragged(const MatmulArgs& args, const ragged::Work& work, const Config& config, cudaStream_t stream) {
  if (args.shift_mode == ShiftMode::kTable) return launch_ragged_table(args, work, config, stream);
  switch (args.x_dtype) {
    case DType::kF16:
      return launch_ragged_f16(args, work, config, stream);
    case DType::kBF16:
      return launch_ragged_bf16(args, work, config, stream);
    case DType::kF32:
      return launch_ragged_f32(args, work, config, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace wonly::stream
