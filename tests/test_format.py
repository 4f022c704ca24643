"""The packed format: against a slow independent definition, golden bytes, and itself."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

import jax_wonly as jw


def arange_codes(bits, k, n):
    return (
        (np.arange(k)[:, None] * 7 + np.arange(n)[None] * 3 + np.arange(k)[:, None] * np.arange(n)) % 2**bits
    ).astype(np.uint8)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("k", "n"), [(1, 1), (64, 64), (100, 130), (33, 65), (129, 7)])
def test_pack_is_the_layout(rng, bits, k, n):
    codes = rng.integers(0, 2**bits, (k, n)).astype(np.uint8)
    packed = jw.pack(codes, bits)
    assert packed.dtype == jnp.uint32
    np.testing.assert_array_equal(packed, reference.pack(codes, bits))
    np.testing.assert_array_equal(jw.unpack(packed, bits, k, n), codes)


@pytest.mark.parametrize(
    ("bits", "k", "n", "tile", "word", "shift"),
    [
        (4, 0, 0, (0, 0), 0, 0),
        (4, 1, 0, (0, 0), 0, 16),  # the odd input of a pair: the other half of the word
        (4, 8, 0, (0, 0), 0, 4),
        (4, 2, 0, (0, 0), 4, 0),  # the next lane
        (4, 0, 8, (0, 0), 1, 0),  # rows g and g + 8 are neighbouring words
        (4, 32, 0, (0, 0), 2, 0),
        (4, 63, 63, (0, 0), 3 * 128 + 31 * 4 + 3, 28),
        (4, 64, 64, (1, 1), 0, 0),
        (8, 1, 0, (0, 0), 0, 16),
        (8, 8, 0, (0, 0), 0, 8),
        (8, 16, 9, (0, 0), 19, 0),
        (8, 31, 63, (0, 0), 3 * 128 + 31 * 4 + 3, 24),
        (8, 32, 0, (0, 1), 0, 0),
    ],
)
def test_positions(bits, k, n, tile, word, shift):
    codes = np.zeros((k + 1, n + 1), np.uint8)
    codes[k, n] = 2**bits - 1
    ours = np.asarray(jw.pack(codes, bits))[(*tile, word)]
    assert (int(ours) >> shift) & (2**bits - 1) == 2**bits - 1


@pytest.mark.parametrize(
    ("bits", "digest"),
    [
        (4, "3b19daec76ed2daa2872cab86daf2a573cc8c68048331b12d373314e5869574d"),
        (8, "f60f3fb76b477cfc61d0c740404d983e98bdabe34ac48dafff9afe2830e8c7dc"),
    ],
)
def test_golden_bytes(bits, digest):
    packed = np.asarray(jw.pack(arange_codes(bits, 70, 66), bits))
    assert hashlib.sha256(packed.astype("<u4").tobytes()).hexdigest() == digest


@given(
    bits=st.sampled_from([4, 8]),
    k=st.integers(1, 140),
    n=st.integers(1, 140),
    lead=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    seed=st.integers(0, 2**32 - 1),
)
def test_round_trip(bits, k, n, lead, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, (*lead, k, n)).astype(np.uint8)
    packed = jax.jit(lambda c: jw.pack(c, bits))(codes)
    assert packed.shape == (*lead, -(-n // 64), -(-k // {4: 64, 8: 32}[bits]), 512)
    np.testing.assert_array_equal(jax.jit(lambda p: jw.unpack(p, bits, k, n))(packed), codes)


@pytest.mark.parametrize("bits", [4, 8])
def test_padding_is_weight_zero(bits):
    packed = jw.pack(np.zeros((3, 5), np.uint8), bits)
    tile_k = {4: 64, 8: 32}[bits]
    whole = np.asarray(jw.unpack(packed, bits, tile_k, 64))
    assert (whole[3:] == 2 ** (bits - 1)).all() and (whole[:, 5:] == 2 ** (bits - 1)).all()
    assert (whole[:3, :5] == 0).all()


def test_errors():
    codes = np.zeros((64, 64), np.uint8)
    with pytest.raises(ValueError, match="bits=3.*accepted: 4, 8"):
        jw.pack(codes, 3)
    with pytest.raises(TypeError, match="codes has dtype int32.*uint8"):
        jw.pack(codes.astype(np.int32), 4)
    with pytest.raises(ValueError, match=r"codes has shape \(64,\)"):
        jw.pack(codes[0], 4)
    with pytest.raises(ValueError, match=r"codes has shape \(0, 64\)"):
        jw.pack(codes[:0], 4)
    with pytest.raises(TypeError, match="qw has dtype uint8"):
        jw.unpack(codes, 4, 64, 64)
    with pytest.raises(ValueError, match=r"qw has shape \(1, 1, 512\); accepted: \[..., 1, 2, 512\]"):
        jw.unpack(jw.pack(codes, 4), 4, 65, 64)
