"""A quantized weight whose inputs are stored in another order (GPTQ's act-order)."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_wonly._wrapped import WrappedTensor, register_for_export


@partial(jax.tree_util.register_dataclass, data_fields=("weight", "permutation"), meta_fields=())
@dataclass(frozen=True, repr=False, eq=False)
class PermutedTensor(WrappedTensor):
    """A weight ``[..., K, N]`` kept as a quantized one whose row ``i`` is row ``permutation[i]`` of the whole.

    GPTQ with act-order quantizes the inputs in the order of their importance, so that the members of a group are not
    neighbours. Kept in that order the groups are contiguous, as the kernels want them, and x is gathered instead:
    ``x @ w == x[..., permutation] @ weight``.

    Attributes:
      weight: the :class:`~jax_wonly.QuantizedTensor` ``[..., K, N]`` with permuted rows.
      permutation: int32 ``[K]``.

    Example:
      >>> weight = jw.quantize(jax.random.normal(jax.random.key(0), (128, 64)))
      >>> w = jw.PermutedTensor(weight, jnp.arange(128, dtype=jnp.int32)[::-1])
      >>> x = jnp.arange(128.0)
      >>> bool(jnp.allclose(x @ w, x[::-1] @ weight))
      True
    """

    permutation: Any

    def __rmatmul__(self, x) -> jax.Array:
        from jax_wonly._matmul import matmul

        return matmul(x, self)

    def dequantize(self, dtype=None, *, implementation: str | None = None) -> jax.Array:
        """The dense weight ``[..., K, N]``, inputs in their own order; arguments as :func:`jax_wonly.dequantize`.

        Args:
          dtype: float16, bfloat16 or float32; default: the type of the scales.
          implementation: None, ``"cpu"``, ``"cuda"`` or ``"xla"``.
        """
        dense = self.weight.dequantize(dtype, implementation=implementation)
        return jnp.take(dense, jnp.argsort(self.permutation), axis=-2)


register_for_export(PermutedTensor)
