"""jax.export: programs made on a CPU machine for both platforms, symbolic sizes, gradients, another process."""

import dataclasses
import subprocess
import sys
from functools import partial
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


@pytest.mark.parametrize(
    ("scales", "zeros"), [("bfloat16", "float32"), ("float32", "float16"), ("bfloat16", "bfloat16")]
)
def test_types_of_parameters_on_cuda(rng, scales, zeros):
    """Kernels take scales and float zeros of one type: float32 where they differ."""
    weight = random_weight(
        rng, 64, 70, group_size=32, mode="float_zeros", scale_dtype=scales, shift_dtype=zeros, lead=(3,)
    )
    x, sizes = random_x(rng, (5, 64), "bfloat16"), jnp.array([1, 1, 3], jnp.int32)
    matmul, ragged_dot = (partial(f, implementation="cuda") for f in (jw.matmul, jw.ragged_dot))
    expected = zeros if scales == zeros else "float32"
    for text in (
        exported(matmul, x, weight.qt, platforms=("cuda",)).mlir_module(),
        exported(ragged_dot, x, weight.qt, sizes, platforms=("cuda",)).mlir_module(),
    ):
        (call,) = (line for line in text.splitlines() if "custom_call @wonly_" in line)
        assert call.count({"float32": "tensor<3x2x70xf32>", "bfloat16": "tensor<3x2x70xbf16>"}[expected]) == 2, call


@pytest.mark.parametrize(
    "precision", [None, "high", "default", "bfloat16", ("default", "fastest"), ("default", "high")]
)
def test_rounded_activations_on_cuda(rng, precision):
    """float32 activations are rounded only where that is asked for, and results are float32 whatever happens."""
    weight = random_weight(rng, 512, 256, group_size=128, lead=(9,)).qt
    x, dy = (jnp.zeros((4096, size)) for size in (512, 256))
    sizes, pixels = jnp.full(9, 455, jnp.int32), jnp.zeros((32, 14, 14, 512))
    options = {"precision": precision, "implementation": "cuda"}
    taps = jax.tree.map(lambda a: a.reshape(3, 3, *a.shape[1:]), weight)
    layout = ("NHWC", "HWIO", "NHWC")

    def gradient(product):
        return lambda dy, *others: jax.linear_transpose(lambda x: product(x, *others), x)(dy)[0]

    def ragged(x, qt):
        return jw.ragged_dot(x, qt, sizes, **options)

    def convolution(x, qt):
        return jw.conv_general_dilated(x, qt, (1, 1), "SAME", dimension_numbers=layout, **options)

    def of_scales(x, qt):
        def loss(scales):
            return jw.matmul(x, dataclasses.replace(qt, scales=scales), **options).sum()

        return jax.grad(loss)(qt.scales)

    def matmul(x, qt):
        return jw.matmul(x, qt, **options)

    one = weight[0]
    products = (matmul, x, one), (gradient(matmul), dy, one), (ragged, x, weight), (gradient(ragged), dy, weight)
    rounds = precision not in (None, "high", ("default", "high"))
    for f, *operands in products:
        text = exported(f, *operands, platforms=("cuda",)).mlir_module()
        (call,) = (line for line in text.splitlines() if "custom_call @wonly_" in line)
        rows, inputs = operands[0].shape
        assert (f"tensor<{'1x' * (operands[1] is one)}{rows}x{inputs}xbf16>" in call) == rounds, call
        assert "xbf16" not in call.split("->")[1]
    if rounds:
        text = exported(convolution, pixels, taps, platforms=("cuda",)).mlir_module()
        (call,) = (line for line in text.splitlines() if "custom_call @wonly_" in line)
        assert "tensor<32x14x14x512xbf16>" in call and "tensor<32x14x14x256xf32>" in call.split("->")[1]
    else:
        with pytest.raises(ValueError, match="no kernel for this convolution"):
            exported(convolution, pixels, taps, platforms=("cuda",))
    text = exported(of_scales, x, one, platforms=("cuda",)).mlir_module()
    (call,) = (line for line in text.splitlines() if "custom_call @wonly_scales_gradient" in line)
    assert ("tensor<1x4096x512xbf16>" in call) == rounds and ("x512xf16>" in call) != rounds


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
@pytest.mark.parametrize("product", ["ids", "sizes"])
def test_symbolic_rows_of_experts(rng, product):
    weight = random_weight(rng, 64, 70, group_size=32, mode="offsets", lead=(4,))
    (m,) = export.symbolic_shape("m")

    def f(x, qt, rows):
        if product == "sizes":
            return jw.ragged_dot(x, qt, rows)
        return jw.gather_matmul(x[:, None], qt, rows, activation="relu")

    rows_shape = (m, 2) if product == "ids" else (4,)
    shapes = jax.ShapeDtypeStruct((m, 64), jnp.float32), jax.ShapeDtypeStruct(rows_shape, jnp.int32)
    program = exported(f, shapes[0], weight.qt, shapes[1], platforms=("cpu", "cuda"))
    program = export.deserialize(program.serialize())
    for size in (1, 7, 40):
        x = random_x(rng, (size, 64))
        ids = np.sort(rng.integers(0, 4, size))
        rows = np.bincount(ids, minlength=4) if product == "sizes" else np.stack([ids, 3 - ids], 1)
        rows = jnp.asarray(rows, jnp.int32)
        y = program.call(x, weight.qt, rows)
        np.testing.assert_array_equal(y, f(x, weight.qt, rows))
        exact = np.einsum("mk,mkn->mn", np.asarray(x, np.float64), weight.dense[ids])
        first = y if product == "sizes" else y[:, 0]
        np.testing.assert_allclose(first, exact if product == "sizes" else np.maximum(exact, 0), rtol=1e-4, atol=1e-3)


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
    """Importing the package is all that a process needs to run a serialised program of symbolic size."""
    weight = random_weight(rng, 64, 64, group_size=32, lead=(3,))
    (m,) = export.symbolic_shape("m")

    def f(x, ids):
        y = jw.matmul(x, weight.qt[0])
        return jw.gather_matmul(y, weight.qt, ids)

    shapes = jax.ShapeDtypeStruct((m, 64), jnp.float32), jax.ShapeDtypeStruct((m,), jnp.int32)
    (tmp_path / "program").write_bytes(exported(f, *shapes).serialize())
    for i, rows in enumerate((3, 8)):
        x, ids = random_x(rng, (rows, 64)), jnp.asarray(rng.integers(0, 3, rows), jnp.int32)
        np.savez(tmp_path / f"{i}.npz", x=x, ids=ids, y=f(x, ids))
    script = (
        "import sys, jax_wonly\n"
        "import jax.export, numpy as np\n"
        "d = sys.argv[1]\n"
        "p = jax.export.deserialize(bytearray(open(d + '/program', 'rb').read()))\n"
        "for i in range(2):\n"
        "    a = np.load(f'{d}/{i}.npz')\n"
        "    np.testing.assert_array_equal(p.call(a['x'], a['ids']), a['y'])\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=120)


def test_every_call_may_be_exported():
    """The public list of checks to leave out names every call that the handlers know."""
    from jax_wonly import _cpu

    names = " ".join(map(str, jw.export_disabled_checks()))
    assert all(name in names for name in _cpu.registrations())
