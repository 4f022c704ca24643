"""Second moments of a layer's inputs, and the errors of its outputs that they tell."""

import math
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from jax_wonly._quantize import _all_finite
from jax_wonly._validate import check_array

_ROWS = 1 << 14  # inputs that are converted to float32 at a time


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """The float32 product, at full precision on every device."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


@jax.jit
def gram(x: jax.Array) -> jax.Array:
    """``x' x`` of ``x [..., T, K]`` in float32."""
    x = x.astype(jnp.float32)
    return product(jnp.swapaxes(x, -1, -2), x)


def second_moments(x) -> jax.Array:
    """The mean of ``x x'`` over the inputs of a layer: what :func:`awq` and :func:`gptq` know of them.

    Those of several batches are averaged, weighted by their numbers of inputs.

    Args:
      x: float16, bfloat16 or float32 ``[..., T, K]``. Leading axes are those of the weight (layers or experts).

    Returns:
      float32 ``[..., K, K]``.

    Raises:
      TypeError: ``x`` is no array of such a type.
      ValueError: it has fewer than two axes or no element, or holds NaN or Inf (seen only outside of ``jit``).

    Example:
      >>> jw.algorithms.second_moments(jnp.array([[1.0, 2.0], [3.0, 0.0]]))
      Array([[5., 1.],
             [1., 2.]], dtype=float32)
    """
    check_array("x", x)
    if len(x.shape) < 2 or 0 in x.shape:
        raise ValueError(f"jax_wonly: x has shape {tuple(x.shape)}; accepted: [..., T, K] with T, K >= 1.")
    x = jnp.asarray(x)
    _check_finite("x", x)
    count = x.shape[-2]
    total = gram(x[..., :_ROWS, :])
    for i in range(_ROWS, count, _ROWS):
        total += gram(x[..., i : i + _ROWS, :])
    return total / count


def _check_finite(name: str, value) -> None:
    if not isinstance(value, jax.core.Tracer) and not bool(_all_finite(value)):
        raise ValueError(f"jax_wonly: {name} of shape {tuple(value.shape)} holds NaN or Inf; accepted: finite values.")


def check_moments(moments, w) -> jax.Array:
    """Second moments of the inputs of ``w [..., K, N]`` as float32.

    Raises:
      TypeError, ValueError: they are none.
    """
    check_array("moments", moments)
    k, lead = w.shape[-2], tuple(w.shape[:-2])
    shape = tuple(moments.shape)
    if shape[-2:] != (k, k) or shape[:-2] not in ((), lead):
        accepted = f"[{k}, {k}]" + (f" or {[*lead, k, k]}" if lead else "")
        raise ValueError(
            f"jax_wonly: moments has shape {shape}; accepted: {accepted} for w of shape {tuple(w.shape)}, as "
            "second_moments makes it."
        )
    moments = jnp.asarray(moments, jnp.float32)
    _check_finite("moments", moments)
    if not isinstance(moments, jax.core.Tracer) and bool((jnp.diagonal(moments, axis1=-2, axis2=-1) < 0).any()):
        raise ValueError("jax_wonly: moments has a negative diagonal element; accepted: means of squares there.")
    return moments


def quadratic(difference: jax.Array, moments: jax.Array) -> jax.Array:
    """``d' M d`` for every column of ``difference [..., K, N]``: the mean square of its outputs, ``[..., N]``."""
    # Rounding may leave a tiny negative number where nothing is left.
    return jnp.maximum((product(moments, difference) * difference).sum(-2), 0)


def output_error(w, weight: Any, moments=None) -> float:
    """The relative error of a layer's outputs: root mean square of ``x (weight - w)`` over that of ``x w``.

    Args:
      w: dense ``[..., K, N]``.
      weight: what stands for it, with a method ``dequantize``: a :class:`~jax_wonly.QuantizedTensor`,
        :class:`ScaledTensor` or :class:`~jax_wonly.PermutedTensor`; or a dense array.
      moments: of the inputs x, as :func:`second_moments` makes them; None: all inputs are independent and of one size,
        which gives the relative error of the weight itself.

    Raises:
      TypeError, ValueError: shapes or types do not fit.

    Example:
      >>> w = jax.random.normal(jax.random.key(0), (128, 64))
      >>> jw.algorithms.output_error(w, jw.quantize(w, bits=8)) < jw.algorithms.output_error(w, jw.quantize(w, bits=4))
      True
    """
    check_array("w", w)
    dense = weight.dequantize(jnp.float32) if hasattr(weight, "dequantize") else check_array("weight", weight)
    if tuple(dense.shape) != tuple(w.shape):
        raise ValueError(f"jax_wonly: weight has shape {tuple(dense.shape)}; accepted: that of w, {tuple(w.shape)}.")
    sums = _sums(jnp.asarray(w), jnp.asarray(dense), None if moments is None else check_moments(moments, w))
    return math.sqrt(float(sums[0]) / max(float(sums[1]), float(jnp.finfo(jnp.float32).tiny)))


@jax.jit
def _sums(w, dense, moments):
    w = w.astype(jnp.float32)
    difference = dense.astype(jnp.float32) - w
    if moments is None:
        return (difference**2).sum(), (w**2).sum()
    return quadratic(difference, moments).sum(), quadratic(w, moments).sum()
