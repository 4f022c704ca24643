// The Python module `_cuda`: the CUDA handlers of the custom calls in abi.h. A handler checks its operands, fills a
// plain struct and launches; it never allocates, synchronises or initialises anything, so XLA may capture it into a
// CUDA graph.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "abi.h"
#include "cuda/matmul.h"
#include "cuda/quantize.h"
#include "dequant/selftest.h"
#include "layout.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;
namespace ffi = xla::ffi;

namespace wonly {
namespace {

template <typename... Parts>
ffi::Error invalid(const Parts&... parts) {
  std::ostringstream message;
  message << "jax_wonly: ";
  (message << ... << parts);
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, message.str());
}

#define WONLY_RETURN_IF_ERROR(expression) \
  if (ffi::Error error = (expression); error.failure()) return error

std::string shape_text(ffi::Span<const int64_t> dims) {
  std::ostringstream text;
  text << "[";
  for (size_t i = 0; i < dims.size(); ++i) text << (i ? ", " : "") << dims[i];
  text << "]";
  return text.str();
}

// `expected` holds one size per dimension; -1 stands for any.
ffi::Error check_shape(const char* name, const ffi::AnyBuffer& buffer, std::initializer_list<int64_t> expected) {
  const auto dims = buffer.dimensions();
  bool same = dims.size() == expected.size();
  size_t i = 0;
  for (int64_t size : expected) {
    same = same && (size == -1 || dims[i] == size);
    ++i;
  }
  if (same) return ffi::Error::Success();
  const std::vector<int64_t> sizes(expected);
  return invalid(name, " has shape ", shape_text(dims), ", expected ",
                 shape_text(ffi::Span<const int64_t>(sizes.data(), sizes.size())), " (-1: any)");
}

// The leading size of an operand is `batch`, or 1 when all of the batch shares it.
ffi::Error check_batch(const char* name, const ffi::AnyBuffer& buffer, int64_t batch) {
  const int64_t leading = buffer.dimensions()[0];
  if (leading == batch || leading == 1) return ffi::Error::Success();
  return invalid(name, " has leading size ", leading, ", expected ", batch, " or 1");
}

int64_t batch_stride(const ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  if (dims[0] == 1) return 0;
  int64_t stride = 1;
  for (size_t i = 1; i < dims.size(); ++i) stride *= dims[i];
  return stride;
}

ffi::Error check_type(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType expected) {
  if (buffer.element_type() == expected) return ffi::Error::Success();
  return invalid(name, " has element type ", buffer.element_type(), ", expected ", expected);
}

ffi::Error float_type(const char* name, const ffi::AnyBuffer& buffer, DType& type) {
  switch (buffer.element_type()) {
    case ffi::F16:
      type = DType::kF16;
      return ffi::Error::Success();
    case ffi::BF16:
      type = DType::kBF16;
      return ffi::Error::Success();
    case ffi::F32:
      type = DType::kF32;
      return ffi::Error::Success();
    default:
      return invalid(name, " has element type ", buffer.element_type(), ", expected F16, BF16 or F32");
  }
}

ffi::Error shift_type(const ffi::AnyBuffer& shift, ShiftMode mode, DType& type) {
  if (shift.element_type() != ffi::U8) return float_type("shift", shift, type);
  if (mode != ShiftMode::kZeros) return invalid("shift has element type U8, which only zeros may have");
  type = DType::kU8;
  return ffi::Error::Success();
}

ffi::Error check_bits(int64_t bits) {
  if (bits == 4 || bits == 8) return ffi::Error::Success();
  return invalid("bits is ", bits, ", expected 4 or 8");
}

ffi::Error check_shift_mode(int64_t mode) {
  if (mode >= 0 && mode <= static_cast<int64_t>(ShiftMode::kOffsets)) return ffi::Error::Success();
  return invalid("shift_mode is ", mode, ", expected 0, 1 or 2");
}

ffi::Error check_count(const char* what, size_t count, size_t expected) {
  if (count == expected) return ffi::Error::Success();
  return invalid("got ", count, " ", what, ", expected ", expected);
}

// Sizes that the kernels may rely on: what is counted in 32 bits inside a tile grid fits.
ffi::Error check_extent(const char* name, int64_t size) {
  if (size <= std::numeric_limits<int32_t>::max()) return ffi::Error::Success();
  return invalid(name, " is ", size, ", expected less than 2^31");
}

ffi::Error check_groups(int64_t k, int64_t groups) {
  if (groups >= 1 && k % groups == 0) {
    const int64_t size = k / groups;
    if (groups == 1 || size == 32 || size == 64 || size == 128 || size == 256) return ffi::Error::Success();
  }
  return invalid("scales have ", groups, " groups for ", k,
                 " inputs, expected 1, or groups of 32, 64, 128 or 256 inputs that divide them");
}

// What the three calls share: a packed weight with its scales and shift.
struct Weight {
  int64_t n, k, groups;
  DType scale_dtype;
  DType shift_dtype = DType::kF32;
};

ffi::Error check_weight(const ffi::AnyBuffer& qw, const ffi::AnyBuffer& scales,
                        const std::optional<ffi::AnyBuffer>& shift, int64_t batch, int64_t k, int64_t n, int64_t bits,
                        ShiftMode mode, Weight& weight) {
  WONLY_RETURN_IF_ERROR(check_bits(bits));
  WONLY_RETURN_IF_ERROR(check_extent("K", k));
  WONLY_RETURN_IF_ERROR(check_extent("N", n));
  WONLY_RETURN_IF_ERROR(check_extent("the batch size", batch));
  WONLY_RETURN_IF_ERROR(check_type("qw", qw, ffi::U32));
  WONLY_RETURN_IF_ERROR(
      check_shape("qw", qw, {-1, ceil_div(n, kTileN), ceil_div(k, tile_k(static_cast<int>(bits))), kTileWords}));
  WONLY_RETURN_IF_ERROR(check_batch("qw", qw, batch));
  WONLY_RETURN_IF_ERROR(check_shape("scales", scales, {-1, -1, n}));
  WONLY_RETURN_IF_ERROR(check_batch("scales", scales, batch));
  WONLY_RETURN_IF_ERROR(float_type("scales", scales, weight.scale_dtype));
  const int64_t groups = scales.dimensions()[1];
  WONLY_RETURN_IF_ERROR(check_groups(k, groups));
  if (shift) {
    WONLY_RETURN_IF_ERROR(check_shape("shift", *shift, {-1, groups, n}));
    WONLY_RETURN_IF_ERROR(check_batch("shift", *shift, batch));
    WONLY_RETURN_IF_ERROR(shift_type(*shift, mode, weight.shift_dtype));
  }
  weight.n = n;
  weight.k = k;
  weight.groups = groups;
  return ffi::Error::Success();
}

ffi::Error launched(const char* what, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jax_wonly: ") + what +
                              " could not be launched: " + cudaGetErrorString(status));
}

ffi::Error matmul(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer qw, ffi::AnyBuffer scales,
                  ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y, int64_t bits, int64_t shift_mode,
                  int64_t has_bias, int64_t activation) {
  WONLY_RETURN_IF_ERROR(check_shift_mode(shift_mode));
  if (has_bias != 0 && has_bias != 1) return invalid("has_bias is ", has_bias, ", expected 0 or 1");
  if (activation < 0 || activation > static_cast<int64_t>(Activation::kSilu)) {
    return invalid("activation is ", activation, ", expected 0 to ", static_cast<int64_t>(Activation::kSilu));
  }
  MatmulArgs args{};
  args.shift_mode = static_cast<ShiftMode>(shift_mode);
  args.has_bias = has_bias != 0;
  args.activation = static_cast<Activation>(activation);
  const bool has_shift = args.shift_mode != ShiftMode::kNone;
  WONLY_RETURN_IF_ERROR(check_count("operands", 3 + rest.size(), 3 + size_t{has_shift} + size_t{args.has_bias}));
  std::optional<ffi::AnyBuffer> shift;
  std::optional<ffi::AnyBuffer> bias;
  if (has_shift) shift = *rest.get<ffi::AnyBuffer>(0);
  if (args.has_bias) bias = *rest.get<ffi::AnyBuffer>(has_shift ? 1 : 0);

  WONLY_RETURN_IF_ERROR(check_shape("x", x, {-1, -1, -1}));
  WONLY_RETURN_IF_ERROR(check_shape("y", *y, {-1, x.dimensions()[1], -1}));
  args.batch = y->dimensions()[0];
  args.m = x.dimensions()[1];
  args.k = x.dimensions()[2];
  args.n = y->dimensions()[2];
  WONLY_RETURN_IF_ERROR(check_extent("M", args.m));
  WONLY_RETURN_IF_ERROR(check_batch("x", x, args.batch));
  WONLY_RETURN_IF_ERROR(float_type("x", x, args.x_dtype));
  WONLY_RETURN_IF_ERROR(float_type("y", *y, args.y_dtype));
  Weight weight;
  WONLY_RETURN_IF_ERROR(check_weight(qw, scales, shift, args.batch, args.k, args.n, bits, args.shift_mode, weight));
  args.bias_dtype = DType::kF32;
  if (bias) {
    WONLY_RETURN_IF_ERROR(check_shape("bias", *bias, {-1, args.n}));
    WONLY_RETURN_IF_ERROR(check_batch("bias", *bias, args.batch));
    WONLY_RETURN_IF_ERROR(float_type("bias", *bias, args.bias_dtype));
    args.bias = bias->untyped_data();
    args.bias_batch_stride = batch_stride(*bias);
  }
  args.x = x.untyped_data();
  args.qw = static_cast<const uint32_t*>(qw.untyped_data());
  args.scales = scales.untyped_data();
  args.shift = shift ? shift->untyped_data() : nullptr;
  args.y = y->untyped_data();
  args.x_batch_stride = batch_stride(x);
  args.qw_batch_stride = batch_stride(qw);
  args.scales_batch_stride = batch_stride(scales);
  args.shift_batch_stride = shift ? batch_stride(*shift) : 0;
  args.groups = weight.groups;
  args.bits = static_cast<int>(bits);
  args.scale_dtype = weight.scale_dtype;
  args.shift_dtype = weight.shift_dtype;
  if (y->element_count() == 0) return ffi::Error::Success();
  return launched("the product", launch_matmul(args, stream));
}

ffi::Error quantize(cudaStream_t stream, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> qw,
                    ffi::Result<ffi::AnyBuffer> scales, ffi::RemainingRets rest, int64_t bits, int64_t group_size,
                    int64_t quantize_mode) {
  if (quantize_mode < 0 || quantize_mode > static_cast<int64_t>(QuantizeMode::kOffsets)) {
    return invalid("quantize_mode is ", quantize_mode, ", expected 0 to ",
                   static_cast<int64_t>(QuantizeMode::kOffsets));
  }
  QuantizeArgs args{};
  args.mode = static_cast<QuantizeMode>(quantize_mode);
  const bool has_shift = args.mode != QuantizeMode::kSymmetric;
  WONLY_RETURN_IF_ERROR(check_count("results", 2 + rest.size(), 2 + size_t{has_shift}));
  std::optional<ffi::AnyBuffer> shift;
  if (has_shift) shift = **rest.get<ffi::AnyBuffer>(0);

  WONLY_RETURN_IF_ERROR(check_shape("w", w, {-1, -1, -1}));
  args.batch = w.dimensions()[0];
  args.k = w.dimensions()[1];
  args.n = w.dimensions()[2];
  WONLY_RETURN_IF_ERROR(float_type("w", w, args.w_dtype));
  Weight weight;
  WONLY_RETURN_IF_ERROR(check_weight(*qw, *scales, shift, args.batch, args.k, args.n, bits,
                                     args.mode == QuantizeMode::kOffsets ? ShiftMode::kOffsets : ShiftMode::kZeros,
                                     weight));
  // A result is written for every batch: none may be shared.
  WONLY_RETURN_IF_ERROR(check_shape("qw", *qw, {args.batch, -1, -1, -1}));
  WONLY_RETURN_IF_ERROR(check_shape("scales", *scales, {args.batch, -1, -1}));
  if (weight.groups * group_size != args.k) {
    return invalid("group_size is ", group_size, ", expected ", args.k, " inputs / ", weight.groups, " groups");
  }
  if (shift) {
    WONLY_RETURN_IF_ERROR(check_shape("shift", *shift, {args.batch, -1, -1}));
    WONLY_RETURN_IF_ERROR(
        check_type("shift", *shift, args.mode == QuantizeMode::kIntegerZeros ? ffi::U8 : scales->element_type()));
  }
  args.w = w.untyped_data();
  args.qw = static_cast<uint32_t*>(qw->untyped_data());
  args.scales = scales->untyped_data();
  args.shift = shift ? shift->untyped_data() : nullptr;
  args.groups = weight.groups;
  args.bits = static_cast<int>(bits);
  args.scale_dtype = weight.scale_dtype;
  if (w.element_count() == 0) return ffi::Error::Success();
  return launched("quantize", launch_quantize(args, stream));
}

ffi::Error dequantize(cudaStream_t stream, ffi::AnyBuffer qw, ffi::AnyBuffer scales, ffi::RemainingArgs rest,
                      ffi::Result<ffi::AnyBuffer> w, int64_t bits, int64_t shift_mode) {
  WONLY_RETURN_IF_ERROR(check_shift_mode(shift_mode));
  DequantizeArgs args{};
  args.shift_mode = static_cast<ShiftMode>(shift_mode);
  const bool has_shift = args.shift_mode != ShiftMode::kNone;
  WONLY_RETURN_IF_ERROR(check_count("operands", 2 + rest.size(), 2 + size_t{has_shift}));
  std::optional<ffi::AnyBuffer> shift;
  if (has_shift) shift = *rest.get<ffi::AnyBuffer>(0);

  WONLY_RETURN_IF_ERROR(check_shape("w", *w, {-1, -1, -1}));
  args.batch = w->dimensions()[0];
  args.k = w->dimensions()[1];
  args.n = w->dimensions()[2];
  WONLY_RETURN_IF_ERROR(float_type("w", *w, args.w_dtype));
  Weight weight;
  WONLY_RETURN_IF_ERROR(check_weight(qw, scales, shift, args.batch, args.k, args.n, bits, args.shift_mode, weight));
  args.qw = static_cast<const uint32_t*>(qw.untyped_data());
  args.scales = scales.untyped_data();
  args.shift = shift ? shift->untyped_data() : nullptr;
  args.w = w->untyped_data();
  args.qw_batch_stride = batch_stride(qw);
  args.scales_batch_stride = batch_stride(scales);
  args.shift_batch_stride = shift ? batch_stride(*shift) : 0;
  args.groups = weight.groups;
  args.bits = static_cast<int>(bits);
  args.scale_dtype = weight.scale_dtype;
  args.shift_dtype = weight.shift_dtype;
  if (w->element_count() == 0) return ffi::Error::Success();
  return launched("dequantize", launch_dequantize(args, stream));
}

ffi::Error selftest_conversions(cudaStream_t stream, ffi::AnyBuffer in, ffi::Result<ffi::AnyBuffer> out,
                                int64_t conversion) {
  if (conversion < 0 || conversion >= kSelftestConversions) {
    return invalid("conversion is ", conversion, ", expected 0 to ", kSelftestConversions - 1);
  }
  const int index = static_cast<int>(conversion);
  WONLY_RETURN_IF_ERROR(check_type("in", in, ffi::U32));
  WONLY_RETURN_IF_ERROR(check_type("out", *out, ffi::U32));
  WONLY_RETURN_IF_ERROR(check_shape("in", in, {-1}));
  const int64_t words = in.dimensions()[0];
  WONLY_RETURN_IF_ERROR(check_extent("the number of words", words));
  WONLY_RETURN_IF_ERROR(check_shape("out", *out, {words, selftest_outputs(index)}));
  if (words == 0) return ffi::Error::Success();
  return launched("the conversions",
                  launch_conversion_selftest(index, static_cast<const uint32_t*>(in.untyped_data()),
                                             static_cast<uint32_t*>(out->untyped_data()), words, stream));
}

XLA_FFI_DEFINE_HANDLER(kMatmul, matmul,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // qw
                           .Arg<ffi::AnyBuffer>()  // scales
                           .RemainingArgs()        // shift, bias
                           .Ret<ffi::AnyBuffer>()  // y
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("shift_mode")
                           .Attr<int64_t>("has_bias")
                           .Attr<int64_t>("activation"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kQuantize, quantize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // w
                           .Ret<ffi::AnyBuffer>()  // qw
                           .Ret<ffi::AnyBuffer>()  // scales
                           .RemainingRets()        // shift
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("group_size")
                           .Attr<int64_t>("quantize_mode"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kDequantize, dequantize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // qw
                           .Arg<ffi::AnyBuffer>()  // scales
                           .RemainingArgs()        // shift
                           .Ret<ffi::AnyBuffer>()  // w
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("shift_mode"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kSelftestConversions_, selftest_conversions,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // words
                           .Ret<ffi::AnyBuffer>()  // converted
                           .Attr<int64_t>("conversion"),
                       {ffi::Traits::kCmdBufferCompatible});

nb::capsule capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

nb::dict registrations() {
  nb::dict targets;
  targets["wonly_matmul_v1"] = capsule(kMatmul);
  targets["wonly_quantize_v1"] = capsule(kQuantize);
  targets["wonly_dequantize_v1"] = capsule(kDequantize);
  targets["wonly_selftest_conversions_v1"] = capsule(kSelftestConversions_);
  return targets;
}

// WONLY_CUDA_ARCHITECTURES is CMake's list, joined with commas.
std::vector<std::string> architectures() {
  std::vector<std::string> list;
  std::istringstream text(WONLY_CUDA_ARCHITECTURES);
  for (std::string item; std::getline(text, item, ',');) list.push_back(item);
  return list;
}

}  // namespace
}  // namespace wonly

NB_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of jax_wonly, as XLA FFI handlers for the platform CUDA.";
  m.def("registrations", &wonly::registrations, "Custom-call targets and their handlers, as capsules.");
  m.def(
      "ffi_api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "(major, minor) of the XLA FFI API that the handlers were compiled against.");
  m.def("architectures", &wonly::architectures,
        "CUDA architectures that the kernels were compiled for, as '90a-real'.");
}
