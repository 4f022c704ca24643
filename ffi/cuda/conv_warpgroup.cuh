// Convolutions of few tiles by the kernel of matmul_warpgroup.cuh, as implicit products: tokens are pixels of the
// result in their order in memory, inputs those of all taps, one tap after the other. A stage of 128 inputs is two
// halves, each 64 inputs of one tap with scales of its own; the tensor copy engine walks over its pixels as in
// conv.cuh. CTAs of a cluster split the inputs and add their sums through each other's shared memory, which takes a
// fraction of the time that conv.cuh takes through memory.
#pragma once

#include <type_traits>

#include "cuda/conv.h"
#include "cuda/division.h"
#include "cuda/matmul_warpgroup.cuh"
#include "cuda/tensor_map.h"

namespace wonly::conv {

struct Pixels {
  static constexpr bool kWindows = true;
  static constexpr int kPieces = 1, kProducer = 0;
  static constexpr int producers(int) { return 4; }  // of each half one for activations and one for scales

  struct Params : warpgroup::Params {
    int halves;                        // of stages, of all taps
    int strip_words;                   // of a tap's weights of 64 outputs
    int64_t tap_words;                 // and of all
    Divisor tap_halves, group_halves;  // of a tap; that share their scales
    Divisor columns;                   // taps of a row
    Divisor image, width;              // pixels of a result, and of a row of it
    ConvGeometry geometry;
  };

  // What a producer warp copies for a stage of the tile at output n0 and pixel m0: of one half of it weights, and
  // activations or scales and zeros.
  template <typename S>
  struct Copies {
    static constexpr int kWeightBytes = S::kTiles / 2 * kTileBytes;

    const Params& params;
    const CUtensorMap* map;
    int pixels, of_stage, role, strips;  // the half; 0 for activations; row tiles of the weights
    int first, outputs, scale_size;
    const uint32_t* words;
    int image, y, x;  // where the first pixel's window begins

    __device__ Copies(const Params& params, const CUtensorMap* map, int pixels, int producer, int row_tiles, int n0,
                      int m0)
        : params(params),
          map(map),
          pixels(pixels),
          of_stage(producer % 2),
          role(producer / 2),
          strips((row_tiles + 1 - role) / 2),
          first(n0),
          outputs(min(S::kRows, static_cast<int>(params.args.n) - n0)),
          scale_size(element_size(params.args.scale_dtype)),
          words(params.args.qw + int64_t{n0 / kTileN + role} * params.strip_words) {
      const ConvGeometry& g = params.geometry;
      int of_image;
      image = params.image.divide(m0, &of_image);
      y = params.width.divide(of_image, &x) * g.height.stride - g.height.low;
      x = x * g.width.stride - g.width.low;
    }

    __device__ void copy(int stage, uint8_t* to, uint64_t* done) const {
      const MatmulArgs& args = params.args;
      // Beyond the last half there are zeros for activations, and any finite factors.
      const bool wanted = of_stage == 0 || 2 * stage + 1 < params.halves, zeros = args.shift_mode != ShiftMode::kNone;
      const int half = wanted ? 2 * stage + of_stage : params.halves - 1;
      int block, rest;
      const int tap = params.tap_halves.divide(half, &block);
      ptx::barrier_expect(done, (role == 0 ? pixels * 128 : outputs * (scale_size + (zeros ? 1 : 0))) +
                                    (wanted ? strips * kWeightBytes : 0));
      if (role == 0) {
        const ConvGeometry& g = params.geometry;
        int column;
        const int row = params.columns.divide(tap, &column), channel = wanted ? block * 64 : static_cast<int>(args.k);
        ptx::tensor_copy_pixels(to + of_stage * S::kHalfBytes, map, channel, x, y, image,
                                static_cast<uint16_t>(column * g.width.dilation),
                                static_cast<uint16_t>(row * g.height.dilation), done);
      } else {
        const int64_t from = int64_t{params.group_halves.divide(half, &rest)} * args.n + first;
        ptx::bulk_copy(to + S::kScalesAt + of_stage * S::kRows * scale_size,
                       static_cast<const uint8_t*>(args.scales) + from * scale_size, outputs * scale_size, done);
        if (zeros) {
          ptx::bulk_copy(to + S::kShiftsAt + of_stage * S::kRows, static_cast<const uint8_t*>(args.shift) + from,
                         outputs, done);
        }
      }
      if (!wanted) return;
      const uint32_t* from = words + tap * params.tap_words + block * (kWeightBytes / 4);
#pragma unroll
      for (int strip = 0; strip < (S::kWarpgroups + 1) / 2; ++strip) {
        if (strip < strips) {
          ptx::bulk_copy(to + S::kWeightsAt + (2 * (2 * strip + role) + of_stage) * kWeightBytes,
                         from + int64_t{2 * strip} * params.strip_words, kWeightBytes, done);
        }
      }
    }
  };
};

template <typename X, int kBits>
cudaError_t launch_bits(const ConvArgs& conv, const warpgroup::Config& config, cudaStream_t stream) {
  const MatmulArgs& args = conv.product;
  const ConvGeometry& g = conv.geometry;
  const int tap_halves = static_cast<int>(args.k / 64);
  Pixels::Params params{};
  params.args = args;
  params.halves = g.height.window * g.width.window * tap_halves;
  params.strip_words = tap_halves * (64 / tile_k(kBits)) * kTileWords;
  params.tap_words = ceil_div(args.n, kTileN) * params.strip_words;
  params.tap_halves = Divisor(tap_halves);
  params.group_halves = Divisor(tap_halves / static_cast<int>(args.groups));
  params.columns = Divisor(g.width.window);
  params.image = Divisor(g.height.result * g.width.result);
  params.width = Divisor(g.width.result);
  params.geometry = g;
  warpgroup::Maps maps;
  const cudaError_t error =
      describe_blocks(args.m, config.tokens, &maps.x, &maps.last,
                      [&](int pixels, CUtensorMap* map) { return describe_pixels(conv, pixels, map); });
  if (error != cudaSuccess) return error;
  const auto launch = [&](auto warpgroups, auto pixels) {
    // Of few pixels converting codes takes longer than scaling sums.
    const auto launch_kind = [&](auto kind) {
      using S = warpgroup::Shape<Pixels, X, kBits, pixels.value, warpgroups.value, 2, kind.value>;
      return warpgroup::launch_stages(warpgroup::kKernel<S>, params, maps, (params.halves + 1) / 2, config, stream);
    };
    using warpgroup::Kind;
    if constexpr (pixels.value < 64) {
      return launch_kind(std::integral_constant<Kind, Kind::kPlain>{});
    } else if (args.shift_mode == ShiftMode::kNone) {
      return launch_kind(std::integral_constant<Kind, Kind::kRounded>{});
    } else {
      return launch_kind(std::integral_constant<Kind, Kind::kRoundedAndZeros>{});
    }
  };
  using std::integral_constant;
  constexpr integral_constant<int, 1> one;
  constexpr integral_constant<int, 2> two;
  constexpr integral_constant<int, 96> p96;
  if (config.warpgroups == 1) {
    if (config.tokens == 32) return launch(one, integral_constant<int, 32>{});
    if (config.tokens == 64) return launch(one, integral_constant<int, 64>{});
    if (config.tokens == 96) return launch(one, p96);
  }
  if (config.warpgroups == 2) {
    if (config.tokens == 96) return launch(two, p96);
    if (config.tokens == 112) return launch(two, integral_constant<int, 112>{});
    if (config.tokens == 128) return launch(two, integral_constant<int, 128>{});
    if (config.tokens == 160) return launch(two, integral_constant<int, 160>{});
  }
  return cudaErrorInvalidConfiguration;
}

template <typename X>
cudaError_t launch_warpgroups(const ConvArgs& args, const warpgroup::Config& config, cudaStream_t stream) {
  return args.product.bits == 4 ? launch_bits<X, 4>(args, config, stream) : launch_bits<X, 8>(args, config, stream);
}

}  // namespace wonly::conv
