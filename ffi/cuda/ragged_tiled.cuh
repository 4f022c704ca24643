// The arrangement of tiles of a ragged product (ragged_plan.h) for tiled.cuh: tiles of up to 256 rows of an expert, as
// many columns as they take. A row's result does not depend on the others, for every sum is in the order of the inputs.
//
// Clusters take the tiles by falling height, forward and backward in turns: whole ones of all spans first, then what is
// left of each. So all have about as much to do.
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
    int stages;
  };
  static constexpr bool kTables = true;
  static constexpr int kMostSharedBytes = ragged::kMostPlanBytes;

  const Params& params;
  const MatmulArgs& args;
  ragged::Plan plan;
  int rank;
  ragged::Turns turns;

  __device__ Spans(const Params& params, const MatmulArgs& args, uint8_t* shared)
      : params(params),
        args(args),
        plan(ragged::get_plan(params.work, shared)),
        rank(blockIdx.x % kCluster),
        turns{static_cast<int>(blockIdx.x / kCluster), static_cast<int>(gridDim.x / kCluster)} {
    ragged::Span* const spans = ragged::own_spans(shared);
    if (!ragged::can_sort_tiles(plan, params.work, spans)) return;
    // The others see it after the barrier that tiled_matmul has anyway.
    if (threadIdx.x < 32) ragged::sort_tiles(spans, plan.span_count, kTileRows);
    plan.spans += plan.span_count;
    plan.span_count *= 2;
  }

  __device__ int64_t count() const { return turns.count(plan.tile_count * params.output_tiles); }

  __device__ Tile tile(int64_t wave) const {
    const int index = turns.tile(static_cast<int>(wave));
    const ragged::Span span = ragged::find_span(plan, index / params.output_tiles);
    const int local = index - span.first_tile * params.output_tiles;
    const tiled::Place place = tiled::place_of(local, ragged::tiles_of(span.rows, kTileRows), params.output_tiles);
    Tile tile{};
    tile.weights = span.expert;
    tile.first = span.first + place.row * kTileRows;
    tile.rows = min(kTileRows, span.rows - place.row * kTileRows);
    tile.n0 = (place.column * kCluster + rank) * kOutputs;
    tile.end_stage = params.stages;
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
  params.source = {work, static_cast<int>(ceil_div(args.n, kCluster * kOutputs)),
                   static_cast<int>(ceil_div(args.k, kStageK))};
  const int64_t tiles = ragged::most_tiles(work) * params.source.output_tiles;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(kCluster * std::min<int64_t>(tiles, multiprocessors / kCluster)));
  shape.threads = tiled::kThreads;
  shape.cluster = kCluster;
  return tiled::with_shape<Spans, X>(args, [&](auto* s) {
    using S = std::remove_pointer_t<decltype(s)>;
    shape.shared_bytes = S::kSourceAt + ragged::sorted_plan_bytes(work.experts);
    return launch_kernel(tiled::tiled_matmul<S>, shape, stream, params, map);
  });
}

}  // namespace wonly::ragged_tiled
