"""Times the gradient of the scales of quantized weights beside that of a dense weight, into one result file.

    python benchmarks/scales.py [--suite tokens schemes experts] [--tokens N ...] [--output FILE] [--append]

The cotangent of ``jax_wonly.matmul`` (or ``ragged_dot``, rows in equal shares or as few experts get most of them), and
``x.T @ dy``, of as many operations, in the same process and taking turns. Kernel time as in ``benchmarks/matmul.py``:
CUPTI's, all kernels of a call, the median over calls that rotate through more than four times the L2 of weights.
Everything is random data.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from _common import add_results, add_suites, add_timing, kept_rows, require_gpu, save, scales_gradient

import jax_wonly as jw
from jax_wonly._timing import Calls, copies_of
from jax_wonly.progress import progress

RESULTS = Path(__file__).parent / "results" / "h100-scales-gradients.json"
SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192))  # K x N
EXPERTS = ((8, 4096, 14336), (128, 2048, 1536), (128, 768, 2048))  # experts, K x N
TOKENS = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192)
IDENTITY = ("dtype", "bits", "group_size", "zeros", "experts", "routing", "k", "n", "m")


def case(k, n, m, dtype="bfloat16", bits=4, group_size=128, mode="symmetric", experts=1, routing="one"):
    scheme = {"dtype": dtype, "bits": bits, "group_size": group_size, "mode": mode}
    return {"k": k, "n": n, "m": m, "experts": experts, "routing": routing} | scheme


SUITES = {
    "tokens": [case(k, n, m) for k, n in SHAPES for m in TOKENS],
    "schemes": [
        case(8192, 8192, m, **scheme)
        for m in (1, 16, 1024)
        for scheme in (
            {"dtype": "float16"},
            {"mode": "integer_zeros"},
            {"mode": "offsets"},
            {"group_size": 32},
            {"group_size": 64},
            {"group_size": None},
            {"bits": 8},
        )
    ],
    "experts": [
        case(k, n, m, experts=experts, routing=routing)
        for experts, k, n in EXPERTS
        for m in (16, 128, 2048, 16384)
        for routing in ("balanced", "skewed")
    ],
}


def sizes_of(experts: int, m: int, routing: str) -> jax.Array:
    """Rows of each expert: equal shares, or as the inverses of their numbers in a random order."""
    shares = np.ones(experts) if routing == "balanced" else 1 / np.arange(1, experts + 1)
    ends = np.rint(np.cumsum(np.random.default_rng(0).permutation(shares)) / shares.sum() * m)
    return jnp.asarray(np.diff(ends, prepend=0), jnp.int32)


def measure(options, rounds, calls, cache):
    k, n, m, experts = options["k"], options["n"], options["m"], options["experts"]
    dtype, of_experts = jnp.dtype(options["dtype"]), options["routing"] != "one"
    # The weights of a scheme serve all of its numbers of rows.
    scheme = tuple(value for name, value in options.items() if name not in ("m", "routing"))
    if scheme not in cache:
        cache.clear()
        shape = (experts, k, n) if of_experts else (k, n)
        quantize = jax.jit(
            lambda key: jw.quantize(
                jax.random.normal(key, shape, dtype) * k**-0.5,
                bits=options["bits"],
                group_size=options["group_size"],
                mode=options["mode"],
            )
        )
        first = quantize(jax.random.key(0))
        cache[scheme] = [first, *(quantize(jax.random.key(1 + i)) for i in range(copies_of(first.nbytes) - 1))]
    xs = [jax.random.normal(jax.random.key(i), (m, k), dtype) for i in range(2)]
    dys = [jax.random.normal(jax.random.key(2 + i), (m, n), dtype) for i in range(2)]
    rest = (sizes_of(experts, m, options["routing"]),) if of_experts else ()
    product = jw.ragged_dot if of_experts else jw.matmul
    operands = [(xs[i % 2], qt, dys[i % 2], *rest) for i, qt in enumerate(cache[scheme])]
    ours = Calls(scales_gradient(product), operands)
    dense = Calls(lambda x, dy: x.T @ dy, list(zip(xs, dys, strict=True)))
    for _ in range(rounds):
        dense.measure(calls)
        ours.measure(calls)
    return {
        "dtype": dtype.name,
        "bits": options["bits"],
        "group_size": options["group_size"] or k,
        "zeros": options["mode"],
        "experts": experts,
        "routing": options["routing"],
        "k": k,
        "n": n,
        "m": m,
        "us": round(ours.us, 2),
        "dense_us": round(dense.us, 2),
        "ratio": round(dense.us / ours.us, 3),
        "tflops": round(2 * m * n * k / ours.us * 1e-6, 1),
        "kernel": ours.kernel,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_suites(parser, SUITES)
    parser.add_argument("--tokens", nargs="+", type=int, help="rows (default: all of the suites)")
    add_timing(parser, rounds=3, calls=6)
    add_results(parser, RESULTS)
    args = parser.parse_args()
    require_gpu("scales.py")

    results = kept_rows(args.output, args.append, IDENTITY)
    cache: dict = {}
    cases = [o for suite in args.suite for o in SUITES[suite] if not args.tokens or o["m"] in args.tokens]
    for options in progress(cases, label="gradients"):
        row = measure(options, args.rounds, args.calls, cache)
        results[tuple(row[name] for name in IDENTITY)] = row
        save(args.output, list(results.values()), args.commit)
        print(
            f"{row['experts']:4} of {row['k']:6} x {row['n']:6} M {row['m']:5} {row['routing']:8} {row['dtype']:8} "
            f"int{row['bits']} g{row['group_size']:<5} {row['zeros']:13} {row['us']:9.2f} us, dense "
            f"{row['dense_us']:9.2f} us, {row['ratio']:6.3f}x, {row['tflops']:6.1f} TFLOP/s  {row['kernel']}"
        )
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
