"""matmul against float64: the cross product of its options, leading axes, epilogue, bad input."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from matmul_cases import (
    check_broadcasting,
    check_cross_product,
    check_epilogue,
    check_non_finite,
    check_zero_scales,
)
from reference import DTYPES, MODES, assert_product, random_weight, random_x

import jax_wonly as jw
from jax_wonly.primitives import matmul as matmul_primitive


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, None])
@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_cpu_kernel(rng, bits, mode, x_dtype, scale_dtype, group_size):
    check_cross_product(
        rng,
        bits=bits,
        mode=mode,
        x_dtype=x_dtype,
        scale_dtype=scale_dtype,
        group_size=group_size,
        implementation="cpu",
    )


@pytest.mark.parametrize("implementation", ["xla", "dequantize"])
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_other_implementations(rng, bits, mode, x_dtype, implementation):
    check_cross_product(
        rng,
        bits=bits,
        mode=mode,
        x_dtype=x_dtype,
        scale_dtype=str(rng.choice(list(DTYPES))),
        group_size=[32, 64, 128, 256, None][rng.integers(5)],
        implementation=implementation,
        rows=(0, 7),
    )


@pytest.mark.parametrize("implementation", ["cpu", "xla"])
@pytest.mark.parametrize("activation", [None, "relu", "relu6", "gelu", "silu"])
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_epilogue(rng, implementation, activation, x_dtype):
    for out_dtype in (None, *DTYPES):
        check_epilogue(
            rng,
            bits=int(rng.choice([4, 8])),
            mode=str(rng.choice(MODES)),
            x_dtype=x_dtype,
            activation=activation,
            out_dtype=out_dtype,
            implementation=implementation,
        )


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("group_size", [32, None])
@pytest.mark.parametrize("mode", ["float_zeros", "offsets"])
@pytest.mark.parametrize("bits", [4, 8])
def test_transposed_shift_apart(rng, monkeypatch, bits, mode, group_size, lead):
    """Float zeros and offsets of gradients in a product of their own, as on a GPU with many float32 tokens."""
    taken = []
    monkeypatch.setattr(matmul_primitive, "_takes_shift_apart", lambda *args: taken.append(args) or True)
    weight = random_weight(rng, 288, 77, bits=bits, group_size=group_size, mode=mode, lead=lead)
    x = random_x(rng, (*lead, 9, 288), "float32")
    dx = jax.jit(jax.grad(lambda x: jw.matmul(x, weight.qt, implementation="cpu")[..., ::2].sum()))(x)
    assert len(taken) == 1
    expected = np.broadcast_to(weight.dense[..., ::2].sum(-1)[..., None, :], dx.shape)
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-5 * np.abs(weight.dense).sum(-1).max())


@pytest.mark.parametrize("implementation", ["cpu", "xla"])
def test_high_precision_keeps_float32_weights(rng, implementation):
    weight = random_weight(rng, 256, 40, bits=8, group_size=128)
    x = random_x(rng, (9, 256), "bfloat16")
    y = jw.matmul(x, weight.qt, precision="highest", preferred_element_type=jnp.float32, implementation=implementation)
    assert_product(y, x, weight, out_dtype="float32")


def test_low_precision_is_for_gpus(rng):
    weight, x = random_weight(rng, 256, 40, group_size=128), random_x(rng, (40, 256), "float32")
    y = jw.matmul(x, weight.qt, implementation="cpu")
    for precision in ("default", ("default", "high"), (None, "default")):
        np.testing.assert_array_equal(jw.matmul(x, weight.qt, precision=precision, implementation="cpu"), y)


@pytest.mark.parametrize("implementation", ["cpu", "xla"])
@pytest.mark.parametrize(
    ("x_lead", "weight_lead"),
    [
        ((), ()),
        ((2,), ()),
        ((2, 3), ()),
        ((), (3,)),
        ((3,), (3,)),
        ((1,), (3,)),
        ((3,), (1,)),
        ((2, 3), (3,)),
        ((3, 2), (3, 1)),
        ((2, 1), (1, 3)),
        ((2, 3), (2, 3)),
        ((3,), (2, 3)),
        ((1, 1), (1,)),
        ((0,), ()),
        ((0,), (1,)),
        ((), (0,)),
        ((2, 0), (0,)),
    ],
)
def test_leading_axes(rng, x_lead, weight_lead, implementation):
    check_broadcasting(rng, x_lead=x_lead, weight_lead=weight_lead, implementation=implementation)


@pytest.mark.parametrize("weight_lead", [(), (3,), (2, 3)])
def test_vector(rng, weight_lead):
    check_broadcasting(rng, x_lead=(), weight_lead=weight_lead, vector=True)


def test_leading_axes_of_each_operand(rng):
    """Scales, zeros and bias may have leading axes that the codes lack."""
    weight = random_weight(rng, 64, 9, group_size=32, mode="float_zeros", lead=(2, 3))
    codes = np.asarray(jw.unpack(weight.qt.qvalue, 4, 64, 9))[0, 0].astype(np.float64)
    x, bias = random_x(rng, (3, 4, 64)), random_x(rng, (2, 1, 9))
    y = jw.matmul(x, weight.qt.qvalue[0, 0], weight.qt.scales, weight.qt.zeros[:, :1], bias=bias)
    scales, zeros = (np.repeat(np.asarray(a, np.float64), 32, -2) for a in (weight.qt.scales, weight.qt.zeros[:, :1]))
    expected = np.asarray(x, np.float64) @ ((codes - zeros) * scales) + np.asarray(bias, np.float64)[..., None, :]
    assert y.shape == (2, 3, 4, 9)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@given(
    bits=st.sampled_from([4, 8]),
    groups=st.integers(1, 4),
    group_size=st.sampled_from([32, 64]),
    n=st.integers(1, 150),
    m=st.integers(0, 40),
    mode=st.sampled_from(MODES),
    x_dtype=st.sampled_from(list(DTYPES)),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(bits, groups, group_size, n, m, mode, x_dtype, seed):
    rng = np.random.default_rng(seed)
    k = groups * group_size
    weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode)
    x = random_x(rng, (m, k), x_dtype)
    assert_product(jw.matmul(x, weight.qt), x, weight, rounded_weights=True)


@given(
    bits=st.sampled_from([4, 8]),
    k=st.integers(1, 300),
    n=st.integers(1, 100),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_inputs_per_channel(bits, k, n, seed):
    rng = np.random.default_rng(seed)
    weight = random_weight(rng, k, n, bits=bits, mode="integer_zeros")
    x = random_x(rng, (3, k))
    assert_product(jw.matmul(x, weight.qt), x, weight)


def test_non_finite(rng):
    check_non_finite(rng)


@pytest.mark.parametrize("group_size", [32, None])
@pytest.mark.parametrize("mode", MODES)
def test_zero_scales(rng, mode, group_size):
    check_zero_scales(rng, mode=mode, group_size=group_size, x_dtype="bfloat16", implementation="cpu")


def test_deterministic(rng):
    weight = random_weight(rng, 512, 300, group_size=64)
    for m in (1, 5, 70):
        x = random_x(rng, (m, 512))
        y = np.asarray(jw.matmul(x, weight.qt))
        for _ in range(5):
            np.testing.assert_array_equal(jw.matmul(x, weight.qt), y)


def test_numpy_arrays_and_types(rng):
    weight = random_weight(rng, 64, 9, group_size=32)
    x = np.asarray(random_x(rng, (3, 64)))
    y = jw.matmul(x, *(np.asarray(a) for a in weight.qt))
    np.testing.assert_array_equal(y, jw.matmul(jnp.asarray(x), weight.qt))
    assert jw.matmul(x.astype(ml_dtypes.bfloat16), weight.qt).dtype == jnp.bfloat16
    assert jw.matmul(x, weight.qt, preferred_element_type="bfloat16").dtype == jnp.bfloat16


def test_bits_follow_from_the_shapes(rng):
    for bits in (4, 8):
        small = random_weight(rng, 32, 9, bits=bits)
        x = random_x(rng, (3, 32))
        qw, scales = small.qt
        with pytest.raises(ValueError, match="K=32 fits both.*pass bits=4 or bits=8"):
            jw.matmul(x, qw, scales)
        assert_product(jw.matmul(x, qw, scales, bits=bits), x, small)
        assert_product(jw.matmul(x, small.qt), x, small)
        large = random_weight(rng, 33, 9, bits=bits)
        x = random_x(rng, (3, 33))
        assert_product(jw.matmul(x, *large.qt), x, large)


X = np.ones((2, 256), np.float32)


def arguments(**changes):
    """A valid call of the array form, with changes."""
    w = (np.arange(256 * 70).reshape(256, 70) % 13 - 6).astype(np.float32)
    qw, scales = (np.asarray(a) for a in jw.quantize(w, group_size=64))
    good = {"x": X, "qw": qw, "scales": scales}
    return good | {key: value(good) if callable(value) else value for key, value in changes.items()}


ZEROS = np.zeros((4, 70), np.float32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": X.tolist()}, TypeError, "x is a list; accepted: an array of dtype float16, bfloat16, float32"),
        ({"x": X.astype(np.float64)}, TypeError, "x has dtype float64; accepted: float16, bfloat16, float32"),
        ({"x": X.astype(np.int32)}, TypeError, "x has dtype int32"),
        ({"x": X[0, 0]}, (TypeError, ValueError), r"x has shape \(\)"),
        ({"x": X[:, :0]}, ValueError, r"x has shape \(2, 0\)"),
        ({"x": X[:, :192]}, ValueError, r"qw has shape \(2, 4, 512\), which does not hold K=192 inputs"),
        ({"x": X[:, :255]}, ValueError, r"scales has shape \(4, 70\), 4 groups for K=255; accepted here: 1 groups"),
        ({"qw": lambda a: a["qw"].astype(np.int32)}, TypeError, "qw has dtype int32; accepted: uint32"),
        ({"qw": lambda a: a["qw"][0]}, ValueError, r"qw has shape \(4, 512\); accepted: \[..., ceil"),
        ({"qw": lambda a: a["qw"][..., :256]}, ValueError, r"qw has shape \(2, 4, 256\)"),
        ({"qw": lambda a: a["qw"][:1]}, ValueError, r"qw has shape \(1, 4, 512\); accepted: \[..., 2, 4, 512\]"),
        ({"qw": lambda a: a["qw"].tolist()}, TypeError, "qw is a list"),
        ({"bits": 8}, ValueError, r"qw has shape \(2, 4, 512\); accepted: \[..., 2, 8, 512\]"),
        ({"bits": 5}, ValueError, "bits=5 is not supported; accepted: 4, 8"),
        ({"scales": None}, TypeError, "scales is None; accepted: an array"),
        ({"scales": lambda a: a["scales"].astype(np.int8)}, TypeError, "scales has dtype int8"),
        ({"scales": lambda a: a["scales"][0]}, ValueError, r"scales has shape \(70,\); accepted: .* \[1, N\]"),
        ({"scales": lambda a: a["scales"][:3]}, ValueError, r"3 groups for K=256; accepted here: 8, 4, 2, 1, 1 groups"),
        ({"scales": lambda a: a["scales"][:0]}, ValueError, "0 groups for K=256"),
        ({"scales": lambda a: np.ones((16, 70), np.float32)}, ValueError, "16 groups for K=256"),
        ({"scales": lambda a: a["scales"] * np.nan}, ValueError, "scales holds NaN or Inf"),
        ({"zeros": ZEROS, "offsets": ZEROS}, ValueError, "zeros and offsets are both given"),
        ({"zeros": ZEROS[:3]}, ValueError, r"zeros has shape \(3, 70\); accepted: \[..., 4, 70\]"),
        ({"zeros": ZEROS.astype(np.int32)}, TypeError, "zeros has dtype int32; accepted: uint8, float16"),
        ({"offsets": ZEROS[:, 1:]}, ValueError, r"offsets has shape \(4, 69\)"),
        ({"offsets": ZEROS.astype(np.uint8)}, TypeError, "offsets has dtype uint8"),
        ({"offsets": ZEROS + np.inf}, ValueError, "offsets holds NaN or Inf"),
        ({"bias": ZEROS[0, 1:]}, ValueError, r"bias has shape \(69,\); accepted: \[..., 70\]"),
        ({"bias": ZEROS[0].astype(int)}, TypeError, "bias has dtype int64"),
        ({"activation": "tanh"}, ValueError, "activation='tanh'.*accepted: None, 'relu', 'relu6', 'gelu', 'silu'"),
        ({"preferred_element_type": "int8"}, TypeError, "preferred_element_type=int8"),
        ({"precision": "most"}, ValueError, "precision='most' is not supported; accepted: None, 'default'"),
        ({"precision": ("high", "most")}, ValueError, "precision='most' is not supported"),
        ({"precision": ("high",) * 3}, ValueError, r"precision=\('high', 'high', 'high'\) is not supported"),
        ({"implementation": "pallas"}, ValueError, "implementation='pallas' is not supported"),
        ({"implementation": "cuda"}, ValueError, "implementation='cuda' was asked for, but .* lowered for 'cpu'"),
        (
            {"x": np.ones((3, 2, 256), np.float32), "qw": lambda a: np.stack([a["qw"]] * 2)},
            ValueError,
            r"leading axes do not broadcast: x \[3\], qw \[2\], scales \[\]",
        ),
    ],
)
def test_bad_input(changes, error, message):
    with pytest.raises(error, match=message):
        jw.matmul(**arguments(**changes))


def test_bad_input_with_a_quantized_tensor():
    qt = jw.quantize(np.ones((256, 70), np.float32))
    with pytest.raises(ValueError, match=r"x has shape \(2, 128\); accepted: \[..., 256\]"):
        jw.matmul(X[:, :128], qt)
    with pytest.raises(TypeError, match="carries its scales"):
        jw.matmul(X, qt, qt.scales)
    with pytest.raises(TypeError, match="x has dtype float64"):
        X.astype(np.float64) @ qt


def test_good_arguments_are_good():
    """The base of the table of bad input is accepted, so that each row fails for its change alone."""
    a = arguments()
    assert jw.matmul(**a).shape == (2, 70)
    assert jw.matmul(**arguments(zeros=ZEROS, bias=ZEROS[0], activation="relu")).shape == (2, 70)


def test_no_wide_rounding(rng):
    """The bound of these tests is tight enough to see partial sums in 16 bits."""
    weight = random_weight(rng, 256, 64, group_size=64)
    x = random_x(rng, (4, 256), "bfloat16")
    sloppy = np.zeros((4, 64), ml_dtypes.bfloat16)
    for group in range(4):
        part = np.asarray(x, np.float64)[:, group * 64 :][:, :64] @ weight.dense[group * 64 :][:64]
        sloppy = (sloppy.astype(np.float64) + part).astype(ml_dtypes.bfloat16)
    with pytest.raises(AssertionError, match="times the bound"):
        reference.assert_product(sloppy, x, weight)
