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

// Launches a kernel with what `arguments` point to, by the driver itself: the runtime's launch takes 0.4 us longer
// (docs/performance.md, log 158).
cudaError_t launch_function(const void* kernel, const LaunchShape& shape, cudaStream_t stream, void** arguments);

template <typename... Args>
cudaError_t launch_kernel(void (*kernel)(Args...), const LaunchShape& shape, cudaStream_t stream, const Args&... args) {
  void* arguments[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  return launch_function(reinterpret_cast<const void*>(kernel), shape, stream, arguments);
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
