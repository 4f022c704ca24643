// What the CTAs of matmul_transposed_warpgroup.cuh work on: blocks of a product's inputs and tokens, and their stages.
#pragma once

#include <type_traits>

#include "cuda/division.h"
#include "cuda/matmul_transposed.h"
#include "cuda/ptx_sm90.cuh"
#include "layout.h"

namespace wonly::transposed_warpgroup {

constexpr int kConsumers = 2;         // warpgroups that multiply, of most kernels
constexpr int kConsumersBarrier = 5;  // of all of them, beside one of each
constexpr int kBarrierBytes = 1024;
constexpr int kMostSharedBytes = 227 << 10;
constexpr int kRegisters = 64 << 10;  // of a multiprocessor
constexpr int kRunN = 64;             // outputs that are summed over at a time
constexpr int kRunOfTokens = 8;       // blocks of tokens that run beside each other with the same weights

// What a cluster works on: a block for every CTA, or one for all of them, of which each has some stages.
struct Item {
  int weights;      // batch entry or expert; negative: rows whose result is zero
  int first, rows;  // of dy
  int k0;
  int begin, end;  // stages
  bool split;
};

// Of float32 dy (transposed_float32.cuh), in scratch: what undoes the powers of two of dy [batch, M] and of scales
// [batch, groups], and, for a group, of every stage its outputs' scales as two fp16 numbers each, and what is added to
// codes, or, as two more, to their products with scales: [batch, groups, stages, parameter_rows, 64]. One entry of
// scales stands for a batch that shares it.
struct Float32Params {
  const float *dy_undo, *scale_undo;
  const uint16_t* parameters;
  int64_t batch_stride;  // of a batch entry, in groups
  int stages;
};

template <typename Source>
struct Params {
  MatmulArgs args;
  typename Source::Params source;
  int cluster, clusters;  // CTAs of a cluster, and clusters
  Divisor ranks;          // the former, where items may be split
  int partners;           // CTAs of a cluster that bring each other dy, 1 or 2, where its item is not split
  int log2_group_blocks;  // group size = 32 << this; -1: one scale per output
  bool simple;            // a weight is (code - integer) * scale, or table[code] * scale, with a scale of dy's type
  bool wide_result;       // float32
  bool rows_of_16_bytes;  // of a 16-bit result
  int pieces_apart;       // entries of one of the numbers that float32 dy is
  Float32Params float32;
};

// The first group of scales of a block, and of which of its groups the sixteen inputs of a fragment are.
template <typename Source>
__device__ __forceinline__ int first_group(const Params<Source>& params, int k0) {
  return params.log2_group_blocks < 0 ? 0 : k0 / 32 >> params.log2_group_blocks;
}
template <typename Source>
__device__ __forceinline__ int group_of_fragment(const Params<Source>& params, int fragment) {
  return params.log2_group_blocks < 0 ? 0 : fragment / 2 >> params.log2_group_blocks;
}
// How many it has.
template <typename S>
__device__ __forceinline__ int groups_of_block(const Params<typename S::Source>& params) {
  return params.log2_group_blocks < 0 ? 1 : max(1, S::kMostGroups >> params.log2_group_blocks);
}

// Rows of dy that are copied at a time where blocks may have any number of rows, of which as many are multiplied as
// there are, in steps of so many; 0: a partner's part of a block. Low blocks have nothing to gain.
constexpr int box_rows(int tokens, bool any_rows) { return any_rows && tokens == 256 ? 64 : 0; }

// Calls `multiply` with the rows of a block that are multiplied: all, or in steps of 64 as many as it has.
template <typename S, typename Multiply>
__device__ __forceinline__ void with_rows(const Item& item, Multiply&& multiply) {
  if constexpr (S::Source::kAnyRows && S::kTokens > 64) {
    if (item.rows <= 64) return multiply(std::integral_constant<int, 64>{});
    if constexpr (S::kTokens > 128) {
      if (item.rows <= 128) return multiply(std::integral_constant<int, 128>{});
      if (item.rows <= 192) return multiply(std::integral_constant<int, 192>{});
    }
  }
  multiply(std::integral_constant<int, S::kTokens>{});
}

// Blocks of tokens that follow each other. The first `whole` items are a block for each partner; the rest are split.
struct Consecutive {
  struct Params {
    int token_blocks, groups;  // groups: of partners, along the inputs
    int whole, items;
    int partners, tokens, inputs;
    bool one_run;                          // of one batch entry
    int stages, stages_each, stages_more;  // of a split item: of each rank, and how many have one more
    Divisor of_batch, of_run;              // blocks of tokens and groups, all and those of a run
    Divisor run, last_run;                 // blocks of tokens of a run, and of the last one
  };
  static constexpr int kSharedBytes = 0;
  static constexpr int kStagingTokens = 128;
  static constexpr bool kBulkStores = true, kSplits = true, kAnyRows = false;

  const Params& params;
  int64_t m;

  __device__ Consecutive(const Params& params, const MatmulArgs& args, uint8_t*) : params(params), m(args.m) {}

  __device__ int items() const { return params.items; }

  __device__ Item item(int index, int rank) const {
    Item item{};
    item.split = index >= params.whole;
    const int rest = index - params.whole;
    const bool two = params.partners == 2;
    const int group = item.split ? params.whole + (two ? rest >> 1 : rest) : index;
    const int partner = !item.split ? rank : two ? rest & 1 : 0;
    int in_run = group, of_run, run = 0;
    if (!params.one_run) {
      int within;
      item.weights = params.of_batch.divide(group, &within);
      run = params.of_run.divide(within, &in_run);
    }
    const bool last = run * kRunOfTokens + kRunOfTokens > params.token_blocks;
    const int k_group = (last ? params.last_run : params.run).divide(in_run, &of_run);
    item.first = (run * kRunOfTokens + of_run) * params.tokens;
    item.rows = static_cast<int>(min(m - item.first, static_cast<int64_t>(params.tokens)));
    item.k0 = (k_group * params.partners + partner) * params.inputs;
    item.begin = item.split ? params.stages_each * rank + min(rank, params.stages_more) : 0;
    item.end = item.split ? item.begin + params.stages_each + (rank < params.stages_more) : params.stages;
    return item;
  }

  __device__ int64_t row(const Item& item, int i) const { return item.weights * m + item.first + i; }
  __device__ int64_t dy_row(const Item& item, int i) const { return item.first + i; }
};

// A CTA and its ring of stages.
template <typename S>
struct Cta {
  const Params<typename S::Source>& params;
  const CUtensorMap &dy_map, &dy_last;  // of a partner's part, and of one that has not all rows
  const typename S::Source& source;
  // Barriers of the stages. landed: of zeros or offsets, of which something is to be made.
  uint64_t *full, *empty, *landed;
  uint8_t* ring;
  int warp, lane, rank;
  int first_item;

  // All threads, once, before the first use of barriers: others of the cluster copy to here before they meet at the
  // end.
  __device__ __forceinline__ void wait_for_barriers() const {
    if (params.partners == 2) ptx::cluster_wait();
  }

  // Calls `of_item` for every item that has stages, by a warp that fills the ring; whether the last one was split.
  template <typename OfItem>
  __device__ __forceinline__ bool for_each_item(OfItem&& of_item) const {
    bool last_split = false;
    wait_for_barriers();
    for (int index = first_item; index < source.items(); index += params.clusters) {
      const Item item = source.item(index, rank);
      if (item.weights < 0) continue;  // nobody waits for it
      last_split = item.split;
      of_item(item);
    }
    return last_split;
  }

  // Starts the copies of dy for a stage, `rows` from `row` on, and tells its barrier of them; by one thread. The copy
  // engine takes longer for rows that are not there than for others.
  __device__ __forceinline__ void copy_dy(int slot, int n, int row, int rows, int batch, bool split) const {
    constexpr int kRowBytes = kRunN * 2, kRuns = S::kOutputs / kRunN, kBox = box_rows(S::kTokens, S::Source::kAnyRows);
    uint8_t* const to = ring + slot * S::kStageBytes + S::kDyAt;
    const bool shared = params.partners == 2 && !split;
    int box = params.partners == 1 ? S::kTokens : S::kTokens / 2, share = box;
    if constexpr (kBox > 0) {
      const int boxes = (rows + kBox - 1) / kBox;
      box = kBox, rows = boxes * kBox;
      share = (boxes + 1) / 2 * kBox;
    } else if constexpr (S::Source::kAnyRows) {
      rows = S::kTokens;
    }
    const int end = shared ? min((rank + 1) * share, rows) : rows;
    ptx::barrier_expect(full + slot, S::kPieces * kRuns * rows * kRowBytes);
    for (int first = shared ? rank * share : 0; first < end; first += box) {
      const CUtensorMap* const map = !S::Source::kAnyRows && rows - first < box ? &dy_last : &dy_map;
#pragma unroll
      for (int piece = 0; piece < S::kPieces; ++piece) {
        const int of_piece = S::kPieces == 1 ? batch : piece * params.pieces_apart + batch;
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
          uint8_t* const of_run = to + ((piece * kRuns + run) * S::kTokens + first) * kRowBytes;
          if (shared) {
            ptx::tensor_copy_3d_multicast(of_run, map, n + run * kRunN, row + first, of_piece, full + slot, 3);
          } else {
            ptx::tensor_copy_3d(of_run, map, n + run * kRunN, row + first, of_piece, full + slot);
          }
        }
      }
    }
  }

  // A warp that multiplies has done with a stage of `item`.
  __device__ __forceinline__ void release(const Item& item, int slot) const {
    __syncwarp();
    const bool arrives = ptx::arrives(lane), two = params.partners == 2;
    ptx::barrier_arrive_twice(empty + slot, arrives, arrives && two, two && !item.split ? rank ^ 1 : rank);
  }
};

}  // namespace wonly::transposed_warpgroup
