#include "cpu/handlers.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "calls.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace wonly::cpu {
namespace {

Rows rows_at(const Operand& operand, int64_t batch) { return {operand.at(batch), operand.type}; }

Weights weights_at(const WeightOperands& weights, int64_t batch) {
  return {weights.qw + batch * weights.qw_stride,
          rows_at(weights.scales, batch),
          rows_at(weights.shift, batch),
          weights.shift_mode,
          weights.bits,
          weights.k,
          weights.n,
          weights.groups};
}

ffi::Error out_of_memory() {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jax_wonly: out of memory for scratch");
}

// Integer zeros above 15 are legal for four-bit codes but outside the look-up table of the bfloat16 pairs.
bool small_zeros(const WeightOperands& weights, int64_t batches) {
  const int64_t count = weights.groups * weights.n * (weights.shift.stride == 0 ? 1 : batches);
  const auto* zeros = reinterpret_cast<const uint8_t*>(weights.shift.data);
  uint8_t bits = 0;
  for (int64_t i = 0; i < count; ++i) bits |= zeros[i];
  return bits <= 15;
}

// One product: packs x and shares the tiles of outputs out over threads.
struct Product {
  ffi::ThreadPool& pool;
  const Engine& engine;
  const MatmulOperands& operands;
  const WeightOperands& weights = operands.weights;
  const Operand& x = operands.x;
  int64_t batch = operands.batch, rows = operands.m;

  // Rows of one batch entry of x in one form, and the kernel for them.
  struct Part {
    int64_t x_batch;
    PackedX packed{};
    void (*kernel)(const MatmulTask&) = nullptr;
    int64_t row_tasks = 1;
    size_t data_offset = 0, runs_offset = 0;  // bytes within the shared buffer
  };

  // How rows in float32 (or f16) run. Runs shorter than 64 inputs leave nothing to gain over float32.
  Form form() const {
    const Weights first = weights_at(weights, 0);
    if (!first.whole_groups()) return Form::kF32;
    if (engine.pairs && x.type == DType::kBF16) {
      if (weights.shift_mode == ShiftMode::kNone) return Form::kBF16Pairs;
      if (weights.shift_mode == ShiftMode::kZeros && weights.shift.type == DType::kU8 &&
          (weights.bits == 8 || small_zeros(weights, batch))) {
        return Form::kBF16Pairs;
      }
    }
    const bool long_runs =
        first.groups == 1 || (first.group_size() % tile_k(first.bits) == 0 && first.group_size() >= 64);
    return engine.plane_rows > 0 && long_runs ? Form::kPlanes : Form::kF32;
  }

  Part make_part(int64_t x_batch, Form form, int64_t count, const int32_t* row_index) const {
    Part part{x_batch};
    PackedX& packed = part.packed;
    packed.form = form;
    packed.row_index = row_index;
    packed.rows = packed.rows_padded = count;
    packed.k_padded = ceil_div(weights.k, 64) * 64;
    if (form == Form::kPlanes) {
      packed.blocks = ceil_div(count, engine.plane_rows);
      part.kernel = engine.matmul_planes;
    } else if (count <= engine.direct_rows && weights_at(weights, 0).whole_groups()) {
      packed.rows_padded = engine.direct_width(count);
      packed.blocks = 1;
      part.kernel = engine.matmul_direct;
    } else {
      packed.blocks = ceil_div(count, engine.panel_rows);
      part.kernel = engine.matmul_panel;
    }
    // 256 rows by one tile: the sums stay in the second-level cache beside the panel. (Two or four tiles, to read x
    // less often, were slower.)
    part.row_tasks = std::min(packed.blocks, ceil_div(count, 256));
    return part;
  }

  bool run() {
    const Weights first = weights_at(weights, 0);
    const int64_t x_batches = x.stride == 0 ? 1 : batch;
    const Form wanted = form();
    const bool small =
        batch * rows * first.tiles_n() * kTileN * weights.k < (int64_t{1} << 19);  // over before a thread wakes
    const auto share = [&](bool alone, int64_t count, const std::function<void(int64_t)>& body) {
      if (!alone && count > 1) return parallel_for(pool, count, body);
      for (int64_t i = 0; i < count; ++i) body(i);
      return true;
    };
    const bool pack_alone = x_batches * rows * weights.k < (int64_t{1} << 15);

    std::vector<Part> parts;
    std::vector<int16_t> exponents;
    std::vector<uint8_t> as_planes;
    std::vector<int32_t> row_lists;
    int64_t runs = 0;
    if (wanted == Form::kPlanes) {
      const int64_t k_padded = first.tiles_k() * tile_k(first.bits);
      for (int64_t k = 0; k < k_padded; k = run_end(first, k)) ++runs;
      exponents.resize(static_cast<size_t>(x_batches * rows * runs));
      as_planes.resize(static_cast<size_t>(x_batches * rows));
      constexpr int64_t kPiece = 16;
      if (!share(pack_alone, ceil_div(x_batches * rows, kPiece), [&](int64_t piece) {
            for (int64_t i = piece * kPiece; i < std::min(x_batches * rows, (piece + 1) * kPiece); ++i)
              as_planes[i] = engine.plane_exponents(first, rows_at(x, i / rows), i % rows, exponents.data() + i * runs);
          })) {
        return false;
      }
      row_lists.reserve(static_cast<size_t>(x_batches * rows));
    }
    for (int64_t b = 0; b < x_batches; ++b) {
      if (wanted != Form::kPlanes) {
        parts.push_back(make_part(b, wanted, rows, nullptr));
        continue;
      }
      for (const Form form : {Form::kPlanes, Form::kF32}) {
        const int32_t* list = row_lists.data() + row_lists.size();
        for (int64_t r = 0; r < rows; ++r)
          if ((as_planes[b * rows + r] != 0) == (form == Form::kPlanes)) row_lists.push_back(static_cast<int32_t>(r));
        const int64_t count = row_lists.data() + row_lists.size() - list;
        if (count == 0) continue;
        parts.push_back(make_part(b, form, count, count == rows ? nullptr : list));
        parts.back().packed.exponents = exponents.data() + b * rows * runs;
        parts.back().packed.runs = form == Form::kPlanes ? runs : 0;
      }
    }

    size_t bytes = 0;
    const auto place = [&bytes](size_t size) {
      const size_t at = bytes;
      bytes += (size + 63) / 64 * 64;
      return at;
    };
    for (Part& part : parts) {
      part.data_offset = place(static_cast<size_t>(part.packed.rows_padded * part.packed.row_elements()) * 4);
      part.runs_offset = place(static_cast<size_t>(part.packed.rows * part.packed.runs) * sizeof(PlaneRun));
    }
    ThreadBuffer& shared = thread_buffer<Buffer::kCall>();
    char* memory = reinterpret_cast<char*>(shared.reserve(bytes / 4));
    for (Part& part : parts) {
      part.packed.data = memory + part.data_offset;
      part.packed.plane_runs = reinterpret_cast<PlaneRun*>(memory + part.runs_offset);
    }

    // Items of all parts in a row: the part of item i is the last one that starts at or before it.
    const auto find = [&parts](const std::vector<int64_t>& starts, int64_t item) {
      const size_t i = static_cast<size_t>(std::upper_bound(starts.begin(), starts.end(), item) - starts.begin()) - 1;
      return std::pair<const Part*, int64_t>(&parts[i], item - starts[i]);
    };
    std::vector<int64_t> pack_starts, task_starts;
    int64_t pack_items = 0, task_items = 0;
    const int64_t outputs_of_x = batch / x_batches;  // batch entries of the result that share a part
    const int64_t tiles_n = first.tiles_n();
    for (const Part& part : parts) {
      pack_starts.push_back(pack_items);
      task_starts.push_back(task_items);
      pack_items += part.packed.blocks;
      task_items += outputs_of_x * tiles_n * part.row_tasks;
    }
    if (!share(pack_alone, pack_items, [&](int64_t item) {
          const auto [part, block] = find(pack_starts, item);
          engine.pack_block(part->packed, first, rows_at(x, part->x_batch), block);
        })) {
      return false;
    }
    const bool done = share(small, task_items, [&](int64_t item) {
      const auto [part, within] = find(task_starts, item);
      const PackedX& packed = part->packed;
      const int64_t row_task = within % part->row_tasks;
      const int64_t b = x_batches == 1 ? within / part->row_tasks / tiles_n : part->x_batch;
      MatmulTask task{};
      task.weights = weights_at(weights, b);
      task.x = packed;
      task.block_begin = row_task * packed.blocks / part->row_tasks;
      task.block_end = (row_task + 1) * packed.blocks / part->row_tasks;
      task.tile = within / part->row_tasks % tiles_n;
      task.bias = rows_at(operands.bias, b);
      task.activation = operands.activation;
      task.y = operands.y.at(b);
      task.y_type = operands.y.type;
      const int64_t task_rows = packed.block_begin(task.block_end) - packed.block_begin(task.block_begin);
      const int64_t floats = engine.scratch_floats(task.weights, task_rows);
      task.scratch = thread_buffer<Buffer::kTask>().reserve(static_cast<size_t>(floats));
      part->kernel(task);
    });
    shared.trim();
    return done;
  }
};

ffi::Error matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer qw, ffi::AnyBuffer scales,
                  ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y, int64_t bits, int64_t shift_mode,
                  int64_t has_bias, int64_t activation) {
  std::string message;
  const Engine* engine = active_engine(message);
  if (engine == nullptr) return invalid(message);
  MatmulOperands operands;
  WONLY_RETURN_IF_ERROR(check_matmul(x, qw, scales, rest, *y, bits, shift_mode, has_bias, activation, operands));
  if (y->element_count() == 0) return ffi::Error::Success();
  Product product{pool, *engine, operands};
  try {
    return product.run() ? ffi::Error::Success() : out_of_memory();
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  }
}

ffi::Error quantize(ffi::ThreadPool pool, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> qw,
                    ffi::Result<ffi::AnyBuffer> scales, ffi::RemainingRets rest, int64_t bits, int64_t group_size,
                    int64_t quantize_mode) {
  std::string message;
  const Engine* engine = active_engine(message);
  if (engine == nullptr) return invalid(message);
  QuantizeOperands operands;
  WONLY_RETURN_IF_ERROR(check_quantize(w, *qw, *scales, rest, bits, group_size, quantize_mode, operands));
  if (w.element_count() == 0) return ffi::Error::Success();

  const int64_t tiles_n = ceil_div(operands.n, kTileN), tiles_k = ceil_div(operands.k, tile_k(operands.bits));
  const auto compute = [&](int64_t item) {
    const int64_t b = item / tiles_n;
    QuantizeTask task{};
    task.w = rows_at(operands.w, b);
    task.k = operands.k;
    task.n = operands.n;
    task.groups = operands.groups;
    task.bits = operands.bits;
    task.mode = operands.mode;
    task.tile = item % tiles_n;
    task.qw = operands.qw + b * tiles_n * tiles_k * kTileWords;
    task.scales = operands.scales.at(b);
    task.scale_type = operands.scales.type;
    task.shift = operands.shift.at(b);
    task.shift_type = operands.shift.type;
    engine->quantize(task);
  };
  return parallel_for(pool, operands.batch * tiles_n, compute) ? ffi::Error::Success() : out_of_memory();
}

ffi::Error dequantize(ffi::ThreadPool pool, ffi::AnyBuffer qw, ffi::AnyBuffer scales, ffi::RemainingArgs rest,
                      ffi::Result<ffi::AnyBuffer> w, int64_t bits, int64_t shift_mode) {
  std::string message;
  const Engine* engine = active_engine(message);
  if (engine == nullptr) return invalid(message);
  DequantizeOperands operands;
  WONLY_RETURN_IF_ERROR(check_dequantize(qw, scales, rest, *w, bits, shift_mode, operands));
  if (w->element_count() == 0) return ffi::Error::Success();

  constexpr int64_t kPieceK = 1024;  // inputs of one task
  const int64_t k = operands.weights.k;
  const int64_t tiles_n = ceil_div(operands.weights.n, kTileN), pieces = ceil_div(k, kPieceK);
  const auto compute = [&](int64_t item) {
    const int64_t b = item / pieces / tiles_n;
    DequantizeTask task{};
    task.weights = weights_at(operands.weights, b);
    task.tile = item / pieces % tiles_n;
    task.k_begin = item % pieces * kPieceK;
    task.k_end = std::min(k, task.k_begin + kPieceK);
    task.w = operands.w.at(b);
    task.w_type = operands.w.type;
    task.scratch = thread_buffer<Buffer::kTask>().reserve(static_cast<size_t>(engine->scratch_floats(task.weights, 0)));
    engine->dequantize(task);
  };
  return parallel_for(pool, operands.batch * tiles_n * pieces, compute) ? ffi::Error::Success() : out_of_memory();
}

}  // namespace

XLA_FFI_Error* matmul_handler(XLA_FFI_CallFrame* call_frame) {
  static const auto* handler = bind_matmul<ffi::ThreadPool>().To(matmul).release();
  return handler->Call(call_frame);
}

XLA_FFI_Error* quantize_handler(XLA_FFI_CallFrame* call_frame) {
  static const auto* handler = bind_quantize<ffi::ThreadPool>().To(quantize).release();
  return handler->Call(call_frame);
}

XLA_FFI_Error* dequantize_handler(XLA_FFI_CallFrame* call_frame) {
  static const auto* handler = bind_dequantize<ffi::ThreadPool>().To(dequantize).release();
  return handler->Call(call_frame);
}

}  // namespace wonly::cpu
