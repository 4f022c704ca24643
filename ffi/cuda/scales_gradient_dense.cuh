// The gradient of scales with many rows on Hopper: tiles of the gradient of a dense weight, the product of the
// cotangent's rows and those of the activations, whose sums over all rows meet the codes in registers and are added up
// over each block of inputs there. So codes cost nothing but at a tile's end, and the dense gradient is never in
// memory.
//
// A column is 256 outputs x 256 inputs, of two CTAs, half of the outputs each; each copies half of the activations to
// both. Both operands of wgmma are in shared memory, transposed, as the rows that are summed over lie one after the
// other; outputs are the rows of its result, so that lanes have the sums of which they have the codes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/matmul_warpgroup.cuh"
#include "cuda/ptx_sm90.cuh"
#include "cuda/ring.cuh"
#include "cuda/scales_gradient.h"
#include "cuda/scales_gradient_runs.cuh"
#include "cuda/tensor_map.h"
#include "cuda/wgmma.cuh"
#include "layout.h"

namespace wonly::scales_gradient {

struct DenseParams {
  Columns columns;
  const uint32_t* qw;
  const float* table;  // null without
  float* y;
  int64_t qw_batch_stride;
  int k, n;
  int block, blocks;                 // inputs of one, and of y
  int strips;                        // of outputs
  Divisor of_band, band, last_band;  // columns of a band, its strips, and those of the last
  bool x_batch, dy_batch;            // whether every entry has its own
};

// Columns that follow each other go through bands of strips of outputs, input by input: as many strips as leave what
// all clusters read at a time little.
struct Place {
  int strip, inputs;
};
__device__ __forceinline__ Place place_of(const DenseParams& params, int column) {
  int rest, in_band;
  const int band = params.of_band.divide(column, &rest), first = band * static_cast<int>(params.band.divisor);
  const bool whole = first + static_cast<int>(params.band.divisor) <= params.strips;
  const int inputs = (whole ? params.band : params.last_band).divide(rest, &in_band);
  return {first + in_band, inputs};
}

template <typename X_, int kBits_>
struct DenseShape {
  using X = X_;
  static constexpr int kBits = kBits_;
  static constexpr int kStageRows = 64;
  static constexpr int kInputs = 256;
  static constexpr int kWarpgroups = 2;  // of 64 outputs each
  static constexpr int kOutputs = kWarpgroups * kTileN;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr int kBoxBytes = kStageRows * 128;  // 64 inputs, or outputs, of a stage
  static constexpr int kBoxes = kInputs / 64;         // of inputs, behind those of outputs
  static constexpr int kXAt = kWarpgroups * kBoxBytes;
  static constexpr int kStageBytes = kXAt + kBoxes * kBoxBytes;
  static constexpr int kStages = 4;
  static constexpr int kTableAt = 256, kRunsAt = 512, kRingAt = 2048;
  static constexpr int kBytes = kRingAt + kStages * kStageBytes;
  static_assert(2 * kStages * 8 <= kTableAt && kTableAt + kTableEntries * 4 <= kRunsAt &&
                kRunsAt + kMostRounds * static_cast<int>(sizeof(Run)) <= kRingAt);
  struct Cost {  // in stages; the end of a tile takes as long as some
    __device__ static int of(int rows) { return rows == 0 ? 0 : (rows + kStageRows - 1) / kStageRows + 2; }
  };
};

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    dense_scales_gradient(const __grid_constant__ DenseParams params, const __grid_constant__ CUtensorMap x_map,
                          const __grid_constant__ CUtensorMap dy_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using X = typename S::X;
  using C = warpgroup::Convert<X>;
  extern __shared__ __align__(1024) uint8_t shared[];
  uint64_t* const full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* const empty = full + S::kStages;
  Run* const runs = reinterpret_cast<Run*>(shared + S::kRunsAt);
  uint8_t* const ring = shared + S::kRingAt;
  const Columns& columns = params.columns;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = ptx::cluster_rank();

  float* const table = reinterpret_cast<float*>(shared + S::kTableAt);
  const bool has_table = S::kBits == 4 && params.table != nullptr;
  if (has_table && threadIdx.x < kTableEntries) table[threadIdx.x] = params.table[threadIdx.x];
  if (warp == S::kThreads / 32 - 1) {
    if (lane == 0) {
      for (int i = 0; i < S::kStages; ++i) {
        ptx::barrier_init(full + i, 1);
        ptx::barrier_init(empty + i, 2 * S::kWarpgroups * 4);  // both CTAs' warps
      }
      ptx::barrier_init_fence();
    }
    find_runs<typename S::Cost>(columns, static_cast<int>(blockIdx.x / 2), static_cast<int>(gridDim.x / 2), runs);
  }
  __syncthreads();
  ptx::cluster_meet();

  if (warp >= S::kWarpgroups * 4) {
    ptx::lower_registers<S::kProducerRegisters>();
    if (warp > S::kWarpgroups * 4) {
      const int thread = static_cast<int>(threadIdx.x) - S::kWarpgroups * 128 - 32;
      clear_empty(columns, params.y, static_cast<int64_t>(params.blocks) * params.n, thread, 96);
    } else {
      RingPosition<S::kStages> at;
      int filled = 0;
      walk(columns, runs, [&](int entry, Span rows, int first, int last) {
        const int x_entry = params.x_batch ? entry : 0, dy_entry = params.dy_batch ? entry : 0;
        for (int column = first; column < last; ++column) {
          const Place place = place_of(params, column);
          const int n0 = (2 * place.strip + rank) * S::kOutputs;
          for (int row = 0; row < rows.count; row += S::kStageRows, at.advance()) {
            if (filled == S::kStages) {
              ptx::barrier_wait(empty + at.slot, at.phase ^ 1);
            } else {
              ++filled;
            }
            if (!ptx::elect_one()) continue;
            uint8_t* const to = ring + at.slot * S::kStageBytes;
            uint64_t* const done = full + at.slot;
            const int row0 = rows.first + row;
            ptx::barrier_expect(done, S::kStageBytes);
            for (int i = 0; i < S::kWarpgroups; ++i) {
              ptx::tensor_copy_3d(to + i * S::kBoxBytes, &dy_map, n0 + i * kTileN, row0, dy_entry, done);
            }
            for (int i = 0; i < S::kBoxes / 2; ++i) {
              const int box = rank * (S::kBoxes / 2) + i;
              ptx::tensor_copy_3d_multicast(to + S::kXAt + box * S::kBoxBytes, &x_map,
                                            place.inputs * S::kInputs + box * 64, row0, x_entry, done, 3);
            }
          }
        }
      });
    }
    __syncwarp();
    ptx::cluster_meet();  // none ends before the other has no more to copy to it, or to tell it
    return;
  }

  ptx::raise_registers<S::kConsumerRegisters>();
  const int warpgroup = warp / 4, g = lane / 4, t = lane % 4;
  const uint32_t minus_bias = C::minus_zero(bias_of(S::kBits));
  const int row_tiles = (params.n + kTileN - 1) / kTileN;
  const int k_tiles = (params.k + tile_k(S::kBits) - 1) / tile_k(S::kBits);
  constexpr int kTiles = S::kInputs / tile_k(S::kBits);
  constexpr int kTileSteps = tile_k(S::kBits) / 16;
  // Lane 0 tells this CTA, and lane 1 the other.
  const uint32_t empty_at = ptx::address_at_rank(empty, lane == 0 ? rank : rank ^ 1);
  const auto release = [&](int slot) {
    __syncwarp();
    ptx::barrier_arrive_at_if(empty_at + slot * static_cast<int>(sizeof(uint64_t)), lane < 2);
  };
  RingPosition<S::kStages> at;

  walk(columns, runs, [&](int entry, Span rows, int first, int last) {
    const int stages = (rows.count + S::kStageRows - 1) / S::kStageRows;
    for (int column = first; column < last; ++column) {
      const Place place = place_of(params, column);
      const int row_tile = (2 * place.strip + rank) * S::kWarpgroups + warpgroup;
      const int n0 = row_tile * kTileN + warp % 4 * kAtomN + g;
      const uint32_t* const tiles = params.qw + entry * params.qw_batch_stride +
                                    static_cast<int64_t>(min(row_tile, row_tiles - 1)) * k_tiles * kTileWords +
                                    warp % 4 * kAtomWords + lane * 4;
      uint4 words[kTiles];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {  // what lies beyond the inputs meets zeros
        const int tile = min(place.inputs * kTiles + i, k_tiles - 1);
        words[i] = __ldg(reinterpret_cast<const uint4*>(tiles + static_cast<int64_t>(tile) * kTileWords));
      }
      float acc[S::kInputs / 2];
      for (int stage = 0; stage < stages; ++stage, at.advance()) {
        uint8_t* const data = ring + at.slot * S::kStageBytes;
        ptx::barrier_wait(full + at.slot, at.phase);
        const int own = rows.count - stage * S::kStageRows;
        if (columns.limits != nullptr && own < S::kStageRows) {
          // Behind an entry's last row are those of the next.
          const int chunks = (S::kStageRows - own) * 8;
          for (int i = static_cast<int>(threadIdx.x); i < (S::kWarpgroups + S::kBoxes) * chunks;
               i += S::kWarpgroups * 128) {
            reinterpret_cast<uint4*>(data + i / chunks * S::kBoxBytes + own * 128)[i % chunks] = {};
          }
          ptx::fence_shared_for_async();
          ptx::named_sync<1, S::kWarpgroups * 128>();
        }
        const uint64_t a = ptx::wgmma_descriptor_transposed(data + warpgroup * S::kBoxBytes, 0);
        const uint64_t b = ptx::wgmma_descriptor_transposed(data + S::kXAt, S::kBoxBytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < S::kStageRows / 16; ++step) {
          const uint64_t offset = step * (16 * 128 >> 4);
          const bool accumulate = stage > 0 || step > 0;
          if constexpr (C::kBf16) {
            ptx::WgmmaTransposed<S::kInputs>::bf16(acc, a + offset, b + offset, accumulate);
          } else {
            ptx::WgmmaTransposed<S::kInputs>::f16(acc, a + offset, b + offset, accumulate);
          }
        }
        ptx::wgmma_commit();
        if (stage > 0) {
          ptx::wgmma_wait<1>();
          release(at.before(1).slot);
        }
      }
      ptx::wgmma_wait<0>();
      ptx::keep(acc);
      release(at.before(1).slot);

      float sums[S::kInputs / 32][2] = {};  // of 32 inputs, of outputs n0 and n0 + 8
      const auto add = [&](int eight, int output, const float2& of) {
        const float* const products = acc + 4 * eight + 2 * output;
        sums[eight / 4][output] = fmaf(products[0], of.x, fmaf(products[1], of.y, sums[eight / 4][output]));
      };
      if (has_table) {
#pragma unroll
        for (int i = 0; i < S::kInputs / 32; ++i) {  // a word of either output has 32 inputs
          const uint4& both = words[i * kTiles / (S::kInputs / 32)];
#pragma unroll
          for (int output = 0; output < 2; ++output) {
            const uint32_t word = output == 0 ? i % 2 == 0 ? both.x : both.z : i % 2 == 0 ? both.y : both.w;
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
              add(4 * i + pair, output, {table[word >> 4 * pair & 15], table[word >> 4 * (pair + 4) & 15]});
            }
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          uint32_t codes[kTileSteps][4];
          warpgroup::convert<X, S::kBits>(words[i], minus_bias, minus_bias, codes);
#pragma unroll
          for (int j = 0; j < 2 * kTileSteps; ++j) {  // eights of inputs
#pragma unroll
            for (int output = 0; output < 2; ++output) {
              add(i * 2 * kTileSteps + j, output, to_floats<X>(codes[j / 2][j % 2 * 2 + output]));
            }
          }
        }
      }
      const float unscale = has_table ? 1.f : C::kUnscale;
      // Of blocks that are larger the first has the sum.
      const int each = params.block / 32;
#pragma unroll
      for (int i = 0; i < S::kInputs / 32; ++i) {
#pragma unroll
        for (int output = 0; output < 2; ++output) {
          float& sum = sums[i][output];
          sum = quad_sum(sum) * unscale;
          if (each >= 2 && i % 2 == 1) sums[i - 1][output] += sum;
          if (each >= 4 && i % 4 == 3) sums[i - 3][output] += sums[i - 1][output];
        }
      }
      const int n = n0 + (t % 2 == 0 ? 0 : 8);
      if (t < 2 && n < params.n) {
        float* const y = params.y + static_cast<int64_t>(entry) * params.blocks * params.n + n;
#pragma unroll
        for (int i = 0; i < S::kInputs / 32; ++i) {
          const int block = (place.inputs * (S::kInputs / 32) + i) / each;
          if (i % each == 0 && block < params.blocks) {
            y[static_cast<int64_t>(block) * params.n] = t == 0 ? sums[i][0] : sums[i][1];
          }
        }
      }
    }
  });
  ptx::cluster_meet();
#else
  __trap();
#endif
}

template <typename S>
cudaError_t launch_dense(const ScalesGradientArgs& args, int multiprocessors, cudaStream_t stream) {
  Maps maps;
  if (cudaError_t error = describe(args, S::kStageRows, &maps); error != cudaSuccess) return error;
  DenseParams params{};
  params.strips = static_cast<int>(ceil_div(args.n, 2 * S::kOutputs));
  const int of_strip = static_cast<int>(ceil_div(args.k, S::kInputs));
  const int64_t columns = args.batch * params.strips * of_strip;
  const int64_t clusters = std::min<int64_t>(multiprocessors / 2, columns);
  // Columns of experts are of different lengths: a part has some, or others would wait for the longest.
  constexpr int kManyRows = 512, kSome = 4;
  const bool ragged = args.limits != nullptr;
  const bool many = (ragged ? ceil_div(args.m, args.batch) : args.m) >= kManyRows;
  const int64_t rounds = many ? ragged ? columns / (clusters * kSome) : ceil_div(columns, clusters) : 1;
  params.columns = {args.limits, static_cast<int>(args.batch), static_cast<int>(args.m), params.strips * of_strip,
                    static_cast<int>(std::clamp<int64_t>(rounds, 1, kMostRounds))};
  const int band = many || !ragged ? 8 : 1;
  params.of_band = Divisor(band * of_strip);
  params.band = Divisor(band);
  params.last_band = Divisor(params.strips % band);
  params.qw = args.qw;
  params.table = args.table;
  params.y = args.y;
  params.qw_batch_stride = args.qw_batch_stride;
  params.k = static_cast<int>(args.k);
  params.n = static_cast<int>(args.n);
  params.block = args.block;
  params.blocks = static_cast<int>(ceil_div(args.k, args.block));
  params.x_batch = args.x_batch_stride != 0;
  params.dy_batch = args.dy_batch_stride != 0;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(2 * clusters));
  shape.threads = S::kThreads;
  shape.cluster = 2;
  shape.shared_bytes = S::kBytes;
  return launch_kernel(dense_scales_gradient<S>, shape, stream, params, maps.x, maps.dy);
}

template <typename X>
cudaError_t launch_dense_tiles(const ScalesGradientArgs& args, int multiprocessors, cudaStream_t stream) {
  return args.bits == 4 ? launch_dense<DenseShape<X, 4>>(args, multiprocessors, stream)
                        : launch_dense<DenseShape<X, 8>>(args, multiprocessors, stream);
}

}  // namespace wonly::scales_gradient
