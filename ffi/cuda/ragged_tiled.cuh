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

// Up to as many have their tiles sorted: room for their spans, and for those in two parts.
constexpr int kSortedExperts = (ragged::kOwnExperts - 2) / 3;

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
  int rank, cluster, clusters;

  __device__ Spans(const Params& params, const MatmulArgs& args, uint8_t* shared)
      : params(params),
        args(args),
        plan(ragged::get_plan(params.work, shared)),
        rank(blockIdx.x % kCluster),
        cluster(blockIdx.x / kCluster),
        clusters(gridDim.x / kCluster) {
    ragged::Span* const spans = ragged::own_spans(shared);
    if (plan.spans != spans || params.work.experts > kSortedExperts) return;
    if (threadIdx.x < 32) sort(spans);  // the others see it after the barrier that tiled_matmul has anyway
    plan.spans += plan.span_count;
    plan.span_count *= 2;
  }

  // One warp: behind the spans, what they have of whole tiles, then their tails by falling height.
  __device__ void sort(ragged::Span* spans) const {
    constexpr int kHeights = 4;  // of tails, as many as there are numbers of columns
    const int lane = threadIdx.x % 32, count = plan.span_count;
    const auto height = [&](int i) {
      return i < count ? ragged::tiles_of(spans[i].rows % kTileRows, kTileRows / kHeights) : 0;
    };
    int tiles = 0, at[kHeights + 1] = {};  // where tails of a height begin
    for (int base = 0; base < count; base += 32) {
      const int i = base + lane, whole = i < count ? spans[i].rows / kTileRows : 0;
      const int to = static_cast<int>(ragged::sum_to_lane(whole, 0x7fffffffu));
      if (i < count) spans[count + i] = {spans[i].expert, spans[i].first, whole * kTileRows, tiles + to - whole};
      tiles += __shfl_sync(ragged::kAllLanes, to, 31);
#pragma unroll
      for (int h = 1; h <= kHeights; ++h) at[h - 1] += __popc(__ballot_sync(ragged::kAllLanes, height(i) >= h));
    }
    for (int i = at[0] + lane; i < count; i += 32) spans[2 * count + i] = {-1, 0, 0, 0x7fffffff};  // no tail
    for (int base = 0; base < count; base += 32) {
      const int i = base + lane, mine = height(i);
#pragma unroll
      for (int h = 1; h <= kHeights; ++h) {
        const unsigned same = __ballot_sync(ragged::kAllLanes, mine == h);
        const int to = at[h] + __popc(same & ((1u << lane) - 1u));
        if (mine == h) {
          const int tail = spans[i].rows % kTileRows;
          spans[2 * count + to] = {spans[i].expert, spans[i].first + spans[i].rows - tail, tail, tiles + to};
        }
        at[h] += __popc(same);
      }
    }
  }

  __device__ int64_t count() const {
    const int tiles = plan.tile_count * params.output_tiles, waves = tiles / clusters;
    return waves + (place(waves) < tiles - waves * clusters);
  }
  // Of this cluster in a wave.
  __device__ int place(int wave) const { return wave % 2 == 0 ? cluster : clusters - 1 - cluster; }

  __device__ Tile tile(int64_t wave) const {
    const int index = static_cast<int>(wave) * clusters + place(static_cast<int>(wave));
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
    shape.shared_bytes =
        S::kSourceAt + ragged::plan_bytes(work.experts <= kSortedExperts ? 3 * work.experts + 2 : work.experts);
    return launch_kernel(tiled::tiled_matmul<S>, shape, stream, params, map);
  });
}

}  // namespace wonly::ragged_tiled
