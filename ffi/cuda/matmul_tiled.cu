#include "cuda/matmul_tiled.h"

namespace wonly::tiled {

bool supports(const MatmulArgs& args) {
  const bool sixteen_bits = args.x_dtype == DType::kF16 || args.x_dtype == DType::kBF16;
  const bool shift =
      args.shift_mode == ShiftMode::kNone || args.shift_dtype == DType::kU8 || args.shift_dtype == args.x_dtype;
  return sixteen_bits && args.k % 8 == 0 && args.k > 0 && args.m > 0 && args.scale_dtype == args.x_dtype && shift;
}

cudaError_t launch(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  return args.x_dtype == DType::kF16 ? launch_f16(args, config, stream) : launch_bf16(args, config, stream);
}

}  // namespace wonly::tiled
