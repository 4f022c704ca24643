#include "cuda/ragged_warpgroup.cuh"

namespace wonly::ragged_warpgroup {

cudaError_t launch_f16(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream) {
  return launch_typed<__half>(args, work, multiprocessors, stream);
}

cudaError_t launch_bf16(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream) {
  return launch_typed<__nv_bfloat16>(args, work, multiprocessors, stream);
}

cudaError_t launch_f32(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream) {
  return launch_split(args, work, multiprocessors, stream);
}

}  // namespace wonly::ragged_warpgroup
