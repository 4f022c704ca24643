// The product for a few tokens on Hopper (matmul_resident.cuh), one compiled file for codes of four bits and of eight.
#pragma once

#include "cuda/matmul.h"
#include "layout.h"

namespace wonly::resident {

constexpr int kMaxTokens = 16;  // of a tile; with float zeros or offsets, or float32 activations, 8
constexpr int kStageInputs = 128;
constexpr int kWarps = 16;            // that multiply
constexpr int kShiftWarps = 4;        // and more that add float zeros or offsets
constexpr int kShiftRows = 16;        // of those and of scales, which are copied and multiplied together
constexpr int kShiftBytes = 1 << 15;  // room for what is on its way to these warps
constexpr int kMostPassAtoms = 4;     // strips of 16 outputs at a time, or 2 or 1
constexpr int kBarrierBytes = 1024;   // a barrier for each piece; those are aligned for the swizzle
constexpr int kSumPieces = 3;         // bf16 numbers of a sum of activations
constexpr int kSumRowBytes = 16;      // those of eight tokens
constexpr int kTableBytes = 1 << 16;  // of the pairs of a table (pair_table.cuh)
constexpr int kMostPieces = 8;        // there at once; more would wait less for the first, and copy less at once
constexpr int kLeastSlots = 3;        // a piece that is multiplied, the one before it, and the next

struct Config {
  int cluster;                      // CTAs along the inputs
  int parts;                        // that the outputs are cut into, 1 .. ceil(N / 16): a cluster takes one
  int pass_atoms = kMostPassAtoms;  // strips that a CTA has at a time
  int tiles = 1;                    // of as many tokens each, but for the last: clusters of their own multiply them
};

// Stages that a warp asks for at once: a block of 2 KB of weights. Two are a turn of its loop.
constexpr int ahead(int bits) { return 8 / bits; }
// And that all warps do, where passes have so many strips.
constexpr int log2_block_stages(int bits, int pass_atoms) {
  return (pass_atoms == 4 ? 3 : pass_atoms == 2 ? 4 : 5) - (bits == 8);
}
static_assert(ahead(4) * kWarps == kMostPassAtoms << log2_block_stages(4, kMostPassAtoms));
static_assert(ahead(8) * kWarps == kMostPassAtoms << log2_block_stages(8, kMostPassAtoms));

// Blocks that a warp has, of one strip, where kernels know: 1 or 2, or 0.
int blocks_of(const MatmulArgs& args, const Config& config);
// Whether there is a kernel in which a CTA has so many strips at a time.
bool has_passes(const MatmulArgs& args, const Config& config);

// Whether float zeros or offsets are loaded with the scales, and multiplied by sums that each warp makes of its
// activations: of more than two blocks of four bits more warps that do nothing else take less time.
constexpr bool shifts_beside_weights(int bits, int blocks) { return bits == 8 || blocks > 0; }

// Rows of sums of the activations of stages, of which each has some: whole sixteens, as they are multiplied.
WONLY_HOST_DEVICE int sum_rows(int stages, int stage_rows) {
  return (stages * stage_rows + kShiftRows - 1) / kShiftRows * kShiftRows;
}

// How a product is shared out, and a CTA's shared memory.
struct Layout {
  int atoms_each, atoms_over;  // a part of the outputs has atoms_each strips of 16, the first atoms_over one more
  int stages_each;             // that a CTA of a cluster takes, the last one fewer
  int pieces, log2_piece;      // of the activations; stages of one
  int sums_at;                 // of the activations of each stage
  int shifts_at;               // float zeros or offsets, and scales, on their way
  int strips_at;               // sums of a strip of outputs, of every team of every CTA of the cluster
  int passes;                  // whose sums there is room for at once; 0: the activations do not even fit
  bool over_activations;       // the sums of a lone pass take their place
  int8_t slots;                // that pieces lie in, in turns where those are fewer; here, as it moves nothing else
  int blocks;                  // as blocks_of
  int bytes;
};
Layout layout(const MatmulArgs& args, const Config& config, int shared_bytes);
// Where its activations are, behind barriers and a table.
constexpr int activations_at(bool table) { return kBarrierBytes + (table ? kTableBytes : 0); }

// What a product is expected to take, in microseconds.
struct Costs {
  float start;        // until the first product, and from the last to the result
  float passes;       // one over a CTA's outputs
  float turns;        // one of a pass
  float stages;       // one of a team
  float words;        // a strip of outputs in a stage for each warp
  float groups;       // of a stage, more with groups of 32 and 64
  float sums;         // of a stage, more with float zeros or offsets
  float group_sums;   // the same of groups of 32 and 64
  float adding;       // of a pass, for those
  float wide;         // of a stage, more from nine tokens on, of float32 five
  float rows;         // a token's float32 activations of a stage of a team, once
  float filling;      // of the start, for a table
  float table;        // of a stage, more with one
  float wide_table;   // and where `wide` counts
  float teams;        // each of a CTA, beyond four
  float one_block;    // less where a warp has no more
  float narrow;       // less where a pass is one strip
  float half_passes;  // more where it is two, and a warp has more than two blocks
  float slots;        // of a stage, more where pieces of the activations take turns
  float slot_sums;    // and of rows of sums, so many that warps that add them have some each: the last come late
};

// Whether this kernel computes `args` as one tile: K a multiple of 64, uint8 zeros or none, and scales of any type, in
// rows of whole pieces of four bytes where that, or that of float zeros or offsets, is not the activations' own of 16
// bits; these with 16-bit activations; or a table. sm_90 only.
bool supports(const MatmulArgs& args);

// Whether float zeros or offsets, or scales with them, are not of the activations' type.
bool mixes_shifts(const MatmulArgs& args);

// Sets the fastest configuration, in as many tiles as that has, and returns the microseconds that it is expected to
// take; 0 where there is none.
float choose(const MatmulArgs& args, int multiprocessors, int shared_bytes, Config* config);

// cudaErrorInvalidConfiguration when the activations of a CTA's inputs do not fit its shared memory.
cudaError_t launch(const MatmulArgs& args, const Config& config, int shared_bytes, cudaStream_t stream);

// Of a tile: a batch that shares all but the activations and results, of which there are `rows` in all.
cudaError_t launch_four_bits(const MatmulArgs& args, int64_t rows, const Config& config, int shared_bytes,
                             cudaStream_t stream);
cudaError_t launch_eight_bits(const MatmulArgs& args, int64_t rows, const Config& config, int shared_bytes,
                              cudaStream_t stream);

}  // namespace wonly::resident
