// Making a plan (ragged_plan.h), and finding a tile in it.
#pragma once

#include <cuda_runtime.h>

#include "cuda/ragged_plan.h"

namespace wonly::ragged {

constexpr unsigned kAllLanes = 0xffffffffu;

struct Plan {
  const Span* spans;
  const int* order;  // rows by position; null: they are in order as they are
  int span_count, tile_count;

  __device__ int row(int position) const { return order == nullptr ? position : order[position]; }
};

__device__ __forceinline__ int tiles_of(int rows, int tile_rows) { return (rows + tile_rows - 1) / tile_rows; }

// Sums over the lanes up to this one, at most `limit`.
__device__ __forceinline__ unsigned sum_to_lane(unsigned value, unsigned limit) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const unsigned below = __shfl_up_sync(kAllLanes, value, distance);
    if (lane >= distance) value = min(value + below, limit);
  }
  return value;
}

// One warp: spans of rows that follow each other, `sizes[e]` for expert e, cut off at `m`. Expert e's first position
// goes to first[e], that of rows without one to first[experts], unless `first` is null.
__device__ inline void plan_sizes(const int* sizes, int experts, int m, int tile_rows, Span* spans, Counts* counts,
                                  int* first) {
  constexpr int kEach = 4;  // experts of a lane
  const int lane = threadIdx.x % 32;
  const unsigned limit = static_cast<unsigned>(m);
  unsigned position = 0, tile = 0, count = 0;
  for (int base = 0; base < experts; base += 32 * kEach) {
    const int expert = base + lane * kEach;
    unsigned rows[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      rows[i] = expert + i < experts ? min(static_cast<unsigned>(max(sizes[expert + i], 0)), limit) : 0;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum = min(sum + rows[i], limit);
    const unsigned end = min(position + sum_to_lane(sum, limit), limit);
    unsigned begin = __shfl_up_sync(kAllLanes, end, 1);
    if (lane == 0) begin = position;
    position = __shfl_sync(kAllLanes, end, 31);
    unsigned at = begin, tiles = 0, present = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (first != nullptr && expert + i < experts) first[expert + i] = static_cast<int>(at);
      rows[i] = min(rows[i], limit - at);
      at += rows[i];
      tiles += tiles_of(static_cast<int>(rows[i]), tile_rows);
      present += rows[i] > 0;
    }
    const unsigned tiles_to = sum_to_lane(tiles, 0x7fffffffu), present_to = sum_to_lane(present, 0x7fffffffu);
    unsigned span_tile = tile + tiles_to - tiles, span = count + present_to - present;
    at = begin;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (rows[i] > 0) {
        spans[span++] = {expert + i, static_cast<int>(at), static_cast<int>(rows[i]), static_cast<int>(span_tile)};
        at += rows[i];
        span_tile += tiles_of(static_cast<int>(rows[i]), tile_rows);
      }
    }
    tile += __shfl_sync(kAllLanes, tiles_to, 31);
    count += __shfl_sync(kAllLanes, present_to, 31);
  }
  if (lane != 0) return;
  if (first != nullptr) first[experts] = static_cast<int>(position);
  const int none = static_cast<int>(limit - position);
  if (none > 0) spans[count++] = {-1, static_cast<int>(position), none, static_cast<int>(tile)};
  *counts = {static_cast<int>(count), static_cast<int>(tile) + tiles_of(none, tile_rows)};
}

// One warp: spans and order of up to 32 rows with the ids `ids[m]`, in the order of their experts' first rows, those
// without an expert last.
__device__ inline void plan_ids(const int* ids, int experts, int m, int tile_rows, Span* spans, Counts* counts,
                                int* order) {
  const int lane = threadIdx.x % 32;
  int id = -2;  // no row
  if (lane < m) {
    id = ids[lane];
    if (id < 0 || id >= experts) id = -1;
  }
  const unsigned mine = __match_any_sync(kAllLanes, id);
  const unsigned below = (1u << lane) - 1u;
  const bool leads = (mine & below) == 0 && id >= 0;
  const unsigned leaders = __ballot_sync(kAllLanes, leads);
  const int rows = __popc(mine);
  const int tiles = tiles_of(rows, tile_rows);
  const int rows_to = static_cast<int>(sum_to_lane(leads ? rows : 0, 32));
  const int tiles_to = static_cast<int>(sum_to_lane(leads ? tiles : 0, 32));
  const int all_rows = __shfl_sync(kAllLanes, rows_to, 31), all_tiles = __shfl_sync(kAllLanes, tiles_to, 31);
  const int of_leader = __shfl_sync(kAllLanes, rows_to - rows, __ffs(mine) - 1);
  const int first = id >= 0 ? of_leader : all_rows;
  if (id >= -1) order[first + __popc(mine & below)] = lane;
  if (leads) spans[__popc(leaders & below)] = {id, first, rows, tiles_to - tiles};
  const int count = __popc(leaders), none = m - all_rows;
  if (none > 0 && lane == 0) spans[count] = {-1, all_rows, none, all_tiles};
  if (lane == 0) *counts = {count + (none > 0), all_tiles + tiles_of(none, tile_rows)};
}

// All threads of a CTA: the plan, in plan_bytes(work) bytes of shared memory or where a kernel left it.
__device__ inline Plan get_plan(const Work& work, uint8_t* shared) {
  Counts* const counts = reinterpret_cast<Counts*>(shared);
  Span* const spans = reinterpret_cast<Span*>(counts + 1);
  if (work.counts == nullptr) {
    int* const order =
        work.row_mode == RowMode::kIds ? reinterpret_cast<int*>(spans + min(work.experts, kOwnExperts) + 1) : nullptr;
    if (threadIdx.x < 32) {
      if (order == nullptr) {
        plan_sizes(work.rows, work.experts, work.m, work.tile_rows, spans, counts, nullptr);
      } else {
        plan_ids(work.rows, work.experts, work.m, work.tile_rows, spans, counts, order);
      }
    }
    __syncthreads();
    return {spans, order, counts->spans, counts->tiles};
  }
  const Span* const planned = reinterpret_cast<const Span*>(work.counts + 1);
  const int* const order = work.row_mode == RowMode::kIds ? planned_order(work) : nullptr;
  const Counts found = *work.counts;
  if (found.spans > min(work.experts, kOwnExperts) + 1) return {planned, order, found.spans, found.tiles};
  for (int i = threadIdx.x; i < found.spans; i += blockDim.x) {
    *reinterpret_cast<int4*>(spans + i) = reinterpret_cast<const int4*>(planned)[i];
  }
  __syncthreads();
  return {spans, order, found.spans, found.tiles};
}

// One warp: the span that tile `tile` < tile_count belongs to.
__device__ inline Span find_span(const Plan& plan, int tile) {
  const int lane = threadIdx.x % 32;
  int low = 0, size = plan.span_count;
  while (size > 1) {
    const int step = (size + 31) / 32, at = lane * step;
    const unsigned not_after = __ballot_sync(kAllLanes, at < size && plan.spans[low + at].first_tile <= tile);
    const int part = __popc(not_after) - 1;
    low += part * step;
    size = min(step, size - part * step);
  }
  return plan.spans[low];
}

}  // namespace wonly::ragged
