// Finds accesses of shared memory that nothing orders, in whatever order they happened here: by vector clocks, as in
// FastTrack (Flanagan and Freund, PLDI 2009).
//
// What acts is a warp; what goes on beside it, its asynchronous copies, products and stores, which have ended for who
// has waited for their group; and an mbarrier, for the copies that it counts, which are there for who has waited for
// its phase. Lanes of a warp are taken for one, and no fences are asked for.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace emulator {

struct Moment {
  uint32_t actor = 0, time = 0;  // time 0: before everything
};

// The last moment of each actor that has happened before now.
class Clock {
 public:
  uint32_t& of(uint32_t actor) {
    if (actor >= times_.size()) times_.resize(actor + 1);
    return times_[actor];
  }
  bool knows(const Moment& m) const { return m.time <= (m.actor < times_.size() ? times_[m.actor] : 0); }
  void join(const Clock& other) {
    if (other.times_.size() > times_.size()) times_.resize(other.times_.size());
    for (size_t i = 0; i < other.times_.size(); ++i) times_[i] = std::max(times_[i], other.times_[i]);
  }
  void clear() { times_.clear(); }

 private:
  std::vector<uint32_t> times_;
};

enum class Use { kNone, kRead, kGlance, kWrite, kAtomic };  // kGlance: to be told of writes, not to hold others up

// The last accesses of a CTA's shared memory; of much of it, of every fourth chunk or so, which ones the seed says.
class Shadow {
 public:
  Shadow(int64_t bytes, uint64_t seed)
      : pages_(static_cast<size_t>(bytes / kPageBytes + 1)), all_(bytes <= kLittle), seed_(seed) {}
  // An access at `moment`, before which there was what `known` says; returns one that is not ordered with it.
  std::optional<Moment> access(int64_t at, int64_t bytes, Use use, const Clock& known, const Moment& moment);

 private:
  // No two warps write less than a word side by side.
  static constexpr int64_t kWordBytes = 2, kChunkBytes = 64, kPageBytes = 1024, kLittle = 4096;
  bool watches(int64_t chunk) const {
    return all_ || (static_cast<uint64_t>(chunk) + seed_) * 0x9e3779b97f4a7c15u >> 62 == 0;
  }
  struct Word {
    Moment written;
    bool atomic = false;
    std::vector<Moment> read;  // since then, of which none is known to be before another
  };
  using Page = std::array<Word, kPageBytes / kWordBytes>;
  std::vector<std::unique_ptr<Page>> pages_;
  bool all_;
  uint64_t seed_;
};

// The actors of a cluster.
class Races {
 public:
  enum Beside { kItself, kCopies, kProducts, kStores, kBesides };
  struct Barrier {
    uint32_t actor, phases = 0;  // that have ended
    Clock arriving, passed;      // what those know who arrive, and who waits for the last phase that has ended
    void end_phase() {
      passed.join(arriving);
      arriving.clear();
      ++phases;
    }
    Moment of_copy() const { return {actor, phases + 1}; }
  };

  explicit Races(int warps) : warps_(warps) {}
  static uint32_t of_warp(int warp, Beside beside) { return static_cast<uint32_t>(warp * kBesides + beside); }
  Barrier& barrier(const uint8_t* at) {
    const auto actor = static_cast<uint32_t>(warps_ * kBesides) + static_cast<uint32_t>(barriers_.size());
    return barriers_.try_emplace(at, Barrier{actor, 0, {}, {}}).first->second;
  }
  std::string name(uint32_t actor) const;

 private:
  int warps_;
  std::map<const uint8_t*, Barrier> barriers_;
};

}  // namespace emulator
