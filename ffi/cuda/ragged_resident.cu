#include "cuda/ragged_resident.h"
#include "layout.h"

namespace wonly::ragged_resident {
namespace {

// What the kernel divides as floats: strips of 32 outputs times CTAs. Of more inputs no row fits a CTA's shared memory.
constexpr int64_t kMostOutputs = 1 << 17, kMostInputs = 1 << 17;

}  // namespace

bool supports(const MatmulArgs& args) {
  return args.k > 0 && args.k % tile_k(args.bits) == 0 && args.n % 8 == 0 && args.n <= kMostOutputs &&
         args.k <= kMostInputs;
}

cudaError_t launch(const RaggedArgs& args, const Device& device, cudaStream_t stream) {
  return args.product.bits == 8 ? launch_eight_bits(args, device, stream) : launch_four_bits(args, device, stream);
}

}  // namespace wonly::ragged_resident
