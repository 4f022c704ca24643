"""What the rules of several operations share."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

from jax_wonly._abi import ShiftMode

NATIVE_PLATFORMS = ("cpu", "cuda")


def make_primitive(name: str, *, multiple_results: bool = False) -> Primitive:
    """A primitive whose eager evaluation compiles it."""
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_impl(partial(xla.apply_primitive, primitive))
    return primitive


def register_lowerings(primitive: Primitive, evaluate: Callable) -> None:
    """Lowers to what ``evaluate(*operands, platform=..., **params)`` traces to, on every platform."""
    multiple = primitive.multiple_results
    for platform in NATIVE_PLATFORMS:
        rule = mlir.lower_fun(partial(evaluate, platform=platform), multiple_results=multiple)
        mlir.register_lowering(primitive, rule, platform=platform)
    mlir.register_lowering(primitive, mlir.lower_fun(partial(evaluate, platform="other"), multiple_results=multiple))


def merge_batch(operands: Sequence[jax.Array], axes: Sequence[int | None]) -> tuple[list[jax.Array], int, int]:
    """Merges the mapped axis into each operand's leading axis, which is 1 or the batch size before and after.

    An operand is copied only where it spans a part of the merged batch, never where it has one entry for all.

    Returns:
      The operands, and the sizes of the mapped axis and of the leading axis before.
    """
    moved = [a[None] if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(operands, axes, strict=True)]
    size = next(a.shape[0] for a, d in zip(moved, axes, strict=True) if d is not None)
    lead = next((a.shape[1] for a in moved if a.shape[1] != 1), 1)
    out = []
    for a in moved:
        outer, inner, *rest = a.shape
        if (outer, inner) != (1, 1) and (outer, inner) != (size, lead):
            a = jnp.broadcast_to(a, (size, lead, *rest))
        out.append(a.reshape(a.shape[0] * a.shape[1], *rest))
    return out, size, lead


def is_zero(size) -> bool:
    """Whether a size is known to be zero; a symbolic one is at least 1."""
    return isinstance(size, int) and size == 0


def align_varying(*operands: jax.Array) -> list[jax.Array]:
    """Inside ``shard_map``, lets every operand vary over the mesh axes that any of them varies over."""

    def varying(a):
        kind = getattr(jax.typeof(a), "manual_axis_type", None)
        return kind.varying if kind is not None else getattr(jax.typeof(a), "vma", frozenset())

    every = frozenset().union(*map(varying, operands))
    return [
        jax.lax.pcast(a, tuple(sorted(every - varying(a))), to="varying") if every - varying(a) else a for a in operands
    ]


def parameters_alike(scales: jax.Array, rest: Sequence[jax.Array], shift_mode: ShiftMode) -> tuple[jax.Array, ...]:
    """Scales and what follows them, for a CUDA kernel of products: float zeros or offsets of the scales' type."""
    if shift_mode == ShiftMode.NONE:
        return scales, *rest
    from jax_wonly import _cuda_dispatch

    return with_types(scales, rest, _cuda_dispatch.parameter_types(scales.dtype, rest[0].dtype))


def with_types(scales: jax.Array, rest: Sequence[jax.Array], types: Sequence) -> tuple[jax.Array, ...]:
    """Scales and what follows them, as many as there are types with those."""
    parameters = (scales, *rest)
    return *(a.astype(dtype) for a, dtype in zip(parameters, types, strict=False)), *parameters[len(types) :]


def may_round(dtype, precision: jax.lax.Precision | None) -> bool:
    """Whether so little precision is asked for that float32 numbers may become bfloat16 ones on a GPU."""
    return dtype == jnp.float32 and precision == jax.lax.Precision.DEFAULT


def pad_last(a: jax.Array, size: int) -> jax.Array:
    """With zeros after its last axis' numbers, so that it has ``size``."""
    if a.shape[-1] == size:
        return a
    return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, size - a.shape[-1])])


def group_sums(x, groups: int):
    """``[..., K] -> [..., G]``: float32 sums of the inputs of each group."""
    return x.astype(jnp.float32).reshape(*x.shape[:-1], groups, -1).sum(-1)


def divide(a, b, dtype=jnp.float32):
    """float32 ``a / b``, rounded to the nearest on every platform where it is a normal number; then to ``dtype``."""
    # XLA's quotients of float32 are not: it multiplies by the reciprocal of a broadcast divisor, and on GPUs takes an
    # approximation, to which LLVM turns rounded quotients of float64 back. A product with a float64 reciprocal is left
    # alone. It is within 2**-51 of the quotient, and no quotient of two float32 numbers is within 2**-49 of halfway
    # between two others.
    with jax.enable_x64(True):
        quotient = (a.astype(jnp.float64) * (1 / b.astype(jnp.float64))).astype(jnp.float32)
    # The barrier keeps XLA on GPUs from making one rounding of both.
    return quotient if dtype == jnp.float32 else jax.lax.optimization_barrier(quotient).astype(dtype)
