// Rows in fixed point, as planes of signed bytes, for instructions that multiply bytes (Form::kPlanes). See
// kernel_parts.h.
#pragma once

#include <utility>

#include "cpu/kernel_parts.h"

namespace wonly::cpu {
namespace {

constexpr int kPlanes = 3;
// Sums of 16 bits, for codes of four bits and one block of rows alone.
constexpr bool kNarrow = Ops::kNarrowQuads > 0;

// kShift here. kZeros: integer zeros. kOffsets: shifts[] are what a unit of x adds by itself, offsets or -zero * scale.
template <int kShift, int kRows>
WONLY_ALWAYS_INLINE void start_planes(const PlaneRun* run, const float* shifts, I (&sums)[kRows][kPlanes]) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
    for (int p = 0; p < kPlanes; ++p) {
      if constexpr (kShift == kZeros)
        sums[r][p] = Ops::minus_product(run[r].starts[p], Ops::load(shifts), run[r].sums[p]);
      else
        sums[r][p] = Ops::set1_words(run[r].starts[p]);
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

template <int kBits, int kRows>
WONLY_ALWAYS_INLINE void multiply_words(const I* words, int count, const uint32_t* x, I (&sums)[kRows][kPlanes]) {
  constexpr int kQuads = Codes<kBits>::kPerWord / 4;  // of inputs in a word
  for (int j = 0; j < count; ++j, x += kQuads * kPlanes * kRows) {
#pragma GCC unroll 2
    for (int q = 0; q < kQuads; ++q)
      multiply_planes<kRows>(Ops::byte_codes<kBits>(words[j], q), x + q * kPlanes * kRows, sums);
  }
}

template <class O, int kRows>
WONLY_ALWAYS_INLINE void add_narrow(I (&sums)[kRows][kPlanes], const I (&narrow)[kRows][kPlanes]) {
  for (int r = 0; r < kRows; ++r)
    for (int p = 0; p < kPlanes; ++p) sums[r][p] = O::add_narrow(sums[r][p], narrow[r][p]);
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
        const uint32_t* x_word = x + tile * (C::kTile / 4) * kPlanes * kRows;
        I words[8];
        load_words(args.tiles, tile, atom, words);
        if constexpr (!kNarrow) {
          multiply_words<kBits, kRows>(words, 8, x_word, sums);
        } else {
          constexpr int kCount = Ops::kNarrowQuads / kQuads;
          for (int j = 0; j < 8; j += kCount, x_word += kCount * kQuads * kPlanes * kRows) {
            I narrow[kRows][kPlanes];
            for (auto& row : narrow)
              for (I& sum : row) sum = Ops::set1_words(0);
            multiply_words<kBits, kRows>(words + j, kCount, x_word, narrow);
            add_narrow<Ops, kRows>(sums, narrow);
          }
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
      I words[8];
      load_words(tiles, tile, atom, words);
      for (int j = 0; j < 8; ++j)
        for (int q = 0; q < kQuads; ++q, panel += kLanes) Ops::store_words(panel, Ops::byte_codes<kBits>(words[j], q));
    }
  }
}

using PlanesDirect = void (*)(const PlanesArgs&, const uint32_t*, const PlaneRun*, float*);
using PlanesPanel = void (*)(const float*, int64_t, const float*, const float*, const uint32_t*, const PlaneRun*,
                             float*);

// Kernels for 1 to Ops::kPlaneRows rows.
template <int kShift, class Indices = std::make_integer_sequence<int, Ops::kPlaneRows>>
struct PlanesTable;
template <int kShift, int... kIndex>
struct PlanesTable<kShift, std::integer_sequence<int, kIndex...>> {
  static PlanesDirect direct(int bits, int64_t rows) {
    static constexpr PlanesDirect four[] = {planes_direct<4, kShift, kIndex + 1>...};
    if constexpr (!kNarrow) {
      static constexpr PlanesDirect eight[] = {planes_direct<8, kShift, kIndex + 1>...};
      if (bits == 8) return eight[rows - 1];
    }
    return four[rows - 1];
  }
  static PlanesPanel panel(int64_t rows) {
    static constexpr PlanesPanel all[] = {planes_panel<kShift, kIndex + 1>...};
    return all[rows - 1];
  }
};

// Of several blocks of rows: codes go to the panel, run by run.
template <int kShift>
void matmul_plane_blocks(const MatmulTask& task, const Scratch& scratch) {
  const Weights& weights = task.weights;
  const PackedX& x = task.x;
  const auto* x_data = static_cast<const uint32_t*>(x.data);
  const uint32_t* tiles = tiles_of(weights, task.tile);
  const int64_t row_begin = x.block_begin(task.block_begin);
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
      PlanesTable<kShift>::panel(height)(scratch.panel, (end - begin) / 4, scratch.scales + at, scratch.shifts + at,
                                         x_block, x.plane_runs + first * x.runs + run * height,
                                         scratch.totals + (first - row_begin) * kTileN);
    }
  }
}

template <int kShift>
void matmul_planes(const MatmulTask& task, const Scratch& scratch) {
  const PackedX& x = task.x;
  const int64_t row_begin = x.block_begin(task.block_begin);
  const int64_t rows = x.block_begin(task.block_end) - row_begin;
  std::memset(scratch.totals, 0, sizeof(float) * rows * kTileN);
  if (kNarrow || task.block_end - task.block_begin == 1) {
    PlanesTable<kShift>::direct(task.weights.bits, rows)(
        {task.weights, tiles_of(task.weights, task.tile), scratch},
        static_cast<const uint32_t*>(x.data) + row_begin * x.row_elements(), x.plane_runs + row_begin * x.runs,
        scratch.totals);
  } else if constexpr (!kNarrow) {
    matmul_plane_blocks<kShift>(task, scratch);
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
        run->starts[p] =
            (Ops::kByteBias<kBits> - (weights.shift_mode == ShiftMode::kNone ? bias_of(kBits) : 0)) * sums[p];
      }
    }
  }
}

void pack_planes(const PackedX& packed, const Weights& weights, Rows x, int64_t block) {
  if constexpr (!kNarrow) {
    if (weights.bits == 8) return pack_planes<8>(packed, weights, x, block);
  }
  pack_planes<4>(packed, weights, x, block);
}

constexpr PlanesKernels kPlanesKernels{Ops::kPlaneRows, Ops::kMostPlaneRows, !kNarrow,
                                       plane_exponents, pack_planes,         matmul_planes};

}  // namespace
}  // namespace wonly::cpu
