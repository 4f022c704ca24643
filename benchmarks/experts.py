"""Times products with experts' weights on a GPU beside dense ones of the same process, into one result file.

    python benchmarks/experts.py [--suite mixtral many-up many-down] [--tokens N ...] [--gradient] [--dtype float32]
                                 [--mode nf4] [--bits 8] [--precision default] [--output FILE]
                                 [--append]

Every token goes to ``top_k`` of the experts: to all alike (``balanced``), or to expert e with a weight of 1 / (e + 1)
(``skewed``). Kernel time is CUPTI's, the median over calls that rotate through more than four times the L2 of touched
weights; all functions take turns. Microseconds:

- ``us``: ``ragged_dot`` of the tokens sorted by expert, int4 (or, of ``--bits`` 8, int8) in groups of 128, or another
  ``--mode`` of ``quantize``, nf4 in groups of 64;
- ``gather_us``: ``gather_matmul`` of the tokens in their own order;
- ``dense_us``: ``jax.lax.ragged_dot`` in bfloat16, or float32 (which XLA makes TF32), where it fits into memory;
- ``loop_us``: ``matmul`` for one expert after the other, for which the host has to know the sizes;
- ``flops_us``: one dense product of the same number of operations and type.

With ``--gradient`` the same of the gradients of the activations, the products with transposed weights.

``gbps`` counts the weights and scales of the touched experts, activations and results once; ``share`` is that of the
``gbps`` of one product with 8192 x 28672 weights and one token (``stream_gbps``). ``floor_ratio`` is the longer of
``flops_us`` and the time of the bytes at ``stream_gbps``, over ours: with tens of rows of an expert weights alone take
longer than their products.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
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

RESULTS = Path(__file__).parent / "results"
SUITES = {
    "mixtral": {"experts": 8, "top_k": 2, "k": 4096, "n": 14336},
    "many-up": {"experts": 128, "top_k": 8, "k": 2048, "n": 1536},
    "many-down": {"experts": 128, "top_k": 8, "k": 768, "n": 2048},
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096, 8192)
GROUP_SIZES = {"symmetric": 128, "integer_zeros": 128, "offsets": 128, "nf4": 64}  # of a mode
IDENTITY = ("suite", "routing", "tokens")


def route(rng: np.random.Generator, routing: str, tokens: int, experts: int, top_k: int) -> np.ndarray:
    """The experts of every token, int32 ``[tokens, top_k]``, all different."""
    if routing == "balanced":
        return rng.permutation(experts)[np.arange(tokens * top_k).reshape(tokens, top_k) % experts].astype(np.int32)
    scores = np.log(1 / np.arange(1, experts + 1)) + rng.gumbel(size=(tokens, experts))
    return np.argsort(-scores, axis=1)[:, :top_k].astype(np.int32)


def stacks(key, experts: int, k: int, n: int, count: int, mode: str | None, dtype=jnp.bfloat16, bits=4) -> list:
    """``count`` stacks of experts' weights, quantized or, without a mode, in ``dtype``."""

    @jax.jit
    def make(key):
        def of_expert(key):
            w = (jax.random.normal(key, (k, n), jnp.float32) * k**-0.5).astype(jnp.bfloat16)
            return jw.quantize(w, bits=bits, group_size=GROUP_SIZES[mode], mode=mode) if mode else w.astype(dtype)

        return jax.lax.map(of_expert, jax.random.split(key, experts))

    return [make(key) for key in jax.random.split(key, count)]


def timed(functions: dict[str, tuple], rounds: int, calls: int) -> dict[str, Calls | None]:
    """The functions, in turns; None for one that needs more memory than there is."""
    running: dict[str, Calls | None] = {}
    for name, (function, operands) in functions.items():
        try:
            running[name] = Calls(function, operands)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            running[name] = None
    for _ in range(rounds):
        for timer in running.values():
            if timer is not None:
                timer.measure(calls)
    return running


def stream_gbps(rounds: int, calls: int) -> float:
    """GB/s of one large product with one token."""
    k, n = 8192, 28672
    weights = [qt[0] for qt in stacks(jax.random.key(0), 1, k, n, 3, "symmetric")]
    x = jax.random.normal(jax.random.key(1), (1, k), jnp.bfloat16)
    timer = timed({"one": (jw.matmul, [(x, qt) for qt in weights])}, rounds, calls)["one"]
    assert timer is not None
    return (weights[0].nbytes + 2 * (k + n)) / timer.us * 1e-3


def measure(
    suite: str,
    routing: str,
    tokens: int,
    dtype,
    mode: str,
    weights: dict,
    rounds: int,
    calls: int,
    stream: float,
    gradient: bool,
) -> dict:
    experts, top_k, k, n = (SUITES[suite][name] for name in ("experts", "top_k", "k", "n"))
    rng = np.random.default_rng(tokens)
    ids = route(rng, routing, tokens, experts, top_k)
    order = np.argsort(ids.reshape(-1), kind="stable")
    counts = np.bincount(ids.reshape(-1), minlength=experts).astype(np.int32)
    touched = int((counts > 0).sum())
    x = jax.random.normal(jax.random.key(tokens), (tokens, k), dtype)
    rows = x[order // top_k]
    sizes, ids = jnp.asarray(counts), jnp.asarray(ids)
    ends = np.cumsum(counts)

    def gather(x, qt, ids):
        return jw.gather_matmul(x[:, None], qt, ids)

    def of_kind(product):
        return gradient_of(product, k, axes=1) if gradient else product

    def loop(rows, qt):
        parts = [(e, rows[end - size : end]) for e, (size, end) in enumerate(zip(counts, ends, strict=True)) if size]
        return jnp.concatenate([of_kind(jw.matmul)(part, qt[e]) for e, part in parts])

    if gradient:
        rows = jax.random.normal(jax.random.key(tokens), (tokens * top_k, n), dtype)
        x = rows.reshape(tokens, top_k, n)
    qts, denses = weights["quantized"], weights["dense"]
    nbytes = qts[0].nbytes * touched // experts
    qts = qts[: copies_of(nbytes)]
    size = jnp.dtype(dtype).itemsize
    denses = denses[: copies_of(size * k * n * touched)]
    running = timed(
        {
            "us": (of_kind(jw.ragged_dot), [(rows, qt, sizes) for qt in qts]),
            "gather_us": (of_kind(gather), [(x, qt, ids) for qt in qts]),
            "dense_us": (of_kind(jax.lax.ragged_dot), [(rows, w, sizes) for w in denses]),
            "loop_us": (loop, [(rows, qt) for qt in qts]),
            "flops_us": (
                of_kind(jnp.matmul),
                [(rows, w[e]) for w in denses for e in range(min(experts, copies_of(size * k * n)))],
            ),
        },
        rounds,
        calls,
    )
    us = {name: None if timer is None else round(timer.us, 2) for name, timer in running.items()}
    ours = us["us"]
    nbytes += size * tokens * top_k * (k + n)
    gbps = nbytes / ours * 1e-3
    floor_us = max(us["flops_us"] or 0.0, nbytes / stream * 1e-3)

    def ratio(name: str):
        return None if us[name] is None else round(us[name] / ours, 3)

    return {
        "op": "gradient of ragged_dot" if gradient else "ragged_dot",
        "suite": suite,
        **SUITES[suite],
        "routing": routing,
        "tokens": tokens,
        "touched": touched,
        "dtype": dtype,
        "bits": qts[0].bits,
        "mode": mode,
        "group_size": GROUP_SIZES[mode],
        **us,
        "ratio": ratio("dense_us"),
        "loop_ratio": ratio("loop_us"),
        "flops_ratio": ratio("flops_us"),
        "floor_ratio": round(floor_us / ours, 3),
        "gbps": round(gbps, 1),
        "share": round(gbps / stream, 3),
        "kernel": running["us"].kernel,
        "gather_kernel": running["gather_us"].kernel,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_suites(parser, SUITES)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="(default: %(default)s)")
    add_timing(parser, rounds=3, calls=10)
    parser.add_argument("--gradient", action="store_true", help="measure the gradients of the activations instead")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(default: %(default)s)")
    parser.add_argument("--mode", choices=GROUP_SIZES, default="symmetric", help="(default: %(default)s)")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4, help="(default: %(default)s)")
    add_precision(parser)
    add_results(parser, None, where=f"in {RESULTS}")
    args = parser.parse_args()
    require_gpu("experts.py")
    precision = take_precision(args)
    kind = ("-gradients" if args.gradient else "") + ("" if args.dtype == "bfloat16" else f"-{args.dtype}")
    kind += ("" if args.mode == "symmetric" else f"-{args.mode}") + ("" if args.bits == 4 else f"-int{args.bits}")
    output = args.output or RESULTS / f"h100-experts{kind}.json"

    results = kept_rows(output, args.append, IDENTITY)
    stream = stream_gbps(args.rounds, args.calls)
    cases = [(suite, routing, t) for suite in args.suite for t in args.tokens for routing in ("balanced", "skewed")]
    weights: dict = {}
    for suite, routing, tokens in progress(cases, label="products"):
        if weights.get("suite") != suite:
            experts, top_k, k, n = (SUITES[suite][name] for name in ("experts", "top_k", "k", "n"))
            weights.clear()
            # Enough for the calls that touch the fewest experts.
            least = min(experts, top_k * min(args.tokens))
            touched = k * n * least
            of_codes = copies_of(args.bits * touched // 8)
            of_dense = copies_of(jnp.dtype(args.dtype).itemsize * touched)
            weights |= {
                "suite": suite,
                "quantized": stacks(jax.random.key(2), experts, k, n, of_codes, args.mode, bits=args.bits),
                "dense": stacks(jax.random.key(3), experts, k, n, of_dense, None, args.dtype),
            }
        row = measure(
            suite, routing, tokens, args.dtype, args.mode, weights, args.rounds, args.calls, stream, args.gradient
        )
        results[tuple(row[i] for i in IDENTITY)] = row
        save(output, list(results.values()), args.commit, **precision, stream_gbps=round(stream, 1))
    for row in results.values():
        print(
            f"{row['suite']:9} {row['routing']:8} {row['tokens']:5} tokens, {row['touched']:3} experts: "
            f"{row['us']:9.2f} us (gather {row['gather_us']:9.2f}) {row['gbps']:6.0f} GB/s {row['share']:5.2f} of one "
            f"stream; x dense {row['ratio']}, x loop {row['loop_ratio']}, x flops {row['flops_ratio']}  {row['kernel']}"
        )
    print(f"written to {output}")


if __name__ == "__main__":
    main()
