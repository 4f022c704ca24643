"""dx = dy @ w.T through the packed weights on a GPU."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import DTYPES, MODES, UNITS, random_weight, random_x, rounding

import jax_wonly as jw
from jax_wonly import _abi

pytestmark = pytest.mark.gpu


@partial(jax.jit, static_argnames=("k", "implementation"))
def transposed(dy, qt, k, implementation="cuda"):
    x = jax.ShapeDtypeStruct((*dy.shape[:-1], k), dy.dtype)
    return jax.linear_transpose(lambda x: jw.matmul(x, qt, implementation=implementation), x)(dy)[0]


def assert_transposed(dx, dy, weight):
    """Holds ``dx`` to float64: the accumulation of what is added up, the rounding of 16-bit weights, and of offsets
    before they are added, and the result's."""
    dtype = str(dy.dtype)
    dy64 = np.asarray(dy).astype(np.float64)
    w, magnitude = weight.dense.swapaxes(-1, -2), weight.magnitude.swapaxes(-1, -2)
    exact = dy64 @ w
    bound = 2.0**-21 * max(1.0, np.sqrt(dy.shape[-1]) / 8) * (np.abs(dy64) @ magnitude)
    if dtype != "float32":
        bound = bound + 3 * UNITS[dtype] * np.sqrt(dy64**2 @ weight.rounded.swapaxes(-1, -2) ** 2)
    bound = 1.2 * bound + rounding(exact, dtype) + 1e-7
    got = np.asarray(dx).astype(np.float64)
    assert str(dx.dtype) == dtype and got.shape == exact.shape
    assert (np.abs(got - exact) <= bound).all(), np.max(np.abs(got - exact) / bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_kernels(rng, bits, mode, dtype):
    """Every option, with few and many tokens, and sizes that are no multiple of a block, or of anything."""
    sizes = rng.permutation([32, 64, 128, 256, None])
    for group_size, (m, n, blocks) in zip(sizes, [(3, 200, 3), (21, 77, 1), (300, 328, 5)], strict=False):
        scale_dtype = rng.choice(list(DTYPES))
        k = (group_size or 37) * blocks
        weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=scale_dtype)
        dy = random_x(rng, (m, n), dtype)
        assert_transposed(transposed(dy, weight.qt, k), dy, weight)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_few_tokens(rng, bits, mode, dtype):
    """Scales and shift of the type of the tokens, for which the streaming kernel has instances of their own."""
    for group_size, m, k, n in [
        (128, 3, 384, 264),
        (32, 16, 96, 136),
        (32, 7, 160, 77),
        (64, 12, 192, 1096),
        (None, 1, 37, 520),
    ]:
        weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=dtype)
        dy = random_x(rng, (m, n), dtype)
        assert_transposed(transposed(dy, weight.qt, k), dy, weight)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_many_tokens(rng, bits, mode, dtype):
    """The same for the kernel for many: blocks of every number of tokens, whose outputs no, two or more CTAs share,
    with weights in registers or in shared memory (float zeros, those of one byte of outputs that are no multiple of 16,
    and eight bits of more than 128 tokens); outputs that end in either half of a stage."""
    for group_size, m, k, n in [
        (128, 24, 1152, 1096),
        (128, 30, 4224, 72),
        (32, 17, 416, 2056),
        (256, 60, 768, 520),
        (64, 100, 320, 1096),
        (None, 250, 264, 776),
        (128, 300, 2688, 200),
        (32, 500, 352, 136),
        (None, 700, 1056, 40),
        (128, 120, 4096, 584),
        (128, 257, 1536, 1032),
        (None, 500, 3968, 648),
        (32, 20, 4192, 48),
        (64, 90, 2880, 16),
        (64, 270, 448, 2064),
        (32, 60, 1312, 8),
    ]:
        weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=dtype)
        dy = random_x(rng, (m, n), dtype)
        assert_transposed(transposed(dy, weight.qt, k), dy, weight)


@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_many_tokens_and_other_scales(rng, mode, scale_dtype):
    """Scales and offsets of another type, which become bfloat16 first; of several weights, too, which have scales and
    zeros of their own."""
    for group_size, m, k, n, lead in [(64, 24, 576, 1040, ()), (128, 150, 640, 528, (3,)), (32, 300, 288, 208, (2,))]:
        weight = random_weight(rng, k, n, group_size=group_size, mode=mode, scale_dtype=scale_dtype, lead=lead)
        dy = random_x(rng, (*lead, m, n), "bfloat16")
        assert_transposed(transposed(dy, weight.qt, k), dy, weight)


@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_many_tokens_of_float32(rng, bits, mode, scale_dtype):
    """float32 cotangents as two fp16 numbers each: blocks of 64 and of 128 tokens, whose outputs one CTA sums, or two
    to six share; less outputs than a stage, and inputs that end within a block; rows and scales that are zero."""
    for group_size, m, k, n in [
        (128, 33, 640, 1096),
        (None, 64, 1000, 200),
        (256, 100, 1024, 2056),
        (128, 128, 384, 40),
        (None, 150, 77, 520),
        (128, 260, 2176, 328),
        (256, 65, 2048, 2056),
        (128, 33, 8448, 584),
        (32, 70, 416, 264),
        (64, 200, 192, 1096),
    ]:
        weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=scale_dtype)
        dy = np.asarray(random_x(rng, (m, n), "float32")).copy()
        dy[m // 2] = 0
        assert_transposed(transposed(jnp.asarray(dy), weight.qt, k), dy, weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_any_number_of_outputs(rng, bits, mode, dtype):
    """Numbers of outputs in which no row is read 16 bytes at a time; cotangents and scales then have zeros behind."""
    for group_size, m, k, lead in [(128, 40, 1152, ()), (32, 300, 416, ()), (None, 3, 2048, ()), (64, 70, 192, (3,))]:
        n = int(rng.choice([9, 77, 100, 1001, 1287, 2052]))
        scale_dtype = dtype if rng.random() < 0.7 else "float32"
        weight = random_weight(
            rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=scale_dtype, lead=lead
        )
        dy = random_x(rng, (*lead, m, n), dtype)
        assert_transposed(transposed(dy, weight.qt, k), dy, weight)


@pytest.mark.parametrize("power", [-90, -30, 30, 90])
@pytest.mark.parametrize("m", [40, 200])
def test_range_of_float32(rng, power, m):
    """Cotangents, or scales, of any size: the same bits as those of ordinary size."""
    weight = random_weight(rng, 384, 264, group_size=128, scale_dtype="float32")
    dy = random_x(rng, (m, 264), "float32")
    dx = np.asarray(transposed(dy, weight.qt, 384))
    factor = np.float32(2.0**power)
    scaled = dataclasses.replace(weight.qt, scales=weight.qt.scales * factor)
    np.testing.assert_array_equal(np.asarray(transposed(dy, scaled, 384)), dx * factor)
    np.testing.assert_array_equal(np.asarray(transposed(dy * factor, weight.qt, 384)), dx * factor)
    np.testing.assert_array_equal(np.asarray(transposed(dy / factor, scaled, 384)), dx)


def test_float32_some_rows_at_a_time(rng, monkeypatch):
    """With scratch for 128 rows."""
    scratch = _abi.transposed_float32_scratch
    monkeypatch.setattr(_abi, "transposed_float32_scratch", lambda b, m, n, *rest: scratch(b, min(m, 200), n, *rest))
    weight = random_weight(rng, 520, 392, bits=8, mode="integer_zeros", group_size=None)
    dy = random_x(rng, (452, 392), "float32")
    assert_transposed(transposed(dy, weight.qt, 520), dy, weight)


@pytest.mark.parametrize("m", [20, 40, 300])
@pytest.mark.parametrize("power", [-80, 50, 110])
@pytest.mark.parametrize("bits", [4, 8])
def test_range_of_scales(rng, bits, power, m):
    """Scales of any size that bf16 has: those of tens of powers of two, which a model's never are, too. Of few rows
    their sums are not finite at first, and computed again with weights that are not rounded."""
    weight = random_weight(rng, 384, 264, bits=bits, group_size=128, scale_dtype="bfloat16")
    large = dataclasses.replace(weight.qt, scales=weight.qt.scales * jnp.bfloat16(2.0**power))
    dy = random_x(rng, (m, 264), "bfloat16")
    dx = transposed(dy, large, 384).astype(jnp.float32) * 2.0**-power
    if m > 32 or power < 0:
        np.testing.assert_array_equal(dx, transposed(dy, weight.qt, 384))
    assert_transposed(dx.astype(jnp.bfloat16), dy, weight)


@pytest.mark.parametrize("m", [1, 8, 9, 16, 17, 24, 25, 32, 33, 64, 65, 128, 129, 257, 600])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", [None, "cuda"])
def test_rows(rng, m, dtype, implementation):
    """Every range of M that a kernel or the dispatch may treat apart, with few inputs and with many."""
    for k, n in (1000, 1096), (8712, 136):
        weight = random_weight(rng, k, n, bits=int(rng.choice([4, 8])), scale_dtype=dtype)
        dy = random_x(rng, (m, n), dtype)
        assert_transposed(transposed(dy, weight.qt, k, implementation), dy, weight)


@pytest.mark.parametrize("m", [5, 140])
@pytest.mark.parametrize("lead", [((3,), ()), ((), (3,)), ((3,), (3,))])
@pytest.mark.parametrize(("dtype", "group_size"), [("bfloat16", 64), ("float32", 128)])
def test_batches(rng, dtype, group_size, lead, m):
    """Shared and stacked weights under vmap, as one call."""
    weight = random_weight(rng, 256, 136, group_size=group_size, mode="integer_zeros", lead=lead[0])
    dy = random_x(rng, (*lead[1], m, 136), dtype)
    axes = (0 if lead[1] else None, 0 if lead[0] else None)
    dx = jax.vmap(partial(transposed, k=256), in_axes=axes)(dy, weight.qt)
    assert_transposed(dx, jnp.broadcast_to(dy, (3, m, 136)), weight)


@pytest.mark.parametrize("m", [2, 200, 600])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradient_is_one_call(rng, dtype, m):
    """jax.grad compiles to the kernel, with no dense weight beside it; JAX's own and explicit calls agree."""
    weight = random_weight(rng, 640, 384, group_size=128)
    x, dy = random_x(rng, (m, 640), dtype), random_x(rng, (m, 384), dtype)

    def dx(x, dy, qt):
        return jax.vjp(lambda x: jw.matmul(x, qt), x)[1](dy)[0]

    compiled = jax.jit(dx).lower(x, dy, weight.qt).compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="wonly_matmul_transposed_v1"') == 1
    assert "[640,384]" not in text and "[384,640]" not in text
    result = compiled(x, dy, weight.qt)
    assert_transposed(result, dy, weight)
    np.testing.assert_array_equal(result, transposed(dy, weight.qt, 640))


@pytest.mark.parametrize("m", [3, 100])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_infinities_and_range(rng, mode, dtype, m):
    """Infinities as in a dense product; small and large cotangents keep their digits."""
    weight = random_weight(rng, 256, 264, group_size=128, mode=mode)
    unit = np.asarray(random_x(rng, (m, 264), dtype))
    powers = np.ones((m, 1))
    if dtype != "float16":
        powers[0], powers[1] = 2.0**-40, 2.0**60
    dy = (unit.astype(np.float64) * powers).astype(unit.dtype)
    dy[2, 77] = np.inf
    dx = np.asarray(transposed(dy, weight.qt, 256)).astype(np.float64)
    with np.errstate(invalid="ignore"):
        expected = np.inf * weight.dense[:, 77]
    # The sum of two products, of codes and of what is added to them, may be of opposite infinities.
    apart = dtype == "float32" and m > 64 and mode in ("float_zeros", "offsets")
    # Scales and offsets become bfloat16 first with many rows, so that a weight may change its sign, or be zero.
    rounds = dtype == "bfloat16" and mode == "offsets" and m > 16
    rounded = 2.0**-8 * weight.magnitude[:, 77] if rounds else 0.0
    told = np.abs(weight.dense[:, 77]) >= rounded
    np.testing.assert_array_equal(dx[2][told], np.where(apart & np.isnan(dx[2]), np.nan, expected)[told])
    finite = np.arange(m) != 2
    assert_transposed((dx / powers)[finite].astype(unit.dtype), unit[finite], weight)


@pytest.mark.parametrize("m", [1, 16, 40, 200])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tokens_are_independent_and_repeat(rng, dtype, m):
    """The same bits on every run, and for a token alone or among others that the same kernel takes."""
    weight = random_weight(rng, 1024, 704, group_size=128)
    dy = random_x(rng, (m, 704), dtype)
    dx = np.asarray(transposed(dy, weight.qt, 1024))
    few = {1: 1, 16: 9, 40: 33, 200: 130}[m]
    np.testing.assert_array_equal(np.asarray(transposed(dy[:few], weight.qt, 1024)), dx[:few])
    for _ in range(50):
        last = transposed(dy, weight.qt, 1024)
    np.testing.assert_array_equal(np.asarray(last), dx)
