#include "cuda/grouped_conv.cuh"

namespace wonly::grouped {

cudaError_t launch_f16(const DirectConvArgs& args, int runs, int multiprocessors, cudaStream_t stream) {
  return launch_typed<__half>(args, runs, multiprocessors, stream);
}

cudaError_t launch_bf16(const DirectConvArgs& args, int runs, int multiprocessors, cudaStream_t stream) {
  return launch_typed<__nv_bfloat16>(args, runs, multiprocessors, stream);
}

}  // namespace wonly::grouped
