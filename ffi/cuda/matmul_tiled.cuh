// The dense arrangement of tiles for tiled.cuh: every tile of up to 256 tokens x 256 outputs of every batch entry.
//
// Tiles are dealt out in whole waves, one to each cluster. Of the last wave, where it is not whole, `splits` clusters
// share a tile's inputs: all but the last leave their sums in `partial`, and the last, which comes after them in the
// order in which CTAs start, waits and adds them in order. The order of all sums depends on the number of tokens alone.
#pragma once

#include "cuda/tiled.cuh"

namespace wonly::tiled {

struct WaveParams {
  int tokens;                     // of a tile
  int stages;                     // of a tile
  int token_tiles, output_tiles;  // the latter of a cluster's outputs
  int waves, rest, splits;        // rest: tiles of the last wave
  uint32_t* arrived;              // [rest, kCluster, kWarpgroups], zero at the start
  float4* partial;                // [rest, splits - 1, kCluster, kWarpgroups, tokens / 8, 128]
};

struct Waves : RowsOf<true> {
  using Params = WaveParams;
  static constexpr bool kFloat32Scales = false, kTables = true;
  static constexpr int kMostSharedBytes = 0;

  const Params& params;
  const MatmulArgs& args;
  int cta_count, rank, cluster, clusters;

  __device__ Waves(const Params& params, const MatmulArgs& args, uint8_t*, int ctas = kCluster)
      : params(params),
        args(args),
        cta_count(ctas),
        rank(blockIdx.x % ctas),
        cluster(blockIdx.x / ctas),
        clusters(gridDim.x / ctas) {}

  __device__ int64_t count() const { return params.waves + (cluster < params.rest * params.splits ? 1 : 0); }

  __device__ Tile tile(int64_t wave) const {
    Tile tile{};
    tile.end_stage = params.stages;
    int index = static_cast<int>(wave) * clusters + cluster;
    if (wave == params.waves) {
      tile.rest = cluster % params.rest;
      tile.split = cluster / params.rest;
      tile.first_stage = params.stages * tile.split / params.splits;
      tile.end_stage = params.stages * (tile.split + 1) / params.splits;
      index += tile.rest - cluster;
    }
    const int of_batch = params.token_tiles * params.output_tiles;
    const Place place = place_of(index % of_batch, params.token_tiles, params.output_tiles);
    tile.weights = index / of_batch;
    tile.first = place.row * params.tokens;
    tile.rows = static_cast<int>(min(args.m - tile.first, int64_t{params.tokens}));
    tile.n0 = (static_cast<int64_t>(place.column) * cta_count + rank) * kOutputs;
    return tile;
  }

  template <int kSums>
  __device__ bool gather(const Tile& tile, const Consumer& me, float (&sums)[kSums]) const {
    if (tile.end_stage - tile.first_stage == params.stages) return true;
    uint32_t* const arrived = params.arrived + (tile.rest * cta_count + rank) * kWarpgroups + me.warpgroup;
    const auto partial_of = [&](int split) {
      const int64_t slice =
          ((static_cast<int64_t>(tile.rest) * (params.splits - 1) + split) * cta_count + rank) * kWarpgroups +
          me.warpgroup;
      return params.partial + slice * (params.tokens / 8 * 128) + me.thread();
    };
    if (tile.split < params.splits - 1) {
      float4* to = partial_of(tile.split);
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        to[i * 128] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
      }
      me.sync();
      if (me.thread() == 0) ptx::add_release(arrived, 1);
      return false;
    }
    // By all threads: were it one of them, the compiler would keep fewer values in uniform registers from here on.
    while (ptx::load_acquire(arrived) != static_cast<uint32_t>(params.splits - 1)) {
    }
    me.sync();
    for (int split = params.splits - 2; split >= 0; --split) {
      const float4* from = partial_of(split);
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
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
  walk.token_tiles = static_cast<int>(ceil_div(args.m, config.tokens));
  walk.output_tiles = static_cast<int>(ceil_div(args.n, config.ctas * kOutputs));
  const int64_t tiles = args.batch * walk.token_tiles * walk.output_tiles;
  const int clusters = config.multiprocessors / config.ctas;
  walk.waves = static_cast<int>(tiles / clusters);
  walk.rest = static_cast<int>(tiles % clusters);
  walk.splits = config.splits;
  const int64_t counters = int64_t{4} * walk.rest * config.ctas * kWarpgroups;
  if (walk.rest * walk.splits > clusters || walk.splits > stages || (walk.splits > 1 && counters > kArrivedBytes) ||
      scratch_bytes(config, walk.rest) > args.scratch_bytes) {
    return cudaErrorInvalidConfiguration;
  }
  if (walk.splits > 1) {
    walk.arrived = static_cast<uint32_t*>(args.scratch);
    walk.partial = reinterpret_cast<float4*>(static_cast<uint8_t*>(args.scratch) + kArrivedBytes);
    const cudaError_t error = cudaMemsetAsync(walk.arrived, 0, static_cast<size_t>(counters), stream);
    if (error != cudaSuccess) return error;
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
  return launch_waves<Waves, X>(args, config, static_cast<int>(ceil_div(args.k, kStageK)), {}, map, stream);
}

}  // namespace wonly::tiled
