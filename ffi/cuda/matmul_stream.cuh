// Small-M product: weights streamed once from memory at full bandwidth, tokens on the narrow side of the tensor-core
// instruction.
//
// A warp owns 16 * kAtoms outputs and a run of the inputs. It copies its packed weights, with the scales and
// activations that belong to them, into a ring of its own in shared memory (cp.async), so no barrier of the CTA ever
// waits for memory, and feeds the codes to mma.sync as the A operand with nothing but a mask: a 16-bit pattern c < 256
// is the bf16 number c * 2^-133, a pattern < 2048 the fp16 number c * 2^-24, and tensor cores multiply them exactly
// (docs/performance.md). Scale and zero wait for the float32 accumulator, once per group: acc += scale * (part - zero *
// sum(x)), the sum by one more mma whose A is ones. Warps of a CTA, and CTAs of a cluster, split the inputs; partial
// sums are added in a fixed order, so results have the same bits on every run, and a token's result does not depend on
// the other tokens.
//
// Tokens with an activation of 2^64 or more, infinite or NaN leave the range where that is exact, which shows in their
// sum(x); they are recomputed term by term as a dense product would (exact_sum), so infinities and NaNs propagate as
// they do there.
//
// Codes that index a table of sixteen values are looked up in shared memory instead, two at a time: the 256 pairs of
// values as 16-bit numbers, a copy for each lane, so that the 32 look-ups of a warp read 32 different banks. What
// enters the tensor core then are values, with neither zeros nor powers of two to undo, and infinities and NaNs
// propagate by themselves. For float32 activations single values are looked up, and both are two tf32 numbers each, of
// whose four products three count: a term is exact to 2^-21. A sum that is not finite is recomputed term by term.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/exact_sum.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_stream.h"
#include "cuda/pair_table.cuh"
#include "cuda/ptx.cuh"
#include "cuda/ragged_plan.cuh"
#include "layout.h"

namespace wonly::stream {

constexpr int kStageK = kStageInputs;  // inputs that one ring slot holds
constexpr int kBlockK = 32;            // inputs of the smallest group
constexpr int kStageBlocks = kStageK / kBlockK;
constexpr int kMaxDepth = 8;
constexpr int kRotation = 3;
constexpr int64_t kMostTiles = 65535;  // of one launch of a ragged product

struct Params {
  MatmulArgs args;
  int cluster;
  int depth;                   // slots of a warp's ring
  int log2_group_blocks;       // group size = 32 << this; -1: one scale per output
  bool scales_in_pieces_of_4;  // rows of scales and shift are aligned for cp.async
  bool x_in_pieces_of_16;      // rows of x are
  int slot_bytes;              // weights, kFlushes rows of scales and of shift, x
  int warp_bytes;              // a warp's ring, and later its partial sums
};

// Which tokens a CTA has: consecutive ones of an entry of the batch, or a tile of a ragged product's plan, in the same
// shared memory as long as the kernel runs.
struct Consecutive {
  static constexpr bool kRagged = false;
  static constexpr bool kTable = false;  // whether codes index a table
};
struct ConsecutiveOfTable : Consecutive {
  static constexpr bool kTable = true;
};
struct Ragged {
  static constexpr bool kRagged = true;
  static constexpr bool kTable = false;
  ragged::Work work;
  int first_tile;  // of this launch
  int plan_at;     // in shared memory: what finding a tile takes
};
struct RaggedOfTable : Ragged {
  static constexpr bool kTable = true;
};

__host__ __device__ constexpr int weight_bytes(int atoms, int bits) {
  return atoms * kAtomWords * 4 * kStageK / tile_k(bits);
}
// A token's inputs of one stage, padded so that the lanes of a warp read 32 different banks.
__host__ __device__ constexpr int token_bytes(int x_size) { return x_size == 4 ? kStageK * 4 + 32 : kStageK * 2 + 16; }
__host__ __device__ constexpr int partial_stride(int atoms) {
  return atoms * kAtomN + 4;
}  // + 4 floats: no bank conflicts

// How x enters the tensor core.
template <typename X>
struct Operand;

template <>
struct Operand<__nv_bfloat16> {
  using Raw = uint32_t;
  static constexpr int kPieces = 1;
  static constexpr float kPower = 0x1p+64f;  // that x is multiplied by
  // Multiplying x by 2^64 keeps code * x above float32's subnormals.
  __device__ static void pieces(Raw raw, bool sixteenth, uint32_t (&b)[kPieces]) {
    b[0] = ptx::mul_bf16x2(raw, sixteenth ? 0x5d805d80u : 0x5f805f80u);  // 2^60, 2^64
  }
};

template <>
struct Operand<__half> {
  using Raw = uint32_t;
  static constexpr int kPieces = 1;
  static constexpr float kPower = 1.f;
  __device__ static void pieces(Raw raw, bool, uint32_t (&b)[kPieces]) { b[0] = raw; }
};

// Three bf16 numbers are exactly a float32, and the codes are exact, so the product keeps float32's accuracy at three
// instructions instead of one.
template <>
struct Operand<float> {
  using Raw = float2;
  static constexpr int kPieces = 3;
  static constexpr float kPower = 0x1p+64f;
  __device__ static void pieces(Raw raw, bool sixteenth, uint32_t (&b)[kPieces]) {
    float rest[2] = {raw.x * (sixteenth ? 0x1p+60f : 0x1p+64f), raw.y * (sixteenth ? 0x1p+60f : 0x1p+64f)};
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      b[piece] = __byte_perm(__float_as_uint(rest[0]), __float_as_uint(rest[1]), 0x7632);  // the high halves of both
      rest[0] = beyond_bf16(rest[0]);
      rest[1] = beyond_bf16(rest[1]);
    }
  }
};

// How codes enter it. A packed word holds codes of one output; pair i of inputs is what one half of a k16 step wants.
// int4 words hold two steps (pairs 0, 1 and 2, 3), int8 words one. `kOne` and `kOneOfOdd` are the code 1 in even and
// odd pairs, `kUnit` its value.
//
// bf16: codes stay where the mask finds them, at 2^-133. The odd pairs of int4 are then 16 times too large, which saves
// a shift: x is divided by 16 there instead, exactly.
template <typename X, int kBits>
struct Codes {
  static constexpr bool kOddTimes16 = kBits == 4;
  static constexpr uint32_t kOne = 0x00010001u, kOneOfOdd = kOddTimes16 ? 0x00100010u : kOne;
  static constexpr float kUnscale = 0x1p+69f;  // 2^133 / Operand<X>::kPower
  static_assert(Operand<X>::kPower == 0x1p+64f);

  __device__ static uint32_t pair(uint32_t word, int index) {
    if constexpr (kBits == 8) {
      return index == 0 ? word & 0x00ff00ffu : __byte_perm(word, 0, 0x4341);
    } else {
      return (index < 2 ? word : word >> 8) & (index % 2 == 0 ? 0x000f000fu : 0x00f000f0u);
    }
  }
};
// fp16: the tensor core aligns products by their exponents before it adds and cuts what is below, and a subnormal's
// exponent says nothing of its leading zeros. Ten of them cost digits that fp16 results show, so codes move up to the
// top of the linear range.
template <int kBits>
struct Codes<__half, kBits> {
  static constexpr int kUp = kBits == 4 ? 7 : 3;
  static constexpr bool kOddTimes16 = false;
  static constexpr uint32_t kOne = 0x00010001u << kUp, kOneOfOdd = kOne;
  static constexpr float kUnscale = kBits == 4 ? 0x1p+17f : 0x1p+21f;  // 2^24 / 2^kUp

  __device__ static uint32_t pair(uint32_t word, int index) {
    constexpr uint32_t kMask = (kBits == 4 ? 0x000f000fu : 0x00ff00ffu) << kUp;
    const int right = kBits * index - kUp;
    return (right > 0 ? word >> right : word << -right) & kMask;
  }
};

// The entries of a table of float32 numbers, a copy for each lane, with as many digits as two tf32 numbers have where
// the first is cut off.
constexpr int kTableBytes = kTableEntries * 32 * 4;
__device__ __forceinline__ void fill_table(float value, uint8_t* entries) {
  const uint32_t bits = __float_as_uint(value) + 2 & ~3u;
  for (int i = threadIdx.x / 32; i < kTableEntries; i += blockDim.x / 32) {
    reinterpret_cast<uint32_t*>(entries)[i * 32 + threadIdx.x % 32] = __shfl_sync(0xffffffffu, bits, i);
  }
}
// The entry of code `index` of a word; `entries`: the shared address of lane 0's copy of entry 0.
__device__ __forceinline__ uint32_t look_up(uint32_t entries, uint32_t word, int index) {
  const int right = 4 * index - 7;  // a copy of all lanes is 2^7 bytes
  return ptx::load_shared(entries + ((right > 0 ? word >> right : word << -right) & 0x780u | threadIdx.x % 32 * 4));
}
// The first of two tf32 numbers; the second is what it leaves.
__device__ __forceinline__ uint32_t first_tf32(uint32_t bits) { return bits & 0xffffe000u; }
__device__ __forceinline__ uint32_t second_tf32(uint32_t bits, uint32_t first) {
  return __float_as_uint(__uint_as_float(bits) - __uint_as_float(first));
}

// Adds the products of 32 inputs of float32 activations, at `of_tiles` for each tile of tokens and from this lane's
// first on, with the entries of a table that a block of words indexes, or its second half.
template <int kAtoms, int kTokenTiles>
__device__ __forceinline__ void multiply_entries(const uint4 (&words)[kAtoms], bool second_half,
                                                 const uint8_t* const (&of_tiles)[kTokenTiles], uint32_t entries,
                                                 float (&sums)[kAtoms][kTokenTiles][4]) {
#pragma unroll
  for (int pair = 0; pair < kBlockK / 8; ++pair) {
    uint32_t x[kTokenTiles][2][2];  // first numbers of two inputs, and second ones
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const float2 two = *reinterpret_cast<const float2*>(of_tiles[tile] + pair * 8 * 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float value = i == 0 ? two.x : two.y;
        const float first = ptx::to_tf32(value);
        x[tile][0][i] = __float_as_uint(first);
        x[tile][1][i] = __float_as_uint(ptx::to_tf32(value - first));
      }
    }
    uint32_t w[2][kAtoms][4];  // the same of rows g and g + 8 of the first input and of the second
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom) {
      const uint4 all = words[atom];
      const uint32_t low = second_half ? all.z : all.x, high = second_half ? all.w : all.y;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t entry = look_up(entries, i % 2 == 0 ? low : high, pair + i / 2 * 4);
        w[0][atom][i] = first_tf32(entry);
        w[1][atom][i] = second_tf32(entry, w[0][atom][i]);
      }
    }
    constexpr int kOfWeight[] = {1, 0, 0}, kOfX[] = {0, 1, 0};
#pragma unroll
    for (int product = 0; product < 3; ++product) {
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        const uint32_t (&b)[2] = x[tile][kOfX[product]];
#pragma unroll
        for (int atom = 0; atom < kAtoms; ++atom) {
          ptx::mma_tf32(sums[atom][tile], w[kOfWeight[product]][atom], b[0], b[1]);
        }
      }
    }
  }
}

// Of shared memory, before the rings.
template <typename X, typename Tokens>
constexpr int table_bytes = !Tokens::kTable            ? 0
                            : std::is_same_v<X, float> ? kTableBytes
                                                       : pair_table_bytes(1);

// One value for each of a lane's outputs, rows g and g + 8 of every strip.
template <int kAtoms, typename Read>
__device__ __forceinline__ void for_rows(float (&to)[kAtoms][2], int g, Read&& read) {
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
    to[atom][0] = read(atom * kAtomN + g);
    to[atom][1] = read(atom * kAtomN + 8 + g);
  }
}
template <int kAtoms>
__device__ __forceinline__ void read_rows(float (&to)[kAtoms][2], const uint8_t* rows, DType type, int g) {
  if (type == DType::kF32) {
    for_rows<kAtoms>(to, g, [&](int row) { return reinterpret_cast<const float*>(rows)[row]; });
  } else if (type == DType::kU8) {
    for_rows<kAtoms>(to, g, [&](int row) { return static_cast<float>(rows[row]); });
  } else {
    const bool bf16 = type == DType::kBF16;
    for_rows<kAtoms>(to, g, [&](int row) {
      const uint16_t bits = reinterpret_cast<const uint16_t*>(rows)[row];
      return bf16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16) : __half2float(__ushort_as_half(bits));
    });
  }
}

// A stage's sums join the accumulator kFlushes times, at least as often as its scales change.
template <typename X, int kBits, int kAtoms, int kTokenTiles, int kFlushes, typename Tokens>
__global__ void __launch_bounds__(max_warps(kTokenTiles) * 32, 1)
    stream_matmul(const __grid_constant__ Params params, const __grid_constant__ Tokens source) {
  constexpr bool kTable = Tokens::kTable;
  constexpr bool kBf16 = !std::is_same_v<X, __half>;
  constexpr int kRows = kAtoms * kAtomN;
  constexpr int kTiles = kStageK / tile_k(kBits);  // packed tiles of a stage
  constexpr int kWeightBytes = weight_bytes(kAtoms, kBits);
  constexpr int kTokenBytes = token_bytes(sizeof(X));
  constexpr int kPieces = Operand<X>::kPieces;
  constexpr int kChunkX = 16 / sizeof(X);          // inputs of one 16-byte copy
  constexpr int kTokenChunks = kStageK / kChunkX;  // copies of one token
  constexpr int kCopyTokens = 32 / kTokenChunks;   // tokens that the 32 lanes copy at once
  constexpr int kCopies = 8 * kTokenTiles / kCopyTokens;
  constexpr int kFlushBlocks = kStageBlocks / kFlushes;
  using C = Codes<X, kBits>;
  using Raw = typename Operand<X>::Raw;
  static_assert(kTileN % kRows == 0, "a warp's outputs lie in one tile");
  static_assert(kCopyTokens >= 1, "a token's stage is at most one copy of the warp");
  constexpr bool kEntries = kTable && std::is_same_v<X, float>;  // a table of single entries, not of pairs
  static_assert(!kTable || kBits == 4);

  extern __shared__ __align__(128) uint8_t shared[];
  const MatmulArgs& args = params.args;
  const int warps = blockDim.x / 32;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int rank = blockIdx.x % params.cluster;
  const int64_t n0 = static_cast<int64_t>(blockIdx.x / params.cluster) * kRows;
  const int64_t m0 = static_cast<int64_t>(blockIdx.y) * (8 * kTokenTiles);
  int64_t batch = blockIdx.z;
  int tokens = static_cast<int>(min(static_cast<int64_t>(8 * kTokenTiles), args.m - m0));
  ragged::OneTile rows;
  if constexpr (Tokens::kRagged) {
    const int id = ragged::load_id(source.work);
    const int tile = source.first_tile + static_cast<int>(blockIdx.y);
    if (!ragged::find_tile(source.work, id, tile, shared + source.plan_at, &rows)) return;  // all CTAs of a cluster
    batch = rows.expert;
    tokens = rows.rows;
    if (rows.expert < 0) {
      if (rank != 0) return;
#pragma unroll 1
      for (int i = threadIdx.x; i < tokens * kRows; i += blockDim.x) {
        const int64_t n = n0 + i % kRows;
        if (n < args.n) store_zero(args.y, static_cast<int64_t>(rows.row(i / kRows)) * args.n + n, args.y_dtype);
      }
      return;
    }
  }
  prefetch_bias(args, batch, n0, kRows, threadIdx.x);
  const auto row_of = [&](int token) {
    if constexpr (Tokens::kRagged) return static_cast<int64_t>(rows.row(token));
    return m0 + token;
  };
  const auto x_row_of = [&](int token) {
    if constexpr (Tokens::kRagged) return static_cast<int64_t>(ragged::x_row(source.work, rows.row(token)));
    return m0 + token;
  };

  const X* x = static_cast<const X*>(args.x) + batch * args.x_batch_stride;
  const uint32_t* qw = args.qw + batch * args.qw_batch_stride;
  const int scale_size = element_size(args.scale_dtype);
  const int shift_size = shift_bytes(args);
  const int shift_at =
      kWeightBytes + kFlushes * kRows * scale_size;  // scales follow the weights in a slot, shift and x follow them
  const int x_at = shift_at + kFlushes * kRows * shift_size;
  const uint8_t* scales = static_cast<const uint8_t*>(args.scales) + batch * args.scales_batch_stride * scale_size;
  const uint8_t* shift = static_cast<const uint8_t*>(args.shift) + batch * args.shift_batch_stride * shift_size;

  // This warp's run of stages.
  const int stages = static_cast<int>(ceil_div(args.k, kStageK));
  const int runs = params.cluster * warps;
  const int run = rank * warps + warp;
  const auto runs_before = [&](int count) {
    if constexpr (Tokens::kRagged) return static_cast<int>(static_cast<uint32_t>(stages) * count / runs);
    return static_cast<int>(static_cast<int64_t>(stages) * count / runs);
  };
  const int first_stage = runs_before(run), end_stage = runs_before(run + 1);
  const int stage_count = end_stage - first_stage;
  // CTAs that walk the inputs in step would all read addresses a multiple of a large power of two apart, which share
  // memory channels: each begins somewhere else in its run, and wraps around.
  const int start =
      first_stage + (stage_count > 0 ? static_cast<int>(blockIdx.x / params.cluster) * kRotation % stage_count : 0);
  const int full_stages = static_cast<int>(args.k / kStageK);
  const int blocks = static_cast<int>(ceil_div(args.k, kBlockK));
  const bool grouped = params.log2_group_blocks >= 0;
  [[maybe_unused]] const uint32_t entries = ptx::shared_address(shared), lane_pairs = entries + lane * 4;
  uint8_t* const rings = shared + table_bytes<X, Tokens>;
  uint8_t* const ring = rings + warp * params.warp_bytes;
  uint8_t* const ring_end = ring + params.depth * params.slot_bytes;

  // What this lane copies next: its words of the stage, its 16 bytes of some tokens, its 4 bytes of a row of scales.
  const int k_tiles = static_cast<int>(ceil_div(args.k, tile_k(kBits)));
  const uint32_t* next_words = qw + ((n0 / kTileN) * k_tiles + static_cast<int64_t>(start) * kTiles) * kTileWords +
                               (n0 % kTileN) / kAtomN * kAtomWords + lane * 4;
  const int copy_token = lane / kTokenChunks;
  const int copy_k = lane % kTokenChunks * kChunkX;
  // Every lane copies as often: those beyond the last token copy it again, to rows of the slot that nobody reads.
  const int copies = (tokens + kCopyTokens - 1) / kCopyTokens;
  const X* next_x[kCopies];
#pragma unroll
  for (int copy = 0; copy < kCopies; ++copy) {
    const int token = min(copy * kCopyTokens + copy_token, tokens - 1);
    next_x[copy] = x + x_row_of(token) * args.k + static_cast<int64_t>(start) * kStageK + copy_k;
  }
  const int copy_to_x = x_at + copy_token * kTokenBytes + copy_k * static_cast<int>(sizeof(X));
  const int outputs = static_cast<int>(min(static_cast<int64_t>(kRows), args.n - n0));
  int next_stage = start;
  int to_fetch = stage_count;

  const auto copy_rows = [&](uint8_t* to, const uint8_t* rows, int size) {
    const int bytes = outputs * size;
#pragma unroll 1
    for (int row = 0; row < kFlushes; ++row, to += kRows * size) {
      const int block = next_stage * kStageBlocks + row * kFlushBlocks;
      if (block >= blocks) break;
      const uint8_t* from = rows + ((block >> params.log2_group_blocks) * args.n + n0) * size;
      if (params.scales_in_pieces_of_4) {
#pragma unroll
        for (int at = 0; at < kRows * 4; at += 128) {
          if (at + lane * 4 < bytes) ptx::cp_async_4(to + at + lane * 4, from + at + lane * 4);
        }
      } else {
#pragma unroll 1
        for (int at = lane; at < bytes; at += 32) to[at] = from[at];
      }
    }
  };
  const auto fetch = [&](uint8_t* slot) {
    if (to_fetch > 0) {
      const int tiles = k_tiles - next_stage * kTiles;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int atom = 0; atom < kAtoms; ++atom) {
          uint8_t* to = slot + ((tile * kAtoms + atom) * 32 + lane) * 16;
          if (tile < tiles) {
            ptx::cp_async_16(to, next_words + tile * kTileWords + atom * kAtomWords);
          } else {
            *reinterpret_cast<uint4*>(to) = {};
          }
        }
      }
      if (next_stage < full_stages && params.x_in_pieces_of_16) {
#pragma unroll
        for (int copy = 0; copy < kCopies; ++copy) {
          if (copy < copies) ptx::cp_async_16(slot + copy_to_x + copy * kCopyTokens * kTokenBytes, next_x[copy]);
        }
      } else {
        const int64_t left = args.k - static_cast<int64_t>(next_stage) * kStageK - copy_k;
#pragma unroll
        for (int copy = 0; copy < kCopies; ++copy) {
          if (copy < copies) {
            *reinterpret_cast<uint4*>(slot + copy_to_x + copy * kCopyTokens * kTokenBytes) =
                load_some(next_x[copy], left);
          }
        }
      }
      if (grouped) {
        copy_rows(slot + kWeightBytes, scales, scale_size);
        if (shift_size != 0) copy_rows(slot + shift_at, shift, shift_size);
      }
      next_words += kTiles * kTileWords;
#pragma unroll
      for (int copy = 0; copy < kCopies; ++copy) next_x[copy] += kStageK;
      --to_fetch;
      if (++next_stage == end_stage) {
        next_stage = first_stage;
        next_words -= stage_count * kTiles * kTileWords;
#pragma unroll
        for (int copy = 0; copy < kCopies; ++copy) next_x[copy] -= stage_count * kStageK;
      }
    }
    ptx::cp_async_commit();
  };

  float table_entry = 0.f;  // on its way before the weights are
  if (kTable) {
    table_entry = load_entry(args, batch, lane);
  }
#pragma unroll 1
  for (int i = 0; i < params.depth - 1; ++i) fetch(ring + i * params.slot_bytes);
  if constexpr (kTable) {
    if constexpr (kEntries) {
      fill_table(table_entry, shared);
    } else {
      fill_pairs<X>(table_entry, shared);
    }
    __syncthreads();
  }

  float acc[kAtoms][kTokenTiles][4] = {};
  bool exceptional[kTokenTiles][2] = {};  // tokens 2t and 2t + 1 of the tile
  // w = scale * code + offset, with x's and the codes' powers of two in both.
  float scale[kAtoms][2], offset[kAtoms][2];
  const auto set_offsets = [&]() {
    if (kTable) return;
    const float bias = static_cast<float>(bias_of(kBits));
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scale[atom][i] *= C::kUnscale;
        if (args.shift_mode == ShiftMode::kOffsets) {
          offset[atom][i] *= C::kUnscale;
        } else {
          offset[atom][i] = -scale[atom][i] * (shift_size == 0 ? bias : offset[atom][i]);
        }
      }
    }
  };
  if (!grouped) {
    const auto output = [&](int row) { return min(n0 + row, args.n - 1); };
    for_rows<kAtoms>(scale, g, [&](int row) { return load_element(scales, output(row), args.scale_dtype); });
    if (shift_size != 0)
      for_rows<kAtoms>(offset, g, [&](int row) { return load_element(shift, output(row), args.shift_dtype); });
    set_offsets();
  }

  const int lane_x = x_at + t * static_cast<int>(sizeof(Raw));
  int token_x[kTokenTiles];  // columns beyond the last token repeat it
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) token_x[tile] = lane_x + min(tile * 8 + g, tokens - 1) * kTokenBytes;

  uint8_t* slot = ring;
  uint8_t* free_slot = ring_end - params.slot_bytes;
#pragma unroll 1
  for (int index = 0, stage = start; index < stage_count; ++index) {
    ptx::cp_async_wait_all_but(params.depth - 2);
    __syncwarp();  // x and scales are copied by other lanes; and every lane is done with the slot that is filled next
    fetch(free_slot);
#pragma unroll
    for (int flush = 0; flush < kFlushes; ++flush) {
      if (kFlushes > 1 && stage * kStageBlocks + flush * kFlushBlocks >= blocks) break;
      if (grouped) {
        read_rows<kAtoms>(scale, slot + kWeightBytes + flush * kRows * scale_size, args.scale_dtype, g);
        if (shift_size != 0)
          read_rows<kAtoms>(offset, slot + shift_at + flush * kRows * shift_size, args.shift_dtype, g);
        set_offsets();
      }
      float part[kAtoms][kTokenTiles][4] = {};
      float sum[kTokenTiles][4] = {};
#pragma unroll
      for (int block = flush * kFlushBlocks; block < (flush + 1) * kFlushBlocks; ++block) {
        uint4 words[kAtoms];
#pragma unroll
        for (int atom = 0; atom < kAtoms; ++atom) {
          const int tile = block * kBlockK / tile_k(kBits);
          words[atom] = *reinterpret_cast<const uint4*>(slot + ((tile * kAtoms + atom) * 32 + lane) * 16);
        }
        if constexpr (kEntries) {
          const uint8_t* of_tiles[kTokenTiles];
#pragma unroll
          for (int tile = 0; tile < kTokenTiles; ++tile) of_tiles[tile] = slot + token_x[tile] + block * kBlockK * 4;
          multiply_entries(words, block % 2 == 1, of_tiles, entries, part);
        }
#pragma unroll
        for (int step = 0; step < (kEntries ? 0 : 2); ++step) {
          const uint32_t ones[4] = {C::kOne, C::kOne, C::kOneOfOdd, C::kOneOfOdd};
          uint32_t codes[kAtoms][4];
#pragma unroll
          for (int atom = 0; atom < kAtoms; ++atom) {
            const uint4 w = words[atom];
            const bool second = kBits == 4 ? block % 2 == 1 : step == 1;
            const uint32_t low = second ? w.z : w.x, high = second ? w.w : w.y;  // rows g and g + 8
            const int pair = kBits == 4 ? 2 * step : 0;
            if constexpr (kTable) {
              codes[atom][0] = look_up_pair(lane_pairs, low, pair);
              codes[atom][1] = look_up_pair(lane_pairs, high, pair);
              codes[atom][2] = look_up_pair(lane_pairs, low, pair + 1);
              codes[atom][3] = look_up_pair(lane_pairs, high, pair + 1);
              continue;
            }
            codes[atom][0] = C::pair(low, pair);
            codes[atom][1] = C::pair(high, pair);
            codes[atom][2] = C::pair(low, pair + 1);
            codes[atom][3] = C::pair(high, pair + 1);
          }
#pragma unroll
          for (int tile = 0; tile < kTokenTiles; ++tile) {
            const uint8_t* pairs = slot + token_x[tile] + (block * 2 + step) * 16 * sizeof(X);
            uint32_t b0[kPieces], b1[kPieces];
            const Raw x0 = *reinterpret_cast<const Raw*>(pairs);
            const Raw x1 = *reinterpret_cast<const Raw*>(pairs + 8 * sizeof(X));
            if constexpr (kTable && !kEntries) {
              b0[0] = x0;
              b1[0] = x1;
            } else {
              Operand<X>::pieces(x0, false, b0);
              Operand<X>::pieces(x1, C::kOddTimes16, b1);
            }
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
              if (!kTable) ptx::mma<kBf16>(sum[tile], ones, b0[piece], b1[piece]);
#pragma unroll
              for (int atom = 0; atom < kAtoms; ++atom) {
                ptx::mma<kBf16>(part[atom][tile], codes[atom], b0[piece], b1[piece]);
              }
            }
          }
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int atom = 0; atom < kAtoms; ++atom) {
            float& a = acc[atom][tile][i];
            a = fmaf(scale[atom][i / 2], part[atom][tile][i],
                     kTable ? a : fmaf(offset[atom][i / 2], sum[tile][i % 2], a));
          }
        }
        if (kTable) continue;
        exceptional[tile][0] |= !(fabsf(sum[tile][0]) < INFINITY);
        exceptional[tile][1] |= !(fabsf(sum[tile][1]) < INFINITY);
      }
    }
    free_slot = slot;
    slot += params.slot_bytes;
    if (slot == ring_end) slot = ring;
    if (++stage == end_stage) stage = first_stage;
  }

  // Sums to be made again, a bit for each. A table's are single sums: what is left of an infinity is no number.
  static_assert(kTokenTiles * kAtoms * 4 <= 32);
  uint32_t again = 0;
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      constexpr uint32_t kOfAtoms = 0x1111u & ((1u << 4 * kAtoms) - 1);
      const int at = tile * kAtoms * 4 + i;
      if constexpr (kEntries) {
#pragma unroll
        for (int atom = 0; atom < kAtoms; ++atom) {
          again |= static_cast<uint32_t>(!(fabsf(acc[atom][tile][i]) < INFINITY)) << (at + atom * 4);
        }
      } else if (exceptional[tile][i % 2]) {
        again |= kOfAtoms << at;
      }
    }
  }

  // Partial sums: warps of the CTA in order, then CTAs of the cluster in order.
  constexpr int kStride = partial_stride(kAtoms);
  ptx::cp_async_wait<0>();
  __syncwarp();
  float* partial = reinterpret_cast<float*>(ring);
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        partial[(tile * 8 + 2 * t + i % 2) * kStride + atom * kAtomN + i / 2 * 8 + g] = acc[atom][tile][i];
      }
    }
  }
  if (again != 0) {
    const int64_t k_begin = static_cast<int64_t>(first_stage) * kStageK;
    const int64_t k_end = min(static_cast<int64_t>(end_stage) * kStageK, args.k);
#pragma unroll 1
    for (; again != 0; again &= again - 1) {
      const int at = __ffs(again) - 1, i = at % 4, atom = at / 4 % kAtoms, tile = at / (4 * kAtoms);
      const int token = tile * 8 + 2 * t + i % 2, row = atom * kAtomN + i / 2 * 8 + g;
      if (token < tokens && n0 + row < args.n) {
        partial[token * kStride + row] = exact_sum<kTable>(args, batch, x_row_of(token), n0 + row, k_begin, k_end);
      }
    }
  }
  __syncthreads();
  float* total = reinterpret_cast<float*>(rings + warps * params.warp_bytes);
#pragma unroll 1
  for (int i = threadIdx.x; i < tokens * kRows; i += blockDim.x) {
    const int token = i / kRows, row = i % kRows;
    const float bias = params.cluster == 1 ? output_bias(args, batch, n0 + row) : 0.f;
    float value = 0.f;
    for (int w = 0; w < warps; ++w) {
      value += reinterpret_cast<const float*>(rings + w * params.warp_bytes)[token * kStride + row];
    }
    if (params.cluster == 1) {
      finish(args, batch, row_of(token), n0 + row, value, bias);
    } else {
      total[i] = value;
    }
  }
#if __CUDA_ARCH__ >= 900
  if (params.cluster > 1) {
    __syncthreads();
    ptx::cluster_share();
#pragma unroll 1
    for (int i = rank * blockDim.x + threadIdx.x; i < tokens * kRows; i += params.cluster * blockDim.x) {
      const float bias = output_bias(args, batch, n0 + i % kRows);
      float value = 0.f;
      for (int other = 0; other < params.cluster; ++other) value += ptx::load_shared_of_rank(total + i, other);
      finish(args, batch, row_of(i / kRows), n0 + i % kRows, value, bias);
    }
    ptx::cluster_leave();
  }
#endif
}

template <typename X, int kBits, int kAtoms, int kTokenTiles, int kFlushes, typename Tokens>
cudaError_t launch_instance(Params params, Tokens source, const Config& config, cudaStream_t stream) {
  constexpr int kRows = kAtoms * kAtomN;
  const MatmulArgs& args = params.args;
  int tokens = 8 * kTokenTiles, plan_bytes = 0;
  if constexpr (Tokens::kRagged) {
    tokens = std::min(tokens, source.work.m);
    plan_bytes = ragged::tile_bytes(source.work);
  } else {
    tokens = static_cast<int>(std::min<int64_t>(args.m, tokens));
  }
  const int slot = weight_bytes(kAtoms, kBits) +
                   kFlushes * kRows * (element_size(args.scale_dtype) + shift_bytes(args)) +
                   (tokens + 1) / 2 * 2 * token_bytes(sizeof(X));  // 32 lanes copy two tokens of 16-bit numbers at once
  const int partial = tokens * partial_stride(kAtoms) * 4;
  const int total = config.cluster > 1 ? tokens * kRows * 4 : 0;
  const int budget = config.shared_bytes - total - plan_bytes - table_bytes<X, Tokens>;
  params.slot_bytes = slot;
  params.depth = std::min(budget / config.warps / slot, kMaxDepth);
  if (params.depth < 2) return cudaErrorInvalidConfiguration;
  params.warp_bytes = std::max(params.depth * slot, static_cast<int>(ceil_div(partial, 16)) * 16);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(ceil_div(args.n, kRows) * config.cluster),
                    static_cast<unsigned>(ceil_div(args.m, 8 * kTokenTiles)), static_cast<unsigned>(args.batch));
  shape.threads = config.warps * 32;
  shape.cluster = config.cluster;
  shape.shared_bytes = table_bytes<X, Tokens> + config.warps * params.warp_bytes + total + plan_bytes;
  const auto kernel = stream_matmul<X, kBits, kAtoms, kTokenTiles, kFlushes, Tokens>;
  if constexpr (Tokens::kRagged) {
    source.plan_at = table_bytes<X, Tokens> + config.warps * params.warp_bytes + total;
    const int64_t tiles = ragged::most_tiles(source.work);
    for (int64_t first = 0; first < tiles; first += kMostTiles) {
      source.first_tile = static_cast<int>(first);
      shape.grid.y = static_cast<unsigned>(std::min(tiles - first, kMostTiles));
      shape.grid.z = 1;
      if (cudaError_t error = launch_kernel(kernel, shape, stream, params, source); error != cudaSuccess) return error;
    }
    return cudaSuccess;
  } else {
    return launch_kernel(kernel, shape, stream, params, source);
  }
}

template <typename X, int kBits, int kTokenTiles, typename Tokens>
cudaError_t launch_tokens(const Params& params, const Tokens& source, const Config& config, cudaStream_t stream) {
  const bool small_groups = params.log2_group_blocks == 0 || params.log2_group_blocks == 1;
  const auto launch = [&](auto atoms) {
    if constexpr (Tokens::kTable && sizeof(X) == 2) {  // whose common groups are of 64 inputs
      if (params.log2_group_blocks == 1) {
        return launch_instance<X, kBits, atoms.value, kTokenTiles, 2>(params, source, config, stream);
      }
    }
    return small_groups ? launch_instance<X, kBits, atoms.value, kTokenTiles, 4>(params, source, config, stream)
                        : launch_instance<X, kBits, atoms.value, kTokenTiles, 1>(params, source, config, stream);
  };
  if constexpr (!Tokens::kRagged) {  // whose experts make enough CTAs of the widest strips
    if (config.atoms == 1) return launch(std::integral_constant<int, 1>{});
    if (config.atoms == 2) return launch(std::integral_constant<int, 2>{});
  }
  return config.atoms == 4 ? launch(std::integral_constant<int, 4>{}) : cudaErrorInvalidValue;
}

template <typename X, typename Tokens>
cudaError_t launch_typed(const MatmulArgs& args, const Tokens& source, const Config& config, cudaStream_t stream) {
  Params params{};
  params.args = args;
  params.cluster = config.cluster;
  params.log2_group_blocks = log2_group_blocks(args);
  if (args.groups > 1) {
    const int shift_size = shift_bytes(args);
    params.scales_in_pieces_of_4 = args.n * element_size(args.scale_dtype) % 4 == 0 && args.n * shift_size % 4 == 0;
  }
  params.x_in_pieces_of_16 = args.k * sizeof(X) % 16 == 0;
  if (config.warps < 1 || config.warps > max_warps(config.token_tiles)) return cudaErrorInvalidValue;
  const auto launch = [&](auto bits) {
    if (config.token_tiles == 1) return launch_tokens<X, bits.value, 1>(params, source, config, stream);
    if constexpr (!Tokens::kRagged || has_wide_tiles(bits.value, sizeof(X))) {
      return launch_tokens<X, bits.value, 2>(params, source, config, stream);
    } else {
      return cudaErrorInvalidValue;
    }
  };
  if constexpr (!Tokens::kTable) {
    if (args.bits == 8) return launch(std::integral_constant<int, 8>{});
  }
  return launch(std::integral_constant<int, 4>{});
}

}  // namespace wonly::stream
