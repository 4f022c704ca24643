"""Quantizing every layer of an nnx model in place."""

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, TypeVar

import jax
from flax import nnx

from jax_wonly._model import (
    LayerReport,
    Report,
    SkippedLayer,
    bytes_needed,
    check_arguments,
    check_quantizable,
    choose,
    name_done,
    nbytes,
    report_layer,
)
from jax_wonly.nnx._layers import REPLACEMENTS, QuantizedEmbed, QuantizedLayer
from jax_wonly.progress import progress as progress_bar

T = TypeVar("T")
Predicate = Callable[[str, nnx.Module], bool | Mapping[str, Any]]


def quantize(
    model: nnx.Module,
    bits: int = 4,
    group_size: int | None = 128,
    predicate: Predicate | None = None,
    progress: bool = False,
    *,
    embeddings: bool = False,
    measure_error: bool = True,
    **options: Any,
) -> Report:
    """Replaces the layers of a model by quantized ones, in place, and frees each dense kernel as it goes.

    ``nnx.Linear``, ``nnx.LinearGeneral``, ``nnx.Einsum``, ``nnx.Conv`` and, if asked for, ``nnx.Embed`` are replaced,
    and so is a subclass that inherits the methods of one. A layer held in several places stays shared. A layer that
    computes something else, or whose number of inputs is not a multiple of ``group_size``, stays dense and is listed in
    ``Report.skipped``; ask for another group size for it with ``predicate``. An abstract model (``nnx.eval_shape``)
    becomes an abstract quantized one.

    Arguments and values are checked before anything is changed, and the layer that takes the most memory is quantized
    first, so that memory which does not suffice is noticed while the model is as it was. If something else fails later,
    the layers that are done stay quantized, the others dense, and a note on the exception says which; the model works
    either way.

    Args:
      model: a module with such layers somewhere below it.
      bits: 4 or 8.
      group_size: how many inputs share a scale, as in ``jax_wonly.quantize``.
      predicate: called as ``predicate(path, layer)`` for each layer, with a path such as ``"blocks/0/up"``. False keeps
        the layer dense, True quantizes it, and a dict quantizes it with other arguments: ``bits``, ``group_size``, or
        any of ``options``.
      progress: whether to draw a progress bar on standard error.
      embeddings: whether to replace ``nnx.Embed`` too. A lookup reads few rows, so this saves memory but no time, and
        small models lose accuracy by it; it pays for large tables, and where ``attend`` gives the logits.
      measure_error: whether to dequantize each weight once more for ``LayerReport.relative_error``.
      **options: further arguments of ``jax_wonly.quantize``.

    Returns:
      What was done to each layer, and what was not done and why.

    Raises:
      TypeError: ``model`` is no module, an option is unknown, or ``predicate`` returns neither a bool nor a dict.
      ValueError: ``model`` is itself such a layer, which cannot be replaced in place; it holds quantized layers
        already; or a group size that ``predicate`` asked for does not divide the inputs of its layer.

    Example:
      >>> model = nnx.Sequential(nnx.Linear(128, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 10, rngs=nnx.Rngs(1)))
      >>> report = jw.nnx.quantize(model, bits=4, group_size=128)
      >>> model(jnp.ones((4, 128))).shape
      (4, 10)
      >>> [layer.path for layer in report.layers], report.skipped[0].reason
      (['layers/0'], 'group_size=128 does not divide its 64 inputs')
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"jax_wonly: model is a {type(model).__name__}, not an nnx.Module")
    if replacement := replacement_for(model):
        raise ValueError(
            f"jax_wonly: model is itself an nnx.{replacement.dense_type.__name__}, which cannot be replaced in place; "
            f"use {replacement.__name__}.from_dense(model)."
        )
    already = [path for path, module in modules(model) if isinstance(module, QuantizedLayer)]
    if already:
        some = ", ".join(path or "itself" for path in already[:3]) + (", ..." if len(already) > 3 else "")
        raise ValueError(
            f"jax_wonly: model is quantized already ({len(already)} layers: {some}); quantize it once, and choose for "
            "each layer with predicate."
        )
    arguments = {"bits": bits, "group_size": group_size, **options}
    check_arguments(arguments, "quantize")
    model_bytes_before = model_bytes(model)

    plan, skipped = _plan(model, arguments, predicate, embeddings)
    check_quantizable(
        (planned.path, planned.dense_kernel, planned.arranged_shape, planned.options) for planned in plan.values()
    )
    total = len(plan)
    order = {planned.path: i for i, planned in enumerate(plan.values())}
    convert = functools.partial(_quantize_layer, measure_error=measure_error)
    # The layer that needs the most memory goes first: what would not fit fails while nothing is changed, and from there
    # on every layer frees more than it takes.
    first = {key: plan.pop(key) for key in sorted(plan, key=lambda key: -plan[key].bytes_needed)[:1]}
    work: Iterator[LayerReport] = itertools.chain(replace(model, first, convert), replace(model, plan, convert))
    if progress and total:
        work = progress_bar(work, "quantize", total=total, unit="layers")
    layers: list[LayerReport] = []
    try:
        layers.extend(work)
    except BaseException as error:
        name_done(error, [layer.path for layer in layers], total, "stay so; the others are dense as they were")
        raise
    layers.sort(key=lambda layer: order[layer.path])
    return Report(tuple(layers), skipped, model_bytes_before, model_bytes(model))


@dataclasses.dataclass(frozen=True)
class _Planned:
    path: str
    dense: Any
    type: type[QuantizedLayer]
    options: dict[str, Any]

    @property
    def dense_kernel(self) -> jax.Array | jax.ShapeDtypeStruct:
        return getattr(self.dense, self.type.parameter).get_value()

    @property
    def bytes_needed(self) -> int:
        """Of memory to quantize the layer, beside the dense one; the parts that grow with its size."""
        kernel, copied = self.dense_kernel, self.type.arrange.__func__ is not QuantizedLayer.arrange.__func__
        return bytes_needed(kernel, self.options["bits"], copied)

    @property
    def arranged_shape(self) -> tuple[int, ...]:
        return arranged_shape(self.type, self.dense)


def replacement_for(module: nnx.Module) -> type[QuantizedLayer] | None:
    """The quantized layer that takes the place of a module; None if there is none."""
    return next((type_ for type_ in REPLACEMENTS if isinstance(module, type_.dense_type)), None)


def arranged_shape(type_: type[QuantizedLayer], dense: Any) -> tuple[int, ...]:
    """``[..., K, N]`` of the weight that ``type_`` has in the place of a dense layer, which may be abstract."""
    kernel = getattr(dense, type_.parameter)
    like = jax.ShapeDtypeStruct(kernel.shape, kernel.dtype)
    return jax.eval_shape(functools.partial(type_.arrange, dense), like).shape


def _plan(
    model: nnx.Module, arguments: dict[str, Any], predicate: Predicate | None, embeddings: bool
) -> tuple[dict[int, _Planned], tuple[SkippedLayer, ...]]:
    """What to quantize, by the id of the layer, and what stays dense."""
    plan: dict[int, _Planned] = {}
    skipped: list[SkippedLayer] = []
    for path, module in modules(model):
        type_ = replacement_for(module)
        if type_ is None:
            skipped += _dense_matrices(path, module)
            continue
        chosen = _choose(path, module, type_, arguments, predicate, embeddings)
        if isinstance(chosen, str):
            kernel = getattr(module, type_.parameter)
            name = type(module).__name__
            skipped.append(SkippedLayer(path, name, tuple(kernel.shape), nbytes(kernel), chosen))
        else:
            plan[id(module)] = _Planned(path, module, type_, chosen)
    return plan, tuple(skipped)


def _choose(
    path: str,
    module: nnx.Module,
    type_: type[QuantizedLayer],
    arguments: dict[str, Any],
    predicate: Predicate | None,
    embeddings: bool,
) -> dict[str, Any] | str:
    """The arguments to quantize a layer with, or why it stays dense."""
    if type_ is QuantizedEmbed and not embeddings:
        return "embeddings=True was not asked for"
    if refusal := type_.refuses(module):
        return refusal
    kernel = getattr(module, type_.parameter)
    return choose(path, module, kernel.dtype, arranged_shape(type_, module)[-2], arguments, predicate)


def replace(
    model: nnx.Module, plan: dict[int, Any], convert: Callable[[Any], tuple[nnx.Module, T]]
) -> Generator[T, None, Any]:
    """Converts what ``plan`` holds by the ids of modules below ``model``, in place, and yields a report after each.

    Children are looked up one by one and a plan is forgotten once it is carried out, so that nothing here keeps a dense
    kernel alive.
    """
    # By the id of the dense layer, which another object may have once that is gone.
    done: dict[int, tuple[weakref.ref, nnx.Module]] = {}
    seen: set[int] = set()

    def visit(node: Any) -> Generator[T, None, Any]:
        key = id(node)
        if key in plan:
            new, report = convert(plan.pop(key))
            done[key] = weakref.ref(node), new
            yield report
        if key in done and done[key][0]() is node:
            return done[key][1]
        if key in seen:
            return node
        seen.add(key)
        if isinstance(node, nnx.Module):
            for name in [name for name in vars(node) if not name.startswith("_pytree__")]:
                new = yield from visit(vars(node)[name])
                if new is not vars(node)[name]:
                    setattr(node, name, nnx.data(new))
        elif isinstance(node, list | dict):
            for name in list(node) if isinstance(node, dict) else range(len(node)):
                node[name] = yield from visit(node[name])
        elif isinstance(node, tuple):
            items = []
            for item in node:
                items.append((yield from visit(item)))
            if any(new is not old for new, old in zip(items, node, strict=True)):
                return type(node)(*items) if hasattr(node, "_fields") else type(node)(items)
        return node

    try:
        return (yield from visit(model))
    except BaseException:
        # What was converted takes its place everywhere, so that a layer held in several places stays shared.
        plan.clear()
        seen.clear()
        for _ in visit(model):
            pass
        raise


def _quantize_layer(planned: _Planned, measure_error: bool) -> tuple[QuantizedLayer, LayerReport]:
    dense, type_, kernel = planned.dense, planned.type, planned.dense_kernel
    arranged = None
    if isinstance(kernel, jax.ShapeDtypeStruct):
        layer = abstract_layer(type_, dense, **planned.options)
    else:
        layer = type_.from_dense(dense, **planned.options)
        arranged = functools.partial(type_.arrange, dense, kernel) if measure_error else None
    return layer, report_layer(planned.path, type(dense).__name__, kernel, layer.kernel, arranged)


def abstract_layer(type_: type[QuantizedLayer], dense: Any, **options: Any) -> Any:
    """``type_.from_dense(dense, **options)`` with shapes in the place of its own arrays; nothing is quantized."""
    layer: Any = nnx.eval_shape(functools.partial(type_.from_dense, **options), dense)
    if hasattr(layer, "bias"):
        layer.bias = nnx.data(dense.bias)
    return layer


def modules(model: nnx.Module) -> Iterator[tuple[str, nnx.Module]]:
    for path, module in nnx.iter_modules(model):
        yield "/".join(map(str, path)), module


def _dense_matrices(path: str, module: nnx.Module) -> Iterator[SkippedLayer]:
    """The matrices that a module of another type holds itself."""
    name = type(module).__name__
    accepted = ", ".join(type_.dense_type.__name__ for type_ in REPLACEMENTS)
    for attribute, value in vars(module).items():
        if isinstance(value, nnx.Param) and len(value.shape) >= 2:
            where = f"{path}/{attribute}" if path else attribute
            yield SkippedLayer(where, name, tuple(value.shape), nbytes(value), f"{name} is none of {accepted}")


def model_bytes(model: nnx.Module) -> int:
    return sum(nbytes(leaf) for leaf in jax.tree.leaves(nnx.state(model)))
