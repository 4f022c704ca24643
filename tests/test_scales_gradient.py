"""The gradient of scales: what it is, how it is derived, batched and split, and which program computes it on a GPU."""

import dataclasses

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from reference import MODES, Weight, assert_scales_gradient, random_weight, random_x

import jax_wonly as jw
from jax_wonly import _abi, _ffi
from jax_wonly.primitives import scales_gradient as primitive


def gradient(product, x, qt, dy, *rest):
    return jax.vjp(lambda s: product(x, dataclasses.replace(qt, scales=s), *rest), qt.scales)[1](dy)[0]


@pytest.mark.parametrize("tiles", [None, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", [*MODES, "table"])
def test_product(rng, monkeypatch, mode, dtype, tiles):
    """Of all outputs together, and of 64 or 128 at a time."""
    if tiles:
        monkeypatch.setattr(primitive, "_DENSE_BYTES", 4 * 128 * 64 * tiles)
    for group_size, m, k, n in [(32, 5, 128, 200), (None, 1, 96, 77), (128, 40, 256, 320)]:
        weight = random_weight(rng, k, n, group_size=group_size, mode=mode)
        x, dy = random_x(rng, (m, k), dtype), random_x(rng, (m, n), dtype)
        assert_scales_gradient(jax.jit(gradient, static_argnums=0)(jw.matmul, x, weight.qt, dy), x, dy, weight)
        # The scales of the gradient's own product.
        assert_scales_gradient(gradient(_transposed, dy, weight.qt, x), x, dy, weight)


def _transposed(dy, qt):
    x = jax.ShapeDtypeStruct((*dy.shape[:-1], qt.k), dy.dtype)
    return jax.linear_transpose(lambda x: jw.matmul(x, qt), x)(dy)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["symmetric", "integer_zeros", "offsets"])
def test_experts(rng, mode, dtype):
    """Experts with no rows, fewer rows than are taken at a time and more, and rows without an expert."""
    sizes = np.array([0, 3, 70, 0, 1, 33, 0])
    experts, m = len(sizes), int(sizes.sum()) + 4
    weight = random_weight(rng, 64, 24, group_size=32, mode=mode, lead=(experts,))
    x, dy = random_x(rng, (m, 64), dtype), random_x(rng, (m, 24), dtype)
    by_sizes = gradient(jw.ragged_dot, x, weight.qt, dy, jnp.asarray(sizes, jnp.int32))
    ids = np.concatenate([np.repeat(np.arange(experts), sizes), [-1, experts, 99, -5]])
    order = rng.permutation(m)
    by_ids = gradient(jw.gather_matmul, x[order], weight.qt, dy[order], jnp.asarray(ids[order], jnp.int32))
    for e, end in enumerate(np.cumsum(sizes)):
        for ds in (by_sizes, by_ids):
            if sizes[e] == 0:
                assert not np.asarray(ds[e]).any()
                continue
            rows = slice(end - sizes[e], end)
            one = Weight(weight.qt[e], weight.dense[e], weight.magnitude[e])
            assert_scales_gradient(ds[e], x[rows], dy[rows], one)


@pytest.mark.parametrize("mode", ["float_zeros", "offsets"])
@pytest.mark.parametrize("product", [jw.ragged_dot, jw.gather_matmul])
def test_shifts_of_experts(rng, product, mode):
    """Of float zeros and offsets, beside derivatives of a product with dense weights."""
    weight = random_weight(rng, 64, 24, group_size=32, mode=mode, lead=(4,))
    field = "zeros" if mode == "float_zeros" else "offsets"
    sizes = jnp.asarray([3, 0, 40, 2], jnp.int32)
    ids = jnp.repeat(jnp.arange(4), sizes, total_repeat_length=45)
    rows = sizes if product is jw.ragged_dot else ids
    x, dy = random_x(rng, (45, 64)), random_x(rng, (45, 24))

    def of_shift(x, shift):
        return product(x, dataclasses.replace(weight.qt, **{field: shift}), rows)

    def plain(x, shift):
        codes = jw.unpack(weight.qt.qvalue, 4, 64, 24).astype(jnp.float32)
        scales, shift = (jnp.repeat(a, 32, axis=1) for a in (weight.qt.scales, shift))
        dense = codes * scales + shift if mode == "offsets" else (codes - shift) * scales
        return jnp.einsum("mk,mkn->mn", x, dense[ids], precision="highest")

    shift = getattr(weight.qt, field)
    tangents = random_x(rng, x.shape), random_x(rng, shift.shape)
    for derivative in (
        lambda f: jax.jvp(f, (x, shift), tangents),
        lambda f: jax.vjp(f, x, shift)[1](dy),
        lambda f: jax.jvp(lambda x, s: jax.vjp(f, x, s)[1](dy), (x, shift), tangents),
        lambda f: jax.vmap(lambda dy: jax.vjp(f, x, shift)[1](dy))(jnp.stack([dy, 2 * dy])),
    ):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-3), derivative(of_shift), derivative(plain)
        )


@pytest.mark.parametrize("experts", [False, True])
def test_derivatives(rng, experts):
    """It is linear in x and in the cotangent, and its derivatives are products with the packed weights."""
    weight = random_weight(rng, 64, 9, group_size=32, lead=(3,) if experts else ())
    of_scale = jnp.asarray(weight.dense / np.repeat(np.asarray(weight.qt.scales), 32, axis=-2), jnp.float32)
    sizes = jnp.asarray([2, 0, 3], jnp.int32)

    def ours(x, dy):
        return gradient(jw.ragged_dot, x, weight.qt, dy, sizes) if experts else gradient(jw.matmul, x, weight.qt, dy)

    def plain(x, dy):
        if experts:
            of_expert = jnp.repeat(jnp.arange(3), sizes, total_repeat_length=5) == jnp.arange(3)[:, None]
            x = jnp.where(of_expert[:, :, None], x, 0)
        dense = jnp.matmul(jnp.swapaxes(x, -1, -2), dy, precision="highest")
        return (of_scale * dense).reshape(*dense.shape[:-2], 2, 32, 9).sum(-2)

    def pullback(f):
        return lambda x, dy, ct: jax.vjp(f, x, dy)[1](ct)

    def drawn():
        return random_x(rng, (5, 64)), random_x(rng, (5, 9))

    x_dy, tangents, ct, ct_dot = (
        drawn(),
        drawn(),
        random_x(rng, weight.qt.scales.shape),
        random_x(rng, weight.qt.scales.shape),
    )
    for derivative in (
        lambda f: jax.jvp(f, x_dy, tangents),
        lambda f: pullback(f)(*x_dy, ct),
        lambda f: jax.jvp(pullback(f), (*x_dy, ct), (*tangents, ct_dot)),
        lambda f: jax.vjp(pullback(f), *x_dy, ct)[1](tangents),
    ):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), derivative(ours), derivative(plain)
        )


def test_batches(rng):
    stack = random_weight(rng, 64, 24, group_size=32, lead=(3,))
    x, dy = random_x(rng, (3, 5, 64)), random_x(rng, (3, 5, 24))
    close = {"rtol": 1e-5, "atol": 1e-4}

    def of_product(x, qt, dy):
        return gradient(jw.matmul, x, qt, dy)

    for axes in [(0, 0, 0), (None, 0, 0), (0, None, 0), (0, 0, None), (0, None, None)]:
        operands = [a if d == 0 else a[1] for a, d in zip((x, stack.qt, dy), axes, strict=True)]
        got = jax.vmap(of_product, axes)(*operands)
        for e in range(3):
            one = [a[e] if d == 0 else a for a, d in zip(operands, axes, strict=True)]
            np.testing.assert_allclose(got[e], of_product(*one), **close)

    sizes = jnp.asarray([[2, 0, 3], [1, 1, 1], [0, 5, 0]], jnp.int32)

    def of_experts(x, dy, sizes):
        return gradient(jw.ragged_dot, x, stack.qt, dy, sizes)

    for axes in [(0, 0, 0), (None, 0, 0), (0, 0, None)]:
        operands = [a if d == 0 else a[0] for a, d in zip((x, dy, sizes), axes, strict=True)]
        got = jax.vmap(of_experts, axes)(*operands)
        for e in range(3):
            one = [a[e] if d == 0 else a for a, d in zip(operands, axes, strict=True)]
            np.testing.assert_allclose(got[e], of_experts(*one), **close)


def test_program_on_a_gpu(rng, monkeypatch):
    """One custom call, and no gradient of a dense weight, of any number of inputs and outputs."""
    monkeypatch.setattr(_ffi, "ensure_registered", lambda: {"cpu": None, "cuda": None})

    def text(x, qt, dy, *rest):
        product = jw.ragged_dot if rest else jw.matmul
        traced = jax.jit(lambda x, qt, dy, *rest: gradient(product, x, qt, dy, *rest)).trace(x, qt, dy, *rest)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    def operands(dtype, mode="symmetric", k=256, n=320, lead=()):
        weight = random_weight(rng, k, n, group_size=64 if k % 64 == 0 else None, mode=mode, lead=lead)
        return random_x(rng, (33, k), dtype), weight.qt, random_x(rng, (33, n), dtype)

    for dtype, mode in [("bfloat16", "symmetric"), ("float16", "integer_zeros"), ("bfloat16", "offsets")]:
        program = text(*operands(dtype, mode))
        assert program.count(_abi.SCALES_GRADIENT) == 1 and "256x320xf32" not in program
    program = text(*operands("bfloat16", lead=(4,)), jnp.full(4, 8, jnp.int32))
    assert program.count(_abi.SCALES_GRADIENT) == 1 and "256x320xf32" not in program
    x, qt, dy = operands("bfloat16", "offsets", lead=(4,))
    sizes = jnp.full(4, 8, jnp.int32)
    of_offsets = jax.jit(
        lambda o: jax.vjp(lambda o: jw.ragged_dot(x, dataclasses.replace(qt, offsets=o), sizes), o)[1](dy)
    )
    program = of_offsets.trace(qt.offsets).lower(lowering_platforms=("cuda",)).as_text()
    assert program.count(_abi.SCALES_GRADIENT) == 1 and "ragged_dot" not in program
    for others in [operands("float32"), operands("bfloat16", "table"), operands("float32", "table")]:
        program = text(*others)
        assert program.count(_abi.SCALES_GRADIENT) == 1 and "256x320xf32" not in program
    program = text(*operands("bfloat16", k=36, n=77))
    assert program.count(_abi.SCALES_GRADIENT) == 1 and "40x80xf32" not in program


@pytest.mark.parametrize("experts", [False, True])
def test_export(rng, monkeypatch, experts):
    """For a CPU and a GPU, of any number of rows."""
    monkeypatch.setattr(_ffi, "ensure_registered", lambda: {"cpu": None, "cuda": None})
    weight = random_weight(rng, 256, 128, group_size=64, mode="integer_zeros", lead=(3,) if experts else ())
    rest = (jnp.asarray([2, 1, 2], jnp.int32),) if experts else ()

    def ds(x, dy):
        return gradient(jw.ragged_dot if experts else jw.matmul, x, weight.qt, dy, *rest)

    (m,) = jax.export.symbolic_shape("m")
    shapes = (jax.ShapeDtypeStruct((m, columns), jnp.bfloat16) for columns in (256, 128))
    options = {"platforms": ("cpu", "cuda"), "disabled_checks": jw.export_disabled_checks()}
    exported = jax.export.deserialize(jax.export.export(jax.jit(ds), **options)(*shapes).serialize())
    assert _abi.SCALES_GRADIENT in exported.mlir_module()
    x, dy = random_x(rng, (5, 256), "bfloat16"), random_x(rng, (5, 128), "bfloat16")
    np.testing.assert_allclose(exported.call(x, dy), ds(x, dy), rtol=1e-5, atol=1e-4)
