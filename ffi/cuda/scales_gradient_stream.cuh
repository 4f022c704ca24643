// The gradient of scales with few rows on Hopper: codes are streamed as in matmul_warpgroup.cuh, the product of
// activations and codes is made block by block of inputs, and a block's sums meet the cotangent in registers, where
// they are added up over the rows of a tile.
//
// A column is 128 outputs x 128 inputs. A run goes through the rows tile by tile, the cotangent of a tile and its
// outputs in registers, and through its inputs in each. What a tile adds to a sum is added in global memory, by the
// thread that added that of the tile before, so that results have the same bits in every run.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/launch.h"
#include "cuda/matmul_warpgroup.cuh"
#include "cuda/ptx_sm90.cuh"
#include "cuda/ring.cuh"
#include "cuda/scales_gradient.h"
#include "cuda/scales_gradient_runs.cuh"
#include "cuda/tensor_map.h"
#include "layout.h"

namespace wonly::scales_gradient {

struct StreamParams {
  Columns columns;
  const uint32_t* qw;
  float* y;
  int64_t qw_batch_stride;
  int k, n;
  int blocks;              // of y
  Divisor stages;          // of 128 inputs
  bool x_batch, dy_batch;  // whether every entry has its own
};

// Parts of a run that have a strip of outputs in common: `body(entry, rows, strip, first stage, last)`.
template <typename Body>
__device__ __forceinline__ void walk_strips(const StreamParams& params, const Run* runs, Body&& body) {
  walk(params.columns, runs, [&](int entry, Span rows, int column, int end) {
    while (column < end) {
      int first;
      const int strip = params.stages.divide(column, &first);
      const int last = min(static_cast<int>(params.stages.divisor), first + end - column);
      body(entry, rows, strip, first, last);
      column += last - first;
    }
  });
}

template <typename X_, int kBits_, int kFlushes_>
struct StreamShape {
  using X = X_;
  static constexpr int kBits = kBits_;
  static constexpr int kFlushes = kFlushes_;  // blocks that end in a stage: 4, 2 or 1
  static constexpr int kTokens = kStreamedRows;
  static constexpr int kStageK = 128, kStageSteps = kStageK / 16;
  static constexpr int kWarpgroups = 2;  // of 64 outputs each
  static constexpr int kRows = kWarpgroups * kTileN;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  // A unit is what the tensor cores work on while the codes of the next are converted.
  static constexpr int kUnits = kFlushes == 4 ? 4 : 2;
  static constexpr int kUnitSteps = kStageSteps / kUnits;
  static constexpr int kBlockUnits = kUnits / kFlushes;
  static constexpr int kTiles = kStageK / tile_k(kBits);
  static constexpr int kHalfBytes = kTokens * 128;  // 64 inputs, or outputs, of a tile of rows
  static constexpr int kWeightsAt = 2 * kHalfBytes;
  static constexpr int kStageBytes = kWeightsAt + kWarpgroups * kTiles * kTileBytes;
  static constexpr int kStages = kBits == 4 ? 10 : 8;
  // Barriers of the ring and of dy, and the run; both are aligned for the swizzle.
  static constexpr int kRunsAt = 512, kDyAt = 1024;
  static constexpr int kRingAt = kDyAt + kWarpgroups * kHalfBytes;
  static constexpr int kBytes = kRingAt + kStages * kStageBytes;
  static_assert((2 * kStages + 2) * 8 <= kRunsAt && kRunsAt + static_cast<int>(sizeof(Run)) <= kDyAt);
  static_assert(kBytes <= (227 << 10) && kStageBytes % 1024 == 0 && kHalfBytes % 1024 == 0);
  struct Cost {
    __device__ static int of(int rows) { return (rows + kTokens - 1) / kTokens; }
  };
};

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    stream_scales_gradient(const __grid_constant__ StreamParams params, const __grid_constant__ CUtensorMap x_map,
                           const __grid_constant__ CUtensorMap dy_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using X = typename S::X;
  using C = warpgroup::Convert<X>;
  using ptx::kArrivals;
  extern __shared__ __align__(1024) uint8_t shared[];
  uint64_t* const full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* const empty = full + S::kStages;
  uint64_t* const dy_full = empty + S::kStages;
  uint64_t* const dy_empty = dy_full + 1;
  Run* const runs = reinterpret_cast<Run*>(shared + S::kRunsAt);
  uint8_t* const dy = shared + S::kDyAt;
  uint8_t* const ring = shared + S::kRingAt;
  const Columns& columns = params.columns;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (warp == S::kThreads / 32 - 1) {
    if (lane == 0) {
      for (int i = 0; i < S::kStages; ++i) {
        ptx::barrier_init(full + i, 1);
        ptx::barrier_init(empty + i, S::kWarpgroups * 4 * kArrivals);
      }
      ptx::barrier_init(dy_full, 1);
      ptx::barrier_init(dy_empty, S::kWarpgroups * 4 * kArrivals);
      ptx::barrier_init_fence();
    }
    find_runs<typename S::Cost>(columns, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), runs);
  }
  __syncthreads();

  if (warp >= S::kWarpgroups * 4) {
    ptx::lower_registers<S::kProducerRegisters>();
    if (warp > S::kWarpgroups * 4) {
      const int thread = static_cast<int>(threadIdx.x) - S::kWarpgroups * 128 - 32;
      clear_empty(columns, params.y, static_cast<int64_t>(params.blocks) * params.n, thread, 96);
      return;
    }
    const int row_tiles = (params.n + kTileN - 1) / kTileN;
    const int k_tiles = (params.k + tile_k(S::kBits) - 1) / tile_k(S::kBits);
    RingPosition<S::kStages> at;
    int filled = 0;
    uint32_t dy_phase = 1;
    walk_strips(params, runs, [&](int entry, Span rows, int strip, int first, int last) {
      const uint32_t* const words = params.qw + entry * params.qw_batch_stride;
      const int x_entry = params.x_batch ? entry : 0, dy_entry = params.dy_batch ? entry : 0;
      const int tiles = min(S::kWarpgroups, row_tiles - strip * S::kWarpgroups);
      for (int row = 0; row < rows.count; row += S::kTokens) {
        const int row0 = rows.first + row;
        ptx::barrier_wait(dy_empty, dy_phase);
        dy_phase ^= 1;
        if (ptx::elect_one()) {
          ptx::barrier_expect(dy_full, S::kWarpgroups * S::kHalfBytes);
          for (int i = 0; i < S::kWarpgroups; ++i) {
            ptx::tensor_copy_3d(dy + i * S::kHalfBytes, &dy_map, strip * S::kRows + i * kTileN, row0, dy_entry,
                                dy_full);
          }
        }
        for (int stage = first; stage < last; ++stage, at.advance()) {
          if (filled == S::kStages) {
            ptx::barrier_wait(empty + at.slot, at.phase ^ 1);
          } else {
            ++filled;
          }
          if (!ptx::elect_one()) continue;
          uint8_t* const to = ring + at.slot * S::kStageBytes;
          uint64_t* const done = full + at.slot;
          const int tile_bytes = min(S::kTiles, k_tiles - stage * S::kTiles) * kTileBytes;
          ptx::barrier_expect(done, 2 * S::kHalfBytes + tiles * tile_bytes);
          for (int i = 0; i < 2; ++i) {
            ptx::tensor_copy_3d(to + i * S::kHalfBytes, &x_map, stage * S::kStageK + i * 64, row0, x_entry, done);
          }
          for (int i = 0; i < tiles; ++i) {
            const int64_t tile = static_cast<int64_t>(strip * S::kWarpgroups + i) * k_tiles + stage * S::kTiles;
            ptx::bulk_copy(to + S::kWeightsAt + i * S::kTiles * kTileBytes, words + tile * kTileWords, tile_bytes,
                           done);
          }
        }
      }
    });
    return;
  }

  ptx::raise_registers<S::kConsumerRegisters>();
  const int warpgroup = warp / 4, g = lane / 4, t = lane % 4;
  const int row = warpgroup * kTileN + warp % 4 * kAtomN + g;  // of this lane's outputs, and 8 beyond
  // Matrix i of four: rows 8 (i / 2) .. of a tile, outputs 8 (i % 2) .. of this warp's.
  const int dy_row = lane / 16 * 8 + lane % 8, dy_chunk = warp % 4 * 2 + lane / 8 % 2;
  const uint32_t dy_from =
      ptx::shared_address(dy) + warpgroup * S::kHalfBytes + dy_row * 128 + ((dy_chunk ^ (dy_row % 8)) << 4);
  const uint32_t minus_bias = C::minus_zero(bias_of(S::kBits));
  constexpr int kVectorSteps = S::kBits == 4 ? 4 : 2;     // steps of 16 inputs that one 16-byte vector of words holds
  constexpr bool kShared = S::kUnitSteps < kVectorSteps;  // by two units
  constexpr int kVectors = kShared ? 1 : S::kUnitSteps / kVectorSteps;
  uint4 words[kVectors];
  uint32_t codes[2][S::kUnitSteps][4];
  float part[S::kTokens / 2];
  float2 cotangent[S::kTokens / 8][2];  // of rows 8i + 2t and 8i + 2t + 1, of either output
  RingPosition<S::kStages> at;
  uint32_t dy_phase = 0;
  const int own_words = S::kWeightsAt + warpgroup * S::kTiles * kTileBytes + warp % 4 * (kAtomWords * 4) + lane * 16;
  const auto load_unit = [&](const uint8_t* data, int unit) {
    if (kShared && unit % 2 != 0) return;
    const uint4* const from = reinterpret_cast<const uint4*>(data + own_words);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      words[i] = from[(unit * S::kUnitSteps / kVectorSteps + i) * (kTileBytes / 16)];
    }
  };
  const auto convert_unit = [&](int unit) {
    uint32_t (&to)[S::kUnitSteps][4] = codes[unit % 2];
    if constexpr (kShared) {
      const uint4& both = words[0];
      warpgroup::convert_half<X, S::kBits>(unit % 2 == 0 ? both.x : both.z, unit % 2 == 0 ? both.y : both.w, minus_bias,
                                           minus_bias, to);
    } else {
#pragma unroll
      for (int step = 0; step < S::kUnitSteps; step += kVectorSteps) {
        warpgroup::convert<X, S::kBits>(words[step / kVectorSteps], minus_bias, minus_bias, to + step);
      }
    }
  };
  const auto arrive = [&](uint64_t* barrier) { ptx::warp_arrive(barrier, lane); };

  walk_strips(params, runs, [&](int entry, Span rows, int strip, int first, int last) {
    const int n0 = strip * S::kRows + row;
    float* const y = params.y + static_cast<int64_t>(entry) * params.blocks * params.n + n0 + (t == 1 ? 8 : 0);
    const bool stores = t < 2 && n0 + (t == 1 ? 8 : 0) < params.n;
    for (int begin = 0; begin < rows.count; begin += S::kTokens) {
      ptx::barrier_wait(dy_full, dy_phase);
      dy_phase ^= 1;
#pragma unroll
      for (int i = 0; i < S::kTokens / 8; i += 2) {
        uint32_t four[4];
        ptx::load_matrices_transposed(four, dy_from + i * 8 * 128);
        for (int j = 0; j < 4; ++j) cotangent[i + j / 2][j % 2] = to_floats<X>(four[j]);
      }
      arrive(dy_empty);
      // Behind an entry's last row are those of the next, whose infinities are none of its own.
      const int own = columns.limits == nullptr ? S::kTokens : rows.count - begin;
      const auto add = [&](int block, auto masked) {
        float sum[2][2] = {};
#pragma unroll
        for (int i = 0; i < S::kTokens / 8; ++i) {
#pragma unroll
          for (int output = 0; output < 2; ++output) {
            const float* const products = part + 4 * i + 2 * output;
            const float2 of = cotangent[i][output];
            if (!masked || 8 * i + 2 * t < own) sum[output][0] = fmaf(products[0], of.x, sum[output][0]);
            if (!masked || 8 * i + 2 * t + 1 < own) sum[output][1] = fmaf(products[1], of.y, sum[output][1]);
          }
        }
        float of_lane[2];
#pragma unroll
        for (int output = 0; output < 2; ++output) {
          of_lane[output] = quad_sum(sum[output][0] + sum[output][1]) * C::kUnscale;
        }
        if (!stores || block >= params.blocks) return;
        float* const to = y + static_cast<int64_t>(block) * params.n;
        const float value = t == 0 ? of_lane[0] : of_lane[1];
        if (begin == 0) {
          *to = value;
        } else {
          atomicAdd(to, value);  // which does not wait for what is there; no other thread adds to it
        }
      };
      const uint8_t* data = ring + at.slot * S::kStageBytes;
      ptx::barrier_wait(full + at.slot, at.phase);
      load_unit(data, 0);
      convert_unit(0);
      for (int stage = first; stage < last; ++stage) {
        const uint64_t x = ptx::wgmma_descriptor(data);
        const int slot = at.slot;
#pragma unroll
        for (int unit = 0; unit < S::kUnits; ++unit) {
          const bool last_unit = unit + 1 == S::kUnits;
          const bool begins = unit % S::kBlockUnits == 0, ends = (unit + 1) % S::kBlockUnits == 0;
          if (!last_unit) load_unit(data, unit + 1);
          warpgroup::multiply_steps<X, S::kTokens>(part, codes[unit % 2], x, unit * S::kUnitSteps, S::kHalfBytes,
                                                   !begins);
          if (!begins) ptx::wgmma_wait<1>();
          if (!last_unit) {
            convert_unit(unit + 1);
          } else {
            at.advance();
            data = ring + at.slot * S::kStageBytes;
            if (stage + 1 < last) {
              ptx::barrier_wait(full + at.slot, at.phase);
              load_unit(data, 0);
              convert_unit(0);
            }
          }
          if (!ends) continue;
          ptx::wgmma_wait<0>();
          ptx::keep(part);
          if (last_unit) arrive(empty + slot);
          const int block = stage * S::kFlushes + unit / S::kBlockUnits;
          if (own < S::kTokens) {
            add(block, std::true_type());
          } else {
            add(block, std::false_type());
          }
        }
      }
    }
  });
#else
  __trap();
#endif
}

template <typename S>
cudaError_t launch_stream(const ScalesGradientArgs& args, int multiprocessors, cudaStream_t stream) {
  Maps maps;
  if (cudaError_t error = describe(args, S::kTokens, &maps); error != cudaSuccess) return error;
  StreamParams params{};
  const int stages = static_cast<int>(ceil_div(args.k, S::kStageK));
  params.columns = {args.limits, static_cast<int>(args.batch), static_cast<int>(args.m),
                    static_cast<int>(ceil_div(args.n, S::kRows)) * stages, 1};
  params.stages = Divisor(stages);
  params.qw = args.qw;
  params.y = args.y;
  params.qw_batch_stride = args.qw_batch_stride;
  params.k = static_cast<int>(args.k);
  params.n = static_cast<int>(args.n);
  params.blocks = static_cast<int>(ceil_div(args.k, args.block));
  params.x_batch = args.x_batch_stride != 0;
  params.dy_batch = args.dy_batch_stride != 0;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(std::min<int64_t>(multiprocessors, args.batch * params.columns.of_entry)));
  shape.threads = S::kThreads;
  shape.shared_bytes = S::kBytes;
  return launch_kernel(stream_scales_gradient<S>, shape, stream, params, maps.x, maps.dy);
}

template <typename X>
cudaError_t launch_streamed(const ScalesGradientArgs& args, int multiprocessors, cudaStream_t stream) {
  const auto with_bits = [&](auto flushes) {
    return args.bits == 4 ? launch_stream<StreamShape<X, 4, flushes.value>>(args, multiprocessors, stream)
                          : launch_stream<StreamShape<X, 8, flushes.value>>(args, multiprocessors, stream);
  };
  return args.block == 32   ? with_bits(std::integral_constant<int, 4>{})
         : args.block == 64 ? with_bits(std::integral_constant<int, 2>{})
                            : with_bits(std::integral_constant<int, 1>{});
}

}  // namespace wonly::scales_gradient
