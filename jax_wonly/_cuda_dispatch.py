"""Which of the two ways a product takes on a GPU: the fused kernels, or dequantized weights and XLA's dense product.

A model of both, in microseconds on an H100 (``docs/performance.md``); its ratio, not its scale, decides, and that is
much the same on other GPUs.
"""

import functools

import jax
import jax.numpy as jnp

from jax_wonly._abi import ShiftMode

_MEMORY = 2.6e6  # bytes per microsecond, of kernels that are bound by memory
_DENSE = 700e6  # dense 16-bit operations per microsecond
_DENSE_FLOAT32 = 45e6
_WARPGROUP = 560e6  # operations per microsecond of the warpgroup kernel where arithmetic binds it
_WARPGROUP_TOKENS = 128  # that share one pass over the weights
_STREAM = 1.4e6  # bytes of weights per microsecond of the streaming kernel, for the tokens of one pass
_STREAM_FLOAT32 = 1.1e6
_STREAM_TOKENS = 16


@functools.cache
def _has_warpgroups() -> bool:
    """Whether the GPU here is of the architecture that the warpgroup kernel needs; without one, it is assumed."""
    try:
        capability = getattr(jax.devices("cuda")[0], "compute_capability", "9.0")
    except RuntimeError:
        return True
    return str(capability) == "9.0"


def _warpgroup_kernel(k: int, n: int, x_dtype, scale_dtype, shift_mode: ShiftMode, shift_dtype) -> bool:
    """As ``warpgroup::supports`` in ``ffi/cuda/matmul_warpgroup.cu``, which has the last word."""
    exact = shift_mode == ShiftMode.NONE or (shift_mode == ShiftMode.ZEROS and shift_dtype == jnp.uint8)
    aligned = k % 8 == 0 and n * jnp.dtype(scale_dtype).itemsize % 16 == 0
    return _has_warpgroups() and exact and aligned and jnp.dtype(x_dtype).itemsize == 2


def use_kernel(
    m: int, k: int, n: int, batch: int, bits: int, x_dtype, scale_dtype, shift_mode: ShiftMode, shift_dtype=None
) -> bool:
    """Whether the fused kernels are expected to be at least as fast for ``[batch, m, k] x [batch, k, n]``."""
    if m <= _STREAM_TOKENS:
        return True
    wide = jnp.dtype(x_dtype).itemsize == 4
    weights = batch * n * k * bits / 8
    operations = 2.0 * batch * n * k  # of one token
    dense_bytes = weights + batch * n * k * jnp.dtype(x_dtype).itemsize
    dense = dense_bytes / _MEMORY + m * operations / (_DENSE_FLOAT32 if wide else _DENSE)
    if _warpgroup_kernel(k, n, x_dtype, scale_dtype, shift_mode, shift_dtype):
        tokens = m if m <= _WARPGROUP_TOKENS else -(-m // _WARPGROUP_TOKENS) * _WARPGROUP_TOKENS
        fused = max(weights / _MEMORY, tokens * operations / _WARPGROUP)
    else:
        fused = -(-m // _STREAM_TOKENS) * weights / (_STREAM_FLOAT32 if wide else _STREAM)
    return fused <= dense
