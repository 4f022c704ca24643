// The tiles of a convolution for tiled.cuh: pixels of the result, in their order in memory, by outputs. A stage is 64
// inputs of one tap. The tensor copy engine walks over the pixels that a tap meets, in the order of the result's, and
// writes zeros for those outside of an image, so that nothing is gathered in memory. How tiles are dealt out and shared
// is as in matmul_tiled.cuh.
#pragma once

#include "cuda/conv.h"
#include "cuda/matmul_tiled.cuh"

namespace wonly::conv {

using tiled::kStageK;
using tiled::Tile;

struct Windows : tiled::Waves {
  static constexpr bool kFloat32Scales = true, kTables = false, kBetween = false;

  struct Params : tiled::Waves::Params {
    int ctas;
    int taps, tap_stages;
    ConvGeometry geometry;
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

  const Params& params;

  __device__ Windows(const Params& params, const MatmulArgs& args, uint8_t* shared)
      : Waves(params, args, shared, params.ctas), params(params) {}

  __device__ int ctas() const { return params.ctas; }
  __device__ int columns(const Tile&) const { return params.tokens; }

  __device__ int taps() const { return params.taps; }

  __device__ Walk walk(const Tile& tile, int rank) const {
    const ConvAxis &height = params.geometry.height, &width = params.geometry.width;
    Walk walk{};
    walk.of_tap = params.tap_stages;
    walk.tap = tile.first_stage / params.tap_stages;
    walk.stage = tile.first_stage % params.tap_stages;
    walk.columns = width.window;
    walk.row = walk.tap / width.window;
    walk.column = walk.tap % width.window;
    const int pixel = tile.first + rank * (params.tokens / params.ctas);
    walk.image = pixel / (height.result * width.result);
    walk.y = pixel / width.result % height.result * height.stride - height.low;
    walk.x = pixel % width.result * width.stride - width.low;
    return walk;
  }

  __device__ void copy(uint8_t* to, const CUtensorMap* map, const Tile&, const Walk& walk, int, int rank,
                       uint64_t* barrier) const {
    const ConvGeometry& g = params.geometry;
    ptx::tensor_copy_pixels_multicast(
        to + rank * (params.tokens / params.ctas) * kStageK * 2, map, walk.stage * kStageK, walk.x, walk.y, walk.image,
        static_cast<uint16_t>(walk.column * g.width.dilation), static_cast<uint16_t>(walk.row * g.height.dilation),
        barrier, static_cast<uint16_t>((1 << params.ctas) - 1));
  }
};

template <typename X>
cudaError_t launch_typed(const ConvArgs& conv, const tiled::Config& config, cudaStream_t stream) {
  CUtensorMap map;
  if (cudaError_t error = describe_pixels(conv, config.tokens / config.ctas, &map); error != cudaSuccess) return error;
  Windows::Params params{};
  params.ctas = config.ctas;
  params.geometry = conv.geometry;
  params.taps = conv.geometry.height.window * conv.geometry.width.window;
  params.tap_stages = static_cast<int>(ceil_div(conv.product.k, kStageK));
  return tiled::launch_waves<Windows, X>(conv.product, config, params.taps * params.tap_stages, params, map, stream);
}

}  // namespace wonly::conv
