// dx = dy @ W^T for few tokens: weights streamed once from memory, contraction over the outputs N.
//
// A CTA owns a strip of 128 inputs K; its warps, and the CTAs of a cluster, share N. A warp copies 32
// outputs of its strip, with the scales and the dy that belong to them, into a ring of its own in shared memory
// (cp.async). A lane's packed word holds codes of one output; movmatrix exchanges words as 8 x 8 matrices of their
// halves, after which the same masks as in matmul_stream.cuh leave pairs of neighbouring *outputs*: the A operand of
// mma.sync with inputs as rows. Codes are exact (a 16-bit pattern c < 256 is the bf16 number c * 2^-133); the scale,
// which belongs to an output and a group of inputs, multiplies dy in float32, once for all inputs of the group:
//   dx[m, k] = sum over n of (dy[m, n] scale[n]) code[k, n] - sum over n of (dy[m, n] scale[n]) zero[n].
// The second sum is the same for all inputs of a group. dy * scale enters the tensor core as one bf16 number for bf16
// dy, which rounds like a dense bf16 weight, as two for fp16 and as three, exactly, for float32.
//
// Partial sums are added in a fixed order, and a token's result does not depend on the other tokens. Results that are
// not finite are computed again as a dense product would (exact_sum.cuh).
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/exact_sum.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_transposed.h"
#include "cuda/ptx.cuh"
#include "cuda/ragged_plan.cuh"
#include "dequant/convert.h"
#include "layout.h"

namespace wonly::transposed_stream {

constexpr int kBlockK = 32;  // inputs of the smallest group
constexpr int kBlocks = kStripK / kBlockK;
constexpr int kStageAtoms = kStageN / kAtomN;
constexpr int kMaxDepth = 8;
constexpr int kTileRowBytes = 32 * 4;        // of a ragged product
constexpr int kPartialStride = kStripK + 4;  // floats; + 4: no bank conflicts
// dy is multiplied by 2^96, so that its products with codes at 2^-133 stay float32's normal numbers from 2^-89 to 2^31.
constexpr float kUp = 0x1p+96f, kDown = 0x1p-96f, kUnscale = 0x1p+37f;

struct Params {
  MatmulArgs args;
  MatmulArgs result;  // the same with the sizes of y = x @ w: `n` is the length of a row of the result
  int cluster;
  int depth;              // slots of a warp's ring
  int log2_group_blocks;  // group size = 32 << this; -1: one scale per output
  int token_tiles;        // of 8 * kTokenTiles tokens
  int strips;
  bool scales_in_pieces_of_4;  // rows of scales and shift are aligned for cp.async
  bool dy_in_pieces_of_16;     // rows of dy are
  int slot_bytes;              // weights, kGroups rows of scales and of shift, dy
  int warp_bytes;              // a warp's ring, and later its partial sums
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

__host__ __device__ constexpr int weight_bytes(int bits) {
  return kStripK / tile_k(bits) * kStageAtoms * kAtomWords * 4;
}
// A token's outputs of one stage, padded so that the lanes of a warp read different banks.
__host__ __device__ constexpr int token_bytes(int dy_size) {
  return dy_size == 4 ? kStageN * 4 + 32 : kStageN * 2 + 16;
}

// bf16 numbers whose sum stands for one dy * scale.
template <typename X>
constexpr int kPieces = std::is_same_v<X, float>    ? 3
                        : std::is_same_v<X, __half> ? 2
                                                    : 1;

// Splits both values into pairs of pieces, and leaves in `values` what the pieces add up to.
template <int kCount>
__device__ __forceinline__ void split(float (&values)[2], uint32_t (&pieces)[kCount]) {
  if constexpr (kCount == 1) {
    pieces[0] = pack_pair(from_float<__nv_bfloat16>(values[0]), from_float<__nv_bfloat16>(values[1]));
    values[0] = __uint_as_float(pieces[0] << 16);
    values[1] = __uint_as_float(pieces[0] & 0xffff0000u);
  } else {
    float rest[2] = {values[0], values[1]};
#pragma unroll
    for (int piece = 0; piece < kCount; ++piece) {
      pieces[piece] = __byte_perm(__float_as_uint(rest[0]), __float_as_uint(rest[1]), 0x7632);  // the high halves
      rest[0] -= __uint_as_float(__float_as_uint(rest[0]) & 0xffff0000u);
      rest[1] -= __uint_as_float(__float_as_uint(rest[1]) & 0xffff0000u);
    }
    values[0] -= rest[0];
    values[1] -= rest[1];
  }
}

// Pairs of neighbouring numbers of a row in shared memory, from the even index `first` on, 8 apart. One choice of type
// for all of them.
template <int kAtoms>
__device__ __forceinline__ void read_pairs(float2 (&to)[kAtoms][2], const uint8_t* row, int first, DType type) {
  uint32_t raw[2 * kAtoms];
  if (type == DType::kF32) {
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) {
      to[i / 2][i % 2] = *reinterpret_cast<const float2*>(row + (first + i * 8) * 4);
    }
  } else if (type == DType::kU8) {
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) raw[i] = *reinterpret_cast<const uint16_t*>(row + first + i * 8);
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) {
      to[i / 2][i % 2] = {static_cast<float>(raw[i] & 0xffu), static_cast<float>(raw[i] >> 8)};
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) raw[i] = *reinterpret_cast<const uint32_t*>(row + (first + i * 8) * 2);
    if (type == DType::kBF16) {
#pragma unroll
      for (int i = 0; i < 2 * kAtoms; ++i) {
        to[i / 2][i % 2] = {__uint_as_float(raw[i] << 16), __uint_as_float(raw[i] & 0xffff0000u)};
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kAtoms; ++i) {
        to[i / 2][i % 2] = __half22float2(*reinterpret_cast<const __half2*>(&raw[i]));
      }
    }
  }
}

template <typename X>
constexpr DType kTypeOf = std::is_same_v<X, float>    ? DType::kF32
                          : std::is_same_v<X, __half> ? DType::kF16
                                                      : DType::kBF16;

// kGroups: rows of scales that the strip has, 1, or 4 where groups are of 32 or 64 inputs.
template <typename X, int kBits, int kTokenTiles, int kGroups, typename Tokens>
__global__ void __launch_bounds__(max_warps(kTokenTiles) * 32, 1)
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

  extern __shared__ __align__(128) uint8_t shared[];
  const MatmulArgs& args = params.args;
  const int warps = blockDim.x / 32;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int rank = blockIdx.x % params.cluster;
  const uint32_t place = blockIdx.x / params.cluster;  // token tiles of the same weights run together
  const uint32_t token_tile = Tokens::kRagged ? place / params.strips : place % params.token_tiles;
  const uint32_t strip = Tokens::kRagged ? place % params.strips : place / params.token_tiles % params.strips;
  const int64_t m0 = static_cast<int64_t>(token_tile) * kTokens;
  const int64_t k0 = static_cast<int64_t>(strip) * kStripK;
  int64_t batch = place / params.token_tiles / params.strips;
  int tokens = static_cast<int>(min(static_cast<int64_t>(kTokens), args.m - m0));
  const int* rows = nullptr;  // of the result
  int repeat = 1;
  if constexpr (Tokens::kRagged) {
    int* const of_tile = reinterpret_cast<int*>(shared + source.plan_at);
    const ragged::Plan plan = ragged::get_plan(source.work, shared + source.plan_at + kTileRowBytes);
    if (static_cast<int>(token_tile) >= plan.tile_count) return;  // all CTAs of a cluster
    const ragged::Span span = ragged::find_span(plan, static_cast<int>(token_tile));
    const int first = (static_cast<int>(token_tile) - span.first_tile) * kTokens;
    batch = span.expert;
    tokens = min(kTokens, span.rows - first);
    rows = of_tile;
    repeat = source.work.repeat;
    if (threadIdx.x < tokens) of_tile[threadIdx.x] = plan.row(span.first + first + threadIdx.x);
    __syncthreads();
    if (span.expert < 0) {
      if (rank != 0) return;
      for (int i = threadIdx.x; i < tokens * kStripK; i += blockDim.x) {
        const int64_t k = k0 + i % kStripK;
        if (k < args.k) store_element(args.y, rows[i / kStripK] * args.k + k, 0.f, args.y_dtype);
      }
      return;
    }
  }
  const auto row_of = [&](int token) {
    if constexpr (Tokens::kRagged) return static_cast<int64_t>(rows[token]);
    return m0 + token;
  };
  const auto dy_row_of = [&](int token) {
    if constexpr (Tokens::kRagged) return static_cast<int64_t>(rows[token] / repeat);
    return m0 + token;
  };

  const int scale_size = element_size(args.scale_dtype);
  const int shift_size = args.shift_mode == ShiftMode::kNone ? 0 : element_size(args.shift_dtype);
  const int shift_at = kWeightBytes + kGroups * kStageN * scale_size;
  const int dy_at = shift_at + kGroups * kStageN * shift_size;
  const X* dy = static_cast<const X*>(args.x) + batch * args.x_batch_stride;
  const uint8_t* scales = static_cast<const uint8_t*>(args.scales) + batch * args.scales_batch_stride * scale_size;
  const uint8_t* shift = static_cast<const uint8_t*>(args.shift) + batch * args.shift_batch_stride * shift_size;

  const int k_tiles = static_cast<int>(ceil_div(args.k, tile_k(kBits)));
  const int first_tile = static_cast<int>(k0 / tile_k(kBits));
  const int tiles = min(kTiles, k_tiles - first_tile);
  const uint32_t* words =
      args.qw + batch * args.qw_batch_stride + static_cast<int64_t>(first_tile) * kTileWords + lane * 4;
  // The strip's rows of scales; where it ends beyond the last group, that one again.
  const auto group_of = [&](int row) {
    const int block = static_cast<int>(k0 / kBlockK) + row;
    return params.log2_group_blocks < 0 ? int64_t{0}
                                        : min(static_cast<int64_t>(block >> params.log2_group_blocks), args.groups - 1);
  };

  // This warp's run of stages.
  const int64_t stages = ceil_div(args.n, kStageN);
  const int runs = params.cluster * warps;
  const int run = rank * warps + warp;
  const int first_stage = static_cast<int>(stages * run / runs);
  const int stage_count = static_cast<int>(stages * (run + 1) / runs) - first_stage;
  uint8_t* const ring = shared + warp * params.warp_bytes;
  uint8_t* const ring_end = ring + params.depth * params.slot_bytes;

  // What this lane copies next: its words of the stage, its 16 bytes of some tokens, its 4 bytes of rows of scales.
  static_assert(kTileN == 2 * kStageN);
  const uint32_t* next_words =
      words +
      (first_stage / 2 * static_cast<int64_t>(k_tiles) * kAtomsPerTile + first_stage % 2 * kStageAtoms) * kAtomWords;
  const int copy_token = lane / kTokenChunks;
  const int copy_n = lane % kTokenChunks * kChunk;
  // Of rows of a slot beyond the last token nobody stores the products.
  const X* next_dy[kCopies];
#pragma unroll
  for (int copy = 0; copy < kCopies; ++copy) {
    next_dy[copy] = dy + dy_row_of(min(copy * kCopyTokens + copy_token, tokens - 1)) * args.n +
                    static_cast<int64_t>(first_stage) * kStageN + copy_n;
  }
  const int copy_to_dy = dy_at + copy_token * kTokenBytes + copy_n * static_cast<int>(sizeof(X));
  int64_t next_n = static_cast<int64_t>(first_stage) * kStageN;
  int to_fetch = stage_count;

  const auto copy_row = [&](uint8_t* to, const uint8_t* from, int size, int outputs) {
    const int bytes = outputs * size;
    if (params.scales_in_pieces_of_4) {
      if (lane * 4 < bytes) {
        ptx::cp_async_4(to + lane * 4, from + lane * 4);
      } else if (lane * 4 < kStageN * size) {
        *reinterpret_cast<uint32_t*>(to + lane * 4) = 0;
      }
    } else {
#pragma unroll 1
      for (int at = lane; at < kStageN * size; at += 32) to[at] = at < bytes ? from[at] : 0;
    }
  };
  const auto fetch = [&](uint8_t* slot) {
    if (to_fetch > 0) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int atom = 0; atom < kStageAtoms; ++atom) {
          if (tile < tiles) {  // what lies in the slot otherwise meets inputs that nobody stores
            ptx::cp_async_16(slot + ((tile * kStageAtoms + atom) * 32 + lane) * 16,
                             next_words + tile * kTileWords + atom * kAtomWords);
          }
        }
      }
      const int outputs = static_cast<int>(min(static_cast<int64_t>(kStageN), args.n - next_n));
      if (params.dy_in_pieces_of_16 && outputs == kStageN) {
#pragma unroll
        for (int copy = 0; copy < kCopies; ++copy) {
          if (copy * kCopyTokens + copy_token < tokens) {
            ptx::cp_async_16(slot + copy_to_dy + copy * kCopyTokens * kTokenBytes, next_dy[copy]);
          }
        }
      } else {
#pragma unroll
        for (int copy = 0; copy < kCopies; ++copy) {
          *reinterpret_cast<uint4*>(slot + copy_to_dy + copy * kCopyTokens * kTokenBytes) =
              load_some(next_dy[copy], outputs - copy_n);
        }
      }
#pragma unroll
      for (int row = 0; row < kGroups; ++row) {
        const int64_t first = group_of(row) * args.n + next_n;
        copy_row(slot + kWeightBytes + row * kStageN * scale_size, scales + first * scale_size, scale_size, outputs);
        if (shift_size != 0) {
          copy_row(slot + shift_at + row * kStageN * shift_size, shift + first * shift_size, shift_size, outputs);
        }
      }
      // The other half of the packed tile, or the first half of the next one.
      const bool second = (first_stage + stage_count - to_fetch) % 2 == 1;
      next_words +=
          second ? static_cast<int64_t>(k_tiles) * kTileWords - kStageAtoms * kAtomWords : kStageAtoms * kAtomWords;
#pragma unroll
      for (int copy = 0; copy < kCopies; ++copy) next_dy[copy] += kStageN;
      next_n += kStageN;
      --to_fetch;
    }
    ptx::cp_async_commit();
  };

#pragma unroll 1
  for (int i = 0; i < params.depth - 1; ++i) fetch(ring + i * params.slot_bytes);

  float acc[kBlocks * kSteps][kTokenTiles][4] = {};  // inputs g and g + 8 of a step, tokens 2t and 2t + 1
  float shifted[kGroups][kTokenTiles] = {};          // token g, this lane's outputs: the second sum
  const bool offsets = args.shift_mode == ShiftMode::kOffsets;
  uint8_t* slot = ring;
  uint8_t* free_slot = ring_end - params.slot_bytes;
#pragma unroll 1
  for (int stage = 0; stage < stage_count; ++stage) {
    ptx::cp_async_wait_all_but(params.depth - 2);
    __syncwarp();
    fetch(free_slot);
#pragma unroll
    for (int row = 0; row < kGroups; ++row) {
      float2 scale[kStageAtoms][2], zero[kStageAtoms][2];
      read_pairs(scale, slot + kWeightBytes + row * kStageN * scale_size, 2 * t, args.scale_dtype);
      if (shift_size != 0) {
        read_pairs(zero, slot + shift_at + row * kStageN * shift_size, 2 * t, args.shift_dtype);
      } else {
#pragma unroll
        for (int i = 0; i < 2 * kStageAtoms; ++i) {
          zero[i / 2][i % 2] = {static_cast<float>(bias_of(kBits)), static_cast<float>(bias_of(kBits))};
        }
      }
#pragma unroll
      for (int atom = 0; atom < kStageAtoms; ++atom) {
        uint32_t b[kTokenTiles][2][kPieces<X>];
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) {
          float2 of_token[1][2];
          read_pairs(of_token, slot + dy_at + (tile * 8 + g) * kTokenBytes, atom * kAtomN + 2 * t, kTypeOf<X>);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float2 y = {of_token[0][half].x * kUp, of_token[0][half].y * kUp};
            float values[2] = {y.x * scale[atom][half].x, y.y * scale[atom][half].y};
            split(values, b[tile][half]);
            float& sum = shifted[row][tile];
            sum = fmaf(offsets ? -y.x : values[0], zero[atom][half].x, sum);
            sum = fmaf(offsets ? -y.y : values[1], zero[atom][half].y, sum);
          }
        }
        // The words of outputs g and g + 8 of a block of 32 inputs: half a tile, or a whole one.
        uint4 packed;
#pragma unroll
        for (int block = row * (kBlocks / kGroups); block < (row + 1) * (kBlocks / kGroups); ++block) {
          if (kBits == 8 || kGroups > 1 || block % 2 == 0) {
            const int tile = kBits == 8 ? block : block / 2;
            packed = reinterpret_cast<const uint4*>(slot)[(tile * kStageAtoms + atom) * 32 + lane];
          }
          uint32_t low[4], high[4];  // pairs of outputs 2t, 2t + 1 and 2t + 8, 2t + 9; inputs g + 8i of the block
          if constexpr (kBits == 4) {
            uint4_to_subnormal(ptx::transpose(block % 2 == 0 ? packed.x : packed.z), low);
            uint4_to_subnormal(ptx::transpose(block % 2 == 0 ? packed.y : packed.w), high);
          } else {
            uint32_t pairs[2];
            uint8_to_subnormal(ptx::transpose(packed.x), pairs);
            low[0] = pairs[0], low[1] = pairs[1];
            uint8_to_subnormal(ptx::transpose(packed.z), pairs);
            low[2] = pairs[0], low[3] = pairs[1];
            uint8_to_subnormal(ptx::transpose(packed.y), pairs);
            high[0] = pairs[0], high[1] = pairs[1];
            uint8_to_subnormal(ptx::transpose(packed.w), pairs);
            high[2] = pairs[0], high[3] = pairs[1];
          }
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            const uint32_t a[4] = {low[2 * step], low[2 * step + 1], high[2 * step], high[2 * step + 1]};
#pragma unroll
            for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
              for (int piece = 0; piece < kPieces<X>; ++piece) {
                ptx::mma_bf16(acc[block * kSteps + step][tile], a, b[tile][0][piece], b[tile][1][piece]);
              }
            }
          }
        }
      }
    }
    free_slot = slot;
    slot += params.slot_bytes;
    if (slot == ring_end) slot = ring;
    __syncwarp();
  }

  // Partial sums: warps of the CTA in order, then CTAs of the cluster in order.
  ptx::cp_async_wait<0>();
  __syncwarp();
  float* partial = reinterpret_cast<float*>(ring);
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
    for (int row = 0; row < kGroups; ++row) {
      float sum = shifted[row][tile];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const float of_token[2] = {__shfl_sync(0xffffffffu, sum, 8 * t), __shfl_sync(0xffffffffu, sum, 8 * t + 4)};
#pragma unroll
      for (int step = 0; step < kBlocks * kSteps / kGroups; ++step) {
        const int at = row * (kBlocks * kSteps / kGroups) + step;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // Inputs g + 8 are the odd nibbles of four-bit words, whose masks leave them 16 times as large.
          const float unscale = kBits == 4 && i / 2 == 1 ? kUnscale / 16 : kUnscale;
          partial[(tile * 8 + 2 * t + i % 2) * kPartialStride + at * 16 + i / 2 * 8 + g] =
              fmaf(acc[at][tile][i], unscale, -kDown * of_token[i % 2]);
        }
      }
    }
  }
  __syncthreads();
  constexpr int kQuads = kStripK / 4;
  const auto store = [&](int token, int quad, const float4& sum) {
    float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t k = k0 + quad * 4 + i;
      if (!(fabsf(values[i]) < INFINITY) && k < args.k)
        values[i] = exact_sum_transposed(args, batch, dy_row_of(token), k);
    }
    if (k0 + quad * 4 < args.k) finish4(params.result, batch, row_of(token), k0 + quad * 4, values);
  };
  const auto add = [](float4& sum, const float4& more) {
    sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
  };
  for (int i = threadIdx.x; i < tokens * kQuads; i += blockDim.x) {
    const int token = i / kQuads, quad = i % kQuads;
    const int at = (token * kPartialStride + quad * 4) * 4;
    float4 sum = *reinterpret_cast<const float4*>(shared + at);
    for (int w = 1; w < warps; ++w) add(sum, *reinterpret_cast<const float4*>(shared + w * params.warp_bytes + at));
    if (params.cluster == 1) {
      store(token, quad, sum);
    } else {
      *reinterpret_cast<float4*>(shared + at) = sum;  // the only thread that reads it
    }
  }
#if __CUDA_ARCH__ >= 900
  if (params.cluster > 1) {
    __syncthreads();
    ptx::cluster_share();
    for (int i = rank * blockDim.x + threadIdx.x; i < tokens * kQuads; i += params.cluster * blockDim.x) {
      const int token = i / kQuads, quad = i % kQuads;
      const float* at = reinterpret_cast<const float*>(shared) + token * kPartialStride + quad * 4;
      float4 sum = ptx::load4_shared_of_rank(at, 0);
      for (int other = 1; other < params.cluster; ++other) add(sum, ptx::load4_shared_of_rank(at, other));
      store(token, quad, sum);
    }
    ptx::cluster_leave();
  }
#endif
}

template <typename X, int kBits, int kTokenTiles, int kGroups, typename Tokens>
cudaError_t launch_instance(Params params, Tokens source, const Config& config, cudaStream_t stream) {
  const MatmulArgs& args = params.args;
  const int shift_size = args.shift_mode == ShiftMode::kNone ? 0 : element_size(args.shift_dtype);
  const int slot = weight_bytes(kBits) + kGroups * kStageN * (element_size(args.scale_dtype) + shift_size) +
                   8 * kTokenTiles * token_bytes(sizeof(X));
  const int partial = 8 * kTokenTiles * kPartialStride * 4;
  int plan_bytes = 0;
  if constexpr (Tokens::kRagged) plan_bytes = kTileRowBytes + ragged::plan_bytes(source.work.experts);
  const int budget = config.shared_bytes - plan_bytes;
  params.slot_bytes = slot;
  params.depth = std::min(budget / config.warps / slot, kMaxDepth);
  if (params.depth < 2 || partial * config.warps > budget) return cudaErrorInvalidConfiguration;
  params.warp_bytes = std::max(params.depth * slot, partial);
  params.token_tiles = static_cast<int>(ceil_div(args.m, 8 * kTokenTiles));
  params.strips = static_cast<int>(ceil_div(args.k, kStripK));
  int64_t tiles = args.batch * params.token_tiles;
  if constexpr (Tokens::kRagged) {
    if (source.work.tile_rows != 8 * kTokenTiles) return cudaErrorInvalidValue;
    params.token_tiles = 1;  // no divisor may be zero
    source.plan_at = config.warps * params.warp_bytes;
    tiles = ragged::most_tiles(source.work);
  }
  const int64_t ctas = tiles * params.strips * config.cluster;
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(ctas));
  shape.threads = config.warps * 32;
  shape.cluster = config.cluster;
  shape.shared_bytes = config.warps * params.warp_bytes + plan_bytes;
  return launch_kernel(transposed_stream_matmul<X, kBits, kTokenTiles, kGroups, Tokens>, shape, stream, params, source);
}

template <typename X, int kBits, typename Tokens>
cudaError_t launch_tokens(const Params& params, const Tokens& source, const Config& config, cudaStream_t stream) {
  const bool small_groups = params.log2_group_blocks == 0 || params.log2_group_blocks == 1;
  switch (config.token_tiles) {
    case 1:
      return small_groups ? launch_instance<X, kBits, 1, 4>(params, source, config, stream)
                          : launch_instance<X, kBits, 1, 1>(params, source, config, stream);
    case 4:  // more than the registers hold with several rows of scales
      if (!small_groups) return launch_instance<X, kBits, 4, 1>(params, source, config, stream);
      [[fallthrough]];
    case 2:
      return small_groups ? launch_instance<X, kBits, 2, 4>(params, source, config, stream)
                          : launch_instance<X, kBits, 2, 1>(params, source, config, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

template <typename X, typename Tokens>
cudaError_t launch_typed(const MatmulArgs& args, const Tokens& source, const Config& config, cudaStream_t stream) {
  Params params{};
  params.args = args;
  params.result = args;
  params.result.n = args.k;
  params.cluster = config.cluster;
  params.log2_group_blocks = log2_group_blocks(args);
  const int shift_size = args.shift_mode == ShiftMode::kNone ? 4 : element_size(args.shift_dtype);
  params.scales_in_pieces_of_4 = args.n * element_size(args.scale_dtype) % 4 == 0 && args.n * shift_size % 4 == 0;
  params.dy_in_pieces_of_16 = args.n * sizeof(X) % 16 == 0;
  if (config.warps < 1 || config.warps > max_warps(config.token_tiles)) return cudaErrorInvalidValue;
  return args.bits == 4 ? launch_tokens<X, 4>(params, source, config, stream)
                        : launch_tokens<X, 8>(params, source, config, stream);
}

}  // namespace wonly::transposed_stream
