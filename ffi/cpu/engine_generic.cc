// Portable kernels: 16-lane vectors of the compiler's, lowered to whatever the target has.
#include <cstring>

#include "abi.h"
#include "layout.h"

namespace wonly::cpu {
namespace {

struct Ops {
  typedef float F __attribute__((vector_size(64)));
  typedef uint32_t I __attribute__((vector_size(64)));
  typedef int32_t S __attribute__((vector_size(64)));

  static constexpr int kDirectRows = 4;
  static constexpr int kSplitRows = 0;
  static constexpr int kMicroRows = 2;
  static constexpr int kMicroVectors = 1;

  static F load(const float* p) {
    F v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static void store(float* p, F v) { std::memcpy(p, &v, sizeof(v)); }
  static F set1(float v) { return v - F{}; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F fma(F a, F b, F c) { return a * b + c; }

  static F load_natural(const float* p) {
    F v;
    for (int i = 0; i < 16; ++i) v[i] = p[i / 2 + i % 2 * 8];
    return v;
  }
  static void store_natural(float* p, F v) {
    for (int i = 0; i < 16; ++i) p[i / 2 + i % 2 * 8] = v[i];
  }

  // Lane i of row j to lane j of row i.
  static void transpose_lanes(F (&rows)[16]) {
    for (int i = 1; i < 16; ++i) {
      for (int j = 0; j < i; ++j) {
        const float lane = rows[i][j];
        rows[i][j] = rows[j][i];
        rows[j][i] = lane;
      }
    }
  }

  static void prefetch_atom(const uint32_t* p) {
    for (int line = 0; line < 8; ++line) __builtin_prefetch(p + 16 * line);
  }
  static void load_atom(const uint32_t* p, I (&words)[8]) {
    for (int j = 0; j < 8; ++j) {
      uint32_t lanes[16];
      for (int g = 0; g < 8; ++g) {
        lanes[2 * g] = p[16 * g + 2 * j];
        lanes[2 * g + 1] = p[16 * g + 2 * j + 1];
      }
      std::memcpy(&words[j], lanes, sizeof(lanes));
    }
  }

  template <int kBits, bool kBiased>
  struct Decoder {
    template <int i>
    F get(I words) const {
      const I code = (words >> (kBits * i)) & ((1u << kBits) - 1u);
      return __builtin_convertvector(reinterpret_cast<S>(code) - (kBiased ? bias_of(kBits) : 0), F);
    }
  };

  // The value that each code stands for.
  struct TableDecoder {
    const float* table;

    explicit TableDecoder(const float* table) : table(table) {}
    template <int i>
    F get(I words) const {
      F values;
      for (int lane = 0; lane < 16; ++lane) values[lane] = table[words[lane] >> (4 * i) & 15];
      return values;
    }
  };
};

}  // namespace
}  // namespace wonly::cpu

#include "cpu/engine_impl.h"

namespace wonly::cpu {

const Engine& generic_engine() {
  static constexpr Engine engine = make_engine("generic");
  return engine;
}

}  // namespace wonly::cpu
