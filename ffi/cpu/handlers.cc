#include "cpu/handlers.h"

#include <sstream>
#include <string>

#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace wonly::cpu {
namespace {

namespace ffi = xla::ffi;

ffi::Error invalid(const std::string& message) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, "wonly: " + message); }

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
    case ffi::DataType::F16: out = DType::kF16; return ffi::Error::Success();
    case ffi::DataType::BF16: out = DType::kBF16; return ffi::Error::Success();
    case ffi::DataType::F32: out = DType::kF32; return ffi::Error::Success();
    case ffi::DataType::U8:
      if (integers) {
        out = DType::kU8;
        return ffi::Error::Success();
      }
      break;
    default: break;
  }
  std::ostringstream text;
  text << name << " has element type " << type << "; accepted: f16, bf16, f32" << (integers ? ", u8" : "");
  return invalid(text.str());
}

// shape: the expected sizes after the leading one, which is 1 or `batch`.
ffi::Error check_shape(const char* name, ffi::AnyBuffer::Dimensions dims, int64_t batch, std::initializer_list<int64_t> shape) {
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

ffi::Error check_float_operand(const char* name, ffi::AnyBuffer buffer, int64_t batch, std::initializer_list<int64_t> shape,
                               bool integers, Operand& out) {
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
  if (shift_mode < 0 || shift_mode > 2) return invalid("shift_mode = " + std::to_string(shift_mode) + "; accepted: 0, 1, 2");
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
  if (scales.dimensions().size() != 3) return invalid("scales has shape " + shape_text(scales.dimensions()) + "; accepted: rank 3");
  out.groups = scales.dimensions()[1];
  if (out.groups < 1 || k % out.groups != 0) {
    return invalid("scales has " + std::to_string(out.groups) + " groups, which do not divide K = " + std::to_string(k));
  }
  if (ffi::Error e = check_float_operand("scales", scales, batch, {out.groups, n}, false, out.scales); e.failure()) return e;
  if (out.shift_mode == ShiftMode::kNone) return ffi::Error::Success();
  const char* name = out.shift_mode == ShiftMode::kZeros ? "zeros" : "offsets";
  ffi::ErrorOr<ffi::AnyBuffer> shift = rest.get<ffi::AnyBuffer>(0);
  if (!shift.has_value()) return invalid(std::string(name) + " operand is missing");
  return check_float_operand(name, *shift, batch, {out.groups, n}, out.shift_mode == ShiftMode::kZeros, out.shift);
}

ffi::Error check_operand_count(const ffi::RemainingArgs& rest, size_t expected) {
  if (rest.size() == expected) return ffi::Error::Success();
  return invalid(std::to_string(rest.size()) + " optional operands; the attributes call for " + std::to_string(expected));
}

ffi::Error out_of_memory() { return ffi::Error(ffi::ErrorCode::kResourceExhausted, "wonly: out of memory for scratch"); }

// Integer zeros above 15 are legal for four-bit codes but outside the look-up table of the bfloat16 pairs.
bool small_zeros(const WeightOperands& weights, int64_t batches) {
  const int64_t count = weights.groups * weights.n * (weights.shift.stride == 0 ? 1 : batches);
  const auto* zeros = reinterpret_cast<const uint8_t*>(weights.shift.data);
  uint8_t bits = 0;
  for (int64_t i = 0; i < count; ++i) bits |= zeros[i];
  return bits <= 15;
}

ffi::Error matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer qw, ffi::AnyBuffer scales, ffi::RemainingArgs rest,
                  ffi::Result<ffi::AnyBuffer> y, int64_t bits, int64_t shift_mode, int64_t has_bias, int64_t activation) {
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
  if (activation < 0 || activation > 4) return invalid("activation = " + std::to_string(activation) + "; accepted: 0 to 4");
  if (batch == 0 || rows == 0 || n == 0) return ffi::Error::Success();

  const Weights first = weights.at(0);
  const bool direct = rows <= engine->direct_rows && first.whole_groups();
  PackedX packed{};
  packed.form = Form::kF32;
  if (engine->pairs && x_operand.type == DType::kBF16 && first.whole_groups() &&
      (weights.shift_mode == ShiftMode::kNone ||
       (weights.shift_mode == ShiftMode::kZeros && weights.shift.type == DType::kU8 &&
        (bits == 8 || small_zeros(weights, batch))))) {
    packed.form = Form::kBF16Pairs;
  }
  packed.rows = rows;
  packed.rows_padded = direct ? engine->direct_width(rows) : rows;
  packed.k = k;
  packed.k_padded = ceil_div(k, 64) * 64;
  packed.blocks = direct ? 1 : ceil_div(rows, engine->panel_rows);
  const int64_t x_batches = x_operand.stride == 0 ? 1 : batch;
  const int64_t x_elements = packed.rows_padded * packed.row_elements();

  try {
    ThreadBuffer& shared = thread_buffer<Buffer::kCall>();
    float* x_packed = shared.reserve(static_cast<size_t>(x_batches * x_elements));
    const auto pack = [&](int64_t item) {
      PackedX one = packed;
      one.data = x_packed + item / packed.blocks * x_elements;
      engine->pack_block(one, x_operand.at(item / packed.blocks), item % packed.blocks);
    };
    // Few rows are packed faster than a second thread wakes up.
    if (x_batches * x_elements < (int64_t{1} << 17)) {
      for (int64_t item = 0; item < x_batches * packed.blocks; ++item) pack(item);
    } else if (!parallel_for(pool, x_batches * packed.blocks, pack)) {
      return out_of_memory();
    }

    // Rows of one task, so that their sums stay in the second-level cache.
    const int64_t task_blocks = direct ? 1 : std::min<int64_t>(packed.blocks, std::max<int64_t>(1, 512 / engine->panel_rows));
    const int64_t row_tasks = ceil_div(packed.blocks, task_blocks);
    const int64_t tiles_n = first.tiles_n();
    const auto compute = [&](int64_t item) {
      const int64_t row_task = item % row_tasks;
      const int64_t b = item / row_tasks / tiles_n;
      MatmulTask task{};
      task.weights = weights.at(b);
      task.x = packed;
      task.x.data = x_packed + (x_batches == 1 ? 0 : b) * x_elements;
      task.block_begin = row_task * packed.blocks / row_tasks;
      task.block_end = (row_task + 1) * packed.blocks / row_tasks;
      task.tile = item / row_tasks % tiles_n;
      task.bias = bias.at(b);
      task.activation = static_cast<Activation>(activation);
      task.y = static_cast<char*>(y->untyped_data()) + b * rows * n * size_of(result.type);
      task.y_type = result.type;
      const int64_t task_rows = packed.block_begin(task.block_end) - packed.block_begin(task.block_begin);
      task.scratch = thread_buffer<Buffer::kTask>().reserve(static_cast<size_t>(engine->scratch_floats(task.weights, task_rows)));
      (direct ? engine->matmul_direct : engine->matmul_panel)(task);
    };
    const int64_t items = batch * tiles_n * row_tasks;
    // A small product is over before a second thread wakes up.
    if (batch * rows * tiles_n * kTileN * packed.k_padded < (int64_t{1} << 19)) {
      for (int64_t item = 0; item < items; ++item) compute(item);
    } else if (!parallel_for(pool, items, compute)) {
      return out_of_memory();
    }
    shared.trim();
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  }
  return ffi::Error::Success();
}

ffi::Error quantize(ffi::ThreadPool pool, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> qw, ffi::Result<ffi::AnyBuffer> scales,
                    ffi::RemainingRets rest, int64_t bits, int64_t group_size, int64_t quantize_mode) {
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
  if (ffi::Error e = check_float_operand("scales", *scales, batch, {groups, n}, false, scale_result); e.failure()) return e;
  const size_t shifts = mode == QuantizeMode::kSymmetric ? 0 : 1;
  if (rest.size() != shifts) {
    return invalid(std::to_string(2 + rest.size()) + " results; quantize_mode calls for " + std::to_string(2 + shifts));
  }
  char* shift_data = nullptr;
  if (shifts == 1) {
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> shift = rest.get<ffi::AnyBuffer>(0);
    if (!shift.has_value()) return invalid("the shift result is missing");
    const bool integers = mode == QuantizeMode::kIntegerZeros;
    if (ffi::Error e = check_float_operand("shift", **shift, batch, {groups, n}, true, shift_result); e.failure()) return e;
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
