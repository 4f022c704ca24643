"""Calibrating and quantizing Flax nnx models."""

import dataclasses
import functools
import hashlib
import inspect
import json
import math
import statistics
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

try:
    from flax import nnx
except ImportError as error:
    raise ImportError("quantizing a model needs Flax: pip install 'jax-wonly[flax]'") from error

from jax_wonly._contraction import Einsum, Kernel, Labels, dense_general
from jax_wonly._model import LayerReport, Report, check_options, check_quantizable, nbytes
from jax_wonly._model import scheme as scheme_text
from jax_wonly._quantize import quantize as quantize_array
from jax_wonly._tensor import QuantizedTensor
from jax_wonly.algorithms._awq import ScaledTensor, awq, best_input_scale
from jax_wonly.algorithms._gptq import check_gptq, gptq
from jax_wonly.algorithms._grid import Scheme
from jax_wonly.algorithms._moments import gram, output_error
from jax_wonly.algorithms._weights import absmax, hqq, minmax, mse
from jax_wonly.checkpoint.nnx import PermutedLinear, _store
from jax_wonly.compat import PermutedTensor
from jax_wonly.nnx import QuantizedConv, QuantizedEmbed, QuantizedLayer, QuantizedLinear
from jax_wonly.nnx._replace import _plan, _Planned, abstract_layer, model_bytes, modules, replace, replacement_for
from jax_wonly.progress import progress as progress_bar

METHODS: dict[str, Callable[..., Any]] = {
    "absmax": absmax,
    "minmax": minmax,
    "mse": mse,
    "hqq": hqq,
    "awq": awq,
    "gptq": gptq,
}
_CALIBRATED = ("awq", "gptq")  # those that cannot do without moments
_UNRECORDED = (QuantizedConv, QuantizedEmbed)  # a lookup has no inputs to record, and a window has many for each image
_MODES = dict.fromkeys(METHODS, "symmetric") | {"minmax": "integer_zeros", "hqq": "float_zeros"}
_SCHEME = ("bits", "group_size", "mode", "scale_dtype")

Forward = Callable[[Any, Any], Any]


class CalibrationStat(nnx.Variable):
    """What a layer has seen of its inputs, while it is calibrated.

    Example:
      >>> from jax_wonly.algorithms.nnx import CalibrationStat
      >>> issubclass(CalibrationStat, nnx.Variable), issubclass(CalibrationStat, nnx.Param)
      (True, False)
    """


class InputScale(nnx.BatchStat):
    """The factors of a layer's inputs: saved with a model's parameters, left alone by optimizers of ``nnx.Param``.

    Example:
      >>> layer = jw.algorithms.ScaledLinear(128, 64, rngs=nnx.Rngs(0))
      >>> type(layer.input_scale).__name__, layer.input_scale.shape
      ('InputScale', (128,))
    """


class ScaledLinear(QuantizedLinear):
    """A quantized linear layer whose inputs are multiplied first.

    It is the layer of a :class:`~jax_wonly.algorithms.ScaledTensor`.

    Args:
      in_features, out_features, options: as in :class:`jax_wonly.nnx.QuantizedLinear`.

    Example:
      >>> layer = jw.algorithms.ScaledLinear(128, 64, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((4, 128))).shape, type(layer.weight).__name__
      ((4, 64), 'ScaledTensor')
    """

    def __init__(self, in_features: int, out_features: int, **options: Any):
        super().__init__(in_features, out_features, **options)
        self.input_scale = InputScale(jnp.ones(in_features, self.param_dtype))

    @property
    def weight(self) -> ScaledTensor:
        """The weight ``[in_features, out_features]``."""
        return ScaledTensor(self.kernel, self.input_scale[...])

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Applies the layer over the last axis: ``[..., in_features]`` to ``[..., out_features]``."""
        return super().__call__(inputs * self.input_scale[...], out_sharding)


class Calibration(Mapping[str, jax.Array]):
    """The second moments of layers' inputs, float32 ``[..., K, K]`` by path; layers that were not called are left out.

    Made by :func:`calibrate`.

    Attributes:
      counts: how many inputs each layer has seen; of stacked layers the one that has seen the fewest.

    Example:
      >>> model = nnx.Sequential(nnx.Linear(128, 64, rngs=nnx.Rngs(0)))
      >>> calibration = jw.algorithms.calibrate(model, [jnp.ones((32, 128))])
      >>> calibration["layers/0"].shape, calibration.counts
      ((128, 128), {'layers/0': 32})
    """

    def __init__(self, moments: Mapping[str, jax.Array], counts: Mapping[str, int]):
        self._moments = dict(moments)
        self.counts = dict(counts)

    def __getitem__(self, path: str) -> jax.Array:
        return self._moments[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._moments)

    def __len__(self) -> int:
        return len(self._moments)

    def __repr__(self) -> str:
        return f"Calibration({len(self)} layers)"


@dataclasses.dataclass(frozen=True)
class ModelReport(Report):
    """What :func:`quantize_model` did to a model: a :class:`jax_wonly.nnx.Report`.

    Attributes:
      layers, skipped, model_bytes_before, model_bytes_after: as there.
      output_errors: for each layer with moments, by path, the relative error of its outputs on the calibration data,
        as :func:`jax_wonly.algorithms.output_error`.

    Example:
      >>> model = nnx.Sequential(nnx.Linear(128, 64, rngs=nnx.Rngs(0)))
      >>> report = jw.algorithms.quantize_model(model, [jnp.ones((32, 128))], method="awq")
      >>> list(report.output_errors), report.layers[0].scheme
      (['layers/0'], 'int4, per channel, input scale')
    """

    output_errors: Mapping[str, float]

    def __str__(self) -> str:
        lines = [super().__str__()]
        if self.output_errors:
            worst = max(self.output_errors, key=lambda path: self.output_errors[path])
            median = statistics.median(self.output_errors.values())
            lines.append(
                f"error of the layers' outputs on the calibration data: median {median:.2%}, largest "
                f"{self.output_errors[worst]:.2%} ({worst})"
            )
        return "\n".join(lines)


def _rows(x: jax.Array, lhs: Labels, kernel: Kernel) -> jax.Array:
    """The inputs of a contraction as ``[batch..., T, K]``."""
    length = dict(zip(lhs, x.shape, strict=True))
    free = [label for label in lhs if label not in kernel.axes]
    x = x.transpose([lhs.index(label) for label in (*kernel.batch, *free, *kernel.inputs)])
    k = math.prod(length[label] for label in kernel.inputs)
    return x.reshape(*(length[label] for label in kernel.batch), -1, k)


def _inputs(layer: Any, x: jax.Array, *args: Any, **options: Any) -> jax.Array:
    """The inputs of a call of a dense layer, as ``[batch..., T, K]``."""
    if isinstance(layer, nnx.Einsum):
        equation = Einsum.parse(options.get("einsum_str", args[0] if args else None) or layer.einsum_str)
        return _rows(x, equation.expand(x.ndim)[0], equation.kernel)
    if isinstance(layer, nnx.LinearGeneral):
        batch, axis = (tuple(sorted(int(a) % x.ndim for a in axes)) for axes in (layer.batch_axis, layer.axis))
        lhs, kernel, _ = dense_general(batch, axis, len(layer.out_features), x.ndim)
        return _rows(x, lhs, kernel)
    return x.reshape(-1, x.shape[-1])


@functools.cache
def _recording(type_: type[nnx.Module]) -> type[nnx.Module]:
    """A subclass of a layer's type that adds up what comes in."""

    def call(self: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        rows = _inputs(self, jnp.asarray(inputs), *args, **options)
        self.calibration_sum[...] += gram(rows)
        self.calibration_count[...] += rows.shape[-2]
        return type_.__call__(self, inputs, *args, **options)  # type: ignore[operator]

    return type(type_.__name__, (type_,), {"__call__": call, "__module__": type_.__module__})


def _default_forward(model: Any, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _record(
    model: nnx.Module, layers: Mapping[str, _Planned], batches: Iterable[Any], forward: Forward, progress: bool
) -> Calibration:
    """The moments of some layers of a model, which is then as it was."""
    saved = _snapshot(model)
    types = {path: type(planned.dense) for path, planned in layers.items()}
    try:
        for planned in layers.values():
            dense, shape = planned.dense, planned.arranged_shape
            dense.calibration_sum = CalibrationStat(jnp.zeros((*shape[:-2], shape[-2], shape[-2]), jnp.float32))
            # Under a transformation with an axis of stacked layers this loses that axis; batch axes share a count.
            stacked = dense.kernel.ndim - _own_axes(dense)
            dense.calibration_count = CalibrationStat(jnp.zeros(dense.kernel.shape[:stacked], jnp.int32))
            dense.__class__ = _recording(type(dense))
        if progress and isinstance(batches, Sequence) and batches:
            batches = progress_bar(batches, "calibrate", unit="batches")
        for batch in batches:
            forward(model, batch)
        moments, counts = {}, {}
        for path, planned in layers.items():
            count = planned.dense.calibration_count[...]
            total = planned.dense.calibration_sum[...]
            if not int(count.max()):
                continue
            if not bool(jnp.isfinite(total).all()):
                raise ValueError(f"jax_wonly: the inputs of {path} hold NaN or Inf; accepted: finite activations.")
            divisor = jnp.maximum(count, 1).astype(jnp.float32)
            moments[path] = total / divisor.reshape(*count.shape, *[1] * (total.ndim - count.ndim))
            counts[path] = int(count.min())
        return Calibration(moments, counts)
    finally:
        for path, planned in layers.items():
            planned.dense.__class__ = types[path]
            for name in ("calibration_sum", "calibration_count"):
                if hasattr(planned.dense, name):
                    delattr(planned.dense, name)
        nnx.update(model, saved)  # batch statistics, random streams


def _snapshot(model: nnx.Module, *filters: Any) -> Any:
    """The arrays of a model, in variables that are not the model's."""
    return jax.tree.map(lambda array: array, nnx.state(model, *filters))


def _own_axes(dense: Any) -> int:
    """The axes of a layer's kernel that are not those of stacked layers."""
    if isinstance(dense, nnx.Einsum):
        return len(Einsum.parse(dense.einsum_str).kernel.axes)
    if isinstance(dense, nnx.LinearGeneral):
        return len(dense.batch_axis) + len(dense.in_features) + len(dense.out_features)
    return 2


def _check_model(model: Any) -> None:
    if not isinstance(model, nnx.Module):
        raise TypeError(f"jax_wonly: model is a {type(model).__name__}; accepted: an nnx.Module.")


def _forward(forward: Forward | None, jit: bool) -> Forward:
    forward = _default_forward if forward is None else forward
    if not callable(forward):
        raise TypeError(f"jax_wonly: forward is a {type(forward).__name__}; accepted: a function of model and batch.")
    if not jit:
        return forward
    # One for all calls, so that the same model is compiled once.
    return _jitted_default() if forward is _default_forward else nnx.jit(forward)


@functools.cache
def _jitted_default() -> Forward:
    return nnx.jit(_default_forward)


def calibrate(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    layers: Collection[str] | None = None,
    forward: Forward | None = None,
    jit: bool = True,
    progress: bool = False,
) -> Calibration:
    """Runs a model over some batches, and records the second moments of its layers' inputs.

    ``nnx.Linear``, ``nnx.LinearGeneral`` and ``nnx.Einsum`` are recorded wherever they are called, stacked ones
    (``nnx.vmap``, ``nnx.scan`` over layers) included. The model's code is not changed, and the model is as it was
    afterwards, random streams and statistics too. Every row of an input counts, so leave out padding, or keep it rare.
    Put the model into evaluation mode first, if it has one.

    Args:
      model: the dense model.
      batches: what ``forward`` takes; a tuple or list holds the arguments of the model, a mapping its keywords.
      layers: paths such as ``"blocks/0/up"``; None: all. Moments take ``4 * K * K`` bytes a layer.
      forward: called as ``forward(model, batch)``; by default calls the model.
      jit: whether to compile ``forward`` with ``nnx.jit``.
      progress: whether to draw a progress bar on standard error, if ``batches`` is a sequence.

    Raises:
      TypeError: ``model`` is no module, or ``forward`` no function.
      ValueError: ``layers`` names something else than such a layer; there is no batch; or activations are not finite.

    Example:
      >>> model = nnx.Sequential(nnx.Linear(128, 64, rngs=nnx.Rngs(0)))
      >>> jw.algorithms.calibrate(model, [jnp.ones((32, 128))] * 2).counts
      {'layers/0': 64}
    """
    _check_model(model)
    plan, _ = _plan(model, {"group_size": None}, None, False)
    found = {p.path: p for p in plan.values() if p.type not in _UNRECORDED}
    if layers is not None:
        if unknown := sorted(set(layers) - set(found)):
            raise ValueError(
                f"jax_wonly: layers has {unknown[0]!r}, which is no layer that is recorded; accepted: "
                f"{', '.join(sorted(found)[:8])}{' ...' if len(found) > 8 else ''}."
            )
        found = {path: planned for path, planned in found.items() if path in layers}
    calibration = _record(model, found, batches, _forward(forward, jit), progress)
    if found and not calibration:
        raise ValueError("jax_wonly: batches called none of the layers; accepted: at least one batch that does.")
    return calibration


@dataclasses.dataclass(frozen=True)
class _Task:
    """A layer to quantize, and how."""

    planned: _Planned
    method: str
    options: Mapping[str, Any]  # of the method's function

    @property
    def path(self) -> str:
        return self.planned.path

    @property
    def moment_bytes(self) -> int:
        *lead, k, _ = self.planned.arranged_shape
        return 4 * math.prod(lead) * k * k

    @property
    def dense(self) -> jax.Array:
        return self.planned.type.arrange(self.planned.dense, jnp.asarray(self.planned.dense_kernel))

    def quantize(self, moments: jax.Array | None, folded: bool) -> Any:
        """The result of the method, or of what stands in for it without moments or where inputs cannot be scaled."""
        function = METHODS[self.method]
        if self.method in ("absmax", "minmax", "hqq"):
            return function(self.dense, **self.options)
        unscaled = self.method == "awq" and (folded or self.planned.type is not QuantizedLinear)
        if self.method == "mse" or (moments is not None and not unscaled):
            return function(self.dense, moments=moments, **self.options)
        scheme = {name: self.options[name] for name in _SCHEME}
        if self.options.get("clip", True) or self.method == "gptq":
            return mse(self.dense, moments, **scheme)
        return quantize_array(self.dense, **scheme)


def _tasks(
    model: nnx.Module,
    method: str,
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
    predicate: Callable[[str, Any], Any] | None,
    embeddings: bool,
):
    """What to do with each layer, in order, and what stays dense."""
    methods: dict[str, tuple[str, dict[str, Any]]] = {}

    def choose(path: str, layer: Any) -> Any:
        choice = True if predicate is None else predicate(path, layer)
        if not isinstance(choice, Mapping) and choice is not True:
            return choice
        asked = dict(choice) if isinstance(choice, Mapping) else {}
        chosen = _check_method(asked.pop("method", method), f"the predicate's answer for {path}")
        own = {name: asked.pop(name) for name in list(asked) if name in _own_options(chosen)}
        methods[path] = chosen, (dict(options) if chosen == method else {}) | own
        if "mode" not in asked and (arguments["mode"] is None or chosen != method):
            asked["mode"] = _MODES[chosen]
        return asked

    plan, skipped = _plan(model, dict(arguments), choose, embeddings)
    for planned in plan.values():
        if isinstance(planned.dense_kernel, jax.ShapeDtypeStruct):
            raise ValueError(
                f"jax_wonly: the kernel of {planned.path} is abstract; accepted: a model with its weights."
            )
    check_quantizable((p.path, p.dense_kernel, p.arranged_shape, p.options) for p in plan.values())
    tasks = []
    for planned in plan.values():
        chosen, own = methods[planned.path]
        if planned.type in _UNRECORDED and chosen in _CALIBRATED:
            chosen, own = "mse", {}
        scheme = dict(planned.options)
        mode = scheme["mode"]
        if "mode" not in _parameters(chosen):
            if mode != _MODES[chosen]:
                raise ValueError(
                    f"jax_wonly: mode={mode!r} does not go with method={chosen!r} (layer {planned.path}); accepted: "
                    f"{_MODES[chosen]!r}."
                )
            del scheme["mode"]
        if chosen == "minmax" and mode == "symmetric":
            raise ValueError(
                f"jax_wonly: mode='symmetric' does not go with method='minmax' (layer {planned.path}); use 'absmax'."
            )
        if chosen == "gptq":
            check_gptq(own.get("damping", 0.01), own.get("act_order", False))
            plain = planned.type is QuantizedLinear and len(planned.arranged_shape) == 2
            if own.get("act_order") is True and not plain:
                raise ValueError(
                    f"jax_wonly: act_order=True for {planned.path}, an nnx.{planned.type.dense_type.__name__} with a "
                    f"kernel of shape {tuple(planned.dense_kernel.shape)}; accepted there: False, 'static'."
                )
        tasks.append(_Task(planned, chosen, scheme | own))
    return tasks, skipped


def _parameters(method: str) -> Collection[str]:
    return inspect.signature(METHODS[method]).parameters


def _own_options(method: str) -> list[str]:
    return [name for name in _parameters(method) if name not in ("w", "moments", *_SCHEME)]


def _check_method(method: Any, where: str) -> str:
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(
            f"jax_wonly: method={method!r} in {where} is not supported; accepted: {', '.join(map(repr, METHODS))}."
        )
    return method


def quantize_model(
    model: nnx.Module,
    batches: Iterable[Any] | None = None,
    *,
    method: str = "gptq",
    bits: int = 4,
    group_size: int | None = 128,
    mode: str | None = None,
    scale_dtype: Any = None,
    predicate: Callable[[str, Any], bool | Mapping[str, Any]] | None = None,
    embeddings: bool = False,
    calibration: Mapping[str, jax.Array] | None = None,
    forward: Forward | None = None,
    jit: bool = True,
    max_moment_bytes: int = 4 << 30,
    fold: Mapping[str, Sequence[str]] | None = None,
    store: Any = None,
    measure_error: bool = True,
    progress: bool = False,
    **options: Any,
) -> ModelReport:
    """Replaces the layers of a model by quantized ones, in place, by any of the algorithms of this package.

    Layers are chosen and replaced as by :func:`jax_wonly.nnx.quantize`. Those whose moments do not fit into
    ``max_moment_bytes`` together are calibrated and quantized in several passes over the batches, later ones with the
    earlier layers quantized. AWQ gives ``nnx.Linear`` an input multiplier (:class:`ScaledLinear`), unless it is folded
    into what comes before; other layers get its clipping alone. ``nnx.Conv`` gets clip search where the method needs
    inputs. A layer that no batch calls is quantized by clip search without moments, with a warning.

    Args:
      model: the dense model.
      batches: for ``"awq"`` and ``"gptq"``, and optionally ``"mse"``: what :func:`calibrate` takes.
      method: ``"absmax"``, ``"minmax"``, ``"mse"``, ``"hqq"``, ``"awq"`` or ``"gptq"``.
      bits, group_size, scale_dtype: as in ``jax_wonly.quantize``.
      mode: as there; None: ``"integer_zeros"`` for ``"minmax"``, ``"float_zeros"`` for ``"hqq"``, else ``"symmetric"``.
      predicate: as in :func:`jax_wonly.nnx.quantize`; a dict may also have ``"method"`` and the options of that.
      embeddings: whether to replace ``nnx.Embed`` too, by clip search where the method needs inputs.
      calibration: what :func:`calibrate` has recorded, in the place of ``batches``.
      forward, jit: as in :func:`calibrate`.
      max_moment_bytes: of the moments that are in memory at once; a single layer may have more.
      fold: for ``"awq"``: :func:`fold_input_scales` is called with this first.
      store: a folder for the result of each layer, as soon as it is there. A later call with the same model, batches
        and arguments takes from it what is finished, and gives the same model. Needs safetensors.
      measure_error: whether to measure ``relative_error`` of each weight and, with moments, ``output_errors``.
      progress: whether to draw progress bars on standard error.
      **options: further arguments of the method, such as ``act_order``.

    Raises:
      TypeError: an argument has a wrong type, or an option is unknown.
      ValueError: an argument is outside of what is accepted; ``batches`` is needed; or ``store`` has results of other
        weights or arguments. Before the first layer is replaced the model is as it was, and afterwards ``store`` keeps
        what is done.

    Example:
      >>> model = nnx.Sequential(nnx.Linear(128, 64, rngs=nnx.Rngs(0)))
      >>> batches = [jax.random.normal(jax.random.key(0), (32, 128))]
      >>> report = jw.algorithms.quantize_model(model, batches, method="gptq")
      >>> report.layers[0].path, report.layers[0].scheme
      ('layers/0', 'int4, per channel')
    """
    _check_model(model)
    _check_method(method, "quantize_model")
    if isinstance(model, QuantizedLayer) or replacement_for(model) is not None:
        raise ValueError(f"jax_wonly: model is itself a {type(model).__name__}, which cannot be replaced in place.")
    if already := [path for path, module in modules(model) if isinstance(module, QuantizedLayer)]:
        raise ValueError(f"jax_wonly: model is quantized already ({len(already)} layers, such as {already[0]!r}).")
    for name in options:
        if name not in _own_options(method):
            raise TypeError(
                f"jax_wonly: method={method!r} has no option {name!r}; accepted: "
                f"{', '.join(_own_options(method)) or 'none'}."
            )
    arguments = {"bits": bits, "group_size": group_size, "mode": mode, "scale_dtype": scale_dtype}
    check_options(arguments, "quantize_model")
    before = model_bytes(model)
    tasks, skipped = _tasks(model, method, arguments, options, predicate, embeddings)
    if batches is not None and calibration is not None:
        raise ValueError("jax_wonly: batches and calibration are both given; accepted: one of them.")
    wanting = [task for task in tasks if task.method in _CALIBRATED]
    if wanting and batches is None and calibration is None:
        raise ValueError(
            f"jax_wonly: method={wanting[0].method!r} needs the inputs of layers; pass batches, or calibration."
        )
    if batches is not None and not isinstance(batches, Sequence):
        batches = list(batches)  # there may be several passes
    forward = _forward(forward, jit)
    saved = None if store is None else _Results(Path(store))

    folded: frozenset[str] = frozenset()
    if fold:
        if method != "awq":
            raise ValueError(f"jax_wonly: fold with method={method!r}; accepted: 'awq'.")
        if calibration is None:
            calibration = _record(model, _seen(tasks), batches or (), forward, progress)
        scheme: dict[str, Any] = arguments | {"mode": mode or _MODES[method]}
        batch = next(iter(batches), None) if batches is not None else None
        calibration = fold_input_scales(model, fold, calibration, batch=batch, forward=forward, jit=False, **scheme)
        folded = frozenset(path for consumers in fold.values() for path in consumers)

    output_errors: dict[str, float] = {}
    total = len(tasks)
    chunks = _chunks(tasks, math.inf if calibration is not None or batches is None else max_moment_bytes)
    # A dense kernel lives as long as its task.
    tasks.clear()
    wanting.clear()

    def work() -> Iterator[LayerReport]:
        for chunk in chunks:
            done = {task.path: saved.load(task, task.path in folded) for task in chunk} if saved else {}
            moments: Mapping[str, jax.Array] = calibration or {}
            if calibration is None and batches is not None:
                missing = _seen(task for task in chunk if done.get(task.path) is None)
                moments = _record(model, missing, batches, forward, progress) if missing else {}
                del missing
            unseen = [
                task.path
                for task in chunk
                if task.method in _CALIBRATED and task.path not in moments and done.get(task.path) is None
            ]
            if unseen:
                warnings.warn(
                    f"jax_wonly: no batch calls {len(unseen)} layers, such as {unseen[0]!r}; they are quantized "
                    "without moments.",
                    stacklevel=3,
                )
            while chunk:
                task = chunk.pop(0)
                value, seen = done.pop(task.path, None), moments.get(task.path)
                if value is None:
                    value = jax.block_until_ready(task.quantize(seen, task.path in folded))
                    if saved:
                        saved.save(task, task.path in folded, value)
                report = _report(task, value, measure_error)
                if measure_error and seen is not None:
                    output_errors[task.path] = output_error(task.dense, value, seen)
                layer = _layer_of(task.planned, value)
                for _ in replace(model, {id(task.planned.dense): layer}, lambda layer: (layer, None)):
                    pass
                yield report

    layers = tuple(progress_bar(work(), method, total=total, unit="layers") if progress and total else work())
    return ModelReport(layers, skipped, before, model_bytes(model), output_errors)


def _seen(tasks: Iterable[_Task]) -> dict[str, _Planned]:
    """The layers whose inputs are wanted."""
    return {
        task.path: task.planned
        for task in tasks
        if task.method in (*_CALIBRATED, "mse") and task.planned.type not in _UNRECORDED
    }


def _chunks(tasks: Sequence[_Task], limit: float) -> list[list[_Task]]:
    """Successive layers whose moments are in memory together."""
    chunks: list[list[_Task]] = [[]]
    size = 0
    for task in tasks:
        if chunks[-1] and size + task.moment_bytes > limit:
            chunks.append([])
            size = 0
        chunks[-1].append(task)
        size += task.moment_bytes
    return chunks


def _layer_of(planned: _Planned, value: Any) -> QuantizedLayer:
    """The layer that takes the place of a dense one, whose bias it shares."""
    type_ = {PermutedTensor: PermutedLinear, ScaledTensor: ScaledLinear}.get(type(value), planned.type)
    layer = abstract_layer(type_, planned.dense, bits=4, group_size=None)
    if isinstance(value, ScaledTensor):
        layer.input_scale = InputScale(value.input_scale)
        value = value.weight
    _store(layer, value)
    return layer


def _report(task: _Task, value: Any, measure_error: bool) -> LayerReport:
    planned = task.planned
    weight = value if isinstance(value, QuantizedTensor) else value.weight
    what = {PermutedTensor: ", act-order", ScaledTensor: ", input scale"}.get(type(value), "")
    return LayerReport(
        planned.path,
        type(planned.dense).__name__,
        tuple(planned.dense_kernel.shape),
        scheme_text(weight) + what,
        nbytes(planned.dense_kernel),
        value.nbytes,
        output_error(task.dense, value) if measure_error else None,
    )


class _Results:
    """The folder of finished layers: a safetensors file for each, with what it was made from."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _file(self, task: _Task) -> Path:
        return self.folder / f"{hashlib.sha256(task.path.encode()).hexdigest()[:24]}.safetensors"

    def _fingerprint(self, task: _Task, folded: bool) -> np.ndarray:
        kernel = np.asarray(task.planned.dense_kernel)
        described = {name: str(value) for name, value in task.options.items()}
        what = [task.path, task.method, described, folded, str(kernel.dtype), kernel.shape]
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode() + kernel.tobytes())
        return np.frombuffer(digest.digest(), np.uint8)

    def save(self, task: _Task, folded: bool, value: Any) -> None:
        from jax_wonly import checkpoint

        tensors = {"kernel": value, "fingerprint": self._fingerprint(task, folded)}
        if isinstance(value, ScaledTensor):
            tensors |= {"kernel": value.weight, "input_scale": value.input_scale}
        checkpoint.save(self._file(task), tensors)

    def load(self, task: _Task, folded: bool) -> Any:
        """The result of a layer, or None if it is not finished.

        Raises:
          ValueError: it is of another weight, or of other arguments.
        """
        from jax_wonly import checkpoint

        file = self._file(task)
        if not file.exists():
            return None
        tensors = checkpoint.load(file)
        found = np.asarray(tensors["fingerprint"]) if "fingerprint" in tensors else None
        if found is None or not np.array_equal(found, self._fingerprint(task, folded)):
            raise ValueError(
                f"jax_wonly: store={str(self.folder)!r} has a result for {task.path} of other weights or arguments; "
                "accepted: those with which it was begun, or another folder."
            )
        value = tensors["kernel"]
        return ScaledTensor(value, jnp.asarray(tensors["input_scale"])) if "input_scale" in tensors else value


def fold_input_scales(
    model: nnx.Module,
    fold: Mapping[str, Sequence[str]],
    calibration: Mapping[str, jax.Array],
    *,
    bits: int = 4,
    group_size: int | None = 128,
    mode: str = "symmetric",
    scale_dtype: Any = None,
    batch: Any = None,
    forward: Forward | None = None,
    jit: bool = True,
) -> Calibration:
    """Folds AWQ's input scales into the operations before, in place: a dense model that computes the same, but rounds
    better.

    Where the output of a normalisation or of a linear layer goes to linear layers and nowhere else, what AWQ would
    multiply their inputs by goes into its scale and bias (or its kernel's outputs and bias), and their kernels are
    divided by it. They share one scale, the best for all of them. Rounding their kernels, with clipping by the moments
    that are returned, is then all that is left of AWQ: :func:`quantize_model` does it with ``fold``.

    Args:
      model: the dense model.
      fold: path of an ``nnx.LayerNorm``, ``nnx.RMSNorm`` or ``nnx.Linear``, and the paths of all ``nnx.Linear`` that
        its output goes to. Such an operation must be linear on the way: no activation in between.
      calibration: what :func:`calibrate` has recorded of those layers.
      bits, group_size, mode, scale_dtype: what the kernels will be quantized to.
      batch: if given, the model is called before and after, and must compute the same but for rounding.
      forward, jit: as in :func:`calibrate`.

    Returns:
      The moments of the changed model.

    Raises:
      TypeError: ``model`` is no module.
      ValueError: a path is none of such a layer, layers do not share their input, or the model computes something else
        afterwards; the model is as it was then.

    Example:
      >>> model = nnx.Sequential(nnx.LayerNorm(128, rngs=nnx.Rngs(0)), nnx.Linear(128, 64, rngs=nnx.Rngs(1)))
      >>> batch = jax.random.normal(jax.random.key(0), (32, 128))
      >>> before, calibration = model(batch), jw.algorithms.calibrate(model, [batch])
      >>> moments = jw.algorithms.fold_input_scales(model, {"layers/0": ["layers/1"]}, calibration)
      >>> bool(jnp.allclose(model(batch), before, atol=1e-4))
      True
    """
    _check_model(model)
    found = dict(modules(model))
    moments = dict(calibration)
    call = _forward(forward, jit)
    for source, paths in fold.items():
        _check_fold(source, found.get(source), paths, [found.get(path) for path in paths], moments)
    saved, others = _snapshot(model), _snapshot(model, nnx.Not(nnx.Param))  # statistics and random streams
    before = None if batch is None else _arrays(call(model, batch))
    try:
        for source, paths in fold.items():
            previous: Any = found[source]
            kernels: list[Any] = [getattr(found[path], "kernel") for path in paths]  # noqa: B009
            scheme = Scheme.of(kernels[0][...], bits, group_size, mode, scale_dtype)
            scale = best_input_scale([k[...] for k in kernels], moments[paths[0]], scheme).astype(jnp.float32)
            outputs = [getattr(previous, name, None) for name in ("kernel", "scale", "bias")]
            for variable in (a for a in outputs if a is not None):
                variable[...] = (variable[...] * scale).astype(variable.dtype)
            for kernel in kernels:
                kernel[...] = (kernel[...] / scale[:, None]).astype(kernel.dtype)
            for path in paths:
                moments[path] = moments[path] * scale * scale[:, None]
        if before is not None:
            nnx.update(model, others)
            _check_same(before, _arrays(call(model, batch)))
            nnx.update(model, others)
    except BaseException:
        nnx.update(model, saved)
        raise
    return Calibration(moments, getattr(calibration, "counts", {}))


def _check_fold(source: str, previous: Any, paths: Sequence[str], consumers: Sequence[Any], moments) -> None:
    norm = isinstance(previous, nnx.LayerNorm | nnx.RMSNorm) and previous.scale is not None
    if not norm and not isinstance(previous, nnx.Linear):
        raise ValueError(
            f"jax_wonly: fold has {source!r}, {'no layer' if previous is None else f'a {type(previous).__name__}'}; "
            "accepted: the path of an nnx.LayerNorm or nnx.RMSNorm with a scale, or of an nnx.Linear."
        )
    if isinstance(paths, str) or not paths:
        raise ValueError(f"jax_wonly: fold[{source!r}]={paths!r}; accepted: the paths of the layers that follow.")
    size: int = getattr(previous, "scale" if norm else "kernel").shape[-1]
    for path, consumer in zip(paths, consumers, strict=True):
        if not isinstance(consumer, nnx.Linear) or consumer.kernel.ndim != 2 or consumer.kernel.shape[0] != size:
            raise ValueError(
                f"jax_wonly: fold[{source!r}] has {path!r}, which is no nnx.Linear with a kernel [{size}, N]."
            )
        if path not in moments:
            raise ValueError(f"jax_wonly: fold[{source!r}] has {path!r}, which calibration has not seen.")
        if not bool(
            jnp.allclose(moments[path], moments[paths[0]], rtol=1e-3, atol=1e-3 * jnp.abs(moments[path]).max())
        ):
            raise ValueError(f"jax_wonly: fold[{source!r}]: {paths[0]!r} and {path!r} do not have the same input.")


def _arrays(outputs: Any) -> list[jax.Array]:
    return [a for a in jax.tree.leaves(outputs) if jnp.issubdtype(jnp.asarray(a).dtype, jnp.floating)]


def _check_same(before: Sequence[jax.Array], after: Sequence[jax.Array]) -> None:
    for old, new in zip(before, after, strict=True):
        tolerance = 64 * float(jnp.finfo(old.dtype).eps) ** 0.75
        old, new = (jnp.asarray(a, jnp.float32) for a in (old, new))
        if not float(jnp.linalg.norm(new - old)) <= tolerance * float(jnp.linalg.norm(old)):
            raise ValueError(
                "jax_wonly: the model computes something else with the scales folded; accepted: an operation in fold "
                "whose output goes to the layers named there, without an activation between, and nowhere else."
            )
