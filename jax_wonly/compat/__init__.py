"""Weights of other systems, as arrays: one module for each, with ``decode`` (their arrays to ours) and, where our
format can hold what it writes, ``encode``. All of it is ``jax.numpy`` that runs on the device and under ``jax.jit``.

``jax_wonly.checkpoint`` reads and writes the files of these systems.
"""

from jax_wonly._permuted import PermutedTensor
from jax_wonly.compat import (
    awq,
    bitsandbytes,
    compressed_tensors,
    faster_transformer,
    gptq,
    hqq,
    llama_cpp,
    mlx,
    paddle,
    qwix,
    torchao,
)

__all__ = [
    "PermutedTensor",
    "awq",
    "bitsandbytes",
    "compressed_tensors",
    "faster_transformer",
    "gptq",
    "hqq",
    "llama_cpp",
    "mlx",
    "paddle",
    "qwix",
    "torchao",
]
