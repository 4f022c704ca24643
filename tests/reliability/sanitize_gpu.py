"""The CUDA kernels under compute-sanitizer.

The product's configurations as tests/gpu/sanitize.sh runs them (memcheck, racecheck), and every custom call of the
package from Python (memcheck): sound ones of odd shapes, and some with wrong attributes, types and shapes.
"""

import argparse
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from reliability.record import ROOT, measured, save


def check_sweep(every: int) -> list[dict[str, Any]]:
    script = ROOT / "tests" / "gpu" / "sanitize.sh"
    start = time.perf_counter()
    result = subprocess.run(["bash", script, str(every)], capture_output=True, text=True)
    rows = []
    for part in ("\n" + result.stdout).split("\n== ")[1:]:
        tool, summary = part.split("\n", 1)[0], re.findall(r"SUMMARY: (\d+)", part)
        cases = re.findall(r"(\d+) cases, (\d+) wrong", part)
        if not summary or not cases or result.returncode:
            print(part[-3000:], result.stderr[-2000:])
        count, wrong = map(int, cases[-1]) if cases else (0, 1)
        rows.append(
            {
                "check": tool,
                "what": "products of every kernel in many configurations, odd shapes, against float64",
                "cases": count,
                "failures": wrong + (int(summary[-1]) if summary else 1),
                "seconds": round(time.perf_counter() - start, 1),
            }
        )
    return rows or [{"check": "memcheck", "what": "sanitize.sh", "cases": 0, "failures": 1, "seconds": 0.0}]


def check_calls(examples: int) -> dict[str, Any]:
    words = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "1", sys.executable]
    words += [str(Path(__file__).parent), "sanitize-gpu", "--inner", "--examples", str(examples)]
    result = subprocess.run(words, capture_output=True, text=True)
    done = re.findall(r"(\d+) cases, (\d+) failures", result.stdout)
    errors = re.findall(r"ERROR SUMMARY: (\d+)", result.stdout)
    if result.returncode or not done or errors != ["0"]:
        print(result.stdout[-4000:], result.stderr[-2000:])
    cases, failures = map(int, done[-1]) if done else (0, 1)
    return {
        "what": "custom calls of every kind from JAX, odd shapes and hostile arguments",
        "cases": cases,
        "failures": failures + sum(map(int, errors)) + int(result.returncode != 0),
    }


def inner(examples: int) -> int:
    """In the process that is watched."""
    import jax
    from reliability import fuzz, stress

    cases = stress.cases()
    for case in cases:
        jax.block_until_ready(jax.jit(case.function)(*case.args))
    row = fuzz.run("custom calls", examples, 0)
    print(f"{len(cases) + row['cases']} cases, {row['failures']} failures")
    return row["failures"]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="reliability sanitize-gpu", description=__doc__)
    parser.add_argument("--every", type=int, default=150, help="one configuration in so many (default: %(default)s)")
    parser.add_argument("--examples", type=int, default=60, help="hostile calls (default: %(default)s)")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", default="reliability-gpu-sanitizer.json")
    options = parser.parse_args(words)
    if options.inner:
        return inner(options.examples)
    if shutil.which("compute-sanitizer") is None:
        raise SystemExit("compute-sanitizer, which comes with CUDA, is not on the PATH")
    with ThreadPoolExecutor() as pool:
        calls = pool.submit(measured, "memcheck", check_calls, options.examples)
        sweep = pool.submit(check_sweep, options.every)
        return save(options.output, [calls.result(), *sweep.result()])
