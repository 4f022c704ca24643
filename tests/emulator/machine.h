// What executes kernels: grids of clusters of CTAs of warps, with what goes on beside the instructions of a warp:
// copies and products that end some time before they are waited for. When they end, and which warp goes on next, a seed
// decides.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "../device_attributes.h"
#include "program.h"
#include "races.h"

namespace emulator {

struct Dim {
  uint32_t x = 1, y = 1, z = 1;
  uint32_t axis(int i) const { return i == 0 ? x : i == 1 ? y : z; }
};

struct Cta;
struct Cluster;
struct Grid;

// Lanes that are at the same instruction.
struct Group {
  Mask lanes = 0;
  int at = 0;
  bool waits = false;  // for others of the warp to come to the same instruction
  bool polls = false;  // came to a condition that did not hold
};

// A copy of cp.async, or a product, that is on its way.
struct Pending {
  int group = 0;  // of which it is, of its lane or warp
  int lane = 0;
  std::function<void()> perform;
};

struct Warp {
  enum State { kReady, kAtBarrier, kAtCluster, kAtLastGrid, kAtRegisters, kDone };
  Cta* cta = nullptr;
  int index = 0;  // in the CTA
  State state = kReady;
  int64_t priority = 0;
  Mask live = 0;
  std::vector<Group> groups;
  std::vector<uint8_t> registers, local;
  int owned = 0, wanted = 0;  // registers of a thread
  std::vector<Mask> predicates;
  bool polls = false;  // the instruction came to a condition that did not hold
  bool cluster_arrived = false;
  uint32_t cluster_phase = 0;
  std::vector<Pending> copies, products, stores;
  int copy_groups[kLanes] = {};
  int product_groups = 0;
  int stores_begun = 0;
  int number = 0;  // in the cluster
  Clock known;     // where races are watched

  template <typename T>
  T* row(const Operand& o) {
    return reinterpret_cast<T*>((o.constant ? const_cast<uint8_t*>(constants) : registers.data()) + o.at);
  }
  uint64_t address(const Operand& o, int lane) {
    return o.kind == Operand::kRow64 ? row<uint64_t>(o)[lane] : row<uint32_t>(o)[lane];
  }
  Mask predicate(const Operand& o) const {
    if (o.constant) {
      Mask all;
      std::memcpy(&all, constants + o.at, sizeof all);
      return o.negated ? ~all : all;
    }
    return o.negated ? ~predicates[static_cast<size_t>(o.at)] : predicates[static_cast<size_t>(o.at)];
  }
  const uint8_t* constants = nullptr;
};

struct Barrier {
  int arrived = 0, wanted = 0;  // threads; 0: all of the CTA that have not ended
  std::vector<Warp*> waiting;
  Clock known;  // to those who have arrived
};

struct Cta {
  Cluster* cluster = nullptr;
  Dim index;
  std::unique_ptr<uint8_t[]> storage;
  uint8_t* shared = nullptr;
  std::vector<Warp> warps;
  std::map<int, Barrier> barriers;
  int live_warps = 0;
  int spare_registers = 0;  // of the threads of a warp, that others have given up
  int on_their_way = 0;     // copies into its shared memory
  bool lets_next_begin = false;
  std::unique_ptr<Shadow> shadow;  // where races are watched
};

struct Cluster {
  Grid* grid = nullptr;
  std::vector<std::unique_ptr<Cta>> ctas;
  int live_warps = 0, arrived = 0;
  uint32_t phase = 0;
  std::unique_ptr<Races> races;  // where they are watched
  Clock arriving, passed;        // as of an mbarrier
};

struct alignas(128) ParamLine {
  uint8_t bytes[128];
};

struct Launch {
  Launch() = default;
  Launch(std::shared_ptr<const Program> kernel, Dim grid_size, Dim block_size, Dim cluster_size, int64_t dynamic_bytes)
      : program(std::move(kernel)),
        grid(grid_size),
        block(block_size),
        cluster(cluster_size),
        dynamic_shared(dynamic_bytes),
        params(static_cast<size_t>(program->param_bytes) / sizeof(ParamLine) + 1) {}

  std::shared_ptr<const Program> program;
  Dim grid, block, cluster;
  int64_t dynamic_shared = 0;
  bool early = false;
  std::vector<ParamLine> params;
  std::function<void()> instead;  // of a kernel: a memset

  const uint8_t* param_data() const { return params.data()->bytes; }
  void set_argument(size_t number, const void* value) {
    const auto [offset, bytes] = program->params[number];
    std::memcpy(params.data()->bytes + offset, value, static_cast<size_t>(bytes));
  }
  int64_t shared_bytes() const { return program->static_shared + dynamic_shared; }
  int threads() const { return static_cast<int>(block.x * block.y * block.z); }
  int cluster_ctas() const { return static_cast<int>(cluster.x * cluster.y * cluster.z); }
  Dim clusters() const { return {grid.x / cluster.x, grid.y / cluster.y, grid.z / cluster.z}; }
};

struct Grid {
  Launch launch;
  int64_t clusters = 0, begun = 0, ended = 0;
  int resident = 1;     // clusters that the GPU has room for
  int64_t letting = 0;  // CTAs that let the next grid begin, or have ended
  bool done = false;
};

class Machine {
 public:
  static Machine& the();
  static inline DeviceAttributes gpu{90, 132, 232448, 233472};  // an H100
  static inline int device = 0;                                 // another one whenever `gpu` changes
  static void set_gpu(int multiprocessors, int bytes_of_cta) {
    gpu.multiprocessors = multiprocessors;
    gpu.bytes_of_cta = bytes_of_cta;
    gpu.bytes_of_multiprocessor = bytes_of_cta + DeviceAttributes::kReservedBytes;
    ++device;
  }
  static int ctas_of_multiprocessor(int threads, int64_t shared_bytes) {
    const int64_t by_shared = gpu.bytes_of_multiprocessor / (shared_bytes + DeviceAttributes::kReservedBytes);
    return static_cast<int>(std::min<int64_t>(2048 / threads, by_shared));
  }

  Fault fault;  // of kernels that are decoded from now on
  uint64_t faulty_kernels = 0;
  uint64_t seed = 0;
  bool watches_races = false;
  uint64_t kernels = 0, instructions = 0;  // that have run

  // What kernels may read and write.
  void allow(const void* data, int64_t bytes) {
    if (bytes > 0) allowed_[reinterpret_cast<uint64_t>(data)] = bytes;
  }
  void forbid_all() { allowed_.clear(); }
  void enqueue(Launch launch) { queue_.push_back(std::move(launch)); }
  // Runs what has been enqueued, to its end. Throws std::runtime_error where a kernel does what is undefined.
  void run();

  // Of instructions.
  // `use`: by the warp itself, now.
  uint8_t* shared_at(Warp& warp, uint64_t address, int64_t bytes, int64_t align, Use use);
  // Whether the warp reads what is not known to be there yet.
  bool too_early(Warp& warp, uint64_t address, int64_t bytes) {
    Cta& cta = cta_of(warp, address);
    return cta.shadow != nullptr &&
           cta.shadow->access(static_cast<int64_t>(address & 0xffffff), bytes, Use::kGlance, warp.known, {})
               .has_value();
  }
  // What the warp has others do beside it.
  void watch(Warp& warp, uint64_t address, int64_t bytes, Use use, const Moment& moment);
  // All that the warp has done so far is before what it does from now on.
  static void tick(Warp& warp) { ++warp.known.of(Races::of_warp(warp.number, Races::kItself)); }
  uint8_t* memory_at(Warp& warp, uint64_t address, int64_t bytes, int64_t align);  // global, local or of the CTA
  [[noreturn]] void fail(Warp& warp, const std::string& what) const;
  bool at_once() { return mode_ == 0 || (mode_ == 2 && (random_() & 1) != 0); }
  // A copy into shared memory of a CTA.
  void later(Cta& to, std::function<void()> copy) {
    if (at_once()) return copy();
    ++to.on_their_way;
    copies_.push_back([&to, copy = std::move(copy)] {
      --to.on_their_way;
      copy();
    });
  }
  Cta& cta_of(Warp& warp, uint64_t address);  // of shared memory
  void arrive_at_barrier(Warp& warp, int barrier, int threads, bool waits);
  void arrive_at_cluster(Warp& warp);
  void wait_for_cluster(Warp& warp);
  void wait_for_last_grid(Warp& warp) { warp.state = Warp::kAtLastGrid; }
  void let_next_begin(Warp& warp);
  void move_registers(Warp& warp, int count, bool more);

 private:
  [[noreturn]] void fail_all() const;
  void make_grids();  // of the queue
  void begin(Grid& grid);
  void begin(Cta& cta, const Dim& cluster, int rank);
  bool begin_a_cluster();
  void end(Warp& warp);
  void release(Barrier& barrier, const Cta& cta);
  void release(Cluster& cluster);
  Warp* next_warp();
  bool go_on(Warp& warp);  // whether it came on
  static bool take_registers(Warp& warp);
  bool step(Warp& warp);
  void perform_a_copy();
  bool can_begin(size_t grid) const;

  std::deque<Launch> queue_;
  std::vector<std::unique_ptr<Grid>> grids_;
  std::vector<std::unique_ptr<Cluster>> clusters_;
  std::vector<std::function<void()>> copies_;
  std::map<uint64_t, int64_t> allowed_;
  std::pair<uint64_t, uint64_t> last_{0, 0};
  std::mt19937_64 random_;
  static constexpr uint64_t kMost = 1'000'000'000;  // instructions of a run
  uint64_t before_ = 0;                             // those that had run when it began
  bool by_priority_ = false;                        // the warp with the highest goes on, until it waits; otherwise any
  int64_t lowest_ = 0;                              // priority so far
  int mode_ = 0;  // copies and products end at once (0), as late as they may (1), or either
};

}  // namespace emulator
