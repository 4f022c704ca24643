// Quantization straight into the packed layout. A thread reads eight consecutive outputs of the eight inputs that share
// a word of the format (four-bit codes) or two words (eight-bit ones), so a warp reads whole 128-byte lines and packs
// in registers; shared memory carries only the extrema of a group, its parameters, and the finished words on their way
// to coalesced stores.
//
// Groups of up to 256 inputs keep their values in registers and read w once. Longer ones (one scale per output) read it
// twice, the second time from the end, where the first pass has left the cache warm.
//
// What is computed is defined by `reference` in jax_wonly/primitives/quantize.py and has the same bits on every
// platform: float32 throughout, each operation rounded by itself.
#include <cuda_runtime.h>

#include <cstdint>
#include <limits>
#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/launch.h"
#include "cuda/ptx.cuh"
#include "cuda/quantize.h"
#include "layout.h"

namespace wonly {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlockK = 32;      // inputs that one word of four-bit codes is taken from
constexpr int kThreadN = 8;      // outputs of a thread
constexpr int kThreadK = 8;      // inputs of a thread
constexpr int kLanesK = 4;       // threads that share a block of inputs: `t` of the layout
constexpr int kRegisterK = 256;  // inputs of the longest group that is kept in registers
constexpr int kMinGroup = 32;
// CTAs that share an SM, and so its registers: the more, the more loads are on their way.
template <typename T>
constexpr int kCtasPerSm = sizeof(T) == 2 ? 3 : 2;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// How codes are made from the weights of one (group, output): clip(rint((w - offset) / scale + zero), 0, qtop) for a
// floating zero, and clip(rint(w / scale), -base, qtop - base) + base for an integer one, which symmetric quantization
// is, too.
struct Rule {
  float scale;
  float reciprocal;  // of scale, rounded to nearest; 0: every code is base; NaN: values for which only a true division
                     // is right
  float offset;
  float zero;
  float base;
};

// One rule per output in shared memory, field by field.
struct RuleTable {
  float4* first;  // scale, reciprocal, offset, zero
  float* base;

  __device__ __forceinline__ void put(int index, const Rule& rule) const {
    first[index] = make_float4(rule.scale, rule.reciprocal, rule.offset, rule.zero);
    base[index] = rule.base;
  }
  __device__ __forceinline__ Rule get(int index) const {
    const float4 v = first[index];
    return {v.x, v.y, v.z, v.w, base[index]};
  }
};

// The threads of a warp read the rules of outputs 8 * column + i with the same i at a time: those lie side by side.
template <int kColumns>
__device__ __forceinline__ int rule_index(int output) {
  return (output % kThreadN) * kColumns + output / kThreadN;
}

// A NaN spreads to the extrema of its group, whose scale it becomes, and shows.
__device__ __forceinline__ float clamped_scale(float value, DType type) {
  return ptx::least_of(round_to(type, value), largest_finite(type));
}

// Scale and shift of a group with extrema lo <= hi, and the rule for its codes.
__device__ Rule make_rule(QuantizeMode mode, int bits, DType scale_dtype, float lo, float hi, float& shift) {
  const float qtop = static_cast<float>((1 << bits) - 1);
  Rule rule;
  rule.offset = 0.0f;
  rule.zero = 0.0f;
  rule.base = 0.0f;
  shift = 0.0f;
  if (mode == QuantizeMode::kSymmetric) {
    rule.base = static_cast<float>(bias_of(bits));
    const float qmax = rule.base - 1.0f;
    rule.scale = clamped_scale(__fdiv_rn(ptx::largest_of(-lo, hi), qmax), scale_dtype);
  } else {
    if (mode == QuantizeMode::kIntegerZeros) {
      lo = ptx::least_of(lo, 0.0f);
      hi = ptx::largest_of(hi, 0.0f);
    }
    rule.scale = clamped_scale(__fdiv_rn(__fsub_rn(hi, lo), qtop), scale_dtype);
  }
  const bool degenerate = rule.scale == 0.0f;
  if (mode == QuantizeMode::kIntegerZeros) {
    if (!degenerate) shift = fminf(fmaxf(rintf(__fdiv_rn(-lo, rule.scale)), 0.0f), qtop);
    rule.base = shift;
  } else if (mode == QuantizeMode::kFloatZeros) {
    if (!degenerate) {
      shift = round_to(scale_dtype, __fdiv_rn(-lo, rule.scale));
      rule.zero = shift;
    } else if (lo != 0.0f) {
      // A constant group: (0 - zero) * scale is the constant.
      rule.scale = clamped_scale(fabsf(lo), scale_dtype);
      shift = lo > 0.0f ? -1.0f : 1.0f;
    }
  } else if (mode == QuantizeMode::kOffsets) {
    shift = round_to(scale_dtype, lo);
    rule.offset = shift;
  }
  if (degenerate) {
    return {shift == 0.0f ? 0.0f : rule.scale, 0.0f, 0.0f, 0.0f, rule.base};
  }
  // Division by a common divisor through its reciprocal is exact (see divide) as long as nothing overflows and no
  // remainder falls among the subnormals; weights so small that theirs does have quotients below 2^-41, which no code
  // depends on.
  const float largest = fmaxf(fmaxf(-lo, hi), fabsf(rule.offset));
  const bool safe = rule.scale >= 0x1p-60f && rule.scale <= 0x1p60f && largest <= 0x1p60f;
  rule.reciprocal = safe ? __frcp_rn(rule.scale) : __uint_as_float(0x7fffffffu);
  return rule;
}

// a / b rounded to nearest, given the correctly rounded reciprocal of b: two Newton steps on the quotient, the second
// of which starts within one unit in the last place and is therefore exact (Markstein's theorem).
__device__ __forceinline__ float divide(float a, float b, float reciprocal) {
  float q = __fmul_rn(a, reciprocal);
  q = __fmaf_rn(__fmaf_rn(-b, q, a), reciprocal, q);
  return __fmaf_rn(__fmaf_rn(-b, q, a), reciprocal, q);
}

// 1.5 * 2^23: a float in [0, 2^22) added to it is rounded to the nearest even integer, found in the low bits of the
// sum.
constexpr float kRounder = 12582912.0f;
constexpr uint32_t kRounderBits = 0x4b400000u;

// The bits of kRounder plus the code less the rule's base.
__device__ __forceinline__ uint32_t rounded_code(float quotient, const Rule& rule, float qtop) {
  const float v = fminf(fmaxf(__fadd_rn(quotient, rule.zero), -rule.base), qtop - rule.base);
  return __float_as_uint(__fadd_rn(v, kRounder));
}

// Position of a thread's values: inputs k(i), i = 2 * pair + odd, and eight outputs from n on.
struct Place {
  int64_t k_block;  // first input of its block of 32
  int t;
  int64_t n;

  __device__ __forceinline__ int64_t k(int i) const { return k_block + 8 * (i / 2) + 2 * t + i % 2; }
};

template <typename T>
struct Values {
  Row8<T> rows[kThreadK];
  uint32_t present;  // bit i: input i exists (and the thread's outputs do)
};

template <typename T>
__device__ __forceinline__ void load_values(Values<T>& values, const T* w, const Place& place, int64_t k_size,
                                            int64_t n_size) {
  values.present = 0;
  if (place.n >= n_size) return;
  const T* const column = w + place.n;
#pragma unroll
  for (int i = 0; i < kThreadK; ++i) {
    if (place.k(i) < k_size) values.present |= 1u << i;
  }
  if (n_size % kThreadN == 0) {  // rows are 16-byte aligned, and end where a thread's outputs do
#pragma unroll
    for (int i = 0; i < kThreadK; ++i) {
      if (values.present >> i & 1) values.rows[i].load(column + place.k(i) * n_size);
    }
  } else {
    const int count = static_cast<int>(n_size - place.n < kThreadN ? n_size - place.n : kThreadN);
#pragma unroll
    for (int i = 0; i < kThreadK; ++i) {
      if (values.present >> i & 1) values.rows[i].load_some(column + place.k(i) * n_size, count);
    }
  }
}

template <typename T>
__device__ __forceinline__ void update_extrema(const Values<T>& values, float (&lo)[kThreadN], float (&hi)[kThreadN]) {
#pragma unroll
  for (int i = 0; i < kThreadK; ++i) {
    if (values.present >> i & 1) {
#pragma unroll
      for (int j = 0; j < kThreadN; ++j) {
        const float v = to_float(values.rows[i].elements[j]);
        lo[j] = ptx::least_of(lo[j], v);
        hi[j] = ptx::largest_of(hi[j], v);
      }
    }
  }
}

// Extrema over the lanes of a warp that hold the same outputs: those whose numbers agree modulo kColumns.
template <int kColumns>
__device__ __forceinline__ void reduce_lanes(float (&lo)[kThreadN], float (&hi)[kThreadN]) {
#pragma unroll
  for (int j = 0; j < kThreadN; ++j) {
#pragma unroll
    for (int mask = kColumns; mask < 32; mask *= 2) {
      lo[j] = ptx::least_of(lo[j], __shfl_xor_sync(0xffffffffu, lo[j], mask));
      hi[j] = ptx::largest_of(hi[j], __shfl_xor_sync(0xffffffffu, hi[j], mask));
    }
  }
}

// Codes of a thread's values for output j, without a table of registers: for rules whose quotients need a true
// division.
template <typename T>
__device__ __noinline__ uint2 slow_words(const T* w, int64_t row_stride, int t, int64_t k_left, int bits, Rule rule) {
  const float qtop = static_cast<float>((1 << bits) - 1);
  uint2 words = {0, 0};
#pragma unroll 1
  for (int i = 0; i < kThreadK; ++i) {
    const int k = 8 * (i / 2) + 2 * t + i % 2;
    uint32_t code = bias_of(bits);
    if (k < k_left) {
      const float v = __fsub_rn(to_float(w[k * row_stride]), rule.offset);
      code = rounded_code(__fdiv_rn(v, rule.scale), rule, qtop) - kRounderBits + static_cast<uint32_t>(rule.base);
    }
    const CodePosition position = code_position(bits, k, 0);
    const bool second = bits == 8 && i >= kThreadK / 2;
    (second ? words.y : words.x) |= code << position.shift;
  }
  return words;
}

// The words of a thread's values for output j: one (x) for four-bit codes, one for each half of the block (x, y) for
// eight-bit ones.
template <typename T>
__device__ __forceinline__ uint2 fast_words(const Values<T>& values, int j, int bits, const Rule& rule) {
  const float qtop = static_cast<float>((1 << bits) - 1);
  const uint32_t base = static_cast<uint32_t>(rule.base);
  const uint32_t padding = kRounderBits + bias_of(bits) - base;
  uint32_t rounded[kThreadK];
#pragma unroll
  for (int i = 0; i < kThreadK; ++i) {
    const float v = __fsub_rn(to_float(values.rows[i].elements[j]), rule.offset);
    const uint32_t code = rounded_code(divide(v, rule.scale, rule.reciprocal), rule, qtop);
    rounded[i] = values.present >> i & 1 ? code : padding;
  }
  // Sums of shifted floats, modulo 2^32: what the bits of kRounder and the missing base add is known beforehand.
  uint2 words = {0, 0};
  if (bits == 4) {
    words.x = (base - kRounderBits) * 0x11111111u;
#pragma unroll
    for (int i = 0; i < kThreadK; ++i) words.x += rounded[i] << (4 * (i / 2) + 16 * (i % 2));
  } else {
    words.x = (base - kRounderBits) * 0x01010101u;
    words.y = words.x;
#pragma unroll
    for (int i = 0; i < kThreadK / 2; ++i) {
      const int shift = 8 * (i / 2) + 16 * (i % 2);
      words.x += rounded[i] << shift;
      words.y += rounded[i + kThreadK / 2] << shift;
    }
  }
  return words;
}

// A CTA's piece of the output: kColumns * 8 outputs of the tiles that its kThreads / (4 * kColumns) blocks of inputs
// fill.
template <int kColumns>
struct Piece {
  static constexpr int kOutputs = kColumns * kThreadN;
  static constexpr int kBlocks = kThreads / (kLanesK * kColumns);
  static constexpr int kInputs = kBlocks * kBlockK;
  static constexpr int kTilePart = kTileWords * kOutputs / kTileN;  // words that a tile has of it: whole atoms

  static_assert(kOutputs % kAtomN == 0 && kTileN % kOutputs == 0);

  static __host__ __device__ constexpr int words(int bits) { return kInputs / tile_k(bits) * kTilePart; }
};

// Packs a thread's values into `stage`, a CTA's piece in the order of the output.
template <typename T, int kColumns>
__device__ __forceinline__ void pack_values(const Values<T>& values, const T* w, const Place& place, int64_t k_size,
                                            int64_t n_size, int bits, const RuleTable& rules, int rule_base, int column,
                                            int block, uint32_t* stage) {
  // Constant over the unrolled outputs; j moves a word by a lane group.
  const CodePosition position =
      code_position(bits, (bits == 4 ? block % 2 : 0) * kBlockK + 2 * place.t, column * kThreadN);
  const int tile = bits == 4 ? block / 2 : block;
  uint32_t* const target = stage + tile * Piece<kColumns>::kTilePart + position.word;
#pragma unroll
  for (int j = 0; j < kThreadN; ++j) {
    uint2 words;
    if (place.n + j >= n_size) {
      words.x = bias_of(bits) * (bits == 4 ? 0x11111111u : 0x01010101u);
      words.y = words.x;
    } else {
      const Rule rule = rules.get(rule_base + j * kColumns + column);
      if (isnan(rule.reciprocal)) {
        words =
            slow_words(w + place.k_block * n_size + place.n + j, n_size, place.t, k_size - place.k_block, bits, rule);
      } else {
        words = fast_words(values, j, bits, rule);
      }
    }
    target[j * kLanesK * 4] = words.x;
    if (bits == 8) target[j * kLanesK * 4 + 2] = words.y;
  }
}

// Copies the first `tiles` tiles of a staged piece to where they lie in the output.
template <int kColumns>
__device__ __forceinline__ void store_stage(const uint32_t* stage, uint32_t* qw, int tiles) {
  constexpr int kVectors = Piece<kColumns>::kTilePart / 4;
  for (int i = threadIdx.x; i < tiles * kVectors; i += kThreads) {
    const int tile = i / kVectors;
    const int vector = i % kVectors;
    reinterpret_cast<uint4*>(qw + static_cast<int64_t>(tile) * kTileWords)[vector] =
        reinterpret_cast<const uint4*>(stage)[i];
  }
}

// Writes scale and shift of one (group, output) from its extrema, and returns the rule for its codes.
__device__ __forceinline__ Rule finish_group(const QuantizeArgs& args, float lo, float hi, int64_t index) {
  float shift;
  const Rule rule = make_rule(args.mode, args.bits, args.scale_dtype, lo, hi, shift);
  store_element(args.scales, index, rule.scale, args.scale_dtype);
  if (args.mode != QuantizeMode::kSymmetric) {
    store_element(args.shift, index, shift, args.mode == QuantizeMode::kIntegerZeros ? DType::kU8 : args.scale_dtype);
  }
  return rule;
}

// Groups of at most kRegisterK inputs; group_warps = warps that share one.
template <typename T>
__global__ void __launch_bounds__(kThreads, kCtasPerSm<T>) quantize_groups(QuantizeArgs args, int group_warps) {
  constexpr int kColumns = kTileN / kThreadN;
  using Part = Piece<kColumns>;
  static_assert(Part::kBlocks == kWarps && Part::kInputs == kRegisterK, "a warp is a block of inputs");
  __shared__ float partial[2][kWarps][kTileN];
  __shared__ float4 rule_first[kRegisterK / kMinGroup * kTileN];
  __shared__ float rule_base[kRegisterK / kMinGroup * kTileN];
  __shared__ __align__(16) uint32_t stage[Part::words(8)];
  const RuleTable rules{rule_first, rule_base};

  // Counts of CTAs fit 32 bits, whose division is several times cheaper than that of 64.
  const uint32_t n_tiles = static_cast<uint32_t>(ceil_div(args.n, kTileN));
  const uint32_t k_pieces = static_cast<uint32_t>(ceil_div(args.k, kRegisterK));
  const int64_t n_tile = blockIdx.x % n_tiles;
  const int64_t k_piece = blockIdx.x / n_tiles % k_pieces;
  const int64_t batch = blockIdx.x / n_tiles / k_pieces;
  const int warp = threadIdx.x / 32;
  const int column = threadIdx.x % kColumns;
  const Place place{k_piece * kRegisterK + warp * kBlockK, static_cast<int>(threadIdx.x % 32 / kColumns),
                    n_tile * kTileN + column * kThreadN};
  const T* const w = static_cast<const T*>(args.w) + batch * args.k * args.n;

  Values<T> values;
  load_values<T>(values, w, place, args.k, args.n);
  float lo[kThreadN];
  float hi[kThreadN];
#pragma unroll
  for (int j = 0; j < kThreadN; ++j) {
    lo[j] = kInfinity;
    hi[j] = -kInfinity;
  }
  update_extrema(values, lo, hi);
  reduce_lanes<kColumns>(lo, hi);
  if (place.t == 0) {
#pragma unroll
    for (int j = 0; j < kThreadN; ++j) {
      partial[0][warp][rule_index<kColumns>(column * kThreadN + j)] = lo[j];
      partial[1][warp][rule_index<kColumns>(column * kThreadN + j)] = hi[j];
    }
  }
  __syncthreads();

  const int groups = kWarps / group_warps;
  const int64_t first_group = k_piece * groups;
  for (int item = threadIdx.x; item < groups * kTileN; item += kThreads) {
    const int group = item / kTileN;
    const int output = item % kTileN;
    const int index = rule_index<kColumns>(output);
    const int64_t n = n_tile * kTileN + output;
    if (first_group + group < args.groups && n < args.n) {
      float group_lo = partial[0][group * group_warps][index];
      float group_hi = partial[1][group * group_warps][index];
      for (int other = 1; other < group_warps; ++other) {
        group_lo = ptx::least_of(group_lo, partial[0][group * group_warps + other][index]);
        group_hi = ptx::largest_of(group_hi, partial[1][group * group_warps + other][index]);
      }
      const int64_t target = (batch * args.groups + first_group + group) * args.n + n;
      rules.put(group * kTileN + index, finish_group(args, group_lo, group_hi, target));
    } else {
      rules.put(group * kTileN + index, Rule{0.0f, 0.0f, 0.0f, 0.0f, 0.0f});
    }
  }
  __syncthreads();

  pack_values<T, kColumns>(values, w, place, args.k, args.n, args.bits, rules, warp / group_warps * kTileN, column,
                           warp, stage);
  __syncthreads();
  const int64_t k_tiles = ceil_div(args.k, tile_k(args.bits));
  const int piece_tiles = kRegisterK / tile_k(args.bits);
  const int64_t first_tile = k_piece * piece_tiles;
  const int tiles = static_cast<int>(k_tiles - first_tile < piece_tiles ? k_tiles - first_tile : piece_tiles);
  store_stage<kColumns>(stage, args.qw + ((batch * n_tiles + n_tile) * k_tiles + first_tile) * kTileWords, tiles);
}

// One scale per output over more than kRegisterK inputs: a CTA owns kColumns * 8 outputs and walks their inputs twice.
template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads, 2) quantize_channels(QuantizeArgs args) {
  using Part = Piece<kColumns>;
  __shared__ float partial[2][kWarps][Part::kOutputs];
  __shared__ float4 rule_first[Part::kOutputs];
  __shared__ float rule_base[Part::kOutputs];
  __shared__ __align__(16) uint32_t stage[Part::words(8)];
  const RuleTable rules{rule_first, rule_base};

  const uint32_t n_parts = static_cast<uint32_t>(ceil_div(args.n, kTileN)) * (kTileN / Part::kOutputs);
  const int64_t n_part = blockIdx.x % n_parts;
  const int64_t batch = blockIdx.x / n_parts;
  const int warp = threadIdx.x / 32;
  const int column = threadIdx.x % kColumns;
  const int block = threadIdx.x / (kColumns * kLanesK);
  Place place{0, static_cast<int>(threadIdx.x / kColumns % kLanesK), n_part * Part::kOutputs + column * kThreadN};
  const T* const w = static_cast<const T*>(args.w) + batch * args.k * args.n;
  const int64_t pieces = ceil_div(args.k, Part::kInputs);

  Values<T> values;
  float lo[kThreadN];
  float hi[kThreadN];
#pragma unroll
  for (int j = 0; j < kThreadN; ++j) {
    lo[j] = kInfinity;
    hi[j] = -kInfinity;
  }
  for (int64_t piece = 0; piece < pieces; ++piece) {
    place.k_block = piece * Part::kInputs + block * kBlockK;
    load_values<T>(values, w, place, args.k, args.n);
    update_extrema(values, lo, hi);
  }
  reduce_lanes<kColumns>(lo, hi);
  if (threadIdx.x % 32 < kColumns) {
#pragma unroll
    for (int j = 0; j < kThreadN; ++j) {
      partial[0][warp][rule_index<kColumns>(column * kThreadN + j)] = lo[j];
      partial[1][warp][rule_index<kColumns>(column * kThreadN + j)] = hi[j];
    }
  }
  __syncthreads();
  if (threadIdx.x < Part::kOutputs) {
    const int index = rule_index<kColumns>(threadIdx.x);
    const int64_t n = n_part * Part::kOutputs + threadIdx.x;
    if (n < args.n) {
      float group_lo = partial[0][0][index];
      float group_hi = partial[1][0][index];
      for (int other = 1; other < kWarps; ++other) {
        group_lo = ptx::least_of(group_lo, partial[0][other][index]);
        group_hi = ptx::largest_of(group_hi, partial[1][other][index]);
      }
      rules.put(index, finish_group(args, group_lo, group_hi, batch * args.n + n));
    } else {
      rules.put(index, Rule{0.0f, 0.0f, 0.0f, 0.0f, 0.0f});
    }
  }
  __syncthreads();

  const int64_t k_tiles = ceil_div(args.k, tile_k(args.bits));
  const int piece_tiles = Part::kInputs / tile_k(args.bits);
  const int64_t n_tile = n_part * Part::kOutputs / kTileN;
  uint32_t* const qw = args.qw + (batch * ceil_div(args.n, kTileN) + n_tile) * k_tiles * kTileWords +
                       n_part * Part::kOutputs % kTileN * (kTileWords / kTileN);
  for (int64_t piece = pieces - 1; piece >= 0; --piece) {
    place.k_block = piece * Part::kInputs + block * kBlockK;
    load_values<T>(values, w, place, args.k, args.n);
    pack_values<T, kColumns>(values, w, place, args.k, args.n, args.bits, rules, 0, column, block, stage);
    __syncthreads();
    const int64_t first_tile = piece * piece_tiles;
    const int tiles = static_cast<int>(k_tiles - first_tile < piece_tiles ? k_tiles - first_tile : piece_tiles);
    store_stage<kColumns>(stage, qw + first_tile * kTileWords, tiles);
    __syncthreads();
  }
}

template <typename... Args>
cudaError_t start(void (*kernel)(Args...), int64_t ctas, cudaStream_t stream, const Args&... args) {
  if (ctas > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidConfiguration;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(ctas));
  shape.threads = kThreads;
  return launch_kernel(kernel, shape, stream, args...);
}

template <typename T>
cudaError_t launch(const QuantizeArgs& args, cudaStream_t stream) {
  const int64_t n_tiles = args.batch * ceil_div(args.n, kTileN);
  const int64_t group_size = args.k / args.groups;
  if (group_size <= kRegisterK) {
    const int group_warps = args.groups > 1 ? static_cast<int>(group_size) / kBlockK : kWarps;
    return start(quantize_groups<T>, n_tiles * ceil_div(args.k, kRegisterK), stream, args, group_warps);
  }
  // Narrower pieces where there would be too few CTAs to fill the device's memory pipes.
  constexpr int64_t kEnoughCtas = 200;
  if (n_tiles >= kEnoughCtas) return start(quantize_channels<T, 8>, n_tiles, stream, args);
  if (2 * n_tiles >= kEnoughCtas) return start(quantize_channels<T, 4>, 2 * n_tiles, stream, args);
  return start(quantize_channels<T, 2>, 4 * n_tiles, stream, args);
}

}  // namespace

cudaError_t launch_quantize(const QuantizeArgs& args, cudaStream_t stream) {
  return dispatch_float(args.w_dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return launch<T>(args, stream);
  });
}

}  // namespace wonly
