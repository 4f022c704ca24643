"""How products are timed: kernel time on GPUs, turns in one process on CPUs."""

import concurrent.futures
import itertools
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_wonly._matmul import matmul
from jax_wonly._quantize import quantize

L2_BYTES = 50 << 20  # of an H100
CPU_COLD_BYTES = 640 << 20  # that no cache of a CPU holds


def copies_of(nbytes: int) -> int:
    """How many sets of ``nbytes`` have to take turns for none to be found in the L2: more than four times its size."""
    return max(2, -(-(4 * L2_BYTES + (10 << 20)) // nbytes))


class Calls:
    """Calls of one compiled function that take the next set of operands each time."""

    def __init__(self, function: Callable, operands: Sequence[tuple]):
        self.operands = operands
        self.compiled = jax.jit(function).lower(*operands[0]).compile()
        self.next = 0
        self.times: list[float] = []
        """Of one call each, in microseconds: of its kernels (:meth:`measure`), or on the clock (:func:`interleave`)."""
        self.core_times: list[float] = []
        """The same of all threads together, on CPUs."""
        self.kernel = ""
        self.run(2)

    def run(self, count: int = 1):
        """Calls ``count`` times and waits; returns the last result."""
        result = None
        for _ in range(count):
            result = self.compiled(*self.operands[self.next % len(self.operands)])
            self.next += 1
        return jax.block_until_ready(result)

    def clock(self) -> tuple[float, float]:
        """Microseconds of one call on the clock, and of all threads together."""
        begin, core_begin = time.perf_counter(), time.process_time()
        self.run()
        return 1e6 * (time.perf_counter() - begin), 1e6 * (time.process_time() - core_begin)

    def measure(self, count: int) -> None:
        """Adds the kernel time of ``count`` calls on a GPU, all kernels of a call together, from CUPTI.

        Raises:
          RuntimeError: JAX here has no CUPTI.
        """
        try:
            from jax._src.lib import mosaic_gpu  # only installations with CUDA have it

            cupti: Any = mosaic_gpu._mosaic_gpu_ext  # type: ignore[reportPrivateImportUsage]
            cupti._cupti_init()
        except (ImportError, AttributeError) as error:
            raise RuntimeError(f"jax_wonly: kernel times need a JAX with CUPTI: {error}") from error
        try:
            self.run(count)
        finally:
            timings = cupti._cupti_get_timings(True)
        kernels = len(timings) // count
        if kernels * count != len(timings):
            raise RuntimeError("jax_wonly: calls differ in their number of kernels")
        for first in range(0, len(timings), kernels):
            self.times.append(1e3 * sum(time for _, time in timings[first : first + kernels]))
        self.kernel = " + ".join(sorted({short_name(name) for name, _ in timings[:kernels]}))

    @property
    def us(self) -> float:
        return statistics.median(self.times)

    @property
    def core_us(self) -> float:
        return statistics.median(self.core_times)


def short_name(name: str) -> str:
    """A kernel's own name: without namespaces, template arguments and parameters, mangled or not."""
    if not name.startswith("_ZN"):
        return name.split("<")[0].split("(")[0].split("::")[-1].split(" ")[-1][:60]
    rest, found = name[3:], name
    while match := re.match(r"\d+", rest):
        end = match.end() + int(match[0])
        found, rest = rest[match.end() : end], rest[end:]
    return found


def running_tasks() -> int:
    """Runnable tasks of the machine, this one included; 1 where the system does not say."""
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            if line.startswith("procs_running"):
                return int(line.split()[1])
    except OSError:
        pass
    return 1


def interleave(contenders: Sequence[Calls], samples: int, seconds: float) -> bool:
    """Times calls by turns on the clock; returns whether enough samples were taken on a quiet machine.

    A sample counts when no other task wanted a core before or after it. With fewer than nine such all are used.

    Args:
      contenders: get their ``times`` and ``core_times``.
      samples: wanted of each.
      seconds: after which no more are taken, but five of each at least.
    """
    quiet: list[list[tuple[float, float]]] = [[] for _ in contenders]
    every: list[list[tuple[float, float]]] = [[] for _ in contenders]
    end = time.perf_counter() + seconds
    while min(map(len, quiet)) < samples and (time.perf_counter() < end or min(map(len, every)) < 5):
        for i, contender in enumerate(contenders):
            before = running_tasks()
            elapsed = contender.clock()
            every[i].append(elapsed)
            # Pool threads that are about to sleep still count as running after a call.
            if before <= 2 and running_tasks() <= 2:
                quiet[i].append(elapsed)
    conclusive = min(map(len, quiet)) >= min(9, samples)
    for contender, good, all_samples in zip(contenders, quiet, every, strict=True):
        chosen = good if conclusive else all_samples
        contender.times = [elapsed for elapsed, _ in chosen]
        contender.core_times = [core for _, core in chosen]
    return conclusive


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def read_bandwidth(threads: int) -> float:
    """GB/s of all threads reading memory that no cache holds."""
    arrays = [np.ones(32 << 20, np.int64) for _ in range(threads)]
    best = float("inf")
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            begin = time.perf_counter()
            list(pool.map(lambda a: np.bitwise_or.reduce(a), arrays))
            best = min(best, time.perf_counter() - begin)
    return sum(a.nbytes for a in arrays) / best / 1e9


def xla_product(x, codes, scales):
    """What XLA makes of integer codes [G, K / G, N] and scales [G, 1, N]."""
    return x @ (codes.astype(x.dtype) * scales).reshape(x.shape[1], -1)


# Compiled, for there may be thousands of small ones.


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key, count, scale, *, shape, dtype):
    return (jax.random.normal(jax.random.fold_in(key, count), shape, jnp.float32) * scale).astype(dtype)


@partial(jax.jit, static_argnames=("shape", "top", "dtype"))
def _integers(key, count, *, shape, top, dtype):
    return jax.random.randint(jax.random.fold_in(key, count), shape, -top, top, dtype)


class Product:
    """Our product, the dense one and XLA's of integer codes, of random operands of one shape and scheme."""

    def __init__(
        self,
        *,
        m: int,
        k: int,
        n: int,
        dtype: Any,
        bits: int,
        group_size: int | None,
        mode: str,
        xla: bool,
        copies: Callable[[int], int],
        dense_cache: dict,
        batch: int = 1,
        implementation: str | None = None,
        scale_dtype: Any = None,
        result: Any = None,
    ):
        """``copies`` says for a number of bytes how many weights take turns; ``dense_cache`` keeps those of a shape.
        ``batch`` weights, each with its own activations, are one product; ``implementation`` as in ``matmul``.
        ``scale_dtype``: of scales, and of zeros and offsets that are no integers; None: of 16 bits on GPUs, ``dtype``
        elsewhere. ``result``: the type of the results, if not ``dtype``."""
        dtype = jnp.dtype(dtype)
        key, counter = jax.random.key(m), itertools.count()

        def random(shape, scale=1.0):
            return _normal(key, next(counter), scale, shape=shape, dtype=dtype)

        lead = () if batch == 1 else (batch,)
        dense_key = (*lead, k, n, dtype)
        if dense_key not in dense_cache:
            dense_cache.clear()
            dense_cache[dense_key] = [
                random((*lead, k, n), k**-0.5) for _ in range(copies(batch * k * n * dtype.itemsize))
            ]
        dense = dense_cache[dense_key]
        own = jnp.bfloat16 if dtype == jnp.float32 and jax.default_backend() == "gpu" else dtype
        of_scales = jnp.dtype(own if scale_dtype is None else scale_dtype)
        options: Mapping[str, Any] = {"bits": bits, "group_size": group_size, "mode": mode, "scale_dtype": of_scales}
        quantized_key = tuple(options.values())
        if quantized_key not in dense_cache:
            compiled = jax.jit(lambda w: quantize(w, **options))
            # Copies of the codes rotate; their values are those of the dense weights.
            first = compiled(dense[0])
            quantized = [first, *(compiled(dense[i % len(dense)]) for i in range(1, copies(first.nbytes)))]
            dense_cache[quantized_key] = quantized
        quantized = dense_cache[quantized_key]
        first = quantized[0]
        xs = [random((*lead, m, k)) for _ in range(2)]
        result = dtype if result is None else jnp.dtype(result)
        self.moved = first.nbytes + batch * (m * k * dtype.itemsize + m * n * result.itemsize)
        ours = partial(matmul, implementation=implementation, preferred_element_type=result)
        self.ours = Calls(ours, [(xs[i % 2], qt) for i, qt in enumerate(quantized)])
        of_dense = partial(jnp.matmul, preferred_element_type=result)
        self.dense = Calls(of_dense, [(xs[i % 2], w) for i, w in enumerate(dense)])
        self.xla: Calls | None = None
        if xla:
            size = group_size or k
            kind, top = (jnp.int4, 8) if bits == 4 else (jnp.int8, 128)
            shape = (k // size, size, n)
            codes = [
                _integers(key, next(counter), shape=shape, top=top, dtype=kind)
                for _ in range(copies(k * n * bits // 8))
            ]
            self.xla = Calls(xla_product, [(xs[i % 2], c, random((k // size, 1, n))) for i, c in enumerate(codes)])
        self.facts = {
            "op": "matmul",
            "dtype": dtype.name,
            "bits": bits,
            "group_size": group_size or k,
            "zeros": mode,
            "k": k,
            "n": n,
            "m": m,
        }
        if scale_dtype is not None:
            self.facts["scales"] = of_scales.name
        if result != dtype:
            self.facts["result"] = result.name
        if batch > 1:
            self.facts |= {"op": "batched_matmul", "batch": batch}

    @property
    def contenders(self) -> list[Calls]:
        return [calls for calls in (self.dense, self.ours, self.xla) if calls is not None]

    def measure(self, rounds: int, calls: int) -> None:
        """Kernel times on a GPU, by turns."""
        for _ in range(rounds):
            for contender in self.contenders:
                contender.measure(calls)

    def row(self) -> dict[str, Any]:
        """What was measured, as result files have it."""
        ours, dense = self.ours.us, self.dense.us
        row = self.facts | {
            "us": round(ours, 2),
            "dense_us": round(dense, 2),
            "ratio": round(dense / ours, 3),
            "gbps": round(self.moved / ours * 1e-3, 1),
        }
        if self.ours.kernel:
            row["kernel"] = self.ours.kernel
        if self.xla is not None:
            row |= {"xla_us": round(self.xla.us, 2), "times_xla": round(self.xla.us / ours, 3)}
        return row
