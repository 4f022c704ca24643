// dx = dy @ W^T for many tokens on Hopper: weights are dequantized a stage at a time into shared memory, where wgmma
// finds both of its operands.
//
// A CTA computes blocks of 128 inputs x kTokens tokens, one after the other. A stage is 64 outputs: dy by the tensor
// copy engine, of which the CTAs of a cluster may bring each other their share, and the weights, which producer warps
// load packed, convert in registers and store transposed (stmatrix) in the order that wgmma wants: rows of inputs,
// summed over outputs. Two warpgroups multiply, 64 inputs each.
//
// Blocks that do not fill the chip are split: the CTAs of a cluster share the outputs of one block, copy their sums
// into each other's shared memory, and add them in the order of their ranks.
//
// A weight is rounded once to the type of dy, as a dense one would be: the code less the integer part of its zero is
// exact, and one multiplication by the scale rounds. Scales of another type are two numbers of dy's type, and what is
// left of the zero, or the offset, enters rounded. Nothing else is rounded before the float32 sum, whose order depends
// on N and on the size of the cluster that splits it alone: a token's result does not depend on the other tokens.
//
// Which rows and weights make a block is the business of a `Source`:
//   struct Params                 what the host gives it
//   kSharedBytes                  of its own shared memory, which begins at `shared`
//   kStagingTokens                rows that a warpgroup writes out at a time, at most
//   kBulkStores                   whether rows of a block follow each other in the result
//   Source(params, args, shared)  all threads of the CTA
//   int items()                   what the clusters walk over
//   Item item(i, rank)            one warp
//   int64_t row(item, i)          where row i of a block is in the result
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/division.h"
#include "cuda/element.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_transposed.h"
#include "cuda/tensor_map.h"
#include "cuda/wgmma.cuh"
#include "dequant/convert.h"
#include "layout.h"

namespace wonly::transposed_warpgroup {

constexpr int kConsumers = 2;  // warpgroups
constexpr int kBarrierBytes = 1024;
constexpr int kWeightBytes = kBlockK * kStageN * 2;
constexpr int kRunOfTokens = 8;  // blocks of tokens that run beside each other with the same weights
constexpr int kWarps = kConsumers * 4;
constexpr int kRunBytes = kWarps * 32 * 16;  // sums of a CTA's block for eight tokens

// What a cluster works on: a block for every CTA, or one for all of them, of which each has some stages.
struct Item {
  int weights;      // batch entry or expert; negative: rows whose result is zero
  int first, rows;  // of dy
  int k0;
  int begin, end;  // stages
  bool split;
};

template <typename Source_, typename X_, int kBits_, int kTokens_, int kGroups_>
struct Shape {
  using Source = Source_;
  using X = X_;
  static constexpr int kBits = kBits_;
  static constexpr int kTokens = kTokens_;
  static constexpr int kGroups = kGroups_;  // rows of scales of a block: 1, or 4 where groups are of 32 or 64 inputs
  // Warpgroups that convert, in turns: as many as leave registers for the accumulators.
  static constexpr int kProducers = kTokens < 256 && kBits == 4 && kGroups == 1 ? 3 : 2;
  static constexpr int kThreads = (kConsumers + kProducers) * 128;
  // The accumulators of 256 tokens take registers from the producers.
  static constexpr bool kMovesRegisters = kTokens == 256 || kProducers == 3;
  static constexpr int kConsumerRegisters = kTokens == 256 ? 160 : 120, kProducerRegisters = kTokens == 256 ? 96 : 80;
  static constexpr int kAhead = kTokens == 256 && kGroups == 4 ? 1 : 2;  // stages that a producer loads ahead
  static constexpr int kColumns = kTokens == 256 ? 128 : kTokens, kParts = kTokens / kColumns;
  static constexpr int kTiles = kBlockK / tile_k(kBits);
  static constexpr int kDyBytes = kTokens * kStageN * 2;
  static constexpr int kStageBytes = kWeightBytes + kDyBytes;
  static constexpr int kStages = kTokens == 256 ? 4 : kTokens == 128 ? 6 : 8;
  static constexpr int kStagingTokens = kTokens < Source::kStagingTokens ? kTokens : Source::kStagingTokens;
  static constexpr int kStagingBytes = kStagingTokens * (kBlockK / kConsumers) * 2;  // of one warpgroup
  static constexpr int kStagingAt = kBarrierBytes + kStages * kStageBytes;
  static constexpr int kSourceAt = kStagingAt + kConsumers * kStagingBytes;
  static constexpr int kSharedBytes = kSourceAt + Source::kSharedBytes;
  static_assert(kSharedBytes <= 227 << 10 && kStages >= 2 * kProducers);
};

template <typename Source>
struct Params {
  MatmulArgs args;
  typename Source::Params source;
  int cluster, clusters;  // CTAs of a cluster, and clusters
  int partners;           // CTAs of a cluster that bring each other dy, 1 or 2, where its item is not split
  int log2_group_blocks;  // group size = 32 << this; -1: one scale per output
  bool simple;            // a weight is (code - integer) * scale with a scale of dy's type
  bool wide_result;       // float32
  bool rows_of_16_bytes;  // of a 16-bit result
};

// Blocks of tokens that follow each other. The first `whole` items are a block for each partner; the rest are split.
struct Consecutive {
  struct Params {
    int token_blocks, groups;  // groups: of partners, along the inputs
    int whole, items;
    int partners, tokens;
    int stages, stages_each, stages_more;  // of a split item: of each rank, and how many have one more
    Divisor of_batch, of_run;              // blocks of tokens and groups, all and those of a run
    Divisor run, last_run;                 // blocks of tokens of a run, and of the last one
  };
  static constexpr int kSharedBytes = 0;
  static constexpr int kStagingTokens = 128;
  static constexpr bool kBulkStores = true;

  const Params& params;
  int64_t m;

  __device__ Consecutive(const Params& params, const MatmulArgs& args, uint8_t*) : params(params), m(args.m) {}

  __device__ int items() const { return params.items; }

  __device__ Item item(int index, int rank) const {
    Item item{};
    item.split = index >= params.whole;
    const int rest = index - params.whole;
    const bool two = params.partners == 2;
    const int group = item.split ? params.whole + (two ? rest >> 1 : rest) : index;
    const int partner = !item.split ? rank : two ? rest & 1 : 0;
    int within, in_run, of_run;
    item.weights = params.of_batch.divide(group, &within);
    const int run = params.of_run.divide(within, &in_run);
    const bool last = run * kRunOfTokens + kRunOfTokens > params.token_blocks;
    const int k_group = (last ? params.last_run : params.run).divide(in_run, &of_run);
    item.first = (run * kRunOfTokens + of_run) * params.tokens;
    item.rows = static_cast<int>(min(m - item.first, static_cast<int64_t>(params.tokens)));
    item.k0 = (k_group * params.partners + partner) * kBlockK;
    item.begin = item.split ? params.stages_each * rank + min(rank, params.stages_more) : 0;
    item.end = item.split ? item.begin + params.stages_each + (rank < params.stages_more) : params.stages;
    return item;
  }

  __device__ int64_t row(const Item& item, int i) const { return item.weights * m + item.first + i; }
};

// Pairs of codes to pairs of (code - zero), and those to weights.
template <typename X>
struct Arithmetic {
  static constexpr bool kBf16 = std::is_same_v<X, __nv_bfloat16>;
  static constexpr float kScaleUp = kBf16 ? 0x1p+13f : 1.f;  // code - zero comes out divided by this

  __device__ static uint32_t both(float value) {
    const X x = from_float<X>(value);
    return pack_pair(x, x);
  }
  __device__ static uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    if constexpr (kBf16) {
      uint32_t d;
      asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
      return d;
    } else {
      return fma_f16x2(a, b, c);
    }
  }
};

// The parameters of one output and group, in both halves of a register each.
template <typename X>
struct Scaling {
  using A = Arithmetic<X>;
  uint32_t zero, zero_of_odd;  // minus the integer that codes lose, as the conversion wants it; in odd pairs of int4
  uint32_t scale, scale_low;   // their sum is the scale
  uint32_t rest;               // minus what is left of the zero times the scale, or the offset

  // The scale is a number of X as it lies in memory, and the zero an integer.
  __device__ void set_simple(uint32_t raw_scale, float whole) {
    set_zero(whole);
    scale = __byte_perm(raw_scale, 0, 0x1010);
    if constexpr (A::kBf16) scale = A::fma(scale, 0x46004600u, 0x80008000u);  // 2^13
  }
  __device__ void set(float s, float shift, float whole, ShiftMode mode) {
    set_zero(whole);
    const float up = s * A::kScaleUp;
    scale = A::both(up);
    scale_low = A::both(up - to_float(from_float<X>(up)));
    rest = A::both(mode == ShiftMode::kOffsets ? shift : mode == ShiftMode::kZeros ? (whole - shift) * s : 0.f);
  }
  __device__ void set_zero(float whole) {
    if constexpr (A::kBf16) {
      zero = zero_of_odd = A::both(-whole * 0x1p-13f);
    } else {  // under the magic numbers of four_bits_to_f16 and eight_bits_to_f16
      zero = A::both(-1024.f - whole);
      zero_of_odd = A::both(-64.f - whole);
    }
  }
};

// The four pairs of 32 inputs of a lane's output: one word of four-bit codes, or two of eight-bit ones.
template <typename X, int kBits, bool kSimple>
__device__ __forceinline__ void dequantize(uint32_t first, uint32_t second, const Scaling<X>& by, uint32_t (&w)[4]) {
  using A = Arithmetic<X>;
  if constexpr (A::kBf16) {
    constexpr uint32_t kUp = 0x7b807b80u, kUpOdd = 0x79807980u;  // 2^120, 2^116
    if constexpr (kBits == 4) {
      uint4_to_subnormal(first, w);
    } else {
      uint32_t pairs[2];
      uint8_to_subnormal(first, pairs);
      w[0] = pairs[0], w[1] = pairs[1];
      uint8_to_subnormal(second, pairs);
      w[2] = pairs[0], w[3] = pairs[1];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = A::fma(w[i], kBits == 4 && i % 2 == 1 ? kUpOdd : kUp, by.zero);
  } else {
    constexpr uint32_t kOne = 0x3c003c00u, kSixteenth = 0x2c002c00u;
    if constexpr (kBits == 4) {
      uint4_above_1024(first, w);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[i] = A::fma(w[i], i % 2 == 1 ? kSixteenth : kOne, i % 2 == 1 ? by.zero_of_odd : by.zero);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t word = i < 2 ? first : second;
        w[i] = A::fma(byte_permute(word, 0x64646464u, i % 2 == 0 ? 0x5250u : 0x5351u), kOne, by.zero);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    w[i] = A::fma(w[i], by.scale, kSimple ? 0x80008000u : A::fma(w[i], by.scale_low, by.rest));  // -0 adds nothing
  }
}

// Numbers of scales or shift as they lie in memory, and what they are. One choice of type for all of them.
template <int kRows>
__device__ __forceinline__ void load_raw(uint32_t (&to)[2 * kRows], const uint8_t* const (&rows)[kRows], int64_t first,
                                         int64_t second, int size) {
  if (size == 2) {
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i) to[i] = ptx::load_16(rows[i / 2] + (i % 2 == 0 ? first : second));
  } else if (size == 4) {
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i) to[i] = ptx::load_32(rows[i / 2] + (i % 2 == 0 ? first : second));
  } else {
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i) to[i] = ptx::load_8(rows[i / 2] + (i % 2 == 0 ? first : second));
  }
}
template <int kCount>
__device__ __forceinline__ void raw_to_float(float (&to)[kCount], const uint32_t (&raw)[kCount], DType type) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float half = __half2float(__ushort_as_half(static_cast<uint16_t>(raw[i])));
    to[i] = type == DType::kF32    ? __uint_as_float(raw[i])
            : type == DType::kBF16 ? __uint_as_float(raw[i] << 16)
            : type == DType::kF16  ? half
                                   : static_cast<float>(raw[i]);
  }
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    transposed_warpgroup_matmul(const __grid_constant__ Params<typename S::Source> params,
                                const __grid_constant__ CUtensorMap dy_map,
                                const __grid_constant__ CUtensorMap dx_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using X = typename S::X;
  constexpr int kStages = S::kStages;
  extern __shared__ __align__(1024) uint8_t shared[];
  uint64_t* full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* empty = full + kStages;
  uint64_t* received = empty + kStages;
  uint8_t* const ring = shared + kBarrierBytes;

  const MatmulArgs& args = params.args;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int rank = ptx::cluster_rank();
  const int first_item = ptx::cluster_index();
  const int item_step = params.clusters;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(full + i, 4 * ptx::kArrivals + 1);  // the producer warps, and one of them again for dy
      ptx::barrier_init(empty + i, kWarps * params.partners * ptx::kArrivals);
    }
    ptx::barrier_init(received, 1);
    ptx::barrier_init_fence();
  }
  const typename S::Source source(params.source, args, shared + S::kSourceAt);
  __syncthreads();
  if (params.cluster > 1) ptx::cluster_share();

  if (warp >= kWarps) {
    if constexpr (S::kMovesRegisters) ptx::lower_registers<S::kProducerRegisters>();
    // Warpgroup p of the producers converts every kProducers-th stage, the p-th first; its warp w outputs 16w .. 16w
    // + 15.
    const int producer = warp / 4 - kConsumers;
    const int part = warp % 4;
    const int k_tiles = static_cast<int>(ceil_div(args.k, tile_k(S::kBits)));
    const int scale_size = element_size(args.scale_dtype);
    const int shift_size = args.shift_mode == ShiftMode::kNone ? 0 : element_size(args.shift_dtype);
    const int box_rows = S::kTokens / params.partners;

    struct Packed {
      int n0, row, batch;  // of dy; row < 0: there is no such stage
      bool split;
      uint4 words[S::kTiles];
      uint32_t scale[2 * S::kGroups], shift[2 * S::kGroups];
    };
    int slot = producer;
    uint32_t phase = 1;  // at first all slots are empty
    // The walk of the loads: what this lane reads next of the packed words, and of scales and shift for output g of its
    // part; output g + 8 lies `half_*` bytes further. `stage` counts from the item's first.
    int index = first_item, stage = producer, count = 0;
    Item item{};
    bool last_split = false;
    const uint32_t* words = nullptr;
    const uint8_t* scales[S::kGroups] = {};
    const uint8_t* shift[S::kGroups] = {};
    int tiles = 0;
    const int64_t words_step = static_cast<int64_t>(S::kProducers) * k_tiles * kTileWords;
    const int half_scales = 8 * scale_size, half_shift = 8 * shift_size;
    const auto enter_item = [&]() {
      for (; index < source.items(); stage -= count, index += item_step) {
        item = source.item(index, rank);
        last_split = item.split;
        count = item.weights < 0 ? 0 : item.end - item.begin;
        if (stage < count) break;
      }
      if (index >= source.items()) return;
      const int first_tile = item.k0 / tile_k(S::kBits);
      tiles = k_tiles - first_tile;
      words = args.qw + item.weights * args.qw_batch_stride +
              (static_cast<int64_t>(item.begin + stage) * k_tiles + first_tile) * kTileWords + part * kAtomWords +
              lane * 4;
      const int64_t n = static_cast<int64_t>(item.begin + stage) * kStageN + part * kAtomN + g;
#pragma unroll
      for (int row = 0; row < S::kGroups; ++row) {
        const int64_t group =
            params.log2_group_blocks < 0
                ? 0
                : min(static_cast<int64_t>((item.k0 / 32 + row) >> params.log2_group_blocks), args.groups - 1);
        scales[row] = static_cast<const uint8_t*>(args.scales) +
                      (item.weights * args.scales_batch_stride + group * args.n + n) * scale_size;
        shift[row] = static_cast<const uint8_t*>(args.shift) +
                     (item.weights * args.shift_batch_stride + group * args.n + n) * shift_size;
      }
    };
    const auto load = [&](Packed& to) {
      to.row = -1;
      if (index >= source.items()) return;
      to.n0 = (item.begin + stage) * kStageN;
      to.row = item.first;
      to.batch = args.x_batch_stride == 0 ? 0 : item.weights;
      to.split = item.split;
#pragma unroll
      for (int i = 0; i < S::kTiles; ++i) {
        to.words[i] = {};
        ptx::load_once(to.words[i], words + i * kTileWords, i < tiles);
      }
      // Beyond the last output the parameters of the last one, which meet zeros of dy.
      const int64_t n = args.n - 1 - (to.n0 + part * kAtomN + g);
      const int64_t low = n < 0 ? n : 0, high = n < 8 ? n - 8 : 0;
      load_raw(to.scale, scales, low * scale_size, high * scale_size + half_scales, scale_size);
      if (shift_size != 0) load_raw(to.shift, shift, low * shift_size, high * shift_size + half_shift, shift_size);
      stage += S::kProducers;
      words += words_step;
#pragma unroll
      for (int row = 0; row < S::kGroups; ++row) {
        scales[row] += S::kProducers * kStageN * scale_size;
        shift[row] += S::kProducers * kStageN * shift_size;
      }
      if (stage >= count) enter_item();
    };
    const auto convert = [&](const Packed& packed, uint8_t* weights, auto simple) {
      // The integer part of what is subtracted from codes; a simple shift is of integers.
      float scale[2 * S::kGroups] = {}, zero[2 * S::kGroups] = {}, whole[2 * S::kGroups];
#pragma unroll
      for (int i = 0; i < 2 * S::kGroups; ++i) whole[i] = static_cast<float>(bias_of(S::kBits));
      if (simple.value) {
        if (shift_size != 0) {
#pragma unroll
          for (int i = 0; i < 2 * S::kGroups; ++i) whole[i] = static_cast<float>(packed.shift[i]);
        }
      } else {
        raw_to_float(scale, packed.scale, args.scale_dtype);
        if (shift_size != 0) {
          raw_to_float(zero, packed.shift, args.shift_dtype);
          const bool zeros = args.shift_mode == ShiftMode::kZeros;
#pragma unroll
          for (int i = 0; i < 2 * S::kGroups; ++i) whole[i] = zeros ? fminf(fmaxf(rintf(zero[i]), 0.f), 255.f) : 0.f;
        }
      }
      // Row `lane` of every 32 inputs, which is a run of 128 bytes; eight outputs are 16 of them, swizzled by the row.
      uint8_t* const to[2] = {weights + lane * 128 + (2 * part ^ lane % 8) * 16,
                              weights + lane * 128 + ((2 * part + 1) ^ lane % 8) * 16};
      Scaling<X> by[2];
#pragma unroll
      for (int run = 0; run < kBlockK / 32; ++run) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (S::kGroups > 1 || run == 0) {
            const int row = S::kGroups > 1 ? run : 0;
            if constexpr (simple.value) {
              by[half].set_simple(packed.scale[2 * row + half], whole[2 * row + half]);
            } else {
              by[half].set(scale[2 * row + half], zero[2 * row + half], whole[2 * row + half], args.shift_mode);
            }
          }
          uint32_t w[4];
          if constexpr (S::kBits == 4) {
            const uint4& four = packed.words[run / 2];
            const uint32_t word = run % 2 == 0 ? (half == 0 ? four.x : four.y) : half == 0 ? four.z : four.w;
            dequantize<X, 4, simple.value>(word, 0, by[half], w);
          } else {
            const uint4& four = packed.words[run];
            dequantize<X, 8, simple.value>(half == 0 ? four.x : four.y, half == 0 ? four.z : four.w, by[half], w);
          }
          ptx::store_matrices_transposed(to[half] + run * 32 * 128, w);
        }
      }
    };

    const auto process = [&](const Packed& packed) {
      uint8_t* const weights = ring + slot * S::kStageBytes;
      ptx::barrier_wait(empty + slot, phase);
      if (part == 0 && ptx::elect_one()) {
        ptx::barrier_expect(full + slot, S::kDyBytes);
        uint8_t* const to = weights + kWeightBytes;
        const int box_bytes = box_rows * (kStageN * 2);
        if (params.partners > 1 && !packed.split) {
          ptx::tensor_copy_3d_multicast(to + rank * box_bytes, &dy_map, packed.n0, packed.row + rank * box_rows,
                                        packed.batch, full + slot, 3);
        } else {
          for (int i = 0; i < params.partners; ++i) {
            ptx::tensor_copy_3d(to + i * box_bytes, &dy_map, packed.n0, packed.row + i * box_rows, packed.batch,
                                full + slot);
          }
        }
      }
      __syncwarp();
      if (params.simple) {
        convert(packed, weights, std::true_type{});
      } else {
        convert(packed, weights, std::false_type{});
      }
      ptx::fence_shared_for_async();
      __syncwarp();
      if (ptx::arrives(lane)) ptx::barrier_arrive(full + slot);
      slot += S::kProducers;
      if (slot >= kStages) {
        slot -= kStages;
        phase ^= 1;
      }
    };

    // Loads go out after the fence, which may wait for what is on its way.
    enter_item();
    Packed first, second;
    load(first);
    if constexpr (S::kAhead == 2) load(second);
    while (first.row >= 0) {
      process(first);
      load(first);
      if constexpr (S::kAhead == 2) {
        if (second.row < 0) break;
        process(second);
        load(second);
      }
    }
    __syncwarp();
    if (last_split) ptx::cluster_meet();
  } else {
    if constexpr (S::kMovesRegisters) ptx::raise_registers<S::kConsumerRegisters>();
    const int warpgroup = warp / 4;
    const int t = lane % 4;
    const int thread = threadIdx.x % 128;
    uint8_t* const staging = shared + S::kStagingAt + warpgroup * S::kStagingBytes;
    const auto sync = [&] { asm volatile("bar.sync %0, 128;\n" ::"r"(1 + warpgroup) : "memory"); };
    const bool bulk_stores = S::Source::kBulkStores && params.rows_of_16_bytes;
    int slot = 0;
    uint32_t phase = 0;
    float acc[S::kParts][S::kColumns / 2];
    // Those of eight tokens.
    const auto sums_of = [&](int run) { return acc[run / (S::kColumns / 8)] + run % (S::kColumns / 8) * 4; };
    // A run of eight tokens from row `first` of the item on, as the accumulators lie.
    const auto store_wide = [&](const Item& item, int first, const float* sums) {
      const int64_t k = item.k0 + warpgroup * 64 + warp % 4 * 16 + g;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = first + 2 * t + i;
        if (token >= item.rows) continue;
        float* const to = static_cast<float*>(args.y) + source.row(item, token) * args.k + k;
        if (k < args.k) to[0] = sums[i];
        if (k + 8 < args.k) to[8] = sums[2 + i];
      }
    };
    // Two runs, rounded and in rows of 64 inputs.
    const auto stage = [&](int to, const float* first, const float* second) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const two = (i < 2 ? first : second) + i % 2 * 2;
        pairs[i] = pack_pair(from_float<X>(two[0]), from_float<X>(two[1]));
      }
      const int chunk = (warp % 4 * 2 + lane / 8 % 2) ^ (lane % 8);
      ptx::store_matrices_transposed(staging + (to + lane / 16 * 8 + lane % 8) * 128 + chunk * 16, pairs);
    };
    // `count` rows that were staged, which are those from row `first` of the item on.
    const auto store_staged = [&](const Item& item, int first, int count) {
#pragma unroll 2
      for (int at = thread; at < count * 8; at += 128) {
        const int token = at / 8, chunk = at % 8;
        const int64_t k = item.k0 + warpgroup * 64 + chunk * 8;
        if (k >= args.k) continue;
        const uint8_t* from = staging + token * 128 + (chunk ^ (token % 8)) * 16;
        X* const to = static_cast<X*>(args.y) + source.row(item, first + token) * args.k + k;
        if (params.rows_of_16_bytes) {
          *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        } else {
#pragma unroll 1
          for (int j = 0; j < 8 && k + j < args.k; ++j) to[j] = reinterpret_cast<const X*>(from)[j];
        }
      }
    };
    for (int index = first_item; index < source.items(); index += item_step) {
      const Item item = source.item(index, rank);
      const int64_t k_warpgroup = item.k0 + warpgroup * 64;
      if (item.weights < 0) {
        const int inputs = static_cast<int>(min(args.k - item.k0, static_cast<int64_t>(kBlockK)));
        for (int i = warp; i < item.rows; i += kWarps) {
          const int64_t to = source.row(item, i) * args.k + item.k0;
          for (int k = lane; k < inputs; k += 32) store_element(args.y, to + k, 0.f, args.y_dtype);
        }
        continue;
      }
      const auto release = [&](int released) {
        if (!ptx::arrives(lane)) return;
        ptx::barrier_arrive(empty + released);
        if (params.partners == 1) return;
        if (item.split) {
          ptx::barrier_arrive(empty + released);
        } else {
          ptx::barrier_arrive_at_rank(empty + released, rank ^ 1);
        }
      };
      int previous = 0;
      const int stages = item.end - item.begin;
#pragma unroll 1
      for (int at = 0; at < stages; ++at) {
        ptx::barrier_wait(full + slot, phase);
        const uint8_t* data = ring + slot * S::kStageBytes;
        const uint64_t weights = ptx::wgmma_descriptor(data + warpgroup * (kWeightBytes / kConsumers));
        const uint64_t dy = ptx::wgmma_descriptor(data + kWeightBytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < kStageN / 16; ++step) {
          const int offset = step * 32 >> 4;
#pragma unroll
          for (int part = 0; part < S::kParts; ++part) {
            const uint64_t of_part = dy + (part * S::kColumns * kStageN * 2 >> 4);
            if constexpr (Arithmetic<X>::kBf16) {
              ptx::WgmmaShared<S::kColumns>::bf16(acc[part], weights + offset, of_part + offset, at + step > 0);
            } else {
              ptx::WgmmaShared<S::kColumns>::f16(acc[part], weights + offset, of_part + offset, at + step > 0);
            }
          }
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        if (at > 0) release(previous);  // the products of the stage before are done
        previous = slot;
        if (++slot == kStages) {
          slot = 0;
          phase ^= 1;
        }
      }
      ptx::wgmma_wait<0>();
      release(previous);
#pragma unroll
      for (int run = 0; run < S::kTokens / 8; ++run) {  // nobody reads them earlier
        float* const d = sums_of(run);
        asm volatile("" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]));
      }

      if (!item.split) {
        if (params.wide_result) {
#pragma unroll
          for (int run = 0; run < S::kTokens / 8; ++run) store_wide(item, run * 8, sums_of(run));
          continue;
        }
#pragma unroll
        for (int first = 0; first < S::kTokens; first += S::kStagingTokens) {
          if (first >= item.rows) break;
          if (thread == 0) ptx::tensor_stores_wait();  // what was staged before has been read
          sync();
#pragma unroll
          for (int i = 0; i < S::kStagingTokens; i += 16) {
            stage(i, sums_of((first + i) / 8), sums_of((first + i) / 8 + 1));
          }
          if (bulk_stores) ptx::fence_shared_for_async();
          sync();
          if (!bulk_stores) {
            store_staged(item, first, min(item.rows - first, S::kStagingTokens));
          } else if (thread == 0 && k_warpgroup < args.k) {
            ptx::tensor_store_3d(&dx_map, staging, static_cast<int>(k_warpgroup), item.first + first, item.weights);
          }
        }
        continue;
      }

      // Runs of eight tokens: each rank finishes as many, and gets their sums from the others, as the accumulators lie.
      // They take the place of the stages: first those of this CTA, then what comes from the others.
      const int runs = (item.rows + 7) / 8, most = (runs + params.cluster - 1) / params.cluster;
      const auto count_of = [&](int owner) { return max(min(most, runs - owner * most), 0); };
      const int mine = count_of(rank), first_row = rank * most * 8;
      if (threadIdx.x == 0) ptx::barrier_expect(received, (params.cluster - 1) * mine * kRunBytes);
      __syncwarp();
      asm volatile("bar.sync 3, %0;\n" ::"n"(kConsumers * 128) : "memory");  // nobody reads the stages any more
#pragma unroll
      for (int run = 0; run < S::kTokens / 8; ++run) {
        if (run >= runs) break;
        const float* const d = sums_of(run);
        reinterpret_cast<float4*>(ring + run * kRunBytes)[threadIdx.x] = make_float4(d[0], d[1], d[2], d[3]);
      }
      ptx::fence_shared_for_async();
      asm volatile("bar.sync 3, %0;\n" ::"n"(kConsumers * 128) : "memory");
      ptx::cluster_meet();
      if (warp < params.cluster && warp != rank && ptx::elect_one()) {
        const int bytes = count_of(warp) * kRunBytes;
        uint8_t* const to = ring + (runs + (rank - (rank > warp)) * most) * kRunBytes;
        if (bytes > 0) ptx::bulk_copy_to_rank(to, ring + warp * most * kRunBytes, bytes, received, warp);
      }
      __syncwarp();
      if (thread == 0) ptx::tensor_stores_wait();
      sync();
      ptx::barrier_wait(received, 0);
#pragma unroll 2
      for (int run = 0; run < mine; run += 2) {
        float sums[2][4] = {};
#pragma unroll 1
        for (int other = 0; other < params.cluster; ++other) {
          const int at = run + (other == rank ? rank * most : runs + (other - (other > rank)) * most);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float4 v = reinterpret_cast<const float4*>(ring + (at + half) * kRunBytes)[threadIdx.x];
            sums[half][0] += v.x, sums[half][1] += v.y, sums[half][2] += v.z, sums[half][3] += v.w;
          }
        }
        if (params.wide_result) {
          store_wide(item, first_row + run * 8, sums[0]);
          if (run + 1 < mine) store_wide(item, first_row + run * 8 + 8, sums[1]);
        }
        if (!params.wide_result) stage(run * 8, sums[0], sums[1]);
      }
      if (params.wide_result) continue;
      sync();
      store_staged(item, first_row, min(item.rows - first_row, mine * 8));
    }
    if (thread == 0) ptx::tensor_stores_wait();
  }
  // No CTA leaves while another may still write to its shared memory.
  if (params.cluster > 1) {
    __syncwarp();
    ptx::cluster_leave();
  }
#else
  __trap();
#endif
}

template <typename S>
cudaError_t launch_shape(Params<Consecutive> params, const Config& config, cudaStream_t stream) {
  const MatmulArgs& args = params.args;
  const int clusters = std::max(1, config.clusters);
  params.cluster = config.cluster;
  params.partners = config.partners;
  Consecutive::Params& walk = params.source;
  walk.token_blocks = static_cast<int>(ceil_div(args.m, S::kTokens));
  walk.groups = static_cast<int>(ceil_div(args.k, kBlockK * config.partners));
  const int64_t groups = args.batch * walk.token_blocks * walk.groups;
  if (groups > INT32_MAX / 4) return cudaErrorInvalidValue;
  // A cluster splits one item, its last. Without partners all are.
  const int rest = !config.split                       ? 0
                   : config.partners == config.cluster ? static_cast<int>(groups % clusters)
                                                       : static_cast<int>(groups);
  if (rest * config.partners > clusters) return cudaErrorInvalidConfiguration;
  if (rest > 0 && config.cluster > ceil_div(args.n, kStageN)) return cudaErrorInvalidConfiguration;
  const int64_t runs = std::min<int64_t>(ceil_div(args.m, 8), S::kTokens / 8);
  const int64_t received = ceil_div(runs, config.cluster) * (config.cluster - 1);
  if (rest > 0 && (runs + received) * kRunBytes > S::kStages * S::kStageBytes) return cudaErrorInvalidConfiguration;
  walk.whole = static_cast<int>(groups) - rest;
  walk.items = walk.whole + rest * config.partners;
  walk.partners = config.partners;
  walk.stages = static_cast<int>(ceil_div(args.n, kStageN));
  walk.stages_each = walk.stages / config.cluster;
  walk.stages_more = walk.stages % config.cluster;
  walk.of_batch = Divisor(walk.token_blocks * walk.groups);
  walk.of_run = Divisor(kRunOfTokens * walk.groups);
  walk.run = Divisor(kRunOfTokens);
  walk.last_run = Divisor(std::max(1, walk.token_blocks % kRunOfTokens));
  walk.tokens = S::kTokens;
  params.clusters = std::min(walk.items, clusters);
  MatmulArgs dy = args, dx = args;
  dy.k = args.n;
  dx.x = args.y;
  dx.x_batch_stride = args.m * args.k;
  CUtensorMap dy_map, dx_map{};
  if (cudaError_t error = describe_activations(dy, S::kTokens / config.partners, &dy_map); error != cudaSuccess) {
    return error;
  }
  if (params.rows_of_16_bytes) {
    if (cudaError_t error = describe_activations(dx, S::kStagingTokens, &dx_map); error != cudaSuccess) return error;
  }
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(params.clusters * config.cluster));
  shape.threads = S::kThreads;
  shape.cluster = config.cluster;
  shape.shared_bytes = S::kSharedBytes;
  return launch_kernel(transposed_warpgroup_matmul<S>, shape, stream, params, dy_map, dx_map);
}

// Calls `launch` with a null pointer to the kernel's shape for blocks of `tokens` tokens.
template <typename Source, typename X, typename Launch>
cudaError_t with_shape(const MatmulArgs& args, int tokens, Launch&& launch) {
  const int log2 = log2_group_blocks(args);
  const auto with_groups = [&](auto bits, auto tokens) {
    return log2 == 0 || log2 == 1 ? launch(static_cast<Shape<Source, X, bits.value, tokens.value, 4>*>(nullptr))
                                  : launch(static_cast<Shape<Source, X, bits.value, tokens.value, 1>*>(nullptr));
  };
  const auto with_tokens = [&](auto bits) {
    switch (tokens) {
      case 64:
        return with_groups(bits, std::integral_constant<int, 64>{});
      case 128:
        return with_groups(bits, std::integral_constant<int, 128>{});
      case 256:
        return with_groups(bits, std::integral_constant<int, 256>{});
      default:
        return cudaErrorInvalidValue;
    }
  };
  return args.bits == 4 ? with_tokens(std::integral_constant<int, 4>{}) : with_tokens(std::integral_constant<int, 8>{});
}

// All but the source's and the cluster's.
template <typename Source>
Params<Source> make_params(const MatmulArgs& args) {
  Params<Source> params{};
  params.args = args;
  params.log2_group_blocks = log2_group_blocks(args);
  const bool integer_zeros =
      args.shift_mode == ShiftMode::kNone || (args.shift_mode == ShiftMode::kZeros && args.shift_dtype == DType::kU8);
  params.simple = integer_zeros && args.scale_dtype == args.x_dtype;
  params.wide_result = args.y_dtype == DType::kF32;
  params.rows_of_16_bytes = !params.wide_result && args.k % 8 == 0;
  return params;
}

template <typename X>
cudaError_t launch_typed(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  return with_shape<Consecutive, X>(args, config.tokens, [&](auto* s) {
    return launch_shape<std::remove_pointer_t<decltype(s)>>(make_params<Consecutive>(args), config, stream);
  });
}

}  // namespace wonly::transposed_warpgroup
