"""Experts' products on a GPU: the same checks as on the CPU, and that nothing depends on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts_cases import (
    assert_rows,
    check_expert_gradients,
    check_gather_matmul,
    check_non_finite_rows,
    check_ragged_dot,
    check_rows_on_device,
)
from reference import DTYPES, MODES, random_weight, random_x

import jax_wonly as jw

pytestmark = pytest.mark.gpu
SIZES = [(96, 32), (192, 64), (256, 128), (512, 256), (101, None)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_ragged_dot(rng, bits, mode, dtype):
    for k, group_size in SIZES:
        for experts, rows in ((1, 5), (5, 1), (9, 40), (4, 700), (130, 260)):
            check_ragged_dot(
                rng,
                experts=experts,
                rows=rows,
                k=k,
                n=int(rng.integers(1, 300)),
                group_size=group_size,
                bits=bits,
                mode=mode,
                dtype=dtype,
                activation=[None, "relu", "gelu", "silu"][rng.integers(4)],
                bias=[None, "shared", "each"][rng.integers(3)],
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_gather_matmul(rng, bits, mode, dtype):
    for x_lead, ids_lead in [((7,), (7,)), ((5, 1), (5, 3)), ((50, 3), (50, 3)), ((), (4,)), ((300, 1), (300, 2))]:
        experts, n = int(rng.integers(1, 20)), int(rng.integers(1, 300))
        check_gather_matmul(
            rng, experts=experts, x_lead=x_lead, ids_lead=ids_lead, bits=bits, mode=mode, dtype=dtype, k=192, n=n
        )


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
