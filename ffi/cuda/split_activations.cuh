// float32 activations as two fp16 numbers each, for kernels of tensor cores that multiply both.
#pragma once

#include <algorithm>

#include "cuda/division.h"
#include "cuda/launch.h"
#include "cuda/ptx_sm90.cuh"
#include "cuda/split_row.cuh"

namespace wonly {

constexpr int kMostSplitThreads = 1024;

// Where sums of the activations go, as float32 numbers in units of their row's power of two: [entry of the batch, sum,
// row of the entry], each of kSplitEach << log2_vectors inputs, 256 at most; those beyond the last are zero.
struct ActivationSums {
  float* to;                        // null: none are wanted
  int log2_vectors, count, stride;  // `stride`: from one sum of a row to the next
  Divisor entry_rows;
};

// A CTA takes a row: of x that of the same number, or of order[row] / repeat. `vectors`: of kSplitEach inputs.
static __global__ void __launch_bounds__(kMostSplitThreads)
    split_activations(const float4* x, const int* order, const Divisor repeat, uint4* pieces, float* powers,
                      int vectors, const ActivationSums sums) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  ptx::let_next_kernel_begin();
  const int row = static_cast<int>(blockIdx.x);
  int rest, x_row = row;
  if (order != nullptr) x_row = repeat.divide(order[row], &rest);
  uint4* const high = pieces + static_cast<int64_t>(row) * vectors;
  float* to = nullptr;
  if (sums.to != nullptr) {
    const int entry = sums.entry_rows.divide(row, &rest);
    to = sums.to + static_cast<int64_t>(entry) * sums.count * sums.stride + rest;
  }
  split_row(x + static_cast<int64_t>(x_row) * (2 * vectors), high, high + static_cast<int64_t>(gridDim.x) * vectors,
            powers + row, vectors, [&](int i, float sum) {
              if (to == nullptr) return;
              const int of_sum = 1 << sums.log2_vectors, at = i >> sums.log2_vectors;
              for (int other = 1; other < of_sum; other *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
              if (i % of_sum == 0 && at < sums.count) to[static_cast<int64_t>(at) * sums.stride] = sum;
            });
#else
  __trap();
#endif
}

// To `scratch`: [2, rows, inputs], and behind them, at `*powers`, what undoes each row's power of two.
inline cudaError_t launch_split_activations(const void* x, const int* order, const Divisor& repeat, int64_t rows,
                                            int64_t inputs, const ActivationSums& sums, void* scratch, float** powers,
                                            cudaStream_t stream) {
  const int vectors = static_cast<int>(inputs / kSplitEach);
  auto* const pieces = static_cast<uint4*>(scratch);
  *powers = reinterpret_cast<float*>(pieces + 2 * rows * vectors);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(rows));
  shape.threads = std::clamp((vectors + 31) / 32 * 32, 128, kMostSplitThreads);
  return launch_kernel(split_activations, shape, stream, static_cast<const float4*>(x), order, repeat, pieces, *powers,
                       vectors, sums);
}

}  // namespace wonly
