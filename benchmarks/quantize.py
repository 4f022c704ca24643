"""Times the CUDA quantizer and dequantizer, as shares of what a device copy reaches in the same run.

    python benchmarks/quantize.py [--iterations 20] [--output FILE]

Kernel time is CUPTI's, the median over the iterations. Bandwidth counts each byte that has to be read or written
once: the dense weight, the packed one, scales and shift. "copy" is XLA's kernel that negates an array of the same
size, timed the same way; the arrays are larger than the L2 cache. With one scale per output the quantizer reads the
weight twice, which is not counted.
"""

import argparse
import json
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
from _common import require_gpu
from jax.experimental.mosaic.gpu import profiler

import jax_wonly as jw
from jax_wonly.progress import progress

RESULTS = Path(__file__).parent / "results" / "h100-quantize.json"
SHAPES = ((4096, 14336), (14336, 4096), (8192, 8192))  # K x N
OPTIONS = tuple(
    {"bits": bits, "group_size": group_size, "mode": mode}
    for bits in (4, 8)
    for group_size, mode in (
        (32, "symmetric"),
        (128, "symmetric"),
        (128, "integer_zeros"),
        (128, "float_zeros"),
        (128, "offsets"),
        (None, "symmetric"),
        (None, "integer_zeros"),
    )
)


def microseconds(function, iterations: int, *operands) -> float:
    """Median time of all kernels of one call."""
    _, milliseconds = profiler.measure(function, iterations=iterations)(*operands)
    assert milliseconds is not None, "no kernel ran"
    return 1e3 * statistics.median(milliseconds if isinstance(milliseconds, list) else [milliseconds])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20, help="calls of each kernel (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the JSON (default: %(default)s)")
    args = parser.parse_args()
    require_gpu("quantize.py")

    rows = []
    for k, n in SHAPES:
        for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
            w = jax.random.normal(jax.random.key(0), (k, n), dtype)
            copy = 2 * w.nbytes / microseconds(lambda w: -w, args.iterations, w)
            # The other types differ in how they are read only.
            options = OPTIONS if dtype == jnp.bfloat16 else OPTIONS[1:2]
            for option in progress(options, label=f"{k} x {n} {jnp.dtype(dtype).name}"):

                def quantize(w, option=option):
                    return jw.quantize(w, scale_dtype=jnp.bfloat16, implementation="cuda", **option)

                def dequantize(qt, dtype=dtype):
                    return jw.dequantize(qt, dtype=dtype, implementation="cuda")

                qt = jax.jit(quantize)(w)
                moved = w.nbytes + qt.nbytes
                for name, function, operand in (("quantize", quantize, w), ("dequantize", dequantize, qt)):
                    time = microseconds(function, args.iterations, operand)
                    rows.append(
                        {
                            "operation": name,
                            "k": k,
                            "n": n,
                            "dtype": jnp.dtype(dtype).name,
                            **option,
                            "microseconds": round(time, 2),
                            "gigabytes_per_second": round(moved / time / 1e3, 1),
                            "copy_gigabytes_per_second": round(copy / 1e3, 1),
                            "share_of_copy": round(moved / time / copy, 3),
                        }
                    )
    device = jax.devices()[0]
    report = {"device": device.device_kind, "jax": jax.__version__, "iterations": args.iterations, "rows": rows}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        group = row["group_size"] or "channel"
        print(
            f"{row['operation']:10} {row['k']:5} x {row['n']:5} {row['dtype']:8} int{row['bits']} {group!s:>7} "
            f"{row['mode']:13} {row['microseconds']:8.1f} us {row['gigabytes_per_second']:7.0f} GB/s "
            f"{row['share_of_copy']:5.0%} of copy"
        )
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
