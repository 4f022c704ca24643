#include "cuda/device.h"
#include "cuda/quantized_matmul.h"

namespace wonly {
namespace quantized {

bool supports(const QuantizedMatmulArgs& args) {
  const MatmulArgs& product = args.product;
  const auto whole_stages = [&](int64_t groups) {
    return groups == 1 || product.k / groups == 128 || product.k / groups == 256;
  };
  // Integer sums of all inputs fit 32 bits.
  const bool fits = args.float8 || product.k <= int64_t{1} << 16;
  return product.shift_mode != ShiftMode::kTable && whole_stages(product.groups) && whole_stages(args.x_groups) &&
         fits && (!args.float8 || product.bits == 4);
}

}  // namespace quantized

cudaError_t launch_quantized_matmul(const QuantizedMatmulArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(&device); error != cudaSuccess) return error;
  if (device.architecture != 90 || !quantized::supports(args)) return cudaErrorNotSupported;
  if (args.float8) return quantized::launch_w4f8(args, device.multiprocessors, stream);
  return args.product.bits == 4 ? quantized::launch_w4a8(args, device.multiprocessors, stream)
                                : quantized::launch_w8a8(args, device.multiprocessors, stream);
}

}  // namespace wonly
