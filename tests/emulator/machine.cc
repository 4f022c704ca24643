#include "machine.h"

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <sstream>
#include <stdexcept>

namespace emulator {

Machine& Machine::the() {
  static Machine machine;
  return machine;
}

namespace {

std::string whereabouts(const Warp& warp) {
  const Grid& grid = *warp.cta->cluster->grid;
  std::ostringstream text;
  text << "\n  " << grid.launch.program->name << ", CTA " << warp.cta->index.x << ' ' << warp.cta->index.y << ' '
       << warp.cta->index.z << ", warp " << warp.index;
  for (const Group& group : warp.groups) {
    text << "\n    lanes " << std::hex << group.lanes << std::dec << " at " << group.at << ": "
         << grid.launch.program->code[static_cast<size_t>(group.at)].text.substr(0, 200);
  }
  return text.str();
}

}  // namespace

void Machine::fail(Warp& warp, const std::string& what) const {
  throw std::runtime_error("emulator: " + what + " (seed " + std::to_string(seed) + ")" + whereabouts(warp));
}

void Machine::fail_all() const {
  std::string text = "emulator: nothing comes on any more (seed " + std::to_string(seed) + ")";
  for (const auto& cluster : clusters_) {
    for (const auto& cta : cluster->ctas) {
      for (const Warp& warp : cta->warps) {
        if (warp.state != Warp::kDone) text += whereabouts(warp);
      }
    }
  }
  throw std::runtime_error(text);
}

Cta& Machine::cta_of(Warp& warp, uint64_t address) {
  // The upper bits are 1 + the rank of a CTA of the cluster, as mapa gives them, or 0 for this one.
  const uint64_t rank = address >> 24;
  if (rank == 0) return *warp.cta;
  if (rank > warp.cta->cluster->ctas.size()) fail(warp, "shared memory of no CTA");
  return *warp.cta->cluster->ctas[rank - 1];
}

void Machine::watch(Warp& warp, uint64_t address, int64_t bytes, Use use, const Moment& moment) {
  Cta& cta = cta_of(warp, address);
  const Races* const races = cta.cluster->races.get();
  if (races == nullptr || use == Use::kNone) return;
  const auto at = static_cast<int64_t>(address & 0xffffff);
  if (const auto other = cta.shadow->access(at, bytes, use, warp.known, moment); other.has_value()) {
    fail(warp, "a race in shared memory, near " + std::to_string(at) + ": " +
                   (use == Use::kRead ? "a read by " : "a write by ") + races->name(moment.actor) +
                   " is not ordered with one by " + races->name(other->actor));
  }
}

uint8_t* Machine::shared_at(Warp& warp, uint64_t address, int64_t bytes, int64_t align, Use use) {
  const Cta& cta = cta_of(warp, address);
  const uint64_t at = address & 0xffffff;
  if (static_cast<int64_t>(at) + bytes > cta.cluster->grid->launch.shared_bytes()) {
    fail(warp,
         "shared memory at " + std::to_string(at) + " of " + std::to_string(cta.cluster->grid->launch.shared_bytes()));
  }
  if (at % static_cast<uint64_t>(align) != 0) fail(warp, "shared memory that is not aligned: " + std::to_string(at));
  if (cta.live_warps == 0) fail(warp, "shared memory of a CTA that has ended");
  if (watches_races) {
    const uint32_t itself = Races::of_warp(warp.number, Races::kItself);
    watch(warp, address, bytes, use, {itself, warp.known.of(itself)});
  }
  return cta.shared + at;
}

uint8_t* Machine::memory_at(Warp& warp, uint64_t address, int64_t bytes, int64_t align) {
  const auto inside = [&](uint64_t begin, uint64_t size) {
    return address >= begin && address + static_cast<uint64_t>(bytes) <= begin + size;
  };
  if (address % static_cast<uint64_t>(align) != 0) fail(warp, "memory that is not aligned");
  if (!inside(last_.first, last_.second)) {
    const Grid& grid = *warp.cta->cluster->grid;
    const auto next = allowed_.upper_bound(address);
    if (next != allowed_.begin() && inside(std::prev(next)->first, static_cast<uint64_t>(std::prev(next)->second))) {
      last_ = {std::prev(next)->first, static_cast<uint64_t>(std::prev(next)->second)};
    } else if (!inside(reinterpret_cast<uint64_t>(warp.cta->shared),
                       static_cast<uint64_t>(grid.launch.shared_bytes())) &&
               !inside(reinterpret_cast<uint64_t>(grid.launch.param_data()),
                       grid.launch.params.size() * sizeof(ParamLine)) &&
               !inside(reinterpret_cast<uint64_t>(warp.local.data()), warp.local.size())) {
      std::string near = "memory that is nobody's";
      if (next != allowed_.begin()) {
        near += ": " + std::to_string(address - std::prev(next)->first) + " bytes into one of " +
                std::to_string(std::prev(next)->second);
      }
      fail(warp, near);
    }
  }
  return reinterpret_cast<uint8_t*>(address);
}

void Machine::release(Barrier& barrier, const Cta& cta) {
  const int wanted = barrier.wanted == 0 ? cta.live_warps * kLanes : barrier.wanted;
  if (barrier.arrived != wanted || wanted == 0) return;
  for (Warp* warp : barrier.waiting) {
    warp->state = Warp::kReady;
    warp->known.join(barrier.known);
  }
  barrier = {};
}

void Machine::arrive_at_barrier(Warp& warp, int number, int threads, bool waits) {
  Barrier& barrier = warp.cta->barriers[number];
  if (barrier.arrived > 0 && barrier.wanted != threads) fail(warp, "a barrier of another number of threads");
  barrier.wanted = threads;
  barrier.arrived += kLanes;
  barrier.known.join(warp.known);
  tick(warp);
  if (waits) {
    warp.state = Warp::kAtBarrier;
    barrier.waiting.push_back(&warp);
  }
  if (threads != 0 && barrier.arrived > threads) fail(warp, "more threads at a barrier than it has");
  release(barrier, *warp.cta);
}

void Machine::release(Cluster& cluster) {
  if (cluster.arrived == 0 || cluster.arrived != cluster.live_warps) return;
  cluster.arrived = 0;
  ++cluster.phase;
  cluster.passed.join(cluster.arriving);
  cluster.arriving.clear();
  for (auto& cta : cluster.ctas) {
    for (Warp& warp : cta->warps) {
      if (warp.state == Warp::kAtCluster) {
        warp.state = Warp::kReady;
        warp.cluster_arrived = false;
        warp.known.join(cluster.passed);
      }
    }
  }
}

void Machine::arrive_at_cluster(Warp& warp) {
  Cluster& cluster = *warp.cta->cluster;
  if (warp.cluster_arrived) fail(warp, "a second arrival at the barrier of the cluster");
  warp.cluster_arrived = true;
  if (cluster.ctas.size() == 1) return;
  warp.cluster_phase = cluster.phase;
  ++cluster.arrived;
  cluster.arriving.join(warp.known);
  tick(warp);
  release(cluster);
}

void Machine::wait_for_cluster(Warp& warp) {
  if (!warp.cluster_arrived) fail(warp, "a wait at the barrier of the cluster without arrival");
  if (warp.cta->cluster->ctas.size() == 1) {
    // As ptxas has it for launches without clusters: the arrival is nothing, and the wait is one for all threads of the
    // CTA to wait. Warps that wait after others have gone on, which the ISA allows, would hold those up.
    warp.cluster_arrived = false;
    arrive_at_barrier(warp, 0, 0, true);
    return;
  }
  if (warp.cluster_phase == warp.cta->cluster->phase) {
    warp.state = Warp::kAtCluster;
  } else {
    warp.cluster_arrived = false;
    warp.known.join(warp.cta->cluster->passed);
  }
}

void Machine::let_next_begin(Warp& warp) {
  // Counted when the last warp says so on a GPU; one is enough here, which is earlier.
  if (!warp.cta->lets_next_begin) {
    warp.cta->lets_next_begin = true;
    ++warp.cta->cluster->grid->letting;
  }
}

namespace {

Dim place(uint64_t number, const Dim& among) {
  return {static_cast<uint32_t>(number % among.x), static_cast<uint32_t>(number / among.x % among.y),
          static_cast<uint32_t>(number / among.x / among.y)};
}

// What a special register is to a lane; `cluster` and `rank` are where its CTA is.
uint64_t value_of(const Special& special, const Warp& warp, int lane, const Dim& cluster, int rank) {
  const Launch& launch = warp.cta->cluster->grid->launch;
  switch (special.kind) {
    case Special::kThread:
      return place(static_cast<uint64_t>(warp.index * kLanes + lane), launch.block).axis(special.axis);
    case Special::kThreads:
      return launch.block.axis(special.axis);
    case Special::kCta:
      return warp.cta->index.axis(special.axis);
    case Special::kCtas:
      return launch.grid.axis(special.axis);
    case Special::kCluster:
      return cluster.axis(special.axis);
    case Special::kRank:
      return static_cast<uint64_t>(rank);
    case Special::kLane:
      return static_cast<uint64_t>(lane);
    case Special::kParams:
      return reinterpret_cast<uint64_t>(launch.param_data() + special.offset);
    case Special::kLocal:
      return reinterpret_cast<uint64_t>(warp.local.data() + lane * launch.program->local_bytes + special.offset);
  }
  return 0;
}

}  // namespace

void Machine::begin(Grid& grid) {
  const Launch& launch = grid.launch;
  const Dim at = place(static_cast<uint64_t>(grid.begun++), launch.clusters());
  auto cluster = std::make_unique<Cluster>();
  cluster->grid = &grid;
  for (int rank = 0; rank < launch.cluster_ctas(); ++rank) {
    auto cta = std::make_unique<Cta>();
    cta->cluster = cluster.get();
    const Dim inside = place(static_cast<uint64_t>(rank), launch.cluster);
    cta->index = {at.x * launch.cluster.x + inside.x, at.y * launch.cluster.y + inside.y,
                  at.z * launch.cluster.z + inside.z};
    begin(*cta, at, rank);
    cluster->live_warps += cta->live_warps;
    cluster->ctas.push_back(std::move(cta));
  }
  if (watches_races) {
    cluster->races = std::make_unique<Races>(cluster->live_warps);
    int number = 0;
    for (auto& cta : cluster->ctas) {
      cta->shadow = std::make_unique<Shadow>(launch.shared_bytes(), seed);
      for (Warp& warp : cta->warps) {
        warp.number = number++;
        tick(warp);
      }
    }
  }
  clusters_.push_back(std::move(cluster));
}

void Machine::begin(Cta& cta, const Dim& cluster, int rank) {
  const Launch& launch = cta.cluster->grid->launch;
  const Program& program = *launch.program;
  constexpr size_t kAlign = 1024;
  const auto bytes = static_cast<size_t>(launch.shared_bytes());
  cta.storage = std::make_unique<uint8_t[]>(bytes + kAlign);
  cta.shared = cta.storage.get() + (kAlign - reinterpret_cast<uint64_t>(cta.storage.get()) % kAlign) % kAlign;
  std::memset(cta.shared, 0xff, bytes);  // NaN, and wrong as anything else
  cta.live_warps = (launch.threads() + kLanes - 1) / kLanes;
  cta.warps = std::vector<Warp>(static_cast<size_t>(cta.live_warps));
  for (int w = 0; w < cta.live_warps; ++w) {
    Warp& warp = cta.warps[static_cast<size_t>(w)];
    warp.cta = &cta;
    warp.index = w;
    warp.priority = static_cast<int64_t>(random_() >> 2);
    const int lanes = std::min(kLanes, launch.threads() - w * kLanes);
    warp.live = kAllLanes >> (kLanes - lanes);
    warp.groups = {{warp.live, 0, false, false}};
    warp.registers.assign(static_cast<size_t>(program.register_bytes), 0xff);
    warp.predicates.resize(static_cast<size_t>(program.predicates));
    warp.owned = program.registers;
    warp.local.assign(static_cast<size_t>(program.local_bytes * kLanes), 0xff);
    warp.constants = program.constants.data();
    for (const Special& special : program.specials) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const uint64_t value = value_of(special, warp, lane, cluster, rank);
        if (special.row.kind == Operand::kRow64) {
          warp.row<uint64_t>(special.row)[lane] = value;
        } else {
          warp.row<uint32_t>(special.row)[lane] = static_cast<uint32_t>(value);
        }
      }
    }
  }
}

void Machine::end(Warp& warp) {
  for (auto* pending : {&warp.copies, &warp.products, &warp.stores}) {
    for (const Pending& each : *pending) each.perform();
    pending->clear();
  }
  warp.state = Warp::kDone;
  Cta& cta = *warp.cta;
  Cluster& cluster = *cta.cluster;
  --cluster.live_warps;
  --cta.live_warps;
  // A thread that has ended counts as arrived at every barrier of the cluster: not twice.
  if (warp.cluster_arrived && warp.cluster_phase == cluster.phase) --cluster.arrived;
  for (auto& [number, barrier] : cta.barriers) release(barrier, cta);
  release(cluster);
  if (cta.live_warps > 0) return;
  for (const auto& [number, barrier] : cta.barriers) {
    if (barrier.arrived != 0) fail(warp, "a CTA ended with threads at barrier " + std::to_string(number));
  }
  if (cta.on_their_way > 0) fail(warp, "a CTA ended with copies on their way to it");
  if (!cta.lets_next_begin) ++cluster.grid->letting;
}

namespace {

// The group whose turn it is: of those behind, so that they come together again with those ahead.
Group* next_group(Warp& warp) {
  Group* next = nullptr;
  for (Group& group : warp.groups) {
    if (!group.waits && !group.polls && (next == nullptr || group.at < next->at)) next = &group;
  }
  return next;
}

// Lanes at the same instruction become a group.
void meet(Warp& warp) {
  auto& groups = warp.groups;
  for (size_t i = 0; i < groups.size(); ++i) {
    for (size_t j = groups.size() - 1; j > i; --j) {
      if (groups[i].at != groups[j].at) continue;
      groups[i].lanes |= groups[j].lanes;
      groups[i].waits = groups[i].polls = false;
      groups.erase(groups.begin() + static_cast<int64_t>(j));
    }
  }
}

}  // namespace

Warp* Machine::next_warp() {
  const auto may_go_on = [](const Warp& warp) {
    return warp.state == Warp::kReady || warp.state == Warp::kAtLastGrid || warp.state == Warp::kAtRegisters;
  };
  Warp* next = nullptr;
  if (by_priority_) {
    for (const auto& cluster : clusters_) {
      for (const auto& cta : cluster->ctas) {
        for (Warp& warp : cta->warps) {
          if (may_go_on(warp) && random_() % 256 == 0) warp.priority = static_cast<int64_t>(random_() >> 2);
          if (may_go_on(warp) && (next == nullptr || warp.priority > next->priority)) next = &warp;
        }
      }
    }
    return next;
  }
  // Of a random cluster the first from a random one on.
  const Cluster& cluster = *clusters_[random_() % clusters_.size()];
  const size_t each = cluster.ctas[0]->warps.size(), all = cluster.ctas.size() * each, first = random_() % all;
  for (size_t i = 0; i < all && next == nullptr; ++i) {
    const size_t at = (first + i) % all;
    Warp& warp = cluster.ctas[at / each]->warps[at % each];
    if (may_go_on(warp)) next = &warp;
  }
  return next;
}

bool Machine::step(Warp& warp) {
  const Program& program = *warp.cta->cluster->grid->launch.program;
  const int quantum = static_cast<int>(random_() % 400) + 1;
  for (Group& group : warp.groups) group.polls = false;
  int done = 0;
  bool polled = false;
  while (done < quantum && warp.state == Warp::kReady) {
    Group* group = next_group(warp);
    if (group == nullptr) {
      if (std::none_of(warp.groups.begin(), warp.groups.end(), [](const Group& g) { return g.polls; })) {
        fail(warp, "lanes that wait for each other");
      }
      break;
    }
    const Instruction& instruction = program.code[static_cast<size_t>(group->at)];
    Mask lanes = group->lanes;
    if (instruction.guard.kind != Operand::kNothing) lanes &= warp.predicate(instruction.guard);
    ++done;
    if (lanes == 0) {
      ++group->at;
      if (warp.groups.size() > 1) meet(warp);
      continue;
    }
    switch (instruction.kind) {
      case Kind::kTogether:
      case Kind::kMembers: {
        Mask wanted = warp.live;
        if (instruction.kind == Kind::kMembers) {
          wanted &= warp.row<uint32_t>(instruction.operands.back())[std::countr_zero(lanes)];
        }
        if ((lanes & wanted) != wanted || (lanes & ~wanted) != 0) {
          if (warp.groups.size() == 1) fail(warp, "an instruction of lanes that are not all here");
          group->waits = true;
          continue;
        }
        [[fallthrough]];
      }
      case Kind::kPlain:
        ++group->at;
        instruction.run(warp, instruction, lanes);
        break;
      case Kind::kBranch:
        if (lanes == group->lanes) {
          group->at = instruction.target;
        } else {
          ++group->at;
          group->lanes &= ~lanes;
          warp.groups.push_back({lanes, instruction.target, false, false});
        }
        break;
      case Kind::kExit:
        warp.live &= ~lanes;
        group->lanes &= ~lanes;
        ++group->at;
        for (Group& other : warp.groups) other.waits = false;
        std::erase_if(warp.groups, [](const Group& g) { return g.lanes == 0; });
        if (warp.groups.empty()) end(warp);
        break;
    }
    if (warp.polls) {
      warp.polls = false;
      polled = true;
      if (warp.groups.size() == 1) break;
      next_group(warp)->polls = true;  // it was the one behind all others
    }
    if (warp.groups.size() > 1) meet(warp);
  }
  instructions += static_cast<uint64_t>(done);
  if (instructions - before_ > kMost) fail(warp, "an endless loop");
  return !polled || done > 8;  // a poll is shorter
}

void Machine::perform_a_copy() {
  const size_t which = random_() % copies_.size();
  const std::function<void()> copy = std::move(copies_[which]);
  copies_[which] = std::move(copies_.back());
  copies_.pop_back();
  copy();
}

bool Machine::can_begin(size_t grid) const {
  if (grids_[grid]->begun == grids_[grid]->clusters || grids_[grid]->done) return false;
  if (grid == 0) return true;
  const Grid& last = *grids_[grid - 1];
  const Dim all = last.launch.grid;
  return last.done || (grids_[grid]->launch.early && last.letting == int64_t{all.x} * all.y * all.z);
}

namespace {

// XLA has a CPU flush subnormal numbers to zero, which a GPU does not.
class NumbersAsTheyAre {
 public:
  NumbersAsTheyAre() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~NumbersAsTheyAre() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};

}  // namespace

// A CTA has the registers that it was launched with: who wants more waits until others have given up as many.
void Machine::move_registers(Warp& warp, int count, bool more) {
  if (warp.owned == 0) fail(warp, "registers are moved in a kernel of any number of threads");
  if (count % 8 != 0 || count < 24 || count > 256 || (more ? count < warp.owned : count > warp.owned)) {
    fail(warp, std::to_string(warp.owned) + " registers cannot become " + std::to_string(count));
  }
  warp.wanted = count;
  if (!take_registers(warp)) warp.state = Warp::kAtRegisters;
}

bool Machine::take_registers(Warp& warp) {
  int& spare = warp.cta->spare_registers;
  const int more = warp.wanted - warp.owned;
  if (more > spare) return false;
  spare -= more;
  warp.owned = warp.wanted;
  return true;
}

bool Machine::go_on(Warp& warp) {
  Cluster& cluster = *warp.cta->cluster;
  Grid& grid = *cluster.grid;
  if (warp.state == Warp::kAtLastGrid) {
    const auto here = std::find_if(grids_.begin(), grids_.end(), [&](const auto& g) { return g.get() == &grid; });
    if (here == grids_.begin() || (*std::prev(here))->done) warp.state = Warp::kReady;
  }
  if (warp.state == Warp::kAtRegisters && take_registers(warp)) warp.state = Warp::kReady;
  const bool came_on = warp.state == Warp::kReady && step(warp);
  if (!came_on) warp.priority = --lowest_;
  if (cluster.live_warps == 0) {
    if (++grid.ended == grid.clusters) {
      grid.done = true;
      ++kernels;
    }
    std::erase_if(clusters_, [&](const auto& c) { return c.get() == &cluster; });
  }
  return came_on;
}

bool Machine::begin_a_cluster() {
  for (size_t g = 0; g < grids_.size(); ++g) {
    if (can_begin(g) && grids_[g]->begun - grids_[g]->ended < grids_[g]->resident) {
      begin(*grids_[g]);
      return true;
    }
  }
  return false;
}

void Machine::make_grids() {
  while (!queue_.empty()) {
    auto grid = std::make_unique<Grid>();
    grid->launch = std::move(queue_.front());
    queue_.pop_front();
    const Launch& launch = grid->launch;
    if (launch.program) {
      const Dim clusters = launch.clusters();
      grid->clusters = int64_t{clusters.x} * clusters.y * clusters.z;
      const int ctas = ctas_of_multiprocessor(launch.threads(), launch.shared_bytes());
      grid->resident = std::max(std::max(ctas, 1) * gpu.multiprocessors / launch.cluster_ctas(), 1);
    }
    grids_.push_back(std::move(grid));
  }
}

void Machine::run() {
  const NumbersAsTheyAre numbers;
  before_ = instructions;
  random_.seed(seed);
  mode_ = static_cast<int>(seed % 3);
  by_priority_ = seed / 3 % 2 == 1;
  last_ = {0, 0};
  try {
    make_grids();
    size_t wanted = 1 + random_() % 4;  // clusters at a time; more where these wait for others
    int64_t idle = 0;
    while (true) {
      for (size_t g = 0; g < grids_.size(); ++g) {
        if (grids_[g]->launch.instead && !grids_[g]->done && (g == 0 || grids_[g - 1]->done)) {
          grids_[g]->launch.instead();
          grids_[g]->done = true;
        }
      }
      while (clusters_.size() < wanted && begin_a_cluster()) {
      }
      if (clusters_.empty()) break;
      Warp* const next = next_warp();
      idle = next != nullptr && go_on(*next) ? 0 : idle + 1;
      if (!copies_.empty() && random_() % 4 == 0) perform_a_copy();
      int64_t warps = 0;
      for (const auto& cluster : clusters_) warps += cluster->live_warps;
      if (idle <= 20 * warps + 200) continue;
      idle = 0;
      if (!copies_.empty()) {
        perform_a_copy();
      } else if (begin_a_cluster()) {
        wanted = clusters_.size();
      } else {
        fail_all();
      }
    }
  } catch (...) {
    clusters_.clear();
    grids_.clear();
    copies_.clear();
    queue_.clear();
    throw;
  }
  grids_.clear();
}

}  // namespace emulator
