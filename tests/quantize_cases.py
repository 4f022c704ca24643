"""Checks of the quantizer that the CPU and the GPU tests share."""

import jax
import jax.numpy as jnp
import numpy as np
import reference

import jax_wonly as jw
from jax_wonly.primitives._common import divide


def awkward_weight(rng, k, n, dtype) -> np.ndarray:
    """Outputs of every kind: plain, zero, constant, one-sided, tiny, large, single outlier, exact ties."""
    w = rng.normal(0.1, 1.0, (k, n))
    kinds = rng.integers(0, 10, n)
    w[:, kinds == 1] = 0
    w[:, kinds == 2] = 0.75
    w[:, kinds == 3] = -1.25
    w[:, kinds == 4] = np.abs(w[:, kinds == 4]) + 2
    w[:, kinds == 5] *= 2e-6  # scales below the normal range of float16
    w[:, kinds == 6] *= 3e4
    w[rng.integers(0, k), kinds == 7] = 50
    w[:, kinds == 8] = rng.integers(-14, 15, (k, (kinds == 8).sum())) / 2  # halfway between two codes
    if dtype == "float16":
        w = np.clip(w, -6e4, 6e4)
    return w.astype(reference.DTYPES[dtype])


def check_codes(rng, *, bits, group_size, mode, dtype, scale_dtype, implementation, k=256, n=67):
    """Every array equals the definition to the bit."""
    w = awkward_weight(rng, k, n, dtype)
    if scale_dtype == "float16":  # the definition leaves offsets and zeros beyond float16 open
        w = np.clip(w, -6e4, 6e4).astype(w.dtype)
    codes, scales, shift = reference.quantize(w, bits, group_size, mode, reference.DTYPES[scale_dtype])

    def run(w):
        return jw.quantize(
            w,
            bits=bits,
            group_size=group_size,
            mode=mode,
            scale_dtype=reference.DTYPES[scale_dtype],
            implementation=implementation,
        )

    qt = jax.jit(run)(jnp.asarray(w))
    np.testing.assert_array_equal(_bits(qt.scales), _bits(scales), err_msg="scales")
    if shift is not None:
        np.testing.assert_array_equal(_bits(qt.offsets if mode == "offsets" else qt.zeros), _bits(shift), err_msg=mode)
    np.testing.assert_array_equal(jw.unpack(qt.qvalue, bits, k, n), codes, err_msg="codes")
    np.testing.assert_array_equal(qt.qvalue, reference.pack(codes, bits), err_msg="packed")


QUOTIENT_DIGITS = {"float16": 11, "bfloat16": 8}


def check_quotients(rng, dtype):
    """Rounded to float32 and then to 16 bits, as the definition of scales and zeros says: once differs now and then."""
    a, b = rng.normal(size=4_000_000).astype(np.float32), rng.uniform(0.5, 2, 4_000_000).astype(np.float32)
    result = jax.jit(lambda a, b: divide(a, b, reference.DTYPES[dtype]))(a, b)
    np.testing.assert_array_equal(_bits(result), _bits((a / b).astype(reference.DTYPES[dtype])))

    def rounded(quotients):
        fractions, exponents = np.frexp(quotients)
        return np.ldexp(np.rint(np.ldexp(fractions, QUOTIENT_DIGITS[dtype])), exponents)

    assert (rounded(a / b.astype(np.float64)) != rounded(a / b)).any()


def _bits(a) -> np.ndarray:
    a = np.asarray(a) + 0  # a zero point of -0 is one of 0
    return a.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[a.dtype.itemsize])


def check_dequantize(rng, *, bits, group_size, mode, scale_dtype, dtype, implementation, lead=(), k=256, n=67):
    weight = reference.random_weight(
        rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=scale_dtype, lead=lead
    )
    w = jw.dequantize(weight.qt, dtype=reference.DTYPES[dtype], implementation=implementation)
    assert w.shape == (*lead, k, n) and str(w.dtype) == dtype
    # One rounding to the result, and those of float32 on the way (with offsets the sum cancels).
    bound = reference.rounding(weight.dense, dtype) + 2.0**-23 * weight.magnitude
    error = np.abs(np.asarray(w).astype(np.float64) - weight.dense)
    assert (error <= bound).all(), (error / bound).max()
