// The product for up to 16 tokens on Hopper: mma.sync with the weights loaded from global memory to the registers that
// they are multiplied from, while the activations of a CTA's inputs stay in its shared memory.
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
// Float zeros and offsets are a product of their own at the end of a strip, with the sums of the activations of a stage
// or of 32 inputs, which are made when the first strip has been multiplied: of tf32 numbers, two of which are a sum and
// two what multiplies it, exactly but for the last bits. Teams take eights of these sums in turns.
//
// float32 activations, up to eight tokens, are two fp16 numbers each, in units of the power of two of the largest one
// of a token and stage, and so two columns of the same products. The tensor copy engine brings them as they are; four
// more warps make the numbers of them, in their place.
//
// Where a product is short, its beginning and its end are most of it. So the first loads stand before everything else,
// and each warp sends its sums to the shared memory of the CTA that finishes their outputs, asynchronously and without
// a barrier of the cluster. There they are added in a fixed order, and a token's result does not depend on the values
// or the number of others.
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
constexpr int kSummedAt = 640;    // that of the sums of activations
constexpr int kUndoAt = 768;      // behind them what undoes a table's power of two
static_assert(kTableBytes == kTablePairs * kWideRowBytes);
constexpr int kThreads = kWarps * 32;        // that multiply
constexpr int kSplitWarps = 4;               // that split float32 activations, each for the stages of one team
constexpr int kSplitRows = 4;                // tokens of a stage at once
constexpr int kUnscalePower = 13;            // Convert::kUnscale is this power of two
constexpr int kChunks = kStageInputs / 64;   // of a token's activations of a stage, as the tensor copy engine has them
constexpr uint32_t kTf32Bits = 0xffffe000u;  // of a float32
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
  // What multiplies zeros and offsets is `of_shift`, less the scale, or not.
  bool of_scales;
  float of_shift;
  MatmulArgs args;
};

// kGroups: scales of a stage, at least as many as it has groups. kAnyScales: these are of any type, not of 16-bit
// activations'. float32 activations are two fp16 numbers each, neighbours among the columns.
template <typename Input, int kBits_, int kPass, int kBlocks_, int kColumns_, int kGroups_, ShiftKind kShift_,
          bool kAnyScales_>
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
  static constexpr bool kSums = kShift == ShiftKind::kFloats, kTable = kShift == ShiftKind::kTable;
  static constexpr int kSumRows = kGroups;  // sums of a stage for each token
  // Eights of those that a warp multiplies at once; of few blocks all that it ever does.
  static constexpr int kShiftSlots = kBlocks == 0 ? 1 : std::max(kBlocks * kAhead * kSumRows / 8, 1);
  static constexpr int kPieces = kSplit ? 2 : 1;  // of a number
  // Activations of 16 tokens that are copied at once would be as many bytes as the weights, and keep those waiting; of
  // 8 what asks for pieces later takes as long as it saves.
  static constexpr bool kLater = kColumns >= 16;
  static constexpr int kFirstPieces = 2;
  static_assert(!kSums || (kTokens == 8 && !kAnyScales));
  static_assert(!kSplit || (kAnyScales && kTeams == kSplitWarps));
  static constexpr int kAllThreads = kThreads + (kSplit ? kSplitWarps * 32 : 0);
  // Warps that multiply split the first piece, for which they have yet to wait; of up to four tokens they would ask for
  // their next weights too late.
  static constexpr bool kAllSplit = kSplit && kColumns == 16;
  static constexpr int kFactors = kColumns / 2;                                     // of a stage's tokens
  static constexpr int kRowBytes = kStageInputs * static_cast<int>(sizeof(Input));  // a token's inputs of a stage
  // Outputs that are not finite are summed up again, term by term.
  static constexpr bool kExact = kSums || kSplit;
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

// Sums of a stage's activations by a warp, 2^-13 of those of all its inputs or of each block of 32: a row of all tokens
// each in tf32, and `rest` bytes behind it what these numbers lack to float32.
template <typename S>
__device__ __forceinline__ void add_activations(const uint8_t* x, int first_row, int tokens, int lane, uint8_t* to,
                                                int rest) {
  using X = typename S::X;
  const X one = from_float<X>(1.f);
  const uint32_t pair = pack_pair(one, one);
  const uint32_t ones[4] = {pair, pair, pair, pair};
  const int g = lane / 4, t = lane % 4;
  float mine[2] = {};  // of tokens 2t and 2t + 1, of all blocks or block g % 4
#pragma unroll
  for (int block = 0; block < kStageBlocks; ++block) {
    const int unit = block % 2 * 4 + lane / 8;  // of 16 bytes, swizzled
    const int row = first_row + block / 2 * tokens + lane % 8;
    uint32_t inputs[4];
    float sum[4] = {};
    ptx::load_matrices(inputs, ptx::shared_address(x + row * 128 + (unit ^ row % 8) * 16));
    ptx::mma<Convert<X>::kBf16>(sum, ones, inputs[0], inputs[1]);
    ptx::mma<Convert<X>::kBf16>(sum, ones, inputs[2], inputs[3]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (S::kSumRows == 1) mine[i] += sum[i];
      if (S::kSumRows > 1) mine[i] = g % 4 == block ? sum[i] : mine[i];
    }
  }
  const int row = S::kSumRows > 1 ? g % 4 : 0, piece = S::kSumRows > 1 ? g / 4 : g;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float all = mine[i] * 0x1p-13f;
    const float first = ptx::to_tf32(all), second = ptx::to_tf32(all - first);
    float* const at = reinterpret_cast<float*>(to + piece * rest) + row * S::kTokens + 2 * t + i;
    if (piece < 2) *at = piece == 0 ? first : second;
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
  // Warps that split activations come first, as the schedulers prefer those; in these numbers after the others.
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
  const auto copy_piece = [&](int i) {
    const int x_batch = args.x_batch_stride == 0 ? 0 : static_cast<int>(batch);
    const int piece_bytes = tokens * S::kRowBytes << layout.log2_piece;
    ptx::barrier_expect(copied + i, piece_bytes);
    ptx::tensor_copy_4d(x + i * piece_bytes, &map, 0, 0, (first_stage + (i << layout.log2_piece)) * kChunks, x_batch,
                        copied + i);
  };
  // A later piece, when `piece` is there.
  const auto copy_next = [&](int piece) {
    const int next = piece + S::kFirstPieces;
    if (S::kLater && next < pieces && ptx::elect_one()) copy_piece(next);
  };
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
        __syncwarp();
        if (ptx::arrives(lane)) ptx::barrier_arrive(arrived + piece);
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

  // Strips of the outputs are finished in turn by the CTAs of the cluster, `round_atoms` of them at a time: as many as
  // there is room for sums.
  const int round_atoms = S::kBlocks > 0 ? atoms : min(atoms, layout.passes * kPassAtoms);
  const auto mine_of = [&](int of_round) { return (of_round - rank + cluster - 1) >> params.log2_cluster; };
  if (warp == 0 && ptx::elect_one()) {
#pragma unroll 1
    for (int i = 0; i < pieces; ++i) {
      ptx::barrier_init(copied + i, 1);
      if (S::kSplit)
        ptx::barrier_init(arrived + i, (S::kAllSplit && i == 0 ? kThreads / 32 : kSplitWarps) * ptx::kArrivals);
    }
    ptx::barrier_init(received, 1);
    if (S::kSums) ptx::barrier_init(reinterpret_cast<uint64_t*>(shared + kSummedAt), kThreads / 32 * ptx::kArrivals);
    ptx::barrier_init_fence();
#pragma unroll 1
    for (int i = 0; i < (S::kLater ? min(pieces, S::kFirstPieces) : pieces); ++i) copy_piece(i);
    ptx::barrier_expect(received, cluster * mine_of(round_atoms) * (kTeams * S::kStripBytes));
  }

  const int first_group =
      (first_stage + warp / kPassAtoms) * kStageBlocks + (kGroups > 1 ? t : 0) >> params.log2_group_blocks;
  int64_t first_scale = static_cast<int64_t>(first_group) * params.outputs + (first_strip * kAtomN + g);
  const uint8_t* fetch_zeros = nullptr;
  if constexpr (S::kShift == ShiftKind::kBytes) {
    fetch_zeros = static_cast<const uint8_t*>(args.shift) + (batch * args.shift_batch_stride + first_scale);
  }
  if (batch > 0) first_scale += batch * args.scales_batch_stride;
  const uint8_t* fetch_scales = params.scales + first_scale * scale_bytes;
  // Four bytes of scales are loaded where those may be float32: where a scale is in them, as the upper part of a
  // number.
  uint32_t scale_part = 0;
  if constexpr (S::kAnyScales) {
    const uint64_t odd = reinterpret_cast<uint64_t>(fetch_scales) & 2;
    fetch_scales -= odd;
    scale_part = scale_bytes == 4 ? 0x3210 : odd == 0 ? 0x1044 : 0x3244;
  }
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
        if constexpr (S::kShift == ShiftKind::kBytes)
          ptx::load_part<1, !first.value>(zero[i], fetch_zeros + step + 8 * i, of_row);
      }
    }
  };
  // From what has been asked for to what is next: where that `ends` a strip's tiles, the same ones of the next strips.
  const auto advance = [&](bool ends) {
    fetch_words += kAhead * kStepTiles * kTileWords;
    fetch_scales += kAhead * params.step_scales * scale_bytes;
    fetch_zeros += kAhead * params.step_scales;
    fetch_tiles -= kAhead * kStepTiles;
    if (!ends) return;
    // Strips of a packed tile lie one behind the other.
    const bool of_next_tile =
        kPassAtoms == kAtomsPerTile || (first_atom + atoms - fetch_atoms) % kAtomsPerTile + kPassAtoms >= kAtomsPerTile;
    fetch_words += ((of_next_tile ? params.k_tiles - 1 : 0) - turns * (kTurn * kStepTiles)) * int64_t{kTileWords};
    fetch_words += kPassAtoms * kAtomWords;
    const int64_t back = static_cast<int64_t>(turns * kTurn) * params.step_scales;
    fetch_scales += (kPassAtoms * kAtomN - back) * scale_bytes;
    fetch_zeros += kPassAtoms * kAtomN - back;
    fetch_rows -= kPassAtoms * kAtomN;
    fetch_atoms -= kPassAtoms;
    fetch_tiles = fetch_atoms > 0 ? lane_tiles : 0;
  };
  fetch_scales_of(std::true_type{}, 0, fetch_tiles);
  advance(false);

  float* const undo_table = reinterpret_cast<float*>(shared + kUndoAt);
  if constexpr (S::kTable) fill_table<X, S::kPieces>(args, batch, shared + kBarrierBytes, undo_table, thread);

  // Float zeros and offsets, and their scales, of rows t and t + 4 of eight sums and outputs g and g + 8 of a strip.
  uint32_t of_shift[S::kShiftSlots][4], of_scale[S::kShiftSlots][4];
  const int sum_rows = cta_stages() * S::kSumRows;
  const uint8_t *shifts = nullptr, *shift_scales = nullptr;
  const auto fetch_shift = [&](auto first, int slot, int first_row, int strip) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + t + i / 2 * 4, n = (first_atom + strip) * kAtomN + g + i % 2 * 8;
      const int block = first_stage * kStageBlocks + row * (kStageBlocks / S::kSumRows);
      const bool wanted = strip < atoms && n < params.outputs && row < sum_rows && block < params.blocks;
      const int64_t at = (static_cast<int64_t>(block >> params.log2_group_blocks) * params.outputs + n) * 2;
      of_shift[slot][i] = of_scale[slot][i] = 0;
      ptx::load_part<2, !first.value>(of_shift[slot][i], shifts + at, wanted);
      ptx::load_part<2, !first.value>(of_scale[slot][i], shift_scales + at, wanted && params.of_scales);
    }
  };
  if constexpr (S::kSums) {
    shifts = static_cast<const uint8_t*>(args.shift) + batch * args.shift_batch_stride * 2;
    shift_scales = params.scales + batch * args.scales_batch_stride * 2;
    if constexpr (S::kBlocks > 0) {
#pragma unroll
      for (int slot = 0; slot < S::kShiftSlots; ++slot) {
        fetch_shift(std::true_type{}, slot, (team + slot * kTeams) * 8, warp % kPassAtoms);
      }
    } else {
      const int first = first_stage * kStageBlocks >> params.log2_group_blocks;
      const int end_block = min((first_stage + layout.stages_each) * kStageBlocks, params.blocks);
      const int last = (end_block - 1) >> params.log2_group_blocks;
      for (int group = first + warp; group <= last; group += kThreads / 32) {
        for (int line = lane; line * 64 < atoms * kAtomN; line += 32) {
          const int n = min(first_atom * kAtomN + line * 64, params.outputs - 1);
          ptx::prefetch_line(shifts + (static_cast<int64_t>(group) * params.outputs + n) * 2);
        }
      }
    }
  }
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
    __syncwarp();
    if (ptx::arrives(lane)) ptx::barrier_arrive(arrived);
  }
  uint8_t* const sums = shared + layout.sums_at;
  uint64_t* const summed = reinterpret_cast<uint64_t*>(shared + kSummedAt);
  const int sum_row_bytes = kTokens * static_cast<int>(sizeof(float));
  const int sum_rest = layout.stages_each * S::kSumRows * sum_row_bytes;
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
  const uint32_t stage_step = kTeams * kChunks * rows * 128;
  const uint32_t of_factors = ptx::shared_address(sums + (team * S::kFactors + t) * 4);
  const uint32_t table = ptx::shared_address(shared + kBarrierBytes);
  const float unscale = S::kTable ? *undo_table : S::kSplit ? 1.f : C::kUnscale;  // or a part of the factors
  const int most_mine = (round_atoms + cluster - 1) >> params.log2_cluster;  // strips of a batch that a CTA finishes
  uint8_t* const strips = shared + layout.strips_at;
#pragma unroll 1
  for (int round_atom = 0, phase = 0;; round_atom += round_atoms, phase ^= 1) {
    const int end_atom = min(round_atom + round_atoms, atoms);
#pragma unroll 1
    for (int pass_atom = round_atom; pass_atom < (S::kBlocks > 0 ? 1 : end_atom); pass_atom += kPassAtoms) {
      float acc[kTokens / 2] = {};
      // The first of a strip early, so that nothing waits for them.
      if constexpr (S::kSums && S::kBlocks == 0) {
        fetch_shift(std::true_type{}, 0, team * 8, pass_atom + warp % kPassAtoms);
      }
      uint32_t stage_at = 0;
      int left = tiles, block = 0;
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
              ptx::barrier_wait(arrived + piece, 0);
              if constexpr (S::kLater && !S::kSplit) {  // by the first team, which has a stage of every piece
                const bool begins = piece << layout.log2_piece == block << S::kLog2Block;
                if (warp == 0 && begins) copy_next(piece);
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
            float part_sums[kChains][kColumns / 2] = {};
#pragma unroll
            for (int block = 0; block < kStageBlocks; ++block) {
              uint32_t minus_zero[2], pair = zero_pair;
              if (S::kShift == ShiftKind::kBytes && kGroups > 1) pair = __shfl_sync(0xffffffffu, zero_pair, block, 4);
              minus_zero[0] = S::kSums ? 0 : C::minus_zero(bias_of(kBits));
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
                ptx::load_matrices(inputs, (of_chunk[block / 2] ^ block % 2 * 64) + stage_at + eight * 1024);
                float (&to)[4] = *reinterpret_cast<float (*)[4]>(part_sums[block / kChainBlocks] + 4 * eight);
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                  ptx::mma<C::kBf16>(to, codes[step], inputs[2 * step], inputs[2 * step + 1]);
                  if constexpr (S::kTable && S::kPieces > 1) {
                    ptx::mma<C::kBf16>(to, second_numbers[step], inputs[2 * step], inputs[2 * step + 1]);
                  }
                }
              }
            }
            const auto scales_of_chain = [&](int chain) -> float2 {
              if constexpr (S::kAnyScales) {
                float both[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                  const uint32_t upper = __byte_perm(scales_of[j], 0, scale_part);
                  both[j] = args.scale_dtype == DType::kF16 ? to_floats<__half>(upper).y : __uint_as_float(upper);
                  if (kGroups > 1) both[j] = __shfl_sync(0xffffffffu, both[j], chain * kChainBlocks, 4);
                }
                return {both[0], both[1]};
              }
              const uint32_t pair = __byte_perm(scales_of[0], scales_of[1], 0x5410);
              return to_floats<X>(kGroups > 1 ? __shfl_sync(0xffffffffu, pair, chain * kChainBlocks, 4) : pair);
            };
            float of_stage[kColumns / 4] = {};
#pragma unroll
            for (int chain = 0; chain < kChains; ++chain) {
              const float2 scale = scales_of_chain(chain);
#pragma unroll
              for (int j = 0; j < kColumns / 2; ++j) {
                const float scale_of = j % 4 < 2 ? scale.x : scale.y, sum = part_sums[chain][j];
                if constexpr (!S::kSplit) {
                  acc[j] = fmaf(scale_of, sum, acc[j]);
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

      if constexpr (S::kSums) {
        const int strip = pass_atom + warp % kPassAtoms;
        if (pass_atom == 0) {  // all activations have come
          for (int stage = warp; stage * kTiles < cta_tiles; stage += kThreads / 32) {
            ptx::barrier_wait(arrived + (stage >> layout.log2_piece), 0);
            uint8_t* const to = sums + stage * (S::kSumRows * sum_row_bytes);
            add_activations<S>(x, stage * kChunks * tokens, tokens, lane, to, sum_rest);
          }
          __syncwarp();
          if (ptx::arrives(lane)) ptx::barrier_arrive(summed);
        }
        float shift_sums[4] = {};
        const auto multiply_sums = [&](int slot, int first_row) {
          uint32_t numbers[2][4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float scale = to_floats<X>(of_scale[slot][i]).x;
            const float product = to_floats<X>(of_shift[slot][i]).x * (params.of_shift - scale);
            numbers[0][i] = __float_as_uint(product) & kTf32Bits;
            numbers[1][i] = __float_as_uint(product - __uint_as_float(numbers[0][i]));
          }
          const uint32_t from = ptx::shared_address(sums + (first_row + t) * sum_row_bytes + g * 4);
          const bool one = first_row + t < sum_rows, both = first_row + t + 4 < sum_rows;
#pragma unroll
          for (int piece = 0; piece < 2; ++piece) {
            const uint32_t sum = one ? ptx::load_shared(from + piece * sum_rest) : 0;
            const uint32_t next_sum = both ? ptx::load_shared(from + piece * sum_rest + 4 * sum_row_bytes) : 0;
            ptx::mma_tf32(shift_sums, numbers[0], sum, next_sum);
            ptx::mma_tf32(shift_sums, numbers[1], sum, next_sum);
          }
        };
        ptx::barrier_wait(summed, 0);
#pragma unroll
        for (int slot = 0; slot < S::kShiftSlots; ++slot) multiply_sums(slot, (team + slot * kTeams) * 8);
        if constexpr (S::kBlocks == 0) {
          // Loads and what waits for them without a branch between: it would wait for the next weights, too.
#pragma unroll 1
          for (int first_row = (team + kTeams) * 8; first_row < sum_rows; first_row += kTeams * 8) {
            fetch_shift(std::false_type{}, 0, first_row, strip);
            multiply_sums(0, first_row);
          }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[j] += shift_sums[j];
      }

      if (layout.over_activations) {  // which all are done with
        if (cluster > 1) {
          ptx::cluster_meet();
        } else {
          __syncthreads();
        }
      }
      // A warp's sums go to the CTA that finishes its strip, which a barrier there counts: for these of eight tokens
      // lane 4g + t has rows g and g + 8 of tokens 2t and 2t + 1, of float32 activations t and t + 4.
      const int atom = pass_atom + warp % kPassAtoms, of_round = atom - round_atom;
      const int at_strip = (rank * kTeams + team) * most_mine + (of_round >> params.log2_cluster);
#pragma unroll
      for (int block = 0; block < kTokens / 8; ++block) {
        const float* const of_block = acc + 4 * block;
        const float4 sums_of = {of_block[0] * unscale, of_block[1] * unscale, of_block[2] * unscale,
                                of_block[3] * unscale};
        uint8_t* const to = strips + at_strip * S::kStripBytes + (block * 32 + lane) * 16;
        if (atom >= atoms) continue;
        if (cluster > 1) {
          ptx::store_async_at_rank(to, sums_of, received, of_round & (cluster - 1));
        } else {
          *reinterpret_cast<float4*>(to) = sums_of;
        }
      }
    }

    const int mine = mine_of(end_atom - round_atom);
    const auto add_up = [&](int i, float (&sum)[4]) {
      const uint8_t* at = strips + i * 512 + lane * 16;
#pragma unroll 1
      for (int other = 0; other < cluster; ++other) {
#pragma unroll
        for (int four = 0; four < kTeams / 4; ++four) {
          float of_four[4] = {};
#pragma unroll
          for (int other_team = 0; other_team < 4; ++other_team) {
            const float4 v = *reinterpret_cast<const float4*>(at);
            of_four[0] += v.x, of_four[1] += v.y, of_four[2] += v.z, of_four[3] += v.w;
            at += most_mine * S::kStripBytes;
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
    const auto token_of = [&](int i, int j) { return first_token_of(i) + (S::kSplit ? t + j % 2 * 4 : 2 * t + j % 2); };
    const auto all_finite = [&](int i, const float (&sum)[4]) {
      const float of_tokens =
          (token_of(i, 0) < tokens ? sum[0] + sum[2] : 0.f) + (token_of(i, 1) < tokens ? sum[1] + sum[3] : 0.f);
      return __all_sync(0xffffffffu, isfinite(of_tokens)) != 0;
    };
    const auto store_each = [&](int i, const float (&sum)[4]) {
      using Y = std::conditional_t<S::kSplit, float, X>;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int token = token_of(i, j), n = first_output_of(i) + g + j / 2 * 8;
        Y* const y = static_cast<Y*>(params.y) + (batch * args.m + token) * params.outputs + n;
        if (token < tokens && n < params.outputs) *y = from_float<Y>(sum[j]);
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
        if (token_of_pairs < tokens && n_of_pairs + 8 * half < params.outputs) {
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
        apply<!S::kSplit>(args.activation, sum);
      }
      if (plain && (S::kSplit || params.outputs % 2 != 0)) {
        store_each(i, sum);
      } else if (plain) {
        store_pairs(sum);
      } else {
#pragma unroll 1
        for (int j = 0; j < 4; ++j) {
          const int token = token_of(i, j), n = first_output_of(i) + g + j / 2 * 8;
          if (token >= tokens || n >= params.outputs) continue;
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
      const int bytes = cluster * mine_of(min(round_atoms, atoms - end_atom)) * (kTeams * S::kStripBytes);
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
cudaError_t launch_typed(const MatmulArgs& args, const Config& config, int shared_bytes, cudaStream_t stream) {
  Params params{};
  params.args = args;
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
  params.of_shift = params.of_scales ? 0.f : 1.f;
  if (params.layout.passes == 0 || 1 << params.log2_cluster != config.cluster) return cudaErrorInvalidConfiguration;
  if (!has_passes(args, config)) return cudaErrorInvalidConfiguration;
  CUtensorMap map;
  const cudaError_t error = describe_chunks(args, static_cast<int>(args.m), kChunks << params.layout.log2_piece, &map);
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
      if constexpr ((kSplit || kColumns == 8) && kShift != ShiftKind::kTable && (!kAny || kGroups == 1)) {
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
      return of_columns(std::integral_constant<int, 8>{}, std::false_type{});
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
cudaError_t launch_of(const MatmulArgs& args, const Config& config, int shared_bytes, cudaStream_t stream) {
  return dispatch_float(args.x_dtype, [&](auto* x) {
    return launch_typed<std::remove_pointer_t<decltype(x)>, kBits>(args, config, shared_bytes, stream);
  });
}

}  // namespace wonly::resident
