#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/ptx.cuh"
#include "cuda/ragged_plan.cuh"

namespace wonly::ragged {
namespace {

constexpr int kThreads = 1024;
constexpr int kCluster = 8;               // CTAs that share many ids, where there are clusters
constexpr int kSharedIds = 4 * kThreads;  // from so many on

// One CTA, or those of one cluster, put the rows in the order of their experts; those of an expert in any order, on
// which no result depends. `bins`: rows of each expert and of none, then where the next one of each goes; of a cluster,
// whose CTAs take so many of the rows each, also those of all CTAs, and of the ones before this.
template <int kCtas>
__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ Work work, int* far_bins) {
  extern __shared__ __align__(16) int near_bins[];
  Span* const spans = reinterpret_cast<Span*>(work.counts + 1);
  int* const order = reinterpret_cast<int*>(spans + work.experts + 1);
  if (work.row_mode == RowMode::kSizes) {
    if (threadIdx.x < 32) plan_sizes(work.rows, work.experts, work.m, work.tile_rows, spans, work.counts, nullptr);
    return;
  }
  const int experts = work.experts, rank = kCtas == 1 ? 0 : static_cast<int>(blockIdx.x);
  int* const bins = far_bins != nullptr ? far_bins : near_bins;
  int* const next = bins + experts + 1;
  for (int i = threadIdx.x; i <= experts; i += kThreads) bins[i] = 0;
  __syncthreads();
  // Calls `take(row, id)` for every row of this CTA; an id out of range is `experts`.
  const auto for_rows = [&](auto&& take) {
    constexpr int kAhead = 8;  // loads of a thread on their way at once
    constexpr int kStep = kCtas * kThreads;
    for (int base = rank * kThreads + threadIdx.x; base < work.m; base += kStep * kAhead) {
      int id[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) id[i] = base + i * kStep < work.m ? work.rows[base + i * kStep] : 0;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (base + i * kStep < work.m) take(base + i * kStep, id[i] < 0 || id[i] >= experts ? experts : id[i]);
      }
    }
  };
  for_rows([&](int, int bin) { atomicAdd(bins + bin, 1); });
  __syncthreads();
  int* counted = bins;
  int* const before = next + 2 * (experts + 1);
  if constexpr (kCtas > 1) {
#if __CUDA_ARCH__ >= 900
    counted = next + experts + 1;
    ptx::cluster_share();
    for (int i = threadIdx.x; i <= experts; i += kThreads) {
      int sum = 0, below = 0;
      for (int other = 0; other < kCtas; ++other) {
        const int rows = __float_as_int(ptx::load_shared_of_rank(reinterpret_cast<const float*>(bins + i), other));
        sum += rows;
        below += other < rank ? rows : 0;
      }
      counted[i] = sum;
      before[i] = below;
    }
    ptx::cluster_leave();
    __syncthreads();
#endif
  }
  // Every CTA of a cluster writes the same spans.
  if (threadIdx.x < 32) plan_sizes(counted, experts, work.m, work.tile_rows, spans, work.counts, next);
  __syncthreads();
  if constexpr (kCtas > 1) {
    for (int i = threadIdx.x; i <= experts; i += kThreads) next[i] += before[i];
    __syncthreads();
  }
  for_rows([&](int row, int bin) { order[atomicAdd(next + bin, 1)] = row; });
}

constexpr int kOrderThreads = 256;

// Rows of x in the plan's order, in vectors of 16 bytes.
__global__ void __launch_bounds__(kOrderThreads)
    order_rows(const uint4* x, uint4* to, const __grid_constant__ Work work, int vectors) {
  const int* const order = planned_order(work);
  for (int at = blockIdx.x; at < work.m; at += gridDim.x) {
    const uint4* const from = x + static_cast<int64_t>(x_row(work, order[at])) * vectors;
    for (int i = threadIdx.x; i < vectors; i += kOrderThreads) to[static_cast<int64_t>(at) * vectors + i] = from[i];
  }
}

// Before ordered rows, which begin at a multiple of 16 bytes.
int64_t plan_words(const RaggedArgs& args) {
  return ceil_div(kRaggedScratchPerRow * args.m + kRaggedScratchPerExpert * args.experts + kRaggedScratchFixed, 4) * 4;
}

}  // namespace

bool can_order(const RaggedArgs& args, int64_t more) {
  const bool float32 = args.product.x_dtype == DType::kF32;
  const int64_t row_words = args.product.k * element_size(args.product.x_dtype) / 4 + (float32 ? 1 + more : 0);
  return args.product.k % 8 == 0 && room_behind_plan(args) >= 4 * args.m * row_words;
}

void* ordered_rows(const RaggedArgs& args) { return args.scratch + plan_words(args); }

int64_t room_behind_plan(const RaggedArgs& args) { return 4 * (args.scratch_words - plan_words(args)); }

cudaError_t order(const RaggedArgs& args, const Work& work, const void** x, cudaStream_t stream) {
  void* const ordered = ordered_rows(args);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(std::min<int64_t>(args.m, 2048)));
  shape.threads = kOrderThreads;
  *x = ordered;
  return launch_kernel(order_rows, shape, stream, static_cast<const uint4*>(args.product.x),
                       static_cast<uint4*>(ordered), work,
                       static_cast<int>(args.product.k * element_size(args.product.x_dtype) / 16));
}

Work own_work(const RaggedArgs& args, int tile_rows) {
  Work work{};
  work.rows = args.rows;
  work.row_mode = args.row_mode;
  work.experts = static_cast<int>(args.experts);
  work.m = static_cast<int>(args.m);
  work.repeat = Divisor(static_cast<int>(args.repeat));
  work.tile_rows = tile_rows;
  return work;
}

cudaError_t plan(const RaggedArgs& args, int tile_rows, bool in_scratch, int shared_per_block, cudaStream_t stream,
                 Work* work) {
  if ((tile_rows & (tile_rows - 1)) != 0) return cudaErrorInvalidValue;  // as tiles_of wants
  *work = own_work(args, tile_rows);
  const bool ids = args.row_mode == RowMode::kIds;
  if (!in_scratch && (ids ? args.m <= kOwnIds : args.experts <= kOwnExperts)) return cudaSuccess;
  work->counts = reinterpret_cast<Counts*>(args.scratch);
  Device device;
  if (cudaError_t error = current_device(&device); error != cudaSuccess) return error;
  const int64_t bin_bytes = 8 * (args.experts + 1);
  const bool far = bin_bytes > shared_per_block;
  const bool cluster = ids && device.architecture >= 90 && args.m >= kSharedIds && 2 * bin_bytes <= shared_per_block;
  LaunchShape shape;
  shape.cluster = cluster ? kCluster : 1;
  shape.grid = dim3(static_cast<unsigned>(shape.cluster));
  shape.threads = kThreads;
  shape.shared_bytes = ids && !far ? static_cast<int>(cluster ? 2 * bin_bytes : bin_bytes) : 0;
  int* const far_bins = ids && far ? args.scratch + sizeof(Counts) / 4 + 4 * (args.experts + 1) + args.m : nullptr;
  return launch_kernel(cluster ? plan_kernel<kCluster> : plan_kernel<1>, shape, stream, *work, far_bins);
}

}  // namespace wonly::ragged
