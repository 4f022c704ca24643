#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "cuda/matmul_parts.h"
#include "layout.h"

namespace wonly::parts {
namespace {

// Calls `of_shape` for every shape of matmul_warpgroup, and `of_tile` for every size of tiles of matmul_tiled.
template <typename OfShape, typename OfTile>
void for_each_size(const Costs& costs, OfShape&& of_shape, OfTile&& of_tile) {
  std::for_each_n(costs.warpgroups.shapes, costs.warpgroups.shape_count, of_shape);
  std::for_each_n(costs.warpgroups.rounded, costs.warpgroups.rounded_count, of_shape);
  std::for_each_n(costs.tiles.stages, costs.tiles.stage_count, of_tile);
}

// Outputs of the first kernel: those that are whole waves of tiles of some size, but for the last waves that there are.
class Splits {
 public:
  Splits(const MatmulArgs& args, int multiprocessors, const Costs& costs) : n_(args.n) {
    const auto add_waves = [&](int64_t tokens, int64_t outputs, int64_t places) {
      const int64_t token_tiles = ceil_div(args.m, tokens);
      // Of as many waves, whole rows of tiles: each a tile's outputs and all tokens.
      const auto rows = [&](int64_t waves) { return waves * places / token_tiles; };
      const int64_t waves = ceil_div(ceil_div(args.n, outputs) * token_tiles, places);
      for (int64_t q = waves; q > std::max<int64_t>(waves - kTried, 0); --q) add(rows(q) * outputs);
    };
    const auto of_shape = [&](const warpgroup::Cost& shape) {
      if (shape.tokens < costs.warpgroups.one_pass || shape.shared_stage > 0.f) return;
      add_waves(shape.tokens, shape.warpgroups * kTileN, multiprocessors);
    };
    for_each_size(costs, of_shape, [&](const tiled::Costs::Stage& stage) {
      add_waves(stage.tokens, stage.ctas * tiled::kCtaOutputs, multiprocessors / stage.ctas);
    });
  }
  const int64_t* begin() const { return splits_.data(); }
  const int64_t* end() const { return splits_.data() + count_; }

 private:
  static constexpr int64_t kTried = 3;  // numbers of waves, of which the largest may leave nothing
  void add(int64_t outputs) {
    if (outputs <= 0 || outputs >= n_ || count_ == splits_.size()) return;
    if (std::find(begin(), end(), outputs) == end()) splits_[count_++] = outputs;
  }

  int64_t n_;
  std::array<int64_t, 256> splits_;
  size_t count_ = 0;
};

// What so many outputs take at least, in microseconds: what each size of tiles takes to start and for an output, were
// its tiles spread evenly. Most places to split at cannot bring anything, and choosing two kernels takes several times
// as long as this.
class Bounds {
 public:
  Bounds(const MatmulArgs& args, int multiprocessors, const Costs& costs, bool in_tiles) {
    const auto add = [&](int64_t tokens, int outputs, int64_t stages, float stage, float start) {
      const float work = static_cast<float>(ceil_div(args.m, tokens) * stages) * stage;
      if (count_ < lines_.size()) lines_[count_] = {start, work / static_cast<float>(outputs * multiprocessors)};
      ++count_;
    };
    const int64_t stages = ceil_div(args.k, 128), stages_of_tile = ceil_div(args.k, tiled::kStageInputs);
    const auto of_shape = [&](const warpgroup::Cost& shape) {
      if (shape.tokens < costs.warpgroups.one_pass && args.m > shape.tokens) return;
      float stage = shape.stage;
      if (shape.shared_stage > 0.f) stage = std::min(stage, 0.5f * shape.shared_stage);
      if (shape.paired > 0.f) stage = std::min(stage, shape.paired);
      add(shape.tokens, shape.warpgroups * kTileN, stages, stage, shape.start);
    };
    for_each_size(costs, of_shape, [&](const tiled::Costs::Stage& stage) {
      if (in_tiles) add(stage.tokens, tiled::kCtaOutputs, stages_of_tile, stage.us, costs.tiles.start);
    });
  }
  float of(int64_t outputs) const {
    constexpr float kSurely = 0.999f;  // whatever sums of float32 are rounded to
    if (count_ > lines_.size()) return 0.f;
    float least = std::numeric_limits<float>::max();
    for (size_t i = 0; i < count_; ++i) {
      least = std::min(least, lines_[i].start + lines_[i].of_output * static_cast<float>(outputs));
    }
    return kSurely * least;
  }

 private:
  struct Line {
    float start, of_output;
  };
  std::array<Line, 128> lines_;
  size_t count_ = 0;
};

// The faster kernel for `outputs` of the product's; 0: there is none. whole: its tiles are full.
float fastest(MatmulArgs args, int64_t outputs, bool whole, int multiprocessors, const Costs& costs, bool in_tiles,
              Kernel* kernel) {
  args.n = outputs;
  warpgroup::Config warpgroups{};
  const float us = warpgroup::choose(args, multiprocessors, costs.warpgroups, &warpgroups, whole);
  if (in_tiles) {
    tiled::Config tiles{};
    const int64_t stages = ceil_div(args.k, tiled::kStageInputs);
    const float tiled_us = tiled::choose(args, stages, multiprocessors, costs.tiles, &tiles, whole);
    if (tiled_us > 0.f && (us == 0.f || tiled_us < us)) {
      *kernel = tiles;
      return tiled_us;
    }
  }
  *kernel = warpgroups;
  return us;
}

}  // namespace

float choose(const MatmulArgs& args, int multiprocessors, const Costs& costs, bool in_tiles, float us, Config* config) {
  if (args.m <= costs.tokens) return us;
  float least = costs.gain * us;
  const Bounds bounds(args, multiprocessors, costs, in_tiles);
  if (costs.join + bounds.of(args.n) >= least) return us;
  bool found = false;
  MatmulArgs without_scratch = args;  // which is as much as the second takes
  without_scratch.scratch_bytes = 0;
  for (const int64_t outputs : Splits(args, multiprocessors, costs)) {
    const float rest = costs.join + bounds.of(args.n - outputs);
    if (bounds.of(outputs) + rest >= least) continue;
    Config tried;
    const float first = fastest(without_scratch, outputs, true, multiprocessors, costs, in_tiles, &tried.first);
    if (first == 0.f || first + rest >= least) continue;
    const float second = fastest(args, args.n - outputs, false, multiprocessors, costs, in_tiles, &tried.second);
    const float both = costs.join + first + second;
    if (both >= least) continue;
    std::visit([&](auto& of) { of.part = {0, static_cast<int>(outputs)}; }, tried.first);
    std::visit([&](auto& of) { of.part = {static_cast<int>(outputs), 0}; }, tried.second);
    least = both;
    found = true;
    *config = tried;
  }
  return found ? least : us;
}

cudaError_t launch(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  struct Launch {
    const MatmulArgs& args;
    cudaStream_t stream;
    cudaError_t operator()(const warpgroup::Config& of) const { return warpgroup::launch(args, of, stream); }
    cudaError_t operator()(const tiled::Config& of) const { return tiled::launch(args, of, stream); }
  };
  const Launch one{args, stream};
  const cudaError_t error = std::visit(one, config.first);
  return error == cudaSuccess ? std::visit(one, config.second) : error;
}

}  // namespace wonly::parts
