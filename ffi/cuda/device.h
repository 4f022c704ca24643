// What the dispatch needs to know of a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

namespace wonly {

// A build may take the kernels of an older architecture on newer GPUs, to test and to time them (CMakeLists.txt).
#ifdef WONLY_CUDA_DISPATCH
constexpr int kNewestArchitecture = WONLY_CUDA_DISPATCH;
#else
constexpr int kNewestArchitecture = 1000;
#endif

struct Device {
  int architecture = 0;  // 10 * major + minor
  int multiprocessors = 0;
  int shared_per_block = 0;  // bytes of shared memory that one CTA may ask for
  int shared_per_multiprocessor = 0;
  int reserved_per_block = 0;  // bytes of it that the system takes from every CTA
  float memory_rate = 0.f;     // bytes in a nanosecond, by clock and width; 0 where the driver does not say
};

// Of the current device. What it has does not change: each thread asks once for the device that it used last.
inline cudaError_t current_device(Device* device) {
  thread_local int last = -1;
  thread_local Device known;
  int id = 0, major = 0, minor = 0, memory_khz = 0, memory_bits = 0;
  const auto read = [&](int* to, cudaDeviceAttr attribute) { return cudaDeviceGetAttribute(to, attribute, id); };
  cudaError_t error = cudaGetDevice(&id);
  if (error == cudaSuccess && id != last) {
    Device found;
    error = read(&major, cudaDevAttrComputeCapabilityMajor);
    if (error == cudaSuccess) error = read(&minor, cudaDevAttrComputeCapabilityMinor);
    if (error == cudaSuccess) error = read(&found.multiprocessors, cudaDevAttrMultiProcessorCount);
    if (error == cudaSuccess) error = read(&found.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    if (error == cudaSuccess)
      error = read(&found.shared_per_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    if (error == cudaSuccess) error = read(&found.reserved_per_block, cudaDevAttrReservedSharedMemoryPerBlock);
    if (error == cudaSuccess) error = read(&memory_khz, cudaDevAttrMemoryClockRate);
    if (error == cudaSuccess) error = read(&memory_bits, cudaDevAttrGlobalMemoryBusWidth);
    if (error != cudaSuccess) return error;
    found.memory_rate = static_cast<float>(memory_khz) * 1e-6f * 2.f * static_cast<float>(memory_bits / 8);
    found.architecture = std::min(10 * major + minor, kNewestArchitecture);
    known = found;
    last = id;
  }
  *device = known;
  return error;
}

// Shared memory of one CTA when `ctas` of them are to run on a multiprocessor at once; it is dealt out in units.
inline int shared_share(const Device& device, int ctas) {
  constexpr int kUnit = 128;
  const int share = device.shared_per_multiprocessor / ctas / kUnit * kUnit - device.reserved_per_block;
  return share < device.shared_per_block ? share : device.shared_per_block;
}

}  // namespace wonly
