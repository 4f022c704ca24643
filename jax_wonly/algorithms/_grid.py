"""The codes that a group may take: scales and shifts of ``jax_wonly.quantize``, from extremes that are given."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from jax_wonly._abi import QuantizeMode
from jax_wonly._format import bias_of, check_bits, pack
from jax_wonly._quantize import MODES, _all_finite
from jax_wonly._tensor import QuantizedTensor
from jax_wonly._validate import check_array, check_float_dtype, check_group_size
from jax_wonly.primitives import quantize as definition
from jax_wonly.primitives._common import divide


@partial(jax.tree_util.register_dataclass, data_fields=("scales", "shift"), meta_fields=("scheme",))
@dataclass(frozen=True)
class Grid:
    """Scales and zeros or offsets (None: symmetric), in the types in which they are stored."""

    scales: jax.Array
    shift: jax.Array | None
    scheme: "Scheme"


@dataclass(frozen=True)
class Scheme:
    """How the weights of a group become codes. Hashable, so that functions are compiled for it."""

    bits: int
    group_size: int
    mode: QuantizeMode
    scale_dtype: jnp.dtype

    @classmethod
    def of(cls, w, bits: int, group_size: int | None, mode: str, scale_dtype) -> "Scheme":
        """The scheme of a weight ``w [..., K, N]``.

        Raises:
          TypeError, ValueError: as ``jax_wonly.quantize``.
        """
        check_array("w", w)
        bits = check_bits(bits)
        if len(w.shape) < 2 or 0 in w.shape:
            raise ValueError(f"jax_wonly: w has shape {tuple(w.shape)}; accepted: [..., K, N] with K, N >= 1.")
        if mode not in MODES:
            raise ValueError(f"jax_wonly: mode={mode!r} is not supported; accepted: {', '.join(map(repr, MODES))}.")
        group_size = check_group_size(group_size, w.shape[-2])
        dtype = jnp.dtype(w.dtype) if scale_dtype is None else check_float_dtype("scale_dtype", scale_dtype)
        if not isinstance(w, jax.core.Tracer) and not bool(_all_finite(w)):
            raise ValueError(f"jax_wonly: w of shape {tuple(w.shape)} holds NaN or Inf; accepted: finite values.")
        return cls(bits, group_size, MODES[mode], dtype)

    def extremes(self, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of the groups of ``w [G, size, N]``, each ``[G, 1, N]``."""
        lo, hi = w.min(1, keepdims=True), w.max(1, keepdims=True)
        if self.mode == QuantizeMode.SYMMETRIC:
            hi = jnp.maximum(jnp.abs(lo), jnp.abs(hi))
            return -hi, hi
        if self.mode == QuantizeMode.INTEGER_ZEROS:
            return jnp.minimum(lo, 0), jnp.maximum(hi, 0)
        return lo, hi

    def grid(self, lo: jax.Array, hi: jax.Array) -> Grid:
        """That from ``lo`` to ``hi``, each ``[G, 1, N]``: what ``jax_wonly.quantize`` gives to a group of the two."""
        scales, *shift = definition.reference(
            jnp.concatenate([lo, hi], 1), bits=self.bits, group_size=2, mode=self.mode, scale_dtype=self.scale_dtype
        )[1:]
        return Grid(scales, shift[0] if shift else None, self)

    def groups(self, w: jax.Array) -> jax.Array:
        """``w [K, N]`` as float32 ``[G, size, N]``."""
        return w.astype(jnp.float32).reshape(-1, self.group_size, w.shape[-1])

    def tensor(self, codes: jax.Array, grid: Grid) -> QuantizedTensor:
        """The weight of codes (of any type) that reshape to ``[K, N]``, and a grid that reshapes to ``[G, N]``."""
        n = codes.shape[-1]
        codes = codes.reshape(-1, n).astype(jnp.uint8)
        scales = grid.scales.reshape(-1, n)
        shift = None if grid.shift is None else grid.shift.reshape(-1, n)
        offsets = shift if self.mode == QuantizeMode.OFFSETS else None
        zeros = shift if offsets is None else None
        return QuantizedTensor(pack(codes, self.bits), scales, zeros, offsets, bits=self.bits, k=codes.shape[0], n=n)


def encode(w: jax.Array, grid: Grid) -> jax.Array:
    """The codes of float32 weights, as float32. Grid and weights broadcast."""
    scheme, s = grid.scheme, grid.scales.astype(jnp.float32)
    top, bias = 2**scheme.bits - 1, bias_of(scheme.bits)
    if scheme.mode == QuantizeMode.OFFSETS and grid.shift is not None:
        return jnp.where(s == 0, 0, jnp.clip(_rint(divide(w - grid.shift.astype(jnp.float32), s)), 0, top))
    ratio = jnp.where(s == 0, 0, divide(w, s))
    if grid.shift is None:
        return jnp.clip(_rint(ratio) + bias, 0, top)
    shift = grid.shift.astype(jnp.float32)
    # The zero of a constant group is its sign, and its code 0.
    codes = _rint(ratio) + shift if scheme.mode == QuantizeMode.INTEGER_ZEROS else _rint(ratio + shift)
    return jnp.clip(codes, 0, top)


def decode(codes: jax.Array, grid: Grid) -> jax.Array:
    """The float32 weights of codes."""
    s = grid.scales.astype(jnp.float32)
    if grid.shift is None:
        return (codes - bias_of(grid.scheme.bits)) * s
    shift = grid.shift.astype(jnp.float32)
    return codes * s + shift if grid.scheme.mode == QuantizeMode.OFFSETS else (codes - shift) * s


def _rint(x: jax.Array) -> jax.Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def least(measure, candidates: jax.Array):
    """``measure(candidate) = (error, ...)`` where the error is least, element by element; the first of equals."""
    start = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(measure, candidates[0]))

    def step(best, candidate):
        new = measure(candidate[0])
        better = candidate[1] | (new[0] < best[0])
        return jax.tree.map(lambda a, b: jnp.where(better, a, b), new, best), None

    return lax.scan(step, start, (candidates, jnp.arange(len(candidates)) == 0))[0]


def over_leading(function, w: jax.Array, *others: jax.Array):
    """``function(w, *others)`` of matrices for each place of the leading axes, one after the other."""
    lead = w.shape[:-2]
    if not lead:
        return function(w, *others)
    flat = [jnp.broadcast_to(a, (*lead, *a.shape[-2:])).reshape(-1, *a.shape[-2:]) for a in (w, *others)]
    results = lax.map(lambda operands: function(*operands), tuple(flat))
    return jax.tree.map(lambda a: a.reshape(*lead, *a.shape[1:]), results)
