// The weight-only product on CUDA devices: what the custom-call handler calls.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "abi.h"
#include "layout.h"

namespace wonly {

// Operands of y[B, M, N] = act(x[B, M, K] @ W[B, K, N] + bias[B, N]), W packed as layout.h says. Batch strides are in
// elements and 0 for an operand that all of the batch shares. `groups` divides k; k / groups is 32, 64, 128, 256 or k
// itself.
struct MatmulArgs {
  const void* x;
  const uint32_t* qw;
  const void* scales;  // [B, groups, N]
  const void* shift;   // [B, groups, N], null without; of kTable the table, float32[B, 16]
  const void* bias;    // [B, N], null without
  void* y;
  void* scratch;  // room for partial sums, as much as there is
  int64_t scratch_bytes;
  int64_t batch;
  int64_t x_batch_stride, qw_batch_stride, scales_batch_stride, shift_batch_stride, bias_batch_stride;
  int64_t m, k, n, groups;
  int64_t parameter_row;  // elements from one row of scales, and of shift, to the next: n, or more
  int bits;
  DType x_dtype, scale_dtype, shift_dtype, bias_dtype, y_dtype;
  ShiftMode shift_mode;
  bool has_bias;
  Activation activation;
};

// The group size as a power of two: 32 << this inputs share a scale; -1 where all of an output's inputs do.
WONLY_HOST_DEVICE int log2_group_blocks(const MatmulArgs& args) {
  if (args.groups <= 1) return -1;
  int log2 = 0;
  while (((32 * args.groups) << log2) < args.k) ++log2;
  return log2;
}
// Groups of 32 or 64 inputs.
WONLY_HOST_DEVICE bool has_small_groups(const MatmulArgs& args) {
  const int log2 = log2_group_blocks(args);
  return log2 == 0 || log2 == 1;
}

// Bytes of a zero or offset, if there are any.
WONLY_HOST_DEVICE int shift_bytes(const MatmulArgs& args) {
  const bool shifted = args.shift_mode != ShiftMode::kNone && args.shift_mode != ShiftMode::kTable;
  return shifted ? element_size(args.shift_dtype) : 0;
}

// Zeros or offsets that are no bytes.
WONLY_HOST_DEVICE bool has_float_shift(const MatmulArgs& args) {
  const bool shifted = args.shift_mode == ShiftMode::kZeros || args.shift_mode == ShiftMode::kOffsets;
  return shifted && args.shift_dtype != DType::kU8;
}

// Enqueues the product on `stream`. Neither allocates nor synchronises, so it can be captured into a CUDA graph.
cudaError_t launch_matmul(const MatmulArgs& args, cudaStream_t stream);

}  // namespace wonly
