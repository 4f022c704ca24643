"""Times the CPU kernels against XLA's dense product of the same element type, as ratios.

    python benchmarks/cpu.py [--quick] [--rows 1 4 16 64 512] [--isa avx2] [--output FILE]

Both run inside ``jax.jit`` in one process, in turns, with weights as arguments. A sample counts when no other
task wanted a core before or after it; a row with fewer than nine such samples is marked inconclusive and uses
all samples: read the ratio of core time (all threads together) there. "hot" repeats one weight, "cold"
rotates over copies that no cache holds. Beside every time stands the largest error against float64, in units
of the natural size sqrt(sum (x w)^2) of a result, for our product and for XLA's dense one of the dequantized
weights.
"""

import argparse
import concurrent.futures
import importlib
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

import jax_wonly as jw

COLD_BYTES = 640 << 20
RESULTS = Path(__file__).parent / "results" / "cpu-matmul.json"


def running_tasks() -> int:
    """Runnable tasks of the machine, this one included; 1 where the system does not say."""
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            if line.startswith("procs_running"):
                return int(line.split()[1])
    except OSError:
        pass
    return 1


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def read_bandwidth(threads: int) -> float:
    """GB/s of all threads reading memory that no cache holds."""
    arrays = [np.ones(32 << 20, np.int64) for _ in range(threads)]
    best = float("inf")
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            begin = time.perf_counter()
            list(pool.map(lambda a: np.bitwise_or.reduce(a), arrays))
            best = min(best, time.perf_counter() - begin)
    return sum(a.nbytes for a in arrays) / best / 1e9


class Contender:
    """A compiled product and the weights it takes in turn."""

    def __init__(self, compiled: Compiled, x: jax.Array, weights: list):
        self.compiled, self.x, self.weights = compiled, x, weights
        self.turn = 0
        self.times: list[tuple[float, float]] = []

    def run(self) -> tuple[float, float]:
        """Seconds on the clock, and seconds of all cores."""
        weight = self.weights[self.turn % len(self.weights)]
        self.turn += 1
        begin, cpu_begin = time.perf_counter(), time.process_time()
        self.compiled(self.x, weight).block_until_ready()
        return time.perf_counter() - begin, time.process_time() - cpu_begin


def interleave(contenders: list[Contender], samples: int, seconds: float) -> bool:
    """Fills ``times``; returns whether enough samples were taken on a quiet machine."""
    for contender in contenders:
        contender.run()
    quiet: list[list[tuple[float, float]]] = [[] for _ in contenders]
    every: list[list[tuple[float, float]]] = [[] for _ in contenders]
    end = time.perf_counter() + seconds
    while min(map(len, quiet)) < samples and (time.perf_counter() < end or min(map(len, every)) < 5):
        for i, contender in enumerate(contenders):
            before = running_tasks()
            elapsed = contender.run()
            every[i].append(elapsed)
            # Pool threads that are about to sleep still count as running after a call.
            if before <= 2 and running_tasks() <= 2:
                quiet[i].append(elapsed)
    conclusive = min(map(len, quiet)) >= min(9, samples)
    for contender, good, all_samples in zip(contenders, quiet, every, strict=True):
        contender.times = good if conclusive else all_samples
    return conclusive


def copies(weight, caches: str) -> int:
    """Further copies of a weight to rotate over."""
    return 0 if caches == "hot" else -(-COLD_BYTES // weight.nbytes) - 1


def error_of(y: jax.Array, x: jax.Array, w: np.ndarray, columns: np.ndarray) -> float:
    """Largest error over a few columns. w: float64 [K, columns]."""
    x64 = np.asarray(x).astype(np.float64)
    natural = np.sqrt((x64**2) @ (w**2)).max()
    return float(np.abs(np.asarray(y[:, columns]).astype(np.float64) - x64 @ w).max() / natural)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer samples, hot weights only")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 512])
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--isa", default="", help="instruction set to force; the machine's best by default")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()

    status = jw.status()
    if not status.cpu:
        sys.exit(f"no CPU kernels here: {status.cpu_reason}")
    module = importlib.import_module("jax_wonly._cpu")
    module.force_isa(args.isa)
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    machine = {
        "cpu": cpu_model(),
        "threads": threads,
        "isa": module.active_isa(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "read_bandwidth_gb_s": round(read_bandwidth(threads), 1),
    }
    print(json.dumps(machine))

    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(0.0, 0.02, (args.k, args.n)).astype(np.float32))
    columns = rng.choice(args.n, min(64, args.n), replace=False)
    rows = []
    samples, seconds = (9, 4.0) if args.quick else (31, 20.0)
    dense_jit, ours_jit = jax.jit(lambda x, w: x @ w), jax.jit(lambda x, qt: jw.matmul(x, qt))
    for bits in args.bits:
        qt = jw.quantize(w, bits=bits, group_size=args.group_size, scale_dtype=jnp.float32)
        exact = np.asarray(jw.dequantize(qt, dtype=jnp.float32))[:, columns].astype(np.float64)
        for dtype in args.dtypes:
            dense = jw.dequantize(qt, dtype=dtype)
            for m in args.rows:
                x = jnp.asarray(rng.normal(0.1, 1.0, (m, args.k)), dtype)
                compiled = ours_jit.lower(x, qt).compile(), dense_jit.lower(x, dense).compile()
                errors = [error_of(c(x, v), x, exact, columns) for c, v in zip(compiled, (qt, dense), strict=True)]
                for caches in ("hot",) if args.quick or m > 16 else ("hot", "cold"):
                    pools = [[v, *(jax.tree.map(jnp.copy, v) for _ in range(copies(v, caches)))] for v in (qt, dense)]
                    contenders = [Contender(c, x, pool) for c, pool in zip(compiled, pools, strict=True)]
                    conclusive = interleave(contenders, samples, seconds)
                    ours, xla = (statistics.median(t for t, _ in c.times) * 1e3 for c in contenders)
                    cpu, xla_cpu = (statistics.median(t for _, t in c.times) * 1e3 for c in contenders)
                    best, xla_best = (min(t for t, _ in c.times) * 1e3 for c in contenders)
                    row = {
                        "bits": bits, "group_size": args.group_size, "k": args.k, "n": args.n, "dtype": dtype, "m": m,
                        "weights": caches, "ms": round(ours, 4), "xla_ms": round(xla, 4), "ratio": round(xla / ours, 2),
                        "best_ms": round(best, 4), "xla_best_ms": round(xla_best, 4),
                        "cpu_ms": round(cpu, 4), "xla_cpu_ms": round(xla_cpu, 4), "cpu_ratio": round(xla_cpu / cpu, 2),
                        "error": float(f"{errors[0]:.2e}"), "xla_error": float(f"{errors[1]:.2e}"),
                        "samples": len(contenders[0].times), "conclusive": conclusive,
                    }  # fmt: skip
                    rows.append(row)
                    print(
                        f"int{bits} {dtype:8} M={m:<4} {caches:4} {ours:8.3f} ms  XLA {xla:8.3f} ms  "
                        f"{xla / ours:6.2f}x  best {best:.3f} / {xla_best:.3f}  core time {xla_cpu / cpu:.2f}x  "
                        f"error {errors[0]:.1e} (XLA {errors[1]:.1e})"
                        f"{'' if conclusive else '  inconclusive: machine not quiet'}",
                        flush=True,
                    )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
