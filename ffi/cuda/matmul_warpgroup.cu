#include "cuda/matmul_warpgroup.h"

namespace wonly::warpgroup {
bool supports(const MatmulArgs& args) {
  const bool sixteen_bits = args.x_dtype == DType::kF16 || args.x_dtype == DType::kBF16;
  const bool aligned = args.k % 8 == 0 && args.k > 0 && args.m > 0;
  // Rows of scales and of zeros or offsets are copied in pieces of 16 bytes.
  const bool aligned_scales = args.groups == 1 || args.n * element_size(args.scale_dtype) % 16 == 0;
  const bool shifted = args.shift_mode != ShiftMode::kNone;
  const bool aligned_shifts = args.groups == 1 || !shifted || args.n * element_size(args.shift_dtype) % 16 == 0;
  return sixteen_bits && aligned && aligned_scales && aligned_shifts && args.shift_mode != ShiftMode::kTable;
}

bool is_plain(const MatmulArgs& args) {
  const bool zeros = args.shift_mode == ShiftMode::kZeros && args.shift_dtype == DType::kU8;
  return args.scale_dtype == args.x_dtype && args.n % 8 == 0 &&
         (args.shift_mode == ShiftMode::kNone || (zeros && args.n % 16 == 0));
}

cudaError_t launch(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  return args.x_dtype == DType::kF16 ? launch_f16(args, config, stream) : launch_bf16(args, config, stream);
}

}  // namespace wonly::warpgroup
