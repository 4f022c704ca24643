// The packed weight format, version 1, for every platform. docs/format.md is the prose; jax_wonly/_format.py is the
// Python twin.
//
// A weight W[K, N] (inputs x outputs) is a grid of tiles, uint32[ceil(N / 64), ceil(K / tile_k), 512], tile_k = 64
// (int4) or 32 (int8). A tile is four atoms of 512 bytes; atom `a` holds outputs 16a .. 16a+15 of the tile, 16 bytes
// for each lane l = 4g + t of a warp (g = 0..7, t = 0..3). That is the A operand of mma.sync.m16n8k16 and, four atoms
// at a time, the register operand of wgmma.m64nNk16.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define WONLY_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define WONLY_HOST_DEVICE inline
#endif

namespace wonly {

inline constexpr int kFormatVersion = 1;
inline constexpr int kTileN = 64;       // outputs of a tile
inline constexpr int kTileWords = 512;  // 32-bit words of a tile: 2 KiB
inline constexpr int kTileBytes = 4 * kTileWords;
inline constexpr int kAtomN = 16;       // outputs of an atom
inline constexpr int kAtomWords = 128;  // 32-bit words of an atom: 512 bytes, 16 for each lane of a warp
inline constexpr int kAtomsPerTile = 4;
inline constexpr int kTableEntries = 16;  // of a table that four-bit codes index

WONLY_HOST_DEVICE constexpr int tile_k(int bits) { return bits == 4 ? 64 : 32; }
WONLY_HOST_DEVICE constexpr int codes_per_word(int bits) { return 32 / bits; }
// The code of weight zero under symmetric quantization: codes are stored unsigned.
WONLY_HOST_DEVICE constexpr int bias_of(int bits) { return bits == 4 ? 8 : 128; }

WONLY_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where the code of (input k, output n) of one tile lies: 0 <= k < tile_k(bits), 0 <= n < 64.
struct CodePosition {
  int word;   // 0 .. 511 within the tile
  int shift;  // bits to shift that word right by
};

WONLY_HOST_DEVICE constexpr CodePosition code_position(int bits, int k, int n) {
  const int atom = n / kAtomN;
  const int row = n % kAtomN;
  const int g = row % 8;      // lane group
  const int t = (k % 8) / 2;  // lane within the group
  const int lane = 4 * g + t;
  const int high_row = row / 8;   // rows g and g + 8 are the two words of one step
  const int pair = (k % 32) / 8;  // which run of eight inputs of the 32 (int4), pairs 0..3
  const int odd = k % 2;
  if (bits == 4) {
    const int block = k / 32;  // two blocks of 32 inputs
    return {atom * kAtomWords + lane * 4 + block * 2 + high_row, 4 * (pair + 4 * odd)};
  }
  const int step = (k % 32) / 16;  // two steps of 16 inputs
  return {atom * kAtomWords + lane * 4 + step * 2 + high_row, 8 * ((pair % 2) + 2 * odd)};
}

}  // namespace wonly
