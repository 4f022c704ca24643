"""Checkpoints and Flax nnx models."""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

try:
    from flax import nnx
except ImportError as error:
    raise ImportError("loading into a model needs Flax: pip install 'jax-wonly[flax]'") from error

from jax_wonly._permuted import PermutedTensor
from jax_wonly._tensor import QuantizedTensor
from jax_wonly.nnx import QuantizedLayer, QuantizedLinear, QuantizedParam
from jax_wonly.nnx._replace import abstract_layer, arranged_shape, replace, replacement_for
from jax_wonly.progress import progress as progress_bar

Rename = Callable[[str], str | None] | Sequence[tuple[str, str | None]]

_Weight = QuantizedTensor | PermutedTensor
_KERNEL_NAMES = ("kernel", "embedding", "scale")  # what PyTorch calls weight


class PermutedLinear(QuantizedLinear):
    """A quantized linear layer whose inputs are gathered first: the layer of a :class:`~jax_wonly.PermutedTensor`.

    ``kernel`` has its rows in the stored order; ``permutation`` says which input each is.

    Args:
      in_features, out_features, options: as in :class:`jax_wonly.nnx.QuantizedLinear`.

    Example:
      >>> layer = jw.checkpoint.PermutedLinear(128, 64, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((4, 128))).shape, type(layer.weight).__name__
      ((4, 64), 'PermutedTensor')
    """

    def __init__(self, in_features: int, out_features: int, **options: Any):
        super().__init__(in_features, out_features, **options)
        self.permutation = QuantizedParam(jnp.arange(in_features, dtype=jnp.int32))

    @property
    def weight(self) -> PermutedTensor:
        """The weight ``[in_features, out_features]``."""
        return PermutedTensor(self.kernel, self.permutation[...])

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Applies the layer over the last axis: ``[..., in_features]`` to ``[..., out_features]``."""
        return super().__call__(jnp.take(inputs, self.permutation[...], axis=-1), out_sharding)


@dataclass(frozen=True)
class LoadReport:
    """What :func:`load_into` did.

    Attributes:
      loaded: names in the model that got a value.
      missing: names in the model that the checkpoint does not have.
      unexpected: names in the checkpoint, after renaming, that the model does not have.
      dequantized: those of ``loaded`` that are dense in the model and quantized in the checkpoint.

    Example:
      >>> model = nnx.Sequential(nnx.Linear(128, 64, rngs=nnx.Rngs(0)))
      >>> report = jw.checkpoint.load_into(model, {"layers.0.weight": jw.quantize(jnp.ones((128, 64)))}, strict=False)
      >>> print(report)
      1 tensors loaded, 0 of them dequantized
      1 missing in the checkpoint: layers.0.bias
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    dequantized: tuple[str, ...]

    def __str__(self) -> str:
        done = f"{len(self.loaded)} tensors loaded, {len(self.dequantized)} of them dequantized"
        return "\n".join([done, *_misfits(self.missing, self.unexpected)])


def _misfits(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    return [
        f"{len(names)} {title}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
        for title, names in (("missing in the checkpoint", missing), ("not in the model", unexpected))
        if names
    ]


@dataclass(frozen=True)
class _Target:
    """A place in the model: the module, and the attribute of it that takes a tensor."""

    module: Any
    attribute: str

    @property
    def layer_type(self) -> type[QuantizedLayer] | None:
        """What the module is or becomes with a quantized weight here; None where there cannot be one."""
        type_ = type(self.module) if isinstance(self.module, QuantizedLayer) else replacement_for(self.module)
        if type_ is None or self.attribute != type_.parameter:
            return None
        return type_ if isinstance(self.module, type_) or type_.refuses(self.module) is None else None

    @property
    def variable(self) -> nnx.Variable:
        return getattr(self.module, self.attribute)


def _targets(model: nnx.Module) -> Iterator[tuple[str, _Target]]:
    for path, module in nnx.iter_modules(model):
        if isinstance(module, QuantizedLayer):
            yield ".".join((*map(str, path), module.parameter)), _Target(module, module.parameter)
        for name, value in vars(module).items():
            if isinstance(value, nnx.Param | nnx.BatchStat):
                yield ".".join((*map(str, path), name)), _Target(module, name)


def tensors_of(model: nnx.Module) -> dict[str, Any]:
    """The weights and arrays of a model by name, such as ``"blocks.0.up.kernel"``: what
    :func:`jax_wonly.checkpoint.save` writes of it, and :func:`load_into` reads into it.

    Raises:
      TypeError: ``model`` is no module.

    Example:
      >>> model = nnx.Sequential(jw.nnx.QuantizedLinear(128, 64, rngs=nnx.Rngs(0)))
      >>> sorted(jw.checkpoint.tensors_of(model))
      ['layers.0.bias', 'layers.0.kernel']
    """
    _check_model(model)
    tensors: dict[str, Any] = {}
    for name, target in _targets(model):
        module = target.module
        if isinstance(module, QuantizedLayer) and target.layer_type:
            tensors[name] = module.weight if isinstance(module, PermutedLinear) else module.kernel
        else:
            tensors[name] = target.variable[...]
    return tensors


def _check_model(model: Any) -> None:
    if not isinstance(model, nnx.Module):
        raise TypeError(f"jax_wonly: model is a {type(model).__name__}; accepted: an nnx.Module.")


def _renamed(name: str, rename: Rename) -> str | None:
    """The name in the model; None: the tensor is left out."""
    if callable(rename):
        return rename(name)
    for pattern, replacement in rename:
        if replacement is None:
            if re.search(pattern, name):
                return None
        else:
            name = re.sub(pattern, replacement, name)
    return name


def load_into(
    model: nnx.Module,
    checkpoint: Mapping[str, Any],
    rename: Rename = (),
    *,
    strict: bool = True,
    progress: bool = False,
) -> LoadReport:
    """Puts the tensors of a checkpoint into a Flax nnx model, in place.

    Where the checkpoint has a quantized weight, a layer that :func:`jax_wonly.nnx.quantize` knows becomes a quantized
    one (an ``nnx.Linear`` with act-order a ``PermutedLinear``), and one that is quantized already takes its scheme;
    other parameters take the dequantized values. Names are
    paths such as ``"blocks.0.up.kernel"``; ``.weight`` finds ``kernel``, ``embedding`` or ``scale``, and a dense
    ``.weight`` that becomes a ``kernel`` is transposed from PyTorch's layout. Dense arrays take the type of the
    parameter. The model may be abstract (``nnx.eval_shape``), and then costs no memory of its own. When this raises,
    nothing has been changed.

    Args:
      model: a module with layers below it.
      checkpoint: a :class:`~jax_wonly.checkpoint.Checkpoint`, or any mapping of names to weights and arrays.
      rename: ``(pattern, replacement)`` pairs for ``re.sub``, applied in turn to each name of the checkpoint; a
        replacement of None leaves out the names in which the pattern is found. Or a function of the name, which returns
        the name in the model, or None.
      strict: whether missing and unexpected tensors are an error; else they are reported.
      progress: whether to draw a progress bar on standard error.

    Returns:
      What was loaded, and what was not.

    Raises:
      TypeError: ``model`` is no module.
      ValueError: ``model`` is itself such a layer; tensors are missing or unexpected with ``strict``; two tensors
        have one name; a shape is another one; or a tensor is damaged.

    Example:
      >>> model = nnx.Sequential(nnx.Linear(128, 64, use_bias=False, rngs=nnx.Rngs(0)))
      >>> tensors = {"model.up.weight": jw.quantize(jnp.ones((128, 64)))}
      >>> report = jw.checkpoint.load_into(model, tensors, rename=[("^model.up", "layers.0")])
      >>> report.loaded, type(model.layers[0]).__name__
      (('layers.0.kernel',), 'QuantizedLinear')
    """
    _check_model(model)
    if isinstance(model, QuantizedLayer) or replacement_for(model) is not None:
        raise ValueError(f"jax_wonly: model is itself a {type(model).__name__}, which cannot be replaced in place.")
    targets = dict(_targets(model))
    sources: dict[str, tuple[str, bool]] = {}
    unexpected = []
    for name in checkpoint:
        renamed = _renamed(name, rename)
        if renamed is None:
            continue
        renamed = renamed.replace("/", ".")
        target = renamed
        if target not in targets and renamed.endswith(".weight"):
            base = renamed.removesuffix("weight")
            target = next((base + own for own in _KERNEL_NAMES if base + own in targets), renamed)
        if target not in targets:
            unexpected.append(renamed)
            continue
        if target in sources:
            raise ValueError(f"jax_wonly: {sources[target][0]!r} and {name!r} are both {target!r} in the model.")
        sources[target] = name, target != renamed
    missing = [name for name in targets if name not in sources]
    if strict and (missing or unexpected):
        raise ValueError(f"jax_wonly: the checkpoint does not fit: {'; '.join(_misfits(missing, unexpected))}.")

    values: dict[str, Any] = {}
    dequantized = []
    names = list(sources)
    for target in progress_bar(names, "load", unit="tensors") if progress and names else names:
        name, from_torch = sources[target]
        stored = checkpoint[name]
        try:
            values[target] = _fitted(targets[target], stored, from_torch)
        except ValueError as error:
            raise ValueError(f"{error} ({name!r} for {target!r})") from error
        if isinstance(stored, _Weight) and not isinstance(values[target], type(stored)):
            dequantized.append(target)

    layers = {t: _layer_for(targets[t], v) for t, v in values.items() if isinstance(v, _Weight)}
    # From here on nothing fails.
    for target, value in values.items():
        if target in layers:
            _store(layers[target], value)
        else:
            targets[target].variable.set_value(value)
    replaced = {id(targets[t].module): layer for t, layer in layers.items() if layer is not targets[t].module}
    for _ in replace(model, replaced, lambda layer: (layer, None)):
        pass
    return LoadReport(tuple(names), tuple(missing), tuple(unexpected), tuple(dequantized))


def _fitted(target: _Target, value: Any, from_torch: bool) -> Any:
    """``value`` as the place wants it: quantized where a layer can be, else dense, of its type and shape."""
    type_ = target.layer_type
    is_quantized = type_ is not None and isinstance(target.module, QuantizedLayer)
    if isinstance(value, _Weight):
        if type_ is not None and (
            isinstance(value, QuantizedTensor) or isinstance(target.module, nnx.Linear | QuantizedLinear)
        ):
            expected = target.module.kernel.shape if is_quantized else arranged_shape(type_, target.module)
            _check_shape(value.shape, expected)
            return value
        if is_quantized:
            raise ValueError("jax_wonly: the layer is quantized, and cannot take a weight with permuted inputs")
        # An embedding [V, D] is the weight [D, V] of the products that it is made for.
        dense = value.dequantize(target.variable.dtype)
        dense = jnp.swapaxes(dense, -1, -2) if target.attribute == "embedding" else dense
    elif is_quantized:
        raise ValueError("jax_wonly: the layer is quantized, and the checkpoint has a dense array")
    else:
        dense = jnp.asarray(value)
        if from_torch and target.attribute == "kernel" and dense.ndim >= 2:
            dense = dense.transpose(*range(2, dense.ndim), 1, 0)  # [out, in, ...] -> [..., in, out]
        dense = dense.astype(target.variable.dtype)
    _check_shape(dense.shape, target.variable.shape)
    return dense


def _check_shape(found: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(found) != tuple(expected):
        raise ValueError(f"jax_wonly: the checkpoint has shape {tuple(found)}, and the model {tuple(expected)}")


def _layer_for(target: _Target, value: _Weight) -> QuantizedLayer:
    """The layer that takes a weight: that of the model, or a new one that is so in everything else."""
    layer, permuted = target.module, isinstance(value, PermutedTensor)
    if not isinstance(layer, QuantizedLayer):
        type_: Any = PermutedLinear if permuted else target.layer_type
        return abstract_layer(type_, layer, group_size=None)
    if not permuted or isinstance(layer, PermutedLinear):
        return layer
    make = functools.partial(PermutedLinear, layer.k, layer.n, group_size=None, use_bias=False)
    new = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    for name in set(vars(new)) - {"permutation", "qvalue", "scales", "zeros", "offsets"}:
        if not name.startswith("_pytree__"):
            value = getattr(layer, name)
            setattr(new, name, nnx.data(value) if name == "bias" else value)
    return new


def _store(layer: Any, value: _Weight) -> None:
    weight = value.weight if isinstance(value, PermutedTensor) else value
    for name in ("qvalue", "scales", "zeros", "offsets"):
        array = getattr(weight, name)
        setattr(layer, name, nnx.data(None) if array is None else QuantizedParam(array))
    layer.bits, layer.table = weight.bits, nnx.static(weight.table)
    if isinstance(layer, PermutedLinear):
        same = jnp.arange(weight.k, dtype=jnp.int32)
        layer.permutation = QuantizedParam(value.permutation if isinstance(value, PermutedTensor) else same)
