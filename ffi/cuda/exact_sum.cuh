// A product's output as a dense product computes it: where infinities and NaNs must propagate.
#pragma once

#include "cuda/element.cuh"
#include "cuda/matmul.h"
#include "layout.h"

namespace wonly {

// sum over [k_begin, k_end) of w[k, n] x[m, k], each weight dequantized first.
inline __device__ __noinline__ float exact_sum(const MatmulArgs& args, int64_t batch, int64_t m, int64_t n,
                                               int64_t k_begin, int64_t k_end) {
  const int step = tile_k(args.bits);
  const int64_t tiles = ceil_div(args.k, step);
  const int64_t group_size = args.k / args.groups;
  float sum = 0.f;
  for (int64_t k = k_begin; k < k_end; ++k) {
    const CodePosition at = code_position(args.bits, static_cast<int>(k % step), static_cast<int>(n % kTileN));
    const uint32_t word =
        args.qw[batch * args.qw_batch_stride + ((n / kTileN) * tiles + k / step) * kTileWords + at.word];
    const float code = static_cast<float>((word >> at.shift) & ((1u << args.bits) - 1u));
    const int64_t index = (k / group_size) * args.n + n;
    const float scale = load_element(args.scales, batch * args.scales_batch_stride + index, args.scale_dtype);
    const float shift = args.shift_mode == ShiftMode::kNone
                            ? static_cast<float>(bias_of(args.bits))
                            : load_element(args.shift, batch * args.shift_batch_stride + index, args.shift_dtype);
    const float weight = args.shift_mode == ShiftMode::kOffsets ? code * scale + shift : (code - shift) * scale;
    sum += weight * load_element(args.x, batch * args.x_batch_stride + m * args.k + k, args.x_dtype);
  }
  return sum;
}

}  // namespace wonly
