// dx = dy @ W^T for many tokens on Hopper: wgmma, for which weights are dequantized a stage at a time, into registers
// where instructions for that are few (transposed_register_weights.cuh), and otherwise into shared memory
// (transposed_shared_weights.cuh).
//
// A CTA computes blocks of 128 inputs x kTokens tokens (256 inputs for the fewest), one after the other. A stage is 64
// or 128 outputs, with dy by the tensor copy engine, of which the CTAs of a cluster may bring each other their share.
// Two warpgroups multiply, or four, with as many of the inputs each.
//
// Blocks that do not fill the chip are split: the CTAs of a cluster share the outputs of one block, copy their sums
// into each other's shared memory, and add them in the order of their ranks.
//
// A weight is rounded once to the type of dy, as a dense one would be: the code less the integer part of its zero is
// exact, and one multiplication by the scale rounds. Scales of another type are two numbers of dy's type, and what is
// left of the zero, or the offset, enters rounded; so do the entries of a table. (Of bf16 dy other scales and offsets
// are rounded before: primitives/matmul.py.) Nothing else is rounded before the float32 sum, whose order depends on N,
// the size of the cluster that splits it and the outputs of a stage alone: a token's result does not depend on the
// other tokens.
//
// Which rows and weights make a block is the business of a `Source`:
//   struct Params                 what the host gives it
//   kSharedBytes                  of its own shared memory, which begins at `shared`
//   kStagingTokens                rows that a warpgroup writes out at a time, at most
//   kBulkStores                   whether rows of a block follow each other in the result
//   kSplits                       whether items may be split
//   kAnyRows                      whether blocks that are not whole are common (box_rows), and an item is found again
//                                 after its stages
//   Source(params, args, shared)  all threads of the CTA
//   int items()                   what the clusters walk over
//   Item item(i, rank)            one warp
//   int64_t row(item, i)          where row i of a block is in the result
//   int64_t dy_row(item, i)       and of which row of dy, of the same batch entry
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/cluster_tiles.cuh"
#include "cuda/division.h"
#include "cuda/either.cuh"
#include "cuda/element.cuh"
#include "cuda/exact_sum.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_transposed.h"
#include "cuda/ring.cuh"
#include "cuda/tensor_map.h"
#include "cuda/transposed_float32.cuh"
#include "cuda/transposed_items.cuh"
#include "cuda/transposed_register_weights.cuh"
#include "cuda/transposed_shared_weights.cuh"
#include "layout.h"

namespace wonly::transposed_warpgroup {

template <typename S>
constexpr int kRunBytes = S::kWarps * S::kTiles * 32 * 16;  // sums of a CTA's block for eight tokens
template <typename S>
constexpr int kStoredTokens = std::min(S::kStagingTokens, S::kTokens / 2);  // by the copy engine at a time
constexpr int kMostParts = 4;                                               // in which two CTAs exchange their sums

// Of the sums of rows of 16 bits.
template <typename S>
__device__ __forceinline__ float unscale_of(const MatmulArgs& args) {
  float unscale = 1.f;
  if constexpr (!S::kFloat32 && S::kInRegisters && !S::kTable) {
    with_type<typename S::X>(args.x_dtype,
                             [&](auto of) { unscale = PairConverter<typename decltype(of)::X, S::kBits>::kUnscale; });
  }
  return unscale;
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    transposed_warpgroup_matmul(const __grid_constant__ Params<typename S::Source> params,
                                const __grid_constant__ CUtensorMap dy_map, const __grid_constant__ CUtensorMap dy_last,
                                const __grid_constant__ CUtensorMap dx_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using X = typename S::X;
  constexpr int kStages = S::kStages;
  // Warpgroups can only have the registers that a CTA is launched with: they would wait for others for ever.
  constexpr int kOfConsumers = S::kConsumers * 128, kLaunched = kRegisters / S::kThreads / 8 * 8 * S::kThreads;
  static_assert(!S::kMovesRegisters ||
                kOfConsumers * S::kConsumerRegisters + (S::kThreads - kOfConsumers) * S::kProducerRegisters <=
                    kLaunched);
  extern __shared__ __align__(1024) uint8_t shared[];
  uint64_t* full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* empty = full + kStages;
  uint64_t* received = empty + kStages;
  uint64_t* landed = received + kMostParts;
  uint8_t* const ring = shared + kBarrierBytes;

  const MatmulArgs& args = params.args;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;
  const int rank = ptx::cluster_rank();

  // By the last warp, which has nothing else to do yet: copies wait for it.
  if (threadIdx.x == S::kThreads - 32) {
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(full + i, S::kArrivals);
      ptx::barrier_init(empty + i, S::kWarps * params.partners * ptx::kArrivals);
    }
    if constexpr (S::kMakesShifts) {
      for (int i = 0; i < kStages; ++i) ptx::barrier_init(landed + i, 1);
    }
    for (int i = 0; i < kMostParts; ++i) ptx::barrier_init(received + i, 1);
    ptx::barrier_init_fence();
  }
  const typename S::Source source(params.source, args, shared + S::kSourceAt);
  if (params.partners == 2) {
    __syncwarp();
    ptx::cluster_arrive();
  } else {
    __syncthreads();
  }
  const Cta<S> cta{params, dy_map, dy_last, source, full, empty,
                   landed, ring,   warp,    lane,   rank, static_cast<int>(blockIdx.x)};

  if (warp >= S::kWarps) {
    if constexpr (S::kMovesRegisters) ptx::lower_registers<S::kProducerRegisters>();
    bool last_split;
    if constexpr (S::kFloat32) ptx::wait_for_last_kernel();
    if constexpr (S::kMakesShifts) {
      if (warp < S::kWarps + 2) {
        last_split = copy_stages(cta);
      } else {
        with_type<X>(args.x_dtype, [&](auto of) { last_split = prepare_shifts<typename decltype(of)::X>(cta); });
      }
    } else if constexpr (S::kInRegisters) {
      last_split = copy_stages(cta);
    } else {
      last_split = convert_stages(cta);
    }
    __syncwarp();
    if (last_split) ptx::cluster_meet();
  } else {
    cta.wait_for_barriers();
    if constexpr (S::kMovesRegisters) ptx::raise_registers<S::kConsumerRegisters>();
    const int warpgroup = warp / 4;
    const int g = lane / 4;
    const int t = lane % 4;
    const int thread = threadIdx.x % 128;
    uint8_t* const staging = shared + S::kStagingAt + warpgroup * S::kStagingBytes;
    const auto sync = [&] { asm volatile("bar.sync %0, 128;\n" ::"r"(1 + warpgroup) : "memory"); };
    const bool wide = S::kFloat32 || params.wide_result;
    const bool bulk_stores = !S::kFloat32 && S::Source::kBulkStores && params.rows_of_16_bytes;
    // What undoes the powers of two of float32 dy's tokens, for each warpgroup, and of the scales of this warp's
    // inputs.
    [[maybe_unused]] float* const undo_dy =
        reinterpret_cast<float*>(shared + S::kSourceAt) - (warpgroup + 1) * S::kTokens;
    [[maybe_unused]] float undo_scale = 1.f;
    [[maybe_unused]] float undo_table = 1.f;
    [[maybe_unused]] uint32_t table = 0;  // a shared address
    if constexpr (S::kFloat32) {
      if constexpr (S::kTable) {
        static_assert(S::kConsumers * 128 == kTablePairs);
        table = ptx::shared_address(shared + S::kTableAt);
        undo_table = prepare_table<X, 2, kTableTop>(static_cast<const float*>(args.shift), shared + S::kTableAt,
                                                    static_cast<int>(threadIdx.x));
        ptx::named_sync<kConsumersBarrier, S::kConsumers * 128>();
      }
      ptx::wait_for_last_kernel();
    }
    // Of 16-bit dy the table is that of the item's weights.
    [[maybe_unused]] int64_t table_of = -1;
    const auto find_table = [&]([[maybe_unused]] const Item& item) {
      if constexpr (S::kInRegisters && S::kTable && !S::kFloat32) {
        const int64_t of_item = item.weights * args.shift_batch_stride;
        if (of_item == table_of) return;
        table_of = of_item;
        ptx::named_sync<kConsumersBarrier, S::kConsumers * 128>();  // nobody reads the one before
        if (S::kConsumers * 128 == kTablePairs || threadIdx.x < kTablePairs) {
          with_type<X>(args.x_dtype, [&](auto of) {
            prepare_table<typename decltype(of)::X, 1, kSplitTop, S::kTableRowBytes>(
                static_cast<const float*>(args.shift) + of_item, shared + S::kTableAt, static_cast<int>(threadIdx.x));
          });
        }
        ptx::named_sync<kConsumersBarrier, S::kConsumers * 128>();
      }
    };
    const auto unscaled = [&](const Item& item, float sum, [[maybe_unused]] int token, [[maybe_unused]] int64_t k) {
      if constexpr (S::kFloat32) {
        // The smaller factor first, so that no product overflows that the result does not.
        const float of_token = undo_dy[token];
        const float value =
            sum * (undo_table * S::kUnscale) * fminf(of_token, undo_scale) * fmaxf(of_token, undo_scale);
        // Where weights are two numbers, the smaller, which may be zero, makes a NaN of an infinity.
        if constexpr (!S::kExact) {
          if (!isfinite(value)) {
            return exact_sum_transposed<S::kTable>(args, item.weights, source.dy_row(item, token), k);
          }
        }
        return value;
      }
      return sum * unscale_of<S>(args);
    };
    RingPosition<kStages> at;
    float acc[S::kTiles * S::kParts][S::kColumns / 2];
    // Those of eight tokens.
    const auto sums_of = [&](int tile, int run) {
      constexpr int kRuns = S::kColumns / 8;
      return acc[tile * S::kParts + run / kRuns] + run % kRuns * 4;
    };
    // The input of the first row of a fragment, of the warpgroup's.
    const auto input_of = [&](int tile) { return (warp % 4 * S::kTiles + tile) * 16; };
    // A run of eight tokens from row `first` of the item on, as the accumulators lie.
    const auto store_wide = [&](const Item& item, int tile, int first, const float* sums) {
      const int64_t k = item.k0 + warpgroup * S::kTiles * 64 + input_of(tile) + g;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = first + 2 * t + i;
        if (token >= item.rows) continue;
        float* const to = static_cast<float*>(args.y) + source.row(item, token) * args.k + k;
        if (k < args.k) to[0] = unscaled(item, sums[i], token, k);
        if (k + 8 < args.k) to[8] = unscaled(item, sums[2 + i], token, k + 8);
      }
    };
    // Two runs, rounded and in rows of 64 inputs.
    const auto stage = [&](int tile, int to, const float* first, const float* second) {
      const float unscale = unscale_of<S>(args);
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const two = (i < 2 ? first : second) + i % 2 * 2;
        pairs[i] = round_two<X>(args.x_dtype, two[0] * unscale, two[1] * unscale);
      }
      const int chunk = (input_of(tile) / 8 % 8 + lane / 8 % 2) ^ (lane % 8);
      ptx::store_matrices_transposed(
          staging + (input_of(tile) / 64 * S::kStagingTokens + to + lane / 16 * 8 + lane % 8) * 128 + chunk * 16,
          pairs);
    };
    // `count` rows that were staged, which are those from row `first` of the item on.
    const auto store_staged = [&](const Item& item, int first, int count) {
      constexpr int kChunks = S::kTiles * 8;
#pragma unroll 2
      for (int i = thread; i < count * kChunks; i += 128) {
        const int token = i / kChunks, chunk = i % kChunks;
        const int64_t k = item.k0 + warpgroup * S::kTiles * 64 + chunk * 8;
        if (k >= args.k) continue;
        const uint8_t* from = staging + (chunk / 8 * S::kStagingTokens + token) * 128 + (chunk % 8 ^ (token % 8)) * 16;
        uint16_t* const to = static_cast<uint16_t*>(args.y) + source.row(item, first + token) * args.k + k;
        if (params.rows_of_16_bytes) {
          *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        } else {
#pragma unroll 1
          for (int j = 0; j < 8 && k + j < args.k; ++j) to[j] = reinterpret_cast<const uint16_t*>(from)[j];
        }
      }
    };
    // An item's rows, rounded, wherever they are in the result: places of 64 of them are on their way from memory while
    // the 64 before are written.
    const auto store_rows = [&]([[maybe_unused]] const Item& item) {
      if constexpr (!S::kFloat32 && !S::Source::kBulkStores) {
        static_assert(S::kTiles == 1);
        constexpr int kAtOnce = S::kStagingTokens, kPlaces = kAtOnce / 16;
        const tiles::ConsumerOf<S::kConsumers> me{warpgroup, warp % 4};
        int places[kPlaces];
        const auto find_places = [&](int first) {
          if (first >= item.rows) return;
#pragma unroll
          for (int i = 0; i < kPlaces; ++i) {
            places[i] = static_cast<int>(source.row(item, min(first + 16 * i + me.stored_row(), item.rows - 1)));
          }
        };
        const float unscale = unscale_of<S>(args);
        const auto pack = [&](int i) {
          const float* const two = sums_of(0, i / 4) + i % 4;
          return round_two<X>(args.x_dtype, two[0] * unscale, two[1] * unscale);
        };
        find_places(0);
        me.template store_placed<S::kTokens, kAtOnce>(static_cast<int>(args.k), static_cast<uint16_t*>(args.y),
                                                      item.k0 + warpgroup * 64, item.rows,
                                                      reinterpret_cast<float*>(staging), pack, [&](int i) {
                                                        const int place = places[i % kPlaces];
                                                        if (i % kPlaces == kPlaces - 1) find_places(16 * i + 16);
                                                        return place;
                                                      });
      }
    };
    // The same in float32, of consecutive rows, too. There the loop of stages is as it is without this only if nothing
    // of it is computed before: else its loads change places, and it takes up to 8% longer.
    constexpr bool kWideRows = !S::kFloat32 && S::kTiles == 1;
    const auto store_wide_rows = [&]([[maybe_unused]] const Item& item) {
      if constexpr (kWideRows) {
        constexpr bool kHere = S::Source::kBulkStores;
        const int own = kHere ? ptx::thread_here() % 128 : thread, own_warp = kHere ? own / 32 : warp % 4;
        const int own_g = kHere ? own % 32 / 4 : g, own_t = kHere ? own % 4 : t;
        constexpr int kAtOnce = 32, kEach = kAtOnce / 8;
        static_assert(S::kTokens % kAtOnce == 0 && kAtOnce * 64 * 4 <= S::kStagingBytes);
        // Fours of a row's 64 inputs, in an order without conflicts: rows 2 t and 2 t + 1 of eight are a thread's.
        float4* const fours = reinterpret_cast<float4*>(staging);
        const int row = own / 16, four = own % 16, order = row / 2 % 4 * 2;
        const int64_t k = item.k0 + warpgroup * 64 + four * 4;
        const float unscale = unscale_of<S>(args);
#pragma unroll
        for (int first = 0; first < S::kTokens; first += kAtOnce) {
          if (first >= item.rows) break;
          sync();
#pragma unroll
          for (int i = 0; i < kAtOnce / 8 * 4; ++i) {
            const int input = own_warp * 16 + i % 4 / 2 * 8 + own_g;
            float4* const to = fours + (i / 4 * 8 + 2 * own_t + i % 2) * 16 + (input / 4 ^ own_t * 2);
            reinterpret_cast<float*>(to)[input % 4] = sums_of(0, first / 8 + i / 4)[i % 4] * unscale;
          }
          int64_t places[kEach];
#pragma unroll
          for (int i = 0; i < kEach; ++i) {
            places[i] = source.row(item, min(first + i * 8 + row, item.rows - 1));
          }
          sync();
#pragma unroll
          for (int i = 0; i < kEach; ++i) {
            if (first + i * 8 + row >= item.rows || k >= args.k) break;
            const float4 v = fours[(i * 8 + row) * 16 + (four ^ order)];
            float* const to = static_cast<float*>(args.y) + places[i] * args.k + k;
            if (args.k % 4 == 0) {
              *reinterpret_cast<float4*>(to) = v;
              continue;
            }
            const float each[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              if (k + j < args.k) to[j] = each[j];
            }
          }
        }
      }
    };
    for (int index = cta.first_item; index < source.items(); index += params.clusters) {
      Item item = source.item(index, rank);
      if (item.weights < 0) {
        const int inputs = static_cast<int>(min(args.k - item.k0, static_cast<int64_t>(S::kBlockK)));
#pragma unroll 1
        for (int i = warp; i < item.rows; i += S::kWarps) {
          const int64_t to = source.row(item, i) * args.k + item.k0;
#pragma unroll 1
          for (int k = lane; k < inputs; k += 32) store_zero(args.y, to + k, args.y_dtype);
        }
        continue;
      }
      if constexpr (S::kFloat32) {
        const int64_t row = (args.x_batch_stride == 0 ? 0 : item.weights * args.m) + item.first;
        const float of_token = params.float32.dy_undo[row + min(thread, item.rows - 1)];
        const int64_t group =
            min(first_group(params, item.k0) + group_of_fragment(params, warp), static_cast<int>(args.groups) - 1);
        undo_scale = params.float32.scale_undo[item.weights * params.float32.batch_stride + group];
        multiply_float32_stages(cta, item, table, at, acc);
        sync();  // all have read those of the item before
        if (thread < S::kTokens) undo_dy[thread] = of_token;
        sync();
      } else {
        find_table(item);
        with_rows<S>(item, [&](auto rows) {
          if constexpr (S::kInRegisters) {
            float sums[S::kTiles][rows.value / 2];
            with_type<X>(args.x_dtype, [&](auto of) {
              multiply_stages_in_registers<typename decltype(of)::X, rows.value>(cta, item, at, sums);
            });
#pragma unroll
            for (int tile = 0; tile < S::kTiles; ++tile) {
              ptx::keep(sums[tile]);
#pragma unroll
              for (int i = 0; i < S::kTokens / 2; ++i) {
                acc[tile][i] = i < rows.value / 2 ? sums[tile][i < rows.value / 2 ? i : 0] : 0.f;
              }
            }
          } else {
            with_type<X>(args.x_dtype,
                         [&](auto of) { multiply_stages<typename decltype(of)::X, rows.value>(cta, item, at, acc); });
          }
        });
      }
      if constexpr (S::Source::kAnyRows) item = source.item(index, rank);  // again: products leave no registers for it
#pragma unroll
      for (auto& sums : acc) ptx::keep(sums);  // nobody reads them earlier

      // Rows that were staged, `count` of them, those of the item from `first` on.
      const auto store = [&](int first, int count) {
        const bool bulk = bulk_stores && count % kStoredTokens<S> == 0;
        if (bulk) ptx::fence_shared_for_async();
        sync();
        if (!bulk) {
          store_staged(item, first, min(item.rows - first, count));
        } else if (thread == 0) {
#pragma unroll
          for (int tile = 0; tile < S::kTiles; ++tile) {
            const int k = item.k0 + (warpgroup * S::kTiles + tile) * 64;
            if (k >= args.k) break;
            for (int row = 0; row < count; row += kStoredTokens<S>) {
              ptx::tensor_store_3d(&dx_map, staging + (tile * S::kStagingTokens + row) * 128, k,
                                   item.first + first + row, item.weights);
            }
          }
        }
      };
      if (!S::Source::kSplits || !item.split) {
        if (wide && !kWideRows) {
          // Through shared memory that a thread has to itself, for one loop instead of a store for every register.
          constexpr int kRuns = S::kTokens / 8, kAtOnce = std::min(kRuns, S::kStagingBytes / (128 * 16));
          static_assert(kRuns % kAtOnce == 0);
          float4* const own = reinterpret_cast<float4*>(staging) + thread;
#pragma unroll
          for (int tile = 0; tile < S::kTiles; ++tile) {
#pragma unroll
            for (int first = 0; first < kRuns; first += kAtOnce) {
#pragma unroll
              for (int run = 0; run < kAtOnce; ++run) {
                const float* const d = sums_of(tile, first + run);
                own[run * 128] = make_float4(d[0], d[1], d[2], d[3]);
              }
#pragma unroll 1
              for (int run = 0; run < kAtOnce; ++run) {
                const float4 v = own[run * 128];
                const float sums[4] = {v.x, v.y, v.z, v.w};
                store_wide(item, tile, (first + run) * 8, sums);
              }
            }
          }
        } else if (wide) {
          store_wide_rows(item);
        } else if (!S::Source::kBulkStores && params.rows_of_16_bytes) {
          store_rows(item);
        } else if constexpr (!S::kFloat32) {
#pragma unroll
          for (int first = 0; first < S::kTokens; first += S::kStagingTokens) {
            if (first >= item.rows) break;
            if (thread == 0) ptx::tensor_stores_wait();  // what was staged before has been read
            sync();
#pragma unroll
            for (int tile = 0; tile < S::kTiles; ++tile) {
#pragma unroll
              for (int i = 0; i < S::kStagingTokens; i += 16) {
                stage(tile, i, sums_of(tile, (first + i) / 8), sums_of(tile, (first + i) / 8 + 1));
              }
            }
            store(first, S::kStagingTokens);
          }
        }
        continue;
      }

      if constexpr (S::Source::kSplits) {
        // Each rank finishes as many runs of eight tokens, for which the others send it their sums, as the accumulators
        // lie, to where stages were: a thread adds what the same threads of all ranks have.
        constexpr int kRuns = S::kTokens / 8, kHalf = kRuns / 2, kPart = std::min(kHalf, 4);
        static_assert(kHalf / kPart <= kMostParts && kHalf % kPart == 0 && kPart % 2 == 0);
        const bool two = params.cluster == 2 && !wide;
        int rest;
        const int runs = (item.rows + 7) / 8;
        const int most = two ? kHalf : params.ranks.divide(runs + params.cluster - 1, &rest);
        const auto count_of = [&](int owner) { return max(min(most, runs - owner * most), 0); };
        const int mine = count_of(rank), first_row = rank * most * 8;
        if (threadIdx.x == 0) {
          if (two) {
            for (int part = 0; part < kHalf / kPart; ++part) {
              ptx::barrier_expect(received + part, max(min(kPart, mine - part * kPart), 0) * kRunBytes<S>);
            }
          } else {
            ptx::barrier_expect(received, (params.cluster - 1) * mine * kRunBytes<S>);
          }
        }
        __syncwarp();
        if (thread == 0) ptx::tensor_stores_wait();
        const auto sums_at = [&](int run, int tile) {
          return reinterpret_cast<float4*>(ring + run * kRunBytes<S>) + tile * S::kWarps * 32 + threadIdx.x;
        };
        if (two) {
          ptx::cluster_meet();  // nobody reads the stages any more
          sync();
          // A part is on its way while the one before is added to what is here.
          const auto of_rank = [&](int owner, int tile, int run, float (&to)[4]) {
            const float *const low = sums_of(tile, run), *const high = sums_of(tile, kHalf + run);
#pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = owner == 0 ? low[i] : high[i];
          };
          const int others = count_of(rank ^ 1);
#pragma unroll
          for (int part = 0; part <= kHalf / kPart; ++part) {
#pragma unroll
            for (int run = part * kPart; run < min(part * kPart + kPart, kHalf); ++run) {
              if (run >= others) break;
#pragma unroll
              for (int tile = 0; tile < S::kTiles; ++tile) {
                float sums[4];
                of_rank(rank ^ 1, tile, run, sums);
                ptx::store_async_at_rank(sums_at(run, tile), make_float4(sums[0], sums[1], sums[2], sums[3]),
                                         received + part, rank ^ 1);
              }
            }
            if (part == 0) continue;
            ptx::barrier_wait(received + part - 1, 0);
#pragma unroll
            for (int run = (part - 1) * kPart; run < part * kPart; run += 2) {
              if (run >= mine) break;
#pragma unroll
              for (int tile = 0; tile < S::kTiles; ++tile) {
                float sums[2][4];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                  of_rank(rank, tile, run + i, sums[i]);
                  const float4 v = *sums_at(run + i, tile);  // any numbers where there is no such run
                  sums[i][0] += v.x, sums[i][1] += v.y, sums[i][2] += v.z, sums[i][3] += v.w;
                }
                stage(tile, run * 8, sums[0], sums[1]);
              }
            }
          }
        } else {
          // Nobody here reads the stages any more: what others of the cluster wait for.
          ptx::named_sync<kConsumersBarrier, S::kConsumers * 128>();
          ptx::cluster_arrive();
          // To one or two others from registers, to more in one piece each.
          const bool direct = params.cluster <= 3;
          if (direct) ptx::cluster_wait();
          const auto place_at = [&](int owner) { return runs + (rank - (rank > owner)) * most; };
          int owner = 0, of_owner = 0;
#pragma unroll
          for (int run = 0; run < kRuns; ++run) {
            if (run >= runs) break;
#pragma unroll
            for (int tile = 0; tile < S::kTiles; ++tile) {
              const float* const d = sums_of(tile, run);
              const float4 four = make_float4(d[0], d[1], d[2], d[3]);
              if (direct && owner != rank) {
                ptx::store_async_at_rank(sums_at(place_at(owner) + of_owner, tile), four, received, owner);
              } else {
                *sums_at(run, tile) = four;
              }
            }
            if (++of_owner == most) of_owner = 0, ++owner;
          }
          if (!direct) {
            ptx::fence_shared_for_async();
            ptx::named_sync<kConsumersBarrier, S::kConsumers * 128>();
            ptx::cluster_wait();
            if (warp < params.cluster && warp != rank && ptx::elect_one()) {
              const int bytes = count_of(warp) * kRunBytes<S>;
              uint8_t* const to = ring + place_at(warp) * kRunBytes<S>;
              if (bytes > 0) ptx::bulk_copy_to_rank(to, ring + warp * most * kRunBytes<S>, bytes, received, warp);
            }
          }
          __syncwarp();
          ptx::barrier_wait(received, 0);
#pragma unroll 1
          for (int run = 0; run < mine; run += 2) {
#pragma unroll
            for (int tile = 0; tile < S::kTiles; ++tile) {
              float sums[2][4] = {};
#pragma unroll 3
              for (int other = 0; other < params.cluster; ++other) {
                const int from = other == rank ? rank * most : runs + (other - (other > rank)) * most;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                  const float4 v = *sums_at(from + min(run + i, mine - 1), tile);
                  sums[i][0] += v.x, sums[i][1] += v.y, sums[i][2] += v.z, sums[i][3] += v.w;
                }
              }
              if (!wide) {
                stage(tile, run * 8, sums[0], sums[1]);
                continue;
              }
              store_wide(item, tile, first_row + run * 8, sums[0]);
              if (run + 1 < mine) store_wide(item, tile, first_row + run * 8 + 8, sums[1]);
            }
          }
        }
        if (!wide) store(first_row, mine * 8);
      }
    }
    if (thread == 0) ptx::tensor_stores_wait();
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
cudaError_t launch_shape(Params<Consecutive> params, const Config& config, cudaStream_t stream) {
  const MatmulArgs& args = params.args;
  const int clusters = std::max(1, config.clusters);
  params.cluster = config.cluster;
  params.ranks = Divisor(config.cluster);
  params.partners = config.partners;
  Consecutive::Params& walk = params.source;
  walk.token_blocks = static_cast<int>(ceil_div(args.m, S::kTokens));
  walk.groups = static_cast<int>(ceil_div(args.k, S::kBlockK * config.partners));
  const int64_t groups = args.batch * walk.token_blocks * walk.groups;
  if (groups > INT32_MAX / 4) return cudaErrorInvalidValue;
  // A cluster splits one item, its last. Without partners all are.
  const int rest = !config.split                       ? 0
                   : config.partners == config.cluster ? static_cast<int>(groups % clusters)
                                                       : static_cast<int>(groups);
  if (rest * config.partners > clusters) return cudaErrorInvalidConfiguration;
  if (rest > 0 && config.cluster > ceil_div(args.n, S::kOutputs)) return cudaErrorInvalidConfiguration;
  const int64_t runs = std::min<int64_t>(ceil_div(args.m, 8), S::kTokens / 8);
  const int64_t received = ceil_div(runs, config.cluster) * (config.cluster - 1);
  const bool halves = config.cluster == 2 && !params.wide_result;
  if (rest > 0 && !halves && (runs + received) * kRunBytes<S> > S::kRingBytes) return cudaErrorInvalidConfiguration;
  walk.whole = static_cast<int>(groups) - rest;
  walk.items = walk.whole + rest * config.partners;
  walk.partners = config.partners;
  walk.one_run = args.batch == 1 && walk.token_blocks <= kRunOfTokens;
  walk.stages = static_cast<int>(ceil_div(args.n, S::kOutputs));
  walk.stages_each = walk.stages / config.cluster;
  walk.stages_more = walk.stages % config.cluster;
  walk.of_batch = Divisor(walk.token_blocks * walk.groups);
  walk.of_run = Divisor(kRunOfTokens * walk.groups);
  walk.run = Divisor(kRunOfTokens);
  walk.last_run = Divisor(std::max(1, walk.token_blocks % kRunOfTokens));
  walk.tokens = S::kTokens;
  walk.inputs = S::kBlockK;
  params.clusters = std::min(walk.items, clusters);
  MatmulArgs dy = args, dx = args;
  dy.k = args.n;
  dx.x = args.y;
  dx.x_batch_stride = args.m * args.k;
  CUtensorMap dy_map{}, dy_last{}, dx_map{};
  if (S::kFloat32) {  // two numbers each
    dy.x = args.scratch;
    dy.x_dtype = DType::kF16;
    params.pieces_apart = args.x_batch_stride == 0 ? 1 : static_cast<int>(args.batch);
    dy.batch = S::kPieces * params.pieces_apart;
    dy.x_batch_stride = args.m * args.n;
  }
  cudaError_t error =
      describe_blocks(args.m, S::kTokens / config.partners, &dy_map, &dy_last,
                      [&](int tokens, CUtensorMap* map) { return describe_activations(dy, tokens, map); });
  if (params.rows_of_16_bytes && error == cudaSuccess) error = describe_activations(dx, kStoredTokens<S>, &dx_map);
  if (error != cudaSuccess) return error;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(params.clusters), static_cast<unsigned>(config.cluster));
  shape.threads = S::kThreads;
  shape.cluster = config.cluster;
  shape.cluster_along_y = true;
  shape.shared_bytes = S::kSharedBytes;
  shape.early = S::kFloat32;
  return launch_kernel(transposed_warpgroup_matmul<S>, shape, stream, params, dy_map, dy_last, dx_map);
}

// Calls `launch` with the tokens of a block as a constant, for weights in shared memory.
template <typename Launch>
cudaError_t with_block(int tokens, Launch&& launch) {
  switch (tokens) {
    case 64:
      return launch(std::integral_constant<int, 64>{});
    case 128:
      return launch(std::integral_constant<int, 128>{});
    case 256:
      return launch(std::integral_constant<int, 256>{});
    default:
      return cudaErrorInvalidValue;
  }
}

// Calls `launch` with a null pointer to the kernel's shape for blocks of `tokens` tokens.
template <typename Source, typename Launch>
cudaError_t with_shape(const MatmulArgs& args, int tokens, Launch&& launch) {
  const int log2 = log2_group_blocks(args);
  const auto with_groups = [&](auto bits, auto tokens) {
    return log2 == 0 || log2 == 1 ? launch(static_cast<SharedShape<Source, bits.value, tokens.value, 4>*>(nullptr))
                                  : launch(static_cast<SharedShape<Source, bits.value, tokens.value, 1>*>(nullptr));
  };
  const auto with_tokens = [&](auto bits) {
    return with_block(tokens, [&](auto tokens) { return with_groups(bits, tokens); });
  };
  if (args.shift_mode == ShiftMode::kTable) {
    return with_block(tokens, [&](auto tokens) {
      return launch(static_cast<SharedShape<Source, 4, tokens.value, 4, true>*>(nullptr));
    });
  }
  return args.bits == 4 ? with_tokens(std::integral_constant<int, 4>{}) : with_tokens(std::integral_constant<int, 8>{});
}

// All but the source's and the cluster's.
template <typename Source>
Params<Source> make_params(const MatmulArgs& args) {
  Params<Source> params{};
  params.args = args;
  params.log2_group_blocks = log2_group_blocks(args);
  const bool integers = args.shift_mode == ShiftMode::kNone || args.shift_mode == ShiftMode::kTable ||
                        (args.shift_mode == ShiftMode::kZeros && args.shift_dtype == DType::kU8);
  params.simple = integers && args.scale_dtype == args.x_dtype;
  params.wide_result = args.y_dtype == DType::kF32;
  params.rows_of_16_bytes = !params.wide_result && args.k % 8 == 0;
  return params;
}

// The same for weights in registers, of kBits.
template <typename Source, int kBits, int kTokens, typename Launch>
cudaError_t with_register_codes(const MatmulArgs& args, Launch&& launch) {
  const auto with = [&](auto codes) {
    const auto of_type = [&](auto* x) {
      using X = std::remove_pointer_t<decltype(x)>;
      return launch(static_cast<RegisterShape<Source, X, kBits, kTokens, codes.value>*>(nullptr));
    };
    // Loops for several numbers of rows leave no registers for those of two types.
    if constexpr (Source::kAnyRows) {
      return args.x_dtype == DType::kF16 ? of_type(static_cast<__half*>(nullptr))
                                         : of_type(static_cast<__nv_bfloat16*>(nullptr));
    } else {
      return of_type(static_cast<Either*>(nullptr));
    }
  };
  switch (args.shift_mode) {
    case ShiftMode::kZeros:
      return with(std::integral_constant<RegisterCodes, RegisterCodes::kZeros>{});
    case ShiftMode::kOffsets:
      return with(std::integral_constant<RegisterCodes, RegisterCodes::kOffsets>{});
    case ShiftMode::kTable:
      if constexpr (kBits == 4) return with(std::integral_constant<RegisterCodes, RegisterCodes::kOfTable>{});
      return cudaErrorInvalidValue;
    default:
      return with(std::integral_constant<RegisterCodes, RegisterCodes::kSymmetric>{});
  }
}
template <typename Launch>
cudaError_t with_register_shape(const MatmulArgs& args, int tokens, Launch&& launch) {
  const auto with_bits = [&](auto tokens) {
    constexpr int kTokens = tokens.value;
    if constexpr (kTokens <= most_register_tokens(8)) {
      if (args.bits == 8) return with_register_codes<Consecutive, 8, kTokens>(args, launch);
    }
    return args.bits == 4 ? with_register_codes<Consecutive, 4, kTokens>(args, launch) : cudaErrorInvalidValue;
  };
  return tokens == 32 ? with_bits(std::integral_constant<int, 32>{}) : with_block(tokens, with_bits);
}

}  // namespace wonly::transposed_warpgroup
