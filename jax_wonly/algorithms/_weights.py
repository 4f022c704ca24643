"""Quantizers that need no calibration: absmax, minmax, clip search and HQQ."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_wonly._quantize import quantize
from jax_wonly._tensor import QuantizedTensor
from jax_wonly.algorithms._grid import Grid, Scheme, decode, encode, least, over_leading
from jax_wonly.algorithms._moments import check_moments, quadratic

CLIP_STEPS = 25
CLIP_TO = 0.5  # the smallest share of its extremes that a group is clipped to


def absmax(w, *, bits: int = 4, group_size: int | None = 128, scale_dtype=None) -> QuantizedTensor:
    """Round-to-nearest, from the largest magnitude of a group: ``jax_wonly.quantize`` with ``mode="symmetric"``.

    Args:
      w: float16, bfloat16 or float32 ``[..., K, N]``.
      bits, group_size, scale_dtype: as in ``jax_wonly.quantize``.

    Raises:
      TypeError, ValueError: as ``jax_wonly.quantize``.

    Example:
      >>> jw.algorithms.absmax(jax.random.normal(jax.random.key(0), (128, 64)), bits=8)
      QuantizedTensor(int8[128, 64], group_size=128, symmetric, scales float32, 8.2 KiB)
    """
    return quantize(w, bits=bits, group_size=group_size, mode="symmetric", scale_dtype=scale_dtype)


def minmax(
    w, *, bits: int = 4, group_size: int | None = 128, mode: str = "integer_zeros", scale_dtype=None
) -> QuantizedTensor:
    """Round-to-nearest, from both extremes of a group: ``jax_wonly.quantize`` with another ``mode``.

    Args:
      w: float16, bfloat16 or float32 ``[..., K, N]``.
      bits, group_size, scale_dtype: as in ``jax_wonly.quantize``.
      mode: ``"integer_zeros"``, ``"float_zeros"`` or ``"offsets"``.

    Raises:
      TypeError, ValueError: as ``jax_wonly.quantize``; or ``mode="symmetric"``, which is :func:`absmax`.

    Example:
      >>> jw.algorithms.minmax(jax.random.normal(jax.random.key(0), (128, 64)), group_size=64)
      QuantizedTensor(int4[128, 64], group_size=64, zeros uint8, scales float32, 4.6 KiB)
    """
    if mode == "symmetric":
        raise ValueError(
            "jax_wonly: mode='symmetric' is that of absmax; accepted: 'integer_zeros', 'float_zeros', 'offsets'."
        )
    return quantize(w, bits=bits, group_size=group_size, mode=mode, scale_dtype=scale_dtype)


def clipped_grid(w: jax.Array, scheme: Scheme, moments: jax.Array | None) -> Grid:
    """The grid of each group of ``w [G, size, N]`` whose extremes are clipped so that the error is least.

    Args:
      w: float32.
      scheme: what to quantize to.
      moments: ``[G, size, size]``, of the inputs of each group; None: the mean square of the weight's error counts.
    """
    lo, hi = scheme.extremes(w)
    anchor = jnp.clip(0.0, lo, hi)  # what the range shrinks to: zero, or the extreme nearest to it

    def measure(share):
        grid = scheme.grid(anchor + share * (lo - anchor), anchor + share * (hi - anchor))
        difference = decode(encode(w, grid), grid) - w
        error = (difference**2).sum(1) if moments is None else quadratic(difference, moments)
        return error[:, None], grid.scales, grid.shift

    _, scales, shift = least(measure, jnp.linspace(1, CLIP_TO, CLIP_STEPS))
    return Grid(scales, shift, scheme)


def diagonal_blocks(moments: jax.Array, size: int) -> jax.Array:
    """``[K / size, size, size]`` of ``[K, K]``."""
    groups = moments.shape[0] // size
    index = jnp.arange(groups)
    return moments.reshape(groups, size, groups, size)[index, :, index]


def clip_and_round(w: jax.Array, moments: jax.Array | None, scheme: Scheme) -> QuantizedTensor:
    """``w [K, N]`` rounded to the grids of :func:`clipped_grid`."""
    groups = scheme.groups(w)
    blocks = None if moments is None else diagonal_blocks(moments, scheme.group_size)
    grid = clipped_grid(groups, scheme, blocks)
    return scheme.tensor(encode(groups, grid), grid)


@partial(jax.jit, static_argnames="scheme")
def _mse(w, moments, scheme):
    others = () if moments is None else (moments,)
    return over_leading(lambda w, moments=None: clip_and_round(w, moments, scheme), w, *others)


def mse(
    w,
    moments=None,
    *,
    bits: int = 4,
    group_size: int | None = 128,
    mode: str = "symmetric",
    scale_dtype=None,
) -> QuantizedTensor:
    """Round-to-nearest within extremes that are clipped, group by group, so that the squared error is least.

    Of 25 shares of the extremes from 1 down to 0.5 the best is taken, so that no group is worse than without clipping.

    Args:
      w: float16, bfloat16 or float32 ``[..., K, N]``.
      moments: float32 ``[K, K]`` or ``[..., K, K]``, the second moments of the inputs: the error of the group's outputs
        counts. None: the error of the weight.
      bits, group_size, mode, scale_dtype: as in ``jax_wonly.quantize``.

    Raises:
      TypeError, ValueError: as ``jax_wonly.quantize``, or ``moments`` do not fit.

    Example:
      >>> w = jax.random.normal(jax.random.key(0), (128, 64))
      >>> jw.algorithms.output_error(w, jw.algorithms.mse(w)) < jw.algorithms.output_error(w, jw.quantize(w))
      True
    """
    scheme = Scheme.of(w, bits, group_size, mode, scale_dtype)
    return _mse(jnp.asarray(w), None if moments is None else check_moments(moments, w), scheme)


def hqq(
    w,
    *,
    bits: int = 4,
    group_size: int | None = 128,
    scale_dtype=None,
    norm: float = 0.7,
    beta: float = 10.0,
    growth: float = 1.01,
    iterations: int = 20,
) -> QuantizedTensor:
    """Half-quadratic quantization: floating zeros that make few errors large rather than all small.

    Minimises the sum of ``|error| ** norm`` of each group over its zero, by turns between the codes, the errors that
    the norm would leave (a generalised soft threshold), and the mean that is then the best zero (Badri and Shaji,
    "Half-Quadratic Quantization", 2023). Errors are counted in scales, so that a weight times a constant gives the same
    codes. Of all iterations each group keeps the best, round-to-nearest among them.

    Args:
      w: float16, bfloat16 or float32 ``[..., K, N]``.
      bits, group_size, scale_dtype: as in ``jax_wonly.quantize``; the zeros are of the scales' type.
      norm: above 0, up to 1; smaller lets outliers be.
      beta, growth: weight of the quadratic term, and what it is multiplied by after each iteration.
      iterations: how many.

    Raises:
      TypeError, ValueError: as ``jax_wonly.quantize``, or a number is out of its range.

    Example:
      >>> jw.algorithms.hqq(jax.random.normal(jax.random.key(0), (128, 64)), group_size=64)
      QuantizedTensor(int4[128, 64], group_size=64, zeros float32, scales float32, 5.0 KiB)
    """
    scheme = Scheme.of(w, bits, group_size, "float_zeros", scale_dtype)
    for name, value, fits, accepted in (
        ("norm", norm, 0 < norm <= 1, "above 0, up to 1"),
        ("beta", beta, beta > 0, "above 0"),
        ("growth", growth, growth > 0, "above 0"),
        ("iterations", iterations, iterations >= 0, "0 or more"),
    ):
        if not fits:
            raise ValueError(f"jax_wonly: {name}={value!r} is out of range; accepted: {accepted}.")
    return _hqq(jnp.asarray(w), jnp.float32(norm), jnp.float32(beta), jnp.float32(growth), int(iterations), scheme)


@partial(jax.jit, static_argnames=("iterations", "scheme"))
def _hqq(w, norm, beta, growth, iterations, scheme):
    def one(w):
        groups = scheme.groups(w)
        start = scheme.grid(*scheme.extremes(groups))
        s = jnp.where(start.scales == 0, 1, start.scales).astype(jnp.float32)

        def measure(zeros):
            grid = Grid(start.scales, zeros, scheme)
            codes = encode(groups, grid)
            errors = (groups - decode(codes, grid)) / s
            return (jnp.abs(errors) ** norm).sum(1, keepdims=True), codes, errors

        def step(i, carry):
            zeros, least, best = carry
            _, codes, errors = measure(zeros)
            size = jnp.abs(errors)
            threshold = jnp.where(size > 0, size, 1) ** (norm - 1) / (beta * growth**i)
            sparse = jnp.sign(errors) * jnp.maximum(size - threshold, 0)
            zeros = (codes - groups / s + sparse).mean(1, keepdims=True).astype(scheme.scale_dtype)
            error = measure(zeros)[0]
            return zeros, jnp.minimum(error, least), jnp.where(error < least, zeros, best)

        first = start.shift, measure(start.shift)[0], start.shift
        grid = Grid(start.scales, lax.fori_loop(0, iterations, step, first)[2], scheme)
        return scheme.tensor(encode(groups, grid), grid)

    return over_leading(one, w)
