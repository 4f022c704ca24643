// The Python module `_cuda`: the CUDA handlers of the custom calls in abi.h. A handler checks its operands, fills a
// plain struct and launches; it never allocates, synchronises or initialises anything, so XLA may capture it into a
// CUDA graph.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "calls.h"
#include "cuda/conv.h"
#include "cuda/device.h"
#include "cuda/direct_conv.h"
#include "cuda/matmul.h"
#include "cuda/matmul_transposed.h"
#include "cuda/quantize.h"
#include "cuda/quantize_activation.h"
#include "cuda/quantized_matmul.h"
#include "cuda/ragged.h"
#include "cuda/scales_gradient.h"
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
  if constexpr (std::is_same_v<Args, MatmulArgs>) args.parameter_row = weights.n;
}

// The activations, the result, and what happens to it, of a product's operands; sizes are the caller's.
template <typename Operands>
void set_operands(MatmulArgs& args, const Operands& operands, bool has_bias) {
  set_weights(args, operands.weights);
  args.x = operands.x.data;
  args.bias = operands.bias.data;
  args.y = operands.y.data;
  args.x_dtype = operands.x.type;
  args.bias_dtype = operands.bias.type;
  args.y_dtype = operands.y.type;
  args.has_bias = has_bias;
  args.activation = operands.activation;
}

ffi::Error launched(const char* what, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jax_wonly: ") + what +
                              " could not be launched: " + cudaGetErrorString(status));
}

// Of a product, if it has any.
ffi::Error set_scratch(MatmulArgs& args, ffi::RemainingRets scratch) {
  if (scratch.size() == 0) return ffi::Error::Success();
  auto room = *scratch.get<ffi::AnyBuffer>(0);
  WONLY_RETURN_IF_ERROR(check_type("scratch", *room, ffi::S32));
  args.scratch = room->untyped_data();
  args.scratch_bytes = static_cast<int64_t>(room->size_bytes());
  return ffi::Error::Success();
}

ffi::Error matmul(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer qw, ffi::AnyBuffer scales,
                  ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y, ffi::RemainingRets scratch, int64_t bits,
                  int64_t shift_mode, int64_t has_bias, int64_t activation) {
  MatmulOperands operands;
  WONLY_RETURN_IF_ERROR(check_matmul(x, qw, scales, rest, *y, bits, shift_mode, has_bias, activation, operands));
  const WeightOperands& weights = operands.weights;
  WONLY_RETURN_IF_ERROR(check_sizes(operands.batch, operands.m, weights.k, weights.n, weights.groups));
  if (y->element_count() == 0) return ffi::Error::Success();
  MatmulArgs args{};
  set_operands(args, operands, has_bias == 1);
  args.batch = operands.batch;
  args.x_batch_stride = operands.x.stride;
  args.bias_batch_stride = operands.bias.stride;
  args.m = operands.m;
  WONLY_RETURN_IF_ERROR(set_scratch(args, scratch));
  return launched("the product", launch_matmul(args, stream));
}

// What the kernels that look codes up take.
ffi::Error check_transposed_table(const MatmulArgs& args) {
  if (args.n % 8 == 0 || transposed_stream::supports(args)) return ffi::Error::Success();
  return invalid("dy has N = ", args.n, ", and the weights a table; accepted: multiples of 8");
}

// Both ragged products.
ffi::Error launch_ragged(cudaStream_t stream, const ffi::AnyBuffer& x, const ffi::AnyBuffer& qw,
                         const ffi::AnyBuffer& scales, const ffi::AnyBuffer& rows, const ffi::RemainingArgs& rest,
                         const ffi::AnyBuffer& y, const ffi::AnyBuffer& scratch, int64_t bits, int64_t shift_mode,
                         int64_t has_bias, int64_t activation, int64_t row_mode, bool transposed) {
  RaggedOperands operands;
  WONLY_RETURN_IF_ERROR(check_ragged(x, qw, scales, rows, rest, y, scratch, bits, shift_mode, has_bias, activation,
                                     row_mode, transposed, operands));
  WONLY_RETURN_IF_ERROR(check_ragged_scratch(operands));
  const WeightOperands& weights = operands.weights;
  WONLY_RETURN_IF_ERROR(check_sizes(operands.experts, operands.m, weights.k, weights.n, weights.groups));
  if (y.element_count() == 0) return ffi::Error::Success();
  RaggedArgs args{};
  set_operands(args.product, operands, has_bias == 1);
  if (transposed) WONLY_RETURN_IF_ERROR(check_transposed_table(args.product));
  args.product.bias_batch_stride = operands.bias.stride;
  args.rows = operands.rows;
  args.row_mode = operands.row_mode;
  args.experts = operands.experts;
  args.m = operands.m;
  args.repeat = operands.repeat;
  args.scratch = operands.scratch;
  args.scratch_words = operands.scratch_words;
  return launched("the ragged product",
                  transposed ? launch_ragged_matmul_transposed(args, stream) : launch_ragged_matmul(args, stream));
}

ffi::Error ragged_matmul(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer qw, ffi::AnyBuffer scales,
                         ffi::AnyBuffer rows, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
                         ffi::Result<ffi::AnyBuffer> scratch, int64_t bits, int64_t shift_mode, int64_t has_bias,
                         int64_t activation, int64_t row_mode) {
  return launch_ragged(stream, x, qw, scales, rows, rest, *y, *scratch, bits, shift_mode, has_bias, activation,
                       row_mode, false);
}

ffi::Error ragged_matmul_transposed(cudaStream_t stream, ffi::AnyBuffer dy, ffi::AnyBuffer qw, ffi::AnyBuffer scales,
                                    ffi::AnyBuffer rows, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> dx,
                                    ffi::Result<ffi::AnyBuffer> scratch, int64_t bits, int64_t shift_mode,
                                    int64_t row_mode) {
  return launch_ragged(stream, dy, qw, scales, rows, rest, *dx, *scratch, bits, shift_mode, 0, 0, row_mode, true);
}

ffi::Error matmul_transposed(cudaStream_t stream, ffi::AnyBuffer dy, ffi::AnyBuffer qw, ffi::AnyBuffer scales,
                             ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> dx, ffi::RemainingRets scratch,
                             int64_t bits, int64_t shift_mode) {
  MatmulOperands operands;
  WONLY_RETURN_IF_ERROR(check_matmul_transposed(dy, qw, scales, rest, *dx, bits, shift_mode, operands));
  const WeightOperands& weights = operands.weights;
  WONLY_RETURN_IF_ERROR(check_sizes(operands.batch, operands.m, weights.k, weights.n, weights.groups));
  if (dx->element_count() == 0) return ffi::Error::Success();
  MatmulArgs args{};
  set_operands(args, operands, false);
  WONLY_RETURN_IF_ERROR(check_transposed_table(args));
  args.batch = operands.batch;
  args.x_batch_stride = operands.x.stride;
  args.m = operands.m;
  WONLY_RETURN_IF_ERROR(set_scratch(args, scratch));
  return launched("the transposed product", launch_matmul_transposed(args, stream));
}

ffi::Error scales_gradient(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer qw, ffi::AnyBuffer dy,
                           ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y, int64_t bits, int64_t block,
                           int64_t has_table) {
  for (const auto& [name, buffer] : {std::pair{"x", &x}, {"dy", &dy}})
    WONLY_RETURN_IF_ERROR(check_rank3(name, *buffer));
  WONLY_RETURN_IF_ERROR(check_rank3("the result", *y));
  ScalesGradientArgs args{};
  args.batch = y->dimensions()[0];
  args.m = x.dimensions()[1];
  args.k = x.dimensions()[2];
  args.n = dy.dimensions()[2];
  WONLY_RETURN_IF_ERROR(check_choice("has_table", has_table, 1));
  const size_t tables = static_cast<size_t>(has_table);
  if (rest.size() != tables && rest.size() != tables + 1) {
    return invalid(rest.size(), " optional operands; accepted: ", has_table == 1 ? "a table" : "none", ", and limits");
  }
  const bool ragged = rest.size() > tables;
  Operand of_x, of_dy;
  WONLY_RETURN_IF_ERROR(check_operand("x", x, ragged ? 1 : args.batch, true, {args.m, args.k}, false, of_x));
  WONLY_RETURN_IF_ERROR(check_operand("dy", dy, ragged ? 1 : args.batch, true, {args.m, args.n}, false, of_dy));
  WONLY_RETURN_IF_ERROR(check_type("dy", dy, x.element_type()));
  WONLY_RETURN_IF_ERROR(check_inputs("x", args.k));
  WONLY_RETURN_IF_ERROR(check_bits(bits));
  args.bits = static_cast<int>(bits);
  if (block != 32 && block != 64 && block != 128) return invalid("block = ", block, "; accepted: 32, 64, 128");
  args.block = static_cast<int>(block);
  WONLY_RETURN_IF_ERROR(check_type("qw", qw, ffi::DataType::U32));
  WONLY_RETURN_IF_ERROR(check_shape("qw", qw, args.batch, true,
                                    {ceil_div(args.n, kTileN), ceil_div(args.k, tile_k(args.bits)), kTileWords}));
  WONLY_RETURN_IF_ERROR(check_type("the result", *y, ffi::DataType::F32));
  WONLY_RETURN_IF_ERROR(check_shape("the result", *y, args.batch, false, {ceil_div(args.k, block), args.n}));
  WONLY_RETURN_IF_ERROR(check_sizes(args.batch, args.m, args.k, args.n, 1));
  if (has_table == 1) {
    const ffi::AnyBuffer table = *rest.get<ffi::AnyBuffer>(0);
    WONLY_RETURN_IF_ERROR(check_type("table", table, ffi::DataType::F32));
    WONLY_RETURN_IF_ERROR(check_shape("table", table, 1, false, {1, kTableEntries}));
    args.table = static_cast<const float*>(table.untyped_data());
  }
  if (ragged) {
    const ffi::AnyBuffer limits = *rest.get<ffi::AnyBuffer>(tables);
    WONLY_RETURN_IF_ERROR(check_type("limits", limits, ffi::DataType::S32));
    WONLY_RETURN_IF_ERROR(check_shape("limits", limits, args.batch + 1, false, {}));
    args.limits = static_cast<const int32_t*>(limits.untyped_data());
  }
  if (y->element_count() == 0) return ffi::Error::Success();
  args.x = of_x.data;
  args.dy = of_dy.data;
  args.qw = static_cast<const uint32_t*>(qw.untyped_data());
  args.y = static_cast<float*>(y->untyped_data());
  args.x_batch_stride = of_x.stride;
  args.dy_batch_stride = of_dy.stride;
  args.qw_batch_stride = batch_stride(qw);
  args.x_dtype = of_x.type;
  if (args.m == 0) return launched("the gradient", cudaMemsetAsync(args.y, 0, y->size_bytes(), stream));
  const cudaError_t status = launch_scales_gradient(args, stream);
  if (status == cudaErrorNotSupported) {
    return invalid(
        "there is no CUDA kernel for the gradient of these scales; accepted: F16 or BF16, K and N multiples "
        "of 8, architecture 9.0");
  }
  return launched("the gradient of the scales", status);
}

ffi::Error convolution(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer qw, ffi::AnyBuffer scales,
                       ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> scratch,
                       int64_t bits, int64_t shift_mode, int64_t has_bias, int64_t activation,
                       ffi::Span<const int64_t> window) {
  ConvOperands operands;
  WONLY_RETURN_IF_ERROR(check_conv(x, qw, scales, rest, *y, bits, shift_mode, has_bias, activation, window, operands));
  WONLY_RETURN_IF_ERROR(check_type("scratch", *scratch, ffi::S32));
  const WeightOperands& weights = operands.weights;
  if (y->element_count() == 0) return ffi::Error::Success();
  const ConvGeometry& geometry = operands.geometry;
  const int64_t images = geometry.images, pixels = images * geometry.height.result * geometry.width.result;
  WONLY_RETURN_IF_ERROR(check_sizes(images, pixels, weights.k, weights.n, weights.groups));
  WONLY_RETURN_IF_ERROR(check_sizes(1, images * geometry.height.size * geometry.width.size, 1, 1, 1));
  ConvArgs args{};
  MatmulArgs& product = args.product;
  set_operands(product, operands, has_bias == 1);
  product.scratch = scratch->untyped_data();
  product.scratch_bytes = static_cast<int64_t>(scratch->size_bytes());
  product.batch = 1;
  product.m = pixels;
  args.geometry = geometry;
  if (!conv::supports(args)) return invalid("there is no CUDA kernel for this convolution");
  return launched("the convolution", launch_conv(args, stream));
}

ffi::Error direct_convolution(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer qw, ffi::AnyBuffer scales,
                              ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y, int64_t bits, int64_t shift_mode,
                              int64_t has_bias, int64_t activation, int64_t groups, ffi::Span<const int64_t> window) {
  DirectConvOperands operands;
  WONLY_RETURN_IF_ERROR(
      check_direct_conv(x, qw, scales, rest, *y, bits, shift_mode, has_bias, activation, groups, window, operands));
  if (y->element_count() == 0) return ffi::Error::Success();
  const WeightOperands& weights = operands.weights;
  const DirectConvGeometry& geometry = operands.geometry;
  const int64_t pixels = static_cast<int64_t>(y->element_count()) / weights.n;
  const int64_t features = weights.k * geometry.groups;
  WONLY_RETURN_IF_ERROR(check_sizes(geometry.images, pixels, weights.k, weights.n, weights.groups));
  WONLY_RETURN_IF_ERROR(check_sizes(1, static_cast<int64_t>(x.element_count()) / features, 1, 1, 1));
  DirectConvArgs args{};
  set_operands(args.product, operands, has_bias == 1);
  args.product.batch = 1;
  args.product.m = pixels;
  args.geometry = geometry;
  const cudaError_t status = launch_direct_conv(args, stream);
  if (status == cudaErrorNotSupported) return invalid("there is no CUDA kernel for this convolution in groups");
  return launched("the convolution in groups", status);
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

// Codes of activations: int8, or e4m3 where `float8` comes back true.
ffi::Error check_codes(const char* name, const ffi::AnyBuffer& codes, bool& float8) {
  float8 = codes.element_type() == ffi::DataType::F8E4M3FN;
  return float8 ? ffi::Error::Success() : check_type(name, codes, ffi::DataType::S8);
}

ffi::Error quantize_activation(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> codes,
                               ffi::Result<ffi::AnyBuffer> scales, ffi::Result<ffi::AnyBuffer> sums,
                               ffi::RemainingRets rest) {
  WONLY_RETURN_IF_ERROR(check_rank("x", x, 2));
  const int64_t m = x.dimensions()[0], k = x.dimensions()[1];
  Operand in;
  WONLY_RETURN_IF_ERROR(check_operand("x", x, m, false, {k}, false, in));
  WONLY_RETURN_IF_ERROR(check_inputs("x", k));
  QuantizeActivationArgs args{};
  WONLY_RETURN_IF_ERROR(check_codes("codes", *codes, args.float8));
  WONLY_RETURN_IF_ERROR(check_shape("codes", *codes, m, false, {ceil_div(k, 16) * 16}));
  WONLY_RETURN_IF_ERROR(check_rank("scales", *scales, 2));
  args.groups = scales->dimensions()[1];
  if (args.groups < 1 || k % args.groups != 0) {
    return invalid("scales has ", args.groups, " groups, which do not divide K = ", k);
  }
  WONLY_RETURN_IF_ERROR(check_sizes(1, m, k, 1, args.groups));
  WONLY_RETURN_IF_ERROR(check_type("scales", *scales, ffi::DataType::F32));
  WONLY_RETURN_IF_ERROR(check_shape("scales", *scales, m, false, {args.groups}));
  WONLY_RETURN_IF_ERROR(check_type("sums", *sums, args.float8 ? ffi::DataType::F32 : ffi::DataType::S32));
  WONLY_RETURN_IF_ERROR(check_shape("sums", *sums, m, false, {args.groups}));
  if (rest.size() > (args.float8 ? 0 : 1)) return invalid(3 + rest.size(), " results; accepted: 3, or 4 of int8 codes");
  if (rest.size() == 1) {
    const ffi::AnyBuffer offsets = **rest.get<ffi::AnyBuffer>(0);
    WONLY_RETURN_IF_ERROR(check_type("offsets", offsets, ffi::DataType::F32));
    WONLY_RETURN_IF_ERROR(check_shape("offsets", offsets, m, false, {args.groups}));
    args.offsets = static_cast<float*>(offsets.untyped_data());
  }
  if (m == 0) return ffi::Error::Success();
  args.x = in.data;
  args.codes = codes->untyped_data();
  args.scales = static_cast<float*>(scales->untyped_data());
  args.sums = sums->untyped_data();
  args.m = m;
  args.k = k;
  args.x_dtype = in.type;
  return launched("quantize_activation", launch_quantize_activation(args, stream));
}

ffi::Error quantized_matmul(cudaStream_t stream, ffi::AnyBuffer codes, ffi::AnyBuffer x_scales, ffi::AnyBuffer qw,
                            ffi::AnyBuffer scales, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y, int64_t k,
                            int64_t bits, int64_t shift_mode, int64_t has_bias, int64_t activation, int64_t has_sums,
                            int64_t has_offsets) {
  WONLY_RETURN_IF_ERROR(check_rank3("the result", *y));
  const int64_t batch = y->dimensions()[0], m = y->dimensions()[1], n = y->dimensions()[2];
  QuantizedMatmulArgs all{};
  MatmulArgs& args = all.product;
  WONLY_RETURN_IF_ERROR(check_codes("codes", codes, all.float8));
  if (k < 1) return invalid("k = ", k, "; accepted: at least 1");
  all.k_stride = ceil_div(k, 16) * 16;
  WONLY_RETURN_IF_ERROR(check_shape("codes", codes, batch, true, {m, all.k_stride}));
  WONLY_RETURN_IF_ERROR(check_rank3("x_scales", x_scales));
  all.x_groups = x_scales.dimensions()[2];
  const auto check_x = [&](const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t groups) {
    WONLY_RETURN_IF_ERROR(check_type(name, buffer, type));
    WONLY_RETURN_IF_ERROR(check_shape(name, buffer, batch, true, {m, groups}));
    if (buffer.dimensions()[0] == codes.dimensions()[0]) return ffi::Error::Success();
    return invalid(name, " has ", buffer.dimensions()[0], " entries, and the codes ", codes.dimensions()[0]);
  };
  WONLY_RETURN_IF_ERROR(check_x("x_scales", x_scales, ffi::DataType::F32, all.x_groups));
  if (all.x_groups < 1 || k % all.x_groups != 0) {
    return invalid("x_scales has ", all.x_groups, " groups, which do not divide K = ", k);
  }
  WONLY_RETURN_IF_ERROR(check_choice("has_bias", has_bias, 1));
  WONLY_RETURN_IF_ERROR(check_choice("has_sums", has_sums, 1));
  WONLY_RETURN_IF_ERROR(check_choice("has_offsets", has_offsets, 1));
  WONLY_RETURN_IF_ERROR(check_choice("activation", activation, static_cast<int64_t>(Activation::kSilu)));
  WONLY_RETURN_IF_ERROR(check_choice("shift_mode", shift_mode, static_cast<int64_t>(ShiftMode::kOffsets)));
  // Those of x, then those of the weights.
  const size_t of_x = has_sums + has_offsets, has_shift = static_cast<ShiftMode>(shift_mode) != ShiftMode::kNone;
  if (rest.size() != of_x + has_shift + has_bias) {
    return invalid(rest.size(), " optional operands; the attributes call for ", of_x + has_shift + has_bias);
  }
  WeightOperands weights;
  WONLY_RETURN_IF_ERROR(check_bits(bits));
  weights.bits = static_cast<int>(bits);
  weights.shift_mode = static_cast<ShiftMode>(shift_mode);
  weights.k = k;
  weights.n = n;
  WONLY_RETURN_IF_ERROR(check_type("qw", qw, ffi::DataType::U32));
  WONLY_RETURN_IF_ERROR(
      check_shape("qw", qw, batch, true, {ceil_div(n, kTileN), ceil_div(k, tile_k(weights.bits)), kTileWords}));
  weights.qw = static_cast<const uint32_t*>(qw.untyped_data());
  weights.qw_stride = batch_stride(qw);
  WONLY_RETURN_IF_ERROR(check_rank3("scales", scales));
  weights.groups = scales.dimensions()[1];
  if (weights.groups < 1 || k % weights.groups != 0) {
    return invalid("scales has ", weights.groups, " groups, which do not divide K = ", k);
  }
  WONLY_RETURN_IF_ERROR(check_operand("scales", scales, batch, true, {weights.groups, n}, false, weights.scales));
  if (has_shift) {
    WONLY_RETURN_IF_ERROR(check_operand("shift", *rest.get<ffi::AnyBuffer>(of_x), batch, true, {weights.groups, n},
                                        weights.shift_mode == ShiftMode::kZeros, weights.shift));
  }
  WONLY_RETURN_IF_ERROR(check_sizes(batch, m, k, n, weights.groups));
  WONLY_RETURN_IF_ERROR(check_sizes(batch, m, k, n, all.x_groups));
  set_weights(args, weights);
  size_t next = 0;
  if (has_sums == 1) {
    const ffi::AnyBuffer sums = *rest.get<ffi::AnyBuffer>(next++);
    WONLY_RETURN_IF_ERROR(check_x("x_sums", sums, all.float8 ? ffi::DataType::F32 : ffi::DataType::S32,
                                  std::max(all.x_groups, weights.groups)));
    all.x_sums = sums.untyped_data();
    all.x_sums_batch_stride = batch_stride(sums);
  }
  if (has_offsets == 1) {
    const ffi::AnyBuffer offsets = *rest.get<ffi::AnyBuffer>(next++);
    WONLY_RETURN_IF_ERROR(check_x("x_offsets", offsets, ffi::DataType::F32, all.x_groups));
    all.x_offsets = static_cast<const float*>(offsets.untyped_data());
  }
  Operand bias, out;
  if (has_bias == 1) {
    WONLY_RETURN_IF_ERROR(
        check_operand("bias", *rest.get<ffi::AnyBuffer>(rest.size() - 1), batch, true, {n}, false, bias));
  }
  WONLY_RETURN_IF_ERROR(check_operand("the result", *y, batch, false, {m, n}, false, out));
  if (quantized::needs_sums(args) && has_sums == 0) return invalid("these weights need x_sums; there are none");
  if (y->element_count() == 0) return ffi::Error::Success();
  args.x = codes.untyped_data();
  args.bias = bias.data;
  args.y = out.data;
  args.batch = batch;
  args.x_batch_stride = batch_stride(codes);
  args.bias_batch_stride = bias.stride;
  args.m = m;
  args.bias_dtype = bias.type;
  args.y_dtype = out.type;
  args.has_bias = has_bias == 1;
  args.activation = static_cast<Activation>(activation);
  all.x_scales = static_cast<const float*>(x_scales.untyped_data());
  all.x_scales_batch_stride = batch_stride(x_scales);
  if (!quantized::supports(all)) {
    return invalid("activations of ", all.x_groups, " groups and weights of ", bits, " bits and ", weights.groups,
                   " groups for K = ", k, "; accepted: 1, or groups of 128 or 256 inputs, and 4 bits for float8");
  }
  return launched("the quantized product", launch_quantized_matmul(all, stream));
}

ffi::Error static_matmul(cudaStream_t stream, ffi::AnyBuffer codes, ffi::AnyBuffer qw, ffi::AnyBuffer multiplier,
                         ffi::AnyBuffer fused, ffi::Result<ffi::AnyBuffer> y, int64_t k, int64_t bits, int64_t zero,
                         int64_t low, int64_t high) {
  WONLY_RETURN_IF_ERROR(check_rank("the result", *y, 2));
  const int64_t m = y->dimensions()[0], n = y->dimensions()[1];
  if (k < 1) return invalid("k = ", k, "; accepted: at least 1");
  WONLY_RETURN_IF_ERROR(check_bits(bits));
  QuantizedMatmulArgs all{};
  MatmulArgs& args = all.product;
  all.k_stride = ceil_div(k, 16) * 16;
  WONLY_RETURN_IF_ERROR(check_type("codes", codes, ffi::DataType::S8));
  WONLY_RETURN_IF_ERROR(check_shape("codes", codes, m, false, {all.k_stride}));
  WONLY_RETURN_IF_ERROR(check_type("qw", qw, ffi::DataType::U32));
  WONLY_RETURN_IF_ERROR(
      check_shape("qw", qw, ceil_div(n, kTileN), false, {ceil_div(k, tile_k(static_cast<int>(bits))), kTileWords}));
  WONLY_RETURN_IF_ERROR(check_type("multiplier", multiplier, ffi::DataType::F32));
  WONLY_RETURN_IF_ERROR(check_shape("multiplier", multiplier, n, false, {}));
  WONLY_RETURN_IF_ERROR(check_type("fused", fused, ffi::DataType::S32));
  WONLY_RETURN_IF_ERROR(check_shape("fused", fused, n, false, {}));
  WONLY_RETURN_IF_ERROR(check_type("the result", *y, ffi::DataType::S8));
  for (const int64_t value : {zero, low, high}) {
    if (value < -128 || value > 127) return invalid("zero, low or high = ", value, "; accepted: -128 to 127");
  }
  WONLY_RETURN_IF_ERROR(check_sizes(1, m, k, n, 1));
  if (y->element_count() == 0) return ffi::Error::Success();
  args.x = codes.untyped_data();
  args.qw = static_cast<const uint32_t*>(qw.untyped_data());
  args.scales = multiplier.untyped_data();
  args.y = y->untyped_data();
  args.batch = args.groups = all.x_groups = 1;
  args.m = m;
  args.k = k;
  args.n = args.parameter_row = n;
  args.bits = static_cast<int>(bits);
  args.scale_dtype = args.y_dtype = DType::kF32;
  all.fused = static_cast<const int32_t*>(fused.untyped_data());
  all.zero = static_cast<int>(zero);
  all.low = static_cast<int>(low);
  all.high = static_cast<int>(high);
  if (!quantized::supports(all)) return invalid("k = ", k, "; accepted: up to 65536");
  return launched("the static product", launch_quantized_matmul(all, stream));
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
XLA_FFI_DEFINE_HANDLER(kRaggedMatmulTransposed, ragged_matmul_transposed, bind_ragged_matmul_transposed<Stream>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kConv, convolution, bind_conv<Stream>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kDirectConv, direct_convolution, bind_direct_conv<Stream>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMatmulTransposed, matmul_transposed, bind_matmul_transposed<Stream>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kScalesGradient, scales_gradient,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // qw
                           .Arg<ffi::AnyBuffer>()  // dy
                           .RemainingArgs()        // table, limits
                           .Ret<ffi::AnyBuffer>()  // y
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("block")
                           .Attr<int64_t>("has_table"),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kQuantize, quantize, bind_quantize<Stream>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kDequantize, dequantize, bind_dequantize<Stream>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kQuantizeActivation, quantize_activation,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Ret<ffi::AnyBuffer>()  // codes
                           .Ret<ffi::AnyBuffer>()  // scales
                           .Ret<ffi::AnyBuffer>()  // sums
                           .RemainingRets(),       // offsets
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kQuantizedMatmul, quantized_matmul,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Arg<ffi::AnyBuffer>()  // codes
                           .Arg<ffi::AnyBuffer>()  // x_scales
                           .Arg<ffi::AnyBuffer>()  // qw
                           .Arg<ffi::AnyBuffer>()  // scales
                           .RemainingArgs()        // x_sums, x_offsets, shift, bias
                           .Ret<ffi::AnyBuffer>()  // y
                           .Attr<int64_t>("k")
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("shift_mode")
                           .Attr<int64_t>("has_bias")
                           .Attr<int64_t>("activation")
                           .Attr<int64_t>("has_sums")
                           .Attr<int64_t>("has_offsets"),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kStaticMatmul, static_matmul,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Arg<ffi::AnyBuffer>()  // codes
                           .Arg<ffi::AnyBuffer>()  // qw
                           .Arg<ffi::AnyBuffer>()  // multiplier
                           .Arg<ffi::AnyBuffer>()  // fused
                           .Ret<ffi::AnyBuffer>()  // y
                           .Attr<int64_t>("k")
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("zero")
                           .Attr<int64_t>("low")
                           .Attr<int64_t>("high"),
                       {ffi::Traits::kCmdBufferCompatible});
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
  targets["wonly_conv_v1"] = capsule(kConv);
  targets["wonly_direct_conv_v1"] = capsule(kDirectConv);
  targets["wonly_matmul_transposed_v1"] = capsule(kMatmulTransposed);
  targets["wonly_ragged_matmul_transposed_v1"] = capsule(kRaggedMatmulTransposed);
  targets["wonly_scales_gradient_v1"] = capsule(kScalesGradient);
  targets["wonly_quantize_v1"] = capsule(kQuantize);
  targets["wonly_dequantize_v1"] = capsule(kDequantize);
  targets["wonly_quantize_activation_v1"] = capsule(kQuantizeActivation);
  targets["wonly_quantized_matmul_v1"] = capsule(kQuantizedMatmul);
  targets["wonly_static_matmul_v1"] = capsule(kStaticMatmul);
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
  m.def(
      "quick", [] { return WONLY_CUDA_QUICK != 0; },
      "Whether the kernels were compiled without most optimizations: right but slow, for development.");
  m.def(
      "dispatch", [] { return wonly::kNewestArchitecture; },
      "Newest architecture whose kernels are taken, as 80 for 8.0: of every GPU, unless the build says otherwise.");
}
