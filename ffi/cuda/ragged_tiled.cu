#include "cuda/ragged_tiled.h"

namespace wonly::ragged_tiled {

bool supports(const MatmulArgs& args) {
  return (args.x_dtype == DType::kF16 || args.x_dtype == DType::kBF16) && args.k % 8 == 0;
}

cudaError_t launch(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream) {
  return args.x_dtype == DType::kF16 ? launch_f16(args, work, multiprocessors, stream)
                                     : launch_bf16(args, work, multiprocessors, stream);
}

}  // namespace wonly::ragged_tiled
