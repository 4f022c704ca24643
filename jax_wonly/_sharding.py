"""Placing a quantized weight over devices like the dense kernel that it stands for."""

import math
from dataclasses import replace

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_wonly._format import TILE_N, tile_k
from jax_wonly._tensor import QuantizedTensor
from jax_wonly.primitives.matmul_sharding import axis_names


def shardings(qt: QuantizedTensor, sharding: NamedSharding) -> QuantizedTensor:
    """The shardings of a quantized weight's arrays that go with one of its dense kernel.

    Args:
      qt: a :class:`QuantizedTensor` ``[..., K, N]``, of arrays or of ``jax.ShapeDtypeStruct``.
      sharding: of the dense kernel, its spec ``PartitionSpec(..., K, N)``. K splits by whole tiles (64 inputs for
        int4, 32 for int8) and whole groups, N by whole tiles (64 outputs), leading axes freely.

    Returns:
      A :class:`QuantizedTensor` of :class:`jax.sharding.NamedSharding`: for ``jax.device_put``, ``in_shardings``,
      ``out_shardings`` or a checkpoint.

    Raises:
      TypeError: an argument has a wrong type.
      ValueError: the spec has more axes than the kernel, or a shard would split a tile or a group.

    Example:
      >>> mesh = jax.make_mesh((1,), ("model",))
      >>> where = jax.sharding.NamedSharding(mesh, jax.P(None, "model"))
      >>> qt = jw.quantize(jnp.ones((128, 64)))
      >>> jw.shardings(qt, where).scales.spec
      P(None, 'model')
    """
    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"jax_wonly: sharding is a {type(sharding).__name__}; accepted: jax.sharding.NamedSharding.")
    specs = partition_specs(qt, sharding.spec, sharding.mesh)

    def of(spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)

    return jax.tree.map(of, specs, is_leaf=lambda a: isinstance(a, PartitionSpec))


def device_put(qt: QuantizedTensor, sharding: NamedSharding) -> QuantizedTensor:
    """``jax.device_put`` of a quantized weight with the sharding of its dense kernel.

    Args:
      qt: a :class:`QuantizedTensor` ``[..., K, N]`` of arrays.
      sharding: of the dense kernel, as in :func:`shardings`.

    Returns:
      The weight, its arrays placed.

    Raises:
      TypeError, ValueError: as :func:`shardings`.

    Example:
      >>> mesh = jax.make_mesh((1,), ("model",))
      >>> qt = jw.quantize(jnp.ones((128, 64)))
      >>> placed = jw.device_put(qt, jax.sharding.NamedSharding(mesh, jax.P(None, "model")))
      >>> placed.qvalue.sharding.spec
      P('model', None, None)
    """
    return jax.device_put(qt, shardings(qt, sharding))


def partition_specs(qt: QuantizedTensor, spec: PartitionSpec, mesh) -> QuantizedTensor:
    """The specs of a quantized weight's arrays, for ``jax.shard_map``; inside, :func:`local_shard` gives the weight.

    Args:
      qt: a :class:`QuantizedTensor` ``[..., K, N]``, of arrays or of ``jax.ShapeDtypeStruct``.
      spec: ``PartitionSpec(..., K, N)`` of the dense kernel.
      mesh: a ``Mesh`` or ``AbstractMesh`` with the axes that ``spec`` names.

    Returns:
      A :class:`QuantizedTensor` of ``PartitionSpec``.

    Raises:
      TypeError, ValueError: as :func:`shardings`.

    Example:
      >>> mesh = jax.make_mesh((1,), ("model",))
      >>> specs = jw.partition_specs(jw.quantize(jnp.ones((128, 64))), jax.P("model"), mesh)
      >>> specs.qvalue, specs.scales
      (P(None, 'model', None), P(None, None))
    """
    if not isinstance(qt, QuantizedTensor):
        raise TypeError(f"jax_wonly: qt is a {type(qt).__name__}; accepted: a QuantizedTensor.")
    if not all(hasattr(part, "shape") for part in (qt.qvalue, qt.scales)):
        raise TypeError("jax_wonly: qt has no arrays; accepted: a QuantizedTensor of arrays or jax.ShapeDtypeStruct.")
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"jax_wonly: mesh is a {type(mesh).__name__}; accepted: jax.sharding.Mesh, AbstractMesh.")
    if not isinstance(spec, PartitionSpec):
        raise TypeError(f"jax_wonly: spec is a {type(spec).__name__}; accepted: jax.sharding.PartitionSpec.")
    if len(spec) > qt.ndim:
        raise ValueError(
            f"jax_wonly: spec={spec} has {len(spec)} axes; accepted: at most the {qt.ndim} of a weight of shape "
            f"{qt.shape}."
        )
    dims = (*spec, *(None,) * (qt.ndim - len(spec)))
    *lead, k_axes, n_axes = dims
    groups = qt.scales.shape[-2]
    for name, size, axes, units in [
        *((f"leading axis {i}", s, a, {"an entry": 1}) for i, (s, a) in enumerate(zip(qt.shape, lead, strict=False))),
        ("K", qt.k, k_axes, {"a tile": tile_k(qt.bits)} | ({"a group": qt.k // groups} if groups > 1 else {})),
        ("N", qt.n, n_axes, {"a tile": TILE_N}),
    ]:
        _check_split(qt, spec, name, size, math.prod(mesh.shape[a] for a in axis_names(axes)), units)
    per_group = k_axes if groups > 1 else None

    def parameter(a):
        return None if a is None else PartitionSpec(*lead, per_group, n_axes)

    return replace(
        qt,
        qvalue=PartitionSpec(*lead, n_axes, k_axes, None),
        scales=parameter(qt.scales),
        zeros=parameter(qt.zeros),
        offsets=parameter(qt.offsets),
    )


def local_shard(qt: QuantizedTensor, spec: PartitionSpec) -> QuantizedTensor:
    """Inside ``jax.shard_map``: the weight of this device, whose arrays are shards, with its own K and N.

    Args:
      qt: an argument that went in with ``partition_specs(qt, spec, mesh)``.
      spec: of the dense kernel, as there.

    Returns:
      A :class:`QuantizedTensor` of the device's arrays.

    Raises:
      NameError: outside of ``jax.shard_map``, where the axes of ``spec`` have no size.

    Example:
      >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> spec = jax.P("model")
      >>> qt = jw.quantize(jnp.ones((128, 64)))
      >>> def product(x, qt):
      ...     return jax.lax.psum(jw.matmul(x, jw.local_shard(qt, spec)), "model")
      >>> inputs = (jax.P(None, "model"), jw.partition_specs(qt, spec, mesh))
      >>> jax.shard_map(product, mesh=mesh, in_specs=inputs, out_specs=jax.P())(jnp.ones((4, 128)), qt).shape
      (4, 64)
    """
    k_axes, n_axes = (*spec, *(None,) * (qt.ndim - len(spec)))[-2:]
    k_parts, n_parts = (math.prod(jax.lax.axis_size(a) for a in axis_names(axes)) for axes in (k_axes, n_axes))
    return replace(qt, k=qt.k // k_parts, n=qt.n // n_parts)


def _check_split(qt: QuantizedTensor, spec, name: str, size: int, parts: int, units: dict[str, int]) -> None:
    if parts == 1 or all(size % (unit * parts) == 0 for unit in units.values()):
        return
    fitting = [p for p in range(1, size + 1) if all(size % (unit * p) == 0 for unit in units.values())]
    if size % parts:
        why = f"{parts} devices do not divide it"
    else:
        what, unit = next((w, u) for w, u in units.items() if size // parts % u)
        why = f"shards of {size // parts} would split {what} of {unit}"
    raise ValueError(
        f"jax_wonly: spec={spec} splits {name} = {size} of a weight of shape {qt.shape} (int{qt.bits}, groups of "
        f"{qt.group_size}) over {parts} devices: {why}; accepted: {', '.join(map(str, fitting or [1]))} devices."
    )
