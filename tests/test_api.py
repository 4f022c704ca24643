"""The public API: everything in it is documented, and the examples of its docstrings run."""

import doctest
import importlib
import inspect
import pkgutil
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_wonly as jw
from jax_wonly import compat

for needed in ("flax", "flatbuffers", "safetensors"):
    pytest.importorskip(needed)
from flax import linen, nnx  # noqa: E402

MODULES = [
    "jax_wonly",
    *(f"jax_wonly.{name}" for name in ("algorithms", "algorithms.nnx", "checkpoint", "checkpoint.nnx", "compat")),
    *(f"jax_wonly.{name}" for name in ("linen", "nnx", "progress", "static")),
    *(f"jax_wonly.compat.{found.name}" for found in pkgutil.iter_modules(compat.__path__) if found.name[0] != "_"),
]
NAMES = {"jax": jax, "jnp": jnp, "np": np, "nnx": nnx, "linen": linen, "jw": jw}  # those that docs/api/index.md has
NEVER_RAISE = (jw.checkpoint_policy,)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.REPORT_NDIFF


def public(module):
    """The functions and classes of a module by name."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    values = {name: getattr(module, name) for name in names if not name.startswith("_")}
    return {name: value for name, value in values.items() if inspect.isroutine(value) or inspect.isclass(value)}


def methods(cls):
    """The public methods and properties that a class defines itself, as functions."""
    for name, value in vars(cls).items():
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not name.startswith("_") and inspect.isfunction(value) and value.__module__ == cls.__module__:
            yield name, value


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls", "_", "__")]


def lacks(value) -> list[str]:
    """What a docstring does not say."""
    text = inspect.getdoc(value) or ""
    if not text:
        return ["a docstring"]
    found = []
    if "Example:\n  >>> " not in text:
        found.append("an example")
    if inspect.isclass(value):
        init = vars(value).get("__init__")
        named = parameters(init) if init is not None and "Made by :func:" not in text else []
        named = [name for name in named if not (issubclass(value, linen.Module) and name in ("name", "parent"))]
        inner = dict(methods(value))
        inherited = {name: inspect.getdoc(getattr(value, name)) or "" for name in inner}
        found += [f"a docstring of {name}" for name in inner if not inherited[name]]
    else:
        named, inner, inherited = parameters(value), {}, {}
        if named and "Raises:" not in text and value not in NEVER_RAISE:
            found.append("what it raises")
    found += [f"the argument {name}" for name in named if not re.search(rf"\b{name}\b", text)]
    return found + [
        f"the argument {argument} of {name}"
        for name, method in inner.items()
        for argument in parameters(method)
        if not re.search(rf"\b{argument}\b", inherited[name] + text)
    ]


def test_a_lack_is_seen():
    def undocumented(argument):
        pass

    def half(argument):
        """Takes something.

        Example:
          >>> half(1)
        """

    assert lacks(undocumented) == ["a docstring"]
    assert lacks(half) == ["what it raises", "the argument argument"]


@pytest.mark.parametrize("name", MODULES)
def test_everything_is_documented(name):
    module = importlib.import_module(name)
    assert module.__doc__
    missing = {key: found for key, value in public(module).items() if (found := lacks(value))}
    assert not missing


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    if name == "jax_wonly.compat.qwix":
        pytest.importorskip("qwix")
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(recurse=False)
    values = {name: module} | {f"{name}.{key}": value for key, value in public(module).items()}
    for key, value in list(values.items()):
        if inspect.isclass(value):
            values |= {f"{key}.{inner}": method for inner, method in methods(value)}
    report: list[str] = []
    failed = attempted = 0
    for key, value in values.items():
        for test in finder.find(value, key, module=False, globs=dict(NAMES)):
            result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append)
            failed, attempted = failed + result.failed, attempted + result.attempted
    assert not failed, "".join(report)
    assert attempted or not public(module)
