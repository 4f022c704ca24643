// Products of matmul_transposed_warpgroup.cuh with float32 dy; float zeros and offsets of experts alone.
//
// A kernel before (transposed_float32_operands.cuh) writes dy as two fp16 numbers each, in units of a power of two of
// the token, and scales as two in units of one of their group. The code less its zero is an exact fp16 number, and its
// product with a scale again two: the rounded one and what that lost. Of four bits and bf16 scales the rounded product
// is exact. A table's numbers are two of fp16, too, looked up in shared memory by pairs of codes. With float zeros or
// offsets a weight is the code less the middle one times a scale, and a number of the group's, two of fp16 as well,
// which is added to that product. Both numbers of a weight are register operands of wgmma, of which the larger is
// multiplied by both numbers of dy, and the smaller by the larger of dy: a term is exact to 2^-21 of itself (with a
// table 2^-20; with float zeros or offsets 2^-20 of the larger of what is added up), or 2^-39 of the largest dy of its
// token, 2^-32 of the largest scale of its group or a 64th of the largest number that is added, or 2^-31 of the table's
// largest number, times its other factors. Tensor cores cut off what they add, so sums of a few stages are added up
// apart.
#pragma once

#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/element.cuh"
#include "cuda/pair_table.cuh"
#include "cuda/ring.cuh"
#include "cuda/transposed_items.cuh"
#include "cuda/transposed_register_weights.cuh"
#include "cuda/wgmma.cuh"
#include "dequant/convert.h"
#include "layout.h"

namespace wonly::transposed_warpgroup {

// What codes are: numbers whose products with scales are exact in fp16, other numbers, those of a table, or numbers to
// whose products with scales others are added.
enum class Float32Codes { kExact, kNumbers, kOfTable, kShifted };
// Where the largest scale of a group, and the largest number of a table, are in their units: no product with 255, and
// none of both, is beyond fp16, nor is one with 128 and a number of up to 2^kShiftBeyond times that scale.
constexpr int kScaleTop = 7, kTableTop = 6, kShiftBeyond = 6;

// What `sum`, of both rounded, has lost, exactly: TwoSum (Knuth, The Art of Computer Programming, volume 2, 4.2.2).
__device__ __forceinline__ uint32_t lost_by_sum(uint32_t a, uint32_t b, uint32_t sum) {
  constexpr uint32_t kOne = 0x3c003c00u;
  const uint32_t of_b = sub_f16x2(sum, a);
  return fma_f16x2(sub_f16x2(a, sub_f16x2(sum, of_b)), kOne, sub_f16x2(b, of_b));
}

template <typename Source_, int kBits_, int kTokens_, Float32Codes kCodes>
struct Float32Shape {
  using Source = Source_;
  using X = __half;  // of the operands
  static constexpr bool kInRegisters = true, kMovesRegisters = true, kFloat32 = true, kMakesShifts = false;
  static constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
  static constexpr int kBits = kBits_;
  static constexpr int kTokens = kTokens_;
  static constexpr bool kExact = kCodes == Float32Codes::kExact, kTable = kCodes == Float32Codes::kOfTable;
  static constexpr bool kShifted = kCodes == Float32Codes::kShifted;
  static constexpr int kBlockK = 128, kTiles = 1;
  static constexpr int kConsumers = transposed_warpgroup::kConsumers, kWarps = kConsumers * 4;
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kColumns = kTokens, kParts = 1, kPieces = 2;
  static constexpr int kOutputs = kRunN, kRuns = 1;
  static constexpr int kDyAt = 0, kRunDyBytes = kTokens * kRunN * 2, kDyBytes = kPieces * kRunDyBytes;
  static constexpr int kPackedTiles = kBlockK / tile_k(kBits), kRunWeightBytes = kPackedTiles * kTileBytes;
  static constexpr int kWeightsAt = kDyBytes, kScalesAt = kWeightsAt + kRunWeightBytes;
  // Of a group, of which there are up to four in a block.
  static constexpr int kParameterRows = parameter_rows(kShifted);
  static constexpr int kRowBytes = kOutputs * 2, kScaleBytes = kParameterRows * kRowBytes, kMostGroups = kBlockK / 32;
  static constexpr int kStageBytes = (kScalesAt + kMostGroups * kScaleBytes + 1023) / 1024 * 1024;
  static constexpr int kStagingTokens = 16;
  static constexpr int kStagingBytes = kStagingTokens * kTiles * 128 * 2;  // of one warpgroup, in float32
  static constexpr int kMostStages = 8;
  static constexpr int kSourceAt = kMostSharedBytes - Source::kSharedBytes;
  static constexpr int kUndoAt = kSourceAt - kConsumers * kTokens * 4;
  static constexpr int kStagingAt = (kUndoAt - kConsumers * kStagingBytes) / 1024 * 1024;
  static constexpr int kTableAt = kStagingAt - (kTable ? pair_table_bytes(2) : 0);
  static constexpr int kRingBytes = kTableAt - kBarrierBytes;
  static constexpr int kStages = std::min(kRingBytes / kStageBytes, kMostStages);
  static constexpr int kSharedBytes = kMostSharedBytes;
  static constexpr float kUnscale = 1.f / (1 << kScaleTop);
  static constexpr int kArrivals = 2;  // at a stage: who copies
  static constexpr int kSummed = 4;    // stages whose sums the tensor cores add up
  static_assert(kTableAt % 1024 == 0);
  static_assert(kStages >= 3 && kSummed % 2 == 0);
};

// Adds the products of an item's stages up. `table`: the shared address of the numbers of pairs of codes, where these
// are of one.
template <typename S>
__device__ __forceinline__ void multiply_float32_stages(const Cta<S>& cta, const Item& item, uint32_t table,
                                                        RingPosition<S::kStages>& at, float (&acc)[1][S::kTokens / 2]) {
  using F = Fragments<S>;
  constexpr int kNumbers = S::kExact ? 1 : 2;  // of a weight
  const F fragments(cta.warp);
  const bool here = ptx::arrives(cta.lane), two = cta.params.partners == 2;
  int own[5] = {fragments.words_at(cta.lane),
                S::kScalesAt + group_of_fragment(cta.params, cta.warp) * S::kScaleBytes + cta.lane / 8 * 16, here,
                here && two, two && !item.split ? cta.rank ^ 1 : cta.rank};
  ptx::keep(own);
  const uint64_t first_dy = ptx::wgmma_descriptor(cta.ring + S::kDyAt);
  const uint32_t high = first_dy >> 32, low = static_cast<uint32_t>(first_dy);
  float part[S::kTokens / 2];
  uint32_t weights[2][kNumbers][kAtomsPerTile][4];

  // The weights of a stage, which has landed.
  const auto load = [&](uint32_t (&to)[kNumbers][kAtomsPerTile][4]) {
    const uint8_t* const from = cta.ring + at.slot * S::kStageBytes;
    const uint32_t row = ptx::shared_address(from) + own[1];
    uint32_t words[kAtomsPerTile][F::kWords], moved[kAtomsPerTile][F::kMoved];
    uint32_t scales[kNumbers][2 * kAtomsPerTile];
    [[maybe_unused]] uint32_t added[2][2 * kAtomsPerTile];  // to codes, or to their products
    F::load(from + own[0], words);
    if constexpr (!S::kTable) load_row(row + 2 * S::kRowBytes, added[0]);
    if constexpr (S::kShifted) load_row(row + 3 * S::kRowBytes, added[1]);
#pragma unroll
    for (int number = 0; number < kNumbers; ++number) load_row(row + number * S::kRowBytes, scales[number]);
    fragments.move(words, moved);
#pragma unroll
    for (int atom = 0; atom < kAtomsPerTile; ++atom) {
#pragma unroll
      for (int word = 0; word < F::kMoved; ++word) {
        uint32_t pairs[F::kPairs];
        [[maybe_unused]] uint32_t beyond[F::kPairs];
        if constexpr (S::kTable) {
          look_up_pairs<2>(moved[atom][word], table, cta.lane, pairs, beyond);
        } else if constexpr (S::kBits == 4) {
          uint4_above_1024(moved[atom][word], pairs);
        } else {
          uint8_above_1024(moved[atom][word], pairs);
        }
#pragma unroll
        for (int i = 0; i < F::kPairs; ++i) {
          constexpr uint32_t kOne = 0x3c003c00u, kSixteenth = 0x2c002c00u, k960 = 0x63806380u, kMinus = 0x80008000u;
          const int half = F::half_of(word, i), to_register = half * 2 + i % 2, of = atom * 2 + half;
          const bool sixteenth = S::kBits == 4 && i % 2 == 1;  // these are under 1024 sixteen times
          uint32_t code = pairs[i];
          if constexpr (S::kShifted) {
            constexpr uint32_t kMinusMiddle = S::kBits == 4 ? 0xe408e408u : 0xe480e480u;  // and 1024
            constexpr uint32_t kMinus72 = 0xd480d480u;
            code = sixteenth ? fma_f16x2(code, kSixteenth, kMinus72) : fma_f16x2(code, kOne, kMinusMiddle);
          } else if constexpr (!S::kTable) {
            code = sixteenth ? fma_f16x2(code, kSixteenth, fma_f16x2(added[0][of], kOne, k960))
                             : fma_f16x2(code, kOne, added[0][of]);
          }
          const uint32_t product = fma_f16x2(code, scales[0][of], kMinus);
          to[0][atom][to_register] = product;
          if constexpr (!S::kExact) {
            uint32_t lost = fma_f16x2(code, scales[0][of], product ^ kMinus);
            if constexpr (S::kShifted) {
              const uint32_t low = fma_f16x2(code, scales[1][of], added[1][of]);
              const uint32_t weight = fma_f16x2(product, kOne, added[0][of]);
              const uint32_t of_sum = lost_by_sum(product, added[0][of], weight);
              to[0][atom][to_register] = weight;
              to[1][atom][to_register] = fma_f16x2(of_sum, kOne, fma_f16x2(lost, kOne, low));
            } else {
              if constexpr (S::kTable) lost = fma_f16x2(beyond[i], scales[0][of], lost);
              to[1][atom][to_register] = fma_f16x2(code, scales[1][of], lost);
            }
          }
        }
      }
    }
  };
  const auto multiply = [&](const uint32_t (&with)[kNumbers][kAtomsPerTile][4], bool first) {
    const uint64_t dy = static_cast<uint64_t>(high) << 32 | (low + (at.slot * S::kStageBytes >> 4));
    ptx::wgmma_fence();
#pragma unroll
    for (int atom = 0; atom < kAtomsPerTile; ++atom) {
      const auto add = [&](int number, int piece, bool accumulate) {
        ptx::Wgmma<S::kTokens>::f16(part, with[number][atom], dy + (piece * S::kRunDyBytes + atom * 32 >> 4),
                                    accumulate);
      };
      add(0, 0, !first || atom > 0);
      add(0, 1, true);
      if constexpr (!S::kExact) add(1, 0, true);
    }
    ptx::wgmma_commit();
  };
  const auto release = [&](int slot) {
    __syncwarp();
    ptx::barrier_arrive_twice(cta.empty + slot, own[2] != 0, own[3] != 0, own[4]);
  };

#pragma unroll
  for (float& sum : acc[0]) sum = 0.f;
  const auto wait_full = [&] { ptx::barrier_wait(cta.full + at.slot, at.phase); };
  int left = item.end - item.begin;
  wait_full();
  load(weights[0]);
  do {
    int last = 0;
#pragma unroll
    for (int turn = 0; turn < S::kSummed; ++turn) {
      multiply(weights[turn % 2], turn == 0);
      ptx::wgmma_wait<1>();
      if (turn > 0) release(last);
      last = at.slot;
      at.advance();
      if (--left == 0) break;
      wait_full();
      load(weights[1 - turn % 2]);
    }
    ptx::wgmma_wait<0>();
    ptx::keep(part);
    release(last);
#pragma unroll
    for (int i = 0; i < S::kTokens / 2; ++i) acc[0][i] += part[i];
  } while (left > 0);
}

}  // namespace wonly::transposed_warpgroup
