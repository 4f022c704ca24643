#include "races.h"

namespace emulator {

std::optional<Moment> Shadow::access(int64_t at, int64_t bytes, Use use, const Clock& known, const Moment& moment) {
  std::optional<Moment> found;
  for (int64_t begin = at, next; begin < at + bytes; begin = next) {
    next = std::min((begin / kChunkBytes + 1) * kChunkBytes, at + bytes);
    if (!watches(begin / kChunkBytes)) continue;
    auto& page = pages_[static_cast<size_t>(begin / kPageBytes)];
    if (!page) page = std::make_unique<Page>();
    for (int64_t w = begin / kWordBytes; w * kWordBytes < next; ++w) {
      Word& word = (*page)[static_cast<size_t>(w) % page->size()];
      if (!known.knows(word.written) && !(word.atomic && use == Use::kAtomic)) found = word.written;
      if (use == Use::kGlance) continue;
      if (use == Use::kRead) {
        std::erase_if(word.read, [&](const Moment& m) { return m.actor == moment.actor || known.knows(m); });
        word.read.push_back(moment);
        continue;
      }
      for (const Moment& m : word.read) {
        if (!known.knows(m)) found = m;
      }
      word.read.clear();
      word.written = moment;
      word.atomic = use == Use::kAtomic;
    }
  }
  return found;
}

std::string Races::name(uint32_t actor) const {
  static constexpr std::array<const char*, kBesides> kOf = {"", "copies of ", "products of ", "stores of "};
  const auto warps = static_cast<uint32_t>(warps_ * kBesides);
  if (actor >= warps) return "copies for mbarrier " + std::to_string(actor - warps) + " of the cluster";
  return kOf[actor % kBesides] + ("warp " + std::to_string(actor / kBesides) + " of the cluster");
}

}  // namespace emulator
