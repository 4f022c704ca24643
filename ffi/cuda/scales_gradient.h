// What a product's cotangent is to its scales, by warpgroups on sm_90a.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "abi.h"
#include "layout.h"

namespace wonly {

// y[b, i, n] = sum over rows m of dy[b, m, n] * (sum over the inputs k of block i of x[b, m, k] * (code[b, k, n] -
// bias)), W packed as layout.h says; with a table, of what that has for the code. Batch strides are in elements and 0
// for an operand that all of the batch shares.
struct ScalesGradientArgs {
  const void* x;   // [B, M, K]
  const void* dy;  // [B, M, N], of x's type
  const uint32_t* qw;
  // [B + 1], ascending, on the device: entry b has rows limits[b] .. limits[b + 1] - 1 of x[M, K] and dy[M, N], whose
  // strides are 0; limits beyond the rows count as the nearest, and entries whose limits descend have none. Null: all
  // entries have all rows.
  const int32_t* limits;
  const float* table;  // [16], of four bits; null without
  float* y;            // [B, ceil(K / block), N]
  int64_t batch, x_batch_stride, dy_batch_stride, qw_batch_stride;
  int64_t m, k, n;
  int bits;
  int block;  // inputs: 32, 64 or 128
  DType x_dtype;
};

// Enqueues it on `stream`, under the same terms as launch_matmul. cudaErrorNotSupported on other architectures than
// 9.0.
cudaError_t launch_scales_gradient(const ScalesGradientArgs& args, cudaStream_t stream);

namespace scales_gradient {

// Whether the kernel computes `args`: 16-bit x and dy in rows of whole pieces of 16 bytes.
bool supports(const ScalesGradientArgs& args);

constexpr int kStreamedRows = 32;  // of a tile

// Few rows (scales_gradient_stream.cuh) and many (scales_gradient_dense.cuh).
cudaError_t launch_few_f16(const ScalesGradientArgs& args, int multiprocessors, cudaStream_t stream);
cudaError_t launch_few_bf16(const ScalesGradientArgs& args, int multiprocessors, cudaStream_t stream);
cudaError_t launch_many_f16(const ScalesGradientArgs& args, int multiprocessors, cudaStream_t stream);
cudaError_t launch_many_bf16(const ScalesGradientArgs& args, int multiprocessors, cudaStream_t stream);

}  // namespace scales_gradient
}  // namespace wonly
