// What the dispatch asks of a GPU (ffi/cuda/device.h), of one that is not there.
#pragma once

#include <cuda_runtime_api.h>

struct DeviceAttributes {
  int architecture, multiprocessors, bytes_of_cta, bytes_of_multiprocessor;  // 10 * major + minor; of shared memory

  cudaError_t read(int* value, cudaDeviceAttr attribute) const {
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
        *value = kReservedBytes;
        break;
      case cudaDevAttrMemoryClockRate:
        *value = kMemoryKilohertz;
        break;
      case cudaDevAttrGlobalMemoryBusWidth:
        *value = kMemoryBits;
        break;
      default:
        return cudaErrorInvalidValue;
    }
    return cudaSuccess;
  }

  static constexpr int kReservedBytes = 1024;                           // of every CTA's shared memory
  static constexpr int kMemoryKilohertz = 2619000, kMemoryBits = 5120;  // an H100's
};
