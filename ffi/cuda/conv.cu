// When and how the convolution of conv.cuh runs. The numbers are fits to what was measured on an H100.
#include <algorithm>
#include <limits>

#include "cuda/conv.h"
#include "cuda/device.h"
#include "cuda/matmul_tiled.h"
#include "layout.h"

namespace wonly {
namespace conv {

bool supports(const ConvArgs& args) {
  const MatmulArgs& product = args.product;
  const bool sixteen_bits = product.x_dtype == DType::kF16 || product.x_dtype == DType::kBF16;
  const auto reaches = [](int size, int low, int window, int dilation, int stride, int out) {
    const int last = (window - 1) * dilation;
    // The box of first taps, from -low to the last pixel's, in the signed bytes of a tensor map.
    const int high = (out - 1) * stride - low - (size - 1);
    return stride <= 8 && last <= 255 && low >= -127 && low <= 128 && high >= -128 && high <= 127;
  };
  // They are rounded to x's type, which would be felt where they are of a wider one.
  const bool shift = product.shift_mode == ShiftMode::kNone || product.shift_dtype == product.x_dtype ||
                     (product.shift_mode == ShiftMode::kZeros && product.shift_dtype == DType::kU8);
  const bool parameters = (product.scale_dtype == product.x_dtype || product.scale_dtype == DType::kF32) && shift;
  return sixteen_bits && parameters && product.shift_mode != ShiftMode::kTable && product.k % 8 == 0 && product.k > 0 &&
         product.m > 0 && product.m <= std::numeric_limits<int>::max() - 256 &&
         reaches(args.height, args.low_height, args.window_height, args.dilation_height, args.stride_height,
                 args.out_height) &&
         reaches(args.width, args.low_width, args.window_width, args.dilation_width, args.stride_width, args.out_width);
}

cudaError_t launch(const ConvArgs& args, const Config& config, int multiprocessors, cudaStream_t stream) {
  return args.product.x_dtype == DType::kF16 ? launch_f16(args, config, multiprocessors, stream)
                                             : launch_bf16(args, config, multiprocessors, stream);
}

namespace {

// Microseconds of a stage while every multiprocessor has a CTA, for tiles of so many pixels.
struct Cost {
  int ctas, pixels;
  float stage;
};
constexpr Cost kCosts[] = {{1, 64, 0.41f}, {1, 128, 0.47f}, {1, 192, 0.54f}, {1, 256, 0.64f},
                           {2, 64, 0.47f}, {2, 128, 0.51f}, {2, 192, 0.56f}, {2, 256, 0.68f}};
// What a wave and the kernel add, and what it takes to hand the sums of 256 pixels over.
constexpr float kWave = 0.5f, kStart = 2.8f, kSplit = 3.1f, kSums = 1.5f;
constexpr int kLeastStages = 3;  // of a cluster

Config choose(const ConvArgs& args, int multiprocessors) {
  const MatmulArgs& product = args.product;
  const int stages =
      args.window_height * args.window_width * static_cast<int>(ceil_div(product.k, tiled::kStageInputs));
  Config best{1, 64, 1};
  float least = 0.f;
  for (const Cost& cost : kCosts) {
    const int64_t tiles = ceil_div(product.m, cost.pixels) * ceil_div(product.n, cost.ctas * 2 * kTileN);
    const int64_t clusters = multiprocessors / cost.ctas, rest = tiles % clusters;
    const float wave = static_cast<float>(stages) * cost.stage + kWave;
    for (int splits = 1; splits <= kMostSplits; ++splits) {
      if (splits > 1 && (rest == 0 || rest * splits > clusters || stages < splits * kLeastStages)) break;
      float last = rest == 0 ? 0.f : wave;
      if (splits > 1) {
        const float sums = kSums * static_cast<float>(cost.pixels) / 256.f;
        last = (wave - kWave) / static_cast<float>(splits) + kWave + kSplit + static_cast<float>(splits) * sums;
      }
      const float us = kStart + static_cast<float>(tiles / clusters) * wave + last;
      if (least == 0.f || us < least) {
        least = us;
        best = {cost.ctas, cost.pixels, splits};
      }
    }
  }
  return best;
}

}  // namespace
}  // namespace conv

cudaError_t launch_conv(const ConvArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(&device); error != cudaSuccess) return error;
  if (device.architecture != 90) return cudaErrorNotSupported;
  conv::Config config = conv::choose(args, device.multiprocessors);
  cudaError_t error = conv::launch(args, config, device.multiprocessors, stream);
  if (error == cudaErrorInvalidConfiguration && config.splits > 1) {  // too little scratch
    config.splits = 1;
    error = conv::launch(args, config, device.multiprocessors, stream);
  }
  return error;
}

}  // namespace wonly
