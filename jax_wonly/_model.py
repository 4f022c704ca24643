"""What quantizing a whole model needs, whichever library it is written in: choices, checks and a report."""

import dataclasses
import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_wonly._format import GROUP_SIZES, TILE_N
from jax_wonly._quantize import _all_finite, dequantize, jit_within_memory
from jax_wonly._quantize import quantize as quantize_array
from jax_wonly._table import name_of
from jax_wonly._tensor import QuantizedTensor
from jax_wonly._validate import FLOATS

_ERROR_PIECE = 1 << 21  # weights that are dequantized at a time to measure the error


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """What quantization did to one layer.

    Attributes:
      path: such as ``"blocks/0/up"``.
      type: of the dense layer, such as ``"Linear"``.
      shape: of its kernel.
      scheme: such as ``"int4, group 128, zeros"``.
      bytes_before, bytes_after: of the dense kernel, and of what replaces it.
      relative_error: Frobenius norm of (dequantized - dense) over that of dense; None where it was not measured.

    Example:
      >>> model = nnx.Sequential(nnx.Linear(128, 64, rngs=nnx.Rngs(0)))
      >>> layer = jw.nnx.quantize(model).layers[0]
      >>> layer.path, layer.scheme, layer.bytes_before, layer.bytes_after
      ('layers/0', 'int4, per channel', 32768, 4352)
    """

    path: str
    type: str
    shape: tuple[int, ...]
    scheme: str
    bytes_before: int
    bytes_after: int
    relative_error: float | None


@dataclasses.dataclass(frozen=True)
class SkippedLayer:
    """A layer that holds a matrix and keeps it dense.

    Attributes:
      path, type, shape, bytes: as in :class:`LayerReport`.
      reason: why.

    Example:
      >>> model = nnx.Sequential(nnx.Linear(128, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 10, rngs=nnx.Rngs(1)))
      >>> kept = jw.nnx.quantize(model).skipped[0]
      >>> kept.path, kept.shape, kept.reason
      ('layers/1', (64, 10), 'group_size=128 does not divide its 64 inputs')
    """

    path: str
    type: str
    shape: tuple[int, ...]
    bytes: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What ``quantize`` did to a model. ``str`` gives a table; layers that differ by a number alone share a row.

    Attributes:
      layers: of each quantized layer its :class:`LayerReport`.
      skipped: of each other one that holds a matrix its :class:`SkippedLayer`.
      model_bytes_before, model_bytes_after: of all arrays of the model.

    Example:
      >>> model = nnx.Sequential(nnx.Linear(128, 64, rngs=nnx.Rngs(0)))
      >>> report = jw.nnx.quantize(model)
      >>> print(report)
      layer     shape     scheme             before   after   error
      layers/0  128 x 64  int4, per channel  32.8 kB  4.4 kB  9.07%
      1 of 1 layers quantized: 32.8 kB -> 4.4 kB (4.25 bits per weight); whole model 33.0 kB -> 4.6 kB
      >>> report.bytes_before, report.bytes_after
      (32768, 4352)
    """

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
        """Returns every number of the report as a JSON object, with ``indent`` as in :func:`json.dumps`."""
        return json.dumps(
            dataclasses.asdict(self) | {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after},
            indent=indent,
        )

    def __str__(self) -> str:
        rows = [("layer", "shape", "scheme", "before", "after", "error")]
        for path, group in fold(self.layers, lambda layer: (layer.shape, layer.scheme)):
            errors = [layer.relative_error for layer in group if layer.relative_error is not None]
            rows.append(
                (
                    path,
                    shape_text(group[0].shape),
                    group[0].scheme,
                    bytes_text(sum(layer.bytes_before for layer in group)),
                    bytes_text(sum(layer.bytes_after for layer in group)),
                    f"{max(errors):.2%}" if errors else "-",
                )
            )
        lines = align(rows) if self.layers else []
        weights = sum(math.prod(layer.shape) for layer in self.layers)
        lines.append(
            f"{len(self.layers)} of {len(self.layers) + len(self.skipped)} layers quantized: "
            f"{bytes_text(self.bytes_before)} -> {bytes_text(self.bytes_after)}"
            + (f" ({8 * self.bytes_after / weights:.2f} bits per weight)" if weights else "")
            + f"; whole model {bytes_text(self.model_bytes_before)} -> {bytes_text(self.model_bytes_after)}"
        )
        if self.skipped:
            rows = [("kept dense", "shape", "bytes", "why")]
            for path, kept in fold(self.skipped, lambda layer: (layer.shape, layer.reason)):
                total = bytes_text(sum(layer.bytes for layer in kept))
                rows.append((path, shape_text(kept[0].shape), total, kept[0].reason))
            lines += align(rows)
        return "\n".join(lines)


def choose(
    path: str,
    layer: Any,
    dtype: Any,
    inputs: int,
    arguments: Mapping[str, Any],
    predicate: Callable[[str, Any], bool | Mapping[str, Any]] | None,
) -> dict[str, Any] | str:
    """The arguments of ``jax_wonly.quantize`` for a layer, or why it stays dense.

    Args:
      path: of the layer.
      layer: what ``predicate`` is asked about.
      dtype: of its kernel.
      inputs: K of its kernel.
      arguments: for a layer about which ``predicate`` says no more.
      predicate: answers True, False or a dict of other arguments.

    Raises:
      TypeError: ``predicate`` answers something else, or names an unknown option.
    """
    if str(dtype) not in FLOATS:
        return f"its kernel is {dtype}, not {', '.join(FLOATS[:-1])} or {FLOATS[-1]}"
    if predicate is not None and not callable(predicate):
        raise TypeError(
            f"jax_wonly: predicate is a {type(predicate).__name__}; accepted: a function of path and layer."
        )
    choice = True if predicate is None else predicate(path, layer)
    if isinstance(choice, np.bool_):
        choice = bool(choice)
    if choice is False:
        return "the predicate says no"
    asked: Mapping[str, Any] = {}
    if isinstance(choice, Mapping):
        asked = choice
        check_options(asked, f"the predicate's answer for {path}")
    elif choice is not True:
        raise TypeError(f"jax_wonly: predicate returned {choice!r} for {path}; accepted: True, False or a dict.")
    chosen = dict(arguments) | dict(asked)
    size = chosen["group_size"]
    # Another size is a mistake, not a matter of this layer: check_quantizable tells it.
    if size in GROUP_SIZES and inputs % size and "group_size" not in asked:
        return f"group_size={size} does not divide its {inputs} inputs"
    return chosen


def check_options(options: Mapping[str, Any], where: str, but: tuple[str, ...] = ()) -> None:
    """Raises a TypeError unless ``jax_wonly.quantize`` takes every one of ``options``, and none is in ``but``."""
    accepted = [name for name in list(inspect.signature(quantize_array).parameters)[1:] if name not in but]
    for name in options:
        if name not in accepted:
            raise TypeError(f"jax_wonly: {where} has an unknown option {name!r}; accepted: {', '.join(accepted)}.")


def check_arguments(arguments: Mapping[str, Any], where: str) -> None:
    """Raises unless ``jax_wonly.quantize`` takes these arguments for some weight, whatever layers a model has."""
    check_options(arguments, where)
    size = arguments["group_size"]
    k = int(size) if isinstance(size, int | np.integer) and size > 0 else GROUP_SIZES[-1]
    jax.eval_shape(functools.partial(quantize_array, **arguments), jax.ShapeDtypeStruct((k, TILE_N), jnp.float32))


def check_quantizable(plan: Iterable[tuple[str, Any, tuple[int, ...], Mapping[str, Any]]]) -> None:
    """Tries what may fail, so that it is told before anything is replaced: arguments by tracing, and finite kernels.

    Args:
      plan: for each layer its path, its dense kernel, the shape ``[..., K, N]`` that the kernel is brought to, and the
        arguments of ``jax_wonly.quantize``.
    """
    checked = set()
    for path, kernel, shape, options in plan:
        if isinstance(kernel, jax.Array | np.ndarray) and not isinstance(kernel, Tracer) and not _all_finite(kernel):
            raise ValueError(f"jax_wonly: the kernel of {path} holds NaN or Inf; accepted: finite values.")
        key = (shape, kernel.dtype, repr(sorted(options.items())))
        if key in checked:
            continue
        checked.add(key)
        try:
            jax.eval_shape(functools.partial(quantize_array, **options), jax.ShapeDtypeStruct(shape, kernel.dtype))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error} (layer {path})") from error


def bytes_needed(kernel: Any, bits: int, copied: bool) -> int:
    """Of memory to quantize a kernel, beside itself: the codes, and the kernel again if it is to be arranged."""
    return math.prod(kernel.shape) * bits // 8 + copied * nbytes(kernel)


def name_done(error: BaseException, paths: Sequence[str], total: int, what: str) -> None:
    """Adds to an exception which of the layers were quantized before it, and what is of them now."""
    if paths:
        some = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
        error.add_note(f"jax_wonly: {len(paths)} of {total} layers had been quantized ({some}) and {what}.")


def report_layer(
    path: str, name: str, kernel: Any, weight: QuantizedTensor, arranged: Callable[[], Any] | None
) -> LayerReport:
    """The report of one layer, once its weight is there.

    Args:
      path: of the layer.
      name: of its type.
      kernel: the dense kernel in its own shape, or anything else with its shape and dtype.
      weight: the quantized one.
      arranged: gives the dense kernel as ``[..., K, N]``; None: the error is not measured.
    """
    error = None
    if not isinstance(weight.qvalue, Tracer):
        # Without this the host runs ahead, and every dense kernel is alive at once.
        jax.block_until_ready(weight)
        if arranged is not None:
            error = relative_error(arranged(), weight)
    return LayerReport(path, name, tuple(kernel.shape), scheme(weight), nbytes(kernel), weight.nbytes, error)


def scheme(weight: QuantizedTensor) -> str:
    """Such as ``"int4, group 128, zeros"``."""
    size = weight.group_size
    return (
        (f"int{weight.bits}" if weight.table is None else name_of(weight.table) or "table")
        + ", "
        + ("per channel" if size == weight.k else f"group {size}")
        + ("" if weight.zeros is None else ", zeros")
        + ("" if weight.offsets is None else ", offsets")
    )


def options_of(weight: QuantizedTensor) -> dict[str, Any]:
    """The arguments of ``jax_wonly.quantize`` that give a weight of the same scheme."""
    mode = "symmetric" if weight.offsets is None else "offsets"
    if weight.zeros is not None:
        mode = "integer_zeros" if weight.zeros.dtype == jnp.uint8 else "float_zeros"
    if weight.table is not None and (mode := name_of(weight.table)) is None:
        raise ValueError("jax_wonly: jax_wonly.quantize has no mode for a table of one's own; accepted: nf4, fp4.")
    size = None if weight.group_size == weight.k else weight.group_size
    return {"bits": weight.bits, "group_size": size, "mode": mode, "scale_dtype": weight.scales.dtype}


def relative_error(dense: jax.Array, weight: QuantizedTensor) -> float:
    """Frobenius norm of ``dequantize(weight) - dense`` over that of ``dense [..., K, N]``.

    A large weight is taken in pieces of some outputs, so that it is never dense a second time.
    """
    tiles = max(1, _ERROR_PIECE // (math.prod(dense.shape[:-1]) * TILE_N))
    total = weight.qvalue.shape[-3]
    if tiles >= total:
        sums = _error_sums(dense, weight)
    else:
        sums = jnp.zeros(2)
        for first in range(0, total, tiles):
            outputs = slice(first * TILE_N, (first + tiles) * TILE_N)
            qvalue = weight.qvalue[..., first : first + tiles, :, :]
            scales = weight.scales[..., outputs]
            zeros, offsets = (a if a is None else a[..., outputs] for a in (weight.zeros, weight.offsets))
            part = dataclasses.replace(
                weight, qvalue=qvalue, scales=scales, zeros=zeros, offsets=offsets, n=scales.shape[-1]
            )
            # Waits, for pieces of many steps would else be alive at once.
            sums = jax.block_until_ready(sums + _error_sums(dense[..., outputs], part))
    return math.sqrt(float(sums[0]) / max(float(sums[1]), float(jnp.finfo(jnp.float32).tiny)))


@jit_within_memory
def _error_sums(dense: jax.Array, weight: QuantizedTensor) -> jax.Array:
    dense = dense.astype(jnp.float32)
    difference = dequantize(weight).astype(jnp.float32) - dense
    return jnp.stack([jnp.sum(difference**2), jnp.sum(dense**2)])


def nbytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def fold(layers: Iterable[Any], key: Callable[[Any], Any]) -> list[tuple[str, list[Any]]]:
    """Groups layers whose paths differ by numbers alone and whose ``key`` is the same."""
    groups: dict[Any, list[Any]] = {}
    for layer in layers:
        # Whole parts of a path, as in blocks/0/up or blocks.0.up, and the numbers that Linen appends, as in Dense_0.
        name = re.sub(r"(?:(?<![^/.])|(?<=_))\d+(?![^/.])", "*", layer.path)
        groups.setdefault((name, key(layer)), []).append(layer)
    return [
        (group[0].path if len(group) == 1 else f"{path}  x {len(group)}", group) for (path, _), group in groups.items()
    ]


def shape_text(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))


def bytes_text(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def align(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of a table, two spaces between its columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
