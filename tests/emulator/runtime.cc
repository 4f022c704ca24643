// The CUDA runtime that the host code of the kernels calls, on no GPU: launches are put into a queue that
// Machine::run works off.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "machine.h"
#include "tensor.h"

namespace {

using namespace emulator;

struct Kernel {
  const std::vector<std::string>* modules;
  std::string name;
  std::shared_ptr<const Program> program;
  Fault fault;  // of the program
};

// What objects register before main.
std::map<const void*, Kernel>& kernels() {
  static std::map<const void*, Kernel> all;
  return all;
}

const Program& program_of(Kernel& kernel) {
  const Fault& fault = Machine::the().fault;
  if (!kernel.program || kernel.fault.name != fault.name || kernel.fault.number != fault.number) {
    kernel.program.reset();
    kernel.fault = fault;
    for (const std::string& module : *kernel.modules) {
      if (module.find(kernel.name) != std::string::npos) kernel.program = decode(module, kernel.name, fault);
    }
    if (kernel.program && kernel.program->lacks_one) ++Machine::the().faulty_kernels;
    if (!kernel.program) throw std::runtime_error("emulator: no PTX of " + kernel.name);
  }
  return *kernel.program;
}
Kernel& kernel_of(const void* function) {
  const auto found = kernels().find(function);
  if (found == kernels().end()) throw std::runtime_error("emulator: not a kernel");
  return found->second;
}

// The PTX of a fatbin: entries of kind 1, not compressed.
std::vector<std::string> ptx_of(const uint8_t* fatbin) {
  const auto read = [](const uint8_t* from, auto type) {
    std::memcpy(&type, from, sizeof type);
    return type;
  };
  std::vector<std::string> found;
  const uint8_t* at = fatbin + read(fatbin + 6, uint16_t{});
  const uint8_t* const end = at + read(fatbin + 8, uint64_t{});
  while (at < end) {
    const auto kind = read(at, uint16_t{});
    const auto header = read(at + 4, uint32_t{});
    const auto size = read(at + 8, uint64_t{});
    if (kind == 1) {
      const char* const text = reinterpret_cast<const char*>(at + header);
      found.emplace_back(text, strnlen(text, size));
    }
    at += header + size;
  }
  return found;
}

cudaError_t enqueue(const void* function, Dim grid, Dim block, Dim cluster, size_t shared, bool early, void** args) {
  Kernel& kernel = kernel_of(function);
  program_of(kernel);
  Launch launch(kernel.program, grid, block, cluster, static_cast<int64_t>(shared));
  launch.early = early;
  for (size_t i = 0; i < kernel.program->params.size(); ++i) launch.set_argument(i, args[i]);
  const int64_t threads = int64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > 1024 || grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535 ||
      grid.x % cluster.x != 0 || grid.y % cluster.y != 0 || grid.z % cluster.z != 0 ||
      launch.shared_bytes() > Machine::gpu.bytes_of_cta) {
    return cudaErrorInvalidConfiguration;
  }
  Machine::the().enqueue(std::move(launch));
  return cudaSuccess;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local std::vector<Configuration> configurations;

Dim dim_of(dim3 d) { return {d.x, d.y, d.z}; }

TensorMap& map_of(CUtensorMap* map) {
  std::memset(map, 0, sizeof *map);
  return *reinterpret_cast<TensorMap*>(map);
}
uint8_t size_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    default:
      return 4;
  }
}

// What the driver asks of both kinds of tensor map.
bool fill(TensorMap& map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* sizes,
          const cuuint64_t* strides, CUtensorMapSwizzle swizzle) {
  map.data = static_cast<uint8_t*>(data);
  map.rank = static_cast<uint8_t>(rank);
  map.element = size_of(type);
  map.swizzle128 = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  if (rank < 3 || rank > 4 || reinterpret_cast<uint64_t>(data) % 16 != 0) return false;
  for (cuuint32_t d = 0; d < rank; ++d) {
    if (sizes[d] == 0 || sizes[d] > (uint64_t{1} << 32)) return false;
    map.sizes[d] = static_cast<int32_t>(sizes[d]);
  }
  for (cuuint32_t d = 0; d + 1 < rank; ++d) {
    if (strides[d] % 16 != 0 || strides[d] >= uint64_t{1} << 40) return false;
    map.strides[d] = static_cast<int64_t>(strides[d]);
  }
  return true;
}

CUresult encode_tiled(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* sizes,
                      const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  TensorMap& map = map_of(to);
  if (!fill(map, type, rank, data, sizes, strides, swizzle)) return CUDA_ERROR_INVALID_VALUE;
  for (cuuint32_t d = 0; d < rank; ++d) {
    if (box[d] == 0 || box[d] > 256) return CUDA_ERROR_INVALID_VALUE;
    map.box[d] = static_cast<uint16_t>(box[d]);
  }
  const cuuint32_t inner = box[0] * map.element;
  if (inner % 16 != 0 || (map.swizzle128 && inner > 128)) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

CUresult encode_im2col(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* sizes,
                       const cuuint64_t* strides, const int* lower, const int* upper, cuuint32_t channels,
                       cuuint32_t pixels, const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  TensorMap& map = map_of(to);
  if (!fill(map, type, rank, data, sizes, strides, swizzle) || rank != 4) return CUDA_ERROR_INVALID_VALUE;
  if (channels == 0 || channels > 256 || pixels == 0 || pixels > 1024) return CUDA_ERROR_INVALID_VALUE;
  map.pixels = true;
  map.box[0] = static_cast<uint16_t>(channels);
  map.box[1] = static_cast<uint16_t>(pixels);
  for (int d = 0; d < 2; ++d) {
    if (std::max(std::abs(lower[d]), std::abs(upper[d])) > 128 || steps[d + 1] == 0 || steps[d + 1] > 8) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    map.lower[d] = static_cast<int16_t>(lower[d]);
    map.upper[d] = static_cast<int16_t>(upper[d]);
    map.steps[d] = static_cast<uint8_t>(steps[d + 1]);
  }
  return CUDA_SUCCESS;
}

CUresult launch_kernel(const CUlaunchConfig* config, CUfunction function, void** args, void**) {
  Dim cluster;
  bool early = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      cluster = {attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z};
    } else if (attribute.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
      early = attribute.value.programmaticStreamSerializationAllowed != 0;
    } else {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  const Dim grid = {config->gridDimX, config->gridDimY, config->gridDimZ};
  const Dim block = {config->blockDimX, config->blockDimY, config->blockDimZ};
  return static_cast<CUresult>(enqueue(function, grid, block, cluster, config->sharedMemBytes, early, args));
}

}  // namespace

extern "C" {

struct FatbinWrapper {
  int magic, version;
  const uint8_t* data;
  void* file;
};
void** __cudaRegisterFatBinary(void* wrapper) {
  return reinterpret_cast<void**>(new std::vector<std::string>(ptx_of(static_cast<FatbinWrapper*>(wrapper)->data)));
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaInitModule(void**) {}
void __cudaRegisterFunction(void** handle, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  kernels()[function] = {reinterpret_cast<std::vector<std::string>*>(handle), name, nullptr, {}};
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<void**>(stream) = last.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t) {
  return enqueue(kernel, dim_of(grid), dim_of(block), {}, shared, false, args);
}

cudaError_t cudaGetDevice(int* device) {
  *device = Machine::device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  return Machine::gpu.read(value, attribute);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  *attributes = {};
  attributes->sharedSizeBytes = static_cast<size_t>(program_of(kernel_of(function)).static_shared);
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* symbol) {
  *function = reinterpret_cast<cudaFunction_t>(const_cast<void*>(symbol));
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* ctas, const void* function, int threads,
                                                                   size_t shared, unsigned) {
  const int64_t bytes = static_cast<int64_t>(shared) + program_of(kernel_of(function)).static_shared;
  *ctas = Machine::ctas_of_multiprocessor(threads, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  Launch launch;
  launch.instead = [=] { std::memset(to, value, bytes); };
  Machine::the().enqueue(std::move(launch));
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const std::string wanted = name;
  *function = wanted == "cuTensorMapEncodeTiled"    ? reinterpret_cast<void*>(&encode_tiled)
              : wanted == "cuTensorMapEncodeIm2col" ? reinterpret_cast<void*>(&encode_im2col)
              : wanted == "cuLaunchKernelEx"        ? reinterpret_cast<void*>(&launch_kernel)
                                                    : nullptr;
  if (found != nullptr) *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the emulated runtime"; }

}  // extern "C"
