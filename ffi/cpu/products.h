// Products of packed rows with the codes of a tile, written once over Ops and a Policy: how rows are packed, and what
// codes become. See kernel_parts.h.
#pragma once

#include "cpu/kernel_parts.h"

namespace wonly::cpu {
namespace {

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
        load_words(tiles, begin, atom, words);
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
          load_words(tiles, tile, atom, words);
          for (int j = 0; j < 8; ++j)
            multiply_word<Policy, Decoder, kRows, kParts, kBits>(
                decoder, words[j], x + tile * x_tile + C::base(j) / Policy::kWidth * kRows, sums);
        }
        add_scaled<kRows, kParts>(totals + atom * kLanes, Decoder::outer_scale(scales + at), sums);
      }
    }
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

template <class Policy>
void matmul_direct(const MatmulTask& task) {
  const Scratch scratch(task.weights, task.scratch);
  scratch.load(task.weights, task.tile);
  direct_for<Policy>(task.weights, task.x.rows_padded)(task.weights, tiles_of(task.weights, task.tile), task.x.data,
                                                       scratch.scales, scratch.shifts, scratch.totals);
  finish(task, 0, task.x.rows, scratch.totals);
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

template <class Policy>
void matmul_panel(const MatmulTask& task) {
  const Weights& weights = task.weights;
  const PackedX& x = task.x;
  const Scratch scratch(weights, task.scratch);
  scratch.load(weights, task.tile);
  const uint32_t* tiles = tiles_of(weights, task.tile);
  const int64_t row_begin = x.block_begin(task.block_begin);
  const int64_t rows = x.block_begin(task.block_end) - row_begin;
  std::memset(scratch.totals, 0, sizeof(float) * rows * kTileN);

  for (int64_t begin = 0, end; begin < weights.k; begin = end) {
    end = Policy::kFolds ? begin + kChunk : run_end(weights, begin);
    if (end > weights.k) end = weights.k;
    const float* scales = Policy::kFolds ? nullptr : scratch.scales + begin / weights.group_size() * kTileN;
    const int64_t count = ceil_div(end - begin, Policy::kWidth);
    Policy::decode(weights, tiles, begin, end, scratch, scratch.panel);
    for (int64_t block = task.block_begin; block < task.block_end; ++block) {
      const int64_t first = x.block_begin(block);
      const int64_t height = x.block_begin(block + 1) - first;
      const float* x_block =
          static_cast<const float*>(x.data) + first * x.row_elements() + begin / Policy::kWidth * height;
      if (block + 1 < task.block_end) prefetch_block(x_block + height * x.row_elements(), count * height);
      micro_for<Policy>(height)(scratch.panel, x_block, count, scales, scratch.totals + (first - row_begin) * kTileN);
    }
  }
  finish(task, row_begin, rows, scratch.totals);
}

}  // namespace
}  // namespace wonly::cpu
