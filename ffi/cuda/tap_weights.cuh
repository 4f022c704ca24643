// The weights of a convolution's taps, dequantized by the threads of a CTA. A thread keeps to one output, so that its
// addresses only move on from tap to tap, and asks about types once: its loads are then many at a time.
#pragma once

#include "cuda/element.cuh"
#include "cuda/matmul.h"
#include "layout.h"

namespace wonly {

// The bits of an element of 4, 2 or 1 bytes, or 0 for one of none: by predicates, where C++ would become branches,
// behind each of which the program waits for its load.
__device__ __forceinline__ uint32_t load_raw(const void* array, int64_t index, int bytes) {
  uint32_t raw = 0;
  const char* const from = static_cast<const char*>(array) + index * bytes;
  asm volatile(
      "{\n.reg .pred four, two, one;\n"
      "setp.eq.s32 four, %2, 4;\nsetp.eq.s32 two, %2, 2;\nsetp.eq.s32 one, %2, 1;\n"
      "@four ld.global.nc.u32 %0, [%1];\n@two ld.global.nc.u16 %0, [%1];\n@one ld.global.nc.u8 %0, [%1];\n}\n"
      : "+r"(raw)
      : "l"(from), "r"(bytes));
  return raw;
}

// A word of codes. `wanted` is true, which the compiler must not know: a load under no predicate would be moved to its
// use, behind the waiting for others.
__device__ __forceinline__ uint32_t load_codes(const uint32_t* from, bool wanted) {
  uint32_t word = 0;
  asm volatile("{\n.reg .pred wanted;\nsetp.ne.s32 wanted, %2, 0;\n@wanted ld.global.nc.u32 %0, [%1];\n}\n"
               : "+r"(word)
               : "l"(from), "r"(static_cast<int>(wanted)));
  return word;
}

__device__ __forceinline__ float raw_to_float(uint32_t raw, DType type) {
  const float half = __half2float(__ushort_as_half(static_cast<unsigned short>(raw)));
  const float wide = __uint_as_float(type == DType::kBF16 ? raw << 16 : raw);
  return type == DType::kF16 ? half : type == DType::kU8 ? static_cast<float>(raw) : wide;
}

// What codes of one output become. kTable: four-bit codes index a table.
template <bool kTable>
struct TapScheme {
  const MatmulArgs& args;
  int scale_bytes, shift_bytes;
  bool zeros;

  struct Raw {
    uint32_t scale, shift;
  };
  struct Parameters {
    float scale, from, plus;  // code -> (code - from) * scale + plus
    const float* table;
  };

  __device__ __forceinline__ explicit TapScheme(const MatmulArgs& args)
      : args(args),
        scale_bytes(element_size(args.scale_dtype)),
        shift_bytes(kTable || args.shift_mode == ShiftMode::kNone ? 0 : element_size(args.shift_dtype)),
        zeros(args.shift_mode == ShiftMode::kZeros) {}

  // Of a tap and group of inputs.
  __device__ __forceinline__ Raw load(int tap, int group, int n) const {
    const int64_t at = static_cast<int64_t>(group) * args.n + n;
    return {load_raw(args.scales, tap * args.scales_batch_stride + at, scale_bytes),
            load_raw(args.shift, tap * args.shift_batch_stride + at, shift_bytes)};
  }
  __device__ __forceinline__ Parameters parameters(const Raw& raw, int tap) const {
    Parameters found{raw_to_float(raw.scale, args.scale_dtype), 0.f, 0.f, nullptr};
    if constexpr (kTable) {
      found.table = static_cast<const float*>(args.shift) + tap * args.shift_batch_stride;
    } else {
      const float shift = raw_to_float(raw.shift, args.shift_dtype);
      found.from = shift_bytes == 0 ? static_cast<float>(bias_of(args.bits)) : zeros ? shift : 0.f;
      found.plus = zeros || shift_bytes == 0 ? -0.f : shift;  // which changes no sum
    }
    return found;
  }
  // Rounded after each step, as everywhere.
  __device__ __forceinline__ float weight(const Parameters& p, uint32_t code) const {
    if constexpr (kTable) return __fmul_rn(__ldg(p.table + code), p.scale);
    return __fadd_rn(__fmul_rn(__fsub_rn(static_cast<float>(code), p.from), p.scale), p.plus);
  }
};

// Calls `body` with the scheme of the arguments.
template <typename Body>
__device__ __forceinline__ void with_scheme(const MatmulArgs& args, Body&& body) {
  if (args.shift_mode == ShiftMode::kTable) {
    body(TapScheme<true>(args));
  } else {
    body(TapScheme<false>(args));
  }
}

// The word of a tap that holds the code of input k of output n, and where in it: those of the other taps are
// qw_batch_stride apart.
__device__ __forceinline__ const uint32_t* code_word(const MatmulArgs& args, int k, int n, int* shift) {
  const int step = tile_k(args.bits);
  const CodePosition at = code_position(args.bits, k % step, n % kTileN);
  const int tile = n / kTileN * ((static_cast<int>(args.k) + step - 1) / step) + k / step;
  *shift = at.shift;
  return args.qw + static_cast<int64_t>(tile) * kTileWords + at.word;
}

// The weights of output n for all taps, rounded to X, by four threads, of which this is `own`: it has, of every eight
// inputs, those of a lane of the packed format. place(k): where in `to` the first tap's weight of input k is, in 16
// bits; pairs of inputs lie together. Other taps are tap_words apart; kAtOnce of them are loaded together.
template <typename X, int kAtOnce, typename Place>
__device__ __forceinline__ void dequantize_taps(const MatmulArgs& args, int taps, int n, int own, int tap_words,
                                                uint32_t* to, Place&& place) {
  const int k = static_cast<int>(args.k);
  const int per_scale = k / static_cast<int>(args.groups);  // all inputs, or a multiple of 32
  const uint32_t mask = (1u << args.bits) - 1u;
  const bool four = args.bits == 4;
  with_scheme(args, [&](auto scheme) {
    using Scheme = decltype(scheme);
    if (k % 2 == 0) {
#pragma unroll 1
      for (int first = 2 * own; first < k; first += 32) {  // four pairs of inputs, eight apart
        int shift;
        const uint32_t* const words = code_word(args, first, n, &shift);  // with all pairs, or with the first two
        const int group = first / per_scale;
#pragma unroll 1
        for (int tap = 0; tap < taps; tap += kAtOnce) {
          uint32_t low[kAtOnce], high[kAtOnce];
          typename Scheme::Raw raw[kAtOnce];
          typename Scheme::Parameters parameters[kAtOnce];
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) {
            const int at = min(tap + j, taps - 1);
            low[j] = load_codes(words + at * args.qw_batch_stride, args.bits != 0);
            high[j] = load_codes(words + at * args.qw_batch_stride + 2, !four && first + 16 < k);
            raw[j] = scheme.load(at, group, n);
          }
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) parameters[j] = scheme.parameters(raw[j], min(tap + j, taps - 1));
          // Little code, which every CTA runs once: its instructions come from memory as the weights do.
#pragma unroll 1
          for (int pair = 0; pair < 4 && first + 8 * pair < k; ++pair) {
            const int by = four ? 4 * pair : 8 * (pair % 2);
            uint32_t* const at = to + place(first + 8 * pair) / 2;
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {  // the last tap again rather than a condition, which would part them
              const uint32_t word = (four || pair < 2 ? low[j] : high[j]) >> by;
              at[min(tap + j, taps - 1) * tap_words] = from_float2<X>(scheme.weight(parameters[j], word & mask),
                                                                      scheme.weight(parameters[j], word >> 16 & mask));
            }
          }
        }
      }
      return;
    }
    // Pairs are not those of the format: single weights, and no other thread has this output's.
    if (own > 0) return;
#pragma unroll 1
    for (int tap = 0; tap < taps; ++tap) {
#pragma unroll 1
      for (int input = 0; input < k; ++input) {
        int shift;
        const uint32_t code = __ldg(code_word(args, input, n, &shift) + tap * args.qw_batch_stride) >> shift & mask;
        const X w = from_float<X>(scheme.weight(scheme.parameters(scheme.load(tap, input / per_scale, n), tap), code));
        reinterpret_cast<X*>(to)[2 * tap * tap_words + place(input)] = w;
      }
    }
  });
}

}  // namespace wonly
