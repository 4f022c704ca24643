#include "cuda/matmul_decode.h"

namespace wonly::decode {

bool supports(const MatmulArgs& args) {
  const int log2 = log2_group_blocks(args);
  return args.m <= kMaxTokens && args.k > 0 && (log2 < 0 || log2 >= 2) && args.shift_mode != ShiftMode::kTable;
}

cudaError_t launch(const MatmulArgs& args, const Config& config, int shared_bytes, cudaStream_t stream) {
  return args.bits == 4 ? launch_int4(args, config, shared_bytes, stream)
                        : launch_int8(args, config, shared_bytes, stream);
}

cudaError_t launch_ragged(const MatmulArgs& args, const ragged::Work& work, int ctas, int shared_bytes,
                          cudaStream_t stream) {
  return args.bits == 4 ? launch_ragged_int4(args, work, ctas, shared_bytes, stream)
                        : launch_ragged_int8(args, work, ctas, shared_bytes, stream);
}

}  // namespace wonly::decode
