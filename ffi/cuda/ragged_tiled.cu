#include "cuda/ragged_tiled.h"

namespace wonly::ragged_tiled {

bool supports(const MatmulArgs& args) {
  const auto known = [&](DType type) { return type == args.x_dtype || type == DType::kF32; };
  return (args.x_dtype == DType::kF16 || args.x_dtype == DType::kBF16) && args.k % 8 == 0 && known(args.scale_dtype) &&
         (args.shift_mode == ShiftMode::kNone || args.shift_mode == ShiftMode::kTable ||
          args.shift_dtype == DType::kU8 || known(args.shift_dtype));
}

cudaError_t launch(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream) {
  return args.x_dtype == DType::kF16 ? launch_f16(args, work, multiprocessors, stream)
                                     : launch_bf16(args, work, multiprocessors, stream);
}

}  // namespace wonly::ragged_tiled
