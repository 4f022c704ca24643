"""Tests of every compiled kernel on this machine against float64 and integer references, in seconds."""

import importlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.ffi
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_wonly import _abi, _cuda_dispatch, _ffi, static
from jax_wonly._activation import quantize_activation
from jax_wonly._conv import conv_general_dilated
from jax_wonly._experts import gather_matmul, ragged_dot
from jax_wonly._explain import explain
from jax_wonly._format import bias_of, pack, pack_with, unpack
from jax_wonly._matmul import matmul
from jax_wonly._quantize import MODES, dequantize, quantize
from jax_wonly._tensor import QuantizedTensor
from jax_wonly.primitives import quantize as definition

_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_UNITS = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}
_SCHEMES = (("int8", True), ("int8", False), ("float8_e4m3fn", True))  # of activations, and whether symmetric
CONVERSIONS = "wonly_selftest_conversions_v1"


@dataclass(frozen=True)
class Case:
    """One call and what it must give."""

    what: str
    """In words, for the report of a failure."""
    function: Callable
    operands: tuple
    check: Callable[..., float]
    """Of the results as NumPy arrays: the largest error over what is allowed, above 1 a failure."""
    kernel: str = ""
    """The kernel that is expected to run, where the dispatch has several."""


@dataclass(frozen=True)
class Outcome:
    """What the cases of one custom call came to, on one device and, on CPUs, with one instruction set."""

    platform: str
    variant: str
    target: str
    cases: int
    worst: float
    """The largest error over what is allowed; above 1, or NaN, in a failure."""
    seconds: float
    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.failures


def _ratio(error, bound) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error == 0, 0.0, error / bound)
    return float(np.max(ratio, initial=0.0)) if np.isfinite(ratio).all() else float("inf")


def _excess(ratio: float) -> str:
    if not np.isfinite(ratio):
        return "the result is not that of the reference"
    return f"the error is {ratio:.3g} times what is allowed"


class _Weight:
    """Random codes, scales and zeros or offsets ``[..., K, N]``, and what they stand for in float64."""

    def __init__(self, rng, k, n, *, bits, group_size, mode, scale_dtype, lead=()):
        shape = (*lead, k // (group_size or k), n)
        self.codes = rng.integers(0, 2**bits, (*lead, k, n), dtype=np.uint8)
        self.scales = (rng.uniform(0.3, 1.0, shape) * 2.0 ** (1 - bits)).astype(_DTYPES[scale_dtype])
        self.shift = None
        if mode == "integer_zeros":
            self.shift = rng.integers(0, 2**bits, shape, dtype=np.uint8)
        elif mode == "float_zeros":
            self.shift = rng.uniform(-1, 2**bits, shape).astype(_DTYPES[scale_dtype])
        elif mode == "offsets":
            self.shift = rng.normal(-0.5, 1.0, shape).astype(_DTYPES[scale_dtype])
        self.mode, self.bits, self.group_size = mode, bits, group_size or k
        self.table = rng.normal(0.1, 0.5, 16).astype(np.float32) if mode == "table" else None
        zeros, offsets = (None, self.shift) if mode == "offsets" else (self.shift, None)
        packed = pack_with(np, self.codes, bits)  # a program to pack each shape would take longer than the tests
        table = None if self.table is None else tuple(self.table.tolist())
        self.qt = QuantizedTensor(packed, self.scales, zeros, offsets, bits=bits, k=k, n=n, table=table)

    def dense(self, columns: slice | np.ndarray = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """The float64 weight of some outputs, and the magnitudes that a kernel adds up for it and cancels."""

        def spread(a):
            return np.repeat(np.asarray(a[..., columns]).astype(np.float64), self.group_size, axis=-2)

        codes, s = self.codes[..., columns].astype(np.float64), spread(self.scales)
        if self.table is not None:
            dense = self.table.astype(np.float64)[self.codes[..., columns]] * s
            return dense, np.abs(dense)
        if self.mode == "offsets":
            o = spread(self.shift)
            return codes * s + o, codes * s + np.abs(o)
        z = bias_of(self.bits) if self.shift is None else spread(self.shift)
        return (codes - z) * s, (codes + np.abs(z)) * s


def _x(rng, shape, dtype: str) -> np.ndarray:
    return rng.normal(0.3, 1.0, shape).astype(_DTYPES[dtype])  # a mean other than zero shows wrong zeros


def _product_bound(x64, dense, magnitude, exact, dtype: str, *, rounded_weights=False, terms=None):
    """Float32 accumulation of what is added up, and one rounding of the result."""
    bound = 2.0**-20 * max(1.0, np.sqrt(terms or x64.shape[-1]) / 8) * (np.abs(x64) @ magnitude)
    if rounded_weights and dtype != "float32":
        bound = bound + 4 * _UNITS[dtype] * np.sqrt((x64**2) @ (dense**2))
    return 1.2 * bound + 1.01 * _UNITS[dtype] * np.abs(exact) + 1e-7


def _scheme_text(bits, group_size, mode, dtype) -> str:
    return f"int{bits}, group {group_size or 'all'}, {mode}, x {dtype}"


def _schemes(platform: str) -> Iterator[tuple[int, str, str, int | None]]:
    """Every pair of bits, mode and type of x, with the group sizes by turns."""
    sizes = itertools.cycle((32, None, 128, 64, 256))
    for bits, mode, dtype in itertools.product((4, 8), MODES, _DTYPES):
        yield bits, mode, dtype, next(sizes)


def _has_products(platform: str, dtype: str) -> bool:
    return platform == "cpu" or _cuda_dispatch.has_kernels(dtype)


def _knows_tables(platform: str, transpose: bool) -> bool:
    """Whether there are such products with a table: GPUs but Hopper dequantize it for gradients."""
    return platform == "cpu" or not transpose or _cuda_dispatch.has_warpgroups()


def _matmul(rng, platform: str) -> Iterator[Case]:
    rows = itertools.cycle((1, 5, 20) if platform == "cpu" else (1, 5, 20, 40, 130))
    plain = [(b, m, d, g, next(rows), 256 if g else 101, 72, None, False) for b, m, d, g in _schemes(platform)]
    fused = [
        (4, "symmetric", "bfloat16", 64, 5, 128, 70, "gelu", True),
        (8, "offsets", "float32", 32, 20, 96, 70, "silu", True),
        (4, "integer_zeros", "float16", 128, 3, 384, 130, "relu6", True),
        (4, "table", "bfloat16", 64, 3, 256, 130, None, False),
        (4, "table", "float16", None, 12, 101, 72, "silu", True),
        (4, "table", "float32", 64, 9, 256, 130, "silu", True),
    ]
    # Weights of 1 MiB are what the decode kernel starts at.
    large = [
        (4, "symmetric", "bfloat16", 128, 1, 4096, 8192, None, False),
        (4, "integer_zeros", "float16", 128, 2, 2048, 1100, "relu", True),
        (8, "symmetric", "bfloat16", 128, 2, 1024, 1100, None, False),
        (8, "symmetric", "bfloat16", None, 2, 1096, 1100, None, True),
        (4, "integer_zeros", "float16", None, 1, 2120, 1100, "relu", False),
        (8, "symmetric", "float32", None, 1, 1096, 1100, None, False),
        (8, "offsets", "bfloat16", 32, 1, 2048, 4400, None, False),
        (4, "symmetric", "float32", 64, 1, 2048, 1100, None, False),
        (8, "symmetric", "float32", 64, 1, 2048, 1100, None, False),
        (4, "symmetric", "float32", 128, 4, 2176, 1100, None, True),
        (4, "integer_zeros", "float32", 32, 7, 1088, 1001, "relu", False),
        (4, "offsets", "float16", 64, 2, 2048, 1100, None, False),
        (4, "integer_zeros", "bfloat16", 32, 1, 2048, 1100, None, False),
        (8, "symmetric", "bfloat16", 32, 2, 1024, 1100, None, True),
        (4, "symmetric", "bfloat16", 128, 3, 5120, 5120, None, False),
        (4, "integer_zeros", "float16", None, 8, 1088, 1001, "relu", True),
        (4, "symmetric", "float16", 256, 5, 4096, 1100, None, True),
        (4, "symmetric", "bfloat16", 32, 4, 1088, 1001, None, False),
        (4, "integer_zeros", "bfloat16", 64, 6, 1088, 1001, None, True),
        (4, "float_zeros", "float16", 64, 7, 1088, 1001, "relu", False),
        (4, "offsets", "bfloat16", 128, 8, 2176, 1001, None, False),
        (4, "integer_zeros", "float16", 32, 9, 1088, 1001, "relu", True),
        (4, "symmetric", "bfloat16", 128, 16, 1024, 512, None, False),
        (4, "symmetric", "bfloat16", 128, 45, 1024, 512, None, False),
        (4, "integer_zeros", "bfloat16", 64, 70, 1024, 512, None, False),
        (8, "integer_zeros", "float16", None, 90, 1024, 512, None, False),
        (8, "symmetric", "float16", None, 140, 1024, 512, None, False),
        (4, "symmetric", "float32", 128, 20, 1024, 1000, "silu", True),
        (8, "integer_zeros", "float32", 32, 600, 256, 528, None, False),
        (4, "offsets", "float32", 128, 24, 2048, 1100, "silu", True),
        (8, "float_zeros", "float32", 64, 70, 1088, 1001, None, False),
        (4, "table", "bfloat16", 64, 60, 1024, 512, "relu", True),
        (4, "table", "float16", 32, 24, 1088, 1001, None, False),
        (4, "table", "float32", 128, 90, 1024, 1000, None, True),
        # So many are multiplied in tiles.
        (8, "offsets", "float16", 128, 700, 256, 8206, None, True),
        (4, "integer_zeros", "bfloat16", 32, 1600, 256, 4102, "silu", False),
        (4, "table", "bfloat16", 64, 400, 512, 4096, None, True),
    ]
    for bits, mode, dtype, size, m, k, n, activation, has_bias in plain + fused + (large if platform == "cuda" else []):
        if not _has_products(platform, dtype):
            continue
        weight = _Weight(rng, k, n, bits=bits, group_size=size, mode=mode, scale_dtype=dtype)
        x, bias = _x(rng, (m, k), dtype), (rng.normal(1, 3, n).astype(np.float32) if has_bias else None)
        columns = np.arange(n) if n <= 1024 else rng.choice(n, 256, replace=False)
        found = explain(x, weight.qt, platform=platform, implementation=platform)
        kernel, rounded = found.kernel or "", weight.table is not None or bool(found.rounds_weights)

        def check(
            y, x=x, weight=weight, columns=columns, bias=bias, activation=activation, dtype=dtype, rounded=rounded
        ):
            x64 = x.astype(np.float64)
            dense, magnitude = weight.dense(columns)
            exact = x64 @ dense + (0 if bias is None else bias[columns].astype(np.float64))
            bound = _product_bound(x64, dense, magnitude, exact, dtype, rounded_weights=rounded)
            bound = bound + 2.0**-22 * np.abs(exact)
            exact = _activate(exact, activation)
            bound = bound + (4e-6 * (1 + np.abs(exact)) if activation in ("gelu", "silu") else 0)
            return _ratio(np.abs(y[:, columns].astype(np.float64) - exact), bound)

        def product(x, qt, bias, activation=activation):
            return matmul(x, qt, bias=bias, activation=activation, implementation=platform)

        yield Case(
            f"[{m}, {k}] x [{k}, {n}], {_scheme_text(bits, size, mode, dtype)}, {activation}",
            product,
            (x, weight.qt, bias),
            check,
            kernel=kernel,
        )


def _activate(y: np.ndarray, activation: str | None) -> np.ndarray:
    if activation == "gelu":
        return 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    if activation == "silu":
        return y / (1 + np.exp(-y))
    return y if activation is None else np.clip(y, 0, 6 if activation == "relu6" else np.inf)


def _matmul_transposed(rng, platform: str) -> Iterator[Case]:
    if platform == "cuda" and not _cuda_dispatch.has_bf16():
        return
    rows = itertools.cycle((1, 5, 20, 90))
    schemes = list(itertools.islice(_schemes(platform), 0, None, 3 if platform == "cpu" else 2))
    if _knows_tables(platform, transpose=True):
        schemes += [(4, "table", "bfloat16", 64), (4, "table", "float16", None), (4, "table", "float32", 64)]
    for bits, mode, dtype, size in schemes:
        m, k, n = next(rows), 256 if size else 101, 72
        weight = _Weight(rng, k, n, bits=bits, group_size=size, mode=mode, scale_dtype=dtype)
        dy = _x(rng, (m, n), dtype)

        def check(dx, dy=dy, weight=weight, dtype=dtype):
            dy64 = dy.astype(np.float64)
            dense, magnitude = (a.T for a in weight.dense())
            exact = dy64 @ dense
            bound = _product_bound(dy64, dense, magnitude, exact, dtype, rounded_weights=True)
            return _ratio(np.abs(dx.astype(np.float64) - exact), bound)

        def gradient(dy, qt, m=m, k=k):
            struct = jax.ShapeDtypeStruct((m, k), dy.dtype)
            return jax.linear_transpose(lambda x: matmul(x, qt, implementation=platform), struct)(dy)[0]

        yield Case(f"[{m}, {n}], {_scheme_text(bits, size, mode, dtype)}", gradient, (dy, weight.qt), check)


def _scales_gradient(rng, platform: str) -> Iterator[Case]:
    if platform != "cuda" or not _cuda_dispatch.has_warpgroups():
        return
    rows, k, n = itertools.cycle((5, 90, 300)), 512, 136
    tables = ((4, "table", "bfloat16", 64), (4, "table", "float32", None))
    for i, (bits, mode, dtype, size) in enumerate((*_schemes(platform), *tables)):
        experts, m, group = (3 if i % 2 else 0), next(rows), size or k
        lead = (experts,) if experts else ()
        weight = _Weight(rng, k, n, bits=bits, group_size=group, mode=mode, scale_dtype="float32", lead=lead)
        x, dy, sizes = _x(rng, (m, k), dtype), _x(rng, (m, n), dtype), np.array([m // 2, 0, m // 3], np.int32)
        ends = np.cumsum(sizes) if experts else [m]

        def check(ds, x=x, dy=dy, weight=weight, ends=ends, group=group):
            x64, dy64 = x.astype(np.float64), dy.astype(np.float64)
            codes = weight.codes.reshape(-1, k, n).astype(np.float64)
            if weight.table is not None:
                codes = weight.table.astype(np.float64)[weight.codes].reshape(codes.shape)
            elif weight.mode != "offsets":
                zeros = np.float64(bias_of(weight.bits)) if weight.shift is None else weight.shift.astype(np.float64)
                zeros = np.broadcast_to(zeros, weight.scales.shape).reshape(-1, k // group, n)
                codes = codes - np.repeat(zeros, group, axis=1)
            worst, first = 0.0, 0
            for of_entry, got, end in zip(codes, ds.reshape(-1, k // group, n), ends, strict=True):
                mine = slice(first, end)
                dense, magnitude = x64[mine].T @ dy64[mine], np.abs(x64[mine]).T @ np.abs(dy64[mine])
                exact = (of_entry * dense).reshape(k // group, group, n).sum(1)
                terms = magnitude.reshape(k // group, group, n).sum(1) * 2.0 ** (weight.bits + 0.5)
                bound = 2.0**-20 * max(1.0, np.sqrt(len(x64)) / 8) * terms + 1e-7
                worst, first = max(worst, _ratio(np.abs(got.astype(np.float64) - exact), bound)), end
            return worst

        def gradient(x, qt, dy, sizes, experts=experts):
            def product(scales):
                of_scales = replace(qt, scales=scales)
                if experts:
                    return ragged_dot(x, of_scales, sizes, implementation=platform)
                return matmul(x, of_scales, implementation=platform)

            return jax.vjp(product, qt.scales)[1](dy)[0]

        what = f"[{m}, {k}], {f'{experts} experts, ' if experts else ''}{_scheme_text(bits, group, mode, dtype)}"
        yield Case(what, gradient, (x, weight.qt, dy, sizes), check)


# Bits, mode, type of x, group size, inputs of a group of features, groups, outputs, strides, activation.
_CONVOLUTIONS = (
    (4, "symmetric", "bfloat16", 64, 128, 1, 70, (1, 1), None),
    (8, "offsets", "float16", None, 72, 1, 130, (2, 1), "relu6"),
    (4, "integer_zeros", "bfloat16", 32, 64, 1, 256, (1, 2), "silu"),
    (4, "integer_zeros", "bfloat16", 64, 192, 1, 144, (1, 1), "silu"),
    (8, "symmetric", "float16", None, 128, 1, 72, (2, 1), None),
)
_GROUPED_CONVOLUTIONS = (
    (4, "symmetric", "bfloat16", None, 1, 136, 136, (1, 1), "silu"),
    (8, "offsets", "float32", None, 1, 33, 66, (1, 2), None),
    (4, "integer_zeros", "float16", None, 4, 24, 96, (2, 2), "relu6"),
    (8, "float_zeros", "bfloat16", 32, 64, 3, 96, (1, 1), None),
)


def _conv(rng, platform: str, cases: Sequence[tuple]) -> Iterator[Case]:
    for bits, mode, dtype, size, k, groups, n, strides, activation in cases:
        there = _cuda_dispatch.has_warpgroups() if groups == 1 else k == 1 or _cuda_dispatch.has_bf16()
        if not there:
            continue
        weight = _Weight(rng, k, n, bits=bits, group_size=size, mode=mode, scale_dtype=dtype, lead=(3, 3))
        x = _x(rng, (2, 7, 9, groups * k), dtype)

        def check(y, x=x, weight=weight, k=k, groups=groups, strides=strides, activation=activation, dtype=dtype):
            padded = np.pad(x.astype(np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
            rows, columns = y.shape[1] * strides[0], y.shape[2] * strides[1]
            taps = [padded[:, i : i + rows : strides[0], j : j + columns : strides[1]] for i, j in np.ndindex(3, 3)]
            ratios = []
            for g, outputs in enumerate(np.split(np.arange(y.shape[-1]), groups)):
                x64 = np.concatenate([t[:, : y.shape[1], : y.shape[2], g * k : (g + 1) * k] for t in taps], -1)
                dense, magnitude = (a.reshape(-1, len(outputs)) for a in weight.dense(outputs))
                exact = x64 @ dense
                bound = _product_bound(x64, dense, magnitude, exact, dtype, rounded_weights=True)
                exact = _activate(exact, activation)
                ratios.append(
                    _ratio(np.abs(y[..., outputs].astype(np.float64) - exact), bound + 4e-6 * (1 + np.abs(exact)))
                )
            return max(ratios)

        def product(x, qt, strides=strides, activation=activation, groups=groups):
            return conv_general_dilated(
                *(x, qt, strides, ((1, 1), (1, 1))),
                feature_group_count=groups,
                activation=activation,
                implementation=platform,
            )

        what = f"[2, 7, 9, {groups * k}] * [3, 3, {k}, {n}], {_scheme_text(bits, size, mode, dtype)}, {activation}"
        yield Case(what if groups == 1 else f"{what}, {groups} groups", product, (x, weight.qt), check)


def _ragged(rng, platform: str, transpose: bool) -> Iterator[Case]:
    if transpose and platform == "cuda" and not _cuda_dispatch.has_bf16():
        return
    experts, k = 4, 256
    schemes = list(itertools.islice(_schemes(platform), 0, None, 4))
    if _knows_tables(platform, transpose):
        schemes.append((4, "table", "float16", 64))
    schemes += [(4, "integer_zeros", "bfloat16", 64), (4, "offsets", "float16", 128)]
    schemes += [(bits, "offsets", "float32", 64) for bits in (4, 8)]
    if _knows_tables(platform, transpose):
        schemes.append((4, "table", "float32", 64))
    for i, (bits, mode, dtype, size) in enumerate(schemes):
        if not _has_products(platform, dtype):
            continue
        # With a few, tens and hundreds of rows for each expert, of 16 bits, different kernels start.
        rows = 23 if platform == "cpu" or dtype == "float32" else (300, 150, 600, 13)[i % 4]
        n = 72
        if dtype == "float32" and mode == "offsets":  # so few are a kernel's of their own, or of odd outputs streamed
            rows, n = 6, 72 if bits == 4 else 70
        group = size or k
        weight = _Weight(rng, k, n, bits=bits, group_size=group, mode=mode, scale_dtype=dtype, lead=(experts,))
        ids = rng.integers(-1, experts + 1, rows).astype(np.int32)  # some rows have no expert
        sizes = rng.multinomial(rows - 3, [0.5, 0.0, 0.3, 0.2]).astype(np.int32)
        by_size = i % 2 == 0
        if by_size:
            ids = np.full(rows, -1, np.int32)
            ids[: sizes.sum()] = np.repeat(np.arange(experts), sizes)
        x = _x(rng, (rows, n if transpose else k), dtype)

        def check(y, x=x, weight=weight, ids=ids, dtype=dtype):
            x64 = x.astype(np.float64)
            dense, magnitude = weight.dense()
            if transpose:
                dense, magnitude = dense.swapaxes(1, 2), magnitude.swapaxes(1, 2)
            worst = 0.0
            for row, e in enumerate(ids):
                if not 0 <= e < experts:
                    worst = max(worst, 0.0 if (y[row] == 0).all() else np.inf)
                    continue
                exact = x64[row] @ dense[e]
                bound = _product_bound(x64[row], dense[e], magnitude[e], exact, dtype, rounded_weights=True)
                worst = max(worst, _ratio(np.abs(y[row].astype(np.float64) - exact), bound))
            return worst

        def product(x, qt, ids, sizes, by_size=by_size):
            if by_size:
                return ragged_dot(x, qt, sizes, implementation=platform)
            return gather_matmul(x, qt, ids, implementation=platform)

        def gradient(dy, qt, ids, sizes, product=product):
            struct = jax.ShapeDtypeStruct((dy.shape[0], k), dy.dtype)
            return jax.linear_transpose(lambda primal: product(primal, qt, ids, sizes), struct)(dy)[0]

        operands = (x, weight.qt, ids, sizes)
        mode_of_rows = "sizes" if by_size else "ids"
        options: dict[str, Any] = {"platform": platform, "implementation": platform, "experts": mode_of_rows}
        kernel = explain(x, weight.qt, transpose=transpose, **options).kernel or ""
        what = f"{experts} experts by {mode_of_rows}, {_scheme_text(bits, size, mode, dtype)}"
        yield Case(what, gradient if transpose else product, operands, check, kernel)


# One program for every platform.
_quantized = jax.jit(definition.reference, static_argnames=("bits", "group_size", "mode", "scale_dtype"))


def _quantize(rng, platform: str) -> Iterator[Case]:
    for bits, mode, dtype, size in itertools.islice(_schemes(platform), 0, None, 2):
        k, n = 256, 67
        w = rng.normal(0.1, 1.0, (k, n))
        w[:, rng.integers(0, n, 8)] = np.repeat([[0.0, 0.75, -1.25, 50.0]], 2, axis=0).reshape(-1)  # constant ones too
        w = w.astype(_DTYPES[dtype])
        with jax.default_device(_host()):
            found = _quantized(w[None], bits=bits, group_size=size or k, mode=MODES[mode], scale_dtype=jnp.dtype(dtype))
            expected = [np.asarray(a[0]) for a in found]

        def check(*found, expected=expected):
            same = all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
            return 0.0 if same else np.inf

        def call(w, bits=bits, size=size, mode=mode):
            return tuple(quantize(w, bits=bits, group_size=size, mode=mode, implementation=platform))

        yield Case(_scheme_text(bits, size, mode, dtype).replace("x ", "w "), call, (w,), check)


def _dequantize(rng, platform: str) -> Iterator[Case]:
    for bits, mode, dtype, size in itertools.islice(_schemes(platform), 1, None, 2):
        weight = _Weight(rng, 256, 67, bits=bits, group_size=size, mode=mode, scale_dtype="float32")

        def check(w, weight=weight, dtype=dtype):
            exact, magnitude = weight.dense()
            # Computed in float32, rounded once; float16 has steps of 2^-24 at the least.
            bound = 0.51 * 2 * _UNITS[dtype] * np.abs(exact) + 2.0**-22 * magnitude + 2.0**-24
            return _ratio(np.abs(w.astype(np.float64) - exact), bound)

        def call(qt, dtype=dtype):
            return dequantize(qt, dtype=dtype, implementation=platform)

        yield Case(_scheme_text(bits, size, mode, dtype).replace("x ", "w "), call, (weight.qt,), check)


def _quantize_activation(rng, platform: str) -> Iterator[Case]:
    shapes = itertools.cycle(((3, 70, None), (5, 512, 128), (2, 20000, None), (4, 96, 32)))
    for (codes, symmetric), dtype in itertools.product(_SCHEMES, _DTYPES):
        m, k, size = next(shapes)
        x = _x(rng, (m, k), dtype)
        options: dict[str, Any] = {"dtype": codes, "symmetric": symmetric, "group_size": size}
        with jax.default_device(_host()):
            expected = quantize_activation(x, implementation="xla", **options)

        def check(found, scales, *_, expected=expected):
            same = np.array_equal(found.view(np.int8), np.asarray(expected.qvalue).view(np.int8))
            return 0.0 if same and np.array_equal(scales, np.asarray(expected.scales)) else np.inf

        def call(x, options=options):
            return tuple(quantize_activation(x, implementation=platform, **options).arrays)

        yield Case(f"[{m}, {k}], {codes}, group {size or 'all'}, x {dtype}", call, (x,), check)


def _quantized_matmul(rng, platform: str) -> Iterator[Case]:
    if not _cuda_dispatch.has_warpgroups():
        return
    sizes = itertools.cycle(((None, None), (128, 128), (None, 128)))
    for (codes, symmetric), mode, bits in itertools.product(_SCHEMES, MODES, (4, 8)):
        if bits == 8 and codes != "int8":
            continue
        x_size, size = next(sizes)
        m, k, n = 130, 256, 72
        weight = _Weight(rng, k, n, bits=bits, group_size=size, mode=mode, scale_dtype="bfloat16")
        with jax.default_device(_host()):
            xq = quantize_activation(
                _x(rng, (m, k), "bfloat16"), dtype=codes, symmetric=symmetric, group_size=x_size, implementation="xla"
            )
            x64 = np.asarray(xq.dequantize("float32")).astype(np.float64)

        def check(y, x64=x64, weight=weight, exact_sums=codes == "int8"):
            dense, magnitude = weight.dense()
            exact = x64 @ dense
            bound = _product_bound(x64, dense, magnitude, exact, "bfloat16")
            if not exact_sums:  # the tensor cores keep sums of float8 products to 13 bits or so
                bound = bound + 2.0**-11 * (np.abs(x64) @ magnitude)
            return _ratio(np.abs(y.astype(np.float64) - exact), bound)

        def product(xq, qt):
            return matmul(xq, qt, implementation=platform)

        what = f"[{m}, {k}] {codes}, group {x_size or 'all'}, {_scheme_text(bits, size, mode, 'bfloat16')}"
        yield Case(what, product, (jax.tree.map(np.asarray, xq), weight.qt), check)


def _static_matmul(rng, platform: str) -> Iterator[Case]:
    if not _cuda_dispatch.has_warpgroups():
        return
    for bits, (m, k) in itertools.product((4, 8), ((5, 77), (260, 512))):
        weight = _Weight(rng, k, 72, bits=bits, group_size=None, mode="symmetric", scale_dtype="float32")
        with jax.default_device(_host()):
            layer = static.prepare(weight.qt, static.Scale(0.02, 3), static.Scale(0.02 * k**0.5, -5))
            layer = jax.tree.map(np.asarray, layer)
        q = rng.integers(-128, 128, (m, k)).astype(np.int8)

        def check(y, q=q, weight=weight, layer=layer, bits=bits):
            sums = q.astype(np.int64) @ (weight.codes.astype(np.int64) - bias_of(bits)) + np.asarray(layer.fused)
            rounded = np.rint(sums.astype(np.float32) * np.asarray(layer.multiplier)) + layer.output.zero
            return 0.0 if np.array_equal(y, np.clip(rounded, layer.low, layer.high)) else np.inf

        def product(q, layer):
            return static.matmul(q, layer, implementation=platform)

        yield Case(f"[{m}, {k}], int{bits}", product, (q, layer), check)


def _conversions(rng, platform: str) -> Iterator[Case]:
    """The fast conversions of codes: every half word, in both halves."""
    half = np.arange(2**16, dtype=np.uint32)
    words = np.concatenate([half | rng.permutation(half) << 16, rng.permutation(half) | half << 16])
    for number, (name, outputs) in enumerate(importlib.import_module("jax_wonly._cpu").conversions()):
        result = jax.ShapeDtypeStruct((len(words), outputs), np.uint32)

        def call(words, number=number, result=result):
            return jax.ffi.ffi_call(CONVERSIONS, result)(words, conversion=np.int64(number))

        yield Case(name, call, (words,), lambda out, name=name: _check_conversion(name, words, out))


def _check_conversion(name: str, words: np.ndarray, out: np.ndarray) -> float:
    """Whether the values that a conversion makes of a word are those of its codes, in whatever order."""
    bits = 4 if "int4" in name else 8
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = ((words[:, None] >> shifts) & np.uint32(2**bits - 1)).astype(np.float64)
    if name.endswith("subnormal"):  # bf16 multiples of 2^-133; of int4 every second code stays in the upper bits
        codes = codes * np.where(np.arange(codes.shape[1]) % 2 * (bits == 4), 16, 1)
        found = np.ascontiguousarray(out).view(ml_dtypes.bfloat16).astype(np.float64) * 2.0**133
    elif name == "uint4_in_table":  # ffi/dequant/selftest.h has the table
        codes = 40503 * (codes + 1) % 2**16
        found = np.ascontiguousarray(out).view(np.uint16).astype(np.float64)
    else:
        codes -= 0 if name.startswith("uint") else bias_of(bits)
        kind = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}[name.split("_to_")[1].split("_")[0]]
        found = np.ascontiguousarray(out).view(kind).astype(np.float64)
    same = np.array_equal(np.sort(found.reshape(len(words), -1), 1), np.sort(codes, 1))
    return 0.0 if same else np.inf


CASES: dict[str, Callable[[np.random.Generator, str], Iterator[Case]]] = {
    _abi.MATMUL: _matmul,
    _abi.MATMUL_TRANSPOSED: _matmul_transposed,
    _abi.CONV: lambda rng, platform: _conv(rng, platform, _CONVOLUTIONS),
    _abi.DIRECT_CONV: lambda rng, platform: _conv(rng, platform, _GROUPED_CONVOLUTIONS),
    _abi.RAGGED_MATMUL: lambda rng, platform: _ragged(rng, platform, False),
    _abi.RAGGED_MATMUL_TRANSPOSED: lambda rng, platform: _ragged(rng, platform, True),
    _abi.SCALES_GRADIENT: _scales_gradient,
    _abi.QUANTIZE: _quantize,
    _abi.DEQUANTIZE: _dequantize,
    _abi.QUANTIZE_ACTIVATION: _quantize_activation,
    _abi.QUANTIZED_MATMUL: _quantized_matmul,
    _abi.STATIC_MATMUL: _static_matmul,
    CONVERSIONS: _conversions,
}


def _host():
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return jax.devices()[0]


def registered(platform: str) -> list[str]:
    """The custom calls that the module of a platform has registered; none where it is not installed."""
    if _ffi.ensure_registered()[platform] is not None:
        return []
    return list(importlib.import_module(f"jax_wonly._{platform}").registrations())


@dataclass(frozen=True)
class Prepared:
    """The cases of one custom call on one device, whose programs are being compiled."""

    target: str
    platform: str
    device: Any
    cases: list[tuple[Case, Future]]
    seconds: float
    """What it took to make them."""


def compilers() -> ThreadPoolExecutor:
    """Threads to compile in, which takes most of the time and leaves Python to the others."""
    return ThreadPoolExecutor(min(16, os.cpu_count() or 1))


def prepare(target: str, platform: str, device, seed: int, pool: Executor) -> Prepared:
    """Makes the cases of a custom call, and lets ``pool`` compile each of them, once for all variants.

    Args:
      target: the custom call.
      platform: ``"cpu"`` or ``"cuda"``.
      device: to run on.
      seed: of the random operands.
      pool: as :func:`compilers`.
    """
    begin = time.perf_counter()
    with jax.default_device(device):
        made = CASES[target](np.random.default_rng(seed), platform)
        cases = [(case, _compile(case, target, pool)) for case in made]
    return Prepared(target, platform, device, cases, time.perf_counter() - begin)


def _compile(case: Case, target: str, pool: Executor) -> Future:
    """The program of a case, some time later."""
    future: Future = Future()
    try:
        lowered = jax.jit(case.function).lower(*case.operands)
        if target not in lowered.as_text():
            raise AssertionError(f"the compiled program does not call {target}")
        future = pool.submit(lowered.compile)
    except Exception as error:
        future.set_exception(error)
    return future


def run_cases(prepared: Prepared, variants: Sequence[tuple[str, Callable[[], Any]]]) -> list[Outcome]:
    """Runs the cases of one custom call, with every variant.

    Args:
      prepared: the cases.
      variants: names, and functions that switch to them (the instruction sets of a CPU).
    """
    target, platform = prepared.target, prepared.platform
    found: dict[str, list[tuple[float, str]]] = {name: [] for name, _ in variants}
    seconds = dict.fromkeys(found, prepared.seconds / len(variants))
    failed: dict[str, list[str]] = {name: [] for name in found}
    with jax.default_device(prepared.device):
        for case, compiled in prepared.cases:
            for name, switch in variants:
                begin = time.perf_counter()
                try:
                    program = compiled.result()
                    switch()
                    results = program(*case.operands)
                    ratio = case.check(*(np.asarray(a) for a in jax.tree.leaves(results)))
                    if not ratio <= 1:
                        failed[name].append(f"{case.what}: {_excess(ratio)}")
                except Exception as error:  # whatever a kernel does wrong is the result of the test
                    ratio = float("inf")
                    failed[name].append(f"{case.what}: {type(error).__name__}: {str(error).splitlines()[0]}")
                seconds[name] += time.perf_counter() - begin
                found[name].append((ratio, case.kernel))
    outcomes = []
    for name, results in found.items():
        kernels = ", ".join(sorted({kernel for _, kernel in results if kernel and platform == "cuda"}))
        worst = max((ratio for ratio, _ in results), default=0.0)
        outcomes.append(
            Outcome(platform, name or kernels, target, len(results), worst, seconds[name], tuple(failed[name]))
        )
    return outcomes


def run_xla(platform: str, device, seed: int) -> Outcome:
    """Runs the products in XLA's operations alone, which every other platform and case has."""
    rng = np.random.default_rng(seed)
    begin = time.perf_counter()
    failures, worst, count = [], 0.0, 0
    with jax.default_device(device):
        for bits, mode in ((4, "symmetric"), (8, "offsets")):
            weight = _Weight(rng, 256, 72, bits=bits, group_size=64, mode=mode, scale_dtype="float32")
            x = _x(rng, (5, 256), "float32")
            y = np.asarray(jax.jit(lambda x, qt: matmul(x, qt, implementation="xla"))(x, weight.qt))
            dense, magnitude = weight.dense()
            exact = x.astype(np.float64) @ dense
            ratio = _ratio(np.abs(y - exact), _product_bound(x.astype(np.float64), dense, magnitude, exact, "float32"))
            count, worst = count + 1, max(worst, ratio)
            packed = jax.jit(pack, static_argnums=1)(weight.codes, bits)
            codes = jax.jit(unpack, static_argnums=(1, 2, 3))(weight.qt.qvalue, bits, 256, 72)
            same = np.array_equal(packed, weight.qt.qvalue) and np.array_equal(codes, weight.codes)
            if not ratio <= 1 or not same:
                failures.append(f"{_scheme_text(bits, 64, mode, 'float32')}: {_excess(ratio)}")
    seconds = time.perf_counter() - begin
    return Outcome(platform, "", "XLA's operations", count, worst, seconds, tuple(failures))
