// The ragged product for a few rows of an expert on Hopper, in one launch where the plan is a short one: mma.sync with
// weights loaded from global memory to the registers that they are multiplied from, exact codes as in
// matmul_resident.cuh, and up to eight rows of an expert as its columns.
//
// What there is to compute takes a few microseconds, so that what stands before the first load of weights and after the
// last is most of what can be saved. A CTA has a run of outputs of one tile of rows, whose activations are copied to
// its shared memory while weights are on their way. Its warps have as many units each, of 32 outputs x 64 inputs, which
// follow each other along the inputs, and load them kAhead units at a time, and the next as soon as these have come.
// The inputs are cut into slices, each of whose sums a warp leaves in shared memory.
//
// How they are cut depends on the shape alone, and slices are added in order: a row's result depends neither on the
// values of other rows nor on their experts.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/exact_sum.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_warpgroup.cuh"
#include "cuda/ptx.cuh"
#include "cuda/ptx_sm90.cuh"
#include "cuda/ragged_plan.cuh"
#include "cuda/ragged_resident.h"
#include "layout.h"

namespace wonly::ragged_resident {

using warpgroup::Convert;
using warpgroup::convert_half;

constexpr int kBits = 4;
constexpr int kUnitInputs = tile_k(kBits), kUnitBlocks = kUnitInputs / 32;
constexpr int kUnitAtoms = 2, kUnitOutputs = kUnitAtoms * kAtomN;
// Each executes the instructions before the first load of weights, so that few begin sooner; many are faster then. Few
// for up to so many units of a CTA.
constexpr int kFewWarps = 8, kMostWarps = 16, kFewUnits = 96;
constexpr int kMostSlices = 16, kAlikeParts = 8;
constexpr int kMostRows = 8, kFewRows = 4;  // of a tile
constexpr float kMostShare = 1.04f;         // of the warp that has most: otherwise tiles have fewer rows
constexpr int kBarrierBytes = 16;
constexpr int kSumBytes = kUnitAtoms * kAtomN / 2 * 16;  // sums of a unit's outputs and two rows
constexpr int kNoGroups = 30;                            // log2 of a group of all inputs, in units
constexpr int kMaskedIds = 128;                          // as many CTAs put in order themselves, of kOwnExperts experts
constexpr int kMaskWords = kMaskedIds / 32;

struct Params {
  // What the places of the first loads are made of is together: each line of constants is a wait of its own.
  ragged::Work work;
  const uint8_t* x;
  const uint32_t* qw;
  const uint8_t* scales;
  const uint8_t* shift;
  int64_t qw_stride, scales_stride, shift_stride;  // of an expert
  int outputs, strips, k_tiles;                    // a strip: kUnitOutputs outputs
  int slices, slice_tiles;                         // that the inputs are cut into, and tiles of one but for the last
  int log2_group_units;                            // group size = kUnitInputs << this
  int x_row_bytes;                                 // which lie apart so that ldmatrix reads different banks
  int sums_at, find_at;                            // in shared memory: sums, and what finding a tile takes
  // What multiplies zeros and offsets is `of_shift` less the scale's bits that `scale_mask` leaves.
  uint32_t scale_mask;
  float of_shift;
  int64_t units;       // of a CTA with the most tiles
  uint32_t none;       // zero, which the compiler does not know
  bool masked;         // many ids, in the order of whose experts CTAs put them
  bool plain_results;  // of the activations' type
  bool changes_sums;   // by a bias or an activation function
  MatmulArgs args;
};

// kGroups: groups in a unit; kShiftSize: bytes of a zero or offset, 0 without. Zeros of one byte are taken off the
// codes, while two bytes multiply the sums of the activations.
template <typename X_, int kWarps_, int kGroups_, int kShiftSize_>
struct Shape {
  using X = X_;
  static constexpr int kWarps = kWarps_, kThreads = kWarps * 32;
  // Units that a warp asks for at once; twice as many are a turn of its loop.
  static constexpr int kAhead = 2 * kMostWarps / kWarps;
  static constexpr int kGroups = kGroups_, kShiftSize = kShiftSize_;
  static constexpr bool kSums = kShiftSize == 2;
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

inline bool is_masked(const RaggedArgs& args) {
  return args.row_mode == RowMode::kIds && args.m > ragged::kOwnIds && args.m <= kMaskedIds &&
         args.experts <= ragged::kOwnExperts;
}
inline int find_bytes(const RaggedArgs& args) {
  const int experts = static_cast<int>(args.experts);
  return is_masked(args) ? (experts + 1) * static_cast<int>(sizeof(uint4)) + kMostWarps * kMostRows * 4
                         : ragged::kListBytes + ragged::plan_bytes(experts);
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1) ragged_resident_matmul(const __grid_constant__ Params params) {
#if __CUDA_ARCH__ >= 900
  using X = typename S::X;
  using C = Convert<X>;
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
  // The tiles that there are share all CTAs, those of a tile its outputs.
  int part = 0, parts = 1;
  const auto pick = [&](int tiles) {
    const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
    const int each = divide(ctas, tiles);
    part = divide(cta, tiles);
    const int tile = cta - part * tiles;
    // Alike where that leaves few CTAs idle: tiles of one expert then read its weights at the same time.
    parts = each + (each < kAlikeParts && tile < ctas - each * tiles);
    return tile;
  };
  ragged::OneTile rows;
  bool any;
  if (params.masked) {
    int ids[kMaskWords];
#pragma unroll
    for (int word = 0; word < kMaskWords; ++word) {
      ids[word] = word * 32 + lane < work.m ? work.rows[word * 32 + lane] : -2;
    }
#pragma unroll
    for (int word = 0; word < kMaskWords; ++word) {
      if (word * 32 + lane < work.m && (ids[word] < 0 || ids[word] >= work.experts)) ids[word] = -1;
    }
    any = find_in_many_ids(work, ids, pick, reinterpret_cast<uint4*>(shared + params.find_at), &rows);
  } else {
    any = ragged::find_tile(work, ragged::load_id(work), pick, shared + params.find_at, &rows);
  }
  if (!any || part >= parts) return;
  const int first_strip = divide(params.strips * part, parts);
  const int strips = divide(params.strips * (part + 1), parts) - first_strip;
  if (strips == 0) return;
  const int expert = rows.expert, row_count = rows.rows;
  if (expert < 0) {
    const int outputs = min(strips * kUnitOutputs, params.outputs - first_strip * kUnitOutputs);
    for (int i = 0; i < row_count; ++i) {
      const int64_t at = static_cast<int64_t>(rows.row(i)) * params.outputs + first_strip * kUnitOutputs;
      for (int n = threadIdx.x; n < outputs; n += kThreads) store_element(args.y, at + n, 0.f, args.y_dtype);
    }
    return;
  }

  // Activations before weights: they would come behind those.
  if (threadIdx.x == 0) {
    const int row_bytes = params.k_tiles * (kUnitInputs * 2);
    ptx::barrier_init(arrived, 1);
    ptx::barrier_init_fence();
    ptx::barrier_expect(arrived, row_count * row_bytes);
#pragma unroll 1
    for (int i = 0; i < row_count; ++i) {
      const int64_t x_row = ragged::x_row(work, rows.row(i));
      ptx::bulk_copy(x + i * params.x_row_bytes, params.x + x_row * row_bytes, row_bytes, arrived);
    }
  }

  // This warp's slices of strips, and the loads of the next units: words, and the scale and shift of the lane's output.
  // What is not loaded belongs to outputs that nobody stores.
  const int k_tiles = params.k_tiles, slices = params.slices;
  const int begin = first_slice(strips * slices, warp, S::kWarps),
            end = first_slice(strips * slices, warp + 1, S::kWarps);
  const int begin_strip = divide(begin, slices), begin_tile = (begin - begin_strip * slices) * params.slice_tiles;
  int fetch_strip = first_strip + begin_strip, fetch_tile = begin_tile, to_fetch = end - begin;
  int fetch_end = min(begin_tile + params.slice_tiles, k_tiles);
  const uint32_t* fetch_words = params.qw + expert * params.qw_stride +
                                static_cast<int64_t>((fetch_strip >> 1) * k_tiles + fetch_tile) * kTileWords +
                                ((fetch_strip & 1) * (kUnitAtoms * kAtomWords) + lane * 4);
  const uint8_t* const scales = params.scales + expert * params.scales_stride + lane * 2;
  const uint8_t* const shift = params.shift + expert * params.shift_stride + lane * S::kShiftSize;
  uint4 words[2][kAhead][kUnitAtoms] = {};
  uint32_t scale_bits[2][kAhead][kGroups] = {}, shift_bits[2][kAhead][kGroups] = {};
  // Up to kAhead units of a slice; returns how many. `none` is zero. The first loads are not ones that the compiler may
  // put behind the barrier after them.
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
        ptx::load_part<2, !first.value>(scale_bits[buffer][slot][i], scales + int64_t{at} * 2, wanted && inside);
        if constexpr (S::kShiftSize > 0) {
          ptx::load_part<S::kShiftSize, !first.value>(shift_bits[buffer][slot][i], shift + int64_t{at} * S::kShiftSize,
                                                      wanted && inside);
        }
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
  prefetch_bias(args, expert, first_strip * kUnitOutputs, strips * kUnitOutputs, threadIdx.x);

  int of_lane = 0;  // a row of the tile; of the last for those beyond it
  if (lane < kMostRows) of_lane = rows.row(min(lane, row_count - 1));
  __syncthreads();
  ptx::barrier_wait(arrived, 0);

  uint32_t lane_x = ptx::shared_address(x) + begin_tile * (kUnitInputs * 2) +
                    min(lane % 8, row_count - 1) * params.x_row_bytes + lane / 8 * 16;
  const int pairs = (row_count + 1) / 2;
  uint8_t* const sums = shared + params.sums_at;  // of all slices
  float acc[kUnitAtoms][4] = {};
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
          of_lane_scale[j] = to_floats<X>(scale_bits[buffer][slot][j]).x;
          of_lane_zero[j] = 0;
          of_lane_shift[j] = 0.f;
          if constexpr (S::kShiftSize == 1)
            of_lane_zero[j] = C::minus_bytes(ptx::low_twice(shift_bits[buffer][slot][j]));
          if constexpr (S::kSums) {
            const float scale = __uint_as_float(__float_as_uint(of_lane_scale[j]) & params.scale_mask);
            of_lane_shift[j] = to_floats<X>(shift_bits[buffer][slot][j]).x * ((params.of_shift - scale) * 0x1p-13f);
          }
        }
        float products[kUnitAtoms][kGroups][4] = {}, x_sums[kGroups][4] = {};
#pragma unroll
        for (int block = 0; block < kUnitBlocks; ++block) {
          uint32_t inputs[4];
          ptx::load_matrices(inputs, lane_x + slot * (kUnitInputs * 2) + block * 64);
          const auto multiply = [&](float (&to)[4], const uint32_t (&a)[4], int step) {
            ptx::mma<C::kBf16>(to, a, inputs[2 * step], inputs[2 * step + 1]);
          };
#pragma unroll
          for (int atom = 0; atom < kUnitAtoms; ++atom) {
            uint32_t minus_zero[2], codes[2][4];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              minus_zero[j] = S::kSums ? 0 : C::minus_zero(bias_of(kBits));
              if constexpr (S::kShiftSize == 1) {
                minus_zero[j] = __shfl_sync(0xffffffffu, of_lane_zero[block / kGroupBlocks], atom * kAtomN + 8 * j + g);
              }
            }
            const uint4& w = unit_words[atom];
            convert_half<X, kBits>(block == 0 ? w.x : w.z, block == 0 ? w.y : w.w, minus_zero[0], minus_zero[1], codes);
            multiply(products[atom][block / kGroupBlocks], codes[0], 0);
            multiply(products[atom][block / kGroupBlocks], codes[1], 1);
          }
          if constexpr (S::kSums) {
            constexpr uint32_t kOnes = C::kBf16 ? 0x3f803f80u : 0x3c003c00u;
            const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
            multiply(x_sums[block / kGroupBlocks], ones, 0);
            multiply(x_sums[block / kGroupBlocks], ones, 1);
          }
        }
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
#pragma unroll
          for (int half = 0; half < 2 * kUnitAtoms; ++half) {
            const auto given = [&](float of_lane) { return __shfl_sync(0xffffffffu, of_lane, half * 8 + g); };
            const float scale = given(of_lane_scale[group]), factor = S::kSums ? given(of_lane_shift[group]) : 0.f;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              float& to = acc[half / 2][half % 2 * 2 + j];
              to = fmaf(scale, products[half / 2][group][half % 2 * 2 + j], to);
              if constexpr (S::kSums) to = fmaf(factor, x_sums[group][j], to);
            }
          }
        }
      }
      tile += count;
      lane_x += count * (kUnitInputs * 2);
      if (tile == slice_end) {
        // Lane 4g + t has outputs g and g + 8 of both halves, of rows 2t and 2t + 1.
        if (t < pairs) {
          uint8_t* const to = sums + (slice * pairs + t) * kSumBytes + g * 16;
#pragma unroll
          for (int atom = 0; atom < kUnitAtoms; ++atom) {
            *reinterpret_cast<float4*>(to + atom * (kSumBytes / 2)) = {acc[atom][0], acc[atom][1], acc[atom][2],
                                                                       acc[atom][3]};
          }
        }
#pragma unroll
        for (int atom = 0; atom < kUnitAtoms; ++atom) {
#pragma unroll
          for (float& value : acc[atom]) value = 0.f;
        }
        ++slice;
        if (tile == k_tiles) {
          lane_x -= tile * (kUnitInputs * 2);
          tile = 0;
        }
        slice_end = min(tile + params.slice_tiles, k_tiles);
      }
    }
  }
  __syncthreads();
  {
    // Of the slices in order, by whole warps: 16 lanes for a strip and two of its rows.
    const int items = strips * pairs * 16;
#pragma unroll 1
    for (int first = warp * 32; first < items; first += kThreads) {
      const int item = min(first + lane, items - 16 + lane % 16) / 16, of_item = divide(item, pairs);
      const int pair = item - of_item * pairs, of_pair = lane % 8;
      const int n = (first_strip + of_item) * kUnitOutputs + lane / 8 % 2 * kAtomN + of_pair;
      float bias[2] = {};
      if (__builtin_expect(args.has_bias, 0)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) bias[half] = output_bias(args, expert, n + 8 * half);
      }
      const uint8_t* at = sums + (of_item * slices * pairs + pair) * kSumBytes + lane % 16 * 16;
      float sum[4] = {};
#pragma unroll 4
      for (int i = 0; i < slices; ++i, at += pairs * kSumBytes) {
        const float4 v = *reinterpret_cast<const float4*>(at);
        sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
      }
#pragma unroll
      for (float& value : sum) value *= C::kUnscale;
      const bool odd = of_pair % 2 == 1;
      const int row = __shfl_sync(0xffffffffu, of_lane, 2 * pair + odd);
      bool plain = params.plain_results;
      if (S::kSums) plain = plain && __all_sync(0xffffffffu, isfinite((sum[0] + sum[1]) + (sum[2] + sum[3])));
      if (__builtin_expect(plain && params.changes_sums, 0)) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] += bias[i / 2];
        apply<true>(args.activation, sum);
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
          if (first + lane < items && 2 * pair + odd < row_count && n + 8 * half < params.outputs) {
            reinterpret_cast<uint32_t*>(y)[4 * half] = both;
          }
        }
        continue;
      }
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const int of_one = __shfl_sync(0xffffffffu, of_lane, 2 * pair + i % 2), output = n + i / 2 * 8;
        if (first + lane >= items || 2 * pair + i % 2 >= row_count || output >= params.outputs) continue;
        float value = i < 2 ? i == 0 ? sum[0] : sum[1] : i == 2 ? sum[2] : sum[3];
        // Where an infinity or a NaN took part, the shares of the codes and of the shift do not add up to what a weight
        // times it is.
        if (S::kSums && !isfinite(value))
          value = exact_sum(args, expert, ragged::x_row(work, of_one), output, 0, args.k);
        finish(args, expert, of_one, output, value, i < 2 ? bias[0] : bias[1]);
      }
    }
  }
#else
  __trap();
#endif
}

// How many slices, up to `most`, the inputs are cut into, so that `warps` warps have about as many units of up to
// `strips` strips each. By nothing that is known on the device alone: a row's sums would depend on the others. Returns
// the units of the warp that has most, in proportion to those of all.
inline float share_out(int64_t strips, int64_t most, int warps, int ahead, Params* params) {
  float least = 0.f;
  for (int slices = 1; slices <= std::min<int64_t>(most, kMostSlices); ++slices) {
    const int64_t tiles = ceil_div(params->k_tiles, slices), used = ceil_div(params->k_tiles, tiles);
    if (slices > 1 && tiles < ahead) break;  // a warp would ask for fewer at once
    const auto units = [&](int64_t some) {
      return static_cast<float>(ceil_div(some * used, warps) * tiles * warps) /
             static_cast<float>(some * params->k_tiles);
    };
    // Of the most strips, and of fewer, where rows have less different experts; the finer, the better for others.
    const float share = (2.f * units(strips) + units(ceil_div(strips * 3, 4))) / 3.f;
    if (slices > 1 && (share > least || (share == least && warps == kFewWarps))) continue;
    least = share;
    params->slice_tiles = static_cast<int>(tiles);
    params->slices = static_cast<int>(used);
  }
  return least;
}

// Sets what `params` has in shared memory for tiles of `rows` rows; false where there is not enough.
inline bool lay_out(const RaggedArgs& args, int rows, int warps, int ahead, int multiprocessors, int shared_bytes,
                    Params* params) {
  // Of a tile's outputs a CTA has as many as it has with the most tiles.
  const int64_t tiles = ragged::most_tiles(ragged::own_work(args, rows));
  const int64_t strips = ceil_div(params->strips, std::max<int64_t>(multiprocessors / tiles, 1));
  const int64_t slice_bytes = strips * ((rows + 1) / 2) * kSumBytes;
  params->sums_at = kBarrierBytes + rows * params->x_row_bytes;
  const int64_t most = (shared_bytes - params->sums_at - find_bytes(args)) / slice_bytes;
  if (most < (rows > 1 ? 2 : 1)) return false;  // few warps would have all to do
  // With less rows there is room for sums of more slices.
  if (share_out(strips, most, warps, ahead, params) > kMostShare && rows > kFewRows) return false;
  params->find_at = params->sums_at + static_cast<int>(params->slices * slice_bytes);
  params->units = strips * params->k_tiles;
  return true;
}

template <typename S>
cudaError_t launch_shape(Params params, const RaggedArgs& args, int multiprocessors, int shared_bytes,
                         cudaStream_t stream) {
  int rows = kMostRows;
  while (!lay_out(args, rows, S::kWarps, S::kAhead, multiprocessors, shared_bytes, &params)) {
    if (rows == 1) return cudaErrorInvalidConfiguration;
    rows /= 2;
  }
  if constexpr (S::kWarps == kMostWarps && S::kGroups == 1 && S::kShiftSize < 2) {
    if (params.units <= kFewUnits) {
      using Few = Shape<typename S::X, kFewWarps, S::kGroups, S::kShiftSize>;
      return launch_shape<Few>(params, args, multiprocessors, shared_bytes, stream);
    }
  }
  params.masked = is_masked(args);
  if (params.masked) {
    params.work = ragged::own_work(args, rows);
  } else if (cudaError_t error = ragged::plan(args, rows, false, shared_bytes, stream, &params.work);
             error != cudaSuccess) {
    return error;
  }
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(std::max<int64_t>(multiprocessors, ragged::most_tiles(params.work))));
  shape.threads = S::kThreads;
  shape.shared_bytes = params.find_at + find_bytes(args);
  return launch_kernel(ragged_resident_matmul<S>, shape, stream, params);
}

template <typename X>
cudaError_t launch_typed(const RaggedArgs& ragged, int multiprocessors, int shared_bytes, cudaStream_t stream) {
  const MatmulArgs& args = ragged.product;
  Params params{};
  params.args = args;
  params.x = static_cast<const uint8_t*>(args.x);
  params.qw = args.qw;
  params.scales = static_cast<const uint8_t*>(args.scales);
  params.shift = static_cast<const uint8_t*>(args.shift);
  params.qw_stride = args.qw_batch_stride;
  params.scales_stride = args.scales_batch_stride * 2;
  params.outputs = static_cast<int>(args.n);
  params.strips = static_cast<int>(ceil_div(args.n, kUnitOutputs));
  params.k_tiles = static_cast<int>(args.k / kUnitInputs);
  params.x_row_bytes = static_cast<int>(args.k) * 2 + 16;
  const int log2 = log2_group_blocks(args);
  params.log2_group_units = log2 < 0 ? kNoGroups : log2 - 1;
  const bool offsets = args.shift_mode == ShiftMode::kOffsets;
  params.scale_mask = offsets ? 0 : 0xffffffffu;
  params.of_shift = offsets ? 1.f : 0.f;
  params.plain_results = args.y_dtype == args.x_dtype;
  params.changes_sums = args.has_bias || args.activation != Activation::kNone;
  params.shift_stride = args.shift_batch_stride * (args.shift_dtype == DType::kU8 ? 1 : 2);
  const auto launch = [&](auto groups, auto shift_size) {
    return launch_shape<Shape<X, kMostWarps, groups.value, shift_size.value>>(params, ragged, multiprocessors,
                                                                              shared_bytes, stream);
  };
  constexpr std::integral_constant<int, 0> none;
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  const bool small_groups = log2 == 0;
  if (args.shift_mode == ShiftMode::kNone) return small_groups ? launch(two, none) : launch(one, none);
  if (args.shift_dtype == DType::kU8) return small_groups ? launch(two, one) : launch(one, one);
  return small_groups ? launch(two, two) : launch(one, two);
}

}  // namespace wonly::ragged_resident
