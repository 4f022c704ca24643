"""Names and attribute values of the custom calls: the Python twin of ``ffi/abi.h``."""

from enum import IntEnum

MATMUL = "wonly_matmul_v1"
QUANTIZE = "wonly_quantize_v1"
DEQUANTIZE = "wonly_dequantize_v1"
RAGGED_MATMUL = "wonly_ragged_matmul_v1"
MATMUL_TRANSPOSED = "wonly_matmul_transposed_v1"
RAGGED_MATMUL_TRANSPOSED = "wonly_ragged_matmul_transposed_v1"
SCALES_GRADIENT = "wonly_scales_gradient_v1"
QUANTIZE_ACTIVATION = "wonly_quantize_activation_v1"
QUANTIZED_MATMUL = "wonly_quantized_matmul_v1"
STATIC_MATMUL = "wonly_static_matmul_v1"
CONV = "wonly_conv_v1"
DIRECT_CONV = "wonly_direct_conv_v1"

TARGETS = (
    MATMUL,
    QUANTIZE,
    DEQUANTIZE,
    RAGGED_MATMUL,
    MATMUL_TRANSPOSED,
    RAGGED_MATMUL_TRANSPOSED,
    SCALES_GRADIENT,
    QUANTIZE_ACTIVATION,
    QUANTIZED_MATMUL,
    STATIC_MATMUL,
    CONV,
    DIRECT_CONV,
)


class ShiftMode(IntEnum):
    """How a group's second parameter enters: not at all, as a zero point, or as an offset.

    With ``TABLE``, codes index a table of 16 values instead, which custom calls take in the place of that parameter.
    """

    NONE = 0
    ZEROS = 1
    OFFSETS = 2
    TABLE = 3


class Activation(IntEnum):
    """What is applied to the product after the bias (``GELU`` is the tanh form, as ``jax.nn.gelu``'s default)."""

    NONE = 0
    RELU = 1
    RELU6 = 2
    GELU = 3
    SILU = 4


class QuantizeMode(IntEnum):
    """Symmetric absmax, or minmax with uint8 zeros, floating zeros, or floating offsets."""

    SYMMETRIC = 0
    INTEGER_ZEROS = 1
    FLOAT_ZEROS = 2
    OFFSETS = 3


class RowMode(IntEnum):
    """How a ragged product knows the experts of its rows: from a count for each expert, or an id for each row."""

    SIZES = 0
    IDS = 1


def matmul_scratch(batch: int, m: int, n: int, least_tile: int) -> int:
    """Words of scratch with which a product of many tokens runs fastest on CUDA: the float32 sums of shared tiles, and
    words that say whether they are there.

    As ``tiled::scratch_bytes`` in ``ffi/cuda/matmul_tiled.h`` for all tiles that clusters may share, at most 21 MB.
    ``least_tile``: tokens of the lowest; sums are kept for whole 64.
    """
    tiles = batch * -(-m // least_tile) * -(-n // 256)
    rows = 256 if m > least_tile else -(-least_tile // 64) * 64
    return 1024 + min(7 * tiles, 80) * 256 * rows


def team_scratch(tiles: int, cluster: int, tokens: int) -> int:
    """Words of scratch in which two teams of clusters meet that share the inputs of tiles of ``tokens`` tokens and 128
    outputs: as ``warpgroup::team_bytes`` in ``ffi/cuda/matmul_warpgroup.h``.
    """
    return tiles * cluster * 2 * (64 * (-(-(tokens // 2) // 16) * 16) + 2)


def even_scratch(ctas: int, tokens: int, warpgroups: int) -> int:
    """Words of scratch of CTAs that share the inputs of all tiles of ``tokens`` tokens evenly: as
    ``warpgroup::even_bytes`` in ``ffi/cuda/matmul_warpgroup.h``, and what of the end is no multiple of 16 bytes.
    """
    return -(-ctas * warpgroups * (64 * tokens + 2) // 4) * 4 + 3


ROW_ELEMENTS = 16  # of scales and shift where kernels copy whole rows: 16 bytes of uint8, or more of others


def aligned_rows_scratch(rows: int, row: int, sizes: list[int]) -> int:
    """Words of scratch for ``rows`` rows of scales, and of zeros or offsets, ``row`` numbers each of so many bytes: as
    ``aligned_rows::bytes`` in ``ffi/cuda/aligned_rows.cu``.
    """
    return sum(-(-rows * row * size // 256) * 64 for size in sizes)


# Words of float32 activations, or of their results, that are taken at a time: pieces of twice as many would not stay in
# the L2 beside the weights.
SPLIT_WORDS = 8 << 20
LEAST_SPLIT_ROWS = 512


def split_rows(m: int, k: int, n: int, batch: int) -> int:
    """Rows of float32 activations that ``matmul_warpgroup`` takes at a time: all of a batch, and of one weight so many
    that their tiles fill the multiprocessors several times, if their pieces stay in the L2 then.
    """
    most, enough = SPLIT_WORDS // k, max(SPLIT_WORDS // n, SPLIT_WORDS // (2 * k))
    step = LEAST_SPLIT_ROWS
    return m if batch > 1 else min(m, max(min(most, enough) // step * step, step))


def split_scratch(x_batch: int, m: int, k: int, n: int, batch: int, sums: int = 0) -> int:
    """Words of scratch for float32 activations ``[x_batch, m, k]`` on CUDA, as two fp16 numbers each, and a power of
    two and ``sums`` for each row.

    ``batch`` and ``n`` are the product's. At most 32 MiB, or 2 KB for each of more than 16,384 inputs; the rows of
    several weights need as much as x has. As ``warpgroup::split_rows`` in ``ffi/cuda/matmul_warpgroup.h``, which takes
    as many rows as there is scratch for.
    """
    rows = split_rows(m, k, n, batch)
    return x_batch * (rows * (k + 1 + sums) + (3 * (sums + 1) if sums else 0))


def transposed_float32_scratch(dy_batch: int, m: int, n: int, batch: int, parameter_batch: int, groups: int) -> int:
    """Words of scratch for the product of float32 ``[dy_batch, m, n]`` with transposed weights on CUDA: rows as two
    fp16 numbers each and a power of two, and of groups three 16-bit numbers for each of whole stages of 64 outputs, and
    a power of two.

    Rows of one weight are taken some at a time, as many as 96 MiB hold, but 512 at least. As
    ``transposed_warpgroup::float32_rows`` in ``ffi/cuda/matmul_transposed.cu``.
    """
    rows = m if batch > 1 else min(m, max(512, (24 << 20) // n // 128 * 128))
    return dy_batch * rows * (n + 1) + transposed_float32_parameters(parameter_batch, n, groups)


def transposed_float32_parameters(parameter_batch: int, n: int, groups: int, *, shifted: bool = False) -> int:
    """Those of them that the groups of ``parameter_batch`` weights take, or of experts, which may have float zeros or
    offsets (``shifted``) and then take four 16-bit numbers for each output, not three:
    ``transposed_warpgroup::parameter_rows`` in ``ffi/cuda/matmul_transposed.h``.
    """
    return parameter_batch * groups * (1 + -(-n // 64) * (128 if shifted else 96))


def mma_scratch(batch: int, m: int, n: int, ctas: int) -> int:
    """The same on other architectures, of which ``ctas`` CTAs run at a time: ``mma::scratch_bytes`` in
    ``ffi/cuda/matmul_mma.h``.
    """
    tokens = 32 if m <= 32 else 64 if m <= 64 else 128
    return min(16 * batch * -(-m // tokens) * -(-n // 128), ctas) * tokens * 128


def conv_scratch(pixels: int, n: int) -> int:
    """Words of scratch with which a convolution runs fastest on CUDA: the float32 sums of shared tiles, and words that
    say whether they are there.

    As ``conv::launch`` asks for: no more than all multiprocessors' sums, nor than 15 shares of the result.
    """
    rows, outputs = -(-pixels // 256) * 256, -(-n // 256) * 256
    return 1024 + min(15 * rows * outputs, 132 * 256 * 256)


def ragged_scratch(rows, experts: int, ordered: int = 0):
    """Words of scratch that a ragged product has on CUDA; ``rows`` may be symbolic. Besides what its plan takes, room
    for the rows of the activations in the order of their experts, ``ordered`` words each.
    """
    return rows * (1 + ordered) + 8 * experts + 128
