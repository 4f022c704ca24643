"""Fast int4 and int8 weight-only quantized matrix products for JAX.

>>> import jax.numpy as jnp
>>> import jax_wonly as jw
>>> w, x = jnp.ones((256, 64)), jnp.ones((4, 256))
>>> qt = jw.quantize(w, bits=4, group_size=128)
>>> jw.matmul(x, qt).shape
(4, 64)
"""

import importlib

import jax

if jax.__version_info__ < (0, 9, 1):
    raise ImportError(f"jax_wonly needs jax 0.9.1 or newer, and this is jax {jax.__version__}: pip install -U jax.")

from jax_wonly._activation import ActivationQuantization, QuantizedActivation, quantize_activation
from jax_wonly._conv import conv_general_dilated
from jax_wonly._einsum import dot_general, einsum
from jax_wonly._experts import gather_matmul, ragged_dot
from jax_wonly._explain import Explanation, explain
from jax_wonly._ffi import Status, ensure_registered, export_disabled_checks, status
from jax_wonly._format import FORMAT_VERSION, pack, unpack
from jax_wonly._matmul import matmul
from jax_wonly._permuted import PermutedTensor
from jax_wonly._quantize import dequantize, quantize
from jax_wonly._sharding import device_put, local_shard, partition_specs, shardings
from jax_wonly._tensor import QuantizedTensor
from jax_wonly._version import __version__
from jax_wonly.primitives.matmul import checkpoint_policy

# At import, so that a deserialised program finds its handlers without having traced anything.
ensure_registered()


# Imported once they are asked for: linen and nnx need Flax, which is optional, and nobody should wait for the others.
_MODULES = ("algorithms", "checkpoint", "compat", "linen", "nnx", "static")


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f"jax_wonly.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "FORMAT_VERSION",
    "ActivationQuantization",
    "Explanation",
    "PermutedTensor",
    "QuantizedActivation",
    "QuantizedTensor",
    "Status",
    "__version__",
    "checkpoint_policy",
    "conv_general_dilated",
    "dequantize",
    "device_put",
    "dot_general",
    "einsum",
    "explain",
    "export_disabled_checks",
    "gather_matmul",
    "local_shard",
    "matmul",
    "pack",
    "partition_specs",
    "quantize",
    "quantize_activation",
    "ragged_dot",
    "shardings",
    "status",
    "unpack",
]
