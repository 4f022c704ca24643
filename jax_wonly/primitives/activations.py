"""``wonly_quantize_activation``: activations to int8 or float8 codes, each row or block of inputs with its scale.

Operand ``x[M, K]``; results ``codes[M, ceil16(K)]``, ``scales f32[M, G]``, ``sums[M, G]`` of the codes (int32 or
float32) and, unless symmetric, ``offsets f32[M, G]``. Codes lie in the order in which tensor cores meet those of packed
weights (:func:`to_kernel_order`), zeros after the last input. They are defined to the bit: see :func:`reference`.
"""

from typing import Any, NamedTuple

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching

from jax_wonly import _abi, _ffi
from jax_wonly._abi import ShiftMode
from jax_wonly._format import ceil_div
from jax_wonly.primitives._common import divide, make_primitive, register_lowerings

quantize_activation_p = make_primitive("wonly_quantize_activation", multiple_results=True)

DTYPES = ("int8", "float8_e4m3fn")
BLOCK = 16  # codes that are stored in another order than their inputs
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
_SMALLEST = 2.0**-100  # a span below counts as none: its reciprocal would overflow


class Scheme(NamedTuple):
    """How activations are quantized: the type of the codes, inputs that share a scale (None: a row), and whether
    codes have no offset."""

    dtype: str
    group_size: int | None
    symmetric: bool

    def groups(self, k: int) -> int:
        return 1 if self.group_size is None else k // self.group_size

    def for_inputs(self, k: int) -> "Scheme":
        """The scheme of a shard of ``k`` inputs, with smaller groups where these do not divide it."""
        if self.group_size is None:
            return self
        return self._replace(group_size=int(np.gcd(self.group_size, k)))


class Activations(NamedTuple):
    """The arrays of quantized activations ``[..., M, K]``; ``offsets`` is None where they are symmetric."""

    codes: Any
    scales: Any
    sums: Any
    offsets: Any = None

    def map(self, function) -> "Activations":
        return Activations(*(None if a is None else function(a) for a in self))

    @property
    def arrays(self) -> list:
        return [a for a in self if a is not None]


def to_kernel_order(codes):
    """``[..., K] -> [..., ceil16(K)]``: code ``4t + 2 odd + pair`` of each 16 is input ``8 pair + 2t + odd``."""
    *lead, k = codes.shape
    padded = jnp.pad(codes, [(0, 0)] * len(lead) + [(0, ceil_div(k, BLOCK) * BLOCK - k)])
    return jnp.moveaxis(padded.reshape(*lead, padded.shape[-1] // BLOCK, 2, 4, 2), -3, -1).reshape(padded.shape)


def to_natural_order(codes, k: int):
    """The inverse of :func:`to_kernel_order`."""
    *lead, padded = codes.shape
    return jnp.moveaxis(codes.reshape(*lead, padded // BLOCK, 4, 2, 2), -1, -3).reshape(codes.shape)[..., :k]


def reference(x, *, scheme: Scheme) -> tuple[jax.Array, ...]:
    """Quantizes in XLA's operations: the definition of the codes, in float32 with ties to even.

    - int8, symmetric: ``s = absmax * (1 / 127)``, ``q = clip(rint(x * (127 / absmax)), -127, 127)``;
    - int8 with offsets, from the extremes lo and hi: ``s = (hi - lo) * (1 / 255)``, ``o = lo + 128 s``,
      ``q = clip(rint((x - o) * (255 / (hi - lo))), -128, 127)``;
    - float8: ``s = absmax * (1 / 448)``, ``q = round(x * (448 / absmax))`` to float8.

    Where absmax or hi - lo is below 2^-100, codes and scales are zero.
    """
    m, k = x.shape
    groups = scheme.groups(k)
    x = x.astype(jnp.float32).reshape(m, groups, k // groups)
    integers = scheme.dtype == "int8"
    steps = np.float32(LARGEST[scheme.dtype] if scheme.symmetric else 255.0)
    low = jnp.min(x, axis=-1, keepdims=True)
    span = jnp.max(jnp.abs(x) if scheme.symmetric else x, axis=-1, keepdims=True)
    if not scheme.symmetric:
        span = span - low
    none = span < np.float32(_SMALLEST)
    scales = jnp.where(none, 0, span * (np.float32(1) / steps))
    inverse = jnp.where(none, 0, divide(steps, jnp.where(none, 1, span)))
    offsets = ()
    if not scheme.symmetric:
        offset = low + 128 * scales
        offsets = (offset.reshape(m, groups),)
        x = x - offset
    q = x * inverse
    if integers:
        q = jnp.clip(lax.round(q, lax.RoundingMethod.TO_NEAREST_EVEN), -127 if scheme.symmetric else -128, 127)
        q = jnp.where(jnp.isnan(q), 0, q)
    # The barrier keeps XLA from summing numbers that were not rounded to float8, as excess precision.
    codes = lax.optimization_barrier(q.astype(scheme.dtype))
    sums = codes.astype(jnp.int32 if integers else jnp.float32).sum(-1)
    return to_kernel_order(codes.reshape(m, k)), scales.reshape(m, groups), sums, *offsets


def dequantize(a: Activations, k: int, dtype) -> jax.Array:
    """What quantized activations stand for, ``[..., K]``, computed in float32."""
    codes = to_natural_order(a.codes, k).astype(jnp.float32)
    groups = a.scales.shape[-1]
    x = codes.reshape(*codes.shape[:-1], groups, k // groups) * a.scales[..., None]
    if a.offsets is not None:
        x = x + a.offsets[..., None]
    return x.reshape(codes.shape).astype(dtype)


def quantize(x, scheme: Scheme, implementation: str | None = None) -> Activations:
    """Quantizes ``x [..., K]``."""
    *lead, k = x.shape
    arrays = quantize_activation_p.bind(x.reshape(-1, k), scheme=scheme, implementation=implementation)
    return Activations(*(a.reshape(*lead, a.shape[-1]) for a in arrays))


def dequantized_dtype(out_dtype, platform: str):
    """Of activations whose codes no kernel takes: the 16-bit products of GPUs are several times faster than those of
    float32, and round far less than quantizing does."""
    return jnp.dtype(out_dtype if platform == "cuda" else jnp.float32)


def _needs_sums(shift_mode: ShiftMode, bits: int, shift_dtype) -> bool:
    """Whether the weights' zeros are not among what their codes can take off exactly: ``quantized::needs_sums``."""
    return shift_mode == ShiftMode.OFFSETS or (
        shift_mode == ShiftMode.ZEROS and (bits == 8 or jnp.dtype(shift_dtype) != jnp.uint8)
    )


def takes_codes(scheme: Scheme, k: int, bits: int, groups: int, platform: str) -> bool:
    """Whether a kernel takes codes of this scheme with those of weights of ``groups`` groups, on a GPU of the newest
    kind: ``quantized::supports`` in ``ffi/cuda/quantized_matmul.cu``."""

    def whole_stages(groups: int) -> bool:
        return groups == 1 or k // groups in (128, 256)

    fits = k <= 1 << 16 if scheme.dtype == "int8" else bits == 4
    return platform == "cuda" and whole_stages(scheme.groups(k)) and whole_stages(groups) and fits


def has_kernel(a: Activations, qw, scales, *rest, p, platform: str) -> bool:
    """Whether a kernel takes the codes of activations and weights as they are, and there are enough rows for it to be
    the faster way."""
    if platform != "cuda" or p.implementation not in (None, "cuda") or p.table is not None:
        return False
    from jax_wonly import _cuda_dispatch

    groups, n = scales.shape[-2:]
    shift_dtype = rest[0].dtype if p.shift_mode != ShiftMode.NONE else None
    types = (dequantized_dtype(p.out_dtype, platform), scales.dtype, p.shift_mode, shift_dtype)
    product = _cuda_dispatch.Product(a.codes.shape[1], p.k, n, qw.shape[0], p.bits, *types, groups=groups)
    return (
        _ffi.use_native(p.implementation, platform)
        and n != 0
        and 0 not in (a.codes.shape[0], qw.shape[0])
        and takes_codes(p.activations, p.k, p.bits, groups, platform)
        and _cuda_dispatch.use_quantized_kernel(
            product,
            blocks=groups > 1 or p.activations.groups(p.k) > 1,
            float8=p.activations.dtype != "int8",
            shifted=a.offsets is not None or _needs_sums(p.shift_mode, p.bits, shift_dtype),
            forced=p.implementation == "cuda",
        )
    )


def kernel(a: Activations, qw, scales, *rest, p) -> jax.Array:
    """The fused custom call."""
    dtype = p.out_dtype
    operands = []
    shift = rest[0] if p.shift_mode != ShiftMode.NONE else None
    if needs_sums := _needs_sums(p.shift_mode, p.bits, None if shift is None else shift.dtype):
        sums, groups = a.sums, max(a.scales.shape[-1], scales.shape[-2])
        if groups != sums.shape[-1]:  # a row's scale, and groups of weights
            codes = to_natural_order(a.codes, p.k).astype(sums.dtype)
            sums = codes.reshape(*codes.shape[:-1], groups, p.k // groups).sum(-1)
        operands.append(sums)
    if a.offsets is not None:
        operands.append(a.offsets)
    lead = next((s.shape[0] for s in (a.codes, qw, scales, *rest) if s.shape[0] != 1), 1)
    result = jax.ShapeDtypeStruct((lead, a.codes.shape[1], scales.shape[-1]), dtype)
    return jax.ffi.ffi_call(_abi.QUANTIZED_MATMUL, result)(
        a.codes,
        a.scales,
        qw,
        scales,
        *operands,
        *rest,
        k=np.int64(p.k),
        bits=np.int64(p.bits),
        shift_mode=np.int64(p.shift_mode),
        has_bias=np.int64(p.has_bias),
        activation=np.int64(p.activation),
        has_sums=np.int64(needs_sums),
        has_offsets=np.int64(a.offsets is not None),
    )


def _results(x, scheme: Scheme):
    m, k = x.shape
    groups = scheme.groups(k)
    results = [
        ((m, ceil_div(k, BLOCK) * BLOCK), jnp.dtype(scheme.dtype)),
        ((m, groups), jnp.dtype(jnp.float32)),
        ((m, groups), jnp.dtype(jnp.int32 if scheme.dtype == "int8" else jnp.float32)),
    ]
    return results if scheme.symmetric else [*results, ((m, groups), jnp.dtype(jnp.float32))]


def _evaluate(x, *, scheme: Scheme, implementation, platform):
    if not _ffi.use_native(implementation, platform) or platform != "cuda" or 0 in x.shape:
        return reference(x, scheme=scheme)
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in _results(x, scheme)]
    return jax.ffi.ffi_call(_abi.QUANTIZE_ACTIVATION, results)(x)


@quantize_activation_p.def_abstract_eval
def _abstract(x, *, scheme: Scheme, implementation):
    return [x.update(shape=shape, dtype=dtype, weak_type=False) for shape, dtype in _results(x, scheme)]


def _batch(operands, axes, **params):
    x = jnp.moveaxis(operands[0], axes[0], 0)
    size, m, k = x.shape
    results = quantize_activation_p.bind(x.reshape(size * m, k), **params)
    return [r.reshape(size, m, r.shape[-1]) for r in results], [0] * len(results)


def _jvp(primals, tangents, **params):
    raise NotImplementedError(
        "jax_wonly: quantize_activation has no derivative, because it rounds. matmul(x, qt, "
        "activation_quantization=...) has one: that of the product with x itself."
    )


register_lowerings(quantize_activation_p, _evaluate)
batching.primitive_batchers[quantize_activation_p] = _batch
ad.primitive_jvps[quantize_activation_p] = _jvp
