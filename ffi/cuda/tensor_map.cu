#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "cuda/tensor_map.h"

namespace wonly {
namespace {

// The driver's function, looked up through the runtime so that the module does not link to the driver's library.
PFN_cuTensorMapEncodeTiled_v12000 encode_function() {
  static const auto function = [] {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess
               ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(address)
               : nullptr;
  }();
  return function;
}

// x[batch, m, k] of `size` bytes an element in boxes of `tokens` x 128 bytes.
cudaError_t describe(const MatmulArgs& args, int64_t k, CUtensorMapDataType type, int size, int tokens,
                     CUtensorMap* map) {
  const auto encode = encode_function();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(args.m),
                               static_cast<cuuint64_t>(args.x_batch_stride == 0 ? 1 : args.batch)};
  const cuuint64_t strides[2] = {sizes[0] * size, sizes[0] * sizes[1] * size};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(128 / size), static_cast<cuuint32_t>(tokens), 1};
  const cuuint32_t element_strides[3] = {1, 1, 1};
  const CUresult result = encode(map, type, 3, const_cast<void*>(args.x), sizes, strides, box, element_strides,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t describe_activations(const MatmulArgs& args, int tokens, CUtensorMap* map) {
  const auto type = args.x_dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return describe(args, args.k, type, 2, tokens, map);
}

cudaError_t describe_codes(const MatmulArgs& args, int64_t k, int tokens, CUtensorMap* map) {
  return describe(args, k, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, tokens, map);
}

}  // namespace wonly
