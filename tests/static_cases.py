"""What static products are held to: integers of 64 bits, and one float32 rounding at the end."""

import jax.numpy as jnp
import numpy as np

import jax_wonly as jw


def random_layer(rng, k, n, *, bits=8, activation=None, kernel=()):
    """A layer of random codes, scales and zeros, and its weights' codes less their zero."""
    weights = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (k, n))
    packed = jw.pack(jnp.asarray(weights + 2 ** (bits - 1), jnp.uint8), bits)
    scales = rng.uniform(0.5, 1.0, (1, n)).astype(np.float32) * 2.0 ** (1 - bits)
    qt = jw.QuantizedTensor(packed, jnp.asarray(scales), bits=bits, k=k, n=n)
    into = jw.static.Scale(float(rng.uniform(0.01, 0.1)), int(rng.integers(-40, 40)))
    out = jw.static.Scale(float(into.scale * np.sqrt(k)), int(rng.integers(-40, 40)))
    bias = rng.normal(0, 10 * out.scale, n).astype(np.float32)
    layer = jw.static.prepare(qt, into, out, bias=jnp.asarray(bias), activation=activation, kernel=kernel)
    return layer, weights, scales[0].astype(np.float64), bias


def expected_codes(q, layer, weights):
    """From the layer's multiplier and fused integers."""
    sums = np.asarray(q).astype(np.int64) @ weights + np.asarray(layer.fused).astype(np.int64)
    assert np.abs(sums).max(initial=0) < 2**31
    rounded = np.rint(sums.astype(np.float32) * np.asarray(layer.multiplier)).astype(np.int64)
    return np.clip(rounded + layer.output.zero, layer.low, layer.high).astype(np.int8)


def expected_values(q, layer, weights, scales, bias, activation=None):
    """In float64, from the formula before anything was folded."""
    y = (np.asarray(q).astype(np.float64) - layer.input.zero) * layer.input.scale @ (weights * scales) + bias
    return {None: y, "relu": np.maximum(y, 0), "relu6": np.clip(y, 0, 6)}[activation]
