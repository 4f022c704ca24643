"""``paddle.nn.quant``'s weight-only functions over our packed format: same names, arguments and arithmetic::

    weight, scale = weight_quantize(w, algo="weight_only_int4", group_size=64)
    y = weight_only_linear(x, weight, bias, scale, weight_dtype="int4", group_size=64)

What differs is the layout of ``weight``: it is our packed array, the same on every device, instead of an int8 array
laid out for one architecture. :func:`from_layout` and :func:`to_layout` convert weights that Paddle has quantized.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_wonly._format import bias_of, packed_shape, tile_k
from jax_wonly._matmul import matmul
from jax_wonly._tensor import QuantizedTensor
from jax_wonly._validate import check_array, check_choice, check_float_dtype
from jax_wonly.compat import faster_transformer
from jax_wonly.compat._codes import pack, unpack
from jax_wonly.primitives._common import divide

__all__ = ["from_layout", "llm_int8_linear", "to_layout", "weight_dequantize", "weight_only_linear", "weight_quantize"]

_BITS = {"weight_only_int8": 8, "weight_only_int4": 4, "llm.int8": 8}
_DTYPES = {"int8": 8, "int4": 4}
_ARCHS = (70, 75, 80, 86, 89, 90, 92, 100)
_LAYOUT_ARCHS = (75, 80, 86, 89, 90)


def _check_common(arch, group_size) -> None:
    check_choice("arch", arch, (None, *_ARCHS))
    check_choice("group_size", group_size, (-1, 64, 128))


def weight_quantize(x, algo: str = "weight_only_int8", arch: int | None = None, group_size: int = -1):
    """Quantizes a weight symmetrically: ``q = round(x / absmax * 127)`` (7 for int4), halves away from zero.

    Args:
      x: float16 or bfloat16 ``[K, N]`` (float32 is taken too).
      algo: ``"weight_only_int8"``, ``"weight_only_int4"`` or ``"llm.int8"``.
      arch: checked, and without effect: the layout is the same for every architecture.
      group_size: -1 (per channel), 64 or 128.

    Returns:
      ``(out, scale)``: the packed array uint32 ``[ceil(N / 64), K / tile_k, 512]`` (``tile_k`` is 64 for int4 and 32
      for int8), and ``absmax / 127`` or ``absmax / 7``, ``[N]`` or ``[K / group_size, N]``, of the type of x, or
      float32 for ``"llm.int8"``.

    Raises:
      TypeError: x has another type.
      ValueError: K is not a multiple of ``tile_k`` and ``group_size``, or an option is not one of those accepted.

    Example:
      >>> from jax_wonly.compat import paddle
      >>> weight, scale = paddle.weight_quantize(jnp.ones((128, 64)), algo="weight_only_int4", group_size=64)
      >>> weight.shape, scale.shape
      ((1, 2, 512), (2, 64))
    """
    check_array("x", x)
    check_choice("algo", algo, _BITS)
    _check_common(arch, group_size)
    bits = _BITS[algo]
    if len(x.shape) != 2 or 0 in x.shape:
        raise ValueError(f"jax_wonly: x has shape {tuple(x.shape)}; accepted: [K, N] with K, N >= 1.")
    k, n = x.shape
    multiple = max(tile_k(bits), group_size)
    if k % multiple:
        raise ValueError(f"jax_wonly: x has shape {(k, n)}; accepted for {algo}: [K, N], K a multiple of {multiple}.")
    if algo == "llm.int8" and group_size != -1:
        raise ValueError(f"jax_wonly: group_size={group_size} is not supported for 'llm.int8'; accepted: -1.")
    scale_dtype = jnp.dtype(jnp.float32) if algo == "llm.int8" else x.dtype
    return _quantize(jnp.asarray(x), bits, group_size, scale_dtype)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _quantize(x, bits, group_size, scale_dtype):
    k, n = x.shape
    bound = np.float32(bias_of(bits) - 1)
    groups = x.astype(jnp.float32).reshape(-1, k if group_size == -1 else group_size, n)
    largest = jnp.abs(groups).max(1, keepdims=True)
    rounded = _round(divide(groups, jnp.where(largest == 0, 1, largest)) * bound)
    codes = (jnp.clip(rounded, -bound, bound) + bias_of(bits)).astype(jnp.uint8).reshape(k, n)
    scale = divide(largest, bound, scale_dtype).squeeze(1)
    return pack(codes, bits), scale[0] if group_size == -1 else scale


def _round(x):
    """To the nearest integer, halves away from zero, as C's ``lround``."""
    whole = jnp.trunc(x)  # floor(abs(x) + 1/2) is wrong just below a half
    return whole + jnp.where(jnp.abs(x - whole) >= 0.5, jnp.sign(x), 0)


def _weight(weight, scale, bits: int, group_size: int, k: int | None = None) -> QuantizedTensor:
    """The QuantizedTensor of Paddle's pair of arrays."""
    if str(getattr(weight, "dtype", "")) in ("int8", "uint8"):
        raise TypeError(
            f"jax_wonly: weight has dtype {weight.dtype}; accepted: the uint32 array of weight_quantize here. "
            "from_layout() makes it from one that Paddle has quantized."
        )
    check_array("weight", weight, ("uint32",))
    if scale is None:
        raise TypeError("jax_wonly: weight_scale is None; accepted: the scale that weight_quantize returned.")
    check_array("scale", scale)
    if len(weight.shape) != 3:
        raise ValueError(f"jax_wonly: weight has shape {tuple(weight.shape)}; accepted: [N tiles, K tiles, 512].")
    k = weight.shape[1] * tile_k(bits) if k is None else k
    expected = (1,) if group_size == -1 else (k // group_size,)
    shape = tuple(scale.shape) if group_size != -1 else (1, *scale.shape)
    if len(shape) != 2 or shape[:1] != expected or tuple(weight.shape) != packed_shape(bits, k, shape[1]):
        wanted = "[N]" if group_size == -1 else f"[K / {group_size}, N]"
        raise ValueError(
            f"jax_wonly: scale has shape {tuple(scale.shape)} and weight {tuple(weight.shape)}; accepted for int{bits} "
            f"with K={k}, group_size={group_size}: {wanted}, [ceil(N / 64), K / {tile_k(bits)}, 512]."
        )
    return QuantizedTensor(jnp.asarray(weight), jnp.asarray(scale).reshape(shape), bits=bits, k=k, n=shape[1])


def weight_dequantize(x, scale, algo: str = "weight_only_int8", out_dtype=None, group_size: int = -1) -> jax.Array:
    """The dense weight ``[K, N]`` of what :func:`weight_quantize` returned.

    Args:
      x: the packed array.
      scale: its scales.
      algo: as in :func:`weight_quantize`.
      out_dtype: type of the result; default: that of the scales.
      group_size: as in :func:`weight_quantize`.

    Raises:
      TypeError, ValueError: types or shapes do not fit, or an option is not one of those accepted.

    Example:
      >>> from jax_wonly.compat import paddle
      >>> weight, scale = paddle.weight_quantize(jnp.ones((128, 64)))
      >>> paddle.weight_dequantize(weight, scale).shape
      (128, 64)
    """
    check_choice("algo", algo, _BITS)
    _check_common(None, group_size)
    dtype = None if out_dtype is None else check_float_dtype("out_dtype", out_dtype)
    return _weight(x, scale, _BITS[algo], group_size).dequantize(dtype)


def weight_only_linear(
    x,
    weight,
    bias=None,
    weight_scale=None,
    weight_dtype: str = "int8",
    arch: int | None = None,
    group_size: int = -1,
) -> jax.Array:
    """``x @ w + bias`` with the weights of :func:`weight_quantize`: :func:`jax_wonly.matmul` under Paddle's name.

    Args:
      x: float16, bfloat16 or float32 ``[..., K]``.
      weight: the packed array.
      bias: floating ``[N]``, or None.
      weight_scale: its scales, ``[N]`` or ``[K / group_size, N]``.
      weight_dtype: ``"int8"`` or ``"int4"``.
      arch: checked, and without effect.
      group_size: -1 (per channel), 64 or 128.

    Returns:
      ``[..., N]`` of the type of x.

    Raises:
      TypeError, ValueError: types or shapes do not fit, or an option is not one of those accepted.

    Example:
      >>> from jax_wonly.compat import paddle
      >>> weight, scale = paddle.weight_quantize(jnp.ones((128, 64)))
      >>> paddle.weight_only_linear(jnp.ones((4, 128)), weight, None, scale).shape
      (4, 64)
    """
    check_choice("weight_dtype", weight_dtype, _DTYPES)
    _check_common(arch, group_size)
    return matmul(x, _weight(weight, weight_scale, _DTYPES[weight_dtype], group_size), bias=bias)


def llm_int8_linear(x, weight, bias=None, weight_scale=None, threshold: float = 6.0) -> jax.Array:
    """LLM.int8 (Dettmers et al., 2022): int8 products of int8 activations, and the outliers in the type of x.

    Inputs k with ``abs(x[..., k]) > threshold`` anywhere are outliers: their part is computed from x as it is. The
    others are quantized for each row with the largest magnitude that is not above the threshold.

    Args:
      x: float16, bfloat16 or float32 ``[..., K]``.
      weight: the packed array of ``weight_quantize(..., algo="llm.int8")``.
      bias: floating ``[N]``, or None.
      weight_scale: its float32 scales ``[N]``.
      threshold: above it, an activation makes its input an outlier.

    Returns:
      ``[..., N]`` of the type of x.

    Raises:
      TypeError, ValueError: types or shapes do not fit.

    Example:
      >>> from jax_wonly.compat import paddle
      >>> weight, scale = paddle.weight_quantize(jnp.ones((128, 64)), algo="llm.int8")
      >>> paddle.llm_int8_linear(jnp.ones((4, 128)), weight, None, scale).shape
      (4, 64)
    """
    check_array("x", x)
    qt = _weight(weight, weight_scale, 8, -1)
    if not isinstance(threshold, (int, float)) or isinstance(threshold, bool) or not threshold > 0:
        raise ValueError(f"jax_wonly: threshold={threshold!r} is not supported; accepted: a number above 0.")
    if tuple(x.shape)[-1:] != (qt.k,):
        raise ValueError(f"jax_wonly: x has shape {tuple(x.shape)}; accepted: [..., {qt.k}], the K of the weights.")
    if bias is not None and tuple(check_array("bias", bias).shape) != (qt.n,):
        raise ValueError(f"jax_wonly: bias has shape {tuple(bias.shape)}; accepted: [{qt.n}].")
    return _llm_int8(jnp.asarray(x), qt, bias, threshold)


@jax.jit
def _llm_int8(x, qt, bias, threshold):
    rows = x.reshape(-1, qt.k).astype(jnp.float32)
    above = jnp.abs(rows) > threshold
    outlier = above.any(0)
    largest = jnp.where(above, 0, jnp.abs(rows)).max(1, keepdims=True)
    rounded = _round(rows * np.float32(127) / jnp.where(largest == 0, 1, largest))
    xq = jnp.where(outlier, 0, jnp.clip(rounded, -127, 127)).astype(jnp.int8)
    wq = (unpack(qt.qvalue, 8, qt.k, qt.n) ^ np.uint8(128)).view(np.int8)
    product = jax.lax.dot(xq, wq, preferred_element_type=jnp.int32).astype(jnp.float32)
    y = product * largest * qt.scales.astype(jnp.float32) / np.float32(127)

    def outliers_product():
        dense = jnp.where(outlier, rows, 0).astype(x.dtype)
        return matmul(dense, qt, preferred_element_type=jnp.float32)

    y += jax.lax.cond(outlier.any(), outliers_product, lambda: jnp.zeros_like(y))
    if bias is not None:
        y += jnp.asarray(bias).astype(jnp.float32)
    return y.astype(x.dtype).reshape(*x.shape[:-1], qt.n)


def to_layout(weight, *, weight_dtype: str = "int8", k: int, n: int, arch: int = 80, algo: str | None = None):
    """The array that Paddle's ``weight_quantize`` gives, of our packed one; its scales are the same.

    Args:
      weight: uint32 ``[..., ceil(n / 64), ceil(k / tile_k), 512]``.
      weight_dtype: ``"int8"`` or ``"int4"``.
      k, n: inputs and outputs.
      arch: 75 to 90, which have one layout.
      algo: ``"llm.int8"`` for the plain transposed codes that this algorithm has; default: the weight-only layout.

    Returns:
      int8 ``[..., n, k]``, or ``[..., n / 2, k]`` for int4.

    Raises:
      TypeError, ValueError: types or shapes do not fit the layout, or an option is not one of those accepted.

    Example:
      >>> from jax_wonly.compat import paddle
      >>> weight, scale = paddle.weight_quantize(jnp.ones((128, 64)))
      >>> paddle.to_layout(weight, weight_dtype="int8", k=128, n=64).shape
      (64, 128)
    """
    bits = _layout_bits(weight_dtype, algo, arch)
    if algo == "llm.int8":
        return jnp.swapaxes(unpack(weight, 8, k, n) ^ np.uint8(128), -1, -2).view(np.int8)
    packed = faster_transformer.encode(weight, bits=bits, k=k, n=n, arch=arch)
    return packed.reshape(*packed.shape[:-2], n * bits // 8, k)


def from_layout(weight, *, weight_dtype: str = "int8", k: int, n: int, arch: int = 80, algo: str | None = None):
    """Our packed array, of one that Paddle has quantized; the inverse of :func:`to_layout`.

    Args:
      weight: int8 ``[..., n, k]`` or, for int4, ``[..., n / 2, k]`` (any two last axes with as many bytes).
      weight_dtype, k, n, arch, algo: as :func:`to_layout`.

    Returns:
      uint32 ``[..., ceil(n / 64), ceil(k / tile_k), 512]``.

    Raises:
      TypeError, ValueError: as :func:`to_layout`.

    Example:
      >>> from jax_wonly.compat import paddle
      >>> weight, scale = paddle.weight_quantize(jnp.ones((128, 64)))
      >>> theirs = paddle.to_layout(weight, weight_dtype="int8", k=128, n=64)
      >>> bool((paddle.from_layout(theirs, weight_dtype="int8", k=128, n=64) == weight).all())
      True
    """
    bits = _layout_bits(weight_dtype, algo, arch)
    if algo == "llm.int8":
        check_array("weight", weight, ("int8",))
        if tuple(weight.shape[-2:]) != (n, k):
            raise ValueError(f"jax_wonly: weight has shape {tuple(weight.shape)}; accepted: [..., {n}, {k}].")
        return pack(jnp.swapaxes(jnp.asarray(weight).view(np.uint8) ^ np.uint8(128), -1, -2), 8)
    return faster_transformer.decode(weight, bits=bits, k=k, n=n, arch=arch)


def _layout_bits(weight_dtype: str, algo: str | None, arch: int) -> int:
    check_choice("weight_dtype", weight_dtype, _DTYPES)
    check_choice("algo", algo, (None, *_BITS))
    check_choice("arch", arch, _LAYOUT_ARCHS)
    if algo is not None and _BITS[algo] != _DTYPES[weight_dtype]:
        raise ValueError(f"jax_wonly: algo={algo!r} does not go with weight_dtype={weight_dtype!r}.")
    return _DTYPES[weight_dtype]
