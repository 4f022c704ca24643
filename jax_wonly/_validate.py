"""Checks at the door: every message names the argument, its value and what is accepted."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_wonly._format import FLOATS, GROUP_SIZES, check_array, check_bits, check_packed, tiles


def check_choice(name: str, value: Any, accepted: Iterable[Any]) -> None:
    """Raises ValueError unless ``value`` is one of those accepted."""
    accepted = tuple(accepted)
    # Values of other types cannot all be compared: arrays, for one.
    if not isinstance(value, (str, int, np.integer, type(None))) or value not in accepted:
        raise ValueError(f"jax_wonly: {name}={value!r} is not supported; accepted: {', '.join(map(repr, accepted))}.")


def check_float_dtype(name: str, dtype) -> jnp.dtype:
    try:
        dtype = jnp.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f"jax_wonly: {name}={dtype!r} is not a dtype; accepted: {', '.join(FLOATS)}.") from error
    if str(dtype) not in FLOATS:
        raise TypeError(f"jax_wonly: {name}={dtype} is not supported; accepted: {', '.join(FLOATS)}.")
    return dtype


def check_group_size(group_size: int | None, k: int) -> int:
    """The number of inputs that share a scale; None and -1 mean all of them."""
    if group_size is None:
        return k
    if isinstance(group_size, bool) or not isinstance(group_size, (int, np.integer)):
        raise TypeError(f"jax_wonly: group_size={group_size!r} is not an integer; accepted: {_accepted_group_sizes()}.")
    if group_size == -1:
        return k
    if group_size not in GROUP_SIZES and group_size != k:
        raise ValueError(f"jax_wonly: group_size={group_size} is not supported; accepted: {_accepted_group_sizes()}.")
    if k % group_size:
        dividing = [str(g) for g in GROUP_SIZES if k % g == 0]
        raise ValueError(
            f"jax_wonly: group_size={group_size} does not divide K={k}; accepted here: "
            f"{', '.join([*dividing, 'None (per channel)'])}."
        )
    return int(group_size)


def _accepted_group_sizes() -> str:
    return f"{', '.join(map(str, GROUP_SIZES))}, None or -1 (per channel)"


def check_finite(name: str, value) -> None:
    """Raises where a host array holds NaN or Inf; arrays on a device are not read back."""
    if isinstance(value, np.ndarray) and not np.isfinite(value.astype(np.float32)).all():
        raise ValueError(f"jax_wonly: {name} holds NaN or Inf; accepted: finite values.")


def infer_bits(qw, k: int) -> int:
    """The bits of a packed array, from its tile count along K."""
    kt = qw.shape[-2]
    fitting = [bits for bits in (4, 8) if tiles(bits, k, 1)[1] == kt]
    if len(fitting) == 2:
        raise ValueError(f"jax_wonly: K={k} fits both an int4 and an int8 packed array; pass bits=4 or bits=8.")
    if not fitting:
        raise ValueError(
            f"jax_wonly: qw has shape {tuple(qw.shape)}, which does not hold K={k} inputs (the last axis of x); "
            f"accepted for that K: {tiles(4, k, 1)[1]} (int4) or {tiles(8, k, 1)[1]} (int8) in axis -2."
        )
    return fitting[0]


def check_weights(qw, scales, zeros, offsets, *, bits: int | None, k: int) -> tuple[int, int, int]:
    """Checks the arrays of a quantized weight; returns ``(bits, k, n)``."""
    check_array("qw", qw, ("uint32",))
    if len(qw.shape) < 3 or qw.shape[-1] != 512:
        raise ValueError(
            f"jax_wonly: qw has shape {tuple(qw.shape)}; accepted: [..., ceil(N / 64), ceil(K / tile_k), 512], as "
            f"jax_wonly.quantize and jax_wonly.pack make it."
        )
    if scales is None:
        raise TypeError(
            "jax_wonly: scales is None; accepted: an array [..., K / group_size, N], or a QuantizedTensor as qw."
        )
    check_array("scales", scales)
    if len(scales.shape) < 2:
        raise ValueError(
            f"jax_wonly: scales has shape {tuple(scales.shape)}; accepted: [..., K / group_size, N], [1, N] for "
            "per-channel scales."
        )
    groups, n = scales.shape[-2:]
    bits = infer_bits(qw, k) if bits is None else check_bits(bits)
    check_packed(qw, bits, k, n)
    if groups == 0 or k % groups or (groups != 1 and k // groups not in GROUP_SIZES):
        fitting = [str(k // g) for g in GROUP_SIZES if k % g == 0]
        raise ValueError(
            f"jax_wonly: scales has shape {tuple(scales.shape)}, {groups} groups for K={k}; accepted here: "
            f"{', '.join([*fitting, '1'])} groups (group sizes {', '.join(map(str, GROUP_SIZES))}, or per channel)."
        )
    if zeros is not None and offsets is not None:
        raise ValueError("jax_wonly: zeros and offsets are both given; accepted: one of them, or neither.")
    for name, value, dtypes in (("zeros", zeros, ("uint8", *FLOATS)), ("offsets", offsets, FLOATS)):
        if value is not None:
            check_array(name, value, dtypes)
            if len(value.shape) < 2 or tuple(value.shape[-2:]) != (groups, n):
                raise ValueError(
                    f"jax_wonly: {name} has shape {tuple(value.shape)}; accepted: [..., {groups}, {n}], as the "
                    "scales have."
                )
    for name, value in (("scales", scales), ("zeros", zeros), ("offsets", offsets)):
        check_finite(name, value)
    return bits, k, n


def broadcast_leads(**leads: tuple[int, ...]) -> tuple[int, ...]:
    """The common leading axes, by NumPy's broadcasting."""
    try:
        return np.broadcast_shapes(*leads.values())
    except ValueError:
        said = ", ".join(f"{name} {list(lead)}" for name, lead in leads.items())
        raise ValueError(f"jax_wonly: the leading axes do not broadcast: {said}.") from None
