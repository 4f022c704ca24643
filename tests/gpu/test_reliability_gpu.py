"""A few examples of what ``python tests/reliability fuzz`` checks with many, of all that runs on a GPU."""

import hypothesis
import pytest

pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")

from reliability import fuzz  # noqa: E402
from test_reliability import FACTOR  # noqa: E402

# The module asks JAX for its backend, which an emulator's is not.
pytestmark = [pytest.mark.gpu, pytest.mark.device]

ON_HOST = {"bad arguments", "bytes of files", "headers of files", "weights in files"}


@pytest.mark.parametrize("name", [name for name in fuzz.PROPERTIES if name not in ON_HOST])
def test_property(name):
    _, check, strategies = fuzz.PROPERTIES[name]
    examples = max(1, round(FACTOR * (40 if name in fuzz.QUICK else 4)))
    hypothesis.settings(max_examples=examples)(hypothesis.given(**strategies)(check))()
