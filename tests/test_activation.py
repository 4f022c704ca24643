"""Activations quantized on line: codes to the bit, products against float64, transformations, errors."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from activation_cases import FLOAT8, SCHEMES, assert_quantized_product, check_codes, quantize
from reference import random_weight, random_x

import jax_wonly as jw
from jax_wonly.primitives.activations import to_kernel_order, to_natural_order


@pytest.mark.parametrize(("dtype", "symmetric"), SCHEMES)
def test_codes(rng, dtype, symmetric):
    for shape, group_size, x_dtype in (
        ((3, 250), None, "float32"),
        ((2, 5, 512), 128, "bfloat16"),
        ((4, 96), 32, "float16"),
        ((7,), None, "float32"),
        ((0, 64), None, "float32"),
    ):
        x = random_x(rng, shape, x_dtype)
        if len(shape) == 2 and shape[0] == 3:  # rows of one value, of zeros, and of numbers too small for a scale
            x = x.at[0].set(0.75).at[1].set(0).at[2].multiply(1e-33)
        xq = jw.quantize_activation(x, group_size=group_size, dtype=dtype, symmetric=symmetric)
        expected = check_codes(x, xq, group_size, dtype, symmetric)
        assert xq.shape == shape and xq.dtype == x.dtype and xq.group_size == (group_size or shape[-1])
        np.testing.assert_allclose(
            np.asarray(xq.dequantize("float32")), expected.values.astype(np.float32), rtol=1e-6, atol=1e-6
        )


def test_quantization_error(rng):
    """Half a step of the scale, as each scheme promises, and nearly as much somewhere."""
    x = random_x(rng, (16, 512), "float32")
    for group_size, symmetric, steps in ((None, True, 127), (64, False, 255)):
        xq = jw.quantize_activation(x, group_size=group_size, symmetric=symmetric)
        grouped = np.asarray(x).reshape(16, -1, group_size or 512)
        span = np.abs(grouped).max(-1) if symmetric else np.ptp(grouped, -1)
        error = np.abs(np.asarray(xq.dequantize()) - np.asarray(x)).reshape(grouped.shape).max(-1)
        assert (error <= 0.501 * span / steps).all() and (error >= 0.3 * span / steps).all()


def test_kernel_order():
    """Code 4t + 2 odd + pair of a block is input 8 pair + 2t + odd: where an int8 word has that input's code."""
    codes = jnp.arange(40, dtype=jnp.int8)
    order = np.asarray(to_kernel_order(codes))
    for position, value in enumerate(order):
        block, rest = divmod(position, 16)
        t, odd, pair = rest // 4, rest // 2 % 2, rest % 2
        assert value == (k if (k := 16 * block + 8 * pair + 2 * t + odd) < 40 else 0)
    np.testing.assert_array_equal(to_natural_order(jnp.asarray(order), 40), codes)


@pytest.mark.parametrize(
    ("dtype", "symmetric", "bits", "mode", "x_group", "group_size"),
    [
        ("int8", True, 8, "symmetric", None, None),
        ("int8", False, 8, "integer_zeros", None, 64),
        ("int8", True, 4, "float_zeros", 32, 128),
        ("int8", False, 4, "offsets", 128, None),
        (FLOAT8, True, 4, "integer_zeros", 64, 64),
    ],
)
def test_product(rng, dtype, symmetric, bits, mode, x_group, group_size):
    """Both forms, and XLA's operations, with several pairings of the groups of x and of the weights."""
    k, n = 256, 70
    x = random_x(rng, (2, 3, k), "float32")
    bias = random_x(rng, (n,), "float32")
    weight = random_weight(rng, k, n, bits=bits, mode=mode, group_size=group_size)
    how = jw.ActivationQuantization(dtype, x_group, symmetric)

    @jax.jit
    def forms(x, qt):
        options = {"bias": bias, "activation": "relu"}
        xq = jw.quantize_activation(x, group_size=x_group, dtype=dtype, symmetric=symmetric)
        return (
            jw.matmul(xq, qt, **options),
            jw.matmul(x, qt, activation_quantization=how, **options),
            jw.matmul(x, qt, activation_quantization=how, implementation="xla", **options),
        )

    expected = quantize(x, x_group, dtype, symmetric)
    for y in forms(x, weight.qt):
        assert_quantized_product(y, expected.values, weight, bias=bias, activation="relu", out_dtype="float32")


def test_names_and_types(rng):
    """A name takes the groups of the weights; the result has the type of x."""
    x = random_x(rng, (5, 256), "bfloat16")
    for group_size, dtype in ((None, FLOAT8), (64, "int8")):
        weight = random_weight(rng, 256, 64, group_size=group_size)
        expected = quantize(x, group_size, dtype, True)
        y = jw.matmul(x, weight.qt, activation_quantization=dtype)
        assert_quantized_product(y, expected.values, weight, out_dtype="bfloat16")
    xq = jw.quantize_activation(x)
    assert (xq @ weight.qt).dtype == jnp.bfloat16
    assert jw.matmul(xq, weight.qt, preferred_element_type="float32").dtype == jnp.float32
    assert jw.matmul(xq, *weight.qt).shape == (5, 64)
    y = jw.matmul(x[0], weight.qt, activation_quantization="int8")
    np.testing.assert_array_equal(y, jw.matmul(jw.quantize_activation(x[0], group_size=64), weight.qt))
    assert y.shape == (64,)


def test_odd_inputs(rng):
    """K that no tile divides, and no rows."""
    weight = random_weight(rng, 77, 33, bits=8)
    x = random_x(rng, (4, 77), "float32")
    y = jw.matmul(jw.quantize_activation(x, symmetric=False), weight.qt)
    assert_quantized_product(y, quantize(x, None, "int8", False).values, weight, out_dtype="float32")
    assert jw.matmul(x[:0], weight.qt, activation_quantization="int8").shape == (0, 33)
    assert jw.matmul(jw.quantize_activation(x[:0]), weight.qt).shape == (0, 33)


def test_not_finite(rng):
    """An infinity or NaN stays in its row, and is seen there."""
    weight = random_weight(rng, 128, 16, bits=8)
    x = random_x(rng, (4, 128), "float32").at[1, 5].set(jnp.nan).at[2, 7].set(jnp.inf)
    for dtype, symmetric in SCHEMES[:2]:
        how = jw.ActivationQuantization(dtype, None, symmetric)
        y = np.asarray(jw.matmul(x, weight.qt, activation_quantization=how))
        assert np.isfinite(y[[0, 3]]).all() and not np.isfinite(y[[1, 2]]).any()


def test_leading_axes_and_vmap(rng):
    weight = random_weight(rng, 128, 32, group_size=64, lead=(3, 1))
    x = random_x(rng, (2, 5, 128), "float32")
    values = quantize(x, 64, "int8", True).values
    xq = jw.quantize_activation(x, group_size=64)
    assert_quantized_product(jw.matmul(xq, weight.qt), values, weight, out_dtype="float32")
    y = jw.matmul(x, weight.qt, activation_quantization="int8")
    assert_quantized_product(y, values, weight, out_dtype="float32")

    one = jax.tree.map(lambda a: a[0, 0], weight.qt)
    mapped = jax.vmap(lambda x: jw.matmul(jw.quantize_activation(x, group_size=64), one))(x)
    np.testing.assert_allclose(mapped, jw.matmul(xq, one), rtol=1e-6, atol=1e-6)
    both = jax.vmap(lambda x, qt: jw.matmul(jw.quantize_activation(x, group_size=64), qt))
    np.testing.assert_allclose(both(x, weight.qt[:2, 0]), y[jnp.arange(2), jnp.arange(2)], rtol=1e-6, atol=1e-6)
    shared = jax.vmap(lambda codes, xq=xq: jw.matmul(xq, one, bias=codes))(jnp.eye(2, 32))
    np.testing.assert_allclose(shared, jw.matmul(xq, one) + jnp.eye(2, 32)[:, None, None], rtol=1e-5, atol=1e-5)


def test_gradients(rng):
    """Straight through the rounding: those of the product with x itself."""
    weight = random_weight(rng, 128, 24, group_size=64, mode="offsets")
    x = random_x(rng, (5, 128), "float32")

    def loss(x, qt, how):
        return (jw.matmul(x, qt, activation_quantization=how) * jnp.arange(24)).sum()

    for how in (None, "int8"):
        dx, dqt = jax.grad(loss, argnums=(0, 1), allow_int=True)(x, weight.qt, how)
        if how is None:
            expected = dx, dqt
        np.testing.assert_allclose(dx, expected[0], rtol=1e-6)
        np.testing.assert_allclose(dqt.scales, expected[1].scales, rtol=1e-6)
    y, y_dot = jax.jvp(lambda x: jw.matmul(x, weight.qt, activation="relu", activation_quantization="int8"), (x,), (x,))
    np.testing.assert_allclose(y_dot, jnp.where(y > 0, jw.matmul(x, weight.qt), 0), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(lambda x: jw.quantize_activation(x).scales.sum())(x)
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(lambda s: jw.matmul(jw.quantize_activation(x), weight.qt.qvalue, s).sum())(weight.qt.scales)


def test_export(rng):
    weight = random_weight(rng, 128, 24)
    x = random_x(rng, (5, 128), "bfloat16")
    xq = jw.quantize_activation(x)
    program = jax.export.export(jax.jit(jw.matmul), disabled_checks=jw.export_disabled_checks())(xq, weight.qt)
    loaded = jax.export.deserialize(program.serialize())
    np.testing.assert_array_equal(loaded.call(xq, weight.qt), jw.matmul(xq, weight.qt))


def test_errors():
    x = jnp.ones((4, 128))
    qt, qt8 = jw.quantize(jnp.ones((128, 64))), jw.quantize(jnp.ones((128, 64)), bits=8)
    for message, kind, call in (
        ("x is a list", TypeError, lambda: jw.quantize_activation([1.0])),
        (r"x has shape \(\)", ValueError, lambda: jw.quantize_activation(jnp.float32(1))),
        ("group_size=48", ValueError, lambda: jw.quantize_activation(x, group_size=48)),
        ("dtype='int4'", ValueError, lambda: jw.quantize_activation(x, dtype="int4")),
        ("symmetric=False with", ValueError, lambda: jw.quantize_activation(x, symmetric=False, dtype=FLOAT8)),
        ("symmetric=1", TypeError, lambda: jw.quantize_activation(x, symmetric=1)),
        ("activation_quantization='int4'", ValueError, lambda: jw.matmul(x, qt, activation_quantization="int4")),
        ("activation_quantization is a int", TypeError, lambda: jw.matmul(x, qt, activation_quantization=8)),
        (
            "group_size='rows'",
            ValueError,
            lambda: jw.matmul(x, qt, activation_quantization=jw.ActivationQuantization(group_size="rows")),
        ),
        ("accepted: 4 bits", ValueError, lambda: jw.matmul(x, qt8, activation_quantization=FLOAT8)),
        (
            "have a table",
            ValueError,
            lambda: jw.matmul(x, jw.quantize(jnp.ones((128, 64)), mode="nf4"), activation_quantization="int8"),
        ),
        (
            "one of them",
            TypeError,
            lambda: jw.matmul(jw.quantize_activation(x), qt, activation_quantization="int8"),
        ),
        (
            "weights are permuted",
            TypeError,
            lambda: jw.matmul(jw.quantize_activation(x), jw.PermutedTensor(qt, jnp.arange(128))),
        ),
        ("lowered for 'cpu'", ValueError, lambda: jw.quantize_activation(x, implementation="cuda")),
        ("the K of the weights", ValueError, lambda: jw.matmul(jw.quantize_activation(x[:, :64]), qt)),
    ):
        with pytest.raises(kind, match=message):
            call()
