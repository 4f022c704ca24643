#include <algorithm>
#include <array>
#include <cstdint>

#include "cuda/matmul_parts.h"
#include "layout.h"

namespace wonly::parts {
namespace {

// Outputs of the first kernel: where tiles of some size fill whole waves, all that there are or all but one.
class Splits {
 public:
  Splits(const MatmulArgs& args, int multiprocessors, const Costs& costs) : n_(args.n) {
    const auto add_waves = [&](int64_t tokens, int64_t outputs, int64_t places) {
      const int64_t token_tiles = ceil_div(args.m, tokens);
      // Of as many waves, whole rows of tiles: each a tile's outputs and all tokens.
      const auto rows = [&](int64_t waves) { return waves * places / token_tiles; };
      const int64_t waves = (ceil_div(args.n, outputs) * token_tiles + places - 1) / places;
      for (int64_t q = waves; q > std::max<int64_t>(waves - kTried, 0); --q) add(rows(q) * outputs);
    };
    const auto add_shapes = [&](const warpgroup::Cost* shapes, int count) {
      for (int i = 0; i < count; ++i) {
        const warpgroup::Cost& shape = shapes[i];
        if (shape.tokens < costs.warpgroups.one_pass || shape.shared_stage > 0.f) continue;
        add_waves(shape.tokens, shape.warpgroups * kTileN, multiprocessors);
      }
    };
    add_shapes(costs.warpgroups.shapes, costs.warpgroups.shape_count);
    add_shapes(costs.warpgroups.rounded, costs.warpgroups.rounded_count);
    for (int i = 0; i < costs.tiles.stage_count; ++i) {
      const tiled::Costs::Stage& stage = costs.tiles.stages[i];
      add_waves(stage.tokens, stage.ctas * tiled::kCtaOutputs, multiprocessors / stage.ctas);
    }
  }
  const int64_t* begin() const { return splits_.data(); }
  const int64_t* end() const { return splits_.data() + count_; }

 private:
  static constexpr int64_t kTried = 3;  // numbers of waves, the last of which may be all
  void add(int64_t outputs) {
    if (outputs <= 0 || outputs >= n_ || count_ == splits_.size()) return;
    if (std::find(begin(), end(), outputs) == end()) splits_[count_++] = outputs;
  }

  int64_t n_;
  std::array<int64_t, 256> splits_;
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
  if (args.m <= costs.more) return us;
  float least = costs.gain * us;
  bool found = false;
  MatmulArgs without_scratch = args;  // Python has reckoned with what the second takes
  without_scratch.scratch_bytes = 0;
  for (const int64_t outputs : Splits(args, multiprocessors, costs)) {
    Config tried;
    const float first = fastest(without_scratch, outputs, true, multiprocessors, costs, in_tiles, &tried.first);
    if (first == 0.f || costs.join + first >= least) continue;
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
