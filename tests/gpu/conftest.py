"""Skips with the reason where there is no GPU, or no CUDA binary."""

import jax
import pytest

import jax_wonly as jw


def _missing() -> str | None:
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return f"no GPU backend: {error}"
    status = jw.status()
    return None if status.cuda else f"no CUDA kernels: {status.cuda_reason}"


@pytest.fixture(scope="session", autouse=True)
def _gpu():
    reason = _missing()
    if reason:
        pytest.skip(reason)
