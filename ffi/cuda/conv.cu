// When and how the convolutions of conv.cuh and conv_warpgroup.cuh run. The numbers are those of jax_wonly/costs.
#include <algorithm>
#include <limits>

#include "cuda/conv.h"
#include "cuda/costs.h"
#include "cuda/device.h"
#include "cuda/direct_conv.h"
#include "layout.h"

namespace wonly {
namespace conv {

bool supports(const ConvArgs& args) {
  const MatmulArgs& product = args.product;
  const bool sixteen_bits = product.x_dtype == DType::kF16 || product.x_dtype == DType::kBF16;
  const auto whole = [](const ConvAxis& axis) {
    return axis.spread == 1 ||
           (axis.stride == 1 && axis.dilation == 1 && axis.result % axis.spread == 0 && axis.window >= axis.spread);
  };
  const ConvGeometry geometry = phase_geometry(args.geometry);
  const auto reaches = [](const ConvAxis& axis) {
    const int64_t last = int64_t{axis.window - 1} * axis.dilation;  // at most, of a phase's taps
    // The box of first taps, from -low to the last pixel's, in the signed bytes of a tensor map.
    const int64_t high = int64_t{axis.result - 1} * axis.stride - axis.low - (axis.size - 1);
    return axis.stride <= 8 && last <= 255 && axis.low >= -127 && axis.low <= 128 && high >= -128 && high <= 127;
  };
  // They are rounded to x's type, which would be felt where they are of a wider one.
  const bool alike = product.scale_dtype == product.x_dtype;
  const bool shift = product.shift_mode == ShiftMode::kNone || (alike && product.shift_dtype == product.x_dtype) ||
                     (product.shift_mode == ShiftMode::kZeros && product.shift_dtype == DType::kU8);
  const bool parameters = (alike || product.scale_dtype == DType::kF32) && shift;
  return sixteen_bits && parameters && product.shift_mode != ShiftMode::kTable && product.k % 8 == 0 && product.k > 0 &&
         product.m > 0 && whole(args.geometry.height) && whole(args.geometry.width) && reaches(geometry.height) &&
         reaches(geometry.width) &&
         product.m + (phases(geometry) + 1) * tiled::kTileTokens <= std::numeric_limits<int>::max();
}

cudaError_t launch(const ConvArgs& args, const tiled::Config& config, cudaStream_t stream) {
  return args.product.x_dtype == DType::kF16 ? launch_f16(args, config, stream) : launch_bf16(args, config, stream);
}

bool supports_warpgroups(const ConvArgs& args) {
  MatmulArgs product = args.product;
  product.scale_dtype = product.x_dtype;  // for which float32 will do
  return supports(args) && phases(args.geometry) == 1 && product.k % 64 == 0 && product.k / product.groups % 64 == 0 &&
         warpgroup::is_plain(product);
}

cudaError_t launch(const ConvArgs& args, const warpgroup::Config& config, cudaStream_t stream) {
  return args.product.x_dtype == DType::kF16 ? launch_f16(args, config, stream) : launch_bf16(args, config, stream);
}

namespace {

// As a convolution in one group.
DirectConvArgs direct_args(const ConvArgs& args) {
  DirectConvArgs direct{args.product,
                        {args.geometry.images, 1, {1, 1, 1, 1, 0, 1}, args.geometry.height, args.geometry.width}};
  MatmulArgs& product = direct.product;
  product.qw_batch_stride = ceil_div(product.n, kTileN) * ceil_div(product.k, tile_k(product.bits)) * kTileWords;
  product.scales_batch_stride = product.shift_batch_stride = product.groups * product.n;
  return direct;
}

}  // namespace

}  // namespace conv

cudaError_t launch_conv(const ConvArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(&device); error != cudaSuccess) return error;
  if (device.architecture != 90) return cudaErrorNotSupported;
  const ConvGeometry& g = args.geometry;
  const int64_t phases = conv::phases(g), tap_stages = ceil_div(args.product.k, tiled::kStageInputs);
  MatmulArgs of_phases = args.product;
  of_phases.batch = phases;
  of_phases.m /= phases;
  // Of phases the mean.
  const int64_t stages = ceil_div(g.height.window * g.width.window, phases) * tap_stages;
  tiled::Config config{};
  const float us = tiled::choose(of_phases, stages, device.multiprocessors, costs::kConv, &config);
  warpgroup::Config warpgroups{};
  float us_of_warpgroups = std::numeric_limits<float>::max();
  if (conv::supports_warpgroups(args)) {
    MatmulArgs of_taps = args.product;
    of_taps.k *= stages / tap_stages;
    of_taps.groups = 1;  // the costs are those of groups of 64, and of any scales
    of_taps.scale_dtype = of_taps.x_dtype;
    us_of_warpgroups = warpgroup::choose(of_taps, device.multiprocessors, costs::kConvWarpgroup, &warpgroups);
  }
  const DirectConvArgs direct = conv::direct_args(args);
  if (bands::supports(direct, device.architecture) &&
      bands::expected_us(direct, device.multiprocessors, costs::kBandConv) < std::min(us, us_of_warpgroups)) {
    return bands::launch(direct, device.multiprocessors, stream);
  }
  if (us_of_warpgroups < us) return conv::launch(args, warpgroups, stream);
  config.splits = static_cast<int>(std::min<int64_t>(config.splits, conv::least_taps(g) * tap_stages));
  return conv::launch(args, config, stream);
}

}  // namespace wonly
