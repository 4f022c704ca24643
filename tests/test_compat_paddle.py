"""Paddle's functions: its arithmetic in NumPy, and its kernels' index arithmetic for the layouts."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_wonly as jw
from jax_wonly.compat import paddle

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def quantized(x: np.ndarray, bits: int, group_size: int):
    """Codes in -127..127 or -7..7 and float32 scales ``[groups, N]``; rounds halves away from zero."""
    k, n = x.shape
    bound = np.float32(2 ** (bits - 1) - 1)
    groups = x.astype(np.float32).reshape(-1, k if group_size == -1 else group_size, n)
    largest = np.abs(groups).max(1, keepdims=True)
    scaled = groups / np.where(largest == 0, np.float32(1), largest) * bound
    codes = np.sign(scaled) * np.floor(np.abs(scaled).astype(np.float64) + 0.5)
    return codes.reshape(k, n).astype(int), (largest / bound)[:, 0]


def weight(rng, k, n, dtype):
    w = (rng.normal(0.3, 1, (k, n)) * rng.uniform(0.1, 3, n)).astype(DTYPES[dtype])
    w[:, 3] = 0
    return w


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(
    ("algo", "group_size"),
    [
        ("weight_only_int8", -1),
        ("weight_only_int8", 64),
        ("weight_only_int4", -1),
        ("weight_only_int4", 128),
        ("llm.int8", -1),
    ],
)
def test_quantize_and_dequantize(rng, algo, group_size, dtype):
    k, n = 256, 72
    bits = 4 if algo == "weight_only_int4" else 8
    w = weight(rng, k, n, dtype)
    out, scale = paddle.weight_quantize(w, algo, arch=80, group_size=group_size)
    codes, expected = quantized(w, bits, group_size)
    stored = np.float32 if algo == "llm.int8" else DTYPES[dtype]
    assert scale.dtype == stored and scale.shape == ((n,) if group_size == -1 else (k // group_size, n))
    np.testing.assert_array_equal(scale, expected.astype(stored).reshape(scale.shape))
    found = np.asarray(jw.unpack(out, bits, k, n)).astype(int) - 2 ** (bits - 1)
    np.testing.assert_array_equal(found, codes)
    assert np.abs(found).max() == 2 ** (bits - 1) - 1
    back = paddle.weight_dequantize(out, scale, algo, group_size=group_size)
    assert back.shape == (k, n) and back.dtype == stored
    exact = found * np.repeat(np.asarray(scale, np.float32).reshape(-1, n), k // (expected.shape[0]), 0)
    np.testing.assert_array_equal(back, exact.astype(np.float32).astype(stored))
    assert paddle.weight_dequantize(out, scale, algo, out_dtype="bfloat16", group_size=group_size).dtype == jnp.bfloat16


def test_halves_round_away_from_zero():
    """127 * 0.5 / 127 and its like are exact, so that these weights are halves between two codes."""
    w = np.zeros((64, 2), np.float16)
    w[:8, 0] = [7, 0.5, -0.5, 1.5, -2.5, 6.5, -6.5, 3]
    out, _ = paddle.weight_quantize(w, "weight_only_int4")
    found = np.asarray(jw.unpack(out, 4, 64, 2)).astype(int) - 8
    np.testing.assert_array_equal(found[:8, 0], [7, 1, -1, 2, -3, 7, -7, 3])
    assert not found[:, 1].any()


@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
@pytest.mark.parametrize("group_size", [-1, 64])
def test_weight_only_linear(rng, weight_dtype, group_size):
    w = weight(rng, 256, 40, "float16")
    x = rng.normal(0.5, 1, (2, 3, 256)).astype(np.float16)
    bias = rng.normal(size=40).astype(np.float16)
    algo = f"weight_only_{weight_dtype}"
    out, scale = paddle.weight_quantize(w, algo, group_size=group_size)
    linear = jax.jit(paddle.weight_only_linear, static_argnames=("weight_dtype", "group_size"))
    y = linear(x, out, bias, scale, weight_dtype=weight_dtype, group_size=group_size)
    assert y.shape == (2, 3, 40) and y.dtype == jnp.float16
    dense = np.asarray(paddle.weight_dequantize(out, scale, algo, jnp.float32, group_size), np.float64)
    np.testing.assert_allclose(y, x.astype(np.float64) @ dense + bias, rtol=2e-3, atol=5e-2)
    without = paddle.weight_only_linear(x, out, weight_scale=scale, weight_dtype=weight_dtype, group_size=group_size)
    np.testing.assert_allclose(without, x.astype(np.float64) @ dense, rtol=2e-3, atol=5e-2)


@pytest.mark.parametrize("outliers", [(), (5, 77)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_llm_int8_linear(rng, outliers, dtype):
    w = weight(rng, 128, 40, "float16")
    x = rng.uniform(-2, 3, (2, 5, 128)).astype(dtype)
    for i in outliers:
        x[0, i % 5, i] = 37.5
        x[1, 0, i] = -2.5  # below the threshold, in an input that has an outlier
    bias = rng.normal(size=40).astype(dtype)
    out, scale = paddle.weight_quantize(w, "llm.int8")
    y = paddle.llm_int8_linear(x, out, bias, scale, threshold=6.0)
    assert y.shape == (2, 5, 40) and y.dtype == dtype

    rows = x.reshape(-1, 128).astype(np.float64)
    q = np.asarray(jw.unpack(out, 8, 128, 40)).astype(np.float64) - 128
    s = np.asarray(scale, np.float64)
    above = np.abs(rows) > 6
    largest = np.where(above, 0, np.abs(rows)).max(1, keepdims=True)
    scaled = (rows * 127 / largest).astype(np.float32)
    xq = np.sign(scaled) * np.floor(np.abs(scaled) + 0.5)
    columns = above.any(0)
    expected = (np.where(columns, 0, xq) @ q) * largest * s / 127 + np.where(columns, rows, 0) @ (q * s) + bias
    # One code of x may fall to the other side of a half.
    step = (largest * s / 127) * 127
    error = np.abs(np.asarray(y, np.float64).reshape(-1, 40) - expected)
    assert (error <= 2e-3 * np.abs(expected) + 2e-3 + step).all()
    assert (error > 2e-3 * np.abs(expected) + 2e-2).mean() < 0.05
    # Close to the product that it stands for, which it is not if an outlier is quantized or lost.
    dense = np.asarray(paddle.weight_dequantize(out, scale, "llm.int8"), np.float64)
    product = rows @ dense + bias
    assert np.linalg.norm(np.asarray(y, np.float64).reshape(-1, 40) - product) < 0.02 * np.linalg.norm(product)


def paddle_bytes(codes: np.ndarray, bits: int) -> np.ndarray:
    """What the permutation kernels of the pull request write, thread by thread, for signed codes."""
    k, n = codes.shape
    if bits == 8:
        out = np.zeros(k * n, np.uint8)
        for k_id in range(k):
            for n_id in range(n):
                mod = k_id % 16
                low, high = mod % 8, mod // 8
                kk = low + high + (high + 1) % 2 * mod + low * high + k_id // 16 * 16
                at = kk % 64 + kk // 64 * 128 + 64 * (n_id % 2) + k * 2 * (n_id // 2)
                out[at] = (int(codes[k_id, n_id]) + 128) % 256
        return out
    # Two rows to a byte, then bytes are permuted, then nibbles are exchanged between bytes 0, 2 and 1, 3 of four.
    rows = (codes[0::2] & 15) | ((codes[1::2] & 15) << 4)
    half = k // 2
    out = np.zeros(half * n, np.uint8)
    for k_id in range(half):
        for n_id in range(n):
            mod = k_id % 8
            low, high = mod % 4, mod // 4
            kk = (low + high + (high + 1) % 2 * mod + low * high) % 8 * 2 + (k_id % 16) // 8 + k_id // 16 * 16
            out[kk % 32 + kk // 32 * 128 + 32 * (n_id % 4) + half * 4 * (n_id // 4)] = rows[k_id, n_id]
    for i in range(0, len(out), 4):
        for pack in (0, 1):
            a, b = int(out[i + pack]), int(out[i + pack + 2])
            al, ah, bl, bh = ((v + 8) & 15 for v in (a & 15, a >> 4, b & 15, b >> 4))
            out[i + pack], out[i + pack + 2] = al | bl << 4, ah | bh << 4
    return out


@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
@pytest.mark.parametrize(("k", "n"), [(64, 8), (192, 20)])
def test_layouts(rng, weight_dtype, k, n):
    bits = int(weight_dtype[3:])
    codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (k, n))
    expected = paddle_bytes(codes, bits)
    qvalue = jw.pack((codes + 2 ** (bits - 1)).astype(np.uint8), bits)
    layout = jax.jit(paddle.to_layout, static_argnames=("weight_dtype", "k", "n"))
    out = layout(qvalue, weight_dtype=weight_dtype, k=k, n=n)
    assert out.dtype == jnp.int8 and out.shape == (n * bits // 8, k)
    np.testing.assert_array_equal(np.asarray(out).view(np.uint8).reshape(-1), expected)
    np.testing.assert_array_equal(paddle.from_layout(out, weight_dtype=weight_dtype, k=k, n=n), qvalue)
    flat = np.asarray(out).reshape(k, n * bits // 8)  # as the pull request's example views it
    np.testing.assert_array_equal(paddle.from_layout(flat, weight_dtype=weight_dtype, k=k, n=n), qvalue)


def test_layout_of_llm_int8_is_the_transpose(rng):
    codes = rng.integers(-128, 128, (64, 24))
    qvalue = jw.pack((codes + 128).astype(np.uint8), 8)
    out = paddle.to_layout(qvalue, k=64, n=24, algo="llm.int8")
    np.testing.assert_array_equal(out, codes.T)
    np.testing.assert_array_equal(paddle.from_layout(out, k=64, n=24, algo="llm.int8"), qvalue)


def test_a_weight_that_paddle_quantized(rng):
    """Their bytes and scales through from_layout are a weight here."""
    w = weight(rng, 128, 24, "float16")
    codes, scales = quantized(w, 4, 64)
    theirs = paddle_bytes(codes, 4).view(np.int8).reshape(12, 128)
    ours = paddle.from_layout(theirs, weight_dtype="int4", k=128, n=24)
    x = rng.normal(0.5, 1, (3, 128)).astype(np.float32)
    y = paddle.weight_only_linear(x, ours, weight_scale=scales, weight_dtype="int4", group_size=64)
    np.testing.assert_allclose(y, x.astype(np.float64) @ (codes * np.repeat(scales, 64, 0)), rtol=1e-4, atol=1e-3)


W = np.ones((64, 8), np.float16)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: paddle.weight_quantize(W.astype(int)), TypeError, "x has dtype"),
        (lambda: paddle.weight_quantize(W, "w4a8"), ValueError, "w4a8"),
        (lambda: paddle.weight_quantize(W, arch=50), ValueError, "arch=50"),
        (lambda: paddle.weight_quantize(W, group_size=32), ValueError, "group_size=32"),
        (lambda: paddle.weight_quantize(W[:48], "weight_only_int4"), ValueError, "multiple of 64"),
        (lambda: paddle.weight_quantize(W, group_size=128), ValueError, "multiple of 128"),
        (lambda: paddle.weight_quantize(W, "llm.int8", group_size=64), ValueError, "llm.int8"),
        (lambda: paddle.weight_quantize(W[0]), ValueError, "x has shape"),
        (lambda: paddle.weight_only_linear(W.T, W.astype(np.int8), weight_scale=W[0]), TypeError, "from_layout"),
        (lambda: paddle.weight_only_linear(W.T, *paddle.weight_quantize(W)[:1]), TypeError, "weight_scale is None"),
        (
            lambda: paddle.weight_only_linear(W.T, paddle.weight_quantize(W)[0], weight_scale=W[0], group_size=64),
            ValueError,
            "scale has shape",
        ),
        (
            lambda: paddle.weight_only_linear(
                W.T, paddle.weight_quantize(W, "weight_only_int4")[0], weight_scale=W[0, :4], weight_dtype="int2"
            ),
            ValueError,
            "int2",
        ),
        (
            lambda: paddle.llm_int8_linear(W.T, paddle.weight_quantize(W)[0], weight_scale=W[0], threshold=0),
            ValueError,
            "threshold",
        ),
        (lambda: paddle.llm_int8_linear(W, paddle.weight_quantize(W)[0], weight_scale=W[0]), ValueError, "x has shape"),
        (lambda: paddle.from_layout(W.astype(np.int8), k=64, n=8, arch=70), ValueError, "arch=70"),
        (lambda: paddle.from_layout(W.astype(np.int8), k=64, n=16), ValueError, "1024 bytes"),
    ],
)
def test_bad_arguments(call, error, match):
    with pytest.raises(error, match=match):
        call()
