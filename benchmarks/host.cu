// Times what the host does to launch a product without JAX: the choice of a kernel, the description of its activations
// for the tensor copy engine, and the launch. One line for each "K N M" of the command line: these, microseconds, and
// those of a kernel that does nothing, launched in the same way with as many arguments.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "check.h"
#include "cuda/launch.h"
#include "cuda/matmul.h"
#include "cuda/tensor_map.h"
#include "layout.h"

using namespace wonly;

__global__ void nothing(const __grid_constant__ MatmulArgs, const __grid_constant__ CUtensorMap) {}

// The median of rounds that launch without waiting, for a call.
template <typename Launch>
double microseconds(Launch launch, cudaStream_t stream) {
  constexpr int kCalls = 16, kRounds = 101;
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int call = 0; call < kCalls; ++call) CHECK(launch());
    const std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - begin;
    CHECK(cudaStreamSynchronize(stream));
    times.push_back(taken.count() / kCalls);
  }
  std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
  return times[kRounds / 2];
}

int main(int argc, char** argv) {
  for (int i = 1; i + 2 < argc; i += 3) {
    MatmulArgs args{};
    args.k = std::atoll(argv[i]), args.n = args.parameter_row = std::atoll(argv[i + 1]),
    args.m = std::atoll(argv[i + 2]);
    args.batch = 1, args.groups = std::max<int64_t>(args.k / 128, 1), args.bits = 4;
    args.x_dtype = args.y_dtype = args.scale_dtype = DType::kBF16;
    args.scratch_bytes = 32 << 20;
    const int64_t words = ceil_div(args.n, kTileN) * ceil_div(args.k, tile_k(4)) * kTileWords;
    const auto zeros = [](int64_t bytes) {
      void* data = nullptr;
      CHECK(cudaMalloc(&data, static_cast<size_t>(bytes)));
      CHECK(cudaMemset(data, 0, static_cast<size_t>(bytes)));
      return data;
    };
    args.x = zeros(args.m * args.k * 2), args.y = zeros(args.m * args.n * 2), args.scratch = zeros(args.scratch_bytes);
    args.qw = static_cast<const uint32_t*>(zeros(words * 4)), args.scales = zeros(args.groups * args.n * 2);
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    LaunchShape shape;
    shape.grid = dim3(132);
    shape.threads = 384;
    shape.shared_bytes = 100 << 10;
    shape.early = true;
    const double us = microseconds([&] { return launch_matmul(args, stream); }, stream);
    const double bare_us =
        microseconds([&] { return launch_kernel(nothing, shape, stream, args, CUtensorMap{}); }, stream);
    std::printf("%ld %ld %ld %.2f %.2f\n", args.k, args.n, args.m, us, bare_us);
    CHECK(cudaStreamDestroy(stream));
    for (const void* data : {args.x, args.scales, static_cast<const void*>(args.qw), static_cast<const void*>(args.y),
                             static_cast<const void*>(args.scratch)}) {
      CHECK(cudaFree(const_cast<void*>(data)));
    }
  }
  return 0;
}
