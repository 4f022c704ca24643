"""``wonly_quantized_matmul``: quantized activations times packed weights.

Operands: the arrays of :class:`~jax_wonly.primitives.activations.Activations`, each ``[Bx, M, ...]``, then those of
``wonly_matmul`` after x: ``qw u32[Bw, Nt, Kt, 512]``, ``scales[Bs, G, N]``, ``shift`` and ``bias``. Every leading size
is 1 or B. Result ``[B, M, N]``. On GPUs with a kernel for it, codes meet codes on the tensor cores; elsewhere it is the
product of the weights with the dequantized activations. It has no derivative: ``matmul(x, qt,
activation_quantization=...)``, which is ``wonly_matmul`` with ``params.activations``, has that of x.
"""

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from jax_wonly.primitives import activations
from jax_wonly.primitives._common import make_primitive, merge_batch, register_lowerings
from jax_wonly.primitives.activations import Activations
from jax_wonly.primitives.matmul import Params, matmul
from jax_wonly.primitives.matmul_sharding import allow_partitioning

quantized_matmul_p = make_primitive("wonly_quantized_matmul")


def quantized_matmul(a: Activations, qw, scales, *rest, params: Params) -> jax.Array:
    """Binds the primitive; ``params.activations`` says what ``a`` is, and shapes are the caller's responsibility."""
    return quantized_matmul_p.bind(*a.arrays, qw, scales, *rest, params=params)


def _count(params: Params) -> int:
    assert params.activations is not None
    return 3 if params.activations.symmetric else 4


def split_operands(operands, params: Params):
    """``(Activations, (qw, scales, *rest))``."""
    count = _count(params)
    return Activations(*operands[:count]), tuple(operands[count:])


def _evaluate(*operands, params: Params, platform: str):
    p = params
    a, (qw, scales, *rest) = split_operands(operands, p)
    if activations.has_kernel(a, qw, scales, *rest, p=p, platform=platform):
        return activations.kernel(a, qw, scales, *rest, p=p)
    x = activations.dequantize(a, p.k, activations.dequantized_dtype(p.out_dtype, platform))
    return matmul(x, qw, scales, *rest, params=p._replace(activations=None))


@quantized_matmul_p.def_abstract_eval
def _abstract(codes, *operands, params: Params):
    _, (_, scales, *_) = split_operands((codes, *operands), params)
    lead = next((a.shape[0] for a in (codes, *operands) if a.shape[0] != 1), 1)
    shape = (lead, codes.shape[1], scales.shape[-1])
    return codes.update(shape=shape, dtype=jnp.dtype(params.out_dtype), weak_type=False)


def _batch(operands, axes, *, params: Params):
    count = _count(params)
    if any(d is not None for d in axes[count:]):
        merged, size, lead = merge_batch(operands, axes)
        y = quantized_matmul_p.bind(*merged, params=params)
        return y.reshape(size, lead, *y.shape[1:]), 0
    # Shared weights: the mapped axis becomes part of M.
    size = next(a.shape[d] for a, d in zip(operands, axes, strict=True) if d is not None)
    folded = []
    for a, d in zip(operands[:count], axes[:count], strict=True):
        a = jnp.broadcast_to(a[:, None], (a.shape[0], size, *a.shape[1:])) if d is None else jnp.moveaxis(a, d, 1)
        folded.append(a.reshape(a.shape[0], size * a.shape[2], a.shape[3]))
    y = quantized_matmul_p.bind(*folded, *operands[count:], params=params)
    return y.reshape(y.shape[0], size, y.shape[1] // size, y.shape[-1]), 1


def _jvp(primals, tangents, *, params: Params):
    raise NotImplementedError(
        "jax_wonly: a product of quantized activations has no derivative; use jax.lax.stop_gradient, or "
        "matmul(x, qt, activation_quantization=...), which has that of the product with x itself."
    )


register_lowerings(quantized_matmul_p, _evaluate)
allow_partitioning(quantized_matmul_p)  # of the product with dequantized activations
batching.primitive_batchers[quantized_matmul_p] = _batch
ad.primitive_jvps[quantized_matmul_p] = _jvp
