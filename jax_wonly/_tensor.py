"""The quantized weight as one value."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jax_wonly._format import FORMAT_VERSION, check_array
from jax_wonly._table import check_table, name_of
from jax_wonly._validate import check_weights

_FORMAT_NAME = "jax_wonly"
_TABLE_VERSION = 2  # of the arrays and metadata of a tensor with a table: readers of version 1 would not see it


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("qvalue", "scales", "zeros", "offsets"),
    meta_fields=("bits", "k", "n", "table"),
)
@dataclass(frozen=True, repr=False, eq=False)
class QuantizedTensor:
    """A weight ``[..., K, N]`` of int4 or int8 codes with scales: a pytree that goes wherever an array goes in JAX.

    Attributes:
      qvalue: packed codes, uint32 ``[..., ceil(N / 64), ceil(K / tile_k), 512]``.
      scales: ``[..., K / group_size, N]``.
      zeros: ``[..., K / group_size, N]`` or None: ``w = (q - zeros) * scales``; None without offsets means ``2**(bits
        - 1)``.
      offsets: ``[..., K / group_size, N]`` or None: ``w = q * scales + offsets``.
      bits: 4 or 8.
      k, n: inputs and outputs. Leading axes (layers, experts) are those of the arrays, so that ``vmap`` and ``scan``
        see them.
      table: 16 numbers that four-bit codes stand for, ``w = table[q] * scales`` without zeros or offsets (NF4, FP4);
        None: codes are integers.

    Example:
      >>> qt = jw.quantize(jax.random.normal(jax.random.key(0), (3, 128, 64)))
      >>> qt
      QuantizedTensor(int4[3, 128, 64], group_size=128, symmetric, scales float32, 12.8 KiB)
      >>> qt.shape, qt.qvalue.shape, qt.scales.shape
      ((3, 128, 64), (3, 1, 2, 512), (3, 1, 64))
      >>> (jnp.ones((4, 128)) @ qt[0]).shape
      (4, 64)
    """

    qvalue: Any
    scales: Any
    zeros: Any = None
    offsets: Any = None
    bits: int = field(kw_only=True)
    k: int = field(kw_only=True)
    n: int = field(kw_only=True)
    table: tuple[float, ...] | None = field(kw_only=True, default=None)

    format_version: ClassVar[int] = FORMAT_VERSION
    # NumPy must leave `array @ tensor` to __rmatmul__.
    __array_ufunc__: ClassVar[None] = None

    @property
    def shape(self) -> tuple[int, ...]:
        """``(..., K, N)``."""
        return (*self.qvalue.shape[:-3], self.k, self.n)

    @property
    def ndim(self) -> int:
        """The number of axes of :attr:`shape`, 2 or more."""
        return len(self.shape)

    @property
    def dtype(self):
        """The type that :meth:`dequantize` gives by default, that of the scales."""
        return self.scales.dtype

    @property
    def group_size(self) -> int:
        """Inputs that share a scale; K for per-channel scales."""
        return self.k // self.scales.shape[-2]

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take, padding of the packed format included."""
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(self))

    @property
    def nbytes_dense(self) -> int:
        """Bytes of the dense weight in :attr:`dtype`."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __iter__(self) -> Iterator[Any]:
        """``(qvalue, scales)``, then the zeros or the offsets if there are any.

        Raises:
          TypeError: the weight has a table, without which its arrays mean something else.
        """
        if self.table is not None:
            raise TypeError("jax_wonly: a QuantizedTensor with a table cannot be taken apart; pass it as it is.")
        return (a for a in (self.qvalue, self.scales, self.zeros, self.offsets) if a is not None)

    def __repr__(self) -> str:
        try:
            shape = ", ".join(map(str, self.shape))
            kind = "symmetric" if self.table is None else name_of(self.table) or "table"
            if self.zeros is not None:
                kind = f"zeros {self.zeros.dtype}"
            elif self.offsets is not None:
                kind = f"offsets {self.offsets.dtype}"
            return (
                f"QuantizedTensor(int{self.bits}[{shape}], group_size={self.group_size}, {kind}, scales "
                f"{self.scales.dtype}, {_readable(self.nbytes)})"
            )
        except (AttributeError, TypeError, IndexError):  # tree transformations may put anything in the place of arrays
            return (
                f"QuantizedTensor(qvalue={self.qvalue!r}, scales={self.scales!r}, zeros={self.zeros!r}, "
                f"offsets={self.offsets!r}, bits={self.bits}, k={self.k}, n={self.n})"
            )

    def __getitem__(self, index) -> "QuantizedTensor":
        """Indexes the leading axes only: ``stacked[3]`` is the weight of layer 3."""
        parts = index if isinstance(index, tuple) else (index,)
        if parts and parts[-1] is Ellipsis:
            parts = parts[:-1]
        if any(p is Ellipsis for p in parts):
            raise IndexError(f"jax_wonly: index {index!r} is not supported; accepted: indices of the leading axes.")
        used = sum(0 if p is None else p.ndim if getattr(p, "dtype", None) == np.bool_ else 1 for p in parts)
        if used > self.ndim - 2:
            raise IndexError(
                f"jax_wonly: index {index!r} reaches K or N of a QuantizedTensor of shape {self.shape}; accepted: "
                f"indices of its {self.ndim - 2} leading axes (dequantize() it to slice inside)."
            )
        return jax.tree.map(lambda a: a[parts], self)

    def __rmatmul__(self, x) -> jax.Array:
        from jax_wonly._matmul import matmul

        return matmul(x, self)

    def __matmul__(self, other):
        raise TypeError(
            "jax_wonly: a QuantizedTensor stands on the right of a product: x @ qt with x [..., K]. Use "
            "qt.dequantize() @ y otherwise."
        )

    @property
    def T(self):  # noqa: N802
        """Is refused with a TypeError, because packing and scales go along K."""
        raise TypeError(
            "jax_wonly: a QuantizedTensor has no transpose, because its packing and scales go along K. Quantize "
            "w.T, or use qt.dequantize().T."
        )

    def __array__(self, *_, **__):
        raise TypeError("jax_wonly: a QuantizedTensor is not converted to an array implicitly; use qt.dequantize().")

    def dequantize(self, dtype=None, *, implementation: str | None = None) -> jax.Array:
        """The dense weight ``[..., K, N]``; ``dtype`` and ``implementation`` as in :func:`jax_wonly.dequantize`."""
        from jax_wonly._quantize import dequantize

        return dequantize(self, dtype=dtype, implementation=implementation)

    def astype(self, dtype) -> "QuantizedTensor":
        """The same codes with scales, float zeros and offsets of another floating type, ``dtype``."""

        def cast(a):
            return a.astype(dtype) if a is not None and jnp.issubdtype(a.dtype, jnp.floating) else a

        return replace(self, scales=cast(self.scales), zeros=cast(self.zeros), offsets=cast(self.offsets))

    def to_arrays(self, name: str = "") -> tuple[dict[str, jax.Array], dict[str, str]]:
        """Arrays and string metadata, as safetensors stores them; several tensors share a file under different names.

        Args:
          name: what the keys begin with.

        Returns:
          ``(arrays, metadata)`` with keys ``name.qvalue``, ``name.scales``, ... and ``name.bits``,
          ``name.format_version``, ...; plain ones where ``name`` is empty.
        """
        prefix = f"{name}." if name else ""
        arrays = {
            prefix + part: value
            for part in ("qvalue", "scales", "zeros", "offsets")
            if (value := getattr(self, part)) is not None
        }
        metadata = {
            "format": _FORMAT_NAME,
            "format_version": str(FORMAT_VERSION if self.table is None else _TABLE_VERSION),
            "bits": str(self.bits),
            "k": str(self.k),
            "n": str(self.n),
        }
        if self.table is not None:
            metadata["table"] = json.dumps(self.table)
        return arrays, {prefix + key: value for key, value in metadata.items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], metadata: Mapping[str, str], name: str = "") -> "QuantizedTensor":
        """The inverse of :meth:`to_arrays`.

        Args:
          arrays, metadata: what it returned; other entries are ignored.
          name: as there.

        Raises:
          ValueError: an entry is missing, the arrays are not of another format or version, or they do not fit each
            other.
        """
        prefix = f"{name}." if name else ""

        def get(key: str) -> str:
            if prefix + key not in metadata:
                raise ValueError(f"jax_wonly: metadata has no {prefix + key!r}; accepted: what to_arrays() returned.")
            return metadata[prefix + key]

        if (found := get("format")) != _FORMAT_NAME:
            raise ValueError(f"jax_wonly: metadata has {prefix}format={found!r}; accepted: {_FORMAT_NAME!r}.")
        if (found := get("format_version")) not in (str(FORMAT_VERSION), str(_TABLE_VERSION)):
            raise ValueError(
                f"jax_wonly: {prefix}format_version={found!r} of the packed arrays is not supported; accepted: "
                f"'{FORMAT_VERSION}', '{_TABLE_VERSION}'. Quantize the dense weights again, or read them with the "
                "version of jax_wonly that wrote them."
            )
        missing = [prefix + part for part in ("qvalue", "scales") if prefix + part not in arrays]
        if missing:
            raise ValueError(f"jax_wonly: arrays have no {', '.join(map(repr, missing))}.")
        try:
            bits, k, n = (int(get(key)) for key in ("bits", "k", "n"))
        except ValueError as error:
            raise ValueError(
                f"jax_wonly: bits, k and n in the metadata of {name!r} must be integers: {error}"
            ) from error
        table = None
        if found == str(_TABLE_VERSION):
            text = get("table")
            try:
                table = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"jax_wonly: {prefix}table in the metadata is not JSON: {error}") from error
        qvalue, scales = arrays[prefix + "qvalue"], arrays[prefix + "scales"]
        zeros, offsets = arrays.get(prefix + "zeros"), arrays.get(prefix + "offsets")
        check_weights(qvalue, scales, zeros, offsets, bits=bits, k=k)
        try:
            table = check_table(table, bits, zeros, offsets)
        except TypeError as error:
            raise ValueError(str(error)) from error
        if scales.shape[-1] != n:
            raise ValueError(
                f"jax_wonly: {prefix}scales has shape {tuple(scales.shape)}; accepted: [..., groups, {n}]."
            )
        return cls(
            *(None if a is None else jnp.asarray(a) for a in (qvalue, scales, zeros, offsets)),
            bits=bits,
            k=k,
            n=n,
            table=table,
        )


def check_parts(name: str, qt: QuantizedTensor) -> None:
    """Raises a TypeError unless the parts of a weight are arrays of their types; its shape is known then."""
    check_array(f"{name}.qvalue", qt.qvalue, ("uint32",))
    check_array(f"{name}.scales", qt.scales)


def _meta(bits: int, k: int, n: int, table: list[float] | None = None):
    """The metadata of a tensor; programs of older versions have none of the table."""
    return bits, k, n, None if table is None else tuple(table)


# jax.export stores the tree structure of arguments and results, so that it has to know how to write this node.
jax.export.register_pytree_node_serialization(
    QuantizedTensor,
    serialized_name=f"jax_wonly.QuantizedTensor.v{FORMAT_VERSION}",
    serialize_auxdata=lambda meta: json.dumps(meta).encode(),
    deserialize_auxdata=lambda data: _meta(*json.loads(bytes(data))),
    from_children=lambda aux_data, children: QuantizedTensor(
        *children, bits=aux_data[0], k=aux_data[1], n=aux_data[2], table=aux_data[3]
    ),
)


def _readable(size: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024  # type: ignore[assignment]
    return f"{size:.1f} GiB"
