"""Times the MLP of a large language model, split over the GPUs of one host, beside the same on one GPU.

    python benchmarks/tensor_parallel.py [--tokens N ...] [--output FILE] [--append]

A layer is ``x + silu(x @ up) @ down``, ``up`` 8192 x 28672 split along its outputs and ``down`` 28672 x 8192 along its
inputs, with one all-reduce. A call runs STEPS steps of LAYERS layers, as decoding does, each layer with weights of its
own, so that none are found in the L2; after a step ``x`` is divided by its root mean square. ``us`` is wall time of a
layer: the median over rounds of calls that follow each other without waiting. ``dense_us`` is
the same with bfloat16 weights. ``difference`` is the largest between the results of all GPUs and of one, relative to
the largest result.
"""

import argparse
import statistics
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from _common import add_results, add_timing, kept_rows, require_gpu, save
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_wonly as jw
from jax_wonly.progress import progress

RESULTS = Path(__file__).parent / "results" / "h200-tensor-parallel.json"
MODEL, HIDDEN, LAYERS, STEPS, GROUP_SIZE = 8192, 28672, 4, 16, 128
TOKENS = (1, 4, 16, 64, 256)
IDENTITY = ("devices", "tokens")


@partial(jax.jit, static_argnames="dense")
def mlps(x, layers, dense):
    def step(_, x):
        for up, down in layers:
            if dense:
                x = x + jax.nn.silu(x @ up) @ down
            else:
                x = x + jw.matmul(jw.matmul(x, up, activation="silu"), down)
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True))).astype(x.dtype)

    return jax.lax.fori_loop(0, STEPS, step, x)


def weights(mesh, dense: bool) -> list:
    """The layers' weights, made in their shards."""

    def make(key, k, n):
        w = (jax.random.normal(key, (k, n), jnp.float32) * k**-0.5).astype(jnp.bfloat16)
        return w if dense else jw.quantize(w, group_size=GROUP_SIZE)

    def place(key, k, n, spec):
        function = partial(make, k=k, n=n)
        sharding = NamedSharding(mesh, spec)
        where = sharding if dense else jw.shardings(jax.eval_shape(function, key), sharding)
        return jax.jit(function, out_shardings=where)(key)

    keys = jax.random.split(jax.random.key(0), 2 * LAYERS)
    return [
        (place(keys[2 * i], MODEL, HIDDEN, P(None, "tp")), place(keys[2 * i + 1], HIDDEN, MODEL, P("tp", None)))
        for i in range(LAYERS)
    ]


def measure(mesh, layers, tokens: int, rounds: int, calls: int, dense: bool) -> tuple[float, np.ndarray]:
    """Microseconds of a layer, and the result."""
    x = jax.random.normal(jax.random.key(tokens), (tokens, MODEL), jnp.bfloat16)
    x = jax.device_put(x, NamedSharding(mesh, P()))
    function = partial(mlps, layers=layers, dense=dense)
    y = jax.block_until_ready(function(x))
    times = []
    for _ in range(rounds + 1):  # the first warms up
        start = time.perf_counter()
        for _ in range(calls):
            result = function(x)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls / STEPS / LAYERS * 1e6)
    return statistics.median(times[1:]), np.asarray(y).astype(np.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="(default: %(default)s)")
    add_timing(parser, rounds=7, calls=4)
    add_results(parser, RESULTS)
    args = parser.parse_args()
    require_gpu("tensor_parallel.py")

    results = kept_rows(args.output, args.append, IDENTITY)
    counts = [1] + [2**i for i in range(1, jax.device_count().bit_length()) if 2**i <= jax.device_count()]
    measured: dict[tuple, tuple[float, np.ndarray]] = {}
    cases = [(count, dense, tokens) for count in counts for dense in (False, True) for tokens in args.tokens]
    made, mesh, layers = None, None, None
    for count, dense, tokens in progress(cases, label="layers"):
        if made != (count, dense):
            layers = None  # before the next are made
            mesh = jax.make_mesh((count,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
            made, layers = (count, dense), weights(mesh, dense)
        measured[count, dense, tokens] = measure(mesh, layers, tokens, args.rounds, args.calls, dense)
    for count in counts:
        for tokens in args.tokens:
            (us, y), (dense_us, _) = (measured[count, dense, tokens] for dense in (False, True))
            one_us, one = measured[1, False, tokens]
            results[count, tokens] = {
                "op": "mlp",
                "devices": count,
                "tokens": tokens,
                "us": round(us, 1),
                "dense_us": round(dense_us, 1),
                "ratio": round(dense_us / us, 3),
                "speedup": round(one_us / us, 3),
                "dense_speedup": round(measured[1, True, tokens][0] / dense_us, 3),
                "difference": float(f"{np.abs(y - one).max() / np.abs(one).max():.2e}"),
            }
    save(args.output, list(results.values()), args.commit, layers=LAYERS, steps=STEPS, model=MODEL, hidden=HIDDEN)
    for row in results.values():
        print(
            f"{row['devices']} GPUs, {row['tokens']:4} tokens: {row['us']:8.1f} us, {row['speedup']} x one GPU (dense "
            f"{row['dense_us']:8.1f} us, {row['dense_speedup']} x); differs by {row['difference']}"
        )
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
