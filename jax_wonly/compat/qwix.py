"""``qwix.QArray``, the quantized array of qwix: ``w = (qvalue - zero_point) * scale``, all three broadcast in tiles."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_wonly._tensor import QuantizedTensor
from jax_wonly._validate import FLOATS, check_array
from jax_wonly.compat._codes import codes_and_zeros, quantized, without_midpoint_zeros

_SIGNED = {"int4": 4, "int8": 8}
_UNSIGNED = {"uint4": 4, "uint8": 8}


def _is_qarray(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("qvalue", "scale", "zero_point", "qtype"))


def decode(array) -> QuantizedTensor:
    """The weight of a ``qwix.QArray`` ``[..., K, N]`` whose scales are tiled along K, one for each output.

    Args:
      array: of qtype int4, int8, uint4 or uint8; ``scale [..., K / G, N]``, or ``[..., K / G, 1]`` for one scale for
        all outputs. Leading axes have scales of their own, or share them.

    Raises:
      TypeError: ``array`` is no QArray, or of another qtype.
      ValueError: its tiles cannot be held.

    Example:
      >>> from jax_wonly.compat import qwix
      >>> qt = jw.quantize(jax.random.normal(jax.random.key(0), (128, 64)), group_size=64)
      >>> qwix.decode(qwix.encode(qt))
      QuantizedTensor(int4[128, 64], group_size=64, symmetric, scales float32, 4.5 KiB)
    """
    if not _is_qarray(array):
        raise TypeError(f"jax_wonly: array is a {type(array).__name__}; accepted: a qwix.QArray.")
    dtype = str(array.qvalue.dtype)
    if str(jnp.dtype(array.qtype)) != dtype or dtype not in _SIGNED | _UNSIGNED:
        raise TypeError(
            f"jax_wonly: array has qtype {array.qtype} stored as {dtype}; accepted: "
            f"{', '.join(_SIGNED | _UNSIGNED)}, stored as such."
        )
    bits = (_SIGNED | _UNSIGNED)[dtype]
    shape, scale, zero = array.qvalue.shape, array.scale, array.zero_point
    check_array("scale", scale, FLOATS)
    if len(shape) < 2 or len(scale.shape) != len(shape) or shape[-2] % max(scale.shape[-2], 1):
        raise ValueError(
            f"jax_wonly: scale has shape {scale.shape} for a qvalue of {shape}; accepted: [..., K / G, N]."
        )
    *lead, k, n = shape
    groups = scale.shape[-2]

    def unsigned(value):
        # An int4 is widened first: its bits cannot be reinterpreted as a byte's.
        value = jnp.asarray(value)
        return (
            value.astype(jnp.uint8)
            if dtype in _UNSIGNED
            else (value.astype(jnp.int16) + 2 ** (bits - 1)).astype(jnp.uint8)
        )

    def full(name, value):
        try:
            return jnp.broadcast_to(value, (*lead, groups, n))
        except ValueError:
            raise ValueError(
                f"jax_wonly: {name} has shape {value.shape}; accepted: what broadcasts to {(*lead, groups, n)}."
            ) from None

    if zero is None:
        zeros = jnp.zeros((*lead, groups, n), jnp.uint8) if dtype in _UNSIGNED else None
    else:
        zeros = without_midpoint_zeros(full("zero_point", unsigned(zero)), bits)
    return quantized(unsigned(array.qvalue), full("scale", scale), zeros, bits=bits, group_size=k // groups)


def decode_tree(tree):
    """``tree`` with every ``qwix.QArray`` decoded; other leaves stay as they are.

    Raises:
      TypeError, ValueError: as :func:`decode`.

    Example:
      >>> from jax_wonly.compat import qwix
      >>> params = {"kernel": qwix.encode(jw.quantize(jnp.ones((128, 64)))), "bias": jnp.zeros(64)}
      >>> qwix.decode_tree(params)["kernel"]
      QuantizedTensor(int4[128, 64], group_size=128, symmetric, scales float32, 4.2 KiB)
    """
    return jax.tree.map(lambda leaf: decode(leaf) if _is_qarray(leaf) else leaf, tree, is_leaf=_is_qarray)


def encode(qt: QuantizedTensor):
    """The ``qwix.QArray`` of a weight, of qtype int4 or int8.

    Args:
      qt: a weight ``[..., K, N]``, symmetric or with integer zeros.

    Raises:
      ImportError: qwix is not installed.
      ValueError: the weight has floating zeros or offsets.

    Example:
      >>> from jax_wonly.compat import qwix
      >>> array = qwix.encode(jw.quantize(jnp.ones((128, 64)), group_size=64))
      >>> array.qvalue.shape, str(array.qvalue.dtype), array.scale.shape
      ((128, 64), 'int4', (2, 64))
    """
    try:
        from qwix import QArray  # type: ignore[import-not-found]
    except ImportError as error:
        raise ImportError("jax_wonly.compat.qwix.encode needs qwix: pip install qwix") from error

    codes, zeros = codes_and_zeros(qt, "qwix")
    qtype = jnp.int4 if qt.bits == 4 else jnp.int8

    def signed(value):
        return (value.astype(jnp.int16) - np.int16(2 ** (qt.bits - 1))).astype(qtype)

    return QArray(signed(codes), qt.scales, None if qt.zeros is None else signed(zeros), qtype)
