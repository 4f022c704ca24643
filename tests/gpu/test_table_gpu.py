"""Weights whose codes index a table, on CUDA: the fused kernels, dequantization, and how they are chosen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts_cases import assert_rows, sizes_of
from reference import DTYPES, UNITS, as_kernels_see_it, assert_product, near_middles, random_weight, random_x

import jax_wonly as jw
from jax_wonly import _cuda_dispatch
from jax_wonly._table import TABLES

pytestmark = pytest.mark.gpu

SIXTEEN_BITS = ("float16", "bfloat16")


@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("group_size", [32, 64, 128, 256, None])
def test_kernel(rng, group_size, x_dtype, scale_dtype):
    for m, k, n in [(1, 256, 70), (7, 512, 130), (16, 256, 33), (33, 256, 64)]:
        k = k if group_size else k + 5
        weight = random_weight(rng, k, n, group_size=group_size, mode="table", scale_dtype=scale_dtype)
        x = random_x(rng, (m, k), x_dtype)
        y = jw.matmul(x, weight.qt, implementation="cuda")
        # More tokens than the streaming kernel takes at once meet weights that are rounded.
        assert_product(y, x, as_kernels_see_it(weight, x_dtype), rounded_weights=m > 16)


@pytest.mark.parametrize("m", [1, 2, 3, 8, 9, 16, 17, 64, 300])
@pytest.mark.parametrize("x_dtype", SIXTEEN_BITS)
def test_rows(rng, m, x_dtype):
    """Shapes of every configuration: few and many outputs, many inputs."""
    for k, n in [(4096, 64), (1024, 4104), (320, 20000)]:
        weight = random_weight(rng, k, n, group_size=64, mode="table")
        x = random_x(rng, (m, k), x_dtype)
        bias = random_x(rng, (n,), "bfloat16")
        options = {"bias": bias, "activation": "silu"}
        y = jw.matmul(x, weight.qt, preferred_element_type=np.float32, implementation="cuda", **options)
        expected = as_kernels_see_it(weight, x_dtype)
        # More tokens than the streaming kernel takes at once may meet weights that are rounded.
        assert_product(y, x, expected, out_dtype="float32", rounded_weights=m > 16, **options)


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, None])
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_few_rows(rng, x_dtype, group_size):
    """Pairs of codes looked up beside activations that stay in shared memory, of one weight and of several: scales of
    any type, rows of orders of magnitude, the same bits each time, and infinities that stay in their rows."""
    sixteen_bits = x_dtype in SIXTEEN_BITS
    product = jax.jit(lambda x, qt: jw.matmul(x, qt, implementation="cuda"))
    for (k, n), lead in (((2048, 4112), ()), ((1024, 8200), ()), ((2048, 4104), (3,))):
        scale_dtype = str(rng.choice(list(DTYPES)))
        weight = random_weight(rng, k, n, group_size=group_size, mode="table", scale_dtype=scale_dtype, lead=lead)
        exact = as_kernels_see_it(weight, x_dtype) if sixteen_bits else weight
        for m in (1, int(rng.integers(2, 5)), int(rng.integers(5, 9)), int(rng.integers(9, 17))):
            if m > 8 and not sixteen_bits:
                continue
            x = random_x(rng, (*lead, m, k), x_dtype)
            if not sixteen_bits:
                x *= np.exp2(rng.integers(-30, 30, (*lead, m, 1))).astype(np.float32)
            if _cuda_dispatch.has_warpgroups():
                assert jw.explain(x, weight.qt, platform="cuda", implementation="cuda").kernel == "matmul_resident"
            y = np.asarray(product(x, weight.qt))
            assert_product(y, x, exact)
            np.testing.assert_array_equal(np.asarray(product(x, weight.qt)), y)
            row, at, value = int(rng.integers(m)), int(rng.integers(k)), float(rng.choice([np.inf, -np.inf, np.nan]))
            wild = np.asarray(product(x.at[..., row, at].set(value), weight.qt), np.float32)
            with np.errstate(invalid="ignore"):
                np.testing.assert_array_equal(wild[..., row, :], value * np.sign(exact.dense[..., at, :]))
            others = np.arange(m) != row
            np.testing.assert_array_equal(wild[..., others, :], y[..., others, :].astype(np.float32))


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, None])
@pytest.mark.parametrize("x_dtype", SIXTEEN_BITS)
def test_tens_of_rows(rng, x_dtype, group_size):
    """Pairs of codes looked up in shared memory: scales of any type multiply sums in float32, of all entries and of
    infinities."""
    k, n = {32: 1120, 64: 1216, 128: 1152, 256: 4096, None: 1000}[group_size], 4360
    scale_dtype = str(rng.choice(list(DTYPES)))
    product = jax.jit(lambda x, qt: jw.matmul(x, qt, implementation="cuda"))
    for lead, shared in ((), False), ((3,), bool(rng.integers(2))):
        weight = random_weight(rng, k, n, group_size=group_size, mode="table", scale_dtype=scale_dtype, lead=lead)
        exact = as_kernels_see_it(weight, x_dtype)
        for m in (int(rng.integers(17, 33)), int(rng.integers(33, 65))):
            x = random_x(rng, (m, k) if shared or not lead else (*lead, m, k), x_dtype)
            assert jw.explain(x, weight.qt, platform="cuda", implementation="cuda").kernel == "matmul_warpgroup"
            y = product(x, weight.qt)
            assert_product(y, x, exact)
            np.testing.assert_array_equal(*(np.asarray(a).view(np.uint16) for a in (y, product(x, weight.qt))))
            row, at, value = int(rng.integers(m)), int(rng.integers(k)), float(rng.choice([np.inf, -np.inf, np.nan]))
            wild = np.asarray(product(x.at[..., row, at].set(value), weight.qt), np.float32)
            with np.errstate(invalid="ignore"):
                np.testing.assert_array_equal(wild[..., row, :], value * np.sign(exact.dense[..., at, :]))
            others = np.arange(m) != row
            np.testing.assert_array_equal(wild[..., others, :], np.asarray(y, np.float32)[..., others, :])


@pytest.mark.parametrize("scale_dtype", ["float32", "x"])
@pytest.mark.parametrize("x_dtype", SIXTEEN_BITS)
def test_many_rows(rng, x_dtype, scale_dtype):
    """Groups of all sizes, tiles of all sizes, and clusters that share tiles."""
    scale_dtype = x_dtype if scale_dtype == "x" else scale_dtype
    for m, k, n, group_size in [
        *((130, 256, 70, 32), (257, 512, 300, 64), (700, 320, 264, 64), (300, 4096, 520, 128)),
        *((600, 1032, 1096, None), (20, 4096, 320, 256), (64, 256, 8456, 64), (1500, 192, 2056, 32)),
    ]:
        weight = random_weight(rng, k, n, group_size=group_size, mode="table", scale_dtype=scale_dtype)
        x = random_x(rng, (m, k), x_dtype)
        options = {"bias": random_x(rng, (n,)), "activation": rng.choice([None, "relu"])}
        y = jw.matmul(x, weight.qt, implementation="cuda", **options)
        assert_product(y, x, as_kernels_see_it(weight, x_dtype), rounded_weights=True, **options)
        np.testing.assert_array_equal(y, jw.matmul(x, weight.qt, implementation="cuda", **options))


@pytest.mark.parametrize(("rows", "k", "n"), [(3, 128, 70), (40, 512, 136), (600, 256, 300), (50, 101, 33)])
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_experts(rng, rows, k, n, x_dtype):
    weight = random_weight(rng, k, n, group_size=None if k % 64 else 64, mode="table", lead=(5,))
    x, (sizes, ids) = random_x(rng, (rows, k), x_dtype), sizes_of(rng, 5, rows)
    options = {"bias": random_x(rng, (5, n)), "activation": "silu"}
    y = jw.ragged_dot(x, weight.qt, jnp.asarray(sizes), **options)
    assert_rows(y, x, weight, ids, **options)
    x, ids = x[: rows // 3, None], rng.integers(-1, 6, (rows // 3, 3)).astype(np.int32)
    y = jw.gather_matmul(x, weight.qt, jnp.asarray(ids), **options)
    assert_rows(y, x, weight, ids, **options)


def test_experts_take_no_dense_weights(rng):
    weight = random_weight(rng, 256, 300, group_size=64, mode="table", lead=(4,))
    for rows in (1, 300):
        found = jw.explain(random_x(rng, (rows, 256), "bfloat16"), weight.qt, experts=True, platform="cuda")
        assert found.path == "kernel"


@pytest.mark.parametrize("m", [1, 12, 64, 65])
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_default(rng, m, x_dtype):
    """Whatever is chosen rounds the table or the weights to the type of x; float32 ones stay."""
    weight = random_weight(rng, 1024, 200, group_size=64, mode="table")
    x = random_x(rng, (m, 1024), x_dtype)
    y = jw.matmul(x, weight.qt, preferred_element_type=np.float32)
    if x_dtype == "float32":
        assert_product(y, x, weight)
    else:
        x64 = np.asarray(x, np.float64)
        assert (np.abs(y - x64 @ weight.dense) <= UNITS[x_dtype] * (np.abs(x64) @ weight.magnitude)).all()


def test_dequantize_is_exact(rng):
    for k, n, group_size in [(256, 72, 64), (192, 33, 32), (101, 8, None)]:
        weight = random_weight(rng, k, n, group_size=group_size, mode="table", lead=(2,))
        for dtype in DTYPES.values():
            got = weight.qt.dequantize(dtype, implementation="cuda")
            expected = weight.qt.dequantize(dtype, implementation="xla")
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))
        np.testing.assert_allclose(weight.qt.dequantize(np.float32), weight.dense, rtol=2.0**-22)


@pytest.mark.parametrize("mode", ["nf4", "fp4"])
def test_codes_are_those_of_the_cpu(rng, mode):
    """Also of values halfway between entries, to the last place."""
    w = np.concatenate([rng.normal(0.1, 1, (512, 200)).astype(np.float32), near_middles(rng, TABLES[mode], 200)])
    on_gpu = jw.quantize(jnp.asarray(w), mode=mode, group_size=64)
    with jax.default_device(jax.devices("cpu")[0]):
        on_cpu = jw.quantize(jnp.asarray(w), mode=mode, group_size=64)
    np.testing.assert_array_equal(on_gpu.qvalue, on_cpu.qvalue)
    np.testing.assert_array_equal(on_gpu.scales, on_cpu.scales)


def test_batches_of_weights(rng):
    weight = random_weight(rng, 256, 130, group_size=64, mode="table", lead=(3,))
    x = random_x(rng, (3, 5, 256), "bfloat16")
    y = jax.jit(jax.vmap(jw.matmul))(x, weight.qt)
    for i in range(3):
        one = dataclasses.replace(weight, qt=weight.qt[i], dense=weight.dense[i])
        assert_product(y[i], x[i], as_kernels_see_it(one, "bfloat16"))


@pytest.mark.parametrize("scale_dtype", ["float32", "x"])
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 3, 8, 9, 16, 24, 63, 64, 130, 300])
def test_gradient_of_x(rng, m, x_dtype, scale_dtype):
    """From the packed weights: blocks of all sizes, groups of all sizes, and inputs and outputs that fill no tile. As
    exact as float32 where that is the type.
    """
    scale_dtype = x_dtype if scale_dtype == "x" else scale_dtype
    known = x_dtype == "bfloat16" or x_dtype == scale_dtype == "float16"
    shapes = [(256, 72, 32), (512, 1000, 64), (4096, 136, 128), (101, 320, None), (1024, 3000, 256), (160, 2050, 32)]
    shapes += [(8704, 72, 64)] if m < 63 else []  # more strips than run at once
    for k, n, group_size in shapes:
        weight = random_weight(rng, k, n, group_size=group_size, mode="table", scale_dtype=scale_dtype)
        dy, x = random_x(rng, (m, n), x_dtype), jnp.zeros((m, k), x_dtype)
        twice = 2 * -(-k // 64) <= _cuda_dispatch._gpu()[1]  # two passes of all strips at once
        streams = known and (m <= 16 or (m == 24 and twice))
        kernel = "matmul_transposed_stream" if streams else "matmul_transposed_warpgroup"
        assert jw.explain(dy, weight.qt, transpose=True, platform="cuda").kernel == kernel
        gradient = jax.jit(lambda dy, qt, x=x: jax.vjp(lambda x: jw.matmul(x, qt), x)[1](dy)[0])
        dx = gradient(dy, weight.qt)
        seen = transposed(as_kernels_see_it(weight, x_dtype))
        assert_product(dx, dy, seen, rounded_weights=True, cut_off=x_dtype == "float32")
        np.testing.assert_array_equal(gradient(dy, weight.qt), dx)


@pytest.mark.parametrize("x_dtype", SIXTEEN_BITS)
def test_gradient_of_several_weights(rng, x_dtype):
    """With scales of their own and one table."""
    for m, k, n in ((7, 320, 1096), (13, 192, 70), (20, 320, 1096), (140, 448, 264)):
        weight = random_weight(rng, k, n, group_size=64, mode="table", lead=(5,), scale_dtype=x_dtype)
        dy, x = random_x(rng, (5, m, n), x_dtype), jnp.zeros((5, m, k), x_dtype)
        dx = jax.jit(lambda dy, qt, x=x: jax.vjp(jax.vmap(lambda x, qt: jw.matmul(x, qt)), x, qt)[1](dy)[0])(
            dy, weight.qt
        )
        for i in range(5):
            one = dataclasses.replace(weight, qt=weight.qt[i], dense=weight.dense[i], magnitude=weight.magnitude[i])
            assert_product(dx[i], dy[i], transposed(as_kernels_see_it(one, x_dtype)), rounded_weights=True)


@pytest.mark.parametrize("power", [-4, 0, 8])
def test_range_of_a_table(rng, power):
    """Entries of any magnitude, and some orders of magnitude below the largest; infinite cotangents and entries."""
    values = np.exp2(rng.integers(-10, 1, 16).astype(np.float64) + power) * rng.choice([-1, 1], 16)
    values[5] = 2.0**power
    weight = random_weight(rng, 256, 136, group_size=64, mode="table")
    codes = np.asarray(jw.unpack(weight.qt.qvalue, 4, 256, 136))
    scales = np.repeat(np.asarray(weight.qt.scales, np.float64), 64, 0)

    def of_table(table):
        table = tuple(float(np.float32(v)) for v in table)
        with np.errstate(invalid="ignore"):
            dense = np.asarray(table)[codes] * scales
        return dataclasses.replace(
            weight, qt=dataclasses.replace(weight.qt, table=table), dense=dense, magnitude=np.abs(dense)
        )

    seen = of_table(values)
    for m in (3, 90):
        dy = random_x(rng, (m, 136)) * np.float32(2.0**-power)
        gradient = jax.jit(lambda dy, qt, m=m: jax.vjp(lambda x: jw.matmul(x, qt), jnp.zeros((m, 256)))[1](dy)[0])
        clean = gradient(dy, seen.qt)
        assert_product(clean, dy, transposed(seen), cut_off=True)
        dy = dy.at[1, 7].set(np.inf)
        found = gradient(dy, seen.qt)
        np.testing.assert_array_equal(found[1], np.where(seen.dense[:, 7] > 0, np.inf, -np.inf))
        np.testing.assert_array_equal(np.delete(found, 1, 0), np.delete(clean, 1, 0))


def transposed(weight):
    return dataclasses.replace(weight, dense=weight.dense.T, magnitude=weight.magnitude.T)


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("rows", [7, 60, 100, 900])
def test_gradient_of_experts(rng, rows, x_dtype, scale_dtype, group_size):
    weight = random_weight(rng, 320, 136, group_size=group_size, mode="table", scale_dtype=scale_dtype, lead=(5,))
    sizes, ids = sizes_of(rng, 5, rows)
    dy, x = random_x(rng, (rows, 136), x_dtype), jnp.zeros((rows, 320), x_dtype)
    dot = jax.vjp(lambda x: jw.ragged_dot(x, weight.qt, jnp.asarray(sizes)), x)[1]
    gathered = jax.vjp(lambda x: jw.gather_matmul(x[:, None], weight.qt, jnp.asarray(ids)[:, None]), x)[1]
    for dx in (dot(dy)[0], gathered(dy[:, None])[0]):
        assert not np.asarray(dx)[(ids < 0) | (ids >= 5)].any()
        for expert in range(5):
            one = dataclasses.replace(weight, qt=weight.qt[expert], dense=weight.dense[expert])
            seen = transposed(as_kernels_see_it(one, x_dtype))
            options = {"rounded_weights": True, "cut_off": x_dtype == "float32"}
            assert_product(dx[ids == expert], dy[ids == expert], seen, **options)


@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 3, 8, 9, 16, 17, 70])
def test_float32(rng, m, scale_dtype):
    """As exact as float32: entries are three bfloat16 numbers, as activations are."""
    for k, n, group_size in [(256, 70, 32), (512, 130, 64), (101, 33, None), (4096, 64, 128), (1024, 4104, 64)]:
        weight = random_weight(rng, k, n, group_size=group_size, mode="table", scale_dtype=scale_dtype)
        x, bias = random_x(rng, (m, k)), random_x(rng, (n,))
        y = jw.matmul(x, weight.qt, bias=bias, activation="silu", implementation="cuda")
        assert_product(y, x, weight, bias=bias, activation="silu")
        np.testing.assert_array_equal(y, jw.matmul(x, weight.qt, bias=bias, activation="silu", implementation="cuda"))


def test_gradients(rng):
    weight = random_weight(rng, 128, 70, group_size=32, mode="table")
    x, dy = random_x(rng, (5, 128)), random_x(rng, (5, 70))

    def loss(x, scales):
        return jnp.sum(jw.matmul(x, dataclasses.replace(weight.qt, scales=scales)) * dy)

    dx, dscales = jax.jit(jax.grad(loss, (0, 1)))(x, weight.qt.scales)
    dy64 = np.asarray(dy, np.float64)
    np.testing.assert_allclose(dx, dy64 @ weight.dense.T, rtol=1e-4, atol=1e-3)
    per_weight = np.asarray(x, np.float64).T @ dy64 * weight.dense / np.repeat(weight.qt.scales, 32, 0)
    np.testing.assert_allclose(dscales, per_weight.reshape(4, 32, 70).sum(1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("x_dtype", DTYPES)
def test_non_finite_and_repeated(rng, x_dtype):
    weight = random_weight(rng, 512, 130, group_size=64, mode="table")
    x = np.array(random_x(rng, (6, 512), x_dtype))
    clean = np.asarray(jw.matmul(x, weight.qt), np.float32)
    np.testing.assert_array_equal(jw.matmul(x, weight.qt), clean)
    x[1, 3], x[3, 10] = np.nan, np.inf
    y = np.asarray(jw.matmul(x, weight.qt), np.float32)
    assert np.isnan(y[1]).all() and not np.isfinite(y[3]).any()
    if x_dtype == "float32":  # each term as a dense product has it
        np.testing.assert_array_equal(y[3], np.where(weight.dense[10] > 0, np.inf, -np.inf))
    np.testing.assert_array_equal(y[[0, 2, 4, 5]], clean[[0, 2, 4, 5]])
