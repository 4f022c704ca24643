// The Python module `_cuda`: the CUDA handlers of the custom calls in abi.h. A handler checks its operands, fills a
// plain struct and launches; it never allocates, synchronises or initialises anything, so XLA may capture it into a
// CUDA graph.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "calls.h"
#include "cuda/matmul.h"
#include "cuda/matmul_transposed.h"
#include "cuda/quantize.h"
#include "cuda/ragged.h"
#include "dequant/selftest.h"

namespace nb = nanobind;

namespace wonly {
namespace {

// Sizes that the kernels rely on: what they count in 32 bits fits, and groups are whole pieces of their walk.
ffi::Error check_sizes(int64_t batch, int64_t m, int64_t k, int64_t n, int64_t groups) {
  const char* const names[] = {"the batch size", "M", "K", "N"};
  const int64_t sizes[] = {batch, m, k, n};
  for (int i = 0; i < 4; ++i) {
    if (sizes[i] > std::numeric_limits<int32_t>::max()) {
      return invalid(names[i], " = ", sizes[i], "; accepted: less than 2^31");
    }
  }
  const int64_t group_size = k / groups;
  if (groups == 1 || group_size == 32 || group_size == 64 || group_size == 128 || group_size == 256) {
    return ffi::Error::Success();
  }
  return invalid("scales has ", groups, " groups for K = ", k, "; accepted: 1, or groups of 32, 64, 128 or 256 inputs");
}

// The weight's fields of MatmulArgs or DequantizeArgs.
template <typename Args>
void set_weights(Args& args, const WeightOperands& weights) {
  args.qw = weights.qw;
  args.scales = weights.scales.data;
  args.shift = weights.shift.data;
  args.qw_batch_stride = weights.qw_stride;
  args.scales_batch_stride = weights.scales.stride;
  args.shift_batch_stride = weights.shift.stride;
  args.k = weights.k;
  args.n = weights.n;
  args.groups = weights.groups;
  args.bits = weights.bits;
  args.scale_dtype = weights.scales.type;
  args.shift_dtype = weights.shift.type;
  args.shift_mode = weights.shift_mode;
}

ffi::Error launched(const char* what, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jax_wonly: ") + what +
                              " could not be launched: " + cudaGetErrorString(status));
}

ffi::Error matmul(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer qw, ffi::AnyBuffer scales,
                  ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y, ffi::RemainingRets scratch, int64_t bits,
                  int64_t shift_mode, int64_t has_bias, int64_t activation) {
  MatmulOperands operands;
  WONLY_RETURN_IF_ERROR(check_matmul(x, qw, scales, rest, *y, bits, shift_mode, has_bias, activation, operands));
  const WeightOperands& weights = operands.weights;
  WONLY_RETURN_IF_ERROR(check_sizes(operands.batch, operands.m, weights.k, weights.n, weights.groups));
  if (weights.shift_mode == ShiftMode::kTable && operands.x.type == DType::kF32) {
    return invalid("x has element type F32, and the weights a table; accepted: F16, BF16");
  }
  if (y->element_count() == 0) return ffi::Error::Success();
  MatmulArgs args{};
  set_weights(args, weights);
  args.x = operands.x.data;
  args.bias = operands.bias.data;
  args.y = operands.y.data;
  args.batch = operands.batch;
  args.x_batch_stride = operands.x.stride;
  args.bias_batch_stride = operands.bias.stride;
  args.m = operands.m;
  args.x_dtype = operands.x.type;
  args.bias_dtype = operands.bias.type;
  args.y_dtype = operands.y.type;
  args.has_bias = has_bias == 1;
  args.activation = operands.activation;
  if (scratch.size() > 0) {
    auto room = *scratch.get<ffi::AnyBuffer>(0);
    WONLY_RETURN_IF_ERROR(check_type("scratch", *room, ffi::S32));
    args.scratch = room->untyped_data();
    args.scratch_bytes = static_cast<int64_t>(room->size_bytes());
  }
  return launched("the product", launch_matmul(args, stream));
}

ffi::Error ragged_matmul(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer qw, ffi::AnyBuffer scales,
                         ffi::AnyBuffer rows, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
                         ffi::Result<ffi::AnyBuffer> scratch, int64_t bits, int64_t shift_mode, int64_t has_bias,
                         int64_t activation, int64_t row_mode) {
  RaggedOperands operands;
  WONLY_RETURN_IF_ERROR(check_ragged(x, qw, scales, rows, rest, *y, *scratch, bits, shift_mode, has_bias, activation,
                                     row_mode, false, operands));
  WONLY_RETURN_IF_ERROR(check_ragged_scratch(operands));
  const WeightOperands& weights = operands.weights;
  WONLY_RETURN_IF_ERROR(check_sizes(operands.experts, operands.m, weights.k, weights.n, weights.groups));
  if (weights.shift_mode == ShiftMode::kTable) return invalid("the weights of a ragged product have a table");
  if (y->element_count() == 0) return ffi::Error::Success();
  RaggedArgs args{};
  MatmulArgs& product = args.product;
  set_weights(product, weights);
  product.x = operands.x.data;
  product.bias = operands.bias.data;
  product.y = operands.y.data;
  product.bias_batch_stride = operands.bias.stride;
  product.x_dtype = operands.x.type;
  product.bias_dtype = operands.bias.type;
  product.y_dtype = operands.y.type;
  product.has_bias = has_bias == 1;
  product.activation = operands.activation;
  args.rows = operands.rows;
  args.row_mode = operands.row_mode;
  args.experts = operands.experts;
  args.m = operands.m;
  args.repeat = operands.repeat;
  args.scratch = operands.scratch;
  args.scratch_words = operands.scratch_words;
  return launched("the ragged product", launch_ragged_matmul(args, stream));
}

ffi::Error matmul_transposed(cudaStream_t stream, ffi::AnyBuffer dy, ffi::AnyBuffer qw, ffi::AnyBuffer scales,
                             ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> dx, int64_t bits,
                             int64_t shift_mode) {
  MatmulOperands operands;
  WONLY_RETURN_IF_ERROR(check_matmul_transposed(dy, qw, scales, rest, *dx, bits, shift_mode, operands));
  const WeightOperands& weights = operands.weights;
  WONLY_RETURN_IF_ERROR(check_sizes(operands.batch, operands.m, weights.k, weights.n, weights.groups));
  if (weights.shift_mode == ShiftMode::kTable) return invalid("the weights of a transposed product have a table");
  if (dx->element_count() == 0) return ffi::Error::Success();
  MatmulArgs args{};
  set_weights(args, weights);
  args.x = operands.x.data;
  args.y = operands.y.data;
  args.batch = operands.batch;
  args.x_batch_stride = operands.x.stride;
  args.m = operands.m;
  args.x_dtype = operands.x.type;
  args.y_dtype = operands.y.type;
  return launched("the transposed product", launch_matmul_transposed(args, stream));
}

ffi::Error quantize(cudaStream_t stream, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> qw,
                    ffi::Result<ffi::AnyBuffer> scales, ffi::RemainingRets rest, int64_t bits, int64_t group_size,
                    int64_t quantize_mode) {
  QuantizeOperands operands;
  WONLY_RETURN_IF_ERROR(check_quantize(w, *qw, *scales, rest, bits, group_size, quantize_mode, operands));
  WONLY_RETURN_IF_ERROR(check_sizes(operands.batch, 1, operands.k, operands.n, operands.groups));
  if (w.element_count() == 0) return ffi::Error::Success();
  QuantizeArgs args{};
  args.w = operands.w.data;
  args.qw = operands.qw;
  args.scales = operands.scales.data;
  args.shift = operands.shift.data;
  args.batch = operands.batch;
  args.k = operands.k;
  args.n = operands.n;
  args.groups = operands.groups;
  args.bits = operands.bits;
  args.w_dtype = operands.w.type;
  args.scale_dtype = operands.scales.type;
  args.mode = operands.mode;
  return launched("quantize", launch_quantize(args, stream));
}

ffi::Error dequantize(cudaStream_t stream, ffi::AnyBuffer qw, ffi::AnyBuffer scales, ffi::RemainingArgs rest,
                      ffi::Result<ffi::AnyBuffer> w, int64_t bits, int64_t shift_mode) {
  DequantizeOperands operands;
  WONLY_RETURN_IF_ERROR(check_dequantize(qw, scales, rest, *w, bits, shift_mode, operands));
  const WeightOperands& weights = operands.weights;
  WONLY_RETURN_IF_ERROR(check_sizes(operands.batch, 1, weights.k, weights.n, weights.groups));
  if (w->element_count() == 0) return ffi::Error::Success();
  DequantizeArgs args{};
  set_weights(args, weights);
  args.w = operands.w.data;
  args.batch = operands.batch;
  args.w_dtype = operands.w.type;
  return launched("dequantize", launch_dequantize(args, stream));
}

ffi::Error selftest_conversions(cudaStream_t stream, ffi::AnyBuffer in, ffi::Result<ffi::AnyBuffer> out,
                                int64_t conversion) {
  WONLY_RETURN_IF_ERROR(check_choice("conversion", conversion, kSelftestConversions - 1));
  const int index = static_cast<int>(conversion);
  WONLY_RETURN_IF_ERROR(check_type("in", in, ffi::U32));
  WONLY_RETURN_IF_ERROR(check_type("out", *out, ffi::U32));
  const int64_t words = static_cast<int64_t>(in.element_count());
  WONLY_RETURN_IF_ERROR(check_shape("in", in, words, false, {}));
  WONLY_RETURN_IF_ERROR(check_sizes(words, 1, 1, 1, 1));
  WONLY_RETURN_IF_ERROR(check_shape("out", *out, words, false, {selftest_outputs(index)}));
  if (words == 0) return ffi::Error::Success();
  return launched("the conversions",
                  launch_conversion_selftest(index, static_cast<const uint32_t*>(in.untyped_data()),
                                             static_cast<uint32_t*>(out->untyped_data()), words, stream));
}

using Stream = ffi::PlatformStream<cudaStream_t>;

XLA_FFI_DEFINE_HANDLER(kMatmul, matmul, bind_matmul<Stream>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kRaggedMatmul, ragged_matmul, bind_ragged_matmul<Stream>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMatmulTransposed, matmul_transposed, bind_matmul_transposed<Stream>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kQuantize, quantize, bind_quantize<Stream>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kDequantize, dequantize, bind_dequantize<Stream>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kSelftestConversions_, selftest_conversions,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Arg<ffi::AnyBuffer>()  // words
                           .Ret<ffi::AnyBuffer>()  // converted
                           .Attr<int64_t>("conversion"),
                       {ffi::Traits::kCmdBufferCompatible});

nb::capsule capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

nb::dict registrations() {
  nb::dict targets;
  targets["wonly_matmul_v1"] = capsule(kMatmul);
  targets["wonly_ragged_matmul_v1"] = capsule(kRaggedMatmul);
  targets["wonly_matmul_transposed_v1"] = capsule(kMatmulTransposed);
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
