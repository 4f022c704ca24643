// What the instructions do.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <stdexcept>
#include <type_traits>

#include "machine.h"
#include "tensor.h"

namespace emulator {
namespace {

using Run = void (*)(Warp&, const Instruction&, Mask);

template <typename T>
using Row = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <typename T>
T from_row(Row<T> bits) {
  if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<float>(bits);
  } else {
    return static_cast<T>(bits);
  }
}
template <typename T>
Row<T> to_row(T value) {
  if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<uint32_t>(value);
  } else {
    return static_cast<std::make_unsigned_t<T>>(value);
  }
}

template <typename F>
void each(Mask lanes, F f) {
  for (; lanes != 0; lanes &= lanes - 1) f(std::countr_zero(lanes));
}

// --- Arithmetic: D f(S...) of every lane

template <typename F, typename D, typename... S, size_t... I>
void apply_to(Warp& w, const Instruction& i, Mask lanes, std::index_sequence<I...>) {
  Row<D>* const to = w.row<Row<D>>(i.operands[0]);
  const auto from = std::make_tuple(w.row<Row<S>>(i.operands[I + 1])...);
  if (lanes == kAllLanes) {
#pragma GCC ivdep
    for (int lane = 0; lane < kLanes; ++lane) {
      to[lane] = to_row<D>(static_cast<D>(F{}(from_row<S>(std::get<I>(from)[lane])...)));
    }
  } else {
    each(lanes, [&](int lane) { to[lane] = to_row<D>(static_cast<D>(F{}(from_row<S>(std::get<I>(from)[lane])...))); });
  }
}
template <typename F, typename D, typename... S>
void apply(Warp& w, const Instruction& i, Mask lanes) {
  apply_to<F, D, S...>(w, i, lanes, std::index_sequence_for<S...>{});
}

template <typename T>
constexpr char letter() {
  return sizeof(T) == 8 ? 'd' : 'w';
}
template <typename D, typename... S, typename F>
Opcode arithmetic(F) {
  return {apply<F, D, S...>, Kind::kPlain, {letter<D>()}, {letter<S>()...}, 0};
}

// A predicate from what is compared.
template <typename F, typename S>
void compare(Warp& w, const Instruction& i, Mask lanes) {
  const auto* const a = w.row<Row<S>>(i.operands[1]);
  const auto* const b = w.row<Row<S>>(i.operands[2]);
  Mask holds = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    holds |= static_cast<Mask>(F{}(from_row<S>(a[lane]), from_row<S>(b[lane]))) << lane;
  }
  Mask& to = w.predicates[static_cast<size_t>(i.operands[0].at)];
  to = (to & ~lanes) | (holds & lanes);
}
template <typename S, typename F>
Opcode comparison(F) {
  return {compare<F, S>, Kind::kPlain, "p", {letter<S>(), letter<S>()}, 0};
}

template <typename F>
void logic(Warp& w, const Instruction& i, Mask lanes) {
  Mask& to = w.predicates[static_cast<size_t>(i.operands[0].at)];
  const Mask a = w.predicate(i.operands[1]), b = w.predicate(i.operands.back());
  to = (to & ~lanes) | (F{}(a, b) & lanes);
}

template <typename T>
void select(Warp& w, const Instruction& i, Mask lanes) {
  const Mask first = w.predicate(i.operands[3]);
  const auto *const a = w.row<T>(i.operands[1]), *const b = w.row<T>(i.operands[2]);
  T* const to = w.row<T>(i.operands[0]);
  each(lanes, [&](int lane) { to[lane] = (first >> lane & 1) != 0 ? a[lane] : b[lane]; });
}

// --- Numbers of 16 and of eight bits

// Rounds to odd: a further rounding to a format of fewer bits then is as if it were the only one.
float to_odd(double exact, double rest = 0) {
  const auto odd = [](auto near, auto toward) {  // `near` is not exact: the neighbour that is odd
    using Bits = std::conditional_t<sizeof(near) == 8, uint64_t, uint32_t>;
    if ((std::bit_cast<Bits>(near) & 1) != 0 || near == toward) return near;
    return std::nextafter(near, toward);
  };
  if (rest != 0 && std::isfinite(exact)) {
    exact = odd(exact, exact + (rest > 0 ? 1 : -1) * std::numeric_limits<double>::infinity());
  }
  const auto near = static_cast<float>(exact);
  if (!std::isfinite(near) || near == exact) return near;
  return odd(near, near < exact ? std::numeric_limits<float>::infinity() : -std::numeric_limits<float>::infinity());
}

struct Half {
  static float wide(uint16_t bits) { return _cvtsh_ss(bits); }
  static uint16_t narrow(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
};
struct Bf16 {
  static float wide(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
  static uint16_t narrow(float value) {
    if (std::isnan(value)) return 0x7fff;
    const auto bits = std::bit_cast<uint32_t>(value);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

template <typename T>
uint16_t fma_of(uint16_t a, uint16_t b, uint16_t c) {
  const double product = double{T::wide(a)} * T::wide(b), addend = T::wide(c);
  const double sum = product + addend;
  const double back = sum - product;
  const double rest = (product - (sum - back)) + (addend - back);
  return T::narrow(to_odd(sum, std::isfinite(sum) ? rest : 0));
}

template <typename T, typename F>
struct Pairs {
  template <typename... S>
  uint32_t operator()(S... s) const {
    const uint32_t low = F{}(static_cast<uint16_t>(s)...), high = F{}(static_cast<uint16_t>(s >> 16)...);
    return low | high << 16;
  }
};

float from_e4m3(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  float value = exponent == 15 && mantissa == 7 ? std::numeric_limits<float>::quiet_NaN()
                : exponent == 0                 ? std::ldexp(static_cast<float>(mantissa), -9)
                                                : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return (bits & 0x80) != 0 ? -value : value;
}
uint8_t to_e4m3(float value) {  // to nearest even, the largest where it is larger
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return sign | 0x7f;
  const float magnitude = std::min(std::fabs(value), 448.0f);
  int best = 0;
  for (int code = 1; code < 0x7f; ++code) {
    const float now = std::fabs(from_e4m3(static_cast<uint8_t>(code)) - magnitude);
    const float least = std::fabs(from_e4m3(static_cast<uint8_t>(best)) - magnitude);
    if (now < least || (now == least && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(sign | best);
}

// Towards minus infinity.
float fma_down(float a, float b, float c) {
  const float near = std::fma(a, b, c);
  const double product = double{a} * b, sum = product + c;  // the product is exact
  return std::isfinite(near) && (near > sum || (near == sum && sum - product > c))
             ? std::nextafter(near, -std::numeric_limits<float>::infinity())
             : near;
}

float flushed(float value) { return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value; }

// --- Conversions

template <typename D>
D truncated(float value) {  // saturates; NaN is 0
  if (std::isnan(value)) return 0;
  if (value <= static_cast<float>(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
  if (value >= static_cast<float>(std::numeric_limits<D>::max())) return std::numeric_limits<D>::max();
  return static_cast<D>(value);
}

// --- Memory

uint64_t offset_address(Warp& w, const Instruction& i, const Operand& o, int lane) {
  const uint64_t address = w.address(o, lane) + static_cast<uint64_t>(i.offset);
  return o.kind == Operand::kRow64 ? address : static_cast<uint32_t>(address);
}

uint8_t* place(Warp& w, uint64_t address, int64_t bytes, int64_t align, bool shared, Use use) {
  return shared ? Machine::the().shared_at(w, address, bytes, align, use)
                : Machine::the().memory_at(w, address, bytes, align);
}

// T is what is in memory, D what a register holds.
template <typename T, typename D, bool kShared>
void load(Warp& w, const Instruction& i, Mask lanes) {
  const size_t count = i.operands.size() - 1;
  each(lanes, [&](int lane) {
    const auto bytes = static_cast<int64_t>(count * sizeof(T));
    const uint8_t* const from =
        place(w, offset_address(w, i, i.operands[count], lane), bytes, bytes, kShared, Use::kRead);
    for (size_t k = 0; k < count; ++k) {
      T value;
      std::memcpy(&value, from + k * sizeof(T), sizeof(T));
      w.row<Row<D>>(i.operands[k])[lane] = to_row<D>(static_cast<D>(value));
    }
  });
}
void load_acquire(Warp& w, const Instruction& i, Mask lanes) {
  load<uint64_t, uint64_t, false>(w, i, lanes);
  w.polls = true;
}
template <typename T, bool kShared>
void store(Warp& w, const Instruction& i, Mask lanes) {
  const size_t count = i.operands.size() - 1;
  each(lanes, [&](int lane) {
    const auto bytes = static_cast<int64_t>(count * sizeof(T));
    const uint64_t address = offset_address(w, i, i.operands[0], lane);
    uint8_t* const to = place(w, address, bytes, bytes, kShared, Use::kNone);
    std::array<T, 4> values;
    for (size_t k = 0; k < count; ++k) values[k] = static_cast<T>(w.row<Row<T>>(i.operands[k + 1])[lane]);
    if (kShared &&
        std::memcmp(to, values.data(), static_cast<size_t>(bytes)) != 0) {  // several warps may write the same
      place(w, address, bytes, bytes, kShared, Use::kWrite);
    }
    std::memcpy(to, values.data(), static_cast<size_t>(bytes));
  });
}
template <typename F, bool kShared, bool kResult>
void atomic(Warp& w, const Instruction& i, Mask lanes) {
  const size_t at = kResult ? 1 : 0;
  each(lanes, [&](int lane) {
    uint8_t* const to = place(w, offset_address(w, i, i.operands[at], lane), 4, 4, kShared, Use::kAtomic);
    uint32_t value;
    std::memcpy(&value, to, 4);
    const uint32_t now = F{}(value, w.row<uint32_t>(i.operands[at + 1])[lane]);
    std::memcpy(to, &now, 4);
    if (kResult) w.row<uint32_t>(i.operands[0])[lane] = value;
  });
}

Opcode load_of(const std::string& name, int count, bool shared) {
  const std::string type = name.substr(name.rfind('.') + 1);
  const auto make = [&](auto in_memory, auto in_register) {
    using T = decltype(in_memory);
    using D = decltype(in_register);
    Opcode opcode{shared ? load<T, D, true> : load<T, D, false>, Kind::kPlain, "", "a", 0};
    opcode.results.assign(static_cast<size_t>(count), letter<D>());
    return opcode;
  };
  if (type == "u8" || type == "b8") return make(uint8_t{}, uint32_t{});
  if (type == "s8") return make(int8_t{}, int32_t{});
  if (type == "u16" || type == "b16") return make(uint16_t{}, uint32_t{});
  if (type == "u32" || type == "s32" || type == "b32" || type == "f32") return make(uint32_t{}, uint32_t{});
  if (type == "u64" || type == "s64" || type == "b64") return make(uint64_t{}, uint64_t{});
  throw std::runtime_error("emulator: not known: " + name);
}
Opcode store_of(const std::string& name, int count, bool shared) {
  const std::string type = name.substr(name.rfind('.') + 1);
  const auto make = [&](auto in_memory) {
    using T = decltype(in_memory);
    Opcode opcode{shared ? store<T, true> : store<T, false>, Kind::kPlain, "", "a", 0};
    opcode.sources.append(static_cast<size_t>(count), letter<T>());
    return opcode;
  };
  if (type == "u8" || type == "b8") return make(uint8_t{});
  if (type == "u16" || type == "b16") return make(uint16_t{});
  if (type == "u32" || type == "s32" || type == "b32" || type == "f32") return make(uint32_t{});
  if (type == "u64" || type == "s64" || type == "b64") return make(uint64_t{});
  throw std::runtime_error("emulator: not known: " + name);
}

// --- Lanes of a warp

template <typename F>
void shuffle(Warp& w, const Instruction& i, Mask lanes) {  // d|p, a, b, c, members
  const auto* const a = w.row<uint32_t>(i.operands[2]);
  const auto *const b = w.row<uint32_t>(i.operands[3]), *const c = w.row<uint32_t>(i.operands[4]);
  uint32_t values[kLanes];
  Mask inside = 0;
  each(lanes, [&](int lane) {
    const int clamp = static_cast<int>(c[lane] & 31), segment = static_cast<int>(c[lane] >> 8 & 31);
    const int most = (lane & segment) | (clamp & ~segment), least = lane & segment;
    int from = F{}(lane, static_cast<int>(b[lane] & 31), segment, least);
    const bool is_up = F::kUp;
    const bool in = is_up ? from >= most : from <= most;
    if (!in) from = lane;
    if ((lanes >> from & 1) == 0) Machine::the().fail(w, "a shuffle from a lane that is not there");
    values[lane] = a[from];
    inside |= static_cast<Mask>(in) << lane;
  });
  auto* const to = w.row<uint32_t>(i.operands[0]);
  each(lanes, [&](int lane) { to[lane] = values[lane]; });
  if (i.operands[1].kind == Operand::kPredicate) {
    Mask& p = w.predicates[static_cast<size_t>(i.operands[1].at)];
    p = (p & ~lanes) | (inside & lanes);
  }
}
struct FromIndex {
  static constexpr bool kUp = false;
  int operator()(int, int b, int segment, int least) const { return least | (b & ~segment); }
};
struct FromButterfly {
  static constexpr bool kUp = false;
  int operator()(int lane, int b, int, int) const { return lane ^ b; }
};
struct FromBelow {
  static constexpr bool kUp = true;
  int operator()(int lane, int b, int, int) const { return lane - b; }
};

void ballot(Warp& w, const Instruction& i, Mask lanes) {
  const Mask votes = w.predicate(i.operands[1]) & lanes;
  each(lanes, [&](int lane) { w.row<uint32_t>(i.operands[0])[lane] = votes; });
}
void vote_all(Warp& w, const Instruction& i, Mask lanes) {
  Mask& to = w.predicates[static_cast<size_t>(i.operands[0].at)];
  const bool all = (w.predicate(i.operands[1]) & lanes) == lanes;
  to = (to & ~lanes) | (all ? lanes : 0);
}
void vote_any(Warp& w, const Instruction& i, Mask lanes) {
  Mask& to = w.predicates[static_cast<size_t>(i.operands[0].at)];
  const bool any = (w.predicate(i.operands[1]) & lanes) != 0;
  to = (to & ~lanes) | (any ? lanes : 0);
}
void match_any(Warp& w, const Instruction& i, Mask lanes) {
  const auto* const a = w.row<uint32_t>(i.operands[1]);
  Mask found[kLanes];
  each(lanes, [&](int lane) {
    found[lane] = 0;
    each(lanes, [&](int other) { found[lane] |= static_cast<Mask>(a[other] == a[lane]) << other; });
  });
  each(lanes, [&](int lane) { w.row<uint32_t>(i.operands[0])[lane] = found[lane]; });
}
void reduce_max(Warp& w, const Instruction& i, Mask lanes) {
  const auto* const a = w.row<uint32_t>(i.operands[1]);
  uint32_t most = 0;
  each(lanes, [&](int lane) { most = std::max(most, a[lane]); });
  each(lanes, [&](int lane) { w.row<uint32_t>(i.operands[0])[lane] = most; });
}
void reduce_add(Warp& w, const Instruction& i, Mask lanes) {
  const auto* const a = w.row<uint32_t>(i.operands[1]);
  uint32_t sum = 0;
  each(lanes, [&](int lane) { sum += a[lane]; });
  each(lanes, [&](int lane) { w.row<uint32_t>(i.operands[0])[lane] = sum; });
}
void elect(Warp& w, const Instruction& i, Mask lanes) {  // _|p, members
  Mask& to = w.predicates[static_cast<size_t>(i.operands[1].at)];
  to = (to & ~lanes) | (lanes & (0 - lanes));
}
void nothing(Warp&, const Instruction&, Mask) {}
template <bool kMore>
void move_registers(Warp& w, const Instruction& i, Mask lanes) {
  const uint32_t count = w.row<uint32_t>(i.operands[0])[std::countr_zero(lanes)];
  Machine::the().move_registers(w, static_cast<int>(count), kMore);
}
void trap(Warp& w, const Instruction&, Mask) { Machine::the().fail(w, "trap"); }

// --- Packing: mov with a vector

void pack16(Warp& w, const Instruction& i, Mask lanes) {
  each(lanes, [&](int lane) {
    w.row<uint32_t>(i.operands[0])[lane] =
        (w.row<uint32_t>(i.operands[1])[lane] & 0xffff) | w.row<uint32_t>(i.operands[2])[lane] << 16;
  });
}
void unpack16(Warp& w, const Instruction& i, Mask lanes) {
  each(lanes, [&](int lane) {
    const uint32_t value = w.row<uint32_t>(i.operands[2])[lane];
    w.row<uint32_t>(i.operands[0])[lane] = value & 0xffff;
    w.row<uint32_t>(i.operands[1])[lane] = value >> 16;
  });
}
void pack32(Warp& w, const Instruction& i, Mask lanes) {
  each(lanes, [&](int lane) {
    w.row<uint64_t>(i.operands[0])[lane] =
        w.row<uint32_t>(i.operands[1])[lane] | static_cast<uint64_t>(w.row<uint32_t>(i.operands[2])[lane]) << 32;
  });
}
void unpack32(Warp& w, const Instruction& i, Mask lanes) {
  each(lanes, [&](int lane) {
    const uint64_t value = w.row<uint64_t>(i.operands[2])[lane];
    w.row<uint32_t>(i.operands[0])[lane] = static_cast<uint32_t>(value);
    w.row<uint32_t>(i.operands[1])[lane] = static_cast<uint32_t>(value >> 32);
  });
}

// --- Addresses

template <bool kToShared>
void convert_address(Warp& w, const Instruction& i, Mask lanes) {
  each(lanes, [&](int lane) {
    const uint64_t from = w.row<uint64_t>(i.operands[1])[lane];
    const auto base = reinterpret_cast<uint64_t>(w.cta->shared);
    w.row<uint64_t>(i.operands[0])[lane] = kToShared ? from - base : from + base;
  });
}
void address_at_rank(Warp& w, const Instruction& i, Mask lanes) {  // mapa
  each(lanes, [&](int lane) {
    const uint32_t rank = w.row<uint32_t>(i.operands[2])[lane];
    if (rank >= w.cta->cluster->ctas.size()) Machine::the().fail(w, "mapa of a rank that is not in the cluster");
    w.row<uint32_t>(i.operands[0])[lane] = (w.row<uint32_t>(i.operands[1])[lane] & 0xffffff) | (rank + 1) << 24;
  });
}

// --- Barriers in shared memory

struct BarrierState {
  uint16_t phase, expected;  // arrivals of a phase
  int16_t pending;
  uint16_t made;  // kMade
  static constexpr uint16_t kMade = 0x5aa5;
};
static_assert(sizeof(BarrierState) == 8);

uint8_t* barrier_place(Warp& w, const Instruction& i, size_t operand, int lane) {
  return Machine::the().shared_at(w, offset_address(w, i, i.operands[operand], lane), 8, 8, Use::kNone);
}
Races* races_of(const Warp& w) { return w.cta->cluster->races.get(); }  // where they are watched

// The bytes that are on their way do not fit beside the rest: by the barrier's place.
std::map<const uint8_t*, int64_t> bytes_on_their_way;

void complete(uint8_t* barrier, BarrierState& state, Races* races) {
  const auto bytes = bytes_on_their_way.find(barrier);
  if (state.pending == 0 && (bytes == bytes_on_their_way.end() || bytes->second == 0)) {
    state.phase ^= 1;
    state.pending = static_cast<int16_t>(state.expected);
    if (races != nullptr) races->barrier(barrier).end_phase();
  }
  std::memcpy(barrier, &state, sizeof state);
}
BarrierState barrier_at(Warp& w, const uint8_t* barrier) {
  BarrierState state;
  std::memcpy(&state, barrier, sizeof state);
  if (state.made != BarrierState::kMade) Machine::the().fail(w, "an mbarrier that was not initialised");
  return state;
}
void arrive(Warp& w, uint8_t* barrier, int64_t bytes) {
  BarrierState state = barrier_at(w, barrier);
  if (--state.pending < 0) Machine::the().fail(w, "more arrivals at an mbarrier than it has");
  if (bytes != 0) bytes_on_their_way[barrier] += bytes;
  Races* const races = races_of(w);
  if (races != nullptr) {
    races->barrier(barrier).arriving.join(w.known);
    Machine::tick(w);
  }
  complete(barrier, state, races);
}
void count_bytes(uint8_t* barrier, int64_t bytes, Races* races) {
  BarrierState state;
  std::memcpy(&state, barrier, sizeof state);
  bytes_on_their_way[barrier] -= bytes;
  complete(barrier, state, races);
}

void barrier_init(Warp& w, const Instruction& i, Mask lanes) {
  each(lanes, [&](int lane) {
    uint8_t* const barrier = barrier_place(w, i, 0, lane);
    const auto count = static_cast<uint16_t>(w.row<uint32_t>(i.operands[1])[lane]);
    const BarrierState state{0, count, static_cast<int16_t>(count), BarrierState::kMade};
    bytes_on_their_way.erase(barrier);
    if (Races* const races = races_of(w); races != nullptr) races->barrier(barrier).arriving.clear();
    std::memcpy(barrier, &state, sizeof state);
  });
}
void barrier_arrive(Warp& w, const Instruction& i, Mask lanes) {
  each(lanes, [&](int lane) { arrive(w, barrier_place(w, i, 1, lane), 0); });
}
void barrier_expect(Warp& w, const Instruction& i, Mask lanes) {
  each(lanes, [&](int lane) { arrive(w, barrier_place(w, i, 1, lane), w.row<uint32_t>(i.operands[2])[lane]); });
}
void barrier_try_wait(Warp& w, const Instruction& i, Mask lanes) {
  Mask done = 0;
  each(lanes, [&](int lane) {
    const uint8_t* const barrier = barrier_place(w, i, 1, lane);
    const uint32_t parity = w.row<uint32_t>(i.operands[2])[lane];
    if (parity > 1) Machine::the().fail(w, "a parity of " + std::to_string(parity));
    if (barrier_at(w, barrier).phase == parity) return;
    done |= Mask{1} << lane;
    if (Races* const races = races_of(w); races != nullptr) {
      const Races::Barrier& passed = races->barrier(barrier);
      w.known.join(passed.passed);
      w.known.of(passed.actor) = passed.phases;
    }
  });
  Mask& to = w.predicates[static_cast<size_t>(i.operands[0].at)];
  to = (to & ~lanes) | done;
  w.polls = done != lanes;
}

// --- Barriers of threads

void sync(Warp& w, const Instruction& i, Mask) {
  const int threads = i.operands.size() > 1 ? static_cast<int>(*w.row<uint32_t>(i.operands[1])) : 0;
  Machine::the().arrive_at_barrier(w, static_cast<int>(*w.row<uint32_t>(i.operands[0])), threads, i.number == 0);
}
void cluster_arrive(Warp& w, const Instruction&, Mask) { Machine::the().arrive_at_cluster(w); }
void cluster_wait(Warp& w, const Instruction&, Mask) { Machine::the().wait_for_cluster(w); }
void wait_for_last(Warp& w, const Instruction&, Mask) { Machine::the().wait_for_last_grid(w); }
void let_next(Warp& w, const Instruction&, Mask) { Machine::the().let_next_begin(w); }

// --- Copies

// Of a copy that counts for a barrier, into shared memory, or out of it.
void watch_copy(Warp& w, uint64_t address, int64_t bytes, Use use, const uint8_t* barrier) {
  Races* const races = races_of(w);
  if (races != nullptr) Machine::the().watch(w, address, bytes, use, races->barrier(barrier).of_copy());
}
Moment moment_of(const Warp& w, Races::Beside beside, int group) {
  return {Races::of_warp(w.number, beside), static_cast<uint32_t>(group) + 1};
}
void ended(Warp& w, Races::Beside beside, int groups) {
  if (races_of(w) == nullptr) return;
  uint32_t& known = w.known.of(Races::of_warp(w.number, beside));
  known = std::max(known, static_cast<uint32_t>(std::max(groups, 0)));
}

void copy_async(Warp& w, const Instruction& i, Mask lanes) {
  each(lanes, [&](int lane) {
    const int64_t bytes = w.row<uint32_t>(i.operands[2])[lane];
    uint8_t* const to = Machine::the().shared_at(w, w.address(i.operands[0], lane), bytes, bytes, Use::kNone);
    Machine::the().watch(w, w.address(i.operands[0], lane), bytes, Use::kWrite,
                         moment_of(w, Races::kCopies, w.copy_groups[lane]));
    const int64_t read = i.operands.size() > 3 ? w.row<uint32_t>(i.operands[3])[lane] : bytes;  // zeros follow
    if (read != 0 && read != bytes) Machine::the().fail(w, "a copy of " + std::to_string(read) + " bytes");
    const uint8_t* const from =
        read == 0 ? nullptr : Machine::the().memory_at(w, w.address(i.operands[1], lane), bytes, bytes);
    const auto copy = [=] {
      if (from == nullptr) {
        std::memset(to, 0, static_cast<size_t>(bytes));
      } else {
        std::memcpy(to, from, static_cast<size_t>(bytes));
      }
    };
    if (Machine::the().at_once()) {
      copy();
    } else {
      w.copies.push_back({w.copy_groups[lane], lane, copy});
    }
  });
}
void commit_copies(Warp& w, const Instruction&, Mask lanes) {
  each(lanes, [&](int lane) { ++w.copy_groups[lane]; });
}
template <typename F>
void perform(std::vector<Pending>& all, F wanted) {
  std::vector<Pending> others;
  for (Pending& pending : all) {
    if (wanted(pending)) {
      pending.perform();
    } else {
      others.push_back(std::move(pending));
    }
  }
  all = std::move(others);
}
void wait_for_copies(Warp& w, const Instruction& i, Mask lanes) {
  const auto most = static_cast<int>(*w.row<uint32_t>(i.operands[0]));
  perform(w.copies,
          [&](const Pending& p) { return (lanes >> p.lane & 1) != 0 && p.group < w.copy_groups[p.lane] - most; });
  if (lanes == w.live) ended(w, Races::kCopies, w.copy_groups[std::countr_zero(lanes)] - most);
}

// To shared memory of this CTA, or of one of the cluster, where a barrier counts the bytes.
void copy_bulk(Warp& w, const Instruction& i, Mask lanes, bool from_shared) {
  each(lanes, [&](int lane) {
    Machine& machine = Machine::the();
    const int64_t bytes = w.row<uint32_t>(i.operands[2])[lane];
    if (bytes % 16 != 0) machine.fail(w, "a bulk copy of " + std::to_string(bytes) + " bytes");
    uint8_t* const to = machine.shared_at(w, w.address(i.operands[0], lane), bytes, 16, Use::kNone);
    const uint8_t* const from = place(w, w.address(i.operands[1], lane), bytes, 16, from_shared, Use::kNone);
    uint8_t* const barrier = machine.shared_at(w, w.address(i.operands[3], lane), 8, 8, Use::kNone);
    watch_copy(w, w.address(i.operands[0], lane), bytes, Use::kWrite, barrier);
    if (from_shared) watch_copy(w, w.address(i.operands[1], lane), bytes, Use::kRead, barrier);
    machine.later(machine.cta_of(w, w.address(i.operands[0], lane)), [=, races = races_of(w)] {
      std::memcpy(to, from, static_cast<size_t>(bytes));
      count_bytes(barrier, bytes, races);
    });
  });
}
void copy_bulk_global(Warp& w, const Instruction& i, Mask lanes) { copy_bulk(w, i, lanes, false); }
void copy_bulk_shared(Warp& w, const Instruction& i, Mask lanes) { copy_bulk(w, i, lanes, true); }
void prefetch_bulk(Warp& w, const Instruction& i, Mask lanes) {
  each(lanes, [&](int lane) {
    const int64_t bytes = w.row<uint32_t>(i.operands[1])[lane];
    if (bytes % 16 != 0) Machine::the().fail(w, "a prefetch of " + std::to_string(bytes) + " bytes");
    Machine::the().memory_at(w, w.address(i.operands[0], lane), bytes, 16);
  });
}
void store_async(Warp& w, const Instruction& i, Mask lanes) {  // to, four words, barrier
  each(lanes, [&](int lane) {
    uint8_t* const to = Machine::the().shared_at(w, w.address(i.operands[0], lane), 16, 16, Use::kNone);
    uint8_t* const barrier = Machine::the().shared_at(w, w.address(i.operands[5], lane), 8, 8, Use::kNone);
    watch_copy(w, w.address(i.operands[0], lane), 16, Use::kWrite, barrier);
    std::array<uint32_t, 4> words;
    for (size_t k = 0; k < 4; ++k) words[k] = w.row<uint32_t>(i.operands[k + 1])[lane];
    const auto races = races_of(w);
    Machine::the().later(Machine::the().cta_of(w, w.address(i.operands[0], lane)), [=] {
      std::memcpy(to, words.data(), 16);
      count_bytes(barrier, 16, races);
    });
  });
}

const TensorMap& map_at(Warp& w, uint64_t address) {
  return *reinterpret_cast<const TensorMap*>(Machine::the().memory_at(w, address, sizeof(CUtensorMap), 64));
}

// [to], [map, {coordinates}], [barrier] and, of pixels, the two offsets; of a multicast, the ranks behind all.
template <int kRank, bool kPixels, bool kMulticast>
void copy_tensor(Warp& w, const Instruction& i, Mask lanes) {
  each(lanes, [&](int lane) {
    Machine& machine = Machine::the();
    const TensorMap& map = map_at(w, w.address(i.operands[1], lane));
    if (map.rank != kRank || map.pixels != kPixels) machine.fail(w, "a tensor map of another kind");
    std::array<int32_t, 4> at{};
    for (int k = 0; k < kRank; ++k) at[k] = static_cast<int32_t>(w.row<uint32_t>(i.operands[2 + k])[lane]);
    std::array<int32_t, 2> offsets{};
    for (int k = 0; kPixels && k < 2; ++k) {
      offsets[k] = static_cast<uint16_t>(w.row<uint32_t>(i.operands[3 + kRank + k])[lane]);
    }
    const uint64_t to = w.address(i.operands[0], lane), counted = w.address(i.operands[2 + kRank], lane);
    const int64_t bytes = map.box_bytes();
    constexpr int64_t kAlign = 128;
    const auto send = [&](uint64_t rank_bits) {
      uint8_t* const place = machine.shared_at(w, (to & 0xffffff) | rank_bits, bytes, kAlign, Use::kNone);
      uint8_t* const barrier = machine.shared_at(w, (counted & 0xffffff) | rank_bits, 8, 8, Use::kNone);
      watch_copy(w, (to & 0xffffff) | rank_bits, bytes, Use::kWrite, barrier);
      machine.later(machine.cta_of(w, rank_bits), [=, map = map, races = races_of(w)] {
        map.read(place, at, offsets);
        count_bytes(barrier, bytes, races);
      });
    };
    if (kMulticast) {
      const uint32_t ranks = w.row<uint32_t>(i.operands.back())[lane] & 0xffff;
      for (uint32_t rank = 0; rank < 16; ++rank) {
        if ((ranks >> rank & 1) != 0) send(uint64_t{rank + 1} << 24);
      }
    } else {
      send(to & ~uint64_t{0xffffff});
    }
  });
}
void store_tensor(Warp& w, const Instruction& i, Mask lanes) {  // [map, {x, y, z}], [from]
  each(lanes, [&](int lane) {
    const TensorMap& map = map_at(w, w.address(i.operands[0], lane));
    std::array<int32_t, 4> at{};
    for (int k = 0; k < 3; ++k) at[k] = static_cast<int32_t>(w.row<uint32_t>(i.operands[1 + k])[lane]);
    const uint64_t address = w.address(i.operands[4], lane);
    const uint8_t* const from = Machine::the().shared_at(w, address, map.box_bytes(), 128, Use::kNone);
    Machine::the().watch(w, address, map.box_bytes(), Use::kRead, moment_of(w, Races::kStores, w.stores_begun++));
    const auto write = [=, map = map] { map.write(from, at); };
    if (Machine::the().at_once()) {
      write();
    } else {
      w.stores.push_back({0, lane, write});
    }
  });
}
void wait_for_stores(Warp& w, const Instruction&, Mask lanes) {
  perform(w.stores, [&](const Pending& p) { return (lanes >> p.lane & 1) != 0; });
  ended(w, Races::kStores, w.stores_begun);
}

// --- Matrices

// What a lane holds of an m x 16 matrix of 16-bit numbers, or an m x 32 one of bytes.
struct Fragment {
  int group, column;
  explicit Fragment(int lane) : group(lane / 4), column(lane % 4) {}
};

void load_matrices(Warp& w, const Instruction& i, Mask) {
  for (int m = 0; m < 4; ++m) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint64_t row = w.address(i.operands[4], 8 * m + lane / 4);
      const uint8_t* const from = Machine::the().shared_at(w, row, 16, 16, Use::kNone) + lane % 4 * 4;
      uint32_t& to = w.row<uint32_t>(i.operands[static_cast<size_t>(m)])[lane];
      std::memcpy(&to, from, 4);
      // Rows that nobody needs may be on their way: NaN shows where they are needed.
      if (Machine::the().too_early(w, row, 16)) to = 0xffffffff;
    }
  }
}
void load_matrices_transposed(Warp& w, const Instruction& i, Mask) {
  for (int m = 0; m < 4; ++m) {
    for (int lane = 0; lane < kLanes; ++lane) {
      uint32_t& to = w.row<uint32_t>(i.operands[static_cast<size_t>(m)])[lane];
      to = 0;
      for (int k = 0; k < 2; ++k) {
        const uint64_t row = w.address(i.operands[4], 8 * m + lane % 4 * 2 + k);
        uint16_t value;
        std::memcpy(&value, Machine::the().shared_at(w, row, 16, 16, Use::kRead) + lane / 4 * 2, 2);
        to |= static_cast<uint32_t>(value) << 16 * k;
      }
    }
  }
}
void store_matrices_transposed(Warp& w, const Instruction& i, Mask) {
  for (int m = 0; m < 4; ++m) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint32_t pair = w.row<uint32_t>(i.operands[static_cast<size_t>(m + 1)])[lane];
      for (int k = 0; k < 2; ++k) {
        const uint64_t row = w.address(i.operands[0], 8 * m + lane % 4 * 2 + k);
        const auto value = static_cast<uint16_t>(pair >> 16 * k);
        std::memcpy(Machine::the().shared_at(w, row, 16, 16, Use::kWrite) + lane / 4 * 2, &value, 2);
      }
    }
  }
}
void transpose(Warp& w, const Instruction& i, Mask) {
  const auto* const from = w.row<uint32_t>(i.operands[1]);
  uint32_t to[kLanes];
  const auto element = [&](int row, int column) { return from[row * 4 + column / 2] >> column % 2 * 16 & 0xffff; };
  for (int lane = 0; lane < kLanes; ++lane) {
    to[lane] = element(lane % 4 * 2, lane / 4) | element(lane % 4 * 2 + 1, lane / 4) << 16;
  }
  std::memcpy(w.row<uint32_t>(i.operands[0]), to, sizeof to);
}

// The numbers of an operand, from the low bits of a register.
struct S8 {
  using Sum = int32_t;
  static int32_t wide(uint32_t bits) { return static_cast<int8_t>(bits); }
  static constexpr int kBytes = 1;
};
struct U8 : S8 {
  static int32_t wide(uint32_t bits) { return static_cast<uint8_t>(bits); }
};
struct E4m3 {
  using Sum = float;
  static float wide(uint32_t bits) { return from_e4m3(static_cast<uint8_t>(bits)); }
  static constexpr int kBytes = 1;
};
template <typename T>
struct Two {
  using Sum = float;
  static float wide(uint32_t bits) { return T::wide(static_cast<uint16_t>(bits)); }
  static constexpr int kBytes = 2;
};
struct Tf32 {
  static float wide(uint32_t bits) { return std::bit_cast<float>(bits & 0xffffe000u); }
  static constexpr int kBytes = 4;
};

// d[16 x 8] += a b of a warp, a in four registers and b in two.
template <typename T>
void multiply(Warp& w, const Instruction& i, Mask) {
  constexpr int kEach = 4 / T::kBytes, kDepth = 8 * kEach;
  float a[16][kDepth], b[kDepth][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    const Fragment f(lane);
    for (int k = 0; k < kEach; ++k) {
      const auto number = [&](int operand) {
        return T::wide(w.row<uint32_t>(i.operands[static_cast<size_t>(operand)])[lane] >> k * T::kBytes * 8);
      };
      const int column = f.column * kEach + k;
      for (int r = 0; r < 4; ++r) a[f.group + r % 2 * 8][column + r / 2 * (kDepth / 2)] = number(4 + r);
      for (int r = 0; r < 2; ++r) b[column + r * (kDepth / 2)][f.group] = number(8 + r);
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const Fragment f(lane);
    for (int r = 0; r < 4; ++r) {
      const int row = f.group + r / 2 * 8, column = f.column * 2 + r % 2;
      float sum = std::bit_cast<float>(w.row<uint32_t>(i.operands[static_cast<size_t>(10 + r)])[lane]);
      for (int k = 0; k < kDepth; ++k) sum = std::fma(a[row][k], b[k][column], sum);
      w.row<uint32_t>(i.operands[static_cast<size_t>(r)])[lane] = std::bit_cast<uint32_t>(sum);
    }
  }
}

// --- wgmma: a warp's 16 of the 64 rows

// Where the 16 bytes that hold byte `along` of row `row` of an operand in shared memory begin, and what is left of it.
struct Described {
  uint64_t begin, along_stride, row_stride;
  bool swizzled, transposed;
  explicit Described(uint64_t d, bool is_transposed)
      : begin((d & 0x3fff) << 4),
        along_stride((d >> 16 & 0x3fff) << 4),
        row_stride((d >> 32 & 0x3fff) << 4),
        swizzled(d >> 62 == 1),
        transposed(is_transposed) {}
  uint64_t at(int row, int along) const {
    const auto r = static_cast<uint64_t>(row), k = static_cast<uint64_t>(along);
    if (transposed) {  // of two bytes: blocks of 64 rows, along which they lie
      const uint64_t linear = begin + r / 64 * along_stride + k / 16 * row_stride + k % 16 / 2 * 128 + r % 64 * 2;
      return linear ^ ((linear >> 7 & 7) << 4);
    }
    if (!swizzled) return begin + r / 8 * row_stride + r % 8 * 16 + k / 16 * along_stride + k % 16;
    const uint64_t linear = begin + r / 8 * row_stride + r % 8 * 128 + k;
    return linear ^ ((linear >> 7 & 7) << 4);
  }
};

// {d}, {a} or its descriptor, b's descriptor, whether to add, and constants. The instruction's number is the columns,
// and 1000 more where a is in shared memory.
template <typename A, typename B>
void multiply_group(Warp& w, const Instruction& i, Mask) {
  using Sum = typename A::Sum;
  constexpr int kDepth = 32 / A::kBytes;
  Machine& machine = Machine::the();
  const bool shared_a = i.number >= 1000;
  const int columns = static_cast<int>(i.number % 1000);
  const auto results = static_cast<size_t>(columns / 2), after = results + (shared_a ? 1 : 4);
  // Scales of a and b, and whether they are transposed.
  const auto constant = [&](size_t k) { return k < i.operands.size() ? *w.row<uint32_t>(i.operands[k]) : 0u; };
  const bool scaled = i.operands.size() > after + 2;
  if (scaled && (constant(after + 2) != 1 || constant(after + 3) != 1)) machine.fail(w, "a wgmma of another kind");
  const bool transposed_a = shared_a && constant(after + 4) != 0;
  const bool transposed_b = constant(after + (shared_a ? 5 : 4)) != 0;
  const auto read = [&machine, &w](const Described& d, int row, int k) {
    uint32_t bits = 0;
    std::memcpy(&bits, machine.shared_at(w, d.at(row, k * A::kBytes), A::kBytes, A::kBytes, Use::kNone), A::kBytes);
    return bits;
  };
  struct Rows {
    Sum a[16][kDepth];
  } rows;
  const uint64_t descriptor_a = shared_a ? *w.row<uint64_t>(i.operands[results]) : 0;
  if (!shared_a) {
    constexpr int kEach = 4 / A::kBytes;
    for (int lane = 0; lane < kLanes; ++lane) {
      const Fragment f(lane);
      for (int r = 0; r < 4; ++r) {
        const uint32_t word = w.row<uint32_t>(i.operands[results + static_cast<size_t>(r)])[lane];
        for (int k = 0; k < kEach; ++k) {
          rows.a[f.group + r % 2 * 8][f.column * kEach + k + r / 2 * (kDepth / 2)] = A::wide(word >> k * A::kBytes * 8);
        }
      }
    }
  }
  const uint64_t descriptor_b = *w.row<uint64_t>(i.operands[after]);
  const bool adds = (w.predicate(i.operands[after + 1]) & 1) != 0;
  if (races_of(w) != nullptr) {
    const auto watch = [&](const Described& d, int first, int rows) {
      const auto sixteen = [&](int row, int along) {
        machine.watch(w, d.at(row, along), 16, Use::kRead, moment_of(w, Races::kProducts, w.product_groups));
      };
      for (int row = first; row < first + rows; row += d.transposed ? 8 : 1) {
        for (int along = 0; along < 32; along += d.transposed ? 2 : 16) sixteen(row, along);
      }
    };
    if (shared_a) watch(Described(descriptor_a, transposed_a), w.index % 4 * 16, 16);
    watch(Described(descriptor_b, transposed_b), 0, columns);
  }
  auto multiply = [=, &w, &i, &machine]() mutable {
    if (shared_a) {
      const Described d(descriptor_a, transposed_a);
      for (int row = 0; row < 16; ++row) {
        for (int k = 0; k < kDepth; ++k) rows.a[row][k] = A::wide(read(d, w.index % 4 * 16 + row, k));
      }
    }
    const Described d(descriptor_b, transposed_b);
    Sum b[kDepth][256], sums[16][256];
    for (int n = 0; transposed_b && n < columns; ++n) {
      for (int k = 0; k < kDepth; ++k) b[k][n] = B::wide(read(d, n, k));
    }
    for (int n = 0; !transposed_b && n < columns; ++n) {
      for (int chunk = 0; chunk < 2; ++chunk) {
        uint8_t bytes[16];
        std::memcpy(bytes, machine.shared_at(w, d.at(n, chunk * 16), 16, 16, Use::kNone), 16);
        for (int k = 0; k < 16 / A::kBytes; ++k) {
          uint32_t bits = 0;
          std::memcpy(&bits, bytes + k * A::kBytes, A::kBytes);
          b[chunk * (16 / A::kBytes) + k][n] = B::wide(bits);
        }
      }
    }
    const auto each_result = [&](auto f) {
      for (size_t r = 0; r < results; ++r) {
        auto* const to = w.row<uint32_t>(i.operands[r]);
        for (int lane = 0; lane < kLanes; ++lane) {
          const Fragment at(lane);
          f(sums[at.group + static_cast<int>(r) / 2 % 2 * 8][r / 4 * 8 + static_cast<size_t>(at.column) * 2 + r % 2],
            to[lane]);
        }
      }
    };
    each_result([&](Sum& sum, uint32_t word) { sum = adds ? std::bit_cast<Sum>(word) : Sum{0}; });
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < kDepth; ++k) {
        const Sum a = rows.a[row][k];
        for (int n = 0; n < columns; ++n) {
          if constexpr (std::is_same_v<Sum, float>) {
            sums[row][n] = std::fma(a, b[k][n], sums[row][n]);
          } else {
            sums[row][n] += a * b[k][n];
          }
        }
      }
    }
    each_result([](const Sum& sum, uint32_t& word) { word = std::bit_cast<uint32_t>(sum); });
  };
  if (w.products.empty() && machine.at_once()) {
    multiply();
  } else {
    w.products.push_back({w.product_groups, 0, multiply});
  }
}
void commit_products(Warp& w, const Instruction&, Mask) { ++w.product_groups; }
void wait_for_products(Warp& w, const Instruction& i, Mask) {
  const auto most = static_cast<int>(*w.row<uint32_t>(i.operands[0]));
  perform(w.products, [&](const Pending& p) { return p.group < w.product_groups - most; });
  ended(w, Races::kProducts, w.product_groups - most);
}

// --- Names

std::vector<std::string> split(const std::string& name) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= name.size();) {
    size_t end = std::min(name.find('.', begin), name.size());
    parts.push_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

template <typename T>
void add_integer(std::map<std::string, Opcode>& all, const std::string& type) {
  using U = std::make_unsigned_t<T>;
  constexpr int kBits = sizeof(T) * 8;
  all["add." + type] = arithmetic<U, U, U>([](U a, U b) { return a + b; });
  all["sub." + type] = arithmetic<U, U, U>([](U a, U b) { return a - b; });
  all["mul.lo." + type] = arithmetic<U, U, U>([](U a, U b) { return a * b; });
  all["mad.lo." + type] = arithmetic<U, U, U, U>([](U a, U b, U c) { return a * b + c; });
  all["div." + type] =
      arithmetic<T, T, T>([](T a, T b) { return b == 0 ? static_cast<T>(-1) : static_cast<T>(a / b); });
  all["rem." + type] =
      arithmetic<T, T, T>([](T a, T b) { return b == 0 ? static_cast<T>(-1) : static_cast<T>(a % b); });
  all["min." + type] = arithmetic<T, T, T>([](T a, T b) { return std::min(a, b); });
  all["max." + type] = arithmetic<T, T, T>([](T a, T b) { return std::max(a, b); });
  all["neg." + type] = arithmetic<U, U>([](U a) { return U{0} - a; });
  all["shr." + type] = arithmetic<T, T, uint32_t>([](T a, uint32_t by) {
    return by < kBits ? static_cast<T>(a >> by) : static_cast<T>(std::is_signed_v<T> && a < 0 ? -1 : 0);
  });
  {
    const std::string set = "setp.";
    all[set + "eq." + type] = comparison<T>([](T a, T b) { return a == b; });
    all[set + "ne." + type] = comparison<T>([](T a, T b) { return a != b; });
    all[set + "lt." + type] = comparison<T>([](T a, T b) { return a < b; });
    all[set + "le." + type] = comparison<T>([](T a, T b) { return a <= b; });
    all[set + "gt." + type] = comparison<T>([](T a, T b) { return a > b; });
    all[set + "ge." + type] = comparison<T>([](T a, T b) { return a >= b; });
  }
}

template <typename T>
void add_bits(std::map<std::string, Opcode>& all, const std::string& bits) {
  constexpr int kBits = sizeof(T) * 8;
  all["and.b" + bits] = arithmetic<T, T, T>([](T a, T b) { return a & b; });
  all["or.b" + bits] = arithmetic<T, T, T>([](T a, T b) { return a | b; });
  all["xor.b" + bits] = arithmetic<T, T, T>([](T a, T b) { return a ^ b; });
  all["not.b" + bits] = arithmetic<T, T>([](T a) { return ~a; });
  all["shl.b" + bits] =
      arithmetic<T, T, uint32_t>([](T a, uint32_t by) { return by < kBits ? static_cast<T>(a << by) : T{0}; });
  all["setp.eq.b" + bits] = comparison<T>([](T a, T b) { return a == b; });
  all["setp.ne.b" + bits] = comparison<T>([](T a, T b) { return a != b; });
  for (const std::string type : {"b", "u", "s", "f"}) {
    all["mov." + type + bits] = arithmetic<T, T>([](T a) { return a; });
    all["selp." + type + bits] = {select<Row<T>>, Kind::kPlain, {letter<T>()}, {letter<T>(), letter<T>(), 'p'}, 0};
  }
}

template <typename D, typename S>
void add_conversion(std::map<std::string, Opcode>& all, const std::string& d, const std::string& s) {
  all["cvt." + d + "." + s] = arithmetic<D, S>([](S a) { return static_cast<D>(a); });
}
template <typename D>
void add_conversions(std::map<std::string, Opcode>& all, const std::string& d) {
  add_conversion<D, uint8_t>(all, d, "u8");
  add_conversion<D, int8_t>(all, d, "s8");
  add_conversion<D, uint16_t>(all, d, "u16");
  add_conversion<D, int16_t>(all, d, "s16");
  add_conversion<D, uint32_t>(all, d, "u32");
  add_conversion<D, int32_t>(all, d, "s32");
  add_conversion<D, uint64_t>(all, d, "u64");
  add_conversion<D, int64_t>(all, d, "s64");
}

void add_floats(std::map<std::string, Opcode>& all) {
  for (const std::string rounding : {"", "rn."}) {
    all["add." + rounding + "f32"] = arithmetic<float, float, float>([](float a, float b) { return a + b; });
    all["sub." + rounding + "f32"] = arithmetic<float, float, float>([](float a, float b) { return a - b; });
    all["mul." + rounding + "f32"] = arithmetic<float, float, float>([](float a, float b) { return a * b; });
  }
  all["fma.rn.f32"] =
      arithmetic<float, float, float, float>([](float a, float b, float c) { return std::fma(a, b, c); });
  all["fma.rm.f32"] =
      arithmetic<float, float, float, float>([](float a, float b, float c) { return fma_down(a, b, c); });
  all["div.rn.f32"] = all["div.approx.f32"] = arithmetic<float, float, float>([](float a, float b) { return a / b; });
  all["rcp.rn.f32"] = arithmetic<float, float>([](float a) { return 1 / a; });
  all["rcp.approx.ftz.f32"] = arithmetic<float, float>([](float a) { return flushed(1 / flushed(a)); });
  all["ex2.approx.ftz.f32"] = arithmetic<float, float>([](float a) { return flushed(std::exp2(flushed(a))); });
  all["neg.f32"] = arithmetic<float, float>([](float a) { return -a; });
  all["abs.f32"] = arithmetic<float, float>([](float a) { return std::fabs(a); });
  all["copysign.f32"] = arithmetic<float, float, float>([](float sign, float a) { return std::copysign(a, sign); });
  all["min.f32"] = arithmetic<float, float, float>([](float a, float b) { return std::fmin(a, b); });
  all["max.f32"] = arithmetic<float, float, float>([](float a, float b) { return std::fmax(a, b); });
  const auto nan = [](float a, float b) { return std::isnan(a) || std::isnan(b); };
  using Nan = decltype(nan);
  all["min.NaN.f32"] = arithmetic<float, float, float>(
      [](float a, float b) { return Nan{}(a, b) ? std::numeric_limits<float>::quiet_NaN() : std::fmin(a, b); });
  all["max.NaN.f32"] = arithmetic<float, float, float>(
      [](float a, float b) { return Nan{}(a, b) ? std::numeric_limits<float>::quiet_NaN() : std::fmax(a, b); });
  all["setp.eq.f32"] = comparison<float>([](float a, float b) { return a == b; });
  all["setp.ne.f32"] = comparison<float>([](float a, float b) { return a < b || a > b; });
  all["setp.neu.f32"] = comparison<float>([](float a, float b) { return a != b; });
  all["setp.lt.f32"] = comparison<float>([](float a, float b) { return a < b; });
  all["setp.le.f32"] = comparison<float>([](float a, float b) { return a <= b; });
  all["setp.gt.f32"] = comparison<float>([](float a, float b) { return a > b; });
  all["setp.ge.f32"] = comparison<float>([](float a, float b) { return a >= b; });
  all["setp.ltu.f32"] = comparison<float>([](float a, float b) { return !(a >= b); });
  all["setp.leu.f32"] = comparison<float>([](float a, float b) { return !(a > b); });
  all["setp.gtu.f32"] = comparison<float>([](float a, float b) { return !(a <= b); });
  all["setp.geu.f32"] = comparison<float>([](float a, float b) { return !(a < b); });
  all["setp.nan.f32"] = comparison<float>(nan);

  all["cvt.rn.f32.u16"] = arithmetic<float, uint16_t>([](uint16_t a) { return static_cast<float>(a); });
  all["cvt.rn.f32.u32"] = arithmetic<float, uint32_t>([](uint32_t a) { return static_cast<float>(a); });
  all["cvt.rn.f32.s32"] = arithmetic<float, int32_t>([](int32_t a) { return static_cast<float>(a); });
  all["cvt.rn.f32.s64"] = arithmetic<float, int64_t>([](int64_t a) { return static_cast<float>(a); });
  all["cvt.rzi.u32.f32"] = arithmetic<uint32_t, float>([](float a) { return truncated<uint32_t>(a); });
  all["cvt.rzi.s32.f32"] = arithmetic<int32_t, float>([](float a) { return truncated<int32_t>(a); });
  all["cvt.rni.s32.f32"] = arithmetic<int32_t, float>([](float a) { return truncated<int32_t>(std::nearbyint(a)); });
  all["cvt.rni.f32.f32"] = arithmetic<float, float>([](float a) { return std::nearbyint(a); });
  all["cvt.sat.f32.f32"] =
      arithmetic<float, float>([](float a) { return std::isnan(a) ? 0.0f : std::clamp(a, 0.0f, 1.0f); });
  all["cvt.rna.tf32.f32"] = arithmetic<uint32_t, float>([](float a) {
    const auto bits = std::bit_cast<uint32_t>(a);
    return std::isfinite(a) ? (bits + 0x1000u) & 0xffffe000u : bits;
  });
  all["cvt.f32.f16"] = arithmetic<float, uint16_t>([](uint16_t a) { return Half::wide(a); });
  all["cvt.f32.bf16"] = arithmetic<float, uint16_t>([](uint16_t a) { return Bf16::wide(a); });
  all["cvt.rn.f16.f32"] = arithmetic<uint16_t, float>([](float a) { return Half::narrow(a); });
  all["cvt.rn.bf16.f32"] = arithmetic<uint16_t, float>([](float a) { return Bf16::narrow(a); });
  all["cvt.rn.f16x2.f32"] = arithmetic<uint32_t, float, float>(
      [](float high, float low) { return uint32_t{Half::narrow(low)} | uint32_t{Half::narrow(high)} << 16; });
  all["cvt.rn.bf16x2.f32"] = arithmetic<uint32_t, float, float>(
      [](float high, float low) { return uint32_t{Bf16::narrow(low)} | uint32_t{Bf16::narrow(high)} << 16; });
  all["cvt.rn.f16x2.e4m3x2"] = arithmetic<uint32_t, uint16_t>([](uint16_t a) {
    const uint32_t low = Half::narrow(from_e4m3(static_cast<uint8_t>(a)));
    return low | uint32_t{Half::narrow(from_e4m3(static_cast<uint8_t>(a >> 8)))} << 16;
  });
  all["cvt.rn.satfinite.e4m3x2.f32"] = arithmetic<uint16_t, float, float>(
      [](float high, float low) { return static_cast<uint16_t>(to_e4m3(low) | to_e4m3(high) << 8); });

  const auto add_pairs = [&](auto type, const std::string& name) {
    using T = decltype(type);
    constexpr auto fma = [](uint16_t a, uint16_t b, uint16_t c) { return fma_of<T>(a, b, c); };
    constexpr auto add = [](uint16_t a, uint16_t b) { return T::narrow(to_odd(double{T::wide(a)} + T::wide(b))); };
    constexpr auto sub = [](uint16_t a, uint16_t b) { return T::narrow(to_odd(double{T::wide(a)} - T::wide(b))); };
    constexpr auto mul = [](uint16_t a, uint16_t b) { return T::narrow(to_odd(double{T::wide(a)} * T::wide(b))); };
    all["fma.rn." + name] = arithmetic<uint32_t, uint32_t, uint32_t, uint32_t>(Pairs<T, decltype(fma)>{});
    for (const std::string rounding : {"", "rn."}) {
      all["add." + rounding + name] = arithmetic<uint32_t, uint32_t, uint32_t>(Pairs<T, decltype(add)>{});
      all["sub." + rounding + name] = arithmetic<uint32_t, uint32_t, uint32_t>(Pairs<T, decltype(sub)>{});
      all["mul." + rounding + name] = arithmetic<uint32_t, uint32_t, uint32_t>(Pairs<T, decltype(mul)>{});
    }
  };
  add_pairs(Half{}, "f16x2");
  add_pairs(Bf16{}, "bf16x2");
}

template <typename T>
void add_insertion(std::map<std::string, Opcode>& all, const std::string& name) {
  all[name] = arithmetic<T, T, T, uint32_t, uint32_t>([](T a, T b, uint32_t at, uint32_t length) {
    constexpr uint32_t kBits = sizeof(T) * 8;
    at &= 255;
    length &= 255;
    if (at >= kBits || length == 0) return b;
    const T mask = (length >= kBits ? ~T{0} : (T{1} << length) - 1) << at;
    return (b & ~mask) | (a << at & mask);
  });
}

void add_others(std::map<std::string, Opcode>& all) {
  all["mul.hi.u64"] = arithmetic<uint64_t, uint64_t, uint64_t>([](uint64_t a, uint64_t b) {
    const uint64_t low = 0xffffffff, middle = (a & low) * (b & low) >> 32;
    const uint64_t left = (a >> 32) * (b & low) + middle, right = (a & low) * (b >> 32) + (left & low);
    return (a >> 32) * (b >> 32) + (left >> 32) + (right >> 32);
  });
  all["mul.hi.u32"] = arithmetic<uint32_t, uint32_t, uint32_t>(
      [](uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); });
  all["mul.wide.u32"] =
      arithmetic<uint64_t, uint32_t, uint32_t>([](uint32_t a, uint32_t b) { return uint64_t{a} * b; });
  all["mul.wide.s32"] = arithmetic<int64_t, int32_t, int32_t>([](int32_t a, int32_t b) { return int64_t{a} * b; });
  all["mad.wide.s32"] = arithmetic<int64_t, int32_t, int32_t, int64_t>(
      [](int32_t a, int32_t b, int64_t c) { return int64_t{a} * b + c; });
  all["mul.wide.u16"] =
      arithmetic<uint32_t, uint16_t, uint16_t>([](uint16_t a, uint16_t b) { return uint32_t{a} * b; });
  all["popc.b32"] = arithmetic<uint32_t, uint32_t>([](uint32_t a) { return static_cast<uint32_t>(std::popcount(a)); });
  all["bfind.shiftamt.u32"] = arithmetic<uint32_t, uint32_t>(
      [](uint32_t a) { return a == 0 ? ~0u : static_cast<uint32_t>(std::countl_zero(a)); });
  all["brev.b32"] = arithmetic<uint32_t, uint32_t>([](uint32_t a) {
    uint32_t reversed = 0;
    for (int bit = 0; bit < 32; ++bit) reversed |= (a >> bit & 1) << (31 - bit);
    return reversed;
  });
  add_insertion<uint32_t>(all, "bfi.b32");
  add_insertion<uint64_t>(all, "bfi.b64");
  all["shf.r.wrap.b32"] = arithmetic<uint32_t, uint32_t, uint32_t, uint32_t>(
      [](uint32_t a, uint32_t b, uint32_t by) { return static_cast<uint32_t>((uint64_t{b} << 32 | a) >> (by & 31)); });
  all["prmt.b32"] = arithmetic<uint32_t, uint32_t, uint32_t, uint32_t>([](uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = a | uint64_t{b} << 32;
    uint32_t found = 0;
    for (int k = 0; k < 4; ++k) {
      const uint32_t pick = selector >> 4 * k & 15;
      uint32_t byte = static_cast<uint8_t>(bytes >> 8 * (pick & 7));
      if ((pick & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;
      found |= byte << 8 * k;
    }
    return found;
  });
  all["lop3.b32"] = arithmetic<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>(
      [](uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
        uint32_t found = 0;
        for (uint32_t k = 0; k < 8; ++k) {
          if ((table >> k & 1) != 0) found |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
        }
        return found;
      });
  all["dp4a.s32.s32"] = arithmetic<uint32_t, uint32_t, uint32_t, uint32_t>([](uint32_t a, uint32_t b, uint32_t c) {
    for (int k = 0; k < 4; ++k) {
      c += static_cast<uint32_t>(static_cast<int8_t>(a >> 8 * k) * static_cast<int8_t>(b >> 8 * k));
    }
    return c;
  });
  all["dp2a.lo.u32.u32"] = arithmetic<uint32_t, uint32_t, uint32_t, uint32_t>(
      [](uint32_t a, uint32_t b, uint32_t c) { return (a & 0xffff) * (b & 0xff) + (a >> 16) * (b >> 8 & 0xff) + c; });
  all["max.u16x2"] = arithmetic<uint32_t, uint32_t, uint32_t>(
      [](uint32_t a, uint32_t b) { return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16; });

  const auto add_logic = [&](const std::string& name, int sources, auto f) {
    all[name + ".pred"] = {logic<decltype(f)>, Kind::kPlain, "p", std::string(static_cast<size_t>(sources), 'p'), 0};
  };
  add_logic("and", 2, [](Mask a, Mask b) { return a & b; });
  add_logic("or", 2, [](Mask a, Mask b) { return a | b; });
  add_logic("xor", 2, [](Mask a, Mask b) { return a ^ b; });
  add_logic("not", 1, [](Mask a, Mask) { return ~a; });
  add_logic("mov", 1, [](Mask a, Mask) { return a; });

  all["shfl.sync.idx.b32"] = {shuffle<FromIndex>, Kind::kMembers, "wx", "wwww", 0};
  all["shfl.sync.bfly.b32"] = {shuffle<FromButterfly>, Kind::kMembers, "wx", "wwww", 0};
  all["shfl.sync.up.b32"] = {shuffle<FromBelow>, Kind::kMembers, "wx", "wwww", 0};
  all["vote.sync.ballot.b32"] = {ballot, Kind::kMembers, "w", "pw", 0};
  all["vote.sync.all.pred"] = {vote_all, Kind::kMembers, "p", "pw", 0};
  all["vote.sync.any.pred"] = {vote_any, Kind::kMembers, "p", "pw", 0};
  all["match.any.sync.b32"] = {match_any, Kind::kMembers, "w", "ww", 0};
  all["redux.sync.add.u32"] = all["redux.sync.add.s32"] = {reduce_add, Kind::kMembers, "w", "ww", 0};
  all["redux.sync.max.u32"] = {reduce_max, Kind::kMembers, "w", "ww", 0};
  all["elect.sync"] = {elect, Kind::kMembers, "xp", "w", 0};
  all["bar.warp.sync"] = {nothing, Kind::kMembers, "", "w", 0};
  all["bar.arrive"] = {sync, Kind::kTogether, "", "ww", 1};
  all["trap"] = {trap, Kind::kPlain, "", "", 0};
  for (const std::string name : {"fence.acq_rel.cluster", "fence.mbarrier_init.release.cluster",
                                 "fence.proxy.async.shared::cta", "cp.async.bulk.commit_group"}) {
    all[name] = {nothing, Kind::kPlain, "", "", 0};
  }
  all["prefetch.tensormap"] = {nothing, Kind::kPlain, "", "a", 0};
  all["prefetch.global.L2"] = {nothing, Kind::kPlain, "", "a", 0};
  all["setmaxnreg.inc.sync.aligned.u32"] = {move_registers<true>, Kind::kTogether, "", "w", 0};
  all["setmaxnreg.dec.sync.aligned.u32"] = {move_registers<false>, Kind::kTogether, "", "w", 0};
  for (const std::string space : {"global", "param"}) {
    all["cvta." + space + ".u64"] = all["cvta.to." + space + ".u64"] = all["mov.u64"];
  }
  all["cvta.local.u64"] = all["cvta.to.local.u64"] = all["mov.u64"];
  all["cvta.shared.u64"] = {convert_address<false>, Kind::kPlain, "d", "d", 0};
  all["cvta.to.shared.u64"] = {convert_address<true>, Kind::kPlain, "d", "d", 0};
  all["mapa.shared::cluster.u32"] = {address_at_rank, Kind::kPlain, "w", "ww", 0};
  constexpr auto plus = [](uint32_t a, uint32_t b) { return a + b; };
  constexpr auto bit_or = [](uint32_t a, uint32_t b) { return a | b; };
  all["atom.add.u32"] = all["atom.global.add.u32"] = {atomic<decltype(plus), false, true>, Kind::kPlain, "w", "aw", 0};
  const auto plus_float = [](uint32_t a, uint32_t b) {
    return std::bit_cast<uint32_t>(std::bit_cast<float>(a) + std::bit_cast<float>(b));
  };
  all["atom.global.add.f32"] = {atomic<decltype(plus_float), false, true>, Kind::kPlain, "w", "aw", 0};
  all["atom.shared.or.b32"] = {atomic<decltype(bit_or), true, true>, Kind::kPlain, "w", "aw", 0};
  all["st.release.gpu.global.u64"] = {store<uint64_t, false>, Kind::kPlain, "", "ad", 0};
  all["ld.acquire.gpu.global.u64"] = {load_acquire, Kind::kPlain, "d", "a", 0};

  all["mbarrier.init.shared::cta.b64"] = {barrier_init, Kind::kPlain, "", "aw", 0};
  all["mbarrier.arrive.shared::cta.b64"] = {barrier_arrive, Kind::kPlain, "x", "a", 0};
  all["mbarrier.arrive.shared::cluster.b64"] = {barrier_arrive, Kind::kPlain, "x", "a", 0};
  all["mbarrier.arrive.expect_tx.shared::cta.b64"] = {barrier_expect, Kind::kPlain, "x", "aw", 0};
  all["mbarrier.try_wait.parity.shared::cta.b64"] = {barrier_try_wait, Kind::kPlain, "p", "aw", 0};
  all["barrier.cluster.arrive.relaxed.aligned"] = {cluster_arrive, Kind::kTogether, "", "", 0};
  all["barrier.cluster.wait.aligned"] = {cluster_wait, Kind::kTogether, "", "", 0};
  all["griddepcontrol.wait"] = {wait_for_last, Kind::kTogether, "", "", 0};
  all["griddepcontrol.launch_dependents"] = {let_next, Kind::kPlain, "", "", 0};

  for (const std::string way :
       {"cp.async.cg.shared.global", "cp.async.ca.shared.global", "cp.async.ca.shared.global.L2::256B"}) {
    all[way] = {copy_async, Kind::kPlain, "", "aaw", 0};
  }
  all["cp.async.commit_group"] = {commit_copies, Kind::kPlain, "", "", 0};
  all["cp.async.wait_group"] = {wait_for_copies, Kind::kPlain, "", "w", 0};
  const std::string counted = ".mbarrier::complete_tx::bytes", tensor = "cp.async.bulk.tensor.";
  all["cp.async.bulk.shared::cluster.global" + counted] = {copy_bulk_global, Kind::kPlain, "", "aawa", 0};
  all["cp.async.bulk.shared::cluster.shared::cta" + counted] = {copy_bulk_shared, Kind::kPlain, "", "aawa", 0};
  all["cp.async.bulk.prefetch.L2.global"] = {prefetch_bulk, Kind::kPlain, "", "aw", 0};
  all["st.async.shared::cluster" + counted + ".v4.b32"] = {store_async, Kind::kPlain, "", "awwwwa", 0};
  const std::string to_shared = ".shared::cluster.global";
  all[tensor + "3d" + to_shared + counted] = {copy_tensor<3, false, false>, Kind::kPlain, "", "aawwwa", 0};
  all[tensor + "4d" + to_shared + counted] = {copy_tensor<4, false, false>, Kind::kPlain, "", "aawwwwa", 0};
  all[tensor + "3d" + to_shared + counted + ".multicast::cluster"] = {copy_tensor<3, false, true>, Kind::kPlain, "",
                                                                      "aawwwaw", 0};
  all[tensor + "4d" + to_shared + ".im2col" + counted] = {copy_tensor<4, true, false>, Kind::kPlain, "", "aawwwwaww",
                                                          0};
  all[tensor + "4d" + to_shared + ".im2col" + counted + ".multicast::cluster"] = {copy_tensor<4, true, true>,
                                                                                  Kind::kPlain, "", "aawwwwawww", 0};
  all[tensor + "3d.global.shared::cta.bulk_group"] = {store_tensor, Kind::kPlain, "", "awwwa", 0};
  all["cp.async.bulk.wait_group.read"] = {wait_for_stores, Kind::kPlain, "", "w", 0};

  all["ldmatrix.sync.aligned.m8n8.x4.shared.b16"] = {load_matrices, Kind::kTogether, "wwww", "a", 0};
  all["ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"] = {load_matrices_transposed, Kind::kTogether, "wwww", "a", 0};
  all["stmatrix.sync.aligned.m8n8.x4.trans.shared.b16"] = {store_matrices_transposed, Kind::kTogether, "", "awwww", 0};
  all["movmatrix.sync.aligned.m8n8.trans.b16"] = {transpose, Kind::kTogether, "w", "w", 0};
  const std::string mma = "mma.sync.aligned.m16n8k";
  const std::string operands = "wwwwwwwwww";
  all[mma + "16.row.col.f32.bf16.bf16.f32"] = {multiply<Two<Bf16>>, Kind::kTogether, "wwww", operands, 0};
  all[mma + "16.row.col.f32.f16.f16.f32"] = {multiply<Two<Half>>, Kind::kTogether, "wwww", operands, 0};
  all[mma + "8.row.col.f32.tf32.tf32.f32"] = {multiply<Tf32>, Kind::kTogether, "wwww", operands, 0};
  all["wgmma.fence.sync.aligned"] = {nothing, Kind::kTogether, "", "", 0};
  all["wgmma.commit_group.sync.aligned"] = {commit_products, Kind::kTogether, "", "", 0};
  all["wgmma.wait_group.sync.aligned"] = {wait_for_products, Kind::kTogether, "", "w", 0};
}

std::map<std::string, Opcode> make_table() {
  std::map<std::string, Opcode> all;
  add_integer<int16_t>(all, "s16");
  add_integer<uint16_t>(all, "u16");
  add_integer<int32_t>(all, "s32");
  add_integer<uint32_t>(all, "u32");
  add_integer<int64_t>(all, "s64");
  add_integer<uint64_t>(all, "u64");
  add_bits<uint16_t>(all, "16");
  add_bits<uint32_t>(all, "32");
  add_bits<uint64_t>(all, "64");
  add_conversions<uint8_t>(all, "u8");
  add_conversions<uint16_t>(all, "u16");
  add_conversions<int16_t>(all, "s16");
  add_conversions<uint32_t>(all, "u32");
  add_conversions<int32_t>(all, "s32");
  add_conversions<uint64_t>(all, "u64");
  add_conversions<int64_t>(all, "s64");
  add_floats(all);
  add_others(all);
  return all;
}

Opcode wgmma(const std::vector<std::string>& parts, const std::vector<int>& arguments) {
  const std::string& shape = parts[4];  // m64n128k16
  Opcode opcode;
  opcode.kind = Kind::kTogether;
  const int columns = std::stoi(shape.substr(shape.find('n') + 1));
  const bool shared_a = arguments[1] == 1;
  const std::string types = parts[6] + "." + parts[7];
  opcode.run = types == "f16.f16"     ? multiply_group<Two<Half>, Two<Half>>
               : types == "bf16.bf16" ? multiply_group<Two<Bf16>, Two<Bf16>>
               : types == "e4m3.e4m3" ? multiply_group<E4m3, E4m3>
               : types == "s8.s8"     ? multiply_group<S8, S8>
               : types == "u8.s8"     ? multiply_group<U8, S8>
                                      : nullptr;
  opcode.number = columns + (shared_a ? 1000 : 0);
  opcode.results.assign(static_cast<size_t>(columns / 2), 'W');
  opcode.sources = shared_a ? "ddp" : "wwwwdp";
  opcode.sources.append(arguments.size() - 4, 'w');
  return opcode;
}

}  // namespace

Opcode find_opcode(const std::string& name, const std::vector<int>& arguments) {
  static const std::map<std::string, Opcode> table = make_table();
  const std::vector<std::string> parts = split(name);
  if (name == "mov.b32" && arguments == std::vector{1, 2}) return {pack16, Kind::kPlain, "w", "ww", 0};
  if (name == "mov.b32" && arguments == std::vector{2, 1}) return {unpack16, Kind::kPlain, "ww", "w", 0};
  if (name == "mov.b64" && arguments == std::vector{1, 2}) return {pack32, Kind::kPlain, "d", "ww", 0};
  if (name == "mov.b64" && arguments == std::vector{2, 1}) return {unpack32, Kind::kPlain, "ww", "d", 0};
  if (name == "bar.sync") return {sync, Kind::kTogether, "", std::string(arguments.size(), 'w'), 0};
  if (name == "cp.async.cg.shared.global" && arguments.size() == 4) return {copy_async, Kind::kPlain, "", "aaww", 0};
  if (name.starts_with("wgmma.mma_async")) {
    if (Opcode opcode = wgmma(parts, arguments); opcode.run != nullptr) return opcode;
  }
  if (const auto found = table.find(name); found != table.end()) return found->second;
  const bool shared = name.find(".shared") != std::string::npos;
  if (parts[0] == "ld") return load_of(name, arguments[0], shared);
  if (parts[0] == "st") return store_of(name, arguments[1], shared);
  throw std::runtime_error("emulator: not known: " + name);
}

}  // namespace emulator
