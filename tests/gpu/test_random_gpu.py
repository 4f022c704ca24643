"""Products of random shapes as large as those of models, with paths that small ones do not take: several rounds, waves
and turns of a kernel, and ends of them that are not whole. A weight has the same outputs over and over, so that its
reference is small.
"""

import jax
import jax.numpy as jnp
import matmul_cases
import numpy as np
import pytest
from matmul_cases import rounds_weights
from reference import DTYPES, MODES, UNITS, Weight, activate, alike, random_weight, random_x, repeated, rounding

import jax_wonly as jw
from jax_wonly import _cuda_dispatch

pytestmark = [pytest.mark.gpu, pytest.mark.device]

PERIOD = 192  # outputs
MOST_WEIGHTS, MOST_INPUTS = 3e8, 6e6  # of a weight, and of all rows
DRAWS = range(24)


def random_scheme(rng) -> dict:
    return {
        "bits": int(rng.choice([4, 4, 8])),
        "mode": str(rng.choice(list(MODES))),
        "group_size": rng.choice([32, 64, 128, 256, None]),
        "scale_dtype": str(rng.choice(["bfloat16", "bfloat16", "float16", "float32"])),
        "shift_dtype": rng.choice([None, None, "bfloat16", "float32"]),
    }


def random_shape(rng, most_rows: int) -> tuple[int, int, int]:
    """Rows, inputs and outputs, these mostly whole eights."""
    k = 256 * round(3 * 2 ** rng.uniform(0, 5))
    n = round(min(512 * 2 ** rng.uniform(0, 8), MOST_WEIGHTS / k))
    n -= n % 8 if rng.random() < 0.8 else 0
    return round(min(most_rows, MOST_INPUTS / k) ** rng.random()), k, n


def product_of(scheme: dict, x_dtype: str, m: int, k: int, n: int) -> _cuda_dispatch.Product:
    """What the choice of kernels knows of a product."""
    types = {"bits": scheme["bits"], "group_size": scheme["group_size"] or k, "scale_dtype": scheme["scale_dtype"]}
    product = matmul_cases.product_of(m, k, n, scheme["mode"], x_dtype, **types)
    shift = jnp.dtype(scheme["shift_dtype"] or product.scale_dtype) if product.shifted else product.shift_dtype
    scales, shift = _cuda_dispatch.parameter_types(product.scale_dtype, shift)
    return _cuda_dispatch.widened(product._replace(scale_dtype=scales, shift_dtype=shift))


def assert_close(y, exact, terms, roundings, inputs: int) -> None:
    """Within float32 sums of ``inputs`` terms of such magnitudes, roundings of weights (0: exact), and of ``y``."""
    bound = 2.0**-21 * max(1.0, np.sqrt(inputs) / 8) * terms + 8 * roundings
    error = np.abs(np.asarray(y).astype(np.float64) - exact)
    worst = np.max(error / (1.2 * bound + rounding(exact, str(y.dtype)) + 1e-7))
    assert worst <= 1, f"error is {worst:.3g} times the bound"


def alike_in(scheme: dict, x_dtype: str, k: int) -> float:
    """As ``alike``, but zeros and offsets of another type than x are rounded to that, the same for a whole group."""
    floats = scheme["mode"] in ("float_zeros", "offsets")
    rounded = floats and (scheme["shift_dtype"] or scheme["scale_dtype"]) != x_dtype
    return alike(0 if rounded else scheme["bits"], scheme["group_size"] or k)


def all_columns(a: np.ndarray, n: int) -> np.ndarray:
    return np.tile(a, -(-n // PERIOD))[..., :n]


def folded(a: np.ndarray) -> np.ndarray:
    """Sums of columns that are the same output of a weight."""
    whole = np.pad(a, ((0, 0), (0, -a.shape[-1] % PERIOD)))
    return whole.reshape(len(a), -1, PERIOD).sum(1)


def check_product(x, few: Weight, n: int, scheme: dict, bias=None, activation=None) -> str:
    """Holds a product of ``n`` outputs, those of ``few`` over and over, to float64; the same bits each time. Returns
    the names of its kernels.
    """
    qt, k, x_dtype = repeated(few.qt, n), x.shape[1], str(x.dtype)
    kernels = jw.explain(x, qt, implementation="cuda").kernel
    print(*x.shape, n, x_dtype, scheme, kernels)
    biases = None if bias is None else jnp.tile(bias, -(-n // PERIOD))[:n]
    product = jax.jit(lambda x, qt, bias: jw.matmul(x, qt, bias=bias, activation=activation, implementation="cuda"))
    y, x64 = product(x, qt, biases), np.asarray(x).astype(np.float64)
    roundings = np.zeros((len(x), PERIOD))
    if rounds_weights("cuda", x, qt) and x_dtype != "float32":
        roundings = UNITS[x_dtype] * alike_in(scheme, x_dtype, k) * np.sqrt(x64**2 @ few.rounded**2)
    added = np.zeros(PERIOD) if bias is None else np.asarray(bias).astype(np.float64)
    exact, terms = activate(x64 @ few.dense + added, activation), np.abs(x64) @ few.magnitude + np.abs(added)
    assert_close(y, all_columns(exact, n), all_columns(terms, n), all_columns(roundings, n), k)
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(product(x, qt, biases)), np.asarray(y))
    assert kernels is not None
    return kernels


@pytest.mark.parametrize("draw", DRAWS)
def test_product(rng, draw):
    few_rows = draw % 2 == 0  # of decoding
    scheme, x_dtype = random_scheme(rng), str(rng.choice(list(DTYPES)))
    m, k, n = random_shape(rng, 17 if few_rows else 2000)
    few = random_weight(rng, k, PERIOD, **scheme)
    check_product(random_x(rng, (m, k), x_dtype), few, n, scheme)


@pytest.mark.parametrize("draw", DRAWS)
def test_two_kernels(rng, draw):
    """Products of which two kernels have some outputs each, with a bias and a function after them."""
    if not _cuda_dispatch.has_warpgroups():
        pytest.skip("two kernels have a part of a product each on sm_90 alone")
    x_dtype = str(rng.choice(["bfloat16", "float16"]))
    for _ in range(3000):
        scheme, m = random_scheme(rng), round(17 * 2 ** rng.uniform(0, 6))
        _, k, n = random_shape(rng, 1)
        if " + " in _cuda_dispatch.kernel(product_of(scheme, x_dtype, m, k, n)):
            break
    few, x = random_weight(rng, k, PERIOD, **scheme), random_x(rng, (m, k), x_dtype)
    bias = random_x(rng, (PERIOD,), x_dtype) if draw % 3 else None
    assert " + " in check_product(x, few, n, scheme, bias, [None, "relu"][draw % 2])


@pytest.mark.parametrize("draw", DRAWS)
def test_gradient(rng, draw):
    scheme, x_dtype = random_scheme(rng), str(rng.choice(list(DTYPES)))
    m, k, n = random_shape(rng, 17 if draw % 2 == 0 else 2000)
    m = max(1, min(m, round(MOST_INPUTS / n)))
    few = random_weight(rng, k, PERIOD, **scheme)
    qt, dy = repeated(few.qt, n), random_x(rng, (m, n), x_dtype)
    print(m, k, n, x_dtype, scheme)
    gradient = jax.jit(lambda dy, qt: jax.vjp(lambda x: jw.matmul(x, qt, implementation="cuda"), zeros)[1](dy)[0])
    zeros = jnp.zeros((m, k), x_dtype)
    dx, dy64 = gradient(dy, qt), np.asarray(dy).astype(np.float64)
    unit = UNITS[x_dtype] if x_dtype != "float32" else 0.0
    terms = folded(np.abs(dy64)) @ few.magnitude.T
    roundings = unit * np.sqrt((folded(dy64) ** 2 + folded(dy64**2)) @ few.rounded.T**2)
    assert_close(dx, folded(dy64) @ few.dense.T, terms, roundings, n)
    np.testing.assert_array_equal(np.asarray(gradient(dy, qt)), np.asarray(dx))


@pytest.mark.parametrize("draw", DRAWS)
def test_experts(rng, draw):
    scheme, x_dtype = random_scheme(rng), str(rng.choice(list(DTYPES)))
    experts = round(2 * 2 ** rng.uniform(0, 6))
    k = 256 * round(2 * 2 ** rng.uniform(0, 3))
    n = round(min(256 * 2 ** rng.uniform(0, 6), MOST_WEIGHTS / (experts * k))) // 8 * 8
    rows = round((40 if draw % 2 == 0 else 3000) ** rng.random())
    sizes = rng.multinomial(rows, rng.dirichlet(np.full(experts, rng.choice([0.2, 5.0]))))
    few = random_weight(rng, k, PERIOD, lead=(experts,), **scheme)
    x = random_x(rng, (rows, k), x_dtype)
    qt = jax.vmap(lambda one: repeated(one, n))(few.qt)
    print(rows, experts, k, n, x_dtype, scheme, sizes.tolist())
    product = jax.jit(lambda x, qt, sizes: jw.ragged_dot(x, qt, sizes, implementation="cuda"))
    y, x64 = product(x, qt, jnp.asarray(sizes, jnp.int32)), np.asarray(x).astype(np.float64)
    unit = UNITS[x_dtype] if x_dtype != "float32" else 0.0
    for expert, (begin, end) in enumerate(zip(np.cumsum(sizes) - sizes, np.cumsum(sizes), strict=True)):
        mine, dense, rounded = x64[begin:end], few.dense[expert], few.rounded[expert]
        if end > begin:
            exact, terms = mine @ dense, np.abs(mine) @ few.magnitude[expert]
            roundings = unit * alike_in(scheme, x_dtype, k) * np.sqrt(mine**2 @ rounded**2)
            assert_close(y[begin:end], all_columns(exact, n), all_columns(terms, n), all_columns(roundings, n), k)
