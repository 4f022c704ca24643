"""The self-test of what is installed, or on PYTHONPATH, with no compiler in reach: a wheel in a clean environment."""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from reliability.record import save


def modules() -> dict[str, str]:
    """Sizes and architectures of the compiled modules."""
    found = {}
    for name in ("_cpu", "_cuda"):
        try:
            module = importlib.import_module(f"jax_wonly.{name}")
        except ImportError:
            continue
        found[name.strip("_")] = f"{Path(str(module.__file__)).stat().st_size / 1e6:.0f} MB"
        if name == "_cuda":
            found["architectures"] = " ".join(module.architectures())
    return found


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="reliability installed", description=__doc__)
    parser.add_argument("--output", default=None)
    options = parser.parse_args(words)
    # The libraries of CUDA and of the package may be named here; programs are not.
    kept = {name: value for name, value in os.environ.items() if re.match("(PYTHONPATH|LD_LIBRARY|JAX|XLA)", name)}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "doctor.json"
        subprocess.run(
            [sys.executable, "-m", "jax_wonly", "doctor", "--json", str(output)],
            cwd=folder,
            env={**kept, "PATH": folder, "HOME": folder},
        )
        found: dict[str, Any] = json.loads(output.read_text())
    import jax

    for problem in found["problems"]:
        print(problem)
    rows = []
    for platform in sorted({row["platform"] for row in found["results"]}):
        of = [row for row in found["results"] if row["platform"] == platform]
        rows.append(
            {
                "check": platform,
                "what": f"{len({row['target'] for row in of})} kinds of calls, on {platform}",
                "cases": sum(row["cases"] for row in of),
                "failures": sum(not row["ok"] for row in of),
            }
        )
    default = "reliability-installed-gpu.json" if jax.default_backend() == "gpu" else "reliability-installed.json"
    status = save(options.output or default, rows, seconds=found["seconds"], **modules())
    return status or int(bool(found["problems"]))
