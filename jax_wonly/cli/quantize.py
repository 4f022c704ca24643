"""Quantizes a dense safetensors checkpoint, layer by layer, without calibration data.

What is done stays in OUT.partial until all of it is, so that the same command goes on where it was interrupted. What is
no matrix stays dense, and so do matrices whose inputs the group size does not divide, and those that the patterns leave
out. A matrix is taken for [outputs, inputs], as PyTorch stores it, unless its name ends in kernel.
"""

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_wonly._model import LayerReport, Report, SkippedLayer, bytes_text, nbytes, relative_error, scheme
from jax_wonly._quantize import MODES
from jax_wonly._validate import FLOATS, check_group_size
from jax_wonly._version import __version__
from jax_wonly.algorithms import absmax, hqq, minmax, mse
from jax_wonly.checkpoint import Checkpoint, load, save
from jax_wonly.checkpoint._files import replace_atomically
from jax_wonly.cli._common import (
    CommandError,
    check_output,
    copy_companions,
    group_size,
    matcher,
    open_checkpoint,
    staged,
    write_text,
)
from jax_wonly.progress import progress

# The modes of each algorithm, its default first.
ALGORITHMS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "absmax": (absmax, ("symmetric",)),
    "minmax": (minmax, ("integer_zeros", "float_zeros", "offsets")),
    "mse": (mse, tuple(MODES)),
    "hqq": (hqq, ("float_zeros",)),
}
_CALIBRATED = ("awq", "gptq")
# Embeddings, and the product with the vocabulary, whose errors no later layer makes good.
EXCLUDED = r"embed|(^|\.)(wte|wpe|lm_head)\."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="IN", help="a safetensors file, or a folder with them")
    parser.add_argument("out", metavar="OUT", help="a new folder, or a new file .safetensors")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4, help="(default: %(default)s)")
    parser.add_argument(
        "--group-size", type=group_size, default=128, metavar="G", help="32, 64, 128, 256 or channel (default: 128)"
    )
    parser.add_argument(
        "--algorithm",
        choices=(*ALGORITHMS, *_CALIBRATED),
        default="mse",
        help="(default: %(default)s; awq and gptq need calibration data, and so a model)",
    )
    parser.add_argument("--mode", choices=MODES, help="of the codes (default: that of the algorithm)")
    parser.add_argument("--scale-dtype", choices=FLOATS, help="(default: that of the weight)")
    parser.add_argument("--include", action="append", default=[], metavar="REGEX", help="only names that hold one")
    parser.add_argument(
        "--exclude", action="append", metavar="REGEX", help=f"but for names that hold one (default: {EXCLUDED})"
    )
    parser.add_argument(
        "--layout",
        choices=("auto", "outputs-first", "inputs-first"),
        default="auto",
        help="how matrices lie (default: inputs first if the name ends in kernel, else outputs first)",
    )
    parser.add_argument("--report", metavar="FILE", help="write the sizes and errors of all layers as JSON")
    parser.add_argument("--force", action="store_true", help="replace OUT")
    parser.add_argument("--quiet", action="store_true", help="no progress and no table")


def run(args: argparse.Namespace) -> int:
    if args.algorithm in _CALIBRATED:
        raise CommandError(
            f"--algorithm {args.algorithm} needs calibration data and the model that runs it: use "
            f"jax_wonly.algorithms.quantize_model(model, batches, method={args.algorithm!r}); accepted here: "
            f"{', '.join(ALGORITHMS)}."
        )
    function, modes = ALGORITHMS[args.algorithm]
    mode = args.mode or modes[0]
    if mode not in modes:
        raise CommandError(f"--mode {mode} is not one of {args.algorithm}; accepted: {', '.join(modes)}.")
    if args.group_size is not None:
        check_group_size(args.group_size, 256 * args.group_size)
    out = check_output(args.source, args.out, args.force)
    checkpoint = open_checkpoint(args.source)
    if any(checkpoint.info(name).bits for name in checkpoint):
        raise CommandError(f"{args.source} is quantized already ({checkpoint.format}): convert it instead.")
    names = list(checkpoint)
    included = matcher(args.include or [""], names, "--include")
    excluded = matcher(args.exclude, names, "--exclude") if args.exclude else _default_excluded

    chosen: list[str] = []
    skipped: list[SkippedLayer] = []
    for name in names:
        info = checkpoint.info(name)
        if len(info.shape) < 2:
            continue
        why = "no pattern of --include is in its name" if not included(name) else _refusal(name, info, args)
        if why is None and excluded(name):
            why = "a pattern of --exclude is in its name"
        if why is None:
            chosen.append(name)
        else:
            skipped.append(SkippedLayer(name, "tensor", info.shape, info.nbytes, why))
    if not chosen:
        reasons = "; ".join(dict.fromkeys(layer.reason for layer in skipped)) or "there are no matrices"
        raise CommandError(f"nothing in {args.source} is to be quantized: {reasons}.")

    options = {"bits": args.bits, "group_size": args.group_size, "scale_dtype": args.scale_dtype}
    if args.algorithm not in ("absmax", "hqq"):
        options["mode"] = mode
    plan = {
        "version": __version__,
        "source": _fingerprint(Path(args.source)),
        "algorithm": args.algorithm,
        "layout": args.layout,
        "tensors": chosen,
        **options,
    }
    partial = _Partial(out.with_name(f"{out.name}.partial"), plan)
    if partial.done and not args.quiet:
        print(f"{len(partial.done)} of {len(chosen)} layers are in {partial.folder}: going on", file=sys.stderr)
    left = [name for name in chosen if name not in partial.done]
    for name in left if args.quiet else progress(left, "quantize", unit="layers", total=len(left)):
        _quantize_one(checkpoint, name, function, options, args.layout, partial)
    layers = tuple(partial.report(name) for name in chosen)
    with staged(out) as temporary:
        save(temporary, _Result(checkpoint, partial), progress=not args.quiet)
        copied = copy_companions(Path(args.source), temporary)
    shutil.rmtree(partial.folder)
    report = Report(layers, tuple(skipped), checkpoint.nbytes, load(out).nbytes)
    if args.report:
        write_text(args.report, report.to_json(indent=1) + "\n")
    if not args.quiet:
        print(report)
    beside = f", with {', '.join(copied)}" if copied else ""
    print(f"{out}: {bytes_text(report.model_bytes_after)}{beside}")
    return 0


def _default_excluded(name: str) -> bool:
    return re.search(EXCLUDED, name) is not None


def _inputs_first(name: str, layout: str) -> bool:
    return layout == "inputs-first" or (layout == "auto" and name.endswith("kernel"))


def _refusal(name: str, info, args: argparse.Namespace) -> str | None:
    """Why a tensor stays dense whatever the patterns say."""
    if len(info.shape) != 2:
        return f"it has {len(info.shape)} dimensions"
    if info.nbytes not in (2 * math.prod(info.shape), 4 * math.prod(info.shape)):
        return "its elements are not of 16 or 32 bits"
    inputs = info.shape[0 if _inputs_first(name, args.layout) else 1]
    if args.group_size is not None and inputs % args.group_size:
        return f"groups of {args.group_size} do not divide its inputs"
    return None


def _fingerprint(source: Path) -> list:
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    return [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in files]


def _quantize_one(checkpoint: Checkpoint, name: str, function, options, layout: str, partial: "_Partial") -> None:
    dense = jnp.asarray(checkpoint[name])
    if str(dense.dtype) not in FLOATS:
        raise CommandError(f"{name} is {dense.dtype}; accepted: {', '.join(FLOATS)} (--exclude leaves it dense).")
    if not _inputs_first(name, layout):
        dense = dense.T
    try:
        weight = function(dense, **options)
    except ValueError as error:
        raise CommandError(f"{name}: {str(error).removeprefix('jax_wonly: ')}") from error
    jax.block_until_ready(weight)
    error = relative_error(dense, weight)
    report = LayerReport(name, "tensor", tuple(dense.shape), scheme(weight), nbytes(dense), weight.nbytes, error)
    partial.add(name, weight, report)


class _Partial:
    """Layers that are done, one file each, in a folder beside the result."""

    def __init__(self, folder: Path, plan: Mapping[str, Any]):
        self.folder = folder
        self._tensors: list[str] = plan["tensors"]
        text = json.dumps(plan, sort_keys=True)
        file = folder / "plan.json"
        if folder.exists():
            if not file.is_file():
                raise CommandError(f"{folder} is in the way: the layers that are done are kept there until all are.")
            if file.read_text() != text:  # of another command
                shutil.rmtree(folder)
        folder.mkdir(exist_ok=True)
        replace_atomically(file, text.encode())
        self.done = {name for name in self._tensors if self._path(name).with_suffix(".json").is_file()}

    def _path(self, name: str) -> Path:
        return self.folder / f"{self._tensors.index(name):06d}.safetensors"

    def add(self, name: str, weight, report: LayerReport) -> None:
        save(self._path(name), {name: weight})
        replace_atomically(self._path(name).with_suffix(".json"), json.dumps(vars(report)).encode())
        self.done.add(name)

    def read(self, name: str):
        return load(self._path(name))[name]

    def report(self, name: str) -> LayerReport:
        fields = json.loads(self._path(name).with_suffix(".json").read_text())
        return LayerReport(**fields | {"shape": tuple(fields["shape"])})


class _Result(Mapping[str, Any]):
    """The checkpoint with the layers that are done in the place of the dense ones, each read when it is asked for."""

    def __init__(self, checkpoint: Checkpoint, partial: _Partial):
        self._checkpoint, self._partial = checkpoint, partial

    def __getitem__(self, name: str):
        return self._partial.read(name) if name in self._partial.done else self._checkpoint[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint)

    def __len__(self) -> int:
        return len(self._checkpoint)
