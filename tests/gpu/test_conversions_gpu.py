"""The fast conversions on a GPU return the bits of their portable bodies."""

import jax
import numpy as np
import pytest
from conversion_cases import check_values, words_of_every_code

from jax_wonly import _cpu

pytestmark = pytest.mark.gpu
TABLE = _cpu.conversions()


@pytest.mark.parametrize(("number", "name"), [(i, name) for i, (name, _) in enumerate(TABLE)])
def test_every_code_in_every_position(rng, number, name):
    outputs = TABLE[number][1]
    half = np.arange(2**16, dtype=np.uint32)
    words = np.concatenate(
        [
            words_of_every_code(rng, bits=4 if "int4" in name else 8),
            half | rng.permutation(half) << 16,
            rng.permutation(half) | half << 16,
        ]
    )
    call = jax.ffi.ffi_call("wonly_selftest_conversions_v1", jax.ShapeDtypeStruct((len(words), outputs), np.uint32))
    device = np.asarray(jax.jit(lambda w: call(w, conversion=np.int64(number)))(words))
    host = np.frombuffer(_cpu.convert_words(number, words.tobytes()), np.uint32).reshape(device.shape)
    np.testing.assert_array_equal(device, host)
    check_values(name, words, device)
