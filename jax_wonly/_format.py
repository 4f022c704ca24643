"""The packed weight format, version 1: the Python twin of ``ffi/layout.h`` (``docs/format.md`` is the prose).

A weight ``W[K, N]`` (inputs x outputs) of unsigned codes is stored as ``uint32[..., ceil(N / 64), ceil(K / tile_k),
512]``, where a tile spans ``tile_k`` = 64 inputs (int4) or 32 (int8). Inside a tile, with ``n = 16 atom + 8 high + g``
and ``k`` as below, the code lies in word ``128 atom + 4 (4g + t) + 2 half + high``:

- int4: ``k = 32 half + 8 pair + 2t + odd``, nibble ``pair + 4 odd`` of the word;
- int8: ``k = 16 half + 8 pair + 2t + odd``, byte ``pair + 2 odd`` of the word.
"""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

FORMAT_VERSION = 1
TILE_N = 64
TILE_WORDS = 512
BITS = (4, 8)
GROUP_SIZES = (32, 64, 128, 256)
FLOATS = ("float16", "bfloat16", "float32")

# The axes of one tile grid, from codes [K, N] to words and back: k = (Kt, half, pair, t, odd), n = (Nt, atom, high, g).
_CODES_TO_WORDS = (5, 0, 6, 8, 3, 1, 7, 4, 2)  # -> (Nt, Kt, atom, g, t, half, high, odd, pair)
_WORDS_TO_CODES = (1, 5, 8, 4, 7, 0, 2, 6, 3)


def tile_k(bits: int) -> int:
    """Inputs that one tile spans."""
    return 64 if bits == 4 else 32


def bias_of(bits: int) -> int:
    """The code that stands for weight zero under symmetric quantization, and for padding: 8 or 128."""
    return 1 << (bits - 1)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def tiles(bits: int, k: int, n: int) -> tuple[int, int]:
    """Tiles along the outputs and along the inputs of a ``[k, n]`` weight."""
    return ceil_div(n, TILE_N), ceil_div(k, tile_k(bits))


def packed_shape(bits: int, k: int, n: int) -> tuple[int, int, int]:
    """Shape of the packed array of a ``[k, n]`` weight, without leading axes."""
    return (*tiles(bits, k, n), TILE_WORDS)


def check_array(name: str, value, dtypes: tuple[str, ...] = FLOATS):
    """``value`` if it is an array of one of the dtypes."""
    # Quantized weights have shape and dtype too, and like others that are no arrays they opt out of NumPy's functions.
    is_array = hasattr(value, "dtype") and hasattr(value, "shape") and getattr(value, "__array_ufunc__", 1) is not None
    if not is_array or isinstance(value, jax.ShapeDtypeStruct):
        raise TypeError(
            f"jax_wonly: {name} is a {type(value).__name__}; accepted: an array of dtype {', '.join(dtypes)}."
        )
    if str(value.dtype) not in dtypes:
        raise TypeError(f"jax_wonly: {name} has dtype {value.dtype}; accepted: {', '.join(dtypes)}.")
    return value


def check_bits(bits: object) -> int:
    if isinstance(bits, bool) or not isinstance(bits, (int, np.integer)) or bits not in BITS:
        raise ValueError(f"jax_wonly: bits={bits!r} is not supported; accepted: 4, 8.")
    return int(bits)


def check_size(name: str, value: Any) -> Any:
    """A positive whole number, or one that is not known yet (jax.export's symbolic shapes)."""
    if jax.export.is_symbolic_dim(value):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"jax_wonly: {name}={value!r} is not an integer; accepted: integers from 1 on.")
    if value < 1:
        raise ValueError(f"jax_wonly: {name}={value!r} is not positive; accepted: integers from 1 on.")
    return int(value)


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Packs unsigned codes.

    Args:
      codes: uint8 ``[..., K, N]``, each below ``2**bits`` (higher bits are ignored). Weight zero is 8 (int4) or 128
        (int8) unless zeros or offsets go with it.
      bits: 4 or 8.

    Returns:
      uint32 ``[..., ceil(N / 64), ceil(K / tile_k), 512]``; padding holds the code 8 or 128.

    Raises:
      TypeError: ``codes`` is not uint8.
      ValueError: ``bits`` is not 4 or 8, or ``codes`` has fewer than two axes or no element.

    Example:
      >>> codes = jnp.arange(128 * 64, dtype=jnp.uint8).reshape(128, 64) % 16
      >>> packed = jw.pack(codes, bits=4)
      >>> packed.shape, packed.dtype
      ((1, 2, 512), dtype('uint32'))
    """
    bits = check_bits(bits)
    check_array("codes", codes, ("uint8",))
    codes = jnp.asarray(codes)
    if codes.ndim < 2 or 0 in codes.shape[-2:]:
        raise ValueError(f"jax_wonly: codes has shape {codes.shape}; accepted: [..., K, N] with K, N >= 1.")
    return pack_with(jnp, codes, bits)


def pack_with(xp: Any, codes, bits: int):
    """As :func:`pack`, by the operations of ``jnp`` or of NumPy, whose arrays ``codes`` then is."""
    *lead, k, n = codes.shape
    nt, kt = tiles(bits, k, n)
    pad = [(0, 0)] * len(lead) + [(0, kt * tile_k(bits) - k), (0, nt * TILE_N - n)]
    codes = xp.pad(codes, pad, constant_values=bias_of(bits))
    pairs = 16 // bits
    codes = codes.reshape(*lead, kt, 2, pairs, 4, 2, nt, 4, 2, 8)
    codes = codes.transpose(*range(len(lead)), *(a + len(lead) for a in _CODES_TO_WORDS))
    shifts = (xp.arange(2 * pairs, dtype=xp.uint32) * bits).reshape(2, pairs)
    words = (codes.astype(xp.uint32) & ((1 << bits) - 1)) << shifts
    return words.sum((-2, -1), dtype=xp.uint32).reshape(*lead, nt, kt, TILE_WORDS)


def unpack(qw: jax.Array, bits: int, k: int, n: int) -> jax.Array:
    """The unsigned codes, uint8 ``[..., k, n]``, of a packed array; the inverse of :func:`pack`.

    Raises:
      TypeError: ``qw`` is not uint32.
      ValueError: ``bits`` is not 4 or 8, or ``qw`` is not the packed shape of a ``[k, n]`` weight.

    Example:
      >>> codes = jnp.arange(128 * 64, dtype=jnp.uint8).reshape(128, 64) % 16
      >>> bool((jw.unpack(jw.pack(codes, 4), 4, 128, 64) == codes).all())
      True
    """
    bits = check_bits(bits)
    check_array("qw", qw, ("uint32",))
    qw = jnp.asarray(qw)
    check_packed(qw, bits, check_size("k", k), check_size("n", n))
    lead = qw.shape[:-3]
    nt, kt = qw.shape[-3:-1]
    pairs = 16 // bits
    shifts = (jnp.arange(2 * pairs, dtype=jnp.uint32) * bits).reshape(2, pairs)
    words = qw.reshape(*lead, nt, kt, 4, 8, 4, 2, 2, 1, 1)
    codes = ((words >> shifts) & ((1 << bits) - 1)).astype(jnp.uint8)
    codes = codes.transpose(*range(len(lead)), *(a + len(lead) for a in _WORDS_TO_CODES))
    return codes.reshape(*lead, kt * tile_k(bits), nt * TILE_N)[..., :k, :n]


def check_packed(qw, bits: int, k: int, n: int, name: str = "qw") -> None:
    """Raises unless ``qw`` is ``uint32[..., *packed_shape(bits, k, n)]``."""
    if qw.dtype != jnp.uint32:
        raise TypeError(f"jax_wonly: {name} has dtype {qw.dtype}; accepted: uint32 (the packed format).")
    expected = packed_shape(bits, k, n)
    if qw.ndim < 3 or tuple(qw.shape[-3:]) != expected:
        raise ValueError(
            f"jax_wonly: {name} has shape {tuple(qw.shape)}; accepted: [..., {', '.join(map(str, expected))}] for an "
            f"int{bits} weight with K={k}, N={n} (packed format version {FORMAT_VERSION})."
        )
