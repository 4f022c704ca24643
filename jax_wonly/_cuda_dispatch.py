"""Which of the two ways a product takes on a GPU: the fused kernels, or dequantized weights and XLA's dense product.

A model of both, in microseconds on an H100 (``docs/performance.md``); its ratio, not its scale, decides, and that is
much the same on other GPUs.
"""

_MEMORY = 2.6e6  # bytes per microsecond
_DENSE = 700e6  # dense 16-bit operations per microsecond
_FUSED = 560e6  # operations per microsecond of the fused kernel where it is bound by arithmetic
_FUSED_FLOAT32 = 90e6  # float32 activations: three exact pieces, and the weights read again for every 16 tokens
_DENSE_FLOAT32 = 45e6
_TOKENS = 128  # that share one pass over the weights


def use_kernel(m: int, k: int, n: int, batch: int, bits: int, group_size: int, x_dtype) -> bool:
    """Whether the fused kernel is expected to be at least as fast for ``[batch, m, k] x [batch, k, n]``."""
    del group_size
    wide = x_dtype.itemsize == 4
    weights = batch * n * k * bits / 8
    operations = 2.0 * batch * m * n * k
    dequantize = (weights + batch * n * k * x_dtype.itemsize) / _MEMORY
    dense = dequantize + operations / (_DENSE_FLOAT32 if wide else _DENSE)
    padded = operations / m * (-(-m // _TOKENS) * _TOKENS) if m > _TOKENS and not wide else operations
    fused = max(weights / _MEMORY, padded / (_FUSED_FLOAT32 if wide else _FUSED))
    return m <= 16 or fused <= dense
