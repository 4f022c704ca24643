"""Products in which every row has its own expert's weights."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_wonly import _ffi
from jax_wonly._abi import RowMode
from jax_wonly._explicit import explicit_mesh, ragged_on_mesh
from jax_wonly._matmul import resolve_activation, resolve_precision
from jax_wonly._quantize import shift_mode_of
from jax_wonly._table import check_table
from jax_wonly._tensor import QuantizedTensor, check_parts
from jax_wonly._validate import FLOATS, check_array, check_finite, check_float_dtype, check_weights
from jax_wonly.primitives.experts import Params
from jax_wonly.primitives.experts import ragged_matmul as _bind
from jax_wonly.primitives.experts_sharding import ids_of_sizes

_INTEGERS = ("int32", "int64", "int16", "int8", "uint8", "uint16", "uint32", "uint64")


def ragged_dot(
    lhs,
    rhs: QuantizedTensor,
    group_sizes,
    precision=None,
    preferred_element_type=None,
    group_offset=None,
    *,
    bias: Any = None,
    activation: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """:func:`jax.lax.ragged_dot` with quantized weights: successive groups of rows, each times its expert's weight.

    One custom call whatever the sizes, which stay on the device; experts without rows cost nothing. Differentiable in
    lhs, scales, floating zeros, offsets and bias. Under ``vmap`` the batch becomes more rows, or more experts, of the
    same call.

    Args:
      lhs: float16, bfloat16 or float32 ``[M, K]``, sorted by expert.
      rhs: a :class:`QuantizedTensor` ``[E, K, N]``.
      group_sizes: integers ``[E]``, the rows of each expert. Rows beyond their sum are zero in the result. Sizes that
        are only known on the device are cut off at M rows, and negative ones count as zero.
      precision, preferred_element_type, implementation: as in :func:`jax_wonly.matmul`.
      group_offset: None, or an integer (a scalar or ``[1]``): rhs holds the experts from this one on, of
        ``group_sizes [G]`` with ``G >= E``; the rows of the others are zero.
      bias: floating ``[N]`` or ``[E, N]``, or None. Rows without an expert get none.
      activation: as in :func:`jax_wonly.matmul`.

    Returns:
      ``[M, N]``.

    Raises:
      TypeError: an argument has a wrong type or dtype.
      ValueError: shapes do not fit, an option is not one of those accepted, or sizes in a NumPy array are negative or
        add up to more than M.

    Example:
      >>> experts = jw.quantize(jnp.ones((3, 128, 64)))
      >>> x = jnp.ones((4, 128))
      >>> y = jw.ragged_dot(x, experts, jnp.array([2, 0, 1]))
      >>> y.shape, y[:, 0].tolist()
      ((4, 64), [128.0, 128.0, 128.0, 0.0])
    """
    _check_experts("rhs", rhs)
    _check_x("lhs", lhs, rhs.k)
    if len(lhs.shape) != 2:
        raise ValueError(f"jax_wonly: lhs has shape {tuple(lhs.shape)}; accepted: [M, {rhs.k}] (vmap adds axes).")
    experts = rhs.shape[0]
    check_array("group_sizes", group_sizes, _INTEGERS)
    if len(group_sizes.shape) != 1 or (group_offset is None and group_sizes.shape[0] != experts):
        accepted = f"[{experts}], one for each expert of rhs" if group_offset is None else "[G]"
        raise ValueError(f"jax_wonly: group_sizes has shape {tuple(group_sizes.shape)}; accepted: {accepted}.")
    if isinstance(group_sizes, np.ndarray):
        total = int(group_sizes.sum(dtype=np.int64))
        if (group_sizes < 0).any() or (isinstance(lhs.shape[0], int) and total > lhs.shape[0]):
            raise ValueError(
                f"jax_wonly: group_sizes={_short(group_sizes)} (sum {total}); accepted: sizes from 0 on that add up to "
                f"at most the {lhs.shape[0]} rows of lhs."
            )
    rows, mode = _to_int32(group_sizes), RowMode.SIZES
    if group_offset is not None:
        rows, mode = _ids_from_offset(rows, group_offset, lhs.shape[0], experts), RowMode.IDS
    return _call(lhs, rhs, rows, mode, bias, activation, preferred_element_type, precision, implementation)


def gather_matmul(
    x,
    qt: QuantizedTensor,
    expert_ids,
    *,
    bias: Any = None,
    activation: str | None = None,
    preferred_element_type=None,
    precision=None,
    implementation: str | None = None,
) -> jax.Array:
    """``y[..., :] = activation(x[..., :] @ w[expert_ids[...]] + bias)``: rows in any order, each with an expert's id.

    MLX's ``gather_qmm``; weights are not gathered in memory, and x only on GPUs with many rows for each expert. For a
    mixture of experts, ``x[:, None]`` and ids ``[tokens, top_k]`` give ``[tokens, top_k, N]``, whose rows then meet the
    second weight with the same ids. To share an id among the rows of a matrix ``x [..., M, K]``, pass
    ``expert_ids[..., None]``.

    Args:
      x: float16, bfloat16 or float32 ``[..., K]``.
      qt: a :class:`QuantizedTensor` ``[E, K, N]``.
      expert_ids: integers that broadcast with ``x.shape[:-1]``. Rows whose id is not in 0 .. E - 1 are zero.
      bias: floating ``[N]`` or ``[E, N]``, or None. Rows without an expert get none.
      activation, preferred_element_type, precision, implementation: as in :func:`jax_wonly.matmul`.

    Returns:
      ``[..., N]``, with the axes of ``x.shape[:-1]`` and ``expert_ids`` broadcast.

    Raises:
      TypeError: an argument has a wrong type or dtype.
      ValueError: shapes do not fit, an option is not one of those accepted, or ids in a NumPy array are out of range.

    Example:
      >>> experts = jw.quantize(jnp.arange(3.0)[:, None, None] * jnp.ones((3, 128, 64)))
      >>> x, ids = jnp.ones((2, 128)), jnp.array([[0, 1], [2, 1]])
      >>> y = jw.gather_matmul(x[:, None], experts, ids)
      >>> y.shape, y[..., 0].tolist()
      ((2, 2, 64), [[0.0, 128.0], [256.0, 128.0]])
    """
    _check_experts("qt", qt)
    _check_x("x", x, qt.k)
    check_array("expert_ids", expert_ids, _INTEGERS)
    experts = qt.shape[0]
    if isinstance(expert_ids, np.ndarray) and ((expert_ids < 0) | (expert_ids >= experts)).any():
        raise ValueError(
            f"jax_wonly: expert_ids={_short(expert_ids)} has ids out of range; accepted: 0 to {experts - 1} (ids that "
            "are only known on the device may lie outside: their rows are zero)."
        )
    try:
        jnp.broadcast_shapes(x.shape[:-1], expert_ids.shape)
    except ValueError:
        raise ValueError(
            f"jax_wonly: expert_ids has shape {tuple(expert_ids.shape)}; accepted: what broadcasts with "
            f"{tuple(x.shape[:-1])}, the leading axes of x."
        ) from None
    rows = _to_int32(expert_ids)
    return _call(x, qt, rows, RowMode.IDS, bias, activation, preferred_element_type, precision, implementation)


def _check_experts(name: str, qt) -> None:
    if not isinstance(qt, QuantizedTensor):
        raise TypeError(
            f"jax_wonly: {name} is a {type(qt).__name__}; accepted: a QuantizedTensor [E, K, N] (quantize(w) of w "
            "[E, K, N])."
        )
    check_parts(name, qt)
    arrays = jax.tree.leaves(qt)
    leads = {tuple(a.shape[:-3] if a is qt.qvalue else a.shape[:-2]) for a in arrays}
    if len(qt.shape) != 3 or len(leads) != 1 or qt.shape[0] == 0:
        raise ValueError(
            f"jax_wonly: {name} has shape {qt.shape}, its arrays {[tuple(a.shape) for a in arrays]}; accepted: "
            "[E, K, N] with E >= 1 and one leading axis for all arrays."
        )
    check_weights(qt.qvalue, qt.scales, qt.zeros, qt.offsets, bits=qt.bits, k=qt.k)


def _check_x(name: str, x, k: int) -> None:
    check_array(name, x)
    if len(x.shape) == 0 or x.shape[-1] != k:
        raise ValueError(f"jax_wonly: {name} has shape {tuple(x.shape)}; accepted: [..., {k}], the K of the weights.")


def _short(values: np.ndarray) -> str:
    return np.array2string(values, threshold=16, edgeitems=4, separator=", ").replace("\n", "")


def _to_int32(a) -> jax.Array:
    """Values that int32 does not hold become ones that mean the same: none, or all."""
    limits = np.iinfo(np.int32)
    a = jnp.asarray(a)
    if a.dtype.itemsize >= 4 and a.dtype != jnp.int32:
        a = jnp.clip(a, 0 if a.dtype.kind == "u" else limits.min, limits.max)
    return a.astype(jnp.int32)


def _ids_from_offset(sizes, offset, m, experts: int) -> jax.Array:
    """The expert of every row, counted from expert ``offset``."""
    check_array("group_offset", offset := np.asarray(offset) if isinstance(offset, int) else offset, _INTEGERS)
    if tuple(offset.shape) not in ((), (1,)):
        raise ValueError(f"jax_wonly: group_offset has shape {tuple(offset.shape)}; accepted: [] or [1].")
    groups = sizes.shape[0]
    if isinstance(offset, np.ndarray) and not 0 <= int(offset.reshape(())) <= groups - experts:
        raise ValueError(
            f"jax_wonly: group_offset={int(offset.reshape(()))}; accepted: 0 to {groups - experts}, so that the "
            f"{experts} experts of rhs are among the {groups} groups."
        )
    ids = ids_of_sizes(sizes, m)
    return jnp.where(ids < groups, ids - _to_int32(offset).reshape(()), -1)


def _call(
    x, qt: QuantizedTensor, rows, mode, bias, activation, preferred_element_type, precision, implementation
) -> jax.Array:
    experts, k, n = qt.shape
    out_dtype = x.dtype
    if preferred_element_type is not None:
        out_dtype = check_float_dtype("preferred_element_type", preferred_element_type)
    if bias is not None:
        check_array("bias", bias, FLOATS)
        if tuple(bias.shape) not in ((n,), (experts, n)):
            raise ValueError(f"jax_wonly: bias has shape {tuple(bias.shape)}; accepted: [{n}] or [{experts}, {n}].")
        check_finite("bias", bias)
        bias = jnp.reshape(bias, (-1, n))
    params = Params(
        bits=qt.bits,
        shift_mode=shift_mode_of(qt.zeros, qt.offsets),
        has_bias=bias is not None,
        activation=resolve_activation(activation),
        transpose=False,
        k=k,
        out_dtype=jnp.dtype(out_dtype),
        precision=resolve_precision(precision),
        implementation=_ffi.resolve_implementation(implementation),
        row_mode=mode,
        repeat=1,
        table=check_table(qt.table, qt.bits, qt.zeros, qt.offsets),
    )
    operands = [x, qt.qvalue, qt.scales, rows, qt.zeros, qt.offsets, bias]
    return _product(*(a for a in operands if a is not None), params=params)


@partial(jax.jit, static_argnames="params", inline=True)
def _product(*operands, params: Params):
    mesh = explicit_mesh(operands)
    if mesh is not None:
        return ragged_on_mesh(mesh, _flat, operands, params)
    return _flat(*operands, params=params)


def _flat(x, qw, scales, rows, *rest, params: Params):
    """The product of x ``[..., K]`` with ids of a shape that broadcasts with its leading axes."""
    if params.row_mode == RowMode.SIZES:
        return _bind(x, qw, scales, rows, *rest, params=params)
    shape = jnp.broadcast_shapes(x.shape[:-1], rows.shape)
    x = x.reshape((1,) * (len(shape) + 1 - x.ndim) + x.shape)
    ids = jnp.broadcast_to(rows, shape).reshape(-1)
    shared = len(shape)  # one row of x serves all ids of the axes from here on
    while shared and x.shape[shared - 1] == 1 and isinstance(shape[shared - 1], int):
        shared -= 1
    repeat = max(math.prod(shape[shared:]), 1)
    x = jnp.broadcast_to(x, (*shape[:shared], *x.shape[shared:]))
    y = _bind(x.reshape(-1, x.shape[-1]), qw, scales, ids, *rest, params=params._replace(repeat=repeat))
    return y.reshape(*shape, y.shape[-1])
