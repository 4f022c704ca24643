"""Times the gradient of the activations through quantized weights beside the dense one, into one result file.

    python benchmarks/gradients.py [--suite tokens schemes] [--tokens N ...] [--precision default] [--output FILE]
                                   [--append]

``dx = dy @ w.T``: the transpose of ``jax_wonly.matmul``, and ``dy @ w.T`` with dense weights, in the same process and
taking turns. Kernel time as in ``benchmarks/matmul.py``: CUPTI's, all kernels of a call, the median over calls that
rotate through more than four times the L2 of weights. Everything is random data.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
from _common import (
    add_precision,
    add_results,
    add_suites,
    add_timing,
    gradient_of,
    kept_rows,
    require_gpu,
    save,
    take_precision,
)

import jax_wonly as jw
from jax_wonly._timing import Calls, copies_of
from jax_wonly.progress import progress

RESULTS = Path(__file__).parent / "results" / "h100-gradients.json"
SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192))  # K x N
FEW_SHAPES = (
    *((1024, 4096), (2048, 8192), (2560, 10240), (3584, 18944), (5120, 5120), (5120, 25600)),
    *((11008, 4096), (18944, 3584), (25600, 5120)),
)
TOKENS = (1, 8, 16, 24, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
IDENTITY = ("dtype", "scales", "bits", "group_size", "zeros", "k", "n", "m")


def case(k, n, m, dtype="bfloat16", bits=4, group_size=128, mode="symmetric", scales=None):
    scales = scales or ("bfloat16" if dtype == "float32" else dtype)
    scheme = {"dtype": dtype, "scales": scales, "bits": bits, "group_size": group_size, "mode": mode}
    return {"k": k, "n": n, "m": m} | scheme


SUITES = {
    "tokens": [case(k, n, m) for k, n in SHAPES for m in TOKENS],
    "schemes": [
        case(8192, 8192, m, **scheme)
        for m in (1, 16, 32, 64, 256, 1024)
        for scheme in (
            {"dtype": "float16"},
            {"scales": "float32"},
            {"mode": "integer_zeros"},
            {"mode": "integer_zeros", "group_size": 64},
            {"mode": "offsets"},
            {"mode": "offsets", "group_size": 64, "scales": "float32"},
            {"group_size": 32},
            {"group_size": None},
            {"bits": 8},
        )
    ]
    + [case(8192, 8192, m, dtype="float32") for m in (1, 16, 256)],
    "tables": [
        case(8192, 8192, m, group_size=64, mode="nf4", scales=scales)
        for scales in ("float32", "bfloat16")
        for m in (1, 16, 32, 64, 256, 1024, 4096)
    ],
    # Strips of inputs, of which a CTA has 64, that run at once or do not.
    "few": [case(k, n, m) for k, n in (*FEW_SHAPES, *SHAPES) for m in (1, 8, 16, 24, 32)],
    "float32_tables": [
        case(8192, 8192, m, dtype="float32", group_size=64, mode="nf4", scales="float32")
        for m in (1, 16, 64, 256, 1024)
    ],
    "float32": [case(k, n, m, dtype="float32") for k, n in SHAPES for m in (8, 16, 64, 128, 256, 512, 1024, 4096)]
    + [
        case(8192, 8192, m, dtype="float32", **scheme)
        for m in (64, 1024)
        for scheme in (
            {"scales": "float32"},
            {"mode": "integer_zeros"},
            {"mode": "offsets"},
            {"group_size": 32},
            {"group_size": None},
            {"bits": 8},
        )
    ],
}


def scheme_of(options: dict) -> tuple:
    """What weights depend on, which serve all numbers of tokens."""
    return tuple(value for name, value in options.items() if name != "m")


def measure(options, rounds, calls, cache):
    k, n, m = options["k"], options["n"], options["m"]
    dtype = jnp.dtype(options["dtype"])
    scheme = scheme_of(options)
    if scheme not in cache:
        cache.clear()
        dense_weights = [
            (jax.random.normal(jax.random.key(i), (k, n), jnp.float32) * k**-0.5).astype(dtype)
            for i in range(copies_of(k * n * dtype.itemsize))
        ]
        quantize = jax.jit(
            lambda w: jw.quantize(
                w,
                bits=options["bits"],
                group_size=options["group_size"],
                mode=options["mode"],
                scale_dtype=jnp.dtype(options["scales"]),
            )
        )
        count = copies_of(quantize(dense_weights[0]).nbytes)
        quantized = [quantize(dense_weights[i % len(dense_weights)]) for i in range(count)]
        cache[scheme] = dense_weights, quantized
    dense_weights, quantized = cache[scheme]
    dys = [jax.random.normal(jax.random.key(i), (m, n), jnp.float32).astype(dtype) for i in range(2)]
    ours = Calls(gradient_of(jw.matmul, k), [(dys[i % 2], qt) for i, qt in enumerate(quantized)])
    dense = Calls(lambda dy, w: dy @ w.T, [(dys[i % 2], w) for i, w in enumerate(dense_weights)])
    for _ in range(rounds):
        dense.measure(calls)
        ours.measure(calls)
    moved = quantized[0].nbytes + (m * k + m * n) * dtype.itemsize
    return {
        "dtype": dtype.name,
        "scales": options["scales"],
        "bits": options["bits"],
        "group_size": options["group_size"] or k,
        "zeros": options["mode"],
        "k": k,
        "n": n,
        "m": m,
        "us": round(ours.us, 2),
        "dense_us": round(dense.us, 2),
        "ratio": round(dense.us / ours.us, 3),
        "gbps": round(moved / ours.us * 1e-3, 1),
        "tflops": round(2 * m * n * k / ours.us * 1e-6, 1),
        "kernel": ours.kernel,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_suites(parser, SUITES)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="(default: %(default)s)")
    add_timing(parser, rounds=3, calls=8)
    add_precision(parser)
    add_results(parser, RESULTS)
    args = parser.parse_args()
    require_gpu("gradients.py")
    precision = take_precision(args)

    results = kept_rows(args.output, args.append, IDENTITY)
    cache: dict = {}
    cases = [options for suite in args.suite for options in SUITES[suite] if options["m"] in args.tokens]
    cases.sort(key=lambda options: str(scheme_of(options)))  # so that weights are made once
    for options in progress(cases, label="products"):
        row = measure(options, args.rounds, args.calls, cache)
        results[tuple(row[name] for name in IDENTITY)] = row
        save(args.output, list(results.values()), args.commit, **precision)
        print(
            f"{row['k']:6} x {row['n']:6} M {row['m']:5} {row['dtype']:8} int{row['bits']} g{row['group_size']:<5} "
            f"{row['zeros']:13} {row['us']:9.2f} us, dense {row['dense_us']:9.2f} us, {row['ratio']:6.3f}x, "
            f"{row['tflops']:6.1f} TFLOP/s  {row['kernel']}"
        )
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
