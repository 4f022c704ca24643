"""The choice between the fused CUDA kernels and the dense product."""

import itertools
import math

import jax.numpy as jnp
import pytest
from conv_cases import BANDS, WARPGROUPS
from matmul_cases import ROWS, SHAPES

from jax_wonly import _abi, _cuda_dispatch, _cuda_experts
from jax_wonly._abi import ShiftMode
from jax_wonly._cuda_dispatch import Product
from jax_wonly.primitives.conv import Window


def choose(m, k=8192, n=8192, x=jnp.bfloat16, mode=ShiftMode.NONE, shift=None):
    return _cuda_dispatch.use_kernel(Product(m, k, n, 1, 4, x, jnp.bfloat16, mode, shift, groups=k // 128 or 1))


def scratch(m, k=8192, n=8192, batch=1, bits=4, x=jnp.bfloat16, scales=jnp.bfloat16, *shift, group_size=128):
    return _cuda_dispatch.scratch(Product(m, k, n, batch, bits, x, scales, *shift, groups=k // group_size), batch)


@pytest.fixture(autouse=True, params=[True, False], ids=["warpgroups", "no warpgroups"])
def warpgroups(request, monkeypatch):
    monkeypatch.setattr(_cuda_dispatch, "has_warpgroups", lambda: request.param)
    return request.param


@pytest.mark.parametrize("x", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", [(4096, 4096), (8192, 28672), (100, 70)])
def test_few_tokens_are_fused(x, shape):
    assert all(choose(m, *shape, x=x) for m in (1, 8, 16))


def test_one_and_two_tokens(monkeypatch, warpgroups):
    """`matmul_decode` takes groups below 128 inputs where its columns keep them apart."""
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", 132))

    def kernel(
        m,
        group_size,
        k=4096,
        n=14336,
        x=jnp.bfloat16,
        scales=jnp.bfloat16,
        mode=ShiftMode.NONE,
        shift=None,
        bits=4,
    ):
        groups = k // group_size if group_size else 1
        return _cuda_dispatch.kernel(Product(m, k, n, 1, bits, x, scales, mode, shift, groups=groups))

    decode = "matmul_decode" if warpgroups else "matmul_stream"
    resident = "matmul_resident" if warpgroups else "matmul_stream"
    for group_size in (None, 256, 128, 64, 32):
        assert kernel(1, group_size, 8192, 30720) == (resident if group_size == 32 else decode)
        assert kernel(1, group_size) == kernel(2, group_size, 8192, 30720) == resident
    assert kernel(3, 64) == resident
    for types in ({}, {"x": jnp.float32}, {"scales": jnp.float32}):
        for m, group_size in ((1, 32), (2, 64), (2, 32), (2, None)):
            assert {kernel(m, group_size, **types, bits=bits) for bits in (4, 8)} == {resident}
    # float32 activations: one token of many weights, and what is no integer.
    assert [kernel(m, 128, 8192, 30720, x=jnp.float32) for m in (1, 2)] == [decode, resident]
    assert kernel(1, 128, k=4096, n=4096, x=jnp.float32, scales=jnp.float16) == resident
    assert kernel(2, 128, x=jnp.float32, mode=ShiftMode.ZEROS, shift=jnp.uint8) == resident
    assert kernel(2, 128, x=jnp.float32, mode=ShiftMode.OFFSETS, shift=jnp.bfloat16) == decode
    # Half of a stage of 128 inputs at the end.
    assert kernel(1, 64, k=8256, n=8192) == resident and kernel(1, None, k=8256, n=32768) == decode
    # Many inputs for few outputs.
    assert {kernel(2, 128, 8192, n) for n in (1584, 1600)} == {resident}
    offsets = {"mode": ShiftMode.OFFSETS, "shift": jnp.bfloat16}
    for m in (1, 2):
        assert {kernel(m, 128, k, 2048, bits=8, **offsets) for k in (4096, 8192, 16384)} == {resident}
    for k, outputs in ((8192, (15344, 15360)), (28672, (2176, 2208))):
        assert [kernel(1, 128, k, n, **offsets) for n in outputs] == [resident, decode]
        assert {kernel(2, 128, k, n, **offsets) for n in outputs} == {resident}
    assert [kernel(1, 128, 8192, n, bits=8, **offsets) for n in (15344, 15376)] == [resident, decode]
    assert kernel(1, 128, 28672, 20480) == resident
    assert [kernel(m, g, 8192, 1024, scales=jnp.float32) for m, g in ((2, 128), (1, 32))] == [resident] * 2
    for mode, shift, expected in (
        *((ShiftMode.ZEROS, jnp.uint8, [resident] * 2), (ShiftMode.OFFSETS, jnp.bfloat16, [resident] * 2)),
        (ShiftMode.ZEROS, jnp.float32, [resident] * 2),
        (ShiftMode.TABLE, jnp.float32, [resident] * 2),
    ):
        assert [kernel(2, group_size, mode=mode, shift=shift) for group_size in (64, 128)] == expected


def test_high_tiles_of_few_tokens(monkeypatch):
    """From nine tokens on, of one weight with float zeros or offsets of the activations' type."""
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", 132))

    def tokens(m, batch=1, mode=ShiftMode.OFFSETS, shift=jnp.bfloat16):
        p = Product(m, 768, 768, batch, 4, jnp.bfloat16, jnp.bfloat16, mode, shift, groups=6)
        return min(_cuda_dispatch._warpgroup_times(p), key=lambda pair: pair[1])[0][0]

    assert tokens(9) == tokens(16) == tokens(17) == 64
    assert max(tokens(8), tokens(16, batch=2), tokens(16, mode=ShiftMode.NONE, shift=None)) < 64
    assert tokens(16, shift=jnp.float32) < 64


@pytest.mark.parametrize("x", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_three_to_sixteen_tokens(monkeypatch, warpgroups, x):
    """`matmul_resident` where it is expected to be faster than `matmul_warpgroup`, or that does not take the rows."""
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", 132))

    def kernel(m, k, n, group_size=128, bits=4, batch=1, mode=ShiftMode.NONE, shift=None, scales=x):
        groups = k // group_size if group_size else 1
        return _cuda_dispatch.kernel(Product(m, k, n, batch, bits, x, scales, mode, shift, groups=groups))

    if not warpgroups:
        assert {kernel(m, 5120, 5120) for m in (3, 5, 8)} == {"matmul_stream"}
        return
    if x == jnp.float32:
        for scales in (jnp.bfloat16, jnp.float16, jnp.float32):
            for group_size in (None, 256, 128, 64, 32):
                assert {kernel(m, 5120, 5120, group_size, scales=scales) for m in (3, 5, 8)} == {"matmul_resident"}
        for n in (999, 1000, 1002):  # pairs of 16-bit scales, and rows that are 16-byte aligned
            assert kernel(4, 1088, n, None) == kernel(4, 1088, n & ~1, scales=jnp.bfloat16) == "matmul_resident"
        assert kernel(4, 1088, 1001, scales=jnp.bfloat16) == "matmul_stream"
        assert kernel(4, 5120, 5120, mode=ShiftMode.ZEROS, shift=jnp.uint8) == "matmul_resident"
        assert kernel(4, 5120, 5120, mode=ShiftMode.ZEROS, shift=x) == "matmul_stream"
        # Another kernel from nine tokens on, and where one CTA's part of the activations is too much to keep.
        for m, k in ((9, 5120), (8, 28672)):
            assert kernel(m, k, 5120) in ("matmul_warpgroup", "matmul_stream")
        assert kernel(4, 5120, 5120, bits=8) == "matmul_resident"
        return
    for group_size in (None, 256, 128, 64, 32):
        assert {kernel(m, 5120, 5120, group_size) for m in (3, 5, 8)} == {"matmul_resident"}
        for mode, shift in ((ShiftMode.ZEROS, jnp.uint8), (ShiftMode.ZEROS, x), (ShiftMode.OFFSETS, x)):
            assert kernel(5, 4096, 4096, group_size, mode=mode, shift=shift) == "matmul_resident"
    assert kernel(4, 4096, 4096, batch=8) == "matmul_resident"
    assert kernel(4, 1088, 1001, None) == "matmul_resident"
    assert [kernel(m, 5120, 5120) for m in (16, 17)] == ["matmul_resident", "matmul_warpgroup"]
    assert kernel(9, 5120, 5120, mode=ShiftMode.ZEROS, shift=jnp.uint8) == "matmul_resident"
    assert kernel(9, 5120, 5120, mode=ShiftMode.OFFSETS, shift=x) == "matmul_warpgroup"
    for group_size in (None, 128, 32):
        assert {kernel(m, 4096, 4096, group_size, bits=8) for m in (3, 8, 16)} == {"matmul_resident"}
    for mode in (ShiftMode.ZEROS, ShiftMode.OFFSETS):
        found = [kernel(m, 4096, 2112, bits=8, mode=mode, shift=x) for m in (3, 8, 9)]
        assert found == ["matmul_resident"] * 2 + ["matmul_warpgroup"]
    assert kernel(4, 1080, 1000, None) == kernel(4, 1080, 1000, None, bits=8) == "matmul_warpgroup"  # half a tile
    # Several tiles of tokens of a small layer; no rows have none.
    assert {kernel(m, 768, 768) for m in (9, 16, 17, 33, 64)} == {"matmul_resident"}
    assert {kernel(m, 768, 768, bits=8, mode=ShiftMode.OFFSETS, shift=x) for m in (9, 17, 40)} == {"matmul_resident"}
    for m, k, batch in ((0, 768, 1), (128, 768, 1), (24, 4096, 1), (33, 768, 3)):
        assert kernel(m, k, k, batch=batch) == "matmul_warpgroup"
    # Few multiprocessors for each of many weights, and inputs of which no CTA holds its part of the activations, unless
    # these take turns.
    assert kernel(4, 256, 1024, batch=140) == kernel(9, 131072, 1024) == "matmul_warpgroup"
    for mode in ({}, {"mode": ShiftMode.OFFSETS, "shift": x}):
        assert {kernel(m, 131072, 1024, **mode) for m in (3, 8)} == {"matmul_resident"}
        assert kernel(4, 28672, 8192, **mode) == "matmul_resident"
    # Many rows of offsets, of which the last come late.
    assert kernel(4, 28672, 8192, 32, mode=ShiftMode.OFFSETS, shift=x) == "matmul_warpgroup"
    # Scales of any type, in pieces of four bytes, and up to eight tokens zeros and offsets.
    assert {kernel(m, 5120, 5120, g, scales=jnp.float32) for m in (3, 8, 16) for g in (None, 128)} == {
        "matmul_resident"
    }
    assert kernel(4, 5120, 5120, scales=jnp.float32, mode=ShiftMode.ZEROS, shift=jnp.uint8) == "matmul_resident"
    other = jnp.float16 if x == jnp.bfloat16 else jnp.bfloat16
    assert [kernel(4, 1088, n, None, scales=other) for n in (1001, 1002)] == ["matmul_stream", "matmul_resident"]
    for scales, shift in ((jnp.float32, x), (x, jnp.float32), (jnp.float32, jnp.float32), (other, other)):
        for mode in (ShiftMode.ZEROS, ShiftMode.OFFSETS):
            of_types = {"scales": scales, "mode": mode, "shift": shift}
            assert {kernel(m, 5120, 5120, g, **of_types) for m in (3, 8) for g in (None, 32)} == {"matmul_resident"}
            one = "matmul_decode" if scales == shift else "matmul_resident"  # decode takes one type of both
            assert kernel(1, 5120, 5120, **of_types) == one
            assert {kernel(m, 768, 768, g, **of_types) for m in (1, 2, 4) for g in (None, 32)} == {"matmul_resident"}
            assert [kernel(2, k, k, **of_types) for k in (4096, 5120)] == ["matmul_resident", one]
            assert {kernel(m, 5120, 5120, bits=8, **of_types) for m in (1, 2, 4)} == {"matmul_resident"}
    # A table, but where few weights or many inputs for their outputs make streaming faster.
    table = {"mode": ShiftMode.TABLE, "shift": jnp.float32}
    assert {kernel(m, 5120, 5120, g, **table) for m in (3, 8, 16) for g in (None, 128)} == {"matmul_resident"}
    assert [kernel(m, 14336, 4096, **table) for m in (8, 16)] == ["matmul_resident", "matmul_stream"]
    assert [kernel(1, k, 64, None, **table) for k in (4096, 1024)] == ["matmul_stream"] * 2


def test_many_tokens(warpgroups):
    # Where the weights are read again for every 16 tokens, the dense product wins early.
    for m in (512, 8192):
        assert choose(m) == warpgroups
        assert choose(m, mode=ShiftMode.OFFSETS, shift=jnp.bfloat16) == warpgroups
        assert choose(m, mode=ShiftMode.ZEROS, shift=jnp.uint8) == warpgroups
    # XLA's product takes longer of numbers that are no whole eights.
    other = {"x": jnp.float16, "mode": ShiftMode.OFFSETS, "shift": jnp.bfloat16}
    assert not choose(8192, **other) and choose(512, n=8196, **other) == warpgroups
    # Scales of another type are no matter to the kernel for fewer.
    assert choose(128, x=jnp.float16, mode=ShiftMode.OFFSETS, shift=jnp.bfloat16) == warpgroups


@pytest.mark.parametrize("x", [jnp.bfloat16, jnp.float16])
def test_float32_scales_of_many_tokens(monkeypatch, warpgroups, x):
    """In tiles, which round them, as zeros and offsets; other architectures have those of x's type alone."""
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", 132) if warpgroups else ("8.0", 108))
    for m in (512, 4096):
        for mode, shift in (
            *((ShiftMode.NONE, None), (ShiftMode.ZEROS, jnp.uint8), (ShiftMode.ZEROS, x), (ShiftMode.OFFSETS, x)),
            *((ShiftMode.ZEROS, jnp.float32), (ShiftMode.OFFSETS, jnp.float32)),
        ):
            scales, shift = _cuda_dispatch.parameter_types(jnp.dtype(jnp.float32), shift and jnp.dtype(shift))
            product = Product(m, 8192, 8192, 1, 4, x, scales, mode, shift, groups=64)
            assert _cuda_dispatch.kernel(product) == ("matmul_tiled" if warpgroups else "matmul_stream")
            assert _cuda_dispatch.rounds_weights(product) == warpgroups
            scales, shift = _cuda_dispatch.parameter_types(jnp.dtype(x), shift)
            alike = product._replace(scale_dtype=scales, shift_dtype=shift)
            tiles = "matmul_tiled" if warpgroups else "matmul_mma" if shift != jnp.float32 else "matmul_stream"
            assert _cuda_dispatch.kernel(alike) == tiles


def test_other_architectures(monkeypatch):
    """mma.sync until dense products are expected to be faster, which is early where their tensor cores are others'."""
    monkeypatch.setattr(_cuda_dispatch, "has_warpgroups", lambda: False)
    for capability, most in (("7.5", 16), ("8.0", 128), ("8.6", 128), ("8.9", 128), ("12.0", 128), ("10.0", 64)):
        monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda capability=capability: (capability, 108))
        assert all(choose(m) for m in (16, most)) and not choose(32768)
        assert _cuda_dispatch.has_mma() == (capability != "7.5")
        assert not choose(256, k=8196) and choose(16, k=8196)
        words = [scratch(m) for m in (16, 64)]
        assert words[0] == 0 and (words[1] > 0) == _cuda_dispatch.has_mma() and scratch(64, k=8196) == 0


@pytest.mark.parametrize("mode", [ShiftMode.NONE, ShiftMode.OFFSETS])
@pytest.mark.parametrize("x", [jnp.bfloat16, jnp.float32])
def test_more_tokens_never_go_back_to_the_kernel(x, mode):
    choices = [choose(m, x=x, mode=mode, shift=jnp.bfloat16) for m in (16, 32, 64, 128, 256, 512, 1024, 4096, 16384)]
    assert choices == sorted(choices, reverse=True)


def test_tables(warpgroups):
    """Codes that index a table are looked up for many tokens where the tiled kernel runs."""
    for m in (1, 16, 64):
        assert choose(m, mode=ShiftMode.TABLE)
    for m in (512, 8192):
        assert choose(m, mode=ShiftMode.TABLE) == warpgroups
        assert not choose(m, k=8196, mode=ShiftMode.TABLE)
    assert choose(64, n=64, mode=ShiftMode.TABLE) and not choose(512, n=64, mode=ShiftMode.TABLE)  # half empty tiles
    for x, scales, k, of_many in [
        *((jnp.bfloat16, jnp.bfloat16, 64, "ragged_tiled"), (jnp.float16, jnp.float32, 72, "ragged_tiled")),
        *((jnp.float16, jnp.bfloat16, 64, None), (jnp.float32, jnp.float32, 64, "ragged_warpgroup")),
        *((jnp.bfloat16, jnp.bfloat16, 68, None), (jnp.float32, jnp.float32, 68, None)),
    ]:
        few, many = (Product(m, k, 64, 2, 4, x, scales, ShiftMode.TABLE, jnp.float32) for m in (1, 1000))
        whole_tiles = warpgroups and k == 64
        assert _cuda_experts.kernel(few, ids=False) == ("ragged_resident" if whole_tiles else "matmul_stream")
        assert _cuda_experts.kernel(many, ids=True) == (of_many if of_many and warpgroups else "matmul_stream")


def test_few_outputs_of_many_tokens(monkeypatch, warpgroups):
    """Passes over few weights are many CTAs that split the inputs of a few tokens, not the little they read."""
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", 132))
    product = Product(16, 1024, 10, 1, 4, jnp.bfloat16, jnp.bfloat16, groups=8)
    one_wave = _cuda_dispatch._stream(product)
    assert _cuda_dispatch._stream(product._replace(m=256)) < 2 * one_wave  # 128 CTAs
    assert _cuda_dispatch._stream(product._replace(m=4096)) > 10 * one_wave
    wide = product._replace(n=28672, m=256)
    assert _cuda_dispatch._stream(wide) == _cuda_dispatch._streamed(wide)  # bytes take longer
    assert _cuda_dispatch.use_kernel(product) and _cuda_dispatch.use_kernel(product._replace(m=4096)) == warpgroups
    assert _cuda_dispatch.kernel(product._replace(m=1024)) == ("matmul_warpgroup" if warpgroups else "matmul_stream")


@pytest.mark.parametrize("x", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_transposed(monkeypatch, warpgroups, x):
    """The gradient of x is fused where its kernels run and are not expected to be slower."""
    wide = x == jnp.float32

    def use(m, n=8192, *, group_size=128, mode=ShiftMode.NONE, shift=None, forced=False):
        product = Product(m, 8192, n, 1, 4, x, jnp.bfloat16, mode, shift, groups=8192 // group_size)
        return _cuda_dispatch.use_transposed_kernel(product, forced=forced)

    assert all(use(m) for m in (1, 16, 64))
    assert use(8192) == use(8192, mode=ShiftMode.ZEROS, shift=jnp.uint8) == warpgroups
    assert not use(8192, 8196)
    assert use(8192, group_size=32) == warpgroups
    assert use(8192, mode=ShiftMode.OFFSETS, shift=x) == warpgroups
    assert not use(8192, 8196, mode=ShiftMode.OFFSETS, shift=x)
    assert not use(8192, 8193)
    assert use(8192, 8193, forced=True)
    for scales in (jnp.float16, jnp.bfloat16, jnp.float32):
        streams = x == jnp.bfloat16 or x == scales == jnp.float16
        for n in (8192, 8193):
            table = Product(8, 8192, n, 1, 4, x, scales, ShiftMode.TABLE, jnp.float32, groups=64)
            there = streams or (warpgroups and n == 8192)
            assert _cuda_dispatch.use_transposed_kernel(table) == there
            assert _cuda_experts.use_transposed_kernel(table._replace(batch=8)) == there
            warpgroup = _cuda_dispatch.transposed_kernel(table) == "matmul_transposed_warpgroup"
            assert warpgroup == (warpgroups and n == 8192 and not streams)

    def use_experts(m, n, **options):
        return _cuda_experts.use_transposed_kernel(Product(m, 8192, n, 8, 4, x, jnp.bfloat16), **options)

    assert use_experts(8 * 64, 8193)
    assert use_experts(8 * 8192, 8192) == (warpgroups or wide)
    assert use_experts(8 * 8192, 8193) == wide
    assert use_experts(8 * 8192, 8193, forced=True)
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("7.5", 40))
    assert not use(1, forced=True)
    assert not use_experts(8, 8192, forced=True)


def test_float32(monkeypatch, warpgroups):
    """In pieces, where integer zeros or none, aligned rows, and what there is of weights allow; with room for them."""
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", 132))

    def kernel(m, k=8192, n=8192, batch=1, group_size=128, bits=4, scales=jnp.float32, mode=ShiftMode.NONE, shift=None):
        types = (scales, mode, shift)
        product = Product(m, k, n, batch, bits, jnp.float32, *types, groups=k // group_size)
        name = _cuda_dispatch.kernel(product)
        assert not _cuda_dispatch.rounds_weights(product)
        words = scratch(m, k, n, batch, bits, jnp.float32, *types, group_size=group_size)
        rows = _abi.split_rows(m, k, n, batch)
        assert rows == m or (
            batch == 1 and rows % 512 == 0 and 512 <= rows < m and (rows == 512 or rows * k <= 8 << 20)
        )
        sizes = [jnp.dtype(dtype).itemsize for dtype in (scales, shift) if dtype is not None]
        odd = k > group_size and any(n * size % 16 for size in sizes)  # rows of scales and zeros that are copied first
        copied = _abi.aligned_rows_scratch(batch * k // group_size, -(-n // 16) * 16, sizes) if odd else 0
        sums = -(-k // 128) * max(1, 128 // group_size) if shift == jnp.float32 else 0
        pieces = batch * (rows * (k + 1 + sums) + (3 * (sums + 1) if sums else 0))
        # Tiles of tokens are compared with it.
        needs = name == "matmul_warpgroup" or _cuda_dispatch._in_token_tiles(product, name)
        assert words == (pieces + copied if needs else 0)
        return name

    split = "matmul_warpgroup" if warpgroups else "matmul_stream"
    resident = "matmul_resident" if warpgroups else "matmul_stream"
    assert [kernel(m) for m in (1, 2, 3, 8, 9, 16, 17, 512, 513, 5000)] == [resident] * 4 + [split] * 6
    assert kernel(8, 384, 1536) == kernel(8, 4096, 4096) == resident
    assert kernel(4, 8188, group_size=8188) == "matmul_stream"
    tiles = ((9, 384, 1536), (9, 768, 3072), (9, 4096, 256), (17, 384, 1536), (64, 1024, 1024))  # of small layers
    assert {kernel(*shape) for shape in tiles} == {resident}
    assert kernel(17, 384, 1536, batch=3) == kernel(64, 2048, 2048, group_size=32) == kernel(9, 4096, 4160) == split
    assert kernel(8, batch=2, bits=8) == resident
    assert kernel(40, mode=ShiftMode.ZEROS, shift=jnp.uint8, n=8208) == kernel(40, scales=jnp.bfloat16) == split
    assert kernel(40, n=8204) == kernel(40, n=8208, group_size=32) == split
    for mode in ShiftMode.ZEROS, ShiftMode.OFFSETS:
        for m, n, batch, group_size in (9, 8192, 1, 32), (40, 8192, 1, 128), (600, 8194, 1, 64), (600, 8192, 3, 256):
            assert kernel(m, n=n, batch=batch, group_size=group_size, mode=mode, shift=jnp.float32) == split
        assert kernel(9, 4096, 256, mode=mode, shift=jnp.float32) == "matmul_stream"
    assert kernel(40, n=8202) == kernel(40, n=8200, mode=ShiftMode.ZEROS, shift=jnp.uint8) == split
    if warpgroups:  # two products of 16-bit numbers take less than one of float32
        for m in (17, 1024, 8192):
            fused, dense = _cuda_dispatch.estimate(Product(m, 8192, 8192, 1, 4, jnp.float32, jnp.float32, groups=64))
            assert 3 * fused < dense


def test_rounded_activations(monkeypatch, warpgroups):
    """float32 activations become bfloat16 where that is allowed and saves time, on GPUs that multiply those."""
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", 132))
    size, single, half = 8192, jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)

    def product(m, k=size, n=size, batch=1, mode=ShiftMode.NONE, shift=None, x=single):
        return Product(m, k, n, batch, 4, x, half, mode, shift, groups=k // 128)

    def rounds(*args, transpose=False, experts=False, **kwargs):
        p = product(*args, **kwargs)
        found = (_cuda_experts if experts else _cuda_dispatch).rounded(p, transpose=transpose)
        assert found._replace(x_dtype=p.x_dtype) == p and found.x_dtype in (p.x_dtype, half)
        return found.x_dtype == half

    assert all(rounds(m) for m in (16, 64, 256, 8192)) and rounds(4096, 768, 3072) and rounds(export_symbol())
    if warpgroups:
        assert not any(rounds(m, k, n) for m in (1, 2) for k, n in ((size, size), (1024, 4096)))
        assert rounds(8, 4096, 14336) and not rounds(8, 768, 3072)
        assert rounds(1, mode=ShiftMode.TABLE, shift=single) and not rounds(
            1, 768, 768, mode=ShiftMode.OFFSETS, shift=half
        )
    of_rows = {"transpose": True}
    assert rounds(1, **of_rows) and rounds(17, 64, 64, **of_rows) and rounds(export_symbol(), **of_rows)
    assert not any(rounds(m, 4096, 4096, **of_rows) for m in (1, 16))
    assert rounds(1, 64, 64, mode=ShiftMode.TABLE, shift=single, **of_rows)
    many = {"batch": 128, "experts": True}
    assert [rounds(m, 2048, 1536, **many) for m in (1, 256, 257, 8192)] == [False, False, True, True]
    assert [rounds(m, 2048, 1536, **many, **of_rows) for m in (1, 4, 16, 2048, 2049)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert [rounds(m, 64, 64, **many, **of_rows) for m in (2048, 2049)] == [False, True]
    for gpu, there in ((("8.0", 108), True), (("7.5", 40), False)):
        monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda gpu=gpu: gpu)
        assert rounds(1024) == rounds(1024, **of_rows) == rounds(1024, batch=8, experts=True) == there
        assert rounds(1024, batch=8, experts=True, **of_rows) == there
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", 132))
    for x in (jnp.dtype(jnp.float16), half):
        p = product(1024, x=x)
        for module, transpose in itertools.product((_cuda_dispatch, _cuda_experts), (False, True)):
            assert module.rounded(p, transpose=transpose) == p


def export_symbol():
    from jax import export

    return export.symbolic_shape("m")[0]


def test_float_shifts_of_float32(warpgroups):
    """Of products by the kernels that have integer ones, and of gradients apart where those are faster."""

    def product(m, size=8192, n=8192, x=jnp.float32, mode=ShiftMode.OFFSETS, shift=jnp.float32, groups=64):
        return Product(m, size, n, 1, 4, x, jnp.float32, mode, shift, groups=groups)

    apart = _cuda_dispatch.transposed_shift_apart
    assert apart(product(100)) == apart(product(8192, mode=ShiftMode.ZEROS)) == warpgroups
    assert not apart(product(1)) and not apart(product(2, 4096, 4096, groups=32)) and not apart(product(16))
    assert not apart(product(100, mode=ShiftMode.NONE, shift=None)) and not apart(product(100, x=jnp.bfloat16))
    assert not apart(product(100, mode=ShiftMode.ZEROS, shift=jnp.uint8))
    fused, dense = _cuda_dispatch.estimate(product(1024))
    assert (4 * fused < dense) == warpgroups


def test_scales_of_the_other_type(warpgroups):
    """They become float32 where a kernel for many tokens takes those, and no others."""

    def types(m, k=4096, n=14336, x=jnp.bfloat16, scales=jnp.float16, mode=ShiftMode.NONE, shift=None, experts=0):
        p = Product(m, k, n, experts or 1, 4, x, jnp.dtype(scales), mode, shift and jnp.dtype(shift), groups=k // 128)
        return (_cuda_experts.widened(p, ids=False) if experts else _cuda_dispatch.widened(p)).parameter_types

    half, single = jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)
    assert types(4) == types(64) == types(4096, x=jnp.float16) == types(8, experts=8) == [half]
    assert types(1024) == types(8192, experts=8) == ([single] if warpgroups else [half])
    assert types(1024, x=jnp.float32) == [half] and types(1024, scales=jnp.float32) == [single]
    offsets = {"mode": ShiftMode.OFFSETS, "shift": jnp.float16}
    assert types(1024, **offsets) == types(256, experts=8, **offsets) == ([single] * 2 if warpgroups else [half] * 2)
    zeros = types(1024, mode=ShiftMode.ZEROS, shift=jnp.uint8)
    assert zeros == [single if warpgroups else half, jnp.dtype(jnp.uint8)]


def test_few_rows_of_transposed(warpgroups):
    """Streamed up to so many, and up to more where a kernel for those knows the scheme and all strips run at once."""

    def most(k=8192, bits=4, x=jnp.bfloat16, scales=None, mode=ShiftMode.NONE, batch=1, group_size=128):
        def streams(m):
            shift = {ShiftMode.ZEROS: jnp.uint8, ShiftMode.TABLE: jnp.float32}.get(mode)
            p = Product(m, k, 1024, batch, bits, x, scales or x, mode, shift, groups=k // group_size)
            return _cuda_dispatch.transposed_kernel(p) == "matmul_transposed_stream"

        return max(m for m in range(1, 40) if streams(m))

    if not warpgroups:
        assert most() == 39
        return
    assert (
        most() == most(64) == most(132 * 64) == most(x=jnp.float16) == most(2048, batch=4) == most(x=jnp.float32) == 32
    )
    assert most(132 * 64 + 8) == most(group_size=32) == most(2048, batch=5) == most(mode=ShiftMode.ZEROS) == 16
    assert most(scales=jnp.float32) == most(x=jnp.float32, group_size=64) == 16
    assert most(32, group_size=32) == most(66 * 64, mode=ShiftMode.TABLE) == 32 and most(bits=8) == 24
    assert most(67 * 64, mode=ShiftMode.TABLE) == most(mode=ShiftMode.TABLE, scales=jnp.float32) == 16


def test_other_parameters_of_transposed(warpgroups):
    """Rounded where weights then stay in registers."""

    def rounds(
        m=17, n=4096, bits=4, x=jnp.bfloat16, scales=jnp.float32, mode=ShiftMode.NONE, shift=jnp.uint8, groups=32
    ):
        shift = None if mode == ShiftMode.NONE else jnp.dtype(shift)
        return _cuda_dispatch.rounds_transposed_parameters(
            Product(m, 4096, n, 1, bits, x, jnp.dtype(scales), mode, shift, groups=groups)
        )

    zeros, offsets = {"mode": ShiftMode.ZEROS}, {"mode": ShiftMode.OFFSETS, "shift": jnp.float32}
    own = {"scales": jnp.bfloat16}
    assert rounds() == rounds(8192) == rounds(groups=1) == rounds(128, bits=8) == rounds(groups=128) == warpgroups
    assert rounds(**zeros) == rounds(**offsets) == rounds(**offsets, **own) == warpgroups
    assert rounds(33, mode=ShiftMode.TABLE) == warpgroups
    assert not (rounds(16) or rounds(32, mode=ShiftMode.TABLE) or rounds(n=4100) or rounds(129, bits=8))
    assert not (rounds(x=jnp.float16) or rounds(x=jnp.float32) or rounds(**own) or rounds(**zeros, **own))
    assert not (rounds(**zeros, n=4104) or rounds(mode=ShiftMode.ZEROS, shift=jnp.float32))


def test_other_parameters_of_experts_transposed(warpgroups):
    """The same of experts, where rows are so many that rounding the scales of all of them is nothing beside it."""

    def rounds(m, bits=4, mode=ShiftMode.NONE, x=jnp.bfloat16):
        p = Product(m, 2048, 1536, 16, bits, x, jnp.dtype(jnp.float32), mode, groups=16)
        return _cuda_experts.rounds_transposed_parameters(p)

    assert rounds(16 * 16 + 1) == rounds(8192) == rounds(16 * 16 + 1, mode=ShiftMode.TABLE) == warpgroups
    assert not (rounds(16 * 16) or rounds(16 * 16, mode=ShiftMode.TABLE) or rounds(8192, bits=8))
    assert not (rounds(8192, x=jnp.float16) or rounds(8192, x=jnp.float32))


def test_quantized(warpgroups):
    """Codes meet codes where there are enough rows to fill the tiles."""

    def use(m, k=8192, n=8192, **options):
        options = {"blocks": False} | options
        return _cuda_dispatch.use_quantized_kernel(Product(m, k, n, 1, 8, jnp.bfloat16, jnp.bfloat16), **options)

    assert use(1024) == use(4096) == use(4096, blocks=True) == use(1, forced=True) == warpgroups
    assert not use(1) and not use(16) and not use(0, forced=True)
    assert not use(256, 4096, 1024)
    # float8 codes take longer than int8 ones, and blocks whose sums meet zeros longer than a 16-bit product.
    assert use(4096, float8=True) == warpgroups and not use(4096, blocks=True, shifted=True)
    assert use(320) == warpgroups and not use(320, float8=True)


def test_convolutions_in_groups(monkeypatch):
    """Depthwise on any GPU, others where tensor cores take 16 bits; and taken where measured to be no slower."""

    def of(groups, k=1, each=1, size=(3, 3), strides=None, dilation=1, pixels=16, images=2, x=jnp.bfloat16):
        ones, sizes = (1,) * len(size), (pixels,) * len(size)
        window = Window(size, strides or ones, ((1, 1),) * len(size), ones, (dilation,) * len(size))
        results = window.results(sizes)
        n, shape = groups * each, (images, *sizes, groups * k)
        kernel = _cuda_dispatch.direct_conv_kernel(shape, x, k, n, groups, results, window)
        outputs = images * math.prod(results)
        return kernel, kernel and _cuda_dispatch.use_direct_conv(outputs, k, n, groups, window)

    for capability in ("7.5", "8.0", "9.0", "12.0"):
        monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda capability=capability: (capability, 108))
        assert (
            of(32)
            == of(70)
            == of(8, size=(31, 31))
            == of(8, size=(4,))
            == of(96, pixels=60, strides=(2, 2))
            == of(32, x=jnp.float32)
            == (True, True)
        )
        for case in ({"size": (3, 3, 3)}, {"each": 2}, {"dilation": 2}, {"strides": (3, 1)}, {"size": (5, 5)}):
            assert of(64, **case, pixels=400 if len(case.get("size", ())) < 3 else 40) == (True, True)
        assert of(64, pixels=400) == (True, False) and of(64) == of(33, pixels=400) == (True, True)
        for case in ({"size": (1, 3, 3, 3)}, {"images": 2**23}, {"size": (101, 101), "pixels": 200}):
            assert of(32, **case) == (False, False)
        mma = capability != "7.5"
        assert of(32, 4, 4) == of(3, 24, 24) == of(2, 64, 64, pixels=4) == of(32, 8, 8, strides=(2, 2)) == (mma, mma)
        for case in ({"each": 8}, {"dilation": 2}, {"size": (1, 3, 3)}, {"each": 8, "size": (4, 4)}, {"images": 4000}):
            assert of(32, **{"k": 4, "each": 4} | case) == (mma, mma)
        for case in ({"size": (2, 3, 3)}, {"size": (4, 4)}):
            assert of(32, **{"k": 4, "each": 4} | case) == (mma, False)
        assert of(16, 4, 2, size=(4, 4)) == (mma, False) and of(16, 4, 2) == (mma, mma)
        many = {"groups": 2, "pixels": 16, "images": 4}
        assert of(k=64, each=64, **many) == of(k=16, each=16, **many | {"images": 400}) == (mma, False)
        assert of(k=64, each=32, **many) == of(k=48, each=48, **many) == of(k=8, each=8, **many) == (mma, mma)
        for case in ({"x": jnp.float32}, {"size": (7, 7)}, {"images": 2**17}):
            assert of(32, **{"k": 4, "each": 4} | case) == (False, False)
        assert of(3, 4, 8) == of(3, 8, 3) == (False, False)
    blocks = [_cuda_dispatch._input_blocks(*shape) for shape in ((24, 72, 3), (4, 128, 32), (64, 128, 2))]
    assert blocks == [3, 1, 2]


def test_transposed_convolutions(warpgroups):
    """Where all phases have pixels and taps; next to a convolution that multiplies the zeros between pixels, too."""

    def kernel(taps, spread, pads, size=8, stride=1, dilation=1):
        window = Window((taps, 3), (stride, 1), (pads, (1, 1)), (spread, 1), (dilation, 1))
        return _cuda_dispatch.conv_kernel(jnp.bfloat16, 64, (size, 9), window.results((size, 9)), window)

    assert kernel(3, 2, (1, 2)) == kernel(4, 2, (2, 2)) == kernel(5, 3, (3, 3)) == kernel(3, 3, (2, 2)) == warpgroups
    assert not kernel(3, 2, (1, 1)) and not kernel(2, 3, (1, 1)) and not kernel(4, 2, (3, 3), stride=2)
    assert not kernel(3, 2, (3, 2), dilation=2) and not kernel(3, 2, (301, 300))
    window = Window((3, 3), (1, 1), ((1, 2), (1, 2)), (2, 2), (1, 1))
    assert _cuda_dispatch.use_conv(4096, 512, 512, window, 4, jnp.bfloat16, ShiftMode.NONE, groups=8)


def test_convolutions_of_few_tiles(monkeypatch, warpgroups):
    """Shapes that tests/gpu runs reach all that the kernel of warpgroups has; others leave it out."""
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", 132))
    for shape, case in WARPGROUPS.items():
        pixels, taps = case["images"] * math.prod(case["sizes"]), math.prod(case["window"])
        for bits in (4, 8):
            times = _cuda_dispatch.conv_times(pixels, case["k"], case["n"], taps, bits)
            chosen = min(times, key=lambda config: times[config])
            assert chosen[:3] == ("warpgroup", *shape)
        padding = tuple(((taps - 1) // 2, taps // 2) for taps in case["window"])
        window = Window(case["window"], (1, 1), padding, (1, 1), (1, 1))
        x_shape = (case["images"], *case["sizes"], case["k"])
        bands = _cuda_dispatch.band_conv_time(x_shape, jnp.bfloat16, case["k"], case["n"], 1, case["sizes"], window)
        assert bands is None or not warpgroups or bands > times[chosen]
    assert WARPGROUPS.keys() == {cost[:2] for cost in _cuda_dispatch._CONV_WARPGROUPS.shapes}

    def use(pixels, mode=ShiftMode.NONE, shift=None, k=1280, n=1280, groups=20):
        window = Window((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), (1, 1))
        return _cuda_dispatch.use_conv(pixels, k, n, window, 4, jnp.bfloat16, mode, shift, groups=groups)

    # A wave of tiles for the kernel of warpgroups, and the last of the other's is nearly empty.
    seen = []
    times = _cuda_dispatch.conv_times
    monkeypatch.setattr(_cuda_dispatch, "conv_times", lambda *args: seen.append(args[-1]) or times(*args))
    assert use(64) and use(64, mode=ShiftMode.ZEROS, shift=jnp.uint8) and seen == [True, True]
    assert use(64, mode=ShiftMode.OFFSETS, shift=jnp.bfloat16) and use(64, groups=40)
    assert use(64, n=1284) and use(64, mode=ShiftMode.ZEROS, shift=jnp.uint8, n=1288) and seen[2:] == [False] * 4


def test_convolutions_of_many_pixels(monkeypatch, warpgroups):
    """Few inputs without strides; groups of whole shares of 64, and then always where that was measured."""
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", 132))

    def time(case, groups=1, strides=None, spread=1, x=jnp.bfloat16, **options):
        case = {"images": 2, "padding": ((1, 1), (1, 1)), "sizes": (9, 8), "window": (3, 3), "k": 64} | case | options
        axes, padding = len(case["sizes"]), case["padding"]
        dilation = case.get("rhs_dilation", (1,) * axes)
        if isinstance(padding, str):
            reach = [(taps - 1) * d for taps, d in zip(case["window"], dilation, strict=True)]
            padding = tuple((r // 2, r - r // 2) if padding == "SAME" else (0, 0) for r in reach)
        window = Window(case["window"], strides or (1,) * axes, padding, (spread,) * axes, dilation)
        results, features = window.results(case["sizes"]), case["k"] * groups
        shape, n = (case["images"], *case["sizes"], features), case.get("n", features)
        us = _cuda_dispatch.band_conv_time(shape, x, case["k"], n, groups, results, window)
        return us, case["images"] * math.prod(results), n, window

    if not warpgroups:
        assert time({})[0] is None
        return
    for case in BANDS.values():
        case = {"padding": "SAME"} | case
        us, pixels, n, window = time(case)
        assert us is not None
        for bits in (4, 8):
            others = _cuda_dispatch.conv_times(pixels, case["k"], n, window.taps, bits, warpgroups=case["k"] == 64)
            assert us < min(others.values())
    us, pixels, n, window = time({"sizes": (56, 56), "n": 64, "images": 256})
    of = (pixels, 64, n, window, 4, jnp.bfloat16, ShiftMode.NONE)
    assert _cuda_dispatch.use_conv(*of, groups=1, bands=us) and not _cuda_dispatch.use_conv(*of, groups=1)
    of = (pixels // 8, *of[1:])  # little enough not to compare
    assert _cuda_dispatch.use_conv(*of, groups=1)
    for k, in_groups in ((2, 8), (16, 8), (64, 3)):
        us, _, n, window = time({"k": k}, groups=in_groups)
        assert us is not None and _cuda_dispatch.use_direct_conv(2**40, k, n, in_groups, window, us)
    us, _, n, window = time({"k": 16, "window": (3, 4), "padding": ((1, 1), (1, 2))}, groups=8)
    assert us is not None and not _cuda_dispatch.use_direct_conv(2**40, 16, n, 8, window, us)
    for options in (
        *({"k": 24}, {"k": 128}, {"strides": (2, 1)}, {"spread": 2}, {"x": jnp.float32}, {"sizes": (300, 300)}),
        *(
            {"padding": ((-1, 1), (1, 1))},
            {"window": (7, 7)},
            {"images": 0},
            {"n": 70, "groups": 2},
            {"k": 2, "groups": 3},
        ),
    ):
        assert time({}, **options)[0] is None


@pytest.mark.parametrize(("group_size", "shape"), SHAPES.items())
@pytest.mark.parametrize("bits", [4, 8])
def test_small_products_round_no_weights(monkeypatch, group_size, shape, bits):
    """Rows of scales that are not aligned leave `matmul_stream`, which is faster for so few weights, and tiles."""
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", 132))
    k, n = shape
    groups = k // group_size if group_size else 1
    for mode, shift in ((ShiftMode.NONE, None), (ShiftMode.ZEROS, jnp.uint8)):
        for m in ROWS[1:]:
            kernel = _cuda_dispatch.kernel(
                Product(m, k, n, 1, bits, jnp.float16, jnp.float16, mode, shift, groups=groups)
            )
            assert kernel != "matmul_tiled"


@pytest.mark.parametrize("ids", [True, False])
def test_scratch_of_experts(warpgroups, ids):
    """Room for rows in order, where kernels want them so and may put them there."""

    def product(m, length, x, mode=ShiftMode.NONE, shift=None):
        return Product(m, length, length, 9, 4, x, jnp.float16, mode, shift, groups=2)

    for rows, length, x, there in (
        *((5, 64, jnp.bfloat16, True), (7000, 1016, jnp.float16, True)),
        (5, 60, jnp.bfloat16, False),
    ):
        words = _cuda_experts.scratch(product(rows, length, x), ids=ids)
        plan = _abi.ragged_scratch(rows, 9)
        assert plan >= rows + 8 * 9 + 64  # kRaggedScratch* of abi.h
        assert words == plan + (rows * length // 2 if there and ids and warpgroups else 0)
    # Two such numbers and a power of two.
    plan = _abi.ragged_scratch(7, 9)
    assert _cuda_experts.scratch(product(7, 64, jnp.float32), ids=ids) == plan + (7 * 65 if warpgroups else 0)
    assert _cuda_experts.scratch(product(7, 60, jnp.float32), ids=ids) == plan
    # Of cotangents also their parameters, where few rows are not streamed.
    for rows, there, *shift in (
        (7, False),
        (7, True, ShiftMode.TABLE, jnp.float32),
        (9 * 24, False),
        (9 * 25, True),
        (9 * 32, False, ShiftMode.OFFSETS, jnp.float16),
        (9 * 33, True, ShiftMode.OFFSETS, jnp.float16),
    ):
        parameters = _abi.transposed_float32_parameters(9, 64, 2, shifted=ShiftMode.OFFSETS in shift)
        words = _cuda_experts.scratch(
            product(rows, 64, jnp.float32, *shift), ids=ids, transpose=True, parameter_batch=9
        )
        room = rows * 65 + parameters if there and warpgroups else 0
        assert words == _abi.ragged_scratch(rows, 9) + room, (rows, shift)


def test_two_kernels(rng, monkeypatch, warpgroups):
    """They are expected to be faster than one, and what the first computes fills its tiles."""
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", 132))
    bfloat16, float32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    wide = Product(128, 5120, 25600, 1, 4, bfloat16, bfloat16, groups=40)
    both = _cuda_dispatch._parts(wide)
    if not warpgroups:
        assert both is None
        return
    # A wave of tiles of 192 outputs, and four of 64 for clusters.
    assert both is not None and both.outputs == 132 * 192
    assert _cuda_dispatch.kernel(wide) == "matmul_warpgroup + matmul_warpgroup"
    assert _cuda_dispatch.estimate(wide)[0] == both.us < _cuda_dispatch._warpgroup(wide)
    assert _cuda_dispatch.rounds_weights(wide)
    for other in (
        wide._replace(m=16),
        wide._replace(n=both.outputs),  # whole waves
        wide._replace(batch=2),
        wide._replace(x_dtype=float32),
        wide._replace(shift_mode=ShiftMode.TABLE, shift_dtype=float32),
    ):
        assert _cuda_dispatch._parts(other) is None and "+" not in _cuda_dispatch.kernel(other)
    found = 0
    for m, k, n in zip(rng.integers(17, 1500, 200), rng.integers(4, 60, 200), rng.integers(16, 4000, 200), strict=True):
        p = wide._replace(m=int(m), k=128 * int(k), n=8 * int(n), groups=int(k))
        if (parts := _cuda_dispatch._parts(p)) is None:
            continue
        found += 1
        (name, (_, splits, *_)), one = parts.first, [_cuda_dispatch._warpgroup(p)]
        width = 256 if name == "matmul_tiled" else 64 * splits
        if p.m >= _cuda_dispatch._least_tiled_tokens(p):
            one.append(_cuda_dispatch._tiled(p))
        assert 0 < parts.outputs < p.n and parts.outputs % width == 0
        assert parts.us < _cuda_dispatch._PARTS.gain * min(one)
        assert _cuda_dispatch.scratch(p, 1) > 0 or parts.second[0] != "matmul_tiled"
    assert found > 10
