"""A few examples of what ``python tests/reliability fuzz`` checks with many, of all that runs on a GPU."""

import pytest

pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")

from reliability import fuzz  # noqa: E402
from test_reliability import FACTOR, check_property  # noqa: E402

# The module asks JAX for its backend, which an emulator's is not.
pytestmark = [pytest.mark.gpu, pytest.mark.device]

ON_HOST = {"bad arguments", "bytes of files", "headers of files", "weights in files"}


@pytest.mark.parametrize("name", [name for name in fuzz.PROPERTIES if name not in ON_HOST])
def test_property(name):
    check_property(name, 2 * FACTOR)
