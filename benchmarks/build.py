"""Times what a user waits for a wheel of this package, with the CUDA kernels and without, and says how large it is.

    python benchmarks/build.py [--architectures off 90a-real ...] [--quick] [--no-isolation] [--output FILE] [--append]

Each wheel is made by `pip wheel` from nothing, its isolated environment included, or, without a network, with the
packages that are installed (``--no-isolation``). The compilers use all cores that the process may (``taskset``). With
kernels it needs nvcc on the PATH; ``--quick`` leaves most optimizations of those out, as JAX_WONLY_CUDA_QUICK does.
``cpu_seconds`` is what the processes used, whoever shares the machine.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from _common import add_results, command, revision

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "build.json"


def processor() -> str:
    named = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return named[1] if named else ""


def build(architectures: str, isolated: bool, quick: bool) -> dict:
    cuda = architectures != "off"
    environment = os.environ | {
        "JAX_WONLY_CUDA": "ON" if cuda else "OFF",
        "JAX_WONLY_CUDA_QUICK": "ON" if quick else "OFF",
    }
    if cuda:
        environment["JAX_WONLY_CUDA_ARCHITECTURES"] = architectures
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--wheel-dir", folder]
        words += [] if isolated else ["--no-build-isolation"]
        begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*words, "-C", f"build-dir={folder}/build", str(ROOT)], env=environment, check=True)
        seconds, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            sizes = {Path(item.filename).name.split(".")[0]: item.file_size for item in archive.infolist()}
        megabytes = {name: round(sizes.get(name, 0) / 1e6, 1) for name in ("_cpu", "_cuda")}
        return {
            "architectures": architectures + (", quick" if quick else ""),
            "seconds": round(seconds),
            "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime),
            "cpu_mb": megabytes["_cpu"],
            "cuda_mb": megabytes["_cuda"],
            "wheel_mb": round(wheel.stat().st_size / 1e6, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", default=["off", "90a-real"])
    parser.add_argument("--no-isolation", action="store_true", help="build with the packages that are installed")
    parser.add_argument("--quick", action="store_true", help="kernels without most optimizations")
    add_results(parser, RESULTS)
    args = parser.parse_args()
    machine = {
        "kernels_of": revision(args.commit),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "nvcc": command("nvcc", "--version").split("release ")[-1].split(",")[0],
        "isolated": not args.no_isolation,
    }
    report = {"commit": revision(args.commit), "rows": []}
    if args.append and args.output.is_file():
        report = json.loads(args.output.read_text())
    rows = report["rows"]
    for architectures in args.architectures:
        rows.append(machine | build(architectures, not args.no_isolation, args.quick))
        print(rows[-1])
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
