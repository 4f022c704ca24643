// The product in which every row has its own expert's weights: what the custom-call handler calls.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "abi.h"
#include "cuda/matmul.h"

namespace wonly {

// y[m, n], row r = act(x[r / repeat, k] @ W[expert of r] + bias[expert of r]), and zero without an expert. In `product`
// a batch entry is an expert; its batch, m and x_batch_stride are 0.
struct RaggedArgs {
  MatmulArgs product;
  const int32_t* rows;  // [experts] or [m], as row_mode says; on the device
  RowMode row_mode;
  int64_t experts, m, repeat;
  int32_t* scratch;
  int64_t scratch_words;  // at least as many as abi.h says
};

// Enqueues the product on `stream`. Neither allocates nor synchronises, so it can be captured into a CUDA graph.
cudaError_t launch_ragged_matmul(const RaggedArgs& args, cudaStream_t stream);

// y[m, k], row r = x[r / repeat, n] @ W[expert of r]^T, and zero without an expert; without bias and activation. The
// same terms.
cudaError_t launch_ragged_matmul_transposed(const RaggedArgs& args, cudaStream_t stream);

}  // namespace wonly
