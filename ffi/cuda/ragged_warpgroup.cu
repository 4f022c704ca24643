#include "cuda/matmul_warpgroup.h"
#include "cuda/ragged_warpgroup.h"

namespace wonly::ragged_warpgroup {

bool supports(const RaggedArgs& args) {
  MatmulArgs product = args.product;
  product.m = args.m;
  return warpgroup::supports(product);
}

cudaError_t launch(const MatmulArgs& args, const ragged::Work& work, int64_t x_rows, int multiprocessors,
                   cudaStream_t stream) {
  return args.x_dtype == DType::kF16 ? launch_f16(args, work, x_rows, multiprocessors, stream)
                                     : launch_bf16(args, work, x_rows, multiprocessors, stream);
}

}  // namespace wonly::ragged_warpgroup
