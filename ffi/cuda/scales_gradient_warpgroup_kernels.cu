#include "cuda/scales_gradient_dense.cuh"
#include "cuda/scales_gradient_stream.cuh"

namespace wonly::scales_gradient {

cudaError_t launch_few_f16(const ScalesGradientArgs& args, int multiprocessors, cudaStream_t stream) {
  return launch_streamed<__half>(args, multiprocessors, stream);
}

cudaError_t launch_few_bf16(const ScalesGradientArgs& args, int multiprocessors, cudaStream_t stream) {
  return launch_streamed<__nv_bfloat16>(args, multiprocessors, stream);
}

cudaError_t launch_many_f16(const ScalesGradientArgs& args, int multiprocessors, cudaStream_t stream) {
  return launch_dense_tiles<__half>(args, multiprocessors, stream);
}

cudaError_t launch_many_bf16(const ScalesGradientArgs& args, int multiprocessors, cudaStream_t stream) {
  return launch_dense_tiles<__nv_bfloat16>(args, multiprocessors, stream);
}

}  // namespace wonly::scales_gradient
