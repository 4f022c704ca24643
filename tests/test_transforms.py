"""The product under JAX's transformations: values, gradients, and how many custom calls are left."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from matmul_cases import check_gradients
from reference import DTYPES, MODES, activate, random_weight, random_x, rounding

import jax_wonly as jw
from jax_wonly import _cpu


def compiled_text(f, *args) -> str:
    return jax.jit(f).lower(*args).compile().as_text()


def calls(f, *args, target="wonly_matmul_v1") -> int:
    return compiled_text(f, *args).count(f'custom_call_target="{target}"')


def copied_weights(f, *args) -> list[str]:
    """Instructions of the compiled program that make a packed array: all but arguments and free views of them."""
    made = re.findall(r"= u32\[[\d,]*512\]\S* (\w[\w-]*)\(", compiled_text(f, *args))
    return [op for op in made if op not in ("parameter", "bitcast", "get-tuple-element")]


# Batching.


def test_vmap_of_x_is_one_call(rng):
    qt = random_weight(rng, 64, 70, group_size=32, mode="offsets").qt
    x = random_x(rng, (3, 4, 5, 64))

    def with_epilogue(x, qt):
        return jw.matmul(x, qt, bias=jnp.ones(70), activation="relu")

    for f, array in [
        (jw.matmul, x[0, 0]),
        (jax.vmap(jw.matmul, in_axes=(0, None)), x[0]),
        (jax.vmap(jw.matmul, in_axes=(1, None), out_axes=2), x[0]),
        (jax.vmap(jax.vmap(jw.matmul, in_axes=(0, None)), in_axes=(1, None)), x),
        (jax.vmap(with_epilogue, in_axes=(0, None)), x[0]),
    ]:
        assert calls(f, array, qt) == 1
        assert copied_weights(f, array, qt) == []
    f = jax.vmap(jw.matmul, in_axes=(1, None), out_axes=1)
    np.testing.assert_allclose(f(x[0], qt), jw.matmul(x[0], qt), rtol=1e-5, atol=1e-5)
    jaxpr = str(jax.make_jaxpr(f)(x[0], qt))
    assert jaxpr.count("wonly_matmul[") == 1


def test_vmap_of_weights_is_one_call(rng):
    qt = random_weight(rng, 64, 70, group_size=32, mode="float_zeros", lead=(3,)).qt
    x = random_x(rng, (3, 5, 64))
    both = jax.vmap(jw.matmul)
    assert calls(both, x, qt) == 1 and copied_weights(both, x, qt) == []
    shared = jax.vmap(jw.matmul, in_axes=(None, 0))
    assert calls(shared, x[0], qt) == 1 and copied_weights(shared, x[0], qt) == []
    # One x for all experts is not repeated either.
    assert "broadcast" not in compiled_text(shared, x[0], qt)
    experts = jax.vmap(both, in_axes=(0, None))  # a batch of tokens on top folds into M
    tokens = random_x(rng, (4, 3, 5, 64))
    assert calls(experts, tokens, qt) == 1 and copied_weights(experts, tokens, qt) == []
    np.testing.assert_allclose(experts(tokens, qt), jw.matmul(tokens, qt), rtol=1e-5, atol=1e-5)


def test_vmap_of_bias(rng):
    weight = random_weight(rng, 64, 70, group_size=32)
    x, bias = random_x(rng, (3, 5, 64)), random_x(rng, (3, 70))

    def f(x, bias):
        return jw.matmul(x, weight.qt, bias=bias, activation="relu6")

    expected = activate(np.asarray(x, np.float64) @ weight.dense + np.asarray(bias)[:, None], "relu6")
    np.testing.assert_allclose(jax.vmap(f)(x, bias), expected, rtol=1e-4, atol=1e-4)
    assert calls(jax.vmap(f), x, bias) == 1
    expected = activate(np.asarray(x[0], np.float64) @ weight.dense + np.asarray(bias)[:, None], "relu6")
    np.testing.assert_allclose(jax.vmap(f, in_axes=(None, 0))(x[0], bias), expected, rtol=1e-4, atol=1e-4)
    assert calls(jax.vmap(f, in_axes=(None, 0)), x[0], bias) == 1


def test_batched_calls_of_the_public_function_are_one_call(rng):
    qt = random_weight(rng, 64, 70, group_size=32, lead=(3,)).qt
    for lead in [(), (1,), (3,), (2, 3)]:
        x = random_x(rng, (*lead, 5, 64))
        assert calls(jw.matmul, x, qt) == 1
        assert copied_weights(jw.matmul, x, qt) == []


axis = st.sampled_from([None, 0, 1, -1])


@settings(max_examples=40)
@given(
    axes=st.tuples(axis, axis, axis, axis, axis).filter(lambda a: any(d is not None for d in a)),
    outer=st.tuples(*[st.booleans()] * 5),
    mode=st.sampled_from(MODES),
    activation=st.sampled_from([None, "silu"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_vmap_in_axes(axes, outer, mode, activation, seed):
    """Any operand mapped along any axis, under an outer vmap of any subset: the same as a loop."""
    rng = np.random.default_rng(seed)
    weight = random_weight(rng, 64, 5, group_size=32, mode=mode)
    shift = weight.qt.zeros if weight.qt.zeros is not None else weight.qt.offsets
    base = [random_x(rng, (2, 64)), weight.qt.qvalue, weight.qt.scales, shift, random_x(rng, (5,))]
    if shift is None:
        axes = (*axes[:3], None, axes[4])
        outer = (*outer[:3], False, outer[4])
        if all(d is None for d in axes):
            return
    if not any(outer):
        outer = (True, *outer[1:])

    def f(x, qw, scales, shift, bias):
        zeros, offsets = (None, shift) if mode == "offsets" else (shift, None)
        return jw.matmul(x, qw, scales, zeros, offsets, bias, activation=activation)

    def vary(a, size, d):
        """Copies of an operand that differ, along a new axis."""
        if a.dtype in (jnp.uint8, jnp.uint32):
            flip = 0x11111111 if a.dtype == jnp.uint32 else 1
            copies = [a ^ a.dtype.type(i * flip) for i in range(size)]
        else:
            copies = [a * (1 + i / 4) for i in range(size)]
        return jnp.stack(copies, d)

    arrays, positive = [], []
    for a, d in zip(base, axes, strict=True):
        d = None if d is None else max(d, -1)
        if d is not None:
            d = d % (a.ndim + 1)
            a = vary(a, 3, d)
        arrays.append(a)
        positive.append(d)
    outer_axes = tuple(0 if o and a is not None else None for o, a in zip(outer, arrays, strict=True))
    stacked = [vary(a, 2, 0) if o is not None else a for a, o in zip(arrays, outer_axes, strict=True)]
    got = jax.vmap(jax.vmap(f, in_axes=tuple(positive)), in_axes=outer_axes)(*stacked)
    for i in range(2):
        for j in range(3):
            picked = [a if o is None else a[i] for a, o in zip(stacked, outer_axes, strict=True)]
            picked = [a if d is None else jnp.take(a, j, axis=d) for a, d in zip(picked, positive, strict=True)]
            np.testing.assert_allclose(got[i, j], f(*picked), rtol=2e-5, atol=2e-4)


# Differentiation.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_gradients(rng, bits, mode):
    check_gradients(rng, bits=bits, mode=mode)


@pytest.mark.parametrize("implementation", ["cpu", "xla", "dequantize"])
def test_check_grads(rng, implementation):
    """The product is linear in each operand, so that finite differences are exact with a step of one."""
    weight = random_weight(rng, 64, 9, bits=8, group_size=32, mode="offsets")
    x, bias = random_x(rng, (3, 64)), random_x(rng, (9,))
    qw, scales, offsets = weight.qt

    def linear(x, bias):
        return jw.matmul(x, qw, scales, offsets=offsets, bias=bias, precision="highest", implementation=implementation)

    check_grads(linear, (x, bias), order=2, eps=1.0, atol=5e-2, rtol=1e-3)

    def parameters(scales, offsets):
        return jw.matmul(x, qw, scales, offsets=offsets, precision="highest", implementation=implementation)

    check_grads(parameters, (scales, offsets), order=2, eps=1.0, atol=5e-1, rtol=1e-3)


@pytest.mark.parametrize("activation", ["relu", "relu6", "gelu", "silu"])
def test_gradient_of_activations(rng, activation):
    weight = random_weight(rng, 64, 9, group_size=32)
    x, bias = random_x(rng, (5, 64)) / 4, random_x(rng, (9,))
    fused = jax.grad(lambda x, b: (jw.matmul(x, weight.qt, bias=b, activation=activation) ** 2).sum(), argnums=(0, 1))
    functions = {"relu": jax.nn.relu, "relu6": jax.nn.relu6, "gelu": jax.nn.gelu, "silu": jax.nn.silu}
    dense = jnp.asarray(weight.dense, jnp.float32)
    plain = jax.grad(
        lambda x, b: (functions[activation](jnp.matmul(x, dense, precision="highest") + b) ** 2).sum(), argnums=(0, 1)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-3), fused(x, bias), plain(x, bias))


def test_derivatives_compose(rng):
    weight = random_weight(rng, 64, 9, group_size=32, mode="integer_zeros")
    x = random_x(rng, (64,))
    w = weight.dense

    def f(x):
        return jw.matmul(x, weight.qt)

    close = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(jax.jacrev(f)(x), w.T, **close)
    np.testing.assert_allclose(jax.jacfwd(f)(x), w.T, **close)
    np.testing.assert_allclose(jax.linear_transpose(f, x)(jnp.ones(9))[0], w.sum(1), **close)
    hessian = jax.hessian(lambda x: (f(x) ** 2).sum() / 2)(x)
    np.testing.assert_allclose(hessian, w @ w.T, rtol=1e-3, atol=1e-2)
    per_example = jax.vmap(jax.grad(lambda x: (f(x) ** 2).sum() / 2))(random_x(rng, (4, 64)))
    assert per_example.shape == (4, 64)
    by_scales = jax.linear_transpose(lambda s: jw.matmul(x, weight.qt.qvalue, s, weight.qt.zeros), weight.qt.scales)
    codes = np.asarray(jw.unpack(weight.qt.qvalue, 4, 64, 9), np.float64)
    centred = codes - np.repeat(np.asarray(weight.qt.zeros, np.float64), 32, 0)
    expected = (np.asarray(x, np.float64)[:, None] * centred).reshape(2, 32, 9).sum(1)
    np.testing.assert_allclose(by_scales(jnp.ones(9))[0], expected, rtol=1e-4, atol=1e-3)


def test_gradient_keeps_types(rng):
    weight = random_weight(rng, 64, 9, group_size=32, scale_dtype="float16")
    x = random_x(rng, (3, 64), "bfloat16")

    def f(x, qt):
        return jw.matmul(x, qt, preferred_element_type=jnp.float32).sum()

    dx, dqt = jax.grad(f, argnums=(0, 1), allow_int=True)(x, weight.qt)
    assert dx.dtype == jnp.bfloat16 and dqt.scales.dtype == jnp.float16
    np.testing.assert_allclose(np.asarray(dx, np.float64), np.tile(weight.dense.sum(1), (3, 1)), rtol=1e-2, atol=1e-2)


def test_gradient_with_respect_to_x_keeps_weights_packed(rng):
    qt = random_weight(rng, 128, 128, group_size=32).qt
    x = random_x(rng, (3, 128))
    text = str(jax.make_jaxpr(jax.grad(lambda x: jw.matmul(x, qt).sum()))(x))
    assert "transpose=True" in text
    residuals = jax.eval_shape(lambda x: jax.vjp(lambda x: jw.matmul(x, qt), x)[1], x)
    sizes = [a.size * a.dtype.itemsize for a in jax.tree.leaves(residuals)]
    assert sum(sizes) <= qt.nbytes


@pytest.mark.parametrize("lead", [(), (2,)])
def test_no_dense_weight(rng, lead):
    """The compiled gradients with respect to x hold no dense copy of the weight; saved values neither."""
    weight = random_weight(rng, 192, 320, group_size=64, mode="integer_zeros", lead=lead)
    x, dy = random_x(rng, (*lead, 3, 192)), random_x(rng, (*lead, 3, 320))

    def dx(x, dy, qt):
        return jax.vjp(lambda x: jw.matmul(x, qt), x)[1](dy)[0]

    np.testing.assert_allclose(
        dx(x, dy, weight.qt), np.asarray(dy) @ weight.dense.swapaxes(-1, -2), rtol=1e-4, atol=1e-3
    )
    assert not re.search(r"\[(\d+,)*(192,320|320,192|3,64,320)[\],]", compiled_text(dx, x, dy, weight.qt))
    assert calls(dx, x, dy, weight.qt, target="wonly_matmul_transposed_v1") == 1

    def f(x, scales):
        return jw.matmul(x, weight.qt.qvalue, scales, weight.qt.zeros)

    saved = jax.eval_shape(lambda *args: jax.vjp(f, *args)[1], x, weight.qt.scales)
    assert sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(saved)) <= weight.qt.nbytes + x.nbytes


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("mode", MODES)
def test_transposed_kernels(rng, bits, mode):
    """dy @ w.T of every instruction set against float64: shapes that are no multiples of anything."""
    k, group_size = [(96, 32), (64, 64), (101, None), (384, 128), (640, 32), (512, 256)][rng.integers(6)]
    m, n = int(rng.integers(1, 40)), int(rng.integers(1, 200))
    dtype = str(rng.choice(list(DTYPES)))
    weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode, lead=(3,))
    x, dy = random_x(rng, (3, m, k), dtype), random_x(rng, (3, m, n), dtype)
    dx = jax.jit(lambda dy: jax.vjp(partial(jw.matmul, qw=weight.qt, implementation="cpu"), x)[1](dy)[0])
    dy64 = np.asarray(dy).astype(np.float64)
    exact = dy64 @ weight.dense.swapaxes(1, 2)
    bound = 2.0**-20 * (np.abs(dy64) @ weight.magnitude.swapaxes(1, 2))
    bound += rounding(exact, dtype)
    try:
        for isa in _cpu.isas():
            _cpu.force_isa(isa)
            error = np.abs(np.asarray(dx(dy)).astype(np.float64) - exact)
            assert (error <= bound).all(), (isa, k, n, m, dtype)
    finally:
        _cpu.force_isa("")


def test_remat_of_many_layers(rng):
    """The gradient of 32 stacked layers, rematerialised, is traced and compiled once for all of them."""
    qt = random_weight(rng, 64, 64, group_size=32, lead=(32,)).qt
    x = random_x(rng, (3, 64)) / 8

    def loss(x, policy):
        layer = jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), None), policy=policy)
        return jax.lax.scan(layer, x, qt)[0].sum()

    start = time.perf_counter()
    compiled = {p: jax.jit(jax.grad(partial(loss, policy=p))).lower(x).compile() for p in (None, jw.checkpoint_policy)}
    assert time.perf_counter() - start < 30
    repeats, saves = ((c.as_text().count('"wonly_matmul_v1"'), c(x)) for c in compiled.values())
    assert (repeats[0], saves[0]) == (2, 1)
    np.testing.assert_allclose(repeats[1], saves[1], rtol=1e-5, atol=1e-6)


def test_remat(rng):
    qt = random_weight(rng, 64, 64, group_size=32).qt
    x = random_x(rng, (3, 64)) / 8

    def block(x):
        return jnp.sin(jnp.sin(x @ qt) @ qt).sum()

    saves = jax.checkpoint(block, policy=jw.checkpoint_policy)
    repeats = jax.checkpoint(block)
    forward = [calls(jax.value_and_grad(f), x) for f in (block, saves, repeats)]
    assert forward[0] == forward[1] == 2 < forward[2], forward
    np.testing.assert_allclose(jax.grad(saves)(x), jax.grad(block)(x), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.grad(repeats)(x), jax.grad(block)(x), rtol=1e-5, atol=1e-5)


# Control flow, modes, threads.


def test_control_flow(rng):
    weight = random_weight(rng, 64, 64, group_size=32, lead=(4,))
    stacked = weight.qt
    x = random_x(rng, (3, 64)) / 8

    def scan_loss(x, qt):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, qt)[0].sum()

    def loop_loss(x, qt):
        for i in range(4):
            x = jnp.tanh(x @ qt[i])
        return x.sum()

    got = jax.jit(jax.value_and_grad(scan_loss))(x, stacked)
    expected = jax.value_and_grad(loop_loss)(x, stacked)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)

    def step(state):
        i, x = state
        return i + 1, jnp.tanh(x @ stacked[0])

    _, looped = jax.jit(lambda x: jax.lax.while_loop(lambda s: s[0] < 3, step, (0, x)))(x)
    expected = x
    for _ in range(3):
        expected = jnp.tanh(expected @ stacked[0])
    np.testing.assert_allclose(looped, expected, rtol=1e-4, atol=1e-5)

    def branch(p, x):
        return jax.lax.cond(p, lambda x: x @ stacked[0], lambda x: x @ stacked[1], x)

    for p in (True, False):
        np.testing.assert_allclose(jax.jit(branch)(p, x), x @ stacked[0 if p else 1], rtol=1e-5, atol=1e-5)
        grad = jax.grad(lambda x, p=p: branch(p, x).sum())(x)
        np.testing.assert_allclose(grad, np.tile(weight.dense[0 if p else 1].sum(1), (3, 1)), rtol=1e-4, atol=1e-4)


def test_x64_mode(rng):
    with jax.enable_x64(True):
        weight = random_weight(rng, 64, 9, group_size=32, mode="integer_zeros")
        x = random_x(rng, (3, 64))
        y, vjp = jax.vjp(lambda x, s: jw.matmul(x, weight.qt.qvalue, s, weight.qt.zeros), x, weight.qt.scales)
        assert y.dtype == jnp.float32
        np.testing.assert_allclose(y, np.asarray(x) @ weight.dense, rtol=1e-4, atol=1e-4)
        assert all(g.dtype == jnp.float32 for g in vjp(y))
        assert jax.vmap(jw.matmul, in_axes=(0, None))(x[None], weight.qt).shape == (1, 3, 9)
        qt = jw.quantize(weight.dense.astype(np.float32), group_size=32, mode="offsets")
        assert qt.qvalue.dtype == jnp.uint32 and qt.dequantize().dtype == jnp.float32


def test_donation_and_aot(rng):
    weight = random_weight(rng, 64, 64, group_size=32)
    x = random_x(rng, (3, 64))
    expected = np.asarray(jw.matmul(x, weight.qt))
    f = jax.jit(jw.matmul, donate_argnums=0)
    compiled = f.lower(jax.ShapeDtypeStruct((3, 64), jnp.float32), weight.qt).compile()
    np.testing.assert_array_equal(compiled(jnp.array(x), weight.qt), expected)
    np.testing.assert_array_equal(f(jnp.array(x), weight.qt), expected)


def test_eval_shape_and_names(rng):
    weight = random_weight(rng, 64, 9, group_size=32, lead=(2,))
    out = jax.eval_shape(jw.matmul, jax.ShapeDtypeStruct((5, 2, 3, 64), jnp.bfloat16), weight.qt)
    assert out.shape == (5, 2, 3, 9) and out.dtype == jnp.bfloat16
    assert "wonly_matmul" in compiled_text(jw.matmul, random_x(rng, (3, 64)), weight.qt[0])


def test_threads(rng):
    """Eight threads call one compiled product, and each compiles its own, at the same time."""
    weights = [random_weight(rng, 256, 64 + 8 * i, group_size=64) for i in range(8)]
    xs = [random_x(rng, (1 + 5 * i, 256)) for i in range(8)]
    shared = jax.jit(lambda x: jw.matmul(x, weights[0].qt))
    expected_shared = np.asarray(shared(xs[2]))

    def work(i):
        expected = np.asarray(xs[i], np.float64) @ weights[i].dense
        for _ in range(20):
            np.testing.assert_allclose(jw.matmul(xs[i], weights[i].qt), expected, rtol=1e-3, atol=1e-3)
            np.testing.assert_array_equal(shared(xs[2]), expected_shared)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_manual_sharding(rng):
    """Inside shard_map, operands that vary over a mesh axis meet those that do not, whichever they are."""
    weight = random_weight(rng, 64, 16, group_size=32)
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = random_x(rng, (4, 64))
    spec = jax.sharding.PartitionSpec

    def loss(x, qt):
        return jax.lax.psum(jw.matmul(x, qt).sum(), "i")

    f = jax.shard_map(loss, mesh=mesh, in_specs=(spec("i"), spec()), out_specs=spec())
    np.testing.assert_allclose(jax.jit(f)(x, weight.qt), (np.asarray(x) @ weight.dense).sum(), rtol=1e-3, atol=1e-2)
    dx = jax.jit(jax.grad(f))(x, weight.qt)
    np.testing.assert_allclose(dx, np.tile(weight.dense.sum(1), (4, 1)), rtol=1e-3, atol=1e-3)

    experts = random_weight(rng, 64, 16, group_size=32, lead=(2,))
    f = jax.shard_map(loss, mesh=mesh, in_specs=(spec(), spec("i")), out_specs=spec())
    dx = jax.jit(jax.grad(f))(x, experts.qt)
    np.testing.assert_allclose(dx, np.tile(experts.dense.sum((0, 2)), (4, 1)), rtol=1e-3, atol=1e-3)
