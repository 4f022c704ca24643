// The product for one or two tokens on Hopper (matmul_decode.cuh), one compiled file per weight type.
#pragma once

#include "cuda/matmul.h"
#include "cuda/ragged_plan.h"

namespace wonly::decode {

struct Config {
  int cluster;  // CTAs along the inputs: 1, 2 or 4
  int parts;    // that the outputs are cut into, 1 .. ceil(N / 16): a cluster takes one
};

constexpr int kMaxTokens = 2;

// cudaErrorInvalidConfiguration when the activations of a CTA's inputs do not fit its shared memory.
cudaError_t launch(const MatmulArgs& args, const Config& config, int shared_bytes, cudaStream_t stream);

// Groups of inputs that share a scale, in a stage of 128.
inline int stage_groups(const MatmulArgs& args) {
  const int log2 = log2_group_blocks(args);
  return log2 == 0 ? 4 : log2 == 1 ? 2 : 1;
}

// Tokens of a tile of a ragged product.
inline int tile_tokens(const MatmulArgs& args) { return stage_groups(args) == 4 ? 1 : kMaxTokens; }

// Group sizes, dtypes and sizes that the kernel takes; sm_90 only.
bool supports(const MatmulArgs& args);

// Of a ragged product with 16-bit activations and eight bits: tiles of up to tile_tokens rows in its plan, whose
// outputs `ctas` CTAs share, at least one for each of ragged::most_tiles. Otherwise as above.
cudaError_t launch_ragged(const MatmulArgs& args, const ragged::Work& work, int ctas, int shared_bytes,
                          cudaStream_t stream);

cudaError_t launch_int4(const MatmulArgs& args, const Config& config, int shared_bytes, cudaStream_t stream);
cudaError_t launch_int8(const MatmulArgs& args, const Config& config, int shared_bytes, cudaStream_t stream);

}  // namespace wonly::decode
