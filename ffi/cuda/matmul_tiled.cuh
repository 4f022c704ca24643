// The product for hundreds of tokens and more on Hopper, bound by the tensor cores: wgmma with the weights as the
// register operand, straight from the packed format.
//
// Two CTAs of a cluster compute neighbouring blocks of 128 outputs for the same tokens. One producer lane of each keeps
// a ring of stages of 64 inputs full: its own packed weights, and half of the activations for both. Two warpgroups of
// 64 outputs turn their codes into weights of the activations' type (rounded once, as a dequantized weight is) while
// the tensor cores work on the stage before. CTAs stay and walk over the tiles. Sums are in float32, in an order that
// depends on the number of tokens alone.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_tiled.h"
#include "cuda/ptx_sm90.cuh"
#include "cuda/tensor_map.h"
#include "dequant/convert.h"
#include "layout.h"

namespace wonly::tiled {

constexpr int kStageK = kStageInputs;
constexpr int kSteps = kStageK / 16;
constexpr int kTokens = kTileTokens;
constexpr int kWarpgroups = 2;  // that multiply, 64 outputs each
constexpr int kRows = kWarpgroups * kTileN;
constexpr int kCluster = kClusterCtas;
static_assert(kCluster * kRows == kTileOutputs);
constexpr int kThreads = (kWarpgroups + 1) * 128;  // the last warpgroup produces
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kBarrierBytes = 1024;        // keeps the ring aligned for the 128-byte swizzle
constexpr int kAffineWarps = kRows / 64;   // of the producer's, two outputs per lane
constexpr int kBandTiles = 8;              // token tiles that are walked together, for the cache
constexpr int kStagedTokens = 32;          // that a warpgroup writes at a time
constexpr int kStagedStride = kTileN + 4;  // floats of a token, so that no two lanes share a bank

// What turns the codes of one output and group into weights: code * scale + offset where the codes' zero is a power of
// two (or offsets are given, which are the same), else (code - zero) * scale. Each in both halves of a register.
struct alignas(16) Affine {
  uint32_t scale, scale_of_odd;  // of even and odd pairs of int4, whose masked codes count 16 times as much
  uint32_t offset, minus_zero;
};

template <typename X_, int kBits_, bool kZeros_>
struct Shape {
  using X = X_;
  static constexpr int kBits = kBits_;
  static constexpr bool kZeros = kZeros_;
  static constexpr int kTiles = kStageK / tile_k(kBits);  // packed tiles of a stage along the inputs
  static constexpr int kXBytes = kTokens * kStageK * 2;
  static constexpr int kWeightBytes = kTiles * kTileBytes;  // of a warpgroup
  static constexpr int kAffineAt = kXBytes + kWarpgroups * kWeightBytes;
  static constexpr int kStageBytes = kAffineAt + 2 * kRows * static_cast<int>(sizeof(Affine));
  static constexpr int kStagedBytes = kWarpgroups * kStagedTokens * kStagedStride * 4;
  static constexpr int kFit = ((227 << 10) - kBarrierBytes - kStagedBytes) / kStageBytes;
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  static constexpr int kSharedBytes = kBarrierBytes + kStages * kStageBytes + kStagedBytes;
  static_assert(kStageBytes % 1024 == 0 && kStages >= 4);
};

// Tiles are dealt out in whole waves, one to each cluster. Of the last wave, where it is not whole, `splits` clusters
// share a tile's inputs: all but the last leave their sums in `partial`, and the last, which comes after them in the
// order in which CTAs start, waits and adds them in order.
struct Params {
  MatmulArgs args;
  int token_tiles, row_tiles;  // row tiles: of kCluster * kRows outputs
  int log2_group_blocks;       // group size = 32 << this; -1: one scale per output
  int waves, rest, splits;     // rest: tiles of the last wave
  uint32_t* arrived;           // [rest, kCluster, kWarpgroups], zero at the start
  float4* partial;             // [rest, splits - 1, kCluster, kWarpgroups, kTokens / 8, 128]
};

// bf16: a masked code is the number code * 2^-133 (convert.h). Without zeros the scale makes it a weight in one step,
// in units of 2^-64, which the sum gives back. With zeros the first step counts units of 2^-6. fp16 has no exponents to
// spare, but mantissa enough to count codes from 1024.
template <typename S>
struct Convert {
  using X = typename S::X;
  static constexpr bool kBf16 = std::is_same_v<X, __nv_bfloat16>;
  static constexpr bool kOneStep = kBf16 && !S::kZeros;
  static constexpr float kUnit = kOneStep ? 0x1p-64f : 1.f;  // of the weights
  static constexpr float kCodeUnit = !kBf16 ? 1.f : S::kZeros ? 0x1p-6f : 1.f;
  static constexpr uint32_t kFactor = 0x7f007f00u, kFactorOfOdd = 0x7d007d00u;  // 2^127, 2^123

  __device__ static uint32_t pair(float value) {
    const X rounded = from_float<X>(value);
    return pack_pair(rounded, rounded);
  }
  __device__ static uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    if constexpr (kBf16) {
      asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    } else {
      asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    }
    return d;
  }

  __device__ static Affine affine(float scale, float shift, ShiftMode mode) {
    const float zero = mode == ShiftMode::kZeros ? shift : static_cast<float>(bias_of(S::kBits));
    Affine to;
    if constexpr (kOneStep) {
      to.scale = pair(scale * 0x1p+69f);
      to.scale_of_odd = pair(scale * 0x1p+65f);
      to.offset = pair((mode == ShiftMode::kOffsets ? shift : -zero * scale) * kUnit);
      to.minus_zero = 0;
    } else {
      to.scale = to.scale_of_odd = pair(scale / kCodeUnit);
      to.offset = pair(mode == ShiftMode::kOffsets ? shift : S::kZeros ? 0.f : -zero * scale);
      to.minus_zero = pair(-zero * kCodeUnit);
    }
    return to;
  }

  // The codes of a word as weights, pairs of neighbouring inputs: 4 of them for int4, 2 for int8.
  __device__ static void weights(uint32_t word, const Affine& affine, uint32_t (&out)[16 / S::kBits]) {
    if constexpr (kBf16 && S::kBits == 4) {
      uint4_to_subnormal(word, out);
    } else if constexpr (kBf16) {
      uint8_to_subnormal(word, out);
    } else if constexpr (S::kBits == 4) {
      uint4_to_f16(word, out);
    } else {
      uint8_to_f16(word, out);
    }
#pragma unroll
    for (int i = 0; i < 16 / S::kBits; ++i) {
      const bool odd = kBf16 && S::kBits == 4 && i % 2 == 1;
      if constexpr (S::kZeros) {
        out[i] = kBf16 ? fma(out[i], odd ? kFactorOfOdd : kFactor, affine.minus_zero)
                       : fma(out[i], 0x3c003c00u, affine.minus_zero);
      }
      out[i] = fma(out[i], odd ? affine.scale_of_odd : affine.scale, affine.offset);
    }
  }
};

template <typename S>
__global__ void __launch_bounds__(kThreads, 1)
    tiled_matmul(const __grid_constant__ Params params, const __grid_constant__ CUtensorMap x_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using X = typename S::X;
  using C = Convert<S>;
  extern __shared__ __align__(1024) uint8_t shared[];
  uint64_t* full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* empty = full + S::kStages;
  uint8_t* const ring = shared + kBarrierBytes;

  const MatmulArgs& args = params.args;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);  // known to be uniform
  const int lane = threadIdx.x % 32;
  const int rank = blockIdx.x % kCluster;
  const int stages = static_cast<int>(ceil_div(args.k, kStageK));
  const int tiles_per_batch = params.token_tiles * params.row_tiles;
  const int cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;

  struct Work {
    int64_t batch, m0, n0;
    int first, end;  // stages
    int rest, split;
  };
  const int work_count = params.waves + (cluster < params.rest * params.splits ? 1 : 0);
  const auto work_at = [&](int wave) {
    Work work{};
    work.end = stages;
    int index = wave * clusters + cluster;
    if (wave == params.waves) {
      work.rest = cluster % params.rest;
      work.split = cluster / params.rest;
      work.first = stages * work.split / params.splits;
      work.end = stages * (work.split + 1) / params.splits;
      index = wave * clusters + work.rest;
    }
    const int at = index % tiles_per_batch;
    const int band = at / (kBandTiles * params.row_tiles), in_band = at % (kBandTiles * params.row_tiles);
    const int height = min(kBandTiles, params.token_tiles - band * kBandTiles);
    work.batch = index / tiles_per_batch;
    work.m0 = static_cast<int64_t>(band * kBandTiles + in_band % height) * kTokens;
    work.n0 = (static_cast<int64_t>(in_band / height) * kCluster + rank) * kRows;
    return work;
  };

  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      ptx::barrier_init(full + i, 1 + kAffineWarps);
      ptx::barrier_init(empty + i, kCluster * kWarpgroups * 4);
    }
    ptx::barrier_init_fence();
  }
  ptx::cluster_sync();  // the other CTA's copies and arrivals come to these barriers

  int slot = 0;
  uint32_t phase = 0;
  const auto advance = [&] {
    if (++slot == S::kStages) {
      slot = 0;
      phase ^= 1;
    }
  };

  if (warp >= kWarpgroups * 4) {
    ptx::lower_registers<kProducerRegisters>();
    if (warp == kWarpgroups * 4) {
      const int k_tiles = static_cast<int>(ceil_div(args.k, tile_k(S::kBits)));
      const int64_t n_tiles = ceil_div(args.n, kTileN);
      for (int wave = 0; wave < work_count; ++wave) {
        const Work work = work_at(wave);
        const uint32_t* words = args.qw + work.batch * args.qw_batch_stride + work.n0 / kTileN * k_tiles * kTileWords;
        const int strips = static_cast<int>(max(min(n_tiles - work.n0 / kTileN, int64_t{kWarpgroups}), int64_t{0}));
        const int x_batch = args.x_batch_stride == 0 ? 0 : static_cast<int>(work.batch);
        for (int stage = work.first; stage < work.end; ++stage, advance()) {
          ptx::barrier_wait(empty + slot, phase ^ 1);
          if (!ptx::elect_one()) continue;
          uint8_t* to = ring + slot * S::kStageBytes;
          const int tile_bytes = min(S::kTiles, k_tiles - stage * S::kTiles) * kTileBytes;
          ptx::barrier_expect(full + slot, S::kXBytes + strips * tile_bytes);
          ptx::tensor_copy_3d_multicast(to + rank * (S::kXBytes / kCluster), &x_map, stage * kStageK,
                                        static_cast<int>(work.m0) + rank * (kTokens / kCluster), x_batch, full + slot,
                                        (1 << kCluster) - 1);
          for (int i = 0; i < strips; ++i) {
            ptx::bulk_copy(to + S::kXBytes + i * S::kWeightBytes,
                           words + (static_cast<int64_t>(i) * k_tiles + stage * S::kTiles) * kTileWords, tile_bytes,
                           full + slot);
          }
        }
      }
    } else if (warp <= kWarpgroups * 4 + kAffineWarps) {
      // Factors are made once for a group, of scales and shifts that are fetched one group before they are needed.
      const int first = (warp - kWarpgroups * 4 - 1) * 64 + lane;
      const int shift_bytes = args.shift_mode == ShiftMode::kNone ? 0 : element_size(args.shift_dtype);
      const int sets = params.log2_group_blocks == 0 ? 2 : 1;
      const auto group_of = [&](int block) {
        return params.log2_group_blocks < 0 ? 0 : block >> params.log2_group_blocks;
      };
      for (int wave = 0; wave < work_count; ++wave) {
        const Work work = work_at(wave);
        const X* scales[2];
        const uint8_t* shifts[2];
        X scale[2];
        uint16_t shift[2];
        int group = group_of(2 * work.first);  // the next to fetch
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int64_t at = group * args.n + min(work.n0 + first + 32 * i, args.n - 1);
          scales[i] = static_cast<const X*>(args.scales) + work.batch * args.scales_batch_stride + at;
          shifts[i] =
              static_cast<const uint8_t*>(args.shift) + (work.batch * args.shift_batch_stride + at) * shift_bytes;
        }
        const auto fetch = [&] {
          if (group >= args.groups) return;
          ++group;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            scale[i] = *scales[i];
            if (shift_bytes == 1) shift[i] = *shifts[i];
            if (shift_bytes == 2) shift[i] = *reinterpret_cast<const uint16_t*>(shifts[i]);
            scales[i] += args.n;
            shifts[i] += args.n * shift_bytes;
          }
        };
        Affine affine[2];
        fetch();
        for (int stage = work.first, made = -1; stage < work.end; ++stage, advance()) {
          ptx::barrier_wait(empty + slot, phase ^ 1);
          Affine* to = reinterpret_cast<Affine*>(ring + slot * S::kStageBytes + S::kAffineAt) + first;
          for (int set = 0; set < sets; ++set, to += kRows) {
            if (const int wanted = group_of(2 * stage + set); wanted != made) {
              made = wanted;
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                const float value = shift_bytes == 0   ? 0.f
                                    : shift_bytes == 1 ? static_cast<float>(shift[i])
                                                       : load_element(&shift[i], 0, args.x_dtype);
                affine[i] = C::affine(to_float(scale[i]), value, args.shift_mode);
              }
              fetch();
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) to[32 * i] = affine[i];
          }
          __syncwarp();
          if (lane == 0) ptx::barrier_arrive(full + slot);
        }
      }
    }
    __syncwarp();
  } else {
    ptx::raise_registers<kConsumerRegisters>();
    const int warpgroup = warp / 4;
    const int g = lane / 4;
    const int t = lane % 4;
    const int row = warp % 4 * kAtomN + g;  // of the warpgroup's outputs, and row + 8
    const auto sync = [&] {
      if (warpgroup == 0) {
        ptx::warpgroup_sync<1>();
      } else {
        ptx::warpgroup_sync<2>();
      }
    };
    float* const staged =
        reinterpret_cast<float*>(ring + S::kStages * S::kStageBytes) + warpgroup * kStagedTokens * kStagedStride;

    const bool plain = args.activation == Activation::kNone && args.y_dtype == args.x_dtype && args.n % 8 == 0;
    const bool small_groups = params.log2_group_blocks == 0;  // two of them in a stage

    float acc[kTokens / 2];
    Affine affine[2][2];  // of the halves of a stage, and of the outputs row and row + 8

    for (int wave = 0; wave < work_count; ++wave) {
      const Work work = work_at(wave);
      const int64_t n0 = work.n0 + warpgroup * kTileN;
      // Codes of a stage, which has landed: one vector of each of its packed tiles.
      uint4 words[S::kTiles];
      const auto load_words = [&] {
        const uint8_t* data = ring + slot * S::kStageBytes + S::kXBytes + warpgroup * S::kWeightBytes;
#pragma unroll
        for (int i = 0; i < S::kTiles; ++i) {
          words[i] = reinterpret_cast<const uint4*>(data + i * kTileBytes)[warp % 4 * 32 + lane];
        }
      };
      // Half a stage's weights as A operands.
      const auto convert_half = [&](int half, uint32_t (&to)[kSteps / 2][4]) {
#pragma unroll
        for (int part = 0; part < S::kTiles; ++part) {  // of 32 inputs for int4, 16 for int8
          const uint4& four = words[S::kBits == 4 ? 0 : half];
          const bool upper = S::kBits == 4 ? half == 1 : part == 1;
          uint32_t low[16 / S::kBits], high[16 / S::kBits];
          C::weights(upper ? four.z : four.x, affine[half][0], low);
          C::weights(upper ? four.w : four.y, affine[half][1], high);
#pragma unroll
          for (int i = 0; i < 16 / S::kBits; ++i) {
            to[part + i / 2][i % 2 * 2] = low[i];
            to[part + i / 2][i % 2 * 2 + 1] = high[i];
          }
        }
      };
      const auto multiply_half = [&](int half, const uint32_t (&with)[kSteps / 2][4], bool accumulate) {
        const uint64_t x = ptx::wgmma_descriptor(ring + slot * S::kStageBytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kSteps / 2; ++i) {
          const uint64_t operand_x = x + ((half * kSteps / 2 + i) * 32 >> 4);
          if constexpr (C::kBf16) {
            ptx::Wgmma<kTokens>::bf16(acc, with[i], operand_x, accumulate || i > 0);
          } else {
            ptx::Wgmma<kTokens>::f16(acc, with[i], operand_x, accumulate || i > 0);
          }
        }
        ptx::wgmma_commit();
      };
      const auto release = [&](int of) {  // to both producers, which fill this CTA's slot together
        __syncwarp();
        if (lane < kCluster) ptx::barrier_arrive_at_rank(empty + of, lane);
      };
      // All that is needed to convert the codes of the stage at `slot`.
      const auto prepare = [&] {
        ptx::barrier_wait(full + slot, phase);
        load_words();
        const Affine* factors =
            reinterpret_cast<const Affine*>(ring + slot * S::kStageBytes + S::kAffineAt) + warpgroup * kTileN + row;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            affine[half][i] = half == 0 || small_groups ? factors[half * kRows + 8 * i] : affine[0][i];
          }
        }
      };

      prepare();
      int last_slot = 0;
#pragma unroll 1
      for (int stage = work.first; stage < work.end; ++stage) {
        uint32_t first[kSteps / 2][4], second[kSteps / 2][4];
        convert_half(0, first);
        multiply_half(0, first, stage > work.first);
        ptx::wgmma_wait<1>();
        if (stage > work.first) release(last_slot);
        convert_half(1, second);
        multiply_half(1, second, true);
        last_slot = slot;
        advance();
        if (stage + 1 < work.end) prepare();
        ptx::wgmma_wait<1>();
      }
      ptx::wgmma_wait<0>();
      release(last_slot);

      // Through shared memory, so that a token's outputs leave together.
      if (n0 >= args.n) continue;
      const int thread = threadIdx.x % 128;
      if (wave == params.waves && params.splits > 1) {
        const int at = (work.rest * kCluster + rank) * kWarpgroups + warpgroup;
        const auto partial_of = [&](int split) {
          const int64_t slice =
              ((static_cast<int64_t>(work.rest) * (params.splits - 1) + split) * kCluster + rank) * kWarpgroups +
              warpgroup;
          return params.partial + slice * (kTokens / 8 * 128) + thread;
        };
        if (work.split < params.splits - 1) {
          float4* to = partial_of(work.split);
#pragma unroll
          for (int i = 0; i < kTokens / 8; ++i) {
            to[i * 128] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
          }
          sync();
          if (thread == 0) ptx::add_release(params.arrived + at, 1);
          continue;
        }
        if (thread == 0) {
          while (ptx::load_acquire(params.arrived + at) != static_cast<uint32_t>(params.splits - 1)) {
          }
        }
        sync();
        for (int split = params.splits - 2; split >= 0; --split) {
          const float4* from = partial_of(split);
#pragma unroll
          for (int i = 0; i < kTokens / 8; ++i) {
            const float4 v = __ldcg(from + i * 128);
            acc[4 * i] += v.x;
            acc[4 * i + 1] += v.y;
            acc[4 * i + 2] += v.z;
            acc[4 * i + 3] += v.w;
          }
        }
      }
#pragma unroll
      for (int part = 0; part < kTokens / kStagedTokens; ++part) {
        const int64_t m0 = work.m0 + part * kStagedTokens;
        if (m0 >= args.m) break;
        const float* sums = acc + part * (kStagedTokens / 2);
        sync();
        if (plain) {
          float bias[2] = {};
          if (args.has_bias) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              bias[i] = load_element(args.bias, work.batch * args.bias_batch_stride + min(n0 + row + 8 * i, args.n - 1),
                                     args.bias_dtype);
            }
          }
          uint4* const chunks = reinterpret_cast<uint4*>(staged);  // [token][8 outputs], in an order without conflicts
#pragma unroll
          for (int pair = 0; pair < kStagedTokens / 16; ++pair) {
            uint32_t matrices[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float* two = sums + pair * 8 + i * 2;
              matrices[i] = pack_pair(from_float<X>(fmaf(two[0], 1.f / C::kUnit, bias[i % 2])),
                                      from_float<X>(fmaf(two[1], 1.f / C::kUnit, bias[i % 2])));
            }
            const int token = pair * 16 + lane / 16 * 8 + lane % 8, chunk = warp % 4 * 2 + lane / 8 % 2;
            ptx::store_matrices_transposed(chunks + token * 8 + (chunk ^ (token % 8)), matrices);
          }
          sync();
#pragma unroll
          for (int i = 0; i < kStagedTokens * 8 / 128; ++i) {
            const int token = i * 16 + thread / 8, chunk = thread % 8;
            const int64_t n = n0 + chunk * 8;
            if (m0 + token >= args.m || n >= args.n) continue;
            *reinterpret_cast<uint4*>(static_cast<X*>(args.y) + (work.batch * args.m + m0 + token) * args.n + n) =
                chunks[token * 8 + (chunk ^ (token % 8))];
          }
        } else {
#pragma unroll
          for (int i = 0; i < kStagedTokens / 2; ++i) {
            staged[(i / 4 * 8 + 2 * t + i % 2) * kStagedStride + row + i % 4 / 2 * 8] = sums[i] * (1.f / C::kUnit);
          }
          sync();
#pragma unroll 1
          for (int i = thread; i < kStagedTokens * (kTileN / 4); i += 128) {
            const int token = i / (kTileN / 4), quad = i % (kTileN / 4);
            if (m0 + token >= args.m || n0 + quad * 4 >= args.n) continue;
            const float4 v = *reinterpret_cast<const float4*>(staged + token * kStagedStride + quad * 4);
            const float sum[4] = {v.x, v.y, v.z, v.w};
            finish4(args, work.batch, m0 + token, n0 + quad * 4, sum);
          }
        }
      }
    }
  }
  ptx::cluster_sync();  // the other CTA may still copy to here
#else
  __trap();
#endif
}

template <typename S>
cudaError_t launch_shape(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  CUtensorMap map;
  if (cudaError_t error = describe_activations(args, kTokens / kCluster, &map); error != cudaSuccess) return error;
  Params params{};
  params.args = args;
  params.token_tiles = static_cast<int>(ceil_div(args.m, kTokens));
  params.row_tiles = static_cast<int>(ceil_div(args.n, kCluster * kRows));
  params.log2_group_blocks = log2_group_blocks(args);
  const int64_t tiles = args.batch * params.token_tiles * params.row_tiles;
  const int clusters = config.multiprocessors / kCluster;
  params.waves = static_cast<int>(tiles / clusters);
  params.rest = static_cast<int>(tiles % clusters);
  params.splits = config.splits;
  if (params.rest * params.splits > clusters || params.rest * kCluster * kWarpgroups * 4 > kArrivedBytes ||
      scratch_bytes(params.rest, params.splits) > args.scratch_bytes) {
    return cudaErrorInvalidConfiguration;
  }
  if (params.splits > 1) {
    params.arrived = static_cast<uint32_t*>(args.scratch);
    params.partial = reinterpret_cast<float4*>(static_cast<uint8_t*>(args.scratch) + kArrivedBytes);
    if (cudaError_t error = cudaMemsetAsync(params.arrived, 0, kArrivedBytes, stream); error != cudaSuccess) {
      return error;
    }
  }
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(kCluster * (params.waves > 0 ? clusters : params.rest * params.splits)));
  shape.threads = kThreads;
  shape.cluster = kCluster;
  shape.shared_bytes = S::kSharedBytes;
  return launch_kernel(tiled_matmul<S>, shape, stream, params, map);
}

template <typename X>
cudaError_t launch_typed(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  const auto zeros = [&](auto bits) {
    return args.shift_mode == ShiftMode::kZeros ? launch_shape<Shape<X, bits.value, true>>(args, config, stream)
                                                : launch_shape<Shape<X, bits.value, false>>(args, config, stream);
  };
  return args.bits == 4 ? zeros(std::integral_constant<int, 4>{}) : zeros(std::integral_constant<int, 8>{});
}

}  // namespace wonly::tiled
