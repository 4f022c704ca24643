"""Which of the fused kernels a product with experts takes on a GPU, and whether it takes one.

As ``launch_ragged_matmul`` in ``ffi/cuda/ragged_matmul.cu`` and ``launch_ragged_matmul_transposed`` in
``ffi/cuda/matmul_transposed.cu``, which have the last word; here for where there is no GPU. Of a ``Product`` m is the
rows of all experts together, and the batch is the experts. Nothing says what the kernels take: the rows at which they
take turns were measured, and are in ``costs/``.
"""

import jax.numpy as jnp

from jax_wonly import _abi, _cuda_costs, _cuda_dispatch
from jax_wonly._abi import ShiftMode
from jax_wonly._cuda_dispatch import Product
from jax_wonly._format import tile_k

_RAGGED = _cuda_costs.Ragged(**_cuda_dispatch.SM90["ragged"])
_LOW_ROWS, _HIGH_ROWS = 64, 128  # of a tile of ragged_warpgroup
# A CTA makes the plan of so many experts itself, and puts so many ids in order (ragged_plan.h), with masks more
# (ragged_resident.cuh).
_OWN_EXPERTS, _OWN_IDS, _MASKED_IDS = 512, 32, 128
_MOST_OUTPUTS = 1 << 17  # of an expert, whose strips ragged_resident counts as floats
_MOST_ATOMS = 1 << 21  # and matmul_decode strips of 16 outputs, times CTAs
_ROUNDED_ROWS_OF_EXPERT = 2  # up to which rounding them first gains nothing (measured)
# Bytes of shared memory of matmul_decode: digits of 128 inputs, each of their sums, sums of outputs, and static ones.
_DIGITS, _SUMS, _PARTIAL, _STATIC = 1216, 32, 4096, 128


def kernel(p: Product, *, ids: bool) -> str:
    """The fused kernel for a product with an id for each row, or with sizes."""
    if not _cuda_dispatch.has_warpgroups():
        return "matmul_stream"
    if _decode(p, ids):
        return "matmul_decode"
    if _resident(p, ids):
        return "ragged_resident"
    if tile_rows(p, ids=ids):
        return "ragged_warpgroup"
    tiled = p.m >= _RAGGED.tiled_rows * p.batch and _cuda_dispatch.tiled_kernel(p)
    return "ragged_tiled" if tiled else "matmul_stream"


def widened(p: Product, *, ids: bool) -> Product:
    """As ``_cuda_dispatch.widened``: where ``ragged_tiled`` then takes rows that would be streamed."""
    if not (_cuda_dispatch.mixes_types(p) and isinstance(p.m, int)):
        return p
    wide = _cuda_dispatch.with_float32_parameters(p)
    return wide if (kernel(p, ids=ids), kernel(wide, ids=ids)) == ("matmul_stream", "ragged_tiled") else p


def rounded(p: Product, *, transpose: bool) -> Product:
    """As ``_cuda_dispatch.rounded``: products from two rows for each expert on, below which both are bound by the
    weights, of which few rows read those of their experts.
    """
    if transpose:
        read = p.weight_bytes * (min(p.m, p.batch) / p.batch if isinstance(p.m, int) else 1.0)
        return _cuda_dispatch.rounded_cotangents(p, read=read, of=p.batch)
    few = isinstance(p.m, int) and p.m <= _ROUNDED_ROWS_OF_EXPERT * p.batch
    return p if few or not p.split or not _cuda_dispatch.has_bf16() else _cuda_dispatch.in_bfloat16(p)


def rounds_weights(p: Product, *, ids: bool) -> bool:
    """Whether that kernel rounds weights, or a table, to the type of x."""
    if p.table:
        return not p.split
    name = kernel(p, ids=ids)
    return name == "ragged_tiled" or (name == "ragged_warpgroup" and _rounds(p, tile_rows(p, ids=ids)))


def tile_rows(p: Product, *, ids: bool) -> int:
    """Rows of a tile of ``ragged_warpgroup``, 0 where another kernel runs; of what those before it leave.

    As ``ragged_warpgroup::tile_rows`` in ``ffi/cuda/ragged_warpgroup.cu``. Scratch has room for rows in order.
    """
    one, small_groups, experts = p._replace(m=1), p.small_groups, p.batch
    if not _cuda_dispatch.warpgroup_kernel(one):
        return 0
    if not p.split and p.shifted and not _rounds(p, _LOW_ROWS):
        return 0
    if ids and p.m < experts:  # two kernels more, which put the rows in order
        return 0
    if p.split:
        least = _RAGGED.warpgroup_least_float32_rows
        if p.shifted:
            least = _RAGGED.warpgroup_least_float32_rows_of_shifts
            if small_groups:
                least = _RAGGED.warpgroup_least_float32_rows_of_small_groups
        return 0 if p.m < least * experts else _LOW_ROWS
    if p.table:
        least = min(_RAGGED.warpgroup_least_table_rows, 1 + p.k // _RAGGED.warpgroup_table_inputs_of_row)
        return _LOW_ROWS if least * experts <= p.m <= _RAGGED.warpgroup_table_rows * experts else 0
    low = p.bits == 4 and (p.plain or p.floats or not small_groups)
    high = p.plain or p.floats or not low
    wasted = 16 * (-p.n % 256) >= p.n  # of 256 outputs at a time
    more = p.bits == 4 and (p.plain or p.floats) and wasted
    most = _LOW_ROWS if not high else _RAGGED.warpgroup_more_rows if more else _HIGH_ROWS
    if low or p.bits == 8:
        few = _RAGGED.warpgroup_experts_of_row * p.m < experts
    else:
        few = p.m < _RAGGED.warpgroup_least_rows * experts
    if few or p.m > most * experts:
        return 0
    low_rows = _RAGGED.warpgroup_low_rows
    if p.shift_mode == ShiftMode.OFFSETS and p.floats and not small_groups:
        low_rows = _RAGGED.warpgroup_low_rows_of_offsets
    elif p.plain and small_groups:
        low_rows = _RAGGED.warpgroup_low_rows_of_small_groups
    return _LOW_ROWS if low and (not high or p.m <= low_rows * experts) else _HIGH_ROWS


def scratch(p: Product, *, ids: bool, transpose: bool = False, parameter_batch: int = 1):
    """Words of scratch with which either product runs fastest on the GPU here; ``p.m`` may be symbolic.

    There is room for rows in order, of 16 bits or as two such numbers and a power of two, where ``ragged::can_order``
    in ``ffi/cuda/ragged_plan.cu`` and the kernels want it; of float32 cotangents also for the parameters of
    ``parameter_batch`` weights.
    """
    ordered = parameters = 0
    row_length = p.n if transpose else p.k
    if row_length % 8 == 0 and _cuda_dispatch.has_warpgroups():
        if not p.split:
            ordered = row_length // 2 if ids else 0
        elif not transpose:
            ordered = row_length + 1 + _float32_sums(p)
        elif _takes_transposed(p) and not (isinstance(p.m, int) and _streams_transposed(p)):
            ordered = row_length + 1
            parameters = _abi.transposed_float32_parameters(parameter_batch, p.n, p.groups, shifted=p.shifted)
    return _abi.ragged_scratch(p.m, p.batch, ordered=ordered) + parameters


def _float32_sums(p: Product) -> int:
    """As ``ragged_warpgroup::float32_sums`` in ``ffi/cuda/ragged_warpgroup.cu``."""
    if not p.shifted:
        return 0
    return -(-p.k // (32 if p.small_groups else 128))


def transposed_kernel(p: Product) -> str:
    """The fused kernel for rows of ``[m, n]`` times their experts' transposed weights."""
    streams = _streams_transposed(p) or not _takes_transposed(p)
    return "matmul_transposed_stream" if streams else "matmul_transposed_warpgroup"


def rounds_transposed_parameters(p: Product) -> bool:
    """As that of ``_cuda_dispatch``, which saves up to a half of the time here. The parameters of all experts are
    rounded, also of those without rows, which is little beside the product from as many rows as experts on.
    """
    if not isinstance(p.m, int) or p.bits == 8 or p.m < p.batch:
        return False
    return _cuda_dispatch.may_round_parameters(p) and transposed_kernel(p) == "matmul_transposed_warpgroup"


def _takes_transposed(p: Product) -> bool:
    """Whether ``matmul_transposed_warpgroup`` takes them: ``transposed_warpgroup::supports`` in
    ``ffi/cuda/matmul_transposed.cu``."""
    return p.n % 8 == 0 and _cuda_dispatch.has_warpgroups()


def _streams_transposed(p: Product) -> bool:
    """Whether they are few enough to be streamed: ``most_streamed_of_expert`` in ``ffi/cuda/matmul_transposed.cu``."""
    few = _cuda_dispatch.TRANSPOSED.stream_rows_of_expert
    if p.bits == 8 and _cuda_dispatch.streams_more_transposed(p):
        few = _cuda_dispatch.TRANSPOSED.stream_rows_of_expert_of_eight_bits
    if p.split:
        few = _cuda_dispatch.TRANSPOSED.stream_rows_of_expert_float32
        if p.shifted:
            few = _cuda_dispatch.TRANSPOSED.stream_rows_of_expert_shifted_float32
    return _cuda_dispatch.streams_transposed(p) and p.m <= few * p.batch


def use_transposed_kernel(p: Product, *, forced: bool = False) -> bool:
    """Whether such rows take a fused kernel; ``forced``: wherever there is one."""
    if not _cuda_dispatch.has_bf16():
        return False
    if _takes_transposed(p):
        return True
    if not _cuda_dispatch.streams_transposed(p):
        return False
    # XLA's ragged product of float32 numbers takes 15 times as long as passes over the weights, at any number of rows.
    every = forced or p.split or not isinstance(p.m, int)
    return every or p.m <= p.batch * _cuda_dispatch.most_streamed(p.x_dtype)


def _rounds(p: Product, rows: int) -> bool:
    """As ``ragged_warpgroup::rounds`` in ``ffi/cuda/ragged_warpgroup.cu``, for tiles of so many rows."""
    if p.bits == 8 or p.split:
        return False
    if p.floats:
        return p.scale_dtype == p.shift_dtype == p.x_dtype and p.n % 8 == 0
    return p.plain and p.small_groups and rows == _HIGH_ROWS


def _plan_bytes(experts: int) -> int:
    """Shared memory of a CTA that finds its tile in a plan: ``ragged::tile_bytes`` in ``ffi/cuda/ragged_plan.cuh``."""
    return 128 + 16 + 16 * (min(experts, _OWN_EXPERTS) + 1) + 4 * _OWN_IDS


def _resident(p: Product, ids: bool) -> bool:
    """As ``launch_resident`` in ``ffi/cuda/ragged_matmul.cu``."""
    few = min(_RAGGED.resident_rows, _RAGGED.resident_rows_of_expert * p.batch)
    of_expert = 1
    if p.table:
        of_expert = _RAGGED.resident_table_rows_of_expert
    elif p.split:
        of_expert = _RAGGED.resident_float32_rows_of_expert
    elif p.n * p.k * p.bits // 8 <= _RAGGED.resident_bytes or (p.bits == 4 and p.small_groups):
        of_expert = _RAGGED.resident_quick_rows_of_expert
    if p.m > max(few, of_expert * p.batch) or p.k % tile_k(p.bits) or p.n % 8 or p.n > _MOST_OUTPUTS:
        return False
    # With tiles of one row, and one strip for a warp, there is room if there is with any.
    masked = ids and _OWN_IDS < p.m <= _MASKED_IDS and p.batch <= _OWN_EXPERTS
    finding = 16 * (p.batch + 1) + 512 if masked else _plan_bytes(p.batch)
    factors = -(-p.k // 128) * 4 if p.split else 0
    all_strips, parts = -(-p.n // 32), max(_cuda_dispatch.multiprocessors() // max(p.m, 1), 1)
    strips = -(-all_strips // parts)
    before = 16 + p.k * jnp.dtype(p.x_dtype).itemsize + 16 + -(-factors // 16) * 16
    if p.table:
        before = -(-before // 128) * 128 + _cuda_costs.PAIR_TABLE_BYTES
    return before + finding + 256 * min(strips, 16) <= _cuda_costs.SHARED_BYTES


def _decode(p: Product, ids: bool) -> bool:
    """As ``launch_decode`` in ``ffi/cuda/ragged_matmul.cu``."""
    small = p.groups > 1 and p.group_size == 32
    tokens = 1 if small else 2  # of a tile
    ctas = _cuda_dispatch.multiprocessors()
    most = min(p.batch // _RAGGED.decode_experts_of_row, ctas)
    if p.bits != 8 or p.split or p.k < _RAGGED.decode_inputs or p.m > most:
        return False
    if not _cuda_dispatch.decode_kernel(p._replace(m=tokens)):
        return False
    stage = _DIGITS + _SUMS * (2 if p.small_groups else 1)
    finding = 0 if ids and p.m <= _OWN_IDS else _plan_bytes(p.batch)
    shared = -(-p.k // 128) * stage + _PARTIAL + finding + _STATIC
    return shared <= _cuda_costs.SHARED_BYTES and -(-p.n // 16) * ctas < _MOST_ATOMS
