#include "cuda/ragged_tiled.h"

namespace wonly::ragged_tiled {

cudaError_t launch(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream) {
  return args.x_dtype == DType::kF16 ? launch_f16(args, work, multiprocessors, stream)
                                     : launch_bf16(args, work, multiprocessors, stream);
}

}  // namespace wonly::ragged_tiled
