"""AutoAWQ's "gemm" arrays: int4 codes packed along the outputs in an order that suits its kernel.

``qweight`` int32 ``[K, N / 8]``: nibble ``i`` of word ``c``, lowest first, is the code of output
``8c + (0, 2, 4, 6, 1, 3, 5, 7)[i]``, so that shifts by 4 and one mask give the pairs that a half2 register wants.
``qzeros`` int32 ``[K / G, N / 8]`` are packed likewise, ``scales [K / G, N]`` are plain, and ``w = (q - z) * s``.
"""

import numpy as np

from jax_wonly._tensor import QuantizedTensor
from jax_wonly.compat._codes import (
    as_words,
    check_shape,
    codes_and_zeros,
    pack_bits,
    quantized,
    unpack_bits,
    without_midpoint_zeros,
)


def _unpack(words, n: int):
    # Nibble 4 odd + pair holds output 2 pair + odd.
    fields = unpack_bits(words, 4, n).reshape(*words.shape[:-1], n // 8, 2, 4)
    return fields.swapaxes(-1, -2).reshape(*words.shape[:-1], n)


def _pack(codes):
    fields = codes.reshape(*codes.shape[:-1], -1, 4, 2).swapaxes(-1, -2)
    return pack_bits(fields.reshape(codes.shape), 4).view(np.int32)


def decode(qweight, qzeros, scales) -> QuantizedTensor:
    """The weight of AutoAWQ's arrays.

    Args:
      qweight: int32 ``[..., K, N / 8]``.
      qzeros: int32 ``[..., K / group_size, N / 8]``, or None for symmetric weights.
      scales: float16, bfloat16 or float32 ``[..., K / group_size, N]``.

    Returns:
      An int4 :class:`~jax_wonly.QuantizedTensor` ``[..., K, N]`` with uint8 zeros; without zeros where they are known
      and all 8.

    Raises:
      TypeError, ValueError: types or shapes do not fit, or the group size cannot be held.

    Example:
      >>> from jax_wonly.compat import awq
      >>> qt = jw.quantize(jax.random.normal(jax.random.key(0), (128, 64)), mode="integer_zeros")
      >>> arrays = awq.encode(qt)
      >>> awq.decode(arrays["qweight"], arrays["qzeros"], arrays["scales"])
      QuantizedTensor(int4[128, 64], group_size=128, zeros uint8, scales float32, 4.3 KiB)
    """
    qweight = as_words("qweight", qweight)
    check_shape("scales", scales, (None, None))
    *_, groups, n = scales.shape
    check_shape("qweight", qweight, (None, n // 8 if n % 8 == 0 else -1), f"scales have N={n}, a multiple of 8")
    k = qweight.shape[-2]
    if not groups or k % groups:
        raise ValueError(f"jax_wonly: scales has shape {tuple(scales.shape)}; accepted: groups that divide K={k}.")
    zeros = None
    if qzeros is not None:
        qzeros = as_words("qzeros", qzeros)
        check_shape("qzeros", qzeros, (groups, n // 8))
        zeros = without_midpoint_zeros(_unpack(qzeros, n), 4)
    return quantized(_unpack(qweight, n), scales, zeros, bits=4, group_size=k // groups)


def encode(qt: QuantizedTensor) -> dict:
    """The inverse of :func:`decode`: ``{"qweight": ..., "qzeros": ..., "scales": ...}``.

    Args:
      qt: an int4 weight ``[..., K, N]``, symmetric or with integer zeros.

    Raises:
      ValueError: the weight is int8, has floating zeros or offsets, or N is not a multiple of 8.

    Example:
      >>> from jax_wonly.compat import awq
      >>> qt = jw.quantize(jax.random.normal(jax.random.key(0), (128, 64)), mode="integer_zeros")
      >>> {name: array.shape for name, array in awq.encode(qt).items()}
      {'qweight': (128, 8), 'qzeros': (1, 8), 'scales': (1, 64)}
    """
    codes, zeros = codes_and_zeros(qt, "AWQ")
    if qt.bits != 4 or qt.n % 8:
        raise ValueError(f"jax_wonly: the weight is int{qt.bits} with N={qt.n}; accepted: int4, N a multiple of 8.")
    return {"qweight": _pack(codes), "qzeros": _pack(zeros), "scales": qt.scales}
