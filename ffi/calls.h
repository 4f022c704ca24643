// The custom calls of abi.h as XLA hands them over: their signatures, and the checks of operands and attributes that
// handlers on every platform make before they touch memory. What passes comes back as plain structs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <string>
#include <utility>

#include "abi.h"
#include "layout.h"
#include "xla/ffi/api/ffi.h"

namespace wonly {

namespace ffi = xla::ffi;

#define WONLY_RETURN_IF_ERROR(expression) \
  if (ffi::Error error = (expression); error.failure()) return error

template <typename... Parts>
ffi::Error invalid(const Parts&... parts) {
  std::ostringstream message;
  message << "jax_wonly: ";
  (message << ... << parts);
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, message.str());
}

// An array operand or result of a float type, or u8 where that is allowed.
struct Operand {
  char* data = nullptr;  // null: the call has none
  DType type = DType::kF32;
  int64_t stride = 0;  // elements from one batch entry to the next; 0: all share one

  char* at(int64_t batch) const { return data == nullptr ? nullptr : data + batch * stride * element_size(type); }
};

// A packed weight and its parameters: qw[Nt, Kt, 512], scales[groups, N], shift[groups, N] for each batch entry; or,
// in the place of shift, the float32 table[16] of kTable.
struct WeightOperands {
  const uint32_t* qw = nullptr;
  int64_t qw_stride = 0;  // as Operand::stride
  Operand scales, shift;
  ShiftMode shift_mode = ShiftMode::kNone;
  int bits = 4;
  int64_t k = 0, n = 0, groups = 0;
};

// y[batch, m, n] = activation(x[batch, m, k] @ W + bias[batch, n])
struct MatmulOperands {
  Operand x, bias, y;
  WeightOperands weights;
  int64_t batch = 0, m = 0;
  Activation activation = Activation::kNone;
};

// y[m, n], row r = activation(x[r / repeat, k] @ W + bias) with the weights and the bias of the row's expert, else
// zero. Transposed: y[m, k], row r = x[r / repeat, n] @ W^T.
struct RaggedOperands {
  Operand x, bias, y;
  WeightOperands weights;  // a batch entry is an expert
  RowMode row_mode = RowMode::kSizes;
  const int32_t* rows = nullptr;  // s32[experts] or s32[m]; on the device
  int64_t experts = 0, m = 0, repeat = 1;
  Activation activation = Activation::kNone;
  int32_t* scratch = nullptr;
  int64_t scratch_words = 0;
};

// y[images, height.result, width.result, n] of x[images, height.size, width.size, k]; a batch entry of the weights is a
// tap.
struct ConvOperands {
  Operand x, bias, y;
  WeightOperands weights;
  ConvGeometry geometry{};
  Activation activation = Activation::kNone;
};

// The same with depth, and features in groups of k inputs.
struct DirectConvOperands {
  Operand x, bias, y;
  WeightOperands weights;
  DirectConvGeometry geometry{};
  Activation activation = Activation::kNone;
};

// qw[batch, Nt, Kt, 512], scales[batch, groups, n], (shift[batch, groups, n]) of w[batch, k, n]
struct QuantizeOperands {
  Operand w, scales, shift;
  uint32_t* qw = nullptr;
  QuantizeMode mode = QuantizeMode::kSymmetric;
  int bits = 4;
  int64_t batch = 0, k = 0, n = 0, groups = 0;
};

// w[batch, k, n] of packed weights
struct DequantizeOperands {
  WeightOperands weights;
  Operand w;
  int64_t batch = 0;
};

// The operands that all products begin with: the activations, or their result's cotangent, and the weights.
template <typename Context>
auto bind_operands() {
  return ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<ffi::AnyBuffer>()   // x or dy
      .template Arg<ffi::AnyBuffer>()   // qw
      .template Arg<ffi::AnyBuffer>();  // scales
}

template <typename Binding>
auto bind_scheme(Binding&& binding) {
  return std::forward<Binding>(binding).template Attr<int64_t>("bits").template Attr<int64_t>("shift_mode");
}

template <typename Binding>
auto bind_epilogue(Binding&& binding) {
  return bind_scheme(std::forward<Binding>(binding))
      .template Attr<int64_t>("has_bias")
      .template Attr<int64_t>("activation");
}

template <typename Context>
auto bind_matmul() {
  return bind_epilogue(bind_operands<Context>()
                           .RemainingArgs()                 // shift, bias
                           .template Ret<ffi::AnyBuffer>()  // y
                           .RemainingRets());               // scratch
}

template <typename Context>
auto bind_conv() {
  return bind_epilogue(bind_operands<Context>()
                           .RemainingArgs()                  // shift, bias
                           .template Ret<ffi::AnyBuffer>()   // y
                           .template Ret<ffi::AnyBuffer>())  // scratch
      .template Attr<ffi::Span<const int64_t>>("window");
}

template <typename Context>
auto bind_direct_conv() {
  return bind_epilogue(bind_operands<Context>()
                           .RemainingArgs()                  // shift, bias
                           .template Ret<ffi::AnyBuffer>())  // y
      .template Attr<int64_t>("groups")
      .template Attr<ffi::Span<const int64_t>>("window");
}

template <typename Context>
auto bind_matmul_transposed() {
  return bind_scheme(bind_operands<Context>()
                         .RemainingArgs()                 // shift
                         .template Ret<ffi::AnyBuffer>()  // dx
                         .RemainingRets());               // scratch
}

template <typename Context>
auto bind_ragged_matmul() {
  return bind_epilogue(bind_operands<Context>()
                           .template Arg<ffi::AnyBuffer>()   // rows
                           .RemainingArgs()                  // shift, bias
                           .template Ret<ffi::AnyBuffer>()   // y
                           .template Ret<ffi::AnyBuffer>())  // scratch
      .template Attr<int64_t>("row_mode");
}

template <typename Context>
auto bind_ragged_matmul_transposed() {
  return bind_scheme(bind_operands<Context>()
                         .template Arg<ffi::AnyBuffer>()   // rows
                         .RemainingArgs()                  // shift
                         .template Ret<ffi::AnyBuffer>()   // dx
                         .template Ret<ffi::AnyBuffer>())  // scratch
      .template Attr<int64_t>("row_mode");
}

template <typename Context>
auto bind_quantize() {
  return ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<ffi::AnyBuffer>()  // w
      .template Ret<ffi::AnyBuffer>()  // qw
      .template Ret<ffi::AnyBuffer>()  // scales
      .RemainingRets()                 // shift
      .template Attr<int64_t>("bits")
      .template Attr<int64_t>("group_size")
      .template Attr<int64_t>("quantize_mode");
}

template <typename Context>
auto bind_dequantize() {
  return ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<ffi::AnyBuffer>()  // qw
      .template Arg<ffi::AnyBuffer>()  // scales
      .RemainingArgs()                 // shift
      .template Ret<ffi::AnyBuffer>()  // w
      .template Attr<int64_t>("bits")
      .template Attr<int64_t>("shift_mode");
}

inline std::string shape_text(ffi::AnyBuffer::Dimensions dims) {
  std::ostringstream text;
  text << "[";
  for (size_t i = 0; i < dims.size(); ++i) text << (i ? ", " : "") << dims[i];
  text << "]";
  return text.str();
}

inline ffi::Error check_rank(const char* name, const ffi::AnyBuffer& buffer, size_t rank) {
  if (buffer.dimensions().size() == rank) return ffi::Error::Success();
  return invalid(name, " has shape ", shape_text(buffer.dimensions()), "; accepted: rank ", rank);
}

inline ffi::Error check_rank3(const char* name, const ffi::AnyBuffer& buffer) { return check_rank(name, buffer, 3); }

inline ffi::Error check_inputs(const char* name, int64_t k) {
  if (k >= 1) return ffi::Error::Success();
  return invalid(name, " has K = 0; accepted: at least 1");
}

inline ffi::Error check_bits(int64_t bits) {
  if (bits == 4 || bits == 8) return ffi::Error::Success();
  return invalid("bits = ", bits, "; accepted: 4, 8");
}

// An attribute that is one of the values 0 .. last of an enumeration.
inline ffi::Error check_choice(const char* name, int64_t value, int64_t last) {
  if (value >= 0 && value <= last) return ffi::Error::Success();
  return invalid(name, " = ", value, "; accepted: 0 to ", last);
}

inline ffi::Error check_type(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType expected) {
  if (buffer.element_type() == expected) return ffi::Error::Success();
  return invalid(name, " has element type ", buffer.element_type(), "; accepted: ", expected);
}

// `shape`: the sizes after the leading one, which is `batch` or, for what a batch may share, 1.
inline ffi::Error check_shape(const char* name, const ffi::AnyBuffer& buffer, int64_t batch, bool shared,
                              std::initializer_list<int64_t> shape) {
  const auto dims = buffer.dimensions();
  bool good = dims.size() == shape.size() + 1 && (dims[0] == batch || (shared && dims[0] == 1));
  size_t i = 1;
  for (const int64_t size : shape) {
    good = good && dims[i] == size;
    ++i;
  }
  if (good) return ffi::Error::Success();
  std::ostringstream accepted;
  accepted << "[" << batch << (shared && batch != 1 ? " or 1" : "");
  for (const int64_t size : shape) accepted << ", " << size;
  accepted << "]";
  return invalid(name, " has shape ", shape_text(dims), "; accepted: ", accepted.str());
}

inline int64_t batch_stride(const ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  if (dims[0] == 1) return 0;
  int64_t stride = 1;
  for (size_t i = 1; i < dims.size(); ++i) stride *= dims[i];
  return stride;
}

inline ffi::Error check_operand(const char* name, const ffi::AnyBuffer& buffer, int64_t batch, bool shared,
                                std::initializer_list<int64_t> shape, bool integers, Operand& out) {
  switch (buffer.element_type()) {
    case ffi::DataType::F16:
      out.type = DType::kF16;
      break;
    case ffi::DataType::BF16:
      out.type = DType::kBF16;
      break;
    case ffi::DataType::F32:
      out.type = DType::kF32;
      break;
    case ffi::DataType::U8:
      if (integers) {
        out.type = DType::kU8;
        break;
      }
      [[fallthrough]];
    default:
      return invalid(name, " has element type ", buffer.element_type(), "; accepted: F16, BF16, F32",
                     integers ? ", U8" : "");
  }
  WONLY_RETURN_IF_ERROR(check_shape(name, buffer, batch, shared, shape));
  out.data = static_cast<char*>(buffer.untyped_data());
  out.stride = batch_stride(buffer);
  return ffi::Error::Success();
}

// `has_bias` is what the call's operands may hold besides a shift.
inline ffi::Error check_weights(const ffi::AnyBuffer& qw, const ffi::AnyBuffer& scales, const ffi::RemainingArgs& rest,
                                int64_t bits, int64_t shift_mode, bool has_bias, int64_t batch, int64_t k, int64_t n,
                                WeightOperands& out) {
  WONLY_RETURN_IF_ERROR(check_bits(bits));
  WONLY_RETURN_IF_ERROR(check_choice("shift_mode", shift_mode, static_cast<int64_t>(ShiftMode::kTable)));
  out.bits = static_cast<int>(bits);
  out.shift_mode = static_cast<ShiftMode>(shift_mode);
  out.k = k;
  out.n = n;
  const size_t optional = size_t{out.shift_mode != ShiftMode::kNone} + size_t{has_bias};
  if (rest.size() != optional) {
    return invalid(rest.size(), " optional operands; the attributes call for ", optional);
  }
  WONLY_RETURN_IF_ERROR(check_type("qw", qw, ffi::DataType::U32));
  WONLY_RETURN_IF_ERROR(
      check_shape("qw", qw, batch, true, {ceil_div(n, kTileN), ceil_div(k, tile_k(out.bits)), kTileWords}));
  out.qw = static_cast<const uint32_t*>(qw.untyped_data());
  out.qw_stride = batch_stride(qw);
  WONLY_RETURN_IF_ERROR(check_rank3("scales", scales));
  out.groups = scales.dimensions()[1];
  if (out.groups < 1 || k % out.groups != 0) {
    return invalid("scales has ", out.groups, " groups, which do not divide K = ", k);
  }
  WONLY_RETURN_IF_ERROR(check_operand("scales", scales, batch, true, {out.groups, n}, false, out.scales));
  if (out.shift_mode == ShiftMode::kNone) return ffi::Error::Success();
  if (out.shift_mode == ShiftMode::kTable) {
    if (bits != 4) return invalid("bits = ", bits, " with a table; accepted: 4");
    const ffi::AnyBuffer table = *rest.get<ffi::AnyBuffer>(0);
    WONLY_RETURN_IF_ERROR(check_type("table", table, ffi::DataType::F32));
    return check_operand("table", table, batch, true, {1, kTableEntries}, false, out.shift);
  }
  const bool zeros = out.shift_mode == ShiftMode::kZeros;
  return check_operand(zeros ? "zeros" : "offsets", *rest.get<ffi::AnyBuffer>(0), batch, true, {out.groups, n}, zeros,
                       out.shift);
}

inline ffi::Error check_matmul(const ffi::AnyBuffer& x, const ffi::AnyBuffer& qw, const ffi::AnyBuffer& scales,
                               const ffi::RemainingArgs& rest, const ffi::AnyBuffer& y, int64_t bits,
                               int64_t shift_mode, int64_t has_bias, int64_t activation, MatmulOperands& out) {
  WONLY_RETURN_IF_ERROR(check_rank3("x", x));
  WONLY_RETURN_IF_ERROR(check_rank3("the result", y));
  const int64_t k = x.dimensions()[2], n = y.dimensions()[2];
  out.batch = y.dimensions()[0];
  out.m = y.dimensions()[1];
  WONLY_RETURN_IF_ERROR(check_operand("x", x, out.batch, true, {out.m, k}, false, out.x));
  WONLY_RETURN_IF_ERROR(check_inputs("x", k));
  WONLY_RETURN_IF_ERROR(check_operand("the result", y, out.batch, false, {out.m, n}, false, out.y));
  WONLY_RETURN_IF_ERROR(check_choice("has_bias", has_bias, 1));
  WONLY_RETURN_IF_ERROR(check_choice("activation", activation, static_cast<int64_t>(Activation::kSilu)));
  out.activation = static_cast<Activation>(activation);
  WONLY_RETURN_IF_ERROR(check_weights(qw, scales, rest, bits, shift_mode, has_bias == 1, out.batch, k, n, out.weights));
  if (has_bias == 0) return ffi::Error::Success();
  return check_operand("bias", *rest.get<ffi::AnyBuffer>(rest.size() - 1), out.batch, true, {n}, false, out.bias);
}

// y = x @ W^T for x[batch, m, n] and y[batch, m, k].
inline ffi::Error check_matmul_transposed(const ffi::AnyBuffer& x, const ffi::AnyBuffer& qw,
                                          const ffi::AnyBuffer& scales, const ffi::RemainingArgs& rest,
                                          const ffi::AnyBuffer& y, int64_t bits, int64_t shift_mode,
                                          MatmulOperands& out) {
  WONLY_RETURN_IF_ERROR(check_rank3("dy", x));
  WONLY_RETURN_IF_ERROR(check_rank3("the result", y));
  const int64_t n = x.dimensions()[2], k = y.dimensions()[2];
  out.batch = y.dimensions()[0];
  out.m = y.dimensions()[1];
  WONLY_RETURN_IF_ERROR(check_operand("dy", x, out.batch, true, {out.m, n}, false, out.x));
  WONLY_RETURN_IF_ERROR(check_inputs("the result", k));
  WONLY_RETURN_IF_ERROR(check_operand("the result", y, out.batch, false, {out.m, k}, false, out.y));
  return check_weights(qw, scales, rest, bits, shift_mode, false, out.batch, k, n, out.weights);
}

// The epilogue and the weights of a convolution, of which every tap has its own.
template <typename Operands>
ffi::Error check_conv_weights(const ffi::AnyBuffer& qw, const ffi::AnyBuffer& scales, const ffi::RemainingArgs& rest,
                              int64_t bits, int64_t shift_mode, int64_t has_bias, int64_t activation, int64_t taps,
                              int64_t k, int64_t n, Operands& out) {
  WONLY_RETURN_IF_ERROR(check_inputs("x", k));
  WONLY_RETURN_IF_ERROR(check_choice("has_bias", has_bias, 1));
  WONLY_RETURN_IF_ERROR(check_choice("activation", activation, static_cast<int64_t>(Activation::kSilu)));
  out.activation = static_cast<Activation>(activation);
  WONLY_RETURN_IF_ERROR(check_weights(qw, scales, rest, bits, shift_mode, has_bias == 1, taps, k, n, out.weights));
  if (qw.dimensions()[0] != taps) return invalid("qw is not that of ", taps, " taps");
  if (has_bias == 0) return ffi::Error::Success();
  return check_operand("bias", *rest.get<ffi::AnyBuffer>(rest.size() - 1), 1, false, {n}, false, out.bias);
}

// Window, strides, padding, dilation, and up to `properties` more, of `axes` axes, one property after the other.
inline ffi::Error check_window(ffi::Span<const int64_t> window, size_t axes, size_t properties = 4) {
  constexpr int64_t kMost = int64_t{1} << 20;  // what sizes are computed of stays far from the end of int64
  if (window.size() != 4 * axes && window.size() != properties * axes) {
    return invalid("window has ", window.size(), " entries; accepted: ", properties * axes);
  }
  for (size_t i = 0; i < window.size(); ++i) {
    const int64_t least = i / axes == 2 ? -kMost : 1;
    if (window[i] < least || window[i] > kMost) {
      return invalid("window[", i, "] = ", window[i], "; accepted: ", least, " to ", kMost);
    }
  }
  return ffi::Error::Success();
}

inline ffi::Error conv_axis(ffi::Span<const int64_t> window, size_t axes, size_t axis, int64_t size, int64_t result,
                            ConvAxis& out) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  if (size > kMost || result > kMost) {
    return invalid("a size is ", std::max(size, result), "; accepted: less than 2^31");
  }
  const auto property = [&](size_t i) { return static_cast<int>(window[i * axes + axis]); };
  out = {static_cast<int>(size), static_cast<int>(result), property(0), property(1), property(2), property(3)};
  if (window.size() > 4 * axes) out.spread = property(4);
  return ffi::Error::Success();
}

inline ffi::Error check_conv(const ffi::AnyBuffer& x, const ffi::AnyBuffer& qw, const ffi::AnyBuffer& scales,
                             const ffi::RemainingArgs& rest, const ffi::AnyBuffer& y, int64_t bits, int64_t shift_mode,
                             int64_t has_bias, int64_t activation, ffi::Span<const int64_t> window, ConvOperands& out) {
  WONLY_RETURN_IF_ERROR(check_rank("x", x, 4));
  WONLY_RETURN_IF_ERROR(check_rank("the result", y, 4));
  WONLY_RETURN_IF_ERROR(check_window(window, 2, 5));
  const auto in = x.dimensions(), result = y.dimensions();
  if (in[0] > std::numeric_limits<int>::max()) return invalid("x has ", in[0], " images; accepted: less than 2^31");
  ConvGeometry& g = out.geometry;
  g.images = static_cast<int>(in[0]);
  WONLY_RETURN_IF_ERROR(conv_axis(window, 2, 0, in[1], result[1], g.height));
  WONLY_RETURN_IF_ERROR(conv_axis(window, 2, 1, in[2], result[2], g.width));
  const int64_t k = in[3], n = result[3], taps = int64_t{g.height.window} * g.width.window;
  WONLY_RETURN_IF_ERROR(check_operand("x", x, in[0], false, {in[1], in[2], k}, false, out.x));
  WONLY_RETURN_IF_ERROR(check_operand("the result", y, in[0], false, {result[1], result[2], n}, false, out.y));
  WONLY_RETURN_IF_ERROR(check_conv_weights(qw, scales, rest, bits, shift_mode, has_bias, activation, taps, k, n, out));
  if (scales.dimensions()[0] != taps ||
      (out.weights.shift.data != nullptr && taps > 1 && out.weights.shift.stride == 0)) {
    return invalid("scales or shift are not those of ", taps, " taps");
  }
  return ffi::Error::Success();
}

inline ffi::Error check_direct_conv(const ffi::AnyBuffer& x, const ffi::AnyBuffer& qw, const ffi::AnyBuffer& scales,
                                    const ffi::RemainingArgs& rest, const ffi::AnyBuffer& y, int64_t bits,
                                    int64_t shift_mode, int64_t has_bias, int64_t activation, int64_t groups,
                                    ffi::Span<const int64_t> window, DirectConvOperands& out) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  WONLY_RETURN_IF_ERROR(check_rank("x", x, 5));
  WONLY_RETURN_IF_ERROR(check_rank("the result", y, 5));
  WONLY_RETURN_IF_ERROR(check_window(window, 3));
  const auto in = x.dimensions(), result = y.dimensions();
  const int64_t features = in[4], n = result[4];
  if (groups < 1 || groups > kMost || features % groups != 0 || n % groups != 0) {
    return invalid("groups = ", groups, "; accepted: what divides ", features, " features and ", n, " outputs");
  }
  if (in[0] > kMost) return invalid("x has ", in[0], " images; accepted: less than 2^31");
  DirectConvGeometry& g = out.geometry;
  g.images = static_cast<int>(in[0]);
  g.groups = static_cast<int>(groups);
  int64_t taps = 1;
  ConvAxis* const axes[] = {&g.depth, &g.height, &g.width};
  for (size_t i = 0; i < 3; ++i) {
    ConvAxis& axis = *axes[i];
    WONLY_RETURN_IF_ERROR(conv_axis(window, 3, i, in[i + 1], result[i + 1], axis));
    // Kernels compute positions in 32 bits, also of some pixels and taps beyond the last.
    const int64_t reach = (int64_t{axis.result} + 16) * axis.stride + (int64_t{axis.window} + 16) * axis.dilation +
                          std::abs(int64_t{axis.low});
    taps *= axis.window;
    if (reach > kMost / 16 || taps > kMost) return invalid("the window reaches too far, or has 2^31 taps");
  }
  if (in[3] > kMost / std::max<int64_t>(features, 1)) return invalid("a row of x has 2^31 elements or more");
  WONLY_RETURN_IF_ERROR(check_operand("x", x, in[0], false, {in[1], in[2], in[3], features}, false, out.x));
  WONLY_RETURN_IF_ERROR(
      check_operand("the result", y, in[0], false, {result[1], result[2], result[3], n}, false, out.y));
  return check_conv_weights(qw, scales, rest, bits, shift_mode, has_bias, activation, taps, features / groups, n, out);
}

// Of both ragged products; the transposed one has neither bias nor activation.
inline ffi::Error check_ragged(const ffi::AnyBuffer& x, const ffi::AnyBuffer& qw, const ffi::AnyBuffer& scales,
                               const ffi::AnyBuffer& rows, const ffi::RemainingArgs& rest, const ffi::AnyBuffer& y,
                               const ffi::AnyBuffer& scratch, int64_t bits, int64_t shift_mode, int64_t has_bias,
                               int64_t activation, int64_t row_mode, bool transposed, RaggedOperands& out) {
  const char* const x_name = transposed ? "dy" : "x";
  WONLY_RETURN_IF_ERROR(check_rank(x_name, x, 2));
  WONLY_RETURN_IF_ERROR(check_rank("qw", qw, 4));
  WONLY_RETURN_IF_ERROR(check_rank("the result", y, 2));
  const int64_t x_rows = x.dimensions()[0], inputs = x.dimensions()[1], outputs = y.dimensions()[1];
  out.m = y.dimensions()[0];
  out.experts = qw.dimensions()[0];
  WONLY_RETURN_IF_ERROR(check_choice("row_mode", row_mode, static_cast<int64_t>(RowMode::kIds)));
  out.row_mode = static_cast<RowMode>(row_mode);
  const bool ids = out.row_mode == RowMode::kIds;
  if (out.m != x_rows && (!ids || x_rows < 1 || out.m % x_rows != 0)) {
    return invalid(x_name, " has ", x_rows, " rows; accepted: ", ids ? "a divisor of " : "", out.m);
  }
  out.repeat = out.m == x_rows ? 1 : out.m / x_rows;
  WONLY_RETURN_IF_ERROR(check_operand(x_name, x, x_rows, false, {inputs}, false, out.x));
  WONLY_RETURN_IF_ERROR(check_operand("the result", y, out.m, false, {outputs}, false, out.y));
  WONLY_RETURN_IF_ERROR(check_type("rows", rows, ffi::DataType::S32));
  WONLY_RETURN_IF_ERROR(check_shape("rows", rows, ids ? out.m : out.experts, false, {}));
  out.rows = static_cast<const int32_t*>(rows.untyped_data());
  WONLY_RETURN_IF_ERROR(check_type("scratch", scratch, ffi::DataType::S32));
  out.scratch = static_cast<int32_t*>(scratch.untyped_data());
  out.scratch_words = static_cast<int64_t>(scratch.element_count());
  WONLY_RETURN_IF_ERROR(check_choice("has_bias", has_bias, 1));
  WONLY_RETURN_IF_ERROR(check_choice("activation", activation, static_cast<int64_t>(Activation::kSilu)));
  out.activation = static_cast<Activation>(activation);
  const int64_t k = transposed ? outputs : inputs, n = transposed ? inputs : outputs;
  WONLY_RETURN_IF_ERROR(check_inputs(transposed ? "the result" : "x", k));
  WONLY_RETURN_IF_ERROR(
      check_weights(qw, scales, rest, bits, shift_mode, has_bias == 1, out.experts, k, n, out.weights));
  if (has_bias == 0) return ffi::Error::Success();
  return check_operand("bias", *rest.get<ffi::AnyBuffer>(rest.size() - 1), out.experts, true, {n}, false, out.bias);
}

// For platforms whose kernels need it.
inline ffi::Error check_ragged_scratch(const RaggedOperands& operands) {
  const int64_t words =
      kRaggedScratchPerRow * operands.m + kRaggedScratchPerExpert * operands.experts + kRaggedScratchFixed;
  if (operands.scratch_words >= words) return ffi::Error::Success();
  return invalid("scratch has ", operands.scratch_words, " elements; accepted: at least ", words);
}

inline ffi::Error check_quantize(const ffi::AnyBuffer& w, const ffi::AnyBuffer& qw, const ffi::AnyBuffer& scales,
                                 const ffi::RemainingRets& rest, int64_t bits, int64_t group_size,
                                 int64_t quantize_mode, QuantizeOperands& out) {
  WONLY_RETURN_IF_ERROR(check_rank3("w", w));
  const int64_t batch = w.dimensions()[0], k = w.dimensions()[1], n = w.dimensions()[2];
  WONLY_RETURN_IF_ERROR(check_operand("w", w, batch, false, {k, n}, false, out.w));
  WONLY_RETURN_IF_ERROR(check_inputs("w", k));
  WONLY_RETURN_IF_ERROR(check_bits(bits));
  WONLY_RETURN_IF_ERROR(check_choice("quantize_mode", quantize_mode, static_cast<int64_t>(QuantizeMode::kOffsets)));
  if (group_size < 1 || k % group_size != 0) {
    return invalid("group_size = ", group_size, " does not divide K = ", k);
  }
  out.batch = batch;
  out.k = k;
  out.n = n;
  out.groups = k / group_size;
  out.bits = static_cast<int>(bits);
  out.mode = static_cast<QuantizeMode>(quantize_mode);
  WONLY_RETURN_IF_ERROR(check_type("qw", qw, ffi::DataType::U32));
  WONLY_RETURN_IF_ERROR(
      check_shape("qw", qw, batch, false, {ceil_div(n, kTileN), ceil_div(k, tile_k(out.bits)), kTileWords}));
  out.qw = static_cast<uint32_t*>(qw.untyped_data());
  WONLY_RETURN_IF_ERROR(check_operand("scales", scales, batch, false, {out.groups, n}, false, out.scales));
  const size_t shifts = out.mode == QuantizeMode::kSymmetric ? 0 : 1;
  if (rest.size() != shifts) {
    return invalid(2 + rest.size(), " results; quantize_mode calls for ", 2 + shifts);
  }
  if (shifts == 0) return ffi::Error::Success();
  const ffi::AnyBuffer shift = **rest.get<ffi::AnyBuffer>(0);
  const bool integers = out.mode == QuantizeMode::kIntegerZeros;
  WONLY_RETURN_IF_ERROR(check_type("shift", shift, integers ? ffi::DataType::U8 : scales.element_type()));
  return check_operand("shift", shift, batch, false, {out.groups, n}, true, out.shift);
}

inline ffi::Error check_dequantize(const ffi::AnyBuffer& qw, const ffi::AnyBuffer& scales,
                                   const ffi::RemainingArgs& rest, const ffi::AnyBuffer& w, int64_t bits,
                                   int64_t shift_mode, DequantizeOperands& out) {
  WONLY_RETURN_IF_ERROR(check_rank3("the result", w));
  const int64_t k = w.dimensions()[1], n = w.dimensions()[2];
  out.batch = w.dimensions()[0];
  WONLY_RETURN_IF_ERROR(check_operand("the result", w, out.batch, false, {k, n}, false, out.w));
  WONLY_RETURN_IF_ERROR(check_inputs("the result", k));
  return check_weights(qw, scales, rest, bits, shift_mode, false, out.batch, k, n, out.weights);
}

}  // namespace wonly
