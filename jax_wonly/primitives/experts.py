"""``wonly_ragged_matmul``: each row of the activations times the packed weights of its expert.

Operands ``x[Mx, K]``, ``qw u32[E, Nt, Kt, 512]``, ``scales[E, G, N]``, ``rows``, then ``shift[E, G, N]`` unless
``shift_mode`` is NONE, then ``bias[E or 1, N]`` if ``has_bias``; result ``[M, N]``. ``rows`` is ``s32[E]``
or ``s32[M]`` as :class:`~jax_wonly._abi.RowMode` says. ``repeat`` rows of the result, which follow each other, share a
row of x: ``M = repeat * Mx``, and 1 where rows are counted. Rows without an expert are zero. With ``transpose`` the
first operand is ``[Mx, N]`` and the result ``[M, K]``: the product with the transposed weights, without bias or
activation.

Everything is differentiated and batched into the same primitive; a batch of rows, of ids or of weights becomes more
rows and more experts of one call.
"""

import functools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching

from jax_wonly import _abi, _ffi
from jax_wonly._abi import Activation, RowMode, ShiftMode
from jax_wonly._table import Table, as_operand
from jax_wonly.primitives import dequantize, scales_gradient
from jax_wonly.primitives._common import (
    align_varying,
    group_sums,
    is_zero,
    make_primitive,
    may_round,
    parameters_alike,
    register_lowerings,
    with_types,
)
from jax_wonly.primitives.experts_sharding import ids_of_sizes, partitioned
from jax_wonly.primitives.matmul import (
    ACTIVATIONS,
    PRODUCTS,
    before_activation,
    compute_dtype,
    dense_precision,
    linear_in_scales,
    product_of,
    split_rest,
    zeros_beyond_middle,
)
from jax_wonly.primitives.matmul_sharding import allow_partitioning

ragged_matmul_p = make_primitive("wonly_ragged_matmul")
PRODUCTS.add(ragged_matmul_p)


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
    row_mode: RowMode
    repeat: int
    table: Table | None = None


def ragged_matmul(x, qw, scales, rows, *rest, params: Params) -> jax.Array:
    """Binds the primitive; shapes and dtypes are the caller's responsibility."""
    return ragged_matmul_p.bind(*align_varying(x, qw, scales, rows, *rest), params=params)


# Rows and experts.


def expert_ids(rows, m, p: Params) -> jax.Array:
    """The expert of each row, s32 ``[m]``; outside of 0 .. E - 1 without one."""
    return rows if p.row_mode == RowMode.IDS else ids_of_sizes(rows, m)


def _valid(ids, experts: int):
    return (ids >= 0) & (ids < experts)


def _ends(sizes, m):
    """Where the rows of each expert end; sizes that add up to more than the rows are cut off."""
    return jnp.minimum(jnp.cumsum(jnp.clip(sizes, 0, np.iinfo(np.int32).max // sizes.shape[0])), m)


def _dense_ragged(x, w, rows, p: Params, precision: lax.Precision | None = lax.Precision.HIGHEST) -> jax.Array:
    """The product with dense weights ``w[E, inputs, outputs]``, float32."""
    experts = w.shape[0]
    if p.row_mode == RowMode.SIZES:
        sizes = jnp.diff(_ends(rows, x.shape[0]), prepend=0).astype(jnp.int32)
        return lax.ragged_dot(x, w, sizes, precision=precision, preferred_element_type=jnp.float32)
    ids = jnp.where(_valid(rows, experts), rows, experts)  # rows without an expert are the last
    order = jnp.argsort(ids)
    sizes = (ids[:, None] == jnp.arange(experts)).sum(0, dtype=jnp.int32)
    y = lax.ragged_dot(x[order // p.repeat], w, sizes, precision=precision, preferred_element_type=jnp.float32)
    return jnp.zeros_like(y).at[order].set(y, unique_indices=True)


def _by_expert(x, rows, arrays, weight_of, outputs: int, p: Params) -> jax.Array:
    """``sum_e [x or 0 where another expert's] @ weight_of(arrays[e])``, float32, one expert's weight at a time."""
    experts = arrays[0].shape[0]
    x = jnp.repeat(x, p.repeat, axis=0) if p.repeat != 1 else x
    ids = expert_ids(rows, x.shape[0], p)

    def step(y, of_expert):
        e, *entry = of_expert
        mine = ids == e

        def add(y):
            w = weight_of(*entry)
            part = jnp.matmul(
                jnp.where(mine[:, None], x, 0).astype(w.dtype),
                w,
                precision=dense_precision(w.dtype, p.precision),
                preferred_element_type=jnp.float32,
            )
            return y + part

        return lax.cond(mine.any(), add, lambda y: y, y), None

    start, *_ = align_varying(jnp.zeros((x.shape[0], outputs), jnp.float32), x, ids, *arrays)
    return lax.scan(step, start, (jnp.arange(experts, dtype=jnp.int32), *arrays))[0]


# Evaluation.


def _epilogue(y, bias, ids, p: Params) -> jax.Array:
    """Bias and activation of float32 sums; rows without an expert stay zero, as every activation of zero is."""
    if bias:
        (b,) = bias
        experts = b.shape[0]
        of_row = b[jnp.clip(ids, 0, experts - 1)] if experts != 1 else b
        y = y + of_row.astype(jnp.float32)
    return ACTIVATIONS[p.activation](y).astype(p.out_dtype)


def finish(y, bias, rows, p: Params, experts: int) -> jax.Array:
    """The epilogue of sums ``y[M, N]`` whose rows belong to ``rows``."""
    if not bias:
        return _epilogue(y, (), None, p)
    ids = expert_ids(rows, y.shape[0], p)
    return jnp.where(_valid(ids, experts)[:, None], _epilogue(y, bias, ids, p), 0)


def _reference(x, qw, scales, rows, *rest, params: Params) -> jax.Array:
    """XLA's operations alone, one expert after the other."""
    p = params
    shift, bias = split_rest(rest, p.shift_mode)
    dtype = compute_dtype(x.dtype, p.precision)

    def weight_of(qw, scales, *shift):
        arrays = (a[None] for a in (qw, scales, *shift))
        w = dequantize.reference(*arrays, bits=p.bits, shift_mode=p.shift_mode, k=p.k, dtype=dtype, table=p.table)[0]
        return w.T if p.transpose else w

    outputs = p.k if p.transpose else scales.shape[-1]
    y = _by_expert(x, rows, (qw, scales, *shift), weight_of, outputs, p)
    return finish(y, bias, rows, p, qw.shape[0])


def _via_dense(x, qw, scales, rows, *rest, p: Params) -> jax.Array:
    """Dequantizes the weights of all experts for XLA's ragged product."""
    shift, bias = split_rest(rest, p.shift_mode)
    dtype = compute_dtype(x.dtype, p.precision)
    w = dequantize.ffi_call(qw, scales, *shift, bits=p.bits, shift_mode=p.shift_mode, k=p.k, dtype=dtype, table=p.table)
    if p.transpose:
        w = jnp.swapaxes(w, 1, 2)
    y = _dense_ragged(x.astype(dtype), w, rows, p, dense_precision(dtype, p.precision))
    return finish(y, bias, rows, p, qw.shape[0])


def _kernel(x, qw, scales, rows, *rest, p: Params, platform: str) -> jax.Array:
    """The custom call."""
    # The kernels write the activations' type or float32; the rare third type is a conversion of the latter.
    dtype = p.out_dtype if p.out_dtype in (x.dtype, jnp.float32) else jnp.dtype(jnp.float32)
    shape = _result_shape(x, scales, rows, p)
    shift, bias = split_rest(rest, p.shift_mode)
    scratch = 0
    if platform == "cuda":
        from jax_wonly import _cuda_experts

        product = product_of(shape[0], qw.shape[0], x, scales, rest, p)
        own = max(a.shape[0] for a in (scales, *shift))
        scratch = _cuda_experts.scratch(
            product, ids=p.row_mode == RowMode.IDS, transpose=p.transpose, parameter_batch=own
        )
        if p.transpose and _cuda_experts.rounds_transposed_parameters(product):
            scales, *parameters = with_types(scales, shift, product.own_types)
            shift = tuple(parameters)
    results = (jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((scratch,), jnp.int32))
    shift_mode, shift = as_operand(p.table, p.shift_mode, shift)
    attributes = {"bits": np.int64(p.bits), "shift_mode": np.int64(shift_mode), "row_mode": np.int64(p.row_mode)}
    if not p.transpose:
        attributes |= {"has_bias": np.int64(p.has_bias), "activation": np.int64(p.activation)}
    target = _abi.RAGGED_MATMUL_TRANSPOSED if p.transpose else _abi.RAGGED_MATMUL
    y, _ = jax.ffi.ffi_call(target, results)(x, qw, scales, rows, *shift, *bias, **attributes)
    return y.astype(p.out_dtype)


def _widened(x, qw, scales, rows, rest, p: Params) -> tuple[jax.Array, ...]:
    """Scales and what follows them, as float32 where a faster kernel takes those."""
    from jax_wonly import _cuda_experts

    m, _ = _result_shape(x, scales, rows, p)
    product = _cuda_experts.widened(product_of(m, qw.shape[0], x, scales, rest, p), ids=p.row_mode == RowMode.IDS)
    return with_types(scales, rest, product.parameter_types)


def _as_precise(x, qw, scales, rows, rest, p: Params) -> jax.Array:
    """Activations as precise as is asked for."""
    if not may_round(x.dtype, p.precision):
        return x
    from jax_wonly import _cuda_experts

    m, _ = _result_shape(x, scales, rows, p)
    product = product_of(m, qw.shape[0], x, scales, rest, p)
    return x.astype(_cuda_experts.rounded(product, transpose=p.transpose).x_dtype)


def _prefers_kernel(x, qw, scales, rows, rest, p: Params, platform: str) -> bool:
    """Whether the custom call runs, or the weights are dequantized for XLA's ragged product."""
    if p.implementation == "dequantize":
        return False
    if platform == "cpu":
        return True
    from jax_wonly import _cuda_dispatch, _cuda_experts

    forced = p.implementation == "cuda"
    if not p.transpose:
        return _cuda_dispatch.has_kernels(x.dtype, forced=forced)
    m, _ = _result_shape(x, scales, rows, p)
    return _cuda_experts.use_transposed_kernel(product_of(m, qw.shape[0], x, scales, rest, p), forced=forced)


def _result_shape(x, scales, rows, p: Params):
    m = rows.shape[0] if p.row_mode == RowMode.IDS else x.shape[0]
    return m, p.k if p.transpose else scales.shape[-1]


def _evaluate(x, qw, scales, rows, *rest, params: Params, platform: str):
    p = params
    shape = _result_shape(x, scales, rows, p)
    if any(map(is_zero, shape)):
        return jnp.zeros(shape, p.out_dtype)
    if _ffi.use_native(p.implementation, platform):
        evaluate = partial(_native, platform=platform)
    else:
        evaluate = _reference
    of_all = partial(finish, experts=qw.shape[0])
    return partitioned(evaluate, of_all, x, qw, scales, rows, *rest, params=p)


def _native(x, qw, scales, rows, *rest, params: Params, platform: str):
    if platform == "cuda" and params.implementation != "dequantize":
        x = _as_precise(x, qw, scales, rows, rest, params)
    if _prefers_kernel(x, qw, scales, rows, rest, params, platform):
        if platform == "cuda" and not params.transpose:
            scales, *rest = parameters_alike(scales, rest, params.shift_mode)
            scales, *rest = _widened(x, qw, scales, rows, rest, params)
        return _kernel(x, qw, scales, rows, *rest, p=params, platform=platform)
    return _via_dense(x, qw, scales, rows, *rest, p=params)


@ragged_matmul_p.def_abstract_eval
def _abstract(x, qw, scales, rows, *rest, params: Params):
    shape = _result_shape(x, scales, rows, params)
    return x.update(shape=shape, dtype=jnp.dtype(params.out_dtype), weak_type=False)


# Batching.


def _batch(operands, axes, *, params: Params):
    p = params
    shift, bias = split_rest(operands[4:], p.shift_mode)
    size = next(a.shape[d] for a, d in zip(operands, axes, strict=True) if d is not None)
    if bias and axes[-1] is not None and all(d is None for d in (*axes[1:3], *axes[4:-1])):
        # A bias for each entry of the batch does not fit one call with shared weights; it is added afterwards.
        return _batch_bias(operands, axes, size, p)

    x, qw, scales, rows, *rest = (
        a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(operands, axes, strict=True)
    )
    x_axis, rows_axis = axes[0], axes[3]
    experts, m = qw.shape[-4], _rows_of(x, rows, p)
    x_first = x_axis is not None
    # Without a batch of x, its axis goes behind the rows, so that a row of x serves all entries and is never copied.
    ids = expert_ids(rows, m, p) if rows_axis is None else jax.vmap(lambda r: expert_ids(r, m, p))(rows)
    if rows_axis is None:
        ids = jnp.broadcast_to(ids, (size, m))
    weights = [qw, scales, *rest]
    weight_axes = [axes[1], axes[2], *axes[4:]]
    if any(d is not None for d in weight_axes):
        first = experts * jnp.arange(size, dtype=jnp.int32)
        ids = jnp.where(_valid(ids, experts), ids + first[:, None], -1)
        for i, (a, d) in enumerate(zip(weights, weight_axes, strict=True)):
            lead, *inner = a.shape if d is None else a.shape[1:]
            if d is None and lead == 1:
                continue  # one bias for all
            a = jnp.broadcast_to(a if d is not None else a[None], (size, lead, *inner))
            a = jnp.broadcast_to(a, (size, experts, *inner))
            weights[i] = a.reshape(size * experts, *inner)
    qw, scales, *rest = weights
    repeat = p.repeat if x_first else p.repeat * size
    x = x.reshape(-1, x.shape[-1]) if x_first else x
    ids = (ids if x_first else ids.T).reshape(-1)
    y = ragged_matmul_p.bind(x, qw, scales, ids, *rest, params=p._replace(row_mode=RowMode.IDS, repeat=repeat))
    shape = (size, m) if x_first else (m, size)
    return y.reshape(*shape, y.shape[-1]), 0 if x_first else 1


def _rows_of(x, rows, p: Params) -> int:
    return rows.shape[-1] if p.row_mode == RowMode.IDS else x.shape[-2]


def _batch_bias(operands, axes, size: int, p: Params):
    x, qw, scales, rows, *rest = operands
    linear = p._replace(has_bias=False, activation=Activation.NONE, out_dtype=jnp.dtype(jnp.float32))
    if all(d is None for d in axes[:-1]):
        y, y_axis = ragged_matmul_p.bind(*operands[:-1], params=linear), None
    else:
        y, y_axis = _batch(operands[:-1], axes[:-1], params=linear)
    rows_axis = axes[3]

    def add(y, rows, b):
        return finish(y, (b,), rows, p, qw.shape[-4])

    return jax.vmap(add, in_axes=(y_axis, rows_axis, axes[-1]))(y, rows, rest[-1]), 0


# Differentiation.


@before_activation
def _jvp(primals, tangents, *, params: Params):
    p = params
    linear = p._replace(has_bias=False)
    x, qw, scales, rows, *rest = primals
    x_dot, _, scales_dot, _, *rest_dot = tangents
    shift, bias = split_rest(rest, p.shift_mode)
    shift_dot, bias_dot = split_rest(rest_dot, p.shift_mode)
    y = ragged_matmul_p.bind(*primals, params=p)

    terms = []
    if not isinstance(x_dot, ad.Zero):
        terms.append(ragged_matmul_p.bind(x_dot, qw, scales, rows, *shift, params=linear))
    if not isinstance(scales_dot, ad.Zero):
        scales_shift, by_scales = linear_in_scales(scales_dot, shift, linear)
        terms.append(ragged_matmul_p.bind(x, qw, scales_dot, rows, *scales_shift, params=by_scales))
    if shift_dot and not isinstance(shift_dot[0], ad.Zero) and jnp.issubdtype(shift[0].dtype, jnp.floating):
        terms.append(_shift_tangent(x, scales, shift_dot[0], rows, p))
    if bias_dot and not isinstance(bias_dot[0], ad.Zero):
        zero = jnp.zeros(y.shape, jnp.float32)
        terms.append(finish(zero, bias_dot, rows, p._replace(out_dtype=jnp.dtype(jnp.float32)), qw.shape[0]))
    if not terms:
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    if len(terms) == 1:
        return y, terms[0].astype(p.out_dtype)
    return y, functools.reduce(jnp.add, (t.astype(jnp.float32) for t in terms)).astype(p.out_dtype)


def _shift_tangent(x, scales, shift_dot, rows, p: Params):
    """Zeros and offsets enter as one value for each group and output, so they meet x only through its group sums."""
    per_group = shift_dot.astype(jnp.float32)
    if p.shift_mode == ShiftMode.ZEROS:
        per_group = -per_group * scales.astype(jnp.float32)
    return ragged_groups_p.bind(*align_varying(x, per_group, rows), params=p)


# ``wonly_ragged_groups``: the ragged product with weights that are the same for all inputs of a group,
# ``per_group f32[E, G, N]``. XLA's operations, but for its cotangent of those weights, which XLA makes of all rows for
# each expert: that is the gradient of scales with codes that are all one.
ragged_groups_p = make_primitive("wonly_ragged_groups")


def _of_groups(x, per_group, rows, *, params: Params, platform: str = ""):
    del platform
    p, groups = params, per_group.shape[1]
    if not p.transpose:
        return _dense_ragged(group_sums(x, groups), per_group, rows, p)
    y = _dense_ragged(x.astype(jnp.float32), jnp.swapaxes(per_group, 1, 2), rows, p)
    return jnp.repeat(y, p.k // groups, axis=-1)


@ragged_groups_p.def_abstract_eval
def _groups_abstract(x, per_group, rows, *, params: Params):
    shape = _result_shape(x, per_group, rows, params)
    return x.update(shape=shape, dtype=jnp.dtype(jnp.float32), weak_type=False)


def _groups_batch(operands, axes, *, params: Params):
    return jax.vmap(partial(_of_groups, params=params), axes)(*operands), 0


def _groups_jvp(primals, tangents, *, params: Params):
    x, per_group, rows = primals
    x_dot, per_group_dot, _ = tangents
    y = ragged_groups_p.bind(*primals, params=params)
    terms = []
    if not isinstance(x_dot, ad.Zero):
        terms.append(ragged_groups_p.bind(x_dot, per_group, rows, params=params))
    if not isinstance(per_group_dot, ad.Zero):
        terms.append(ragged_groups_p.bind(x, per_group_dot, rows, params=params))
    if not terms:
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    return y, terms[0] if len(terms) == 1 else terms[0] + terms[1]


def _groups_transpose(ct, x, per_group, rows, *, params: Params):
    p = params
    if isinstance(ct, ad.Zero):
        return None, None, None
    if ad.is_undefined_primal(x):
        of_x = jax.linear_transpose(lambda x: _of_groups(x, per_group, rows, params=p), x.aval)
        return of_x(ct)[0], None, None
    experts, groups, n = per_group.aval.shape
    ct = ct.astype(x.dtype) if p.out_dtype == x.dtype else ct  # it has come through that type
    return None, _sums_gradient(*_in_order(ct, x, rows, experts, p), groups, n, p), None


def _transpose(ct, x, qw, scales, rows, *rest, params: Params):
    p = params
    none: list[jax.Array | None] = [None] * (4 + len(rest))
    if isinstance(ct, ad.Zero):
        return none
    shift, _ = split_rest(rest, p.shift_mode)
    undefined = [ad.is_undefined_primal(a) for a in (x, qw, scales, rows, *rest)]
    nonlinear = p.activation != Activation.NONE or p.has_bias
    if nonlinear or sum(undefined) != 1 or not (undefined[0] or undefined[2]):
        raise NotImplementedError(
            "jax_wonly: a ragged product is linear in x alone or in the scales alone, and only without bias and "
            f"activation; it cannot be transposed with respect to operands {[i for i, u in enumerate(undefined) if u]}."
        )
    if undefined[2]:
        if p.shift_mode == ShiftMode.OFFSETS:
            raise NotImplementedError("jax_wonly: a ragged product with offsets is not linear in the scales alone.")
        none[2] = _scales_cotangent(ct, x, qw, rows, shift, scales.aval, p)
        return none
    aval = x.aval
    # The rows of the result that share a row of x follow each other, and their cotangents add up.
    shared = p.repeat != 1
    back = p._replace(
        transpose=not p.transpose, repeat=1, out_dtype=jnp.dtype(jnp.float32) if shared else jnp.dtype(aval.dtype)
    )
    dx = ragged_matmul_p.bind(ct, qw, scales, rows, *shift, params=back)
    none[0] = dx.reshape(-1, p.repeat, dx.shape[-1]).sum(1).astype(aval.dtype) if shared else dx
    return none


def _in_order(ct, x, rows, experts: int, p: Params):
    """What meets the inputs of the weights and what their outputs, ``[1, M, K]`` and ``[1, M, N]``, in the order of the
    experts, and where the rows of each end, ``s32[E + 1]`` from 0 on."""
    if p.row_mode == RowMode.SIZES:
        ends = _ends(rows, x.shape[0])
    else:
        ids = jnp.where(_valid(rows, experts), rows, experts)  # rows without an expert are the last
        order = jnp.argsort(ids)
        x, ct = x[order // p.repeat], ct[order]
        ends = jnp.cumsum((ids[:, None] == jnp.arange(experts)).sum(0, dtype=jnp.int32))
    inputs, outputs = (ct, x) if p.transpose else (x, ct)
    return inputs[None], outputs[None], jnp.concatenate([jnp.zeros((1,), jnp.int32), ends.astype(jnp.int32)])


def _sums_gradient(inputs, outputs, limits, groups: int, n: int, p: Params):
    """``sum_m outputs (sum_k inputs)`` over the inputs of each group and the rows of each expert, f32 ``[E, G, N]``."""
    of_sums = scales_gradient.Params(p.bits, p.k, groups, p.implementation, sums=True, precision=p.precision)
    codes = scales_gradient.unit_codes(p.bits, p.k, n)
    return scales_gradient.scales_gradient(inputs, codes, outputs, limits, params=of_sums)


def _scales_cotangent(ct, x, qw, rows, shift, aval, p: Params):
    """As for a single weight, of each expert and its rows, which are put in the order of the experts first."""
    experts, groups, n = aval.shape
    operands = inputs, outputs, limits = _in_order(ct, x, rows, experts, p)
    of_codes = scales_gradient.Params(p.bits, p.k, groups, p.implementation, p.table, precision=p.precision)
    y = scales_gradient.scales_gradient(inputs, qw, outputs, limits, params=of_codes)
    if shift:
        y = y - zeros_beyond_middle(shift[0], p.bits) * _sums_gradient(*operands, groups, n, p)
    return y.astype(aval.dtype)


register_lowerings(ragged_matmul_p, _evaluate)
allow_partitioning(ragged_matmul_p)
batching.primitive_batchers[ragged_matmul_p] = _batch
ad.primitive_jvps[ragged_matmul_p] = _jvp
ad.primitive_transposes[ragged_matmul_p] = _transpose
register_lowerings(ragged_groups_p, _of_groups)
batching.primitive_batchers[ragged_groups_p] = _groups_batch
ad.primitive_jvps[ragged_groups_p] = _groups_jvp
ad.primitive_transposes[ragged_groups_p] = _groups_transpose
