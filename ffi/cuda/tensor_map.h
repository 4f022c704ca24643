// What the tensor copy engine has to know of an array.
#pragma once

#include <cuda.h>

#include "cuda/matmul.h"

namespace wonly {

// The 16-bit activations [batch, m, k] in boxes of `tokens` x 64 inputs, swizzled as wgmma reads them; zeros beyond the
// edges. K is a multiple of 8.
cudaError_t describe_activations(const MatmulArgs& args, int tokens, CUtensorMap* map);

}  // namespace wonly
