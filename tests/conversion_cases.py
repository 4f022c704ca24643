"""What each conversion of ``ffi/dequant/convert.h`` returns, written apart from it; shared by CPU and GPU tests."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

_INTERLEAVED = {4: [(i, i + 4) for i in range(4)], 8: [(i, i + 2) for i in range(2)]}
_LINEAR = {8: [(0, 1), (2, 3)]}


@dataclass(frozen=True)
class Conversion:
    """Codes of ``bits`` bits at the positions ``pairs`` (one pair for each register), less ``zero``, as ``dtype``."""

    bits: int
    zero: int
    dtype: type
    pairs: tuple

    def expected(self, words: np.ndarray) -> np.ndarray:
        positions = np.asarray(self.pairs)  # [registers, 2 or 1]
        shifts = (positions * self.bits).astype(np.uint32)
        codes = (words[:, None, None] >> shifts) & np.uint32(2**self.bits - 1)
        values = (codes.astype(np.int64) - self.zero).astype(np.float64).astype(self.dtype)
        return np.ascontiguousarray(values).view(np.uint32)[..., 0]


def _conversion(bits, zero, dtype, order=_INTERLEAVED):
    pairs = [(i,) for i in range(32 // bits)] if dtype is np.float32 else order[bits]
    return Conversion(bits, zero, dtype, tuple(pairs))


_F16, _BF16 = np.float16, ml_dtypes.bfloat16
CONVERSIONS = {
    "uint4_to_f16": _conversion(4, 0, _F16),
    "int4_to_f16": _conversion(4, 8, _F16),
    "uint4_to_bf16": _conversion(4, 0, _BF16),
    "int4_to_bf16": _conversion(4, 8, _BF16),
    "uint4_to_f32": _conversion(4, 0, np.float32),
    "uint8_to_f16": _conversion(8, 0, _F16),
    "int8_to_f16": _conversion(8, 128, _F16),
    "uint8_to_f16_linear": _conversion(8, 0, _F16, _LINEAR),
    "int8_to_f16_linear": _conversion(8, 128, _F16, _LINEAR),
    "uint8_to_bf16_through_f32": _conversion(8, 0, _BF16),
    "int8_to_bf16_through_f32": _conversion(8, 128, _BF16),
    "uint8_to_bf16_through_f32_linear": _conversion(8, 0, _BF16, _LINEAR),
    "int8_to_bf16_through_f32_linear": _conversion(8, 128, _BF16, _LINEAR),
    "int8_to_bf16": _conversion(8, 128, _BF16),
    "uint8_to_f32": _conversion(8, 0, np.float32),
}
# The codes as they are: what they are worth depends on the type that they are read as.
TABLES = {"uint4_in_table": (40503 * np.arange(1, 17)).astype(np.uint16)}
SUBNORMAL = {"uint4_to_subnormal": 4, "uint8_to_subnormal": 8}


def words_of_every_code(rng, bits: int, backgrounds: int = 64) -> np.ndarray:
    """Words with every code in every position, each among ``backgrounds`` choices of the other codes."""
    words = rng.integers(0, 2**32, (32 // bits, 2**bits, backgrounds), dtype=np.uint32)
    words[..., 0], words[..., 1] = 0, 2**32 - 1
    shifts = np.arange(32 // bits, dtype=np.uint32)[:, None, None] * np.uint32(bits)
    codes = np.arange(2**bits, dtype=np.uint32)[None, :, None]
    mask = np.uint32(2**bits - 1)
    return ((words & ~(mask << shifts)) | (codes << shifts)).reshape(-1)


def check_values(name: str, words: np.ndarray, results: np.ndarray) -> None:
    """``results`` (uint32 [words, registers]) are to the bit what conversion ``name`` returns."""
    if name in TABLES:
        nibbles = words[:, None, None] >> (4 * np.asarray(_INTERLEAVED[4])).astype(np.uint32) & np.uint32(15)
        np.testing.assert_array_equal(results, TABLES[name][nibbles].view(np.uint32)[..., 0], err_msg=name)
        return
    if name not in SUBNORMAL:
        np.testing.assert_array_equal(results, CONVERSIONS[name].expected(words), err_msg=name)
        return
    bits = SUBNORMAL[name]
    shifts = (np.asarray(_INTERLEAVED[bits]) * bits).astype(np.uint32)
    codes = ((words[:, None, None] >> shifts) & np.uint32(2**bits - 1)).astype(np.float64)
    weights = np.array([1, 16, 1, 16.0] if bits == 4 else [1.0, 1.0])[:, None]
    for dtype, unit in ((_F16, 2.0**-24), (_BF16, 2.0**-133)):
        got = np.ascontiguousarray(results).view(dtype).reshape(codes.shape).astype(np.float64)
        np.testing.assert_array_equal(got, codes * weights * unit, err_msg=f"{name} as {dtype.__name__}")
