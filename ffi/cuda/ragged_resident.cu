#include "cuda/ragged_resident.h"
#include "layout.h"

namespace wonly::ragged_resident {
namespace {

// What the kernel divides as floats: units of 32 x 64 weights, and strips of 32 outputs times CTAs. Of more inputs no
// row fits a CTA's shared memory.
constexpr int64_t kMostWeights = int64_t{1} << 31, kMostOutputs = 1 << 17, kMostInputs = 1 << 17;

}  // namespace

bool supports(const MatmulArgs& args) {
  return args.bits == 4 && args.k > 0 && args.k % 64 == 0 && args.n % 8 == 0 && args.n <= kMostOutputs &&
         args.k <= kMostInputs && args.n * args.k <= kMostWeights;
}

cudaError_t launch(const RaggedArgs& args, const Device& device, cudaStream_t stream) {
  const DType x = args.product.x_dtype;
  return x == DType::kF32   ? launch_f32(args, device, stream)
         : x == DType::kF16 ? launch_f16(args, device, stream)
                            : launch_bf16(args, device, stream);
}

}  // namespace wonly::ragged_resident
