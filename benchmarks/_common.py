"""What the benchmarks of GPU kernels share: options and the result file. How they are timed is in jax_wonly._timing."""

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax


def require_gpu(script: str, otherwise: str = "") -> None:
    if (platform := jax.devices()[0].platform) != "gpu":
        sys.exit(f"benchmarks/{script} needs an NVIDIA GPU{otherwise}; JAX has {platform}")
    from jax_wonly import _ffi  # which benchmarks/build.py builds

    if _ffi.status().cuda_quick:
        sys.exit(f"benchmarks/{script} needs kernels as users have them; these were {_ffi.SLOW_BUILD}")


def add_timing(parser: argparse.ArgumentParser, rounds: int, calls: int) -> None:
    parser.add_argument("--rounds", type=int, default=rounds, help="turns of each (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=calls, help="calls in a turn (default: %(default)s)")


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Adds the precision of float32 products."""
    every = "of float32 products, ours and dense (default: float32 ours, and TF32, which is XLA's default)"
    parser.add_argument("--precision", choices=("default", "high", "highest"), help=every)


def take_precision(args: argparse.Namespace) -> dict[str, str]:
    """Sets the precision that was asked for, and says so for a result file."""
    if args.precision is None:
        return {}
    jax.config.update("jax_default_matmul_precision", args.precision)
    return {"precision": args.precision}


def add_suites(parser: argparse.ArgumentParser, suites: Iterable[str], default: Sequence[str] | None = None) -> None:
    suites = list(suites)
    default = suites if default is None else list(default)
    which = "all" if default == suites else ", ".join(default)
    parser.add_argument(
        "--suite", nargs="+", choices=suites, default=default, help=f"what to measure (default: {which})"
    )


def add_results(
    parser: argparse.ArgumentParser, output: Path | None, append: bool = True, where: str = "%(default)s"
) -> None:
    """Adds the options of the result file; ``where`` says its default where that depends on other options."""
    parser.add_argument("--output", type=Path, default=output, help=f"where to write the JSON (default: {where})")
    if append:
        parser.add_argument("--append", action="store_true", help="keep the file's rows that are not measured again")
    parser.add_argument("--commit", help="of this tree, where git cannot tell")


def kept_rows(output: Path, append: bool, identity: Sequence[str]) -> dict[tuple, dict]:
    """The rows that the file holds, by their ``identity``; none without ``append``."""
    if not append or not output.is_file():
        return {}
    return {tuple(row.get(name) for name in identity): row for row in json.loads(output.read_text())["rows"]}


def gradient_of(product: Callable, k: int, axes: int = -1) -> Callable:
    """``(dy, w, ...) -> dx`` of ``product(x, w, ...)``, which is linear in ``x [*dy.shape[:axes], k]``."""

    def dx(dy, *others):
        x = jax.ShapeDtypeStruct((*dy.shape[:axes], k), dy.dtype)
        return jax.linear_transpose(lambda x: product(x, *others), x)(dy)[0]

    return dx


def scales_gradient(product: Callable) -> Callable:
    """``(x, qt, dy, ...) -> ds`` of ``product(x, qt, ...)``, whose scales ``ds`` is the cotangent of."""

    def ds(x, qt, dy, *rest):
        return jax.vjp(lambda s: product(x, dataclasses.replace(qt, scales=s), *rest), qt.scales)[1](dy)[0]

    return ds


def command(*words: str) -> str:
    if shutil.which(words[0]) is None:
        return ""
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def revision(commit: str | None) -> str:
    """``commit``, or, without one, what git says of this tree."""
    return commit or command("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD")


def save(output: Path, rows: Sequence[dict], commit: str | None, **facts) -> None:
    """Writes the rows with a description of the machine, and ``facts`` about the run."""
    report = {
        "device": jax.devices()[0].device_kind,
        "driver": command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "jax": jax.__version__,
        "commit": revision(commit),
        **facts,
        "rows": list(rows),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n")
