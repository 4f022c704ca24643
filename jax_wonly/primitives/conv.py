"""``wonly_conv``: convolution with packed weights.

Operands ``x[B, *sizes, C]``, ``qw u32[T, Nt, Kt, 512]`` of the T taps of the window in row-major order, K = C /
``feature_groups`` inputs each, ``scales[T or 1, G, N]``, then ``shift[T or 1, G, N]`` unless ``shift_mode`` is NONE,
then ``bias[N]`` if ``has_bias``. Result ``[B, *sizes, N]``. With a ``table``, a static parameter, codes index its 16
values; there is no shift then.

The operation is linear in ``x``, and its tangent the same primitive; other tangents, and cotangents, go through the
dequantized weights.
"""

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping
from jax.interpreters import ad, batching

from jax_wonly import _abi, _ffi
from jax_wonly._abi import Activation, ShiftMode
from jax_wonly._format import tile_k
from jax_wonly._table import Table, as_operand
from jax_wonly._validate import GROUP_SIZES
from jax_wonly.primitives import dequantize
from jax_wonly.primitives import matmul as _matmul
from jax_wonly.primitives._common import align_varying, make_primitive, may_round, register_lowerings
from jax_wonly.primitives.matmul import (
    ACTIVATIONS,
    PRODUCTS,
    before_activation,
    compute_dtype,
    dense_precision,
    split_rest,
)
from jax_wonly.primitives.matmul_sharding import (
    RuleBuilder,
    allow_partitioning,
    axes_of,
    named,
    splits,
    unnamed_partition,
    usable,
    with_partitioning,
)

conv_p = make_primitive("wonly_conv")
PRODUCTS.add(conv_p)

# Output pixels up to which a CPU gathers the inputs of every window for a packed product (measured on two
# cores with AVX-512): the weights are read once, while XLA's convolution gathers float32 inputs of many pixels better.
_GATHERED_PIXELS = 256
_GATHERED_BYTES = 64 << 20  # what they may take where activations have 16 bits, whatever the number of pixels


class Window(NamedTuple):
    """How a window moves, for each spatial axis; as the arguments of ``jax.lax.conv_general_dilated``."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]

    @property
    def taps(self) -> int:
        return math.prod(self.size)

    def results(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The spatial sizes of the result for those of x."""
        out = []
        for size, window, stride, (low, high), lhs, rhs in zip(sizes, *self, strict=True):
            room = (size and (size - 1) * lhs + 1) + low + high - ((window - 1) * rhs + 1)
            out.append(room // stride + 1 if room >= 0 else 0)
        return tuple(out)

    def taps_of(self, x) -> list[jax.Array]:
        """For every tap the inputs ``[B, *results, C]`` that it meets."""
        results = self.results(x.shape[1:-1])
        pads = [(low, high, d - 1) for (low, high), d in zip(self.padding, self.lhs_dilation, strict=True)]
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *pads, (0, 0, 0)])
        taps = []
        for tap in range(self.taps):
            starts = []
            for size, dilation in zip(reversed(self.size), reversed(self.rhs_dilation), strict=True):
                starts.insert(0, tap % size * dilation)
                tap //= size
            ends = [s + (r - 1) * d + 1 for s, r, d in zip(starts, results, self.strides, strict=True)]
            taps.append(lax.slice(x, [0, *starts, 0], [x.shape[0], *ends, x.shape[-1]], [1, *self.strides, 1]))
        return taps


class Params(NamedTuple):
    """The static parameters of one convolution."""

    bits: int
    shift_mode: ShiftMode
    has_bias: bool
    activation: Activation
    k: int
    window: Window
    feature_groups: int
    out_dtype: Any
    precision: lax.Precision | None
    implementation: str | None
    table: Table | None = None


def conv(x, qw, scales, *rest, params: Params) -> jax.Array:
    """Binds the primitive; shapes and dtypes are the caller's responsibility."""
    return conv_p.bind(*align_varying(x, qw, scales, *rest), params=params)


# Evaluation.


def _dense(x, w, p: Params) -> jax.Array:
    """The convolution with dense weights ``w[T, K, N]``, in their type."""
    spatial = tuple(range(1, x.ndim - 1))
    image = (0, x.ndim - 1, *spatial)
    kernel = (x.ndim - 1, x.ndim - 2, *(i - 1 for i in spatial))
    return lax.conv_general_dilated(
        x.astype(w.dtype),
        w.reshape(*p.window.size, *w.shape[1:]),
        *p.window[1:],
        dimension_numbers=lax.ConvDimensionNumbers(image, kernel, image),
        feature_group_count=p.feature_groups,
        precision=dense_precision(w.dtype, p.precision),
    )


def epilogue(y, bias, p: Params) -> jax.Array:
    y = y.astype(jnp.float32)
    if bias:
        y = y + bias[0].astype(jnp.float32)
    return ACTIVATIONS[p.activation](y).astype(p.out_dtype)


def _weight_options(p: Params) -> dict[str, Any]:
    return {"bits": p.bits, "shift_mode": p.shift_mode, "k": p.k, "table": p.table}


def _via_dense(dequantized, x, qw, scales, *rest, p: Params, platform: str) -> jax.Array:
    # XLA's convolutions on CPUs are made for float32, and slower by far in 16 bits.
    dtype = jnp.dtype(jnp.float32) if platform == "cpu" else compute_dtype(x.dtype, p.precision)
    shift, bias = split_rest(rest, p.shift_mode)
    return epilogue(_dense(x, dequantized(qw, scales, *shift, dtype=dtype, **_weight_options(p)), p), bias, p)


def _evaluate(x, qw, scales, *rest, params: Params, platform: str):
    p = params
    shape = _result_shape(x, scales, p)
    if any(isinstance(s, int) and s == 0 for s in (*shape, x.shape[-1])):
        _, bias = split_rest(rest, p.shift_mode)
        return epilogue(jnp.zeros(shape, jnp.float32), bias, p)
    if not _ffi.use_native(p.implementation, platform):
        return _via_dense(dequantize.reference, x, qw, scales, *rest, p=p, platform=platform)
    return _partitioned(partial(_native, platform=platform), x, qw, scales, *rest, params=p)


def _native(x, qw, scales, *rest, params: Params, platform: str):
    """What one device computes of its shards."""
    p = params
    if platform == "cpu" and _gathers(x, scales, p):
        return _gathered(x, qw, scales, *rest, p=p, platform=platform)
    if platform == "cuda":
        shift, _ = split_rest(rest, p.shift_mode)
        x = _as_precise(x, scales, shift, p)
        if (kernel := _cuda_kernel(x, scales, shift, p)) is not None:
            return kernel(x, qw, scales, *rest, p=p)
    return _via_dense(dequantize.ffi_call, x, qw, scales, *rest, p=p, platform=platform)


def _as_precise(x, scales, shift, p: Params) -> jax.Array:
    """Activations as precise as is asked for: rounded, where kernels take only those."""

    def takes(x) -> bool:
        return _cuda_kernel(x, scales, shift, p._replace(implementation=None)) is not None

    if not may_round(x.dtype, p.precision) or p.implementation == "dequantize" or takes(x):
        return x
    rounded = x.astype(jnp.bfloat16)
    return rounded if p.implementation == "cuda" or takes(rounded) else x


def _cuda_kernel(x, scales, shift, p: Params) -> Callable[..., jax.Array] | None:
    """The CUDA kernel that runs; None where the weights are dequantized for XLA's convolution."""
    if p.implementation == "dequantize":
        return None
    from jax_wonly import _cuda_dispatch

    shape, window = _result_shape(x, scales, p), p.window
    kernel, wanted = None, False
    if all(isinstance(size, int) for size in (*x.shape, *shape)):
        pixels, n = math.prod(shape[:-1]), shape[-1]
        bands = _cuda_dispatch.band_conv_time(x.shape, x.dtype, p.k, n, p.feature_groups, shape[1:-1], window)
        if p.feature_groups > 1:
            if _cuda_dispatch.direct_conv_kernel(x.shape, x.dtype, p.k, n, p.feature_groups, shape[1:-1], window):
                kernel = _direct
                wanted = _cuda_dispatch.use_direct_conv(pixels, p.k, n, p.feature_groups, window, bands)
        elif (
            len(window.size) in (1, 2)
            and p.table is None
            # The kernel rounds zeros and offsets to the type of x, and takes scales of theirs alone.
            and (not shift or shift[0].dtype == jnp.uint8 or shift[0].dtype == scales.dtype == x.dtype)
            and _cuda_dispatch.conv_kernel(x.dtype, p.k, x.shape[1:-1], shape[1:-1], window)
        ):
            kernel, shift_dtype = _implicit, shift[0].dtype if shift else None
            wanted = _cuda_dispatch.use_conv(
                *(pixels, p.k, n, window, p.bits, x.dtype, p.shift_mode, shift_dtype),
                groups=scales.shape[1],
                bands=bands,
            )
    if p.implementation != "cuda":
        return kernel if wanted else None
    if kernel is None:
        raise ValueError(
            "jax_wonly: implementation='cuda' has no kernel for this convolution; accepted: 16-bit x with one or two "
            "spatial axes and K a multiple of 8, no table, float zeros and offsets, and then scales, of the type of x, "
            "strides up to 8, windows and paddings of less than 128 pixels, and lhs_dilation alone where it divides "
            "the result and is no more than the window, on sm_90; in groups of features, up to three spatial axes, one "
            "input each, or 16-bit x, inputs and outputs multiples of 8, and windows of few taps, on sm_80 or newer, "
            "and no lhs_dilation; or None."
        )
    return kernel


def _call(target: str, axes: int, scratch: int, x, qw, parameters, bias, p: Params, **attributes) -> jax.Array:
    """A custom call for ``axes`` spatial axes, of which x may have fewer."""
    dtype = p.out_dtype if p.out_dtype in (x.dtype, jnp.float32) else jnp.dtype(jnp.float32)
    window = p.window
    missing = axes - len(window.size)
    shape = _result_shape(x, parameters[0], p)
    low = tuple(low for low, _ in window.padding)
    properties = [(window.size, 1), (window.strides, 1), (low, 0), (window.rhs_dilation, 1)]
    if max(window.lhs_dilation, default=1) > 1:
        properties.append((window.lhs_dilation, 1))
    numbers = [value for values, default in properties for value in (default,) * missing + values]

    def wide(shape):
        return (shape[0], *(1,) * missing, *shape[1:])

    results = [jax.ShapeDtypeStruct(wide(shape), dtype)]
    if scratch:
        results.append(jax.ShapeDtypeStruct((scratch,), jnp.int32))
    y, *_ = jax.ffi.ffi_call(target, results)(
        x.reshape(wide(x.shape)),
        qw,
        *parameters,
        *(b[None] for b in bias),
        bits=np.int64(p.bits),
        has_bias=np.int64(p.has_bias),
        activation=np.int64(p.activation),
        window=np.array(numbers, np.int64),
        **attributes,
    )
    return y.reshape(shape).astype(p.out_dtype)


def _implicit(x, qw, scales, *rest, p: Params) -> jax.Array:
    """The implicit product."""
    shift, bias = split_rest(rest, p.shift_mode)

    def of_taps(a):
        a = a if a.dtype in (x.dtype, jnp.float32, jnp.uint8) else a.astype(jnp.float32)
        return jnp.broadcast_to(a, (p.window.taps, *a.shape[1:]))

    scratch = _abi.conv_scratch(math.prod(_result_shape(x, scales, p)[:-1]), scales.shape[-1])
    parameters = [of_taps(a) for a in (scales, *shift)]
    return _call(_abi.CONV, 2, scratch, x, qw, parameters, bias, p, shift_mode=np.int64(p.shift_mode))


def _direct(x, qw, scales, *rest, p: Params) -> jax.Array:
    """The kernels for groups of features."""
    shift, bias = split_rest(rest, p.shift_mode)
    shift_mode, shift = as_operand(p.table, p.shift_mode, shift)
    attributes = {"shift_mode": np.int64(shift_mode), "groups": np.int64(p.feature_groups)}
    return _call(_abi.DIRECT_CONV, 3, 0, x, qw, [scales, *shift], bias, p, **attributes)


def _shared_group(k: int, groups: int) -> int | None:
    """The largest group size of a packed product that divides the inputs of a scale; None if there is none."""
    return next((size for size in sorted(GROUP_SIZES, reverse=True) if k // groups % size == 0), None)


def _gathers(x, scales, p: Params) -> bool:
    """Whether the inputs of all windows, side by side, meet the taps' weights as one packed product."""
    if p.implementation == "dequantize" or p.feature_groups != 1 or p.k % tile_k(p.bits):
        return False
    if _shared_group(p.k, scales.shape[1]) is None:
        return False
    shape = _result_shape(x, scales, p)
    if not all(isinstance(size, int) for size in shape):
        return False
    pixels = math.prod(shape[:-1])
    if pixels <= _GATHERED_PIXELS or p.implementation == "cpu":
        return True
    return x.dtype.itemsize == 2 and pixels * p.window.taps * p.k * 2 <= _GATHERED_BYTES


def _gathered(x, qw, scales, *rest, p: Params, platform: str) -> jax.Array:
    shift, bias = split_rest(rest, p.shift_mode)
    k = p.window.taps * p.k
    patches = jnp.concatenate(p.window.taps_of(x), axis=-1)
    # The weights of all taps one after the other along K.
    qw = jnp.swapaxes(qw, 0, 1).reshape(1, qw.shape[1], -1, qw.shape[-1])
    repeats = p.k // scales.shape[1] // (_shared_group(p.k, scales.shape[1]) or 1)

    def join(a):
        a = jnp.broadcast_to(a, (p.window.taps, *a.shape[1:]))
        return jnp.repeat(a, repeats, axis=1).reshape(1, -1, a.shape[-1])

    product = _matmul.Params(
        bits=p.bits,
        shift_mode=p.shift_mode,
        has_bias=p.has_bias,
        activation=p.activation,
        transpose=False,
        k=k,
        out_dtype=p.out_dtype,
        precision=p.precision,
        implementation=p.implementation,
        table=p.table,
    )
    operands = (patches.reshape(1, -1, k), qw, *map(join, (scales, *shift)), *(b[None] for b in bias))
    y = _matmul._native(*operands, params=product, platform=platform)
    return y.reshape(*patches.shape[:-1], y.shape[-1])


def _result_shape(x, scales, p: Params):
    return (x.shape[0], *p.window.results(x.shape[1:-1]), scales.shape[-1])


@conv_p.def_abstract_eval
def _abstract(x, qw, scales, *rest, params: Params):
    shape = _result_shape(x, scales, params)
    return x.update(shape=shape, dtype=jnp.dtype(params.out_dtype), weak_type=False)


# Partitioning: images freely, outputs by whole tiles. The rest is gathered.


def output_parts(scales_shape, p: Params) -> int:
    """Into how many parts the outputs may be split."""
    _, groups, n = scales_shape
    return splits(p.k, n, groups, p.bits)[1] if p.feature_groups == 1 else 1


def _rule(params, shapes, mesh, value_types, result_types):
    del value_types, result_types
    x, qw, scales, *_ = shapes
    n = scales[-1]
    n_parts = output_parts(scales, params)
    # Shardy would split a mesh axis that does not divide a factor, and custom_partitioning cannot follow.
    split_n = n_parts % math.prod(mesh.shape.values()) == 0
    rule = RuleBuilder()
    n_of = partial(rule.dim, factor="n", parts=n_parts, split=split_n)
    spatial = range(len(x) - 2)
    operands = [
        ArrayMapping("b", *(f"x{i}" for i in spatial), "c"),
        ArrayMapping("taps", n_of(qw[1]), "tiles", "words"),
    ]
    for i, shape in enumerate(shapes[2:]):
        operands.append(ArrayMapping(*(f"p{i}_{j}" for j in range(len(shape) - 1)), n_of(n)))
    result = ArrayMapping("b", *(f"y{i}" for i in spatial), n_of(n))
    return rule.build(operands, result, {"b"} | ({"n"} if split_n else set()), set())


def _partition(evaluate, params, mesh, arg_shapes, result_shape):
    if (whole := unnamed_partition(partial(evaluate, params=params), mesh, arg_shapes, result_shape)) is not None:
        return whole
    x, _, scales, *rest = arg_shapes
    images = usable(mesh, axes_of(result_shape, 0), result_shape.shape[0], ())
    n_axes = usable(
        mesh, axes_of(result_shape, len(result_shape.shape) - 1), output_parts(scales.shape, params), images
    )
    none = ((),) * (len(x.shape) - 2)
    shardings = [named(mesh, images, *none, ()), named(mesh, (), n_axes, (), ())]
    shardings += [named(mesh, *((),) * (len(a.shape) - 1), n_axes) for a in (scales, *rest)]
    return mesh, partial(evaluate, params=params), named(mesh, images, *none, n_axes), tuple(shardings)


def _partitioned(evaluate, *operands, params: Params) -> jax.Array:
    partition = partial(_partition, evaluate, params)
    return with_partitioning(partial(evaluate, params=params), partition, partial(_rule, params), *operands)


# Batching.


def _batch(operands, axes, *, params: Params):
    if axes[0] is not None and all(a is None for a in axes[1:]):
        # Shared weights: the mapped axis becomes part of the images.
        x = jnp.moveaxis(operands[0], axes[0], 0)
        size, images, *others = x.shape
        y = conv_p.bind(x.reshape(size * images, *others), *operands[1:], params=params)
        return y.reshape(size, images, *y.shape[1:]), 0

    def one(x, qw, scales, *rest):
        shift, bias = split_rest(rest, params.shift_mode)
        return epilogue(_dense(x, _weights(x, qw, scales, shift, params), params), bias, params)

    return jax.vmap(one, in_axes=tuple(axes))(*operands), 0


def _weights(x, qw, scales, shift, p: Params) -> jax.Array:
    """The dense weights ``[T, K, N]``, in the type in which convolutions of ``x`` are computed."""
    implementation = None if p.implementation == "dequantize" else p.implementation
    dtype = compute_dtype(x.dtype, p.precision)
    options = _weight_options(p)
    return dequantize.dequantize_p.bind(qw, scales, *shift, dtype=dtype, implementation=implementation, **options)


# Differentiation.


@before_activation
def _jvp(primals, tangents, *, params: Params):
    p = params
    x, qw, scales, *rest = primals
    x_dot, _, *rest_dot = tangents
    shift, _ = split_rest(rest, p.shift_mode)
    parameters_dot, bias_dot = rest_dot[: 1 + len(shift)], rest_dot[1 + len(shift) :]
    y = conv_p.bind(*primals, params=p)

    terms = []
    if not isinstance(x_dot, ad.Zero):
        terms.append(conv_p.bind(x_dot, qw, scales, *shift, params=p._replace(has_bias=False)))
    moving = [
        i
        for i, (a, dot) in enumerate(zip((scales, *shift), parameters_dot, strict=True))
        if not isinstance(dot, ad.Zero) and jnp.issubdtype(a.dtype, jnp.floating)
    ]
    if moving:

        def of_parameters(*values):
            parameters = [scales, *shift]
            for i, value in zip(moving, values, strict=True):
                parameters[i] = value
            w = dequantize.reference(qw, *parameters, dtype=jnp.dtype(jnp.float32), **_weight_options(p))
            return _dense(x.astype(jnp.float32), w, p)

        values = [(scales, *shift)[i] for i in moving]
        terms.append(jax.jvp(of_parameters, values, [parameters_dot[i] for i in moving])[1])
    if bias_dot and not isinstance(bias_dot[0], ad.Zero):
        terms.append(jnp.broadcast_to(bias_dot[0].astype(jnp.float32), y.shape))
    if not terms:
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    if len(terms) == 1:
        return y, terms[0].astype(p.out_dtype)
    return y, functools.reduce(jnp.add, (t.astype(jnp.float32) for t in terms)).astype(p.out_dtype)


def _transpose(ct, x, qw, scales, *rest, params: Params):
    p = params
    none = [None] * (3 + len(rest))
    if isinstance(ct, ad.Zero):
        return none
    undefined = [ad.is_undefined_primal(a) for a in (x, qw, scales, *rest)]
    if p.activation != Activation.NONE or p.has_bias or not undefined[0] or any(undefined[1:]):
        raise NotImplementedError(
            "jax_wonly: a convolution is linear in x alone, and only without bias and activation; it cannot be "
            f"transposed with respect to operands {[i for i, u in enumerate(undefined) if u]}."
        )
    w = _weights(x.aval, qw, scales, rest, p)
    # JAX may want to know over which axes of a mesh x varies: over those of the rest.
    like, *_ = align_varying(jnp.zeros(x.aval.shape, x.aval.dtype), ct, qw)
    none[0] = jax.vjp(lambda x: _dense(x, w, p).astype(ct.dtype), like)[1](ct)[0]
    return none


register_lowerings(conv_p, _evaluate)
allow_partitioning(conv_p)
batching.primitive_batchers[conv_p] = _batch
ad.primitive_jvps[conv_p] = _jvp
ad.primitive_transposes[conv_p] = _transpose
