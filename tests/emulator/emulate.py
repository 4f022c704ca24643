"""Runs the GPU tests on a CPU, which interprets the kernels' PTX, where ``JAX_WONLY_EMULATED`` is the path of the
module ``_emulated``: ``.ci/emulate`` builds it with nvcc and runs them.

An emulated kernel computes what an H100 would, many thousand times slower. The interpreter stops at accesses outside of
a call's arrays and of shared memory, at accesses that are not aligned, at barriers that do not add up, at kernels that
never end; what nobody has written is NaN; and copies that go on beside instructions, products, and the order of warps,
CTAs and overlapping kernels are drawn from a seed (``JAX_WONLY_TEST_SEED``), so that a missing wait shows.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
from functools import partial
from pathlib import Path

_MODULES = (
    "static",
    "primitives.activations",
    "primitives.conv",
    "primitives.dequantize",
    "primitives.experts",
    "primitives.matmul",
    "primitives.quantize",
    "primitives.quantized_matmul",
    "primitives.scales_gradient",
)


def _load(name: str, path: Path):
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def install(path: Path):
    """Has every operation on this process's CPU call the CUDA kernels of the module at ``path``; returns the module."""
    emulated = _load("_emulated", path)
    assert "jax_wonly" not in sys.modules, "jax_wonly has registered its own handlers"
    # The handlers take the place of those that XLA's CPU has; tests call the other functions of that module.
    package = importlib.util.find_spec("jax_wonly")
    assert package is not None and package.submodule_search_locations is not None
    module = _load("jax_wonly._cpu", next(Path(package.submodule_search_locations[0]).glob("_cpu.*so")))
    vars(module)["registrations"] = emulated.registrations
    sys.modules["jax_wonly._cpu"] = module
    import jax
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    from jax_wonly import _explain, _ffi

    _ffi.ensure_registered()["cuda"] = None
    calls = emulated.registrations()
    for name in _MODULES:
        module = importlib.import_module(f"jax_wonly.{name}")
        primitives = (value for value in vars(module).values() if isinstance(value, Primitive))
        (primitive,) = (p for p in primitives if f"{p.name}_v1" in calls)
        evaluate = partial(module._evaluate, platform="cuda")
        rule = mlir.lower_fun(evaluate, multiple_results=primitive.multiple_results)
        mlir.register_lowering(primitive, rule, platform="cpu")
    devices = jax.devices
    jax.devices = lambda backend=None: devices(None if backend in ("cuda", "gpu") else backend)
    _explain._platform_of = lambda x: "cuda"
    return emulated
