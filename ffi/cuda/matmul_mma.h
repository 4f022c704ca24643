// The product for more tokens than one pass of the streaming kernel takes, on GPUs whose tensor cores are fed by
// mma.sync. See matmul_mma.cuh.
#pragma once

#include "cuda/device.h"
#include "cuda/matmul.h"
#include "layout.h"

namespace wonly::mma {

constexpr int kCtaOutputs = 128;
constexpr int kStageInputs = 64;
constexpr int kCtas = 2;  // that run on a multiprocessor at once, where their shared memory fits

struct Config {
  int tokens;        // of a tile: 32, 64 or 128
  int shared_tiles;  // the last tiles, whose inputs several CTAs share
  int splits;        // CTAs that share each of them
  int shared_bytes;  // that a CTA may use: its ring is as deep as that allows
};

// Scratch that sharing takes: the sums of every CTA.
constexpr int64_t scratch_bytes(const Config& config) {
  return int64_t{4} * config.shared_tiles * config.splits * config.tokens * kCtaOutputs;
}

// What products take, in microseconds of an H100.
struct Costs {
  struct Stage {
    int tokens;           // of a tile
    float alone, shared;  // of 64 inputs: while every multiprocessor has one CTA, and while some have kCtas
  };
  const Stage* stages;
  int stage_count;
  float start, wave;
  float sums, sum_bytes;  // of the second kernel, the latter per microsecond
  float memory;           // bytes per microsecond
  int most_splits, least_stages;
};

// Sets the configuration that is expected to be fastest with the scratch that there is; returns the microseconds that
// it should take, in units of an H100's.
float choose(const MatmulArgs& args, const Device& device, Config* config);

// 16-bit activations in rows that are 16-byte aligned, scales (and zeros or offsets, unless uint8) of the same type, no
// table.
bool supports(const MatmulArgs& args);

// Enqueues the product on `stream`; cudaErrorInvalidConfiguration where there is
// too little scratch or shared memory for `config`. Results have the same bits on every run.
cudaError_t launch(const MatmulArgs& args, const Config& config, cudaStream_t stream);

// The same without what shared tiles need beside: their sums are left in scratch.
cudaError_t launch_bf16(const MatmulArgs& args, const Config& config, cudaStream_t stream);
cudaError_t launch_f16(const MatmulArgs& args, const Config& config, cudaStream_t stream);

}  // namespace wonly::mma
