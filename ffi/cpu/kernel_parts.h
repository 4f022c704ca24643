// What the kernels of all forms of x share, written once over Ops (a 16-lane float32 vector and the few things done to
// it). Each engine_*.cc defines Ops and includes the forms that it has; everything is in an anonymous namespace (see
// numbers.h).
#pragma once

#include <cstring>

#include "cpu/engine.h"
#include "cpu/numbers.h"
#include "cpu/word_order.h"

namespace wonly::cpu {
namespace {

using F = Ops::F;
using I = Ops::I;

constexpr int kLanes = 16;
constexpr int kChunk = kRunInputs;    // inputs of a panel
constexpr int kPrefetchBytes = 8192;  // ahead of the tile that is read

enum : int { kNone = 0, kZeros = 1, kOffsets = 2, kTable = 3 };  // ShiftMode as a template argument

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

// Words t[0..7] of an atom, which is asked for a while ahead.
WONLY_ALWAYS_INLINE void load_words(const uint32_t* tiles, int64_t tile, int atom, I (&words)[8]) {
  const uint32_t* words_in = tiles + tile * kTileWords + atom * kAtomWords;
  Ops::prefetch_atom(words_in + kPrefetchBytes / 4);
  Ops::load_atom(words_in, words);
}

// Asks for what the next block reads while this one is multiplied: blocks lie apart, and each would start with misses.
void prefetch_block(const float* x, int64_t elements) {
  for (int64_t i = 0; i < elements; i += 16) __builtin_prefetch(x + i);
}

}  // namespace
}  // namespace wonly::cpu
