"""llama.cpp's blocks (GGUF tensors): rows of blocks along the inputs, each with its own scale.

Inside a block of 32 (Q4_0, Q4_1, Q5_0, Q5_1) a byte holds element j in its low and element j + 16 in its high nibble;
the fifth bits are a 32-bit mask. Q8_0 is plain int8. Q4_K, Q5_K and Q6_K are blocks of 256 with 6- or 8-bit scales of
8 or 16 sub-blocks. Scales of sub-blocks are products that float32 holds exactly, so that these weights have float32
scales here.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_wonly._format import bias_of
from jax_wonly._tensor import QuantizedTensor
from jax_wonly._validate import check_array, check_choice
from jax_wonly.compat._codes import nibbles, pack, quantized, unpack


def _half(block, start: int):
    """The float16 at byte ``start``: ``[..., 1]``."""
    return jax.lax.bitcast_convert_type(block[..., start : start + 2], jnp.float16)[..., None]


def _bits_of(mask_bytes):
    """``[..., 8 * n]`` bits of ``[..., n]`` bytes, lowest first."""
    bits = (mask_bytes[..., None] >> np.arange(8, dtype=np.uint8)) & np.uint8(1)
    return bits.reshape(*mask_bytes.shape[:-1], -1)


def _halves(packed):
    """Codes of a block of 32: low nibbles, then high ones."""
    return jnp.concatenate(nibbles(packed), -1)


def _q4_0(block):
    return _halves(block[..., 2:]), _half(block, 0), None


def _q4_1(block):
    return _halves(block[..., 4:]), _half(block, 0), _half(block, 2)


def _q5_0(block):
    return _halves(block[..., 6:]) | (_bits_of(block[..., 2:6]) << np.uint8(4)), _half(block, 0), None


def _q5_1(block):
    codes = _halves(block[..., 8:]) | (_bits_of(block[..., 4:8]) << np.uint8(4))
    return codes, _half(block, 0), _half(block, 2)


def _q8_0(block):
    return block[..., 2:] ^ np.uint8(128), _half(block, 0), None


def _k_scales(block):
    """float32 scales and offsets ``[..., 8]`` of the sub-blocks of Q4_K and Q5_K."""
    s = block[..., 4:16]
    low, high = s[..., :4], s[..., 4:8]
    rest_low, rest_high = nibbles(s[..., 8:])
    six = np.uint8(63)
    scales = jnp.concatenate([low & six, rest_low | ((low >> np.uint8(6)) << np.uint8(4))], -1)
    minima = jnp.concatenate([high & six, rest_high | ((high >> np.uint8(6)) << np.uint8(4))], -1)
    d, d_min = _half(block, 0).astype(jnp.float32), _half(block, 2).astype(jnp.float32)
    return d * scales.astype(jnp.float32), -(d_min * minima.astype(jnp.float32))


def _chunks(packed):
    """Codes of 32-byte chunks: the low nibbles of each, then its high ones."""
    return _halves(packed.reshape(*packed.shape[:-1], -1, 32)).reshape(*packed.shape[:-1], -1)


def _q4_k(block):
    return _chunks(block[..., 16:]), *_k_scales(block)


def _q5_k(block):
    high = (block[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    codes = _chunks(block[..., 48:]) | (high.reshape(*block.shape[:-1], 256) << np.uint8(4))
    return codes, *_k_scales(block)


def _q6_k(block):
    low = _halves(block[..., :128].reshape(*block.shape[:-1], 2, 64))  # runs of 32: low, low, high, high nibbles
    shifts = (2 * np.arange(4, dtype=np.uint8))[:, None]
    high = (block[..., 128:192].reshape(*block.shape[:-1], 2, 1, 32) >> shifts) & np.uint8(3)
    codes = low.reshape(*low.shape[:-1], 4, 32) | (high << np.uint8(4))
    scales = block[..., 192:208].view(np.int8).astype(jnp.float32)
    return codes.reshape(*block.shape[:-1], 256), _half(block, 208).astype(jnp.float32) * scales, None


@dataclass(frozen=True)
class _Kind:
    weights: int
    bytes: int
    bits: int
    group: int
    read: Callable


KINDS = {
    "Q4_0": _Kind(32, 18, 4, 32, _q4_0),
    "Q4_1": _Kind(32, 20, 4, 32, _q4_1),
    "Q5_0": _Kind(32, 22, 5, 32, _q5_0),
    "Q5_1": _Kind(32, 24, 5, 32, _q5_1),
    "Q8_0": _Kind(32, 34, 8, 32, _q8_0),
    "Q4_K": _Kind(256, 144, 4, 32, _q4_k),
    "Q5_K": _Kind(256, 176, 5, 32, _q5_k),
    "Q6_K": _Kind(256, 210, 6, 16, _q6_k),
}


def _fields(blocks, kind: str) -> tuple[jax.Array, jax.Array, jax.Array | None, _Kind]:
    """Codes ``[..., K, N]``, scales and offsets ``[..., K / group, N]``, and the kind."""
    check_choice("kind", kind, KINDS)
    of = KINDS[kind]
    check_array("blocks", blocks, ("uint8",))
    if len(blocks.shape) < 2 or 0 in blocks.shape or blocks.shape[-1] % of.bytes:
        raise ValueError(
            f"jax_wonly: blocks has shape {tuple(blocks.shape)}; accepted for {kind}: [..., N, K / {of.weights} * "
            f"{of.bytes}]."
        )
    return *_read(jnp.asarray(blocks), kind), of


@partial(jax.jit, static_argnames="kind")
def _read(blocks, kind: str):
    of = KINDS[kind]
    fields = of.read(blocks.reshape(*blocks.shape[:-1], -1, of.bytes))
    return [None if a is None else jnp.swapaxes(a.reshape(*blocks.shape[:-1], -1), -1, -2) for a in fields]


def decode(blocks, kind: str) -> QuantizedTensor:
    """The weight of rows of blocks.

    Args:
      blocks: uint8 ``[..., N, K / weights * bytes]``, as a GGUF tensor of shape ``[N, K]`` has them.
      kind: ``"Q4_0"``, ``"Q4_1"``, ``"Q5_0"``, ``"Q5_1"``, ``"Q8_0"``, ``"Q4_K"`` or ``"Q5_K"``. The groups of
        ``"Q6_K"`` are too small; see :func:`dequantize`.

    Returns:
      A :class:`~jax_wonly.QuantizedTensor` ``[..., K, N]`` of the same values in groups of 32, int4 for 4 bits and int8
      for 5 and 8.

    Raises:
      TypeError, ValueError: types or shapes do not fit, or the kind is not one of those.

    Example:
      >>> from jax_wonly.compat import llama_cpp
      >>> blocks = jnp.zeros((64, 128 // 32 * 18), jnp.uint8)
      >>> llama_cpp.decode(blocks, "Q4_0")
      QuantizedTensor(int4[128, 64], group_size=32, symmetric, scales float16, 4.5 KiB)
    """
    codes, scales, offsets, of = _fields(blocks, kind)
    return quantized(codes, scales, offsets=offsets, bits=of.bits, group_size=of.group)


def dequantize(blocks, kind: str) -> jax.Array:
    """The dense weight of rows of blocks, float32 ``[..., K, N]``; arguments as :func:`decode`.

    Args:
      blocks: as there.
      kind: as there, or ``"Q6_K"``.

    Raises:
      TypeError, ValueError: types or shapes do not fit, or the kind is not one of those.

    Example:
      >>> from jax_wonly.compat import llama_cpp
      >>> blocks = jnp.zeros((64, 2 * 210), jnp.uint8)
      >>> llama_cpp.dequantize(blocks, "Q6_K").shape
      (512, 64)
    """
    codes, scales, offsets, of = _fields(blocks, kind)
    return _dense(codes, scales, offsets, of.bits)


@partial(jax.jit, static_argnames="bits")
def _dense(codes, scales, offsets, bits: int):
    grouped = codes.reshape(*scales.shape[:-1], -1, scales.shape[-1]).astype(jnp.float32)
    scales = scales.astype(jnp.float32)[..., None, :]
    if offsets is None:
        values = (grouped - bias_of(bits)) * scales
    else:
        values = grouped * scales + offsets.astype(jnp.float32)[..., None, :]
    return values.reshape(codes.shape)


def encode(qt: QuantizedTensor, kind: str) -> jax.Array:
    """The blocks of a weight that a kind can hold, uint8 ``[..., N, K / 32 * bytes]``; the inverse of :func:`decode`.

    Args:
      qt: float16 scales in groups of a multiple of 32 inputs: symmetric int4 for ``"Q4_0"``, int4 with float16 offsets
        for ``"Q4_1"``, symmetric int8 for ``"Q8_0"``.
      kind: one of these.

    Raises:
      ValueError: the kind cannot hold the weight as it is.

    Example:
      >>> from jax_wonly.compat import llama_cpp
      >>> qt = jw.quantize(jnp.ones((128, 64), jnp.float16), bits=8, group_size=32)
      >>> llama_cpp.encode(qt, "Q8_0").shape
      (64, 136)
    """
    wanted = {"Q4_0": (4, False), "Q4_1": (4, True), "Q8_0": (8, False)}
    check_choice("kind", kind, wanted)
    bits, has_offsets = wanted[kind]
    fields = [qt.scales] if qt.offsets is None else [qt.scales, qt.offsets]
    if (
        qt.bits != bits
        or qt.zeros is not None
        or qt.table is not None
        or (qt.offsets is not None) != has_offsets
        or any(a.dtype != jnp.float16 for a in fields)
        or qt.group_size % 32
    ):
        raise ValueError(
            f"jax_wonly: the weight is {qt!r}; accepted for {kind}: int{bits}, "
            f"{'offsets' if has_offsets else 'symmetric'}, float16 scales, groups of a multiple of 32 inputs."
        )
    codes = jnp.swapaxes(unpack(qt.qvalue, qt.bits, qt.k, qt.n), -1, -2)
    codes = codes.reshape(*codes.shape[:-1], -1, 32)
    fields = [
        jnp.repeat(jnp.swapaxes(jax.lax.bitcast_convert_type(a, jnp.uint8), -2, -3), qt.group_size // 32, axis=-2)
        for a in fields
    ]
    packed = codes ^ np.uint8(128) if bits == 8 else codes[..., :16] | (codes[..., 16:] << np.uint8(4))
    blocks = jnp.concatenate([*fields, packed], -1)
    return blocks.reshape(*blocks.shape[:-2], -1)


def undo_rope_order(weight, heads: int):
    """The query or key weight of a LLaMA-family GGUF file with its outputs in the order of the original model.

    llama.cpp's conversion puts the two halves of each head, which rotary embeddings combine, next to each other. Use it
    on ``attn_q`` with the number of heads, and on ``attn_k`` with that of key heads, where
    ``metadata["general.architecture"]`` is ``"llama"``; other architectures are stored as they are.

    Args:
      weight: a :class:`~jax_wonly.QuantizedTensor` ``[..., K, N]``, or a dense array ``[K, N]``.
      heads: heads among the N outputs.

    Raises:
      ValueError: N is not a multiple of ``2 * heads``.

    Example:
      >>> from jax_wonly.compat import llama_cpp
      >>> llama_cpp.undo_rope_order(jnp.arange(8.0)[None], heads=2)
      Array([[0., 2., 1., 3., 4., 6., 5., 7.]], dtype=float32)
    """
    n = weight.shape[-1]
    if heads < 1 or n % (2 * heads):
        raise ValueError(f"jax_wonly: heads={heads} does not divide N={n} into halves of heads.")
    order = np.arange(n).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    if not isinstance(weight, QuantizedTensor):
        return jnp.take(weight, order, axis=-1)
    codes = jnp.take(unpack(weight.qvalue, weight.bits, weight.k, weight.n), order, axis=-1)
    fields = {
        name: None if a is None else jnp.take(a, order, axis=-1)
        for name in ("scales", "zeros", "offsets")
        for a in (getattr(weight, name),)
    }
    return dataclasses.replace(weight, qvalue=pack(codes, weight.bits), **fields)
