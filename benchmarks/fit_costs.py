"""Fits the cost models in jax_wonly/costs to what benchmarks/tune.py recorded.

    python benchmarks/tune.py --record
    python benchmarks/fit_costs.py [--record FILE ...] [--architecture 90]
    python benchmarks/fit_costs.py --groups   of what matmul_warpgroup's small groups and float zeros add, alone
    python benchmarks/fit_costs.py --only resident eight_bit_resident.costs.sums     these numbers alone
    python benchmarks/fit_costs.py --show     how good today's numbers are

Coordinate descent: one number after the other is made a little larger and smaller, and kept where the loss falls. The
loss of a product is the logarithm of how much longer than the fastest measured configuration the chosen one takes, and,
for those that are nearly the fastest, the mean square of the logarithm of expected over measured time. Thresholds that
no model has (where `matmul_stream` and `matmul_decode` are taken) stay as they are.
"""

import argparse
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jax_wonly import _cuda_costs as costs
from jax_wonly.progress import progress

RESULTS = Path(__file__).parent / "results"
RECORDS = {90: RESULTS / "h100-tune.json", 80: RESULTS / "h100-tune-sm80.json"}
RANDOM_RECORD = RESULTS / "h100-tune-random.json"  # of products drawn at random, which nothing was fitted to
MULTIPROCESSORS, SHARED_BYTES = 132, 228 << 10  # of the H100 that was measured, and of one of them
NEAR = 1.4  # times the fastest: configurations whose expected time should be right
STEPS = (0.2, 0.1, 0.05, 0.02, 0.01)
CHOICE = 3.0  # weight of the choice in the loss
PAIRED = costs.Warpgroups._fields.index("paired")

Measured = dict[tuple, float]  # (kernel, *configuration) to microseconds
Expected = Callable[[dict], Iterator[tuple[tuple, float]]]


def products(record: dict) -> Iterator[tuple[Measured, Expected]]:
    """The measured configurations that the dispatcher has for a product, and what a file of costs says of them."""
    tiled = costs.read(90)["tiled"]
    for sweep in record["sweeps"]:
        large_groups = sweep["bits"] == 4 and sweep["group_size"] not in (32, 64)
        in_tiles = tiled["tokens" if large_groups else "tokens_of_small_groups"]
        measured: dict[tuple, Measured] = defaultdict(dict)
        for k, n, m, kernel, config, us in sweep["rows"]:
            if not (kernel == "tiled" and sweep["mode"] != "table" and m < in_tiles):
                if kernel == "resident" and len(config) == 2:
                    config = [*config, 4]  # strips of a pass, of which records before there were others say nothing
                measured[k, n, m][kernel, *config] = us
        for (k, n, m), times in measured.items():
            yield times, expected(sweep, k, n, m)


def expected(sweep: dict, k: int, n: int, m: int) -> Expected:
    bits, mode = sweep["bits"], sweep["mode"]
    ends = {32: 4, 64: 2}.get(sweep["group_size"], 1)
    zeros, floats = mode in ("integer_zeros", "float_zeros"), mode in ("float_zeros", "offsets")
    dtype, _, scales = sweep.get("dtype", "").partition("/")
    split, table = dtype == "f32", mode == "table"
    scheme = costs.Scheme(bits, ends, zeros, floats, not (split or scales), split, dtype == "f16", table)

    def of(file: dict) -> Iterator[tuple[tuple, float]]:
        if "mma" in file:
            numbers = costs.mma_of(file["mma"])
            for config, us in costs.mma_times(m, k, n, 1, scheme, MULTIPROCESSORS, SHARED_BYTES, numbers):
                yield ("mma", *config), us
            return
        resident = costs.resident_of(file, bits, split)
        if m <= resident.tokens // (1 + (split or floats)) and not (split and floats):
            for config, us in costs.resident_times(m, k, n, 1, scheme, scheme.alike, MULTIPROCESSORS, resident):
                yield ("resident", *config), us
        if split:
            numbers = costs.warpgroups_of(file["split_warpgroup"])
            for (*config, _), us in costs.warpgroup_times(m, k, n, 1, scheme, MULTIPROCESSORS, numbers):
                yield ("warpgroup", *config), us
            return
        tiles = costs.tiles_of(file["table"] if table else file["tiled"]["costs"])
        for (tokens, splits, _), us in costs.tiled_times(m, n, -(-k // 64), 1, scheme, MULTIPROCESSORS, tiles):
            yield ("tiled", tokens, splits), us
        if not table:
            numbers = costs.warpgroups_of(file["warpgroup"])
            for (*config, teams), us in costs.warpgroup_times(m, k, n, 1, scheme, MULTIPROCESSORS, numbers):
                yield ("warpgroup", *config, *[teams] * (teams > 1)), us

    return of


def judge(file: dict, cases: list[tuple[Measured, Expected]]) -> tuple[float, list[float]]:
    """The loss, and of every product how many times longer than the fastest the chosen configuration takes."""
    loss, ratios = 0.0, []
    for measured, of in cases:
        known = [(us, measured[config]) for config, us in of(file) if config in measured]
        if not known:
            continue
        fastest = min(known, key=lambda pair: pair[1])[1]
        ratio = min(known)[1] / fastest
        near = [math.log(us / actual) ** 2 for us, actual in known if actual <= NEAR * fastest]
        ratios.append(ratio)
        loss += CHOICE * math.log(ratio) + sum(near) / len(near)
    return loss / len(ratios), ratios


def numbers_of(value, at=()) -> Iterator[tuple]:
    """Where a file has numbers that may change: those with a fraction, but the share of a cluster, and what a product
    in tiles takes at least, of which the records, all of large products, say nothing.
    """
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        fixed = (
            "stream" in at
            or "parts" in at
            or key in ("team", "even", "even_token", "even_eight_bits")  # the records of tables have no such
            or (at[-2:-1] == ("rounded",) and key == PAIRED)  # nor pairs, or not their own
            or ("clusters" in at and key == 2)
            or (key == "start" and at in (("tiled", "costs"), ("table",)))
        )
        if isinstance(inner, float) and inner != 0 and not fixed:
            yield *at, key
        yield from numbers_of(inner, (*at, key))


def get(file: Any, place: tuple) -> Any:
    for key in place:
        file = file[key]
    return file


def put(file: dict, place: tuple, value: float) -> None:
    get(file, place[:-1])[place[-1]] = value


def rounded(value: float) -> float:
    return float(f"{value:.3g}")


def fit(file: dict, cases: list[tuple[Measured, Expected]], groups: bool = False, only: Sequence[str] = ()) -> None:
    loss, _ = judge(file, cases)
    names = [tuple(name.split(".")) for name in only] or [()]
    places = [at for at in numbers_of(file) if any((*map(str, at[: len(name)]),) == name for name in names)]
    if groups:
        places = [at for at in places if at[0] == "warpgroup" and at[1] in ("shapes", "rounded") and at[-1] >= 6]
    for step in progress(STEPS, label="steps"):
        better = True
        while better:
            better = False
            for place in places:
                before = get(file, place)
                for factor in (1 + step, 1 / (1 + step)):
                    put(file, place, rounded(before * factor))
                    if (tried := judge(file, cases)[0]) < loss - 1e-6:
                        loss, before, better = tried, get(file, place), True
                    else:
                        put(file, place, before)


def show(file: dict, cases: list[tuple[Measured, Expected]]) -> None:
    loss, ratios = judge(file, cases)
    mean, far = sum(ratios) / len(ratios), sum(ratio > 1.05 for ratio in ratios)
    print(
        f"{len(ratios)} products: chosen over fastest {mean:.4f} on average, {max(ratios):.3f} at most, "
        f"{far} above 1.05; loss {loss:.4f}"
    )


def text(file: dict) -> str:
    """JSON with every row of numbers on a line."""
    lines = re.sub(
        r"\[\s+([-\d.e+, \s]+?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", json.dumps(file, indent=1)
    )
    return lines + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", type=int, choices=RECORDS, default=90)
    parser.add_argument("--record", type=Path, nargs="*", help="(default: that of the architecture beside this script)")
    parser.add_argument("--groups", action="store_true", help="fit what groups and float zeros add alone")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="NAME", help="fit these of the file alone, such as mma.start"
    )
    parser.add_argument("--show", action="store_true", help="change nothing")
    args = parser.parse_args()
    records = [json.loads(path.read_text()) for path in args.record or [RECORDS[args.architecture]]]
    cases = [case for record in records for case in products(record)]
    file = costs.read(args.architecture)
    show(file, cases)
    if args.show:
        return
    fit(file, cases, args.groups, args.only)
    if not args.only:
        file["measured"] = {key: records[0][key] for key in ("device", "driver")}
        file["measured"]["commit"] = "; ".join(record["commit"] for record in records)
    costs.path(args.architecture).write_text(text(file))
    show(file, cases)
    print(f"written to {costs.path(args.architecture)}")


if __name__ == "__main__":
    main()
