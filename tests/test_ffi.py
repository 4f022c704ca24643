"""Loading, version check, fallback: each in a process of its own where the state of the package matters."""

import os
import subprocess
import sys
import textwrap
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import jax_wonly as jw
from jax_wonly import _ffi


def run(script: str, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


# A module that stands in for a compiled one.
FAKE = """
    import sys, types
    def fake(name, version):
        module = types.ModuleType(name)
        module.ffi_api_version = lambda: version
        def registrations():
            raise SystemExit("registered before the version was checked")
        module.registrations = registrations
        sys.modules[name] = module
"""


def test_status():
    status = jw.status()
    assert status.cpu and status.cpu_reason is None
    assert status.jaxlib == jax.lib.__version__
    assert "cpu: kernels registered" in str(status)
    if not status.cuda:
        assert "cuda" in str(status) and status.cuda_reason
        assert not status.cuda_quick


@pytest.mark.parametrize("quick", [False, True])
def test_status_of_a_quick_build(monkeypatch, quick):
    """Who times kernels that were built to be compiled quickly is told so."""
    module = types.ModuleType("jax_wonly._cuda")
    monkeypatch.setattr(module, "quick", lambda: quick, raising=False)
    monkeypatch.setitem(sys.modules, "jax_wonly._cuda", module)
    monkeypatch.setattr(_ffi, "_reasons", _ffi.ensure_registered() | {"cuda": None})
    status = jw.status()
    assert status.cuda and status.cuda_quick == quick
    assert str(status).endswith("slow)" if quick else "cuda: kernels registered")


def test_runtime_api_version():
    major, minor = _ffi.runtime_ffi_api()
    assert (major, minor) >= (0, 3)


def test_registration_is_idempotent():
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: jw.ensure_registered(), range(32)))
    assert all(r is results[0] for r in results)


def test_cpu_binary_of_a_newer_api_is_an_import_error():
    result = run(FAKE + "    fake('jax_wonly._cpu', (0, 999))\n    import jax_wonly")
    assert result.returncode == 1
    last = result.stderr.strip().split("\n")[-1]
    assert last.startswith("ImportError: jax_wonly._cpu was built against XLA FFI API 0.999, but jaxlib")
    assert "upgrade jax, or rebuild jax_wonly" in last
    # JAX itself is unharmed: nothing was registered.
    result = run(
        FAKE
        + """
    fake('jax_wonly._cpu', (0, 999))
    try:
        import jax_wonly
    except ImportError:
        import jax
        print(jax.numpy.ones(3).sum())
    """
    )
    assert result.stdout.strip() == "3.0", result.stderr


def test_broken_cuda_binary_leaves_the_cpu():
    for broken in ("fake('jax_wonly._cuda', (0, 999))", "sys.modules['jax_wonly._cuda'] = None"):
        result = run(
            FAKE
            + f"""
    {broken}
    import numpy as np, jax_wonly as jw
    s = jw.status()
    print(s.cpu, s.cuda, s.cuda_reason)
    w = np.ones((64, 8), np.float32)
    print(float(jw.matmul(w.T, jw.quantize(w, group_size=64), implementation="cpu")[0, 0]))
    """
        )
        lines = result.stdout.strip().split("\n")
        assert lines[0].startswith("True False jax_wonly._cuda"), result.stderr
        assert lines[1] == "64.0"


def test_missing_cpu_binary_falls_back_with_one_warning():
    result = run(
        """
    import sys, warnings
    sys.modules["jax_wonly._cpu"] = None
    import numpy as np, jax_wonly as jw
    w = np.ones((64, 8), np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (1, 2, 3):
            y = jw.matmul(np.ones((rows, 64), np.float32), jw.quantize(w, group_size=64))
        assert float(y[0, 0]) == 64, y
    ours = [str(c.message) for c in caught if "jax_wonly" in str(c.message)]
    print(len(ours), ours)
    try:
        jw.matmul(w.T, jw.quantize(w, group_size=64), implementation="cpu")
    except ValueError as error:
        print(error)
    """
    )
    lines = result.stdout.strip().split("\n")
    assert lines[0].startswith("1 ") and "slower XLA implementation" in lines[0], result
    assert "implementation='cpu' is not available: jax_wonly._cpu is not part of this installation" in lines[1]


def test_gpu_without_a_cuda_binary_falls_back_with_one_warning(monkeypatch):
    monkeypatch.setattr(_ffi, "_reasons", {"cpu": None, "cuda": "the reason"})
    monkeypatch.setattr(_ffi, "gpu_here", lambda: True)
    monkeypatch.setattr(_ffi, "_warned", set())
    w = np.ones((64, 8), np.float32)
    qt = jw.quantize(w, group_size=64)

    def program(rows, **options):
        f = jax.jit(lambda x: jw.matmul(x, qt, **options))
        return jax.export.export(f, platforms=["cuda"])(np.ones((rows, 64), np.float32)).mlir_module()

    with pytest.warns(
        RuntimeWarning, match="no compiled kernels for 'cuda', using the slower XLA .*: the reason"
    ) as seen:
        for rows in (1, 2, 3):
            assert "custom_call" not in program(rows)
    assert len(seen) == 1
    with pytest.raises(ValueError, match="implementation='cuda' is not available: the reason"):
        program(4, implementation="cuda")
    # With no GPU here the program is meant for another machine: no warning, and the custom call if it is asked for.
    monkeypatch.setattr(_ffi, "gpu_here", lambda: False)
    monkeypatch.setattr(_ffi, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program(5)
    assert _ffi.use_native("cuda", "cuda")


def test_environment_override(monkeypatch):
    w = np.ones((64, 8), np.float32)
    qt = jw.quantize(w, group_size=64)

    def calls():
        return jax.jit(lambda x: jw.matmul(x, qt)).lower(w.T).as_text().count("wonly_matmul_v1")

    assert calls() == 1
    monkeypatch.setenv("JAX_WONLY_IMPLEMENTATION", "xla")
    assert calls() == 0
    monkeypatch.setenv("JAX_WONLY_IMPLEMENTATION", "cuda")
    with pytest.raises(ValueError, match="implementation='cuda' was asked for, but .* lowered for 'cpu'"):
        calls()
    monkeypatch.setenv("JAX_WONLY_IMPLEMENTATION", "tpu")
    with pytest.raises(ValueError, match="JAX_WONLY_IMPLEMENTATION='tpu' is not supported"):
        calls()
    monkeypatch.setenv("JAX_WONLY_IMPLEMENTATION", "")
    assert calls() == 1


def test_other_platforms_use_xla(rng):
    """A platform without kernels of ours gets XLA's operations, without a warning."""
    w = np.ones((64, 8), np.float32)
    qt = jw.quantize(w, group_size=64)
    program = jax.export.export(jax.jit(lambda x: jw.matmul(x, qt)), platforms=["tpu"])(w.T)
    assert "wonly_" not in program.mlir_module().split("loc")[0]
    assert "dot_general" in program.mlir_module() and "custom_call" not in program.mlir_module()


def test_old_jax_is_one_sentence():
    result = run(
        """
    import jax
    jax.__version_info__, jax.__version__ = (0, 9, 0), "0.9.0"
    import jax_wonly
    """
    )
    last = result.stderr.strip().split("\n")[-1]
    assert last == "ImportError: jax_wonly needs jax 0.9.1 or newer, and this is jax 0.9.0: pip install -U jax."


def test_public_names():
    for name in jw.__all__:
        assert getattr(jw, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = jw.nothing
