"""The arrays of compressed-tensors (vLLM, llm-compressor): "pack-quantized" and "int-quantized".

"pack-quantized": ``weight_packed`` int32 ``[N, ceil(K * bits / 32)]`` along the inputs, codes ``q + 2**(bits - 1)``,
``weight_scale [N, K / G]``, and zeros int32 ``[ceil(N * bits / 32), K / G]``, packed down the outputs with the same
shift; ``w[n, k] = (q - z) * s``. "int-quantized": ``weight`` int8 ``[N, K]``, zeros int8.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_wonly._format import check_size
from jax_wonly._permuted import PermutedTensor
from jax_wonly._tensor import QuantizedTensor
from jax_wonly._validate import check_array
from jax_wonly.compat._codes import (
    as_words,
    check_bits_in,
    check_shape,
    check_sizes,
    in_order,
    pack_bits,
    quantized_by_index,
    unpack_bits,
    without_midpoint_zeros,
    words_for,
)

BITS = tuple(range(1, 9))


def _finish(codes, scale, zeros, g_idx, bits: int, group_size: int | None) -> QuantizedTensor | PermutedTensor:
    """From codes ``[..., N, K]``, scales ``[..., N, groups]`` and zeros to the weight."""
    scale = jnp.swapaxes(jnp.asarray(scale), -1, -2)
    zeros = None if zeros is None else without_midpoint_zeros(jnp.swapaxes(zeros, -1, -2), bits)
    if g_idx is not None and not isinstance(g_idx, Tracer) and (np.asarray(g_idx) == -1).all():
        g_idx = None  # never filled in
    return quantized_by_index(jnp.swapaxes(codes, -1, -2), scale, zeros, g_idx, bits=bits, group_size=group_size)


def decode_packed(
    weight_packed,
    weight_scale,
    shape: tuple[int, int],
    weight_zero_point=None,
    weight_g_idx=None,
    *,
    bits: int = 4,
    group_size: int | None = None,
) -> QuantizedTensor | PermutedTensor:
    """The weight of "pack-quantized" arrays.

    Args:
      weight_packed: int32 ``[..., N, ceil(K * bits / 32)]``.
      weight_scale: float16, bfloat16 or float32 ``[..., N, K / group_size]``; ``[..., N, 1]`` per channel.
      shape: ``(N, K)``, what the checkpoint has as ``weight_shape``.
      weight_zero_point: int32 ``[..., ceil(N * bits / 32), K / group_size]``, or None for symmetric weights.
      weight_g_idx: concrete int32 ``[K]``, the group of each input; None, or all -1: successive inputs.
      bits: 1 to 8.
      group_size: needed only where it does not divide K.

    Returns:
      A :class:`~jax_wonly.QuantizedTensor` ``[..., K, N]``, or a :class:`~jax_wonly.PermutedTensor` where groups are
      not contiguous.

    Raises:
      TypeError, ValueError: types, shapes or groups do not fit, or the group size cannot be held.

    Example:
      >>> from jax_wonly.compat import compressed_tensors
      >>> arrays = compressed_tensors.encode_packed(jw.quantize(jnp.ones((128, 64))))
      >>> compressed_tensors.decode_packed(arrays["weight_packed"], arrays["weight_scale"], arrays["weight_shape"])
      QuantizedTensor(int4[128, 64], group_size=128, symmetric, scales float32, 4.2 KiB)
    """
    bits = check_bits_in(bits, BITS)
    n, k = check_sizes("shape", shape)
    if group_size is not None:
        check_size("group_size", group_size)
    if n < 1 or k < 1:
        raise ValueError(f"jax_wonly: shape={tuple(shape)}; accepted: (N, K) with N, K >= 1.")
    weight_packed = as_words("weight_packed", weight_packed)
    check_shape("weight_packed", weight_packed, (n, words_for(k, bits)), f"{bits} bits, N={n}, K={k}")
    check_shape("weight_scale", weight_scale, (n, None))
    groups = weight_scale.shape[-1]
    if not 0 < groups <= k:
        raise ValueError(f"jax_wonly: weight_scale has shape {tuple(weight_scale.shape)}; accepted: 1 to {k} groups.")
    zeros = None
    if weight_zero_point is not None:
        words = as_words("weight_zero_point", weight_zero_point)
        check_shape("weight_zero_point", words, (words_for(n, bits), groups), f"{bits} bits, N={n}, {groups} groups")
        zeros = unpack_bits(words, bits, n, axis=-2)
    return _finish(unpack_bits(weight_packed, bits, k), weight_scale, zeros, weight_g_idx, bits, group_size)


def decode_int8(weight, weight_scale, weight_zero_point=None) -> QuantizedTensor | PermutedTensor:
    """The weight of "int-quantized" arrays.

    Args:
      weight: int8 ``[..., N, K]``.
      weight_scale: float16, bfloat16 or float32 ``[..., N, K / group_size]``; ``[..., N, 1]`` or ``[1]``: no groups.
      weight_zero_point: int8 of the shape of the scales, or None.

    Returns:
      An int8 weight ``[..., K, N]``.

    Raises:
      TypeError, ValueError: types or shapes do not fit, or the group size cannot be held.

    Example:
      >>> from jax_wonly.compat import compressed_tensors
      >>> compressed_tensors.decode_int8(jnp.ones((64, 128), jnp.int8), jnp.ones((64, 1), jnp.bfloat16))
      QuantizedTensor(int8[128, 64], group_size=128, symmetric, scales bfloat16, 8.1 KiB)
    """
    check_array("weight", weight, ("int8",))
    check_array("weight_scale", weight_scale)
    check_shape("weight", weight, (None, None))
    n, k = weight.shape[-2:]

    def per_output(name, value):
        if value.size == 1:  # one for the whole weight
            return jnp.broadcast_to(jnp.asarray(value).reshape(1, 1), (*weight.shape[:-2], n, 1))
        check_shape(name, value, (n, None))
        return jnp.asarray(value)

    def unsigned(value):
        return jax.lax.bitcast_convert_type(jnp.asarray(value), jnp.uint8) ^ np.uint8(128)

    scale = per_output("weight_scale", weight_scale)
    zeros = None
    if weight_zero_point is not None:
        check_array("weight_zero_point", weight_zero_point, ("int8",))
        zeros = per_output("weight_zero_point", unsigned(weight_zero_point))
    return _finish(unsigned(weight), scale, zeros, None, 8, None)


def encode_packed(qt: QuantizedTensor | PermutedTensor) -> dict:
    """The inverse of :func:`decode_packed`, of 4 or 8 bits.

    Args:
      qt: a weight ``[..., K, N]``.

    Returns:
      ``weight_packed``, ``weight_scale``, ``weight_shape``, and ``weight_zero_point`` and ``weight_g_idx`` where the
      weight has zeros or a permutation.

    Raises:
      ValueError: the weight has floating zeros or offsets.

    Example:
      >>> from jax_wonly.compat import compressed_tensors
      >>> arrays = compressed_tensors.encode_packed(jw.quantize(jnp.ones((128, 64))))
      >>> {name: array.shape for name, array in arrays.items()}
      {'weight_packed': (64, 16), 'weight_scale': (64, 1), 'weight_shape': (2,)}
    """
    weight, codes, g_idx, zeros = in_order(qt, "compressed-tensors")
    arrays: dict[str, Any] = {"weight_g_idx": g_idx} if isinstance(qt, PermutedTensor) else {}
    arrays["weight_packed"] = pack_bits(jnp.swapaxes(codes, -1, -2), weight.bits).view(np.int32)
    arrays["weight_scale"] = jnp.swapaxes(weight.scales, -1, -2)
    arrays["weight_shape"] = np.array([weight.n, weight.k], np.int64)
    if weight.zeros is not None:
        arrays["weight_zero_point"] = pack_bits(jnp.swapaxes(zeros, -1, -2), weight.bits, axis=-2).view(np.int32)
    return arrays
