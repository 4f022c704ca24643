// Stages of matmul_transposed_warpgroup.cuh with weights as the register operand of wgmma: symmetric codes, scales of
// dy's type, one for 128 inputs or more.
//
// Two warps keep the ring full: one with dy, by the tensor copy engine, one with packed weights and scales, by bulk
// copies. Rows of the register operand are inputs, while a lane's packed word holds codes of one output: movmatrix
// exchanges words as 8 x 8 matrices of their halves, after which the masks of convert.h leave pairs of neighbouring
// outputs. Other instructions take longer beside wgmma, about two cycles each, so their number counts, branches most.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/ring.cuh"
#include "cuda/transposed_items.cuh"
#include "cuda/wgmma.cuh"
#include "dequant/convert.h"
#include "layout.h"

namespace wonly::transposed_warpgroup {

// Codes to weights, pairs of neighbouring outputs: the code less its bias, which is exact, times the scale. For bf16 a
// masked code is the number code * 2^-133 (convert.h), and its weight is made in units of 2^-6: below 2^-120, not
// 2^-126, weights are subnormal.
template <typename X, int kBits>
struct PairConverter {
  static constexpr bool kBf16 = std::is_same_v<X, __nv_bfloat16>;
  static constexpr float kUnscale = kBf16 ? 0x1p+6f : 1.f;  // of the sums
  static constexpr uint32_t kNothing = 0x80008000u;         // -0

  __device__ static uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    return kBf16 ? fma_bf16x2(a, b, c) : fma_f16x2(a, b, c);
  }
  // The codes of a word, less their bias: nibbles i and i + 4, or bytes i and i + 2.
  __device__ static void numbers(uint32_t word, uint32_t (&to)[8 * 2 / kBits]) {
    if constexpr (kBf16) {
      constexpr uint32_t kUp = 0x7f007f00u, kUpOdd = 0x7d007d00u;  // 2^127, 2^123
      constexpr uint32_t kMinus = kBits == 4 ? 0xbe00be00u : 0xc000c000u;
      if constexpr (kBits == 4) {
        uint4_to_subnormal(word, to);
      } else {
        uint8_to_subnormal(word, to);
      }
#pragma unroll
      for (int i = 0; i < 16 / kBits; ++i) to[i] = fma(to[i], kBits == 4 && i % 2 == 1 ? kUpOdd : kUp, kMinus);
    } else if constexpr (kBits == 4) {
      int4_to_f16(word, to);
    } else {
      int8_to_f16<ByteOrder::kInterleaved>(word, to);
    }
  }
  __device__ static uint32_t times(uint32_t number, uint32_t scale) { return fma(number, scale, kNothing); }
};

template <typename Source_, typename X_, int kBits_, int kTokens_>
struct RegisterShape {
  using Source = Source_;
  using X = X_;
  static constexpr bool kInRegisters = true, kMovesRegisters = true, kFloat32 = false;
  static constexpr int kBits = kBits_;
  static constexpr int kTokens = kTokens_;
  // Four for few rows of experts, whose blocks end often.
  static constexpr int kConsumers = Source::kAnyRows && kTokens == 64 ? 4 : transposed_warpgroup::kConsumers;
  static constexpr int kWarps = kConsumers * 4;
  static constexpr int kBlockK = kConsumers == 4 ? kLowInputs : block_inputs(kTokens, true);
  static constexpr int kTiles = kBlockK / (kConsumers * 64);  // of 64 inputs, of a warpgroup
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kConsumerRegisters = kConsumers == 4 ? 112 : Source::kAnyRows ? 232 : 224;
  static constexpr int kProducerRegisters = kConsumers == 4 ? 32 : Source::kAnyRows ? 40 : 56;
  static constexpr int kColumns = kTokens, kParts = 1, kPieces = 1;
  // In which a stage is scaled and multiplied: several numbers of rows in one kernel leave fewer registers.
  static constexpr int kHalves = Source::kAnyRows && kTokens == 256 ? 2 : 1;
  static constexpr int kOutputs = stage_outputs(kTokens, true), kRuns = kOutputs / kRunN;
  static constexpr int kDyAt = 0, kRunDyBytes = kTokens * kRunN * 2, kDyBytes = kRuns * kRunDyBytes;
  static constexpr int kPackedTiles = kBlockK / tile_k(kBits), kRunWeightBytes = kPackedTiles * kTileBytes;
  static constexpr int kWeightsAt = kDyBytes, kScalesAt = kWeightsAt + kRuns * kRunWeightBytes;
  static constexpr int kScaleBytes = kOutputs * 2, kScaleRows = kBlockK / 128;
  static constexpr int kStageBytes = (kScalesAt + kScaleRows * kScaleBytes + 1023) / 1024 * 1024;
  static constexpr int kStagingTokens = std::min(kTokens, Source::kStagingTokens / kTiles);
  static constexpr int kStagingBytes = kStagingTokens * kTiles * 128;  // of one warpgroup
  static constexpr int kMostStages = 12;
  static constexpr int kSourceAt = kMostSharedBytes - Source::kSharedBytes;
  static constexpr int kStagingAt = (kSourceAt - kConsumers * kStagingBytes) / 1024 * 1024;
  static constexpr int kRingBytes = kStagingAt - kBarrierBytes;
  static constexpr int kStages = std::min(kRingBytes / kStageBytes, kMostStages);
  static constexpr int kSharedBytes = kMostSharedBytes;
  static constexpr float kUnscale = PairConverter<X, kBits>::kUnscale;
  static constexpr int kArrivals = 2;  // at a stage: who copies
  static_assert(kStages >= 3);
};

// A fragment is 16 inputs of an atom, and a warp has one of each of its warpgroup's tiles, which follow each other. Of
// a lane's 16 bytes of an atom it needs kWords words, and where that is half of the codes of two words, they become
// one.
template <typename S>
struct Fragments {
  static constexpr int kOfVector = S::kBits == 4 ? 4 : 2;  // fragments that 16 bytes of a lane are
  static constexpr bool kMerged = S::kTiles < kOfVector / 2;
  static constexpr int kWords = std::max(2, 4 * S::kTiles / kOfVector), kMoved = kMerged ? 1 : kWords;
  static constexpr int kPairs = 16 / S::kBits;  // of a word

  int first;  // of the block
  uint32_t selector;

  __device__ explicit Fragments(int warp) : first(warp * S::kTiles), selector(first % 2 == 0 ? 0x6240u : 0x7351u) {}

  // Where the words of this lane are in a stage, those of the first atom.
  __device__ int words_at(int lane) const {
    return S::kWeightsAt + first / kOfVector * kTileBytes + first % kOfVector * 4 / kOfVector / kWords * kWords * 4 +
           lane * 16;
  }
  __device__ static void load(const uint8_t* from, uint32_t (&words)[kAtomsPerTile][kWords]) {
#pragma unroll
    for (int atom = 0; atom < kAtomsPerTile; ++atom) {
      const uint8_t* const of_atom = from + atom * kAtomWords * 4;
      if constexpr (kWords == 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(of_atom);
        words[atom][0] = four.x, words[atom][1] = four.y, words[atom][2] = four.z, words[atom][3] = four.w;
      } else {
        const uint2 two = *reinterpret_cast<const uint2*>(of_atom);
        words[atom][0] = two.x, words[atom][1] = two.y;
      }
    }
  }
  // Pairs along the outputs instead of along the inputs.
  __device__ void move(const uint32_t (&words)[kAtomsPerTile][kWords], uint32_t (&moved)[kAtomsPerTile][kMoved]) const {
#pragma unroll
    for (int atom = 0; atom < kAtomsPerTile; ++atom) {
#pragma unroll
      for (int i = 0; i < kMoved; ++i) {
        moved[atom][i] =
            ptx::transpose_here(kMerged ? byte_permute(words[atom][0], words[atom][1], selector) : words[atom][i]);
      }
    }
  }
  // Pair i of a moved word is register half * 2 + i % 2 of a fragment: inputs 8 (i % 2) .. and outputs 8 half .. .
  __device__ static constexpr int half_of(int word, int i) { return kMerged ? i / 2 : word % 2; }
  __device__ static constexpr int tile_of(int word, int i) { return kMerged ? 0 : word / 2 * (kPairs / 2) + i / 2; }
};

// Eight outputs' numbers in a row of 16 bits each, for two atoms: those of a register of a fragment are in
// to[atom * 2 + half]. `row`: that of the first output and lane / 8 * 16.
__device__ __forceinline__ void load_row(uint32_t row, uint32_t (&to)[2 * kAtomsPerTile]) {
#pragma unroll
  for (int two = 0; two < kAtomsPerTile; two += 2) {
    uint32_t of_two[4];
    ptx::load_matrices(of_two, row + two * kAtomN * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[two * 2 + i] = of_two[i];
  }
}

// Fills the ring; whether the last item was split.
template <typename S>
__device__ __forceinline__ bool copy_stages(const Cta<S>& cta) {
  const auto& params = cta.params;
  const MatmulArgs& args = params.args;
  // In 32 bits: the first copies wait for this.
  const int k_tiles = (static_cast<int>(args.k) + tile_k(S::kBits) - 1) / tile_k(S::kBits);
  const int outputs = static_cast<int>(args.n), last_group = static_cast<int>(args.groups) - 1;
  const bool two_rows = S::kScaleRows == 2 && params.log2_group_blocks == 2;
  int rows_of_scales = two_rows ? 2 : 1;
  if (S::kFloat32 && params.log2_group_blocks >= 0) rows_of_scales = max(1, 4 >> params.log2_group_blocks);
  bool last_split = false;
  if (cta.warp == S::kWarps && cta.lane == 0) ptx::prefetch_map(&cta.dy_map);
  cta.wait_for_barriers();
  RingPosition<S::kStages> at;
  for (int index = cta.first_item; index < cta.source.items(); index += params.clusters) {
    const Item item = cta.source.item(index, cta.rank);
    if (item.weights < 0) continue;  // nobody waits for it
    last_split = item.split;
    if (cta.warp == S::kWarps) {
      const int batch = args.x_batch_stride == 0 ? 0 : item.weights;
      for (int stage = item.begin; stage < item.end; ++stage, at.advance()) {
        ptx::barrier_wait(cta.empty + at.slot, at.phase ^ 1);
        if (!ptx::elect_one()) continue;
        cta.copy_dy(at.slot, stage * S::kOutputs, item.first, item.rows, batch, item.split);
      }
      continue;
    }
    if (cta.warp > S::kWarps + 1) continue;
    const int first_tile = item.k0 / tile_k(S::kBits);
    const int weight_bytes = max(0, min(S::kPackedTiles, k_tiles - first_tile)) * kTileBytes;
    const uint32_t next_run = k_tiles * kTileWords;
    const uint32_t* words = args.qw + item.weights * args.qw_batch_stride +
                            static_cast<uint64_t>(item.begin * S::kRuns) * next_run + first_tile * kTileWords;
    const int group = first_group(params, item.k0);
    const auto row_of = [&](int group) {
      return static_cast<const uint16_t*>(args.scales) + item.weights * args.scales_batch_stride +
             static_cast<uint64_t>(static_cast<uint32_t>(min(group, last_group))) * static_cast<uint32_t>(outputs);
    };
    const uint16_t *const scales = row_of(group), *const more_scales = row_of(group + 1);
    for (int stage = item.begin; stage < item.end; ++stage, words += S::kRuns * next_run, at.advance()) {
      ptx::barrier_wait(cta.empty + at.slot, at.phase ^ 1);
      if (!ptx::elect_one()) continue;
      uint64_t* const full = cta.full + at.slot;
      uint8_t* const to = cta.ring + at.slot * S::kStageBytes;
      const int n = stage * S::kOutputs, left = outputs - n, runs = S::kRuns == 1 || left <= kRunN ? 1 : 2;
      ptx::barrier_expect(full, runs * weight_bytes + rows_of_scales * S::kScaleBytes);
#pragma unroll
      for (int run = 0; run < S::kRuns; ++run) {
        if (run >= runs || weight_bytes == 0) break;  // codes of any kind meet zeros of dy
        ptx::bulk_copy(to + S::kWeightsAt + run * S::kRunWeightBytes, words + run * next_run, weight_bytes, full);
      }
      if constexpr (S::kFloat32) {
        const Float32Params& own = params.float32;
        for (int row = 0; row < rows_of_scales; ++row) {
          const int64_t at_group = item.weights * own.batch_stride + min(group + row, last_group);
          ptx::bulk_copy(to + S::kScalesAt + row * S::kScaleBytes,
                         own.parameters + (at_group * own.stages + stage) * (S::kParameterRows * S::kOutputs),
                         S::kScaleBytes, full);
        }
        continue;
      }
      const auto copy_scales = [&](uint8_t* row, const uint16_t* from) {
        const int count = min(S::kOutputs, left);
        ptx::bulk_copy(row, from + n, count * 2, full);
        // Beyond the last output others of the group, which meet zeros of dy.
        for (int copied = count; copied < S::kOutputs;) {
          const int more = min(S::kOutputs - copied, outputs);
          ptx::bulk_copy(row + copied * 2, from, more * 2, full);
          copied += more;
        }
      };
      copy_scales(to + S::kScalesAt, scales);
      if (two_rows) copy_scales(to + S::kScalesAt + S::kScaleBytes, more_scales);
    }
  }
  return last_split;
}

// Adds the products of an item's stages up, of its first kRows rows.
template <int kRows, typename S>
__device__ __forceinline__ void multiply_stages_in_registers(const Cta<S>& cta, const Item& item,
                                                             RingPosition<S::kStages>& at,
                                                             float (&acc)[S::kTiles][kRows / 2]) {
  using C = PairConverter<typename S::X, S::kBits>;
  using F = Fragments<S>;
  const F fragments(cta.warp);
  const int scale_row = cta.params.log2_group_blocks == 2 ? cta.warp * S::kTiles / 8 : 0;
  const int scales_at = S::kScalesAt + scale_row * S::kScaleBytes + cta.lane / 8 * 16;

  // In registers: the compiler would find them again for each stage.
  const bool here = ptx::arrives(cta.lane);
  const bool two = cta.params.partners == 2;
  int own[5] = {fragments.words_at(cta.lane), scales_at, here, here && two,
                two && !item.split ? cta.rank ^ 1 : cta.rank};
  ptx::keep(own);

  // What the weights of a stage, which has landed, are products of.
  uint32_t numbers[kAtomsPerTile][F::kMoved][F::kPairs], scales[2 * kAtomsPerTile];
  int stage_at = at.slot * S::kStageBytes;  // in the ring
  const auto advance = [&] {
    at.advance();
    stage_at = at.slot == 0 ? 0 : stage_at + S::kStageBytes;
  };
  const auto load = [&](int run) {
    const uint8_t* const from = cta.ring + stage_at;
    uint32_t words[kAtomsPerTile][F::kWords], moved[kAtomsPerTile][F::kMoved];
    F::load(from + own[0] + run * S::kRunWeightBytes, words);
    load_row(ptx::shared_address(from) + own[1] + run * kRunN * 2, scales);
    fragments.move(words, moved);
#pragma unroll
    for (int atom = 0; atom < kAtomsPerTile; ++atom) {
#pragma unroll
      for (int i = 0; i < F::kMoved; ++i) {
        C::numbers(moved[atom][i], numbers[atom][i]);
        ptx::keep(numbers[atom][i]);  // made here, not where they are used
      }
    }
  };
  // Of all atoms, or of some from one on.
  const auto scale = [&](auto& to, int first_atom = 0) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(std::extent_v<std::remove_reference_t<decltype(to)>>); ++i) {
      const int atom = first_atom + i;
#pragma unroll
      for (int word = 0; word < F::kMoved; ++word) {
#pragma unroll
        for (int pair = 0; pair < F::kPairs; ++pair) {
          const int half = F::half_of(word, pair);
          to[i][F::tile_of(word, pair)][half * 2 + pair % 2] =
              C::times(numbers[atom][word][pair], scales[atom * 2 + half]);
        }
      }
    }
  };
  const uint64_t first_dy = ptx::wgmma_descriptor(cta.ring + S::kDyAt);
  const uint32_t high = first_dy >> 32, low = static_cast<uint32_t>(first_dy);
  const auto multiply = [&](const auto& with, int run, bool first, int first_atom = 0) {
    const uint64_t dy = static_cast<uint64_t>(high) << 32 | (low + (stage_at >> 4) + (run * S::kRunDyBytes >> 4));
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < static_cast<int>(std::extent_v<std::remove_reference_t<decltype(with)>>); ++i) {
      const int atom = first_atom + i, accumulate = !first || atom > 0;
#pragma unroll
      for (int tile = 0; tile < S::kTiles; ++tile) {
        if constexpr (C::kBf16) {
          ptx::Wgmma<kRows>::bf16(acc[tile], with[i][tile], dy + (atom * 32 >> 4), accumulate);
        } else {
          ptx::Wgmma<kRows>::f16(acc[tile], with[i][tile], dy + (atom * 32 >> 4), accumulate);
        }
      }
    }
    ptx::wgmma_commit();
  };

  // Once the registers of the weights before the last may be written nothing is left to do but to scale, as the tensor
  // cores may be waiting already: all else happens while products run.
  uint32_t weights[2][kAtomsPerTile / S::kHalves][S::kTiles][4];
  const auto release = [&](uint64_t* barrier, bool filled) {
    __syncwarp();
    ptx::barrier_arrive_twice(barrier, filled && own[2], filled && own[3], own[4]);
  };
  const auto wait_full = [&] { ptx::barrier_wait(cta.full + at.slot, at.phase); };
  wait_full();
  load(0);
  int stage = item.begin;
  if constexpr (S::kRuns == 2) {
    int left = min(item.end * 2, static_cast<int>(ceil_div(cta.params.args.n, kRunN))) - stage * 2;  // runs
    uint64_t* done = cta.empty;  // of the stage before
#pragma unroll 1
    for (bool first = true;; first = false) {
      scale(weights[0]);
      multiply(weights[0], 0, first);
      // Where there is no second run, any weights meet zeros. What is behind no branch ptxas moves to after the wait
      // for products.
      if (left > 1) load(1);
      ptx::wgmma_wait<1>();
      scale(weights[1]);
      multiply(weights[1], 1, false);
      release(done, !first);
      done = cta.empty + at.slot;
      advance();
      left -= 2;
      if (left > 0) {
        wait_full();
        load(0);
      }
      ptx::wgmma_wait<1>();
      if (left <= 0) break;
    }
    ptx::wgmma_wait<0>();
    release(done, true);
  } else if constexpr (S::kHalves == 2) {
    constexpr int kSecond = kAtomsPerTile / 2;
    int left = item.end - item.begin;
    uint64_t* done = cta.empty;  // of the stage before
#pragma unroll 1
    for (bool first = true;; first = false) {
      scale(weights[0]);
      multiply(weights[0], 0, first);
      ptx::wgmma_wait<1>();
      release(done, !first);
      scale(weights[1], kSecond);
      multiply(weights[1], 0, false, kSecond);
      done = cta.empty + at.slot;
      advance();
      if (--left == 0) break;
      wait_full();
      load(0);
      ptx::wgmma_wait<1>();
    }
    ptx::wgmma_wait<0>();
    release(done, true);
  } else {
    int done = at.slot < 2 ? at.slot + S::kStages - 2 : at.slot - 2;  // the slot of the stage before the last
    const auto release_next = [&](bool filled) {
      release(cta.empty + done, filled);
      if (++done == S::kStages) done = 0;
    };
    const auto next = [&](uint32_t (&of_stage)[kAtomsPerTile][S::kTiles][4]) {
      scale(of_stage);
      multiply(of_stage, 0, stage == item.begin);
      release_next(stage >= item.begin + 2);
      advance();
      if (stage + 1 < item.end) {
        wait_full();
        load(0);
      }
      ptx::wgmma_wait<1>();
      return ++stage < item.end;
    };
#pragma unroll 1
    while (next(weights[0]) && next(weights[1])) {
    }
    ptx::wgmma_wait<0>();
    release_next(item.end - item.begin >= 2);
    release_next(true);
  }
}

}  // namespace wonly::transposed_warpgroup
