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

}  // namespace wonly
