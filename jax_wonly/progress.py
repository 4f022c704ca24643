"""A text progress bar without dependencies."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

T = TypeVar("T")

_WIDTH = 24  # cells of the bar itself
_INTERVAL = 0.1  # seconds between two redraws on a terminal
_LINES = 4  # how many lines a log gets, where the line cannot be redrawn


def progress(
    items: Iterable[T], label: str = "", *, total: int | None = None, unit: str = "", file: TextIO | None = None
) -> Iterator[T]:
    """Yields ``items`` and draws how many are done, the rate and the time left.

    A terminal gets one line, redrawn in place; anything else (a log, a pipe) gets a plain line now and then.

    Args:
      items: what to iterate over.
      label: what is going on, in a word or two.
      total: how many items there are; ``len(items)`` by default.
      unit: what an item is, such as ``"layers"``.
      file: where to draw, standard error by default.

    Raises:
      TypeError: ``items`` has no length, and ``total`` is None.

    Example:
      >>> import sys
      >>> from jax_wonly.progress import progress
      >>> list(progress(range(3), "load", unit="tensors", file=sys.stderr))
      [0, 1, 2]
    """
    out = sys.stderr if file is None else file
    if total is None:
        total = len(items)  # type: ignore[arg-type]
    redraw = out.isatty()
    start = time.perf_counter()
    drawn = start
    done = 0

    def draw(end: str) -> None:
        elapsed = time.perf_counter() - start
        rate = done / elapsed if elapsed > 0 else 0.0
        left = f"{(total - done) / rate:.0f} s left" if rate > 0 and done < total else f"{elapsed:.1f} s"
        filled = _WIDTH * done // max(total, 1)
        bar = "#" * filled + "." * (_WIDTH - filled)
        line = f"{label:<18} [{bar}] {done}/{total} {unit}".rstrip() + f"  {rate:.0f}/s  {left}"
        out.write(f"\r{line:<78}" if redraw else line)
        out.write(end)
        out.flush()

    milestones = {total * (i + 1) // _LINES for i in range(_LINES)} - {0}
    for item in items:
        yield item
        done += 1
        now = time.perf_counter()
        if done == total or (now - drawn >= _INTERVAL if redraw else done in milestones):
            drawn = now
            draw("\n" if done == total or not redraw else "")
