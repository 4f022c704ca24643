// The product for up to 16 tokens on Hopper, or for tiles of them: mma.sync with the weights loaded from global memory
// to the registers that they are multiplied from, while the activations of a CTA's inputs stay in its shared memory.
//
// A CTA owns a run of outputs and walks over them in passes of one, two or four strips of 16. Of its sixteen warps as
// many as a pass has strips are a team; teams split the inputs by stages of 128, and the warps of one have a strip
// each. A lane loads its words, some stages at once, into one of two sets of registers, and the next into the other as
// soon as these have come. The tensor copy engine brings the activations in pieces, so that the first products wait
// only for the first piece; no warp waits for another, so wgmma, which goes at the pace of the last of four and takes
// as long for eight columns as for sixteen, would be slower. Codes become
// (code - zero) * 2^-13 exactly, and the scale multiplies the float32 sum of a group, as in matmul_warpgroup.cuh. Of
// groups of 32 each lane of four loads the scale of one, and gives it to the others. Codes that index a table are
// looked up in pairs, in shared memory (pair_table.cuh).
//
// Float zeros and offsets are multiplied by the sums of the activations of a stage or group, products of those and of
// ones. Where a warp has few weights, or bits are eight, it loads them with its scales, and makes the sums that it
// needs. Else they are a product of their own: of bf16 numbers, three of which are a sum and up to three what
// multiplies it, exactly but for the last bits. Four more warps make the sums as activations come, and then the product
// for each strip, as teams more that take sixteens of sums in turns.
//
// float32 activations, up to eight tokens, are two fp16 numbers each, in units of the power of two of the largest one
// of a token and stage, and so two columns of the same products. The tensor copy engine brings them as they are; four
// more warps make the numbers of them, in their place.
//
// Where a product is short, its beginning and its end are most of it. So the first loads stand before everything else,
// and each warp sends its sums to the shared memory of the CTA that finishes their outputs, asynchronously and without
// a barrier of the cluster. There they are added in a fixed order, and a token's result does not depend on the values
// of others, or on how many a tile has.
//
// Where a layer is small, several tiles of tokens are a batch of products by the same weights, whose clusters run
// beside each other. The last of them may have fewer tokens.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/division.h"
#include "cuda/element.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/exact_sum.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_resident.h"
#include "cuda/matmul_warpgroup.cuh"
#include "cuda/pair_table.cuh"
#include "cuda/ptx.cuh"
#include "cuda/ptx_sm90.cuh"
#include "cuda/shift_kind.h"
#include "cuda/split_row.cuh"
#include "cuda/tensor_map.h"
#include "layout.h"

namespace wonly::resident {

using warpgroup::Convert;
using warpgroup::convert_half;
using warpgroup::look_up_half;

constexpr int kReceivedAt = 512;  // in the kilobyte of barriers: that of the cluster's sums
constexpr int kCopiedAt = 256;    // and those of pieces of float32 activations before they are split
constexpr int kEmptyAt = 384;     // and of pieces in whose place another comes
constexpr int kSummedAt = 520;    // that of the warps that add activations up, where racecheck watches
constexpr int kUndoAt = 768;      // behind them what undoes a table's power of two
static_assert(kTableBytes == kTablePairs * kWideRowBytes);
constexpr int kThreads = kWarps * 32;       // that multiply
constexpr int kSplitWarps = 4;              // that split float32 activations, each for the stages of one team
constexpr int kSumsBarrier = 1;             // of the warps that add activations up
constexpr int kSplitRows = 4;               // tokens of a stage at once
constexpr int kUnscalePower = 13;           // Convert::kUnscale is this power of two
constexpr int kChunks = kStageInputs / 64;  // of a token's activations of a stage, as the tensor copy engine has them
constexpr int kStageBlocks = kStageInputs / 32;
constexpr int kNoGroups = 30;  // log2 of a group of all inputs, in blocks of 32

struct Params {
  // What the places of the first loads are made of is together: each line of constants is a wait of its own.
  const uint32_t* qw;
  const uint8_t* scales;
  Layout layout;
  int log2_cluster;
  int outputs, k_tiles, blocks;  // of 32 inputs
  int log2_group_blocks;         // group size = 32 << this
  void* y;                       // as args.y, near the others
  bool plain_results;            // of the activations' type
  bool changes_sums;             // by a bias or an activation function
  bool stores_sums;              // plain, nothing changes them, and of 16 bits pairs of neighbours are aligned
  int step_scales;               // from those of a stage of a team to those of its next
  int scale_bytes;
  Divisor of_tokens;  // of rows of those
  uint32_t none;      // zero, which the compiler does not know
  int rows;           // of all entries of the batch
  bool of_scales;     // zeros, which are multiplied by a scale, and subtracted
  float of_shift;     // 2^-13, or its negative
  MatmulArgs args;
};

// kGroups: scales of a stage, at least as many as it has groups. kAnyScales: these, and float zeros and offsets, are of
// any type, not of 16-bit activations'. float32 activations are two fp16 numbers each, neighbours among the columns.
template <typename Input, int kBits_, int kPass, int kBlocks_, int kColumns_, int kGroups_, ShiftKind kShift_,
          bool kAnyScales_, bool kTurns_ = false>
struct Shape {
  static constexpr bool kSplit = std::is_same_v<Input, float>, kAnyScales = kAnyScales_;
  using X = std::conditional_t<kSplit, __half, Input>;
  static constexpr int kBits = kBits_, kColumns = kColumns_, kGroups = kGroups_;
  static constexpr int kLog2Tiles = kBits == 4 ? 1 : 2, kTiles = 1 << kLog2Tiles;  // packed tiles of a stage
  static_assert(kTiles * tile_k(kBits) == kStageInputs);
  static constexpr int kAhead = ahead(kBits), kTurn = 2 * kAhead;
  static constexpr int kPassAtoms = kPass, kTeams = kWarps / kPass;
  static constexpr int kBlocks = kBlocks_;            // of kAhead stages that a warp has, of one strip; 0: any, of any
  static constexpr int kStepTiles = kTeams * kTiles;  // from a stage of a team to its next
  // A piece of the activations has as many stages, or more.
  static constexpr int kLog2Block = log2_block_stages(kBits, kPass);
  static constexpr ShiftKind kShift = kShift_;
  static constexpr int kTokens = kSplit ? 8 : kColumns;
  static constexpr int kStripBytes = kTokens * kAtomN * 4;  // sums of a warp
  // Float zeros and offsets are multiplied beside the weights, or by more warps.
  static constexpr bool kFloats = kShift == ShiftKind::kFloats, kTable = kShift == ShiftKind::kTable;
  static constexpr bool kBeside = kFloats && shifts_beside_weights(kBits, kBlocks);
  static constexpr bool kSums = kFloats && !kBeside;
  static constexpr int kShiftLoad = kAnyScales ? 4 : 2, kByteLoad = kShift == ShiftKind::kBytes ? 1 : 0;
  static constexpr int kLoadedBytes = kBeside ? kShiftLoad : kByteLoad;  // with a scale
  static constexpr int kPassPairs = std::max(kPass / 2, 1);              // of strips
  static constexpr int kMoreTeams = kSums ? kShiftWarps / kPassPairs : 0, kAllTeams = kTeams + kMoreTeams;
  static constexpr int kPieces = kSplit ? 2 : 1;  // of a number
  // Activations of 16 tokens that are copied at once would be as many bytes as the weights, and keep those waiting; of
  // 8 what asks for pieces later takes as long as it saves.
  static constexpr bool kLater = kColumns >= 16;
  static constexpr int kFirstPieces = 2;
  // Pieces of a lone pass, which needs each once, take turns in shared memory: the one before a piece that has just
  // been begun is still multiplied by some warps, and the one before that makes room. Kernels of their own, as others
  // would take up to 2% longer: where activations are is no longer the same for all lanes as far as ptxas knows.
  static constexpr bool kTurns = kTurns_;
  static constexpr int kBehind = 2;
  static_assert(kBehind < kLeastSlots);
  static_assert(!kTurns || (kBlocks == 0 && kPass == kMostPassAtoms && !kLater && !kSplit));
  static_assert(!kSums || (kBlocks == 0 && !kSplit));
  static_assert(!kFloats || kTokens == 8);
  static_assert(!kSplit || (kAnyScales && kTeams == kSplitWarps));
  static constexpr int kMoreWarps = kSplit ? kSplitWarps : kSums ? kShiftWarps : 0;
  static constexpr int kSlotRows = kMoreTeams * kShiftRows;  // from those of a team to its next
  // Items of shifts on their way to a warp, each of kShiftRows of shifts and scales of two strips.
  static constexpr int kItemBytes = kShiftRows * 2 * kAtomN * 2 * (kAnyScales ? 4 : 2);
  static constexpr int kSlots = kShiftBytes / kShiftWarps / kItemBytes;
  // Of registers all have as many when they begin; those that add shifts leave some to the others.
  static constexpr int kMainRegisters = 104, kShiftRegisters = 64;
  static constexpr int kAllThreads = kThreads + kMoreWarps * 32;
  // Warps that multiply split the first piece, for which they have yet to wait; of up to four tokens they would ask for
  // their next weights too late.
  static constexpr bool kAllSplit = kSplit && kColumns == 16;
  static constexpr int kFactors = kColumns / 2;                                     // of a stage's tokens
  static constexpr int kRowBytes = kStageInputs * static_cast<int>(sizeof(Input));  // a token's inputs of a stage
  // Outputs that are not finite are summed up again, term by term.
  static constexpr bool kExact = kFloats || kSplit;
};

// float32 activations in a CTA's shared memory become two fp16 numbers each, in their place, by a warp: rows `first` to
// first + kSplitRows - 1, below `end`, of the stages of a team, each a token's inputs of a stage. They are
// multiplied by the power of two that makes the largest of them 2^14 or more; the numbers are then exact to 2^-22 of an
// activation, or 2^-39 of that largest one. A factor undoes it. Rows of 64 inputs are swizzled as the tensor copy
// engine does that for 16-bit ones.
template <typename S>
__device__ __forceinline__ void split_rows(uint8_t* x, float* factors, const Divisor& tokens, int team, int lane,
                                           int first, int end) {
  uint4 values[kSplitRows];
  uint32_t largest[kSplitRows];  // bits of the magnitude, or of a NaN
  int row_of[kSplitRows], factor_of[kSplitRows];
#pragma unroll
  for (int i = 0; i < kSplitRows; ++i) {
    int token;
    const int step = tokens.divide(min(first + i, end - 1), &token);
    const int chunk = step * (S::kTeams * kChunks) + team * kChunks + lane / 16;
    row_of[i] = 2 * (chunk * static_cast<int>(tokens.divisor) + token);
    factor_of[i] = (step * S::kTeams + team) * S::kFactors + token;
    values[i] = *reinterpret_cast<const uint4*>(x + row_of[i] * 128 + lane % 16 * 16);
  }
#pragma unroll
  for (int i = 0; i < kSplitRows; ++i) largest[i] = largest_of_warp(values[i]);
  __syncwarp();  // all have read
  const uint32_t to_x = ptx::shared_address(x) + lane % 2 * 8, to_factors = ptx::shared_address(factors);
#pragma unroll
  for (int i = 0; i < kSplitRows; ++i) {
    const bool wanted = first + i < end;
    const uint32_t power = split_power(largest[i]);
    uint2 first_numbers, second_numbers;
    split_four(values[i], split_factor(power), &first_numbers, &second_numbers);
    const uint32_t unit = (row_of[i] ^ lane % 16 / 2) & 7;  // of 16 bytes
    const uint32_t to = to_x + row_of[i] * 128 + unit * 16;
    ptx::store_shared(to, first_numbers, wanted);
    ptx::store_shared((to ^ 16) + 128, second_numbers, wanted);
    const uint32_t undo = split_undo(largest[i], power, S::kTable ? 0 : kUnscalePower);
    ptx::store_shared(to_factors + factor_of[i] * 4, undo, wanted && lane == 0);
  }
}

// What a bf16 number has of each of two, which keep the rest.
__device__ __forceinline__ uint32_t take_bf16(float* low, float* high) {
  const uint32_t both = from_float2<__nv_bfloat16>(*low, *high);
  const float2 taken = to_floats<__nv_bfloat16>(both);
  *low -= taken.x;
  *high -= taken.y;
  return both;
}

// Sums of a stage's activations by a warp, `unit` times those of all its inputs or of each 32 << `log2_row_blocks`:
// rows of eight tokens, kSumPieces times, `piece_bytes` apart: what a bf16 number has of a sum, and others of what is
// left.
template <typename S>
__device__ __forceinline__ void add_activations(const uint8_t* x, int first_row, int tokens, int lane, uint8_t* to,
                                                int piece_bytes, int log2_row_blocks, float unit) {
  using X = typename S::X;
  const X one = from_float<X>(1.f);
  const uint32_t pair = pack_pair(one, one);
  const uint32_t ones[4] = {pair, pair, pair, pair};
  const int g = lane / 4, t = lane % 4;
  // Lane 4g + t has row g of tokens 2t and 2t + 1, where there is one.
  const int rows = kStageBlocks >> log2_row_blocks, row = g & (rows - 1);
  float mine[2] = {};
#pragma unroll
  for (int block = 0; block < kStageBlocks; ++block) {
    const int piece = block % 2 * 4 + lane / 8;  // of 16 bytes, swizzled
    const int of_block = first_row + block / 2 * tokens + lane % 8;
    uint32_t inputs[4];
    float sum[4] = {};
    ptx::load_matrices(inputs, ptx::shared_address(x + of_block * 128 + (piece ^ of_block % 8) * 16));
    ptx::mma<Convert<X>::kBf16>(sum, ones, inputs[0], inputs[1]);
    ptx::mma<Convert<X>::kBf16>(sum, ones, inputs[2], inputs[3]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (S::kGroups == 1 || block >> log2_row_blocks == row) mine[i] = fmaf(sum[i], unit, mine[i]);
    }
  }
#pragma unroll
  for (int piece = 0; piece < kSumPieces; ++piece) {
    const uint32_t both = take_bf16(&mine[0], &mine[1]);
    if (g < rows) *reinterpret_cast<uint32_t*>(to + piece * piece_bytes + (row * 8 + 2 * t) * 2) = both;
  }
}

// What multiplies sums, of 16 outputs and rows, as bf16 numbers whose sum it is: float zeros or offsets of the
// activations' type, and scales of those, in the order of an operand of a product.
template <typename X, bool kOfScales>
__device__ __forceinline__ void split_shifts(const uint32_t (&shifts)[4], const uint32_t (&scales)[4],
                                             uint32_t (&numbers)[3][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (!Convert<X>::kBf16) {
      float2 both = to_floats<X>(shifts[i]);
      const float2 scale = to_floats<X>(scales[i]);
      if (kOfScales) both = {both.x * scale.x, both.y * scale.y};
#pragma unroll
      for (auto& of_piece : numbers) of_piece[i] = take_bf16(&both.x, &both.y);
    } else if constexpr (kOfScales) {
      numbers[0][i] = ptx::mul_bf16x2(shifts[i], scales[i]);
      numbers[1][i] = ptx::fma_bf16x2(shifts[i], scales[i], numbers[0][i] ^ 0x80008000u);
    } else {
      numbers[0][i] = shifts[i];
    }
  }
}

// Products of `kNumbers` of such and sums of 16 rows of eight tokens, added to `acc`, for each of `kStrips`. Those of
// the least pieces are sums of their own, as tensor cores round down, and as each product waits for the one before.
template <int kNumbers, int kStrips>
__device__ __forceinline__ void multiply_sums(float (*acc)[4], const uint32_t (*numbers)[3][4],
                                              const uint32_t (&sums)[2 * kSumPieces]) {
  float parts[kStrips][2][4] = {};
#pragma unroll
  for (int order = kSumPieces - 1; order >= 0; --order) {
#pragma unroll
    for (int number = 0; number <= std::min(order, kNumbers - 1); ++number) {
      const int of_sum = order - number;
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        float (&part)[4] = parts[strip][order == kSumPieces - 1];
        ptx::mma_bf16(part, numbers[strip][number], sums[2 * of_sum], sums[2 * of_sum + 1]);
      }
    }
  }
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[strip][i] += parts[strip][1][i] + parts[strip][0][i];
  }
}

// Where sums of strips are: of a round of passes, of all teams of the cluster's CTAs, whose strips the CTAs finish in
// turn.
struct Strips {
  uint8_t* at;
  uint64_t* received;  // counts what comes from the cluster
  int log2_cluster, rank;
  int each;  // that a CTA finishes

  __device__ __forceinline__ int finisher(int of_round) const { return of_round & ((1 << log2_cluster) - 1); }
  // Bytes from `at` to those of a strip of the round by a team of this CTA, in the CTA that finishes it.
  template <typename S>
  __device__ __forceinline__ int of_team(int team, int of_round) const {
    return ((rank * S::kAllTeams + team) * each + (of_round >> log2_cluster)) * S::kStripBytes;
  }
};

// A warp's sums of strip `of_round` go to the CTA that finishes it, which a barrier there counts: for these of eight
// tokens lane 4g + t has rows g and g + 8 of tokens 2t and 2t + 1, of float32 activations t and t + 4.
template <typename S>
__device__ __forceinline__ void send_sums(const Strips& strips, int team, int of_round, int lane, const float* acc,
                                          float unscale, bool wanted) {
  uint8_t* const strip = strips.at + strips.of_team<S>(team, of_round);
#pragma unroll
  for (int block = 0; block < S::kTokens / 8; ++block) {
    const float* const of_block = acc + 4 * block;
    const float4 sums_of = {of_block[0] * unscale, of_block[1] * unscale, of_block[2] * unscale, of_block[3] * unscale};
    uint8_t* const to = strip + (block * 32 + lane) * 16;
    if (!wanted) continue;
    if (strips.log2_cluster > 0) {
      ptx::store_async_at_rank(to, sums_of, strips.received, strips.finisher(of_round));
    } else {
      *reinterpret_cast<float4*>(to) = sums_of;
    }
  }
}

// All threads of the cluster.
__device__ __forceinline__ void meet(int log2_cluster) {
  if (log2_cluster > 0) {
    ptx::cluster_meet();
  } else {
    __syncthreads();
  }
}

// What float zeros or offsets add, by warps of their own, which meet the others wherever those meet.
template <typename S>
__device__ __forceinline__ void add_shifts(const Params& params, uint8_t* shared, const Strips& strips, int64_t batch,
                                           int first_stage, int cta_tiles, int first_atom, int atoms, int round_atoms) {
  using X = typename S::X;
  constexpr int kPassAtoms = S::kPassAtoms, kStrips = std::min(kPassAtoms, 2);  // of a warp in a pass
  const MatmulArgs& args = params.args;
  const Layout& layout = params.layout;
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int team = warp / S::kPassPairs, first_row = team * kShiftRows, first_strip = warp % S::kPassPairs * 2;
  const int stages = (cta_tiles + S::kTiles - 1) / S::kTiles;
  const int log2_row_blocks = S::kGroups == 1 ? 2 : params.log2_group_blocks;  // of a row of sums
  const int stage_rows = kStageBlocks >> log2_row_blocks, rows = stages * stage_rows;
  const int shift_bytes = S::kAnyScales ? element_size(args.shift_dtype) : 2;
  const int scale_bytes = S::kAnyScales ? params.scale_bytes : 2;
  const uint8_t* const shifts = static_cast<const uint8_t*>(args.shift) + batch * args.shift_batch_stride * shift_bytes;
  const uint8_t* const scales = params.scales + batch * args.scales_batch_stride * scale_bytes;
  // Items in the order of their use: rows of shifts of two strips in shared memory, and of scales, whose pieces of 16
  // bytes are swizzled so that lanes read different banks.
  uint8_t* const items = shared + layout.shifts_at + warp * (S::kSlots * S::kItemBytes);
  int fetch_row = first_row, fetch_strip = first_strip;
  const int first_block = first_stage * kStageBlocks, row_blocks = 1 << log2_row_blocks;
  const int end_row = min(rows, (params.blocks - first_block + row_blocks - 1) >> log2_row_blocks);
  const auto fetch_kind = [&](const uint8_t* from, int bytes, uint8_t* item) {
    const int log2_units = bytes == 4 ? 3 : 2, log2_of_unit = bytes == 4 ? 2 : 3;  // in a row, outputs of one
    const int first = (first_atom + fetch_strip) * kAtomN;
    const int end = min(params.outputs, (first_atom + min(atoms, fetch_strip + kStrips)) * kAtomN);
    const auto fetch_each = [&](auto copy) {
#pragma unroll(S::kAnyScales ? 1 : 2)
      for (int i = lane; i < kShiftRows << log2_units; i += 32) {
        const int of_item = i >> log2_units, unit = i & ((1 << log2_units) - 1), row = fetch_row + of_item;
        const int block = first_block + (row << log2_row_blocks), n = first + (unit << log2_of_unit);
        const int64_t at = static_cast<int64_t>(block >> params.log2_group_blocks) * params.outputs + n;
        uint8_t* const to = item + of_item * (2 * kAtomN * bytes) + (unit ^ of_item / 2 % 4 << log2_units - 2) * 16;
        copy(to, at, row < end_row ? end - n : 0);
      }
    };
    if (S::kAnyScales && params.outputs % (1 << log2_of_unit) == 0) {
      fetch_each([&](uint8_t* to, int64_t at, int wanted) {
        ptx::cp_async_16_or_zeros(ptx::shared_address(to), from + at * bytes, wanted > 0);
      });
    } else if (bytes == 4) {
      fetch_each([&](uint8_t* to, int64_t at, int wanted) {
        uint32_t numbers[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) numbers[j] = j < wanted ? reinterpret_cast<const uint32_t*>(from)[at + j] : 0;
        *reinterpret_cast<uint4*>(to) = {numbers[0], numbers[1], numbers[2], numbers[3]};
      });
    } else {
      fetch_each([&](uint8_t* to, int64_t at, int wanted) {
        uint32_t pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint16_t* const pair = reinterpret_cast<const uint16_t*>(from) + at + 2 * j;
          pairs[j] = 2 * j < wanted ? pair[0] : 0;
          pairs[j] |= (2 * j + 1 < wanted ? pair[1] : 0) << 16;
        }
        *reinterpret_cast<uint4*>(to) = {pairs[0], pairs[1], pairs[2], pairs[3]};
      });
    }
  };
  // What most products have: numbers of 16 bits in rows of whole pieces. Lane 4r + u copies piece u of rows r and r + 8
  // of both kinds, and its places are not made of the parameters again for each.
  const bool in_pieces = !S::kAnyScales && params.outputs % 8 == 0;
  const uint32_t row_bytes = static_cast<uint32_t>(params.outputs) * 2;
  int lane_end = 0;  // of rows
  int64_t lane_n = 0;
  const auto at_strip = [&](int strip) {
    const int end = min(params.outputs, (first_atom + min(atoms, strip + kStrips)) * kAtomN);
    const int n = (first_atom + strip) * kAtomN + lane % 4 * 8;
    lane_n = ptx::kept(static_cast<int64_t>(n) * 2);
    lane_end = n < end ? end_row : 0;
  };
  if (in_pieces) at_strip(fetch_strip);
  const int64_t shifts_from = ptx::kept(reinterpret_cast<int64_t>(shifts));
  const int64_t scales_from = ptx::kept(reinterpret_cast<int64_t>(scales));
  const uint32_t lane_to = ptx::shared_address(items) + lane / 4 * 64 + (lane % 4 ^ lane / 8 % 4) * 16;
  const auto fetch = [&](int slot) {
    if (fetch_row < rows && fetch_strip < atoms) {
      if (in_pieces) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = fetch_row + lane / 4 + half * 8;
          const auto group = static_cast<uint32_t>(first_block + (row << log2_row_blocks) >> params.log2_group_blocks);
          const int64_t at = static_cast<int64_t>(uint64_t{group} * row_bytes) + lane_n;
          const uint32_t to = lane_to + slot * S::kItemBytes + half * 512;
          ptx::cp_async_16_or_zeros(to, reinterpret_cast<const void*>(shifts_from + at), row < lane_end);
          if (params.of_scales) {
            const auto* const from = reinterpret_cast<const void*>(scales_from + at);
            ptx::cp_async_16_or_zeros(to + S::kItemBytes / 2, from, row < lane_end);
          }
        }
      } else {
        uint8_t* const item = items + slot * S::kItemBytes;
        fetch_kind(shifts, shift_bytes, item);
        if (params.of_scales) fetch_kind(scales, scale_bytes, item + S::kItemBytes / 2);
      }
    }
    ptx::cp_async_commit();
    fetch_row += S::kSlotRows;
    if (fetch_row >= rows) {  // on to the next pass
      fetch_row = first_row;
      fetch_strip += kPassAtoms;
      if (in_pieces) at_strip(fetch_strip);
    }
  };
#pragma unroll 1
  for (int slot = 0; slot < S::kSlots; ++slot) {
    fetch(slot);
    if (slot > 0) continue;
    __syncthreads();  // the other warps are not to wait for more
    if (strips.log2_cluster > 0) ptx::cluster_arrive();
  }
  // What comes later is in the L2 then.
  const int first = first_stage * kStageBlocks >> params.log2_group_blocks;
  const int end_block = min((first_stage + stages) * kStageBlocks, params.blocks);
  const int groups = ((end_block - 1) >> params.log2_group_blocks) - first + 1, of_line = 128 / shift_bytes;
  const int lines = (atoms * kAtomN + of_line - 1) / of_line;
  for (int i = threadIdx.x; i < groups * lines; i += kShiftWarps * 32) {
    const int n = min(first_atom * kAtomN + i % lines * of_line, params.outputs - 1);
    ptx::prefetch_line(shifts + (static_cast<int64_t>(first + i / lines) * params.outputs + n) * shift_bytes);
  }

  uint8_t* const sums = shared + layout.sums_at;
  const int piece_bytes = sum_rows(layout.stages_each, stage_rows) * kSumRowBytes;
  for (int i = rows * kSumRowBytes + static_cast<int>(threadIdx.x) * 16; i < piece_bytes; i += kShiftWarps * 32 * 16) {
#pragma unroll
    for (int piece = 0; piece < kSumPieces; ++piece) *reinterpret_cast<uint4*>(sums + piece * piece_bytes + i) = {};
  }
#pragma unroll 1
  for (int stage = warp; stage < stages; stage += kShiftWarps) {
    int at = stage, turn = 0;  // where its activations are, of those that have room
    if constexpr (S::kTurns) {
      turn = (stage >> layout.log2_piece) / layout.slots;
      at -= turn * layout.slots << layout.log2_piece;
    }
    const int slot = at >> layout.log2_piece;
    ptx::barrier_wait(reinterpret_cast<uint64_t*>(shared) + slot, turn & 1);
    add_activations<S>(shared + activations_at(S::kTable), at * kChunks * static_cast<int>(args.m),
                       static_cast<int>(args.m), lane, sums + stage * stage_rows * kSumRowBytes, piece_bytes,
                       log2_row_blocks, params.of_shift);
    if constexpr (S::kTurns) {  // of a piece that another follows each warp has a stage, or more
      const bool ends = stage + kShiftWarps >> layout.log2_piece != stage >> layout.log2_piece;
      if (ends) ptx::warp_arrive(reinterpret_cast<uint64_t*>(shared + kEmptyAt) + slot, lane);
    }
  }
  // All sums are there. racecheck takes a named barrier of these warps for the end of the one that the others have come
  // to (docs/performance.md).
  if constexpr (ptx::kArrivals > 1) {
    uint64_t* const summed = reinterpret_cast<uint64_t*>(shared + kSummedAt);
    ptx::barrier_arrive(summed);
    ptx::barrier_wait(summed, 0);
  } else {
    ptx::named_sync<kSumsBarrier, kShiftWarps * 32>();
  }
  if (strips.log2_cluster > 0) ptx::cluster_wait();

  // Where this lane's rows for ldmatrix are: of sums, two numbers of them, and of an item.
  const uint32_t lane_sums = ptx::shared_address(sums) + lane % 16 * kSumRowBytes;
  const int of_lane = lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
  const uint32_t lane_item = ptx::shared_address(items) + of_lane * 64;
  // Of any types: number `row` of rows 2t, 2t + 1, 2t + 8 and 2t + 9, and of outputs g or g + 8 of a strip.
  [[maybe_unused]] const auto number = [&](const uint8_t* item, DType type, int bytes, int row, int eight) {
    const int t = lane % 4, n = eight * 8 + lane / 4;
    const int unit = (n * bytes >> 4) ^ t << (bytes == 4 ? 1 : 0);
    const uint8_t* const at =
        item + (2 * t + row % 2 + row / 2 * 8) * (2 * kAtomN * bytes) + unit * 16 + (n * bytes & 15);
    if (bytes == 4) return *reinterpret_cast<const float*>(at);
    const uint32_t bits = *reinterpret_cast<const uint16_t*>(at);
    return type == DType::kF16 ? to_floats<__half>(bits).x : to_floats<__nv_bfloat16>(bits).x;
  };
  int slot = 0;
#pragma unroll 1
  for (int round_atom = 0;;) {
    const int end_atom = min(round_atom + round_atoms, atoms);
#pragma unroll 1
    for (int pass_atom = round_atom; pass_atom < end_atom; pass_atom += kPassAtoms) {
      const int strip = pass_atom + first_strip;
      float acc[kStrips][4] = {};
#pragma unroll 1
      for (int row = first_row; row < rows && strip < atoms; row += S::kSlotRows, slot = (slot + 1) % S::kSlots) {
        uint32_t of_sums[4], of_rest[4];
        const uint32_t of_row = lane_sums + row * kSumRowBytes;
        ptx::load_matrices_transposed(of_sums, of_row + lane / 16 * piece_bytes);
        ptx::load_matrices_transposed(of_rest, of_row + 2 * piece_bytes);
        const uint32_t pieces[2 * kSumPieces] = {of_sums[0], of_sums[1], of_sums[2],
                                                 of_sums[3], of_rest[0], of_rest[1]};
        ptx::cp_async_wait<S::kSlots - 1>();
        __syncwarp();
        if constexpr (S::kAnyScales) {
          const uint8_t* const item = items + slot * S::kItemBytes;
#pragma unroll 1
          for (int i = 0; i < kStrips; ++i) {
            uint32_t numbers[3][4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              float products[2];
#pragma unroll
              for (int k = 0; k < 2; ++k) {
                const int of_pair = j / 2 * 2 + k, eight = 2 * i + j % 2;
                products[k] = number(item, args.shift_dtype, shift_bytes, of_pair, eight);
                if (params.of_scales) {
                  products[k] *= number(item + S::kItemBytes / 2, args.scale_dtype, scale_bytes, of_pair, eight);
                }
              }
#pragma unroll
              for (auto& of_piece : numbers) of_piece[j] = take_bf16(&products[0], &products[1]);
            }
#pragma unroll
            for (int strip_of = 0; strip_of < kStrips; ++strip_of) {
              if (strip_of == i) multiply_sums<3, 1>(acc + strip_of, &numbers, pieces);
            }
          }
          __syncwarp();  // all have read
          fetch(slot);
        } else {
          uint32_t of_shift[kStrips][4], of_scale[kStrips][4] = {};
#pragma unroll
          for (int i = 0; i < kStrips; ++i) {
            const uint32_t from = lane_item + slot * S::kItemBytes + (i * 2 + half ^ of_lane / 2 % 4) * 16;
            ptx::load_matrices_transposed(of_shift[i], from);
            if (params.of_scales) ptx::load_matrices_transposed(of_scale[i], from + S::kItemBytes / 2);
          }
          __syncwarp();  // all have read
          fetch(slot);
          const auto multiply = [&](auto of_scales) {
            uint32_t numbers[kStrips][3][4];
#pragma unroll
            for (int i = 0; i < kStrips; ++i) split_shifts<X, of_scales.value>(of_shift[i], of_scale[i], numbers[i]);
            multiply_sums<Convert<X>::kBf16 ? of_scales.value ? 2 : 1 : 3, kStrips>(acc, numbers, pieces);
          };
          if (params.of_scales) {
            multiply(std::true_type{});
          } else {
            multiply(std::false_type{});
          }
        }
      }
      if (layout.over_activations) meet(strips.log2_cluster);
#pragma unroll
      for (int i = 0; i < kStrips; ++i) {
        send_sums<S>(strips, S::kTeams + team, strip + i - round_atom, lane, acc[i], Convert<X>::kUnscale,
                     strip + i < atoms);
      }
    }
    if (strips.log2_cluster == 0) __syncthreads();  // they can be added up
    round_atom = end_atom;
    if (end_atom >= atoms) break;
    meet(strips.log2_cluster);  // and have been
  }
}

template <typename S>
__global__ void __launch_bounds__(S::kAllThreads, 1)
    resident_matmul(const __grid_constant__ Params params, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using X = typename S::X;
  using C = Convert<X>;
  constexpr int kTokens = S::kTokens, kColumns = S::kColumns, kGroups = S::kGroups;
  constexpr int kPassAtoms = S::kPassAtoms, kTeams = S::kTeams;
  constexpr int kBits = S::kBits, kTiles = S::kTiles, kStepTiles = S::kStepTiles;
  constexpr int kAhead = S::kAhead, kTurn = S::kTurn;
  extern __shared__ __align__(1024) uint8_t shared[];
  uint64_t* const arrived = reinterpret_cast<uint64_t*>(shared);
  uint64_t* const received = reinterpret_cast<uint64_t*>(shared + kReceivedAt);
  uint8_t* const x = shared + activations_at(S::kTable);
  const MatmulArgs& args = params.args;
  const Layout& layout = params.layout;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  // Warps that do not multiply weights come first, as the schedulers prefer those; in these numbers after the others.
  const unsigned thread = threadIdx.x - (S::kAllThreads - kThreads);
  const int warp = thread / 32;
  const int team = __shfl_sync(0xffffffffu, warp / kPassAtoms, 0);
  const int cluster = 1 << params.log2_cluster;
  const int rank = static_cast<int>(blockIdx.x) & (cluster - 1);
  const int part = static_cast<int>(blockIdx.x) >> params.log2_cluster;
  const int64_t batch = blockIdx.y;
  const int first_atom = part * layout.atoms_each + min(part, layout.atoms_over);
  const int atoms = layout.atoms_each + (part < layout.atoms_over);
  const int first_stage = rank * layout.stages_each;
  const int cta_tiles = min(layout.stages_each * kTiles, params.k_tiles - first_stage * kTiles);

  const int tokens = static_cast<int>(args.m);
  const auto cta_stages = [&] { return (cta_tiles + kTiles - 1) / kTiles; };
  const int pieces = (cta_tiles + (kTiles << layout.log2_piece) - 1) >> (layout.log2_piece + S::kLog2Tiles);
  uint64_t* const copied = S::kSplit ? reinterpret_cast<uint64_t*>(shared + kCopiedAt) : arrived;
  uint64_t* const empty = reinterpret_cast<uint64_t*>(shared + kEmptyAt);
  const int slots = S::kTurns ? min(pieces, layout.slots) : pieces;
  const auto copy_piece = [&](int i, int slot) {
    const int x_row = args.x_batch_stride == 0 ? 0 : static_cast<int>(batch) * tokens;
    const int piece_bytes = tokens * S::kRowBytes << layout.log2_piece;
    ptx::barrier_expect(copied + slot, piece_bytes);
    ptx::tensor_copy_3d(x + slot * piece_bytes, &map, 0, x_row, (first_stage + (i << layout.log2_piece)) * kChunks,
                        copied + slot);
  };
  // A later piece, when `piece` is there.
  const auto copy_next = [&](int piece) {
    const int next = piece + S::kFirstPieces;
    if (S::kLater && next < pieces && ptx::elect_one()) copy_piece(next, next);
  };
  // The piece that follows in the place of one before `piece`, which is in `slot` in an even or odd turn. By a warp.
  const auto copy_turn = [&](int piece, int slot, int turn) {
    const int next = piece - S::kBehind + slots;
    if (piece < S::kBehind || next >= pieces) return;
    const bool of_turn = slot >= S::kBehind;
    const int to = slot - S::kBehind + (of_turn ? 0 : slots);
    ptx::barrier_wait(empty + to, of_turn ? turn : turn ^ 1);
    if (ptx::elect_one()) copy_piece(next, to);
  };
  // Strips of the outputs are finished in turn by the CTAs of the cluster, so many at a time as there is room for sums.
  const auto strips_of_round = [&] { return S::kBlocks > 0 ? atoms : min(atoms, layout.passes * kPassAtoms); };
  const auto strips_of = [&](int round_atoms) -> Strips {
    const int each = (round_atoms + cluster - 1) >> params.log2_cluster;
    return {shared + layout.strips_at, received, params.log2_cluster, rank, each};
  };
  if constexpr (S::kSums) {
    if (team >= kTeams) {
      ptx::lower_registers<S::kShiftRegisters>();
      const int round_atoms = strips_of_round();
      add_shifts<S>(params, shared, strips_of(round_atoms), batch, first_stage, cta_tiles, first_atom, atoms,
                    round_atoms);
      return;
    }
  }
  // Of float32 activations a warp for each team splits all pieces, or all but the first.
  float* const factors = reinterpret_cast<float*>(shared + layout.sums_at);
  const int piece_rows = (tokens << layout.log2_piece) / kTeams;  // of a team, as split_rows counts them
  if constexpr (S::kSplit) {
    if (team >= kTeams) {
      __syncthreads();
      if (cluster > 1) ptx::cluster_arrive();
      const int of = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
      const int rows = (cta_stages() - of + kTeams - 1) / kTeams * tokens;
#pragma unroll 1
      for (int piece = 0; piece < pieces; ++piece) {
        ptx::barrier_wait(copied + piece, 0);
        if (of == 0) copy_next(piece);
        if (S::kAllSplit && piece == 0) continue;
        const int end = min((piece + 1) * piece_rows, rows);
#pragma unroll 1
        for (int row = piece * piece_rows; row < end; row += kSplitRows) {
          split_rows<S>(x, factors, params.of_tokens, of, lane, row, end);
        }
        ptx::warp_arrive(arrived + piece, lane);
      }
      return;
    }
  }

  // Loads of a block of kAhead stages, one block before their use: words of this lane, scale and shift of its outputs,
  // rows g and g + 8 of its warp's strip, of small groups those that block t of a stage belongs to. What is not loaded
  // is multiplied by activations of zero, or belongs to outputs that nobody stores. No load stands in a branch, where
  // it would wait for those before.
  const int lane_tiles = cta_tiles - warp / kPassAtoms * kTiles;  // in registers of a lane, where arithmetic is faster
  const int turns = (cta_tiles + kTurn * kStepTiles - 1) / (kTurn * kStepTiles);
  uint4 words[2][kAhead][kTiles] = {};
  uint32_t scale_bits[2][kAhead][2] = {}, shift_bits[2][kAhead][2] = {};
  const int scale_bytes = S::kAnyScales ? params.scale_bytes : 2;
  const int first_strip = first_atom + warp % kPassAtoms;
  int fetch_atoms = atoms - warp % kPassAtoms;  // from the strip on that is loaded
  int fetch_tiles = fetch_atoms > 0 ? lane_tiles : 0;
  int fetch_rows = params.outputs - first_strip * kAtomN - g;  // outputs from row g on
  const int first_tile = static_cast<int>(static_cast<unsigned>(first_strip) / kAtomsPerTile) * params.k_tiles +
                         (first_stage + warp / kPassAtoms) * kTiles;
  const uint32_t* fetch_words = params.qw + static_cast<int64_t>(first_tile) * kTileWords +
                                (static_cast<unsigned>(first_strip) % kAtomsPerTile * kAtomWords + lane * 4);
  const auto fetch_words_of = [&](auto first, int buffer, int left) {
#pragma unroll
    for (int stage = 0; stage < kAhead; ++stage) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int at = stage * kStepTiles + tile;
        ptx::load_once<!first.value>(words[buffer][stage][tile], fetch_words + at * kTileWords, at < left);
      }
    }
  };
  if (batch > 0) fetch_words += batch * args.qw_batch_stride;
  // The first words before all else, and not as loads that the compiler may put behind the barrier after them. The
  // branch behind them keeps what asking for scales takes from being put before them.
  fetch_words_of(std::true_type{}, 0, fetch_tiles);
  if constexpr (S::kSums) ptx::raise_registers<S::kMainRegisters>();

  const int round_atoms = strips_of_round();
  const auto mine_of = [&](int of_round) { return (of_round - rank + cluster - 1) >> params.log2_cluster; };
  if (warp == 0 && ptx::elect_one()) {
#pragma unroll 1
    for (int i = 0; i < slots; ++i) {
      ptx::barrier_init(copied + i, 1);
      if (S::kSplit) ptx::barrier_init(arrived + i, (S::kAllSplit && i == 0 ? kWarps : kSplitWarps) * ptx::kArrivals);
      if (S::kTurns) ptx::barrier_init(empty + i, (kWarps + (S::kSums ? kShiftWarps : 0)) * ptx::kArrivals);
    }
    ptx::barrier_init(received, 1);
    if (S::kSums && ptx::kArrivals > 1)
      ptx::barrier_init(reinterpret_cast<uint64_t*>(shared + kSummedAt), kShiftWarps * 32);
    ptx::barrier_init_fence();
#pragma unroll 1
    for (int i = 0; i < (S::kLater ? min(slots, S::kFirstPieces) : slots); ++i) copy_piece(i, i);
    ptx::barrier_expect(received, cluster * mine_of(round_atoms) * (S::kAllTeams * S::kStripBytes));
  }

  const int first_group =
      (first_stage + warp / kPassAtoms) * kStageBlocks + (kGroups > 1 ? t : 0) >> params.log2_group_blocks;
  int64_t first_scale = static_cast<int64_t>(first_group) * params.outputs + (first_strip * kAtomN + g);
  const uint8_t* fetch_zeros = nullptr;
  const int zero_bytes = S::kLoadedBytes < 4 ? S::kLoadedBytes : element_size(args.shift_dtype);
  if constexpr (S::kLoadedBytes > 0) {
    const int64_t first = batch * args.shift_batch_stride + first_scale;
    fetch_zeros = static_cast<const uint8_t*>(args.shift) + first * zero_bytes;
  }
  if (batch > 0) first_scale += batch * args.scales_batch_stride;
  const uint8_t* fetch_scales = params.scales + first_scale * scale_bytes;
  // Four bytes of scales are loaded where those may be float32: where a scale is in them, as the upper part of a
  // number. Float zeros and offsets likewise.
  const auto part_of = [](const uint8_t*& from, int bytes) -> uint32_t {
    const uint64_t odd = reinterpret_cast<uint64_t>(from) & 2;
    from -= odd;
    return bytes == 4 ? 0x3210 : odd == 0 ? 0x1044 : 0x3244;
  };
  uint32_t scale_part = 0, zero_part = 0;
  if constexpr (S::kAnyScales) scale_part = part_of(fetch_scales, scale_bytes);
  if constexpr (S::kLoadedBytes == 4) zero_part = part_of(fetch_zeros, zero_bytes);
  const auto fetch_scales_of = [&](auto first, int buffer, int left) {
#pragma unroll
    for (int stage = 0; stage < kAhead; ++stage) {
      const bool wanted = stage * kStepTiles + (kGroups > 1 ? t * kTiles / kStageBlocks : 0) < left;
      const int64_t step = stage * params.step_scales;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool of_row = wanted && 8 * i < fetch_rows;
        uint32_t (&scale)[2] = scale_bits[buffer][stage], (&zero)[2] = shift_bits[buffer][stage];
        // A group that half a stage does not have keeps nothing of others, which may be infinite.
        if (kGroups > 1 && !wanted) scale[i] = zero[i] = 0;
        const uint8_t* const from = fetch_scales + step * scale_bytes;
        ptx::load_part<S::kAnyScales ? 4 : 2, !first.value>(scale[i], from + 8 * scale_bytes * i, of_row);
        if constexpr (S::kLoadedBytes > 0) {
          const uint8_t* const zeros_from = fetch_zeros + (step + 8 * i) * zero_bytes;
          ptx::load_part<S::kLoadedBytes, !first.value>(zero[i], zeros_from, of_row);
        }
      }
    }
  };
  // From what has been asked for to what is next: where that `ends` a strip's tiles, the same ones of the next strips.
  const auto advance = [&](bool ends) {
    fetch_words += kAhead * kStepTiles * kTileWords;
    fetch_scales += kAhead * params.step_scales * scale_bytes;
    fetch_zeros += kAhead * params.step_scales * zero_bytes;
    fetch_tiles -= kAhead * kStepTiles;
    if (!ends) return;
    // Strips of a packed tile lie one behind the other.
    const bool of_next_tile =
        kPassAtoms == kAtomsPerTile || (first_atom + atoms - fetch_atoms) % kAtomsPerTile + kPassAtoms >= kAtomsPerTile;
    fetch_words += ((of_next_tile ? params.k_tiles - 1 : 0) - turns * (kTurn * kStepTiles)) * int64_t{kTileWords};
    fetch_words += kPassAtoms * kAtomWords;
    const int64_t back = static_cast<int64_t>(turns * kTurn) * params.step_scales;
    fetch_scales += (kPassAtoms * kAtomN - back) * scale_bytes;
    fetch_zeros += (kPassAtoms * kAtomN - back) * zero_bytes;
    fetch_rows -= kPassAtoms * kAtomN;
    fetch_atoms -= kPassAtoms;
    fetch_tiles = fetch_atoms > 0 ? lane_tiles : 0;
  };
  fetch_scales_of(std::true_type{}, 0, fetch_tiles);
  advance(false);

  float* const undo_table = reinterpret_cast<float*>(shared + kUndoAt);
  if constexpr (S::kTable) fill_table<X, S::kPieces>(args, batch, shared + kBarrierBytes, undo_table, thread);

  if (params.changes_sums && warp != 0) {  // and not before the barriers, for which all wait
    prefetch_bias(args, batch, first_atom * kAtomN, atoms * kAtomN, static_cast<int>(thread) - 32);
  }
  __syncthreads();
  if (cluster > 1) ptx::cluster_meet();  // all have begun, so that they can be sent sums

  if (S::kAllSplit && cta_tiles > 0) {
    ptx::barrier_wait(copied, 0);
    const int end = min(piece_rows, (cta_stages() - team + kTeams - 1) / kTeams * tokens);
#pragma unroll 1
    for (int row = __shfl_sync(0xffffffffu, warp % kPassAtoms, 0) * kSplitRows; row < end;
         row += kPassAtoms * kSplitRows) {
      split_rows<S>(x, factors, params.of_tokens, team, lane, row, end);
    }
    ptx::warp_arrive(arrived, lane);
  }
  const int tiles = cta_tiles - team * kTiles;
  // Where this lane's rows of activations for ldmatrix are: of a team's first stage, and its next stages a
  // multiple of eight rows further, so that the swizzle is the same.
  const int rows = S::kSplit ? 2 * tokens : tokens;
  uint32_t of_chunk[kChunks];
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int row = (team * kChunks + chunk) * rows + (S::kSplit ? min(lane % 8, rows - 1) : lane % 8);
    of_chunk[chunk] = ptx::shared_address(x + row * 128 + (lane / 8 ^ row % 8) * 16);
  }
  // Of columns that nobody stores it does not matter what they are multiplied by, so the second eight are simply the
  // rows behind the first, which others may be splitting. Where racecheck watches they are rows that there are.
  const uint32_t second_eight = ptx::kArrivals == 1 || 8 + lane % 8 < rows ? 1024 : 0;
  const uint32_t stage_step = kTeams * kChunks * rows * 128;
  const uint32_t of_factors = ptx::shared_address(factors + team * S::kFactors + t);
  const uint32_t table = ptx::shared_address(shared + kBarrierBytes);
  const float unscale = S::kTable ? *undo_table : S::kSplit ? 1.f : C::kUnscale;  // or a part of the factors
  const Strips strips = strips_of(round_atoms);
#pragma unroll 1
  for (int round_atom = 0, phase = 0;; round_atom += round_atoms, phase ^= 1) {
    const int end_atom = min(round_atom + round_atoms, atoms);
#pragma unroll 1
    for (int pass_atom = round_atom; pass_atom < (S::kBlocks > 0 ? 1 : end_atom); pass_atom += kPassAtoms) {
      float acc[kTokens / 2] = {};
      uint32_t stage_at = 0;
      int left = tiles, block = 0, slot_turns = 0;
#pragma unroll 1
      for (int turn = 0; turn < (S::kBlocks > 0 ? 1 : turns); ++turn) {
#pragma unroll
        for (int i = 0; i < (S::kBlocks > 0 ? S::kBlocks * kAhead : kTurn); ++i) {
          const int buffer = i / kAhead, slot = i % kAhead;
          const uint4(&stage_words)[kTiles] = words[buffer][slot];
          // ptxas counts loads that are waited for in another basic block together, so whoever waits for some waits for
          // all that were asked for before. The next ones therefore go out when these have come, which a number that
          // depends on them makes sure of, and is zero. That of the second buffer depends on the sums, too: its wait
          // would otherwise be moved before the last stage of the first is multiplied.
          if (slot == 0 && (S::kBlocks == 0 || buffer + 1 < S::kBlocks)) {
            const uint32_t come = stage_words[0].x | (buffer > 0 ? __float_as_uint(acc[0]) : 0);
            const int fetch_left = fetch_tiles | static_cast<int>(come & params.none);
            fetch_words_of(std::false_type{}, 1 - buffer, fetch_left);
            fetch_scales_of(std::false_type{}, 1 - buffer, fetch_left);
            advance(S::kBlocks == 0 && buffer == 0 && turn == turns - 1);
          }
          if (i * kStepTiles < left) {
            if (slot == 0 && pass_atom == 0) {
              const int piece = block << S::kLog2Block >> layout.log2_piece;
              if constexpr (S::kTurns) {  // each block is a piece
                int slot_of = piece - slot_turns * slots;
                // All teams have stages of a piece that another follows.
                if (piece > 0) ptx::barrier_arrive_if(empty + slot_of - 1, ptx::arrives(lane));
                if (slot_of == slots) {
                  ++slot_turns;
                  slot_of = 0;
                  stage_at = 0;
                }
                ptx::barrier_wait(arrived + slot_of, slot_turns & 1);
                // By the first team, which has a stage of every piece.
                if (warp == 0) copy_turn(piece, slot_of, slot_turns & 1);
              } else {
                ptx::barrier_wait(arrived + piece, 0);
                if constexpr (S::kLater && !S::kSplit) {
                  const bool begins = piece << layout.log2_piece == block << S::kLog2Block;
                  if (warp == 0 && begins) copy_next(piece);
                }
              }
            }
            // Of small groups lane t has the scale and the zero of block t for both rows, which it gives to the others.
            const uint32_t (&scales_of)[2] = scale_bits[buffer][slot], (&shifts_of)[2] = shift_bits[buffer][slot];
            uint32_t zero_pair = 0;
            if constexpr (S::kShift == ShiftKind::kBytes) {
              zero_pair = C::minus_bytes(shifts_of[0] | shifts_of[1] << 16);
            }
            // Products of one chain wait for each other.
            constexpr int kChains = kGroups > 1 ? kGroups : kColumns == 8 ? 2 : 1;
            constexpr int kChainBlocks = kStageBlocks / kChains;
            const int stage = turn * kTurn + i;  // of this team
            float part_sums[kChains][kColumns / 2] = {}, x_sums[kChains][kColumns / 2] = {};
#pragma unroll
            for (int block = 0; block < kStageBlocks; ++block) {
              uint32_t minus_zero[2], pair = zero_pair;
              if (S::kShift == ShiftKind::kBytes && kGroups > 1) pair = __shfl_sync(0xffffffffu, zero_pair, block, 4);
              minus_zero[0] = S::kFloats ? 0 : C::minus_zero(bias_of(kBits));
              if constexpr (S::kShift == ShiftKind::kBytes) minus_zero[0] = ptx::low_twice(pair);
              minus_zero[1] = S::kShift == ShiftKind::kBytes ? ptx::high_twice(pair) : minus_zero[0];
              const uint4& w = stage_words[block * kTiles / kStageBlocks];
              uint32_t codes[2][4], second_numbers[2][4];
              const bool first_half = kBits == 8 || block % 2 == 0;
              const uint32_t low = first_half ? w.x : w.z, high = first_half ? w.y : w.w;
              if constexpr (S::kTable) {
                look_up_half<S::kPieces, kWideRowBytes>(low, high, table, lane, codes, second_numbers);
              } else {
                if constexpr (kBits == 8) {  // a vector of words is one block
                  convert_half<X, kBits>(w.z, w.w, minus_zero[0], minus_zero[1], codes + 1);
                }
                convert_half<X, kBits>(low, high, minus_zero[0], minus_zero[1], codes);
              }
#pragma unroll
              for (int eight = 0; eight < kColumns / 8; ++eight) {
                uint32_t inputs[4];
                ptx::load_matrices(inputs, (of_chunk[block / 2] ^ block % 2 * 64) + stage_at + eight * second_eight);
                float (&to)[4] = *reinterpret_cast<float (*)[4]>(part_sums[block / kChainBlocks] + 4 * eight);
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                  ptx::mma<C::kBf16>(to, codes[step], inputs[2 * step], inputs[2 * step + 1]);
                  if constexpr (S::kBeside) {
                    constexpr uint32_t kOnes = C::kBf16 ? 0x3f803f80u : 0x3c003c00u;
                    const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
                    float (&x_sum)[4] = *reinterpret_cast<float (*)[4]>(x_sums[block / kChainBlocks] + 4 * eight);
                    ptx::mma<C::kBf16>(x_sum, ones, inputs[2 * step], inputs[2 * step + 1]);
                  }
                  if constexpr (S::kTable && S::kPieces > 1) {
                    ptx::mma<C::kBf16>(to, second_numbers[step], inputs[2 * step], inputs[2 * step + 1]);
                  }
                }
              }
            }
            const auto of_any = [&](const uint32_t (&loaded)[2], DType type, uint32_t part) -> float2 {
              float both[2];
#pragma unroll
              for (int j = 0; j < 2; ++j) {
                const uint32_t upper = __byte_perm(loaded[j], 0, part);
                both[j] = type == DType::kF16 ? to_floats<__half>(upper).y : __uint_as_float(upper);
              }
              return {both[0], both[1]};
            };
            const auto given = [&](float2 both, int chain) -> float2 {
              if (kGroups == 1) return both;
              return {__shfl_sync(0xffffffffu, both.x, chain * kChainBlocks, 4),
                      __shfl_sync(0xffffffffu, both.y, chain * kChainBlocks, 4)};
            };
            const auto scales_of_chain = [&](int chain) -> float2 {
              if constexpr (S::kAnyScales) return given(of_any(scales_of, args.scale_dtype, scale_part), chain);
              const uint32_t pair = __byte_perm(scales_of[0], scales_of[1], 0x5410);
              return to_floats<X>(kGroups > 1 ? __shfl_sync(0xffffffffu, pair, chain * kChainBlocks, 4) : pair);
            };
            float2 own_shift = {};  // of rows g and g + 8, in units of the sums
            if constexpr (S::kBeside) {
              float2 scale;
              if constexpr (S::kAnyScales) {
                own_shift = of_any(shifts_of, args.shift_dtype, zero_part);
                scale = of_any(scales_of, args.scale_dtype, scale_part);
              } else {
                own_shift = to_floats<X>(__byte_perm(shifts_of[0], shifts_of[1], 0x5410));
                scale = to_floats<X>(__byte_perm(scales_of[0], scales_of[1], 0x5410));
              }
              own_shift.x *= params.of_scales ? scale.x * params.of_shift : params.of_shift;
              own_shift.y *= params.of_scales ? scale.y * params.of_shift : params.of_shift;
            }
            float of_stage[kColumns / 4] = {};
#pragma unroll
            for (int chain = 0; chain < kChains; ++chain) {
              const float2 scale = scales_of_chain(chain);
              const float2 shift = S::kBeside ? given(own_shift, chain) : own_shift;
#pragma unroll
              for (int j = 0; j < kColumns / 2; ++j) {
                const float scale_of = j % 4 < 2 ? scale.x : scale.y, sum = part_sums[chain][j];
                if constexpr (!S::kSplit) {
                  acc[j] = fmaf(scale_of, sum, acc[j]);
                  if constexpr (S::kBeside) acc[j] = fmaf(j % 4 < 2 ? shift.x : shift.y, x_sums[chain][j], acc[j]);
                } else if (j % 2 == 0) {
                  of_stage[j / 2] = fmaf(scale_of, sum + part_sums[chain][j + 1], of_stage[j / 2]);
                }
              }
            }
            if constexpr (S::kSplit) {  // of rows g and g + 8 of a token of every four
#pragma unroll
              for (int four = 0; four < kColumns / 8; ++four) {
                const uint32_t at = of_factors + (stage * kTeams * S::kFactors + four * 4) * 4;
                const float factor = __uint_as_float(ptx::load_shared(at));
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                  float& to = acc[four / 2 * 4 + row * 2 + four % 2];
                  to = fmaf(factor, of_stage[2 * four + row], to);
                }
              }
            }
          }
          stage_at += stage_step;
          if (slot == kAhead - 1) ++block;
        }
        left -= kTurn * kStepTiles;
      }

      if (layout.over_activations) meet(params.log2_cluster);  // which all are done with
      const int atom = pass_atom + warp % kPassAtoms;
      send_sums<S>(strips, team, atom - round_atom, lane, acc, unscale, atom < atoms);
    }

    const int mine = mine_of(end_atom - round_atom);
    const auto add_up = [&](int i, float (&sum)[4]) {
      const uint8_t* at = strips.at + i * 512 + lane * 16;
#pragma unroll 1
      for (int other = 0; other < cluster; ++other) {
#pragma unroll
        for (int four = 0; four < (S::kAllTeams + 3) / 4; ++four) {
          float of_four[4] = {};
#pragma unroll
          for (int other_team = 4 * four; other_team < 4 * four + 4 && other_team < S::kAllTeams; ++other_team) {
            const float4 v = *reinterpret_cast<const float4*>(at);
            of_four[0] += v.x, of_four[1] += v.y, of_four[2] += v.z, of_four[3] += v.w;
            at += strips.each * S::kStripBytes;
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[j] += of_four[j];
        }
      }
    };
    const auto first_token_of = [&](int i) { return i % (kTokens / 8) * 8; };
    const auto first_output_of = [&](int i) {
      return (first_atom + round_atom + (i / (kTokens / 8) << params.log2_cluster) + rank) * kAtomN;
    };
    // The last of several tiles may have fewer tokens than there are activations.
    const int there = min(tokens, params.rows - static_cast<int>(batch) * tokens);
    const auto token_of = [&](int i, int j) { return first_token_of(i) + (S::kSplit ? t + j % 2 * 4 : 2 * t + j % 2); };
    const auto all_finite = [&](int i, const float (&sum)[4]) {
      const float of_tokens =
          (token_of(i, 0) < there ? sum[0] + sum[2] : 0.f) + (token_of(i, 1) < there ? sum[1] + sum[3] : 0.f);
      return __all_sync(0xffffffffu, isfinite(of_tokens)) != 0;
    };
    const auto store_each = [&](int i, const float (&sum)[4]) {
      using Y = std::conditional_t<S::kSplit, float, X>;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int token = token_of(i, j), n = first_output_of(i) + g + j / 2 * 8;
        Y* const y = static_cast<Y*>(params.y) + (batch * args.m + token) * params.outputs + n;
        if (token < there && n < params.outputs) *y = from_float<Y>(sum[j]);
      }
    };
    // Neighbours along the outputs in one store: what lanes of even g have of the odd token is exchanged for what those
    // of odd g have of the even one. Where the first of them go is known before the wait.
    const bool odd = g % 2 == 1;
    const int token_of_pairs = first_token_of(warp) + 2 * t + odd;
    int n_of_pairs = first_output_of(warp) + (g & ~1);
    const int64_t first_of_pairs = (batch * args.m + token_of_pairs) * params.outputs + n_of_pairs;
    X* pairs = static_cast<X*>(params.y) + (S::kSplit ? 0 : ptx::kept(first_of_pairs));
    const auto store_pairs = [&](const float (&sum)[4]) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float mine_of_pair = odd ? sum[2 * half + 1] : sum[2 * half];
        const float theirs = __shfl_xor_sync(0xffffffffu, odd ? sum[2 * half] : sum[2 * half + 1], 4);
        const uint32_t pair = odd ? from_float2<X>(theirs, mine_of_pair) : from_float2<X>(mine_of_pair, theirs);
        if (token_of_pairs < there && n_of_pairs + 8 * half < params.outputs) {
          reinterpret_cast<uint32_t*>(pairs)[4 * half] = pair;
        }
      }
    };
    const auto next = [&](int i) {
      const int step = kThreads / 32 / (kTokens / 8) * kAtomN << params.log2_cluster;
      n_of_pairs += step;
      pairs += step;
      return i + kThreads / 32;
    };

    // Of teams in order, by fours, then of the CTAs in order. A CTA that finishes none of the last strips is sent none.
    if (cluster == 1) {
      __syncthreads();
    } else if (mine > 0) {
      ptx::barrier_wait(received, phase);
    }
    const int count = mine * (kTokens / 8);
    int i = warp;
    // What most products do is a loop of its own: each line of instructions that is jumped over is a wait, too.
    if (__builtin_expect(params.stores_sums, 1)) {
#pragma unroll 1
      for (; i < count; i = next(i)) {
        float sum[4] = {};
        add_up(i, sum);
        if (S::kExact && !all_finite(i, sum)) break;
        if constexpr (S::kSplit) {
          store_each(i, sum);
        } else {
          store_pairs(sum);
        }
      }
    }
#pragma unroll 1
    for (; i < count; i = next(i)) {
      float bias[2] = {}, sum[4] = {};
      if (args.has_bias) {
#pragma unroll
        for (int half = 0; half < 2; ++half) bias[half] = output_bias(args, batch, first_output_of(i) + g + 8 * half);
      }
      add_up(i, sum);
      const bool plain = params.plain_results && (!S::kExact || all_finite(i, sum));
      if (plain && params.changes_sums) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] += bias[j / 2];
        apply(args.activation, sum, !S::kSplit);
      }
      if (plain && (S::kSplit || params.outputs % 2 != 0)) {
        store_each(i, sum);
      } else if (plain) {
        store_pairs(sum);
      } else {
#pragma unroll 1
        for (int j = 0; j < 4; ++j) {
          const int token = token_of(i, j), n = first_output_of(i) + g + j / 2 * 8;
          if (token >= there || n >= params.outputs) continue;
          float of_one = j < 2 ? j == 0 ? sum[0] : sum[1] : j == 2 ? sum[2] : sum[3];
          // Where an infinity or a NaN took part, the shares of the codes and of the shift do not add up to what a
          // weight times it is.
          if (S::kExact && !isfinite(of_one)) of_one = exact_sum<S::kTable>(args, batch, token, n, 0, args.k);
          finish(args, batch, token, n, of_one, j < 2 ? bias[0] : bias[1]);
        }
      }
    }
    if (S::kBlocks > 0 || end_atom >= atoms) break;
    // The room of these sums is that of the next.
    if (cluster > 1) {
      // A phase of no bytes would end at once, and warps that have yet to see the end of the one before would wait for
      // ever.
      const int bytes = cluster * mine_of(min(round_atoms, atoms - end_atom)) * (S::kAllTeams * S::kStripBytes);
      if (thread == 0 && bytes > 0) ptx::barrier_expect(received, bytes);
      __syncwarp();
      ptx::cluster_meet();
    } else {
      __syncthreads();
    }
  }
#else
  __trap();
#endif
}

template <typename Input, int kBits>
cudaError_t launch_typed(const MatmulArgs& args, int64_t rows, const Config& config, int shared_bytes,
                         cudaStream_t stream) {
  Params params{};
  params.args = args;
  params.rows = static_cast<int>(rows);
  params.qw = args.qw;
  params.scales = static_cast<const uint8_t*>(args.scales);
  params.layout = layout(args, config, shared_bytes);
  while (1 << params.log2_cluster < config.cluster) ++params.log2_cluster;
  params.y = args.y;
  params.plain_results = args.y_dtype == args.x_dtype;
  params.changes_sums = args.has_bias || args.activation != Activation::kNone;
  params.stores_sums = params.plain_results && !params.changes_sums && (args.x_dtype == DType::kF32 || args.n % 2 == 0);
  params.outputs = static_cast<int>(args.n);
  params.k_tiles = static_cast<int>(args.k) / tile_k(kBits);
  params.blocks = static_cast<int>(args.k) / 32;
  params.log2_group_blocks = log2_group_blocks(args);
  if (params.log2_group_blocks < 0) params.log2_group_blocks = kNoGroups;
  params.step_scales = (kWarps / config.pass_atoms * kStageBlocks >> params.log2_group_blocks) * params.outputs;
  params.scale_bytes = element_size(args.scale_dtype);
  params.of_tokens = Divisor(static_cast<int>(args.m));
  params.of_scales = args.shift_mode != ShiftMode::kOffsets;
  params.of_shift = params.of_scales ? -0x1p-13f : 0x1p-13f;
  if (params.layout.passes == 0 || 1 << params.log2_cluster != config.cluster) return cudaErrorInvalidConfiguration;
  if (!has_passes(args, config)) return cudaErrorInvalidConfiguration;
  CUtensorMap map;
  const cudaError_t error = describe_chunks(args, args.x_batch_stride == 0 ? args.m : rows, static_cast<int>(args.m),
                                            kChunks << params.layout.log2_piece, &map);
  if (error != cudaSuccess) return error;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(config.parts * config.cluster), static_cast<unsigned>(args.batch));
  shape.cluster = config.cluster;
  shape.shared_bytes = static_cast<int>(params.layout.bytes);
  const auto launch_shape = [&](auto of) {
    shape.threads = decltype(of)::kAllThreads;
    return launch_kernel(resident_matmul<decltype(of)>, shape, stream, params, map);
  };
  constexpr bool kSplit = std::is_same_v<Input, float>;
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  constexpr std::integral_constant<int, 4> four;
  const auto launch = [&](auto groups, auto shift) {
    constexpr int kGroups = groups.value;
    constexpr ShiftKind kShift = shift.value;
    const auto of_columns = [&](auto wide, auto any) {
      constexpr int kColumns = wide.value;
      constexpr bool kAny = any.value;
      const auto of_blocks = [&](auto pass, auto blocks) {
        return launch_shape(Shape<Input, kBits, pass.value, blocks.value, kColumns, kGroups, kShift, kAny>{});
      };
      // As has_few_blocks.
      constexpr bool kFewOfAny = kGroups == 1 || kShift == ShiftKind::kFloats;
      if constexpr ((kSplit || kColumns == 8) && kShift != ShiftKind::kTable && (!kAny || kFewOfAny)) {
        const auto of_few = [&](auto pass) {
          return params.layout.blocks == 1 ? of_blocks(pass, one) : of_blocks(pass, two);
        };
        if constexpr (!kSplit) {
          if (config.pass_atoms == 1) return of_few(one);
          if (params.layout.blocks > 0 && config.pass_atoms == 2) return of_few(two);
        }
        if (params.layout.blocks > 0) return of_few(four);
      }
      constexpr std::integral_constant<int, 0> any_blocks;
      if constexpr (kColumns == 8 && !kAny && kShift != ShiftKind::kTable) {
        if (params.layout.slots < params.layout.pieces) {  // as has_turns allows
          return launch_shape(Shape<Input, kBits, kMostPassAtoms, 0, kColumns, kGroups, kShift, kAny, true>{});
        }
      }
      if constexpr (!kAny && kShift != ShiftKind::kTable) {
        if (config.pass_atoms == 2) return of_blocks(two, any_blocks);
      }
      return of_blocks(four, any_blocks);
    };
    const auto of_scales = [&](auto any) {
      const int64_t columns = kSplit ? 2 * args.m : args.m;
      if (columns > 8) return of_columns(std::integral_constant<int, 16>{}, any);
      return of_columns(std::integral_constant<int, 8>{}, any);
    };
    if constexpr (kShift == ShiftKind::kFloats) {
      constexpr std::integral_constant<int, 8> eight;
      const bool alike = args.scale_dtype == args.x_dtype && args.shift_dtype == args.x_dtype;
      return alike ? of_columns(eight, std::false_type{}) : of_columns(eight, std::true_type{});
    } else if constexpr (kSplit) {
      return of_scales(std::true_type{});
    } else {
      return args.scale_dtype == args.x_dtype ? of_scales(std::false_type{}) : of_scales(std::true_type{});
    }
  };
  constexpr std::integral_constant<ShiftKind, ShiftKind::kNone> symmetric;
  constexpr std::integral_constant<ShiftKind, ShiftKind::kBytes> bytes;
  constexpr std::integral_constant<ShiftKind, ShiftKind::kTable> table;
  const int log2 = params.log2_group_blocks;
  if constexpr (kBits == 4) {
    if (args.shift_mode == ShiftMode::kTable) return log2 < 2 ? launch(four, table) : launch(one, table);
  }
  if (args.shift_mode == ShiftMode::kNone) return log2 < 2 ? launch(four, symmetric) : launch(one, symmetric);
  if (kSplit || args.shift_dtype == DType::kU8) return log2 < 2 ? launch(four, bytes) : launch(one, bytes);
  if constexpr (!kSplit) {
    constexpr std::integral_constant<ShiftKind, ShiftKind::kFloats> floats;
    return log2 < 2 ? launch(four, floats) : launch(one, floats);
  }
}

template <int kBits>
cudaError_t launch_of(const MatmulArgs& args, int64_t rows, const Config& config, int shared_bytes,
                      cudaStream_t stream) {
  return dispatch_float(args.x_dtype, [&](auto* x) {
    return launch_typed<std::remove_pointer_t<decltype(x)>, kBits>(args, rows, config, shared_bytes, stream);
  });
}

}  // namespace wonly::resident
