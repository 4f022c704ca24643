// The product for a middling number of tokens on sm_90a (matmul_warpgroup.cuh).
#pragma once

#include "cuda/matmul.h"

namespace wonly::warpgroup {

struct Config {
  int tokens;      // of a CTA: 16, 32, 64 or 128; 48 or 96 with groups of 128 and more and without sums of activations
  int warpgroups;  // of 64 outputs each: 2, or, without float zeros and offsets, 4 with 32 and 64 tokens, or, under the
                   // conditions of 48 and 96 tokens, 1 with 16, 32 and 64
  int cluster;     // CTAs along the inputs, 1 .. 8
  int multiprocessors;
};

// What a configuration is expected to take, in microseconds.
struct Cost {
  int tokens, warpgroups;
  float stage;         // for 128 inputs, one CTA on a multiprocessor
  float shared_stage;  // two CTAs on it; 0: they do not fit
  float start;         // until the first product, and from the last to the result
  float group;         // of a stage, for every group that ends in it but one; 0: no kernel for groups of 32 and 64
  float sum;           // for every one, with float zeros or offsets; 0: no such kernel
};
// Clusters of CTAs, what they cost, and the share of all multiprocessors that they can use: a cluster lies in one part
// of the chip. Six are worth it where two CTAs share a multiprocessor.
struct ClusterCost {
  int ctas;
  float start, share;
};

// Whether this kernel computes `args`: 16-bit activations, no table, and rows of activations, scales, zeros and offsets
// that are 16-byte aligned.
bool supports(const MatmulArgs& args);

cudaError_t launch(const MatmulArgs& args, const Config& config, cudaStream_t stream);

cudaError_t launch_f16(const MatmulArgs& args, const Config& config, cudaStream_t stream);
cudaError_t launch_bf16(const MatmulArgs& args, const Config& config, cudaStream_t stream);

}  // namespace wonly::warpgroup
