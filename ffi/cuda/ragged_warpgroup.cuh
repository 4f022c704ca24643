// The ragged product for more than a few rows of an expert on Hopper: wgmma with the weights as register operand, as
// in matmul_warpgroup.cuh, by CTAs that stay.
//
// One CTA on every multiprocessor takes every so-many-th tile of 256 outputs x up to 128 rows of an expert; its
// producer warps run ahead into the next tile while the last results are still being written. Four warpgroups of 64
// outputs share the rows' activations and keep the tensor cores busy in turns: one converts codes, another waits, a
// third multiplies. Rows that follow each other in x come by the tensor copy engine, others by ordinary asynchronous
// copies; a tile with few rows brings and multiplies 32 or 64 columns.
//
// The accumulators are the only copy of the sums: they are in units of the current group's scale, and change to the
// next one's by one multiplication (which is what scaling a group's sum and adding it would cost). So products
// stay exact, and a float32 rounding for each group is all that scales add. A group whose scale is below 2^-48 of the
// one before it counts as that small. A row's result does not depend on other rows, but for the order of sums, which is
// that of the inputs from a start that depends on the tile's outputs.
#pragma once

#include "cuda/matmul_warpgroup.cuh"
#include "cuda/ragged_plan.cuh"
#include "cuda/ragged_warpgroup.h"

#ifndef WONLY_TURNS
#define WONLY_TURNS 1
#endif

namespace wonly::ragged_warpgroup {

using warpgroup::Convert;
using warpgroup::kArrivals;
using warpgroup::kBarrierBytes;
using warpgroup::kRotation;
using warpgroup::kStageK;
using warpgroup::kStageSteps;
using warpgroup::RingPosition;

constexpr int kBoxRows = 32;  // of the tensor copy engine
constexpr int kCtaBytes = 227 << 10;

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
  static constexpr int kHalfBytes = kTileRows * 128;  // activations: two halves of 64 inputs
  static constexpr int kWeightsAt = 2 * kHalfBytes;
  static constexpr int kScalesAt = kWeightsAt + kWarpgroups * kTiles * kTileBytes;
  static constexpr int kZerosAt = kScalesAt + kFlushes * kRows * 4;
  static constexpr int kStageBytes = (kZerosAt + kFlushes * kRows + 1023) / 1024 * 1024;
  static constexpr int kStoreRows = kBits == 4 ? 16 : 8;  // that a warpgroup puts in order before they are stored
  static constexpr int kStoreStride = kTileN + 4;         // floats
  static constexpr int kStoreBytes = kStoreRows * kStoreStride * 4;
  static constexpr int kOtherBytes = kBarrierBytes + kWarpgroups * kStoreBytes + kTileRows * 4 + ragged::kMostPlanBytes;
  static constexpr int kStages = (kCtaBytes - kOtherBytes) / kStageBytes;
  static constexpr int kStoreAt = kBarrierBytes + kStages * kStageBytes;
  static constexpr int kXRowsAt = kStoreAt + kWarpgroups * kStoreBytes;
  static constexpr int kPlanAt = kXRowsAt + kTileRows * 4;
  static_assert(kStages >= 3 && kStageBytes % 1024 == 0);
};

struct Params {
  MatmulArgs args;
  ragged::Work work;
  int row_blocks;         // of kRows outputs
  int log2_group_blocks;  // group size = 32 << this; -1: one scale per output
  bool gather;            // rows of a tile do not follow each other in x
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

__device__ __forceinline__ int columns_of(int rows) { return rows <= 32 ? 32 : rows <= 64 ? 64 : 128; }

__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void arrive_threads(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

// The stage of a tile's walk over the inputs, which begins somewhere else for other outputs.
__device__ __forceinline__ int stage_at(int index, int64_t n0, int rows, int stages) {
  const int at = index + static_cast<int>(n0 / rows) * kRotation % stages;
  return at < stages ? at : at - stages;
}

template <typename S>
__device__ __forceinline__ void produce(const Params& params, const CUtensorMap* x_map, const CUtensorMap* row_map,
                                        const ragged::Plan& plan, uint8_t* shared) {
  const MatmulArgs& args = params.args;
  uint64_t* const full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* const empty = full + S::kStages;
  uint8_t* const ring = shared + kBarrierBytes;
  int* const x_rows = reinterpret_cast<int*>(shared + S::kXRowsAt);
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
  int walked = 0;
  const int64_t all = static_cast<int64_t>(plan.tile_count) * params.row_blocks;
  for (int64_t index = blockIdx.x; index < all; index += gridDim.x) {
    const Tile tile = find_tile<S>(plan, index, params.row_blocks);
    if (tile.expert < 0) continue;
    const int columns = columns_of(tile.rows);
    const int64_t expert = tile.expert;
    if (params.gather) {
      sync_threads(1, 128);
      if (thread < columns) x_rows[thread] = plan.row(tile.first + min(thread, tile.rows - 1)) / params.work.repeat;
      sync_threads(1, 128);
    }
    const uint32_t* const words =
        args.qw + expert * args.qw_batch_stride + (tile.n0 / kTileN + producer) * k_tiles * kTileWords;
    const uint8_t* const scales =
        static_cast<const uint8_t*>(args.scales) + expert * args.scales_batch_stride * scale_size;
    const uint8_t* const zeros = static_cast<const uint8_t*>(args.shift) + expert * args.shift_batch_stride;
    const bool has_weights = tile.n0 + producer * kTileN < args.n;
    const int outputs = static_cast<int>(min(static_cast<int64_t>(S::kRows), args.n - tile.n0));
    for (int i = 0; i < stages; ++i, at.advance()) {
      const int stage = stage_at(i, tile.n0, S::kRows, stages);
      if (walked < S::kStages) {
        ++walked;
      } else {
        ptx::barrier_wait(empty + at.slot, at.phase ^ 1);
      }
      uint8_t* const to = ring + at.slot * S::kStageBytes;
      uint64_t* const done = full + at.slot;
      if (ptx::elect_one()) {
        const int tile_bytes = has_weights ? min(S::kTiles, k_tiles - stage * S::kTiles) * kTileBytes : 0;
        const int groups = grouped ? min(S::kFlushes, blocks - stage * (kStageK / 32)) : 0;
        int mine = 0;
        if (producer == 0) mine = columns * 256;
        if (producer == 1) mine = groups * outputs * (scale_size + (has_zeros ? 1 : 0));
        ptx::barrier_expect(done, mine + tile_bytes);
        if (has_weights) {
          ptx::bulk_copy(to + S::kWeightsAt + producer * S::kTiles * kTileBytes,
                         words + static_cast<int64_t>(stage) * S::kTiles * kTileWords, tile_bytes, done);
        }
        if (producer == 0 && !params.gather) {
          for (int row = 0; row < columns; row += kBoxRows) {
            ptx::tensor_copy_3d(to + row * 128, x_map, stage * kStageK, tile.first + row, 0, done);
            ptx::tensor_copy_3d(to + S::kHalfBytes + row * 128, x_map, stage * kStageK + 64, tile.first + row, 0, done);
          }
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
      if (params.gather && thread < columns) {
        ptx::tensor_copy_3d(to + thread * 128, row_map, stage * kStageK, x_rows[thread], 0, done);
        ptx::tensor_copy_3d(to + S::kHalfBytes + thread * 128, row_map, stage * kStageK + 64, x_rows[thread], 0, done);
      }
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

  // Sums of the tile's rows for this warp's outputs, `columns` of them.
  template <int kColumns>
  __device__ __forceinline__ void run(const ragged::Plan& plan, const Tile& tile) {
    constexpr bool kTurns = WONLY_TURNS && kColumns == 128 && !S::kSmallGroups;
    constexpr int kUnitSteps = S::kSmallGroups || (kColumns == 128 && !kTurns) ? 2 : 4;
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
    const auto wait_turn = [&]() { sync_threads(6 + warpgroup, 256); };
    const auto pass_turn = [&]() { arrive_threads(6 + (warpgroup + 1) % 4, 256); };
    const auto release = [&](int slot) {
      __syncwarp();
      if (lane < kArrivals) ptx::barrier_arrive(empty + slot);
    };
    if (tile.n0 + warpgroup * kTileN >= args.n) {
      for (int index = 0; index < stages; ++index, at.advance()) {
        ptx::barrier_wait(full + at.slot, at.phase);
        if constexpr (kTurns) {
          for (int unit = 0; unit < kUnits; ++unit) {
            wait_turn();
            pass_turn();
          }
        }
        release(at.slot);
      }
      return;
    }

    float acc[kColumns / 2] = {};
    float unit_scale[2] = {}, scale[2] = {};  // of the accumulators; the last that was not too small to be one
    uint32_t zero[2] = {C::minus_zero(static_cast<float>(bias_of(S::kBits))),
                        C::minus_zero(static_cast<float>(bias_of(S::kBits)))};
    if (!grouped) {
      const uint8_t* const scales =
          static_cast<const uint8_t*>(args.scales) + tile.expert * args.scales_batch_stride * scale_size;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t n = min(tile.n0 + row + 8 * i, args.n - 1);
        unit_scale[i] = scale[i] = load_element(scales, n, args.scale_dtype);
        if (has_zeros) {
          zero[i] = C::minus_zero(
              static_cast<float>(static_cast<const uint8_t*>(args.shift)[tile.expert * args.shift_batch_stride + n]));
        }
      }
    }
    // Takes the next group's zeros; the accumulators are to be multiplied by `factor`.
    const auto change_scales = [&](const uint8_t* data, int flush, float (&factor)[2]) {
      const uint8_t* const from = data + S::kScalesAt + flush * S::kRows * 4 + row * scale_size;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t bits = wide_scales ? reinterpret_cast<const uint32_t*>(from)[8 * i]
                                          : reinterpret_cast<const uint16_t*>(from)[8 * i];
        const float narrow =
            bf16_scales ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
        const float next = wide_scales ? __uint_as_float(bits) : narrow;
        const float least = fmaxf(fabsf(scale[i]) * 0x1p-48f, 0x1p-100f);
        const bool small = fabsf(next) <= least;
        const float next_unit = small ? least : next;
        if (!small) scale[i] = next;
        const float inverse = __frcp_rn(next_unit);
        const float quotient = unit_scale[i] * inverse;
        factor[i] = fmaf(fmaf(-quotient, next_unit, unit_scale[i]), inverse, quotient);
        unit_scale[i] = next_unit;
        if (has_zeros) zero[i] = C::minus_zero(static_cast<float>(data[S::kZerosAt + flush * S::kRows + row + 8 * i]));
      }
    };

    uint32_t codes[kTurns ? 1 : 2][kHeld][4];
    float factor[2] = {1.f, 1.f};
    // The operands of a unit: its codes, and what the sums before it are to be multiplied by.
    const auto prepare = [&](const uint8_t* data, int stage, int unit, uint32_t (&to)[kHeld][4]) {
      if (S::kSmallGroups || unit == 0) {
        factor[0] = factor[1] = 1.f;
        if (grouped && stage * (kStageK / 32) + unit < blocks) change_scales(data, unit, factor);
      }
      const uint4* const words =
          reinterpret_cast<const uint4*>(data + S::kWeightsAt + warpgroup * S::kTiles * kTileBytes) + warp % 4 * 32 +
          lane;
#pragma unroll
      for (int step = 0; step < kHeld; step += kVectorSteps) {
        warpgroup::convert<X, S::kBits>(words[(unit * kUnitSteps + step) / kVectorSteps * (kTileBytes / 16)], zero[0],
                                        zero[1], to + step);
      }
    };
    const auto multiply = [&](uint64_t x, int unit, const uint32_t (&a)[kHeld][4]) {
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kUnitSteps; ++i) {
        const int step = unit * kUnitSteps + i;
        const uint64_t of_step = x + ((step / 4 * S::kHalfBytes + step % 4 * 32) >> 4);
        const uint32_t (&held)[4] = a[kUnitSteps < kVectorSteps ? step % kVectorSteps : i];
        if constexpr (C::kBf16) {
          ptx::Wgmma<kColumns>::bf16(acc, held, of_step, true);
        } else {
          ptx::Wgmma<kColumns>::f16(acc, held, of_step, true);
        }
      }
      ptx::wgmma_commit();
    };
    const auto rescale = [&]() {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) acc[i] *= factor[i % 4 / 2];
    };
    const auto stage_data = [&]() { return shared + kBarrierBytes + at.slot * S::kStageBytes; };
    int stage = stage_at(0, tile.n0, S::kRows, stages);
    const auto next_stage = [&]() { stage = stage + 1 == stages ? 0 : stage + 1; };
    if constexpr (kTurns) {
      for (int index = 0; index < stages; ++index, at.advance(), next_stage()) {
        const uint8_t* const data = stage_data();
        ptx::barrier_wait(full + at.slot, at.phase);
        const uint64_t x = ptx::wgmma_descriptor(data);
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
          prepare(data, stage, unit, codes[0]);
          if (unit == 0) rescale();
          wait_turn();
          multiply(x, unit, codes[0]);
          pass_turn();
          ptx::wgmma_wait<0>();
        }
        release(at.slot);
      }
    } else {
      const uint8_t* data = stage_data();
      ptx::barrier_wait(full + at.slot, at.phase);
      prepare(data, stage, 0, codes[0]);
      for (int index = 0; index < stages; ++index) {
        const uint64_t x = ptx::wgmma_descriptor(data);
        const int slot = at.slot;
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
          if (S::kSmallGroups || unit == 0) rescale();
          multiply(x, unit, codes[unit % 2]);
          if (unit > 0 && !S::kSmallGroups) ptx::wgmma_wait<1>();
          if (unit + 1 < kUnits) {
            prepare(data, stage, unit + 1, codes[(unit + 1) % 2]);
          } else {
            at.advance();
            next_stage();
            data = stage_data();
            if (index + 1 < stages) {
              ptx::barrier_wait(full + at.slot, at.phase);
              prepare(data, stage, 0, codes[0]);
            }
          }
          if (S::kSmallGroups || unit + 1 == kUnits) ptx::wgmma_wait<0>();
        }
        release(slot);
      }
    }

    // Through shared memory, so that four neighbouring outputs of a row are stored at once.
#pragma unroll
    for (int i = 0; i < 2; ++i) unit_scale[i] = scale[i] == 0.f ? 0.f : unit_scale[i] * C::kUnscale;
    float* const store = reinterpret_cast<float*>(shared + S::kStoreAt + warpgroup * S::kStoreBytes);
    const int of_warpgroup = threadIdx.x % 128;
#pragma unroll 1
    for (int base = 0; base < tile.rows; base += S::kStoreRows) {
      sync_threads(2 + warpgroup, 128);
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        if (i / (S::kStoreRows / 2) * S::kStoreRows == base) {
          store[(i / 4 * 8 % S::kStoreRows + lane % 4 * 2 + i % 2) * S::kStoreStride + row % kTileN + i % 4 / 2 * 8] =
              acc[i] * unit_scale[i % 4 / 2];
        }
      }
      sync_threads(2 + warpgroup, 128);
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
    ragged_warpgroup_matmul(const __grid_constant__ Params params, const __grid_constant__ CUtensorMap x_map,
                            const __grid_constant__ CUtensorMap row_map) {
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
    produce<S>(params, &x_map, &row_map, plan, shared);
  } else {
    ptx::raise_registers<S::kConsumerRegisters>();
    Consumer<S> consumer{params, shared};
    if (threadIdx.x / 128 == S::kWarpgroups - 1) arrive_threads(6, 256);
    const int64_t all = static_cast<int64_t>(plan.tile_count) * params.row_blocks;
    for (int64_t index = blockIdx.x; index < all; index += gridDim.x) {
      const Tile tile = find_tile<S>(plan, index, params.row_blocks);
      if (tile.expert < 0) {
        consumer.clear(plan, tile);
      } else if (tile.rows <= 32) {
        consumer.template run<32>(plan, tile);
      } else if (tile.rows <= 64) {
        consumer.template run<64>(plan, tile);
      } else {
        consumer.template run<128>(plan, tile);
      }
    }
  }
#else
  __trap();
#endif
}

template <typename S>
cudaError_t launch_shape(Params params, int64_t x_rows, int multiprocessors, cudaStream_t stream) {
  CUtensorMap map, row_map;
  MatmulArgs x = params.args;
  x.m = x_rows;
  if (cudaError_t error = warpgroup::describe_activations(x, kBoxRows, &map); error != cudaSuccess) return error;
  if (cudaError_t error = warpgroup::describe_activations(x, 1, &row_map); error != cudaSuccess) return error;
  params.row_blocks = static_cast<int>(ceil_div(params.args.n, S::kRows));
  LaunchShape shape;
  shape.grid = dim3(
      static_cast<unsigned>(std::min<int64_t>(multiprocessors, ragged::most_tiles(params.work) * params.row_blocks)));
  shape.threads = S::kThreads;
  shape.shared_bytes = S::kPlanAt + ragged::plan_bytes(params.work.experts);
  return launch_kernel(ragged_warpgroup_matmul<S>, shape, stream, params, map, row_map);
}

template <typename X>
cudaError_t launch_typed(const MatmulArgs& args, const ragged::Work& work, int64_t x_rows, int multiprocessors,
                         cudaStream_t stream) {
  Params params{};
  params.args = args;
  params.work = work;
  params.log2_group_blocks = log2_group_blocks(args);
  params.gather = work.row_mode == RowMode::kIds;
  const bool small_groups = params.log2_group_blocks == 0 || params.log2_group_blocks == 1;
  if (args.bits == 4) {
    return small_groups ? launch_shape<Shape<X, 4, true>>(params, x_rows, multiprocessors, stream)
                        : launch_shape<Shape<X, 4, false>>(params, x_rows, multiprocessors, stream);
  }
  return small_groups ? launch_shape<Shape<X, 8, true>>(params, x_rows, multiprocessors, stream)
                      : launch_shape<Shape<X, 8, false>>(params, x_rows, multiprocessors, stream);
}

}  // namespace wonly::ragged_warpgroup
