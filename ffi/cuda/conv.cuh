// The tiles of a convolution for tiled.cuh: pixels of the result, in their order in memory, by outputs. A stage is 64
// inputs of one tap. The tensor copy engine walks over the pixels that a tap meets, in the order of the result's, and
// writes zeros for those outside of an image, so that nothing is gathered in memory. How tiles are dealt out and shared
// is as in matmul_tiled.cuh.
//
// A transposed convolution, whose taps meet pixels of x at every spread-th place alone, is as many convolutions as
// there are places to begin at, its phases: each with every spread-th tap and for every spread-th pixel of the result.
// A tile is one of a phase.
#pragma once

#include "cuda/conv.h"
#include "cuda/division.h"
#include "cuda/matmul_tiled.cuh"

namespace wonly::conv {

using tiled::kStageK;

struct Windows : tiled::Waves<tiled::Heights::kWhole> {
  static constexpr bool kTables = false, kSkipsTaps = true;

  struct Params : tiled::WaveParams {
    int ctas;
    int taps, tap_stages;
    ConvGeometry geometry;  // of one phase, which is all of what is no transposed convolution
    int phase_tiles;        // of pixels, of a phase
    int first_y, first_x;   // see Phase
    Divisor width;          // of the result
  };

  // Of an axis of a transposed convolution: `tap`, and every spread-th one after it, are those that pixels `pixel`,
  // pixel + spread, ... of the result meet; those taps' pixels of x are `shift` further than those of phase 0.
  struct Phase {
    int tap, taps, pixel, shift;
    __device__ Phase(const ConvAxis& axis, int first, int tap)
        : tap(tap),
          taps((axis.window - tap + axis.spread - 1) / axis.spread),
          pixel(tap <= first ? first - tap : first - tap + axis.spread),
          shift(tap > first) {}
  };

  struct Walk {
    int tap, stage, of_tap;  // of_tap: stages
    int row, column;         // pixels of x from the window's first tap on
    int of_row, columns;     // taps of a row that are left, and all
    int step, row_step;      // to the next tap, and what the next row's is besides
    int dilation_y, dilation_x, shift;
    int image, y, x;  // where the window's first tap of this CTA's first pixel is
    __device__ void next() {
      if (++stage == of_tap) next_tap();
    }
    // Returns how much further in the weights it is.
    __device__ int next_tap() {
      const int before = tap;
      stage = 0;
      tap += step;
      column += dilation_x;
      if (--of_row == 0) {
        of_row = columns;
        tap += row_step;
        column = shift;
        row += dilation_y;
      }
      return tap - before;
    }
  };

  const Params& params;

  __device__ Windows(const Params& params, const MatmulArgs& args, uint8_t* shared)
      : Waves(params, args, shared, params.ctas), params(params) {}

  __device__ int ctas() const { return params.ctas; }
  __device__ int columns(const Tile&) const { return params.tokens; }

  __device__ int taps() const { return params.taps; }

  // Phases are one after the other in the rows of tiles, those of the first taps, which are most, at first.
  struct Tile : tiled::Tile {
    int phase, pixel;  // the first of this CTA's cluster, of the phase
    int stages, from;  // of a whole tile; where the phase's first pixel is in the result
  };
  __device__ Phase phase_y(int phase) const {
    return {params.geometry.height, params.first_y, phase / params.geometry.width.spread};
  }
  __device__ Phase phase_x(int phase) const {
    return {params.geometry.width, params.first_x, phase % params.geometry.width.spread};
  }

  __device__ Tile tile(int64_t wave) const {
    const ConvGeometry& g = params.geometry;
    Tile tile{Waves::tile(wave)};
    tile.phase = tile.first / (params.phase_tiles * params.tokens);
    tile.pixel = tile.first - tile.phase * params.phase_tiles * params.tokens;
    tile.rows = min(g.images * g.height.result * g.width.result - tile.pixel, params.tokens);
    const Phase of_y = phase_y(tile.phase), of_x = phase_x(tile.phase);
    tile.stages = of_y.taps * of_x.taps * params.tap_stages;
    tile.from = of_y.pixel * g.width.result * g.width.spread + of_x.pixel;
    const int splits = wave == params.waves ? params.splits : 1;
    tile.first_stage = tile.stages * tile.split / splits;
    tile.end_stage = tile.stages * (tile.split + 1) / splits;
    return tile;
  }

  template <int kSums>
  __device__ bool gather(const Tile& tile, const tiled::Consumer& me, float (&sums)[kSums]) const {
    return tile.end_stage - tile.first_stage == tile.stages || Waves::gather(tile, me, sums);
  }

  __device__ int64_t row(const Tile& tile, int i) const {
    const ConvGeometry& g = params.geometry;
    int column;
    const int row = params.width.divide(tile.pixel + i, &column);  // images have as many rows of every phase
    return tile.from + (row * g.height.spread * g.width.result + column) * g.width.spread;
  }

  __device__ Walk walk(const Tile& tile, int rank) const {
    const ConvAxis &height = params.geometry.height, &width = params.geometry.width;
    const int done = tile.first_stage / params.tap_stages;
    const Phase of_y = phase_y(tile.phase), of_x = phase_x(tile.phase);
    Walk walk{};
    walk.of_tap = params.tap_stages;
    walk.stage = tile.first_stage % params.tap_stages;
    walk.columns = of_x.taps;
    walk.of_row = of_x.taps - done % of_x.taps;
    walk.step = width.spread;
    walk.row_step = height.spread * width.window - of_x.taps * width.spread;
    walk.tap =
        (of_y.tap + done / of_x.taps * height.spread) * width.window + of_x.tap + done % of_x.taps * width.spread;
    walk.dilation_y = height.dilation;
    walk.dilation_x = width.dilation;
    walk.shift = of_x.shift;
    walk.row = of_y.shift + done / of_x.taps * height.dilation;
    walk.column = of_x.shift + done % of_x.taps * width.dilation;
    const int pixel = tile.pixel + rank * (params.tokens / params.ctas);
    walk.image = pixel / (height.result * width.result);
    walk.y = pixel / width.result % height.result * height.stride - height.low;
    walk.x = pixel % width.result * width.stride - width.low;
    return walk;
  }

  struct Copies {
    int at;  // bytes of a stage that other CTAs copy before this one's
    uint16_t ctas;
  };
  __device__ Copies copies(const Tile&, int, int rank) const {
    return {rank * (params.tokens / params.ctas) * kStageK * 2, static_cast<uint16_t>((1 << params.ctas) - 1)};
  }
  __device__ void copy(uint8_t* stage, const CUtensorMap* map, const Copies& copies, const Walk& walk, int,
                       uint64_t* barrier) const {
    ptx::tensor_copy_pixels_multicast(stage + copies.at, map, walk.stage * kStageK, walk.x, walk.y, walk.image,
                                      static_cast<uint16_t>(walk.column), static_cast<uint16_t>(walk.row), barrier,
                                      copies.ctas);
  }
};

template <typename X>
cudaError_t launch_typed(const ConvArgs& conv, const tiled::Config& config, cudaStream_t stream) {
  ConvArgs of_phase = conv;
  of_phase.geometry = phase_geometry(conv.geometry);
  const ConvGeometry& g = of_phase.geometry;
  CUtensorMap map;
  if (cudaError_t error = describe_pixels(of_phase, config.tokens / config.ctas, &map); error != cudaSuccess)
    return error;
  Windows::Params params{};
  params.ctas = config.ctas;
  params.geometry = g;
  params.taps = g.height.window * g.width.window;
  params.tap_stages = static_cast<int>(ceil_div(conv.product.k, kStageK));
  params.width = Divisor(g.width.result);
  params.first_y = conv.geometry.height.low - g.height.low * g.height.spread;
  params.first_x = conv.geometry.width.low - g.width.low * g.width.spread;
  params.phase_tiles = static_cast<int>(ceil_div(conv.product.m / phases(g), config.tokens));
  of_phase.product.m = params.phase_tiles * phases(g) * config.tokens;
  if (config.splits > least_taps(g) * params.tap_stages) return cudaErrorInvalidConfiguration;
  const auto most = [](const ConvAxis& axis) { return static_cast<int>(ceil_div(axis.window, axis.spread)); };
  const int stages = most(g.height) * most(g.width) * params.tap_stages;
  return tiled::launch_waves<Windows, X>(of_phase.product, config, stages, params, map, stream);
}

}  // namespace wonly::conv
