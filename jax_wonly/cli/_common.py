"""What the commands share: errors, checkpoints in and out, and text for terminals and files."""

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from jax_wonly.checkpoint import Checkpoint, load
from jax_wonly.checkpoint._files import read_json, replace_atomically

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".msgpack", ".onnx")
# What says how the weights of IN are quantized, and is not true of OUT.
_QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "model.safetensors.index.json")
_QUANTIZATION_KEYS = ("quantization_config", "quantization")


class CommandError(Exception):
    """Input that a command cannot use: one sentence for the user, and exit status 2."""


# Text.


def decorated(out: TextIO | None = None) -> bool:
    """Whether ``out`` is a terminal that wants colours and bars (https://no-color.org)."""
    out = sys.stdout if out is None else out
    return out is not None and out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(text: str, colour: str) -> str:
    """``text`` in ``"green"``, ``"red"``, ``"yellow"`` or ``"bold"`` where the terminal has it."""
    code = {"green": "32", "red": "31", "yellow": "33", "bold": "1"}.get(colour)
    return f"\x1b[{code}m{text}\x1b[0m" if code and decorated() else text


def bar(share: float, width: int = 20) -> str:
    """A bar that is full at 1, or nothing where the terminal has none."""
    if not decorated():
        return ""
    filled = round(width * min(max(share, 0.0), 1.0))
    full = "\u2588" if "utf" in (sys.stdout.encoding or "").lower() else "#"
    return full * filled


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], colours: Sequence[str] = ()) -> None:
    """Columns two spaces apart, numbers to the right; ``colours`` are those of whole rows."""
    text = [[*headings], *([*row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    right = [bool(rows) and all(re.match(r"[-+]?\d|-$|$|exact$", row[i]) for row in rows) for i in range(len(headings))]
    for number, row in enumerate(text):
        cells = [f"{c:>{w}}" if r else f"{c:<{w}}" for c, w, r in zip(row, widths, right, strict=True)]
        line = "  ".join(cells).rstrip()
        colour = "bold" if number == 0 else colours[number - 1] if number <= len(colours) else ""
        print(coloured(line, colour))


def write_text(path: str | Path, text: str) -> None:
    """Writes a file whole or not at all, or to standard output for ``-``."""
    if str(path) == "-":
        sys.stdout.write(text)
        return
    if not Path(path).parent.is_dir():
        raise CommandError(f"{path} cannot be written: {Path(path).parent} is not a folder.")
    replace_atomically(Path(path), text.encode())


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    """What JSON does not have, as text or lists."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def positive(text: str) -> int:
    """A count of at least 1, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def group_size(text: str) -> int | None:
    """Inputs that share a scale, for argparse."""
    return None if text == "channel" else positive(text)


# Checkpoints.


def open_checkpoint(path: str, format: str = "auto", inexact: str = "requantize", progress: bool = False) -> Checkpoint:
    """As :func:`jax_wonly.checkpoint.load`."""
    checkpoint = load(path, format, inexact=inexact, progress=progress)
    if not len(checkpoint):
        raise CommandError(f"{path} holds no tensors.")
    return checkpoint


def matcher(patterns: Sequence[str], names: Sequence[str], option: str) -> Callable[[str], bool]:
    """Whether a name holds one of the regular expressions.

    Raises:
      CommandError: one is no regular expression, or is in none of the names.
    """
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(pattern))
        except re.error as error:
            raise CommandError(f"{option} {pattern!r} is not a regular expression: {error}.") from error
        if not any(compiled[-1].search(name) for name in names):
            shown = ", ".join(list(names)[:3])
            raise CommandError(f"{option} {pattern!r} matches none of the {len(names)} tensors, such as {shown}.")
    return lambda name: any(p.search(name) for p in compiled)


def check_output(source: str, out: str, force: bool) -> Path:
    """The path of the result, if it may be written.

    Raises:
      CommandError: it exists without ``force``, is no checkpoint, or one of the two lies in the other.
    """
    path, inside = Path(out), Path(source).resolve()
    resolved = path.resolve()
    if not inside.exists():
        raise CommandError(f"{source} does not exist.")
    if resolved == inside or inside in resolved.parents or resolved in inside.parents:
        raise CommandError(f"OUT {out} and IN {source} lie in each other: give OUT a place of its own.")
    if not resolved.parent.is_dir():
        raise CommandError(f"{out} cannot be written: {resolved.parent} is not a folder.")
    if path.exists() or path.is_symlink():
        if not force:
            raise CommandError(f"{out} exists; --force replaces it.")
        names = [p.name for p in path.iterdir()] if path.is_dir() else [path.name]
        if names and not any(name.endswith(".safetensors") for name in names):
            raise CommandError(f"{out} exists and is no checkpoint of safetensors: --force does not replace it.")
    return path


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A new path beside ``out``, which takes its place when the block ends without an error."""
    temporary = out.with_name(f".{os.getpid()}.{out.name}")
    replaced = out.with_name(f".{os.getpid()}.replaced.{out.name}")
    try:
        yield temporary
        if out.exists() or out.is_symlink():
            os.replace(out, replaced)
        try:
            os.replace(temporary, out)
        except OSError:
            if replaced.exists():
                os.replace(replaced, out)
            raise
        _remove(replaced)
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def copy_companions(source: Path, out: Path) -> list[str]:
    """Copies what lies beside the weights of a folder (the tokenizer, the configuration of the model) into another.

    Of ``config.json`` the keys are joined, except for what it says of the quantization of ``source``.
    """
    if not (source.is_dir() and out.is_dir()):
        return []
    copied = []
    for path in sorted(source.iterdir()):
        known = path.name in _QUANTIZATION_FILES or path.suffix in _WEIGHTS or path.name.startswith(".")
        if not path.is_file() or known:
            continue
        if path.name == "config.json":
            config = {key: value for key, value in read_json(path).items() if key not in _QUANTIZATION_KEYS}
            ours = out / path.name
            write_json(ours, config | (read_json(ours) if ours.is_file() else {}))
        else:
            shutil.copyfile(path, out / path.name)
        copied.append(path.name)
    return copied
