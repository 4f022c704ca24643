"""One token's attention in one kernel: rotary positions, the write to the cache, scores, softmax, weighted values.

XLA needs six kernels for it, whose launches cost more than their work as long as the batch is small. The kernel is
written in Pallas and compiled by XLA through Triton; ``interpret`` runs it on a CPU, for tests.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

BLOCK = 64  # tokens of the cache that are read at once
LEAST = 16  # rows and columns of a tensor core's product


def supports(capacity: int, head_size: int) -> bool:
    """Returns whether the kernel can read a cache for ``capacity`` tokens."""
    return capacity % LEAST == 0 and head_size >= LEAST and head_size & (head_size - 1) == 0


def _kernel(
    position_ref,
    qkv_ref,
    squares_ref,
    cos_ref,
    sin_ref,
    _keys,  # the same memory as keys_ref
    _values,
    out_ref,
    keys_ref,
    values_ref,
    *,
    heads,
    width,
    epsilon,
    block,
):
    text, shared = pl.program_id(0), pl.program_id(1)
    size = keys_ref.shape[-1]
    group = heads // keys_ref.shape[1]
    position, factor = position_ref[0], lax.rsqrt(squares_ref[text] / width + epsilon)
    columns = jnp.arange(size)
    opposite = (columns + size // 2) % size  # the other member of a rotary pair
    cos = cos_ref[columns % (size // 2)]
    sin = jnp.where(columns < size // 2, -1, 1) * sin_ref[columns % (size // 2)]

    def heads_of(row, columns):
        return qkv_ref[text, row, columns].astype(jnp.float32) * factor

    # Rows past the group repeat its last head: a tensor core has no smaller product.
    rows = jnp.arange(max(LEAST, pl.next_power_of_2(group)))
    head = (shared * group + jnp.minimum(rows, group - 1))[:, None]
    q = heads_of(head, columns[None]) * cos[None] + heads_of(head, opposite[None]) * sin[None]
    k = heads_of(heads + shared, columns) * cos + heads_of(heads + shared, opposite) * sin
    v = heads_of(heads + keys_ref.shape[1] + shared, columns)
    q, k, v = q.astype(keys_ref.dtype), k.astype(keys_ref.dtype), v.astype(values_ref.dtype)
    keys_ref[text, shared, position] = k
    values_ref[text, shared, position] = v

    scale = size**-0.5
    highest = (q.astype(jnp.float32) * k.astype(jnp.float32)[None]).sum(1) * scale
    total = jnp.ones_like(highest)
    mean = jnp.zeros(q.shape, jnp.float32) + v.astype(jnp.float32)[None]

    def body(i, carry):
        highest, total, mean = carry
        at = i * block + jnp.arange(block)
        before = at < position
        where = (text, shared, pl.ds(i * block, block))
        k = triton.load(keys_ref.at[where], mask=before[:, None], other=0)
        v = triton.load(values_ref.at[where], mask=before[:, None], other=0)
        scores = jnp.dot(q, k.T, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(before[None], scores, -jnp.inf)
        new = jnp.maximum(highest, scores.max(1))
        weights, shrink = jnp.exp(scores - new[:, None]), jnp.exp(highest - new)
        values = jnp.dot(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new, total * shrink + weights.sum(1), mean * shrink[:, None] + values

    _, total, mean = lax.fori_loop(0, pl.cdiv(position, block), body, (highest, total, mean))
    # Repeated rows write the same values to the same place.
    out_ref[text, head, columns[None]] = (mean / total[:, None]).astype(out_ref.dtype)


@functools.partial(jax.jit, static_argnames=("heads", "width", "epsilon", "interpret"), inline=True)
def decode_attention(
    qkv,
    squares,
    cos,
    sin,
    keys,
    values,
    position,
    *,
    heads: int,
    width: int,
    epsilon: float,
    interpret: bool = False,
):
    """Returns the attention of one token, and the cache with the token in it.

    The factor of an RMS norm, which ``qkv`` has not been multiplied by yet, is ``1 / sqrt(squares / width + epsilon)``.

    Args:
      qkv: ``[batch, heads + 2 * key-value heads, head size]``: queries, keys and values, before their rotation.
      squares: float32 ``[batch]``, sums of squares of what the norm had to norm.
      cos, sin: float32 ``[head size / 2]``, of the rotation.
      keys, values: ``[batch, key-value heads, capacity, head size]``.
      position: int32, how many tokens the cache holds.
      heads: of the queries.
      width: how many numbers were squared.
      epsilon: of the norm.
      interpret: run without a GPU.

    Returns:
      ``[batch, heads, head size]``, keys and values.
    """
    batch, shared, capacity, size = keys.shape
    outputs = [jax.ShapeDtypeStruct((batch, heads, size), qkv.dtype)]
    outputs += [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (keys, values)]
    return pl.pallas_call(
        functools.partial(_kernel, heads=heads, width=width, epsilon=epsilon, block=math.gcd(capacity, BLOCK)),
        out_shape=outputs,
        grid=(batch, shared),
        input_output_aliases={5: 1, 6: 2},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="decode_attention",
    )(jnp.reshape(position, (1,)), qkv, squares, cos, sin, keys, values)
