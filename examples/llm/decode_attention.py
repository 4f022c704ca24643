"""One token's attention in one kernel: rotary positions, the write to the cache, scores, softmax, weighted values.

XLA needs six kernels for it, whose launches cost more than their work as long as the batch is small. Few texts leave
most of a GPU idle: then several programs share a head's tokens, and XLA adds up what they found. The kernel is written
in Pallas and compiled by XLA through Triton; ``interpret`` runs it on a CPU, for tests.
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
PROGRAMS = 128  # that keep a GPU busy


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
    keys_ref,
    values_ref,
    *out_refs,
    heads,
    width,
    epsilon,
    block,
):
    text, shared, split = (pl.program_id(i) for i in range(3))
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
    # The new token belongs to the first share.
    highest = (q.astype(jnp.float32) * k.astype(jnp.float32)[None]).sum(1) * scale
    highest = jnp.where(split == 0, highest, -jnp.inf)
    total = jnp.where(split == 0, jnp.ones_like(highest), 0)
    mean = jnp.where(split == 0, jnp.zeros(q.shape, jnp.float32) + v.astype(jnp.float32)[None], 0)

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

    blocks = pl.cdiv(position, block)
    each = pl.cdiv(blocks, pl.num_programs(2))
    found = lax.fori_loop(split * each, jnp.minimum((split + 1) * each, blocks), body, (highest, total, mean))
    # Repeated rows write the same values to the same place.
    if len(out_refs) == 1:
        _, total, mean = found
        out_refs[0][text, head, columns[None]] = (mean / total[:, None]).astype(out_refs[0].dtype)
    else:
        for ref, value in zip(out_refs[:2], found[:2], strict=True):
            ref[text, split, head[:, 0]] = value
        out_refs[2][text, split, head, columns[None]] = found[2]


@functools.partial(jax.jit, static_argnames=("heads", "width", "epsilon", "splits", "interpret"), inline=True)
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
    splits: int | None = None,
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
      splits: programs that share a head's tokens; None chooses.
      interpret: run without a GPU.

    Returns:
      ``[batch, heads, head size]``, keys and values.
    """
    batch, shared, capacity, size = keys.shape
    block = math.gcd(capacity, BLOCK)
    if splits is None:
        splits = max(1, min(PROGRAMS // (batch * shared), capacity // block))
    outputs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (keys, values)]
    if splits == 1:
        outputs.append(jax.ShapeDtypeStruct((batch, heads, size), qkv.dtype))
    else:
        shapes = (batch, splits, heads), (batch, splits, heads), (batch, splits, heads, size)
        outputs += [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    keys, values, *found = pl.pallas_call(
        functools.partial(_kernel, heads=heads, width=width, epsilon=epsilon, block=block),
        out_shape=outputs,
        grid=(batch, shared, splits),
        input_output_aliases={5: 0, 6: 1},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="decode_attention",
    )(jnp.reshape(position, (1,)), qkv, squares, cos, sin, keys, values)
    if splits == 1:
        return found[0], keys, values
    highest, total, mean = found
    weights = jnp.exp(highest - highest.max(1, keepdims=True))
    y = (weights[..., None] * mean).sum(1) / (weights * total).sum(1)[..., None]
    return y.astype(qkv.dtype), keys, values
