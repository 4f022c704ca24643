"""The CUDA product: the same checks as on the CPU, and what only a GPU has."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matmul_cases import (
    TILES_OF_TOKENS,
    check_broadcasting,
    check_cross_product,
    check_epilogue,
    check_gradients,
    check_non_finite,
    check_tiles_of_tokens,
    check_zero_scales,
    product_of,
    rounds_weights,
    takes_turns,
)
from reference import (
    DTYPES,
    MODES,
    as_kernels_see_it,
    assert_product,
    random_weight,
    random_x,
    repeated,
    rounding,
)

import jax_wonly as jw
from jax_wonly import _abi, _cuda_costs, _cuda_dispatch
from jax_wonly._abi import ShiftMode

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, None])
@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_kernel(rng, bits, mode, x_dtype, scale_dtype, group_size):
    check_cross_product(
        rng,
        bits=bits,
        mode=mode,
        x_dtype=x_dtype,
        scale_dtype=scale_dtype,
        group_size=group_size,
        implementation="cuda",
        rows=(0, 1, 7, 33),
    )


@pytest.mark.parametrize("m", [1, 2, 8, 9, 16, 17, 31, 64, 65, 128, 200, 257, 600])
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("implementation", [None, "cuda"])
def test_rows(rng, m, x_dtype, implementation):
    """Every range of M that a kernel or the dispatch may treat apart, on a shape with several tiles each way."""
    for bits, mode, k, n in [(4, "symmetric", 1024, 1000), (8, "integer_zeros", 640, 321), (4, "offsets", 2048, 64)]:
        weight = random_weight(rng, k, n, bits=bits, group_size=128, mode=mode)
        x = random_x(rng, (m, k), x_dtype)
        y = jw.matmul(x, weight.qt, implementation=implementation)
        assert_product(y, x, weight, rounded_weights=rounds_weights(implementation, x, weight.qt))


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, None])
@pytest.mark.parametrize(("bits", "mode"), [*((bits, mode) for bits in (4, 8) for mode in MODES), (4, "table")])
def test_float32_in_pieces(rng, monkeypatch, bits, mode, group_size):
    """As exact as float32, of one weight and of several, in more rows than are taken at a time, infinities and all."""
    monkeypatch.setattr(_abi, "SPLIT_WORDS", int(rng.choice([0, _abi.SPLIT_WORDS])))  # 512 rows at a time, or all
    k, n = {32: 1120, 64: 1216, 128: 1152, 256: 1280, None: 1000}[group_size], 272
    scale_dtype = str(rng.choice(list(DTYPES)))
    product = jax.jit(lambda x, qt: jw.matmul(x, qt, implementation="cuda"))
    several = [((3,), False), ((2,), True)][int(rng.integers(2))]
    for lead, shared in ((), False), several:
        weight = random_weight(
            rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=scale_dtype, lead=lead
        )
        m = int(rng.choice([17, 24, 32, 33, 64, 70, 130, 520, 1100]))
        x = random_x(rng, (m, k) if shared or not lead else (*lead, m, k), "float32")
        kernel = jw.explain(x, weight.qt, platform="cuda", implementation="cuda").kernel
        assert kernel == "matmul_warpgroup" or (not lead and m <= 128 and kernel == "matmul_resident")  # of tiles
        y = product(x, weight.qt)
        assert_product(y, x, weight)
        np.testing.assert_array_equal(*(np.asarray(a).view(np.uint32) for a in (y, product(x, weight.qt))))
        # Each token has a power of two of its own; of one that is zero too.
        powers = jnp.asarray(2.0 ** rng.integers(-80, 60, (m, 1)), jnp.float32).at[int(rng.integers(m))].set(0)
        np.testing.assert_array_equal(product(x * powers, weight.qt), y * powers)
        row, value = int(rng.integers(m)), float(rng.choice([np.inf, -np.inf, np.nan]))
        at = int(rng.integers(k))
        wild = np.asarray(product(x.at[..., row, at].set(value), weight.qt))
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(wild[..., row, :], value * weight.dense[..., at, :])
        others = np.arange(m) != row
        np.testing.assert_array_equal(wild[..., others, :], np.asarray(y)[..., others, :])


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("mode", [*MODES, "table"])
@pytest.mark.parametrize("bits", [4, 8])
def test_any_number_of_inputs_and_outputs(rng, bits, mode, x_dtype):
    """Rows of activations, scales and results that begin anywhere, of every kernel for more than a few tokens: with the
    last 64 outputs in any number, splits of the inputs, several weights, and what is done after the sums."""
    if mode == "table" and bits == 8:
        pytest.skip("tables have four bits")
    seen = set()
    for group_size, k in ((128, 1152), (32, 1120), (64, 2112), (None, 1000), (None, 777), (256, 4096)):
        n = int(rng.choice([9, 17, 68, 100, 129, 137, 250, 1001, 1018, 1287, 4100]))
        lead = () if rng.random() < 0.7 else (3,)
        scale_dtype = x_dtype if rng.random() < 0.7 else "float32"
        weight = random_weight(
            rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=scale_dtype, lead=lead
        )
        options = {"activation": rng.choice([None, "relu"]), "implementation": "cuda"}
        options["preferred_element_type"] = rng.choice([None, None, "float32"])
        bias = jnp.asarray(rng.normal(0, 3, n), jnp.float32) if rng.random() < 0.5 else None
        product = jax.jit(lambda x, qt, bias, options=options: jw.matmul(x, qt, bias=bias, **options))
        cut_off = x_dtype == "float32" and bits == 8 and mode != "symmetric"
        for m in sorted(rng.choice([9, 17, 24, 40, 64, 72, 100, 130, 200, 257, 600], 3, replace=False).tolist()):
            x = random_x(rng, (*lead, m, k), x_dtype)
            y = product(x, weight.qt, bias)
            rounded = rounds_weights("cuda", x, weight.qt)
            of = {"bias": bias, "activation": options["activation"], "out_dtype": options["preferred_element_type"]}
            assert_product(y, x, weight, rounded_weights=rounded, cut_off=cut_off, **of)
            np.testing.assert_array_equal(np.asarray(product(x, weight.qt, bias)), np.asarray(y))
            seen.add(jw.explain(x, weight.qt, platform="cuda", implementation="cuda").kernel)
    if _cuda_dispatch.has_warpgroups():
        assert seen & {"matmul_warpgroup", "matmul_tiled"}


@pytest.mark.parametrize("m", [129, 150, 180, 215, 250])
@pytest.mark.parametrize("bits", [4, 8])
def test_tiles_of_every_height(rng, bits, m):
    """So many outputs that each multiprocessor has a tile, which is no higher than it must be."""
    weight = random_weight(rng, 256, 16896, bits=bits, group_size=64, scale_dtype="bfloat16")
    x = random_x(rng, (m, 256), "bfloat16")
    y = jw.matmul(x, weight.qt, implementation="cuda")
    assert_product(y, x, weight, rounded_weights=rounds_weights("cuda", x, weight.qt))


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, None])
@pytest.mark.parametrize("x_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_middling_rows(rng, bits, mode, x_dtype, group_size):
    """Groups may end within what a kernel takes at a time, and weights are rounded only where that is said."""
    k, n = {32: 1120, 64: 1216, 128: 1152, 256: 1280, None: 1000}[group_size], 272
    scale_dtype = str(rng.choice(list(DTYPES)))
    weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=scale_dtype)
    product = jax.jit(lambda x, qt: jw.matmul(x, qt, implementation="cuda"))
    for m in rng.choice([9, 16, 31, 40, 48, 64, 80, 96, 100, 128], 4, replace=False).tolist():
        x = random_x(rng, (m, k), x_dtype)
        assert_product(product(x, weight.qt), x, weight, rounded_weights=rounds_weights("cuda", x, weight.qt))


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["float_zeros", "offsets"])
@pytest.mark.parametrize("bits", [4, 8])
def test_float_shifts_of_float32(rng, bits, mode, scale_dtype):
    """They meet the sums of a group's activations, which are made with the pieces of those."""
    for group_size, m, k, n, lead in (
        (128, 48, 4096, 4096, ()),
        (32, 100, 2048, 4104, ()),
        (None, 300, 1000, 4096, ()),
        (64, 70, 2048, 4096, (3,)),
    ):
        weight = random_weight(
            rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=scale_dtype, lead=lead
        )
        x, bias = random_x(rng, (*lead, m, k), "float32"), jnp.asarray(rng.normal(0, 3, n), jnp.float32)
        if _cuda_dispatch.has_warpgroups():
            assert jw.explain(x, weight.qt, platform="cuda").kernel == "matmul_warpgroup"
        product = jax.jit(lambda x, qt, bias: jw.matmul(x, qt, bias=bias, activation="relu"))
        y = product(x, weight.qt, bias)
        assert_product(y, x, weight, bias=bias, activation="relu")
        np.testing.assert_array_equal(np.asarray(product(x, weight.qt, bias)), np.asarray(y))


@pytest.mark.parametrize("m", [17, 40, 100, 300])
@pytest.mark.parametrize("n", [136, 321])
@pytest.mark.parametrize("bits", [4, 8])
def test_shared_inputs(rng, bits, n, m):
    """So few outputs that several CTAs share the inputs of a tile; leading axes, bias, and results of another type."""
    for mode, x_dtype in (("symmetric", "bfloat16"), ("integer_zeros", "float16"), ("offsets", "bfloat16")):
        weight = random_weight(
            rng, 4128, n, bits=bits, group_size=32, mode=mode, scale_dtype=x_dtype, lead=(2,) if n == 136 else ()
        )
        x = random_x(rng, (2, m, 4128) if n == 136 else (m, 4128), x_dtype)
        bias = jnp.asarray(rng.normal(0, 3, n), jnp.float32)
        y = jw.matmul(
            x, weight.qt, bias=bias, activation="relu", preferred_element_type=jnp.float32, implementation="cuda"
        )
        assert_product(y, x, weight, bias=bias, activation="relu", out_dtype="float32", rounded_weights=True)


@pytest.mark.parametrize(("m", "n", "lead"), [(72, 6001, (3,)), (68, 12001, ()), (120, 4097, (3,)), (130, 3001, ())])
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
def test_few_tokens_share_inputs(rng, x_dtype, m, n, lead):
    """With a table, in tiles that have more rows than there are tokens."""
    weight = random_weight(rng, 4096, n, group_size=128, mode="table", scale_dtype=x_dtype, lead=lead)
    x = random_x(rng, (*lead, m, 4096), x_dtype)
    assert jw.explain(x, weight.qt, platform="cuda", implementation="cuda").kernel == "matmul_tiled"
    product = jax.jit(lambda x, qt: jw.matmul(x, qt, implementation="cuda"))
    y = product(x, weight.qt)
    assert_product(y, x, weight, rounded_weights=True)
    np.testing.assert_array_equal(*(np.asarray(a).view(np.uint16) for a in (y, product(x, weight.qt))))


@pytest.mark.parametrize("m", [40, 60, 100])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_sums_of_many_inputs(rng, bits, group_size, m):
    """Activations that two warpgroups add up for offsets in float32, of more stages than their ring has slots twice
    over: one that took a slot's phase for another read what was not there yet, or waited for ever.
    """
    of_two = {"mode": "offsets", "scale_dtype": "float32", "lead": (2,)}  # one would be too small for this kernel
    weight = random_weight(rng, 6400, 72, bits=bits, group_size=group_size, **of_two)
    x = random_x(rng, (2, m, 6400), "bfloat16")
    assert jw.explain(x, weight.qt, platform="cuda", implementation="cuda").kernel == "matmul_warpgroup"
    product = jax.jit(lambda x, qt: jw.matmul(x, qt, implementation="cuda"))
    y = product(x, weight.qt)
    assert_product(y, x, weight)
    np.testing.assert_array_equal(*(np.asarray(a).view(np.uint16) for a in (y, product(x, weight.qt))))


@pytest.mark.parametrize("m", [3, 9, 17, 40, 57, 64, 91, 100, 128, 300])
@pytest.mark.parametrize("n", [72, 264])
@pytest.mark.parametrize("bits", [4, 8])
def test_rounded_results(rng, bits, n, m):
    """Results of the activations' type have a way of their own to memory, of which those of a tile's last tokens, of
    outputs beyond the last and of several CTAs are parts: the same sums as in float32, rounded.
    """
    schemes = ("symmetric", 128, "bfloat16"), ("float_zeros", 64, "bfloat16"), ("integer_zeros", None, "float16")
    for mode, group_size, x_dtype in schemes:
        for k, lead in ((128, ()), (2560, (2,))):
            weight = random_weight(
                rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=x_dtype, lead=lead
            )
            x = random_x(rng, (*lead, m, k), x_dtype)
            bias = jnp.asarray(rng.normal(0, 3, n), jnp.float32)
            wide = jw.matmul(x, weight.qt, bias=bias, preferred_element_type=jnp.float32, implementation="cuda")
            y = jw.matmul(x, weight.qt, bias=bias, implementation="cuda")
            np.testing.assert_array_equal(*(np.asarray(a.astype(x_dtype)).view(np.uint16) for a in (y, wide)))


@pytest.mark.parametrize("m", [1, 3, 9, 17, 40, 64, 91, 128, 300, 700])
@pytest.mark.parametrize("x_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("activation", ["relu", "relu6", "gelu", "silu"])
def test_activation_of_rounded_results(rng, activation, x_dtype, m):
    """Rounded once, after the function, whose own error is a small part of that; large, infinite and NaN sums too."""
    functions = {
        "relu": lambda v: np.maximum(v, 0),
        "relu6": lambda v: np.clip(v, 0, 6),
        "gelu": lambda v: v / (1 + np.exp(-2 * (2 / np.pi) ** 0.5 * (v + 0.044715 * v**3))),
        "silu": lambda v: v / (1 + np.exp(-v)),
    }
    for mode, bits, n, k in ("symmetric", 4, 264, 512), ("integer_zeros", 8, 72, 256), ("float_zeros", 4, 520, 2560):
        weight = random_weight(rng, k, n, bits=bits, group_size=128, mode=mode, scale_dtype=x_dtype)
        x = random_x(rng, (m, k), x_dtype) * 0.1
        bias = rng.normal(0, 3, n).astype(np.float32)
        bias[:9] = [np.nan, np.inf, 3e38, 1e5, -1e5, 90, -90, 15, -15]
        # Under jit nobody looks at the bias.
        sums = jax.jit(partial(jw.matmul, preferred_element_type=jnp.float32, implementation="cuda"))
        product = jax.jit(partial(jw.matmul, activation=activation, implementation="cuda"))
        wide, y = (function(x, weight.qt, bias=bias) for function in (sums, product))
        with np.errstate(over="ignore"):
            exact = functions[activation](np.asarray(wide).astype(np.float64))
            rounded = exact.astype(DTYPES[x_dtype]).astype(np.float64)
        got, unusual = np.asarray(y).astype(np.float64), ~np.isfinite(rounded)
        np.testing.assert_array_equal(got[unusual], rounded[unusual])
        # Where the exponential is beyond 2^126, whose inverse is no normal number, results may be zero.
        got, exact = got[~unusual], exact[~unusual]
        error = np.abs(got - exact) / (rounding(exact, x_dtype) + 126 * np.log(2) * 2.0**-126)
        assert error.max() < 1 + 2.0**-6, f"an error of {error.max():.4g} times that of rounding"


@pytest.mark.parametrize("group_size", [32, 64, 128, None])
@pytest.mark.parametrize("x_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows(rng, bits, mode, x_dtype, group_size):
    """Several tiles each way, with scales of the type of the activations, and tiles that CTAs share the inputs of."""
    k, n, m = (1032 if group_size is None else 1152), 2120, 700
    weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=x_dtype)
    x = random_x(rng, (m, k), x_dtype)
    product = jax.jit(lambda x, qt: jw.matmul(x, qt, activation="relu", implementation="cuda"))
    y = product(x, weight.qt)
    assert_product(y, x, weight, activation="relu", rounded_weights=True)
    np.testing.assert_array_equal(*(np.asarray(a).view(np.uint16) for a in (y, product(x, weight.qt))))


@pytest.mark.parametrize("x_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("bits", "mode"), [*((bits, mode) for bits in (4, 8) for mode in MODES), (4, "table")])
def test_scales_of_the_other_type(rng, bits, mode, x_dtype):
    """Those of float16 checkpoints in bfloat16 models: few tokens take them as they are, many as float32."""
    other = {"float16": "bfloat16", "bfloat16": "float16"}[x_dtype]
    group_size = int(rng.choice([32, 64, 128]))
    weight = random_weight(rng, 1152, 4360, bits=bits, group_size=group_size, mode=mode, scale_dtype=other)
    bias = random_x(rng, (4360,))
    product = jax.jit(lambda x, qt: jw.matmul(x, qt, bias=bias, activation="relu", implementation="cuda"))
    for m in (3, 40, 1100):
        x = random_x(rng, (m, 1152), x_dtype)
        y = product(x, weight.qt)
        exact = as_kernels_see_it(weight, x_dtype) if mode == "table" else weight
        rounded = rounds_weights("cuda", x, weight.qt)
        assert_product(y, x, exact, bias=bias, activation="relu", rounded_weights=rounded)
        np.testing.assert_array_equal(y, product(x, weight.qt))
    if _cuda_dispatch.has_warpgroups():
        assert jw.explain(x, weight.qt, platform="cuda").kernel == "matmul_tiled"


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
        scale_dtype="float32",
        group_size=64,
        implementation=implementation,
        rows=(0, 33),
    )


@pytest.mark.parametrize("implementation", ["cuda", "dequantize"])
@pytest.mark.parametrize("activation", [None, "relu", "relu6", "gelu", "silu"])
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_epilogue(rng, implementation, activation, x_dtype):
    for out_dtype in (None, *DTYPES):
        for m in (3, 40):
            check_epilogue(
                rng,
                bits=int(rng.choice([4, 8])),
                mode=str(rng.choice(MODES)),
                x_dtype=x_dtype,
                activation=activation,
                out_dtype=out_dtype,
                implementation=implementation,
                m=m,
            )


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize(
    ("x_lead", "weight_lead"),
    [
        ((2, 3), ()),
        ((), (3,)),
        ((3,), (3,)),
        ((2, 3), (3,)),
        ((3, 2), (3, 1)),
        ((2, 1), (1, 3)),
        ((0,), ()),
        ((), (0,)),
    ],
)
def test_leading_axes(rng, x_lead, weight_lead, x_dtype):
    check_broadcasting(rng, x_lead=x_lead, weight_lead=weight_lead, x_dtype=x_dtype, implementation="cuda")


@pytest.mark.parametrize("implementation", ["cuda", "dequantize", "xla"])
def test_non_finite(rng, implementation):
    check_non_finite(rng, implementation)


@pytest.mark.parametrize("group_size", [32, 128, None])
@pytest.mark.parametrize("x_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
def test_zero_scales(rng, mode, x_dtype, group_size):
    check_zero_scales(rng, mode=mode, group_size=group_size, x_dtype=x_dtype, implementation="cuda")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_gradients(rng, bits, mode):
    check_gradients(rng, bits=bits, mode=mode)


@pytest.mark.parametrize("x_dtype", DTYPES)
def test_deterministic(rng, x_dtype):
    weight = random_weight(rng, 4096, 257, group_size=128)
    for m in (1, 16, 100):
        x = random_x(rng, (m, 4096), x_dtype)
        f = jax.jit(lambda x: jw.matmul(x, weight.qt, implementation="cuda"))
        y = np.asarray(f(x))
        for _ in range(10):
            np.testing.assert_array_equal(f(x), y)


def test_one_call_under_vmap(rng):
    def calls(f, *args):
        return jax.jit(f).lower(*args).compile().as_text().count('custom_call_target="wonly_matmul_v1"')

    weight = random_weight(rng, 64, 70, group_size=32, lead=(3,))
    x = random_x(rng, (3, 5, 64))
    assert calls(jax.vmap(jw.matmul), x, weight.qt) == 1
    assert calls(jax.vmap(jw.matmul, in_axes=(None, 0)), x[0], weight.qt) == 1
    assert calls(jax.vmap(jw.matmul, in_axes=(0, None)), x, weight.qt[0]) == 1


def test_scan_and_repeated_runs(rng):
    """A long chain, many times: what command buffers capture and replay."""
    weight = random_weight(rng, 128, 128, group_size=32, lead=(6,))
    x = random_x(rng, (4, 128), "bfloat16")
    scale = jnp.bfloat16(1 / 32)

    @jax.jit
    def unrolled(x, qt):
        for i in range(6):
            x = jw.matmul(x, qt[i]) * scale
        return x

    @jax.jit
    def scanned(x, qt):
        return jax.lax.scan(lambda c, w: (jw.matmul(c, w) * scale, None), x, qt)[0]

    first = np.asarray(unrolled(x, weight.qt)).astype(np.float32)
    expected = np.asarray(x).astype(np.float64)
    for i in range(6):
        expected = expected @ weight.dense[i] / 32
    # Six roundings to bfloat16, and their growth.
    np.testing.assert_allclose(first, expected, atol=0.05 * np.abs(expected).max())
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(unrolled(x, weight.qt)).astype(np.float32), first)
        np.testing.assert_allclose(
            np.asarray(scanned(x, weight.qt)).astype(np.float32), first, atol=0.02 * np.abs(first).max()
        )


@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mode", [*MODES, "table"])
@pytest.mark.parametrize("m", [5, 40, 64, 130, 256, 401, 1100])
def test_wide_results(rng, m, mode, x_dtype):
    """float32 results of 16-bit activations are what 16-bit ones are rounded from, to the bit; of any outputs."""
    for k, n in (512, 1001), (320, 4100), (1024, 264), (2048, 6144):
        group_size = int(rng.choice([32, 64])) if k == 320 else [32, 64, 128, None][int(rng.integers(4))]
        scale_dtype = str(rng.choice([x_dtype, "float32"]))
        scheme = {"mode": mode, "group_size": group_size, "scale_dtype": scale_dtype}
        weight = random_weight(rng, k, n, bits=4 if mode == "table" else int(rng.choice([4, 8])), **scheme)
        x, bias = random_x(rng, (m, k), x_dtype), [None, random_x(rng, (n,))][int(rng.integers(2))]
        wide, narrow = (
            jw.matmul(x, weight.qt, bias=bias, preferred_element_type=dtype, implementation="cuda")
            for dtype in (jnp.float32, None)
        )
        assert wide.dtype == jnp.float32 and narrow.dtype == x.dtype
        np.testing.assert_array_equal(wide.astype(x.dtype), narrow)
        assert not np.array_equal(wide, narrow.astype(jnp.float32))


@pytest.mark.parametrize("implementation", [None, "cuda"])
@pytest.mark.parametrize("mode", [*MODES, "table"])
def test_rounded_activations(rng, mode, implementation):
    """With the default precision of float32 products those of bfloat16, where that is faster, to the bit."""
    differ = 0
    for k, n, m in (64, 70, 3), (512, 1000, 24), (2048, 2056, 8), (1001, 264, 600), (4096, 512, 2000):
        group_size = [32, 64, 128, None][int(rng.integers(4))] if k % 128 == 0 else None
        scheme = {"mode": mode, "group_size": group_size, "scale_dtype": str(rng.choice(list(DTYPES)))}
        weight = random_weight(rng, k, n, bits=4 if mode == "table" else int(rng.choice([4, 8])), **scheme)
        x = random_x(rng, (m, k))
        options = {"implementation": implementation, "activation": "silu", "bias": random_x(rng, (n,))}
        y = jw.matmul(x, weight.qt, precision="default", **options)
        rounds = jw.explain(x, weight.qt, precision="default", implementation=implementation).rounds_x
        used = x.astype(jnp.bfloat16) if rounds else x
        expected = jw.matmul(used, weight.qt, preferred_element_type=jnp.float32, **options)
        assert y.dtype == jnp.float32
        np.testing.assert_array_equal(y, expected)
        differ += not np.array_equal(y, jw.matmul(x, weight.qt, **options))

        dy = random_x(rng, (m, n))
        dx = jax.vjp(lambda x, w: jw.matmul(x, w, precision="default", implementation=implementation), x, weight.qt)[1]
        rounds = jw.explain(dy, weight.qt, precision="default", implementation=implementation, transpose=True).rounds_x
        used = dy.astype(jnp.bfloat16) if rounds else dy

        def of_x(x, dtype=used.dtype, qt=weight.qt):
            return jw.matmul(x.astype(dtype), qt, implementation=implementation)

        expected = jax.linear_transpose(of_x, x)(used)[0]
        error = np.abs(dx(dy)[0] - expected).max() / np.abs(expected).max()
        assert error < (2.0**-8 if rounds else 2.0**-20)  # the sums of the expected ones are rounded themselves
        differ += bool(rounds)
    assert differ >= 4


def test_float32_is_not_tf32(rng):
    weight = random_weight(rng, 1024, 256, bits=8, group_size=128)
    x = random_x(rng, (512, 1024))
    for implementation in (None, "cuda", "dequantize", "xla"):
        assert_product(jw.matmul(x, weight.qt, implementation=implementation), x, weight)
    dx = jax.grad(lambda x: jw.matmul(x, weight.qt)[:, 0].sum())(x)
    np.testing.assert_allclose(dx[0], weight.dense[:, 0], rtol=1e-5, atol=1e-6)


def check_own_results(product, x, weight, bias, y):
    """``y = product(x, weight.qt, bias)``, with relu, once more; a token's result whatever the others are; and an
    infinity as a dense product takes it."""
    y, middle = np.asarray(y), x.shape[-1] // 2
    np.testing.assert_array_equal(np.asarray(product(x, weight.qt, bias)), y)
    others = x.at[..., 1:, :].set(np.inf)
    np.testing.assert_array_equal(np.asarray(product(others, weight.qt, bias))[..., 0, :], y[..., 0, :])
    of_one = weight.dense[..., middle, :]
    infinite = product(x.at[..., 0, middle].set(np.inf), weight.qt, bias)[..., 0, :]
    known = of_one != 0
    np.testing.assert_array_equal(np.asarray(infinite, np.float32)[known], np.where(of_one > 0, np.inf, 0)[known])


@pytest.mark.parametrize("m", [3, 4, 5, 8, 9, 16])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("x_dtype", ["float16", "bfloat16"])
def test_resident_activations(rng, x_dtype, bits, mode, m):
    """Strips of outputs that CTAs share unevenly, clusters that share the inputs, parts of stages, batches, and many
    inputs. Odd numbers of outputs, as no other kernel takes those.
    """
    floats = mode in ("float_zeros", "offsets")
    for k, n, group_size, lead in (
        *((1088, 1001, None, ()), (5120, 1281, 128, ()), (2304, 137, 256, (3,)), (64, 17, None, ())),
        *((12288, 521, 128, ()), (27648, 265, 256, ()), (2048, 264, 128, (8,)), (576, 7001, None, ())),
        *((1088, 1001, 32, ()), (5184, 1281, 64, ()), (4096, 137, 64, (3,)), (64, 17, 32, ()), (12352, 521, 32, ())),
        *((14336, 1001, 128, ()), (4096, 265, 128, ()), (2176, 2201, 64, ())),
    ):
        weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=x_dtype, lead=lead)
        x = random_x(rng, (*lead, m, k), x_dtype)
        bias = jnp.asarray(rng.normal(0, 3, n), jnp.float32)
        others = (k, n) == (2048, 264) or (floats and (group_size is None or m > 8))
        others |= m > 8 and (k, n) in ((27648, 265), (12352, 521))  # many inputs for few outputs, rows of any length
        if _cuda_dispatch.has_warpgroups() and not others:
            assert jw.explain(x, weight.qt, implementation="cuda").kernel == "matmul_resident"
        product = jax.jit(lambda x, qt, bias: jw.matmul(x, qt, bias=bias, activation="relu", implementation="cuda"))
        y = product(x, weight.qt, bias)
        rounded = rounds_weights("cuda", x, weight.qt)
        assert_product(y, x, weight, bias=bias, activation="relu", rounded_weights=rounded)
        check_own_results(product, x, weight, bias, y)
        few = 3 if m <= 8 else 9  # nor does the number of the others matter
        fewer = np.asarray(product(x[..., :few, :], weight.qt, bias))
        np.testing.assert_array_equal(fewer, np.asarray(y)[..., :few, :])


# By bits: K, N, and on a GPU of 132 multiprocessors strips of a pass and blocks of stages for a warp, 0 for any number.
PASSES = {
    4: (
        *((2304, 1000, 1, 1), (8192, 1032, 1, 1), (4160, 2056, 1, 2), (1024, 4104, 2, 1), (4096, 4104, 2, 2)),
        *((512, 8200, 4, 1), (2048, 8200, 4, 2), (9216, 2104, 2, 0), (7424, 2576, 4, 0)),
    ),
    8: (
        *((1152, 1040, 1, 1), (2880, 968, 1, 2), (1024, 4064, 2, 1), (2048, 4104, 2, 2), (512, 4000, 4, 1)),
        *((1024, 8200, 4, 2), (6400, 2104, 2, 0), (3392, 4064, 4, 0), (10176, 440, 1, 2)),
    ),
}


@pytest.mark.device
@pytest.mark.parametrize("bits", PASSES)
@pytest.mark.parametrize(
    ("mode", "scale_dtype"),
    [
        *(
            ("symmetric", "bfloat16"),
            ("integer_zeros", "bfloat16"),
            ("offsets", "bfloat16"),
            ("float_zeros", "bfloat16"),
        ),
        *(("symmetric", "float32"), ("integer_zeros", "float16")),
    ],
)
def test_resident_passes(rng, mode, scale_dtype, bits):
    """One, two and four strips of outputs at a time, and one, two and any number of blocks for a warp."""
    alike = scale_dtype == "bfloat16"
    group_size = 64 if alike else None  # of small groups other scales have no such kernels
    for k, n, strips, blocks in PASSES[bits]:
        weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=scale_dtype)
        for m in (1, 3, 8, 12):
            x = random_x(rng, (m, k), "bfloat16")
            if _cuda_dispatch.has_warpgroups() and mode == "symmetric" and (alike or m <= 8):
                assert jw.explain(x, weight.qt, implementation="cuda").kernel == "matmul_resident"
                scales, groups = jnp.dtype(scale_dtype), k // group_size if group_size else 1
                p = _cuda_dispatch.Product(m, k, n, 1, bits, x.dtype, scales, ShiftMode.NONE, None, groups=groups)
                config = min(_cuda_dispatch._resident_times(p), key=lambda pair: pair[1])[0]
                of_warp = _cuda_costs.resident_blocks(m, k, n, bits, config[:3])
                assert (
                    not alike or m > 8 or _cuda_dispatch._gpu()[1] != 132 or (config[2], of_warp) == (strips, blocks)
                ), (k, n)
            product = jax.jit(lambda x, qt: jw.matmul(x, qt, implementation="cuda"))
            y = product(x, weight.qt)
            assert_product(y, x, weight, rounded_weights=rounds_weights("cuda", x, weight.qt))
            np.testing.assert_array_equal(np.asarray(product(x, weight.qt)), np.asarray(y))
            if 1 < m <= 8:
                np.testing.assert_array_equal(np.asarray(product(x[:3], weight.qt)), np.asarray(y)[:3])


@pytest.mark.parametrize(("bits", "mode", "x_dtype"), TILES_OF_TOKENS)
def test_tiles_of_tokens(rng, bits, mode, x_dtype):
    """Small layers, of which clusters of their own multiply each tile of tokens."""
    if not _cuda_dispatch.has_warpgroups():
        pytest.skip("matmul_resident is for sm_90")
    check_tiles_of_tokens(rng, bits=bits, mode=mode, x_dtype=x_dtype)


@pytest.mark.parametrize(
    ("bits", "mode", "group_size"),
    [
        (4, "symmetric", 64),
        (4, "integer_zeros", None),
        (8, "symmetric", 128),
        (4, "offsets", 32),
        (4, "float_zeros", 128),
    ],
)
def test_resident_turns(rng, bits, mode, group_size):
    """More inputs than a CTA has room for, of which all CTAs' pieces take turns, with half a stage at the end."""
    k, n = 28736 if group_size != 128 else 28800, 4104
    weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype="bfloat16")
    for m in (3, 8):
        x = random_x(rng, (m, k), "bfloat16")
        if _cuda_dispatch.has_warpgroups():
            assert jw.explain(x, weight.qt, implementation="cuda").kernel == "matmul_resident"
            p = product_of(m, k, n, mode, "bfloat16", bits=bits, group_size=group_size or k)
            config = min(_cuda_dispatch._resident_times(p), key=lambda pair: pair[1])[0]
            assert _cuda_dispatch._gpu()[1] != 132 or takes_turns(p, config[:3])
        product = jax.jit(lambda x, qt: jw.matmul(x, qt, implementation="cuda"))
        y = product(x, weight.qt)
        assert_product(y, x, weight, rounded_weights=rounds_weights("cuda", x, weight.qt))
        for _ in range(3):
            np.testing.assert_array_equal(np.asarray(product(x, weight.qt)), np.asarray(y))
    np.testing.assert_array_equal(np.asarray(product(x[:3], weight.qt)), np.asarray(y)[:3])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("mode", ["float_zeros", "offsets"])
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("alike", [True, False])
def test_resident_shifts(rng, alike, x_dtype, mode, bits):
    """Float zeros and offsets of up to eight tokens, of the activations' type and of others, in rows that begin at no
    multiple of 16 bytes too, and with inputs that end half a stage."""
    for k, n, group_size, lead in (
        *(
            (768, 1016, 128, ()),
            (1024, 2050, 32, ()),
            (4096, 2064, 128, ()),
            (2112, 4098, 64, ()),
            (8256, 1044, 32, ()),
            (1088, 8200, None, ()),
            (3072, 1368, 256, (2,)),
        ),
        (14336, 600, 32, ()),
    ):
        types = {"scale_dtype": x_dtype, "shift_dtype": x_dtype}
        while not alike and len(set(types.values())) == 1 and types["scale_dtype"] == x_dtype:
            types = {name: str(rng.choice(list(DTYPES))) for name in types}
        weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode, lead=lead, **types)
        m = int(rng.integers(2, 9))
        x, bias = random_x(rng, (*lead, m, k), x_dtype), random_x(rng, (*lead, n))
        if _cuda_dispatch.has_warpgroups():
            assert jw.explain(x, weight.qt, implementation="cuda").kernel == "matmul_resident"
        product = jax.jit(lambda x, qt, bias: jw.matmul(x, qt, bias=bias, implementation="cuda"))
        y = product(x, weight.qt, bias)
        assert_product(y, x, weight, bias=bias, rounded_weights=rounds_weights("cuda", x, weight.qt))
        np.testing.assert_array_equal(np.asarray(product(x, weight.qt, bias)), np.asarray(y))
        few = np.asarray(product(x[..., :2, :], weight.qt, bias))
        np.testing.assert_array_equal(few, np.asarray(y)[..., :2, :])


@pytest.mark.device
@pytest.mark.parametrize(
    ("mode", "m"), [*((mode, m) for mode in ("symmetric", "integer_zeros") for m in (9, 16)), ("offsets", 8)]
)
def test_resident_rounds(rng, mode, m):
    """More strips of outputs than a CTA has room for the sums of, and at last fewer than a cluster has CTAs: some then
    finish none, and warps that came late once waited for ever. A few outputs over and over, as there are many.
    """
    period = 192
    # Clusters of two CTAs with 121 or 122 strips, and of four with 11.
    for k, n, bits in ((8192, 128256, 4), (21504, 5265, 4), (21504, 5265, 8)):
        few = random_weight(rng, k, period, bits=bits, group_size=128, mode=mode, scale_dtype="bfloat16")
        x = random_x(rng, (m, k), "bfloat16")
        qt = repeated(few.qt, n)
        if _cuda_dispatch.has_warpgroups():
            assert jw.explain(x, qt, implementation="cuda").kernel == "matmul_resident"
        y = np.asarray(jax.jit(lambda x, qt: jw.matmul(x, qt, implementation="cuda"))(x, qt))
        assert_product(y[:, :period], x, few)
        np.testing.assert_array_equal(y, np.tile(y[:, :period], -(-n // period))[:, :n])


@pytest.mark.parametrize("m", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("mode", ["symmetric", "integer_zeros"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_resident_float32(rng, scale_dtype, bits, mode, m):
    """float32 activations that are split where they are multiplied: magnitudes far apart, and what is not finite."""
    for k, n, group_size, lead in (
        *((1088, 1002, None, ()), (5120, 1282, 128, ()), (2304, 138, 256, (3,)), (64, 18, None, ())),
        *((1088, 1002, 32, ()), (5184, 1282, 64, ()), (4096, 138, 64, (3,)), (12288, 522, 128, ())),
        (576, 7002, None, ()),
    ):
        weight = random_weight(
            rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=scale_dtype, lead=lead
        )
        x = random_x(rng, (*lead, m, k), "float32") * 2.0 ** jnp.asarray(rng.integers(-30, 20, (*lead, m, k)))
        x = x.astype(jnp.float32)
        bias = jnp.asarray(rng.normal(0, 3, n), jnp.float32)
        if _cuda_dispatch.has_warpgroups():
            assert jw.explain(x, weight.qt, implementation="cuda").kernel == "matmul_resident"
        product = jax.jit(lambda x, qt, bias: jw.matmul(x, qt, bias=bias, activation="relu", implementation="cuda"))
        y = product(x, weight.qt, bias)
        assert_product(y, x, weight, bias=bias, activation="relu")
        check_own_results(product, x, weight, bias, y)
        assert np.isnan(jw.matmul(x.at[..., 0, 3].set(np.nan), weight.qt, implementation="cuda")[..., 0, :]).all()
        rounded = jw.matmul(x, weight.qt, implementation="cuda", preferred_element_type="bfloat16")
        assert_product(rounded, x, weight, out_dtype="bfloat16")
