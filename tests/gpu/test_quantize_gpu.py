"""The CUDA quantizer and dequantizer: codes, scales, shifts and values to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from quantize_cases import check_codes, check_dequantize
from reference import DTYPES, MODES

import jax_wonly as jw
from jax_wonly import _abi

pytestmark = pytest.mark.gpu
GROUP_SIZES = (32, 64, 128, 256, None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_codes(rng, mode, bits, dtype, scale_dtype):
    options = dict(bits=bits, mode=mode, dtype=dtype, scale_dtype=scale_dtype, implementation="cuda")
    # Rows that vectors cannot be read from, and rows that they can.
    for n in (67, 200):
        check_codes(rng, group_size=GROUP_SIZES[rng.integers(5)], n=n, k=512, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("k", "n", "group_size"),
    [
        (1, 1, None),
        (32, 8, 32),
        (96, 130, 32),
        (192, 64, 64),
        (640, 5, 128),
        (768, 72, 256),
        (100, 40, None),
        (256, 16, None),
        (257, 24, None),
        (1111, 67, None),
        (2080, 192, None),
    ],
)
def test_codes_of_odd_shapes(rng, mode, bits, k, n, group_size):
    options = dict(bits=bits, mode=mode, group_size=group_size, k=k, n=n, implementation="cuda")
    check_codes(rng, dtype="float32", scale_dtype="bfloat16", **options)
    check_codes(rng, dtype="bfloat16", scale_dtype="float32", **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("lead", "k", "n", "group_size"),
    # The last three take the one-scale-per-output kernel in each of its widths.
    [((3,), 128, 40, 64), ((2, 2), 96, 9, 32), ((205,), 264, 8, None), ((2, 60), 264, 8, None), ((5,), 300, 9, None)],
)
def test_leading_axes(rng, mode, lead, k, n, group_size):
    w = rng.normal(0.2, 1.0, (*lead, k, n)).astype(DTYPES["bfloat16"])
    for bits in (4, 8):
        qt = jw.quantize(jnp.asarray(w), bits=bits, group_size=group_size, mode=mode, implementation="cuda")
        shift = qt.offsets if mode == "offsets" else qt.zeros
        got = np.asarray(jw.unpack(qt.qvalue, bits, k, n))
        for index in np.ndindex(*lead):
            codes, scales, shift_here = reference.quantize(w[index], bits, group_size, mode, qt.scales.dtype)
            np.testing.assert_array_equal(got[index], codes)
            np.testing.assert_array_equal(np.asarray(qt.scales[index]), scales)
            if shift is not None:
                np.testing.assert_array_equal(np.asarray(shift[index]), shift_here)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group_size", [64, None])
@pytest.mark.parametrize("power", [-70, -30, 62, 100])
def test_codes_far_from_one(rng, mode, group_size, power):
    """Beyond 2^60 and below 2^-60 the quotients come from true divisions."""
    k, n = 320, 72
    w = np.ldexp(rng.normal(0.2, 1.0, (k, n)), power).astype(np.float32)
    w[:, ::5] = np.ldexp(w[:, ::5].astype(np.float64), -power)
    for bits in (4, 8):
        codes, scales, shift = reference.quantize(w, bits, group_size, mode, np.float32)
        qt = jw.quantize(
            jnp.asarray(w), bits=bits, group_size=group_size, mode=mode, scale_dtype=np.float32, implementation="cuda"
        )
        np.testing.assert_array_equal(np.asarray(qt.scales), scales)
        if shift is not None:
            np.testing.assert_array_equal(np.asarray(qt.offsets if mode == "offsets" else qt.zeros), shift)
        np.testing.assert_array_equal(np.asarray(jw.unpack(qt.qvalue, bits, k, n)), codes)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group_size", [128, None])
def test_nan_shows_in_its_group_only(rng, mode, group_size):
    k, n = 512, 24
    w = rng.normal(size=(k, n)).astype(np.float32)
    clean = w.copy()
    w[200, 7] = np.nan
    qt, expected = (
        jw.quantize(jnp.asarray(a), bits=4, group_size=group_size, mode=mode, implementation="cuda") for a in (w, clean)
    )
    nan = np.isnan(np.asarray(qt.scales, np.float32))
    assert nan.sum() == 1 and nan[200 // (group_size or k), 7]
    np.testing.assert_array_equal(np.asarray(qt.scales)[~nan], np.asarray(expected.scales)[~nan])
    touched = np.repeat(nan, group_size or k, axis=0)
    got, want = (np.asarray(jw.unpack(q.qvalue, 4, k, n)) for q in (qt, expected))
    np.testing.assert_array_equal(got[~touched], want[~touched])


def exact_values(codes, qt, dtype):
    """float32, each operation rounded by itself, then rounded to ``dtype``."""
    k = codes.shape[-2]
    spread = lambda a: np.repeat(np.asarray(a).astype(np.float32), k // a.shape[-2], axis=-2)  # noqa: E731
    codes = codes.astype(np.float32)
    if qt.offsets is not None:
        return (codes * spread(qt.scales) + spread(qt.offsets)).astype(dtype)
    zeros = np.float32({4: 8, 8: 128}[qt.bits]) if qt.zeros is None else spread(qt.zeros)
    return ((codes - zeros) * spread(qt.scales)).astype(dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize(
    ("lead", "k", "n", "group_size"),
    [((), 256, 67, 64), ((), 96, 72, 32), ((3,), 131, 40, None), ((2,), 512, 136, 256), ((), 1, 1, None)],
)
def test_dequantize(rng, mode, bits, scale_dtype, lead, k, n, group_size):
    weight = reference.random_weight(
        rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=scale_dtype, lead=lead
    )
    codes = np.asarray(jw.unpack(weight.qt.qvalue, bits, k, n))
    for name, dtype in DTYPES.items():
        w = np.asarray(jw.dequantize(weight.qt, dtype=dtype, implementation="cuda"))
        as_bits = np.uint32 if dtype is np.float32 else np.uint16
        np.testing.assert_array_equal((w + 0).view(as_bits), (exact_values(codes, weight.qt, dtype) + 0).view(as_bits))
        check_dequantize(
            rng, bits=bits, group_size=group_size, mode=mode, scale_dtype=scale_dtype, dtype=name, implementation="cuda",
            lead=lead, k=k, n=n,
        )  # fmt: skip


@pytest.mark.slow
def test_more_than_2_to_the_31_elements():
    k, n = 16384, 131200
    w = jax.random.normal(jax.random.key(0), (k, n), jnp.bfloat16)
    for group_size in (128, None):
        options = dict(bits=4, group_size=group_size, mode="offsets", implementation="cuda")
        qt, last = jw.quantize(w, **options), jw.quantize(w[:, -64:], **options)
        assert (qt.qvalue[-1] == last.qvalue[0]).all()
        assert (qt.scales[:, -64:] == last.scales).all()
        dense = jw.dequantize(qt, dtype=jnp.bfloat16, implementation="cuda")[:, -64:]
        assert (dense == jw.dequantize(last, dtype=jnp.bfloat16, implementation="cuda")).all()


def call_quantize(w, *, groups=2, bits=4, group_size=64, mode=0, qw=(1, 1, 2, 512), shift=None):
    results = [
        jax.ShapeDtypeStruct(qw, jnp.uint32),
        jax.ShapeDtypeStruct((w.shape[0], groups, w.shape[2]), jnp.float32),
    ]
    if shift is not None:
        results.append(jax.ShapeDtypeStruct((w.shape[0], groups, w.shape[2]), shift))
    attributes = dict(bits=np.int64(bits), group_size=np.int64(group_size), quantize_mode=np.int64(mode))
    return jax.block_until_ready(jax.ffi.ffi_call(_abi.QUANTIZE, results)(w, **attributes))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(bits=3), "bits is 3, expected 4 or 8"),
        (dict(group_size=32), "group_size is 32, expected 128 inputs / 2 groups"),
        (dict(groups=3), "scales have 3 groups for 128 inputs"),
        (dict(groups=8, group_size=16), "scales have 8 groups for 128 inputs"),
        (dict(mode=4), "quantize_mode is 4"),
        (dict(mode=1), "got 2 results, expected 3"),
        (dict(shift=jnp.float32), "got 3 results, expected 2"),
        (dict(mode=1, shift=jnp.float32), "shift has element type F32, expected U8"),
        (dict(mode=2, shift=jnp.bfloat16), "shift has element type BF16, expected F32"),
        (dict(mode=3, shift=jnp.uint8), "which only zeros may have"),
        (dict(qw=(1, 1, 1, 512)), "qw has shape [1, 1, 1, 512], expected [-1, 1, 2, 512]"),
        (dict(qw=(3, 1, 2, 512)), "qw has leading size 3"),
    ],
)
def test_handler_refuses(wrong, message):
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        call_quantize(jnp.ones((1, 128, 40)), **wrong)
    assert "INVALID_ARGUMENT" in str(raised.value) and message in str(raised.value)


def test_handler_refuses_integer_weights():
    with pytest.raises(jax.errors.JaxRuntimeError, match="w has element type S32, expected F16, BF16 or F32"):
        call_quantize(jnp.ones((1, 128, 40), jnp.int32))
