// The ragged product for hundreds of rows of an expert on Hopper, bound by the tensor cores: wgmma with the weights as
// the register operand, straight from the packed format, and as many columns as it takes.
//
// Two CTAs of a cluster compute neighbouring blocks of 128 outputs for the same rows. One producer warp of each keeps a
// ring of stages of 64 inputs full: its own packed weights, and half of the activations for both. Two warpgroups of 64
// outputs turn their codes into weights of the activations' type (rounded once, as a dequantized weight is) while the
// tensor cores work on the stage before. CTAs stay and walk over the tiles of the plan. Sums are in float32, in the
// order of the inputs: a row's result does not depend on the others.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_warpgroup.cuh"
#include "cuda/ptx_sm90.cuh"
#include "cuda/ragged_plan.cuh"
#include "cuda/ragged_tiled.h"
#include "cuda/tensor_map.h"
#include "dequant/convert.h"
#include "layout.h"

namespace wonly::ragged_tiled {

constexpr int kStageK = 64;
constexpr int kSteps = kStageK / 16;
constexpr int kWarpgroups = 2;  // that multiply, 64 outputs each
constexpr int kRows = kWarpgroups * kTileN;
constexpr int kCluster = 2;
constexpr int kThreads = (kWarpgroups + 1) * 128;  // the last warpgroup produces
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kBarrierBytes = 1024;        // keeps the ring aligned for the 128-byte swizzle
constexpr int kAffineWarps = kRows / 64;   // of the producer's, two outputs per lane
constexpr int kBandTiles = 8;              // tiles of rows that are walked together, for the cache
constexpr int kBoxRows = 32;               // of the tensor copy engine
constexpr int kStagedRows = 32;            // that a warpgroup writes at a time
constexpr int kStagedStride = kTileN + 4;  // floats of a row, so that no two lanes share a bank

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
  static constexpr int kXBytes = kTileRows * kStageK * 2;
  static constexpr int kWeightBytes = kTiles * kTileBytes;  // of a warpgroup
  static constexpr int kAffineAt = kXBytes + kWarpgroups * kWeightBytes;
  static constexpr int kStageBytes = kAffineAt + 2 * kRows * static_cast<int>(sizeof(Affine));
  static constexpr int kStagedBytes = kWarpgroups * kStagedRows * kStagedStride * 4;
  static constexpr int kFit = ((227 << 10) - kBarrierBytes - kStagedBytes - ragged::kMostPlanBytes) / kStageBytes;
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  static constexpr int kStagedAt = kBarrierBytes + kStages * kStageBytes;
  static constexpr int kPlanAt = kStagedAt + kStagedBytes;
  static_assert(kStageBytes % 1024 == 0 && kStages >= 4);
};

struct Params {
  MatmulArgs args;
  ragged::Work work;
  int row_tiles;          // of kCluster * kRows outputs
  int log2_group_blocks;  // group size = 32 << this; -1: one scale per output
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
    using warpgroup_convert = warpgroup::Convert<X>;
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
        const uint32_t factor = !kBf16 ? 0x3c003c00u : odd ? kFactorOfOdd : kFactor;
        out[i] = warpgroup_convert::fma(out[i], factor, affine.minus_zero);
      }
      out[i] = warpgroup_convert::fma(out[i], odd ? affine.scale_of_odd : affine.scale, affine.offset);
    }
  }
};

// A tile of the work: rows first .. first + rows - 1 of the plan's order, and this CTA's outputs.
struct Tile {
  int expert, first, rows;
  int64_t n0;
};

// One warp.
__device__ __forceinline__ Tile find_tile(const ragged::Plan& plan, int64_t index, int row_tiles, int rank) {
  const ragged::Span span = ragged::find_span(plan, static_cast<int>(index / row_tiles));
  const int local = static_cast<int>(index - static_cast<int64_t>(span.first_tile) * row_tiles);
  const int tiles = ragged::tiles_of(span.rows, kTileRows);
  const int band = local / (kBandTiles * row_tiles), in_band = local % (kBandTiles * row_tiles);
  const int height = min(kBandTiles, tiles - band * kBandTiles);
  const int first = (band * kBandTiles + in_band % height) * kTileRows;
  return {span.expert, span.first + first, min(kTileRows, span.rows - first),
          (static_cast<int64_t>(in_band / height) * kCluster + rank) * kRows};
}

__device__ __forceinline__ int columns_of(int rows) { return rows <= 64 ? 64 : rows <= 128 ? 128 : 256; }

// An element as it lies in memory, loaded now and read later.
__device__ __forceinline__ uint32_t load_bits(const uint8_t* at, int size) {
  return size == 4   ? *reinterpret_cast<const uint32_t*>(at)
         : size == 2 ? *reinterpret_cast<const uint16_t*>(at)
                     : static_cast<uint32_t>(*at);
}
__device__ __forceinline__ float value_of(uint32_t bits, DType type) {
  return type == DType::kF32    ? __uint_as_float(bits)
         : type == DType::kBF16 ? __uint_as_float(bits << 16)
         : type == DType::kF16  ? __half2float(__ushort_as_half(static_cast<uint16_t>(bits)))
                                : static_cast<float>(bits);
}

template <typename S>
__global__ void __launch_bounds__(kThreads, 1)
    ragged_tiled_matmul(const __grid_constant__ Params params, const __grid_constant__ CUtensorMap x_map) {
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

  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      ptx::barrier_init(full + i, 1 + kAffineWarps);
      ptx::barrier_init(empty + i, kCluster * kWarpgroups * 4);
    }
    ptx::barrier_init_fence();
  }
  const ragged::Plan plan = ragged::get_plan(params.work, shared + S::kPlanAt);
  ptx::cluster_sync();  // the other CTA's copies and arrivals come to these barriers
  const int64_t tiles = static_cast<int64_t>(plan.tile_count) * params.row_tiles;
  const int first_tile = blockIdx.x / kCluster, tile_stride = gridDim.x / kCluster;
  warpgroup::RingPosition<S::kStages> at;

  if (warp >= kWarpgroups * 4) {
    ptx::lower_registers<kProducerRegisters>();
    if (warp == kWarpgroups * 4) {
      const int k_tiles = static_cast<int>(ceil_div(args.k, tile_k(S::kBits)));
      const int64_t n_tiles = ceil_div(args.n, kTileN);
      for (int64_t index = first_tile; index < tiles; index += tile_stride) {
        const Tile tile = find_tile(plan, index, params.row_tiles, rank);
        if (tile.expert < 0) continue;
        const int columns = columns_of(tile.rows);
        const uint32_t* words = args.qw + tile.expert * args.qw_batch_stride + tile.n0 / kTileN * k_tiles * kTileWords;
        const int strips = static_cast<int>(max(min(n_tiles - tile.n0 / kTileN, int64_t{kWarpgroups}), int64_t{0}));
        for (int stage = 0; stage < stages; ++stage, at.advance()) {
          ptx::barrier_wait(empty + at.slot, at.phase ^ 1);
          if (!ptx::elect_one()) continue;
          uint8_t* to = ring + at.slot * S::kStageBytes;
          const int tile_bytes = min(S::kTiles, k_tiles - stage * S::kTiles) * kTileBytes;
          ptx::barrier_expect(full + at.slot, columns * kStageK * 2 + strips * tile_bytes);
          for (int row = rank * (columns / kCluster); row < (rank + 1) * (columns / kCluster); row += kBoxRows) {
            ptx::tensor_copy_3d_multicast(to + row * kStageK * 2, &x_map, stage * kStageK, tile.first + row, 0,
                                          full + at.slot, (1 << kCluster) - 1);
          }
          for (int i = 0; i < strips; ++i) {
            ptx::bulk_copy(to + S::kXBytes + i * S::kWeightBytes,
                           words + (static_cast<int64_t>(i) * k_tiles + stage * S::kTiles) * kTileWords, tile_bytes,
                           full + at.slot);
          }
        }
      }
    } else if (warp <= kWarpgroups * 4 + kAffineWarps) {
      // Scales and shifts of the next group on their way from memory while those of this one are used.
      const int first = (warp - kWarpgroups * 4 - 1) * 64 + lane;
      const int scale_size = element_size(args.scale_dtype);
      const int shift_size = args.shift_mode == ShiftMode::kNone ? 0 : element_size(args.shift_dtype);
      const int64_t scale_row = args.n * scale_size, shift_row = args.n * shift_size;
      const int sets = params.log2_group_blocks == 0 ? 2 : 1, last = static_cast<int>(args.groups) - 1;
      for (int64_t index = first_tile; index < tiles; index += tile_stride) {
        const Tile tile = find_tile(plan, index, params.row_tiles, rank);
        if (tile.expert < 0) continue;
        const uint8_t* scales[2];
        const uint8_t* shifts[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int64_t output = min(tile.n0 + first + 32 * i, args.n - 1);
          scales[i] =
              static_cast<const uint8_t*>(args.scales) + (tile.expert * args.scales_batch_stride + output) * scale_size;
          shifts[i] =
              static_cast<const uint8_t*>(args.shift) + (tile.expert * args.shift_batch_stride + output) * shift_size;
        }
        uint32_t scale[2], shift[2] = {};
        const auto fetch = [&](int group) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            scale[i] = load_bits(scales[i] + group * scale_row, scale_size);
            if (shift_size != 0) shift[i] = load_bits(shifts[i] + group * shift_row, shift_size);
          }
        };
        fetch(0);
        Affine affine[2];
        int last_group = -1;
        for (int stage = 0; stage < stages; ++stage, at.advance()) {
          ptx::barrier_wait(empty + at.slot, at.phase ^ 1);
          Affine* to = reinterpret_cast<Affine*>(ring + at.slot * S::kStageBytes + S::kAffineAt) + first;
          for (int set = 0; set < sets; ++set, to += kRows) {
            const int group =
                params.log2_group_blocks < 0 ? 0 : min((2 * stage + set) >> params.log2_group_blocks, last);
            if (group != last_group) {
              last_group = group;
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                affine[i] = C::affine(value_of(scale[i], args.scale_dtype), value_of(shift[i], args.shift_dtype),
                                      args.shift_mode);
              }
              fetch(min(group + 1, last));
            }
            to[0] = affine[0];
            to[32] = affine[1];
          }
          __syncwarp();
          if (lane == 0) ptx::barrier_arrive(full + at.slot);
        }
      }
    }
    __syncwarp();
  } else {
    ptx::raise_registers<kConsumerRegisters>();
    const int warpgroup = warp / 4;
    const int row = warp % 4 * kAtomN + lane / 4;  // of the warpgroup's outputs, and row + 8
    const int thread = threadIdx.x % 128;
    const auto sync = [&] {
      if (warpgroup == 0) {
        ptx::warpgroup_sync<1>();
      } else {
        ptx::warpgroup_sync<2>();
      }
    };
    float* const staged = reinterpret_cast<float*>(shared + S::kStagedAt) + warpgroup * kStagedRows * kStagedStride;
    const bool plain = args.activation == Activation::kNone && args.y_dtype == args.x_dtype && args.n % 8 == 0;
    const bool small_groups = params.log2_group_blocks == 0;  // two of them in a stage

    const auto run = [&](const Tile& tile, auto columns) {
      constexpr int kColumns = columns.value;
      const int64_t n0 = tile.n0 + warpgroup * kTileN;
      float acc[kColumns / 2] = {};
      Affine affine[2][2];  // of the halves of a stage, and of the outputs row and row + 8
      // Codes of a stage, which has landed: one vector of each of its packed tiles.
      uint4 words[S::kTiles];
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
        const uint64_t x = ptx::wgmma_descriptor(ring + at.slot * S::kStageBytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kSteps / 2; ++i) {
          const uint64_t operand_x = x + ((half * kSteps / 2 + i) * 32 >> 4);
          if constexpr (C::kBf16) {
            ptx::Wgmma<kColumns>::bf16(acc, with[i], operand_x, true);
          } else {
            ptx::Wgmma<kColumns>::f16(acc, with[i], operand_x, true);
          }
        }
        ptx::wgmma_commit();
      };
      const auto release = [&](int slot) {  // to both producers, which fill this CTA's slot together
        __syncwarp();
        if (lane < kCluster) ptx::barrier_arrive_at_rank(empty + slot, lane);
      };
      // All that is needed to convert the codes of the stage that comes next.
      const auto prepare = [&] {
        ptx::barrier_wait(full + at.slot, at.phase);
        const uint8_t* const data = ring + at.slot * S::kStageBytes;
#pragma unroll
        for (int i = 0; i < S::kTiles; ++i) {
          words[i] = reinterpret_cast<const uint4*>(data + S::kXBytes + warpgroup * S::kWeightBytes +
                                                    i * kTileBytes)[warp % 4 * 32 + lane];
        }
        const Affine* factors = reinterpret_cast<const Affine*>(data + S::kAffineAt) + warpgroup * kTileN + row;
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
      for (int stage = 0; stage < stages; ++stage) {
        uint32_t first[kSteps / 2][4], second[kSteps / 2][4];
        convert_half(0, first);
        multiply_half(0, first, stage > 0);
        ptx::wgmma_wait<1>();
        if (stage > 0) release(last_slot);
        convert_half(1, second);
        multiply_half(1, second, true);
        last_slot = at.slot;
        at.advance();
        if (stage + 1 < stages) prepare();
        ptx::wgmma_wait<1>();
      }
      ptx::wgmma_wait<0>();
      release(last_slot);

      // Through shared memory, so that a row's outputs leave together.
      if (n0 >= args.n) return;
      float bias[2] = {};
      if (plain && args.has_bias) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          bias[i] = load_element(args.bias, tile.expert * args.bias_batch_stride + min(n0 + row + 8 * i, args.n - 1),
                                 args.bias_dtype);
        }
      }
#pragma unroll 1
      for (int base = 0; base < tile.rows; base += kStagedRows) {
        sync();
#pragma unroll
        for (int part = 0; part < kColumns / kStagedRows; ++part) {
          if (part * kStagedRows != base) continue;
          const float* sums = acc + part * (kStagedRows / 2);
          if (plain) {  // [row][8 outputs], in an order without conflicts
            uint4* const chunks = reinterpret_cast<uint4*>(staged);
#pragma unroll
            for (int pair = 0; pair < kStagedRows / 16; ++pair) {
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
          } else {
#pragma unroll
            for (int i = 0; i < kStagedRows / 2; ++i) {
              staged[(i / 4 * 8 + lane % 4 * 2 + i % 2) * kStagedStride + row + i % 4 / 2 * 8] =
                  sums[i] * (1.f / C::kUnit);
            }
          }
        }
        sync();
        const int count = min(kStagedRows, tile.rows - base);
        if (plain) {
          const uint4* const chunks = reinterpret_cast<const uint4*>(staged);
#pragma unroll
          for (int i = 0; i < kStagedRows * 8 / 128; ++i) {
            const int token = i * 16 + thread / 8, chunk = thread % 8;
            const int64_t n = n0 + chunk * 8;
            if (token >= count || n >= args.n) continue;
            *reinterpret_cast<uint4*>(static_cast<X*>(args.y) + plan.row(tile.first + base + token) * args.n + n) =
                chunks[token * 8 + (chunk ^ (token % 8))];
          }
        } else {
#pragma unroll 1
          for (int i = thread; i < count * (kTileN / 4); i += 128) {
            const int token = i / (kTileN / 4), quad = i % (kTileN / 4);
            if (n0 + quad * 4 >= args.n) continue;
            const float4 v = *reinterpret_cast<const float4*>(staged + token * kStagedStride + quad * 4);
            finish4(args, tile.expert, plan.row(tile.first + base + token), n0 + quad * 4, {v.x, v.y, v.z, v.w});
          }
        }
      }
    };

    for (int64_t index = first_tile; index < tiles; index += tile_stride) {
      const Tile tile = find_tile(plan, index, params.row_tiles, rank);
      if (tile.expert < 0) {
        const int outputs = static_cast<int>(max(min(int64_t{kRows}, args.n - tile.n0), int64_t{0}));
        for (int i = 0; i < tile.rows; ++i) {
          const int64_t to = plan.row(tile.first + i) * args.n + tile.n0;
          if (static_cast<int>(threadIdx.x) < outputs) store_element(args.y, to + threadIdx.x, 0.f, args.y_dtype);
        }
      } else if (tile.rows <= 64) {
        run(tile, std::integral_constant<int, 64>{});
      } else if (tile.rows <= 128) {
        run(tile, std::integral_constant<int, 128>{});
      } else {
        run(tile, std::integral_constant<int, 256>{});
      }
    }
  }
  ptx::cluster_sync();  // the other CTA may still copy to here
#else
  __trap();
#endif
}

template <typename S>
cudaError_t launch_shape(Params params, int multiprocessors, cudaStream_t stream) {
  CUtensorMap map;
  MatmulArgs x = params.args;
  x.m = params.work.m;
  if (cudaError_t error = describe_activations(x, kBoxRows, &map); error != cudaSuccess) return error;
  params.row_tiles = static_cast<int>(ceil_div(params.args.n, kCluster * kRows));
  const int64_t tiles = ragged::most_tiles(params.work) * params.row_tiles;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(kCluster * std::min<int64_t>(tiles, multiprocessors / kCluster)));
  shape.threads = kThreads;
  shape.cluster = kCluster;
  shape.shared_bytes = S::kPlanAt + ragged::plan_bytes(params.work.experts);
  return launch_kernel(ragged_tiled_matmul<S>, shape, stream, params, map);
}

template <typename X>
cudaError_t launch_typed(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream) {
  Params params{};
  params.args = args;
  params.work = work;
  params.log2_group_blocks = log2_group_blocks(args);
  const bool zeros = args.shift_mode == ShiftMode::kZeros;
  if (args.bits == 4) {
    return zeros ? launch_shape<Shape<X, 4, true>>(params, multiprocessors, stream)
                 : launch_shape<Shape<X, 4, false>>(params, multiprocessors, stream);
  }
  return zeros ? launch_shape<Shape<X, 8, true>>(params, multiprocessors, stream)
               : launch_shape<Shape<X, 8, false>>(params, multiprocessors, stream);
}

}  // namespace wonly::ragged_tiled
