// Functions of CUDA's driver, looked up through the runtime so that the module does not link to the driver's library.
#pragma once

#include <cuda_runtime_api.h>

namespace wonly {

// Null where the driver has none of this name.
template <typename Function>
Function driver_function(const char* name) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(address) : nullptr;
}

}  // namespace wonly
