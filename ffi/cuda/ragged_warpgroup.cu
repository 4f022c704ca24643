#include "cuda/matmul_warpgroup.h"
#include "cuda/ragged_warpgroup.h"

namespace wonly::ragged_warpgroup {

bool supports(const MatmulArgs& args) {
  MatmulArgs any = args;
  any.m = 1;
  const bool integer_zeros = args.shift_mode == ShiftMode::kZeros && args.shift_dtype == DType::kU8;
  return warpgroup::supports(any) && (args.shift_mode == ShiftMode::kNone || integer_zeros);
}

cudaError_t launch(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream) {
  return args.x_dtype == DType::kF16 ? launch_f16(args, work, multiprocessors, stream)
                                     : launch_bf16(args, work, multiprocessors, stream);
}

}  // namespace wonly::ragged_warpgroup
