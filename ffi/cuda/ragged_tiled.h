// The ragged product for hundreds of rows of an expert on sm_90a (ragged_tiled.cuh).
#pragma once

#include "cuda/matmul.h"
#include "cuda/ragged_plan.h"

namespace wonly::ragged_tiled {

constexpr int kTileRows = 256;  // of the plan that `launch` takes

// Of what tiled::takes. The rows of args.x are in the plan's order.
cudaError_t launch(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream);

cudaError_t launch_f16(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream);
cudaError_t launch_bf16(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream);

}  // namespace wonly::ragged_tiled
