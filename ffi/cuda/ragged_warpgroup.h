// The ragged product for some tens of rows of an expert on sm_90a (ragged_warpgroup.cuh).
#pragma once

#include "cuda/matmul.h"
#include "cuda/ragged_plan.h"

namespace wonly::ragged_warpgroup {

constexpr int kLowRows = 64, kHighRows = 128;  // of a tile

bool supports(const MatmulArgs& args);

// Sums of a float32 row's groups, of 128 inputs at most, that are made with its numbers: of float zeros and offsets.
int64_t float32_sums(const MatmulArgs& args);

// Whether `launch`, for a plan with tiles of so many rows, rounds weights to the type of the activations: four bits
// with zeros or offsets of that type, and high tiles of groups of 32 or 64. Scales are of that type.
bool rounds(const MatmulArgs& args, int tile_rows);

// Which of them the plan for `launch` should have, where `rows` are spread over `experts` experts; 0 where other
// kernels are expected to be faster.
int tile_rows(const MatmulArgs& args, int64_t rows, int64_t experts);

// The rows of args.x are in the plan's order; or float32, in their own, and args.scratch has room for as many bytes as
// they take, and four for each and each of its sums.
cudaError_t launch(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream);

cudaError_t launch_f16(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream);
cudaError_t launch_bf16(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream);
cudaError_t launch_f32(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream);

}  // namespace wonly::ragged_warpgroup
