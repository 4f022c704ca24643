// When and how the convolutions of depthwise_conv.cuh and grouped_conv.cuh run. The numbers are fits to what was
// measured on an H100.
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
  return grouped::launch(args, grouped::choose(args, device.multiprocessors), device.multiprocessors, stream);
}

}  // namespace wonly
