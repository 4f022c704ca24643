// Making a plan (ragged_plan.h), and finding a tile in it.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/ragged_plan.h"

namespace wonly::ragged {

constexpr unsigned kAllLanes = 0xffffffffu;

struct Plan {
  const Span* spans;
  const int* order;  // rows by position; null: they are in order as they are
  int span_count, tile_count;

  __device__ int row(int position) const { return order == nullptr ? position : order[position]; }
};

// The row of x that a row of the product takes.
__device__ __forceinline__ int x_row(const Work& work, int row) {
  int rest;
  return work.repeat.divide(row, &rest);
}

// A tile's rows are a power of two: no division, of which there would be one for every expert before the first weights
// are copied.
__device__ __forceinline__ int log2_of(int tile_rows) { return __ffs(tile_rows) - 1; }
__device__ __forceinline__ int tiles_of(int rows, int tile_rows) {
  return (rows + tile_rows - 1) >> log2_of(tile_rows);
}

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

// Where get_plan has the spans in its shared memory, if they are there.
__device__ __forceinline__ Span* own_spans(uint8_t* shared) {
  return reinterpret_cast<Span*>(reinterpret_cast<Counts*>(shared) + 1);
}

// All threads of a CTA: the plan, in plan_bytes(work) bytes of shared memory or where a kernel left it.
__device__ inline Plan get_plan(const Work& work, uint8_t* shared) {
  Counts* const counts = reinterpret_cast<Counts*>(shared);
  Span* const spans = own_spans(shared);
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
#pragma unroll 1
  for (int i = threadIdx.x; i < found.spans; i += blockDim.x) {
    *reinterpret_cast<int4*>(spans + i) = reinterpret_cast<const int4*>(planned)[i];
  }
  __syncthreads();
  return {spans, order, found.spans, found.tiles};
}

// Of a span's tiles, in quarters of whole ones.
constexpr int kHeights = 4;
__device__ __forceinline__ int height_of(const Span& span, int tile_rows) {
  return min(tiles_of(span.rows, tile_rows / kHeights), kHeights);
}

// One warp: whether they have the same height in all spans.
__device__ inline bool all_alike(const Span* spans, int count, int tile_rows) {
  const int first = height_of(spans[0], tile_rows);
  bool alike = true;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < count; i += 32) alike &= height_of(spans[i], tile_rows) == first;
  return __all_sync(kAllLanes, alike);
}

// One warp: behind the spans the same by falling height, so that CTAs which take tiles in turns have about as much to
// do.
__device__ inline void sort_spans(Span* spans, int count, int tile_rows) {
  const int lane = threadIdx.x % 32;
  Span* const sorted = spans + count;
  const auto height = [&](int i) { return i < count ? height_of(spans[i], tile_rows) : 0; };
  int at[kHeights + 1] = {};  // where those of a height begin
#pragma unroll 1
  for (int base = 0; base < count; base += 32) {
    const int mine = height(base + lane);
#pragma unroll
    for (int h = 1; h <= kHeights; ++h) at[h - 1] += __popc(__ballot_sync(kAllLanes, mine >= h));
  }
#pragma unroll 1
  for (int base = 0; base < count; base += 32) {
    const int mine = height(base + lane);
#pragma unroll
    for (int h = 1; h <= kHeights; ++h) {
      const unsigned same = __ballot_sync(kAllLanes, mine == h);
      if (mine == h) sorted[at[h] + __popc(same & ((1u << lane) - 1u))] = spans[base + lane];
      at[h] += __popc(same);
    }
  }
  __syncwarp();
  int tiles = 0;
#pragma unroll 1
  for (int base = 0; base < count; base += 32) {
    const int i = base + lane, mine = i < count ? tiles_of(sorted[i].rows, tile_rows) : 0;
    const int to = static_cast<int>(sum_to_lane(mine, 0x7fffffffu));
    if (i < count) sorted[i].first_tile = tiles + to - mine;
    tiles += __shfl_sync(kAllLanes, to, 31);
  }
}

// Up to as many experts have their tiles sorted: room for their spans, and for those in two parts.
constexpr int kSortedTiles = (kOwnExperts - 2) / 3;
constexpr int sorted_plan_bytes(int experts) { return plan_bytes(experts <= kSortedTiles ? 3 * experts + 2 : experts); }

// One warp: behind the spans, what they have of whole tiles, then their tails by falling height.
__device__ inline void sort_tiles(Span* spans, int count, int tile_rows) {
  const int lane = threadIdx.x % 32;
  const auto tail_of = [&](int i) { return i < count ? spans[i].rows & (tile_rows - 1) : 0; };
  const auto height = [&](int i) { return tiles_of(tail_of(i), tile_rows / kHeights); };
  int tiles = 0, at[kHeights + 1] = {};  // where tails of a height begin
#pragma unroll 1
  for (int base = 0; base < count; base += 32) {
    const int i = base + lane, whole = i < count ? spans[i].rows >> log2_of(tile_rows) : 0;
    const int to = static_cast<int>(sum_to_lane(whole, 0x7fffffffu));
    if (i < count) spans[count + i] = {spans[i].expert, spans[i].first, whole * tile_rows, tiles + to - whole};
    tiles += __shfl_sync(kAllLanes, to, 31);
#pragma unroll
    for (int h = 1; h <= kHeights; ++h) at[h - 1] += __popc(__ballot_sync(kAllLanes, height(i) >= h));
  }
#pragma unroll 1
  for (int i = at[0] + lane; i < count; i += 32) spans[2 * count + i] = {-1, 0, 0, 0x7fffffff};  // no tail
#pragma unroll 1
  for (int base = 0; base < count; base += 32) {
    const int i = base + lane, mine = height(i);
#pragma unroll
    for (int h = 1; h <= kHeights; ++h) {
      const unsigned same = __ballot_sync(kAllLanes, mine == h);
      const int to = at[h] + __popc(same & ((1u << lane) - 1u));
      if (mine == h) {
        const int tail = tail_of(i);
        spans[2 * count + to] = {spans[i].expert, spans[i].first + spans[i].rows - tail, tail, tiles + to};
      }
      at[h] += __popc(same);
    }
  }
}

// Whether get_plan's spans are in the CTA's shared memory, with room for what sort_tiles writes.
__device__ __forceinline__ bool can_sort_tiles(const Plan& plan, const Work& work, const Span* own) {
  return plan.spans == own && work.experts <= kSortedTiles;
}

// What one of several clusters takes of sorted tiles: forward and backward in turns, so that all have about as much to
// do.
struct Turns {
  int cluster, clusters;

  __device__ int place(int wave) const { return wave % 2 == 0 ? cluster : clusters - 1 - cluster; }
  __device__ int tile(int wave) const { return wave * clusters + place(wave); }
  __device__ int count(int tiles) const {
    const int waves = tiles / clusters;
    return waves + (place(waves) < tiles - waves * clusters);
  }
};

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

// What a CTA with one tile of rows has to do.
struct OneTile {
  int expert, rows;  // expert: -1: rows without one
  const int* list;   // the rows; null: those of `members`, or, where that is none, `first` and those behind it
  int first;
  unsigned members;

  __device__ int row(int i) const {
    if (list != nullptr) return list[i];
    if (members == 0) return first + i;
    unsigned left = members;
    for (; i > 0; --i) left &= left - 1;
    return __ffs(left) - 1;
  }
};

// A tile's number, or what gives it for the number of all tiles.
template <typename Pick>
__device__ __forceinline__ int picked(Pick& pick, int tiles) {
  if constexpr (std::is_same_v<std::decay_t<Pick>, int>) {
    return pick;
  } else {
    return pick(tiles);
  }
}

// One warp: a tile of up to 32 rows, of which this lane's has the id `id` (-1: none of the experts, -2: there is no
// such row). A tile is numbered by its first row. In registers alone: what stands before the first load of weights is
// paid for in full.
template <typename Pick>
__device__ __forceinline__ bool find_in_ids(int id, int tile_rows, Pick&& pick, OneTile* found) {
  const int lane = threadIdx.x % 32;
  const unsigned below = (1u << lane) - 1u, same = __match_any_sync(kAllLanes, id);
  const int place = __popc(same & below), of_tile = place & -tile_rows;
  const bool leads = id != -2 && place == of_tile;
  const unsigned leaders = __ballot_sync(kAllLanes, leads);
  const int tiles = __popc(leaders), tile = picked(pick, tiles);
  if (tile >= tiles) return false;
  const int leader = __ffs(__ballot_sync(kAllLanes, leads && __popc(leaders & below) == tile)) - 1;
  found->expert = __shfl_sync(kAllLanes, id, leader);
  const int from = __shfl_sync(kAllLanes, of_tile, leader);
  found->members = __ballot_sync(kAllLanes, id == found->expert && of_tile == from);
  found->rows = __popc(found->members);
  found->list = nullptr;
  found->first = 0;
  return true;
}

// One warp: the same for sizes of up to kSizes experts, in registers too, if they add up to no more rows than there
// are.
constexpr int kSizesOfLane = 4, kSizes = 32 * kSizesOfLane;
constexpr int kSizedRows = 510;  // so that both sums over kSizes sizes, each cut to one more, fit a register
enum class Search { kFound, kNone, kOther };
template <typename Pick>
__device__ __forceinline__ Search find_in_sizes(const Work& work, Pick&& pick, OneTile* found) {
  const int lane = threadIdx.x % 32, log2_rows = log2_of(work.tile_rows);
  int rows[kSizesOfLane];
#pragma unroll
  for (int i = 0; i < kSizesOfLane; ++i) {
    const int expert = lane * kSizesOfLane + i;
    rows[i] = expert < work.experts ? min(max(work.rows[expert], 0), kSizedRows + 1) : 0;
  }
  uint32_t both = 0;  // rows, and tiles in the upper half
#pragma unroll
  for (int i = 0; i < kSizesOfLane; ++i) both += rows[i] | tiles_of(rows[i], work.tile_rows) << 16;
  const int sum = both & 0xffff, tiles = both >> 16;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint32_t more = __shfl_up_sync(kAllLanes, both, distance);
    both += lane >= distance ? more : 0;
  }
  const int rows_to = both & 0xffff, tiles_to = both >> 16;
  const int all = __shfl_sync(kAllLanes, rows_to, 31), of_experts = __shfl_sync(kAllLanes, tiles_to, 31);
  if (all > work.m) return Search::kOther;
  const int count = of_experts + tiles_of(work.m - all, work.tile_rows), tile = picked(pick, count);
  if (tile >= count) return Search::kNone;
  found->list = nullptr;
  found->members = 0;
  const int owner = __ffs(__ballot_sync(kAllLanes, tiles_to > tile)) - 1;
  if (owner < 0) {
    found->expert = -1;
    found->first = all + ((tile - of_experts) << log2_rows);
    found->rows = min(work.m - found->first, work.tile_rows);
    return Search::kFound;
  }
  int expert = lane * kSizesOfLane, first = rows_to - sum, skip = (tile - (tiles_to - tiles)) << log2_rows, left = 0;
#pragma unroll
  for (int i = 0; i < kSizesOfLane; ++i) {
    if (left > 0) continue;
    if (skip < rows[i]) {
      left = rows[i] - skip;
      first += skip;
      expert += i;
    } else {
      first += rows[i];
      skip -= tiles_of(rows[i], work.tile_rows) << log2_rows;
    }
  }
  found->expert = __shfl_sync(kAllLanes, expert, owner);
  found->first = __shfl_sync(kAllLanes, first, owner);
  found->rows = min(__shfl_sync(kAllLanes, left, owner), work.tile_rows);
  return Search::kFound;
}

// Bytes of shared memory that find_tile takes, aligned to 16.
constexpr int kListBytes = 32 * 4;  // of the most rows that a tile has
inline int tile_bytes(const Work& work) {
  return work.counts == nullptr && work.row_mode == RowMode::kIds ? 0 : kListBytes + plan_bytes(work.experts);
}

// What find_tile wants to know of this lane's row: first of all, for it is a load.
__device__ __forceinline__ int load_id(const Work& work) {
  const int lane = threadIdx.x % 32;
  if (work.counts != nullptr || work.row_mode != RowMode::kIds || lane >= work.m) return -2;
  const int id = work.rows[lane];
  return id < 0 || id >= work.experts ? -1 : id;
}
// All threads of a CTA: a tile, of a power of two of rows; false where there is none. `pick`: its number, or, called
// with the number of all tiles, what gives it.
template <typename Pick>
__device__ __forceinline__ bool find_tile(const Work& work, int id, Pick&& pick, uint8_t* shared, OneTile* found) {
  if (work.counts == nullptr && work.row_mode == RowMode::kIds) return find_in_ids(id, work.tile_rows, pick, found);
  if (work.counts == nullptr && work.experts <= kSizes && work.m <= kSizedRows) {
    const Search search = find_in_sizes(work, pick, found);
    if (search != Search::kOther) return search == Search::kFound;
  }
  int* const list = reinterpret_cast<int*>(shared);
  const Plan plan = get_plan(work, shared + kListBytes);
  const int tile = picked(pick, plan.tile_count);
  if (tile >= plan.tile_count) return false;
  const Span span = find_span(plan, tile);
  const int first = (tile - span.first_tile) * work.tile_rows;
  *found = {span.expert, min(work.tile_rows, span.rows - first), list, 0, 0};
  if (threadIdx.x < found->rows) list[threadIdx.x] = plan.row(span.first + first + threadIdx.x);
  __syncthreads();
  return true;
}

}  // namespace wonly::ragged
