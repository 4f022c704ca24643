#include "cpu/handlers.h"

#include <algorithm>
#include <cstring>
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
bool small_zeros(const WeightOperands& weights, int64_t first, int64_t batches) {
  const int64_t entry = weights.groups * weights.n;
  const int64_t count = entry * (weights.shift.stride == 0 ? 1 : batches);
  const auto* zeros = reinterpret_cast<const uint8_t*>(weights.shift.at(first));
  uint8_t bits = 0;
  for (int64_t i = 0; i < count; ++i) bits |= zeros[i];
  return bits <= 15;
}

// Rows of one batch entry of x, and the successive batch entries of the weights that each of them meets.
struct Share {
  int64_t x_batch = 0, first_weights = 0, weights = 1;
  const int32_t* rows = nullptr;  // of y; null: the first `count`
  int64_t count = 0;

  int64_t row(int64_t i) const { return rows == nullptr ? i : rows[i]; }
};

// Products of shares: packs x and shares the tiles of outputs out over threads.
struct Product {
  ffi::ThreadPool& pool;
  const Engine& engine;
  const WeightOperands& weights;
  Operand x, bias, y;
  Activation activation;
  int64_t x_batches, x_rows;  // rows of a batch entry of x
  int64_t repeat = 1;         // row r of y is row r / repeat of x
  bool transposed = false;    // with the transposed weights

  // Rows of one share in one form, and the kernel for them.
  struct Part {
    Share share;
    PackedX packed{};
    void (*kernel)(const MatmulTask&) = nullptr;
    int64_t row_tasks = 1;
    size_t data_offset = 0, runs_offset = 0;  // bytes within the shared buffer
  };

  int64_t inputs() const { return transposed ? weights.n : weights.k; }
  int64_t x_row(const Share& share, int64_t i) const { return share.x_batch * x_rows + share.row(i) / repeat; }

  // How rows in float32 (or f16) run. Runs shorter than 64 inputs leave nothing to gain over float32.
  Form form(const Share& share) const {
    const Weights first = weights_at(weights, 0);
    if (transposed || !first.whole_groups() || weights.shift_mode == ShiftMode::kTable) return Form::kF32;
    if (engine.pairs != nullptr && x.type == DType::kBF16) {
      if (weights.shift_mode == ShiftMode::kNone) return Form::kBF16Pairs;
      if (weights.shift_mode == ShiftMode::kZeros && weights.shift.type == DType::kU8 &&
          (weights.bits == 8 || small_zeros(weights, share.first_weights, share.weights))) {
        return Form::kBF16Pairs;
      }
    }
    const bool long_runs =
        first.groups == 1 || (first.group_size() % tile_k(first.bits) == 0 && first.group_size() >= 64);
    const bool planes = engine.planes != nullptr && long_runs && share.count <= engine.planes->most_rows &&
                        (first.bits == 4 || engine.planes->eight_bits);
    return planes ? Form::kPlanes : Form::kF32;
  }

  Part make_part(const Share& share, Form form) const {
    Part part{share};
    PackedX& packed = part.packed;
    packed.form = form;
    packed.row_index = share.rows;
    packed.repeat = repeat;
    packed.rows = packed.rows_padded = share.count;
    packed.k_padded = ceil_div(inputs(), 64) * 64;
    if (transposed) {
      packed.blocks = ceil_div(share.count, engine.panel_rows);
      part.kernel = engine.matmul_transposed;
    } else if (form == Form::kPlanes) {
      packed.blocks = ceil_div(share.count, engine.planes->rows);
      part.kernel = engine.planes->matmul;
    } else if (share.count <= engine.direct_rows && weights_at(weights, 0).whole_groups()) {
      packed.rows_padded = engine.direct_width(share.count);
      packed.blocks = 1;
      part.kernel = form == Form::kBF16Pairs ? engine.pairs->matmul_direct : engine.matmul_direct;
    } else {
      packed.blocks = ceil_div(share.count, engine.panel_rows);
      part.kernel = form == Form::kBF16Pairs ? engine.pairs->matmul_panel : engine.matmul_panel;
    }
    // 256 rows by one tile: the sums stay in the second-level cache beside the panel. (Two or four tiles, to read x
    // less often, were slower.)
    part.row_tasks = std::min(packed.blocks, ceil_div(share.count, 256));
    return part;
  }

  bool run(const std::vector<Share>& shares) {
    Weights first = weights_at(weights, 0);
    const int64_t tiles = transposed ? ceil_div(first.k, kRunInputs) : first.tiles_n();
    first.k = inputs();  // what rows are packed by
    std::vector<Form> forms;
    int64_t all_rows = 0, all_outputs = 0;
    bool planes = false;
    for (const Share& share : shares) {
      forms.push_back(form(share));
      planes = planes || forms.back() == Form::kPlanes;
      all_rows += share.count;
      all_outputs += share.count * share.weights;
    }
    const bool small = all_outputs * weights.k * ceil_div(weights.n, kTileN) * kTileN <
                       (int64_t{1} << 19);  // over before a thread wakes
    const auto share_out = [&](bool alone, int64_t count, const std::function<void(int64_t)>& body) {
      if (!alone && count > 1) return parallel_for(pool, count, body);
      for (int64_t i = 0; i < count; ++i) body(i);
      return true;
    };
    const bool pack_alone = all_rows * inputs() < (int64_t{1} << 15);

    std::vector<Part> parts;
    std::vector<int16_t> exponents;
    std::vector<uint8_t> as_planes;
    std::vector<int32_t> row_lists;
    int64_t runs = 0;
    if (planes) {
      const int64_t k_padded = first.tiles_k() * tile_k(first.bits);
      for (int64_t k = 0; k < k_padded; k = run_end(first, k)) ++runs;
      exponents.resize(static_cast<size_t>(x_batches * x_rows * runs));
      as_planes.resize(static_cast<size_t>(x_batches * x_rows));
      // First the rows that are asked for, of which those remain that planes hold.
      for (size_t s = 0; s < shares.size(); ++s) {
        for (int64_t i = 0; forms[s] == Form::kPlanes && i < shares[s].count; ++i) as_planes[x_row(shares[s], i)] = 1;
      }
      constexpr int64_t kPiece = 16;
      if (!share_out(pack_alone, ceil_div(x_batches * x_rows, kPiece), [&](int64_t piece) {
            for (int64_t i = piece * kPiece; i < std::min(x_batches * x_rows, (piece + 1) * kPiece); ++i)
              if (as_planes[i])
                as_planes[i] =
                    engine.planes->exponents(first, rows_at(x, i / x_rows), i % x_rows, exponents.data() + i * runs);
          })) {
        return false;
      }
      row_lists.reserve(static_cast<size_t>(all_rows));
    }
    for (size_t s = 0; s < shares.size(); ++s) {
      const Share& share = shares[s];
      if (forms[s] != Form::kPlanes) {
        parts.push_back(make_part(share, forms[s]));
        continue;
      }
      for (const Form form : {Form::kPlanes, Form::kF32}) {
        Share part = share;
        const size_t begin = row_lists.size();
        for (int64_t i = 0; i < share.count; ++i) {
          if ((as_planes[x_row(share, i)] != 0) == (form == Form::kPlanes))
            row_lists.push_back(static_cast<int32_t>(share.row(i)));
        }
        part.count = static_cast<int64_t>(row_lists.size() - begin);
        if (part.count == 0) continue;
        if (part.count != share.count) part.rows = row_lists.data() + begin;
        parts.push_back(make_part(part, form));
        parts.back().packed.exponents = exponents.data() + share.x_batch * x_rows * runs;
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
    for (const Part& part : parts) {
      pack_starts.push_back(pack_items);
      task_starts.push_back(task_items);
      pack_items += part.packed.blocks;
      task_items += part.share.weights * tiles * part.row_tasks;
    }
    if (!share_out(pack_alone, pack_items, [&](int64_t item) {
          const auto [part, block] = find(pack_starts, item);
          const bool in_planes = part->packed.form == Form::kPlanes;
          (in_planes ? engine.planes->pack_block : engine.pack_block)(part->packed, first,
                                                                      rows_at(x, part->share.x_batch), block);
        })) {
      return false;
    }
    const bool done = share_out(small, task_items, [&](int64_t item) {
      const auto [part, within] = find(task_starts, item);
      const PackedX& packed = part->packed;
      const int64_t row_task = within % part->row_tasks;
      const int64_t b = part->share.first_weights + within / part->row_tasks / tiles;
      MatmulTask task{};
      task.weights = weights_at(weights, b);
      task.x = packed;
      task.block_begin = row_task * packed.blocks / part->row_tasks;
      task.block_end = (row_task + 1) * packed.blocks / part->row_tasks;
      task.tile = within / part->row_tasks % tiles;
      task.bias = rows_at(bias, b);
      task.activation = activation;
      task.y = y.at(b);
      task.y_type = y.type;
      const int64_t task_rows = packed.block_begin(task.block_end) - packed.block_begin(task.block_begin);
      const int64_t floats = (transposed ? engine.transposed_floats : engine.scratch_floats)(task.weights, task_rows);
      task.scratch = thread_buffer<Buffer::kTask>().reserve(static_cast<size_t>(floats));
      part->kernel(task);
    });
    shared.trim();
    return done;
  }
};

// y of operands whose batches broadcast.
ffi::Error run_batches(ffi::ThreadPool& pool, const Engine& engine, const MatmulOperands& operands, bool transposed) {
  const int64_t x_batches = operands.x.stride == 0 ? 1 : operands.batch;
  Product product{pool,          engine,     operands.weights,    operands.x,
                  operands.bias, operands.y, operands.activation, x_batches,
                  operands.m,    1,          transposed};
  try {
    std::vector<Share> shares;
    for (int64_t b = 0; b < x_batches; ++b) shares.push_back({b, b, operands.batch / x_batches, nullptr, operands.m});
    return product.run(shares) ? ffi::Error::Success() : out_of_memory();
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  }
}

ffi::Error matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer qw, ffi::AnyBuffer scales,
                  ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y, ffi::RemainingRets /*scratch*/, int64_t bits,
                  int64_t shift_mode, int64_t has_bias, int64_t activation) {
  std::string message;
  const Engine* engine = active_engine(message);
  if (engine == nullptr) return invalid(message);
  MatmulOperands operands;
  WONLY_RETURN_IF_ERROR(check_matmul(x, qw, scales, rest, *y, bits, shift_mode, has_bias, activation, operands));
  if (y->element_count() == 0) return ffi::Error::Success();
  return run_batches(pool, *engine, operands, false);
}

ffi::Error matmul_transposed(ffi::ThreadPool pool, ffi::AnyBuffer dy, ffi::AnyBuffer qw, ffi::AnyBuffer scales,
                             ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> dx, ffi::RemainingRets /*scratch*/,
                             int64_t bits, int64_t shift_mode) {
  std::string message;
  const Engine* engine = active_engine(message);
  if (engine == nullptr) return invalid(message);
  MatmulOperands operands;
  WONLY_RETURN_IF_ERROR(check_matmul_transposed(dy, qw, scales, rest, *dx, bits, shift_mode, operands));
  if (dx->element_count() == 0) return ffi::Error::Success();
  return run_batches(pool, *engine, operands, true);
}

// The rows of a ragged product, those of each expert together.
struct ExpertRows {
  std::vector<int32_t> rows;   // of all experts, then those without one
  std::vector<int64_t> begin;  // [experts + 1], within rows

  explicit ExpertRows(const RaggedOperands& operands)
      : rows(static_cast<size_t>(operands.m)), begin(static_cast<size_t>(operands.experts) + 1) {
    const int64_t experts = operands.experts;
    if (operands.row_mode == RowMode::kSizes) {
      for (int64_t e = 0; e < experts; ++e)
        begin[e + 1] = std::min(operands.m, begin[e] + std::max<int64_t>(operands.rows[e], 0));
      for (int64_t r = 0; r < operands.m; ++r) rows[r] = static_cast<int32_t>(r);
      return;
    }
    const auto expert_of = [&](int64_t r) {
      const int64_t e = operands.rows[r];
      return e < 0 || e >= experts ? experts : e;
    };
    std::vector<int64_t> next(static_cast<size_t>(experts) + 2);
    for (int64_t r = 0; r < operands.m; ++r) ++next[expert_of(r) + 1];
    for (int64_t e = 0; e <= experts; ++e) next[e + 1] += next[e];
    for (int64_t e = 0; e <= experts; ++e) begin[e] = next[e];
    for (int64_t r = 0; r < operands.m; ++r) rows[next[expert_of(r)]++] = static_cast<int32_t>(r);
  }
};

// Zeros the rows of y that have no expert.
void zero_rest(const RaggedOperands& operands, int64_t width, const ExpertRows& order) {
  const int64_t bytes = width * element_size(operands.y.type);
  for (int64_t i = order.begin.back(); i < operands.m; ++i)
    std::memset(operands.y.data + order.rows[i] * bytes, 0, static_cast<size_t>(bytes));
}

ffi::Error run_experts(ffi::ThreadPool& pool, const Engine& engine, RaggedOperands& operands, bool transposed) {
  operands.x.stride = operands.y.stride = 0;  // one batch entry of each
  Product product{pool,
                  engine,
                  operands.weights,
                  operands.x,
                  operands.bias,
                  operands.y,
                  operands.activation,
                  1,
                  operands.m / operands.repeat,
                  operands.repeat,
                  transposed};
  try {
    const ExpertRows order(operands);
    zero_rest(operands, transposed ? operands.weights.k : operands.weights.n, order);
    std::vector<Share> shares;
    for (int64_t e = 0; e < operands.experts; ++e) {
      const int64_t count = order.begin[e + 1] - order.begin[e];
      if (count > 0) shares.push_back({0, e, 1, order.rows.data() + order.begin[e], count});
    }
    return product.run(shares) ? ffi::Error::Success() : out_of_memory();
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  }
}

ffi::Error ragged_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer qw, ffi::AnyBuffer scales,
                         ffi::AnyBuffer rows, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
                         ffi::Result<ffi::AnyBuffer> scratch, int64_t bits, int64_t shift_mode, int64_t has_bias,
                         int64_t activation, int64_t row_mode) {
  std::string message;
  const Engine* engine = active_engine(message);
  if (engine == nullptr) return invalid(message);
  RaggedOperands operands;
  WONLY_RETURN_IF_ERROR(check_ragged(x, qw, scales, rows, rest, *y, *scratch, bits, shift_mode, has_bias, activation,
                                     row_mode, false, operands));
  if (y->element_count() == 0) return ffi::Error::Success();
  return run_experts(pool, *engine, operands, false);
}

ffi::Error ragged_matmul_transposed(ffi::ThreadPool pool, ffi::AnyBuffer dy, ffi::AnyBuffer qw, ffi::AnyBuffer scales,
                                    ffi::AnyBuffer rows, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> dx,
                                    ffi::Result<ffi::AnyBuffer> scratch, int64_t bits, int64_t shift_mode,
                                    int64_t row_mode) {
  std::string message;
  const Engine* engine = active_engine(message);
  if (engine == nullptr) return invalid(message);
  RaggedOperands operands;
  WONLY_RETURN_IF_ERROR(
      check_ragged(dy, qw, scales, rows, rest, *dx, *scratch, bits, shift_mode, 0, 0, row_mode, true, operands));
  if (dx->element_count() == 0) return ffi::Error::Success();
  return run_experts(pool, *engine, operands, true);
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

XLA_FFI_Error* ragged_matmul_handler(XLA_FFI_CallFrame* call_frame) {
  static const auto* handler = bind_ragged_matmul<ffi::ThreadPool>().To(ragged_matmul).release();
  return handler->Call(call_frame);
}

XLA_FFI_Error* matmul_transposed_handler(XLA_FFI_CallFrame* call_frame) {
  static const auto* handler = bind_matmul_transposed<ffi::ThreadPool>().To(matmul_transposed).release();
  return handler->Call(call_frame);
}

XLA_FFI_Error* ragged_matmul_transposed_handler(XLA_FFI_CallFrame* call_frame) {
  static const auto* handler = bind_ragged_matmul_transposed<ffi::ThreadPool>().To(ragged_matmul_transposed).release();
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
