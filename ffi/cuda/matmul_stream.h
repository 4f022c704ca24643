// The small-M product (matmul_stream.cuh): one compiled file, and one for tables.
#pragma once

#include "cuda/matmul.h"
#include "cuda/ragged_plan.h"

namespace wonly::stream {

struct Config {
  int atoms;         // 16-output strips of a warp: 1, 2 or 4
  int token_tiles;   // tiles of 8 tokens that share one pass over the weights: 1 or 2
  int warps;         // of one CTA, along the inputs: 1 .. max_warps(token_tiles)
  int cluster;       // CTAs along the inputs: 1, 2, 4 or 8 (more than 1 needs sm_90)
  int shared_bytes;  // that a CTA may use: its rings are as deep as that allows
};

constexpr int kStageInputs = 128;  // that a warp takes at a time

constexpr int max_warps(int token_tiles) { return token_tiles == 1 ? 16 : 8; }

// cudaErrorInvalidConfiguration when `shared_bytes` is too little.
cudaError_t launch(const MatmulArgs& args, const Config& config, cudaStream_t stream);

cudaError_t launch_f16(const MatmulArgs& args, const Config& config, cudaStream_t stream);
cudaError_t launch_bf16(const MatmulArgs& args, const Config& config, cudaStream_t stream);
cudaError_t launch_f32(const MatmulArgs& args, const Config& config, cudaStream_t stream);
// ShiftMode::kTable.
cudaError_t launch_table(const MatmulArgs& args, const Config& config, cudaStream_t stream);

// Whether ragged products have tiles of 16 rows: with four bits, and in float32, two of 8 rows take less.
constexpr bool has_wide_tiles(int bits, int x_size) { return bits == 8 && x_size == 2; }

// Of a ragged product: four atoms, and tiles of 8 * token_tiles rows in its plan.
cudaError_t launch_ragged(const MatmulArgs& args, const ragged::Work& work, const Config& config, cudaStream_t stream);

cudaError_t launch_ragged_f16(const MatmulArgs& args, const ragged::Work& work, const Config& config,
                              cudaStream_t stream);
cudaError_t launch_ragged_bf16(const MatmulArgs& args, const ragged::Work& work, const Config& config,
                               cudaStream_t stream);
cudaError_t launch_ragged_f32(const MatmulArgs& args, const ragged::Work& work, const Config& config,
                              cudaStream_t stream);
cudaError_t launch_ragged_table(const MatmulArgs& args, const ragged::Work& work, const Config& config,
                                cudaStream_t stream);

}  // namespace wonly::stream
