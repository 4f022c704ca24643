"""HQQ's arrays. ``W_q`` is a matrix with one group in a row (axis 1) or in a column (axis 0), packed over its rows: the
highest bits of element ``[r, c]`` are row r's code, the next ones that of the row half (a quarter, ...) of all rows
further down. ``w = (q - zero) * scale``.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jax_wonly._format import check_size
from jax_wonly._tensor import QuantizedTensor
from jax_wonly._validate import FLOATS, check_array, check_choice
from jax_wonly.compat._codes import InexpressibleError, check_bits_in, check_sizes, quantized

BITS = (1, 2, 3, 4, 5, 6, 8)

# Codes in each element of W_q, and the bits that each takes there.
_PARTS = {1: (8, 1), 2: (4, 2), 3: (10, 3), 4: (2, 4), 5: (1, 8), 6: (1, 8), 8: (1, 8)}


def _rows(w_q, bits: int, rows: int) -> jax.Array:
    """The codes ``[rows, columns]``."""
    parts, width = _PARTS[bits]
    w_q = jnp.asarray(w_q).view(np.uint32 if parts == 10 else np.uint8)
    shifts = np.arange(parts)[::-1, None, None] * width
    codes = (w_q >> shifts.astype(w_q.dtype)) & w_q.dtype.type((1 << width) - 1)
    return codes.astype(jnp.uint8).reshape(-1, w_q.shape[-1])[:rows]


def _codes(w_q, scale, zero, shape: tuple[int, int], bits: int, group_size: int | None, axis: int):
    """Codes, scales and zeros as matrices ``[N * K / G, G]`` or ``[N * K / G, 1]`` (axis 1), or their transposes."""
    bits = check_bits_in(bits, BITS)
    check_array("w_q", w_q, ("int32", "uint32") if bits == 3 else ("uint8", "int8"))
    n, k = check_sizes("shape", shape)
    check_choice("axis", axis, (0, 1))
    size = (n if axis == 0 else k) if group_size is None else check_size("group_size", group_size)
    if n < 1 or k < 1 or size < 1 or n * k % size or (axis == 1 and k % size) or (axis == 0 and n % size):
        raise ValueError(f"jax_wonly: group_size={group_size} does not divide shape={tuple(shape)} along axis {axis}.")
    grid = (n * k // size, size) if axis == 1 else (size, n * k // size)
    per_group = (grid[0], 1) if axis == 1 else (1, grid[1])
    parts = _PARTS[bits][0]
    expected = (-(-grid[0] // parts), grid[1])
    if tuple(w_q.shape) != expected:
        raise ValueError(
            f"jax_wonly: w_q has shape {tuple(w_q.shape)}; accepted: {expected} for shape={tuple(shape)}, {bits} bits, "
            f"group_size={group_size}, axis={axis}."
        )
    for name, value in (("scale", scale), ("zero", zero)):
        check_array(name, value, FLOATS)
        if value.size != per_group[0] * per_group[1]:
            raise ValueError(f"jax_wonly: {name} has shape {tuple(value.shape)}; accepted: {per_group}.")
    return _rows(w_q, bits, grid[0]), *(jnp.asarray(a).reshape(per_group) for a in (scale, zero))


def decode(
    w_q, scale, zero, shape: tuple[int, int], *, bits: int = 4, group_size: int | None = 64, axis: int = 1
) -> QuantizedTensor:
    """The weight of HQQ's arrays.

    Args:
      w_q: uint8 (int32 for 3 bits), rows packed as above.
      scale, zero: float16, bfloat16 or float32, one for each group.
      shape: ``(N, K)``.
      bits: 1, 2, 3, 4, 5, 6 or 8.
      group_size: how many weights share a scale; None: all along the axis.
      axis: 1, groups along the inputs. Those of axis 0 go along the outputs, and are for :func:`dequantize`.

    Returns:
      A :class:`~jax_wonly.QuantizedTensor` ``[K, N]`` with floating zeros: int4 for up to 4 bits, else int8.

    Raises:
      TypeError, ValueError: types or shapes do not fit, or the groups cannot be held.

    Example:
      >>> from jax_wonly.compat import hqq
      >>> w_q, scale, zero = jnp.zeros((64, 64), jnp.uint8), jnp.ones((128, 1)), jnp.ones((128, 1))
      >>> hqq.decode(w_q, scale, zero, shape=(64, 128), bits=4, group_size=64)
      QuantizedTensor(int4[128, 64], group_size=64, zeros float32, scales float32, 5.0 KiB)
    """
    codes, scale, zero = _codes(w_q, scale, zero, shape, bits, group_size, axis)
    if axis == 0:
        raise InexpressibleError(
            "jax_wonly: axis=0 has groups along the outputs; accepted: axis=1 (dequantize() takes both)."
        )
    n, k = shape
    scale, zero = (a.reshape(n, -1).T for a in (scale, zero))
    return quantized(codes.reshape(n, k).T, scale, zero, bits=bits, group_size=k // scale.shape[0])


def dequantize(w_q, scale, zero, shape, *, bits: int = 4, group_size: int | None = 64, axis: int = 1) -> jax.Array:
    """The dense weight, float32 ``[K, N]``; arguments as :func:`decode`, of either axis.

    Raises:
      TypeError, ValueError: as :func:`decode`, but for the groups that cannot be held.

    Example:
      >>> from jax_wonly.compat import hqq
      >>> w_q, scale, zero = jnp.zeros((64, 64), jnp.uint8), jnp.ones((128, 1)), jnp.ones((128, 1))
      >>> hqq.dequantize(w_q, scale, zero, shape=(64, 128), bits=4, group_size=64)[0, 0]
      Array(-1., dtype=float32)
    """
    codes, scale, zero = _codes(w_q, scale, zero, shape, bits, group_size, axis)
    dense = (codes.astype(jnp.float32) - zero.astype(jnp.float32)) * scale.astype(jnp.float32)
    return dense.reshape(shape).T
