// Scales, zeros and offsets for kernels that copy rows of them in bulk, of weights whose number of outputs does not let
// a row begin at a multiple of 16 bytes: copied to scratch, in rows that do.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/matmul.h"

namespace wonly::aligned_rows {

// Bytes of scratch that they take.
int64_t bytes(const MatmulArgs& args);

// `args` once they are there, with the scratch that is left.
MatmulArgs after(const MatmulArgs& args);

// Copies them, and zeros after each row.
cudaError_t launch(const MatmulArgs& args, cudaStream_t stream);

}  // namespace wonly::aligned_rows
