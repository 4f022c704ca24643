// The kernels of one instruction set, written once over its Ops (a 16-lane float32 vector and the few things done to
// it). Each engine_*.cc defines Ops and includes this file; everything is in an anonymous namespace (see numbers.h).
//
// Lane order. The 128 words of an atom are sixteen rows by eight columns of words. Transposed by 64-bit pairs they
// become eight vectors t[0..7] with one lane per output, in the order 0, 8, 1, 9, .. 7, 15: word t[j] holds the codes
// of inputs base(j) + 8p + odd. Scales, zeros and sums live in that lane order, and only results are put back in
// natural order.
#pragma once

#include <cstring>
#include <initializer_list>

#include "cpu/engine.h"
#include "cpu/numbers.h"

namespace wonly::cpu {
namespace {

using F = Ops::F;
using I = Ops::I;

constexpr int kLanes = 16;
constexpr int kChunk = kRunInputs;    // inputs of a panel
constexpr int kPrefetchBytes = 8192;  // ahead of the tile that is read

template <int kBits>
struct Codes {
  static constexpr int kTile = kBits == 4 ? 64 : 32;
  static constexpr int kPerWord = 32 / kBits;
  static constexpr int kPairsPerWord = kPerWord / 2;
  // First input of word t[j] within its tile: j = 2 * (lane within the group) + (block of 32 or step of 16 inputs).
  static constexpr int base(int j) { return (j & 1) * (kBits == 4 ? 32 : 16) + (j >> 1) * 2; }
  // Input of code i of a word, from the word's first.
  static constexpr int offset(int i) { return 8 * (i % kPairsPerWord) + i / kPairsPerWord; }
};
static_assert(code_position(4, 32 + 2 * 3 + 8 * 2 + 1, 9).word == 4 * (4 * 1 + 3) + 2 + 1 &&
              code_position(4, 32 + 2 * 3 + 8 * 2 + 1, 9).shift == 4 * 6 &&
              Codes<4>::base(7) + Codes<4>::offset(6) == 55);
static_assert(code_position(8, 16 + 2 * 3 + 8 * 1 + 1, 9).word == 4 * (4 * 1 + 3) + 2 + 1 &&
              code_position(8, 16 + 2 * 3 + 8 * 1 + 1, 9).shift == 8 * 3 &&
              Codes<8>::base(7) + Codes<8>::offset(3) == 31);

enum : int { kNone = 0, kZeros = 1, kOffsets = 2, kTable = 3 };  // ShiftMode as a template argument

// Codes as float32: less the bias without a shift, or what they stand for in a table.
template <int kBits, int kShift>
struct CodeDecoder : Ops::Decoder<kBits, kShift == kNone> {
  explicit CodeDecoder(const Weights&) {}
};
template <>
struct CodeDecoder<4, kTable> : Ops::TableDecoder {
  explicit CodeDecoder(const Weights& weights) : TableDecoder(static_cast<const float*>(weights.shift.data)) {}
};

// Weights as float32: x is [k][rows] of float32.
struct F32Policy {
  using X = float;
  using W = F;
  static constexpr int kWidth = 1;
  static constexpr bool kFolds = true;  // a panel holds scaled weights

  template <int kBits, int kShift>
  struct Decoder {
    static constexpr int kSteps = Codes<kBits>::kPerWord;
    CodeDecoder<kBits, kShift> codes;
    F scale, shift;

    explicit Decoder(const Weights& weights) : codes(weights) {}
    void set(const float* scales, const float* shifts) {
      if (kShift == kOffsets) scale = Ops::load(scales);
      if (kShift == kZeros || kShift == kOffsets) shift = Ops::load(shifts);
    }
    template <int i>
    W get(I words) const {
      const F code = codes.template get<i>(words);
      if constexpr (kShift == kZeros) return Ops::sub(code, shift);
      if constexpr (kShift == kOffsets) return Ops::fma(code, scale, shift);
      return code;
    }
    // What a group's sum is scaled by.
    static F outer_scale(const float* scales) { return kShift == kOffsets ? Ops::set1(1.0f) : Ops::load(scales); }
  };
  static W load_weights(const float* panel) { return Ops::load(panel); }
  static F mac(F sum, W w, const X* x) { return Ops::fma(w, Ops::set1(*x), sum); }
};

#if defined(WONLY_BF16_PAIRS)
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
  static W load_weights(const float* panel) { return Ops::load_words(panel); }
  static F mac(F sum, W w, const X* x) { return Ops::multiply_pairs(sum, w, *x); }
};
#endif

template <class Policy, class Decoder, int kRows, int kParts, int kBits, int i = 0>
WONLY_ALWAYS_INLINE void multiply_word(const Decoder& decoder, I word, const typename Policy::X* x,
                                       F (&sums)[kParts][kRows]) {
  if constexpr (i < Decoder::kSteps) {
    constexpr int offset = Policy::kWidth == 1 ? Codes<kBits>::offset(i) : 4 * i;
    const typename Policy::W w = decoder.template get<i>(word);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) sums[i % kParts][r] = Policy::mac(sums[i % kParts][r], w, x + offset * kRows + r);
    multiply_word<Policy, Decoder, kRows, kParts, kBits, i + 1>(decoder, word, x, sums);
  }
}

template <int kRows, int kParts>
WONLY_ALWAYS_INLINE void add_scaled(float* totals, F scale, const F (&sums)[kParts][kRows]) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    F sum = sums[0][r];
    if constexpr (kParts == 4) sum = Ops::add(Ops::add(sum, sums[1][r]), Ops::add(sums[2][r], sums[3][r]));
    Ops::store(totals + r * kTileN, Ops::fma(scale, sum, Ops::load(totals + r * kTileN)));
  }
}

// Sums of all inputs for kRows rows and 64 outputs, into totals[kRows][64] in lane order.
template <class Policy, int kBits, int kShift, bool kHalfTiles, int kRows>
void direct_kernel(const Weights& weights, const uint32_t* tiles, const void* packed_x, const float* scales,
                   const float* shifts, float* totals) {
  using C = Codes<kBits>;
  using Decoder = typename Policy::template Decoder<kBits, kShift>;
  constexpr int kParts = kRows <= Ops::kSplitRows ? 4 : 1;  // independent sums hide the latency when rows are few
  const auto* x = static_cast<const typename Policy::X*>(packed_x);
  constexpr int64_t x_tile = int64_t{C::kTile / Policy::kWidth} * kRows;
  const int64_t count = weights.tiles_k();
  const int64_t group_size = weights.group_size();
  const int64_t group_tiles = kHalfTiles ? 1 : weights.groups == 1 ? count : group_size / C::kTile;
  std::memset(totals, 0, sizeof(float) * kRows * kTileN);
  Decoder decoder(weights);

  for (int64_t begin = 0, end; begin < count; begin = end) {
    const int64_t group = begin / group_tiles;
    end = kHalfTiles ? begin + 1 : run_end(weights, begin * C::kTile) / C::kTile;
    for (int atom = 0; atom < kAtomsPerTile; ++atom) {
      I words[8];
      if constexpr (kHalfTiles) {
        const uint32_t* words_in = tiles + begin * kTileWords + atom * kAtomWords;
        Ops::prefetch_atom(words_in + kPrefetchBytes / 4);
        Ops::load_atom(words_in, words);
        for (int block = 0; block < 2; ++block) {
          int64_t g = (begin * C::kTile + 32 * block) / group_size;
          if (g >= weights.groups) g = weights.groups - 1;
          const int64_t at = g * kTileN + atom * kLanes;
          decoder.set(scales + at, shifts + at);
          F sums[kParts][kRows] = {};
          for (int j = block; j < 8; j += 2)
            multiply_word<Policy, Decoder, kRows, kParts, kBits>(
                decoder, words[j], x + begin * x_tile + C::base(j) / Policy::kWidth * kRows, sums);
          add_scaled<kRows, kParts>(totals + atom * kLanes, Decoder::outer_scale(scales + at), sums);
        }
      } else {
        const int64_t at = group * kTileN + atom * kLanes;
        decoder.set(scales + at, shifts + at);
        F sums[kParts][kRows] = {};
        for (int64_t tile = begin; tile < end; ++tile) {
          const uint32_t* words_in = tiles + tile * kTileWords + atom * kAtomWords;
          Ops::prefetch_atom(words_in + kPrefetchBytes / 4);
          Ops::load_atom(words_in, words);
          for (int j = 0; j < 8; ++j)
            multiply_word<Policy, Decoder, kRows, kParts, kBits>(
                decoder, words[j], x + tile * x_tile + C::base(j) / Policy::kWidth * kRows, sums);
        }
        add_scaled<kRows, kParts>(totals + atom * kLanes, Decoder::outer_scale(scales + at), sums);
      }
    }
  }
}

// out[groups][64] in lane order: rows of 64 outputs of a parameter, zeros beyond n, for groups [begin, end).
void load_parameter(const Weights& weights, Rows parameter, int64_t tile, int64_t begin, int64_t end, float* out) {
  const int64_t n0 = tile * kTileN;
  const int64_t count = weights.n - n0 < kTileN ? weights.n - n0 : kTileN;
  alignas(64) float row[kTileN] = {};
  for (int64_t g = begin; g < end; ++g) {
    load_row(parameter.data, parameter.type, g * weights.n + n0, count, row);
    for (int atom = 0; atom < kAtomsPerTile; ++atom)
      Ops::store(out + g * kTileN + atom * kLanes, Ops::load_natural(row + atom * kLanes));
  }
}

inline float exp_of(float x) {
  x = x > -104.0f ? x : -104.0f;  // NaN too: callers divide their NaN by the result
  x = x < 89.0f ? x : 89.0f;
  const float rounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float n = (x * 1.44269504088896341f + rounder) - rounder;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = (p * r) * r + r + 1.0f;
  const int32_t e = static_cast<int32_t>(n);
  const int32_t half = e >> 1;  // two factors: 2^e alone leaves the range of normal numbers first
  return p * as_float(static_cast<uint32_t>(half + 127) << 23) * as_float(static_cast<uint32_t>(e - half + 127) << 23);
}

// Loops that call exp_of count: over a range gcc 12 does not make vectors of them, which take a twentieth of the time.
void activate(Activation activation, float (&row)[kTileN]) {
  switch (activation) {
    case Activation::kNone:
      break;
    case Activation::kRelu:
      for (float& v : row) v = v < 0.0f ? 0.0f : v;  // NaN stays
      break;
    case Activation::kRelu6:
      for (float& v : row) {
        const float positive = v < 0.0f ? 0.0f : v;
        v = positive > 6.0f ? 6.0f : positive;
      }
      break;
    case Activation::kGelu:
      for (int i = 0; i < kTileN; ++i) {
        const float v = row[i], u = 0.7978845608028654f * (v + 0.044715f * v * v * v);
        row[i] = v / (1.0f + exp_of(-2.0f * u));  // 0.5 (1 + tanh u) = 1 / (1 + exp(-2u))
      }
      break;
    case Activation::kSilu:
      for (int i = 0; i < kTileN; ++i) row[i] = row[i] / (1.0f + exp_of(-row[i]));
      break;
  }
}

// Writes rows [row_begin, row_begin + rows) of y from totals[rows][64].
void finish(const MatmulTask& task, int64_t row_begin, int64_t rows, const float* totals) {
  const int64_t n = task.weights.n;
  const int64_t n0 = task.tile * kTileN;
  const int64_t count = n - n0 < kTileN ? n - n0 : kTileN;
  alignas(64) float bias[kTileN] = {};
  if (task.bias.data != nullptr) load_row(task.bias.data, task.bias.type, n0, count, bias);
  for (int64_t r = 0; r < rows; ++r) {
    alignas(64) float row[kTileN];
    for (int atom = 0; atom < kAtomsPerTile; ++atom)
      Ops::store_natural(row + atom * kLanes, Ops::load(totals + r * kTileN + atom * kLanes));
    if (task.bias.data != nullptr)
      for (int i = 0; i < kTileN; ++i) row[i] += bias[i];
    activate(task.activation, row);
    store_row(row, count, task.y, task.y_type, task.x.row(row_begin + r) * n + n0);
  }
}

using DirectKernel = void (*)(const Weights&, const uint32_t*, const void*, const float*, const float*, float*);

template <class Policy, int kBits, int kShift, bool kHalfTiles>
DirectKernel direct_for(int64_t rows) {
  switch (rows) {
    case 1:
      return direct_kernel<Policy, kBits, kShift, kHalfTiles, 1>;
    case 2:
      return direct_kernel<Policy, kBits, kShift, kHalfTiles, 2>;
    case 4:
      return direct_kernel<Policy, kBits, kShift, kHalfTiles, 4>;
  }
  if constexpr (Ops::kDirectRows > 4) {
    switch (rows) {
      case 6:
        return direct_kernel<Policy, kBits, kShift, kHalfTiles, 6>;
      case 8:
        return direct_kernel<Policy, kBits, kShift, kHalfTiles, 8>;
      case 12:
        return direct_kernel<Policy, kBits, kShift, kHalfTiles, 12>;
      case 16:
        return direct_kernel<Policy, kBits, kShift, kHalfTiles, 16>;
    }
  }
  return nullptr;
}

int64_t direct_width(int64_t rows) {
  for (const int64_t width : {1, 2, 4, 6, 8, 12}) {
    if (rows <= width) return width;
  }
  return 16;
}

template <class Policy, int kShift>
DirectKernel direct_for(const Weights& weights, int64_t rows) {
  if constexpr (kShift != kTable) {
    if (weights.bits == 8) return direct_for<Policy, 8, kShift, false>(rows);
  }
  if (weights.groups != 1 && weights.group_size() % 64 != 0) return direct_for<Policy, 4, kShift, true>(rows);
  return direct_for<Policy, 4, kShift, false>(rows);
}

template <class Policy>
DirectKernel direct_for(const Weights& weights, int64_t rows) {
  switch (weights.shift_mode) {
    case ShiftMode::kNone:
      return direct_for<Policy, kNone>(weights, rows);
    case ShiftMode::kZeros:
      return direct_for<Policy, kZeros>(weights, rows);
    case ShiftMode::kOffsets:
      if constexpr (Policy::kFolds) return direct_for<Policy, kOffsets>(weights, rows);
      break;
    case ShiftMode::kTable:
      if constexpr (Policy::kFolds) return direct_for<Policy, kTable>(weights, rows);
      break;
  }
  return nullptr;
}

// Where a task keeps what it makes.
struct Scratch {
  float* scales;  // [groups][64], lane order
  float* shifts;  // [groups][64], lane order, unused without zeros or offsets
  float* panel;   // [kChunk + 32][64]
  float* totals;  // [rows][64], lane order

  Scratch(const Weights& weights, float* memory) {
    scales = memory;
    shifts = scales + weights.groups * kTileN;
    panel = shifts + weights.groups * kTileN;
    totals = panel + (kChunk + 32) * kTileN;
  }
  static int64_t floats(const Weights& weights, int64_t rows) {
    return (2 * weights.groups + kChunk + 32 + rows) * kTileN;
  }
  void load(const Weights& weights, int64_t tile) const { load(weights, tile, 0, weights.groups); }
  void load(const Weights& weights, int64_t tile, int64_t begin, int64_t end) const {
    load_parameter(weights, weights.scales, tile, begin, end, scales);
    if (weights.shift_mode == ShiftMode::kZeros || weights.shift_mode == ShiftMode::kOffsets)
      load_parameter(weights, weights.shift, tile, begin, end, shifts);
  }
};

const uint32_t* tiles_of(const Weights& weights, int64_t tile) {
  return weights.qw + tile * weights.tiles_k() * kTileWords;
}

void matmul_direct(const MatmulTask& task) {
  const Scratch scratch(task.weights, task.scratch);
  scratch.load(task.weights, task.tile);
  DirectKernel kernel = nullptr;
#if defined(WONLY_BF16_PAIRS)
  if (task.x.form == Form::kBF16Pairs) kernel = direct_for<PairsPolicy>(task.weights, task.x.rows_padded);
#endif
  if (task.x.form == Form::kF32) kernel = direct_for<F32Policy>(task.weights, task.x.rows_padded);
  kernel(task.weights, tiles_of(task.weights, task.tile), task.x.data, scratch.scales, scratch.shifts, scratch.totals);
  finish(task, 0, task.x.rows, scratch.totals);
}

// Codes of inputs [k_begin, k_end) as scaled float32 weights, panel[k - k_begin][64] in lane order. k_begin: a multiple
// of 32.
template <int kBits, int kShift, int i = 0>
WONLY_ALWAYS_INLINE void decode_word(const CodeDecoder<kBits, kShift>& decoder, I word, const Scratch& scratch,
                                     const int32_t* group_at, int k, int column, float* panel) {
  if constexpr (i < Codes<kBits>::kPerWord) {
    const int row = k + Codes<kBits>::offset(i);
    const int at = group_at[row] + column;
    F w = decoder.template get<i>(word);
    const F scale = Ops::load(scratch.scales + at);
    if constexpr (kShift == kZeros) w = Ops::sub(w, Ops::load(scratch.shifts + at));
    w = Ops::mul(w, scale);
    if constexpr (kShift == kOffsets) w = Ops::add(w, Ops::load(scratch.shifts + at));
    Ops::store(panel + row * kTileN + column, w);
    decode_word<kBits, kShift, i + 1>(decoder, word, scratch, group_at, k, column, panel);
  }
}

template <int kBits, int kShift>
void decode_f32(const Weights& weights, const uint32_t* tiles, int64_t k_begin, int64_t k_end, const Scratch& scratch,
                float* panel) {
  using C = Codes<kBits>;
  int32_t group_at[kChunk + 32];
  const int64_t group_size = weights.group_size();
  int64_t group = k_begin / group_size;
  int64_t left = group_size - k_begin % group_size;
  for (int64_t k = k_begin; k < ceil_div(k_end, 32) * 32; ++k) {
    group_at[k - k_begin] = static_cast<int32_t>((group < weights.groups ? group : weights.groups - 1) * kTileN);
    if (--left == 0) {
      ++group;
      left = group_size;
    }
  }
  const CodeDecoder<kBits, kShift> decoder(weights);
  for (int64_t tile = k_begin / C::kTile; tile * C::kTile < k_end; ++tile) {
    for (int atom = 0; atom < kAtomsPerTile; ++atom) {
      I words[8];
      const uint32_t* words_in = tiles + tile * kTileWords + atom * kAtomWords;
      Ops::prefetch_atom(words_in + kPrefetchBytes / 4);
      Ops::load_atom(words_in, words);
      for (int j = 0; j < 8; ++j) {
        const int64_t k = tile * C::kTile + C::base(j) - k_begin;
        if (k < 0 || k_begin + k >= ceil_div(k_end, 32) * 32) continue;  // the tile's other half
        decode_word<kBits, kShift>(decoder, words[j], scratch, group_at, static_cast<int>(k), atom * kLanes, panel);
      }
    }
  }
}

#if defined(WONLY_BF16_PAIRS)
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
      const uint32_t* words_in = tiles + tile * kTileWords + atom * kAtomWords;
      Ops::prefetch_atom(words_in + kPrefetchBytes / 4);
      Ops::load_atom(words_in, words);
      for (int j = 0; j < 8; ++j) {
        const int64_t k = tile * C::kTile + C::base(j) - k_begin;
        if (k < 0 || k_begin + k >= ceil_div(k_end, 32) * 32) continue;  // the tile's other half
        decode_word_pairs<kBits, kShift>(decoder, words[j], panel + k / 2 * kTileN + atom * kLanes);
      }
    }
  }
}

void decode_pairs(const Weights& weights, const uint32_t* tiles, int64_t k_begin, int64_t k_end, const Scratch& scratch,
                  float* panel) {
  const bool int4 = weights.bits == 4;
  if (weights.shift_mode == ShiftMode::kNone) {
    (int4 ? decode_pairs<4, kNone> : decode_pairs<8, kNone>)(weights, tiles, k_begin, k_end, scratch, panel);
  } else {
    (int4 ? decode_pairs<4, kZeros> : decode_pairs<8, kZeros>)(weights, tiles, k_begin, k_end, scratch, panel);
  }
}
#endif

void decode_f32(const Weights& weights, const uint32_t* tiles, int64_t k_begin, int64_t k_end, const Scratch& scratch,
                float* panel) {
  const bool int4 = weights.bits == 4;
  switch (weights.shift_mode) {
    case ShiftMode::kNone:
      return (int4 ? decode_f32<4, kNone> : decode_f32<8, kNone>)(weights, tiles, k_begin, k_end, scratch, panel);
    case ShiftMode::kZeros:
      return (int4 ? decode_f32<4, kZeros> : decode_f32<8, kZeros>)(weights, tiles, k_begin, k_end, scratch, panel);
    case ShiftMode::kOffsets:
      return (int4 ? decode_f32<4, kOffsets> : decode_f32<8, kOffsets>)(weights, tiles, k_begin, k_end, scratch, panel);
    case ShiftMode::kTable:
      return decode_f32<4, kTable>(weights, tiles, k_begin, k_end, scratch, panel);
  }
}

// totals[kRows][64] += scale * (x[count][kRows]^T panel[count][64]); without scales, scale is one.
template <class Policy, int kRows>
void micro_kernel(const void* panel_data, const void* x_data, int64_t count, const float* scales, float* totals) {
  constexpr int kVectors = Ops::kMicroVectors;
  const auto* x = static_cast<const typename Policy::X*>(x_data);
  for (int column = 0; column < kTileN; column += kVectors * kLanes) {
    const float* panel = static_cast<const float*>(panel_data) + column;
    F sums[kRows][kVectors] = {};
    for (int64_t k = 0; k < count; ++k) {
      typename Policy::W w[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) w[v] = Policy::load_weights(panel + k * kTileN + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[r][v] = Policy::mac(sums[r][v], w[v], x + k * kRows + r);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const F scale = scales != nullptr ? Ops::load(scales + column + v * kLanes) : Ops::set1(1.0f);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        float* total = totals + r * kTileN + column + v * kLanes;
        Ops::store(total, Ops::fma(scale, sums[r][v], Ops::load(total)));
      }
    }
  }
}

using MicroKernel = void (*)(const void*, const void*, int64_t, const float*, float*);

template <class Policy>
MicroKernel micro_for(int64_t rows) {
  switch (rows) {
    case 1:
      return micro_kernel<Policy, 1>;
    case 2:
      return micro_kernel<Policy, 2>;
  }
  if constexpr (Ops::kMicroRows > 2) {
    switch (rows) {
      case 3:
        return micro_kernel<Policy, 3>;
      case 4:
        return micro_kernel<Policy, 4>;
      case 5:
        return micro_kernel<Policy, 5>;
      case 6:
        return micro_kernel<Policy, 6>;
    }
  }
  return nullptr;
}

// Asks for what the next block reads while this one is multiplied: blocks lie apart, and each would start with misses.
void prefetch_block(const float* x, int64_t elements) {
  for (int64_t i = 0; i < elements; i += 16) __builtin_prefetch(x + i);
}

void matmul_panel(const MatmulTask& task) {
  const Weights& weights = task.weights;
  const PackedX& x = task.x;
  const Scratch scratch(weights, task.scratch);
  scratch.load(weights, task.tile);
  const uint32_t* tiles = tiles_of(weights, task.tile);
  const int64_t row_begin = x.block_begin(task.block_begin);
  const int64_t rows = x.block_begin(task.block_end) - row_begin;
  std::memset(scratch.totals, 0, sizeof(float) * rows * kTileN);
  const bool pairs = x.form == Form::kBF16Pairs;
  const int64_t group_size = weights.group_size();

  for (int64_t begin = 0, end; begin < weights.k; begin = end) {
    end = pairs ? run_end(weights, begin) : begin + kChunk;  // pairs are scaled after a run, float32 before
    if (end > weights.k) end = weights.k;
    const float* scales = nullptr;
    int64_t count = end - begin;
    if (pairs) {
#if defined(WONLY_BF16_PAIRS)
      decode_pairs(weights, tiles, begin, end, scratch, scratch.panel);
#endif
      scales = scratch.scales + begin / group_size * kTileN;
      count = ceil_div(count, 2);
    } else {
      decode_f32(weights, tiles, begin, end, scratch, scratch.panel);
    }
    for (int64_t block = task.block_begin; block < task.block_end; ++block) {
      const int64_t first = x.block_begin(block);
      const int64_t height = x.block_begin(block + 1) - first;
      const float* x_block =
          static_cast<const float*>(x.data) + first * x.row_elements() + (pairs ? begin / 2 : begin) * height;
      if (block + 1 < task.block_end) prefetch_block(x_block + height * x.row_elements(), count * height);
      MicroKernel kernel = nullptr;
#if defined(WONLY_BF16_PAIRS)
      if (pairs) kernel = micro_for<PairsPolicy>(height);
#endif
      if (!pairs) kernel = micro_for<F32Policy>(height);
      kernel(scratch.panel, x_block, count, scales, scratch.totals + (first - row_begin) * kTileN);
    }
  }
  finish(task, row_begin, rows, scratch.totals);
}

// x has the weight's outputs as its inputs, which a panel must have as rows: out[output][64 inputs] from
// panel[input][64] in lane order. Zeros after `inputs`.
void transpose_panel(const float* panel, int64_t inputs, float* out) {
  for (int64_t k = 0; k < kTileN; k += kLanes) {
    for (int atom = 0; atom < kAtomsPerTile; ++atom) {
      F rows[kLanes];
      for (int i = 0; i < kLanes; ++i)
        rows[i] = k + i < inputs ? Ops::load(panel + (k + i) * kTileN + atom * kLanes) : Ops::set1(0.0f);
      Ops::transpose_lanes(rows);
      for (int lane = 0; lane < kLanes; ++lane)
        Ops::store(out + (atom * kLanes + lane % 2 * 8 + lane / 2) * kTileN + k, rows[lane]);
    }
  }
}

int64_t transposed_floats(const Weights& weights, int64_t rows) {
  return Scratch::floats(weights, kTileN + rows * (kChunk / kTileN));
}

void matmul_transposed(const MatmulTask& task) {
  const Weights& weights = task.weights;
  const PackedX& x = task.x;
  const Scratch scratch(weights, task.scratch);
  float* const transposed = scratch.totals;            // [64][64]
  float* const totals = transposed + kTileN * kTileN;  // [pieces][rows][64]
  const int64_t begin = task.tile * kChunk;
  const int64_t end = begin + kChunk < weights.k ? begin + kChunk : weights.k;
  const int64_t first_group = begin / weights.group_size(), end_group = (end - 1) / weights.group_size() + 1;
  const int64_t row_begin = x.block_begin(task.block_begin);
  const int64_t rows = x.block_begin(task.block_end) - row_begin;
  std::memset(totals, 0, sizeof(float) * ceil_div(end - begin, kTileN) * rows * kTileN);
  for (int64_t tile = 0; tile < weights.tiles_n(); ++tile) {
    scratch.load(weights, tile, first_group, end_group);
    // Pieces of 64 inputs, so that codes are in the first-level cache as weights, in either order.
    for (int64_t k = begin, piece = 0; k < end; k += kTileN, ++piece) {
      const int64_t inputs = end - k < kTileN ? end - k : kTileN;
      decode_f32(weights, tiles_of(weights, tile), k, k + inputs, scratch, scratch.panel);
      transpose_panel(scratch.panel, inputs, transposed);
      for (int64_t block = task.block_begin; block < task.block_end; ++block) {
        const int64_t first = x.block_begin(block);
        const int64_t height = x.block_begin(block + 1) - first;
        const float* x_block = static_cast<const float*>(x.data) + first * x.row_elements() + tile * kTileN * height;
        micro_for<F32Policy>(height)(transposed, x_block, kTileN, nullptr,
                                     totals + (piece * rows + first - row_begin) * kTileN);
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = begin, piece = 0; k < end; k += kTileN, ++piece) {
      const int64_t count = end - k < kTileN ? end - k : kTileN;
      store_row(totals + (piece * rows + r) * kTileN, count, task.y, task.y_type, x.row(row_begin + r) * weights.k + k);
    }
  }
}

#if defined(WONLY_PLANES)
constexpr int kPlanes = 3;
constexpr int kPlaneRows = 8;

// kShift here. kZeros: integer zeros. kOffsets: shifts[] are what a unit of x adds by itself, offsets or -zero * scale.
template <int kShift, int kRows>
WONLY_ALWAYS_INLINE void start_planes(const PlaneRun* run, const float* shifts, I (&sums)[kRows][kPlanes]) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
    for (int p = 0; p < kPlanes; ++p) {
      if constexpr (kShift == kNone) sums[r][p] = Ops::set1_words(run[r].starts[p]);
      if constexpr (kShift == kZeros) sums[r][p] = Ops::minus_product(Ops::load(shifts), run[r].sums[p]);
      if constexpr (kShift == kOffsets) sums[r][p] = Ops::set1_words(0);
    }
  }
}

template <int kRows>
WONLY_ALWAYS_INLINE void multiply_planes(I codes, const uint32_t* x, I (&sums)[kRows][kPlanes]) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
    for (int p = 0; p < kPlanes; ++p) sums[r][p] = Ops::multiply_bytes(sums[r][p], codes, x + r * kPlanes + p);
  }
}

template <int kShift, int kRows>
WONLY_ALWAYS_INLINE void add_planes(const PlaneRun* run, const float* scales, const float* shifts,
                                    const I (&sums)[kRows][kPlanes], float* totals) {
  const F scale = Ops::load(scales);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    float* total = totals + r * kTileN;
    F sum = Ops::fma(Ops::to_float(sums[r][1]), Ops::set1(256.0f), Ops::to_float(sums[r][0]));
    sum = Ops::fma(Ops::to_float(sums[r][2]), Ops::set1(65536.0f), sum);
    if constexpr (kShift == kOffsets) {
      sum = Ops::fma(sum, scale, Ops::mul(Ops::load(shifts), Ops::set1(run[r].total)));
      Ops::store(total, Ops::fma(sum, Ops::set1(run[r].unit), Ops::load(total)));
    } else {
      Ops::store(total, Ops::fma(sum, Ops::mul(scale, Ops::set1(run[r].unit)), Ops::load(total)));
    }
  }
}

struct PlanesArgs {
  const Weights& weights;
  const uint32_t* tiles;
  const Scratch& scratch;
};

// Adds the products of all inputs with kRows rows to totals[kRows][64], in lane order.
template <int kBits, int kShift, int kRows>
void planes_direct(const PlanesArgs& args, const uint32_t* x, const PlaneRun* run, float* totals) {
  using C = Codes<kBits>;
  constexpr int kQuads = C::kPerWord / 4;  // of inputs in a word
  const Weights& weights = args.weights;
  const int64_t count = weights.tiles_k() * C::kTile;
  for (int64_t begin = 0, end; begin < count; begin = end, run += kRows) {
    end = run_end(weights, begin);
    const int64_t group = weights.groups == 1 ? 0 : begin / weights.group_size();
    for (int atom = 0; atom < kAtomsPerTile; ++atom) {
      const int64_t at = group * kTileN + atom * kLanes;
      I sums[kRows][kPlanes];
      start_planes<kShift, kRows>(run, args.scratch.shifts + at, sums);
      for (int64_t tile = begin / C::kTile; tile < end / C::kTile; ++tile) {
        const uint32_t* words_in = args.tiles + tile * kTileWords + atom * kAtomWords;
        const uint32_t* x_word = x + tile * (C::kTile / 4) * kPlanes * kRows;
        I words[8];
        Ops::prefetch_atom(words_in + kPrefetchBytes / 4);
        Ops::load_atom(words_in, words);
        for (int j = 0; j < 8; ++j, x_word += kQuads * kPlanes * kRows) {
#pragma GCC unroll 2
          for (int q = 0; q < kQuads; ++q)
            multiply_planes<kRows>(Ops::byte_codes<kBits>(words[j], q), x_word + q * kPlanes * kRows, sums);
        }
      }
      add_planes<kShift, kRows>(run, args.scratch.scales + at, args.scratch.shifts + at, sums, totals + atom * kLanes);
    }
  }
}

// The same for one run, from codes laid out in the panel: for each atom `quads` vectors. Same sums, to the bit.
template <int kShift, int kRows>
void planes_panel(const float* panel, int64_t quads, const float* scales, const float* shifts, const uint32_t* x,
                  const PlaneRun* run, float* totals) {
  for (int atom = 0; atom < kAtomsPerTile; ++atom) {
    I sums[kRows][kPlanes];
    start_planes<kShift, kRows>(run, shifts + atom * kLanes, sums);
    const float* codes = panel + atom * quads * kLanes;
    const uint32_t* x_quad = x;
    for (int64_t q = 0; q < quads; ++q, x_quad += kPlanes * kRows)
      multiply_planes<kRows>(Ops::load_words(codes + q * kLanes), x_quad, sums);
    add_planes<kShift, kRows>(run, scales + atom * kLanes, shifts + atom * kLanes, sums, totals + atom * kLanes);
  }
}

template <int kBits>
void decode_planes(const uint32_t* tiles, int64_t begin, int64_t end, float* panel) {
  using C = Codes<kBits>;
  constexpr int kQuads = C::kPerWord / 4;
  for (int atom = 0; atom < kAtomsPerTile; ++atom) {
    for (int64_t tile = begin / C::kTile; tile < end / C::kTile; ++tile) {
      const uint32_t* words_in = tiles + tile * kTileWords + atom * kAtomWords;
      I words[8];
      Ops::prefetch_atom(words_in + kPrefetchBytes / 4);
      Ops::load_atom(words_in, words);
      for (int j = 0; j < 8; ++j)
        for (int q = 0; q < kQuads; ++q, panel += kLanes) Ops::store_words(panel, Ops::byte_codes<kBits>(words[j], q));
    }
  }
}

using PlanesDirect = void (*)(const PlanesArgs&, const uint32_t*, const PlaneRun*, float*);
using PlanesPanel = void (*)(const float*, int64_t, const float*, const float*, const uint32_t*, const PlaneRun*,
                             float*);

// Kernels for 1 to kPlaneRows rows.
template <int kShift, int... kRows>
struct PlanesTable {
  static PlanesDirect direct(int bits, int64_t rows) {
    static constexpr PlanesDirect four[] = {planes_direct<4, kShift, kRows>...};
    static constexpr PlanesDirect eight[] = {planes_direct<8, kShift, kRows>...};
    return (bits == 4 ? four : eight)[rows - 1];
  }
  static PlanesPanel panel(int64_t rows) {
    static constexpr PlanesPanel all[] = {planes_panel<kShift, kRows>...};
    return all[rows - 1];
  }
};

template <int kShift>
void matmul_planes(const MatmulTask& task, const Scratch& scratch) {
  using Table = PlanesTable<kShift, 1, 2, 3, 4, 5, 6, 7, 8>;
  const Weights& weights = task.weights;
  const PackedX& x = task.x;
  const uint32_t* tiles = tiles_of(weights, task.tile);
  const int64_t row_begin = x.block_begin(task.block_begin);
  const int64_t rows = x.block_begin(task.block_end) - row_begin;
  std::memset(scratch.totals, 0, sizeof(float) * rows * kTileN);
  const auto* x_data = static_cast<const uint32_t*>(x.data);
  if (task.block_end - task.block_begin == 1) {
    Table::direct(weights.bits, rows)({weights, tiles, scratch}, x_data + row_begin * x.row_elements(),
                                      x.plane_runs + row_begin * x.runs, scratch.totals);
    return finish(task, row_begin, rows, scratch.totals);
  }
  const int64_t count = weights.tiles_k() * tile_k(weights.bits);
  int64_t run = 0;
  for (int64_t begin = 0, end; begin < count; begin = end, ++run) {
    end = run_end(weights, begin);
    (weights.bits == 4 ? decode_planes<4> : decode_planes<8>)(tiles, begin, end, scratch.panel);
    const int64_t at = (weights.groups == 1 ? 0 : begin / weights.group_size()) * kTileN;
    for (int64_t block = task.block_begin; block < task.block_end; ++block) {
      const int64_t first = x.block_begin(block);
      const int64_t height = x.block_begin(block + 1) - first;
      const uint32_t* x_block = x_data + first * x.row_elements() + begin / 4 * kPlanes * height;
      if (block + 1 < task.block_end) {
        prefetch_block(reinterpret_cast<const float*>(x_block + height * x.row_elements()),
                       (end - begin) / 4 * kPlanes * height);
      }
      Table::panel(height)(scratch.panel, (end - begin) / 4, scratch.scales + at, scratch.shifts + at, x_block,
                           x.plane_runs + first * x.runs + run * height, scratch.totals + (first - row_begin) * kTileN);
    }
  }
  finish(task, row_begin, rows, scratch.totals);
}

void matmul_planes(const MatmulTask& task) {
  const Weights& weights = task.weights;
  const Scratch scratch(weights, task.scratch);
  scratch.load(weights, task.tile);
  if (weights.shift_mode == ShiftMode::kNone) return matmul_planes<kNone>(task, scratch);
  if (weights.shift_mode == ShiftMode::kZeros && weights.shift.type == DType::kU8)
    return matmul_planes<kZeros>(task, scratch);
  if (weights.shift_mode == ShiftMode::kZeros)
    for (int64_t i = 0; i < weights.groups * kTileN; ++i) scratch.shifts[i] *= -scratch.scales[i];
  matmul_planes<kOffsets>(task, scratch);
}

// values[0 .. end - begin) of one row as float32, zeros beyond k.
void load_run(const Weights& weights, Rows x, int64_t row, int64_t begin, int64_t end, float* values) {
  const int64_t inside = weights.k < end ? weights.k - begin : end - begin;
  load_row(x.data, x.type, row * weights.k + begin, inside, values);
  for (int64_t i = inside; i < end - begin; ++i) values[i] = 0.0f;
}

bool plane_exponents(const Weights& weights, Rows x, int64_t row, int16_t* exponents) {
  constexpr float kLargest = 127 * (65536 + 256 + 1);  // of three signed digits
  // Rounding to fixed point may cost what a few float32 roundings of each input would, relative to the mean magnitude.
  // And at most one input in eight may be left with fewer than 16 bits: a mean says little where few inputs dwarf the
  // others, and weights may be zero just there.
  constexpr float kTolerance = 1.0f / (1 << 20);
  constexpr float kFewBits = 1 << 15;
  const int64_t count = weights.tiles_k() * tile_k(weights.bits);
  alignas(64) float values[kRunInputs];
  bool good = true;
  for (int64_t begin = 0, end; begin < count; begin = end) {
    end = run_end(weights, begin);
    load_run(weights, x, row, begin, end, values);
    F largest_lanes = Ops::set1(0.0f), total = Ops::set1(0.0f);
    for (int64_t i = 0; i < end - begin; i += kLanes) {
      const F v = Ops::load(values + i);
      largest_lanes = Ops::max(largest_lanes, Ops::abs(v));
      total = Ops::add(total, Ops::mul(v, Ops::set1(0.0f)));  // NaN where an input is NaN or infinite
    }
    const float largest = Ops::largest(largest_lanes);
    if (!(Ops::sum(total) == 0.0f)) return false;
    const int32_t largest_bits = static_cast<int32_t>(as_bits(largest));
    int exponent = 22 + 127 - (largest_bits >> 23);
    exponent = exponent > 126 ? 126 : exponent;
    if (largest * as_float(static_cast<uint32_t>(exponent + 127) << 23) > kLargest) --exponent;
    const float factor = as_float(static_cast<uint32_t>(exponent + 127) << 23);
    F error = Ops::set1(0.0f), size = Ops::set1(0.0f);
    int64_t coarse = 0;
    for (int64_t i = 0; i < end - begin; i += kLanes) {
      const F v = Ops::mul(Ops::load(values + i), Ops::set1(factor));
      error = Ops::add(error, Ops::abs(Ops::sub(v, Ops::to_float(Ops::nearest(v)))));
      size = Ops::add(size, Ops::abs(v));
      coarse += Ops::count_nonzero_below(Ops::load(values + i), Ops::set1(factor), kFewBits);
    }
    good = good && Ops::sum(error) <= kTolerance * Ops::sum(size) && 8 * coarse <= end - begin;
    *exponents++ = static_cast<int16_t>(exponent);
  }
  return good;
}

template <int kBits>
void pack_planes(const PackedX& packed, const Weights& weights, Rows x, int64_t block) {
  using C = Codes<kBits>;
  constexpr int kTileQuads = C::kTile / 4;
  const int64_t first = packed.block_begin(block);
  const int64_t height = packed.block_begin(block + 1) - first;
  const int64_t count = weights.tiles_k() * C::kTile;
  const Ops::QuadOrder<kBits> order;
  alignas(64) float values[kRunInputs];
  alignas(64) int8_t digits[kPlanes][64] = {};
  alignas(64) uint32_t quads[kPlanes][16];
  for (int64_t r = 0; r < height; ++r) {
    const int64_t row = packed.x_row(first + r);
    const int16_t* exponents = packed.exponents + row * packed.runs;
    PlaneRun* run = packed.plane_runs + first * packed.runs + r;
    uint32_t* out = static_cast<uint32_t*>(packed.data) + first * packed.row_elements() + r * kPlanes;
    for (int64_t begin = 0, end; begin < count; begin = end, run += height) {
      end = run_end(weights, begin);
      load_run(weights, x, row, begin, end, values);
      const int exponent = *exponents++;
      const float factor = as_float(static_cast<uint32_t>(127 + exponent) << 23);
      int32_t sums[kPlanes] = {};
      for (int64_t k = 0; k < end - begin; k += C::kTile) {
        alignas(64) int32_t integers[C::kTile];
        for (int i = 0; i < C::kTile; i += kLanes)
          Ops::store_words(integers + i, Ops::nearest(Ops::mul(Ops::load(values + k + i), Ops::set1(factor))));
        for (int i = 0; i < C::kTile; ++i) {
          const int32_t integer = integers[i];
          const int32_t d0 = static_cast<int32_t>(static_cast<uint32_t>(integer) << 24) >> 24;
          const int32_t rest = (integer - d0) >> 8;
          const int32_t d1 = static_cast<int32_t>(static_cast<uint32_t>(rest) << 24) >> 24;
          const int32_t d2 = (rest - d1) >> 8;
          digits[0][i] = static_cast<int8_t>(d0);
          digits[1][i] = static_cast<int8_t>(d1);
          digits[2][i] = static_cast<int8_t>(d2);
          sums[0] += d0;
          sums[1] += d1;
          sums[2] += d2;
        }
        for (int p = 0; p < kPlanes; ++p) order.apply(digits[p], quads[p]);
        for (int q = 0; q < kTileQuads; ++q)
          for (int p = 0; p < kPlanes; ++p) out[q * height * kPlanes + p] = quads[p][q];
        out += kTileQuads * height * kPlanes;
      }
      run->unit = as_float(static_cast<uint32_t>(127 - exponent) << 23);
      run->total = static_cast<float>(sums[0] + int64_t{256} * sums[1] + int64_t{65536} * sums[2]);
      for (int p = 0; p < kPlanes; ++p) {
        run->sums[p] = sums[p];
        run->starts[p] = -bias_of(kBits) * sums[p];
      }
    }
  }
}
#endif

void pack_block(const PackedX& packed, const Weights& weights, Rows x, int64_t block) {
#if defined(WONLY_PLANES)
  if (packed.form == Form::kPlanes)
    return (weights.bits == 4 ? pack_planes<4> : pack_planes<8>)(packed, weights, x, block);
#endif
  constexpr int64_t kPiece = 64;
  const int64_t first = packed.block_begin(block);
  const int64_t height = packed.block_begin(block + 1) - first;
  uint32_t* out = static_cast<uint32_t*>(packed.data) + first * packed.row_elements();
  alignas(64) uint32_t piece[16][kPiece];
  const int64_t width = packed.form == Form::kF32 ? 1 : 2;
  for (int64_t k = 0; k < packed.k_padded; k += kPiece) {
    const int64_t inside = weights.k - k < kPiece ? weights.k - k : kPiece;
    for (int64_t r = 0; r < height; ++r) {
      if (first + r >= packed.rows || inside < kPiece) std::memset(piece[r], 0, sizeof(piece[r]));
      if (first + r >= packed.rows) continue;
      const int64_t at = packed.x_row(first + r) * weights.k + k;
      if (width == 1) {
        load_row(x.data, x.type, at, inside, reinterpret_cast<float*>(piece[r]));
      } else {
        std::memcpy(piece[r], static_cast<const uint16_t*>(x.data) + at, 2 * static_cast<size_t>(inside));
      }
    }
    const int64_t end = packed.k_padded - k < kPiece ? packed.k_padded - k : kPiece;
    uint32_t* to = out + k / width * height;
    for (int64_t i = 0; i < end / width; ++i)
      for (int64_t r = 0; r < height; ++r) to[i * height + r] = piece[r][i];
  }
}

void dequantize(const DequantizeTask& task) {
  const Weights& weights = task.weights;
  const Scratch scratch(weights, task.scratch);
  scratch.load(weights, task.tile);
  const uint32_t* tiles = tiles_of(weights, task.tile);
  const int64_t n0 = task.tile * kTileN;
  const int64_t count = weights.n - n0 < kTileN ? weights.n - n0 : kTileN;
  for (int64_t begin = task.k_begin; begin < task.k_end; begin += kChunk) {
    const int64_t end = begin + kChunk < task.k_end ? begin + kChunk : task.k_end;
    decode_f32(weights, tiles, begin, end, scratch, scratch.panel);
    for (int64_t k = begin; k < end; ++k) {
      alignas(64) float row[kTileN];
      for (int atom = 0; atom < kAtomsPerTile; ++atom)
        Ops::store_natural(row + atom * kLanes, Ops::load(scratch.panel + (k - begin) * kTileN + atom * kLanes));
      store_row(row, count, task.w, task.w_type, k * weights.n + n0);
    }
  }
}

// Scale and shift of one group for each output of a tile.
struct Parameters {
  float scale[kTileN];
  float shift[kTileN];
  int32_t flat[kTileN];  // the range rounds to a scale of zero: one code for the group
};

float clip(float v, float low, float high) {
  v = v > low ? v : low;  // NaN becomes low
  return v < high ? v : high;
}

// To the nearest integer, ties to even; |v| < 2^22.
float rint_of(float v) {
  const float rounder = 12582912.0f;  // 1.5 * 2^23
  return (v + rounder) - rounder;
}

void fit_group(const QuantizeTask& task, const float (&low)[kTileN], const float (&high)[kTileN], Parameters& p) {
  const float top = task.bits == 4 ? 15.0f : 255.0f;
  const float largest = largest_finite(task.scale_type);
  const float bias = static_cast<float>(bias_of(task.bits));
  for (int i = 0; i < kTileN; ++i) {
    float range;
    switch (task.mode) {
      case QuantizeMode::kSymmetric: {
        const float a = -low[i] > high[i] ? -low[i] : high[i];
        range = a / (bias - 1.0f);
        break;
      }
      default:
        range = (high[i] - low[i]) / top;
    }
    float scale = round_to(task.scale_type, range);
    scale = scale < largest ? scale : largest;
    float shift = 0.0f;
    p.flat[i] = scale == 0.0f;
    if (task.mode == QuantizeMode::kIntegerZeros) {
      shift = scale == 0.0f ? 0.0f : rint_of(clip(-low[i] / scale, 0.0f, top));
    } else if (task.mode == QuantizeMode::kFloatZeros) {
      if (scale != 0.0f) {
        shift = round_to(task.shift_type, -low[i] / scale);
      } else if (low[i] != 0.0f) {  // a constant group: (0 - zero) * scale is the constant
        scale = round_to(task.scale_type, low[i] < 0.0f ? -low[i] : low[i]);
        scale = scale < largest ? scale : largest;
        shift = low[i] > 0.0f ? -1.0f : 1.0f;
      }
    } else if (task.mode == QuantizeMode::kOffsets) {
      shift = round_to(task.shift_type, low[i]);
    }
    p.scale[i] = scale;
    p.shift[i] = shift;
  }
}

// codes[i] = the code of row[i].
void encode_row(const QuantizeTask& task, const Parameters& p, const float (&row)[kTileN], uint32_t (&codes)[kTileN]) {
  const float top = task.bits == 4 ? 15.0f : 255.0f;
  const float bias = static_cast<float>(bias_of(task.bits));
  switch (task.mode) {
    case QuantizeMode::kSymmetric:
      for (int i = 0; i < kTileN; ++i) {
        const float q = rint_of(clip(row[i] / p.scale[i], -bias, bias - 1.0f)) + bias;
        codes[i] = static_cast<uint32_t>(static_cast<int32_t>(p.flat[i] ? bias : q));
      }
      break;
    case QuantizeMode::kIntegerZeros:
      for (int i = 0; i < kTileN; ++i) {
        const float q = rint_of(clip(row[i] / p.scale[i], -p.shift[i], top - p.shift[i])) + p.shift[i];
        codes[i] = static_cast<uint32_t>(static_cast<int32_t>(p.flat[i] ? p.shift[i] : q));
      }
      break;
    case QuantizeMode::kFloatZeros:
      for (int i = 0; i < kTileN; ++i) {
        const float q = rint_of(clip(row[i] / p.scale[i] + p.shift[i], 0.0f, top));
        codes[i] = static_cast<uint32_t>(static_cast<int32_t>(p.flat[i] ? 0.0f : q));
      }
      break;
    case QuantizeMode::kOffsets:
      for (int i = 0; i < kTileN; ++i) {
        const float q = rint_of(clip((row[i] - p.shift[i]) / p.scale[i], 0.0f, top));
        codes[i] = static_cast<uint32_t>(static_cast<int32_t>(p.flat[i] ? 0.0f : q));
      }
      break;
  }
}

// One tile from codes[kTile][64]: words of all outputs for one run of inputs at a time, then each to its lane.
template <int kBits>
void pack_tile(const uint32_t (*codes)[kTileN], uint32_t* out) {
  using C = Codes<kBits>;
  for (int j = 0; j < 8; ++j) {
    uint32_t words[kTileN] = {};
    for (int i = 0; i < C::kPerWord; ++i) {
      const uint32_t (&row)[kTileN] = codes[C::base(j) + C::offset(i)];
      for (int n = 0; n < kTileN; ++n) words[n] |= row[n] << (kBits * i);
    }
    for (int n = 0; n < kTileN; ++n) out[n / kAtomN * kAtomWords + n % 8 * 16 + j * 2 + n % kAtomN / 8] = words[n];
  }
}

void quantize(const QuantizeTask& task) {
  const int64_t n0 = task.tile * kTileN;
  const int64_t count = task.n - n0 < kTileN ? task.n - n0 : kTileN;
  const int64_t group_size = task.k / task.groups;
  const int64_t tile_height = tile_k(task.bits);
  const int64_t tiles = ceil_div(task.k, tile_height);
  uint32_t* out = task.qw + task.tile * tiles * kTileWords;
  const uint32_t padding = static_cast<uint32_t>(bias_of(task.bits));
  uint32_t codes[64][kTileN];
  Parameters p;
  float row[kTileN] = {};
  int64_t group_end = 0;
  for (int64_t k = 0; k < tiles * tile_height; ++k) {
    if (k == group_end && k < task.k) {
      // Integer zeros: the range includes zero, so that zero has an exact code. Symmetric: absmax of the same two
      // bounds.
      const bool with_zero = task.mode == QuantizeMode::kSymmetric || task.mode == QuantizeMode::kIntegerZeros;
      float low[kTileN], high[kTileN];
      for (int i = 0; i < kTileN; ++i) {
        low[i] = with_zero ? 0.0f : as_float(0x7f800000u);
        high[i] = with_zero ? 0.0f : -as_float(0x7f800000u);
      }
      for (int64_t i = k; i < k + group_size; ++i) {
        load_row(task.w.data, task.w.type, i * task.n + n0, count, row);
        for (int c = 0; c < kTileN; ++c) {
          low[c] = row[c] < low[c] ? row[c] : low[c];
          high[c] = row[c] > high[c] ? row[c] : high[c];
        }
      }
      fit_group(task, low, high, p);
      const int64_t at = k / group_size * task.n + n0;
      store_row(p.scale, count, task.scales, task.scale_type, at);
      if (task.shift != nullptr) store_row(p.shift, count, task.shift, task.shift_type, at);
      group_end = k + group_size;
    }
    uint32_t (&code_row)[kTileN] = codes[k % tile_height];
    if (k < task.k) {
      load_row(task.w.data, task.w.type, k * task.n + n0, count, row);
      encode_row(task, p, row, code_row);
      for (int64_t c = count; c < kTileN; ++c) code_row[c] = padding;
    } else {
      for (uint32_t& code : code_row) code = padding;
    }
    if ((k + 1) % tile_height == 0) {
      (task.bits == 4 ? pack_tile<4> : pack_tile<8>)(codes, out + k / tile_height * kTileWords);
    }
  }
}

constexpr Engine make_engine(const char* name, bool pairs) {
  Engine engine{};
  engine.name = name;
  engine.direct_rows = Ops::kDirectRows;
  engine.panel_rows = Ops::kMicroRows;
  engine.pairs = pairs;
  engine.direct_width = direct_width;
  engine.pack_block = pack_block;
  engine.scratch_floats = Scratch::floats;
  engine.matmul_direct = matmul_direct;
  engine.matmul_panel = matmul_panel;
  engine.transposed_floats = transposed_floats;
  engine.matmul_transposed = matmul_transposed;
#if defined(WONLY_PLANES)
  engine.plane_rows = kPlaneRows;
  engine.plane_exponents = plane_exponents;
  engine.matmul_planes = matmul_planes;
#endif
  engine.quantize = quantize;
  engine.dequantize = dequantize;
  return engine;
}

}  // namespace
}  // namespace wonly::cpu
