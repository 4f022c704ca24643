"""The CPU custom calls, called directly, on every instruction set of this machine, against float64."""

import concurrent.futures
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_wonly import _abi, _ffi, _format

_cpu = pytest.importorskip("jax_wonly._cpu")
if _ffi.ensure_registered()["cpu"] is not None:
    pytest.skip("the CPU kernels are not registered", allow_module_level=True)

ISAS = _cpu.isas()
DTYPES = ("float32", "float16", "bfloat16")
# Half an ulp of each result type, relative.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
MODES = ("symmetric", "integer zeros", "float zeros", "offsets")


@pytest.fixture(params=ISAS)
def isa(request):
    _cpu.force_isa(request.param)
    yield request.param
    _cpu.force_isa("")


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


class Problem:
    """Random operands of one product and its float64 result."""

    def __init__(self, rng, m, k, n, group, *, bits=4, mode="symmetric", x_dtype="float32", scale_dtype="float32", batch=1,
                 leading=None, bias=None):
        leading = {"x": batch, "qw": batch, "scales": batch, "shift": batch, "bias": batch} | (leading or {})
        top = (1 << bits) - 1
        self.bits, self.batch, self.m, self.n = bits, batch, m, n
        self.x = jnp.asarray(rng.normal(0.5, 1.0, (leading["x"], m, k)), x_dtype)
        self.codes = rng.integers(0, top + 1, (leading["qw"], k, n))
        self.qw = _format.pack(jnp.asarray(self.codes, jnp.uint8), bits)
        self.scales = jnp.asarray(rng.uniform(0.002, 0.02, (leading["scales"], k // group, n)), scale_dtype)
        self.shift = None
        shape = (leading["shift"], k // group, n)
        if mode == "integer zeros":
            self.shift = jnp.asarray(rng.integers(0, top + 1, shape), jnp.uint8)
        elif mode == "float zeros":
            self.shift = jnp.asarray(rng.uniform(0, top, shape), scale_dtype)
        elif mode == "offsets":
            self.shift = jnp.asarray(rng.normal(0.05, 0.1, shape), scale_dtype)
        self.shift_mode = {"symmetric": 0, "integer zeros": 1, "float zeros": 1, "offsets": 2}[mode]
        self.bias = None if bias is None else jnp.asarray(rng.normal(0.3, 1.0, (leading["bias"], n)), bias)
        self.group = group

    def weights(self):
        """(W, magnitude of what is added up to it), float64 [B, K, N]."""
        s = np.repeat(np.asarray(self.scales, np.float64), self.group, 1)
        z = 0 if self.shift is None else np.repeat(np.asarray(self.shift, np.float64), self.group, 1)
        if self.shift_mode == 2:
            return self.codes * s + z, self.codes * s + np.abs(z)
        zero = z if self.shift_mode == 1 else 1 << (self.bits - 1)
        return (self.codes - zero) * s, np.abs(self.codes - zero) * s

    def call(self, out_dtype=None, activation=0):
        operands = [self.x, self.qw, self.scales, *(a for a in (self.shift, self.bias) if a is not None)]
        result = jax.ShapeDtypeStruct((self.batch, self.m, self.n), out_dtype or self.x.dtype)
        return jax.jit(
            jax.ffi.ffi_call(_abi.MATMUL, result), static_argnames=("bits", "shift_mode", "has_bias", "activation")
        )(
            *operands,
            bits=np.int64(self.bits),
            shift_mode=np.int64(self.shift_mode),
            has_bias=np.int64(self.bias is not None),
            activation=np.int64(activation),
        )

    def check(self, out_dtype=None, activation=0):
        y = self.call(out_dtype, activation)
        w, magnitude = self.weights()
        x = np.asarray(self.x, np.float64)
        want, bound = np.matmul(x, w), 1e-6 * np.matmul(np.abs(x), np.abs(magnitude))
        if self.bias is not None:
            want = want + np.asarray(self.bias, np.float64)[:, None]
        want = activate(want, activation)
        got = np.asarray(y, np.float64)
        assert got.shape == (self.batch, self.m, self.n)
        bound = 1.2 * bound + 1.01 * ROUNDING[str(y.dtype)] * np.abs(want) + 1e-6
        worst = np.max(np.abs(got - want) / bound, initial=0.0)
        assert worst <= 1.0, worst
        return y


def activate(v, activation):
    if activation == 1:
        return np.maximum(v, 0)
    if activation == 2:
        return np.clip(v, 0, 6)
    if activation == 3:
        return 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))
    if activation == 4:
        return v / (1 + np.exp(-v))
    return v


# M, K, N, group size: every path (few rows, many rows, whole and half tiles, groups that end inside words, several panels).
SHAPES = [
    (1, 128, 64, 64),
    (2, 101, 70, 101),
    (3, 96, 33, 32),
    (4, 320, 130, 160),
    (5, 60, 10, 12),
    (6, 256, 65, 256),
    (11, 64, 16, 32),
    (16, 512, 128, 128),
    (17, 640, 64, 320),
    (33, 192, 65, 96),
    (40, 77, 63, 77),
    (1, 1, 1, 1),
]


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_matmul_against_float64(rng, isa, bits, mode, x_dtype):
    for i, shape in enumerate(SHAPES):
        Problem(rng, *shape, bits=bits, mode=mode, x_dtype=x_dtype, scale_dtype=DTYPES[i % 3]).check()
