"""Quantized parameters for Flax Linen::

    params, report = jax_wonly.linen.quantize(variables["params"], bits=4, group_size=128)
    y = jax_wonly.linen.apply(model, {"params": params}, x)

The model stays as it is. In its parameters every quantized kernel is a :class:`jax_wonly.QuantizedTensor` in the place
of an array, and ``apply`` lets ``nn.Dense``, ``nn.DenseGeneral``, ``nn.Einsum``, ``nn.Conv`` and ``nn.Embed`` multiply
with it.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

try:
    from flax import errors, serialization, traverse_util
    from flax import linen as nn
    from flax.core import FrozenDict
    from flax.linen.dtypes import promote_dtype as default_promote_dtype
    from flax.linen.linear import default_kernel_init
except ImportError as error:
    raise ImportError("jax_wonly.linen needs Flax: pip install 'jax-wonly[flax]'") from error

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jax_wonly._contraction import Einsum, Kernel, as_tuple, contract, dense_general
from jax_wonly._conv_layer import convolve
from jax_wonly._einsum import dot_general
from jax_wonly._matmul import matmul
from jax_wonly._model import (
    LayerReport,
    Report,
    SkippedLayer,
    bytes_needed,
    check_arguments,
    check_options,
    check_quantizable,
    choose,
    name_done,
    nbytes,
    report_layer,
)
from jax_wonly._quantize import quantize as quantize_array
from jax_wonly._take import take_outputs
from jax_wonly._tensor import QuantizedTensor
from jax_wonly.progress import progress as progress_bar

__all__ = [
    "DotGeneral",
    "Layer",
    "QuantizedConv",
    "QuantizedDense",
    "apply",
    "intercept",
    "kernel_init",
    "layers",
    "promote_dtype",
    "quantize",
]

Predicate = Callable[[str, Any], bool | Mapping[str, Any]]

_DENSE = Kernel(("k", "n"), (), ("k",), ("n",))
_EMBED = Kernel(("n", "k"), (), ("k",), ("n",))  # the table [rows, features] of the product that attend is


@dataclasses.dataclass(frozen=True)
class Layer:
    """How a layer uses its kernel.

    Attributes:
      type: the layer's type, such as ``"DenseGeneral"``.
      shape: of the kernel that one application sees, without the axes of ``nn.scan`` and ``nn.vmap``.
      kernel: the parts that the axes of ``shape`` play; None if the layer cannot use a quantized kernel.
      refusal: why it cannot.

    Example:
      >>> model = linen.DenseGeneral((4, 16))
      >>> variables = model.init(jax.random.key(0), jnp.ones((1, 128)))
      >>> layer = jw.linen.layers(model, variables, jnp.ones((1, 128)))[""]
      >>> layer.type, layer.shape
      ('DenseGeneral', (128, 4, 16))
    """

    type: str
    shape: tuple[int, ...]
    kernel: Kernel | None
    refusal: str | None = None


def layers(model: nn.Module, variables: Any, *args: Any, **kwargs: Any) -> dict[str, Layer]:
    """Finds the layers of a model by applying it abstractly: nothing is computed.

    ``quantize`` needs this where the shape of a kernel does not say what its axes are: ``nn.DenseGeneral`` (so
    attention), ``nn.Einsum``, ``nn.Conv``, and layers stacked by ``nn.scan`` or ``nn.vmap``.

    Args:
      model: the model.
      variables: as for ``model.apply``, of arrays or of ``jax.ShapeDtypeStruct``.
      args, kwargs: further arguments of ``model.apply``.

    Returns:
      The layers that were applied, by path, such as ``"blocks/attention/query"``.

    Raises:
      TypeError: ``model`` is no Linen module.
      ValueError: ``variables`` hold quantized kernels. What the model raises where shapes do not fit passes through.

    Example:
      >>> model = linen.MultiHeadDotProductAttention(num_heads=4)
      >>> x = jnp.ones((1, 5, 128))
      >>> variables = jax.eval_shape(model.init, jax.random.key(0), x)
      >>> sorted(jw.linen.layers(model, variables, x))
      ['key', 'out', 'query', 'value']
    """
    _check_model(model)
    leaves = jax.tree.leaves(variables, is_leaf=lambda leaf: isinstance(leaf, QuantizedTensor))
    if any(isinstance(leaf, QuantizedTensor) for leaf in leaves):
        raise ValueError("jax_wonly: variables hold quantized kernels; accepted: those that quantize is to be given.")
    found: dict[str, Layer] = {}

    def record(next_fun, args, kwargs, context):
        module = context.module
        type_ = _layer_type(module)
        if type_ is not None and context.method_name in ("__call__", "attend"):
            shape = jnp.shape(nn.meta.unbox(module.get_variable("params", _parameter(type_))))
            path, name = "/".join(module.path), type(module).__name__
            try:
                found[path] = Layer(name, shape, _contraction(module, type_, *args, **kwargs)[1])
            except ValueError as error:
                found[path] = Layer(name, shape, None, str(error).removeprefix("jax_wonly: ").removesuffix("."))
        return next_fun(*args, **kwargs)

    with nn.intercept_methods(record):
        jax.eval_shape(lambda variables: model.apply(variables, *args, **kwargs), variables)
    return found


def quantize(
    params: Mapping[str, Any],
    bits: int = 4,
    group_size: int | None = 128,
    predicate: Predicate | None = None,
    progress: bool = False,
    *,
    layers: Mapping[str, Layer] | None = None,
    embeddings: bool = False,
    donate: bool = False,
    measure_error: bool = True,
    **options: Any,
) -> tuple[Mapping[str, Any], Report]:
    """Quantizes the kernels in the parameters of a model.

    Without ``layers``, every parameter called ``kernel`` with two axes is taken for that of an ``nn.Dense``. What
    stays dense is listed in ``Report.skipped`` with the reason.

    Args:
      params: the collection ``variables["params"]``, of arrays, or of ``jax.ShapeDtypeStruct``, of which the quantized
        form is abstract too: what a checkpoint of quantized parameters is restored to.
      bits: 4 or 8.
      group_size: how many inputs share a scale, as in ``jax_wonly.quantize``; inputs of several axes are counted along
        all of them, the last one fastest.
      predicate: called as ``predicate(path, kernel)`` for each layer, with a path such as ``"blocks/Dense_0"`` and its
        dense kernel. False keeps the layer dense, True quantizes it, and a dict quantizes it with other arguments:
        ``bits``, ``group_size``, or any of ``options``.
      progress: whether to draw a progress bar on standard error.
      layers: what :func:`layers` found.
      embeddings: whether to quantize the tables of ``nn.Embed`` too, as in ``jax_wonly.nnx.quantize``.
      donate: whether to delete every dense kernel once it is quantized, so that dense and quantized parameters are
        never in memory together. ``params`` cannot be used afterwards. The kernel that takes the most memory is the
        first, so that memory which does not suffice is noticed before anything is deleted.
      measure_error: whether to dequantize each weight once more for ``LayerReport.relative_error``.
      **options: further arguments of ``jax_wonly.quantize``.

    Returns:
      ``(params, report)``: the parameters with a :class:`jax_wonly.QuantizedTensor` ``[stacked..., batch..., K, N]`` in
      the place of each quantized kernel, for :func:`apply`, and what was done to each layer.

    Raises:
      TypeError: ``params`` is no mapping, an option is unknown, or ``predicate`` returns neither a bool nor a dict.
      ValueError: ``params`` holds other collections or quantized kernels, or a group size that ``predicate`` asked for
        does not divide the inputs of its layer.

    Example:
      >>> model = linen.Sequential([linen.Dense(64), linen.Dense(10)])
      >>> params = model.init(jax.random.key(0), jnp.ones((1, 128)))["params"]
      >>> params, report = jw.linen.quantize(params, bits=4, group_size=64)
      >>> params["layers_0"]["kernel"]
      QuantizedTensor(int4[128, 64], group_size=64, symmetric, scales float32, 4.5 KiB)
      >>> jw.linen.apply(model, {"params": params}, jnp.ones((4, 128))).shape
      (4, 10)
    """
    if not isinstance(params, Mapping):
        raise TypeError(f"jax_wonly: params is a {type(params).__name__}; accepted: a mapping, variables['params'].")
    if not isinstance(layers, Mapping | None) or any(not isinstance(one, Layer) for one in (layers or {}).values()):
        raise TypeError(f"jax_wonly: layers={layers!r}; accepted: what jax_wonly.linen.layers returned.")
    if "params" in params:
        raise ValueError("jax_wonly: params has the entry 'params'; accepted: the parameters, variables['params'].")
    arguments = {"bits": bits, "group_size": group_size, **options}
    check_arguments(arguments, "quantize")
    flat: dict[tuple[str, ...], Any] = traverse_util.flatten_dict(params, keep_empty_nodes=True)
    already = ["/".join(path) for path, value in flat.items() if isinstance(value, QuantizedTensor)]
    if already:
        raise ValueError(
            f"jax_wonly: params are quantized already ({len(already)} kernels: {', '.join(already[:3])}); quantize "
            "them once, and choose for each layer with predicate."
        )
    bytes_before = _bytes_of(flat)

    plan: dict[tuple[str, ...], tuple[str, Kernel, dict[str, Any]]] = {}
    skipped = []
    for path, value in flat.items():
        if len(getattr(nn.meta.unbox(value), "shape", ())) < 2 or path[-1] == "bias":
            continue
        where = "/".join(path[:-1])
        layer = _layer_of(path, value, layers, embeddings)
        name = path[-1] if isinstance(layer, str) else layer.type
        if isinstance(layer, str):
            chosen: dict[str, Any] | str = layer
        elif layer.kernel is None:
            chosen = layer.refusal or ""
        else:
            inputs = _arranged_shape(layer.kernel, value)[-2]
            chosen = choose(where, value, value.dtype, inputs, arguments, predicate)
            if not isinstance(chosen, str):
                plan[path] = name, layer.kernel, chosen
                continue
        dense = nn.meta.unbox(value)
        skipped.append(SkippedLayer("/".join(path), name, tuple(dense.shape), nbytes(dense), str(chosen)))
    check_quantizable(
        ("/".join(path[:-1]), flat[path], _arranged_shape(kernel, flat[path]), chosen)
        for path, (_, kernel, chosen) in plan.items()
    )

    def needed(path: tuple[str, ...]) -> int:
        return bytes_needed(flat[path], plan[path][2]["bits"], plan[path][1] != _DENSE)

    # The one that needs the most memory goes first: what would not fit fails before anything is deleted.
    largest = max(plan, key=needed, default=None)
    order = list(flat)

    done: dict[tuple[str, ...], LayerReport] = {}

    def work():
        for path in sorted(plan, key=lambda path: path != largest):
            name, kernel, chosen = plan[path]
            dense = flat.pop(path)
            arranged = None
            if isinstance(dense, jax.ShapeDtypeStruct):
                weight = jax.eval_shape(lambda w: quantize_array(kernel.arrange(w), **chosen), dense)  # noqa: B023
            else:
                arranged = functools.partial(kernel.arrange, jnp.asarray(dense))
                weight = quantize_array(arranged(), **chosen)
            report = report_layer("/".join(path[:-1]), name, dense, weight, arranged if measure_error else None)
            flat[path] = weight
            del arranged
            if donate and isinstance(dense, jax.Array) and not isinstance(dense, Tracer):
                dense.delete()
            done[path] = report
            yield report

    try:
        for _ in progress_bar(work(), "quantize", total=len(plan), unit="layers") if progress and plan else work():
            pass
    except BaseException as error:
        if donate:
            name_done(error, [report.path for report in done.values()], len(plan), "their dense kernels are deleted")
        raise
    result: Mapping[str, Any] = traverse_util.unflatten_dict({path: flat[path] for path in order})
    if isinstance(params, FrozenDict):
        result = FrozenDict(result)
    return result, Report(tuple(done[path] for path in plan), tuple(skipped), bytes_before, _bytes_of(flat))


def _layer_of(path: tuple[str, ...], value: Any, layers: Mapping[str, Layer] | None, embeddings: bool) -> Layer | str:
    """The layer that a parameter is the kernel of, or why it stays dense."""
    if isinstance(value, nn.meta.AxisMetadata):
        return f"it is boxed in a {type(value).__name__}; nn.unbox the parameters first"
    if path[-1] not in ("kernel", "embedding"):
        return "it is neither a kernel nor an embedding"
    if layers is None:
        if len(value.shape) > 2:
            return f"what its {len(value.shape)} axes are is not known: pass layers=jax_wonly.linen.layers(model, ...)"
        kernel, name = (_DENSE, "Dense") if path[-1] == "kernel" else (_EMBED, "Embed")
        layer = Layer(name, tuple(value.shape), kernel)
    elif (layer := layers.get("/".join(path[:-1]))) is None:
        return "no Dense, DenseGeneral, Einsum, Conv or Embed was seen to use it"
    if path[-1] == "embedding" and not embeddings:
        return "embeddings=True was not asked for"
    if value.shape[len(value.shape) - len(layer.shape) :] != layer.shape:
        return (
            f"it has shape {tuple(value.shape)}, not {layer.shape} with leading axes, as the layer was seen to use it"
        )
    return layer


def _arranged_shape(kernel: Kernel, value: Any) -> tuple[int, ...]:
    return jax.eval_shape(kernel.arrange, jax.ShapeDtypeStruct(value.shape, value.dtype)).shape


def _bytes_of(flat: Mapping[tuple[str, ...], Any]) -> int:
    return sum(nbytes(leaf) for leaf in jax.tree.leaves(nn.meta.unbox(dict(flat.items()))) if hasattr(leaf, "dtype"))


@contextlib.contextmanager
def intercept() -> Iterator[None]:
    """Within this context, Linen's layers multiply with quantized kernels where their parameters hold some.

    It has to be there while a model is traced, so inside of the function that is compiled, or around its first call.

    Example:
      >>> model = linen.Dense(64)
      >>> params, report = jw.linen.quantize(model.init(jax.random.key(0), jnp.ones((1, 128)))["params"])
      >>> with jw.linen.intercept():
      ...     y = model.apply({"params": params}, jnp.ones((4, 128)))
      >>> y.shape
      (4, 64)
    """
    with nn.intercept_methods(_intercept):
        yield


def apply(model: nn.Module, variables: Any, *args: Any, **kwargs: Any) -> Any:
    """``model.apply(variables, *args, **kwargs)`` within :func:`intercept`.

    Args:
      model: the model.
      variables: its variables, with parameters that :func:`quantize` returned.
      args, kwargs: further arguments of ``model.apply``.

    Returns:
      What ``model.apply`` does.

    Raises:
      TypeError: ``model`` is no Linen module, or a module that is none of Linen's linear layers holds a quantized
        kernel.
      ValueError: a kernel does not fit its layer or the input.

    Example:
      >>> model = linen.Dense(64)
      >>> params, report = jw.linen.quantize(model.init(jax.random.key(0), jnp.ones((1, 128)))["params"])
      >>> jw.linen.apply(model, {"params": params}, jnp.ones((4, 128))).shape
      (4, 64)
    """
    _check_model(model)
    with intercept():
        return model.apply(variables, *args, **kwargs)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"jax_wonly: model is a {type(model).__name__}; accepted: a flax.linen.Module.")


def _intercept(next_fun, args, kwargs, context):
    module = context.module
    if module.scope is None or isinstance(module, QuantizedDense | QuantizedConv):
        return next_fun(*args, **kwargs)
    name = "embedding" if isinstance(module, nn.Embed) else "kernel"
    weight = module.get_variable("params", name) if module.has_variable("params", name) else None
    if not isinstance(weight, QuantizedTensor):
        return next_fun(*args, **kwargs)
    type_ = _layer_type(module)
    if type_ is None:
        try:  # a lifted layer, such as nn.vmap(nn.Dense), comes here again as the layer itself
            return next_fun(*args, **kwargs)
        except errors.ScopeParamShapeError as error:
            raise TypeError(
                f"jax_wonly: {'/'.join(module.path)} is a {type(module).__name__}, which does not know how to use its "
                "quantized kernel; keep it dense with predicate, or pass layers to quantize."
            ) from error
    if context.method_name == "setup":
        return None  # which would look for a dense table
    if context.method_name == "attend":
        return _attend(module, weight, *args, **kwargs)
    if context.method_name == "__call__":
        return {nn.Embed: _embed, nn.Conv: _convolve}.get(type_, _product)(module, weight, *args, **kwargs)
    return next_fun(*args, **kwargs)


def _layer_type(module: nn.Module) -> Any:
    """Which of Linen's layers a module is, unless it overrides what that computes; else None."""
    for type_ in (nn.Dense, nn.DenseGeneral, nn.Einsum, nn.Conv, nn.Embed):
        if isinstance(module, type_):
            same = [getattr(type(module), m) is getattr(type_, m) for m in ("__call__", "attend") if hasattr(type_, m)]
            return type_ if all(same) else None
    return None


def _parameter(type_: type[nn.Module]) -> str:
    return "embedding" if type_ is nn.Embed else "kernel"


def _contraction(
    module: Any, type_: Any, inputs: Any, einsum_str: str | None = None
) -> tuple[tuple[Any, ...], Kernel, tuple[Any, ...]]:
    """The labels of input, kernel and result of a layer.

    Raises:
      ValueError: the layer cannot use a quantized kernel.
    """
    if type_ is nn.Embed:
        return (), _EMBED, ()
    ndim = jnp.ndim(inputs)
    if type_ is nn.Einsum:
        equation = Einsum.parse(nn.merge_param("einsum_str", module.einsum_str, einsum_str))
        lhs, result = equation.expand(ndim)
        return lhs, equation.kernel, result
    if type_ is nn.Conv:
        if module.mask is not None:
            raise ValueError("jax_wonly: it has a mask.")
        if module.conv_general_dilated not in (None, jax.lax.conv_general_dilated) or module.conv_general_dilated_cls:
            raise ValueError("jax_wonly: its conv_general_dilated is not jax.lax.conv_general_dilated.")
        window = tuple(range(len(as_tuple(module.kernel_size))))
        return (), Kernel((*window, "k", "n"), window, ("k",), ("n",)), ()
    if module.dot_general not in (None, jax.lax.dot_general) or module.dot_general_cls not in (None, DotGeneral):
        raise ValueError("jax_wonly: its dot_general is not jax.lax.dot_general.")
    if type_ is nn.Dense:
        return dense_general((), (ndim - 1,), 1, ndim)
    # Linen sorts its axes too.
    batch, axis = (tuple(sorted(a % ndim for a in as_tuple(axes))) for axes in (module.batch_dims, module.axis))
    return dense_general(batch, axis, len(as_tuple(module.features)), ndim)


def _product(module: Any, weight: QuantizedTensor, inputs: Any, einsum_str: str | None = None) -> jax.Array:
    """What ``nn.Dense``, ``nn.DenseGeneral`` or ``nn.Einsum`` computes."""
    inputs = jnp.asarray(inputs)
    type_ = _layer_type(module)
    if type_ is nn.Einsum:
        lhs, kernel, result = _contraction(module, type_, inputs, einsum_str)
        sizes = kernel.sizes(module.shape)
    else:
        lhs, kernel, result = _contraction(module, type_, inputs)
        sizes = dict(zip(lhs, inputs.shape, strict=True)) | dict(
            zip(kernel.outputs, as_tuple(module.features), strict=True)
        )
    shape = tuple(
        math.prod(sizes[label] for label in labels)
        for labels in (*((label,) for label in kernel.batch), kernel.inputs, kernel.outputs)
    )
    if weight.shape != shape:
        raise ValueError(
            f"jax_wonly: the quantized kernel of {'/'.join(module.path)} has shape {weight.shape}; accepted for an "
            f"input of shape {inputs.shape}: {shape}."
        )
    bias = module.get_variable("params", "bias") if module.use_bias else None
    inputs, _, bias = module.promote_dtype(inputs, _like(weight), bias, dtype=module.dtype)
    return contract(
        inputs,
        weight,
        lhs,
        kernel,
        result,
        sizes,
        nn.meta.unbox(bias),
        precision=module.precision,
        preferred_element_type=getattr(module, "preferred_element_type", None),
    )


def _convolve(module: Any, weight: QuantizedTensor, inputs: Any) -> jax.Array:
    """What ``nn.Conv`` computes."""
    _contraction(module, nn.Conv, inputs)
    inputs = jnp.asarray(inputs)
    window = as_tuple(module.kernel_size)
    shape = (*window, inputs.shape[-1] // module.feature_group_count, module.features)
    if weight.shape != shape:
        raise ValueError(
            f"jax_wonly: the quantized kernel of {'/'.join(module.path)} has shape {weight.shape}; accepted for an "
            f"input of shape {inputs.shape}: {shape}."
        )
    bias = module.get_variable("params", "bias") if module.use_bias else None
    inputs, _, bias = module.promote_dtype(inputs, _like(weight), nn.meta.unbox(bias), dtype=module.dtype)
    return convolve(inputs, weight, bias, module, precision=module.precision)


def _embed(module: Any, weight: QuantizedTensor, inputs: Any) -> jax.Array:
    inputs = jnp.asarray(inputs)
    (like,) = module.promote_dtype(_like(weight), dtype=module.dtype, inexact=False)
    # As in nn.Embed, a table of one row is broadcast whatever the integers are.
    return take_outputs(weight, jnp.zeros_like(inputs) if module.num_embeddings == 1 else inputs, like.dtype)


def _attend(module: Any, weight: QuantizedTensor, query: Any) -> jax.Array:
    query, _ = module.promote_dtype(query, _like(weight), dtype=module.dtype)
    return matmul(query, weight)


def _like(weight: QuantizedTensor) -> jax.Array:
    """Stands for the dense kernel where types are promoted."""
    return jnp.zeros((0,), weight.dtype)


def kernel_init(
    initializer: Callable[..., jax.Array] = default_kernel_init,
    *,
    bits: int = 4,
    group_size: int | None = 128,
    **options: Any,
) -> Callable[..., QuantizedTensor]:
    """Returns an initializer that quantizes what ``initializer`` draws.

    Args:
      initializer: called with a key, a shape ``[..., K, N]`` and a type.
      bits, group_size, options: arguments of ``jax_wonly.quantize``.

    Returns:
      A function of key, shape and type that gives a :class:`jax_wonly.QuantizedTensor`.

    Raises:
      TypeError: an option is unknown.
      TypeError, ValueError: the initializer that is returned raises what ``jax_wonly.quantize`` does.

    Example:
      >>> draw = jw.linen.kernel_init(bits=8, group_size=64)
      >>> draw(jax.random.key(0), (128, 64))
      QuantizedTensor(int8[128, 64], group_size=64, symmetric, scales float32, 8.5 KiB)
    """

    check_options(options, "kernel_init")

    def initialize(key, shape, dtype=jnp.float32):
        return quantize_array(initializer(key, shape, dtype), bits=bits, group_size=group_size, **options)

    return initialize


def promote_dtype(*arrays: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
    """Flax's ``promote_dtype``, to which a quantized kernel counts with the type of its scales and stays as it is.

    Args:
      arrays: arrays, quantized weights or None.
      dtype: what to promote to; None: what the arrays promote to.
      inexact: whether that must be a floating type.

    Returns:
      A list of the arrays in that type, quantized ones as they came.

    Raises:
      ValueError: ``inexact`` with a ``dtype`` that is not floating.

    Example:
      >>> kernel = jw.quantize(jnp.ones((128, 64), jnp.bfloat16))
      >>> x, same = jw.linen.promote_dtype(jnp.ones((4, 128), jnp.float32), kernel)
      >>> x.dtype, same is kernel
      (dtype('float32'), True)
    """
    like = [_like(array) if isinstance(array, QuantizedTensor) else array for array in arrays]
    promoted = default_promote_dtype(*like, dtype=dtype, inexact=inexact)
    return [old if isinstance(old, QuantizedTensor) else new for old, new in zip(arrays, promoted, strict=True)]


class DotGeneral:
    """``jax.lax.dot_general`` for a kernel that may be quantized: the ``dot_general_cls`` of ``nn.Dense``.

    It needs no interception. The kernel reaches it as a :class:`jax_wonly.QuantizedTensor` from a layer such as that of
    the example, whose parameters are those that :func:`quantize` makes of a dense layer in the same scheme.

    Example:
      >>> layer = linen.Dense(
      ...     64,
      ...     kernel_init=jw.linen.kernel_init(bits=4, group_size=128),
      ...     promote_dtype=jw.linen.promote_dtype,
      ...     dot_general_cls=jw.linen.DotGeneral,
      ... )
      >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 128)))
      >>> layer.apply(variables, jnp.ones((4, 128))).shape
      (4, 64)
    """

    def __call__(
        self, lhs: Any, rhs: Any, dimension_numbers: Any, precision: Any = None, preferred_element_type: Any = None
    ) -> jax.Array:
        """The product, as ``jax.lax.dot_general`` orders its axes; with a quantized ``rhs``, as
        ``jax_wonly.dot_general`` does.
        """
        product: Any = dot_general if isinstance(rhs, QuantizedTensor) else jax.lax.dot_general
        return product(lhs, rhs, dimension_numbers, precision, preferred_element_type)


class QuantizedDense(nn.Module):
    """``nn.Dense`` with int4 or int8 weights; needs no interception.

    The kernel is initialised, quantized and dropped. The parameters are those that :func:`quantize` makes of an
    ``nn.Dense``, whatever their scheme.

    Attributes:
      features: N, the size of the last axis of the output.
      bits: 4 or 8.
      group_size: how many inputs share a scale, as in ``jax_wonly.quantize``.
      quantize_options: further arguments of ``jax_wonly.quantize``.
      activation: applied to the product after the bias, as in ``jax_wonly.matmul``.
      implementation: as in ``jax_wonly.matmul``.
      use_bias, dtype, param_dtype, precision, kernel_init, bias_init, promote_dtype: as in ``nn.Dense``.

    Example:
      >>> layer = jw.linen.QuantizedDense(64, bits=8, activation="relu")
      >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 128)))
      >>> variables["params"]["kernel"]
      QuantizedTensor(int8[128, 64], group_size=128, symmetric, scales float32, 8.2 KiB)
      >>> layer.apply(variables, jnp.ones((4, 128))).shape
      (4, 64)
    """

    features: int
    bits: int = 4
    group_size: int | None = 128
    quantize_options: Mapping[str, Any] | None = None
    activation: str | None = None
    implementation: str | None = None
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Callable[..., jax.Array] = default_kernel_init
    bias_init: Callable[..., jax.Array] = nn.initializers.zeros_init()
    promote_dtype: Callable[..., Any] = default_promote_dtype

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Applies the layer over the last axis: ``[..., K]`` to ``[..., features]``.

        Raises:
          ValueError: the kernel in the parameters is dense, or has another number of outputs.
        """
        inputs, weight, bias, options = _operands(self, inputs, (jnp.shape(inputs)[-1], self.features))
        return matmul(inputs, weight, bias=bias, **options)


class QuantizedConv(nn.Module):
    """``nn.Conv`` with int4 or int8 weights; needs no interception.

    The kernel is initialised, quantized and dropped. The parameters are those that :func:`quantize` makes of an
    ``nn.Conv``, whatever their scheme; every tap of the window has scales of its own.

    Attributes:
      features, kernel_size, strides, padding, input_dilation, kernel_dilation: as in ``nn.Conv``.
      feature_group_count, use_bias, dtype, param_dtype, precision, kernel_init, bias_init, promote_dtype: as there.
      bits, group_size, quantize_options, activation, implementation: as in :class:`QuantizedDense`.

    Example:
      >>> layer = jw.linen.QuantizedConv(32, (3, 3), strides=2, group_size=64)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 8, 8, 64)))
      >>> variables["params"]["kernel"]
      QuantizedTensor(int4[3, 3, 64, 32], group_size=64, symmetric, scales float32, 19.1 KiB)
      >>> layer.apply(variables, jnp.ones((1, 8, 8, 64))).shape
      (1, 4, 4, 32)
    """

    features: int
    kernel_size: int | Sequence[int]
    strides: int | Sequence[int] | None = 1
    padding: Any = "SAME"
    input_dilation: int | Sequence[int] | None = 1
    kernel_dilation: int | Sequence[int] | None = 1
    feature_group_count: int = 1
    bits: int = 4
    group_size: int | None = 128
    quantize_options: Mapping[str, Any] | None = None
    activation: str | None = None
    implementation: str | None = None
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Callable[..., jax.Array] = default_kernel_init
    bias_init: Callable[..., jax.Array] = nn.initializers.zeros_init()
    promote_dtype: Callable[..., Any] = default_promote_dtype

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Applies the layer: ``[*batch, *spatial, K]`` to ``[*batch, *spatial, features]``.

        Raises:
          ValueError: the kernel in the parameters is dense, or has another shape.
        """
        shape = (*as_tuple(self.kernel_size), jnp.shape(inputs)[-1] // self.feature_group_count, self.features)
        inputs, weight, bias, options = _operands(self, inputs, shape)
        return convolve(inputs, weight, bias, self, **options)


def _operands(module: Any, inputs: jax.Array, shape: tuple[int, ...]) -> tuple[Any, QuantizedTensor, Any, dict]:
    """Input, kernel and bias of a layer of this module, promoted, and the options of its product."""
    weight = _kernel_of(module, shape)
    draw = (module.bias_init, (module.features,), module.param_dtype)
    bias = module.param("bias", *draw) if module.use_bias else None
    inputs, _, bias = module.promote_dtype(inputs, _like(weight), bias, dtype=module.dtype)
    options = {name: getattr(module, name) for name in ("activation", "precision", "implementation")}
    return inputs, weight, bias, options


def _kernel_of(module: Any, shape: tuple[int, ...]) -> QuantizedTensor:
    """The kernel of a layer of this module, drawn where there is none yet."""
    if module.has_variable("params", "kernel"):
        weight = module.get_variable("params", "kernel")
    else:
        options = module.quantize_options or {}
        draw = kernel_init(module.kernel_init, bits=module.bits, group_size=module.group_size, **options)
        weight = module.param("kernel", draw, shape, module.param_dtype)
    if not isinstance(weight, QuantizedTensor) or weight.shape[weight.ndim - len(shape) :] != shape:
        kind = "quantized" if isinstance(weight, QuantizedTensor) else "dense"
        raise ValueError(
            f"jax_wonly: the kernel of {'/'.join(module.path)} is {kind} and has shape {tuple(weight.shape)}; "
            f"accepted: a quantized one [..., {', '.join(map(str, shape))}]."
        )
    return weight


def _to_state_dict(weight: QuantizedTensor) -> dict[str, Any]:
    return {part: array for part in _PARTS if (array := getattr(weight, part)) is not None}


def _from_state_dict(weight: QuantizedTensor, state: dict[str, Any]) -> QuantizedTensor:
    expected = _to_state_dict(weight)
    like, found = (
        {part: (tuple(array.shape), str(array.dtype)) for part, array in arrays.items()} for arrays in (expected, state)
    )
    if like != found:
        raise ValueError(f"jax_wonly: the state of a quantized kernel has the arrays {found}; accepted here: {like}.")
    return dataclasses.replace(weight, **state)


# For flax.serialization.to_bytes and from_bytes, which write state dicts of what they know.
_PARTS = ("qvalue", "scales", "zeros", "offsets")
serialization.register_serialization_state(QuantizedTensor, _to_state_dict, _from_state_dict, override=True)
