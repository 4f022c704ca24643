"""AWQ: inputs that are large on average keep more of their weights' accuracy."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_wonly._matmul import matmul
from jax_wonly._wrapped import WrappedTensor, register_for_export
from jax_wonly.algorithms._grid import Scheme, decode, encode, least, over_leading
from jax_wonly.algorithms._moments import check_moments, quadratic
from jax_wonly.algorithms._weights import clip_and_round

STEPS = 20  # exponents between 0 and 1 that are tried
_SMALLEST = 1e-4  # input scale, and root mean square of an input relative to the largest


@partial(jax.tree_util.register_dataclass, data_fields=("weight", "input_scale"), meta_fields=())
@dataclass(frozen=True, repr=False, eq=False)
class ScaledTensor(WrappedTensor):
    """A weight ``[..., K, N]`` kept as a quantized one whose inputs are to be multiplied first, as AWQ makes it.

    ``x @ w == (x * input_scale) @ weight``.

    Attributes:
      weight: the :class:`~jax_wonly.QuantizedTensor` ``[..., K, N]``.
      input_scale: ``[..., K]``, of the type of the dense weight.

    Example:
      >>> x = jax.random.normal(jax.random.key(0), (32, 128))
      >>> weight = jw.algorithms.awq(jnp.ones((128, 64)), jw.algorithms.second_moments(x))
      >>> type(weight).__name__, weight.input_scale.shape, (x @ weight).shape
      ('ScaledTensor', (128,), (32, 64))
    """

    input_scale: Any

    def matmul(self, x, **options) -> jax.Array:
        """:func:`jax_wonly.matmul` of ``x [..., K]`` with this weight; ``options`` are its further arguments.

        Raises:
          TypeError, ValueError: as :func:`jax_wonly.matmul`.
        """
        if getattr(x, "shape", ())[-1:] != self.shape[-2:-1]:
            return matmul(x, self.weight, **options)  # which says what is wrong
        scale = self.input_scale if len(x.shape) == 1 else self.input_scale[..., None, :]
        scale = self.input_scale if self.input_scale.ndim == 1 else scale
        return matmul(jnp.asarray(x) * scale.astype(x.dtype), self.weight, **options)

    def __rmatmul__(self, x) -> jax.Array:
        return self.matmul(x)

    def dequantize(self, dtype=None, *, implementation: str | None = None) -> jax.Array:
        """The dense weight ``[..., K, N]`` of inputs that are not multiplied.

        Args:
          dtype: float16, bfloat16 or float32; default: the type of the scales.
          implementation: None, ``"cpu"``, ``"cuda"`` or ``"xla"``.
        """
        dense = self.weight.dequantize(jnp.float32, implementation=implementation)
        dense = dense * self.input_scale.astype(jnp.float32)[..., None]
        return dense.astype(self.dtype if dtype is None else dtype)


register_for_export(ScaledTensor)


def awq(
    w,
    moments,
    *,
    bits: int = 4,
    group_size: int | None = 128,
    mode: str = "symmetric",
    scale_dtype=None,
    clip: bool = True,
) -> ScaledTensor:
    """Activation-aware quantization: weights of large inputs are multiplied before rounding, those inputs divided.

    The factors are the inputs' root mean squares to a power, which is the best of 20 from 0 up (0: round-to-nearest)
    by the error of the outputs; then extremes are clipped as by :func:`mse` with ``moments``, if that is better still.
    So the outputs' error on the calibration data is never above that of round-to-nearest, but for the rounding of
    float32 (Lin et al., "AWQ: Activation-aware Weight Quantization", 2023).

    Args:
      w: float16, bfloat16 or float32 ``[..., K, N]``.
      moments: float32 ``[K, K]`` or ``[..., K, K]``, the second moments of the inputs.
      bits, group_size, mode, scale_dtype: as in ``jax_wonly.quantize``.
      clip: whether to look for clipped extremes.

    Raises:
      TypeError, ValueError: as ``jax_wonly.quantize``, or ``moments`` do not fit.

    Example:
      >>> x = jax.random.normal(jax.random.key(0), (32, 128))
      >>> w = jax.random.normal(jax.random.key(1), (128, 64))
      >>> moments = jw.algorithms.second_moments(x)
      >>> better = jw.algorithms.awq(w, moments)
      >>> jw.algorithms.output_error(w, better, moments) < jw.algorithms.output_error(w, jw.quantize(w), moments)
      True
    """
    scheme = Scheme.of(w, bits, group_size, mode, scale_dtype)
    moments = check_moments(moments, w)
    scale = best_input_scale((w,), moments, scheme)
    return apply_input_scale(jnp.asarray(w), moments, scale, scheme, clip)


def best_input_scale(weights, moments: jax.Array, scheme: Scheme) -> jax.Array:
    """The ``input_scale [..., K]`` with which weights ``[..., K, N]`` of the same inputs are quantized best."""
    w = jnp.concatenate([jnp.asarray(w) for w in weights], -1)
    return _search(w, moments, scheme).squeeze(-1)


@partial(jax.jit, static_argnames="scheme")
def _search(w, moments, scheme):
    dtype = w.dtype

    def one(w, moments):
        dense = w.astype(jnp.float32)
        size = jnp.sqrt(jnp.diagonal(moments))
        size = jnp.maximum(size / jnp.maximum(size.max(), jnp.finfo(jnp.float32).tiny), _SMALLEST)

        def measure(exponent):
            factors = size**exponent
            factors = factors / jnp.sqrt(factors.max() * factors.min())
            stored = (1 / factors).astype(dtype)
            factors = 1 / stored.astype(jnp.float32)
            groups = scheme.groups(dense * factors[:, None])
            grid = scheme.grid(*scheme.extremes(groups))
            rounded = decode(encode(groups, grid), grid).reshape(dense.shape) / factors[:, None]
            return quadratic(rounded - dense, moments).sum(), stored[:, None]

        return least(measure, jnp.arange(STEPS) / STEPS)[1]

    return over_leading(one, w, moments)


@partial(jax.jit, static_argnames=("scheme", "clip"))
def apply_input_scale(w, moments, input_scale, scheme: Scheme, clip: bool) -> ScaledTensor:
    """``w [..., K, N]`` quantized for inputs that are multiplied by ``input_scale [..., K]``."""

    def one(w, moments, input_scale):
        scaled = w.astype(jnp.float32) / input_scale.astype(jnp.float32)
        inputs = input_scale[:, 0].astype(jnp.float32)
        moments = moments * inputs * inputs[:, None]
        groups = scheme.groups(scaled)
        grid = scheme.grid(*scheme.extremes(groups))
        plain = scheme.tensor(encode(groups, grid), grid)
        if not clip:
            return plain
        clipped = clip_and_round(scaled, moments, scheme)
        # Clipping looks at each group alone; errors of groups may add up.
        errors = [quadratic(qt.dequantize(jnp.float32) - scaled, moments).sum() for qt in (plain, clipped)]
        return jax.tree.map(lambda a, b: jnp.where(errors[1] < errors[0], b, a), plain, clipped)

    return ScaledTensor(over_leading(one, w, moments, input_scale[..., None]), input_scale)
