// Checks and times every configuration of the product's kernels, without Python in between: the source of the numbers
// in ffi/cuda/matmul.cu. Build and run with benchmarks/tune.py.
//
//   kernel_sweep check [EVERY [KERNEL]]
//       every instance (one case in EVERY; of KERNEL) on odd shapes against a float64 sum, exit status 1 on a mismatch
//   kernel_sweep time BITS GROUP X MS SHAPES [SHIFT]
//       one line per configuration: k n m atoms tiles warps cluster ctas us GB/s
//       X: bf16, f16 or f32, with scales of bf16, or f16 as X; of other types bf16/f32 and the like
//       MS: 1,8,16; SHAPES: KxN,KxN; GROUP 0: per channel
//       SHIFT: symmetric (default), integer_zeros, float_zeros, offsets or table
//       the warpgroup kernel: atoms 0, tiles for tokens / 8, warps for warpgroups, cluster 0 for inputs shared evenly,
//       ctas for teams, or those of a multiprocessor
//       the decode kernel: atoms -1, tiles for parts
//       the tiled kernel: atoms -2, tiles for tokens / 8, warps for splits
//       the mma kernel: atoms -3, tiles for tokens / 8, warps for splits
//       the resident kernel: atoms -4, tiles for parts, warps for strips of a pass
//   kernel_sweep race
//       the same of configurations that standard input has, in turns, and an empty line after each product
//       two kernels: atoms -5, tiles for outputs of the first, and both configurations after it
//
// Time: a CUDA graph of calls that rotate through more than four times the L2 of weights (race: twice), median over
// replays.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda/device.h"
#include "cuda/element.cuh"
#include "cuda/matmul_decode.h"
#include "cuda/matmul_mma.h"
#include "cuda/matmul_resident.h"
#include "cuda/matmul_stream.h"
#include "cuda/matmul_tiled.h"
#include "cuda/matmul_warpgroup.h"
#include "layout.h"

using namespace wonly;

// Tokens of a CTA of the warpgroup kernel, and of a tile of the tiled one (checked with 64 too, and not timed with it).
constexpr int kWarpgroupTokens[] = {8,   16,  32,  48,  64,  72,  80,  96,  104, 112, 120,
                                    128, 136, 144, 152, 160, 176, 184, 192, 200, 216};
constexpr int kTiledTokens[] = {64, 144, 160, 168, 176, 184, 192, 200, 208, 216, 224, 232, 240, 248, 256};

__device__ uint32_t hash(uint64_t i) {
  i = (i ^ (i >> 30)) * 0xbf58476d1ce4e5b9ull;
  i = (i ^ (i >> 27)) * 0x94d049bb133111ebull;
  return static_cast<uint32_t>(i >> 32);
}
__global__ void fill_words(uint32_t* to, int64_t count, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < count; i += int64_t(gridDim.x) * blockDim.x)
    to[i] = hash(seed * 0x9e3779b97f4a7c15ull + i);
}
// Uniform numbers, rounded to integers on request.
__global__ void fill_floats(void* to, int64_t count, DType type, float low, float high, bool integer, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < count; i += int64_t(gridDim.x) * blockDim.x) {
    const float v = low + (high - low) * (hash(seed * 0x9e3779b97f4a7c15ull + i) * 0x1p-32f);
    store_element(to, i, integer ? rintf(v) : v, type);
  }
}
// One thread per output: the sum in float64, that of weights rounded to the type of the activations (zeros taken off
// first), and the sum of the terms' magnitudes.
__global__ void reference(MatmulArgs args, double* sum, double* rounded_sum, double* magnitude) {
  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i >= args.batch * args.m * args.n) return;
  const int64_t n = i % args.n, m = i / args.n % args.m, b = i / args.n / args.m;
  const int step = tile_k(args.bits);
  const int64_t tiles = ceil_div(args.k, step);
  double total = 0, rounded = 0, size = 0;
  for (int64_t k = 0; k < args.k; ++k) {
    const CodePosition at = code_position(args.bits, k % step, n % kTileN);
    const uint32_t word = args.qw[b * args.qw_batch_stride + (n / kTileN * tiles + k / step) * kTileWords + at.word];
    const double code = (word >> at.shift) & ((1u << args.bits) - 1);
    const int64_t group = k / (args.k / args.groups) * args.n + n;
    const double scale = load_element(args.scales, b * args.scales_batch_stride + group, args.scale_dtype);
    const double shift = args.shift_mode == ShiftMode::kNone
                             ? bias_of(args.bits)
                             : load_element(args.shift, b * args.shift_batch_stride + group, args.shift_dtype);
    const double w = args.shift_mode == ShiftMode::kOffsets ? code * scale + shift : (code - shift) * scale;
    const double x = load_element(args.x, b * args.x_batch_stride + m * args.k + k, args.x_dtype);
    total += w * x;
    const bool offsets = args.shift_mode == ShiftMode::kOffsets, shifted = args.shift_mode != ShiftMode::kNone;
    float centred = static_cast<float>(offsets ? code : code - shift);
    float offset = offsets ? static_cast<float>(shift) : 0.f;
    if (shifted && args.shift_dtype == DType::kF32) {  // the shift is rounded less the code's bias
      const float bias = bias_of(args.bits);
      centred = static_cast<float>(code) - bias;
      const float s = static_cast<float>(scale), z = static_cast<float>(shift);
      offset = round_to(args.x_dtype, offsets ? fmaf(bias, s, z) : (bias - z) * s);
    }
    const float factor = round_to(args.x_dtype, static_cast<float>(scale));
    rounded += x * round_to(args.x_dtype, fmaf(round_to(args.x_dtype, centred), factor, offset));
    size += (args.shift_mode == ShiftMode::kOffsets ? fabs(code * scale) + fabs(shift) : (code + fabs(shift)) * scale) *
            fabs(x);
  }
  const double bias = args.has_bias ? load_element(args.bias, b * args.bias_batch_stride + n, args.bias_dtype) : 0.f;
  const bool relu = args.activation == Activation::kRelu;
  sum[i] = relu && total + bias < 0 ? 0 : total + bias;
  rounded_sum[i] = relu && rounded + bias < 0 ? 0 : rounded + bias;
  magnitude[i] = size;
}

__global__ void widen(const void* from, float* to, int64_t count, DType type) {
  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < count) to[i] = load_element(from, i, type);
}

struct Buffer {
  void* data = nullptr;
  int64_t bytes;
  explicit Buffer(int64_t bytes) : bytes(bytes) { CHECK(cudaMalloc(&data, std::max<int64_t>(bytes, 4))); }
  ~Buffer() { cudaFree(data); }
  Buffer(const Buffer&) = delete;
};

void fill(void* to, int64_t count, DType type, float low, float high, bool integer, uint64_t seed) {
  fill_floats<<<256, 256>>>(to, count, type, low, high, integer, seed);
  CHECK(cudaGetLastError());
}

// Whether the kernel of that name computes `args`.
bool takes(const char* kernel, const MatmulArgs& args) {
  const std::string name = kernel;
  return name == "decode"      ? decode::supports(args)
         : name == "resident"  ? resident::supports(args)
         : name == "warpgroup" ? warpgroup::supports(args)
         : name == "mma"       ? mma::supports(args)
         : name == "stream"    ? true
                               : tiled::supports(args);
}

int check(int every, const char* only) {
  int seen = 0;
  Device device;
  CHECK(current_device(&device));
  int failed = 0, cases = 0;
  double worst = 0;
  uint64_t seed = 1;
  struct Shape {
    int64_t b, m, k, n, group;
  };
  const std::vector<Shape> shapes = {
      {1, 1, 64, 64, 0},       {1, 3, 100, 70, 0},       {2, 7, 96, 33, 32},       {1, 8, 1024, 136, 128},
      {3, 5, 512, 192, 256},   {1, 17, 320, 50, 64},     {1, 9, 2048, 257, 32},    {1, 16, 4096, 128, 128},
      {1, 33, 1536, 384, 128}, {1, 2, 33, 1, 0},         {2, 4, 101, 65, 0},       {2, 300, 832, 520, 64},
      {1, 520, 1032, 300, 0},  {1, 70, 1120, 272, 32},   {1, 2, 1024, 136, 128},   {3, 1, 640, 72, 64},
      {1, 2, 1152, 200, 64},   {2, 1, 1280, 136, 32},    {2, 2, 768, 136, 32},     {1, 1, 4480, 264, 64},
      {1, 2, 2304, 72, 0},     {2, 5, 640, 72, 128},     {1, 8, 1088, 200, 0},     {3, 3, 2304, 137, 256},
      {1, 7, 64, 16, 0},       {1, 4, 5184, 328, 0},     {1, 6, 4096, 129, 128},   {1, 6, 832, 200, 64},
      {2, 5, 1984, 137, 32},   {1, 8, 4160, 328, 32},    {1, 8, 12288, 328, 128},  {1, 16, 12288, 392, 128},
      {1, 16, 14336, 64, 128}, {1, 16, 14336, 424, 128}, {1, 8, 14336, 1304, 0},   {1, 12, 7168, 392, 64},
      {2, 13, 10304, 72, 64},  {2, 5, 10304, 72, 64},    {1, 11, 28672, 200, 128}, {1, 5, 28672, 72, 32}};
  for (const Shape& s : shapes)
    for (int bits : {4, 8})
      for (DType xt : {DType::kBF16, DType::kF16, DType::kF32})
        // Symmetric, u8 zeros, float zeros, offsets, u8 zeros with results of the activations' type, and float zeros
        // and offsets in float32. The second and the last two have float32 scales.
        for (int variant = 0; variant < 7; ++variant) {
          const int64_t groups = s.group ? s.k / s.group : 1;
          const int64_t words = ceil_div(s.n, kTileN) * ceil_div(s.k, tile_k(bits)) * kTileWords;
          const DType st = variant == 1 || variant > 4 ? DType::kF32 : xt == DType::kF16 ? DType::kF16 : DType::kBF16;
          const DType zt = variant == 1 || variant == 4 ? DType::kU8 : st;
          MatmulArgs args{};
          args.batch = s.b, args.m = s.m, args.k = s.k, args.n = args.parameter_row = s.n, args.groups = groups,
          args.bits = bits;
          args.x_dtype = xt, args.scale_dtype = st, args.shift_dtype = zt, args.bias_dtype = DType::kF32,
          args.y_dtype = variant == 4 ? xt : DType::kF32;
          const bool offsets = variant == 3 || variant == 6;
          args.shift_mode = variant == 0 ? ShiftMode::kNone : offsets ? ShiftMode::kOffsets : ShiftMode::kZeros;
          // Rows of float32 in pieces of 128, where there is no batch.
          args.scratch_bytes = xt == DType::kF32 && s.b == 1 ? 128 * (s.k + 1) * 4 : 32 << 20;
          if (only != nullptr && !takes(only, args)) continue;
          Buffer x(s.b * s.m * s.k * 4), qw(s.b * words * 4), scales(s.b * groups * s.n * 4),
              shift(s.b * groups * s.n * 4), bias(s.b * s.n * 4), y(s.b * s.m * s.n * 4), wide(s.b * s.m * s.n * 4),
              sum(s.b * s.m * s.n * 8), rounded(s.b * s.m * s.n * 8), magnitude(s.b * s.m * s.n * 8), scratch(32 << 20);
          fill(x.data, s.b * s.m * s.k, xt, -0.5f, 1.5f, false, ++seed);
          fill_words<<<256, 256>>>(static_cast<uint32_t*>(qw.data), s.b * words, ++seed);
          fill(scales.data, s.b * groups * s.n, st, 0.005f, 0.02f, false, ++seed);
          const float top = bits == 4 ? 15.f : 255.f;
          if (variant == 3) {
            fill(shift.data, s.b * groups * s.n, zt, -0.2f, 0.1f, false, ++seed);
          } else {
            fill(shift.data, s.b * groups * s.n, zt, 0.f, top, zt == DType::kU8, ++seed);
          }
          fill(bias.data, s.b * s.n, DType::kF32, -1.f, 1.f, false, ++seed);
          args.x = x.data, args.qw = static_cast<uint32_t*>(qw.data), args.scales = scales.data, args.bias = bias.data;
          args.shift = variant == 0 ? nullptr : shift.data;
          args.y = y.data;
          args.scratch = scratch.data;
          args.x_batch_stride = s.m * s.k, args.qw_batch_stride = words;
          args.scales_batch_stride = args.shift_batch_stride = groups * s.n;
          args.bias_batch_stride = s.n;
          if (variant == 2)
            args.scales_batch_stride = args.qw_batch_stride = args.shift_batch_stride = 0;  // shared weights
          args.has_bias = variant != 2;
          args.activation = variant == 3 ? Activation::kRelu : Activation::kNone;
          const int64_t count = s.b * s.m * s.n;
          // Of kernels that round weights `want` has the sum of those: a reference of their own.
          std::vector<double> want, of_rounded, size;
          bool rounds = false;
          const auto expect = [&] {
            if (!want.empty()) return;
            want.resize(count), of_rounded.resize(count), size.resize(count);
            reference<<<static_cast<unsigned>(ceil_div(count, 128)), 128>>>(args, static_cast<double*>(sum.data),
                                                                            static_cast<double*>(rounded.data),
                                                                            static_cast<double*>(magnitude.data));
            CHECK(cudaMemcpy(want.data(), sum.data, count * 8, cudaMemcpyDeviceToHost));
            CHECK(cudaMemcpy(of_rounded.data(), rounded.data, count * 8, cudaMemcpyDeviceToHost));
            CHECK(cudaMemcpy(size.data(), magnitude.data, count * 8, cudaMemcpyDeviceToHost));
            if (rounds) want.swap(of_rounded);
          };
          std::vector<float> got(count);
          const auto compare = [&](const char* kernel, int p0, int p1, int p2, int p3, auto&& launch) {
            if ((only != nullptr && std::strcmp(only, kernel) != 0) || seen++ % every != 0) return;
            expect();
            CHECK(cudaMemset(y.data, 0xff, count * 4));  // NaN
            const cudaError_t launched = launch();
            if (launched == cudaErrorInvalidConfiguration) return;  // more shared memory than there is
            CHECK(launched);
            widen<<<static_cast<unsigned>(ceil_div(count, 256)), 256>>>(y.data, static_cast<float*>(wide.data), count,
                                                                        args.y_dtype);
            CHECK(cudaMemcpy(got.data(), wide.data, count * 4, cudaMemcpyDeviceToHost));
            double error = 0;
            for (int64_t i = 0; i < count; ++i) {
              const double e = std::abs(got[i] - want[i]) / (size[i] + 1);
              if (!(e <= error)) error = e;
            }
            ++cases;
            const bool narrow = args.y_dtype != DType::kF32;
            if (!narrow) worst = std::max(worst, error);
            // A weight that lies between two numbers may be rounded the other way, and sums that run through all
            // inputs lose half of their last place with each product of 16.
            // So do float32 sums of very many groups.
            const double usual = xt == DType::kF32 ? 2e-6 : 1e-6, least = s.k > 1 << 14 ? s.k * 1e-10 : usual;
            const double bound = narrow ? 4e-3 : rounds ? 2e-5 + s.k / 16 * 0x1p-24 : least;
            if (!(error < bound) && ++failed <= 20) {
              std::printf("WRONG b%ld m%ld k%ld n%ld g%ld bits%d x%d variant%d %s %d %d %d %d: %g\n", s.b, s.m, s.k,
                          s.n, s.group, bits, int(xt), variant, kernel, p0, p1, p2, p3, error);
            }
          };
          for (int tiles : {1, 2})
            for (int atoms : {1, 2, 4})
              for (int warps : {1, 3, 8, 16})
                for (int cluster : {1, 2, 8}) {
                  const int ctas = warps <= 3 ? 3 : 1;
                  if (warps > stream::max_warps(tiles) || (device.architecture < 90 && cluster > 1)) continue;
                  if ((seed + tiles + atoms + warps + cluster) % 3 != 0)
                    continue;  // a third of them, another third each time
                  compare("stream", atoms, tiles, warps, cluster, [&] {
                    return stream::launch(args, {atoms, tiles, warps, cluster, shared_share(device, ctas)}, nullptr);
                  });
                }
          if (device.architecture == 90 && decode::supports(args)) {
            const int strips = static_cast<int>(ceil_div(s.n, kAtomN));
            for (int cluster : {1, 2, 4})
              for (int parts : {1, (strips + 1) / 2, strips}) {
                compare("decode", cluster, parts, 0, 0,
                        [&] { return decode::launch(args, {cluster, parts}, shared_share(device, 1), nullptr); });
              }
          }
          if (device.architecture == 90 && resident::supports(args)) {
            const int strips = static_cast<int>(ceil_div(s.n, kAtomN));
            for (int cluster : {1, 2, 4})
              for (int atoms : {1, 2, 4})
                for (int parts : {1, (strips + 1) / 2, strips}) {
                  compare("resident", cluster, parts, atoms, 0, [&] {
                    return resident::launch(args, {cluster, parts, atoms}, shared_share(device, 1), nullptr);
                  });
                }
          }
          if (device.architecture >= 80 && tiled::supports(args)) {
            want.swap(of_rounded);
            rounds = true;
            for (int tokens : {32, 64, 128})
              for (int splits : {1, 2, 3})
                for (int ctas : {1, 2}) {
                  if (device.architecture == 90 || !mma::supports(args) || splits > ceil_div(s.k, mma::kStageInputs))
                    continue;
                  const int tiles = static_cast<int>(s.b * ceil_div(s.m, tokens) * ceil_div(s.n, mma::kCtaOutputs));
                  const int shared_tiles = splits == 1 ? 0 : ctas == 1 ? tiles : (tiles + 1) / 2;
                  compare("mma", tokens, splits, ctas, 0, [&] {
                    return mma::launch(args, {tokens, shared_tiles, splits, shared_share(device, ctas)}, nullptr);
                  });
                }
            for (int tokens : kTiledTokens)
              for (int splits : {1, 2, 3})
                for (int multiprocessors : {4, 12, device.multiprocessors}) {
                  if (device.architecture != 90 || splits > ceil_div(s.k, tiled::kStageInputs)) continue;
                  compare("tiled", tokens, splits, multiprocessors, 0,
                          [&] { return tiled::launch(args, {multiprocessors, tokens, splits}, nullptr); });
                }
            want.swap(of_rounded);
            rounds = false;
          }
          if (device.architecture != 90 || !warpgroup::supports(args)) continue;
          for (int tokens : kWarpgroupTokens) {
            rounds = warpgroup::rounds(args, tokens);
            if (rounds) want.swap(of_rounded);
            for (int warpgroups : {1, 2, 3, 4})
              for (int cluster : {1, 2, 3, 4, 8, warpgroup::kEvenly})
                if (warpgroups == 2 || warpgroups == 3 || tokens == 32 || tokens == 64) {
                  compare("warpgroup", tokens, warpgroups, cluster, 0, [&] {
                    return warpgroup::launch(args, {tokens, warpgroups, cluster, device.multiprocessors}, nullptr);
                  });
                }
            if (rounds) want.swap(of_rounded);
          }
        }
  std::printf("%d cases, %d wrong, largest error %.3g of the terms' sum\n", cases, failed, worst);
  return failed != 0;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t end; (end = text.find(',', begin)) != std::string::npos; begin = end + 1)
    parts.push_back(text.substr(begin, end - begin));
  parts.push_back(text.substr(begin));
  return parts;
}

// A configuration of a kernel, as a line of `time` has it.
struct Configuration {
  int atoms, tiles, warps, cluster, ctas;
};

cudaError_t launch(const Configuration& c, const Device& device, const MatmulArgs& args, cudaStream_t s,
                   Part part = {}) {
  switch (c.atoms) {
    case 0:
      return warpgroup::launch(args, {8 * c.tiles, c.warps, c.cluster, device.multiprocessors, c.ctas, part}, s);
    case -1:
      return decode::launch(args, {c.cluster, c.tiles}, shared_share(device, 1), s);
    case -2:
      return tiled::launch(args, {device.multiprocessors, 8 * c.tiles, c.warps, tiled::kClusterCtas, part}, s);
    case -3: {
      const int64_t tiles = ceil_div(args.m, 8 * c.tiles) * ceil_div(args.n, mma::kCtaOutputs);
      const int shared_tiles = c.warps == 1 ? 0 : static_cast<int>(tiles % (mma::kCtas * device.multiprocessors));
      return mma::launch(args, {8 * c.tiles, shared_tiles, c.warps, shared_share(device, mma::kCtas)}, s);
    }
    case -4:
      return resident::launch(args, {c.cluster, c.tiles, c.warps}, shared_share(device, 1), s);
  }
  return stream::launch(args, {c.atoms, c.tiles, c.warps, c.cluster, shared_share(device, c.ctas)}, s);
}

// One, or two kernels' after it.
struct Tried : Configuration {
  Configuration first, second;
};
constexpr int kOfTwo = -5;
cudaError_t launch(const Tried& tried, const Device& device, const MatmulArgs& args, cudaStream_t s) {
  if (tried.atoms != kOfTwo) return launch(static_cast<const Configuration&>(tried), device, args, s);
  const int outputs = tried.tiles;
  const cudaError_t error = launch(tried.first, device, args, s, {0, outputs});
  return error == cudaSuccess ? launch(tried.second, device, args, s, {outputs, 0}) : error;
}

// Of a name, or of what is before a slash in it.
DType type_of(const std::string& name) {
  const std::string first = name.substr(0, name.find('/'));
  return first == "bf16" ? DType::kBF16 : first == "f16" ? DType::kF16 : DType::kF32;
}

// The operands of products of up to so many tokens, with copies of the weights that are so many bytes.
class Operands {
 public:
  Operands(int bits, int64_t group, const std::string& types, const std::string& shift_name, int64_t k, int64_t n,
           int64_t most, int64_t bytes)
      : bits(bits),
        k(k),
        n(n),
        groups(group ? k / group : 1),
        words(ceil_div(n, kTileN) * ceil_div(k, tile_k(bits)) * kTileWords),
        integers(shift_name == "integer_zeros"),
        xt(type_of(types)),
        st(types.find('/') != std::string::npos ? type_of(types.substr(types.find('/') + 1))
           : xt == DType::kF16                  ? DType::kF16
                                                : DType::kBF16),
        mode(shift_name == "symmetric" ? ShiftMode::kNone
             : shift_name == "offsets" ? ShiftMode::kOffsets
             : shift_name == "table"   ? ShiftMode::kTable
                                       : ShiftMode::kZeros),
        shift_size(mode == ShiftMode::kNone || mode == ShiftMode::kTable ? 0
                   : integers                                            ? 1
                                                                         : element_size(st)),
        copies(static_cast<int>(std::max<int64_t>(2, ceil_div(bytes, words * 4)))),
        qw(copies * words * 4),
        scales(copies * groups * n * element_size(st)),
        shift(mode == ShiftMode::kTable ? kTableEntries * 4 : copies * groups * n * shift_size),
        x(most * k * 4),
        y(most * n * 4),
        scratch(std::max<int64_t>(32 << 20, most * (k + 1) * 4)) {
    fill_words<<<1024, 256>>>(static_cast<uint32_t*>(qw.data), copies * words, 7);
    fill(scales.data, copies * groups * n, st, 0.005f, 0.02f, false, 8);
    fill(x.data, most * k, xt, -1.f, 1.f, false, 9);
    if (mode == ShiftMode::kTable) fill(shift.data, kTableEntries, DType::kF32, -1.f, 1.f, false, 10);
    if (shift_size > 0) {
      fill(shift.data, copies * groups * n, integers ? DType::kU8 : st, 0.f, 15.f, integers, 10);
    }
    CHECK(cudaMemset(scratch.data, 0, scratch.bytes));
    CHECK(cudaDeviceSynchronize());
  }

  std::vector<MatmulArgs> calls(int64_t m, int least) const {
    std::vector<MatmulArgs> calls;
    for (int i = 0; i < std::max(copies, least); ++i) {
      MatmulArgs args{};
      args.x = x.data, args.qw = static_cast<uint32_t*>(qw.data) + i % copies * words;
      args.scales = static_cast<uint8_t*>(scales.data) + i % copies * groups * n * element_size(st);
      args.y = y.data;
      args.batch = 1, args.m = m, args.k = k, args.n = args.parameter_row = n, args.groups = groups, args.bits = bits;
      args.x_dtype = args.y_dtype = xt;
      args.scale_dtype = st;
      args.shift = static_cast<uint8_t*>(shift.data) + i % copies * groups * n * shift_size;
      args.shift_mode = mode;
      args.shift_dtype = integers ? DType::kU8 : mode == ShiftMode::kTable ? DType::kF32 : st;
      args.scratch = scratch.data, args.scratch_bytes = scratch.bytes;
      calls.push_back(args);
    }
    return calls;
  }

  double bytes(int64_t m) const {
    return words * 4.0 + groups * n * (element_size(st) + shift_size) + (m * k + m * n) * element_size(xt);
  }

 private:
  const int bits;
  const int64_t k, n, groups, words;
  const bool integers;
  const DType xt, st;
  const ShiftMode mode;
  const int shift_size, copies;
  Buffer qw, scales, shift, x, y, scratch;
};

// Calls of a configuration as one graph, and what replays of it took.
class Graph {
 public:
  template <typename Config>
  Graph(const Config& config, const Device& device, const std::vector<MatmulArgs>& calls, cudaStream_t s)
      : calls(calls.size()), s(s) {
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    for (const MatmulArgs& args : calls) CHECK(launch(config, device, args, s));
    CHECK(cudaStreamEndCapture(s, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
  }
  ~Graph() {
    cudaGraphExecDestroy(exec);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
  }
  Graph(const Graph&) = delete;

  // Milliseconds.
  float replay(bool counts) {
    float ms;
    CHECK(cudaEventRecord(begin, s));
    CHECK(cudaGraphLaunch(exec, s));
    CHECK(cudaEventRecord(end, s));
    CHECK(cudaEventSynchronize(end));
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (counts) times.push_back(ms * 1000.f / calls);
    return ms;
  }
  // Of a call, in microseconds.
  float median() {
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
  }

 private:
  const size_t calls;
  const cudaStream_t s;
  cudaGraphExec_t exec;
  cudaEvent_t begin, end;
  std::vector<float> times;
};

void report(int64_t k, int64_t n, int64_t m, const Configuration& c, float us, double bytes) {
  std::printf("%ld %ld %ld %d %d %d %d %d %.2f %.0f\n", k, n, m, c.atoms, c.tiles, c.warps, c.cluster, c.ctas, us,
              bytes / us * 1e-3);
}

// `models`: of the kernels alone whose configuration follows from a model of costs.
int time_all(int bits, int64_t group, const std::string& types, const std::string& ms, const std::string& shapes,
             const std::string& shift_name, bool models) {
  Device device;
  CHECK(current_device(&device));
  cudaStream_t s;
  CHECK(cudaStreamCreate(&s));
  for (const std::string& shape : split(shapes)) {
    const int64_t k = std::atoll(shape.c_str()), n = std::atoll(shape.c_str() + shape.find('x') + 1);
    int64_t most = 0;
    for (const std::string& m_text : split(ms)) most = std::max<int64_t>(most, std::atoll(m_text.c_str()));
    const Operands operands(bits, group, types, shift_name, k, n, most, int64_t{220} << 20);  // four times the L2
    for (const std::string& m_text : split(ms)) {
      const int64_t m = std::atoll(m_text.c_str());
      const std::vector<MatmulArgs> calls = operands.calls(m, 24);
      const auto time = [&](const Configuration& config) {
        if (launch(config, device, calls[0], s) != cudaSuccess) return;
        Graph graph(config, device, calls, s);
        float total = 0.f;
        for (int i = 0; i < 8; ++i) {
          const float took = graph.replay(i > 0);
          if (i > 1 && (total += took) > 20.f) break;
        }
        report(k, n, m, config, graph.median(), operands.bytes(m));
      };
      for (int tiles : {1, 2})
        for (int atoms : {1, 2, 4})
          for (int warps : {4, 5, 6, 7, 8, 10, 12, 14, 16})
            for (int cluster : {1, 2, 4, 8})
              for (int ctas : {1, 2, 3, 4}) {
                if (models || m > 16 || tiles != (m <= 8 ? 1 : 2) || warps > stream::max_warps(tiles)) continue;
                const int64_t all = ceil_div(n, 16 * atoms) * cluster;
                if (all <= device.multiprocessors * (ctas - 1) || all < device.multiprocessors / 2) continue;
                if (warps * ctas < 8 || warps * ctas > 24) continue;
                time({atoms, tiles, warps, cluster, ctas});
              }
      for (int cluster : {1, 2, 4}) {
        if (models || device.architecture != 90 || !decode::supports(calls[0])) continue;
        time({-1, std::min(static_cast<int>(ceil_div(n, kAtomN)), device.multiprocessors / cluster), 0, cluster, 1});
      }
      for (int cluster : {1, 2, 4}) {
        if (device.architecture != 90 || !resident::supports(calls[0])) continue;
        const int multiprocessors = cluster == 4 ? device.multiprocessors * 10 / 11 : device.multiprocessors;
        const int parts = std::min(static_cast<int>(ceil_div(n, kAtomN)), multiprocessors / cluster);
        for (int atoms : {1, 2, 4}) time({-4, parts, atoms, cluster, 1});
      }
      for (int tokens : kWarpgroupTokens)
        for (int warpgroups : {1, 2, 3, 4})
          for (int cluster : {1, 2, 3, 4, 6, warpgroup::kEvenly}) {
            if (device.architecture != 90 || !warpgroup::supports(calls[0])) continue;
            if ((tokens < m && tokens < 64) || tokens >= 4 * m + 8) continue;
            if (tokens >= 2 * m + 32 || (ceil_div(m, tokens) > 2 && tokens < (type_of(types) == DType::kF32 ? 64 : 96)))
              continue;
            const int64_t all = ceil_div(n, 64 * warpgroups) * ceil_div(m, tokens) * std::max(cluster, 1);
            if ((all > 4 * device.multiprocessors && cluster > 1) || all < device.multiprocessors / 3) continue;
            time({0, tokens / 8, warpgroups, cluster, 1});
            if (cluster == warpgroup::kEvenly) time({0, tokens / 8, warpgroups, cluster, 2});
          }
      for (int tokens : {32, 64, 128})
        for (int splits = 1; splits <= 16; ++splits) {
          if (device.architecture < 80 || device.architecture == 90 || !mma::supports(calls[0]) || m <= 8) continue;
          if (tokens > 32 && tokens >= 2 * m) continue;
          const int ctas = mma::kCtas * device.multiprocessors;
          const int64_t rest = ceil_div(m, tokens) * ceil_div(n, mma::kCtaOutputs) % ctas;
          if (splits > 1 && (rest * splits > ctas || splits * 4 > k / mma::kStageInputs)) continue;
          time({-3, tokens / 8, splits, 1, mma::kCtas});
        }
      for (int tokens : kTiledTokens)
        for (int splits = 1; splits <= 8; ++splits) {
          if (device.architecture != 90 || !tiled::supports(calls[0]) || m <= 16) continue;
          if (tokens < 128 || tokens >= m + 64 || splits * 4 > k / tiled::kStageInputs) continue;
          time({-2, tokens / 8, splits, tiled::kClusterCtas, 1});
        }
      std::fflush(stdout);
    }
  }
  return 0;
}

// Products and some of their configurations, a line each of standard input: BITS GROUP X K N M SHIFT, and for every
// configuration five numbers as `time` prints them, or three times as many of two kernels. Configurations take turns,
// and the GPU rests for as long as it works, so that none is timed at lower clocks than others.
int race() {
  constexpr int kTurns = 5;  // of which the first is not counted
  Device device;
  CHECK(current_device(&device));
  cudaStream_t s;
  CHECK(cudaStreamCreate(&s));
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    int bits;
    int64_t group, k, n, m;
    std::string x, shift;
    words >> bits >> group >> x >> k >> n >> m >> shift;
    const Operands operands(bits, group, x, shift, k, n, m, int64_t{110} << 20);  // twice the L2
    const std::vector<MatmulArgs> calls = operands.calls(m, 4);
    std::vector<std::pair<Configuration, std::unique_ptr<Graph>>> graphs;
    const auto read = [&](Configuration& c) { words >> c.atoms >> c.tiles >> c.warps >> c.cluster >> c.ctas; };
    for (;;) {
      Tried c{};
      read(c);
      if (!words) break;
      if (c.atoms == kOfTwo) read(c.first), read(c.second);
      if (launch(c, device, calls[0], s) != cudaSuccess) continue;
      graphs.emplace_back(c, std::make_unique<Graph>(c, device, calls, s));
    }
    for (int turn = 0; turn < kTurns; ++turn) {
      for (auto& [config, graph] : graphs) {
        const float ms = graph->replay(turn > 0);
        std::this_thread::sleep_for(std::chrono::duration<float, std::milli>(ms));
      }
    }
    for (auto& [config, graph] : graphs) report(k, n, m, config, graph->median(), operands.bytes(m));
    std::printf("\n");
    std::fflush(stdout);
  }
  return 0;
}

int main(int argc, char** argv) {
  if (argc >= 2 && argc <= 4 && std::strcmp(argv[1], "check") == 0) {
    return check(argc >= 3 ? std::atoi(argv[2]) : 1, argc == 4 ? argv[3] : nullptr);
  }
  if (argc >= 7 && argc <= 9 && std::strcmp(argv[1], "time") == 0) {
    return time_all(std::atoi(argv[2]), std::atoll(argv[3]), argv[4], argv[5], argv[6],
                    argc >= 8 ? argv[7] : "symmetric", argc == 9 && std::strcmp(argv[8], "models") == 0);
  }
  if (argc == 2 && std::strcmp(argv[1], "race") == 0) return race();
  std::fprintf(stderr,
               "usage: kernel_sweep check [EVERY [KERNEL]] | time BITS GROUP X MS SHAPES [SHIFT [models]] | race\n");
  return 2;
}
