"""A few examples of every property that ``python tests/reliability fuzz`` checks with many."""

import os

import hypothesis
import pytest

pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")

from reliability import fuzz  # noqa: E402

FACTOR = float(os.environ.get("JAX_WONLY_FUZZ_FACTOR", "1"))


def check_property(name, factor):
    _, check, strategies = fuzz.PROPERTIES[name]
    examples = max(1, round(factor * (20 if name in fuzz.QUICK else 2)))
    hypothesis.settings(max_examples=examples)(hypothesis.given(**strategies)(check))()


@pytest.mark.parametrize("name", list(fuzz.PROPERTIES))
def test_property(name):
    check_property(name, FACTOR)
