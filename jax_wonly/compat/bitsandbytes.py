"""bitsandbytes' four-bit arrays (NF4, FP4): codes of a matrix ``[N, K]`` one row after the other, the first of two in
the high nibble, and a scale, ``absmax``, for each ``blocksize`` of them whatever rows they are in. ``w = quant_map[q] *
absmax``. Double quantization keeps ``absmax`` as bytes: ``nested_quant_map[byte] * nested_absmax + nested_offset``, one
``nested_absmax`` for each ``nested_blocksize`` of them.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_wonly._format import pack
from jax_wonly._table import check_table, look_up
from jax_wonly._tensor import QuantizedTensor
from jax_wonly._validate import check_array
from jax_wonly.compat._codes import check_shape, nibbles, supported_group


def dequantize_absmax(
    absmax, nested_absmax, nested_quant_map, nested_offset: float, *, nested_blocksize: int = 256
) -> jax.Array:
    """The scales float32 of double quantization.

    Args:
      absmax: uint8, one for each block of weights.
      nested_absmax: float32, one for each ``nested_blocksize`` of them.
      nested_quant_map: float32 ``[256]``.
      nested_offset: added to all.

    Returns:
      float32, one for each block of weights.

    Raises:
      TypeError, ValueError: types or shapes do not fit.

    Example:
      >>> from jax_wonly.compat import bitsandbytes
      >>> quant_map = jnp.linspace(-1, 1, 256)
      >>> absmax = jnp.array([0, 255], jnp.uint8)
      >>> bitsandbytes.dequantize_absmax(absmax, jnp.array([2.0]), quant_map, 3.0).tolist()
      [1.0, 5.0]
    """
    check_array("absmax", absmax, ("uint8",))
    check_array("nested_absmax", nested_absmax, ("float32",))
    check_array("nested_quant_map", nested_quant_map, ("float32",))
    if nested_blocksize < 1:
        raise ValueError(f"jax_wonly: nested_blocksize={nested_blocksize}; accepted: at least 1.")
    count = math.prod(absmax.shape)
    check_shape("nested_quant_map", nested_quant_map, (256,), "a byte")
    check_shape("nested_absmax", nested_absmax, (-(-count // nested_blocksize),), f"{count} scales")
    bytes_ = jnp.asarray(absmax).reshape(-1)
    values = jnp.asarray(nested_quant_map)[bytes_]
    # The barrier keeps XLA from contracting the product and the sum, which bitsandbytes rounds one after the other.
    scaled = jax.lax.optimization_barrier(values * jnp.repeat(jnp.asarray(nested_absmax), nested_blocksize)[:count])
    return scaled + jnp.float32(nested_offset)


def _codes(weight, absmax, quant_map, shape: tuple[int, int], blocksize: int):
    """Codes ``[N, K]`` and the flat scales."""
    n, k = (int(size) for size in shape)
    if n < 1 or k < 1 or blocksize < 1:
        raise ValueError(f"jax_wonly: shape={tuple(shape)}, blocksize={blocksize}; accepted: at least 1 each.")
    check_array("weight", weight, ("uint8",))
    check_array("absmax", absmax, ("float32",))
    check_array("quant_map", quant_map, ("float32",))
    count = n * k
    if math.prod(weight.shape) != -(-count // 2):
        raise ValueError(
            f"jax_wonly: weight has shape {tuple(weight.shape)}; accepted: {-(-count // 2)} bytes for shape={(n, k)}."
        )
    check_shape("absmax", absmax, (-(-count // blocksize),), f"shape={(n, k)}, blocksize={blocksize}")
    check_shape("quant_map", quant_map, (16,), "4 bits")
    low, high = nibbles(jnp.asarray(weight).reshape(-1))
    codes = jnp.stack([high, low], -1).reshape(-1)[:count].reshape(n, k)
    return codes, jnp.asarray(absmax)


def decode(weight, absmax, quant_map, shape: tuple[int, int], *, blocksize: int = 64) -> QuantizedTensor:
    """The weight of bitsandbytes' arrays.

    Args:
      weight: uint8 of any shape, ``ceil(N * K / 2)`` bytes.
      absmax: float32 ``[ceil(N * K / blocksize)]``; see :func:`dequantize_absmax` for double quantization.
      quant_map: float32 ``[16]``, of known values: it becomes the table of the weight.
      shape: ``(N, K)``, as of the dense weight in PyTorch.
      blocksize: how many successive codes share a scale.

    Returns:
      A :class:`~jax_wonly.QuantizedTensor` ``[K, N]`` of the same values, with float32 scales: in groups of
      ``blocksize`` where that divides K, else of what divides both.

    Raises:
      TypeError, ValueError: types or shapes do not fit, or ``blocksize`` and K have no group size of ours in common.

    Example:
      >>> from jax_wonly.compat import bitsandbytes
      >>> weight = jnp.zeros((64 * 128 // 2, 1), jnp.uint8)
      >>> bitsandbytes.decode(weight, jnp.ones(128), jnp.linspace(-1, 1, 16), (64, 128))
      QuantizedTensor(int4[128, 64], group_size=64, table, scales float32, 4.5 KiB)
    """
    codes, absmax = _codes(weight, absmax, quant_map, shape, blocksize)
    n, k = codes.shape
    group = supported_group(math.gcd(k, blocksize), k)  # which never lies in two blocks
    table = check_table(np.asarray(quant_map))
    first = np.arange(n, dtype=np.int64) * k + np.arange(0, k, group, dtype=np.int64)[:, None]  # of each group
    return QuantizedTensor(pack(codes.T, 4), absmax[first // blocksize], bits=4, k=k, n=n, table=table)


def dequantize(weight, absmax, quant_map, shape: tuple[int, int], *, blocksize: int = 64) -> jax.Array:
    """The dense weight of arrays with any K and blocksize.

    Args:
      weight, absmax, quant_map, shape, blocksize: as in :func:`decode`.

    Returns:
      float32 ``[K, N]``.

    Raises:
      TypeError, ValueError: types or shapes do not fit.

    Example:
      >>> from jax_wonly.compat import bitsandbytes
      >>> weight = jnp.array([0x0F], jnp.uint8)
      >>> bitsandbytes.dequantize(weight, jnp.full(1, 2.0), jnp.linspace(-1, 1, 16), (2, 1)).tolist()
      [[-2.0, 2.0]]
    """
    codes, absmax = _codes(weight, absmax, quant_map, shape, blocksize)
    values = look_up(codes, tuple(float(v) for v in np.asarray(quant_map)))
    scales = jnp.repeat(absmax, blocksize)[: values.size].reshape(values.shape)
    return (values * scales).T
