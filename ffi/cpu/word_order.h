// Where the inputs of an atom's words are, for kernels and for the Ops that they are written over.
//
// Lane order. The 128 words of an atom are sixteen rows by eight columns of words. Transposed by 64-bit pairs they
// become eight vectors t[0..7] with one lane per output, in the order 0, 8, 1, 9, .. 7, 15: word t[j] holds the codes
// of inputs base(j) + 8p + odd. Scales, zeros and sums live in that lane order, and only results are put back in
// natural order.
#pragma once

#include "layout.h"

namespace wonly::cpu {
namespace {

template <int kBits>
struct Codes {
  static constexpr int kTile = kBits == 4 ? 64 : 32;
  static constexpr int kPerWord = 32 / kBits;
  static constexpr int kPairsPerWord = kPerWord / 2;
  // First input of word t[j] within its tile: j = 2 * (lane within the group) + (block of 32 or step of 16 inputs).
  static constexpr int base(int j) { return (j & 1) * (kBits == 4 ? 32 : 16) + (j >> 1) * 2; }
  // Input of code i of a word, from the word's first.
  static constexpr int offset(int i) { return 8 * (i % kPairsPerWord) + i / kPairsPerWord; }
  // Input of byte i of a tile whose codes are taken four at a time, one from each byte of a word (Ops::byte_codes).
  static constexpr int byte_input(int i) {
    return kBits == 4 ? base(i / 8) + offset(2 * (i % 4) + i / 4 % 2) : base(i / 4) + offset(i % 4);
  }
};
static_assert(code_position(4, 32 + 2 * 3 + 8 * 2 + 1, 9).word == 4 * (4 * 1 + 3) + 2 + 1 &&
              code_position(4, 32 + 2 * 3 + 8 * 2 + 1, 9).shift == 4 * 6 &&
              Codes<4>::base(7) + Codes<4>::offset(6) == 55);
static_assert(code_position(8, 16 + 2 * 3 + 8 * 1 + 1, 9).word == 4 * (4 * 1 + 3) + 2 + 1 &&
              code_position(8, 16 + 2 * 3 + 8 * 1 + 1, 9).shift == 8 * 3 &&
              Codes<8>::base(7) + Codes<8>::offset(3) == 31);

}  // namespace
}  // namespace wonly::cpu
