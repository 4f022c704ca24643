// The ragged product for a few rows of an expert on sm_90 (ragged_resident.cuh), one compiled file per activation type.
#pragma once

#include "cuda/device.h"
#include "cuda/ragged.h"

namespace wonly::ragged_resident {

// int4, K a multiple of 64, N of 8. sm_90 only.
bool supports(const MatmulArgs& args);

// In one launch, but for the plan of many ids or experts. cudaErrorInvalidConfiguration when the activations of a row
// do not fit a CTA's shared memory.
cudaError_t launch(const RaggedArgs& args, const Device& device, cudaStream_t stream);

cudaError_t launch_f16(const RaggedArgs& args, const Device& device, cudaStream_t stream);
cudaError_t launch_bf16(const RaggedArgs& args, const Device& device, cudaStream_t stream);
cudaError_t launch_f32(const RaggedArgs& args, const Device& device, cudaStream_t stream);

}  // namespace wonly::ragged_resident
