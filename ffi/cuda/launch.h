// Launching a kernel in a cluster, with more than 48 KB of shared memory, or with CTAs that stay.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace wonly {

// Lets CTAs of a kernel have all the shared memory of the current device. Always the same value, for another thread may
// be about to launch the same kernel with more than this one needs; so each thread asks for it once.
cudaError_t allow_shared_memory(const void* kernel);

struct LaunchShape {
  dim3 grid;
  int threads = 0;
  int cluster = 1;  // CTAs along x
  bool cluster_along_y = false;
  int shared_bytes = 0;
  bool early = false;  // before the last kernel ends, as soon as all its CTAs let it (ptx::let_next_kernel_begin)
};

template <typename... Args>
cudaError_t launch_kernel(void (*kernel)(Args...), const LaunchShape& shape, cudaStream_t stream, const Args&... args) {
  if (shape.shared_bytes > 0) {
    // A property of the function, not of the stream: without effect on a graph that is captured.
    const cudaError_t error = allow_shared_memory(reinterpret_cast<const void*>(kernel));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  if (shape.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = shape.cluster_along_y ? 1u : static_cast<unsigned>(shape.cluster);
    attribute.val.clusterDim.y = shape.cluster_along_y ? static_cast<unsigned>(shape.cluster) : 1u;
    attribute.val.clusterDim.z = 1;
  }
  if (shape.early) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// The same for CTAs that walk along x over `items` for each of `columns` along y: no more of them than the
// multiprocessors hold at a time, and one for a column at least.
template <typename... Args>
cudaError_t launch_walking(void (*kernel)(Args...), LaunchShape shape, int64_t items, int64_t columns,
                           int multiprocessors, cudaStream_t stream, const Args&... args) {
  if (cudaError_t error = allow_shared_memory(reinterpret_cast<const void*>(kernel)); error != cudaSuccess)
    return error;
  int resident = 0;
  if (cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, shape.threads,
                                                                        static_cast<size_t>(shape.shared_bytes));
      error != cudaSuccess)
    return error;
  const int64_t most = std::max<int64_t>(1, int64_t{multiprocessors} * resident / columns);
  shape.grid = dim3(static_cast<unsigned>(std::min(items, most)), static_cast<unsigned>(columns));
  return launch_kernel(kernel, shape, stream, args...);
}

}  // namespace wonly
