// Convolution in groups of features on tensor cores (mma.sync), for 16-bit x.
//
// A CTA owns 32 outputs and the blocks of 32 inputs that their groups reach into. It dequantizes the weights between
// them once, rounded to the type of x, zeros where output and input are of different groups, into shared memory in the
// order in which lanes hold the A operand. Its warps walk over the pixels of the result, eight of which are the columns
// of a B operand, which goes from memory to registers: lane 4g + t loads inputs 8t .. 8t + 7 of pixel g at once, and
// the order of inputs within the product is the one that makes these registers operands. The order of outputs is such
// that after a transposition a lane has outputs 8t .. 8t + 7 of pixel g.
//
// The zeros cost tensor time, of which there is plenty, and turn infinities of other groups into NaNs; a sum that is
// none is therefore computed once more, from its own group alone.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "cuda/direct_conv.h"
#include "cuda/division.h"
#include "cuda/epilogue.cuh"
#include "cuda/launch.h"
#include "cuda/ptx.cuh"
#include "cuda/tap_weights.cuh"

namespace wonly::grouped {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kRun = 8;  // pixels

struct Params {
  DirectConvArgs conv;
  int inputs, outputs;           // of a group
  int features;                  // of a pixel of x
  int taps, blocks;              // blocks of inputs of a CTA
  int tiles;                     // of pixels, for all warps of a CTA at once
  Divisor depth, height, width;  // of the result
};

// A operands for a tap and block: 16 outputs, the four quarters 2i and 2i + 1 of all 32, by half of the inputs. kQuads:
// groups of 1, 2 or 4 inputs and as many outputs, whose weights lie in half of them.
template <bool kQuads>
constexpr int kOperands = kQuads ? 2 : 4;
template <bool kQuads>
constexpr int kStepWords = kOperands<kQuads> * 32 * 4;

// Where in shared memory a register of an A operand lies, in words: that of lane 4g + t with the weights of inputs
// 8t + 4 half + 2 pair and the next of a block, and output 8 (g / 2) + 2 quarter + g % 2. Lanes lie in an order in
// which neither loads nor the stores of neighbouring outputs meet a bank more than twice.
__device__ __forceinline__ int lane_place(int g, int t) { return 8 * t + (g + 2 * t) % 8; }
template <bool kQuads>
__device__ __forceinline__ int register_at(int g, int t, int half, int quarter, int pair) {
  const int operand = kQuads ? quarter / 2 : 2 * half + quarter / 2;
  return (operand * 32 + lane_place(g, t)) * 4 + quarter % 2 + 2 * pair;
}

// The registers of all taps.
template <typename X, bool kQuads>
__device__ __forceinline__ void dequantize_block(const Params& params, int n0, int first_block, uint32_t* weights) {
  const MatmulArgs& args = params.conv.product;
  const int k = static_cast<int>(args.k), taps = params.taps, blocks = params.blocks;
  if (k % kBlock != 0 || params.outputs % kBlock != 0) {  // else every register gets weights
    for (int i = threadIdx.x; i < taps * blocks * kStepWords<kQuads> / 4; i += kThreads) {
      reinterpret_cast<uint4*>(weights)[i] = uint4{};
    }
    __syncthreads();
  }
  // A thread has one output, and of every eight inputs of its group those of a lane of the packed format.
  const int output = threadIdx.x % kBlock, n = n0 + output;
  if (n >= args.n) return;
  const int g = 2 * (output / 8) + output % 2, quarter = output % 8 / 2;
  const int begin = n / params.outputs * k - first_block * kBlock;  // input 0 of the group, from the blocks' first on
  const auto place = [&](int input) {
    const int at = begin + input, block = at / kBlock;
    return 2 * (block * kStepWords<kQuads> + register_at<kQuads>(g, at % kBlock / 8, at % 8 / 4, quarter, at % 4 / 2)) +
           at % 2;
  };
  dequantize_taps<X, 5>(args, taps, n, threadIdx.x / kBlock, blocks * kStepWords<kQuads>, weights, place);
}

// One output from its own group alone, on top of `sum`.
template <typename X>
__device__ __noinline__ float exact_output(const Params& params, int pixel, int n, float sum) {
  const MatmulArgs& args = params.conv.product;
  const DirectConvGeometry& g = params.conv.geometry;
  const int k = static_cast<int>(args.k), per_scale = k / static_cast<int>(args.groups);
  const int column = pixel % g.width.result, row = pixel / g.width.result % g.height.result;
  const int of_plane = pixel / g.width.result / g.height.result;
  const int z = of_plane % g.depth.result, image = of_plane / g.depth.result;
#pragma unroll 1
  for (int tap = 0; tap < params.taps; ++tap) {
    const int tap_x = tap % g.width.window, tap_y = tap / g.width.window % g.height.window;
    const int tap_z = tap / g.width.window / g.height.window;
    const int at_z = z * g.depth.stride - g.depth.low + tap_z * g.depth.dilation;
    const int at_y = row * g.height.stride - g.height.low + tap_y * g.height.dilation;
    const int at_x = column * g.width.stride - g.width.low + tap_x * g.width.dilation;
    if (at_z < 0 || at_z >= g.depth.size || at_y < 0 || at_y >= g.height.size || at_x < 0 || at_x >= g.width.size)
      continue;
    const int64_t at =
        ((static_cast<int64_t>(image) * g.depth.size + at_z) * g.height.size + at_y) * g.width.size + at_x;
    const X* const from = static_cast<const X*>(args.x) + at * params.features + n / params.outputs * k;
    with_scheme(args, [&](auto scheme) {
#pragma unroll 1
      for (int i = 0; i < k; ++i) {
        int shift;
        const uint32_t word = __ldg(code_word(args, i, n, &shift) + tap * args.qw_batch_stride);
        const auto parameters = scheme.parameters(scheme.load(tap, i / per_scale, n), tap);
        const float w = scheme.weight(parameters, word >> shift & ((1u << args.bits) - 1u));
        sum = fmaf(to_float(from[i]), to_float(from_float<X>(w)), sum);
      }
    });
  }
  return sum;
}

template <typename X>
__device__ __forceinline__ void product(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  const uint32_t registers[4] = {a.x, a.y, a.z, a.w};
  ptx::mma<!std::is_same_v<X, __half>>(d, registers, b0, b1);
}

// kRuns runs of pixels of a warp, kAtOnce steps (a tap and a block of inputs) whose inputs are loaded together.
template <typename X, bool kQuads, int kRuns, int kAtOnce, int kCtas>
__global__ void __launch_bounds__(kThreads, kCtas) grouped_conv(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ float biases[kBlock];
  __shared__ uint4 table[kMostSteps];  // of a step: bytes of x, the bit of its tap, and its first input
  uint4* const weights = reinterpret_cast<uint4*>(shared);
  const MatmulArgs& args = params.conv.product;
  const DirectConvGeometry& geometry = params.conv.geometry;
  const ConvAxis &depth = geometry.depth, &height = geometry.height, &width = geometry.width;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int n0 = blockIdx.y * kBlock;
  const int first_block = n0 / params.outputs * static_cast<int>(args.k) / kBlock;
  const int steps = params.taps * params.blocks, pixels = static_cast<int>(args.m);
  // Bytes of x from a pixel to the next, to the next row, and to the next plane. All positions are counted in 32 bits,
  // whose overflows cancel out: x is smaller than that.
  const uint32_t pixel_bytes = params.features * sizeof(X), row_bytes = pixel_bytes * width.size;
  const uint32_t plane_bytes = row_bytes * height.size;
#pragma unroll 1
  for (int i = threadIdx.x; i < steps; i += kThreads) {
    const int tap = i / params.blocks, block = first_block + i - tap * params.blocks;
    const int tap_x = tap % width.window, of_plane = tap / width.window;
    const int tap_y = of_plane % height.window, tap_z = of_plane / height.window;
    const uint64_t bit = uint64_t{1} << tap;
    table[i] = make_uint4((tap_x * width.dilation - width.low) * pixel_bytes +
                              (tap_y * height.dilation - height.low) * row_bytes +
                              (tap_z * depth.dilation - depth.low) * plane_bytes + block * kBlock * sizeof(X),
                          static_cast<uint32_t>(bit), static_cast<uint32_t>(bit >> 32), block * kBlock);
  }
  if (threadIdx.x < kBlock) {
    const bool some = args.has_bias && n0 + threadIdx.x < args.n;
    biases[threadIdx.x] = some ? load_element(args.bias, n0 + threadIdx.x, args.bias_dtype) : 0.f;
  }
  __syncthreads();

  // Of the lane's pixels: where the window would begin without padding, in bytes of x, and which taps are inside.
  uint32_t offset[kRuns], inside[kRuns][2];
  const auto mask_of = [](const ConvAxis& axis, int result) {
    const int first = result * axis.stride - axis.low;
    uint64_t mask = 0;
#pragma unroll 1
    for (int tap = 0; tap < axis.window; ++tap) {
      const bool in = static_cast<unsigned>(first + tap * axis.dilation) < static_cast<unsigned>(axis.size);
      mask |= static_cast<uint64_t>(in) << tap;
    }
    return mask;
  };
  const auto place = [&](int tile) {
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int pixel = ((tile * kWarps + warp) * kRuns + i) * kRun + g;
      int x, y, z;
      const int image = params.depth.divide(params.height.divide(params.width.divide(pixel, &x), &y), &z);
      offset[i] = (image * depth.size + z * depth.stride) * plane_bytes + y * height.stride * row_bytes +
                  x * width.stride * pixel_bytes + 8 * t * sizeof(X);
      const uint64_t in_x = mask_of(width, x), in_y = mask_of(height, y), in_z = mask_of(depth, z);
      uint64_t in = 0;
#pragma unroll 1
      for (int row = height.window * depth.window - 1; row >= 0; --row) {
        const int tap_z = depth.window == 1 ? 0 : row / height.window, tap_y = row - tap_z * height.window;
        in = in << width.window | ((in_y >> tap_y & in_z >> tap_z & 1) != 0 ? in_x : 0);
      }
      inside[i][0] = pixel < pixels ? static_cast<uint32_t>(in) : 0;
      inside[i][1] = pixel < pixels ? static_cast<uint32_t>(in >> 32) : 0;
    }
  };
  const int last = params.features - 8 * t;  // inputs of a block that begins before this are there
  uint4 inputs[kAtOnce][kRuns];
  const auto load = [&](int step) {
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      if (step + s < steps) {
        const uint4 at = table[step + s];
        const bool some = static_cast<int>(at.w) < last;
#pragma unroll
        for (int i = 0; i < kRuns; ++i) {
          inputs[s][i] = uint4{};
          if (((inside[i][0] & at.y) | (inside[i][1] & at.z)) != 0 && some) {
            inputs[s][i] = __ldg(reinterpret_cast<const uint4*>(static_cast<const char*>(args.x) + (offset[i] + at.x)));
          }
        }
      }
    }
  };

  int tile = blockIdx.x;
  place(tile);
  load(0);
  dequantize_block<X, kQuads>(params, n0, first_block, reinterpret_cast<uint32_t*>(shared));
  __syncthreads();

  const uint4* const own_weights = weights + lane_place(g, t);
  const int output = 8 * (g / 2) + g % 2;  // of quarter 0
  for (; tile < params.tiles; tile += gridDim.x) {
    float acc[kRuns][2][4];  // pixels 2t and 2t + 1 of quarter 2i, and those of 2i + 1
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      const float bias = biases[output + 2 * quarter];
#pragma unroll
      for (int i = 0; i < kRuns; ++i) {
        acc[i][quarter / 2][quarter % 2 * 2] = acc[i][quarter / 2][quarter % 2 * 2 + 1] = bias;
      }
    }
#pragma unroll 1
    for (int done = 0; done < steps; done += kAtOnce) {
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        if (done + s < steps) {
#pragma unroll
          for (int operand = 0; operand < kOperands<kQuads>; ++operand) {
            const uint4 a = own_weights[(done + s) * (kStepWords<kQuads> / 4) + operand * 32];
            const int half = kQuads ? operand : operand / 2;
#pragma unroll
            for (int i = 0; i < kRuns; ++i) {
              const uint4& b = inputs[s][i];
              product<X>(acc[i][operand % 2], a, half == 0 ? b.x : b.z, half == 0 ? b.y : b.w);
            }
          }
        }
      }
      if (done + kAtOnce < steps) load(done + kAtOnce);
    }

    const int next = tile + static_cast<int>(gridDim.x), first_pixel = (tile * kWarps + warp) * kRuns * kRun;
    if (next < params.tiles) {
      place(next);
      load(0);
    }
    constexpr int kSums = kRuns * 8;
    float all = 0.f;
#pragma unroll
    for (int i = 0; i < kSums; ++i) all += acc[i / 8][i / 4 % 2][i % 4];
    if (args.activation != Activation::kNone || isnan(all)) {
      // By way of local memory: one copy of the code instead of one for every sum.
      float sums[kSums];
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = acc[i / 8][i / 4 % 2][i % 4];
#pragma unroll 1
      for (int i = 0; i < kSums; ++i) {
        const int pixel = first_pixel + i / 8 * kRun + 2 * t + i % 2, of_block = output + i % 8 / 2 * 2;
        float value = sums[i];
        if (isnan(value) && pixel < pixels && n0 + of_block < args.n) {
          value = exact_output<X>(params, pixel, n0 + of_block, biases[of_block]);
        }
        sums[i] = apply(args.activation, value);
      }
#pragma unroll
      for (int i = 0; i < kSums; ++i) acc[i / 8][i / 4 % 2][i % 4] = sums[i];
    }
    if (args.y_dtype == DType::kF32) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        const int pixel = first_pixel + i / 8 * kRun + 2 * t + i % 2, n = n0 + output + i % 8 / 2 * 2;
        if (pixel < pixels && n < args.n) {
          static_cast<float*>(args.y)[static_cast<int64_t>(pixel) * args.n + n] = acc[i / 8][i / 4 % 2][i % 4];
        }
      }
      continue;
    }
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      uint32_t pairs[4];  // of outputs of pixel g
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        const float low = acc[i][quarter / 2][quarter % 2 * 2], high = acc[i][quarter / 2][quarter % 2 * 2 + 1];
        pairs[quarter] = ptx::transpose(args.y_dtype == DType::kF16 ? from_float2<__half>(low, high)
                                                                    : from_float2<__nv_bfloat16>(low, high));
      }
      const int pixel = first_pixel + i * kRun + g, n = n0 + 8 * t;
      if (pixel < pixels && n < args.n) {
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(args.y) + static_cast<int64_t>(pixel) * args.n + n) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
  }
}

template <typename X, bool kQuads, int kRuns, int kAtOnce, int kCtas>
cudaError_t launch_runs(Params params, int multiprocessors, cudaStream_t stream) {
  const MatmulArgs& args = params.conv.product;
  params.tiles = static_cast<int>(ceil_div(args.m, kWarps * kRuns * kRun));
  const int64_t strips = ceil_div(args.n, kBlock);
  if (strips > 65535) return cudaErrorInvalidConfiguration;
  LaunchShape shape;
  shape.threads = kThreads;
  shape.shared_bytes = params.taps * params.blocks * kStepWords<kQuads> * 4;
  const auto kernel = grouped_conv<X, kQuads, kRuns, kAtOnce, kCtas>;
  return launch_walking(kernel, shape, params.tiles, strips, multiprocessors, stream, params);
}

inline bool in_quads(const DirectConvArgs& conv) {
  const int64_t k = conv.product.k;
  return conv.product.n == k * conv.geometry.groups && 4 % k == 0;
}

template <typename X>
cudaError_t launch_typed(const DirectConvArgs& conv, int runs, int multiprocessors, cudaStream_t stream) {
  Params params{};
  params.conv = conv;
  params.inputs = static_cast<int>(conv.product.k);
  params.outputs = static_cast<int>(conv.product.n / conv.geometry.groups);
  params.features = params.inputs * conv.geometry.groups;
  params.taps = conv.taps();
  params.blocks = input_blocks(conv);
  params.depth = Divisor(conv.geometry.depth.result);
  params.height = Divisor(conv.geometry.height.result);
  params.width = Divisor(conv.geometry.width.result);
  const bool quads = in_quads(conv);
  if (runs == 1) {
    return quads ? launch_runs<X, true, 1, 9, 4>(params, multiprocessors, stream)
                 : launch_runs<X, false, 1, 9, 4>(params, multiprocessors, stream);
  }
  if (runs != kManyRuns) return cudaErrorInvalidConfiguration;
  return quads ? launch_runs<X, true, kManyRuns, 3, 3>(params, multiprocessors, stream)
               : launch_runs<X, false, kManyRuns, 3, 4>(params, multiprocessors, stream);
}

}  // namespace wonly::grouped
