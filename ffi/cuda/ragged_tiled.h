// The ragged product for hundreds of rows of an expert on sm_90a (ragged_tiled.cuh).
#pragma once

#include "cuda/ragged.h"
#include "cuda/ragged_plan.h"

namespace wonly::ragged_tiled {

constexpr int kTileRows = 256;  // of the plan that `launch` takes

// 16-bit activations in rows that the tensor copy engine can fetch. Where those of an expert do not follow each other,
// scratch has to have room to put them in order.
bool supports(const RaggedArgs& args);

cudaError_t launch(const RaggedArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream);

cudaError_t launch_f16(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream);
cudaError_t launch_bf16(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream);

}  // namespace wonly::ragged_tiled
