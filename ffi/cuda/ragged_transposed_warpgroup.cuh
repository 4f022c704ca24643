// The blocks of a ragged product (ragged_plan.h) for matmul_transposed_warpgroup.cuh: tiles of an expert's rows. The
// CTAs of a cluster have neighbouring inputs of the same rows. A row's result does not depend on the others.
#pragma once

#include <algorithm>

#include "cuda/matmul_transposed_warpgroup.cuh"
#include "cuda/ragged_plan.cuh"

namespace wonly::transposed_warpgroup {

constexpr int kBlockInputs = block_inputs(0, false);

struct Spans {
  struct Params {
    ragged::Work work;
    int groups;  // of partners, along the inputs
    int partners, stages;
  };
  static constexpr int kSharedBytes = ragged::kMostPlanBytes;
  static constexpr int kStagingTokens = 64;
  static constexpr bool kBulkStores = false, kSplits = false, kAnyRows = true;

  const Params& params;
  ragged::Plan plan;

  __device__ Spans(const Params& params, const MatmulArgs&, uint8_t* shared)
      : params(params), plan(ragged::get_plan(params.work, shared)) {}

  __device__ int items() const { return plan.tile_count * params.groups; }

  __device__ Item item(int index, int rank) const {
    const int tile_rows = params.work.tile_rows;
    const ragged::Span span = ragged::find_span(plan, index / params.groups);
    const int local = index - span.first_tile * params.groups;
    const int tiles = ragged::tiles_of(span.rows, tile_rows);  // those of the same weights run together
    const int row = local % tiles * tile_rows;
    Item item{};
    item.weights = span.expert;
    item.first = span.first + row;
    item.rows = min(tile_rows, span.rows - row);
    item.k0 = (local / tiles * params.partners + rank) * kBlockInputs;
    item.end = params.stages;
    return item;
  }

  __device__ int64_t row(const Item& item, int i) const { return plan.row(item.first + i); }
  __device__ int64_t dy_row(const Item& item, int i) const {
    return ragged::x_row(params.work, plan.row(item.first + i));
  }
};

// `dy`: what the kernel multiplies, rows in the plan's order, of X. `with_shape`: calls what it is given with a null
// pointer to the kernel's shape.
template <typename WithShape>
cudaError_t launch_spans(Params<Spans> params, MatmulArgs dy, const ragged::Work& work, int multiprocessors,
                         cudaStream_t stream, WithShape&& with_shape) {
  const MatmulArgs& args = params.args;
  params.cluster = params.partners = args.k > kBlockInputs ? 2 : 1;
  const int64_t groups = ceil_div(args.k, kBlockInputs * params.partners), tiles = ragged::most_tiles(work);
  if (tiles * groups > INT32_MAX / 2) return cudaErrorInvalidValue;
  params.clusters = static_cast<int>(std::min<int64_t>(tiles * groups, std::max(1, multiprocessors / params.cluster)));
  params.source = {work, static_cast<int>(groups), params.partners, static_cast<int>(ceil_div(args.n, kRunN))};
  dy.k = args.n;
  dy.m = work.m;
  CUtensorMap map;
  const int boxes = box_rows(work.tile_rows, true), box = boxes > 0 ? boxes : work.tile_rows / params.partners;
  if (cudaError_t error = describe_activations(dy, box, &map); error != cudaSuccess) return error;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(params.clusters), static_cast<unsigned>(params.cluster));
  shape.cluster = params.cluster;
  shape.cluster_along_y = true;
  return with_shape([&](auto* s) {
    using S = std::remove_pointer_t<decltype(s)>;
    shape.threads = S::kThreads;
    shape.shared_bytes = S::kSharedBytes;
    shape.early = S::kFloat32;
    return launch_kernel(transposed_warpgroup_matmul<S>, shape, stream, params, map, map, map);
  });
}

template <typename X>
cudaError_t launch_ragged(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream) {
  return launch_spans(make_params<Spans>(args), args, work, multiprocessors, stream,
                      [&](auto&& launch) { return with_shape<Spans, X>(args, work.tile_rows, launch); });
}

}  // namespace wonly::transposed_warpgroup
