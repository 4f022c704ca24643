"""Runs on the CPU unless GPU tests are asked for (``-m gpu``), with inputs drawn from one printed seed.

Of a large cross product of parameters a twelfth is run, which the seed chooses; all of it with JAX_WONLY_ALL_CASES=1.
"""

import collections
import importlib
import os
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

_SEED = "JAX_WONLY_TEST_SEED"
_ALL_CASES = "JAX_WONLY_ALL_CASES"
_LARGE = 30  # cases of one test
_EMULATED = None
if _path := os.environ.get("JAX_WONLY_EMULATED"):  # before anything imports jax_wonly
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(Path(__file__).parent / "emulator"))
    _EMULATED = importlib.import_module("emulate").install(Path(_path))


def _gpu_requested(config) -> bool:
    expression = config.getoption("markexpr", "") or ""
    return "gpu" in expression and "not gpu" not in expression and _EMULATED is None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    # Before jax is imported, and inherited by the workers of pytest-xdist.
    if not _gpu_requested(config):
        os.environ["JAX_PLATFORMS"] = "cpu"
        # Most programs run once: compiling them with all of XLA's optimizations, and fusions by way of MLIR, takes more
        # than half of the tests' time.
        if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
            quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
            quick += " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}".strip()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if workers := getattr(config.option, "numprocesses", None):  # whose NumPy references would all take every core
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    os.environ.setdefault(_SEED, str(int.from_bytes(os.urandom(4), "little")))
    if getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = os.environ[_SEED]

    import hypothesis

    hypothesis.settings.register_profile("wonly", deadline=None, max_examples=10, print_blob=True)
    hypothesis.settings.load_profile("wonly")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if _EMULATED is not None and item.get_closest_marker("device"):
            item.add_marker(pytest.mark.skip(reason="kernels are emulated here"))
    if os.environ.get(_ALL_CASES):
        return
    test_of = {item: item.nodeid.split("[")[0] for item in items}
    cases = collections.Counter(test_of.values())
    dropped = [
        item
        for item in items
        if cases[test_of[item]] >= _LARGE and zlib.crc32(f"{os.environ[_SEED]}:{item.nodeid}".encode()) % 12
    ]
    config.hook.pytest_deselected(items=dropped)
    left_out = set(dropped)
    items[:] = [item for item in items if item not in left_out]


def pytest_report_header(config):
    return f"jax_wonly: {_SEED}={os.environ[_SEED]}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:  # -q leaves the header out
        report.sections.append(("Seed", f"{_SEED}={os.environ[_SEED]}"))
    return report


@pytest.fixture
def emulated():
    if _EMULATED is None:
        pytest.skip("needs JAX_WONLY_EMULATED (tests/emulator/emulate.py)")
    yield _EMULATED
    _EMULATED.set_gpu()


@pytest.fixture(autouse=True)
def _emulated_order(seed):
    if _EMULATED is not None:
        _EMULATED.set_seed(seed)
        _EMULATED.watch_races(os.environ.get("JAX_WONLY_EMULATED_RACES", "") not in ("", "0"))


@pytest.fixture
def seed(request) -> int:
    return zlib.crc32(f"{os.environ[_SEED]}:{request.node.nodeid}".encode())


@pytest.fixture
def rng(seed) -> np.random.Generator:
    return np.random.default_rng(seed)
