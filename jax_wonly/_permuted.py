"""A quantized weight whose inputs are stored in another order (GPTQ's act-order)."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.export
import jax.numpy as jnp


@partial(jax.tree_util.register_dataclass, data_fields=("weight", "permutation"), meta_fields=())
@dataclass(frozen=True, repr=False, eq=False)
class PermutedTensor:
    """A weight ``[..., K, N]`` kept as a quantized one whose row ``i`` is row ``permutation[i]`` of the whole.

    GPTQ with act-order quantizes the inputs in the order of their importance, so that the members of a group are not
    neighbours. Kept in that order the groups are contiguous, as the kernels want them, and x is gathered instead:
    ``x @ w == x[..., permutation] @ weight``.

    Attributes:
      weight: the :class:`~jax_wonly.QuantizedTensor` ``[..., K, N]`` with permuted rows.
      permutation: int32 ``[K]``.
    """

    weight: Any
    permutation: Any

    __array_ufunc__: ClassVar[None] = None

    @property
    def shape(self) -> tuple[int, ...]:
        """``(..., K, N)``."""
        return self.weight.shape

    @property
    def ndim(self) -> int:
        return self.weight.ndim

    @property
    def dtype(self):
        """The type that :meth:`dequantize` gives by default."""
        return self.weight.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take."""
        return self.weight.nbytes + self.permutation.size * self.permutation.dtype.itemsize

    def __repr__(self) -> str:
        return f"PermutedTensor({self.weight!r})"

    def __rmatmul__(self, x) -> jax.Array:
        from jax_wonly._matmul import matmul

        return matmul(x, self)

    def dequantize(self, dtype=None, *, implementation: str | None = None) -> jax.Array:
        """The dense weight ``[..., K, N]``, inputs in their own order."""
        dense = self.weight.dequantize(dtype, implementation=implementation)
        return jnp.take(dense, jnp.argsort(self.permutation), axis=-2)


jax.export.register_pytree_node_serialization(
    PermutedTensor,
    serialized_name="jax_wonly.PermutedTensor",
    serialize_auxdata=lambda meta: b"",
    deserialize_auxdata=lambda data: (),
    from_children=lambda aux_data, children: PermutedTensor(*children),
)
