"""Versions, devices, the compiled modules, and which kernels products run on here."""

import argparse
import importlib
import importlib.metadata
import os
import platform
import sys
from typing import Any

import jax
import jax.numpy as jnp

from jax_wonly import _ffi
from jax_wonly._explain import explain
from jax_wonly._quantize import quantize
from jax_wonly._timing import cpu_model
from jax_wonly._version import __version__
from jax_wonly.cli._common import coloured, print_table, write_json

_PACKAGES = ("jax", "jaxlib", "numpy", "flax", "safetensors")
_VARIABLES = ("JAX_PLATFORMS", "JAX_WONLY_IMPLEMENTATION", "JAX_WONLY_CPU_ISA", "CUDA_VISIBLE_DEVICES")
_ROWS = (1, 8, 64, 512, 4096)
_K = _N = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def gather() -> dict[str, Any]:
    """Everything that the command says."""
    versions = {"jax_wonly": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    status = _ffi.status()
    modules: dict[str, Any] = {}
    for name, reason in (("cpu", status.cpu_reason), ("cuda", status.cuda_reason)):
        modules[name] = found = {"registered": reason is None, "reason": reason}
        if reason is None:
            module = importlib.import_module(f"jax_wonly._{name}")
            found |= {"ffi_api": ".".join(map(str, module.ffi_api_version())), "calls": list(module.registrations())}
            if name == "cpu":
                found |= {"instruction_sets": module.isas(), "chosen": module.active_isa()}
            else:
                found |= {"architectures": list(module.architectures()), "quick": status.cuda_quick}
    devices = [
        {"platform": d.platform, "kind": cpu_model() if d.platform == "cpu" else d.device_kind} for d in jax.devices()
    ]
    if "cpu" not in {device["platform"] for device in devices}:
        devices.append({"platform": "cpu", "kind": cpu_model()})
    dtype = jnp.bfloat16
    qt = jax.eval_shape(quantize, jax.ShapeDtypeStruct((_K, _N), dtype))
    chosen = []
    for m in _ROWS:
        found = explain(jax.ShapeDtypeStruct((m, _K), dtype), qt)
        chosen.append({"m": m, "path": found.path, "kernel": found.kernel, "reason": found.reason})
    return {
        "versions": versions,
        "ffi_api": ".".join(map(str, status.ffi_api)),
        "default": jax.default_backend(),
        "devices": devices,
        "modules": modules,
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "chosen": {"k": _K, "n": _N, "dtype": "bfloat16", "scheme": "int4, group 128", "rows": chosen},
    }


def run(args: argparse.Namespace) -> int:
    facts = gather()
    if args.json:
        write_json("-", facts)
        return 0
    print(coloured("versions", "bold"))
    print("  " + ", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    print(f"  {platform.platform()}, {sys.executable}")
    print(coloured("devices", "bold"))
    kinds: dict[tuple[str, str], int] = {}
    for device in facts["devices"]:
        key = device["platform"], device["kind"]
        kinds[key] = kinds.get(key, 0) + 1
    for (name, kind), count in kinds.items():
        default = " (the default)" if name == facts["default"] else ""
        print(f"  {name}: {count} x {kind}{default}")
    print(coloured("compiled modules", "bold") + f" (XLA FFI API {facts['ffi_api']})")
    for name, module in facts["modules"].items():
        if not module["registered"]:
            print(f"  {name}: {coloured('none', 'yellow')}, XLA's operations instead: {module['reason']}")
            continue
        built = (
            f"instruction sets {', '.join(module['instruction_sets'])}; {module['chosen']} chosen"
            if name == "cpu"
            else f"architectures {', '.join(module['architectures'])}"
            + (f"; {_ffi.SLOW_BUILD}" if module["quick"] else "")
        )
        print(f"  {name}: {coloured('registered', 'green')}, {built}; {len(module['calls'])} custom calls")
    if facts["environment"]:
        print(coloured("environment", "bold"))
        for name, value in facts["environment"].items():
            print(f"  {name}={value}")
    chosen = facts["chosen"]
    print(coloured(f"products of {chosen['dtype']} [M, {_K}] with [{_K}, {_N}], {chosen['scheme']}", "bold"))
    rows = [[f"  {row['m']}", row["path"], row["kernel"] or "-", row["reason"]] for row in chosen["rows"]]
    print_table(("  M", "path", "kernel", "why"), rows)
    return 0
