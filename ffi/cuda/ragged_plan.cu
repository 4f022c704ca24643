#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/ragged_plan.cuh"

namespace wonly::ragged {
namespace {

constexpr int kWarps = 32;

// One CTA puts the rows in the order of their experts, keeping that of an expert's rows: every warp counts a run of
// them, and places it behind those of the warps before. `bins`: of `warps` warps, experts + 1 each, then as many again.
__global__ void __launch_bounds__(kWarps * 32)
    plan_kernel(const __grid_constant__ Work work, int warps, int* far_bins) {
  extern __shared__ __align__(16) int near_bins[];
  int* const bins = far_bins != nullptr ? far_bins : near_bins;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Span* const spans = reinterpret_cast<Span*>(work.counts + 1);
  int* const order = reinterpret_cast<int*>(spans + work.experts + 1);
  if (work.row_mode == RowMode::kSizes) {
    if (warp == 0) plan_sizes(work.rows, work.experts, work.m, work.tile_rows, spans, work.counts, nullptr);
    return;
  }
  const int experts = work.experts, stride = experts + 1;
  int* const sizes = bins + static_cast<int64_t>(warps) * stride;
  int* const mine = bins + static_cast<int64_t>(warp) * stride;
  for (int64_t i = threadIdx.x; i < static_cast<int64_t>(warps) * stride; i += blockDim.x) bins[i] = 0;
  __syncthreads();

  const int chunks = tiles_of(work.m, 32);
  const int begin = static_cast<int>(static_cast<int64_t>(chunks) * warp / warps) * 32;
  const int end = static_cast<int>(min(static_cast<int64_t>(chunks) * (warp + 1) / warps * 32, int64_t{work.m}));
  // Calls `take(row, id, lanes with this id)` for every row in order; an id out of range becomes `experts`, and that of
  // a lane beyond the last row -1.
  const auto for_rows = [&](auto&& take) {
    constexpr int kAhead = 8;  // loads of a lane on their way at once
    for (int base = begin; base < end; base += 32 * kAhead) {
      int id[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int row = base + 32 * i + lane;
        id[i] = row < end ? work.rows[row] : 0;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int row = base + 32 * i + lane;
        const int bin = row >= end ? -1 : id[i] < 0 || id[i] >= experts ? experts : id[i];
        const unsigned same = __match_any_sync(kAllLanes, bin);
        take(row, bin, same);
        __syncwarp();
      }
    }
  };
  const unsigned below = (1u << lane) - 1u;
  if (warp < warps) {
    for_rows([&](int, int bin, unsigned same) {
      if (bin >= 0 && (same & below) == 0) mine[bin] += __popc(same);
    });
  }
  __syncthreads();
  // Rows of the warps before, for every warp, and of all.
  for (int bin = threadIdx.x; bin < stride; bin += blockDim.x) {
    int sum = 0;
    for (int w = 0; w < warps; ++w) {
      const int count = bins[static_cast<int64_t>(w) * stride + bin];
      bins[static_cast<int64_t>(w) * stride + bin] = sum;
      sum += count;
    }
    sizes[bin] = sum;
  }
  __syncthreads();
  int* const first = sizes + stride;
  if (warp == 0) plan_sizes(sizes, experts, work.m, work.tile_rows, spans, work.counts, first);
  __syncthreads();
  if (warp < warps) {
    for_rows([&](int row, int bin, unsigned same) {
      int at = 0;
      if (bin >= 0 && (same & below) == 0) {
        at = first[bin] + mine[bin];
        mine[bin] += __popc(same);
      }
      at = __shfl_sync(kAllLanes, at, __ffs(same) - 1);
      if (bin >= 0) order[at + __popc(same & below)] = row;
    });
  }
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
  // Bins of all warps, sizes and first positions.
  const int64_t bin_bytes = 4 * (args.experts + 1);
  const int64_t room = shared_per_block / bin_bytes - 2;
  const int64_t useful = std::max<int64_t>(args.m / 256, 1);
  const int warps = ids ? static_cast<int>(std::clamp<int64_t>(std::min(room, useful), 1, kWarps)) : 1;
  int* const far_bins = ids && room < 1 ? args.scratch + sizeof(Counts) / 4 + 4 * (args.experts + 1) + args.m : nullptr;
  LaunchShape shape;
  shape.grid = dim3(1);
  shape.threads = kWarps * 32;
  shape.shared_bytes = ids && far_bins == nullptr ? static_cast<int>((warps + 2) * bin_bytes) : 0;
  return launch_kernel(plan_kernel, shape, stream, *work, warps, far_bins);
}

}  // namespace wonly::ragged
