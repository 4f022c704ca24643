"""The fast conversions' portable bodies: every code in every position, to the bit."""

import numpy as np
import pytest
from conversion_cases import CONVERSIONS, SUBNORMAL, TABLES, check_values, words_of_every_code

from jax_wonly import _cpu

TABLE = _cpu.conversions()
NAMES = [name for name, _ in TABLE]


def convert(name: str, words: np.ndarray) -> np.ndarray:
    number = NAMES.index(name)
    return np.frombuffer(_cpu.convert_words(number, words.tobytes()), np.uint32).reshape(len(words), TABLE[number][1])


def test_table_is_tested_whole():
    assert sorted(NAMES) == sorted([*CONVERSIONS, *SUBNORMAL, *TABLES])


@pytest.mark.parametrize("name", NAMES)
def test_every_code_in_every_position(rng, name):
    words = words_of_every_code(rng, bits=4 if "int4" in name else 8)
    check_values(name, words, convert(name, words))


@pytest.mark.parametrize("name", NAMES)
def test_every_half_word(rng, name):
    half = np.arange(2**16, dtype=np.uint32)
    words = np.concatenate([half | rng.permutation(half) << 16, rng.permutation(half) | half << 16])
    check_values(name, words, convert(name, words))


def test_bad_input():
    with pytest.raises(ValueError, match="conversion is 99"):
        _cpu.convert_words(99, b"")
    with pytest.raises(ValueError, match="whole 32-bit words"):
        _cpu.convert_words(0, b"abc")
