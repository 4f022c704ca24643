"""Convolution with quantized weights on the CPU and through XLA's operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_cases import check_conv, check_scheme
from reference import DTYPES, MODES, random_weight, random_x

import jax_wonly as jw

GEOMETRIES = {
    "3x3": {"sizes": (6, 7), "window": (3, 3)},
    "strides": {"sizes": (9, 8), "window": (3, 2), "strides": (2, 3), "padding": "VALID"},
    "dilated": {"sizes": (9, 8), "window": (3, 3), "rhs_dilation": (2, 3), "padding": ((3, 1), (0, 4))},
    "transposed": {"sizes": (4, 3), "window": (3, 4), "lhs_dilation": (2, 3), "padding": ((2, 1), (0, 3))},
    "cropped": {"sizes": (9, 8), "window": (3, 3), "padding": ((-2, 0), (1, -1))},
    "1d": {"sizes": (11,), "window": (5,), "strides": (2,)},
    "3d": {"sizes": (3, 4, 5), "window": (2, 3, 2), "strides": (1, 2, 1)},
    "0d": {"sizes": (), "window": (), "images": 3},
    "1x1": {"sizes": (5, 6), "window": (1, 1)},
    "1x1 strides": {"sizes": (5, 6), "window": (1, 1), "strides": (2, 3), "padding": ((1, 0), (0, 2))},
    "outside": {"sizes": (2, 3), "window": (5, 5), "padding": "SAME"},
    "empty": {"sizes": (2, 9), "window": (3, 3), "padding": "VALID"},
    "grouped": {"sizes": (5, 6), "window": (3, 3), "groups": 2, "n": 132},
    "depthwise": {"sizes": (5, 6), "window": (3, 3), "groups": 6, "k": 1, "n": 12},
    "few inputs": {"sizes": (9, 8), "window": (7, 7), "k": 3, "strides": (2, 2)},
    "odd inputs": {"sizes": (4, 4), "window": (3, 3), "k": 72, "group_size": None},
}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_geometries(rng, geometry):
    check_conv(rng, **GEOMETRIES[geometry], implementation=[None, "dequantize", "xla"][rng.integers(3)])


@pytest.mark.parametrize(("bits", "mode"), [*((b, m) for b in (4, 8) for m in MODES), (4, "table")])
def test_schemes(rng, bits, mode):
    x_dtype = list(DTYPES)[rng.integers(3)]
    k, group_size = [(64, 32), (128, 64), (320, None), (96, None)][rng.integers(4)]
    implementation = ["cpu", "dequantize", "xla"][rng.integers(3)]
    check_scheme(rng, bits, mode, k, group_size, x_dtype=x_dtype, implementation=implementation)


def test_many_pixels(rng):
    """More than are gathered for a packed product in float32; both ways in 16 bits."""
    check_conv(rng, sizes=(17, 19), window=(3, 3), images=1)
    check_conv(rng, sizes=(17, 19), window=(3, 3), images=1, x_dtype="bfloat16", rounded_weights=True)


def test_shared_scales_and_layouts(rng):
    for implementation in (None, "xla"):
        check_conv(rng, sizes=(4, 5), window=(2, 3), shared_scales=True, implementation=implementation)
    check_conv(rng, sizes=(4, 5), window=(2, 3), channels_first=True, strides=(2, 1))
    check_conv(rng, sizes=(4, 5), window=(1, 1), channels_first=True)
    # Spatial axes in another order in the images than in the weights, and numbers instead of letters.
    weight = random_weight(rng, 64, 8, lead=(2, 3))
    x = random_x(rng, (2, 6, 64, 5))
    y = jw.conv_general_dilated(x, weight.qt, (1, 1), "VALID", dimension_numbers=("NWCH", "HWIO", "CNHW"))
    plain = jw.conv_general_dilated(x.transpose(0, 3, 1, 2), weight.qt, (1, 1), "VALID")
    np.testing.assert_allclose(y, plain.transpose(3, 0, 1, 2), rtol=1e-5, atol=1e-5)
    numbers = jax.lax.ConvDimensionNumbers((0, 2, 3, 1), (3, 2, 0, 1), (1, 0, 2, 3))
    np.testing.assert_array_equal(y, jw.conv_general_dilated(x, weight.qt, (1, 1), "VALID", dimension_numbers=numbers))


@pytest.mark.parametrize("activation", ["relu", "relu6", "gelu", "silu"])
def test_epilogue(rng, activation):
    for implementation, with_bias, x_dtype, out_dtype in [
        (None, True, "float32", "bfloat16"),
        ("dequantize", False, "bfloat16", "float32"),
    ][rng.integers(2) :][:1]:
        check_conv(
            rng,
            sizes=(3, 4),
            window=(3, 3),
            activation=activation,
            with_bias=with_bias,
            x_dtype=x_dtype,
            out_dtype=out_dtype,
            implementation=implementation,
            rounded_weights=True,
        )


def _functions(rng, mode, groups=1):
    """The quantized convolution of its floating operands, and JAX's with the dense weight made of them."""
    weight = random_weight(rng, 64, 6, group_size=32, mode=mode, lead=(3, 2), scale_dtype="float32")
    qt = weight.qt
    codes = jw.unpack(qt.qvalue, 4, 64, 6).astype(jnp.float32)
    bias = random_x(rng, (6,))
    shift = qt.offsets if qt.zeros is None else qt.zeros

    def quantized(x, scales, shift, bias):
        zeros, offsets = (None, shift) if mode == "offsets" else (shift, None)
        tensor = jw.QuantizedTensor(qt.qvalue, scales, zeros, offsets, bits=4, k=64, n=6)
        return jw.conv_general_dilated(
            x, tensor, (2, 1), "SAME", feature_group_count=groups, bias=bias, activation="silu"
        )

    def dense(x, scales, shift, bias):
        scales, shift = (a if a is None else jnp.repeat(a, 32, axis=-2) for a in (scales, shift))
        if mode == "offsets":
            w = codes * scales + shift
        else:
            w = (codes - (8 if shift is None else shift)) * scales
        y = jax.lax.conv_general_dilated(
            x, w, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
        )
        return jax.nn.silu(y + bias)

    return quantized, dense, (random_x(rng, (2, 5, 4, 64 * groups)), qt.scales, shift, bias)


@pytest.mark.parametrize(("mode", "groups"), [("symmetric", 1), ("float_zeros", 2), ("offsets", 1)])
def test_gradients(rng, mode, groups):
    quantized, dense, operands = _functions(rng, mode, groups)
    argnums = tuple(i for i, a in enumerate(operands) if a is not None)
    ct = random_x(rng, jax.eval_shape(quantized, *operands).shape)
    got, expected = (
        jax.jit(jax.grad(lambda *a, f=f: jnp.sum(f(*a) * ct), argnums))(*operands) for f in (quantized, dense)
    )
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * float(jnp.abs(b).max()))


def test_gradient_keeps_weights_packed(rng):
    """What is kept for the backward pass is the packed weight and not the dense one."""
    qt = jw.quantize(random_x(rng, (3, 3, 64, 128)), group_size=64)
    x = random_x(rng, (1, 4, 4, 64))
    _, pullback = jax.vjp(lambda x: jw.conv_general_dilated(x, qt, (1, 1), "SAME"), x)
    assert sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pullback)) <= qt.nbytes + x.nbytes


def test_vmap(rng):
    quantized, dense, operands = _functions(rng, "offsets")

    def stacked(a):
        return jnp.stack([a, a * 1.5, a - 0.25])

    for mapped in [(0,), (0, 1, 2, 3), (3,)]:
        arguments = [stacked(a) if i in mapped else a for i, a in enumerate(operands)]
        axes = [0 if i in mapped else None for i in range(len(operands))]
        got, expected = (jax.jit(jax.vmap(f, axes))(*arguments) for f in (quantized, dense))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)
    # Images alone become more images of one call.
    jaxpr = str(jax.make_jaxpr(jax.vmap(quantized, (0, None, None, None)))(stacked(operands[0]), *operands[1:]))
    assert jaxpr.count("wonly_conv[") == 1
    gradients = [
        jax.jit(jax.vmap(jax.grad(lambda x, f=f: f(x, *operands[1:]).sum())))(stacked(operands[0]))
        for f in (quantized, dense)
    ]
    np.testing.assert_allclose(*gradients, rtol=1e-3, atol=1e-2)


def test_programs(rng):
    """Remat, scan over stacked kernels, and an exported program."""
    pytest.importorskip("flatbuffers")
    qt = jw.quantize(random_x(rng, (2, 3, 3, 64, 64)) / 24, group_size=64)
    x = random_x(rng, (1, 4, 4, 64))

    def layers(x, qt):
        layer = jax.checkpoint(
            lambda x, w: (jw.conv_general_dilated(x, w, (1, 1), "SAME"), None), policy=jw.checkpoint_policy
        )
        return jax.lax.scan(layer, x, qt)[0]

    expected = x
    for i in range(2):
        expected = jw.conv_general_dilated(expected, qt[i], (1, 1), "SAME", implementation="xla")
    np.testing.assert_allclose(layers(x, qt), expected, rtol=1e-4, atol=1e-4)
    assert jax.grad(lambda x: layers(x, qt).sum())(x).shape == x.shape
    program = jax.export.export(jax.jit(layers), disabled_checks=jw.export_disabled_checks())(x, qt)
    np.testing.assert_allclose(jax.export.deserialize(program.serialize()).call(x, qt), layers(x, qt), rtol=1e-5)


def test_rejections(rng):
    x = jnp.ones((1, 4, 4, 64))
    qt = jw.quantize(jnp.ones((3, 3, 64, 8)), group_size=64)
    good = {"window_strides": (1, 1), "padding": "SAME"}
    for error, match, lhs, rhs, options in [
        (TypeError, "rhs is a", x, x, {}),
        (TypeError, "lhs has dtype", x.astype(jnp.int32), qt, {}),
        (ValueError, "lhs has shape", x[0], qt, {}),
        (ValueError, "lhs has shape", x, qt[0], {}),
        (ValueError, "32 features", x[..., :32], qt, {}),
        (ValueError, "feature_group_count=3", jnp.ones((1, 4, 4, 192)), qt, {"feature_group_count": 3}),
        (ValueError, "feature_group_count=0", x, qt, {"feature_group_count": 0}),
        (ValueError, "batch_group_count=2", x, qt, {"batch_group_count": 2}),
        (TypeError, "feature_group_count=1.0", x, qt, {"feature_group_count": 1.0}),
        (TypeError, "window_strides=2", x, qt, {"window_strides": 2}),
        (ValueError, "window_strides=", x, qt, {"window_strides": (1,)}),
        (ValueError, r"window_strides\[1\]=0", x, qt, {"window_strides": (1, 0)}),
        (TypeError, r"rhs_dilation\[0\]=1.5", x, qt, {"rhs_dilation": (1.5, 1)}),
        (ValueError, "lhs_dilation", x, qt, {"lhs_dilation": (2, 2)}),
        (ValueError, "padding='CIRCULAR'", x, qt, {"padding": "CIRCULAR"}),
        (TypeError, "padding=1", x, qt, {"padding": 1}),
        (ValueError, "padding=", x, qt, {"padding": ((1, 1),)}),
        (TypeError, "padding=", x, qt, {"padding": ((1, 1), (1, 0.5))}),
        (ValueError, "dimension_numbers=", x, qt, {"dimension_numbers": ("NHWC", "OIHW", "NHWC")}),
        (TypeError, "dimension_numbers=", x, qt, {"dimension_numbers": ("NHWC", "HWIO", "NHW")}),
        (ValueError, "bias has shape", x, qt, {"bias": jnp.ones(7)}),
        (ValueError, "bias holds NaN", x, qt, {"bias": np.full(8, np.nan, np.float32)}),
        (ValueError, "activation='tanh'", x, qt, {"activation": "tanh"}),
        (ValueError, "implementation='cuda'", x, qt, {"implementation": "cuda"}),
        (TypeError, "preferred_element_type", x, qt, {"preferred_element_type": jnp.int32}),
    ]:
        with pytest.raises(error, match=match):
            jw.conv_general_dilated(lhs, rhs, **(good | options))
    wrong = jw.QuantizedTensor(qt.qvalue, qt.scales[:2], bits=4, k=64, n=8)
    with pytest.raises(ValueError, match=r"rhs.scales has shape \(2, 3, 1, 8\)"):
        jw.conv_general_dilated(x, wrong, **good)
