"""The product of activations with quantized weights."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_wonly import _ffi
from jax_wonly._abi import Activation, ShiftMode
from jax_wonly._activation import DTYPES, ActivationQuantization, QuantizedActivation, check_weights_of, resolve_scheme
from jax_wonly._explicit import explicit_mesh, matmul_on_mesh
from jax_wonly._permuted import PermutedTensor
from jax_wonly._quantize import shift_mode_of
from jax_wonly._table import check_table
from jax_wonly._tensor import QuantizedTensor
from jax_wonly._validate import (
    broadcast_leads,
    check_array,
    check_choice,
    check_finite,
    check_float_dtype,
    check_weights,
)
from jax_wonly.primitives.activations import Activations
from jax_wonly.primitives.matmul import Params
from jax_wonly.primitives.matmul import matmul as _bind
from jax_wonly.primitives.quantized_matmul import quantized_matmul, split_operands

ACTIVATIONS = {a.name.lower(): a for a in Activation if a != Activation.NONE}


def matmul(
    x,
    qw,
    scales: Any = None,
    zeros: Any = None,
    offsets: Any = None,
    bias: Any = None,
    *,
    bits: int | None = None,
    activation: str | None = None,
    activation_quantization: str | ActivationQuantization | None = None,
    preferred_element_type=None,
    precision=None,
    implementation: str | None = None,
) -> jax.Array:
    """``activation(x @ w + bias)`` with ``w = (q - zeros) * scales`` or ``q * scales + offsets``, w never stored.

    Sums are float32 whatever the types. Differentiable in x, scales, floating zeros, offsets and bias. Leading axes of
    the weights and those of ``x [..., M, K]`` broadcast as in :func:`jax.numpy.matmul`; shared weights are never
    copied.

    Args:
      x: float16, bfloat16 or float32 ``[..., K]``, or a :class:`QuantizedActivation`, which has no gradient.
      qw: a :class:`QuantizedTensor` or :class:`PermutedTensor`, or a packed array uint32 ``[..., ceil(N / 64), ceil(K /
        tile_k), 512]``.
      scales: with a packed array, float16, bfloat16 or float32 ``[..., K / group_size, N]``; ``[..., 1, N]`` is per
        channel.
      zeros: uint8 or floating ``[..., K / group_size, N]``, or None: ``2**(bits - 1)``, or offsets.
      offsets: floating ``[..., K / group_size, N]``, or None.
      bias: floating ``[..., N]``, or None.
      bits: 4 or 8; follows from the shapes unless K <= 32.
      activation: None, ``"relu"``, ``"relu6"``, ``"gelu"`` (the tanh form) or ``"silu"``.
      activation_quantization: None, or the type to which x is quantized first, ``"int8"`` or ``"float8_e4m3fn"`` (4-bit
        weights): with a scale for each row, or for each group of the weights, where these have some. An
        :class:`ActivationQuantization` says more. Gradients are those of the product with x itself.
      preferred_element_type: type of the result; default: that of x.
      precision: as in JAX. None, as long as ``jax_default_matmul_precision`` is None too, keeps float32 accuracy for
        float32 x. ``"default"`` (or ``"bfloat16"``) lets NVIDIA GPUs round it to bfloat16, where that is faster: two to
        three times with hundreds of rows. ``"highest"`` also keeps dequantized weights in float32 for 16-bit x.
      implementation: None (best for the platform), ``"cpu"`` or ``"cuda"`` (the fused kernel of that platform, or an
        error), ``"dequantize"`` (compiled dequantization, then a dense product), or ``"xla"`` (XLA's operations alone).

    Returns:
      ``[..., N]``.

    Raises:
      TypeError: an argument has a wrong type or dtype.
      ValueError: shapes do not fit, or an option is not one of those accepted.

    Example:
      >>> w, x = jnp.ones((128, 64)), jnp.ones((4, 128), jnp.bfloat16)
      >>> y = jw.matmul(x, jw.quantize(w), bias=jnp.ones(64), activation="relu")
      >>> y.shape, y.dtype, float(y[0, 0])
      ((4, 64), dtype(bfloat16), 129.0)
      >>> qvalue, scales = jw.quantize(w)
      >>> jw.matmul(x, qvalue, scales).shape
      (4, 64)
    """
    permutation = table = None
    if isinstance(qw, PermutedTensor):
        qw, permutation = qw.weight, qw.permutation
    if isinstance(qw, QuantizedTensor):
        if any(a is not None for a in (scales, zeros, offsets, bits)):
            raise TypeError(
                "jax_wonly: a QuantizedTensor carries its scales, zeros, offsets and bits; pass none of them."
            )
        weights = qw
        qw, scales, zeros, offsets, bits = weights.qvalue, weights.scales, weights.zeros, weights.offsets, weights.bits
        expected_k = weights.k
        table = check_table(weights.table, bits, zeros, offsets)
    else:
        expected_k = None
    quantized = x if isinstance(x, QuantizedActivation) else None
    if quantized is None:
        check_array("x", x)
    else:
        check_array("x.qvalue", x.qvalue, DTYPES)
        if activation_quantization is not None:
            raise TypeError("jax_wonly: activation_quantization is given, and x is quantized; accepted: one of them.")
        if permutation is not None:
            raise TypeError("jax_wonly: x is quantized and the weights are permuted; accepted: x itself.")
    if len(x.shape) == 0:
        raise ValueError("jax_wonly: x has shape (); accepted: [..., K].")
    k = x.shape[-1]
    if expected_k is not None and k != expected_k:
        raise ValueError(
            f"jax_wonly: x has shape {tuple(x.shape)}; accepted: [..., {expected_k}], the K of the weights."
        )
    if k == 0:
        raise ValueError(f"jax_wonly: x has shape {tuple(x.shape)}; accepted: [..., K] with K >= 1.")
    bits, k, n = check_weights(qw, scales, zeros, offsets, bits=bits, k=k)
    if permutation is not None:
        x = jnp.take(jnp.asarray(x), permutation, axis=-1)
    if bias is not None:
        check_array("bias", bias)
        if len(bias.shape) == 0 or bias.shape[-1] != n:
            raise ValueError(f"jax_wonly: bias has shape {tuple(bias.shape)}; accepted: [..., {n}].")
        check_finite("bias", bias)
    activation_kind = resolve_activation(activation)
    out_dtype = x.dtype
    if preferred_element_type is not None:
        out_dtype = check_float_dtype("preferred_element_type", preferred_element_type)
    if quantized is None:
        scheme = resolve_scheme(activation_quantization, bits, table, k, scales.shape[-2])
    else:
        scheme = quantized.scheme
        check_weights_of(scheme, bits, table)

    shift_mode = shift_mode_of(zeros, offsets)
    operands = [a for a in (qw, scales, zeros, offsets, bias) if a is not None]
    leads = {"x": x.shape[:-2], "qw": qw.shape[:-3], "scales": scales.shape[:-2]}
    if zeros is not None:
        leads["zeros"] = zeros.shape[:-2]
    if offsets is not None:
        leads["offsets"] = offsets.shape[:-2]
    if bias is not None:
        leads["bias"] = bias.shape[:-1]
    broadcast_leads(**leads)
    params = Params(
        bits=bits,
        shift_mode=shift_mode,
        has_bias=bias is not None,
        activation=activation_kind,
        transpose=False,
        k=k,
        out_dtype=jnp.dtype(out_dtype),
        precision=resolve_precision(precision),
        implementation=_ffi.resolve_implementation(implementation),
        table=table,
        activations=scheme,
    )
    return _matmul(x if quantized is None else quantized.arrays, *operands, params=params)


def resolve_activation(activation: str | None) -> Activation:
    check_choice("activation", activation, (None, *ACTIVATIONS))
    return Activation.NONE if activation is None else ACTIVATIONS[activation]


def resolve_precision(precision) -> lax.Precision | None:
    if isinstance(precision, tuple) and len(precision) == 2:  # as JAX has it, of each operand: the higher one
        of_each = [resolve_precision(one) for one in precision]
        return None if None in of_each else max(of_each, key=lambda one: one.value)  # type: ignore[union-attr]
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]  # unknown to some stubs of JAX
        try:
            return None if precision is None else lax.Precision(precision)
        except ValueError:  # the configuration may name an algorithm, which only XLA's own products know
            return None
    try:
        return lax.Precision(precision)
    except (TypeError, ValueError):  # the former for what has no hash
        raise ValueError(
            f"jax_wonly: precision={precision!r} is not supported; accepted: None, 'default', 'high', 'highest' or a "
            "jax.lax.Precision."
        ) from None


@partial(jax.jit, static_argnames="params", inline=True)
def _matmul(x, qw, scales, *rest, params: Params):
    if isinstance(x, Activations):
        return _quantized(x, qw, scales, *rest, params=params)
    operands = (x, qw, scales, *rest)
    vector = x.ndim == 1
    if vector:
        x = x[None]
        operands = (x, *operands[1:])
    mesh = explicit_mesh(operands)
    y = (
        _product(*operands, params=params)
        if mesh is None
        else matmul_on_mesh(mesh, _product, operands, _ranks(params), params)
    )
    return y[..., 0, :] if vector else y


def _product(*operands, params: Params):
    """The product of x ``[..., M, K]`` with weights whose leading axes broadcast."""
    x = operands[0]
    leads = [a.shape[: a.ndim - rank] for a, rank in zip(operands, _ranks(params), strict=True)]
    if any(leads[1:]):
        return _batched(partial(_bind, params=params), operands, leads)
    y = _bind(x.reshape(1, -1, params.k), *(a[None] for a in operands[1:]), params=params)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _quantized(x: Activations, *weights, params: Params):
    """The same of quantized activations ``[..., M, K]`` or ``[K]``."""
    if x.codes.ndim == 1:
        return _quantized(x.map(lambda a: a[None]), *weights, params=params)[..., 0, :]
    ranks = _ranks(params)[1:]
    leads = [a.shape[: a.ndim - rank] for a, rank in zip(weights, ranks, strict=True)]

    def bind(*operands):
        a, of_weights = split_operands(operands, params)
        return quantized_matmul(a, *of_weights, params=params)

    if any(leads):
        return _batched(bind, (*x.arrays, *weights), [*(a.shape[:-2] for a in x.arrays), *leads])
    y = bind(*(a.reshape(1, -1, a.shape[-1]) for a in x.arrays), *(a[None] for a in weights))
    return y.reshape(*x.codes.shape[:-1], y.shape[-1])


def _ranks(params: Params) -> list[int]:
    """How many dimensions of each operand are not leading axes."""
    return [2, 3, 2] + [2] * (params.shift_mode != ShiftMode.NONE) + [1] * params.has_bias


def _batched(bind, operands, leads):
    """One vmap for each leading axis: the batching rule knows which fold into M and which are the kernels' batch."""

    def product(*arrays):
        return bind(*(a[None] for a in arrays)).squeeze(0)

    rank = max(map(len, leads))
    batch = broadcast_leads(**{str(i): lead for i, lead in enumerate(leads)})
    function = product
    arrays = [a.reshape(*(1,) * (rank - len(lead)), *a.shape) for a, lead in zip(operands, leads, strict=True)]
    leads = [(1,) * (rank - len(lead)) + lead for lead in leads]
    for axis in reversed(range(rank)):
        # An axis of size 1 in all operands goes with x, which costs nothing.
        mapped = [lead[axis] != 1 or (batch[axis] == 1 and i == 0) for i, lead in enumerate(leads)]
        function = jax.vmap(_squeezing(function, mapped), in_axes=tuple(0 if m else None for m in mapped))
    return function(*arrays)


def _squeezing(function, mapped):
    """``function`` without the leading axis of size 1 of those operands that are not mapped over it."""

    def squeezed(*arrays):
        return function(*(a if m else a.squeeze(0) for a, m in zip(arrays, mapped, strict=True)))

    return squeezed
