// A 16-lane vector of four NEON registers; with what the compiler is told that there is, products of signed bytes.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "cpu/engine.h"
#include "cpu/word_order.h"

namespace wonly::cpu {
namespace {

struct Ops {
  struct F {
    float32x4_t q[4];
  };
  struct I {
    uint32x4_t q[4];
  };

  static constexpr int kDirectRows = 4;
  static constexpr int kSplitRows = 0;
  static constexpr int kMicroRows = 6;
  static constexpr int kMicroVectors = 1;

  // f(i) for each register.
  template <class T, class Function>
  WONLY_ALWAYS_INLINE static T each(const Function& f) {
    return {{f(0), f(1), f(2), f(3)}};
  }

  static F load(const float* p) {
    return each<F>([p](int i) { return vld1q_f32(p + 4 * i); });
  }
  static void store(float* p, F v) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, v.q[i]);
  }
  static F set1(float v) {
    return each<F>([v](int) { return vdupq_n_f32(v); });
  }
  static F add(F a, F b) {
    return each<F>([&](int i) { return vaddq_f32(a.q[i], b.q[i]); });
  }
  static F sub(F a, F b) {
    return each<F>([&](int i) { return vsubq_f32(a.q[i], b.q[i]); });
  }
  static F mul(F a, F b) {
    return each<F>([&](int i) { return vmulq_f32(a.q[i], b.q[i]); });
  }
  static F fma(F a, F b, F c) {
    return each<F>([&](int i) { return vfmaq_f32(c.q[i], a.q[i], b.q[i]); });
  }

  static F load_natural(const float* p) {
    const F v = load(p);
    return {{vzip1q_f32(v.q[0], v.q[2]), vzip2q_f32(v.q[0], v.q[2]), vzip1q_f32(v.q[1], v.q[3]),
             vzip2q_f32(v.q[1], v.q[3])}};
  }
  static void store_natural(float* p, F v) {
    store(p, {{vuzp1q_f32(v.q[0], v.q[1]), vuzp1q_f32(v.q[2], v.q[3]), vuzp2q_f32(v.q[0], v.q[1]),
               vuzp2q_f32(v.q[2], v.q[3])}});
  }

  // Lane i of row j to lane j of row i, four by four at a time.
  static void transpose_lanes(F (&rows)[16]) {
    const auto transposed = [](const F* r, int q, float32x4_t(&out)[4]) {
      const float32x4_t a = vtrn1q_f32(r[0].q[q], r[1].q[q]), b = vtrn2q_f32(r[0].q[q], r[1].q[q]);
      const float32x4_t c = vtrn1q_f32(r[2].q[q], r[3].q[q]), d = vtrn2q_f32(r[2].q[q], r[3].q[q]);
      const auto low = [](float32x4_t x, float32x4_t y) {
        return vreinterpretq_f32_f64(vtrn1q_f64(vreinterpretq_f64_f32(x), vreinterpretq_f64_f32(y)));
      };
      const auto high = [](float32x4_t x, float32x4_t y) {
        return vreinterpretq_f32_f64(vtrn2q_f64(vreinterpretq_f64_f32(x), vreinterpretq_f64_f32(y)));
      };
      out[0] = low(a, c);
      out[1] = low(b, d);
      out[2] = high(a, c);
      out[3] = high(b, d);
    };
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j <= i; ++j) {
        float32x4_t below[4], above[4];
        transposed(rows + 4 * i, j, below);
        transposed(rows + 4 * j, i, above);
        for (int r = 0; r < 4; ++r) {
          rows[4 * j + r].q[i] = below[r];
          rows[4 * i + r].q[j] = above[r];
        }
      }
    }
  }

  static void prefetch_atom(const uint32_t* p) {
    for (int line = 0; line < 8; ++line) __builtin_prefetch(p + 16 * line);
  }
  // Pairs of 64-bit columns of two rows.
  static void load_atom(const uint32_t* p, I (&words)[8]) {
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 4; ++j) {
        const uint64x2_t a = vreinterpretq_u64_u32(vld1q_u32(p + 32 * i + 4 * j));
        const uint64x2_t b = vreinterpretq_u64_u32(vld1q_u32(p + 32 * i + 16 + 4 * j));
        words[2 * j].q[i] = vreinterpretq_u32_u64(vtrn1q_u64(a, b));
        words[2 * j + 1].q[i] = vreinterpretq_u32_u64(vtrn2q_u64(a, b));
      }
    }
  }

  // A code is converted where it lies, as a number in fixed point.
  template <int kBits, bool kBiased>
  struct Decoder {
    template <int i>
    F get(I words) const {
      return each<F>([&](int r) {
        const uint32x4_t code = vandq_u32(words.q[r], vdupq_n_u32(((1u << kBits) - 1u) << (kBits * i)));
        float32x4_t value;
        if constexpr (i == 0) {
          value = vcvtq_f32_u32(code);
        } else {
          value = vcvtq_n_f32_u32(code, kBits * i);
        }
        return kBiased ? vsubq_f32(value, vdupq_n_f32(bias_of(kBits))) : value;
      });
    }
  };

  // The value that each code stands for: a look-up of its four bytes.
  struct TableDecoder {
    uint8x16x4_t table;

    explicit TableDecoder(const float* table) : table(vld1q_u8_x4(reinterpret_cast<const uint8_t*>(table))) {}
    template <int i>
    F get(I words) const {
      return each<F>([&](int r) {
        const uint32x4_t code =
            vandq_u32(i == 0 ? words.q[r] : vshrq_n_u32(words.q[r], i == 0 ? 1 : 4 * i), vdupq_n_u32(15));
        const uint32x4_t bytes = vmlaq_u32(vdupq_n_u32(0x03020100u), code, vdupq_n_u32(0x04040404u));
        return vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(bytes)));
      });
    }
  };

#if defined(__ARM_FEATURE_DOTPROD)
  static constexpr int kNarrowQuads = 0;  // products that sums of 16 bits hold; 0: sums have 32
  static constexpr int kPlaneRows = 2;
  static constexpr int64_t kMostPlaneRows = INT64_MAX;  // for more, float32 is faster
  template <int kBits>
  static constexpr int32_t kByteBias = kBits == 8 ? 128 : 0;  // what byte_codes takes from codes: bytes are signed

  static I load_words(const void* p) {
    return each<I>([p](int i) { return vld1q_u32(static_cast<const uint32_t*>(p) + 4 * i); });
  }
  static void store_words(void* p, I v) {
    for (int i = 0; i < 4; ++i) vst1q_u32(static_cast<uint32_t*>(p) + 4 * i, v.q[i]);
  }
  static I set1_words(int32_t v) {
    return each<I>([v](int) { return vdupq_n_u32(static_cast<uint32_t>(v)); });
  }
  static F abs(F v) {
    return each<F>([&](int i) { return vabsq_f32(v.q[i]); });
  }
  static F max(F a, F b) {
    return each<F>([&](int i) { return vmaxq_f32(a.q[i], b.q[i]); });
  }
  static float largest(F v) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(v.q[0], v.q[1]), vmaxq_f32(v.q[2], v.q[3]))); }
  static float sum(F v) { return vaddvq_f32(vaddq_f32(vaddq_f32(v.q[0], v.q[1]), vaddq_f32(v.q[2], v.q[3]))); }
  // Lanes where x is not zero and scaled by `factor` stays below `bound`.
  static int count_nonzero_below(F x, F factor, float bound) {
    uint32x4_t count = vdupq_n_u32(0);
    for (int i = 0; i < 4; ++i) {
      const uint32x4_t below = vcaltq_f32(vmulq_f32(x.q[i], factor.q[i]), vdupq_n_f32(bound));
      count = vsubq_u32(count, vbicq_u32(below, vceqzq_f32(x.q[i])));  // all ones: minus one
    }
    return static_cast<int>(vaddvq_u32(count));
  }
  static I nearest(F v) {
    return each<I>([&](int i) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(v.q[i])); });
  }
  static F to_float(I v) {
    return each<F>([&](int i) { return vcvtq_f32_s32(vreinterpretq_s32_u32(v.q[i])); });
  }
  // start - zeros * v of integers.
  static I minus_product(int32_t start, F zeros, int32_t v) {
    return each<I>([&](int i) {
      const uint32x4_t integers = vreinterpretq_u32_s32(vcvtnq_s32_f32(zeros.q[i]));
      return vmlsq_u32(vdupq_n_u32(static_cast<uint32_t>(start)), integers, vdupq_n_u32(static_cast<uint32_t>(v)));
    });
  }
  static I multiply_bytes(I sum, I codes, const uint32_t* x) {
    const int8x16_t digits = vreinterpretq_s8_u32(vld1q_dup_u32(x));
    return each<I>([&](int i) {
      return vreinterpretq_u32_s32(
          vdotq_s32(vreinterpretq_s32_u32(sum.q[i]), vreinterpretq_s8_u32(codes.q[i]), digits));
    });
  }
  // Four codes of a word, one in each byte: those at even nibbles, then those at odd ones; or the word itself.
  template <int kBits>
  static I byte_codes(I word, int quad) {
    return each<I>([&](int i) {
      if (kBits == 8) return veorq_u32(word.q[i], vdupq_n_u32(0x80808080u));
      return vandq_u32(quad == 0 ? word.q[i] : vshrq_n_u32(word.q[i], 4), vdupq_n_u32(0x0f0f0f0fu));
    });
  }
  // Puts the bytes of one tile's inputs in the order in which byte_codes meets them.
  template <int kBits>
  struct QuadOrder {
    uint8x16_t order[4];

    QuadOrder() {
      uint8_t from[64] = {};
      for (int i = 0; i < Codes<kBits>::kTile; ++i) from[i] = static_cast<uint8_t>(Codes<kBits>::byte_input(i));
      for (int i = 0; i < 4; ++i) order[i] = vld1q_u8(from + 16 * i);
    }
    void apply(const int8_t* in, uint32_t* out) const {
      const uint8x16x4_t bytes = vld1q_u8_x4(reinterpret_cast<const uint8_t*>(in));
      for (int i = 0; i < 4; ++i) vst1q_u32(out + 4 * i, vreinterpretq_u32_u8(vqtbl4q_u8(bytes, order[i])));
    }
  };
#endif
};

}  // namespace
}  // namespace wonly::cpu
