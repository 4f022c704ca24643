"""Arrays as other systems store them, made apart from the package, with the weights that they stand for."""

import jax.numpy as jnp
import numpy as np

from jax_wonly.compat import llama_cpp


def grouped(a, group_size, k):
    return np.asarray(a, np.float32)[np.arange(k) // group_size]


def fields_to_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """A stream of bits along the last axis, lowest first, through Python's integers."""
    flat = codes.reshape(-1, codes.shape[-1])
    words = -(-codes.shape[-1] * bits // 32)
    out = np.zeros((len(flat), words), np.uint32)
    for i, row in enumerate(flat):
        stream = sum(int(q) << (bits * j) for j, q in enumerate(row))
        out[i] = [(stream >> (32 * w)) & 0xFFFFFFFF for w in range(words)]
    return out.reshape(*codes.shape[:-1], words)


def codes_of(rng, shape, bits):
    """Random codes that hold both extremes."""
    codes = rng.integers(0, 2**bits, shape, dtype=np.uint8)
    codes.flat[:2] = 0, 2**bits - 1
    return codes


def scales_of(rng, shape, dtype=np.float16):
    return (rng.uniform(0.01, 0.2, shape) * rng.choice([-1, 1], shape)).astype(dtype)


def dense(qt, dtype=jnp.float32) -> np.ndarray:
    return np.asarray(qt.dequantize(dtype))


def awq_arrays(rng, k, n, group_size):
    q, z = codes_of(rng, (k, n), 4), codes_of(rng, (k // group_size, n), 4)
    s = scales_of(rng, z.shape)

    def pack(codes):
        words = np.zeros((codes.shape[0], n // 8), np.uint32)
        for c in range(n // 8):
            for i, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                words[:, c] |= codes[:, 8 * c + column].astype(np.uint32) << np.uint32(4 * i)
        return words.view(np.int32)

    value = (q.astype(np.float32) - grouped(z, group_size, k)) * grouped(s, group_size, k)
    return pack(q), pack(z), s, value


def gptq_arrays(rng, k, n, group_size, bits, version, act_order):
    groups = k // group_size
    q, z = codes_of(rng, (k, n), bits), codes_of(rng, (groups, n), bits)
    s = scales_of(rng, z.shape)
    g_idx = (np.arange(k) // group_size).astype(np.int32)
    if act_order:
        g_idx = rng.permutation(g_idx)
    stored = z if version == 2 else ((z.astype(int) - 1) % 2**bits).astype(np.uint8)
    value = (q.astype(np.float32) - z[g_idx]) * s.astype(np.float32)[g_idx]
    qweight = fields_to_words(q.T, bits).T.copy().view(np.int32)
    return qweight, fields_to_words(stored, bits).view(np.int32), s, g_idx, value


def block_bytes(rng, kind, n, k):
    """Random blocks with sound float16 fields."""
    of = llama_cpp.KINDS[kind]
    blocks = rng.integers(0, 256, (n, k // of.weights, of.bytes), dtype=np.uint8)
    halves = {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q6_K": (208,)}.get(kind, (0, 2))
    for start in halves:
        d = scales_of(rng, blocks.shape[:2])
        blocks[..., start : start + 2] = d[..., None].view(np.uint8)
    return blocks.reshape(n, -1)
