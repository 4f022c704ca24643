// The ragged product for a few rows of an expert on Hopper, in one launch where the plan is a short one: mma.sync with
// weights loaded from global memory to the registers that they are multiplied from, exact codes as in
// matmul_resident.cuh, and up to eight rows of an expert as its columns.
//
// What there is to compute takes a few microseconds, so that what stands before the first load of weights and after the
// last is most of what can be saved. A CTA has a run of outputs of one tile of rows, a segment, whose activations are
// copied to its shared memory while weights are on their way. Its warps have as many units each, of 32 outputs x 64
// inputs (of eight bits 32), which follow each other along the inputs, and load them kAhead units at a time, and the
// next as soon as these have come. The inputs are cut into slices, each of whose sums a warp leaves in shared memory.
// Where tiles would leave many CTAs idle, or are more than there are CTAs, these share all strips of 32 outputs evenly,
// and take one segment after the other.
//
// float32 activations, up to four rows, are two fp16 numbers each, in units of the power of two of the largest one of a
// row's 128 inputs, and so two columns of the same products. They are copied as they are, and all warps make the
// numbers of them, in their place, while the first weights are on their way.
//
// Codes that index a table are looked up in pairs, in shared memory (pair_table.cuh); entries are rounded to 16-bit
// activations' type, or two fp16 numbers each with float32 ones.
//
// How they are cut depends on the shape alone, and slices are added in order: a row's result depends neither on the
// values of other rows nor on their experts.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <type_traits>

#include "cuda/device.h"
#include "cuda/element.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/exact_sum.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_warpgroup.cuh"
#include "cuda/pair_table.cuh"
#include "cuda/ptx.cuh"
#include "cuda/ptx_sm90.cuh"
#include "cuda/ragged_plan.cuh"
#include "cuda/ragged_resident.h"
#include "cuda/shift_kind.h"
#include "cuda/split_row.cuh"
#include "layout.h"

namespace wonly::ragged_resident {

using warpgroup::Convert;
using warpgroup::convert_half;
using warpgroup::look_up_half;

constexpr int kUnitAtoms = 2, kUnitOutputs = kUnitAtoms * kAtomN;
// Each executes the instructions before the first load of weights, so that few begin sooner; many are faster then. Few
// for up to so many units of a CTA.
constexpr int kFewWarps = 8, kMostWarps = 16, kFewUnits = 96;
constexpr int kMostSlices = 16, kAlikeParts = 8;
constexpr int kMostRows = 8, kFewRows = 4;      // of a tile; of float32 the few
constexpr int kSplitInputs = 128;               // whose numbers have a power of two of their own
constexpr int kSplitBlocks = 2;                 // of so many inputs that a warp splits at once
constexpr float kMostShare = 1.08f;             // of the warp that has most: otherwise tiles have fewer rows
constexpr int kBarrierBytes = 16, kUndoAt = 8;  // behind the barrier what undoes two tables' powers of two
constexpr int kTableAlignment = 128;
constexpr int kSumBytes = kUnitAtoms * kAtomN / 2 * 16;  // sums of a unit's outputs and two rows
constexpr int kNoGroups = 30;                            // log2 of a group of all inputs, in units
constexpr int kMaskedIds = 128;                          // as many CTAs put in order themselves, of kOwnExperts experts
constexpr int kMaskWords = kMaskedIds / 32;
// What a CTA reads in a nanosecond at most, the share of memory's rate that all can have, and what one could have read
// in the time that another segment costs. Measured on an H200.
constexpr float kReadRate = 36.f, kMemoryShare = 0.9f;
constexpr int64_t kSegmentBytes = 100000;
constexpr float kUnevenEnd = 0.03f;  // of a CTA's time, that warps wait for each other at the end of a segment

struct Params {
  // What the places of the first loads are made of is together: each line of constants is a wait of its own.
  ragged::Work work;
  const uint8_t* x;
  const uint32_t* qw;
  const uint8_t* scales;
  const uint8_t* shift;
  int64_t qw_stride, scales_stride, shift_stride;  // of an expert
  int outputs, strips, k_tiles;                    // a strip: kUnitOutputs outputs
  int most_strips;                                 // of a segment
  int few_tiles;                                   // up to which the CTAs of a tile share its outputs anyway
  int slices, slice_tiles;                         // that the inputs are cut into, and tiles of one but for the last
  int log2_group_units;                            // group size = inputs of a unit << this
  int x_row_bytes;                                 // which lie apart so that ldmatrix reads different banks
  int scale_bytes, shift_bytes;
  // In shared memory: factors of float32 numbers, a table, sums, and what finding a tile takes.
  int factors_at, table_at, sums_at, find_at;
  // What multiplies zeros and offsets is `of_shift` less the scale's bits that `scale_mask` leaves.
  uint32_t scale_mask;
  float of_shift;
  int64_t units;       // of a CTA with the most tiles
  uint32_t none;       // zero, which the compiler does not know
  bool masked;         // many ids, in the order of whose experts CTAs put them
  bool plain_results;  // of the activations' type
  bool changes_sums;   // by a bias or an activation function
  int saturating;      // CTAs that take all of the memory's bandwidth
  int split_strips;    // that a CTA multiplies in the time that another segment costs
  MatmulArgs args;
};

// kGroups: groups in a unit. kAnyTypes: scales and floating-point shifts may be of another type than 16-bit
// activations.
template <typename Input_, int kBits_, int kWarps_, int kGroups_, ShiftKind kShift_, bool kAnyTypes_>
struct Shape {
  using Input = Input_;
  static constexpr int kBits = kBits_, kUnitInputs = tile_k(kBits), kUnitBlocks = kUnitInputs / 32;
  static constexpr int kSplitUnits = kSplitInputs / kUnitInputs;
  static constexpr bool kSplit = std::is_same_v<Input, float>, kAnyTypes = kAnyTypes_;
  static_assert(!kSplit || kAnyTypes);
  using X = std::conditional_t<kSplit, __half, Input>;
  static constexpr int kMostRows = kSplit ? kFewRows : ragged_resident::kMostRows;  // of a tile
  static constexpr int kUnitRowBytes = kUnitInputs * static_cast<int>(sizeof(Input));
  static constexpr int kWarps = kWarps_, kThreads = kWarps * 32;
  // Units that a warp asks for at once; twice as many are a turn of its loop.
  static constexpr int kAhead = 2 * kMostWarps / kWarps;
  static constexpr int kGroups = kGroups_;
  static constexpr ShiftKind kShift = kShift_;
  static constexpr bool kSums = kShift == ShiftKind::kFloats;
  static constexpr bool kTable = kShift == ShiftKind::kTable;
  static constexpr int kPieces = kSplit ? 2 : 1;  // of a number
  // Outputs that are not finite are summed up again, term by term.
  static constexpr bool kExact = kSums || kSplit;
};

// a / b for 0 <= a < 2^21 and 0 < b: the half keeps the quotient further from an integer than its error.
__device__ __forceinline__ int divide(int a, int b) {
  return static_cast<int>(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
}

// All threads of a CTA: a tile of up to kMaskedIds rows with ids in any order, as find_in_ids of ragged_plan.cuh.
// `masks`: for each expert, and for none, which rows it has; and behind them a list for each warp.
template <typename Pick>
__device__ __forceinline__ bool find_in_many_ids(const ragged::Work& work, const int (&ids)[kMaskWords], Pick&& pick,
                                                 uint4* masks, ragged::OneTile* found) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t below = (1u << lane) - 1u;
  for (int i = threadIdx.x; i <= work.experts; i += blockDim.x) masks[i] = uint4{};
  __syncthreads();
  if (warp == 0) {
#pragma unroll
    for (int word = 0; word < kMaskWords; ++word) {
      if (ids[word] != -2) {
        const int bin = ids[word] < 0 ? work.experts : ids[word];
        atomicOr(reinterpret_cast<uint32_t*>(masks + bin) + word, 1u << lane);
      }
    }
  }
  __syncthreads();
  const auto place_in = [&](const uint4& mask, int word) {  // of this lane's row among those of the mask
    const uint32_t words[kMaskWords] = {mask.x, mask.y, mask.z, mask.w};
    int place = 0;
#pragma unroll
    for (int i = 0; i < kMaskWords; ++i) place += __popc(i < word ? words[i] : i == word ? words[i] & below : 0);
    return place;
  };
  int place[kMaskWords], tiles = 0;
  uint32_t leaders[kMaskWords];
#pragma unroll
  for (int word = 0; word < kMaskWords; ++word) {
    place[word] = 0;
    if (ids[word] != -2) place[word] = place_in(masks[ids[word] < 0 ? work.experts : ids[word]], word);
    leaders[word] = __ballot_sync(ragged::kAllLanes, ids[word] != -2 && (place[word] & (work.tile_rows - 1)) == 0);
    tiles += __popc(leaders[word]);
  }
  int tile = ragged::picked(pick, tiles), from = 0;
  if (tile >= tiles) return false;
#pragma unroll
  for (int word = 0; word < kMaskWords; ++word) {
    const bool leads = (leaders[word] >> lane & 1) && __popc(leaders[word] & below) == tile;
    const uint32_t leader = __ballot_sync(ragged::kAllLanes, leads);
    if (leader != 0) {
      found->expert = __shfl_sync(ragged::kAllLanes, ids[word], __ffs(leader) - 1);
      from = __shfl_sync(ragged::kAllLanes, place[word], __ffs(leader) - 1);
    }
    tile -= __popc(leaders[word]);
    if (tile < 0) tile = kMaskedIds;  // found
  }
  const uint4 mask = masks[found->expert < 0 ? work.experts : found->expert];
  found->rows = min(__popc(mask.x) + __popc(mask.y) + __popc(mask.z) + __popc(mask.w) - from, work.tile_rows);
  int* const list = reinterpret_cast<int*>(masks + work.experts + 1) + warp * kMostRows;
#pragma unroll
  for (int word = 0; word < kMaskWords; ++word) {
    const int at = place_in(mask, word) - from;
    if (ids[word] == found->expert && at >= 0 && at < found->rows) list[at] = word * 32 + lane;
  }
  __syncwarp();
  found->list = list;
  found->first = 0;
  found->members = 0;
  return true;
}

// The first of a warp's slices, among those of a CTA.
__device__ __forceinline__ int first_slice(int slices, int warp, int warps) {
  return static_cast<int>(static_cast<uint32_t>(slices * warp) / static_cast<uint32_t>(warps));
}

// float32 activations in shared memory become two fp16 numbers each, in their place, by all warps: those of 32 inputs
// of a row are 64 bytes of first numbers, and as many of second ones. They are multiplied by the power of two that
// makes the largest of a row's kSplitInputs inputs 2^14 or more; the numbers are then exact to 2^-22 of an activation,
// or 2^-39 of that largest one. A factor undoes it.
template <typename S>
__device__ __forceinline__ void split_rows(uint8_t* x, float* factors, int rows, const Params& params, int warp,
                                           int lane) {
  constexpr int kBlockBytes = kSplitInputs * 4, kUnitLanes = 32 / S::kSplitUnits;
  static_assert(kBlockBytes == 32 * sizeof(uint4));
  const int blocks = (params.k_tiles + S::kSplitUnits - 1) / S::kSplitUnits, items = rows * blocks;
#pragma unroll 1
  for (int first = warp * kSplitBlocks; first < items; first += S::kWarps * kSplitBlocks) {
    uint4 values[kSplitBlocks];
    uint8_t* places[kSplitBlocks];
    bool wanted[kSplitBlocks];
#pragma unroll
    for (int i = 0; i < kSplitBlocks; ++i) {
      const int item = min(first + i, items - 1), row = divide(item, blocks), block = item - row * blocks;
      places[i] = x + row * params.x_row_bytes + block * kBlockBytes;
      wanted[i] = first + i < items && block * S::kSplitUnits + lane / kUnitLanes < params.k_tiles;
      values[i] = wanted[i] ? *reinterpret_cast<const uint4*>(places[i] + lane * 16) : uint4{};
    }
    __syncwarp();  // all have read
#pragma unroll
    for (int i = 0; i < kSplitBlocks; ++i) {
      const uint32_t largest = largest_of_warp(values[i]), power = split_power(largest);
      uint2 first_numbers, second_numbers;
      split_four(values[i], split_factor(power), &first_numbers, &second_numbers);
      uint8_t* const to = places[i] + lane / 8 * (kBlockBytes / 4) + lane % 8 * 8;
      if (wanted[i]) {
        *reinterpret_cast<uint2*>(to) = first_numbers;
        *reinterpret_cast<uint2*>(to + kBlockBytes / 8) = second_numbers;
        if (lane == 0) factors[first + i] = __uint_as_float(split_undo(largest, power, 0));
      }
    }
  }
}

inline bool is_masked(const RaggedArgs& args) {
  return args.row_mode == RowMode::kIds && args.m > ragged::kOwnIds && args.m <= kMaskedIds &&
         args.experts <= ragged::kOwnExperts;
}
inline int find_bytes(const RaggedArgs& args) {
  const int experts = static_cast<int>(args.experts);
  return is_masked(args) ? (experts + 1) * static_cast<int>(sizeof(uint4)) + kMostWarps * kMostRows * 4
                         : ragged::kListBytes + ragged::plan_bytes(experts);
}

// Strips of a tile that a CTA multiplies at once.
struct Segment {
  int expert, rows, first_strip, strips;
  int row_of_lane;  // a row of the tile; of the last for lanes beyond it
};

// All threads: rows without an expert.
template <int kThreads>
__device__ __forceinline__ void fill_zeros(const Params& params, const Segment& of, const ragged::OneTile& rows) {
  const int first = of.first_strip * kUnitOutputs, outputs = min(of.strips * kUnitOutputs, params.outputs - first);
#pragma unroll 1
  for (int i = 0; i < of.rows; ++i) {
    const int64_t at = static_cast<int64_t>(rows.row(i)) * params.outputs + first;
#pragma unroll 1
    for (int n = threadIdx.x; n < outputs; n += kThreads) store_zero(params.args.y, at + n, params.args.y_dtype);
  }
  __syncthreads();  // `rows` may be in shared memory
}

// All warps: the sums of slices in order, of 16 lanes each for a strip and two of its rows; and the results.
template <typename S>
__device__ __forceinline__ void add_slices(const Params& params, const Segment& of, const uint8_t* sums, float unscale,
                                           int warp, int lane) {
  using X = typename S::X;
  const MatmulArgs& args = params.args;
  const int slices = params.slices, pairs = (of.rows + 1) / 2;
  const int items = of.strips * pairs * 16;
#pragma unroll 1
  for (int first = warp * 32; first < items; first += S::kThreads) {
    const int item = min(first + lane, items - 16 + lane % 16) / 16, of_item = divide(item, pairs);
    const int pair = item - of_item * pairs, of_pair = lane % 8;
    const int n = (of.first_strip + of_item) * kUnitOutputs + lane / 8 % 2 * kAtomN + of_pair;
    float bias[2] = {};
    if (__builtin_expect(args.has_bias, 0)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) bias[half] = output_bias(args, of.expert, n + 8 * half);
    }
    const uint8_t* at = sums + (of_item * slices * pairs + pair) * kSumBytes + lane % 16 * 16;
    float sum[4] = {};
#pragma unroll 4
    for (int i = 0; i < slices; ++i, at += pairs * kSumBytes) {
      const float4 v = *reinterpret_cast<const float4*>(at);
      sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    }
#pragma unroll
    for (float& value : sum) value *= unscale;
    const bool odd = of_pair % 2 == 1;
    const int row = __shfl_sync(0xffffffffu, of.row_of_lane, 2 * pair + odd);
    bool plain = params.plain_results;
    if (S::kExact) plain = plain && __all_sync(0xffffffffu, isfinite((sum[0] + sum[1]) + (sum[2] + sum[3])));
    if (__builtin_expect(plain && params.changes_sums, 0)) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] += bias[i / 2];
      apply(args.activation, sum, !S::kSplit);
    }
    if (S::kSplit && plain) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int output = n + i / 2 * 8;
        float* const y =
            static_cast<float*>(args.y) +
            static_cast<int64_t>(__shfl_sync(0xffffffffu, of.row_of_lane, 2 * pair + i % 2)) * params.outputs;
        if (first + lane < items && 2 * pair + i % 2 < of.rows && output < params.outputs) y[output] = sum[i];
      }
      continue;
    }
    if (plain) {
      // Neighbours along the outputs in one store: what even lanes have of the odd row is exchanged for what odd ones
      // have of the even one.
      uint16_t* const y = static_cast<uint16_t*>(args.y) + static_cast<int64_t>(row) * params.outputs + (n & ~1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float mine = odd ? sum[2 * half + 1] : sum[2 * half];
        const float theirs = __shfl_xor_sync(0xffffffffu, odd ? sum[2 * half] : sum[2 * half + 1], 1);
        const uint32_t both = odd ? from_float2<X>(theirs, mine) : from_float2<X>(mine, theirs);
        if (first + lane < items && 2 * pair + odd < of.rows && n + 8 * half < params.outputs) {
          reinterpret_cast<uint32_t*>(y)[4 * half] = both;
        }
      }
      continue;
    }
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const int of_one = __shfl_sync(0xffffffffu, of.row_of_lane, 2 * pair + i % 2), output = n + i / 2 * 8;
      if (first + lane >= items || 2 * pair + i % 2 >= of.rows || output >= params.outputs) continue;
      float value = i < 2 ? i == 0 ? sum[0] : sum[1] : i == 2 ? sum[2] : sum[3];
      // Where an infinity or a NaN took part, the shares of the codes and of the shift do not add up to what a weight
      // times it is.
      if (S::kExact && !isfinite(value))
        value = exact_sum<S::kTable>(args, of.expert, ragged::x_row(params.work, of_one), output, 0, args.k);
      finish(args, of.expert, of_one, output, value, i < 2 ? bias[0] : bias[1]);
    }
  }
}

// What a CTA has: `left` strips, of tile `tile` from its strip `strip` on, and of those behind it.
struct Share {
  int tile, strip, left;
};

// The tiles that there are share all CTAs. Those of a tile share its outputs where that takes no longer than even
// shares of all strips, which begin and end within tiles: then, of the CTAs that have most, strips that each has.
__device__ __forceinline__ Share share_of(const Params& params, int tiles) {
  const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x), strips = params.strips;
  const int each = divide(ctas, tiles), all = tiles * strips;
  bool of_tile = tiles <= params.few_tiles;
  if (!of_tile && each > 0) {
    const int of_memory = divide(all, params.saturating);  // near enough, of many
    of_tile =
        max(divide(strips + each - 1, each), of_memory) <= max(divide(all, ctas), of_memory) + params.split_strips;
  }
  if (of_tile) {
    const int part = divide(cta, tiles), tile = cta - part * tiles;
    // Alike where that leaves few CTAs idle: tiles of one expert then read its weights at the same time.
    const int parts = each + (each < kAlikeParts && tile < ctas - each * tiles);
    if (part >= parts) return {0, 0, 0};
    const int first = divide(strips * part, parts);
    return {tile, first, divide(strips * (part + 1), parts) - first};
  }
  const int least = all / ctas, more = all - least * ctas;  // which CTAs have one more
  const int first = least * cta + min(cta, more), tile = first / strips;
  return {tile, first - tile * strips, least + (cta < more)};
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1) ragged_resident_matmul(const __grid_constant__ Params params) {
#if __CUDA_ARCH__ >= 900
  using X = typename S::X;
  using C = Convert<X>;
  constexpr int kBits = S::kBits, kUnitBlocks = S::kUnitBlocks;
  constexpr int kGroups = S::kGroups, kAhead = S::kAhead, kThreads = S::kThreads;
  extern __shared__ __align__(128) uint8_t shared[];
  const MatmulArgs& args = params.args;
  const ragged::Work& work = params.work;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);

  uint64_t* const arrived = reinterpret_cast<uint64_t*>(shared);
  uint8_t* const x = shared + kBarrierBytes;
  uint8_t* const sums = shared + params.sums_at;  // of all slices
  Share share{-1, 0, 0};
  const auto pick = [&](int tiles) {
    if (share.tile < 0) share = share_of(params, tiles);
    return share.tile;
  };
  const auto find = [&](ragged::OneTile* found) {
    if (!params.masked) {
      return ragged::find_tile(work, ragged::load_id(work), pick, shared + params.find_at, found);
    }
    int ids[kMaskWords];
#pragma unroll
    for (int word = 0; word < kMaskWords; ++word) {
      ids[word] = word * 32 + lane < work.m ? work.rows[word * 32 + lane] : -2;
    }
#pragma unroll
    for (int word = 0; word < kMaskWords; ++word) {
      if (word * 32 + lane < work.m && (ids[word] < 0 || ids[word] >= work.experts)) ids[word] = -1;
    }
    return find_in_many_ids(work, ids, pick, reinterpret_cast<uint4*>(shared + params.find_at), found);
  };

  bool first = true;
  uint32_t turn = 0;  // of the barrier
#pragma unroll 1
  while (true) {
    ragged::OneTile rows;
    if (!find(&rows) || share.left == 0) return;
    const int strips = min(min(share.left, params.strips - share.strip), params.most_strips);
    Segment now{rows.expert, rows.rows, share.strip, strips, 0};
    const bool ends = share.strip + strips == params.strips;
    share = {share.tile + ends, ends ? 0 : share.strip + strips, share.left - strips};
    if (now.expert < 0) {
      fill_zeros<kThreads>(params, now, rows);
      if (share.left == 0) return;
      continue;
    }

    // Activations before weights: they would come behind those.
    if (threadIdx.x == 0) {
      const int row_bytes = params.k_tiles * S::kUnitRowBytes;
      if (first) {
        ptx::barrier_init(arrived, 1);
        ptx::barrier_init_fence();
      }
      ptx::barrier_expect(arrived, now.rows * row_bytes);
#pragma unroll 1
      for (int i = 0; i < now.rows; ++i) {
        const int64_t x_row = ragged::x_row(work, rows.row(i));
        ptx::bulk_copy(x + i * params.x_row_bytes, params.x + x_row * row_bytes, row_bytes, arrived);
      }
    }

    // This warp's slices of strips, and the loads of the next units: words, and the scale and shift of the lane's
    // output. What is not loaded belongs to outputs that nobody stores.
    const int k_tiles = params.k_tiles, slices = params.slices;
    const int begin = first_slice(now.strips * slices, warp, S::kWarps),
              end = first_slice(now.strips * slices, warp + 1, S::kWarps);
    const int begin_strip = divide(begin, slices), begin_tile = (begin - begin_strip * slices) * params.slice_tiles;
    int fetch_strip = now.first_strip + begin_strip, fetch_tile = begin_tile, to_fetch = end - begin;
    int fetch_end = min(begin_tile + params.slice_tiles, k_tiles);
    const uint32_t* fetch_words = params.qw + now.expert * params.qw_stride +
                                  static_cast<int64_t>((fetch_strip >> 1) * k_tiles + fetch_tile) * kTileWords +
                                  ((fetch_strip & 1) * (kUnitAtoms * kAtomWords) + lane * 4);
    const int scale_bytes = S::kAnyTypes ? params.scale_bytes : 2;
    const int shift_bytes = S::kShift == ShiftKind::kBytes ? 1 : S::kAnyTypes ? params.shift_bytes : 2;
    // Numbers of any type are loaded in four bytes, which one of two is half of: rows are whole pieces of those. Where
    // it is in them is a selector, which makes it the upper part of a float32.
    const auto piece_of = [&](int bytes) { return S::kAnyTypes && bytes == 2 ? lane / 2 * 4 : lane * bytes; };
    const auto part_of = [&](int bytes) { return bytes == 4 ? 0x3210u : lane % 2 == 0 ? 0x1044u : 0x3244u; };
    const uint8_t* const scales = params.scales + now.expert * params.scales_stride + piece_of(scale_bytes);
    const uint8_t* const shift = params.shift + now.expert * params.shift_stride + piece_of(shift_bytes);
    uint4 words[2][kAhead][kUnitAtoms] = {};
    uint32_t scale_bits[2][kAhead][kGroups] = {}, shift_bits[2][kAhead][kGroups] = {};
    // Up to kAhead units of a slice; returns how many. `none` is zero. The first loads are not ones that the compiler
    // may put behind the barrier after them.
    const auto fetch = [&](auto first, int buffer, uint32_t none) {
      const int count = (to_fetch > 0 ? min(fetch_end - fetch_tile, kAhead) : 0) | static_cast<int>(none);
      const bool inside = fetch_strip * kUnitOutputs + lane < params.outputs;
#pragma unroll
      for (int slot = 0; slot < kAhead; ++slot) {
        const bool wanted = slot < count;
#pragma unroll
        for (int atom = 0; atom < kUnitAtoms; ++atom) {
          ptx::load_once<!first.value>(words[buffer][slot][atom], fetch_words + slot * kTileWords + atom * kAtomWords,
                                       wanted);
        }
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          const int tile = fetch_tile + slot;
          const int group = kGroups > 1 ? tile * kGroups + i : tile >> params.log2_group_units;
          const int at = group * params.outputs + fetch_strip * kUnitOutputs;
          [[maybe_unused]] const uint8_t* const of_shift = shift + int64_t{at} * shift_bytes;
          [[maybe_unused]] uint32_t& bits = shift_bits[buffer][slot][i];
          constexpr int kBytes = S::kAnyTypes ? 4 : 2;
          ptx::load_part<kBytes, !first.value>(scale_bits[buffer][slot][i], scales + int64_t{at} * scale_bytes,
                                               wanted && inside);
          if constexpr (S::kShift == ShiftKind::kBytes)
            ptx::load_part<1, !first.value>(bits, of_shift, wanted && inside);
          if constexpr (S::kSums) ptx::load_part<kBytes, !first.value>(bits, of_shift, wanted && inside);
        }
      }
      fetch_tile += count;
      fetch_words += count * kTileWords;
      if (fetch_tile == fetch_end) {
        --to_fetch;
        if (fetch_tile == k_tiles) {  // on to the other half of these tiles, or the first of the next
          fetch_tile = 0;
          ++fetch_strip;
          fetch_words +=
              (fetch_strip & 1) != 0 ? kUnitAtoms * kAtomWords - k_tiles * kTileWords : -kUnitAtoms * kAtomWords;
        }
        fetch_end = min(fetch_tile + params.slice_tiles, k_tiles);
      }
      return count;
    };
    int counts[2] = {fetch(std::true_type{}, 0, 0), 0};
    prefetch_bias(args, now.expert, now.first_strip * kUnitOutputs, now.strips * kUnitOutputs, threadIdx.x);

    const uint32_t table = ptx::shared_address(shared + params.table_at);
    float* const undo_table = reinterpret_cast<float*>(shared + kUndoAt) + turn;  // the segment before has the other
    if constexpr (S::kTable) {
      fill_table<X, S::kPieces>(args, now.expert, shared + params.table_at, undo_table, threadIdx.x);
    }

    if (lane < S::kMostRows) now.row_of_lane = rows.row(min(lane, now.rows - 1));
    __syncthreads();
    ptx::barrier_wait(arrived, turn);

    // Where this lane's pieces of 16 bytes for ldmatrix are, and how far from those of a block those of the next.
    constexpr int kBlockStep = S::kUnitRowBytes / kUnitBlocks;
    uint32_t lane_x = ptx::shared_address(x) + begin_tile * S::kUnitRowBytes + lane / 8 * 16;
    const float* lane_factors = nullptr;  // of row t
    if constexpr (S::kSplit) {
      float* const factors = reinterpret_cast<float*>(shared + params.factors_at);
      split_rows<S>(x, factors, now.rows, params, warp, lane);
      ptx::fence_shared_for_async();  // the next segment's are copied there
      __syncthreads();
      lane_factors = factors + min(t, now.rows - 1) * ((params.k_tiles + S::kSplitUnits - 1) / S::kSplitUnits);
      lane_x += min(lane % 8 / 2, now.rows - 1) * params.x_row_bytes + lane % 2 * (kBlockStep / 2);
    } else {
      lane_x += min(lane % 8, now.rows - 1) * params.x_row_bytes;
    }
    const int pairs = (now.rows + 1) / 2;
    constexpr int kRowsOfLane = S::kSplit ? 1 : 2;
    float acc[kUnitAtoms][2 * kRowsOfLane] = {};
    int slice = begin, tile = begin_tile, slice_end = min(begin_tile + params.slice_tiles, k_tiles);
#pragma unroll 1
    for (bool more = counts[0] > 0; more;) {
#pragma unroll
      for (int buffer = 0; buffer < 2; ++buffer) {
        const int count = counts[buffer];
        if (count == 0) {
          more = false;
          break;
        }
        // Loads are counted together, so whoever waits for some waits for all that were asked for before. The next ones
        // therefore go out when these have come, which a condition that depends on them makes sure of.
        counts[1 - buffer] = fetch(std::false_type{}, 1 - buffer, words[buffer][0][0].x & params.none);
#pragma unroll
        for (int slot = 0; slot < kAhead; ++slot) {
          if (slot >= count) break;
          const uint4(&unit_words)[kUnitAtoms] = words[buffer][slot];
          constexpr int kGroupBlocks = kUnitBlocks / kGroups;
          float of_lane_scale[kGroups], of_lane_shift[kGroups];
          uint32_t of_lane_zero[kGroups];
#pragma unroll
          for (int j = 0; j < kGroups; ++j) {
            const auto number = [&](uint32_t bits, DType type, int bytes) {
              if constexpr (!S::kAnyTypes) return to_floats<X>(bits).x;
              const uint32_t upper = __byte_perm(bits, 0, part_of(bytes));
              return type == DType::kF16 ? to_floats<__half>(upper).y : __uint_as_float(upper);
            };
            of_lane_scale[j] = number(scale_bits[buffer][slot][j], args.scale_dtype, scale_bytes);
            of_lane_zero[j] = 0;
            of_lane_shift[j] = 0.f;
            if constexpr (S::kShift == ShiftKind::kBytes)
              of_lane_zero[j] = C::minus_bytes(ptx::low_twice(shift_bits[buffer][slot][j]));
            if constexpr (S::kSums) {
              const float scale = __uint_as_float(__float_as_uint(of_lane_scale[j]) & params.scale_mask);
              const float value = number(shift_bits[buffer][slot][j], args.shift_dtype, shift_bytes);
              of_lane_shift[j] = value * ((params.of_shift - scale) * 0x1p-13f);
            }
          }
          float products[kUnitAtoms][kGroups][4] = {}, x_sums[kGroups][4] = {};
#pragma unroll
          for (int block = 0; block < kUnitBlocks; ++block) {
            uint32_t inputs[4];
            ptx::load_matrices(inputs, lane_x + slot * S::kUnitRowBytes + block * kBlockStep);
            const auto multiply = [&](float (&to)[4], const uint32_t (&a)[4], int step) {
              ptx::mma<C::kBf16>(to, a, inputs[2 * step], inputs[2 * step + 1]);
            };
#pragma unroll
            for (int atom = 0; atom < kUnitAtoms; ++atom) {
              uint32_t minus_zero[2], codes[2][4], second_numbers[2][4];
#pragma unroll
              for (int j = 0; j < 2; ++j) {
                minus_zero[j] = S::kSums ? 0 : C::minus_zero(bias_of(kBits));
                if constexpr (S::kShift == ShiftKind::kBytes) {
                  minus_zero[j] =
                      __shfl_sync(0xffffffffu, of_lane_zero[block / kGroupBlocks], atom * kAtomN + 8 * j + g);
                }
              }
              const uint4& w = unit_words[atom];
              const uint32_t low = block == 0 ? w.x : w.z, high = block == 0 ? w.y : w.w;
              if constexpr (S::kTable) {
                look_up_half<S::kPieces, kWideRowBytes>(low, high, table, lane, codes, second_numbers);
              } else {
                if constexpr (kBits == 8) {  // a vector of words is one block
                  convert_half<X, kBits>(w.z, w.w, minus_zero[0], minus_zero[1], codes + 1);
                }
                convert_half<X, kBits>(low, high, minus_zero[0], minus_zero[1], codes);
              }
#pragma unroll
              for (int step = 0; step < 2; ++step) {
                multiply(products[atom][block / kGroupBlocks], codes[step], step);
                if constexpr (S::kTable && S::kPieces > 1) {
                  multiply(products[atom][block / kGroupBlocks], second_numbers[step], step);
                }
              }
            }
            if constexpr (S::kSums) {
              constexpr uint32_t kOnes = C::kBf16 ? 0x3f803f80u : 0x3c003c00u;
              const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
              multiply(x_sums[block / kGroupBlocks], ones, 0);
              multiply(x_sums[block / kGroupBlocks], ones, 1);
            }
          }
          float of_unit[2 * kUnitAtoms] = {};  // of float32 activations
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
#pragma unroll
            for (int half = 0; half < 2 * kUnitAtoms; ++half) {
              const auto given = [&](float of_lane) { return __shfl_sync(0xffffffffu, of_lane, half * 8 + g); };
              const float scale = given(of_lane_scale[group]), factor = S::kSums ? given(of_lane_shift[group]) : 0.f;
              const float* const of_rows = products[half / 2][group] + half % 2 * 2;
              if constexpr (S::kSplit) {
                of_unit[half] = fmaf(scale, of_rows[0] + of_rows[1], of_unit[half]);
                if constexpr (S::kSums)
                  of_unit[half] = fmaf(factor, x_sums[group][0] + x_sums[group][1], of_unit[half]);
              } else {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                  float& to = acc[half / 2][half % 2 * 2 + j];
                  to = fmaf(scale, of_rows[j], to);
                  if constexpr (S::kSums) to = fmaf(factor, x_sums[group][j], to);
                }
              }
            }
          }
          if constexpr (S::kSplit) {
            const float factor = lane_factors[(tile + slot) / S::kSplitUnits];
#pragma unroll
            for (int half = 0; half < 2 * kUnitAtoms; ++half) {
              acc[half / 2][half % 2] = fmaf(factor, of_unit[half], acc[half / 2][half % 2]);
            }
          }
        }
        tile += count;
        lane_x += count * S::kUnitRowBytes;
        if (tile == slice_end) {
          // Lane 4g + t has outputs g and g + 8 of both halves, of rows 2t and 2t + 1; of float32 activations row t.
          if (S::kSplit && t < 2 * pairs) {
            uint8_t* const to = sums + (slice * pairs + t / 2) * kSumBytes + g * 16 + t % 2 * 4;
#pragma unroll
            for (int half = 0; half < 2 * kUnitAtoms; ++half) {
              *reinterpret_cast<float*>(to + half / 2 * (kSumBytes / 2) + half % 2 * 8) = acc[half / 2][half % 2];
            }
          }
          if (!S::kSplit && t < pairs) {
            uint8_t* const to = sums + (slice * pairs + t) * kSumBytes + g * 16;
#pragma unroll
            for (int atom = 0; atom < kUnitAtoms; ++atom) {
              const float* const of_atom = acc[atom];
              *reinterpret_cast<float4*>(to + atom * (kSumBytes / 2)) = {of_atom[0], of_atom[1], of_atom[2],
                                                                         of_atom[3]};
            }
          }
#pragma unroll
          for (int atom = 0; atom < kUnitAtoms; ++atom) {
#pragma unroll
            for (float& value : acc[atom]) value = 0.f;
          }
          ++slice;
          if (tile == k_tiles) {
            lane_x -= tile * S::kUnitRowBytes;
            tile = 0;
          }
          slice_end = min(tile + params.slice_tiles, k_tiles);
        }
      }
    }
    __syncthreads();
    add_slices<S>(params, now, sums, S::kTable ? *undo_table : C::kUnscale, warp, lane);
    if (share.left == 0) return;
    first = false;
    turn ^= 1;
  }
#else
  __trap();
#endif
}

// How many slices, up to `most`, the inputs are cut into, so that warps have about as many units of up to `strips`
// strips each. By nothing that is known on the device alone: a row's sums would depend on the others. Returns the units
// of the warp that has most, in proportion to those of all.
template <typename S>
float share_out(int strips, int most, Params* params) {
  const int k_tiles = params->k_tiles, fewer = static_cast<int>(ceil_div(strips * 3, 4));
  const float of_strips = 2.f / static_cast<float>(strips), of_fewer = 1.f / static_cast<float>(fewer);
  float least = 0.f;
  for (int slices = 1; slices <= std::min(most, kMostSlices); ++slices) {
    const int tiles = static_cast<int>(ceil_div(k_tiles, slices)), used = static_cast<int>(ceil_div(k_tiles, tiles));
    if (slices > 1 && tiles < S::kAhead) break;  // a warp would ask for fewer at once
    const auto rounds = [&](int some) { return static_cast<float>(ceil_div(some * used, S::kWarps)); };
    // Of the most strips, and of fewer, where rows have less different experts; the finer, the better for others.
    const float of_both = rounds(strips) * of_strips + rounds(fewer) * of_fewer;
    const float share = of_both * static_cast<float>(tiles * S::kWarps);
    if (slices > 1 && (share > least || (share == least && S::kWarps == kFewWarps))) continue;
    least = share;
    params->slice_tiles = tiles;
    params->slices = used;
  }
  return least / static_cast<float>(3 * k_tiles);
}

// The same where there is no room for the sums of all strips, but of `room` strips and slices: how many strips at most
// are a segment, a whole number for each warp. Where even shares end, half of the warps have nothing on average.
template <typename S>
float cut_up(int strips, int room, Params* params) {
  const int k_tiles = params->k_tiles;
  const float of_strips = 1.f / static_cast<float>(strips);
  float least = INFINITY;
  for (int slices = 1; slices <= kMostSlices; ++slices) {
    const int tiles = static_cast<int>(ceil_div(k_tiles, slices)), used = static_cast<int>(ceil_div(k_tiles, tiles));
    if (slices > 1 && tiles < S::kAhead) break;
    const int step = S::kWarps / std::min(S::kWarps, used & -used);  // the greatest common divisor
    const int segment = room / used / step * step;
    if (segment <= 0) continue;
    const int segments = strips / segment, rest = strips % segment, others = segments + (rest > 0) - 1;
    const int64_t rounds = segments * segment * used / S::kWarps + ceil_div(rest * used, S::kWarps);
    const float units =
        static_cast<float>(rounds) * static_cast<float>(tiles * S::kWarps) / static_cast<float>(k_tiles);
    const float ends = static_cast<float>(others * params->split_strips) +
                       static_cast<float>((others + 1) * S::kWarps) / static_cast<float>(2 * used);
    const float share = (units + ends) * of_strips + static_cast<float>(others) * kUnevenEnd;
    if (share >= least) continue;
    least = share;
    params->slice_tiles = tiles;
    params->slices = used;
    params->most_strips = segment;
  }
  return least;
}

// Sets what `params` has in shared memory for tiles of `rows` rows; false where there is not enough.
template <typename S>
bool lay_out(const RaggedArgs& args, int rows, int multiprocessors, int shared_bytes, Params* params) {
  // Of a tile's outputs a CTA has as many as it has with the most tiles.
  const int64_t tiles = ragged::most_tiles(ragged::own_work(args, rows));
  const int64_t parts = multiprocessors / std::min<int64_t>(tiles, multiprocessors);
  const int strips = static_cast<int>(ceil_div(params->strips, parts));
  const int strip_bytes = (rows + 1) / 2 * kSumBytes;  // of a slice
  params->factors_at = kBarrierBytes + rows * params->x_row_bytes;
  params->sums_at = params->factors_at;
  if (S::kSplit) {
    const int64_t factors = rows * ceil_div(params->k_tiles, S::kSplitUnits);
    params->sums_at += static_cast<int>(ceil_div(factors * 4, 16) * 16);
  }
  if (S::kTable) {
    params->table_at = static_cast<int>(ceil_div(params->sums_at, kTableAlignment) * kTableAlignment);
    params->sums_at = params->table_at + kTablePairs * kWideRowBytes;
  }
  const int room = (shared_bytes - params->sums_at - find_bytes(args)) / strip_bytes, most = room / strips;
  params->most_strips = strips;
  float share = INFINITY;
  if (most >= (rows > 1 ? 2 : 1)) share = share_out<S>(strips, most, params);  // with one few have all to do
  if (share > kMostShare) {
    Params cut = *params;
    const float of_cut = cut_up<S>(strips, room, &cut);
    if (of_cut < share) {
      *params = cut;
      share = of_cut;
    }
  }
  // With less rows there is room for sums of more slices.
  if (share > kMostShare && (rows > kFewRows || share == INFINITY)) return false;
  params->find_at = params->sums_at + params->slices * params->most_strips * strip_bytes;
  params->units = int64_t{strips} * params->k_tiles;
  return true;
}

template <typename S>
cudaError_t launch_shape(Params params, const RaggedArgs& args, const Device& device, cudaStream_t stream) {
  const int multiprocessors = device.multiprocessors, shared_bytes = shared_share(device, 1);
  int rows = S::kMostRows;
  while (!lay_out<S>(args, rows, multiprocessors, shared_bytes, &params)) {
    if (rows == 1) return cudaErrorInvalidConfiguration;
    rows /= 2;
  }
  if constexpr (S::kWarps == kMostWarps && S::kGroups == 1 && !S::kSums) {
    if (params.units <= kFewUnits) {
      using Few = Shape<typename S::Input, S::kBits, kFewWarps, S::kGroups, S::kShift, S::kAnyTypes>;
      return launch_shape<Few>(params, args, device, stream);
    }
  }
  params.work = ragged::own_work(args, rows);
  if (ragged::most_tiles(params.work) > INT_MAX / params.strips) return cudaErrorInvalidConfiguration;
  params.masked = is_masked(args);
  if (!params.masked) {
    const cudaError_t error = ragged::plan(args, rows, false, shared_bytes, stream, &params.work);
    if (error != cudaSuccess) return error;
  }
  // Of `each` CTAs some have strips / each - strips / (each + 1) more than with even shares, at most.
  int each = 1;
  while (each * (each + 1) * params.split_strips < params.strips) ++each;
  params.few_tiles = multiprocessors / each;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(multiprocessors));
  shape.threads = S::kThreads;
  shape.shared_bytes = params.find_at + find_bytes(args);
  return launch_kernel(ragged_resident_matmul<S>, shape, stream, params);
}

template <typename Input, int kBits>
cudaError_t launch_typed(const RaggedArgs& ragged, const Device& device, cudaStream_t stream) {
  const MatmulArgs& args = ragged.product;
  Params params{};
  params.args = args;
  params.x = static_cast<const uint8_t*>(args.x);
  params.qw = args.qw;
  params.scales = static_cast<const uint8_t*>(args.scales);
  params.shift = static_cast<const uint8_t*>(args.shift);
  params.qw_stride = args.qw_batch_stride;
  params.scale_bytes = element_size(args.scale_dtype);
  params.scales_stride = args.scales_batch_stride * params.scale_bytes;
  params.outputs = static_cast<int>(args.n);
  params.strips = static_cast<int>(ceil_div(args.n, kUnitOutputs));
  params.k_tiles = static_cast<int>(args.k / tile_k(kBits));
  params.x_row_bytes = static_cast<int>(args.k * sizeof(Input)) + 16;
  params.saturating = device.multiprocessors;
  if (device.memory_rate > 0.f) {
    const int readers = static_cast<int>(device.memory_rate * kMemoryShare / kReadRate);
    params.saturating = std::clamp(readers, 1, device.multiprocessors);
  }
  params.split_strips =
      static_cast<int>(ceil_div(kSegmentBytes, params.k_tiles * int64_t{kUnitAtoms * kAtomWords * 4}));
  const int log2 = log2_group_blocks(args);
  params.log2_group_units = log2 < 0 ? kNoGroups : log2 - (kBits == 4);
  const bool offsets = args.shift_mode == ShiftMode::kOffsets;
  params.scale_mask = offsets ? 0 : 0xffffffffu;
  params.of_shift = offsets ? 1.f : 0.f;
  params.plain_results = args.y_dtype == args.x_dtype;
  params.changes_sums = args.has_bias || args.activation != Activation::kNone;
  params.shift_bytes = element_size(args.shift_dtype);
  params.shift_stride = args.shift_batch_stride * params.shift_bytes;
  const auto launch = [&](auto groups, auto shift) {
    const auto launch_types = [&](auto any) {
      using Of = Shape<Input, kBits, kMostWarps, groups.value, shift.value, any.value>;
      return launch_shape<Of>(params, ragged, device, stream);
    };
    // Others take as long with any types.
    constexpr bool kPlain = kBits == 4 && groups.value == 1 && shift.value == ShiftKind::kNone;
    if constexpr (kPlain && !std::is_same_v<Input, float>) {
      if (args.scale_dtype == args.x_dtype) return launch_types(std::false_type{});
    }
    return launch_types(std::true_type{});
  };
  const auto launch_groups = [&](auto shift) {
    if constexpr (kBits == 4) {
      if (log2 == 0) return launch(std::integral_constant<int, 2>{}, shift);
    }
    return launch(std::integral_constant<int, 1>{}, shift);
  };
  if constexpr (kBits == 4) {
    if (args.shift_mode == ShiftMode::kTable)
      return launch_groups(std::integral_constant<ShiftKind, ShiftKind::kTable>{});
  }
  if (args.shift_mode == ShiftMode::kNone) return launch_groups(std::integral_constant<ShiftKind, ShiftKind::kNone>{});
  if (args.shift_dtype == DType::kU8) return launch_groups(std::integral_constant<ShiftKind, ShiftKind::kBytes>{});
  return launch_groups(std::integral_constant<ShiftKind, ShiftKind::kFloats>{});
}

template <int kBits>
cudaError_t launch_of(const RaggedArgs& args, const Device& device, cudaStream_t stream) {
  return dispatch_float(args.product.x_dtype, [&](auto* x) {
    return launch_typed<std::remove_pointer_t<decltype(x)>, kBits>(args, device, stream);
  });
}

}  // namespace wonly::ragged_resident
