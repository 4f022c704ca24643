// float32 activations: written to scratch as two fp16 numbers each, then multiplied by the kernel of
// matmul_warpgroup.cuh.
#include <algorithm>

#include "cuda/element.cuh"
#include "cuda/matmul_warpgroup.cuh"
#include "cuda/split_activations.cuh"

namespace wonly::warpgroup {
namespace {

template <int kBits, int kFlushes, Kind kKind>
cudaError_t launch_split(const SplitParams& params, const Config& config, cudaStream_t stream) {
  const auto launch = [&](auto tokens) {
    if constexpr (shares_evenly(tokens.value, 2, kBits, kFlushes > 1, false, kKind == Kind::kTable, true)) {
      using S = Shape<SplitRows, __half, kBits, tokens.value, 2, kFlushes, kKind, true>;
      if (config.cluster == kEvenly) return launch_shape(kKernel<S>, params, config, stream);
    }
    using S = Shape<SplitRows, __half, kBits, tokens.value, 2, kFlushes, kKind>;
    return launch_shape(kKernel<S>, params, config, stream);
  };
  if (config.warpgroups != 2) return cudaErrorInvalidConfiguration;
  constexpr bool kTable = kKind == Kind::kTable;
  if constexpr (kBits == 8 && kFlushes == 1) {  // so few of four bits are matmul_resident's
    if (config.tokens == 8) return launch(std::integral_constant<int, 8>{});
  }
  if (config.tokens == 16) return launch(std::integral_constant<int, 16>{});
  if (config.tokens == 32) return launch(std::integral_constant<int, 32>{});
  if (config.tokens == 64) return launch(std::integral_constant<int, 64>{});
  if constexpr (kBits == 4 && kFlushes == 1 && !kTable) {
    if (config.tokens == 48) return launch(std::integral_constant<int, 48>{});
    if (config.tokens == 96) return launch(std::integral_constant<int, 96>{});
  }
  return cudaErrorInvalidConfiguration;
}

template <int kBits, Kind kKind>
cudaError_t launch_kind(const SplitParams& params, const Config& config, cudaStream_t stream) {
  const int log2 = params.log2_group_blocks;
  return log2 == 0   ? launch_split<kBits, 4, kKind>(params, config, stream)
         : log2 == 1 ? launch_split<kBits, 2, kKind>(params, config, stream)
                     : launch_split<kBits, 1, kKind>(params, config, stream);
}

template <int kBits>
cudaError_t launch_bits(const SplitParams& params, const Config& config, cudaStream_t stream) {
  if constexpr (kBits == 4) {
    if (params.args.shift_mode == ShiftMode::kTable) return launch_kind<kBits, Kind::kTable>(params, config, stream);
  }
  return params.sums == nullptr ? launch_kind<kBits, Kind::kOther>(params, config, stream)
                                : launch_kind<kBits, Kind::kSums>(params, config, stream);
}

}  // namespace

cudaError_t launch_f32(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  SplitParams params{};
  params.args = args;
  params.log2_group_blocks = log2_group_blocks(args);
  params.sum_count = static_cast<int>(sum_count(args));
  MatmulArgs others = args;  // than the sums of CTAs that share stages evenly, of all rows at once
  if (config.cluster == kEvenly) {
    const int places = config.multiprocessors * config.teams;
    others.scratch_bytes = even_at(args.scratch_bytes, places, config.tokens, config.warpgroups);
    if (others.scratch_bytes < 0 || split_rows(others) < args.m) return cudaErrorInvalidConfiguration;
  }
  const int64_t rows = split_rows(others);
  const int64_t x_batch = args.x_batch_stride == 0 ? 1 : args.batch;
  for (int64_t first = 0; first < args.m; first += rows) {
    params.args.m = std::min(rows, args.m - first);
    params.args.x = static_cast<const float*>(args.x) + first * args.k;
    params.args.y = static_cast<uint8_t*>(args.y) + first * args.n * element_size(args.y_dtype);
    const int64_t all_rows = x_batch * params.args.m;
    ActivationSums sums{};
    if (params.sum_count > 0) {
      params.sum_stride = static_cast<int>(sum_stride(params.args.m));
      const int log2_group = params.log2_group_blocks < 0 ? 2 : std::min(params.log2_group_blocks, 2);
      static_assert(kStageK == 32 << 2 && kSplitEach == 32 >> 2);
      float* const to = static_cast<float*>(args.scratch) + all_rows * args.k + sum_stride(all_rows);
      sums = {to, log2_group + 2, params.sum_count, params.sum_stride, Divisor(static_cast<int>(params.args.m))};
    }
    params.sums = sums.to;
    float* powers;
    cudaError_t error = launch_split_activations(params.args.x, nullptr, Divisor(), all_rows, args.k, sums,
                                                 args.scratch, &powers, stream);
    params.powers = powers;
    if (error == cudaSuccess) {
      error = args.bits == 4 ? launch_bits<4>(params, config, stream) : launch_bits<8>(params, config, stream);
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace wonly::warpgroup
