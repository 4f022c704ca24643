// The product for up to 8 tokens on Hopper: wgmma with the weights as register operand, loaded from global memory to
// the registers that they are multiplied from, while the activations of a CTA's inputs stay in its shared memory.
//
// A CTA owns a run of outputs and walks over them 64 at a time. Its warpgroups split the inputs by stages of 128; a
// lane loads its words, some stages at once, into one of two sets of registers, and the next into the other as soon as
// these have come. The tensor copy engine brings the activations in pieces, so that the first products wait only for
// the first piece; from then on no warp waits for another before the sums are added. Codes become (code - zero) * 2^-13
// exactly, and the scale multiplies the float32 sum of a group, as in matmul_warpgroup.cuh. Of groups of 32 each lane
// of four loads the scale of one, and gives it to the others. Float zeros and offsets multiply the sums of the
// activations of 32 inputs, which mma.sync makes before the first products: one more product of tf32 numbers, two of
// which are what multiplies them and two a sum, exactly but for the last bit. Partial sums are added in a fixed order,
// and a token's result does not depend on the values or the number of others.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/exact_sum.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_resident.h"
#include "cuda/matmul_warpgroup.cuh"
#include "cuda/ptx.cuh"
#include "cuda/ptx_sm90.cuh"
#include "cuda/tensor_map.h"
#include "cuda/wgmma.cuh"
#include "layout.h"

namespace wonly::resident {

using warpgroup::Convert;
using warpgroup::convert_half;
using warpgroup::to_floats;

constexpr int kTokens = kMaxTokens;
constexpr int kThreads = kWarpgroups * 128;
constexpr int kBits = 4;
constexpr int kTiles = kStageInputs / tile_k(kBits);  // packed tiles of a stage
constexpr int kSteps = tile_k(kBits) / 16;            // products of a tile
constexpr int kStepTiles = kWarpgroups * kTiles;      // from a stage of a warpgroup to its next
constexpr int kTurn = 2 * kAhead;
constexpr uint32_t kTf32Bits = 0xffffe000u;  // of a float32
constexpr int kStageBlocks = kStageInputs / 32;
constexpr int kNoGroups = 30;  // log2 of a group of all inputs, in blocks of 32

struct Params {
  MatmulArgs args;
  Layout layout;
  int cluster;
  int log2_group_blocks;  // group size = 32 << this
  int step_scales;        // from those of a stage of a warpgroup to those of its next
  uint32_t none;          // zero, which the compiler does not know
  // What multiplies zeros and offsets is `of_shift` less the scale's bits that `scale_mask` leaves.
  uint32_t scale_mask;
  float of_shift;
};

// kGroups: scales of a stage, at least as many as it has groups. kShiftSize: bytes of a zero or offset, 0 without;
// zeros of one byte are taken off the codes, while two bytes multiply the sums of activations.
template <typename X_, int kGroups_, int kShiftSize_>
struct Shape {
  using X = X_;
  static constexpr int kGroups = kGroups_, kShiftSize = kShiftSize_;
  static constexpr bool kSums = kShiftSize == 2;
};

// Sums of a stage's activations by a warp, 2^-13 of those of each block of 32, as an operand of wgmma: eight tokens by
// four blocks in tf32, and after it what these numbers lack to float32.
template <typename X>
__device__ __forceinline__ void add_activations(const uint8_t* x, int first_row, int tokens, int lane, uint8_t* to) {
  const X one = from_float<X>(1.f);
  const uint32_t pair = pack_pair(one, one);
  const uint32_t ones[4] = {pair, pair, pair, pair};
  const int g = lane / 4, t = lane % 4, token = lane % 8;
  float mine[2] = {};  // of tokens 2t and 2t + 1, block g % 4
#pragma unroll
  for (int block = 0; block < kStageBlocks; ++block) {
    const int unit = block % 2 * 4 + lane / 8;  // of 16 bytes, swizzled
    uint32_t inputs[4];
    const int row = first_row + block / 2 * tokens + token;
    ptx::load_matrices(inputs, ptx::shared_address(x + row * 128 + (unit ^ row % 8) * 16));
    float sum[4] = {};
    if constexpr (Convert<X>::kBf16) {
      ptx::mma_bf16(sum, ones, inputs[0], inputs[1]);
      ptx::mma_bf16(sum, ones, inputs[2], inputs[3]);
    } else {
      ptx::mma_f16(sum, ones, inputs[0], inputs[1]);
      ptx::mma_f16(sum, ones, inputs[2], inputs[3]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) mine[i] = g % 4 == block ? sum[i] : mine[i];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sum = mine[i] * 0x1p-13f;
    const float first = ptx::to_tf32(sum), second = ptx::to_tf32(sum - first);
    reinterpret_cast<float*>(to)[(g / 4 * kTokens + 2 * t + i) * kStageBlocks + g % 4] = g < 4 ? first : second;
  }
}

// Where an infinity or a NaN took part, the shares of the codes and of the shift do not add up to what a weight times
// it is.
template <bool kSums>
__device__ __forceinline__ void finish_sum(const MatmulArgs& args, int64_t batch, int token, int64_t n, float sum) {
  if (kSums && !isfinite(sum) && n < args.n) sum = exact_sum(args, batch, token, n, 0, args.k);
  finish(args, batch, token, n, sum);
}

template <typename S>
__global__ void __launch_bounds__(kThreads, 1)
    resident_matmul(const __grid_constant__ Params params, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using X = typename S::X;
  using C = Convert<X>;
  constexpr int kGroups = S::kGroups, kGroupSteps = kTiles * kSteps / kGroups;
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
      ptx::barrier_expect(arrived + i, tokens * kTiles * 128 << layout.log2_piece);
      ptx::tensor_copy_4d(x + stage * tokens * (kTiles * 128), &map, 0, 0, (first_stage + stage) * kTiles, x_batch,
                          arrived + i);
    }
  }

  // Loads of a block of kAhead stages, one block before their use: words of this lane, scale and shift of its outputs,
  // rows g and g + 8 of its warp's strip, of small groups those that block t of a stage belongs to. What is not loaded
  // is multiplied by activations of zero, or belongs to outputs that nobody stores. No load stands in a branch, where
  // it would wait for those before.
  const int first_group = (first_stage + warpgroup) * kStageBlocks + (kGroups > 1 ? t : 0) >> params.log2_group_blocks;
  const int64_t first_scale = static_cast<int64_t>(first_group) * args.n;
  const uint8_t* const scales =
      static_cast<const uint8_t*>(args.scales) + (batch * args.scales_batch_stride + first_scale) * 2;
  const uint8_t* const shift =
      static_cast<const uint8_t*>(args.shift) + (batch * args.shift_batch_stride + first_scale) * S::kShiftSize;
  const int tiles = min(stages * kTiles, k_tiles - first_stage * kTiles) - warpgroup * kTiles;
  const int turns = (stages + kTurn * kWarpgroups - 1) / (kTurn * kWarpgroups);
  uint4 words[2][kAhead][kTiles] = {};
  uint32_t scale_bits[2][kAhead][2] = {}, shift_bits[2][kAhead][2] = {};
  int fetch_atom = first_atom + warp % 4, fetch_block, fetch_tiles;
  const uint32_t* fetch_words;
  int fetch_rows;  // outputs from row g on
  const uint8_t* fetch_scales;
  const uint8_t* fetch_zeros;  // of one byte; what has two lies as scales do
  const auto begin_fetch_pass = [&]() {
    fetch_block = 0;
    fetch_tiles = fetch_atom < end_atom ? tiles : 0;
    const int64_t tile =
        static_cast<int64_t>(fetch_atom / kAtomsPerTile) * k_tiles + (first_stage + warpgroup) * kTiles;
    fetch_words =
        args.qw + batch * args.qw_batch_stride + tile * kTileWords + fetch_atom % kAtomsPerTile * kAtomWords + lane * 4;
    const int n = fetch_atom * kAtomN + g;
    fetch_rows = static_cast<int>(args.n) - n;
    fetch_scales = scales + n * 2;
    fetch_zeros = shift + n;
  };
  // `none` is zero.
  const auto fetch_blocks = [&](int buffer, uint32_t none) {
    const int left = fetch_tiles | static_cast<int>(none);
#pragma unroll
    for (int stage = 0; stage < kAhead; ++stage) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int at = stage * kStepTiles + tile;
        ptx::load_once(words[buffer][stage][tile], fetch_words + at * kTileWords, at < left);
      }
      const bool wanted = stage * kStepTiles + (kGroups > 1 ? t / 2 : 0) < left;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool of_row = wanted && 8 * i < fetch_rows;
        uint32_t (&scale)[2] = scale_bits[buffer][stage], (&zero)[2] = shift_bits[buffer][stage];
        // A group that half a stage does not have keeps nothing of others, which may be infinite.
        if (kGroups > 1 && !wanted) scale[i] = zero[i] = 0;
        ptx::load_part<2>(scale[i], fetch_scales + 16 * i, of_row);
        if constexpr (S::kShiftSize == 1) ptx::load_part<1>(zero[i], fetch_zeros + 8 * i, of_row);
        if constexpr (S::kShiftSize == 2) ptx::load_part<2>(zero[i], fetch_scales + (shift - scales) + 16 * i, of_row);
      }
      fetch_scales += params.step_scales * 2;
      fetch_zeros += params.step_scales;
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

  uint8_t* const sums = shared + layout.sums_at;
  if constexpr (S::kSums) {  // of a piece when it has come, behind its branch in the loop: 14 to 25% slower
    for (int i = 0; i < layout.pieces; ++i) ptx::barrier_wait(arrived + i, 0);
    for (int stage = warp; stage < stages; stage += kThreads / 32) {
      add_activations<X>(x, stage * kTiles * tokens, tokens, lane, sums + stage * kSumBytes);
    }
    ptx::fence_shared_for_async();
    __syncthreads();
  }

  const uint64_t operands = ptx::wgmma_descriptor(x);
  const uint64_t sum_operands = ptx::wgmma_descriptor_unswizzled(sums, 0, kSumBytes / 2);
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
        // therefore go out when these have come, which a condition that depends on them makes sure of.
        if (slot == 0) fetch_blocks(1 - buffer, stage_words[0].x & params.none);
        if (index * kStepTiles < tiles) {
          const int stage = warpgroup + index * kWarpgroups;
          if (!S::kSums && pass_atom == first_atom && stage >> layout.log2_piece != piece) {
            piece = stage >> layout.log2_piece;
            ptx::barrier_wait(arrived + piece, 0);
          }
          // Of small groups lane t has the scale and the zero of block t for both rows, which it gives to the others.
          const uint32_t (&scales_of)[2] = scale_bits[buffer][slot], (&shifts_of)[2] = shift_bits[buffer][slot];
          uint32_t zero_pair = 0;
          if constexpr (S::kShiftSize == 1) {
            zero_pair = from_float2<X>(static_cast<float>(shifts_of[0]) * -0x1p-13f,
                                       static_cast<float>(shifts_of[1]) * -0x1p-13f);
          }
          float part_sums[kGroups][kTokens / 2], shift_sums[kTokens / 2];
          uint32_t codes[kTiles * kSteps][4], shift_pieces[4];
          if constexpr (S::kSums) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const uint32_t scale = __float_as_uint(to_floats<X>(scales_of[j]).x) & params.scale_mask;
              const float product = to_floats<X>(shifts_of[j]).x * (params.of_shift - __uint_as_float(scale));
              shift_pieces[j] = __float_as_uint(product) & kTf32Bits;
              shift_pieces[j + 2] = __float_as_uint(product - __uint_as_float(shift_pieces[j]));
            }
            const uint64_t operand = sum_operands + stage * (kSumBytes >> 4);
            ptx::wgmma_fence();
            ptx::wgmma_tf32(shift_sums, shift_pieces, operand, 0);
            ptx::wgmma_tf32(shift_sums, shift_pieces, operand + (kSumBytes / 2 >> 4), 1);
          }
          const uint64_t operand = operands + stage * tokens * (kTiles * 128 >> 4);
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              uint32_t minus_zero[2], pair = zero_pair;
              if (S::kShiftSize == 1 && kGroups > 1) pair = __shfl_sync(0xffffffffu, zero_pair, 2 * tile + half, 4);
              minus_zero[0] = S::kShiftSize == 0   ? C::minus_zero(bias_of(kBits))
                              : S::kShiftSize == 1 ? __byte_perm(pair, pair, 0x1010)
                                                   : 0;
              minus_zero[1] = S::kShiftSize == 1 ? __byte_perm(pair, pair, 0x3232) : minus_zero[0];
              const uint4& w = stage_words[tile];
              convert_half<X, kBits>(half == 0 ? w.x : w.z, half == 0 ? w.y : w.w, minus_zero[0], minus_zero[1],
                                     codes + tile * kSteps + half * kSteps / 2);
            }
            ptx::wgmma_fence();
#pragma unroll
            for (int of_tile = 0; of_tile < kSteps; ++of_tile) {
              const int step = tile * kSteps + of_tile, group = step / kGroupSteps;
              const uint64_t operand_x = operand + tile * tokens * (128 >> 4) + (of_tile * 32 >> 4);
              if constexpr (C::kBf16) {
                ptx::Wgmma<kTokens>::bf16(part_sums[group], codes[step], operand_x, step % kGroupSteps > 0);
              } else {
                ptx::Wgmma<kTokens>::f16(part_sums[group], codes[step], operand_x, step % kGroupSteps > 0);
              }
            }
            ptx::wgmma_commit();
          }
          const uint32_t scale_pair = __byte_perm(scales_of[0], scales_of[1], 0x5410);
          float2 scale[kGroups];
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            scale[group] = to_floats<X>(
                kGroups > 1 ? __shfl_sync(0xffffffffu, scale_pair, group * kStageBlocks / kGroups, 4) : scale_pair);
          }
          ptx::wgmma_wait<0>();
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
#pragma unroll
            for (int j = 0; j < kTokens / 2; ++j) {
              acc[j] = fmaf(j < 2 ? scale[group].x : scale[group].y, part_sums[group][j], acc[j]);
            }
          }
          if constexpr (S::kSums) {
#pragma unroll
            for (int j = 0; j < kTokens / 2; ++j) acc[j] += shift_sums[j];
          }
        }
      }
    }

    // Sums of the warpgroups in order, then of the CTAs of the cluster in order.
    if (pass_atom > first_atom) __syncthreads();  // those before are read
    const int row = warp % 4 * kAtomN + g;
#pragma unroll
    for (int j = 0; j < kTokens / 2; ++j) {
      partial[(warpgroup * kTokens + 2 * t + j % 2) * kSumStride + row + j / 2 * 8] = acc[j] * C::kUnscale;
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
        finish_sum<S::kSums>(args, batch, token, static_cast<int64_t>(pass_atom) * kAtomN + of_pass, sum);
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
      finish_sum<S::kSums>(args, batch, token, static_cast<int64_t>(first_atom) * kAtomN + row, sum);
    }
    ptx::cluster_leave();
  }
#else
  __trap();
#endif
}

template <typename X>
cudaError_t launch_typed(const MatmulArgs& args, const Config& config, int shared_bytes, cudaStream_t stream) {
  Params params{};
  params.args = args;
  params.layout = layout(args, config);
  params.cluster = config.cluster;
  params.log2_group_blocks = log2_group_blocks(args);
  if (params.log2_group_blocks < 0) params.log2_group_blocks = kNoGroups;
  params.step_scales = (kWarpgroups * kStageBlocks >> params.log2_group_blocks) * static_cast<int>(args.n);
  const bool offsets = args.shift_mode == ShiftMode::kOffsets;
  params.scale_mask = offsets ? 0 : 0xffffffffu;
  params.of_shift = offsets ? 1.f : 0.f;
  if (params.layout.bytes > shared_bytes) return cudaErrorInvalidConfiguration;
  CUtensorMap map;
  const cudaError_t error = describe_chunks(args, static_cast<int>(args.m), kTiles << params.layout.log2_piece, &map);
  if (error != cudaSuccess) return error;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(config.parts * config.cluster), static_cast<unsigned>(args.batch));
  shape.threads = kThreads;
  shape.cluster = config.cluster;
  shape.shared_bytes = static_cast<int>(params.layout.bytes);
  const auto launch = [&](auto groups, auto shift_size) {
    return launch_kernel(resident_matmul<Shape<X, groups.value, shift_size.value>>, shape, stream, params, map);
  };
  constexpr std::integral_constant<int, 0> none;
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  constexpr std::integral_constant<int, 4> four;
  const int log2 = params.log2_group_blocks;
  if (args.shift_mode == ShiftMode::kNone) return log2 < 2 ? launch(four, none) : launch(one, none);
  if (args.shift_dtype == DType::kU8) return log2 < 2 ? launch(four, one) : launch(one, one);
  return log2 < 1 ? launch(four, two) : launch(two, two);
}

}  // namespace wonly::resident
