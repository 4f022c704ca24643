"""What ``explain`` says of a product is what the compiled program does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import random_weight, random_x

import jax_wonly as jw
from jax_wonly import _abi, _cuda_dispatch

STRUCT = jax.ShapeDtypeStruct


def shapes_of(k, n, lead=(), **options):
    return jax.eval_shape(lambda w: jw.quantize(w, **options), STRUCT((*lead, k, n), jnp.bfloat16))


def calls_of(function, *operands, platform) -> set[str]:
    text = jax.jit(function).trace(*operands).lower(lowering_platforms=(platform,)).as_text()
    return {target for target in _abi.TARGETS if f"@{target}(" in text}


@pytest.mark.skipif(not jw.status().cuda, reason="the program for GPUs has no kernels where they are not installed")
@pytest.mark.parametrize("mode", ["offsets", "float_zeros"])
def test_path_on_cuda_is_that_of_the_program(mode):
    qt = shapes_of(1024, 72, group_size=128, mode=mode)  # with some hundred tokens of float32 dequantizing is faster
    paths = set()
    for m in (1, 16, 64, 300, 4096):
        x = STRUCT((m, 1024), jnp.float32)
        found = jw.explain(x, qt, platform="cuda")
        forced = jw.explain(x, qt, platform="cuda", implementation="cuda")
        assert set(found.targets) == {_abi.MATMUL if found.path == "kernel" else _abi.DEQUANTIZE}
        assert forced.path == "kernel" and forced.targets == (_abi.MATMUL,)
        if jw._ffi.gpu_here():
            assert set(found.targets) == calls_of(jw.matmul, x, qt, platform="cuda")
        paths.add(found.path)
        if m > 16:
            assert (found.path == "kernel") == (found.kernel_us <= found.dequantize_us)
            assert f"{max(found.kernel_us / found.dequantize_us, found.dequantize_us / found.kernel_us):.2f}" in str(
                found
            )
    assert paths == {"kernel", "dequantize"}


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("experts", [False, True])
def test_path_on_cpus_is_that_of_the_program(experts, transpose):
    qt = shapes_of(256, 192, (3,) if experts else (), group_size=64)
    x = STRUCT((5, 192 if transpose else 256), jnp.float32)
    primal = STRUCT((5, 256), jnp.float32)
    ids = STRUCT((5,), jnp.int32)

    def product(x, qt, ids):
        return jw.gather_matmul(x, qt, ids) if experts else jw.matmul(x, qt)

    def gradient(dy, qt, ids):
        return jax.linear_transpose(lambda x: product(x, qt, ids), primal)(dy)[0]

    found = jw.explain(x, qt, transpose=transpose, experts=experts)
    assert set(found.targets) == calls_of(gradient if transpose else product, x, qt, ids, platform="cpu")
    assert found.path == "kernel" and found.platform == "cpu" and found.kernel
    assert found.operation.startswith("ragged" if experts else "matmul")


def test_activation_quantization(monkeypatch):
    """Groups and rows on both sides of what the kernel of codes takes."""
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", 132))
    monkeypatch.setattr(jw._explain._ffi, "ensure_registered", lambda: {"cpu": None, "cuda": None})

    def found(m, platform="cuda", codes="int8", **options):
        x, qt = STRUCT((m, 4096), jnp.bfloat16), shapes_of(4096, 4096, **options)
        return jw.explain(x, qt, platform=platform, activation_quantization=codes)

    for options in ({}, {"bits": 8}, {"group_size": None}, {"codes": "float8_e4m3fn"}):
        many = found(4096, **options)
        assert many.targets == (_abi.QUANTIZE_ACTIVATION, _abi.QUANTIZED_MATMUL), options
        assert many.path == "kernel" and many.kernel == "quantized_matmul" and "meet those" in many.reason
    # The product it would be instead is of the type of x, whatever that of the scales.
    shifted = found(4096, mode="float_zeros", scale_dtype="float32")
    for few in (found(4), found(4096, group_size=64), found(4096, group_size=32), shifted):
        assert few.targets[0] == _abi.QUANTIZE_ACTIVATION and few.targets[1] in (_abi.MATMUL, _abi.DEQUANTIZE)
        assert few.kernel != "quantized_matmul" and "dequantized again" in few.reason
    here = found(5, platform="cpu")
    assert here.targets == (_abi.MATMUL,) and "no kernel on cpu takes such codes" in here.reason
    assert "dequantized" not in found(5, platform="cpu", codes=None).reason
    x = STRUCT((5, 4096), jnp.bfloat16)
    with pytest.raises(ValueError, match="transpose=True"):
        jw.explain(x, shapes_of(4096, 4096), transpose=True, activation_quantization="int8")


def test_counts(rng):
    weight = random_weight(rng, 256, 130, group_size=64, mode="integer_zeros", scale_dtype="float16")
    x = random_x(rng, (2, 3, 256), "bfloat16")
    found = jw.explain(x, weight.qt)
    assert (found.batch, found.m, found.k, found.n) == (1, 6, 256, 130)
    assert found.weight_bytes == weight.qt.qvalue.nbytes
    assert found.scale_bytes == 4 * 130 * 2 + 4 * 130
    assert found.x_bytes == x.nbytes and found.result_bytes == 6 * 130 * 2
    assert found.bytes == found.weight_bytes + found.scale_bytes + found.x_bytes + found.result_bytes
    assert found.flops == 2 * 6 * 256 * 130 and found.dense_weight_bytes == 256 * 130 * 2
    assert found.intensity == pytest.approx(found.flops / found.bytes)
    slow = jw.explain(x, weight.qt, implementation="xla")
    assert slow.path == "xla" and not slow.targets and slow.bytes == found.bytes + 2 * found.dense_weight_bytes
    assert slow.to_dict()["bytes"] == slow.bytes and "xla" in repr(slow)

    stacked = random_weight(rng, 64, 70, group_size=32, lead=(4,)).qt
    found = jw.explain(random_x(rng, (5, 4, 3, 64)), stacked)
    assert (found.batch, found.m) == (4, 15) and found.weight_bytes == stacked.qvalue.nbytes
    assert found.flops == 2 * 4 * 15 * 64 * 70
    found = jw.explain(random_x(rng, (64,)), stacked, experts=True)
    assert (found.batch, found.m, found.flops) == (4, 1, 2 * 64 * 70)
    assert found.weight_bytes == stacked.qvalue.nbytes // 4  # one row has one expert
    order = jnp.asarray(rng.permutation(256), jnp.int32)
    permuted = jw.PermutedTensor(weight.qt, order)
    assert jw.explain(x, permuted).weight_bytes == jw.explain(x, weight.qt).weight_bytes


def test_kernels_on_cuda(monkeypatch):
    """One case on each side of every rule of ffi/cuda/matmul.cu."""
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", 132))
    monkeypatch.setattr(jw._explain._ffi, "ensure_registered", lambda: {"cpu": None, "cuda": None})

    def kernel(m, k=8192, n=8192, dtype=jnp.bfloat16, **options):
        qt = shapes_of(k, n, **options)
        return jw.explain(STRUCT((*qt.shape[:-2], m, k), dtype), qt, platform="cuda", implementation="cuda").kernel

    assert [kernel(m) for m in (1, 2, 3, 16, 17)] == ["matmul_resident"] * 4 + ["matmul_warpgroup"]
    for mode in ("offsets", "float_zeros"):
        assert [kernel(m, mode=mode) for m in (1, 2, 3, 8, 9)] == ["matmul_resident"] * 4 + ["matmul_warpgroup"]
        assert [kernel(m, n=15344, mode=mode) for m in (1, 2)] == ["matmul_resident"] * 2
        assert [kernel(m, n=15360, mode=mode) for m in (1, 2)] == ["matmul_decode", "matmul_resident"]
        assert [kernel(1, n=n, bits=8, mode=mode) for n in (15344, 15360)] == ["matmul_resident", "matmul_decode"]
        assert [kernel(1, 28672, n, mode=mode) for n in (2192, 2208)] == ["matmul_resident", "matmul_decode"]
    assert kernel(1, 28672, 16384) == "matmul_resident"
    assert {kernel(4, 8192, 8192, group_size=g) for g in (32, 64, 256)} == {"matmul_resident"}
    assert [kernel(9, k) for k in (12288, 14336)] == ["matmul_resident", "matmul_warpgroup"]
    for g in (32, 64, 128, None):
        assert {kernel(2, group_size=g, bits=bits) for bits in (4, 8)} == {"matmul_resident"}
    # Inputs that are no multiple of 64: not with eight bits and many inputs for their outputs.
    odd = {"bits": 8, "group_size": None}
    assert [kernel(1, 8200, n, **odd) for n in (1024, 1032)] == ["matmul_warpgroup", "matmul_decode"]
    # One token: many weights, but not very many inputs.
    assert [kernel(1, 8192, n) for n in (30656, 30720)] == ["matmul_resident", "matmul_decode"]
    assert {kernel(1, 8192, 30720, group_size=g) for g in (64, 256, None)} == {"matmul_decode"}
    assert [kernel(1, 8192, n, bits=8) for n in (15344, 15360)] == ["matmul_resident", "matmul_decode"]
    assert {kernel(1, 8192, 15360, bits=8, group_size=32), kernel(2, 8192, 15360, bits=8)} == {"matmul_resident"}
    assert kernel(1, 8192, 30720, group_size=32) == kernel(2, 8192, 30720) == "matmul_resident"
    assert [kernel(1, k, 9216) for k in (28032, 28160)] == ["matmul_decode", "matmul_resident"]
    assert kernel(1, 28160, 9216, jnp.float32) == "matmul_decode"
    assert [kernel(1, k, mode="offsets") for k in (43008, 43136)] == ["matmul_decode", "matmul_resident"]
    for bits in (4, 8):
        assert [kernel(2, bits=bits, lead=(batch,)) for batch in (15, 16)] == ["matmul_resident", "matmul_decode"]
    modes = "integer_zeros", "float_zeros", "offsets"
    for size in (32, 64, 128):
        assert {kernel(3, 4096, 4096, group_size=size, mode=mode) for mode in modes} == {"matmul_resident"}
    for mode in modes[1:]:
        assert {kernel(1, group_size=g, mode=mode) for g in (32, 64, 256, None)} == {"matmul_resident"}
    # Few weights, inputs or outputs.
    assert [kernel(1, 1020, n, **odd) for n in (1024, 1032)] == ["matmul_stream", "matmul_decode"]
    assert [kernel(1, k, 8192, **odd) for k in (508, 516)] == ["matmul_stream", "matmul_decode"]
    assert [kernel(1, 4100, n, **odd) for n in (912, 936)] == ["matmul_stream", "matmul_decode"]
    assert {kernel(1, 4096, 4096, lead=(batch,)) for batch in (16, 17, 132)} == {"matmul_decode"}
    assert [kernel(1, 4096, 4096, lead=(batch,)) for batch in (14, 50, 133)] == [
        *["matmul_resident"] * 2,
        "matmul_warpgroup",
    ]
    assert {kernel(4, 4096, n, bits=8) for n in (132 * 64, 132 * 64 + 1)} == {"matmul_resident"}
    scheme = {"bits": 8, "mode": "offsets", "group_size": 128}
    assert {kernel(4, 4096, n, **scheme) for n in (4096, 4097)} == {"matmul_resident"}
    scheme["dtype"] = jnp.float16  # another type than that of scales and offsets
    assert [kernel(4, 4096, n, **scheme) for n in (4096, 4097)] == ["matmul_resident", "matmul_stream"]
    assert [kernel(4, 4096, n, **scheme) for n in (132 * 64 - 1, 132 * 64 + 1)] == ["matmul_stream", "matmul_warpgroup"]
    assert kernel(16, n=8196) == "matmul_resident"
    assert [kernel(12, k, n, dtype=jnp.float32) for k, n in ((3072, 768), (6144, 3072), (16384, 64))] == [
        "matmul_resident",
        "matmul_warpgroup",
        "matmul_stream",
    ]
    # Rows that are copied first, of scales or activations; not for few tokens of few weights.
    found = [kernel(4, 1056, n, bits=8, group_size=32) for n in (991, 999)]
    assert found == ["matmul_stream", "matmul_warpgroup"]
    odd = {m: kernel(m, 2048, 32001, mode="offsets") for m in (1, 9, 16, 100, 200)}
    assert list(odd.values()) == ["matmul_resident", *["matmul_warpgroup"] * 3, "matmul_tiled"]
    odd = [kernel(m, 777, 10003, group_size=None) for m in (2, 9, 17, 200)]
    assert odd == ["matmul_decode", "matmul_resident", "matmul_warpgroup", "matmul_tiled"]
    odd = [kernel(m, 768, 50257, dtype=jnp.float32) for m in (1, 8, 17)]
    assert odd == ["matmul_decode", *["matmul_warpgroup"] * 2]
    assert kernel(40, dtype=jnp.float32) == "matmul_warpgroup"
    assert [kernel(m, dtype=jnp.float32) for m in (1, 8, 9)] == ["matmul_resident"] * 2 + ["matmul_warpgroup"]
    assert [kernel(m, 4096, 14336) for m in (176, 177)] == ["matmul_warpgroup", "matmul_tiled"]
    assert kernel(64, n=8196) == "matmul_warpgroup"
    assert {kernel(40, mode=mode) for mode in modes} == {"matmul_warpgroup"}
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("8.0", 108))
    assert [kernel(m) for m in (1, 16, 17, 4096)] == ["matmul_stream"] * 2 + ["matmul_mma"] * 2
    assert {kernel(40, 8192, mode="nf4"), kernel(40, dtype=jnp.float32)} == {"matmul_stream"}
    assert kernel(40, k=8196, group_size=None) == "matmul_mma"
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("7.5", 40))
    assert kernel(40, dtype=jnp.float16) == "matmul_stream"


def test_rounded_activations(monkeypatch):
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", 132))
    monkeypatch.setattr(jw._explain._ffi, "ensure_registered", lambda: {"cpu": None, "cuda": None})

    def found(m, precision="default", platform="cuda", k=8192, dtype=jnp.float32, lead=(), **options):
        return jw.explain(
            STRUCT((m, k), dtype), shapes_of(k, 8192, lead), platform=platform, precision=precision, **options
        )

    many = found(4096)
    assert many.rounds_x and many.rounds_weights and many.kernel == "matmul_tiled" and many.dtype == "float32"
    assert "matmul_tiled, x and weights rounded to bfloat16" in repr(many) and many.to_dict()["rounds_x"]
    few = found(16)
    assert few.rounds_x and not few.rounds_weights and "resident, x rounded to bfloat16" in repr(few)
    for other in (
        found(1),
        found(4096, None),
        found(4096, "high"),
        found(4096, platform="cpu"),
        found(64, dtype="bfloat16"),
    ):
        assert not other.rounds_x and "x rounded" not in repr(other)
    assert not found(4096, implementation="xla").rounds_x and not found(4096, implementation="dequantize").rounds_x
    assert found(4096, transpose=True).rounds_x and not found(4096, None, transpose=True).rounds_x
    experts = {"lead": (8,), "experts": "sizes"}
    assert [found(m, **experts).rounds_x for m in (8, 4096)] == [False, True]
    assert found(8, **experts, transpose=True).rounds_x
    assert [found(m, **experts).kernel for m in (8, 4096)] == ["ragged_resident", "ragged_tiled"]
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("7.5", 40))
    assert not found(4096).rounds_x and found(4096).path == "dequantize"


def test_experts_on_cuda(monkeypatch):
    """One case on each side of every rule of ffi/cuda/ragged_matmul.cu, and of the gradient's."""
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", 132))
    monkeypatch.setattr(jw._explain._ffi, "ensure_registered", lambda: {"cpu": None, "cuda": None})

    def found(m, experts="sizes", e=8, k=4096, n=14336, dtype=jnp.bfloat16, transpose=False, **options):
        qt = shapes_of(k, n, (e,), **options)
        x = STRUCT((m, n if transpose else k), dtype)
        return jw.explain(x, qt, platform="cuda", experts=experts, transpose=transpose)

    def kernels(*rows, experts=("ids", "sizes"), **options) -> list[str | None]:
        """The same with ids and with sizes, unless one of them is asked for."""
        every = [[found(m, mode, **options).kernel for m in rows] for mode in experts]
        assert every[0] == every[-1]
        return every[0]

    few, flat, decode = "ragged_resident", "ragged_warpgroup", "matmul_decode"
    tall, stream, ids, sizes = "ragged_tiled", "matmul_stream", ("ids",), ("sizes",)
    # Few rows: of few experts, of many, of such as take others long, and of those with many inputs.
    assert kernels(1, 32, 33) == kernels(8, 128, 129, e=128) == [few, few, flat]
    assert kernels(3, 12, 13, e=3, mode="offsets") == [few, few, flat]
    assert kernels(128, 129, e=128, scale_dtype=jnp.float32) == [few, flat]
    for options in ({}, {"mode": "nf4"}):
        assert kernels(32, 33, dtype=jnp.float32, **options) == [few, flat]
    assert kernels(256, 257, e=128, dtype=jnp.float32) == [few, flat]
    for options in ({"k": 2048, "n": 2048}, {"group_size": 64}, {"group_size": 32, "mode": "offsets"}):
        assert kernels(256, 257, e=128, **options) == [few, flat]
    assert kernels(128, 129, e=128, k=2048, n=2056) == [few, flat]
    assert kernels(512, 513, e=128, mode="nf4", dtype=jnp.float32) == [few, flat]
    assert kernels(512, 513, e=128, mode="nf4") == [few, stream]
    assert kernels(128, e=128, n=28672) == kernels(8, k=99840, n=64) == [few]
    assert kernels(1, 32, 39, mode="nf4") == [few, few, stream]
    assert kernels(8, k=131072, n=64) == kernels(8, k=1000, group_size=None) == [flat]
    assert kernels(8, k=1024, n=1001) == kernels(8, k=1001, group_size=None) == [stream]
    # Eight bits.
    for options in ({}, {"group_size": 32}, {"mode": "offsets"}):
        assert kernels(1, 4, 5, 32, bits=8, **options) == [decode, decode, few, few]
    assert kernels(32, 33, bits=8) == [few, flat]
    assert kernels(64, 65, 128, 129, e=128, bits=8) == [decode, few, few, flat]
    assert kernels(1, 128, 129, e=128, k=512, bits=8) == [few, few, flat]
    assert kernels(256, 257, e=128, k=2048, n=1024, bits=8) == [few, flat]
    assert kernels(1, 256, 257, e=128, bits=8, dtype=jnp.float32) == [few, few, flat]
    # Few rows of an expert, many, and more.
    wide, part = {"scale_dtype": jnp.float32}, {"k": 1000, "group_size": None}  # of a tile
    assert kernels(63, 64, e=128, experts=sizes, **part) == kernels(63, 64, group_size=32, **wide) == [stream, flat]
    assert kernels(127, 128, e=128, experts=ids, **part) == [stream, flat]
    assert kernels(8 * 128, 8 * 128 + 1) == kernels(8 * 64, 8 * 64 + 1, **wide) == [flat, tall]
    offsets = {"mode": "offsets"}
    for options in ({"n": 272}, {"n": 272} | offsets, {"n": 272, "group_size": 64}):
        assert kernels(8 * 384, 8 * 384 + 1, **options) == [flat, tall]
    for options in ({"group_size": 64}, {"group_size": 32} | offsets):
        assert kernels(8 * 128, 8 * 128 + 1, **options) == [flat, tall]
    assert kernels(8 * 8 - 1, 8 * 8, n=1001) == [stream, tall]
    for k, least in ((4128, 5), (2080, 3), (736, 1)):
        rows = (8 * least - 1, 8 * least, 8 * 52, 8 * 52 + 1)
        assert kernels(*rows, k=k, mode="nf4", group_size=32) == [stream, flat, flat, tall]
    assert kernels(1, 4096, mode="nf4", **part) == [stream, tall]
    assert kernels(7, 8, 4096, mode="nf4", dtype=jnp.float32, **part) == [stream, flat, flat]
    assert kernels(8, 8 * 40, dtype=jnp.float16, n=1001) == [stream, tall]  # scales of another type
    assert kernels(7, 8, 8 * 400, dtype=jnp.float32, **part) == [stream, flat, flat]
    assert kernels(8, 8 * 40, dtype=jnp.float32, n=1001) == [stream, stream]
    for options in ({"mode": "offsets"}, {"mode": "float_zeros"}):
        assert kernels(31, 32, dtype=jnp.float32, **part, **options) == [stream, flat]
        assert kernels(15, 16, dtype=jnp.float32, k=1056, group_size=32, **options) == [stream, flat]
    # Rounded weights: groups of 32 and 64 in high tiles, numbers that are no integers, and hundreds of rows.
    assert [found(m).rounds_weights for m in (8, 1024, 1025)] == [False, False, True]
    assert [found(8 * m, group_size=64).rounds_weights for m in (40, 41)] == [False, True]
    assert [found(m, mode="offsets").rounds_weights for m in (32, 33)] == [False, True]
    assert found(8, dtype=jnp.float32).rounds_weights is False and found(8, transpose=True).rounds_weights is None
    # The gradient.
    back = {"transpose": True}
    assert kernels(128, 129, **back) == ["matmul_transposed_stream", "matmul_transposed_warpgroup"]
    float32 = back | {"dtype": jnp.float32}
    assert kernels(192, 193, **float32) == ["matmul_transposed_stream", "matmul_transposed_warpgroup"]
    assert kernels(256, 257, bits=8, **back) == ["matmul_transposed_stream", "matmul_transposed_warpgroup"]
    small = {"bits": 8, "group_size": 32, **back}  # which the kernel of more than 16 rows does not know
    assert kernels(128, 129, **small) == ["matmul_transposed_stream", "matmul_transposed_warpgroup"]
    assert kernels(129, n=1001, **back) == kernels(129, mode="offsets", **float32) == ["matmul_transposed_stream"]
    assert kernels(128, 129, mode="nf4", **back) == ["matmul_transposed_stream", "matmul_transposed_warpgroup"]
    assert kernels(129, 8 * 65, mode="nf4", n=1001, **back) == ["matmul_transposed_stream", None]
    for options in (float32, back | {"dtype": jnp.float16}):  # scales of another type
        assert kernels(1, 129, mode="nf4", **options) == ["matmul_transposed_warpgroup"] * 2
        assert kernels(129, mode="nf4", n=1001, **options) == [None]
    said = found(8)
    assert said.kernel_us is None and "model" not in str(said) and f"({few})" in str(said)
    assert found(8, True) == found(8, "ids") and found(0).kernel == few
    # Other GPUs: the first of these have kernels of float16 alone.
    for capability, there in ("7.5", jnp.float16), ("8.0", jnp.bfloat16):
        monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda capability=capability: (capability, 40))
        assert kernels(1, 32, 4096, dtype=there) == [stream] * 3 and not found(4096, dtype=there).rounds_weights
        for options in (back, back | {"mode": "nf4"}):
            streams = [None if capability == "7.5" else "matmul_transposed_stream"]
            assert kernels(8 * 64, dtype=there, **options) == streams
        many = found(8 * 65, dtype=there, **back)
        assert many.kernel is None and many.path == "dequantize" and "slower" in many.reason


def test_types_without_kernels(monkeypatch):
    """GPUs whose tensor cores take float16 alone dequantize for other activations."""
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("7.5", 40))
    monkeypatch.setattr(jw._explain._ffi, "ensure_registered", lambda: {"cpu": None, "cuda": None})
    for experts in (False, "ids", "sizes"):
        qt = shapes_of(256, 128, (3,) if experts else ())
        for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
            x, options = STRUCT((4, 256), dtype), {"platform": "cuda", "experts": experts}
            found = jw.explain(x, qt, **options)
            if dtype == jnp.float16:
                assert found.path == "kernel" and found.kernel == "matmul_stream"
                assert jw.explain(x, qt, implementation="cuda", **options).kernel == "matmul_stream"
                continue
            assert found.path == "dequantize" and found.kernel_us is None and "no fused kernel" in found.reason
            with pytest.raises(ValueError, match="no fused kernel for .* x on GPUs before sm_80"):
                jw.explain(x, qt, implementation="cuda", **options)


def test_elsewhere(monkeypatch):
    x, qt = STRUCT((4, 256), jnp.bfloat16), shapes_of(256, 128)
    assert jw.explain(x, qt, platform="tpu").path == "xla"
    monkeypatch.setattr(jw._explain._ffi, "ensure_registered", lambda: {"cpu": "it is gone", "cuda": None})
    found = jw.explain(x, qt)
    assert found.path == "xla" and found.reason == "it is gone" and "it is gone" in str(found)
    with pytest.raises(ValueError, match="implementation='cpu' is not available: it is gone"):
        jw.explain(x, qt, implementation="cpu")


def test_bad_input():
    x, qt = STRUCT((4, 256), jnp.bfloat16), shapes_of(256, 128)
    for error, match, call in [
        (TypeError, "x is a list", lambda: jw.explain([1.0], qt)),
        (TypeError, "x has dtype int32", lambda: jw.explain(STRUCT((4, 256), jnp.int32), qt)),
        (TypeError, "qt is a ShapeDtypeStruct", lambda: jw.explain(x, x)),
        (ValueError, r"x has shape \(4, 255\)", lambda: jw.explain(STRUCT((4, 255), jnp.float32), qt)),
        (ValueError, r"accepted: \[\.\.\., 128\]", lambda: jw.explain(x, qt, transpose=True)),
        (ValueError, "experts='rows'", lambda: jw.explain(x, qt, experts="rows")),
        (ValueError, "platform='gpu'", lambda: jw.explain(x, qt, platform="gpu")),
        (ValueError, "implementation='fast'", lambda: jw.explain(x, qt, implementation="fast")),
        (ValueError, r"accepted with experts=True: \[E, K, N\]", lambda: jw.explain(x, qt, experts=True)),
        (ValueError, "does not run on 'cpu'", lambda: jw.explain(x, qt, platform="cpu", implementation="cuda")),
    ]:
        with pytest.raises(error, match=match):
            call()


def test_nothing_is_computed(rng):
    """Operands may be traced, and shapes alone give the same answer as arrays."""
    weight, x = random_weight(rng, 64, 70, group_size=32).qt, np.ones((3, 64), np.float32)
    seen = []
    jax.jit(lambda x, qt: seen.append(jw.explain(x, qt)))(x, weight)
    assert seen[0] == jw.explain(x, weight) == jw.explain(jnp.asarray(x), jax.eval_shape(lambda: weight))


def test_few_rows_of_gradients_on_cuda(monkeypatch):
    """Scales that become those of ``dy`` first are such as the kernel for few rows knows."""
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", 132))
    monkeypatch.setattr(jw._explain._ffi, "ensure_registered", lambda: {"cpu": None, "cuda": None})

    def streams(m, **options):
        qt = shapes_of(8192, 8192, **options)
        return jw.explain(STRUCT((m, 8192), jnp.bfloat16), qt, transpose=True, platform="cuda").kernel.endswith(
            "stream"
        )

    for options in ({}, {"scale_dtype": jnp.float32}, {"scale_dtype": jnp.float16}):
        assert [streams(m, **options) for m in (16, 17, 32, 33)] == [True, True, True, False]
    assert [streams(m, mode="offsets") for m in (16, 17)] == [True, False]


def test_gradients_of_any_number_of_outputs_on_cuda(monkeypatch):
    """Cotangents and scales of whole eights of outputs, which kernels read at once; not of few rows of few weights."""
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", 132))
    monkeypatch.setattr(jw._explain._ffi, "ensure_registered", lambda: {"cpu": None, "cuda": None})

    def calls(m, n, function):
        qt = shapes_of(256, n, group_size=128, mode="offsets")
        operands = STRUCT((m, 256), jnp.bfloat16), qt, STRUCT((m, n), jnp.bfloat16)
        text = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        return [line for line in text.splitlines() if "custom_call" in line and "wonly" in line]

    def of_activations(x, qt, dy):
        return jax.linear_transpose(lambda x: jw.matmul(x, qt), x)(dy)[0]

    def of_scales(x, qt, dy):
        return jax.vjp(lambda s: jw.matmul(x, dataclasses.replace(qt, scales=s)), qt.scales)[1](dy)[0]

    for m, n, whole in ((64, 1001, 1008), (3, 1001, 1001), (3, 50257, 50264), (64, 1008, 1008)):
        (call,) = calls(m, n, of_activations)
        assert _abi.MATMUL_TRANSPOSED in call
        assert f"tensor<1x{m}x{whole}xbf16>" in call and call.count(f"tensor<1x2x{whole}xbf16>") == 2
        x, qt = STRUCT((m, n), jnp.bfloat16), shapes_of(256, n, group_size=128, mode="offsets")
        kernel = jw.explain(x, qt, transpose=True, platform="cuda").kernel
        assert kernel == ("matmul_transposed_warpgroup" if m == 64 else "matmul_transposed_stream")
    assert any(_abi.SCALES_GRADIENT in call and "x1008xbf16>" in call for call in calls(64, 1001, of_scales))
