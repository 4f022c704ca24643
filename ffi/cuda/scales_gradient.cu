#include "cuda/device.h"
#include "cuda/scales_gradient.h"

namespace wonly {
namespace scales_gradient {
namespace {

// Whether codes are streamed, or met by tiles of a dense gradient.
bool streams(const ScalesGradientArgs& args, int multiprocessors) {
  if (args.table != nullptr) return false;
  // Microseconds on an H100 of 128 x 128 weights and 32 rows, of 256 x 256 and 64, and of the end of a tile of these.
  constexpr float kStreamed = 0.52f, kStage = 0.65f, kEnd = 1.55f;
  // Of the rows of an entry, were they spread evenly.
  const int64_t rows = args.limits == nullptr ? args.m : ceil_div(args.m, args.batch);
  const int64_t strips = args.batch * ceil_div(args.n, 128) * ceil_div(args.k, 128);
  const int64_t tiles = args.batch * ceil_div(args.n, 256) * ceil_div(args.k, 256);
  const auto few = static_cast<float>(ceil_div(strips * ceil_div(rows, kStreamedRows), multiprocessors)) * kStreamed;
  const auto many = static_cast<float>(ceil_div(tiles, multiprocessors / 2)) *
                    (static_cast<float>(ceil_div(rows, 64)) * kStage + kEnd);
  return few <= many;
}

}  // namespace

bool supports(const ScalesGradientArgs& args) {
  return args.x_dtype != DType::kF32 && args.k % 8 == 0 && args.n % 8 == 0 && (args.bits == 4 || args.table == nullptr);
}

}  // namespace scales_gradient

cudaError_t launch_scales_gradient(const ScalesGradientArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(&device); error != cudaSuccess) return error;
  if (device.architecture != 90 || !scales_gradient::supports(args)) return cudaErrorNotSupported;
  const bool f16 = args.x_dtype == DType::kF16;
  const auto few = f16 ? scales_gradient::launch_few_f16 : scales_gradient::launch_few_bf16;
  const auto many = f16 ? scales_gradient::launch_many_f16 : scales_gradient::launch_many_bf16;
  return (scales_gradient::streams(args, device.multiprocessors) ? few : many)(args, device.multiprocessors, stream);
}

}  // namespace wonly
