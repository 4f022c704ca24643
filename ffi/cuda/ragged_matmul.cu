// Which kernel runs which ragged product. The numbers are those of jax_wonly/costs, which follow what was measured on
// an H100; jax_wonly/_cuda_experts.py predicts the same.
#include <algorithm>

#include "cuda/costs.h"
#include "cuda/device.h"
#include "cuda/matmul_decode.h"
#include "cuda/matmul_stream.h"
#include "cuda/matmul_tiled.h"
#include "cuda/matmul_warpgroup.h"
#include "cuda/ragged.h"
#include "cuda/ragged_plan.h"
#include "cuda/ragged_resident.h"
#include "cuda/ragged_tiled.h"
#include "cuda/ragged_warpgroup.h"

namespace wonly {
namespace {

cudaError_t launch_stream(const RaggedArgs& args, const Device& device, cudaStream_t stream) {
  stream::Config config{};
  config.atoms = 4;
  const bool wide = stream::has_wide_tiles(args.product.bits, element_size(args.product.x_dtype));
  config.token_tiles = wide && args.m > 8 * args.experts ? 2 : 1;
  // Where every CTA keeps a table of pairs beside its rings.
  const bool has_pairs = args.product.shift_mode == ShiftMode::kTable && args.product.x_dtype != DType::kF32;
  // The tiles that there will be at least, if rows have different experts.
  const int64_t ctas = std::min(args.m, args.experts) * ceil_div(args.product.n, kTileN);
  config.cluster = 1;
  if (device.architecture >= 90) {
    while (config.cluster < 8 && ctas * config.cluster < device.multiprocessors / 2) config.cluster *= 2;
    // CTAs with a table have a multiprocessor to themselves, of which clusters of four can use ten in eleven.
    const bool alone = has_pairs && ctas * config.cluster * 11 > device.multiprocessors * 10;
    if (alone && config.cluster >= 4) config.cluster /= 2;
  }
  const int64_t stages = ceil_div(args.product.k, stream::kStageInputs * config.cluster);
  // Several small CTAs on a multiprocessor, where there are enough, so that some read while others begin or end; three
  // or four warps, whichever share the inputs out more evenly.
  const int64_t each = ceil_div(ctas * config.cluster, device.multiprocessors);
  const int few = ceil_div(stages, 3) * 3 < ceil_div(stages, 4) * 4 ? 3 : 4;
  // Eight of two, where they leave no more places empty in the last round than four.
  const bool small = config.token_tiles == 1 && ceil_div(each, 8) * 8 == ceil_div(each, 4) * 4;
  config.warps = each >= 3 ? (small ? 2 : few) : each == 2 || config.token_tiles == 2 ? 8 : 16;
  if (has_pairs) config.warps = each == 1 ? 14 : 6;
  ragged::Work work;
  cudaError_t error = ragged::plan(args, 8 * config.token_tiles, false, shared_share(device, 1), stream, &work);
  if (error != cudaSuccess) return error;
  error = cudaErrorInvalidConfiguration;
  for (int share = 16 / config.warps; share >= 1 && error == cudaErrorInvalidConfiguration; --share) {
    config.shared_bytes = shared_share(device, share);
    error = stream::launch_ragged(args.product, work, config, stream);
  }
  while (error == cudaErrorInvalidConfiguration && config.warps > 1) {  // less shared memory than on the tuned devices
    config.warps /= 2;
    error = stream::launch_ragged(args.product, work, config, stream);
  }
  return error;
}

// These return cudaErrorInvalidConfiguration where the kernel does not take `args`, or is not expected to be faster.

cudaError_t launch_resident(const RaggedArgs& args, const Device& device, cudaStream_t stream) {
  const MatmulArgs& product = args.product;
  // With more rows some experts have more than a tile, for which their weights are read again. Of few experts it is
  // faster than ragged_warpgroup up to so many, and where that takes long for a tile.
  const int64_t few = std::min(costs::kRaggedResidentRows, costs::kRaggedResidentRowsOfExpert * args.experts);
  const bool quick = product.n * product.k * product.bits / 8 <= costs::kRaggedResidentBytes ||
                     (product.bits == 4 && has_small_groups(product));
  const int64_t of_expert = product.shift_mode == ShiftMode::kTable ? costs::kRaggedResidentTableRowsOfExpert
                            : product.x_dtype == DType::kF32        ? costs::kRaggedResidentFloat32RowsOfExpert
                            : quick                                 ? costs::kRaggedResidentQuickRowsOfExpert
                                                                    : 1;
  const int64_t most = std::max(few, of_expert * args.experts);
  if (device.architecture != 90 || args.m > most || !ragged_resident::supports(product)) {
    return cudaErrorInvalidConfiguration;
  }
  return ragged_resident::launch(args, device, stream);
}

// Eight bits alone, which ragged_resident takes longer to ask for: with four it is at least as fast.
cudaError_t launch_decode(const RaggedArgs& args, const Device& device, cudaStream_t stream) {
  MatmulArgs one = args.product;
  one.m = decode::tile_tokens(args.product);
  // It reads the weights again for every two rows, or one, of which few experts may have more; four warpgroups share
  // the inputs.
  const int64_t most = std::min<int64_t>(args.experts / costs::kRaggedDecodeExpertsOfRow, device.multiprocessors);
  if (device.architecture != 90 || args.product.bits != 8 || args.product.k < costs::kRaggedDecodeInputs ||
      args.m > most || args.product.x_dtype == DType::kF32 || !decode::supports(one)) {
    return cudaErrorInvalidConfiguration;
  }
  ragged::Work work;
  const int shared = shared_share(device, 1);
  const cudaError_t error = ragged::plan(args, static_cast<int>(one.m), false, shared, stream, &work);
  return error == cudaSuccess ? decode::launch_ragged(args.product, work, device.multiprocessors, shared, stream)
                              : error;
}

}  // namespace

cudaError_t launch_ragged_matmul(const RaggedArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(&device); error != cudaSuccess) return error;
  if (device.architecture < 80 && args.product.x_dtype != DType::kF16) return cudaErrorNotSupported;
  const bool ids = args.row_mode == RowMode::kIds;
  const bool splits = args.product.x_dtype == DType::kF32;  // into numbers that are in order
  const bool in_order = device.architecture == 90 &&
                        (!(ids || splits) || ragged::can_order(args, ragged_warpgroup::float32_sums(args.product)));
  for (const auto launch : {launch_decode, launch_resident}) {
    const cudaError_t error = launch(args, device, stream);
    if (error != cudaErrorInvalidConfiguration) return error;
  }
  // Ids cost it two kernels more, which put the rows in order.
  const bool warpgroup = in_order && (!ids || args.m >= args.experts);
  const int rows = warpgroup ? ragged_warpgroup::tile_rows(args.product, args.m, args.experts) : 0;  // of a tile
  const bool many = args.m >= costs::kRaggedTiledRows * args.experts;  // were rows spread evenly
  const bool tiled = in_order && rows == 0 && many && tiled::takes(args.product);
  if (rows == 0 && !tiled) return launch_stream(args, device, stream);
  ragged::Work work;
  cudaError_t error =
      ragged::plan(args, tiled ? ragged_tiled::kTileRows : rows, ids, shared_share(device, 1), stream, &work);
  if (error != cudaSuccess) return error;
  MatmulArgs product = args.product;
  if (splits) {
    product.scratch = ragged::ordered_rows(args);
  } else if (ids) {
    error = ragged::order(args, work, &product.x, stream);
  }
  if (error != cudaSuccess) return error;
  const auto launch = tiled ? ragged_tiled::launch : ragged_warpgroup::launch;
  return launch(product, work, device.multiprocessors, stream);
}

}  // namespace wonly
