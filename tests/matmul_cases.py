"""Checks of the product that the CPU and the GPU tests share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from reference import DTYPES, MODES, as_kernels_see_it, assert_product, random_weight, random_x

import jax_wonly as jw
from jax_wonly import _cuda_costs, _cuda_dispatch
from jax_wonly._abi import ShiftMode

# Inputs and outputs that are no multiples of a tile, for each group size.
SHAPES = {32: (96, 70), 64: (192, 130), 128: (384, 67), 256: (256, 33), None: (101, 129)}
ROWS = (0, 1, 7, 33)
# Rows of streamed gradients, the multiprocessors of a GPU, and how strips of 64 inputs and outputs lie there: the CTAs
# of a cluster, and their warps.
_FEW_ROWS = {(3, 2600): (4, 4), (6, 2560): (2, 4), (11, 2600): (2, 3), (15, 1000): (1, 4), (25, 700): (1, 2)}
SHARED_STRIPS = {3: (5, _FEW_ROWS), 16: (5, _FEW_ROWS), 24: (11, {(6, 4160): (3, 4)})}


def check_cross_product(rng, *, bits, mode, x_dtype, scale_dtype, group_size, implementation, rows=ROWS):
    """One point of the cross product of options, at several numbers of rows."""
    k, n = SHAPES[group_size]
    weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=scale_dtype)
    for m in rows:
        x = random_x(rng, (m, k), x_dtype)
        y = jw.matmul(x, weight.qt, implementation=implementation)
        rounded = rounds_weights(implementation, x, weight.qt)
        # What is seen of float32 x alone, where much is added up and cancelled again.
        cut_off = implementation == "cuda" and x_dtype == "float32" and bits == 8 and mode != "symmetric"
        assert_product(y, x, weight, rounded_weights=rounded, cut_off=cut_off)


def check_epilogue(rng, *, bits, mode, x_dtype, activation, out_dtype, implementation, m=5):
    weight = random_weight(rng, 128, 70, bits=bits, group_size=64, mode=mode)
    x = random_x(rng, (m, 128), x_dtype)
    bias = jnp.asarray(rng.normal(1, 3, 70).astype(DTYPES[str(rng.choice(list(DTYPES)))]))
    y = jw.matmul(
        x,
        weight.qt,
        bias=bias,
        activation=activation,
        preferred_element_type=None if out_dtype is None else DTYPES[out_dtype],
        implementation=implementation,
    )
    assert_product(
        y,
        x,
        weight,
        bias=bias,
        activation=activation,
        out_dtype=out_dtype,
        rounded_weights=rounds_weights(implementation, x, weight.qt),
    )


def check_broadcasting(
    rng, *, x_lead, weight_lead, vector=False, mode="offsets", x_dtype="float32", implementation=None
):
    """Leading axes as in ``jnp.matmul``."""
    weight = random_weight(rng, 64, 70, group_size=32, mode=mode, lead=weight_lead)
    x = random_x(rng, (64,) if vector else (*x_lead, 3, 64), x_dtype)
    y = jw.matmul(x, weight.qt, implementation=implementation)
    assert_product(y, x, weight, rounded_weights=rounds_weights(implementation, x, weight.qt))


def check_non_finite(rng, implementation=None):
    """NaN and Inf of one row of x stay in that row and reach all of it."""
    weight = random_weight(rng, 64, 70, group_size=32)
    x = np.asarray(random_x(rng, (5, 64))).copy()
    clean = np.asarray(jw.matmul(x, weight.qt, implementation=implementation))
    x[1, 3], x[3, 10] = np.nan, np.inf
    y = np.asarray(jw.matmul(x, weight.qt, implementation=implementation))
    assert np.isnan(y[1]).all()
    assert not np.isfinite(y[3]).any()
    np.testing.assert_array_equal(y[[0, 2, 4]], clean[[0, 2, 4]])


def check_zero_scales(rng, *, mode, group_size, x_dtype, implementation=None):
    """A weight of scale zero is its offset, and zero without: no quotient by a scale may show."""
    weight = random_weight(rng, 512, 264, group_size=group_size, mode=mode, scale_dtype="bfloat16", zero_scales=0.3)
    for m in (1, 7, 16, 40, 70, 96):
        x = random_x(rng, (m, 512), x_dtype)
        y = jw.matmul(x, weight.qt, implementation=implementation)
        assert_product(y, x, weight, rounded_weights=rounds_weights(implementation, x, weight.qt))


def check_gradients(rng, *, bits, mode, implementation=None):
    """Every cotangent against the float64 formula, for weights shared by the batch and not."""
    for lead, x_lead in [((), (2,)), ((2,), ()), ((2,), (2,))]:
        weight = random_weight(rng, 64, 35, bits=bits, group_size=32, mode=mode, lead=lead)
        x = random_x(rng, (*x_lead, 3, 64))
        bias = random_x(rng, (35,))
        arrays = {key: a for key, a in weight.arrays.items() if a is not None}
        floats = {key: a for key, a in arrays.items() if jnp.issubdtype(a.dtype, jnp.floating)}
        qw = weight.qt.qvalue

        def f(x, floats, bias, qw=qw, arrays=arrays):
            return jw.matmul(x, qw, **(arrays | floats), bias=bias, implementation=implementation)

        y, vjp = jax.vjp(f, x, floats, bias)
        dy = random_x(rng, y.shape)
        dx, dfloats, dbias = vjp(dy)

        x64, dy64 = np.asarray(x, np.float64), np.asarray(dy, np.float64)
        w64 = np.broadcast_to(weight.dense, (*y.shape[:-2], 64, 35))
        dx64 = dy64 @ np.swapaxes(w64, -1, -2)
        np.testing.assert_allclose(dx, dx64.sum(0) if x.ndim < dx64.ndim else dx64, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(dbias, dy64.sum(tuple(range(dy64.ndim - 1))), rtol=1e-4, atol=1e-3)
        dw = np.swapaxes(np.broadcast_to(x64, (*y.shape[:-1], 64)), -1, -2) @ dy64
        if not lead:
            dw = dw.sum(0)
        per_group = dw.reshape(*dw.shape[:-2], 2, 32, 35)
        codes = np.asarray(jw.unpack(qw, bits, 64, 35)).astype(np.float64).reshape(per_group.shape)
        scales = np.asarray(arrays["scales"], np.float64)
        if "zeros" in arrays:
            centred = codes - np.asarray(arrays["zeros"], np.float64)[..., None, :]
        else:
            centred = codes - (0 if "offsets" in arrays else 2 ** (bits - 1))
        close = {"rtol": 1e-4, "atol": 1e-4 * np.abs(per_group).sum(-2).max() * 2**bits}
        np.testing.assert_allclose(dfloats["scales"], (per_group * centred).sum(-2), **close)
        if "zeros" in floats:
            np.testing.assert_allclose(dfloats["zeros"], -per_group.sum(-2) * scales, **close)
        if "offsets" in floats:
            np.testing.assert_allclose(dfloats["offsets"], per_group.sum(-2), **close)


def product_of(m, k, n, mode, x_dtype, *, bits, group_size, scale_dtype=None) -> _cuda_dispatch.Product:
    dtype, scales = jnp.dtype(x_dtype), jnp.dtype(scale_dtype or x_dtype)
    of_modes = {"symmetric": None, "integer_zeros": jnp.dtype(jnp.uint8), "table": jnp.dtype(jnp.float32)}
    shift = of_modes.get(mode, scales)
    row_modes = {"symmetric": ShiftMode.NONE, "offsets": ShiftMode.OFFSETS, "table": ShiftMode.TABLE}
    row_mode = row_modes.get(mode, ShiftMode.ZEROS)
    return _cuda_dispatch.Product(m, k, n, 1, bits, dtype, scales, row_mode, shift, k // group_size)


# Bits, schemes and types of x of which `matmul_resident` takes several tiles of tokens.
TILES_OF_TOKENS = [
    (bits, mode, x_dtype)
    for bits in (4, 8)
    for mode in (*MODES, "table")
    for x_dtype in DTYPES
    if not (mode == "table" and bits == 8) and not (x_dtype == "float32" and mode in ("float_zeros", "offsets"))
]


def check_tiles_of_tokens(rng, *, bits, x_dtype, mode, count=4):
    """Products of small layers that ``matmul_resident`` takes in several tiles of tokens, the last of which may have
    fewer; a token's result depends neither on the others nor on its place among them.
    """
    split = x_dtype == "float32"
    while count:
        m, k, n = int(rng.integers(5 if split else 9, 129)), 64 * int(rng.integers(1, 17)), int(rng.integers(8, 700))
        group_size = int(rng.choice([32, 64, 128, k]))
        scale_dtype = str(rng.choice([x_dtype, "float32", "float16"]))
        if k % group_size or (group_size > 256 and group_size != k):
            continue
        product = product_of(m, k, n, mode, x_dtype, bits=bits, group_size=group_size, scale_dtype=scale_dtype)
        if _cuda_dispatch.kernel(product) != "matmul_resident":
            continue
        (*_, tiles), _ = min(_cuda_dispatch._resident_times(product), key=lambda pair: pair[1])
        if tiles == 1:
            continue
        count -= 1
        weight = random_weight(rng, k, n, bits=bits, mode=mode, scale_dtype=scale_dtype, group_size=group_size)
        x, bias = random_x(rng, (m, k), x_dtype), random_x(rng, (n,))
        matmul = jax.jit(functools.partial(jw.matmul, bias=bias, activation="relu", implementation="cuda"))
        y = np.asarray(matmul(x, weight.qt))
        seen = as_kernels_see_it(weight, x_dtype) if mode == "table" else weight
        assert_product(y, x, seen, bias=bias, activation="relu", cut_off=True)
        np.testing.assert_array_equal(np.asarray(matmul(x[::-1], weight.qt)), y[::-1])
        broken = int(rng.integers(m))
        others = np.asarray(matmul(x.at[broken].set(jnp.inf), weight.qt))
        np.testing.assert_array_equal(np.delete(others, broken, 0), np.delete(y, broken, 0))


def takes_turns(product: _cuda_dispatch.Product, config: tuple[int, int, int]) -> bool:
    """Whether pieces of the activations take turns in shared memory, with a configuration of ``matmul_resident``."""
    cluster, parts, pass_atoms = config
    m, k, n, scheme = product.m, product.k, product.n, product.scheme
    stages, passes = -(-k // (128 * cluster)), -(-n // (16 * parts * pass_atoms))
    sums = scheme.floats and not _cuda_costs.resident_shifts_beside(scheme.bits, 0)
    return _cuda_costs.resident_slots(m, stages, passes, cluster, pass_atoms, scheme, True, sums) == "turns"


def rounds_weights(implementation, x=None, qt=None) -> bool:
    """Whether weights may be rounded to the type of x on the way: in a dense product, which None may choose too, and in
    those CUDA kernels of which `explain` says so.
    """
    if implementation == "cuda" and qt is not None:
        if 0 in qt.shape:
            return False
        return bool(jw.explain(x, qt, platform="cuda", implementation="cuda").rounds_weights)
    return implementation in (None, "xla", "dequantize")
