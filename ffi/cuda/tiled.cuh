// Products of hundreds of tokens and more on Hopper, bound by the tensor cores: wgmma with the weights as the register
// operand, straight from the packed format.
//
// Two CTAs of a cluster compute neighbouring blocks of 128 outputs for the same rows of activations. Two producer warps
// of each keep a ring of stages of 64 inputs full: its own packed weights, and half of the activations for both. Two
// warpgroups of 64 outputs turn their codes into weights of the activations' type (rounded once, as a dequantized
// weight is) while the tensor cores work on the stage before. CTAs stay and walk over the tiles. Sums are in float32.
//
// Which rows and weights make a tile is the business of a `Source` (matmul_tiled.cuh, ragged_tiled.cuh, conv.cuh),
// which inherits from `Rows` what it does not say otherwise:
//   struct Params                         what the host gives it
//   kTables                               whether codes may index a table
//   kMostSharedBytes                      of its own shared memory, which begins at `shared`
//   Source(params, args, shared)          all threads of the CTA
//   int64_t count()                       tiles that this cluster walks over
//   Tile tile(i)                          one warp
//   gather(tile, ..., sums)               adds what others summed for the tile; false where another finishes it
//   int64_t row(tile, i)                  where row i of a tile is in the result
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>
#include <utility>

#include "cuda/cluster_tiles.cuh"
#include "cuda/element.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_tiled.h"
#include "cuda/ptx_sm90.cuh"
#include "cuda/rounded_weights.cuh"
#include "cuda/tensor_map.h"
#include "cuda/wgmma.cuh"
#include "layout.h"

namespace wonly::tiled {

constexpr int kStageK = kStageInputs;
constexpr int kSteps = kStageK / 16;
constexpr int kTileRows = kTileTokens;
using tiles::Consumer, tiles::kOutputs, tiles::kThreads, tiles::kWarpgroups, tiles::Place, tiles::place_of;
constexpr int kCluster = kClusterCtas;
static_assert(kOutputs == kCtaOutputs && kCluster == tiles::kCluster);
constexpr int kAffineWarps = 2;       // of the producer's
constexpr int kBoxRows = 32;          // of the tensor copy engine
constexpr int kStagedRows = 32;       // that a warpgroup writes at a time, as float32
constexpr int kPlacedRows = 64;       // or as 16 bits, where they may lie anywhere
constexpr int kConsumersBarrier = 3;  // of both warpgroups, beside those of each
static_assert(kStagedRows * tiles::kStagedStride * 4 >= kPlacedRows * kTileN * 2);

// Rows of activations and the cluster's outputs, to be summed over stages first_stage .. end_stage - 1.
struct Tile {
  int64_t n0;   // of this CTA
  int weights;  // index of the batch entry or expert; negative: rows whose result is zero
  int first;    // row of the activations
  int rows;
  int first_stage, end_stage;
  int rest, split;  // of a tile that several clusters share
};

// The heights that a kernel multiplies, in rising order. More of them in one kernel leave `ptxas` short of registers,
// and low ones have room for more stages.
enum class Heights { kWhole, kLow, kMiddle, kHigh, kEven };
template <Heights>
struct HeightsOf;
template <>
struct HeightsOf<Heights::kWhole> : std::integer_sequence<int, 64, 128, 192, 256> {};
template <>
struct HeightsOf<Heights::kLow> : std::integer_sequence<int, 64, 144, 160> {};
template <>
struct HeightsOf<Heights::kMiddle> : std::integer_sequence<int, 64, 168, 176, 184, 200, 208> {};
template <>
struct HeightsOf<Heights::kHigh> : std::integer_sequence<int, 64, 216, 232, 240, 248> {};
template <>
struct HeightsOf<Heights::kEven> : std::integer_sequence<int, 64, 192, 224, 256> {};
// The lowest of at least so many rows, or the highest.
template <int... kHeights>
__host__ __device__ constexpr int height_for(int rows, std::integer_sequence<int, kHeights...>) {
  int height = 0;
  ((height = height < rows ? kHeights : height), ...);
  return height;
}
template <Heights kHeights>
constexpr int kHighest = height_for(kTileRows, HeightsOf<kHeights>{});
// Calls `multiply` with the height as a type that knows it.
template <int... kHeights, typename F>
__device__ __forceinline__ void with_height(int height, std::integer_sequence<int, kHeights...> all, F&& multiply) {
  constexpr int kLast = height_for(kTileRows, std::integer_sequence<int, kHeights...>{});
  (void)(((height == kHeights || kHeights == kLast) && (multiply(std::integral_constant<int, kHeights>{}), true)) ||
         ...);
}
constexpr int whole_boxes(int rows) { return (rows + kBoxRows - 1) / kBoxRows * kBoxRows; }

// What most sources have in common: rows that follow each other in memory, and one weight for all inputs.
template <Heights kHeights_>
struct RowsOf {
  using Tile = tiled::Tile;  // or what has more for the source's own use
  static constexpr Heights kHeights = kHeights_;
  static constexpr bool kSkipsTaps = false;  // whether a tile may have some of the taps alone
  static constexpr bool kLoadsRows = true;   // whether `row` loads from memory

  // A stage of a tile: which tap of the weights, and which 64 inputs of it.
  struct Walk {
    int tap, stage;
    __device__ void next() { ++stage; }
  };

  __device__ static constexpr int ctas() { return kCluster; }  // of a cluster
  __device__ static constexpr int taps() { return 1; }
  // Rows that are multiplied for a tile: a height of this kernel.
  __device__ static int columns(const Tile& tile) { return height_for(tile.rows, HeightsOf<kHeights>{}); }
  // The walk of the CTA `rank` over a tile, from its first stage on.
  __device__ static Walk walk(const Tile& tile, int) { return {0, tile.first_stage}; }
  // This CTA's share of the rows of a tile, which are whole boxes: what is the same for all stages. The last box may
  // have rows that are not multiplied.
  struct Copies {
    int begin, boxes, first;
  };
  __device__ static Copies copies(const Tile& tile, int columns, int rank) {
    const int boxes = whole_boxes(columns) / kBoxRows, share = (boxes + kCluster - 1) / kCluster;
    const int begin = rank * share * kBoxRows;
    return {begin, rank == 0 ? share : boxes - share, tile.first + begin};
  }
  // Copies its inputs of a stage to all CTAs of the cluster.
  __device__ static void copy(uint8_t* stage, const CUtensorMap* map, const Copies& copies, const Walk& walk,
                              int x_batch, uint64_t* barrier) {
    uint8_t* const to = stage + copies.begin * kStageK * 2;
#pragma unroll
    for (int box = 0; box < kTileRows / kCluster / kBoxRows; ++box) {
      if (box < copies.boxes) {
        ptx::tensor_copy_3d_multicast(to + box * kBoxRows * kStageK * 2, map, walk.stage * kStageK,
                                      copies.first + box * kBoxRows, x_batch, barrier, (1 << kCluster) - 1);
      }
    }
  }
};
using Rows = RowsOf<Heights::kWhole>;

template <typename Source_, typename X_, int kBits_, Codes kCodes>
struct Shape {
  using Source = Source_;
  using X = X_;
  static constexpr int kBits = kBits_;
  static constexpr bool kZeros = kCodes == Codes::kWithZeros, kTable = kCodes == Codes::kOfTable;
  static constexpr int kTiles = kStageK / tile_k(kBits);  // packed tiles of a stage along the inputs
  static constexpr int kXBytes = whole_boxes(kHighest<Source::kHeights>) * kStageK * 2;
  static constexpr int kWeightBytes = kTiles * kTileBytes;  // of a warpgroup
  static constexpr int kAffineAt = kXBytes + kWarpgroups * kWeightBytes;
  static constexpr int kStageBytes = kAffineAt + 2 * kOutputs * static_cast<int>(sizeof(Affine));
  static constexpr int kStagedBytes = kWarpgroups * kStagedRows * tiles::kStagedStride * 4;
  static constexpr int kFit =
      ((227 << 10) - tiles::kBarrierBytes - kStagedBytes - Source::kMostSharedBytes) / kStageBytes;
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  static constexpr int kStagedAt = tiles::kBarrierBytes + kStages * kStageBytes;
  static constexpr int kSourceAt = kStagedAt + kStagedBytes;
  static_assert(kStageBytes % 1024 == 0 && kStages >= 4);
};

template <typename Source>
struct Params {
  MatmulArgs args;
  typename Source::Params source;
  int log2_group_blocks;  // group size = 32 << this; -1: one scale per output
};

// One of two warps that fill stages with copies: activations, or weights. Two, because with few rows a stage is
// multiplied as fast as one thread asks for its copies; for the same reason addresses are at hand before a stage is
// empty.
template <typename S>
__device__ __forceinline__ void copy_stages(const Params<typename S::Source>& params, const typename S::Source& source,
                                            const CUtensorMap& x_map, tiles::Ring<S::kStages, S::kStageBytes>& ring,
                                            int64_t count, int rank, bool activations) {
  const MatmulArgs& args = params.args;
  for (int64_t index = 0; index < count; ++index) {
    const typename S::Source::Tile tile = source.tile(index);
    ring.wait_empty();
    if (activations && ptx::elect_one()) *ring.template note<typename S::Source::Tile>() = tile;
    if (tile.weights < 0) {  // an empty stage
      if (ptx::elect_one()) ptx::barrier_arrive(ring.filled());
      ring.advance();
      continue;
    }
    const tiles::Strips<S::kBits, S::kTiles> strips(args, tile.weights, tile.n0);
    auto walk = source.walk(tile, rank);
    if (activations) {
      const int columns = source.columns(tile);
      const int x_bytes = whole_boxes(columns) * kStageK * 2;
      const int x_batch = args.x_batch_stride == 0 ? 0 : tile.weights;
      const auto copies = source.copies(tile, columns, rank);
#pragma unroll 1
      for (int stage = tile.first_stage; stage < tile.end_stage; ++stage, walk.next(), ring.advance()) {
        ring.wait_empty();
        if (!ptx::elect_one()) continue;
        ptx::barrier_expect(ring.filled(), x_bytes);
        source.copy(ring.stage(), &x_map, copies, walk, x_batch, ring.filled());
      }
    } else {
      const int64_t strip_words = static_cast<int64_t>(strips.k_tiles) * kTileWords;
      const int64_t tap_words = strips.n_tiles * strip_words;
      const uint32_t* from = strips.words + walk.tap * tap_words + walk.stage * (S::kTiles * kTileWords);
#pragma unroll 1
      for (int stage = tile.first_stage; stage < tile.end_stage; ++stage, ring.advance()) {
        ring.wait_empty();
        if (ptx::elect_one()) {
          uint8_t* const to = ring.stage() + S::kXBytes;
          const int bytes = strips.bytes(walk.stage);
          ptx::barrier_expect(ring.filled(), strips.count * bytes);  // none beyond the last output
#pragma unroll
          for (int i = 0; i < kWarpgroups; ++i) {
            if (i < strips.count)
              ptx::bulk_copy(to + i * S::kWeightBytes, from + i * strip_words, bytes, ring.filled());
          }
        }
        from += S::kTiles * kTileWords;
        const int tap = walk.tap;
        walk.next();
        if (walk.tap != tap) from = strips.words + walk.tap * tap_words;
      }
    }
  }
}

template <typename S>
__global__ void __launch_bounds__(kThreads, 1)
    tiled_matmul(const __grid_constant__ Params<typename S::Source> params, const __grid_constant__ CUtensorMap x_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using X = typename S::X;
  using C = Convert<S>;
  using Source = typename S::Source;
  extern __shared__ __align__(1024) uint8_t shared[];
  tiles::Ring<S::kStages, S::kStageBytes> ring(shared);
  const MatmulArgs& args = params.args;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);  // known to be uniform
  const int lane = threadIdx.x % 32;

  const Source source(params.source, args, shared + S::kSourceAt);
  const int ctas = source.ctas(), rank = blockIdx.x & (ctas - 1);
  const bool small_groups = params.log2_group_blocks == 0 || params.log2_group_blocks == 1;
  ring.init(2, small_groups ? 1 : kAffineWarps, ctas);
  const int64_t count = source.count();

  if (warp >= kWarpgroups * 4) {
    ptx::lower_registers<tiles::kProducerRegisters>();
    // Its weights and factors come to this CTA alone.
    const bool copies_to_others = warp == kWarpgroups * 4;
    if (copies_to_others) {
      ptx::prefetch_map(&x_map);
      ring.meet(ctas);
    }
    if (warp == kWarpgroups * 4 || warp == kWarpgroups * 4 + kAffineWarps + 1) {
      copy_stages<S>(params, source, x_map, ring, count, rank, warp == kWarpgroups * 4);
    } else if (warp <= kWarpgroups * 4 + kAffineWarps) {
      // What bounds these lone warps is how many instructions wait for each other (docs/performance.md, log 126): types
      // are known to the compiler, and there is no multiplication in a stage.
      const int mine = warp - kWarpgroups * 4 - 1, groups = static_cast<int>(args.groups);
      const auto affine_of = [&](float of_codes, auto of_group) {
        if constexpr (std::is_same_v<decltype(of_group), float>) {
          return C::centred(of_codes, of_group, args.shift_mode == ShiftMode::kOffsets);
        } else {
          return C::affine(of_codes, of_group);
        }
      };
      // Each of the two warps for 64 outputs, once for a group. Scales and shifts of the next group are on their way
      // from memory while those of this one are used.
      const auto make_factors = [&](auto scale_of, auto shift_of) {
        using Scale = decltype(scale_of);
        using Shift = decltype(shift_of);
        constexpr bool kShift = !std::is_same_v<Shift, NoShift>;
        const int first = mine * 64 + lane, all_groups = source.taps() * groups;
        for (int64_t index = 0; index < count; ++index) {
          const typename Source::Tile tile = source.tile(index);
          if (tile.weights < 0) {
            ring.wait_empty();
            ring.fill(lane);
            ring.advance();
            continue;
          }
          auto walk = source.walk(tile, rank);
          [[maybe_unused]] auto ahead = walk;
          const auto group_of_tap = [&] {
            return params.log2_group_blocks < 0 ? 0 : 2 * walk.stage >> params.log2_group_blocks;
          };
          int of_tap = group_of_tap(), next = walk.tap * groups + of_tap;
          const Scale* scales[2];
          const Shift* shifts[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int64_t at = next * args.n + min(tile.n0 + first + 32 * i, args.n - 1);
            scales[i] = static_cast<const Scale*>(args.scales) + tile.weights * args.scales_batch_stride + at;
            if constexpr (kShift) {
              shifts[i] = static_cast<const Shift*>(args.shift) + tile.weights * args.shift_batch_stride + at;
            }
          }
          Scale scale[2];
          Shift shift[2];
          const auto fetch = [&] {
            if (next >= all_groups) return;
            ++next;
            int64_t step = args.n;
            if (++of_tap == groups) {
              of_tap = 0;
              if constexpr (Source::kSkipsTaps) {
                const int skipped = (ahead.next_tap() - 1) * groups;
                next += skipped;
                step += skipped * args.n;
              }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              scale[i] = *scales[i];
              scales[i] += step;
              if constexpr (kShift) {
                shift[i] = *shifts[i];
                shifts[i] += step;
              }
            }
          };
          fetch();
          Affine affine[2];
#pragma unroll 1
          for (int stage = tile.first_stage, made = -1; stage < tile.end_stage; ++stage, walk.next(), ring.advance()) {
            ring.wait_empty();
            Affine* to = reinterpret_cast<Affine*>(ring.stage() + S::kAffineAt) + first;
            const int group = walk.tap * groups + group_of_tap();
            if (group != made) {
#pragma unroll
              for (int i = 0; i < 2; ++i) affine[i] = affine_of(to_float(scale[i]), shift[i]);
              fetch();
            }
            to[0] = affine[0], to[32] = affine[1];
            made = group;
            ring.fill(lane);
          }
        }
      };
      // The same where every stage has a group, or two, of its own: each warp for all outputs of every other stage, as
      // one stage takes a warp longer than the tensor cores.
      const auto take_turns = [&](auto scale_of, auto shift_of) {
        using Scale = decltype(scale_of);
        using Shift = decltype(shift_of);
        constexpr bool kShift = !std::is_same_v<Shift, NoShift>;
        constexpr int kOfLane = kOutputs / 32;
        const int sets = params.log2_group_blocks == 0 ? 2 : 1;
        int turn = 0;  // whose stage comes next
        for (int64_t index = 0; index < count; ++index) {
          const typename Source::Tile tile = source.tile(index);
          if (tile.weights < 0) {
            if (turn == mine) {
              ring.wait_empty();
              ring.fill(lane);
            }
            ring.advance();
            turn ^= 1;
            continue;
          }
          const int64_t first = tile.n0 + lane;
          const Scale* const scales =
              static_cast<const Scale*>(args.scales) + tile.weights * args.scales_batch_stride + first;
          [[maybe_unused]] const Shift* shifts;
          if constexpr (kShift) {
            shifts = static_cast<const Shift*>(args.shift) + tile.weights * args.shift_batch_stride + first;
          }
          const int left = static_cast<int>(min(args.n - first, int64_t{kOutputs}));  // outputs, of every 32nd one
          auto walk = source.walk(tile, rank);
          Scale scale[2][kOfLane] = {};
          Shift shift[2][kOfLane] = {};
          const auto fetch = [&] {
            const int group = walk.stage * sets;  // of the tap
            int64_t at = (walk.tap * groups + group) * args.n;
#pragma unroll
            for (int set = 0; set < 2; ++set) {
              if (set >= sets) break;
#pragma unroll
              for (int i = 0; i < kOfLane; ++i) {
                if (32 * i >= left) continue;
                scale[set][i] = scales[at + 32 * i];
                if constexpr (kShift) shift[set][i] = shifts[at + 32 * i];
              }
              if (group + 1 < groups) at += args.n;
            }
          };
          int stage = tile.first_stage;
          if (turn != mine) {
            ring.advance();
            walk.next();
            ++stage;
          }
          if (stage < tile.end_stage) fetch();
#pragma unroll 1
          for (; stage < tile.end_stage; stage += 2) {
            ring.wait_empty();
            Affine* const to = reinterpret_cast<Affine*>(ring.stage() + S::kAffineAt) + lane;
#pragma unroll
            for (int set = 0; set < 2; ++set) {
              if (set >= sets) break;
#pragma unroll
              for (int i = 0; i < kOfLane; ++i) {
                to[set * kOutputs + 32 * i] = affine_of(to_float(scale[set][i]), shift[set][i]);
              }
            }
            if (stage + 2 < tile.end_stage) {
              walk.next();
              walk.next();
              fetch();
            }
            ring.fill(lane);
            ring.advance();
            if (stage + 1 < tile.end_stage) ring.advance();
          }
          turn = (turn + tile.end_stage - tile.first_stage) & 1;
        }
      };
      const auto fill = [&](auto scale, auto shift) {
        if (small_groups) {
          take_turns(scale, shift);
        } else {
          make_factors(scale, shift);
        }
      };
      const auto with_shift = [&](auto scale) {
        if constexpr (S::kTable || (!S::kZeros && std::is_same_v<decltype(scale), float>)) {
          return fill(scale, NoShift{});
        } else {
          if (!S::kZeros && args.shift_mode == ShiftMode::kNone) return fill(scale, NoShift{});
          if (S::kZeros && args.shift_dtype == DType::kU8) return fill(scale, uint8_t{});
          fill(scale, scale);  // of the same type
        }
      };
      if (args.scale_dtype == DType::kF32) {
        with_shift(float{});
      } else {
        with_shift(X{});
      }
    }
    __syncwarp();
    if (!copies_to_others) ring.meet(ctas);
  } else {
    ring.meet(ctas);
    ptx::raise_registers<tiles::kConsumerRegisters>();
    const Consumer me{warp / 4, warp % 4};
    float* const staged =
        reinterpret_cast<float*>(shared + S::kStagedAt) + me.warpgroup * kStagedRows * tiles::kStagedStride;
    const bool plain = args.y_dtype == args.x_dtype && (!Source::kLoadsRows || args.n % 8 == 0);
    const bool wide = args.y_dtype == DType::kF32 && args.activation == Activation::kNone;
    // Where this lane's words are in a stage, and the factors of its outputs for each half, which may be the same.
    const int own_factors = S::kAffineAt + (me.warpgroup * kTileN + me.row()) * static_cast<int>(sizeof(Affine));
    const int second_half = params.log2_group_blocks == 0 ? kOutputs * static_cast<int>(sizeof(Affine)) : 0;
    int own[3] = {S::kXBytes + me.warpgroup * S::kWeightBytes + me.thread() * 16, own_factors,
                  own_factors + second_half};
    ptx::keep(own);
    const uint64_t first_x = ptx::wgmma_descriptor(ring.stages);
    const uint32_t high_x = first_x >> 32, low_x = static_cast<uint32_t>(first_x);

    // Of a stage, by a warp that has read it: without branches, which hold the products up.
    const uint32_t empty = ptx::address_at_rank(ring.empty, lane & (ctas - 1));
    const auto release = [&](int slot, bool arrives) {
      if (ptx::kArrivals == 1) {
        __syncwarp();
        ptx::barrier_arrive_at_if(empty + slot * static_cast<int>(sizeof(uint64_t)), arrives && lane < ctas);
      } else if (arrives) {
        ring.release(slot, lane, ctas);
      }
    };
    // The products of a tile's stages, of so many columns.
    const auto multiply = [&](const typename Source::Tile& tile, float (&sums)[kTileRows / 2], auto columns) {
      constexpr int kColumns = columns.value;
      float acc[kColumns / 2] = {};
      ByteTable table{};
      if constexpr (S::kTable) {
        table = C::table(static_cast<const float*>(args.shift) + tile.weights * args.shift_batch_stride);
      }
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
          C::weights(upper ? four.z : four.x, affine[half][0], table, low);
          C::weights(upper ? four.w : four.y, affine[half][1], table, high);
#pragma unroll
          for (int i = 0; i < 16 / S::kBits; ++i) {
            to[part + i / 2][i % 2 * 2] = low[i];
            to[part + i / 2][i % 2 * 2 + 1] = high[i];
          }
        }
      };
      const auto multiply_half = [&](int half, const uint32_t (&with)[kSteps / 2][4]) {
        const uint64_t x =
            static_cast<uint64_t>(high_x) << 32 | (low_x + static_cast<uint32_t>(ring.at.slot) * (S::kStageBytes >> 4));
#pragma unroll
        for (int i = 0; i < kSteps / 2; ++i) {
          const uint64_t operand_x = x + ((half * kSteps / 2 + i) * 32 >> 4);
          if constexpr (C::kBf16) {
            ptx::Wgmma<kColumns>::bf16(acc, with[i], operand_x, true);
          } else {
            ptx::Wgmma<kColumns>::f16(acc, with[i], operand_x, true);
          }
        }
      };
      // All that is needed to convert the codes of the stage that comes next.
      const auto prepare = [&] {
        ring.wait_full();
        const uint8_t* const data = ring.stage();
#pragma unroll
        for (int i = 0; i < S::kTiles; ++i) {
          words[i] = *reinterpret_cast<const uint4*>(data + own[0] + i * kTileBytes);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int i = 0; i < 2; ++i) affine[half][i] = reinterpret_cast<const Affine*>(data + own[1 + half])[8 * i];
        }
      };

      prepare();
      int last_slot = 0, left = tile.end_stage - tile.first_stage;
      bool arrives = false;  // there is a stage before
      if constexpr (kColumns > 128 && kColumns <= 176) {
        // A whole stage is converted while the one before is multiplied: half of one is too little work for that. Of
        // more columns it is not, and they leave fewer registers.
        uint32_t codes[2][2][kSteps / 2][4];
        int slot = 0;
        convert_half(0, codes[0][0]);
        convert_half(1, codes[0][1]);
        do {
#pragma unroll
          for (int turn = 0; turn < 2; ++turn) {
            ptx::wgmma_fence();
            multiply_half(0, codes[turn][0]);
            multiply_half(1, codes[turn][1]);
            ptx::wgmma_commit();
            slot = ring.at.slot;
            ring.advance();
            if (--left == 0) break;
            prepare();
            ptx::wgmma_wait<1>();
            release(last_slot, arrives);
            last_slot = slot;
            arrives = true;
            convert_half(0, codes[1 - turn][0]);
            convert_half(1, codes[1 - turn][1]);
          }
        } while (left > 0);
        ptx::wgmma_wait<0>();
        release(last_slot, arrives);
        release(slot, true);
      } else {
        for (;;) {
          uint32_t first[kSteps / 2][4], second[kSteps / 2][4];
          convert_half(0, first);
          ptx::wgmma_fence();
          multiply_half(0, first);
          ptx::wgmma_commit();
          ptx::wgmma_wait<1>();
          release(last_slot, arrives);
          convert_half(1, second);
          ptx::wgmma_fence();
          multiply_half(1, second);
          ptx::wgmma_commit();
          last_slot = ring.at.slot;
          arrives = true;
          ring.advance();
          if (--left == 0) break;
          prepare();
          ptx::wgmma_wait<1>();
        }
        ptx::wgmma_wait<0>();
        release(last_slot, true);
      }
      ptx::keep(acc);
#pragma unroll
      for (int i = 0; i < kTileRows / 2; ++i) sums[i] = i < kColumns / 2 ? acc[i < kColumns / 2 ? i : 0] : 0.f;
    };

    // What follows, of the rows that there are: one function for all numbers of columns, which would take most of the
    // time to compile.
    const auto finish_tile = [&](const typename Source::Tile& tile, float (&acc)[kTileRows / 2], bool last) {
      const int64_t n0 = tile.n0 + me.warpgroup * kTileN;
      if (n0 >= args.n || !source.gather(tile, me, acc)) return;
      float bias[2] = {};
      if ((plain || wide) && args.has_bias) me.load_bias(args, tile.weights, n0, bias);
      if (wide) {
        int places[kTileRows / 32];  // each lane's, all on their way at once, where they are loads
        if constexpr (Source::kLoadsRows) {
#pragma unroll
          for (int i = 0; i < kTileRows / 32; ++i) {
            places[i] = static_cast<int>(source.row(tile, min(32 * i + lane, tile.rows - 1)));
          }
        }
        float* const y = static_cast<float*>(args.y) + tile.weights * args.m * args.n;
        me.store_wide<kTileRows>(acc, bias, static_cast<int>(args.n), y, n0, tile.rows, [&](int j, int c) {
          const int column = j * 8 + lane % 4 * 2 + c;
          if constexpr (Source::kLoadsRows) {
            return tiles::Column{__shfl_sync(0xffffffffu, places[j / 4], column % 32), 1.f / C::kUnit};
          } else {
            return tiles::Column{static_cast<int>(source.row(tile, column)), 1.f / C::kUnit};
          }
        });
        return;
      }
      if (plain) {
        float unscale = 1.f / C::kUnit;
        if (__builtin_expect(args.activation != Activation::kNone, 0)) {
          // Apart from what all tiles come by, which it would cut into pieces.
#pragma unroll
          for (int i = 0; i < kTileRows / 2; ++i) acc[i] = fmaf(acc[i], unscale, bias[i % 4 / 2]);
          apply(args.activation, acc, true);
          unscale = 1.f, bias[0] = bias[1] = 0.f;
        }
        const auto pack = [&](int i) {
          const float of_output = bias[i % 4 / 2];
          return from_float2<X>(fmaf(acc[i], unscale, of_output), fmaf(acc[i + 1], unscale, of_output));
        };
        uint16_t* const y = static_cast<uint16_t*>(args.y) + tile.weights * args.m * args.n;
        float* const of_all = reinterpret_cast<float*>(ring.stages + me.warpgroup * kTileRows * kTileN * 2);
        const auto store = [&](auto&& place_of) {
          me.store_placed<kTileRows, kPlacedRows, false, !Source::kLoadsRows>(
              static_cast<int>(args.n), y, n0, tile.rows, last ? of_all : staged, pack, place_of, last);
        };
        if constexpr (Source::kLoadsRows) {
          int places[kTileRows / 16];  // all on their way at once
#pragma unroll
          for (int i = 0; i < kTileRows / 16; ++i) {
            if (i % (kPlacedRows / 16) == 0 && 16 * i >= tile.rows) break;
            places[i] = static_cast<int>(source.row(tile, min(16 * i + me.stored_row(), tile.rows - 1)));
          }
          store([&](int i) { return places[i]; });
        } else {
          store([&](int i) { return static_cast<int>(source.row(tile, 16 * i + me.stored_row())); });
        }
        return;
      }
      const auto sums = [&](int i) { return make_float2(acc[i] * (1.f / C::kUnit), acc[i + 1] * (1.f / C::kUnit)); };
      const Finish of(args, tile.weights);
      me.store<kTileRows, kStagedRows>(of, n0, tile.rows, staged, sums,
                                       [&](int i, int64_t n, float (&values)[8], const float (&biases)[8]) {
                                         finish(of, source.row(tile, i), n, values, biases);
                                       });
    };

    for (int64_t index = 0; index < count; ++index) {
      // The warp that copies tells which tile is this one's, in a note beside its first stage: what finding a tile
      // takes is in no register while tiles are multiplied.
      ring.wait_full();
      const typename Source::Tile tile = *ring.template note<typename Source::Tile>();
      if (tile.weights >= 0) prefetch_bias(args, tile.weights, tile.n0, kOutputs, threadIdx.x);
      if (tile.weights < 0) {
        const int outputs = static_cast<int>(max(min(int64_t{kOutputs}, args.n - tile.n0), int64_t{0}));
#pragma unroll 1
        for (int i = 0; i < tile.rows; ++i) {
          const int64_t to = source.row(tile, i) * args.n + tile.n0;
          if (static_cast<int>(threadIdx.x) < outputs) store_zero(args.y, to + threadIdx.x, args.y_dtype);
        }
        ring.release(ring.at.slot, lane, ctas);
        ring.advance();
        continue;
      }
      float acc[kTileRows / 2];
      with_height(source.columns(tile), HeightsOf<Source::kHeights>{},
                  [&](auto columns) { multiply(tile, acc, columns); });
      const bool last = index + 1 == count;
      if (last) ptx::named_sync<kConsumersBarrier, kWarpgroups * 128>();  // nobody has anything in the ring any more
      finish_tile(tile, acc, last);
    }
  }
  if (ctas > 1) ptx::cluster_meet();  // the other CTA may still copy to here
#else
  __trap();
#endif
}

// Calls `launch` with a null pointer to the kernel's shape for `args`, whose activations are of type X.
template <typename Source, typename X, typename Launch>
cudaError_t with_shape(const MatmulArgs& args, Launch&& launch) {
  if (args.shift_mode == ShiftMode::kTable) {
    if constexpr (Source::kTables) return launch(static_cast<Shape<Source, X, 4, Codes::kOfTable>*>(nullptr));
    return cudaErrorNotSupported;
  }
  const bool shifted = args.shift_mode != ShiftMode::kNone;
  const bool zeros = args.shift_mode == ShiftMode::kZeros || (shifted && args.shift_dtype == DType::kF32);
  if (args.bits == 4) {
    return zeros ? launch(static_cast<Shape<Source, X, 4, Codes::kWithZeros>*>(nullptr))
                 : launch(static_cast<Shape<Source, X, 4, Codes::kNumbers>*>(nullptr));
  }
  return zeros ? launch(static_cast<Shape<Source, X, 8, Codes::kWithZeros>*>(nullptr))
               : launch(static_cast<Shape<Source, X, 8, Codes::kNumbers>*>(nullptr));
}

}  // namespace wonly::tiled
