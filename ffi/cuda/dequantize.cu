// Dequantization: packed codes to a dense weight, for products so large that a dense one is faster, and for users who
// want it back. A thread takes the word (four-bit codes) or the two words (eight-bit ones) of each of eight
// neighbouring outputs, which hold the same eight inputs, and writes one 16-byte piece of each of those inputs' rows.
#include <cuda_runtime.h>

#include <cstdint>
#include <limits>
#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/launch.h"
#include "cuda/quantize.h"
#include "dequant/convert.h"
#include "layout.h"

namespace wonly {
namespace {

constexpr int kThreads = 256;
constexpr int kBlockK = 32;  // inputs of a warp: those that a word of four-bit codes is taken from
constexpr int kWarps = kThreads / 32;
constexpr int kThreadN = 8;                  // outputs of a thread
constexpr int kThreadK = 8;                  // inputs of a thread
constexpr int kColumns = kTileN / kThreadN;  // threads of a warp along the outputs
constexpr int kPieceK = kWarps * kBlockK;    // inputs of a CTA

// Eight values of a row of scales or shift from `index` on; those past `count` are zero. `vector`: the row is 8-element
// aligned.
__device__ __forceinline__ void load_parameters(const void* array, int64_t index, DType type, int count, bool vector,
                                                float (&values)[kThreadN]) {
  if (vector && type != DType::kU8) {
    const auto load = [&](auto* typed) {
      using T = std::remove_pointer_t<decltype(typed)>;
      Row8<T> row;
      row.load(static_cast<const T*>(array) + index);
#pragma unroll
      for (int j = 0; j < kThreadN; ++j) values[j] = to_float(row.elements[j]);
    };
    if (type == DType::kF16) {
      load(static_cast<__half*>(nullptr));
    } else if (type == DType::kBF16) {
      load(static_cast<__nv_bfloat16*>(nullptr));
    } else {
      load(static_cast<float*>(nullptr));
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kThreadN; ++j) values[j] = j < count ? load_element(array, index + j, type) : 0.0f;
}

template <typename T, int kBits, ShiftMode kMode>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2) dequantize_tiles(DequantizeArgs args) {
  __shared__ float table[kTableEntries];  // sixteen banks: look-ups of a warp never wait for each other
  // Counts of CTAs and inputs fit 32 bits, whose division is several times cheaper than that of 64.
  const uint32_t n_tiles = static_cast<uint32_t>(ceil_div(args.n, kTileN));
  const int64_t k_tiles = ceil_div(args.k, tile_k(kBits));
  const uint32_t k_pieces = static_cast<uint32_t>(ceil_div(args.k, kPieceK));
  const int64_t n_tile = blockIdx.x % n_tiles;
  const int64_t k_piece = blockIdx.x / n_tiles % k_pieces;
  const int64_t batch = blockIdx.x / n_tiles / k_pieces;
  const int column = threadIdx.x % kColumns;
  const int t = threadIdx.x % 32 / kColumns;
  const int64_t k_block = k_piece * kPieceK + threadIdx.x / 32 * kBlockK;
  const int64_t n = n_tile * kTileN + column * kThreadN;
  if constexpr (kMode == ShiftMode::kTable) {
    if (threadIdx.x < kTableEntries) {
      table[threadIdx.x] = __ldg(static_cast<const float*>(args.shift) + batch * args.shift_batch_stride + threadIdx.x);
    }
    __syncthreads();
  }
  if (k_block >= args.k || n >= args.n) return;
  const int count = static_cast<int>(args.n - n < kThreadN ? args.n - n : kThreadN);
  const bool vector = args.n % kThreadN == 0;

  // Output j of the thread lies j lane groups further than the first.
  const CodePosition position =
      code_position(kBits, static_cast<int>(k_block % tile_k(kBits)) + 2 * t, column * kThreadN);
  const uint32_t* const source = args.qw + batch * args.qw_batch_stride +
                                 (n_tile * k_tiles + k_block / tile_k(kBits)) * kTileWords + position.word;
  uint32_t words[kThreadN][kBits / 4];
#pragma unroll
  for (int j = 0; j < kThreadN; ++j) {
#pragma unroll
    for (int half = 0; half < kBits / 4; ++half) words[j][half] = __ldg(source + j * 16 + half * 2);
  }

  // A block of 32 inputs lies within one group: groups are multiples of it, or all of the inputs.
  const uint32_t group_size = static_cast<uint32_t>(args.k) / static_cast<uint32_t>(args.groups);
  const int64_t group = static_cast<uint32_t>(k_block) / group_size;
  const int64_t parameter = group * args.n + n;
  float scales[kThreadN];
  float shifts[kThreadN];
  load_parameters(args.scales, batch * args.scales_batch_stride + parameter, args.scale_dtype, count, vector, scales);
  if (kMode == ShiftMode::kZeros || kMode == ShiftMode::kOffsets) {
    load_parameters(args.shift, batch * args.shift_batch_stride + parameter, args.shift_dtype, count, vector, shifts);
  }

  T* const target = static_cast<T*>(args.w) + batch * args.k * args.n + n;
#pragma unroll
  for (int i = 0; i < kThreadK; ++i) {
    const int64_t k = k_block + 8 * (i / 2) + 2 * t + i % 2;
    Row8<T> row;
#pragma unroll
    for (int j = 0; j < kThreadN; ++j) {
      constexpr uint32_t kMask = (1u << kBits) - 1;
      const uint32_t code = kBits == 4 ? words[j][0] >> (4 * (i / 2) + 16 * (i % 2))
                                       : words[j][i / 4 % (kBits / 4)] >> (8 * (i / 2 % 2) + 16 * (i % 2));
      float value;
      if (kMode == ShiftMode::kNone) {
        value = __fmul_rn(code_to_f32(code & kMask, static_cast<float>(bias_of(kBits))), scales[j]);
      } else if (kMode == ShiftMode::kZeros) {
        value = __fmul_rn(__fsub_rn(code_to_f32(code & kMask), shifts[j]), scales[j]);
      } else if (kMode == ShiftMode::kTable) {
        value = __fmul_rn(table[code & kMask], scales[j]);
      } else {
        value = __fadd_rn(__fmul_rn(code_to_f32(code & kMask), scales[j]), shifts[j]);
      }
      row.elements[j] = from_float<T>(value);
    }
    if (k >= args.k) continue;
    if (vector) {
      row.store(target + k * args.n);
    } else {
      row.store_some(target + k * args.n, count);
    }
  }
}

template <typename T, int kBits>
cudaError_t launch(const DequantizeArgs& args, cudaStream_t stream) {
  const int64_t ctas = args.batch * ceil_div(args.n, kTileN) * ceil_div(args.k, kPieceK);
  if (ctas > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidConfiguration;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(ctas));
  shape.threads = kThreads;
  switch (args.shift_mode) {
    case ShiftMode::kNone:
      return launch_kernel(dequantize_tiles<T, kBits, ShiftMode::kNone>, shape, stream, args);
    case ShiftMode::kZeros:
      return launch_kernel(dequantize_tiles<T, kBits, ShiftMode::kZeros>, shape, stream, args);
    case ShiftMode::kOffsets:
      return launch_kernel(dequantize_tiles<T, kBits, ShiftMode::kOffsets>, shape, stream, args);
    case ShiftMode::kTable:
      if constexpr (kBits == 4) {
        return launch_kernel(dequantize_tiles<T, kBits, ShiftMode::kTable>, shape, stream, args);
      }
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_dequantize(const DequantizeArgs& args, cudaStream_t stream) {
  return dispatch_float(args.w_dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return args.bits == 4 ? launch<T, 4>(args, stream) : launch<T, 8>(args, stream);
  });
}

}  // namespace wonly
