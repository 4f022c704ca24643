"""GPTQ: the error of each input's weights is made up for by those that are rounded later."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_wonly._format import GROUP_SIZES
from jax_wonly._tensor import QuantizedTensor
from jax_wonly.algorithms._grid import Scheme, decode, encode, over_leading
from jax_wonly.algorithms._moments import check_moments, product
from jax_wonly.algorithms._weights import clipped_grid
from jax_wonly.compat import PermutedTensor

ACT_ORDERS = (False, True, "static")
_BLOCK = 128  # inputs whose errors are carried to all later ones at once, where groups do not say


def gptq(
    w,
    moments,
    *,
    bits: int = 4,
    group_size: int | None = 128,
    mode: str = "symmetric",
    scale_dtype=None,
    damping: float = 0.01,
    act_order: bool | str = False,
    clip: bool = True,
) -> QuantizedTensor | PermutedTensor:
    """GPTQ: rounds the inputs' weights one after the other, and changes those still to come so that the outputs stay.

    What a change costs is told by the second moments (the Hessian, but for a factor), of whose inverse the Cholesky
    factor is needed: that is the inverse of a factor of the moments themselves, taken from the last input to the first.
    The grid of a group comes from its weights as they are when its first input is reached (Frantar et al., "GPTQ:
    Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022).

    Args:
      w: float16, bfloat16 or float32 ``[..., K, N]``.
      moments: float32 ``[K, K]`` or ``[..., K, K]``, the second moments of the inputs. An input that was always zero
        gets weights of zero.
      bits, group_size, mode, scale_dtype: as in ``jax_wonly.quantize``.
      damping: what is added to the diagonal of the moments, relative to its mean; above 0. Ten times as much is added
        again and again while the moments have no Cholesky factor. With next to none, and fewer inputs than weights,
        the changes can outgrow the groups' grids, and the error that of rounding to the nearest.
      act_order: False: in the order of the inputs. True: the largest inputs first, in groups of that order, which
        gives a :class:`~jax_wonly.PermutedTensor`: x is gathered at each product. ``"static"``: the largest
        first, in groups of neighbours whose grids come from the weights as given; nothing is gathered then.
      clip: whether the extremes of groups are clipped as by :func:`mse` (with the moments of the group's inputs); plain
        GPTQ does not.

    Raises:
      TypeError, ValueError: as ``jax_wonly.quantize``, or another argument does not fit.

    Example:
      >>> x = jax.random.normal(jax.random.key(0), (32, 128))
      >>> w = jax.random.normal(jax.random.key(1), (128, 64))
      >>> moments = jw.algorithms.second_moments(x)
      >>> better = jw.algorithms.gptq(w, moments)
      >>> jw.algorithms.output_error(w, better, moments) < jw.algorithms.output_error(w, jw.quantize(w), moments)
      True
    """
    scheme = Scheme.of(w, bits, group_size, mode, scale_dtype)
    moments = check_moments(moments, w)
    check_gptq(damping, act_order)
    w = jnp.asarray(w)
    if act_order is True and w.ndim > 2:
        raise ValueError(
            f"jax_wonly: act_order=True with w of shape {tuple(w.shape)}; accepted with leading axes: False, 'static' "
            "(a PermutedTensor has one order of inputs)."
        )
    weight, order = _gptq(w, moments, jnp.float32(damping), scheme, act_order, clip)
    return PermutedTensor(weight, order[..., 0]) if act_order is True else weight


def check_gptq(damping, act_order) -> None:
    if isinstance(damping, bool) or not isinstance(damping, (int, float)) or not 0 < damping < float("inf"):
        raise ValueError(f"jax_wonly: damping={damping!r} is not supported; accepted: a number above 0.")
    if not any(act_order is one for one in (False, True)) and act_order != "static":
        raise ValueError(f"jax_wonly: act_order={act_order!r} is not supported; accepted: False, True, 'static'.")


def factor(moments: jax.Array, damping: jax.Array) -> jax.Array:
    """The upper triangular U with ``U' U`` the inverse of the damped moments ``[K, K]``."""
    mean = jnp.diagonal(moments).mean()
    identity = jnp.eye(moments.shape[0])

    def lower(damping):
        # Cholesky of the reversed matrix, for a product of an upper triangle and its transpose.
        return jnp.linalg.cholesky((moments + damping * mean * identity)[::-1, ::-1], symmetrize_input=False)

    def unfit(carry):
        damping, triangle = carry
        return ~jnp.isfinite(triangle).all() & (damping < 1e6)

    start = damping, jnp.full(moments.shape, jnp.nan)
    triangle = lax.while_loop(unfit, lambda carry: (carry[0] * 10, lower(carry[0])), start)[1][::-1, ::-1]
    return jax.scipy.linalg.solve_triangular(triangle, identity, lower=False)


@partial(jax.jit, static_argnames=("scheme", "act_order", "clip"))
def _gptq(w, moments, damping, scheme, act_order, clip):
    k, size = w.shape[-2], scheme.group_size
    # A group is a block, where that is neither too long nor too odd a number of inputs.
    block = size if size in GROUP_SIZES else min(_BLOCK, k)
    fixed = size not in GROUP_SIZES or act_order == "static"  # grids that are known before the first block
    blocks = -(-k // block)
    pad = blocks * block - k

    def grid_of(groups, moments):
        """``[G, 1, N]`` of groups ``[G, size, N]`` with moments ``[G, size, size]``."""
        return clipped_grid(groups, scheme, moments) if clip else scheme.grid(*scheme.extremes(groups))

    def group_moments(moments):
        index = jnp.arange(k // size)
        return moments.reshape(k // size, size, k // size, size)[index, :, index]

    def one(w, moments):
        n = w.shape[-1]
        diagonal = jnp.diagonal(moments)
        dead = diagonal == 0
        w = jnp.where(dead[:, None], 0, w.astype(jnp.float32))
        order = jnp.arange(k, dtype=jnp.int32)
        grid = grid_of(w.reshape(-1, size, n), group_moments(moments)) if fixed else None
        if act_order:
            order = jnp.argsort(-diagonal, stable=True).astype(jnp.int32)
            w, moments = w[order], moments[order][:, order]
        # A dead input moves nothing, whatever stands on the diagonal; padding is dead too.
        moments = moments + jnp.diag(jnp.where(dead[order], jnp.maximum(diagonal.mean(), 1e-30), 0))
        upper = jnp.pad(factor(moments, damping), ((0, pad), (0, pad)))
        upper = upper + jnp.diag((jnp.arange(k + pad) >= k).astype(jnp.float32))
        w = jnp.pad(w, ((0, pad), (0, 0)))
        rows_grid = None
        if fixed:  # the grid of each input, in the order in which they come
            group = jnp.pad(order // size, (0, pad))
            rows_grid = jax.tree.map(lambda a: a[group, 0], grid)

        def do_block(w, i):
            start = i * block
            rows = lax.dynamic_slice_in_dim(w, start, block)
            coupling = lax.dynamic_slice_in_dim(upper, start, block)
            inner = lax.dynamic_slice_in_dim(coupling, start, block, 1)
            if fixed:
                made, by_row = None, jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, block), rows_grid)
            else:
                square = lax.dynamic_slice(moments, (start, start), (block, block))
                made = jax.tree.map(lambda a: a[0], grid_of(rows[None], square[None]))
                by_row = jax.tree.map(lambda a: jnp.broadcast_to(a, (block, n)), made)

            def do_row(rows, j):
                grid = jax.tree.map(lambda a: a[j], by_row)
                codes = encode(rows[j], grid)
                error = (rows[j] - decode(codes, grid)) / inner[j, j]
                return rows - inner[j][:, None] * error, (codes.astype(jnp.uint8), error)

            codes, errors = lax.scan(do_row, rows, jnp.arange(block))[1]
            return w - product(coupling.T, errors), (codes, made)

        codes, made = lax.scan(do_block, w, jnp.arange(blocks))[1]
        codes = codes.reshape(-1, n)[:k]
        if act_order == "static":
            codes = codes[jnp.argsort(order)]
        return scheme.tensor(codes, grid if made is None else made), order[:, None]

    return over_leading(one, w, moments)
