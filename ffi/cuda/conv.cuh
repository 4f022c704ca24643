// The tiles of a convolution for tiled.cuh: pixels of the result, in their order in memory, by outputs. A stage is 64
// inputs of one tap. The tensor copy engine walks over the pixels that a tap meets, in the order of the result's, and
// writes zeros for those outside of an image, so that nothing is gathered in memory. How tiles are dealt out and shared
// is as in matmul_tiled.cuh.
#pragma once

#include "cuda/conv.h"
#include "cuda/matmul_tiled.cuh"

namespace wonly::conv {

using tiled::kOutputs;
using tiled::kStageK;
using tiled::kWarpgroups;
using tiled::Tile;

struct Windows : tiled::Waves {
  static constexpr bool kFloat32Scales = true;

  struct Params : tiled::Waves::Params {
    int ctas;
    int taps, tap_stages;
    int out_height, out_width;
    int window_width, stride_height, stride_width, low_height, low_width, dilation_height, dilation_width;
  };

  struct Walk {
    int tap, stage, of_tap;    // of_tap: stages
    int row, column, columns;  // of the window
    int image, y, x;           // where the window's first tap of this CTA's first pixel is
    __device__ void next() {
      if (++stage < of_tap) return;
      stage = 0;
      ++tap;
      if (++column == columns) {
        column = 0;
        ++row;
      }
    }
  };

  const Params& geometry;

  __device__ Windows(const Params& params, const MatmulArgs& args, uint8_t* shared)
      : Waves(params, args, shared, params.ctas), geometry(params) {}

  __device__ int ctas() const { return geometry.ctas; }
  __device__ int columns(const Tile&) const { return geometry.tokens; }

  __device__ int taps() const { return geometry.taps; }

  __device__ Walk walk(const Tile& tile, int rank) const {
    const Params& g = geometry;
    Walk walk{};
    walk.of_tap = g.tap_stages;
    walk.tap = tile.first_stage / g.tap_stages;
    walk.stage = tile.first_stage % g.tap_stages;
    walk.columns = g.window_width;
    walk.row = walk.tap / g.window_width;
    walk.column = walk.tap % g.window_width;
    const int pixel = tile.first + rank * (g.tokens / g.ctas);
    walk.image = pixel / (g.out_height * g.out_width);
    walk.y = pixel / g.out_width % g.out_height * g.stride_height - g.low_height;
    walk.x = pixel % g.out_width * g.stride_width - g.low_width;
    return walk;
  }

  __device__ void copy(uint8_t* to, const CUtensorMap* map, const Tile&, const Walk& walk, int, int rank,
                       uint64_t* barrier) const {
    const Params& g = geometry;
    ptx::tensor_copy_pixels_multicast(to + rank * (g.tokens / g.ctas) * kStageK * 2, map, walk.stage * kStageK, walk.x,
                                      walk.y, walk.image, static_cast<uint16_t>(walk.column * g.dilation_width),
                                      static_cast<uint16_t>(walk.row * g.dilation_height), barrier,
                                      static_cast<uint16_t>((1 << g.ctas) - 1));
  }
};

template <typename X>
cudaError_t launch_typed(const ConvArgs& conv, const Config& config, int multiprocessors, cudaStream_t stream) {
  const MatmulArgs& args = conv.product;
  CUtensorMap map;
  if (cudaError_t error = describe_pixels(conv, config.tile_pixels / config.ctas, &map); error != cudaSuccess) {
    return error;
  }
  tiled::Params<Windows> params{};
  params.args = args;
  params.log2_group_blocks = log2_group_blocks(args);
  Windows::Params& walk = params.source;
  walk.ctas = config.ctas;
  walk.tap_stages = static_cast<int>(ceil_div(args.k, kStageK));
  walk.out_height = conv.out_height;
  walk.out_width = conv.out_width;
  walk.window_width = conv.window_width;
  walk.stride_height = conv.stride_height;
  walk.stride_width = conv.stride_width;
  walk.low_height = conv.low_height;
  walk.low_width = conv.low_width;
  walk.dilation_height = conv.dilation_height;
  walk.dilation_width = conv.dilation_width;
  walk.tokens = config.tile_pixels;
  walk.taps = conv.window_height * conv.window_width;
  walk.stages = walk.tap_stages * walk.taps;
  walk.token_tiles = static_cast<int>(ceil_div(args.m, config.tile_pixels));
  walk.output_tiles = static_cast<int>(ceil_div(args.n, config.ctas * kOutputs));
  const int64_t tiles = static_cast<int64_t>(walk.token_tiles) * walk.output_tiles;
  const int clusters = multiprocessors / config.ctas;
  walk.waves = static_cast<int>(tiles / clusters);
  walk.rest = static_cast<int>(tiles % clusters);
  walk.splits = config.splits;
  const int64_t sums = static_cast<int64_t>(walk.rest) * (walk.splits - 1) * config.ctas * kWarpgroups *
                       (config.tile_pixels / 8 * 128) * static_cast<int64_t>(sizeof(float4));
  const int64_t counters = static_cast<int64_t>(walk.rest) * config.ctas * kWarpgroups * 4;
  if (walk.rest * walk.splits > clusters || walk.splits > walk.stages ||
      (walk.splits > 1 && (counters > tiled::kArrivedBytes || tiled::kArrivedBytes + sums > args.scratch_bytes))) {
    return cudaErrorInvalidConfiguration;
  }
  if (walk.splits > 1) {
    walk.arrived = static_cast<uint32_t*>(args.scratch);
    walk.partial = reinterpret_cast<float4*>(static_cast<uint8_t*>(args.scratch) + tiled::kArrivedBytes);
    if (cudaError_t error = cudaMemsetAsync(walk.arrived, 0, static_cast<size_t>(counters), stream);
        error != cudaSuccess) {
      return error;
    }
  }
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(config.ctas * (walk.waves > 0 ? clusters : walk.rest * walk.splits)));
  shape.threads = tiled::kThreads;
  shape.cluster = config.ctas;
  return tiled::with_shape<Windows, X>(args, [&](auto* s) {
    using S = std::remove_pointer_t<decltype(s)>;
    shape.shared_bytes = S::kSourceAt;
    return launch_kernel(tiled::tiled_matmul<S>, shape, stream, params, map);
  });
}

}  // namespace wonly::conv
