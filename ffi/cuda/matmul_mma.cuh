// Products of tens of tokens and more on GPUs whose tensor cores are fed by mma.sync (sm_80 to sm_89, and newer ones
// that have no kernels of their own): the weights as the A operand, straight from the packed format.
//
// A CTA of four warps computes 128 outputs of 32, 64 or 128 tokens, and two CTAs share a multiprocessor: one's tensor
// work hides the beginning and the end of the other. Its ring holds stages of 64 inputs: packed codes, scales
// and zeros as they are in memory, activations in rows of 128 bytes whose 16-byte pieces are exchanged such that
// ldmatrix meets no bank twice. A warp has 64 outputs and up to 64 tokens; the warps of a CTA share its outputs, and
// its tokens (128) or every stage's inputs (32 and 64), so that a code is turned into a weight once for 64 tokens. The
// weights of the next 16 inputs are made between the products of these ones, also across stages.
//
// Tiles that would not fill the last wave are computed by several CTAs each, which share the inputs and leave their
// float32 sums in scratch for a second kernel, which adds them in order. Nothing waits for another CTA.
#pragma once

#include <algorithm>
#include <climits>
#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/launch.h"
#include "cuda/matmul_mma.h"
#include "cuda/place.cuh"
#include "cuda/ptx.cuh"
#include "cuda/rounded_weights.cuh"
#include "layout.h"

namespace wonly::mma {

constexpr int kStageK = kStageInputs;
constexpr int kBlockK = 32;  // inputs of the smallest group
constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kStrips = kCtaOutputs / kTileN;         // of 64 outputs, each of two warps
constexpr int kAtoms = kTileN / kAtomN;               // of a warp
constexpr int kRowBytes = 2 * kStageK;                // of a token's inputs in a stage
constexpr int kShallow = 3, kDeep = 4, kDeepest = 6;  // stages of the ring
constexpr int kChunkTokens = 16;                      // that a warp hands over at a time
constexpr int kStagedStride = kTileN + 4;             // floats of a token, so that no two lanes share a bank
constexpr int kStagedBytes = kWarps * kChunkTokens * kStagedStride * 4;

struct Params {
  MatmulArgs args;
  int stages;                     // of a tile
  int token_tiles, output_tiles;  // of one product of the batch
  int whole, shared_tiles;        // tiles that CTAs compute alone, and those whose inputs they share
  int splits;
  int depth, slot_bytes;  // of the ring
  int whole_stages;       // whose inputs are all there
  uint32_t x_step;        // bytes from a token to the 16th after it
  int sets;               // of scales in a stage: 2 where two groups are in it
  int log2_group_blocks;  // group size = 32 << this; -1: one scale per output
  bool rows_of_16;        // rows of scales and shift are aligned for 16-byte copies
};

// Of a slot of the ring: activations, packed weights, scales and then zeros.
constexpr int scales_at(int bits, int tokens) {
  return tokens * kRowBytes + kStrips * kStageK / tile_k(bits) * kTileBytes;
}

template <typename X_, int kBits_, Codes kCodes, int kTokens_>
struct Shape {
  using X = X_;
  static constexpr int kBits = kBits_, kTokens = kTokens_;
  static constexpr bool kZeros = kCodes == Codes::kWithZeros, kTable = false;
  static constexpr int kTokenWarps = kTokens == 128 ? 2 : 1, kInputWarps = 2 / kTokenWarps;
  static constexpr int kPairs = kTokens / kTokenWarps / 16;  // of token tiles of a warp
  static constexpr int kSteps = kStageK / 16 / kInputWarps;  // of a warp in a stage
  static constexpr int kTiles = kStageK / tile_k(kBits);     // packed tiles of a stage along the inputs
  static constexpr int kWeightsAt = kTokens * kRowBytes;
  static constexpr int kScalesAt = scales_at(kBits, kTokens);
  static_assert(kWarps == kStrips * kTokenWarps * kInputWarps && kAtoms % kPairs == 0);
};

template <typename S>
__global__ void __launch_bounds__(kThreads, kCtas) mma_matmul(const __grid_constant__ Params params) {
#if __CUDA_ARCH__ >= 800 && (!defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(WONLY_CUDA_DISPATCH))
  using X = typename S::X;
  using C = Convert<S>;
  extern __shared__ __align__(128) uint8_t shared[];
  const MatmulArgs& args = params.args;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int g = lane / 4, t = lane % 4;
  const int strip = warp % kStrips;
  const int token_part = S::kTokenWarps == 2 ? warp / kStrips : 0,
            input_part = S::kInputWarps == 2 ? warp / kStrips : 0;

  int tile = blockIdx.x, first_stage = 0, end_stage = params.stages, split = -1;
  if (tile >= params.whole) {
    split = (tile - params.whole) / params.shared_tiles;
    tile -= split * params.shared_tiles;
    first_stage = params.stages * split / params.splits;
    end_stage = params.stages * (split + 1) / params.splits;
  }
  const int of_batch = params.token_tiles * params.output_tiles;
  const int64_t batch = tile / of_batch;
  const tiles::Place place = tiles::place_of(tile % of_batch, params.token_tiles, params.output_tiles);
  const int64_t m0 = static_cast<int64_t>(place.row) * S::kTokens,
                n0 = static_cast<int64_t>(place.column) * kCtaOutputs;
  const int rows = static_cast<int>(min(args.m - m0, int64_t{S::kTokens}));
  const int outputs = static_cast<int>(min(args.n - n0, int64_t{kCtaOutputs}));

  const bool has_shift = args.shift_mode != ShiftMode::kNone, byte_shift = args.shift_dtype == DType::kU8;
  const int shift_size = byte_shift ? 1 : 2, shift_at = S::kScalesAt + params.sets * kCtaOutputs * 2;
  // A group begins in the stages that are multiples of this + 1.
  const int group_mask = params.log2_group_blocks < 0 ? INT_MAX : (1 << max(params.log2_group_blocks - 1, 0)) - 1;

  // What this thread copies of every stage: 16 bytes of every 16th token, and of every packed tile. Tokens that are not
  // there have sums that nobody reads.
  constexpr int kCopies = S::kTokens / 16;
  const int copy_row = thread / 8, copy_chunk = thread % 8;
  const uint8_t* x =
      reinterpret_cast<const uint8_t*>(static_cast<const X*>(args.x) + batch * args.x_batch_stride +
                                       (m0 + copy_row) * args.k + first_stage * int64_t{kStageK} + 8 * copy_chunk);
  const int x_to = copy_row * kRowBytes + ((copy_chunk ^ copy_row % 8) << 4);
  const int k_tiles = static_cast<int>(ceil_div(args.k, tile_k(S::kBits)));
  const uint32_t* words[kStrips];
#pragma unroll
  for (int i = 0; i < kStrips; ++i) {
    const int64_t of_strip = min(n0 / kTileN + i, ceil_div(args.n, kTileN) - 1);
    words[i] = args.qw + batch * args.qw_batch_stride +
               (of_strip * k_tiles + int64_t{first_stage} * S::kTiles) * kTileWords + 4 * thread;
  }
  // And where groups begin: some of the scales (warp 0) or of the zeros (warp 1).
  const auto group_of = [&](int stage) {  // the first
    return params.log2_group_blocks < 0 ? 0 : 2 * stage >> params.log2_group_blocks;
  };
  const int factor_size = warp == 0 ? 2 : shift_size, factor_set = lane / 16, factor_chunk = lane % 16;
  const bool factor_copies = params.rows_of_16 && warp <= (has_shift ? 1 : 0) && factor_set < params.sets &&
                             factor_chunk < min(outputs, kCtaOutputs) * factor_size / 16;
  const int factor_to =
      (warp == 0 ? S::kScalesAt : shift_at) + factor_set * kCtaOutputs * factor_size + 16 * factor_chunk;
  const uint8_t* const scales = static_cast<const uint8_t*>(args.scales) + 2 * (batch * args.scales_batch_stride + n0);
  const uint8_t* const shifts =
      static_cast<const uint8_t*>(args.shift) + shift_size * (batch * args.shift_batch_stride + n0);
  const uint8_t* factors =
      (warp == 0 ? scales : shifts) + (group_of(first_stage) + factor_set) * args.n * factor_size + 16 * factor_chunk;
  const int64_t factor_step = params.sets * args.n * factor_size;
  int factors_left = factor_copies ? static_cast<int>(args.groups) - group_of(first_stage) - factor_set : 0;

  int fetched = first_stage;
  // What few stages need: zeros in place of inputs beyond the last, and scales in rows that are not aligned.
  const auto fetch_rest = [&](int slot) {
    uint8_t* const to = shared + slot;
    if (fetched * int64_t{kStageK} + 8 * copy_chunk >= args.k) {
#pragma unroll 1
      for (int i = 0; i < kCopies; ++i) *reinterpret_cast<uint4*>(to + x_to + i * 16 * kRowBytes) = {};
    }
    if ((fetched & group_mask) != 0 && fetched != first_stage) return;
#pragma unroll 1
    for (int set = 0; set < params.sets; ++set) {
      const int64_t of_group = group_of(fetched) + set;
      const bool there = of_group < args.groups;
      if (there && params.rows_of_16) continue;
      const int64_t at = of_group * args.n + min(thread, outputs - 1);
      const int of_set = set * kCtaOutputs + thread;
      const auto copy = [&](uint8_t* to, const uint8_t* from, bool bytes) {
        if (bytes) {
          to[of_set] = there ? from[at] : 0;
        } else {
          reinterpret_cast<uint16_t*>(to)[of_set] = there ? reinterpret_cast<const uint16_t*>(from)[at] : 0;
        }
      };
      copy(to + S::kScalesAt, scales, false);
      if (has_shift) copy(to + shift_at, shifts, byte_shift);
    }
  };
  const int first_rare = params.rows_of_16 ? params.whole_stages : 0;  // of the stages that need it
  // Asks for one of the kFetches parts of the stage after those that have been asked for. They stand between products.
  constexpr int kFetches = S::kSteps - 1;
  const auto fetch = [&](int slot, int part) {
    uint8_t* const to = shared + slot;
    const bool wanted = fetched < end_stage;
    const bool in_rows = wanted && fetched * kStageK < args.k - 8 * copy_chunk;
    const int copies = in_rows ? rows - copy_row : 0;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (i % kFetches != part) continue;
      if (16 * i < copies) {
        ptx::cp_async_16(to + x_to + i * 16 * kRowBytes, x + static_cast<uint64_t>(params.x_step) * i);
      }
    }
#pragma unroll
    for (int i = 0; i < kStrips * S::kTiles; ++i) {
      if ((i + kCopies) % kFetches != part) continue;
      const int strip = i / S::kTiles, tile = i % S::kTiles;
      if (wanted && (tile == 0 || fetched * S::kTiles + tile < k_tiles)) {
        ptx::cp_async_16(to + S::kWeightsAt + i * kTileBytes + 16 * thread, words[strip] + tile * kTileWords);
      }
    }
    if (part == kFetches - 1) {
      const bool new_group = (fetched & group_mask) == 0 || fetched == first_stage;
      if (wanted && new_group && factors_left > 0) ptx::cp_async_16(to + factor_to, factors);
      if (new_group) {
        factors += factor_step;
        factors_left -= params.sets;
      }
      x += kRowBytes;
#pragma unroll
      for (const uint32_t*& of_strip : words) of_strip += S::kTiles * kTileWords;
      ++fetched;
      ptx::cp_async_commit();
    }
  };

  float acc[kAtoms][2 * S::kPairs][4] = {};
  const int ring_bytes = params.depth * params.slot_bytes;
  int slot = 0, free_slot = 0;
  const auto after = [&](int at) {
    at += params.slot_bytes;
    return at == ring_bytes ? 0 : at;
  };
  // Waits until all of the CTA's threads have their copies for the next stage in place.
  const auto arrive = [&] {
    if (params.depth == kDeep) {
      ptx::cp_async_wait<kDeep - 3>();
    } else if (params.depth == kDeepest) {
      ptx::cp_async_wait<kDeepest - 3>();
    } else {
      ptx::cp_async_wait<kShallow - 3>();
    }
    __syncthreads();
    if (fetched >= first_rare && fetched < end_stage) fetch_rest(free_slot);
  };
  for (int i = 0; i < params.depth - 2; ++i) {
    if (fetched >= first_rare && fetched < end_stage) fetch_rest(free_slot);
#pragma unroll
    for (int part = 0; part < kFetches; ++part) fetch(free_slot, part);
    free_slot = after(free_slot);
  }
  arrive();

  if (token_part * 64 < rows) {
    // A stage's matrices of activations for ldmatrix: tokens 16 * pair + (0 .. 7, 8 .. 15), inputs 0 .. 7 and 8 .. 15
    // of a step.
    const uint32_t lane_x = (token_part * 64 + lane / 16 * 8 + lane % 8) * kRowBytes + ((lane / 8 % 2 ^ lane % 8) << 4);
    const uint32_t shared_address = ptx::shared_address(shared);
    const auto load_x = [&](uint32_t (&b)[4], int from, int step, int pair) {
      const int of_stage = input_part * S::kSteps + step;
      ptx::load_matrices(b, shared_address + from + (lane_x ^ of_stage << 5) + pair * 16 * kRowBytes);
    };
    // Codes of 32 inputs: of each atom rows g and g + 8, first and second 16 inputs where those are words of their own.
    uint32_t codes[kAtoms][S::kBits == 4 ? 2 : 4];
    Affine affine[kAtoms][2];
    const auto load_codes = [&](const uint8_t* from, int block) {
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom) {
        const uint8_t* at = from + S::kWeightsAt + strip * S::kTiles * kTileBytes + (atom * 32 + lane) * 16;
        if constexpr (S::kBits == 4) {
          const uint2 two = *reinterpret_cast<const uint2*>(at + block * 8);
          codes[atom][0] = two.x, codes[atom][1] = two.y;
        } else {
          const uint4 four = *reinterpret_cast<const uint4*>(at + block * kTileBytes);
          codes[atom][0] = four.x, codes[atom][1] = four.y, codes[atom][2] = four.z, codes[atom][3] = four.w;
        }
      }
    };
    const auto load_affine = [&](const uint8_t* from, int set) {
      const int row = set * kCtaOutputs + strip * kTileN + g;
      const auto both = [&](const uint8_t* numbers, int at) {
        return reinterpret_cast<const uint16_t*>(numbers)[row + at] * 0x00010001u;
      };
      const auto with = [&](auto affine_of) {
#pragma unroll
        for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
          for (int high = 0; high < 2; ++high) affine[atom][high] = affine_of(atom * kAtomN + 8 * high);
        }
      };
      const uint8_t *const scales = from + S::kScalesAt, *const shifts = from + shift_at;
      const auto with_shift = [&](int at) { return C::affine_of_pairs(both(scales, at), both(shifts, at)); };
      if constexpr (S::kZeros) {
        if (byte_shift) {
          with([&](int at) {
            const uint32_t factor = C::shift_factor(false, true);
            return C::template affine_of_bits<false>(both(scales, at), ptx::low_twice(shifts[row + at]), factor);
          });
        } else {
          with(with_shift);
        }
      } else {
        if (has_shift) {
          with(with_shift);
        } else {
          with([&](int at) { return C::affine_of_pairs(both(scales, at), NoShift{}); });
        }
      }
    };
    // The weights of one of the two steps of a block.
    const auto make_weights = [&](int atom, int second, uint32_t (&to)[4]) {
      const int word = S::kBits == 8 ? 2 * second : 0, pair = S::kBits == 4 ? 2 * second : 0;
      uint32_t low[16 / S::kBits], high[16 / S::kBits];
      C::weights(codes[atom][word], affine[atom][0], ByteTable{}, low);
      C::weights(codes[atom][word + 1], affine[atom][1], ByteTable{}, high);
      to[0] = low[pair], to[1] = high[pair], to[2] = low[pair + 1], to[3] = high[pair + 1];
    };
    const auto begin_block = [&](int from, int block, bool new_group) {
      block += S::kInputWarps == 2 ? input_part : 0;
      load_codes(shared + from, block);
      if (new_group) load_affine(shared + from, params.sets == 2 ? block : 0);
    };

    uint32_t a[2][kAtoms][4], b[2][4];
    begin_block(slot, 0, true);
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom) make_weights(atom, 0, a[0][atom]);
    load_x(b[0], slot, 0, 0);
#pragma unroll 1
    for (int stage = first_stage; stage < end_stage; ++stage) {
      const int from = slot;
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) {
        const int next = (step + 1) % S::kSteps;
        if (next == 0) {
          free_slot = after(free_slot);
          arrive();
          slot = after(slot);
          begin_block(slot, 0, ((stage + 1) & group_mask) == 0);
        } else if (next % 2 == 0) {
          begin_block(slot, next / 2, params.sets == 2);
        }
#pragma unroll
        for (int pair = 0; pair < S::kPairs; ++pair) {
          const bool last = pair == S::kPairs - 1;
          load_x(b[(pair + 1) % 2], last ? slot : from, last ? next : step, last ? 0 : pair + 1);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int atom = 0; atom < kAtoms; ++atom) {
              float (&sums)[4] = acc[atom][2 * pair + half];
              ptx::mma<C::kBf16>(sums, a[step % 2][atom], b[pair % 2][2 * half], b[pair % 2][2 * half + 1]);
            }
          }
#pragma unroll
          for (int i = 0; i < kAtoms / S::kPairs; ++i) {
            const int atom = pair * (kAtoms / S::kPairs) + i;
            make_weights(atom, next % 2, a[(step + 1) % 2][atom]);
          }
          if (pair == 0 && next != 0) fetch(free_slot, step);
        }
      }
    }
  } else {  // no tokens: only copies
    for (int stage = first_stage; stage < end_stage; ++stage) {
#pragma unroll
      for (int part = 0; part < kFetches; ++part) fetch(free_slot, part);
      free_slot = after(free_slot);
      arrive();
    }
  }

  // Sums leave through shared memory, so that a warp's lanes have outputs of one token next to each other.
  ptx::cp_async_wait<0>();
  __syncthreads();
  float* const staged = reinterpret_cast<float*>(shared) + warp * kChunkTokens * kStagedStride;
  constexpr int kRows = kChunkTokens / S::kInputWarps;  // of those staged, that this warp finishes
#pragma unroll
  for (int pair = 0; pair < S::kPairs; ++pair) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          staged[(half * 8 + 2 * t + i % 2) * kStagedStride + atom * kAtomN + i / 2 * 8 + g] =
              acc[atom][2 * pair + half][i];
        }
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < kRows; i += 2) {
      const int row = input_part * kRows + i + lane / 16, column = lane % 16 * 4;
      const float* from = reinterpret_cast<const float*>(shared) + row * kStagedStride + column;
      constexpr int kWarpFloats = kChunkTokens * kStagedStride;
      float4 sum;
      if constexpr (S::kInputWarps == 1) {
        sum = *reinterpret_cast<const float4*>(from + warp * kWarpFloats);
      } else {
        const float4 first = *reinterpret_cast<const float4*>(from + strip * kWarpFloats);
        const float4 second = *reinterpret_cast<const float4*>(from + (strip + kStrips) * kWarpFloats);
        sum = make_float4(first.x + second.x, first.y + second.y, first.z + second.z, first.w + second.w);
      }
      constexpr float kScale = 1.f / C::kUnit;
      const float values[4] = {sum.x * kScale, sum.y * kScale, sum.z * kScale, sum.w * kScale};
      const int token = token_part * 64 + pair * kChunkTokens + row, n = strip * kTileN + column;
      if (token >= rows || n >= outputs) continue;
      if (split < 0) {
        finish4(args, batch, m0 + token, n0 + n, values);
      } else {
        const int64_t slice = static_cast<int64_t>(blockIdx.x - params.whole) * S::kTokens + token;
        *reinterpret_cast<float4*>(static_cast<float*>(args.scratch) + slice * kCtaOutputs + n) =
            make_float4(values[0], values[1], values[2], values[3]);
      }
    }
    __syncthreads();
  }
#else
  __trap();
#endif
}

// How a product's tiles are dealt out, and its ring; its depth is 0 where there is too little shared memory for one.
Params params_of(const MatmulArgs& args, const Config& config);

template <typename S>
cudaError_t launch_instance(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  const Params params = params_of(args, config);
  if (params.depth == 0) return cudaErrorInvalidConfiguration;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(params.whole + params.shared_tiles * params.splits));
  shape.threads = kThreads;
  shape.shared_bytes = std::max(params.depth * params.slot_bytes, kStagedBytes);
  return launch_kernel(mma_matmul<S>, shape, stream, params);
}

template <typename X>
cudaError_t launch_typed(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  const auto with_codes = [&](auto bits, auto codes) {
    switch (config.tokens) {
      case 32:
        return launch_instance<Shape<X, bits.value, codes.value, 32>>(args, config, stream);
      case 64:
        return launch_instance<Shape<X, bits.value, codes.value, 64>>(args, config, stream);
      case 128:
        return launch_instance<Shape<X, bits.value, codes.value, 128>>(args, config, stream);
      default:
        return cudaErrorInvalidValue;
    }
  };
  const auto with_bits = [&](auto bits) {
    return args.shift_mode == ShiftMode::kZeros ? with_codes(bits, std::integral_constant<Codes, Codes::kWithZeros>{})
                                                : with_codes(bits, std::integral_constant<Codes, Codes::kNumbers>{});
  };
  return args.bits == 4 ? with_bits(std::integral_constant<int, 4>{}) : with_bits(std::integral_constant<int, 8>{});
}

}  // namespace wonly::mma
