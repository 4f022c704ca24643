#include "cuda/matmul_stream.cuh"

namespace wonly::stream {

cudaError_t launch_table_f32(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  return launch_typed<float>(args, ConsecutiveOfTable{}, config, stream);
}

}  // namespace wonly::stream
