"""The CUDA kernels under compute-sanitizer: memory and races.

products: the product's configurations, as tests/gpu/sanitize.sh runs them. self-test: every case of `doctor` on this
GPU, which reach every kernel. calls: custom calls made past the checks in Python, some with wrong attributes, types and
shapes (memory alone).

racecheck knows only what a lane itself arrives for as ordered: its self-test needs a module built with
CUDAFLAGS=-DWONLY_EVERY_LANE_ARRIVES, as tests/gpu/sanitize.sh builds the products' program.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from reliability.record import ROOT, measured, save

PARTS = ("products", "self-test", "calls")
TOOLS = ("memcheck", "racecheck")
SANITIZER = ("compute-sanitizer", "--error-exitcode", "1", "--kernel-name", "kns=wonly")


def watched(tool: str, words: list[str]) -> tuple[int, str]:
    """What the tool reported, and the output of the program."""
    result = subprocess.run([*SANITIZER, "--tool", tool, *words], capture_output=True, text=True)
    found = re.findall(r"(?:ERROR SUMMARY: |hazards displayed \()(\d+) error", result.stdout)
    if result.returncode or len(found) != 1 or found != ["0"]:
        print(result.stdout[-6000:], result.stderr[-2000:])
    return max(int(found[-1]) if found else 1, int(result.returncode != 0)), result.stdout


def products(tool: str, every: int, examples: int) -> dict[str, Any]:
    script = ROOT / "tests" / "gpu" / "sanitize.sh"
    result = subprocess.run(["bash", script, str(every), tool], capture_output=True, text=True)
    reported = re.findall(r"(?:ERROR SUMMARY: |hazards displayed \()(\d+) error", result.stdout)
    cases = re.findall(r"(\d+) cases, (\d+) wrong", result.stdout)
    if not reported or not cases or result.returncode:
        print(result.stdout[-6000:], result.stderr[-2000:])
    count, wrong = map(int, cases[-1]) if cases else (0, 1)
    return {
        "what": "products of every kernel in many configurations, odd shapes, against float64",
        "cases": count,
        "failures": wrong + (int(reported[-1]) if reported else 1),
    }


def self_test(tool: str, every: int, examples: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "doctor.json"
        reported, _ = watched(tool, [sys.executable, "-m", "jax_wonly", "doctor", "--json", str(output)])
        found = json.loads(output.read_text()) if output.is_file() else {"results": [], "problems": ["no result"]}
    print(*found["problems"], sep="\n", end="")
    return {
        "what": "every case of the self-test on this GPU, against float64 or to the bit",
        "cases": sum(row["cases"] for row in found["results"] if row["platform"] == "cuda"),
        "failures": reported + len(found["problems"]),
    }


def calls(tool: str, every: int, examples: int) -> dict[str, Any]:
    words = [sys.executable, str(Path(__file__).parent), "sanitize-gpu", "--inner", "--examples", str(examples)]
    reported, output = watched(tool, words)
    done = re.findall(r"(\d+) cases, (\d+) failures", output)
    cases, failures = map(int, done[-1]) if done else (0, 1)
    return {
        "what": "custom calls of every kind from JAX, odd shapes and hostile arguments",
        "cases": cases,
        "failures": failures + reported,
    }


def inner(examples: int) -> int:
    """In the process that is watched."""
    from reliability import fuzz

    row = fuzz.run("custom calls", examples, 0)
    print(f"{row['cases']} cases, {row['failures']} failures")
    return row["failures"]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="reliability sanitize-gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=150, help="one configuration in so many (default: %(default)s)")
    parser.add_argument("--examples", type=int, default=200, help="hostile calls (default: %(default)s)")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--tools", nargs="*", choices=TOOLS, default=TOOLS)
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", default="reliability-gpu-sanitizer.json")
    options = parser.parse_args(words)
    if options.inner:
        return inner(options.examples)
    if shutil.which("compute-sanitizer") is None:
        raise SystemExit("compute-sanitizer, which comes with CUDA, is not on the PATH")
    run = {"products": products, "self-test": self_test, "calls": calls}
    return max(  # each is saved at once
        save(options.output, [measured(f"{tool}, {part}", run[part], tool, options.every, options.examples)])
        for part in options.only
        for tool in options.tools
        if (part, tool) != ("calls", "racecheck")
    )
