// The arrangement of tiles of a ragged product (ragged_plan.h) for tiled.cuh: tiles of up to 256 rows of an expert, as
// many columns as they take. A row's result does not depend on the others, for every sum is in the order of the inputs.
#pragma once

#include <algorithm>

#include "cuda/ragged_plan.cuh"
#include "cuda/ragged_tiled.h"
#include "cuda/tiled.cuh"

namespace wonly::ragged_tiled {

using tiled::kCluster;
using tiled::kOutputs;
using tiled::kStageK;
using tiled::Tile;
static_assert(kTileRows == tiled::kTileRows);

struct Spans : tiled::Rows {
  struct Params {
    ragged::Work work;
    int output_tiles;  // of kCluster * kOutputs
  };
  static constexpr bool kFloat32Scales = true, kTables = true;
  static constexpr int kMostSharedBytes = ragged::kMostPlanBytes;

  const Params& params;
  const MatmulArgs& args;
  ragged::Plan plan;
  int rank, cluster, clusters;

  __device__ Spans(const Params& params, const MatmulArgs& args, uint8_t* shared)
      : params(params),
        args(args),
        plan(ragged::get_plan(params.work, shared)),
        rank(blockIdx.x % kCluster),
        cluster(blockIdx.x / kCluster),
        clusters(gridDim.x / kCluster) {}

  __device__ int64_t count() const {
    const int64_t tiles = static_cast<int64_t>(plan.tile_count) * params.output_tiles;
    return cluster < tiles ? (tiles - cluster - 1) / clusters + 1 : 0;
  }

  __device__ Tile tile(int64_t i) const {
    const int64_t index = i * clusters + cluster;
    const ragged::Span span = ragged::find_span(plan, static_cast<int>(index / params.output_tiles));
    const int local = static_cast<int>(index - static_cast<int64_t>(span.first_tile) * params.output_tiles);
    const tiled::Place place = tiled::place_of(local, ragged::tiles_of(span.rows, kTileRows), params.output_tiles);
    Tile tile{};
    tile.weights = span.expert;
    tile.first = span.first + place.row * kTileRows;
    tile.rows = min(kTileRows, span.rows - place.row * kTileRows);
    tile.n0 = (static_cast<int64_t>(place.column) * kCluster + rank) * kOutputs;
    tile.end_stage = static_cast<int>(ceil_div(args.k, kStageK));
    return tile;
  }

  template <int kSums>
  __device__ bool gather(const Tile&, const tiled::Consumer&, float (&)[kSums]) const {
    return true;
  }

  __device__ int64_t row(const Tile& tile, int i) const { return plan.row(tile.first + i); }
};

template <typename X>
cudaError_t launch_typed(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream) {
  CUtensorMap map;
  MatmulArgs x = args;
  x.m = work.m;
  if (cudaError_t error = describe_activations(x, tiled::kBoxRows, &map); error != cudaSuccess) return error;
  tiled::Params<Spans> params{};
  params.args = args;
  params.log2_group_blocks = log2_group_blocks(args);
  params.source = {work, static_cast<int>(ceil_div(args.n, kCluster * kOutputs))};
  const int64_t tiles = ragged::most_tiles(work) * params.source.output_tiles;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(kCluster * std::min<int64_t>(tiles, multiprocessors / kCluster)));
  shape.threads = tiled::kThreads;
  shape.cluster = kCluster;
  return tiled::with_shape<Spans, X>(args, [&](auto* s) {
    using S = std::remove_pointer_t<decltype(s)>;
    shape.shared_bytes = S::kSourceAt + ragged::plan_bytes(work.experts);
    return launch_kernel(tiled::tiled_matmul<S>, shape, stream, params, map);
  });
}

}  // namespace wonly::ragged_tiled
