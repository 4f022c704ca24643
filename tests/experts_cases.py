"""Checks of experts' products that the CPU and the GPU tests share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from matmul_cases import rounds_weights
from reference import UNITS, activate, random_weight, random_x, rounding

import jax_wonly as jw


def exact(x, weight, ids, bias=None, activation=None):
    """The definition, row by row, in float64, and the magnitudes that are added up; ids broadcast with x's rows."""
    shape = np.broadcast_shapes(x.shape[:-1], ids.shape)
    x64 = np.broadcast_to(np.asarray(x).astype(np.float64), (*shape, x.shape[-1]))
    ids = np.broadcast_to(ids, shape)
    y = np.zeros((*shape, weight.dense.shape[-1]))
    magnitude = np.zeros_like(y)
    for i in np.ndindex(*shape):
        if 0 <= ids[i] < len(weight.dense):
            y[i] = x64[i] @ weight.dense[ids[i]]
            magnitude[i] = np.abs(x64[i]) @ weight.magnitude[ids[i]]
            if bias is not None:
                b = np.asarray(bias).astype(np.float64)
                y[i] += b if b.ndim == 1 else b[ids[i]]
    return activate(y, activation), magnitude


def assert_rows(y, x, weight, ids, *, implementation=None, **epilogue):
    expected, magnitude = exact(x, weight, np.asarray(ids), **epilogue)
    # float32 rows meet a table's entries as two numbers each, too.
    unit = 2.0 ** (-20 if weight.qt.table is None else -19)
    bound = unit * magnitude + rounding(expected, y.dtype) + 4e-6 * (1 + np.abs(expected))
    if rounds_weights(implementation) and str(x.dtype) != "float32":
        # A weight changes by a unit at most, many together by half of that. Of a table an entry, a float32 scale and
        # their product may each be rounded; with float zeros and offsets a float32 scale, its product with the code
        # less the middle one, what is left of the weight, and their sum.
        qt, roundings = weight.qt, 1 if weight.qt.table is None else 3
        shift = qt.offsets if qt.zeros is None else qt.zeros
        if shift is not None and shift.dtype != np.uint8:
            middle = np.repeat(np.asarray(qt.scales, np.float64), qt.group_size, -2) * 2.0 ** (qt.bits - 1)
            roundings, magnitude = 2, exact(x, dataclasses.replace(weight, magnitude=weight.magnitude + middle), ids)[1]
        roundings *= 0.5 + 0.5 / np.sqrt(x.shape[-1])
        bound = bound + roundings * UNITS[str(x.dtype)] * magnitude
    error = np.abs(np.asarray(y).astype(np.float64) - expected)
    assert y.shape == expected.shape and (error <= bound).all(), np.max(error / bound)
    none = (np.asarray(ids) < 0) | (np.asarray(ids) >= len(weight.dense))
    none = np.broadcast_to(none, expected.shape[:-1])
    assert (np.asarray(y)[none] == 0).all()


def sizes_of(rng, experts, rows):
    """Sizes with empty experts that leave some rows over, and the expert of each row."""
    cuts = np.sort(rng.integers(0, rows + 1, experts))
    sizes = np.diff(cuts, prepend=0)[rng.permutation(experts)].astype(np.int32)
    ids = np.full(rows, experts, np.int32)
    ids[: sizes.sum()] = np.repeat(np.arange(experts), sizes)
    return sizes, ids


def by_expert(ids, experts):
    """The order of rows by their experts, those without one last, and the experts' sizes."""
    none = (ids < 0) | (ids >= experts)
    sizes = np.bincount(ids[~none], minlength=experts).astype(np.int32)
    return np.argsort(np.where(none, experts, ids), kind="stable"), sizes


def check_ragged_dot(
    rng, *, experts, rows, k, n, group_size, bits, mode, dtype, activation=None, bias=None, implementation=None
):
    """Sizes with empty experts and rows left over."""
    weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode, lead=(experts,))
    sizes, ids = sizes_of(rng, experts, rows)
    x = random_x(rng, (rows, k), dtype)
    b = None if bias is None else random_x(rng, (n,) if bias == "shared" else (experts, n))
    y = jw.ragged_dot(x, weight.qt, jnp.asarray(sizes), bias=b, activation=activation, implementation=implementation)
    assert_rows(y, x, weight, ids, bias=b, activation=activation, implementation=implementation)


def check_gather_matmul(rng, *, experts, x_lead, ids_lead, bits, mode, dtype, implementation=None, k=128, n=70):
    """Ids in any order, in and out of range, that broadcast with the rows either way."""
    weight = random_weight(rng, k, n, bits=bits, group_size=64, mode=mode, lead=(experts,))
    x = random_x(rng, (*x_lead, k), dtype)
    ids = rng.integers(-1, experts + 1, ids_lead).astype(np.int32)
    bias = random_x(rng, (experts, n))
    y = jw.gather_matmul(x, weight.qt, jnp.asarray(ids), bias=bias, implementation=implementation)
    assert_rows(y, x, weight, ids, bias=bias, implementation=implementation)


def check_rows_on_device(rng, implementation=None):
    """Sizes beyond the rows are cut off, negative ones are none, and huge ids are no expert."""
    weight = random_weight(rng, 64, 70, group_size=32, lead=(4,))
    x = random_x(rng, (6, 64))
    for sizes, ids in [
        ([2, 9, 1, 1], [0, 0, 1, 1, 1, 1]),
        ([2, -3, 1, 1], [0, 0, 2, 3, 9, 9]),
        ([2**31 - 1, 2**31 - 1, 1, 2**31 - 1], [0] * 6),
        ([0, 0, 0, 0], [9] * 6),
    ]:
        y = jw.ragged_dot(x, weight.qt, jnp.asarray(sizes, jnp.int32), implementation=implementation)
        assert_rows(y, x, weight, np.asarray(ids), implementation=implementation)
    ids = jnp.asarray([-(2**31), 2**31 - 1, 3, 4, 0, 1], jnp.int32)
    y = jw.gather_matmul(x, weight.qt, ids, implementation=implementation)
    assert_rows(y, x, weight, ids, implementation=implementation)
    y = jw.gather_matmul(x, weight.qt, jnp.asarray([0, 2**32 - 1, 1, 2, 3, 4], jnp.uint32))
    assert_rows(y, x, weight, np.asarray([0, -1, 1, 2, 3, 4]))


def check_non_finite_rows(rng, implementation=None):
    weight = random_weight(rng, 64, 70, group_size=32, lead=(4,))
    x = np.asarray(random_x(rng, (9, 64))).copy()
    ids = jnp.asarray(rng.integers(0, 4, 9), jnp.int32)
    clean = np.asarray(jw.gather_matmul(x, weight.qt, ids, implementation=implementation))
    x[3, 5], x[7, 1] = np.nan, np.inf
    y = np.asarray(jw.gather_matmul(x, weight.qt, ids, implementation=implementation))
    others = [i for i in range(9) if i not in (3, 7)]
    np.testing.assert_array_equal(y[others], clean[others])
    assert np.isnan(y[3]).all() and not np.isfinite(y[7]).any()


def check_expert_gradients(rng, mode, implementation=None):
    """Every cotangent against the float64 formula."""
    experts, m = 4, 11
    weight = random_weight(rng, 64, 35, group_size=32, mode=mode, lead=(experts,))
    qt = weight.qt
    x, bias = random_x(rng, (m, 64)), random_x(rng, (experts, 35))
    ids = rng.integers(-1, experts + 1, (m, 2)).astype(np.int32)
    floats = {
        name: a
        for name in ("scales", "zeros", "offsets")
        if (a := getattr(qt, name)) is not None and jnp.issubdtype(a.dtype, jnp.floating)
    }
    arrays = {"qvalue": qt.qvalue, "scales": qt.scales, "zeros": qt.zeros, "offsets": qt.offsets}

    def f(x, floats, bias):
        qt = jw.QuantizedTensor(**(arrays | floats), bits=4, k=64, n=35)
        return jw.gather_matmul(x[:, None], qt, jnp.asarray(ids), bias=bias, implementation=implementation)

    y, vjp = jax.vjp(f, x, floats, bias)
    dy = random_x(rng, y.shape)
    dx, dfloats, dbias = vjp(dy)
    dx64, dw, db = np.zeros((m, 64)), np.zeros((experts, 64, 35)), np.zeros((experts, 35))
    for r in range(m):
        for j in range(2):
            if 0 <= (e := ids[r, j]) < experts:
                g = np.asarray(dy[r, j], np.float64)
                dx64[r] += weight.dense[e] @ g
                dw[e] += np.outer(np.asarray(x[r], np.float64), g)
                db[e] += g
    np.testing.assert_allclose(dx, dx64, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(dbias, db, rtol=1e-4, atol=1e-3)
    per_group = dw.reshape(experts, 2, 32, 35)
    codes = np.asarray(jw.unpack(qt.qvalue, 4, 64, 35)).astype(np.float64).reshape(per_group.shape)
    zero = 0 if qt.offsets is not None else 8
    zero = zero if qt.zeros is None else np.asarray(qt.zeros, np.float64)[..., None, :]
    close = {"rtol": 1e-4, "atol": 1e-4 * np.abs(per_group).sum(-2).max() * 16}
    np.testing.assert_allclose(dfloats["scales"], (per_group * (codes - zero)).sum(-2), **close)
    if "zeros" in floats:
        np.testing.assert_allclose(dfloats["zeros"], -per_group.sum(-2) * np.asarray(qt.scales, np.float64), **close)
    if "offsets" in floats:
        np.testing.assert_allclose(dfloats["offsets"], per_group.sum(-2), **close)
