"""``wonly_quantize``: dense weights to packed ones.

Operand ``w[B, K, N]``; results ``qw u32[B, Nt, Kt, 512]``, ``scales[B, G, N]`` and, unless symmetric, ``shift[B, G,
N]``. The codes are defined to the bit, so that every implementation stores the same ones: see :func:`reference`.
"""

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching

from jax_wonly import _abi, _ffi
from jax_wonly._abi import QuantizeMode
from jax_wonly._format import bias_of, pack, packed_shape
from jax_wonly.primitives._common import divide, make_primitive, register_lowerings

quantize_p = make_primitive("wonly_quantize", multiple_results=True)


def _rint(x):
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _stored(x, dtype):
    """``x`` rounded to ``dtype``, and the float32 value of that."""
    # The barrier keeps XLA from dropping the round trip as excess precision.
    stored = lax.optimization_barrier(x.astype(dtype))
    return stored, stored.astype(jnp.float32)


def _scale(span, steps: int, dtype):
    rounded = divide(span, jnp.float32(steps), dtype)
    return _stored(jnp.minimum(rounded, jnp.finfo(dtype).max), dtype)


def reference(w, *, bits: int, group_size: int, mode: QuantizeMode, scale_dtype) -> tuple[jax.Array, ...]:
    """Quantizes in XLA's operations: the definition of the codes.

    Everything is float32 and rounds half to even; ``round`` below is to the scales' type, clamped to its largest
    finite value. With ``lo``, ``hi`` the extremes of a group, ``top = 2**bits - 1`` and ``qmax = 2**(bits - 1) - 1``:

    - symmetric: ``s = round(max|w| / qmax)``, ``q = clip(rint(w / s), -qmax - 1, qmax) + bias``;
    - integer zeros (of the range widened to hold 0): ``s = round((hi - lo) / top)``, ``z = clip(rint(-lo / s), 0,
      top)``, ``q = clip(rint(w / s) + z, 0, top)``;
    - float zeros: ``z = round(-lo / s)``, ``q = clip(rint(w / s + z), 0, top)``; a constant group has ``s = |lo|``,
      ``z = -sign(lo)``;
    - offsets: ``o = round(lo)``, ``q = clip(rint((w - o) / s), 0, top)``.

    Where ``s`` is 0 every code is that of weight zero (bias, zero point, or 0).
    """
    b, k, n = w.shape
    groups = k // group_size
    w = w.astype(jnp.float32).reshape(b, groups, group_size, n)
    top = (1 << bits) - 1
    bias = bias_of(bits)
    shift: tuple[jax.Array, ...] = ()

    if mode == QuantizeMode.SYMMETRIC:
        scales, s = _scale(jnp.max(jnp.abs(w), axis=2, keepdims=True), bias - 1, scale_dtype)
        q = jnp.clip(_rint(divide(w, s)), -bias, bias - 1) + bias
        q = jnp.where(s == 0, bias, q)
    else:
        lo, hi = jnp.min(w, axis=2, keepdims=True), jnp.max(w, axis=2, keepdims=True)
        if mode == QuantizeMode.INTEGER_ZEROS:
            lo, hi = jnp.minimum(lo, 0), jnp.maximum(hi, 0)
        scales, s = _scale(hi - lo, top, scale_dtype)
        flat = s == 0
        if mode == QuantizeMode.INTEGER_ZEROS:
            z = jnp.where(flat, 0, jnp.clip(_rint(divide(-lo, s)), 0, top))
            q = jnp.where(flat, z, jnp.clip(_rint(divide(w, s)) + z, 0, top))
            zeros = z.astype(jnp.uint8)
        elif mode == QuantizeMode.FLOAT_ZEROS:
            zeros, z = _stored(divide(-lo, s, scale_dtype), scale_dtype)
            q = jnp.where(flat, 0, jnp.clip(_rint(divide(w, s) + z), 0, top))
            constant = jnp.minimum(jnp.abs(lo).astype(scale_dtype), jnp.finfo(scale_dtype).max)
            scales = jnp.where(flat, constant, scales)
            zeros = jnp.where(flat, -jnp.sign(lo).astype(scale_dtype), zeros)
        else:
            zeros, o = _stored(lo, scale_dtype)
            q = jnp.where(flat, 0, jnp.clip(_rint(divide(w - o, s)), 0, top))
        shift = (zeros.reshape(b, groups, n),)
    codes = q.astype(jnp.uint8).reshape(b, k, n)
    return pack(codes, bits), scales.reshape(b, groups, n), *shift


def _results(w, *, bits, group_size, mode, scale_dtype):
    b, k, n = w.shape
    per_group = (b, k // group_size, n)
    results = [((b, *packed_shape(bits, k, n)), jnp.dtype(jnp.uint32)), (per_group, jnp.dtype(scale_dtype))]
    if mode != QuantizeMode.SYMMETRIC:
        results.append((per_group, jnp.dtype(jnp.uint8 if mode == QuantizeMode.INTEGER_ZEROS else scale_dtype)))
    return results


def _evaluate(w, *, platform, implementation, **params):
    if w.shape[0] == 0 or not _ffi.use_native(implementation, platform):
        return reference(w, **params)
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in _results(w, **params)]
    call = jax.ffi.ffi_call(_abi.QUANTIZE, results)
    return call(
        w,
        bits=np.int64(params["bits"]),
        group_size=np.int64(params["group_size"]),
        quantize_mode=np.int64(params["mode"]),
    )


@quantize_p.def_abstract_eval
def _abstract(w, *, implementation, **params):
    return [w.update(shape=shape, dtype=dtype, weak_type=False) for shape, dtype in _results(w, **params)]


def _batch(operands, axes, **params):
    w = jnp.moveaxis(operands[0], axes[0], 0)
    size, lead, k, n = w.shape
    results = quantize_p.bind(w.reshape(size * lead, k, n), **params)
    return [r.reshape(size, lead, *r.shape[1:]) for r in results], [0] * len(results)


def _jvp(primals, tangents, **params):
    raise NotImplementedError(
        "jax_wonly: quantize has no derivative, because it rounds. Use jax.lax.stop_gradient(w), or "
        "differentiate with respect to the scales, zeros, offsets or x of matmul."
    )


register_lowerings(quantize_p, _evaluate)
batching.primitive_batchers[quantize_p] = _batch
ad.primitive_jvps[quantize_p] = _jvp
