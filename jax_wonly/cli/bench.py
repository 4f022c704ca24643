"""Times products against the dense one and XLA's own of int4 and int8 codes.

On GPUs the time is that of the kernels (CUPTI), with weights rotated through more than the L2; on CPUs calls take turns
in one process on the clock, and a row is marked where other programs disturbed it.
"""

import argparse
import importlib
import sys
from typing import Any

import jax

from jax_wonly import _ffi
from jax_wonly._quantize import MODES
from jax_wonly._svg import Series, line_chart
from jax_wonly._table import TABLES
from jax_wonly._timing import CPU_COLD_BYTES, Product, copies_of, cpu_model, interleave
from jax_wonly._validate import FLOATS
from jax_wonly._version import __version__
from jax_wonly.cli._common import (
    CommandError,
    bar,
    decorated,
    group_size,
    positive,
    print_table,
    write_json,
    write_text,
)
from jax_wonly.progress import progress


def _shape(text: str) -> tuple[int, int]:
    try:
        k, n = (int(size) for size in text.lower().split("x"))
    except ValueError:
        k = n = 0
    if k < 1 or n < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; accepted: inputs x outputs, such as 4096x14336")
    return k, n


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", type=_shape, metavar="KxN", help="of weights, inputs x outputs")
    parser.add_argument("--rows", nargs="+", type=positive, metavar="M", help="of activations")
    parser.add_argument("--dtypes", nargs="+", choices=FLOATS, help="of activations and dense weights")
    parser.add_argument("--bits", nargs="+", type=int, choices=(4, 8), default=[4], help="(default: 4)")
    parser.add_argument("--group-size", type=group_size, default=128, metavar="G", help="32 to 256, or channel")
    parser.add_argument("--mode", choices=(*MODES, *TABLES), default="symmetric", help="(default: %(default)s)")
    parser.add_argument("--no-xla", action="store_true", help="leave out XLA's own product of int4 or int8 codes")
    parser.add_argument("--cold", action="store_true", help="on CPUs, rotate weights through more than any cache")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row, on CPUs (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON (-: print it)")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the speed over the rows of activations")


def run(args: argparse.Namespace) -> int:
    platform = jax.default_backend()
    on_gpu = platform == "gpu"
    if platform not in ("cpu", "gpu"):
        raise CommandError(f"products are timed on CPUs and NVIDIA GPUs, and JAX has {platform} here.")
    if not 0 < args.seconds < 3600:
        raise CommandError(f"--seconds {args.seconds:g} is out of range; accepted: above 0, below 3600.")
    shapes = args.shapes or ([(4096, 4096), (8192, 8192), (4096, 14336)] if on_gpu else [(2048, 2048), (4096, 4096)])
    rows_of_x = args.rows or ([1, 4, 16, 64, 256, 1024] if on_gpu else [1, 8, 64])
    dtypes = args.dtypes or (["bfloat16"] if on_gpu else ["float32"])
    if args.group_size is not None:
        unfit = [k for k, _ in shapes if k % args.group_size]
        if unfit:
            raise CommandError(f"--group-size {args.group_size} does not divide K = {unfit[0]}.")
    cases = [(k, n, d, b, m) for k, n in shapes for d in dtypes for b in args.bits for m in rows_of_x]
    cache: dict = {}
    rows: list[dict[str, Any]] = []
    for k, n, dtype, bits, m in progress(cases, "bench", unit="products") if decorated(sys.stderr) else cases:
        product = Product(
            m=m,
            k=k,
            n=n,
            dtype=dtype,
            bits=bits,
            group_size=args.group_size,
            mode=args.mode,
            xla=not args.no_xla,
            copies=copies_of if on_gpu else _copies_cold if args.cold else lambda nbytes: 1,
            dense_cache=cache,
        )
        if on_gpu:
            try:
                product.measure(rounds=3, calls=10)
            except RuntimeError as error:
                raise CommandError(str(error)) from error
            rows.append(product.row())
        else:
            conclusive = interleave(product.contenders, samples=31, seconds=args.seconds)
            core = round(product.dense.core_us / product.ours.core_us, 3)
            rows.append(product.row() | {"core_ratio": core, "conclusive": conclusive})
    report = {
        "device": jax.devices()[0].device_kind if on_gpu else cpu_model(),
        "jax": jax.__version__,
        "jax_wonly": __version__ + (f" ({_ffi.SLOW_BUILD})" if on_gpu and _ffi.status().cuda_quick else ""),
        "timed": "kernels, CUPTI" if on_gpu else "calls by turns, on the clock",
        "rows": rows,
    }
    if not on_gpu and _ffi.status().cpu:
        report["isa"] = importlib.import_module("jax_wonly._cpu").active_isa()
    if args.json:
        write_json(args.json, report)
    if args.plot:
        write_text(args.plot, _plot(rows, report["device"]))
    if "-" not in (args.json, args.plot):
        _print(rows, report)
    return 0


def _colour(row: dict[str, Any]) -> str:
    if not row.get("conclusive", True):
        return "yellow"
    return "green" if row["ratio"] >= 1 else "red"


def _copies_cold(nbytes: int) -> int:
    return -(-CPU_COLD_BYTES // nbytes)


def _scheme(row: dict[str, Any]) -> str:
    size = "channel" if row["group_size"] == row["k"] else f"g{row['group_size']}"
    return f"int{row['bits']} {size}" + ("" if row["zeros"] == "symmetric" else f" {row['zeros']}")


def _print(rows: list[dict[str, Any]], report: dict[str, Any]) -> None:
    columns = {
        "K x N": lambda row: f"{row['k']} x {row['n']}",
        "x": lambda row: row["dtype"],
        "weights": _scheme,
        "M": lambda row: str(row["m"]),
        "us": lambda row: f"{row['us']:.1f}",
        "dense us": lambda row: f"{row['dense_us']:.1f}",
        "faster": lambda row: f"{row['ratio']:.2f}",
    }
    if "xla_us" in rows[0]:
        columns["XLA int us"] = lambda row: f"{row['xla_us']:.1f}"
        columns["faster than it"] = lambda row: f"{row['times_xla']:.2f}"
    if "core_ratio" in rows[0]:
        columns["by core time"] = lambda row: f"{row['core_ratio']:.2f}"
    columns["GB/s"] = lambda row: f"{row['gbps']:.0f}"
    if "kernel" in rows[0]:
        columns["kernel"] = lambda row: row["kernel"]
    if not all(row.get("conclusive", True) for row in rows):
        columns["note"] = lambda row: "" if row["conclusive"] else "machine not quiet"
    sound = [row["ratio"] for row in rows if row.get("conclusive", True)]
    columns[""] = lambda row: bar(row["ratio"] / max(sound)) if row.get("conclusive", True) else ""
    lines = [[text(row) for text in columns.values()] for row in rows]
    print_table(list(columns), lines, [_colour(row) for row in rows])
    print(f"{report['device']}, jax {report['jax']}, jax_wonly {report['jax_wonly']}; timed: {report['timed']}")


def _plot(rows: list[dict[str, Any]], device: str) -> str:
    """Times faster than the dense product over M, a line for each shape, scheme and type."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = f"{row['k']} x {row['n']}, {_scheme(row)}, {row['dtype']}"
        lines.setdefault(name, []).append((row["m"], row["ratio"]))
    return line_chart(
        [Series(name, sorted(points)) for name, points in lines.items()],
        x_label=f"rows of activations M ({device})",
        y_label="times faster than dense",
        log_x=True,
        reference=(1.0, "dense"),
    )
