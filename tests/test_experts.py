"""Products in which every row has its own expert's weights, against float64 and ``jax.lax.ragged_dot``."""

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
    sizes_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from reference import DTYPES, MODES, activate, random_weight, random_x

import jax_wonly as jw
from jax_wonly import _ffi

IMPLEMENTATIONS = ("cpu", "xla", "dequantize")
CALL = 'custom_call_target="wonly_ragged_matmul_v1"'


@settings(max_examples=14)
@given(
    experts=st.integers(1, 9),
    rows=st.integers(0, 90),
    n=st.integers(1, 130),
    size=st.sampled_from([(96, 32), (192, 64), (256, 128), (101, None)]),
    bits=st.sampled_from([4, 8]),
    mode=st.sampled_from(MODES),
    dtype=st.sampled_from(list(DTYPES)),
    activation=st.sampled_from([None, "relu", "gelu", "silu"]),
    bias=st.sampled_from([None, "shared", "each"]),
    implementation=st.sampled_from(IMPLEMENTATIONS),
    seed=st.integers(0, 2**32 - 1),
)
def test_ragged_dot(experts, rows, n, size, bits, mode, dtype, activation, bias, implementation, seed):
    rng = np.random.default_rng(seed)
    check_ragged_dot(
        rng,
        experts=experts,
        rows=rows,
        n=n,
        k=size[0],
        group_size=size[1],
        bits=bits,
        mode=mode,
        dtype=dtype,
        activation=activation,
        bias=bias,
        implementation=implementation,
    )


@settings(max_examples=14)
@given(
    experts=st.integers(1, 9),
    shapes=st.sampled_from(
        [((7,), (7,)), ((5, 1), (5, 3)), ((5, 3), (5, 3)), ((), (4,)), ((6,), ()), ((2, 4), (2, 1))]
    ),
    scale=st.integers(1, 12),
    bits=st.sampled_from([4, 8]),
    mode=st.sampled_from(MODES),
    dtype=st.sampled_from(list(DTYPES)),
    implementation=st.sampled_from(IMPLEMENTATIONS),
    seed=st.integers(0, 2**32 - 1),
)
def test_gather_matmul(experts, shapes, scale, bits, mode, dtype, implementation, seed):
    rng = np.random.default_rng(seed)
    x_lead, ids_lead = ((s[0] * scale, *s[1:]) if s else s for s in shapes)
    check_gather_matmul(
        rng, experts=experts, x_lead=x_lead, ids_lead=ids_lead, bits=bits, mode=mode, dtype=dtype,
        implementation=implementation,
    )  # fmt: skip


def test_as_jax_does(rng):
    """The meaning and the arguments of ``jax.lax.ragged_dot``, sizes of any integer type."""
    weight = random_weight(rng, 64, 70, group_size=32, lead=(5,))
    x = random_x(rng, (23, 64))
    w = jnp.asarray(weight.dense, jnp.float32)
    for dtype in (np.int32, np.uint8, np.int64):
        sizes = np.array([4, 0, 11, 3, 0], dtype)
        for kwargs in ({}, {"precision": "highest"}, {"preferred_element_type": jnp.float32}):
            got = jw.ragged_dot(lhs=x, rhs=weight.qt, group_sizes=sizes, **kwargs)
            expected = jax.lax.ragged_dot(x, w, jnp.asarray(sizes), **({"precision": "highest"} | kwargs))
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
            assert (np.asarray(got)[18:] == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_known_on_the_device_only(rng, implementation):
    check_rows_on_device(rng, implementation)


def test_group_offset(rng):
    """The experts of one device of several: the others' rows are zero."""
    weight = random_weight(rng, 64, 70, group_size=32, lead=(6,))
    x = random_x(rng, (17, 64))
    sizes = jnp.asarray([3, 1, 0, 6, 4, 2])
    whole = jw.ragged_dot(x, weight.qt, sizes)
    for offset in (jnp.asarray([2]), np.int32(2), 2):
        part = jw.ragged_dot(x, weight.qt[2:5], sizes, group_offset=offset)
        mine = np.zeros((17, 1), bool)
        mine[4:14] = True
        np.testing.assert_allclose(part, np.where(mine, whole, 0), rtol=1e-6, atol=1e-6)
    parts = [jw.ragged_dot(x, weight.qt[i : i + 3], sizes, group_offset=i) for i in (0, 3)]
    np.testing.assert_allclose(parts[0] + parts[1], whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_non_finite_rows_stay_alone(rng, implementation):
    check_non_finite_rows(rng, implementation)


def test_mixture_of_experts_layer(rng):
    """Two products with the same ids, and the weighted sum: as a loop over tokens computes it."""
    up = random_weight(rng, 64, 96, group_size=32, lead=(8,))
    down = random_weight(rng, 96, 64, bits=8, group_size=32, lead=(8,))
    x = random_x(rng, (5, 64))
    gates, ids = jax.lax.top_k(random_x(rng, (5, 8)), 2)

    @jax.jit
    def layer(x, up, down, ids, gates):
        hidden = jw.gather_matmul(x[:, None], up, ids, activation="silu")
        return (jw.gather_matmul(hidden, down, ids) * gates[..., None]).sum(1)

    y = layer(x, up.qt, down.qt, ids, gates)
    expected = np.zeros((5, 64))
    for t in range(5):
        for j in range(2):
            h = activate(np.asarray(x[t], np.float64) @ up.dense[ids[t, j]], "silu")
            expected[t] += float(gates[t, j]) * (h @ down.dense[ids[t, j]])
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-3)
    text = layer.lower(x, up.qt, down.qt, ids, gates).compile().as_text()
    assert text.count(CALL) == 2 and " sort(" not in text


# Transformations.


def text_of(f, *args):
    return jax.jit(f).lower(*args).compile().as_text()


axis = st.sampled_from([None, 0, 1])


@settings(max_examples=10)
@given(
    x_axis=axis,
    rows_axis=axis,
    weights=st.lists(st.booleans(), min_size=3, max_size=3),
    bias_axis=st.sampled_from([None, 0]),
    bias_each=st.booleans(),
    mode=st.sampled_from(MODES),
    by_sizes=st.booleans(),
    outer=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_vmap(x_axis, rows_axis, weights, bias_axis, bias_each, mode, by_sizes, outer, seed):
    """Any operands mapped, under an outer vmap of x: the same as a loop, in one custom call."""
    rng = np.random.default_rng(seed)
    size, experts, m = 3, 4, 7
    stack = random_weight(rng, 64, 9, group_size=32, mode=mode, lead=(size, experts)).qt
    single = stack[0]
    parts = ("qvalue", "scales", "zeros" if stack.zeros is not None else "offsets")
    mapped = {p: w for p, w in zip(parts, weights, strict=True) if getattr(stack, p) is not None}
    in_weights = {p: 0 if w else None for p, w in mapped.items()}
    arrays = {p: getattr(stack if w else single, p) for p, w in mapped.items()}
    if x_axis is None and rows_axis is None and bias_axis is None and not any(mapped.values()):
        return
    rows_axis = min(rows_axis, 0 if by_sizes else 1) if rows_axis is not None else None
    x = random_x(rng, (size, m, 64))
    bias = random_x(rng, (size, experts, 9) if bias_each else (size, 9))
    rows = np.stack([sizes_of(rng, experts, m)[0] for _ in range(size)])
    if not by_sizes:
        rows = rng.integers(-1, experts + 1, (size, m))
    rows = jnp.asarray(rows, jnp.int32)

    def f(x, rows, arrays, bias):
        qt = jw.QuantizedTensor(**arrays, bits=4, k=64, n=9)
        product = jw.ragged_dot if by_sizes else jw.gather_matmul
        return product(x, qt, rows, bias=bias, activation="silu")

    axes = (x_axis, rows_axis, in_weights, bias_axis)
    args = [
        x[0] if x_axis is None else jnp.moveaxis(x, 0, x_axis),
        rows[0] if rows_axis is None else jnp.moveaxis(rows, 0, rows_axis),
        arrays,
        bias[0] if bias_axis is None else bias,
    ]
    g = jax.vmap(f, in_axes=axes)
    if outer:
        g = jax.vmap(g, in_axes=(0, None, None, None))
        args[0] = jnp.stack([args[0], 2 * args[0]])
    got = g(*args)
    for i in range(2 if outer else 1):
        for j in range(size):
            expected = f(
                (x[0] if x_axis is None else x[j]) * (1 + i),
                rows[0] if rows_axis is None else rows[j],
                {p: a[j] if mapped[p] else a for p, a in arrays.items()},
                bias[0] if bias_axis is None else bias[j],
            )
            np.testing.assert_allclose(got[i, j] if outer else got[j], expected, rtol=2e-5, atol=2e-4)
    assert text_of(g, *args).count(CALL) == 1


def test_vmap_copies_no_weights(rng):
    stack = random_weight(rng, 64, 70, group_size=32, lead=(3, 4)).qt
    ids = jnp.asarray(rng.integers(0, 4, (3, 7)), jnp.int32)
    x = random_x(rng, (3, 7, 64))
    for f, args in [
        (jax.vmap(jw.gather_matmul), (x, stack, ids)),
        (jax.vmap(jw.gather_matmul, in_axes=(None, 0, None)), (x[0], stack, ids[0])),
        (jax.vmap(jw.gather_matmul, in_axes=(0, None, None)), (x, stack[0], ids[0])),
        (jax.vmap(jw.gather_matmul, in_axes=(None, None, 0)), (x[0], stack[0], ids)),
    ]:
        text = text_of(f, *args)
        made = [line for line in text.split("\n") if "= u32[" in line and "512]" in line]
        assert all("parameter(" in line or "bitcast(" in line for line in made), made
        assert text.count(CALL) == 1
    # One x for all is not repeated.
    assert "f32[3,7,64]" not in text and "f32[7,3,64]" not in text


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients(rng, mode, implementation):
    check_expert_gradients(rng, mode, implementation)


def test_derivatives_compose(rng):
    weight = random_weight(rng, 64, 9, bits=8, group_size=32, mode="offsets", lead=(3,))
    x, sizes = random_x(rng, (5, 64)), jnp.asarray([2, 0, 2])
    qw, scales, offsets = weight.qt

    def linear(x, scales):
        qt = jw.QuantizedTensor(qw, scales, offsets=offsets, bits=8, k=64, n=9)
        return jw.ragged_dot(x, qt, sizes)

    check_grads(lambda x: linear(x, scales), (x,), order=2, eps=1.0, atol=5e-2, rtol=1e-3)
    check_grads(lambda s: linear(x, s), (scales,), order=2, eps=1.0, atol=5e-1, rtol=1e-3)
    hessian = jax.hessian(lambda x: (linear(x, scales) ** 2).sum() / 2)(x[:1].repeat(5, 0))
    w = weight.dense
    np.testing.assert_allclose(hessian[0, :, 0], w[0] @ w[0].T, rtol=1e-3, atol=2e-2)
    np.testing.assert_allclose(hessian[3, :, 3], w[2] @ w[2].T, rtol=1e-3, atol=2e-2)
    assert not np.asarray(hessian[4]).any()
    dx = jax.grad(lambda x: jw.ragged_dot(x, weight.qt, sizes, activation="silu").sum())(x)
    assert not np.asarray(dx[4]).any() and np.asarray(dx[:4]).all()
    per_example = jax.vmap(jax.grad(lambda x, i: jw.gather_matmul(x, weight.qt, i).sum()))(x, jnp.arange(5))
    np.testing.assert_allclose(per_example[:3], w.sum(-1), rtol=1e-4, atol=1e-3)


def test_gradient_keeps_weights_packed(rng):
    qt = random_weight(rng, 128, 128, group_size=32, lead=(4,)).qt
    x, ids = random_x(rng, (6, 128)), jnp.zeros(6, jnp.int32)
    residuals = jax.eval_shape(lambda x: jax.vjp(lambda x: jw.gather_matmul(x, qt, ids), x)[1], x)
    assert sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(residuals)) <= qt.nbytes + ids.nbytes


def test_remat(rng):
    qt = random_weight(rng, 64, 64, group_size=32, lead=(4,)).qt
    x, ids = random_x(rng, (6, 64)) / 8, jnp.zeros(6, jnp.int32)

    def block(x):
        return jnp.sin(jw.gather_matmul(jnp.sin(jw.gather_matmul(x, qt, ids)), qt, ids)).sum()

    saves = jax.checkpoint(block, policy=jw.checkpoint_policy)

    def kept(f):
        residuals = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(f, x)[1], x))
        return sum(a.shape == x.shape for a in residuals)

    assert kept(saves) == 2  # of both products, which make x superfluous
    assert kept(jax.checkpoint(block)) == 1  # x
    np.testing.assert_allclose(jax.grad(saves)(x), jax.grad(block)(x), rtol=1e-5, atol=1e-5)


def test_scan_over_layers(rng):
    stack = random_weight(rng, 64, 64, group_size=32, lead=(3, 4)).qt
    x, ids = random_x(rng, (5, 64)) / 8, jnp.asarray([0, 3, 1, 1, 4])

    def scanned(x):
        return jax.lax.scan(lambda c, w: (jnp.tanh(jw.gather_matmul(c, w, ids)), None), x, stack)[0].sum()

    def looped(x):
        for i in range(3):
            x = jnp.tanh(jw.gather_matmul(x, stack[i], ids))
        return x.sum()

    got, expected = jax.value_and_grad(scanned)(x), jax.value_and_grad(looped)(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)


def test_x64_mode(rng):
    with jax.enable_x64(True):
        weight = random_weight(rng, 64, 9, group_size=32, mode="integer_zeros", lead=(3,))
        x = random_x(rng, (4, 64))
        y = jw.ragged_dot(x, weight.qt, jnp.asarray([2, 2**40, 0]))
        assert_rows(y, x, weight, np.asarray([0, 0, 1, 1]))
        y = jw.gather_matmul(x, weight.qt, jnp.asarray([2**32, 2, 1, -(2**32)]))
        assert_rows(y, x, weight, np.asarray([-1, 2, 1, -1]))
        assert jax.grad(lambda x: jw.ragged_dot(x, weight.qt, jnp.asarray([2, 1, 1])).sum())(x).dtype == jnp.float32


# Bad input.


def test_errors(rng):
    qt = random_weight(rng, 64, 9, group_size=32, lead=(3,)).qt
    x = random_x(rng, (4, 64))
    sizes, ids = np.array([1, 2, 1]), np.array([0, 1, 2, 0])
    for error, message, call in [
        (ValueError, r"sum 5.*at most the 4 rows", lambda: jw.ragged_dot(x, qt, np.array([1, 2, 2]))),
        (ValueError, r"group_sizes=\[ *1, -1, *2\]", lambda: jw.ragged_dot(x, qt, np.array([1, -1, 2]))),
        (ValueError, r"group_sizes has shape \(2,\); accepted: \[3\]", lambda: jw.ragged_dot(x, qt, sizes[:2])),
        (ValueError, r"group_sizes has shape \(1, 3\)", lambda: jw.ragged_dot(x, qt, sizes[None])),
        (TypeError, "group_sizes has dtype float32", lambda: jw.ragged_dot(x, qt, jnp.ones(3))),
        (TypeError, "group_sizes is a list", lambda: jw.ragged_dot(x, qt, [1, 2, 1])),
        (ValueError, r"lhs has shape \(1, 4, 64\)", lambda: jw.ragged_dot(x[None], qt, sizes)),
        (ValueError, r"lhs has shape \(4, 32\); accepted: \[\.\.\., 64\]", lambda: jw.ragged_dot(x[:, :32], qt, sizes)),
        (TypeError, "rhs is a .*; accepted: a QuantizedTensor", lambda: jw.ragged_dot(x, jnp.ones((3, 64, 9)), sizes)),
        (ValueError, r"rhs has shape \(64, 9\)", lambda: jw.ragged_dot(x, qt[0], sizes)),
        (ValueError, r"qt has shape \(1, 3, 64, 9\)", lambda: jw.gather_matmul(x, qt[None], ids)),
        (ValueError, r"ids out of range; accepted: 0 to 2", lambda: jw.gather_matmul(x, qt, ids + 1)),
        (ValueError, r"expert_ids=\[-1", lambda: jw.gather_matmul(x, qt, ids - 1)),
        (ValueError, r"expert_ids has shape \(3,\)", lambda: jw.gather_matmul(x, qt, ids[:3])),
        (TypeError, "expert_ids has dtype", lambda: jw.gather_matmul(x, qt, ids.astype(np.float32))),
        (ValueError, r"bias has shape \(2, 9\); accepted: \[9\] or \[3, 9\]", lambda: jw.gather_matmul(
            x, qt, ids, bias=jnp.ones((2, 9)))),
        (ValueError, "activation='tanh'", lambda: jw.gather_matmul(x, qt, ids, activation="tanh")),
        (ValueError, "precision='best'", lambda: jw.ragged_dot(x, qt, sizes, precision="best")),
        (TypeError, "preferred_element_type", lambda: jw.ragged_dot(x, qt, sizes, preferred_element_type=int)),
        (ValueError, "implementation='fast'", lambda: jw.ragged_dot(x, qt, sizes, implementation="fast")),
        (ValueError, "group_offset=2; accepted: 0 to 1", lambda: jw.ragged_dot(x, qt[:2], sizes, group_offset=2)),
        (ValueError, r"group_offset has shape \(2,\)", lambda: jw.ragged_dot(x, qt, sizes, group_offset=ids[:2])),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            call()


def test_handlers_check_again(rng):
    """A call made by hand with operands that do not fit is refused, not run."""
    _ffi.ensure_registered()
    qt = random_weight(rng, 64, 9, group_size=32, lead=(3,)).qt
    x = random_x(rng, (4, 64))
    good = {"bits": 4, "shift_mode": 0, "has_bias": 0, "activation": 0, "row_mode": 1}

    def call(x, qw, scales, rows, y=(4, 9), scratch=(0,), **attributes):
        results = (jax.ShapeDtypeStruct(y, jnp.float32), jax.ShapeDtypeStruct(scratch, jnp.int32))
        attributes = {name: np.int64(v) for name, v in (good | attributes).items()}
        return jax.ffi.ffi_call("wonly_ragged_matmul_v1", results)(x, qw, scales, rows, **attributes)[0]

    ids = jnp.zeros(4, jnp.int32)
    np.testing.assert_array_equal(call(x, qt.qvalue, qt.scales, ids), jw.gather_matmul(x, qt, ids))
    for message, args, kwargs in [
        ("x has 4 rows; accepted: a divisor of 6", (x, qt.qvalue, qt.scales, ids), {"y": (6, 9)}),
        ("rows has shape", (x, qt.qvalue, qt.scales, ids[:3]), {}),
        ("rows has shape", (x, qt.qvalue, qt.scales, ids), {"row_mode": 0}),
        ("rows has element type", (x, qt.qvalue, qt.scales, ids.astype(jnp.float32)), {}),
        ("row_mode = 2", (x, qt.qvalue, qt.scales, ids), {"row_mode": 2}),
        ("x has shape", (x[None], qt.qvalue, qt.scales, ids), {}),
        ("qw has shape", (x, qt.qvalue[0], qt.scales, ids), {}),
        ("scales has shape", (x, qt.qvalue, qt.scales[:2], ids), {}),
        ("optional operands", (x, qt.qvalue, qt.scales, ids), {"has_bias": 1}),
        ("bits = 3", (x, qt.qvalue, qt.scales, ids), {"bits": 3}),
    ]:
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(call(*args, **kwargs))
