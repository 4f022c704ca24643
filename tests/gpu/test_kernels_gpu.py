"""What only the CUDA kernels can get wrong: huge activations, dependence on other tokens, threads, replays."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import DTYPES, assert_product, random_weight, random_x

import jax_wonly as jw
from jax_wonly import _cuda_costs, _cuda_dispatch
from jax_wonly._abi import ShiftMode
from jax_wonly._cuda_dispatch import Product

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("m", [3, 40])
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("mode", ["symmetric", "integer_zeros", "offsets"])
def test_infinities_keep_their_sign(rng, mode, x_dtype, m):
    """An infinity times a weight, as in a dense product: its sign is the weight's, and zero makes it NaN."""
    k, n, at = 512, 200, 77
    weight = random_weight(rng, k, n, group_size=128, mode=mode)
    x = np.abs(np.asarray(random_x(rng, (m, k), x_dtype)).astype(np.float32))
    x[1, at], x[2, at] = np.inf, -np.inf
    y = np.asarray(jw.matmul(jnp.asarray(x).astype(DTYPES[x_dtype]), weight.qt, implementation="cuda")).astype(
        np.float64
    )
    with np.errstate(invalid="ignore"):
        expected = np.inf * weight.dense[at]
    np.testing.assert_array_equal(y[1], expected)
    np.testing.assert_array_equal(y[2], -expected)
    assert np.isfinite(y[[0, *range(3, m)]]).all()


@pytest.mark.parametrize("m", [1, 12, 40, 300])
@pytest.mark.parametrize("mode", ["float_zeros", "offsets"])
@pytest.mark.parametrize(
    ("scales", "shift"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")]
)
def test_parameters_of_two_types(rng, scales, shift, mode, m):
    options = {"group_size": 64, "mode": mode, "scale_dtype": scales, "shift_dtype": shift}
    weight = random_weight(rng, 512, 264, **options)
    x = random_x(rng, (m, 512), "bfloat16")
    assert_product(jw.matmul(x, weight.qt, implementation="cuda"), x, weight, rounded_weights=True)


@pytest.mark.parametrize("m", [2, 24])
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("power", [-40, 62, 63, 64, 100])
def test_range_of_activations(rng, power, x_dtype, m):
    """Every power of two of the activations, beside a token of ordinary size."""
    weight = random_weight(rng, 384, 130, group_size=128)
    unit = np.asarray(random_x(rng, (m, 384), x_dtype))
    x = unit.copy()
    x[0] = (x[0].astype(np.float64) * 2.0**power).astype(x.dtype)
    y = np.asarray(jw.matmul(x, weight.qt, implementation="cuda")).copy()
    y[0] = (y[0].astype(np.float64) * 2.0**-power).astype(y.dtype)  # exact: a power of two
    assert_product(y, jnp.asarray(unit), weight)


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize(
    ("few", "many", "shape"),
    [
        *[(few, many, (1024, 704)) for few, many in [(1, 8), (3, 8), (9, 16), (17, 24), (57, 64)]],
        *[(few, many, (2048, 8512)) for few, many in [(17, 32), (33, 64)]],
    ],
)
def test_tokens_are_independent(rng, few, many, shape, x_dtype):
    """Within a kernel's range, of a small layer that of as many tiles of tokens, a token has the same bits whatever
    else is in the call. The range of four float32 tokens ends where they no longer fit eight columns."""
    many = 4 if x_dtype == "float32" and few < 4 else many
    weight = random_weight(rng, *shape, group_size=128)
    x = random_x(rng, (many, shape[0]), x_dtype)
    y = np.asarray(jw.matmul(x, weight.qt, implementation="cuda"))
    np.testing.assert_array_equal(np.asarray(jw.matmul(x[:few], weight.qt, implementation="cuda")), y[:few])


@pytest.mark.parametrize("m", [4, 20, 150])
@pytest.mark.parametrize("mode", ["symmetric", "offsets"])
def test_threads(rng, mode, m):
    check_threads(rng, m, [random_weight(rng, 512, 320, group_size=64, mode=mode).qt for _ in range(4)])


@pytest.mark.parametrize("m", [1, 8, 20, 150])
def test_threads_of_several_shapes(rng, m):
    """One kernel with other shared memory in each thread: what a launch needs is not taken back by the next."""
    shapes = [(1024, 16384), (8192, 4096), (4096, 8192), (3072, 12288)]
    quantize = jax.jit(lambda key, shape: jw.quantize(jax.random.normal(key, shape), group_size=128), static_argnums=1)
    check_threads(rng, m, [quantize(jax.random.key(i), shape) for i, shape in enumerate(shapes)])


def check_threads(rng, m, weights):
    xs = [random_x(rng, (m, qt.k), "bfloat16") for qt in weights]
    product = jax.jit(lambda x, qt: jw.matmul(x, qt, implementation="cuda"))
    expected = [np.asarray(product(x, qt)) for x, qt in zip(xs, weights, strict=True)]
    wrong = []

    def work(i):
        for repeat in range(25):
            j = (i + repeat) % len(weights)
            try:
                if not np.array_equal(np.asarray(product(xs[j], weights[j])), expected[j]):
                    wrong.append((i, repeat))
            except jax.errors.JaxRuntimeError as error:
                wrong.append((i, repeat, str(error)))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("m", [1, 16, 100])
def test_replays_have_the_same_bits(rng, m):
    """A chain of products that XLA captures into a CUDA graph after its first run."""
    weight = random_weight(rng, 1024, 1024, group_size=128)

    @jax.jit
    def chain(x):
        for _ in range(6):
            y = jw.matmul(x, weight.qt, implementation="cuda")
            x = (y / (1 + jnp.abs(y))).astype(x.dtype)
        return x

    x = random_x(rng, (m, 1024), "bfloat16")
    first = np.asarray(chain(x))
    assert np.abs(first.astype(np.float32)).max() > 0.1
    for _ in range(200):
        last = chain(x)
    np.testing.assert_array_equal(np.asarray(last), first)


@pytest.mark.parametrize(
    ("bits", "mode", "x_dtype", "m", "k", "n", "group_size"),
    [
        (4, "symmetric", "bfloat16", 1, 8192, 6200, 128),
        (4, "symmetric", "float32", 2, 4097, 12600, None),
        (4, "float_zeros", "float16", 2, 12288, 4200, 256),
        (8, "integer_zeros", "bfloat16", 2, 12288, 2100, 128),
        (8, "offsets", "float32", 1, 30000, 900, None),
        (4, "symmetric", "bfloat16", 1, 8192, 6200, 64),
        (4, "symmetric", "float32", 2, 4096, 6200, 64),
        (4, "offsets", "float16", 1, 14336, 2100, 32),
        (8, "float_zeros", "bfloat16", 2, 4224, 3090, 64),
        (8, "symmetric", "float32", 1, 4096, 3200, 32),
        (4, "integer_zeros", "float16", 2, 8192, 2100, 32),
    ],
)
def test_large_weights_few_tokens(rng, bits, mode, x_dtype, m, k, n, group_size):
    """Sizes from which products of one or two tokens take another kernel; activations with outliers in some groups."""
    weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=x_dtype)
    x = np.asarray(random_x(rng, (m, k), x_dtype)).copy()
    x[:, 100:200] *= np.asarray(2.0**-12, x.dtype)
    x[:, 150] = 40
    assert_product(jw.matmul(jnp.asarray(x), weight.qt, implementation="cuda"), jnp.asarray(x), weight)
    x[0, 77] = np.inf
    y = np.asarray(jw.matmul(jnp.asarray(x), weight.qt, implementation="cuda")).astype(np.float64)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(y[0], np.inf * weight.dense[77])
    assert np.isfinite(y[1:]).all()


@pytest.mark.parametrize(
    ("m", "n"),
    [
        *((m, 8192) for m in (280, 310, 330, 350, 365, 380, 395, 410, 430, 440, 460, 470, 490, 500, 513)),
        *((m, 4096) for m in (387, 410, 420, 445, 460, 478)),
    ],
)
@pytest.mark.parametrize(
    ("bits", "mode", "x_dtype", "scale_dtype"),
    [
        (4, "symmetric", "bfloat16", "bfloat16"),
        (4, "symmetric", "bfloat16", "float32"),
        (8, "float_zeros", "float16", "float16"),
    ],
)
def test_heights_of_tiles(rng, m, n, bits, mode, x_dtype, scale_dtype):
    """Two tiles of each number of tokens that `matmul_tiled` has, or three, and some of those that `matmul_warpgroup`
    has; the last not whole."""
    weight = random_weight(rng, 1024, n, bits=bits, group_size=128, mode=mode, scale_dtype=scale_dtype)
    x = random_x(rng, (m, 1024), x_dtype)
    first = jw.matmul(x, weight.qt, implementation="cuda")
    assert_product(first, x, weight, rounded_weights=True)
    np.testing.assert_array_equal(np.asarray(jw.matmul(x, weight.qt, implementation="cuda")), np.asarray(first))


@pytest.mark.parametrize(("k", "group_size"), [(1056, 32), (1088, 32), (1088, 64), (1024, 64), (64, 32), (128, 64)])
@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("mode", ["symmetric", "integer_zeros", "float_zeros", "offsets"])
def test_factors_by_turns(rng, k, group_size, scale_dtype, bits, mode):
    """Tiles of hundreds of tokens whose every stage has groups of its own: even and odd numbers of stages, so that each
    of the two warps that make factors begins tiles, one stage, and half of one at the end; outputs that are no whole
    tile, several waves, and inputs that several clusters share."""
    for m, n in [(700, 8232), (230, 4097)]:
        weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=scale_dtype)
        x = random_x(rng, (m, k), "bfloat16")
        y = jw.matmul(x, weight.qt, implementation="cuda")
        assert_product(y, x, weight, rounded_weights=True)
        np.testing.assert_array_equal(np.asarray(jw.matmul(x, weight.qt, implementation="cuda")), np.asarray(y))


MODES = {"symmetric": ShiftMode.NONE, "offsets": ShiftMode.OFFSETS, "table": ShiftMode.TABLE}  # others are zeros


def expected_configuration(m, k, n, bits, mode, x_dtype, groups) -> tuple:
    """The kernel and its configuration; skips the test on a GPU without the 132 multiprocessors that cases are for."""
    if _cuda_dispatch._gpu() != ("9.0", 132):
        pytest.skip("the dispatcher chooses this on an H100 with 132 multiprocessors")
    shift = {"symmetric": None, "integer_zeros": jnp.uint8, "table": jnp.float32}.get(mode, DTYPES[x_dtype])
    row_mode = MODES.get(mode, ShiftMode.ZEROS)
    product = Product(m, k, n, 1, bits, DTYPES[x_dtype], DTYPES[x_dtype], row_mode, shift, groups)
    name = _cuda_dispatch.kernel(product)
    times = {"matmul_tiled": _cuda_dispatch._tiled_times, "matmul_warpgroup": _cuda_dispatch._warpgroup_times}[name]
    return name, *min(times(product), key=lambda pair: pair[1])[0]


@pytest.mark.parametrize(
    ("m", "k", "n", "bits", "mode", "x_dtype", "cluster"),
    [
        (64, 8192, 4096, 4, "symmetric", "bfloat16", 2),
        (71, 8192, 4064, 4, "integer_zeros", "float16", 2),
        (80, 8192, 2048, 4, "symmetric", "float16", 3),
        (110, 8192, 4072, 8, "symmetric", "bfloat16", 2),
        (115, 8320, 4096, 4, "offsets", "bfloat16", 2),
        (128, 14336, 4080, 4, "symmetric", "bfloat16", 2),
        (190, 8192, 2048, 4, "symmetric", "bfloat16", 2),
    ],
)
def test_teams(rng, m, k, n, bits, mode, x_dtype, cluster):
    """Two clusters share a tile's inputs, and add their sums up in scratch: as whole lines, or one by one."""
    found = expected_configuration(m, k, n, bits, mode, x_dtype, k // 128)
    assert (found[0], *found[3:]) == ("matmul_warpgroup", cluster, 2)
    weight = random_weight(rng, k, n, bits=bits, group_size=128, mode=mode, scale_dtype=x_dtype)
    x = random_x(rng, (m, k), x_dtype)
    lines = jax.jit(lambda x: jw.matmul(x, weight.qt, implementation="cuda"))
    single = jax.jit(
        lambda x: jw.matmul(x, weight.qt, activation="relu", preferred_element_type=jnp.float32, implementation="cuda")
    )
    first = lines(x), single(x)
    assert_product(first[0], x, weight, rounded_weights=True)
    assert_product(first[1], x, weight, activation="relu", out_dtype="float32", rounded_weights=True)
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(lines(x)), np.asarray(first[0]))
        np.testing.assert_array_equal(np.asarray(single(x)), np.asarray(first[1]))


@pytest.mark.parametrize(
    ("m", "k", "n", "bits", "group_size", "mode", "x_dtype"),
    [
        (12, 8192, 10240, 4, 128, "offsets", "bfloat16"),
        (9, 9728, 10232, 4, 32, "symmetric", "float16"),
        (33, 8192, 10240, 4, 128, "symmetric", "bfloat16"),
        (40, 8192, 10232, 4, 128, "integer_zeros", "float16"),
        (48, 5120, 10007, 4, 128, "symmetric", "bfloat16"),
        (61, 4096, 11008, 4, 32, "symmetric", "bfloat16"),
        (70, 6144, 11000, 4, 128, "offsets", "bfloat16"),
        (90, 4096, 11008, 4, 128, "float_zeros", "float16"),
        (100, 8192, 10240, 8, 128, "symmetric", "bfloat16"),
        (130, 13824, 5120, 4, 128, "symmetric", "bfloat16"),
        (180, 8064, 6336, 4, 64, "symmetric", "bfloat16"),
        (190, 7168, 6600, 4, 128, "integer_zeros", "float16"),
        (28, 3072, 20008, 4, 128, "integer_zeros", "bfloat16"),
        (20, 2048, 20232, 4, 128, "float_zeros", "float32"),
        (40, 8192, 10240, 4, 64, "table", "bfloat16"),
        (60, 8192, 10240, 4, 128, "symmetric", "float32"),
        (33, 8192, 10232, 4, 128, "offsets", "float32"),
        (30, 8192, 10240, 4, 64, "table", "float32"),
        (62, 8256, 10112, 4, None, "symmetric", "float32"),
    ],
)
def test_even_shares(rng, m, k, n, bits, group_size, mode, x_dtype):
    """CTAs share all tiles' inputs out evenly, and most have the end of a tile and the beginning of another: results
    are whole lines, or with a function and in float32, which all warps finish."""
    found = expected_configuration(m, k, n, bits, mode, x_dtype, k // (group_size or k))
    assert (found[0], found[3]) == ("matmul_warpgroup", _cuda_costs.EVENLY)
    scale_dtype = "float32" if mode == "table" else x_dtype
    weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=scale_dtype)
    x, bias = random_x(rng, (m, k), x_dtype), random_x(rng, (n,))
    lines = jax.jit(lambda x: jw.matmul(x, weight.qt, bias=bias, implementation="cuda"))
    single = jax.jit(
        lambda x: jw.matmul(x, weight.qt, activation="relu", preferred_element_type=jnp.float32, implementation="cuda")
    )
    first = lines(x), single(x)
    assert_product(first[0], x, weight, bias=bias, rounded_weights=True)
    assert_product(first[1], x, weight, activation="relu", out_dtype="float32", rounded_weights=True)
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(lines(x)), np.asarray(first[0]))
        np.testing.assert_array_equal(np.asarray(single(x)), np.asarray(first[1]))


@pytest.mark.parametrize(
    ("m", "k", "n", "bits", "mode", "tokens"),
    [
        (90, 384, 12792, 4, "symmetric", 96),
        (111, 1024, 12800, 4, "offsets", 112),
        (125, 1664, 12800, 4, "symmetric", 128),
        (122, 512, 12728, 8, "offsets", 128),
        (224, 640, 6392, 4, "symmetric", 112),
        (245, 512, 6400, 4, "offsets", 128),
        (370, 384, 5632, 4, "symmetric", 128),
        (380, 384, 3584, 4, "symmetric", 96),
        (100, 384, 12800, 4, "symmetric", 104),
        (101, 1152, 12784, 4, "integer_zeros", 104),
        (103, 512, 12792, 8, "symmetric", 104),
        (233, 1024, 6400, 4, "symmetric", 120),
        (131, 1664, 12800, 4, "integer_zeros", 136),
        (265, 512, 6384, 8, "symmetric", 136),
        (143, 1024, 12800, 4, "symmetric", 144),
        (290, 640, 6392, 4, "offsets", 152),
        (147, 896, 12800, 8, "integer_zeros", 152),
        (158, 512, 12728, 4, "symmetric", 160),
        (341, 1024, 6400, 4, "integer_zeros", 176),
        (126, 128, 12800, 4, "symmetric", 128),
        (150, 256, 12728, 8, "offsets", 152),
    ],
)
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
def test_pairs(rng, m, k, n, bits, mode, tokens, x_dtype):
    """CTAs of neighbouring outputs copy the tokens for each other: one tile of tokens or more, the last not whole, with
    stages that the ring has room for or more; whole lines and numbers one by one."""
    found = expected_configuration(m, k, n, bits, mode, x_dtype, k // 128)
    assert found == ("matmul_warpgroup", tokens, 2, 1, 1)
    weight = random_weight(rng, k, n, bits=bits, group_size=128, mode=mode, scale_dtype=x_dtype)
    x = random_x(rng, (m, k), x_dtype)
    lines = jw.matmul(x, weight.qt, implementation="cuda")
    assert_product(lines, x, weight, rounded_weights=True)
    single = jw.matmul(x, weight.qt, activation="relu", implementation="cuda")
    assert_product(single, x, weight, activation="relu", rounded_weights=True)
    np.testing.assert_array_equal(np.asarray(jw.matmul(x, weight.qt, implementation="cuda")), np.asarray(lines))


@pytest.mark.parametrize(
    ("m", "k", "n", "bits", "mode", "group_size", "tokens"),
    [
        (61, 512, 24560, 4, "integer_zeros", 128, 64),
        (57, 1664, 18944, 4, "integer_zeros", 128, 64),
        (64, 384, 25008, 4, "integer_zeros", 384, 64),
        (69, 512, 24568, 4, "symmetric", 128, 72),
        (93, 640, 24568, 4, "symmetric", 128, 96),
        (85, 512, 22016, 4, "offsets", 128, 96),
        (96, 1024, 18928, 4, "integer_zeros", 128, 96),
        (90, 1152, 24568, 8, "symmetric", 128, 96),
        (125, 512, 24568, 4, "symmetric", 128, 128),
        (126, 1152, 22016, 4, "integer_zeros", 64, 128),
        (128, 640, 24400, 8, "offsets", 32, 128),
        (123, 1024, 24560, 8, "integer_zeros", 128, 128),
        (150, 640, 24568, 4, "symmetric", 128, 152),
        (151, 1024, 22016, 4, "offsets", 128, 152),
        (173, 512, 24568, 4, "symmetric", 128, 176),
        (350, 1024, 12648, 8, "symmetric", 32, 176),
        (525, 640, 8200, 4, "offsets", 64, 176),
        (183, 640, 24568, 4, "offsets", 128, 184),
        (1100, 384, 4096, 8, "symmetric", 128, 184),
        (547, 1024, 8192, 4, "symmetric", 32, 184),
        (190, 384, 24560, 4, "integer_zeros", 32, 192),
        (570, 1152, 8176, 8, "integer_zeros", 64, 192),
        (1147, 640, 4096, 4, "symmetric", 128, 192),
        (68, 1024, 24568, 4, "offsets", 128, 72),
        (66, 640, 24568, 4, "symmetric", 32, 72),
        (71, 512, 22016, 4, "integer_zeros", 64, 72),
        (93, 256, 24568, 4, "symmetric", 64, 96),
        (90, 384, 22016, 4, "integer_zeros", 32, 96),
        (571, 640, 4104, 8, "offsets", 128, 96),
        (95, 1152, 24560, 8, "integer_zeros", 64, 96),
        (720, 128, 4096, 4, "symmetric", 128, 120),
        (715, 256, 4112, 4, "integer_zeros", 32, 120),
        (715, 1024, 4096, 8, "symmetric", 128, 120),
        (117, 640, 24568, 8, "symmetric", 64, 128),
        (119, 384, 18928, 8, "integer_zeros", 128, 128),
        (907, 256, 4096, 4, "integer_zeros", 128, 152),
        (909, 384, 4104, 4, "offsets", 32, 152),
        (150, 128, 24568, 8, "symmetric", 128, 152),
        (303, 640, 12288, 8, "integer_zeros", 64, 152),
        (1200, 128, 4096, 4, "symmetric", 128, 200),
        (1195, 384, 4112, 4, "integer_zeros", 128, 200),
        (197, 640, 24568, 4, "offsets", 64, 200),
        (595, 1152, 8208, 4, "integer_zeros", 32, 200),
        (1281, 384, 4096, 4, "symmetric", 128, 216),
        (1291, 256, 4112, 4, "integer_zeros", 32, 216),
        (213, 640, 24568, 4, "offsets", 128, 216),
        (645, 1152, 8176, 4, "symmetric", 64, 216),
    ],
)
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
def test_tiles_of_192_outputs(rng, m, k, n, bits, mode, group_size, tokens, x_dtype):
    """Three warpgroups of outputs, whose tiles fill all multiprocessors once or twice: the last outputs and tokens
    of no whole tile, whole lines and numbers one by one, float32 too."""
    found = expected_configuration(m, k, n, bits, mode, x_dtype, k // group_size)
    assert found == ("matmul_warpgroup", tokens, 3, 1, 1)
    weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=x_dtype)
    x = random_x(rng, (m, k), x_dtype)
    for options in {}, {"activation": "relu", "preferred_element_type": jnp.float32}:
        y = jw.matmul(x, weight.qt, implementation="cuda", **options)
        dtype = "float32" if options else None
        assert_product(y, x, weight, activation=options.get("activation"), out_dtype=dtype, rounded_weights=tokens > 64)
        again = jw.matmul(x, weight.qt, implementation="cuda", **options)
        np.testing.assert_array_equal(np.asarray(again), np.asarray(y))


@pytest.mark.parametrize("m", [70, 100, 110, 118, 130, 147, 170, 200])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.parametrize("mode", ["symmetric", "integer_zeros", "float_zeros", "offsets"])
def test_heights_of_every_scheme(rng, mode, group_size, bits, m):
    """Numbers of tokens that `matmul_warpgroup` has a height for with some schemes alone."""
    weight = random_weight(rng, 1024, 2056, bits=bits, group_size=group_size, mode=mode, scale_dtype="bfloat16")
    x = random_x(rng, (m, 1024), "bfloat16")
    y = jw.matmul(x, weight.qt, implementation="cuda")
    assert_product(y, x, weight, rounded_weights=True)
    np.testing.assert_array_equal(np.asarray(jw.matmul(x, weight.qt, implementation="cuda")), np.asarray(y))


@pytest.mark.parametrize(
    ("bits", "mode", "x_dtype", "batch", "m", "k", "n", "group_size"),
    [
        (4, "symmetric", "bfloat16", 4, 1, 2048, 3100, 128),
        (4, "integer_zeros", "float32", 3, 2, 8320, 1020, 128),
        (8, "offsets", "float16", 11, 2, 600, 1950, None),
        (4, "integer_zeros", "bfloat16", 4, 1, 2048, 3100, 32),
        (4, "symmetric", "float16", 3, 2, 4096, 2100, 64),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_batches_of_large_weights(rng, bits, mode, x_dtype, batch, m, k, n, group_size, shared):
    """As large together; an infinity stays in its entry of the batch."""
    weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=x_dtype, lead=(batch,))
    product = jax.vmap(lambda x, qt: jw.matmul(x, qt, implementation="cuda"), in_axes=(None if shared else 0, 0))
    x = random_x(rng, (m, k) if shared else (batch, m, k), x_dtype)
    clean = np.asarray(product(x, weight.qt))
    assert_product(clean, x, weight)
    if not shared:
        y = np.array(product(x.at[1, m - 1, 3].set(np.inf), weight.qt))
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(y[1, m - 1].astype(np.float64), np.inf * weight.dense[1, 3])
        y[1, m - 1] = clean[1, m - 1]
        np.testing.assert_array_equal(y, clean)
