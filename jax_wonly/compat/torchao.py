"""torchao's plain ``Int4Tensor``: ``qdata`` int8 ``[N, K / 2]``, two's complement nibbles with the even input low, and
``scale`` and ``zero_point [K / G, N]`` in weight units: ``w = q * s + z`` with q in -8..7.
"""

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_wonly._tensor import QuantizedTensor
from jax_wonly._validate import FLOATS, check_array
from jax_wonly.compat._codes import check_shape, nibbles, quantized


def decode(qdata, scale, zero_point) -> QuantizedTensor:
    """The weight of an ``Int4Tensor``'s arrays.

    Args:
      qdata: int8 or uint8 ``[..., N, K / 2]``.
      scale, zero_point: float16, bfloat16 or float32 ``[..., K / group_size, N]``.

    Returns:
      An int4 :class:`~jax_wonly.QuantizedTensor` ``[..., K, N]``. Where all of ``zero_point`` is known to be 0 it is
      symmetric, else it has float32 scales and offsets, because ``z - 8 s`` needs more bits than z and s.

    Raises:
      TypeError, ValueError: types or shapes do not fit, or the group size cannot be held.

    Example:
      >>> from jax_wonly.compat import torchao
      >>> qdata, scale = jnp.zeros((64, 128 // 2), jnp.int8), jnp.ones((2, 64), jnp.bfloat16)
      >>> torchao.decode(qdata, scale, jnp.zeros((2, 64), jnp.bfloat16))
      QuantizedTensor(int4[128, 64], group_size=64, symmetric, scales bfloat16, 4.2 KiB)
    """
    check_array("qdata", qdata, ("int8", "uint8"))
    for name, value in (("scale", scale), ("zero_point", zero_point)):
        check_array(name, value, FLOATS)
        check_shape(name, value, (None, None))
    groups, n = scale.shape[-2:]
    check_shape("qdata", qdata, (n, None), "scale has N outputs")
    check_shape("zero_point", zero_point, (groups, n))
    k = 2 * qdata.shape[-1]
    if not groups or k % groups:
        raise ValueError(f"jax_wonly: scale has shape {tuple(scale.shape)}; accepted: groups that divide K={k}.")
    low, high = nibbles(jnp.asarray(qdata).view(np.uint8))
    codes = jnp.stack([low, high], -1).reshape(*qdata.shape[:-1], k) ^ np.uint8(8)
    codes = jnp.swapaxes(codes, -1, -2)
    if not isinstance(zero_point, Tracer) and not np.asarray(zero_point).any():
        return quantized(codes, scale, bits=4, group_size=k // groups)
    scale, zero_point = (jnp.asarray(a).astype(jnp.float32) for a in (scale, zero_point))
    return quantized(codes, scale, offsets=zero_point - 8 * scale, bits=4, group_size=k // groups)
