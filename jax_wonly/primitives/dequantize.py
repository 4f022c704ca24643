"""``wonly_dequantize``: packed weights to dense ones.

Operands ``qw u32[B, Nt, Kt, 512]``, ``scales[B, G, N]`` and, unless ``shift_mode`` is NONE, ``shift[B, G, N]``; result
``[B, K, N]``. With a ``table``, a static parameter, codes index its 16 values; there is no shift then.
"""

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching

from jax_wonly import _abi, _ffi
from jax_wonly._abi import ShiftMode
from jax_wonly._format import bias_of, unpack
from jax_wonly._table import Table, as_operand, look_up
from jax_wonly.primitives._common import make_primitive, merge_batch, register_lowerings

dequantize_p = make_primitive("wonly_dequantize")


def centred_codes(
    qw, shift, *, bits: int, shift_mode: ShiftMode, k: int, n: int, groups: int, table: Table | None = None
) -> jax.Array:
    """What the scales multiply, float32 ``[B, G, K / G, N]``: codes less their zero, plain codes with offsets."""
    codes = unpack(qw, bits, k, n).reshape(-1, groups, k // groups, n)
    if table is not None:
        return look_up(codes, table)
    codes = codes.astype(jnp.float32)
    if shift_mode == ShiftMode.NONE:
        return codes - bias_of(bits)
    if shift_mode == ShiftMode.ZEROS:
        return codes - shift.astype(jnp.float32)[:, :, None]
    return codes


def reference(
    qw, scales, *shift, bits: int, shift_mode: ShiftMode, k: int, dtype, table: Table | None = None
) -> jax.Array:
    """The same in XLA's operations, in float32 until the last rounding. Leading axes of size 1 broadcast."""
    groups, n = scales.shape[-2:]
    codes = centred_codes(
        qw, *(shift or (None,)), bits=bits, shift_mode=shift_mode, k=k, n=n, groups=groups, table=table
    )
    w = codes * scales.astype(jnp.float32)[:, :, None]
    if shift_mode == ShiftMode.OFFSETS:
        w = w + shift[0].astype(jnp.float32)[:, :, None]
    return w.reshape(-1, k, n).astype(dtype)


def ffi_call(
    qw, scales, *shift, bits: int, shift_mode: ShiftMode, k: int, dtype, table: Table | None = None
) -> jax.Array:
    """The custom call. Operands may have one leading entry for all; those that do are copied."""
    shift_mode, shift = as_operand(table, shift_mode, shift)
    lead = max(a.shape[0] for a in (qw, scales, *shift))
    operands = [jnp.broadcast_to(a, (lead, *a.shape[1:])) for a in (qw, scales, *shift)]
    result = jax.ShapeDtypeStruct((lead, k, scales.shape[-1]), dtype)
    call = jax.ffi.ffi_call(_abi.DEQUANTIZE, result)
    return call(*operands, bits=np.int64(bits), shift_mode=np.int64(shift_mode))


def _evaluate(qw, scales, *shift, platform, implementation, **params):
    if qw.shape[0] != 0 and _ffi.use_native(implementation, platform):
        return ffi_call(qw, scales, *shift, **params)
    return reference(qw, scales, *shift, **params)


@dequantize_p.def_abstract_eval
def _abstract(qw, scales, *shift, k, dtype, **_):
    lead = max(a.shape[0] for a in (qw, scales, *shift))
    return scales.update(shape=(lead, k, scales.shape[-1]), dtype=jnp.dtype(dtype), weak_type=False)


def _batch(operands, axes, **params):
    operands, size, lead = merge_batch(operands, axes)
    w = dequantize_p.bind(*operands, **params)
    return w.reshape(size, lead, *w.shape[1:]), 0


def _jvp(primals, tangents, *, implementation, **params):
    w = dequantize_p.bind(*primals, implementation=implementation, **params)
    qw, *floats = primals
    differentiable = [
        jnp.issubdtype(p.dtype, jnp.floating) and not isinstance(t, ad.Zero)
        for p, t in zip(floats, tangents[1:], strict=True)
    ]
    moving = [p for p, d in zip(floats, differentiable, strict=True) if d]
    if not moving:
        return w, ad.Zero(jax.typeof(w).to_tangent_aval())

    def of_moving(*values):
        it = iter(values)
        return reference(qw, *(next(it) if d else p for p, d in zip(floats, differentiable, strict=True)), **params)

    _, w_dot = jax.jvp(of_moving, moving, [t for t, d in zip(tangents[1:], differentiable, strict=True) if d])
    return w, w_dot


register_lowerings(dequantize_p, _evaluate)
batching.primitive_batchers[dequantize_p] = _batch
ad.primitive_jvps[dequantize_p] = _jvp
