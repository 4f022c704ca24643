"""Many calls from many threads, on several devices, in replayed graphs and over a long time: bits and memory."""

import argparse
import ctypes
import functools
import gc
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

CHECKS = ("threads", "devices", "replays", "leaks")
FAKE_DEVICES = 4
THREADS = 8
_DUMP = tempfile.TemporaryDirectory()  # what XLA writes of the program that is replayed
_FLAGS = (
    f"--xla_force_host_platform_device_count={FAKE_DEVICES}",
    f"--xla_dump_to={_DUMP.name}",
    "--xla_dump_hlo_module_re=replayed_chain",
    "--xla_gpu_graph_min_graph_size=1",
)
# Before JAX starts.
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *_FLAGS)).strip()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from reference import random_weight, random_x  # noqa: E402
from reliability.record import measured, save  # noqa: E402

import jax_wonly as jw  # noqa: E402

SHAPES = [
    # bits, zeros, x, M, K, N, group
    (4, "symmetric", "bfloat16", 1, 512, 320, 128),
    (4, "integer_zeros", "float32", 3, 256, 70, 64),
    (4, "offsets", "float16", 17, 384, 129, 32),
    (4, "float_zeros", "bfloat16", 40, 101, 33, None),
    (8, "symmetric", "bfloat16", 2, 512, 257, 128),
    (8, "offsets", "float32", 9, 192, 64, None),
    (8, "integer_zeros", "float16", 130, 256, 100, 256),
]


class Case(NamedTuple):
    name: str
    function: Callable[..., Any]
    args: tuple


def cases(seed: int = 0) -> list[Case]:
    """Every operation of the package, on odd shapes."""
    rng = np.random.default_rng(seed)
    own = "cuda" if jax.default_backend() == "gpu" else "cpu"
    product = functools.partial(jw.matmul, implementation=own)

    def gradient(x, qt, bias):
        return jax.grad(lambda x: product(x, qt, bias=bias, activation="silu").astype(jnp.float32).sum())(x)

    found = []
    for bits, mode, dtype, m, k, n, group in SHAPES:
        qt = random_weight(rng, k, n, bits=bits, group_size=group, mode=mode, scale_dtype=dtype).qt
        x, bias = random_x(rng, (m, k), dtype), random_x(rng, (n,), dtype)
        name = f"int{bits} {mode} {dtype} {m}x{k}x{n}"
        found.append(Case(f"matmul {name}", lambda x, qt, b: product(x, qt, bias=b, activation="gelu"), (x, qt, bias)))
        found.append(Case(f"gradient {name}", gradient, (x, qt, bias)))
        found.append(Case(f"dequantize {name}", jw.dequantize, (qt,)))
        quantize = functools.partial(jw.quantize, bits=bits, group_size=group, mode=mode)
        found.append(Case(f"quantize {name}", quantize, (random_x(rng, (k, n), dtype),)))
    for bits, dtype in ((4, "float32"), (8, "bfloat16")):
        qt = random_weight(rng, 128, 70, bits=bits, group_size=64, lead=(5,)).qt
        x, ids = random_x(rng, (23, 128), dtype), jnp.asarray(rng.integers(-1, 6, 23), jnp.int32)
        found.append(Case(f"gather_matmul int{bits} {dtype}", jw.gather_matmul, (x, qt, ids)))
        found.append(Case(f"ragged_dot int{bits} {dtype}", jw.ragged_dot, (x, qt, jnp.asarray([3, 0, 11, 4, 2]))))
    return found


def bits_of(result: Any) -> bytes:
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(result))


def in_threads(work: Callable[[int], None], count: int = THREADS) -> list[BaseException]:
    """Runs ``work(i)`` in so many threads, which start together; returns what they raised."""
    raised: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(i: int) -> None:
        barrier.wait()
        try:
            work(i)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def check_threads(calls: int) -> dict[str, Any]:
    """Threads that also trace and compile at the same time; every result has the bits of a call alone."""
    known = cases()
    jitted = [jax.jit(case.function) for case in known]
    seen: dict[tuple[int, bool], bytes] = {}
    wrong: list[str] = []

    def call(i: int, jit: bool) -> bytes:
        return bits_of((jitted[i] if jit else known[i].function)(*known[i].args))

    def work(thread: int) -> None:
        rng = np.random.default_rng(thread)
        for _ in range(calls // THREADS):
            i, jit = int(rng.integers(len(known))), bool(rng.integers(2))
            if (result := call(i, jit)) != seen.setdefault((i, jit), result):
                wrong.append(known[i].name)

    raised = in_threads(work)
    wrong += [known[i].name for (i, jit), expected in seen.items() if call(i, jit) != expected]
    for problem in (*sorted(set(wrong)), *raised):
        print("  ", problem)
    return {
        "what": f"calls from {THREADS} threads, eager and jitted, {len(known)} operations and shapes",
        "cases": calls // THREADS * THREADS + len(seen),
        "failures": len(wrong) + len(raised),
    }


def check_devices(rounds: int) -> dict[str, Any]:
    """A thread for each device, all at once and without waiting for single results; the bits are those of the first."""
    known = cases(1)
    devices = jax.devices()
    jitted = [jax.jit(case.function) for case in known]
    expected = [bits_of(f(*case.args)) for f, case in zip(jitted, known, strict=True)]
    workers = max(THREADS, len(devices))
    wrong: list[str] = []

    def work(worker: int) -> None:
        device = devices[worker % len(devices)]
        args = [jax.device_put(case.args, device) for case in known]
        for _ in range(rounds):
            results = [f(*a) for f, a in zip(jitted, args, strict=True)]
            for case, result, bits in zip(known, results, expected, strict=True):
                placed = all(leaf.devices() == {device} for leaf in jax.tree.leaves(result))
                if not placed or bits_of(result) != bits:
                    wrong.append(f"{case.name} on {device}")

    raised = in_threads(work, workers)
    for problem in (*sorted(set(wrong)), *raised):
        print("  ", problem)
    kind = "fake devices" if devices[0].platform == "cpu" else "device" if len(devices) == 1 else "devices"
    return {
        "what": f"calls that overlap, from {workers} threads on {len(devices)} {kind}",
        "cases": workers * rounds * len(known),
        "failures": len(wrong) + len(raised),
    }


def check_replays(replays: int, m: int) -> dict[str, Any]:
    """One program over and over; on a GPU, XLA replays it as a CUDA graph."""
    gpu = jax.default_backend() == "gpu"
    k = 1024 if gpu else 256
    graphs_before = graphs()
    rng = np.random.default_rng(2)
    weights = [
        random_weight(rng, k, k, bits=bits, group_size=128, mode=mode).qt
        for bits, mode in ((4, "symmetric"), (8, "integer_zeros"), (4, "offsets"), (4, "float_zeros"))
    ]

    def replayed_chain(x, weights):
        for qt in weights:
            y = jw.matmul(x, qt, implementation="cuda" if gpu else "cpu")
            x = (y / (1 + jnp.abs(y))).astype(x.dtype)
        last = jw.quantize(x.T.astype(jnp.float32), bits=8, group_size=128)
        return x, last.dequantize()

    @jax.jit
    def differing(count, results, first):
        return count + sum((_words(a) != b).any().astype(jnp.int32) for a, b in zip(results, first, strict=True))

    x = random_x(rng, (m, k), "bfloat16")
    chain = jax.jit(replayed_chain)
    # By way of the host, so that nothing is compared with itself.
    first = tuple(jnp.asarray(np.array(_words(a))) for a in chain(x, weights))
    wrong = jnp.zeros((), jnp.int32)
    for i in range(replays):
        wrong = differing(wrong, chain(x, weights), first)
        if i % 500 == 0:
            jax.block_until_ready(wrong)
    what = f"runs of a chain of {len(weights)} products, quantize and dequantize, M = {m}"
    graph = graphs() > graphs_before
    if gpu:
        what += f", {'' if graph else 'not seen to be '}a CUDA graph"
    return {"what": what, "cases": replays, "failures": int(wrong) + int(gpu and not graph)}


def graphs() -> int:
    """Programs of which XLA has written that they have a command buffer, which on a GPU is a CUDA graph."""
    return sum("kCommandBuffer" in path.read_text() for path in Path(_DUMP.name).glob("*thunk_sequence*"))


def _words(a: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(a, f"uint{8 * a.dtype.itemsize}")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_leaks(calls: int) -> dict[str, Any]:
    """Memory of the process and of the device over many calls, bad ones among them."""
    known = [case for case in cases(3) if "130x" not in case.name]
    jitted = [jax.jit(case.function) for case in known]
    device = jax.devices()[0]
    samples: list[tuple[int, int, int, int]] = []

    def bad_call() -> bool:
        try:
            jw.matmul(jnp.ones((2, 3)), known[0].args[1])
        except ValueError:
            return True
        return False

    def sample(done: int) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        used = (device.memory_stats() or {}).get("bytes_in_use", 0)
        samples.append((done, resident_bytes(), used, len(jax.live_arrays())))

    refused, bad = 0, 0
    warm = calls // 5
    for i in range(calls):
        case = i % len(known)
        if i % 16 == 15:
            bad += 1
            refused += bad_call()
        else:
            # A gradient outside of jit is traced anew each time, which takes too long for so many.
            eager = i // len(known) % 2 and not known[case].name.startswith("gradient")
            result = (known[case].function if eager else jitted[case])(*known[case].args)
            if i % 64 == 0:
                jax.block_until_ready(result)
            del result
        if i >= warm and (i - warm) % (calls // 20) == 0:
            sample(i)
    sample(calls)
    half = len(samples) // 2
    span = samples[-1][0] - samples[0][0]
    # Half of the span lies between the middles of the two halves.
    growth = np.median([s[1] for s in samples[half:]]) - np.median([s[1] for s in samples[:half]])
    per_call = 2 * float(growth) / span
    device_growth = samples[-1][2] - samples[0][2]
    arrays = samples[-1][3] - samples[0][3]
    return {
        "what": f"calls in one process; memory changed by {per_call:.1f} bytes a call"
        + (f", that of the device by {device_growth} in all" if samples[0][2] else ""),
        "cases": calls,
        "failures": int(per_call > 64) + int(device_growth > 0) + int(arrays > 0) + (bad - refused),
    }


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="reliability stress", description=__doc__)
    parser.add_argument("--threads", type=int, default=20_000, help="calls from threads (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="rounds on each device (default: %(default)s)")
    parser.add_argument("--replays", type=int, default=10_000, help="of each chain (default: %(default)s)")
    parser.add_argument(
        "--calls", type=int, default=100_000, help="that leaks are looked for in (default: %(default)s)"
    )
    parser.add_argument("--only", nargs="*", choices=CHECKS, default=CHECKS)
    parser.add_argument("--output", default=None)
    options = parser.parse_args(words)
    rows = []
    if "threads" in options.only:
        rows.append(measured("threads", check_threads, options.threads))
    if "devices" in options.only:
        rows.append(measured("devices", check_devices, options.rounds))
    if "replays" in options.only:
        rows += [measured("replays", check_replays, options.replays, m) for m in (1, 16, 100)]
    if "leaks" in options.only:
        rows.append(measured("leaks", check_leaks, options.calls))
    return save(options.output or f"reliability-{jax.default_backend()}.json", rows)
