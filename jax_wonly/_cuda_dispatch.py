"""Which of the two ways a product takes on a GPU: the fused kernels, or dequantized weights and XLA's dense product.

A model of both, in microseconds on an H100 (``docs/performance.md``); its ratio, not its scale, decides, and that is
much the same on other GPUs. That of the fused kernels is in ``_cuda_costs``.
"""

import functools
import importlib
import math

import jax
import jax.numpy as jnp

from jax_wonly import _abi, _cuda_costs
from jax_wonly._abi import ShiftMode
from jax_wonly._format import TILE_N

_MEMORY = 2.6e6  # bytes per microsecond, of kernels that are bound by memory
_DENSE = 700e6  # dense 16-bit operations per microsecond
_DENSE_FLOAT32 = 45e6
_TILE_OUTPUTS = 256  # of the tiled kernel
STREAM_TOKENS = _cuda_costs.PASS_TOKENS
_MOST_SHARED = 96 << 10  # bytes of shared memory that the weights of a depthwise convolution may take
_MOST_STEPS = 48  # taps and blocks of 32 inputs of a convolution in groups of several
# Outputs, by the third power of a group's inputs, up to which one has its kernel, with strides of 1 and 2 (measured)
_FEW_PRODUCTS, _FEW_PRODUCTS_STRIDED = 3.4e9, 14e9
_FEW_OUTPUTS = 1 << 20  # up to which a depthwise convolution with nine taps or fewer has its kernel (measured)
# Operations per microsecond of XLA's convolution, and what it and dequantizing take besides.
_CONV, _CONV_START = 650e6, 9.0
TABLE_TOKENS = 64  # up to here several passes over weights with a table take less than dequantizing them (measured)

_BAND_FIXED, _BAND_SHARED = 18 << 10, 227 << 10  # bytes of shared memory of band_conv, and what there is
_MULTIPROCESSORS = 132  # of an H100, where there is no GPU to ask
# Rows up to which the streaming kernel of the transposed product is expected to be at least as fast as the kernel for
# many, and as dequantized weights.
_TRANSPOSED_TOKENS = 16
_TRANSPOSED_TOKENS_OTHERS = 64
_TRANSPOSED_TOKENS_FLOAT32 = 256
# Tokens of a tile of quantized activations, and microseconds of 128 inputs, with one scale for a row or with blocks.
_QUANTIZED_TOKENS = 256
_QUANTIZED_ROWS = 0.66
_QUANTIZED_BLOCKS = 1.1


_SM90, _SM80 = _cuda_costs.read(90), _cuda_costs.read(80)
_DECODE = _cuda_costs.Decode(**_SM90["decode"])
_STREAM = _cuda_costs.Stream(**_SM90["stream"])
_RESIDENT, _SPLIT_RESIDENT = (_cuda_costs.resident_of(_SM90, name) for name in ("resident", "split_resident"))
_WARPGROUPS, _SPLIT_WARPGROUPS, _CONV_WARPGROUPS = (
    _cuda_costs.warpgroups_of(_SM90[name]) for name in ("warpgroup", "split_warpgroup", "conv_warpgroup")
)
_TILED_TOKENS, _TILED_TOKENS_OF_SMALL_GROUPS = _SM90["tiled"]["tokens"], _SM90["tiled"]["tokens_of_small_groups"]
_TILED, _TABLE_TILED, _CONV_TILES = map(_cuda_costs.tiles_of, (_SM90["tiled"]["costs"], _SM90["table"], _SM90["conv"]))
_BAND_CONV = _cuda_costs.BandConv(**_SM90["band_conv"])
_MMA = _cuda_costs.mma_of(_SM80["mma"])


# Operations per microsecond of XLA's dense product on an H100 with the tensor cores of other architectures, by their
# major numbers: those that mma.sync feeds would let it run somewhat faster than ``matmul_mma``, by estimate.
_DENSE_MMA = 480e6
_DENSE_OF = {"9": _DENSE, "10": 1600e6, "11": 1600e6}


@functools.cache
def _gpu() -> tuple[str, int]:
    """Compute capability and multiprocessors of the GPU here; those of an H100 where there is none."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        return "9.0", _MULTIPROCESSORS
    capability = str(getattr(device, "compute_capability", "9.0"))
    try:
        newest = divmod(importlib.import_module("jax_wonly._cuda").dispatch(), 10)
    except (ImportError, AttributeError):  # none, or of an older version
        newest = (100, 0)
    if newest < tuple(map(int, capability.split("."))):
        capability = ".".join(map(str, newest))
    return capability, getattr(device, "core_count", _MULTIPROCESSORS)


def _capability() -> tuple[int, ...]:
    return tuple(map(int, _gpu()[0].split(".")))


def has_warpgroups() -> bool:
    """Whether the GPU here is of the architecture that the warpgroup and decode kernels need."""
    return _gpu()[0] == "9.0"


def has_mma() -> bool:
    """Whether products of more than ``STREAM_TOKENS`` have a kernel of other architectures on the GPU here."""
    return _gpu()[0] != "9.0" and _capability() >= (8, 0)


def scratch(
    x_batch: int,
    m: int,
    k: int,
    n: int,
    batch: int,
    bits: int,
    x_dtype,
    scale_dtype,
    shift_mode: ShiftMode,
    shift_dtype=None,
    *,
    groups: int,
) -> int:
    """Words of scratch with which ``[x_batch, m, k] x [batch, k, n]`` runs fastest on the GPU here."""
    types = (scale_dtype, shift_mode, shift_dtype)
    if jnp.dtype(x_dtype).itemsize == 4:  # for their pieces
        name = kernel(m, k, n, batch, bits, x_dtype, *types, groups=groups)
        return _abi.split_scratch(x_batch, m, k, batch) if name == "matmul_warpgroup" else 0
    if _tiled_kernel(k, x_dtype, *types):
        return _abi.matmul_scratch(batch, m, n, few=not _warpgroup_kernel(k, n, groups, x_dtype, *types))
    if m > STREAM_TOKENS and _mma_kernel(k, x_dtype, *types):
        return _abi.mma_scratch(batch, m, n, _cuda_costs.MMA_CTAS * _gpu()[1])
    return 0


def _decode_kernel(
    m: int, k: int, bits: int, groups: int, x_dtype, scale_dtype, shift_mode: ShiftMode, shift_dtype
) -> bool:
    """As ``decode::supports`` in ``ffi/cuda/matmul_decode.cu``, which has the last word."""
    if not has_warpgroups() or shift_mode == ShiftMode.TABLE or m > _DECODE.tokens:
        return False
    size = jnp.dtype(scale_dtype).itemsize
    if shift_mode != ShiftMode.NONE and jnp.dtype(shift_dtype).itemsize not in (1, size):
        return False
    group = k // groups if groups > 1 else 128
    if group == 32 and m > 1 and (bits == 4 or size != 2 or jnp.dtype(x_dtype).itemsize != 2):
        return False
    return group >= 128 or k % 128 == 0


def _resident_kernel(
    m: int, k: int, n: int, bits: int, x_dtype, scale_dtype, shift_mode: ShiftMode, shift_dtype
) -> bool:
    """As ``resident::supports`` in ``ffi/cuda/matmul_resident.cu``, which has the last word."""
    floats = shift_mode != ShiftMode.NONE and shift_dtype != jnp.uint8
    split = jnp.dtype(x_dtype).itemsize == 4
    tokens = _RESIDENT.tokens // (1 + (split or floats))
    if not has_warpgroups() or bits != 4 or k % 64 or not 0 < m <= tokens or shift_mode == ShiftMode.TABLE:
        return False
    if split:
        return not floats and n * jnp.dtype(scale_dtype).itemsize % 4 == 0
    return scale_dtype == x_dtype and (not floats or shift_dtype == x_dtype)


def _warpgroup_kernel(k: int, n: int, groups: int, x_dtype, scale_dtype, shift_mode: ShiftMode, shift_dtype) -> bool:
    """As ``warpgroup::supports`` in ``ffi/cuda/matmul_warpgroup.cu``, which has the last word."""
    rows = [scale_dtype] + ([] if shift_mode == ShiftMode.NONE else [shift_dtype])
    aligned = k % 8 == 0 and (groups <= 1 or all(n * jnp.dtype(dtype).itemsize % 16 == 0 for dtype in rows))
    integers = shift_mode == ShiftMode.NONE or (shift_mode == ShiftMode.ZEROS and shift_dtype == jnp.uint8)
    wanted = integers if jnp.dtype(x_dtype).itemsize == 4 else shift_mode != ShiftMode.TABLE
    return has_warpgroups() and wanted and aligned


def _in_tiles(k: int, x_dtype, scale_dtype, shift_mode: ShiftMode, shift_dtype) -> bool:
    """As ``tiled::supports`` in ``ffi/cuda/matmul_tiled.cu``, which has the last word."""
    if k % 8 or jnp.dtype(x_dtype).itemsize != 2:
        return False
    if shift_mode == ShiftMode.TABLE:
        return scale_dtype in (x_dtype, jnp.float32)
    return scale_dtype == x_dtype and (shift_mode == ShiftMode.NONE or shift_dtype in (jnp.uint8, x_dtype))


def _tiled_kernel(k: int, x_dtype, scale_dtype, shift_mode: ShiftMode, shift_dtype) -> bool:
    return has_warpgroups() and _in_tiles(k, x_dtype, scale_dtype, shift_mode, shift_dtype)


def _mma_kernel(k: int, x_dtype, scale_dtype, shift_mode: ShiftMode, shift_dtype) -> bool:
    in_tiles = shift_mode != ShiftMode.TABLE and _in_tiles(k, x_dtype, scale_dtype, shift_mode, shift_dtype)
    return has_mma() and in_tiles


def _plain(n: int, x_dtype, scale_dtype, shift_mode: ShiftMode, shift_dtype) -> bool:
    """As ``warpgroup::is_plain`` in ``ffi/cuda/matmul_warpgroup.cu``."""
    if jnp.dtype(x_dtype).itemsize == 4:
        return False
    if shift_mode == ShiftMode.NONE:
        return scale_dtype == x_dtype and n % 8 == 0
    return scale_dtype == x_dtype and shift_mode == ShiftMode.ZEROS and shift_dtype == jnp.uint8 and n % 16 == 0


def _scheme(
    k: int, n: int, bits: int, groups: int, x_dtype, scale_dtype, shift_mode: ShiftMode, shift_dtype=None
) -> _cuda_costs.Scheme:
    floats = shift_mode != ShiftMode.NONE and shift_dtype != jnp.uint8
    split = jnp.dtype(x_dtype).itemsize == 4
    if floats and not split:
        alike = scale_dtype == shift_dtype == x_dtype and n % 8 == 0
    else:
        alike = _plain(n, x_dtype, scale_dtype, shift_mode, shift_dtype)
    ends = {32: 4, 64: 2}.get(k // groups, 1) if groups > 1 else 1
    return _cuda_costs.Scheme(bits, ends, shift_mode == ShiftMode.ZEROS, floats, alike, split)


def _warpgroup(m: int, k: int, n: int, batch: int, scheme: _cuda_costs.Scheme) -> float:
    costs = _SPLIT_WARPGROUPS if scheme.split else _WARPGROUPS
    return _least(_cuda_costs.warpgroup_times(max(m, 1), k, n, batch, scheme, _gpu()[1], costs))


def _decode_is_slower(m: int, k: int, n: int, batch: int, scheme: _cuda_costs.Scheme) -> bool:
    """Whether ``matmul_decode`` is, where ``matmul_resident`` takes a product too."""
    outputs = batch * n
    if scheme.floats:
        return m > 1 and _DECODE.pairs * outputs <= k and 4 * -(-outputs // 16) <= 3 * _gpu()[1]
    weights = outputs * k * scheme.bits // 8
    wide = outputs >= _DECODE.wide * k and weights >= _DECODE.rivalled
    many = wide or (weights >= _DECODE.heavy and not scheme.split)
    faster = batch >= _DECODE.entries or (m == 1 and scheme.ends < 4 and many)
    return not faster and _resident(m, k, n, batch, scheme) < math.inf


def _resident(m: int, k: int, n: int, batch: int, scheme: _cuda_costs.Scheme) -> float:
    costs = _SPLIT_RESIDENT if scheme.split else _RESIDENT
    times = _cuda_costs.resident_times(m, k, n, batch, scheme, _gpu()[1], costs)
    return min((us for _, us in times), default=math.inf)


def _stream(m: int, weights: float, scheme: _cuda_costs.Scheme) -> float:
    return _cuda_costs.stream_time(m, weights, scheme, _STREAM)


def _tiles(m: int, n: int, stages: int, batch: int, costs: _cuda_costs.Tiles) -> float:
    return _least(_cuda_costs.tiled_times(m, n, stages, batch, _gpu()[1], costs))


def _tiled(m: int, k: int, n: int, batch: int, shift_mode: ShiftMode) -> float:
    return _tiles(m, n, -(-k // 64), batch, _TABLE_TILED if shift_mode == ShiftMode.TABLE else _TILED)


def _mma(m: int, k: int, n: int, batch: int, bits: int) -> float:
    return _least(_cuda_costs.mma_times(m, k, n, batch, bits, _gpu()[1], _MMA))


def _least(times) -> float:
    return min(us for _, us in times)


def kernel(
    m: int,
    k: int,
    n: int,
    batch: int,
    bits: int,
    x_dtype,
    scale_dtype,
    shift_mode: ShiftMode,
    shift_dtype=None,
    *,
    groups: int,
) -> str:
    """The fused kernel for ``[batch, m, k] x [batch, k, n]``.

    As ``launch_matmul`` in ``ffi/cuda/matmul.cu``, which has the last word; here for where there is no GPU.
    """
    share, wanted = _gpu()[1] // batch, _gpu()[1] * 9 // 10  # multiprocessors for each of the batch
    resident = _resident_kernel(m, k, n, bits, x_dtype, scale_dtype, shift_mode, shift_dtype)
    scheme = _scheme(k, n, bits, groups, x_dtype, scale_dtype, shift_mode, shift_dtype)
    if (
        _decode_kernel(m, k, bits, groups, x_dtype, scale_dtype, shift_mode, shift_dtype)
        and batch * n * k * bits // 8 >= _DECODE.weights
        and k >= _DECODE.inputs
        and -(-k // 128) * (m if groups > 1 and k // groups == 32 else 1) <= _DECODE.stages
        and (bits == 4 or k // groups < 128 or _DECODE.ratio * batch * n > k)
        and not (resident and _decode_is_slower(m, k, n, batch, scheme))
        and share * batch >= wanted
        and 2 * batch * min(-(-n // 16), share) >= wanted
    ):
        return "matmul_decode"
    if resident and scheme.split and _resident(m, k, n, batch, scheme) < math.inf:
        return "matmul_resident"
    wide = bits == 8 and batch * -(-n // TILE_N) > _gpu()[1]
    by_warpgroups = _warpgroup_kernel(k, n, groups, x_dtype, scale_dtype, shift_mode, shift_dtype)
    small_groups = k // groups in (32, 64) and groups > 1
    always = by_warpgroups and (small_groups or scheme.plain or scheme.split or (scheme.floats and resident))
    streamed = m <= _STREAM.tokens and not wide and not always
    other = math.inf
    if by_warpgroups and not streamed:
        other = _warpgroup(m, k, n, batch, scheme)
        if scheme.split and m <= STREAM_TOKENS and _stream(m, batch * n * k * bits / 8, scheme) <= other:
            return "matmul_stream"
    elif not streamed:
        other = _stream(m, batch * n * k * bits / 8, scheme)
    if resident and _resident(m, k, n, batch, scheme) < other:
        return "matmul_resident"
    if not streamed:
        least = _TILED_TOKENS if bits == 4 and not small_groups else _TILED_TOKENS_OF_SMALL_GROUPS
        enough = m >= (least if by_warpgroups else STREAM_TOKENS + 1)
        if enough and _tiled_kernel(k, x_dtype, scale_dtype, shift_mode, shift_dtype):
            if _tiled(m, k, n, batch, shift_mode) < other:
                return "matmul_tiled"
        if by_warpgroups:
            return "matmul_warpgroup"
        if m > STREAM_TOKENS and _mma_kernel(k, x_dtype, scale_dtype, shift_mode, shift_dtype):
            if _mma(m, k, n, batch, bits) < other:
                return "matmul_mma"
    return "matmul_stream"


def rounds_weights(m: int, k: int, n: int, batch: int, bits: int, x_dtype, *scales, groups: int) -> bool:
    """Whether the kernel for ``[batch, m, k] x [batch, k, n]`` rounds weights to the type of x; ``scales`` as there."""
    name = kernel(m, k, n, batch, bits, x_dtype, *scales, groups=groups)
    if name != "matmul_warpgroup" or jnp.dtype(x_dtype).itemsize == 4:
        return name in ("matmul_tiled", "matmul_mma")
    scheme = _scheme(k, n, bits, groups, x_dtype, *scales)
    times = _cuda_costs.warpgroup_times(max(m, 1), k, n, batch, scheme, _gpu()[1], _WARPGROUPS)
    (tokens, *_), _ = min(times, key=lambda pair: pair[1])
    return scheme.rounds(tokens)


def estimate(
    m: int,
    k: int,
    n: int,
    batch: int,
    bits: int,
    x_dtype,
    scale_dtype,
    shift_mode: ShiftMode,
    shift_dtype=None,
    *,
    groups: int = 1,
) -> tuple[float, float]:
    """Microseconds of ``[batch, m, k] x [batch, k, n]``: fused, and dequantized for a dense product."""
    wide = jnp.dtype(x_dtype).itemsize == 4
    weights = batch * n * k * bits / 8
    operations = 2.0 * batch * n * k  # of one token
    dense_bytes = weights + batch * n * k * jnp.dtype(x_dtype).itemsize
    rate = _DENSE_FLOAT32 if wide else _DENSE_OF.get(_gpu()[0].split(".")[0], _DENSE_MMA)
    dense = dense_bytes / _MEMORY + m * operations / rate * (_MULTIPROCESSORS / _gpu()[1] if has_mma() else 1)
    scheme = _scheme(k, n, bits, groups, x_dtype, scale_dtype, shift_mode, shift_dtype)
    by_warpgroups = _warpgroup_kernel(k, n, groups, x_dtype, scale_dtype, shift_mode, shift_dtype)
    fused = _warpgroup(m, k, n, batch, scheme) if by_warpgroups else math.inf
    if not by_warpgroups or (wide and m <= STREAM_TOKENS):
        fused = min(fused, _stream(m, weights, scheme))
    if _tiled_kernel(k, x_dtype, scale_dtype, shift_mode, shift_dtype):
        fused = min(fused, _tiled(m, k, n, batch, shift_mode))
    if m > STREAM_TOKENS and _mma_kernel(k, x_dtype, scale_dtype, shift_mode, shift_dtype):
        fused = min(fused, _mma(m, k, n, batch, bits))
    return fused, dense


def use_kernel(
    m: int,
    k: int,
    n: int,
    batch: int,
    bits: int,
    x_dtype,
    scale_dtype,
    shift_mode: ShiftMode,
    shift_dtype=None,
    *,
    groups: int,
) -> bool:
    """Whether the fused kernels are expected to be at least as fast for ``[batch, m, k] x [batch, k, n]``."""
    if m <= (TABLE_TOKENS if shift_mode == ShiftMode.TABLE else STREAM_TOKENS):
        return True
    fused, dense = estimate(m, k, n, batch, bits, x_dtype, scale_dtype, shift_mode, shift_dtype, groups=groups)
    return fused <= dense


def ragged_table_kernel(k: int, x_dtype, scale_dtype) -> bool:
    """Whether there is a kernel for experts with a table: ``launch_ragged_matmul`` in ``ffi/cuda/ragged_matmul.cu``."""
    return _tiled_kernel(k, x_dtype, scale_dtype, ShiftMode.TABLE, None)


def conv_kernel(x_dtype, k: int, sizes, results, window) -> bool:
    """Whether there is a kernel for a convolution: ``conv::supports`` in ``ffi/cuda/conv.cu``."""
    if not has_warpgroups() or jnp.dtype(x_dtype).itemsize != 2 or k % 8:
        return False
    for size, result, taps, stride, (low, _), spread, dilation in zip(sizes, results, *window, strict=True):
        if spread > 1 and (stride > 1 or dilation > 1 or result % spread or taps < spread):
            return False
        result, low = result // spread, low // spread
        high = (result - 1) * stride - low - (size - 1)
        if stride > 8 or (taps - 1) * dilation > 255 or not -127 <= low <= 128 or not -128 <= high <= 127:
            return False
    return True


def use_conv(
    pixels: int,
    k: int,
    n: int,
    window,
    bits: int,
    x_dtype,
    shift_mode: ShiftMode,
    shift_dtype=None,
    *,
    groups: int,
    bands: float | None = None,
) -> bool:
    """Whether the kernels are expected to be as fast as dequantized weights and XLA's convolution.

    There is a second kernel as ``conv::supports_warpgroups`` in ``ffi/cuda/conv.cu`` says, which has the last word.
    ``bands``: what ``band_conv_time`` says.
    """
    phases = math.prod(window.lhs_dilation)
    warpgroups = phases == 1 and k // groups % 64 == 0 and _plain(n, x_dtype, x_dtype, shift_mode, shift_dtype)
    times = conv_times(pixels, k, n, window.taps, bits, phases, warpgroups)
    fastest = min(*times.values(), math.inf if bands is None else bands)
    return fastest <= conv_dense(pixels, k, n, window.taps, bits)


def direct_conv_kernel(x_shape, x_dtype, k: int, n: int, groups: int, results, window) -> bool:
    """Whether there is a kernel for a convolution in groups of ``k`` inputs: ``ffi/cuda/direct_conv.cu``."""
    reach = [
        (result + 16) * stride + (taps + 16) * dilation + abs(low)
        for result, taps, stride, (low, _), dilation in zip(
            results, window.size, window.strides, window.padding, window.rhs_dilation, strict=True
        )
    ]
    pixels = max(math.prod(x_shape[:-1]), x_shape[0] * math.prod(results))
    if len(results) > 3 or max(reach, default=0) >= 2**27 or max(pixels, math.prod(x_shape[-2:])) >= 2**31:
        return False
    if max(window.lhs_dilation, default=1) > 1:
        return False
    shared = 63 << 10 if _capability() < (8, 0) else _MOST_SHARED
    if k == 1 and window.taps * 16 <= shared:
        return True
    if _capability() < (8, 0) or jnp.dtype(x_dtype).itemsize != 2 or k * groups % 8 or n % 8:
        return False
    return 2 * math.prod(x_shape) < 2**32 and window.taps * _input_blocks(k, n, groups) <= _MOST_STEPS


def _input_blocks(k: int, n: int, groups: int) -> int:
    """How many blocks of 32 inputs the groups of 32 outputs reach into, at most: as in ``direct_conv.cu``."""
    outputs = n // groups
    return max(
        -(-((min(first + 32, n) - 1) // outputs + 1) * k // 32) - first // outputs * k // 32
        for first in range(0, n, 32)
    )


def band_conv_time(x_shape, x_dtype, k: int, n: int, groups: int, results, window) -> float | None:
    """Microseconds of ``band_conv``; None where there is no such kernel: ``bands::supports`` in
    ``ffi/cuda/direct_conv.cu``.
    """
    images, *sizes, features = x_shape
    if not has_warpgroups() or jnp.dtype(x_dtype).itemsize != 2 or len(window.size) > 2:
        return None
    if (groups > 1 and n != k * groups) or not 2 <= k <= 64 or 64 % k or features % 8:
        return None
    if max(window.strides, default=1) > 1 or max(window.lhs_dilation, default=1) > 1:
        return None
    if not math.prod(x_shape) * math.prod(results):
        return None
    # The axes' pixels in the layout of band_conv.cuh, zeros between them included.
    pitches, reaches = [1, 1], [0, 0]
    for size, result, taps, (low, _), dilation in zip(
        sizes, results, window.size, window.padding, window.rhs_dilation, strict=True
    ):
        reach = (taps - 1) * dilation
        high = result + reach - low - size
        if low < 0 or high < 0:
            return None
        pitches.append(max(size + max(low, high), result))
        reaches.append(reach)
    rows, pitch = pitches[-2:]
    height, width = (1, 1, *results)[-2:]
    band_rows = (pitch + _cuda_costs.BAND_PLACES - 2 + reaches[-1]) // pitch + reaches[-2] + 1
    places = ((images - 1) * rows + height - 1) * pitch + width
    shared = _BAND_FIXED + window.taps * 8192 + 2 * -(-band_rows * pitch // 8) * 1024
    if pitch > 256 or places >= 2**30 or shared > _BAND_SHARED:
        return None
    values = math.prod(x_shape) + images * math.prod(results) * n
    return _cuda_costs.band_conv_time(places, window.taps, k, n, values, _gpu()[1], _BAND_CONV)


def use_direct_conv(pixels: int, k: int, n: int, groups: int, window, bands: float | None = None) -> bool:
    """Whether that kernel is at least as fast as dequantized weights and XLA's convolution, as far as was measured.
    ``bands``: what ``band_conv_time`` says; in groups, that kernel is taken wherever it is one.
    """
    if len(window.size) > 2 or max(window.strides, default=1) > 2 or max(window.rhs_dilation, default=1) > 1:
        return False
    if k > 1:
        if bands is not None and window.taps <= 9:
            return True
        most = _FEW_PRODUCTS_STRIDED if 2 in window.strides else _FEW_PRODUCTS
        return n == k * groups and window.taps <= 9 and pixels * n * k**3 <= most
    if n != groups or n % 2:
        return False
    return window.taps > 9 or 2 in window.strides or pixels * n <= _FEW_OUTPUTS


def conv_times(
    pixels: int, k: int, n: int, taps: int, bits: int, phases: int = 1, warpgroups: bool = True
) -> dict[tuple, float]:
    """Microseconds of a convolution in every configuration: ``("tiled", tokens, splits, CTAs of a cluster)``, and with
    ``warpgroups`` ``("warpgroup", tokens, warpgroups, cluster)``; ``phases``: the product of the lhs_dilation.
    """
    stages = -(-taps // phases) * -(-k // 64)
    times = _cuda_costs.tiled_times(pixels // phases, n, stages, phases, _gpu()[1], _CONV_TILES)
    found = {("tiled", *config): us for config, us in times}
    if warpgroups:
        scheme = _cuda_costs.Scheme(bits)
        times = _cuda_costs.warpgroup_times(pixels, taps * k, n, 1, scheme, _gpu()[1], _CONV_WARPGROUPS)
        found |= {("warpgroup", *config): us for config, us in times}
    return found


def conv_dense(pixels: int, k: int, n: int, taps: int, bits: int) -> float:
    """Microseconds of dequantizing, turning the weights as cuDNN wants them, and its convolution. That multiplies what
    lies between the pixels of transposed convolutions, too.
    """
    weights = taps * k * n
    return _CONV_START + weights * (bits / 8 + 6) / _MEMORY + 2.0 * weights * pixels / _CONV


def transposed_kernel(m, n: int, x_dtype) -> str:
    """The kernel that ``launch_matmul_transposed`` in ``ffi/cuda/matmul_transposed.cu`` takes for ``m`` rows."""
    many = not isinstance(m, int) or m > _TRANSPOSED_TOKENS
    if many and n % 8 == 0 and has_warpgroups() and jnp.dtype(x_dtype).itemsize == 2:
        return "matmul_transposed_warpgroup"
    return "matmul_transposed_stream"


def use_transposed_kernel(m, n: int, x_dtype, *, forced: bool = False) -> bool:
    """Whether ``[batch, m, n]`` times transposed weights takes a fused kernel; ``forced``: wherever there is one."""
    if _capability() < (8, 0):
        return False
    if forced or not isinstance(m, int) or transposed_kernel(m, n, x_dtype).endswith("warpgroup"):
        return True
    return m <= _most_streamed(x_dtype)


def use_ragged_transposed_kernel(m, experts: int, n: int, x_dtype, *, forced: bool = False) -> bool:
    """Whether the rows of ``[m, n]`` times their experts' transposed weights take a fused kernel, as above."""
    if _capability() < (8, 0):
        return False
    warpgroups = n % 8 == 0 and has_warpgroups() and jnp.dtype(x_dtype).itemsize == 2
    return forced or warpgroups or not isinstance(m, int) or m <= experts * _most_streamed(x_dtype)


def _most_streamed(x_dtype) -> int:
    """Rows of a weight up to which several passes over it take less than dequantizing it."""
    return _TRANSPOSED_TOKENS_FLOAT32 if jnp.dtype(x_dtype).itemsize == 4 else _TRANSPOSED_TOKENS_OTHERS


def use_quantized_kernel(
    m: int,
    k: int,
    n: int,
    batch: int,
    bits: int,
    scale_dtype,
    shift_mode: ShiftMode,
    shift_dtype=None,
    *,
    blocks: bool,
    forced: bool = False,
) -> bool:
    """Whether quantized activations meet the codes of the weights, or are dequantized for a 16-bit product."""
    if not has_warpgroups() or m == 0:
        return False
    if forced or not isinstance(m, int):
        return True
    waves = -(-batch * -(-m // _QUANTIZED_TOKENS) * -(-n // _TILE_OUTPUTS) // (_gpu()[1] // 2))
    us = 3 + waves * (-(-k // 128) * (_QUANTIZED_BLOCKS if blocks else _QUANTIZED_ROWS) + 2.5)
    dequantizing = 3 * batch * m * k / _MEMORY
    return us < dequantizing + min(estimate(m, k, n, batch, bits, scale_dtype, scale_dtype, shift_mode, shift_dtype))
