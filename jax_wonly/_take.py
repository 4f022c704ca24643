"""Single outputs of a packed weight, dequantized: the rows of an embedding table whose transpose is the weight."""

import jax
import jax.numpy as jnp

from jax_wonly._format import TILE_N, bias_of, tile_k
from jax_wonly._table import look_up
from jax_wonly._tensor import QuantizedTensor


def take_outputs(weight: QuantizedTensor, indices: jax.Array, dtype=None) -> jax.Array:
    """``dequantize(weight)[:, i]`` for each index ``i``, reading the words of those outputs alone.

    Args:
      weight: ``[K, N]``.
      indices: integers of any shape. Those below zero count from the end, those outside of the outputs give NaN, as in
        ``jnp.take``.
      dtype: of the result; by default that of the scales.

    Returns:
      ``[*indices.shape, K]``.

    Raises:
      TypeError: ``indices`` are no integers.
      ValueError: ``weight`` has leading axes.
    """
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"jax_wonly: indices has dtype {indices.dtype}; accepted: integers.")
    if weight.ndim != 2:
        raise ValueError(f"jax_wonly: weight has shape {weight.shape}; accepted: [K, N], one table at a time.")
    bits, k, n = weight.bits, weight.k, weight.n
    indices = jnp.where(indices < 0, indices + n, indices)
    valid = (indices >= 0) & (indices < n)
    i = jnp.where(valid, indices, 0)

    # A tile's words are (atom, g, t, half, high), see _format: one output is the (t, half) of one (atom, g, high).
    tiles_n, tiles_k, _ = weight.qvalue.shape
    words = weight.qvalue.reshape(tiles_n, tiles_k, 4, 8, 4, 2, 2)
    words = words[i // TILE_N, :, i // 16 % 4, i % 8, :, :, i // 8 % 2]
    pairs = 16 // bits
    shifts = (jnp.arange(2 * pairs, dtype=jnp.uint32) * bits).reshape(2, pairs)
    codes = (words[..., None, None] >> shifts) & ((1 << bits) - 1)  # [..., tile, t, half, odd, pair]
    lead = i.ndim
    codes = codes.transpose(*range(lead), *(lead + axis for axis in (0, 2, 4, 1, 3)))
    codes = codes.reshape(*i.shape, tiles_k * tile_k(bits))[..., :k]

    def of_groups(values: jax.Array) -> jax.Array:  # [groups, n] -> [..., groups, 1]
        return jnp.moveaxis(values[:, i], 0, -1).astype(jnp.float32)[..., None]

    codes = codes.reshape(*i.shape, weight.scales.shape[0], -1)
    q = codes.astype(jnp.float32)
    if weight.table is not None:
        rows = look_up(codes, weight.table) * of_groups(weight.scales)
    elif weight.offsets is None:
        rows = (q - (bias_of(bits) if weight.zeros is None else of_groups(weight.zeros))) * of_groups(weight.scales)
    else:
        rows = q * of_groups(weight.scales) + of_groups(weight.offsets)
    rows = jnp.where(valid[..., None], rows.reshape(*i.shape, k), jnp.nan)
    return rows.astype(weight.scales.dtype if dtype is None else dtype)
