// Convolution in groups of features, with packed weights: depthwise by multiply-adds (depthwise_conv.cuh), others on
// tensor cores (grouped_conv.cuh, and on Hopper band_conv.cuh, which is for dense ones of few inputs too).
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

namespace bands {

constexpr int kOutputs = 64;      // of a CTA, and as many inputs that their groups reach into
constexpr int kPlaces = 128;      // of a tile, see band_conv.cuh
constexpr int kPlaceBytes = 128;  // of a place in shared memory
constexpr int kMostPitch = 256;   // places that are copied at once
constexpr int kLeastBands = 2, kMostBands = 3;
// Shared memory: the barriers, which keep bands aligned for the 128-byte swizzle, and all but weights and bands.
constexpr int kBarrierBytes = 1024, kFixedBytes = 18 << 10, kMostSharedBytes = 227 << 10;

// How images are laid out: one below the other, with zeros that neighbours share.
struct Layout {
  int pitch, rows;  // of an image with its padding
  int64_t places;   // up to the last pixel of the result
};
Layout layout_of(const DirectConvGeometry& geometry);
// Rows that the windows of a tile meet at most, and what they take.
int band_rows(const DirectConvGeometry& geometry);
int band_bytes(const DirectConvGeometry& geometry);
int64_t shared_bytes(const DirectConvArgs& args, int bands);
// CTAs that share the tiles of 64 outputs.
int strip_ctas(const DirectConvArgs& args, int multiprocessors);

// What it takes, in microseconds.
struct Costs {
  float start;      // of a kernel
  float weights;    // of a CTA, for each input of a group
  float tile, tap;  // for a tile, and for each of its taps
  float memory;     // bytes of x and y per microsecond
};
float expected_us(const DirectConvArgs& args, int multiprocessors, const Costs& costs);

// 16-bit x, no strides, and groups of as many outputs as inputs, of which 64 hold a whole number; or one group of so
// many inputs, and any outputs.
bool supports(const DirectConvArgs& args, int architecture);
cudaError_t launch(const DirectConvArgs& args, int multiprocessors, cudaStream_t stream);
cudaError_t launch_bf16(const DirectConvArgs& args, int multiprocessors, cudaStream_t stream);
cudaError_t launch_f16(const DirectConvArgs& args, int multiprocessors, cudaStream_t stream);

}  // namespace bands

// Enqueues the convolution on `stream`; cudaErrorNotSupported where there is no kernel for it.
cudaError_t launch_direct_conv(const DirectConvArgs& args, cudaStream_t stream);

}  // namespace wonly
