"""What the benchmarks of GPU kernels share: timing by CUPTI, rotating operands, the result file."""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

L2_BYTES = 50 << 20  # of an H100


def copies_of(nbytes: int) -> int:
    """How many sets of ``nbytes`` have to take turns for none to be found in the L2: more than four times its size."""
    return max(2, -(-(4 * L2_BYTES + (10 << 20)) // nbytes))


class Calls:
    """Calls of one compiled function that take the next set of operands each time."""

    def __init__(self, function: Callable, operands: Sequence[tuple]):
        self.operands = operands
        self.compiled = jax.jit(function).lower(*operands[0]).compile()
        self.next = 0
        self.times: list[float] = []
        self.kernel = ""
        self.run(2)

    def run(self, count: int):
        for _ in range(count):
            result = self.compiled(*self.operands[self.next % len(self.operands)])
            self.next += 1
        return jax.block_until_ready(result)

    def measure(self, count: int) -> None:
        """Adds the kernel time of ``count`` calls, all kernels of a call together."""
        from jax._src.lib import mosaic_gpu  # only installations with CUDA have it

        cupti = mosaic_gpu._mosaic_gpu_ext
        cupti._cupti_init()
        try:
            self.run(count)
        finally:
            timings = cupti._cupti_get_timings(True)
        kernels = len(timings) // count
        assert kernels * count == len(timings), "calls differ in their number of kernels"
        for first in range(0, len(timings), kernels):
            self.times.append(1e3 * sum(time for _, time in timings[first : first + kernels]))
        self.kernel = " + ".join(sorted({name.split("<")[0].split("(")[0][-60:] for name, _ in timings[:kernels]}))

    @property
    def us(self) -> float:
        return statistics.median(self.times)


def require_gpu(script: str) -> None:
    if (platform := jax.devices()[0].platform) != "gpu":
        sys.exit(f"benchmarks/{script} needs an NVIDIA GPU; JAX has {platform}")


def command(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def save(output: Path, rows: Sequence[dict], commit: str | None, **facts) -> None:
    """Writes the rows with a description of the machine, and ``facts`` about the run."""
    report = {
        "device": jax.devices()[0].device_kind,
        "driver": command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "jax": jax.__version__,
        "commit": commit or command("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"),
        **facts,
        "rows": list(rows),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n")
