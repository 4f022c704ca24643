// The blocks of a ragged product (ragged_plan.h) for matmul_transposed_warpgroup.cuh: tiles of an expert's rows. The
// CTAs of a cluster have neighbouring inputs of the same rows. A row's result does not depend on the others. Clusters
// take the blocks as those of ragged_tiled.cuh do.
#pragma once

#include <algorithm>

#include "cuda/matmul_transposed_warpgroup.cuh"
#include "cuda/ragged_plan.cuh"

namespace wonly::transposed_warpgroup {

constexpr int kManyBlocks = 8;  // of inputs, among which one more for a partner makes little difference

struct Spans {
  struct Params {
    ragged::Work work;
    int groups;  // of partners, along the inputs
    int partners, inputs, stages;
  };
  static constexpr int kPlanAt = 32;  // behind ragged::Plan
  static constexpr int kSharedBytes = kPlanAt + ragged::kMostPlanBytes;
  static constexpr int kStagingTokens = 64;
  static constexpr bool kBulkStores = false, kSplits = false, kAnyRows = true;
  static_assert(sizeof(ragged::Plan) <= kPlanAt);

  const Params& params;
  const ragged::Plan& plan;  // not in registers, of which products leave none

  __device__ Spans(const Params& params, const MatmulArgs&, uint8_t* shared)
      : params(params), plan(*reinterpret_cast<const ragged::Plan*>(shared)) {
    ragged::Plan found = ragged::get_plan(params.work, shared + kPlanAt);
    ragged::Span* const spans = ragged::own_spans(shared + kPlanAt);
    if (ragged::can_sort_tiles(found, params.work, spans)) {
      if (threadIdx.x < 32) ragged::sort_tiles(spans, found.span_count, params.work.tile_rows);
      found.spans += found.span_count;
      found.span_count *= 2;
    }
    if (threadIdx.x == 0) *reinterpret_cast<ragged::Plan*>(shared) = found;
    __syncthreads();
  }

  __device__ static ragged::Turns turns() { return {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)}; }

  // Beyond the number of this cluster's last one, as the kernel counts them: from its own on, in steps of all clusters.
  __device__ int items() const { return turns().count(plan.tile_count * params.groups) * turns().clusters; }

  __device__ Item item(int number, int rank) const {
    const int tile_rows = params.work.tile_rows, index = turns().tile(number / turns().clusters);
    const ragged::Span span = ragged::find_span(plan, index / params.groups);
    const int local = index - span.first_tile * params.groups;
    const int tiles = ragged::tiles_of(span.rows, tile_rows);  // those of the same weights run together
    const int row = local % tiles * tile_rows;
    Item item{};
    item.weights = span.expert;
    item.first = span.first + row;
    item.rows = min(tile_rows, span.rows - row);
    item.k0 = (local / tiles * params.partners + rank) * params.inputs;
    item.end = params.stages;
    return item;
  }

  __device__ int64_t row(const Item& item, int i) const { return plan.row(item.first + i); }
  __device__ int64_t dy_row(const Item& item, int i) const {
    return ragged::x_row(params.work, plan.row(item.first + i));
  }
};

// `dy`: what the kernel multiplies, rows in the plan's order, of 16 bits. `with_shape`: calls what it is given with a
// null pointer to the kernel's shape.
template <typename WithShape>
cudaError_t launch_spans(Params<Spans> params, MatmulArgs dy, const ragged::Work& work, int multiprocessors,
                         cudaStream_t stream, WithShape&& with_shape) {
  const MatmulArgs& args = params.args;
  dy.k = args.n;
  dy.m = work.m;
  return with_shape([&](auto* s) {
    using S = std::remove_pointer_t<decltype(s)>;
    // A partner with nothing to do costs more than bringing few rows of dy twice.
    const int64_t k_blocks = ceil_div(args.k, S::kBlockK);
    const bool alone = k_blocks == 1 || (S::kTokens == 64 && k_blocks % 2 == 1 && k_blocks < kManyBlocks);
    params.cluster = params.partners = alone ? 1 : 2;
    const int64_t groups = ceil_div(args.k, S::kBlockK * params.partners), tiles = ragged::most_tiles(work);
    if (tiles * groups > INT32_MAX / 2) return cudaErrorInvalidValue;
    params.clusters =
        static_cast<int>(std::min<int64_t>(tiles * groups, std::max(1, multiprocessors / params.cluster)));
    params.source = {work, static_cast<int>(groups), params.partners, S::kBlockK,
                     static_cast<int>(ceil_div(args.n, S::kOutputs))};
    CUtensorMap map;
    const int boxes = box_rows(work.tile_rows, true), box = boxes > 0 ? boxes : work.tile_rows / params.partners;
    if (cudaError_t error = describe_activations(dy, box, &map); error != cudaSuccess) return error;
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(params.clusters), static_cast<unsigned>(params.cluster));
    shape.cluster = params.cluster;
    shape.cluster_along_y = true;
    shape.threads = S::kThreads;
    shape.shared_bytes = S::kSharedBytes;
    shape.early = S::kFloat32;
    return launch_kernel(transposed_warpgroup_matmul<S>, shape, stream, params, map, map, map);
  });
}

}  // namespace wonly::transposed_warpgroup
