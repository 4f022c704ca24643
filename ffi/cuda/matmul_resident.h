// The product for a few tokens on Hopper (matmul_resident.cuh), one compiled file per activation type.
#pragma once

#include "cuda/matmul.h"
#include "layout.h"

namespace wonly::resident {

constexpr int kMaxTokens = 16;  // with float zeros or offsets, or float32 activations, 8
constexpr int kStageInputs = 128;
constexpr int kWarpgroups = 4;        // share a CTA's stages
constexpr int kPassAtoms = 4;         // strips of 16 outputs at a time
constexpr int kAhead = 2;             // stages that a warp asks for at once; twice as many are a turn of its loop
constexpr int kBarrierBytes = 1024;   // a barrier for each piece; those are aligned for the swizzle
constexpr int kSumBytes = 256;        // sums of a stage's activations, two numbers each
constexpr int kTableBytes = 1 << 16;  // of the pairs of a table (pair_table.cuh)

struct Config {
  int cluster;  // CTAs along the inputs
  int parts;    // that the outputs are cut into, 1 .. ceil(N / 16): a cluster takes one
};

// How a product is shared out, and a CTA's shared memory.
struct Layout {
  int atoms_each, atoms_over;  // a part of the outputs has atoms_each strips of 16, the first atoms_over one more
  int stages_each;             // that a CTA of a cluster takes, the last one fewer
  int pieces, log2_piece;      // of the activations; stages of one
  int sums_at;                 // of the activations of each stage
  int strips_at;               // sums of a strip of outputs, of every warpgroup of every CTA of the cluster
  int passes;                  // whose sums there is room for at once; 0: the activations do not even fit
  bool over_activations;       // the sums of a lone pass take their place
  int bytes;
};
Layout layout(const MatmulArgs& args, const Config& config, int shared_bytes);
// Where its activations are, behind barriers and a table.
constexpr int activations_at(bool table) { return kBarrierBytes + (table ? kTableBytes : 0); }

// What a product is expected to take, in microseconds.
struct Costs {
  float start;       // until the first product, and from the last to the result
  float passes;      // one over a CTA's outputs
  float turns;       // one of a pass
  float stages;      // one of a warpgroup
  float words;       // four strips of outputs in a stage of all warpgroups
  float groups;      // of a stage, more with groups of 32 and 64
  float sums;        // of a stage, more with float zeros or offsets
  float adding;      // of the start, for the sums of activations then
  float wide;        // of a stage, more from nine tokens on, of float32 five
  float rows;        // a token's float32 activations of a stage of a warpgroup, once
  float filling;     // of the start, for a table
  float table;       // of a stage, more with one
  float wide_table;  // and where `wide` counts
};

// Whether this kernel computes `args`: int4, K a multiple of 64, uint8 zeros or none, and scales of any type, in rows
// of whole pieces of four bytes where that is not the activations' own of 16 bits; with such scales also zeros or
// offsets of that type; or a table. sm_90 only.
bool supports(const MatmulArgs& args);

// Sets the fastest configuration, and returns the microseconds that it is expected to take; 0 where there is none.
float choose(const MatmulArgs& args, int multiprocessors, int shared_bytes, Config* config);

// cudaErrorInvalidConfiguration when the activations of a CTA's inputs do not fit its shared memory.
cudaError_t launch(const MatmulArgs& args, const Config& config, int shared_bytes, cudaStream_t stream);

cudaError_t launch_f16(const MatmulArgs& args, const Config& config, int shared_bytes, cudaStream_t stream);
cudaError_t launch_bf16(const MatmulArgs& args, const Config& config, int shared_bytes, cudaStream_t stream);
cudaError_t launch_f32(const MatmulArgs& args, const Config& config, int shared_bytes, cudaStream_t stream);

}  // namespace wonly::resident
