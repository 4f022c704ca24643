"""Static int8 layers: codes to the bit against 64-bit integers, and within a step of the formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from static_cases import expected_codes, expected_values, random_layer

import jax_wonly as jw


@pytest.mark.parametrize(("bits", "activation"), [(8, None), (8, "relu"), (4, "relu6")])
def test_matmul(rng, bits, activation):
    for k, n in ((200, 70),):
        layer, weights, scales, bias = random_layer(rng, k, n, bits=bits, activation=activation)
        q = jnp.asarray(rng.integers(-128, 128, (2, 5, k)), jnp.int8)
        y = jw.static.matmul(q, layer)
        np.testing.assert_array_equal(y, expected_codes(q, layer, weights))
        values = expected_values(q, layer, weights, scales, bias, activation)
        codes = np.clip(values / layer.output.scale + layer.output.zero, layer.low, layer.high)
        assert np.abs(np.asarray(y) - codes).max() <= 0.51
        assert len(np.unique(y)) > 10 or activation == "relu6"


def test_transformations(rng):
    layer, weights, *_ = random_layer(rng, 64, 16)
    q = jnp.asarray(rng.integers(-128, 128, (3, 5, 64)), jnp.int8)
    expected = expected_codes(q, layer, weights)
    np.testing.assert_array_equal(jax.jit(jw.static.matmul)(q, layer), expected)
    np.testing.assert_array_equal(jax.vmap(lambda q: jw.static.matmul(q, layer))(q), expected)
    layers = jax.tree.map(lambda a: jnp.stack([a] * 3), layer)
    np.testing.assert_array_equal(jax.vmap(jw.static.matmul)(q, layers), expected)
    np.testing.assert_array_equal(jw.static.matmul(q[0, 0], layer), expected[0, 0])
    assert jw.static.matmul(q[:0], layer).shape == (0, 5, 16)


def test_calibrate(rng):
    x = rng.normal(1.0, 2.0, (100, 30)).astype(np.float32)
    for symmetric, half in ((True, np.abs(x).max() / 127 / 2), (False, (x.max() - x.min()) / 255 / 2)):
        scale = jw.static.calibrate([jnp.asarray(x[:50]), x[50:]], symmetric=symmetric)
        error = np.abs(np.asarray(jw.static.dequantize(jw.static.quantize(x, scale), scale)) - x)
        # Values at either end may be clamped by what rounding the zero moved.
        assert error.max() <= 2.1 * half and np.quantile(error, 0.99) <= 1.01 * half and error.max() > 0.8 * half
        assert jw.static.quantize(jnp.zeros(1), scale)[0] == scale.zero
    assert jw.static.calibrate(np.zeros(3, np.float32)).scale > 0


@pytest.mark.parametrize(
    ("kernel", "strides", "padding", "dilation"),
    [
        ((3, 3), (1, 1), "SAME", (1, 1)),
        ((3, 2), (2, 1), ((2, 1), (0, 3)), (1, 2)),
    ],
)
def test_conv(rng, kernel, strides, padding, dilation):
    """Against XLA's convolution of the integers in float64, padded with the input's zero."""
    channels, n = 6, 10
    layer, weights, *_ = random_layer(rng, kernel[0] * kernel[1] * channels, n, kernel=kernel)
    q = rng.integers(-128, 128, (2, 9, 8, channels))
    y = jw.static.conv(jnp.asarray(q, jnp.int8), layer, window_strides=strides, padding=padding, rhs_dilation=dilation)
    with jax.enable_x64():
        sums = jax.lax.conv_general_dilated(
            jnp.asarray(q - layer.input.zero, jnp.float64),
            jnp.asarray(weights.reshape(*kernel, channels, n), jnp.float64),
            strides,
            padding,
            rhs_dilation=dilation,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
    sums = np.asarray(sums).astype(np.int64) + layer.input.zero * weights.sum(0) + np.asarray(layer.fused)
    rounded = np.rint(sums.astype(np.float32) * np.asarray(layer.multiplier)).astype(np.int64)
    np.testing.assert_array_equal(y, np.clip(rounded + layer.output.zero, -128, 127))


def test_errors(rng):
    layer, *_ = random_layer(rng, 64, 16)
    scale, q = jw.static.Scale(1.0), jnp.zeros((2, 64), jnp.int8)
    w = jnp.ones((64, 16))
    for message, kind, call in (
        ("scale=-1", ValueError, lambda: jw.static.Scale(-1.0)),
        ("scale='1'", TypeError, lambda: jw.static.Scale("1")),
        ("zero=200", ValueError, lambda: jw.static.Scale(1.0, 200)),
        ("zero=0.5", TypeError, lambda: jw.static.Scale(1.0, 0.5)),
        ("samples is a int", TypeError, lambda: jw.static.calibrate(3)),
        ("no values", ValueError, lambda: jw.static.calibrate([])),
        ("NaN or Inf", ValueError, lambda: jw.static.calibrate(jnp.array([jnp.nan]))),
        ("q has dtype int32", TypeError, lambda: jw.static.matmul(q.astype(jnp.int32), layer)),
        (r"q has shape \(2, 63\)", ValueError, lambda: jw.static.matmul(q[:, 1:], layer)),
        ("lowered for 'cpu'", ValueError, lambda: jw.static.matmul(q, layer, implementation="cuda")),
        ("layer is a int", TypeError, lambda: jw.static.matmul(q, 3)),
        ("scale is a float", TypeError, lambda: jw.static.quantize(w, 1.0)),
        ("qt is a", TypeError, lambda: jw.static.prepare(w, scale, scale)),
        ("one scale per output", ValueError, lambda: jw.static.prepare(jw.quantize(w, group_size=32), scale, scale)),
        (
            "kernel=",
            ValueError,
            lambda: jw.static.prepare(jw.quantize(w, group_size=None), scale, scale, kernel=(3, 3)),
        ),
        (
            "bias has shape",
            ValueError,
            lambda: jw.static.prepare(jw.quantize(w, group_size=None), scale, scale, bias=jnp.ones(3)),
        ),
        ("padding='FULL'", ValueError, lambda: jw.static.conv(q[None, None], layer, padding="FULL")),
        (r"accepted: \[B, H, W, 64\]", ValueError, lambda: jw.static.conv(q, layer)),
    ):
        with pytest.raises(kind, match=message):
            call()
