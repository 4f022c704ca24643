"""Quantized layers of Flax nnx."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as default_promote_dtype
from flax.nnx.nn.linear import default_bias_init, default_embed_init, default_kernel_init

from jax_wonly._contraction import Einsum, Kernel, as_tuple, contract, dense_general
from jax_wonly._conv_layer import convolve
from jax_wonly._experts import gather_matmul, ragged_dot
from jax_wonly._ffi import resolve_implementation
from jax_wonly._matmul import matmul, resolve_activation
from jax_wonly._model import check_options, options_of
from jax_wonly._quantize import dequantize
from jax_wonly._quantize import quantize as quantize_array
from jax_wonly._take import take_outputs
from jax_wonly._tensor import QuantizedTensor


class QuantizedParam(nnx.Variable):
    """An array of a quantized weight: packed codes, scales, zeros or offsets.

    It is not an ``nnx.Param``, so an optimizer or ``nnx.grad`` over ``nnx.Param`` leaves it alone.

    Example:
      >>> layer = jw.nnx.QuantizedLinear(128, 64, rngs=nnx.Rngs(0))
      >>> sorted(nnx.state(layer, jw.nnx.QuantizedParam)), sorted(nnx.state(layer, nnx.Param))
      (['qvalue', 'scales'], ['bias'])
    """


@dataclasses.dataclass(frozen=True)
class _Given:
    """In the place of an initializer: the parameters of a layer that exists."""

    kernel: jax.Array
    bias: nnx.Variable | None = None


class QuantizedLayer(nnx.Module):
    """A layer with one quantized weight. Subclasses say which dense layer they replace and how its kernel is arranged.

    Attributes:
      kernel: the weight, a :class:`jax_wonly.QuantizedTensor`. Its arrays are the ``QuantizedParam`` variables
        ``qvalue``, ``scales``, ``zeros`` and ``offsets``.

    Example:
      >>> layer = jw.nnx.QuantizedLinear(128, 64, rngs=nnx.Rngs(0))
      >>> isinstance(layer, jw.nnx.QuantizedLayer), layer.kernel.shape
      (True, (128, 64))
    """

    dense_type: ClassVar[type[nnx.Module]]
    parameter: ClassVar[str] = "kernel"  # of the dense layer: what is quantized

    @classmethod
    def from_dense(
        cls,
        dense: Any,
        *,
        bits: int = 4,
        group_size: int | None = 128,
        implementation: str | None = None,
        **options: Any,
    ) -> Self:
        """Returns the quantized layer of a dense one, which is left as it was.

        The kernel may have leading axes, as ``nnx.vmap`` over a constructor makes them. The bias variable is shared.

        Args:
          dense: a layer of the type that this one replaces.
          bits: 4 or 8.
          group_size: how many inputs share a scale, as in ``jax_wonly.quantize``. Inputs of several axes are counted
            along all of them, the last one fastest.
          implementation: as in ``jax_wonly.matmul``.
          **options: further arguments of ``jax_wonly.quantize``.

        Raises:
          TypeError: ``dense`` is of another type.
          ValueError: the layer computes something else than the quantized one would, or its kernel cannot be quantized
            so.

        Example:
          >>> dense = nnx.Linear(128, 64, rngs=nnx.Rngs(0))
          >>> jw.nnx.QuantizedLinear.from_dense(dense, bits=8).kernel
          QuantizedTensor(int8[128, 64], group_size=128, symmetric, scales float32, 8.2 KiB)
        """
        if isinstance(dense, QuantizedLayer):
            raise TypeError(f"jax_wonly: dense is a {type(dense).__name__}, which is quantized already.")
        if not isinstance(dense, cls.dense_type):
            raise TypeError(f"jax_wonly: dense is a {type(dense).__name__}; accepted: nnx.{cls.dense_type.__name__}.")
        if refusal := cls.refuses(dense):
            raise ValueError(f"jax_wonly: the layer cannot be replaced by a {cls.__name__}: {refusal}.")
        return cls._of(dense, bits=bits, group_size=group_size, implementation=implementation, quantize_options=options)

    @classmethod
    def _of(cls, dense: Any, **options: Any) -> Self:
        raise NotImplementedError

    @classmethod
    def refuses(cls, dense: Any) -> str | None:
        """Why a dense layer cannot be replaced by this one; None if it can."""
        name, base = type(dense).__name__, cls.dense_type
        for method in ("__call__", "attend"):
            if getattr(type(dense), method, None) is not getattr(base, method, None):
                return f"{name} overrides the {method} of nnx.{base.__name__}"
        return None

    @classmethod
    def arrange(cls, dense: Any, kernel: jax.Array) -> jax.Array:
        """The kernel of a dense layer as ``[..., K, N]``."""
        return kernel

    def _store(
        self, given: _Given, bits: int, group_size: int | None, quantize_options: Mapping[str, Any] | None
    ) -> None:
        """Keeps the parameters."""
        self._quantize(given.kernel, bits, group_size, quantize_options)
        self.bias = nnx.data(given.bias)

    def _compute_in(
        self, dtype, param_dtype, precision, promote_dtype, preferred_element_type, implementation: str | None
    ) -> None:
        """Keeps how the layer computes."""
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type
        resolve_implementation(implementation)
        self.implementation = implementation

    @classmethod
    def _stored(cls, dense: Any) -> dict[str, Any]:
        """The arguments of a layer's constructor that it takes from a dense one's attributes, whatever its type."""
        kernel = dense.kernel[...]
        return {
            "dtype": dense.dtype,
            "param_dtype": kernel.dtype,
            "precision": dense.precision,
            "kernel_init": _Given(cls.arrange(dense, kernel), dense.bias),
            "promote_dtype": dense.promote_dtype,
            "preferred_element_type": dense.preferred_element_type,
            "rngs": nnx.Rngs(0),
        }

    def _quantize(
        self, kernel: jax.Array, bits: int, group_size: int | None, quantize_options: Mapping[str, Any] | None
    ) -> None:
        options = dict(quantize_options or {})
        check_options(options, "quantize_options", but=("bits", "group_size"))
        weight = quantize_array(kernel, bits=bits, group_size=group_size, **options)
        self.qvalue = QuantizedParam(weight.qvalue)
        self.scales = QuantizedParam(weight.scales)
        self.zeros = _variable_or_none(weight.zeros)
        self.offsets = _variable_or_none(weight.offsets)
        self.bits = weight.bits
        self.k, self.n = weight.k, weight.n
        self.table = nnx.static(weight.table)

    @property
    def kernel(self) -> QuantizedTensor:
        """The quantized weight ``[..., K, N]``."""
        return QuantizedTensor(
            *(None if a is None else a.get_value() for a in (self.qvalue, self.scales, self.zeros, self.offsets)),
            bits=self.bits,
            k=self.k,
            n=self.n,
            table=self.table,
        )


def _variable_or_none(value: jax.Array | None) -> QuantizedParam | None:
    return nnx.data(None) if value is None else QuantizedParam(value)


def _accept_only(name: str, value: Any, *accepted: Any) -> None:
    """Raises for an argument of a dense constructor that a quantized layer has no use for."""
    if not any(value is one for one in accepted):
        why = {
            "kernel_metadata": "a packed kernel has other axes than a dense one",
            "mask": "a mask would have to be applied to packed weights",
            "conv_general_dilated": "the layer calls jax_wonly.conv_general_dilated",
            "embedding_metadata": "a packed table has other axes than a dense one",
        }.get(name, "a quantized layer calls jax_wonly.matmul")
        names = " or ".join(getattr(one, "__name__", repr(one)) for one in accepted)
        raise ValueError(f"jax_wonly: {name}={value!r} is not supported, for {why}; accepted: {names}.")


class QuantizedLinear(QuantizedLayer):
    """A linear layer ``y = activation(x @ W + b)`` with int4 or int8 weights: ``nnx.Linear``, quantized.

    The arguments of ``nnx.Linear`` keep their meaning. The kernel is initialised, quantized and dropped.

    Args:
      in_features: K, the size of the last axis of the input.
      out_features: N, the size of the last axis of the output.
      bits: 4 or 8.
      group_size: how many inputs share a scale, as in ``jax_wonly.quantize``.
      quantize_options: further arguments of ``jax_wonly.quantize``.
      activation: applied to the product after the bias, as in ``jax_wonly.matmul``.
      use_bias: whether the layer adds a bias.
      dtype: of the computation; by default inferred from the input and ``param_dtype``.
      param_dtype: of the kernel before it is quantized, and of the bias.
      precision: as in ``jax_wonly.matmul``.
      kernel_init: initializer of the kernel.
      bias_init: initializer of the bias.
      dot_general: only ``jax.lax.dot_general``: the quantized product takes its place.
      promote_dtype: promotes the input and the bias, as in ``nnx.Linear``; the kernel that it is given is empty.
      preferred_element_type: dtype of the output; by default that of the computation.
      implementation: as in ``jax_wonly.matmul``.
      rngs: random streams.
      kernel_metadata: must be empty: the packed kernel has other axes than the dense one.
      bias_metadata: metadata of the bias variable.

    Raises:
      ValueError: ``dot_general`` is another function, or ``kernel_metadata`` is not empty.

    Example:
      >>> layer = jw.nnx.QuantizedLinear(128, 64, bits=4, group_size=64, activation="gelu", rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((4, 128))).shape
      (4, 64)
    """

    dense_type = nnx.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bits: int = 4,
        group_size: int | None = 128,
        quantize_options: Mapping[str, Any] | None = None,
        activation: str | None = None,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Any = default_kernel_init,
        bias_init: Any = default_bias_init,
        dot_general: Any = jax.lax.dot_general,
        promote_dtype: Any = default_promote_dtype,
        preferred_element_type: Any = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] | None = None,
        bias_metadata: Mapping[str, Any] | None = None,
    ):
        _accept_only("kernel_metadata", kernel_metadata or None, None)
        _accept_only("dot_general", dot_general, jax.lax.dot_general)
        given = kernel_init
        if not isinstance(given, _Given):
            dense = nnx.Linear(
                in_features,
                out_features,
                use_bias=use_bias,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                bias_init=bias_init,
                rngs=rngs,
                bias_metadata=bias_metadata or {},
            )
            given = _Given(dense.kernel[...], dense.bias)
        self._store(given, bits, group_size, quantize_options)
        self._compute_in(dtype, param_dtype, precision, promote_dtype, preferred_element_type, implementation)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        resolve_activation(activation)
        self.activation = activation

    @classmethod
    def from_linear(cls, linear: nnx.Linear, *, activation: str | None = None, **options: Any) -> Self:
        """Returns the quantized layer of a dense one, as ``from_dense`` does.

        Args:
          linear: the dense layer.
          activation: applied to the product after the bias, as in ``jax_wonly.matmul``.
          **options: arguments of ``from_dense``.

        Example:
          >>> dense = nnx.Linear(128, 64, rngs=nnx.Rngs(0))
          >>> jw.nnx.QuantizedLinear.from_linear(dense, activation="relu")(jnp.ones((4, 128))).shape
          (4, 64)
        """
        resolve_activation(activation)
        layer = cls.from_dense(linear, **options)
        layer.activation = activation
        return layer

    @classmethod
    def from_lora(cls, lora: nnx.LoRA, **options: Any) -> Self:
        """Returns one layer of the weight ``W + a @ b`` of an adapter over a quantized layer, both left as they were.

        The sum is quantized in the scheme of the base, unless ``options`` say otherwise. The bias variable is shared.

        Args:
          lora: the adapter; its ``base_module`` is a ``QuantizedLinear``.
          **options: arguments of ``jax_wonly.quantize``, in the place of those of the base.

        Raises:
          TypeError: ``lora`` is something else.
          ValueError: the base has an activation, which would follow the adapter, or overrides ``__call__``.

        Example:
          >>> base = jw.nnx.QuantizedLinear(128, 64, rngs=nnx.Rngs(0))
          >>> adapter = nnx.LoRA(128, 4, 64, base_module=base, rngs=nnx.Rngs(1))
          >>> jw.nnx.QuantizedLinear.from_lora(adapter, bits=8).kernel.bits
          8
        """
        if not isinstance(lora, nnx.LoRA) or not isinstance(lora.base_module, QuantizedLinear):
            over = f" over a {type(lora.base_module).__name__}" if isinstance(lora, nnx.LoRA) else ""
            raise TypeError(
                f"jax_wonly: lora is a {type(lora).__name__}{over}; accepted: an nnx.LoRA over a QuantizedLinear."
            )
        base = lora.base_module
        if refusal := refuses_merging(base):
            raise ValueError(f"jax_wonly: the adapter cannot be merged into its base: {refusal}.")
        chosen = options_of(base.kernel) | options
        return cls(
            base.in_features,
            base.out_features,
            bits=chosen.pop("bits"),
            group_size=chosen.pop("group_size"),
            quantize_options=chosen,
            use_bias=base.use_bias,
            dtype=base.dtype,
            param_dtype=base.param_dtype,
            precision=base.precision,
            kernel_init=_Given(merged_kernel(lora), base.bias),
            promote_dtype=base.promote_dtype,
            preferred_element_type=base.preferred_element_type,
            implementation=base.implementation,
            rngs=nnx.Rngs(0),
        )

    @classmethod
    def refuses(cls, dense: nnx.Linear) -> str | None:
        if dense.dot_general is not jax.lax.dot_general:
            return "its dot_general is not jax.lax.dot_general"
        return super().refuses(dense)

    @classmethod
    def _of(cls, dense: nnx.Linear, **options: Any) -> Self:
        return cls(
            dense.in_features,
            dense.out_features,
            use_bias=dense.use_bias,
            **cls._stored(dense),
            **options,
        )

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Applies the layer over the last axis: ``[..., in_features]`` to ``[..., out_features]``."""
        inputs, bias = _promote(self, inputs)
        outputs = matmul(inputs, self.kernel, bias=bias, activation=self.activation, **_product_options(self))
        return outputs if out_sharding is None else jax.sharding.reshard(outputs, out_sharding)


def refuses_merging(base: QuantizedLinear) -> str | None:
    """Why an adapter cannot be merged into its base; None if it can."""
    if base.activation is not None:
        return f"it has activation={base.activation!r}, which would follow the adapter"
    if type(base).__call__ is not QuantizedLinear.__call__:
        return f"{type(base).__name__} overrides the __call__ of QuantizedLinear"
    return None


def merged_kernel(lora: Any) -> jax.Array:
    """``W + a @ b`` of an adapter over a quantized layer, float32 ``[..., K, N]``."""
    a, b = (adapter[...].astype(jnp.float32) for adapter in (lora.lora_a, lora.lora_b))
    weight = dequantize(lora.base_module.kernel, dtype=jnp.float32)
    return weight + jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _promote(layer: Any, inputs: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Input and bias in the type of the computation."""
    bias = None if layer.bias is None else layer.bias[...]
    # An empty kernel stands in for the dense one, so that the dtypes promote as they do in the dense layer.
    inputs, _, bias = layer.promote_dtype((inputs, jnp.zeros((0,), layer.param_dtype), bias), dtype=layer.dtype)
    return inputs, bias


def _product_options(layer: Any) -> dict[str, Any]:
    names = ("preferred_element_type", "precision", "implementation")
    return {name: getattr(layer, name) for name in names}


class QuantizedLinearGeneral(QuantizedLayer):
    """``nnx.LinearGeneral`` with int4 or int8 weights: a linear layer over any axes of the input.

    The arguments of ``nnx.LinearGeneral`` keep their meaning. The weight is ``[batch..., K, N]``, K the product of
    ``in_features`` and N that of ``out_features``; ``group_size`` divides K.

    Args:
      in_features: sizes of the axes that are summed over.
      out_features: sizes of the axes that take their place, at the end.
      axis: axes of the input that are summed over.
      batch_axis: leading axes of the input, with their sizes, that have kernels of their own.
      bits, group_size, quantize_options, implementation: as in ``QuantizedLinear``.
      use_bias, dtype, param_dtype, precision: as in ``nnx.LinearGeneral``.
      kernel_init, bias_init, promote_dtype, preferred_element_type, rngs, bias_metadata: as there.
      dot_general, dot_general_cls, kernel_metadata: must be left at their defaults.

    Raises:
      ValueError: an argument of the last line is given.

    Example:
      >>> layer = jw.nnx.QuantizedLinearGeneral(128, (4, 16), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 5, 128))).shape
      (2, 5, 4, 16)
    """

    dense_type = nnx.LinearGeneral

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        axis: int | Sequence[int] = -1,
        batch_axis: Mapping[int, int] | None = None,
        bits: int = 4,
        group_size: int | None = 128,
        quantize_options: Mapping[str, Any] | None = None,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = default_kernel_init,
        bias_init: Any = default_bias_init,
        precision: Any = None,
        promote_dtype: Any = default_promote_dtype,
        dot_general: Any = None,
        dot_general_cls: Any = None,
        preferred_element_type: Any = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] | None = None,
        bias_metadata: Mapping[str, Any] | None = None,
    ):
        _accept_only("kernel_metadata", kernel_metadata or None, None)
        _accept_only("dot_general", dot_general, None, jax.lax.dot_general)
        _accept_only("dot_general_cls", dot_general_cls, None)
        self.in_features = as_tuple(in_features)
        self.out_features = as_tuple(out_features)
        self.axis = as_tuple(axis)
        self.batch_sizes = tuple((batch_axis or {}).items())
        given = kernel_init
        if not isinstance(given, _Given):
            dense = nnx.LinearGeneral(
                in_features,
                out_features,
                axis=axis,
                batch_axis=batch_axis or {},
                use_bias=use_bias,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                bias_init=bias_init,
                rngs=rngs,
                bias_metadata=bias_metadata or {},
            )
            given = _Given(self.arrange(dense, dense.kernel[...]), dense.bias)
        self._store(given, bits, group_size, quantize_options)
        self._compute_in(dtype, param_dtype, precision, promote_dtype, preferred_element_type, implementation)
        self.use_bias = use_bias

    @classmethod
    def refuses(cls, dense: nnx.LinearGeneral) -> str | None:
        if dense.dot_general_cls is not None or dense.dot_general not in (None, jax.lax.dot_general):
            return "its dot_general is not jax.lax.dot_general"
        return super().refuses(dense)

    @classmethod
    def arrange(cls, dense: nnx.LinearGeneral, kernel: jax.Array) -> jax.Array:
        batch, contracted = len(dense.batch_axis), len(dense.in_features)
        axes = range(batch + contracted)
        _, labels, _ = dense_general(axes[:batch], axes[batch:], len(dense.out_features), batch + contracted)
        return labels.arrange(kernel)

    @classmethod
    def _of(cls, dense: nnx.LinearGeneral, **options: Any) -> Self:
        return cls(
            dense.in_features,
            dense.out_features,
            axis=dense.axis,
            batch_axis=dense.batch_axis,
            use_bias=dense.use_bias,
            **cls._stored(dense),
            **options,
        )

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Applies the layer: the axes ``axis`` of the input give way to ``out_features`` at the end."""
        ndim = inputs.ndim
        # nnx.LinearGeneral sorts its axes too.
        batch, axis = (tuple(sorted(a % ndim for a in axes)) for axes in (dict(self.batch_sizes), self.axis))
        lhs, kernel, result = dense_general(batch, axis, len(self.out_features), ndim)
        sizes = kernel.sizes((*dict(self.batch_sizes).values(), *self.in_features, *self.out_features))
        inputs, bias = _promote(self, inputs)
        outputs = contract(inputs, self.kernel, lhs, kernel, result, sizes, bias, **_product_options(self))
        return outputs if out_sharding is None else jax.sharding.reshard(outputs, out_sharding)


class QuantizedEinsum(QuantizedLayer):
    """``nnx.Einsum`` with int4 or int8 weights, for equations that are one product with the kernel.

    Every axis of the kernel must be an output (the result has it), an input (the input alone has it, and it is summed
    over) or a batch axis (all three have it); so ``"btd,dhk->bthk"``, ``"bthk,hkd->btd"`` and ``"bte,efd->btfd"`` are
    such equations, and so is ``"ebd,edf->ebf"`` with a kernel for each ``e``. The weight is ``[batch..., K, N]``, with
    the axes of each kind in the kernel's order; ``group_size`` divides K.

    Args:
      einsum_str: the equation, with the kernel second; ``...`` may stand for axes of input and result.
      kernel_shape: of the dense kernel.
      bias_shape: of the bias, over the axes of the result that the kernel has; None: no bias.
      bits, group_size, quantize_options, implementation: as in ``QuantizedLinear``.
      dtype, param_dtype, precision: as in ``nnx.Einsum``.
      kernel_init, bias_init, promote_dtype, preferred_element_type, rngs, bias_metadata: as there.
      einsum_op, kernel_metadata: must be left at their defaults.

    Raises:
      ValueError: the equation is not one product, or an argument of the last line is given.

    Example:
      >>> layer = jw.nnx.QuantizedEinsum("thk,hkd->td", (4, 32, 64), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((4, 4, 32))).shape, layer.kernel.shape
      ((4, 64), (128, 64))
    """

    dense_type = nnx.Einsum

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: Sequence[int],
        bias_shape: Sequence[int] | None = None,
        *,
        bits: int = 4,
        group_size: int | None = 128,
        quantize_options: Mapping[str, Any] | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Any = default_kernel_init,
        bias_init: Any = default_bias_init,
        promote_dtype: Any = default_promote_dtype,
        einsum_op: Any = jnp.einsum,
        preferred_element_type: Any = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] | None = None,
        bias_metadata: Mapping[str, Any] | None = None,
    ):
        _accept_only("kernel_metadata", kernel_metadata or None, None)
        _accept_only("einsum_op", einsum_op, jnp.einsum)
        kernel = Einsum.parse(einsum_str).kernel
        if len(kernel_shape) != len(kernel.axes):
            raise ValueError(
                f"jax_wonly: kernel_shape={tuple(kernel_shape)} does not fit the equation {einsum_str!r}; accepted: "
                f"{len(kernel.axes)} sizes."
            )
        given = kernel_init
        if not isinstance(given, _Given):
            dense = nnx.Einsum(
                einsum_str,
                tuple(kernel_shape),
                None if bias_shape is None else tuple(bias_shape),
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                bias_init=bias_init,
                rngs=rngs,
                bias_metadata=bias_metadata or {},
            )
            given = _Given(kernel.arrange(dense.kernel[...]), dense.bias)
        self._store(given, bits, group_size, quantize_options)
        self._compute_in(dtype, param_dtype, precision, promote_dtype, preferred_element_type, implementation)
        self.einsum_str = einsum_str
        self.kernel_shape = tuple(kernel_shape)
        self.bias_shape = None if bias_shape is None else tuple(bias_shape)

    @classmethod
    def refuses(cls, dense: nnx.Einsum) -> str | None:
        if dense.einsum_op is not jnp.einsum:
            return "its einsum_op is not jax.numpy.einsum"
        try:
            Einsum.parse(dense.einsum_str)
        except ValueError as error:
            return str(error).removeprefix("jax_wonly: ").removesuffix(".")
        return super().refuses(dense)

    @classmethod
    def arrange(cls, dense: nnx.Einsum, kernel: jax.Array) -> jax.Array:
        return Einsum.parse(dense.einsum_str).kernel.arrange(kernel)

    @classmethod
    def _of(cls, dense: nnx.Einsum, **options: Any) -> Self:
        return cls(
            dense.einsum_str,
            dense.kernel_shape,
            dense.bias_shape,
            **cls._stored(dense),
            **options,
        )

    def __call__(self, inputs: jax.Array, einsum_str: str | None = None, out_sharding: Any = None) -> jax.Array:
        """Applies the equation to the input and the kernel, and adds the bias.

        Args:
          inputs: with the axes that the equation says.
          einsum_str: an equation for this call, which sums over the same axes of the kernel.
          out_sharding: of the result.

        Raises:
          ValueError: ``einsum_str`` is not one product, or sums over other axes of the kernel.
        """
        equation = Einsum.parse(self.einsum_str)
        if einsum_str is not None:
            other = Einsum.parse(einsum_str)
            if _parts(other.kernel) != _parts(equation.kernel):
                raise ValueError(
                    f"jax_wonly: einsum_str={einsum_str!r} uses the axes of the kernel in another way than "
                    f"{self.einsum_str!r}, for which it was packed."
                )
            equation = other
        lhs, result = equation.expand(inputs.ndim)
        sizes = equation.kernel.sizes(self.kernel_shape)
        inputs, bias = _promote(self, inputs)
        outputs = contract(inputs, self.kernel, lhs, equation.kernel, result, sizes, bias, **_product_options(self))
        return outputs if out_sharding is None else jax.sharding.reshard(outputs, out_sharding)


def _parts(kernel: Kernel) -> list[list[int]]:
    return [[kernel.axes.index(a) for a in part] for part in (kernel.batch, kernel.inputs, kernel.outputs)]


class QuantizedConv(QuantizedLayer):
    """``nnx.Conv`` with int4 or int8 weights.

    The arguments of ``nnx.Conv`` keep their meaning. The weight is ``[*kernel_size, K, N]`` with K = in_features /
    feature_group_count; ``group_size`` divides K, and every tap of the window has scales of its own.

    Args:
      in_features, out_features, kernel_size, strides: as in ``nnx.Conv``.
      padding, input_dilation, kernel_dilation, feature_group_count: as there.
      bits, group_size, quantize_options, activation, implementation: as in ``QuantizedLinear``.
      use_bias, dtype, param_dtype, precision, kernel_init, bias_init: as in ``nnx.Conv``.
      promote_dtype, preferred_element_type, rngs, bias_metadata: as there.
      mask, conv_general_dilated, kernel_metadata: must be left at their defaults.

    Raises:
      ValueError: an argument of the last line is given.

    Example:
      >>> layer = jw.nnx.QuantizedConv(64, 32, (3, 3), strides=2, group_size=64, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 8, 8, 64))).shape, layer.kernel.shape
      ((1, 4, 4, 32), (3, 3, 64, 32))
    """

    dense_type = nnx.Conv

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        padding: Any = "SAME",
        input_dilation: int | Sequence[int] | None = 1,
        kernel_dilation: int | Sequence[int] | None = 1,
        feature_group_count: int = 1,
        bits: int = 4,
        group_size: int | None = 128,
        quantize_options: Mapping[str, Any] | None = None,
        activation: str | None = None,
        use_bias: bool = True,
        mask: Any = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Any = default_kernel_init,
        bias_init: Any = default_bias_init,
        conv_general_dilated: Any = jax.lax.conv_general_dilated,
        promote_dtype: Any = default_promote_dtype,
        preferred_element_type: Any = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] | None = None,
        bias_metadata: Mapping[str, Any] | None = None,
    ):
        _accept_only("kernel_metadata", kernel_metadata or None, None)
        _accept_only("mask", mask, None)
        _accept_only("conv_general_dilated", conv_general_dilated, jax.lax.conv_general_dilated)
        given = kernel_init
        if not isinstance(given, _Given):
            dense = nnx.Conv(
                in_features,
                out_features,
                kernel_size,
                feature_group_count=feature_group_count,
                use_bias=use_bias,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                bias_init=bias_init,
                rngs=rngs,
                bias_metadata=bias_metadata or {},
            )
            given = _Given(dense.kernel[...], dense.bias)
        self._store(given, bits, group_size, quantize_options)
        self._compute_in(dtype, param_dtype, precision, promote_dtype, preferred_element_type, implementation)
        self.in_features = in_features
        self.out_features = out_features
        self.kernel_size = as_tuple(kernel_size)
        self.strides = strides
        self.padding = padding
        self.input_dilation = input_dilation
        self.kernel_dilation = kernel_dilation
        self.feature_group_count = feature_group_count
        self.use_bias = use_bias
        resolve_activation(activation)
        self.activation = activation

    @classmethod
    def refuses(cls, dense: nnx.Conv) -> str | None:
        if dense.conv_general_dilated is not jax.lax.conv_general_dilated:
            return "its conv_general_dilated is not jax.lax.conv_general_dilated"
        if dense.mask is not None:
            return "it has a mask"
        return super().refuses(dense)

    @classmethod
    def _of(cls, dense: nnx.Conv, **options: Any) -> Self:
        return cls(
            dense.in_features,
            dense.out_features,
            dense.kernel_size,
            dense.strides,
            padding=dense.padding,
            input_dilation=dense.input_dilation,
            kernel_dilation=dense.kernel_dilation,
            feature_group_count=dense.feature_group_count,
            use_bias=dense.use_bias,
            **cls._stored(dense),
            **options,
        )

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Applies the layer: ``[*batch, *spatial, in_features]`` to ``[*batch, *spatial, out_features]``."""
        inputs, bias = _promote(self, inputs)
        outputs = convolve(inputs, self.kernel, bias, self, activation=self.activation, **_product_options(self))
        return outputs if out_sharding is None else jax.sharding.reshard(outputs, out_sharding)


class QuantizedExperts(QuantizedLayer):
    """The linear layers of a mixture of experts, one weight ``[num_experts, in_features, out_features]``.

    Rows meet the weight of their own expert in one call, whether they are sorted by expert (``__call__``) or not
    (``gather``). ``from_dense`` takes an ``nnx.Linear`` whose kernel has an axis of experts, as ``nnx.vmap`` over its
    constructor makes it.

    Args:
      num_experts: how many experts there are.
      in_features, out_features, bits, group_size, quantize_options, activation, use_bias: as in ``QuantizedLinear``.
      dtype, param_dtype, precision, promote_dtype, preferred_element_type, implementation: as there.
      kernel_init, bias_init, rngs: as there; kernel and bias are drawn for each expert.

    Example:
      >>> layer = jw.nnx.QuantizedExperts(3, 128, 64, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((4, 128)), jnp.array([2, 0, 2])).shape
      (4, 64)
      >>> layer.gather(jnp.ones((4, 1, 128)), jnp.array([[0, 1]] * 4)).shape
      (4, 2, 64)
    """

    dense_type = nnx.Linear

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        bits: int = 4,
        group_size: int | None = 128,
        quantize_options: Mapping[str, Any] | None = None,
        activation: str | None = None,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Any = default_kernel_init,
        bias_init: Any = default_bias_init,
        promote_dtype: Any = default_promote_dtype,
        preferred_element_type: Any = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        given = kernel_init
        if not isinstance(given, _Given):

            def draw(initializer: Any, *shape: int) -> jax.Array:
                keys = jax.random.split(rngs.params(), num_experts)
                return jax.vmap(lambda key: initializer(key, shape, param_dtype))(keys)

            kernel = draw(kernel_init, in_features, out_features)
            given = _Given(kernel, nnx.Param(draw(bias_init, out_features)) if use_bias else None)
        self._store(given, bits, group_size, quantize_options)
        self._compute_in(dtype, param_dtype, precision, promote_dtype, preferred_element_type, implementation)
        self.num_experts = num_experts
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        resolve_activation(activation)
        self.activation = activation

    @classmethod
    def refuses(cls, dense: nnx.Linear) -> str | None:
        if len(dense.kernel.shape) != 3:
            return f"its kernel has shape {tuple(dense.kernel.shape)}, not [experts, inputs, outputs]"
        return QuantizedLinear.refuses(dense)

    @classmethod
    def _of(cls, dense: nnx.Linear, **options: Any) -> Self:
        return cls(
            *dense.kernel.shape,
            use_bias=dense.use_bias,
            **cls._stored(dense),
            **options,
        )

    def __call__(self, inputs: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Applies the experts to rows that are sorted by expert.

        Args:
          inputs: ``[rows, in_features]``.
          group_sizes: integers ``[num_experts]``, the rows of each expert, as in ``jax_wonly.ragged_dot``.

        Returns:
          ``[rows, out_features]``; rows beyond the sum of the sizes are zero.
        """
        inputs, bias = _promote(self, inputs)
        options = _product_options(self)
        return ragged_dot(inputs, self.kernel, group_sizes, bias=bias, activation=self.activation, **options)

    def gather(self, inputs: jax.Array, expert_ids: jax.Array) -> jax.Array:
        """Applies to each row the expert that its id says, as ``jax_wonly.gather_matmul``.

        Args:
          inputs: ``[..., in_features]``.
          expert_ids: integers that broadcast with ``inputs.shape[:-1]``.

        Returns:
          ``[..., out_features]``; rows whose id is none of an expert are zero.
        """
        inputs, bias = _promote(self, inputs)
        options = _product_options(self)
        return gather_matmul(inputs, self.kernel, expert_ids, bias=bias, activation=self.activation, **options)


class QuantizedEmbed(QuantizedLayer):
    """``nnx.Embed`` with an int4 or int8 table.

    The table is packed transposed, as the weight ``[features, num_embeddings]`` of the product that ``attend`` is, with
    scales along the features. That serves a lookup as well: the packed format keeps the codes of an output together, so
    a row is one short run of words in each tile, read and dequantized without the rest of the table.

    Args:
      num_embeddings: rows of the table.
      features: the size of a row; ``group_size`` divides it.
      bits, group_size, quantize_options, implementation: as in ``QuantizedLinear``.
      dtype: of the result; by default ``param_dtype``.
      param_dtype, embedding_init, promote_dtype, rngs: as in ``nnx.Embed``.
      precision: of ``attend``, as in ``jax_wonly.matmul``.
      embedding_metadata: must be empty.

    Raises:
      ValueError: ``embedding_metadata`` is not empty.

    Example:
      >>> layer = jw.nnx.QuantizedEmbed(64, 128, bits=8, rngs=nnx.Rngs(0))
      >>> layer(jnp.array([3, 63])).shape, layer.attend(jnp.ones((2, 128))).shape
      ((2, 128), (2, 64))
    """

    dense_type = nnx.Embed
    parameter = "embedding"

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        bits: int = 4,
        group_size: int | None = 128,
        quantize_options: Mapping[str, Any] | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        embedding_init: Any = default_embed_init,
        promote_dtype: Any = default_promote_dtype,
        precision: Any = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
        embedding_metadata: Mapping[str, Any] | None = None,
    ):
        _accept_only("embedding_metadata", embedding_metadata or None, None)
        given = embedding_init
        if not isinstance(given, _Given):
            dense = nnx.Embed(
                num_embeddings, features, param_dtype=param_dtype, embedding_init=embedding_init, rngs=rngs
            )
            given = _Given(self.arrange(dense, dense.embedding[...]))
        self._quantize(given.kernel, bits, group_size, quantize_options)
        self.num_embeddings = num_embeddings
        self.features = features
        self.dtype = dtype or given.kernel.dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.precision = precision
        resolve_implementation(implementation)
        self.implementation = implementation

    @classmethod
    def arrange(cls, dense: nnx.Embed, kernel: jax.Array) -> jax.Array:
        return jnp.swapaxes(kernel, -1, -2)

    @classmethod
    def _of(cls, dense: nnx.Embed, **options: Any) -> Self:
        table = dense.embedding[...]
        return cls(
            dense.num_embeddings,
            dense.features,
            dtype=dense.dtype,
            param_dtype=table.dtype,
            embedding_init=_Given(cls.arrange(dense, table)),
            promote_dtype=dense.promote_dtype,
            rngs=nnx.Rngs(0),
            **options,
        )

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """The rows of the integers ``inputs``: ``[...]`` to ``[..., features]``. Rows that do not exist are NaN."""
        inputs = jnp.asarray(inputs)
        (like,) = self.promote_dtype((jnp.zeros((0,), self.param_dtype),), dtype=self.dtype, inexact=False)
        # As in nnx.Embed, a table of one row is broadcast whatever the integers are.
        rows = take_outputs(self.kernel, jnp.zeros_like(inputs) if self.num_embeddings == 1 else inputs, like.dtype)
        return rows if out_sharding is None else jax.sharding.reshard(rows, out_sharding)

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """The product with every row, which is the logits where weights are tied.

        Args:
          query: ``[..., features]``.
          out_sharding: of the result.

        Returns:
          ``[..., num_embeddings]``.
        """
        query, _ = self.promote_dtype((query, jnp.zeros((0,), self.param_dtype)), dtype=self.dtype)
        outputs = matmul(query, self.kernel, precision=self.precision, implementation=self.implementation)
        return outputs if out_sharding is None else jax.sharding.reshard(outputs, out_sharding)


# What replaces what, in a whole model.
REPLACEMENTS: tuple[type[QuantizedLayer], ...] = (
    QuantizedLinear,
    QuantizedLinearGeneral,
    QuantizedEinsum,
    QuantizedConv,
    QuantizedEmbed,
)
