// The ragged product for a few rows of an expert on sm_90 (ragged_resident.cuh), one compiled file for codes of four
// bits and of eight.
#pragma once

#include "cuda/device.h"
#include "cuda/ragged.h"

namespace wonly::ragged_resident {

// K a multiple of 64 (int8: of 32), N of 8. sm_90 only.
bool supports(const MatmulArgs& args);

// In one launch, but for the plan of many ids or experts. cudaErrorInvalidConfiguration when the activations of a row
// do not fit a CTA's shared memory.
cudaError_t launch(const RaggedArgs& args, const Device& device, cudaStream_t stream);

cudaError_t launch_four_bits(const RaggedArgs& args, const Device& device, cudaStream_t stream);
cudaError_t launch_eight_bits(const RaggedArgs& args, const Device& device, cudaStream_t stream);

}  // namespace wonly::ragged_resident
