"""The quantizers of jax_wonly.algorithms, against plain float64 NumPy."""

import math
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import quantize_cases
import reference

import jax_wonly as jw
import jax_wonly.algorithms as algorithms
from jax_wonly.algorithms import absmax, awq, gptq, hqq, minmax, mse, output_error, second_moments
from jax_wonly.compat import PermutedTensor


def problem(rng, k=96, n=19, tokens=200, dtype="float32"):
    """A weight, and inputs that are correlated, unequal in size and not centred; one is always zero."""
    mix = np.eye(k) + rng.normal(0, 0.5, (k, k)) / np.sqrt(k) * 2
    x = (rng.normal(0.3, 1, (tokens, k)) @ mix) * np.exp(rng.normal(0, 1, k))
    x[:, k // 3] = 0
    return rng.standard_t(4, (k, n)).astype(reference.DTYPES[dtype]), x.astype(np.float32)


def grid_of(rows, bits, mode, dtype="float32"):
    """Scales and shift ``[N]`` in float64 of the extremes of ``rows [size, N]``, by the definition of quantize."""
    _, scales, shift = reference.quantize(rows, bits, None, mode, reference.DTYPES[dtype])
    return scales[0].astype(np.float64), None if shift is None else shift[0].astype(np.float64)


def position(w, scales, shift, bits, mode):
    """Where a weight lies among the codes, before it is rounded and clipped."""
    scales = np.where(scales == 0, 1, scales)
    if mode == "offsets":
        return (w - shift) / scales
    return w / scales + (2.0 ** (bits - 1) if shift is None else shift)


def value(codes, scales, shift, bits, mode):
    if mode == "offsets":
        return codes * scales + shift
    return (codes - (2.0 ** (bits - 1) if shift is None else shift)) * scales


def rounded(w, bits, mode, dtype="float32", share=1.0):
    """``w [size, N]`` in float64 as one group, its extremes clipped to a share of their distance to zero."""
    lo, hi = w.min(0), w.max(0)
    if mode == "symmetric":
        hi = np.abs(w).max(0)
        lo = -hi
    elif mode == "integer_zeros":
        lo, hi = np.minimum(lo, 0), np.maximum(hi, 0)
    anchor = np.clip(0, lo, hi)
    ends = np.stack([anchor + share * (lo - anchor), anchor + share * (hi - anchor)])
    scales, shift = grid_of(ends.astype(np.float32), bits, mode, dtype)
    codes = np.clip(np.rint(position(w, scales, shift, bits, mode)), 0, 2**bits - 1)
    return value(codes, scales, shift, bits, mode)


def dense_of(weight):
    return np.asarray(weight.dequantize(jnp.float32), np.float64)


def moments_of(x):
    x = x.astype(np.float64)
    return x.T @ x / len(x)


# Metrics.


def test_second_moments(rng):
    x = rng.normal(0.3, 1, (3, 50, 7)).astype(np.float32)
    expected = np.einsum("eti,etj->eij", x.astype(np.float64), x.astype(np.float64)) / 50
    np.testing.assert_allclose(second_moments(x), expected, rtol=1e-5, atol=1e-6)
    long = rng.normal(0.3, 1, (40000, 5)).astype(ml_dtypes.bfloat16)
    np.testing.assert_allclose(second_moments(long), moments_of(long), rtol=1e-5, atol=1e-5)


def test_output_error_is_that_of_the_outputs(rng):
    w, x = problem(rng)
    qt = jw.quantize(w, group_size=32)
    exact, got = (x.astype(np.float64) @ a for a in (w.astype(np.float64), dense_of(qt)))
    expected = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    assert output_error(w, qt, second_moments(x)) == pytest.approx(expected, rel=1e-4)
    assert output_error(w, qt.dequantize(), second_moments(x)) == pytest.approx(expected, rel=1e-4)
    expected = np.linalg.norm(dense_of(qt) - w) / np.linalg.norm(w)
    assert output_error(w, qt) == pytest.approx(expected, rel=1e-4)
    assert output_error(w, w) == 0 and output_error(np.zeros_like(w), np.zeros_like(w)) == 0


# Without calibration.


@pytest.mark.parametrize("mode", reference.MODES)
def test_absmax_and_minmax_are_quantize(rng, mode):
    w, _ = problem(rng, dtype="bfloat16")
    options = {"bits": 8, "group_size": 32, "scale_dtype": jnp.float32}
    got = absmax(w, **options) if mode == "symmetric" else minmax(w, mode=mode, **options)
    for a, b in zip(got, jw.quantize(w, mode=mode, **options), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "mode,weighted", [("symmetric", True), ("integer_zeros", False), ("float_zeros", True), ("offsets", False)]
)
def test_clip_search_finds_the_best_share(rng, mode, weighted):
    w, x = problem(rng, k=64)
    moments = moments_of(x) if weighted else None
    got = dense_of(mse(w, None if moments is None else moments.astype(np.float32), group_size=32, mode=mode))
    for g in range(2):
        rows = slice(32 * g, 32 * g + 32)
        matrix = np.eye(32) if moments is None else moments[rows, rows]

        def error(dense, rows=rows, matrix=matrix):
            d = dense - w[rows]
            return np.einsum("in,ij,jn->n", d, matrix, d)

        tried = [error(rounded(w[rows].astype(np.float64), 4, mode, share=s)) for s in np.linspace(1, 0.5, 25)]
        np.testing.assert_allclose(error(got[rows]), np.min(tried, 0), rtol=2e-3)
        assert (error(got[rows]) < 0.98 * tried[0]).any()  # the search does something


def test_hqq_is_the_half_quadratic_iteration(rng):
    w = rng.standard_t(4, (96, 40)).astype(np.float32)
    got = hqq(w, group_size=32)
    scales, best, least, first = [], [], [], []
    for g in range(3):
        rows = w[32 * g : 32 * g + 32].astype(np.float64)
        s, z = grid_of(rows.astype(np.float32), 4, "float_zeros")
        tried = []
        for i in range(21):
            codes = np.clip(np.rint(rows / s + z), 0, 15)
            errors = rows / s - (codes - z)
            tried.append(((np.abs(errors) ** 0.7).sum(0), z))
            threshold = np.maximum(np.abs(errors), 1e-30) ** -0.3 / (10 * 1.01**i)
            z = (codes - rows / s + np.sign(errors) * np.maximum(np.abs(errors) - threshold, 0)).mean(0)
        norms = np.stack([t[0] for t in tried])
        scales.append(s)
        least.append(norms.min(0))
        first.append(norms[0])
        best.append(np.stack([t[1] for t in tried])[norms.argmin(0), np.arange(40)])
    np.testing.assert_allclose(got.scales, scales, rtol=1e-6)
    errors = (w - dense_of(got)) / np.repeat(scales, 32, 0)
    norms = (np.abs(errors) ** 0.7).reshape(3, 32, 40).sum(1)
    assert (norms <= np.stack(first) * (1 + 1e-5)).all()
    assert norms.sum() < 0.98 * np.sum(first)
    # A code at a tie, or two iterations as good as each other, may part from float64.
    close = np.abs(norms / np.stack(least) - 1) < 1e-3
    assert close.mean() > 0.9, close.mean()
    assert (np.abs(got.zeros - np.stack(best)) < 1e-3).mean() > 0.8
    np.testing.assert_array_equal(hqq(w * 8, group_size=32).qvalue, got.qvalue)


def test_hqq_leaves_what_is_exact(rng):
    w = np.zeros((64, 3), np.float32)
    w[:, 1], w[:, 2] = 0.75, np.arange(64) % 16
    np.testing.assert_array_equal(hqq(w, group_size=64).dequantize(), w)


# AWQ.


def test_awq_finds_the_best_exponent(rng, mode="symmetric", group_size=32):
    w, x = problem(rng)
    moments, w64 = moments_of(x), w.astype(np.float64)
    size = np.sqrt(np.diagonal(moments))
    size = np.maximum(size / size.max(), 1e-4)

    def error(dense):
        d = dense - w64
        return np.einsum("in,ij,jn->", d, moments, d)

    tried = []
    for exponent in np.arange(20) / 20:
        factors = size**exponent
        factors = (factors / np.sqrt(factors.max() * factors.min()))[:, None]
        scaled = (w64 * factors).reshape(-1, group_size or len(w), w.shape[1])
        tried.append(error(np.concatenate([rounded(g, 4, mode) for g in scaled]) / factors))
    options = {"group_size": group_size, "mode": mode}
    plain = awq(w, second_moments(x), clip=False, **options)
    assert error(dense_of(plain)) == pytest.approx(min(tried), rel=0.02)  # codes at ties
    nearest = error(dense_of(jw.quantize(w, **options)))
    assert tried[0] == pytest.approx(nearest, rel=0.02) and error(dense_of(plain)) < 0.9 * nearest
    assert error(dense_of(awq(w, second_moments(x), **options))) <= error(dense_of(plain)) * 1.0001


def test_scaled_tensors_multiply_the_inputs(rng):
    w, x = problem(rng)
    st = awq(w, second_moments(x), group_size=32)
    assert st.shape == w.shape and st.ndim == 2 and st.dtype == np.float32 and "int4" in repr(st)
    assert st.nbytes == st.weight.nbytes + 4 * 96
    np.testing.assert_allclose(dense_of(st), dense_of(st.weight) * np.asarray(st.input_scale)[:, None], rtol=1e-6)
    y = jax.jit(lambda x, st: x @ st)(x, st)
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(dense_of(st))
    assert (np.abs(y - x.astype(np.float64) @ dense_of(st)) <= 1e-5 * magnitude).all()
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), st)
    np.testing.assert_allclose(stacked.matmul(x, bias=jnp.ones(19)), np.stack([y, y]) + 1, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="x has shape|K="):
        st.matmul(x[:, :-1])


# GPTQ.


def check_gptq(w, x, weight, *, bits=4, group_size=None, mode="symmetric", act_order=False, damping=0.01):
    """Follows the codes with the textbook's algorithm in float64: each is the nearest to what is then left of its
    weight, but for ties, and each group's grid is that of what is left at its first input."""
    k, n = w.shape
    size = group_size or k
    h = moments_of(x)
    dead = np.diagonal(h) == 0
    left = np.where(dead[:, None], 0, w.astype(np.float64))
    order = np.argsort(-np.diagonal(h).astype(np.float32), kind="stable") if act_order else np.arange(k)
    grids = None
    if act_order == "static" or group_size is None:
        grids = [grid_of(left[i : i + size].astype(np.float32), bits, mode) for i in range(0, k, size)]
    stored = weight.weight if isinstance(weight, PermutedTensor) else weight
    codes = np.asarray(jw.unpack(stored.qvalue, bits, k, n)).astype(np.float64)
    if act_order is True:
        np.testing.assert_array_equal(weight.permutation, order)
    elif act_order:
        codes = codes[order]
    np.fill_diagonal(h, np.where(dead, np.diagonal(h).mean(), np.diagonal(h)))
    left, h = left[order], h[np.ix_(order, order)]
    h += damping * np.diagonal(h).mean() * np.eye(k)
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    shifts = stored.zeros if stored.offsets is None else stored.offsets
    off = 0
    for i in range(k):
        g = order[i] // size if act_order == "static" else i // size
        if grids is None and i % size == 0:
            grid = grid_of(left[i : i + size].astype(np.float32), bits, mode)
        elif grids is not None:
            grid = grids[g]
        # The grid that was stored: half a step more or less of an integer zero may go either way.
        scales = np.asarray(stored.scales[g], np.float64)
        shift = None if shifts is None else np.asarray(shifts[g], np.float64)
        np.testing.assert_allclose(scales, grid[0], rtol=1e-3)
        if shift is not None:
            assert (np.abs(shift - grid[1]) <= (1 if mode == "integer_zeros" else 2e-2)).all()
        place = np.clip(position(left[i], scales, shift, bits, mode), 0, 2**bits - 1)
        assert (np.abs(codes[i] - place) < 0.5 + 0.01).all(), (i, np.abs(codes[i] - place).max())
        off += (codes[i] != np.clip(np.rint(place), 0, 2**bits - 1)).sum()
        error = (left[i] - value(codes[i], scales, shift, bits, mode)) / upper[i, i]
        left[i:] -= upper[i, i:, None] * error
    assert off <= 2 + 0.002 * codes.size, f"{off} of {codes.size} codes are not the nearest"


@pytest.mark.parametrize(
    "k,group_size,bits,mode,act_order",
    [
        (96, 32, 4, "symmetric", False),
        (128, 64, 4, "float_zeros", "static"),
        (77, None, 8, "offsets", False),
        (150, None, 4, "integer_zeros", True),
    ],
)
def test_gptq_is_the_textbooks(rng, k, group_size, bits, mode, act_order):
    w, x = problem(rng, k=k, tokens=2 * k)
    options = {"bits": bits, "group_size": group_size, "mode": mode, "act_order": act_order}
    weight = gptq(w, second_moments(x), clip=False, **options)
    assert isinstance(weight, PermutedTensor) == (act_order is True) and weight.shape == w.shape
    check_gptq(w, x, weight, **options)


@pytest.mark.parametrize("mode", ["symmetric", "float_zeros"])
def test_gptq_of_uncorrelated_inputs_is_round_to_nearest(rng, mode):
    w = jnp.asarray(quantize_cases.awkward_weight(rng, 64, 33, "float32"))
    got = gptq(w, jnp.diag(jnp.arange(1.0, 65)), group_size=32, mode=mode, clip=False)
    for a, b in zip(got, jw.quantize(w, group_size=32, mode=mode), strict=True):
        np.testing.assert_array_equal(a, b)


def test_gptq_with_fewer_inputs_than_weights_and_no_damping_to_speak_of(rng):
    for damping in (1e-12, 1e-2):  # the first is raised until there is a Cholesky factor
        errors = []
        for _ in range(7):  # of one in 200 with so little damping the changes outgrow the groups' grids
            w, x = problem(rng, tokens=20)
            weights = gptq(w, second_moments(x), group_size=32, damping=damping), jw.quantize(w, group_size=32)
            errors.append([output_error(w, weight, second_moments(x)) for weight in weights])
        ours, nearest = np.array(errors).T
        assert np.median(ours / nearest) < 0.8
    nothing = gptq(w, jnp.zeros((96, 96)), group_size=32)
    np.testing.assert_array_equal(nothing.dequantize(), 0)  # no input was ever other than zero


def test_errors_on_held_out_inputs(rng):
    w, x = problem(rng, tokens=1200)
    moments, unseen = second_moments(x[:600]), second_moments(x[600:])
    nearest = output_error(w, absmax(w, group_size=32), unseen)
    for algorithm in (awq, gptq):
        assert output_error(w, algorithm(w, moments, group_size=32), unseen) < 0.9 * nearest


# All of them.

METHODS: dict[str, Callable] = {
    "hqq": lambda w, m, **o: hqq(w, **o),
    "gptq": lambda w, m, **o: gptq(w, m, act_order="static", **o),
}


@pytest.mark.parametrize("method", METHODS)
def test_stacked_weights_and_jit(rng, method):
    ws, xs = zip(*(problem(rng, k=32, n=9, dtype="bfloat16") for _ in range(2)), strict=True)
    moments = jnp.stack([second_moments(x) for x in xs])
    stacked = METHODS[method](jnp.stack(ws), moments, group_size=32)
    assert stacked.shape == (2, 32, 9) and stacked.dtype == jnp.bfloat16
    again = METHODS[method](jnp.stack(ws), moments, group_size=32)
    for a, b in zip(jax.tree.leaves(stacked), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    jax.eval_shape(lambda w, m: METHODS[method](w, m, group_size=32), jnp.stack(ws), moments)  # nothing needs values
    for i, w in enumerate(ws):
        own = METHODS[method](w, moments[i], group_size=32)
        # Products of a stack may add up in another order.
        d = np.abs(dense_of(own) - dense_of(stacked)[i])
        assert (d > 0).mean() < 0.02, (d > 0).mean()


W = np.ones((64, 8), np.float32)
M = np.eye(64, dtype=np.float32)


@pytest.mark.parametrize(
    "call,error,match",
    [
        (lambda: second_moments(np.ones(3, np.float32)), ValueError, r"x has shape \(3,\)"),
        (lambda: second_moments(np.ones((2, 3), np.int32)), TypeError, "x has dtype int32"),
        (lambda: second_moments(np.full((2, 3), np.nan, np.float32)), ValueError, "x .* holds NaN"),
        (lambda: minmax(W, mode="symmetric"), ValueError, "that of absmax"),
        (lambda: mse([1, 2]), TypeError, "w is a list"),
        (lambda: mse(W, group_size=48), ValueError, "group_size=48"),
        (lambda: mse(W, bits=3), ValueError, "bits=3"),
        (lambda: mse(W, mode="absmax"), ValueError, "mode='absmax'"),
        (lambda: mse(W * np.inf, group_size=32), ValueError, "w .* holds NaN or Inf"),
        (lambda: mse(W[0]), ValueError, r"w has shape \(8,\)"),
        (lambda: mse(W, M[:3], group_size=32), ValueError, r"moments has shape \(3, 64\)"),
        (lambda: hqq(W, group_size=32, norm=0), ValueError, "norm=0 is out of range"),
        (lambda: hqq(W, group_size=32, iterations=-1), ValueError, "iterations=-1"),
        (lambda: awq(W, None, group_size=32), TypeError, "moments is a NoneType"),
        (lambda: awq(W, M * np.nan, group_size=32), ValueError, "moments .* holds NaN"),
        (lambda: awq(W, -M, group_size=32), ValueError, "negative diagonal"),
        (lambda: awq(W, M[None], group_size=32), ValueError, r"moments has shape \(1, 64, 64\)"),
        (lambda: gptq(W, M, group_size=32, damping=0), ValueError, "damping=0"),
        (lambda: gptq(W, M, group_size=32, damping="much"), ValueError, "damping='much'"),
        (lambda: gptq(W, M, group_size=32, act_order="yes"), ValueError, "act_order='yes'"),
        (lambda: gptq(W[None], M, group_size=32, act_order=True), ValueError, "act_order=True with w"),
        (lambda: output_error(W, W[:3]), ValueError, r"weight has shape \(3, 8\)"),
        (lambda: algorithms.nothing, AttributeError, "no attribute 'nothing'"),
    ],
)
def test_bad_input(call, error, match):
    with pytest.raises(error, match=match):
        call()


# Models.

nnx = pytest.importorskip("flax.nnx")


class Model(nnx.Module):
    """Layers of every kind, one of them never called, and state that a call changes."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.a, self.b = (nnx.Linear(64, 64, rngs=rngs) for _ in range(2))
        self.general = nnx.LinearGeneral((4, 16), (2, 32), axis=(-2, -1), rngs=rngs)
        self.einsum = nnx.Einsum("btd,dhk->bthk", (64, 2, 32), (2, 32), rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.statistics = nnx.BatchNorm(64, rngs=rngs)
        self.unused = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x, seen=None):
        def see(path, value):
            if seen is not None:
                seen.setdefault(path, []).append(value)
            return value

        h = see("a", self.norm(x))
        h = nnx.gelu(self.a(h)) * self.b(h)
        h = self.general(see("general", h.reshape(*h.shape[:-1], 4, 16))).reshape(x.shape)
        h = self.einsum(see("einsum", self.drop(h))).reshape(x.shape)
        return self.statistics(h) + x


class Stack(nnx.Module):
    """Layers that share one kernel with an axis of their own."""

    def __init__(self, rngs):
        keys = jax.random.split(rngs.params(), 3)
        self.layers = nnx.vmap(lambda key: nnx.Linear(64, 64, rngs=nnx.Rngs(params=key)))(keys)

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def model_and_batches(rng, count=3):
    size = np.exp(rng.normal(0, 1, 64))
    batches = [(rng.normal(0.3, 1, (2, 24, 64)) * size).astype(np.float32) for _ in range(count)]
    model = Model(nnx.Rngs(int(rng.integers(1000))))
    model.norm.scale[...] = np.exp(rng.normal(0, 1, 64)).astype(np.float32)  # so that inputs differ in size
    return model, batches


def keys_as_data(model):
    return jax.tree.map(
        lambda a: np.asarray(jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a),
        jax.tree.leaves(nnx.state(model)),
    )


def assert_same(a, b):
    for one, other in zip(keys_as_data(a), keys_as_data(b), strict=True):
        np.testing.assert_array_equal(one, other)


def quantize_model(model, batches=None, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "jax_wonly: no batch calls 1 layers")
        return algorithms.quantize_model(model, batches, group_size=32, **options)


def test_calibrate_records_what_layers_get(rng):
    model, batches = model_and_batches(rng)
    before, kind = nnx.clone(model), type(model.a)
    calibration = algorithms.calibrate(model, batches)
    assert_same(model, before)
    assert type(model.a) is kind and set(vars(model.a)) == set(vars(before.a))
    assert set(calibration) == {"a", "b", "general", "einsum"} and "unused" not in calibration
    assert calibration.counts == dict.fromkeys(calibration, 3 * 48)
    seen: dict[str, list] = {}
    for batch in batches:
        before(batch, seen)
    for path, values in seen.items():
        k = calibration[path].shape[-1]
        expected = moments_of(np.concatenate([np.asarray(v).reshape(-1, k) for v in values]))
        np.testing.assert_allclose(calibration[path], expected, rtol=1e-4, atol=1e-4 * expected.max(), err_msg=path)
    np.testing.assert_array_equal(calibration["a"], calibration["b"])
    some = algorithms.calibrate(model, batches, layers=["a"], jit=False, forward=lambda model, x: model.a(x))
    np.testing.assert_allclose(some["a"], moments_of(np.concatenate(batches).reshape(-1, 64)), rtol=1e-4, atol=1e-3)


def test_stacked_layers(rng):
    model, (_, batches) = Stack(nnx.Rngs(1)), model_and_batches(rng)
    calibration = algorithms.calibrate(model, batches)
    assert calibration.counts == {"layers": 3 * 48}
    x, kernels = np.concatenate(batches).reshape(-1, 64).astype(np.float64), np.asarray(model.layers.kernel[...])
    for i in range(3):
        expected = moments_of(x)
        np.testing.assert_allclose(calibration["layers"][i], expected, rtol=1e-4, atol=1e-4 * expected.max())
        x = x @ kernels[i]
    quantize_model(model, method="awq", calibration=calibration)
    assert model.layers.input_scale.shape == (3, 64)
    y = batches[0]
    for i in range(3):
        y = y @ np.asarray(model.layers.weight.dequantize()[i])
    np.testing.assert_allclose(model(batches[0]), y, rtol=1e-3, atol=1e-3 * np.abs(y).max())


@pytest.mark.parametrize("method", ["minmax", "hqq", "mse", "awq", "gptq"])
def test_models_by_every_method(rng, method, capsys):
    model, (x, *batches) = model_and_batches(rng, 4)
    batches = batches if method in ("mse", "awq", "gptq") else None
    dense = nnx.clone(model)
    report = quantize_model(model, batches, method=method, progress=True)
    assert {layer.path for layer in report.layers} == {"a", "b", "general", "einsum", "unused"}
    assert isinstance(model.a, jw.nnx.QuantizedLinear) and model.a.bias is not None
    assert f"{method}" in capsys.readouterr().err
    for layer in report.layers:
        # Which weights of small inputs AWQ makes worse than others would, so that outputs are better, has no bound.
        most = math.inf if method == "awq" else 0.25
        assert 0 < layer.relative_error < most and layer.bytes_after < layer.bytes_before
    if batches:
        assert 0 < min(report.output_errors.values()) and max(report.output_errors.values()) < 0.1
        calibration = algorithms.calibrate(dense, batches)
        assert set(report.output_errors) == set(calibration)
        expected = output_error(dense.a.kernel[...], getattr(model.a, "weight", model.a.kernel), calibration["a"])
        assert report.output_errors["a"] == pytest.approx(expected, rel=1e-3)
        nearest = output_error(dense.a.kernel[...], absmax(dense.a.kernel[...], group_size=32), calibration["a"])
        assert expected < nearest
        assert "outputs on the calibration data" in str(report)
    for m in (dense, model):
        m.eval()
    assert 0 < np.linalg.norm(model(x) - dense(x)) < 0.25 * np.linalg.norm(dense(x))


def test_scaled_and_permuted_layers_are_saved(rng, tmp_path):
    pytest.importorskip("safetensors")
    from jax_wonly import checkpoint

    model, batches = model_and_batches(rng)
    quantize_model(model, batches, method="awq", predicate=lambda path, _: {"method": "gptq"} if path == "b" else True)
    assert isinstance(model.a, algorithms.ScaledLinear) and not hasattr(model.b, "input_scale")
    checkpoint.save(tmp_path / "model.safetensors", model)
    loaded = checkpoint.load(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(loaded["a.input_scale"], model.a.input_scale[...])
    for a, b in zip(loaded["a.kernel"], model.a.weight.weight, strict=True):
        np.testing.assert_array_equal(a, b)
    x = np.ones((2, 64), np.float32)
    np.testing.assert_allclose(model.a(x), x @ model.a.weight.dequantize() + model.a.bias[...], rtol=1e-4, atol=1e-4)


def test_options_for_each_layer(rng):
    model, batches = model_and_batches(rng)
    answers = {"a": {"act_order": True, "bits": 8}, "b": {"method": "hqq"}}
    report = quantize_model(
        model, batches, embeddings=True, damping=0.1, predicate=lambda path, _: answers.get(path, path != "unused")
    )
    schemes = {layer.path: layer.scheme for layer in report.layers}
    assert schemes["a"] == "int8, group 32, act-order" and schemes["b"] == "int4, group 32, zeros"
    assert schemes["einsum"] == "int4, group 32"
    assert [skipped.path for skipped in report.skipped if "predicate" in skipped.reason] == ["unused"]
    x = np.ones((3, 64), np.float32)
    permuted = model.a.weight.dequantize()
    np.testing.assert_allclose(model.a(x), x @ permuted + model.a.bias[...], rtol=1e-4, atol=1e-4)


def test_results_are_resumed(rng, tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    from jax_wonly.algorithms import nnx as implementation

    dense, batches = model_and_batches(rng)
    # Three layers in a pass, so that later layers see what earlier ones have become.
    options = {
        "max_moment_bytes": 3 * 4 * 64 * 64,
        "predicate": lambda path, _: {"act_order": True} if path == "b" else True,
    }
    whole = nnx.clone(dense)
    quantize_model(whole, batches, **options)

    save, saved = implementation._Results.save, []

    def interrupted(self, task, folded, value):
        save(self, task, folded, value)
        saved.append(task.path)
        if len(saved) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(implementation._Results, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize_model(nnx.clone(dense), batches, store=tmp_path, **options)
    assert len(list(tmp_path.iterdir())) == 2
    resumed = nnx.clone(dense)
    report = quantize_model(resumed, batches, store=tmp_path, **options)
    assert len(saved) == len(set(saved)) == len(report.layers) == 5
    assert_same(resumed, whole)
    with pytest.raises(ValueError, match="of other weights or arguments"):
        quantize_model(nnx.clone(dense), batches, store=tmp_path, damping=0.5, **options)
    changed = nnx.clone(dense)
    changed.a.kernel[...] += 1
    with pytest.raises(ValueError, match="store=.*other weights"):
        quantize_model(changed, batches, store=tmp_path, **options)


def test_scales_are_folded_into_what_comes_before(rng):
    model, batches = model_and_batches(rng)
    calibration = algorithms.calibrate(model, batches)
    dense = nnx.clone(model)
    moved = algorithms.fold_input_scales(model, {"norm": ["a", "b"]}, calibration, group_size=32, batch=batches[0])
    factor = np.asarray(model.norm.scale[...] / dense.norm.scale[...])
    assert factor.std() > 0
    np.testing.assert_allclose(model.a.kernel[...] * factor[:, None], dense.a.kernel[...], rtol=1e-5, atol=1e-7)
    again = algorithms.calibrate(model, batches)
    for path in calibration:
        np.testing.assert_allclose(again[path], moved[path], rtol=1e-3, atol=1e-3 * float(moved[path].max()))
    folded = nnx.clone(dense)
    report = quantize_model(folded, batches, method="awq", fold={"norm": ["a", "b"]})
    assert type(folded.a) is jw.nnx.QuantizedLinear and not hasattr(folded.b, "input_scale")
    plain = quantize_model(nnx.clone(dense), method="absmax", calibration=calibration)
    both = [sum(r.output_errors[path] ** 2 for path in "ab") for r in (report, plain)]
    assert both[0] < both[1]

    before = nnx.clone(dense)
    for fold, match in (
        ({"a": ["general"]}, "no nnx.Linear with a kernel"),
        ({"drop": ["a"]}, "'drop', a Dropout"),
        ({"missing": ["a"]}, "'missing', no layer"),
        ({"norm": "a"}, "the paths of the layers"),
        ({"norm": ["unused"]}, "has not seen"),
        ({"norm": ["a"]}, "computes something else"),  # its output goes to b, too
    ):
        with pytest.raises(ValueError, match=match):
            algorithms.fold_input_scales(dense, fold, calibration, group_size=32, batch=batches[0])
        assert_same(dense, before)


def test_bad_input_of_models(rng):
    model, batches = model_and_batches(rng, 1)
    before = nnx.clone(model)
    nan = [np.full_like(batches[0], np.nan)]
    for call, error, match in (
        (lambda: algorithms.calibrate(3, batches), TypeError, "model is a int"),
        (lambda: algorithms.calibrate(model, batches, layers=["norm"]), ValueError, "layers has 'norm'"),
        (lambda: algorithms.calibrate(model, []), ValueError, "called none of the layers"),
        (lambda: algorithms.calibrate(model, batches, forward=3), TypeError, "forward is a int"),
        (lambda: algorithms.calibrate(model, nan, layers=["a"]), ValueError, "inputs of a hold NaN"),
        (lambda: quantize_model(model, batches, method="best"), ValueError, "method='best'"),
        (lambda: quantize_model(model), ValueError, "method='gptq' needs the inputs"),
        (lambda: quantize_model(model, batches, calibration={}), ValueError, "both given"),
        (lambda: quantize_model(model, batches, norm=0.5), TypeError, "no option 'norm'"),
        (lambda: quantize_model(model, batches, method="hqq", mode="symmetric"), ValueError, "does not go with"),
        (lambda: quantize_model(model, batches, method="minmax", mode="symmetric"), ValueError, "does not go with"),
        (lambda: quantize_model(model, batches, act_order=True), ValueError, "act_order=True for "),
        (lambda: quantize_model(model, batches, damping=-1), ValueError, "damping=-1"),
        (lambda: quantize_model(model, batches, bits=5), ValueError, "bits=5"),
        (lambda: quantize_model(model, batches, fold={"norm": ["a"]}), ValueError, "fold with method='gptq'"),
        (lambda: quantize_model(model.a, batches), ValueError, "itself a Linear"),
        (lambda: quantize_model(model, batches, predicate=lambda *_: {"norm": 2}), TypeError, "unknown option 'norm'"),
    ):
        with pytest.raises(error, match=match):
            call()
        assert_same(model, before)
    with pytest.warns(UserWarning, match="no batch calls 1 layers, such as 'unused'"):
        algorithms.quantize_model(model, batches, group_size=32, measure_error=False)
    with pytest.raises(ValueError, match="quantized already"):
        quantize_model(model, batches)
