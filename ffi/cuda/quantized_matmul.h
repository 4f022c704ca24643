// The product of quantized activations with packed weights on Hopper: codes of both meet on the tensor cores. See
// quantized_matmul.cuh.
#pragma once

#include "cuda/matmul.h"

namespace wonly {

// Operands of y[B, M, N] = act((codes * x_scales + x_offsets)[B, M, K] @ W + bias).
struct QuantizedMatmulArgs {
  MatmulArgs product;      // x: the codes [B, M, k_stride]; x_dtype says nothing
  const float* x_scales;   // [B, M, x_groups]
  const void* x_sums;      // of the codes, [B, M, max(x_groups, product.groups)], int32 or float32; null: not needed
  const float* x_offsets;  // [B, M, x_groups]; null: none
  int64_t k_stride, x_groups;
  int64_t x_scales_batch_stride, x_sums_batch_stride;
  bool float8;  // e4m3 codes, else int8

  // Of a static product, whose result are int8 codes: clamp(rint((sum + fused[n]) * scales[n]) + zero, low, high).
  const int32_t* fused;  // [N]; null: not static
  int zero, low, high;
};

namespace quantized {

// Whether sums of the codes of x are needed: the weights' zeros are not among what their codes can take off exactly.
inline bool needs_sums(const MatmulArgs& args) {
  return args.shift_mode == ShiftMode::kOffsets ||
         (args.shift_mode == ShiftMode::kZeros && (args.bits == 8 || args.shift_dtype != DType::kU8));
}

// Groups of whole stages of 128 inputs, or none; e4m3 codes with 4-bit weights; what fits 32 bits.
bool supports(const QuantizedMatmulArgs& args);

cudaError_t launch_w8a8(const QuantizedMatmulArgs& args, int multiprocessors, cudaStream_t stream);
cudaError_t launch_w4a8(const QuantizedMatmulArgs& args, int multiprocessors, cudaStream_t stream);
cudaError_t launch_w4f8(const QuantizedMatmulArgs& args, int multiprocessors, cudaStream_t stream);

}  // namespace quantized

// Enqueues the product on `stream`; cudaErrorNotSupported where it has no kernel. Neither allocates nor synchronises.
cudaError_t launch_quantized_matmul(const QuantizedMatmulArgs& args, cudaStream_t stream);

}  // namespace wonly
