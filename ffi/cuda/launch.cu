#include <set>
#include <utility>

#include "cuda/launch.h"

namespace wonly {

cudaError_t allow_shared_memory(const void* kernel) {
  thread_local std::set<std::pair<const void*, int>> allowed;
  int device = 0, most = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (allowed.count({kernel, device}) > 0) return cudaSuccess;
  cudaFuncAttributes attributes;
  cudaError_t error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 most - static_cast<int>(attributes.sharedSizeBytes));
  }
  if (error == cudaSuccess) allowed.insert({kernel, device});
  return error;
}

}  // namespace wonly
