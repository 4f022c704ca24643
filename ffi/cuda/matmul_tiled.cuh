// The dense arrangement of tiles for tiled.cuh: every tile of up to 256 tokens x 256 outputs of every batch entry.
//
// Tiles are dealt out in whole waves, one to each cluster. Of the last wave, where it is not whole, `splits` clusters
// share a tile's inputs: all but the last leave their sums in `partial`, and the last, which comes after them in the
// order in which CTAs start, waits and adds them in order. The order of all sums depends on the number of tokens alone.
#pragma once

#include "cuda/division.h"
#include "cuda/place.cuh"
#include "cuda/tiled.cuh"

namespace wonly::tiled {

constexpr int kMoreStages = 4;

struct WaveParams {
  int tokens;               // of a tile
  int stages;               // of a tile
  int first_output;         // of the kernel's part of the product
  Divisor of_batch;         // tiles of an entry
  tiles::Places places;     // rows of tokens, columns of a cluster's outputs
  int waves, rest, splits;  // rest: tiles of the last wave
  int more;                 // stages of who adds a shared tile's sums, while the others leave theirs
  Divisor of_rest, of_splits;
  uint64_t* arrived;  // [rest, splits - 1, CTAs of a cluster, kWarpgroups]: handed over
  float4* partial;    // the same, and [whole kGatheredRows of tokens / 8, 128]
};

template <Heights kHeights>
struct Waves : RowsOf<kHeights> {
  using Params = WaveParams;
  static constexpr bool kTables = true, kLoadsRows = false;
  static constexpr int kMostSharedBytes = 0;

  const Params& params;
  const MatmulArgs& args;
  int cta_count, rank, cluster, clusters;

  __device__ Waves(const Params& params, const MatmulArgs& args, uint8_t*, int ctas = kCluster)
      : params(params),
        args(args),
        cta_count(ctas),
        rank(blockIdx.x & (ctas - 1)),
        cluster(blockIdx.x >> (ctas - 1)),
        clusters(gridDim.x >> (ctas - 1)) {}

  __device__ int64_t count() const { return params.waves + (cluster < params.rest * params.splits ? 1 : 0); }

  __device__ Tile tile(int64_t wave) const {
    Tile tile{};
    tile.end_stage = params.stages;
    int index = static_cast<int>(wave) * clusters + cluster;
    if (wave == params.waves) {
      int rest;
      tile.split = params.of_rest.divide(cluster, &tile.rest);
      const int even = params.stages - params.more;
      tile.first_stage = params.of_splits.divide(even * tile.split, &rest);
      if (tile.split + 1 < params.splits) tile.end_stage = params.of_splits.divide(even * (tile.split + 1), &rest);
      index += tile.rest - cluster;
    }
    int in_batch;
    tile.weights = params.of_batch.divide(index, &in_batch);
    const Place place = params.places.at(in_batch);
    tile.first = place.row * params.tokens;
    tile.rows = static_cast<int>(min(args.m - tile.first, int64_t{params.tokens}));
    tile.n0 = params.first_output + (static_cast<int64_t>(place.column) * cta_count + rank) * kOutputs;
    return tile;
  }

  // Of the rows that there are, kGathered at a time.
  template <int kSums>
  __device__ bool gather(const Tile& tile, const Consumer& me, float (&sums)[kSums]) const {
    constexpr int kOfRows = kGatheredRows / 8;  // vectors of a thread
    if (tile.end_stage - tile.first_stage == params.stages) return true;
    const auto slice_of = [&](int split) {
      return ((tile.rest * (params.splits - 1) + split) * cta_count + rank) * kWarpgroups + me.warpgroup;
    };
    const auto partial_of = [&](int split) {
      const int64_t from = int64_t{slice_of(split)} * (ceil_div(params.tokens, kGatheredRows) * kOfRows * 128);
      return params.partial + from + me.thread();
    };
    if (tile.split < params.splits - 1) {
      float4* to = partial_of(tile.split);
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        if (i % kOfRows == 0 && 8 * i >= tile.rows) break;
        to[i * 128] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
      }
      me.sync();
      if (me.thread() == 0) ptx::hand_over(params.arrived + slice_of(tile.split));
      return false;
    }
    // By all threads: were it one of them, the compiler would keep fewer values in uniform registers from here on.
    for (int split = 0; split < params.splits - 1; ++split) {
      while (!ptx::handed_over(params.arrived + slice_of(split))) {
      }
    }
    me.sync();
    if (me.thread() < params.splits - 1) params.arrived[slice_of(me.thread())] = 0;
    for (int split = params.splits - 2; split >= 0; --split) {
      const float4* from = partial_of(split);
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        if (i % kOfRows == 0 && 8 * i >= tile.rows) break;
        const float4 v = __ldcg(from + i * 128);
        sums[4 * i] += v.x;
        sums[4 * i + 1] += v.y;
        sums[4 * i + 2] += v.z;
        sums[4 * i + 3] += v.w;
      }
    }
    return true;
  }

  __device__ int64_t row(const Tile& tile, int i) const { return tile.first + i; }
};

// Deals the tiles of a product out, of `stages` stages each, and launches them; `own` is what else the source takes.
template <typename Source, typename X>
cudaError_t launch_waves(const MatmulArgs& args, const Config& config, int stages, const typename Source::Params& own,
                         const CUtensorMap& map, cudaStream_t stream) {
  Params<Source> params{args, own, log2_group_blocks(args)};
  WaveParams& walk = params.source;
  walk.tokens = config.tokens;
  walk.stages = stages;
  const int token_tiles = static_cast<int>(ceil_div(args.m, config.tokens));
  const int output_tiles = static_cast<int>(ceil_div(config.part.count(args.n), config.ctas * kOutputs));
  walk.first_output = config.part.first;
  walk.of_batch = Divisor(token_tiles * output_tiles);
  walk.places = tiles::Places(token_tiles, output_tiles);
  const int64_t tiles = args.batch * token_tiles * output_tiles;
  const int clusters = config.multiprocessors / config.ctas;
  walk.waves = static_cast<int>(tiles / clusters);
  walk.rest = static_cast<int>(tiles % clusters);
  walk.splits = config.splits;
  walk.more = stages >= 8 * config.splits ? kMoreStages : 0;
  walk.of_rest = Divisor(walk.rest);
  walk.of_splits = Divisor(walk.splits);
  const int64_t words = int64_t{walk.rest} * (config.splits - 1) * config.ctas * kWarpgroups;
  if (walk.rest * walk.splits > clusters || walk.splits > stages ||
      words * static_cast<int64_t>(sizeof(uint64_t)) > kArrivedBytes ||
      scratch_bytes(config, walk.rest) > args.scratch_bytes) {
    return cudaErrorInvalidConfiguration;
  }
  if (walk.splits > 1) {
    walk.arrived = static_cast<uint64_t*>(args.scratch);
    walk.partial = reinterpret_cast<float4*>(static_cast<uint8_t*>(args.scratch) + kArrivedBytes);
  }
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(config.ctas * (walk.waves > 0 ? clusters : walk.rest * walk.splits)));
  shape.threads = kThreads;
  shape.cluster = config.ctas;
  return with_shape<Source, X>(args, [&](auto* s) {
    using S = std::remove_pointer_t<decltype(s)>;
    shape.shared_bytes = S::kSourceAt;
    return launch_kernel(tiled_matmul<S>, shape, stream, params, map);
  });
}

template <typename X>
cudaError_t launch_typed(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  if (config.ctas != kCluster) return cudaErrorInvalidConfiguration;
  CUtensorMap map;
  if (cudaError_t error = describe_activations(args, kBoxRows, &map); error != cudaSuccess) return error;
  const int stages = static_cast<int>(ceil_div(args.k, kStageK));
  const auto launch = [&](auto* source) {
    return launch_waves<std::remove_pointer_t<decltype(source)>, X>(args, config, stages, {}, map, stream);
  };
  if (config.tokens <= kHighest<Heights::kLow>) return launch(static_cast<Waves<Heights::kLow>*>(nullptr));
  if (height_for(config.tokens, HeightsOf<Heights::kEven>{}) == config.tokens) {
    return launch(static_cast<Waves<Heights::kEven>*>(nullptr));
  }
  return config.tokens <= kHighest<Heights::kMiddle> ? launch(static_cast<Waves<Heights::kMiddle>*>(nullptr))
                                                     : launch(static_cast<Waves<Heights::kHigh>*>(nullptr));
}

}  // namespace wonly::tiled
