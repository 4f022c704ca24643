// What one instruction set offers: the table of functions that the drivers in matmul.cc and quantize.cc share out over threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi.h"
#include "layout.h"

// Small functions that files of different instruction sets share must never be emitted out of line: the linker would keep one.
#define WONLY_ALWAYS_INLINE inline __attribute__((always_inline))

namespace wonly::cpu {

// One array operand: rows of one element type.
struct Rows {
  const void* data = nullptr;
  DType type = DType::kF32;
};

WONLY_ALWAYS_INLINE constexpr int64_t size_of(DType type) { return type == DType::kF32 ? 4 : type == DType::kU8 ? 1 : 2; }

// Packed weights of one batch entry and their parameters: qw[Nt, Kt, 512], scales[groups, n], shift[groups, n].
struct Weights {
  const uint32_t* qw;
  Rows scales;
  Rows shift;
  ShiftMode shift_mode;
  int bits;
  int64_t k, n, groups;

  WONLY_ALWAYS_INLINE int64_t group_size() const { return groups > 0 ? k / groups : 0; }
  WONLY_ALWAYS_INLINE int64_t tiles_k() const { return (k + tile_k(bits) - 1) / tile_k(bits); }
  WONLY_ALWAYS_INLINE int64_t tiles_n() const { return (n + kTileN - 1) / kTileN; }
  // Groups that end where words do: what every kernel but the float32 panel needs.
  WONLY_ALWAYS_INLINE bool whole_groups() const { return groups == 1 || group_size() % 32 == 0; }
};

// How x is handed to the kernels: as float32, or as pairs of bfloat16 for instructions that multiply pairs.
enum class Form { kF32 = 0, kBF16Pairs = 1 };

// Rows of x in blocks, each [k_padded / 2 or k_padded][rows of the block]: block i holds rows block_begin(i) ..
// block_begin(i + 1) of rows_padded. Rows and inputs beyond rows and k are zeros.
struct PackedX {
  void* data;
  Form form;
  int64_t rows, rows_padded;
  int64_t k, k_padded;
  int64_t blocks;

  WONLY_ALWAYS_INLINE int64_t block_begin(int64_t i) const { return rows_padded * i / blocks; }
  // Both forms take four bytes for one element: a float32, or a pair of bfloat16.
  WONLY_ALWAYS_INLINE int64_t row_elements() const { return form == Form::kF32 ? k_padded : k_padded / 2; }
};

// The product of all packed rows with the outputs of tile `tile`: y[rows, n] = activation(x @ W + bias).
struct MatmulTask {
  Weights weights;
  PackedX x;
  int64_t block_begin, block_end;  // row blocks to do
  int64_t tile;
  Rows bias;
  Activation activation;
  void* y;
  DType y_type;
  float* scratch;  // of scratch_floats(...) floats, 64-byte aligned
};

struct QuantizeTask {
  Rows w;  // [k, n]
  int64_t k, n, groups;
  int bits;
  QuantizeMode mode;
  int64_t tile;  // of 64 outputs
  uint32_t* qw;
  void* scales;  // [groups, n]
  DType scale_type;
  void* shift;  // [groups, n] or null
  DType shift_type;
};

struct DequantizeTask {
  Weights weights;
  int64_t tile;
  int64_t k_begin, k_end;  // k_begin a multiple of 64
  void* w;                 // [k, n]
  DType w_type;
  float* scratch;
};

struct Engine {
  const char* name;
  int64_t direct_rows;  // up to this many rows, codes are converted in registers, for all rows at once
  int64_t panel_rows;   // rows of a block otherwise, when codes are converted to a panel that all blocks share
  bool pairs;           // knows Form::kBF16Pairs
  int64_t (*direct_width)(int64_t rows);  // rows_padded of the direct kernels: rows rounded up to a compiled width
  void (*pack_block)(const PackedX& packed, Rows x, int64_t block);
  int64_t (*scratch_floats)(const Weights& weights, int64_t rows);
  void (*matmul_direct)(const MatmulTask& task);
  void (*matmul_panel)(const MatmulTask& task);
  void (*quantize)(const QuantizeTask& task);
  void (*dequantize)(const DequantizeTask& task);
};

const Engine& generic_engine();
#if defined(WONLY_CPU_X86)
const Engine& avx2_engine();
const Engine& avx512_engine();
const Engine& avx512_bf16_engine();
#endif

}  // namespace wonly::cpu
