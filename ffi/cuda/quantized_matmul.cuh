// The product of int8 or e4m3 activations with packed weights for hundreds of tokens and more on Hopper: wgmma of bytes
// with the weights as the register operand.
//
// As in matmul_tiled.cuh two CTAs of a cluster compute neighbouring blocks of 128 outputs for the same 256 tokens, a
// producer warp keeps a ring of stages full, and two warpgroups of 64 outputs multiply; a stage is 128 inputs. Codes
// become signed bytes in one to six instructions for four of them: they lose their zero where it is an integer that
// leaves a byte, and four bits become e4m3 by their sign, for a nibble is an e4m3 number in units of 2^-9.
//
// kRows: a row of x and an output have one scale each. int8 sums stay integers to the end, and are exact. Sums of e4m3
// products, which the tensor cores keep to 14 bits or so, are added in float32 after every stage. kBlocks: the sums of
// a stage are added to float32 ones, a part of the tokens at a time: registers hold two such parts, one of which the
// tensor cores make while the other is added. What the sums are multiplied by, the products of an output's scale and a
// token's, the tensor cores make too: three pieces of bfloat16 are a float32 scale, and eight products of pieces what
// there is of two of them. So they need not be read from shared memory, which copies and operands keep busy, and each
// sum takes one conversion and one multiply-add. kShiftedBlocks: scaled sums with the other three terms of (s_x q +
// o_x) (s_w c + o_w), from the sums of both codes, a quarter of the tokens at a time.
#pragma once

#include <type_traits>

#include "cuda/cluster_tiles.cuh"
#include "cuda/element.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/launch.h"
#include "cuda/ptx_sm90.cuh"
#include "cuda/quantized_matmul.h"
#include "cuda/rounded_weights.cuh"
#include "cuda/tensor_map.h"
#include "cuda/wgmma.cuh"
#include "layout.h"

namespace wonly::quantized {

constexpr int kStageK = 128;
constexpr int kSteps = kStageK / 32;
constexpr int kTokens = 256;
constexpr int kCluster = tiles::kCluster;
constexpr int kStagedTokens = 16;  // that a warpgroup writes at a time, as float32
constexpr int kPlacedTokens = 32;  // or as 16 bits
using tiles::Consumer, tiles::kOutputs, tiles::kWarpgroups;

enum class Mode { kRows, kBlocks, kShiftedBlocks };

// Of one output and group: w = scale * (c - zero) + shift for the codes c, where 128 - zero is `lift` in every byte.
struct alignas(16) Factor {
  float scale, shift;
  uint32_t lift, unused;
};

template <int kBits_, bool kFloat8_, Mode kMode_>
struct Shape {
  static constexpr int kBits = kBits_;
  static constexpr bool kFloat8 = kFloat8_;
  static constexpr Mode kMode = kMode_;
  static_assert(!kFloat8 || kBits == 4);
  static constexpr bool kRows = kMode == Mode::kRows;
  static constexpr bool kExact = kRows && !kFloat8;  // sums are integers to the end
  static constexpr bool kBlocks = kMode == Mode::kBlocks;
  static constexpr bool kShifted = kMode == Mode::kShiftedBlocks;
  static constexpr bool kSixteenfold = kMode == Mode::kBlocks && kBits == 4 && !kFloat8;  // where 8 is the zero of all
  static constexpr int kStepWords = kBits / 2;            // of 32 inputs, for a lane's two outputs
  static constexpr int kTiles = kStageK / tile_k(kBits);  // packed tiles of a stage along the inputs
  static constexpr int kXBytes = kTokens * kStageK;
  static constexpr int kWeightBytes = kTiles * kTileBytes;  // of a warpgroup
  static constexpr int kFactorsAt = kXBytes + kWarpgroups * kWeightBytes;
  static constexpr int kLiftsAt = kFactorsAt + (kRows ? 0 : kOutputs * static_cast<int>(sizeof(Factor)));
  static constexpr int kTokensAt = kLiftsAt + (kBlocks && kBits == 4 ? kOutputs * 4 : 0);
  static constexpr int kTokenArrays = kBlocks ? 4 : kShifted ? 3 : 0;  // pieces of the scale; scale, sum, offset
  static constexpr int kStageBytes = (kTokensAt + kTokenArrays * kTokens * 4 + 1023) / 1024 * 1024;
  static constexpr int kGatherWarps = kRows ? 0 : 3;  // of the producer's: one of factors, two of tokens
  static constexpr int kStagedBytes = kWarpgroups * kStagedTokens * tiles::kStagedStride * 4;
  static constexpr int kRowBytes = kRows ? kWarpgroups * 3 * kTokens * 4 : 0;  // scale, sum and offset of the tokens
  static constexpr int kFit = ((227 << 10) - tiles::kBarrierBytes - kStagedBytes - kRowBytes) / kStageBytes;
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  static constexpr int kStagedAt = tiles::kBarrierBytes + kStages * kStageBytes;
  static constexpr int kRowsAt = kStagedAt + kStagedBytes;
  static constexpr int kSharedBytes = kRowsAt + kRowBytes;
  static_assert(kStages >= 4);
  static_assert(kStagedTokens * tiles::kStagedStride * 4 >= kPlacedTokens * kTileN * 2);
};

struct Params {
  QuantizedMatmulArgs args;
  int token_tiles, row_tiles;  // row tiles: of kCluster * kOutputs outputs
  int tiles;
  int log2_group_stages;      // a group of the weights is 1 << this stages; -1: all
  int log2_x_group_stages;    // the same of x
  int log2_sum_group_stages;  // the smaller of both
};

__device__ __forceinline__ int group_of(int stage, int log2_stages) {
  return log2_stages < 0 ? 0 : stage >> log2_stages;
}

// Where a stage has what belongs to a token: a lane's four of 16, as they are in its sums, lie next to each other.
__device__ __forceinline__ int token_place(int token) {
  return (token & ~15) + token % 8 / 2 * 4 + token / 8 % 2 * 2 + token % 2;
}

// A scale and a shift of an output and group as the factor of its codes.
template <typename S>
__device__ __forceinline__ Factor factor_of(const MatmulArgs& args, float scale, float shift) {
  Factor to{};
  to.scale = scale;
  float zero = static_cast<float>(bias_of(S::kBits));
  if (S::kBits == 4 && args.shift_mode == ShiftMode::kZeros && args.shift_dtype == DType::kU8) {
    zero = shift;
  } else if (args.shift_mode == ShiftMode::kZeros) {
    to.shift = (zero - shift) * to.scale;
  } else if (args.shift_mode == ShiftMode::kOffsets) {
    to.shift = fmaf(zero, to.scale, shift);
  }
  if (S::kFloat8) to.scale *= 512.f;  // codes of weights count 2^-9
  if (S::kSixteenfold && args.shift_mode == ShiftMode::kNone) to.scale *= 1.f / 16;
  to.lift = static_cast<uint32_t>(128 - static_cast<int>(zero)) * 0x01010101u;
  return to;
}

// A float32 scale as the sum of three numbers of 16 bits, and these as the operands of a product of scales: over eight
// inputs, in which all pieces of one meet those of the other but for the smallest two.
struct Pieces {
  __nv_bfloat16 high, middle, low;

  __device__ explicit Pieces(float scale) {
    high = __float2bfloat16(scale);
    const float rest = scale - __bfloat162float(high);
    middle = __float2bfloat16(rest);
    low = __float2bfloat16(rest - __bfloat162float(middle));
  }
  __device__ uint4 of_output() const {
    return {pack_pair(high, high), pack_pair(high, middle), pack_pair(middle, middle), pack_pair(low, low)};
  }
  __device__ uint4 of_token() const {
    return {pack_pair(high, middle), pack_pair(low, high), pack_pair(middle, low), pack_pair(high, middle)};
  }
};

// Sixteen times a packed word's codes of four bits less 8, as signed_bytes: a nibble in the upper half of a byte, with
// its highest bit the other way, is that.
__device__ __forceinline__ void sixteenfold_bytes(uint32_t word, uint32_t& first, uint32_t& second) {
  const uint32_t low = word << 4;
  first = __byte_perm(low, word, 0x6240) & 0xf0f0f0f0u ^ 0x80808080u;
  second = __byte_perm(low, word, 0x7351) & 0xf0f0f0f0u ^ 0x80808080u;
}

// A packed word's codes less their zero, as operands: for four bits those of both steps of 16 inputs.
template <typename S>
__device__ __forceinline__ void signed_bytes(uint32_t word, uint32_t lift, uint32_t& first, uint32_t& second) {
  static_assert(S::kBits == 4);
  const uint32_t low = word & 0x0f0f0f0fu, high = word >> 4 & 0x0f0f0f0fu;
  uint32_t codes[2] = {__byte_perm(low, high, 0x6240), __byte_perm(low, high, 0x7351)};
#pragma unroll
  for (uint32_t& four : codes) {
    four += lift;                // 128 + (code - zero): no byte overflows
    if constexpr (S::kFloat8) {  // sign and magnitude
      const uint32_t negative = ~four >> 7 & 0x01010101u;
      four = ((four & 0x7f7f7f7fu) ^ negative * 0x7fu) + negative * 0x81u;
    } else {
      four ^= 0x80808080u;
    }
  }
  first = codes[0];
  second = codes[1];
}

template <typename S>
__global__ void __launch_bounds__(tiles::kThreads, 1)
    quantized_matmul(const __grid_constant__ Params params, const __grid_constant__ CUtensorMap x_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  tiles::Ring<S::kStages, S::kStageBytes> ring(shared);

  const QuantizedMatmulArgs& all = params.args;
  const MatmulArgs& args = all.product;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);  // known to be uniform
  const int lane = threadIdx.x % 32;
  const int rank = blockIdx.x % kCluster;
  const int stages = static_cast<int>(ceil_div(args.k, kStageK));
  const int k_tiles = static_cast<int>(ceil_div(args.k, tile_k(S::kBits)));
  const int cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;

  struct Tile {
    int batch, m0, n0;
  };
  const auto tile_at = [&](int index) {
    const int of_batch = params.token_tiles * params.row_tiles;
    const tiles::Place place = tiles::place_of(index % of_batch, params.token_tiles, params.row_tiles);
    Tile tile;
    tile.batch = index / of_batch;
    tile.m0 = place.row * kTokens;
    tile.n0 = (place.column * kCluster + rank) * kOutputs;
    return tile;
  };

  ring.init(1, S::kGatherWarps, kCluster);
  ring.meet(kCluster);

  if (warp >= kWarpgroups * 4) {
    ptx::lower_registers<tiles::kProducerRegisters>();
    const int producer = warp - kWarpgroups * 4;
    if (producer == 0) {
      for (int index = cluster; index < params.tiles; index += clusters) {
        const Tile tile = tile_at(index);
        const tiles::Strips<S::kBits, S::kTiles> strips(args, tile.batch, tile.n0);
        const int x_batch = args.x_batch_stride == 0 ? 0 : tile.batch;
        for (int stage = 0; stage < stages; ++stage, ring.advance()) {
          ring.wait_empty();
          if (!ptx::elect_one()) continue;
          ptx::barrier_expect(ring.filled(), S::kXBytes + strips.count * strips.bytes(stage));
          ptx::tensor_copy_3d_multicast(ring.stage() + rank * (S::kXBytes / kCluster), &x_map, stage * kStageK,
                                        tile.m0 + rank * (kTokens / kCluster), x_batch, ring.filled(),
                                        (1 << kCluster) - 1);
          strips.copy(ring.stage() + S::kXBytes, stage, ring.filled());
        }
      }
    } else if constexpr (!S::kRows) {
      if (producer == 1) {
        // Factors of the outputs: the next stages' are on their way while this one's wait for room.
        const auto gather = [&](auto scale_type, auto shift_type) {
          using Scale = decltype(scale_type);
          using Shift = decltype(shift_type);
          constexpr bool kShift = !std::is_same_v<Shift, NoShift>;
          constexpr int kEach = kOutputs / 32;
          for (int index = cluster; index < params.tiles; index += clusters) {
            const Tile tile = tile_at(index);
            const int64_t first = tile.n0 + lane;
            const int left = static_cast<int>(min(args.n - first, int64_t{kOutputs}));
            const auto* const scales =
                static_cast<const Scale*>(args.scales) + tile.batch * args.scales_batch_stride + first;
            const auto* const shifts =
                static_cast<const Shift*>(args.shift) + tile.batch * args.shift_batch_stride + first;
            Scale scale[2][kEach];
            Shift shift[2][kEach];
            const auto fetch = [&](int stage, auto& to_scale, auto& to_shift) {
              const int64_t row = group_of(stage, params.log2_group_stages) * args.n;
#pragma unroll
              for (int i = 0; i < kEach; ++i) {
                to_scale[i] = 32 * i < left ? scales[row + 32 * i] : Scale{};
                if constexpr (kShift) to_shift[i] = 32 * i < left ? shifts[row + 32 * i] : Shift{};
              }
            };
            fetch(0, scale[0], shift[0]);
            if (stages > 1) fetch(1, scale[1], shift[1]);
            for (int stage = 0; stage < stages; stage += 2) {
#pragma unroll
              for (int next = 0; next < 2; ++next) {
                if (stage + next == stages) break;
                ring.wait_empty();
                Factor* const to = reinterpret_cast<Factor*>(ring.stage() + S::kFactorsAt) + lane;
#pragma unroll
                for (int i = 0; i < kEach; ++i) {
                  float of_shift = 0.f;
                  if constexpr (kShift) of_shift = to_float(shift[next][i]);
                  const Factor factor = factor_of<S>(args, to_float(scale[next][i]), of_shift);
                  if constexpr (S::kBlocks) {
                    reinterpret_cast<uint4*>(to)[32 * i] = Pieces(factor.scale).of_output();
                    if constexpr (S::kBits == 4) {
                      reinterpret_cast<uint32_t*>(ring.stage() + S::kLiftsAt)[lane + 32 * i] = factor.lift;
                    }
                  } else {
                    to[32 * i] = factor;
                  }
                }
                ring.fill(lane);
                ring.advance();
                if (stage + next + 2 < stages) fetch(stage + next + 2, scale[next], shift[next]);
              }
            }
          }
        };
        const auto with_shift = [&](auto scale) {
          if (args.shift_mode == ShiftMode::kNone) return gather(scale, NoShift{});
          if constexpr (S::kBits == 4 || S::kShifted) {
            if (args.shift_dtype == DType::kU8) return gather(scale, uint8_t{});
          }
          if constexpr (S::kShifted) {
            if (args.shift_dtype == DType::kF16) return gather(scale, __half{});
            if (args.shift_dtype == DType::kBF16) return gather(scale, __nv_bfloat16{});
            gather(scale, float{});
          }
        };
        if (args.scale_dtype == DType::kF16) {
          with_shift(__half{});
        } else if (args.scale_dtype == DType::kBF16) {
          with_shift(__nv_bfloat16{});
        } else {
          with_shift(float{});
        }
      } else if constexpr (S::kBlocks) {
        // Scales of the tokens, of several stages at a time: each of a warp's loads takes a wavefront for every token.
        constexpr int kEach = kTokens / 64, kRun = 4;
        const int first = (producer - 2) * (kTokens / 2) + lane;
        const bool vectors = params.log2_x_group_stages == 0 && all.x_groups % kRun == 0 &&
                             reinterpret_cast<uintptr_t>(all.x_scales) % 16 == 0;
        for (int index = cluster; index < params.tiles; index += clusters) {
          const Tile tile = tile_at(index);
          const int64_t token = tile.m0 + first;
          const int left = static_cast<int>(min(args.m - token, int64_t{kTokens}));
          const float* const scales = all.x_scales + tile.batch * all.x_scales_batch_stride + token * all.x_groups;
          float values[kEach][kRun] = {};
          for (int stage = 0; stage < stages; stage += kRun) {
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
              if (32 * i >= left || (stage > 0 && params.log2_x_group_stages < 0)) continue;
              const float* const from = scales + i * 32 * all.x_groups;
              if (vectors) {
                const float4 four = __ldg(reinterpret_cast<const float4*>(from + stage));
                values[i][0] = four.x, values[i][1] = four.y, values[i][2] = four.z, values[i][3] = four.w;
              } else {
#pragma unroll
                for (int j = 0; j < kRun; ++j) {
                  values[i][j] = __ldg(from + group_of(min(stage + j, stages - 1), params.log2_x_group_stages));
                }
              }
            }
#pragma unroll
            for (int j = 0; j < kRun; ++j) {
              if (stage + j == stages) break;
              ring.wait_empty();
              uint4* const to = reinterpret_cast<uint4*>(ring.stage() + S::kTokensAt) + first;
#pragma unroll
              for (int i = 0; i < kEach; ++i) to[32 * i] = Pieces(values[i][j]).of_token();
              ptx::fence_shared_for_async();  // wgmma reads them
              ring.fill(lane);
              ring.advance();
            }
          }
        }
      } else {
        // Scales of the tokens, sums and offsets, likewise.
        constexpr int kEach = kTokens / 64;
        const int first = (producer - 2) * (kTokens / 2) + lane;
        const int place = (producer - 2) * (kTokens / 2) + token_place(lane);
        const int64_t sum_groups = max(all.x_groups, args.groups);
        for (int index = cluster; index < params.tiles; index += clusters) {
          const Tile tile = tile_at(index);
          const int64_t token = tile.m0 + first;
          const int left = static_cast<int>(min(args.m - token, int64_t{kTokens}));
          const int64_t scale_at = tile.batch * all.x_scales_batch_stride + token * all.x_groups;
          const int64_t sum_at = tile.batch * all.x_sums_batch_stride + token * sum_groups;
          float values[2][S::kTokenArrays][kEach];
          const auto fetch = [&](int stage, float (&to)[S::kTokenArrays][kEach]) {
            const int64_t at = scale_at + group_of(stage, params.log2_x_group_stages);
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
#pragma unroll
              for (int array = 0; array < S::kTokenArrays; ++array) to[array][i] = 0.f;
              if (32 * i >= left) continue;
              to[0][i] = __ldg(all.x_scales + at + i * 32 * all.x_groups);
              if constexpr (S::kShifted) {
                // Of a group of several stages each has its share of the sum: the last of them counts it.
                const bool last = params.log2_sum_group_stages < 0
                                      ? stage + 1 == stages
                                      : (stage + 1 & (1 << params.log2_sum_group_stages) - 1) == 0;
                if (all.x_sums != nullptr && last) {
                  const int64_t sum = sum_at + i * 32 * sum_groups + group_of(stage, params.log2_sum_group_stages);
                  to[1][i] = S::kFloat8 ? static_cast<const float*>(all.x_sums)[sum]
                                        : static_cast<float>(static_cast<const int32_t*>(all.x_sums)[sum]);
                }
                if (all.x_offsets != nullptr) to[2][i] = __ldg(all.x_offsets + at + i * 32 * all.x_groups);
              }
            }
          };
          fetch(0, values[0]);
          if (stages > 1) fetch(1, values[1]);
          for (int stage = 0; stage < stages; stage += 2) {
#pragma unroll
            for (int next = 0; next < 2; ++next) {
              if (stage + next == stages) break;
              ring.wait_empty();
              float* to = reinterpret_cast<float*>(ring.stage() + S::kTokensAt) + place;
#pragma unroll
              for (int array = 0; array < S::kTokenArrays; ++array) {
#pragma unroll
                for (int i = 0; i < kEach; ++i) to[array * kTokens + 32 * i] = values[next][array][i];
              }
              ring.fill(lane);
              ring.advance();
              if (stage + next + 2 < stages) fetch(stage + next + 2, values[next]);
            }
          }
        }
      }
    }
    __syncwarp();
  } else {
    ptx::raise_registers<tiles::kConsumerRegisters>();
    const Consumer me{warp / 4, warp % 4};
    float* const staged =
        reinterpret_cast<float*>(shared + S::kStagedAt) + me.warpgroup * kStagedTokens * tiles::kStagedStride;
    float* const of_tokens = reinterpret_cast<float*>(shared + S::kRowsAt) + me.warpgroup * 3 * kTokens;  // kRows
    const bool sixteenfold = S::kSixteenfold && args.shift_mode == ShiftMode::kNone;
    const bool is_static = all.fused != nullptr;
    const bool plain =
        args.activation == Activation::kNone && args.y_dtype != DType::kF32 && !is_static && args.n % 8 == 0;
    const bool sums_weights = all.x_offsets != nullptr;
    for (int index = cluster; index < params.tiles; index += clusters) {
      const Tile tile = tile_at(index);
      const int n0 = tile.n0 + me.warpgroup * kTileN;
      prefetch_bias(args, tile.batch, n0, kTileN, me.thread());
      const auto output = [&](int i) { return min(int64_t{n0} + me.row() + 8 * i, args.n - 1); };
      Factor factor[2] = {};
      int weight_sums[2] = {};  // of codes less their zeros: over this lane's inputs of a group
      if constexpr (S::kRows) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int64_t at = output(i);
          float shift = 0.f;
          if (args.shift_mode != ShiftMode::kNone) {
            shift = load_element(args.shift, tile.batch * args.shift_batch_stride + at, args.shift_dtype);
          }
          factor[i] = factor_of<S>(
              args, load_element(args.scales, tile.batch * args.scales_batch_stride + at, args.scale_dtype), shift);
        }
#pragma unroll
        for (int i = 0; i < kTokens / 128; ++i) {
          const int64_t m = min(int64_t{tile.m0} + me.thread() + 128 * i, args.m - 1);
          const int64_t at = tile.batch * all.x_scales_batch_stride + m;
          const int64_t sum_at = tile.batch * all.x_sums_batch_stride + m;
          float sum = 0.f;
          if (all.x_sums != nullptr) {
            sum = S::kFloat8 ? static_cast<const float*>(all.x_sums)[sum_at]
                             : static_cast<float>(static_cast<const int32_t*>(all.x_sums)[sum_at]);
          }
          of_tokens[me.thread() + 128 * i] = is_static ? 1.f : all.x_scales[at];
          of_tokens[kTokens + me.thread() + 128 * i] = sum;
          of_tokens[2 * kTokens + me.thread() + 128 * i] = sums_weights ? all.x_offsets[at] : 0.f;
        }
      }

      // Packed words of 32 inputs of the stage at `slot`, which has landed.
      const auto load_step = [&](int step, uint32_t (&words)[S::kStepWords]) {
        const uint8_t* data = ring.stage() + S::kXBytes + me.warpgroup * S::kWeightBytes;
        const int tile = S::kBits == 4 ? step / 2 : step;
        const uint4* const vector = reinterpret_cast<const uint4*>(data + tile * kTileBytes) + me.thread();
        if constexpr (S::kBits == 4) {
          const uint2 two = reinterpret_cast<const uint2*>(vector)[step % 2];
          words[0] = two.x;
          words[1] = two.y;
        } else {
          const uint4 four = *vector;
          words[0] = four.x;
          words[1] = four.y;
          words[2] = four.z;
          words[3] = four.w;
        }
      };
      // Their codes as operands.
      const auto convert_step = [&](int stage, int step, const uint32_t (&words)[S::kStepWords], uint32_t (&to)[4],
                                    bool sixteenfold = false) {
        if (S::kBits == 4 && sixteenfold) {
          sixteenfold_bytes(words[0], to[0], to[2]);
          sixteenfold_bytes(words[1], to[1], to[3]);
        } else if constexpr (S::kBits == 4) {
          signed_bytes<S>(words[0], factor[0].lift, to[0], to[2]);
          signed_bytes<S>(words[1], factor[1].lift, to[1], to[3]);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) to[i] = words[i] ^ 0x80808080u;
        }
        if (!S::kFloat8 && sums_weights && stage * S::kTiles + (S::kBits == 4 ? step / 2 : step) < k_tiles) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            weight_sums[i % 2] = __dp4a(static_cast<int>(to[i]), 0x01010101, weight_sums[i % 2]);
          }
        }
      };
      // Of the whole group, in all lanes that have its output.
      const auto total_weights = [&](int i) {
        int sum = weight_sums[i];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        return sum;
      };

      std::conditional_t<S::kExact, int, float> acc[kTokens / 2] = {};
      if constexpr (S::kExact) {
        const auto multiply_half = [&](int half, const uint32_t (&with)[kSteps / 2][4]) {
          const uint64_t x = ptx::wgmma_descriptor(ring.stage());
          ptx::wgmma_fence();
#pragma unroll
          for (int i = 0; i < kSteps / 2; ++i) {
            ptx::WgmmaBytes<kTokens>::s8(acc, with[i], x + ((half * kSteps / 2 + i) * 32 >> 4), true);
          }
          ptx::wgmma_commit();
        };
        uint32_t first[kSteps / 2][4], second[kSteps / 2][4];
        const auto operands = [&](int stage, int half, uint32_t (&to)[kSteps / 2][4]) {
          uint32_t words[kSteps / 2][S::kStepWords];
#pragma unroll
          for (int i = 0; i < kSteps / 2; ++i) load_step(half * kSteps / 2 + i, words[i]);
#pragma unroll
          for (int i = 0; i < kSteps / 2; ++i) convert_step(stage, half * kSteps / 2 + i, words[i], to[i]);
        };
        const auto prepare = [&](int stage) {
          ring.wait_full();
          operands(stage, 0, first);
        };
        prepare(0);
        int last_slot = 0;
#pragma unroll 1
        for (int stage = 0; stage < stages; ++stage) {
          multiply_half(0, first);
          ptx::wgmma_wait<1>();
          if (stage > 0) ring.release(last_slot, lane, kCluster);
          operands(stage, 1, second);
          multiply_half(1, second);
          ptx::wgmma_wait<1>();
          last_slot = ring.at.slot;
          ring.advance();
          if (stage + 1 < stages) prepare(stage + 1);
        }
        ptx::wgmma_wait<0>();
        ring.release(last_slot, lane, kCluster);
      } else if constexpr (S::kBlocks) {
        using Sum = std::conditional_t<S::kFloat8, float, int>;
        constexpr int kPart = 32, kParts = kTokens / kPart;
        Sum sums[2][kPart / 2];
        float scales[2][kPart / 2];
        uint32_t words[kSteps][S::kStepWords], codes[kSteps][4];
        uint32_t output_scales[4] = {};  // their scales; there are eight inputs, not sixteen
        // Descriptors are added to, not made anew: the compiler must not see what they consist of.
        uint64_t x = ptx::wgmma_descriptor(ring.stages);
        uint64_t token_scales = ptx::wgmma_descriptor_unswizzled(ring.stages + S::kTokensAt, 0, 128);
        asm volatile("" : "+l"(x), "+l"(token_scales));
        const auto multiply = [&](int slot, int part) {
          Sum(&to)[kPart / 2] = sums[part % 2];
          float (&scale)[kPart / 2] = scales[part % 2];
          const auto at = static_cast<unsigned>(slot * (S::kStageBytes >> 4));
          ptx::keep(to);
          ptx::keep(scale);
          ptx::wgmma_fence();
          ptx::Wgmma<kPart>::bf16(scale, output_scales, token_scales + at + part * kPart, false);
#pragma unroll
          for (int i = 0; i < kSteps; ++i) {
            const uint64_t inputs = x + at + (part * kPart * kStageK + i * 32 >> 4);
            if constexpr (S::kFloat8) {
              ptx::WgmmaBytes<kPart>::e4m3(to, codes[i], inputs, i > 0);
            } else {
              ptx::WgmmaBytes<kPart>::s8(to, codes[i], inputs, i > 0);
            }
          }
          ptx::wgmma_commit();
        };
        const auto load = [&] {
          const int row = me.warpgroup * kTileN + me.row();
          const auto* const scale =
              reinterpret_cast<const uint32_t*>(ring.stage() + S::kFactorsAt) + row * 4 + lane % 4;
          output_scales[0] = scale[0];
          output_scales[1] = scale[8 * 4];
          if constexpr (S::kBits == 4) {
            const auto* const lift = reinterpret_cast<const uint32_t*>(ring.stage() + S::kLiftsAt) + row;
            factor[0].lift = lift[0];
            factor[1].lift = lift[8];
          }
#pragma unroll
          for (int i = 0; i < kSteps; ++i) load_step(i, words[i]);
        };
        const auto convert = [&](int stage) {
          if (sixteenfold) {
#pragma unroll
            for (int i = 0; i < kSteps; ++i) convert_step(stage, i, words[i], codes[i], true);
          } else {
#pragma unroll
            for (int i = 0; i < kSteps; ++i) convert_step(stage, i, words[i], codes[i]);
          }
#pragma unroll
          for (int i = 0; i < kSteps; ++i) ptx::keep(codes[i]);  // before the first product, which they would hold up
        };
        ring.wait_full();
        load();
        convert(0);
#pragma unroll 1
        for (int stage = 0; stage < stages; ++stage) {
          const int slot = ring.at.slot;
          multiply(slot, 0);
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            if (part + 2 == kParts) {
              // Here, where products are under way; after the last stage the same once more, which nobody uses.
              if (stage + 1 < stages) ring.advance();
              ring.wait_full();
            }
            if (part + 1 < kParts) {
              multiply(slot, part + 1);
              ptx::wgmma_wait<1>();
            } else {
              ptx::wgmma_wait<0>();
              load();
            }
            Sum(&from)[kPart / 2] = sums[part % 2];
            float (&scale)[kPart / 2] = scales[part % 2];
            ptx::keep(from);
            ptx::keep(scale);
#pragma unroll
            for (int i = 0; i < kPart / 2; ++i) {
              float& to = acc[part * (kPart / 2) + i];
              to = fmaf(static_cast<float>(from[i]), scale[i], to);
            }
          }
          convert(stage + 1);
          ring.release(slot, lane, kCluster);
        }
        ring.advance();
      } else {
        // A quarter of the tokens at a time: the tensor cores make the next sums while these are scaled.
        using Sum = std::conditional_t<S::kFloat8, float, int>;
        constexpr int kPart = 64, kParts = kTokens / kPart;
        Sum sums[2][kPart / 2];
        uint32_t codes[kSteps][4];
        const auto multiply = [&](int part) {
          const uint64_t x = ptx::wgmma_descriptor(ring.stage()) + (part * kPart * kStageK >> 4);
          ptx::keep(sums[part % 2]);
          ptx::wgmma_fence();
#pragma unroll
          for (int i = 0; i < kSteps; ++i) {
            if constexpr (S::kFloat8) {
              ptx::WgmmaBytes<kPart>::e4m3(sums[part % 2], codes[i], x + (i * 32 >> 4), i > 0);
            } else {
              ptx::WgmmaBytes<kPart>::s8(sums[part % 2], codes[i], x + (i * 32 >> 4), i > 0);
            }
          }
          ptx::wgmma_commit();
        };
#pragma unroll 1
        for (int stage = 0; stage < stages; ++stage) {
          ring.wait_full();
          const uint8_t* const data = ring.stage();
          if constexpr (!S::kRows) {
            const Factor* factors =
                reinterpret_cast<const Factor*>(data + S::kFactorsAt) + me.warpgroup * kTileN + me.row();
            factor[0] = factors[0];
            factor[1] = factors[8];
          }
          uint32_t words[kSteps][S::kStepWords];
#pragma unroll
          for (int i = 0; i < kSteps; ++i) load_step(i, words[i]);
#pragma unroll
          for (int i = 0; i < kSteps; ++i) convert_step(stage, i, words[i], codes[i]);
#pragma unroll
          for (int i = 0; i < kSteps; ++i) ptx::keep(codes[i]);  // before the first product, which they would hold up
          float of_weights[2] = {};                              // sums of the weights of this stage
          if constexpr (S::kShifted) {
            if (sums_weights) {
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                of_weights[i] = fmaf(factor[i].scale, static_cast<float>(total_weights(i)),
                                     factor[i].shift * static_cast<float>(kStageK));
                weight_sums[i] = 0;
              }
            }
          }
          multiply(0);
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            if (part + 1 < kParts) {
              multiply(part + 1);
              ptx::wgmma_wait<1>();
            } else {
              ptx::wgmma_wait<0>();
            }
            Sum(&from)[kPart / 2] = sums[part % 2];
            ptx::keep(from);
            float* const to = acc + part * (kPart / 2);
            if constexpr (S::kRows) {
#pragma unroll
              for (int i = 0; i < kPart / 2; ++i) to[i] += from[i];
            } else {
              const float4* const tokens =
                  reinterpret_cast<const float4*>(data + S::kTokensAt) + part * (kPart / 4) + lane % 4;
#pragma unroll
              for (int block = 0; block < kPart / 16; ++block) {
                const auto four = [&](int array, float (&to)[4]) {
                  const float4 read = tokens[array * (kTokens / 4) + 4 * block];
                  to[0] = read.x, to[1] = read.y, to[2] = read.z, to[3] = read.w;
                };
                float scale[4], sum[4], offset[4];
                four(0, scale);
                four(1, sum);
                four(2, offset);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                  const int at = 8 * block + i, token = i / 4 * 2 + i % 2;
                  const Factor& with = factor[i / 2 % 2];
                  const float value = static_cast<float>(from[at]);
                  to[at] = fmaf(scale[token], fmaf(value, with.scale, with.shift * sum[token]), to[at]);
                  to[at] = fmaf(offset[token], of_weights[i / 2 % 2], to[at]);
                }
              }
            }
          }
          ring.release(ring.at.slot, lane, kCluster);
          ring.advance();
        }
      }

      if (n0 >= args.n) continue;
      float of_weights[2] = {};
      int fused[2] = {};
      if constexpr (S::kRows) {
        if (sums_weights) {
          // Padding is in whole tiles, and its codes are not the zero of all outputs.
          const int padding = k_tiles * tile_k(S::kBits) - static_cast<int>(args.k);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int of_padding = bias_of(S::kBits) - 128 + static_cast<int>(factor[i].lift & 0xff);
            const int sum = total_weights(i) - (S::kBits == 4 ? padding * of_padding : 0);
            of_weights[i] =
                fmaf(factor[i].scale, static_cast<float>(sum), factor[i].shift * static_cast<float>(args.k));
          }
        }
        if (is_static) {
#pragma unroll
          for (int i = 0; i < 2; ++i) fused[i] = all.fused[output(i)];
        }
      }
      // The values at `at` and after it, an output's of two neighbouring tokens.
      const auto finished = [&](int at) {
        if constexpr (!S::kRows) {
          return make_float2(acc[at], acc[at + 1]);
        } else {
          const int i = at % 4 / 2;
          const float* const token = of_tokens + at / 4 * 8 + lane % 4 * 2;
          const float2 scale = *reinterpret_cast<const float2*>(token);
          const float2 sum = *reinterpret_cast<const float2*>(token + kTokens);
          const float2 offset = *reinterpret_cast<const float2*>(token + 2 * kTokens);
          const auto value = [&](int index, float scale, float sum, float offset) {
            const float of_codes = static_cast<float>(acc[index] + fused[i]);
            return fmaf(offset, of_weights[i], scale * fmaf(of_codes, factor[i].scale, factor[i].shift * sum));
          };
          return make_float2(value(at, scale.x, sum.x, offset.x), value(at + 1, scale.y, sum.y, offset.y));
        }
      };

      const int rows = static_cast<int>(min(args.m - tile.m0, int64_t{kTokens}));
      const auto row_of = [&](int i) { return tile.batch * args.m + tile.m0 + i; };
      if (plain) {
        float bias[2] = {};
        if (args.has_bias) me.load_bias(args, tile.batch, n0, bias);
        const bool f16 = args.y_dtype == DType::kF16;
        const auto pack = [&](int at) {
          const float2 two = finished(at);
          const float low = two.x + bias[at % 4 / 2], high = two.y + bias[at % 4 / 2];
          return f16 ? pack_pair(from_float<__half>(low), from_float<__half>(high))
                     : pack_pair(from_float<__nv_bfloat16>(low), from_float<__nv_bfloat16>(high));
        };
        uint16_t* const y = static_cast<uint16_t*>(args.y) + row_of(0) * args.n;
        me.store_placed<kTokens, kPlacedTokens>(static_cast<int>(args.n), y, n0, rows, staged, pack,
                                                [&](int i) { return 16 * i + me.stored_row(); });
        continue;
      }
      const Finish of(args, tile.batch);
      me.store<kTokens, kStagedTokens>(of, n0, rows, staged, finished,
                                       [&](int i, int64_t n, float (&value)[8], const float (&biases)[8]) {
                                         if (!is_static) {
                                           finish(of, tile.m0 + i, n, value, biases);
                                           return;
                                         }
                                         int8_t* const to = static_cast<int8_t*>(args.y) + row_of(i) * args.n + n;
                                         for (int j = 0; j < 8 && n + j < args.n; ++j) {
                                           const int rounded = __float2int_rn(fminf(fmaxf(value[j], -1024.f), 1024.f));
                                           to[j] = static_cast<int8_t>(max(min(rounded + all.zero, all.high), all.low));
                                         }
                                       });
    }
  }
  ptx::cluster_meet();  // the other CTA may still copy to here
#else
  __trap();
#endif
}

// Stages of a group as a power of two; -1: all stages are one group.
inline int log2_stages(int64_t k, int64_t groups) { return groups <= 1 ? -1 : k / groups == kStageK ? 0 : 1; }

template <typename S>
cudaError_t launch_shape(const QuantizedMatmulArgs& args, int multiprocessors, cudaStream_t stream) {
  const MatmulArgs& product = args.product;
  CUtensorMap map;
  if (cudaError_t error = describe_codes(product, args.k_stride, kTokens / kCluster, &map); error != cudaSuccess) {
    return error;
  }
  Params params{};
  params.args = args;
  params.token_tiles = static_cast<int>(ceil_div(product.m, kTokens));
  params.row_tiles = static_cast<int>(ceil_div(product.n, kCluster * kOutputs));
  params.tiles = static_cast<int>(product.batch * params.token_tiles * params.row_tiles);
  params.log2_group_stages = log2_stages(product.k, product.groups);
  params.log2_x_group_stages = log2_stages(product.k, args.x_groups);
  params.log2_sum_group_stages =
      log2_stages(product.k, args.x_groups > product.groups ? args.x_groups : product.groups);
  const int clusters = multiprocessors / kCluster;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(kCluster * (params.tiles < clusters ? params.tiles : clusters)));
  shape.threads = tiles::kThreads;
  shape.cluster = kCluster;
  shape.shared_bytes = S::kSharedBytes;
  return launch_kernel(quantized_matmul<S>, shape, stream, params, map);
}

template <int kBits, bool kFloat8>
cudaError_t launch_codes(const QuantizedMatmulArgs& args, int multiprocessors, cudaStream_t stream) {
  if (args.product.groups <= 1 && args.x_groups <= 1) {
    return launch_shape<Shape<kBits, kFloat8, Mode::kRows>>(args, multiprocessors, stream);
  }
  return needs_sums(args.product) || args.x_offsets != nullptr
             ? launch_shape<Shape<kBits, kFloat8, Mode::kShiftedBlocks>>(args, multiprocessors, stream)
             : launch_shape<Shape<kBits, kFloat8, Mode::kBlocks>>(args, multiprocessors, stream);
}

}  // namespace wonly::quantized
