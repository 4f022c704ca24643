"""Result files of the checks."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def measured(check: str, run: Callable[..., dict[str, Any]], *args: Any, **options: Any) -> dict[str, Any]:
    """The row of one check: what ``run`` returns, ``cases`` and ``failures`` among it, and its time."""
    start = time.perf_counter()
    row = {"check": check, **run(*args, **options)}
    row["seconds"] = round(time.perf_counter() - start, 1)
    print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def save(output: Path | str, rows: Iterable[dict[str, Any]], **facts: Any) -> int:
    """Writes a result file, with facts about machine and run; returns the exit status.

    Rows of other checks stay in the file if they were made by the same commit on such a machine.
    """
    import jax

    rows = list(rows)
    gpu = jax.default_backend() == "gpu"
    report = {
        "device": jax.devices()[0].device_kind if gpu else cpu_name(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        **facts,
    }
    path = Path(output) if Path(output).is_absolute() else RESULTS / output
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.is_file() else {}
    kept = before.pop("rows", [])
    if before != report:
        kept = []
    names = {row["check"] for row in rows}
    report["rows"] = [row for row in kept if row["check"] not in names] + rows
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{path} written")
    return int(any(row["failures"] for row in rows))


def commit() -> str:
    if given := os.environ.get("JAX_WONLY_COMMIT"):  # for a copy of the tree that is no clone
        return given
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
