#include "cuda/ragged_resident.cuh"

namespace wonly::ragged_resident {

cudaError_t launch_eight_bits(const RaggedArgs& args, const Device& device, cudaStream_t stream) {
  return launch_of<8>(args, device, stream);
}

}  // namespace wonly::ragged_resident
