// Convolution with packed weights on Hopper, as an implicit product of pixels with outputs. See conv.cuh.
#pragma once

#include "cuda/matmul.h"

namespace wonly {

// y[images, out_height, out_width, N] = act(sum over taps of x[images, height, width, K] @ W[tap] + bias). The pixel
// (i, j) of y meets at tap (r, s) the pixel (i, j) * stride + (r, s) * dilation - low of x; outside of it are zeros.
struct ConvArgs {
  MatmulArgs product;  // m: pixels of y; qw, scales and shift: of all taps, one after the other; no batch
  int images, height, width, out_height, out_width;
  int window_height, window_width, stride_height, stride_width, low_height, low_width, dilation_height, dilation_width;
};

namespace conv {

struct Config {
  int ctas;         // of a cluster, 128 outputs each: 1 or 2
  int tile_pixels;  // of a cluster: 64, 128 or 256
  int splits;       // clusters that share the inputs of a tile of the last, not whole, wave
};

constexpr int kMostSplits = 16;

// 16-bit x whose pixels and windows the tensor copy engine can fetch, on an architecture with it.
bool supports(const ConvArgs& args);

// Enqueues the convolution on `stream`; cudaErrorInvalidConfiguration where there is too little scratch for
// `config.splits`, or more tiles of the last wave than clusters for them.
cudaError_t launch(const ConvArgs& args, const Config& config, int multiprocessors, cudaStream_t stream);

cudaError_t launch_bf16(const ConvArgs& args, const Config& config, int multiprocessors, cudaStream_t stream);
cudaError_t launch_f16(const ConvArgs& args, const Config& config, int multiprocessors, cudaStream_t stream);

}  // namespace conv

// Enqueues the convolution in the configuration that is expected to be fastest.
cudaError_t launch_conv(const ConvArgs& args, cudaStream_t stream);

}  // namespace wonly
