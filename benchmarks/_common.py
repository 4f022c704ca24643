"""What the benchmarks of GPU kernels share: the result file. How they are timed is in jax_wonly._timing."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax


def require_gpu(script: str) -> None:
    if (platform := jax.devices()[0].platform) != "gpu":
        sys.exit(f"benchmarks/{script} needs an NVIDIA GPU; JAX has {platform}")


def command(*words: str) -> str:
    if shutil.which(words[0]) is None:
        return ""
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def save(output: Path, rows: Sequence[dict], commit: str | None, **facts) -> None:
    """Writes the rows with a description of the machine, and ``facts`` about the run."""
    report = {
        "device": jax.devices()[0].device_kind,
        "driver": command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "jax": jax.__version__,
        "commit": commit or command("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"),
        **facts,
        "rows": list(rows),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n")
