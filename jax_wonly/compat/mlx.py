"""MLX's affine quantization: ``weight`` uint32 ``[N, K * bits / 32]``, a stream of bits along the inputs with the
lowest first, and ``scales`` and ``biases [N, K / G]``: ``w[n, k] = q * s + b`` with unsigned q.
"""

import jax
import jax.numpy as jnp

from jax_wonly._format import check_size
from jax_wonly._tensor import QuantizedTensor
from jax_wonly._validate import FLOATS, check_array
from jax_wonly.compat._codes import (
    as_words,
    check_bits_in,
    check_shape,
    pack_bits,
    quantized,
    unpack,
    unpack_bits,
    words_for,
)

BITS = (2, 3, 4, 5, 6, 8)


def decode(weight, scales, biases, *, group_size: int = 64, bits: int = 4) -> QuantizedTensor:
    """The weight of what ``mlx.core.quantize`` returns (``mode="affine"``).

    Args:
      weight: uint32 ``[..., N, K * bits / 32]``.
      scales, biases: float16, bfloat16 or float32 ``[..., N, K / group_size]``.
      group_size: how many inputs share a scale.
      bits: 2, 3, 4, 5, 6 or 8.

    Returns:
      A :class:`~jax_wonly.QuantizedTensor` ``[..., K, N]`` with offsets: int4 for up to 4 bits, else int8.

    Raises:
      TypeError, ValueError: types or shapes do not fit, or the group size cannot be held.

    Example:
      >>> from jax_wonly.compat import mlx
      >>> weight, scales = jnp.zeros((64, 128 // 8), jnp.uint32), jnp.ones((64, 2))
      >>> mlx.decode(weight, scales, scales, group_size=64, bits=4)
      QuantizedTensor(int4[128, 64], group_size=64, offsets float32, scales float32, 5.0 KiB)
    """
    bits = check_bits_in(bits, BITS)
    check_size("group_size", group_size)
    weight = as_words("weight", weight)
    for name, value in (("scales", scales), ("biases", biases)):
        check_array(name, value, FLOATS)
        check_shape(name, value, (None, None))
    n, groups = scales.shape[-2:]
    k = groups * group_size
    check_shape("weight", weight, (n, words_for(k, bits)), f"{bits} bits, {groups} groups of {group_size}")
    check_shape("biases", biases, (n, groups))
    codes = jnp.swapaxes(unpack_bits(weight, bits, k), -1, -2)
    scales, biases = (jnp.swapaxes(jnp.asarray(a), -1, -2) for a in (scales, biases))
    return quantized(codes, scales, offsets=biases, bits=bits, group_size=group_size)


def encode(qt: QuantizedTensor) -> dict[str, jax.Array]:
    """The inverse of :func:`decode`: ``{"weight": ..., "scales": ..., "biases": ...}``.

    Args:
      qt: a weight ``[..., K, N]`` with offsets.

    Raises:
      ValueError: the weight has no offsets, its groups are not 32, 64 or 128 inputs, or K does not fill whole words.

    Example:
      >>> from jax_wonly.compat import mlx
      >>> qt = jw.quantize(jnp.ones((128, 64)), group_size=64, mode="offsets")
      >>> {name: array.shape for name, array in mlx.encode(qt).items()}
      {'weight': (64, 16), 'scales': (64, 2), 'biases': (64, 2)}
    """
    if not isinstance(qt, QuantizedTensor):
        raise TypeError(f"jax_wonly: qt is a {type(qt).__name__}; accepted: a QuantizedTensor.")
    if qt.offsets is None:
        raise ValueError("jax_wonly: the weight has no offsets; accepted for MLX: those of mode='offsets'.")
    if qt.group_size not in (32, 64, 128) or qt.k * qt.bits % 32:
        raise ValueError(
            f"jax_wonly: the weight has K={qt.k} in groups of {qt.group_size}; accepted for MLX: groups of 32, 64, 128."
        )
    codes = jnp.swapaxes(unpack(qt.qvalue, qt.bits, qt.k, qt.n), -1, -2)
    scales, biases = (jnp.swapaxes(a, -1, -2) for a in (qt.scales, qt.offsets))
    return {"weight": pack_bits(codes, qt.bits), "scales": scales, "biases": biases}
