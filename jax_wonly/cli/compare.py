"""Compares two checkpoints tensor by tensor: how far the weights of OUT are from those of IN.

The error of a tensor is the Frobenius norm of the difference over that of IN. Names are the same in both, but for the
ending weight of quantized ones.
"""

import argparse
import math
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_wonly._model import bytes_text, relative_error, shape_text
from jax_wonly._svg import bar_chart
from jax_wonly._tensor import QuantizedTensor
from jax_wonly._wrapped import WrappedTensor
from jax_wonly.checkpoint import FORMATS, Checkpoint
from jax_wonly.cli._common import (
    CommandError,
    bar,
    coloured,
    matcher,
    open_checkpoint,
    positive,
    print_table,
    write_json,
    write_text,
)
from jax_wonly.progress import progress

_Weight = QuantizedTensor | WrappedTensor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="IN", help="a checkpoint, such as the dense one")
    parser.add_argument("out", metavar="OUT", help="another of the same model")
    parser.add_argument("--format", choices=FORMATS, default="auto", help="of IN (default: found out)")
    parser.add_argument("--out-format", choices=FORMATS, default="auto", help="of OUT (default: found out)")
    parser.add_argument("--include", action="append", default=[], metavar="REGEX", help="only names that hold one")
    parser.add_argument("--worst", type=positive, default=10, metavar="N", help="how many to list (default: 10)")
    parser.add_argument("--fail-above", type=float, metavar="E", help="exit status 1 if an error is above this")
    parser.add_argument("--json", metavar="FILE", help="write all errors as JSON (-: print it)")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the errors, the largest first")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    source = open_checkpoint(args.source, args.format)
    out = open_checkpoint(args.out, args.out_format)
    keep = matcher(args.include or [""], [*source, *out], "--include")
    pairs = {name: found for name in out if keep(name) and (found := _counterpart(name, source)) is not None}
    missing = sorted(name for name in source if keep(name) and name not in pairs.values())
    unexpected = sorted(name for name in out if keep(name) and name not in pairs)
    if not pairs:
        raise CommandError(f"{args.source} and {args.out} have no tensor in common.")
    rows = []
    for name in list(pairs) if args.quiet or args.json == "-" else progress(list(pairs), "compare", unit="tensors"):
        info = out.info(name)
        error = _error(source[pairs[name]], out[name])
        rows.append({"name": name, "shape": list(info.shape), "bits": info.bits, "error": error, "bytes": info.nbytes})
    rows.sort(key=lambda row: -math.inf if row["error"] is None else -row["error"])
    facts = {
        "in": str(source.path),
        "out": str(out.path),
        "bytes_in": source.nbytes,
        "bytes_out": out.nbytes,
        "missing": missing,
        "unexpected": unexpected,
        "tensors": rows,
    }
    if args.json:
        write_json(args.json, facts)
    differing = [row for row in rows if row["error"] != 0]
    if args.plot:
        shown = [(row["name"], 100 * _size(row)) for row in (differing or rows)[:60]]
        write_text(args.plot, bar_chart(shown, label="relative error", unit="%"))
    if "-" not in (args.json, args.plot):
        _print(facts, differing, args.worst)
    failed = [] if args.fail_above is None else [row for row in rows if _size(row) > args.fail_above]
    if failed or any(row["error"] is None for row in rows):
        print(f"compare: {failed[0]['name'] if failed else rows[0]['name']} is beyond the limit", file=sys.stderr)
        return 1
    return 0


def _size(row: Mapping[str, Any]) -> float:
    """The error as a number: infinite where the shapes differ."""
    return math.inf if row["error"] is None else row["error"]


def _counterpart(name: str, source: Checkpoint) -> str | None:
    """The tensor of the same name; formats of PyTorch append ``.weight`` to the names of quantized ones."""
    return next((n for n in (name, name.removesuffix(".weight"), f"{name}.weight") if n in source), None)


def _error(before: Any, after: Any) -> float | None:
    """The relative error; None where the shapes do not fit."""
    quantized = isinstance(before, _Weight), isinstance(after, _Weight)
    if all(quantized):
        return _of_arrays(_dense(before), _dense(after))
    # A quantized one stays so, to be dequantized in pieces.
    before, after = (_dense(a) if isinstance(a, WrappedTensor) else a for a in (before, after))
    errors = [_of_arrays(before, after)]
    if quantized[0] != quantized[1] and len(before.shape) == 2:
        # A dense matrix is [outputs, inputs] or [inputs, outputs], a quantized one the latter: what is nearer is meant.
        turned = (before.T, after) if quantized[1] else (before, after.T)
        errors.append(_of_arrays(*turned))
    return min((error for error in errors if error is not None), default=None)


def _dense(weight: Any) -> jax.Array:
    return weight.dequantize(jnp.float32)


def _of_arrays(a: Any, b: Any) -> float | None:
    if tuple(a.shape) != tuple(b.shape):
        return None
    if isinstance(b, QuantizedTensor):
        return relative_error(jnp.asarray(a), b)
    a, b = (np.asarray(_dense(v) if isinstance(v, QuantizedTensor) else v) for v in (a, b))
    if np.array_equal(a, b):
        return 0.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.linalg.norm(b - a) / max(float(np.linalg.norm(a)), np.finfo(np.float32).tiny))


def _print(facts: Mapping[str, Any], differing: list[dict[str, Any]], worst: int) -> None:
    rows = facts["tensors"]
    same = len(rows) - len(differing)
    print(f"{facts['in']} ({bytes_text(facts['bytes_in'])}) and {facts['out']} ({bytes_text(facts['bytes_out'])})")
    print(f"{len(rows)} tensors in both, {same} of them equal")
    for what, names in (("only in IN", facts["missing"]), ("only in OUT", facts["unexpected"])):
        if names:
            print(coloured(f"{what}: {len(names)}, such as {names[0]}", "yellow"))
    if not differing:
        return
    errors = [_size(row) for row in differing]
    middle = sorted(errors)[len(errors) // 2]
    print(f"relative error of the others: largest {errors[0]:.3%}, median {middle:.3%}, least {errors[-1]:.3%}")
    lines = []
    for row in differing[:worst]:
        error = "another shape" if row["error"] is None else f"{row['error']:.3%}"
        kind = f"{row['bits']} bits" if row["bits"] else "dense"
        lines.append((row["name"], shape_text(row["shape"]), kind, error, bar(_size(row) / max(errors[0], 1e-30))))
    print_table(("worst", "shape", "in OUT", "error", ""), lines)
