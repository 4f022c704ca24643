"""The product on a mesh with explicit axes, where shardings are part of types: one shard_map, split as the weights are.

Outputs and inputs stay split as the packed array is (row parallel sums over the devices), rows and leading axes as x
is; what the shapes do not divide is gathered first.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_wonly._abi import Activation
from jax_wonly.primitives.matmul import Params, epilogue
from jax_wonly.primitives.matmul_sharding import splits

Axes = tuple[str, ...]


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
    return [() if s is None else (s,) if isinstance(s, str) else tuple(s) for s in spec]


def matmul_on_mesh(mesh, product: Callable, operands: Sequence[jax.Array], ranks: Sequence[int], params: Params):
    """``product(operands, params)``, each device with its shards.

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
    taken: set[str] = set()

    def take(axes: Axes, parts: int) -> Axes:
        """``axes``, unless they do not divide the dimension or have been given to another."""
        size = math.prod(mesh.shape[a] for a in axes)
        if size == 1 or parts % size or taken & set(axes):
            return ()
        taken.update(axes)
        return axes

    leads = [a.shape[: a.ndim - r] for a, r in zip(operands, ranks, strict=True)]
    rank = max(map(len, leads))
    batch = []
    for i in range(-rank, 0):
        of_axis = [
            (lead[i], _axes(a)[len(lead) + i]) for a, lead in zip(operands, leads, strict=True) if len(lead) >= -i
        ]
        size, axes = max(of_axis, key=lambda of: (of[0] != 1, len(of[1])))
        batch.append(take(axes, size))
    n_axes = take(_axes(qw)[-3], n_parts)
    k_axes = take(_axes(qw)[-2], k_parts) or take(_axes(x)[-1], k_parts)
    rows = take(_axes(x)[-2], x.shape[-2])

    per_group = k_axes if groups > 1 else ()
    of_rank = {3: (n_axes, k_axes, ()), 2: (per_group, n_axes), 1: (n_axes,)}
    specs = []
    for i, (a, lead, r) in enumerate(zip(operands, leads, ranks, strict=True)):
        dims = [axes if a.shape[j] != 1 else () for j, axes in enumerate(batch[rank - len(lead) :])]
        dims += (rows, k_axes) if i == 0 else of_rank[r]
        specs.append(PartitionSpec(*(d or None for d in dims)))
    operands = [jax.reshard(a, NamedSharding(mesh, spec)) for a, spec in zip(operands, specs, strict=True)]
    local = p._replace(k=p.k // math.prod(mesh.shape[a] for a in k_axes))

    def compute(*operands):
        if not k_axes:
            return product(operands, local)
        part = local._replace(has_bias=False, activation=Activation.NONE, out_dtype=jnp.dtype(jnp.float32))
        operands, bias = (operands[:-1], operands[-1:]) if p.has_bias else (operands, ())
        return epilogue(jax.lax.psum(product(operands, part), k_axes), bias, p)

    out = PartitionSpec(*(axes or None for axes in (*batch, rows, n_axes)))
    names = {a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    return jax.shard_map(compute, mesh=mesh, in_specs=tuple(specs), out_specs=out, axis_names=names)(*operands)
