#include <algorithm>

#include "cuda/matmul_tiled.h"
#include "layout.h"

namespace wonly::tiled {

bool takes(const MatmulArgs& args) {
  const auto known = [&](DType type) { return type == args.x_dtype || type == DType::kF32; };
  const bool sixteen_bits = args.x_dtype == DType::kF16 || args.x_dtype == DType::kBF16;
  const bool table = args.shift_mode == ShiftMode::kTable, none = args.shift_mode == ShiftMode::kNone;
  return sixteen_bits && args.k % 8 == 0 && known(args.scale_dtype) &&
         (table || none || args.shift_dtype == DType::kU8 || args.shift_dtype == args.scale_dtype);
}

bool supports(const MatmulArgs& args) { return args.k > 0 && args.m > 0 && takes(args); }

float choose(const MatmulArgs& args, int64_t stages, int multiprocessors, const Costs& costs, Config* config,
             bool whole) {
  float least = 0.f;
  const float least_stage = has_small_groups(args) ? costs.small_groups : 0.f;
  const float of_low =
      (args.shift_mode == ShiftMode::kZeros ? costs.zeros : 0.f) + (args.bits == 8 ? costs.eight_bits : 0.f);
  for (int i = 0; i < costs.stage_count; ++i) {
    const Costs::Stage& stage = costs.stages[i];
    if (whole && args.n % (stage.ctas * kCtaOutputs) != 0) continue;
    const int64_t tiles = args.batch * ceil_div(args.m, stage.tokens) * ceil_div(args.n, stage.ctas * kCtaOutputs);
    const int64_t clusters = multiprocessors / stage.ctas, rest = tiles % clusters;
    const float us_of_stage = std::max(stage.us + (stage.tokens < costs.low ? of_low : 0.f), least_stage);
    const float wave = static_cast<float>(stages) * us_of_stage + costs.wave;
    for (int splits = 1; splits <= costs.most_splits; ++splits) {
      const Config tried{multiprocessors, stage.tokens, splits, stage.ctas};
      if (splits > 1 && (rest == 0 || rest * splits > clusters || stages < splits * costs.least_stages ||
                         scratch_bytes(tried, rest) > args.scratch_bytes)) {
        break;
      }
      float last = rest == 0 ? 0.f : wave;
      if (splits > 1) {
        const float sums = static_cast<float>(stage.tokens) / kTileTokens;
        last = (wave - costs.alone) / static_cast<float>(splits) + costs.alone + costs.split +
               sums * (costs.sums + static_cast<float>(splits - 2) * costs.more);
      }
      const float us = costs.start + static_cast<float>(tiles / clusters) * wave + last;
      if (least == 0.f || us < least) {
        least = us;
        *config = tried;
      }
    }
  }
  return least;
}

cudaError_t launch(const MatmulArgs& args, const Config& config, cudaStream_t stream) {
  return args.x_dtype == DType::kF16 ? launch_f16(args, config, stream) : launch_bf16(args, config, stream);
}

}  // namespace wonly::tiled
