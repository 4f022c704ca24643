"""Times quantized products on a GPU beside the dense product of the same process, into one result file.

    python benchmarks/matmul.py [--suite decode large schemes shapes] [--output FILE] [--append]
    python benchmarks/matmul.py --suite every     every number of tokens, about a second each, into a file of its own
    python benchmarks/matmul.py --suite batch     eight weights at once, into a file of its own
    python benchmarks/matmul.py --suite scales    scales of other types than the activations, into a file of its own
    python benchmarks/matmul.py --suite small     layers of small models, into a file of its own
    python benchmarks/matmul.py --suite models    wide layers of large models, into a file of its own
    python benchmarks/matmul.py --suite down      layers of large models with many inputs, into a file of its own
    python benchmarks/matmul.py --suite few       heads of few outputs, into a file of its own
    python benchmarks/matmul.py --suite odd       numbers of outputs that are no multiple of 8, into a file of its own
    python benchmarks/matmul.py --suite float32 layers [--precision default]     float32, into a file of their own
    python benchmarks/matmul.py --suite wide    float32 results of bfloat16 activations, into a file of its own
    python benchmarks/matmul.py --suite xla     beside XLA's product of the same codes, into a file of its own
    python benchmarks/matmul.py --suite other_architectures     into a file of its own, of a build that takes the
        kernels of another architecture (CMake's -DWONLY_CUDA_DISPATCH=80)

Kernel time is CUPTI's: all kernels of a call are summed, and the median over calls is reported. Calls rotate through
more than four times the L2 of weights, and dense and quantized calls take turns. Everything is random data. ``gbps``
counts weights, scales, shift, activations and result once. ``xla_us`` is XLA's own product with ``jnp.int4`` codes and
the same groups.
"""

import argparse
from pathlib import Path

from _common import (
    add_precision,
    add_results,
    add_suites,
    add_timing,
    kept_rows,
    require_gpu,
    save,
    take_precision,
)

from jax_wonly._timing import Product, copies_of
from jax_wonly.progress import progress

RESULTS = Path(__file__).parent / "results"
# Of the suites that have their own.
FILES = {
    "batch": "h100-batch.json",
    "down": "h100-down.json",
    "every": "h100-every.json",
    "few": "h100-few.json",
    "layers": "h100-layers.json",
    "models": "h100-models.json",
    "odd": "h100-odd.json",
    "scales": "h100-scales.json",
    "shifts": "h100-shifts.json",
    "small": "h100-small.json",
    "wide": "h100-wide.json",
    "xla": "h100-xla.json",
    "other_architectures": "h100-sm80.json",
}
TABLE = ((8192, 28672), (8192, 8192), (4096, 14336), (14336, 4096), (4096, 4096))  # K x N
WIDE = ((3584, 18944), (4096, 22016))  # more outputs than tiles of 128 for each multiprocessor
SMALL = ((384, 1536), (1536, 384), (768, 768), (768, 3072), (3072, 768), (1024, 1024), (1024, 4096), (2048, 2048))
# Of what is multiplied at once in them: queries, keys and values, or gates, ups or both.
MODELS = ((8192, 10240), (5120, 17408), (5120, 25600), (5120, 27648), (4096, 28672), (3584, 37888), (8192, 57344))
# What leaves their feed-forward layers: more inputs than outputs.
DOWN = ((11008, 4096), (18944, 3584), (18432, 7168), (27648, 5120), (28672, 8192), (29568, 8192))
# Of which float zeros and offsets are timed beside symmetric codes.
SHIFTED = ((768, 768), (1024, 4096), (2048, 2048), (4096, 4096), (4096, 14336), (8192, 8192), (8192, 28672))
LAYERS = ((768, 768), (768, 3072), (3072, 768), (1024, 4096), (4096, 4096))  # and, of many rows, images' pixels
FEW = ((1024, 10), (768, 100), (4096, 64), (512, 256), (2048, 1000))
ODD = ((768, 50257), (1024, 30522), (2048, 32001), (4096, 32001), (4096, 1001))  # vocabularies, and a classifier
OTHERS = ((2048, 8192), (3584, 18944), (5120, 27648), (4096, 11008), (7168, 2048), (4096, 128256), (4096, 4104))


def case(k, n, m, dtype="bfloat16", bits=4, group_size=128, mode="symmetric"):
    return {"k": k, "n": n, "m": m, "dtype": dtype, "bits": bits, "group_size": group_size, "mode": mode}


# Schemes with other work than symmetric groups of 128, and all that a product of many tokens treats apart.
OTHER_SCHEMES = ({"mode": "integer_zeros"}, {"mode": "offsets"}, {"group_size": 32}, {"group_size": 64}, {"bits": 8})
MANY = ({"dtype": "float16"}, {"mode": "float_zeros"}, {"group_size": None}, *OTHER_SCHEMES)

# Of more outputs than tiles of 128 for each multiprocessor: edges of tiles and what lies between.
WIDE_GRID = (17, 24, 32, 33, 40, 48, 56, 64, 65, 72, 80, 97, 105, 113, 129, 137, 153, 161, 177, 193, 200, 224, 257)
# Every number up to 64, then the middle and one more of what may be a kernel's tile.
GRID = (*range(1, 65), *range(80, 257, 16), *range(97, 257, 32), *range(288, 513, 32), *range(300, 1025, 100))
GRID = sorted({*GRID, 513, 640, 768, 897, 1024, 1281, 1536, 2048, 2500, 3000, 4096, 5555, 8192})
MIDDLE = (129, 200, 257, 300, 400, 513, 600, 700, 800, 900, 1100, 1281, 1700, 2500, 3500, 5555)

SUITES = {
    "decode": [case(k, n, m) for k, n in TABLE for m in (1, 2, 4, 8, 16, 32, 64)],
    "large": [case(k, n, m) for k, n in TABLE for m in (128, 256, 512, 1024, 2048, 4096, 8192)]
    + [case(8192, 8192, m, **scheme) for m in (256, 1024, 4096) for scheme in MANY],
    "float16": [case(k, n, m, dtype="float16") for k, n in TABLE for m in (64, 128, 256, 512, 1024, 2048)],
    "schemes": [
        case(8192, 8192, m, **scheme)
        for m in (1, 8, 16, 64)
        for scheme in (
            {"dtype": "float16"},
            {"mode": "integer_zeros"},
            {"mode": "float_zeros"},
            {"mode": "offsets"},
            {"group_size": 32},
            {"group_size": 64},
            {"group_size": 32, "mode": "offsets"},
            {"group_size": 64, "mode": "offsets"},
            {"group_size": None},
            {"bits": 8},
            {"bits": 8, "group_size": None},
        )
    ]
    + [case(k, n, m, bits=8) for k, n in TABLE for m in (1, 8, 16) if (k, n) != (8192, 8192)]
    + [case(4096, 4096, m, bits=bits, mode="offsets") for bits in (4, 8) for m in (1, 8)],
    "float32": [case(8192, 8192, m, dtype="float32") for m in (1, 4, 8, 16, 64, 256, 1024)]
    + [case(8192, 8192, m, dtype="float32", mode="offsets") for m in (1, 8, 16, 64, 256, 1024)]
    + [
        case(k, n, m, group_size=64, mode="nf4", dtype="float32")
        for k, n in TABLE[1:3]
        for m in (1, 8, 16, 64, 128, 512, 1024)
    ],
    "shapes": [case(k, n, m) for k, n in OTHERS for m in (1, 4, 8, 16, 64)]
    + [case(4096, 14336, m) for m in (3, 5, 17, 24, 48, 96)]
    + [case(k, n, m) for k, n in WIDE for m in (48, 96, 128, 150, 192)]
    + [case(*WIDE[1], 64)]  # the other is among OTHERS
    + [case(4128, 4096, m, group_size=32) for m in (1, 16)],
    "layers": [case(k, n, m, dtype="float32") for k, n in LAYERS for m in (8, 16, 64, 256, 1024, 4096)]
    + [case(k, n, 32 * 56 * 56, dtype="float32", group_size=64) for k, n in ((64, 256), (256, 64))],
    "wide": [
        case(k, n, m) | {"result": "float32"}
        for k, n in (*LAYERS, TABLE[1], (4096, 128256))
        for m in (1, 64, 256, 1024, 4096)
        if m * n < 1 << 28
    ],
    "batch": [case(4096, 4096, m) | {"batch": 8} for m in (1, 8, 16, 64)],
    "scales": [
        case(8192, 8192, m, mode=mode) | {"scale_dtype": scale_dtype}
        for mode, scale_dtype, tokens in (
            ("symmetric", "float32", (1, 4, 8, 16, 64, 128, 256, 512, 1024, 4096)),
            ("offsets", "float32", (1, 8, 16, 64, 128, 256, 512, 1024, 4096)),
            ("float_zeros", "float32", (1, 8, 16, 64, 128, 256, 512, 1024, 4096)),
            ("symmetric", "float16", (1, 8, 16, 64, 128, 256, 512, 1024, 4096)),
            ("offsets", "float16", (1, 8, 16, 64, 128, 256, 512, 1024, 4096)),
        )
        for m in tokens
    ],
    "shifts": [
        case(k, n, m, **scheme) | {"scale_dtype": scale_dtype}
        for k, n in SHIFTED
        for scheme, scale_dtype in (
            *(({"mode": mode}, "bfloat16") for mode in ("symmetric", "offsets", "float_zeros")),
            *(({"group_size": g, "mode": m}, "bfloat16") for g in (64, 32) for m in ("symmetric", "offsets")),
            *(({"bits": 8, "mode": mode}, "bfloat16") for mode in ("symmetric", "offsets")),
            *(({"mode": mode}, "float32") for mode in ("symmetric", "offsets")),
        )
        for m in (1, 8, 16)
    ],
    "tables": [
        case(k, n, m, group_size=64, mode="nf4") for k, n in TABLE[1:3] for m in (1, 8, 16, 64, 128, 512, 1024, 4096)
    ]
    + [case(8192, 8192, m, group_size=64) for m in (4, 8)],
    "small": [case(k, n, m) for k, n in SMALL for m in (1, 16, 32, 64, 128, 256, 512, 1024, 2048)],
    "models": [case(k, n, m) for k, n in MODELS for m in (24, 32, 48, 64, 96, 128, 192, 256, 400, 512)],
    "down": [case(k, n, m) for k, n in DOWN for m in (1, 2, 3, 4, 8, 16, 32, 64)]
    + [case(*DOWN[4], m, **scheme) for scheme in OTHER_SCHEMES for m in (1, 3, 8, 16)],
    "few": [case(k, n, m) for k, n in FEW for m in (1, 16, 64, 256, 1024, 4096)],
    # Each beside whole sixteens of outputs.
    "odd": [
        case(k, whole, m, **scheme)
        for k, n in ODD
        for scheme in ({}, *({"dtype": "float32"}, {"mode": "integer_zeros"}, {"bits": 8}) * (k == 768))
        for m in ((1, 8, 16, 32, 64, 128, 256, 1024, 4096) if not scheme else (8, 64, 1024))
        for whole in (n, -(-n // 16) * 16)
    ],
    "xla": [case(k, n, m) | {"xla": True} for k, n in TABLE for m in (1, 16)],
    "every": [case(k, n, m) for k, n in TABLE[2:] for m in MIDDLE]
    # What whole waves have, and more.
    + [case(4096, 4096, m) for m in (720, 721, 912, 913, 1000, 1025, 1050, 1104, 1105, 1150, 1153, 1200, 1296, 1297)]
    + [case(8192, 8192, m) for m in (520, 528, 529, 552, 576, 577, 1056, 1104, 1152, 1160)]
    + [case(*WIDE[0], m) for m in WIDE_GRID]
    + [case(*WIDE[0], m, **scheme) for m in (40, 64, 72, 96, 120, 150, 200) for scheme in OTHER_SCHEMES]
    + [case(8192, 8192, m) for m in reversed(GRID)]
    + [case(k, n, m, **scheme) for k, n in (TABLE[1], TABLE[4]) for m in MIDDLE[:12] for scheme in OTHER_SCHEMES],
    "other_architectures": [
        case(k, n, m) | {"implementation": "cuda"} for k, n in TABLE for m in (17, 32, 64, 128, 256, 512, 1024, 4096)
    ],
}


def measure(options, rounds, calls, dense_cache):
    product = Product(**{"xla": False} | options, copies=copies_of, dense_cache=dense_cache)
    product.measure(rounds, calls)
    return product.row()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_suites(parser, SUITES, [suite for suite in SUITES if suite not in FILES])
    add_timing(parser, rounds=3, calls=15)
    add_precision(parser)
    add_results(parser, None, where="h100-matmul.json beside this script; suites of their own have others")
    args = parser.parse_args()
    require_gpu("matmul.py")
    precision = take_precision(args)
    if args.output is None:
        files = {FILES.get(suite, "h100-matmul.json") for suite in args.suite}
        if len(files) > 1:
            parser.error(f"--suite: {', '.join(args.suite)} have results in several files; accepted: those of one")
        args.output = RESULTS / files.pop()

    identity = ("op", "dtype", "bits", "group_size", "zeros", "k", "n", "m", "batch", "scales", "result")
    rows = kept_rows(args.output, args.append, identity)
    cases = [options for suite in args.suite for options in SUITES[suite]]
    dense_cache: dict = {}
    for options in progress(cases, label="products"):
        row = measure(options, args.rounds, args.calls, dense_cache)
        rows[tuple(row.get(i) for i in identity)] = row
        save(args.output, list(rows.values()), args.commit, **precision)
    for row in rows.values():
        print(
            f"{row['k']:6} x {row['n']:6} M {row['m']:5} {row['dtype']:8} int{row['bits']} g{row['group_size']:<5} "
            f"{row['zeros']:13} {row['us']:9.2f} us {row['gbps']:7.0f} GB/s {row['ratio']:6.3f}x  {row['kernel']}"
        )
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
