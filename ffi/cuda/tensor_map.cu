#include <cudaTypedefs.h>

#include "cuda/driver.h"
#include "cuda/tensor_map.h"

namespace wonly {
namespace {

CUtensorMapDataType data_type(const MatmulArgs& args) {
  return args.x_dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// An array of kRank dimensions, the innermost first and contiguous, strides in bytes of the others; zeros beyond the
// edges.
template <int kRank>
cudaError_t encode(const void* data, CUtensorMapDataType type, const cuuint64_t (&sizes)[kRank],
                   const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank], CUtensorMapSwizzle swizzle,
                   CUtensorMap* map) {
  static const auto encode_tiled = driver_function<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled");
  if (encode_tiled == nullptr) return cudaErrorNotSupported;
  constexpr cuuint32_t kElementStrides[] = {1, 1, 1, 1};
  static_assert(kRank <= 4);
  const CUresult result = encode_tiled(map, type, kRank, const_cast<void*>(data), sizes, strides, box, kElementStrides,
                                       CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// An array [batch, rows, columns] of `size` bytes an element in boxes of box_rows x box_columns.
cudaError_t describe(const void* data, CUtensorMapDataType type, int size, int64_t batch, int64_t rows, int64_t columns,
                     int box_rows, int box_columns, CUtensorMapSwizzle swizzle, CUtensorMap* map) {
  const auto bytes = static_cast<cuuint64_t>(columns * size), all_rows = static_cast<cuuint64_t>(rows);
  return encode<3>(data, type, {static_cast<cuuint64_t>(columns), all_rows, static_cast<cuuint64_t>(batch)},
                   {bytes, bytes * all_rows},
                   {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows), 1}, swizzle, map);
}

// x[batch, m, k] of `size` bytes an element in boxes of `tokens` x 128 bytes.
cudaError_t describe_x(const MatmulArgs& args, int64_t k, CUtensorMapDataType type, int size, int tokens,
                       CUtensorMap* map) {
  const int64_t batch = args.x_batch_stride == 0 ? 1 : args.batch;
  return describe(args.x, type, size, batch, args.m, k, tokens, 128 / size, CU_TENSOR_MAP_SWIZZLE_128B, map);
}

}  // namespace

cudaError_t describe_activations(const MatmulArgs& args, int tokens, CUtensorMap* map) {
  return describe_x(args, args.k, data_type(args), 2, tokens, map);
}

cudaError_t describe_chunks(const MatmulArgs& args, int64_t rows, int tokens, int chunks, CUtensorMap* map) {
  const auto k = static_cast<cuuint64_t>(args.k);
  const bool wide = args.x_dtype == DType::kF32;
  const cuuint64_t size = wide ? 4 : 2;
  return encode<3>(args.x, wide ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : data_type(args),
                   {64, static_cast<cuuint64_t>(rows), k / 64}, {k * size, 64 * size},
                   {64, static_cast<cuuint32_t>(tokens), static_cast<cuuint32_t>(chunks)},
                   wide ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B, map);
}

cudaError_t describe_codes(const MatmulArgs& args, int64_t k, int tokens, CUtensorMap* map) {
  return describe_x(args, k, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, tokens, map);
}

cudaError_t describe_rows(const void* data, int size, int64_t columns, int64_t rows, int64_t batch, int box_columns,
                          int box_rows, CUtensorMap* map) {
  const CUtensorMapDataType type = size == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : size == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                               : CU_TENSOR_MAP_DATA_TYPE_UINT32;
  return describe(data, type, size, batch, rows, columns, box_rows, box_columns, CU_TENSOR_MAP_SWIZZLE_NONE, map);
}

cudaError_t describe_image_rows(const DirectConvArgs& args, int pixels, CUtensorMap* map) {
  const DirectConvGeometry& g = args.geometry;
  const auto features = static_cast<cuuint64_t>(args.product.k * g.groups);
  const auto width = static_cast<cuuint64_t>(g.width.size), height = static_cast<cuuint64_t>(g.height.size);
  return encode<4>(args.product.x, data_type(args.product),
                   {features, width, height, static_cast<cuuint64_t>(g.images)},
                   {features * 2, features * width * 2, features * width * height * 2},
                   {64, static_cast<cuuint32_t>(pixels), 1, 1}, CU_TENSOR_MAP_SWIZZLE_128B, map);
}

cudaError_t describe_pixels(const ConvArgs& args, int pixels, CUtensorMap* map) {
  static const auto encode = driver_function<PFN_cuTensorMapEncodeIm2col_v12000>("cuTensorMapEncodeIm2col");
  if (encode == nullptr) return cudaErrorNotSupported;
  const ConvGeometry& g = args.geometry;
  const auto k = static_cast<cuuint64_t>(args.product.k), width = static_cast<cuuint64_t>(g.width.size),
             height = static_cast<cuuint64_t>(g.height.size);
  const cuuint64_t sizes[4] = {k, width, height, static_cast<cuuint64_t>(g.images)};
  const cuuint64_t strides[3] = {k * 2, k * width * 2, k * width * height * 2};
  // Where the first tap of a window may be: from -low on, as far as the result has pixels. Upper corners count from the
  // last pixel of an image.
  const int lower[2] = {-g.width.low, -g.height.low};
  const auto upper_of = [](const ConvAxis& axis) {
    return (axis.result - 1) * axis.stride - axis.low - (axis.size - 1);
  };
  const int upper[2] = {upper_of(g.width), upper_of(g.height)};
  const cuuint32_t element_strides[4] = {1, static_cast<cuuint32_t>(g.width.stride),
                                         static_cast<cuuint32_t>(g.height.stride), 1};
  const CUresult result =
      encode(map, data_type(args.product), 4, const_cast<void*>(args.product.x), sizes, strides, lower, upper, 64,
             static_cast<cuuint32_t>(pixels), element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace wonly
