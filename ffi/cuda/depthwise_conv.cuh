// Depthwise convolution: every output has one input of a tap, so there is nothing for tensor cores to share, and what
// counts is that an input is loaded and converted once for all taps that meet it.
//
// A CTA owns a block of outputs, whose weights it dequantizes into shared memory, and walks over strips: neighbouring
// columns of one or two rows of the result. A thread computes some outputs of a strip. It loads the columns of x that
// a row of the window meets, and adds their products to all columns and rows of the strip. Sums are float32, of weights
// that are not rounded, in the order of taps. With dilated taps the columns and rows of a strip lie so far apart that
// they still meet the same pixels of x.
#pragma once

#include <algorithm>
#include <limits>
#include <numeric>
#include <type_traits>

#include "cuda/direct_conv.h"
#include "cuda/division.h"
#include "cuda/epilogue.cuh"
#include "cuda/launch.h"
#include "cuda/tap_weights.cuh"

namespace wonly::depthwise {

constexpr int kThreads = 128;
constexpr int kAny = 4;  // taps of a row at a time in a window whose width is no multiple of 3, 5 or 7

struct Params {
  DirectConvArgs conv;
  int block;                   // outputs of a CTA
  int multiplier;              // outputs of an input
  int spacing_y, spacing_x;    // of the rows and columns of a strip
  int row_step;                // taps from where a row begins to where the next does
  Divisor strips_y, strips_x;  // of one plane
  Divisor planes;              // of an image of the result
  Divisor spacings_y, spacings_x;
  int strips;  // of all
};

template <int kBytes>
struct Piece;
template <>
struct Piece<2> {
  using type = uint16_t;
};
template <>
struct Piece<4> {
  using type = uint32_t;
};
template <>
struct Piece<8> {
  using type = uint2;
};
template <>
struct Piece<16> {
  using type = uint4;
};

// Neighbouring elements as floats.
template <typename X, int kVec>
__device__ __forceinline__ void unpack(const typename Piece<sizeof(X) * kVec>::type& piece, float (&to)[kVec]) {
  using P = typename Piece<sizeof(X) * kVec>::type;
  union {
    P piece;
    uint32_t words[(sizeof(P) + 3) / 4];
    X elements[kVec];
  } from;
  from.piece = piece;
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    if constexpr (std::is_same_v<X, __nv_bfloat16> && kVec > 1) {
      to[i] = __uint_as_float(i % 2 == 0 ? from.words[i / 2] << 16 : from.words[i / 2] & 0xffff0000u);
    } else {
      to[i] = to_float(from.elements[i]);
    }
  }
}

template <int kVec>
__device__ __forceinline__ void load_weights(const float* from, float (&to)[kVec]) {
  using P = typename Piece<4 * kVec>::type;
  unpack<float, kVec>(*reinterpret_cast<const P*>(from), to);
}

template <int kVec>
__device__ __forceinline__ void store_outputs(void* y, int64_t at, DType type, const float (&value)[kVec]) {
  if constexpr (kVec == 1) {
    store_element(y, at, value[0], type);
  } else {
    union {
      typename Piece<4 * kVec>::type wide;
      typename Piece<2 * kVec>::type narrow;
      float floats[kVec];
      uint32_t pairs[kVec];
    } out;
    if (type == DType::kF32) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) out.floats[i] = value[i];
      *reinterpret_cast<decltype(out.wide)*>(static_cast<float*>(y) + at) = out.wide;
      return;
    }
#pragma unroll
    for (int i = 0; i < kVec; i += 2) {
      out.pairs[i / 2] = type == DType::kF16 ? from_float2<__half>(value[i], value[i + 1])
                                             : from_float2<__nv_bfloat16>(value[i], value[i + 1]);
    }
    *reinterpret_cast<decltype(out.narrow)*>(static_cast<uint16_t*>(y) + at) = out.narrow;
  }
}

// Float weights [taps][block] of outputs n0 on.
__device__ __forceinline__ void dequantize_block(const MatmulArgs& args, int taps, int n0, int block, float* weights) {
  constexpr int kAtOnce = 8;
  const int first = threadIdx.x / block, own = threadIdx.x - first * block, each = kThreads / block;
  if (first >= each) return;
  const int n = min(n0 + own, static_cast<int>(args.n) - 1);
  const uint32_t mask = (1u << args.bits) - 1u;
  int shift;
  const uint32_t* const words = code_word(args, 0, n, &shift);  // input 0: the lowest bits
  with_scheme(args, [&](auto scheme) {
#pragma unroll 1
    for (int tap = first; tap < taps; tap += kAtOnce * each) {
      uint32_t codes[kAtOnce];
      typename decltype(scheme)::Raw raw[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int at = min(tap + j * each, taps - 1);
        codes[j] = load_codes(words + at * args.qw_batch_stride, args.bits != 0);
        raw[j] = scheme.load(at, 0, n);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int at = min(tap + j * each, taps - 1);  // no condition, which would put these behind each other
        weights[at * block + own] = scheme.weight(scheme.parameters(raw[j], at), codes[j] & mask);
      }
    }
  });
}

// kVec outputs of kRows rows of kColumns columns, kStride pixels of x apart; kTaps of a window's row at a time.
template <typename X, int kVec, int kRows, int kColumns, int kTaps, int kStride>
__global__ void __launch_bounds__(kThreads, kRows > 1 || kColumns * kVec * sizeof(X) > 32 ? 3 : 4)
    depthwise_conv(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) uint8_t shared[];
  using P = typename Piece<sizeof(X) * kVec>::type;
  constexpr int kMet = (kColumns - 1) * kStride + kTaps;  // columns of x that a row of taps meets
  constexpr bool kAhead = kRows == 1;                     // little arithmetic hides the loads
  float* const weights = reinterpret_cast<float*>(shared);
  const MatmulArgs& args = params.conv.product;
  const DirectConvGeometry& g = params.conv.geometry;
  const ConvAxis &depth = g.depth, &height = g.height, &width = g.width;
  const int n0 = blockIdx.y * params.block;
  const int lanes = params.block / kVec, slots = kThreads / lanes;
  const int slot = threadIdx.x / lanes, own = (threadIdx.x - slot * lanes) * kVec;
  const int n = n0 + own;
  const X* const x = static_cast<const X*>(args.x) + (kVec == 1 ? n / params.multiplier : n);
  const int rows = height.window + (kRows - 1) * params.row_step;  // of x, that a strip meets

  int strip = slot < slots && n < args.n ? blockIdx.x * slots + slot : params.strips;
  int of_plane, row, column, z0, y0, x0;
  int64_t planes;
  const auto place = [&] {
    int strip_x, strip_y, z, phase_x, phase_y;
    const int of_row = params.strips_x.divide(strip, &strip_x);
    of_plane = params.strips_y.divide(of_row, &strip_y);
    const int image = params.planes.divide(of_plane, &z);
    const int run_x = params.spacings_x.divide(strip_x, &phase_x), run_y = params.spacings_y.divide(strip_y, &phase_y);
    column = phase_x + run_x * params.spacing_x * kColumns;
    row = phase_y + run_y * params.spacing_y * kRows;
    z0 = z * depth.stride - depth.low;
    y0 = row * height.stride - height.low;
    x0 = column * width.stride - width.low;
    planes = static_cast<int64_t>(image) * depth.size;
  };

  // What a row of taps meets, from tap `c` on; false: it lies outside of x.
  const auto load = [&](P(&to)[kMet], int tap_z, int i, int c) {
    const int at_z = z0 + tap_z * depth.dilation, at_y = y0 + i * height.dilation;
    if (static_cast<unsigned>(at_z) >= static_cast<unsigned>(depth.size) ||
        static_cast<unsigned>(at_y) >= static_cast<unsigned>(height.size))
      return false;
    const X* const line = x + ((planes + at_z) * height.size + at_y) * width.size * g.groups;
    const int met = (kColumns - 1) * kStride + (kTaps == kAny ? min(kTaps, width.window - c) : kTaps);
#pragma unroll
    for (int j = 0; j < kMet; ++j) {
      const int at = x0 + (c + j) * width.dilation;
      to[j] = P{};
      if (static_cast<unsigned>(at) < static_cast<unsigned>(width.size) && j < met) {
        to[j] = __ldg(reinterpret_cast<const P*>(line + at * g.groups));
      }
    }
    return true;
  };

  P met[kMet];
  bool inside = false;
  if (strip < params.strips) {
    place();
    inside = load(met, 0, 0, 0);
  }
  dequantize_block(args, depth.window * height.window * width.window, n0, params.block, weights);
  __syncthreads();
  if (strip >= params.strips) return;
  float bias[kVec];
#pragma unroll
  for (int v = 0; v < kVec; ++v) bias[v] = args.has_bias ? load_element(args.bias, n + v, args.bias_dtype) : 0.f;

  while (true) {
    float acc[kRows][kColumns][kVec] = {};
    const auto add = [&](const P(&from)[kMet], int tap_z, int i, int c) {
      float inputs[kMet][kVec];
#pragma unroll
      for (int j = 0; j < kMet; ++j) unpack<X, kVec>(from[j], inputs[j]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int tap_y = i - r * params.row_step;
        if (tap_y < 0 || tap_y >= height.window) continue;
        const float* const of_taps =
            weights + ((tap_z * height.window + tap_y) * width.window + c) * params.block + own;
#pragma unroll
        for (int t = 0; t < kTaps; ++t) {
          if (kTaps == kAny && t >= width.window - c) break;
          float w[kVec];
          load_weights<kVec>(of_taps + t * params.block, w);
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
#pragma unroll
            for (int v = 0; v < kVec; ++v) acc[r][j][v] = fmaf(inputs[j * kStride + t][v], w[v], acc[r][j][v]);
          }
        }
      }
    };

    int tap_z = 0, i = 0, c = 0;
    const auto next = [&] {
      if ((c += kTaps) < width.window) return;
      c = 0;
      if (++i < rows) return;
      i = 0;
      ++tap_z;
    };
    if constexpr (kAhead) {
#pragma unroll 1
      while (tap_z < depth.window) {
        const int now_z = tap_z, now_i = i, now_c = c;
        next();
        P ahead[kMet];
        const bool inside_ahead = tap_z < depth.window && load(ahead, tap_z, i, c);
        if (inside) add(met, now_z, now_i, now_c);
        inside = inside_ahead;
#pragma unroll
        for (int j = 0; j < kMet; ++j) met[j] = ahead[j];
      }
    } else {
#pragma unroll 1
      while (true) {
        if (inside) add(met, tap_z, i, c);
        next();
        if (tap_z == depth.window) break;
        inside = load(met, tap_z, i, c);
      }
    }

#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) acc[r][j][v] += bias[v];
      }
    }
    if (args.activation != Activation::kNone) {
      // By way of local memory: one copy of the code instead of one for every sum.
      constexpr int kSums = kRows * kColumns * kVec;
      float sums[kSums];
#pragma unroll
      for (int j = 0; j < kSums; ++j) sums[j] = acc[j / (kColumns * kVec)][j / kVec % kColumns][j % kVec];
#pragma unroll 1
      for (int j = 0; j < kSums; ++j) sums[j] = apply(args.activation, sums[j]);
#pragma unroll
      for (int j = 0; j < kSums; ++j) acc[j / (kColumns * kVec)][j / kVec % kColumns][j % kVec] = sums[j];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int of_y = row + r * params.spacing_y;
      if (of_y >= height.result) break;
      const int64_t line = (static_cast<int64_t>(of_plane) * height.result + of_y) * width.result;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int of_x = column + j * params.spacing_x;
        if (of_x < width.result) store_outputs<kVec>(args.y, (line + of_x) * args.n + n, args.y_dtype, acc[r][j]);
      }
    }
    strip += gridDim.x * slots;
    if (strip >= params.strips) return;
    place();
    inside = load(met, 0, 0, 0);
  }
}

// Runs of `each` results of an axis, so far apart that taps meet the pixels of their neighbours.
inline int64_t runs(const ConvAxis& axis, int each, int* spacing, int* step) {
  const int common = std::gcd(axis.stride, axis.dilation);
  *spacing = axis.dilation / common;
  *step = axis.stride / common;
  return ceil_div(ceil_div(axis.result, *spacing), each) * *spacing;
}

template <typename X, int kVec, int kRows, int kColumns, int kTaps, int kStride>
cudaError_t launch_strips(const DirectConvArgs& conv, int block, int multiprocessors, cudaStream_t stream) {
  const DirectConvGeometry& g = conv.geometry;
  Params params{};
  params.conv = conv;
  params.block = block;
  params.multiplier = static_cast<int>(conv.product.n / g.groups);
  int step_x = 0;
  const int64_t strips_y = runs(g.height, kRows, &params.spacing_y, &params.row_step);
  const int64_t strips_x = runs(g.width, kColumns, &params.spacing_x, &step_x);
  const int64_t strips = int64_t{g.images} * g.depth.result * strips_y * strips_x;
  const int slots = kThreads / (block / kVec);
  const int64_t blocks = ceil_div(conv.product.n, block);
  if ((kColumns > 1 && step_x != kStride) || block % kVec != 0 || slots < 1 || blocks > 65535 ||
      strips > std::numeric_limits<int>::max() / 2)
    return cudaErrorInvalidConfiguration;
  params.strips_y = Divisor(static_cast<int>(strips_y));
  params.strips_x = Divisor(static_cast<int>(strips_x));
  params.planes = Divisor(g.depth.result);
  params.spacings_y = Divisor(params.spacing_y);
  params.spacings_x = Divisor(params.spacing_x);
  params.strips = static_cast<int>(strips);
  LaunchShape shape;
  shape.threads = kThreads;
  shape.shared_bytes = conv.taps() * block * static_cast<int>(sizeof(float));
  const auto kernel = depthwise_conv<X, kVec, kRows, kColumns, kTaps, kStride>;
  return launch_walking(kernel, shape, ceil_div(strips, slots), blocks, multiprocessors, stream, params);
}

template <typename X, int kVec, int kRows, int kColumns>
cudaError_t launch_window(const DirectConvArgs& conv, int block, int multiprocessors, cudaStream_t stream) {
  const ConvAxis& width = conv.geometry.width;
  const bool two = width.stride / std::gcd(width.stride, width.dilation) == 2;
  const auto with = [&](auto taps) {
    constexpr int kTaps = decltype(taps)::value;
    return two ? launch_strips<X, kVec, kRows, kColumns, kTaps, 2>(conv, block, multiprocessors, stream)
               : launch_strips<X, kVec, kRows, kColumns, kTaps, 1>(conv, block, multiprocessors, stream);
  };
  if constexpr (kVec > 1) {
    if (width.window % 7 == 0) return with(std::integral_constant<int, 7>{});
    if (width.window % 5 == 0) return with(std::integral_constant<int, 5>{});
    if (width.window % 3 == 0) return with(std::integral_constant<int, 3>{});
  }
  return with(std::integral_constant<int, kAny>{});
}

template <typename X>
cudaError_t launch_typed(const DirectConvArgs& conv, const Config& config, int multiprocessors, cudaStream_t stream) {
  const bool neighbours = conv.product.n == conv.geometry.groups;
  switch (config.strip) {
    case Strip::kLarge:
      if (neighbours && conv.product.n % 4 == 0) {
        return launch_window<X, 4, 2, 7>(conv, config.block, multiprocessors, stream);
      }
      break;
    case Strip::kMedium:
      if constexpr (sizeof(X) == 2) {
        if (neighbours && conv.product.n % 4 == 0) {
          return launch_window<X, 4, 1, 4>(conv, config.block, multiprocessors, stream);
        }
      }
      break;
    case Strip::kSmall:
      if (neighbours && conv.product.n % 2 == 0) {
        return launch_window<X, 2, 1, 4>(conv, config.block, multiprocessors, stream);
      }
      break;
    case Strip::kOdd:
      return launch_window<X, 1, 1, 4>(conv, config.block, multiprocessors, stream);
    case Strip::kPixel:
      return launch_strips<X, 1, 1, 1, kAny, 1>(conv, config.block, multiprocessors, stream);
  }
  return cudaErrorInvalidConfiguration;
}

}  // namespace wonly::depthwise
