"""Which of the two ways a product takes on a GPU: the fused kernels, or dequantized weights and XLA's dense product.

A model of both, in microseconds on an H100 (``docs/performance.md``); its ratio, not its scale, decides, and that is
much the same on other GPUs. That of the fused kernels is in ``_cuda_costs``.
"""

import functools
import importlib
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_wonly import _abi, _cuda_costs
from jax_wonly._abi import ShiftMode
from jax_wonly._format import TILE_N, tile_k

_MEMORY = 2.6e6  # bytes per microsecond, of kernels that are bound by memory
_DENSE = 700e6  # dense 16-bit operations per microsecond
_DENSE_FLOAT32 = 45e6
_DENSE_START = 6.0  # microseconds of both kernels besides: 5.4 to 10.6 for less than 3 million weights (log, 131)
_DENSE_START_FLOAT32 = 10.0  # cuBLAS splits the inputs of small ones, and adds up in another kernel
_SPLIT_BYTES = 8  # of a float32 activation, which is read and written as two 16-bit numbers before it is multiplied
_STREAMED_ROWS = 32  # of float32 cotangents at a time
_ROWS_OF_PART = 256  # of the gradient of scales, at least: its kernel's start and end take as long
_APART_BYTES = 14e6  # of weights, so few of which streaming reads twice sooner than those kernels have run
_TILE_OUTPUTS = 256  # of the tiled kernel
_WHOLE = 8  # inputs or outputs that kernels read at once, 16 bytes
_COPIED_OUTPUTS = 3000  # from which few rows of cotangents are worth copying so that they can (log, 140)
_COPY_START = 1.5  # microseconds of such a copy, besides its bytes
_CONVERT_START = 1.5  # and of one of scales to another type
_DENSE_ODD = 1.6  # how much longer XLA's product takes at least whose inputs or outputs are no whole eights
STREAM_TOKENS = _cuda_costs.PASS_TOKENS
_FEW_WAVES = 2  # of a streaming kernel's CTAs, which overlap
_MOST_SHARED = 96 << 10  # bytes of shared memory that the weights of a depthwise convolution may take
_MOST_STEPS = 48  # taps and blocks of 32 inputs of a convolution in groups of several
# Outputs, by the third power of a group's inputs, up to which one has its kernel, with strides of 1 and 2 (measured)
_FEW_PRODUCTS, _FEW_PRODUCTS_STRIDED = 3.4e9, 14e9
_FEW_OUTPUTS = 1 << 21  # up to which a depthwise convolution of 3 x 3 windows has its kernel anyway (measured)
# Operations per microsecond of XLA's convolution, and what it and dequantizing take besides.
_CONV, _CONV_START = 650e6, 9.0
_SURE_CONV = 40.0  # microseconds of both, below which the kernels are taken without a comparison
TABLE_TOKENS = 64  # up to here passes over weights with a table, without tiles, take less than dequantizing (measured)

_RESIDENT_INPUTS = 1 << 20  # of more the activations would fit no cluster's shared memory
_RESIDENT_TILES = 16  # of tokens at most, and bytes of weights that several read
_RESIDENT_TILED_BYTES = 1 << 23
_BAND_FIXED, _BAND_SHARED = 18 << 10, 227 << 10  # bytes of shared memory of band_conv, and what there is
_MULTIPROCESSORS = 132  # of an H100, where there is no GPU to ask
# Rows up to which the streaming kernel of the transposed product is expected to be at least as fast as dequantized
# weights.
_TRANSPOSED_TOKENS = 64
_TRANSPOSED_TOKENS_FLOAT32 = 256
_MOST_SPLIT = 1 << 26  # numbers of float32 cotangents of a batch that scratch may hold, 4 bytes each
# Tokens of a tile of quantized activations, and microseconds: of its end, and of 128 inputs with one scale for a row,
# with float8 codes, with blocks, and with blocks of which sums meet zeros or offsets.
_QUANTIZED_TOKENS = 256
_QUANTIZED_END = 3.0
_QUANTIZED_ROWS = 0.62
_QUANTIZED_FLOAT8 = 1.0
_QUANTIZED_BLOCKS = 1.07
_QUANTIZED_SHIFTED = 2.1


SM90, _SM80 = _cuda_costs.read(90), _cuda_costs.read(80)
_ALIGNED_ROWS_START, _ALIGNED_ROWS_BYTES = SM90["aligned_rows"]["start"], SM90["aligned_rows"]["bytes"]
_DECODE = _cuda_costs.Decode(**SM90["decode"])
_STREAM = _cuda_costs.Stream(**SM90["stream"])
_RESIDENT: dict[tuple[int, bool], _cuda_costs.Resident] = {
    of: _cuda_costs.resident_of(SM90, *of) for of in itertools.product((4, 8), (False, True))
}
_WARPGROUPS, _TABLE_WARPGROUPS, _CONV_WARPGROUPS, _SPLIT_WARPGROUPS, _SPLIT_TABLE = (
    _cuda_costs.warpgroups_of(SM90[name])
    for name in ("warpgroup", "table_warpgroup", "conv_warpgroup", "split_warpgroup", "split_table")
)
_TILED_TOKENS, _TILED_TOKENS_OF_SMALL_GROUPS = SM90["tiled"]["tokens"], SM90["tiled"]["tokens_of_small_groups"]
_TILED, _TABLE_TILED, _CONV_TILES = map(_cuda_costs.tiles_of, (SM90["tiled"]["costs"], SM90["table"], SM90["conv"]))
_LEAST_TILE = min(tokens for costs in (_TILED, _TABLE_TILED) for _, tokens, _ in costs.stages)
_REGISTER_TOKENS_OF_EIGHT_BITS = 128  # transposed_warpgroup::most_register_tokens
_ROW_OF_BYTES = 16  # zeros of one byte are copied so many at a time
_STRIP_INPUTS = 64  # transposed_stream::kStripK
TRANSPOSED = _cuda_costs.Transposed(**SM90["transposed"])
_PARTS = _cuda_costs.Parts(**SM90["parts"])
_BAND_CONV = _cuda_costs.BandConv(**SM90["band_conv"])
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


def multiprocessors() -> int:
    return _gpu()[1]


def has_bf16() -> bool:
    """Whether the tensor cores of the GPU here take bfloat16, as kernels but those of few float16 tokens want them."""
    return _capability() >= (8, 0)


def has_kernels(x_dtype, *, forced: bool = False) -> bool:
    """Whether there are products of such activations on the GPU here: before sm_80 of float16 alone.

    Raises:
      ValueError: there are none, and they are asked for.
    """
    there = has_bf16() or jnp.dtype(x_dtype) == jnp.float16
    if forced and not there:
        raise ValueError(
            f"jax_wonly: implementation='cuda' has no fused kernel for {jnp.dtype(x_dtype)} x on GPUs before sm_80; "
            "accepted: None (which dequantizes weights), or float16 x."
        )
    return there


def has_warpgroups() -> bool:
    """Whether the GPU here is of the architecture that the warpgroup and decode kernels need."""
    return _gpu()[0] == "9.0"


def has_scales_gradient() -> bool:
    """Whether the GPU here has a kernel for the gradient of scales: ``scales_gradient::supports`` in
    ``ffi/cuda/scales_gradient.cu``, of 16-bit numbers that others are made of, in whole eights.
    """
    return has_warpgroups()


def scales_gradient_parts(m: int, k: int, n: int) -> int:
    """Into how many parts of the rows the gradient of one weight's scales is split: where its tiles of 256 inputs and
    outputs, each a cluster of two CTAs', would leave most of the GPU idle.
    """
    tiles = -(-k // 256) * -(-n // 256)
    return max(1, min(multiprocessors() // 2 // tiles, m // _ROWS_OF_PART))


def has_mma() -> bool:
    """Whether products of more than ``STREAM_TOKENS`` have a kernel of other architectures on the GPU here."""
    return _gpu()[0] != "9.0" and _capability() >= (8, 0)


def parameter_types(scale_dtype, shift_dtype):
    """What scales and zeros or offsets are to a kernel of products: if float ones differ, float32 both."""
    if shift_dtype is None or not jnp.issubdtype(shift_dtype, jnp.floating) or shift_dtype == scale_dtype:
        return scale_dtype, shift_dtype
    return jnp.dtype(jnp.float32), jnp.dtype(jnp.float32)


class Product(NamedTuple):
    """``[batch, m, k] x [batch, k, n]``, the latter packed, as far as the choice of a kernel depends on it."""

    m: int
    k: int
    n: int
    batch: int
    bits: int
    x_dtype: Any
    scale_dtype: Any
    shift_mode: ShiftMode = ShiftMode.NONE
    shift_dtype: Any = None  # None without zeros and offsets
    groups: int = 1
    parameter_row: int | None = None  # elements of a row of scales and of shift, if more than n

    @property
    def outputs(self) -> int:
        return self.batch * self.n

    @property
    def row(self) -> int:
        return self.parameter_row or self.n

    @property
    def parameter_types(self) -> list:
        """Of scales, and of zeros or offsets if there are any."""
        shifted = self.shift_mode in (ShiftMode.ZEROS, ShiftMode.OFFSETS)
        return [self.scale_dtype, *([self.shift_dtype] if shifted else [])]

    @property
    def own_types(self) -> list:
        """The same, of floats that of the activations."""
        return [self.x_dtype if jnp.issubdtype(dtype, jnp.floating) else dtype for dtype in self.parameter_types]

    def with_own_types(self) -> "Product":
        scale, *shift = self.own_types
        return self._replace(scale_dtype=scale, shift_dtype=shift[0] if shift else self.shift_dtype)

    @property
    def weight_bytes(self) -> float:
        return self.outputs * self.k * self.bits / 8

    @property
    def group_size(self) -> int:
        return self.k // max(self.groups, 1)

    @property
    def small_groups(self) -> bool:
        return self.groups > 1 and self.group_size in (32, 64)

    @property
    def split(self) -> bool:
        """float32 activations, which are taken as several 16-bit numbers each."""
        return jnp.dtype(self.x_dtype).itemsize == 4

    @property
    def table(self) -> bool:
        return self.shift_mode == ShiftMode.TABLE

    @property
    def floats(self) -> bool:
        """Zeros or offsets that are no bytes."""
        return self.shift_mode != ShiftMode.NONE and self.shift_dtype != jnp.uint8

    @property
    def shifted(self) -> bool:
        """As ``has_float_shift`` in ``ffi/cuda/matmul.h``."""
        return self.floats and not self.table

    def without_shift(self) -> "Product":
        return self._replace(shift_mode=ShiftMode.NONE, shift_dtype=None)

    @property
    def plain(self) -> bool:
        """As ``warpgroup::is_plain`` in ``ffi/cuda/matmul_warpgroup.cu``."""
        if self.split or self.scale_dtype != self.x_dtype:
            return False
        zeros = self.shift_mode == ShiftMode.ZEROS and self.shift_dtype == jnp.uint8 and self.row % 16 == 0
        return zeros or (self.shift_mode == ShiftMode.NONE and self.row % 8 == 0)

    @property
    def scheme(self) -> _cuda_costs.Scheme:
        alike = self.plain
        if self.floats and not self.split:
            alike = self.scale_dtype == self.shift_dtype == self.x_dtype and self.row % 8 == 0
        ends = {32: 4, 64: 2}[self.group_size] if self.small_groups else 1
        zeros, half = self.shift_mode == ShiftMode.ZEROS, self.x_dtype == jnp.float16
        return _cuda_costs.Scheme(self.bits, ends, zeros, self.shifted, alike, self.split, half, self.table)


def mixes_types(p: Product) -> bool:
    """Whether activations of 16 bits meet scales of the other such type, as those of float16 checkpoints in bfloat16
    models are: kernels for many tokens take float32 instead.
    """
    return not p.split and p.scale_dtype not in (p.x_dtype, jnp.float32)


def with_float32_parameters(p: Product) -> Product:
    """The same with float32 scales, and float zeros or offsets."""
    shift = jnp.dtype(jnp.float32) if p.floats else p.shift_dtype
    return p._replace(scale_dtype=jnp.dtype(jnp.float32), shift_dtype=shift)


def widened(p: Product) -> Product:
    """A product whose scales, and float zeros or offsets, become float32 first, exactly, where they are of the other
    16-bit type than the activations and that is expected to be faster.
    """
    if not (mixes_types(p) and isinstance(p.m, int) and p.m > STREAM_TOKENS):
        return p
    wide = with_float32_parameters(p)
    bytes_of_both = p.groups * p.outputs * sum(2 + jnp.dtype(dtype).itemsize for dtype in wide.parameter_types)
    converting = _CONVERT_START + bytes_of_both / _MEMORY
    return wide if min(estimate(wide)) + converting < min(estimate(p)) else p


def rounded(p: Product, *, transpose: bool) -> Product:
    """A product whose float32 activations, or with transposed weights cotangents, may become bfloat16, with those,
    where that is expected to be faster.
    """
    if transpose:
        return rounded_cotangents(p, read=p.weight_bytes)
    if not p.split or not has_bf16():
        return p
    single = in_bfloat16(p)
    if not isinstance(p.m, int):
        return single
    rounding = _CONVERT_START + p.batch * p.m * p.k * (4 + 2) / _MEMORY
    return single if min(estimate(single)) + rounding < min(estimate(p)) else p


def rounded_cotangents(p: Product, *, read: float, of: int = 1) -> Product:
    """The same of a product with transposed weights, of which ``read`` bytes are read for few rows of each ``of`` of
    them. Those of few weights take what a kernel takes to start (measured).
    """
    if not p.split or not has_bf16():
        return p
    few = isinstance(p.m, int) and p.m <= STREAM_TOKENS * of
    return p if few and not p.table and read < _APART_BYTES else in_bfloat16(p)


def in_bfloat16(p: Product) -> Product:
    """The same with bfloat16 activations."""
    return p._replace(x_dtype=jnp.dtype(jnp.bfloat16))


def scratch(p: Product, x_batch: int) -> int:
    """Words of scratch with which a product runs fastest on the GPU here, if x has ``x_batch`` entries of the batch."""
    name = kernel(p) if p.split or _aligns(p) else ""
    if name == "matmul_warpgroup" or _in_token_tiles(p, name):
        # For pieces of x, and what CTAs leave each other; without it there is nothing to compare tiles of tokens with.
        sums = -(-p.k // 128) * p.scheme.ends if p.scheme.floats else 0
        pieces = _abi.split_scratch(x_batch, p.m, p.k, p.n, p.batch, sums) if p.split else 0
        return pieces + _warpgroup_scratch_of(p) + (_aligned_scratch(p) if _aligns(p) else 0)
    if p.split:
        return 0
    if isinstance(p.m, int) and p.m <= STREAM_TOKENS:
        return _warpgroup_scratch_of(p) if kernel(p) == "matmul_warpgroup" else 0
    if parts := _parts(p):
        name, config = parts.second
        outputs = p.n - parts.outputs
        if name == "matmul_tiled":
            return _abi.matmul_scratch(1, p.m, outputs, _LEAST_TILE)
        return _warpgroup_scratch(p.m, outputs, config)
    if tiled_kernel(p):
        if p.m >= _least_tiled_tokens(p):
            of_warpgroups = _warpgroup_scratch_of(p) if warpgroup_kernel(p) and isinstance(p.m, int) else 0
            return max(_tiled_scratch(p), of_warpgroups)
        return _warpgroup_scratch_of(p) if warpgroup_kernel(p) else 0
    if _mma_kernel(p):
        return _abi.mma_scratch(p.batch, p.m, p.n, _cuda_costs.MMA_CTAS * _gpu()[1])
    return _warpgroup_scratch_of(p) if isinstance(p.m, int) and warpgroup_kernel(p) else 0


def _tiled_scratch(p: Product) -> int:
    return _abi.matmul_scratch(p.batch, p.m, p.n, _LEAST_TILE)


def _warpgroup_scratch_of(p: Product) -> int:
    config, _ = min(_warpgroup_times(p), key=lambda pair: pair[1])
    return _warpgroup_scratch(p.m, p.n, config)


def _warpgroup_scratch(m: int, outputs: int, config: tuple) -> int:
    tokens, warpgroups, cluster, teams = config
    if cluster == _cuda_costs.EVENLY:
        return _abi.even_scratch(_gpu()[1] * teams, tokens, warpgroups)
    return _abi.team_scratch(-(-m // tokens) * -(-outputs // 128), cluster, tokens) if teams > 1 else 0


def _aligned_scratch(p: Product) -> int:
    sizes = [jnp.dtype(dtype).itemsize for dtype in p.parameter_types]
    return _abi.aligned_rows_scratch(p.batch * p.groups, _aligned_row(p), sizes)


def decode_kernel(p: Product) -> bool:
    """As ``decode::supports`` in ``ffi/cuda/matmul_decode.cu``, which has the last word."""
    if not has_warpgroups() or p.table or p.m > _DECODE.tokens:
        return False
    size = jnp.dtype(p.scale_dtype).itemsize
    if p.shift_mode != ShiftMode.NONE and jnp.dtype(p.shift_dtype).itemsize not in (1, size):
        return False
    group = p.group_size if p.groups > 1 else 128
    if group == 32 and p.m > 1:
        return False
    return group >= 128 or p.k % 128 == 0


def _is_alike(p: Product) -> bool:
    """Whether scales, and float zeros or offsets, are of the activations' type."""
    return p.scale_dtype == p.x_dtype and (not p.shifted or p.shift_dtype == p.x_dtype)


def _mixes_shifts(p: Product) -> bool:
    """As ``resident::mixes_shifts`` in ``ffi/cuda/matmul_resident.cu``."""
    return p.shifted and not _is_alike(p)


def _resident_kernel(p: Product) -> bool:
    """As ``resident::supports`` in ``ffi/cuda/matmul_resident.cu``, which has the last word: of one tile."""
    tokens = _RESIDENT[p.bits, p.split].tokens // (1 + (p.split or p.shifted))
    if not has_warpgroups() or p.k % 64 or p.k > _RESIDENT_INPUTS or not 0 < p.m <= tokens:
        return False
    if not p.split and _is_alike(p):
        return True
    return not (p.split and p.shifted) and p.n * jnp.dtype(p.scale_dtype).itemsize % 4 == 0


def warpgroup_kernel(p: Product) -> bool:
    """As ``warpgroup::supports`` in ``ffi/cuda/matmul_warpgroup.cu``, which has the last word."""
    rows = all(p.row * jnp.dtype(dtype).itemsize % 16 == 0 for dtype in p.parameter_types)
    aligned = p.k % 8 == 0 and (p.groups <= 1 or rows)
    return has_warpgroups() and aligned


def _aligned_row(p: Product) -> int:
    return whole(p.n, _abi.ROW_ELEMENTS)


def _aligns(p: Product) -> bool:
    """Whether rows of scales and shift are copied before ``matmul_warpgroup`` begins, if it is taken."""
    return _aligned(p) not in (None, p)


def _aligned(p: Product) -> Product | None:
    """What ``matmul_warpgroup`` takes of a product: it as it is, or with rows of scales and shift that are copied first
    to where bulk copies reach them, as ``aligns_rows`` in ``ffi/cuda/matmul.cu``; None where it takes neither.
    """
    if warpgroup_kernel(p):
        return p
    aligned = p._replace(parameter_row=_aligned_row(p))
    few = p.m <= _STREAM.tokens and (p.weight_bytes < _DECODE.weights or _resident(p) < math.inf)
    return aligned if not few and warpgroup_kernel(aligned) else None


def _in_tiles(p: Product) -> bool:
    """As ``tiled::takes`` in ``ffi/cuda/matmul_tiled.cu``, which has the last word."""
    shift = p.table or not p.floats or p.shift_dtype == p.scale_dtype
    return not p.split and p.k % 8 == 0 and p.scale_dtype in (p.x_dtype, jnp.float32) and shift


def tiled_kernel(p: Product) -> bool:
    """Whether there is a kernel with tiles for hundreds of tokens, or of rows of an expert, and with a table."""
    return has_warpgroups() and _in_tiles(p)


def _least_tiled_tokens(p: Product) -> int:
    """Below which ``matmul_tiled`` is never taken."""
    if not warpgroup_kernel(p) or p.table:
        return STREAM_TOKENS + 1
    return _TILED_TOKENS if p.bits == 4 and not p.small_groups else _TILED_TOKENS_OF_SMALL_GROUPS


def _mma_kernel(p: Product) -> bool:
    """As ``mma::supports`` in ``ffi/cuda/matmul_mma.cu``."""
    return has_mma() and _is_alike(p) and not p.table and _in_tiles(p)


def _warpgroup_times(p: Product):
    of_tables, others = (_SPLIT_TABLE, _SPLIT_WARPGROUPS) if p.split else (_TABLE_WARPGROUPS, _WARPGROUPS)
    costs = of_tables if p.table else others
    scheme = (_aligned(p) or p).scheme
    before = _ALIGNED_ROWS_START + 4 * _aligned_scratch(p) / _ALIGNED_ROWS_BYTES if _aligns(p) else 0.0
    times = _cuda_costs.warpgroup_times(max(p.m, 1), p.k, p.n, p.batch, scheme, _gpu()[1], costs)
    return ((config, before + us) for config, us in times)


def _warpgroup(p: Product) -> float:
    return _least(_warpgroup_times(p))


def _decode_is_slower(p: Product) -> bool:
    """Whether ``matmul_decode`` is, where ``matmul_resident`` takes a product too."""
    if not p.floats and p.batch >= _DECODE.entries:
        return False
    resident = min(_resident_times(p), key=lambda pair: pair[1], default=None)
    if resident is None:
        return False
    if p.bits == 4 and _mixes_shifts(p):
        return _cuda_costs.resident_blocks(p.m, p.k, p.n, p.bits, resident[0][:3]) > 0
    if p.m > 1 or (not p.floats and p.scheme.ends == 4):
        return True
    spread = p.k >= _DECODE.spread and not p.split
    if not p.floats and spread:
        return True
    if not p.floats or p.bits == 8:
        return p.weight_bytes < _DECODE.heavy
    return p.weight_bytes < (_DECODE.rivalled if spread else _DECODE.heavy // 2)


def _resident_times(p: Product):
    """Of every configuration, (cluster, parts, strips of a pass, tiles of tokens), as ``resident::choose``."""
    tiles = {1}
    if p.batch == 1 and isinstance(p.m, int) and p.weight_bytes <= _RESIDENT_TILED_BYTES:
        tiles |= {-(-p.m // tokens) for tokens in ((8, 4) if p.split else (8,)) if p.m > tokens}
    for count in sorted(tiles):
        tile = p if count == 1 else p._replace(m=-(-p.m // count), batch=count)
        if count <= _RESIDENT_TILES and _resident_kernel(tile):
            costs = _RESIDENT[p.bits, p.split]
            times = _cuda_costs.resident_times(tile.m, p.k, p.n, tile.batch, p.scheme, _is_alike(p), _gpu()[1], costs)
            yield from (((*config, count), us) for config, us in times)


def _in_token_tiles(p: Product, name: str) -> bool:
    """Whether the kernel for a product is ``matmul_resident``, of more tokens than it has in one tile."""
    return name == "matmul_resident" and not _resident_kernel(p)


def _resident(p: Product) -> float:
    return min((us for _, us in _resident_times(p)), default=math.inf)


def _stream(p: Product) -> float:
    us = _streamed(p)
    if p.m <= STREAM_TOKENS or (p.table and p.split):  # whose waves were not measured
        return us
    small = p.split and p.small_groups
    wave = _STREAM.wave / (_STREAM.small_groups_float32 if small else 1.0)
    waves = _cuda_costs.stream_waves(p.m, p.n, p.batch, p.table, _capability() >= (9, 0), _gpu()[1])
    return max(us, waves * wave) if waves > _FEW_WAVES else us


def _streamed(p: Product) -> float:
    """What reading the weights takes."""
    return _cuda_costs.stream_time(p.m, p.weight_bytes, p.scheme, _STREAM)


def _tiled_times(p: Product):
    costs = _TABLE_TILED if p.table else _TILED
    return _cuda_costs.tiled_times(p.m, p.n, -(-p.k // 64), p.batch, p.scheme, _gpu()[1], costs)


def _tiled(p: Product) -> float:
    return _least(_tiled_times(p))


class TwoKernels(NamedTuple):
    """Those of a product: names with configurations, outputs of the first, and microseconds of both."""

    first: tuple[str, tuple]
    second: tuple[str, tuple]
    outputs: int
    us: float


def _parts(p: Product) -> TwoKernels | None:
    """As ``parts::choose`` in ``ffi/cuda/matmul_parts.cu``; None where one kernel is faster."""
    if not isinstance(p.m, int) or p.m <= _PARTS.tokens or p.batch != 1 or p.split or p.table:
        return None
    return _parts_on(p, _gpu()) if warpgroup_kernel(p) else None


@functools.lru_cache(4096)
def _parts_on(p: Product, gpu: tuple[str, int]) -> TwoKernels | None:
    in_tiles = tiled_kernel(p) and p.m >= _least_tiled_tokens(p)

    def fastest(outputs: int, whole: bool) -> tuple[tuple[str, tuple], float]:
        # Scales' rows are those of all outputs.
        part = p._replace(n=outputs, parameter_row=p.row)
        times = [(("matmul_warpgroup", config), us) for config, us in _warpgroup_times(part)]
        if in_tiles:
            times += [(("matmul_tiled", config), us) for config, us in _tiled_times(part)]
        if whole:
            times = [pair for pair in times if _may_be_first(pair[0], outputs)]
        return min(times, key=lambda pair: pair[1], default=(("", ()), math.inf))

    best, least = None, _PARTS.gain * min(_warpgroup(p), _tiled(p) if in_tiles else math.inf)
    for outputs in sorted(_cuda_costs.part_outputs(p.m, p.n, gpu[1], _WARPGROUPS, _TILED)):
        first, us = fastest(outputs, True)
        if _PARTS.join + us >= least:
            continue
        second, rest = fastest(p.n - outputs, False)
        if _PARTS.join + us + rest < least:
            least = _PARTS.join + us + rest
            best = TwoKernels(first, second, outputs, least)
    return best


def _may_be_first(kernel: tuple[str, tuple], outputs: int) -> bool:
    """Whether its tiles are full, and it takes no scratch."""
    name, config = kernel
    if name == "matmul_tiled":
        _, splits, ctas = config
        return splits == 1 and outputs % (128 * ctas) == 0
    _, warpgroups, cluster, teams = config
    return teams == 1 and cluster != _cuda_costs.EVENLY and outputs % (64 * warpgroups) == 0


def _mma_times(p: Product):
    capability = _capability()
    kib = 228 if 9 <= capability[0] <= 11 else 164 if capability in ((8, 0), (8, 7)) else 100
    return _cuda_costs.mma_times(p.m, p.k, p.n, p.batch, p.scheme, _gpu()[1], kib << 10, _MMA)


def _mma(p: Product) -> float:
    return _least(_mma_times(p))


def _least(times) -> float:
    return min(us for _, us in times)


def kernel(p: Product) -> str:
    """The fused kernel for a product.

    As ``launch_matmul`` in ``ffi/cuda/matmul.cu``, which has the last word; here for where there is no GPU.
    """
    share, wanted = _gpu()[1] // p.batch, _gpu()[1] * 9 // 10  # multiprocessors for each of the batch
    if (
        decode_kernel(p)
        and p.weight_bytes >= _DECODE.weights
        and p.k >= _DECODE.inputs
        and -(-p.k // 128) <= _DECODE.stages
        and (p.bits == 4 or p.group_size < 128 or _DECODE.ratio * p.outputs > p.k)
        and not _decode_is_slower(p)
        and share * p.batch >= wanted
        and 2 * p.batch * min(-(-p.n // 16), share) >= wanted
    ):
        return "matmul_decode"
    few = _resident_kernel(p)
    if p.split and few and _resident(p) < math.inf:
        return "matmul_resident"
    wide = p.bits == 8 and p.batch * -(-p.n // TILE_N) > _gpu()[1]
    aligned = _aligned(p)
    by_warpgroups = aligned is not None
    always = aligned is not None and (p.small_groups or aligned.plain or p.split or p.table or (p.floats and few))
    streamed = p.m <= _STREAM.tokens and not wide and not always
    other = math.inf
    if by_warpgroups and not streamed:
        other = _warpgroup(p)
        if (p.split or p.table) and not _aligns(p) and p.m <= STREAM_TOKENS:
            streaming = _stream(p)
            by_warpgroups, other = other < streaming, min(other, streaming)
    elif not streamed:
        other = _stream(p)
    odd_rows = aligned is None and warpgroup_kernel(p._replace(parameter_row=_aligned_row(p)))
    if few and _resident(p) < (math.inf if odd_rows else other):  # streaming odd rows takes longer than estimated
        return "matmul_resident"
    if not streamed:
        # With a table another pass takes longer in any case.
        least = other if by_warpgroups or not p.table else math.inf
        in_tiles = p.m >= _least_tiled_tokens(p) and tiled_kernel(p)
        if not few and _resident(p) < (min(least, _tiled(p)) if in_tiles else other):
            return "matmul_resident"
        if parts := _parts(p):
            return f"{parts.first[0]} + {parts.second[0]}"
        if in_tiles and _tiled(p) < least:
            # Where its scratch has no room for rows of scales that are copied, streaming is what is left beside it.
            streams = _aligns(p) and not p.table and _aligned_scratch(p) > _tiled_scratch(p)
            return "matmul_stream" if streams and _stream(p) <= _tiled(p) else "matmul_tiled"
        if by_warpgroups:
            return "matmul_warpgroup"
        if p.m > STREAM_TOKENS and _mma_kernel(p) and _mma(p) < other:
            return "matmul_mma"
    return "matmul_stream"


def rounds_weights(p: Product) -> bool:
    """Whether the kernel for a product rounds weights, or a table, to the type of x."""
    if p.table:
        return not p.split
    name = kernel(p)
    if " + " in name and (parts := _parts(p)):
        return any(name == "matmul_tiled" or p.scheme.rounds(config[0]) for name, config in parts[:2])
    if name != "matmul_warpgroup" or p.split:
        return name in ("matmul_tiled", "matmul_mma")
    (tokens, *_), _ = min(_warpgroup_times(p), key=lambda pair: pair[1])
    return (_aligned(p) or p).scheme.rounds(tokens)


def estimate(p: Product) -> tuple[float, float]:
    """Microseconds of a product: fused, and dequantized for a dense product."""
    operations = 2.0 * p.outputs * p.k  # of one token
    dense_bytes = p.weight_bytes + p.outputs * p.k * jnp.dtype(p.x_dtype).itemsize
    rate = _DENSE_FLOAT32 if p.split else _DENSE_OF.get(_gpu()[0].split(".")[0], _DENSE_MMA)
    rate /= _DENSE_ODD if p.n % _WHOLE or p.k % _WHOLE else 1.0
    dense = p.m * operations / rate * (_MULTIPROCESSORS / _gpu()[1] if has_mma() else 1)
    dense += (_DENSE_START_FLOAT32 if p.split else _DENSE_START) + dense_bytes / _MEMORY
    aligned = _aligned(p)
    fused = math.inf if aligned is None else _warpgroup(p)
    if aligned is None or ((p.split or p.table) and aligned is p and p.m <= STREAM_TOKENS):
        fused = min(fused, _stream(p))
    if p.split and p.m > STREAM_TOKENS:
        fused += _SPLIT_BYTES * p.batch * p.m * p.k / _MEMORY
    fused = min(fused, _resident(p))
    if tiled_kernel(p):
        fused = min(fused, _tiled(p))
    if parts := _parts(p):
        fused = min(fused, parts.us)
    if p.m > STREAM_TOKENS and _mma_kernel(p):
        fused = min(fused, _mma(p))
    return fused, dense


def transposed_shift_apart(p: Product) -> bool:
    """Whether float zeros or offsets meet float32 cotangents in a dense product of their own, which is added to all
    inputs of a group.
    """
    passes = 1 if p.weight_bytes >= _APART_BYTES else 2
    if not (p.split and p.floats and isinstance(p.m, int) and p.m > passes * _STREAMED_ROWS):
        return False
    return transposed_kernel(p.without_shift()) == "matmul_transposed_warpgroup"


def use_kernel(p: Product) -> bool:
    """Whether the fused kernels are expected to be at least as fast as dequantizing."""
    if p.m <= STREAM_TOKENS:
        return True
    if p.table and not p.split:
        if p.m > TABLE_TOKENS and p.n <= TILE_N:  # tiles would be half empty
            return False
        if p.m <= TABLE_TOKENS or tiled_kernel(p):
            return True
    fused, dense = estimate(p)
    return fused <= dense


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
    """Whether the kernels are expected to be as fast as dequantized weights and XLA's convolution: in less than
    ``_SURE_CONV`` microseconds they nearly always were, whatever the latter was expected to take (log, 137).

    There is a second kernel as ``conv::supports_warpgroups`` in ``ffi/cuda/conv.cu`` says, which has the last word.
    ``bands``: what ``band_conv_time`` says.
    """
    if (dense := conv_dense(pixels, k, n, window.taps, bits)) < _SURE_CONV:
        return True
    phases = math.prod(window.lhs_dilation)
    plain = Product(pixels, k, n, 1, bits, x_dtype, x_dtype, shift_mode, shift_dtype).plain
    warpgroups = phases == 1 and k // groups % 64 == 0 and plain
    times = conv_times(pixels, k, n, window.taps, bits, phases, warpgroups)
    fastest = min(*times.values(), math.inf if bands is None else bands)
    return fastest <= dense


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
    """Whether that kernel is at least as fast as dequantized weights and XLA's convolution, as far as was measured:
    what cuDNN has no kernel of its own for takes it several times as long (log, 137).
    ``bands``: what ``band_conv_time`` says; in groups, that kernel is taken wherever it is one.
    """
    few_taps = window.taps <= 9
    if n != k * groups:
        return few_taps or n >= 64
    if k > 1:
        if k & (k - 1) or (bands is not None and few_taps):
            return True
        most = _FEW_PRODUCTS_STRIDED if 2 in window.strides else _FEW_PRODUCTS
        return few_taps and (k < 16 or pixels * n * k**3 <= most)
    plain = window.size == (3, 3) and max(*window.strides, *window.rhs_dilation) == 1 and n % 64 == 0
    return not plain or pixels * n <= _FEW_OUTPUTS


def conv_times(
    pixels: int, k: int, n: int, taps: int, bits: int, phases: int = 1, warpgroups: bool = True
) -> dict[tuple, float]:
    """Microseconds of a convolution in every configuration: ``("tiled", tokens, splits, CTAs of a cluster)``, and with
    ``warpgroups`` ``("warpgroup", tokens, warpgroups, cluster)``; ``phases``: the product of the lhs_dilation.
    """
    stages = -(-taps // phases) * -(-k // 64)
    scheme = _cuda_costs.Scheme(bits)
    times = _cuda_costs.tiled_times(pixels // phases, n, stages, phases, scheme, _gpu()[1], _CONV_TILES)
    found = {("tiled", *config): us for config, us in times}
    if warpgroups:
        times = _cuda_costs.warpgroup_times(pixels, taps * k, n, 1, scheme, _gpu()[1], _CONV_WARPGROUPS)
        found |= {("warpgroup", *config): us for (*config, _), us in times}
    return found


def conv_dense(pixels: int, k: int, n: int, taps: int, bits: int) -> float:
    """Microseconds of dequantizing, turning the weights as cuDNN wants them, and its convolution. That multiplies what
    lies between the pixels of transposed convolutions, too.
    """
    weights = taps * k * n
    return _CONV_START + weights * (bits / 8 + 6) / _MEMORY + 2.0 * weights * pixels / _CONV


def transposed_kernel(p: Product) -> str:
    """The kernel that ``launch_matmul_transposed`` in ``ffi/cuda/matmul_transposed.cu`` takes for ``p.m`` rows, if it
    does.
    """
    takes = p.n % 8 == 0 and (not streams_transposed(p) or not isinstance(p.m, int) or p.m > _few_transposed(p))
    if p.split:  # in scratch, of a known size
        takes = takes and isinstance(p.m * p.batch, int) and not p.shifted
        takes = takes and (p.batch == 1 or p.batch * p.m * p.n <= _MOST_SPLIT)
    if has_warpgroups() and takes:
        return "matmul_transposed_warpgroup"
    return "matmul_transposed_stream"


def _few_transposed(p: Product) -> int:
    """As ``most_streamed`` in ``ffi/cuda/matmul_transposed.cu``."""
    if p.split:
        return TRANSPOSED.stream_tokens if p.small_groups else TRANSPOSED.stream_tokens_float32
    strips, passes = p.batch * -(-p.k // _STRIP_INPUTS), 2 if p.table else 1
    if (p.table or streams_more_transposed(p)) and strips * passes <= _gpu()[1]:
        return TRANSPOSED.stream_wave_tokens if p.bits == 4 else TRANSPOSED.stream_wave_tokens_of_eight_bits
    return TRANSPOSED.stream_tokens


def streams_more_transposed(p: Product) -> bool:
    """As ``is_known_for_more`` in ``ffi/cuda/matmul_transposed.cu``."""
    symmetric = p.shift_mode == ShiftMode.NONE and p.scale_dtype == p.x_dtype
    return symmetric and not (p.groups > 1 and p.group_size == 32)


def streams_transposed(p: Product) -> bool:
    """Whether a kernel streams such weights, transposed: ``transposed_stream::supports`` in
    ``ffi/cuda/matmul_transposed.cu``.
    """
    return not p.table or p.x_dtype == jnp.bfloat16 or (p.x_dtype == p.scale_dtype == jnp.float16)


def transposed_scratch(p: Product, dy_batch: int, parameter_batch: int) -> int:
    """Words of scratch that the product with transposed weights takes, if dy has ``dy_batch`` entries of the batch, and
    scales or shift as many as ``parameter_batch``.
    """
    if p.split and transposed_kernel(p) == "matmul_transposed_warpgroup":
        return _abi.transposed_float32_scratch(dy_batch, p.m, p.n, p.batch, parameter_batch, p.groups)
    return 0


def rounds_transposed_parameters(p: Product) -> bool:
    """Whether other scales, and offsets, become bfloat16 before the product of ``p.m`` rows with transposed weights: it
    then keeps weights in registers (``transposed_warpgroup::in_registers`` in ``ffi/cuda/matmul_transposed.cu``), which
    saves a fifth of its time with tens of rows and a tenth with thousands.
    """
    if not isinstance(p.m, int) or (p.bits == 8 and p.m > _REGISTER_TOKENS_OF_EIGHT_BITS):
        return False
    return may_round_parameters(p) and transposed_kernel(p) == "matmul_transposed_warpgroup"


def may_round_parameters(p: Product) -> bool:
    """Whether that loses no more than rounding weights does, and is of use: what float zeros are more than integers may
    be less than bfloat16 tells apart.
    """
    if jnp.dtype(p.x_dtype) != jnp.bfloat16 or p.parameter_types == p.own_types:
        return False
    integers = p.shift_mode == ShiftMode.ZEROS and p.shift_dtype == jnp.uint8 and p.n % _ROW_OF_BYTES == 0
    return integers or p.shift_mode in (ShiftMode.NONE, ShiftMode.TABLE, ShiftMode.OFFSETS)


def whole(size: int, step: int = _WHOLE) -> int:
    """Inputs or outputs with zeros behind, as many as make whole pieces of those that kernels read at once."""
    return -(-size // step) * step


def whole_inputs(p: Product, *, forced: bool = False) -> Product:
    """A product with activations that have zeros behind, up to what its packed tiles have anyway: where rows of them
    are no multiple of 16 bytes, which no kernel for more than a few tokens takes, and copying them is expected to be
    faster than dequantizing, or fused kernels are ``forced``.
    """
    padded = p._replace(k=whole(p.k, tile_k(p.bits)))
    if p.k % _WHOLE == 0 or (isinstance(p.m, int) and p.m <= _DECODE.tokens):
        return p
    if forced or not isinstance(p.m, int) or p.m <= STREAM_TOKENS:
        return padded
    copied = p.batch * p.m * (p.k + padded.k) * jnp.dtype(p.x_dtype).itemsize
    (fused, _), (_, dense) = estimate(padded), estimate(p)
    return padded if fused + _COPY_START + copied / _MEMORY <= dense else p


def whole_outputs(p: Product) -> Product:
    """A transposed product with cotangents and scales of whole eights of outputs, in which its kernels, and XLA's, read
    them. Of few rows and outputs the kernel that streams takes any.
    """
    few = isinstance(p.m, int) and p.m <= STREAM_TOKENS and p.n < _COPIED_OUTPUTS and streams_transposed(p)
    return p if few else p._replace(n=whole(p.n))


def use_transposed_kernel(p: Product, *, forced: bool = False) -> bool:
    """Whether ``[batch, m, n]`` times transposed weights takes a fused kernel; ``forced``: wherever there is one."""
    if not has_bf16():
        return False
    if transposed_kernel(p).endswith("warpgroup"):
        return True
    if not streams_transposed(p):
        return False
    if forced or not isinstance(p.m, int):
        return True
    if transposed_shift_apart(p):
        return True
    return p.m <= most_streamed(p.x_dtype)


def most_streamed(x_dtype) -> int:
    """Rows of a weight up to which several passes over it take less than dequantizing it."""
    return _TRANSPOSED_TOKENS_FLOAT32 if jnp.dtype(x_dtype).itemsize == 4 else _TRANSPOSED_TOKENS


def use_quantized_kernel(
    p: Product, *, blocks: bool, float8: bool = False, shifted: bool = False, forced: bool = False
) -> bool:
    """Whether quantized activations meet the codes of the weights, or are dequantized for a product of their own type.

    Args:
      p: that product.
      blocks: scales are those of groups of the inputs, on either side.
      float8: codes of the activations are float8.
      shifted: sums of codes meet zeros or offsets that codes do not take off exactly.
      forced: wherever there is a kernel.
    """
    if not has_warpgroups() or p.m == 0:
        return False
    if forced or not isinstance(p.m, int):
        return True
    waves = -(-p.batch * -(-p.m // _QUANTIZED_TOKENS) * -(-p.n // _TILE_OUTPUTS) // (_gpu()[1] // 2))
    if blocks:
        stage = _QUANTIZED_SHIFTED if shifted else _QUANTIZED_BLOCKS
    else:
        stage = _QUANTIZED_FLOAT8 if float8 else _QUANTIZED_ROWS
    us = 3 + waves * (-(-p.k // 128) * stage + _QUANTIZED_END)
    dequantizing = 3 * p.batch * p.m * p.k / _MEMORY
    return us < dequantizing + min(estimate(p))
