// Which kernels the C++ dispatchers launch, and how: they are linked with launches that only say so, for a GPU that the
// arguments describe (tests/test_dispatcher.py).
//
//   dispatcher ARCHITECTURE MULTIPROCESSORS BYTES_OF_A_CTA BYTES_OF_A_MULTIPROCESSOR
//
// Every line of the input is an operation and numbers: "matmul" or "transposed" with m, k, n, batch, bits, groups, the
// types of x, scales and shift, the shift's mode (abi.h), and bytes of scratch; "conv" and "direct" with the same and
// images, groups of features and, of depth, height and width, what ConvAxis has. A line of the output is the kernel and
// its configuration, or "none".
#include <cuda_runtime_api.h>

#include <cstdint>
#include <iostream>
#include <string>

#include "cuda/conv.h"
#include "cuda/direct_conv.h"
#include "cuda/matmul.h"
#include "cuda/matmul_decode.h"
#include "cuda/matmul_mma.h"
#include "cuda/matmul_resident.h"
#include "cuda/matmul_stream.h"
#include "cuda/matmul_tiled.h"
#include "cuda/matmul_transposed.h"
#include "cuda/matmul_warpgroup.h"

namespace {

int architecture, multiprocessors, bytes_of_cta, bytes_of_multiprocessor;

template <typename... Numbers>
cudaError_t say(const char* kernel, Numbers... numbers) {
  std::cout << kernel;
  ((std::cout << ' ' << numbers), ...);
  std::cout << '\n';
  return cudaSuccess;
}

}  // namespace

// The linker puts these in place of CUDA's.
extern "C" cudaError_t __wrap_cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
extern "C" cudaError_t __wrap_cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = architecture / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = architecture % 10;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = multiprocessors;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = bytes_of_cta;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = bytes_of_multiprocessor;
      break;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      *value = 1024;
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}
// Of the kernel that adds up what matmul_mma leaves.
extern "C" cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  return cudaSuccess;
}

namespace wonly {

#define WONLY_SAY_FOR(launch, args_type, config_type, kernel, ...) \
  cudaError_t launch(const args_type&, const config_type& config, cudaStream_t) { return say(kernel, __VA_ARGS__); }
#define WONLY_SAY(args_type, config_type, kernel, ...)                   \
  WONLY_SAY_FOR(launch_f16, args_type, config_type, kernel, __VA_ARGS__) \
  WONLY_SAY_FOR(launch_bf16, args_type, config_type, kernel, __VA_ARGS__)

namespace tiled {
WONLY_SAY(MatmulArgs, Config, "matmul_tiled", config.tokens, config.splits, config.ctas)
}
namespace mma {
WONLY_SAY(MatmulArgs, Config, "matmul_mma", config.tokens, config.splits)
}
namespace warpgroup {
WONLY_SAY(MatmulArgs, Config, "matmul_warpgroup", config.tokens, config.warpgroups, config.cluster)
WONLY_SAY_FOR(launch_f32, MatmulArgs, Config, "matmul_warpgroup", config.tokens, config.warpgroups, config.cluster)
}  // namespace warpgroup
namespace stream {
WONLY_SAY(MatmulArgs, Config, "matmul_stream", config.atoms, config.warps, config.cluster)
WONLY_SAY_FOR(launch_f32, MatmulArgs, Config, "matmul_stream", config.atoms, config.warps, config.cluster)
WONLY_SAY_FOR(launch_table, MatmulArgs, Config, "matmul_stream", config.atoms, config.warps, config.cluster)
}  // namespace stream
namespace transposed_stream {
WONLY_SAY(MatmulArgs, Config, "matmul_transposed_stream", config.token_tiles, config.cluster)
WONLY_SAY_FOR(launch_f32, MatmulArgs, Config, "matmul_transposed_stream", config.token_tiles, config.cluster)
}  // namespace transposed_stream
namespace transposed_warpgroup {
WONLY_SAY(MatmulArgs, Config, "matmul_transposed_warpgroup", config.tokens, config.cluster)
}
namespace conv {
WONLY_SAY(ConvArgs, tiled::Config, "tiled", config.tokens, config.splits, config.ctas)
WONLY_SAY(ConvArgs, warpgroup::Config, "warpgroup", config.tokens, config.warpgroups, config.cluster)
}  // namespace conv

#undef WONLY_SAY
#undef WONLY_SAY_FOR

namespace resident {
cudaError_t say_of(const Config& config) { return say("matmul_resident", config.cluster, config.parts); }
cudaError_t launch_f16(const MatmulArgs&, const Config& config, int, cudaStream_t) { return say_of(config); }
cudaError_t launch_bf16(const MatmulArgs&, const Config& config, int, cudaStream_t) { return say_of(config); }
cudaError_t launch_f32(const MatmulArgs&, const Config& config, int, cudaStream_t) { return say_of(config); }
}  // namespace resident
namespace decode {
cudaError_t launch_int4(const MatmulArgs&, const Config&, int, cudaStream_t) { return say("matmul_decode"); }
cudaError_t launch_int8(const MatmulArgs&, const Config&, int, cudaStream_t) { return say("matmul_decode"); }
}  // namespace decode
namespace bands {
cudaError_t launch_f16(const DirectConvArgs&, int, cudaStream_t) { return say("bands"); }
cudaError_t launch_bf16(const DirectConvArgs&, int, cudaStream_t) { return say("bands"); }
}  // namespace bands
namespace grouped {
cudaError_t launch_f16(const DirectConvArgs&, int, int, cudaStream_t) { return say("grouped"); }
cudaError_t launch_bf16(const DirectConvArgs&, int, int, cudaStream_t) { return say("grouped"); }
}  // namespace grouped
namespace depthwise {
cudaError_t launch_f16(const DirectConvArgs&, const Config&, int, cudaStream_t) { return say("depthwise"); }
cudaError_t launch_bf16(const DirectConvArgs&, const Config&, int, cudaStream_t) { return say("depthwise"); }
cudaError_t launch_f32(const DirectConvArgs&, const Config&, int, cudaStream_t) { return say("depthwise"); }
}  // namespace depthwise

}  // namespace wonly

int main(int argc, char** argv) {
  using namespace wonly;
  if (argc != 5) return 2;
  int* const to[] = {&architecture, &multiprocessors, &bytes_of_cta, &bytes_of_multiprocessor};
  for (int i = 0; i < 4; ++i) *to[i] = std::stoi(argv[i + 1]);
  std::string operation;
  while (std::cin >> operation) {
    MatmulArgs args{};
    int x_type, scale_type, shift_type, mode;
    std::cin >> args.m >> args.k >> args.n >> args.batch >> args.bits >> args.groups >> x_type >> scale_type >>
        shift_type >> mode >> args.scratch_bytes;
    args.x_dtype = args.y_dtype = static_cast<DType>(x_type);
    args.scale_dtype = static_cast<DType>(scale_type);
    args.shift_dtype = static_cast<DType>(shift_type);
    args.shift_mode = static_cast<ShiftMode>(mode);
    args.x_batch_stride = args.m * args.k;
    args.scales_batch_stride = args.shift_batch_stride = args.groups * args.n;
    cudaError_t error = cudaErrorInvalidValue;
    if (operation == "matmul") error = launch_matmul(args, nullptr);
    if (operation == "transposed") error = launch_matmul_transposed(args, nullptr);
    if (operation == "conv" || operation == "direct") {
      DirectConvGeometry g{};
      std::cin >> g.images >> g.groups;
      for (ConvAxis* a : {&g.depth, &g.height, &g.width}) {
        std::cin >> a->size >> a->result >> a->window >> a->stride >> a->low >> a->dilation >> a->spread;
      }
      if (operation == "direct") {
        error = launch_direct_conv({args, g}, nullptr);
      } else {
        const ConvArgs conv_args{args, {g.images, g.height, g.width}};
        error = conv::supports(conv_args) ? launch_conv(conv_args, nullptr) : cudaErrorNotSupported;
      }
    }
    if (error == cudaErrorNotSupported) {
      say("none");
    } else if (error != cudaSuccess) {
      say("error", static_cast<int>(error));
    }
  }
  return 0;
}
