"""Times quantized products on a GPU beside the dense product of the same process, into one result file.

    python benchmarks/matmul.py [--suite decode large schemes shapes] [--output FILE] [--append]

Kernel time is CUPTI's: all kernels of a call are summed, and the median over calls is reported. Calls rotate through
more than four times the L2 of weights, and dense and quantized calls take turns. Everything is random data. ``gbps``
counts weights, scales, shift, activations and result once. ``xla_us`` is XLA's own product with ``jnp.int4`` codes and
the same groups.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
from _common import Calls, copies_of, require_gpu, save

import jax_wonly as jw
from jax_wonly.progress import progress

RESULTS = Path(__file__).parent / "results" / "h100-matmul.json"
TABLE = ((8192, 28672), (8192, 8192), (4096, 14336), (14336, 4096), (4096, 4096))  # K x N
OTHERS = ((2048, 8192), (3584, 18944), (5120, 27648), (4096, 11008), (7168, 2048), (4096, 128256), (4096, 4104))


def case(k, n, m, dtype="bfloat16", bits=4, group_size=128, mode="symmetric"):
    return {"k": k, "n": n, "m": m, "dtype": dtype, "bits": bits, "group_size": group_size, "mode": mode}


SUITES = {
    "decode": [case(k, n, m) for k, n in TABLE for m in (1, 2, 4, 8, 16, 32, 64)],
    "large": [case(k, n, m) for k, n in TABLE for m in (128, 256, 512, 1024, 4096)],
    "schemes": [
        case(8192, 8192, m, **scheme)
        for m in (1, 16, 64)
        for scheme in (
            {"dtype": "float16"},
            {"mode": "integer_zeros"},
            {"mode": "float_zeros"},
            {"mode": "offsets"},
            {"group_size": 32},
            {"group_size": 64},
            {"group_size": None},
            {"bits": 8},
            {"bits": 8, "group_size": None},
        )
    ]
    + [case(k, n, m, bits=8) for k, n in TABLE for m in (1, 16) if (k, n) != (8192, 8192)]
    + [case(8192, 8192, m, dtype="float32") for m in (1, 8, 16)],
    "shapes": [case(k, n, m) for k, n in OTHERS for m in (1, 16, 64)]
    + [case(4096, 14336, m) for m in (3, 5, 17, 24, 48, 96)]
    + [case(4128, 4096, m, group_size=32) for m in (1, 16)],
    "xla": [case(k, n, m) | {"xla": True} for k, n in TABLE for m in (1, 16)],
}


def xla_product(x, codes, scales):
    """What XLA makes of int4 codes [G, K / G, N] and scales [G, 1, N]."""
    return x @ (codes.astype(x.dtype) * scales).reshape(x.shape[1], -1)


def measure(options, rounds, calls, dense_cache):
    k, n, m = options["k"], options["n"], options["m"]
    dtype = jnp.dtype(options["dtype"])
    keys = iter(jax.random.split(jax.random.key(m), 4096))

    def random(shape, scale=1.0):
        return (jax.random.normal(next(keys), shape, jnp.float32) * scale).astype(dtype)

    dense_key = (k, n, dtype)
    if dense_key not in dense_cache:
        dense_cache.clear()
        dense_cache[dense_key] = [random((k, n), k**-0.5) for _ in range(copies_of(k * n * dtype.itemsize))]
    dense_weights = dense_cache[dense_key]
    scale_dtype = jnp.bfloat16 if dtype == jnp.float32 else dtype
    quantize = jax.jit(
        lambda w: jw.quantize(
            w,
            bits=options["bits"],
            group_size=options["group_size"],
            mode=options["mode"],
            scale_dtype=scale_dtype,
        )
    )
    first = quantize(dense_weights[0])
    count = copies_of(first.nbytes)
    # Copies of the codes rotate; their values are those of the dense weights.
    quantized = [quantize(dense_weights[i % len(dense_weights)]) for i in range(count)]
    xs = [random((m, k)) for _ in range(2)]
    ours = Calls(jw.matmul, [(xs[i % 2], qt) for i, qt in enumerate(quantized)])
    dense = Calls(jnp.matmul, [(xs[i % 2], w) for i, w in enumerate(dense_weights)])
    turns = [dense, ours]
    if options.get("xla"):
        groups = k // options["group_size"]
        codes = [
            jax.random.randint(next(keys), (groups, options["group_size"], n), -8, 8, jnp.int4)
            for _ in range(copies_of(k * n // 2))
        ]
        turns.append(Calls(xla_product, [(xs[i % 2], c, random((groups, 1, n))) for i, c in enumerate(codes)]))
    for _ in range(rounds):
        for turn in turns:
            turn.measure(calls)
    moved = first.nbytes + (m * k + m * n) * dtype.itemsize
    xla = {"xla_us": round(turns[2].us, 2), "times_xla": round(turns[2].us / ours.us, 3)} if len(turns) > 2 else {}
    return xla | {
        "op": "matmul",
        "dtype": dtype.name,
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
        "kernel": ours.kernel,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--suite", nargs="+", choices=SUITES, default=list(SUITES), help="what to measure (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=15, help="calls in a turn (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the JSON (default: %(default)s)")
    parser.add_argument("--append", action="store_true", help="keep the file's rows that are not measured again")
    parser.add_argument("--commit", help="of this tree, where git cannot tell")
    args = parser.parse_args()
    require_gpu("matmul.py")

    rows: dict[tuple, dict] = {}
    identity = ("op", "dtype", "bits", "group_size", "zeros", "k", "n", "m")
    if args.append and args.output.is_file():
        rows = {tuple(row[i] for i in identity): row for row in json.loads(args.output.read_text())["rows"]}
    cases = [options for suite in args.suite for options in SUITES[suite]]
    dense_cache: dict = {}
    for options in progress(cases, label="products"):
        row = measure(options, args.rounds, args.calls, dense_cache)
        rows[tuple(row[i] for i in identity)] = row
        save(args.output, list(rows.values()), args.commit)
    for row in rows.values():
        print(
            f"{row['k']:6} x {row['n']:6} M {row['m']:5} {row['dtype']:8} int{row['bits']} g{row['group_size']:<5} "
            f"{row['zeros']:13} {row['us']:9.2f} us {row['gbps']:7.0f} GB/s {row['ratio']:6.3f}x  {row['kernel']}"
        )
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
