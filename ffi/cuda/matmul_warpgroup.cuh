// The product for 9 to a few hundred tokens on Hopper: wgmma with the weights as the register operand, straight from
// the packed format, so that all warps of a CTA share one copy of the activations.
//
// Producer warps keep a ring of stages full: the packed weights of kWarpgroups * 64 outputs x 128 inputs and their
// scales by bulk copies, the activations by the tensor copy engine. Each warpgroup turns its codes into 16-bit numbers
// (code - zero) * 2^-13, which is exact for integer zeros: a mask (the pattern is the subnormal number code * 2^-133 or
// code * 2^-24) and one fused multiply-add. The sums of a group stay exact products of 16-bit numbers in float32; the
// group's scale multiplies them there.
//
// Instructions are what bounds the warpgroups of outputs, so where scaling sums takes more of them, weights are rounded
// to the type of the activations as those of a dense product are (`rounds` says where): one multiply-add turns a masked
// code into a weight, two where there are zeros, and sums run through all groups.
//
// Zeros that are no integers, and offsets, of another type than the activations multiply the sum of the group's
// activations instead. Another warpgroup, or two, make those sums, a narrow product of the activations by ones, and
// what multiplies them. From 64 tokens on that is one more product, of the sums and of zeros in units of the scale,
// both as bf16 numbers that add up to a float32. Sums of float32 activations come with their pieces.
//
// With a table pairs of codes look up pairs of its numbers in shared memory, where every lane has a table of its own.
// They are rounded to the type of the activations, or, for float32 ones, two of fp16 each too, in units of a power of
// two that the largest one sets.
//
// CTAs of a cluster split the inputs and add their sums in a fixed order through each other's shared memory. A token's
// result does not depend on the others of a call; the size of the cluster, or how CTAs share stages, and with it the
// order of its sums, and whether weights are rounded may depend on how many there are (matmul.cu).
//
// Where larger clusters would not all fit, two teams of clusters share a tile's inputs: the first leaves its sums in
// scratch, and the second, whose CTAs start after the first's, waits for them and adds its own. Where no CTAs share
// inputs, two of neighbouring outputs may share the activations: each copies half of the tokens to both.
//
// Where tiles do not fill the multiprocessors, CTAs may share the stages of all of them out evenly: each has the last
// ones of a tile, whose sums it hands over in scratch, and then the first ones of the next, to which it adds what CTAs
// after it, which start before it, have handed over, in order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/cluster_tiles.cuh"
#include "cuda/division.h"
#include "cuda/element.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/exact_sum.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_warpgroup.h"
#include "cuda/pair_table.cuh"
#include "cuda/ptx_sm90.cuh"
#include "cuda/ring.cuh"
#include "cuda/rounded_weights.cuh"
#include "cuda/split_row.cuh"
#include "cuda/tensor_map.h"
#include "cuda/wgmma.cuh"
#include "dequant/convert.h"
#include "layout.h"

namespace wonly::warpgroup {

constexpr int kStageK = 128;
constexpr int kStageSteps = kStageK / 16;
constexpr int kMaxStages = 10;
constexpr int kMaxCluster = 8;
constexpr int kStoredTokens = 64;    // whose results leave at a time
constexpr int kBarrierBytes = 1024;  // three for each stage and one; the ring is aligned for the 128-byte swizzle
constexpr int kOnesAt = 512;         // in the same kilobyte: what adds up the activations of the groups of a stage,
constexpr int kOnesBytes = 128;      // each 8 columns of 8 inputs
static_assert((3 * kMaxStages + 1) * 8 <= kOnesAt && kOnesAt + 4 * kOnesBytes <= kBarrierBytes);
constexpr int kMultiprocessorBytes = 228 << 10;
constexpr int kPiecesBytes = 16;  // of a number as an operand's row of 8 inputs
using ptx::kArrivals;

// What multiplies a group's sums. Fewer choices for each group: 5 to 11% less time (docs/performance.md, log 80).
enum class Kind {
  kPlain,  // scales of the activations' type, copied even if there is one group, and uint8 zeros or none
  kOther,  // scales of any type, and uint8 zeros or none
  kSums,   // scales of any type, and zeros that are no integers, or offsets
  // Weights rounded to the activations' type, as matmul_tiled's: sums need no scaling. Scales and shifts of that type,
  // copied as those of kPlain.
  kRounded,          // offsets or none
  kRoundedAndZeros,  // zeros, also uint8
  kTable,            // of four bits; scales of any type
};

struct Params {
  MatmulArgs args;
  int cluster;
  Divisor token_tiles, ranks;
  int stages, more_stages;  // of 128 inputs, for every rank; as many ranks have one more
  int log2_group_blocks;    // group size = 32 << this; -1: one scale per output
  int stage_groups;         // of rounded weights: groups that end in a stage, 4, 2 or 1
  int teams;                // 2: two clusters share a tile's inputs; the first, which starts before, leaves its sums
  uint64_t* arrived;        // [tile, rank, warpgroup]: handed over
  float4* partial;          // [tile, rank, sums that the rank finishes]; evenly: [CTA, sums of a tile], as `arrived`
  Divisor tile_stages;      // evenly: as `stages` and `more_stages` are those of a CTA
  bool paired;              // a cluster is two CTAs of neighbouring outputs, which copy the tokens for each other
  int first_output;         // of the kernel's part of the product
};

// The scales and shifts only where groups are smaller than a stage; `last` for a tile that is not full: the engine
// takes longer for rows beyond the last token than for those that are there (docs/performance.md, log 95).
struct Maps {
  CUtensorMap x, last, scales, shifts;
};

// What a tile's tokens and their inputs are: rows of the activations here, pixels and taps in conv_warpgroup.cuh. A
// source with kWindows copies what a stage takes itself.
struct Rows {
  using Params = warpgroup::Params;
  static constexpr bool kWindows = false;
  static constexpr int kPieces = 1;
  static constexpr int kProducer = 0;  // the warp that copies activations
  static constexpr int producers(int warpgroups) { return warpgroups < 2 ? 2 : warpgroups; }  // warps
};

// float32 activations as two fp16 numbers each, [piece, batch, token, input] in scratch, in units of a token's power of
// two. Codes of weights are converted once and multiply both.
struct SplitParams : Params {
  const float* powers;  // [batch, token]
  // With float zeros or offsets: [batch, sum_count, sum_stride], sums of the activations of each token and group, or of
  // each stage, if that is less.
  const float* sums;
  int sum_count, sum_stride;
};
struct SplitRows : Rows {
  using Params = SplitParams;
  static constexpr int kPieces = 2;
  static constexpr int kProducer = 2;  // weights need not wait for them
  static constexpr int producers(int) { return 3; }
};

// kEven: CTAs share the stages of all tiles out evenly. What is not the beginning of a tile is handed over to the CTA
// that has that. A kernel for both ways would be 2 to 8% slower (docs/performance.md, log 162).
template <typename Source_, typename X_, int kBits_, int kTokens_, int kWarpgroups_, int kFlushes_, Kind kKind,
          bool kEven_ = false>
struct Shape {
  using Source = Source_;
  using X = X_;
  static constexpr int kBits = kBits_;
  static constexpr int kTokens = kTokens_;
  static constexpr int kWarpgroups = kWarpgroups_;  // 64 outputs each
  static constexpr int kFlushes = kFlushes_;        // group ends in a stage: 4, 2 or 1 for groups of 32, 64, more
  static constexpr bool kZeros = kKind == Kind::kRoundedAndZeros;
  static constexpr bool kRounded = kKind == Kind::kRounded || kZeros;
  static constexpr bool kPlain = kKind == Kind::kPlain || kRounded, kSums = kKind == Kind::kSums;
  static constexpr bool kAnyScales = !kPlain || Source::kWindows;  // not of the activations' type alone
  static constexpr bool kTable = kKind == Kind::kTable;
  static constexpr bool kRepeats = kSums || (kTable && Source::kPieces > 1);  // what is not finite
  static constexpr bool kMakesSums = kSums && Source::kPieces == 1;           // others are copied
  static constexpr bool kMultipliesSums = kMakesSums && kTokens >= 64;        // on tensor cores
  static constexpr int kRows = kWarpgroups * kTileN;
  static constexpr bool kEven = kEven_;
  static_assert(!kEven || (!kMakesSums && !Source::kWindows));
  static constexpr bool kShares = shares_inputs(kWarpgroups) && !kEven;
  // Half of a stage's activations are multiplied before the other half has come, which is felt at the first stage. Not
  // where conversion binds, as it takes an instruction more (docs/performance.md, log 128).
  static constexpr bool kHalves = kRounded && !Source::kWindows && kTokens >= (kFlushes == 1 || kBits == 8 ? 112 : 144);
  static constexpr bool kTeams = has_teams(kTokens) && kWarpgroups == 2 && kFlushes == 1 && kPlain &&
                                 Source::kPieces == 1 && !Source::kWindows && !kEven;
  static constexpr bool kPairs =
      has_pairs(kTokens, kWarpgroups, kBits, kFlushes > 1) && kRounded && !Source::kWindows && kArrivals == 1 && !kEven;
  // After those of outputs one warpgroup produces; more add activations up, each in slots of its own.
  static constexpr int kSumWarpgroups = !kMakesSums ? 0 : kMultipliesSums ? 2 : 1;
  static constexpr int kProducers = 1 + kSumWarpgroups;
  static constexpr int kThreads = (kWarpgroups + kProducers) * 128;
  static_assert(kWarpgroups == 2 || kPlain);

  // Three warpgroups or four fill a multiprocessor. Of one or two, two CTAs share it, so that one streams while the
  // other starts or ends; from 64 tokens on the accumulators of two leave no room for that, or activations in pieces
  // earlier.
  static constexpr int kMostOfTwo = Source::kPieces == 1 || (kBits == 4 && kFlushes == 1) ? 32 : 16;  // tokens
  static constexpr int kCtas = kTable || kWarpgroups > 2 || (kWarpgroups == 2 && kTokens > kMostOfTwo) ? 1 : 2;
  static constexpr int kLaunchRegisters = 65536 / (kCtas * kThreads) / 8 * 8;
  static constexpr int kProducerRegisters = kWarpgroups > 2 || (kMakesSums && kCtas == 2) ? 32 : 40;
  // What the consumers gain, the producer gives up: a CTA keeps the registers that it was launched with.
  static constexpr int kConsumerRegisters =
      (kLaunchRegisters + (kLaunchRegisters - kProducerRegisters) * kProducers / kWarpgroups) / 8 * 8;
  static_assert(kConsumerRegisters <= 232);

  // Sums of a stage are scaled while the tensor cores work on the next, where there are registers for two sets of them
  // and not the weights bind.
  static constexpr bool kTwoSums = Source::kPieces > 1 && kFlushes == 1 && kCtas == 1 && kTokens <= 64 && !kTable;

  // A unit is what the tensor cores work on while the codes of the next are converted: of more tokens there are no
  // registers for half a stage's.
  static constexpr int kUnits = (kFlushes == 4 && !kRounded) || kTokens > 200 ? 4 : 2;
  static constexpr int kUnitSteps = kStageSteps / kUnits;

  static constexpr int kTiles = kStageK / tile_k(kBits);      // packed tiles of a stage along the inputs
  static constexpr int kColumns = Source::kPieces * kTokens;  // of a product
  // Activations: two boxes of 64 inputs. Each of a pair copies as many tokens, whole eights.
  static constexpr int kHalfBytes = Source::kPieces * (kPairs ? (kTokens + 15) / 16 * 16 : kTokens) * 128;
  static constexpr int kXBytes = 2 * kHalfBytes;
  static constexpr int kWeightBytes = kWarpgroups * kTiles * kTileBytes;
  // Of as many groups as end in a stage; every type has room.
  static constexpr int kScaleBytes = kFlushes * kRows * (kAnyScales ? 4 : 2);
  static constexpr int kShiftBytes = kFlushes * kRows * (kRounded ? 2 : kPlain ? 1 : 4);
  // Of float zeros and offsets: sums of activations and what multiplies them, as operands of a product or in float32,
  // and scales in float32.
  static constexpr int kNumberBytes = kMultipliesSums ? kPiecesBytes : 4;
  static constexpr int kSumBytes = kSums ? kFlushes * kTokens * kNumberBytes : 0;
  static constexpr int kFactorBytes = kMakesSums ? kFlushes * kRows * kNumberBytes : 0;
  static constexpr int kFloatBytes = kMakesSums ? kFlushes * kRows * 4 : 0;
  static constexpr int kWeightsAt = kXBytes;
  static constexpr int kScalesAt = kWeightsAt + kWeightBytes;
  static constexpr int kShiftsAt = kScalesAt + kScaleBytes;
  static constexpr int kSumsAt = kShiftsAt + kShiftBytes;
  static constexpr int kFactorsAt = kSumsAt + kSumBytes;
  static constexpr int kFloatsAt = kFactorsAt + kFactorBytes;
  static constexpr int kStageBytes = (kFloatsAt + kFloatBytes + 1023) / 1024 * 1024;
  static constexpr int kTableBytes = kTable ? pair_table_bytes(Source::kPieces) : 0;
  static constexpr int kFit =
      (kMultiprocessorBytes / kCtas - 1024 - kBarrierBytes - kTableBytes) / kStageBytes;  // 1 KiB is the system's
  static constexpr int kStages = kFit < kMaxStages ? kFit : kMaxStages;
  // Results of a warpgroup, of which a stage has room for two.
  static constexpr int kResultBytes = (kTokens + 15) / 16 * 16 * kTileN * 2;
  static_assert(2 * kResultBytes <= kStageBytes);
  // Partial sums of a cluster's CTAs, of the tokens that one finishes, take the place of the stages, and behind them,
  // as many again, which are read but mean nothing, and the results.
  static constexpr int kMostOfRank = most_of_rank(kTokens);
  static constexpr int kLineBytes = Source::kWindows ? 0 : kMostOfRank * kRows * (4 + 2);
  static constexpr int kOfCluster = kShares ? 8 * (kMaxCluster - 1) * kRows * 4 + kLineBytes : 0;
  static_assert(kStages >= 3 && kTokens * kRows * 4 + kOfCluster <= kStages * kStageBytes);
  static_assert(kStageBytes % 1024 == 0 && kHalfBytes % 1024 == 0);
  // The product that adds activations up takes 64 tokens at a time, of which those beyond kTokens are other data.
  static constexpr int kSumBlocks = (kTokens + 63) / 64;
  static_assert(!kMakesSums || kHalfBytes + kSumBlocks * 64 * 128 <= kStageBytes);
};

// (code - zero) * 2^-13 for pairs of codes. `factor` undoes the power of two of a masked code, 16 times as large in odd
// pairs of int4.
template <typename X>
struct Convert {
  static constexpr bool kBf16 = std::is_same_v<X, __nv_bfloat16>;
  static constexpr uint32_t kFactor = kBf16 ? 0x7b807b80u : 0x68006800u;       // 2^120, 2^11
  static constexpr uint32_t kFactorOfOdd = kBf16 ? 0x79807980u : 0x58005800u;  // 2^116, 2^7
  static constexpr float kUnscale = 0x1p+13f;

  __device__ static uint32_t minus_zero(float zero) {  // both halves -zero * 2^-13
    const X value = from_float<X>(-zero * 0x1p-13f);
    return pack_pair(value, value);
  }
  // Of zeros of one byte, in one half of the register or both, as of codes.
  __device__ static uint32_t minus_bytes(uint32_t zeros) { return fma(zeros, kFactor ^ 0x80008000u, 0x80008000u); }
  __device__ static uint32_t fma(uint32_t codes, uint32_t factor, uint32_t minus_zero) {
    uint32_t d;
    if constexpr (kBf16) {
      asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(codes), "r"(factor), "r"(minus_zero));
    } else {
      asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(codes), "r"(factor), "r"(minus_zero));
    }
    return d;
  }
};

template <typename X, int kBits, bool kZeros>
using RoundedShape = ConvertShape<X, kBits, kZeros ? Codes::kWithZeros : Codes::kNumbers>;

// A operands of the steps of 16 inputs that half a vector of a lane's words holds: 2 for int4, 1 for int8.
template <typename X, int kBits>
__device__ __forceinline__ void convert_half(uint32_t low, uint32_t high, uint32_t zero_low, uint32_t zero_high,
                                             uint32_t (*a)[4]) {
  using C = Convert<X>;
  if constexpr (kBits == 4) {
    uint32_t l[4], h[4];
    uint4_to_subnormal(low, l);
    uint4_to_subnormal(high, h);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      a[step][0] = C::fma(l[2 * step], C::kFactor, zero_low);
      a[step][1] = C::fma(h[2 * step], C::kFactor, zero_high);
      a[step][2] = C::fma(l[2 * step + 1], C::kFactorOfOdd, zero_low);
      a[step][3] = C::fma(h[2 * step + 1], C::kFactorOfOdd, zero_high);
    }
  } else {
    uint32_t l[2], h[2];
    uint8_to_subnormal(low, l);
    uint8_to_subnormal(high, h);
    a[0][0] = C::fma(l[0], C::kFactor, zero_low);
    a[0][1] = C::fma(h[0], C::kFactor, zero_high);
    a[0][2] = C::fma(l[1], C::kFactor, zero_low);
    a[0][3] = C::fma(h[1], C::kFactor, zero_high);
  }
}
// The same of numbers that pairs of codes look up, and, of two pieces, of the second ones.
template <int kPieces, int kRowBytes = pair_row_bytes(kPieces)>
__device__ __forceinline__ void look_up_half(uint32_t low, uint32_t high, uint32_t table, uint32_t lane,
                                             uint32_t (*first)[4], uint32_t (*second)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t numbers[2][4];
    look_up_pairs<kPieces, kRowBytes>(i == 0 ? low : high, table, lane, numbers[0], numbers[1]);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      first[pair / 2][pair % 2 * 2 + i] = numbers[0][pair];
      if (kPieces > 1) second[pair / 2][pair % 2 * 2 + i] = numbers[1][pair];
    }
  }
}

// The same of weights that are rounded. With zeros the codes less those are rounded first.
template <bool kZeros>
struct Factors {
  Affine affine;
};
template <typename X, int kBits, bool kZeros>
__device__ __forceinline__ void convert_half(uint32_t low, uint32_t high, const Factors<kZeros>& of_low,
                                             const Factors<kZeros>& of_high, uint32_t (*a)[4]) {
  using C = wonly::Convert<RoundedShape<X, kBits, kZeros>>;
  uint32_t l[16 / kBits], h[16 / kBits];
  C::weights(low, of_low.affine, {}, l);
  C::weights(high, of_high.affine, {}, h);
#pragma unroll
  for (int i = 0; i < 16 / kBits; ++i) {
    a[i / 2][i % 2 * 2] = l[i];
    a[i / 2][i % 2 * 2 + 1] = h[i];
  }
}

// Of the whole vector, 16 bytes.
template <typename X, int kBits, typename Of>
__device__ __forceinline__ void convert(const uint4& words, const Of& low, const Of& high, uint32_t (*a)[4]) {
  convert_half<X, kBits>(words.x, words.y, low, high, a);
  convert_half<X, kBits>(words.z, words.w, low, high, a + (kBits == 4 ? 2 : 1));
}

// A warpgroup's product of the weights and activations of 16 inputs. Two where there are so many columns that one would
// take more than 128 registers, with which four warpgroups are launched: ptxas refuses that, whatever they have later.
template <typename X, int kColumns>
__device__ __forceinline__ void multiply_step(float (&sums)[kColumns / 2], const uint32_t (&weights)[4], uint64_t x,
                                              bool accumulate) {
  if constexpr (kColumns > 192) {
    constexpr int kFirst = kColumns / 16 * 8, kSecond = kColumns - kFirst;
    multiply_step<X, kFirst>(reinterpret_cast<float (&)[kFirst / 2]>(sums), weights, x, accumulate);
    multiply_step<X, kSecond>(reinterpret_cast<float (&)[kSecond / 2]>(sums[kFirst / 2]), weights,
                              x + (kFirst * 128 >> 4), accumulate);
  } else if constexpr (Convert<X>::kBf16) {
    ptx::Wgmma<kColumns>::bf16(sums, weights, x, accumulate);
  } else {
    ptx::Wgmma<kColumns>::f16(sums, weights, x, accumulate);
  }
}

// A warpgroup's products of the weights of some steps of 16 inputs, from step `first` of a stage on, with that stage's
// activations: two halves of 64 inputs, `half_bytes` apart. `accumulate`: whether sums go on with the first of them.
template <typename X, int kColumns, int kSteps>
__device__ __forceinline__ void multiply_steps(float (&sums)[kColumns / 2], const uint32_t (&weights)[kSteps][4],
                                               uint64_t x, int first, int half_bytes, bool accumulate) {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int step = first + i;
    const uint64_t operand_x = x + ((step / 4 * half_bytes + step % 4 * 32) >> 4);
    multiply_step<X, kColumns>(sums, weights[i], operand_x, i > 0 || accumulate);
  }
  ptx::wgmma_commit();
}

// A number of 16 or 32 bits in shared memory.
__device__ __forceinline__ float load_shared(const uint8_t* data, int i, DType type) {
  const bool wide = type == DType::kF32;
  const uint32_t bits = wide ? reinterpret_cast<const uint32_t*>(data)[i] : reinterpret_cast<const uint16_t*>(data)[i];
  const float single = __uint_as_float(bits << (wide ? 0 : 16));
  return type == DType::kF16 ? to_floats<__half>(bits).x : single;
}

// The three bf16 numbers that are a float32, each the upper half of one of these.
__device__ __forceinline__ void split(float value, uint32_t (&pieces)[3]) {
#pragma unroll
  for (uint32_t& piece : pieces) {
    piece = __float_as_uint(value);
    value = beyond_bf16(value);
  }
}
// Rows of A and B, pieces 0 0 0 1 1 1 2 2 and 0 1 2 0 1 2 0 1: all products but that of both last pieces, which is less
// than what float32 rounds away.
__device__ __forceinline__ uint4 row_of_a(float value) {
  uint32_t p[3];
  split(value, p);
  return {__byte_perm(p[0], p[0], 0x7632), __byte_perm(p[0], p[1], 0x7632), __byte_perm(p[1], p[1], 0x7632),
          __byte_perm(p[2], p[2], 0x7632)};
}
__device__ __forceinline__ uint4 row_of_b(float value) {
  uint32_t p[3];
  split(value, p);
  return {__byte_perm(p[0], p[1], 0x7632), __byte_perm(p[2], p[0], 0x7632), __byte_perm(p[1], p[2], 0x7632),
          __byte_perm(p[0], p[1], 0x7632)};
}

// Sums of a stage's activations, one for each group that ends there, by a warpgroup. `ones`: for group g 1 in the
// columns c of which g is c % kFlushes, so that lanes have sums of as different groups as there are. They are in `sum`
// after wgmma_wait: of tokens 64 i + 16 w + g, in two columns, and of the eighth token after it.
template <typename S>
__device__ __forceinline__ void sum_activations(const uint8_t* x, const uint8_t* ones, float (&sum)[S::kSumBlocks][4]) {
  const uint64_t operand_x = ptx::wgmma_descriptor(x);
  const uint64_t operand_ones = ptx::wgmma_descriptor_unswizzled(ones, 0, kOnesBytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < S::kSumBlocks; ++i) {
#pragma unroll
    for (int step = 0; step < kStageSteps; ++step) {
      const uint64_t of_step = operand_x + ((i * 64 * 128 + step / 4 * S::kHalfBytes + step % 4 * 32) >> 4);
      const uint64_t of_group = operand_ones + (step * S::kFlushes / kStageSteps * kOnesBytes >> 4);
      if constexpr (Convert<typename S::X>::kBf16) {
        ptx::WgmmaShared<8>::bf16(sum[i], of_step, of_group, step > 0);
      } else {
        ptx::WgmmaShared<8>::f16(sum[i], of_step, of_group, step > 0);
      }
    }
  }
  ptx::wgmma_commit();
}
template <typename S>
__device__ __forceinline__ void store_sums(const float (&sum)[S::kSumBlocks][4], int warp, int lane, uint8_t* sums) {
  const auto store = [&](int group, int token, float value) {
    const int at = group * S::kTokens + token;
    if constexpr (S::kMultipliesSums) {
      reinterpret_cast<uint4*>(sums)[at] = row_of_b(value);
    } else {
      reinterpret_cast<float*>(sums)[at] = value;
    }
  };
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < S::kSumBlocks; ++i) {
    const int first = i * 64 + warp * 16;
    if (first >= S::kTokens) break;
    const bool later = S::kFlushes == 4 ? t >= 2 : t % 2 == 1;
    const float even = later ? sum[i][2] : sum[i][0], odd = later ? sum[i][3] : sum[i][1];
    const int token = first + g + (later ? 8 : 0);
    if constexpr (S::kFlushes == 4) {
      store(t % 2 * 2, token, even);
      store(t % 2 * 2 + 1, token, odd);
    } else if constexpr (S::kFlushes == 2) {
      store(t / 2, token, t < 2 ? even : odd);
    } else if (t < 2) {
      store(0, token, even);
    }
  }
}

// Of the blocks of eight tokens that CTAs of a cluster share out, block b to rank b % cluster.
struct Blocks {
  int most, mine;  // of a rank, and of this one
  __device__ Blocks(const Params& params, int cluster, int rank, int blocks) {
    int rest;
    most = params.ranks.divide(blocks + cluster - 1, &rest);
    mine = most - ((most - 1) * cluster + rank < blocks ? 0 : 1);
  }
};
// What a tile is of: tokens from m0 on, no more than `tokens`, and outputs from n0 on.
template <typename S>
struct Tile {
  int row_block, m0, n0, tokens;
  __device__ Tile(const Params& params, int index, bool paired, int of_pair) {
    int token_tile;  // tiles of the same weights run together
    row_block = params.token_tiles.divide(index, &token_tile);
    if (paired) row_block = 2 * row_block + of_pair;
    m0 = token_tile * S::kTokens;
    n0 = params.first_output + row_block * S::kRows;
    tokens = min(S::kTokens, static_cast<int>(params.args.m) - m0);
  }
  __device__ int token_blocks() const { return (tokens + 7) / 8; }
};
// What a CTA multiplies: stages of a tile, whose results it stores, or some of which; where all stages are shared out
// evenly, before those others of the tile before it, whose sums it hands over.
template <typename S>
struct Work {
  int share;  // of the tile's stages, or of all
  int tile, first, stages;
  int handed_first = 0, handed_stages = 0;

  __device__ Work(const Params& params, int block, int of_tile, bool paired)
      : share(S::kEven ? static_cast<int>(gridDim.x) - 1 - block : of_tile),
        tile(block >> paired),
        first(share * params.stages + min(share, params.more_stages)),
        stages(params.stages + (share < params.more_stages ? 1 : 0)) {
    if (!S::kEven) return;
    // Who waits for another's sums waits for a CTA that starts before: the last of them starts first.
    tile = params.tile_stages.divide(first, &handed_first);
    first = 0;
    if (handed_first == 0) return;
    ++tile;
    handed_stages = min(stages, static_cast<int>(params.tile_stages.divisor) - handed_first);
    stages -= handed_stages;
  }
};
// Sums of a rank of a team, in vectors of four.
constexpr int team_sums(int tokens, int outputs) { return most_of_rank(tokens) * outputs / 4; }
// Whether results are sums with a bias, rounded, and leave in whole lines.
template <typename S>
__device__ __forceinline__ bool rounds_sums(const MatmulArgs& args) {
  constexpr bool kMay = !S::Source::kWindows && S::Source::kPieces == 1 && !S::kSums;
  return kMay && args.activation == Activation::kNone && args.y_dtype == args.x_dtype;
}

// Whether they are float32, and leave straight from the registers.
template <typename S>
__device__ __forceinline__ bool stores_wide(const MatmulArgs& args) {
  constexpr bool kMay = !S::Source::kWindows && !S::kSums && !S::kRepeats;
  return kMay && args.activation == Activation::kNone && args.y_dtype == DType::kF32;
}

// Of one cluster's CTAs, or of two where teams share a tile's inputs, what a CTA finishes: the tokens of its blocks, of
// those from m0 on, and all outputs of the tile, from n0 on.
struct Share {
  int cluster, rank, most_blocks;
  int m0, tokens, n0;
  float unscale;    // of the sums
  int team;         // negative: there is one
  uint64_t* word;   // handed over; of the first warpgroup
  float4* partial;  // of this rank
};

// By a warpgroup: the sums of all of the cluster's CTAs, which the threads here hold as accumulators lie, of the tokens
// that this one finishes; behind them are other numbers. False where the other team finishes them.
template <typename S>
__device__ __forceinline__ bool add_up(const tiles::ConsumerOf<S::kWarpgroups>& me, const Share& share,
                                       const uint8_t* ring, float (&sums)[S::kMostOfRank / 2]) {
  constexpr int kBlocks = S::kMostOfRank / 8;
#pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i) sums[i] = 0.f;
  const float4* from = reinterpret_cast<const float4*>(ring) + threadIdx.x;
#pragma unroll 1
  for (int other = 0; other < share.cluster; ++other, from += share.most_blocks * (S::kRows * 2)) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const float4 v = from[i * (S::kRows * 2)];
      sums[4 * i] += v.x, sums[4 * i + 1] += v.y, sums[4 * i + 2] += v.z, sums[4 * i + 3] += v.w;
    }
  }
  if constexpr (S::kTeams) {
    if (share.team >= 0) {
      uint64_t* const word = share.word + me.warpgroup;
      float4* const at = share.partial + threadIdx.x;
      if (share.team == 0) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          at[i * (S::kRows * 2)] = {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
        }
        me.sync();
        if (me.thread() == 0) ptx::hand_over(word);
        return false;
      }
      while (!ptx::handed_over(word)) {
      }
      me.sync();
      if (me.thread() == 0) *word = 0;
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const float4 v = __ldcg(at + i * (S::kRows * 2));
        sums[4 * i] += v.x, sums[4 * i + 1] += v.y, sums[4 * i + 2] += v.z, sums[4 * i + 3] += v.w;
      }
    }
  }
  return true;
}

// What a thread finishes in turn i: four outputs of a token. first_sum: of a CTA's, every 16th.
template <int kWarpgroups>
struct Quad {
  int token, n, first_sum;

  __device__ Quad(const Share& share, uint32_t i) {
    constexpr uint32_t kQuads = kWarpgroups * kTileN / 4;
    const uint32_t block = i / (8 * kQuads), quad = i / 8 % kQuads;
    token = static_cast<int>((block * share.cluster + share.rank) * 8 + i % 8);
    n = share.n0 + static_cast<int>(quad) * 4;
    const uint32_t warp = block * (kWarpgroups * 4) + quad / 4, lane = quad % 2 * 16 + i % 8 / 2;
    first_sum = static_cast<int>((warp * 32 + lane) * 4 + quad / 2 % 2 * 2 + i % 2);
  }
};

// By all threads: adds up the sums, times factor_of(token), and finishes four outputs of a token at a time, those of
// neighbouring lanes of neighbouring tokens, whose sums lie in different banks. With S::kRepeats, returns for which
// turns of this thread's there are infinities or NaNs.
template <typename S, typename FactorOf>
__device__ __forceinline__ uint32_t finish_quads(const Finish& of, const Share& share, const uint8_t* ring,
                                                 FactorOf&& factor_of) {
  constexpr uint32_t kQuads = S::kRows / 4;
  const bool first_team = S::kTeams && share.team == 0, last_team = S::kTeams && share.team > 0;
  if (last_team) {
    while (!ptx::handed_over(share.word)) {
    }
    __syncthreads();
    if (threadIdx.x == 0) *share.word = 0;
  }
  uint32_t again = 0;
  int turn = 0;
  for (uint32_t i = threadIdx.x; i < share.most_blocks * 8 * kQuads; i += S::kThreads, ++turn) {
    const Quad<S::kWarpgroups> at(share, i);
    if (at.n >= of.n || at.token >= share.tokens) continue;
    const float* from = reinterpret_cast<const float*>(ring) + at.first_sum;
    float sum[4] = {};
#pragma unroll 1
    for (int other = 0; other < share.cluster; ++other) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[j] += from[j * 16];
      from += share.most_blocks * S::kRows * 8;
    }
    if constexpr (S::kTeams) {
      float4* const of_both = share.partial + i;
      if (first_team) {
        *of_both = {sum[0], sum[1], sum[2], sum[3]};
        continue;
      }
      if (last_team) {
        const float4 v = __ldcg(of_both);
        sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
      }
    }
    const float factor = factor_of(at.token);
#pragma unroll
    for (float& of_one : sum) of_one *= factor;
    if (S::kRepeats && !isfinite(sum[0] + sum[1] + sum[2] + sum[3])) again |= 1u << turn;
    finish4(of, share.m0 + at.token, at.n, sum);
  }
  if (first_team) {
    __syncthreads();
    if (threadIdx.x == 0) ptx::hand_over(share.word);
  }
  return again;
}

// The same of results of the activations' type with an activation function: eight outputs at a time, the same ones of
// all of a thread's tokens.
template <typename S>
__device__ __forceinline__ void finish_octets(const MatmulArgs& args, int64_t batch, const Share& share,
                                              const uint8_t* ring) {
  using X = typename S::X;
  constexpr int kOctets = S::kRows / 8, kAtOnce = S::kThreads / (8 * kOctets);  // blocks of eight tokens
  const int of_block = threadIdx.x % 8, octet = threadIdx.x / 8 % kOctets, n = share.n0 + octet * 8;
  int block = threadIdx.x / (8 * kOctets);
  if (n >= args.n || block >= kAtOnce) return;
  float bias[8];
  load_biases(Finish(args, batch), n, bias);
  const float* const mine =
      reinterpret_cast<const float*>(ring) + octet / 2 * 128 + of_block / 2 * 4 + octet % 2 * 2 + of_block % 2;
  X* const y = static_cast<X*>(args.y) + (batch * args.m + share.m0) * args.n + n;
#pragma unroll 1
  for (; block < share.most_blocks; block += kAtOnce) {
    const int token = (block * share.cluster + share.rank) * 8 + of_block;
    if (token >= share.tokens) break;
    float sum[8] = {};
    const float* at = mine + block * (S::kRows * 8);
#pragma unroll 1
    for (int other = 0; other < share.cluster; ++other, at += share.most_blocks * (S::kRows * 8)) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += at[j * 16];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] = fmaf(sum[j], share.unscale, bias[j]);
    apply(args.activation, sum, true);
    uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = from_float2<X>(sum[2 * j], sum[2 * j + 1]);
    *reinterpret_cast<uint4*>(y + token * args.n) = {pairs[0], pairs[1], pairs[2], pairs[3]};
  }
}

// Adds sums that another CTA has handed over, as accumulators lie, of all blocks of eight tokens that there are; what
// the others get means nothing.
template <typename S>
__device__ __forceinline__ void add_partial(const float4* from, int blocks, float (&sums)[S::kTokens / 2]) {
  constexpr int kBlocks = S::kTokens / 8;
  constexpr int kAtOnce = S::kWarpgroups == 3 ? (S::kTokens > 160 ? 2 : 4) : 8;  // for which there are registers
#pragma unroll
  for (int first = 0; first < kBlocks; first += kAtOnce) {
    float4 v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce && first + i < kBlocks; ++i) {
      v[i] = __ldcg(from + min(first + i, blocks - 1) * (S::kRows * 2));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce && first + i < kBlocks; ++i) {
      float* const to = sums + 4 * (first + i);
      to[0] += v[i].x, to[1] += v[i].y, to[2] += v[i].z, to[3] += v[i].w;
    }
  }
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kCtas)
    warpgroup_matmul(const __grid_constant__ typename S::Source::Params params, const __grid_constant__ Maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using X = typename S::X;
  using C = Convert<X>;
  extern __shared__ __align__(1024) uint8_t shared[];
  uint64_t* full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* empty = full + S::kStages;
  uint64_t* summed = empty + S::kStages;
  uint64_t* second = summed;  // half of the activations has come, where none are summed
  uint64_t* received = summed + S::kStages;
  uint8_t* const ring = shared + kBarrierBytes;

  // By a warp that has nothing else to do, and first: copies wait for it.
  constexpr int producers = S::Source::producers(S::kWarpgroups);
  const bool paired = S::kPairs && params.paired;
  if (threadIdx.x == S::kThreads - 32) {
    for (int i = 0; i < S::kStages; ++i) {
      ptx::barrier_init(full + i, producers);
      ptx::barrier_init(empty + i, S::kWarpgroups * 4 * kArrivals * (paired ? 2 : 1));
      if (S::kMakesSums) ptx::barrier_init(summed + i, 4 * kArrivals);
      if (S::kHalves) ptx::barrier_init(second + i, 1);
    }
    // That of the sums: bytes from the rest of the cluster, and the warps that write this CTA's own.
    ptx::barrier_init(received, 1 + S::kWarpgroups * 4 * kArrivals);
    ptx::barrier_init_fence();
  }
  if (paired) ptx::cluster_arrive();
  const MatmulArgs& args = params.args;
  const int cluster = S::kShares ? params.cluster : 1;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  // No division that the first copies would wait for.
  const int of_cluster = S::kShares || S::kPairs ? ptx::cluster_rank() : 0, rank = paired ? 0 : of_cluster;
  const int64_t batch = S::kTeams && params.teams > 1 ? 0 : blockIdx.z;

  const int team = S::kTeams && params.teams > 1 ? static_cast<int>(blockIdx.z) : 0;
  const int of_tile = team * cluster + rank;
  const Work<S> work(params, blockIdx.x, of_tile, paired);
  const Tile<S> tile(params, work.tile, paired, of_cluster);
  const auto work_again = [&] {
    return Work<S>(params, S::kEven ? ptx::block_again() : static_cast<int>(blockIdx.x), of_tile, paired);
  };
  // A warp that has nothing else to do waits until all can see what is handed over.
  static_assert(!S::kEven || producers < 4);
  constexpr int kHandsOver = 5, kHandingThreads = S::kWarpgroups * 128 + 32;  // a barrier, and who comes to it
  constexpr int kAllMultiply = 6;  // those of up to four warpgroups come before it
  constexpr int kOfProducers = 7, kOfAll = 8;
  const int k_tiles = (static_cast<int>(args.k) + tile_k(S::kBits) - 1) / tile_k(S::kBits);

  const bool grouped = S::kPlain || S::kFlushes > 1 || params.log2_group_blocks >= 0;
  const int stage_groups = S::kRounded && S::kFlushes == 4 ? params.stage_groups : S::kFlushes;
  const bool has_zeros = !S::kSums && args.shift_mode == ShiftMode::kZeros;
  const int scale_size = S::kAnyScales ? element_size(args.scale_dtype) : 2;
  const bool one_byte = S::kPlain && !S::kRounded;
  const bool shifted = !S::kTable && args.shift_mode != ShiftMode::kNone;
  const int shift_size = !shifted ? 0 : one_byte ? 1 : element_size(args.shift_dtype);
  const uint8_t* scales = static_cast<const uint8_t*>(args.scales) + batch * args.scales_batch_stride * scale_size;
  const uint8_t* shifts = static_cast<const uint8_t*>(args.shift) + batch * args.shift_batch_stride * shift_size;

  constexpr float kBias = bias_of(S::kBits);
  // Rounded weights may be in units of a power of two.
  constexpr float kUnscale = S::kRounded ? 1.f / wonly::Convert<RoundedShape<X, S::kBits, S::kZeros>>::kUnit : 1.f;
  // At the end the CTAs of a cluster share the tokens out, eight at a time: block b of them to rank b % cluster.
  const auto own_share = [&] {
    const Tile<S> of(params, work_again().tile, paired, of_cluster);
    const int most_blocks = Blocks(params, cluster, rank, of.token_blocks()).most;
    Share own{cluster, rank, most_blocks, of.m0, of.tokens, of.n0, kUnscale, -1, nullptr, nullptr};
    if (S::kTeams && params.teams > 1) {
      const int slice = static_cast<int>(blockIdx.x) * cluster + rank;
      own.team = team;
      own.word = params.arrived + slice * S::kWarpgroups;
      own.partial = params.partial + slice * team_sums(S::kTokens, S::kRows);
    }
    return own;
  };
  if (S::kMakesSums && threadIdx.x < S::kFlushes * kOnesBytes / 16) {
    const uint32_t ones = threadIdx.x % S::kFlushes != threadIdx.x / 8 ? 0u : C::kBf16 ? 0x3f803f80u : 0x3c003c00u;
    reinterpret_cast<uint4*>(shared + kOnesAt)[threadIdx.x] = {ones, ones, ones, ones};
    ptx::fence_shared_for_async();
  }

  if (warp >= S::kWarpgroups * 4) {
    const auto x_map_of = [&](const Tile<S>& of) { return of.tokens < S::kTokens ? &maps.last : &maps.x; };
    if (threadIdx.x == S::kWarpgroups * 128) ptx::prefetch_map(x_map_of(tile));
    ptx::lower_registers<S::kProducerRegisters>();
    // Warp w of the producer brings the weights of row tile w; the first, or a third, activations, the second scales
    // and shifts. All lanes walk along, so that addresses stay in uniform registers, and one of them issues.
    const int producer = __shfl_sync(0xffffffffu, warp, 0) - S::kWarpgroups * 4;
    const int x_batch = args.x_batch_stride == 0 ? 0 : static_cast<int>(batch);
    const int scales_batch = args.scales_batch_stride == 0 ? 0 : static_cast<int>(batch);
    const int shifts_batch = args.shift_batch_stride == 0 ? 0 : static_cast<int>(batch);
    RingPosition<S::kStages> at;
    // Those who copy meet when they have at hand what the first copies are asked for with. For those who multiply, who
    // may have a table to prepare, they need not wait; as warps may end before those come, it is a barrier that counts.
    // Where racecheck watches all wait: it may not follow a barrier that some do not wait at.
    const auto meet = [&] {
      if constexpr (S::kMakesSums || kArrivals > 1) {
        ptx::named_sync<kOfAll, S::kThreads>();
      } else {
        ptx::named_sync<kOfProducers, S::kProducers * 128>();
        ptx::named_arrive<kOfAll, S::kThreads>();
      }
      if (paired) ptx::cluster_wait();
    };
    if (producer >= producers) {
      meet();
      if (S::kEven && producer == producers && work.handed_stages > 0) {
        ptx::named_sync<kHandsOver, kHandingThreads>();
        if (lane < S::kWarpgroups) ptx::hand_over(params.arrived + work.share * S::kWarpgroups + lane);
      }
    }
    // The stages of a tile; `before` are in the ring or have been.
    const auto copy_stages = [&](const Tile<S>& of, const int first_stage, const int stage_count, const int before,
                                 const auto& started) {
      const int m0 = of.m0, n0 = of.n0, tokens = of.tokens;
      const CUtensorMap* const x_map = x_map_of(of);
      const int outputs = min(S::kRows, static_cast<int>(args.parameter_row) - n0);  // with what follows the last
      const int row_tiles = (outputs + kTileN - 1) / kTileN;
      // CTAs that walk the inputs in step would all read addresses a multiple of a large power of two apart, which
      // share memory channels: each begins somewhere else in its run, and wraps around. The golden ratio spreads any
      // number.
      const int rotation =
          static_cast<int>(__umulhi(static_cast<uint32_t>(of.row_block >> paired) * 0x9e3779b9u, stage_count));
      const auto stage_at = [&](int index) {
        const int at = index + rotation;
        return first_stage + (at < stage_count ? at : at - stage_count);
      };
      if constexpr (S::Source::kWindows) {
        const typename S::Source::template Copies<S> copies(params, x_map, tokens, producer, row_tiles, n0, m0);
        started();
        for (int index = 0; index < stage_count; ++index, at.advance()) {
          if (index >= S::kStages) ptx::barrier_wait(empty + at.slot, at.phase ^ 1);
          if (ptx::elect_one()) copies.copy(stage_at(index), ring + at.slot * S::kStageBytes, full + at.slot);
        }
        return;
      }
      const uint32_t* words =
          args.qw + batch * args.qw_batch_stride + static_cast<uint64_t>(n0 / kTileN + producer) * k_tiles * kTileWords;
      const int scale_row_bytes = outputs * scale_size;
      const int shift_row_bytes = outputs * shift_size;
      const int half_rows = (tokens + 15) / 16 * 8;  // that one of a pair copies
      const bool copies_x = producer == S::Source::kProducer;
      started();
      if (S::Source::kPieces > 1 && copies_x) ptx::wait_for_last_kernel();
#pragma unroll 1
      for (int index = 0; index < stage_count; ++index, at.advance()) {
        const int stage = stage_at(index);
        if (before + index >= S::kStages) ptx::barrier_wait(empty + at.slot, at.phase ^ 1);
        if (!ptx::elect_one()) continue;
        uint8_t* to = ring + at.slot * S::kStageBytes;
        uint64_t* done = full + at.slot;
        const int tile_bytes = min(S::kTiles, k_tiles - stage * S::kTiles) * kTileBytes;
        const int factors =
            S::kFlushes > 1 ? stage_groups * S::kRows * (scale_size + shift_size) : scale_row_bytes + shift_row_bytes;
        const int rows = paired ? 2 * half_rows : tokens;
        const int half_bytes = S::Source::kPieces * rows * kStageK;
        const int sum_bytes = S::kSums && !S::kMakesSums ? (rows + 3) / 4 * 16 : 0;  // of a group
        const int of_x = (S::kHalves ? 1 : 2) * half_bytes + S::kFlushes * sum_bytes;
        const int mine = copies_x ? of_x : producer == 1 && grouped ? factors : 0;
        ptx::barrier_expect(done, mine + (producer < row_tiles ? tile_bytes : 0));
        uint64_t* const half_done = S::kHalves ? second + at.slot : done;
        if (S::kHalves && copies_x) ptx::barrier_expect(half_done, half_bytes);
        if (producer < row_tiles) {
          ptx::bulk_copy(to + S::kWeightsAt + producer * S::kTiles * kTileBytes,
                         words + static_cast<int64_t>(stage) * S::kTiles * kTileWords, tile_bytes, done);
        }
        if (paired && copies_x) {
          const int first = of_cluster * half_rows;
          uint8_t* const x = to + first * 128;
          ptx::tensor_copy_3d_multicast(x, x_map, stage * kStageK, m0 + first, x_batch, done, 3);
          ptx::tensor_copy_3d_multicast(x + S::kHalfBytes, x_map, stage * kStageK + 64, m0 + first, x_batch, half_done,
                                        3);
        } else if (copies_x) {
#pragma unroll
          for (int piece = 0; piece < S::Source::kPieces; ++piece) {
            const int of_piece = piece * (args.x_batch_stride == 0 ? 1 : static_cast<int>(args.batch)) + x_batch;
            uint8_t* const x = to + piece * S::kTokens * 128;
            ptx::tensor_copy_3d(x, x_map, stage * kStageK, m0, of_piece, done);
            ptx::tensor_copy_3d(x + S::kHalfBytes, x_map, stage * kStageK + 64, m0, of_piece, half_done);
          }
          if constexpr (S::kSums && !S::kMakesSums) {
            const int first = x_batch * params.sum_count + stage * S::kFlushes;
            const float* const sums = params.sums + static_cast<int64_t>(first) * params.sum_stride + m0;
#pragma unroll
            for (int group = 0; group < S::kFlushes; ++group) {
              ptx::bulk_copy(to + S::kSumsAt + group * S::kTokens * 4, sums + group * params.sum_stride, sum_bytes,
                             done);
            }
          }
        } else if (producer == 1 && S::kFlushes > 1) {
          const int first = stage * stage_groups;
          ptx::tensor_copy_3d(to + S::kScalesAt, &maps.scales, n0, first, scales_batch, done);
          if (shift_size > 0) ptx::tensor_copy_3d(to + S::kShiftsAt, &maps.shifts, n0, first, shifts_batch, done);
        } else if (producer == 1 && grouped) {
          const int64_t first = (stage * 4 >> params.log2_group_blocks) * args.parameter_row + n0;
          ptx::bulk_copy(to + S::kScalesAt, scales + first * scale_size, scale_row_bytes, done);
          if (shift_size > 0) {
            ptx::bulk_copy(to + S::kShiftsAt, shifts + first * shift_size, shift_row_bytes, done);
          }
        }
      }
    };
    if (producer < producers) {
      // One after the other, not in a loop, in which nothing would be known to be the same for all lanes.
      const bool hands_over = S::kEven && work.handed_stages > 0;
      if (hands_over) {
        copy_stages(Tile<S>(params, work.tile - 1, false, 0), work.handed_first, work.handed_stages, 0, meet);
      }
      copy_stages(tile, work.first, work.stages, work.handed_stages, [&] {
        if (!hands_over) meet();
      });
    } else if (S::kMakesSums && producer >= 4) {
      const int output = threadIdx.x % 128;
      float scale = 0.f, shift = 0.f;  // those of all inputs, if there is one of each
      if (!grouped) {
        const int64_t n = min(static_cast<int64_t>(tile.n0 + output), args.n - 1);
        scale = load_element(scales, n, args.scale_dtype), shift = load_element(shifts, n, args.shift_dtype);
      }
      // Two share the slots out, not the stages: of a slot each must see every phase. If its visits were two phases
      // apart, as with an odd number of slots, it would take the one before the last for that which it waits for, where
      // stages come late and not in order.
      const int turn = producer / 4 - 1;
      for (int index = 0; index < work.stages; ++index, at.advance()) {
        if (S::kSumWarpgroups == 2 && at.slot % 2 != turn) continue;
        uint8_t* data = ring + at.slot * S::kStageBytes;
        ptx::barrier_wait(full + at.slot, at.phase);
        float sum[S::kSumBlocks][4];
        sum_activations<S>(data, shared + kOnesAt, sum);
#pragma unroll
        for (int group = 0; group < S::kFlushes; ++group) {
          const int i = group * S::kRows + output;
          if (grouped) {
            scale = load_shared(data + S::kScalesAt, i, args.scale_dtype);
            shift = load_shared(data + S::kShiftsAt, i, args.shift_dtype);
          }
          float* const floats = reinterpret_cast<float*>(data + S::kFloatsAt);
          const bool offsets = args.shift_mode == ShiftMode::kOffsets;
          if constexpr (S::kMultipliesSums) {
            // What to add to a code less its bias. An offset that is more scales than any product could tell from it
            // passes for 2^60 of them, so that there is a quotient where scales are zero; __fdividef takes less than
            // 2^126. Half of it, as both operands have their 8 inputs twice.
            float whole = scale, zero = kBias - shift;
            if (offsets) {
              if (fabsf(scale) < fabsf(shift) * 0x1p-60f) whole = shift * 0x1p-60f;
              zero = kBias + (whole == 0.f ? 0.f : __fdividef(shift * 0.25f, whole * 0.25f));
            }
            floats[i] = whole * C::kUnscale;
            reinterpret_cast<uint4*>(data + S::kFactorsAt)[i] = row_of_a(zero * (0.5f / C::kUnscale));
          } else {
            floats[i] = scale * C::kUnscale;
            reinterpret_cast<float*>(data + S::kFactorsAt)[i] =
                fmaf(offsets ? kBias : kBias - shift, scale, offsets ? shift : 0.f);
          }
        }
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < S::kSumBlocks; ++i) ptx::keep(sum[i]);
        store_sums<S>(sum, producer % 4, lane, data + S::kSumsAt);
        if (S::kMultipliesSums) ptx::fence_shared_for_async();
        ptx::warp_arrive(summed + at.slot, lane);
      }
    }
    __syncwarp();
    if (cluster > 1 || paired) ptx::cluster_meet();
  } else {
    ptx::raise_registers<S::kConsumerRegisters>();
    prefetch_bias(args, batch, tile.n0, S::kRows, threadIdx.x);
    const int warpgroup = warp / 4;
    const int g = lane / 4;
    const int t = lane % 4;
    const int row = warpgroup * kTileN + warp % 4 * kAtomN + g;  // this lane's outputs: n0 + row and n0 + row + 8
    // A row of numbers of 16 or 32 bits, of all outputs, in shared memory: the bits of those of this lane.
    const auto load_pair = [](const uint8_t* row_data, DType type, uint32_t (&bits)[2]) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        bits[i] = S::kAnyScales && type == DType::kF32 ? reinterpret_cast<const uint32_t*>(row_data)[8 * i]
                                                       : reinterpret_cast<const uint16_t*>(row_data)[8 * i];
      }
    };
    const auto from_bits = [](uint32_t bits, DType type) {
      if constexpr (!S::kAnyScales) return to_floats<X>(bits).x;
      const float single = __uint_as_float(bits << (type == DType::kF32 ? 0 : 16));
      return type == DType::kF16 ? __half2float(__ushort_as_half(static_cast<uint16_t>(bits))) : single;
    };
    uint8_t* const table = ring + S::kStages * S::kStageBytes;
    const uint32_t of_table = ptx::shared_address(table);
    float unscale = C::kUnscale;  // of sums of a group
    if constexpr (S::kTable) {
      static_assert(S::kWarpgroups * 128 == kTablePairs);
      const float* const numbers = static_cast<const float*>(args.shift) + batch * args.shift_batch_stride;
      unscale = prepare_table<X, S::Source::kPieces>(numbers, table, threadIdx.x);
      asm volatile("bar.sync 1, %0;\n" ::"n"(S::kWarpgroups * 128) : "memory");
    }
    float scale[2], shift[2];
    uint32_t zero[2] = {C::minus_zero(kBias), C::minus_zero(kBias)};
    // What multiplies sums of activations: codes are taken from their middle.
    const auto shift_of = [&](float scale, float shift) { return weight_of(args.shift_mode, kBias, scale, shift); };
    // Where there is one of each for all inputs.
    const auto load_only = [&](int n0) {
      if (!grouped && !S::kMakesSums) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int64_t n = min(static_cast<int64_t>(n0 + row + 8 * i), args.n - 1);
          const float stored = load_element(scales, n, args.scale_dtype);
          scale[i] = stored * unscale;
          if (S::kSums) shift[i] = shift_of(stored, load_element(shifts, n, args.shift_dtype));
          if (has_zeros) zero[i] = C::minus_bytes(ptx::low_twice(shifts[n]));
        }
      }
    };

    float acc[S::kTokens / 2] = {}, part[S::kTwoSums ? 1 : S::kColumns / 2];
    constexpr bool kSeconds = S::kTable && S::Source::kPieces > 1;  // what numbers of a table are beyond fp16
    uint32_t codes[2][S::kUnitSteps][4], seconds[2][kSeconds ? S::kUnitSteps : 1][4];
    constexpr int kVectorSteps = S::kBits == 4 ? 4 : 2;     // steps of 16 inputs that one 16-byte vector of words holds
    constexpr bool kShared = S::kUnitSteps < kVectorSteps;  // by two units
    uint4 words[kShared ? 1 : S::kUnitSteps / kVectorSteps];
    uint32_t zero_bits[2], scale_bits[2], shift_bits[2];
    // Of rounded weights: scales and shifts of the groups of a unit.
    constexpr int kGroupSteps = kStageSteps / S::kFlushes, kUnitGroups = (S::kUnitSteps - 1) / kGroupSteps + 1;
    uint32_t group_scales[kUnitGroups][2], group_shifts[kUnitGroups][2];
    Affine affine[2];
    // An offset is that of the group, or its scale times what the bias of a code makes of it.
    using Rounded = wonly::Convert<RoundedShape<X, S::kBits, S::kZeros>>;
    const bool has_offsets = args.shift_mode == ShiftMode::kOffsets;
    const int offsets_at = has_offsets ? S::kShiftsAt : S::kScalesAt;
    const uint32_t shift_factor = Rounded::shift_factor(has_offsets, shift_size == 1);
    RingPosition<S::kStages> at;
    const auto stage_data = [&]() { return ring + at.slot * S::kStageBytes; };
    const auto wait_full = [&]() { ptx::barrier_wait(full + at.slot, at.phase); };
    // Where this lane's words and its outputs' scales and shifts are in a stage. In registers: the compiler would find
    // them again for each.
    const int shifts_at = S::kRounded && !S::kZeros ? offsets_at + row * 2 : S::kShiftsAt + row * shift_size;
    const bool arrives_here = S::kPairs ? lane <= paired : ptx::arrives(lane);
    int own[4] = {S::kWeightsAt + warpgroup * S::kTiles * kTileBytes + warp % 4 * (kAtomWords * 4) + lane * 16,
                  S::kScalesAt + row * scale_size, shifts_at, arrives_here};
    ptx::keep(own);
    const int own_words = own[0], own_scales = own[1], own_shifts = own[2];
    const bool releases = own[3] != 0;
    // Of a pair, lane 0 to the one and lane 1 to the other.
    const uint32_t empty_at = ptx::address_at_rank(empty, paired ? lane & 1 : of_cluster);
    const auto arrive = [&](int slot, bool arrives) {
      __syncwarp();
      if constexpr (S::kPairs) {
        ptx::barrier_arrive_at_if(empty_at + slot * static_cast<int>(sizeof(uint64_t)), arrives);
      } else {
        ptx::barrier_arrive_if(empty + slot, arrives);
      }
    };
    const auto release = [&](int slot) { arrive(slot, releases); };
    // Loads come some instructions before what they are for.
    const auto load_unit = [&](const uint8_t* data, int unit) {
      if (!kShared || unit % 2 == 0) {
        const uint4* from = reinterpret_cast<const uint4*>(data + own_words);
#pragma unroll
        for (int i = 0; i < (kShared ? 1 : S::kUnitSteps / kVectorSteps); ++i) {
          words[i] = from[(unit * S::kUnitSteps / kVectorSteps + i) * (kTileBytes / 16)];
        }
      }
      if constexpr (S::kRounded) {
        if (unit * S::kUnitSteps % kGroupSteps != 0) return;
#pragma unroll
        for (int i = 0; i < kUnitGroups; ++i) {
          const int group = unit * S::kUnitSteps / kGroupSteps + i;
          const int first = (S::kFlushes == 4 ? group * stage_groups / 4 : group) * S::kRows;
          load_pair(data + own_scales + first * scale_size, args.scale_dtype, group_scales[i]);
          if (!S::kZeros) {
            if (!S::kAnyScales) load_pair(data + own_shifts + first * 2, args.x_dtype, group_shifts[i]);
          } else if (shift_size == 1) {
            const uint8_t* from = data + own_shifts + first;
            group_shifts[i][0] = from[0], group_shifts[i][1] = from[8];
          } else {
            load_pair(data + own_shifts + first * 2, args.x_dtype, group_shifts[i]);
          }
        }
      } else if (has_zeros && (S::kFlushes > 1 || unit == 0)) {
        const uint8_t* from = data + own_shifts + unit * S::kRows;
        zero_bits[0] = from[0], zero_bits[1] = from[8];
      }
    };
    const auto set_affine = [&](const uint32_t (&scales_of)[2], const uint32_t (&shifts_of)[2]) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t scale = ptx::low_twice(scales_of[i]);
        if (S::kAnyScales && args.scale_dtype != args.x_dtype) {
          scale = Rounded::pair(from_bits(scales_of[i], args.scale_dtype));
        }
        // Where scales may be of another type there are no offsets.
        const bool is_scale = !S::kZeros && S::kAnyScales;
        const uint32_t shift = is_scale ? scale : ptx::low_twice(shifts_of[i]);
        affine[i] = Rounded::template affine_of_bits<(S::kFlushes == 4 && S::kTokens > 64)>(scale, shift, shift_factor);
      }
    };
    const auto convert_unit = [&](int unit) {
      uint32_t (&to)[S::kUnitSteps][4] = codes[unit % 2];
      if constexpr (S::kTable) {
#pragma unroll
        for (int step = 0; step < S::kUnitSteps; step += 2) {
          const uint4& both = words[kShared ? 0 : step / kVectorSteps];
          const bool second = (unit * S::kUnitSteps + step) / 2 % 2 == 1;
          look_up_half<S::Source::kPieces>(second ? both.z : both.x, second ? both.w : both.y, of_table, lane,
                                           to + step, seconds[unit % 2] + step);
        }
        return;
      }
      if constexpr (S::kRounded) {
        constexpr int kHalfSteps = kVectorSteps / 2;
#pragma unroll
        for (int step = 0; step < S::kUnitSteps; step += kHalfSteps) {
          const int first = unit * S::kUnitSteps + step;
          if (first % kGroupSteps == 0) set_affine(group_scales[step / kGroupSteps], group_shifts[step / kGroupSteps]);
          const uint4& both = words[kShared ? 0 : step / kVectorSteps];
          const bool second = first / kHalfSteps % 2 == 1;
          convert_half<X, S::kBits>(second ? both.z : both.x, second ? both.w : both.y, Factors<S::kZeros>{affine[0]},
                                    Factors<S::kZeros>{affine[1]}, to + step);
        }
        return;
      }
      if (has_zeros && grouped && (S::kFlushes > 1 || unit == 0)) {
#pragma unroll
        for (int i = 0; i < 2; ++i) zero[i] = C::minus_bytes(ptx::low_twice(zero_bits[i]));
      }
      if constexpr (kShared) {
        const uint4& both = words[0];
        convert_half<X, S::kBits>(unit % 2 == 0 ? both.x : both.z, unit % 2 == 0 ? both.y : both.w, zero[0], zero[1],
                                  to);
      } else {
#pragma unroll
        for (int step = 0; step < S::kUnitSteps; step += kVectorSteps) {
          convert<X, S::kBits>(words[step / kVectorSteps], zero[0], zero[1], to + step);
        }
      }
    };
    const auto multiply_unit = [&](uint64_t x, int unit, auto& product) {
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < S::kUnitSteps; ++i) {
        const int step = unit * S::kUnitSteps + i;
        const uint64_t operand_x = x + ((step / 4 * S::kHalfBytes + step % 4 * 32) >> 4);
        const bool accumulate = S::kRounded || i > 0 || (S::kFlushes == 1 && unit > 0);
        multiply_step<X, S::kColumns>(product, codes[unit % 2][i], operand_x, accumulate);
        if (kSeconds) multiply_step<X, S::kColumns>(product, seconds[unit % 2][kSeconds ? i : 0], operand_x, true);
      }
      ptx::wgmma_commit();
    };
    const auto load_factors = [&](const uint8_t* data, int group) {
      if (S::kMakesSums) return;
      load_pair(data + own_scales + group * S::kRows * scale_size, args.scale_dtype, scale_bits);
      if (S::kSums) load_pair(data + own_shifts + group * S::kRows * shift_size, args.shift_dtype, shift_bits);
    };
    const auto set_factors = [&](const uint8_t* data, int group) {
      if (!grouped && !S::kMakesSums) return;
      const float* floats = reinterpret_cast<const float*>(data + S::kFloatsAt) + group * S::kRows + row;
      const float* factors = reinterpret_cast<const float*>(data + S::kFactorsAt) + group * S::kRows + row;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (S::kMakesSums) {
          scale[i] = floats[8 * i];
          if (!S::kMultipliesSums) shift[i] = factors[8 * i];
        } else {
          const float stored = from_bits(scale_bits[i], args.scale_dtype);
          scale[i] = stored * unscale;
          if (S::kSums) shift[i] = shift_of(stored, from_bits(shift_bits[i], args.shift_dtype));
        }
      }
    };
    const auto add_sums = [&](const uint8_t* data, int group) {
      const float2* sums = reinterpret_cast<const float2*>(data + S::kSumsAt) + group * S::kTokens / 2 + t;
#pragma unroll
      for (int i = 0; i < S::kTokens / 8; ++i) {
        const float2 sum = sums[i * 4];
        acc[4 * i] = fmaf(shift[0], sum.x, acc[4 * i]);
        acc[4 * i + 1] = fmaf(shift[0], sum.y, acc[4 * i + 1]);
        acc[4 * i + 2] = fmaf(shift[1], sum.x, acc[4 * i + 2]);
        acc[4 * i + 3] = fmaf(shift[1], sum.y, acc[4 * i + 3]);
      }
    };
    const auto multiply_sums = [&](const uint8_t* data, int group) {
      const uint8_t* factors = data + S::kFactorsAt + (group * S::kRows + warpgroup * kTileN) * kPiecesBytes;
      const uint8_t* sums = data + S::kSumsAt + group * S::kTokens * kPiecesBytes;
      ptx::wgmma_fence();
      if constexpr (S::kMultipliesSums)
        ptx::WgmmaShared<S::kTokens>::bf16(part, ptx::wgmma_descriptor_unswizzled(factors, 0, 8 * kPiecesBytes),
                                           ptx::wgmma_descriptor_unswizzled(sums, 0, 8 * kPiecesBytes), true);
      ptx::wgmma_commit();
    };

    const tiles::ConsumerOf<S::kWarpgroups> me{warpgroup, warp % 4};
    // Evenly shared: sums of a CTA's part of a tile, as accumulators lie, and the word that says that they are there.
    const auto partial_of = [&](int share) {
      return params.partial + share * (S::kTokens * S::kRows / 4) + static_cast<int>(threadIdx.x);
    };
    const auto word_of = [&](int share) { return params.arrived + share * S::kWarpgroups + warpgroup; };

    ptx::named_sync<kOfAll, S::kThreads>();
    if (paired) ptx::cluster_wait();
    const uint8_t* data = stage_data();
    const auto multiply_stages = [&](const int stage_count, const bool all) {
      if (stage_count > 0) {
        wait_full();
        load_unit(data, 0);
        convert_unit(0);
      }
      if constexpr (S::kRounded) {
        // One unit is converted while the tensor cores work on the one before. Each instruction here holds those up,
        // and branches most.
        int done = 0;  // the slot of the stage before, which there is none of at first
        bool arrives = false;
        const uint64_t first_x = ptx::wgmma_descriptor(ring);
        const uint32_t high = first_x >> 32, low = static_cast<uint32_t>(first_x);
        const auto wait_half = [&](int unit) {
          if (S::kHalves && unit == S::kUnits / 2) ptx::barrier_wait(second + at.slot, at.phase);
        };
        constexpr int kLast = S::kUnits - 1;
        for (int left = stage_count; stage_count > 0;) {
          const uint64_t x = static_cast<uint64_t>(high) << 32 | (low + at.slot * (S::kStageBytes >> 4));
#pragma unroll
          for (int unit = 0; unit < kLast; ++unit) {
            load_unit(data, unit + 1);
            wait_half(unit);
            multiply_unit(x, unit, acc);
            ptx::wgmma_wait<1>();
            if (unit == 0) arrive(done, arrives);
            convert_unit(unit + 1);
          }
          wait_half(kLast);
          multiply_unit(x, kLast, acc);
          done = at.slot;
          arrives = releases;
          at.advance();
          data = stage_data();
          ptx::wgmma_wait<1>();
          if (--left == 0) break;
          wait_full();
          load_unit(data, 0);
          convert_unit(0);
        }
        ptx::wgmma_wait<0>();
        if (S::kEven && !all) release(at.before(1).slot);
      } else if constexpr (S::kTwoSums) {
        float parts[2][S::kColumns / 2] = {}, factors[2][2] = {};  // of two stages, in turns
        const auto add_part = [&](int turn) {
#pragma unroll
          for (int i = 0; i < S::kTokens / 2; ++i) {
            acc[i] = fmaf(factors[turn][i % 4 / 2], parts[turn][i] + parts[turn][i + S::kTokens / 2], acc[i]);
          }
        };
        const auto begin_part = [&](int turn) {
          load_unit(data, 1);
          load_factors(data, 0);
          multiply_unit(ptx::wgmma_descriptor(data), 0, parts[turn]);
          set_factors(data, 0);
          factors[turn][0] = scale[0], factors[turn][1] = scale[1];
          if (S::kSums) add_sums(data, 0);
          convert_unit(1);
        };
        const auto end_part = [&](int turn) {
          multiply_unit(ptx::wgmma_descriptor(data), 1, parts[turn]);
          at.advance();
          data = stage_data();
          ptx::wgmma_wait<1>();
        };
        for (int left = stage_count; left > 0; left -= 2) {
          const int first = at.slot;
          begin_part(0);
          end_part(0);
          if (left > 1) {
            wait_full();
            load_unit(data, 0);
            convert_unit(0);
            const int second = at.slot;
            begin_part(1);
            ptx::wgmma_wait<1>();
            release(first);
            add_part(0);
            end_part(1);
            if (left > 2) {
              wait_full();
              load_unit(data, 0);
              convert_unit(0);
            }
            ptx::wgmma_wait<0>();
            release(second);
            add_part(1);
          } else {
            ptx::wgmma_wait<0>();
            if (S::kEven && !all) release(first);
            add_part(0);
          }
        }
      } else {
        for (int left = stage_count; left > 0; --left) {
          const uint64_t x = ptx::wgmma_descriptor(data);
          const int slot = at.slot;
#pragma unroll
          for (int unit = 0; unit < S::kUnits; ++unit) {
            const bool last = unit + 1 == S::kUnits, flushes = S::kFlushes > 1 || last;
            const int group = S::kFlushes > 1 ? unit : 0;
            if (!last) load_unit(data, unit + 1);
            if (flushes) load_factors(data, group);
            multiply_unit(x, unit, part);
            if (S::kMakesSums && !S::kMultipliesSums && flushes && group == 0) {
              ptx::barrier_wait(summed + slot, at.phase);
            }
            if (flushes && !S::kMultipliesSums) {
              set_factors(data, group);
              if (S::kSums) add_sums(data, group);
            }
            if (unit > 0 && S::kFlushes == 1) ptx::wgmma_wait<1>();
            const uint8_t* const before = data;
            if (last) {
              if (S::kMultipliesSums && S::kFlushes == 1) ptx::barrier_wait(summed + slot, at.phase);
              at.advance();
              data = stage_data();
            } else if (S::kMultipliesSums && S::kFlushes > 1 && unit == 0) {
              ptx::barrier_wait(summed + slot, at.phase);
            }
            if (!last) {
              convert_unit(unit + 1);
            } else if (left > 1) {
              wait_full();
              load_unit(data, 0);
              convert_unit(0);
            }
            if (flushes) {
              if (S::kMultipliesSums) {
                multiply_sums(before, group);
                set_factors(before, group);
              }
              ptx::wgmma_wait<0>();
              if (last) release(slot);
#pragma unroll
              for (int i = 0; i < S::kTokens / 2; ++i) {
                float sum = part[i];
                if constexpr (S::kColumns == 2 * S::kTokens) sum += part[i + S::kTokens / 2];
                acc[i] = fmaf(scale[i % 4 / 2], sum, acc[i]);
              }
            }
          }
        }
      }
    };
    if constexpr (S::kEven) {
#pragma unroll 1
      for (bool handed = work.handed_stages > 0;; handed = false) {
        if (!S::kPlain) load_only(Tile<S>(params, work.tile - handed, false, 0).n0);
        multiply_stages(handed ? work.handed_stages : work.stages, !handed);
        if (!handed) break;
        const Work<S> ended = work_again();
        float4* const to = partial_of(ended.share);
        const int handed_blocks = Tile<S>(params, ended.tile - 1, false, 0).token_blocks();
#pragma unroll
        for (int i = 0; i < S::kTokens / 8; ++i) {
          if (i < handed_blocks) {
            to[i * (S::kRows * 2)] = {acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]};
          }
          acc[4 * i] = acc[4 * i + 1] = acc[4 * i + 2] = acc[4 * i + 3] = 0.f;
        }
        ptx::named_arrive<kHandsOver, kHandingThreads>();
        if (ended.stages == 0) return;
      }
    } else {
      load_only(tile.n0);
      multiply_stages(work.stages, true);
    }
    const Work<S> ended = work_again();
    const Tile<S> of(params, ended.tile, paired, of_cluster);
    const int m0 = of.m0, n0 = of.n0, tokens = of.tokens, token_blocks = of.token_blocks();
    if constexpr (S::kEven) {
      int left = static_cast<int>(params.tile_stages.divisor) - ended.stages;
#pragma unroll 1
      for (int other = ended.share + 1; left > 0; ++other) {
        left -= params.stages + (other < params.more_stages ? 1 : 0);
        uint64_t* const word = word_of(other);
        while (!ptx::handed_over(word)) {
        }
        me.sync();
        if (me.thread() == 0) *word = 0;
        add_partial<S>(partial_of(other), token_blocks, acc);
      }
    }

    // Every warpgroup is done with the ring, and every copy has landed: partial sums take its place, each rank's those
    // of the tokens that it finishes, as the accumulators of a warp lie.
    const Blocks blocks(params, cluster, rank, token_blocks);
    if (threadIdx.x == 0) ptx::barrier_expect(received, (cluster - 1) * blocks.mine * S::kRows * 8 * 4);
    const bool wide = stores_wide<S>(args), lines = wide || rounds_sums<S>(args);
    float bias[2] = {};
    if (lines && args.has_bias) me.load_bias(args, batch, n0 + warpgroup * kTileN, bias);
    int staged_at = 0;
    if (wide && cluster == 1) {
      if (paired) ptx::cluster_arrive();
    } else if (lines && cluster == 1) {
      // Whose results are those of all inputs does not wait for others' last products: it stages them in the last stage
      // but two, where there is room for two warpgroups, or in the one after that, as soon as all have read it.
      const int back = warpgroup < 2 ? 3 : 2;
      const RingPosition<S::kStages> read = at.before(back);
      if (ended.handed_stages + ended.stages >= back) ptx::barrier_wait(empty + read.slot, read.phase);
      staged_at = read.slot * S::kStageBytes + warpgroup % 2 * S::kResultBytes;
      if (paired) ptx::cluster_arrive();
    } else if (cluster > 1 || paired) {
      ptx::cluster_meet();
    } else {
      ptx::named_sync<kAllMultiply, S::kWarpgroups * 128>();
    }
    // Sums of at most `count` tokens, those that one of `ctas` CTAs finishes, leave: `rows` that there are. Rounded
    // they do by way of shared memory, in parts, so that the first leave while the next are rounded, or are staged
    // alone where rows may have any address. What is made here is made where it is used: what the others of a cluster
    // wait for does not wait for it.
    int rows = tokens;
    const int outputs = static_cast<int>(args.n), first_output = n0 + warpgroup * kTileN;
    const int64_t first = (batch * args.m + m0) * args.n;
    const auto places = [&](int ctas, int rank) {
      return [=](int i) { return ((me.stored_row() / 8 + 2 * i) * ctas + rank) * 8 + me.stored_row() % 8; };
    };
    const auto store = [&](const auto& sums, auto count, int ctas, int rank) {
      if (wide) {
        constexpr int kOfLane = (count.value + 31) / 32;
        const auto token_of = [&](int row) { return (row / 8 * ctas + rank) * 8 + row % 8; };
        // What undoes the powers of two of float32 activations: each lane's of every 32, all on their way at once.
        [[maybe_unused]] float powers[kOfLane];
        if constexpr (S::Source::kPieces > 1) {
          ptx::wait_for_last_kernel();  // which makes them
          const float* const from = params.powers + (args.x_batch_stride == 0 ? 0 : batch * args.m) + m0;
#pragma unroll
          for (int i = 0; i < kOfLane; ++i) powers[i] = from[min(token_of(32 * i + lane), tokens - 1)];
        }
        me.template store_wide<count.value>(
            sums, bias, outputs, static_cast<float*>(args.y) + first, first_output, rows, [&](int j, int c) {
              const int of_eight = t * 2 + c;
              tiles::Column column{(j * ctas + rank) * 8 + of_eight, kUnscale};
              if constexpr (S::Source::kPieces > 1) {
                column.factor = __shfl_sync(0xffffffffu, powers[j / 4], j % 4 * 8 + of_eight);
              }
              return column;
            });
      } else if constexpr (S::Source::kPieces == 1) {
        const auto pack = [&](int i) {
          const float of_output = bias[i % 4 / 2];
          return from_float2<X>(fmaf(sums[i], kUnscale, of_output), fmaf(sums[i + 1], kUnscale, of_output));
        };
        me.template store_placed<count.value, kStoredTokens, false, true, true>(
            outputs, static_cast<uint16_t*>(args.y) + first, first_output, rows,
            reinterpret_cast<float*>(ring + staged_at), pack, places(ctas, rank));
      }
    };
    if (lines && cluster == 1) {
      store(acc, std::integral_constant<int, S::kTokens>{}, 1, 0);
    } else {
      int owner = 0, at_block = rank * blocks.most;
      const bool alone = (S::Source::kWindows || !S::kShares) && cluster == 1;
      if (alone) {
        float4* const to = reinterpret_cast<float4*>(ring) + warp * 32 + lane;
#pragma unroll
        for (int i = 0; i < S::kTokens / 8; ++i) {
          to[i * S::kWarpgroups * 128] = {acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]};
        }
      }
#pragma unroll
      for (int i = 0; i < S::kTokens / 8; ++i) {
        if (alone || i >= token_blocks) break;
        uint8_t* const to = ring + ((at_block * S::kWarpgroups * 4 + warp) * 32 + lane) * 16;
        const float4 v = {acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]};
        if (owner != rank) {
          ptx::store_async_at_rank(to, v, received, owner);
        } else {
          *reinterpret_cast<float4*>(to) = v;
        }
        if (++owner == cluster) {
          owner = 0;
          ++at_block;
        }
      }
      ptx::warp_arrive(received, lane);
      if (S::kShares && lines) {
        ptx::barrier_wait(received, 0);
        const bool has_last = (blocks.mine - 1) * cluster + rank == token_blocks - 1;
        rows = blocks.mine * 8 - (has_last ? token_blocks * 8 - tokens : 0);
        staged_at = S::kStages * S::kStageBytes - (S::kWarpgroups - warpgroup) * S::kMostOfRank * kTileN * 2;
        float sums[S::kMostOfRank / 2];
        if (!add_up<S>(me, own_share(), ring, sums)) rows = 0;
        store(sums, std::integral_constant<int, S::kMostOfRank>{}, cluster, rank);
      }
    }
    if (S::Source::kPieces == 1 && lines && !wide && outputs % 8 != 0) {
      me.store_any(outputs, static_cast<uint16_t*>(args.y) + first, first_output, 0, rows,
                   reinterpret_cast<const uint4*>(ring + staged_at), places(cluster, rank));
    }
    if (lines) {
      if (paired) ptx::cluster_wait();
      __syncwarp();  // ptxas lets what follows write to registers of the whole warp (docs/performance.md, log 173)
    }
  }
  if (rounds_sums<S>(args) || stores_wide<S>(args) || (S::kEven && work_again().stages == 0)) return;
  ptx::barrier_wait(received, 0);
  if (S::Source::kPieces > 1) ptx::wait_for_last_kernel();  // whose powers of two this thread reads
  const Share own = own_share();
  if constexpr (S::Source::kPieces == 1 && !S::kSums) {
    if (args.y_dtype == args.x_dtype && args.n % 8 == 0 && own.team < 0) {
      finish_octets<S>(args, batch, own, ring);
      return;
    }
  }
  const auto factor_of = [&](int token) {
    if constexpr (S::Source::kPieces == 1) {
      return kUnscale;
    } else {
      return params.powers[(args.x_batch_stride == 0 ? 0 : batch * args.m) + own.m0 + token];
    }
  };
  uint32_t again = finish_quads<S>(Finish(args, batch), own, ring, factor_of);
  // Where an infinity or a NaN took part, the shares of the codes and of the shift do not add up to what a weight times
  // it is.
  for (; again != 0; again &= again - 1) {
    const Quad<S::kWarpgroups> at(own, threadIdx.x + (__ffs(again) - 1) * S::kThreads);
#pragma unroll 1
    for (int64_t n = at.n; n < min(at.n + int64_t{4}, args.n); ++n) {
      finish(args, batch, own.m0 + at.token, n, exact_sum<S::kTable>(args, batch, own.m0 + at.token, n, 0, args.k));
    }
  }
#else
  __trap();
#endif
}

// What launching a kernel has to know of its shape: one function launches all that have a source in common.
template <typename Source>
struct Kernel {
  void (*function)(typename Source::Params, Maps);
  int tokens, outputs, threads, ctas, shared_bytes, flushes;
  bool rounded, teams, evenly, pairs;
};
template <typename S>
constexpr Kernel<typename S::Source> kKernel = {warpgroup_matmul<S>,
                                                S::kTokens,
                                                S::kRows,
                                                S::kThreads,
                                                S::kCtas,
                                                kBarrierBytes + S::kStages * S::kStageBytes + S::kTableBytes,
                                                S::kFlushes,
                                                S::kRounded,
                                                S::kTeams,
                                                S::kEven,
                                                S::kPairs};

// Of so many stages of inputs.
template <typename Source>
cudaError_t launch_stages(const Kernel<Source>& kernel, typename Source::Params params, const Maps& maps, int stages,
                          const Config& config, cudaStream_t stream) {
  const MatmulArgs& args = params.args;
  const int token_tiles = static_cast<int>(ceil_div(args.m, kernel.tokens));
  const int64_t tiles = ceil_div(config.part.count(args.n), kernel.outputs) * token_tiles;
  int64_t ctas = tiles;
  int cluster = config.cluster, teams = config.teams, shares = cluster * teams;  // of a tile's stages
  if (kernel.evenly != (config.cluster == kEvenly)) return cudaErrorInvalidConfiguration;
  if (kernel.evenly) {
    const int places = config.multiprocessors * teams;
    ctas = even_ctas(tiles, stages, places);
    const int64_t at = even_at(args.scratch_bytes, places, kernel.tokens, kernel.outputs / kTileN);
    if (teams > kernel.ctas || ctas < tiles || args.batch > 1 || at < 0) return cudaErrorInvalidConfiguration;
    params.tile_stages = Divisor(stages);
    cluster = teams = 1, shares = static_cast<int>(ctas), stages *= static_cast<int>(tiles);
    params.partial = reinterpret_cast<float4*>(static_cast<uint8_t*>(args.scratch) + at);
    params.arrived = reinterpret_cast<uint64_t*>(params.partial + ctas * (kernel.tokens * kernel.outputs / 4));
  }
  params.token_tiles = Divisor(token_tiles);
  params.cluster = cluster;
  params.ranks = Divisor(cluster);
  params.stages = stages / shares;
  params.more_stages = stages % shares;
  params.teams = teams;
  if (teams > 1) {
    const int64_t bytes = team_bytes(tiles, cluster, kernel.tokens);
    if (!kernel.teams || cluster < 2 || args.batch > 1 || bytes > args.scratch_bytes) {
      return cudaErrorInvalidConfiguration;
    }
    params.partial = static_cast<float4*>(args.scratch);
    params.arrived =
        reinterpret_cast<uint64_t*>(params.partial + tiles * cluster * team_sums(kernel.tokens, kernel.outputs));
  }
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(ctas), static_cast<unsigned>(cluster),
                    static_cast<unsigned>(std::max<int64_t>(args.batch, teams)));
  shape.threads = kernel.threads;
  shape.cluster = params.paired ? 2 : cluster;
  shape.cluster_along_y = !params.paired;
  shape.shared_bytes = kernel.shared_bytes;
  shape.early = Source::kPieces > 1;
  if (kernel.ctas > 1 && shape.grid.x * shape.grid.y * shape.grid.z <= static_cast<unsigned>(config.multiprocessors)) {
    // The scheduler would put a cluster's CTAs together on few multiprocessors; too much shared memory for two keeps
    // them apart.
    shape.shared_bytes = std::max(shape.shared_bytes, kMultiprocessorBytes / 2);
  }
  return launch_kernel(kernel.function, shape, stream, params, maps);
}

template <typename Source>
cudaError_t launch_shape(const Kernel<Source>& kernel, typename Source::Params params, const Config& config,
                         cudaStream_t stream) {
  const MatmulArgs& args = params.args;
  MatmulArgs x = args;
  if (Source::kPieces > 1) {
    x.x = args.scratch;
    x.x_dtype = DType::kF16;
    x.batch = Source::kPieces * (args.x_batch_stride == 0 ? 1 : args.batch);
    x.x_batch_stride = args.m * args.k;
  }
  Maps maps;
  const int64_t row_tiles = ceil_div(config.part.count(args.n), kernel.outputs);
  const int64_t ctas = args.batch * row_tiles * ceil_div(args.m, kernel.tokens);
  params.paired =
      kernel.pairs && config.cluster == 1 && config.teams == 1 && pairs(ctas, row_tiles, config.multiprocessors);
  cudaError_t error = describe_blocks(args.m, kernel.tokens, &maps.x, &maps.last, [&](int tokens, CUtensorMap* map) {
    return describe_activations(x, params.paired ? (tokens + 15) / 16 * 8 : tokens, map);
  });
  if (error != cudaSuccess) return error;
  if (kernel.flushes > 1) {
    const auto describe = [&](const void* data, DType type, int64_t batch_stride, CUtensorMap* map) {
      const int64_t batch = batch_stride == 0 ? 1 : args.batch;
      const int rows = kernel.rounded ? params.stage_groups : kernel.flushes;
      return describe_rows(data, element_size(type), args.parameter_row, args.groups, batch, kernel.outputs, rows, map);
    };
    error = describe(args.scales, args.scale_dtype, args.scales_batch_stride, &maps.scales);
    if (error == cudaSuccess && args.shift_mode != ShiftMode::kNone && args.shift_mode != ShiftMode::kTable) {
      error = describe(args.shift, args.shift_dtype, args.shift_batch_stride, &maps.shifts);
    }
    if (error != cudaSuccess) return error;
  }
  return launch_stages(kernel, params, maps, static_cast<int>(ceil_div(args.k, kStageK)), config, stream);
}

template <typename X, int kBits, int kFlushes, Kind kKind>
cudaError_t launch_tokens(const Params& params, const Config& config, cudaStream_t stream) {
  const auto launch = [&](auto tokens, auto warpgroups) {
    constexpr bool kMayShare = kKind != Kind::kOther && kKind != Kind::kSums &&
                               shares_evenly(tokens.value, warpgroups.value, kBits, kFlushes > 1,
                                             kKind == Kind::kRoundedAndZeros, kKind == Kind::kTable, false);
    if constexpr (kMayShare) {
      using S = Shape<Rows, X, kBits, tokens.value, warpgroups.value, kFlushes, kKind, true>;
      if (config.cluster == kEvenly) return launch_shape(kKernel<S>, params, config, stream);
    }
    using S = Shape<Rows, X, kBits, tokens.value, warpgroups.value, kFlushes, kKind>;
    return launch_shape(kKernel<S>, params, config, stream);
  };
  using std::integral_constant;
  constexpr integral_constant<int, 1> one;
  constexpr integral_constant<int, 2> two;
  constexpr integral_constant<int, 3> three;
  constexpr integral_constant<int, 4> four;
  constexpr integral_constant<int, 16> t16;
  constexpr integral_constant<int, 32> t32;
  constexpr integral_constant<int, 48> t48;
  constexpr integral_constant<int, 64> t64;
  constexpr integral_constant<int, 72> t72;
  constexpr integral_constant<int, 80> t80;
  constexpr integral_constant<int, 96> t96;
  constexpr integral_constant<int, 104> t104;
  constexpr integral_constant<int, 112> t112;
  constexpr integral_constant<int, 120> t120;
  constexpr integral_constant<int, 128> t128;
  constexpr integral_constant<int, 136> t136;
  constexpr integral_constant<int, 144> t144;
  constexpr integral_constant<int, 152> t152;
  constexpr integral_constant<int, 160> t160;
  constexpr integral_constant<int, 176> t176;
  constexpr integral_constant<int, 184> t184;
  constexpr integral_constant<int, 192> t192;
  constexpr integral_constant<int, 200> t200;
  constexpr integral_constant<int, 216> t216;
  constexpr bool kRounded = kKind == Kind::kRounded || kKind == Kind::kRoundedAndZeros;
  if (config.cluster > 1 && !shares_inputs(config.warpgroups)) return cudaErrorInvalidConfiguration;
  if constexpr (kRounded) {
    if (config.warpgroups == 1 && config.tokens == 64) return launch(t64, one);
    if (config.warpgroups == 2 && config.tokens == 96) return launch(t96, two);
    if (config.warpgroups == 2 && config.tokens == 112) return launch(t112, two);
    if (config.warpgroups == 2 && config.tokens == 152) return launch(t152, two);
    if (config.warpgroups == 3 && config.tokens == 96) return launch(t96, three);
    if (config.warpgroups == 3 && config.tokens == 128) return launch(t128, three);
    if (config.warpgroups == 3 && config.tokens == 152) return launch(t152, three);
    if (config.warpgroups == 3 && config.tokens == 176) return launch(t176, three);
    if (config.warpgroups == 3 && config.tokens == 192) return launch(t192, three);
  }
  if constexpr (kRounded && (kBits == 4 || kFlushes == 1)) {
    if (config.warpgroups == 2 && config.tokens == 104) return launch(t104, two);
    if (config.warpgroups == 2 && config.tokens == 136) return launch(t136, two);
    if (config.warpgroups == 3 && config.tokens == 184) return launch(t184, three);
  }
  if constexpr (kRounded && (kBits == 4 || (kFlushes == 1 && kKind == Kind::kRounded))) {
    if (config.warpgroups == 3 && config.tokens == 120) return launch(t120, three);
  }
  if constexpr (kRounded && kBits == 4) {  // of eight bits three stages would fit or two, or weights bind
    if (config.warpgroups == 2 && config.tokens == 176) return launch(t176, two);
    if (config.warpgroups == 3 && config.tokens == 72) return launch(t72, three);
    if (config.warpgroups == 3 && config.tokens == 200) return launch(t200, three);
    if (config.warpgroups == 3 && config.tokens == 216) return launch(t216, three);
  }
  if constexpr (kKind == Kind::kRounded && kFlushes == 1 && kBits == 4) {
    if (config.warpgroups == 2 && config.tokens == 80) return launch(t80, two);
    if (config.warpgroups == 2 && config.tokens == 120) return launch(t120, two);
    if (config.warpgroups == 2 && config.tokens == 144) return launch(t144, two);
    if (config.warpgroups == 2 && config.tokens == 160) return launch(t160, two);
  }
  if constexpr (kKind == Kind::kPlain) {
    if constexpr (kFlushes == 1 && kBits == 4) {
      if (config.warpgroups == 4 && config.tokens == 32) return launch(t32, four);
      if (config.warpgroups == 4 && config.tokens == 64) return launch(t64, four);
      if (config.warpgroups == 3 && config.tokens == 64) return launch(t64, three);
      if (config.warpgroups == 2 && config.tokens == 48) return launch(t48, two);
    }
    if constexpr (kFlushes == 1) {
      if (config.warpgroups == 1 && config.tokens == 32) return launch(t32, one);
      if (config.warpgroups == 1 && config.tokens == 64) return launch(t64, one);
    }
  }
  if (config.warpgroups != 2) return cudaErrorInvalidConfiguration;
  if constexpr (kKind == Kind::kPlain || kRounded) {
    if (config.tokens == 16) return launch(t16, two);
  }
  constexpr bool kExact32 = kKind != Kind::kPlain || kBits == 8 || kFlushes < 4;
  if constexpr (kExact32) {
    if (config.tokens == 32) return launch(t32, two);
  }
  if constexpr (kKind != Kind::kPlain || kFlushes == 1) {
    if (config.tokens == 64) return launch(t64, two);
    if constexpr (kKind != Kind::kPlain && kKind != Kind::kTable) {
      if (config.tokens == 128) return launch(t128, two);
    }
  }
  return cudaErrorInvalidConfiguration;
}

template <typename X>
cudaError_t launch_typed(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  Params params{};
  params.args = args;
  params.first_output = config.part.first;
  params.log2_group_blocks = log2_group_blocks(args);
  const int log2 = params.log2_group_blocks;
  params.stage_groups = log2 == 0 ? 4 : log2 == 1 ? 2 : 1;
  const bool rounded = rounds(args, config.tokens), plain = rounded || is_plain(args);
  const bool zeros = args.shift_mode == ShiftMode::kZeros;
  const bool sums = has_float_shift(args), table = args.shift_mode == ShiftMode::kTable;
  if (plain && log2 < 0) params.log2_group_blocks = 30;  // every stage has the first group's
  const auto select_kind = [&](auto bits, auto flushes) {
    if constexpr (bits.value == 4) {
      if (table) return launch_tokens<X, 4, flushes.value, Kind::kTable>(params, config, stream);
    }
    return plain  ? launch_tokens<X, bits.value, flushes.value, Kind::kPlain>(params, config, stream)
           : sums ? launch_tokens<X, bits.value, flushes.value, Kind::kSums>(params, config, stream)
                  : launch_tokens<X, bits.value, flushes.value, Kind::kOther>(params, config, stream);
  };
  const auto select_rounded = [&](auto bits, auto flushes) {
    return zeros ? launch_tokens<X, bits.value, flushes.value, Kind::kRoundedAndZeros>(params, config, stream)
                 : launch_tokens<X, bits.value, flushes.value, Kind::kRounded>(params, config, stream);
  };
  const auto select_bits = [&](auto select, auto flushes) {
    return args.bits == 4 ? select(std::integral_constant<int, 4>{}, flushes)
                          : select(std::integral_constant<int, 8>{}, flushes);
  };
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  constexpr std::integral_constant<int, 4> four;
  if (rounded) return log2 == 0 || log2 == 1 ? select_bits(select_rounded, four) : select_bits(select_rounded, one);
  return log2 == 0   ? select_bits(select_kind, four)
         : log2 == 1 ? select_bits(select_kind, two)
                     : select_bits(select_kind, one);
}

}  // namespace wonly::warpgroup
