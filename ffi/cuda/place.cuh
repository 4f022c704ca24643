// The order in which a matrix of tiles is walked.
#pragma once

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

}  // namespace wonly::tiles
