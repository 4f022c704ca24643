"""The command line on a GPU, and what ``explain`` says about one."""

import json

import jax
import jax.numpy as jnp
import pytest

import jax_wonly as jw
from jax_wonly._timing import Calls
from jax_wonly.cli import main

pytestmark = [pytest.mark.gpu, pytest.mark.device]


def test_doctor(tmp_path):
    assert main(["doctor", "--json", str(tmp_path / "d.json")]) == 0
    rows = json.loads((tmp_path / "d.json").read_text())["results"]
    kernels = {row["variant"] for row in rows if row["platform"] == "cuda" and row["target"] == "wonly_matmul_v1"}
    expected = "matmul_decode, matmul_resident, matmul_stream, matmul_tiled, matmul_warpgroup"
    if jax.devices()[0].compute_capability == "9.0":
        assert kernels == {expected}


@pytest.mark.parametrize("options", [{}, {"bits": 8}, {"mode": "offsets"}, {"group_size": 32}])
@pytest.mark.parametrize("shape", [(1024, 512), (4096, 14336)])
def test_explain_names_the_kernel_that_runs(shape, options):
    k, n = shape
    qt = jax.jit(lambda w: jw.quantize(w, **options))(jax.random.normal(jax.random.key(0), (k, n), jnp.bfloat16))
    for m in (1, 3, 8, 16, 100, 5000):
        x = jnp.ones((m, k), jnp.bfloat16)
        found = jw.explain(x, qt)
        assert found.platform == "cuda"
        calls = Calls(jw.matmul, [(x, qt)])
        calls.measure(2)
        if found.path == "kernel":
            # The name of matmul_stream in the module is stream_matmul.
            assert found.kernel and f"{found.kernel.removeprefix('matmul_')}_matmul" in calls.kernel, (m, calls.kernel)
        else:
            assert "dequantize" in calls.kernel, (m, calls.kernel)


def test_bench(tmp_path):
    words = ["--shapes", "2048x1024", "--rows", "1", "40", "--json", str(tmp_path / "b.json")]
    assert main(["bench", *words]) == 0
    for row in json.loads((tmp_path / "b.json").read_text())["rows"]:
        assert min(row["us"], row["dense_us"], row["xla_us"]) > 0 and row["kernel"]
