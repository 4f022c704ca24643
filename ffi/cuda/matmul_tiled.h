// The product for hundreds of tokens and more on Hopper, bound by the tensor cores. See matmul_tiled.cuh.
#pragma once

#include "cuda/matmul.h"
#include "cuda/part.h"

namespace wonly::tiled {

// The most that one cluster computes at a time.
constexpr int kTileTokens = 256, kClusterCtas = 2, kCtaOutputs = 128;
constexpr int kStageInputs = 64;

struct Config {
  int multiprocessors;      // to spread over
  int tokens;               // of a tile: 64, 144, 160, 168, ..., kTileTokens; in convolutions whole 64
  int splits;               // clusters that share the inputs of a tile of the last, not whole, wave; 1: none do
  int ctas = kClusterCtas;  // of a cluster; 1 in convolutions alone
  Part part{};
};

// Scratch that sharing each of `rest` tiles takes: the sums of all clusters but the last, and what says that they are
// there.
constexpr int64_t kArrivedBytes = 4096;
constexpr int kGatheredRows = 64;  // tokens whose sums are shared at a time
constexpr int64_t scratch_bytes(const Config& config, int64_t rest) {
  const int64_t tokens = ceil_div(config.tokens, kGatheredRows) * kGatheredRows;
  const int64_t sums = rest * (config.splits - 1) * config.ctas * kCtaOutputs * tokens;
  return config.splits == 1 ? 0 : kArrivedBytes + 4 * sums;
}

// What products in tiles take, in microseconds.
struct Costs {
  struct Stage {
    int ctas, tokens;  // of a tile
    float us;          // of 64 inputs, while all multiprocessors work
  };
  const Stage* stages;
  int stage_count;
  float start, wave;              // what the kernel and a wave add
  float alone;                    // of what a wave adds: what clusters that share a tile do not share
  float split, sums, more;        // what sharing adds; of the sums of 256 tokens for two clusters, and for one more
  int most_splits, least_stages;  // of a cluster
  // A stage takes at least so long with groups of 32 and 64. Of fewer tokens than `low` it takes longer with zeros that
  // are added to codes, and with eight bits.
  float small_groups;
  int low;
  float zeros, eight_bits;
};

// Sets the configuration that is expected to be fastest for `stages` stages of inputs and the scratch that there is;
// returns the microseconds that it should take. whole: as of warpgroup::choose.
float choose(const MatmulArgs& args, int64_t stages, int multiprocessors, const Costs& costs, Config* config,
             bool whole = false);

// 16-bit activations whose rows the tensor copy engine can fetch; scales of the same type or float32, which are rounded
// to it, and zeros or offsets of theirs, or uint8: what the kernels of tiled.cuh take, whatever their tiles are of.
bool takes(const MatmulArgs& args);
// The same, and something to compute.
bool supports(const MatmulArgs& args);

// Enqueues the product on `stream`; cudaErrorInvalidConfiguration where there is too little scratch for
// `config.splits`, or more tiles of the last wave than clusters for them.
cudaError_t launch(const MatmulArgs& args, const Config& config, cudaStream_t stream);

cudaError_t launch_bf16(const MatmulArgs& args, const Config& config, cudaStream_t stream);
cudaError_t launch_f16(const MatmulArgs& args, const Config& config, cudaStream_t stream);

}  // namespace wonly::tiled
