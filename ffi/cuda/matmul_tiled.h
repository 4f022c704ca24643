// The product for hundreds of tokens and more on Hopper, bound by the tensor cores. See matmul_tiled.cuh.
#pragma once

#include "cuda/matmul.h"

namespace wonly::tiled {

// The most that one cluster computes at a time.
constexpr int kTileTokens = 256, kTileOutputs = 256, kClusterCtas = 2;
constexpr int kStageInputs = 64;

struct Config {
  int multiprocessors;  // to spread over
  int tokens;           // of a tile: at most kTileTokens, a multiple of 64
  int splits;           // clusters that share the inputs of a tile of the last, not whole, wave; 1: none do
};

// Scratch that sharing each of `rest` tiles takes: counters, and the sums of all clusters but the last.
constexpr int64_t kArrivedBytes = 4096;
constexpr int64_t scratch_bytes(int64_t rest, int64_t splits) {
  return splits == 1 ? 0 : kArrivedBytes + rest * (splits - 1) * kTileTokens * kTileOutputs * 4;
}

// 16-bit activations whose rows the tensor copy engine can fetch, and scales (and zeros or offsets, unless uint8) of
// the same type.
bool supports(const MatmulArgs& args);

// Enqueues the product on `stream`; cudaErrorInvalidConfiguration where there is too little scratch for
// `config.splits`, or more tiles of the last wave than clusters for them.
cudaError_t launch(const MatmulArgs& args, const Config& config, cudaStream_t stream);

cudaError_t launch_bf16(const MatmulArgs& args, const Config& config, cudaStream_t stream);
cudaError_t launch_f16(const MatmulArgs& args, const Config& config, cudaStream_t stream);

}  // namespace wonly::tiled
