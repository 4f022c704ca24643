"""Times what the host does for a product on a GPU: from the runtime's call of the handler to the kernel's launch.

    python benchmarks/host.py [--output FILE] [--executable FILE]

A program of CHAIN products, each of which takes the result of the one before, is called without waiting for it, and so
is one of a single product; ``host_us`` is the difference for each product more: XLA's runtime, the handler's checks,
the choice of a kernel and its launch. XLA's command buffers, in which handlers run once and graphs are replayed, are
off. ``xla_us`` is the same of a kernel of XLA's own in the place of the products. ``launch_us`` is what the handler
does after it has checked its operands, by a program without JAX (host.cu): the choice of a kernel and its launch.
"""

import argparse
import os
import statistics
import subprocess
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="

import jax
import jax.numpy as jnp
from _common import add_results, require_gpu, save
from tune import build

import jax_wonly as jw
from jax_wonly._timing import Calls

RESULTS = Path(__file__).parent / "results" / "h100-host.json"
CHAIN, ROUNDS = 64, 25
# (K and N, tokens): each kernel of products on sm_90
CASES = ((8192, 1), (1024, 1), (1024, 8), (1024, 16), (1024, 64), (1024, 512), (1024, 2048))


def enqueuing(function, x, qt) -> float:
    """Microseconds until a call returns, whose kernels may not have run yet."""
    jax.block_until_ready(function(x, qt))
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        result = function(x, qt)
        times.append(1e6 * (time.perf_counter() - begin))
        jax.block_until_ready(result)
    return statistics.median(times)


def chain(length: int, products: bool = True):
    def function(x, qt):
        for _ in range(length):
            x = jw.matmul(x, qt, implementation="cuda") if products else jax.lax.optimization_barrier(x + x)
        return x

    return jax.jit(function)


def for_each(x, qt, products: bool = True) -> float:
    more = enqueuing(chain(CHAIN, products), x, qt) - enqueuing(chain(1, products), x, qt)
    return round(more / (CHAIN - 1), 2)


def launches(program: Path) -> list[list[float]]:
    """Microseconds of each of ``CASES``, and of a kernel that does nothing."""
    words = [str(number) for size, m in CASES for number in (size, size, m)]
    output = subprocess.run([program, *words], capture_output=True, text=True, check=True).stdout
    return [[float(word) for word in line.split()[3:]] for line in output.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_results(parser, RESULTS, append=False)
    parser.add_argument("--executable", type=Path, help="of host.cu, built before")
    args = parser.parse_args()
    require_gpu("host.py")
    rows = []
    for (size, m), (launch_us, bare_us) in zip(CASES, launches(args.executable or build(program="host")), strict=True):
        key = jax.random.key(size)
        qt = jw.quantize(jax.random.normal(key, (size, size), jnp.bfloat16) * size**-0.5, group_size=128)
        x = jax.random.normal(key, (m, size), jnp.bfloat16)
        timer = Calls(chain(1), [(x, qt)])
        timer.measure(5)
        row = {"k": size, "n": size, "m": m, "host_us": for_each(x, qt), "xla_us": for_each(x, qt, products=False)}
        row |= {"launch_us": launch_us, "bare_us": bare_us}
        rows.append(row | {"us": round(timer.us, 2), "kernel": timer.kernel})
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()))
    save(args.output, rows, args.commit, chain=CHAIN)
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
