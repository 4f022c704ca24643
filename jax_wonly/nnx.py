"""Quantized layers for Flax nnx, and one call that quantizes every linear layer of a model in place:

    report = jax_wonly.nnx.quantize(model, bits=4, group_size=128)
    print(report)

This module alone needs Flax.
"""

import dataclasses
import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

try:
    from flax import nnx
    from flax.nnx.nn.dtypes import promote_dtype as default_promote_dtype
    from flax.nnx.nn.linear import default_bias_init, default_kernel_init
except ImportError as error:
    raise ImportError("jax_wonly.nnx needs Flax: pip install 'jax-wonly[flax]'") from error

from jax_wonly._matmul import matmul
from jax_wonly._quantize import dequantize
from jax_wonly._quantize import quantize as quantize_array
from jax_wonly._tensor import QuantizedTensor
from jax_wonly.progress import progress as progress_bar

__all__ = ["LayerReport", "QuantizedLinear", "QuantizedParam", "Report", "SkippedLayer", "quantize"]

Predicate = Callable[[str, nnx.Module], bool | Mapping[str, Any]]


class QuantizedParam(nnx.Variable):
    """An array of a quantized weight: packed codes, scales, zeros or offsets.

    It is not an ``nnx.Param``, so an optimizer or ``nnx.grad`` over ``nnx.Param`` leaves it alone.
    """


class QuantizedLinear(nnx.Module):
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
    """

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
        if kernel_metadata:
            raise ValueError(
                f"jax_wonly: kernel_metadata={dict(kernel_metadata)!r} is not supported, for a packed kernel has other "
                "axes than a dense one; accepted: None."
            )
        if dot_general is not jax.lax.dot_general:
            raise ValueError(
                f"jax_wonly: dot_general={dot_general!r} is not supported, for a quantized layer calls "
                "jax_wonly.matmul; accepted: jax.lax.dot_general."
            )
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
        weight = quantize_array(dense.kernel[...], bits=bits, group_size=group_size, **(quantize_options or {}))
        self.qvalue = QuantizedParam(weight.qvalue)
        self.scales = QuantizedParam(weight.scales)
        self.zeros = _variable_or_none(weight.zeros)
        self.offsets = _variable_or_none(weight.offsets)
        self.bias = nnx.data(dense.bias)
        self.in_features = in_features
        self.out_features = out_features
        self.bits = weight.bits
        self.use_bias = use_bias
        self.activation = activation
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type
        self.implementation = implementation

    @classmethod
    def from_linear(
        cls,
        linear: nnx.Linear,
        *,
        bits: int = 4,
        group_size: int | None = 128,
        activation: str | None = None,
        implementation: str | None = None,
        **quantize_options: Any,
    ) -> "QuantizedLinear":
        """Returns the quantized layer of a dense one, which is left as it was.

        The kernel may have leading axes, as ``nnx.vmap`` over a constructor makes them. The bias variable is shared.

        Args:
          linear: the dense layer.
          bits: 4 or 8.
          group_size: how many inputs share a scale, as in ``jax_wonly.quantize``.
          activation: applied to the product after the bias, as in ``jax_wonly.matmul``.
          implementation: as in ``jax_wonly.matmul``.
          **quantize_options: further arguments of ``jax_wonly.quantize``.

        Raises:
          TypeError: ``linear`` is no ``nnx.Linear``.
          ValueError: its ``dot_general`` is not JAX's own, or the kernel cannot be quantized so.
        """
        if not isinstance(linear, nnx.Linear):
            raise TypeError(f"jax_wonly: linear is a {type(linear).__name__}, not an nnx.Linear")
        kernel = linear.kernel[...]
        layer = cls(
            linear.in_features,
            linear.out_features,
            bits=bits,
            group_size=group_size,
            quantize_options=quantize_options,
            activation=activation,
            use_bias=False,
            dtype=linear.dtype,
            param_dtype=linear.param_dtype,
            precision=linear.precision,
            kernel_init=lambda key, shape, dtype: kernel,
            dot_general=linear.dot_general,
            promote_dtype=linear.promote_dtype,
            preferred_element_type=linear.preferred_element_type,
            implementation=implementation,
            rngs=nnx.Rngs(0),
        )
        layer.use_bias = linear.use_bias
        layer.bias = nnx.data(linear.bias)
        return layer

    @property
    def kernel(self) -> QuantizedTensor:
        """The quantized weight ``[..., in_features, out_features]``."""
        return QuantizedTensor(
            self.qvalue[...],
            self.scales[...],
            None if self.zeros is None else self.zeros[...],
            None if self.offsets is None else self.offsets[...],
            bits=self.bits,
            k=self.in_features,
            n=self.out_features,
        )

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Applies the layer over the last axis: ``[..., in_features]`` to ``[..., out_features]``."""
        bias = None if self.bias is None else self.bias[...]
        # An empty kernel stands in for the dense one, so that the dtypes promote as they do in nnx.Linear.
        inputs, _, bias = self.promote_dtype((inputs, jnp.zeros((0,), self.param_dtype), bias), dtype=self.dtype)
        outputs = matmul(
            inputs,
            self.kernel,
            bias=bias,
            activation=self.activation,
            preferred_element_type=self.preferred_element_type,
            precision=self.precision,
            implementation=self.implementation,
        )
        return outputs if out_sharding is None else jax.sharding.reshard(outputs, out_sharding)


def _variable_or_none(value: jax.Array | None) -> QuantizedParam | None:
    return nnx.data(None) if value is None else QuantizedParam(value)


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """What quantization did to one layer."""

    path: str
    type: str
    shape: tuple[int, ...]
    scheme: str
    bytes_before: int
    bytes_after: int
    relative_error: float | None
    """Frobenius norm of (dequantized - dense) over that of dense; None where it was not measured."""


@dataclasses.dataclass(frozen=True)
class SkippedLayer:
    """A layer that holds a matrix and keeps it dense."""

    path: str
    type: str
    shape: tuple[int, ...]
    bytes: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What ``quantize`` did to a model. ``str`` gives a table; layers that differ by a number alone share a row."""

    layers: tuple[LayerReport, ...]
    skipped: tuple[SkippedLayer, ...]
    model_bytes_before: int
    model_bytes_after: int

    @property
    def bytes_before(self) -> int:
        """Bytes of the dense kernels that were quantized."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Bytes of the packed codes, scales, zeros and offsets that replace them."""
        return sum(layer.bytes_after for layer in self.layers)

    def to_json(self, indent: int | None = None) -> str:
        """Returns every number of the report as a JSON object."""
        return json.dumps(
            dataclasses.asdict(self) | {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after},
            indent=indent,
        )

    def __str__(self) -> str:
        rows = [("layer", "shape", "scheme", "before", "after", "error")]
        for path, group in _fold(self.layers, lambda layer: (layer.shape, layer.scheme)):
            errors = [layer.relative_error for layer in group if layer.relative_error is not None]
            rows.append(
                (
                    path,
                    _shape_text(group[0].shape),
                    group[0].scheme,
                    _bytes_text(sum(layer.bytes_before for layer in group)),
                    _bytes_text(sum(layer.bytes_after for layer in group)),
                    f"{max(errors):.2%}" if errors else "-",
                )
            )
        lines = _align(rows) if self.layers else []
        weights = sum(math.prod(layer.shape) for layer in self.layers)
        lines.append(
            f"{len(self.layers)} of {len(self.layers) + len(self.skipped)} layers quantized: "
            f"{_bytes_text(self.bytes_before)} -> {_bytes_text(self.bytes_after)}"
            + (f" ({8 * self.bytes_after / weights:.2f} bits per weight)" if weights else "")
            + f"; whole model {_bytes_text(self.model_bytes_before)} -> {_bytes_text(self.model_bytes_after)}"
        )
        if self.skipped:
            rows = [("kept dense", "shape", "bytes", "why")]
            for path, kept in _fold(self.skipped, lambda layer: (layer.shape, layer.reason)):
                total = _bytes_text(sum(layer.bytes for layer in kept))
                rows.append((path, _shape_text(kept[0].shape), total, kept[0].reason))
            lines += _align(rows)
        return "\n".join(lines)


def quantize(
    model: nnx.Module,
    bits: int = 4,
    group_size: int | None = 128,
    predicate: Predicate | None = None,
    progress: bool = False,
    *,
    measure_error: bool = True,
    **options: Any,
) -> Report:
    """Replaces the linear layers of a model by quantized ones, in place, and frees each dense kernel as it goes.

    Every ``nnx.Linear`` is replaced by a ``QuantizedLinear``, and so is a subclass that inherits its ``__call__``. A
    layer held in several places stays shared. A layer whose input size is not a multiple of ``group_size`` stays dense
    and is listed in ``Report.skipped``; ask for another group size for it with ``predicate``. When this raises, nothing
    has been changed.

    Args:
      model: a module with linear layers somewhere below it.
      bits: 4 or 8.
      group_size: how many inputs share a scale, as in ``jax_wonly.quantize``.
      predicate: called as ``predicate(path, layer)`` for each linear layer, with a path such as ``"blocks/0/up"``.
        False keeps the layer dense, True quantizes it, and a dict quantizes it with other arguments: ``bits``,
        ``group_size``, or any of ``options``.
      progress: whether to draw a progress bar on standard error.
      measure_error: whether to dequantize each weight once more for ``LayerReport.relative_error``.
      **options: further arguments of ``jax_wonly.quantize``.

    Returns:
      What was done to each layer, and what was not done and why.

    Raises:
      TypeError: ``model`` is no module, an option is unknown, or ``predicate`` returns neither a bool nor a dict.
      ValueError: ``model`` is itself a linear layer, which cannot be replaced in place; or a group size that
        ``predicate`` asked for does not divide the input size of its layer.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"jax_wonly: model is a {type(model).__name__}, not an nnx.Module")
    if isinstance(model, nnx.Linear):
        raise ValueError(
            "jax_wonly: model is itself a linear layer, which cannot be replaced in place; use "
            "QuantizedLinear.from_linear(model)."
        )
    arguments = {"bits": bits, "group_size": group_size, **options}
    _check_options(arguments, "quantize")
    model_bytes_before = _model_bytes(model)

    plan, skipped = _plan(model, arguments, predicate)
    _check_quantizable(plan.values())
    total = len(plan)
    work = _replace_planned(model, plan, {}, set(), measure_error)
    if progress and total:
        work = progress_bar(work, "quantize", total=total, unit="layers")
    layers = tuple(work)
    return Report(layers, skipped, model_bytes_before, _model_bytes(model))


@dataclasses.dataclass(frozen=True)
class _Planned:
    path: str
    linear: nnx.Linear
    options: dict[str, Any]


def _plan(
    model: nnx.Module, arguments: dict[str, Any], predicate: Predicate | None
) -> tuple[dict[int, _Planned], tuple[SkippedLayer, ...]]:
    """What to quantize, by the id of the layer, and what stays dense."""
    plan: dict[int, _Planned] = {}
    skipped: list[SkippedLayer] = []
    for path, module in _modules(model):
        if not isinstance(module, nnx.Linear):
            skipped += _dense_matrices(path, module)
            continue
        chosen = _choose(path, module, arguments, predicate)
        if isinstance(chosen, str):
            shape = tuple(module.kernel.shape)
            skipped.append(SkippedLayer(path, type(module).__name__, shape, _nbytes(module.kernel[...]), chosen))
        else:
            plan[id(module)] = _Planned(path, module, chosen)
    return plan, tuple(skipped)


def _choose(
    path: str, linear: nnx.Linear, arguments: dict[str, Any], predicate: Predicate | None
) -> dict[str, Any] | str:
    """The arguments to quantize a layer with, or why it stays dense."""
    kernel = linear.kernel[...]
    name = type(linear).__name__
    if type(linear).__call__ is not nnx.Linear.__call__:
        return f"{name} overrides the __call__ of nnx.Linear"
    if linear.dot_general is not jax.lax.dot_general:
        return "its dot_general is not jax.lax.dot_general"
    if kernel.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        return f"its kernel is {kernel.dtype}, not float16, bfloat16 or float32"
    choice = True if predicate is None else predicate(path, linear)
    if choice is False:
        return "the predicate says no"
    asked: Mapping[str, Any] = {}
    if isinstance(choice, Mapping):
        asked = choice
        _check_options(asked, f"the predicate's answer for {path}")
    elif choice is not True:
        raise TypeError(f"jax_wonly: predicate returned {choice!r} for {path}; accepted: True, False or a dict.")
    chosen = arguments | dict(asked)
    size, inputs = chosen["group_size"], kernel.shape[-2]
    if isinstance(size, int) and size > 0 and inputs % size and "group_size" not in asked:
        return f"group_size={size} does not divide its {inputs} inputs"
    return chosen


def _check_options(options: Mapping[str, Any], where: str) -> None:
    accepted = list(inspect.signature(quantize_array).parameters)[1:]
    for name in options:
        if name not in accepted:
            raise TypeError(f"jax_wonly: {where} has an unknown option {name!r}; accepted: {', '.join(accepted)}.")


def _check_quantizable(plan: Iterable[_Planned]) -> None:
    """Tries what may fail, so that it is told before anything is replaced: arguments by tracing, and finite kernels."""
    checked = set()
    for planned in plan:
        kernel = planned.linear.kernel[...]
        if isinstance(kernel, jax.Array) and not isinstance(kernel, Tracer) and not _finite(kernel):
            raise ValueError(f"jax_wonly: the kernel of {planned.path} holds NaN or Inf; accepted: finite values.")
        key = (kernel.shape, kernel.dtype, repr(sorted(planned.options.items())))
        if key in checked:
            continue
        checked.add(key)
        try:
            jax.eval_shape(
                functools.partial(quantize_array, **planned.options), jax.ShapeDtypeStruct(kernel.shape, kernel.dtype)
            )
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error} (layer {planned.path})") from error


def _replace_planned(
    node: Any, plan: dict[int, _Planned], done: dict[int, QuantizedLinear], seen: set[int], measure_error: bool
) -> Generator[LayerReport, None, Any]:
    """Quantizes the planned layers below ``node``, yields a report after each, and returns what takes its place.

    Children are looked up one by one and a plan is forgotten once it is carried out, so that nothing here keeps a dense
    kernel alive.
    """
    key = id(node)
    if key in plan:
        planned = plan.pop(key)
        done[key], report = _quantize_layer(planned, measure_error)
        del planned
        yield report
    if key in done:
        return done[key]
    if key in seen:
        return node
    seen.add(key)
    recurse = functools.partial(_replace_planned, plan=plan, done=done, seen=seen, measure_error=measure_error)
    if isinstance(node, nnx.Module):
        for name in [name for name in vars(node) if not name.startswith("_pytree__")]:
            new = yield from recurse(vars(node)[name])
            if new is not vars(node)[name]:
                setattr(node, name, nnx.data(new))
    elif isinstance(node, list | dict):
        for name in list(node) if isinstance(node, dict) else range(len(node)):
            node[name] = yield from recurse(node[name])
    elif isinstance(node, tuple):
        items = []
        for item in node:
            items.append((yield from recurse(item)))
        if any(new is not old for new, old in zip(items, node, strict=True)):
            return type(node)(*items) if hasattr(node, "_fields") else type(node)(items)
    return node


def _quantize_layer(planned: _Planned, measure_error: bool) -> tuple[QuantizedLinear, LayerReport]:
    kernel = planned.linear.kernel[...]
    layer = QuantizedLinear.from_linear(planned.linear, **planned.options)
    weight = layer.kernel
    error = None
    if not isinstance(kernel, Tracer):
        # Without this the host runs ahead, and every dense kernel is alive at once.
        jax.block_until_ready(weight)
        if measure_error:
            error = float(_relative_error(kernel, weight))
    size = weight.group_size
    scheme = f"int{weight.bits}, " + ("per channel" if size == weight.k else f"group {size}")
    scheme += "" if weight.zeros is None else ", zeros"
    scheme += "" if weight.offsets is None else ", offsets"
    name = type(planned.linear).__name__
    return layer, LayerReport(planned.path, name, tuple(kernel.shape), scheme, _nbytes(kernel), weight.nbytes, error)


@jax.jit
def _finite(kernel: jax.Array) -> jax.Array:
    return jnp.isfinite(kernel).all()


@jax.jit
def _relative_error(kernel: jax.Array, weight: QuantizedTensor) -> jax.Array:
    dense = kernel.astype(jnp.float32)
    difference = dequantize(weight).astype(jnp.float32) - dense
    return jnp.sqrt(jnp.sum(difference**2) / jnp.maximum(jnp.sum(dense**2), jnp.finfo(jnp.float32).tiny))


def _modules(model: nnx.Module) -> Iterator[tuple[str, nnx.Module]]:
    for path, module in nnx.iter_modules(model):
        yield "/".join(map(str, path)), module


def _dense_matrices(path: str, module: nnx.Module) -> Iterator[SkippedLayer]:
    """The matrices that a module other than a linear layer holds itself."""
    name = type(module).__name__
    for attribute, value in vars(module).items():
        if isinstance(value, nnx.Param) and len(value.shape) >= 2:
            where = f"{path}/{attribute}" if path else attribute
            yield SkippedLayer(where, name, tuple(value.shape), _nbytes(value[...]), f"{name} is not an nnx.Linear")


def _nbytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _model_bytes(model: nnx.Module) -> int:
    return sum(_nbytes(leaf) for leaf in jax.tree.leaves(nnx.state(model)))


def _fold(layers: Iterable[Any], key: Callable[[Any], Any]) -> list[tuple[str, list[Any]]]:
    """Groups layers whose paths differ by numbers alone and whose ``key`` is the same."""
    groups: dict[Any, list[Any]] = {}
    for layer in layers:
        groups.setdefault((re.sub(r"(?<![^/])\d+(?![^/])", "*", layer.path), key(layer)), []).append(layer)
    return [
        (group[0].path if len(group) == 1 else f"{path}  x {len(group)}", group) for (path, _), group in groups.items()
    ]


def _shape_text(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))


def _bytes_text(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def _align(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of a table, two spaces between its columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
