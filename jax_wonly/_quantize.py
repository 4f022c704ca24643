"""Quantizing dense weights, and back."""

from functools import partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jax_wonly import _ffi, _table
from jax_wonly._abi import QuantizeMode, ShiftMode
from jax_wonly._format import check_bits, check_size, pack
from jax_wonly._tensor import QuantizedTensor
from jax_wonly._validate import (
    broadcast_leads,
    check_array,
    check_choice,
    check_float_dtype,
    check_group_size,
    check_weights,
)
from jax_wonly.primitives.dequantize import dequantize_p
from jax_wonly.primitives.quantize import quantize_p

# For what reads a whole weight: XLA tries out its fusions on copies of what they read.
jit_within_memory = partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})

MODES = {mode.name.lower(): mode for mode in QuantizeMode}


@partial(jax.jit, static_argnames=("bits", "group_size", "mode", "scale_dtype", "implementation"), inline=True)
def _quantize(w, **params):
    results = quantize_p.bind(w.reshape(-1, *w.shape[-2:]), **params)
    return [r.reshape(*w.shape[:-2], *r.shape[1:]) for r in results]


@partial(jax.jit, static_argnames=("group_size", "table", "scale_dtype"), inline=True)
def _quantize_to_table(w, **params):
    codes, scales = _table.quantize(w, **params)
    return pack(codes, 4), scales


@partial(jax.jit, static_argnames=("bits", "shift_mode", "k", "dtype", "table", "implementation"), inline=True)
def _dequantize(qw, scales, *shift, k, **params):
    lead = np.broadcast_shapes(*(a.shape[:-2] for a in (scales, *shift)), qw.shape[:-3])
    operands = [jnp.broadcast_to(qw, (*lead, *qw.shape[-3:])).reshape(-1, *qw.shape[-3:])]
    operands += [jnp.broadcast_to(a, (*lead, *a.shape[-2:])).reshape(-1, *a.shape[-2:]) for a in (scales, *shift)]
    return dequantize_p.bind(*operands, k=k, **params).reshape(*lead, k, scales.shape[-1])


def quantize(
    w,
    *,
    bits: int = 4,
    group_size: int | None = 128,
    mode: str = "symmetric",
    scale_dtype=None,
    implementation: str | None = None,
) -> QuantizedTensor:
    """Quantizes weights by round-to-nearest.

    Args:
      w: float16, bfloat16 or float32 ``[..., K, N]``: inputs by outputs, as Flax keeps its kernels. Leading axes are
        stacked layers or experts.
      bits: 4 or 8.
      group_size: how many successive inputs share a scale: 32, 64, 128 or 256, and it must divide K; None or -1: all
        of them (per-channel scales).
      mode: ``"symmetric"`` (``w = (q - 2**(bits - 1)) * s`` from the largest magnitude), or from the extremes of the
        group ``"integer_zeros"`` (``w = (q - z) * s``, uint8 z), ``"float_zeros"`` (z of the scales' type) or
        ``"offsets"`` (``w = q * s + o``). ``"nf4"`` and ``"fp4"`` (4 bits): ``w = table[q] * s`` with the 16 values of
        bitsandbytes, s from the largest magnitude.
      scale_dtype: type of the scales, and of float zeros and offsets; default: the type of ``w``.
      implementation: None (the compiled kernels where they are installed), ``"cpu"``, ``"cuda"`` or ``"xla"``.

    Returns:
      A :class:`QuantizedTensor`. ``qw, scales = quantize(w)`` takes a symmetric one apart; the other modes have a
      third array. Codes do not depend on the implementation.

    Raises:
      TypeError: an argument has a wrong type or dtype.
      ValueError: an argument is outside of what is accepted, or ``w`` holds NaN or Inf (seen only outside of ``jit``).

    Example:
      >>> w = jax.random.normal(jax.random.key(0), (128, 64))
      >>> jw.quantize(w, bits=4, group_size=64)
      QuantizedTensor(int4[128, 64], group_size=64, symmetric, scales float32, 4.5 KiB)
      >>> jw.quantize(w, bits=8, group_size=None, mode="integer_zeros", scale_dtype="bfloat16")
      QuantizedTensor(int8[128, 64], group_size=128, zeros uint8, scales bfloat16, 8.2 KiB)
    """
    check_array("w", w)
    bits = check_bits(bits)
    if len(w.shape) < 2 or 0 in w.shape[-2:]:
        raise ValueError(f"jax_wonly: w has shape {tuple(w.shape)}; accepted: [..., K, N] with K, N >= 1.")
    k, n = w.shape[-2:]
    check_choice("mode", mode, (*MODES, *_table.TABLES))
    if mode in _table.TABLES and bits != 4:
        raise ValueError(f"jax_wonly: bits={bits} with mode={mode!r}; accepted: 4.")
    group_size = check_group_size(group_size, k)
    scale_dtype = jnp.dtype(w.dtype) if scale_dtype is None else check_float_dtype("scale_dtype", scale_dtype)
    implementation = _ffi.resolve_implementation(implementation)
    w = jnp.asarray(w)
    if not isinstance(w, jax.core.Tracer) and not bool(_all_finite(w)):
        raise ValueError(f"jax_wonly: w of shape {tuple(w.shape)} holds NaN or Inf; accepted: finite values.")
    if mode in _table.TABLES:
        table = _table.TABLES[mode]
        qvalue, scales = _quantize_to_table(w, group_size=group_size, table=table, scale_dtype=scale_dtype)
        return QuantizedTensor(qvalue, scales, bits=bits, k=k, n=n, table=table)
    qvalue, scales, *shift = _quantize(
        w, bits=bits, group_size=group_size, mode=MODES[mode], scale_dtype=scale_dtype, implementation=implementation
    )
    zeros = shift[0] if MODES[mode] in (QuantizeMode.INTEGER_ZEROS, QuantizeMode.FLOAT_ZEROS) else None
    offsets = shift[0] if MODES[mode] == QuantizeMode.OFFSETS else None
    return QuantizedTensor(qvalue, scales, zeros, offsets, bits=bits, k=k, n=n)


@jit_within_memory
def _all_finite(w):
    return jnp.isfinite(w).all()


def dequantize(
    qw,
    scales: Any = None,
    zeros: Any = None,
    offsets: Any = None,
    *,
    k: int | None = None,
    bits: int | None = None,
    dtype=None,
    implementation: str | None = None,
) -> jax.Array:
    """Dense weights of quantized ones.

    Args:
      qw: a :class:`QuantizedTensor`, or a packed array uint32 ``[..., ceil(N / 64), ceil(K / tile_k), 512]``.
      scales, zeros, offsets: with a packed array, its parameters ``[..., K / group_size, N]``.
      k: with a packed array, the number of inputs K.
      bits: with a packed array, 4 or 8; follows from the shapes unless K <= 32.
      dtype: float16, bfloat16 or float32; default: the type of the scales.
      implementation: None, ``"cpu"``, ``"cuda"`` or ``"xla"``.

    Returns:
      ``[..., K, N]``: ``(q - zeros) * scales``, ``q * scales + offsets`` or ``table[q] * scales``, computed in float32
      and rounded once.

    Raises:
      TypeError, ValueError: as :func:`jax_wonly.matmul`.

    Example:
      >>> w = jax.random.normal(jax.random.key(0), (128, 64))
      >>> dense = jw.dequantize(jw.quantize(w, bits=8))
      >>> dense.shape, bool(jnp.allclose(dense, w, atol=0.02))
      ((128, 64), True)
    """
    table = None
    if isinstance(qw, QuantizedTensor):
        if any(a is not None for a in (scales, zeros, offsets, k, bits)):
            raise TypeError(
                "jax_wonly: a QuantizedTensor carries its scales, zeros, offsets, k and bits; pass none of them."
            )
        scales, zeros, offsets, k, bits = qw.scales, qw.zeros, qw.offsets, qw.k, qw.bits
        table = _table.check_table(qw.table, bits, zeros, offsets)
        qw = qw.qvalue
    if k is None:
        raise TypeError("jax_wonly: k is None; accepted: the number of inputs K of the packed array.")
    bits, k, _ = check_weights(qw, scales, zeros, offsets, bits=bits, k=check_size("k", k))
    shift = [a for a in (zeros, offsets) if a is not None]
    broadcast_leads(qw=qw.shape[:-3], scales=scales.shape[:-2], zeros_or_offsets=shift[0].shape[:-2] if shift else ())
    dtype = jnp.dtype(scales.dtype) if dtype is None else check_float_dtype("dtype", dtype)
    return _dequantize(
        qw,
        scales,
        *shift,
        bits=bits,
        shift_mode=shift_mode_of(zeros, offsets),
        k=k,
        dtype=dtype,
        table=table,
        implementation=_ffi.resolve_implementation(implementation),
    )


def shift_mode_of(zeros, offsets) -> ShiftMode:
    if zeros is not None:
        return ShiftMode.ZEROS
    return ShiftMode.NONE if offsets is None else ShiftMode.OFFSETS
