"""Activations quantized while a program runs."""

import json
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import jax
import jax.export
import jax.numpy as jnp

from jax_wonly import _ffi
from jax_wonly._validate import check_array, check_choice, check_float_dtype, check_group_size
from jax_wonly.primitives import activations
from jax_wonly.primitives.activations import DTYPES, Activations, Scheme


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("qvalue", "scales", "sums", "offsets"),
    meta_fields=("k", "dtype"),
)
@dataclass(frozen=True, repr=False, eq=False)
class QuantizedActivation:
    """Activations ``[..., K]`` of int8 or float8 codes with scales: a pytree that :func:`matmul` takes as its x.

    Attributes:
      qvalue: codes, int8 or float8_e4m3fn ``[..., ceil16(K)]``, in the order in which kernels read them, with zeros
        after the last; :attr:`codes` has them in the order of the inputs.
      scales: float32 ``[..., K / group_size]``: ``x = q * scales``, plus the offsets.
      sums: of the codes that share a scale, int32 or float32 ``[..., K / group_size]``.
      offsets: float32 ``[..., K / group_size]`` or None.
      k: inputs.
      dtype: of the activations that were quantized, and of products with them.

    Example:
      >>> xq = jw.quantize_activation(jax.random.normal(jax.random.key(0), (4, 256)), group_size=128)
      >>> xq
      QuantizedActivation(int8[4, 256], group_size=128, symmetric, of float32)
      >>> xq.codes.shape, xq.scales.shape
      ((4, 256), (4, 2))
    """

    qvalue: Any
    scales: Any
    sums: Any
    offsets: Any = None
    k: int = field(kw_only=True)
    dtype: Any = field(kw_only=True)

    # NumPy must leave `array @ tensor` alone.
    __array_ufunc__: ClassVar[None] = None

    @property
    def shape(self) -> tuple[int, ...]:
        """``(..., K)``."""
        return (*self.qvalue.shape[:-1], self.k)

    @property
    def ndim(self) -> int:
        """The number of axes of :attr:`shape`."""
        return len(self.shape)

    @property
    def group_size(self) -> int:
        """Inputs that share a scale; K where a row has one."""
        return self.k // self.scales.shape[-1]

    @property
    def codes(self) -> jax.Array:
        """The codes ``[..., K]`` in the order of the inputs."""
        return activations.to_natural_order(self.qvalue, self.k)

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take."""
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(self))

    def dequantize(self, dtype=None) -> jax.Array:
        """What the codes stand for, ``[..., K]``, in ``dtype`` (default: :attr:`dtype`)."""
        dtype = self.dtype if dtype is None else check_float_dtype("dtype", dtype)
        return _dequantize(self.arrays, k=self.k, dtype=jnp.dtype(dtype))

    @property
    def arrays(self) -> Activations:
        """What the kernels take."""
        return Activations(self.qvalue, self.scales, self.sums, self.offsets)

    @property
    def scheme(self) -> Scheme:
        """How the activations were quantized."""
        groups = self.scales.shape[-1]
        return Scheme(str(self.qvalue.dtype), None if groups == 1 else self.k // groups, self.offsets is None)

    def __matmul__(self, qt) -> jax.Array:
        from jax_wonly._matmul import matmul

        return matmul(self, qt)

    def __repr__(self) -> str:
        try:
            shape = ", ".join(map(str, self.shape))
            kind = "symmetric" if self.offsets is None else "offsets"
            codes = f"{self.qvalue.dtype}[{shape}]"
            return f"QuantizedActivation({codes}, group_size={self.group_size}, {kind}, of {self.dtype})"
        except (AttributeError, TypeError, IndexError):  # tree transformations may put anything in the place of arrays
            return (
                f"QuantizedActivation(qvalue={self.qvalue!r}, scales={self.scales!r}, sums={self.sums!r}, k={self.k})"
            )


jax.export.register_pytree_node_serialization(
    QuantizedActivation,
    serialized_name="jax_wonly.QuantizedActivation.v1",
    serialize_auxdata=lambda meta: json.dumps([meta[0], str(meta[1])]).encode(),
    deserialize_auxdata=lambda data: (lambda k, dtype: (k, jnp.dtype(dtype)))(*json.loads(bytes(data))),
    from_children=lambda aux_data, children: QuantizedActivation(*children, k=aux_data[0], dtype=aux_data[1]),
)


@partial(jax.jit, static_argnames=("k", "dtype"), inline=True)
def _dequantize(arrays: Activations, *, k: int, dtype):
    return activations.dequantize(arrays, k, dtype)


@partial(jax.jit, static_argnames=("scheme", "implementation"), inline=True)
def _quantize(x, *, scheme: Scheme, implementation):
    return activations.quantize(x, scheme, implementation)


def check_scheme(dtype: str, group_size: int | None, symmetric: bool, k: int) -> Scheme:
    """The scheme of these options for ``k`` inputs."""
    check_choice("dtype", dtype, DTYPES)
    if not isinstance(symmetric, bool):
        raise TypeError(f"jax_wonly: symmetric={symmetric!r}; accepted: True, False.")
    if not symmetric and dtype != "int8":
        raise ValueError(f"jax_wonly: symmetric=False with dtype={dtype!r}; accepted: dtype='int8'.")
    size = check_group_size(group_size, k)
    return Scheme(dtype, None if size == k else size, symmetric)


def quantize_activation(
    x,
    *,
    group_size: int | None = None,
    symmetric: bool = True,
    dtype: str = "int8",
    implementation: str | None = None,
) -> QuantizedActivation:
    """Quantizes activations, each row or block of inputs with its own scale, in one pass.

    Args:
      x: float16, bfloat16 or float32 ``[..., K]``.
      group_size: how many successive inputs share a scale: None or -1: the whole row; else 32, 64, 128 or 256, and it
        must divide K.
      symmetric: True: the scale comes from the largest magnitude. False (int8 alone): scale and offset from the
        extremes.
      dtype: of the codes, ``"int8"`` or ``"float8_e4m3fn"``.
      implementation: None (the kernel of the platform, where it has one), ``"cuda"`` or ``"xla"``.

    Returns:
      A :class:`QuantizedActivation`. Codes do not depend on the implementation. What holds an infinity or NaN
      stands for no finite values.

    Raises:
      TypeError: an argument has a wrong type or dtype.
      ValueError: an argument is outside of what is accepted.

    Example:
      >>> x = jax.random.normal(jax.random.key(0), (4, 256), jnp.bfloat16)
      >>> xq = jw.quantize_activation(x)
      >>> jw.matmul(xq, jw.quantize(jnp.ones((256, 64)), bits=8, group_size=None)).shape
      (4, 64)
      >>> bool(jnp.allclose(xq.dequantize(), x, atol=0.03))
      True
    """
    check_array("x", x)
    if len(x.shape) == 0 or x.shape[-1] == 0:
        raise ValueError(f"jax_wonly: x has shape {tuple(x.shape)}; accepted: [..., K] with K >= 1.")
    k = x.shape[-1]
    scheme = check_scheme(dtype, group_size, symmetric, k)
    x = jnp.asarray(x)
    arrays = _quantize(x, scheme=scheme, implementation=_ffi.resolve_implementation(implementation))
    return QuantizedActivation(*arrays, k=k, dtype=x.dtype)


@dataclass(frozen=True)
class ActivationQuantization:
    """How :func:`matmul` quantizes x, where a name does not say enough.

    Attributes:
      dtype: ``"int8"`` or ``"float8_e4m3fn"``.
      group_size: inputs that share a scale; None: a row has one; ``"weights"``: as many as of the weights.
      symmetric: False gives int8 codes an offset.

    Example:
      >>> rows = jw.ActivationQuantization("int8", group_size=None, symmetric=False)
      >>> x, qt = jnp.ones((4, 256)), jw.quantize(jnp.ones((256, 64)))
      >>> jw.matmul(x, qt, activation_quantization=rows).shape
      (4, 64)
    """

    dtype: str = "int8"
    group_size: int | str | None = "weights"
    symmetric: bool = True


def resolve_scheme(activation_quantization, bits: int, table, k: int, groups: int) -> Scheme | None:
    """The scheme that ``matmul`` was asked for, for weights of ``groups`` groups of their ``k`` inputs."""
    how = activation_quantization
    if how is None:
        return None
    if isinstance(how, str):
        check_choice("activation_quantization", how, (None, *DTYPES))
        how = ActivationQuantization(how)
    if not isinstance(how, ActivationQuantization):
        raise TypeError(
            f"jax_wonly: activation_quantization is a {type(how).__name__}; accepted: None, "
            f"{', '.join(map(repr, DTYPES))}, or a jax_wonly.ActivationQuantization."
        )
    if isinstance(how.group_size, str):
        check_choice("group_size", how.group_size, ("weights",))
        size = k // groups
    else:
        size = how.group_size
    scheme = check_scheme(how.dtype, size, how.symmetric, k)
    check_weights_of(scheme, bits, table)
    return scheme


def check_weights_of(scheme: Scheme, bits: int, table) -> None:
    """Raises unless weights of these codes meet activations of that scheme."""
    if table is not None:
        raise ValueError("jax_wonly: the weights have a table; accepted with quantized activations: integer codes.")
    if scheme.dtype != "int8" and bits != 4:
        raise ValueError(f"jax_wonly: weights of {bits} bits with {scheme.dtype} activations; accepted: 4 bits.")
