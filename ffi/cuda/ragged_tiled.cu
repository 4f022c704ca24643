#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/ragged_plan.cuh"
#include "cuda/ragged_tiled.h"

namespace wonly::ragged_tiled {
namespace {

constexpr int kOrderThreads = 256;

// Rows of x in the plan's order, in vectors of 16 bytes.
__global__ void __launch_bounds__(kOrderThreads)
    order_rows(const uint4* x, uint4* to, const int* order, int rows, int repeat, int vectors) {
  for (int at = blockIdx.x; at < rows; at += gridDim.x) {
    const uint4* const from = x + static_cast<int64_t>(order[at] / repeat) * vectors;
    for (int i = threadIdx.x; i < vectors; i += kOrderThreads) to[static_cast<int64_t>(at) * vectors + i] = from[i];
  }
}

// Before the ordered rows, which begin at a multiple of 16 bytes.
int64_t plan_words(const RaggedArgs& args) {
  return ceil_div(kRaggedScratchPerRow * args.m + kRaggedScratchPerExpert * args.experts + kRaggedScratchFixed, 4) * 4;
}

}  // namespace

bool supports(const RaggedArgs& args) {
  const bool sixteen_bits = args.product.x_dtype == DType::kF16 || args.product.x_dtype == DType::kBF16;
  const bool in_order = args.row_mode == RowMode::kSizes;
  const bool room = in_order || args.scratch_words >= plan_words(args) + args.m * args.product.k / 2;
  return sixteen_bits && args.product.k % 8 == 0 && room;
}

cudaError_t launch(const RaggedArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream) {
  MatmulArgs product = args.product;
  if (args.row_mode == RowMode::kIds) {
    int32_t* const ordered = args.scratch + plan_words(args);
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(std::min<int64_t>(args.m, int64_t{16} * multiprocessors)));
    shape.threads = kOrderThreads;
    const cudaError_t error = launch_kernel(order_rows, shape, stream, static_cast<const uint4*>(product.x),
                                            reinterpret_cast<uint4*>(ordered), ragged::planned_order(work), work.m,
                                            work.repeat, static_cast<int>(product.k / 8));
    if (error != cudaSuccess) return error;
    product.x = ordered;
  }
  return product.x_dtype == DType::kF16 ? launch_f16(product, work, multiprocessors, stream)
                                        : launch_bf16(product, work, multiprocessors, stream);
}

}  // namespace wonly::ragged_tiled
