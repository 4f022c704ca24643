// Which kernel runs which product.
#include "cuda/matmul.h"

#include <algorithm>

#include "cuda/device.h"
#include "cuda/matmul_stream.h"
#include "layout.h"

namespace wonly {
namespace {

// The widest strip of outputs per warp that still gives every multiprocessor a CTA (benchmarks/tune.py measures the alternatives).
stream::Config stream_config(const MatmulArgs& args, const Device& device) {
  stream::Config config{};
  config.token_tiles = args.m <= 8 ? 1 : 2;
  const int64_t passes = args.batch * ceil_div(args.m, 8 * config.token_tiles);
  const auto ctas = [&](int atoms) { return passes * ceil_div(args.n, atoms * kAtomN); };
  const int64_t wanted = device.multiprocessors * 9 / 10;
  config.atoms = ctas(4) >= wanted ? 4 : ctas(2) >= wanted ? 2 : 1;
  config.cluster = 1;
  if (device.architecture >= 90) {
    while (config.cluster < 8 && ctas(config.atoms) * config.cluster < wanted / 2) config.cluster *= 2;
  }
  const bool one_wave = ctas(config.atoms) * config.cluster <= device.multiprocessors;
  const int64_t stages_of_16_warps = args.k / (16 * 128);
  config.warps = config.token_tiles == 1 && one_wave && stages_of_16_warps >= 2 ? 16 : 8;
  config.shared_bytes = shared_share(device, one_wave ? 1 : 2);
  return config;
}

}  // namespace

cudaError_t launch_matmul(const MatmulArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(&device); error != cudaSuccess) return error;
  if (device.architecture < 80 && args.x_dtype != DType::kF16) return cudaErrorNotSupported;
  stream::Config config = stream_config(args, device);
  // Less shared memory than on the tuned devices: fewer warps, then narrower strips, until two stages fit.
  cudaError_t error = stream::launch(args, config, stream);
  while (error == cudaErrorInvalidConfiguration && (config.warps > 1 || config.atoms > 1)) {
    config.shared_bytes = shared_share(device, 1);
    if (config.warps > 1) {
      config.warps /= 2;
    } else {
      config.atoms /= 2;
    }
    error = stream::launch(args, config, stream);
  }
  return error;
}

}  // namespace wonly
