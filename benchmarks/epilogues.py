"""Times a bias and an activation function inside of a product's kernel, beside the product alone and beside XLA's
kernel for them after it.

    python benchmarks/epilogues.py [--output FILE]

int4 weights in groups of 128. Kernel time is CUPTI's: all kernels of a call together, the median over calls that rotate
through weights of more than four times the L2; all functions take turns. Microseconds:

- ``us``: ``matmul(x, qt, bias=bias, activation=activation)``;
- ``plain_us``: ``matmul(x, qt)``;
- ``apart_us``: ``activation(matmul(x, qt) + bias)``, the bias of the type of x.
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from _common import add_results, add_timing, require_gpu, save

import jax_wonly as jw
from jax_wonly._timing import Calls, copies_of
from jax_wonly.progress import progress

RESULTS = Path(__file__).parent / "results" / "h100-epilogues.json"
SHAPES = ((4096, 14336), (4096, 4096), (768, 3072))  # K x N
TOKENS = (1, 8, 16, 64, 256, 1024, 4096)
FUNCTIONS = {"none": lambda y: y, "relu": jax.nn.relu, "silu": jax.nn.silu, "gelu": jax.nn.gelu}
DTYPES = {"bfloat16": tuple(FUNCTIONS), "float32": ("silu",)}


def apart(activation: str, x, qt, bias):
    return FUNCTIONS[activation](jw.matmul(x, qt) + bias)


def fused(activation: str, x, qt, bias):
    return jw.matmul(x, qt, bias=bias, activation=None if activation == "none" else activation)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_timing(parser, rounds=3, calls=10)
    add_results(parser, RESULTS, append=False)
    args = parser.parse_args()
    require_gpu("epilogues.py")

    rows = []
    for k, n in progress(SHAPES, label="weights"):
        quantize = jax.jit(partial(jw.quantize, group_size=128, scale_dtype=jnp.bfloat16))
        keys = jax.random.split(jax.random.key(0), 2 + copies_of(k * n // 2))
        weights = [quantize(jax.random.normal(key, (k, n)) * k**-0.5) for key in keys[2:]]
        for dtype, activations in DTYPES.items():
            bias = jax.random.normal(keys[0], (n,), dtype)
            for m in TOKENS:
                x = jax.random.normal(keys[1], (m, k), dtype)
                plain = Calls(jw.matmul, [(x, qt) for qt in weights])
                operands = [(x, qt, bias) for qt in weights]
                timers = {
                    activation: [Calls(partial(function, activation), operands) for function in (fused, apart)]
                    for activation in activations
                }
                for _ in range(args.rounds):
                    plain.measure(args.calls)
                    for pair in timers.values():
                        for calls in pair:
                            calls.measure(args.calls)
                for activation, (ours, others) in timers.items():
                    row = {"k": k, "n": n, "dtype": dtype, "bits": 4, "group_size": 128, "m": m}
                    row |= {"activation": activation, "us": round(ours.us, 2), "plain_us": round(plain.us, 2)}
                    row |= {"apart_us": round(others.us, 2), "ratio": round(ours.us / plain.us, 3)}
                    row |= {"apart_ratio": round(others.us / plain.us, 3), "kernel": ours.kernel}
                    rows.append(row)
                save(args.output, rows, args.commit)
    for row in rows:
        print(
            f"{row['k']} x {row['n']} {row['dtype']:8} m={row['m']:<4} {row['activation']:4} {row['us']:8.2f} us, "
            f"{row['ratio']:.3f} of the product alone, apart {row['apart_ratio']:.3f}  {row['kernel']}"
        )
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
