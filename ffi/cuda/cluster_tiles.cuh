// What the kernels have in common whose clusters walk over tiles (tiled.cuh, quantized_matmul.cuh): a producer warp of
// each CTA keeps a ring of stages full, half of the activations of every stage for both CTAs, and two warpgroups of 64
// outputs each multiply them.
#pragma once

#include "cuda/bytes_from.cuh"
#include "cuda/element.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/matmul.h"
#include "cuda/place.cuh"
#include "cuda/ptx_sm90.cuh"
#include "cuda/ring.cuh"
#include "layout.h"

namespace wonly::tiles {

constexpr int kWarpgroups = 2;                  // that multiply, 64 outputs each
constexpr int kOutputs = kWarpgroups * kTileN;  // of a CTA
constexpr int kCluster = 2;
constexpr int kThreads = (kWarpgroups + 1) * 128;  // the last warpgroup produces
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kBarrierBytes = 1024;  // keeps the ring aligned for the 128-byte swizzle
constexpr int kNoteBytes = 64;
constexpr int kStagedStride = kTileN + 4;  // floats of a row, so that no two lanes share a bank

// The ring of a CTA, at the beginning of its shared memory: a stage is full when its copies and those who `fill` it
// have come, and empty when all warps that multiply, in all CTAs of the cluster, have read it. Whoever waits for an
// empty stage must be waited for by that stage too: others that went on without it would soon be a phase further than
// it can tell.
template <int kStages, int kStageBytes>
struct Ring {
  uint64_t* full;
  uint64_t* empty;
  uint8_t* notes;
  uint8_t* stages;
  RingPosition<kStages> at;

  __device__ explicit Ring(uint8_t* shared)
      : full(reinterpret_cast<uint64_t*>(shared)),
        empty(full + kStages),
        notes(shared + 2 * kStages * 8),
        stages(shared + kBarrierBytes) {
    static_assert(kStages * (16 + kNoteBytes) <= kBarrierBytes);
  }

  // All threads of the cluster; for each stage `copiers` threads expect copies, and `fillers` warps fill it besides.
  // They see what the others of their CTA wrote before. Until `meet` nothing may come to the other CTA.
  __device__ void init(int copiers, int fillers, int ctas) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        ptx::barrier_init(full + i, copiers + fillers * ptx::kArrivals);
        ptx::barrier_init(empty + i, ctas * kWarpgroups * 4 * ptx::kArrivals);
      }
      ptx::barrier_init_fence();
    }
    if (ctas > 1) ptx::cluster_arrive();
    __syncthreads();
  }
  __device__ static void meet(int ctas) {
    if (ctas > 1) ptx::cluster_wait();
  }

  __device__ uint8_t* stage() const { return stages + at.slot * kStageBytes; }
  // Beside a stage: what those who fill it have to tell those who read it.
  template <typename Note>
  __device__ Note* note() const {
    static_assert(sizeof(Note) <= kNoteBytes);
    return reinterpret_cast<Note*>(notes + at.slot * kNoteBytes);
  }
  __device__ uint64_t* filled() const { return full + at.slot; }
  __device__ void wait_empty() const { ptx::barrier_wait(empty + at.slot, at.phase ^ 1); }
  __device__ void wait_full() const { ptx::barrier_wait(full + at.slot, at.phase); }
  // By a warp that has filled its part.
  __device__ void fill(int lane) const { ptx::warp_arrive(full + at.slot, lane); }
  // By a warp that has read it: to all producers, which fill this CTA's slot together.
  __device__ void release(int slot, int lane, int ctas) const {
    __syncwarp();
    if (ptx::kArrivals == 1) {
      if (lane < ctas) ptx::barrier_arrive_at_rank(empty + slot, lane);
    } else {
      for (int rank = 0; rank < ctas; ++rank) ptx::barrier_arrive_at_rank(empty + slot, rank);
    }
  }
  __device__ void advance() { at.advance(); }
};

// The packed weights of a CTA's outputs, a strip for each warpgroup; a stage has kTiles tiles of each along the inputs.
template <int kBits, int kTiles>
struct Strips {
  const uint32_t* words;
  int64_t n_tiles;
  int k_tiles, count;

  __device__ Strips(const MatmulArgs& args, int64_t batch, int64_t n0)
      : n_tiles(ceil_div(args.n, kTileN)), k_tiles(static_cast<int>(ceil_div(args.k, tile_k(kBits)))) {
    words = args.qw + batch * args.qw_batch_stride + n0 / kTileN * k_tiles * kTileWords;
    count = static_cast<int>(max(min(n_tiles - n0 / kTileN, int64_t{kWarpgroups}), int64_t{0}));
  }

  __device__ int bytes(int stage) const { return min(kTiles, k_tiles - stage * kTiles) * kTileBytes; }  // of a strip
  __device__ void copy(uint8_t* to, int stage, uint64_t* barrier) const {
    for (int i = 0; i < count; ++i) {
      const int64_t tile = static_cast<int64_t>(i) * k_tiles + stage * kTiles;
      ptx::bulk_copy(to + i * kTiles * kTileBytes, words + tile * kTileWords, bytes(stage), barrier);
    }
  }
};

// The results of 16 bits that a tile has of a row, 64 but for a row's last ones, on their way from shared memory to any
// address, by eight threads. Of 64 each stores 16 bytes as they lie there, and one of the eight that are left at the
// ends; of fewer one after the other.
struct AnyRow {
  uint16_t* to;
  const uint4* from;  // chunks of eight, each in the place of its number ^ order
  uint4 low, high;    // those that have the thread's 16 bytes
  uint16_t end;

  __device__ __forceinline__ uint32_t before() const {  // the first multiple of 16 bytes
    return -static_cast<uint32_t>(reinterpret_cast<uintptr_t>(to) / sizeof(*to)) % 8;
  }
  __device__ __forceinline__ void load(uint32_t order, uint32_t chunk) {
    low = from[chunk ^ order], high = from[(chunk + 1) % 8 ^ order];
    end = reinterpret_cast<const uint16_t*>(from + ((chunk < before() ? 0 : 7) ^ order))[chunk];
  }
  __device__ __forceinline__ void store(uint32_t chunk, bool wanted) const {
    const uint32_t shift = before();
    ptx::store_in_row(to + shift + chunk * 8, 0, 0, bytes_from(low, high, shift * sizeof(*to)),
                      wanted && (chunk < 7 || shift == 0));
    if (wanted && shift > 0) to[(chunk < shift ? 0 : 56) + chunk] = end;
  }
  __device__ __forceinline__ void store_some(uint32_t order, uint32_t chunk, int count) const {
#pragma unroll 1
    for (uint32_t i = chunk; static_cast<int>(i) < count; i += 8) {
      to[i] = reinterpret_cast<const uint16_t*>(from + (i / 8 ^ order))[chunk];
    }
  }
};

// Where a column's float32 results go: row `place` of the result, and what multiplies their sums.
struct Column {
  int place;
  float factor;
};

// A thread of one of kCount warpgroups that multiply. Its sums of columns 8j .. 8j + 7 (rows of the result) are 4j ..
// 4j + 3: of columns 2t and 2t + 1 of those for output row(), then for row() + 8.
template <int kCount>
struct ConsumerOf {
  int warpgroup, warp;  // warp: of the warpgroup

  // Not kept in registers.
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int thread() { return threadIdx.x % 128; }
  __device__ int row() const { return warp * kAtomN + lane() / 4; }
  __device__ void sync() const {
    if (kCount > 2 && warpgroup >= 2) {
      if (warpgroup == 2) {
        ptx::warpgroup_sync<3>();
      } else {
        ptx::warpgroup_sync<4>();
      }
    } else if (warpgroup == 0) {
      ptx::warpgroup_sync<1>();
    } else {
      ptx::warpgroup_sync<2>();
    }
  }

  // Of its two outputs.
  __device__ void load_bias(const MatmulArgs& args, int64_t batch, int64_t n0, float (&bias)[2]) const {
    const int64_t first = batch * args.bias_batch_stride + min(n0 + row(), args.n - 1);
    const int second = n0 + row() + 8 < args.n ? 8 : 0;
    load_elements(args.bias, args.bias_dtype, bias, [&](int i) { return first + i * second; });
  }

  // Writes `rows` rows of the result's `outputs` from n0 on, of 16 bits, through shared memory, so that a row's outputs
  // leave together; kRows at a time, 16 or some, for which `staged` has room: for all, where nobody else has anything
  // there, if it is `whole`. kColumns are whole eights. pack(i): sums i and i + 1 as they are stored; place_of(i):
  // where row 16 i + stored_row() is, from `y` on, or, with kHoles, negative if there is none. With kAnyOutputs, which
  // asks for rows that are not known when it is compiled, their number may be no multiple of eight. kStagesAny: such
  // rows are only staged, all of them, for the caller to store_any.
  __device__ static int stored_row() { return thread() / 8; }
  template <int kColumns, int kRows, bool kHoles = false, bool kAnyOutputs = false, bool kStagesAny = false,
            typename Pack, typename PlaceOf>
  __device__ __forceinline__ void store_placed(int outputs, uint16_t* y, int64_t n0, int rows, float* staged,
                                               Pack&& pack, PlaceOf&& place_of, bool whole = kStagesAny) const {
    constexpr int kParts = (kColumns + kRows - 1) / kRows;
    uint4* chunks = reinterpret_cast<uint4*>(staged);  // [row][8 outputs], in an order without conflicts
    const int column = stored_row(), chunk = thread() % 8;
    const uint4* mine = chunks + column * 8 + (chunk ^ (column % 8));
    const int mine_to = n0 + chunk * 8 < outputs ? rows - column : 0;  // rows that this thread may write end before
    uint16_t* const to = y + n0 + chunk * 8;
    const int row_bytes = outputs * 2;
    const auto stage = [&](int part) {
#pragma unroll
      for (int pair = 0; pair < kRows / 16; ++pair) {
        if (part * kRows + pair * 16 >= kColumns) break;
        uint32_t matrices[4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = part * (kRows / 2) + pair * 8 + i * 2;
          if (at < kColumns / 2) matrices[i] = pack(at);
        }
        const int row = pair * 16 + lane() / 16 * 8 + lane() % 8, of_row = warp * 2 + lane() / 8 % 2;
        ptx::store_matrices_transposed(chunks + row * 8 + (of_row ^ (row % 8)), matrices);
      }
    };
    const bool any = kAnyOutputs && outputs % 8 != 0;
    if (any && !kStagesAny) {
      // What follows a part once, for all of them.
#pragma unroll 1
      for (int base = 0; base < rows; base += kRows) {
        sync();
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          if (part * kRows == base) stage(part);
        }
        sync();
        store_any(outputs, y, n0, base, min(rows, base + kRows), chunks, place_of);
      }
      return;
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int base = part * kRows;
      if (base >= rows) break;
      if (!whole) sync();
      stage(part);
      sync();
#pragma unroll
      for (int i = 0; i < kRows / 16; ++i) {
        if (any || base + i * 16 >= kColumns) break;
        const int place = place_of(part * (kRows / 16) + i);
        ptx::store_in_row(to, place, row_bytes, mine[i * 128], base + i * 16 < mine_to && (!kHoles || place >= 0));
      }
      if (whole) chunks += kRows * 8, mine += kRows * 8;
    }
  }

  // Rows `first` to `end` - 1 of those, of any number of outputs; chunks: those of the first.
  template <typename PlaceOf>
  __device__ __forceinline__ static void store_any(int outputs, uint16_t* y, int64_t n0, int first, int end,
                                                   const uint4* chunks, PlaceOf&& place_of) {
    const int column = stored_row(), chunk = thread() % 8, count = outputs - static_cast<int>(n0);
#pragma unroll 1
    for (int i = 0; first + i + column < end; i += 32) {
      const bool second = first + i + 16 + column < end;
      AnyRow two[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int at = i + (j == 0 || second ? 16 * j : 0);
        two[j].to = y + static_cast<int64_t>(place_of((first + at) / 16)) * outputs + n0;
        two[j].from = chunks + (column + at) * 8;
        two[j].load(column % 8, chunk);
      }
      if (count >= kTileN) {
        two[0].store(chunk, true);
        two[1].store(chunk, second);
      } else {
        two[0].store_some(column % 8, chunk, count);
        if (second) two[1].store_some(column % 8, chunk, count);
      }
    }
  }

  // The same of sums that leave as float32, straight from the registers: eight lanes write 32 bytes of a row, which is
  // as many as the memory takes at once. column_of(j, c): of column 8 j + 2 t + c, t the thread's number of four.
  template <int kColumns, typename ColumnOf>
  __device__ __forceinline__ void store_wide(const float (&sums)[kColumns / 2], const float (&bias)[2], int outputs,
                                             float* y, int64_t n0, int rows, ColumnOf&& column_of) const {
    const int n = static_cast<int>(n0) + row();
    float* to = y + n;
    ptx::keep(to);
    // Columns that this thread may store end before, less its own of eight.
    const int left = rows - lane() % 4 * 2, end = n < outputs ? left : 0, second_end = n + 8 < outputs ? left : 0;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      if (j * 8 >= rows) break;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const Column of = column_of(j, c);
        ptx::store_two_in_row(to, of.place, outputs * 4, fmaf(sums[4 * j + c], of.factor, bias[0]),
                              fmaf(sums[4 * j + 2 + c], of.factor, bias[1]), j * 8 + c, end, second_end);
      }
    }
  }

  // The same for results that take more than rounding, kStagedRows rows at a time: sums(i) gives sums i and i + 1, and
  // write(row, n, values, biases) takes outputs n .. n + 7 of a row. A thread writes the same ones of all its rows.
  template <int kColumns, int kStagedRows, typename Sums, typename Write>
  __device__ __forceinline__ void store(const Finish& of, int64_t n0, int rows, float* staged, Sums&& sums,
                                        Write&& write) const {
    constexpr int kOctets = kTileN / 8;
    static_assert(128 % kOctets == 0);
    const int thread = this->thread(), octet = thread % kOctets;
    const int64_t n = n0 + octet * 8;
    const bool inside = n < of.n;
    float biases[8] = {};
    if (inside) load_biases(of, n, biases);
#pragma unroll 1
    for (int base = 0; base < rows; base += kStagedRows) {
      sync();
#pragma unroll
      for (int part = 0; part < kColumns / kStagedRows; ++part) {
        if (part * kStagedRows != base) continue;
#pragma unroll
        for (int i = 0; i < kStagedRows / 2; i += 2) {
          const float2 two = sums(part * (kStagedRows / 2) + i);
          float* const to = staged + (i / 4 * 8 + lane() % 4 * 2) * kStagedStride + row() + i % 4 / 2 * 8;
          to[0] = two.x;
          to[kStagedStride] = two.y;
        }
      }
      sync();
#pragma unroll 1
      for (int column = thread / kOctets; inside && column < min(kStagedRows, rows - base); column += 128 / kOctets) {
        const float4* const at = reinterpret_cast<const float4*>(staged + column * kStagedStride + octet * 8);
        const float4 low = at[0], high = at[1];
        float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        write(base + column, n, values, biases);
      }
    }
  }
};
using Consumer = ConsumerOf<kWarpgroups>;

}  // namespace wonly::tiles
