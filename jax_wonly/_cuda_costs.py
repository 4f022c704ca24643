"""What the configurations of a product's kernels take on a GPU, in microseconds: models with numbers from ``costs/``.

``benchmarks/fit_costs.py`` fits the numbers to measurements. The C++ dispatcher has the same models with the same
numbers (``matmul.cu``, ``matmul_resident.cu``, ``matmul_tiled.cu``, ``matmul_mma.cu`` and ``direct_conv.cu`` in
``ffi/cuda``, where ``costs.py`` makes a header of them) and the last word; here they choose between the fused kernels
and a dense product, and say what will run where there is no GPU.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Warpgroups(NamedTuple):
    """``matmul_warpgroup`` with one pair of tokens and warpgroups of a CTA."""

    tokens: int
    warpgroups: int
    bits: int  # of codes, for which alone there is a kernel or it is ever the fastest; 0: of either
    stage: float  # 128 inputs, one CTA on a multiprocessor
    shared_stage: float  # two CTAs on it; 0: they do not fit
    start: float  # until the first product, and from the last to the result
    # Of a stage, for every group that ends in it but one (0: no kernel for groups of 32 and 64), and for every one with
    # float zeros or offsets (0: a kernel only with scales of the activations' type). Where weights are rounded, what
    # groups of 32 and 64 add to a stage, and zeros (0: no kernel for such).
    group: float
    sum: float
    paired: float  # in the place of `stage`, of CTAs in pairs; 0: there are none
    # Where weights are rounded, what float16 activations add to a stage, and once more with zeros: codes become
    # integers first.
    half: float = 0.0


class Scheme(NamedTuple):
    """What ``matmul_warpgroup`` wants to know of scales and zeros."""

    bits: int
    ends: int = 1  # groups that end in 128 inputs
    zeros: bool = False  # of any kind
    floats: bool = False  # zeros or offsets that are no bytes
    alike: bool = True  # scales, and float zeros or offsets, of the type of the activations; 16 bits
    split: bool = False  # float32 activations
    half: bool = False  # float16 ones
    table: bool = False

    def shares_evenly(self, tokens: int, warpgroups: int) -> bool:
        """As ``warpgroup::shares_evenly`` in ``ffi/cuda/matmul_warpgroup.h``, but where sums of activations are made or
        scales are of another type."""
        if not (self.plain or self.split or self.table or self.rounds(tokens)):
            return False
        small = self.ends > 1
        if self.split:
            return warpgroups == 2 and self.bits == 4 and tokens >= 32 and (self.table or not small)
        if self.bits == 8:
            of = {} if small or self.zeros else {2: (32, 64, 96, 128), 3: (128,)}
        elif small:
            of = {2: (32, 64), 3: (72, 96, 128)}
        else:
            of = {2: (32, 48, 64, 96, 128), 3: (72, 96, 128, 152, 176)}
        return tokens in of.get(warpgroups, ())

    def pairs(self, tokens: int, warpgroups: int) -> bool:
        """As ``warpgroup::has_pairs`` in ``ffi/cuda/matmul_warpgroup.h``."""
        if warpgroups == 2:
            return tokens >= 96 if self.ends == 1 else tokens >= 128 and self.bits == 4
        return warpgroups == 3 and self.ends == 1 and tokens <= 128 and self.bits == 8

    @property
    def plain(self) -> bool:
        """As ``warpgroup::is_plain`` in ``ffi/cuda/matmul_warpgroup.cu``."""
        return self.alike and not self.floats

    def rounds(self, tokens: int) -> bool:
        """As ``warpgroup::rounds`` there."""
        if self.floats or not self.alike:
            return self.alike
        if self.ends > 1:
            return tokens >= (32 if self.bits == 4 and (self.ends == 4 or not self.zeros) else 64)
        return tokens >= (72 if self.bits == 4 else 96)


class Cluster(NamedTuple):
    """CTAs that share the inputs, what they cost, and the share of all multiprocessors that they can use."""

    ctas: int
    start: float
    share: float  # a cluster lies in one part of the chip


class Tiles(NamedTuple):
    """Products in tiles: ``tiled::Costs`` in ``ffi/cuda/matmul_tiled.h``."""

    stages: tuple[tuple[int, int, float], ...]  # CTAs of a cluster, tokens of its tile, and what 64 inputs take
    start: float
    wave: float
    alone: float
    split: float
    sums: float
    more: float
    most_splits: int
    least_stages: int
    small_groups: float
    low: int
    zeros: float
    eight_bits: float


class BandConv(NamedTuple):
    """``band_conv``: ``bands::Costs`` in ``ffi/cuda/direct_conv.h``."""

    start: float
    weights: float  # of a CTA, for each input of a group
    tile: float
    tap: float  # of a tile
    memory: float  # bytes of x and y per microsecond


class Mma(NamedTuple):
    """``matmul_mma``: ``mma::Costs`` in ``ffi/cuda/matmul_mma.h``."""

    # Tokens of a tile, and what 64 inputs take: with one CTA on every multiprocessor, and with more.
    stages: tuple[tuple[int, float, float], ...]
    start: float
    wave: float
    sums: float
    sum_bytes: float  # per microsecond
    memory: float  # bytes per microsecond
    most_splits: int
    least_stages: int


class Parts(NamedTuple):
    """Products by two kernels: ``parts::Costs`` in ``ffi/cuda/matmul_parts.h``."""

    join: float
    gain: float
    tokens: int


class Stream(NamedTuple):
    """``matmul_stream``, which reads the weights again for every 16 tokens."""

    tokens: int  # of one tile: up to so many it is taken where warpgroups are slower
    start: float
    bytes: float  # of weights per microsecond
    float32: list  # of float32 activations: up to so many tokens, the start, and the bytes
    small_groups_float32: float  # what is left of the bytes with groups of 32 and 64
    shifted_float32: list  # with float zeros or offsets
    small_groups_shifted_float32: float
    table: list  # with a table
    table_float32: list
    wave: float  # of CTAs, where several passes over few outputs make more than one


class Decode(NamedTuple):
    """Where ``matmul_decode`` is taken."""

    tokens: int
    weights: int  # bytes of codes from which on preparing the activations takes less than their cheaper products save
    inputs: int  # from so many on, which are two stages for each of four warpgroups or more
    stages: int  # of 128 inputs of a token, up to as many as the shared memory of two CTAs holds
    ratio: int  # of inputs to outputs, below which even eight bits leave enough to each multiprocessor
    # Where matmul_resident takes a product too: one token of so many bytes of codes or more, and of fewer inputs, where
    # zeros are bytes or none; with float zeros and offsets beside four bits half as many bytes or, of so many inputs,
    # others; and without these batches of so many.
    heavy: int
    spread: int
    rivalled: int
    entries: int


class Ragged(NamedTuple):
    """Products with experts: where kernels take turns, by rows of all experts, or of one were they spread evenly."""

    # ragged_resident: up to one row for each expert, or so many in all, if those are no more for each; so many of a
    # table for each, or float32 ones, or of experts of up to so many bytes, or four bits in groups of 32 or 64.
    resident_rows: int
    resident_rows_of_expert: int
    resident_table_rows_of_expert: int
    resident_float32_rows_of_expert: int
    resident_bytes: int
    resident_quick_rows_of_expert: int
    # matmul_decode: up to one row for so many experts, from so many inputs on.
    decode_inputs: int
    decode_experts_of_row: int
    # ragged_warpgroup: from one row for so many experts on, or, where it has high tiles of four bits alone, so many
    # rows of each, and of float32 ones; up to so many in low tiles, and in all where that is more than a high tile.
    warpgroup_experts_of_row: int
    warpgroup_least_rows: int
    warpgroup_least_float32_rows: int
    warpgroup_least_float32_rows_of_shifts: int  # float zeros or offsets, and of such in groups of 32 or 64
    warpgroup_least_float32_rows_of_small_groups: int
    warpgroup_low_rows: int
    warpgroup_low_rows_of_small_groups: int
    warpgroup_low_rows_of_offsets: int
    # Of 16-bit rows and a table: from so many of an expert on, or one more than inputs have so many; and up to so many.
    warpgroup_least_table_rows: int
    warpgroup_table_inputs_of_row: int
    warpgroup_table_rows: int
    warpgroup_more_rows: int
    tiled_rows: int  # from which on ragged_tiled is faster than matmul_stream


class Transposed(NamedTuple):
    """Products with transposed weights: tokens, and rows of an expert, up to which the streaming kernel is faster."""

    stream_tokens: int
    stream_tokens_float32: int
    stream_wave_tokens: int  # of symmetric codes, or a table, and inputs whose strips all run at once
    stream_wave_tokens_of_eight_bits: int
    stream_rows_of_expert: int
    stream_rows_of_expert_of_eight_bits: int  # of symmetric codes, with groups of 64 and more
    stream_rows_of_expert_float32: int
    stream_rows_of_expert_shifted_float32: int  # with float zeros or offsets


class Resident(NamedTuple):
    """``matmul_resident``: ``resident::Costs`` in ``ffi/cuda/matmul_resident.h``."""

    tokens: int
    start: float
    passes: float
    turns: float
    stages: float
    words: float
    groups: float
    sums: float
    group_sums: float
    adding: float
    wide: float
    rows: float
    filling: float
    table: float
    wide_table: float
    teams: float
    one_block: float
    narrow: float
    half_passes: float
    slots: float
    slot_sums: float
    clusters: tuple[Cluster, ...]


def read(architecture: int) -> dict:
    """The file of an architecture, as its JSON says."""
    return json.loads(path(architecture).read_text())


def path(architecture: int) -> Path:
    return Path(__file__).parent / "costs" / f"sm_{architecture}.json"


def tiles_of(values: dict[str, Any]) -> Tiles:
    stages = tuple((ctas, tokens, us) for ctas, tokens, us in values["stages"])
    fields: dict[str, Any] = values | {"stages": stages}
    return Tiles(**fields)


def mma_of(values: dict[str, Any]) -> Mma:
    stages = tuple((tokens, alone, shared) for tokens, alone, shared in values["stages"])
    fields: dict[str, Any] = values | {"stages": stages}
    return Mma(**fields)


class WarpgroupCosts(NamedTuple):
    """What a kernel of warpgroups takes: ``warpgroup::Costs`` in ``ffi/cuda/matmul_warpgroup.h``."""

    shapes: tuple[Warpgroups, ...]
    rounded: tuple[Warpgroups, ...]  # none: shapes are for weights of either kind
    clusters: tuple[Cluster, ...]
    memory: float  # bytes of weights per microsecond
    alone_ctas: int  # of a cluster at most where two CTAs do not share a multiprocessor
    one_pass: int  # tokens below which a shape is for no more tokens than it has
    team: float  # what two teams of clusters take to meet; 0: there are none
    # What CTAs take that share stages evenly, for each tile of tokens, and for each token of each part of a tile.
    # Stages of eight bits take so many times as long, as CTAs are not in pairs. Products of more than ``even_tiles``
    # tiles of tokens gain nothing: their CTAs read other weights and activations at a time. Nor do those of fewer than
    # ``even_least``.
    even: float
    even_token: float
    even_eight_bits: float
    even_tiles: int
    even_least: int


def warpgroups_of(values: dict[str, Any]) -> WarpgroupCosts:
    shapes, rounded = (tuple(Warpgroups(*shape) for shape in values[key]) for key in ("shapes", "rounded"))
    clusters = tuple(Cluster(*cluster) for cluster in values["clusters"])
    fields: dict[str, Any] = values | {"shapes": shapes, "rounded": rounded, "clusters": clusters}
    return WarpgroupCosts(**fields)


def resident_of(file: dict, bits: int, split: bool) -> Resident:
    """With codes of so many bits. split: float32 activations."""
    values, name = file["resident"], "split_resident" if split else "resident"
    clusters = tuple(Cluster(*cluster) for cluster in values["clusters"])
    costs = file[f"eight_bit_{name}" if bits == 8 else name]["costs"]
    return Resident(values["tokens"], **costs, clusters=clusters)


EVENLY = 0  # in place of the CTAs of a cluster: as many as multiprocessors share all tiles' inputs out evenly
ALONE_WARPGROUPS = 3  # of a CTA of matmul_warpgroup that shares its inputs with no other
BAND_OUTPUTS, BAND_PLACES = 64, 128  # of a tile of band_conv
MMA_CTAS = 2  # of matmul_mma on a multiprocessor, at most
MMA_OUTPUTS = 128  # of its tile
PASS_TOKENS = 16  # of matmul_stream
PAIR_TABLE_BYTES = 1 << 16  # of the pairs of a table in shared memory (pair_table.cuh), as few rows have it
SHARED_BYTES = 227 << 10  # of a CTA on an H100
SHIFTED_TOKENS = 64  # of a tile of one weight with float zeros or offsets, of nine tokens or more (measured)
TEAM_TOKENS = 64  # of a tile of matmul_warpgroup whose inputs two clusters may share, at least


def warpgroup_times(
    m: int, k: int, n: int, batch: int, scheme: Scheme, multiprocessors: int, costs: WarpgroupCosts
) -> Iterator[tuple[tuple[int, int, int, int], float]]:
    """Of every configuration, (tokens, warpgroups, cluster, teams); with ``EVENLY`` in place of a cluster CTAs of a
    multiprocessor in place of teams.
    """
    stages, reading, ends = -(-k // 128), batch * n * k * scheme.bits / 8 / costs.memory, scheme.ends
    choices = [
        (shape, (ends - 1) * shape.group + ends * shape.sum * scheme.floats)
        for shape in costs.shapes
        if not (costs.rounded and scheme.rounds(shape.tokens))
        and (scheme.plain or scheme.split or scheme.table or shape.sum)
    ]
    choices += [
        (
            shape,
            (ends > 1) * shape.group + scheme.zeros * shape.sum + scheme.half * (1 + scheme.zeros) * shape.half,
        )
        for shape in costs.rounded
        if scheme.rounds(shape.tokens) and (shape.sum or not scheme.zeros)
    ]
    most_tokens = 2 * m + 31  # of more most work would be for other tokens
    if m > 8 and batch == 1 and scheme.floats and scheme.rounds(1):
        most_tokens = max(most_tokens, SHIFTED_TOKENS)
    for shape, more in choices:
        if (
            (shape.tokens < costs.one_pass and m > shape.tokens)
            or shape.tokens > most_tokens
            or (ends > 1 and shape.group == 0)
            or shape.bits not in (0, scheme.bits)
        ):
            continue
        row_tiles = -(-n // (64 * shape.warpgroups))
        blocks = batch * row_tiles * -(-m // shape.tokens)
        for cluster in costs.clusters:
            if cluster.ctas > costs.alone_ctas and shape.shared_stage == 0:
                continue
            if cluster.ctas > 1 and shape.warpgroups == ALONE_WARPGROUPS:
                continue
            ctas, places = blocks * cluster.ctas, int(multiprocessors * cluster.share)
            # As few as there are multiprocessors are kept apart, even if clusters then do not all fit.
            shares = shape.shared_stage > 0 and ctas > multiprocessors
            waves = -(-ctas // (2 * places if shares else places))
            paired = shape.paired and cluster.ctas == 1 and scheme.pairs(shape.tokens, shape.warpgroups)
            paired = paired and row_tiles % 2 == 0 and 4 * ctas >= 3 * multiprocessors
            alone = shape.paired if paired else shape.stage
            stage = shape.shared_stage + 2 * more if shares else alone + more
            walking, start = waves * stages / cluster.ctas * stage, shape.start + cluster.start
            yield (shape.tokens, shape.warpgroups, cluster.ctas, 1), max(walking, reading) + waves * start
            of_teams = shape.tokens >= TEAM_TOKENS and shape.warpgroups == 2 and scheme.alike and not scheme.split
            if costs.team and of_teams and ends == 1 and cluster.ctas > 1 and batch == 1 and 2 * ctas <= places:
                us = max(0.5 * walking, reading) + start + costs.team
                yield (shape.tokens, shape.warpgroups, cluster.ctas, 2), us
        may_be_even = scheme.shares_evenly(shape.tokens, shape.warpgroups) and batch == 1
        if not may_be_even or -(-m // shape.tokens) > costs.even_tiles or m < costs.even_least:
            continue
        longer = costs.even_eight_bits if scheme.bits == 8 else 1.0
        for ctas, stage in ((1, shape.stage + more), (2, shape.shared_stage + 2 * more)):  # of a multiprocessor
            places = ctas * multiprocessors
            if blocks <= places and (ctas == 1 or shape.shared_stage > 0):
                meeting = costs.even * -(-m // shape.tokens) + costs.even_token * -(-places // blocks) * shape.tokens
                walking = -(-blocks * stages // places) * longer * stage
                yield (shape.tokens, shape.warpgroups, EVENLY, ctas), max(walking, reading) + shape.start + meeting


def tiled_times(
    m: int, n: int, stages: int, batch: int, scheme: Scheme, multiprocessors: int, costs: Tiles
) -> Iterator[tuple[tuple[int, int, int], float]]:
    """Of every configuration, (tokens, splits, CTAs of a cluster), of a product of ``stages`` times 64 inputs."""
    least = costs.small_groups if scheme.ends > 1 else 0
    of_low = scheme.zeros * costs.zeros + (scheme.bits == 8) * costs.eight_bits
    for ctas, tokens, stage in costs.stages:
        stage = max(stage + of_low * (tokens < costs.low), least)
        clusters = multiprocessors // ctas
        waves, rest = divmod(batch * -(-m // tokens) * -(-n // (128 * ctas)), clusters)
        wave = stages * stage + costs.wave
        yield (tokens, 1, ctas), costs.start + waves * wave + (wave if rest else 0)
        most = min(costs.most_splits, stages // costs.least_stages, clusters // rest) if rest else 1
        for splits in range(2, most + 1):
            sums = tokens / 256 * (costs.sums + costs.more * (splits - 2))
            last = (wave - costs.alone) / splits + costs.alone + costs.split + sums
            yield (tokens, splits, ctas), costs.start + waves * wave + last


def part_outputs(m: int, n: int, multiprocessors: int, warpgroups: WarpgroupCosts, tiles: Tiles) -> set[int]:
    """Outputs that the first of two kernels may have: ``Splits`` in ``ffi/cuda/matmul_parts.cu``."""
    sizes = {
        (shape.tokens, 64 * shape.warpgroups, multiprocessors)
        for shape in (*warpgroups.shapes, *warpgroups.rounded)
        if shape.tokens >= warpgroups.one_pass and not shape.shared_stage
    }
    sizes |= {(tokens, 128 * ctas, multiprocessors // ctas) for ctas, tokens, _ in tiles.stages}
    found = set()
    for tokens, outputs, places in sizes:
        token_tiles = -(-m // tokens)
        waves = -(-(-(-n // outputs) * token_tiles) // places)
        found |= {q * places // token_tiles * outputs for q in range(max(waves - 2, 1), waves + 1)}
    return {outputs for outputs in found if 0 < outputs < n}


def band_conv_time(places: int, taps: int, k: int, n: int, values: int, multiprocessors: int, costs: BandConv) -> float:
    """Of ``band_conv``, with ``values`` of x and y together."""
    strips, tiles = -(-n // BAND_OUTPUTS), -(-places // BAND_PLACES)
    ctas = min(tiles, max(1, multiprocessors // strips))
    waves = -(-strips * ctas // multiprocessors)
    walking = waves * (costs.weights * k + -(-tiles // ctas) * (costs.tile + taps * costs.tap))
    return costs.start + max(walking, 2 * values / costs.memory)


def _mma_ctas(tokens: int, scheme: Scheme, shared_bytes: int) -> int:
    """How many of such tiles a multiprocessor holds at once: as ``mma::params_of`` in ``ffi/cuda/matmul_mma.cu``."""
    shift = 2 if scheme.floats else int(scheme.zeros)  # bytes of a zero or offset
    sets = 2 if scheme.ends == 4 else 1
    stage = tokens * 128 + MMA_OUTPUTS * (64 * scheme.bits // 8 + sets * (2 + shift))
    return next((ctas for ctas in range(MMA_CTAS, 0, -1) if 3 * stage <= shared_bytes // ctas - 1024), 0)


def mma_times(
    m: int, k: int, n: int, batch: int, scheme: Scheme, multiprocessors: int, shared_bytes: int, costs: Mma
) -> Iterator[tuple[tuple[int, int], float]]:
    """Of every configuration, (tokens, splits), with room for the sums of all tiles that are shared; ``shared_bytes``:
    the shared memory of a multiprocessor.
    """
    stages = -(-k // 64)
    for tokens, alone, together in costs.stages:
        ctas = _mma_ctas(tokens, scheme, shared_bytes)
        if ctas == 0:
            continue
        places, shared = ctas * multiprocessors, together if ctas > 1 else alone
        waves, rest = divmod(batch * -(-m // tokens) * -(-n // MMA_OUTPUTS), places)
        most = min(costs.most_splits, stages // costs.least_stages, places // rest) if rest else 1
        for splits in range(1, max(1, most) + 1):
            us = waves * (costs.wave + stages * shared)
            if rest:
                us += costs.wave + stages / splits * (shared if rest * splits > multiprocessors else alone)
            us = costs.start + max(us, batch * n * k * scheme.bits / 8 / costs.memory)
            if splits > 1:
                us += costs.sums + 4 * rest * splits * tokens * MMA_OUTPUTS / costs.sum_bytes
            yield (tokens, splits), us


def stream_waves(m: int, n: int, batch: int, table: bool, newest: bool, multiprocessors: int) -> int:
    """Of CTAs of ``matmul_stream``, whose strips of outputs and shares of the inputs are those of few tokens:
    ``stream_config`` in ``ffi/cuda/matmul.cu``. newest: there are clusters.
    """
    wanted = multiprocessors * 9 // 10

    def ctas(atoms: int) -> int:
        return batch * _ceil(n, atoms * 16)

    cluster, atoms = 1, 4 if ctas(4) >= wanted else 2 if ctas(2) >= wanted else 1
    if newest and table and m > 8:
        atoms = 4
        while cluster < 4 and 2 * ctas(4) * cluster <= multiprocessors:
            cluster *= 2
    elif newest:
        while cluster < 8 and ctas(atoms) * cluster < wanted // 2:
            cluster *= 2
    of_pass = ctas(atoms) * cluster
    return _ceil(of_pass * _ceil(m, PASS_TOKENS), multiprocessors * (1 if of_pass <= multiprocessors else 2))


def stream_time(m: int, weights: float, scheme: Scheme, costs: Stream) -> float:
    """Of ``matmul_stream``, for so many bytes of codes."""
    start, rate = costs.start, costs.bytes
    if scheme.table and not scheme.split:
        start, rate = next((row for tokens, *row in costs.table if m <= tokens), (start, rate))
    elif scheme.split:
        rates, small = costs.float32, costs.small_groups_float32
        if scheme.table:
            rates, small = costs.table_float32, 1.0
        elif scheme.floats:
            rates, small = costs.shifted_float32, costs.small_groups_shifted_float32
        start, rate = next((row for tokens, *row in rates if m <= tokens), rates[-1][1:])
        rate *= small if scheme.ends > 1 else 1.0
    return start + -(-m // PASS_TOKENS) * weights / rate


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def resident_shifts_beside(bits: int, blocks: int) -> bool:
    """``resident::shifts_beside_weights`` in ``ffi/cuda/matmul_resident.h``."""
    return bits == 8 or blocks > 0


def resident_slots(
    m: int, stages: int, passes: int, cluster: int, pass_atoms: int, scheme: Scheme, may_turn: bool, makes_sums: bool
) -> str | None:
    """Where a CTA's shared memory has room for the activations of so many stages, as ``resident::layout`` in
    ``ffi/cuda/matmul_resident.cu``: for "all", or for pieces of them that take "turns", where those may. makes_sums:
    of the activations, for float zeros or offsets.
    """
    block, tokens = 128 // scheme.bits // pass_atoms, 16 if m > 8 else 8
    piece = block
    while 8 * piece < stages:
        piece *= 2
    columns = 16 if m > 4 else 8  # of float32 activations, two numbers each
    stage_bytes = (2 * m if scheme.split else tokens) * 256
    # Sums of the activations, sixteen rows of some of a stage at a time, and what multiplies them.
    sums = (_ceil(stages * scheme.ends, 16) * 768 + 32768) * makes_sums
    activations = _ceil(stages, piece) * piece * stage_bytes + sums
    if scheme.split:
        activations += (columns - 2 * m) * 128 + stages * columns * 2
    teams = 16 // pass_atoms + 4 // max(pass_atoms // 2, 1) * makes_sums  # those are of warps of their own
    of_pass = max(pass_atoms, cluster) * teams * tokens * 64
    room = SHARED_BYTES - 1024 - (PAIR_TABLE_BYTES if scheme.table else 0)
    if (max(activations, of_pass) if passes == 1 else activations + of_pass) <= room:
        return "all"
    least = 3 * block  # stages of the pieces that are there at once
    turns = may_turn and passes == 1 and stages > least and least * stage_bytes + sums + of_pass <= room
    return "turns" if turns else None


def resident_blocks(m: int, k: int, n: int, bits: int, config: tuple[int, int, int]) -> int:
    """``resident::blocks_of`` in ``ffi/cuda/matmul_resident.cu``, of what has kernels of few blocks."""
    cluster, parts, pass_atoms = config
    if m > 8 or _ceil(n, 16) > parts * pass_atoms:
        return 0
    blocks = _ceil(_ceil(_ceil(k, 128), cluster) * pass_atoms, 128 // bits)
    return blocks if blocks <= 2 else 0


def resident_has_few_blocks(scheme: Scheme, alike: bool) -> bool:
    """``has_few_blocks`` there, of up to eight tokens; ``alike`` as in :func:`resident_times`."""
    alike = alike and not scheme.split
    return not scheme.table and (alike or scheme.ends == 1 or scheme.floats)


def resident_times(
    m: int, k: int, n: int, batch: int, scheme: Scheme, alike: bool, multiprocessors: int, costs: Resident
) -> Iterator[tuple[tuple[int, int, int], float]]:
    """Of every configuration, (cluster, parts, strips of a pass). alike: whether scales, float zeros and offsets are of
    the activations' type, wherever their rows begin.
    """
    atoms = _ceil(n, 16)
    few = resident_has_few_blocks(scheme, alike)
    alike = alike and not (scheme.table or scheme.split)
    stage = (
        costs.stages
        + costs.groups * (scheme.ends > 1)
        + (costs.group_sums if scheme.ends > 1 else costs.sums) * scheme.floats
        + costs.table * scheme.table
        + (costs.wide + costs.wide_table * scheme.table) * (m > (4 if scheme.split else 8))
    )
    for cluster in costs.clusters:
        parts = min(atoms, int(multiprocessors * cluster.share) // cluster.ctas // batch)
        stages = _ceil(_ceil(k, 128), cluster.ctas)
        if parts == 0:
            continue
        part_atoms = _ceil(atoms, parts)
        for pass_atoms in (4,) if scheme.split or scheme.table else (4, 2, 1):
            passes, each = _ceil(part_atoms, pass_atoms), _ceil(stages, 16 // pass_atoms)  # stages of a team
            blocks = few * resident_blocks(m, k, n, scheme.bits, (cluster.ctas, parts, pass_atoms))
            if (pass_atoms == 1 and not blocks) or (pass_atoms == 2 and not (alike or blocks)):
                continue
            if m > 8 and pass_atoms < 4 and passes > 1:
                continue
            may_turn = pass_atoms == 4 and m <= 8 and alike and not blocks
            sums = scheme.floats and not resident_shifts_beside(scheme.bits, blocks)
            slots = resident_slots(m, stages, passes, cluster.ctas, pass_atoms, scheme, may_turn, sums)
            if slots is None:
                continue
            us = costs.start + costs.filling * scheme.table + cluster.start
            us += (
                (costs.passes + costs.adding * scheme.floats) * passes
                + costs.turns * passes * _ceil(each, 16 // scheme.bits)
                + stage * passes * each
            )
            us += costs.rows * m * each + costs.words * part_atoms * stages / 16
            us += costs.teams * cluster.ctas * (16 // pass_atoms - 4)
            us -= costs.one_block * (blocks == 1) + costs.narrow * (pass_atoms == 1)
            us += costs.half_passes * (not blocks and pass_atoms < 4)
            if slots == "turns":
                us += costs.slots * passes * each + costs.slot_sums * scheme.floats * _ceil(stages * scheme.ends, 32)
            yield (cluster.ctas, parts, pass_atoms), us
