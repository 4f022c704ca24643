#include "cuda/ragged_transposed_warpgroup.cuh"

namespace wonly::transposed_warpgroup {

cudaError_t launch_ragged_f16(const MatmulArgs& args, const ragged::Work& work, int multiprocessors,
                              cudaStream_t stream) {
  return launch_ragged<__half>(args, work, multiprocessors, stream);
}

cudaError_t launch_ragged_bf16(const MatmulArgs& args, const ragged::Work& work, int multiprocessors,
                               cudaStream_t stream) {
  return launch_ragged<__nv_bfloat16>(args, work, multiprocessors, stream);
}

}  // namespace wonly::transposed_warpgroup
