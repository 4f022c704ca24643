#include "cuda/matmul_warpgroup.h"
#include "cuda/ragged_warpgroup.h"

namespace wonly::ragged_warpgroup {

bool supports(const MatmulArgs& args) {
  MatmulArgs any = args;
  any.m = 1;
  const bool integer_zeros = args.shift_mode == ShiftMode::kZeros && args.shift_dtype == DType::kU8;
  return warpgroup::supports(any) && (args.shift_mode == ShiftMode::kNone || integer_zeros);
}

int tile_rows(const MatmulArgs& args, int64_t rows, int64_t experts) {
  if (!supports(args)) return 0;
  // Where both heights have a kernel the tiles of a routing by chance are mostly low up to 56 rows of an expert.
  const int groups = log2_group_blocks(args);
  const bool plain = warpgroup::is_plain(args), small_groups = groups == 0 || groups == 1;
  const bool low = args.bits == 4 && (plain || !small_groups), high = plain || !low;
  const int64_t most = high ? kHighRows : kLowRows;
  if (rows > most * experts || (low || args.bits == 8 ? 2 * rows < experts : rows < 8 * experts)) return 0;
  return low && (!high || rows <= 56 * experts) ? kLowRows : kHighRows;
}

cudaError_t launch(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream) {
  return args.x_dtype == DType::kF16 ? launch_f16(args, work, multiprocessors, stream)
                                     : launch_bf16(args, work, multiprocessors, stream);
}

}  // namespace wonly::ragged_warpgroup
