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
import importlib
import json
import os
import platform
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import jax_wonly as jw
from jax_wonly._timing import CPU_COLD_BYTES, Calls, cpu_model, interleave, read_bandwidth

RESULTS = Path(__file__).parent / "results" / "cpu-matmul.json"


def copies(weight, caches: str) -> int:
    """Further copies of a weight to rotate over."""
    return 0 if caches == "hot" else -(-CPU_COLD_BYTES // weight.nbytes) - 1


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
    for bits in args.bits:
        qt = jw.quantize(w, bits=bits, group_size=args.group_size, scale_dtype=jnp.float32)
        exact = np.asarray(jw.dequantize(qt, dtype=jnp.float32))[:, columns].astype(np.float64)
        for dtype in args.dtypes:
            dense = jw.dequantize(qt, dtype=dtype)
            for m in args.rows:
                x = jnp.asarray(rng.normal(0.1, 1.0, (m, args.k)), dtype)
                hot = Calls(jw.matmul, [(x, qt)]), Calls(jnp.matmul, [(x, dense)])
                errors = [error_of(calls.run(), x, exact, columns) for calls in hot]
                for caches in ("hot",) if args.quick or m > 16 else ("hot", "cold"):
                    contenders = list(hot)
                    for calls, weight in zip(contenders, (qt, dense), strict=True):
                        pool = [weight, *(jax.tree.map(jnp.copy, weight) for _ in range(copies(weight, caches)))]
                        calls.operands = [(x, w) for w in pool]
                    conclusive = interleave(contenders, samples, seconds)
                    ours, xla = (calls.us / 1e3 for calls in contenders)
                    cpu, xla_cpu = (calls.core_us / 1e3 for calls in contenders)
                    best, xla_best = (min(calls.times) / 1e3 for calls in contenders)
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
