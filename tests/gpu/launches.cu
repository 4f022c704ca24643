// Launches every kernel as the custom calls do, for compute-sanitizer (tests/reliability sanitize-gpu): small operands
// of odd shapes, of every type and scheme, some for each kernel and configuration that is chosen between. What comes
// out is tested elsewhere; here it only has to be the same twice.
//
//   launches [EVERY [PART PARTS]]    one case in EVERY, and how many there were; of those one part of PARTS, from 0

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../../benchmarks/check.h"
#include "abi.h"
#include "cuda/conv.h"
#include "cuda/direct_conv.h"
#include "cuda/matmul.h"
#include "cuda/matmul_transposed.h"
#include "cuda/quantize.h"
#include "cuda/quantize_activation.h"
#include "cuda/quantized_matmul.h"
#include "cuda/ragged.h"
#include "cuda/scales_gradient.h"
#include "dequant/selftest.h"
#include "layout.h"

using namespace wonly;

namespace {

constexpr DType kTypes[] = {DType::kBF16, DType::kF16, DType::kF32};
uint64_t state = 1;
int every = 1, part = 0, parts = 1, seen = 0, chosen = 0, cases = 0, wrong = 0;

uint32_t random_word() {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<uint32_t>(state >> 32);
}

// Device memory of one case.
class Case {
 public:
  ~Case() {
    for (void* buffer : buffers_) cudaFree(buffer);
  }
  void* room(int64_t bytes) {
    if (!runs_) return nullptr;
    void* buffer;
    CHECK(cudaMalloc(&buffer, std::max<int64_t>(bytes, 16)));
    CHECK(cudaMemset(buffer, 0, std::max<int64_t>(bytes, 16)));
    buffers_.push_back(buffer);
    return buffer;
  }
  void* copy(const void* from, int64_t bytes) {
    void* const to = room(bytes);
    if (runs_) CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
    return to;
  }
  void* words(int64_t count) {
    std::vector<uint32_t> host(runs_ ? count : 0);
    for (uint32_t& word : host) word = random_word();
    return copy(host.data(), count * 4);
  }
  void* bytes(int64_t count) { return words(ceil_div(count, 4)); }
  void* numbers(int64_t count, DType type, float low = -1, float high = 1) {
    if (type == DType::kU8) return bytes(count);
    std::vector<uint8_t> host(runs_ ? count * element_size(type) : 0);
    for (int64_t i = 0; runs_ && i < count; ++i) {
      const float v = low + (high - low) * (random_word() * 0x1p-32f);
      const __nv_bfloat16 b = __float2bfloat16(v);
      const __half h = __float2half(v);
      const void* const from = type == DType::kF32    ? static_cast<const void*>(&v)
                               : type == DType::kBF16 ? static_cast<const void*>(&b)
                                                      : static_cast<const void*>(&h);
      std::memcpy(host.data() + i * element_size(type), from, element_size(type));
    }
    return copy(host.data(), count * element_size(type));
  }

  // Runs it twice.
  template <typename Launch>
  void run(const char* what, const void* result, int64_t bytes, Launch&& launch) {
    if (!runs_) return;
    std::fprintf(stderr, "%s, case %d\n", what, seen);  // which one does not end
    std::vector<uint8_t> first(bytes), second(bytes);
    for (std::vector<uint8_t>* to : {&first, &second}) {
      CHECK(launch());
      CHECK(cudaMemcpy(to->data(), result, bytes, cudaMemcpyDeviceToHost));
    }
    ++cases;
    if (first != second) {
      ++wrong;
      const long at = std::mismatch(first.begin(), first.end(), second.begin()).first - first.begin();
      std::printf("%s, case %d: not the same twice, first at byte %ld of %ld\n", what, seen, at,
                  static_cast<long>(bytes));
    }
  }

 private:
  // By a hash: schemes, strides and directions go by the number of the case too.
  bool runs_ = (static_cast<uint32_t>(++seen) * 2654435761u >> 16) % static_cast<uint32_t>(every) == 0 &&
               chosen++ % parts == part;
  std::vector<void*> buffers_;
};

// Scheme 0: symmetric, 1: u8 zeros, 2: float zeros, 3: offsets, 4: a table. Every third case has float32 scales.
MatmulArgs product(Case& c, int64_t batch, int64_t m, int64_t k, int64_t n, int64_t group, int bits, DType type,
                   int scheme, bool transposed = false, int64_t weights = 0) {
  const int64_t groups = group ? k / group : 1, matrices = weights ? weights : batch;
  const int64_t words = ceil_div(n, kTileN) * ceil_div(k, tile_k(bits)) * kTileWords;
  MatmulArgs args{};
  args.x = c.numbers(batch * m * (transposed ? n : k), type);
  args.qw = static_cast<uint32_t*>(c.words(matrices * words));
  args.x_dtype = args.y_dtype = type;
  args.scale_dtype = args.shift_dtype = seen % 3 == 0 ? DType::kF32 : type;
  args.scales = c.numbers(matrices * groups * n, args.scale_dtype, 0.01f, 0.02f);
  args.shift_mode = scheme == 0   ? ShiftMode::kNone
                    : scheme <= 2 ? ShiftMode::kZeros
                    : scheme == 3 ? ShiftMode::kOffsets
                                  : ShiftMode::kTable;
  if (scheme == 1) args.shift_dtype = DType::kU8;
  if (scheme == 4) args.shift_dtype = DType::kF32;
  if (scheme > 0) args.shift = c.numbers(scheme == 4 ? 16 : matrices * groups * n, args.shift_dtype);
  args.has_bias = !transposed && scheme % 2 == 0;
  args.bias = c.numbers(n, DType::kF32);
  args.bias_dtype = DType::kF32;
  args.activation = transposed ? Activation::kNone : static_cast<Activation>(scheme);
  args.batch = batch, args.m = m, args.k = k, args.n = args.parameter_row = n, args.groups = groups, args.bits = bits;
  args.x_batch_stride = m * (transposed ? n : k);
  args.qw_batch_stride = words;
  args.scales_batch_stride = args.shift_batch_stride = groups * n;
  if (scheme == 4) args.shift_batch_stride = 0;
  args.y = c.room(batch * m * (transposed ? k : n) * 4);
  args.scratch_bytes = 24 << 20;
  args.scratch = c.room(args.scratch_bytes);
  return args;
}

void products() {
  const auto run = [](DType type, int bits, int64_t m, int64_t k, int64_t n, int64_t group, int scheme) {
    Case c;
    const MatmulArgs args = product(c, 1 + (k == 256), m, k, n, group, bits, type, scheme);
    c.run("product", args.y, args.batch * m * n * element_size(type), [&] { return launch_matmul(args, nullptr); });
  };
  for (const DType type : kTypes) {
    for (const int bits : {4, 8}) {
      for (const int64_t m : {1, 5, 20, 70, 140}) {
        run(type, bits, m, 256, 136, 64, seen % 4);
        run(type, bits, m, 1024, 264, 128, seen % 4);
        run(type, bits, m, 104, 70, 0, seen % 4);
        run(type, bits, m, 1024, 1001, 128, seen % 4);  // rows of scales and results that begin anywhere
        run(type, bits, m, 4096, 137, 64, seen % 4);    //
      }
    }
  }
  for (const int scheme : {0, 1, 2, 3}) {
    run(DType::kBF16, 4, 1 + scheme % 2, 2048, 13568, 128, scheme);          // matmul_decode
    run(DType::kF16, 8, 2 - scheme % 2, 4104, 3072, 0, scheme);              //
    run(DType::kBF16, 4, 2 - scheme % 2, 4096, 2050, 64, scheme);            //
    run(DType::kF16, 8, 2, 4096, 3070, 64 << scheme % 2, scheme);            // or, of integers, matmul_resident
    run(DType::kBF16, 4, 3 + scheme, 1088, 1001, 32 << scheme % 2, scheme);  // matmul_resident
    run(DType::kF16, 4, 8 - scheme, 2176, 1001, 128, scheme);                //
    run(DType::kBF16, 4, 9 + scheme, 1088, 1001, 64 >> scheme % 2, scheme);  //
    run(DType::kF16, 4, 2 + scheme, 4096, 264, 128 >> scheme % 2, scheme);   // one strip at a time, one block each
    run(DType::kBF16, 4, 8 - scheme, 8192, 1032, 128, scheme);               // two
    run(DType::kF16, 4, 1 + scheme, 1024, 4104, 32 << scheme % 3, scheme);   // two strips, one block
    run(DType::kBF16, 4, 3 + 3 * scheme, 4160, 2056, 64, scheme);            // two, or any of sixteen tokens
    run(DType::kF16, 4, 7 - scheme, 2176, 2200, 128 >> scheme % 2, scheme);  //
    run(DType::kBF16, 4, 5 + scheme, 9216, 2104, 32 << scheme, scheme);      // any
    run(DType::kBF16, 8, 1 + scheme, 1088, 1001, 32 << scheme % 2, scheme);  // of eight bits
    run(DType::kF16, 8, 9 + scheme, 2176, 1001, 128 >> scheme % 2, scheme);  //
    run(DType::kBF16, 8, 8 - scheme, 4096, 1032, 32 << scheme, scheme);      //
    run(DType::kF16, 8, 2 + scheme, 2048, 4104, 64, scheme);                 //
    run(DType::kBF16, 8, 5 + 3 * scheme, 6400, 2104, 64, scheme);            //
    run(DType::kF32, 8, 2 + 2 * scheme, 1088, 1002, 32 << scheme, scheme);   //
    run(DType::kF16, 4 + scheme % 2 * 4, 140, 192, 3070, 64, scheme);        // matmul_tiled
    run(DType::kBF16, 8 - scheme % 2 * 4, 300, 512, 2050, 32, scheme);       // several clusters for a tile
    run(DType::kBF16, 4, 70 + 20 * scheme, 8192, 2040, 128, scheme);         // matmul_warpgroup in two teams
    run(DType::kF16, 4, 99 + scheme * 50, 384, 12728, 128, scheme / 2 * 3);  // and with CTAs in pairs
    run(DType::kBF16, 4, 131 + 15 * scheme, 640, 12800, 128, scheme);        // and tiles of 136 tokens and more
    run(DType::kF16, 8 - scheme % 2 * 4, 150 - scheme / 2 * 15, 640, 12728, 32 << scheme % 2, scheme);  //
    run(DType::kBF16, 4, 50 + 30 * scheme, 512, 24568 - 8 * scheme, 128, scheme / 2 * 3);  // and with 192 outputs
    run(DType::kF16, 8 - scheme % 2 * 4, 128 + 64 * scheme, 512, 25328, 32 << scheme % 3, scheme);  //
    run(DType::kBF16, 4, 247 + scheme, 1024, 17912 - 8 * scheme, 128, scheme);  // two kernels of some outputs each
    run(DType::kF16, 4, 69 + scheme, 1536, 25776, 128, scheme);                 //
    run(DType::kBF16, 8, 160 + 8 * scheme, 1024, 26720, 128, scheme);           //
    run(DType::kBF16, 4, 40 + 7 * scheme, 4096, 8712 - 8 * scheme, 128 >> scheme % 2, scheme);  // even shares
    run(DType::kBF16, 4, 20 + scheme, 3072, 20000 + 8 * scheme, 64 << scheme % 2, scheme);      // by two CTAs each
    run(DType::kF16, 4, 185 + 15 * scheme, 7168, 6600, 128, scheme % 2);                        // and 192 outputs
    run(DType::kF32, 4, 33 + 9 * scheme, 2048, 10232, 128, scheme);                             //
    for (const int64_t m : {8, 13, 31, 40, 90, 700}) {  // float32 activations in pieces
      run(DType::kF32, 4, m, 2112, 1100, m % 2 ? 64 : 32, scheme);
      run(DType::kF32, 8 - scheme / 2 * 4, m, 3000 + m % 2 * 72, 2060, m % 2 ? 256 : 0, scheme);
    }
  }
}

void products_with_tables() {
  for (const DType type : kTypes) {
    for (const int64_t m : {1, 5, 12, 20, 70, 300}) {
      for (const auto& [k, n, group] : {std::array<int64_t, 3>{256, 136, 64},
                                        {512, 2050, 32},
                                        {104, 70, 0},
                                        {4096, 2056, 128},
                                        {4160, 4104, 64},
                                        {2048, 10240, 64}}) {
        Case c;
        const MatmulArgs args = product(c, 1 + (k == 4160), m, k, n, group, 4, type, 4);
        c.run("table", args.y, args.batch * m * n * element_size(type), [&] { return launch_matmul(args, nullptr); });
      }
      for (const auto& [k, n, group] : {std::array<int64_t, 3>{256, 136, 64}, {640, 2056, 32}, {104, 72, 0}}) {
        Case c;
        const MatmulArgs args = product(c, 1, m, k, n, group, 4, type, 4, true);
        c.run("transposed table", args.y, m * k * element_size(type),
              [&] { return launch_matmul_transposed(args, nullptr); });
      }
    }
  }
}

void transposed_products() {
  for (const DType type : kTypes) {
    for (const int bits : {4, 8}) {
      for (const int64_t m : {1, 12, 20, 70, 150, 300}) {
        for (const auto& [k, n, group] : {std::array<int64_t, 3>{256, 136, 64}, {640, 528, 128}, {128, 1104, 32}}) {
          Case c;
          const MatmulArgs args = product(c, 1 + (k == 256), m, k, n, group, bits, type, seen % 4, true);
          c.run("transposed", args.y, args.batch * m * k * element_size(type),
                [&] { return launch_matmul_transposed(args, nullptr); });
        }
      }
    }
  }
}

void ragged_products() {
  for (const bool transposed : {false, true}) {
    for (const DType type : kTypes) {
      for (const int bits : {4, 8}) {
        for (const auto& [experts, m] : {std::array<int64_t, 2>{4, 3},
                                         {4, 14},
                                         {4, 20},
                                         {40, 36},
                                         {300, 330},  // more tiles than multiprocessors
                                         {4, 60},
                                         {4, 110},
                                         {4, 230},
                                         {4, 600},
                                         {4, 1600}}) {
          for (const bool ids : {false, true}) {
            Case c;
            const int scheme = bits == 4 ? seen % 5 : seen % 4;
            const int64_t k = 256, n = ids ? 136 : 144;  // of rows of bytes whose length is no multiple of 16, and is
            RaggedArgs args{};
            args.product = product(c, 1, m, k, n, 32 << seen % 3, bits, type, scheme, transposed, experts);
            args.product.batch = args.product.m = args.product.x_batch_stride = 0;  // rows are counted by the plan
            args.experts = experts, args.m = m, args.repeat = 1;
            args.row_mode = ids ? RowMode::kIds : RowMode::kSizes;
            std::vector<int32_t> rows(ids ? m : experts);
            for (int32_t& row : rows) {
              row = ids ? static_cast<int32_t>(random_word() % (experts + 2)) - 1
                        : static_cast<int32_t>(random_word() % (experts > 100 ? 3 : static_cast<uint32_t>(m / 2 + 1)));
            }
            args.rows = static_cast<int32_t*>(c.copy(rows.data(), rows.size() * 4));
            args.scratch_words = m * (kRaggedScratchPerRow + 1 + std::max(k, n) + k / 32) +
                                 experts * kRaggedScratchPerExpert + 2 * kRaggedScratchFixed;
            args.scratch_words += transposed_warpgroup::float32_bytes(args.product, 0, experts) / 4;
            args.scratch = static_cast<int32_t*>(c.room(args.scratch_words * 4));
            c.run("ragged", args.product.y, m * (transposed ? k : n) * element_size(type), [&] {
              return transposed ? launch_ragged_matmul_transposed(args, nullptr) : launch_ragged_matmul(args, nullptr);
            });
          }
        }
      }
    }
  }
}

void scales_gradients() {
  for (const DType type : {DType::kBF16, DType::kF16}) {
    for (const int bits : {4, 8}) {
      for (const int block : {32, 64, 128}) {
        for (const int64_t m : {1, 50, 200, 700}) {
          for (const int64_t experts : {0, 5, 40}) {
            Case c;
            const int64_t k = seen % 2 ? 328 : 640, n = seen % 3 ? 264 : 72,
                          batch = experts > 0 ? experts : 1 + seen % 2;
            ScalesGradientArgs args{};
            args.batch = batch, args.m = m, args.k = k, args.n = n, args.bits = bits, args.block = block;
            args.x_dtype = type;
            const int64_t entries = experts > 0 ? 1 : batch, words = ceil_div(n, kTileN) * ceil_div(k, tile_k(bits));
            args.x = c.numbers(entries * m * k, type);
            args.dy = c.numbers(entries * m * n, type);
            args.qw = static_cast<const uint32_t*>(c.words(batch * words * kTileWords));
            args.x_batch_stride = entries > 1 ? m * k : 0;
            args.dy_batch_stride = entries > 1 ? m * n : 0;
            args.qw_batch_stride = batch > 1 ? words * kTileWords : 0;
            if (bits == 4 && seen % 4 == 0)
              args.table = static_cast<const float*>(c.numbers(kTableEntries, DType::kF32));
            if (experts > 0) {
              std::vector<int32_t> limits(experts + 1);
              for (int64_t e = 1; e <= experts; ++e) limits[e] = static_cast<int32_t>(random_word() % (m + 1));
              std::sort(limits.begin(), limits.end());
              args.limits = static_cast<const int32_t*>(c.copy(limits.data(), limits.size() * 4));
            }
            const int64_t bytes = batch * ceil_div(k, block) * n * 4;
            args.y = static_cast<float*>(c.room(bytes));
            c.run("gradient of scales", args.y, bytes, [&] { return launch_scales_gradient(args, nullptr); });
          }
        }
      }
    }
  }
}

void convolutions() {
  for (const DType type : {DType::kBF16, DType::kF16}) {
    for (const int bits : {4, 8}) {
      for (const int images : {1, 9}) {
        for (const auto& [k, n, group] :
             {std::array<int64_t, 3>{64, 136, 64}, {40, 300, 0}, {512, 70, 128}, {192, 144, 64}, {128, 80, 0}}) {
          Case c;
          const int spread = 1 + seen / 2 % 2, stride = spread > 1 ? 1 : 1 + seen % 2, size = 9;
          const int result = spread > 1 ? spread * size : (size - 1) / stride + 1;
          ConvArgs args{};
          args.product = product(c, 1, images * size * size, k, n, group, bits, type, seen % 4, false, 9);
          args.product.m = images * result * result;
          args.product.y = c.room(args.product.m * n * 4);
          const ConvAxis axis{size, result, 3, stride, 1, 1, spread};
          args.geometry = {images, axis, axis};
          c.run("convolution", args.product.y, args.product.m * n * 2, [&] { return launch_conv(args, nullptr); });
        }
      }
    }
  }
}

void convolutions_in_groups() {
  for (const DType type : kTypes) {
    for (const int bits : {4, 8}) {
      for (const int images : {1, 40}) {
        for (const auto& [k, groups, n] : {std::array<int, 3>{1, 96, 96},
                                           {1, 33, 66},
                                           {1, 70, 70},
                                           {4, 32, 128},
                                           {24, 3, 72},
                                           {3, 8, 40},
                                           {64, 2, 64}}) {
          if (type == DType::kF32 && k > 1) continue;
          Case c;
          const int window = k > 1 ? 3 : 3 + seen % 5, deep = k > 1 ? 1 : 2, stride = 1 + seen % 3, size = 13,
                    result = (size - 1) / stride + 1;
          const int taps = deep * window * window;
          DirectConvArgs args{};
          args.product = product(c, 1, images * size * size * groups, k, n, 0, bits, type,
                                 bits == 4 ? seen % 5 : seen % 4, false, taps);
          args.product.m = images * result * result;
          const ConvAxis axis{size, result, window, stride, window / 2, 1};
          args.geometry = {images, groups, {1, 1, deep, 1, 0, 1}, axis, axis};
          c.run("convolution in groups", args.product.y, args.product.m * n * element_size(type),
                [&] { return launch_direct_conv(args, nullptr); });
        }
      }
    }
  }
}

void quantized_products() {
  for (const int codes : {0, 1, 2, 3}) {  // int8, int8 with offsets, e4m3, static
    for (const int bits : {4, 8}) {
      for (const auto& [m, k, n, group] :
           {std::array<int64_t, 4>{5, 256, 72, 0}, {200, 512, 136, 128}, {130, 208, 520, 0}, {300, 1024, 264, 256}}) {
        if ((codes == 2 && bits == 8) || (codes == 3 && group)) continue;
        Case c;
        const int64_t groups = group ? k / group : 1;
        QuantizedMatmulArgs args{};
        args.product = product(c, 1, m, k, n, group, bits, DType::kBF16, codes == 3 ? 0 : seen % 4);
        args.k_stride = ceil_div(k, 16) * 16, args.x_groups = groups;
        args.float8 = codes == 2;
        QuantizeActivationArgs x{};
        x.x = args.product.x;
        x.codes = c.room(m * args.k_stride), x.sums = c.room(m * groups * 4);
        x.scales = static_cast<float*>(c.room(m * groups * 4));
        if (codes == 1) x.offsets = static_cast<float*>(c.room(m * groups * 4));
        x.m = m, x.k = k, x.groups = groups, x.x_dtype = DType::kBF16, x.float8 = args.float8;
        args.product.x = x.codes, args.product.x_batch_stride = m * args.k_stride;
        args.x_scales = x.scales, args.x_sums = x.sums, args.x_offsets = x.offsets;
        args.x_scales_batch_stride = args.x_sums_batch_stride = m * groups;
        if (codes == 3) {
          args.product.scales = c.numbers(n, DType::kF32, 0.001f, 0.002f);
          args.product.scale_dtype = args.product.y_dtype = DType::kF32;
          args.product.has_bias = false, args.product.activation = Activation::kNone;
          args.fused = static_cast<int32_t*>(c.room(n * 4));
          args.zero = 3, args.low = -128, args.high = 127;
          args.x_scales = nullptr, args.x_sums = nullptr;
        }
        c.run("quantized", args.product.y, m * n * (codes == 3 ? 1 : 2), [&] {
          const cudaError_t error = launch_quantize_activation(x, nullptr);
          return error != cudaSuccess ? error : launch_quantized_matmul(args, nullptr);
        });
      }
    }
  }
}

void conversions() {
  for (const DType type : kTypes) {
    for (const int bits : {4, 8}) {
      for (const int mode : {0, 1, 2, 3}) {
        for (const auto& [k, n, group] : {std::array<int64_t, 3>{256, 67, 32}, {1024, 136, 256}, {333, 70, 0}}) {
          Case c;
          const int64_t groups = group ? k / group : 1;
          const MatmulArgs weight = product(c, 2, 1, k, n, group, bits, type, mode);
          QuantizeArgs args{};
          args.w = c.numbers(2 * k * n, type);
          args.qw = const_cast<uint32_t*>(weight.qw), args.scales = const_cast<void*>(weight.scales);
          args.shift = const_cast<void*>(weight.shift);
          args.batch = 2, args.k = k, args.n = n, args.groups = groups, args.bits = bits;
          args.w_dtype = args.scale_dtype = type, args.mode = static_cast<QuantizeMode>(mode);
          DequantizeArgs back{};
          back.qw = weight.qw, back.scales = weight.scales, back.shift = weight.shift;
          back.w = c.room(2 * k * n * element_size(type));
          back.batch = 2, back.k = k, back.n = n, back.groups = groups, back.bits = bits;
          back.qw_batch_stride = weight.qw_batch_stride;
          back.scales_batch_stride = back.shift_batch_stride = groups * n;
          back.scale_dtype = back.w_dtype = type, back.shift_dtype = mode == 1 ? DType::kU8 : type;
          back.shift_mode = weight.shift_mode;
          c.run("quantize", back.w, 2 * k * n * element_size(type), [&] {
            const cudaError_t error = launch_quantize(args, nullptr);
            return error != cudaSuccess ? error : launch_dequantize(back, nullptr);
          });
        }
      }
    }
  }
  for (int i = 0; i < kSelftestConversions; ++i) {
    Case c;
    const auto* const in = static_cast<const uint32_t*>(c.words(1000));
    auto* const out = static_cast<uint32_t*>(c.room(1000 * 4 * selftest_outputs(i)));
    c.run("conversion", out, 1000 * 4 * selftest_outputs(i),
          [&] { return launch_conversion_selftest(i, in, out, 1000, nullptr); });
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) every = std::max(1, std::atoi(argv[1]));
  if (argc > 3) part = std::atoi(argv[2]), parts = std::max(1, std::atoi(argv[3]));
  products();
  transposed_products();
  ragged_products();
  scales_gradients();
  convolutions();
  convolutions_in_groups();
  quantized_products();
  products_with_tables();
  conversions();
  std::printf("%d cases, %d wrong\n", cases, wrong);
  return wrong != 0;
}
