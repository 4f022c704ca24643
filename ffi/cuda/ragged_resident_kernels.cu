#include "cuda/ragged_resident.cuh"

namespace wonly::ragged_resident {

cudaError_t launch_four_bits(const RaggedArgs& args, const Device& device, cudaStream_t stream) {
  return launch_of<4>(args, device, stream);
}

}  // namespace wonly::ragged_resident
