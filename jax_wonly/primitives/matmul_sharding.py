"""How ``wonly_matmul`` is split over devices by automatic partitioning (``jit`` with sharded operands).

Outputs split by whole tiles (column parallel), inputs by whole tiles and whole groups (row parallel, with a sum over
the devices), rows and the leading axis freely. Where a mesh does not divide them, the axis is gathered: slower, and
right.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import dispatch
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import NamedSharding, PartitionSpec

from jax_wonly._abi import Activation
from jax_wonly._format import TILE_N, tile_k

Axes = tuple[str, ...]


def allow_partitioning(primitive) -> None:
    """Lets a primitive lower through custom_partitioning, which asks for the devices."""
    # JAX has no public name for this.
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def splits(k: int, n: int, groups: int, bits: int) -> tuple[int, int]:
    """Into how many equal parts of whole tiles and groups the inputs and the outputs split; 1 where they do not."""
    k_parts = 1 if k % tile_k(bits) else math.gcd(k // tile_k(bits), groups if groups > 1 else 0)
    n_parts = 1 if n % TILE_N else n // TILE_N
    return k_parts, n_parts


class RuleBuilder:
    """Collects the factors of a Shardy rule."""

    def __init__(self):
        self.sizes: dict[str, int] = {}

    def dim(self, size: int, factor: str, parts: int, split: bool):
        """A dimension as ``parts`` of something, or one that stays whole."""
        if not split:
            return f"{factor}_whole_{size}"
        if size == parts:
            return factor
        rest = f"{factor}_rest_{size}"
        self.sizes[rest] = size // parts
        self.sizes[factor] = parts
        return CompoundFactor(factor, rest)

    def build(self, operands: Sequence[ArrayMapping], result: ArrayMapping, split: set[str], reduced: set[str]):
        """The rule in which the factors ``split`` may be split, the ``reduced`` ones of them with a sum."""
        factors: list[str] = []  # in order of first appearance, as the verifier wants them
        whole: set[str] = set()
        for mapping in (*operands, result):
            for d in mapping:
                for factor in (d,) if isinstance(d, str) else d:
                    if factor not in factors:
                        factors.append(factor)
                    if isinstance(d, str):
                        whole.add(factor)
        return SdyShardingRule(
            tuple(operands),
            (result,),
            reduction_factors=tuple(f for f in factors if f in reduced & split),
            need_replication_factors=tuple(f for f in factors if f not in split),
            # What is a whole dimension somewhere has its size from there.
            **{f: size for f, size in self.sizes.items() if f not in whole},  # type: ignore[arg-type]
        )


def _rule(params, shapes, mesh, value_types, result_types) -> SdyShardingRule:
    """The Shardy rule of one product, whose operand shapes are ``shapes``."""
    del value_types, result_types
    p = params
    _, qw, scales, *_ = shapes
    groups, n = scales[1:]
    devices = math.prod(mesh.shape.values())
    k_parts, n_parts = splits(p.k, n, groups, p.bits)
    # Shardy would split a mesh axis that does not divide a factor, and custom_partitioning cannot follow.
    split_k, split_n = k_parts % devices == 0, n_parts % devices == 0
    rule = RuleBuilder()
    k_of = partial(rule.dim, factor="k", parts=k_parts, split=split_k)
    n_of = partial(rule.dim, factor="n", parts=n_parts, split=split_n)
    lead = next((s[0] for s in shapes if s[0] != 1), 1)

    def lead_of(index: int):
        return "b" if shapes[index][0] == lead else f"one_{index}"

    group_dim = k_of(groups) if groups > 1 else "group"
    inputs, outputs = (n_of(n), k_of(p.k)) if p.transpose else (k_of(p.k), n_of(n))
    operands = [
        ArrayMapping(lead_of(0), "m", inputs),
        ArrayMapping(lead_of(1), n_of(qw[1]), k_of(qw[2]), "words"),
    ]
    for i in range(2, len(shapes)):
        operands.append(
            ArrayMapping(lead_of(i), group_dim, n_of(n)) if len(shapes[i]) == 3 else ArrayMapping(lead_of(i), n_of(n))
        )
    split = {"b", "m"} | ({"k"} if split_k else set()) | ({"n"} if split_n else set())
    return rule.build(operands, ArrayMapping("b", "m", outputs), split, {"n"} if p.transpose else {"k"})


def axis_names(entry: Any) -> Axes:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def axes_of(shape, dim: int) -> Axes:
    """The mesh axes that a dimension is split over."""
    return axis_names((*shape.sharding.spec, *(None,) * len(shape.shape))[dim])


def usable(mesh, axes: Axes, parts: int, taken: Iterable[str]) -> Axes:
    """``axes``, unless they do not divide the dimension or have been given to another."""
    size = math.prod(mesh.shape[a] for a in axes)
    return axes if size > 1 and parts % size == 0 and not set(axes) & set(taken) else ()


def named(mesh, *dims: Axes) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in dims)))


def unnamed_partition(evaluate: Callable, mesh, arg_shapes, result_shape: Any):
    """Every device computes the whole where XLA names no axes, as inside a partly manual mesh; None where it does."""
    if all(isinstance(s.sharding, NamedSharding) for s in (*arg_shapes, result_shape)):
        return None
    # Only the private class of such a sharding can make a replicated one for the same devices.
    unnamed: Any = result_shape.sharding
    whole = type(unnamed).get_replicated(unnamed._device_assignment)
    return mesh, evaluate, whole, (whole,) * len(arg_shapes)


def _partition(evaluate: Callable, epilogue: Callable, params, mesh, arg_shapes, result_shape: Any):
    """Shardings of the operands, and what each device computes."""
    p = params
    x, qw, scales, *rest = arg_shapes
    if (whole := unnamed_partition(partial(evaluate, params=p), mesh, arg_shapes, result_shape)) is not None:
        return whole

    groups, n = scales.shape[1:]
    k_parts, n_parts = splits(p.k, n, groups, p.bits)
    lead = usable(mesh, axes_of(result_shape, 0), result_shape.shape[0], ())
    rows = usable(mesh, axes_of(result_shape, 1), result_shape.shape[1], lead)
    outer_parts, inner_parts = (k_parts, n_parts) if p.transpose else (n_parts, k_parts)
    outputs = usable(mesh, axes_of(result_shape, 2), outer_parts, lead + rows)
    taken = lead + rows + outputs
    summed = usable(mesh, axes_of(x, 2), inner_parts, taken)
    # A whole x is sliced for free; weights that are split along the sum would have to be gathered.
    summed = summed or usable(mesh, axes_of(qw, 1 if p.transpose else 2), inner_parts, taken)
    k_axes, n_axes = (outputs, summed) if p.transpose else (summed, outputs)

    def lead_of(shape):
        return lead if shape.shape[0] != 1 else ()

    per_group = k_axes if groups > 1 else ()
    shardings = [named(mesh, lead_of(x), rows, summed), named(mesh, lead_of(qw), n_axes, k_axes, ())]
    for a in (scales, *rest):
        dims = (per_group, n_axes) if len(a.shape) == 3 else (n_axes,)
        shardings.append(named(mesh, lead_of(a), *dims))
    local = p._replace(k=p.k // math.prod(mesh.shape[a] for a in k_axes))

    def compute(*operands):
        return add_parts(summed, evaluate, epilogue, operands, local)

    return mesh, compute, named(mesh, lead, rows, outputs), tuple(shardings)


def add_parts(axes: Axes, evaluate: Callable, epilogue: Callable, operands: Sequence[jax.Array], params) -> jax.Array:
    """``evaluate(*operands, params=params)`` where each device along the mesh axes has a part of every sum.

    The parts are float32 until all are added, and ``epilogue(y, bias, params)`` follows once.
    """
    if not axes:
        return evaluate(*operands, params=params)
    part = params._replace(has_bias=False, activation=Activation.NONE, out_dtype=jnp.dtype(jnp.float32))
    operands, bias = (operands[:-1], operands[-1:]) if params.has_bias else (operands, ())
    return epilogue(jax.lax.psum(evaluate(*operands, params=part), axes), bias, params)


def with_partitioning(function: Callable, partition: Callable, rule: Callable, *operands: jax.Array) -> jax.Array:
    """``function(*operands)``, split over the devices of a computation that has several."""
    split = custom_partitioning(lambda *operands: function(*operands))  # wants a function without keywords
    split.def_partition(partition=partition, sharding_rule=partial(rule, tuple(a.shape for a in operands)))
    return split(*operands)


def partitioned(evaluate: Callable, epilogue: Callable, *operands: jax.Array, params) -> jax.Array:
    """``evaluate(*operands, params=params)``, split over the devices of a computation that has several.

    ``epilogue(y, bias, params)`` is what follows a sum over devices.
    """
    partition = partial(_partition, evaluate, epilogue, params)
    return with_partitioning(partial(evaluate, params=params), partition, partial(_rule, params), *operands)
