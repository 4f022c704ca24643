// The product for a middling number of tokens on sm_90a (matmul_warpgroup.cuh).
#pragma once

#include "cuda/matmul.h"

namespace wonly::warpgroup {

struct Config {
  int tokens;      // of a CTA: 16, 32, 64 or 128
  int warpgroups;  // of 64 outputs each: 2, or, without float zeros and offsets, 4 with 32 and 64 tokens
  int cluster;     // CTAs along the inputs, 1 .. 8
  int multiprocessors;
};

// Whether this kernel computes `args`: 16-bit activations, no table, and rows of activations, scales, zeros and offsets
// that are 16-byte aligned.
bool supports(const MatmulArgs& args);

cudaError_t launch(const MatmulArgs& args, const Config& config, cudaStream_t stream);

cudaError_t launch_f16(const MatmulArgs& args, const Config& config, cudaStream_t stream);
cudaError_t launch_bf16(const MatmulArgs& args, const Config& config, cudaStream_t stream);

}  // namespace wonly::warpgroup
