"""GPTQ's arrays: codes packed down the inputs, zeros along the outputs, and a group for every input.

``qweight`` int32 ``[K * bits / 32, N]``, ``qzeros`` int32 ``[K / G, N * bits / 32]``, both streams of bits with the
lowest first, ``scales [K / G, N]`` and ``g_idx [K]``: ``w[k, n] = (q - z[g_idx[k], n]) * s[g_idx[k], n]``. Version 1
stores ``z - 1`` (modulo ``2**bits``), version 2 stores ``z``.
"""

import numpy as np

from jax_wonly._format import check_size
from jax_wonly._permuted import PermutedTensor
from jax_wonly._tensor import QuantizedTensor
from jax_wonly._validate import check_choice
from jax_wonly.compat._codes import (
    as_words,
    check_bits_in,
    check_shape,
    in_order,
    pack_bits,
    quantized_by_index,
    unpack_bits,
    without_midpoint_zeros,
    words_for,
)

BITS = (2, 3, 4, 8)


def decode(
    qweight, qzeros, scales, g_idx=None, *, bits: int = 4, version: int = 1, group_size: int | None = None
) -> QuantizedTensor | PermutedTensor:
    """The weight of GPTQ's arrays.

    Args:
      qweight: int32 ``[K * bits / 32, N]``.
      qzeros: int32 ``[K / group_size, ceil(N * bits / 32)]``.
      scales: float16, bfloat16 or float32 ``[K / group_size, N]``.
      g_idx: concrete int32 ``[K]``, the group of each input; None: successive inputs.
      bits: 2, 3, 4 or 8.
      version: 1 where the zeros are stored less one, else 2.
      group_size: needed only where it does not divide K, and there is no ``g_idx``.

    Returns:
      A :class:`~jax_wonly.QuantizedTensor` ``[K, N]``, or a :class:`~jax_wonly.PermutedTensor` where groups are not
      contiguous (act-order). There are no zeros where they are known and all ``2**(bits - 1)``.

    Raises:
      TypeError, ValueError: types, shapes or groups do not fit, or the group size cannot be held.

    Example:
      >>> from jax_wonly.compat import gptq
      >>> qt = jw.quantize(jax.random.normal(jax.random.key(0), (128, 64)), group_size=64)
      >>> arrays = gptq.encode(qt)
      >>> gptq.decode(arrays["qweight"], arrays["qzeros"], arrays["scales"], arrays["g_idx"])
      QuantizedTensor(int4[128, 64], group_size=64, symmetric, scales float32, 4.5 KiB)
    """
    bits = check_bits_in(bits, BITS)
    check_choice("version", version, (1, 2))
    if group_size is not None:
        check_size("group_size", group_size)
    qweight, qzeros = as_words("qweight", qweight), as_words("qzeros", qzeros)
    check_shape("scales", scales, (None, None))
    groups, n = scales.shape[-2:]
    check_shape("qweight", qweight, (None, n), "scales have N outputs")
    if qweight.shape[-2] * 32 % bits:
        raise ValueError(
            f"jax_wonly: qweight has shape {qweight.shape}, which holds no whole number of {bits}-bit codes."
        )
    k = qweight.shape[-2] * 32 // bits
    check_shape("qzeros", qzeros, (groups, words_for(n, bits)), f"{groups} groups of scales, N={n}, {bits} bits")
    codes = unpack_bits(qweight, bits, k, axis=-2)
    zeros = unpack_bits(qzeros, bits, n)
    if version == 1:
        zeros = (zeros + np.uint8(1)) & np.uint8(2**bits - 1)
    zeros = without_midpoint_zeros(zeros, bits)
    return quantized_by_index(codes, scales, zeros, g_idx, bits=bits, group_size=group_size)


def encode(qt: QuantizedTensor | PermutedTensor, *, version: int = 1) -> dict:
    """The inverse of :func:`decode`: ``{"qweight": ..., "qzeros": ..., "scales": ..., "g_idx": ...}``.

    Args:
      qt: a weight ``[K, N]``.
      version: 1 to store the zeros less one, else 2.

    Raises:
      ValueError: the weight has leading axes, floating zeros or offsets, or K or N does not fill whole words.

    Example:
      >>> from jax_wonly.compat import gptq
      >>> qt = jw.quantize(jax.random.normal(jax.random.key(0), (128, 64)), group_size=64)
      >>> {name: array.shape for name, array in gptq.encode(qt).items()}
      {'qweight': (16, 64), 'qzeros': (2, 8), 'scales': (2, 64), 'g_idx': (128,)}
    """
    check_choice("version", version, (1, 2))
    weight, codes, g_idx, zeros = in_order(qt, "GPTQ")
    bits, k, n = weight.bits, weight.k, weight.n
    if codes.ndim != 2 or k * bits % 32 or n * bits % 32:
        raise ValueError(
            f"jax_wonly: the weight has shape {weight.shape}; accepted for int{bits}: [K, N], both multiples of "
            f"{32 // bits}."
        )
    if version == 1:
        zeros = (zeros - np.uint8(1)) & np.uint8(2**bits - 1)
    return {
        "qweight": pack_bits(codes, bits, axis=0).view(np.int32),
        "qzeros": pack_bits(zeros, bits).view(np.int32),
        "scales": weight.scales,
        "g_idx": g_idx,
    }
