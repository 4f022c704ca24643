// The product for 3 to 8 tokens on Hopper: wgmma with the weights as register operand, loaded from global memory to the
// registers that they are multiplied from, while the activations of a CTA's inputs stay in its shared memory.
//
// A CTA owns a run of outputs and walks over them 64 at a time. Its warpgroups split the inputs by stages of 128; a
// lane loads its words, some stages at once, into one of two sets of registers, and the next into the other as soon as
// these have come. The tensor copy engine brings the activations in pieces, so that the first products wait only for
// the first piece; from then on no warp waits for another before the sums are added. Codes become (code - zero) * 2^-13
// exactly, and the scale multiplies the float32 sum of a stage, as in matmul_warpgroup.cuh. Partial sums are added in a
// fixed order, and a token's result does not depend on the values or the number of others.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/element.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_resident.h"
#include "cuda/matmul_warpgroup.cuh"
#include "cuda/ptx.cuh"
#include "cuda/ptx_sm90.cuh"
#include "cuda/tensor_map.h"
#include "cuda/wgmma.cuh"
#include "layout.h"

namespace wonly::resident {

using warpgroup::convert;
using warpgroup::Convert;
using warpgroup::to_floats;

constexpr int kBits = 4;
constexpr int kTokens = kMaxTokens;
constexpr int kThreads = kWarpgroups * 128;
constexpr int kTiles = kStageInputs / tile_k(kBits);  // packed tiles of a stage
constexpr int kSteps = tile_k(kBits) / 16;            // products of a tile
constexpr int kStepTiles = kWarpgroups * kTiles;      // from a stage of a warpgroup to its next
constexpr int kTurn = 2 * kAhead;
constexpr int kNoGroups = 30;  // log2 of a group of all inputs, in blocks of 32

struct Params {
  MatmulArgs args;
  Layout layout;
  int cluster;
  int log2_group_blocks;  // group size = 32 << this
  uint32_t none;          // zero, which the compiler does not know
};

template <typename X, bool kZeros>
__global__ void __launch_bounds__(kThreads, 1)
    resident_matmul(const __grid_constant__ Params params, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using C = Convert<X>;
  extern __shared__ __align__(1024) uint8_t shared[];
  uint64_t* const arrived = reinterpret_cast<uint64_t*>(shared);
  uint8_t* const x = shared + kBarrierBytes;
  const MatmulArgs& args = params.args;
  const Layout& layout = params.layout;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int warpgroup = __shfl_sync(0xffffffffu, warp / 4, 0);
  const int rank = ptx::cluster_rank();
  const int part = ptx::cluster_index();
  const int64_t batch = blockIdx.y;
  const int tokens = static_cast<int>(args.m);

  const int first_atom = part * layout.atoms_each + min(part, layout.atoms_over);
  const int end_atom = first_atom + layout.atoms_each + (part < layout.atoms_over);
  const int k_tiles = static_cast<int>(args.k) / tile_k(kBits);
  const int first_stage = rank * layout.stages_each;
  const int stages = min(layout.stages_each, (k_tiles + kTiles - 1) / kTiles - first_stage);

  if (threadIdx.x == 0) {
    for (int i = 0; i < layout.pieces; ++i) ptx::barrier_init(arrived + i, 1);
    ptx::barrier_init_fence();
    const int x_batch = args.x_batch_stride == 0 ? 0 : static_cast<int>(batch);
    for (int i = 0; i < layout.pieces; ++i) {
      const int stage = i << layout.log2_piece;
      ptx::barrier_expect(arrived + i, kStageBytes << layout.log2_piece);
      ptx::tensor_copy_4d(x + stage * kStageBytes, &map, 0, 0, (first_stage + stage) * kTiles, x_batch, arrived + i);
    }
  }

  // Loads of a block of kAhead stages, one block before their use: words of this lane, scale and zero of its outputs,
  // rows g and g + 8 of its warp's strip. What is not loaded is multiplied by activations of zero, or belongs to
  // outputs that nobody stores. No load stands in a branch, where it would wait for those before.
  const int scale_row_bytes = static_cast<int>(args.n) * 2, zero_row_bytes = static_cast<int>(args.n);
  const int step_groups = kWarpgroups * kStageInputs / 32 >> params.log2_group_blocks;
  const int first_group = (first_stage + warpgroup) * (kStageInputs / 32) >> params.log2_group_blocks;
  const uint8_t* const scales = static_cast<const uint8_t*>(args.scales) + batch * args.scales_batch_stride * 2 +
                                static_cast<int64_t>(first_group) * scale_row_bytes;
  const uint8_t* const zeros = static_cast<const uint8_t*>(args.shift) + batch * args.shift_batch_stride +
                               static_cast<int64_t>(first_group) * zero_row_bytes;
  const int tiles = min(stages * kTiles, k_tiles - first_stage * kTiles) - warpgroup * kTiles;
  const int turns = (stages + kTurn * kWarpgroups - 1) / (kTurn * kWarpgroups);
  uint4 words[2][kAhead][kTiles] = {};
  uint32_t scale_bits[2][kAhead][2] = {}, zero_bits[2][kAhead][2] = {};
  int fetch_atom = first_atom + warp % 4, fetch_block, fetch_tiles;
  const uint32_t* fetch_words;
  const uint8_t* fetch_scales[2];
  const uint8_t* fetch_zeros[2];
  const auto begin_fetch_pass = [&]() {
    fetch_block = 0;
    fetch_tiles = fetch_atom < end_atom ? tiles : 0;
    const int64_t tile =
        static_cast<int64_t>(fetch_atom / kAtomsPerTile) * k_tiles + (first_stage + warpgroup) * kTiles;
    fetch_words =
        args.qw + batch * args.qw_batch_stride + tile * kTileWords + fetch_atom % kAtomsPerTile * kAtomWords + lane * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n = min(fetch_atom * kAtomN + g + 8 * i, static_cast<int>(args.n) - 1);
      fetch_scales[i] = scales + n * 2;
      fetch_zeros[i] = zeros + n;
    }
  };
  // `none` is zero.
  const auto fetch_blocks = [&](int buffer, uint32_t none) {
#pragma unroll
    for (int stage = 0; stage < kAhead; ++stage) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int at = stage * kStepTiles + tile;
        ptx::load_once(words[buffer][stage][tile], fetch_words + at * kTileWords + none, at < fetch_tiles);
      }
      const bool wanted = stage * kStepTiles < fetch_tiles;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ptx::load_part<2>(scale_bits[buffer][stage][i], fetch_scales[i] + none, wanted);
        fetch_scales[i] += step_groups * scale_row_bytes;
        if constexpr (kZeros) {
          ptx::load_part<1>(zero_bits[buffer][stage][i], fetch_zeros[i] + none, wanted);
          fetch_zeros[i] += step_groups * zero_row_bytes;
        }
      }
    }
    fetch_words += kAhead * kStepTiles * kTileWords;
    fetch_tiles -= kAhead * kStepTiles;
    if (++fetch_block == 2 * turns) {
      fetch_atom += kPassAtoms;
      begin_fetch_pass();
    }
  };
  begin_fetch_pass();
  fetch_blocks(0, 0);
  __syncthreads();

  const uint64_t operands = ptx::wgmma_descriptor(x);
  float* const partial = reinterpret_cast<float*>(shared + layout.partial_at);
  float* const total = reinterpret_cast<float*>(shared + layout.total_at);
  const int part_rows = (layout.atoms_each + (layout.atoms_over > 0)) * kAtomN;
#pragma unroll 1
  for (int pass_atom = first_atom; pass_atom < end_atom; pass_atom += kPassAtoms) {
    float acc[kTokens / 2] = {};
    int piece = -1;  // the last that was waited for
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
      for (int i = 0; i < kTurn; ++i) {
        const int buffer = i / kAhead, slot = i % kAhead, index = turn * kTurn + i;
        const uint4(&stage_words)[kTiles] = words[buffer][slot];
        // Loads are counted together, so whoever waits for some waits for all that were asked for before. The next ones
        // therefore go out when these have come, which an address that depends on them makes sure of.
        if (slot == 0) fetch_blocks(1 - buffer, stage_words[0].x & params.none);
        if (index * kStepTiles < tiles) {
          const int stage = warpgroup + index * kWarpgroups;
          if (pass_atom == first_atom && stage >> layout.log2_piece != piece) {
            piece = stage >> layout.log2_piece;
            ptx::barrier_wait(arrived + piece, 0);
          }
          uint32_t minus_zero[2];
          float scale[2], part_sums[kTokens / 2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            scale[j] = to_floats<X>(scale_bits[buffer][slot][j]).x * C::kUnscale;
            minus_zero[j] = C::minus_zero(kZeros ? static_cast<float>(zero_bits[buffer][slot][j]) : bias_of(kBits));
          }
          uint32_t codes[kTiles][kSteps][4];
          const uint64_t operand = operands + stage * (kStageBytes >> 4);
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            convert<X, kBits>(stage_words[tile], minus_zero[0], minus_zero[1], codes[tile]);
            ptx::wgmma_fence();
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
              const uint64_t operand_x = operand + ((tile * kChunkBytes + step * 32) >> 4);
              if constexpr (C::kBf16) {
                ptx::Wgmma<kTokens>::bf16(part_sums, codes[tile][step], operand_x, tile + step > 0);
              } else {
                ptx::Wgmma<kTokens>::f16(part_sums, codes[tile][step], operand_x, tile + step > 0);
              }
            }
            ptx::wgmma_commit();
          }
          ptx::wgmma_wait<0>();
#pragma unroll
          for (int j = 0; j < kTokens / 2; ++j) acc[j] = fmaf(scale[j % 4 / 2], part_sums[j], acc[j]);
        }
      }
    }

    // Sums of the warpgroups in order, then of the CTAs of the cluster in order.
    if (pass_atom > first_atom) __syncthreads();  // those before are read
    const int row = warp % 4 * kAtomN + g;
#pragma unroll
    for (int j = 0; j < kTokens / 2; ++j) {
      partial[(warpgroup * kTokens + 2 * t + j % 2) * kSumStride + row + j / 2 * 8] = acc[j];
    }
    __syncthreads();
    const int rows = min(kTileN, (end_atom - pass_atom) * kAtomN);
    for (int i = threadIdx.x; i < tokens * kTileN; i += kThreads) {
      const int token = i / kTileN, of_pass = i % kTileN;
      if (of_pass >= rows) continue;
      float sum = 0.f;
#pragma unroll
      for (int other = 0; other < kWarpgroups; ++other) {
        sum += partial[(other * kTokens + token) * kSumStride + of_pass];
      }
      if (params.cluster == 1) {
        finish(args, batch, token, static_cast<int64_t>(pass_atom) * kAtomN + of_pass, sum);
      } else {
        total[token * part_rows + (pass_atom - first_atom) * kAtomN + of_pass] = sum;
      }
    }
  }
  if (params.cluster > 1) {
    __syncthreads();
    ptx::cluster_share();
    const int rows = (end_atom - first_atom) * kAtomN;
    for (int i = rank * kThreads + threadIdx.x; i < tokens * rows; i += params.cluster * kThreads) {
      const int token = i / rows, row = i % rows;
      float sum = 0.f;
      for (int other = 0; other < params.cluster; ++other) {
        sum += ptx::load_shared_of_rank(total + token * part_rows + row, other);
      }
      finish(args, batch, token, static_cast<int64_t>(first_atom) * kAtomN + row, sum);
    }
    ptx::cluster_leave();
  }
#else
  __trap();
#endif
}

template <typename X>
cudaError_t launch_typed(const MatmulArgs& args, const Config& config, int shared_bytes, cudaStream_t stream) {
  Params params{args, layout(args, config), config.cluster, log2_group_blocks(args), 0};
  if (params.log2_group_blocks < 0) params.log2_group_blocks = kNoGroups;
  if (params.layout.bytes > shared_bytes) return cudaErrorInvalidConfiguration;
  CUtensorMap map;
  const cudaError_t error = describe_chunks(args, kTokens, kTiles << params.layout.log2_piece, &map);
  if (error != cudaSuccess) return error;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(config.parts * config.cluster), static_cast<unsigned>(args.batch));
  shape.threads = kThreads;
  shape.cluster = config.cluster;
  shape.shared_bytes = static_cast<int>(params.layout.bytes);
  return args.shift_mode == ShiftMode::kNone ? launch_kernel(resident_matmul<X, false>, shape, stream, params, map)
                                             : launch_kernel(resident_matmul<X, true>, shape, stream, params, map);
}

}  // namespace wonly::resident
