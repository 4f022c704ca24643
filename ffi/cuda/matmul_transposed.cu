// Which kernel computes which transposed product.
#include <algorithm>

#include "cuda/device.h"
#include "cuda/matmul_transposed.h"
#include "layout.h"

namespace wonly {
namespace {

// Up to here the streaming kernel, which reads the weights again for every 32 tokens, is faster.
constexpr int kStreamTokens = 64;
// Of all multiprocessors, those that clusters of that many CTAs can use: a cluster lies in one part of the chip.
constexpr float kClusterShare[] = {1.f, 1.f, 1.f, 39 * 3 / 132.f, 30 * 4 / 132.f};

transposed_stream::Config stream_config(const MatmulArgs& args, const Device& device) {
  transposed_stream::Config config{};
  config.token_tiles = args.m <= 8 ? 1 : args.m <= 16 ? 2 : 4;
  config.warps = transposed_stream::max_warps(config.token_tiles);
  config.shared_bytes = shared_share(device, 1);
  config.cluster = 1;
  if (device.architecture < 90) return config;
  // The fewest rounds of CTAs, each the shorter the more of them share N.
  const int64_t blocks =
      args.batch * ceil_div(args.k, transposed_stream::kStripK) * ceil_div(args.m, 8 * config.token_tiles);
  float least = 0.f;
  for (int cluster = 1; cluster <= 4; ++cluster) {
    const int64_t places = static_cast<int64_t>(static_cast<float>(device.multiprocessors) * kClusterShare[cluster]);
    const float time = static_cast<float>(ceil_div(blocks * cluster, places)) / static_cast<float>(cluster);
    if (cluster == 1 || time < 0.95f * least) {
      least = time;
      config.cluster = cluster;
    }
  }
  return config;
}

transposed_warpgroup::Config warpgroup_config(const MatmulArgs& args, const Device& device) {
  const int64_t k_blocks = ceil_div(args.k, transposed_warpgroup::kBlockK);
  // Rounds of blocks, in the time of a block of 256 tokens.
  const auto cost = [&](int tokens, float time) {
    const int64_t blocks = args.batch * ceil_div(args.m, tokens) * k_blocks;
    return static_cast<float>(ceil_div(blocks, device.multiprocessors)) * time;
  };
  transposed_warpgroup::Config config{};
  config.tokens = cost(128, 0.64f) < cost(256, 1.f) ? 128 : 256;
  config.cluster = config.tokens == 256 && k_blocks >= 2 ? 2 : 1;
  config.multiprocessors = device.multiprocessors;
  return config;
}

}  // namespace

cudaError_t launch_matmul_transposed(const MatmulArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(&device); error != cudaSuccess) return error;
  if (device.architecture < 80) return cudaErrorNotSupported;
  if (device.architecture == 90 && args.m > kStreamTokens && transposed_warpgroup::supports(args)) {
    const transposed_warpgroup::Config config = warpgroup_config(args, device);
    return args.x_dtype == DType::kF16 ? transposed_warpgroup::launch_f16(args, config, stream)
                                       : transposed_warpgroup::launch_bf16(args, config, stream);
  }
  transposed_stream::Config config = stream_config(args, device);
  const auto launch = [&] {
    switch (args.x_dtype) {
      case DType::kF16:
        return transposed_stream::launch_f16(args, config, stream);
      case DType::kBF16:
        return transposed_stream::launch_bf16(args, config, stream);
      default:
        return transposed_stream::launch_f32(args, config, stream);
    }
  };
  // Less shared memory than on the tuned device: fewer warps, until two stages fit.
  cudaError_t error = launch();
  while (error == cudaErrorInvalidConfiguration && config.warps > 1) {
    config.shared_bytes = shared_share(device, 1);
    config.warps /= 2;
    error = launch();
  }
  return error;
}

namespace transposed_warpgroup {

bool supports(const MatmulArgs& args) {
  // Rows of dy are what the copy engine takes: multiples of 16 bytes.
  return (args.x_dtype == DType::kF16 || args.x_dtype == DType::kBF16) && args.n % 8 == 0;
}

}  // namespace transposed_warpgroup

}  // namespace wonly
