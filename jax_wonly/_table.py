"""Weights whose four-bit codes index a table of sixteen values (NF4, FP4): ``w = table[code] * scale``."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_wonly._abi import ShiftMode
from jax_wonly.primitives._common import divide

Table = tuple[float, ...]

ENTRIES = 16
# Beyond these bounds of the largest magnitude float16 would lose entries; the scales take powers of two as well.
_LEAST, _MOST = 1 / 16, 256

# Quantiles of the normal distribution (Dettmers et al., QLoRA, appendix E), as the float32 numbers of bitsandbytes.
NF4: Table = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# A sign, two bits of exponent and one of mantissa, as bitsandbytes numbers and normalises them.
_FP4_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4: Table = tuple(float(np.float32(s * v) / np.float32(12)) for s in (1, -1) for v in _FP4_TWELFTHS)
TABLES: dict[str, Table] = {"nf4": NF4, "fp4": FP4}


def check_table(table: Any, bits: int = 4, zeros: Any = None, offsets: Any = None) -> Table | None:
    """The table as float32 numbers, or None without one.

    Raises:
      TypeError: it is no sequence of numbers.
      ValueError: it has not 16 finite entries of a usable size, or goes with 8 bits, zeros or offsets.
    """
    if table is None:
        return None
    try:
        values: Table = tuple(float(np.float32(v)) for v in table)
    except (TypeError, ValueError) as error:
        raise TypeError(f"jax_wonly: table={table!r}; accepted: {ENTRIES} numbers, or None.") from error
    largest = max(map(abs, values), default=0.0)
    if len(values) != ENTRIES or not all(map(math.isfinite, values)) or not _LEAST <= largest <= _MOST:
        raise ValueError(
            f"jax_wonly: table={values}; accepted: {ENTRIES} finite values, the largest magnitude from {_LEAST} to "
            f"{_MOST}."
        )
    if bits != 4 or zeros is not None or offsets is not None:
        raise ValueError("jax_wonly: a table is given; accepted: with bits=4, without zeros and offsets.")
    return values


def name_of(table: Sequence[float]) -> str | None:
    """``"nf4"`` or ``"fp4"``; None of another table."""
    return next((name for name, known in TABLES.items() if known == tuple(table)), None)


def _constant(table: Table) -> jax.Array:
    # Of scalars: an array would be a constant beside the traced function, which custom_partitioning does not allow.
    return jnp.concatenate([jnp.full((1,), value, jnp.float32) for value in table])


def look_up(codes: jax.Array, table: Table) -> jax.Array:
    """float32 ``table[codes]``."""
    return _constant(table).at[codes.astype(jnp.int32)].get(mode="promise_in_bounds")


def as_operand(table: Table | None, shift_mode: ShiftMode, shift: tuple[jax.Array, ...]):
    """The shift mode and the operand of a custom call: the table stands where zeros and offsets do."""
    if table is None:
        return shift_mode, shift
    return ShiftMode.TABLE, (_constant(table).reshape(1, 1, ENTRIES),)


def nearest_codes(values: jax.Array, scales: jax.Array, table: Table) -> jax.Array:
    """uint8 codes of the entries whose multiple of float32 ``scales`` is nearest to float32 ``values``; halfway between
    two, that of the lower.

    By products, which are cheap and the same on every platform, as XLA's quotients are not.
    """
    order = np.argsort(np.asarray(table, np.float32), kind="stable")
    ordered = np.asarray(table, np.float32)[order]
    codes = jnp.full(values.shape, order[0], jnp.uint8)
    for i in range(1, ENTRIES):
        if ordered[i] != ordered[i - 1]:
            middle = np.float32((np.float64(ordered[i]) + np.float64(ordered[i - 1])) / 2)
            codes = jnp.where(values > middle * scales, np.uint8(order[i]), codes)
    return codes


def quantize(w: jax.Array, *, group_size: int, table: Table, scale_dtype) -> tuple[jax.Array, jax.Array]:
    """Codes uint8 ``[..., K, N]`` and scales ``[..., K / group_size, N]``: the largest magnitude meets the table's.

    Everything is float32; codes are those of the nearest entries times the scale as it is stored.
    """
    *lead, k, n = w.shape
    groups = w.astype(jnp.float32).reshape(*lead, k // group_size, group_size, n)
    largest = jnp.max(jnp.abs(groups), axis=-2, keepdims=True)
    scales = divide(largest, jnp.float32(max(map(abs, table))), scale_dtype)
    # The barrier keeps XLA from dropping the round trip as excess precision.
    scales = lax.optimization_barrier(jnp.minimum(scales, jnp.finfo(scale_dtype).max))
    s = scales.astype(jnp.float32)
    # A scale of zero has all multiples in one place: such groups take the code of 0.
    codes = nearest_codes(jnp.where(s == 0, 0, groups), jnp.where(s == 0, 1, s), table)
    return codes.reshape(w.shape), jnp.squeeze(scales, -2)
