"""Everything here needs an NVIDIA GPU and the CUDA kernels: run with ``pytest -m gpu``."""

import jax
import pytest

from jax_wonly import _ffi


@pytest.fixture(autouse=True)
def gpu():
    """The GPU that the test runs on; skips, with the reason, where there is none."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"no GPU: {error}")
    reason = _ffi.ensure_registered()["cuda"]
    if reason is not None:
        pytest.skip(reason)
    with jax.default_device(device):
        yield device
