// dx = dy @ W^T for many tokens on Hopper: weights are dequantized a stage at a time into shared memory, where wgmma
// finds both of its operands.
//
// A CTA computes blocks of 128 inputs x kTokens tokens, one after the other. A stage is 64 outputs: dy by the tensor
// copy engine, of which the CTAs of a cluster bring each other their share, and the weights, which four producer warps
// load packed, convert in registers and store transposed (stmatrix) in the order that wgmma wants: rows of inputs,
// summed over outputs. Two warpgroups multiply, 64 inputs each.
//
// A weight is rounded once to the type of dy, as a dense one would be: the code less the integer part of its zero is
// exact, and one multiplication by the scale rounds. Scales of another type are two numbers of dy's type, and what is
// left of the zero, or the offset, enters rounded. Nothing else is rounded before the float32 sum, whose order depends
// on N alone: a token's result does not depend on the other tokens.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_transposed.h"
#include "cuda/tensor_map.h"
#include "cuda/wgmma.cuh"
#include "dequant/convert.h"
#include "layout.h"

namespace wonly::transposed_warpgroup {

constexpr int kStageN = 64;
constexpr int kConsumers = 2;  // warpgroups
constexpr int kBarrierBytes = 1024;
constexpr int kWeightBytes = kBlockK * kStageN * 2;
constexpr int kStagingTokens = 128;                                         // that a warpgroup writes out at a time
constexpr int kStagingBytes = kStagingTokens * (kBlockK / kConsumers) * 2;  // of one warpgroup
constexpr int kRunOfTokens = 8;  // blocks of tokens that run beside each other with the same weights

template <typename X_, int kBits_, int kTokens_, int kGroups_>
struct Shape {
  using X = X_;
  static constexpr int kBits = kBits_;
  static constexpr int kTokens = kTokens_;
  static constexpr int kGroups = kGroups_;  // rows of scales of a block: 1, or 4 where groups are of 32 or 64 inputs
  // Warpgroups that convert, in turns; the accumulators of 256 tokens leave registers for one.
  static constexpr int kProducers = kTokens == 256 ? 1 : 2;
  static constexpr int kThreads = (kConsumers + kProducers) * 128;
  static constexpr int kTiles = kBlockK / tile_k(kBits);
  static constexpr int kDyBytes = kTokens * kStageN * 2;
  static constexpr int kStageBytes = kWeightBytes + kDyBytes;
  static constexpr int kStages = kTokens == 256 ? 4 : 6;
  static constexpr int kSharedBytes = kBarrierBytes + kStages * kStageBytes + kConsumers * kStagingBytes;
  static_assert(kSharedBytes <= 227 << 10 && kStages % kProducers == 0);
};

struct Params {
  MatmulArgs args;
  int cluster;
  int token_blocks, k_blocks;  // k_blocks: of a whole cluster
  int blocks;                  // of clusters, all batches together
  int log2_group_blocks;       // group size = 32 << this; -1: one scale per output
  bool simple;                 // a weight is (code - integer) * scale with a scale of dy's type
  bool wide_result;            // float32
  bool rows_of_16_bytes;       // of a 16-bit result
};

// What a CTA works on.
struct Block {
  int batch, m0, k0;
};
template <int kTokens>
__device__ __forceinline__ Block block_at(const Params& params, int index, int rank) {
  const int of_batch = params.token_blocks * params.k_blocks;
  const int within = index % of_batch;
  const int run = within / (kRunOfTokens * params.k_blocks);
  const int tokens = min(kRunOfTokens, params.token_blocks - run * kRunOfTokens);
  const int rest = within - run * kRunOfTokens * params.k_blocks;
  return {index / of_batch, (run * kRunOfTokens + rest % tokens) * kTokens,
          (rest / tokens * params.cluster + rank) * kBlockK};
}

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
      const uint32_t top = first >> 8;
      w[0] = lop3<convert::kAndOr>(first, convert::kNibble, convert::kF16Magic);
      w[1] = lop3<convert::kAndOr>(first, convert::kHighNibble, convert::kF16Magic);
      w[2] = lop3<convert::kAndOr>(top, convert::kNibble, convert::kF16Magic);
      w[3] = lop3<convert::kAndOr>(top, convert::kHighNibble, convert::kF16Magic);
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
    transposed_warpgroup_matmul(const __grid_constant__ Params params, const __grid_constant__ CUtensorMap dy_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using X = typename S::X;
  constexpr int kStages = S::kStages;
  extern __shared__ __align__(1024) uint8_t shared[];
  uint64_t* full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* empty = full + kStages;
  uint8_t* const ring = shared + kBarrierBytes;

  const MatmulArgs& args = params.args;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int rank = blockIdx.x % params.cluster;
  const int first_block = blockIdx.x / params.cluster;
  const int block_step = gridDim.x / params.cluster;
  const int stages = static_cast<int>(ceil_div(args.n, kStageN));

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(full + i, 4 + 1);  // the producer warps, and one of them again for dy
      ptx::barrier_init(empty + i, kConsumers * 4 * params.cluster);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if (params.cluster > 1) ptx::cluster_share();

  if (warp >= kConsumers * 4) {
    // Warpgroup p of the producers converts every second stage, the p-th first; its warp w outputs 16w .. 16w + 15.
    const int producer = warp / 4 - kConsumers;
    const int part = warp % 4;
    const int k_tiles = static_cast<int>(ceil_div(args.k, tile_k(S::kBits)));
    const int scale_size = element_size(args.scale_dtype);
    const int shift_size = args.shift_mode == ShiftMode::kNone ? 0 : element_size(args.shift_dtype);
    const int dy_rows = S::kTokens / params.cluster;

    struct Packed {
      int n0, row, batch;  // of dy; row < 0: there is no such stage
      uint4 words[S::kTiles];
      uint32_t scale[2 * S::kGroups], shift[2 * S::kGroups];
    };
    int slot = producer;
    uint32_t phase = 1;  // at first all slots are empty
    // The walk of the loads: what this lane reads next of the packed words, and of scales and shift for output g of its
    // part; output g + 8 lies `half_*` bytes further.
    int index = first_block, stage = producer;
    Block block{};
    const uint32_t* words = nullptr;
    const uint8_t* scales[S::kGroups] = {};
    const uint8_t* shift[S::kGroups] = {};
    int tiles = 0;
    const int64_t words_step = static_cast<int64_t>(S::kProducers) * k_tiles * kTileWords;
    const int half_scales = 8 * scale_size, half_shift = 8 * shift_size;
    const auto enter_block = [&]() {
      while (stage >= stages) {
        stage -= stages;
        index += block_step;
      }
      if (index >= params.blocks) return;
      block = block_at<S::kTokens>(params, index, rank);
      const int first_tile = block.k0 / tile_k(S::kBits);
      tiles = k_tiles - first_tile;
      words = args.qw + block.batch * args.qw_batch_stride +
              (static_cast<int64_t>(stage) * k_tiles + first_tile) * kTileWords + part * kAtomWords + lane * 4;
      const int64_t n = static_cast<int64_t>(stage) * kStageN + part * kAtomN + g;
#pragma unroll
      for (int row = 0; row < S::kGroups; ++row) {
        const int64_t group =
            params.log2_group_blocks < 0
                ? 0
                : min(static_cast<int64_t>((block.k0 / 32 + row) >> params.log2_group_blocks), args.groups - 1);
        scales[row] = static_cast<const uint8_t*>(args.scales) +
                      (block.batch * args.scales_batch_stride + group * args.n + n) * scale_size;
        shift[row] = static_cast<const uint8_t*>(args.shift) +
                     (block.batch * args.shift_batch_stride + group * args.n + n) * shift_size;
      }
    };
    const auto load = [&](Packed& to) {
      to.row = -1;
      if (index >= params.blocks) return;
      to.n0 = stage * kStageN;
      to.row = block.m0 + rank * dy_rows;
      to.batch = args.x_batch_stride == 0 ? 0 : block.batch;
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
      if (stage >= stages) enter_block();
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
        uint8_t* to = weights + kWeightBytes + rank * dy_rows * (kStageN * 2);
        if (params.cluster > 1) {
          ptx::tensor_copy_3d_multicast(to, &dy_map, packed.n0, packed.row, packed.batch, full + slot, 3);
        } else {
          ptx::tensor_copy_3d(to, &dy_map, packed.n0, packed.row, packed.batch, full + slot);
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
      if (lane == 0) ptx::barrier_arrive(full + slot);
      slot += S::kProducers;
      if (slot >= kStages) {
        slot -= kStages;
        phase ^= 1;
      }
    };

    // Loads are two stages ahead, and go out after the fence, which may wait for what is on its way.
    enter_block();
    Packed first, second;
    load(first);
    load(second);
    while (first.row >= 0) {
      process(first);
      load(first);
      if (second.row < 0) break;
      process(second);
      load(second);
    }
  } else {
    const int warpgroup = warp / 4;
    const int t = lane % 4;
    uint8_t* const staging = ring + kStages * S::kStageBytes + warpgroup * kStagingBytes;
    const auto release = [&](int released) {
      if (lane == 0) {
        ptx::barrier_arrive(empty + released);
        if (params.cluster > 1) ptx::barrier_arrive_at_rank(empty + released, rank ^ 1);
      }
    };
    int slot = 0;
    uint32_t phase = 0;
    float acc[S::kTokens / 2];
    for (int index = first_block; index < params.blocks; index += block_step) {
      int previous = 0;
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
          if constexpr (Arithmetic<X>::kBf16) {
            ptx::WgmmaShared<S::kTokens>::bf16(acc, weights + offset, dy + offset, at + step > 0);
          } else {
            ptx::WgmmaShared<S::kTokens>::f16(acc, weights + offset, dy + offset, at + step > 0);
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
      for (int i = 0; i < S::kTokens / 2; ++i) asm volatile("" : "+f"(acc[i]));  // nobody reads them earlier

      const Block block = block_at<S::kTokens>(params, index, rank);
      const int k_warpgroup = block.k0 + warpgroup * 64;
      const int64_t row0 = static_cast<int64_t>(block.batch) * args.m;
      if (params.wide_result) {  // float32
#pragma unroll
        for (int i = 0; i < S::kTokens / 2; ++i) {
          const int64_t m = block.m0 + i / 4 * 8 + 2 * t + i % 2;
          const int64_t k = k_warpgroup + warp % 4 * 16 + i % 4 / 2 * 8 + g;
          if (m < args.m && k < args.k) static_cast<float*>(args.y)[(row0 + m) * args.k + k] = acc[i];
        }
        continue;
      }
      X* const y = static_cast<X*>(args.y);
#pragma unroll
      for (int first = 0; first < S::kTokens; first += kStagingTokens) {
        if (block.m0 + first >= args.m) break;
#pragma unroll
        for (int i = 0; i < kStagingTokens; i += 16) {  // two runs of 8 tokens x 16 inputs
          const float* d = acc + (first + i) / 2;
          uint32_t pairs[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) pairs[j] = pack_pair(from_float<X>(d[2 * j]), from_float<X>(d[2 * j + 1]));
          const int chunk = (warp % 4 * 2 + lane / 8 % 2) ^ (lane % 8);
          ptx::store_matrices_transposed(staging + (i + lane / 16 * 8 + lane % 8) * 128 + chunk * 16, pairs);
        }
        asm volatile("bar.sync %0, 128;\n" ::"r"(1 + warpgroup) : "memory");
#pragma unroll 4
        for (int i = 0; i < kStagingTokens * 8 / 128; ++i) {
          const int at = i * 128 + threadIdx.x % 128;
          const int token = at / 8, chunk = at % 8;
          const int64_t m = block.m0 + first + token, k = k_warpgroup + chunk * 8;
          if (m >= args.m || k >= args.k) continue;
          const uint8_t* from = staging + token * 128 + (chunk ^ (token % 8)) * 16;
          X* const to = y + (row0 + m) * args.k + k;
          if (params.rows_of_16_bytes) {
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
          } else {
#pragma unroll 1
            for (int j = 0; j < 8 && k + j < args.k; ++j) to[j] = reinterpret_cast<const X*>(from)[j];
          }
        }
        asm volatile("bar.sync %0, 128;\n" ::"r"(1 + warpgroup) : "memory");
      }
    }
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
cudaError_t launch_shape(Params params, const Config& config, cudaStream_t stream) {
  const MatmulArgs& args = params.args;
  MatmulArgs dy = args;
  dy.k = args.n;
  CUtensorMap map;
  if (cudaError_t error = describe_activations(dy, S::kTokens / config.cluster, &map); error != cudaSuccess) {
    return error;
  }
  params.cluster = config.cluster;
  params.token_blocks = static_cast<int>(ceil_div(args.m, S::kTokens));
  params.k_blocks = static_cast<int>(ceil_div(args.k, kBlockK * config.cluster));
  const int64_t blocks = args.batch * params.token_blocks * params.k_blocks;
  if (blocks > INT32_MAX / 2) return cudaErrorInvalidValue;
  params.blocks = static_cast<int>(blocks);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(
      std::min<int64_t>(blocks, std::max(1, config.multiprocessors / config.cluster)) * config.cluster));
  shape.threads = S::kThreads;
  shape.cluster = config.cluster;
  shape.shared_bytes = S::kSharedBytes;
  return launch_kernel(transposed_warpgroup_matmul<S>, shape, stream, params, map);
}

template <typename X, int kBits>
cudaError_t launch_tokens(const Params& params, const Config& config, cudaStream_t stream) {
  const bool small_groups = params.log2_group_blocks == 0 || params.log2_group_blocks == 1;
  if (config.tokens == 128) {
    return small_groups ? launch_shape<Shape<X, kBits, 128, 4>>(params, config, stream)
                        : launch_shape<Shape<X, kBits, 128, 1>>(params, config, stream);
  }
  if (config.tokens != 256) return cudaErrorInvalidValue;
  return small_groups ? launch_shape<Shape<X, kBits, 256, 4>>(params, config, stream)
                      : launch_shape<Shape<X, kBits, 256, 1>>(params, config, stream);
}

template <typename X>
cudaError_t launch_typed(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  Params params{};
  params.args = args;
  params.log2_group_blocks = log2_group_blocks(args);
  const bool integer_zeros =
      args.shift_mode == ShiftMode::kNone || (args.shift_mode == ShiftMode::kZeros && args.shift_dtype == DType::kU8);
  params.simple = integer_zeros && args.scale_dtype == args.x_dtype;
  params.wide_result = args.y_dtype == DType::kF32;
  params.rows_of_16_bytes = args.k % 8 == 0;
  return args.bits == 4 ? launch_tokens<X, 4>(params, config, stream) : launch_tokens<X, 8>(params, config, stream);
}

}  // namespace wonly::transposed_warpgroup
