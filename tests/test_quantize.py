"""quantize and dequantize: codes to the bit, values to one rounding, options, transformations, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.test_util import check_grads
from quantize_cases import QUOTIENT_DIGITS, check_codes, check_dequantize, check_quotients
from reference import DTYPES, MODES

import jax_wonly as jw

IMPLEMENTATIONS = ("cpu", "xla")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_codes(rng, implementation, mode, bits, dtype, scale_dtype):
    group_size = int(rng.choice([32, 64, 128, 256]))
    check_codes(
        rng,
        bits=bits,
        group_size=group_size,
        mode=mode,
        dtype=dtype,
        scale_dtype=scale_dtype,
        implementation=implementation,
    )


@pytest.mark.parametrize("dtype", QUOTIENT_DIGITS)
def test_quotients_are_rounded_twice(rng, dtype):
    check_quotients(rng, dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("k", "n", "group_size"), [(101, 3, None), (1, 1, None), (96, 130, 32), (64, 64, 64)])
def test_codes_of_odd_shapes(rng, implementation, mode, k, n, group_size):
    for bits in (4, 8):
        check_codes(
            rng,
            bits=bits,
            group_size=group_size,
            mode=mode,
            dtype="float32",
            scale_dtype="bfloat16",
            implementation=implementation,
            k=k,
            n=n,
        )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_dequantize(rng, implementation, mode, bits, scale_dtype):
    for dtype in DTYPES:
        check_dequantize(
            rng,
            bits=bits,
            group_size=64,
            mode=mode,
            scale_dtype=scale_dtype,
            dtype=dtype,
            implementation=implementation,
        )
    check_dequantize(
        rng,
        bits=bits,
        group_size=None,
        mode=mode,
        scale_dtype=scale_dtype,
        dtype="float32",
        implementation=implementation,
        lead=(2, 3),
        k=45,
        n=70,
    )


@pytest.mark.parametrize("mode", MODES)
def test_error_is_half_a_step(rng, mode):
    w = rng.normal(0.2, 1.0, (256, 40)).astype(np.float32)
    for bits in (4, 8):
        qt = jw.quantize(w, bits=bits, group_size=64, mode=mode)
        step = np.repeat(np.asarray(qt.scales), 64, axis=0)
        # An integer zero moves the grid by up to half a step, so that the ends of the range clip by as much.
        allowed = 1.01 if mode == "integer_zeros" else 0.51
        assert (np.abs(np.asarray(qt.dequantize()) - w) <= allowed * step).all()


def test_defaults(rng):
    w = jnp.asarray(rng.normal(size=(256, 96)), jnp.bfloat16)
    qt = jw.quantize(w)
    assert (qt.bits, qt.group_size, qt.dtype, qt.zeros, qt.offsets) == (4, 128, jnp.bfloat16, None, None)
    qw, scales = jw.quantize(w)
    np.testing.assert_array_equal(qw, qt.qvalue)
    assert scales.shape == (2, 96)
    assert jw.quantize(w, group_size=-1).group_size == 256
    _, _, zeros = jw.quantize(w, mode="integer_zeros")
    assert zeros.dtype == jnp.uint8
    np.testing.assert_array_equal(jw.dequantize(qw, scales, k=256), qt.dequantize())


def test_leading_axes_and_vmap(rng):
    w = rng.normal(size=(2, 3, 128, 70)).astype(np.float32)
    for mode in MODES:
        qt = jw.quantize(w, mode=mode, group_size=32)
        single = jw.quantize(w[1, 2], mode=mode, group_size=32)
        mapped = jax.vmap(
            jax.vmap(lambda m, mode=mode: jw.quantize(m, mode=mode, group_size=32), in_axes=2, out_axes=0)
        )(np.moveaxis(w, 1, 3))
        assert qt.shape == mapped.shape == (2, 3, 128, 70)
        for a, b, c in zip(qt, single, mapped, strict=True):
            np.testing.assert_array_equal(a[1, 2], b)
            np.testing.assert_array_equal(a, c)
        back = jax.vmap(jax.vmap(jw.dequantize))(qt)
        np.testing.assert_array_equal(back, jw.dequantize(qt))


def test_no_layer(rng):
    qt = jw.quantize(np.zeros((0, 64, 64), np.float32), group_size=64)
    assert qt.shape == (0, 64, 64) and jw.dequantize(qt).shape == (0, 64, 64)


def test_one_custom_call():
    w = jnp.ones((4, 64, 64))

    def calls(f, *args):
        return jax.jit(f).lower(*args).compile().as_text().count('custom_call_target="wonly_')

    assert calls(lambda w: jw.quantize(w, group_size=64), w) == 1
    assert calls(jax.vmap(lambda w: jw.quantize(w, group_size=64)), w) == 1
    assert calls(jax.vmap(jw.dequantize), jw.quantize(w, group_size=64)) == 1
    assert calls(lambda w: jw.quantize(w, group_size=64, implementation="xla"), w) == 0


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_dequantize(rng, mode):
    weight = reference.random_weight(rng, 64, 5, bits=8, group_size=32, mode=mode)
    floats = {k: v for k, v in weight.arrays.items() if v is not None and jnp.issubdtype(v.dtype, jnp.floating)}

    def f(floats):
        return jw.dequantize(weight.qt.qvalue, **(weight.arrays | floats), k=64)

    # (q - z) * s is of second order, so that a central difference is exact whatever its step.
    check_grads(f, (floats,), order=1, eps=1.0, atol=1e-2, rtol=1e-3)


def test_quantize_has_no_gradient():
    with pytest.raises(NotImplementedError, match="stop_gradient"):
        jax.grad(lambda w: jw.quantize(w, group_size=64).scales.sum())(jnp.ones((64, 8)))


W = np.ones((256, 8), np.float32)


@pytest.mark.parametrize(
    ("w", "options", "error", "message"),
    [
        (W.tolist(), {}, TypeError, "w is a list; accepted: an array of dtype float16, bfloat16, float32"),
        (W.astype(np.float64), {}, TypeError, "w has dtype float64"),
        (W.astype(np.int8), {}, TypeError, "w has dtype int8"),
        (W[0], {}, ValueError, r"w has shape \(8,\); accepted: \[..., K, N\]"),
        (W[:0], {}, ValueError, r"w has shape \(0, 8\)"),
        (W, {"bits": 3}, ValueError, "bits=3 is not supported; accepted: 4, 8"),
        (W, {"bits": True}, ValueError, "bits=True"),
        (W, {"group_size": 48}, ValueError, "group_size=48 is not supported; accepted: 32, 64, 128, 256, None or -1"),
        (W, {"group_size": 0}, ValueError, "group_size=0"),
        (W, {"group_size": 64.0}, TypeError, "group_size=64.0 is not an integer"),
        (W[:192], {}, ValueError, "group_size=128 does not divide K=192; accepted here: 32, 64, None"),
        (W, {"mode": "asymmetric"}, ValueError, "mode='asymmetric'.*accepted: 'symmetric', 'integer_zeros'"),
        (W, {"scale_dtype": np.float64}, TypeError, "scale_dtype=float64"),
        (W, {"scale_dtype": "nothing"}, TypeError, "scale_dtype='nothing' is not a dtype"),
        (W, {"implementation": "triton"}, ValueError, "implementation='triton'.*accepted: None, 'xla'"),
        (W * np.nan, {}, ValueError, r"w of shape \(256, 8\) holds NaN or Inf"),
        (W * np.inf, {}, ValueError, "holds NaN or Inf"),
    ],
)
def test_errors(w, options, error, message):
    with pytest.raises(error, match=message):
        jw.quantize(w, **options)


def test_dequantize_errors():
    qt = jw.quantize(W)
    with pytest.raises(TypeError, match="carries its scales"):
        jw.dequantize(qt, qt.scales)
    with pytest.raises(TypeError, match="k is None"):
        jw.dequantize(qt.qvalue, qt.scales)
    with pytest.raises(TypeError, match="dtype=int8 is not supported"):
        jw.dequantize(qt, dtype=np.int8)
    with pytest.raises(ValueError, match=r"qw has shape \(1, 4, 512\), which does not hold K=512"):
        jw.dequantize(qt.qvalue, qt.scales, k=512)
