"""Flax's convolutional layers with quantized kernels: what the dense ones compute with the dequantized kernel."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import random_x

import jax_wonly as jw

pytest.importorskip("flax")
from flax import linen, nnx  # noqa: E402

LAYERS = [
    {"kernel_size": (3, 3)},
    {"kernel_size": (3, 2), "strides": (2, 1), "padding": "VALID", "use_bias": False},
    {"kernel_size": (3, 3), "padding": "CIRCULAR", "kernel_dilation": 2},
    {"kernel_size": (3, 4), "padding": "REFLECT", "strides": 2},
    {"kernel_size": (3, 3), "padding": 1, "input_dilation": (2, 1)},
    {"kernel_size": (3, 3), "padding": (1, (2, 0)), "feature_group_count": 2},
    {"kernel_size": 3, "padding": "CAUSAL", "kernel_dilation": 2},
    {"kernel_size": (1, 1), "strides": None},
    {"kernel_size": (2, 3, 2), "padding": ((1, 0), (0, 1), (1, 1))},
]


def _image(rng, options, lead=(2,)):
    size = options["kernel_size"]
    spatial = (6, 5, 7)[: 1 if isinstance(size, int) else len(size)]
    return random_x(rng, (*lead, *spatial, 64 * options.get("feature_group_count", 1)))


@pytest.mark.parametrize("_", range(3))
def test_nnx(rng, seed, _):
    options = LAYERS[rng.integers(len(LAYERS))]
    x = _image(rng, options)
    dense = nnx.Conv(x.shape[-1], 6, rngs=nnx.Rngs(seed), **options)
    layer = jw.nnx.QuantizedConv.from_dense(dense, bits=8, group_size=32)
    dense.kernel[...] = layer.kernel.dequantize()
    if dense.bias is not None:
        dense.bias[...] = random_x(rng, (6,))
    for inputs in (x, x[0], jnp.stack([x, x + 1])) if options is LAYERS[0] else (x,):
        np.testing.assert_allclose(layer(inputs), dense(inputs), rtol=1e-4, atol=1e-4)
    fresh = jw.nnx.QuantizedConv(x.shape[-1], 6, bits=8, group_size=32, rngs=nnx.Rngs(seed), **options)
    np.testing.assert_array_equal(fresh.kernel.qvalue, layer.kernel.qvalue)
    assert jax.eval_shape(fresh, x).shape == jax.eval_shape(layer, x).shape


@pytest.mark.parametrize("_", range(3))
def test_linen(rng, seed, _):
    options = LAYERS[rng.integers(len(LAYERS))]
    x = _image(rng, options)
    model = linen.Conv(6, **options)
    params = model.init(jax.random.key(seed), x)["params"]
    layers = jw.linen.layers(model, {"params": params}, x)
    quantized, report = jw.linen.quantize(params, bits=8, group_size=32, layers=layers)
    assert [(layer.path, layer.type) for layer in report.layers] == [("", "Conv")] and not report.skipped
    dense = params | {"kernel": quantized["kernel"].dequantize()}
    for inputs in (x, x[0]) if options is LAYERS[0] else (x,):
        expected = model.apply({"params": dense}, inputs)
        np.testing.assert_allclose(jw.linen.apply(model, {"params": quantized}, inputs), expected, rtol=1e-4, atol=1e-4)
        layer = jw.linen.QuantizedConv(6, **options)
        np.testing.assert_allclose(layer.apply({"params": quantized}, inputs), expected, rtol=1e-4, atol=1e-4)
    drawn = jw.linen.QuantizedConv(6, bits=8, group_size=32, **options).init(jax.random.key(seed), x)["params"]
    assert drawn["kernel"].shape == quantized["kernel"].shape


class Model(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 64, (3, 3), rngs=rngs)
        self.body = nnx.List([nnx.Conv(64, 64, (3, 3), rngs=rngs) for _ in range(2)])
        self.masked = nnx.Conv(64, 8, (3, 3), mask=jnp.ones((3, 3, 64, 8)), rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for layer in self.body:
            x = nnx.relu(layer(x))
        return self.head(x.mean((1, 2))), self.masked(x)


def test_nnx_model(rng, seed):
    model = Model(nnx.Rngs(seed))
    x = random_x(rng, (1, 4, 4, 3))
    before = nnx.jit(Model.__call__)(model, x)
    report = jw.nnx.quantize(
        model, bits=8, group_size=64, predicate=lambda path, layer: {"bits": 4} if path == "body/1" else True
    )
    assert [(layer.path, layer.shape, layer.scheme) for layer in report.layers] == [
        ("body/0", (3, 3, 64, 64), "int8, per channel"),
        ("body/1", (3, 3, 64, 64), "int4, per channel"),
        ("head", (64, 10), "int8, per channel"),
    ]
    assert all(layer.relative_error < 0.2 for layer in report.layers)
    assert {layer.path: layer.reason for layer in report.skipped} == {
        "stem": "group_size=64 does not divide its 3 inputs",
        "masked": "it has a mask",
    }
    for a, b in zip(before, nnx.jit(Model.__call__)(model, x), strict=True):
        assert float(jnp.abs(a - b).max()) < 0.3 * float(jnp.abs(a).max())
    gradient = nnx.jit(nnx.grad(lambda model: sum(jnp.sum(y) for y in model(x))))(model)
    assert bool(jnp.abs(gradient["stem"]["kernel"][...]).max() > 0)
    assert "kernel" not in gradient["body"][0] and "bias" in gradient["body"][0]


def test_algorithms(rng, seed):
    """Calibrated methods take clip search for windows."""
    model = Model(nnx.Rngs(seed))
    x = random_x(rng, (1, 4, 4, 3))
    assert set(jw.algorithms.calibrate(model, [x]).counts) == {"head"}
    report = jw.algorithms.quantize_model(model, [x], method="gptq", group_size=64)
    assert [layer.path for layer in report.layers] == ["body/0", "body/1", "head"]
    assert [y.shape for y in jax.eval_shape(model, x)] == [(1, 10), (1, 4, 4, 8)]


def test_refusals(seed):
    dense = nnx.Conv(64, 8, (3, 3), conv_general_dilated=lambda *a, **k: None, rngs=nnx.Rngs(seed))
    with pytest.raises(ValueError, match="conv_general_dilated is not"):
        jw.nnx.QuantizedConv.from_dense(dense)
    with pytest.raises(ValueError, match="mask="):
        jw.nnx.QuantizedConv(64, 8, (3, 3), mask=jnp.ones(3), rngs=nnx.Rngs(seed))
    with pytest.raises(ValueError, match="CAUSAL"):
        jw.nnx.QuantizedConv(64, 8, (3, 3), group_size=64, padding="CAUSAL", rngs=nnx.Rngs(0))(jnp.ones((1, 4, 4, 64)))
    model = linen.Conv(8, (3, 3))
    x = jnp.ones((1, 4, 4, 64))
    params = model.init(jax.random.key(0), x)["params"]
    _, report = jw.linen.quantize(params, group_size=64)
    assert "pass layers" in report.skipped[0].reason
    layers = jw.linen.layers(model, {"params": params}, x)
    params, _ = jw.linen.quantize(params, group_size=64, layers=layers)
    with pytest.raises(ValueError, match=r"accepted for an input .*: \(3, 3, 32, 8\)"):
        jw.linen.apply(model, {"params": params}, x[..., :32])
    masked = dataclasses.replace(model, mask=jnp.ones((3, 3, 64, 8)))
    with pytest.raises(ValueError, match="it has a mask"):
        jw.linen.apply(masked, {"params": params}, x)
    with pytest.raises(ValueError, match=r"accepted: a quantized one \[..., 3, 3, 32, 8\]"):
        jw.linen.QuantizedConv(8, (3, 3)).apply({"params": params}, x[..., :32])
