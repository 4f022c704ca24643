"""What the convolutional layers of Flax nnx and Linen compute, with a quantized kernel."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_wonly._conv import conv_general_dilated
from jax_wonly._tensor import QuantizedTensor

_MODES = {"CIRCULAR": "wrap", "REFLECT": "reflect"}  # of jnp.pad


def as_tuple(value: int | Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Strides or dilations as Flax's layers take them: one for all axes, one for each, or None for 1."""
    return (1 if value is None else value,) * count if isinstance(value, int | None) else tuple(value)


def convolve(
    inputs: jax.Array,
    weight: QuantizedTensor,
    bias: jax.Array | None,
    layer: Any,
    **options: Any,
) -> jax.Array:
    """The output of a layer.

    Args:
      inputs: ``[*batch, *spatial, features]`` with any number of batch axes.
      weight: ``[*window, K, N]``.
      bias: ``[N]``, or None.
      layer: has the attributes of Flax's layers: ``strides``, ``padding``, ``input_dilation``, ``kernel_dilation`` and
        ``feature_group_count``.
      **options: of ``jax_wonly.conv_general_dilated``.
    """
    window = weight.shape[:-2]
    spatial = len(window)
    batch = inputs.shape[: inputs.ndim - spatial - 1]
    inputs = inputs.reshape(-1, *inputs.shape[len(batch) :])
    dilation = as_tuple(layer.kernel_dilation, spatial)
    dilated = [(size - 1) * d + 1 for size, d in zip(window, dilation, strict=True)]
    padding: Any = layer.padding
    if isinstance(padding, int):
        padding = [(padding, padding)] * spatial
    elif not isinstance(padding, str):
        padding = [(entry, entry) if isinstance(entry, int) else tuple(entry) for entry in padding]
    elif padding in _MODES:
        around = [(0, 0), *(((size - 1) // 2, size // 2) for size in dilated), (0, 0)]
        inputs, padding = jnp.pad(inputs, around, mode=_MODES[padding]), "VALID"
    elif padding == "CAUSAL":
        if spatial != 1:
            raise ValueError(f"jax_wonly: padding='CAUSAL' with {spatial} spatial axes; accepted: with one.")
        inputs, padding = jnp.pad(inputs, [(0, 0), (dilated[0] - 1, 0), (0, 0)]), "VALID"
    outputs = conv_general_dilated(
        inputs,
        weight,
        as_tuple(layer.strides, spatial),
        padding,
        as_tuple(layer.input_dilation, spatial),
        dilation,
        feature_group_count=layer.feature_group_count,
        bias=bias,
        **options,
    )
    return outputs.reshape(*batch, *outputs.shape[1:])
