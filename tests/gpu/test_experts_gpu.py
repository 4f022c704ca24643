"""Experts' products on a GPU: the same checks as on the CPU, and that nothing depends on the host."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts_cases import (
    assert_rows,
    by_expert,
    check_expert_gradients,
    check_non_finite_rows,
    check_rows_on_device,
    sizes_of,
)
from reference import DTYPES, MODES, UNITS, Weight, as_kernels_see_it, random_weight, random_x, rounding

import jax_wonly as jw
from jax_wonly import _cuda_dispatch

pytestmark = pytest.mark.gpu


def held_to(x, weight, rows):
    """The implementation whose bounds hold: with tens of rows of an expert weights may be rounded to 16-bit
    activations', from half a row on those of four bits with scales of that type and groups of 32 or 64, float zeros or
    offsets, and those of a table always."""
    qt = weight.qt
    experts = len(qt.scales)
    floats = qt.offsets is not None or (qt.zeros is not None and qt.zeros.dtype != jnp.uint8)
    rounds = qt.bits == 4 and qt.scales.dtype == x.dtype and (floats or qt.group_size <= 64) and 2 * rows >= experts
    rounds = rounds or qt.table is not None or rows >= 8 * experts
    return None if x.dtype.itemsize == 2 and rounds else "cuda"


SCHEMES = [*((bits, mode) for bits in (4, 8) for mode in MODES), (4, "table")]
# Few and many rows of an expert, which different kernels take; odd shapes, and such as the copy engines accept.
SHAPES = [(96, 71, 32, 9), (192, 304, 64, 4), (384, 272, 128, 3), (512, 40, 256, 5), (101, 33, None, 20)]


@pytest.mark.parametrize(("bits", "mode"), SCHEMES)
def test_kernels(rng, bits, mode):
    for k, n, group_size, experts in SHAPES:
        weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode, lead=(experts,))
        for dtype in DTYPES:
            rows = int(rng.choice([2, 31, 200, 700]))
            bias = [None, random_x(rng, (n,)), random_x(rng, (experts, n))][rng.integers(3)]
            epilogue = {"bias": bias, "activation": [None, "relu", "gelu", "silu"][rng.integers(4)]}
            sizes, ids = sizes_of(rng, experts, rows)
            x = random_x(rng, (rows, k), dtype)
            y = jw.ragged_dot(x, weight.qt, jnp.asarray(sizes), implementation="cuda", **epilogue)
            assert_rows(y, x, weight, ids, implementation=held_to(x, weight, rows), **epilogue)
            x = x[: max(rows // 3, 1), None]
            ids = rng.integers(-1, experts + 1, (x.shape[0], 3)).astype(np.int32)
            y = jw.gather_matmul(x, weight.qt, jnp.asarray(ids), implementation="cuda", **epilogue)
            assert_rows(y, x, weight, ids, implementation=held_to(x, weight, ids.size), **epilogue)


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
    assert_rows(y, x, weight, ids, implementation=held_to(x, weight, rows))
    order = rng.permutation(rows)
    shuffled = jw.gather_matmul(x[order], weight.qt, jnp.asarray(ids[order]), implementation="cuda")
    assert_rows(shuffled, x[order], weight, ids[order], implementation=held_to(x, weight, rows))


# For each expert as many on average as low tiles, high ones, and tiles with rounded weights are taken for.
ROWS = [[16, 0, 17, 33, 49, 64, 65, 1, 97, 128, 30], [96, 0, 97, 129, 90, 65, 160, 128, 1, 31, 10], [0, 1700, 256, 64]]


@pytest.mark.parametrize("sizes", ROWS)
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
@pytest.mark.parametrize(("bits", "numbers"), [(4, "integers"), (4, "floats"), (8, "integers"), (4, "table")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tens_of_rows(rng, bits, numbers, group_size, sizes, dtype):
    """Tiles of every height, and the same bits for the rows of one expert alone, whose tiles CTAs share."""
    experts, rows, k, n = len(sizes), sum(sizes) + 9, {64: 448, 128: 384}.get(group_size, 352), 528
    modes = {"floats": ["offsets", "float_zeros"], "integers": ["symmetric", "integer_zeros"], "table": ["table"]}
    mode = str(rng.choice(modes[numbers]))
    scales = dtype if numbers == "floats" else str(rng.choice([dtype, "float32"]))
    options = {"bits": bits, "group_size": group_size, "mode": mode, "scale_dtype": scales}
    weight = random_weight(rng, k, n, lead=(experts,), **options)
    ids = np.repeat(np.arange(experts + 1), [*sizes, 9])
    x = random_x(rng, (rows, k), dtype)
    y = jw.ragged_dot(x, weight.qt, jnp.asarray(sizes, jnp.int32), implementation="cuda")
    implementation = held_to(x, weight, rows)
    assert_rows(y, x, weight, ids, implementation=implementation)
    order = rng.permutation(rows)
    shuffled = jw.gather_matmul(x[order], weight.qt, jnp.asarray(ids[order], jnp.int32), implementation="cuda")
    np.testing.assert_array_equal(shuffled, y[order])
    if rows > (52 if numbers == "table" else 128) * experts:
        return
    for expert in (0, experts - 2):
        mine = ids == expert
        alone = jnp.asarray(np.where(np.arange(experts) == expert, sizes, 0), jnp.int32)
        x_alone = jnp.zeros_like(x).at[: sizes[expert]].set(x[mine])
        found = jw.ragged_dot(x_alone, weight.qt, alone, implementation="cuda")
        np.testing.assert_array_equal(found[: sizes[expert]], y[mine])


@pytest.mark.parametrize("sizes", ROWS)
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
@pytest.mark.parametrize(("bits", "mode"), SCHEMES)
def test_float32_rows(rng, bits, mode, group_size, sizes):
    """As two numbers each, in tiles of all heights, of the last of which few outputs are there; orders of magnitude
    apart, and with the same bits whatever rows there are beside."""
    experts, rows, n = len(sizes), sum(sizes), int(rng.choice([272, 400, 528, 1040]))
    scale_dtype = str(rng.choice(list(DTYPES)))
    weight = random_weight(
        rng, 384, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=scale_dtype, lead=(experts,)
    )
    magnitudes = np.exp2(rng.integers(-30, 30, (rows, 1))).astype(np.float32)
    x = random_x(rng, (rows, 384)) * magnitudes
    ids = np.repeat(np.arange(experts), sizes).astype(np.int32)
    found = jw.explain(x, weight.qt, experts="sizes", platform="cuda")
    assert found.kernel == "ragged_warpgroup"
    product = jax.jit(lambda x, sizes: jw.ragged_dot(x, weight.qt, sizes, bias=bias, activation="relu"))
    bias = random_x(rng, (experts, n))
    y = product(x, jnp.asarray(sizes))
    assert_rows(y, x, weight, ids, bias=bias, activation="relu")
    np.testing.assert_array_equal(product(x, jnp.asarray(sizes)), y)
    gather = jax.jit(lambda x, ids: jw.gather_matmul(x, weight.qt, ids, bias=bias, activation="relu"))
    order = rng.permutation(rows)
    np.testing.assert_array_equal(gather(x[order][:, None], jnp.asarray(ids[order])[:, None])[:, 0], y[order])
    some = order[: max(2 * experts, rows // 2)]
    np.testing.assert_array_equal(gather(x[some][:, None], jnp.asarray(ids[some])[:, None])[:, 0], y[some])


@pytest.mark.parametrize("group_size", [64, 128])
@pytest.mark.parametrize("mode", [*MODES, "table"])
def test_float32_rows_without_an_expert(rng, mode, group_size):
    """Infinities and NaNs stay in their rows, and rows that have no expert are zero."""
    weight = random_weight(rng, 256, 264, group_size=group_size, mode=mode, lead=(4,))
    x, ids = np.array(random_x(rng, (60, 256))), rng.integers(-1, 6, 60).astype(np.int32)
    ids[:3] = 1
    clean = np.asarray(jw.gather_matmul(x, weight.qt, jnp.asarray(ids)))
    assert not clean[(ids < 0) | (ids > 3)].any()
    x[0, 5], x[1, 7] = np.nan, np.inf
    y = np.asarray(jw.gather_matmul(x, weight.qt, jnp.asarray(ids)))
    assert np.isnan(y[0]).all()
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(y[1], np.inf * weight.dense[1][7])
    np.testing.assert_array_equal(y[2:], clean[2:])


@pytest.mark.parametrize("experts", [3, 100, 200])
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
def test_one_or_two_rows(rng, experts, group_size):
    """Few rows among many experts: ids, sizes, and sizes that add up to more."""
    one = random_weight(rng, 384, 200, group_size=group_size, lead=(7,))
    of = rng.integers(0, 7, experts)
    weight = Weight(jax.tree.map(lambda a: a[of], one.qt), one.dense[of], one.magnitude[of])
    for rows in (1, 2, 5, 33):
        x = random_x(rng, (rows, 384), "bfloat16")
        sizes, ids = sizes_of(rng, experts, rows)
        more = sizes * 1000 + rng.integers(-1, 2, experts).astype(np.int32)
        cut = np.repeat(np.arange(experts), np.maximum(more, 0))[:rows]
        of_more = np.concatenate([cut, np.full(rows - len(cut), -1)])
        for counts, wanted in ((sizes, ids), (more, of_more)):
            y = jw.ragged_dot(x, weight.qt, jnp.asarray(counts), implementation="cuda")
            assert_rows(y, x, weight, wanted)
            np.testing.assert_array_equal(jw.ragged_dot(x, weight.qt, jnp.asarray(counts), implementation="cuda"), y)
        ids = rng.integers(-1, experts + 1, rows).astype(np.int32)
        ids[rows // 2 :] = ids[0]
        y = jw.gather_matmul(x, weight.qt, jnp.asarray(ids), implementation="cuda")
        assert_rows(y, x, weight, ids)


# Inputs, outputs, group size, experts, rows: up to as many rows as experts, two of each of small ones, or four of few.
# Of some all multiprocessors take even shares, which end within tiles.
FEW_ROWS = [
    (128, 24, 32, 3, 12),
    (448, 200, 64, 100, 97),
    (768, 40, None, 40, 33),
    (2048, 136, 128, 8, 32),
    (256, 72, 128, 600, 150),
    (4096, 160, 128, 100, 150),
    (192, 136, 64, 220, 400),
    (14336, 64, 256, 5, 20),
]


@pytest.mark.parametrize("mode", [*MODES, "table"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alike", [True, False])
def test_few_rows(rng, mode, dtype, alike):
    """Up to 128 ids in one launch; more rows than a tile has, and the same bits whoever else has rows. Scales, zeros
    and offsets of the activations' type, and of any."""
    for k, n, group_size, experts, rows in FEW_ROWS:
        scale_dtype, shift_dtype = (dtype, dtype) if alike else map(str, rng.choice(list(DTYPES), 2))
        scheme = {"bits": 4 if mode == "table" else int(rng.choice([4, 8])), "group_size": group_size, "mode": mode}
        types = {"scale_dtype": scale_dtype, "shift_dtype": shift_dtype}
        weight = random_weight(rng, k, n, lead=(experts,), **scheme, **types)
        activation = [None, "relu", "silu"][rng.integers(3)]
        epilogue = {"bias": [None, random_x(rng, (experts, n))][rng.integers(2)], "activation": activation}
        x = random_x(rng, (rows, k), dtype)
        if dtype == "float32":
            x *= np.exp2(rng.integers(-30, 30, (rows, 1))).astype(np.float32)
        if _cuda_dispatch.has_warpgroups():
            assert jw.explain(x, weight.qt, experts="ids", platform="cuda").kernel == "ragged_resident"
        ids = rng.integers(-1, experts + 1, rows).astype(np.int32)
        ids[rows // 3 : rows // 3 + 11] = ids[0] = experts // 2
        y = jw.gather_matmul(x, weight.qt, jnp.asarray(ids), implementation="cuda", **epilogue)
        implementation = "cuda" if mode != "table" else None  # whose entries are rounded
        assert_rows(y, x, weight, ids, implementation=implementation, **epilogue)
        others = np.where(ids == ids[0], ids, rng.integers(-1, experts, rows)).astype(np.int32)
        found = jw.gather_matmul(x, weight.qt, jnp.asarray(others), implementation="cuda", **epilogue)
        np.testing.assert_array_equal(found[ids == ids[0]], y[ids == ids[0]])
        order, sizes = by_expert(ids, experts)
        in_order = jw.ragged_dot(x[order], weight.qt, jnp.asarray(sizes), implementation="cuda", **epilogue)
        np.testing.assert_array_equal(in_order, y[order])
        few = x[: max(rows // 4, 1), None]
        ids = rng.integers(-1, experts + 1, (len(few), 4)).astype(np.int32)
        y = jw.gather_matmul(few, weight.qt, jnp.asarray(ids), implementation="cuda", **epilogue)
        assert_rows(y, few, weight, ids, implementation=implementation, **epilogue)


@pytest.mark.parametrize("mode", [*MODES, "table"])
@pytest.mark.parametrize("group_size", [32, 128])
def test_few_float32_rows_far_apart(rng, mode, group_size):
    """Neighbours of orders of magnitude in one row, an expert's rows of different ones, and in others infinities and
    NaNs, which stay there."""
    k = 448 if group_size == 32 else 384
    weight = random_weight(rng, k, 136, group_size=group_size, mode=mode, lead=(8,))
    x = np.array(random_x(rng, (24, k)) * np.exp2(rng.integers(-60, 60, (24, 1))).astype(np.float32))
    x[::3] *= np.exp2(rng.integers(-12, 1, (8, k))).astype(np.float32)
    ids = rng.integers(0, 8, 24).astype(np.int32)
    clean = np.asarray(jw.gather_matmul(x, weight.qt, jnp.asarray(ids)))
    assert_rows(clean, x, weight, ids)
    x[5, k - 9], x[11, 7] = np.nan, np.inf
    y = np.asarray(jw.gather_matmul(x, weight.qt, jnp.asarray(ids)))
    assert np.isnan(y[5]).all()
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(y[11], np.inf * weight.dense[ids[11]][7])
    others = [i for i in range(24) if i not in (5, 11)]
    np.testing.assert_array_equal(y[others], clean[others])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", [*MODES, "table"])
def test_scales_of_the_other_type(rng, mode, dtype):
    """Many rows of an expert take them as float32, and then tiles."""
    other = {"float16": "bfloat16", "bfloat16": "float16"}[dtype]
    weight = random_weight(rng, 512, 264, group_size=64, mode=mode, scale_dtype=other, lead=(3,))
    for rows in (2, 1500):
        x, (sizes, ids) = random_x(rng, (rows, 512), dtype), sizes_of(rng, 3, rows)
        assert_rows(jw.ragged_dot(x, weight.qt, jnp.asarray(sizes)), x, weight, ids)
    if _cuda_dispatch.has_warpgroups():
        assert jw.explain(x, weight.qt, experts=True, platform="cuda").kernel == "ragged_tiled"


@pytest.mark.parametrize("mode", [*MODES, "table"])
@pytest.mark.parametrize("rows", [3, 60, 400, 1500])
def test_wide_results(rng, rows, mode):
    """float32 results of 16-bit rows are what 16-bit ones are rounded from, to the bit; in any order."""
    for n in (272, 1001, 520):
        weight = random_weight(rng, 256, n, group_size=int(rng.choice([32, 128])), mode=mode, lead=(5,))
        sizes, ids = sizes_of(rng, 5, rows)
        x, bias = random_x(rng, (rows, 256), "bfloat16"), random_x(rng, (5, n))
        ids = rng.permutation(ids)
        for product, of_rows in (jw.ragged_dot, sizes), (jw.gather_matmul, ids):
            wide, narrow = (
                product(x, weight.qt, jnp.asarray(of_rows), bias=bias, preferred_element_type=dtype)
                for dtype in (jnp.float32, None)
            )
            np.testing.assert_array_equal(wide.astype(jnp.bfloat16), narrow)
            assert not np.array_equal(wide, narrow.astype(jnp.float32))


@pytest.mark.parametrize("mode", [*MODES, "table"])
def test_rounded_activations(rng, mode):
    """With the default precision of float32 products those of bfloat16, where that is faster, to the bit."""
    weight = random_weight(rng, 256, 272, group_size=64, mode=mode, lead=(5,))
    for rows in (4, 30, 900):
        sizes, ids = sizes_of(rng, 5, rows)
        sizes, ids = jnp.asarray(sizes), jnp.asarray(ids)
        x = random_x(rng, (rows, 256))
        for product, of_rows in ((jw.ragged_dot, sizes), (jw.gather_matmul, ids)):
            y = product(x, weight.qt, of_rows, precision="default")
            used = x.astype(jnp.bfloat16) if rows > 10 else x
            np.testing.assert_array_equal(y, product(used, weight.qt, of_rows, preferred_element_type=jnp.float32))
            assert np.array_equal(y, product(x, weight.qt, of_rows)) == (rows == 4)
        dy = random_x(rng, (rows, 272))
        dx, exact = (
            jax.vjp(lambda x, p=p, s=sizes: jw.ragged_dot(x, weight.qt, s, precision=p), x)[1](dy)[0]
            for p in ("default", None)
        )
        error = np.abs(dx - exact).max() / np.abs(exact).max()
        rounds = rows == 900 or mode == "table"
        assert (error > 2.0**-12) == rounds and error < 2.0**-7


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
        assert_rows(y, x, weight, ids, implementation=held_to(x, weight, rows))


def test_rows_known_on_the_device_only(rng):
    check_rows_on_device(rng)


def test_non_finite_rows_stay_alone(rng):
    check_non_finite_rows(rng)


@pytest.mark.parametrize("mode", MODES)
def test_gradients(rng, mode):
    check_expert_gradients(rng, mode)


@partial(jax.jit, static_argnames=("k", "by_sizes", "implementation"))
def transposed(dy, qt, rows, k, by_sizes, implementation="cuda"):
    """``dy @ w.T`` of every row's expert, of sizes or of ids."""
    product = jw.ragged_dot if by_sizes else jw.gather_matmul
    x = jax.ShapeDtypeStruct((dy.shape[0], k), dy.dtype)
    return jax.linear_transpose(lambda x: product(x, qt, rows, implementation=implementation), x)(dy)[0]


def assert_transposed_rows(dx, dy, weight, ids):
    """Row by row in float64; 16-bit weights are rounded to the type of dy, as offsets are before they are added, and
    so is the result; before all a table, whose few roundings are no random walk."""
    if weight.qt.table is not None and dy.dtype != np.float32:
        weight = as_kernels_see_it(weight, str(dy.dtype))
    dy64, got = np.asarray(dy).astype(np.float64), np.asarray(dx).astype(np.float64)
    assert dx.dtype == dy.dtype and got.shape == (len(dy64), weight.dense.shape[1])
    worst = 0.0
    for e in range(len(weight.dense)):
        mine = ids == e
        w, magnitude = weight.dense[e].T, weight.magnitude[e].T
        exact = dy64[mine] @ w
        unit = 2.0 ** (-21 if weight.qt.table is None else -20)  # whose entries are two numbers each, too
        bound = unit * max(1.0, np.sqrt(dy64.shape[1]) / 8) * (np.abs(dy64[mine]) @ magnitude)
        if dy.dtype != np.float32:
            bound = bound + 3 * UNITS[str(dy.dtype)] * np.sqrt(dy64[mine] ** 2 @ weight.rounded[e].T ** 2)
        ratio = np.abs(got[mine] - exact) / (1.2 * bound + rounding(exact, dy.dtype) + 1e-7)
        worst = max(worst, ratio.max(initial=0.0))
    assert worst <= 1.0, worst
    assert (got[(ids < 0) | (ids >= len(weight.dense))] == 0).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_transposed_kernels(rng, bits, mode):
    for k, n, group_size, experts in SHAPES:
        weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode, lead=(experts,))
        for dtype in DTYPES:
            rows = int(rng.choice([2, 31, 100, 300, 1500]))
            sizes, ids = sizes_of(rng, experts, rows)
            dy = random_x(rng, (rows, n), dtype)
            assert_transposed_rows(transposed(dy, weight.qt, jnp.asarray(sizes), k, True), dy, weight, ids)
            ids = rng.integers(-1, experts + 1, rows).astype(np.int32)
            assert_transposed_rows(transposed(dy, weight.qt, jnp.asarray(ids), k, False), dy, weight, ids)


@pytest.mark.parametrize("sizes", [*ROWS, [40, 300, 0, 150]])
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
@pytest.mark.parametrize(("bits", "mode"), SCHEMES)
def test_transposed_float32_rows(rng, bits, mode, group_size, sizes):
    """As two numbers each, in tiles of both heights; orders of magnitude apart, as are groups of scales, and with the
    same bits whatever rows there are beside. Infinities and NaNs stay in their rows."""
    experts, rows, n = len(sizes), sum(sizes), int(rng.choice([72, 136, 400, 528]))
    scale_dtype = str(rng.choice(list(DTYPES)))
    weight = random_weight(
        rng, 384, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=scale_dtype, lead=(experts,)
    )
    dy = np.array(random_x(rng, (rows, n)) * np.exp2(rng.integers(-30, 30, (rows, 1))).astype(np.float32))
    ids = np.repeat(np.arange(experts), sizes).astype(np.int32)
    dx = transposed(dy, weight.qt, jnp.asarray(sizes, jnp.int32), 384, True)
    assert_transposed_rows(dx, dy, weight, ids)
    np.testing.assert_array_equal(transposed(dy, weight.qt, jnp.asarray(sizes, jnp.int32), 384, True), dx)
    order = rng.permutation(rows)
    gathered = partial(transposed, qt=weight.qt, k=384, by_sizes=False)
    np.testing.assert_array_equal(gathered(dy[order], rows=jnp.asarray(ids[order])), dx[order])
    if rows > 17 * experts:
        found = jw.explain(jnp.asarray(dy), weight.qt, experts="sizes", transpose=True, platform="cuda")
        assert found.kernel == "matmul_transposed_warpgroup"
        others = np.arange(rows) % 5 != 2
        with_inf = np.where(others[:, None], dy, 0)
        with_inf[2, 3], with_inf[7, 5] = np.inf, np.nan
        found = np.asarray(gathered(with_inf[order], rows=jnp.asarray(np.where(others, ids, experts - 1)[order])))
        found = found[np.argsort(order)]
        np.testing.assert_array_equal(found[others], np.asarray(dx)[others])
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(found[2], np.inf * weight.dense[experts - 1][:, 3])
        assert np.isnan(found[7]).all()


@pytest.mark.parametrize("far", [0.0, 2.0**-40, 2.0**20, 2.0**90])
@pytest.mark.parametrize("bits", [4, 8])
def test_transposed_float32_offsets_far_from_scales(rng, bits, far):
    """Offsets of groups that dwarf their scales, or that are nothing beside them; some scales are zero."""
    sizes, n = np.array([40, 0, 90]), 264
    weight = random_weight(rng, 512, n, bits=bits, group_size=128, mode="offsets", scale_dtype="float32", lead=(3,))
    scales = np.array(weight.qt.scales)
    scales[..., ::7] = 0
    offsets = weight.qt.offsets * np.array([[1.0], [far], [1.0], [far]], np.float32)
    qt = dataclasses.replace(weight.qt, scales=jnp.asarray(scales), offsets=offsets)
    ones = dataclasses.replace(qt, scales=jnp.ones_like(qt.scales), offsets=None)
    codes = np.asarray(jw.dequantize(ones), np.float64) + 2 ** (bits - 1)
    s, o = (np.repeat(np.asarray(a, np.float64), 128, 1) for a in (scales, offsets))
    dy = random_x(rng, (sizes.sum(), n), "float32")
    dx = np.asarray(transposed(dy, qt, jnp.asarray(sizes, jnp.int32), 512, True), np.float64)
    for expert, rows in enumerate(np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])):
        dy64 = np.asarray(dy, np.float64)[rows]
        exact = dy64 @ (codes * s + o)[expert].T
        bound = 2.0**-19 * (np.abs(dy64) @ (2**bits * s + np.abs(o))[expert].T) + 1e-7
        # Scales are exact to 2^-32 of a 64th of the largest offset.
        bound += 2.0**-38 * 2**bits * np.abs(dy64).sum(-1, keepdims=True) * np.abs(o[expert]).max(-1)
        assert (np.abs(dx[rows] - exact) <= bound).all(), np.max(np.abs(dx[rows] - exact) / bound)


@pytest.mark.parametrize(("rows", "share"), [(40, 0.9), (700, 0.5), (700, 1.0), (2000, 0.97)])
@pytest.mark.parametrize("implementation", [None, "cuda"])
def test_transposed_skewed(rng, rows, share, implementation):
    """One expert with most rows, others with few or none; the same bits each time."""
    weight = random_weight(rng, 640, 384, group_size=128, lead=(8,))
    ids = np.where(rng.random(rows) < share, 5, rng.integers(0, 8, rows)).astype(np.int32)
    dy = random_x(rng, (rows, 384), "bfloat16")
    dx = transposed(dy, weight.qt, jnp.asarray(ids), 640, False, implementation)
    assert_transposed_rows(dx, dy, weight, ids)
    order, sizes = by_expert(ids, 8)
    sorted_dx = transposed(dy[order], weight.qt, jnp.asarray(sizes), 640, True, implementation)
    assert_transposed_rows(sorted_dx, dy[order], weight, ids[order])
    for _ in range(10):
        np.testing.assert_array_equal(transposed(dy, weight.qt, jnp.asarray(ids), 640, False, implementation), dx)


@pytest.mark.parametrize(("experts", "rows"), [(600, 40), (600, 3000), (130, 9000), (2, 5000)])
def test_transposed_plans_of_a_kernel(rng, experts, rows):
    """Experts and rows for which CTAs do not plan for themselves."""
    one = random_weight(rng, 64, 40, group_size=32, mode="float_zeros", lead=(7,))
    of = rng.integers(0, 7, experts)
    weight = Weight(jax.tree.map(lambda a: a[of], one.qt), one.dense[of], one.magnitude[of])
    sizes, ids = sizes_of(rng, experts, rows)
    dy = random_x(rng, (rows, 40), "bfloat16")
    assert_transposed_rows(transposed(dy, weight.qt, jnp.asarray(sizes), 64, True), dy, weight, ids)
    order = rng.permutation(rows)
    dx = transposed(dy[order], weight.qt, jnp.asarray(ids[order]), 64, False)
    assert_transposed_rows(dx, dy[order], weight, ids[order])


@pytest.mark.parametrize("rows", [5, 90])
def test_transposed_batches_and_infinities(rng, rows):
    """Rows of dy that several weights share under vmap; an infinity stays in its row."""
    weight = random_weight(rng, 256, 136, group_size=64, mode="integer_zeros", lead=(3, 4))
    ids = rng.integers(-1, 5, rows).astype(np.int32)
    dy = np.asarray(random_x(rng, (rows, 136), "bfloat16")).copy()
    batched = jax.vmap(lambda qt: transposed(dy, qt, jnp.asarray(ids), 256, False))
    clean = batched(weight.qt)
    for i in range(3):
        of_batch = Weight(jax.tree.map(lambda a, i=i: a[i], weight.qt), weight.dense[i], weight.magnitude[i])
        assert_transposed_rows(clean[i], dy, of_batch, ids)
    ids[1] = 2
    clean = batched(weight.qt)
    dy[1, 7] = np.inf
    found = np.asarray(batched(weight.qt)).astype(np.float64)
    others = np.arange(rows) != 1
    np.testing.assert_array_equal(found[:, others], np.asarray(clean)[:, others].astype(np.float64))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(found[:, 1], np.inf * weight.dense[:, 2, :, 7])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("bits", "mode", "group_size"),
    [(4, "symmetric", 128), (4, "offsets", 32), (4, "integer_zeros", None), (8, "symmetric", 64), (4, "table", 64)],
)
@pytest.mark.parametrize("k", [1152, 976, 333])
@pytest.mark.parametrize("block", [64, 128, 256])
def test_transposed_blocks_of_all_heights(rng, bits, mode, group_size, dtype, block, k):
    """Blocks of up to 64, 128 or 256 rows, of which as many are multiplied as there are: what was in the place of the
    others before, as here NaN, changes nothing, and neither do an expert's other rows. 976 inputs are whole pairs of
    blocks, 333 are not whole rows of 16 bytes."""
    if group_size is not None and k % group_size:
        group_size = None
    sizes = np.array([256, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 257, 0, 320, 511], np.int32)
    if block < 256:
        sizes = np.minimum(sizes, block)
    if block == 64:  # for 49 rows of an expert; with 128 they are 100, with 256 172
        sizes[5::4] = 7
    options = {"bits": bits, "group_size": group_size, "mode": mode, "lead": (len(sizes),)}
    weight = random_weight(rng, k, 208, scale_dtype=str(rng.choice([dtype, "float32"])), **options)
    rows = int(sizes.sum()) + 5
    ids = np.repeat(np.arange(len(sizes) + 1), [*sizes, 5])
    dy = np.array(random_x(rng, (rows, 208), dtype))
    dy[ids == 0] = np.nan
    dx = np.asarray(transposed(jnp.asarray(dy), weight.qt, jnp.asarray(sizes), k, True))
    assert np.isnan(dx[ids == 0]).all()
    finite = ids > 0
    assert_transposed_rows(dx[finite], dy[finite], weight, ids[finite])
    # A third of the rows, or so many that they are not streamed.
    some = -(-3 * sizes // 4) if block == 64 else -(-sizes // 3)
    part = [i for e, size in enumerate(some) for i in np.flatnonzero(ids == e)[: int(size)]]
    fewer = transposed(jnp.asarray(dy[part]), weight.qt, jnp.asarray(some), k, True)
    # In float64, where NumPy takes NaN as equal.
    np.testing.assert_array_equal(np.asarray(fewer).astype(np.float64), dx[part].astype(np.float64))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("bits", "mode", "group_size"), [(4, "symmetric", 128), (8, "offsets", 64)])
@pytest.mark.parametrize(("k", "tokens", "top"), [(640, 300, 2), (333, 90, 3), (1022, 700, 2), (256, 20, 4)])
def test_gradients_of_shared_rows_add_up(rng, k, tokens, top, bits, mode, group_size, dtype):
    """What several experts contribute to a token's cotangent is added in float32, and rounded once."""
    weight = random_weight(
        rng, k, 136, bits=bits, group_size=group_size if k % 128 == 0 else None, mode=mode, lead=(6,)
    )
    ids = rng.integers(-1, 7, (tokens, top)).astype(np.int32)
    dy = random_x(rng, (tokens * top, 136), dtype).reshape(tokens, top, 136)
    x = jax.ShapeDtypeStruct((tokens, k), dy.dtype)
    product = jax.linear_transpose(lambda x: jw.gather_matmul(x[:, None], weight.qt, jnp.asarray(ids)), x)
    (dx,) = jax.jit(product)(dy)
    rows = jax.linear_transpose(
        lambda x: jw.gather_matmul(x, weight.qt, jnp.asarray(ids.reshape(-1))),
        jax.ShapeDtypeStruct((tokens * top, k), dy.dtype),
    )
    (each,) = jax.jit(rows)(dy.reshape(-1, 136))
    assert_transposed_rows(each, dy.reshape(-1, 136), weight, ids.reshape(-1))
    each = np.asarray(each).astype(np.float64).reshape(tokens, top, k)
    bound = 1.1 * UNITS[dtype] * (np.abs(each).sum(1) + np.abs(each.sum(1))) + 1e-6
    assert dx.dtype == dy.dtype
    assert (np.abs(np.asarray(dx).astype(np.float64) - each.sum(1)) <= bound).all()


@pytest.mark.parametrize("rows", [6, 400])
def test_gradient_is_one_call(rng, rows):
    """No dense weight is made for jax.grad."""
    weight = random_weight(rng, 640, 384, group_size=128, lead=(4,))
    x, dy = random_x(rng, (rows, 640), "bfloat16"), random_x(rng, (rows, 384), "bfloat16")
    sizes, ids = sizes_of(rng, 4, rows)

    def dx(x, dy, qt, sizes):
        return jax.vjp(lambda x: jw.ragged_dot(x, qt, sizes), x)[1](dy)[0]

    compiled = jax.jit(dx).lower(x, dy, weight.qt, jnp.asarray(sizes)).compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="wonly_ragged_matmul_transposed_v1"') == 1
    assert "640,384]" not in text and "384,640]" not in text
    assert_transposed_rows(compiled(x, dy, weight.qt, jnp.asarray(sizes)), dy, weight, ids)


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
