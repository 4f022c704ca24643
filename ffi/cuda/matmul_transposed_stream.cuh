// dx = dy @ W^T for few tokens: weights streamed once from memory, contraction over the outputs N.
//
// A CTA owns a strip of 64 inputs K; its warps, and the CTAs of a cluster, share N. A warp copies 64 outputs of its
// strip, with the scales and the dy that belong to them, into a ring of its own in shared memory (cp.async). A lane's
// packed word holds codes of one output; movmatrix exchanges words as 8 x 8 matrices of their halves, after which the
// same masks as in matmul_stream.cuh leave pairs of neighbouring *outputs*: the A operand of mma.sync with inputs as
// rows.
//
// Codes are exact (a 16-bit pattern c < 256 is the bf16 number c * 2^-133); the scale, which belongs to an output and a
// group of inputs, multiplies dy, once for all inputs of the group:
//   dx[m, k] = sum over n of (dy[m, n] scale[n]) code[k, n] - sum over n of (dy[m, n] scale[n]) zero[n].
// The second sum is the same for all inputs of a group: where zeros or offsets are bf16 numbers, a product with an A
// operand whose rows are all the same. dy * scale enters the tensor core as one bf16 number for bf16 dy, which rounds
// like a dense bf16 weight (where scales are bf16 too, a pair by one instruction), as two for fp16 and as three,
// exactly, for float32.
//
// fp16 has no exponents to spare for dy * scale. Where its scales are fp16 too, codes become the weights of a dense
// product, in registers: two instructions more for two codes, but one product with dy as it is, instead of two.
//
// Codes that index a table become its numbers, rounded to the type of dy: pairs of them by one load for two codes
// (pair_table.cuh). fp16 ones are multiplied by scales, as above, and bf16 ones meet dy * scale.
//
// Partial sums are added in a fixed order, and a token's result does not depend on the other tokens. Each CTA of a
// cluster finishes some tokens, and the others send it their sums. Results that are not finite are computed again as a
// dense product would (exact_sum.cuh).
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/division.h"
#include "cuda/element.cuh"
#include "cuda/exact_sum.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_transposed.h"
#include "cuda/pair_table.cuh"
#include "cuda/ptx.cuh"
#include "cuda/ptx_sm90.cuh"
#include "cuda/ragged_plan.cuh"
#include "dequant/convert.h"
#include "layout.h"

namespace wonly::transposed_stream {

constexpr int kBlockK = 32;  // inputs of the smallest group
constexpr int kBlocks = kStripK / kBlockK;
constexpr int kMaxDepth = 5;
constexpr int kTileRowBytes = 32 * 4;        // of a ragged product
constexpr int kPartialStride = kStripK + 4;  // floats; + 4: no bank conflicts
// dy is multiplied by 2^96, so that its products with codes at 2^-133 stay float32's normal numbers from 2^-89 to 2^31.
constexpr float kUp = 0x1p+96f, kDown = 0x1p-96f, kUnscale = 0x1p+37f;
constexpr uint32_t kUpPair = 0x6f806f80u;  // kUp as two bf16 numbers

// How the second sum is made: on tensor cores, of zeros as codes, or of zeros or offsets as numbers; or in float32.
enum class Second : int { kCodes, kNumbers, kAdded };

// What a kernel knows of scales and shift: that both are of the type of dy, of 16 bits, or zeros are codes, and whether
// there is a shift; or nothing. Choices between the loads of a stage and its products take a fifth of the time. Of
// tables, whether scales are of the type of dy.
enum class Scheme : int { kSymmetric, kShifted, kAny, kTable, kTableAny };
constexpr bool is_known(Scheme scheme) { return scheme != Scheme::kAny && scheme != Scheme::kTableAny; }
constexpr bool has_shift(Scheme scheme) { return scheme == Scheme::kShifted || scheme == Scheme::kAny; }
constexpr bool is_table(Scheme scheme) { return scheme == Scheme::kTable || scheme == Scheme::kTableAny; }

struct Params {
  MatmulArgs args;
  Divisor cluster;      // CTAs
  Divisor token_tiles;  // of 8 * kTokenTiles tokens
  Divisor strips;
  int stages_each, stages_more;  // of a run; so many runs have one more
  int depth;                     // slots of a warp's ring
  int log2_group_blocks;         // group size = 32 << this; -1: one scale per output
  bool copies;  // whether rows of dy are aligned for copies of 16 bytes, those of scales and shift for 8
  Second second;
  int slot_bytes;    // weights, dy, kGroups rows of scales and of shift
  int warp_bytes;    // a warp's ring, and later its partial sums
  int received_at;   // in shared memory: a barrier, then what the other CTAs of the cluster have summed
  int owned_tokens;  // that a CTA of the cluster finishes at most
};

// Which tokens a CTA has, as in matmul_stream.cuh.
struct Consecutive {
  static constexpr bool kRagged = false;
};
struct Ragged {
  static constexpr bool kRagged = true;
  ragged::Work work;
  int plan_at;  // in shared memory: the rows of the tile, then the plan
};

__host__ __device__ constexpr int weight_bytes(int bits) { return kStripK / tile_k(bits) * kTileBytes; }
// A token's outputs of one stage, padded so that the lanes of a warp read different banks.
__host__ __device__ constexpr int token_bytes(int dy_size) {
  return dy_size == 4 ? kStageN * 4 + 32 : kStageN * 2 + 16;
}

// bf16 numbers whose sum stands for one dy * scale.
template <typename X>
constexpr int kPieces = std::is_same_v<X, float>    ? 3
                        : std::is_same_v<X, __half> ? 2
                                                    : 1;

// Splits both values into pairs of pieces.
template <int kCount>
__device__ __forceinline__ void split(float2 rest, uint32_t (&pieces)[kCount]) {
  if constexpr (kCount == 1) {
    pieces[0] = from_float2<__nv_bfloat16>(rest.x, rest.y);
  } else {
#pragma unroll
    for (int piece = 0; piece < kCount; ++piece) {
      pieces[piece] = __byte_perm(__float_as_uint(rest.x), __float_as_uint(rest.y), 0x7632);  // the high halves
      rest.x = beyond_bf16(rest.x);
      rest.y = beyond_bf16(rest.y);
    }
  }
}

template <int kCount>
__device__ __forceinline__ void pairs_to_float(float2 (&to)[kCount], const uint32_t (&raw)[kCount], DType type) {
  if (type == DType::kBF16) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = {__uint_as_float(raw[i] << 16), __uint_as_float(raw[i] & 0xffff0000u)};
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = __half22float2(*reinterpret_cast<const __half2*>(&raw[i]));
  }
}

// Pairs of neighbouring numbers of a row in shared memory, from the even index `first` on, 8 apart. One choice of type
// for all of them.
template <int kCount>
__device__ __forceinline__ void read_pairs(float2 (&to)[kCount], const uint8_t* row, int first, DType type) {
  uint32_t raw[kCount];
  if (type == DType::kF32) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = *reinterpret_cast<const float2*>(row + (first + i * 8) * 4);
  } else if (type == DType::kU8) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) raw[i] = *reinterpret_cast<const uint16_t*>(row + first + i * 8);
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = {static_cast<float>(raw[i] & 0xffu), static_cast<float>(raw[i] >> 8)};
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) raw[i] = *reinterpret_cast<const uint32_t*>(row + (first + i * 8) * 2);
    pairs_to_float(to, raw, type);
  }
}

// Numbers k .. k + 3 of a row of `length`, k a multiple of 4; those beyond its end are dropped.
__device__ __forceinline__ void store4(void* array, int64_t row, int64_t k, int64_t length, const float (&values)[4],
                                       DType type) {
  if (length % 4 != 0) {
    for (int i = 0; i < 4; ++i) {
      if (k + i < length) store_element(array, row + k + i, values[i], type);
    }
  } else if (type == DType::kF32) {
    *reinterpret_cast<float4*>(static_cast<float*>(array) + row + k) = {values[0], values[1], values[2], values[3]};
  } else {
    const uint2 raw =
        type == DType::kF16
            ? uint2{from_float2<__half>(values[0], values[1]), from_float2<__half>(values[2], values[3])}
            : uint2{from_float2<__nv_bfloat16>(values[0], values[1]), from_float2<__nv_bfloat16>(values[2], values[3])};
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(array) + row + k) = raw;
  }
}

// Eight bytes of a row, of which `left` are there; zeros for the others.
inline __device__ __noinline__ void copy_some(uint8_t* to, const uint8_t* from, int left) {
#pragma unroll 1
  for (int i = 0; i < 8; ++i) to[i] = i < left ? from[i] : 0;
}

template <typename X>
constexpr DType kTypeOf = std::is_same_v<X, float>    ? DType::kF32
                          : std::is_same_v<X, __half> ? DType::kF16
                                                      : DType::kBF16;

// Pairs of fp16 numbers.
constexpr uint32_t kOne = 0x3c003c00u, kMinusOne = 0xbc00bc00u, kSixteenth = 0x2c002c00u;
constexpr uint32_t k960 = 0x63806380u, k1024 = 0x64006400u, kMinus1024 = 0xe400e400u;
constexpr uint32_t kNothing = 0x80008000u;  // -0, which adds nothing

// How shifts in memory become operands: the choices between zeros as codes, zeros as numbers and offsets, as values
// that are the same for all outputs, not as branches.
struct Shifts {
  uint32_t bytes;  // of a pair of codes and of one of numbers, both of which are read
  uint32_t base, times, plus, of_rest, scaled, as_it_is;  // of fp16 factors

  __device__ Shifts(bool codes, bool offsets) {
    bytes = ptx::kept(codes ? 0x2120 : 0x7654);
    base = codes ? k1024 : 0u;
    times = offsets ? 0u : kMinusOne;
    plus = codes ? kNothing : kMinus1024;
    of_rest = offsets ? kOne : kMinusOne;
    scaled = codes || offsets ? 0u : kOne;
    as_it_is = offsets ? kOne : 0u;
  }
};

// What makes fp16 weights of the codes of two outputs, rounded as those of a dense product:
// (code - whole part of the zero) * scale + rest.
template <int kBits>
struct Factors {
  uint32_t scale;
  uint32_t minus = kBits == 4 ? 0xe408e408u : 0xe480e480u;  // -(1024 + zero)
  uint32_t minus_of_odd = 0xd480d480u;                      // -(64 + zero)
  uint32_t rest = kNothing;

  __device__ void set_shift(uint32_t shift, const Shifts& how) {
    shift |= how.base;
    minus = fma_f16x2(shift, how.times, how.plus);
    minus_of_odd = fma_f16x2(minus, kOne, k960);
    const uint32_t whole = fma_f16x2(minus, kMinusOne, kMinus1024);
    rest = fma_f16x2(fma_f16x2(shift, how.of_rest, whole), fma_f16x2(scale, how.scaled, how.as_it_is), kNothing);
  }
  // Of pair i of a word, whose code is the lowest or, in odd pairs of four-bit words, the next nibble of 1024.
  __device__ uint32_t weight(uint32_t code, int i) const {
    const bool odd = kBits == 4 && i % 2 == 1;
    return fma_f16x2(fma_f16x2(code, odd ? kSixteenth : kOne, odd ? minus_of_odd : minus), scale, rest);
  }
};

// kGroups: rows of scales that the strip has, 1, or 2 where groups are of 32 inputs.
template <typename X, int kBits, int kTokenTiles, int kGroups, Scheme kScheme, typename Tokens>
__global__ void __launch_bounds__(kMostWarps * 32, most_ctas(kTokenTiles, sizeof(X)))
    transposed_stream_matmul(const __grid_constant__ Params params, const __grid_constant__ Tokens source) {
  constexpr int kTiles = kStripK / tile_k(kBits);  // packed tiles of the strip
  constexpr int kWeightBytes = weight_bytes(kBits);
  constexpr int kTokens = 8 * kTokenTiles;
  constexpr int kTokenBytes = token_bytes(sizeof(X));
  constexpr int kChunk = 16 / sizeof(X);          // outputs of one 16-byte copy
  constexpr int kTokenChunks = kStageN / kChunk;  // copies of one token
  constexpr int kCopyTokens = 32 / kTokenChunks;  // tokens that the 32 lanes copy at once
  constexpr int kCopies = kTokens / kCopyTokens;
  constexpr int kSteps = kBlockK / 16;
  constexpr int kParts = 4, kHalfN = 8 * kParts;  // half a stage, for which operands are prepared: runs of 8 outputs
  constexpr bool kKnown = is_known(kScheme), kTable = is_table(kScheme);
  constexpr bool kWeights = kKnown && std::is_same_v<X, __half>;  // products are of weights and dy
  static_assert(!kKnown || sizeof(X) == 2);
  static_assert(!kTable || (kBits == 4 && sizeof(X) == 2 && (kKnown || std::is_same_v<X, __nv_bfloat16>)));
  constexpr int kRingsAt = kTable ? pair_table_bytes(1) : 0;  // in shared memory
  // Copies of rows of scales and of shift; where scales have 16 bits one is of two rows.
  constexpr int kRowCopies = kScheme == Scheme::kAny                  ? 2 * kGroups
                             : kScheme == Scheme::kShifted || !kKnown ? kGroups
                                                                      : 1;

  extern __shared__ __align__(128) uint8_t shared[];
  const MatmulArgs& args = params.args;
  const int warps = blockDim.x / 32;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  int rank, token_tile, strip;
  const int place = params.cluster.divide(blockIdx.x, &rank);
  int64_t batch = 0;
  if constexpr (Tokens::kRagged) {
    token_tile = params.strips.divide(place, &strip);
  } else {  // token tiles of the same weights run together
    batch = params.strips.divide(params.token_tiles.divide(place, &token_tile), &strip);
  }
  const int64_t m0 = static_cast<int64_t>(token_tile) * kTokens;
  const int64_t k0 = static_cast<int64_t>(strip) * kStripK;
  int tokens = static_cast<int>(min(static_cast<int64_t>(kTokens), args.m - m0));
  const int* rows = nullptr;  // of the result
  if constexpr (Tokens::kRagged) {
    int* const of_tile = reinterpret_cast<int*>(shared + source.plan_at);
    const ragged::Plan plan = ragged::get_plan(source.work, shared + source.plan_at + kTileRowBytes);
    if (token_tile >= plan.tile_count) return;  // all CTAs of a cluster
    const ragged::Span span = ragged::find_span(plan, token_tile);
    const int first = (token_tile - span.first_tile) * kTokens;
    batch = span.expert;
    tokens = min(kTokens, span.rows - first);
    rows = of_tile;
    if (threadIdx.x < tokens) of_tile[threadIdx.x] = plan.row(span.first + first + threadIdx.x);
    __syncthreads();
    if (span.expert < 0) {
      if (rank != 0) return;
#pragma unroll 1
      for (int i = threadIdx.x; i < tokens * kStripK; i += blockDim.x) {
        const int64_t k = k0 + i % kStripK;
        if (k < args.k) store_zero(args.y, rows[i / kStripK] * args.k + k, args.y_dtype);
      }
      return;
    }
  }
  const auto row_of = [&](int token) {
    if constexpr (Tokens::kRagged) return static_cast<int64_t>(rows[token]);
    return m0 + token;
  };
  const auto dy_row_of = [&](int token) {
    if constexpr (Tokens::kRagged) return static_cast<int64_t>(ragged::x_row(source.work, rows[token]));
    return m0 + token;
  };

  float entry = 0.f;  // of a table, on its way before the weights are
  if constexpr (kTable) entry = load_entry(args, batch, lane);

  const int scale_size = kKnown ? 2 : element_size(args.scale_dtype);
  const int shift_size =
      !has_shift(kScheme) || args.shift_mode == ShiftMode::kNone ? 0 : element_size(args.shift_dtype);
  constexpr int dy_at = kWeightBytes, scales_at = dy_at + kTokens * kTokenBytes;  // in a slot
  const int shift_at = scales_at + kGroups * kStageN * scale_size;

  // This warp's run of stages; neighbouring runs are of different CTAs, so that those have as much to do.
  const int run = warp * static_cast<int>(params.cluster.divisor) + rank;
  const int first_stage = run * params.stages_each + min(run, params.stages_more);
  const int stage_count = ptx::kept(params.stages_each + (run < params.stages_more));
  const int64_t first_n = static_cast<int64_t>(first_stage) * kStageN;
  uint8_t* const ring = static_cast<uint8_t*>(__cvta_shared_to_generic(
      ptx::kept(static_cast<int>(ptx::shared_address(shared + kRingsAt + warp * params.warp_bytes)))));
  const int lane_bytes = ptx::kept(lane * 16);
  const int slot_bytes = ptx::kept(params.slot_bytes), ring_bytes = ptx::kept(params.depth * params.slot_bytes);

  // What this lane copies next: its words of the stage, its 16 bytes of some tokens, its 8 bytes of rows of scales.
  const int k_tiles = static_cast<int>(ceil_div(args.k, tile_k(kBits)));
  const int tiles = min(kTiles, k_tiles - strip * kTiles);
  static_assert(kTileN == kStageN);
  const uint32_t* next_words = args.qw + batch * args.qw_batch_stride +
                               (static_cast<int64_t>(first_stage) * k_tiles + strip * kTiles) * kTileWords + lane * 4;
  const auto fetch_words = [&](uint8_t* slot) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int atom = 0; atom < kAtomsPerTile; ++atom) {
        if (kTiles == 1 || tile < tiles) {  // what lies in the slot otherwise meets inputs that nobody stores
          ptx::cp_async_16(slot + lane_bytes + (tile * kAtomsPerTile + atom) * kAtomWords * 4,
                           next_words + tile * kTileWords + atom * kAtomWords);
        }
      }
    }
    next_words += k_tiles * kTileWords;
  };
  // The first before there is an address of anything else, where that is not for many tokens.
  constexpr bool kWordsFirst = kTokenTiles == 1;
  if (kWordsFirst && stage_count > 0) fetch_words(ring);
  const int copy_token = lane / kTokenChunks;
  const int copy_n = lane % kTokenChunks * kChunk;
  const X* const dy = static_cast<const X*>(args.x) + batch * args.x_batch_stride + copy_n;
  constexpr int kRowPointers = Tokens::kRagged ? kCopies : 1;  // of rows that do not follow each other
  const X* next_dy[kRowPointers];
#pragma unroll
  for (int copy = 0; copy < kRowPointers; ++copy) {
    // Of rows of a slot beyond the last token nobody stores the products.
    next_dy[copy] = dy + dy_row_of(min(copy * kCopyTokens + copy_token, tokens - 1)) * args.n + first_n;
  }
  const int64_t to_next_dy = Tokens::kRagged ? 0 : ptx::kept(kCopyTokens * args.n);
  const int copy_to_dy = ptx::kept(dy_at + copy_token * kTokenBytes + copy_n * static_cast<int>(sizeof(X)));
  const int dy_copies = ptx::kept((tokens - copy_token + kCopyTokens - 1) / kCopyTokens);
  // The strip's rows of scales; where it ends beyond the last group, that one again.
  const auto group_of = [&](int row) {
    const int block = strip * kBlocks + row;
    return params.log2_group_blocks < 0 ? 0 : min(block >> params.log2_group_blocks, static_cast<int>(args.groups) - 1);
  };
  // By selections, where lanes copy of both.
  const auto row_at = [&](bool of_shift, int row, int64_t n) {
    const int64_t stride = of_shift ? args.shift_batch_stride : args.scales_batch_stride;
    return static_cast<const uint8_t*>(of_shift ? args.shift : args.scales) +
           (batch * stride + group_of(row) * args.n + n) * (of_shift ? shift_size : scale_size);
  };
  const int row_lane = kKnown ? lane % 16 : lane;
  const uint8_t* next_row[kRowCopies];
  int row_step[kRowCopies], copy_to_row[kRowCopies], copies_row[kRowCopies];
#pragma unroll
  for (int copy = 0; copy < kRowCopies; ++copy) {
    const int part = kKnown ? lane / 16 : 0;  // of the lanes
    const int at = row_lane * 8;
    const bool of_shift = has_shift(kScheme) && (kRowCopies > 1 ? copy >= kRowCopies / 2 : part == 1);
    const int row = kGroups == 1 ? 0 : kKnown ? part : copy % 2;
    const int size = of_shift ? shift_size : scale_size;
    next_row[copy] = row_at(of_shift, row, first_n) + at;
    row_step[copy] = kRowCopies > 1 ? kStageN * size : ptx::kept(kStageN * size);
    copy_to_row[copy] = ptx::kept((of_shift ? shift_at : scales_at) + row * kStageN * size + at);
    const bool copies = at < kStageN * size && (kGroups > 1 || !kKnown || of_shift || part == 0);
    copies_row[copy] = kKnown && kGroups > 1 && !of_shift ? 1 : ptx::kept(copies);
  }
  int to_fetch = stage_count;
  // How many stages from the last on are not copied: rows are not aligned, or end before the stage does.
  const int elementwise = ptx::kept(!params.copies                                      ? stage_count
                                    : first_n + int64_t{stage_count} * kStageN > args.n ? 1
                                                                                        : 0);

  const auto dy_of_copy = [&](int copy) {
    return Tokens::kRagged ? next_dy[copy % kRowPointers] : next_dy[0] + copy * to_next_dy;
  };
  const auto fetch_elements = [&](uint8_t* slot) {
    const int outputs =
        static_cast<int>(min(int64_t{kStageN}, args.n - first_n - int64_t{stage_count - to_fetch} * kStageN));
#pragma unroll kRowPointers
    for (int copy = 0; copy < kCopies; ++copy) {
      if (copy < dy_copies) {
        *reinterpret_cast<uint4*>(slot + copy_to_dy + copy * kCopyTokens * kTokenBytes) =
            load_some(dy_of_copy(copy), outputs - copy_n);
      }
    }
#pragma unroll
    for (int copy = 0; copy < kRowCopies; ++copy) {
      if (copies_row[copy] != 0) {
        copy_some(slot + copy_to_row[copy], next_row[copy], outputs * (row_step[copy] / kStageN) - row_lane * 8);
      }
    }
  };
  const auto fetch = [&](uint8_t* slot, bool with_words) {
    if (to_fetch > 0) {
      if (with_words) fetch_words(slot);
      if (to_fetch > elementwise) {
#pragma unroll
        for (int copy = 0; copy < kCopies; ++copy) {
          if (copy < dy_copies) {
            ptx::cp_async_16(slot + copy_to_dy + copy * kCopyTokens * kTokenBytes, dy_of_copy(copy));
          }
        }
#pragma unroll
        for (int copy = 0; copy < kRowCopies; ++copy) {
          if (copies_row[copy] != 0) ptx::cp_async_8(slot + copy_to_row[copy], next_row[copy]);
        }
      } else {
        fetch_elements(slot);
      }
#pragma unroll
      for (int copy = 0; copy < kRowPointers; ++copy) next_dy[copy] += kStageN;
#pragma unroll
      for (int copy = 0; copy < kRowCopies; ++copy) next_row[copy] += row_step[copy];
      --to_fetch;
    }
    ptx::cp_async_commit();
  };

#pragma unroll 1
  for (int i = 0; i < params.depth - 1; ++i) fetch(ring + i * slot_bytes, !kWordsFirst || i > 0);

  [[maybe_unused]] const uint32_t lane_pairs = ptx::shared_address(shared) + lane * 4;
  if constexpr (kTable) {
    fill_pairs<X>(entry, shared);
    __syncthreads();
  }

#if __CUDA_ARCH__ >= 900
  // A token's sums are finished by the CTA of rank token % cluster; the others send it theirs.
  uint64_t* const received_barrier = reinterpret_cast<uint64_t*>(shared + params.received_at);
  float4* const received = reinterpret_cast<float4*>(shared + params.received_at + 16);
  const int cluster = static_cast<int>(params.cluster.divisor);
  if (cluster > 1) {
    if (threadIdx.x == 0) {
      ptx::barrier_init(received_barrier, 1);
      ptx::barrier_init_fence();
    }
    ptx::cluster_arrive();
  }
#endif

  float acc[kBlocks * kSteps][kTokenTiles][4] = {};  // inputs g and g + 8 of a step, tokens 2t and 2t + 1
  float shifted[kGroups][kTokenTiles] = {};          // token g, this lane's outputs: the second sum
  float multiplied[kGroups][kTokenTiles][4] = {};    // the same of tokens 2t and 2t + 1 and all outputs of the warp
  const bool offsets = ptx::kept(args.shift_mode == ShiftMode::kOffsets) != 0;
  const Second second = has_shift(kScheme) ? params.second : Second::kCodes;
  uint32_t bias[4];  // an operand
#pragma unroll
  for (uint32_t& pair : bias) pair = ptx::kept(bias_of(kBits) * 0x10001);
  const Shifts how(second == Second::kCodes, offsets);
  // The pairs of a word of codes as an operand: as they are, or as weights.
  const auto to_operand = [&](uint32_t word, const auto& factors, auto& to) {
    if constexpr (kTable) {
#pragma unroll
      for (int i = 0; i < 16 / kBits; ++i) to[i] = look_up_pair(lane_pairs, word, i);
      if constexpr (kWeights) {
#pragma unroll
        for (uint32_t& pair : to) pair = fma_f16x2(pair, factors.scale, kNothing);
      }
    } else if constexpr (kWeights) {
      if constexpr (kBits == 4) {
        uint4_above_1024(word, to);
      } else {
        uint8_above_1024(word, to);
      }
#pragma unroll
      for (int i = 0; i < 16 / kBits; ++i) to[i] = factors.weight(to[i], i);
    } else if constexpr (kBits == 4) {
      uint4_to_subnormal(word, to);
    } else {
      uint8_to_subnormal(word, to);
    }
  };
  // Of token g of a tile, outputs 2t and 2t + 1 of the parts of half a stage.
  const auto read_dy = [&](float2(&y)[kParts], const uint8_t* slot, const uint32_t (&from)[kParts], int tile,
                           int first) {
    if constexpr (sizeof(X) == 2) {
      pairs_to_float(y, from, kTypeOf<X>);
    } else {
      read_pairs(y, slot + dy_at + (tile * 8 + g) * kTokenBytes, first + 2 * t, kTypeOf<X>);
    }
  };
  const int matrix_row = ptx::kept(lane / 8 * 16), dy_row = ptx::kept(lane % 8 * kTokenBytes + lane / 8 * 16);
  // Where there are codes the scales are read beside them.
  const int numbers_at = ptx::kept((second == Second::kCodes ? scales_at : shift_at) + matrix_row);
  const int codes_at = ptx::kept(shift_at + 2 * t);
  int slot_at = 0, free_at = ring_bytes - slot_bytes;
#pragma unroll 1
  for (int stage = 0; stage < stage_count; ++stage) {
    if (params.depth > 3) {
      params.depth == 4 ? ptx::cp_async_wait<2>() : ptx::cp_async_wait<3>();
    } else {
      params.depth == 2 ? ptx::cp_async_wait<0>() : ptx::cp_async_wait<1>();
    }
    __syncwarp();
    fetch(ring + free_at, true);
    const uint8_t* const slot = ring + slot_at;
    free_at = slot_at;
    slot_at = slot_at + slot_bytes == ring_bytes ? 0 : slot_at + slot_bytes;
#pragma unroll
    for (int half = 0; half < kStageN / kHalfN; ++half) {
      uint32_t dy_pairs[kTokenTiles][kParts];  // token g, outputs 2t and 2t + 1 of a part
      if constexpr (sizeof(X) == 2) {
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) {
          ptx::load_matrices(dy_pairs[tile],
                             ptx::shared_address(slot + dy_row + dy_at + tile * 8 * kTokenBytes + half * kHalfN * 2));
        }
      }
#pragma unroll
      for (int row = 0; row < kGroups; ++row) {
        uint32_t b[kTokenTiles][kParts][kPieces<X>];
        const int n_of_half = half * kHalfN;
        const uint8_t* const scale_row = slot + scales_at + row * kStageN * scale_size;
        const uint8_t* const shift_row = slot + shift_at + row * kStageN * shift_size;
        // Of zeros that are the same for all inputs, and of those that are for all outputs too.
        const auto add_product = [&](const uint32_t (&a)[4], int part, bool of_dy) {
#pragma unroll
          for (int tile = 0; tile < kTokenTiles; ++tile) {
            if constexpr (kPieces<X> == 1) {
              ptx::mma_bf16(multiplied[row][tile], a, of_dy ? dy_pairs[tile][part] : b[tile][part][0],
                            of_dy ? dy_pairs[tile][part + 1] : b[tile][part + 1][0]);
            } else {
#pragma unroll
              for (int piece = 0; piece < kPieces<X>; ++piece) {
                ptx::mma_bf16(multiplied[row][tile], a, b[tile][part][piece], b[tile][part + 1][piece]);
              }
            }
          }
        };
        const auto add_second = [&](const uint32_t (&z)[kParts], bool of_dy) {
#pragma unroll
          for (int part = 0; part < kParts; part += 2) {
            add_product({z[part], z[part], z[part + 1], z[part + 1]}, part, of_dy);
          }
        };
        const auto add_bias = [&] {
#pragma unroll
          for (int part = 0; part < kParts; part += 2) add_product(bias, part, false);
        };
        Factors<kBits> factors[kParts];
        if constexpr (kKnown) {
          uint32_t scale[kParts], shift[kParts];
          ptx::load_matrices(scale, ptx::shared_address(scale_row + n_of_half * 2 + matrix_row));
          if constexpr (kScheme == Scheme::kShifted) {
            ptx::load_matrices(shift, ptx::shared_address(slot + numbers_at + row * kStageN * 2 + n_of_half * 2));
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
              const uint32_t codes =
                  *reinterpret_cast<const uint16_t*>(slot + codes_at + row * kStageN + n_of_half + part * 8);
              shift[part] = byte_permute(codes, shift[part], how.bytes);
            }
          }
          if constexpr (kWeights) {
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
              factors[part].scale = scale[part];
              if constexpr (kScheme == Scheme::kShifted) factors[part].set_shift(shift[part], how);
            }
          } else {
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
              if constexpr (!kTable) scale[part] = ptx::mul_bf16x2(scale[part], kUpPair);
#pragma unroll
              for (int tile = 0; tile < kTokenTiles; ++tile) {
                b[tile][part][0] = ptx::mul_bf16x2(dy_pairs[tile][part], scale[part]);
              }
            }
            if constexpr (kScheme == Scheme::kShifted) {
              add_second(shift, offsets);
            } else if constexpr (!kTable) {
              add_bias();
            }
          }
        } else {
          float2 scale[kParts];
          read_pairs(scale, scale_row, n_of_half + 2 * t, args.scale_dtype);
          if constexpr (!kTable) {
#pragma unroll
            for (int part = 0; part < kParts; ++part) scale[part] = {scale[part].x * kUp, scale[part].y * kUp};
          }
#pragma unroll
          for (int tile = 0; tile < kTokenTiles; ++tile) {
            float2 y[kParts];
            read_dy(y, slot, dy_pairs[tile], tile, n_of_half);
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
              split({y[part].x * scale[part].x, y[part].y * scale[part].y}, b[tile][part]);
            }
          }
          if constexpr (kTable) {  // nothing to add
          } else if (shift_size == 0) {
            add_bias();
          } else if (second == Second::kAdded) {
            float2 z[kParts];
            read_pairs(z, shift_row, n_of_half + 2 * t, args.shift_dtype);
#pragma unroll
            for (int tile = 0; tile < kTokenTiles; ++tile) {
              float& sum = shifted[row][tile];
              if (offsets) {
                float2 y[kParts];
                read_dy(y, slot, dy_pairs[tile], tile, n_of_half);
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
                  sum = fmaf(y[part].x, z[part].x, sum);
                  sum = fmaf(y[part].y, z[part].y, sum);
                }
              } else {
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
#pragma unroll
                  for (int piece = 0; piece < kPieces<X>; ++piece) {
                    sum = fmaf(__uint_as_float(b[tile][part][piece] << 16), z[part].x, sum);
                    sum = fmaf(__uint_as_float(b[tile][part][piece] & 0xffff0000u), z[part].y, sum);
                  }
                }
              }
            }
          } else {
            uint32_t z[kParts];
            if (second == Second::kNumbers) {
              ptx::load_matrices(z, ptx::shared_address(shift_row + n_of_half * 2 + matrix_row));
            } else {
#pragma unroll
              for (int part = 0; part < kParts; ++part) {
                z[part] = *reinterpret_cast<const uint16_t*>(shift_row + n_of_half + part * 8 + 2 * t);
                z[part] = byte_permute(z[part], 0u, 0x4140u);
              }
            }
            add_second(z, offsets);
          }
        }
#pragma unroll
        for (int atom = 0; atom < kHalfN / kAtomN; ++atom) {
#pragma unroll
          for (int block = row * (kBlocks / kGroups); block < (row + 1) * (kBlocks / kGroups); ++block) {
            // The words of outputs g and g + 8 of a block of 32 inputs: half a tile, or a whole one.
            const int tile = kBits == 8 ? block : 0;
            const uint4 words = *reinterpret_cast<const uint4*>(
                slot + lane_bytes + (tile * kAtomsPerTile + half * (kHalfN / kAtomN) + atom) * kAtomWords * 4);
            uint32_t low[4], high[4];  // pairs of outputs 2t, 2t + 1 and 2t + 8, 2t + 9; inputs g + 8i of the block
            if constexpr (kBits == 4) {
              to_operand(ptx::transpose(block % 2 == 0 ? words.x : words.z), factors[2 * atom], low);
              to_operand(ptx::transpose(block % 2 == 0 ? words.y : words.w), factors[2 * atom + 1], high);
            } else {
              uint32_t two[2];
              to_operand(ptx::transpose(words.x), factors[2 * atom], two);
              low[0] = two[0], low[1] = two[1];
              to_operand(ptx::transpose(words.z), factors[2 * atom], two);
              low[2] = two[0], low[3] = two[1];
              to_operand(ptx::transpose(words.y), factors[2 * atom + 1], two);
              high[0] = two[0], high[1] = two[1];
              to_operand(ptx::transpose(words.w), factors[2 * atom + 1], two);
              high[2] = two[0], high[3] = two[1];
            }
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
              const uint32_t a[4] = {low[2 * step], low[2 * step + 1], high[2 * step], high[2 * step + 1]};
#pragma unroll
              for (int tile = 0; tile < kTokenTiles; ++tile) {
                if constexpr (kWeights) {
                  ptx::mma_f16(acc[block * kSteps + step][tile], a, dy_pairs[tile][2 * atom],
                               dy_pairs[tile][2 * atom + 1]);
                } else {
#pragma unroll
                  for (int piece = 0; piece < kPieces<X>; ++piece) {
                    ptx::mma_bf16(acc[block * kSteps + step][tile], a, b[tile][2 * atom][piece],
                                  b[tile][2 * atom + 1][piece]);
                  }
                }
              }
            }
          }
        }
      }
    }
  }

  // Partial sums: warps of the CTA in order, then CTAs of the cluster in order.
  ptx::cp_async_wait<0>();
  __syncwarp();
  float* partial = reinterpret_cast<float*>(ring);
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
    for (int row = 0; row < kGroups; ++row) {
      float second_sum[2] = {};
      const float factor = second == Second::kCodes ? kUnscale : offsets ? -1.f : kDown;
      if (kWeights || kTable) {  // nothing left to subtract
      } else if (kKnown || second != Second::kAdded) {
#pragma unroll
        for (int i = 0; i < 2; ++i) second_sum[i] = multiplied[row][tile][i] * factor;
      } else {
        float sum = shifted[row][tile];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
#pragma unroll
        for (int i = 0; i < 2; ++i) second_sum[i] = __shfl_sync(0xffffffffu, sum, 8 * t + 4 * i) * factor;
      }
#pragma unroll
      for (int step = 0; step < kBlocks * kSteps / kGroups; ++step) {
        const int at = row * (kBlocks * kSteps / kGroups) + step;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // Inputs g + 8 are the odd nibbles of four-bit words, whose masks leave them 16 times as large.
          const float unscale = kWeights || kTable ? 1.f : kBits == 4 && i / 2 == 1 ? kUnscale / 16 : kUnscale;
          partial[(tile * 8 + 2 * t + i % 2) * kPartialStride + at * 16 + i / 2 * 8 + g] =
              fmaf(acc[at][tile][i], unscale, -second_sum[i % 2]);
        }
      }
    }
  }
  __syncthreads();
  constexpr int kQuads = kStripK / 4;
  const auto add = [](float4& sum, const float4& more) {
    sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
  };
  const auto sum_of_warps = [&](int token, int quad) {
    const uint8_t* const at = shared + kRingsAt + (token * kPartialStride + quad * 4) * 4;
    float4 sum = *reinterpret_cast<const float4*>(at);
#pragma unroll 4
    for (int w = 1; w < warps; ++w) add(sum, *reinterpret_cast<const float4*>(at + w * params.warp_bytes));
    return sum;
  };
#if __CUDA_ARCH__ >= 900
  if (cluster > 1) {
    if (threadIdx.x == 0) {
      int rest;
      const int own_tokens = params.cluster.divide(tokens - rank + cluster - 1, &rest);
      ptx::barrier_expect(received_barrier, (cluster - 1) * own_tokens * kStripK * 4);
    }
    ptx::cluster_wait();
#pragma unroll 1
    for (int i = threadIdx.x; i < tokens * kQuads; i += blockDim.x) {
      const int token = i / kQuads, quad = i % kQuads;
      int owner;
      const int of_owner = params.cluster.divide(token, &owner);
      if (owner == rank) continue;
      ptx::store_async_at_rank(received + (rank * params.owned_tokens + of_owner) * kQuads + quad,
                               sum_of_warps(token, quad), received_barrier, owner);
    }
  }
#endif
#pragma unroll 1
  for (int i = threadIdx.x; i < tokens * kQuads; i += blockDim.x) {
    const int token = i / kQuads, quad = i % kQuads;
    float4 sum;
#if __CUDA_ARCH__ >= 900
    if (cluster > 1) {
      int owner;
      const int of_owner = params.cluster.divide(token, &owner);
      if (owner != rank) continue;
      const float4 own = sum_of_warps(token, quad);
      sum = {};
      ptx::barrier_wait(received_barrier, 0);
      for (int from = 0; from < cluster; ++from) {
        add(sum, from == rank ? own : received[(from * params.owned_tokens + of_owner) * kQuads + quad]);
      }
    } else
#endif
    {
      sum = sum_of_warps(token, quad);
    }
    float values[4] = {sum.x, sum.y, sum.z, sum.w};
    const int64_t k = k0 + quad * 4;
    if (k >= args.k) continue;
    if (!(fabsf(sum.x) < INFINITY && fabsf(sum.y) < INFINITY && fabsf(sum.z) < INFINITY && fabsf(sum.w) < INFINITY)) {
#pragma unroll 1
      for (int of_quad = 0; of_quad < 4; ++of_quad) {  // each in turn the first: one copy of the code
        float next = values[0];
        if (!(fabsf(next) < INFINITY) && k + of_quad < args.k) {
          next = exact_sum_transposed<kTable>(args, batch, dy_row_of(token), k + of_quad);
        }
        values[0] = values[1], values[1] = values[2], values[2] = values[3], values[3] = next;
      }
    }
    store4(args.y, (batch * args.m + row_of(token)) * args.k, k, args.k, values, args.y_dtype);
  }
}

template <typename Tokens>
using Kernel = void (*)(Params, Tokens);

// One function for all instances, as the host's code is compiled too.
template <typename Tokens>
cudaError_t launch_instance(Kernel<Tokens> kernel, int bits, int token_tiles, int groups, int dy_size, Params params,
                            Tokens source, const Config& config, cudaStream_t stream) {
  const MatmulArgs& args = params.args;
  const bool table = args.shift_mode == ShiftMode::kTable;
  // Rows of 64 bytes would leave every other slot across lines of shared memory.
  const int slot =
      static_cast<int>(ceil_div(weight_bytes(bits) + 8 * token_tiles * token_bytes(dy_size) +
                                    groups * kStageN * (element_size(args.scale_dtype) + shift_bytes(args)),
                                128)) *
      128;
  const int partial = 8 * token_tiles * kPartialStride * 4;
  int plan_bytes = 0;
  if constexpr (Tokens::kRagged) plan_bytes = kTileRowBytes + ragged::plan_bytes(source.work.experts);
  params.owned_tokens = static_cast<int>(ceil_div(8 * token_tiles, config.cluster));
  const int received = config.cluster == 1 ? 0 : 16 + config.cluster * params.owned_tokens * kStripK * 4;
  const int rings_at = table ? pair_table_bytes(1) : 0;
  const int budget = config.shared_bytes - rings_at - plan_bytes - received;
  params.slot_bytes = slot;
  params.depth = std::min(budget / config.warps / slot, kMaxDepth);
  if (params.depth < 2 || partial * config.warps > budget) return cudaErrorInvalidConfiguration;
  params.warp_bytes = std::max(params.depth * slot, partial);
  params.received_at = rings_at + config.warps * params.warp_bytes;
  const int stages = static_cast<int>(ceil_div(args.n, kStageN)), runs = config.cluster * config.warps;
  params.stages_each = stages / runs;
  params.stages_more = stages % runs;
  const int64_t strips = ceil_div(args.k, kStripK), token_blocks = ceil_div(args.m, 8 * token_tiles);
  params.strips = Divisor(static_cast<int>(strips));
  int64_t tiles = args.batch * token_blocks;
  if constexpr (Tokens::kRagged) {
    if (source.work.tile_rows != 8 * token_tiles) return cudaErrorInvalidValue;
    source.plan_at = params.received_at + received;
    tiles = ragged::most_tiles(source.work);
  } else {
    params.token_tiles = Divisor(static_cast<int>(token_blocks));
  }
  const int64_t ctas = tiles * strips * config.cluster;
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(ctas));
  shape.threads = config.warps * 32;
  shape.cluster = config.cluster;
  shape.shared_bytes = params.received_at + received + plan_bytes;
  return launch_kernel(kernel, shape, stream, params, source);
}

template <typename X, int kBits, typename Tokens>
cudaError_t launch_tokens(const Params& params, const Tokens& source, const Config& config, cudaStream_t stream) {
  const MatmulArgs& args = params.args;
  const auto run = [&](Kernel<Tokens> kernel, int token_tiles, int groups) {
    return launch_instance(kernel, kBits, token_tiles, groups, sizeof(X), params, source, config, stream);
  };
  const bool groups_of_32 = params.log2_group_blocks == 0;
  const auto launch = [&](auto tiles) {
    constexpr int kTiles = tiles.value;
    if constexpr (sizeof(X) == 2) {
      const bool known = args.scale_dtype == args.x_dtype;
      if (args.shift_mode == ShiftMode::kTable) {
        if constexpr (kBits == 4 && kTiles <= kTableTiles) {
          if (known) {
            return groups_of_32 ? run(transposed_stream_matmul<X, 4, kTiles, 2, Scheme::kTable, Tokens>, kTiles, 2)
                                : run(transposed_stream_matmul<X, 4, kTiles, 1, Scheme::kTable, Tokens>, kTiles, 1);
          }
          if constexpr (std::is_same_v<X, __nv_bfloat16>) {
            return groups_of_32 ? run(transposed_stream_matmul<X, 4, kTiles, 2, Scheme::kTableAny, Tokens>, kTiles, 2)
                                : run(transposed_stream_matmul<X, 4, kTiles, 1, Scheme::kTableAny, Tokens>, kTiles, 1);
          }
        }
        return cudaErrorNotSupported;
      }
      if (known && args.shift_mode == ShiftMode::kNone && !(kTiles > 2 && groups_of_32)) {
        if constexpr (kTiles <= 2) {
          if (groups_of_32) {
            return run(transposed_stream_matmul<X, kBits, kTiles, 2, Scheme::kSymmetric, Tokens>, kTiles, 2);
          }
        }
        return run(transposed_stream_matmul<X, kBits, kTiles, 1, Scheme::kSymmetric, Tokens>, kTiles, 1);
      }
      if constexpr (kTiles <= 2) {
        const bool codes = args.shift_mode == ShiftMode::kZeros && args.shift_dtype == DType::kU8;
        if (known && (codes || args.shift_dtype == args.x_dtype)) {
          return groups_of_32 ? run(transposed_stream_matmul<X, kBits, kTiles, 2, Scheme::kShifted, Tokens>, kTiles, 2)
                              : run(transposed_stream_matmul<X, kBits, kTiles, 1, Scheme::kShifted, Tokens>, kTiles, 1);
        }
      }
    }
    if constexpr (sizeof(X) == 4 || !Tokens::kRagged) {
      if (!groups_of_32) return run(transposed_stream_matmul<X, kBits, kTiles, 1, Scheme::kAny, Tokens>, kTiles, 1);
    }
    return run(transposed_stream_matmul<X, kBits, kTiles, 2, Scheme::kAny, Tokens>, kTiles, 2);
  };
  switch (config.token_tiles) {
    case 1:
      return launch(std::integral_constant<int, 1>{});
    case 2:
      return launch(std::integral_constant<int, 2>{});
    case 4:
      return launch(std::integral_constant<int, 4>{});
    default:
      return cudaErrorInvalidValue;
  }
}

template <typename X, typename Tokens>
cudaError_t launch_typed(const MatmulArgs& args, const Tokens& source, const Config& config, cudaStream_t stream) {
  Params params{};
  params.args = args;
  params.cluster = Divisor(config.cluster);
  params.log2_group_blocks = log2_group_blocks(args);
  const int shift = shift_bytes(args);
  params.copies =
      args.n * element_size(args.scale_dtype) % 8 == 0 && args.n * shift % 8 == 0 && args.n * sizeof(X) % 16 == 0;
  const bool zeros = args.shift_mode == ShiftMode::kZeros, numbers = args.shift_dtype == DType::kBF16;
  params.second = shift == 0 || (zeros && args.shift_dtype == DType::kU8) ? Second::kCodes
                  : numbers && (zeros || kPieces<X> == 1)                 ? Second::kNumbers
                                                                          : Second::kAdded;
  if (config.warps < 1 || config.warps > kMostWarps) return cudaErrorInvalidValue;
  return args.bits == 4 ? launch_tokens<X, 4>(params, source, config, stream)
                        : launch_tokens<X, 8>(params, source, config, stream);
}

}  // namespace wonly::transposed_stream
