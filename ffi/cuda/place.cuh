// The order in which a matrix of tiles is walked.
#pragma once

#include "cuda/division.h"

namespace wonly::tiles {

constexpr int kBandTiles = 8;  // tiles of rows that are walked together, for the cache

// Where tile `index` of a matrix of tiles lies: rows of tiles that are walked together share their activations' cache
// lines, and their weights are read by all before they leave the cache.
struct Place {
  int row, column;
};
__device__ __forceinline__ Place place_of(int index, int rows, int columns) {
  const int band = index / (kBandTiles * columns), in_band = index % (kBandTiles * columns);
  const int height = min(kBandTiles, rows - band * kBandTiles);
  return {band * kBandTiles + in_band % height, in_band / height};
}

// The same without a division, of a matrix that is known when a kernel is launched.
struct Places {
  int bands;  // of kBandTiles rows
  Divisor band, last;

  Places() = default;
  Places(int rows, int columns) : bands(rows / kBandTiles), band(kBandTiles * columns), last(rows % kBandTiles) {}

#if defined(__CUDACC__)
  __device__ __forceinline__ Place at(int index) const {
    int in_band, row;
    const int of = band.divide(index, &in_band);
    if (of < bands) return {of * kBandTiles + in_band % kBandTiles, in_band / kBandTiles};
    const int column = last.divide(in_band, &row);
    return {of * kBandTiles + row, column};
  }
#endif
};

}  // namespace wonly::tiles
