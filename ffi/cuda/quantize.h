// Quantization and dequantization on CUDA devices: what the custom-call handlers call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "abi.h"

namespace wonly {

// Operands of qw[B, Nt, Kt, 512], scales[B, groups, N], (shift[B, groups, N]) = quantize(w[B, K, N]), all dense and
// row-major. `groups` divides k; k / groups is 32, 64, 128, 256 or k itself. No size is zero.
struct QuantizeArgs {
  const void* w;
  uint32_t* qw;
  void* scales;
  void* shift;  // null in the symmetric mode
  int64_t batch, k, n, groups;
  int bits;
  DType w_dtype, scale_dtype;  // the shift is u8 in the mode kIntegerZeros, else of the scales' type
  QuantizeMode mode;
};

// Operands of w[B, K, N] = dequantize(qw, scales, shift). Batch strides are in elements and 0 for an operand that all
// of the batch shares. No size is zero.
struct DequantizeArgs {
  const uint32_t* qw;
  const void* scales;
  const void* shift;  // null without; of kTable the table, float32[16]
  void* w;
  int64_t batch;
  int64_t qw_batch_stride, scales_batch_stride, shift_batch_stride;
  int64_t k, n, groups;
  int bits;
  DType scale_dtype, shift_dtype, w_dtype;
  ShiftMode shift_mode;
};

// Each enqueues one kernel on `stream`. None allocates or synchronises, so they can be captured into a CUDA graph.
cudaError_t launch_quantize(const QuantizeArgs& args, cudaStream_t stream);
cudaError_t launch_dequantize(const DequantizeArgs& args, cudaStream_t stream);

// Applies one conversion of dequant/selftest.h to every word: `words` inputs, selftest_outputs(conversion) outputs for
// each.
cudaError_t launch_conversion_selftest(int conversion, const uint32_t* in, uint32_t* out, int64_t words,
                                       cudaStream_t stream);

}  // namespace wonly
