"""The compiled module of this tree, unchanged, under several versions of JAX."""

import argparse
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from reliability.record import ROOT, measured, save

VERSIONS = ("0.9.2", "0.10.2", "0.11.2", "0.12.0.1")
REQUIRED = ("pytest", "hypothesis", "flatbuffers", "safetensors", "numpy")
# What depends on JAX's interfaces, and random products; .ci/run tests more, with wheels.
TESTS = ("ffi", "export", "tensor")
MORE = ("matmul.py::test_any_shape", "experts.py::test_ragged_dot", "transforms.py::test_vmap_in_axes")
MORE += ("transforms.py::test_derivatives_compose", "transforms.py::test_control_flow")


def package(folder: Path) -> Path:
    """A copy of the package, away from the tree."""
    spec = importlib.util.find_spec("jax_wonly")
    assert spec is not None and spec.origin is not None
    copy = folder / "package" / "jax_wonly"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(Path(spec.origin).parent, copy, ignore=shutil.ignore_patterns("__pycache__", "_cuda*.so"))
    return copy.parent


def check(version: str, python: str, folder: Path, path: Path) -> dict[str, Any]:
    home = folder / version
    if not (home / "bin" / "python").exists():
        subprocess.run([python, "-m", "venv", home], check=True)
    words = [home / "bin" / "python", "-m", "pip", "install", "-q", f"jax=={version}", *REQUIRED]
    subprocess.run(words, check=True)
    tests = [*(f"test_{name}.py" for name in TESTS), *(f"test_{name}" for name in MORE)]
    result = subprocess.run(
        [home / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
        + [str(ROOT / "tests" / test) for test in tests],
        env={"PYTHONPATH": str(path), "PATH": str(home / "bin") + ":/usr/bin:/bin", "JAX_PLATFORMS": "cpu"},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    passed, failed, broken = (
        sum(map(int, re.findall(rf"(\d+) {word}", result.stdout))) for word in ("passed", "failed", "error")
    )
    if result.returncode:
        print(result.stdout[-6000:])
    return {
        "what": f"jax {version}",
        "cases": passed + failed,
        "failures": failed + broken + int(result.returncode != 0 and not failed),
    }


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="reliability versions", description=__doc__)
    parser.add_argument("versions", nargs="*", default=list(VERSIONS), help="of JAX (default: %(default)s)")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environments that are made")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions")
    parser.add_argument("--output", default="reliability-versions.json")
    options = parser.parse_args(words)
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    path = package(folder)
    module = next((path / "jax_wonly").glob("_cpu*.so"))
    rows = [measured(version, check, version, options.python, folder, path) for version in options.versions]
    digest = hashlib.sha256(module.read_bytes()).hexdigest()[:16]
    return save(options.output, rows, module=module.name, sha256=digest)
