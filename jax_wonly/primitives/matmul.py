"""``wonly_matmul``: activations times packed weights.

Operands ``x[Bx, M, K]``, ``qw u32[Bw, Nt, Kt, 512]``, ``scales[Bs, G, N]``, then ``shift[Bz, G, N]`` unless
``shift_mode`` is NONE, then ``bias[Bb, N]`` if ``has_bias``. Every leading size is 1 or B, and 1 is broadcast without
a copy. Result ``[B, M, N]``. With ``transpose`` the first operand is ``[Bx, M, N]`` and the result ``[B, M, K]``: the
product with the transposed weights, without bias or activation. With a ``table``, a static parameter, codes index its
16 values; there is no shift then. With ``activations``, x is quantized first; its gradient is that of the product with
x itself.

The operation is closed under its own transformations: the tangent and the cotangent of ``x`` are the same primitive,
so every composition of jvp, vjp, linear_transpose and vmap keeps the weights packed.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching

from jax_wonly import _abi, _ffi
from jax_wonly._abi import Activation, ShiftMode
from jax_wonly._format import bias_of
from jax_wonly._table import Table, as_operand
from jax_wonly.primitives import activations, dequantize, scales_gradient
from jax_wonly.primitives._common import (
    align_varying,
    group_sums,
    is_zero,
    make_primitive,
    may_round,
    merge_batch,
    pad_last,
    parameters_alike,
    register_lowerings,
    with_types,
)
from jax_wonly.primitives.activations import Activations, Scheme
from jax_wonly.primitives.matmul_sharding import allow_partitioning, partitioned

matmul_p = make_primitive("wonly_matmul")
PRODUCTS = {matmul_p}  # the primitives that checkpoint_policy knows

ACTIVATIONS = {
    Activation.NONE: lambda y: y,
    Activation.RELU: jax.nn.relu,
    Activation.RELU6: jax.nn.relu6,
    Activation.GELU: jax.nn.gelu,
    Activation.SILU: jax.nn.silu,
}


def checkpoint_policy(prim, *_, **__) -> bool:
    """A policy for ``jax.checkpoint``: saves results of quantized products, as ``dots_saveable`` does of dense ones.

    Combine it with others by ``jax.checkpoint_policies.save_from_both_policies``.

    Args:
      prim: the primitive about which JAX asks; its other arguments do not matter.

    Returns:
      Whether it is one of this package's products.

    Example:
      >>> qt = jw.quantize(jnp.ones((128, 64)))
      >>> layer = jax.checkpoint(lambda x: jnp.sin(x @ qt).sum(), policy=jw.checkpoint_policy)
      >>> jax.grad(layer)(jnp.ones(128)).shape
      (128,)
    """
    return prim in PRODUCTS


class Params(NamedTuple):
    """The static parameters of one product."""

    bits: int
    shift_mode: ShiftMode
    has_bias: bool
    activation: Activation
    transpose: bool
    k: int
    out_dtype: Any
    precision: lax.Precision | None
    implementation: str | None
    table: Table | None = None
    activations: Scheme | None = None


def matmul(x, qw, scales, *rest, params: Params) -> jax.Array:
    """Binds the primitive; shapes and dtypes are the caller's responsibility."""
    return matmul_p.bind(*align_varying(x, qw, scales, *rest), params=params)


def split_rest(rest, shift_mode: ShiftMode):
    """``(shift or (), bias or ())`` of the operands after the scales."""
    has_shift = shift_mode != ShiftMode.NONE
    return tuple(rest[:has_shift]), tuple(rest[has_shift:])


# Evaluation.


def compute_dtype(x_dtype, precision):
    """The type of the dense product's operands: that of x, unless a higher precision is asked for."""
    if x_dtype == jnp.float32 or precision in (lax.Precision.HIGH, lax.Precision.HIGHEST):
        return jnp.dtype(jnp.float32)
    return jnp.dtype(x_dtype)


def dense_precision(dtype, precision):
    """Of a dense product: the default of float32 ones on a GPU is TF32, which would lose what the kernels keep."""
    return lax.Precision.HIGHEST if precision is None and dtype == jnp.float32 else precision


def _dense(x, w, bias, p: Params) -> jax.Array:
    """The product with dense weights ``w[Bw, K, N]``, accumulated in float32, with the epilogue."""
    if p.transpose:
        w = jnp.swapaxes(w, 1, 2)
    precision = dense_precision(w.dtype, p.precision)
    y = jnp.matmul(x.astype(w.dtype), w, precision=precision, preferred_element_type=jnp.float32)
    return epilogue(y, bias, p)


def epilogue(y, bias, p: Params) -> jax.Array:
    y = y.astype(jnp.float32)
    if bias:
        y = y + bias[0].astype(jnp.float32)[..., None, :]
    return ACTIVATIONS[p.activation](y).astype(p.out_dtype)


def _via_dense(dequantized, x, qw, scales, *rest, p: Params) -> jax.Array:
    shift, bias = split_rest(rest, p.shift_mode)
    dtype = compute_dtype(x.dtype, p.precision)
    w = dequantized(qw, scales, *shift, bits=p.bits, shift_mode=p.shift_mode, k=p.k, dtype=dtype, table=p.table)
    return _dense(x, w, bias, p)


def _kernel(x, qw, scales, *rest, p: Params, platform: str) -> jax.Array:
    """The fused custom call."""
    # The kernels write the activations' type or float32; the rare third type is a conversion of the latter.
    dtype = p.out_dtype if p.out_dtype in (x.dtype, jnp.float32) else jnp.dtype(jnp.float32)
    shift, bias = split_rest(rest, p.shift_mode)
    shift_mode, shift = as_operand(p.table, p.shift_mode, shift)
    attributes = {"bits": np.int64(p.bits), "shift_mode": np.int64(shift_mode)}
    if not p.transpose:
        attributes |= {"has_bias": np.int64(p.has_bias), "activation": np.int64(p.activation)}
    target = _abi.MATMUL_TRANSPOSED if p.transpose else _abi.MATMUL
    shape = _result_shape(x, qw, scales, *rest, p=p)
    results = [jax.ShapeDtypeStruct(shape, dtype)]
    if platform == "cuda" and all(isinstance(s, int) for s in shape):
        from jax_wonly import _cuda_dispatch

        product = _product(x, qw, scales, rest, p)
        if p.transpose:
            if _cuda_dispatch.rounds_transposed_parameters(product):
                scales, *own = with_types(scales, shift, product.own_types)
                shift = tuple(own)
            parameters = max(a.shape[0] for a in (scales, *shift))
            scratch = _cuda_dispatch.transposed_scratch(product, x.shape[0], parameters)
        else:
            scratch = _cuda_dispatch.scratch(product, x.shape[0])
        if scratch:
            results.append(jax.ShapeDtypeStruct((scratch,), jnp.int32))
    return jax.ffi.ffi_call(target, results)(x, qw, scales, *shift, *bias, **attributes)[0].astype(p.out_dtype)


def product_of(m, batch: int, x, scales, rest, p):
    """What the choice of a CUDA kernel depends on, for ``m`` rows of x; ``p`` may be those of experts."""
    from jax_wonly import _cuda_dispatch

    shift, _ = split_rest(rest, p.shift_mode)
    mode = p.shift_mode if p.table is None else ShiftMode.TABLE
    types = (x.dtype, scales.dtype, mode, shift[0].dtype if shift else None)
    return _cuda_dispatch.Product(m, p.k, scales.shape[-1], batch, p.bits, *types, groups=scales.shape[-2])


def _product(x, qw, scales, rest, p: Params):
    return product_of(x.shape[1], _result_shape(x, qw, scales, *rest, p=p)[0], x, scales, rest, p)


def _prefers_kernel(x, qw, scales, shift, p: Params, platform: str) -> bool:
    """Whether the fused kernel runs, or the weights are dequantized for a dense product."""
    if p.implementation == "dequantize":
        return False
    if platform != "cuda":
        return True
    from jax_wonly import _cuda_dispatch

    forced, product = p.implementation == "cuda", _product(x, qw, scales, shift, p)
    if p.transpose:
        return _cuda_dispatch.use_transposed_kernel(product, forced=forced)
    if not _cuda_dispatch.has_kernels(x.dtype, forced=forced):
        return False
    return forced or not isinstance(product.m, int) or _cuda_dispatch.use_kernel(product)


def _evaluate(x, qw, scales, *rest, params: Params, platform: str):
    p = params
    out = _result_shape(x, qw, scales, *rest, p=p)
    if any(map(is_zero, out)):
        return jnp.zeros(out, p.out_dtype)
    if not _ffi.use_native(p.implementation, platform):
        if p.activations is not None:
            x = _rounded(activations.quantize(x, p.activations, p.implementation), p, platform)
        return _via_dense(dequantize.reference, x, qw, scales, *rest, p=p)
    return partitioned(partial(_native, platform=platform), epilogue, x, qw, scales, *rest, params=p)


def _native(x, qw, scales, *rest, params: Params, platform: str):
    """What one device computes of its shards."""
    p = params
    if p.activations is not None:
        scheme = p.activations.for_inputs(p.k)
        p = p._replace(activations=scheme)
        a = activations.quantize(x, scheme, p.implementation if p.implementation in _ffi.PLATFORMS else None)
        if activations.has_kernel(a, qw, scales, *rest, p=p, platform=platform):
            return activations.kernel(a, qw, scales, *rest, p=p)
        x = _rounded(a, p, platform)
    if platform == "cuda" and not p.transpose:
        scales, *rest = parameters_alike(scales, rest, p.shift_mode)
    if platform == "cuda" and p.implementation != "dequantize":
        x = _as_precise(x, qw, scales, rest, p)
        if p.transpose:
            x, scales, *rest = _whole_outputs(x, qw, scales, rest, p)
        else:
            p, x, scales, *rest = _for_a_kernel(x, qw, scales, rest, p)
    shift, bias = split_rest(rest, p.shift_mode)
    if _prefers_kernel(x, qw, scales, shift, p, platform):
        if shift and p.transpose and _takes_shift_apart(x, qw, scales, shift, p, platform):
            return _with_shift_apart(x, qw, scales, shift[0], p, platform)
        return _kernel(x, qw, scales, *rest, p=p, platform=platform)
    return _via_dense(dequantize.ffi_call, x, qw, scales, *rest, p=p)


def _as_precise(x, qw, scales, rest, p: Params) -> jax.Array:
    """Activations as precise as is asked for."""
    if not may_round(x.dtype, p.precision):
        return x
    from jax_wonly import _cuda_dispatch

    return x.astype(_cuda_dispatch.rounded(_product(x, qw, scales, rest, p), transpose=p.transpose).x_dtype)


def _for_a_kernel(x, qw, scales, rest, p: Params):
    """Activations of inputs that are no multiple of what kernels copy at once, with zeros behind, and the product of
    those: packed weights go on to whole tiles anyway. Scales and what follows them, of types with a faster kernel."""
    from jax_wonly import _cuda_dispatch

    product = _cuda_dispatch.whole_inputs(_product(x, qw, scales, rest, p), forced=p.implementation == "cuda")
    types = _cuda_dispatch.widened(product).parameter_types
    return p._replace(k=product.k), pad_last(x, product.k), *with_types(scales, rest, types)


def _whole_outputs(dy, qw, scales, shift, p: Params):
    """Cotangents, scales, and zeros or offsets of outputs that are no multiple of what kernels read at once, with zeros
    behind: packed weights go on to whole tiles anyway."""
    from jax_wonly import _cuda_dispatch

    n = _cuda_dispatch.whole_outputs(_product(dy, qw, scales, shift, p)).n
    return tuple(pad_last(a, n) for a in (dy, scales, *shift))


def _takes_shift_apart(x, qw, scales, shift, p: Params, platform: str) -> bool:
    if platform != "cuda" or x.dtype != jnp.float32 or not jnp.issubdtype(shift[0].dtype, jnp.floating):
        return False
    from jax_wonly import _cuda_dispatch

    return _cuda_dispatch.transposed_shift_apart(_product(x, qw, scales, shift, p))


def _with_shift_apart(dy, qw, scales, shift, p: Params, platform: str) -> jax.Array:
    """The product of dy with the codes less their middle, and with what is left of float zeros or offsets, in float32:
    the latter is the same for all inputs of a group. Infinite dy give the infinity that they should, or NaN.
    """
    float32 = jnp.dtype(jnp.float32)
    y = _kernel(dy, qw, scales, p=p._replace(shift_mode=ShiftMode.NONE, out_dtype=float32), platform=platform)
    middle, s, shift = 2.0 ** (p.bits - 1), scales.astype(float32), shift.astype(float32)
    per_group = shift + middle * s if p.shift_mode == ShiftMode.OFFSETS else (middle - shift) * s
    return (y + _of_groups(dy, per_group, p)).astype(p.out_dtype)


def _rounded(a: Activations, p: Params, platform: str) -> jax.Array:
    """What is left of activations that were quantized, for a product without kernels for their codes."""
    return activations.dequantize(a, p.k, activations.dequantized_dtype(p.out_dtype, platform))


def _result_shape(x, qw, scales, *rest, p: Params):
    sizes = [a.shape[0] for a in (x, qw, scales, *rest)]
    lead = next((s for s in sizes if s != 1), 1)
    return lead, x.shape[1], p.k if p.transpose else scales.shape[-1]


@matmul_p.def_abstract_eval
def _abstract(x, qw, scales, *rest, params: Params):
    shape = _result_shape(x, qw, scales, *rest, p=params)
    return x.update(shape=shape, dtype=jnp.dtype(params.out_dtype), weak_type=False)


# Batching.


def _batch(operands, axes, *, params: Params):
    p = params
    x, qw, scales, *rest = operands
    shift, bias = split_rest(rest, p.shift_mode)
    weights_axes = axes[1 : 3 + len(shift)]
    if any(a is not None for a in weights_axes):
        merged, size, lead = merge_batch(operands, axes)
        y = matmul_p.bind(*merged, params=p)
        return y.reshape(size, lead, *y.shape[1:]), 0

    if axes[-1] is not None and bias:
        # A bias for each entry of the batch does not fit one product with shared weights; it is added afterwards.
        plain = p._replace(has_bias=False, activation=Activation.NONE, out_dtype=jnp.dtype(jnp.float32))
        y, d = x, axes[0]
        if d is None:
            y = matmul_p.bind(x, qw, scales, *shift, params=plain)[None]
        else:
            y, d = _batch((x, qw, scales, *shift), axes[:-1], params=plain)
            y = jnp.moveaxis(y, d, 0)
        b = jnp.moveaxis(bias[0], axes[-1], 0)[:, :, None]
        return ACTIVATIONS[p.activation](y + b.astype(jnp.float32)).astype(p.out_dtype), 0

    # Shared weights: the mapped axis becomes part of M, and one call reads the weights once.
    x = jnp.moveaxis(x, axes[0], 1)
    lead, size, m, inputs = x.shape
    y = matmul_p.bind(x.reshape(lead, size * m, inputs), qw, scales, *rest, params=p)
    return y.reshape(y.shape[0], size, m, y.shape[-1]), 1


# Differentiation.


def _dense_f32(x, w):
    return jnp.matmul(x.astype(jnp.float32), w, precision=lax.Precision.HIGHEST)


def linear_in_scales(scales, shift, p):
    """The shift and the parameters of a product whose offsets, if it has any, do not move with the scales."""
    if p.shift_mode != ShiftMode.OFFSETS:
        return shift, p
    return (jnp.zeros(scales.shape, jnp.uint8),), p._replace(shift_mode=ShiftMode.ZEROS)


def _scales_tangent(x, qw, scales_dot, shift, p: Params):
    """The product is linear in the scales: the same product with their tangent."""
    shift, p = linear_in_scales(scales_dot, shift, p)
    return matmul_p.bind(x, qw, scales_dot, *shift, params=p)


def _scales_cotangent(ct, x, qw, shift, aval, p: Params):
    """``sum_m ct (sum_k x (code - zero))`` over the inputs of each group: of the codes less their middle, and what is
    left of the zeros, which meet the sums of the groups."""
    groups = aval.shape[1]
    inputs, outputs = (ct, x) if p.transpose else (x, ct)
    if aval.shape[0] == 1 and all(a.shape[0] == 1 for a in (qw, *shift)) and inputs.shape[0] == outputs.shape[0]:
        # All rows of the batch add up.
        inputs, outputs = (a.reshape(1, -1, a.shape[-1]) for a in (inputs, outputs))
    of_codes = scales_gradient.Params(p.bits, p.k, groups, p.implementation, p.table, precision=p.precision)
    y = scales_gradient.scales_gradient(inputs, qw, outputs, params=of_codes)
    if shift:
        y = y - zeros_beyond_middle(shift[0], p.bits) * _sums_product(group_sums(inputs, groups), outputs)
    return (y.sum(0, keepdims=True) if aval.shape[0] == 1 else y).astype(aval.dtype)


def _sums_product(sums, dy):
    """``sums[B, M, G]^T dy[B, M, N]`` in float32: as exact products of bfloat16 numbers where ``dy`` is of them."""
    if dy.dtype != jnp.bfloat16:
        return _dense_f32(jnp.swapaxes(sums, 1, 2), dy.astype(jnp.float32))
    pieces = []
    for _ in range(3):  # of 8 bits each: all of a float32
        pieces.append(lax.reduce_precision(sums, 8, 7))
        sums = sums - pieces[-1]
    both = jnp.concatenate(pieces, axis=-1).astype(jnp.bfloat16)
    y = jnp.matmul(jnp.swapaxes(both, 1, 2), dy, preferred_element_type=jnp.float32)
    return y.reshape(y.shape[0], 3, -1, y.shape[-1]).sum(1)


def zeros_beyond_middle(zeros, bits: int):
    """What zeros are more than that of weights without any."""
    return zeros.astype(jnp.float32) - bias_of(bits)


def _shift_tangent(x, scales, shift_dot, p: Params):
    """Zeros and offsets enter as one value for each group and output, so they meet x only through its group sums."""
    per_group = shift_dot.astype(jnp.float32)
    if p.shift_mode == ShiftMode.ZEROS:
        per_group = -per_group * scales.astype(jnp.float32)
    return _of_groups(x, per_group, p)


def _of_groups(x, per_group, p: Params):
    """The product with weights that are the same for all inputs of a group, ``per_group[B, G, N]``."""
    groups = per_group.shape[1]
    if not p.transpose:
        return _dense_f32(group_sums(x, groups), per_group)
    return jnp.repeat(_dense_f32(x, jnp.swapaxes(per_group, 1, 2)), p.k // groups, axis=-1)


def before_activation(jvp: Callable) -> Callable:
    """The jvp of an operation by ``jvp``, that of what it does before its activation."""

    @functools.wraps(jvp)
    def rule(primals, tangents, *, params):
        p = params
        if p.activation == Activation.NONE:
            return jvp(primals, tangents, params=p)
        linear = p._replace(activation=Activation.NONE, out_dtype=jnp.dtype(jnp.float32))
        y, y_dot = jvp(primals, tangents, params=linear)
        if isinstance(y_dot, ad.Zero):
            y_dot = y_dot.instantiate()
        return jax.jvp(lambda v: ACTIVATIONS[p.activation](v).astype(p.out_dtype), (y,), (y_dot,))

    return rule


@before_activation
def _jvp(primals, tangents, *, params: Params):
    p = params
    x, qw, scales, *rest = primals
    x_dot, _, scales_dot, *rest_dot = tangents
    shift, _ = split_rest(rest, p.shift_mode)
    shift_dot, bias_dot = split_rest(rest_dot, p.shift_mode)
    y = matmul_p.bind(*primals, params=p)
    p = p._replace(activations=None)  # rounding has no derivative: that of x as it is stands in for it

    terms = []
    if not isinstance(x_dot, ad.Zero):
        terms.append(matmul_p.bind(x_dot, qw, scales, *shift, params=p._replace(has_bias=False)))
    if not isinstance(scales_dot, ad.Zero):
        terms.append(_scales_tangent(x, qw, scales_dot, shift, p._replace(has_bias=False)))
    if shift_dot and not isinstance(shift_dot[0], ad.Zero) and jnp.issubdtype(shift[0].dtype, jnp.floating):
        terms.append(_shift_tangent(x, scales, shift_dot[0], p))
    if bias_dot and not isinstance(bias_dot[0], ad.Zero):
        terms.append(bias_dot[0].astype(jnp.float32)[:, None])
    if not terms:
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    if len(terms) == 1:
        y_dot = terms[0].astype(p.out_dtype)
    else:
        y_dot = functools.reduce(jnp.add, (t.astype(jnp.float32) for t in terms)).astype(p.out_dtype)
    return y, jnp.broadcast_to(y_dot, y.shape)


def _transpose(ct, x, qw, scales, *rest, params: Params):
    p = params
    none: list[jax.Array | None] = [None] * (3 + len(rest))
    if isinstance(ct, ad.Zero):
        return none
    shift, bias = split_rest(rest, p.shift_mode)
    undefined = [ad.is_undefined_primal(a) for a in (x, qw, scales, *rest)]
    nonlinear = p.activation != Activation.NONE or p.has_bias or p.activations is not None
    if nonlinear or sum(undefined) != 1 or not (undefined[0] or undefined[2]):
        raise NotImplementedError(
            "jax_wonly: matmul is linear in x alone or in the scales alone, and only without bias and activation; it "
            f"cannot be transposed with respect to operands {[i for i, u in enumerate(undefined) if u]}."
        )
    if undefined[2]:
        if p.shift_mode == ShiftMode.OFFSETS:
            raise NotImplementedError("jax_wonly: matmul with offsets is not linear in the scales alone.")
        none[2] = _scales_cotangent(ct, x, qw, shift, scales.aval, p)
        return none
    aval = x.aval
    shared = aval.shape[0] == 1 and ct.shape[0] != 1
    out_dtype = jnp.dtype(jnp.float32) if shared else aval.dtype
    dx = matmul_p.bind(ct, qw, scales, *shift, params=p._replace(transpose=not p.transpose, out_dtype=out_dtype))
    # One x served every entry of the batch, so it collects the cotangents of all.
    none[0] = dx.sum(0, keepdims=True).astype(aval.dtype) if shared else dx
    return none


register_lowerings(matmul_p, _evaluate)
allow_partitioning(matmul_p)
batching.primitive_batchers[matmul_p] = _batch
ad.primitive_jvps[matmul_p] = _jvp
ad.primitive_transposes[matmul_p] = _transpose
