// Rows of bfloat16 as pairs, for instructions that multiply them (Form::kBF16Pairs). See kernel_parts.h.
#pragma once

#include "cpu/products.h"

namespace wonly::cpu {
namespace {

// Weights as pairs of bfloat16 integers (code - zero, exact up to 256), for x as [k / 2][rows] of bfloat16 pairs.
struct PairsPolicy {
  using X = uint32_t;
  using W = I;
  static constexpr int kWidth = 2;
  static constexpr bool kFolds = false;  // scaled weights would be rounded: scales wait for the float32 sums

  template <int kBits, int kShift>
  struct Decoder {
    static_assert(kShift == kNone || kShift == kZeros);
    static constexpr int kSteps = Codes<kBits>::kPairsPerWord;
    Ops::PairDecoder<kBits, kShift == kNone> codes;

    explicit Decoder(const Weights&) {}
    void set(const float*, const float* shifts) {
      if (kShift == kZeros) codes.set_zeros(Ops::load(shifts));
    }
    template <int i>
    W get(I words) const {
      return codes.template get<i>(words);
    }
    static F outer_scale(const float* scales) { return Ops::load(scales); }
  };
  static void decode(const Weights& weights, const uint32_t* tiles, int64_t k_begin, int64_t k_end,
                     const Scratch& scratch, float* panel);
  static W load_weights(const float* panel) { return Ops::load_words(panel); }
  static F mac(F sum, W w, const X* x) { return Ops::multiply_pairs(sum, w, *x); }
};

template <int kBits, int kShift, int i = 0>
WONLY_ALWAYS_INLINE void decode_word_pairs(const PairsPolicy::Decoder<kBits, kShift>& decoder, I word, float* panel) {
  if constexpr (i < Codes<kBits>::kPairsPerWord) {
    Ops::store_words(panel + 4 * i * kTileN, decoder.template get<i>(word));
    decode_word_pairs<kBits, kShift, i + 1>(decoder, word, panel);
  }
}

// Codes less their zeros as bfloat16 pairs, panel[(k - k_begin) / 2][64]; [k_begin, k_end) within one group.
template <int kBits, int kShift>
void decode_pairs(const Weights& weights, const uint32_t* tiles, int64_t k_begin, int64_t k_end, const Scratch& scratch,
                  float* panel) {
  using C = Codes<kBits>;
  const int64_t at = k_begin / weights.group_size() * kTileN;
  for (int atom = 0; atom < kAtomsPerTile; ++atom) {
    PairsPolicy::Decoder<kBits, kShift> decoder(weights);
    decoder.set(scratch.scales + at + atom * kLanes, scratch.shifts + at + atom * kLanes);
    for (int64_t tile = k_begin / C::kTile; tile * C::kTile < k_end; ++tile) {
      I words[8];
      load_words(tiles, tile, atom, words);
      for (int j = 0; j < 8; ++j) {
        const int64_t k = tile * C::kTile + C::base(j) - k_begin;
        if (k < 0 || k_begin + k >= ceil_div(k_end, 32) * 32) continue;  // the tile's other half
        decode_word_pairs<kBits, kShift>(decoder, words[j], panel + k / 2 * kTileN + atom * kLanes);
      }
    }
  }
}

void PairsPolicy::decode(const Weights& weights, const uint32_t* tiles, int64_t k_begin, int64_t k_end,
                         const Scratch& scratch, float* panel) {
  const bool int4 = weights.bits == 4;
  if (weights.shift_mode == ShiftMode::kNone) {
    (int4 ? decode_pairs<4, kNone> : decode_pairs<8, kNone>)(weights, tiles, k_begin, k_end, scratch, panel);
  } else {
    (int4 ? decode_pairs<4, kZeros> : decode_pairs<8, kZeros>)(weights, tiles, k_begin, k_end, scratch, panel);
  }
}

constexpr PairsKernels kPairsKernels{matmul_direct<PairsPolicy>, matmul_panel<PairsPolicy>};

}  // namespace
}  // namespace wonly::cpu
