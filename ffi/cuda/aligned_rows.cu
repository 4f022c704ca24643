#include <algorithm>

#include "cuda/aligned_rows.h"
#include "cuda/bytes_from.cuh"
#include "cuda/launch.h"
#include "layout.h"

namespace wonly::aligned_rows {
namespace {

constexpr int kRowElements = 16;  // a row is so many or several times that: 16 bytes of uint8, or more of others
constexpr int kPartBytes = 256;   // scales, shift and what else is in scratch begin at multiples of that
constexpr int kThreads = 128;
constexpr int kMostRows = 65535;  // of a grid

int64_t row(const MatmulArgs& args) { return ceil_div(args.n, kRowElements) * kRowElements; }

// Scales or shift.
struct Part {
  const uint8_t* from;
  uint4* to;
  int64_t rows, chunks;  // chunks: of a row, 16 bytes each
  int64_t row_bytes;     // of those there are

  int64_t bytes() const { return ceil_div(rows * chunks * 16, kPartBytes) * kPartBytes; }
};

bool has_rows_of_shift(const MatmulArgs& args) {
  return args.shift_mode == ShiftMode::kZeros || args.shift_mode == ShiftMode::kOffsets;
}

Part part(const MatmulArgs& args, const void* data, DType type, int64_t batch_stride, void* to) {
  const int size = element_size(type);
  return {static_cast<const uint8_t*>(data), static_cast<uint4*>(to),
          (batch_stride == 0 ? 1 : args.batch) * args.groups, row(args) * size / 16, args.n * size};
}
Part scales(const MatmulArgs& args) {
  return part(args, args.scales, args.scale_dtype, args.scales_batch_stride, args.scratch);
}
Part shift(const MatmulArgs& args) {
  if (!has_rows_of_shift(args)) return {};
  uint8_t* const to = static_cast<uint8_t*>(args.scratch) + scales(args).bytes();
  return part(args, args.shift, args.shift_dtype, args.shift_batch_stride, to);
}

// 16 bytes from any address of an array from `begin` to `end`, with zeros for all but the first `left`.
__device__ uint4 load_any(const uint8_t* from, int left, const uint8_t* begin, const uint8_t* end) {
  const auto offset = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) % 16);
  const uint8_t* const before = from - offset;
  uint32_t words[4] = {};
  if (before >= begin && before + 32 <= end) {
    const uint4 low = __ldg(reinterpret_cast<const uint4*>(before)),
                high = __ldg(reinterpret_cast<const uint4*>(before) + 1);
    const uint4 both = bytes_from(low, high, offset);
    words[0] = both.x, words[1] = both.y, words[2] = both.z, words[3] = both.w;
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i < left) words[i / 4] |= static_cast<uint32_t>(from[i]) << i % 4 * 8;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int of_word = left - 4 * i;
    if (of_word < 4) words[i] = of_word <= 0 ? 0 : words[i] & ((1u << 8 * of_word) - 1);
  }
  return {words[0], words[1], words[2], words[3]};
}

// A thread copies 16 bytes of every gridDim.y-th row.
__global__ void __launch_bounds__(kThreads)
    align_rows(const __grid_constant__ Part scales, const __grid_constant__ Part shift) {
  Part part = scales;  // not a reference to either, for which both would be in local memory
  if (blockIdx.z == 1) part = shift;
  const int chunk = blockIdx.x * kThreads + threadIdx.x;
  if (chunk >= part.chunks) return;
  const uint8_t* const end = part.from + part.rows * part.row_bytes;
  for (int64_t row = blockIdx.y; row < part.rows; row += gridDim.y) {
    const int64_t first = int64_t{chunk} * 16;
    const int left = static_cast<int>(min(part.row_bytes - first, int64_t{16}));
    part.to[row * part.chunks + chunk] = load_any(part.from + row * part.row_bytes + first, left, part.from, end);
  }
}

}  // namespace

int64_t bytes(const MatmulArgs& args) { return scales(args).bytes() + shift(args).bytes(); }

MatmulArgs after(const MatmulArgs& args) {
  MatmulArgs copied = args;
  copied.parameter_row = row(args);
  copied.scales = scales(args).to;
  if (args.scales_batch_stride != 0) copied.scales_batch_stride = args.groups * copied.parameter_row;
  if (has_rows_of_shift(args)) {
    copied.shift = shift(args).to;
    if (args.shift_batch_stride != 0) copied.shift_batch_stride = args.groups * copied.parameter_row;
  }
  const int64_t taken = bytes(args);
  copied.scratch = static_cast<uint8_t*>(args.scratch) + taken;
  copied.scratch_bytes = args.scratch_bytes - taken;
  return copied;
}

cudaError_t launch(const MatmulArgs& args, cudaStream_t stream) {
  const Part both[2] = {scales(args), shift(args)};
  const int64_t rows = std::max(both[0].rows, both[1].rows), chunks = std::max(both[0].chunks, both[1].chunks);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(ceil_div(chunks, kThreads)),
                    static_cast<unsigned>(std::min(rows, int64_t{kMostRows})), has_rows_of_shift(args) ? 2 : 1);
  shape.threads = kThreads;
  return launch_kernel(align_rows, shape, stream, both[0], both[1]);
}

}  // namespace wonly::aligned_rows
