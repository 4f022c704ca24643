// Which kernels the C++ dispatchers launch, and how: they are linked with launches that only say so, for a GPU that the
// arguments describe (tests/test_dispatcher.py).
//
//   dispatcher ARCHITECTURE MULTIPROCESSORS BYTES_OF_A_CTA BYTES_OF_A_MULTIPROCESSOR
//
// Every line of the input is an operation and numbers: "matmul" or "transposed" with m, k, n, batch, bits, groups, the
// types of x, scales and shift, the shift's mode (abi.h), and bytes of scratch; "conv" and "direct" with the same and
// images, groups of features and, of depth, height and width, what ConvAxis has; "ragged" and "ragged_transposed" with
// the same, where the batch is the experts, and the mode of the rows. A line of the output is the kernel and its
// configuration, or "none"; "matmul_parts", the outputs of the first and both with theirs, where two kernels have a
// part of a product each. Of ragged products what launches the kernels is here too, so that it is all kernels one after
// the other, each with its CTAs along x and y, threads, CTAs of a cluster, and bytes of shared memory.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <map>
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
#include "cuda/ragged.h"
#include "cuda/ragged_resident.h"
#include "cuda/ragged_tiled.h"
#include "cuda/ragged_warpgroup.h"
#include "cuda/tensor_map.h"
#include "device_attributes.h"

namespace {

DeviceAttributes gpu;
bool says_launches = false;       // of kernels that are here
wonly::RaggedArgs ragged_args{};  // the product whose kernels are launched

// Names of the kernels that are here, by what the host calls them.
std::map<const void*, std::string>& kernels() {
  static std::map<const void*, std::string> names;
  return names;
}

// The last name of `wonly::ragged::plan_kernel<8>(...)`, without arguments.
std::string short_name(const char* mangled) {
  int status = 0;
  char* const found = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = status == 0 ? found : mangled;
  std::free(found);
  for (const char* of_none : {"(anonymous namespace)", "void "}) {
    if (const size_t at = name.find(of_none); at != std::string::npos) name.erase(at, std::string(of_none).size());
  }
  name.erase(std::min(name.find_first_of("<("), name.size()));
  return name.substr(name.rfind(':') + 1);
}

// Once for a call: rows that scratch does not hold at a time are taken in parts, by the same kernel.
bool said;
template <typename... Numbers>
cudaError_t say(const char* kernel, Numbers... numbers) {
  if (said) return cudaSuccess;
  said = true;
  std::cout << kernel;
  ((std::cout << ' ' << numbers), ...);
  std::cout << '\n';
  return cudaSuccess;
}

// The same of a kernel that may have one of a product's two parts: "matmul_parts", the outputs of the first, and both.
template <typename... Numbers>
cudaError_t say_part(const wonly::Part& part, const char* kernel, Numbers... numbers) {
  if (part.outputs > 0) {
    std::cout << "matmul_parts " << part.outputs << ' ' << kernel;
    ((std::cout << ' ' << numbers), ...);
    std::cout << ' ';
    return cudaSuccess;
  }
  return say(kernel, numbers...);
}

}  // namespace

// The linker puts these in place of CUDA's.
extern "C" cudaError_t __wrap_cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
extern "C" cudaError_t __wrap_cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  return gpu.read(value, attribute);
}
extern "C" void __real___cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*,
                                              int*);
extern "C" void __wrap___cudaRegisterFunction(void** binary, const char* host, char* device, const char* name,
                                              int threads, void* a, void* b, void* c, void* d, int* size) {
  kernels()[host] = short_name(name);
  __real___cudaRegisterFunction(binary, host, device, name, threads, a, b, c, d, size);
}
extern "C" cudaError_t __wrap_cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  return cudaSuccess;
}
extern "C" cudaError_t __wrap_cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
extern "C" cudaError_t __wrap_cudaGetFuncBySymbol(cudaFunction_t* function, const void* kernel) {
  *function = reinterpret_cast<cudaFunction_t>(const_cast<void*>(kernel));
  return cudaSuccess;
}
// Also of the kernel that adds up what matmul_mma leaves, of which nothing is said.
static CUresult say_launch(const CUlaunchConfig* config, CUfunction kernel, void**, void**) {
  if (!says_launches) return CUDA_SUCCESS;
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) continue;
    cluster = config->attrs[i].value.clusterDim.x * config->attrs[i].value.clusterDim.y;
  }
  std::cout << kernels().at(kernel) << ' ' << config->gridDimX << ' ' << config->gridDimY << ' ' << config->blockDimX
            << ' ' << cluster << ' ' << config->sharedMemBytes << ' ';
  return CUDA_SUCCESS;
}
extern "C" cudaError_t __wrap_cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                                               unsigned long long,
                                                               cudaDriverEntryPointQueryResult* found) {
  *function = reinterpret_cast<void*>(&say_launch);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

namespace wonly {

#define WONLY_SAY_FOR(launch, args_type, config_type, kernel, ...) \
  cudaError_t launch(const args_type&, const config_type& config, cudaStream_t) { return say(kernel, __VA_ARGS__); }
#define WONLY_SAY(args_type, config_type, kernel, ...)                   \
  WONLY_SAY_FOR(launch_f16, args_type, config_type, kernel, __VA_ARGS__) \
  WONLY_SAY_FOR(launch_bf16, args_type, config_type, kernel, __VA_ARGS__)

namespace mma {
WONLY_SAY(MatmulArgs, Config, "matmul_mma", config.tokens, config.splits)
}
namespace stream {
WONLY_SAY(MatmulArgs, Config, "matmul_stream", config.atoms, config.warps, config.cluster)
WONLY_SAY_FOR(launch_f32, MatmulArgs, Config, "matmul_stream", config.atoms, config.warps, config.cluster)
WONLY_SAY_FOR(launch_table, MatmulArgs, Config, "matmul_stream", config.atoms, config.warps, config.cluster)
}  // namespace stream
namespace transposed_stream {
WONLY_SAY(MatmulArgs, Config, "matmul_transposed_stream", config.token_tiles, config.cluster, config.warps,
          config.shared_bytes)
WONLY_SAY_FOR(launch_f32, MatmulArgs, Config, "matmul_transposed_stream", config.token_tiles, config.cluster,
              config.warps, config.shared_bytes)
}  // namespace transposed_stream
namespace transposed_warpgroup {
WONLY_SAY_FOR(launch, MatmulArgs, Config, "matmul_transposed_warpgroup", config.tokens, config.cluster)
WONLY_SAY_FOR(launch_f32, MatmulArgs, Config, "matmul_transposed_warpgroup", config.tokens, config.cluster)
}  // namespace transposed_warpgroup
namespace conv {
WONLY_SAY(ConvArgs, tiled::Config, "tiled", config.tokens, config.splits, config.ctas)
WONLY_SAY(ConvArgs, warpgroup::Config, "warpgroup", config.tokens, config.warpgroups, config.cluster)
}  // namespace conv

#undef WONLY_SAY
#define WONLY_SAY_PART(launch, kernel, ...)                                   \
  cudaError_t launch(const MatmulArgs&, const Config& config, cudaStream_t) { \
    return say_part(config.part, kernel, __VA_ARGS__);                        \
  }
#undef WONLY_SAY_FOR

namespace tiled {
WONLY_SAY_PART(launch_f16, "matmul_tiled", config.tokens, config.splits, config.ctas)
WONLY_SAY_PART(launch_bf16, "matmul_tiled", config.tokens, config.splits, config.ctas)
}  // namespace tiled
namespace warpgroup {
#define WONLY_SAY_WARPGROUP(launch) \
  WONLY_SAY_PART(launch, "matmul_warpgroup", config.tokens, config.warpgroups, config.cluster, config.teams)
WONLY_SAY_WARPGROUP(launch_f16)
WONLY_SAY_WARPGROUP(launch_bf16)
WONLY_SAY_WARPGROUP(launch_f32)
#undef WONLY_SAY_WARPGROUP
}  // namespace warpgroup

#undef WONLY_SAY_PART

namespace resident {
cudaError_t say_of(const Config& config) {
  return say("matmul_resident", config.cluster, config.parts, config.pass_atoms, config.tiles);
}
cudaError_t launch_four_bits(const MatmulArgs&, int64_t, const Config& config, int, cudaStream_t) {
  return say_of(config);
}
cudaError_t launch_eight_bits(const MatmulArgs&, int64_t, const Config& config, int, cudaStream_t) {
  return say_of(config);
}
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

// What the tensor copy engine takes: rows that are whole pieces of 16 bytes, in boxes of up to 256 of each; rows of
// activations that were put in order have their place in scratch.
cudaError_t describe_activations(const MatmulArgs& args, int tokens, CUtensorMap*) {
  const char* const x = static_cast<const char*>(args.x);
  const char* const scratch = reinterpret_cast<const char*>(ragged_args.scratch);
  const bool inside = x == ragged_args.product.x || (x >= scratch && x + args.m * args.k * element_size(args.x_dtype) <=
                                                                         scratch + 4 * ragged_args.scratch_words);
  return args.k % 8 == 0 && tokens <= 256 && reinterpret_cast<uintptr_t>(x) % 16 == 0 && inside ? cudaSuccess
                                                                                                : cudaErrorInvalidValue;
}
cudaError_t describe_rows(const void*, int size, int64_t columns, int64_t, int64_t, int box_columns, int box_rows,
                          CUtensorMap*) {
  return columns * size % 16 == 0 && box_columns <= 256 && box_rows <= 256 ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace wonly

int main(int argc, char** argv) {
  using namespace wonly;
  if (argc != 5) return 2;
  int* const to[] = {&gpu.architecture, &gpu.multiprocessors, &gpu.bytes_of_cta, &gpu.bytes_of_multiprocessor};
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
    args.parameter_row = args.n;
    args.x_batch_stride = args.m * args.k;
    args.scales_batch_stride = args.groups * args.n;
    args.shift_batch_stride = args.shift_mode == ShiftMode::kTable ? 0 : args.scales_batch_stride;
    said = false;
    cudaError_t error = cudaErrorInvalidValue;
    if (operation == "matmul") error = launch_matmul(args, nullptr);
    if (operation == "transposed") error = launch_matmul_transposed(args, nullptr);
    if (operation == "ragged" || operation == "ragged_transposed") {
      int row_mode;
      std::cin >> row_mode;
      ragged_args = {args, nullptr, static_cast<RowMode>(row_mode), args.batch, args.m, 1, nullptr, 0};
      ragged_args.product.m = ragged_args.product.batch = ragged_args.product.x_batch_stride = 0;
      ragged_args.product.scratch_bytes = 0;
      ragged_args.scratch = reinterpret_cast<int32_t*>(uintptr_t{1} << 40);
      ragged_args.scratch_words = args.scratch_bytes / 4;
      says_launches = true;
      error = operation == "ragged" ? launch_ragged_matmul(ragged_args, nullptr)
                                    : launch_ragged_matmul_transposed(ragged_args, nullptr);
      says_launches = false;
      if (error == cudaSuccess) std::cout << '\n';
    }
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
