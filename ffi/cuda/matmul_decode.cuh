// The product for one or two tokens on Hopper: integer wgmma, codes against the digits of fixed-point activations.
//
// For so few tokens the product is bound by the instructions that unpack codes as much as by memory. Here
// they are nearly none: codes are 8-bit integers already, so int8 words enter the tensor core as they were loaded, and
// int4 words after one mask for eight codes. The activations of 128 inputs, or of a smaller group, become fixed-point
// numbers of 24 bits (32 for float32), split into signed bytes, their digits; each digit of each token is a column of
// the product. Sums are exact integers, multiplied by the scales of weights and activations once for all these inputs.
//
// A byte of an int4 word holds two codes of an output, c0 + 16 c1, for two inputs k0 and k1. With integers X0 and X1
// for x[k0] and x[k1] / 16, c0 (X0 - X1) + (c0 + 16 c1) X1 = c0 X0 + 16 c1 X1: the low codes by a mask, the high codes
// never alone. Rounding X1 costs four of its bits.
//
// A CTA owns a run of outputs, walks over them 64 at a time, and prepares the digits of all its inputs in shared memory
// before it asks for weights. Warpgroups split the inputs by stages of 128; a lane loads its words from global memory
// into the registers that wgmma reads, several stages ahead. Partial sums are added in a fixed order, so results have
// the same bits on every run, and a token's result does not depend on the values of others. A token with an infinity or
// NaN is computed term by term.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/exact_sum.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_decode.h"
#include "cuda/ptx.cuh"
#include "cuda/ptx_sm90.cuh"
#include "cuda/ragged_plan.cuh"
#include "layout.h"

namespace wonly::decode {

constexpr int kStageK = 128;  // inputs of a stage: they share a fixed-point scale, where groups are not smaller
constexpr int kBlockK = 32;   // inputs of one wgmma
constexpr int kStageBlocks = kStageK / kBlockK;
constexpr int kNoGroups = 30;  // log2 of a group of all inputs, in blocks

// What multiplies the integer sums of a pair of digits, the second of which is worth 256 of the first.
struct Pair {
  uint32_t sum;  // of the digits, as a code of 1 multiplies them: a float; an integer, times the zero, where all zeros
                 // are the same
  float scale;   // of the fixed-point numbers, times the power of 65536 of the pair
};

struct Params {
  MatmulArgs args;
  int cluster;
  int atoms_each, atoms_over;  // a part of the outputs has atoms_each strips of 16, the first atoms_over one more
  int stages_each;             // stages of 128 inputs that a CTA of a cluster takes, the last one fewer
  int log2_group_blocks;       // group size = 32 << this
  bool split;                  // the halves of the columns belong to groups, not to tokens
  bool aligned_x;              // pairs of a row of x are
  int partial_at, total_at;    // in shared memory
};

// Which tokens a CTA has: those of an entry of the batch, or a tile of a ragged product's plan.
struct Consecutive {
  static constexpr bool kRagged = false;
};
struct Ragged {
  static constexpr bool kRagged = true;
  ragged::Work work;
  int plan_at;  // in shared memory: what finding a tile takes
};

// Columns of the product, as many as the smallest wgmma has: four digits of each of two tokens. The integer sums of a
// lane are those of two digits, for two outputs: together still integers of 32 bits.
constexpr int kHalfColumns = 4;
constexpr int kColumns = 2 * kHalfColumns;
constexpr int kPairs = kColumns / 2;

// Groups below 128 inputs need sums of their own, for each of which the lanes have more to do. Where the columns are
// split, their halves are the digits of one token for half of the groups each, with zeros for the inputs of the others:
// with groups of 64 one token takes no more instructions than with larger ones. By the size of groups and tokens:
//   128 and more   one sum
//   64, one token  one sum, columns split
//   64, two        two sums
//   32, one        two sums, columns split
//   32, two        no kernel: matmul_resident is faster
// kScaleSize, kShiftSize: bytes of a scale, and of a zero or offset, 0 without. A choice of type would stand between
// loads that are to go out together, and wait for them.
template <int kBits_, int kDigits_, int kSums_, int kScaleSize_, int kShiftSize_>
struct Shape {
  static constexpr int kBits = kBits_;
  static constexpr int kDigits = kDigits_;  // of an activation: 3, or 4 of float32
  static constexpr int kSums = kSums_;
  static constexpr int kScaleSize = kScaleSize_, kShiftSize = kShiftSize_;
  static constexpr bool kPlain = kShiftSize == 0;
  static_assert(kDigits <= kHalfColumns && kMaxTokens == 2 && kSums <= 2);
  static constexpr int kWarpgroups = 4;
  static constexpr int kThreads = kWarpgroups * 128;
  static constexpr int kTiles = kStageK / tile_k(kBits);  // packed tiles of a stage
  static constexpr int kAhead = kBits == 4 ? 4 : 2;       // stages on their way to a warp: 4 KB of weights
  // Digits of a stage: 16 bytes of k of all columns for each of its blocks, then 16 more. int4: the low codes of two
  // blocks are one wgmma, the whole bytes of the same the next; int8: a block is one. With gaps, so that the lanes of a
  // warp, which store digits of eight blocks, find different banks.
  static constexpr int kRunBytes = kColumns * 16 + 16;
  static constexpr int kHalfBytes = kStageBlocks * kRunBytes;
  static constexpr int kDigitBytes = 2 * kHalfBytes + kStageBlocks * 16;
  static constexpr int kStageBytes = kDigitBytes + kSums * kPairs * static_cast<int>(sizeof(Pair));
  __device__ static int block_at(int block) {
    return block / kStageBlocks * kDigitBytes + block % kStageBlocks * kRunBytes;
  }
  // Where columns are split: their half that has the digits of a block.
  __device__ static int half_of(int block) { return block * kSums / 2 % 2; }
};

// Bits of a scale, zero or offset, whose size tells the type but for those of 16 bits.
template <int kSize>
__device__ __forceinline__ float bits_to_float(uint32_t bits, bool bf16) {
  if constexpr (kSize == 1) return static_cast<float>(bits);
  if constexpr (kSize == 4) return __uint_as_float(bits);
  const float f16 = __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  return bf16 ? __uint_as_float(bits << 16) : f16;
}

__device__ __forceinline__ uint32_t load_element_bits(const uint16_t* from) { return ptx::load_16(from); }
__device__ __forceinline__ uint32_t load_element_bits(const float* from) { return ptx::load_32(from); }

// Eight activations of 32 as they lie in memory: those whose codes lane t of a group of four holds, pairs 2t + 8i.
template <int kDigits>
struct Pairs {
  static constexpr int kWords = kDigits == 4 ? 8 : 4;
  uint32_t words[kWords];

  // `from`: the first; `left` inputs of the row, from 2t before it on.
  template <typename X>
  __device__ void load(const X* from, int t, int left, bool aligned) {
    if (aligned && left >= kBlockK) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = ptx::load_32(from + (kDigits == 4 ? i / 2 * 8 + i % 2 : i * 8));
    } else {
      uint32_t bits[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int at = i / 2 * 8 + i % 2;
        bits[i] = 2 * t + at < left ? load_element_bits(from + at) : 0;
      }
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = kDigits == 4 ? bits[i] : bits[2 * i] | bits[2 * i + 1] << 16;
    }
  }
  __device__ void load(const MatmulArgs& args, int64_t at, int t, int left, bool aligned) {
    if constexpr (kDigits == 4) {
      load(static_cast<const float*>(args.x) + at, t, left, aligned);
    } else {  // which of the two 16-bit types does not matter yet
      load(static_cast<const uint16_t*>(args.x) + at, t, left, aligned);
    }
  }
  // The largest magnitude's bits as a float32.
  __device__ uint32_t largest(bool bf16) const {
    uint32_t most = 0;
    if constexpr (kDigits == 4) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) most = max(most, words[i] & 0x7fffffffu);
      return most;
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) most = __vmaxu2(most, words[i] & 0x7fff7fffu);
      most = max(most & 0xffffu, most >> 16);
      return bf16 ? most << 16 : __float_as_uint(__half2float(__ushort_as_half(static_cast<uint16_t>(most))));
    }
  }
  __device__ void convert(bool bf16, float (&to)[4][2]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kDigits == 4) {
        to[i][0] = __uint_as_float(words[2 * i]);
        to[i][1] = __uint_as_float(words[2 * i + 1]);
      } else if (bf16) {
        to[i][0] = __uint_as_float(words[i] << 16);
        to[i][1] = __uint_as_float(words[i] & 0xffff0000u);
      } else {
        to[i][0] = __half2float(__ushort_as_half(static_cast<uint16_t>(words[i])));
        to[i][1] = __half2float(__ushort_as_half(static_cast<uint16_t>(words[i] >> 16)));
      }
    }
  }
};

// Digits of lane t's activations of a block, as columns of B operands; of a stage, or a smaller group, by up to 16
// neighbouring lanes. So many lanes for few numbers, because all this stands before the first product: it takes as long
// as its instructions wait for each other. False if one of these activations is infinite or NaN: the digits then mean
// nothing.
template <typename S>
__device__ __forceinline__ bool prepare(const Pairs<S::kDigits>& x, bool bf16, bool store, bool split, uint8_t* to,
                                        Pair* pairs) {
  constexpr int kDigits = S::kDigits;
  constexpr int kLanes = 4 * kStageBlocks / S::kSums;  // half of them where columns are split
  const auto reduces = [&](int other) { return 2 * other < kLanes || !split; };
  uint32_t largest = x.largest(bf16);
#pragma unroll
  for (int other = 1; other < kLanes; other *= 2) {
    const uint32_t theirs = __shfl_xor_sync(0xffffffffu, largest, other);
    if (reduces(other)) largest = max(largest, theirs);
  }
  const bool finite = largest < 0x7f800000u;
  const uint32_t exponent = min(max(largest >> 23, 40u), 254u);
  // The largest magnitude becomes less than 2^21, or 2^29: a neighbour's, and the rounding of both, still fit the
  // digits.
  constexpr uint32_t kPower = kDigits == 4 ? 29 : 21;
  const float power = __uint_as_float((253u + kPower - exponent) << 23);
  float values[4][2];
  x.convert(bf16, values);
  constexpr uint32_t kSigned = kDigits == 4 ? 0x80808080u : 0x00808080u;  // makes the bytes of signed digits unsigned
  // Integers, plus a constant that the difference of two does not have.
  constexpr uint32_t kConstant = kDigits == 4 ? 0 : 0x4b400000u;
  const auto fixed_point = [&](float value, float times) {
    if constexpr (kDigits == 4) return static_cast<uint32_t>(__float2int_rn(value * times));
    return __float_as_uint(fmaf(value, times, 0x1.8p+23f));
  };
  const int t = threadIdx.x % 4;
  int sum[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t integers[4];  // for byte j of the lane's word
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (S::kBits == 4) {
        const uint32_t high = fixed_point(values[j % 2 * 2 + 1][j / 2], power * 0.0625f);
        integers[j] = half == 1 ? high - kConstant : fixed_point(values[j % 2 * 2][j / 2], power) - high;
      } else {
        integers[j] = fixed_point(values[half * 2 + j % 2][j / 2], power) - kConstant;
      }
      integers[j] += kSigned;
    }
    // Word d: digit d of the four.
    const uint32_t low01 = __byte_perm(integers[0], integers[1], 0x5140);
    const uint32_t low23 = __byte_perm(integers[2], integers[3], 0x5140);
    const uint32_t high01 = __byte_perm(integers[0], integers[1], 0x7362);
    const uint32_t high23 = __byte_perm(integers[2], integers[3], 0x7362);
#pragma unroll
    for (int digit = 0; digit < kHalfColumns; ++digit) {
      uint32_t word = 0;
      if (digit < kDigits) {
        word = __byte_perm(digit < 2 ? low01 : high01, digit < 2 ? low23 : high23, digit % 2 == 0 ? 0x5410 : 0x7632) ^
               0x80808080u;
        const int worth = (S::kBits == 4 && half == 1 ? 17 : 1) << digit % 2 * 8;  // a code of 1: X0 - X1 + 17 X1
        sum[digit / 2] += worth * __dp4a(static_cast<int>(word), 0x01010101, 0);
      }
      if (store) *reinterpret_cast<uint32_t*>(to + half * S::kHalfBytes + digit * 16 + t * 4) = word;
    }
  }
#pragma unroll
  for (int other = 1; other < kLanes; other *= 2) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int theirs = __shfl_xor_sync(0xffffffffu, sum[pair], other);
      if (reduces(other)) sum[pair] += theirs;
    }
  }
  // Lane 0 writes the first pair, lane 1 the second.
  const int lane = threadIdx.x % (split ? kLanes / 2 : kLanes);
  if (store && lane < 2) {
    const int pair_sum = lane == 0 ? sum[0] : sum[1];
    pairs[lane * S::kSums] = {
        S::kPlain ? static_cast<uint32_t>(pair_sum * bias_of(S::kBits)) : __float_as_uint(static_cast<float>(pair_sum)),
        __uint_as_float((exponent + 1 - kPower + 16 * lane) << 23)};
  }
  return finite;
}

// a / b for 0 <= a < kMostDivided and 0 < b: the half keeps the quotient further from an integer than its error.
constexpr int kMostDivided = 1 << 21;
__device__ __forceinline__ int divide(int a, int b) {
  return static_cast<int>(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
}

template <typename S, typename Tokens>
__global__ void __launch_bounds__(S::kThreads, 1)
    decode_matmul(const __grid_constant__ Params params, const __grid_constant__ Tokens source) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kAhead = S::kAhead;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ int not_finite[kMaxTokens];  // tokens with an infinity or NaN among this CTA's inputs
  const MatmulArgs& args = params.args;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int warpgroup = __shfl_sync(0xffffffffu, warp / 4, 0);
  const int rank = ptx::cluster_rank();
  const int part = ptx::cluster_index();
  int64_t batch = blockIdx.y;
  int tokens = static_cast<int>(args.m);
  const int inputs = static_cast<int>(args.k);

  int first_atom = part * params.atoms_each + min(part, params.atoms_over);
  int end_atom = first_atom + params.atoms_each + (part < params.atoms_over);
  const int first_stage = rank * params.stages_each;
  const int stages = min(params.stages_each, (inputs + kStageK - 1) / kStageK - first_stage);
  const int k_tiles = (inputs + tile_k(S::kBits) - 1) / tile_k(S::kBits);

  ragged::OneTile rows;
  if constexpr (Tokens::kRagged) {
    // The tiles that there are share all CTAs, those of a tile its outputs.
    int parts = 1, part_of_tile = 0;
    const auto pick = [&](int tiles) {
      parts = divide(static_cast<int>(gridDim.x), tiles);
      const int tile = divide(static_cast<int>(blockIdx.x), parts);
      part_of_tile = static_cast<int>(blockIdx.x) - tile * parts;
      return tile;
    };
    const int id = ragged::load_id(source.work);
    if (!ragged::find_tile(source.work, id, pick, shared + source.plan_at, &rows)) return;
    first_atom = divide(params.atoms_each * part_of_tile, parts);
    end_atom = divide(params.atoms_each * (part_of_tile + 1), parts);
    if (first_atom == end_atom) return;
    batch = rows.expert;
    tokens = rows.rows;
    if (rows.expert < 0) {
      const int outputs = min((end_atom - first_atom) * kAtomN, static_cast<int>(args.n) - first_atom * kAtomN);
#pragma unroll 1
      for (int i = threadIdx.x; i < outputs * tokens; i += S::kThreads) {
        const int64_t row = rows.row(i / outputs);
        store_zero(args.y, row * args.n + first_atom * kAtomN + i % outputs, args.y_dtype);
      }
      return;
    }
  }
  const auto row_of = [&](int token) {
    if constexpr (Tokens::kRagged) return static_cast<int64_t>(rows.row(token));
    return static_cast<int64_t>(token);
  };
  const auto x_row_of = [&](int token) {
    if constexpr (Tokens::kRagged) return static_cast<int64_t>(ragged::x_row(source.work, rows.row(token)));
    return static_cast<int64_t>(token);
  };

  const uint32_t* const qw = args.qw + batch * args.qw_batch_stride;
  prefetch_bias(args, batch, first_atom * kAtomN, (end_atom - first_atom) * kAtomN, threadIdx.x);

  // Digits of x, before any weights are asked for: activations, and instructions that no warp has come to yet, would
  // queue behind those at the L2, as long as memory takes for all of them. Until then it delivers the first few stages
  // to the L2.
  if (lane < 4 && first_atom + lane < end_atom && warp < stages * S::kTiles) {
    const int atom = first_atom + lane;
    const int64_t tile = static_cast<int64_t>(atom / kAtomsPerTile) * k_tiles + first_stage * S::kTiles + warp;
    if (first_stage * S::kTiles + warp < k_tiles) {
      ptx::prefetch(qw + tile * kTileWords + atom % kAtomsPerTile * kAtomWords, kAtomWords * 4);
    }
  }
  uint8_t* const digits = shared;
  const bool split = params.split;
  Pair* const pairs = reinterpret_cast<Pair*>(shared + stages * S::kDigitBytes);
  static_assert(kMaxTokens == 2, "the token of a task is found by one comparison");
  const int x_blocks = stages * kStageBlocks, tasks = 4 * x_blocks * tokens;
  const int64_t x_at = batch * args.x_batch_stride + static_cast<int64_t>(first_stage) * kStageK + 2 * t;
  const int x_left = inputs - first_stage * kStageK;
  const bool bf16 = args.x_dtype == DType::kBF16;
  const auto load_task = [&](Pairs<S::kDigits>& x, int task) {
    const int of_tokens = task / 4, token = of_tokens < x_blocks ? 0 : 1, block = of_tokens - token * x_blocks;
    if (task < tasks) {
      x.load(args, x_at + x_row_of(token) * args.k + block * kBlockK, t, x_left - block * kBlockK, params.aligned_x);
    }
  };
  constexpr int kXAhead = 4;  // activations of two tokens and 8192 inputs, all at once
  Pairs<S::kDigits> x[kXAhead] = {};
#pragma unroll
  for (int i = 0; i < kXAhead; ++i) load_task(x[i], threadIdx.x + i * S::kThreads);
  if (split) {
    for (int i = threadIdx.x; i < x_blocks * 2 * kHalfColumns; i += S::kThreads) {
      const int block = i / (2 * kHalfColumns), k_half = i / kHalfColumns % 2, half = 1 - S::half_of(block);
      const int column = half * kHalfColumns + i % kHalfColumns;
      *reinterpret_cast<uint4*>(digits + S::block_at(block) + k_half * S::kHalfBytes + column * 16) = uint4{};
    }
  }

  // Loads, a block of kAhead stages before their use: words of this lane, scale and shift of its outputs, rows g and
  // g + 8 of its warp's strip. What is not loaded is multiplied by digits of zero, or belongs to outputs that nobody
  // stores. No load stands in a branch, where it would wait for those before.
  const int scale_size = element_size(args.scale_dtype);
  const int shift_size = args.shift_mode == ShiftMode::kNone ? 0 : element_size(args.shift_dtype);
  const int scale_row_bytes = static_cast<int>(args.n) * scale_size;
  const int shift_row_bytes = static_cast<int>(args.n) * shift_size;
  // Groups from a sum of a stage to the next, and from a stage of this warpgroup to the next.
  const int sum_groups = 2 >> params.log2_group_blocks;
  const int step_groups = S::kWarpgroups * kStageBlocks >> params.log2_group_blocks;
  const int first_group = ((first_stage + warpgroup) * kStageBlocks >> params.log2_group_blocks) + (split ? t / 2 : 0);
  const uint8_t* const scales = static_cast<const uint8_t*>(args.scales) +
                                batch * args.scales_batch_stride * scale_size +
                                static_cast<int64_t>(first_group) * scale_row_bytes;
  const uint8_t* const shift = static_cast<const uint8_t*>(args.shift) + batch * args.shift_batch_stride * shift_size +
                               static_cast<int64_t>(first_group) * shift_row_bytes;
  constexpr int kStepTiles = S::kWarpgroups * S::kTiles;  // from a stage of this warpgroup to its next
  const int tiles = min(stages * S::kTiles, k_tiles - first_stage * S::kTiles) - warpgroup * S::kTiles;
  const int blocks = max(tiles + kAhead * kStepTiles - 1, 0) / (kAhead * kStepTiles);
  uint4 words[kAhead][S::kTiles] = {};
  uint32_t scale_bits[kAhead][S::kSums][2] = {}, shift_bits[kAhead][S::kSums][2] = {};
  int fetch_atom = first_atom + warp % 4, fetch_block, fetch_tiles;
  const uint32_t* fetch_words;
  const uint8_t* fetch_scales[2];
  const uint8_t* fetch_shift[2];
  const auto begin_fetch_pass = [&]() {
    fetch_block = 0;
    fetch_tiles = fetch_atom < end_atom ? tiles : 0;
    const int64_t tile =
        static_cast<int64_t>(fetch_atom / kAtomsPerTile) * k_tiles + (first_stage + warpgroup) * S::kTiles;
    fetch_words = qw + tile * kTileWords + fetch_atom % kAtomsPerTile * kAtomWords + lane * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n = min(fetch_atom * kAtomN + g + 8 * i, static_cast<int>(args.n) - 1);
      fetch_scales[i] = scales + n * scale_size;
      fetch_shift[i] = shift + n * shift_size;
    }
  };
  const auto fetch = [&](int slot) {
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile) {
      const int at = slot * kStepTiles + tile;
      ptx::load_once(words[slot][tile], fetch_words + at * kTileWords, at < fetch_tiles);
    }
    const bool wanted = slot * kStepTiles < fetch_tiles;
#pragma unroll
    for (int sum = 0; sum < S::kSums; ++sum) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ptx::load_part<S::kScaleSize>(scale_bits[slot][sum][i], fetch_scales[i] + sum * sum_groups * scale_row_bytes,
                                      wanted);
        if constexpr (!S::kPlain) {
          ptx::load_part<S::kShiftSize>(shift_bits[slot][sum][i], fetch_shift[i] + sum * sum_groups * shift_row_bytes,
                                        wanted);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      fetch_scales[i] += step_groups * scale_row_bytes;
      fetch_shift[i] += step_groups * shift_row_bytes;
    }
  };
  const auto end_fetch_block = [&]() {
    fetch_words += kAhead * kStepTiles * kTileWords;
    fetch_tiles -= kAhead * kStepTiles;
    if (++fetch_block == blocks) {
      fetch_atom += 4;
      begin_fetch_pass();
    }
  };

  begin_fetch_pass();
  if (threadIdx.x < kMaxTokens) not_finite[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll 1
  for (int first = threadIdx.x / 32 * 32; first < tasks; first += S::kThreads) {  // whole warps: lanes exchange
    const int task = first + lane;
    const int of_tokens = task / 4, token = of_tokens < x_blocks ? 0 : 1, block = of_tokens - token * x_blocks;
    const int half = split ? S::half_of(block) : token;
    const int sum = block % kStageBlocks * S::kSums / kStageBlocks;
    const bool finite =
        prepare<S>(x[0], bf16, task < tasks, split, digits + S::block_at(block) + half * kHalfColumns * 16,
                   pairs + (block / kStageBlocks * kPairs + half * 2) * S::kSums + sum);
    if (!finite && task < tasks) not_finite[token] = 1;
#pragma unroll
    for (int i = 1; i < kXAhead; ++i) x[i - 1] = x[i];
    load_task(x[kXAhead - 1], task + kXAhead * S::kThreads);
  }
#pragma unroll
  for (int ahead = 0; ahead < kAhead; ++ahead) fetch(ahead);
  end_fetch_block();
  ptx::fence_shared_for_async();
  __syncthreads();

  const uint64_t operands =
      ptx::wgmma_descriptor_unswizzled(digits, S::kBits == 4 ? S::kRunBytes : S::kHalfBytes, kColumns * 16);
  const bool bf16_scales = args.scale_dtype == DType::kBF16, bf16_shift = args.shift_dtype == DType::kBF16;
  float* const partial = reinterpret_cast<float*>(shared + params.partial_at);
  float* const total = reinterpret_cast<float*>(shared + params.total_at);
  const int part_rows = (params.atoms_each + (params.atoms_over > 0)) * kAtomN;
#pragma unroll 1
  for (int pass_atom = first_atom; pass_atom < end_atom; pass_atom += 4) {
    float acc[2] = {};
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
#pragma unroll
      for (int ahead = 0; ahead < kAhead; ++ahead) {
        const int index = block * kAhead + ahead;
        if (index * kStepTiles < tiles) {
          const int stage = warpgroup + index * S::kWarpgroups;
          uint4 low[S::kTiles];
          if constexpr (S::kBits == 4) {
#pragma unroll
            for (int tile = 0; tile < S::kTiles; ++tile) {
              const uint4 w = words[ahead][tile];
              low[tile] = make_uint4(w.x & 0x0f0f0f0fu, w.y & 0x0f0f0f0fu, w.z & 0x0f0f0f0fu, w.w & 0x0f0f0f0fu);
            }
          }
          float scale[S::kSums][2], z[S::kSums][2];
          const uint64_t operand = operands + stage * (S::kDigitBytes >> 4);
          int part_sums[S::kSums][4];
          ptx::wgmma_fence();
#pragma unroll
          for (int tile = 0; tile < S::kTiles; ++tile) {
            constexpr int kRun = S::kRunBytes >> 4, kHalf = S::kHalfBytes >> 4, kSumTiles = S::kTiles / S::kSums;
            auto& sums = part_sums[tile / kSumTiles];
            const int accumulate = tile % kSumTiles > 0;
            if constexpr (S::kBits == 4) {
              ptx::wgmma_u8s8(sums, low[tile], operand + 2 * tile * kRun, accumulate);
              ptx::wgmma_u8s8(sums, words[ahead][tile], operand + 2 * tile * kRun + kHalf, 1);
            } else {
              ptx::wgmma_u8s8(sums, words[ahead][tile], operand + tile * kRun, accumulate);
            }
          }
          ptx::wgmma_commit();
#pragma unroll
          for (int i = 0; i < 2 * S::kSums; ++i) {
            const uint32_t bits = scale_bits[ahead][i / 2][i % 2], z_bits = shift_bits[ahead][i / 2][i % 2];
            scale[i / 2][i % 2] = bits_to_float<S::kScaleSize>(bits, bf16_scales);
            if constexpr (!S::kPlain) z[i / 2][i % 2] = bits_to_float<S::kShiftSize>(z_bits, bf16_shift);
          }
          ptx::wgmma_wait<0>();
#pragma unroll
          for (int sum = 0; sum < S::kSums; ++sum) {
            const Pair pair = pairs[(stage * kPairs + t) * S::kSums + sum];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int value = part_sums[sum][2 * i] + part_sums[sum][2 * i + 1] * 256;
              float& to = acc[i];
              if constexpr (S::kPlain) {
                const float shifted = static_cast<float>(value - static_cast<int>(pair.sum));
                to = fmaf(scale[sum][i] * pair.scale, shifted, to);
              } else {
                const bool offsets = S::kShiftSize != 1 && args.shift_mode == ShiftMode::kOffsets;
                const float of_ones = __uint_as_float(pair.sum), of_codes = static_cast<float>(value);
                const float factor = offsets ? pair.scale : scale[sum][i] * pair.scale;
                const float shifted =
                    offsets ? fmaf(scale[sum][i], of_codes, z[sum][i] * of_ones) : fmaf(-z[sum][i], of_ones, of_codes);
                to = fmaf(factor, shifted, to);
              }
            }
          }
        }
        fetch(ahead);
      }
      end_fetch_block();
    }

    // Sums of the warpgroups and digits in order, then of the CTAs of the cluster in order.
    if (pass_atom > first_atom) __syncthreads();  // those before are read
    const int row = warp % 4 * kAtomN + g;
#pragma unroll
    for (int i = 0; i < 2; ++i) partial[(warpgroup * kTileN + row + 8 * i) * kPairs + t] = acc[i];
    __syncthreads();
    const int rows = min(kTileN, (end_atom - pass_atom) * kAtomN);
    for (int i = threadIdx.x; i < tokens * kTileN; i += S::kThreads) {
      const int token = i / kTileN, row_of_pass = i % kTileN;
      if (row_of_pass >= rows) continue;
      const int64_t n = static_cast<int64_t>(pass_atom) * kAtomN + row_of_pass;
      const float bias = params.cluster == 1 ? output_bias(args, batch, n) : 0.f;
      float value = 0.f;
#pragma unroll
      for (int pair = 2; pair-- > 0;) {
#pragma unroll
        for (int other = 0; other < S::kWarpgroups; ++other) {
          const float* const sums = partial + (other * kTileN + row_of_pass) * kPairs + pair;
          value += split ? sums[0] + sums[2] : sums[token * 2];
        }
      }
      if (not_finite[token] != 0 && n < args.n) {
        const int64_t k_begin = static_cast<int64_t>(first_stage) * kStageK;
        value = exact_sum(args, batch, x_row_of(token), n, k_begin, min(k_begin + stages * kStageK, args.k));
      }
      if (params.cluster == 1) {
        finish(args, batch, row_of(token), n, value, bias);
      } else {
        total[token * part_rows + (pass_atom - first_atom) * kAtomN + row_of_pass] = value;
      }
    }
  }
  if (params.cluster > 1) {
    __syncthreads();
    ptx::cluster_share();
    const int rows = (end_atom - first_atom) * kAtomN;
    for (int i = rank * S::kThreads + threadIdx.x; i < tokens * rows; i += params.cluster * S::kThreads) {
      const int token = i / rows, row = i % rows;
      const int64_t n = static_cast<int64_t>(first_atom) * kAtomN + row;
      const float bias = output_bias(args, batch, n);
      float value = 0.f;
      for (int other = 0; other < params.cluster; ++other) {
        value += ptx::load_shared_of_rank(total + token * part_rows + row, other);
      }
      finish(args, batch, row_of(token), n, value, bias);
    }
    ptx::cluster_leave();
  }
#else
  __trap();
#endif
}

// Of the kernel's own shared memory, which the other is behind: `not_finite`, as far as that is aligned.
constexpr int kStaticBytes = 128;

template <typename S, typename Tokens>
cudaError_t launch_shape(Params params, Tokens source, const Config& config, int shared_bytes, cudaStream_t stream) {
  const int64_t stages = ceil_div(params.args.k, kStageK);
  const int64_t atoms = ceil_div(params.args.n, kAtomN);
  params.cluster = config.cluster;
  params.atoms_each = static_cast<int>(atoms / config.parts);
  params.atoms_over = static_cast<int>(atoms % config.parts);
  params.stages_each = static_cast<int>(ceil_div(stages, config.cluster));
  const int64_t stage_bytes = int64_t{params.stages_each} * S::kStageBytes;
  if (stage_bytes > shared_bytes) return cudaErrorInvalidConfiguration;
  params.partial_at = static_cast<int>(stage_bytes);
  params.total_at = params.partial_at + S::kWarpgroups * kTileN * kPairs * 4;
  const int64_t part_rows = (params.atoms_each + (params.atoms_over > 0)) * kAtomN;
  int64_t more = config.cluster > 1 ? params.args.m * part_rows * 4 : 0;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(config.parts * config.cluster), static_cast<unsigned>(params.args.batch));
  if constexpr (Tokens::kRagged) {
    source.plan_at = params.total_at;
    more = ragged::tile_bytes(source.work);
    if (atoms * config.parts >= kMostDivided) return cudaErrorInvalidConfiguration;
    params.atoms_each = static_cast<int>(atoms);
    shape.grid = dim3(static_cast<unsigned>(config.parts));
  }
  if (params.total_at + more + kStaticBytes > shared_bytes) return cudaErrorInvalidConfiguration;
  shape.threads = S::kThreads;
  shape.cluster = config.cluster;
  shape.shared_bytes = params.total_at + static_cast<int>(more);
  return launch_kernel(decode_matmul<S, Tokens>, shape, stream, params, source);
}

template <int kBits, int kDigits, int kSums, typename Tokens>
cudaError_t launch_sums(const Params& params, const Tokens& source, const Config& config, int shared_bytes,
                        cudaStream_t stream) {
  const int shift_size = shift_bytes(params.args);
  const auto of_scales = [&](auto scale_size) {
    const auto launch = [&](auto shift) {
      using S = Shape<kBits, kDigits, kSums, scale_size.value, shift.value>;
      return launch_shape<S>(params, source, config, shared_bytes, stream);
    };
    if (shift_size == 0) return launch(std::integral_constant<int, 0>{});
    if (shift_size == 1) return launch(std::integral_constant<int, 1>{});
    return shift_size == scale_size.value ? launch(scale_size) : cudaErrorNotSupported;
  };
  if (element_size(params.args.scale_dtype) == 2) return of_scales(std::integral_constant<int, 2>{});
  return of_scales(std::integral_constant<int, 4>{});
}

template <int kBits, int kDigits, typename Tokens>
cudaError_t launch_digits(Params params, const Tokens& source, int tokens, const Config& config, int shared_bytes,
                          cudaStream_t stream) {
  const int groups = stage_groups(params.args);
  params.split = groups == 4 || (groups == 2 && tokens == 1);
  if (groups == 1 || (groups == 2 && tokens == 1)) {
    return launch_sums<kBits, kDigits, 1>(params, source, config, shared_bytes, stream);
  }
  if (groups == 2 || tokens == 1) {
    return launch_sums<kBits, kDigits, 2>(params, source, config, shared_bytes, stream);
  }
  return cudaErrorNotSupported;
}

template <int kBits, typename Tokens>
cudaError_t launch_bits(const MatmulArgs& args, const Tokens& source, const Config& config, int shared_bytes,
                        cudaStream_t stream) {
  Params params{};
  params.args = args;
  const int log2 = log2_group_blocks(args);
  params.log2_group_blocks = log2 < 0 ? kNoGroups : log2;
  params.aligned_x = args.k % 2 == 0;
  int tokens = static_cast<int>(args.m);
  if constexpr (Tokens::kRagged) tokens = source.work.tile_rows;
  if (args.x_dtype != DType::kF32) return launch_digits<kBits, 3>(params, source, tokens, config, shared_bytes, stream);
  if constexpr (!Tokens::kRagged) {
    return launch_digits<kBits, 4>(params, source, tokens, config, shared_bytes, stream);
  } else {
    return cudaErrorNotSupported;
  }
}

}  // namespace wonly::decode
