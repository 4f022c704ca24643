// The ragged product for a dozen rows of an expert on sm_90a (ragged_warpgroup.cuh).
#pragma once

#include "cuda/matmul.h"
#include "cuda/ragged_plan.h"

namespace wonly::ragged_warpgroup {

constexpr int kTileRows = 32;  // of the plan that `launch` takes

bool supports(const MatmulArgs& args);

// The rows of args.x are in the plan's order.
cudaError_t launch(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream);

cudaError_t launch_f16(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream);
cudaError_t launch_bf16(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream);

}  // namespace wonly::ragged_warpgroup
