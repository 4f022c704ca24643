// Convolution without strides where 64 outputs meet no more than 64 inputs, on Hopper: dense ones of few inputs, and
// groups of features.
//
// A CTA keeps to 64 outputs. Their weights of all taps are dequantized once into shared memory, rounded to the type of
// x, as A operands of wgmma, with zeros where output and input are of different groups. It then walks over tiles of
// pixels, which two warpgroups multiply in turns: one stores its results while the other multiplies.
//
// Images are laid out one below the other, rows as wide as an image and its padding: as the zeros to the left of a row
// also stand to the right of the row before, and those above an image below the one before, a tap's pixel is at the
// same distance from every place. A tile is a run of places, some of which are no pixels of the result and dropped. Its
// band, the rows that its windows meet, is copied to shared memory once for all taps: a tap is the same band from
// another place on, as swizzling goes by addresses.
#pragma once

#include <type_traits>

#include "cuda/cluster_tiles.cuh"
#include "cuda/direct_conv.h"
#include "cuda/division.h"
#include "cuda/epilogue.cuh"
#include "cuda/grouped_conv.cuh"
#include "cuda/launch.h"
#include "cuda/ptx_sm90.cuh"
#include "cuda/tap_weights.cuh"
#include "cuda/tensor_map.h"
#include "cuda/wgmma.cuh"

namespace wonly::bands {

constexpr int kThreads = 2 * 128 + 32;  // two warpgroups that multiply and a warp that copies
constexpr int kTapBytes = kOutputs * kPlaceBytes;
constexpr int kStagedRows = 32;                                       // that a warpgroup writes at a time, as float32
constexpr int kPlacedRows = 64;                                       // or as 16 bits
constexpr int kStagedBytes = kStagedRows * tiles::kStagedStride * 4;  // of a warpgroup
static_assert(kStagedBytes >= kPlacedRows * kTileN * 2 && kBarrierBytes + 2 * kStagedBytes == kFixedBytes);

struct Params {
  grouped::Params grouped;
  Layout layout;
  int tiles, bands;      // bands: as many as there is room for
  int rows, band_bytes;  // of a band
  Divisor pitch, image;  // places of a row, rows of an image
  bool exact;            // sums that are no numbers may be due to other groups
};

// Where weight k of an output lies, in 16 bits: as wgmma reads rows of 128 bytes.
__device__ __forceinline__ int weight_at(int output, int k) {
  return output * 64 + ((k / 8) ^ (output % 8)) * 8 + k % 8;
}

template <typename X>
__global__ void __launch_bounds__(kThreads, 1)
    band_conv(const __grid_constant__ Params params, const __grid_constant__ CUtensorMap x_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  uint64_t* const full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* const empty = full + kMostBands;
  uint8_t* const weights = shared + kBarrierBytes;
  const MatmulArgs& args = params.grouped.conv.product;
  const DirectConvGeometry& geometry = params.grouped.conv.geometry;
  const int taps = params.grouped.taps;
  uint8_t* const staging = weights + taps * kTapBytes;
  uint8_t* const bands = staging + 2 * kStagedBytes;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  const int lane = threadIdx.x % 32;
  const int n0 = blockIdx.y * kOutputs;
  const int k = static_cast<int>(args.k), step = gridDim.x;

  if (threadIdx.x == 256) {
    ptx::prefetch_map(&x_map);
    for (int i = 0; i < kMostBands; ++i) {
      ptx::barrier_init(full + i, 1);
      ptx::barrier_init(empty + i, 4 * ptx::kArrivals);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();

  if (warp == 8) {
    const int channel = geometry.groups == 1 ? 0 : n0, row_bytes = params.layout.pitch * kPlaceBytes;
    int slot = 0;
    uint32_t phase = 1;
    for (int tile = blockIdx.x; tile < params.tiles; tile += step) {
      ptx::barrier_wait(empty + slot, phase);
      int rest, y;
      int image = params.image.divide(params.pitch.divide(tile * kPlaces, &rest), &y);
      if (ptx::elect_one()) {
        ptx::barrier_expect(full + slot, params.rows * row_bytes);
        uint8_t* to = bands + slot * params.band_bytes;
        for (int i = 0; i < params.rows; ++i, to += row_bytes) {
          ptx::tensor_copy_4d(to, &x_map, channel, -geometry.width.low, y - geometry.height.low, image, full + slot);
          if (++y == params.layout.rows) {
            y = 0;
            ++image;
          }
        }
      }
      if (++slot == params.bands) {
        slot = 0;
        phase ^= 1;
      }
    }
    return;
  }

  if (k % 64 != 0) {  // else every weight is written
    for (int i = threadIdx.x; i < taps * kTapBytes / 16; i += 256) reinterpret_cast<uint4*>(weights)[i] = uint4{};
    ptx::named_sync<3, 256>();
  }
  {
    const int output = threadIdx.x / 4, n = n0 + output;  // so that no two lanes of a warp write to the same bank
    const int begin = geometry.groups == 1 ? 0 : n / k * k - n0;  // the group's first input, of the CTA's
    if (n < args.n) {
      dequantize_taps<X, 9>(args, taps, n, threadIdx.x % 4, kTapBytes / 4, reinterpret_cast<uint32_t*>(weights),
                            [&](int input) { return weight_at(output, begin + input); });
    }
    ptx::fence_shared_for_async();
    ptx::named_sync<3, 256>();
  }

  const tiles::Consumer me{warp / 4, warp % 4};
  float* const staged = reinterpret_cast<float*>(staging + me.warpgroup * kStagedBytes);
  const bool plain = args.activation == Activation::kNone && args.y_dtype == args.x_dtype && args.n % 8 == 0;
  float bias[2] = {};
  if (args.has_bias) me.load_bias(args, 0, n0, bias);
  int slot = me.warpgroup % params.bands;
  uint32_t phase = me.warpgroup / params.bands % 2;
  for (int tile = blockIdx.x + me.warpgroup * step; tile < params.tiles; tile += 2 * step) {
    const int first = tile * kPlaces;
    int of_row;
    params.pitch.divide(first, &of_row);
    ptx::barrier_wait(full + slot, phase);
    // In turns with the other warpgroup.
    if (tile >= step) {
      if (me.warpgroup == 0) {
        ptx::named_sync<4, 256>();
      } else {
        ptx::named_sync<5, 256>();
      }
    }
    float acc[kPlaces / 2];
    uint64_t w = ptx::wgmma_descriptor(weights);
    uint64_t x = ptx::wgmma_descriptor(bands + slot * params.band_bytes + of_row * kPlaceBytes);
    ptx::wgmma_fence();
#pragma unroll 1
    for (int row = 0; row < geometry.height.window; ++row) {
      uint64_t at = x;
#pragma unroll 1
      for (int column = 0; column < geometry.width.window; ++column) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool more = i > 0 || row + column > 0;
          if constexpr (std::is_same_v<X, __half>) {
            ptx::WgmmaShared<kPlaces>::f16(acc, w + 2 * i, at + 2 * i, more);
          } else {
            ptx::WgmmaShared<kPlaces>::bf16(acc, w + 2 * i, at + 2 * i, more);
          }
        }
        w += kTapBytes >> 4;
        at += geometry.width.dilation * (kPlaceBytes >> 4);
      }
      x += geometry.height.dilation * params.layout.pitch * (kPlaceBytes >> 4);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::keep(acc);
    if (tile + step < params.tiles) {
      if (me.warpgroup == 0) {
        ptx::named_arrive<5, 256>();
      } else {
        ptx::named_arrive<4, 256>();
      }
    }
    ptx::warp_arrive(empty + slot, lane);
    slot += 2;
    while (slot >= params.bands) {
      slot -= params.bands;
      phase ^= 1;
    }

    const auto pixel = [&](int place) {  // of the result, or negative
      int column, row;
      const int image = params.image.divide(params.pitch.divide(first + place, &column), &row);
      const bool one = column < geometry.width.result && row < geometry.height.result && image < geometry.images;
      return one ? (image * geometry.height.result + row) * geometry.width.result + column : -1;
    };
    if (params.exact) {
      float all = 0.f;
#pragma unroll
      for (int i = 0; i < kPlaces / 2; ++i) all += acc[i];
      if (isnan(all)) {
        // By way of local memory: one copy of the code instead of one for every sum.
        float sums[kPlaces / 2];
#pragma unroll
        for (int i = 0; i < kPlaces / 2; ++i) sums[i] = acc[i];
#pragma unroll 1
        for (int i = 0; i < kPlaces / 2; ++i) {
          const int n = n0 + me.row() + i % 4 / 2 * 8, at = pixel(i / 4 * 8 + lane % 4 * 2 + i % 2);
          if (isnan(sums[i]) && at >= 0 && n < args.n) {
            sums[i] = grouped::exact_output<X>(params.grouped, at, n, 0.f);
          }
        }
#pragma unroll
        for (int i = 0; i < kPlaces / 2; ++i) acc[i] = sums[i];
      }
    }
    if (plain) {
      const auto pack = [&](int i) {
        return pack_pair(from_float<X>(acc[i] + bias[i % 4 / 2]), from_float<X>(acc[i + 1] + bias[i % 4 / 2]));
      };
      int pixels[kPlaces / 16];
#pragma unroll
      for (int i = 0; i < kPlaces / 16; ++i) pixels[i] = pixel(16 * i + me.stored_row());
      me.store_placed<kPlaces, kPlacedRows, true>(static_cast<int>(args.n), static_cast<uint16_t*>(args.y), n0, kPlaces,
                                                  staged, pack, [&](int i) { return pixels[i]; });
    } else {
      const Finish of(args, 0);
      me.store<kPlaces, kStagedRows>(
          of, n0, kPlaces, staged, [&](int i) { return make_float2(acc[i], acc[i + 1]); },
          [&](int i, int64_t n, float (&values)[8], const float (&biases)[8]) {
            if (const int at = pixel(i); at >= 0) finish(of, at, n, values, biases);
          });
    }
  }
#else
  __trap();
#endif
}

template <typename X>
cudaError_t launch_typed(const DirectConvArgs& conv, int multiprocessors, cudaStream_t stream) {
  const MatmulArgs& args = conv.product;
  Params params{};
  params.grouped.conv = conv;
  params.grouped.outputs = static_cast<int>(args.n / conv.geometry.groups);
  params.grouped.features = static_cast<int>(args.k * conv.geometry.groups);
  params.grouped.taps = conv.taps();
  params.layout = layout_of(conv.geometry);
  params.tiles = static_cast<int>(ceil_div(params.layout.places, kPlaces));
  params.rows = band_rows(conv.geometry);
  params.band_bytes = band_bytes(conv.geometry);
  params.pitch = Divisor(params.layout.pitch);
  params.image = Divisor(params.layout.rows);
  params.exact = conv.geometry.groups > 1;
  params.bands = shared_bytes(conv, kMostBands) <= kMostSharedBytes ? kMostBands : kLeastBands;
  CUtensorMap map;
  if (cudaError_t error = describe_image_rows(conv, params.layout.pitch, &map); error != cudaSuccess) return error;
  LaunchShape shape;
  shape.threads = kThreads;
  shape.shared_bytes = static_cast<int>(shared_bytes(conv, params.bands));
  shape.grid =
      dim3(static_cast<unsigned>(strip_ctas(conv, multiprocessors)), static_cast<unsigned>(ceil_div(args.n, kOutputs)));
  return launch_kernel(band_conv<X>, shape, stream, params, map);
}

}  // namespace wonly::bands
