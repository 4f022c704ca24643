"""Checkpoints and Flax nnx models."""

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

from jax_wonly._tensor import QuantizedTensor
from jax_wonly.compat import PermutedTensor
from jax_wonly.nnx import QuantizedLinear, QuantizedParam
from jax_wonly.progress import progress as progress_bar

Rename = Callable[[str], str | None] | Sequence[tuple[str, str | None]]

_KERNEL_NAMES = ("kernel", "embedding", "scale")  # what PyTorch calls weight


class PermutedLinear(QuantizedLinear):
    """A quantized linear layer whose inputs are gathered first: the layer of a :class:`PermutedTensor`.

    ``kernel`` has its rows in the stored order; ``permutation`` says which input each is.
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
    """What :func:`load_into` did."""

    loaded: tuple[str, ...]
    """Names in the model that got a value."""
    missing: tuple[str, ...]
    """Names in the model that the checkpoint does not have."""
    unexpected: tuple[str, ...]
    """Names in the checkpoint, after renaming, that the model does not have."""
    dequantized: tuple[str, ...]
    """Those of ``loaded`` that are dense in the model and quantized in the checkpoint."""

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
    """A place in the model: the module, and the attribute of it; ``kernel`` of a quantized layer is its weight."""

    module: nnx.Module
    attribute: str

    @property
    def shape(self) -> tuple[int, ...]:
        if isinstance(self.module, QuantizedLinear) and self.attribute == "kernel":
            return (*self.module.qvalue.shape[:-3], self.module.in_features, self.module.out_features)
        return tuple(getattr(self.module, self.attribute).shape)


def _targets(model: nnx.Module) -> Iterator[tuple[str, _Target]]:
    for path, module in nnx.iter_modules(model):
        quantized = isinstance(module, QuantizedLinear)
        if quantized:
            yield ".".join((*map(str, path), "kernel")), _Target(module, "kernel")
        for name, value in vars(module).items():
            if isinstance(value, nnx.Param | nnx.BatchStat):
                yield ".".join((*map(str, path), name)), _Target(module, name)


def tensors_of(model: nnx.Module) -> dict[str, Any]:
    """The weights and arrays of a model by name, such as ``"blocks.0.up.kernel"``: what
    :func:`jax_wonly.checkpoint.save` writes of it, and :func:`load_into` reads into it.

    Raises:
      TypeError: ``model`` is no module.
    """
    _check_model(model)
    tensors: dict[str, Any] = {}
    for name, target in _targets(model):
        module = target.module
        if isinstance(module, QuantizedLinear) and target.attribute == "kernel":
            tensors[name] = module.weight if isinstance(module, PermutedLinear) else module.kernel
        else:
            tensors[name] = getattr(module, target.attribute)[...]
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

    Where the checkpoint has a quantized weight, an ``nnx.Linear`` becomes a ``QuantizedLinear`` (a ``PermutedLinear``
    for act-order) and a quantized layer takes its scheme; other parameters take the dequantized values. Names are
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
      ValueError: ``model`` is itself a linear layer; tensors are missing or unexpected with ``strict``; two tensors
        have one name; a shape is another one; or a tensor is damaged.
    """
    _check_model(model)
    if isinstance(model, nnx.Linear | QuantizedLinear):
        raise ValueError("jax_wonly: model is itself a linear layer, which cannot be replaced in place.")
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
        if isinstance(stored, QuantizedTensor | PermutedTensor) and not isinstance(values[target], type(stored)):
            dequantized.append(target)

    quantized = {t: v for t, v in values.items() if isinstance(v, QuantizedTensor | PermutedTensor)}
    layers = {t: _quantized_layer(targets[t].module, value) for t, value in quantized.items()}
    # From here on nothing fails.
    for target, value in values.items():
        if target not in layers:
            getattr(targets[target].module, targets[target].attribute).set_value(value)
    replaced = {id(targets[target].module): layer for target, layer in layers.items()}
    _replace(model, replaced, set())
    return LoadReport(tuple(names), tuple(missing), tuple(unexpected), tuple(dequantized))


def _fitted(target: _Target, value: Any, from_torch: bool) -> Any:
    """``value`` as the place wants it: quantized for a linear layer, else dense, of its type and shape."""
    module = target.module
    if isinstance(value, QuantizedTensor | PermutedTensor):
        if target.attribute == "kernel" and _holds_quantized(module):
            _check_shape(target, value.shape)
            return value
        # An embedding [V, D] is the weight [D, V] of the products that it is made for.
        dense = value.dequantize(getattr(module, target.attribute).dtype)
        dense = jnp.swapaxes(dense, -1, -2) if target.attribute == "embedding" else dense
    elif isinstance(module, QuantizedLinear) and target.attribute == "kernel":
        raise ValueError("jax_wonly: the layer is quantized, and the checkpoint has a dense array")
    else:
        dense = jnp.asarray(value)
        if from_torch and target.attribute == "kernel" and dense.ndim >= 2:
            dense = dense.transpose(*range(2, dense.ndim), 1, 0)  # [out, in, ...] -> [..., in, out]
        dense = dense.astype(getattr(module, target.attribute).dtype)
    _check_shape(target, dense.shape)
    return dense


def _check_shape(target: _Target, found: tuple[int, ...]) -> None:
    if tuple(found) != target.shape:
        raise ValueError(f"jax_wonly: the checkpoint has shape {tuple(found)}, and the model {target.shape}")


def _holds_quantized(module: nnx.Module) -> bool:
    """Whether a layer may become a quantized one, or is."""
    if isinstance(module, QuantizedLinear):
        return True
    return (
        isinstance(module, nnx.Linear)
        and type(module).__call__ is nnx.Linear.__call__
        and module.dot_general is jax.lax.dot_general
    )


def _quantized_layer(layer: Any, value: Any) -> QuantizedLinear:
    """The layer of a weight, in everything else as ``layer``, whose bias it shares."""
    make, weight = (PermutedLinear, value.weight) if isinstance(value, PermutedTensor) else (QuantizedLinear, value)
    k, n = weight.k, weight.n
    new = nnx.eval_shape(lambda: make(k, n, bits=weight.bits, group_size=None, use_bias=False, rngs=nnx.Rngs(0)))
    for name in ("dtype", "param_dtype", "precision", "promote_dtype", "preferred_element_type", "use_bias"):
        setattr(new, name, getattr(layer, name))
    for name in ("activation", "implementation"):
        setattr(new, name, getattr(layer, name, None))
    new.bias = nnx.data(layer.bias)
    for name in ("qvalue", "scales", "zeros", "offsets"):
        array = getattr(weight, name)
        setattr(new, name, nnx.data(None) if array is None else QuantizedParam(array))
    if isinstance(new, PermutedLinear):
        new.permutation = QuantizedParam(value.permutation)
    return new


def _replace(node, replaced: Mapping[int, nnx.Module], seen: set[int]) -> Any:
    """What takes the place of ``node``: modules and containers are changed in place, tuples made anew."""
    if id(node) in replaced:
        return replaced[id(node)]
    if id(node) in seen:
        return node
    if isinstance(node, nnx.Module | list | dict):
        seen.add(id(node))
        items: Any = vars(node) if isinstance(node, nnx.Module) else node
        names: list[Any] = list(items) if isinstance(items, dict) else list(range(len(items)))
        for name in names:
            if isinstance(name, str) and name.startswith("_pytree__"):
                continue
            old = items[name]
            new = _replace(old, replaced, seen)
            if new is not old and isinstance(node, nnx.Module):
                setattr(node, name, nnx.data(new))
            elif new is not old:
                items[name] = new
    elif isinstance(node, tuple):
        new = [_replace(item, replaced, seen) for item in node]
        if any(a is not b for a, b in zip(new, node, strict=True)):
            return type(node)(*new) if hasattr(node, "_fields") else type(node)(new)
    return node
