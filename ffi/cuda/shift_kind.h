// What a scheme has beside codes and scales, of kernels that are compiled for each of these.
#pragma once

namespace wonly {

enum class ShiftKind {
  kNone,    // codes are numbers around their bias
  kBytes,   // zeros of one byte, which are taken off the codes
  kFloats,  // zeros or offsets that multiply the sums of the activations
  kTable,   // codes index one, whose entries are rounded to 16-bit activations' type, or two fp16 numbers each
};

}  // namespace wonly
