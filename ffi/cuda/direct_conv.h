// Convolution in groups of features, with packed weights: depthwise by multiply-adds (depthwise_conv.cuh), others on
// tensor cores (grouped_conv.cuh).
#pragma once

#include "cuda/matmul.h"

namespace wonly {

// y[images, results, N] = act(sum over taps of x[images, sizes, groups * K] @ W[tap] + bias), where the outputs of a
// group meet its own K inputs alone.
struct DirectConvArgs {
  MatmulArgs product;  // k: inputs of a group; m: pixels of y; qw, scales and shift: of all taps; no batch
  DirectConvGeometry geometry;

  int taps() const { return geometry.depth.window * geometry.height.window * geometry.width.window; }
};

namespace depthwise {

// What a thread computes at once: outputs x columns x rows of the result.
enum class Strip {
  kLarge,   // 4 x 7 x 2
  kMedium,  // 4 x 4 x 1, of 16-bit x
  kSmall,   // 2 x 4 x 1
  kOdd,     // 1 x 4 x 1, for any number of outputs, and several of an input
  kPixel,   // 1 x 1 x 1, for any stride
};

struct Config {
  Strip strip;
  int block;  // outputs of a CTA
};

bool supports(const DirectConvArgs& args, int shared_bytes);
Config choose(const DirectConvArgs& args, int multiprocessors, int shared_bytes);
// cudaErrorInvalidConfiguration where `config` is none for the arguments.
cudaError_t launch(const DirectConvArgs& args, const Config& config, int multiprocessors, cudaStream_t stream);
cudaError_t launch_bf16(const DirectConvArgs& args, const Config& config, int multiprocessors, cudaStream_t stream);
cudaError_t launch_f16(const DirectConvArgs& args, const Config& config, int multiprocessors, cudaStream_t stream);
cudaError_t launch_f32(const DirectConvArgs& args, const Config& config, int multiprocessors, cudaStream_t stream);

}  // namespace depthwise

namespace grouped {

constexpr int kBlock = 32;        // outputs of a CTA; inputs that a lane group loads at once
constexpr int kStepBytes = 2048;  // of the weights of a step
constexpr int kMostSteps = 48;    // a tap and a block of inputs each

// Blocks of inputs that the groups of a CTA's outputs reach into, at most.
int input_blocks(const DirectConvArgs& args);
bool supports(const DirectConvArgs& args, int architecture, int shared_bytes);
// Runs of 8 pixels that a warp takes at once: 1 or kManyRuns.
constexpr int kManyRuns = 4;
int choose(const DirectConvArgs& args, int multiprocessors);
cudaError_t launch(const DirectConvArgs& args, int runs, int multiprocessors, cudaStream_t stream);
cudaError_t launch_bf16(const DirectConvArgs& args, int runs, int multiprocessors, cudaStream_t stream);
cudaError_t launch_f16(const DirectConvArgs& args, int runs, int multiprocessors, cudaStream_t stream);

}  // namespace grouped

// Enqueues the convolution on `stream`; cudaErrorNotSupported where there is no kernel for it.
cudaError_t launch_direct_conv(const DirectConvArgs& args, cudaStream_t stream);

}  // namespace wonly
