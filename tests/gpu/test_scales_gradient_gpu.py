"""The gradient of scales on a GPU, by the kernel that keeps no gradient of a dense weight."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import Weight, assert_scales_gradient, random_weight, random_x

import jax_wonly as jw
from jax_wonly import _abi

pytestmark = pytest.mark.gpu


@jax.jit
def of_product(x, qt, dy):
    return jax.vjp(lambda s: jw.matmul(x, dataclasses.replace(qt, scales=s)), qt.scales)[1](dy)[0]


@jax.jit
def of_experts(x, qt, sizes, dy):
    return jax.vjp(lambda s: jw.ragged_dot(x, dataclasses.replace(qt, scales=s), sizes), qt.scales)[1](dy)[0]


@jax.jit
def of_ids(x, qt, ids, dy):
    return jax.vjp(lambda s: jw.gather_matmul(x, dataclasses.replace(qt, scales=s), ids), qt.scales)[1](dy)[0]


def runs_kernel(function, *operands) -> bool:
    return _abi.SCALES_GRADIENT in function.lower(*operands).as_text()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", ["symmetric", "integer_zeros", "float_zeros", "offsets"])
@pytest.mark.parametrize("bits", [4, 8])
def test_kernel(rng, bits, mode, dtype):
    """Groups of every size, rows of a part of, one and several tiles of both kernels, and sizes that are no multiple of
    one; many rows of a small weight are split."""
    for group_size, m, k, n in [
        (32, 257, 1184, 2568),
        (None, 700, 520, 264),
        (64, 1030, 2112, 4104),
        (128, 1, 384, 264),
        (32, 40, 416, 136),
        (64, 300, 192, 1096),
        (256, 128, 1280, 72),
        (None, 129, 1096, 520),
        (None, 7, 40, 8),
        (128, 40, 384, 1001),
        (32, 300, 416, 100),
        (128, 33, 4224, 2056),
    ]:
        weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode)
        x, dy = random_x(rng, (m, k), dtype), random_x(rng, (m, n), dtype)
        assert runs_kernel(of_product, x, weight.qt, dy)
        ds = of_product(x, weight.qt, dy)
        assert_scales_gradient(ds, x, dy, weight)
        np.testing.assert_array_equal(ds, of_product(x, weight.qt, dy))


@pytest.mark.parametrize("mode", ["symmetric", "integer_zeros"])
@pytest.mark.parametrize("experts", [5, 70])
def test_experts(rng, experts, mode):
    """Sizes with experts that have no rows, first and last ones too, and rows that no expert has; infinities of one
    expert stay its own."""
    for group_size, k, n, mean in [(128, 384, 200, 3), (32, 96, 136, 60), (None, 200, 264, 150), (64, 64, 72, 0.4)]:
        sizes = rng.poisson(mean, experts) * (rng.uniform(0, 1, experts) < 0.7)
        sizes[[0, -1]] = 0
        sizes[1] += 1
        ends = np.cumsum(sizes)
        m = int(ends[-1]) + 5
        weight = random_weight(rng, k, n, group_size=group_size, mode=mode, lead=(experts,))
        x, dy = random_x(rng, (m, k), "bfloat16"), random_x(rng, (m, n), "bfloat16")
        ids = np.repeat(np.arange(experts), sizes)
        order = rng.permutation(m)
        every = np.concatenate([ids, [-1, experts, experts + 7, -3, experts]]).astype(np.int32)
        operands = (x, weight.qt, jnp.asarray(sizes, jnp.int32), dy)
        assert runs_kernel(of_experts, *operands)
        ds = of_experts(*operands)
        by_ids = of_ids(x[order], weight.qt, jnp.asarray(every[order]), dy[order])
        for e in range(experts):
            rows = slice(ends[e] - sizes[e], ends[e])
            one = Weight(weight.qt[e], weight.dense[e], weight.magnitude[e])
            if sizes[e] == 0:
                assert not np.asarray(ds[e]).any() and not np.asarray(by_ids[e]).any()
                continue
            assert_scales_gradient(ds[e], x[rows], dy[rows], one)
            assert_scales_gradient(by_ids[e], x[rows], dy[rows], one)
        first = int(ends[1] - sizes[1])
        spoilt = of_experts(x.at[first].set(jnp.inf), *operands[1:])
        assert not np.isfinite(np.asarray(spoilt[1])).all()
        np.testing.assert_array_equal(spoilt[2:], ds[2:])


@pytest.mark.parametrize("mode", ["float_zeros", "offsets"])
def test_shifts_of_experts(rng, mode):
    """Float zeros and offsets, whose cotangents are those of scales with codes that are all one."""
    experts, k, n, sizes = 9, 256, 136, np.array([0, 3, 300, 0, 40, 1, 64, 129, 0])
    ends, field = np.cumsum(sizes), "zeros" if mode == "float_zeros" else "offsets"
    weight = random_weight(rng, k, n, group_size=64, mode=mode, lead=(experts,))
    x, dy = random_x(rng, (int(ends[-1]) + 4, k), "bfloat16"), random_x(rng, (int(ends[-1]) + 4, n), "bfloat16")

    @jax.jit
    def of_shift(x, qt, sizes, dy):
        shift = getattr(qt, field)
        return jax.vjp(lambda s: jw.ragged_dot(x, dataclasses.replace(qt, **{field: s}), sizes), shift)[1](dy)[0]

    operands = x, weight.qt, jnp.asarray(sizes, jnp.int32), dy
    assert runs_kernel(of_shift, *operands)
    got = np.asarray(of_shift(*operands)).astype(np.float64)
    x64, dy64 = (np.asarray(a).astype(np.float64) for a in (x, dy))
    for e in range(experts):
        mine = slice(ends[e] - sizes[e], ends[e])
        factor = -np.asarray(weight.qt.scales[e]).astype(np.float64) if field == "zeros" else 1.0
        sums = x64[mine].reshape(-1, k // 64, 64)
        exact = factor * (sums.sum(-1).T @ dy64[mine])
        bound = 2.0**-19 * np.abs(factor) * (np.abs(sums).sum(-1).T @ np.abs(dy64[mine])) + 1e-7
        assert (np.abs(got[e] - exact) <= bound).all()


def test_batches(rng):
    """Entries with weights of their own, or one weight, and rows of their own, or the same ones."""
    weight = random_weight(rng, 256, 200, group_size=64, lead=(3,))
    one = Weight(weight.qt[0], weight.dense[0], weight.magnitude[0])
    x, dy = random_x(rng, (3, 50, 256), "bfloat16"), random_x(rng, (3, 50, 200), "bfloat16")
    for e, ds in enumerate(jax.vmap(of_product)(x, weight.qt, dy)):
        assert_scales_gradient(ds, x[e], dy[e], Weight(weight.qt[e], weight.dense[e], weight.magnitude[e]))
    for e, ds in enumerate(jax.vmap(of_product, (None, 0, 0))(x[0], weight.qt, dy)):
        assert_scales_gradient(ds, x[0], dy[e], Weight(weight.qt[e], weight.dense[e], weight.magnitude[e]))
    for e, ds in enumerate(jax.vmap(of_product, (0, None, None))(x, one.qt, dy[1])):
        assert_scales_gradient(ds, x[e], dy[1], one)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("mode", ["table", "symmetric", "integer_zeros", "offsets"])
def test_tables_and_float32(rng, mode, dtype):
    """A table's entries in the place of codes, and float32 numbers as two fp16 ones each, of any magnitude; also one
    of them with a 16-bit operand."""
    for group_size, m, k, n, magnitude in [
        (64, 37, 320, 136, 1.0),
        (None, 300, 520, 264, 1e-20),
        (128, 1, 384, 72, 1e9),
    ]:
        weight = random_weight(rng, k, n, group_size=group_size, mode=mode)
        x, dy = random_x(rng, (m, k), dtype), random_x(rng, (m, n), dtype)
        if dtype == "float32":
            x, dy = x * magnitude, dy / magnitude
        assert runs_kernel(of_product, x, weight.qt, dy)
        assert_scales_gradient(of_product(x, weight.qt, dy), x, dy, weight)
    experts = random_weight(rng, 128, 72, group_size=64, mode=mode, lead=(4,))
    sizes, ends = np.array([3, 0, 150, 40]), np.array([3, 3, 153, 193])
    x, dy = random_x(rng, (200, 128), dtype), random_x(rng, (200, 72), dtype)
    x = x.at[199].set(jnp.inf)  # no expert's
    ds = of_experts(x, experts.qt, jnp.asarray(sizes, jnp.int32), dy)
    for e in range(4):
        mine = slice(ends[e] - sizes[e], ends[e])
        one = Weight(experts.qt[e], experts.dense[e], experts.magnitude[e])
        if sizes[e]:
            assert_scales_gradient(ds[e], x[mine], dy[mine], one)
        else:
            assert not np.asarray(ds[e]).any()


def test_other_operands(rng):
    """Rows of odd numbers have the same gradient, and so have cotangents of another type."""
    weight = random_weight(rng, 36, 77, mode="integer_zeros")
    x, dy = random_x(rng, (37, 36), "bfloat16"), random_x(rng, (37, 77), "bfloat16")
    assert runs_kernel(of_product, x, weight.qt, dy)
    assert_scales_gradient(of_product(x, weight.qt, dy), x, dy, weight)
    weight = random_weight(rng, 128, 72, group_size=32)
    x, dy = random_x(rng, (37, 128), "bfloat16"), random_x(rng, (37, 72))

    def product(scales):
        return jw.matmul(x, dataclasses.replace(weight.qt, scales=scales), preferred_element_type=jnp.float32)

    assert_scales_gradient(jax.vjp(product, weight.qt.scales)[1](dy)[0], x, dy, weight)


@pytest.mark.parametrize("m", [9, 900])  # of both kernels
def test_limits_beyond_the_rows(rng, m):
    """The call itself: limits count as the nearest row, and what would descend has no rows."""
    qw = random_weight(rng, 64, 72, bits=4, lead=(3,)).qt.qvalue
    x, dy = random_x(rng, (1, m, 64), "bfloat16"), random_x(rng, (1, m, 72), "bfloat16")
    result = jax.ShapeDtypeStruct((3, 1, 72), jnp.float32)
    attributes = {"bits": np.int64(4), "block": np.int64(64), "has_table": np.int64(0)}

    def call(*limits):
        return jax.ffi.ffi_call(_abi.SCALES_GRADIENT, result)(x, qw, dy, jnp.array(limits, jnp.int32), **attributes)

    np.testing.assert_array_equal(call(-(2**31), m // 3, m // 3, 2**31 - 1), call(0, m // 3, m // 3, m))
    np.testing.assert_array_equal(call(m + 1, -5, m + 7, 2), call(0, 0, m, m))
