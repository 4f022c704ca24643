"""Products of the CPU kernels, of random operands, and what they should be: for the custom calls of this machine, and
for the kernels of an emulated one (tests/arm)."""

import jax
import jax.numpy as jnp
import numpy as np
from reference import rounding

from jax_wonly import _abi, _format

DTYPES = ("float32", "float16", "bfloat16")
MODES = ("symmetric", "integer zeros", "float zeros", "offsets")
SCHEMES = [*((bits, mode) for bits in (4, 8) for mode in MODES), (4, "table")]


class Problem:
    """Random operands of one product and its float64 result."""

    def __init__(
        self,
        rng,
        m,
        k,
        n,
        group,
        *,
        bits=4,
        mode="symmetric",
        x_dtype="float32",
        scale_dtype="float32",
        batch=1,
        leading=None,
        bias=None,
    ):
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
        elif mode == "table":
            self.shift = jnp.asarray(rng.normal(0.1, 0.5, (leading["shift"], 1, 16)), jnp.float32)
        self.shift_mode = {"symmetric": 0, "integer zeros": 1, "float zeros": 1, "offsets": 2, "table": 3}[mode]
        self.bias = None if bias is None else jnp.asarray(rng.normal(0.3, 1.0, (leading["bias"], n)), bias)
        self.group = group
        self.has_bias = None  # the attribute, where it is not to follow from the operands

    def weights(self):
        """(W, magnitude of what is added up to it), float64 [B, K, N]."""
        s = np.repeat(np.asarray(self.scales, np.float64), self.group, 1)
        if self.shift_mode == 3:
            entries = np.arange(len(self.shift))[:, None, None] if len(self.shift) > 1 else 0
            w = np.asarray(self.shift, np.float64)[entries, 0, self.codes] * s
            return w, np.abs(w)
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
            has_bias=np.int64(self.bias is not None if self.has_bias is None else self.has_bias),
            activation=np.int64(activation),
        )

    def call_transposed(self, dy):
        operands = [dy, self.qw, self.scales, *(() if self.shift is None else (self.shift,))]
        result = jax.ShapeDtypeStruct((self.batch, self.m, self.codes.shape[1]), dy.dtype)
        return jax.ffi.ffi_call(_abi.MATMUL_TRANSPOSED, result)(
            *operands, bits=np.int64(self.bits), shift_mode=np.int64(self.shift_mode)
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
        bound = 1.2 * bound + rounding(want, y.dtype) + 1e-6
        worst = np.max(np.abs(got - want) / bound, initial=0.0)
        assert worst <= 1.0, worst
        return y

    def check_transposed(self, rng):
        """The gradient of x, of random cotangents."""
        dtype = self.x.dtype
        dy = jnp.asarray(rng.normal(0.5, 1.0, (self.batch, self.m, self.n)), dtype)
        dx = self.call_transposed(dy)
        w, magnitude = (np.swapaxes(a, 1, 2) for a in self.weights())
        dy = np.asarray(dy, np.float64)
        want = np.matmul(dy, w)
        bound = 1.2e-6 * np.matmul(np.abs(dy), np.abs(magnitude)) + rounding(want, dtype) + 1e-6
        worst = np.max(np.abs(np.asarray(dx, np.float64) - want) / bound)
        assert worst <= 1.0, worst


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


# M, K, N, group size: every path (few and many rows, whole and half tiles, groups that end inside words, panels).
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
