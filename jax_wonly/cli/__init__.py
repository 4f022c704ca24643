"""The command line: ``python -m jax_wonly``, or ``jax-wonly`` where the package is installed.

Exit status: 0, 1 if ``doctor`` or a limit of ``compare`` found something wrong, 2 for bad input.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from jax_wonly._version import __version__
from jax_wonly.cli import bench, compare, convert, doctor, info, inspect, quantize
from jax_wonly.cli._common import CommandError

COMMANDS = {
    "info": info,
    "doctor": doctor,
    "bench": bench,
    "inspect": inspect,
    "quantize": quantize,
    "convert": convert,
    "compare": compare,
}


def parser() -> argparse.ArgumentParser:
    """Of the whole command line."""
    top = argparse.ArgumentParser(
        prog="jax_wonly", description="Fast int4 and int8 weight-only quantized matrix products for JAX."
    )
    top.add_argument("--version", action="version", version=f"jax_wonly {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        text = (module.__doc__ or "").strip()
        command = commands.add_parser(
            name,
            help=text.splitlines()[0].rstrip("."),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the words after the program's name; default: those of the process.

    Returns:
      The exit status.
    """
    try:
        args = parser().parse_args(argv)
    except SystemExit as error:  # argparse has printed its sentence
        return int(error.code or 0)
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
        try:
            return COMMANDS[args.command].run(args) or 0
        except BrokenPipeError:  # the reader of a pipe has had enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except KeyboardInterrupt:
            print(f"{args.command}: interrupted", file=sys.stderr)
            return 130
        except (CommandError, OSError, ImportError, MemoryError) as error:
            return _complain(args.command, error)
        except (TypeError, ValueError) as error:
            if not str(error).startswith("jax_wonly"):
                raise  # a mistake of ours, which needs its traceback
            return _complain(args.command, error)


def _complain(command: str, error: BaseException) -> int:
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = str(error) or type(error).__name__
    print(f"{command}: {' '.join(text.removeprefix('jax_wonly: ').split())}", file=sys.stderr)
    return 2
