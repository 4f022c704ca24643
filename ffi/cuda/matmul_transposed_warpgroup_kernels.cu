#include "cuda/matmul_transposed_warpgroup.cuh"

namespace wonly::transposed_warpgroup {

cudaError_t launch(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  const auto launch_one = [&](auto* s) {
    return launch_shape<std::remove_pointer_t<decltype(s)>>(make_params<Consecutive>(args), config, stream);
  };
  return in_registers(args) ? with_register_shape(args, config.tokens, launch_one)
                            : with_shape<Consecutive>(args, config.tokens, launch_one);
}

}  // namespace wonly::transposed_warpgroup
