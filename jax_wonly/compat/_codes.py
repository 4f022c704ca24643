"""What every format's conversion is made of: bit fields, group sizes, and the way into and out of a QuantizedTensor."""

import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_wonly import _format
from jax_wonly._format import GROUP_SIZES, bias_of
from jax_wonly._permuted import PermutedTensor
from jax_wonly._tensor import QuantizedTensor
from jax_wonly._validate import FLOATS, check_array

# Compiled as a whole: codes of one byte each, and words of four, are never all in memory.
pack = partial(jax.jit, static_argnames="bits")(_format.pack)
unpack = partial(jax.jit, static_argnames=("bits", "k", "n"))(_format.unpack)


class InexpressibleError(ValueError):
    """The packed format has no place for such a weight (its groups are too small, or go another way)."""


def as_words(name: str, words) -> jax.Array:
    """An array of int32 or uint32 words as uint32.

    Raises:
      TypeError: it holds anything else.
    """
    check_array(name, words, ("int32", "uint32"))
    words = jnp.asarray(words)
    return words if words.dtype == jnp.uint32 else jax.lax.bitcast_convert_type(words, jnp.uint32)


def check_shape(name: str, value, shape: tuple[int | None, ...], why: str = "") -> None:
    """Raises unless ``value`` is an array whose last axes are ``shape``; None stands for any size."""
    if not hasattr(value, "shape"):
        raise TypeError(f"jax_wonly: {name} is a {type(value).__name__}; accepted: an array.")
    found = tuple(value.shape)
    tail = found[len(found) - len(shape) :]
    if len(found) < len(shape) or any(e is not None and e != f for e, f in zip(shape, tail, strict=True)):
        accepted = ", ".join("*" if e is None else str(e) for e in shape)
        raise ValueError(f"jax_wonly: {name} has shape {found}; accepted: [..., {accepted}]{why and f' ({why})'}.")


def check_bits_in(bits: object, accepted: tuple[int, ...]) -> int:
    if isinstance(bits, bool) or not isinstance(bits, (int, np.integer)) or bits not in accepted:
        raise ValueError(f"jax_wonly: bits={bits!r} is not supported; accepted: {', '.join(map(str, accepted))}.")
    return int(bits)


def check_sizes(name: str, value: Any) -> tuple[int, int]:
    """The sizes ``(N, K)`` of a weight.

    Raises:
      TypeError: ``value`` is no pair of integers.
    """
    try:
        n, k = (operator.index(size) for size in value)
    except (TypeError, ValueError):
        raise TypeError(f"jax_wonly: {name}={value!r} is no pair of integers; accepted: (N, K).") from None
    return n, k


def words_for(count: int, bits: int) -> int:
    """32-bit words that ``count`` fields of ``bits`` bits take."""
    return -(-count * bits // 32)


@partial(jax.jit, static_argnames=("bits", "count", "axis"))
def unpack_bits(words: jax.Array, bits: int, count: int, axis: int = -1) -> jax.Array:
    """The first ``count`` fields along ``axis`` of a bit stream in uint32 words, lowest bits first, as uint8.

    Fields may straddle two words, as those of 3, 5 and 6 bits do.
    """
    words = jnp.moveaxis(words, axis, -1)
    mask = np.uint32((1 << bits) - 1)
    if 32 % bits == 0:
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        fields = (words[..., None] >> shifts) & mask
        fields = fields.reshape(*words.shape[:-1], words.shape[-1] * len(shifts))[..., :count]
    else:
        start = np.arange(count) * bits
        word, shift = start // 32, (start % 32).astype(np.uint32)
        following = np.minimum(word + 1, words.shape[-1] - 1)
        # A shift by 32 is undefined; a field that starts its word needs nothing of the next.
        high = jnp.where(shift > 0, words[..., following] << ((32 - shift) % 32), 0)
        fields = ((words[..., word] >> shift) | high) & mask
    return jnp.moveaxis(fields.astype(jnp.uint8), -1, axis)


@partial(jax.jit, static_argnames=("bits", "axis"))
def pack_bits(codes: jax.Array, bits: int, axis: int = -1) -> jax.Array:
    """The inverse of :func:`unpack_bits` for fields that do not straddle words; the last word is filled up with 0."""
    per_word = 32 // bits
    codes = jnp.moveaxis(codes, axis, -1)
    codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per_word)])
    codes = codes.reshape(*codes.shape[:-1], -1, per_word).astype(jnp.uint32)
    words = (codes << np.arange(0, 32, bits, dtype=np.uint32)).sum(-1, dtype=jnp.uint32)
    return jnp.moveaxis(words, -1, axis)


@jax.jit
def nibbles(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The low and the high four bits of uint8 values."""
    return values & np.uint8(15), values >> np.uint8(4)


def supported_group(group_size: int, k: int) -> int:
    """The largest group size of ours into which groups of ``group_size`` inputs (the last one may be short) split."""
    if group_size >= k:
        return k
    fitting = [g for g in GROUP_SIZES if group_size % g == 0 and k % g == 0]
    if not fitting:
        raise InexpressibleError(
            f"jax_wonly: group_size={group_size} with K={k} does not split into groups of "
            f"{', '.join(map(str, GROUP_SIZES))} inputs."
        )
    return fitting[-1]


def quantized(
    codes: jax.Array, scales: jax.Array, zeros=None, offsets=None, *, bits: int, group_size: int
) -> QuantizedTensor:
    """The QuantizedTensor of unsigned ``bits``-bit codes ``[..., K, N]`` with one scale, zero or offset for each
    ``group_size`` inputs and each output; with neither zeros nor offsets the code ``2**(bits - 1)`` is weight zero.

    Codes of other than 4 or 8 bits are kept in the next larger of them, and groups larger than ours are split: neither
    changes a value.

    Raises:
      InexpressibleError: the groups cannot be split into ours.
      TypeError, ValueError: types or shapes do not fit.
    """
    check_array("scales", scales)
    *_, k, n = codes.shape
    if k < 1 or n < 1 or group_size < 1:
        raise ValueError(f"jax_wonly: K={k}, N={n} in groups of {group_size}; accepted: at least 1 each.")
    groups = -(-k // group_size)
    for name, value in (("scales", scales), ("zeros", zeros), ("offsets", offsets)):
        if value is not None:
            check_array(name, value, (("uint8", *FLOATS) if name == "zeros" else FLOATS))
            check_shape(name, value, (groups, n), f"group_size {group_size}, K={k}, N={n}")
    split = supported_group(group_size, k)

    def expand(value: Any):
        if value is None or (split == group_size and k % group_size == 0) or split == k:
            return value
        return jnp.take(value, np.arange(0, k, split) // group_size, axis=-2)

    wide = 4 if bits <= 4 else 8
    if zeros is None and offsets is None and bits != wide:
        codes = codes + np.uint8(bias_of(wide) - bias_of(bits))
    return QuantizedTensor(
        pack(codes, wide), expand(jnp.asarray(scales)), expand(zeros), expand(offsets), bits=wide, k=k, n=n
    )


def without_midpoint_zeros(zeros, bits: int):
    """``zeros``, or None where they are concrete and all the code that symmetric quantization gives to weight zero."""
    if isinstance(zeros, Tracer):
        return zeros
    return None if bool((np.asarray(zeros) == bias_of(bits)).all()) else zeros


def codes_and_zeros(qt: QuantizedTensor, what: str) -> tuple[jax.Array, jax.Array]:
    """The unsigned codes ``[..., K, N]`` and uint8 zeros ``[..., K / group_size, N]`` of a weight.

    Raises:
      ValueError: the weight has floating zeros, offsets or a table, which ``what`` cannot store.
    """
    if not isinstance(qt, QuantizedTensor):
        raise TypeError(f"jax_wonly: qt is a {type(qt).__name__}; accepted: a QuantizedTensor.")
    if qt.offsets is not None or qt.table is not None or (qt.zeros is not None and qt.zeros.dtype != jnp.uint8):
        kind = "offsets" if qt.offsets is not None else "a table" if qt.table is not None else "floating zeros"
        raise ValueError(f"jax_wonly: the weight has {kind}; accepted for {what}: symmetric weights or integer zeros.")
    codes = unpack(qt.qvalue, qt.bits, qt.k, qt.n)
    zeros = qt.zeros
    if zeros is None:
        zeros = jnp.full(qt.scales.shape, bias_of(qt.bits), jnp.uint8)
    return codes, zeros


def quantized_by_index(
    codes: jax.Array, scales: jax.Array, zeros, g_idx, *, bits: int, group_size: int | None
) -> QuantizedTensor | PermutedTensor:
    """:func:`quantized` of codes ``[..., K, N]`` whose input ``k`` is in group ``g_idx[k]``; None: successive inputs.

    Raises:
      TypeError, ValueError: as :func:`quantized` and :func:`act_order`.
    """
    permutation, group_size = act_order(g_idx, codes.shape[-2], scales.shape[-2], group_size)
    if permutation is None:
        return quantized(codes, scales, zeros, bits=bits, group_size=group_size)
    codes = jnp.take(codes, permutation, axis=-2)
    weight = quantized(codes, scales, zeros, bits=bits, group_size=group_size)
    return PermutedTensor(weight, jnp.asarray(permutation))


def in_order(
    qt: QuantizedTensor | PermutedTensor, what: str
) -> tuple[QuantizedTensor, jax.Array, jax.Array, jax.Array]:
    """The weight as it is stored, then its codes ``[..., K, N]`` and groups int32 ``[K]`` by input, and uint8 zeros.

    Raises:
      TypeError, ValueError: as :func:`codes_and_zeros`.
    """
    weight = qt.weight if isinstance(qt, PermutedTensor) else qt
    codes, zeros = codes_and_zeros(weight, what)
    g_idx = jnp.arange(weight.k, dtype=jnp.int32) // weight.group_size
    if isinstance(qt, PermutedTensor):
        order = jnp.argsort(qt.permutation)
        codes, g_idx = jnp.take(codes, order, axis=-2), jnp.take(g_idx, order)
    return weight, codes, g_idx, zeros


def act_order(g_idx, k: int, groups: int, group_size: int | None) -> tuple[np.ndarray | None, int]:
    """``(permutation, group_size)`` of a weight whose input ``k`` is in group ``g_idx[k]``.

    The permutation makes the groups contiguous, and is None where they are so already.

    Raises:
      TypeError: ``g_idx`` is traced.
      ValueError: it is not ``[K]`` groups, or does not give every group ``group_size`` inputs.
    """
    if isinstance(g_idx, Tracer):
        raise TypeError("jax_wonly: g_idx is traced, and the result depends on its values; accepted: an array.")
    if k < 1 or groups < 1:
        raise ValueError(f"jax_wonly: K={k} in {groups} groups; accepted: at least 1 each.")
    expected = min(group_size or -(-k // groups), k)
    if g_idx is None:
        return None, expected
    g_idx = np.asarray(g_idx)
    if g_idx.shape != (k,) or g_idx.dtype.kind not in "iu":
        raise ValueError(f"jax_wonly: g_idx is {g_idx.dtype}{list(g_idx.shape)}; accepted: int32 [{k}].")
    if g_idx.min() < 0 or g_idx.max() >= groups:
        raise ValueError(
            f"jax_wonly: g_idx holds groups from {g_idx.min()} to {g_idx.max()}; accepted: 0 to {groups - 1}."
        )
    sizes = np.bincount(g_idx, minlength=groups)
    if group_size is None and (np.diff(g_idx) >= 0).all():
        expected = int(sizes[0])  # the last group may be short, so that K and the number of groups do not tell
    if (g_idx == np.arange(k) // expected).all():
        return None, expected
    if (sizes != expected).any():
        raise ValueError(
            f"jax_wonly: g_idx gives its groups between {sizes.min()} and {sizes.max()} inputs; accepted: {expected} "
            "to each."
        )
    return np.argsort(g_idx, kind="stable").astype(np.int32), expected
