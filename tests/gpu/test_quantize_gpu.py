"""The CUDA quantizer and dequantizer: the same checks as on the CPU."""

import jax
import numpy as np
import pytest
from quantize_cases import QUOTIENT_DIGITS, check_codes, check_dequantize, check_quotients
from reference import DTYPES, MODES

import jax_wonly as jw

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_codes(rng, mode, bits, dtype, scale_dtype):
    for group_size, k, n in [(32, 96, 67), (64, 256, 130), (128, 384, 64), (256, 512, 257), (None, 101, 3)]:
        check_codes(
            rng,
            bits=bits,
            group_size=group_size,
            mode=mode,
            dtype=dtype,
            scale_dtype=scale_dtype,
            implementation="cuda",
            k=k,
            n=n,
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_codes_of_xla(rng, mode, bits, scale_dtype):
    """XLA's own quotients on a GPU are not rounded to the nearest."""
    shape = {"k": 256, "n": 1030, "group_size": 64}
    check_codes(rng, bits=bits, mode=mode, dtype="float32", scale_dtype=scale_dtype, implementation="xla", **shape)


@pytest.mark.parametrize("dtype", QUOTIENT_DIGITS)
def test_quotients_are_rounded_twice(rng, dtype):
    check_quotients(rng, dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize(rng, mode, bits, scale_dtype, dtype):
    for group_size, k, n, lead in [(32, 96, 67, ()), (128, 256, 130, (2,)), (None, 45, 70, (2, 3))]:
        check_dequantize(
            rng,
            bits=bits,
            group_size=group_size,
            mode=mode,
            scale_dtype=scale_dtype,
            dtype=dtype,
            implementation="cuda",
            lead=lead,
            k=k,
            n=n,
        )


@pytest.mark.parametrize("mode", MODES)
def test_leading_axes_and_vmap(rng, mode):
    w = rng.normal(size=(2, 3, 128, 70)).astype(np.float32)
    qt = jw.quantize(w, mode=mode, group_size=32)
    single = jw.quantize(w[1, 2], mode=mode, group_size=32)
    mapped = jax.vmap(jax.vmap(lambda m: jw.quantize(m, mode=mode, group_size=32)))(w)
    for a, b, c in zip(qt, single, mapped, strict=True):
        np.testing.assert_array_equal(a[1, 2], b)
        np.testing.assert_array_equal(a, c)


@pytest.mark.slow
@pytest.mark.device
@pytest.mark.parametrize("mode", MODES)
def test_a_large_weight(rng, mode):
    """More tiles than threads of one launch, against the CPU's codes."""
    w = rng.normal(0.01, 0.02, (4096, 1537)).astype(np.float32)
    on_gpu = [jw.quantize(w, mode=mode, implementation=implementation) for implementation in ("cuda", "xla")]
    with jax.default_device(jax.devices("cpu")[0]):
        on_cpu = jw.quantize(w, mode=mode, implementation="cpu")
    for qt in on_gpu:
        for a, b in zip(qt, on_cpu, strict=True):
            np.testing.assert_array_equal(a, b)
