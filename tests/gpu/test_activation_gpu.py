"""Quantized activations on CUDA: codes to the bit, and products of codes on the tensor cores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from activation_cases import KERNEL_UNITS, SCHEMES, assert_quantized_product, check_codes, quantize
from reference import DTYPES, MODES, random_weight, random_x

import jax_wonly as jw

pytestmark = pytest.mark.gpu


def check_product(rng, *, m, k, n, dtype, symmetric, bits, mode, x_group, group_size, x_dtype="bfloat16", **options):
    x = random_x(rng, (m, k), x_dtype)
    weight = random_weight(rng, k, n, bits=bits, mode=mode, group_size=group_size, scale_dtype=x_dtype)
    expected = quantize(x, x_group, dtype, symmetric)
    how = jw.ActivationQuantization(dtype, x_group, symmetric)

    @jax.jit
    def forms(x, qt):
        xq = jw.quantize_activation(x, group_size=x_group, dtype=dtype, symmetric=symmetric)
        return (
            jw.matmul(xq, qt, implementation="cuda", **options),
            jw.matmul(x, qt, activation_quantization=how, implementation="cuda", **options),
        )

    first, second = forms(x, weight.qt)
    assert_quantized_product(first, expected.values, weight, out_dtype=x_dtype, unit=KERNEL_UNITS[dtype], **options)
    np.testing.assert_array_equal(np.asarray(first, np.float32), np.asarray(second, np.float32))


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize(("dtype", "symmetric"), SCHEMES)
def test_codes(rng, dtype, symmetric, x_dtype):
    """Rows and groups of every size that the kernel treats apart, aligned and not."""
    for shape, group_size in (
        *(((5, k), None) for k in (1, 15, 64, 1000, 8192, 8200, 16384, 28672, 40000)),
        *(((3, 7, 768), g) for g in (32, 64, 128, 256)),
        ((0, 64), None),
    ):
        x = random_x(rng, shape, x_dtype)
        if shape[0] == 5:
            x = x.at[0].set(0.75).at[1].set(0).at[2].multiply(1e-33)
        xq = jw.quantize_activation(x, group_size=group_size, dtype=dtype, symmetric=symmetric)
        check_codes(x, xq, group_size, dtype, symmetric)


@pytest.mark.parametrize(("dtype", "symmetric"), SCHEMES)
def test_codes_of_xla(rng, dtype, symmetric):
    """XLA's own quotients on a GPU are not rounded to the nearest."""
    x = random_x(rng, (4000, 256), "float32")
    how = {"group_size": 64, "dtype": dtype, "symmetric": symmetric}
    check_codes(x, jw.quantize_activation(x, **how, implementation="xla"), **how)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("dtype", "symmetric"), SCHEMES)
def test_product(rng, dtype, symmetric, bits, mode):
    if dtype != "int8" and bits == 8:
        return
    options = {"dtype": dtype, "symmetric": symmetric, "bits": bits, "mode": mode}
    for m, n, x_group, group_size, x_dtype in (
        (300, 200, None, None, "bfloat16"),
        (257, 321, 128, 128, "float16"),
        (600, 1032, None, 128, "bfloat16"),
        (130, 64, 256, None, "float32"),
        (129, 128, 128, 256, "bfloat16"),
    ):
        check_product(rng, m=m, k=1280, n=n, x_group=x_group, group_size=group_size, x_dtype=x_dtype, **options)


def test_exact_integers(rng):
    """Sums of int8 codes stay integers: with scales that are powers of two the product is exact."""
    codes = rng.integers(-127, 128, (200, 4096))
    codes[:, 0] = 127
    x = jnp.asarray(codes / 64, jnp.float32)
    weights = rng.integers(-128, 128, (4096, 136))
    packed = jw.pack(jnp.asarray(weights + 128, jnp.uint8), 8)
    qt = jw.QuantizedTensor(packed, jnp.full((1, 136), 0.25), bits=8, k=4096, n=136)
    xq = jw.quantize_activation(x)
    np.testing.assert_array_equal(np.asarray(xq.codes), codes)
    y = jw.matmul(xq, qt, implementation="cuda")
    expected = (codes @ weights).astype(np.float32) * (np.asarray(xq.scales) * np.float32(0.25))
    np.testing.assert_allclose(y, expected, rtol=2.0**-22)


def test_shapes(rng):
    """K that no stage or tile divides, few rows, epilogues, several waves of tiles."""
    rows = {"dtype": "int8", "symmetric": True, "mode": "symmetric", "x_group": None, "group_size": None}
    for m, k, n, bits in ((1, 77, 33, 8), (16, 4100, 100, 4), (513, 136, 8, 8), (2, 31, 1, 4)):
        check_product(rng, m=m, k=k, n=n, bits=bits, **rows)
        check_product(rng, m=m, k=k, n=n, bits=bits, **rows | {"symmetric": False, "mode": "integer_zeros"})
    bias = random_x(rng, (200,), "float32")
    for activation in (None, "relu", "gelu"):
        check_product(rng, m=140, k=256, n=200, bits=8, bias=bias, activation=activation, **rows)
    blocks = rows | {"x_group": 128, "group_size": 128}
    check_product(rng, m=3000, k=512, n=5000, bits=8, **rows)
    check_product(rng, m=3000, k=512, n=5000, bits=4, **blocks)
    for k, mode in ((128, "symmetric"), (640, "symmetric"), (640, "offsets")):  # one stage, and an odd number of them
        check_product(rng, m=140, k=k, n=200, bits=8, **blocks | {"mode": mode})


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_of_blocks(rng, bits):
    """Scales of all float32's bits and of many magnitudes, whose products tensor cores make from pieces."""
    k, n = 768, 200
    for m, x_group, group_size in ((140, 128, 128), (300, 256, 128), (33, None, 256), (70, 128, None)):
        x = random_x(rng, (m, k), "float32") * jnp.asarray(10.0 ** rng.uniform(-9, 9, (m, 1)), jnp.float32)
        weight = random_weight(rng, k, n, bits=bits, mode="symmetric", group_size=group_size, scale_dtype="float32")
        values = quantize(x, x_group, "int8", True).values
        y = jw.matmul(jw.quantize_activation(x, group_size=x_group), weight.qt, implementation="cuda")
        assert_quantized_product(y, values, weight, out_dtype="float32", unit=2.0**-22)


def test_batches(rng):
    """Stacked weights are the kernel's batch; with shared weights rows are more of M."""
    weight = random_weight(rng, 256, 72, bits=4, group_size=128, lead=(3,), scale_dtype="bfloat16")
    x = random_x(rng, (3, 40, 256), "bfloat16")
    values = quantize(x, 128, "int8", True).values
    xq = jw.quantize_activation(x, group_size=128)
    y = jw.matmul(xq, weight.qt, implementation="cuda")
    assert_quantized_product(y, values, weight, out_dtype="bfloat16")
    y = jw.matmul(x[:1], weight.qt, activation_quantization="int8", implementation="cuda")
    assert_quantized_product(y, values[:1], weight, out_dtype="bfloat16")
    one = jax.tree.map(lambda a: a[0], weight.qt)
    y = jax.vmap(lambda xq: jw.matmul(xq, one, implementation="cuda"))(xq)
    np.testing.assert_array_equal(y, jw.matmul(xq, one, implementation="cuda"))


def test_without_a_kernel(rng):
    """Small groups, few rows: dequantized activations, of the 16 bits of the result."""
    x = random_x(rng, (200, 512), "bfloat16")
    for group_size, rows in ((32, 200), (128, 3)):
        weight = random_weight(rng, 512, 96, group_size=group_size, scale_dtype="bfloat16")
        y = jw.matmul(x[:rows], weight.qt, activation_quantization="int8")
        values = quantize(x[:rows], group_size, "int8", True).values
        assert_quantized_product(y, values, weight, out_dtype="bfloat16", noise=2.0**-8)


def test_not_finite(rng):
    weight = random_weight(rng, 256, 64, bits=8)
    x = random_x(rng, (200, 256), "bfloat16").at[1, 5].set(jnp.nan).at[2, 7].set(jnp.inf)
    for group_size, symmetric in ((None, True), (None, False), (128, True)):
        how = jw.ActivationQuantization("int8", group_size, symmetric)
        y = np.asarray(jw.matmul(x, weight.qt, activation_quantization=how, implementation="cuda"), np.float32)
        assert np.isfinite(np.delete(y, [1, 2], 0)).all() and not np.isfinite(y[[1, 2]]).any()


def test_deterministic(rng):
    weight = random_weight(rng, 1024, 512, bits=4, group_size=128, scale_dtype="bfloat16")
    x = random_x(rng, (700, 1024), "bfloat16")
    product = jax.jit(lambda x, qt: jw.matmul(x, qt, activation_quantization="int8"))
    np.testing.assert_array_equal(product(x, weight.qt), product(x, weight.qt))
