"""Times the public functions on random schemes and shapes: products, experts' products, and gradients of both, of the
activations and of the scales.

    python benchmarks/random_calls.py --output FILE [--seed N] [--weights 20] [--op matmul experts ...]
    python benchmarks/random_calls.py --output FILE --compare EARLIER    the same draws, beside those of another build

Kernel time through CUPTI, all kernels of a call together, over weights that rotate through more than four times the L2.
Every weight meets up to seven numbers of rows. Tables are of shapes that somebody chose; these find what nobody
thought of: the first hundreds showed a kernel that did not end, and schemes that took thirty times as long as others.
With the same seed and operations, `--compare` says what two builds, or two machines, make of the same calls.
"""

import argparse
import json
import os
import random
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# XLA's own products, those of dequantized weights among them, are not tuned: that takes longer than all else.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import jax.numpy as jnp
import numpy as np
from _common import add_results, gradient_of, require_gpu, save, scales_gradient

import jax_wonly as jw
from jax_wonly._timing import Calls, copies_of
from jax_wonly.progress import progress

OPERATIONS = ("matmul", "gradient", "experts", "experts_gradient", "scales", "experts_scales")
SHAPES = ((4096, 14336), (14336, 4096), (4096, 4096), (4096, 6144), (8192, 28672), (8192, 8192), (8192, 10240))
SHAPES += ((3584, 18944), (18944, 3584), (5120, 27648), (5120, 5120), (4096, 11008), (11008, 4096), (2048, 8192))
SHAPES += ((2048, 2048), (7168, 2048), (2560, 9728), (3072, 8192), (1024, 4096), (2880, 5760), (8192, 1024), (768, 768))
SHAPES += ((768, 3072), (3072, 768), (1024, 1024), (1152, 4304), (512, 2048), (1536, 1536), (2048, 50304))
EXPERTS = ((2048, 1536), (768, 2048), (4096, 14336), (14336, 4096), (1024, 4096), (2048, 1408), (1408, 2048))
EXPERTS += ((4096, 1536), (1536, 4096), (2880, 2880), (512, 2048), (7168, 2048), (2048, 7168), (768, 3072))
MOST_WEIGHTS = 6e8  # of all experts
MODES = ("symmetric",) * 3 + ("integer_zeros",) * 2 + ("float_zeros", "offsets", "table")
ROWS = (4, 3)  # how many numbers of few rows, and of many
CALLS, TURNS = 12, 2
IDENTITY = ("op", "bits", "mode", "group_size", "dtype", "scale_dtype", "k", "n", "lead", "m", "draw")
SLOWER = 1.03  # what is told of one by one


def random_scheme(draw: random.Random) -> dict:
    mode, dtype = draw.choice(MODES), draw.choice(("bfloat16",) * 4 + ("float16",) * 2 + ("float32",))
    alike = "bfloat16" if dtype == "float32" else dtype
    return {
        "bits": 4 if mode == "table" else draw.choice((4, 4, 4, 8)),
        "mode": mode,
        "group_size": draw.choice((128, 128, 64, 32, 256, None)),
        "dtype": dtype,
        "scale_dtype": draw.choice((alike, alike, alike, "float32")),
    }


def random_weight(numbers: np.random.Generator, scheme: dict, k: int, n: int, lead: tuple) -> jw.QuantizedTensor:
    """Random codes and parameters, not those of any dense weight."""
    bits, mode, dtype = scheme["bits"], scheme["mode"], jnp.dtype(scheme["scale_dtype"])
    shape = (*lead, -(-n // 64), -(-k // {4: 64, 8: 32}[bits]), 512)
    codes = np.frombuffer(numbers.bytes(4 * int(np.prod(shape))), np.uint32).reshape(shape)
    rows = (*lead, k // (scheme["group_size"] or k), n)

    def floats(low, high):
        return jnp.asarray(numbers.random(rows, np.float32) * (high - low) + low, dtype)

    zeros = offsets = table = None
    if mode == "integer_zeros":
        zeros = jnp.asarray(numbers.integers(0, 2**bits, rows, np.uint8))
    elif mode == "float_zeros":
        zeros = floats(0, 2**bits)
    elif mode == "offsets":
        offsets = floats(-1.5, 0.5)
    elif mode == "table":
        table = tuple(np.linspace(-1, 1, 16).tolist())
    scale = 1.0 if mode == "table" else 2.0 ** (1 - bits)
    return jw.QuantizedTensor(
        jnp.asarray(codes), floats(0.3 * scale, scale), zeros, offsets, bits=bits, k=k, n=n, table=table
    )


def row_counts(draw: random.Random, few: int, many: int) -> list[int]:
    """Some up to ``few`` and some beyond, evenly on a scale of logarithms."""
    drawn = {round(few ** draw.random()) for _ in range(ROWS[0])}
    return sorted(drawn | {round(few * (many / few) ** draw.random()) for _ in range(ROWS[1])})


def random_calls(op: str, seed: int, index: int) -> Iterator[tuple[dict, Callable, list[tuple]]]:
    """Of one weight: what a call is, its function, and sets of operands."""
    draw, numbers = random.Random(f"{op} {seed} {index}"), np.random.default_rng([OPERATIONS.index(op), seed, index])
    scheme, gradient, experts = random_scheme(draw), op.endswith("gradient"), op.startswith("experts")
    of_scales = op.endswith("scales")
    k, n = draw.choice(EXPERTS if experts else SHAPES)
    if k % (scheme["group_size"] or k):
        scheme["group_size"] = None
    count = draw.choice((4, 8, 16, 32, 64, 128) if experts else (1, 1, 1, 1, 2, 4, 8))
    if experts:
        count = max(4, min(count, int(MOST_WEIGHTS / (k * n))))
    elif k * n > 4e7:
        count = 1
    lead = (count,) if experts or count > 1 else ()
    first = random_weight(numbers, scheme, k, n, lead)
    weights = [first, *(random_weight(numbers, scheme, k, n, lead) for _ in range(copies_of(first.nbytes) - 1))]
    product = jw.ragged_dot if experts else jw.matmul
    for m in row_counts(draw, 4 * count, min(1500 * count, 32768)) if experts else row_counts(draw, 64, 4096):
        rows = (m,) if experts or not lead else (*lead, m)

        def normal(columns, rows=rows):
            return jnp.asarray(numbers.standard_normal((*rows, columns), np.float32) + 0.3, scheme["dtype"])

        x = normal(n if gradient else k)
        rest: tuple = (normal(n),) if of_scales else ()
        if experts:
            shares = numbers.dirichlet(np.full(count, draw.choice((0.2, 1.0, 5.0))))
            rest += (jnp.asarray(numbers.multinomial(m, shares), jnp.int32),)
        function = gradient_of(product, k) if gradient else scales_gradient(product) if of_scales else product
        what = {"op": op, **scheme, "k": k, "n": n, "lead": list(lead), "m": m, "draw": index}
        yield what, function, [(x, weight, *rest) for weight in weights]


def compare(rows: list[dict], earlier: list[dict]) -> None:
    """Says how much longer calls take than those of an earlier file."""
    identity = {json.dumps([row[name] for name in IDENTITY]): row for row in earlier}
    pairs = [(row, identity.get(json.dumps([row[name] for name in IDENTITY]))) for row in rows]
    for op in OPERATIONS:
        ratios = [(row["us"] / other["us"], row, other) for row, other in pairs if other and row["op"] == op]
        if not ratios:
            continue
        mean = statistics.geometric_mean(ratio for ratio, _, _ in ratios)
        slower = sorted((pair for pair in ratios if pair[0] > SLOWER), key=lambda pair: -pair[0])
        print(f"{op}: {mean:.4f} of the time of {len(ratios)} calls, {len(slower)} above {SLOWER}")
        for ratio, row, other in slower[:10]:
            what = " ".join(f"{name}={row[name]}" for name in IDENTITY[1:-1])
            print(f"  {ratio:.3f}  {other['us']} to {row['us']} us  {what}  {row['kernel']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", choices=OPERATIONS, default=list(OPERATIONS), help="default: all")
    parser.add_argument("--weights", type=int, default=20, help="of each operation (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default: %(default)s)")
    parser.add_argument("--compare", type=Path, help="a file of an earlier run")
    add_results(parser, None, append=False, where="none: nothing is kept")
    args = parser.parse_args()
    require_gpu("random_calls.py")
    earlier = json.loads(args.compare.read_text())["rows"] if args.compare else []
    rows: list[dict] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for op, index in progress([(op, i) for op in args.op for i in range(args.weights)], label="weights"):
            # All are compiled before one is timed.
            drawn = list(random_calls(op, args.seed, index))
            compiled = list(pool.map(lambda call: Calls(call[1], call[2]), drawn))
            for _ in range(TURNS):
                for calls in compiled:
                    calls.measure(CALLS)
            rows += [
                what | {"us": round(calls.us, 2), "kernel": calls.kernel}
                for (what, _, _), calls in zip(drawn, compiled, strict=True)
            ]
            if args.output:
                save(args.output, rows, args.commit, seed=args.seed)
    if earlier:
        compare(rows, earlier)


if __name__ == "__main__":
    main()
