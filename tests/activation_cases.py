"""What quantized activations are held to, on every platform: a slow NumPy definition, and products in float64."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from reference import activate, rounding

import jax_wonly as jw

FLOAT8 = "float8_e4m3fn"
SCHEMES = (("int8", True), ("int8", False), (FLOAT8, True))  # dtype, symmetric
# Of the roundings of what CUDA's kernel adds up: float32 sums of exact products, or sums of float8 products, of which
# tensor cores keep 13 bits or so.
KERNEL_UNITS = {"int8": 2.0**-20, FLOAT8: 2.0**-11}


@dataclass
class Quantized:
    codes: np.ndarray  # [..., K], of the stored type
    scales: np.ndarray  # [..., G]
    offsets: np.ndarray | None
    values: np.ndarray  # float64 [..., K]: what the codes stand for


def quantize(x, group_size: int | None, dtype: str, symmetric: bool) -> Quantized:
    """By the definition of the codes, in float32 NumPy."""
    f = np.float32
    x = np.asarray(x).astype(f)
    *lead, k = x.shape
    grouped = x.reshape(*lead, k // (group_size or k), group_size or k)
    steps = f({"int8": 127, FLOAT8: 448}[dtype] if symmetric else 255)
    if symmetric:
        span, offsets = np.abs(grouped).max(-1, keepdims=True), None
    else:
        low = grouped.min(-1, keepdims=True)
        span = grouped.max(-1, keepdims=True) - low
    none = span < f(2.0**-100)
    scales = np.where(none, f(0), span * (f(1) / steps))
    inverse = np.where(none, f(0), steps / np.where(none, f(1), span))
    shifted = grouped
    if not symmetric:
        offsets = low + f(128) * scales
        shifted = grouped - offsets
    q = shifted * inverse
    if dtype == "int8":
        codes = np.clip(np.rint(q), -127 if symmetric else -128, 127).astype(np.int8)
    else:
        codes = q.astype(ml_dtypes.float8_e4m3fn)
    values = codes.astype(np.float64) * scales + (0 if offsets is None else offsets.astype(np.float64))
    return Quantized(
        codes.reshape(x.shape), scales[..., 0], None if offsets is None else offsets[..., 0], values.reshape(x.shape)
    )


def check_codes(x, xq: jw.QuantizedActivation, group_size, dtype, symmetric):
    """Codes, scales, offsets and sums, to the bit."""
    expected = quantize(x, group_size, dtype, symmetric)
    np.testing.assert_array_equal(np.asarray(xq.codes).view(np.int8), expected.codes.view(np.int8))
    np.testing.assert_array_equal(np.asarray(xq.scales), expected.scales)
    assert (xq.offsets is None) == symmetric
    if not symmetric:
        np.testing.assert_array_equal(np.asarray(xq.offsets), expected.offsets)
    groups = xq.scales.shape[-1]
    sums = expected.codes.astype(np.float64).reshape(*x.shape[:-1], groups, x.shape[-1] // groups).sum(-1)
    np.testing.assert_allclose(
        np.asarray(xq.sums), sums, atol=0 if dtype == "int8" else 1e-5 * np.max(np.abs(sums), initial=0) + 1e-6
    )
    assert not np.asarray(xq.qvalue).view(np.int8)[..., : -(-x.shape[-1] // 16) * 16].shape[-1] % 16
    return expected


def assert_quantized_product(y, values, weight, *, out_dtype, unit=2.0**-20, bias=None, activation=None, noise=0.0):
    """Holds ``y`` to ``activation(values @ w + bias)`` in float64.

    Args:
      unit: of the roundings of what is added up, relative to its magnitude.
      noise: of each rounded activation, relative, where they are rounded on the way.
    """
    exact = values @ weight.dense
    bound = unit * (np.abs(values) @ weight.magnitude) + 8 * noise * np.sqrt(values**2 @ weight.dense**2)
    if bias is not None:
        exact = exact + np.asarray(bias).astype(np.float64)
    exact = activate(exact, activation)
    bound = 1.2 * bound + rounding(exact, out_dtype) + 1e-6
    assert str(y.dtype) == out_dtype
    got = np.asarray(y).astype(np.float64)
    assert got.shape == exact.shape
    worst = np.max(np.abs(got - exact) / bound, initial=0.0)
    assert np.isfinite(got).all() and worst <= 1, f"error is {worst:.3g} times the bound"
