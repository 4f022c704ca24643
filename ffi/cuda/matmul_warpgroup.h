// The product for a middling number of tokens on sm_90a (matmul_warpgroup.cuh).
#pragma once

#include "cuda/matmul.h"
#include "cuda/part.h"

namespace wonly::warpgroup {

// In place of a number of CTAs along the inputs: one CTA for each multiprocessor, or two, with an even share of all
// tiles' stages of 128 inputs, one after the other, as Stream-K has them (Osama et al., 2023, arXiv:2301.03598).
constexpr int kEvenly = 0;

struct Config {
  int tokens;      // of a CTA: 16, 32, 64 or 128; also 48 or 72 to 216, and other warpgroups than 2, as
  int warpgroups;  // launch_tokens in matmul_warpgroup.cuh says; each has 64 outputs. Of float32: 8 (of eight bits),
                   // 16, 32 or 64, of four bits 48 and 96, and 2. With a table 32 or 64 (float32: also 16), and 2
  int cluster;     // CTAs along the inputs, 1 .. 8, or kEvenly
  int multiprocessors;
  int teams = 1;  // 2: clusters of two CTAs or more that share a tile's inputs, and meet in scratch; kEvenly: CTAs of a
                  // multiprocessor
  Part part{};
};

// Whether CTAs of so many tokens and two warpgroups may be of two teams, where one group ends in a stage and scales are
// of the activations' type.
constexpr bool has_teams(int tokens) { return tokens >= 64; }
// Whether CTAs of so many warpgroups may share a tile's inputs in clusters: three have tiles for a wave of all
// multiprocessors, whose sums leave no room for those of others.
constexpr bool shares_inputs(int warpgroups) { return warpgroups != 3; }
// Whether CTAs that round weights may be in pairs that copy activations for each other: not where conversion binds, as
// two that wait for each other take longer (docs/performance.md, log 124 and 130). small_groups: of 32 or 64 inputs.
constexpr bool has_pairs(int tokens, int warpgroups, int bits, bool small_groups) {
  return warpgroups == 2   ? (small_groups ? tokens >= 128 && bits == 4 : tokens >= 96)
         : warpgroups == 3 ? !small_groups && tokens <= 128 && bits == 8
                           : false;
}
// Whether so many CTAs, whose inputs no others share, are in pairs, where the kernel has such and the outputs are so
// many tiles: where nearly all multiprocessors copy activations from the L2, which that binds; fewer gain nothing.
constexpr bool pairs(int64_t ctas, int64_t tiles, int multiprocessors) {
  return tiles % 2 == 0 && 4 * ctas >= 3 * multiprocessors;
}
// Of a tile's tokens those that each of two or more CTAs of a cluster finishes, at most, in whole sixteens.
constexpr int most_of_rank(int tokens) { return (tokens / 2 + 15) / 16 * 16; }
// Scratch that those of so many tiles take: float32 sums of the tokens that each CTA of the first finishes, and a word
// for each warpgroup that says whether they are there.
constexpr int64_t team_bytes(int64_t tiles, int cluster, int tokens) {
  return tiles * cluster * 2 * (int64_t{4} * 64 * most_of_rank(tokens) + 8);
}

// Whether there are CTAs of so many tokens and warpgroups that share all tiles' stages out evenly, where scales are of
// the type of 16-bit activations, or these of float32 (`split`), and none make sums of the activations. Each has a
// kernel of its own, so not of all that could. small_groups: of 32 or 64 inputs.
constexpr bool shares_evenly(int tokens, int warpgroups, int bits, bool small_groups, bool zeros, bool table,
                             bool split) {
  const bool two = warpgroups == 2, three = warpgroups == 3;
  if (split) return two && bits == 4 && tokens >= 32 && (table || !small_groups);
  if (bits == 8) {
    return !small_groups && !zeros &&
           (two ? tokens == 32 || tokens == 64 || tokens == 96 || tokens == 128 : three && tokens == 128);
  }
  if (small_groups)
    return two ? tokens == 32 || tokens == 64 : three && (tokens == 72 || tokens == 96 || tokens == 128);
  return two ? tokens == 32 || tokens == 48 || tokens == 64 || tokens == 96 || tokens == 128
             : three && (tokens == 72 || tokens == 96 || tokens == 128 || tokens == 152 || tokens == 176);
}
// How many they are, of so many places: no more than one for a stage. There must be no fewer than tiles, so that none
// has more of them than two, and finishes no more than one.
constexpr int64_t even_ctas(int64_t tiles, int64_t stages, int places) {
  return tiles * stages < places ? tiles * stages : places;
}
// Scratch that they take, the last of it: float32 sums of a tile for each CTA, and a word for each of its warpgroups.
constexpr int64_t even_bytes(int places, int tokens, int warpgroups) {
  return (places * warpgroups * (int64_t{4} * 64 * tokens + 8) + 15) / 16 * 16;
}
// Where that begins; negative if it does not fit.
constexpr int64_t even_at(int64_t scratch_bytes, int places, int tokens, int warpgroups) {
  return (scratch_bytes / 16 * 16) - even_bytes(places, tokens, warpgroups);
}

// What a configuration is expected to take, in microseconds.
struct Cost {
  int tokens, warpgroups;
  int bits;            // of codes, for which alone there is a kernel or it is ever the fastest; 0: of either
  float stage;         // for 128 inputs, one CTA on a multiprocessor
  float shared_stage;  // two CTAs on it; 0: they do not fit
  float start;         // until the first product, and from the last to the result
  float group;         // of a stage, for every group that ends in it but one; 0: no kernel for groups of 32 and 64
  float sum;           // for every one, with float zeros or offsets; 0: of 16 bits a kernel only where is_plain
  float paired;        // in the place of `stage`, of CTAs in pairs; 0: there are none
  float half = 0.f;
};
// Those that round weights: `group` is what groups of 32 and 64 add to a stage, `sum` what zeros do; 0: no kernel for
// such. `half`: what float16 activations add, and once more with zeros, as codes become integers first.
// Clusters of CTAs, what they cost, and the share of all multiprocessors that they can use: a cluster lies in one part
// of the chip.
struct ClusterCost {
  int ctas;
  float start, share;
};

struct Costs {
  const Cost* shapes;
  int shape_count;
  const Cost* rounded;
  int rounded_count;  // 0: shapes are for weights of either kind
  const ClusterCost* clusters;
  int cluster_count;
  float memory;    // bytes of weights per microsecond
  int alone_ctas;  // of a cluster at most where two CTAs do not share a multiprocessor
  int one_pass;    // tokens below which a shape is for no more tokens than it has
  float team;      // what two teams take to meet; 0: there are none
  // What CTAs take that share stages evenly, for each tile of tokens, and for each token of each part of a tile. Stages
  // of eight bits take so many times as long, as CTAs are not in pairs. Products of more than `even_tiles` tiles of
  // tokens gain nothing: their CTAs read other weights and activations at a time. Nor do those of fewer than
  // `even_least`.
  float even, even_token, even_eight_bits;
  int even_tiles, even_least;
};

// Sets the configuration that is expected to be fastest; returns the microseconds that it should take. whole: only of
// those whose tiles the outputs fill; 0 if there are none.
float choose(const MatmulArgs& args, int multiprocessors, const Costs& costs, Config* config, bool whole = false);

// Whether this kernel computes `args`: rows of activations, scales, zeros and offsets that are 16-byte aligned. float32
// activations: with scratch for split_rows of them.
bool supports(const MatmulArgs& args);

// Sums of a row of float32 activations that zeros or offsets multiply: of each group's, or of 128 inputs, if that is
// less, and of whole stages of those. 0: there are none but integers.
int64_t sum_count(const MatmulArgs& args);
// From one sum to the next, of so many rows: bulk copies take them.
constexpr int kSumAlignment = 4;
constexpr int64_t sum_stride(int64_t rows) { return (rows + kSumAlignment - 1) / kSumAlignment * kSumAlignment; }

// Rows of float32 activations that the kernel takes at a time: as two fp16 numbers each, and their sums, they are in
// scratch, all of them where there is a batch, else as many as it has room for.
int64_t split_rows(const MatmulArgs& args);

// Scales of the type of the activations, uint8 zeros or none, and rows of both in whole pieces of 16 bytes.
bool is_plain(const MatmulArgs& args);

// Whether a CTA of so many tokens rounds weights to the type of the activations, as a dense product's are: zeros or
// offsets of that type, which otherwise take sums of the activations, groups of 32 or 64 inputs, and four bits, where
// that is faster. Scales are of that type, and rows in whole pieces of 16 bytes.
bool rounds(const MatmulArgs& args, int tokens);

cudaError_t launch(const MatmulArgs& args, const Config& config, cudaStream_t stream);

cudaError_t launch_f16(const MatmulArgs& args, const Config& config, cudaStream_t stream);
cudaError_t launch_bf16(const MatmulArgs& args, const Config& config, cudaStream_t stream);
cudaError_t launch_f32(const MatmulArgs& args, const Config& config, cudaStream_t stream);

}  // namespace wonly::warpgroup
