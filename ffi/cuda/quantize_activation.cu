// Activations to int8 or e4m3 codes: read once, kept in registers while the extremes of their row or group are found.
//
// A thread has pieces of 16 inputs: two or four vectors in, one vector of codes out, in the order of packed weights. A
// group is 2 to 16 neighbouring lanes; a row is a CTA. Codes are what jax_wonly/primitives/activations.py defines, to
// the bit.
#include <cuda_fp8.h>

#include "cuda/element.cuh"
#include "cuda/quantize_activation.h"
#include "layout.h"

namespace wonly {
namespace {

constexpr int kPiece = 16;  // inputs
constexpr int kMostThreads = 512;
constexpr int kGroupThreads = 256;
constexpr float kSmallest = 0x1p-100f;  // a span below counts as none: its reciprocal would overflow

template <typename X>
struct Piece {
  static constexpr int kVectors = sizeof(X);
  static constexpr int kPerVector = 16 / sizeof(X);
  uint4 vectors[kVectors];

  // Of a row that has `left` elements from here on; zeros beyond.
  __device__ __forceinline__ void load(const X* from, int64_t left, bool aligned) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      vectors[i] = aligned && left >= kPiece ? __ldg(reinterpret_cast<const uint4*>(from) + i)
                                             : load_some(from + i * kPerVector, left - i * kPerVector);
    }
  }
  __device__ __forceinline__ float get(int i) const { return to_float(reinterpret_cast<const X*>(vectors)[i]); }
};

// Floats as integers of the same order, so that NaNs are extremes too.
__device__ __forceinline__ int ordered(float value) {
  const int bits = __float_as_int(value);
  return bits ^ (bits >> 31 & 0x7fffffff);
}
__device__ __forceinline__ float from_ordered(int bits) { return __int_as_float(bits ^ (bits >> 31 & 0x7fffffff)); }

// The largest magnitude, or the extremes, of what was seen.
template <bool kSymmetric>
struct Range {
  int high = kSymmetric ? 0 : INT32_MIN, low = INT32_MAX;

  __device__ __forceinline__ void see(float value) {
    if constexpr (kSymmetric) {
      high = max(high, __float_as_int(value) & 0x7fffffff);
    } else {
      high = max(high, ordered(value));
      low = min(low, ordered(value));
    }
  }
  template <typename X>
  __device__ __forceinline__ void see(const Piece<X>& piece, int64_t left) {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      if (kSymmetric || i < left) see(piece.get(i));  // zeros are no larger magnitudes
    }
  }
  __device__ __forceinline__ void merge(int other_high, int other_low) {
    high = max(high, other_high);
    if constexpr (!kSymmetric) low = min(low, other_low);
  }
  __device__ __forceinline__ void merge_lane(int distance) {
    merge(__shfl_xor_sync(0xffffffffu, high, distance), kSymmetric ? 0 : __shfl_xor_sync(0xffffffffu, low, distance));
  }
};

template <typename X_, bool kFloat8_, bool kSymmetric_>
struct Scheme {
  using X = X_;
  static constexpr bool kFloat8 = kFloat8_;
  static constexpr bool kSymmetric = kSymmetric_;
  static constexpr float kSteps = kFloat8 ? 448.f : kSymmetric ? 127.f : 255.f;
  using Sum = std::conditional_t<kFloat8, float, int>;
};

template <typename S>
struct Scale {
  float scale, inverse, offset;

  __device__ __forceinline__ explicit Scale(const Range<S::kSymmetric>& range) {
    const float low = S::kSymmetric ? 0.f : from_ordered(range.low);
    const float span = S::kSymmetric ? __int_as_float(range.high) : __fsub_rn(from_ordered(range.high), low);
    const bool none = span < kSmallest;
    scale = none ? 0.f : __fmul_rn(span, 1.f / S::kSteps);
    inverse = none ? 0.f : __fdiv_rn(S::kSteps, span);
    offset = S::kSymmetric ? 0.f : __fadd_rn(low, __fmul_rn(128.f, scale));
  }

  // A piece's codes, zeros after `left` of them; adds them to `sum`.
  template <typename X>
  __device__ __forceinline__ uint4 codes(const Piece<X>& piece, int64_t left, typename S::Sum& sum) const {
    uint32_t words[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      float q[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 2 * t + j / 2 + j % 2 * 8;  // the input whose code byte j of lane t's packed word is
        const float value = piece.get(i);
        q[j] = __fmul_rn(S::kSymmetric ? value : __fsub_rn(value, offset), inverse);
        if (!S::kSymmetric) q[j] = fminf(fmaxf(q[j], -128.f), 127.f);
        if (!S::kSymmetric && i >= left) q[j] = 0.f;
      }
      if constexpr (S::kFloat8) {
        const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(q[0], q[1]), __NV_SATFINITE, __NV_E4M3);
        const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(q[2], q[3]), __NV_SATFINITE, __NV_E4M3);
        words[t] = low | high << 16;
        const float2 two = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(low, __NV_E4M3)));
        const float2 more = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(high, __NV_E4M3)));
        sum += two.x + two.y + (more.x + more.y);
      } else {
        // Adding 1.5 * 2^23 rounds to an integer, ties to even, whose low byte is that of the sum's bits.
        uint32_t bits[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) bits[j] = __float_as_uint(__fadd_rn(q[j], 0x1.8p+23f));
        words[t] = __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
        sum = __dp4a(static_cast<int>(words[t]), 0x01010101, sum);
      }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

// Groups of 2 << kLog2 pieces, in neighbouring lanes.
template <typename S, int kLanes>
__global__ void __launch_bounds__(kGroupThreads) quantize_groups(QuantizeActivationArgs args, bool aligned) {
  using X = typename S::X;
  const int64_t pieces = args.m * args.k / kPiece;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kGroupThreads + threadIdx.x;
  const bool inside = index < pieces;
  Piece<X> piece;
  piece.load(static_cast<const X*>(args.x) + (inside ? index : 0) * kPiece, kPiece, aligned);
  Range<S::kSymmetric> range;
  range.see(piece, kPiece);
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) range.merge_lane(distance);
  const Scale<S> scale(range);
  typename S::Sum sum{};
  const uint4 codes = scale.codes(piece, kPiece, sum);
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (!inside) return;
  static_cast<uint4*>(args.codes)[index] = codes;
  if (threadIdx.x % kLanes == 0) {
    const int64_t group = index / kLanes;
    args.scales[group] = scale.scale;
    static_cast<typename S::Sum*>(args.sums)[group] = sum;
    if (!S::kSymmetric) args.offsets[group] = scale.offset;
  }
}

// A row: kPieces pieces of each thread stay in registers; 0: as many as there are, read twice.
template <typename S, int kPieces>
__global__ void __launch_bounds__(kMostThreads) quantize_rows(QuantizeActivationArgs args, bool aligned) {
  using X = typename S::X;
  __shared__ int highs[kMostThreads / 32], lows[kMostThreads / 32];
  __shared__ typename S::Sum partial[kMostThreads / 32];
  const int threads = static_cast<int>(blockDim.x), warp = threadIdx.x / 32, warps = threads / 32;
  const int64_t row = blockIdx.x;
  const int pieces = static_cast<int>(ceil_div(args.k, kPiece));
  const X* const from = static_cast<const X*>(args.x) + row * args.k;
  uint4* const to = static_cast<uint4*>(args.codes) + row * pieces;
  const auto load = [&](Piece<X>& piece, int at) {
    const int64_t begin = static_cast<int64_t>(at) * kPiece;
    piece.load(from + begin, args.k - begin, aligned);
  };
  const auto left_of = [&](int at) { return args.k - static_cast<int64_t>(at) * kPiece; };

  Piece<X> kept[kPieces == 0 ? 1 : kPieces];
  Range<S::kSymmetric> range;
  if constexpr (kPieces == 0) {
    for (int at = threadIdx.x; at < pieces; at += threads) {
      load(kept[0], at);
      range.see(kept[0], left_of(at));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (const int at = threadIdx.x + i * threads; at < pieces) load(kept[i], at);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (const int at = threadIdx.x + i * threads; at < pieces) range.see(kept[i], left_of(at));
    }
  }
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) range.merge_lane(distance);
  if (threadIdx.x % 32 == 0) {
    highs[warp] = range.high;
    lows[warp] = range.low;
  }
  __syncthreads();
  for (int i = 0; i < warps; ++i) range.merge(highs[i], lows[i]);

  const Scale<S> scale(range);
  typename S::Sum sum{};
  if constexpr (kPieces == 0) {
    for (int at = threadIdx.x; at < pieces; at += threads) {
      load(kept[0], at);
      to[at] = scale.codes(kept[0], left_of(at), sum);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (const int at = threadIdx.x + i * threads; at < pieces) to[at] = scale.codes(kept[i], left_of(at), sum);
    }
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (threadIdx.x % 32 == 0) partial[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < warps; ++i) sum += partial[i];
    args.scales[row] = scale.scale;
    static_cast<typename S::Sum*>(args.sums)[row] = sum;
    if (!S::kSymmetric) args.offsets[row] = scale.offset;
  }
}

template <typename S>
cudaError_t launch_scheme(const QuantizeActivationArgs& args, cudaStream_t stream) {
  const bool aligned = args.k * static_cast<int64_t>(sizeof(typename S::X)) % 16 == 0;
  if (args.groups > 1) {
    const auto grid = static_cast<unsigned>(ceil_div(args.m * args.k / kPiece, kGroupThreads));
    const auto launch = [&](auto lanes) {
      quantize_groups<S, lanes.value><<<grid, kGroupThreads, 0, stream>>>(args, aligned);
      return cudaGetLastError();
    };
    switch (args.k / args.groups) {
      case 32:
        return launch(std::integral_constant<int, 2>{});
      case 64:
        return launch(std::integral_constant<int, 4>{});
      case 128:
        return launch(std::integral_constant<int, 8>{});
      default:
        return launch(std::integral_constant<int, 16>{});
    }
  }
  const int64_t pieces = ceil_div(args.k, kPiece);
  const auto launch = [&](auto kept) {
    const int64_t threads = kept.value == 0 ? kMostThreads : ceil_div(ceil_div(pieces, kept.value), 32) * 32;
    quantize_rows<S, kept.value>
        <<<static_cast<unsigned>(args.m), static_cast<unsigned>(threads), 0, stream>>>(args, aligned);
    return cudaGetLastError();
  };
  if (pieces <= kMostThreads) return launch(std::integral_constant<int, 1>{});
  if (pieces <= 2 * kMostThreads) return launch(std::integral_constant<int, 2>{});
  if (pieces <= 4 * kMostThreads) return launch(std::integral_constant<int, 4>{});
  return launch(std::integral_constant<int, 0>{});
}

}  // namespace

cudaError_t launch_quantize_activation(const QuantizeActivationArgs& args, cudaStream_t stream) {
  return dispatch_float(args.x_dtype, [&](auto* type) {
    using X = std::remove_pointer_t<decltype(type)>;
    if (args.float8) return launch_scheme<Scheme<X, true, true>>(args, stream);
    return args.offsets == nullptr ? launch_scheme<Scheme<X, false, true>>(args, stream)
                                   : launch_scheme<Scheme<X, false, false>>(args, stream);
  });
}

}  // namespace wonly
