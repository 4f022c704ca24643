"""``wonly_scales_gradient``: what the cotangent of a product is to the scales of its packed weights.

Operands ``x[Bx, M, K]``, ``qw u32[Bw, Nt, Kt, 512]``, ``dy[By, M, N]``; result ``f32[B, G, N]``: the sum over the rows
m of ``dy[b, m, n]`` times the sum over the inputs k of group g of ``x[b, m, k] * c[b, k, n]``, where ``c`` is a code
less ``2 ** (bits - 1)``, or with a ``table``, a static parameter, what the table has for it. Every leading size is 1 or
B. It is the gradient of a product's scales where there are no zeros, and most of it where there are.

With ``limits s32[E + 1]``, which ascend from 0, the rows of entry e are those from ``limits[e]`` to ``limits[e + 1] -
1`` of ``x[1, M, K]`` and ``dy[1, M, N]``: rows in the order of their experts.

The gradient of a dense weight, of which this is a weighted sum over each group, is in memory for some outputs or one
expert at a time, or never (``ffi/cuda/scales_gradient_dense.cuh``). The operation is linear in ``x`` and in ``dy``,
and its derivatives are products with the packed weights again.
"""

import math
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
from jax_wonly._abi import Activation, RowMode, ShiftMode
from jax_wonly._format import TILE_N, packed_shape
from jax_wonly._table import Table, as_operand
from jax_wonly.primitives import dequantize
from jax_wonly.primitives._common import (
    align_varying,
    group_sums,
    is_zero,
    make_primitive,
    may_round,
    merge_batch,
    pad_last,
    register_lowerings,
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

scales_gradient_p = make_primitive("wonly_scales_gradient")

_DENSE_BYTES = 64 << 20  # of a dense gradient in float32 at a time
_PRODUCTS = 3  # of fp16 numbers that one of float32 numbers is
_ROWS = (32, 1024)  # of an expert at a time, at least and at most


class Params(NamedTuple):
    """The static parameters."""

    bits: int
    k: int
    groups: int
    implementation: str | None
    table: Table | None = None
    sums: bool = False
    """Whether codes are those of ``unit_codes``, so that the sums of each group's inputs are enough."""
    precision: lax.Precision | None = None


def scales_gradient(x, qw, dy, *limits, params: Params) -> jax.Array:
    """Binds the primitive; shapes and dtypes are the caller's responsibility."""
    return scales_gradient_p.bind(*align_varying(x, qw, dy, *limits), params=params)


def unit_codes(bits: int, k: int, n: int) -> jax.Array:
    """Packed weights ``[1, Nt, Kt, 512]`` all of whose codes are one more than ``2 ** (bits - 1)``: with them the
    result is that of the sums of each group's inputs.
    """
    return jnp.full((1, *packed_shape(bits, k, n)), {4: 0x99999999, 8: 0x81818181}[bits], jnp.uint32)


# Evaluation.


def _operands_alike(x, dy):
    """Both in their type, of 16 bits, or in float32."""
    if x.dtype == dy.dtype and x.dtype.itemsize == 2:
        return x, dy
    return x.astype(jnp.float32), dy.astype(jnp.float32)


def _dense_gradient(x, dy) -> jax.Array:
    """``[..., K, N]`` of ``[..., M, K]`` and ``[..., M, N]``, exact products added in float32."""
    x, dy = _operands_alike(x, dy)
    return jnp.matmul(jnp.swapaxes(x, -1, -2), dy, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _of_dense(dw, qw, p: Params) -> jax.Array:
    """``[B, G, N]`` of the gradient ``[B, K, N]`` of a dense weight, or of sums of groups."""
    if p.sums:
        return dw
    n = dw.shape[-1]
    codes = dequantize.centred_codes(
        qw, None, bits=p.bits, shift_mode=ShiftMode.NONE, k=p.k, n=n, groups=p.groups, table=p.table
    )
    return (codes * dw.reshape(-1, *codes.shape[1:])).sum(2)


def _reference(x, qw, dy, *limits, params: Params) -> jax.Array:
    """XLA's operations alone."""
    p = params
    if p.sums:
        x = group_sums(x, p.groups)
    if limits:
        return _reference_of_experts(x[0], qw, dy[0], *limits, p=p)
    n, tiles = dy.shape[-1], qw.shape[1]
    lead = _lead(x, qw, dy)
    each = max(1, _DENSE_BYTES // (4 * lead * p.k * TILE_N))  # tiles of outputs at a time
    steps = -(-tiles // each)
    if steps == 1:
        return _of_dense(_dense_gradient(x, dy), qw, p)
    each = -(-tiles // steps)
    qw = jnp.pad(qw, ((0, 0), (0, steps * each - tiles), (0, 0), (0, 0)))
    dy = jnp.pad(dy, ((0, 0), (0, 0), (0, steps * each * TILE_N - n)))

    def of_tiles(step):
        some = lax.dynamic_slice_in_dim(dy, step * each * TILE_N, each * TILE_N, axis=2)
        return _of_dense(_dense_gradient(x, some), lax.dynamic_slice_in_dim(qw, step * each, each, axis=1), p)

    y = lax.map(of_tiles, jnp.arange(steps))  # [steps, B, G, outputs]
    return jnp.moveaxis(y, 0, 2).reshape(*y.shape[1:3], -1)[..., :n]


def _reference_of_experts(x, qw, dy, limits, *, p: Params) -> jax.Array:
    """One expert after the other, and some of its rows after the others."""
    experts, n = limits.shape[0] - 1, dy.shape[-1]
    x, dy = _operands_alike(x, dy)
    m = x.shape[0]
    rows = 2 ** round(math.log2(max(1.0, m / experts))) if isinstance(m, int) else 128
    rows = min(max(rows, _ROWS[0]), _ROWS[1])
    # Whatever row a slice begins at, it is there.
    x, dy = (jnp.pad(a, ((0, rows), (0, 0))) for a in (x, dy))
    start, *_ = align_varying(jnp.zeros((x.shape[1], n), jnp.float32), x, qw, dy, limits)

    shared = qw.shape[0] == 1

    def of_expert(entry):
        first, end, *own = entry

        def add(i, dw):
            at = first + i * rows
            mine = (at + jnp.arange(rows) < end)[:, None]
            some = (jnp.where(mine, lax.dynamic_slice_in_dim(a, at, rows), 0) for a in (x, dy))
            return dw + _dense_gradient(*some)

        dw = lax.fori_loop(0, (end - first + rows - 1) // rows, add, start)
        return _of_dense(dw[None], qw if shared else own[0][None], p)[0]

    def none(entry):
        del entry
        return align_varying(jnp.zeros((p.groups, n), jnp.float32), x, qw, dy, limits)[0]

    entries = (limits[:-1], limits[1:]) if shared else (limits[:-1], limits[1:], qw)
    return lax.map(lambda entry: lax.cond(entry[1] > entry[0], of_expert, none, entry), entries)


def _native(x, qw, dy, *limits, params: Params, platform: str) -> jax.Array:
    """What one device computes of its shards."""
    p = params
    if platform != "cuda" or p.implementation == "dequantize":
        return _reference(x, qw, dy, *limits, params=p)
    from jax_wonly import _cuda_dispatch

    outputs, group_size = dy.shape[-1], p.k // p.groups
    if not _cuda_dispatch.has_scales_gradient():
        return _reference(x, qw, dy, *limits, params=p)
    # With zeros behind, up to whole eights: packed weights go on to whole tiles anyway.
    k, n = map(_cuda_dispatch.whole, (p.k, outputs))
    x, dy, p = pad_last(x, k), pad_last(dy, n), p._replace(k=k)
    if may_round(jnp.promote_types(x.dtype, dy.dtype), p.precision):
        x, dy = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
    x, dy, undo = (x, dy, ()) if x.dtype == dy.dtype and x.dtype.itemsize == 2 else _as_fp16(x, dy)
    times = _PRODUCTS if undo else 1
    limits = tuple(times * a for a in limits)
    block = group_size if group_size in (32, 64) else 128  # of larger groups the sums follow
    lead = limits[0].shape[0] - 1 if limits else _lead(x, qw, dy)
    parts = 1
    if not limits and lead == 1 and isinstance(x.shape[1], int):
        parts = _cuda_dispatch.scales_gradient_parts(x.shape[1], p.k, n)
    if parts > 1:  # as entries with the same weights
        each = -(-x.shape[1] // parts)
        limits = (jnp.minimum(jnp.arange(parts + 1, dtype=jnp.int32) * each, x.shape[1]),)
    result = jax.ShapeDtypeStruct((lead * parts, -(-p.k // block), n), jnp.float32)
    _, table = as_operand(p.table, ShiftMode.NONE, ())
    attributes = {"bits": np.int64(p.bits), "block": np.int64(block), "has_table": np.int64(len(table))}
    y = jax.ffi.ffi_call(_abi.SCALES_GRADIENT, result)(x, qw, dy, *table, *limits, **attributes)
    y = y.sum(0, keepdims=True) if parts > 1 else y
    y = y[..., :outputs]
    y = y if y.shape[1] == p.groups else y.reshape(lead, p.groups, -1, outputs).sum(2)
    for factor in undo:
        y = y * factor
    return y


def _as_fp16(x, dy):
    """float32 ``x`` and ``dy`` as two fp16 numbers each, in units of a power of two of the largest finite one, exact to
    2^-22 of a number or 2^-39 of that: rows of which three products are theirs but for one of 2^-22, and what undoes
    the powers."""

    def split(a):
        a = a.astype(jnp.float32)
        finite = jnp.isfinite(a)
        _, exponent = jnp.frexp(jnp.max(jnp.where(finite, jnp.abs(a), 0), initial=0))
        exponent = jnp.clip(exponent, -100, 128)
        raised = a * jnp.ldexp(jnp.float32(1), 15 - exponent)
        high = lax.reduce_precision(raised, 5, 10)  # which XLA, unlike two conversions, leaves
        low = jnp.where(finite, raised - high, 0)
        return high.astype(jnp.float16), low.astype(jnp.float16), jnp.ldexp(jnp.float32(1), exponent - 15)

    def rows(*pieces):  # of each row those of all pieces, so that rows of an expert stay together
        lead, m, columns = pieces[0].shape
        return jnp.stack(pieces, axis=2).reshape(lead, len(pieces) * m, columns)

    x, x_low, x_undo = split(x)
    dy, dy_low, dy_undo = split(dy)
    return rows(x, x_low, x), rows(dy, dy, dy_low), (x_undo, dy_undo)


def _lead(*operands) -> Any:
    return next((a.shape[0] for a in operands if a.shape[0] != 1), 1)


def _result_shape(x, qw, dy, *limits, p: Params):
    lead = limits[0].shape[0] - 1 if limits else _lead(x, qw, dy)
    return lead, p.groups, dy.shape[-1]


def _evaluate(x, qw, dy, *limits, params: Params, platform: str) -> jax.Array:
    shape = _result_shape(x, qw, dy, *limits, p=params)
    if any(map(is_zero, (*shape, x.shape[1]))):
        return jnp.zeros(shape, jnp.float32)
    if not _ffi.use_native(params.implementation, platform):
        return _reference(x, qw, dy, *limits, params=params)
    evaluate = partial(_native, platform=platform)
    operands = (x, qw, dy, *limits)
    return with_partitioning(
        partial(evaluate, params=params), partial(_partition, evaluate, params), partial(_rule, params), *operands
    )


@scales_gradient_p.def_abstract_eval
def _abstract(x, qw, dy, *limits, params: Params):
    shape = _result_shape(x, qw, dy, *limits, p=params)
    return x.update(shape=shape, dtype=jnp.dtype(jnp.float32), weak_type=False)


# Automatic partitioning: rows are split, with a sum over the devices, and whole tiles and groups.


def _rule(params: Params, shapes, mesh, value_types, result_types):
    del value_types, result_types
    p = params
    x, qw, dy, *limits = shapes
    n, m = dy[2], x[1]
    devices = math.prod(mesh.shape.values())
    k_parts, n_parts = splits(p.k, n, p.groups, p.bits)
    split_k, split_n, split_m = k_parts % devices == 0, n_parts % devices == 0, m % devices == 0
    rule = RuleBuilder()
    k_of = partial(rule.dim, factor="k", parts=k_parts, split=split_k)
    n_of = partial(rule.dim, factor="n", parts=n_parts, split=split_n)
    lead, *_ = _shape_of(shapes, p)

    def lead_of(index: int):
        return "b" if shapes[index][0] == lead and not (limits and index != 1) else f"one_{index}"

    operands = [
        ArrayMapping(lead_of(0), "m", k_of(p.k)),
        ArrayMapping(lead_of(1), n_of(qw[1]), k_of(qw[2]), "words"),
        ArrayMapping(lead_of(2), "m", n_of(n)),
        *(ArrayMapping("limits") for _ in limits),
    ]
    result = ArrayMapping("b", k_of(p.groups) if p.groups > 1 else "group", n_of(n))
    split = {f for f, s in (("b", True), ("m", split_m), ("k", split_k), ("n", split_n)) if s}
    return rule.build(operands, result, split, {"m"} | ({"k"} if p.groups == 1 else set()))


def _shape_of(shapes, p: Params):
    return _result_shape(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes), p=p)


def _partition(evaluate, params: Params, mesh, arg_shapes, result_shape: Any):
    """Shardings of the operands, and what each device computes."""
    p = params
    x, qw, dy, *limits = arg_shapes
    if (whole := unnamed_partition(partial(evaluate, params=p), mesh, arg_shapes, result_shape)) is not None:
        return whole
    k_parts, n_parts = splits(p.k, dy.shape[2], p.groups, p.bits)
    lead = usable(mesh, axes_of(qw if limits else result_shape, 0), result_shape.shape[0], ())
    rows = usable(mesh, axes_of(x, 1) or axes_of(dy, 1), x.shape[1], lead)
    n_axes = usable(mesh, axes_of(result_shape, 2) or axes_of(qw, 1), n_parts, lead + rows)
    of_k = axes_of(result_shape, 1) if p.groups > 1 else axes_of(qw, 2)
    k_axes = usable(mesh, of_k or axes_of(x, 2), k_parts, lead + rows + n_axes)
    parts = math.prod(mesh.shape[a] for a in k_axes)
    local = p._replace(k=p.k // parts, groups=p.groups // parts if p.groups > 1 else 1)
    summed = rows + (k_axes if p.groups == 1 else ())

    def lead_of(shape):
        return lead if shape.shape[0] != 1 and not limits else ()

    operands = [
        named(mesh, lead_of(x), rows, k_axes),
        named(mesh, lead if qw.shape[0] != 1 else (), n_axes, k_axes, ()),
        named(mesh, lead_of(dy), rows, n_axes),
        *(named(mesh, ()) for _ in limits),
    ]

    def compute(x, qw, dy, *limits):
        if limits:
            own = limits[0]
            if lead:
                size = result_shape.shape[0] // math.prod(mesh.shape[a] for a in lead)
                own = lax.dynamic_slice_in_dim(own, lax.axis_index(lead) * size, size + 1)
            if rows:
                own = jnp.clip(own - lax.axis_index(rows) * x.shape[1], 0, x.shape[1])
            limits = (own,)
        y = evaluate(x, qw, dy, *limits, params=local)
        return lax.psum(y, summed) if summed else y

    return mesh, compute, named(mesh, lead, k_axes if p.groups > 1 else (), n_axes), tuple(operands)


# Batching and differentiation.


def _batch(operands, axes, *, params: Params):
    if len(operands) == 3:
        merged, size, lead = merge_batch(operands, axes)
        y = scales_gradient_p.bind(*merged, params=params)
        return y.reshape(size, lead, *y.shape[1:]), 0
    # Entries whose rows are others' would be more experts, with copies of the weights: one entry after the other.
    moved = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(operands, axes, strict=True)]

    def of_entry(mapped):
        entry = iter(mapped)
        given = (a if d is None else next(entry) for a, d in zip(moved, axes, strict=True))
        return scales_gradient_p.bind(*given, params=params)

    return lax.map(of_entry, [a for a, d in zip(moved, axes, strict=True) if d is not None]), 0


def _jvp(primals, tangents, *, params: Params):
    x, qw, dy, *limits = primals
    x_dot, _, dy_dot, *_ = tangents
    y = scales_gradient_p.bind(*primals, params=params)
    terms = []
    if not isinstance(x_dot, ad.Zero):
        terms.append(scales_gradient_p.bind(x_dot, qw, dy, *limits, params=params))
    if not isinstance(dy_dot, ad.Zero):
        terms.append(scales_gradient_p.bind(x, qw, dy_dot, *limits, params=params))
    if not terms:
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    return y, terms[0] if len(terms) == 1 else terms[0] + terms[1]


def _transpose(ct, x, qw, dy, *limits, params: Params):
    from jax_wonly.primitives import experts, matmul

    p = params
    none: list[jax.Array | None] = [None] * (3 + len(limits))
    if isinstance(ct, ad.Zero):
        return none
    of_x, of_dy = ad.is_undefined_primal(x), ad.is_undefined_primal(dy)
    if of_x == of_dy:
        raise NotImplementedError("jax_wonly: the gradient of scales is linear in x alone or in the cotangent alone.")
    aval, other = (x.aval, dy) if of_x else (dy.aval, x)
    shared = not limits and aval.shape[0] == 1 and ct.shape[0] != 1
    fixed = {
        "bits": p.bits,
        "shift_mode": ShiftMode.NONE,
        "has_bias": False,
        "activation": Activation.NONE,
        "transpose": of_x,
        "k": p.k,
        "out_dtype": jnp.dtype(jnp.float32) if shared else aval.dtype,
        "precision": p.precision,
        "implementation": p.implementation,
        "table": p.table,
    }
    if limits:
        qw = jnp.broadcast_to(qw, (ct.shape[0], *qw.shape[1:]))
        sizes = jnp.diff(limits[0])
        of_rows = experts.Params(**fixed, row_mode=RowMode.SIZES, repeat=1)
        z = experts.ragged_matmul_p.bind(other[0], qw, ct, sizes, params=of_rows)[None]
    else:
        z = matmul.matmul_p.bind(other, qw, ct, params=matmul.Params(**fixed))
    # One x, or one cotangent, served every entry of the batch.
    z = z.sum(0, keepdims=True).astype(aval.dtype) if shared else z
    none[0 if of_x else 2] = z
    return none


register_lowerings(scales_gradient_p, _evaluate)
allow_partitioning(scales_gradient_p)
batching.primitive_batchers[scales_gradient_p] = _batch
ad.primitive_jvps[scales_gradient_p] = _jvp
ad.primitive_transposes[scales_gradient_p] = _transpose
