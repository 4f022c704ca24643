// The 16-lane vector of AVX-512; with what the compiler is told that there is, products of bytes and of bfloat16 pairs.
#pragma once

#include <immintrin.h>

#include "abi.h"
#include "cpu/word_order.h"

namespace wonly::cpu {
namespace {

struct Ops {
  using F = __m512;
  using I = __m512i;

  static constexpr int kDirectRows = 16;
  static constexpr int kSplitRows = 4;
  static constexpr int kMicroRows = 6;
  static constexpr int kMicroVectors = 4;

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static F set1(float v) { return _mm512_set1_ps(v); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

  static F load_natural(const float* p) {
    const I order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    return _mm512_permutexvar_ps(order, load(p));
  }
  static void store_natural(float* p, F v) {
    const I order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    store(p, _mm512_permutexvar_ps(order, v));
  }

  // Lane i of row j to lane j of row i: 32 bits, 64, and then quarters of vectors.
  static void transpose_lanes(F (&rows)[16]) {
    const auto low = [](F a, F b) { return _mm512_unpacklo_ps(a, b); };
    const auto high = [](F a, F b) { return _mm512_unpackhi_ps(a, b); };
    const auto low_pairs = [](F a, F b) {
      return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    };
    const auto high_pairs = [](F a, F b) {
      return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    };
    F fours[4][4];  // [column of a quarter][of rows 4i to 4i + 3]
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const F* const r = rows + 4 * i;
      const F a = low(r[0], r[1]), b = high(r[0], r[1]), c = low(r[2], r[3]), d = high(r[2], r[3]);
      fours[0][i] = low_pairs(a, c);
      fours[1][i] = high_pairs(a, c);
      fours[2][i] = low_pairs(b, d);
      fours[3][i] = high_pairs(b, d);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const F(&f)[4] = fours[j];
      const F even = _mm512_shuffle_f32x4(f[0], f[1], 0x88), odd = _mm512_shuffle_f32x4(f[0], f[1], 0xdd);
      const F even_below = _mm512_shuffle_f32x4(f[2], f[3], 0x88), odd_below = _mm512_shuffle_f32x4(f[2], f[3], 0xdd);
      rows[j] = _mm512_shuffle_f32x4(even, even_below, 0x88);
      rows[j + 4] = _mm512_shuffle_f32x4(odd, odd_below, 0x88);
      rows[j + 8] = _mm512_shuffle_f32x4(even, even_below, 0xdd);
      rows[j + 12] = _mm512_shuffle_f32x4(odd, odd_below, 0xdd);
    }
  }

  static void prefetch_atom(const uint32_t* p) {
#pragma GCC unroll 8
    for (int line = 0; line < 8; ++line) _mm_prefetch(reinterpret_cast<const char*>(p + 16 * line), _MM_HINT_T0);
  }
  // An 8 x 8 transpose of 64-bit elements: rows i and i + 4 are put side by side by the loads.
  static void load_atom(const uint32_t* p, I (&words)[8]) {
    const I pick_low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    const I pick_high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const auto rows = [p, half](int i) {
        const uint32_t* row = p + 16 * i + 8 * half;
        return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row))),
                                  _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 64)), 1);
      };
      const I r0 = rows(0), r1 = rows(1), r2 = rows(2), r3 = rows(3);
      const I a = _mm512_unpacklo_epi64(r0, r1), b = _mm512_unpackhi_epi64(r0, r1);
      const I c = _mm512_unpacklo_epi64(r2, r3), d = _mm512_unpackhi_epi64(r2, r3);
      words[4 * half + 0] = _mm512_permutex2var_epi64(a, pick_low, c);
      words[4 * half + 1] = _mm512_permutex2var_epi64(b, pick_low, d);
      words[4 * half + 2] = _mm512_permutex2var_epi64(a, pick_high, c);
      words[4 * half + 3] = _mm512_permutex2var_epi64(b, pick_high, d);
    }
  }

  template <int kBits, bool kBiased>
  struct Decoder;

  // A table look-up reads the low four bits of each lane: no mask, no conversion, and the bias is in the table.
  template <bool kBiased>
  struct Decoder<4, kBiased> {
    static constexpr float b = kBiased ? 8.0f : 0.0f;
    F table = _mm512_setr_ps(0 - b, 1 - b, 2 - b, 3 - b, 4 - b, 5 - b, 6 - b, 7 - b, 8 - b, 9 - b, 10 - b, 11 - b,
                             12 - b, 13 - b, 14 - b, 15 - b);
    template <int i>
    F get(I words) const {
      return _mm512_permutexvar_ps(i == 0 ? words : _mm512_srli_epi32(words, 4 * i), table);
    }
  };

  template <bool kBiased>
  struct Decoder<8, kBiased> {
    template <int i>
    F get(I words) const {
      I code = i == 0 ? words : _mm512_srli_epi32(words, 8 * i);
      if (i < 3) code = _mm512_and_si512(code, _mm512_set1_epi32(255));
      const F value = _mm512_cvtepi32_ps(code);
      return kBiased ? sub(value, set1(128.0f)) : value;
    }
  };

  // The value that each code stands for: the same look-up in another table.
  struct TableDecoder {
    F table;

    explicit TableDecoder(const float* table) : table(load(table)) {}
    template <int i>
    F get(I words) const {
      return _mm512_permutexvar_ps(i == 0 ? words : _mm512_srli_epi32(words, 4 * i), table);
    }
  };

  static I load_words(const void* p) { return _mm512_loadu_si512(p); }
  static void store_words(void* p, I v) { _mm512_storeu_si512(p, v); }

#if defined(__AVX512VNNI__)
  static constexpr int kNarrowQuads = 0;  // products that sums of 16 bits hold; 0: sums have 32
  static constexpr int kPlaneRows = 8;
  static constexpr int64_t kMostPlaneRows = INT64_MAX;  // for more, float32 is faster
  template <int kBits>
  static constexpr int32_t kByteBias = 0;  // what byte_codes takes from codes

  static I set1_words(int32_t v) { return _mm512_set1_epi32(v); }
  static F abs(F v) { return _mm512_abs_ps(v); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static float largest(F v) { return _mm512_reduce_max_ps(v); }
  static float sum(F v) { return _mm512_reduce_add_ps(v); }
  // Lanes where x is not zero and scaled by `factor` stays below `bound`.
  static int count_nonzero_below(F x, F factor, float bound) {
    const __mmask16 below = _mm512_cmp_ps_mask(abs(mul(x, factor)), set1(bound), _CMP_LT_OQ);
    return __builtin_popcount(_mm512_mask_cmp_ps_mask(below, x, set1(0.0f), _CMP_NEQ_OQ));
  }
  static I nearest(F v) { return _mm512_cvtps_epi32(v); }
  static F to_float(I v) { return _mm512_cvtepi32_ps(v); }
  // start - zeros * v of integers.
  static I minus_product(int32_t start, F zeros, int32_t v) {
    const I product = _mm512_mullo_epi32(_mm512_cvtps_epi32(zeros), _mm512_set1_epi32(v));
    return _mm512_sub_epi32(_mm512_set1_epi32(start), product);
  }
  // An instruction by name: GCC 12 loads and broadcasts x apart from the intrinsic, and then spills sums.
  static I multiply_bytes(I sum, I codes, const uint32_t* x) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*x));
    return sum;
  }
  // Four codes of a word, one in each byte: those at even nibbles, then those at odd ones; or the word itself.
  template <int kBits>
  static I byte_codes(I word, int quad) {
    if (kBits == 8) return word;
    return _mm512_and_si512(quad == 0 ? word : _mm512_srli_epi32(word, 4), _mm512_set1_epi32(0x0f0f0f0f));
  }
  // Puts the bytes of one tile's inputs in the order in which byte_codes meets them.
  template <int kBits>
  struct QuadOrder {
    I pairs, bytes;

    QuadOrder() {
      alignas(64) uint16_t order[32] = {};  // of pairs of inputs: those of bytes 0 and 2, and of 1 and 3
      for (int i = 0; i < Codes<kBits>::kTile / 2; ++i)
        order[i] = static_cast<uint16_t>(Codes<kBits>::byte_input(i / 2 * 4 + i % 2) / 2);
      pairs = _mm512_load_si512(order);
      bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    }
    void apply(const int8_t* in, uint32_t* out) const {
      _mm512_store_si512(out, _mm512_shuffle_epi8(_mm512_permutexvar_epi16(pairs, _mm512_load_si512(in)), bytes));
    }
  };
#endif

#if defined(__AVX512BF16__)
  static F multiply_pairs(F sum, I w, uint32_t x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(x)));
  }

  // Pairs of code - zero as bfloat16. Pair i of a word: its codes 8i and 8i + 1 inputs on, in the two halves of the
  // lane.
  template <int kBits, bool kBiased>
  struct PairDecoder;

  template <bool kBiased>
  struct PairDecoder<4, kBiased> {
    // Entry i: i (and i - 32 in the upper half, for negative differences), or, biased, (i mod 16) - 8.
    I table = make_table();
    I zeros;

    static I make_table() {
      alignas(64) uint16_t entries[32];
      for (int i = 0; i < 32; ++i) {
        const float value = static_cast<float>(kBiased ? i % 16 - 8 : i < 16 ? i : i - 32);
        uint32_t bits;
        __builtin_memcpy(&bits, &value, 4);
        entries[i] = static_cast<uint16_t>(bits >> 16);
      }
      return _mm512_load_si512(entries);
    }
    void set_zeros(F z) {
      const I integer = _mm512_cvtps_epi32(z);
      zeros = _mm512_or_si512(integer, _mm512_slli_epi32(integer, 16));
    }
    template <int i>
    I get(I words) const {
      I code = i == 0 ? words : _mm512_srli_epi32(words, 4 * i);
      if (!kBiased) code = _mm512_sub_epi16(_mm512_and_si512(code, _mm512_set1_epi32(0x000f000f)), zeros);
      return _mm512_permutexvar_epi16(code, table);
    }
  };

  template <bool kBiased>
  struct PairDecoder<8, kBiased> {
    F zeros = set1(128.0f);

    void set_zeros(F z) { zeros = z; }
    template <int i>
    I get(I words) const {
      // The even code is byte i and the odd one byte i + 2; differences of bytes have at most eight significant bits,
      // so the upper half of the float32 is the bfloat16.
      const I even = _mm512_and_si512(i == 0 ? words : _mm512_srli_epi32(words, 8 * i), _mm512_set1_epi32(255));
      const I odd = i == 0 ? _mm512_and_si512(_mm512_srli_epi32(words, 16), _mm512_set1_epi32(255))
                           : _mm512_srli_epi32(words, 24);
      const I low = _mm512_castps_si512(sub(_mm512_cvtepi32_ps(even), zeros));
      const I high = _mm512_castps_si512(sub(_mm512_cvtepi32_ps(odd), zeros));
      return _mm512_or_si512(_mm512_srli_epi32(low, 16), high);
    }
  };
#endif
};

}  // namespace
}  // namespace wonly::cpu
