// How the gradient of scales is shared out: columns, each all rows of some inputs and outputs of one entry of the
// batch, between which nothing is summed. A worker, a CTA or a cluster, gets runs of them that take the same time,
// whatever entries they belong to. With many rows there is more than one round, so that what workers read at a time has
// room in the L2.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/division.h"
#include "cuda/scales_gradient.h"
#include "cuda/tensor_map.h"

namespace wonly::scales_gradient {

constexpr int kMostRounds = 64;

struct Columns {
  const int32_t* limits;  // as in ScalesGradientArgs
  int batch, m;
  int of_entry;
  int rounds;
};

struct Span {
  int first, count;  // rows
};
__device__ __forceinline__ Span rows_of(const Columns& columns, int entry) {
  if (columns.limits == nullptr) return {0, columns.m};
  const auto limit = [&](int i) { return min(max(columns.limits[i], 0), columns.m); };
  const int first = limit(entry);
  return {first, max(limit(entry + 1) - first, 0)};
}

// From the first column of a run up to, but not with, the other.
struct Run {
  int entry, column, last_entry, last_column;
};

// By a warp: all runs of a worker, a lane one of them at a time. `Cost::of(rows)` is that of a column.
template <typename Cost>
__device__ __forceinline__ void find_runs(const Columns& columns, int worker, int workers, Run* runs) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool alike = columns.limits == nullptr;
  const auto cost_of = [&](int entry) {
    return alike || entry < columns.batch ? Cost::of(rows_of(columns, entry).count) : 0;
  };
  int64_t all = 0;
  if (alike) {
    all = static_cast<int64_t>(columns.batch) * Cost::of(columns.m);
  } else {
    int sum = 0;
    for (int entry = lane; entry < columns.batch; entry += 32) sum += cost_of(entry);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    all = sum;
  }
  all *= columns.of_entry;
  const int64_t parts = static_cast<int64_t>(columns.rounds) * workers;
  for (int first_round = 0; first_round < columns.rounds; first_round += 32) {
    const int round = first_round + lane;
    const int64_t part = static_cast<int64_t>(round) * workers + worker;
    const int64_t from = all * part / parts, to = all * (part + 1) / parts;
    // The first columns before which all take so long or more: in the entry that has it, or at the end.
    const auto place = [&](int64_t cost, int entry, int before, int each, int* to_entry, int* to_column) {
      *to_entry = entry;
      *to_column = static_cast<int>((cost - static_cast<int64_t>(before) * columns.of_entry + each - 1) / each);
    };
    Run run{columns.batch, 0, columns.batch, 0};
    const int from_entries = static_cast<int>(from / columns.of_entry),
              to_entries = static_cast<int>(to / columns.of_entry);
    if (alike) {
      const int each = Cost::of(columns.m), begin = from_entries / each, end = to_entries / each;
      place(from, begin, begin * each, each, &run.entry, &run.column);
      place(to, end, end * each, each, &run.last_entry, &run.last_column);
    } else {
      int before = 0, from_before = 0, from_each = 0, to_before = 0, to_each = 0;
      for (int first = 0; first < columns.batch; first += 32) {
        const int of_lane = cost_of(first + lane);
        const int after = before + static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<uint32_t>(of_lane)));
        const bool here =
            (before <= from_entries && from_entries < after) || (before <= to_entries && to_entries < after);
        if (__any_sync(0xffffffffu, here)) {
          for (int i = 0; i < 32; ++i) {
            const int each = __shfl_sync(0xffffffffu, of_lane, i);
            if (before <= from_entries && from_entries < before + each) {
              run.entry = first + i, from_before = before, from_each = each;
            }
            if (before <= to_entries && to_entries < before + each) {
              run.last_entry = first + i, to_before = before, to_each = each;
            }
            before += each;
          }
        }
        before = after;
      }
      if (from_each > 0) place(from, run.entry, from_before, from_each, &run.entry, &run.column);
      if (to_each > 0) place(to, run.last_entry, to_before, to_each, &run.last_entry, &run.last_column);
    }
    if (round < columns.rounds) runs[round] = run;
  }
}

// The parts of a worker's runs that are of one entry, by a warp: `body(entry, rows, first column, last)`.
template <typename Body>
__device__ __forceinline__ void walk(const Columns& columns, const Run* runs, Body&& body) {
  const int lane = threadIdx.x % 32;
  Run run = runs[0];
  for (int round = 0;;) {
    if (columns.limits != nullptr && run.column == 0) {  // to the next entry that has rows
      uint32_t with_rows;
      do {
        const int entry = run.entry + lane;
        with_rows = __ballot_sync(0xffffffffu, entry >= columns.batch || rows_of(columns, entry).count > 0);
        run.entry += with_rows != 0 ? __ffs(with_rows) - 1 : 32;
      } while (with_rows == 0);
    }
    const int end = run.entry < run.last_entry ? columns.of_entry : run.entry == run.last_entry ? run.last_column : 0;
    if (run.column >= end) {
      if (run.entry < run.last_entry) {
        ++run.entry;
        run.column = 0;
      } else {
        if (++round == columns.rounds) return;
        run = runs[round];
      }
      continue;
    }
    body(run.entry, rows_of(columns, run.entry), run.column, end);
    run.column = end;
  }
}

// By `threads` threads of each CTA: entries without rows are no worker's; their `count` sums are zero.
__device__ __forceinline__ void clear_empty(const Columns& columns, float* y, int64_t count, int thread, int threads) {
  if (columns.limits == nullptr) return;
  for (int entry = static_cast<int>(blockIdx.x); entry < columns.batch; entry += static_cast<int>(gridDim.x)) {
    if (rows_of(columns, entry).count > 0) continue;
    for (int64_t i = thread; i < count; i += threads) y[entry * count + i] = 0.f;
  }
}

// Over the four lanes that have an output in common.
__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// x and dy in boxes of `rows` x 64 inputs or outputs.
struct Maps {
  CUtensorMap x, dy;
};
inline cudaError_t describe(const ScalesGradientArgs& args, int rows, Maps* maps) {
  MatmulArgs operand{};
  operand.batch = args.batch;
  operand.m = args.m;
  operand.x_dtype = args.x_dtype;
  operand.x = args.x;
  operand.k = args.k;
  operand.x_batch_stride = args.x_batch_stride;
  if (cudaError_t error = describe_activations(operand, rows, &maps->x); error != cudaSuccess) return error;
  operand.x = args.dy;
  operand.k = args.n;
  operand.x_batch_stride = args.dy_batch_stride;
  return describe_activations(operand, rows, &maps->dy);
}

}  // namespace wonly::scales_gradient
