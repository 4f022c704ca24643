// Tables of float32 numbers that four-bit codes index, in shared memory: of all pairs of two, of which every lane of a
// warp has its own, so that no bank is asked twice at a time. Numbers are rounded to 16 bits, or are two fp16 numbers
// each (`kPieces`), in units of a power of two that the largest sets. A pair has kRowBytes: what its pieces need, or
// 256, so that both codes in one byte of a number, above that of a lane, are where its entries are.
#pragma once

#include <cuda_fp16.h>

#include "cuda/element.cuh"
#include "cuda/matmul.h"
#include "cuda/ptx.cuh"
#include "cuda/split_row.cuh"
#include "dequant/convert.h"
#include "layout.h"

namespace wonly {

constexpr int kTablePairs = kTableEntries * kTableEntries;
constexpr int kWideRowBytes = 256;
constexpr int pair_row_bytes(int pieces) { return pieces * 32 * 4; }
constexpr int pair_table_bytes(int pieces) { return kTablePairs * pair_row_bytes(pieces); }

// The numbers of a word's pairs of codes, pair i that of nibbles i and i + 4; of two pieces also the second ones.
// `table`: a shared address.
template <int kPieces, int kRowBytes = pair_row_bytes(kPieces)>
__device__ __forceinline__ void look_up_pairs(uint32_t word, uint32_t table, uint32_t lane, uint32_t (&first)[4],
                                              uint32_t (&second)[4]) {
  static_assert(kRowBytes == kWideRowBytes || (kPieces == 1 && kRowBytes == kWideRowBytes / 2));
  // Both codes of a pair in a byte: of pairs 0 and 2, and of 1 and 3. What is above those is of others.
  const uint32_t bytes[2] = {lop3<convert::kSelect>(0x0f0fu, word, word >> 12),
                             lop3<convert::kSelect>(0x0f0fu, word >> 4, word >> 16)};
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const uint32_t of_pair = bytes[pair % 2];
    uint32_t at;
    if constexpr (kRowBytes == kWideRowBytes) {
      at = __byte_perm(of_pair, lane * 4, pair < 2 ? 0x5504 : 0x5514);
    } else {
      at = lop3<convert::kAndOr>(pair < 2 ? of_pair << 7 : of_pair >> 1, 0xffu << 7, lane * 4);
    }
    first[pair] = ptx::load_shared(table + at);
    if (kPieces > 1) second[pair] = ptx::load_shared(table + at + 128);
  }
}

// Pair `index` of a word, of rows of 128 bytes. `pairs`: the shared address of this lane's copy of entry 0. A
// product of two 16-bit numbers with two bytes gives the address, c0 * 128 + c1 * 2048 from there, in one instruction.
__device__ __forceinline__ uint32_t look_up_pair(uint32_t pairs, uint32_t word, int index) {
  const uint32_t nibbles = (index == 0 ? word << 4 : word >> (4 * index - 4)) & 0x00f000f0u;
  return ptx::load_shared(__dp2a_lo(nibbles, 0x8008u, pairs));
}

// Entry lane % 16 of the table of weight `batch`.
__device__ __forceinline__ float load_entry(const MatmulArgs& args, int64_t batch, int lane) {
  const float* const numbers = static_cast<const float*>(args.shift) + batch * args.shift_batch_stride;
  return __uint_as_float(ptx::load_32(numbers + lane % kTableEntries));
}

// The table of one piece in rows of 128 bytes, by all threads of the CTA, each of which has its entry.
template <typename X>
__device__ __forceinline__ void fill_pairs(float entry, uint8_t* pairs) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 4
  for (int first = 4 * warp; first < kTablePairs; first += 4 * (blockDim.x / 32)) {
    const int pair = first + lane / 8;
    const X low = from_float<X>(__shfl_sync(0xffffffffu, entry, pair % kTableEntries));
    const X high = from_float<X>(__shfl_sync(0xffffffffu, entry, pair / kTableEntries));
    const uint32_t both = pack_pair(low, high);
    reinterpret_cast<uint4*>(pairs)[first * 8 + lane] = make_uint4(both, both, both, both);
  }
}

// The table for that, by as many threads as there are pairs. Returns what undoes its power of two; of two pieces the
// largest number is 2^kTop or more in its units, below 2^(kTop + 1).
template <typename X, int kPieces, int kTop = kSplitTop, int kRowBytes = pair_row_bytes(kPieces)>
__device__ __forceinline__ float prepare_table(const float* numbers, uint8_t* to, int pair) {
  const float2 both = {__ldg(numbers + pair % 16), __ldg(numbers + pair / 16)};
  uint32_t first = 0, second = 0;
  float undo = 1.f;
  if constexpr (kPieces == 1) {
    first = from_float2<X>(both.x, both.y);
  } else {
    constexpr float kUp = 1.f / (1 << (kSplitTop - kTop));
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(numbers) + i);
      for (const float value : {four.x, four.y, four.z, four.w}) largest = larger_finite(largest, value);
    }
    const uint32_t power = split_power(largest);
    const float up = split_factor(power) * kUp;
    const float2 left = beyond_fp16({both.x * up, both.y * up}, &first);
    second = from_float2<__half>(left.x, left.y);
    undo = split_undo(power) * (1.f / kUp);
  }
  uint32_t* const of_pair = reinterpret_cast<uint32_t*>(to + pair * kRowBytes);
#pragma unroll 4
  for (int i = 0; i < 32; ++i) {
    const int lane = (i + pair) % 32;  // in another bank for every thread of a warp
    of_pair[lane] = first;
    if (kPieces > 1) of_pair[32 + lane] = second;
  }
  return undo;
}

// All threads, of which there are as many as pairs or more: the table of weight `batch`, of rows of kWideRowBytes, and
// what undoes its power of two.
template <typename X, int kPieces>
__device__ __forceinline__ void fill_table(const MatmulArgs& args, int64_t batch, uint8_t* to, float* undo,
                                           unsigned thread) {
  if (thread >= static_cast<unsigned>(kTablePairs)) return;
  const float* const numbers = static_cast<const float*>(args.shift) + batch * args.shift_batch_stride;
  const float found = prepare_table<X, kPieces, kSplitTop, kWideRowBytes>(numbers, to, static_cast<int>(thread));
  if (thread == 0) *undo = found;
}

}  // namespace wonly
