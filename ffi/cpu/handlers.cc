#include "cpu/handlers.h"

#include <algorithm>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace wonly::cpu {
namespace {

namespace ffi = xla::ffi;

ffi::Error invalid(const std::string& message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "wonly: " + message);
}

std::string shape_text(ffi::AnyBuffer::Dimensions dims) {
  std::ostringstream text;
  text << "[";
  for (size_t i = 0; i < dims.size(); ++i) text << (i ? ", " : "") << dims[i];
  text << "]";
  return text.str();
}

// A checked operand: base pointer, element type and the bytes from one batch entry to the next (0 when broadcast).
struct Operand {
  const char* data = nullptr;
  DType type = DType::kF32;
  int64_t stride = 0;

  Rows at(int64_t batch) const { return {data == nullptr ? nullptr : data + batch * stride, type}; }
};

ffi::Error check_type(const char* name, ffi::DataType type, bool integers, DType& out) {
  switch (type) {
    case ffi::DataType::F16:
      out = DType::kF16;
      return ffi::Error::Success();
    case ffi::DataType::BF16:
      out = DType::kBF16;
      return ffi::Error::Success();
    case ffi::DataType::F32:
      out = DType::kF32;
      return ffi::Error::Success();
    case ffi::DataType::U8:
      if (integers) {
        out = DType::kU8;
        return ffi::Error::Success();
      }
      break;
    default:
      break;
  }
  std::ostringstream text;
  text << name << " has element type " << type << "; accepted: f16, bf16, f32" << (integers ? ", u8" : "");
  return invalid(text.str());
}

// shape: the expected sizes after the leading one, which is 1 or `batch`.
ffi::Error check_shape(const char* name, ffi::AnyBuffer::Dimensions dims, int64_t batch,
                       std::initializer_list<int64_t> shape) {
  bool good = dims.size() == shape.size() + 1 && (dims[0] == 1 || dims[0] == batch);
  size_t i = 1;
  for (const int64_t size : shape) {
    good = good && dims[i] == size;
    ++i;
  }
  if (good) return ffi::Error::Success();
  std::ostringstream text;
  text << name << " has shape " << shape_text(dims) << "; accepted: [" << batch;
  if (batch != 1) text << " or 1";
  for (const int64_t size : shape) text << ", " << size;
  text << "]";
  return invalid(text.str());
}

ffi::Error check_float_operand(const char* name, ffi::AnyBuffer buffer, int64_t batch,
                               std::initializer_list<int64_t> shape, bool integers, Operand& out) {
  if (ffi::Error e = check_type(name, buffer.element_type(), integers, out.type); e.failure()) return e;
  if (ffi::Error e = check_shape(name, buffer.dimensions(), batch, shape); e.failure()) return e;
  out.data = static_cast<const char*>(buffer.untyped_data());
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  out.stride = buffer.dimensions()[0] == 1 ? 0 : elements * size_of(out.type);
  return ffi::Error::Success();
}

// qw, scales and shift of one custom call, with n and k known from another operand or result.
struct WeightOperands {
  const uint32_t* qw = nullptr;
  int64_t qw_stride = 0;  // words
  Operand scales, shift;
  ShiftMode shift_mode = ShiftMode::kNone;
  int bits = 4;
  int64_t k = 0, n = 0, groups = 0;

  Weights at(int64_t batch) const {
    return {qw + batch * qw_stride, scales.at(batch), shift.at(batch), shift_mode, bits, k, n, groups};
  }
};

ffi::Error check_bits(int64_t bits) {
  if (bits == 4 || bits == 8) return ffi::Error::Success();
  return invalid("bits = " + std::to_string(bits) + "; accepted: 4, 8");
}

ffi::Error check_weights(ffi::AnyBuffer qw, ffi::AnyBuffer scales, const ffi::RemainingArgs& rest, int64_t bits,
                         int64_t shift_mode, int64_t batch, int64_t k, int64_t n, WeightOperands& out) {
  if (ffi::Error e = check_bits(bits); e.failure()) return e;
  if (shift_mode < 0 || shift_mode > 2)
    return invalid("shift_mode = " + std::to_string(shift_mode) + "; accepted: 0, 1, 2");
  out.bits = static_cast<int>(bits);
  out.shift_mode = static_cast<ShiftMode>(shift_mode);
  out.k = k;
  out.n = n;
  if (qw.element_type() != ffi::DataType::U32) {
    std::ostringstream text;
    text << "qw has element type " << qw.element_type() << "; accepted: u32";
    return invalid(text.str());
  }
  const int64_t tiles_n = ceil_div(n, kTileN), tiles_k = ceil_div(k, tile_k(out.bits));
  if (ffi::Error e = check_shape("qw", qw.dimensions(), batch, {tiles_n, tiles_k, kTileWords}); e.failure()) return e;
  out.qw = static_cast<const uint32_t*>(qw.untyped_data());
  out.qw_stride = qw.dimensions()[0] == 1 ? 0 : tiles_n * tiles_k * kTileWords;
  if (scales.dimensions().size() != 3)
    return invalid("scales has shape " + shape_text(scales.dimensions()) + "; accepted: rank 3");
  out.groups = scales.dimensions()[1];
  if (out.groups < 1 || k % out.groups != 0) {
    return invalid("scales has " + std::to_string(out.groups) +
                   " groups, which do not divide K = " + std::to_string(k));
  }
  if (ffi::Error e = check_float_operand("scales", scales, batch, {out.groups, n}, false, out.scales); e.failure())
    return e;
  if (out.shift_mode == ShiftMode::kNone) return ffi::Error::Success();
  const char* name = out.shift_mode == ShiftMode::kZeros ? "zeros" : "offsets";
  ffi::ErrorOr<ffi::AnyBuffer> shift = rest.get<ffi::AnyBuffer>(0);
  if (!shift.has_value()) return invalid(std::string(name) + " operand is missing");
  return check_float_operand(name, *shift, batch, {out.groups, n}, out.shift_mode == ShiftMode::kZeros, out.shift);
}

ffi::Error check_operand_count(const ffi::RemainingArgs& rest, size_t expected) {
  if (rest.size() == expected) return ffi::Error::Success();
  return invalid(std::to_string(rest.size()) + " optional operands; the attributes call for " +
                 std::to_string(expected));
}

ffi::Error out_of_memory() {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "wonly: out of memory for scratch");
}

// Integer zeros above 15 are legal for four-bit codes but outside the look-up table of the bfloat16 pairs.
bool small_zeros(const WeightOperands& weights, int64_t batches) {
  const int64_t count = weights.groups * weights.n * (weights.shift.stride == 0 ? 1 : batches);
  const auto* zeros = reinterpret_cast<const uint8_t*>(weights.shift.data);
  uint8_t bits = 0;
  for (int64_t i = 0; i < count; ++i) bits |= zeros[i];
  return bits <= 15;
}

// One checked matmul call: packs x and shares the tiles of outputs out over threads.
struct MatmulCall {
  ffi::ThreadPool& pool;
  const Engine& engine;
  const WeightOperands& weights;
  const Operand& x;
  const Operand& bias;
  int64_t batch, rows;
  Activation activation;
  char* y = nullptr;
  DType y_type = DType::kF32;

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
    const Weights first = weights.at(0);
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
    } else if (count <= engine.direct_rows && weights.at(0).whole_groups()) {
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
    const Weights first = weights.at(0);
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
              as_planes[i] = engine.plane_exponents(first, x.at(i / rows), i % rows, exponents.data() + i * runs);
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
          engine.pack_block(part->packed, first, x.at(part->x_batch), block);
        })) {
      return false;
    }
    const bool done = share(small, task_items, [&](int64_t item) {
      const auto [part, within] = find(task_starts, item);
      const PackedX& packed = part->packed;
      const int64_t row_task = within % part->row_tasks;
      const int64_t b = x_batches == 1 ? within / part->row_tasks / tiles_n : part->x_batch;
      MatmulTask task{};
      task.weights = weights.at(b);
      task.x = packed;
      task.block_begin = row_task * packed.blocks / part->row_tasks;
      task.block_end = (row_task + 1) * packed.blocks / part->row_tasks;
      task.tile = within / part->row_tasks % tiles_n;
      task.bias = bias.at(b);
      task.activation = activation;
      task.y = y + b * rows * weights.n * size_of(y_type);
      task.y_type = y_type;
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
  const auto x_dims = x.dimensions(), y_dims = y->dimensions();
  if (x_dims.size() != 3) return invalid("x has shape " + shape_text(x_dims) + "; accepted: rank 3");
  if (y_dims.size() != 3) return invalid("the result has shape " + shape_text(y_dims) + "; accepted: rank 3");
  const int64_t batch = y_dims[0], rows = y_dims[1], n = y_dims[2], k = x_dims[2];
  Operand x_operand, bias, result;
  if (ffi::Error e = check_float_operand("x", x, batch, {rows, k}, false, x_operand); e.failure()) return e;
  if (ffi::Error e = check_type("the result", y->element_type(), false, result.type); e.failure()) return e;
  if (k < 1) return invalid("x has K = 0; accepted: at least 1");
  WeightOperands weights;
  if (ffi::Error e = check_weights(qw, scales, rest, bits, shift_mode, batch, k, n, weights); e.failure()) return e;
  const size_t shift_operands = weights.shift_mode == ShiftMode::kNone ? 0 : 1;
  if (has_bias != 0 && has_bias != 1) return invalid("has_bias = " + std::to_string(has_bias) + "; accepted: 0, 1");
  if (ffi::Error e = check_operand_count(rest, shift_operands + static_cast<size_t>(has_bias)); e.failure()) return e;
  if (has_bias == 1) {
    ffi::ErrorOr<ffi::AnyBuffer> buffer = rest.get<ffi::AnyBuffer>(shift_operands);
    if (!buffer.has_value()) return invalid("bias operand is missing");
    if (ffi::Error e = check_float_operand("bias", *buffer, batch, {n}, false, bias); e.failure()) return e;
  }
  if (activation < 0 || activation > 4)
    return invalid("activation = " + std::to_string(activation) + "; accepted: 0 to 4");
  if (batch == 0 || rows == 0 || n == 0) return ffi::Error::Success();

  MatmulCall call{pool, *engine, weights, x_operand, bias, batch, rows, static_cast<Activation>(activation)};
  call.y = static_cast<char*>(y->untyped_data());
  call.y_type = result.type;
  try {
    return call.run() ? ffi::Error::Success() : out_of_memory();
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
  const auto dims = w.dimensions();
  if (dims.size() != 3) return invalid("w has shape " + shape_text(dims) + "; accepted: rank 3");
  const int64_t batch = dims[0], k = dims[1], n = dims[2];
  Operand w_operand;
  if (ffi::Error e = check_float_operand("w", w, batch, {k, n}, false, w_operand); e.failure()) return e;
  if (k < 1) return invalid("w has K = 0; accepted: at least 1");
  w_operand.stride = k * n * size_of(w_operand.type);
  if (ffi::Error e = check_bits(bits); e.failure()) return e;
  if (quantize_mode < 0 || quantize_mode > 3) {
    return invalid("quantize_mode = " + std::to_string(quantize_mode) + "; accepted: 0 to 3");
  }
  const auto mode = static_cast<QuantizeMode>(quantize_mode);
  if (group_size < 1 || k % group_size != 0) {
    return invalid("group_size = " + std::to_string(group_size) + " does not divide K = " + std::to_string(k));
  }
  const int64_t groups = k / group_size;
  if (qw->element_type() != ffi::DataType::U32) return invalid("the packed result is not u32");
  const int64_t tiles_n = ceil_div(n, kTileN), tiles_k = ceil_div(k, tile_k(static_cast<int>(bits)));
  if (ffi::Error e = check_shape("qw", qw->dimensions(), batch, {tiles_n, tiles_k, kTileWords}); e.failure()) return e;
  Operand scale_result, shift_result;
  if (ffi::Error e = check_float_operand("scales", *scales, batch, {groups, n}, false, scale_result); e.failure())
    return e;
  const size_t shifts = mode == QuantizeMode::kSymmetric ? 0 : 1;
  if (rest.size() != shifts) {
    return invalid(std::to_string(2 + rest.size()) + " results; quantize_mode calls for " + std::to_string(2 + shifts));
  }
  char* shift_data = nullptr;
  if (shifts == 1) {
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> shift = rest.get<ffi::AnyBuffer>(0);
    if (!shift.has_value()) return invalid("the shift result is missing");
    const bool integers = mode == QuantizeMode::kIntegerZeros;
    if (ffi::Error e = check_float_operand("shift", **shift, batch, {groups, n}, true, shift_result); e.failure())
      return e;
    if (integers ? shift_result.type != DType::kU8 : shift_result.type != scale_result.type) {
      return invalid(integers ? "integer zeros are not u8" : "the shift result has another element type than scales");
    }
    shift_data = static_cast<char*>((*shift)->untyped_data());
  }
  for (const auto* result : {&*qw, &*scales}) {
    if ((*result).dimensions()[0] != batch) return invalid("a result has another leading size than w");
  }
  if (batch == 0 || n == 0) return ffi::Error::Success();

  const auto compute = [&](int64_t item) {
    const int64_t b = item / tiles_n;
    QuantizeTask task{};
    task.w = w_operand.at(b);
    task.k = k;
    task.n = n;
    task.groups = groups;
    task.bits = static_cast<int>(bits);
    task.mode = mode;
    task.tile = item % tiles_n;
    task.qw = static_cast<uint32_t*>(qw->untyped_data()) + b * tiles_n * tiles_k * kTileWords;
    task.scale_type = scale_result.type;
    task.scales = static_cast<char*>(scales->untyped_data()) + b * groups * n * size_of(scale_result.type);
    task.shift_type = shift_result.type;
    task.shift = shift_data == nullptr ? nullptr : shift_data + b * groups * n * size_of(shift_result.type);
    engine->quantize(task);
  };
  return parallel_for(pool, batch * tiles_n, compute) ? ffi::Error::Success() : out_of_memory();
}

ffi::Error dequantize(ffi::ThreadPool pool, ffi::AnyBuffer qw, ffi::AnyBuffer scales, ffi::RemainingArgs rest,
                      ffi::Result<ffi::AnyBuffer> w, int64_t bits, int64_t shift_mode) {
  std::string message;
  const Engine* engine = active_engine(message);
  if (engine == nullptr) return invalid(message);
  const auto dims = w->dimensions();
  if (dims.size() != 3) return invalid("the result has shape " + shape_text(dims) + "; accepted: rank 3");
  const int64_t batch = dims[0], k = dims[1], n = dims[2];
  DType type;
  if (ffi::Error e = check_type("the result", w->element_type(), false, type); e.failure()) return e;
  if (k < 1) return invalid("the result has K = 0; accepted: at least 1");
  WeightOperands weights;
  if (ffi::Error e = check_weights(qw, scales, rest, bits, shift_mode, batch, k, n, weights); e.failure()) return e;
  if (ffi::Error e = check_operand_count(rest, weights.shift_mode == ShiftMode::kNone ? 0 : 1); e.failure()) return e;
  if (batch == 0 || n == 0) return ffi::Error::Success();

  constexpr int64_t kPieceK = 1024;  // inputs of one task
  const int64_t tiles_n = weights.at(0).tiles_n(), pieces = ceil_div(k, kPieceK);
  const auto compute = [&](int64_t item) {
    const int64_t b = item / pieces / tiles_n;
    DequantizeTask task{};
    task.weights = weights.at(b);
    task.tile = item / pieces % tiles_n;
    task.k_begin = item % pieces * kPieceK;
    task.k_end = std::min(k, task.k_begin + kPieceK);
    task.w = static_cast<char*>(w->untyped_data()) + b * k * n * size_of(type);
    task.w_type = type;
    task.scratch = thread_buffer<Buffer::kTask>().reserve(static_cast<size_t>(engine->scratch_floats(task.weights, 0)));
    engine->dequantize(task);
  };
  return parallel_for(pool, batch * tiles_n * pieces, compute) ? ffi::Error::Success() : out_of_memory();
}

}  // namespace

XLA_FFI_Error* matmul_handler(XLA_FFI_CallFrame* call_frame) {
  static const auto* handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::ThreadPool>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::AnyBuffer>()
                                   .RemainingArgs()
                                   .Ret<ffi::AnyBuffer>()
                                   .Attr<int64_t>("bits")
                                   .Attr<int64_t>("shift_mode")
                                   .Attr<int64_t>("has_bias")
                                   .Attr<int64_t>("activation")
                                   .To(matmul)
                                   .release();
  return handler->Call(call_frame);
}

XLA_FFI_Error* quantize_handler(XLA_FFI_CallFrame* call_frame) {
  static const auto* handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::ThreadPool>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Ret<ffi::AnyBuffer>()
                                   .Ret<ffi::AnyBuffer>()
                                   .RemainingRets()
                                   .Attr<int64_t>("bits")
                                   .Attr<int64_t>("group_size")
                                   .Attr<int64_t>("quantize_mode")
                                   .To(quantize)
                                   .release();
  return handler->Call(call_frame);
}

XLA_FFI_Error* dequantize_handler(XLA_FFI_CallFrame* call_frame) {
  static const auto* handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::ThreadPool>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::AnyBuffer>()
                                   .RemainingArgs()
                                   .Ret<ffi::AnyBuffer>()
                                   .Attr<int64_t>("bits")
                                   .Attr<int64_t>("shift_mode")
                                   .To(dequantize)
                                   .release();
  return handler->Call(call_frame);
}

}  // namespace wonly::cpu
