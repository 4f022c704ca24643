"""Quantized activations: how fast their products are on a GPU, and what they cost in accuracy anywhere.

    python benchmarks/activation.py [--suite speed quantize accuracy] [--output FOLDER]

``speed`` times ``matmul(x, qt, activation_quantization=...)``, which quantizes x first, and the product alone, beside
the dense bfloat16 product of the same process, as ``benchmarks/matmul.py`` does. ``quantize`` times quantizing alone
beside ``-x``, which copies as many bytes as fast as can be. ``accuracy`` compares with the product of what was not
quantized, in float64, on random activations: normal ones, and the same with a few columns that are 30 times larger, as
language models have them.
"""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _common import add_timing, require_gpu, save

import jax_wonly as jw
from jax_wonly._timing import Calls, copies_of
from jax_wonly.progress import progress

RESULTS = Path(__file__).parent / "results"
SHAPES = ((4096, 4096), (8192, 8192), (4096, 14336), (14336, 4096))  # K x N
TOKENS = (512, 1024, 4096)
FLOAT8 = "float8_e4m3fn"
# Bits and groups of the weights, codes and groups of the activations.
SCHEMES: tuple[tuple[int, int | None, str, int | None], ...] = (
    (8, None, "int8", None),
    (4, None, "int8", None),
    (8, 128, "int8", 128),
    (4, 128, "int8", 128),
    (4, 128, "int8", None),
    (4, None, FLOAT8, None),
    (4, 128, FLOAT8, 128),
)


def normal(seed: int, shape, scale=1.0):
    return (jax.random.normal(jax.random.key(seed), shape, jnp.float32) * scale).astype(jnp.bfloat16)


def facts(k, n, m, bits, group_size, codes, x_group):
    return {
        "scheme": f"W{bits}A8" + ("" if codes == "int8" else " fp8"),
        "bits": bits,
        "group_size": group_size or k,
        "codes": codes,
        "x_group_size": x_group or k,
        "k": k,
        "n": n,
        "m": m,
    }


def speed(rounds: int, calls: int, shapes, tokens) -> Iterator[dict[str, Any]]:
    for k, n in progress(shapes, label="products"):
        dense = [normal(i, (k, n), k**-0.5) for i in range(copies_of(2 * k * n))]
        weights = {}
        for bits, group_size in {scheme[:2] for scheme in SCHEMES}:
            first = jax.jit(partial(jw.quantize, bits=bits, group_size=group_size))(dense[0])
            copies = [jax.tree.map(jnp.copy, first) for _ in range(copies_of(first.nbytes) - 1)]
            weights[bits, group_size] = [first, *copies]
        for m in tokens:
            xs = [normal(1000 + i, (m, k)) for i in range(2)]
            reference = Calls(jnp.matmul, [(xs[i % 2], w) for i, w in enumerate(dense)])
            contenders = []
            for bits, group_size, codes, x_group in SCHEMES:
                how = jw.ActivationQuantization(codes, x_group)
                xqs = [jw.quantize_activation(x, dtype=codes, group_size=x_group) for x in xs]
                qts = weights[bits, group_size]
                both = Calls(
                    partial(jw.matmul, activation_quantization=how), [(xs[i % 2], q) for i, q in enumerate(qts)]
                )
                product = Calls(jw.matmul, [(xqs[i % 2], q) for i, q in enumerate(qts)])
                contenders.append((facts(k, n, m, bits, group_size, codes, x_group), both, product))
            for _ in range(rounds):
                reference.measure(calls)
                for _, both, product in contenders:
                    both.measure(calls)
                    product.measure(calls)
            for row, both, product in contenders:
                yield (
                    {"op": "matmul"}
                    | row
                    | {
                        "us": round(both.us, 2),
                        "product_us": round(product.us, 2),
                        "dense_us": round(reference.us, 2),
                        "ratio": round(reference.us / both.us, 3),
                        "product_ratio": round(reference.us / product.us, 3),
                        "tops": round(2e-6 * m * n * k / both.us, 1),
                        "kernel": both.kernel,
                    }
                )


def quantize(rounds: int, calls: int) -> list[dict[str, Any]]:
    rows = []
    for k, m in ((4096, 1024), (4096, 4096), (8192, 4096), (14336, 4096), (8192, 16384)):
        xs = [(normal(i, (m, k)),) for i in range(copies_of(3 * m * k))]
        copy = Calls(jnp.negative, xs)
        options = [(codes, group) for codes in ("int8", FLOAT8) for group in (None, 128)]
        contenders = [
            (codes, group, Calls(partial(jw.quantize_activation, dtype=codes, group_size=group), xs))
            for codes, group in options
        ]
        for _ in range(rounds):
            copy.measure(calls)
            for *_, contender in contenders:
                contender.measure(calls)
        copied = 4e-3 * m * k / copy.us
        for codes, group, contender in contenders:
            moved = m * k * 3 + 8 * m * (k // (group or k))
            rows.append(
                {"op": "quantize", "codes": codes, "x_group_size": group or k, "k": k, "m": m}
                | {"us": round(contender.us, 2), "gbps": round(1e-3 * moved / contender.us, 1)}
                | {"copy_gbps": round(copied, 1), "of_copy": round(1e-3 * moved / contender.us / copied, 3)}
            )
    return rows


def accuracy() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    k, n, m = 4096, 512, 64
    w = rng.normal(0, k**-0.5, (k, n)).astype(np.float32)
    rows = []
    for data in ("normal", "outliers"):
        x = rng.normal(0, 1, (m, k)).astype(np.float32)
        if data == "outliers":
            x[:, rng.choice(k, 8, replace=False)] *= 30
        exact = x.astype(np.float64) @ w
        for bits, group_size in ((8, None), (8, 128), (4, 128)):
            qt = jw.quantize(jnp.asarray(w), bits=bits, group_size=group_size)
            weights = np.asarray(qt.dequantize()).astype(np.float64)
            for codes, x_group in ((None, None), ("int8", None), ("int8", 128), (FLOAT8, None), (FLOAT8, 128)):
                if codes == FLOAT8 and bits == 8:
                    continue
                how = None if codes is None else jw.ActivationQuantization(codes, x_group)
                y = np.asarray(jw.matmul(jnp.asarray(x), qt, activation_quantization=how)).astype(np.float64)
                of_x = x.astype(np.float64) @ weights
                rows.append(
                    {"data": data, "bits": bits, "group_size": group_size or k, "codes": codes or "not quantized"}
                    | {"x_group_size": None if codes is None else x_group or k}
                    | {"error": float(f"{np.linalg.norm(y - exact) / np.linalg.norm(exact):.3g}")}
                    | {"error_of_x": float(f"{np.linalg.norm(y - of_x) / np.linalg.norm(of_x):.2g}") if codes else None}
                )
    return rows


def identity(row: dict[str, Any]) -> tuple:
    return tuple(row.get(name) for name in ("op", "scheme", "group_size", "codes", "x_group_size", "k", "n", "m"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suites = ("speed", "quantize", "accuracy")
    parser.add_argument(
        "--suite", nargs="+", choices=suites, default=list(suites), help="what to measure (default: all)"
    )
    add_timing(parser, rounds=3, calls=15)
    parser.add_argument("--k", type=int, nargs="+", help="of the shapes to measure (default: all)")
    parser.add_argument("--append", action="store_true", help="keep the file's rows that are not measured again")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="M (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON files (default: %(default)s)")
    parser.add_argument("--commit", help="of this tree, where git cannot tell")
    args = parser.parse_args()

    rows: list[dict[str, Any]] = []
    if {"speed", "quantize"} & set(args.suite):
        require_gpu("activation.py")
        path = args.output / "h100-activation.json"
        old = json.loads(path.read_text())["rows"] if args.append and path.is_file() else []
        shapes = [shape for shape in SHAPES if args.k is None or shape[0] in args.k]
        for suite, measured in (
            ("quantize", lambda: quantize(args.rounds, args.calls)),
            ("speed", lambda: speed(args.rounds, args.calls, shapes, args.tokens)),
        ):
            for row in measured() if suite in args.suite else ():
                rows.append(row)
                old = [other for other in old if identity(other) != identity(row)]
                save(path, [*old, *rows], args.commit)
    if "accuracy" in args.suite:
        found = accuracy()
        save(args.output / "activation-accuracy.json", found, args.commit, inputs=4096, outputs=512, rows_of_x=64)
        rows += found
    for row in rows:
        print(*(f"{name} {value}" for name, value in row.items() if name != "kernel"))


if __name__ == "__main__":
    main()
