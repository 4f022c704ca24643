"""Sound weights of every safetensors format with something wrong: each is read as its header says, or told."""

import json
import os
import warnings

import ml_dtypes
import numpy as np
import pytest

safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")

from jax_wonly import checkpoint  # noqa: E402

CASES = int(os.environ.get("JAX_WONLY_FUZZ_CASES", "12"))  # of each format
FLOATS = (np.float16, np.float32, ml_dtypes.bfloat16)
DTYPES = (*FLOATS, np.int8, np.uint8, np.int32, np.uint32, np.int64, np.float64, np.bool_)


def sound(rng, format: str):
    """Tensors by suffix, and a configuration."""
    n, k = int(rng.choice([8, 32])), int(rng.choice([32, 128, 224]))  # few, for each is compiled
    size = int(rng.choice([16, 32, 64, k]))
    groups = -(-k // size)
    bits = int(rng.choice({"gptq": (2, 3, 4, 8), "mlx": (2, 3, 4, 5, 6, 8), "awq": (4,)}.get(format, (1, 2, 3, 4, 8))))

    def words(*shape, dtype=np.int32):
        return rng.integers(0, 2**31, shape).astype(dtype)

    def floats(*shape):
        return rng.normal(size=shape).astype(FLOATS[rng.integers(3)])

    g_idx = (np.arange(k) // size).astype(np.int32)
    if rng.random() < 0.5:
        g_idx = rng.permutation(g_idx)
    if format == "awq":
        tensors = {".qweight": words(k, n // 8), ".qzeros": words(groups, n // 8), ".scales": floats(groups, n)}
    elif format == "gptq":
        tensors = {".qweight": words(-(-k * bits // 32), n), ".qzeros": words(groups, -(-n * bits // 32))}
        tensors |= {".scales": floats(groups, n), ".g_idx": g_idx}
    elif format == "pack-quantized":
        tensors = {".weight_packed": words(n, -(-k * bits // 32)), ".weight_scale": floats(n, groups)}
        tensors |= {".weight_shape": np.array([n, k]), ".weight_zero_point": words(-(-n * bits // 32), groups)}
        tensors |= {".weight_g_idx": g_idx}
    elif format == "int-quantized":
        tensors = {".weight": words(n, k, dtype=np.int8), ".weight_scale": floats(n, groups)}
        tensors |= {".weight_zero_point": words(n, groups, dtype=np.int8)}
    elif format == "hqq":
        size = min(size, k)
        rows = n * k // size if k % size == 0 else n
        parts = {1: 8, 2: 4, 3: 10, 4: 2}.get(bits, 1)
        tensors = {".W_q": words(-(-rows // parts), size, dtype=np.int32 if bits == 3 else np.uint8)}
        tensors |= {".scale": floats(rows, 1), ".zero": floats(rows, 1), ".shape": np.array([n, k], np.int32)}
        for name, value in ((".nbits", bits), (".group_size", size), (".axis", 1)):
            tensors[name] = np.array(value, np.int32)
    elif format == "mlx":
        tensors = {".weight": words(n, k * bits // 32, dtype=np.uint32)}
        tensors |= {".scales": floats(n, groups), ".biases": floats(n, groups)}
    elif format == "torchao":
        tensors = {":qdata": words(n, k // 2, dtype=np.int8), ":scale": floats(groups, n)}
        tensors |= {":zero_point": floats(groups, n)}
    else:
        tensors = {".qvalue": words(1, -(-k // 64), 512, dtype=np.uint32), ".scales": floats(groups, n)}
        tensors |= {".zeros": words(groups, n, dtype=np.uint8), ".permutation": rng.permutation(k).astype(np.int32)}
    header = {"format": "jax_wonly", "format_version": "1", "bits": 4, "k": k, "n": n}
    return tensors, {"bits": bits, "group_size": size}, header


def damaged(rng, tensors, config, header) -> None:
    for _ in range(rng.integers(3)):
        kind = rng.integers(9)
        if kind == 0:
            config[str(rng.choice(["bits", "group_size"]))] = [0, -1, 5, 10**20, None, "4", 1.5][rng.integers(7)]
            continue
        if kind == 1:
            header[str(rng.choice(["bits", "k", "n"]))] = [0, -1, 8, 64, 10**20, "x", None][rng.integers(7)]
            continue
        name = str(rng.choice(list(tensors)))
        value = tensors[name]
        if kind == 2 and len(tensors) > 1:
            del tensors[name]
        elif kind == 3:
            tensors[name] = value[tuple(slice(rng.integers(2), [None, -1, 1][rng.integers(3)]) for _ in value.shape)]
        elif kind == 4:
            tensors[name] = value.reshape(-1) if rng.random() < 0.5 else value[None]
        elif kind == 5:
            with np.errstate(all="ignore"):
                tensors[name] = value.astype(DTYPES[rng.integers(len(DTYPES))])
        elif kind == 6:
            tensors[name] = value[..., :0] if value.ndim else value
        elif value.size:
            tensors[name] = value = value.copy()
            wrong = [0, 1, 3, 5, 100, np.iinfo(value.dtype).max] if value.dtype.kind in "iu" else [np.nan, np.inf, 0]
            value.reshape(-1)[rng.integers(value.size)] = wrong[rng.integers(len(wrong))]


@pytest.mark.parametrize(
    "format", ["awq", "gptq", "pack-quantized", "int-quantized", "hqq", "mlx", "torchao", "jax_wonly"]
)
def test_damaged_weights(rng, tmp_path, format):
    path = tmp_path / "a.safetensors"
    read = 0
    for i in range(CASES):
        tensors, config, header = sound(rng, format)
        if i >= 6:
            damaged(rng, tensors, config, header)
        metadata = (
            {"jax_wonly": json.dumps({"version": 1, "tensors": {"x": header}})} if format == "jax_wonly" else None
        )
        path.write_bytes(safetensors.save({"x" + s: np.ascontiguousarray(v) for s, v in tensors.items()}, metadata))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                ck = checkpoint.load(path, "compressed-tensors" if "quantized" in format else format, config=config)
                for name in ck:
                    assert tuple(ck[name].shape) == tuple(ck.info(name).shape)
                    read += ck.info(name).bits is not None
            except checkpoint.FormatError:
                pass
    assert read, "no case was sound"
