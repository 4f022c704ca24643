// Stages of matmul_transposed_warpgroup.cuh with weights as the register operand of wgmma, where scales are of dy's
// type, and so are offsets, or zeros are integers, if there are any.
//
// Two warps keep the ring full: one with dy, by the tensor copy engine, one with packed weights and scales, by bulk
// copies. Two more make of zeros or offsets what is added to codes or to weights. Rows of the register operand are
// inputs, while a lane's packed word holds codes of one output; movmatrix exchanges words as 8 x 8 matrices of their
// halves, after which the masks of convert.h, or a look-up of pairs in shared memory (pair_table.cuh), leave pairs of
// neighbouring outputs. Other instructions take longer beside wgmma, one to two cycles each, so their number counts,
// branches most; and what shared memory delivers to registers is close to all that it has left.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/either.cuh"
#include "cuda/element.cuh"
#include "cuda/pair_table.cuh"
#include "cuda/ring.cuh"
#include "cuda/transposed_items.cuh"
#include "cuda/wgmma.cuh"
#include "dequant/convert.h"
#include "layout.h"

namespace wonly::transposed_warpgroup {

// Codes to weights, pairs of neighbouring outputs: the code less its zero, which is exact, times the scale. For bf16 a
// masked code is the number code * 2^-133 (convert.h), and its weight is made in units of 2^-6: below 2^-120, not
// 2^-126, weights are subnormal.
template <typename X, int kBits>
struct PairConverter {
  static constexpr bool kBf16 = std::is_same_v<X, __nv_bfloat16>;
  static constexpr float kUnit = kBf16 ? 0x1p-6f : 1.f, kUnscale = 1.f / kUnit;  // of weights, and of the sums
  static constexpr uint32_t kNothing = 0x80008000u;                              // -0

  __device__ static uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    return kBf16 ? fma_bf16x2(a, b, c) : fma_f16x2(a, b, c);
  }
  // What makes of a masked code the code less `zero`, an integer up to 255. Of two codes: less the middle one, less
  // nothing, and the same of odd pairs of a four-bit word, which are 16 times as large.
  __device__ static float minus(float zero) { return kBf16 ? zero * -kUnit : -1024.f - zero; }
  static constexpr uint32_t kMinusMiddle = kBf16        ? (kBits == 4 ? 0xbe00be00u : 0xc000c000u)
                                           : kBits == 4 ? 0xe408e408u
                                                        : 0xe480e480u;
  static constexpr uint32_t kMinusNothing = kBf16 ? kNothing : 0xe400e400u;
  static constexpr uint32_t kMinusNothingOfOdd = kBf16 ? kNothing : 0xd400d400u;
  static constexpr uint32_t kMinusMiddleOfOdd = kBf16 ? kMinusMiddle : 0xd480d480u;
  __device__ static uint32_t of_odd(uint32_t minus) { return kBf16 ? minus : fma(minus, 0x3c003c00u, 0x63806380u); }
  // The codes of a word, less their zeros: nibbles i and i + 4, or bytes i and i + 2. `minus`: that of pair i.
  template <typename Minus>
  __device__ static void numbers(uint32_t word, uint32_t (&to)[16 / kBits], Minus&& minus) {
    constexpr uint32_t kUp = kBf16 ? 0x7f007f00u : 0x3c003c00u;     // 2^127, 1
    constexpr uint32_t kUpOdd = kBf16 ? 0x7d007d00u : 0x2c002c00u;  // a sixteenth of it
    if constexpr (kBf16 && kBits == 4) {
      uint4_to_subnormal(word, to);
    } else if constexpr (kBf16) {
      uint8_to_subnormal(word, to);
    } else if constexpr (kBits == 4) {
      uint4_above_1024(word, to);
    } else {
      uint8_above_1024(word, to);
    }
#pragma unroll
    for (int i = 0; i < 16 / kBits; ++i) {
      const bool odd = kBits == 4 && i % 2 == 1;
      to[i] = fma(to[i], odd ? kUpOdd : kUp, minus(i, odd));
    }
  }
};

// What a weight is, before its scale: a code less the middle one or less a zero, or a number of a table; or a code, and
// an offset is added to its product with the scale.
enum class RegisterCodes { kSymmetric, kZeros, kOffsets, kOfTable };

template <typename Source_, typename X_, int kBits_, int kTokens_, RegisterCodes kCodes = RegisterCodes::kSymmetric>
struct RegisterShape {
  using Source = Source_;
  using X = X_;
  static constexpr bool kInRegisters = true, kMovesRegisters = true, kFloat32 = false;
  static constexpr bool kTable = kCodes == RegisterCodes::kOfTable;
  static constexpr bool kZeros = kCodes == RegisterCodes::kZeros, kOffsets = kCodes == RegisterCodes::kOffsets;
  static constexpr bool kMakesShifts = kZeros || kOffsets;  // what is added to codes or to weights, for every stage
  static constexpr int kShiftSize = kZeros ? 1 : 2;         // zeros are of one byte
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
  // Of a group, of which a block has kMostGroups at most: scales, and what is made of zeros or offsets, which are
  // behind all of those first.
  static constexpr int kRowBytes = kOutputs * 2, kScaleBytes = (kMakesShifts ? 2 : 1) * kRowBytes;
  static constexpr int kMostGroups = kBlockK / 32, kShiftAt = kScalesAt + kMostGroups * kScaleBytes;
  static constexpr int kStageBytes = (kShiftAt + (kMakesShifts ? kMostGroups * kRowBytes : 0) + 1023) / 1024 * 1024;
  static constexpr int kStagingTokens = std::min(kTokens, Source::kStagingTokens / kTiles);
  static constexpr int kStagingBytes = kStagingTokens * kTiles * 128;  // of one warpgroup
  static constexpr int kMostStages = 12;
  static constexpr int kSourceAt = kMostSharedBytes - Source::kSharedBytes;
  static constexpr int kStagingAt = (kSourceAt - kConsumers * kStagingBytes) / 1024 * 1024;
  // Rows of the table as long as there is room for.
  static constexpr int kTableRowBytes = kTokens <= 64 ? kWideRowBytes : pair_row_bytes(1);
  static constexpr int kTableAt = kStagingAt - (kTable ? kTablePairs * kTableRowBytes : 0);
  static constexpr int kRingBytes = kTableAt - kBarrierBytes;
  static constexpr int kStages = std::min(kRingBytes / kStageBytes, kMostStages);
  static constexpr int kSharedBytes = kMostSharedBytes;
  // At a stage: who copies, and a warp that makes something of zeros or offsets.
  static constexpr int kArrivals = kMakesShifts ? 2 + ptx::kArrivals : 2;
  static_assert(kTableAt % 1024 == 0);
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
  const int rows_of_scales = groups_of_block<S>(params);
  if (cta.warp == S::kWarps && cta.lane == 0) ptx::prefetch_map(&cta.dy_map);
  RingPosition<S::kStages> at;
  return cta.for_each_item([&](const Item& item) {
    if (cta.warp == S::kWarps) {
      const int batch = args.x_batch_stride == 0 ? 0 : item.weights;
      for (int stage = item.begin; stage < item.end; ++stage, at.advance()) {
        ptx::barrier_wait(cta.empty + at.slot, at.phase ^ 1);
        if (!ptx::elect_one()) continue;
        cta.copy_dy(at.slot, stage * S::kOutputs, item.first, item.rows, batch, item.split);
      }
      return;
    }
    if (cta.warp > S::kWarps + 1) return;
    const int first_tile = item.k0 / tile_k(S::kBits);
    const int weight_bytes = max(0, min(S::kPackedTiles, k_tiles - first_tile)) * kTileBytes;
    const uint32_t next_run = k_tiles * kTileWords;
    const uint32_t* words = args.qw + item.weights * args.qw_batch_stride +
                            static_cast<uint64_t>(item.begin * S::kRuns) * next_run + first_tile * kTileWords;
    const int group = first_group(params, item.k0);
    // What lies in the place of groups behind the last meets inputs that nobody stores.
    [[maybe_unused]] const int rows = max(0, min(rows_of_scales, last_group - group + 1));
    const auto rows_at = [&](const void* parameters, int64_t stride, int size) {
      const int64_t of_group = static_cast<int64_t>(min(group, last_group)) * outputs;
      return static_cast<const uint8_t*>(parameters) + (item.weights * stride + of_group) * size;
    };
    [[maybe_unused]] const uint8_t* const scales = rows_at(args.scales, args.scales_batch_stride, 2);
    [[maybe_unused]] const uint8_t* shifts = nullptr;
    if constexpr (S::kMakesShifts) shifts = rows_at(args.shift, args.shift_batch_stride, S::kShiftSize);
    for (int stage = item.begin; stage < item.end; ++stage, words += S::kRuns * next_run, at.advance()) {
      ptx::barrier_wait(cta.empty + at.slot, at.phase ^ 1);
      if (!ptx::elect_one()) continue;
      uint64_t* const full = cta.full + at.slot;
      uint8_t* const to = cta.ring + at.slot * S::kStageBytes;
      const int n = stage * S::kOutputs, left = outputs - n, runs = S::kRuns == 1 || left <= kRunN ? 1 : 2;
      ptx::barrier_expect(full,
                          runs * weight_bytes + (S::kFloat32 ? rows_of_scales * S::kScaleBytes : rows * S::kRowBytes));
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
      } else {
        const auto copy_rows = [&](uint8_t* to_row, int next, const uint8_t* from, auto size_constant,
                                   uint64_t* barrier) {
          constexpr int kSize = decltype(size_constant)::value;
          const int64_t to_next_row = static_cast<int64_t>(outputs) * kSize;
          if (left >= S::kOutputs) {
            from += n * kSize;
#pragma unroll 1
            for (int row = 0; row < rows; ++row, to_row += next, from += to_next_row) {
              ptx::bulk_copy(to_row, from, S::kOutputs * kSize, barrier);
            }
            return;
          }
#pragma unroll 1
          for (int row = 0; row < rows; ++row, to_row += next, from += to_next_row) {
            ptx::bulk_copy(to_row, from + n * kSize, left * kSize, barrier);
            // Beyond the last output others of the group, which meet zeros of dy.
            for (int copied = left; copied < S::kOutputs;) {
              const int more = min(S::kOutputs - copied, outputs);
              ptx::bulk_copy(to_row + copied * kSize, from, more * kSize, barrier);
              copied += more;
            }
          }
        };
        copy_rows(to + S::kScalesAt, S::kScaleBytes, scales, std::integral_constant<int, 2>{}, full);
        if constexpr (S::kMakesShifts) {
          constexpr int kSize = S::kShiftSize;
          uint64_t* const landed = cta.landed + at.slot;
          ptx::barrier_expect(landed, rows * S::kOutputs * kSize);
          copy_rows(to + S::kShiftAt, S::kOutputs * kSize, shifts, std::integral_constant<int, kSize>{}, landed);
        }
      }
    }
  });
}

// Makes of the zeros of the ring's stages what is added to codes, or of its offsets what is to weights, in two warps;
// whether the last item was split. Each has every second slot, not every second stage: in a ring of an odd number of
// slots it would come to one in every second phase, and a wait does not tell a phase from the one before the last.
template <typename X, typename S>
__device__ __forceinline__ bool prepare_shifts(const Cta<S>& cta) {
  using C = PairConverter<X, S::kBits>;
  constexpr int kPairs = S::kOutputs / 2;  // of a row
  const int pairs = groups_of_block<S>(cta.params) * kPairs;
  RingPosition<S::kStages> at;
  return cta.for_each_item([&](const Item& item) {
    for (int stage = item.begin; stage < item.end; ++stage, at.advance()) {
      if (at.slot % 2 != cta.warp % 2) continue;
      uint8_t* const slot = cta.ring + at.slot * S::kStageBytes;
      ptx::barrier_wait(cta.landed + at.slot, at.phase);
#pragma unroll 2
      for (int i = cta.lane; i < pairs; i += 32) {
        const int row = i / kPairs, pair = i % kPairs;
        uint8_t* const to = slot + S::kScalesAt + row * S::kScaleBytes + S::kRowBytes;
        const uint8_t* const from = slot + S::kShiftAt + row * S::kOutputs * S::kShiftSize;
        float2 made;
        if constexpr (S::kZeros) {
          const uint16_t two = reinterpret_cast<const uint16_t*>(from)[pair];
          made = {C::minus(static_cast<float>(two & 0xffu)), C::minus(static_cast<float>(two >> 8))};
        } else {
          const float2 two = to_floats<X>(reinterpret_cast<const uint32_t*>(from)[pair]);
          made = {two.x * C::kUnit, two.y * C::kUnit};
        }
        reinterpret_cast<uint32_t*>(to)[pair] = from_float2<X>(made.x, made.y);
      }
      ptx::warp_arrive(cta.full + at.slot, cta.lane);
    }
  });
}

// Adds the products of an item's stages up, of its first kRows rows.
template <typename X, int kRows, typename S>
__device__ __forceinline__ void multiply_stages_in_registers(const Cta<S>& cta, const Item& item,
                                                             RingPosition<S::kStages>& at,
                                                             float (&acc)[S::kTiles][kRows / 2]) {
  using C = PairConverter<X, S::kBits>;
  using F = Fragments<S>;
  const F fragments(cta.warp);
  const int scales_at =
      S::kScalesAt + group_of_fragment(cta.params, cta.warp * S::kTiles) * S::kScaleBytes + cta.lane / 8 * 16;

  // In registers: the compiler would find them again for each stage.
  const bool here = ptx::arrives(cta.lane);
  const bool two = cta.params.partners == 2;
  int own[5] = {fragments.words_at(cta.lane), scales_at, here, here && two,
                two && !item.split ? cta.rank ^ 1 : cta.rank};
  ptx::keep(own);

  // What the weights of a stage, which has landed, are products of.
  uint32_t numbers[kAtomsPerTile][F::kMoved][F::kPairs], scales[2 * kAtomsPerTile];
  [[maybe_unused]] uint32_t shifts[2 * kAtomsPerTile];  // added to codes, or to weights
  [[maybe_unused]] const uint32_t table = ptx::shared_address(cta.ring) + S::kTableAt - kBarrierBytes;
  int stage_at = at.slot * S::kStageBytes;  // in the ring
  const auto advance = [&] {
    at.advance();
    stage_at = at.slot == 0 ? 0 : stage_at + S::kStageBytes;
  };
  const auto load = [&](int run) {
    const uint8_t* const from = cta.ring + stage_at;
    uint32_t words[kAtomsPerTile][F::kWords], moved[kAtomsPerTile][F::kMoved];
    F::load(from + own[0] + run * S::kRunWeightBytes, words);
    const uint32_t row = ptx::shared_address(from) + own[1] + run * kRunN * 2;
    load_row(row, scales);
    if constexpr (S::kMakesShifts) load_row(row + S::kRowBytes, shifts);
    fragments.move(words, moved);
#pragma unroll
    for (int atom = 0; atom < kAtomsPerTile; ++atom) {
#pragma unroll
      for (int i = 0; i < F::kMoved; ++i) {
        if constexpr (S::kTable) {
          uint32_t none[F::kPairs];
          look_up_pairs<1, S::kTableRowBytes>(moved[atom][i], table, cta.lane, numbers[atom][i], none);
        } else {
          C::numbers(moved[atom][i], numbers[atom][i], [&](int pair, bool odd) {
            if constexpr (S::kZeros) {
              const uint32_t minus = shifts[atom * 2 + F::half_of(i, pair)];
              return odd ? C::of_odd(minus) : minus;
            } else if constexpr (S::kOffsets) {
              return odd ? C::kMinusNothingOfOdd : C::kMinusNothing;
            } else {
              return odd ? C::kMinusMiddleOfOdd : C::kMinusMiddle;
            }
          });
        }
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
          const int half = F::half_of(word, pair), of = atom * 2 + half;
          to[i][F::tile_of(word, pair)][half * 2 + pair % 2] =
              C::fma(numbers[atom][word][pair], scales[of], S::kOffsets ? shifts[of] : C::kNothing);
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
