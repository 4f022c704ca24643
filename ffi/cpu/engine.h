// What one instruction set offers: the table of functions whose tasks handlers.cc shares out over threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi.h"
#include "layout.h"

// Small functions that files of different instruction sets share must never be emitted out of line: the linker would
// keep one.
#define WONLY_ALWAYS_INLINE inline __attribute__((always_inline))

namespace wonly::cpu {

// One array operand: rows of one element type.
struct Rows {
  const void* data = nullptr;
  DType type = DType::kF32;
};

// Packed weights of one batch entry and their parameters: qw[Nt, Kt, 512], scales[groups, n], and shift[groups, n] or,
// for ShiftMode::kTable, its float32 table[16].
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

// Inputs that are added up before their scale is applied: whole tiles of one group, 256 at most.
constexpr int64_t kRunInputs = 256;

WONLY_ALWAYS_INLINE int64_t run_end(const Weights& weights, int64_t begin) {
  int64_t end = begin + kRunInputs;
  const int64_t k_padded = weights.tiles_k() * tile_k(weights.bits);
  if (weights.groups > 1) {
    const int64_t group_end = (begin / weights.group_size() + 1) * weights.group_size();
    if (end > group_end) end = group_end;
  }
  return end < k_padded ? end : k_padded;
}

// How x is handed to the kernels: as float32, as pairs of bfloat16 for instructions that multiply pairs, or in fixed
// point as three planes of signed bytes for instructions that multiply bytes. The last: within a run, x = 2^-e (d0 +
// 2^8 d1 + 2^16 d2), 24 bits in all, which holds a float32 to its last place where the inputs of a run are of similar
// size. Rows where they are not (see plane_exponents) take the float32 form instead.
enum class Form { kF32 = 0, kBF16Pairs = 1, kPlanes = 2 };

// One row in one run, as planes: its unit 2^-e, the sum of its integers, and sums of its digits.
struct PlaneRun {
  float unit;
  float total;
  int32_t sums[3];
  int32_t starts[3];  // where sums of digits times codes start, for what is taken from all codes alike
};

// Rows of x in blocks, each [inputs][rows of the block]: block i holds rows block_begin(i) .. block_begin(i + 1) of
// rows_padded. Rows and inputs beyond rows and k are zeros. An element, of four bytes, is a float32, a pair of
// bfloat16, or, three for each row, four digits of a plane.
struct PackedX {
  void* data;
  Form form;
  const int32_t* row_index;  // of the rows in y; null: all rows
  int64_t repeat;            // row r of y is row r / repeat of x
  const int16_t* exponents;  // kPlanes: [rows of x][runs]
  PlaneRun* plane_runs;      // kPlanes: for each block [runs][rows of the block]
  int64_t runs;
  int64_t rows, rows_padded;
  int64_t k_padded;
  int64_t blocks;

  WONLY_ALWAYS_INLINE int64_t block_begin(int64_t i) const { return rows_padded * i / blocks; }
  WONLY_ALWAYS_INLINE int64_t row_elements() const {
    return form == Form::kF32 ? k_padded : form == Form::kBF16Pairs ? k_padded / 2 : k_padded / 4 * 3;
  }
  WONLY_ALWAYS_INLINE int64_t row(int64_t i) const { return row_index != nullptr ? row_index[i] : i; }
  WONLY_ALWAYS_INLINE int64_t x_row(int64_t i) const { return repeat == 1 ? row(i) : row(i) / repeat; }
};

// The product of all packed rows with the outputs of tile `tile`: y[rows, n] = activation(x @ W + bias). Transposed, x
// has N inputs, and `tile` counts pieces of kRunInputs of the weight's inputs: y[rows, k] = x @ W^T.
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

// Of Form::kPlanes.
struct PlanesKernels {
  int64_t rows;       // of a block
  int64_t most_rows;  // that are taken: for more, float32 is faster
  bool eight_bits;    // takes them too
  // Whether row `row` of x keeps float32's accuracy as planes; if so, exponents[run] are set.
  bool (*exponents)(const Weights& weights, Rows x, int64_t row, int16_t* exponents);
  void (*pack_block)(const PackedX& packed, const Weights& weights, Rows x, int64_t block);
  void (*matmul)(const MatmulTask& task);
};

// Of Form::kBF16Pairs, beside the engine's for float32, with blocks of as many rows.
struct PairsKernels {
  void (*matmul_direct)(const MatmulTask& task);
  void (*matmul_panel)(const MatmulTask& task);
};

struct Engine {
  const char* name;
  int64_t direct_rows;  // up to this many rows, codes are converted in registers, for all rows at once
  int64_t panel_rows;   // rows of a block otherwise, when codes are converted to a panel that all blocks share
  int64_t (*direct_width)(int64_t rows);  // rows_padded of the direct kernels: rows rounded up to a compiled width
  void (*pack_block)(const PackedX& packed, const Weights& weights, Rows x, int64_t block);  // all but kPlanes
  int64_t (*scratch_floats)(const Weights& weights, int64_t rows);
  int64_t (*transposed_floats)(const Weights& weights, int64_t rows);
  void (*matmul_direct)(const MatmulTask& task);
  void (*matmul_panel)(const MatmulTask& task);
  void (*matmul_transposed)(const MatmulTask& task);
  void (*quantize)(const QuantizeTask& task);
  void (*dequantize)(const DequantizeTask& task);
  const PlanesKernels* planes = nullptr;  // null: the form is not known
  const PairsKernels* pairs = nullptr;
};

// Every file of these is compiled for its instruction set, and its functions must be safe to call without: they return
// an address.
const Engine& generic_engine();
#if defined(WONLY_CPU_X86)
const Engine& avx2_engine();
const Engine& avx512_engine();
const PlanesKernels& avx2_vnni_planes();
const PlanesKernels& avx512_vnni_planes();
const PairsKernels& avx512_bf16_pairs();
#endif
#if defined(WONLY_CPU_ARM)
const Engine& neon_engine();
const PlanesKernels& neon_dotprod_planes();
#endif

}  // namespace wonly::cpu
