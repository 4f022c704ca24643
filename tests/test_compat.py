"""Weights of other systems, against index arithmetic written apart from the package and values computed by hand."""

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compat_cases import awq_arrays, block_bytes, codes_of, dense, fields_to_words, gptq_arrays, grouped, scales_of

import jax_wonly as jw
from jax_wonly.compat import (
    PermutedTensor,
    awq,
    compressed_tensors,
    faster_transformer,
    gptq,
    hqq,
    llama_cpp,
    mlx,
    qwix,
    torchao,
)
from jax_wonly.compat._codes import InexpressibleError

# --- AWQ ---


@pytest.mark.parametrize(("k", "n", "group_size"), [(128, 64, 32), (256, 40, 128), (96, 8, 96)])
def test_awq(rng, k, n, group_size):
    qweight, qzeros, scales, value = awq_arrays(rng, k, n, group_size)
    qt = awq.decode(qweight, qzeros, scales)
    assert (qt.bits, qt.shape, qt.group_size, qt.zeros.dtype) == (4, (k, n), group_size, jnp.uint8)
    np.testing.assert_array_equal(dense(qt), value)
    back = awq.encode(qt)
    np.testing.assert_array_equal(back["qweight"], qweight)
    np.testing.assert_array_equal(back["qzeros"], qzeros)
    np.testing.assert_array_equal(back["scales"], scales)
    np.testing.assert_array_equal(dense(jax.jit(awq.decode)(qweight, qzeros, scales)), value)
    x = rng.normal(1, 1, (3, k)).astype(np.float32)
    np.testing.assert_allclose(x @ qt, x @ value, rtol=1e-4, atol=1e-3)


def test_awq_word_by_hand():
    """Column 1 is in bits 16..19, and zeros that are all 8 are dropped."""
    qweight = np.zeros((32, 1), np.int32)
    qweight[5, 0] = 0x000F0000
    qt = awq.decode(qweight, np.full((1, 1), 0x88888888, np.uint32).view(np.int32), np.ones((1, 8), np.float16))
    assert qt.zeros is None
    expected = np.full((32, 8), -8)
    expected[5, 1] = 7
    np.testing.assert_array_equal(dense(qt), expected)


# --- GPTQ ---


@pytest.mark.parametrize(
    ("bits", "version", "act_order"),
    [(2, 1, False), (3, 2, True), (4, 1, False), (4, 1, True), (4, 2, True), (8, 1, True), (8, 2, False)],
)
def test_gptq(rng, bits, version, act_order):
    k, n, group_size = 192, 64, 64
    *arrays, value = gptq_arrays(rng, k, n, group_size, bits, version, act_order)
    qt = gptq.decode(*arrays, bits=bits, version=version)
    assert isinstance(qt, PermutedTensor) == act_order
    assert qt.shape == (k, n)
    np.testing.assert_array_equal(dense(qt), value)
    x = rng.normal(1, 1, (2, 3, k)).astype(np.float32)
    np.testing.assert_allclose(x @ qt, x @ value, rtol=1e-4, atol=1e-2)
    if bits in (4, 8):
        back = gptq.encode(qt, version=version)
        for name, expected in zip(("qweight", "qzeros", "scales", "g_idx"), arrays, strict=True):
            np.testing.assert_array_equal(back[name], expected)


@pytest.mark.parametrize(("version", "word"), [(1, 0x77777777), (2, 0x88888888)])
def test_gptq_symmetric_zeros_by_hand(version, word):
    qweight = np.full((4, 8), np.uint32(0x76543210)).view(np.int32)
    qzeros = np.full((1, 1), word, np.uint32).view(np.int32)
    qt = gptq.decode(qweight, qzeros, np.full((1, 8), 0.5, np.float16), version=version)
    assert qt.zeros is None
    np.testing.assert_array_equal(dense(qt)[:, 0], (np.tile(np.arange(8), 4) - 8) * 0.5)
    other = gptq.decode(qweight, qzeros, np.full((1, 8), 0.5, np.float16), version=3 - version)
    assert dense(other)[0, 0] == (-3.5 if version == 1 else -4.5)


def test_gptq_short_last_group(rng):
    """K=224 in groups of 128: the second has 96 inputs, and both are held in groups of 32."""
    *arrays, _ = gptq_arrays(rng, 224, 16, 112, 4, 2, False)
    arrays[3] = (np.arange(224) // 128).astype(np.int32)
    qt = gptq.decode(*arrays, version=2)
    assert qt.group_size == 32
    np.testing.assert_array_equal(dense(qt), dense(gptq.decode(*arrays[:3], version=2, group_size=128)))
    s = np.asarray(arrays[2], np.float32)
    zeros = [[(int(w) >> (4 * i)) & 15 for w in row for i in range(8)] for row in arrays[1].view(np.uint32)]
    q = [[(int(arrays[0].view(np.uint32)[i // 8, c]) >> (4 * (i % 8))) & 15 for c in range(16)] for i in range(224)]
    g = arrays[3]
    np.testing.assert_array_equal(dense(qt), (np.array(q, np.float32) - np.array(zeros)[g]) * s[g])


def test_permuted_tensor_transforms(rng):
    *arrays, value = gptq_arrays(rng, 128, 32, 32, 4, 1, True)
    qt = gptq.decode(*arrays)
    x = rng.normal(0.5, 1, (4, 128)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(lambda x, w: x @ w)(x, qt), x @ value, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(jax.vmap(lambda x: x @ qt)(x), x @ value, rtol=1e-4, atol=1e-3)
    gradient = jax.grad(lambda x: (x @ qt).sum())(jnp.asarray(x))
    np.testing.assert_allclose(gradient, np.tile(value.sum(1), (4, 1)), rtol=1e-4, atol=1e-3)
    bias = rng.normal(size=32).astype(np.float32)
    y = jw.matmul(x, qt, bias=bias, activation="relu", preferred_element_type=jnp.float32)
    np.testing.assert_allclose(y, np.maximum(x @ value + bias, 0), rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match="x has shape"):
        x[:, :64] @ qt
    assert qt.nbytes == qt.weight.nbytes + 4 * 128
    checks = jw.export_disabled_checks()
    exported = jax.export.export(jax.jit(lambda x, w: x @ w), disabled_checks=checks)(x, qt).serialize()
    again = jax.export.deserialize(exported).call(x, qt)
    np.testing.assert_allclose(again, x @ value, rtol=1e-4, atol=1e-3)


# --- compressed-tensors ---


@pytest.mark.parametrize(
    ("bits", "symmetric"),
    [(1, True), (3, False), (4, True), (4, False), (5, True), (6, False), (8, True), (8, False)],
)
def test_compressed_tensors_packed(rng, bits, symmetric):
    n, k, group_size = 40, 128, 64
    mid = 2 ** (bits - 1)
    q, z = codes_of(rng, (n, k), bits), codes_of(rng, (n, k // group_size), bits)
    s = scales_of(rng, z.shape, ml_dtypes.bfloat16)
    packed = fields_to_words(q, bits).view(np.int32)
    zeros = None if symmetric else fields_to_words(z.T.copy(), bits).T.copy().view(np.int32)
    shift = mid if symmetric else np.repeat(z.astype(np.float32), group_size, 1)
    value = ((q.astype(np.float32) - shift) * np.repeat(s.astype(np.float32), group_size, 1)).T
    qt = compressed_tensors.decode_packed(packed, s, (n, k), zeros, bits=bits)
    assert qt.bits == (4 if bits <= 4 else 8) and qt.dtype == jnp.bfloat16
    np.testing.assert_array_equal(dense(qt), value)
    if bits in (4, 8):
        back = compressed_tensors.encode_packed(qt)
        np.testing.assert_array_equal(back["weight_packed"], packed)
        np.testing.assert_array_equal(back["weight_scale"], s)
        np.testing.assert_array_equal(back["weight_shape"], [n, k])
        assert ("weight_zero_point" in back) == (not symmetric)
        if not symmetric:
            np.testing.assert_array_equal(back["weight_zero_point"], zeros)


def test_compressed_tensors_act_order_channels_and_int8(rng):
    n, k = 24, 128
    q = codes_of(rng, (n, k), 4)
    s = scales_of(rng, (n, 4))
    g_idx = rng.permutation(np.arange(k) // 32).astype(np.int32)
    packed = fields_to_words(q, 4).view(np.int32)
    qt = compressed_tensors.decode_packed(packed, s, (n, k), None, g_idx)
    assert isinstance(qt, PermutedTensor)
    np.testing.assert_array_equal(dense(qt), ((q.astype(np.float32) - 8) * s.astype(np.float32)[:, g_idx]).T)
    back = compressed_tensors.encode_packed(qt)
    np.testing.assert_array_equal(back["weight_g_idx"], g_idx)
    np.testing.assert_array_equal(back["weight_packed"], packed)
    unfilled = compressed_tensors.decode_packed(packed, s, (n, k), None, np.full(k, -1, np.int32))
    assert not isinstance(unfilled, PermutedTensor)

    w = rng.integers(-128, 128, (n, k)).astype(np.int8)
    z = rng.integers(-128, 128, (n, 1)).astype(np.int8)
    for zero in (None, z):
        qt = compressed_tensors.decode_int8(w, s[:, :1], zero)
        expected = (w.astype(np.float32) - (0 if zero is None else zero)) * s[:, :1].astype(np.float32)
        np.testing.assert_array_equal(dense(qt), expected.T)
    whole = compressed_tensors.decode_int8(w, s[:1, 0])
    np.testing.assert_array_equal(dense(whole), w.T.astype(np.float32) * np.float32(s[0, 0]))


# --- HQQ ---


@pytest.mark.parametrize(("bits", "axis"), [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (8, 1), (3, 0), (4, 0)])
def test_hqq(rng, bits, axis):
    n, k, group_size = 48, 128, 64 if axis else 16
    rows, columns = (n * k // group_size, group_size) if axis else (group_size, n * k // group_size)
    q = codes_of(rng, (rows, columns), bits)
    scale = scales_of(rng, (rows, 1) if axis else (1, columns))
    zero = rng.uniform(0, 2**bits, scale.shape).astype(np.float16)
    parts, width = {1: (8, 1), 2: (4, 2), 3: (10, 3), 4: (2, 4)}.get(bits, (1, 8))
    step = -(-rows // parts)
    w_q = np.zeros((step, columns), np.uint32)
    for r in range(rows):
        w_q[r % step] |= q[r].astype(np.uint32) << np.uint32(width * (parts - 1 - r // step))
    w_q = w_q.astype(np.int32) if bits == 3 else w_q.astype(np.uint8)
    value = (q.astype(np.float32) - zero.astype(np.float32)) * scale.astype(np.float32)
    value = value.reshape(n, k).T
    arguments = dict(bits=bits, group_size=group_size, axis=axis)
    np.testing.assert_array_equal(hqq.dequantize(w_q, scale, zero, (n, k), **arguments), value)
    if axis == 0:
        with pytest.raises(InexpressibleError, match="axis=0"):
            hqq.decode(w_q, scale, zero, (n, k), **arguments)
    else:
        qt = hqq.decode(w_q, scale, zero, (n, k), **arguments)
        assert qt.bits == (4 if bits <= 4 else 8) and qt.zeros.dtype == jnp.float16
        np.testing.assert_array_equal(dense(qt), value)


def test_hqq_first_half_is_in_the_high_nibble():
    w_q = np.full((1, 32), 0xF0, np.uint8)
    qt = hqq.decode(w_q, np.ones((2, 1), np.float16), np.zeros((2, 1), np.float16), (2, 32), group_size=32)
    np.testing.assert_array_equal(dense(qt)[:, 0], 15)
    np.testing.assert_array_equal(dense(qt)[:, 1], 0)


# --- MLX ---


@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, 64), (4, 32), (4, 128), (5, 64), (6, 128), (8, 64)])
def test_mlx(rng, bits, group_size):
    n, k = 24, 256
    q = codes_of(rng, (n, k), bits)
    s, b = scales_of(rng, (n, k // group_size)), scales_of(rng, (n, k // group_size))
    words = fields_to_words(q, bits)
    value = q.astype(np.float32) * np.repeat(s.astype(np.float32), group_size, 1)
    value = (value + np.repeat(b.astype(np.float32), group_size, 1)).T
    qt = mlx.decode(words, s, b, group_size=group_size, bits=bits)
    np.testing.assert_array_equal(dense(qt), value)
    if bits in (4, 8):
        back = mlx.encode(qt)
        for name, expected in (("weight", words), ("scales", s), ("biases", b)):
            np.testing.assert_array_equal(back[name], expected)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_itself(rng, bits):
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    w = rng.normal(0.1, 1, (40, 256)).astype(np.float16)
    q, s, b = mx.quantize(mx.array(w), group_size=64, bits=bits)
    # In float32 the product is exact and there is one rounding, as here.
    value = mx.dequantize(q, s.astype(mx.float32), b.astype(mx.float32), group_size=64, bits=bits)
    qt = mlx.decode(np.array(q), np.array(s), np.array(b), group_size=64, bits=bits)
    np.testing.assert_array_equal(dense(qt), np.array(value).T)


# --- torchao ---


@pytest.mark.parametrize("symmetric", [True, False])
def test_torchao_plain(rng, symmetric):
    n, k, group_size = 24, 128, 32
    q = rng.integers(-8, 8, (n, k))
    s = scales_of(rng, (k // group_size, n), ml_dtypes.bfloat16)
    z = np.zeros_like(s) if symmetric else scales_of(rng, s.shape, ml_dtypes.bfloat16)
    qdata = ((q[:, 0::2] & 15) | ((q[:, 1::2] & 15) << 4)).astype(np.uint8).view(np.int8)
    qt = torchao.decode(qdata, s, z)
    assert (qt.offsets is None) == symmetric
    value = q.T.astype(np.float32) * grouped(s, group_size, k) + grouped(z, group_size, k)
    np.testing.assert_array_equal(dense(qt), value)


# --- qwix ---


class QArray:
    """The fields of ``qwix.QArray``."""

    def __init__(self, qvalue, scale, zero_point=None):
        self.qvalue, self.scale, self.zero_point, self.qtype = qvalue, scale, zero_point, qvalue.dtype


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint8"])
def test_qwix_fields(rng, dtype, asymmetric):
    low, high = {"int4": (-8, 8), "uint4": (0, 16), "int8": (-128, 128), "uint8": (0, 256)}[dtype]
    q, z = rng.integers(low, high, (2, 64, 24)), rng.integers(low, high, (2, 2, 24))
    s = scales_of(rng, (2, 2, 24), np.float32)
    array = QArray(jnp.asarray(q).astype(dtype), jnp.asarray(s), jnp.asarray(z).astype(dtype) if asymmetric else None)
    value = (q - np.repeat(z, 32, 1) * asymmetric).astype(np.float32) * np.repeat(s, 32, 1)
    np.testing.assert_array_equal(dense(qwix.decode(array)), value)
    tree = qwix.decode_tree({"a": array, "b": [1.0, jnp.ones(3)]})
    assert isinstance(tree["a"], jw.QuantizedTensor) and tree["b"][0] == 1.0


@pytest.mark.parametrize("dtype", ["int4", "int8"])
@pytest.mark.parametrize("method", ["absmax", "minmax"])
def test_qwix_itself(rng, dtype, method):
    core = pytest.importorskip("qwix._src.core.qarray", reason="qwix is not installed")
    w = jnp.asarray(rng.normal(0.2, 1, (128, 40)).astype(np.float32))
    how = core.HowToQuantize(
        qtype=jnp.dtype(dtype), channelwise_axes=(1,), tiled_axes={0: 32}, calibration_method=method
    )
    array = core.quantize(w, how)
    qt = qwix.decode(array)
    np.testing.assert_array_equal(dense(qt), core.dequantize(array))
    back = qwix.encode(qt)
    np.testing.assert_array_equal(core.dequantize(back), core.dequantize(array))


# --- llama.cpp ---


def block_value(block: bytes, kind: str) -> list[float]:
    """The values of one block, element by element in exact arithmetic and rounded to float32 once."""

    def half(i):
        return float(np.frombuffer(block[i : i + 2], "<f2")[0])

    def six_bits(j):
        s = block[4:16]
        if j < 4:
            return s[j] & 63, s[j + 4] & 63
        return (s[j + 4] & 15) | (s[j - 4] >> 6 << 4), (s[j + 4] >> 4) | (s[j] >> 6 << 4)

    def q5(start, bits_at, e):
        nibble = block[start + e % 16] >> (4 * (e // 16)) & 15
        return nibble | (block[bits_at + e // 8] >> (e % 8) & 1) << 4

    out = []
    for e in range(llama_cpp.KINDS[kind].weights):
        if kind in ("Q4_0", "Q4_1"):
            start = 2 if kind == "Q4_0" else 4
            q = block[start + e % 16] >> (4 * (e // 16)) & 15
            out.append(half(0) * (q - 8) if kind == "Q4_0" else half(0) * q + half(2))
        elif kind == "Q5_0":
            out.append(half(0) * (q5(6, 2, e) - 16))
        elif kind == "Q5_1":
            out.append(half(0) * q5(8, 4, e) + half(2))
        elif kind == "Q8_0":
            out.append(half(0) * int(np.int8(np.uint8(block[2 + e]))))
        elif kind in ("Q4_K", "Q5_K"):
            chunk, high, i = e // 64, e % 64 // 32, e % 32
            q = block[(16 if kind == "Q4_K" else 48) + 32 * chunk + i] >> (4 * high) & 15
            if kind == "Q5_K":
                q |= (block[16 + i] >> (2 * chunk + high) & 1) << 4
            scale, minimum = six_bits(e // 32)
            out.append(half(0) * scale * q - half(2) * minimum)
        else:
            h, run, i = e // 128, e % 128 // 32, e % 32
            q = block[64 * h + 32 * (run % 2) + i] >> (4 * (run // 2)) & 15
            q |= (block[128 + 32 * h + i] >> (2 * run) & 3) << 4
            scale = int(np.int8(np.uint8(block[192 + e // 16])))
            out.append(half(208) * scale * (q - 32))
    return out


@pytest.mark.parametrize("kind", list(llama_cpp.KINDS))
def test_llama_cpp(rng, kind):
    n, k = 12, 512
    of = llama_cpp.KINDS[kind]
    blocks = block_bytes(rng, kind, n, k)
    value = np.array(
        [sum((block_value(b.tobytes(), kind) for b in row.reshape(-1, of.bytes)), []) for row in blocks], np.float32
    ).T
    np.testing.assert_array_equal(llama_cpp.dequantize(blocks, kind), value)
    if kind == "Q6_K":
        with pytest.raises(InexpressibleError, match="group_size=16"):
            llama_cpp.decode(blocks, kind)
        return
    qt = llama_cpp.decode(blocks, kind)
    assert qt.group_size == 32 and qt.bits == (4 if kind.startswith("Q4") else 8)
    np.testing.assert_array_equal(dense(qt), value)
    np.testing.assert_array_equal(dense(jax.jit(llama_cpp.decode, static_argnums=1)(blocks, kind)), value)
    if kind in ("Q4_0", "Q4_1", "Q8_0"):
        np.testing.assert_array_equal(llama_cpp.encode(qt, kind), blocks)


@pytest.mark.parametrize("kind", list(llama_cpp.KINDS))
def test_llama_cpp_itself(rng, kind):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    blocks = block_bytes(rng, kind, 8, 512)
    value = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(llama_cpp.dequantize(blocks, kind), value.T)


def test_llama_cpp_encode_splits_groups(rng):
    w = jnp.asarray(rng.normal(size=(256, 24)).astype(np.float16))
    for bits, kind, mode in ((4, "Q4_0", "symmetric"), (8, "Q8_0", "symmetric"), (4, "Q4_1", "offsets")):
        qt = jw.quantize(w, bits=bits, group_size=128, mode=mode)
        np.testing.assert_array_equal(dense(llama_cpp.decode(llama_cpp.encode(qt, kind), kind)), dense(qt))
    with pytest.raises(ValueError, match="float16 scales"):
        llama_cpp.encode(jw.quantize(w.astype(jnp.bfloat16), bits=4), "Q4_0")


def test_rope_order(rng):
    heads, size, k = 3, 8, 64
    original = rng.normal(size=(heads * size, k)).astype(np.float32)
    # The conversion of llama.cpp, on [N, K].
    stored = original.reshape(heads, 2, size // 2, k).swapaxes(1, 2).reshape(original.shape)
    np.testing.assert_array_equal(llama_cpp.undo_rope_order(stored.T, heads), original.T)
    for mode in ("symmetric", "integer_zeros", "offsets"):
        a, b = (jw.quantize(jnp.asarray(w.T), group_size=32, mode=mode) for w in (stored, original))
        np.testing.assert_array_equal(dense(llama_cpp.undo_rope_order(a, heads)), dense(b))
    with pytest.raises(ValueError, match="heads=5"):
        llama_cpp.undo_rope_order(stored.T, 5)


# --- FasterTransformer's layout ---


def faster_transformer_bytes(codes: np.ndarray, bits: int, arch: int) -> np.ndarray:
    """The four steps one after the other, on codes, as index arithmetic."""
    k, n = codes.shape
    per_register = 32 // bits
    if arch >= 75:
        block = 128 // bits  # rows that one MMA takes
        rows = [
            base + 8 * ((i % per_register) // 2) + i % 2 + 2 * (i // per_register)
            for base in range(0, k, block)
            for i in range(block)
        ]
        columns = codes[rows].T
        interleave = 16 // bits
        flat = np.zeros(k * n, np.uint8)
        for c in range(n):
            for r in range(k):
                at = (c // interleave) * k * interleave + (r // 64) * 64 * interleave + 64 * (c % interleave) + r % 64
                flat[at] = columns[c, r]
    else:
        flat = codes.reshape(-1)
    registers = flat.reshape(-1, per_register)
    order = (0, 2, 1, 3) if bits == 8 else (0, 2, 4, 6, 1, 3, 5, 7)
    flat = registers[:, order].reshape(-1)
    return flat if bits == 8 else flat[0::2] | (flat[1::2] << 4)


@pytest.mark.parametrize(("k", "n", "arch"), [(64, 8, 80), (192, 72, 80), (192, 72, 70)])
@pytest.mark.parametrize("bits", [4, 8])
def test_faster_transformer(rng, bits, arch, k, n):
    codes = codes_of(rng, (k, n), bits)
    expected = faster_transformer_bytes(codes, bits, arch)
    packed = jax.jit(faster_transformer.pack_bytes, static_argnums=(1, 2))(codes, bits, arch)
    assert packed.dtype == jnp.int8 and packed.shape == (k, n * bits // 8)
    np.testing.assert_array_equal(np.asarray(packed).view(np.uint8).reshape(-1), expected)
    np.testing.assert_array_equal(faster_transformer.unpack_bytes(packed, bits, k, n, arch), codes)
    stacked = faster_transformer.pack_bytes(np.stack([codes, codes[::-1]]), bits, arch)
    np.testing.assert_array_equal(stacked[0], packed)
    np.testing.assert_array_equal(faster_transformer.unpack_bytes(stacked, bits, k, n, arch)[1], codes[::-1])
    qvalue = faster_transformer.decode(packed, bits=bits, k=k, n=n, arch=arch)
    np.testing.assert_array_equal(qvalue, jw.pack(codes, bits))
    np.testing.assert_array_equal(faster_transformer.encode(qvalue, bits=bits, k=k, n=n, arch=arch), packed)


# --- what does not fit ---


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: awq.decode(np.zeros((32, 1), np.float32), None, np.ones((1, 8), np.float16)), TypeError, "qweight"),
        (lambda: awq.decode(np.zeros((32, 2), np.int32), None, np.ones((1, 8), np.float16)), ValueError, "qweight"),
        (lambda: awq.decode(np.zeros((33, 1), np.int32), None, np.ones((2, 8), np.float16)), ValueError, "K=33"),
        (
            lambda: awq.decode(np.zeros((32, 1), np.int32), np.zeros((2, 1), np.int32), np.ones((1, 8), np.float16)),
            ValueError,
            "qzeros",
        ),
        (lambda: awq.encode(jw.quantize(jnp.ones((32, 8)), bits=8, group_size=32)), ValueError, "int8"),
        (lambda: awq.encode(jw.quantize(jnp.ones((32, 8)), group_size=32, mode="offsets")), ValueError, "offsets"),
        (lambda: gptq.decode(*[np.zeros((4, 8), np.int32)] * 3, bits=4), ValueError, "qzeros"),
        (lambda: gptq.decode(*[np.zeros((4, 8), np.int32)] * 3, bits=5), ValueError, "bits=5"),
        (lambda: gptq.decode(*[np.zeros((4, 8), np.int32)] * 3, version=3), ValueError, "version=3"),
        (
            lambda: compressed_tensors.decode_packed(np.zeros((8, 4), np.int32), np.ones((8, 1), np.float16), (8, 64)),
            ValueError,
            "weight_packed",
        ),
        (
            lambda: hqq.decode(np.zeros((4, 32), np.uint8), *[np.ones((4, 1), np.float16)] * 2, (4, 32), group_size=32),
            ValueError,
            "w_q",
        ),
        (
            lambda: mlx.decode(np.zeros((8, 4), np.uint32), *[np.ones((8, 1), np.float16)] * 2, group_size=64),
            ValueError,
            "weight",
        ),
        (lambda: qwix.decode(jnp.ones((4, 4))), TypeError, "QArray"),
        (lambda: llama_cpp.decode(np.zeros((2, 19), np.uint8), "Q4_0"), ValueError, "18"),
        (lambda: llama_cpp.decode(np.zeros((2, 18), np.uint8), "Q2_K"), ValueError, "Q2_K"),
        (lambda: faster_transformer.pack_bytes(np.zeros((32, 8), np.uint8), 4), ValueError, "multiple of 64"),
        (lambda: faster_transformer.unpack_bytes(np.zeros((8, 8), np.int8), 8, 64, 8), ValueError, "512 bytes"),
        (lambda: faster_transformer.pack_bytes(np.zeros((64, 8), np.uint8), 4, 60), ValueError, "arch=60"),
    ],
)
def test_bad_arrays(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize(
    ("g_idx", "match"),
    [
        (np.full(64, 2), "0 to 1"),
        (np.full(64, -1), "0 to 1"),
        (np.r_[np.zeros(31, int), np.ones(33, int)][::-1].copy(), "inputs"),
        (np.zeros(63, int), r"\[64\]"),
        (np.zeros(64), "int32"),
    ],
)
def test_bad_groups(g_idx, match):
    zeros = np.zeros((2, 1), np.int32)
    with pytest.raises(ValueError, match=match):
        gptq.decode(np.zeros((8, 8), np.int32), zeros, np.ones((2, 8), np.float16), g_idx)
