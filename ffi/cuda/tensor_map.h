// What the tensor copy engine has to know of an array.
#pragma once

#include <cuda.h>

#include "cuda/conv.h"
#include "cuda/direct_conv.h"
#include "cuda/matmul.h"

namespace wonly {

// The 16-bit activations [batch, m, k] in boxes of `tokens` x 64 inputs, swizzled as wgmma reads them; zeros beyond the
// edges. K is a multiple of 8.
cudaError_t describe_activations(const MatmulArgs& args, int tokens, CUtensorMap* map);

// So many `rows` of activations in boxes of `chunks` times as many inputs, 64 of all tokens after the other. K is a
// multiple of 64. Also float32 activations, not swizzled.
cudaError_t describe_chunks(const MatmulArgs& args, int64_t rows, int tokens, int chunks, CUtensorMap* map);

// The codes of activations [batch, m, k], a byte each, in boxes of `tokens` x 128 inputs; `k` is a multiple of 16.
cudaError_t describe_codes(const MatmulArgs& args, int64_t k, int tokens, CUtensorMap* map);

// Scales or shifts [batch, rows, columns] of `size` bytes an element, 1, 2 or 4, in boxes of box_rows x box_columns,
// one row after the other; zeros beyond the edges. Rows are whole pieces of 16 bytes.
cudaError_t describe_rows(const void* data, int size, int64_t columns, int64_t rows, int64_t batch, int box_columns,
                          int box_rows, CUtensorMap* map);

// The 16-bit images of a convolution as what its windows meet: `pixels` x 64 inputs at a time, from a pixel on in the
// order of the result's pixels, swizzled and with zeros as above.
cudaError_t describe_pixels(const ConvArgs& args, int pixels, CUtensorMap* map);

// Images of two axes as rows: `pixels` x 64 features of a row at a time, swizzled and with zeros as above.
cudaError_t describe_image_rows(const DirectConvArgs& args, int pixels, CUtensorMap* map);

// `describe(count, map)` for whole blocks of `block` rows, and for the last one where it is not whole: the copy engine
// takes longer for rows that are not there than for others.
template <typename Describe>
cudaError_t describe_blocks(int64_t rows, int block, CUtensorMap* whole, CUtensorMap* last, Describe&& describe) {
  const int rest = static_cast<int>(rows % block);
  cudaError_t error = cudaSuccess;
  if (rows >= block) error = describe(block, whole);
  if (rest > 0 && error == cudaSuccess) error = describe(rest, last);
  return error;
}

}  // namespace wonly
