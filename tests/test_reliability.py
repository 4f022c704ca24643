"""A few examples of every property that ``python tests/reliability fuzz`` checks with many."""

import os

import hypothesis
import pytest

pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")

from reliability import fuzz  # noqa: E402

# Those that compile little are quick.
EXAMPLES = {"bad arguments": 40, "custom calls": 20, "bytes of files": 12, "headers of files": 20, "in_axes": 1}
FACTOR = float(os.environ.get("JAX_WONLY_FUZZ_FACTOR", "1"))


@pytest.mark.parametrize("name", list(fuzz.PROPERTIES))
def test_property(name):
    _, check, strategies = fuzz.PROPERTIES[name]
    examples = max(1, round(FACTOR * EXAMPLES.get(name, 2)))
    hypothesis.settings(max_examples=examples)(hypothesis.given(**strategies)(check))()
