"""The cost models of the CUDA kernels: their files, the header made of them, and how they are fitted."""

import importlib.util
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jax_wonly import _cuda_costs

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def fit_costs():
    spec = importlib.util.spec_from_file_location("fit_costs", ROOT / "benchmarks" / "fit_costs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("architecture", [90, 80])
def test_choices_are_nearly_the_fastest(fit_costs, architecture):
    """The numbers in the tree are those that fit the measurements in the tree."""
    record = json.loads(fit_costs.RECORDS[architecture].read_text())
    cases = list(fit_costs.products(record))
    _, ratios = fit_costs.judge(_cuda_costs.read(architecture), cases)
    assert len(ratios) == len(cases) > 200
    assert sum(ratios) / len(ratios) < 1.008 and max(ratios) < 1.14


def test_choices_for_random_products(fit_costs):
    """Nor are those for products of any shape and scheme much slower than the fastest."""
    record = json.loads(fit_costs.RANDOM_RECORD.read_text())
    cases = list(fit_costs.products(record))
    _, ratios = fit_costs.judge(_cuda_costs.read(90), cases)
    assert len(ratios) > 800
    assert sum(ratios) / len(ratios) < 1.012 and sum(ratio > 1.05 for ratio in ratios) < 0.07 * len(ratios)
    assert max(ratios) < 1.25


def test_heights_of_some_schemes():
    """No scheme is offered a tile that `launch_tokens` in `matmul_warpgroup.cuh` has no kernel for."""
    numbers = _cuda_costs.warpgroups_of(_cuda_costs.read(90)["warpgroup"])
    offered = set()
    for bits, ends, zeros, floats in itertools.product((4, 8), (1, 2, 4), (False, True), (False, True)):
        scheme = _cuda_costs.Scheme(bits, ends, zeros, floats)
        for (tokens, warpgroups, cluster, _), _ in _cuda_costs.warpgroup_times(
            100, 4096, 4096, 1, scheme, 132, numbers
        ):
            offered.add(((tokens, warpgroups), bits, ends > 1, zeros))
            assert cluster in (1, _cuda_costs.EVENLY) or warpgroups != 3
    schemes = {tile: {row[1:] for row in offered if row[0] == tile} for tile, *_ in offered}
    all_schemes, few = set(itertools.product((4, 8), (False, True), (False, True))), {(4, False, False)}
    for tokens in (80, 120, 144, 160):
        assert schemes[tokens, 2] == few
    for tokens in (96, 112, 128, 152):
        assert schemes[tokens, 2] == all_schemes
    assert schemes[176, 2] == {row for row in all_schemes if row[0] == 4}
    large_groups = schemes[176, 2] | {(8, False, False), (8, False, True)}
    for tokens in (104, 136):
        assert schemes[tokens, 2] == large_groups
    for tokens in (96, 128, 152, 176, 192):
        assert schemes[tokens, 3] == all_schemes
    assert schemes[64, 3] == {(4, False, False), (4, False, True)}
    assert schemes[120, 3] == schemes[176, 2] | {(8, False, False)}
    assert schemes[184, 3] == large_groups
    for tokens in (72, 200, 216):
        assert schemes[tokens, 3] == schemes[176, 2]


def test_fit_finds_what_was_measured(fit_costs):
    """From numbers that are far off, against times that a model with known numbers made."""
    truth = _cuda_costs.read(80)
    cases = []
    for m, k, n in [(17, 4096, 4096), (64, 8192, 2048), (200, 1024, 8192), (1024, 4096, 4096), (48, 11008, 4096)]:
        of = fit_costs.expected({"bits": 4, "mode": "symmetric", "group_size": 128}, k, n, m)
        cases.append((dict(of(truth)), of))
    file = _cuda_costs.read(80)
    for place in list(fit_costs.numbers_of(file)):
        fit_costs.put(
            file, place, 1.3 * fit_costs.get(file, place) if place[-1] == "start" else 0.8 * fit_costs.get(file, place)
        )
    before, _ = fit_costs.judge(file, cases)
    fit_costs.fit(file, cases)
    after, ratios = fit_costs.judge(file, cases)
    assert after < 0.05 * before and max(ratios) < 1.02
    assert json.loads(fit_costs.text(file)) == file


def test_header_has_every_number(tmp_path):
    command = [sys.executable, ROOT / "ffi" / "cuda" / "costs.py", tmp_path]
    subprocess.run(command, check=True)
    header = tmp_path / "cuda" / "costs.h"
    numbers = [float(number) for number in re.findall(r"(?<![\w.])\d[\d.]*(?:e[+-]?\d+)?", header.read_text())]

    def values(value):
        if isinstance(value, dict | list):
            for inner in value.values() if isinstance(value, dict) else value:
                yield from values(inner)
        elif not isinstance(value, str):
            yield float(value)

    for architecture in (90, 80):
        file = _cuda_costs.read(architecture)
        file.pop("measured")
        for kernel in ("decode", "resident"):
            file.get(kernel, {}).pop("tokens", None)  # the kernel itself says how many it has
        for value in values(file):
            assert value in numbers
            numbers.remove(value)
    written = header.stat().st_mtime_ns
    subprocess.run(command, check=True)
    assert header.stat().st_mtime_ns == written  # nothing need be compiled again
