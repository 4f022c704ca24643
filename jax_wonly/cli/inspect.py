"""Says what a checkpoint holds, from its headers: nothing is loaded but these, and no code is run."""

import argparse
import math
from types import SimpleNamespace
from typing import Any

from jax_wonly._model import bytes_text, fold, shape_text
from jax_wonly.checkpoint import FORMATS, TensorInfo
from jax_wonly.cli._common import open_checkpoint, print_table, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help="a safetensors or GGUF file, or a folder")
    parser.add_argument("--format", choices=FORMATS, default="auto", help="(default: found out)")
    parser.add_argument("--all", action="store_true", help="a line for each tensor")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    # "dense" only to be spared the warning of what reading would requantize.
    checkpoint = open_checkpoint(args.checkpoint, args.format, inexact="dense")
    tensors = [checkpoint.info(name) for name in checkpoint]
    if args.json:
        facts = {"path": str(checkpoint.path), "format": checkpoint.format, "bytes": checkpoint.nbytes}
        facts["metadata"] = {key: _short(value) for key, value in checkpoint.config.items()}
        write_json("-", facts | {"tensors": [vars(info) for info in tensors]})
        return 0
    quantized = [info for info in tensors if info.bits]
    weights = sum(math.prod(info.shape) for info in quantized)
    print(f"{checkpoint.path}: {checkpoint.format}, {len(tensors)} tensors, {bytes_text(checkpoint.nbytes)}")
    if quantized:
        used = sum(info.nbytes for info in quantized)
        print(f"quantized: {len(quantized)} weights, {bytes_text(used)}, {8 * used / weights:.2f} bits per weight")
    inexact = [info.name for info in tensors if not info.exact]
    if inexact:
        print(f"not held exactly by this package: {len(inexact)}, such as {inexact[0]}")
    # fold goes by the attribute path.
    items = [SimpleNamespace(path=info.name, info=info) for info in tensors]
    groups = fold(items, lambda item: item.path if args.all else (item.info.shape, _scheme(item.info)))
    rows = []
    for name, group in groups:
        info = group[0].info
        rows.append((name, shape_text(info.shape), _scheme(info), bytes_text(sum(i.info.nbytes for i in group))))
    print_table(("tensor", "shape", "scheme", "bytes"), rows)
    for key, value in checkpoint.config.items():
        print(f"{key} = {_short(value)}")
    return 0


def _scheme(info: TensorInfo) -> str:
    if not info.bits:
        return info.format
    size = "per channel" if info.group_size and info.group_size >= info.shape[-2] else f"groups of {info.group_size}"
    return f"{info.format}, {info.bits} bits, {size}"


def _short(value: Any) -> Any:
    """A value of the metadata, long ones by their beginning: vocabularies are metadata too."""
    size = getattr(value, "size", None) or (len(value) if isinstance(value, list) else 0)
    if size > 8:
        return f"[{', '.join(map(str, list(value[:4])))}, ...] ({size} values)"
    if isinstance(value, str) and len(value) > 200:
        return f"{value[:200]!r}... ({len(value)} characters)"
    return value
