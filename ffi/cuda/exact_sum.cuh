// A product's output as a dense product computes it: where infinities and NaNs must propagate.
#pragma once

#include "cuda/element.cuh"
#include "cuda/matmul.h"
#include "layout.h"

namespace wonly {

// One dequantized weight. Without divisions, which every kernel would have the code of. kTable: codes index a table.
template <bool kTable = false>
inline __device__ float weight_at(const MatmulArgs& args, int64_t batch, int64_t k, int64_t n) {
  static_assert(tile_k(4) == 64 && tile_k(8) == 32);
  const int log2_step = args.bits == 4 ? 6 : 5, log2_group = log2_group_blocks(args);
  const int of_tile = static_cast<int>(k) & ((1 << log2_step) - 1);
  const CodePosition at = code_position(args.bits, of_tile, static_cast<int>(n) & (kTileN - 1));
  const int64_t tiles = (args.k + (1 << log2_step) - 1) >> log2_step;
  const int64_t tile = (n / kTileN) * tiles + (k >> log2_step);
  const uint32_t word = args.qw[batch * args.qw_batch_stride + tile * kTileWords + at.word];
  const float code = static_cast<float>((word >> at.shift) & ((1u << args.bits) - 1u));
  const int64_t index = (log2_group < 0 ? 0 : k >> (log2_group + 5)) * args.parameter_row + n;
  const float scale = load_element(args.scales, batch * args.scales_batch_stride + index, args.scale_dtype);
  if constexpr (kTable) {
    const float* const table = static_cast<const float*>(args.shift) + batch * args.shift_batch_stride;
    return table[static_cast<int>(code)] * scale;
  }
  const float shift = args.shift_mode == ShiftMode::kNone
                          ? static_cast<float>(bias_of(args.bits))
                          : load_element(args.shift, batch * args.shift_batch_stride + index, args.shift_dtype);
  return weight_of(args.shift_mode, code, scale, shift);
}

// sum over [k_begin, k_end) of w[k, n] x[m, k], each weight dequantized first.
template <bool kTable = false>
inline __device__ __noinline__ float exact_sum(const MatmulArgs& args, int64_t batch, int64_t m, int64_t n,
                                               int64_t k_begin, int64_t k_end) {
  float sum = 0.f;
#pragma unroll 1
  for (int64_t k = k_begin; k < k_end; ++k) {
    const float x = load_element(args.x, batch * args.x_batch_stride + m * args.k + k, args.x_dtype);
    sum += weight_at<kTable>(args, batch, k, n) * x;
  }
  return sum;
}

// sum over n of w[k, n] dy[m, n]; args.x is dy.
template <bool kTable = false>
inline __device__ __noinline__ float exact_sum_transposed(const MatmulArgs& args, int64_t batch, int64_t m, int64_t k) {
  float sum = 0.f;
#pragma unroll 1
  for (int64_t n = 0; n < args.n; ++n) {
    const float dy = load_element(args.x, batch * args.x_batch_stride + m * args.n + n, args.x_dtype);
    sum += weight_at<kTable>(args, batch, k, n) * dy;
  }
  return sum;
}

}  // namespace wonly
