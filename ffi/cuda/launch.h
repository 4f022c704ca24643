// Launching a kernel in a cluster, or with more than 48 KB of shared memory.
#pragma once

#include <cuda_runtime.h>

namespace wonly {

struct LaunchShape {
  dim3 grid;
  int threads = 0;
  int cluster = 1;
  int shared_bytes = 0;
};

template <typename... Args>
cudaError_t launch_kernel(void (*kernel)(Args...), const LaunchShape& shape, cudaStream_t stream, const Args&... args) {
  // A property of the function, not of the stream: allowed, and without effect on the graph, while a stream is
  // captured.
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[1];
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  if (shape.cluster > 1) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    attributes[0].val.clusterDim.y = 1;
    attributes[0].val.clusterDim.z = 1;
    config.attrs = attributes;
    config.numAttrs = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace wonly
