#include <algorithm>

#include "cuda/costs.h"
#include "cuda/matmul_warpgroup.h"
#include "cuda/ragged_warpgroup.h"
#include "layout.h"

namespace wonly::ragged_warpgroup {

bool supports(const MatmulArgs& args) {
  MatmulArgs any = args;
  any.m = 1;
  if (args.x_dtype == DType::kF32) any.x_dtype = DType::kF16;  // which they become
  if (!warpgroup::supports(any)) return false;
  const bool float32 = args.x_dtype == DType::kF32;
  if (args.shift_mode == ShiftMode::kTable) return args.shift_batch_stride == 0;
  return !has_float_shift(args) || float32 || rounds(args, kLowRows);
}

int64_t float32_sums(const MatmulArgs& args) {
  if (args.x_dtype != DType::kF32 || !has_float_shift(args)) return 0;
  return ceil_div(args.k, has_small_groups(args) ? 32 : 128);
}

bool rounds(const MatmulArgs& args, int tile_rows) {
  if (args.bits == 8 || args.x_dtype == DType::kF32) return false;
  if (has_float_shift(args)) {
    return args.shift_dtype == args.x_dtype && args.scale_dtype == args.x_dtype && args.n % 8 == 0;
  }
  return warpgroup::is_plain(args) && has_small_groups(args) && tile_rows == kHighRows;
}

int tile_rows(const MatmulArgs& args, int64_t rows, int64_t experts) {
  if (!supports(args)) return 0;
  const bool plain = warpgroup::is_plain(args), small_groups = has_small_groups(args), floats = has_float_shift(args);
  if (args.x_dtype == DType::kF32) {
    const int64_t least = !floats        ? costs::kRaggedWarpgroupLeastFloat32Rows
                          : small_groups ? costs::kRaggedWarpgroupLeastFloat32RowsOfSmallGroups
                                         : costs::kRaggedWarpgroupLeastFloat32RowsOfShifts;
    return rows < least * experts ? 0 : kLowRows;
  }
  if (args.shift_mode == ShiftMode::kTable) {
    const int64_t of_inputs = 1 + args.k / costs::kRaggedWarpgroupTableInputsOfRow;
    const int64_t least = std::min(costs::kRaggedWarpgroupLeastTableRows, of_inputs);
    return rows >= least * experts && rows <= costs::kRaggedWarpgroupTableRows * experts ? kLowRows : 0;
  }
  const bool low = args.bits == 4 && (plain || floats || !small_groups), high = plain || floats || !low;
  // What makes ragged_tiled slower: outputs, 256 at a time, of which a sixteenth and more are none.
  const bool wasted = (ceil_div(args.n, 256) * 256 - args.n) * 16 >= args.n;
  const bool more = args.bits == 4 && (plain || floats) && wasted;
  const int64_t most = !high ? kLowRows : more ? costs::kRaggedWarpgroupMoreRows : kHighRows;
  const bool few = low || args.bits == 8 ? costs::kRaggedWarpgroupExpertsOfRow * rows < experts
                                         : rows < costs::kRaggedWarpgroupLeastRows * experts;
  if (rows > most * experts || few) return 0;
  // Where both heights have a kernel the tiles of a routing by chance are mostly low up to 56 rows of an expert. With
  // small groups high ones have fewer instructions, and with offsets of large groups.
  const bool large_offsets = floats && args.shift_mode == ShiftMode::kOffsets && !small_groups;
  const int64_t low_rows = large_offsets           ? costs::kRaggedWarpgroupLowRowsOfOffsets
                           : plain && small_groups ? costs::kRaggedWarpgroupLowRowsOfSmallGroups
                                                   : costs::kRaggedWarpgroupLowRows;
  return low && (!high || rows <= low_rows * experts) ? kLowRows : kHighRows;
}

cudaError_t launch(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream) {
  if (args.x_dtype == DType::kF32) return launch_f32(args, work, multiprocessors, stream);
  return args.x_dtype == DType::kF16 ? launch_f16(args, work, multiprocessors, stream)
                                     : launch_bf16(args, work, multiprocessors, stream);
}

}  // namespace wonly::ragged_warpgroup
