"""The CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer.

Builds the module with both, and runs in an interpreter that has their libraries: the kernels' own tests on every
instruction set of this machine, and the random products, quantizations and custom calls of ``fuzz``.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
from reliability.record import ROOT, measured, save

SANITIZERS = "address,undefined"
FUZZED = ("custom calls", "products", "gradients", "quantize", "dequantize", "ragged_dot", "gather_matmul")
REPORTS = r"ERROR: AddressSanitizer|runtime error:"


def build(folder: Path, jobs: int) -> Path:
    """The package with a sanitized module, in a folder that goes on the path."""
    include = os.environ.get("JAX_WONLY_XLA_INCLUDE") or jax.ffi.include_dir()
    options = {"WONLY_CUDA": "OFF", "WONLY_SANITIZE": SANITIZERS, "WONLY_XLA_INCLUDE": include}
    options |= {"Python_EXECUTABLE": sys.executable, "CMAKE_BUILD_TYPE": "Release"}
    defines = [f"-D{name}={value}" for name, value in options.items()]
    subprocess.run(["cmake", "-S", ROOT, "-B", folder / "build", *defines], check=True)
    subprocess.run(["cmake", "--build", folder / "build", f"-j{jobs}", "--target", "_cpu"], check=True)
    package = folder / "package" / "jax_wonly"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "jax_wonly", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for module in (folder / "build").glob("_cpu*.so"):
        shutil.copy(module, package)
    return package.parent


def environment(package: Path) -> dict[str, str]:
    compiler = os.environ.get("CXX") or "c++"
    libraries = []
    for name in ("libasan.so", "libubsan.so"):
        words = [compiler, f"-print-file-name={name}"]
        path = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        if "/" not in path:
            raise SystemExit(f"{compiler} has no {name}")
        libraries.append(path)
    return os.environ | {
        "LD_PRELOAD": " ".join(libraries),
        # What the interpreter and XLA never free is not ours to find.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(package),
    }


def run(command: list[Any], where: dict[str, str], folder: Path) -> str:
    """What a command prints, which a finding of a sanitizer ends."""
    result = subprocess.run(
        list(map(str, command)), env=where, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode:
        print(result.stdout[-6000:])
    return result.stdout


def check_instrumented(package: Path, where: dict[str, str]) -> dict[str, Any]:
    """The sanitizers are at work: the module calls them, and a write beyond an allocation is told."""
    symbols = subprocess.run(
        ["nm", "-D", next((package / "jax_wonly").glob("_cpu*.so"))], capture_output=True, text=True, check=True
    ).stdout
    kinds = [len(re.findall(name, symbols)) for name in (r" U __asan_report_", r" U __ubsan_handle_")]
    overflow = "import ctypes; b = ctypes.CDLL(None).malloc; b.restype = ctypes.c_void_p; ctypes.memset(b(8), 1, 9)"
    told = (
        "heap-buffer-overflow"
        in subprocess.run([sys.executable, "-c", overflow], env=where, capture_output=True, text=True).stderr
    )
    return {
        "what": f"the module calls {kinds[0]} reports of ASan and {kinds[1]} of UBSan, and an overflow is found",
        "cases": 1,
        "failures": int(not all(kinds) or not told),
    }


def check_tests(where: dict[str, str], folder: Path, files: list[str]) -> dict[str, Any]:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(ROOT / "tests" / file for file in files)]
    out = run(words, where, folder)
    passed, failed = (sum(map(int, re.findall(rf"(\d+) {word}", out))) for word in ("passed", "failed"))
    reports = len(re.findall(REPORTS, out))
    return {
        "what": f"tests: {', '.join(files)}",
        "cases": passed + failed,
        "failures": failed + reports + int(passed == 0),
    }


def check_fuzz(where: dict[str, str], folder: Path, name: str, examples: int) -> dict[str, Any]:
    output = folder / "fuzz.json"
    output.unlink(missing_ok=True)
    words = [sys.executable, ROOT / "tests" / "reliability", "fuzz", "--only", name, "--output", output]
    out = run([*words, "--examples", examples, "--quick", 5 * examples], where, folder)
    if not output.is_file():  # the process was ended
        return {"what": name, "cases": 0, "failures": 1}
    row = json.loads(output.read_text())["rows"][0]
    return {**row, "failures": row["failures"] + len(re.findall(REPORTS, out))}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="reliability sanitize", description=__doc__)
    parser.add_argument("--examples", type=int, default=50, help="of each property (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "sanitize")
    parser.add_argument("--output", default="reliability-sanitizers.json")
    options = parser.parse_args(words)
    folder = options.folder.resolve()
    package = build(folder, options.jobs)
    where = environment(package)
    isas = run([sys.executable, "-c", "from jax_wonly import _cpu; print(*_cpu.isas())"], where, folder).strip()
    rows = [measured("sanitizers", check_instrumented, package, where)]
    rows.append(measured("kernels", check_tests, where, folder, ["test_cpu_kernels.py"]))
    rows += [measured(name, check_fuzz, where, folder, name, options.examples) for name in FUZZED]
    return save(options.output, rows, sanitizers=SANITIZERS, instruction_sets=isas)
