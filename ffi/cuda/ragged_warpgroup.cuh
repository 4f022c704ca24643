// The ragged product for some tens of rows of an expert on Hopper: wgmma with the weights as register operand, as in
// matmul_warpgroup.cuh, by CTAs that stay.
//
// One CTA on every multiprocessor takes every so-many-th tile, of 256 outputs x up to 64 rows of an expert or of 128 x
// 128; its producer warps run ahead into the next tile while the last results are still being written. Four or two
// warpgroups of 64 outputs share the rows' activations, and multiply about as many columns as a tile has rows. Sums of
// a group are exact products of 16-bit numbers in float32, and its scale multiplies them there; or weights are rounded
// (`kind_of` says which), half a stage of them while the tensor cores multiply the half before. A row's result does not
// depend on other rows. Of float32 rows both numbers that each has become (split_activations.cuh) multiply the same
// weights, in tiles of up to 64 rows. What float zeros or offsets are more than the middle of the codes multiplies the
// sum of a group's activations, which were made with these numbers. A table's entries are looked up in shared memory
// (pair_table.cuh), rounded to the type of 16-bit rows, and as two numbers for float32 ones: the larger meets both
// numbers of an activation, the smaller the larger one.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/cluster_tiles.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/exact_sum.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_warpgroup.cuh"
#include "cuda/pair_table.cuh"
#include "cuda/ragged_plan.cuh"
#include "cuda/ragged_warpgroup.h"
#include "cuda/rounded_weights.cuh"
#include "cuda/split_activations.cuh"
#include "cuda/tensor_map.h"

namespace wonly::ragged_warpgroup {

using warpgroup::Convert;
using warpgroup::kArrivals;
using warpgroup::kBarrierBytes;
using warpgroup::Kind;
using warpgroup::kStageK;
using warpgroup::kStageSteps;

constexpr int kLowWarpgroups = 4, kHighWarpgroups = 2;  // for tiles of kLowRows and kHighRows
constexpr int kProducers = 4;                           // warps
constexpr int kConsumersBarrier = 5;                    // of all that multiply, beside those of each warpgroup
constexpr int kStagedRows = 16;                         // that a warpgroup writes at a time, as float32
constexpr int kPlacedRows = 32;                         // or as 16 bits
constexpr int kStagedBytes = kStagedRows * tiles::kStagedStride * 4;
constexpr int kCtaBytes = 227 << 10;
static_assert(kStagedBytes >= kPlacedRows * kTileN * 2);
constexpr int kAlikeRows = 2, kUnsortedRows = 16;  // of an expert: up to so many tiles are alike, or about as high
constexpr int kSortedExperts = (ragged::kOwnExperts - 1) / 2;  // up to as many have their spans sorted: room for both

// Rows first .. first + rows - 1 of the plan's order, and the outputs of `strips` warpgroups from n0 on.
struct alignas(16) Tile {
  int expert, first, rows, n0;
  int strips;
};

template <typename X_, int kBits_, int kWarpgroups_, int kFlushes_, Kind kKind, int kPieces_ = 1>
struct Shape {
  using X = X_;
  static constexpr int kBits = kBits_;
  static constexpr int kWarpgroups = kWarpgroups_;  // that multiply, 64 outputs each
  static constexpr int kPieces = kPieces_;          // numbers of an activation
  static constexpr int kTileRows = kPieces > 1 || kWarpgroups == kLowWarpgroups ? kLowRows : kHighRows;
  static constexpr int kOutputs = kWarpgroups * kTileN;  // of a tile
  static constexpr int kConsumers = kWarpgroups * 128;
  static constexpr int kThreads = kConsumers + kProducers * 32;
  static constexpr int kProducerRegisters = kWarpgroups == kLowWarpgroups ? 32 : 40;
  static constexpr int kConsumerRegisters = kWarpgroups == kLowWarpgroups ? 112 : 232;
  static constexpr int kBoxRows = kTileRows / kProducers;  // of the tensor copy engine
  static constexpr int kHalfBytes = kTileRows * 128;       // activations: two halves of 64 inputs
  static constexpr int kPieceBytes = 2 * kHalfBytes;
  // Group ends in a stage: 4 for groups of 32 and 64, and of all sizes where weights are rounded, 1 for more.
  static constexpr int kFlushes = kFlushes_;
  static constexpr bool kZeros = kKind == Kind::kRoundedAndZeros;
  static constexpr bool kRounded = kKind == Kind::kRounded || kZeros;
  static constexpr bool kPlain = kKind == Kind::kPlain || kRounded;
  static constexpr bool kSums = kKind == Kind::kSums, kTable = kKind == Kind::kTable;
  static constexpr bool kTwoNumbers = kTable && kPieces == 2;  // for a table's entry
  static constexpr bool kRepeats = kSums || kTwoNumbers;       // what is not finite
  static_assert(!kSums || kPieces == 2);

  // A unit is what the tensor cores work on while the codes of the next are converted.
  static constexpr int kUnits = kFlushes == 4 && (!kRounded || kWarpgroups == kLowWarpgroups) ? 4 : 2;
  static constexpr int kUnitSteps = kStageSteps / kUnits;

  static constexpr int kTiles = kStageK / tile_k(kBits);  // packed tiles of a stage along the inputs
  static constexpr int kScaleStride = kOutputs * (kPlain ? 2 : 4);
  static constexpr int kWeightsAt = kPieces * kPieceBytes;
  static constexpr int kScalesAt = kWeightsAt + kWarpgroups * kTiles * kTileBytes;
  static constexpr int kZerosAt = kScalesAt + kFlushes * kScaleStride;  // or offsets
  static constexpr int kZeroStride = kOutputs * (kSums ? 4 : kRounded ? 2 : 1);
  static constexpr int kStageBytes = (kZerosAt + kFlushes * kZeroStride + 1023) / 1024 * 1024;
  static constexpr int kTableBytes = kTable ? pair_table_bytes(kPieces) : 0;
  static constexpr int kOtherBytes = kBarrierBytes + kWarpgroups * kStagedBytes + kTableBytes + ragged::kMostPlanBytes;
  static constexpr int kStages = (kCtaBytes - kOtherBytes) / kStageBytes;
  static constexpr int kNotesAt = 2 * kStages * 8;
  static constexpr int kStagedAt = kBarrierBytes + kStages * kStageBytes;
  static constexpr int kTableAt = kStagedAt + kWarpgroups * kStagedBytes;
  static constexpr int kPlanAt = kTableAt + kTableBytes;
  static_assert(kStages >= 3 && kStageBytes % 1024 == 0 && kHalfBytes % 1024 == 0);
  static_assert(kNotesAt % alignof(Tile) == 0 && kNotesAt + kStages * sizeof(Tile) <= kBarrierBytes);
};

struct Params {
  MatmulArgs args;
  ragged::Work work;
  int output_blocks;      // of kOutputs
  int log2_group_blocks;  // group size = 32 << this; -1: one scale per output
  int stage_groups;       // of rounded weights: groups that end in a stage, 4, 2 or 1
  // Of float32 rows by position: what undoes their powers of two, and [sum, position] the sums of their groups, 128
  // inputs at most.
  const float *powers, *sums;
};

__device__ __forceinline__ int uniform(int value) { return __shfl_sync(ragged::kAllLanes, value, 0); }

// All tiles: whole ones, and then those of the last round, whose outputs several CTAs share where there are enough.
// `mixed`: tiles differ, and may be sorted by height. Then rounds are dealt out forward and backward in turns, and half
// of the CTAs begin with their last one, so that some wait for memory while others multiply.
template <int kWarpgroups>
struct Walk {
  int whole, parts, count, rounds;
  bool mixed;

  __device__ Walk(int tiles, bool mixed) : mixed(mixed) {
    const int grid = static_cast<int>(gridDim.x);
    rounds = tiles / grid;
    whole = rounds * grid;
    const int last = tiles - whole;
    parts = last * kWarpgroups <= grid ? kWarpgroups : last * 2 <= grid ? 2 : 1;
    count = whole + last * parts;
    rounds += place(rounds) < count;
  }
  // This CTA's of a turn.
  __device__ int index(int turn) const {
    return place(mixed && 2 * blockIdx.x >= gridDim.x ? rounds - 1 - turn : turn);
  }

 private:
  __device__ int place(int round) const {
    const int grid = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
    return round * grid + (mixed && round % 2 == 1 ? grid - 1 - cta : cta);
  }
};

// One warp.
template <typename S>
__device__ __forceinline__ Tile find_tile(const ragged::Plan& plan, const Walk<S::kWarpgroups>& walk, int index,
                                          int output_blocks) {
  int part = 0, strips = S::kWarpgroups;
  if (index >= walk.whole) {
    const int of_last = index - walk.whole;
    index = walk.whole + of_last / walk.parts;
    part = of_last % walk.parts;
    strips = S::kWarpgroups / walk.parts;
  }
  const ragged::Span span = ragged::find_span(plan, index / output_blocks);
  const int local = index - span.first_tile * output_blocks;
  const int tiles = ragged::tiles_of(span.rows, S::kTileRows);  // those of the same weights run together
  const int block = local / tiles, first = (local - block * tiles) * S::kTileRows;
  return {uniform(span.expert), uniform(span.first + first), uniform(min(S::kTileRows, span.rows - first)),
          uniform(block * S::kOutputs + part * strips * kTileN), uniform(strips)};
}

// Where a tile's walk over the inputs begins: CTAs that walk in step would all read addresses a multiple of a large
// power of two apart, which share memory channels. The golden ratio spreads any number. As it is the order of a sum, an
// output has the same in every tile.
__device__ __forceinline__ int first_stage(const Tile& tile, int64_t n, int stages) {
  constexpr int kBlock = kLowWarpgroups * kTileN;
  const uint32_t weights = static_cast<uint32_t>(tile.expert * ceil_div(n, kBlock) + tile.n0 / kBlock);
  return static_cast<int>(__umulhi(weights * 0x9e3779b9u, static_cast<uint32_t>(stages)));
}

// The ring of a CTA, at the beginning of its shared memory.
template <typename S>
struct Ring {
  uint8_t* shared;
  RingPosition<S::kStages> at{};

  __device__ uint64_t* full() const { return reinterpret_cast<uint64_t*>(shared) + at.slot; }
  __device__ uint64_t* empty(int slot) const { return reinterpret_cast<uint64_t*>(shared) + S::kStages + slot; }
  __device__ uint8_t* stage() const { return shared + kBarrierBytes + at.slot * S::kStageBytes; }
  // Beside a tile's first stage: the tile.
  __device__ Tile* note() const { return reinterpret_cast<Tile*>(shared + S::kNotesAt) + at.slot; }
  __device__ void wait_full() const { ptx::barrier_wait(full(), at.phase); }
  // In the first round at once.
  __device__ void wait_empty() const { ptx::barrier_wait(empty(at.slot), at.phase ^ 1); }
  // By a warp that has read it.
  __device__ void release(int slot) const { ptx::warp_arrive(empty(slot), threadIdx.x % 32); }
};

// One of four warps. Warp w brings the weights of row tile w, if there are as many, and a box of activations; the
// second also scales and zeros, the first says which tile it is. All lanes walk along, so that addresses stay in
// uniform registers, and one of them issues. With few rows a stage is multiplied as fast as its copies are asked for,
// so little is left to do once it is empty.
template <typename S>
__device__ __forceinline__ void produce(const Params& params, const warpgroup::Maps& maps, const ragged::Plan& plan,
                                        const Walk<S::kWarpgroups>& walk, Ring<S>& ring, int producer) {
  constexpr int kStripBytes = S::kTiles * kTileBytes, kBoxBytes = S::kBoxRows * 128;
  const MatmulArgs& args = params.args;
  const int stages = static_cast<int>(ceil_div(args.k, kStageK));
  const int k_tiles = static_cast<int>(ceil_div(args.k, tile_k(S::kBits)));
  const int last_bytes = (k_tiles - (stages - 1) * S::kTiles) * kTileBytes;
  const int blocks = static_cast<int>(ceil_div(args.k, 32));
  const bool scaling = producer == 1 && (S::kPlain || params.log2_group_blocks >= 0);
  const int scale_size = S::kPlain ? 2 : element_size(args.scale_dtype);
  const bool has_shifts = !S::kTable && args.shift_mode != ShiftMode::kNone;
  const int shift_size = has_shifts ? element_size(args.shift_dtype) : 0;
  const uint32_t n = static_cast<uint32_t>(args.n);
  for (int turn = 0; turn < walk.rounds; ++turn) {
    const Tile tile = find_tile<S>(plan, walk, walk.index(turn), params.output_blocks);
    const int outputs = static_cast<int>(min(static_cast<int64_t>(tile.strips * kTileN), args.n - tile.n0));
    const int64_t expert = tile.expert;
    const uint8_t* const words =
        reinterpret_cast<const uint8_t*>(args.qw + expert * args.qw_batch_stride +
                                         static_cast<int64_t>(tile.n0 / kTileN + producer) * k_tiles * kTileWords);
    const uint8_t* const scales =
        static_cast<const uint8_t*>(args.scales) + (expert * args.scales_batch_stride + tile.n0) * scale_size;
    const uint8_t* const shifts =
        static_cast<const uint8_t*>(args.shift) + (expert * args.shift_batch_stride + tile.n0) * shift_size;
    const bool has_weights = producer * kTileN < outputs, has_rows = producer * S::kBoxRows < tile.rows;
    const int scale_bytes = outputs * scale_size, shift_bytes = outputs * shift_size;
    const int group_bytes = !scaling ? 0 : S::kRounded ? S::kOutputs * (2 + shift_size) : scale_bytes + shift_bytes;
    const int whole_bytes = (has_weights ? kStripBytes : 0) + (has_rows ? S::kPieces * 2 * kBoxBytes : 0);
    const int row = tile.first + producer * S::kBoxRows;
    int stage = first_stage(tile, args.n, stages);
    ring.wait_empty();
    if (producer == 0 && ptx::elect_one()) *ring.note() = tile;
    __syncwarp();
    if (tile.expert < 0 || outputs <= 0) {  // an empty stage
      if (ptx::elect_one()) ptx::barrier_arrive(ring.full());
      ring.at.advance();
      continue;
    }
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      ring.wait_empty();
      if (ptx::elect_one()) {
        uint8_t* const to = ring.stage();
        uint64_t* const done = ring.full();
        const int bytes = stage + 1 == stages ? last_bytes : kStripBytes;  // of a strip
        const int groups = S::kRounded        ? params.stage_groups
                           : S::kFlushes == 1 ? 1
                                              : min(S::kFlushes, blocks - stage * (kStageK / 32));
        ptx::barrier_expect(done, whole_bytes - (has_weights ? kStripBytes - bytes : 0) + groups * group_bytes);
        if (has_weights) {
          ptx::bulk_copy(to + S::kWeightsAt + producer * kStripBytes, words + static_cast<int64_t>(stage) * kStripBytes,
                         bytes, done);
        }
        if (has_rows) {
#pragma unroll
          for (int piece = 0; piece < S::kPieces; ++piece) {
            uint8_t* const to_x = to + piece * S::kPieceBytes + producer * kBoxBytes;
            ptx::tensor_copy_3d(to_x, &maps.x, stage * kStageK, row, piece, done);
            ptx::tensor_copy_3d(to_x + S::kHalfBytes, &maps.x, stage * kStageK + 64, row, piece, done);
          }
        }
        if (S::kRounded && scaling) {
          const int first = stage * (kStageK / 32) >> params.log2_group_blocks;
          const auto copy = [&](int at, const CUtensorMap& map, int64_t batch_stride) {
            ptx::tensor_copy_3d(to + at, &map, tile.n0, first, batch_stride == 0 ? 0 : tile.expert, done);
          };
          copy(S::kScalesAt, maps.scales, args.scales_batch_stride);
          if (has_shifts) copy(S::kZerosAt, maps.shifts, args.shift_batch_stride);
        } else if (scaling) {
#pragma unroll
          for (int flush = 0; flush < S::kFlushes; ++flush) {
            if (flush >= groups) break;
            const uint32_t group = (stage * (kStageK / 32) + flush) >> params.log2_group_blocks;
            const uint64_t first = static_cast<uint64_t>(group) * n;
            ptx::bulk_copy(to + S::kScalesAt + flush * S::kScaleStride, scales + first * scale_size, scale_bytes, done);
            if (has_shifts) {
              ptx::bulk_copy(to + S::kZerosAt + flush * S::kZeroStride, shifts + first * shift_size, shift_bytes, done);
            }
          }
        }
      }
      __syncwarp();
      ring.at.advance();
      if (++stage == stages) stage = 0;
    }
  }
}

// A thread that multiplies.
template <typename S>
struct Consumer : tiles::ConsumerOf<S::kWarpgroups> {
  using X = typename S::X;
  using C = Convert<X>;
  using Base = tiles::ConsumerOf<S::kWarpgroups>;
  using Base::row, Base::thread, Base::warpgroup;
  static constexpr int kSums = S::kTileRows / 2;

  uint32_t table = 0;  // of pairs of codes: a shared address
  float undo_table = 1.f;

  // The sums of a tile of up to kColumns rows, whose first stage is full.
  template <int kColumns>
  __device__ __forceinline__ void multiply(const Params& params, const Tile& tile, Ring<S>& ring,
                                           float (&acc)[kSums]) const {
    if constexpr (S::kRounded) {
      multiply_rounded<kColumns>(params, ring, acc);
    } else {
      multiply_exact<kColumns>(params, tile, ring, acc);
    }
  }

  // Steps of 16 inputs that one 16-byte vector of words holds, whether two units share it, and vectors of a unit.
  static constexpr int kVectorSteps = S::kBits == 4 ? 4 : 2;
  static constexpr bool kShared = S::kUnitSteps < kVectorSteps;
  static constexpr int kVectors = kShared ? 1 : S::kUnitSteps / kVectorSteps;

  // This lane's words of a unit of the stage at `data`.
  __device__ __forceinline__ void load_words(const uint8_t* data, int unit, uint4 (&words)[kVectors]) const {
    if (kShared && unit % 2 != 0) return;
    const uint4* const from =
        reinterpret_cast<const uint4*>(data + S::kWeightsAt + warpgroup * S::kTiles * kTileBytes) + thread();
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      words[i] = from[(unit * S::kUnitSteps / kVectorSteps + i) * (kTileBytes / 16)];
    }
  }

  // One unit is converted while the tensor cores work on the one before.
  template <int kColumns>
  __device__ __forceinline__ void multiply_rounded(const Params& params, Ring<S>& ring, float (&acc)[kSums]) const {
    constexpr int kHalfSteps = kVectorSteps / 2;
    constexpr int kGroupSteps = kStageSteps / S::kFlushes, kUnitGroups = (S::kUnitSteps - 1) / kGroupSteps + 1;
    using Rounded = wonly::Convert<warpgroup::RoundedShape<X, S::kBits, S::kZeros>>;
    const MatmulArgs& args = params.args;
    const int stages = static_cast<int>(ceil_div(args.k, kStageK));
    // An offset is that of the group, or its scale times what the bias of a code makes of it.
    const bool has_offsets = args.shift_mode == ShiftMode::kOffsets, bytes = args.shift_dtype == DType::kU8;
    const int offsets_at = has_offsets ? S::kZerosAt : S::kScalesAt;
    const uint32_t shift_factor = Rounded::shift_factor(has_offsets, bytes);
    const int stage_groups = S::kFlushes == 1 ? 1 : params.stage_groups;
    const int of_tile = warpgroup * kTileN + row();  // this lane's outputs: n0 + of_tile and n0 + of_tile + 8

    uint32_t codes[2][S::kUnitSteps][4], group_scales[kUnitGroups][2], group_shifts[kUnitGroups][2];
    uint4 words[kVectors];
    Affine affine[2];
    const auto load_unit = [&](const uint8_t* data, int unit) {
      load_words(data, unit, words);
      if (unit * S::kUnitSteps % kGroupSteps != 0) return;
      const auto load_pair = [](const uint8_t* of_row, uint32_t (&bits)[2]) {
        const uint16_t* const numbers = reinterpret_cast<const uint16_t*>(of_row);
        bits[0] = numbers[0], bits[1] = numbers[8];
      };
#pragma unroll
      for (int i = 0; i < kUnitGroups; ++i) {
        const int group = unit * S::kUnitSteps / kGroupSteps + i;
        const int at = (S::kFlushes == 4 ? group * stage_groups / 4 : group) * S::kOutputs + of_tile;
        load_pair(data + S::kScalesAt + at * 2, group_scales[i]);
        if (!S::kZeros) {
          load_pair(data + offsets_at + at * 2, group_shifts[i]);
        } else if (bytes) {
          group_shifts[i][0] = data[S::kZerosAt + at], group_shifts[i][1] = data[S::kZerosAt + at + 8];
        } else {
          load_pair(data + S::kZerosAt + at * 2, group_shifts[i]);
        }
      }
    };
    const auto set_affine = [&](int group) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        affine[i] = Rounded::template affine_of_bits<(S::kFlushes == 4 && kColumns > 64)>(
            ptx::low_twice(group_scales[group][i]), ptx::low_twice(group_shifts[group][i]), shift_factor);
      }
    };
    const auto convert_unit = [&](int unit) {
#pragma unroll
      for (int step = 0; step < S::kUnitSteps; step += kHalfSteps) {
        const int first = unit * S::kUnitSteps + step;
        if (first % kGroupSteps == 0) set_affine(step / kGroupSteps);
        const uint4& both = words[kShared ? 0 : step / kVectorSteps];
        const bool second = first / kHalfSteps % 2 == 1;
        warpgroup::convert_half<X, S::kBits>(second ? both.z : both.x, second ? both.w : both.y,
                                             warpgroup::Factors<S::kZeros>{affine[0]},
                                             warpgroup::Factors<S::kZeros>{affine[1]}, codes[unit % 2] + step);
      }
    };
    float (&sums)[kColumns / 2] = reinterpret_cast<float (&)[kColumns / 2]>(acc);
#pragma unroll
    for (float& sum : acc) sum = 0.f;
    const auto multiply_unit = [&](uint64_t x, int unit) {
      warpgroup::multiply_steps<X, kColumns>(sums, codes[unit % 2], x, unit * S::kUnitSteps, S::kHalfBytes, true);
    };

    const uint8_t* data = ring.stage();
    load_unit(data, 0);
    convert_unit(0);
    int before = 0;  // the slot of the stage before
#pragma unroll 1
    for (int index = 0; index < stages; ++index) {
      const uint64_t x = ptx::wgmma_descriptor(data);
#pragma unroll
      for (int unit = 0; unit < S::kUnits; ++unit) {
        const bool last = unit + 1 == S::kUnits;
        if (!last) load_unit(data, unit + 1);
        multiply_unit(x, unit);
        ptx::wgmma_wait<1>();
        if (unit == 0 && index > 0) ring.release(before);
        if (!last) {
          convert_unit(unit + 1);
        } else {
          before = ring.at.slot;
          ring.at.advance();
          if (index + 1 == stages) break;
          ring.wait_full();
          data = ring.stage();
          load_unit(data, 0);
          convert_unit(0);
        }
      }
    }
    ptx::wgmma_wait<0>();
    ring.release(before);
  }

  template <int kColumns>
  __device__ __forceinline__ void multiply_exact(const Params& params, const Tile& tile, Ring<S>& ring,
                                                 float (&acc)[kSums]) const {
    const MatmulArgs& args = params.args;
    const int stages = static_cast<int>(ceil_div(args.k, kStageK));
    const int blocks = static_cast<int>(ceil_div(args.k, 32));
    const bool grouped = S::kPlain || params.log2_group_blocks >= 0;
    const bool has_zeros = !S::kSums && !S::kTable && args.shift_mode == ShiftMode::kZeros;
    const float unscale = S::kTable ? undo_table : C::kUnscale;
    const bool wide = !S::kPlain && args.scale_dtype == DType::kF32;
    const bool bf16 = S::kPlain ? C::kBf16 : args.scale_dtype == DType::kBF16;
    const int of_tile = warpgroup * kTileN + row();  // this lane's outputs: n0 + of_tile and n0 + of_tile + 8

    float part[kColumns / 2], scale[2] = {};
    [[maybe_unused]] float shift[2] = {};
    constexpr float kBias = static_cast<float>(bias_of(S::kBits));
    uint32_t zero[2];
    zero[0] = zero[1] = C::minus_zero(kBias);
    // What multiplies sums of activations.
    const auto shift_of = [&](float scale, float shift) { return weight_of(args.shift_mode, kBias, scale, shift); };
    if (!grouped) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t n = min(static_cast<int64_t>(tile.n0 + of_tile + 8 * i), args.n - 1);
        const float stored = load_element(args.scales, tile.expert * args.scales_batch_stride + n, args.scale_dtype);
        scale[i] = stored * unscale;
        if (S::kSums) {
          shift[i] =
              shift_of(stored, load_element(args.shift, tile.expert * args.shift_batch_stride + n, args.shift_dtype));
        }
        if (has_zeros) {
          const uint8_t* const zeros = static_cast<const uint8_t*>(args.shift) + tile.expert * args.shift_batch_stride;
          zero[i] = C::minus_bytes(ptx::low_twice(zeros[n]));
        }
      }
    }
    uint32_t codes[2][S::kUnitSteps][4];
    // What a table's numbers are beyond fp16.
    [[maybe_unused]] uint32_t seconds[2][S::kTwoNumbers ? S::kUnitSteps : 1][4];
    uint4 words[kVectors];
    uint32_t zero_bits[2], scale_bits[2];
    [[maybe_unused]] uint32_t shift_bits[2];
    constexpr int kSumVectors = (kColumns + 31) / 32;
    [[maybe_unused]] float sum_of[kSumVectors];  // of rows `lane` and `lane` + 32, for the next flush
    const int lane = threadIdx.x % 32;
    // Loads come some instructions before what they are for.
    const auto load_unit = [&](const uint8_t* data, int unit) {
      load_words(data, unit, words);
      if (has_zeros && (S::kFlushes > 1 || unit == 0)) {
        const uint8_t* const from = data + S::kZerosAt + unit * S::kOutputs + of_tile;
        zero_bits[0] = from[0], zero_bits[1] = from[8];
      }
    };
    const auto convert_unit = [&](int unit) {
      if (has_zeros && grouped && (S::kFlushes > 1 || unit == 0)) {
#pragma unroll
        for (int i = 0; i < 2; ++i) zero[i] = C::minus_bytes(ptx::low_twice(zero_bits[i]));
      }
      uint32_t (&to)[S::kUnitSteps][4] = codes[unit % 2];
      if constexpr (S::kTable) {
#pragma unroll
        for (int step = 0; step < S::kUnitSteps; step += kVectorSteps / 2) {
          const uint4& both = words[kShared ? 0 : step / kVectorSteps];
          const bool second = (unit * S::kUnitSteps + step) / (kVectorSteps / 2) % 2 == 1;
          warpgroup::look_up_half<S::kPieces>(second ? both.z : both.x, second ? both.w : both.y, table, lane,
                                              to + step, seconds[unit % 2] + step);
        }
      } else if constexpr (kShared) {
        const uint4& both = words[0];
        warpgroup::convert_half<X, S::kBits>(unit % 2 == 0 ? both.x : both.z, unit % 2 == 0 ? both.y : both.w, zero[0],
                                             zero[1], to);
      } else {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          warpgroup::convert<X, S::kBits>(words[i], zero[0], zero[1], to + i * kVectorSteps);
        }
      }
    };
    const auto multiply_unit = [&](uint64_t x, int unit) {
#pragma unroll
      for (int piece = 0; piece < S::kPieces; ++piece) {
        warpgroup::multiply_steps<X, kColumns>(part, codes[unit % 2], x + (piece * S::kPieceBytes >> 4),
                                               unit * S::kUnitSteps, S::kHalfBytes,
                                               piece > 0 || (S::kFlushes == 1 && unit > 0));
      }
      if constexpr (S::kTwoNumbers) {
        warpgroup::multiply_steps<X, kColumns>(part, seconds[unit % 2], x, unit * S::kUnitSteps, S::kHalfBytes, true);
      }
    };
    const auto load_scales = [&](const uint8_t* data, int group) {
      const uint8_t* const from = data + S::kScalesAt + group * S::kScaleStride;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scale_bits[i] = wide ? reinterpret_cast<const uint32_t*>(from)[of_tile + 8 * i]
                             : reinterpret_cast<const uint16_t*>(from)[of_tile + 8 * i];
        if (!S::kSums) continue;
        const uint8_t* const shifts = data + S::kZerosAt + group * S::kZeroStride;
        shift_bits[i] = args.shift_dtype == DType::kF32 ? reinterpret_cast<const uint32_t*>(shifts)[of_tile + 8 * i]
                                                        : reinterpret_cast<const uint16_t*>(shifts)[of_tile + 8 * i];
      }
    };
    // Of a group whose scales were copied; without, all of its activations are zeros.
    const auto set_scales = [&](bool copied) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t bits = scale_bits[i];
        const float narrow =
            bf16 ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
        const float stored = copied ? (wide ? __uint_as_float(bits) : narrow) : 0.f;
        scale[i] = grouped ? stored * unscale : scale[i];
        if (S::kSums && grouped) shift[i] = copied ? shift_of(stored, from_bits(shift_bits[i], args.shift_dtype)) : 0.f;
      }
    };
    // From memory, as rows begin anywhere, a flush before they are needed.
    const auto load_sums = [&](int stage, int group) {
      const bool there = S::kFlushes == 1 || stage * (kStageK / 32) + group < blocks;
      const float* const from =
          params.sums + static_cast<int64_t>(stage * S::kFlushes + group) * params.work.m + tile.first;
#pragma unroll
      for (int i = 0; i < kSumVectors; ++i) {
        sum_of[i] = there && i * 32 + lane < tile.rows ? __ldg(from + i * 32 + lane) : 0.f;
      }
    };
    const auto add_sums = [&] {
#pragma unroll
      for (int i = 0; i < kColumns / 2; i += 2) {  // of two rows
        const int row = i / 4 * 8 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float sum = __shfl_sync(ragged::kAllLanes, sum_of[i / 16], row % 32 + j);
          acc[i + j] = fmaf(shift[i % 4 / 2], sum, acc[i + j]);
        }
      }
    };

#pragma unroll
    for (float& sum : acc) sum = 0.f;
    int stage = first_stage(tile, args.n, stages);
    const uint8_t* data = ring.stage();
    if (S::kSums) load_sums(stage, 0);
    load_unit(data, 0);
    convert_unit(0);
#pragma unroll 1
    for (int index = 0; index < stages; ++index) {
      const uint64_t x = ptx::wgmma_descriptor(data);
      const int slot = ring.at.slot, groups = blocks - stage * (kStageK / 32);
#pragma unroll
      for (int unit = 0; unit < S::kUnits; ++unit) {
        const bool last = unit + 1 == S::kUnits, flushes = S::kFlushes > 1 || last;
        const int group = S::kFlushes > 1 ? unit : 0;
        if (!last) load_unit(data, unit + 1);
        if (flushes) load_scales(data, group);
        multiply_unit(x, unit);
        if (flushes) set_scales(S::kFlushes == 1 || group < groups);
        if (unit > 0 && S::kFlushes == 1) ptx::wgmma_wait<S::kPieces + S::kTwoNumbers>();
        if (last) {
          ring.at.advance();
          data = ring.stage();
          if (++stage == stages) stage = 0;
        }
        if (!last) {
          convert_unit(unit + 1);
        } else if (index + 1 < stages) {
          ring.wait_full();
          load_unit(data, 0);
          convert_unit(0);
        }
        if (S::kSums && flushes) {
          add_sums();
          load_sums(stage, S::kFlushes > 1 ? (unit + 1) % S::kUnits : 0);
        }
        if (flushes) {
          ptx::wgmma_wait<0>();
          if (last) ring.release(slot);
#pragma unroll
          for (int i = 0; i < kColumns / 2; ++i) acc[i] = fmaf(scale[i % 4 / 2], part[i], acc[i]);
        }
      }
    }
  }

  // What sums of rounded weights are to be multiplied by.
  static constexpr float kUnscale =
      S::kRounded ? 1.f / wonly::Convert<warpgroup::RoundedShape<X, S::kBits, S::kZeros>>::kUnit : 1.f;

  // Writes them.
  __device__ __forceinline__ void finish(const Params& params, const ragged::Plan& plan, const Tile& tile,
                                         float* staged, const float (&acc)[kSums]) const {
    const MatmulArgs& args = params.args;
    const int64_t n0 = tile.n0 + warpgroup * kTileN;
    if (S::kPieces == 1 && args.activation == Activation::kNone && args.y_dtype == args.x_dtype && args.n % 8 == 0) {
      float bias[2] = {};
      if (args.has_bias) Base::load_bias(args, tile.expert, n0, bias);
      const auto pack = [&](int i) {
        return from_float2<X>(fmaf(acc[i], kUnscale, bias[i % 4 / 2]), fmaf(acc[i + 1], kUnscale, bias[i % 4 / 2]));
      };
      int places[S::kTileRows / 16];  // all on their way at once, where they are loads
#pragma unroll
      for (int i = 0; i < S::kTileRows / 16; ++i) {
        places[i] = plan.row(tile.first + min(16 * i + Base::stored_row(), tile.rows - 1));
      }
      Base::template store_placed<S::kTileRows, kPlacedRows>(static_cast<int>(args.n), static_cast<uint16_t*>(args.y),
                                                             n0, tile.rows, staged, pack,
                                                             [&](int i) { return places[i]; });
      return;
    }
    if (!S::kRepeats && args.activation == Activation::kNone && args.y_dtype == DType::kF32) {
      float bias[2] = {};
      if (args.has_bias) Base::load_bias(args, tile.expert, n0, bias);
      constexpr int kOfLane = S::kTileRows / 32;
      int places[kOfLane];  // all on their way at once
      float powers[kOfLane] = {};
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        const int at = tile.first + min(32 * i + Base::lane(), tile.rows - 1);
        places[i] = plan.row(at);
        if (S::kPieces > 1) powers[i] = params.powers[at];
      }
      const auto column_of = [&](int j, int c) {
        const int from = j % 4 * 8 + Base::lane() % 4 * 2 + c;
        tiles::Column column{__shfl_sync(0xffffffffu, places[j / 4], from), kUnscale};
        if constexpr (S::kPieces > 1) column.factor = __shfl_sync(0xffffffffu, powers[j / 4], from);
        return column;
      };
      Base::template store_wide<S::kTileRows>(acc, bias, static_cast<int>(args.n), static_cast<float*>(args.y), n0,
                                              tile.rows, column_of);
      return;
    }
    const auto sums = [&](int i) { return make_float2(acc[i] * kUnscale, acc[i + 1] * kUnscale); };
    const Finish of(args, tile.expert);
    Base::template store<S::kTileRows, kStagedRows>(
        of, n0, tile.rows, staged, sums, [&](int i, int64_t n, float (&values)[8], const float (&biases)[8]) {
          const int at = tile.first + i;
          const float undo = S::kPieces > 1 ? params.powers[at] : 1.f;
#pragma unroll
          for (float& value : values) value *= undo;
          // One after the other: the first joins the end.
          if constexpr (S::kRepeats) {
#pragma unroll 1
            for (int j = 0; j < 8; ++j) {
              float first = values[0];
              if (!isfinite(first) && n + j < args.n) {
                const int x_row = ragged::x_row(params.work, plan.row(at));
                first = exact_sum<S::kTable>(args, tile.expert, x_row, n + j, 0, args.k);
              }
#pragma unroll
              for (int i = 0; i < 7; ++i) values[i] = values[i + 1];
              values[7] = first;
            }
          }
          wonly::finish(of, plan.row(at), n, values, biases);
        });
  }

  // The next tile.
  __device__ __forceinline__ void run(const Params& params, const ragged::Plan& plan, Ring<S>& ring) const {
    const MatmulArgs& args = params.args;
    ring.wait_full();
    const Tile* const note = ring.note();
    const Tile tile = {uniform(note->expert), uniform(note->first), uniform(note->rows), uniform(note->n0),
                       uniform(note->strips)};
    const int outputs = static_cast<int>(min(static_cast<int64_t>(tile.strips * kTileN), args.n - tile.n0));
    if (tile.expert < 0 || outputs <= 0) {  // rows without one, or nothing
#pragma unroll 1
      for (int i = 0; i < tile.rows; ++i) {
        const int64_t to = plan.row(tile.first + i) * args.n + tile.n0;
        if (static_cast<int>(threadIdx.x) < outputs) store_zero(args.y, to + threadIdx.x, args.y_dtype);
      }
      ring.release(ring.at.slot);
      ring.at.advance();
      return;
    }
    if (warpgroup * kTileN >= outputs) {
      const int stages = static_cast<int>(ceil_div(args.k, kStageK));
#pragma unroll 1
      for (int index = 0; index < stages; ++index) {
        ring.wait_full();
        ring.release(ring.at.slot);
        ring.at.advance();
      }
      return;
    }
    prefetch_bias(args, tile.expert, tile.n0 + warpgroup * kTileN, kTileN, Base::thread());
    float acc[kSums];
    if (tile.rows <= 16) {
      multiply<16>(params, tile, ring, acc);
    } else if (tile.rows <= 32) {
      multiply<32>(params, tile, ring, acc);
    } else if (S::kTileRows == 64 && tile.rows <= 48) {
      multiply<48>(params, tile, ring, acc);
    } else if (tile.rows <= 64) {
      multiply<64>(params, tile, ring, acc);
    } else if constexpr (S::kTileRows == 128) {
      if (tile.rows <= 96) {
        multiply<96>(params, tile, ring, acc);
      } else {
        multiply<128>(params, tile, ring, acc);
      }
    }
    finish(params, plan, tile, reinterpret_cast<float*>(ring.shared + S::kStagedAt + warpgroup * kStagedBytes), acc);
  }
};

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    ragged_warpgroup_matmul(const __grid_constant__ Params params, const __grid_constant__ warpgroup::Maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  Ring<S> ring{shared};
  if (threadIdx.x == S::kConsumers) ptx::prefetch_map(&maps.x);
  if (threadIdx.x == 0) {
    uint64_t* const full = reinterpret_cast<uint64_t*>(shared);
    for (int i = 0; i < S::kStages; ++i) {
      ptx::barrier_init(full + i, kProducers);
      ptx::barrier_init(full + S::kStages + i, S::kWarpgroups * 4 * kArrivals);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  ragged::Plan plan = ragged::get_plan(params.work, shared + S::kPlanAt);
  ragged::Span* const spans = ragged::own_spans(shared + S::kPlanAt);
  // Tiles of few rows, and of eight bits, all wait for memory.
  bool mixed = S::kBits == 4 && params.work.m > kAlikeRows * params.work.experts;
  if (mixed && plan.spans == spans && params.work.experts <= kSortedExperts &&
      params.work.m > kUnsortedRows * params.work.experts) {
    mixed = !ragged::all_alike(spans, plan.span_count, S::kTileRows);
    if (mixed) {
      if (threadIdx.x < 32) ragged::sort_spans(spans, plan.span_count, S::kTileRows);
      __syncthreads();
      plan.spans += plan.span_count;
    }
  }
  const Walk<S::kWarpgroups> walk(uniform(plan.tile_count) * params.output_blocks, mixed);
  const int warp = uniform(threadIdx.x / 32);
  if (warp >= S::kWarpgroups * 4) {
    ptx::lower_registers<S::kProducerRegisters>();
    produce<S>(params, maps, plan, walk, ring, warp - S::kWarpgroups * 4);
  } else {
    ptx::raise_registers<S::kConsumerRegisters>();
    [[maybe_unused]] float undo_table = 1.f;
    if constexpr (S::kTable) {  // while the first copies are on their way
      static_assert(S::kConsumers >= kTablePairs && (S::kConsumers == kTablePairs || S::kPieces == 1));
      if (threadIdx.x < kTablePairs) {
        undo_table = prepare_table<typename S::X, S::kPieces>(static_cast<const float*>(params.args.shift),
                                                              shared + S::kTableAt, static_cast<int>(threadIdx.x));
      }
      ptx::named_sync<kConsumersBarrier, S::kConsumers>();
    }
    const Consumer<S> consumer{{warp / 4, warp % 4}, ptx::shared_address(shared + S::kTableAt), undo_table};
    for (int turn = 0; turn < walk.rounds; ++turn) consumer.run(params, plan, ring);
  }
#else
  __trap();
#endif
}

template <typename S>
cudaError_t launch_shape(Params params, int multiprocessors, cudaStream_t stream) {
  warpgroup::Maps maps;
  const MatmulArgs& args = params.args;
  MatmulArgs x = args;
  x.m = params.work.m;
  if (S::kPieces > 1) {
    x.x = args.scratch;
    x.x_dtype = DType::kF16;
    x.batch = S::kPieces;
    x.x_batch_stride = x.m * x.k;
  }
  cudaError_t error = describe_activations(x, S::kBoxRows, &maps.x);
  if (S::kRounded) {
    const auto describe = [&](const void* data, DType type, int64_t batch_stride, CUtensorMap* map) {
      const int64_t batch = batch_stride == 0 ? 1 : params.work.experts;
      return describe_rows(data, element_size(type), args.n, args.groups, batch, S::kOutputs, params.stage_groups, map);
    };
    if (error == cudaSuccess) error = describe(args.scales, args.scale_dtype, args.scales_batch_stride, &maps.scales);
    if (error == cudaSuccess && args.shift_mode != ShiftMode::kNone) {
      error = describe(args.shift, args.shift_dtype, args.shift_batch_stride, &maps.shifts);
    }
  }
  if (error != cudaSuccess) return error;
  params.output_blocks = static_cast<int>(ceil_div(params.args.n, S::kOutputs));
  LaunchShape shape;
  const int64_t most = ragged::most_tiles(params.work) * params.output_blocks * S::kWarpgroups;
  shape.grid = dim3(static_cast<unsigned>(std::min<int64_t>(multiprocessors, most)));
  shape.threads = S::kThreads;
  const int experts = params.work.experts;
  shape.shared_bytes = S::kPlanAt + ragged::plan_bytes(experts <= kSortedExperts ? 2 * experts + 1 : experts);
  return launch_kernel(ragged_warpgroup_matmul<S>, shape, stream, params, maps);
}

inline Kind kind_of(const MatmulArgs& args, int tile_rows) {
  if (rounds(args, tile_rows)) return args.shift_mode == ShiftMode::kZeros ? Kind::kRoundedAndZeros : Kind::kRounded;
  return warpgroup::is_plain(args) ? Kind::kPlain : Kind::kOther;
}

inline cudaError_t launch_split(const MatmulArgs& args, const ragged::Work& work, int multiprocessors,
                                cudaStream_t stream) {
  Params params{};
  params.args = args;
  params.work = work;
  params.log2_group_blocks = log2_group_blocks(args);
  const int* const order = work.row_mode == RowMode::kIds ? ragged::planned_order(work) : nullptr;
  ActivationSums sums{};
  const int64_t count = float32_sums(args);
  if (count > 0) {
    float* const to = static_cast<float*>(args.scratch) + static_cast<int64_t>(work.m) * (args.k + 1);
    const int log2_vectors = has_small_groups(args) ? 2 : 4;  // of 32 or 128 inputs
    static_assert(kStageK == kSplitEach << 4);
    sums = {to, log2_vectors, static_cast<int>(count), work.m, Divisor(work.m)};
  }
  float* powers;
  const cudaError_t error =
      launch_split_activations(args.x, order, work.repeat, work.m, args.k, sums, args.scratch, &powers, stream);
  if (error != cudaSuccess) return error;
  params.powers = powers;
  params.sums = sums.to;
  const auto launch = [&](auto bits, auto flushes, auto kind) {
    // Shared memory has no room for more of eight bits, or beside a table. With sums registers are spilled, which pays
    // with small groups alone.
    constexpr bool kFew = kind.value == Kind::kTable || (kind.value == Kind::kSums && flushes.value == 1);
    constexpr int kWarpgroups = bits.value == 4 && !kFew ? kLowWarpgroups : kHighWarpgroups;
    return launch_shape<Shape<__half, bits.value, kWarpgroups, flushes.value, kind.value, 2>>(params, multiprocessors,
                                                                                              stream);
  };
  const auto with_kind = [&](auto bits, auto kind) {
    return has_small_groups(args) ? launch(bits, std::integral_constant<int, 4>{}, kind)
                                  : launch(bits, std::integral_constant<int, 1>{}, kind);
  };
  const auto with_bits = [&](auto bits) {
    return count > 0 ? with_kind(bits, std::integral_constant<Kind, Kind::kSums>{})
                     : with_kind(bits, std::integral_constant<Kind, Kind::kOther>{});
  };
  constexpr std::integral_constant<int, 4> four;
  if (args.shift_mode == ShiftMode::kTable) return with_kind(four, std::integral_constant<Kind, Kind::kTable>{});
  return args.bits == 4 ? with_bits(four) : with_bits(std::integral_constant<int, 8>{});
}

template <typename X>
cudaError_t launch_typed(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream) {
  Params params{};
  params.args = args;
  params.work = work;
  params.log2_group_blocks = log2_group_blocks(args);
  const int log2 = params.log2_group_blocks;
  params.stage_groups = log2 == 0 ? 4 : log2 == 1 ? 2 : 1;
  const bool low = work.tile_rows == kLowRows, small_groups = params.stage_groups > 1;
  if (args.shift_mode == ShiftMode::kTable) {
    return low ? launch_shape<Shape<X, 4, kLowWarpgroups, 4, Kind::kTable>>(params, multiprocessors, stream)
               : cudaErrorInvalidConfiguration;
  }
  const Kind kind = kind_of(args, work.tile_rows);
  if (kind != Kind::kOther && log2 < 0) params.log2_group_blocks = 30;  // every stage has the first group's
  const auto launch = [&](auto bits, auto warpgroups, auto flushes, auto of_kind) {
    using S = Shape<X, bits.value, warpgroups.value, flushes.value, of_kind.value>;
    return launch_shape<S>(params, multiprocessors, stream);
  };
  constexpr std::integral_constant<int, 4> four;
  constexpr std::integral_constant<int, 8> eight;
  constexpr std::integral_constant<int, 1> once;
  constexpr std::integral_constant<int, kLowWarpgroups> flat;
  constexpr std::integral_constant<int, kHighWarpgroups> high;
  constexpr std::integral_constant<Kind, Kind::kPlain> plain;
  constexpr std::integral_constant<Kind, Kind::kOther> other;
  constexpr std::integral_constant<Kind, Kind::kRounded> rounded;
  constexpr std::integral_constant<Kind, Kind::kRoundedAndZeros> zeros;
  if (args.bits == 8) {
    if (low) return cudaErrorInvalidConfiguration;
    if (small_groups) {
      return kind == Kind::kPlain ? launch(eight, high, four, plain) : launch(eight, high, four, other);
    }
    return kind == Kind::kPlain ? launch(eight, high, once, plain) : launch(eight, high, once, other);
  }
  if (kind == Kind::kRounded) {
    if (low) return launch(four, flat, four, rounded);
    return small_groups ? launch(four, high, four, rounded) : launch(four, high, once, rounded);
  }
  if (kind == Kind::kRoundedAndZeros) return low ? launch(four, flat, four, zeros) : launch(four, high, four, zeros);
  if (kind == Kind::kPlain && small_groups) {
    return low ? launch(four, flat, four, plain) : cudaErrorInvalidConfiguration;  // high tiles round
  }
  if (kind == Kind::kPlain) return low ? launch(four, flat, once, plain) : launch(four, high, once, plain);
  if (low) return small_groups ? cudaErrorInvalidConfiguration : launch(four, flat, once, other);
  return small_groups ? launch(four, high, four, other) : cudaErrorInvalidConfiguration;
}

}  // namespace wonly::ragged_warpgroup
