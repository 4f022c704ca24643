"""The CUDA kernels under compute-sanitizer: memory (memcheck) and races in shared memory (racecheck).

products: the configurations of products that benchmarks/kernel_sweep.cu has, on odd shapes, against float64.
launches: every kernel as the custom calls launch it (tests/gpu/launches.cu); the same bits twice.
self-test: the cases of `doctor` on this GPU, from JAX (memory alone).
calls: custom calls made past the checks in Python, most with wrong attributes, types and shapes (memory alone).

racecheck knows only what a lane itself arrives for as ordered: the programs are built with WONLY_EVERY_LANE_ARRIVES.
WONLY_SWEEP and WONLY_LAUNCHES name them, where they are built already.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from reliability.record import ROOT, measured, save

TOOLS = ("memcheck", "racecheck")
# Of programs from JAX: compute-sanitizer crashes or hangs where it follows the processes that these start.
ONLY_OURS = ("--target-processes", "application-only", "--kernel-name", "kns=wonly")


def watched(tool: str, words: list[str], *options: str) -> tuple[int, str]:
    """How many errors the tool reported, and the output of the program."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", *options, *words]
    result = subprocess.run(command, capture_output=True, text=True)
    found = re.findall(r"(?:ERROR SUMMARY: |hazards displayed \()(\d+) error", result.stdout)
    errors = int(found[-1]) if found else 1
    if result.returncode and not errors:
        errors = 1
    if errors:
        lines = [line for line in result.stdout.splitlines() if "Host Frame" not in line]
        print("\n".join(lines)[:20_000], result.stderr[-2000:])
    return errors, result.stdout


def counted(output: str, failures: int) -> dict[str, int]:
    done = re.findall(r"(\d+) cases, (\d+) (?:wrong|failures)", output)
    cases, wrong = map(int, done[-1]) if done else (0, 1)
    return {"cases": cases, "failures": failures + wrong}


def program(name: str, variable: str) -> str:
    if given := os.environ.get(variable):
        return given
    script = ROOT / "benchmarks" / "tune.py"
    words = [sys.executable, script, "--build", "--program", name, "--define", "WONLY_EVERY_LANE_ARRIVES"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[-1]


def products(tool: str, options: argparse.Namespace) -> dict[str, Any]:
    words = [program("kernel_sweep", "WONLY_SWEEP"), "check", str(options.every)]
    # Not the sums in float64 that results are compared with, which take one thread each, and longest.
    errors, output = watched(tool, words, "--kernel-name", "kns=_matmul")
    what = "products of every kernel in many configurations, odd shapes, against float64"
    return {"what": what, **counted(output, errors)}


def launches(tool: str, options: argparse.Namespace) -> dict[str, Any]:
    name, parts = program("launches", "WONLY_LAUNCHES"), options.parts or range(options.of)

    def run(part: int) -> dict[str, int]:
        errors, output = watched(tool, [name, *map(str, (options.every_launch, part, options.of))])
        return counted(output, errors)

    with ThreadPoolExecutor(len(parts)) as pool:
        rows = list(pool.map(run, parts))
    what = "every kernel as the custom calls launch it, odd shapes; the same bits twice"
    return {"what": what} | {key: sum(row[key] for row in rows) for key in ("cases", "failures")}


def self_test(tool: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "doctor.json"
        words = [sys.executable, "-m", "jax_wonly", "doctor", "--json", str(output)]
        errors, _ = watched(tool, words, *ONLY_OURS)
        found = json.loads(output.read_text()) if output.is_file() else {"results": [], "problems": ["no result"]}
    for problem in found["problems"]:
        print(problem)
    return {
        "what": "every case of the self-test on this GPU, against float64 or to the bit",
        "cases": sum(row["cases"] for row in found["results"] if row["platform"] == "cuda"),
        "failures": errors + len(found["problems"]),
    }


def calls(tool: str, options: argparse.Namespace) -> dict[str, Any]:
    words = [sys.executable, str(Path(__file__).parent), "sanitize-gpu", "--inner", "--examples", str(options.examples)]
    errors, output = watched(tool, words, *ONLY_OURS)
    return {
        "what": "custom calls of every kind from JAX, odd shapes and hostile arguments",
        **counted(output, errors),
    }


def inner(examples: int) -> int:
    """In the process that is watched."""
    from reliability import fuzz

    row = fuzz.run("custom calls", examples, 0)
    print(f"{row['cases']} cases, {row['failures']} failures")
    return row["failures"]


PARTS = {"products": products, "launches": launches, "self-test": self_test, "calls": calls}
FROM_JAX = ("self-test", "calls")


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="reliability sanitize-gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=150, help="one configuration in so many (default: %(default)s)")
    parser.add_argument("--every-launch", type=int, default=4, help="one launch in so many (default: %(default)s)")
    parser.add_argument(
        "--of", type=int, default=1, help="parts of those launches, each a process (default: %(default)s)"
    )
    parser.add_argument("--parts", type=int, nargs="*", help="those to run, from 0 (default: all)")
    parser.add_argument("--examples", type=int, default=200, help="hostile calls (default: %(default)s)")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tools", nargs="*", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", default="reliability-gpu-sanitizer.json")
    options = parser.parse_args(words)
    if options.of < 1 or not all(0 <= part < options.of for part in options.parts or ()):
        parser.error(f"--parts {options.parts} --of {options.of}: parts are from 0 to one less than there are")
    if options.inner:
        return inner(options.examples)
    if shutil.which("compute-sanitizer") is None:
        raise SystemExit("compute-sanitizer, which comes with CUDA, is not on the PATH")
    return max(  # each is saved at once
        save(options.output, [measured(f"{tool}, {part}", PARTS[part], tool, options)])
        for part in options.only
        for tool in options.tools
        if tool == "memcheck" or part not in FROM_JAX
    )
