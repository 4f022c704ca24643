#include "cuda/matmul_decode.h"

namespace wonly::decode {

bool supports(const MatmulArgs& args) {
  if (args.m > kMaxTokens || args.k <= 0 || args.shift_mode == ShiftMode::kTable) return false;
  const int scale_size = element_size(args.scale_dtype);
  if (shift_bytes(args) > 1 && shift_bytes(args) != scale_size) return false;
  const int groups = stage_groups(args);
  if (groups == 4 && args.m > 1) return false;
  return groups == 1 || args.k % 128 == 0;  // whole stages
}

cudaError_t launch(const MatmulArgs& args, const Config& config, int shared_bytes, cudaStream_t stream) {
  return args.bits == 4 ? launch_int4(args, config, shared_bytes, stream)
                        : launch_int8(args, config, shared_bytes, stream);
}

}  // namespace wonly::decode
