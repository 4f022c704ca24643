// What every engine has, rows of x as float32 (Form::kF32) among it. See kernel_parts.h.
#pragma once

#include <initializer_list>

#include "cpu/products.h"

namespace wonly::cpu {
namespace {

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
  static void decode(const Weights& weights, const uint32_t* tiles, int64_t k_begin, int64_t k_end,
                     const Scratch& scratch, float* panel);
  static W load_weights(const float* panel) { return Ops::load(panel); }
  static F mac(F sum, W w, const X* x) { return Ops::fma(w, Ops::set1(*x), sum); }
};

int64_t direct_width(int64_t rows) {
  for (const int64_t width : {1, 2, 4, 6, 8, 12}) {
    if (rows <= width) return width;
  }
  return 16;
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
      load_words(tiles, tile, atom, words);
      for (int j = 0; j < 8; ++j) {
        const int64_t k = tile * C::kTile + C::base(j) - k_begin;
        if (k < 0 || k_begin + k >= ceil_div(k_end, 32) * 32) continue;  // the tile's other half
        decode_word<kBits, kShift>(decoder, words[j], scratch, group_at, static_cast<int>(k), atom * kLanes, panel);
      }
    }
  }
}

void F32Policy::decode(const Weights& weights, const uint32_t* tiles, int64_t k_begin, int64_t k_end,
                       const Scratch& scratch, float* panel) {
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
      F32Policy::decode(weights, tiles_of(weights, tile), k, k + inputs, scratch, scratch.panel);
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

void pack_block(const PackedX& packed, const Weights& weights, Rows x, int64_t block) {
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
    F32Policy::decode(weights, tiles, begin, end, scratch, scratch.panel);
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

constexpr Engine make_engine(const char* name, const PlanesKernels* planes = nullptr) {
  Engine engine{};
  engine.name = name;
  engine.direct_rows = Ops::kDirectRows;
  engine.panel_rows = Ops::kMicroRows;
  engine.direct_width = direct_width;
  engine.pack_block = pack_block;
  engine.scratch_floats = Scratch::floats;
  engine.matmul_direct = matmul_direct<F32Policy>;
  engine.matmul_panel = matmul_panel<F32Policy>;
  engine.transposed_floats = transposed_floats;
  engine.matmul_transposed = matmul_transposed;
  engine.quantize = quantize;
  engine.dequantize = dequantize;
  engine.planes = planes;
  return engine;
}

}  // namespace
}  // namespace wonly::cpu