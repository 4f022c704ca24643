"""FasterTransformer's weights for its mixed GEMM: interleaved and biased int4 and int8 codes.

Made in four steps, which are one permutation here: rows are permuted so that a thread's ``ldmatrix`` holds what its MMA
needs, the matrix becomes column major, 64 rows at a time of 2 (int8) or 4 (int4) columns are interleaved so that a
128-byte line is full, and codes get a bias of 128 or 8 and an order inside each 32-bit register that suits the
conversion to float16 (``prmt`` and ``sub`` with 0x6480, ``lop3`` with 0x6400). For architectures before 75 the matrix
stays row major, and only the bias and the order inside the registers, then along the columns, remain.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_wonly._format import check_bits, check_size
from jax_wonly._validate import check_array, check_choice
from jax_wonly.compat._codes import nibbles, pack, unpack

ARCHS = (70, 75, 80, 86, 89, 90)
_ROWS = 64  # of a column that follow each other


def _check(bits: int, k: int, n: int, arch: int) -> int:
    bits = check_bits(bits)
    check_choice("arch", arch, ARCHS)
    of_k, of_n = (1, 32 // bits) if arch < 75 else (_ROWS, 16 // bits)
    if k < 1 or n < 1 or k % of_k or n % of_n:
        raise ValueError(
            f"jax_wonly: K={k}, N={n} cannot be laid out for int{bits} and arch={arch}; accepted: K a multiple of "
            f"{of_k}, N a multiple of {of_n}."
        )
    return bits


def pack_bytes(codes, bits: int, arch: int = 80) -> jax.Array:
    """Lays out codes as FasterTransformer's ``preprocess_weights_for_mixed_gemm`` does.

    Args:
      codes: unsigned (biased) codes, uint8 ``[..., K, N]``: ``q + 8`` or ``q + 128``.
      bits: 4 or 8.
      arch: 75 to 90 (one layout), or 70.

    Returns:
      int8 ``[..., K, N]``, or ``[..., K, N / 2]`` for 4 bits: the bytes in their order in memory.

    Raises:
      TypeError: ``codes`` is not uint8.
      ValueError: K or N does not fill whole tiles, or bits or arch is not one of those accepted.

    Example:
      >>> from jax_wonly.compat import faster_transformer
      >>> faster_transformer.pack_bytes(jnp.full((128, 64), 8, jnp.uint8), bits=4).shape
      (128, 32)
    """
    check_array("codes", codes, ("uint8",))
    k, n = codes.shape[-2:] if len(codes.shape) > 1 else (0, 0)
    return _pack_bytes(jnp.asarray(codes), _check(bits, k, n, arch), arch)


@partial(jax.jit, static_argnames=("bits", "arch"))
def _pack_bytes(codes, bits: int, arch: int):
    *lead, k, n = codes.shape
    r = len(lead)
    axes = range(r)
    if arch < 75:
        codes = codes.reshape(*lead, k, -1, 16 // bits, 2).swapaxes(-1, -2)
    else:
        columns, a = 16 // bits, 16 // bits
        # Row 8a + 2r + o of a block goes to place (r, o, a): 0 8 16 24 1 9 17 25 2 10 ... for int4.
        codes = codes.reshape(*lead, k // _ROWS, _ROWS // (8 * a), a, 4, 2, n // columns, columns)
        codes = codes.transpose(*axes, *(r + i for i in (5, 0, 6, 1, 3, 4, 2)))
    codes = codes.reshape(*lead, -1)
    if bits == 4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    return codes.view(np.int8).reshape(*lead, k, n * bits // 8)


def unpack_bytes(packed, bits: int, k: int, n: int, arch: int = 80) -> jax.Array:
    """The inverse of :func:`pack_bytes`: unsigned codes, uint8 ``[..., k, n]``.

    Args:
      packed: int8 or uint8, any two last axes with ``k * n * bits / 8`` bytes.
      bits, k, n, arch: as they were packed.

    Raises:
      TypeError: ``packed`` is neither int8 nor uint8.
      ValueError: it has another number of bytes, or as :func:`pack_bytes`.

    Example:
      >>> from jax_wonly.compat import faster_transformer
      >>> codes = jnp.arange(128 * 64, dtype=jnp.uint8).reshape(128, 64) % 16
      >>> packed = faster_transformer.pack_bytes(codes, bits=4)
      >>> bool((faster_transformer.unpack_bytes(packed, 4, k=128, n=64) == codes).all())
      True
    """
    check_array("packed", packed, ("int8", "uint8"))
    bits = _check(bits, k, n, arch)
    if len(packed.shape) < 2 or packed.shape[-1] * packed.shape[-2] != k * n * bits // 8:
        raise ValueError(
            f"jax_wonly: packed has shape {tuple(packed.shape)}; accepted: {k * n * bits // 8} bytes in the last two "
            f"axes, for int{bits} with K={k}, N={n}."
        )
    return _unpack_bytes(jnp.asarray(packed), bits, k, n, arch)


@partial(jax.jit, static_argnames=("bits", "k", "n", "arch"))
def _unpack_bytes(packed, bits: int, k: int, n: int, arch: int):
    lead = packed.shape[:-2]
    codes = packed.view(np.uint8).reshape(*lead, -1)
    if bits == 4:
        codes = jnp.stack(nibbles(codes), -1).reshape(*lead, -1)
    r = len(lead)
    axes = range(r)
    if arch < 75:
        return codes.reshape(*lead, k, -1, 2, 16 // bits).swapaxes(-1, -2).reshape(*lead, k, n)
    columns, a = 16 // bits, 16 // bits
    codes = codes.reshape(*lead, n // columns, k // _ROWS, columns, _ROWS // (8 * a), 4, 2, a)
    codes = codes.transpose(*axes, *(r + i for i in (1, 3, 6, 4, 5, 0, 2)))
    return codes.reshape(*lead, k, n)


def encode(qvalue, *, bits: int, k: int, n: int, arch: int = 80) -> jax.Array:
    """FasterTransformer's bytes of a packed array of ours; a symmetric weight's scales go with both.

    Args:
      qvalue: uint32 ``[..., ceil(n / 64), ceil(k / tile_k), 512]``.
      bits, k, n: of the weight.
      arch: as in :func:`pack_bytes`.

    Raises:
      TypeError, ValueError: as :func:`pack_bytes` and :func:`jax_wonly.unpack`.

    Example:
      >>> from jax_wonly.compat import faster_transformer
      >>> qt = jw.quantize(jnp.ones((128, 64)), bits=8)
      >>> faster_transformer.encode(qt.qvalue, bits=8, k=128, n=64).shape
      (128, 64)
    """
    # Before they are arguments of a compiled function.
    check_array("qvalue", qvalue, ("uint32",))
    sizes = check_size("k", k), check_size("n", n)
    return pack_bytes(unpack(qvalue, check_bits(bits), *sizes), bits, arch)


def decode(packed, *, bits: int, k: int, n: int, arch: int = 80) -> jax.Array:
    """Our packed array, uint32 ``[..., ceil(n / 64), ceil(k / tile_k), 512]``, of FasterTransformer's bytes.

    Args:
      packed, bits, k, n, arch: as in :func:`unpack_bytes`.

    Raises:
      TypeError, ValueError: as :func:`unpack_bytes`.

    Example:
      >>> from jax_wonly.compat import faster_transformer
      >>> qt = jw.quantize(jnp.ones((128, 64)), bits=8)
      >>> packed = faster_transformer.encode(qt.qvalue, bits=8, k=128, n=64)
      >>> bool((faster_transformer.decode(packed, bits=8, k=128, n=64) == qt.qvalue).all())
      True
    """
    return pack(unpack_bytes(packed, bits, k, n, arch), bits)
