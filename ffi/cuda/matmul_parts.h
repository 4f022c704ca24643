// A product by two kernels, each for some of the outputs. Tiles of one size seldom fill the multiprocessors in whole
// waves; those of another size, or shared by clusters, fill them with what such waves leave.
#pragma once

#include <variant>

#include "cuda/matmul_tiled.h"
#include "cuda/matmul_warpgroup.h"

namespace wonly::parts {

using Kernel = std::variant<warpgroup::Config, tiled::Config>;
struct Config {
  Kernel first, second;
};

// What products of 16-bit activations and one weight take.
struct Costs {
  const warpgroup::Costs& warpgroups;
  const tiled::Costs& tiles;
  float join;      // microseconds between the two
  float gain;      // how much of one kernel's time two take at most, to be worth it
  int64_t tokens;  // up to which one kernel is taken
};

// Sets the two kernels that are expected to be fastest and returns what they should take, if that is less than one
// takes, `us`; else returns `us`. in_tiles: matmul_tiled may be one of them.
float choose(const MatmulArgs& args, int multiprocessors, const Costs& costs, bool in_tiles, float us, Config* config);

cudaError_t launch(const MatmulArgs& args, const Config& config, cudaStream_t stream);

}  // namespace wonly::parts
