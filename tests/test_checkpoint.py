"""Checkpoints of every format, written here byte by byte, and what must happen to damaged ones."""

import hashlib
import json
import pickle
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compat_cases import awq_arrays, block_bytes, codes_of, dense, fields_to_words, gptq_arrays, grouped, scales_of
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_wonly as jw
from jax_wonly._table import NF4, TABLES
from jax_wonly.compat import PermutedTensor, llama_cpp

safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")

from jax_wonly import checkpoint  # noqa: E402

DATA = Path(__file__).parent / "test_checkpoint_data"


def write(folder: Path, tensors, config=None, metadata=None, key="quantization_config") -> Path:
    folder.mkdir(exist_ok=True)
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    (folder / "model.safetensors").write_bytes(safetensors.save(tensors, metadata))
    if config is not None:
        (folder / "config.json").write_text(json.dumps({key: config, "hidden_size": 64}))
    return folder


def gguf_bytes(tensors, metadata=(), version=3, alignment=32) -> bytes:
    """A GGUF file: ``tensors`` of ``(name, type number, row-major shape, bytes)``, ``metadata`` of raw values."""

    def text(s):
        return struct.pack("<Q", len(s.encode())) + s.encode()

    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata:
        out += text(key) + value
    data = b""
    for name, kind, shape, content in tensors:
        out += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data))
        data += content + bytes(-len(content) % alignment)
    return out + bytes(-len(out) % alignment) + data


GGUF_NUMBER = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}


# --- every format ---


def test_awq(rng, tmp_path):
    qweight, qzeros, scales, value = awq_arrays(rng, 128, 64, 32)
    tensors = {"a.up.qweight": qweight, "a.up.qzeros": qzeros, "a.up.scales": scales}
    tensors |= {"a.up.bias": scales[0], "norm.weight": scales[1]}
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    for path in (write(tmp_path / "config", tensors, config), write(tmp_path / "plain", tensors)):
        ck = checkpoint.load(path)
        assert ck.format == "awq" and set(ck) == {"a.up.weight", "a.up.bias", "norm.weight"}
        info = ck.info("a.up.weight")
        assert (info.shape, info.bits, info.group_size, info.exact) == ((128, 64), 4, 32, True)
        assert info.nbytes == qweight.nbytes + qzeros.nbytes + scales.nbytes
        np.testing.assert_array_equal(dense(ck["a.up.weight"]), value)
        np.testing.assert_array_equal(ck["a.up.bias"], scales[0])
        assert ck["a.up.bias"].dtype == jnp.float16
    for version in ("gemv", "marlin"):
        with pytest.raises(checkpoint.FormatError, match=version):
            checkpoint.load(write(tmp_path / version, tensors, config | {"version": version}))


@pytest.mark.parametrize(("version", "act_order"), [("gptq", False), ("gptq", True), ("gptq_v2", True)])
def test_gptq(rng, tmp_path, version, act_order):
    arrays = gptq_arrays(rng, 128, 64, 32, 4, 1 if version == "gptq" else 2, act_order)
    tensors = {f"x.{name}": a for name, a in zip(("qweight", "qzeros", "scales", "g_idx"), arrays, strict=False)}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": act_order, "sym": False}
    if version != "gptq":
        config["checkpoint_format"] = version
    ck = checkpoint.load(write(tmp_path / "a", tensors, config))
    weight = ck["x.weight"]
    assert isinstance(weight, PermutedTensor) == act_order
    np.testing.assert_array_equal(dense(weight), arrays[-1])
    if version == "gptq":
        assert checkpoint.load(write(tmp_path / "b", tensors)).format == "gptq"
    with pytest.raises(checkpoint.FormatError, match="marlin"):
        checkpoint.load(write(tmp_path / "c", tensors, config | {"checkpoint_format": "marlin"}))


def test_gptq_bits_of_one_module_and_the_old_configuration(rng, tmp_path):
    """A module may have bits of its own; the configuration used to be quantize_config.json."""
    tensors = {}
    values = {}
    for bits in (4, 8):
        *arrays, values[bits] = gptq_arrays(rng, 64, 32, 32, bits, 1, False)
        tensors |= {f"{bits}.{n}": a for n, a in zip(("qweight", "qzeros", "scales", "g_idx"), arrays, strict=True)}
    path = write(tmp_path / "a", tensors)
    (path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32, "quant_method": "gptq"}))
    ck = checkpoint.load(path)
    for bits in (4, 8):
        assert ck.info(f"{bits}.weight").bits == bits
        np.testing.assert_array_equal(dense(ck[f"{bits}.weight"]), values[bits])


def test_gptq_that_is_probably_of_version_2(rng, tmp_path):
    arrays = gptq_arrays(rng, 32, 8, 32, 4, 1, False)
    tensors = dict(zip(("x.qweight", "x.qzeros", "x.scales"), arrays, strict=False))
    tensors["x.qzeros"] = np.full((1, 1), 0x88888888, np.uint32).view(np.int32)
    ck = checkpoint.load(write(tmp_path / "a", tensors, {"quant_method": "gptq", "bits": 4, "sym": True}))
    with pytest.warns(UserWarning, match="version 2"):
        ck["x.weight"]


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_compressed_tensors(rng, tmp_path, bits):
    n, k = 24, 128
    q, s = codes_of(rng, (n, k), bits), scales_of(rng, (n, 4), ml_dtypes.bfloat16)
    tensors = {
        "x.weight_packed": fields_to_words(q, bits).view(np.int32),
        "x.weight_scale": s,
        "x.weight_shape": np.array([n, k], np.int64),
        "lm_head.weight": s,
    }
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    ck = checkpoint.load(write(tmp_path / "a", tensors, config))
    value = (q.astype(np.float32) - 2 ** (bits - 1)) * np.repeat(s.astype(np.float32), 32, 1)
    np.testing.assert_array_equal(dense(ck["x.weight"]), value.T)
    assert ck["lm_head.weight"].shape == (n, 4) and ck.info("x.weight").bits == bits
    if bits == 4:  # without a configuration the words tell the bits
        assert checkpoint.load(write(tmp_path / "b", tensors)).info("x.weight").bits == 4
    for other in ("float-quantized", "nvfp4-pack-quantized"):
        with pytest.raises(checkpoint.FormatError, match=other):
            checkpoint.load(write(tmp_path / other, tensors, config | {"format": other}))


def test_compressed_tensors_int8(rng, tmp_path):
    w = rng.integers(-128, 128, (24, 96)).astype(np.int8)
    s = scales_of(rng, (24, 1), np.float32)
    tensors = {"x.weight": w, "x.weight_scale": s, "x.input_scale": s[:1, 0], "y.weight": s}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    ck = checkpoint.load(write(tmp_path / "a", tensors, config))
    assert set(ck) == {"x.weight", "y.weight"}
    np.testing.assert_array_equal(dense(ck["x.weight"]), w.T * s.T)


@pytest.mark.parametrize("as_float", [False, True])
def test_hqq(rng, tmp_path, as_float):
    n, k, size = 16, 128, 64
    q = codes_of(rng, (n * k // size, size), 4)
    scale, zero = scales_of(rng, (len(q), 1)), rng.uniform(0, 15, (len(q), 1)).astype(np.float16)
    half = len(q) // 2
    w_q = (q[:half] << 4) | q[half:]
    tensors = {
        "x.W_q": w_q.view(np.float16) if as_float else w_q,
        "x.scale": scale,
        "x.zero": zero,
        "x.nbits": np.int32(4).reshape(()),
        "x.group_size": np.int32(size).reshape(()),
        "x.axis": np.int32(1).reshape(()),
        "x.shape": np.array([n, k], np.int32),
        "x.view_as_float": np.uint8(as_float).reshape(()),
        "x.packing": np.frombuffer(b"4bit_u8", np.uint8),
        "x.compute_dtype": np.frombuffer(b"__import__('os').abort()", np.uint8),  # never evaluated
    }
    ck = checkpoint.load(write(tmp_path / "a", tensors))
    assert ck.format == "hqq" and set(ck) == {"x.weight"}
    value = (q.astype(np.float32) - zero.astype(np.float32)) * scale.astype(np.float32)
    np.testing.assert_array_equal(dense(ck["x.weight"]), value.reshape(n, k).T)

    # Groups along the outputs: requantized with a warning, dense, or an error.
    tensors["x.axis"] = np.int32(0).reshape(())
    q0 = codes_of(rng, (8, n * k // 8), 4)
    tensors |= {"x.W_q": (q0[:4] << 4) | q0[4:], "x.view_as_float": np.uint8(0).reshape(())}
    tensors |= {"x.group_size": np.int32(8).reshape(()), "x.scale": scales_of(rng, (1, n * k // 8))}
    tensors["x.zero"] = np.full((1, n * k // 8), 7.5, np.float16)
    value = ((q0 - np.float32(7.5)) * tensors["x.scale"].astype(np.float32)).reshape(n, k).T
    path = write(tmp_path / "b", tensors)
    with pytest.warns(UserWarning, match="1 tensors"):
        ck = checkpoint.load(path)
    assert ck["x.weight"].bits == 8 and ck["x.weight"].group_size == 32
    error = np.linalg.norm(dense(ck["x.weight"]) - value) / np.linalg.norm(value)
    assert 0 < error < 0.01
    np.testing.assert_array_equal(checkpoint.load(path, inexact="dense")["x.weight"], value)
    with pytest.raises(checkpoint.FormatError, match="requantize"):
        checkpoint.load(path, inexact="error")["x.weight"]


def test_mlx(rng, tmp_path):
    n, k = 24, 128
    tensors, values = {}, {}
    for name, bits, size in (("a", 4, 64), ("b", 6, 32), ("embed", 4, 64)):
        q, s, b = codes_of(rng, (n, k), bits), scales_of(rng, (n, k // size)), scales_of(rng, (n, k // size))
        tensors |= {f"{name}.weight": fields_to_words(q, bits), f"{name}.scales": s, f"{name}.biases": b}
        value = q.astype(np.float32) * np.repeat(s.astype(np.float32), size, 1)
        values[name] = value + np.repeat(b.astype(np.float32), size, 1)
    config = {"group_size": 64, "bits": 4, "mode": "affine", "b": {"group_size": 32, "bits": 6}, "c": False}
    ck = checkpoint.load(write(tmp_path / "a", tensors, config, key="quantization"))
    assert ck.format == "mlx" and len(ck) == 3
    for name, value in values.items():
        np.testing.assert_array_equal(dense(ck[f"{name}.weight"]), value.T)
    with pytest.raises(checkpoint.FormatError, match="mxfp4"):
        checkpoint.load(write(tmp_path / "b", tensors, config | {"mode": "mxfp4"}, key="quantization"))


@pytest.mark.parametrize("style", ["0.weight:", "0._weight_"])
def test_torchao(rng, tmp_path, style):
    q, s = rng.integers(-8, 8, (24, 64)), scales_of(rng, (2, 24), ml_dtypes.bfloat16)
    qdata = ((q[:, 0::2] & 15) | ((q[:, 1::2] & 15) << 4)).astype(np.uint8).view(np.int8)
    tensors = {f"{style}qdata": qdata, f"{style}scale": s, f"{style}zero_point": s}
    metadata = {"0.weight": json.dumps({"_type": "Int4Tensor", "_data": {"block_size": [1, 32]}})}
    if style.endswith(":"):
        tensors["0.bias:_data"] = s[0]
    ck = checkpoint.load(write(tmp_path / "a", tensors, metadata=metadata))
    assert ck.format == "torchao" and "0.weight" in ck and len(ck) == len(tensors) - 2
    np.testing.assert_array_equal(dense(ck["0.weight"]), q.T * grouped(s, 32, 64) + grouped(s, 32, 64))
    with pytest.raises(checkpoint.FormatError, match="Float8Tensor"):
        checkpoint.load(write(tmp_path / "b", tensors, metadata={"0.weight": json.dumps({"_type": "Float8Tensor"})}))
    with pytest.raises(checkpoint.FormatError, match="act_pre_scale"):
        checkpoint.load(write(tmp_path / "c", tensors | {f"{style}act_pre_scale": s[0]}, metadata=metadata))


def test_gguf(rng, tmp_path):
    tensors, blocks = [], {}
    for kind, number in GGUF_NUMBER.items():
        blocks[kind] = block_bytes(rng, kind, 12, 256)
        tensors.append((f"blk.{kind}.weight", number, (12, 256), blocks[kind].tobytes()))
    norm = rng.normal(size=7).astype(np.float32)
    half = rng.normal(size=(3, 5)).astype(ml_dtypes.bfloat16)
    tensors += [("norm.weight", 0, (7,), norm.tobytes()), ("half", 30, (3, 5), half.tobytes())]
    tensors.append(("other", 10, (1, 256), bytes(84)))
    metadata = [
        ("general.architecture", struct.pack("<IQ", 8, 5) + b"llama"),
        ("numbers", struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3)),
        ("words", struct.pack("<IIQQ", 9, 8, 2, 1) + b"a" + struct.pack("<Q", 0)),
    ]
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(tensors, metadata))
    with pytest.warns(UserWarning, match="Q6_K"):
        ck = checkpoint.load(path)
    assert ck.config["general.architecture"] == "llama" and ck.config["words"] == ["a", ""]
    for kind in GGUF_NUMBER:
        expected = np.asarray(llama_cpp.dequantize(blocks[kind], kind))
        weight = ck[f"blk.{kind}.weight"]
        assert ck.info(f"blk.{kind}.weight").exact == (kind != "Q6_K") and weight.shape == (256, 12)
        if kind == "Q6_K":
            assert 0 < np.linalg.norm(dense(weight) - expected) < 0.01 * np.linalg.norm(expected)
        else:
            np.testing.assert_array_equal(dense(weight), expected)
    exact = checkpoint.load(path, inexact="dense")["blk.Q6_K.weight"]
    np.testing.assert_array_equal(exact, llama_cpp.dequantize(blocks["Q6_K"], "Q6_K"))
    np.testing.assert_array_equal(ck["norm.weight"], norm)
    np.testing.assert_array_equal(ck["half"], half)
    with pytest.raises(checkpoint.FormatError, match="Q2_K"):
        ck["other"]
    assert "8 bits in groups of 32" in str(ck) and "inexact" in str(ck)


def test_files_of_the_formats_own_libraries():
    """Written by gguf 0.19.0 and mlx 0.32.4 (write.py beside them), with the values that these give."""
    expected = np.load(DATA / "expected.npz")
    for file, options in (("written.gguf", {}), ("written.safetensors", {"config": {"bits": 4, "group_size": 64}})):
        ck = checkpoint.load(DATA / file, inexact="dense", **options)
        names = [name for name in expected if name.startswith(file)]
        assert len(names) == len(ck) > 0
        for name in names:
            value = ck[name.split(":")[1]]
            value = value if isinstance(value, jax.Array) else value.dequantize(jnp.float32)
            np.testing.assert_array_equal(np.asarray(value, np.float32), expected[name])


# --- what load does besides ---


def test_tensors_are_read_when_asked_for(rng, tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "a", {f"{i}.weight": scales_of(rng, (4, 4)) for i in range(5)})
    ck = checkpoint.load(path, progress=True)
    read = []
    monkeypatch.setattr(type(ck._entries["0.weight"]), "load", lambda self, inexact: read.append(self.info.name))
    assert "3.weight" in ck and len(ck) == 5 and not read
    ck["2.weight"]
    assert read == ["2.weight"]
    assert len(dict(ck.items())) == 5
    assert "5/5 tensors" in capsys.readouterr().err


def test_shards(rng, tmp_path):
    tensors = {f"{i}": rng.normal(size=(8, 8)).astype(np.float32) for i in range(5)}
    tensors["quantized"] = jw.quantize(rng.normal(size=(64, 8)).astype(np.float32), group_size=32)
    tensors["again"] = jw.quantize(rng.normal(size=(64, 8)).astype(np.float32), group_size=64)
    checkpoint.save(tmp_path, tensors, max_file_bytes=600)
    assert len(list(tmp_path.glob("*.safetensors"))) == 5
    ck = checkpoint.load(tmp_path)
    assert set(ck) == set(tensors)
    for name, value in tensors.items():
        jax.tree.map(np.testing.assert_array_equal, ck[name], value)
    index = tmp_path / "model.safetensors.index.json"
    for name in ("../model.safetensors", "/etc/passwd", "model.bin"):
        index.write_text(json.dumps({"weight_map": {"0": name}}))
        with pytest.raises(checkpoint.FormatError, match="same folder"):
            checkpoint.load(tmp_path)
    index.write_text(json.dumps({"weight_map": {"0": "absent.safetensors"}}))
    with pytest.raises(FileNotFoundError, match="absent"):
        checkpoint.load(tmp_path)


# --- save ---


def weights(rng):
    w = jnp.asarray(rng.normal(0.1, 1, (128, 64)).astype(np.float16))
    qts = {
        "a.weight": jw.quantize(w, bits=4, group_size=32),
        "b.weight": jw.quantize(w, bits=4, group_size=32, mode="integer_zeros"),
    }
    arrays = gptq_arrays(rng, 128, 64, 32, 4, 1, True)[:-1]
    return qts | {"c.weight": jw.compat.gptq.decode(*arrays), "norm.weight": np.arange(3, dtype=np.float32)}


def assert_same(found, expected):
    assert type(found) is type(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_save_and_load_own_format(rng, tmp_path):
    w = jnp.asarray(rng.normal(0.1, 1, (2, 96, 40)).astype(np.float32))
    tensors = weights(rng)
    for mode in ("symmetric", "integer_zeros", "float_zeros", "offsets"):
        tensors[mode] = jw.quantize(w, bits=8, group_size=32, mode=mode, scale_dtype=jnp.bfloat16)
    for path in (tmp_path / "folder", tmp_path / "file.safetensors"):
        checkpoint.save(path, tensors)
        ck = checkpoint.load(path)
        assert ck.format == "jax_wonly" and set(ck) == set(tensors)
        for name, value in tensors.items():
            assert_same(ck[name], value if not isinstance(value, np.ndarray) else jnp.asarray(value))
            assert tuple(ck.info(name).shape) == tuple(value.shape)
    bytes_before = (tmp_path / "file.safetensors").read_bytes()
    checkpoint.save(tmp_path / "again.safetensors", dict(reversed(list(ck.items()))))
    assert (tmp_path / "again.safetensors").read_bytes() == bytes_before


def test_bytes_are_canonical(tmp_path):
    """The file of given weights never changes, and padding does not show."""
    codes = (np.arange(64 * 8).reshape(64, 8) * 7 % 16).astype(np.uint8)
    qvalue = jw.pack(codes, 4)
    scales = jnp.full((2, 8), 0.5, jnp.float16)
    digests = set()
    for words in (qvalue, qvalue | jnp.where(jnp.arange(512) >= 128, np.uint32(0xF0F0F0F0), 0)):
        weight = jw.QuantizedTensor(words, scales, bits=4, k=64, n=8)
        checkpoint.save(tmp_path / "a.safetensors", {"w": weight, "b": np.arange(3, dtype=np.float32)})
        digests.add(hashlib.sha256((tmp_path / "a.safetensors").read_bytes()).hexdigest())
    assert digests == {"913f1efa7de3df9fb7801f44e81df8b81026ea349a64e476ca923998f6b6a095"}


@pytest.mark.parametrize(("format", "version"), [("gptq", 1), ("gptq", 2), ("compressed-tensors", 1)])
def test_save_other_formats(rng, tmp_path, format, version):
    tensors = weights(rng)
    checkpoint.save(tmp_path, tensors, format, version=version)
    ck = checkpoint.load(tmp_path)
    assert ck.format == format and set(ck) == set(tensors)
    for name, value in tensors.items():
        if name == "norm.weight":
            np.testing.assert_array_equal(ck[name], value)
        else:
            np.testing.assert_array_equal(dense(ck[name]), dense(value))
            assert isinstance(ck[name], PermutedTensor) == (name == "c.weight")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    if format == "gptq":
        assert (config["desc_act"], config["sym"], config["group_size"]) == (True, False, 32)
        names = safetensors.load((tmp_path / "model.safetensors").read_bytes())
        word = 0x77777777 if version == 1 else 0x88888888
        assert (names["a.qzeros"].view(np.uint32) == word).all()
    else:
        assert sorted(sum((g["targets"] for g in config["config_groups"].values()), [])) == ["a", "b", "c"]


def test_save_refuses(rng, tmp_path):
    w = jnp.ones((64, 32))
    cases = [
        ({"a": jw.quantize(w, group_size=32, mode="offsets")}, "gptq", ValueError, "offsets"),
        ({"a": jw.quantize(w, group_size=32), "b": jw.quantize(w, group_size=64)}, "gptq", ValueError, "GPTQ has one"),
        ({"a": jw.quantize(w, group_size=32), "a.qvalue": w}, "jax_wonly", ValueError, "a.qvalue"),
        ({"a": "text"}, "jax_wonly", TypeError, "str"),
        ({"a": w}, "awq", ValueError, "awq"),
        ([w], "gptq", TypeError, "list"),
    ]
    for tensors, format, error, match in cases:
        with pytest.raises(error, match=match):
            checkpoint.save(tmp_path / "out", tensors, format)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="folder"):
        checkpoint.save(tmp_path / "a.safetensors", {}, "gptq")


# --- bitsandbytes ---


def state_bytes(state) -> np.ndarray:
    return np.frombuffer(json.dumps(state).encode(), np.uint8)


def test_bitsandbytes_golden(tmp_path):
    """By hand: the first of two codes is in the high nibble, and rows of outputs follow each other."""
    row0 = bytes.fromhex("0123456789abcdef") * 4
    tensors = {
        "up.weight": np.frombuffer(row0 + b"\xf0" * 32, np.uint8).reshape(64, 1),
        "up.weight.absmax": np.array([2.0, 0.5], np.float32),
        "up.weight.quant_map": np.asarray(NF4, np.float32),
        "up.weight.quant_state.bitsandbytes__nf4": state_bytes(
            {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [2, 64]}
        ),
        "norm.weight": np.ones(3, np.float32),
    }
    value = np.stack([2 * np.tile(np.asarray(NF4, np.float32), 4), np.tile(np.float32([0.5, -0.5]), 32)], 1)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    for path in (write(tmp_path / "config", tensors, config), write(tmp_path / "plain", tensors)):
        ck = checkpoint.load(path)
        assert ck.format == "bitsandbytes" and set(ck) == {"up.weight", "norm.weight"}
        info = ck.info("up.weight")
        assert (info.shape, info.bits, info.group_size, info.exact) == ((64, 2), 4, 64, True)
        assert ck["up.weight"].table == NF4
        np.testing.assert_array_equal(dense(ck["up.weight"]), value)
    # absmax in bytes: [0.5, -1.5][byte / 255] * 4 + 3.5
    nested = {k: v for k, v in tensors.items() if not k.endswith(("absmax", "nf4"))}
    nested |= {
        "up.weight.absmax": np.array([0, 255], np.uint8),
        "up.weight.nested_absmax": np.array([4.0], np.float32),
        "up.weight.nested_quant_map": np.linspace(0.5, -1.5, 256, dtype=np.float32),
        "up.weight.quant_state.bitsandbytes__nf4": state_bytes(
            {"quant_type": "nf4", "blocksize": 64, "shape": [2, 64], "nested_blocksize": 256, "nested_offset": 3.5}
        ),
    }
    value = np.stack([5.5 / 2 * value[:, 0], -2.5 / 0.5 * value[:, 1]], 1)
    np.testing.assert_array_equal(dense(checkpoint.load(write(tmp_path / "n", nested))["up.weight"]), value)


def bitsandbytes_tensors(rng, n, k, blocksize, kind, nested=False, name="up.weight"):
    """Random arrays of a weight, and its values, float32 ``[K, N]``."""
    codes = codes_of(rng, n * k, 4)
    padded = np.append(codes, np.uint8(0))[: (n * k + 1) // 2 * 2]
    quant_map = np.asarray(TABLES[kind], np.float32)
    count = -(-n * k // blocksize)
    state: dict = {"quant_type": kind, "blocksize": blocksize, "dtype": "float16", "shape": [n, k]}
    arrays = {"quant_map": quant_map, "absmax": rng.uniform(0.1, 2, count).astype(np.float32)}
    absmax = arrays["absmax"]
    if nested:
        arrays["absmax"] = rng.integers(0, 256, count, dtype=np.uint8)
        arrays["nested_quant_map"] = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        arrays["nested_absmax"] = rng.uniform(0.1, 2, -(-count // 16)).astype(np.float32)
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": 0.7310585786300049}
        absmax = arrays["nested_quant_map"][arrays["absmax"]] * np.repeat(arrays["nested_absmax"], 16)[:count]
        absmax = absmax + np.float32(state["nested_offset"])
    value = quant_map[codes] * np.repeat(absmax, blocksize)[: n * k]
    tensors = {name: (padded[0::2] << 4 | padded[1::2])[:, None]}
    tensors |= {f"{name}.{key}": a for key, a in arrays.items()}
    return tensors | {f"{name}.quant_state.bitsandbytes__{kind}": state_bytes(state)}, value.reshape(n, k).T


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes(rng, tmp_path, kind, nested):
    # K, block size, and the group size that holds the values: what divides both.
    for i, (n, k, blocksize, group) in enumerate(
        [
            (10, 128, 64, 64),
            (7, 256, 128, 128),
            (6, 1024, 512, 256),
            (9, 96, 64, 32),
            (8, 32, 64, 32),
            (5, 160, 4096, 32),
        ]
    ):
        tensors, value = bitsandbytes_tensors(rng, n, k, blocksize, kind, nested)
        if i % 2:  # the bytes may be viewed as another type
            tensors["up.weight"] = tensors["up.weight"].reshape(-1).view(np.float16 if i == 1 else np.int16)
        ck = checkpoint.load(write(tmp_path / str(i), tensors))
        assert ck.info("up.weight").exact and ck["up.weight"].group_size == group
        np.testing.assert_array_equal(dense(ck["up.weight"]), value)
        x = rng.normal(0.3, 1, (3, k)).astype(np.float32)
        np.testing.assert_allclose(x @ ck["up.weight"], x.astype(np.float64) @ value, rtol=1e-4, atol=1e-3)
    # Blocks that no groups of ours divide: an odd number of weights, the last block short.
    tensors, value = bitsandbytes_tensors(rng, 7, 99, 64, kind, nested)
    path = write(tmp_path / "odd", tensors)
    np.testing.assert_array_equal(checkpoint.load(path, inexact="dense")["up.weight"], value)
    with pytest.warns(UserWarning, match="cannot be held exactly"):
        assert checkpoint.load(path)["up.weight"].bits == 8
    with pytest.raises(checkpoint.FormatError, match="groups of 64"):
        _ = checkpoint.load(path, inexact="error")["up.weight"]


def test_damaged_bitsandbytes(rng, tmp_path):
    tensors, _ = bitsandbytes_tensors(rng, 8, 64, 64, "nf4", nested=True)
    base = "up.weight"
    key = f"{base}.quant_state.bitsandbytes__nf4"
    state = json.loads(tensors[key].tobytes())
    changes = [
        ({key: np.zeros(9, np.uint8)}, "not JSON"),
        ({key: state_bytes([1])}, "an object"),
        ({key: state_bytes(state | {"shape": [8, -64]})}, "shape"),
        ({key: state_bytes(state | {"shape": [8, 128]})}, "bytes"),
        ({key: state_bytes(state | {"blocksize": 0})}, "blocksize"),
        ({key: state_bytes(state | {"blocksize": "64"})}, "blocksize"),
        ({key: state_bytes(state | {"nested_offset": None})}, "nested_offset"),
        ({key: state_bytes({k: v for k, v in state.items() if k != "nested_blocksize"})}, "nested_blocksize"),
        ({f"{base}.quant_map": np.ones(15, np.float32)}, "quant_map"),
        ({f"{base}.quant_map": np.full(16, np.nan, np.float32)}, "NaN"),
        ({f"{base}.absmax": np.zeros(7, np.uint8)}, "absmax"),
        ({f"{base}.absmax": np.zeros(8, np.float32)}, "absmax"),
        ({f"{base}.nested_absmax": np.zeros(3, np.float32)}, "nested_absmax"),
        ({f"{base}.nested_quant_map": None}, "nested_quant_map"),
        ({f"{base}.quant_map": None}, "quant_map"),
        ({base: None}, "up.weight"),
    ]
    for i, (change, said) in enumerate(changes):
        damaged = {k: v for k, v in (tensors | change).items() if v is not None}
        with pytest.raises(checkpoint.FormatError, match=said):
            _ = checkpoint.load(write(tmp_path / str(i), damaged))[base]


# --- damaged, hostile and foreign files ---


def test_pickles_are_refused(tmp_path):
    class Boom:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    for name in ("pytorch_model.bin", "model.pt", "model.safetensors"):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).write_bytes(pickle.dumps(Boom()))
        for path in (folder, folder / name):
            with pytest.raises(checkpoint.FormatError, match="pickle|sound"):
                checkpoint.load(path)
    assert not (tmp_path / "ran").exists()


def test_what_is_not_supported_says_so(rng, tmp_path):
    s = scales_of(rng, (4, 1), np.float32)
    int8 = {"x.weight": np.zeros((64, 4), np.int8), "x.SCB": s[:, 0]}
    cases = [
        (int8, None, "x.SCB"),
        (int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "LLM.int8"),
        ({"x.weight": s}, {"quant_method": "fp8"}, "fp8"),
        ({"x.weight": s, "x.weight_scale_inv": s}, None, "x.weight_scale_inv"),
        ({"x.qweight": np.zeros((4, 4), np.int32)}, {"quant_method": "awq"}, "x.scales"),
        ({"x.qweight": np.zeros((4, 4), np.int32)}, {"quant_method": "hqq"}, "x.qweight"),
        ({"x.weight": s}, ["awq"], "object"),
        ({"x.weight": s}, {"quant_method": "gptq", "bits": "4"}, "bits='4'"),
    ]
    for i, (tensors, config, match) in enumerate(cases):
        with pytest.raises(checkpoint.FormatError, match=match):
            checkpoint.load(write(tmp_path / str(i), tensors, config))
    with pytest.raises(FileNotFoundError, match="absent"):
        checkpoint.load(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="no safetensors"):
        (tmp_path / "empty").mkdir()
        checkpoint.load(tmp_path / "empty")
    with pytest.raises(ValueError, match="format="):
        checkpoint.load(tmp_path, format="exl2")
    with pytest.raises(ValueError, match="inexact="):
        checkpoint.load(tmp_path, inexact="maybe")


def test_damaged_values(rng, tmp_path):
    qweight, qzeros, scales, _ = awq_arrays(rng, 64, 32, 32)
    good = {"x.qweight": qweight, "x.qzeros": qzeros, "x.scales": scales}
    bad_scales = scales.copy()
    bad_scales[1, 3] = np.nan
    for i, (change, when) in enumerate(
        [
            ({"x.scales": bad_scales}, "read"),
            ({"x.qzeros": qzeros[:1]}, "read"),
            ({"x.qweight": qweight.astype(np.float32)}, "read"),
            ({"x.scales": scales.astype(np.int32)}, "read"),
            ({"x.scales": scales[:, :16]}, "load"),
            ({"x.scales": np.zeros((0, 32), np.float16)}, "load"),
        ]
    ):
        path = write(tmp_path / str(i), good | change, {"quant_method": "awq"})
        if when == "load":
            with pytest.raises(checkpoint.FormatError, match="x"):
                checkpoint.load(path)
        else:
            ck = checkpoint.load(path)
            with pytest.raises(checkpoint.FormatError, match="x.weight"):
                ck["x.weight"]


def test_own_format_damaged(rng, tmp_path):
    weight = weights(rng)["c.weight"]
    checkpoint.save(tmp_path / "a.safetensors", {"c": weight})
    data = (tmp_path / "a.safetensors").read_bytes()
    tensors = safetensors.load(data)
    header = {"version": 1, "tensors": {"c": {"bits": "4", "k": "128", "n": "64"}}}
    for i, (metadata, change, match) in enumerate(
        [
            ("{", {}, "metadata"),
            ("[]", {}, "metadata"),
            (json.dumps(header | {"version": 2}), {}, "version 2"),
            (json.dumps({"version": 1, "tensors": {"d": {}}}), {}, "d.qvalue"),
            (json.dumps({"version": 1, "tensors": {"c": {"bits": "x"}}}), {}, "bits"),
        ]
    ):
        path = tmp_path / f"{i}.safetensors"
        path.write_bytes(safetensors.save(tensors | change, {"jax_wonly": metadata}))
        with pytest.raises(checkpoint.FormatError, match=match):
            checkpoint.load(path)
    original = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    for change, match in [
        ({"c.permutation": np.zeros(128, np.int32)}, "permutation"),
        ({"c.permutation": np.arange(129, dtype=np.int32)}, "permutation"),
        ({"c.qvalue": tensors["c.qvalue"][:, :1]}, "qw"),
        ({"c.scales": np.full_like(tensors["c.scales"], np.inf)}, "NaN or Inf"),
    ]:
        path = tmp_path / "b.safetensors"
        path.write_bytes(safetensors.save(tensors | change, original))
        with pytest.raises(checkpoint.FormatError, match=match):
            checkpoint.load(path)["c"]


GOOD_GGUF = gguf_bytes(
    [("w", 2, (4, 64), bytes([0, 60, *range(16)] * 8)), ("n", 0, (3,), bytes(12))],
    [("general.alignment", struct.pack("<II", 4, 32)), ("l", struct.pack("<IIQQ", 9, 8, 1, 2) + b"ab")],
)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "cannot be mapped"),
        (b"GGU", "ends"),
        (b"GGML" + bytes(40), "begin"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "metadata"),
        (gguf_bytes([], [("a", struct.pack("<IIQ", 9, 8, 2**62))]), "array elements"),
        (gguf_bytes([], [("a", struct.pack("<IIQ", 9, 4, 2**62))]), "array elements"),
        (gguf_bytes([], [("a", struct.pack("<IQ", 8, 2**40))]), "bytes of a string"),
        (gguf_bytes([], [("a", struct.pack("<I", 99))]), "type 99"),
        (gguf_bytes([], [("a", struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9)]), "too deep"),
        (gguf_bytes([], [("a", struct.pack("<IB", 0, 1))] * 2), "twice"),
        (gguf_bytes([], [("general.alignment", struct.pack("<II", 4, 12))]), "alignment"),
        (gguf_bytes([("w", 2, (4, 48), bytes(300))]), "blocks"),
        (gguf_bytes([("w", 2, (2**40, 64), bytes(300))]), "offset"),
        (gguf_bytes([("w", 77, (4, 64), bytes(300))]), "type 77"),
        (gguf_bytes([("w", 0, (1,) * 5, bytes(4))]), "5 dimensions"),
        (gguf_bytes([("w", 0, (0, 4), bytes(4))]), "shape"),
        (gguf_bytes([("w", 0, (4,), bytes(16))] * 2), "twice"),
        (GOOD_GGUF[:-40], "offset"),
    ],
)
def test_damaged_gguf(tmp_path, data, match):
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with pytest.raises(checkpoint.FormatError, match=match):
        checkpoint.load(path)


def test_gguf_with_infinite_scales(tmp_path):
    (tmp_path / "a.gguf").write_bytes(gguf_bytes([("w", 2, (4, 64), bytes([0, 124, *range(16)] * 8))]))
    with pytest.raises(checkpoint.FormatError, match="NaN or Inf"):
        checkpoint.load(tmp_path / "a.gguf")["w"]


def damage(data: bytes, flips, cut) -> bytes:
    out = bytearray(data)
    for position, value in flips:
        out[position % len(out)] = value
    return bytes(out[: len(out) - cut % len(out)])


FLIPS = st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), min_size=1, max_size=4)


def reads_or_says(path):
    """Reads a whole checkpoint; damage is either told or only changes values."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _, value in checkpoint.load(path).items():
                jax.block_until_ready(value)
    except (ValueError, FileNotFoundError) as error:
        assert "jax_wonly" in str(error)


@settings(max_examples=40)
@given(FLIPS, st.sampled_from([0, 0, 0, 1, 100, 10**4]))
def test_any_damage_to_gguf(tmp_path_factory, flips, cut):
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damage(GOOD_GGUF, [(p % 220, v) for p, v in flips], cut))
    reads_or_says(path)


def good_safetensors() -> bytes:
    qweight, qzeros, scales, _ = awq_arrays(np.random.default_rng(0), 32, 8, 32)
    return safetensors.save({"x.qweight": qweight, "x.qzeros": qzeros, "x.scales": scales, "y": scales})


GOOD_SAFETENSORS = good_safetensors()


@settings(max_examples=40)
@given(FLIPS, st.sampled_from([0, 0, 0, 1, 100, 10**4]))
def test_any_damage_to_safetensors(tmp_path_factory, flips, cut):
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(damage(GOOD_SAFETENSORS, [(p % 340, v) for p, v in flips], cut))
    reads_or_says(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.text(max_size=4) | st.sampled_from(["gemm", "affine", 4, 64]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
KEYS = ("bits", "group_size", "version", "checkpoint_format", "config_groups", "mode", "format", "sym", "x")


@settings(max_examples=40)
@given(st.sampled_from(["awq", "gptq", "compressed-tensors", "mlx", "torchao", "hqq"]), st.data())
def test_any_configuration(tmp_path_factory, format, data):
    config = {key: data.draw(JSON) for key in data.draw(st.sets(st.sampled_from(KEYS), max_size=3))}
    path = tmp_path_factory.getbasetemp() / "sound.safetensors"
    path.write_bytes(GOOD_SAFETENSORS)
    try:
        for _ in checkpoint.load(path, format, config=config).items():
            pass
    except ValueError as error:
        assert "jax_wonly" in str(error)


def test_import_needs_neither_flax_nor_safetensors():
    code = """
import sys
sys.modules["flax"] = sys.modules["safetensors"] = None
import jax_wonly as jw
assert not {"jax_wonly.checkpoint", "jax_wonly.compat"} & set(sys.modules), "imported before they are asked for"
c = jw.checkpoint
assert jw.compat.PermutedTensor is jw.PermutedTensor
for call in (lambda: c.load_into, lambda: c.save("/nonexistent/a", {}), lambda: c.load("/")):
    try:
        call()
    except ImportError as error:
        assert "pip install" in str(error), error
    except FileNotFoundError:
        pass
    else:
        raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
