"""Loads the compiled modules and registers their custom-call handlers.

``JAX_WONLY_IMPLEMENTATION`` in the environment (``xla``, ``cpu``, ``cuda`` or ``dequantize``) overrides
``implementation=None`` of every operation at the time it is traced.
"""

import functools
import importlib
import os
import re
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.export
import jax.ffi
from jaxlib.version import __version__ as jaxlib_version

from jax_wonly import _abi
from jax_wonly._validate import check_choice

# XLA's custom-call platform names for the two modules.
PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}
IMPLEMENTATIONS = ("xla", "cpu", "cuda", "dequantize")
SLOW_BUILD = "built with JAX_WONLY_CUDA_QUICK, without most optimizations: slow"

_lock = threading.Lock()
_reasons: dict[str, str | None] | None = None
_warned: set[str] = set()


@dataclass(frozen=True)
class Status:
    """What can run here: what :func:`status` returns; ``str`` gives three lines.

    Attributes:
      cpu, cuda: whether the platform's kernels are registered.
      cpu_reason, cuda_reason: why they are not, or None.
      cuda_quick: whether the CUDA kernels were compiled without most optimizations, by ``JAX_WONLY_CUDA_QUICK``: right
        but slow.
      jaxlib: the version of the running jaxlib.
      ffi_api: that of its FFI API, such as ``(0, 4)``.

    Example:
      >>> status = jw.status()
      >>> status.cpu, status.cpu_reason
      (True, None)
    """

    cpu: bool
    cuda: bool
    cpu_reason: str | None
    cuda_reason: str | None
    cuda_quick: bool
    jaxlib: str
    ffi_api: tuple[int, int]

    def __str__(self) -> str:
        def line(name: str, ok: bool, reason: str | None, more: str = "") -> str:
            return f"{name}: {f'kernels registered{more}' if ok else f'XLA implementation ({reason})'}"

        api = ".".join(map(str, self.ffi_api))
        return "\n".join(
            (
                f"jaxlib {self.jaxlib} (FFI API {api})",
                line("cpu", self.cpu, self.cpu_reason),
                line("cuda", self.cuda, self.cuda_reason, f" ({SLOW_BUILD})" if self.cuda_quick else ""),
            )
        )


@functools.cache
def runtime_ffi_api() -> tuple[int, int]:
    """The FFI API version of the running jaxlib, read from the header that it ships."""
    text = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    if not all(found):
        raise ImportError(
            f"jax_wonly cannot read the FFI API version of jaxlib {jaxlib_version}; install jax 0.9.1 or newer."
        )
    major, minor = (int(m.group(1)) for m in found if m)
    return major, minor


def _api_mismatch(module: str, built: tuple[int, int]) -> str | None:
    """Why a binary built against FFI API ``built`` may not be registered here, or None where it may."""
    major, minor = runtime_ffi_api()
    # A runtime refuses handlers of a newer API, and a refused CPU handler leaves JAX without its CPU backend.
    if built[0] == major and built[1] <= minor:
        return None
    return (
        f"{module} was built against XLA FFI API {built[0]}.{built[1]}, but jaxlib {jaxlib_version} has "
        f"{major}.{minor}: upgrade jax, or rebuild jax_wonly against this jaxlib (pip install --no-build-isolation)"
    )


def _load(platform: str) -> str | None:
    """Registers one module's handlers; returns why it could not, or None."""
    name = f"jax_wonly._{platform}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        how = " (build with JAX_WONLY_CUDA=ON)" if platform == "cuda" else ""
        return f"{name} is not part of this installation{how}"
    except ImportError as error:
        return f"{name} does not load: {error}"
    mismatch = _api_mismatch(name, tuple(module.ffi_api_version()))
    if mismatch:
        if platform == "cpu":
            raise ImportError(mismatch)
        return mismatch
    for target, handler in module.registrations().items():
        jax.ffi.register_ffi_target(target, handler, platform=PLATFORMS[platform], api_version=1)
    return None


def ensure_registered() -> dict[str, str | None]:
    """Registers what is installed, once; returns for each platform why its kernels are unavailable, or None.

    Raises:
      ImportError: the CPU binary was built against a newer FFI API than the running jaxlib has.
    """
    global _reasons
    if _reasons is None:
        with _lock:
            if _reasons is None:
                _reasons = {platform: _load(platform) for platform in PLATFORMS}
    return _reasons


def status() -> Status:
    """Says which platforms have compiled kernels here, and why the others do not.

    Example:
      >>> print(jw.status())
      jaxlib ... (FFI API ...)
      cpu: kernels registered
      cuda: ...
    """
    reasons = ensure_registered()
    return Status(
        cpu=reasons["cpu"] is None,
        cuda=reasons["cuda"] is None,
        cpu_reason=reasons["cpu"],
        cuda_reason=reasons["cuda"],
        cuda_quick=reasons["cuda"] is None and importlib.import_module("jax_wonly._cuda").quick(),
        jaxlib=jaxlib_version,
        ffi_api=runtime_ffi_api(),
    )


def resolve_implementation(implementation: str | None) -> str | None:
    """Checks ``implementation`` and applies the environment's override to ``None``."""
    name = "implementation"
    if implementation is None:
        implementation = os.environ.get("JAX_WONLY_IMPLEMENTATION") or None
        name = "JAX_WONLY_IMPLEMENTATION"
    check_choice(name, implementation, (None, *IMPLEMENTATIONS))
    return implementation


def gpu_here() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def use_native(implementation: str | None, platform: str) -> bool:
    """Whether an operation lowered for ``platform`` calls the compiled kernels; otherwise it uses XLA's operations.

    Warns once when it has to fall back on a platform that is present.

    Raises:
      ValueError: ``implementation`` names another platform's kernels, or kernels that are not installed.
    """
    if implementation == "xla":
        return False
    if implementation in PLATFORMS and implementation != platform:
        raise ValueError(
            f"jax_wonly: implementation={implementation!r} was asked for, but the computation is lowered for "
            f"{platform!r}; accepted there: None, {platform!r}, 'dequantize', 'xla'."
        )
    if platform not in PLATFORMS:
        return False
    reason = ensure_registered()[platform]
    if reason is None:
        return True
    present = platform == "cpu" or gpu_here()
    if implementation == platform:
        if present:
            raise ValueError(f"jax_wonly: implementation={implementation!r} is not available: {reason}.")
        return True  # lowered here (jax.export) to run where the kernels are installed
    if present:
        with _lock:
            first = platform not in _warned
            _warned.add(platform)
        if first:
            warnings.warn(
                f"jax_wonly: no compiled kernels for {platform!r}, using the slower XLA implementation: {reason}.",
                RuntimeWarning,
                stacklevel=2,
            )
    return False


def export_disabled_checks() -> list:
    """The ``disabled_checks=`` that ``jax.export.export`` needs for programs which call this package's kernels.

    The calls are versioned: a serialised program runs wherever ``jax_wonly`` of the same interface version is imported.

    Example:
      >>> qt = jw.quantize(jnp.ones((128, 64)))
      >>> checks = jw.export_disabled_checks()
      >>> program = jax.export.export(jax.jit(jw.matmul), disabled_checks=checks)(jnp.ones((4, 128)), qt)
      >>> data = program.serialize()
      >>> jax.export.deserialize(data).call(jnp.ones((4, 128)), qt).shape
      (4, 64)
    """
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in _abi.TARGETS]
