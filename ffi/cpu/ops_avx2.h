// AVX2 with FMA: a 16-lane vector is two registers. Products of bytes by AVX-VNNI, if the compiler is told that it is
// there, or in 16 bits.
#pragma once

#include <immintrin.h>

#include "abi.h"
#include "cpu/word_order.h"

namespace wonly::cpu {
namespace {

struct Ops {
  struct F {
    __m256 low = _mm256_setzero_ps(), high = _mm256_setzero_ps();
  };
  struct I {
    __m256i low, high;
  };

  static constexpr int kDirectRows = 4;
  static constexpr int kSplitRows = 1;
  static constexpr int kMicroRows = 6;
  static constexpr int kMicroVectors = 1;

  static F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, F v) {
    _mm256_storeu_ps(p, v.low);
    _mm256_storeu_ps(p + 8, v.high);
  }
  static F set1(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
  static F add(F a, F b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
  static F sub(F a, F b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
  static F mul(F a, F b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
  static F fma(F a, F b, F c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }

  static F load_natural(const float* p) {
    const __m256 first = _mm256_loadu_ps(p), second = _mm256_loadu_ps(p + 8);
    const __m256 a = _mm256_unpacklo_ps(first, second), b = _mm256_unpackhi_ps(first, second);
    return {_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)};
  }
  static void store_natural(float* p, F v) {
    const __m256i even_odd = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    const __m256 a = _mm256_permutevar8x32_ps(v.low, even_odd), b = _mm256_permutevar8x32_ps(v.high, even_odd);
    _mm256_storeu_ps(p, _mm256_permute2f128_ps(a, b, 0x20));
    _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(a, b, 0x31));
  }

  // Lane i of row j to lane j of row i.
  static void transpose_lanes(F (&rows)[16]) {
    __m256 quarters[2][2][8];  // [half of the rows][half of the lanes]
    for (int i = 0; i < 16; ++i) {
      quarters[i / 8][0][i % 8] = rows[i].low;
      quarters[i / 8][1][i % 8] = rows[i].high;
    }
    for (auto& half : quarters) {
      for (auto& quarter : half) transpose_eight(quarter);
    }
    for (int i = 0; i < 16; ++i) rows[i] = {quarters[0][i / 8][i % 8], quarters[1][i / 8][i % 8]};
  }
  static void transpose_eight(__m256 (&rows)[8]) {
    __m256 fours[4][2];  // [column of a half][of rows 4i to 4i + 3]
    for (int i = 0; i < 2; ++i) {
      const __m256* const r = rows + 4 * i;
      const __m256 a = _mm256_unpacklo_ps(r[0], r[1]), b = _mm256_unpackhi_ps(r[0], r[1]);
      const __m256 c = _mm256_unpacklo_ps(r[2], r[3]), d = _mm256_unpackhi_ps(r[2], r[3]);
      fours[0][i] = _mm256_shuffle_ps(a, c, 0x44);
      fours[1][i] = _mm256_shuffle_ps(a, c, 0xee);
      fours[2][i] = _mm256_shuffle_ps(b, d, 0x44);
      fours[3][i] = _mm256_shuffle_ps(b, d, 0xee);
    }
    for (int j = 0; j < 4; ++j) {
      rows[j] = _mm256_permute2f128_ps(fours[j][0], fours[j][1], 0x20);
      rows[j + 4] = _mm256_permute2f128_ps(fours[j][0], fours[j][1], 0x31);
    }
  }

  static void prefetch_atom(const uint32_t* p) {
    for (int line = 0; line < 8; ++line) _mm_prefetch(reinterpret_cast<const char*>(p + 16 * line), _MM_HINT_T0);
  }
  // Four rows by four 64-bit columns.
  static void transpose(const uint32_t* p, __m256i (&out)[4]) {
    const auto row = [p](int i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16 * i)); };
    const __m256i a = _mm256_unpacklo_epi64(row(0), row(1)), b = _mm256_unpackhi_epi64(row(0), row(1));
    const __m256i c = _mm256_unpacklo_epi64(row(2), row(3)), d = _mm256_unpackhi_epi64(row(2), row(3));
    out[0] = _mm256_permute2x128_si256(a, c, 0x20);
    out[1] = _mm256_permute2x128_si256(b, d, 0x20);
    out[2] = _mm256_permute2x128_si256(a, c, 0x31);
    out[3] = _mm256_permute2x128_si256(b, d, 0x31);
  }
  static void load_atom(const uint32_t* p, I (&words)[8]) {
    for (int half = 0; half < 2; ++half) {
      __m256i low[4], high[4];
      transpose(p + 8 * half, low);
      transpose(p + 64 + 8 * half, high);
      for (int j = 0; j < 4; ++j) words[4 * half + j] = {low[j], high[j]};
    }
  }

  template <int kBits, bool kBiased>
  struct Decoder {
    template <int i>
    static __m256 convert(__m256i words) {
      __m256i code = i == 0 ? words : _mm256_srli_epi32(words, kBits * i);
      if (kBits * (i + 1) < 32) code = _mm256_and_si256(code, _mm256_set1_epi32((1 << kBits) - 1));
      if (kBiased) code = _mm256_sub_epi32(code, _mm256_set1_epi32(bias_of(kBits)));
      return _mm256_cvtepi32_ps(code);
    }
    template <int i>
    F get(I words) const {
      return {convert<i>(words.low), convert<i>(words.high)};
    }
  };

  // The value that each code stands for. A shuffle reads the low three bits of a lane: one looks up each half of the
  // table, and bit 3, moved to the sign, picks.
  struct TableDecoder {
    __m256 first, second;

    explicit TableDecoder(const float* table) : first(_mm256_loadu_ps(table)), second(_mm256_loadu_ps(table + 8)) {}
    template <int i>
    __m256 convert(__m256i words) const {
      const __m256i code = i == 0 ? words : _mm256_srli_epi32(words, 4 * i);
      const __m256i pick = i == 7 ? words : _mm256_slli_epi32(words, 28 - 4 * i);
      return _mm256_blendv_ps(_mm256_permutevar8x32_ps(first, code), _mm256_permutevar8x32_ps(second, code),
                              _mm256_castsi256_ps(pick));
    }
    template <int i>
    F get(I words) const {
      return {convert<i>(words.low), convert<i>(words.high)};
    }
  };

  static I load_words(const void* p) {
    const auto* words = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
  }
  static void store_words(void* p, I v) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), v.low);
    _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, v.high);
  }
  static I set1_words(int32_t v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
  static F abs(F v) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, v.low), _mm256_andnot_ps(sign, v.high)};
  }
  static F max(F a, F b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
  static float largest(F v) {
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, _mm256_max_ps(v.low, v.high));
    for (int i = 1; i < 8; ++i) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
    return lanes[0];
  }
  static float sum(F v) {
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, _mm256_add_ps(v.low, v.high));
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
  }
  // Lanes where x is not zero and scaled by `factor` stays below `bound`.
  static int count_nonzero_below(F x, F factor, float bound) {
    const F size = abs(mul(x, factor));
    const auto count = [bound](__m256 x, __m256 size) {
      const __m256 below = _mm256_cmp_ps(size, _mm256_set1_ps(bound), _CMP_LT_OQ);
      return __builtin_popcount(
          _mm256_movemask_ps(_mm256_and_ps(below, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_OQ))));
    };
    return count(x.low, size.low) + count(x.high, size.high);
  }
  static I nearest(F v) { return {_mm256_cvtps_epi32(v.low), _mm256_cvtps_epi32(v.high)}; }
  static F to_float(I v) { return {_mm256_cvtepi32_ps(v.low), _mm256_cvtepi32_ps(v.high)}; }
  // start - zeros * v of integers.
  static I minus_product(int32_t start, F zeros, int32_t v) {
    const auto half = [start, v](__m256 zeros) {
      const __m256i product = _mm256_mullo_epi32(_mm256_cvtps_epi32(zeros), _mm256_set1_epi32(v));
      return _mm256_sub_epi32(_mm256_set1_epi32(start), product);
    };
    return {half(zeros.low), half(zeros.high)};
  }

  template <int kBits>
  static constexpr int32_t kByteBias = 0;  // what byte_codes takes from codes
#if defined(__AVXVNNI__)
  static constexpr int kNarrowQuads = 0;  // products that sums of 16 bits hold; 0: sums have 32
  static constexpr int kPlaneRows = 2;
  static constexpr int64_t kMostPlaneRows = 8;  // for more, float32 is faster
  static I multiply_bytes(I sum, I codes, const uint32_t* x) {
    const __m256i digits = _mm256_set1_epi32(static_cast<int32_t>(*x));
    return {_mm256_dpbusd_avx_epi32(sum.low, codes.low, digits), _mm256_dpbusd_avx_epi32(sum.high, codes.high, digits)};
  }
#else
  // Eight products of four codes of four bits fit 16-bit sums, 8 * 2 * 15 * 128 < 2^15; those of eight bits do not.
  // With two rows float32 is as fast.
  static constexpr int kNarrowQuads = 8;
  static constexpr int kPlaneRows = 1;
  static constexpr int64_t kMostPlaneRows = 1;
  static I multiply_bytes(I sum, I codes, const uint32_t* x) {
    const __m256i digits = _mm256_set1_epi32(static_cast<int32_t>(*x));
    const __m256i low = _mm256_maddubs_epi16(codes.low, digits), high = _mm256_maddubs_epi16(codes.high, digits);
    // Instructions by name: GCC 12 adds all products up as a tree, and spills them.
    asm("vpaddw %1, %0, %0" : "+x"(sum.low) : "x"(low));
    asm("vpaddw %1, %0, %0" : "+x"(sum.high) : "x"(high));
    return sum;
  }
  static I add_narrow(I sum, I narrow) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(sum.low, _mm256_madd_epi16(narrow.low, ones)),
            _mm256_add_epi32(sum.high, _mm256_madd_epi16(narrow.high, ones))};
  }
#endif
  // Four codes of a word, one in each byte: those at even nibbles, then those at odd ones; or the word itself.
  template <int kBits>
  static I byte_codes(I word, int quad) {
    if (kBits == 8) return word;
    const auto half = [quad](__m256i word) {
      return _mm256_and_si256(quad == 0 ? word : _mm256_srli_epi32(word, 4), _mm256_set1_epi8(15));
    };
    return {half(word.low), half(word.high)};
  }
  // Puts the bytes of one tile's inputs in the order in which byte_codes meets them.
  template <int kBits>
  struct QuadOrder {
    void apply(const int8_t* in, uint32_t* out) const {
      auto* const bytes = reinterpret_cast<int8_t*>(out);
      for (int i = 0; i < Codes<kBits>::kTile; ++i) bytes[i] = in[Codes<kBits>::byte_input(i)];
    }
  };
};

}  // namespace
}  // namespace wonly::cpu
