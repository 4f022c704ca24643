"""What the weights have in common that are a quantized one and something that is done to x first."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import jax.export


@dataclass(frozen=True, repr=False, eq=False)
class WrappedTensor:
    """A quantized weight ``[..., K, N]`` and arrays beside it; subclasses say what these mean."""

    weight: Any

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
        """The type that ``dequantize`` gives by default."""
        return self.weight.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take."""
        beside = (getattr(self, field.name) for field in fields(self) if field.name != "weight")
        return self.weight.nbytes + sum(array.size * array.dtype.itemsize for array in beside)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.weight!r})"


def register_for_export(cls: type[WrappedTensor]) -> None:
    """Lets exported programs take and return ``cls``, a pytree without metadata."""
    jax.export.register_pytree_node_serialization(
        cls,
        serialized_name=f"jax_wonly.{cls.__name__}",
        serialize_auxdata=lambda meta: b"",
        deserialize_auxdata=lambda data: (),
        from_children=lambda aux_data, children: cls(*children),
    )
