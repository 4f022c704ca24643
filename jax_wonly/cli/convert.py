"""Writes a quantized checkpoint in another format: the same codes and scales, arranged anew."""

import argparse
from pathlib import Path

from jax_wonly._model import bytes_text
from jax_wonly.checkpoint import FORMATS, load, save
from jax_wonly.checkpoint._save import FORMATS as TARGETS
from jax_wonly.cli._common import CommandError, check_output, copy_companions, open_checkpoint, staged


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="IN", help="a safetensors or GGUF file, or a folder")
    parser.add_argument("out", metavar="OUT", help="a new folder; or a file .safetensors, of jax_wonly")
    parser.add_argument("--to", choices=TARGETS, required=True, help="the format of OUT")
    parser.add_argument("--format", choices=FORMATS, default="auto", help="of IN (default: found out)")
    parser.add_argument(
        "--inexact",
        choices=("requantize", "dense", "error"),
        default="requantize",
        help="for weights that no packed array holds exactly (default: %(default)s)",
    )
    parser.add_argument("--gptq-version", type=int, choices=(1, 2), default=1, help="(default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="replace OUT")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    out = check_output(args.source, args.out, args.force)
    checkpoint = open_checkpoint(args.source, args.format, args.inexact)
    if not any(checkpoint.info(name).bits for name in checkpoint):
        raise CommandError(f"{args.source} holds no quantized weight: quantize it first.")
    with staged(out) as temporary:
        save(temporary, checkpoint, args.to, version=args.gptq_version, progress=not args.quiet)
        copied = copy_companions(Path(args.source), temporary)
    size = load(out).nbytes
    beside = f", with {', '.join(copied)}" if copied else ""
    sizes = f"{bytes_text(checkpoint.nbytes)} -> {bytes_text(size)}"
    print(f"{args.source} ({checkpoint.format}) -> {out} ({args.to}): {sizes}{beside}")
    return 0
