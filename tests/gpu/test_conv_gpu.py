"""Convolutions on a GPU: the kernel, and dequantized weights with XLA's convolution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_cases import BANDS, WARPGROUPS, check_conv, check_scheme
from reference import MODES, random_weight, random_x

import jax_wonly as jw

pytestmark = pytest.mark.gpu

GEOMETRIES = {
    "3x3": {"sizes": (9, 11), "window": (3, 3)},
    "strides": {"sizes": (9, 18), "window": (3, 2), "strides": (2, 3), "padding": "VALID"},
    "dilated": {"sizes": (9, 14), "window": (3, 3), "rhs_dilation": (2, 3), "padding": ((3, 1), (0, 4))},
    "cropped": {"sizes": (9, 8), "window": (3, 3), "padding": ((-2, 0), (1, -1))},
    "large": {"sizes": (12, 13), "window": (7, 7), "strides": (2, 2)},
    "1d": {"sizes": (40,), "window": (5,), "strides": (2,)},
    "few inputs": {"sizes": (7, 7), "window": (3, 3), "k": 8},
    "odd inputs": {"sizes": (7, 7), "window": (3, 3), "k": 72},
    "transposed": {"sizes": (9, 11), "window": (3, 3), "lhs_dilation": (2, 2), "padding": ((1, 2), (2, 1))},
    "transposed 4x4": {"sizes": (8, 7), "window": (4, 4), "k": 72, "lhs_dilation": (2, 2), "padding": ((2, 2), (1, 3))},
    "transposed rows": {
        "sizes": (6, 7),
        "window": (5, 3),
        "n": 130,
        "lhs_dilation": (3, 1),
        "padding": ((1, 2), (1, 1)),
    },
    "transposed 1d": {"sizes": (30,), "window": (16,), "lhs_dilation": (8,), "padding": ((11, 11),)},
    "transposed shares": {
        **{"sizes": (8, 8), "window": (3, 3), "k": 512, "group_size": 64, "n": 256, "images": 1},
        **{"lhs_dilation": (2, 2), "padding": ((1, 2), (1, 2))},
    },
    "many": {"sizes": (33, 40), "window": (3, 3), "k": 320, "group_size": 64, "n": 257, "images": 1},
    "shared inputs": {"sizes": (7, 7), "window": (3, 3), "k": 512, "group_size": 128, "n": 512, "images": 1},
}


@pytest.mark.parametrize(("k", "groups", "rounds"), [(64, 1, True), (1, 64, False), (8, 8, True), (3, 1, False)])
def test_rounded_activations(rng, k, groups, rounds):
    """With the default precision of float32 convolutions the kernels of bfloat16 ones, where there are no others."""
    weight = random_weight(rng, k, 64, group_size=None, scale_dtype="bfloat16", lead=(3, 3)).qt
    x = random_x(rng, (2, 12, 12, k * groups))

    def conv(x, **options):
        layout = ("NHWC", "HWIO", "NHWC")
        options = {"padding": "SAME", "dimension_numbers": layout, "feature_group_count": groups} | options
        return jw.conv_general_dilated(x, weight, (1, 1), **options)

    y, exact = conv(x, precision="default"), conv(x)
    assert y.dtype == jnp.float32
    error = np.abs(y - exact).max() / np.abs(exact).max()
    assert error < 2.0**-7
    if rounds:
        rounded = conv(x.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        np.testing.assert_array_equal(y, rounded)
        assert error > 2.0**-14
    elif groups > 1:
        np.testing.assert_array_equal(y, exact)


@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_kernel(rng, geometry, x_dtype):
    case = GEOMETRIES[geometry]
    check_conv(rng, **case, x_dtype=x_dtype, implementation="cuda", rounded_weights=True)


@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", WARPGROUPS)
def test_warpgroups(rng, shape, bits, x_dtype):
    """Every shape of the kernel for few tiles."""
    # The kernel rounds float32 scales to x's type. That is an error of all of a group's sum, which `assert_product`
    # does not allow for, and which is small where weights are as often positive as negative.
    schemes = ("symmetric", 64, x_dtype), ("symmetric", None, "float32"), ("integer_zeros", None, x_dtype)
    for mode, group_size, scale_dtype in schemes:
        scheme = {"bits": bits, "mode": mode, "group_size": group_size, "x_dtype": x_dtype, "scale_dtype": scale_dtype}
        check_conv(rng, **WARPGROUPS[shape], **scheme, implementation="cuda", rounded_weights=True)


@pytest.mark.parametrize("geometry", [name for name, case in GEOMETRIES.items() if case.get("k", 64) % 64 == 0])
def test_geometries_of_warpgroups(rng, geometry):
    """With outputs in whole pieces of 16 bytes, as the kernel for few tiles wants them; no transposed ones."""
    case = GEOMETRIES[geometry]
    for mode, n in (("symmetric", 72), ("integer_zeros", 144)):
        options = {"n": n, "mode": mode, "x_dtype": "bfloat16", "implementation": "cuda", "rounded_weights": True}
        check_conv(rng, **case | options, activation="relu", out_dtype="float32")


@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("geometry", BANDS)
def test_bands(rng, geometry, bits, x_dtype):
    """The kernel for many pixels of few inputs."""
    case = BANDS[geometry] | {"bits": bits, "x_dtype": x_dtype, "implementation": "cuda", "rounded_weights": True}
    check_conv(rng, **case)
    check_conv(rng, **case, mode="integer_zeros", activation="silu")
    check_conv(rng, **case, mode="offsets", group_size=32 if case["k"] == 64 else None, out_dtype="float32")


DEPTHWISE = {
    "3x3": {"sizes": (9, 21), "window": (3, 3), "n": 72, "groups": 72},
    "5x5": {"sizes": (13, 6), "window": (5, 5), "n": 100, "groups": 100, "strides": (2, 2)},
    "7x7": {"sizes": (17, 18), "window": (7, 7), "n": 40, "groups": 40},
    "2x4": {"sizes": (7, 30), "window": (2, 4), "n": 130, "groups": 130, "strides": (1, 2)},
    "odd": {"sizes": (9, 7), "window": (5, 2), "n": 33, "groups": 33, "strides": (1, 3)},
    "multiplied": {"sizes": (6, 9), "window": (3, 3), "n": 99, "groups": 33},
    "dilated": {"sizes": (15, 19), "window": (3, 3), "n": 64, "groups": 64, "strides": (2, 1), "rhs_dilation": (3, 2)},
    "cropped": {"sizes": (9, 8), "window": (3, 3), "n": 40, "groups": 40, "padding": ((-2, 0), (1, -1))},
    "causal": {"sizes": (70,), "window": (4,), "n": 256, "groups": 256, "padding": ((3, 0),)},
    "3d": {"sizes": (3, 4, 10), "window": (2, 3, 2), "n": 16, "groups": 16, "strides": (1, 2, 1)},
    "many": {"sizes": (56, 57), "window": (7, 7), "n": 96, "groups": 96, "images": 10},
}
GROUPED = {
    "fours": {"sizes": (9, 17), "window": (3, 3), "k": 4, "n": 128, "groups": 32, "strides": (2, 2)},
    "twos": {"sizes": (9, 8), "window": (3, 3), "k": 2, "n": 40, "groups": 20, "padding": ((-2, 0), (1, -1))},
    "eights": {"sizes": (8, 9), "window": (3, 3), "k": 8, "n": 128, "groups": 16},
    "halves": {"sizes": (7, 8), "window": (3, 3), "k": 64, "n": 144, "groups": 2, "group_size": 32},
    "odd": {"sizes": (5, 6), "window": (2, 3), "k": 5, "n": 48, "groups": 8, "rhs_dilation": (1, 2)},
    "others": {"sizes": (7, 9), "window": (3, 3), "k": 24, "n": 120, "groups": 5},
    "multiplied": {"sizes": (6, 9), "window": (3, 3), "k": 1, "n": 96, "groups": 32},
    "1x1": {"sizes": (8, 30), "window": (1, 1), "k": 60, "n": 240, "groups": 2},
    "1d": {"sizes": (40,), "window": (5,), "k": 2, "n": 64, "groups": 32},
    "3d": {"sizes": (3, 4, 10), "window": (2, 3, 2), "k": 4, "n": 16, "groups": 4, "strides": (1, 2, 1)},
    "many": {"sizes": (56, 57), "window": (3, 3), "k": 16, "n": 256, "groups": 16, "images": 3},
}


@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("geometry", DEPTHWISE)
def test_depthwise(rng, geometry, x_dtype):
    check_conv(rng, **DEPTHWISE[geometry] | {"k": 1}, x_dtype=x_dtype, activation="silu", implementation="cuda")


@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("geometry", GROUPED)
def test_grouped(rng, geometry, x_dtype):
    check_conv(
        rng, **GROUPED[geometry], x_dtype=x_dtype, activation="relu6", implementation="cuda", rounded_weights=True
    )


@pytest.mark.parametrize("mode", [*MODES, "table"])
@pytest.mark.parametrize("bits", [4, 8])
def test_schemes_of_groups(rng, bits, mode):
    if mode == "table" and bits == 8:
        pytest.skip("tables have 16 entries")
    for x_dtype, scale_dtype in [("bfloat16", "bfloat16"), ("float32", "float16"), ("float16", "float32")]:
        for k, groups, group_size in [(1, 72, None), (6, 4, None), (64, 2, 32)]:
            if k > 1 and x_dtype == "float32":
                continue
            check_conv(
                rng, sizes=(4, 5), window=(3, 3), n=72, k=k, groups=groups, x_dtype=x_dtype, scale_dtype=scale_dtype,
                bits=bits, mode=mode, group_size=group_size, implementation="cuda", rounded_weights=k > 1,
            )  # fmt: skip
    if mode == "symmetric":
        for k, groups in [(1, 72), (8, 9)]:
            check_conv(
                rng, sizes=(4, 5), window=(3, 3), n=72, k=k, groups=groups, x_dtype="bfloat16", shared_scales=True,
                bits=bits, implementation="cuda", rounded_weights=True,
            )  # fmt: skip


@pytest.mark.parametrize("k", [1, 2, 4, 8, 16, 32])
def test_infinities_stay_in_their_group(rng, k):
    weight = random_weight(rng, k, 64, bits=8, lead=(3, 3), scale_dtype="bfloat16")
    x = np.array(random_x(rng, (1, 6, 6, 64), "bfloat16"))
    x[0, 2, 3, 17] = np.inf

    y = jw.conv_general_dilated(
        jnp.asarray(x), weight.qt, (1, 1), "SAME", feature_group_count=64 // k, implementation="cuda"
    )
    # XLA's convolution is no reference: it was seen to carry them from one group of 4 or 8 inputs into the next.
    expected = np.zeros(y.shape, bool)
    first = 17 // k * k
    expected[0, 1:4, 2:5, first : first + k] = True
    assert (~np.isfinite(np.asarray(y, np.float32)) == expected).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_schemes(rng, bits, mode):
    for k, group_size in [(64, 32), (128, 64), (320, None), (512, 256)]:
        for x_dtype, scale_dtype in [("bfloat16", "bfloat16"), ("float16", "float32")]:
            if mode in ("float_zeros", "offsets"):  # for which the kernel wants the type of x
                scale_dtype = x_dtype
            options = {"x_dtype": x_dtype, "scale_dtype": scale_dtype, "activation": "silu", "out_dtype": "float32"}
            check_scheme(rng, bits, mode, k, group_size, sizes=(5, 9), implementation="cuda", **options)


@pytest.mark.parametrize("implementation", [None, "dequantize"])
def test_dispatch(rng, implementation):
    """Float32 images, transposed convolutions and three axes, which have no kernel or no fast one, too."""
    up = {"lhs_dilation": (2, 2), "padding": ((1, 2), (1, 2)), "x_dtype": "bfloat16", "rounded_weights": True}
    for case in (
        {"sizes": (6, 7), "window": (3, 3)},
        {"sizes": (6, 7), "window": (3, 3), "groups": 2, "n": 132},
        {"sizes": (4, 3), "window": (3, 4), "lhs_dilation": (2, 3), "padding": ((2, 1), (0, 3))},
        {"sizes": (4, 3), "window": (3, 3)} | up,
        {"sizes": (40, 41), "window": (3, 3), "k": 512, "n": 512} | up,
        {"sizes": (3, 4, 5), "window": (2, 3, 2)},
        {"sizes": (6, 7), "window": (3, 3), "channels_first": True},
    ):
        check_conv(rng, **case, implementation=implementation)
    check_conv(
        rng,
        sizes=(40, 41),
        window=(3, 3),
        k=128,
        n=256,
        x_dtype="float16",
        scale_dtype="float32",
        with_bias=False,
        rounded_weights=True,
        implementation=implementation,
    )
    check_conv(
        rng, sizes=(6, 7), window=(3, 3), shared_scales=True, x_dtype="bfloat16", implementation="cuda",
        rounded_weights=True,
    )  # fmt: skip


def test_gradients(rng):
    weight = random_weight(rng, 64, 72, group_size=32, lead=(3, 3), scale_dtype="float32")
    x, ct = random_x(rng, (2, 9, 8, 64)), random_x(rng, (2, 9, 8, 72))

    def loss(x, conv):
        return jnp.sum(conv(x) * ct)

    def dense(x):
        w = jnp.asarray(weight.dense, jnp.float32)
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), precision="highest"
        )

    got = jax.jit(jax.grad(lambda x: loss(x, lambda x: jw.conv_general_dilated(x, weight.qt, (1, 1), "SAME"))))(x)
    expected = jax.jit(jax.grad(lambda x: loss(x, dense)))(x)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * float(jnp.abs(expected).max()))


def test_no_kernel_is_an_error(rng):
    qt = jw.quantize(jnp.ones((3, 3, 64, 8)), group_size=64)
    with pytest.raises(ValueError, match="no kernel for this convolution"):
        jw.conv_general_dilated(jnp.ones((1, 4, 4, 64)), qt, (1, 1), "SAME", implementation="cuda")
