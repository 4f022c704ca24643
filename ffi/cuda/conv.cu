// When and how the convolution of conv.cuh runs. The numbers are fits to what was measured on an H100.
#include <limits>

#include "cuda/conv.h"
#include "cuda/device.h"
#include "layout.h"

namespace wonly {
namespace conv {

bool supports(const ConvArgs& args) {
  const MatmulArgs& product = args.product;
  const bool sixteen_bits = product.x_dtype == DType::kF16 || product.x_dtype == DType::kBF16;
  const auto reaches = [](const ConvAxis& axis) {
    const int64_t last = int64_t{axis.window - 1} * axis.dilation;
    // The box of first taps, from -low to the last pixel's, in the signed bytes of a tensor map.
    const int64_t high = int64_t{axis.result - 1} * axis.stride - axis.low - (axis.size - 1);
    return axis.stride <= 8 && last <= 255 && axis.low >= -127 && axis.low <= 128 && high >= -128 && high <= 127;
  };
  // They are rounded to x's type, which would be felt where they are of a wider one.
  const bool shift = product.shift_mode == ShiftMode::kNone || product.shift_dtype == product.x_dtype ||
                     (product.shift_mode == ShiftMode::kZeros && product.shift_dtype == DType::kU8);
  const bool parameters = (product.scale_dtype == product.x_dtype || product.scale_dtype == DType::kF32) && shift;
  return sixteen_bits && parameters && product.shift_mode != ShiftMode::kTable && product.k % 8 == 0 && product.k > 0 &&
         product.m > 0 && product.m <= std::numeric_limits<int>::max() - 256 && reaches(args.geometry.height) &&
         reaches(args.geometry.width);
}

cudaError_t launch(const ConvArgs& args, const tiled::Config& config, cudaStream_t stream) {
  return args.product.x_dtype == DType::kF16 ? launch_f16(args, config, stream) : launch_bf16(args, config, stream);
}

namespace {

constexpr tiled::Costs::Stage kStages[] = {{1, 64, 0.41f}, {1, 128, 0.47f}, {1, 192, 0.54f}, {1, 256, 0.64f},
                                           {2, 64, 0.47f}, {2, 128, 0.51f}, {2, 192, 0.56f}, {2, 256, 0.68f}};
constexpr tiled::Costs kCosts{
    kStages,        /*stage_count=*/8, /*start=*/2.8f, /*wave=*/0.5f,      /*alone=*/0.5f,
    /*split=*/3.1f, /*sums=*/3.f,      /*more=*/1.5f,  /*most_splits=*/16, /*least_stages=*/3};

}  // namespace
}  // namespace conv

cudaError_t launch_conv(const ConvArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(&device); error != cudaSuccess) return error;
  if (device.architecture != 90) return cudaErrorNotSupported;
  const int64_t stages =
      args.geometry.height.window * args.geometry.width.window * ceil_div(args.product.k, tiled::kStageInputs);
  tiled::Config config{};
  tiled::choose(args.product, stages, device.multiprocessors, conv::kCosts, &config);
  return conv::launch(args, config, stream);
}

}  // namespace wonly
