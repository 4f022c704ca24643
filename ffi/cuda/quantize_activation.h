// Quantizing activations on CUDA devices: what the custom-call handler calls.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "abi.h"

namespace wonly {

// Operands of codes[M, ceil16(K)], scales[M, groups], sums[M, groups], (offsets[M, groups]) of x[M, K]. `groups`
// divides k; k / groups is 32, 64, 128, 256 or k itself. No size is zero.
struct QuantizeActivationArgs {
  const void* x;
  void* codes;  // int8 or e4m3, in the order of packed weights (abi.h)
  float* scales;
  void* sums;      // int32, or float32 of e4m3
  float* offsets;  // null: symmetric
  int64_t m, k, groups;
  DType x_dtype;
  bool float8;
};

// Enqueues one kernel on `stream`. Neither allocates nor synchronises, so it can be captured into a CUDA graph.
cudaError_t launch_quantize_activation(const QuantizeActivationArgs& args, cudaStream_t stream);

}  // namespace wonly
