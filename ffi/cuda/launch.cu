#include <cudaTypedefs.h>

#include <unordered_map>
#include <vector>

#include "cuda/driver.h"
#include "cuda/launch.h"

namespace wonly {
namespace {

// What the driver calls a kernel on the current device, where its CTAs may have all of the shared memory from now on: a
// property of the function, not of the stream, so without effect on a graph that is captured.
cudaError_t function_of(const void* kernel, cudaFunction_t* function) {
  thread_local std::vector<std::unordered_map<const void*, cudaFunction_t>> of_devices;
  int device = 0, most = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (of_devices.size() <= static_cast<size_t>(device)) of_devices.resize(static_cast<size_t>(device) + 1);
  auto& known = of_devices[static_cast<size_t>(device)];
  if (const auto found = known.find(kernel); found != known.end()) {
    *function = found->second;
    return cudaSuccess;
  }
  cudaFuncAttributes attributes;
  cudaError_t error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 most - static_cast<int>(attributes.sharedSizeBytes));
  }
  if (error == cudaSuccess) error = cudaGetFuncBySymbol(function, kernel);
  if (error == cudaSuccess) known.emplace(kernel, *function);
  return error;
}

}  // namespace

cudaError_t allow_shared_memory(const void* kernel) {
  cudaFunction_t function;
  return function_of(kernel, &function);
}

cudaError_t launch_function(const void* kernel, const LaunchShape& shape, cudaStream_t stream, void** arguments) {
  static const auto launch = driver_function<PFN_cuLaunchKernelEx_v11060>("cuLaunchKernelEx");
  if (launch == nullptr) return cudaErrorNotSupported;
  cudaFunction_t function;
  if (cudaError_t error = function_of(kernel, &function); error != cudaSuccess) return error;
  CUlaunchAttribute attributes[2];
  CUlaunchConfig config{};
  config.gridDimX = shape.grid.x, config.gridDimY = shape.grid.y, config.gridDimZ = shape.grid.z;
  config.blockDimX = static_cast<unsigned>(shape.threads);
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = static_cast<unsigned>(shape.shared_bytes);
  config.hStream = stream;
  config.attrs = attributes;
  if (shape.cluster > 1) {
    CUlaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute = {};
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim.x = shape.cluster_along_y ? 1u : static_cast<unsigned>(shape.cluster);
    attribute.value.clusterDim.y = shape.cluster_along_y ? static_cast<unsigned>(shape.cluster) : 1u;
    attribute.value.clusterDim.z = 1;
  }
  if (shape.early) {
    CUlaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute = {};
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
  }
  // The runtime's errors that the driver knows have the driver's numbers.
  return static_cast<cudaError_t>(launch(&config, function, arguments, nullptr));
}

}  // namespace wonly
