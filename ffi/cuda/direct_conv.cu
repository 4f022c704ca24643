// When and how the convolutions of depthwise_conv.cuh, grouped_conv.cuh and band_conv.cuh run. The numbers are fits to
// what was measured on an H100.
#include <algorithm>
#include <limits>
#include <numeric>

#include "cuda/device.h"
#include "cuda/direct_conv.h"
#include "layout.h"

namespace wonly {
namespace {

// Bytes of shared memory for weights, of which more CTAs than one are to run on a multiprocessor of any architecture.
constexpr int kMostShared = 96 << 10;

int most_shared(const Device& device) { return std::min(kMostShared, device.shared_per_block - 1024); }

}  // namespace

namespace depthwise {
namespace {

constexpr int kBlock = 32;      // outputs of a CTA at most
constexpr int kLeastBlock = 4;  // that all strips but kOdd and kPixel can take
// Outputs of all pixels on a multiprocessor from which on strips are faster.
constexpr int kLargeFrom = 4500, kMediumFrom = 750;

}  // namespace

bool supports(const DirectConvArgs& args, int shared_bytes) {
  return args.product.k == 1 && int64_t{args.taps()} * kLeastBlock * 4 <= shared_bytes;
}

Config choose(const DirectConvArgs& args, int multiprocessors, int shared_bytes) {
  const int64_t n = args.product.n;
  const ConvAxis& width = args.geometry.width;
  const bool single = n == args.geometry.groups;  // an input of an output
  const int64_t each = args.product.m * n / multiprocessors;
  const int step = width.stride / std::gcd(width.stride, width.dilation);
  Config config{};
  if (step > 2) {
    config.strip = Strip::kPixel;
  } else if (!single || n % 2 != 0) {
    config.strip = Strip::kOdd;
  } else {
    const bool four = n % 4 == 0, narrow = args.product.x_dtype != DType::kF32;
    config.strip = four && each >= step * kLargeFrom       ? Strip::kLarge
                   : four && narrow && each >= kMediumFrom ? Strip::kMedium
                                                           : Strip::kSmall;
  }
  const int64_t most = std::min<int64_t>(kBlock, shared_bytes / (4 * args.taps()) / kLeastBlock * kLeastBlock);
  config.block = static_cast<int>(ceil_div(ceil_div(n, ceil_div(n, most)), kLeastBlock) * kLeastBlock);
  return config;
}

cudaError_t launch(const DirectConvArgs& args, const Config& config, int multiprocessors, cudaStream_t stream) {
  switch (args.product.x_dtype) {
    case DType::kF16:
      return launch_f16(args, config, multiprocessors, stream);
    case DType::kBF16:
      return launch_bf16(args, config, multiprocessors, stream);
    default:
      return launch_f32(args, config, multiprocessors, stream);
  }
}

}  // namespace depthwise

namespace grouped {

constexpr int kManyFrom = 4500;  // outputs of all pixels on a multiprocessor from which on several runs are faster

bool supports(const DirectConvArgs& args, int architecture, int shared_bytes) {
  const DirectConvGeometry& g = args.geometry;
  const int64_t features = args.product.k * g.groups;
  const int64_t x_bytes = 2 * features * g.images * g.depth.size * g.height.size * g.width.size;
  const int64_t steps = int64_t{args.taps()} * input_blocks(args);
  return args.product.x_dtype != DType::kF32 && architecture >= 80 && features % 8 == 0 && args.product.n % 8 == 0 &&
         x_bytes <= std::numeric_limits<uint32_t>::max() && steps <= std::min(kMostSteps, shared_bytes / kStepBytes);
}

int choose(const DirectConvArgs& args, int multiprocessors) {
  return args.product.m * args.product.n >= int64_t{multiprocessors} * kManyFrom ? kManyRuns : 1;
}

cudaError_t launch(const DirectConvArgs& args, int runs, int multiprocessors, cudaStream_t stream) {
  return args.product.x_dtype == DType::kF16 ? launch_f16(args, runs, multiprocessors, stream)
                                             : launch_bf16(args, runs, multiprocessors, stream);
}

// The groups of 32 outputs from n on begin at different places of their first block: all are looked at.
int input_blocks(const DirectConvArgs& args) {
  const int64_t k = args.product.k, n = args.product.n, outputs = n / args.geometry.groups;
  int64_t most = 1;
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t last = std::min<int64_t>(first + kBlock, n) - 1;
    most = std::max(most, ceil_div((last / outputs + 1) * k, kBlock) - first / outputs * k / kBlock);
  }
  return static_cast<int>(most);
}

}  // namespace grouped

namespace bands {
namespace {

int high_padding(const ConvAxis& axis) {
  return axis.result + (axis.window - 1) * axis.dilation - axis.low - axis.size;
}

}  // namespace

Layout layout_of(const DirectConvGeometry& g) {
  const auto size = [](const ConvAxis& axis) {
    return std::max(axis.size + std::max(axis.low, high_padding(axis)), axis.result);
  };
  const int pitch = size(g.width), rows = size(g.height);
  return {pitch, rows, (int64_t{g.images - 1} * rows + g.height.result - 1) * pitch + g.width.result};
}

int band_rows(const DirectConvGeometry& g) {
  const int pitch = layout_of(g).pitch;
  return (pitch + kPlaces - 2 + (g.width.window - 1) * g.width.dilation) / pitch +
         (g.height.window - 1) * g.height.dilation + 1;
}

int band_bytes(const DirectConvGeometry& g) {
  return static_cast<int>(ceil_div(band_rows(g) * layout_of(g).pitch, 8)) * 8 * kPlaceBytes;
}

int64_t shared_bytes(const DirectConvArgs& args, int bands) {
  return kFixedBytes + int64_t{args.taps()} * kOutputs * kPlaceBytes + int64_t{bands} * band_bytes(args.geometry);
}

int strip_ctas(const DirectConvArgs& args, int multiprocessors) {
  const int64_t strips = ceil_div(args.product.n, kOutputs);
  return static_cast<int>(
      std::min(ceil_div(layout_of(args.geometry).places, kPlaces), std::max<int64_t>(1, multiprocessors / strips)));
}

float expected_us(const DirectConvArgs& args, int multiprocessors, const Costs& costs) {
  const MatmulArgs& product = args.product;
  const DirectConvGeometry& g = args.geometry;
  const int64_t ctas = strip_ctas(args, multiprocessors), strips = ceil_div(product.n, kOutputs);
  const auto waves = static_cast<float>(ceil_div(strips * ctas, multiprocessors));
  const auto tiles = static_cast<float>(ceil_div(ceil_div(layout_of(g).places, kPlaces), ctas));
  const float tile = costs.tile + static_cast<float>(args.taps()) * costs.tap;
  const int64_t pixels = int64_t{g.images} * g.height.size * g.width.size;
  const auto bytes = static_cast<float>(2 * (pixels * product.k * g.groups + product.m * product.n));
  const float walking = waves * (costs.weights * static_cast<float>(product.k) + tiles * tile);
  return costs.start + std::max(walking, bytes / costs.memory);
}

bool supports(const DirectConvArgs& args, int architecture) {
  const DirectConvGeometry& g = args.geometry;
  const MatmulArgs& product = args.product;
  const auto fits = [](const ConvAxis& axis) {
    return axis.size > 0 && axis.stride == 1 && axis.spread == 1 && axis.low >= 0 && high_padding(axis) >= 0;
  };
  const bool flat = g.depth.size == 1 && g.depth.result == 1 && g.depth.window == 1 && g.depth.low == 0;
  const bool groups = g.groups == 1 || product.n == product.k * g.groups;
  if (architecture != 90 || product.x_dtype == DType::kF32 || !flat || !fits(g.height) || !fits(g.width) || !groups ||
      product.k < 2 || product.k > kOutputs || kOutputs % product.k != 0 || product.k * g.groups % 8 != 0) {
    return false;
  }
  const Layout layout = layout_of(g);
  return product.n <= 65535 * kOutputs && layout.pitch <= kMostPitch &&
         layout.places <= std::numeric_limits<int>::max() / 2 && shared_bytes(args, kLeastBands) <= kMostSharedBytes;
}

cudaError_t launch(const DirectConvArgs& args, int multiprocessors, cudaStream_t stream) {
  return args.product.x_dtype == DType::kF16 ? launch_f16(args, multiprocessors, stream)
                                             : launch_bf16(args, multiprocessors, stream);
}

}  // namespace bands

cudaError_t launch_direct_conv(const DirectConvArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(&device); error != cudaSuccess) return error;
  const int shared = most_shared(device);
  // Depthwise with several outputs of an input has no neighbours to load together: the zeros of the other kernel cost
  // less.
  const bool several = args.product.n > args.geometry.groups;
  const bool tensors = grouped::supports(args, device.architecture, shared);
  if (depthwise::supports(args, shared) && !(several && tensors)) {
    const depthwise::Config config = depthwise::choose(args, device.multiprocessors, shared);
    return depthwise::launch(args, config, device.multiprocessors, stream);
  }
  if (!tensors) return cudaErrorNotSupported;
  if (bands::supports(args, device.architecture)) return bands::launch(args, device.multiprocessors, stream);
  return grouped::launch(args, grouped::choose(args, device.multiprocessors), device.multiprocessors, stream);
}

}  // namespace wonly
