// Stages of matmul_transposed_warpgroup.cuh with weights in shared memory: producer warps load them packed, convert
// them in registers and store them transposed (stmatrix) in the order that wgmma wants: rows of inputs, summed over
// outputs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/ring.cuh"
#include "cuda/rounded_weights.cuh"
#include "cuda/transposed_items.cuh"
#include "cuda/wgmma.cuh"
#include "dequant/convert.h"
#include "layout.h"

namespace wonly::transposed_warpgroup {

constexpr int kWeightBytes = 128 * kRunN * 2;

// kTable: codes index a table.
template <typename Source_, int kBits_, int kTokens_, int kGroups_, bool kTable_ = false>
struct SharedShape {
  using Source = Source_;
  using X = Either;
  static constexpr bool kInRegisters = false, kFloat32 = false, kMakesShifts = false;
  static constexpr bool kTable = kTable_, kZeros = false;
  static constexpr int kBits = kBits_;
  static constexpr int kTokens = kTokens_;
  static constexpr int kGroups = kGroups_;  // rows of scales of a block: 1, or 4 where groups are of 32 or 64 inputs
  // Warpgroups that convert, in turns: as many as leave registers for the accumulators.
  static constexpr int kProducers = kTokens < 256 && kBits == 4 && kGroups == 1 ? 3 : 2;
  static constexpr int kConsumers = transposed_warpgroup::kConsumers, kWarps = kConsumers * 4;
  static constexpr int kThreads = (kConsumers + kProducers) * 128;
  // The accumulators of 256 tokens take registers from the producers.
  static constexpr bool kMovesRegisters = kTokens == 256 || kProducers == 3;
  static constexpr int kConsumerRegisters = kTokens == 256 ? 160 : 120, kProducerRegisters = kTokens == 256 ? 96 : 80;
  static constexpr int kAhead = kTokens == 256 && kGroups == 4 ? 1 : 2;  // stages that a producer loads ahead
  static constexpr int kColumns = kTokens == 256 ? 128 : kTokens, kParts = kTokens / kColumns, kPieces = 1;
  static constexpr int kBlockK = 128, kTiles = 1, kOutputs = kRunN;
  static constexpr int kPackedTiles = kBlockK / tile_k(kBits);
  static constexpr int kDyAt = kWeightBytes, kDyBytes = kTokens * kRunN * 2;
  static constexpr int kStageBytes = kWeightBytes + kDyBytes;
  static constexpr int kStages = kTokens == 256 ? 4 : kTokens == 128 ? 6 : 8;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kStagingTokens = kTokens < Source::kStagingTokens ? kTokens : Source::kStagingTokens;
  static constexpr int kStagingBytes = kStagingTokens * (kBlockK / kConsumers) * 2;  // of one warpgroup
  static constexpr int kStagingAt = kBarrierBytes + kRingBytes;
  static constexpr int kSourceAt = kStagingAt + kConsumers * kStagingBytes;
  static constexpr int kSharedBytes = kSourceAt + Source::kSharedBytes;
  static constexpr int kArrivals = 4 * ptx::kArrivals + 1;  // at a stage: those who convert, and one of them for dy
  static_assert(kSharedBytes <= kMostSharedBytes && kStages >= 2 * kProducers);
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

  // Of a table's entries, which lose nothing.
  __device__ void set_simple_of_table(uint32_t raw_scale) { scale = __byte_perm(raw_scale, 0, 0x1010); }
  __device__ void set_of_table(float s) {
    scale = A::both(s);
    scale_low = A::both(s - to_float(from_float<X>(s)));
    rest = 0x80008000u;
  }
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

// Pairs of codes without their zero as weights.
template <typename X, bool kSimple>
__device__ __forceinline__ void scale_pairs(const Scaling<X>& by, uint32_t (&w)[4]) {
  using A = Arithmetic<X>;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    w[i] = A::fma(w[i], by.scale, kSimple ? 0x80008000u : A::fma(w[i], by.scale_low, by.rest));  // -0 adds nothing
  }
}

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
  scale_pairs<X, kSimple>(by, w);
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

// Fills the ring; whether the last item was split.
template <typename S>
__device__ __forceinline__ bool convert_stages(const Cta<S>& cta) {
  const auto& params = cta.params;
  const MatmulArgs& args = params.args;
  // Warpgroup p of the producers converts every kProducers-th stage, the p-th first; its warp w outputs 16w .. 16w
  // + 15.
  const int producer = cta.warp / 4 - kConsumers;
  const int part = cta.warp % 4, lane = cta.lane, g = lane / 4;
  const int k_tiles = static_cast<int>(ceil_div(args.k, tile_k(S::kBits)));
  const int scale_size = element_size(args.scale_dtype);
  const int shift_size = S::kTable || args.shift_mode == ShiftMode::kNone ? 0 : element_size(args.shift_dtype);

  struct Packed {
    int n0, row, rows, batch;  // of dy; row < 0: there is no such stage
    int weights;               // whose
    bool split;
    uint4 words[S::kPackedTiles];
    uint32_t scale[2 * S::kGroups], shift[2 * S::kGroups];
  };
  int slot = producer;
  uint32_t phase = 1;  // at first all slots are empty
  // The walk of the loads: what this lane reads next of the packed words, and of scales and shift for output g of its
  // part; output g + 8 lies `half_*` bytes further. `stage` counts from the item's first.
  int index = cta.first_item, stage = producer, count = 0;
  Item item{};
  bool last_split = false;
  const uint32_t* words = nullptr;
  const uint8_t* scales[S::kGroups] = {};
  const uint8_t* shift[S::kGroups] = {};
  int tiles = 0;
  const int64_t words_step = static_cast<int64_t>(S::kProducers) * k_tiles * kTileWords;
  const int half_scales = 8 * scale_size, half_shift = 8 * shift_size;
  const auto enter_item = [&]() {
    for (; index < cta.source.items(); stage -= count, index += params.clusters) {
      item = cta.source.item(index, cta.rank);
      last_split = item.split;
      count = item.weights < 0 ? 0 : item.end - item.begin;
      if (stage < count) break;
    }
    if (index >= cta.source.items()) return;
    const int first_tile = item.k0 / tile_k(S::kBits);
    tiles = k_tiles - first_tile;
    words = args.qw + item.weights * args.qw_batch_stride +
            (static_cast<int64_t>(item.begin + stage) * k_tiles + first_tile) * kTileWords + part * kAtomWords +
            lane * 4;
    const int64_t n = static_cast<int64_t>(item.begin + stage) * kRunN + part * kAtomN + g;
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
    if (index >= cta.source.items()) return;
    to.n0 = (item.begin + stage) * kRunN;
    to.row = item.first;
    to.rows = item.rows;
    to.batch = args.x_batch_stride == 0 ? 0 : item.weights;
    to.weights = item.weights;
    to.split = item.split;
#pragma unroll
    for (int i = 0; i < S::kPackedTiles; ++i) {
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
      scales[row] += S::kProducers * kRunN * scale_size;
      shift[row] += S::kProducers * kRunN * shift_size;
    }
    if (stage >= count) enter_item();
  };
  [[maybe_unused]] ByteTable table;
  [[maybe_unused]] int64_t table_at = -1;  // which that is
  const auto convert = [&](const Packed& packed, uint8_t* weights, auto simple, auto of) {
    using X = typename decltype(of)::X;
    if constexpr (S::kTable) {
      if (const int64_t at = packed.weights * args.shift_batch_stride; at != table_at) {
        table = wonly::Convert<ConvertShape<X, 4, Codes::kOfTable>>::table(static_cast<const float*>(args.shift) + at);
        table_at = at;
      }
    }
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
    for (int run = 0; run < S::kBlockK / 32; ++run) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (S::kGroups > 1 || run == 0) {
          const int row = S::kGroups > 1 ? run : 0;
          if constexpr (S::kTable && simple.value) {
            by[half].set_simple_of_table(packed.scale[2 * row + half]);
          } else if constexpr (S::kTable) {
            by[half].set_of_table(scale[2 * row + half]);
          } else if constexpr (simple.value) {
            by[half].set_simple(packed.scale[2 * row + half], whole[2 * row + half]);
          } else {
            by[half].set(scale[2 * row + half], zero[2 * row + half], whole[2 * row + half], args.shift_mode);
          }
        }
        uint32_t w[4];
        if constexpr (S::kBits == 4) {
          const uint4& four = packed.words[run / 2];
          const uint32_t word = run % 2 == 0 ? (half == 0 ? four.x : four.y) : half == 0 ? four.z : four.w;
          if constexpr (S::kTable) {
            look_up(word, table, w);
            scale_pairs<X, simple.value>(by[half], w);
          } else {
            dequantize<X, 4, simple.value>(word, 0, by[half], w);
          }
        } else {
          const uint4& four = packed.words[run];
          dequantize<X, 8, simple.value>(half == 0 ? four.x : four.y, half == 0 ? four.z : four.w, by[half], w);
        }
        ptx::store_matrices_transposed(to[half] + run * 32 * 128, w);
      }
    }
  };

  const auto process = [&](const Packed& packed) {
    uint8_t* const weights = cta.ring + slot * S::kStageBytes;
    ptx::barrier_wait(cta.empty + slot, phase);
    if (part == 0 && ptx::elect_one()) {
      cta.copy_dy(slot, packed.n0, packed.row, packed.rows, packed.batch, packed.split);
    }
    __syncwarp();
    with_type<typename S::X>(args.x_dtype, [&](auto of) {
      if (params.simple) {
        convert(packed, weights, std::true_type{}, of);
      } else {
        convert(packed, weights, std::false_type{}, of);
      }
    });
    ptx::fence_shared_for_async();
    ptx::warp_arrive(cta.full + slot, lane);
    slot += S::kProducers;
    if (slot >= S::kStages) {
      slot -= S::kStages;
      phase ^= 1;
    }
  };

  // Loads go out after the fence, which may wait for what is on its way.
  enter_item();
  Packed first, second;
  load(first);
  if constexpr (S::kAhead == 2) load(second);
  cta.wait_for_barriers();
  while (first.row >= 0) {
    process(first);
    load(first);
    if constexpr (S::kAhead == 2) {
      if (second.row < 0) break;
      process(second);
      load(second);
    }
  }
  return last_split;
}

// Adds the products of an item's stages up, of its first kRows rows.
template <typename X, int kRows, typename S>
__device__ __forceinline__ void multiply_stages(const Cta<S>& cta, const Item& item, RingPosition<S::kStages>& at,
                                                float (&acc)[S::kParts][S::kColumns / 2]) {
  const int warpgroup = cta.warp / 4;
  int previous = 0;
#pragma unroll 1
  for (int stage = item.begin; stage < item.end; ++stage) {
    ptx::barrier_wait(cta.full + at.slot, at.phase);
    const uint8_t* data = cta.ring + at.slot * S::kStageBytes;
    const uint64_t weights = ptx::wgmma_descriptor(data + warpgroup * (kWeightBytes / kConsumers));
    const uint64_t dy = ptx::wgmma_descriptor(data + S::kDyAt);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kRunN / 16; ++step) {
      const int offset = step * 32 >> 4, accumulate = stage > item.begin || step > 0;
      const auto multiply_part = [&](auto index) {
        constexpr int kPart = index.value, kLeft = kRows - kPart * S::kColumns;
        if constexpr (kLeft > 0) {
          constexpr int kColumns = std::min(kLeft, S::kColumns);
          auto& sums = reinterpret_cast<float (&)[kColumns / 2]>(acc[kPart]);
          const uint64_t of_part = dy + (kPart * S::kColumns * kRunN * 2 >> 4);
          if constexpr (Arithmetic<X>::kBf16) {
            ptx::WgmmaShared<kColumns>::bf16(sums, weights + offset, of_part + offset, accumulate);
          } else {
            ptx::WgmmaShared<kColumns>::f16(sums, weights + offset, of_part + offset, accumulate);
          }
        }
      };
      static_assert(S::kParts <= 2);
      multiply_part(std::integral_constant<int, 0>{});
      multiply_part(std::integral_constant<int, 1>{});
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (stage > item.begin) cta.release(item, previous);  // the products of the stage before are done
    previous = at.slot;
    at.advance();
  }
  ptx::wgmma_wait<0>();
  cta.release(item, previous);
}

}  // namespace wonly::transposed_warpgroup
