// Attribute values of the custom calls, shared by the CPU and the CUDA handlers. jax_wonly/_abi.py is the Python twin.
//
// Custom calls (a name with its operands, attributes and results is a versioned interface: exported programs hold it):
//
//   wonly_matmul_v1(x[Bx, M, K], qw u32[Bw, Nt, Kt, 512], scales[Bs, G, N], (shift[Bz, G, N]), (bias[Bb, N]))
//       -> y[B, M, N], (scratch s32[S])
//     bits, shift_mode, has_bias, activation: int64 attributes. Every leading size is 1 or B. Scratch, of any size,
//     lets the kernels of CUDA that need some run.
//   wonly_quantize_v1(w[B, K, N]) -> qw u32[B, Nt, Kt, 512], scales[B, G, N], (shift[B, G, N])
//     bits, group_size, quantize_mode
//   wonly_dequantize_v1(qw, scales, (shift)) -> w[B, K, N]
//     bits, shift_mode
//   wonly_ragged_matmul_v1(x[Mx, K], qw u32[E, Nt, Kt, 512], scales[Es, G, N], rows s32,
//                          (shift[Ez, G, N]), (bias[Eb, N])) -> y[M, N], scratch s32[S]
//     bits, shift_mode, has_bias, activation, row_mode. Row r of y is row r * Mx / M of x, which divides M, times the
//     weight of the row's expert, and zero without one. Es, Ez and Eb are 1 or E.
//     row_mode kSizes: rows s32[E] counts the rows of each expert, which follow each other from row 0; Mx = M. What the
//       sizes add up to beyond M is cut off, and negative ones count as zero.
//     row_mode kIds: rows s32[M] names the expert of each row, in any order; none where it is not in 0 .. E - 1.
//     S is what the platform's kernels ask for: kRaggedScratch* below on CUDA, 0 on the CPU.
//   wonly_matmul_transposed_v1(dy[By, M, N], qw u32[Bw, Nt, Kt, 512], scales[Bs, G, N], (shift[Bz, G, N]))
//       -> dx[B, M, K]
//     bits, shift_mode. The product with the transposed weights.
//   wonly_ragged_matmul_transposed_v1(dy[My, N], qw, scales, rows s32, (shift)) -> dx[M, K], scratch s32[S]
//     bits, shift_mode, row_mode, as in wonly_ragged_matmul_v1.
//   wonly_scales_gradient_v1(x[Bx, M, K], qw u32[Bw, Nt, Kt, 512], dy[By, M, N], (table f32[1, 1, 16]),
//                            (limits s32[B + 1])) -> y f32[B, ceil(K / block), N]
//     CUDA alone, architecture 9.0. bits, has_table; block: 32, 64 or 128. y[b, i, n] is the sum over m of dy[b, m, n]
//     times the sum over the inputs k of block i of x[b, m, k] * (code[b, k, n] - 2^(bits - 1)), or, of four bits, what
//     the table has for the code. x and dy are of one 16-bit type, and K and N multiples of 8. Leading sizes are 1 or
//     B; with limits, which ascend and are none but 0 .. M, those of x and dy are 1, and entry b has the rows from
//     limits[b] to limits[b + 1] - 1.
//   wonly_quantize_activation_v1(x[M, K]) -> codes[M, Kp], scales f32[M, G], sums[M, G], (offsets f32[M, G])
//     CUDA alone. Codes are s8 with s32 sums, or f8e4m3fn with f32 sums and no offsets; Kp is K rounded up to 16, and
//     codes beyond K are zero. Of each 16 inputs, code 4t + 2 odd + pair is that of input 8 pair + 2t + odd.
//   wonly_quantized_matmul_v1(codes[Bx, M, Kp], x_scales f32[Bx, M, Gx], qw u32[Bw, Nt, Kt, 512], scales[Bs, G, N],
//                             (x_sums[Bx, M, Gs]), (x_offsets f32[Bx, M, Gx]), (shift[Bz, G, N]), (bias[Bb, N]))
//       -> y[B, M, N]
//     CUDA alone, architecture 9.0. k, bits, shift_mode, has_bias, activation, has_sums, has_offsets. x is codes *
//     x_scales + x_offsets. Sums are those of the codes of the smaller groups of both, Gs = max(Gx, G), and needed
//     where shift is neither none nor u8 zeros of 4 bits. Groups are 128 or 256 inputs, or 1. The same leading sizes.
//   wonly_static_matmul_v1(codes s8[M, Kp], qw u32[Nt, Kt, 512], multiplier f32[N], fused s32[N]) -> y s8[M, N]
//     As that; k, bits, zero, low, high: clamp(rint((codes @ (qw - 2^(bits - 1)) + fused) * multiplier) + zero).
//   wonly_conv_v1(x[B, H, W, K], qw u32[T, Nt, Kt, 512], scales[T, G, N], (shift[T, G, N]), (bias[1, N]))
//       -> y[B, H', W', N], scratch s32[S]
//     bits, shift_mode, has_bias, activation; window s64[8 or 10]: height and width of the window, of which T is the
//     product, of its strides, of the padding before the first pixel, of the dilation of taps, and of that of x, or 1.
//     CUDA alone. Scales are of x's type or f32, shift of x's type, and zeros also u8. Scratch, of any size, lets CTAs
//     share inputs.
//   wonly_direct_conv_v1(x[B, D, H, W, C], qw u32[T, Nt, Kt, 512], scales[Ts, G, N], (shift[Tz, G, N]), (bias[1, N]))
//       -> y[B, D', H', W', N]
//     bits, shift_mode, has_bias, activation, groups; window s64[12]: of depth, height and width the window, of which T
//     is the product, the strides, the padding before the first pixel, and the dilation of taps. K is C / groups, and
//     output n belongs to group n / (N / groups). Ts and Tz are 1 or T. CUDA alone; C = groups, or x of 16 bits and C
//     and N multiples of 8 on architecture 8.0 or newer.
//
// x, w, y, dx, dy: f16, bf16 or f32. scales, bias: f16, bf16 or f32. shift: those (zeros or offsets), or u8 (integer
// zeros). The group size is K / G. W[k, n] = (code - zero) * scale, or code * scale + offset; zero is 2^(bits - 1)
// without a shift. kTable, of four bits: W[k, n] = table[code] * scale, and the operand shift is the table, f32[Bz, 1,
// 16].
#pragma once

#include <cstdint>

namespace wonly {

enum class ShiftMode : int64_t { kNone = 0, kZeros = 1, kOffsets = 2, kTable = 3 };
enum class Activation : int64_t { kNone = 0, kRelu = 1, kRelu6 = 2, kGelu = 3, kSilu = 4 };  // gelu: the tanh form
// Symmetric: absmax. The others are minmax and write a shift: u8 zeros, zeros of the scales' type, offsets of the
// scales' type.
enum class QuantizeMode : int64_t { kSymmetric = 0, kIntegerZeros = 1, kFloatZeros = 2, kOffsets = 3 };

// How the rows of a ragged product say which expert they belong to.
enum class RowMode : int64_t { kSizes = 0, kIds = 1 };
// Words of scratch of a ragged product on CUDA, for each row, for each expert, and besides: room for the plan of
// cuda/ragged_plan.h, and for counting where shared memory is too small. With room for all rows of activations behind
// it, those of kIds may be put in the order of their experts first, and float32 ones, with a word more for each, taken
// apart.
constexpr int64_t kRaggedScratchPerRow = 1, kRaggedScratchPerExpert = 8, kRaggedScratchFixed = 64;

// A spatial axis of a convolution: pixel i of the result meets at tap r the pixel (i * stride + r * dilation - low) /
// spread of x; outside of it, and between its pixels, are zeros.
struct ConvAxis {
  int size, result, window, stride, low, dilation;
  int spread = 1;  // of a transposed convolution
};
struct ConvGeometry {
  int images;
  ConvAxis height, width;
};
struct DirectConvGeometry {
  int images, groups;
  ConvAxis depth, height, width;
};

// Element types the kernels know, apart from any framework's numbering.
enum class DType : int32_t { kF16 = 0, kBF16 = 1, kF32 = 2, kU8 = 3 };

constexpr int element_size(DType type) { return type == DType::kF32 ? 4 : type == DType::kU8 ? 1 : 2; }

}  // namespace wonly
