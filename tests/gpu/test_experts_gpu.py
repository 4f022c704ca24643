"""Experts' products on a GPU: the same checks as on the CPU, and that nothing depends on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts_cases import (
    assert_rows,
    check_expert_gradients,
    check_non_finite_rows,
    check_rows_on_device,
    sizes_of,
)
from reference import DTYPES, MODES, Weight, random_weight, random_x

import jax_wonly as jw

pytestmark = pytest.mark.gpu


def held_to(x, rows, experts):
    """The implementation whose bounds hold: with many rows of an expert weights are rounded to 16-bit activations'."""
    return None if x.dtype.itemsize == 2 and rows >= 48 * experts else "cuda"


# Few and many rows of an expert, which different kernels take; odd shapes, and such as the copy engines accept.
SHAPES = [(96, 71, 32, 9), (192, 304, 64, 4), (384, 272, 128, 3), (512, 40, 256, 5), (101, 33, None, 20)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_kernels(rng, bits, mode):
    for k, n, group_size, experts in SHAPES:
        weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode, lead=(experts,))
        for dtype in DTYPES:
            rows = int(rng.choice([2, 31, 200]))
            bias = [None, random_x(rng, (n,)), random_x(rng, (experts, n))][rng.integers(3)]
            epilogue = {"bias": bias, "activation": [None, "relu", "gelu", "silu"][rng.integers(4)]}
            sizes, ids = sizes_of(rng, experts, rows)
            x = random_x(rng, (rows, k), dtype)
            y = jw.ragged_dot(x, weight.qt, jnp.asarray(sizes), implementation="cuda", **epilogue)
            assert_rows(y, x, weight, ids, implementation=held_to(x, rows, experts), **epilogue)
            x = x[: max(rows // 3, 1), None]
            ids = rng.integers(-1, experts + 1, (x.shape[0], 3)).astype(np.int32)
            y = jw.gather_matmul(x, weight.qt, jnp.asarray(ids), implementation="cuda", **epilogue)
            assert_rows(y, x, weight, ids, implementation=held_to(x, ids.size, experts), **epilogue)


@pytest.mark.parametrize(("experts", "rows"), [(130, 900), (600, 40), (600, 3000), (2, 5000)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_many_experts_and_rows(rng, experts, rows, dtype):
    """Plans that a kernel of their own makes, and more experts than a CTA keeps in shared memory."""
    one = random_weight(rng, 32, 40, group_size=32, lead=(7,))
    of = rng.integers(0, 7, experts)
    weight = Weight(jax.tree.map(lambda a: a[of], one.qt), one.dense[of], one.magnitude[of])
    sizes, ids = sizes_of(rng, experts, rows)
    x = random_x(rng, (rows, 32), dtype)
    y = jw.ragged_dot(x, weight.qt, jnp.asarray(sizes), implementation="cuda")
    assert_rows(y, x, weight, ids, implementation=held_to(x, rows, experts))
    order = rng.permutation(rows)
    shuffled = jw.gather_matmul(x[order], weight.qt, jnp.asarray(ids[order]), implementation="cuda")
    assert_rows(shuffled, x[order], weight, ids[order], implementation=held_to(x, rows, experts))


def test_scales_of_any_size(rng):
    """Groups without weight, and with far larger or smaller ones than their neighbours."""
    weight = random_weight(rng, 1024, 64, group_size=128, mode="integer_zeros", lead=(2,))
    factor = np.ones((2, 8, 64), np.float32)
    factor[:, 1::3] = 0
    factor[0, ::4], factor[1, ::4] = 2.0**-20, 2.0**20
    spread = np.repeat(factor, 128, axis=1)
    qt = jw.QuantizedTensor(weight.qt.qvalue, weight.qt.scales * factor, weight.qt.zeros, bits=4, k=1024, n=64)
    weight = Weight(qt, weight.dense * spread, weight.magnitude * spread)
    for rows in (3, 40, 300):
        x = random_x(rng, (rows, 1024), "bfloat16")
        ids = rng.integers(0, 2, rows)
        y = jw.gather_matmul(x, weight.qt, jnp.asarray(ids), implementation="cuda")
        assert_rows(y, x, weight, ids, implementation=held_to(x, rows, 2))


def test_rows_known_on_the_device_only(rng):
    check_rows_on_device(rng)


def test_non_finite_rows_stay_alone(rng):
    check_non_finite_rows(rng)


@pytest.mark.parametrize("mode", MODES)
def test_gradients(rng, mode):
    check_expert_gradients(rng, mode)


def test_one_program_for_all_routings(rng):
    """A compiled program, captured or not, follows ids that change from call to call, with the same bits each time."""
    weight = random_weight(rng, 256, 200, group_size=64, mode="integer_zeros", lead=(8,))
    x = random_x(rng, (33, 256), "bfloat16")
    f = jax.jit(jw.gather_matmul)
    for _ in range(12):
        ids = jnp.asarray(rng.integers(-1, 9, (33,)), jnp.int32)
        y = f(x, weight.qt, ids)
        assert_rows(y, x, weight, ids)
        np.testing.assert_array_equal(y, f(x, weight.qt, ids))
