"""Quantized layers for Flax nnx, and one call that quantizes every layer of a model in place::

    report = jax_wonly.nnx.quantize(model, bits=4, group_size=128)
    print(report)

This package and ``jax_wonly.linen`` alone need Flax.
"""

try:
    import flax.nnx  # noqa: F401
except ImportError as error:
    raise ImportError("jax_wonly.nnx needs Flax: pip install 'jax-wonly[flax]'") from error

from jax_wonly._model import LayerReport, Report, SkippedLayer
from jax_wonly.nnx._layers import (
    QuantizedConv,
    QuantizedEinsum,
    QuantizedEmbed,
    QuantizedExperts,
    QuantizedLayer,
    QuantizedLinear,
    QuantizedLinearGeneral,
    QuantizedParam,
)
from jax_wonly.nnx._lora import add_lora, merge_lora
from jax_wonly.nnx._replace import quantize

__all__ = [
    "LayerReport",
    "QuantizedConv",
    "QuantizedEinsum",
    "QuantizedEmbed",
    "QuantizedExperts",
    "QuantizedLayer",
    "QuantizedLinear",
    "QuantizedLinearGeneral",
    "QuantizedParam",
    "Report",
    "SkippedLayer",
    "add_lora",
    "merge_lora",
    "quantize",
]
