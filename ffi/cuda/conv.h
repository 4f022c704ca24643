// Convolution with packed weights on Hopper, as an implicit product of pixels with outputs. See conv.cuh, and
// conv_warpgroup.cuh where the clusters of conv.cuh would be few. Where 64 inputs or fewer meet many pixels,
// band_conv.cuh may be faster.
#pragma once

#include <initializer_list>

#include "cuda/matmul_tiled.h"
#include "cuda/matmul_warpgroup.h"

namespace wonly {

// y[images, height.result, width.result, N] = act(sum over taps of x[images, height.size, width.size, K] @ W[tap] +
// bias).
struct ConvArgs {
  MatmulArgs product;  // m: pixels of y; qw, scales and shift: of all taps, one after the other; no batch
  ConvGeometry geometry;
};

namespace conv {

// A phase of a transposed convolution as one with a spread that says how far its taps, and the pixels of its result,
// lie apart; others are one phase.
inline ConvGeometry phase_geometry(ConvGeometry geometry) {
  for (ConvAxis* axis : {&geometry.height, &geometry.width}) {
    axis->result /= axis->spread;
    axis->low = (axis->low - ((axis->low % axis->spread) + axis->spread) % axis->spread) / axis->spread;
  }
  return geometry;
}
inline int64_t phases(const ConvGeometry& g) { return int64_t{g.height.spread} * g.width.spread; }
// Taps of the phase that has the fewest.
inline int least_taps(const ConvGeometry& g) {
  return g.height.window / g.height.spread * (g.width.window / g.width.spread);
}

// 16-bit x whose pixels and windows the tensor copy engine can fetch, on an architecture with it.
bool supports(const ConvArgs& args);

// Enqueues the convolution on `stream`, tokens being pixels; cudaErrorInvalidConfiguration where there is too little
// scratch for `config.splits`, or more tiles of the last wave than clusters for them.
cudaError_t launch(const ConvArgs& args, const tiled::Config& config, cudaStream_t stream);

cudaError_t launch_bf16(const ConvArgs& args, const tiled::Config& config, cudaStream_t stream);
cudaError_t launch_f16(const ConvArgs& args, const tiled::Config& config, cudaStream_t stream);

// The same by the kernel of conv_warpgroup.cuh: no transposed convolutions, inputs and groups of them in multiples of
// 64, and what warpgroup::is_plain says, but for scales that may be float32. Its configurations are those of
// costs::kConvWarpgroup, clusters 1 .. 8.
bool supports_warpgroups(const ConvArgs& args);
cudaError_t launch(const ConvArgs& args, const warpgroup::Config& config, cudaStream_t stream);

cudaError_t launch_bf16(const ConvArgs& args, const warpgroup::Config& config, cudaStream_t stream);
cudaError_t launch_f16(const ConvArgs& args, const warpgroup::Config& config, cudaStream_t stream);

}  // namespace conv

// Enqueues the convolution in the configuration that is expected to be fastest.
cudaError_t launch_conv(const ConvArgs& args, cudaStream_t stream);

}  // namespace wonly
