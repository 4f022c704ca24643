"""Static int8: scales calibrated beforehand, so that a layer takes int8 codes and gives int8 codes.

Activations are ``x = scale * (q - zero)`` with one scale and zero of a whole array. A layer's product is integers to
the end: ``q_out = clamp(round(M * (sum + fused)) + zero_out)`` with ``M = scale_in * scale_w / scale_out`` and one
integer ``fused`` for each output, which holds the bias and what the input's zero adds. Weights are per channel and
symmetric.

>>> import jax, jax.numpy as jnp
>>> import jax_wonly as jw
>>> x, w = jax.random.normal(jax.random.key(0), (8, 128)), jax.random.normal(jax.random.key(1), (128, 64))
>>> into, out = jw.static.calibrate(x), jw.static.calibrate(x @ w)
>>> layer = jw.static.prepare(jw.quantize(w, bits=8, group_size=None), into, out)
>>> y = jw.static.dequantize(jw.static.matmul(jw.static.quantize(x, into), layer), out)
>>> bool(abs(y - x @ w).max() < 0.05 * abs(x @ w).max())
True
"""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import batching

from jax_wonly import _abi, _ffi
from jax_wonly._format import bias_of, unpack
from jax_wonly._tensor import QuantizedTensor, check_parts
from jax_wonly._validate import FLOATS, check_array, check_choice
from jax_wonly.primitives._common import make_primitive, register_lowerings
from jax_wonly.primitives.activations import to_kernel_order

LOW, HIGH = -128, 127
_MOST_INPUTS = 1 << 16


@dataclass(frozen=True)
class Scale:
    """What int8 codes of activations stand for, ``scale * (q - zero)``: made by :func:`calibrate`.

    Attributes:
      scale: a positive number.
      zero: the code of 0, -128 to 127.

    Example:
      >>> jw.static.Scale(0.5, 3)
      Scale(scale=0.5, zero=3)
    """

    scale: float
    zero: int = 0

    def __post_init__(self):
        if isinstance(self.scale, bool) or not isinstance(self.scale, (int, float, np.floating)):
            raise TypeError(f"jax_wonly: scale={self.scale!r}; accepted: a positive number.")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"jax_wonly: scale={self.scale!r}; accepted: a positive number.")
        if isinstance(self.zero, bool) or not isinstance(self.zero, (int, np.integer)):
            raise TypeError(f"jax_wonly: zero={self.zero!r}; accepted: an integer of -128 to 127.")
        if not LOW <= self.zero <= HIGH:
            raise ValueError(f"jax_wonly: zero={self.zero!r}; accepted: an integer of -128 to 127.")


def calibrate(samples, *, symmetric: bool = False) -> Scale:
    """The scale and zero with which int8 codes cover all values of some samples, 0 among them.

    Args:
      samples: a floating array, or several.
      symmetric: whether the zero is to be 0: for values on both sides of it.

    Returns:
      A :class:`Scale`.

    Raises:
      TypeError: a sample is no floating array.
      ValueError: there are no values, or some are not finite.

    Example:
      >>> jw.static.calibrate(jnp.array([-1.0, 0.0, 1.55]))
      Scale(scale=0.01, zero=-28)
      >>> jw.static.calibrate([jnp.array([-1.27]), jnp.array([1.0])], symmetric=True)
      Scale(scale=0.01, zero=0)
    """
    several = [samples] if hasattr(samples, "dtype") else samples
    if not isinstance(several, Iterable):
        raise TypeError(f"jax_wonly: samples is a {type(samples).__name__}; accepted: an array, or several.")
    low = high = 0.0
    count = 0
    for sample in several:
        values = np.asarray(check_array("samples", sample, FLOATS)).astype(np.float64)
        if not np.isfinite(values).all():
            raise ValueError("jax_wonly: samples hold NaN or Inf; accepted: finite values.")
        low, high, count = min(low, values.min(initial=0)), max(high, values.max(initial=0)), count + values.size
    if count == 0:
        raise ValueError("jax_wonly: samples hold no values; accepted: at least one.")
    if symmetric:
        return Scale(_rounded(max(-low, high) / HIGH), 0)
    scale = _rounded((high - low) / (HIGH - LOW))
    return Scale(scale, int(np.clip(np.rint(LOW - low / scale), LOW, HIGH)))


def _rounded(scale: float) -> float:
    """To the digits that a float32 holds, and never zero."""
    return float(f"{scale:.7g}") or 1.0


@jax.jit
def _quantize(x, inverse, zero):
    q = lax.round(x.astype(jnp.float32) * inverse, lax.RoundingMethod.TO_NEAREST_EVEN) + zero
    return jnp.clip(q, LOW, HIGH).astype(jnp.int8)


def quantize(x, scale: Scale) -> jax.Array:
    """The int8 codes of a floating array ``x`` under ``scale``; what lies outside of their range is clamped.

    Raises:
      TypeError: an argument has a wrong type.

    Example:
      >>> jw.static.quantize(jnp.array([0.0, 1.0, 1e9]), jw.static.Scale(0.5, 3)).tolist()
      [3, 5, 127]
    """
    check_array("x", x, FLOATS)
    scale = _check_scale("scale", scale)
    return _quantize(jnp.asarray(x), np.float32(1 / scale.scale), np.float32(scale.zero))


def dequantize(q, scale: Scale) -> jax.Array:
    """The float32 values of int8 codes ``q`` under ``scale``.

    Raises:
      TypeError: an argument has a wrong type.

    Example:
      >>> jw.static.dequantize(jnp.array([3, 5], jnp.int8), jw.static.Scale(0.5, 3)).tolist()
      [0.0, 1.0]
    """
    check_array("q", q, ("int8",))
    scale = _check_scale("scale", scale)
    return (jnp.asarray(q).astype(jnp.float32) - scale.zero) * np.float32(scale.scale)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("qvalue", "multiplier", "fused"),
    meta_fields=("bits", "k", "kernel", "input", "output", "low", "high"),
)
@dataclass(frozen=True, eq=False)
class Layer:
    """Weights with all that turns int8 codes into int8 codes: made by :func:`prepare`.

    Attributes:
      qvalue: packed codes of the weights, uint32 ``[ceil(N / 64), ceil(K / tile_k), 512]``.
      multiplier: float32 ``[N]``: ``scale_in * scale_w / scale_out``.
      fused: int32 ``[N]``: the bias in units of ``scale_in * scale_w``, less the input's zero times the weights' sum.
      bits: of the weights.
      k: inputs.
      kernel: spatial sizes of a convolution's weights, ``(H, W)``; empty otherwise.
      input, output: a :class:`Scale` each.
      low, high: what result codes are clamped to.

    Example:
      >>> scale = jw.static.Scale(0.1)
      >>> jw.static.prepare(jw.quantize(jnp.ones((128, 64)), bits=8, group_size=None), scale, scale).multiplier.shape
      (64,)
    """

    qvalue: Any
    multiplier: Any
    fused: Any
    bits: int = field(kw_only=True)
    k: int = field(kw_only=True)
    kernel: tuple[int, ...] = field(kw_only=True, default=())
    input: Scale = field(kw_only=True)
    output: Scale = field(kw_only=True)
    low: int = field(kw_only=True, default=LOW)
    high: int = field(kw_only=True, default=HIGH)


def prepare(
    qt: QuantizedTensor,
    input: Scale,  # noqa: A002
    output: Scale,
    *,
    bias: Any = None,
    activation: str | None = None,
    kernel: Sequence[int] = (),
) -> Layer:
    """Folds scales, zeros, bias and activation of a layer into one multiplier and one integer for each output.

    Args:
      qt: a symmetric per-channel weight ``[K, N]`` of 4 or 8 bits; for :func:`conv`, ``[H * W * C, N]``.
      input: the :class:`Scale` of the codes that come in.
      output: that of those that go out.
      bias: floating ``[N]``, or None.
      activation: None, ``"relu"`` or ``"relu6"``: a clamp of the codes.
      kernel: for :func:`conv`, the spatial sizes ``(H, W)`` of the weights.

    Returns:
      A :class:`Layer`.

    Raises:
      TypeError: an argument has a wrong type.
      ValueError: the weights have groups, zeros, offsets, a table or leading axes, or shapes do not fit.

    Example:
      >>> qt = jw.quantize(jnp.eye(64), bits=8, group_size=None)
      >>> into, out = jw.static.Scale(1.0), jw.static.Scale(2.0)
      >>> layer = jw.static.prepare(qt, into, out, bias=jnp.ones(64), activation="relu")
      >>> jw.static.matmul(jnp.full((1, 64), 5, jnp.int8), layer)[0, :3].tolist()
      [3, 3, 3]
    """
    if not isinstance(qt, QuantizedTensor):
        raise TypeError(f"jax_wonly: qt is a {type(qt).__name__}; accepted: a jax_wonly.QuantizedTensor.")
    check_parts("qt", qt)
    if qt.ndim != 2 or qt.scales.shape[0] != 1 or any(a is not None for a in (qt.zeros, qt.offsets, qt.table)):
        raise ValueError(f"jax_wonly: qt is {qt!r}; accepted: a symmetric weight [K, N] with one scale per output.")
    if qt.k > _MOST_INPUTS:
        raise ValueError(f"jax_wonly: qt has K={qt.k}; accepted: up to {_MOST_INPUTS}, whose sums fit 32 bits.")
    into, out = _check_scale("input", input), _check_scale("output", output)
    check_choice("activation", activation, (None, "relu", "relu6"))
    sizes = tuple(operator.index(size) for size in kernel)
    if sizes and (min(sizes) < 1 or len(sizes) != 2 or qt.k % math.prod(sizes)):
        raise ValueError(f"jax_wonly: kernel={kernel!r} with K={qt.k}; accepted: two sizes whose product divides K.")
    step = into.scale * np.asarray(qt.scales[0]).astype(np.float64)  # of the integer sums
    step = np.where(step == 0, into.scale * 2.0**-60, step)
    codes = np.asarray(unpack(qt.qvalue, qt.bits, qt.k, qt.n)).astype(np.int64) - bias_of(qt.bits)
    fused = -into.zero * codes.sum(0)
    if bias is not None:
        check_array("bias", bias)
        if tuple(bias.shape) != (qt.n,):
            raise ValueError(f"jax_wonly: bias has shape {tuple(bias.shape)}; accepted: [{qt.n}].")
        fused = fused + np.rint(np.asarray(bias).astype(np.float64) / step)
    room = 2**31 - 1 - 128 * 128 * qt.k
    low = out.zero if activation in ("relu", "relu6") else LOW
    high = min(HIGH, int(np.rint(6 / out.scale)) + out.zero) if activation == "relu6" else HIGH
    return Layer(
        qt.qvalue,
        jnp.asarray(step / out.scale, jnp.float32),
        jnp.asarray(np.clip(fused, -room, room), jnp.int32),
        bits=qt.bits,
        k=qt.k,
        kernel=sizes,
        input=into,
        output=out,
        low=low,
        high=max(low, high),
    )


def matmul(q, layer: Layer, *, implementation: str | None = None) -> jax.Array:
    """The codes of a layer's result.

    Args:
      q: int8 ``[..., K]``, of the layer's input scale.
      layer: a :class:`Layer`.
      implementation: None, ``"cuda"`` (int8 tensor cores, or an error) or ``"xla"``. All give the same codes.

    Returns:
      int8 ``[..., N]``, of the layer's output scale.

    Raises:
      TypeError: an argument has a wrong type.
      ValueError: ``q`` does not have K inputs, or an option is not one of those accepted.

    Example:
      >>> scale = jw.static.Scale(1.0)
      >>> layer = jw.static.prepare(jw.quantize(jnp.eye(64), bits=8, group_size=None), scale, scale)
      >>> jw.static.matmul(jnp.arange(64, dtype=jnp.int8), layer)[:5].tolist()
      [0, 1, 2, 3, 4]
    """
    check_array("q", q, ("int8",))
    _check_layer(layer)
    if len(q.shape) == 0 or q.shape[-1] != layer.k:
        raise ValueError(f"jax_wonly: q has shape {tuple(q.shape)}; accepted: [..., {layer.k}].")
    return _matmul(jnp.asarray(q), layer, implementation=_ffi.resolve_implementation(implementation))


@partial(jax.jit, static_argnames="implementation")
def _matmul(q, layer: Layer, *, implementation):
    y = static_matmul_p.bind(
        q.reshape(math.prod(q.shape[:-1]), layer.k),
        layer.qvalue,
        layer.multiplier,
        layer.fused,
        bits=layer.bits,
        zero=layer.output.zero,
        low=layer.low,
        high=layer.high,
        implementation=implementation,
    )
    return y.reshape(*q.shape[:-1], y.shape[-1])


def conv(
    q,
    layer: Layer,
    *,
    window_strides: Sequence[int] = (1, 1),
    padding: str | Sequence[tuple[int, int]] = "SAME",
    rhs_dilation: Sequence[int] = (1, 1),
    implementation: str | None = None,
) -> jax.Array:
    """A static convolution: the product of the patches of ``q`` with the layer's weights.

    Args:
      q: int8 ``[B, H, W, C]``, of the layer's input scale.
      layer: a :class:`Layer` whose ``kernel`` is that of the convolution and whose inputs are in the order ``[H, W,
        C]`` (an HWIO kernel, reshaped).
      window_strides, padding, rhs_dilation: as in :func:`jax.lax.conv_general_dilated`. Padding is with the input's
        zero.
      implementation: as in :func:`matmul`.

    Returns:
      int8 ``[B, H', W', N]``, of the layer's output scale.

    Raises:
      TypeError: an argument has a wrong type.
      ValueError: shapes do not fit, or an option is not one of those accepted.

    Example:
      >>> scale = jw.static.Scale(1.0)
      >>> qt = jw.quantize(jnp.ones((3 * 3 * 16, 64)), bits=8, group_size=None)
      >>> layer = jw.static.prepare(qt, scale, scale, kernel=(3, 3))
      >>> jw.static.conv(jnp.ones((1, 5, 5, 16), jnp.int8), layer)[0, 0, :, 0].tolist()
      [64, 96, 96, 96, 64]
    """
    check_array("q", q, ("int8",))
    _check_layer(layer)
    height, width = layer.kernel or (1, 1)
    channels = layer.k // (height * width)
    if len(q.shape) != 4 or q.shape[-1] != channels:
        raise ValueError(f"jax_wonly: q has shape {tuple(q.shape)}; accepted: [B, H, W, {channels}].")
    (dy, dx), (sy, sx) = _pair("rhs_dilation", rhs_dilation), _pair("window_strides", window_strides)
    window = ((height - 1) * dy + 1, (width - 1) * dx + 1)
    if isinstance(padding, str):
        check_choice("padding", padding, ("SAME", "VALID"))
        padding = lax.padtype_to_pads(q.shape[1:3], window, (sy, sx), padding)
    edges = [(operator.index(before), operator.index(after)) for before, after in padding]
    if len(edges) != 2 or any(size < 0 for edge in edges for size in edge):
        raise ValueError(f"jax_wonly: padding={padding!r}; accepted: 'SAME', 'VALID', or two pairs of sizes from 0 on.")
    q = jnp.pad(jnp.asarray(q), ((0, 0), *edges, (0, 0)), constant_values=layer.input.zero)
    rows, columns = (
        max(0, (size - over) // step + 1) for size, over, step in zip(q.shape[1:3], window, (sy, sx), strict=True)
    )
    taps = [
        q[:, y * dy : y * dy + (rows - 1) * sy + 1 : sy, x * dx : x * dx + (columns - 1) * sx + 1 : sx]
        for y in range(height)
        for x in range(width)
    ]
    if rows == 0 or columns == 0:
        raise ValueError(f"jax_wonly: q of shape {tuple(q.shape)}, padded, is smaller than a window of {window}.")
    return matmul(jnp.concatenate(taps, -1), layer, implementation=implementation)


def _pair(name: str, value: Sequence[int]) -> tuple[int, int]:
    pair = tuple(operator.index(size) for size in value)
    if len(pair) != 2 or min(pair) < 1:
        raise ValueError(f"jax_wonly: {name}={value!r}; accepted: two sizes from 1 on.")
    return pair


def _check_scale(name: str, value: Any) -> Scale:
    if not isinstance(value, Scale):
        raise TypeError(f"jax_wonly: {name} is a {type(value).__name__}; accepted: a jax_wonly.static.Scale.")
    return value


def _check_layer(layer: Any) -> None:
    if not isinstance(layer, Layer):
        raise TypeError(f"jax_wonly: layer is a {type(layer).__name__}; accepted: a jax_wonly.static.Layer.")


# q s8[M, K], qw u32[Nt, Kt, 512], multiplier f32[N], fused s32[N] -> s8[M, N]
static_matmul_p = make_primitive("wonly_static_matmul")


def _reference(q, qw, multiplier, fused, *, bits: int, zero: int, low: int, high: int) -> jax.Array:
    """In XLA's operations. Sums are exact; rounding is of float32, ties to even."""
    k, n = q.shape[1], multiplier.shape[0]
    codes = unpack(qw, bits, k, n)
    weights = lax.bitcast_convert_type(codes ^ jnp.uint8(128), jnp.int8) if bits == 8 else codes.astype(jnp.int8) - 8
    sums = jnp.matmul(q, weights, preferred_element_type=jnp.int32) + fused
    rounded = lax.round(sums.astype(jnp.float32) * multiplier, lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.clip(jnp.clip(rounded, -1024, 1024).astype(jnp.int32) + zero, low, high).astype(jnp.int8)


def _evaluate(q, qw, multiplier, fused, *, bits, zero, low, high, implementation, platform):
    from jax_wonly import _cuda_dispatch

    m, k = q.shape
    native = _ffi.use_native(implementation, platform) and platform == "cuda" and _cuda_dispatch.has_warpgroups()
    if m == 0 or not native:
        return _reference(q, qw, multiplier, fused, bits=bits, zero=zero, low=low, high=high)
    result = jax.ShapeDtypeStruct((m, multiplier.shape[0]), jnp.int8)
    attributes = {"k": k, "bits": bits, "zero": zero, "low": low, "high": high}
    call = jax.ffi.ffi_call(_abi.STATIC_MATMUL, result)
    return call(to_kernel_order(q), qw, multiplier, fused, **{name: np.int64(a) for name, a in attributes.items()})


@static_matmul_p.def_abstract_eval
def _abstract(q, qw, multiplier, fused, **_):
    return q.update(shape=(q.shape[0], multiplier.shape[0]), weak_type=False)


def _batch(operands, axes, **params):
    """Rows of all entries are one product; other weights for each are a loop."""
    if all(axis is None for axis in axes[1:]):
        q = jnp.moveaxis(operands[0], axes[0], 0)
        y = static_matmul_p.bind(q.reshape(q.shape[0] * q.shape[1], q.shape[2]), *operands[1:], **params)
        return y.reshape(*q.shape[:2], y.shape[-1]), 0
    size = next(a.shape[d] for a, d in zip(operands, axes, strict=True) if d is not None)
    moved = [
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(operands, axes, strict=True)
    ]
    return lax.map(lambda arrays: static_matmul_p.bind(*arrays, **params), tuple(moved)), 0


register_lowerings(static_matmul_p, _evaluate)
batching.primitive_batchers[static_matmul_p] = _batch
