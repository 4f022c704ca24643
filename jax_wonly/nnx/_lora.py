"""Low-rank adapters (LoRA) over the quantized linear layers of a model: adding them, and merging them back."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.lora import default_a_initializer, default_b_initializer

from jax_wonly._model import LayerReport, Report, check_options, check_quantizable, nbytes, options_of, report_layer
from jax_wonly._validate import check_float_dtype
from jax_wonly.nnx._layers import QuantizedLinear, merged_kernel, refuses_merging
from jax_wonly.nnx._replace import model_bytes, modules, replace


def add_lora(
    model: nnx.Module,
    rank: int,
    *,
    predicate: Callable[[str, QuantizedLinear], bool] | None = None,
    param_dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
) -> list[str]:
    """Puts an ``nnx.LoRA`` over every ``QuantizedLinear`` of a model, in place.

    Such a layer computes ``base(x) + x @ a @ b`` with ``a [K, rank]``, ``b [rank, N]``, and ``b`` zero at first, so the
    model computes what it did. The adapters are ``nnx.LoRAParam``: take gradients with
    ``nnx.grad(..., argnums=nnx.DiffState(0, nnx.LoRAParam))``, and give the optimizer ``wrt=nnx.LoRAParam``.

    Args:
      model: a model with quantized layers. Stacked ones get stacked adapters.
      rank: of the adapters, 1 or more.
      predicate: called as ``predicate(path, layer)`` for each quantized linear layer; False leaves it as it is.
      param_dtype: in which the adapters are stored. They are cast to the type in which the base computes.
      rngs: random streams; ``params`` initialises ``a``.

    Returns:
      The paths of the layers that got an adapter.

    Raises:
      TypeError: an argument is of another type, or ``predicate`` does not return a bool.
      ValueError: ``rank`` is below 1, ``model`` is itself a layer, or none is left that could get an adapter.

    Example:
      >>> model = nnx.Sequential(jw.nnx.QuantizedLinear(128, 64, rngs=nnx.Rngs(0)))
      >>> jw.nnx.add_lora(model, rank=4, rngs=nnx.Rngs(1))
      ['layers/0']
    """
    _check_model(model)
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer):
        raise TypeError(f"jax_wonly: rank={rank!r} is not an integer; accepted: 1 or more.")
    if not callable(predicate) and predicate is not None:
        raise TypeError(
            f"jax_wonly: predicate is a {type(predicate).__name__}; accepted: a function of path and layer."
        )
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"jax_wonly: rngs is a {type(rngs).__name__}; accepted: nnx.Rngs.")
    param_dtype = check_float_dtype("param_dtype", param_dtype)
    if rank < 1:
        raise ValueError(f"jax_wonly: rank={rank} is not supported; accepted: 1 or more.")
    if isinstance(model, QuantizedLinear):
        raise ValueError(
            "jax_wonly: model is itself a layer, which cannot be replaced in place; use nnx.LoRA(base_module=model)."
        )
    adapted = {id(module.base_module) for _, module in modules(model) if isinstance(module, nnx.LoRA)}
    plan: dict[int, tuple[str, QuantizedLinear]] = {}
    for path, module in modules(model):
        if isinstance(module, QuantizedLinear) and id(module) not in adapted:
            choice = True if predicate is None else predicate(path, module)
            if not isinstance(choice, bool | np.bool_):
                raise TypeError(f"jax_wonly: predicate returned {choice!r} for {path}; accepted: True or False.")
            if choice:
                plan[id(module)] = (path, module)
    if not plan:
        raise ValueError("jax_wonly: model has no QuantizedLinear that could get an adapter; quantize it first.")

    def convert(planned: tuple[str, QuantizedLinear]) -> tuple[nnx.LoRA, str]:
        path, base = planned
        lead = base.qvalue.shape[:-3]
        lora = nnx.LoRA(
            base.in_features,
            rank,
            base.out_features,
            base_module=base,
            dtype=base.dtype,
            param_dtype=param_dtype,
            a_initializer=_stacked(default_a_initializer, lead),
            b_initializer=_stacked(default_b_initializer, lead),
            promote_dtype=_PromoteAdapters(base.param_dtype, base.promote_dtype),
            rngs=rngs,
        )
        return lora, path

    return list(replace(model, plan, convert))


def _check_model(model: Any) -> None:
    if not isinstance(model, nnx.Module):
        raise TypeError(f"jax_wonly: model is a {type(model).__name__}; accepted: an nnx.Module.")


@dataclasses.dataclass(frozen=True)
class _PromoteAdapters:
    """Casts input and adapters to the type in which the base layer computes, whatever the adapters are stored in."""

    param_dtype: Any
    promote_dtype: Callable[..., Any]

    def __call__(self, arrays: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
        x, a, b = arrays
        x, _ = self.promote_dtype((x, jnp.zeros((0,), self.param_dtype)), dtype=dtype, inexact=inexact)
        return x, a.astype(x.dtype), b.astype(x.dtype)


def _stacked(initializer: Callable[..., jax.Array], lead: tuple[int, ...]) -> Callable[..., jax.Array]:
    """``initializer``, drawn for each of the leading axes."""

    def initialize(key, shape, dtype):
        draw = lambda key: initializer(key, shape, dtype)  # noqa: E731
        for size in reversed(lead):
            draw = lambda key, draw=draw, size=size: jax.vmap(draw)(jax.random.split(key, size))  # noqa: E731
        return draw(key)

    return initialize


def merge_lora(model: nnx.Module, *, measure_error: bool = True, **options: Any) -> Report:
    """Replaces every ``nnx.LoRA`` over a ``QuantizedLinear`` by one quantized layer with the adapter in it, in place.

    The sum ``W + a @ b`` is quantized in the scheme of the base unless ``options`` say otherwise. An adapter changes
    most weights by less than a step of int4, so rounding to int4 again can lose a part of what was learned; ``bits=8``
    keeps it. When this raises, nothing has been changed.

    Args:
      model: a model with adapters.
      measure_error: whether to dequantize each weight once more for ``LayerReport.relative_error``.
      **options: arguments of ``jax_wonly.quantize``, in the place of those of the base.

    Returns:
      What was done to each layer. The bytes before are those of base and adapter, the error is that against
      ``W + a @ b``.

    Raises:
      TypeError: ``model`` is no module, or an option is unknown.
      ValueError: ``model`` is itself an adapter (use ``QuantizedLinear.from_lora``) or has none, a base has an
        activation or overrides ``__call__``, or an option does not fit a layer.

    Example:
      >>> model = nnx.Sequential(jw.nnx.QuantizedLinear(128, 64, rngs=nnx.Rngs(0)))
      >>> paths = jw.nnx.add_lora(model, rank=4, rngs=nnx.Rngs(1))
      >>> jw.nnx.merge_lora(model, bits=8).layers[0].scheme
      'int8, per channel'
    """
    _check_model(model)
    check_options(options, "merge_lora")
    if isinstance(model, nnx.LoRA):
        raise ValueError(
            "jax_wonly: model is itself an nnx.LoRA, which cannot be replaced in place; use "
            "QuantizedLinear.from_lora(model)."
        )
    bytes_before = model_bytes(model)
    plan: dict[int, tuple[str, Any]] = {}
    for path, module in modules(model):
        if isinstance(module, nnx.LoRA) and isinstance(module.base_module, QuantizedLinear):
            if refusal := refuses_merging(module.base_module):
                raise ValueError(f"jax_wonly: the adapter {path} cannot be merged into its base: {refusal}.")
            plan[id(module)] = (path, module)
    if not plan:
        raise ValueError("jax_wonly: model has no nnx.LoRA over a QuantizedLinear.")
    check_quantizable(_merged_schemes(plan, options))

    def convert(planned: tuple[str, Any]) -> tuple[QuantizedLinear, LayerReport]:
        path, lora = planned
        layer = QuantizedLinear.from_lora(lora, **options)
        merged = jax.eval_shape(lambda: merged_kernel(lora))
        arranged = (lambda: merged_kernel(lora)) if measure_error else None
        report = report_layer(path, type(lora).__name__, merged, layer.kernel, arranged)
        size = lora.base_module.kernel.nbytes + sum(nbytes(adapter[...]) for adapter in (lora.lora_a, lora.lora_b))
        return layer, dataclasses.replace(report, bytes_before=size)

    layers = tuple(replace(model, plan, convert))
    return Report(layers, (), bytes_before, model_bytes(model))


def _merged_schemes(plan: dict[int, tuple[str, Any]], options: dict[str, Any]):
    for path, lora in plan.values():
        weight = lora.base_module.kernel
        yield path, jax.ShapeDtypeStruct(weight.shape, jnp.float32), weight.shape, options_of(weight) | options
