#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/ragged_plan.cuh"

namespace wonly::ragged {
namespace {

constexpr int kThreads = 1024;

// One CTA puts the rows in the order of their experts; those of an expert in any order, on which no result depends.
// `bins`: rows of each expert and of none, then where the next one of each goes.
__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ Work work, int* far_bins) {
  extern __shared__ __align__(16) int near_bins[];
  Span* const spans = reinterpret_cast<Span*>(work.counts + 1);
  int* const order = reinterpret_cast<int*>(spans + work.experts + 1);
  if (work.row_mode == RowMode::kSizes) {
    if (threadIdx.x < 32) plan_sizes(work.rows, work.experts, work.m, work.tile_rows, spans, work.counts, nullptr);
    return;
  }
  const int experts = work.experts;
  int* const bins = far_bins != nullptr ? far_bins : near_bins;
  int* const next = bins + experts + 1;
  for (int i = threadIdx.x; i <= experts; i += kThreads) bins[i] = 0;
  __syncthreads();
  // Calls `take(row, id)` for every row; an id out of range is `experts`.
  const auto for_rows = [&](auto&& take) {
    constexpr int kAhead = 8;  // loads of a thread on their way at once
    for (int base = threadIdx.x; base < work.m; base += kThreads * kAhead) {
      int id[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) id[i] = base + i * kThreads < work.m ? work.rows[base + i * kThreads] : 0;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (base + i * kThreads < work.m) take(base + i * kThreads, id[i] < 0 || id[i] >= experts ? experts : id[i]);
      }
    }
  };
  for_rows([&](int, int bin) { atomicAdd(bins + bin, 1); });
  __syncthreads();
  if (threadIdx.x < 32) plan_sizes(bins, experts, work.m, work.tile_rows, spans, work.counts, next);
  __syncthreads();
  for_rows([&](int row, int bin) { order[atomicAdd(next + bin, 1)] = row; });
}

constexpr int kOrderThreads = 256;

// Rows of x in the plan's order, in vectors of 16 bytes.
__global__ void __launch_bounds__(kOrderThreads)
    order_rows(const uint4* x, uint4* to, const int* order, int rows, int repeat, int vectors) {
  for (int at = blockIdx.x; at < rows; at += gridDim.x) {
    const uint4* const from = x + static_cast<int64_t>(order[at] / repeat) * vectors;
    for (int i = threadIdx.x; i < vectors; i += kOrderThreads) to[static_cast<int64_t>(at) * vectors + i] = from[i];
  }
}

// Before ordered rows, which begin at a multiple of 16 bytes.
int64_t plan_words(const RaggedArgs& args) {
  return ceil_div(kRaggedScratchPerRow * args.m + kRaggedScratchPerExpert * args.experts + kRaggedScratchFixed, 4) * 4;
}

}  // namespace

bool can_order(const RaggedArgs& args) {
  const int64_t bytes = args.m * args.product.k * element_size(args.product.x_dtype);
  return bytes % 16 == 0 && args.product.k % 8 == 0 && args.scratch_words >= plan_words(args) + bytes / 4;
}

cudaError_t order(const RaggedArgs& args, const Work& work, const void** x, cudaStream_t stream) {
  void* const ordered = args.scratch + plan_words(args);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(std::min<int64_t>(args.m, 2048)));
  shape.threads = kOrderThreads;
  *x = ordered;
  return launch_kernel(order_rows, shape, stream, static_cast<const uint4*>(args.product.x),
                       static_cast<uint4*>(ordered), planned_order(work), work.m, work.repeat,
                       static_cast<int>(args.product.k * element_size(args.product.x_dtype) / 16));
}

cudaError_t plan(const RaggedArgs& args, int tile_rows, bool in_scratch, int shared_per_block, cudaStream_t stream,
                 Work* work) {
  *work = {
      args.rows, args.row_mode, static_cast<int>(args.experts), static_cast<int>(args.m), static_cast<int>(args.repeat),
      tile_rows, nullptr};
  const bool ids = args.row_mode == RowMode::kIds;
  if (!in_scratch && (ids ? args.m <= kOwnIds : args.experts <= kOwnExperts)) return cudaSuccess;
  work->counts = reinterpret_cast<Counts*>(args.scratch);
  const int bin_bytes = static_cast<int>(std::min<int64_t>(8 * (args.experts + 1), shared_per_block + 1));
  const bool far = bin_bytes > shared_per_block;
  LaunchShape shape;
  shape.grid = dim3(1);
  shape.threads = kThreads;
  shape.shared_bytes = ids && !far ? bin_bytes : 0;
  int* const far_bins = ids && far ? args.scratch + sizeof(Counts) / 4 + 4 * (args.experts + 1) + args.m : nullptr;
  return launch_kernel(plan_kernel, shape, stream, *work, far_bins);
}

}  // namespace wonly::ragged
