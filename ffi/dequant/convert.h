// Fast conversions of packed integer codes to floating point, eight four-bit or four eight-bit codes of a word at a
// time.
//
// Each is a fixed sequence of the instructions wrapped in instructions.h, which have portable bodies: the same sequence
// runs, and is tested for every code in every position, on a machine without a GPU.
//
// Order of codes. Result register i holds a pair of neighbouring inputs, the first in its low half. In a four-bit word
// pair i is nibbles i and i + 4, in an eight-bit word bytes i and i + 2. That is the order of our packed format
// (layout.h), and the same interleaving that AWQ (nibbles 0 2 4 6 1 3 5 7 of consecutive codes) and FasterTransformer
// (bytes e0 e2 e1 e3) store, so one function serves all three; kLinear is for bytes in plain order.
//
// Codes are unsigned. `uint` conversions return the code, `int` ones the code less 8 or 128, which is the stored form
// of a signed one.
//
// Sources, by the projects that published them: AWQ's dequantize_s4_to_fp16x2 (LOP3 and the magic number 0x6400),
// FasterTransformer's FastInterleavedAndBiasedNumericArrayConverter (PRMT and 0x6480 for fp16; the float32 magic number
// 0x4B000000 for bf16).
#pragma once

#include "dequant/instructions.h"

namespace wonly {

enum class ByteOrder { kInterleaved, kLinear };  // bytes e0 e2 e1 e3, or e0 e1 e2 e3

namespace convert {

constexpr uint32_t kNibble = 0x000f000fu;      // the low nibble of both halves
constexpr uint32_t kHighNibble = 0x00f000f0u;  // the next one
constexpr uint32_t kByte = 0x00ff00ffu;
constexpr uint32_t kF16Magic = 0x64006400u;                   // 1024 in fp16: the lowest ten bits count units
constexpr uint32_t kBf16Magic = 0x43004300u;                  // 128 in bf16: the lowest seven bits count units
constexpr uint32_t kF32Magic = 0x4b000000u;                   // 2^23 in float32: the lowest 23 bits count units
constexpr uint32_t kAndOr = (0xf0 & 0xcc) | 0xaa;             // lop3 table of (a & b) | c
constexpr uint32_t kNotAndOr = (~0xf0 & 0xcc) | 0xaa;         // lop3 table of (~a & b) | c
constexpr uint32_t kSelect = (0xf0 & 0xcc) | (~0xf0 & 0xaa);  // lop3 table of (a & b) | (~a & c)

}  // namespace convert

// ---- four bits to fp16
// ----------------------------------------------------------------------------------------------------------

// LOP3 puts a nibble into the mantissa of 1024: pairs 0 and 2 are 1024 + code, pairs 1 and 3, which stay at bits 4-7,
// 1024 + 16 code. 4 LOP3, 1 shift.
WONLY_HOST_DEVICE void uint4_above_1024(uint32_t word, uint32_t (&out)[4]) {
  const uint32_t top = word >> 8;  // first, so that nothing waits for it
  out[0] = lop3<convert::kAndOr>(word, convert::kNibble, convert::kF16Magic);
  out[1] = lop3<convert::kAndOr>(word, convert::kHighNibble, convert::kF16Magic);
  out[2] = lop3<convert::kAndOr>(top, convert::kNibble, convert::kF16Magic);
  out[3] = lop3<convert::kAndOr>(top, convert::kHighNibble, convert::kF16Magic);
}

// Subtracting 1024 (+ 8) leaves the code. The nibbles at bits 4-7 need no shift: one fma by 1/16 takes the place of the
// subtraction. After AWQ's dequantize_s4_to_fp16x2, which subtracts 1024 and 64 (`uint4`); FasterTransformer's original
// subtracts 1032 and 72 (`int4`). 4 LOP3, 1 shift, 2 subtractions, 2 fma.
template <int kZero>
WONLY_HOST_DEVICE void four_bits_to_f16(uint32_t word, uint32_t (&out)[4]) {
  static_assert(kZero == 0 || kZero == 8);
  constexpr uint32_t kLow = kZero == 0 ? 0x64006400u : 0x64086408u;   // 1024 + zero
  constexpr uint32_t kHigh = kZero == 0 ? 0xd400d400u : 0xd480d480u;  // -(64 + zero)
  constexpr uint32_t kSixteenth = 0x2c002c00u;
  uint4_above_1024(word, out);
  out[0] = sub_f16x2(out[0], kLow);
  out[1] = fma_f16x2(out[1], kSixteenth, kHigh);
  out[2] = sub_f16x2(out[2], kLow);
  out[3] = fma_f16x2(out[3], kSixteenth, kHigh);
}
WONLY_HOST_DEVICE void uint4_to_f16(uint32_t word, uint32_t (&out)[4]) { four_bits_to_f16<0>(word, out); }
WONLY_HOST_DEVICE void int4_to_f16(uint32_t word, uint32_t (&out)[4]) { four_bits_to_f16<8>(word, out); }

// ---- four bits to bf16
// ----------------------------------------------------------------------------------------------------------

// The same with 128, whose mantissa has room for one nibble only: each pair is shifted into place.
// 4 LOP3, 3 shifts, 4 subtractions.
template <int kZero>
WONLY_HOST_DEVICE void four_bits_to_bf16(uint32_t word, uint32_t (&out)[4]) {
  static_assert(kZero == 0 || kZero == 8);
  constexpr uint32_t kOrigin = kZero == 0 ? 0x43004300u : 0x43084308u;  // 128 + zero
  for (int i = 0; i < 4; ++i) {
    out[i] = sub_bf16x2(lop3<convert::kAndOr>(word >> (4 * i), convert::kNibble, convert::kBf16Magic), kOrigin);
  }
}
WONLY_HOST_DEVICE void uint4_to_bf16(uint32_t word, uint32_t (&out)[4]) { four_bits_to_bf16<0>(word, out); }
WONLY_HOST_DEVICE void int4_to_bf16(uint32_t word, uint32_t (&out)[4]) { four_bits_to_bf16<8>(word, out); }

// ---- codes as they are: subnormals
// ----------------------------------------------------------------------------------------------

// A 16-bit pattern below 2048 is the fp16 number pattern * 2^-24, and one below 256 the bf16 number pattern * 2^-133:
// exponent fields 0 and 1 have the same unit. So a masked code already is a number, which fma and the tensor cores take
// exactly. Whoever uses it moves the power of two to the scale or to the float32 accumulator. Pairs 1 and 3 of a
// four-bit word stay where they are and count sixteen times as much. 4 LOP3 and 1 shift for eight codes, 2 instructions
// for four bytes.
WONLY_HOST_DEVICE void uint4_to_subnormal(uint32_t word, uint32_t (&out)[4]) {
  const uint32_t top = word >> 8;
  out[0] = word & convert::kNibble;
  out[1] = word & convert::kHighNibble;
  out[2] = top & convert::kNibble;
  out[3] = top & convert::kHighNibble;
}

WONLY_HOST_DEVICE void uint8_to_subnormal(uint32_t word, uint32_t (&out)[2]) {
  out[0] = word & convert::kByte;
  out[1] = byte_permute(word, 0u, 0x4341u);  // bytes 1 and 3, zeros above them
}

// ---- four bits through a table
// --------------------------------------------------------------------------------------------------

// Sixteen 16-bit values: entries 4i .. 4i + 3 have their low bytes in low[i] and their high ones in high[i].
struct ByteTable {
  uint32_t low[4], high[4];
};

// PRMT takes four codes' bytes from eight entries at once: the codes' lower three bits select among those of the first
// half of the table, and of the second, and their highest bits between the results. Low and high bytes apart, and then
// a transposition. 20 PRMT, 2 LOP3, 3 shifts for eight codes, whatever the values.
WONLY_HOST_DEVICE void look_up(uint32_t word, const ByteTable& table, uint32_t (&out)[4]) {
  const uint32_t within = word & 0x77777777u;
  const uint32_t half = lop3<convert::kAndOr>(word >> 1, 0x44444444u, 0x32103210u);
  uint32_t low[2], high[2];  // bytes of pairs 0 to 3: of their first codes, and of their second ones
  for (int i = 0; i < 2; ++i) {
    const auto entries = [&](const uint32_t (&bytes)[4]) {
      const uint32_t first = byte_permute(bytes[0], bytes[1], within >> (16 * i));
      return byte_permute(first, byte_permute(bytes[2], bytes[3], within >> (16 * i)), half >> (16 * i));
    };
    low[i] = entries(table.low);
    high[i] = entries(table.high);
  }
  for (int i = 0; i < 2; ++i) {
    const uint32_t first = byte_permute(low[0], high[0], i == 0 ? 0x5140u : 0x7362u);
    const uint32_t second = byte_permute(low[1], high[1], i == 0 ? 0x5140u : 0x7362u);
    out[2 * i] = byte_permute(first, second, 0x5410u);
    out[2 * i + 1] = byte_permute(first, second, 0x7632u);
  }
}

// ---- eight bits to fp16
// ---------------------------------------------------------------------------------------------------------

// PRMT puts a byte under 0x64, which makes 1024 + code.
WONLY_HOST_DEVICE void uint8_above_1024(uint32_t word, uint32_t (&out)[2]) {
  out[0] = byte_permute(word, 0x64646464u, 0x5250u);
  out[1] = byte_permute(word, 0x64646464u, 0x5351u);
}

// One subtraction of 1024 (`uint8`) or 1152 = 0x6480 (`int8`). After FasterTransformer's converter, whose selectors
// 0x5250 and 0x5351 also undo the interleaving. 2 PRMT, 2 subtractions.
template <int kZero, ByteOrder kOrder>
WONLY_HOST_DEVICE void eight_bits_to_f16(uint32_t word, uint32_t (&out)[2]) {
  static_assert(kZero == 0 || kZero == 128);
  constexpr uint32_t kOrigin = kZero == 0 ? 0x64006400u : 0x64806480u;
  constexpr bool kInterleaved = kOrder == ByteOrder::kInterleaved;
  out[0] = sub_f16x2(byte_permute(word, 0x64646464u, kInterleaved ? 0x5250u : 0x5150u), kOrigin);
  out[1] = sub_f16x2(byte_permute(word, 0x64646464u, kInterleaved ? 0x5351u : 0x5352u), kOrigin);
}
template <ByteOrder kOrder = ByteOrder::kInterleaved>
WONLY_HOST_DEVICE void uint8_to_f16(uint32_t word, uint32_t (&out)[2]) {
  eight_bits_to_f16<0, kOrder>(word, out);
}
template <ByteOrder kOrder = ByteOrder::kInterleaved>
WONLY_HOST_DEVICE void int8_to_f16(uint32_t word, uint32_t (&out)[2]) {
  eight_bits_to_f16<128, kOrder>(word, out);
}

// ---- codes to float32, and eight bits to bf16 through it
// --------------------------------------------------------------------------

// 2^23 + code, less 2^23 + zero: exact for every integer `zero` of up to 22 bits. `code` has nothing but the code's
// bits.
WONLY_HOST_DEVICE float code_to_f32(uint32_t code, float zero = 0.0f) {
  return as_float(code | convert::kF32Magic) - (8388608.0f + zero);
}

// bf16 has eight significant bits, one too few for 128 + code; float32 has room, and its upper half is the bf16. After
// FasterTransformer's converter. 4 PRMT, 4 float32 subtractions, 2 PRMT.
template <int kZero, ByteOrder kOrder>
WONLY_HOST_DEVICE void eight_bits_to_bf16_through_f32(uint32_t word, uint32_t (&out)[2]) {
  static_assert(kZero == 0 || kZero == 128);
  constexpr bool kInterleaved = kOrder == ByteOrder::kInterleaved;
  const float origin = 8388608.0f + kZero;
  const float e0 = as_float(byte_permute(word, convert::kF32Magic, 0x7650u)) - origin;
  const float e1 = as_float(byte_permute(word, convert::kF32Magic, kInterleaved ? 0x7652u : 0x7651u)) - origin;
  const float e2 = as_float(byte_permute(word, convert::kF32Magic, kInterleaved ? 0x7651u : 0x7652u)) - origin;
  const float e3 = as_float(byte_permute(word, convert::kF32Magic, 0x7653u)) - origin;
  out[0] = byte_permute(as_bits(e0), as_bits(e1), 0x7632u);
  out[1] = byte_permute(as_bits(e2), as_bits(e3), 0x7632u);
}
template <ByteOrder kOrder = ByteOrder::kInterleaved>
WONLY_HOST_DEVICE void uint8_to_bf16_through_f32(uint32_t word, uint32_t (&out)[2]) {
  eight_bits_to_bf16_through_f32<0, kOrder>(word, out);
}
template <ByteOrder kOrder = ByteOrder::kInterleaved>
WONLY_HOST_DEVICE void int8_to_bf16_through_f32(uint32_t word, uint32_t (&out)[2]) {
  eight_bits_to_bf16_through_f32<128, kOrder>(word, out);
}

// Without float32: the code's low seven bits under 128, less 128 where its top bit is set (a code of 128 or more is not
// negative) and less 256 where it is not. One LOP3 makes each operand. 1 shift, 4 LOP3, 2 subtractions: 7 instructions
// where the way through float32 takes 10.
WONLY_HOST_DEVICE void int8_to_bf16(uint32_t word, uint32_t (&out)[2]) {
  for (int i = 0; i < 2; ++i) {
    const uint32_t bytes = word >> (8 * i);
    const uint32_t low = lop3<convert::kAndOr>(bytes, 0x007f007fu, convert::kBf16Magic);
    const uint32_t origin = lop3<convert::kNotAndOr>(bytes, 0x00800080u, convert::kBf16Magic);
    out[i] = sub_bf16x2(low, origin);
  }
}

}  // namespace wonly
