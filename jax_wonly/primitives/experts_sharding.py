"""How ``wonly_ragged_matmul`` is split over devices: by rows (data parallel), experts, outputs and inputs.

A device that has some of the experts leaves the rows of the others zero, and a device that has some of the inputs a
part of every sum; both add up over the devices, in float32.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule

from jax_wonly._abi import RowMode
from jax_wonly.primitives.matmul_sharding import (
    Axes,
    RuleBuilder,
    add_parts,
    axes_of,
    named,
    splits,
    unnamed_partition,
    usable,
    with_partitioning,
)


def ids_of_sizes(sizes, m, start: Any = 0) -> jax.Array:
    """The expert of each of the ``m`` rows from row ``start`` on, s32 ``[m]``; their number beyond all groups."""
    largest = jnp.iinfo(jnp.int32).max // max(sizes.shape[0], 1)  # the sum of all fits
    ends = jnp.cumsum(jnp.clip(sizes, 0, largest))
    row = start + jnp.arange(m, dtype=jnp.int32)
    return (row[:, None] >= ends).sum(1, dtype=jnp.int32)


class Split(NamedTuple):
    """The mesh axes that each dimension of a product is split over."""

    rows: Axes = ()
    experts: Axes = ()
    k: Axes = ()
    n: Axes = ()

    def specs(self, ranks: list[int], groups: int, by_sizes: bool, transpose: bool) -> tuple[list, tuple]:
        """The axes of the dimensions of the operands, whose ranks are ``ranks``, and of the result."""
        inputs, outputs = (self.n, self.k) if transpose else (self.k, self.n)
        operands: list = [(self.rows, inputs), (self.experts, self.n, self.k, ())]
        per_group = self.k if groups > 1 else ()
        for rank in ranks[2:]:
            # Scales and shift; the rows' experts; a bias, which is added after the sum over the experts' devices.
            of_rank = {3: (self.experts, per_group, self.n), 1: ((),) if by_sizes else (self.rows,), 2: ((), self.n)}
            operands.append(of_rank[rank])
        return operands, (self.rows, outputs)


def compute(evaluate: Callable, epilogue: Callable, mesh, split: Split, params, *operands):
    """What one device computes of its shards.

    Args:
      evaluate: ``evaluate(*operands, params=)``, the product on one device.
      epilogue: ``epilogue(y, bias, rows, params)``, what follows a sum over devices; ``rows`` are ids.
      mesh: the mesh.
      split: how the product is split over it.
      params: of the whole product.
      operands: this device's.
    """
    p = params
    local = p._replace(k=p.k // math.prod(mesh.shape[a] for a in split.k))
    x, qw, scales, rows, *rest = operands
    summed = split.experts + (split.n if p.transpose else split.k)
    if p.row_mode == RowMode.SIZES and (split.rows or split.experts):
        # A device has a window of the rows, or of the experts.
        groups = rows.shape[0]
        start = lax.axis_index(split.rows) * x.shape[0] if split.rows else 0
        rows = ids_of_sizes(rows, x.shape[0], start)
        rows = jnp.where(rows < groups, rows, -1)
        local = local._replace(row_mode=RowMode.IDS)
    mine = rows - lax.axis_index(split.experts) * qw.shape[0] if split.experts else rows

    def finish(y, bias, params):
        return epilogue(y, bias, rows, params)

    return add_parts(summed, evaluate, finish, (x, qw, scales, mine, *rest), local)


def _rule(params, shapes, mesh, value_types, result_types) -> SdyShardingRule:
    """The Shardy rule of one product, whose operand shapes are ``shapes``."""
    del value_types, result_types
    p = params
    x, qw, scales, *_ = shapes
    groups, n = scales[1:]
    devices = math.prod(mesh.shape.values())
    k_parts, n_parts = splits(p.k, n, groups, p.bits)
    # Shardy would split a mesh axis that does not divide a factor, and custom_partitioning cannot follow.
    split_k, split_n, split_m = k_parts % devices == 0, n_parts % devices == 0, x[0] % devices == 0
    rule = RuleBuilder()
    k_of = partial(rule.dim, factor="k", parts=k_parts, split=split_k)
    n_of = partial(rule.dim, factor="n", parts=n_parts, split=split_n)
    result_rows: Any = rule.dim(x[0] * p.repeat, "m", x[0], split_m)
    inputs, outputs = (n_of(n), k_of(p.k)) if p.transpose else (k_of(p.k), n_of(n))
    rows = ArrayMapping(result_rows if p.row_mode == RowMode.IDS else "counts")
    operands = [
        ArrayMapping(rule.dim(x[0], "m", x[0], split_m), inputs),
        ArrayMapping("e", n_of(qw[1]), k_of(qw[2]), "words"),
        ArrayMapping("e", k_of(groups) if groups > 1 else "group", n_of(n)),
        rows,
    ]
    for i, shape in enumerate(shapes[4:]):
        operands.append(operands[2] if len(shape) == 3 else ArrayMapping(f"bias_{i}", n_of(n)))
    split = {f for f, s in (("m", split_m), ("e", True), ("k", split_k), ("n", split_n)) if s}
    reduced = {"e", "n" if p.transpose else "k"}
    return rule.build(operands, ArrayMapping(result_rows, outputs), split, reduced)


def _partition(evaluate: Callable, epilogue: Callable, params, mesh, arg_shapes, result_shape: Any):
    """Shardings of the operands, and what each device computes."""
    p = params
    x, qw, scales, *_ = arg_shapes
    if (whole := unnamed_partition(partial(evaluate, params=p), mesh, arg_shapes, result_shape)) is not None:
        return whole
    groups, n = scales.shape[1:]
    k_parts, n_parts = splits(p.k, n, groups, p.bits)
    # Experts first: weights are what is expensive to gather.
    experts = usable(mesh, axes_of(qw, 0), qw.shape[0], ())
    outer_parts, inner_parts = (k_parts, n_parts) if p.transpose else (n_parts, k_parts)
    rows = usable(mesh, axes_of(result_shape, 0), x.shape[0], experts)
    outputs = usable(mesh, axes_of(result_shape, 1), outer_parts, experts + rows)
    taken = experts + rows + outputs
    summed = usable(mesh, axes_of(x, 1), inner_parts, taken)
    # As for a single weight: a whole x is sliced for free.
    summed = summed or usable(mesh, axes_of(qw, 1 if p.transpose else 2), inner_parts, taken)
    k_axes, n_axes = (outputs, summed) if p.transpose else (summed, outputs)
    split = Split(rows, experts, k_axes, n_axes)
    ranks = [len(a.shape) for a in arg_shapes]
    operands, result = split.specs(ranks, groups, p.row_mode == RowMode.SIZES, p.transpose)
    local = partial(compute, evaluate, epilogue, mesh, split, p)
    return mesh, local, named(mesh, *result), tuple(named(mesh, *dims) for dims in operands)


def partitioned(evaluate: Callable, epilogue: Callable, *operands: jax.Array, params) -> jax.Array:
    """``evaluate(*operands, params=params)``, split over the devices of a computation that has several."""
    partition = partial(_partition, evaluate, epilogue, params)
    return with_partitioning(partial(evaluate, params=params), partition, partial(_rule, params), *operands)
