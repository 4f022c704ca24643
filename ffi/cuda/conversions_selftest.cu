// The device bodies of the conversions, for the test that compares them with the portable ones bit for bit.
#include <cuda_runtime.h>

#include "cuda/launch.h"
#include "cuda/quantize.h"
#include "dequant/selftest.h"
#include "layout.h"

namespace wonly {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    convert_words(int conversion, int outputs, const uint32_t* in, uint32_t* out, int64_t words) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < words) selftest_convert(static_cast<SelftestConversion>(conversion), in[i], out + i * outputs);
}

}  // namespace

cudaError_t launch_conversion_selftest(int conversion, const uint32_t* in, uint32_t* out, int64_t words,
                                       cudaStream_t stream) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(ceil_div(words, kThreads)));
  shape.threads = kThreads;
  return launch_kernel(convert_words, shape, stream, conversion, selftest_outputs(conversion), in, out, words);
}

}  // namespace wonly
