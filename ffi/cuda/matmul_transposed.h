// The product with transposed packed weights on CUDA devices: what the custom-call handler calls, and its kernels.
#pragma once

#include "cuda/matmul.h"
#include "cuda/ragged_plan.h"

namespace wonly {

// y[B, M, K] = x[B, M, N] @ W[B, K, N]^T: x and its stride are those of dy, y is dx; without bias and activation.
// Enqueues the product on `stream`, under the same terms as launch_matmul.
cudaError_t launch_matmul_transposed(const MatmulArgs& args, cudaStream_t stream);

// mma.sync, every option but tables for float32 dy, sm_80 and newer (matmul_transposed_stream.cuh).
namespace transposed_stream {

struct Config {
  int token_tiles;   // tiles of 8 tokens that share one pass over the weights: 1, 2 or 4
  int warps;         // of one CTA, along N: 1 .. kMostWarps
  int cluster;       // CTAs along N, 1 .. 8 (more than 1 needs sm_90)
  int shared_bytes;  // that a CTA may use: its rings are as deep as that allows
};

constexpr int kStripK = 64;  // inputs of a CTA
constexpr int kStageN = 64;  // outputs that a warp takes at a time

constexpr int kMostWarps = 8;
constexpr int kTableTiles = 2;  // of tokens, at most, for codes that index a table

// CTAs whose registers a multiprocessor holds at least, by tiles of tokens and the size of a number of dy.
constexpr int most_ctas(int token_tiles, int dy_size) { return token_tiles * dy_size <= 4 ? 2 : 1; }

// Whether there is a kernel for these operands.
bool supports(const MatmulArgs& args);

// cudaErrorInvalidConfiguration when `shared_bytes` is too little.
cudaError_t launch_f16(const MatmulArgs& args, const Config& config, cudaStream_t stream);
cudaError_t launch_bf16(const MatmulArgs& args, const Config& config, cudaStream_t stream);
cudaError_t launch_f32(const MatmulArgs& args, const Config& config, cudaStream_t stream);

// The ragged product (ragged.h) with a plan for tiles of 8 * config.token_tiles rows.
cudaError_t launch_ragged_f16(const MatmulArgs& args, const ragged::Work& work, const Config& config,
                              cudaStream_t stream);
cudaError_t launch_ragged_bf16(const MatmulArgs& args, const ragged::Work& work, const Config& config,
                               cudaStream_t stream);
cudaError_t launch_ragged_f32(const MatmulArgs& args, const ragged::Work& work, const Config& config,
                              cudaStream_t stream);

}  // namespace transposed_stream

// wgmma, for many tokens on sm_90 (matmul_transposed_warpgroup.cuh).
namespace transposed_warpgroup {

struct Config {
  int tokens;    // of a CTA's block: 64, 128 or 256, and 32 for weights in registers
  int cluster;   // CTAs, 1 .. kMostCluster
  int partners;  // CTAs of a cluster that share the tokens of their blocks: 1, or 2 in clusters of two
  int clusters;  // how many run at once
  bool split;  // whether clusters share the outputs of the blocks that do not fill the chip, one cluster for each block
};

constexpr int kMostCluster = 8;

// Outputs of a stage. What a stage takes once is less for more of them, but the first is there later and splits are
// coarser, and 256 tokens leave no shared memory.
constexpr int stage_outputs(int tokens, bool in_registers) { return in_registers && tokens == 128 ? 128 : 64; }
// Inputs of a CTA's block.
constexpr int block_inputs(int tokens, bool in_registers) { return in_registers && tokens == 32 ? 256 : 128; }

// Whether the kernel takes these operands; the others are transposed_stream's. float32: one table at most; whether
// scratch has room is float32_rows' business, or of experts float32_bytes'.
bool supports(const MatmulArgs& args);

// Rows of float32 dy that the kernel takes at a time, as many as scratch has room for, as two fp16 numbers each, beside
// the scales and zeros of all; 0: it has none.
int64_t float32_rows(const MatmulArgs& args);
constexpr int64_t kFloat32Block = 128;  // tokens of the largest block
// Numbers of 16 bits that a group's parameters are for an output, of float zeros or offsets (`shifted`) and otherwise.
constexpr int parameter_rows(bool shifted) { return shifted ? 4 : 3; }
// Bytes of scratch for that of so many rows, and of `entries` scales and zeros.
int64_t float32_bytes(const MatmulArgs& args, int64_t rows, int64_t entries);
// Of `batch` weights those that have scales or zeros of their own, or one for all.
constexpr int64_t parameter_entries(const MatmulArgs& args, int64_t batch) {
  return args.scales_batch_stride == 0 && args.shift_batch_stride == 0 ? 1 : batch;
}

// Whether weights are wgmma's operand in registers: scales are of dy's type, and so are offsets, or zeros are integers,
// if there are any; for eight bits few tokens.
bool in_registers(const MatmulArgs& args);
// The same of experts' weights, whose eight bits are faster in shared memory; inputs of a block of 64 rows then.
bool experts_in_registers(const MatmulArgs& args);
constexpr int kLowInputs = 256;
// Of a block, then; the stages of eight bits and 256 tokens are too large to have enough of them.
constexpr int most_register_tokens(int bits) { return bits == 4 ? 256 : 128; }

// dy of 16 bits.
cudaError_t launch(const MatmulArgs& args, const Config& config, cudaStream_t stream);
// Blocks of 64 or 128 tokens, whose numbers have room in scratch; no float zeros or offsets.
cudaError_t launch_f32(const MatmulArgs& args, const Config& config, cudaStream_t stream);

// The ragged product with a plan for tiles of 64, 128 or 256 rows; those of args.x are in the plan's order.
cudaError_t launch_ragged(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream);
// Those of args.x are in their own order, and the plan's tiles have 64 or 128; args.scratch has room for all.
cudaError_t launch_ragged_f32(const MatmulArgs& args, const ragged::Work& work, int multiprocessors,
                              cudaStream_t stream);

}  // namespace transposed_warpgroup

}  // namespace wonly
