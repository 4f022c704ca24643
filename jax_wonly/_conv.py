"""Convolution with quantized weights."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_wonly import _ffi
from jax_wonly._abi import Activation, ShiftMode
from jax_wonly._explicit import conv_on_mesh, explicit_mesh
from jax_wonly._matmul import matmul, resolve_activation, resolve_precision
from jax_wonly._quantize import shift_mode_of
from jax_wonly._table import check_table
from jax_wonly._tensor import QuantizedTensor, check_parts
from jax_wonly._validate import FLOATS, check_array, check_choice, check_finite, check_float_dtype, check_weights
from jax_wonly.primitives.conv import Params, Window
from jax_wonly.primitives.conv import conv as _bind

_PADDINGS = ("SAME", "SAME_LOWER", "VALID")


def conv_general_dilated(
    lhs,
    rhs: QuantizedTensor,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision=None,
    preferred_element_type=None,
    *,
    bias: Any = None,
    activation: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """:func:`jax.lax.conv_general_dilated` with quantized weights: ``activation(conv(lhs, w) + bias)``.

    The weight is that of a kernel ``[*window, inputs / feature_group_count, outputs]``, as Flax keeps it ("HWIO"):
    ``quantize(kernel)``, whose leading axes are the taps of the window. Scales go along the inputs of each tap; arrays
    of scales whose leading axes broadcast with the window, such as ``[1, 1, groups, N]``, serve several taps.

    A window of one tap is :func:`jax_wonly.matmul`. Differentiable in lhs, scales, floating zeros, offsets and bias.

    Args:
      lhs: float16, bfloat16 or float32 images, with any number of spatial axes.
      rhs: a :class:`QuantizedTensor` ``[*window, K, N]``.
      window_strides: integers from 1 on, one for each spatial axis.
      padding: ``"SAME"``, ``"SAME_LOWER"``, ``"VALID"``, or a pair (low, high) for each spatial axis.
      lhs_dilation, rhs_dilation: integers from 1 on, one for each spatial axis; None: 1. Names of paddings go with an
        lhs_dilation of 1 alone.
      dimension_numbers: as in JAX, a triple such as ``("NCHW", "HWIO", "NCHW")`` or a
        :class:`jax.lax.ConvDimensionNumbers`; that of the weight ends in IO. None: ``("NHWC", "HWIO", "NHWC")``, unlike
        JAX, whose default is no layout of such weights.
      feature_group_count: into how many groups the features of lhs and the outputs are split.
      batch_group_count: 1.
      precision, preferred_element_type: as in :func:`jax_wonly.matmul`.
      bias: floating ``[N]``, or None.
      activation, implementation: as in :func:`jax_wonly.matmul`.

    Returns:
      The images, laid out as dimension_numbers says. With 16-bit lhs and dequantized weights, sums may be rounded to
      16 bits before the bias is added.

    Raises:
      TypeError: an argument has a wrong type or dtype.
      ValueError: shapes do not fit, or an option is not one of those accepted.

    Example:
      >>> x = jnp.ones((1, 8, 8, 64))
      >>> kernel = jw.quantize(jnp.ones((3, 3, 64, 32)), group_size=64)
      >>> y = jw.conv_general_dilated(x, kernel, (2, 2), "SAME", bias=jnp.ones(32), activation="relu")
      >>> y.shape, float(y[0, 1, 1, 0])
      ((1, 4, 4, 32), 577.0)
    """
    if not isinstance(rhs, QuantizedTensor):
        raise TypeError(
            f"jax_wonly: rhs is a {type(rhs).__name__}; accepted: a QuantizedTensor [*window, K, N] (use "
            "jax.lax.conv_general_dilated for arrays)."
        )
    check_array("lhs", lhs)
    check_parts("rhs", rhs)
    bits, k, n = check_weights(rhs.qvalue, rhs.scales, rhs.zeros, rhs.offsets, bits=rhs.bits, k=rhs.k)
    table = check_table(rhs.table, bits, rhs.zeros, rhs.offsets)
    ndim, spatial = len(lhs.shape), len(lhs.shape) - 2
    if ndim < 2 or rhs.ndim != ndim:
        raise ValueError(
            f"jax_wonly: lhs has shape {tuple(lhs.shape)} and rhs {rhs.shape}; accepted: images, features and spatial "
            "axes, and a window of as many spatial axes, K and N."
        )
    image, order, result = _dimension_numbers(dimension_numbers, lhs.shape, rhs.shape)
    sizes = [lhs.shape[i] for i in image[1:-1]]
    window_size = tuple(rhs.shape[i] for i in order)
    if 0 in window_size:
        raise ValueError(f"jax_wonly: rhs has shape {rhs.shape}; accepted: a window of at least one tap.")
    groups = _integer("feature_group_count", feature_group_count)
    if _integer("batch_group_count", batch_group_count) != 1:
        raise ValueError(f"jax_wonly: batch_group_count={batch_group_count} is not supported; accepted: 1.")
    features = lhs.shape[image[-1]]
    if features != groups * k or n % groups:
        raise ValueError(
            f"jax_wonly: lhs has shape {tuple(lhs.shape)}, {features} features, rhs {rhs.shape}, and "
            f"feature_group_count={groups}; accepted: {groups * k} features, and outputs that the groups divide."
        )
    strides = _integers("window_strides", window_strides, spatial)
    lhs_dilation, rhs_dilation = (
        (1,) * spatial if given is None else _integers(name, given, spatial)
        for name, given in (("lhs_dilation", lhs_dilation), ("rhs_dilation", rhs_dilation))
    )
    pads = _padding(padding, sizes, window_size, strides, lhs_dilation, rhs_dilation)
    window = Window(window_size, strides, pads, lhs_dilation, rhs_dilation)
    if bias is not None:
        check_array("bias", bias, FLOATS)
        if tuple(bias.shape) != (n,):
            raise ValueError(f"jax_wonly: bias has shape {tuple(bias.shape)}; accepted: [{n}].")
        check_finite("bias", bias)
    out_dtype = lhs.dtype
    if preferred_element_type is not None:
        out_dtype = check_float_dtype("preferred_element_type", preferred_element_type)
    params = Params(
        bits=bits,
        shift_mode=shift_mode_of(rhs.zeros, rhs.offsets),
        has_bias=bias is not None,
        activation=resolve_activation(activation),
        k=k,
        window=window,
        feature_groups=groups,
        out_dtype=jnp.dtype(out_dtype),
        precision=resolve_precision(precision),
        implementation=_ffi.resolve_implementation(implementation),
        table=table,
    )
    qw, *parameters = (
        a if a is None else _taps(name, a, rank, rhs.shape[:-2], order)
        for name, a, rank in (
            ("qvalue", rhs.qvalue, 3),
            ("scales", rhs.scales, 2),
            ("zeros", rhs.zeros, 2),
            ("offsets", rhs.offsets, 2),
        )
    )
    operands = [a for a in (lhs, qw, *parameters, bias) if a is not None]
    return _convolve(*operands, params=params, image=image, result=result)


@partial(jax.jit, static_argnames=("params", "image", "result"), inline=True)
def _convolve(lhs, qw, scales, *rest, params: Params, image: tuple[int, ...], result: tuple[int, ...]):
    p = params
    x = lhs.transpose(image)
    if p.window.taps == 1 and p.feature_groups == 1:
        zeros = rest[0][0] if p.shift_mode == ShiftMode.ZEROS else None
        offsets = rest[0][0] if p.shift_mode == ShiftMode.OFFSETS else None
        weight = QuantizedTensor(
            qw[0], scales[0], zeros, offsets, bits=p.bits, k=p.k, n=scales.shape[-1], table=p.table
        )
        y = matmul(
            p.window.taps_of(x)[0],
            weight,
            bias=rest[-1] if p.has_bias else None,
            activation=None if p.activation == Activation.NONE else p.activation.name.lower(),
            preferred_element_type=p.out_dtype,
            precision=p.precision,
            implementation=p.implementation,
        )
    else:
        operands = (x, qw, scales, *rest)
        mesh = explicit_mesh(operands)
        bind = partial(_bind, params=p)
        y = bind(*operands) if mesh is None else conv_on_mesh(mesh, bind, operands, p)
    return y.transpose(np.argsort(result))


def _dimension_numbers(given, lhs_shape, rhs_shape) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The axes of lhs and of the result as (images, *spatial, features), and those of the window in spatial order."""
    ndim = len(lhs_shape)
    if given is None:
        channels_last = tuple(range(ndim))
        return channels_last, channels_last[: ndim - 2], channels_last
    try:
        numbers = lax.conv_dimension_numbers(lhs_shape, rhs_shape, given)
        specs = [tuple(int(i) for i in spec) for spec in numbers]
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"jax_wonly: dimension_numbers={given!r} do not fit lhs of shape {tuple(lhs_shape)} and rhs of shape "
            f"{tuple(rhs_shape)}: {error}"
        ) from error
    (images, features, *spatial), (outputs, inputs, *window), (*of_result,) = specs
    if any(sorted(spec) != list(range(ndim)) for spec in specs) or (inputs, outputs) != (ndim - 2, ndim - 1):
        raise ValueError(
            f"jax_wonly: dimension_numbers={given!r} is not supported; accepted: those whose weight ends in IO, such "
            "as ('NHWC', 'HWIO', 'NHWC') and ('NCHW', 'HWIO', 'NCHW')."
        )
    return (images, *spatial, features), tuple(window), (of_result[0], *of_result[2:], of_result[1])


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"jax_wonly: {name}={value!r} is not an integer; accepted: integers from 1 on.")
    if value < 1:
        raise ValueError(f"jax_wonly: {name}={value}; accepted: integers from 1 on.")
    return int(value)


def _integers(name: str, values: Any, count: int) -> tuple[int, ...]:
    if not isinstance(values, Sequence | np.ndarray) or isinstance(values, str) or getattr(values, "ndim", 1) != 1:
        raise TypeError(f"jax_wonly: {name}={values!r}; accepted: a sequence of {count} integers.")
    if len(values) != count:
        raise ValueError(f"jax_wonly: {name}={values!r} has {len(values)} entries; accepted: {count}.")
    return tuple(_integer(f"{name}[{i}]", value) for i, value in enumerate(values))


def _padding(padding, sizes, window, strides, lhs_dilation, rhs_dilation) -> tuple[tuple[int, int], ...]:
    if isinstance(padding, str):
        check_choice("padding", padding.upper(), _PADDINGS)
        if any(d != 1 for d in lhs_dilation):
            raise ValueError(
                f"jax_wonly: padding={padding!r} with lhs_dilation={lhs_dilation} is not supported; accepted: pairs "
                "(low, high)."
            )
        dilated = [(size - 1) * d + 1 for size, d in zip(window, rhs_dilation, strict=True)]
        padding = lax.padtype_to_pads(sizes, dilated, strides, padding.upper())
    try:
        pads = tuple((low, high) for low, high in padding)
    except (TypeError, ValueError):
        raise TypeError(
            f"jax_wonly: padding={padding!r}; accepted: {', '.join(map(repr, _PADDINGS))}, or a pair (low, high) for "
            "each spatial axis."
        ) from None
    if len(pads) != len(window):
        raise ValueError(f"jax_wonly: padding={padding!r} has {len(pads)} pairs; accepted: {len(window)}.")
    if any(isinstance(v, bool) or not isinstance(v, int | np.integer) for pair in pads for v in pair):
        raise TypeError(f"jax_wonly: padding={padding!r}; accepted: pairs of integers.")
    return tuple((int(low), int(high)) for low, high in pads)


def _taps(name: str, a, rank: int, window: tuple[int, ...], order: tuple[int, ...]) -> jax.Array:
    """An array of the weight with its leading axes as one, in the order of the spatial axes; 1 where taps share."""
    lead, own = a.shape[: len(a.shape) - rank], a.shape[len(a.shape) - rank :]
    try:
        fits = np.broadcast_shapes(lead, window) == window
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"jax_wonly: rhs.{name} has shape {tuple(a.shape)}; accepted: leading axes that broadcast to the window "
            f"{list(window)}."
        )
    a = jnp.asarray(a)
    if all(size == 1 for size in lead):
        return a.reshape(1, *own)
    a = jnp.broadcast_to(a, (*window, *own))
    return a.transpose(*order, *range(len(window), a.ndim)).reshape(-1, *own)
