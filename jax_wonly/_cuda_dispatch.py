"""Which of the two ways a product takes on a GPU: the fused kernel, or dequantized weights and XLA's dense product."""

_FUSED_MAX_M = 256


def use_kernel(m: int, k: int, n: int, batch: int, bits: int, group_size: int, x_dtype) -> bool:
    """Whether the fused kernel is expected to be at least as fast for ``[batch, m, k] x [batch, k, n]``."""
    return m <= _FUSED_MAX_M
