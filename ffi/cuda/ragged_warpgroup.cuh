// The ragged product for a dozen rows of an expert on Hopper: wgmma with the weights as register operand, as in
// matmul_warpgroup.cuh, by CTAs that stay.
//
// One CTA on every multiprocessor takes every so-many-th tile of 256 outputs x up to 32 rows of an expert; its producer
// warps run ahead into the next tile while the last results are still being written. Four warpgroups of 64 outputs
// share the rows' activations. Sums of a group are exact products of 16-bit numbers in float32, and its scale
// multiplies them there. A row's result does not depend on other rows.
#pragma once

#include "cuda/matmul_warpgroup.cuh"
#include "cuda/ragged_plan.cuh"
#include "cuda/ragged_warpgroup.h"
#include "cuda/tensor_map.h"

namespace wonly::ragged_warpgroup {

using warpgroup::Convert;
using warpgroup::kArrivals;
using warpgroup::kBarrierBytes;
using warpgroup::kStageK;
using warpgroup::kStageSteps;

constexpr int kColumns = kTileRows;  // of a product
constexpr int kCtaBytes = 227 << 10;
constexpr int kRotation = 5;

template <typename X_, int kBits_, bool kSmallGroups_>
struct Shape {
  using X = X_;
  static constexpr int kBits = kBits_;
  static constexpr bool kSmallGroups = kSmallGroups_;  // of 32 or 64 inputs
  static constexpr int kWarpgroups = 4;
  static constexpr int kRows = kWarpgroups * kTileN;
  static constexpr int kConsumers = kWarpgroups * 128;
  static constexpr int kThreads = kConsumers + 128;
  static constexpr int kProducerRegisters = 32;
  static constexpr int kConsumerRegisters = 112;

  static constexpr int kTiles = kStageK / tile_k(kBits);
  static constexpr int kFlushes = kSmallGroups ? 4 : 1;
  static constexpr int kHalfBytes = kColumns * 128;  // activations: two halves of 64 inputs
  static constexpr int kWeightsAt = 2 * kHalfBytes;
  static constexpr int kScalesAt = kWeightsAt + kWarpgroups * kTiles * kTileBytes;
  static constexpr int kZerosAt = kScalesAt + kFlushes * kRows * 4;
  static constexpr int kStageBytes = (kZerosAt + kFlushes * kRows + 1023) / 1024 * 1024;
  static constexpr int kStoreRows = kBits == 4 ? 16 : 8;  // that a warpgroup puts in order before they are stored
  static constexpr int kStoreStride = kTileN + 4;         // floats
  static constexpr int kStoreBytes = kStoreRows * kStoreStride * 4;
  static constexpr int kOtherBytes = kBarrierBytes + kWarpgroups * kStoreBytes + ragged::kMostPlanBytes;
  static constexpr int kStages = (kCtaBytes - kOtherBytes) / kStageBytes;
  static constexpr int kStoreAt = kBarrierBytes + kStages * kStageBytes;
  static constexpr int kPlanAt = kStoreAt + kWarpgroups * kStoreBytes;
  static_assert(kStages >= 3 && kStageBytes % 1024 == 0);
};

struct Params {
  MatmulArgs args;
  ragged::Work work;
  int row_blocks;         // of kRows outputs
  int log2_group_blocks;  // group size = 32 << this; -1: one scale per output
};

// A tile of the work: rows first .. first + rows - 1 of the plan's order and a block of outputs.
struct Tile {
  int expert, first, rows;
  int64_t n0;
};

// One warp.
template <typename S>
__device__ __forceinline__ Tile find_tile(const ragged::Plan& plan, int64_t index, int row_blocks) {
  const ragged::Span span = ragged::find_span(plan, static_cast<int>(index / row_blocks));
  const int local = static_cast<int>(index - static_cast<int64_t>(span.first_tile) * row_blocks);
  const int tiles = ragged::tiles_of(span.rows, kTileRows);  // those of the same weights run together
  const int first = local % tiles * kTileRows;
  return {span.expert, span.first + first, min(kTileRows, span.rows - first),
          static_cast<int64_t>(local / tiles) * S::kRows};
}

__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

// Where a tile's walk over the inputs begins: somewhere else for other outputs.
template <typename S>
__device__ __forceinline__ int first_stage(int64_t n0, int stages) {
  return static_cast<int>(n0 / S::kRows) * kRotation % stages;
}

template <typename S>
__device__ __forceinline__ void produce(const Params& params, const CUtensorMap* x_map, const ragged::Plan& plan,
                                        uint8_t* shared) {
  const MatmulArgs& args = params.args;
  uint64_t* const full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* const empty = full + S::kStages;
  uint8_t* const ring = shared + kBarrierBytes;
  const int thread = static_cast<int>(threadIdx.x) - S::kConsumers;
  // Warp w brings the weights of row tile w; the first also activations, the second scales and zeros. All lanes walk
  // along, so that addresses stay in uniform registers, and one of them issues.
  const int producer = __shfl_sync(0xffffffffu, thread / 32, 0);
  const int stages = static_cast<int>(ceil_div(args.k, kStageK));
  const int k_tiles = static_cast<int>(ceil_div(args.k, tile_k(S::kBits)));
  const int blocks = static_cast<int>(ceil_div(args.k, 32));
  const bool grouped = params.log2_group_blocks >= 0;
  const bool has_zeros = args.shift_mode == ShiftMode::kZeros;
  const int scale_size = element_size(args.scale_dtype);
  RingPosition<S::kStages> at;
  const int64_t all = static_cast<int64_t>(plan.tile_count) * params.row_blocks;
  for (int64_t index = blockIdx.x; index < all; index += gridDim.x) {
    const Tile tile = find_tile<S>(plan, index, params.row_blocks);
    if (tile.expert < 0) continue;
    const int64_t expert = tile.expert;
    const uint32_t* const words =
        args.qw + expert * args.qw_batch_stride + (tile.n0 / kTileN + producer) * k_tiles * kTileWords;
    const uint8_t* const scales =
        static_cast<const uint8_t*>(args.scales) + expert * args.scales_batch_stride * scale_size;
    const uint8_t* const zeros = static_cast<const uint8_t*>(args.shift) + expert * args.shift_batch_stride;
    const bool has_weights = tile.n0 + producer * kTileN < args.n;
    const int outputs = static_cast<int>(min(static_cast<int64_t>(S::kRows), args.n - tile.n0));
    int stage = first_stage<S>(tile.n0, stages);
    for (int i = 0; i < stages; ++i, at.advance()) {
      ptx::barrier_wait(empty + at.slot, at.phase ^ 1);  // of the first round: at once
      uint8_t* const to = ring + at.slot * S::kStageBytes;
      uint64_t* const done = full + at.slot;
      if (ptx::elect_one()) {
        const int tile_bytes = has_weights ? min(S::kTiles, k_tiles - stage * S::kTiles) * kTileBytes : 0;
        const int groups = grouped ? min(S::kFlushes, blocks - stage * (kStageK / 32)) : 0;
        int mine = 0;
        if (producer == 0) mine = kColumns * 256;
        if (producer == 1) mine = groups * outputs * (scale_size + (has_zeros ? 1 : 0));
        ptx::barrier_expect(done, mine + tile_bytes);
        if (has_weights) {
          ptx::bulk_copy(to + S::kWeightsAt + producer * S::kTiles * kTileBytes,
                         words + static_cast<int64_t>(stage) * S::kTiles * kTileWords, tile_bytes, done);
        }
        if (producer == 0) {
          ptx::tensor_copy_3d(to, x_map, stage * kStageK, tile.first, 0, done);
          ptx::tensor_copy_3d(to + S::kHalfBytes, x_map, stage * kStageK + 64, tile.first, 0, done);
        } else if (producer == 1) {
          for (int flush = 0; flush < groups; ++flush) {
            const int64_t first = ((stage * (kStageK / 32) + flush) >> params.log2_group_blocks) * args.n + tile.n0;
            ptx::bulk_copy(to + S::kScalesAt + flush * S::kRows * 4, scales + first * scale_size, outputs * scale_size,
                           done);
            if (has_zeros) ptx::bulk_copy(to + S::kZerosAt + flush * S::kRows, zeros + first, outputs, done);
          }
        }
      }
      __syncwarp();
      if (++stage == stages) stage = 0;
    }
  }
}

// What a consumer warp knows besides its accumulators.
template <typename S>
struct Consumer {
  using X = typename S::X;
  using C = Convert<X>;
  static constexpr int kVectorSteps = S::kBits == 4 ? 4 : 2;  // steps of 16 inputs that one 16-byte vector holds

  const Params& params;
  uint8_t* shared;
  RingPosition<S::kStages> at{};

  // The tile's rows for this warp's outputs.
  __device__ __forceinline__ void run(const ragged::Plan& plan, const Tile& tile) {
    // The codes of a unit of steps are converted while the tensor cores work on the one before.
    constexpr int kUnitSteps = S::kSmallGroups ? 2 : 4;
    constexpr int kUnits = kStageSteps / kUnitSteps;
    constexpr int kHeld = kUnitSteps < kVectorSteps ? kVectorSteps : kUnitSteps;
    const MatmulArgs& args = params.args;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warpgroup = warp / 4;
    const int row = warpgroup * kTileN + warp % 4 * kAtomN + lane / 4;  // outputs n0 + row and n0 + row + 8
    uint64_t* const full = reinterpret_cast<uint64_t*>(shared);
    uint64_t* const empty = full + S::kStages;
    const int stages = static_cast<int>(ceil_div(args.k, kStageK));
    const int blocks = static_cast<int>(ceil_div(args.k, 32));
    const bool grouped = params.log2_group_blocks >= 0;
    const bool has_zeros = args.shift_mode == ShiftMode::kZeros;
    const bool wide_scales = args.scale_dtype == DType::kF32, bf16_scales = args.scale_dtype == DType::kBF16;
    const int scale_size = wide_scales ? 4 : 2;
    const auto release = [&](int slot) {
      __syncwarp();
      if (lane < kArrivals) ptx::barrier_arrive(empty + slot);
    };
    if (tile.n0 + warpgroup * kTileN >= args.n) {
      for (int index = 0; index < stages; ++index, at.advance()) {
        ptx::barrier_wait(full + at.slot, at.phase);
        release(at.slot);
      }
      return;
    }

    float acc[kColumns / 2] = {}, part[kColumns / 2];
    float scale[2] = {};
    uint32_t zero[2] = {C::minus_zero(static_cast<float>(bias_of(S::kBits))),
                        C::minus_zero(static_cast<float>(bias_of(S::kBits)))};
    if (!grouped) {
      const uint8_t* const scales =
          static_cast<const uint8_t*>(args.scales) + tile.expert * args.scales_batch_stride * scale_size;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t n = min(tile.n0 + row + 8 * i, args.n - 1);
        scale[i] = load_element(scales, n, args.scale_dtype) * C::kUnscale;
        if (has_zeros) {
          zero[i] = C::minus_zero(
              static_cast<float>(static_cast<const uint8_t*>(args.shift)[tile.expert * args.shift_batch_stride + n]));
        }
      }
    }
    const auto set_scales = [&](const uint8_t* data, int stage, int unit) {
      if (!grouped) return;
      const uint8_t* const from = data + S::kScalesAt + unit * S::kRows * 4 + row * scale_size;
      const bool copied = stage * (kStageK / 32) + unit < blocks;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t bits = wide_scales ? reinterpret_cast<const uint32_t*>(from)[8 * i]
                                          : reinterpret_cast<const uint16_t*>(from)[8 * i];
        const float narrow =
            bf16_scales ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
        scale[i] = copied ? (wide_scales ? __uint_as_float(bits) : narrow) * C::kUnscale : 0.f;
      }
    };

    uint32_t codes[2][kHeld][4];
    const auto prepare = [&](const uint8_t* data, int unit) {
      if (has_zeros && grouped && (S::kSmallGroups || unit == 0)) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          zero[i] = C::minus_zero(static_cast<float>(data[S::kZerosAt + unit * S::kRows + row + 8 * i]));
        }
      }
      const uint4* const words =
          reinterpret_cast<const uint4*>(data + S::kWeightsAt + warpgroup * S::kTiles * kTileBytes) + warp % 4 * 32 +
          lane;
#pragma unroll
      for (int step = 0; step < kHeld; step += kVectorSteps) {
        warpgroup::convert<X, S::kBits>(words[(unit * kUnitSteps + step) / kVectorSteps * (kTileBytes / 16)], zero[0],
                                        zero[1], codes[unit % 2] + step);
      }
    };
    const auto multiply = [&](uint64_t x, int unit) {
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kUnitSteps; ++i) {
        const int step = unit * kUnitSteps + i;
        const uint64_t of_step = x + ((step / 4 * S::kHalfBytes + step % 4 * 32) >> 4);
        const uint32_t (&held)[4] = codes[unit % 2][kUnitSteps < kVectorSteps ? step % kVectorSteps : i];
        const bool accumulate = i > 0 || (unit > 0 && !S::kSmallGroups);
        if constexpr (C::kBf16) {
          ptx::Wgmma<kColumns>::bf16(part, held, of_step, accumulate);
        } else {
          ptx::Wgmma<kColumns>::f16(part, held, of_step, accumulate);
        }
      }
      ptx::wgmma_commit();
    };
    const auto stage_data = [&]() { return shared + kBarrierBytes + at.slot * S::kStageBytes; };
    int stage = first_stage<S>(tile.n0, stages);
    const uint8_t* data = stage_data();
    ptx::barrier_wait(full + at.slot, at.phase);
    prepare(data, 0);
    for (int index = 0; index < stages; ++index) {
      const uint64_t x = ptx::wgmma_descriptor(data);
      const int slot = at.slot;
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        const bool last = unit + 1 == kUnits;
        multiply(x, unit);
        if (unit > 0 && !S::kSmallGroups) ptx::wgmma_wait<1>();
        if (last || S::kSmallGroups) set_scales(data, stage, S::kSmallGroups ? unit : 0);
        if (!last) {
          prepare(data, unit + 1);
        } else {
          at.advance();
          stage = stage + 1 == stages ? 0 : stage + 1;
          data = stage_data();
          if (index + 1 < stages) {
            ptx::barrier_wait(full + at.slot, at.phase);
            prepare(data, 0);
          }
        }
        if (last || S::kSmallGroups) {
          ptx::wgmma_wait<0>();
#pragma unroll
          for (int i = 0; i < kColumns / 2; ++i) acc[i] = fmaf(scale[i % 4 / 2], part[i], acc[i]);
        }
      }
      release(slot);
    }

    // Through shared memory, so that four neighbouring outputs of a row are stored at once.
    float* const store = reinterpret_cast<float*>(shared + S::kStoreAt + warpgroup * S::kStoreBytes);
    const int of_warpgroup = threadIdx.x % 128;
#pragma unroll 1
    for (int base = 0; base < tile.rows; base += S::kStoreRows) {
      sync_threads(1 + warpgroup, 128);
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        if (i / (S::kStoreRows / 2) * S::kStoreRows == base) {
          store[(i / 4 * 8 % S::kStoreRows + lane % 4 * 2 + i % 2) * S::kStoreStride + row % kTileN + i % 4 / 2 * 8] =
              acc[i];
        }
      }
      sync_threads(1 + warpgroup, 128);
#pragma unroll 1
      for (int i = of_warpgroup; i < min(S::kStoreRows, tile.rows - base) * (kTileN / 4); i += 128) {
        const int token = i / (kTileN / 4), quad = i % (kTileN / 4);
        const int64_t n = tile.n0 + warpgroup * kTileN + quad * 4;
        if (n >= args.n) continue;
        const float4 v = *reinterpret_cast<const float4*>(store + token * S::kStoreStride + quad * 4);
        finish4(args, tile.expert, plan.row(tile.first + base + token), n, {v.x, v.y, v.z, v.w});
      }
    }
  }

  // A tile of rows without an expert.
  __device__ __forceinline__ void clear(const ragged::Plan& plan, const Tile& tile) {
    const MatmulArgs& args = params.args;
    const int outputs = static_cast<int>(min(static_cast<int64_t>(S::kRows), args.n - tile.n0));
    for (int row = 0; row < tile.rows; ++row) {
      const int64_t to = plan.row(tile.first + row) * args.n + tile.n0;
      for (int i = threadIdx.x; i < outputs; i += S::kConsumers) store_element(args.y, to + i, 0.f, args.y_dtype);
    }
  }
};

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    ragged_warpgroup_matmul(const __grid_constant__ Params params, const __grid_constant__ CUtensorMap x_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  if (threadIdx.x == 0) {
    uint64_t* const full = reinterpret_cast<uint64_t*>(shared);
    for (int i = 0; i < S::kStages; ++i) {
      ptx::barrier_init(full + i, 4);  // producer warps
      ptx::barrier_init(full + S::kStages + i, S::kWarpgroups * 4 * kArrivals);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  const ragged::Plan plan = ragged::get_plan(params.work, shared + S::kPlanAt);
  if (threadIdx.x >= S::kConsumers) {
    ptx::lower_registers<S::kProducerRegisters>();
    produce<S>(params, &x_map, plan, shared);
  } else {
    ptx::raise_registers<S::kConsumerRegisters>();
    Consumer<S> consumer{params, shared};
    const int64_t all = static_cast<int64_t>(plan.tile_count) * params.row_blocks;
    for (int64_t index = blockIdx.x; index < all; index += gridDim.x) {
      const Tile tile = find_tile<S>(plan, index, params.row_blocks);
      if (tile.expert < 0) {
        consumer.clear(plan, tile);
      } else {
        consumer.run(plan, tile);
      }
    }
  }
#else
  __trap();
#endif
}

template <typename S>
cudaError_t launch_shape(Params params, int multiprocessors, cudaStream_t stream) {
  CUtensorMap map;
  MatmulArgs x = params.args;
  x.m = params.work.m;
  if (cudaError_t error = describe_activations(x, kColumns, &map); error != cudaSuccess) return error;
  params.row_blocks = static_cast<int>(ceil_div(params.args.n, S::kRows));
  LaunchShape shape;
  shape.grid = dim3(
      static_cast<unsigned>(std::min<int64_t>(multiprocessors, ragged::most_tiles(params.work) * params.row_blocks)));
  shape.threads = S::kThreads;
  shape.shared_bytes = S::kPlanAt + ragged::plan_bytes(params.work.experts);
  return launch_kernel(ragged_warpgroup_matmul<S>, shape, stream, params, map);
}

template <typename X>
cudaError_t launch_typed(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream) {
  Params params{};
  params.args = args;
  params.work = work;
  params.log2_group_blocks = log2_group_blocks(args);
  const bool small_groups = params.log2_group_blocks == 0 || params.log2_group_blocks == 1;
  if (args.bits == 4) {
    return small_groups ? launch_shape<Shape<X, 4, true>>(params, multiprocessors, stream)
                        : launch_shape<Shape<X, 4, false>>(params, multiprocessors, stream);
  }
  return small_groups ? launch_shape<Shape<X, 8, true>>(params, multiprocessors, stream)
                      : launch_shape<Shape<X, 8, false>>(params, multiprocessors, stream);
}

}  // namespace wonly::ragged_warpgroup
