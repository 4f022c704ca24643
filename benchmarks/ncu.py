"""What Nsight Compute says of the kernels of products with few tokens: bandwidth, issue slots, and what warps wait for.

    python benchmarks/ncu.py [--output FILE]

Needs ``ncu`` on the PATH and the permission to read hardware counters. Every product runs once, with a cold L2 and the
clocks that it finds. ``dram_percent`` is of the memory's peak, ``issue_percent`` of the issue slots while a
multiprocessor is active; ``waits`` are the reasons of the cycles in which warps did not issue, the largest shares of
them all. Counting stretches a kernel's beginning, so ``us`` is more than benchmarks/matmul.py measures.
"""

import argparse
import csv
import ctypes
import io
import itertools
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from _common import add_results, require_gpu, save

import jax_wonly as jw
from jax_wonly._timing import short_name

RESULTS = Path(__file__).parent / "results" / "h100-ncu.json"
SHAPES = ((8192, 28672), (8192, 8192), (4096, 4096))
CASES = [(4, 128, k, n, m) for k, n in SHAPES for m in (1, 8, 16, 64)] + [(8, 128, 8192, 8192, m) for m in (1, 16)]
STALLED = "smsp__average_warps_issue_stalled_"
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "WarpStateStats", "SchedulerStats", "LaunchStats")
FIELDS = {
    "us": (r"gpu__time_duration.sum", 1),
    "dram_percent": (r"(gpu__)?dram_?_throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "issue_percent": (r"smsp__issue_active.avg.pct", 1),
    "registers": (r"launch__registers_per_thread", 1),
}


def run() -> None:
    """The profiled process: every case once between the profiler's start and stop."""
    runtime = ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
    product = jax.jit(jw.matmul)
    for (bits, group_size, k, n), cases in itertools.groupby(CASES, key=lambda case: case[:4]):
        key = jax.random.key(k + n)
        w = jax.random.normal(key, (k, n), jnp.bfloat16)
        qt = jax.jit(partial(jw.quantize, bits=bits, group_size=group_size))(w)
        for *_, m in cases:
            x = jax.random.normal(key, (m, k), jnp.bfloat16)
            jax.block_until_ready(product(x, qt))
            runtime.cudaProfilerStart()
            jax.block_until_ready(product(x, qt))
            runtime.cudaProfilerStop()


def number(text: str) -> float:
    return float(text.replace(",", ""))


def row_of(case: tuple, record: dict[str, str], units: dict[str, str]) -> dict:
    bits, group_size, k, n, m = case
    row = {"bits": bits, "group_size": group_size, "k": k, "n": n, "m": m, "kernel": short_name(record["Kernel Name"])}
    for name, (metric, digits) in FIELDS.items():
        column = next((c for c in record if re.match(metric, c) and record[c]), None)
        if column is None:
            sys.exit(f"ncu has nothing like {metric}, but: {', '.join(sorted(record))}")
        value = number(record[column])
        if name == "us" and units[column] in ("ns", "nsecond"):
            value /= 1e3
        row[name] = int(value) if name == "registers" else round(value, digits)
    waits: dict[str, float] = {}
    for column, text in record.items():
        found = re.match(STALLED + r"(?!selected|not_selected|\w+_not_issued)(\w+)_per_issue_active", column)
        if found and text:
            waits[found[1]] = number(text)
    total = sum(waits.values())
    largest = sorted(waits.items(), key=lambda item: -item[1])[:3]
    row["waits"] = ", ".join(f"{name.replace('_', ' ')} {100 * value / total:.0f}%" for name, value in largest)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    add_results(parser, RESULTS, append=False)
    args = parser.parse_args()
    require_gpu("ncu.py")
    if args.run:
        run()
        return
    sections = [word for section in SECTIONS for word in ("--section", section)]
    command = ["ncu", "--csv", "--page", "raw", "--profile-from-start", "off", "--clock-control", "none"]
    command += [*sections, sys.executable, __file__, "--run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        sys.exit(f"ncu gave no table:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    units, *records = csv.DictReader(io.StringIO("\n".join(lines[first:])))
    if len(records) != len(CASES):
        sys.exit(f"ncu saw {len(records)} kernels; {len(CASES)} products, of a kernel each, were expected")
    rows = [row_of(case, record, units) for case, record in zip(CASES, records, strict=True)]
    save(args.output, rows, args.commit)
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
