"""Quantizers that look at more than the extremes of a group: clip search, HQQ, AWQ and GPTQ.

For one weight ``w [..., K, N]``, with the second moments of its inputs where they are needed::

    moments = jax_wonly.algorithms.second_moments(x)          # of x [..., T, K]
    weight = jax_wonly.algorithms.gptq(w, moments, bits=4, group_size=128)

For a Flax nnx model, in place::

    report = jax_wonly.algorithms.quantize_model(model, batches, method="gptq", progress=True)

Everything is jitted, runs where the weight is, and is deterministic.
"""

from jax_wonly.algorithms._awq import ScaledTensor, awq
from jax_wonly.algorithms._gptq import gptq
from jax_wonly.algorithms._moments import output_error, second_moments
from jax_wonly.algorithms._weights import absmax, hqq, minmax, mse

# These need Flax, which is optional.
_NNX = ("Calibration", "ModelReport", "ScaledLinear", "calibrate", "fold_input_scales", "quantize_model")


def __getattr__(name: str):
    if name in _NNX:
        from jax_wonly.algorithms import nnx

        return getattr(nnx, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# calibrate, fold_input_scales, quantize_model and their types are here too, once asked for.
__all__ = ["ScaledTensor", "absmax", "awq", "gptq", "hqq", "minmax", "mse", "output_error", "second_moments"]
