"""The product on a mesh with explicit axes, where shardings are part of types: one shard_map, split as the weights are.

Outputs and inputs stay split as the packed array is (row parallel sums over the devices), rows and leading axes as x
is; what the shapes do not divide is gathered first.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_wonly._abi import RowMode
from jax_wonly.primitives import conv, experts, experts_sharding
from jax_wonly.primitives.matmul import Params, epilogue
from jax_wonly.primitives.matmul_sharding import Axes, add_parts, axis_names, splits, usable


def explicit_mesh(operands: Sequence[jax.Array]):
    """The mesh of the operands if it has explicit axes, else None."""
    for a in operands:
        mesh = jax.typeof(a).sharding.mesh
        if any(kind == AxisType.Explicit for kind in mesh.axis_types):
            return mesh
    return None


def _axes(a: jax.Array) -> list[Axes]:
    """The mesh axes of every dimension."""
    spec = tuple(jax.typeof(a).sharding.spec)
    spec += (None,) * (a.ndim - len(spec))
    return [axis_names(s) for s in spec]


class _Taken:
    """Hands every mesh axis to one dimension."""

    def __init__(self, mesh):
        self.mesh = mesh
        self.axes: set[str] = set()

    def take(self, axes: Axes, parts: int) -> Axes:
        """``axes``, unless they do not divide the dimension or have been given to another."""
        axes = usable(self.mesh, axes, parts, self.axes)
        self.axes.update(axes)
        return axes

    def take_leads(self, arrays: Sequence[jax.Array], leads: Sequence[tuple[int, ...]]) -> list[Axes]:
        """The axes of the dimensions that the ``leads``, leading dimensions of the arrays, broadcast to."""
        batch = []
        for i in range(-max(map(len, leads)), 0):
            of_axis = [
                (lead[i], _axes(a)[len(lead) + i]) for a, lead in zip(arrays, leads, strict=True) if len(lead) >= -i
            ]
            size, axes = max(of_axis, key=lambda of: (of[0] != 1, len(of[1])))
            batch.append(self.take(axes, size))
        return batch


def _lead_spec(a: jax.Array, lead: tuple[int, ...], batch: Sequence[Axes]) -> list[Axes]:
    return [axes if a.shape[j] != 1 else () for j, axes in enumerate(batch[len(batch) - len(lead) :])]


def _on_mesh(mesh, compute: Callable, operands: Sequence[jax.Array], specs, out):
    """``compute`` of every device's shards; ``specs`` and ``out`` give the axes of each dimension."""
    of = [PartitionSpec(*(axes or None for axes in spec)) for spec in specs]
    operands = [jax.reshard(a, NamedSharding(mesh, spec)) for a, spec in zip(operands, of, strict=True)]
    names = {a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    out = PartitionSpec(*(axes or None for axes in out))
    return jax.shard_map(compute, mesh=mesh, in_specs=tuple(of), out_specs=out, axis_names=names)(*operands)


def matmul_on_mesh(mesh, product: Callable, operands: Sequence[jax.Array], ranks: Sequence[int], params: Params):
    """``product(*operands, params=params)``, each device with its shards.

    Args:
      mesh: the mesh of the operands.
      product: the product on one device.
      operands: x ``[..., M, K]``, qw, scales, then shift and bias if there are any; leading axes broadcast.
      ranks: the dimensions of each operand that are not leading axes.
      params: of the whole product.
    """
    p = params
    x, qw, scales, *_ = operands
    groups, n = scales.shape[-2:]
    k_parts, n_parts = splits(p.k, n, groups, p.bits)
    taken = _Taken(mesh)
    leads = [a.shape[: a.ndim - r] for a, r in zip(operands, ranks, strict=True)]
    batch = taken.take_leads(operands, leads)
    n_axes = taken.take(_axes(qw)[-3], n_parts)
    k_axes = taken.take(_axes(qw)[-2], k_parts) or taken.take(_axes(x)[-1], k_parts)
    rows = taken.take(_axes(x)[-2], x.shape[-2])

    per_group = k_axes if groups > 1 else ()
    of_rank = {3: (n_axes, k_axes, ()), 2: (per_group, n_axes), 1: (n_axes,)}
    specs = []
    for i, (a, lead, r) in enumerate(zip(operands, leads, ranks, strict=True)):
        specs.append([*_lead_spec(a, lead, batch), *((rows, k_axes) if i == 0 else of_rank[r])])
    local = p._replace(k=p.k // math.prod(mesh.shape[a] for a in k_axes))

    def compute(*operands):
        return add_parts(k_axes, product, epilogue, operands, local)

    return _on_mesh(mesh, compute, operands, specs, (*batch, rows, n_axes))


def ragged_on_mesh(mesh, product: Callable, operands: Sequence[jax.Array], params: experts.Params):
    """``product(*operands, params=params)``, each device with its shards.

    Args:
      mesh: the mesh of the operands.
      product: the product on one device.
      operands: x ``[..., K]``, qw, scales, the sizes ``[E]`` or the ids ``[...]`` that broadcast with the leading axes
        of x, then shift and bias if there are any.
      params: of the whole product.
    """
    p = params
    x, qw, scales, rows, *_ = operands
    groups, n = scales.shape[-2:]
    by_sizes = p.row_mode == RowMode.SIZES
    k_parts, n_parts = splits(p.k, n, groups, p.bits)
    taken = _Taken(mesh)
    expert_axes = taken.take(_axes(qw)[0], qw.shape[0])
    rows_lead = () if by_sizes else rows.shape
    batch = taken.take_leads((x, rows), (x.shape[:-1], rows_lead))
    n_axes = taken.take(_axes(qw)[1], n_parts)
    k_axes = taken.take(_axes(qw)[2], k_parts) or taken.take(_axes(x)[-1], k_parts)
    split = experts_sharding.Split(tuple(a for axes in batch for a in axes), expert_axes, k_axes, n_axes)

    specs, _ = split.specs([a.ndim for a in operands], groups, by_sizes, False)
    specs[0] = (*_lead_spec(x, x.shape[:-1], batch), k_axes)
    specs[3] = ((),) if by_sizes else _lead_spec(rows, rows_lead, batch)

    def finish(y, bias, rows, params):
        if params.row_mode == RowMode.IDS:
            rows = jnp.broadcast_to(rows, y.shape[:-1]).reshape(-1)
        return experts.finish(y.reshape(-1, y.shape[-1]), bias, rows, params, qw.shape[0]).reshape(y.shape)

    compute = partial(experts_sharding.compute, product, finish, mesh, split, p)
    return _on_mesh(mesh, compute, operands, specs, (*batch, n_axes))


def conv_on_mesh(mesh, convolve: Callable, operands: Sequence[jax.Array], params: conv.Params):
    """``convolve(*operands)``, each device with its images and its outputs.

    Args:
      mesh: the mesh of the operands.
      convolve: the convolution on one device.
      operands: those of the primitive.
      params: its parameters.
    """
    x, qw, scales, *rest = operands
    taken = _Taken(mesh)
    images = taken.take(_axes(x)[0], x.shape[0])
    n_axes = taken.take(_axes(qw)[1], conv.output_parts(scales.shape, params))
    spatial = ((),) * (x.ndim - 2)
    specs = [(images, *spatial, ()), ((), n_axes, (), ())]
    specs += [(*((),) * (a.ndim - 1), n_axes) for a in (scales, *rest)]
    return _on_mesh(mesh, convolve, operands, specs, (images, *spatial, n_axes))
