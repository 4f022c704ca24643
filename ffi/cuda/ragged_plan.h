// The plan of a ragged product: which rows belong to which expert, and so which tiles of work there are.
//
// Rows in the order of their experts form spans, one for each expert that has rows and one, the last, for rows without
// an expert, whose result is zero. A span is cut into tiles of `tile_rows` rows. Where that is quick every CTA makes
// the plan for itself, in shared memory; else a kernel before the product leaves it in the call's scratch.
#pragma once

#include "cuda/division.h"
#include "cuda/ragged.h"
#include "layout.h"

namespace wonly::ragged {

struct alignas(16) Span {
  int expert;      // -1: rows without one
  int first;       // position of its first row in the order
  int rows;        // at least 1
  int first_tile;  // tiles are numbered through all spans
};

// What a plan holds; in scratch: the counts, then spans, then the order.
struct alignas(16) Counts {
  int spans, tiles;
};

// A kernel's parameter.
struct Work {
  const int32_t* rows;
  RowMode row_mode;
  int experts, m;
  Divisor repeat;
  int tile_rows;   // a power of two
  Counts* counts;  // of the plan in scratch; null where CTAs plan for themselves
};

constexpr int kOwnExperts = 512;  // a CTA counts the rows of as many itself, and keeps as many spans
constexpr int kOwnIds = 32;       // and puts as many ids in order

// Where a plan in scratch has the rows by position.
WONLY_HOST_DEVICE const int* planned_order(const Work& work) {
  return reinterpret_cast<const int*>(reinterpret_cast<const Span*>(work.counts + 1) + work.experts + 1);
}

// Tiles of any routing.
inline int64_t most_tiles(const Work& work) {
  const int64_t spans = work.m < work.experts ? work.m : int64_t{work.experts} + 1;
  const int64_t full = work.m / work.tile_rows;  // a span that is not full ends in one tile more
  return full + spans < work.m ? full + spans : work.m;
}

// Bytes of shared memory for a CTA's plan.
constexpr int plan_bytes(int experts) {
  const int spans = experts < kOwnExperts ? experts + 1 : kOwnExperts + 1;
  return static_cast<int>(sizeof(Counts)) + spans * static_cast<int>(sizeof(Span)) + kOwnIds * 4;
}
constexpr int kMostPlanBytes = plan_bytes(kOwnExperts);

// For tiles of `tile_rows` rows that CTAs find themselves.
Work own_work(const RaggedArgs& args, int tile_rows);

// The plan of `args` for tiles of `tile_rows` rows; enqueues the kernel that makes it where CTAs do not, or where it is
// wanted `in_scratch`.
cudaError_t plan(const RaggedArgs& args, int tile_rows, bool in_scratch, int shared_per_block, cudaStream_t stream,
                 Work* work);

// Whether scratch has room for the rows of x in the plan's order, and of float32 ones for a number each and `more`;
// where; and they, from then on at `*x`, for a plan that is in scratch.
bool can_order(const RaggedArgs& args, int64_t more = 0);
void* ordered_rows(const RaggedArgs& args);
int64_t room_behind_plan(const RaggedArgs& args);  // bytes of scratch from there on
cudaError_t order(const RaggedArgs& args, const Work& work, const void** x, cudaStream_t stream);

}  // namespace wonly::ragged
