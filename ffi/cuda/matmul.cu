// Which kernel runs which product. The numbers are those of jax_wonly/costs, which benchmarks/fit_costs.py fitted to
// what benchmarks/tune.py measured on an H100; shapes between those follow the same rule.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <variant>

#include "cuda/aligned_rows.h"
#include "cuda/costs.h"
#include "cuda/device.h"
#include "cuda/matmul.h"
#include "cuda/matmul_decode.h"
#include "cuda/matmul_mma.h"
#include "cuda/matmul_parts.h"
#include "cuda/matmul_resident.h"
#include "cuda/matmul_stream.h"
#include "cuda/matmul_tiled.h"
#include "cuda/matmul_warpgroup.h"
#include "layout.h"

namespace wonly {
namespace {

// The widest strip of outputs per warp that still gives every multiprocessor a CTA.
stream::Config stream_config(const MatmulArgs& args, const Device& device) {
  stream::Config config{};
  config.token_tiles = args.m <= 8 ? 1 : 2;
  // Not of the number of tokens: a token's sums are split in the same way however many there are.
  const auto ctas = [&](int atoms) { return args.batch * ceil_div(args.n, atoms * kAtomN); };
  const int64_t wanted = device.multiprocessors * 9 / 10;
  config.atoms = ctas(4) >= wanted ? 4 : ctas(2) >= wanted ? 2 : 1;
  config.cluster = 1;
  if (device.architecture >= 90) {
    while (config.cluster < 8 && ctas(config.atoms) * config.cluster < wanted / 2) config.cluster *= 2;
  }
  const bool one_wave = ctas(config.atoms) * config.cluster <= device.multiprocessors;
  // Many inputs keep 16 warps of a lone CTA busy. A warp more or less, where that shares the inputs out evenly.
  const int64_t stages = ceil_div(args.k, stream::kStageInputs * config.cluster);
  const int most = config.token_tiles == 1 && one_wave && stages >= 64 ? 16 : 8;
  config.warps = most;
  for (int warps = most - 1; warps >= most - 2; --warps) {
    if (ceil_div(stages, warps) * warps < ceil_div(stages, config.warps) * config.warps) config.warps = warps;
  }
  config.shared_bytes = shared_share(device, one_wave ? 1 : 2);
  if (args.shift_mode == ShiftMode::kTable) {
    // Every CTA keeps a table beside its rings, which are as many as then fit: more warps hide the look-ups.
    if (config.token_tiles == 1 && args.x_dtype == DType::kF32) {
      config.warps = one_wave ? 16 : 12;
      config.shared_bytes = shared_share(device, 1);
    } else if (config.token_tiles == 1) {
      config.warps = !one_wave ? 6 : config.atoms == 4 ? 14 : 16;
    } else if (device.architecture >= 90) {
      config.atoms = 4;
      config.cluster = 1;
      while (config.cluster < 4 && 2 * ctas(4) * config.cluster <= device.multiprocessors) config.cluster *= 2;
      const bool shares = ctas(4) * config.cluster > device.multiprocessors;
      config.warps = shares ? 4 : 8;
      config.shared_bytes = shared_share(device, shares ? 2 : 1);
    }
  }
  return config;
}

// The streaming kernel reads the weights again for every 16 tokens. Its strips of outputs and shares of the inputs are
// those of few tokens: of few outputs many tokens make many waves of CTAs.
constexpr int64_t kStreamPass = 16;
constexpr int64_t kFewWaves = 2;  // which overlap
float stream_us(const MatmulArgs& args, const Device& device) {
  const int64_t passes = ceil_div(args.m, kStreamPass), bytes = passes * args.batch * args.n * args.k * args.bits / 8;
  const bool table = args.shift_mode == ShiftMode::kTable;
  float start = costs::kStreamStart, rate = costs::kStreamBytes, wave = costs::kStreamWave;
  const auto take = [&](const auto& rates) {
    for (const costs::StreamRate& of : rates) {
      start = of.start, rate = of.bytes;
      if (args.m <= of.tokens) break;
    }
  };
  if (args.x_dtype == DType::kF32) {
    const bool small = has_small_groups(args);
    if (small) wave /= costs::kStreamSmallGroupsFloat32;
    if (table) {
      take(costs::kStreamTableFloat32);
    } else if (has_float_shift(args)) {
      take(costs::kStreamShiftedFloat32);
      if (small) rate *= costs::kStreamSmallGroupsShiftedFloat32;
    } else {
      take(costs::kStreamFloat32);
      if (small) rate *= costs::kStreamSmallGroupsFloat32;
    }
  } else if (table && passes == 1) {
    take(costs::kStreamTable);
  }
  const float us = start + static_cast<float>(bytes) / rate;
  if (passes == 1) return us;
  const stream::Config config = stream_config(args, device);
  const int64_t ctas = args.batch * ceil_div(args.n, config.atoms * kAtomN) * config.cluster;
  const int64_t waves = ceil_div(ctas * passes, device.multiprocessors * (ctas <= device.multiprocessors ? 1 : 2));
  return waves > kFewWaves ? std::max(us, static_cast<float>(waves) * wave) : us;
}

// How matmul_resident would do a product, and what that is expected to take; 0 where it does not take it.
struct Resident {
  resident::Config config;
  float us;
};
Resident as_resident(const MatmulArgs& args, const Device& device) {
  Resident best{};
  if (device.architecture != 90) return best;
  best.us = resident::choose(args, device.multiprocessors, shared_share(device, 1), &best.config);
  return best;
}

// Where matmul_resident takes a product too, which is faster but for one token of very many weights, and of fewer with
// float zeros and offsets beside four bits; of other types than the activations', of two tokens, too, where a warp has
// more than two blocks.
bool decode_is_slower(const MatmulArgs& args, const Resident& resident) {
  const int64_t outputs = args.batch * args.n, weights = outputs * args.k * args.bits / 8;
  const bool floats = has_float_shift(args);
  if (!floats && args.batch >= costs::kDecodeEntries) return false;
  if (resident.us == 0.f) return false;
  if (args.bits == 4 && resident::mixes_shifts(args)) return resident::blocks_of(args, resident.config) > 0;
  if (args.m > 1 || (!floats && decode::stage_groups(args) == 4)) return true;
  // Of very many inputs of 16 bits matmul_decode is slower whatever weights there are, where zeros are bytes or none.
  const bool spread = args.x_dtype != DType::kF32 && args.k >= costs::kDecodeSpread;
  if (!floats && spread) return true;
  if (!floats || args.bits == 8) return weights < costs::kDecodeHeavy;
  return weights < (spread ? costs::kDecodeRivalled : costs::kDecodeHeavy / 2);
}

// Of few bytes of weights preparing the activations takes longer than their cheaper products save.
bool decodes(const MatmulArgs& args, const Device& device, const Resident& resident) {
  if (device.architecture != 90 || !decode::supports(args)) return false;
  const int64_t outputs = args.batch * args.n;
  if (outputs * args.k * args.bits / 8 < costs::kDecodeWeights || args.k < costs::kDecodeInputs) return false;
  if (ceil_div(args.k, 128) > costs::kDecodeStages) return false;
  if (decode::stage_groups(args) == 1 && args.bits == 8 && costs::kDecodeRatio * outputs <= args.k) return false;
  if (decode_is_slower(args, resident)) return false;
  // Each CTA has outputs of one entry of the batch: these must leave few multiprocessors without, and a lone entry not
  // more than half of them.
  const int64_t share = device.multiprocessors / args.batch, wanted = device.multiprocessors * 9 / 10;
  return share * args.batch >= wanted && 2 * args.batch * std::min(ceil_div(args.n, kAtomN), share) >= wanted;
}

cudaError_t launch_decode(const MatmulArgs& args, const Device& device, cudaStream_t stream) {
  const int64_t atoms = ceil_div(args.n, kAtomN), all_atoms = args.batch * atoms;
  // Two CTAs that share many inputs prepare half of them each; worth their exchange of sums where a CTA has only one or
  // two strips of outputs for the four warps that walk side by side, or very many.
  const int64_t strips = ceil_div(all_atoms, device.multiprocessors);
  const bool shared_inputs = (strips <= 2 || strips > 8) && args.k >= (strips == 1 ? 4096 : strips == 2 ? 6144 : 8192);
  cudaError_t error = cudaErrorInvalidConfiguration;
  // Two share inputs that one's memory does not hold; clusters of four would not all fit at once.
  for (int cluster = shared_inputs ? 2 : 1; cluster <= 2 && error == cudaErrorInvalidConfiguration; cluster *= 2) {
    const int64_t places = std::max<int64_t>(device.multiprocessors / cluster / args.batch, 1);
    const int parts = static_cast<int>(std::min<int64_t>(atoms, places));
    error = decode::launch(args, {cluster, parts}, shared_share(device, 1), stream);
  }
  return error;
}

// Whether rows of scales or shift are all that keeps matmul_warpgroup, which copies them in bulk, from a product.
bool has_odd_rows(const MatmulArgs& args) {
  return !warpgroup::supports(args) && warpgroup::supports(aligned_rows::after(args));
}
// Whether it then waits until they are where it can. Few tokens do not, with few weights, or where matmul_resident,
// which needs none of this, is there.
bool aligns_rows(const MatmulArgs& args, const Resident& resident) {
  const int64_t weights = args.batch * args.n * args.k * args.bits / 8;
  const bool few = args.m <= costs::kStreamTokens && (weights < costs::kDecodeWeights || resident.us > 0.f);
  return !few && aligned_rows::bytes(args) <= args.scratch_bytes;
}

// The kernel for a product. matmul_decode and matmul_stream find their configurations when they are launched, as what
// they fit in says.
struct Decoded {};
struct Streamed {};
struct ByWarpgroups {
  warpgroup::Config config;
  bool aligns;  // rows of scales and shift before
};
using Choice =
    std::variant<Streamed, Decoded, resident::Config, ByWarpgroups, tiled::Config, parts::Config, mma::Config>;

// Where matmul_decode does not take it.
Choice choose_undecoded(const MatmulArgs& args, const Device& device, const Resident& resident) {
  // With scales of another type, or odd rows, and no small groups streaming four bits is faster for few tokens. Eight
  // bits leave the warpgroup kernel time to spare, and its bulk copies then read faster once every multiprocessor has a
  // CTA.
  const bool wide = args.bits == 8 && args.batch * ceil_div(args.n, kTileN) > device.multiprocessors;
  const bool small_groups = has_small_groups(args);
  const bool splits = args.x_dtype == DType::kF32;
  const bool odd_rows = device.architecture == 90 && has_odd_rows(args),
             aligns = odd_rows && aligns_rows(args, resident);
  const MatmulArgs aligned = aligns ? aligned_rows::after(args) : args;  // what matmul_warpgroup takes
  bool by_warpgroups = warpgroup::supports(aligned);
  const bool table = args.shift_mode == ShiftMode::kTable;
  const bool always = by_warpgroups && (small_groups || splits || table || warpgroup::is_plain(aligned) ||
                                        (has_float_shift(args) && resident::supports(args)));
  const bool streamed = device.architecture != 90 || (args.m <= costs::kStreamTokens && !wide && !always);
  warpgroup::Config warpgroups{};
  const warpgroup::Costs& of_warpgroups = splits ? (table ? costs::kSplitTable : costs::kSplitWarpgroup)
                                                 : (table ? costs::kTableWarpgroup : costs::kWarpgroup);
  float us = streamed        ? 0.f
             : by_warpgroups ? warpgroup::choose(aligned, device.multiprocessors, of_warpgroups, &warpgroups)
                             : stream_us(args, device);
  if (aligns) {
    us += costs::kAlignedRowsStart + static_cast<float>(aligned_rows::bytes(args)) / costs::kAlignedRowsBytes;
  }
  if ((splits || table) && !aligns && args.m <= kStreamPass) {
    const float streaming = stream_us(args, device);
    by_warpgroups = by_warpgroups && us < streaming;
    us = std::min(us, streaming);
  }
  // Of float32 nearly always faster where there may be a single tile, and streaming odd rows takes longer than
  // estimated.
  const bool few = resident::supports(args);
  if (few && resident.us > 0.f && (streamed || splits || (odd_rows && !aligns) || resident.us < us)) {
    return resident.config;
  }
  if (!streamed) {
    const int64_t least = args.bits == 4 && !small_groups ? costs::kTiledTokens : costs::kTiledTokensOfSmallGroups;
    const bool in_tiles =
        args.m >= (by_warpgroups && !aligns && !table ? least : kStreamPass + 1) && tiled::supports(args);
    tiled::Config tiles{};
    bool takes_tiles = false;
    if (in_tiles) {
      const int64_t stages = ceil_div(args.k, tiled::kStageInputs);
      const tiled::Costs& of_tiles = table ? costs::kTable : costs::kTiled;
      const float tiled_us = tiled::choose(args, stages, device.multiprocessors, of_tiles, &tiles);
      // With a table another pass takes longer in any case.
      takes_tiles = (table && !by_warpgroups) || tiled_us < us;
      if (takes_tiles) us = tiled_us;
    }
    if (!few && resident.us > 0.f && resident.us < us) return resident.config;
    if (by_warpgroups && !aligns && !splits && !table && args.batch == 1) {
      parts::Config two;
      const parts::Costs of_two{costs::kWarpgroup, costs::kTiled, costs::kPartsJoin, costs::kPartsGain,
                                costs::kPartsTokens};
      if (parts::choose(args, device.multiprocessors, of_two, in_tiles, us, &two) < us) return two;
    }
    if (takes_tiles) return tiles;
    if (by_warpgroups) return ByWarpgroups{warpgroups, aligns};
  }
  if (device.architecture >= 80 && device.architecture != 90 && args.m > kStreamPass && mma::supports(args)) {
    mma::Config tiles{};
    const float mma_us = mma::choose(args, device, &tiles);
    if (mma_us > 0.f && mma_us < stream_us(args, device)) return tiles;
  }
  return Streamed{};
}

// The latest choices, for models make the same products again and again and a choice takes as long as half a launch, or
// several of them where two kernels are tried (docs/performance.md, log 158 and 161). By all that they depend on: the
// device, and everything of MatmulArgs but its pointers.
class Choices {
 public:
  Choice& of(const MatmulArgs& args, const Device& device) {
    Key key{};
    std::memcpy(key.data(), reinterpret_cast<const char*>(&args) + kPointers, kNumbers);
    std::memcpy(key.data() + kNumbers / sizeof(uint64_t), &device, sizeof(Device));
    uint64_t hash = 0;  // multiplicative, of which the high bits depend on all
    for (const uint64_t word : key) hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    Pair& pair = pairs_[hash >> (64 - kLog2Pairs)];
    for (const int i : {pair.latest, 1 - pair.latest}) {
      Entry& entry = pair.entries[i];
      if (entry.known && entry.key == key) {
        pair.latest = i;
        return entry.choice;
      }
    }
    pair.latest = 1 - pair.latest;
    Entry& entry = pair.entries[pair.latest];
    const Resident resident = as_resident(args, device);
    const bool decoded = decodes(args, device, resident);
    entry = {true, key, decoded ? Choice{Decoded{}} : choose_undecoded(args, device, resident)};
    return entry.choice;
  }

 private:
  static constexpr size_t kPointers = offsetof(MatmulArgs, scratch_bytes), kNumbers = sizeof(MatmulArgs) - kPointers;
  static_assert(kPointers == 7 * sizeof(void*) && kNumbers % sizeof(uint64_t) == 0, "numbers stand behind pointers");
  static constexpr size_t kLog2Pairs = 7;
  using Key = std::array<uint64_t, ceil_div((kNumbers + sizeof(Device)), sizeof(uint64_t))>;
  struct Entry {
    bool known;
    Key key;
    Choice choice;
  };
  // Of products whose hashes are alike, the two latest.
  struct Pair {
    std::array<Entry, 2> entries;
    int latest;
  };
  std::array<Pair, size_t{1} << kLog2Pairs> pairs_{};
};

cudaError_t launch_stream(const MatmulArgs& args, const Device& device, cudaStream_t stream) {
  stream::Config config = stream_config(args, device);
  // Less shared memory than on the tuned devices: fewer warps, then narrower strips, until two stages fit.
  cudaError_t error = stream::launch(args, config, stream);
  while (error == cudaErrorInvalidConfiguration && (config.warps > 1 || config.atoms > 1)) {
    config.shared_bytes = shared_share(device, 1);
    if (config.warps > 1) {
      config.warps /= 2;
    } else {
      config.atoms /= 2;
    }
    error = stream::launch(args, config, stream);
  }
  return error;
}

struct Launch {
  const MatmulArgs& args;
  const Device& device;
  cudaStream_t stream;

  cudaError_t operator()(Decoded) const { return launch_decode(args, device, stream); }
  cudaError_t operator()(Streamed) const { return launch_stream(args, device, stream); }
  cudaError_t operator()(const resident::Config& config) const {
    return resident::launch(args, config, shared_share(device, 1), stream);
  }
  cudaError_t operator()(const ByWarpgroups& warpgroups) const {
    if (!warpgroups.aligns) return warpgroup::launch(args, warpgroups.config, stream);
    const cudaError_t error = aligned_rows::launch(args, stream);
    return error == cudaSuccess ? warpgroup::launch(aligned_rows::after(args), warpgroups.config, stream) : error;
  }
  cudaError_t operator()(const tiled::Config& config) const { return tiled::launch(args, config, stream); }
  cudaError_t operator()(const parts::Config& config) const { return parts::launch(args, config, stream); }
  cudaError_t operator()(const mma::Config& config) const { return mma::launch(args, config, stream); }
};

}  // namespace

cudaError_t launch_matmul(const MatmulArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(&device); error != cudaSuccess) return error;
  if (device.architecture < 80 && args.x_dtype != DType::kF16) return cudaErrorNotSupported;
  thread_local Choices choices;
  Choice& choice = choices.of(args, device);
  const Launch launch{args, device, stream};
  const cudaError_t error = std::visit(launch, choice);
  if (error != cudaErrorInvalidConfiguration || !std::holds_alternative<Decoded>(choice)) return error;
  choice = choose_undecoded(args, device, as_resident(args, device));
  return std::visit(launch, choice);
}

}  // namespace wonly
