// What a tensor map says, in the place of what the driver would put into it.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

namespace emulator {

struct TensorMap {
  uint8_t* data;
  int64_t strides[3];  // bytes, of all dimensions but the first
  int32_t sizes[4];
  uint16_t box[4];  // of `pixels`: box[0] inputs of box[1] pixels
  int16_t lower[2], upper[2];
  uint8_t steps[2];  // from one pixel to the next
  uint8_t rank, element;
  bool swizzle128, pixels;

  int64_t box_bytes() const {
    int64_t bytes = element;
    for (int d = 0; d < (pixels ? 2 : rank); ++d) bytes *= box[d];
    return bytes;
  }

  // A box to shared memory, zeros beyond the edges. Of pixels: those from `at` on, moved by `offsets`.
  void read(uint8_t* to, const std::array<int32_t, 4>& at, const std::array<int32_t, 2>& offsets) const {
    each(at, offsets, [&](int64_t linear, const uint8_t* from, int bytes) {
      uint8_t* const place = swizzled(to, linear);
      if (bytes < kChunk) std::memset(place, 0, kChunk);
      if (bytes > 0) std::memcpy(place, from, static_cast<size_t>(bytes));
    });
  }
  // The reverse, without what is beyond the edges.
  void write(const uint8_t* from, const std::array<int32_t, 4>& at) const {
    each(at, {}, [&](int64_t linear, uint8_t* to, int bytes) {
      if (bytes > 0) std::memcpy(to, swizzled(const_cast<uint8_t*>(from), linear), static_cast<size_t>(bytes));
    });
  }

 private:
  static constexpr int kChunk = 16;  // bytes that lie together in shared memory, whatever the order of chunks

  // Shared memory begins at a multiple of 1024, as Machine has it.
  uint8_t* swizzled(uint8_t* base, int64_t linear) const {
    if (!swizzle128) return base + linear;
    const uint64_t address = reinterpret_cast<uint64_t>(base) + static_cast<uint64_t>(linear);
    return reinterpret_cast<uint8_t*>(address ^ ((address >> 7 & 7) << 4));
  }

  // Calls f(bytes before it in the box, where it is, bytes of it that there are) for every chunk.
  template <typename F>
  void each(const std::array<int32_t, 4>& at, const std::array<int32_t, 2>& offsets, F f) const {
    int64_t linear = 0;
    const auto row = [&](const std::array<int32_t, 4>& from) {
      uint8_t* start = data;
      bool inside = from[0] >= 0;  // no kernel begins left of the edge
      for (int d = 1; d < rank; ++d) {
        inside &= from[d] >= 0 && from[d] < sizes[d];
        start += from[d] * strides[d - 1];
      }
      for (int n = 0; n < box[0]; n += kChunk / element, linear += kChunk) {
        const int64_t left = inside ? (int64_t{sizes[0]} - from[0] - n) * element : 0;
        f(linear, start + (int64_t{from[0]} + n) * element, static_cast<int>(std::clamp<int64_t>(left, 0, kChunk)));
      }
    };
    if (pixels) {
      std::array<int32_t, 4> c = at;
      for (int pixel = 0; pixel < box[1]; ++pixel) {
        row({c[0], c[1] + offsets[0], c[2] + offsets[1], c[3]});
        c[1] += steps[0];  // through the window's places of an image, then through the images
        if (c[1] <= sizes[1] - 1 + upper[0]) continue;
        c[1] = lower[0];
        c[2] += steps[1];
        if (c[2] <= sizes[2] - 1 + upper[1]) continue;
        c[2] = lower[1];
        ++c[3];
      }
      return;
    }
    for (int z = 0; z < (rank > 3 ? box[3] : 1); ++z) {
      for (int y = 0; y < box[2]; ++y) {
        for (int x = 0; x < box[1]; ++x) row({at[0], at[1] + x, at[2] + y, at[3] + z});
      }
    }
  }
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

}  // namespace emulator
