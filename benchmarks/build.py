"""Times what a user waits for a wheel of this package, with the CUDA kernels and without, and says how large it is.

    python benchmarks/build.py [--architectures off 90a-real ...] [--output FILE]

Each wheel is made by `pip wheel` from nothing, its isolated environment included; the compilers use all cores. With
kernels it needs nvcc on the PATH. ``cpu_seconds`` is what the processes used, whoever shares the machine.
"""

import argparse
import json
import os
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


def build(architectures: str) -> dict:
    cuda = architectures != "off"
    environment = os.environ | {"JAX_WONLY_CUDA": "ON" if cuda else "OFF"}
    if cuda:
        environment["JAX_WONLY_CUDA_ARCHITECTURES"] = architectures
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--wheel-dir", folder]
        begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*words, "-C", f"build-dir={folder}/build", str(ROOT)], env=environment, check=True)
        seconds, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            sizes = {Path(item.filename).name.split(".")[0]: item.file_size for item in archive.infolist()}
        megabytes = {name: round(sizes.get(name, 0) / 1e6, 1) for name in ("_cpu", "_cuda")}
        return {
            "architectures": architectures,
            "seconds": round(seconds),
            "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime),
            "cpu_mb": megabytes["_cpu"],
            "cuda_mb": megabytes["_cuda"],
            "wheel_mb": round(wheel.stat().st_size / 1e6, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", default=["off", "90a-real"])
    add_results(parser, RESULTS, append=False)
    args = parser.parse_args()
    nvcc = command("nvcc", "--version").split("release ")[-1].split(",")[0]
    cores = len(os.sched_getaffinity(0))
    report = {"cores": cores, "nvcc": nvcc, "commit": revision(args.commit), "rows": []}
    for architectures in args.architectures:
        report["rows"].append(build(architectures))
        print(report["rows"][-1])
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
