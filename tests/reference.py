"""Slow NumPy definitions, written apart from the package, and the error bounds that results are held to."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_wonly as jw

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
MODES = ("symmetric", "integer_zeros", "float_zeros", "offsets")
# What one rounding to a type changes at most, relative to a number that is not subnormal.
UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Puts every code where ``code_position`` of ffi/layout.h says, by index arithmetic."""
    tile_k = {4: 64, 8: 32}[bits]
    nt, kt = -(-codes.shape[1] // 64), -(-codes.shape[0] // tile_k)
    padded = np.full((kt * tile_k, nt * 64), {4: 8, 8: 128}[bits], np.uint32)
    padded[: codes.shape[0], : codes.shape[1]] = codes
    k, n = np.indices(padded.shape)
    kk, nn = k % tile_k, n % 64
    row = nn % 16
    lane = 4 * (row % 8) + (kk % 8) // 2
    pair, odd = (kk % 32) // 8, kk % 2
    if bits == 4:
        word = (nn // 16) * 128 + lane * 4 + (kk // 32) * 2 + row // 8
        shift = 4 * (pair + 4 * odd)
    else:
        word = (nn // 16) * 128 + lane * 4 + ((kk % 32) // 16) * 2 + row // 8
        shift = 8 * (pair % 2 + 2 * odd)
    words = np.zeros((nt, kt, 512), np.uint32)
    np.bitwise_or.at(words, (n // 64, k // tile_k, word), padded << shift.astype(np.uint32))
    return words


def middles(table) -> np.ndarray:
    """float32, halfway between neighbouring entries."""
    entries = np.unique(np.asarray(table, np.float32)).astype(np.float64)
    return ((entries[1:] + entries[:-1]) / 2).astype(np.float32)


def near_middles(rng, table, n: int) -> np.ndarray:
    """float32 ``[64, n]``, a group for each output: the largest, and numbers within a place of middles times that."""
    largest = rng.uniform(1, 2, n).astype(np.float32)
    values = rng.choice(middles(table), (64, n)) * largest
    values = np.nextafter(values, rng.choice(np.float32([-np.inf, 0, np.inf]), values.shape) + values)
    values[0] = largest
    return values


def quantize(w, bits: int, group_size: int | None, mode: str, scale_dtype):
    """``(codes u8[K, N], scales[G, N], shift[G, N] or None)`` by the definition of the codes, in float32 NumPy."""
    scale_dtype = np.dtype(scale_dtype)
    largest = np.float32(ml_dtypes.finfo(scale_dtype).max)
    k, n = w.shape
    g = group_size or k
    w = np.asarray(w).astype(np.float32).reshape(k // g, g, n)
    top, bias = np.float32(2**bits - 1), np.float32(2 ** (bits - 1))

    def stored(a):
        with np.errstate(over="ignore"):
            return a.astype(np.float32).astype(scale_dtype)

    def scale_of(a):
        return np.minimum(stored(a).astype(np.float32), largest).astype(scale_dtype)

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if mode == "symmetric":
            scales = scale_of(np.abs(w).max(1, keepdims=True) / np.float32(bias - 1))
            s = scales.astype(np.float32)
            codes = np.where(s == 0, bias, np.clip(np.rint(w / s), -bias, bias - 1) + bias)
            shift = None
        else:
            lo, hi = w.min(1, keepdims=True), w.max(1, keepdims=True)
            if mode == "integer_zeros":
                lo, hi = np.minimum(lo, 0), np.maximum(hi, 0)
            scales = scale_of((hi - lo) / top)
            s = scales.astype(np.float32)
            flat = s == 0
            if mode == "integer_zeros":
                z = np.where(flat, 0, np.clip(np.rint(-lo / s), 0, top))
                codes = np.where(flat, z, np.clip(np.rint(w / s) + z, 0, top))
                shift = z.astype(np.uint8)
            elif mode == "float_zeros":
                shift = stored(-lo / s)
                codes = np.where(flat, 0, np.clip(np.rint(w / s + shift.astype(np.float32)), 0, top))
                scales = np.where(flat, scale_of(np.abs(lo)), scales)
                shift = np.where(flat, np.where(lo > 0, -1, np.where(lo < 0, 1, 0)).astype(scale_dtype), shift)
            else:
                shift = stored(lo)
                codes = np.where(flat, 0, np.clip(np.rint((w - shift.astype(np.float32)) / s), 0, top))
    codes = codes.astype(np.uint8).reshape(k, n)
    return codes, scales[:, 0], None if shift is None else shift[:, 0]


@dataclasses.dataclass
class Weight:
    """A random quantized weight, and what it stands for in float64."""

    qt: jw.QuantizedTensor
    dense: np.ndarray  # [..., K, N]
    magnitude: np.ndarray  # the same of magnitudes: what a kernel adds up and cancels again

    @property
    def rounded(self) -> np.ndarray:
        """What 16-bit roundings of weights are relative to: offsets are rounded before they are added."""
        return self.dense if self.qt.offsets is None else self.magnitude

    @property
    def arrays(self) -> dict:
        return {"scales": self.qt.scales, "zeros": self.qt.zeros, "offsets": self.qt.offsets}


def random_weight(
    rng,
    k,
    n,
    *,
    bits=4,
    group_size=None,
    mode="symmetric",
    scale_dtype="float32",
    shift_dtype=None,
    lead=(),
    zero_scales=0.0,
) -> Weight:
    """Independent random codes, scales and zeros or offsets, so that no value is special.

    ``shift_dtype``: the type of float zeros or offsets, unless it is that of the scales.
    ``mode="table"``: codes index a table of random values. ``zero_scales``: that share of all scales is zero, and half
    as many are 2^-120, or as little as their type has.
    """
    g = group_size or k
    shape = (*lead, k // g, n)
    codes = rng.integers(0, 2**bits, (*lead, k, n)).astype(np.uint8)
    dtype = DTYPES[scale_dtype]
    scales = (rng.uniform(0.3, 1.0, shape) * 2.0 ** (1 - bits)).astype(dtype)
    if zero_scales:
        chance = rng.uniform(0, 1, shape)
        scales = np.where(chance < 1.5 * zero_scales, dtype(2.0**-120), scales)
        scales = np.where(chance < zero_scales, dtype(0), scales).astype(dtype)
    zeros = offsets = table = None
    if mode == "table":
        table = tuple(rng.normal(0.1, 0.5, 16).astype(np.float32).tolist())
    if mode == "integer_zeros":
        zeros = rng.integers(0, 2**bits, shape).astype(np.uint8)
    elif mode == "float_zeros":
        zeros = rng.uniform(-1, 2**bits, shape).astype(DTYPES[shift_dtype or scale_dtype])
    elif mode == "offsets":
        offsets = rng.normal(-0.5, 1.0, shape).astype(DTYPES[shift_dtype or scale_dtype])

    def spread(a):
        return np.repeat(np.asarray(a).astype(np.float64), g, axis=-2)

    s = spread(scales)
    if table is not None:
        dense = np.asarray(table)[codes] * s
        magnitude = np.abs(dense)
    elif offsets is not None:
        dense = codes * s + spread(offsets)
        magnitude = codes * s + np.abs(spread(offsets))
    else:
        z = 2.0 ** (bits - 1) if zeros is None else spread(zeros)
        dense = (codes - z) * s
        magnitude = (codes + np.abs(z)) * s
    packed = np.zeros((*lead, -(-n // 64), -(-k // {4: 64, 8: 32}[bits]), 512), np.uint32)
    for index in np.ndindex(*lead):
        packed[index] = pack(codes[index], bits)
    arrays = [None if a is None else jnp.asarray(a) for a in (packed, scales, zeros, offsets)]
    return Weight(jw.QuantizedTensor(*arrays, bits=bits, k=k, n=n, table=table), dense, magnitude)


def repeated(few: jw.QuantizedTensor, n: int) -> jw.QuantizedTensor:
    """The outputs of ``few``, whole tiles of 64, over and over, ``n`` in all: a large weight of a small reference."""
    assert few.n % 64 == 0
    times = -(-n // few.n)
    packed = jnp.tile(few.qvalue, (times, 1, 1))[..., : -(-n // 64), :, :]
    rows = (few.scales, few.zeros, few.offsets)
    arrays = (None if a is None else jnp.tile(a, times)[..., :n] for a in rows)
    return jw.QuantizedTensor(packed, *arrays, bits=few.bits, k=few.k, n=n, table=few.table)


def random_x(rng, shape, dtype="float32") -> jnp.ndarray:
    """Activations with a mean other than zero."""
    return jnp.asarray(rng.normal(0.3, 1.0, shape).astype(DTYPES[dtype]))


def activate(y: np.ndarray, activation: str | None) -> np.ndarray:
    if activation is None:
        return y
    if activation == "relu":
        return np.maximum(y, 0)
    if activation == "relu6":
        return np.clip(y, 0, 6)
    if activation == "silu":
        return y / (1 + np.exp(-y))
    return 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))


def rounding(exact: np.ndarray, dtype) -> np.ndarray:
    """The most that a result near ``exact`` changes when it is rounded to ``dtype``, subnormal numbers included."""
    smallest = float(ml_dtypes.finfo(DTYPES[str(dtype)]).smallest_subnormal)
    return np.maximum(1.01 * UNITS[str(dtype)] * np.abs(exact), smallest / 2)


def alike(bits: int, group_size: int) -> float:
    """How much more than a random walk roundings of weights add up to: those of a group and code are the same, and the
    mean of ``random_x`` is 0.3.
    """
    return np.sqrt(1 + 0.3**2 * group_size / 2 / 2**bits)


def as_kernels_see_it(weight: Weight, dtype) -> Weight:
    """The weight with its table rounded to the type of x, which is what the fused kernel multiplies exactly."""
    exact, rounded = (np.asarray(weight.qt.table, t).astype(np.float64) for t in (np.float32, DTYPES[dtype]))
    codes = np.asarray(jw.unpack(weight.qt.qvalue, 4, weight.qt.k, weight.qt.n))
    dense = weight.dense * (rounded / exact)[codes]
    return dataclasses.replace(weight, dense=dense, magnitude=np.abs(dense))


def assert_product(
    y, x, weight: Weight, *, bias=None, activation=None, out_dtype=None, rounded_weights=False, cut_off=False
):
    """Holds ``y`` to ``activation(x @ w + bias)`` in float64.

    The bound is float32 accumulation of the magnitudes that are added up, one rounding of the result, and, where
    weights may be rounded to 16 bits on the way (``rounded_weights``), the random walk of those roundings, in steps of
    many weights at once: those of a group and code are rounded alike. ``cut_off``: sums are those of tensor cores,
    which do not round what they add but cut it off.
    """
    out_dtype = str(out_dtype or x.dtype)
    assert str(y.dtype) == out_dtype, (y.dtype, out_dtype)
    x64 = np.asarray(x).astype(np.float64)
    vector = x64.ndim == 1
    x64 = x64[None] if vector else x64
    k = x64.shape[-1]
    exact = x64 @ weight.dense
    bound = 2.0 ** (-20 if cut_off else -21) * max(1.0, np.sqrt(k) / 8) * (np.abs(x64) @ weight.magnitude)
    if rounded_weights and str(x.dtype) != "float32":
        roundings = UNITS[str(x.dtype)] * np.sqrt((x64**2) @ (weight.dense**2))
        bound = bound + 8 * alike(weight.qt.bits, k // weight.qt.scales.shape[-2]) * roundings
    if bias is not None:
        b = np.asarray(bias).astype(np.float64)[..., None, :]
        exact, bound = exact + b, bound + 2.0**-23 * np.abs(b)
    exact = activate(exact, activation)
    bound = 1.2 * bound + rounding(exact, out_dtype) + 1e-7
    if activation in ("gelu", "silu"):
        bound = bound + 4e-6 * (1 + np.abs(exact))  # the accuracy of float32 tanh and exp
    if vector:
        exact, bound = exact[..., 0, :], bound[..., 0, :]
    got = np.asarray(y).astype(np.float64)
    assert got.shape == exact.shape, (got.shape, exact.shape)
    error = np.abs(got - exact)
    worst = np.max(error / bound, initial=0.0)
    assert np.isfinite(got).all() and worst <= 1, f"error is {worst:.3g} times the bound (max error {error.max():.3g})"


def assert_scales_gradient(ds, x, dy, weight: Weight):
    """Holds ``ds [..., G, N]`` to float64: the accumulation of what is added up, and the result's rounding."""
    qt = weight.qt
    scales = np.asarray(qt.scales).astype(np.float64)
    groups, n = scales.shape[-2:]
    # Without its offsets, a dense weight is the scales times what they are multiplied by.
    dense = weight.dense
    if qt.offsets is not None:
        dense = dense - np.repeat(np.asarray(qt.offsets).astype(np.float64), qt.k // groups, axis=-2)
    of_scale = dense.reshape(*dense.shape[:-2], groups, -1, n) / scales[..., None, :]
    x64, dy64 = (np.asarray(a).astype(np.float64) for a in (x, dy))
    exact = (of_scale * (x64.swapaxes(-1, -2) @ dy64).reshape(*of_scale.shape[:-3], groups, -1, n)).sum(-2)
    magnitudes = (np.abs(x64).swapaxes(-1, -2) @ np.abs(dy64)).reshape(*of_scale.shape[:-3], groups, -1, n).sum(-2)
    # Codes are added up less their middle, and their zeros apart.
    bound = 2.0**-21 * max(1.0, np.sqrt(x.shape[-2]) / 8) * magnitudes * 2.0 ** (qt.bits + 0.5)
    bound = bound + rounding(exact, str(ds.dtype)) + 1e-7
    got = np.asarray(ds).astype(np.float64)
    assert got.shape == exact.shape and ds.dtype == qt.scales.dtype
    worst = np.max(np.abs(got - exact) / bound)
    assert worst <= 1, f"error is {worst:.3g} times the bound"
