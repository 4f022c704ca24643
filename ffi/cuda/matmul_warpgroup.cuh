// The product for 9 to a few hundred tokens on Hopper: wgmma with the weights as the register operand, straight from
// the packed format, so that all warps of a CTA share one copy of the activations.
//
// Producer warps keep a ring of stages full: the packed weights of kWarpgroups * 64 outputs x 128 inputs and their
// scales by bulk copies, the activations by the tensor copy engine. Each warpgroup turns its codes into 16-bit numbers
// (code - zero) * 2^-13, which is exact for integer zeros: a mask (the pattern is the subnormal number code * 2^-133 or
// code * 2^-24) and one fused multiply-add. The sums of a group stay exact products of 16-bit numbers in float32; the
// group's scale multiplies them there. CTAs of a cluster split the inputs and add their sums in a fixed order through
// each other's shared memory. A token's result does not depend on the others of a call; the size of the cluster, and
// with it the order of its sums, may depend on how many there are (matmul.cu).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_warpgroup.h"
#include "cuda/ptx_sm90.cuh"
#include "cuda/tensor_map.h"
#include "cuda/wgmma.cuh"
#include "dequant/convert.h"
#include "layout.h"

namespace wonly::warpgroup {

constexpr int kStageK = 128;
constexpr int kStageSteps = kStageK / 16;
constexpr int kMaxStages = 10;
constexpr int kRotation = 5;
constexpr int kBarrierBytes = 1024;  // two for each stage; 1024 keeps the ring aligned for the 128-byte swizzle
constexpr int kMultiprocessorBytes = 228 << 10;
// Of a warp, when it is done with a slot. One lane speaks for all, after the warp has synchronised; racecheck takes
// only what a lane itself arrives for as ordered, so tests/gpu/sanitize.sh has each of them arrive.
#ifdef WONLY_EVERY_LANE_ARRIVES
constexpr int kArrivals = 32;
#else
constexpr int kArrivals = 1;
#endif

template <typename X_, int kBits_, int kTokens_, int kWarpgroups_, int kFlushes_>
struct Shape {
  using X = X_;
  static constexpr int kBits = kBits_;
  static constexpr int kTokens = kTokens_;
  static constexpr int kWarpgroups = kWarpgroups_;  // 64 outputs each
  static constexpr int kFlushes = kFlushes_;        // group ends in a stage: 1, or 4 for groups of 32 and 64
  static constexpr int kRows = kWarpgroups * kTileN;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;  // the last warpgroup produces

  // Four warpgroups fill a multiprocessor. Of two, two CTAs share it, so that one streams while the other starts or
  // ends; from 64 tokens on the accumulators leave no room for that.
  static constexpr int kCtas = kWarpgroups == 4 || kTokens > 32 ? 1 : 2;
  static constexpr int kLaunchRegisters = 65536 / (kCtas * kThreads) / 8 * 8;
  static constexpr int kProducerRegisters = kWarpgroups == 4 ? 32 : 40;
  // What the consumers gain, the producer gives up: a CTA keeps the registers that it was launched with.
  static constexpr int kConsumerRegisters =
      (kLaunchRegisters + (kLaunchRegisters - kProducerRegisters) / kWarpgroups) / 8 * 8;
  static_assert(kConsumerRegisters <= 232);

  static constexpr int kTiles = kStageK / tile_k(kBits);  // packed tiles of a stage along the inputs
  static constexpr int kHalfBytes = kTokens * 128;        // activations: two boxes of 64 inputs
  static constexpr int kXBytes = 2 * kHalfBytes;
  static constexpr int kWeightBytes = kWarpgroups * kTiles * kTileBytes;
  static constexpr int kScaleBytes = kFlushes * kRows * 4;  // as many groups end in a stage; every type has room
  static constexpr int kZeroBytes = kFlushes * kRows;
  static constexpr int kWeightsAt = kXBytes;
  static constexpr int kScalesAt = kWeightsAt + kWeightBytes;
  static constexpr int kZerosAt = kScalesAt + kScaleBytes;
  static constexpr int kStageBytes = (kZerosAt + kZeroBytes + 1023) / 1024 * 1024;
  static constexpr int kFit =
      (kMultiprocessorBytes / kCtas - 1024 - kBarrierBytes) / kStageBytes;  // 1 KiB is the system's
  static constexpr int kStages = kFit < kMaxStages ? kFit : kMaxStages;
  static constexpr int kPartialStride = kRows + 4;  // floats of a token's partial sums
  static_assert(kStages >= 3 && kTokens * kPartialStride * 4 <= kStages * kStageBytes);
  static_assert(kStageBytes % 1024 == 0 && kHalfBytes % 1024 == 0);
};

// A slot of the ring and how often, modulo 2, the walk has been around.
template <int kStages>
struct RingPosition {
  int slot = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    if (++slot == kStages) {
      slot = 0;
      phase ^= 1;
    }
  }
};

struct Params {
  MatmulArgs args;
  int cluster;
  int token_tiles;
  int log2_group_blocks;  // group size = 32 << this; -1: one scale per output
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

// A operands of the steps of 16 inputs that one 16-byte vector of a lane holds: 4 for int4, 2 for int8.
template <typename X, int kBits>
__device__ __forceinline__ void convert(const uint4& words, uint32_t zero_low, uint32_t zero_high, uint32_t (*a)[4]) {
  using C = Convert<X>;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t low = half == 0 ? words.x : words.z, high = half == 0 ? words.y : words.w;
    if constexpr (kBits == 4) {
      uint32_t l[4], h[4];
      uint4_to_subnormal(low, l);
      uint4_to_subnormal(high, h);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        a[half * 2 + step][0] = C::fma(l[2 * step], C::kFactor, zero_low);
        a[half * 2 + step][1] = C::fma(h[2 * step], C::kFactor, zero_high);
        a[half * 2 + step][2] = C::fma(l[2 * step + 1], C::kFactorOfOdd, zero_low);
        a[half * 2 + step][3] = C::fma(h[2 * step + 1], C::kFactorOfOdd, zero_high);
      }
    } else {
      uint32_t l[2], h[2];
      uint8_to_subnormal(low, l);
      uint8_to_subnormal(high, h);
      a[half][0] = C::fma(l[0], C::kFactor, zero_low);
      a[half][1] = C::fma(h[0], C::kFactor, zero_high);
      a[half][2] = C::fma(l[1], C::kFactor, zero_low);
      a[half][3] = C::fma(h[1], C::kFactor, zero_high);
    }
  }
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kCtas)
    warpgroup_matmul(const __grid_constant__ Params params, const __grid_constant__ CUtensorMap x_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using X = typename S::X;
  using C = Convert<X>;
  extern __shared__ __align__(1024) uint8_t shared[];
  uint64_t* full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* empty = full + S::kStages;
  uint8_t* const ring = shared + kBarrierBytes;

  const MatmulArgs& args = params.args;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int rank = blockIdx.x % params.cluster;
  const int tile = blockIdx.x / params.cluster;
  const int row_block = tile / params.token_tiles;
  const int m0 = tile % params.token_tiles * S::kTokens;  // token tiles of the same weights run together
  const int64_t n0 = static_cast<int64_t>(row_block) * S::kRows;
  const int64_t batch = blockIdx.y;

  const int stages = static_cast<int>(ceil_div(args.k, kStageK));
  const int first_stage = static_cast<int>(static_cast<int64_t>(stages) * rank / params.cluster);
  const int end_stage = static_cast<int>(static_cast<int64_t>(stages) * (rank + 1) / params.cluster);
  const int stage_count = end_stage - first_stage;
  // CTAs that walk the inputs in step would all read addresses a multiple of a large power of two apart, which share
  // memory channels: each begins somewhere else in its run, and wraps around.
  const int rotation = stage_count > 0 ? row_block * kRotation % stage_count : 0;
  const auto stage_at = [&](int index) {
    const int at = index + rotation;
    return first_stage + (at < stage_count ? at : at - stage_count);
  };
  const int k_tiles = static_cast<int>(ceil_div(args.k, tile_k(S::kBits)));
  const int blocks = static_cast<int>(ceil_div(args.k, 32));

  const bool grouped = params.log2_group_blocks >= 0;
  const bool has_zeros = args.shift_mode == ShiftMode::kZeros;
  const int scale_size = element_size(args.scale_dtype);
  const uint8_t* scales = static_cast<const uint8_t*>(args.scales) + batch * args.scales_batch_stride * scale_size;
  const uint8_t* zeros = static_cast<const uint8_t*>(args.shift) + batch * args.shift_batch_stride;

  const int row_tiles = static_cast<int>(min(static_cast<int64_t>(S::kWarpgroups), ceil_div(args.n - n0, kTileN)));
  const int producers = max(row_tiles, 2);

  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      ptx::barrier_init(full + i, producers);
      ptx::barrier_init(empty + i, S::kWarpgroups * 4 * kArrivals);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();

  if (warp >= S::kWarpgroups * 4) {
    ptx::lower_registers<S::kProducerRegisters>();
    // Warp w of the producer brings the weights of row tile w; the first also activations, the second scales and zeros.
    // All lanes walk along, so that addresses stay in uniform registers, and one of them issues.
    const int producer = __shfl_sync(0xffffffffu, warp, 0) - S::kWarpgroups * 4;
    const uint32_t* words = args.qw + batch * args.qw_batch_stride + (n0 / kTileN + producer) * k_tiles * kTileWords;
    const int x_batch = args.x_batch_stride == 0 ? 0 : static_cast<int>(batch);
    const int outputs = static_cast<int>(min(static_cast<int64_t>(S::kRows), args.n - n0));
    const int scale_row_bytes = outputs * scale_size;
    const int zero_row_bytes = has_zeros ? outputs : 0;
    RingPosition<S::kStages> at;
    if (producer < producers) {
      for (int index = 0; index < stage_count; ++index, at.advance()) {
        const int stage = stage_at(index);
        if (index >= S::kStages) ptx::barrier_wait(empty + at.slot, at.phase ^ 1);
        if (!ptx::elect_one()) continue;
        uint8_t* to = ring + at.slot * S::kStageBytes;
        uint64_t* done = full + at.slot;
        const int tile_bytes = min(S::kTiles, k_tiles - stage * S::kTiles) * kTileBytes;
        const int groups = grouped ? min(S::kFlushes, blocks - stage * (kStageK / 32)) : 0;
        const int mine = producer == 0 ? S::kXBytes : producer == 1 ? groups * (scale_row_bytes + zero_row_bytes) : 0;
        ptx::barrier_expect(done, mine + (producer < row_tiles ? tile_bytes : 0));
        if (producer < row_tiles) {
          ptx::bulk_copy(to + S::kWeightsAt + producer * S::kTiles * kTileBytes,
                         words + static_cast<int64_t>(stage) * S::kTiles * kTileWords, tile_bytes, done);
        }
        if (producer == 0) {
          ptx::tensor_copy_3d(to, &x_map, stage * kStageK, m0, x_batch, done);
          ptx::tensor_copy_3d(to + S::kHalfBytes, &x_map, stage * kStageK + 64, m0, x_batch, done);
        } else if (producer == 1) {
          for (int i = 0; i < groups; ++i) {
            const int64_t first = ((stage * (kStageK / 32) + i) >> params.log2_group_blocks) * args.n + n0;
            ptx::bulk_copy(to + S::kScalesAt + i * S::kRows * 4, scales + first * scale_size, scale_row_bytes, done);
            if (has_zeros) ptx::bulk_copy(to + S::kZerosAt + i * S::kRows, zeros + first, zero_row_bytes, done);
          }
        }
      }
    }
    __syncwarp();
  } else {
    ptx::raise_registers<S::kConsumerRegisters>();
    const int warpgroup = warp / 4;
    const int g = lane / 4;
    const int t = lane % 4;
    const int row = warpgroup * kTileN + warp % 4 * kAtomN + g;  // this lane's outputs: n0 + row and n0 + row + 8
    const bool wide_scales = args.scale_dtype == DType::kF32;
    const bool bf16_scales = args.scale_dtype == DType::kBF16;
    float scale[2];
    uint32_t zero[2] = {C::minus_zero(static_cast<float>(bias_of(S::kBits))),
                        C::minus_zero(static_cast<float>(bias_of(S::kBits)))};
    const auto set_scales = [&](const uint8_t* at) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t bits =
            wide_scales ? reinterpret_cast<const uint32_t*>(at)[8 * i] : reinterpret_cast<const uint16_t*>(at)[8 * i];
        const float narrow =
            bf16_scales ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
        scale[i] = (wide_scales ? __uint_as_float(bits) : narrow) * C::kUnscale;
      }
    };
    const auto set_zeros = [&](const uint8_t* at) {
      if (!has_zeros) return;
#pragma unroll
      for (int i = 0; i < 2; ++i) zero[i] = C::minus_zero(static_cast<float>(at[8 * i]));
    };
    if (!grouped) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t n = min(n0 + row + 8 * i, args.n - 1);
        scale[i] = load_element(scales, n, args.scale_dtype) * C::kUnscale;
        if (has_zeros) zero[i] = C::minus_zero(static_cast<float>(zeros[n]));
      }
    }

    float acc[S::kTokens / 2] = {};
    constexpr int kVectorSteps = S::kBits == 4 ? 4 : 2;  // steps of 16 inputs that one 16-byte vector of words holds
    RingPosition<S::kStages> at;
    const auto stage_data = [&]() { return ring + at.slot * S::kStageBytes; };
    const auto wait_full = [&]() { ptx::barrier_wait(full + at.slot, at.phase); };
    const auto release = [&](int slot) {
      __syncwarp();
      if (lane < kArrivals) ptx::barrier_arrive(empty + slot);
    };
    const auto convert_steps = [&](const uint8_t* data, int step, uint32_t (*to)[4]) {
      const uint8_t* words = data + S::kWeightsAt + (warpgroup * S::kTiles + step / kVectorSteps) * kTileBytes;
      convert<X, S::kBits>(reinterpret_cast<const uint4*>(words)[warp % 4 * 32 + lane], zero[0], zero[1], to);
    };
    float part[S::kTokens / 2];
    const auto multiply = [&](uint64_t x, int step, const uint32_t (&a)[4], bool accumulate) {
      const uint64_t operand_x = x + ((step / 4 * S::kHalfBytes + step % 4 * 32) >> 4);
      if constexpr (C::kBf16) {
        ptx::Wgmma<S::kTokens>::bf16(part, a, operand_x, accumulate);
      } else {
        ptx::Wgmma<S::kTokens>::f16(part, a, operand_x, accumulate);
      }
    };

    if constexpr (S::kFlushes == 1) {
      // A unit is half a stage: the codes of the next one are converted while the tensor cores work on this one.
      constexpr int kUnit = kStageSteps / 2;
      uint32_t first[kUnit][4], second[kUnit][4];
      const auto convert_unit = [&](const uint8_t* data, int unit, uint32_t (&to)[kUnit][4]) {
#pragma unroll
        for (int step = 0; step < kUnit; step += kVectorSteps) convert_steps(data, unit * kUnit + step, to + step);
      };
      const auto multiply_unit = [&](uint64_t x, int unit, const uint32_t (&a)[kUnit][4]) {
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < kUnit; ++step) multiply(x, unit * kUnit + step, a[step], unit + step > 0);
        ptx::wgmma_commit();
      };
      const uint8_t* data = stage_data();
      if (stage_count > 0) {
        wait_full();
        if (grouped) set_zeros(data + S::kZerosAt + row);
        convert_unit(data, 0, first);
      }
      for (int index = 0; index < stage_count; ++index) {
        const uint64_t x = ptx::wgmma_descriptor(data);
        const int slot = at.slot;
        multiply_unit(x, 0, first);
        convert_unit(data, 1, second);
        multiply_unit(x, 1, second);
        if (grouped) set_scales(data + S::kScalesAt + row * scale_size);
        ptx::wgmma_wait<1>();
        at.advance();
        data = stage_data();
        if (index + 1 < stage_count) {
          wait_full();
          if (grouped) set_zeros(data + S::kZerosAt + row);
          convert_unit(data, 0, first);
        }
        ptx::wgmma_wait<0>();
        release(slot);
#pragma unroll
        for (int i = 0; i < S::kTokens / 2; ++i) acc[i] = fmaf(scale[i % 4 / 2], part[i], acc[i]);
      }
    } else {
      for (int index = 0; index < stage_count; ++index, at.advance()) {
        const uint8_t* data = stage_data();
        const uint64_t x = ptx::wgmma_descriptor(data);
        wait_full();
#pragma unroll
        for (int flush = 0; flush < S::kFlushes; ++flush) {
          if (stage_at(index) * (kStageK / 32) + flush >= blocks) break;  // no scales were copied for it
          constexpr int kSteps = kStageSteps / S::kFlushes;
          set_scales(data + S::kScalesAt + flush * S::kRows * 4 + row * scale_size);
          set_zeros(data + S::kZerosAt + flush * S::kRows + row);
          uint32_t a[kVectorSteps][4];
          const int step = flush * kSteps;
          convert_steps(data, step, a);
          ptx::wgmma_fence();
#pragma unroll
          for (int i = 0; i < kSteps; ++i) multiply(x, step + i, a[(step + i) % kVectorSteps], i > 0);
          ptx::wgmma_commit();
          ptx::wgmma_wait<0>();
#pragma unroll
          for (int i = 0; i < S::kTokens / 2; ++i) acc[i] = fmaf(scale[i % 4 / 2], part[i], acc[i]);
        }
        release(at.slot);
      }
    }

    // Every warpgroup is done with the ring, and every copy has landed: partial sums take its place.
    asm volatile("bar.sync 1, %0;\n" ::"n"(S::kWarpgroups * 128) : "memory");
    float* partial = reinterpret_cast<float*>(ring);
#pragma unroll
    for (int i = 0; i < S::kTokens / 2; ++i) {
      partial[(i / 4 * 8 + 2 * t + i % 2) * S::kPartialStride + row + i % 4 / 2 * 8] = acc[i];
    }
  }

  __syncthreads();
  if (params.cluster > 1) ptx::cluster_share();
  const int tokens = static_cast<int>(min(static_cast<int64_t>(S::kTokens), args.m - m0));
  constexpr int kQuads = S::kRows / 4;
  const float* partial = reinterpret_cast<const float*>(ring);
  for (int i = rank * S::kThreads + threadIdx.x; i < tokens * kQuads; i += params.cluster * S::kThreads) {
    const int token = i / kQuads, quad = i % kQuads;
    const int64_t n = n0 + quad * 4;
    if (n >= args.n) continue;
    const float* at = partial + token * S::kPartialStride + quad * 4;
    float sum[4] = {};
    for (int other = 0; other < params.cluster; ++other) {
      const float4 v =
          params.cluster == 1 ? *reinterpret_cast<const float4*>(at) : ptx::load4_shared_of_rank(at, other);
      sum[0] += v.x;
      sum[1] += v.y;
      sum[2] += v.z;
      sum[3] += v.w;
    }
    finish4(args, batch, m0 + token, n, sum);
  }
  if (params.cluster > 1) ptx::cluster_leave();
#else
  __trap();
#endif
}

template <typename S>
cudaError_t launch_shape(const Params& params, const Config& config, cudaStream_t stream) {
  CUtensorMap map;
  if (cudaError_t error = describe_activations(params.args, S::kTokens, &map); error != cudaSuccess) return error;
  Params p = params;
  p.token_tiles = static_cast<int>(ceil_div(p.args.m, S::kTokens));
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(ceil_div(p.args.n, S::kRows) * p.token_tiles * config.cluster),
                    static_cast<unsigned>(p.args.batch));
  shape.threads = S::kThreads;
  shape.cluster = config.cluster;
  shape.shared_bytes = kBarrierBytes + S::kStages * S::kStageBytes;
  if (S::kCtas > 1 && shape.grid.x * shape.grid.y <= static_cast<unsigned>(config.multiprocessors)) {
    // The scheduler would put a cluster's CTAs together on few multiprocessors; too much shared memory for two keeps
    // them apart.
    shape.shared_bytes = std::max(shape.shared_bytes, kMultiprocessorBytes / 2);
  }
  return launch_kernel(warpgroup_matmul<S>, shape, stream, p, map);
}

template <typename X, int kBits, int kFlushes>
cudaError_t launch_tokens(const Params& params, const Config& config, cudaStream_t stream) {
  const auto select = [&](auto tokens) {
    return config.warpgroups == 2 ? launch_shape<Shape<X, kBits, tokens.value, 2, kFlushes>>(params, config, stream)
                                  : launch_shape<Shape<X, kBits, tokens.value, 4, kFlushes>>(params, config, stream);
  };
  switch (config.tokens) {
    case 16:
      return select(std::integral_constant<int, 16>{});
    case 32:
      return select(std::integral_constant<int, 32>{});
    case 64:
      return select(std::integral_constant<int, 64>{});
    case 128:
      return launch_shape<Shape<X, kBits, 128, 2, kFlushes>>(params, config, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

template <typename X>
cudaError_t launch_typed(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  Params params{};
  params.args = args;
  params.cluster = config.cluster;
  params.log2_group_blocks = log2_group_blocks(args);
  const bool small_groups = params.log2_group_blocks == 0 || params.log2_group_blocks == 1;
  if (args.bits == 4) {
    return small_groups ? launch_tokens<X, 4, 4>(params, config, stream)
                        : launch_tokens<X, 4, 1>(params, config, stream);
  }
  return small_groups ? launch_tokens<X, 8, 4>(params, config, stream) : launch_tokens<X, 8, 1>(params, config, stream);
}

}  // namespace wonly::warpgroup
