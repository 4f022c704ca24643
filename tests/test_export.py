"""jax.export: programs made on a CPU machine for both platforms, symbolic sizes, gradients, another process."""

import subprocess
import sys
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from reference import MODES, assert_product, random_weight, random_x

import jax_wonly as jw

SERIALIZES = pytest.mark.skipif(find_spec("flatbuffers") is None, reason="flatbuffers is not installed")
CALL = "custom_call @wonly_matmul_v1"


def exported(f, *args, platforms=("cpu",)):
    return export.export(jax.jit(f), platforms=platforms, disabled_checks=jw.export_disabled_checks())(*args)


def test_checks_are_needed(rng):
    weight = random_weight(rng, 64, 9, group_size=32)
    x = random_x(rng, (3, 64))
    with pytest.raises(ValueError, match="wonly_matmul_v1"):
        export.export(jax.jit(jw.matmul))(x, weight.qt)


@pytest.mark.parametrize("mode", MODES)
def test_cuda_from_cpu(rng, mode):
    weight = random_weight(rng, 64, 70, bits=8, group_size=32, mode=mode, lead=(3,))
    x = random_x(rng, (5, 3, 2, 64), "bfloat16")

    def f(x, qt):
        return jw.matmul(x, qt, activation="silu", implementation="cuda")

    text = exported(f, x, weight.qt, platforms=("cuda",)).mlir_module()
    assert text.count(CALL) == 1
    assert "tensor<3x10x64xbf16>" in text.split(CALL)[1].split("\n")[0]

    def quantizes(w):
        return jw.quantize(w, group_size=32, mode=mode, implementation="cuda")

    text = exported(quantizes, jnp.ones((64, 70)), platforms=("cuda",)).mlir_module()
    assert text.count("custom_call @wonly_quantize_v1") == 1


@SERIALIZES
def test_symbolic_rows_on_both_platforms(rng):
    weight = random_weight(rng, 64, 70, group_size=32, mode="integer_zeros")
    (m,) = export.symbolic_shape("m")
    shape = jax.ShapeDtypeStruct((m, 64), jnp.float32)
    program = exported(jw.matmul, shape, weight.qt, platforms=("cpu", "cuda"))
    program = export.deserialize(program.serialize())
    for rows in (1, 7, 40):
        x = random_x(rng, (rows, 64))
        assert_product(program.call(x, weight.qt), x, weight)


@SERIALIZES
def test_gradient_of_an_exported_program(rng):
    weight = random_weight(rng, 64, 9, group_size=32)
    x = random_x(rng, (3, 64))
    program = exported(lambda x: jw.matmul(x, weight.qt), x)
    program = export.deserialize(program.serialize(vjp_order=1))
    dx = jax.grad(lambda x: program.call(x).sum())(x)
    np.testing.assert_allclose(dx, np.tile(weight.dense.sum(1), (3, 1)), rtol=1e-4, atol=1e-4)


@SERIALIZES
def test_another_process(rng, tmp_path):
    """Importing the package is all that a process needs to run a serialised program."""
    weight = random_weight(rng, 64, 9, group_size=32)
    x = random_x(rng, (3, 64))
    program = exported(lambda x: jw.matmul(x, weight.qt), x)
    (tmp_path / "program").write_bytes(program.serialize())
    np.save(tmp_path / "x.npy", np.asarray(x))
    np.save(tmp_path / "y.npy", np.asarray(jw.matmul(x, weight.qt)))
    script = (
        "import sys, numpy as np, jax.export, jax_wonly\n"
        "d = sys.argv[1]\n"
        "p = jax.export.deserialize(bytearray(open(d + '/program', 'rb').read()))\n"
        "np.testing.assert_array_equal(p.call(np.load(d + '/x.npy')), np.load(d + '/y.npy'))\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=120)
