#include "cuda/transposed_float32_operands.cuh"

namespace wonly::transposed_warpgroup {

cudaError_t launch_f32(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  Params<Consecutive> params = make_params<Consecutive>(args);
  const int64_t tokens = (args.x_batch_stride == 0 ? 1 : args.batch) * args.m;
  const cudaError_t error =
      launch_prepare(args, parameter_entries(args, args.batch), {tokens, nullptr, {}}, stream, &params.float32);
  if (error != cudaSuccess) return error;
  return with_float32_shape<Consecutive, false>(args, config.tokens, [&](auto* s) {
    return launch_shape<std::remove_pointer_t<decltype(s)>>(params, config, stream);
  });
}

}  // namespace wonly::transposed_warpgroup
