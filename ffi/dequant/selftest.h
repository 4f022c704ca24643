// The conversions by number, for tests that run all of them on the host and on a device and compare.
#pragma once

#include "dequant/convert.h"

namespace wonly {

WONLY_HOST_DEVICE void uint4_to_f32(uint32_t word, uint32_t (&out)[8]) {
  for (int i = 0; i < 8; ++i) out[i] = as_bits(code_to_f32(word >> (4 * i) & 0xf));
}
WONLY_HOST_DEVICE void uint8_to_f32(uint32_t word, uint32_t (&out)[4]) {
  for (int i = 0; i < 4; ++i) out[i] = as_bits(code_to_f32(word >> (8 * i) & 0xff));
}

// Entry c is 40503 (c + 1), modulo 2^16.
WONLY_HOST_DEVICE void uint4_in_table(uint32_t word, uint32_t (&out)[4]) {
  ByteTable table{};
  for (uint32_t c = 0; c < 16; ++c) {
    const uint32_t entry = 40503u * (c + 1);
    table.low[c / 4] |= (entry & 0xff) << (8 * (c % 4));
    table.high[c / 4] |= (entry >> 8 & 0xff) << (8 * (c % 4));
  }
  look_up(word, table, out);
}

// Name, 32-bit results of one word, function.
#define WONLY_CONVERSIONS(X)                                                            \
  X(uint4_to_f16, 4, uint4_to_f16)                                                      \
  X(int4_to_f16, 4, int4_to_f16)                                                        \
  X(uint4_to_bf16, 4, uint4_to_bf16)                                                    \
  X(int4_to_bf16, 4, int4_to_bf16)                                                      \
  X(uint4_to_subnormal, 4, uint4_to_subnormal)                                          \
  X(uint4_to_f32, 8, uint4_to_f32)                                                      \
  X(uint4_in_table, 4, uint4_in_table)                                                  \
  X(uint8_to_f16, 2, uint8_to_f16<>)                                                    \
  X(int8_to_f16, 2, int8_to_f16<>)                                                      \
  X(uint8_to_f16_linear, 2, uint8_to_f16<ByteOrder::kLinear>)                           \
  X(int8_to_f16_linear, 2, int8_to_f16<ByteOrder::kLinear>)                             \
  X(uint8_to_bf16_through_f32, 2, uint8_to_bf16_through_f32<>)                          \
  X(int8_to_bf16_through_f32, 2, int8_to_bf16_through_f32<>)                            \
  X(uint8_to_bf16_through_f32_linear, 2, uint8_to_bf16_through_f32<ByteOrder::kLinear>) \
  X(int8_to_bf16_through_f32_linear, 2, int8_to_bf16_through_f32<ByteOrder::kLinear>)   \
  X(int8_to_bf16, 2, int8_to_bf16)                                                      \
  X(uint8_to_subnormal, 2, uint8_to_subnormal)                                          \
  X(uint8_to_f32, 4, uint8_to_f32)

enum class SelftestConversion : int {
#define WONLY_ENUMERATE(name, outputs, function) name,
  WONLY_CONVERSIONS(WONLY_ENUMERATE)
#undef WONLY_ENUMERATE
};

struct SelftestEntry {
  const char* name;
  int outputs;
};

constexpr SelftestEntry kSelftestTable[] = {
#define WONLY_DESCRIBE(name, outputs, function) {#name, outputs},
    WONLY_CONVERSIONS(WONLY_DESCRIBE)
#undef WONLY_DESCRIBE
};
constexpr int kSelftestConversions = sizeof(kSelftestTable) / sizeof(kSelftestTable[0]);

constexpr int selftest_outputs(int conversion) { return kSelftestTable[conversion].outputs; }

// Runs one conversion on a word; `out` has room for its results.
WONLY_HOST_DEVICE void selftest_convert(SelftestConversion conversion, uint32_t word, uint32_t* out) {
  switch (conversion) {
#define WONLY_RUN(name, outputs, function)                 \
  case SelftestConversion::name: {                         \
    uint32_t results[outputs];                             \
    function(word, results);                               \
    for (int i = 0; i < outputs; ++i) out[i] = results[i]; \
    return;                                                \
  }
    WONLY_CONVERSIONS(WONLY_RUN)
#undef WONLY_RUN
  }
}

#undef WONLY_CONVERSIONS

}  // namespace wonly
