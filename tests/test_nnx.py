"""Quantized Flax nnx layers and the in-place quantization of models."""

import json
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

import jax_wonly as jw  # noqa: E402
from jax_wonly.nnx import QuantizedLinear, QuantizedParam, quantize  # noqa: E402


def dense_product(x, layer: QuantizedLinear) -> np.ndarray:
    """The layer in float64 from its dequantized weight."""
    y = np.asarray(x, np.float64) @ np.asarray(jw.dequantize(layer.kernel, dtype=jnp.float32), np.float64)
    return y if layer.bias is None else y + np.asarray(layer.bias[...], np.float64)


def linear(k, n, seed=0, **options) -> "nnx.Linear":
    layer = nnx.Linear(k, n, rngs=nnx.Rngs(seed), **options)
    if layer.bias is not None:
        layer.bias[...] = jax.random.normal(jax.random.key(seed + 1), (n,), layer.bias[...].dtype)
    return layer


class Block(nnx.Module):
    def __init__(self, size, rngs):
        self.up = nnx.Linear(size, 2 * size, rngs=rngs)
        self.down = nnx.Linear(2 * size, size, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class Model(nnx.Module):
    """Linear layers in every kind of container, one of them held twice."""

    def __init__(self, rngs, size=128):
        self.embed = nnx.Embed(10, size, rngs=rngs)
        self.blocks = nnx.List([Block(size, rngs) for _ in range(3)])
        self.head = nnx.Sequential(nnx.Linear(size, 96, rngs=rngs), nnx.relu, nnx.Linear(96, 8, rngs=rngs))
        self.named = nnx.Dict(first=self.blocks[0].up)
        self.plain = nnx.data({"pair": (nnx.Linear(size, size, rngs=rngs), nnx.relu), "list": [self.blocks[1].up]})

    def __call__(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        for layer in self.plain["pair"]:
            x = layer(x)
        return self.head(x + (self.named.first(x) + self.plain["list"][0](x))[..., : x.shape[-1]])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("mode", ["symmetric", "integer_zeros", "offsets"])
@pytest.mark.parametrize("use_bias", [True, False])
def test_from_linear_computes_the_product_with_its_weight(bits, mode, use_bias):
    dense = linear(192, 70, use_bias=use_bias)
    layer = QuantizedLinear.from_linear(dense, bits=bits, group_size=64, mode=mode)
    x = jax.random.normal(jax.random.key(5), (3, 5, 192)) + 0.5
    y = layer(x)
    assert y.shape == (3, 5, 70) and y.dtype == jnp.float32
    np.testing.assert_allclose(y, dense_product(x, layer), rtol=1e-4, atol=1e-4)
    tolerance = 0.2 if bits == 4 else 0.02
    assert np.linalg.norm(y - dense(x)) < tolerance * np.linalg.norm(dense(x))
    assert (layer.zeros is not None, layer.offsets is not None) == (mode == "integer_zeros", mode == "offsets")
    assert layer.bias is dense.bias
    assert dense.kernel.shape == (192, 70)


@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("input_dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32])
@pytest.mark.parametrize("preferred", [None, jnp.float32])
def test_dtypes_promote_as_in_the_dense_layer(dtype, param_dtype, input_dtype, preferred):
    dense = linear(64, 64, dtype=dtype, param_dtype=param_dtype, preferred_element_type=preferred)
    layer = QuantizedLinear.from_linear(dense, bits=8, group_size=64)
    x = jnp.ones((2, 64), input_dtype)
    assert layer(x).dtype == dense(x).dtype


def test_constructor_is_the_dense_constructor_then_quantization():
    options = {"use_bias": True, "param_dtype": jnp.bfloat16, "bias_init": nnx.initializers.ones_init()}
    dense = nnx.Linear(128, 72, rngs=nnx.Rngs(3), **options)
    layer = QuantizedLinear(128, 72, bits=8, group_size=32, rngs=nnx.Rngs(3), **options)
    expected = QuantizedLinear.from_linear(dense, bits=8, group_size=32)
    for a, b in zip(jax.tree.leaves(nnx.state(layer)), jax.tree.leaves(nnx.state(expected)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("activation", ["relu", "relu6", "gelu", "silu"])
def test_activation_follows_the_bias(activation):
    layer = QuantizedLinear.from_linear(linear(64, 40), bits=8, group_size=64, activation=activation)
    x = 2 * jax.random.normal(jax.random.key(1), (7, 64))
    expected = getattr(jax.nn, activation)(jnp.asarray(dense_product(x, layer), jnp.float32))
    np.testing.assert_allclose(layer(x), expected, rtol=1e-4, atol=1e-4)


def test_constructor_refuses_what_it_would_ignore():
    with pytest.raises(ValueError, match="dot_general"):
        QuantizedLinear(64, 64, dot_general=lambda *a, **k: jax.lax.dot_general(*a, **k), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="kernel_metadata"):
        QuantizedLinear(64, 64, kernel_metadata={"note": 1}, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="Embed"):
        QuantizedLinear.from_linear(nnx.Embed(3, 64, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="group_size"):
        QuantizedLinear(100, 64, group_size=64, rngs=nnx.Rngs(0))


def test_quantize_replaces_every_layer_in_place():
    model = Model(nnx.Rngs(0))
    ids = jnp.arange(10)
    before = model(ids)
    bytes_before = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    report = quantize(model, bits=8, group_size=32)

    assert not any(isinstance(m, nnx.Linear) for _, m in nnx.iter_modules(model))
    assert len(report.layers) == 9
    assert model.named.first is model.blocks[0].up
    assert model.plain["list"][0] is model.blocks[1].up
    assert isinstance(model.plain["pair"][0], QuantizedLinear)
    assert np.linalg.norm(model(ids) - before) < 0.02 * np.linalg.norm(before)

    assert report.model_bytes_before == bytes_before
    assert report.model_bytes_after == sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    assert bytes_before - report.model_bytes_after == report.bytes_before - report.bytes_after
    assert [(s.path, s.type, s.shape) for s in report.skipped] == [("embed", "Embed", (10, 128))]
    assert all(0 < layer.relative_error < 0.01 for layer in report.layers)

    state = nnx.state(model)
    with pytest.raises(ValueError, match=r"quantized already \(9 layers: blocks/0/down, "):
        quantize(model)
    jax.tree.map(np.testing.assert_array_equal, state, nnx.state(model))
    with pytest.raises(TypeError, match="quantized already"):
        QuantizedLinear.from_dense(model.blocks[0].up)


def test_relative_error_is_that_of_the_weight():
    model = nnx.Sequential(linear(256, 64), linear(64, 64))
    dense = np.asarray(model.layers[0].kernel[...], np.float64)
    report = quantize(model, bits=4, group_size=64)
    weight = np.asarray(jw.dequantize(model.layers[0].kernel), np.float64)
    assert report.layers[0].relative_error == pytest.approx(
        np.linalg.norm(weight - dense) / np.linalg.norm(dense), rel=1e-3
    )
    silent = quantize(nnx.Sequential(linear(64, 64)), group_size=64, measure_error=False)
    assert silent.layers[0].relative_error is None


def test_a_group_size_that_does_not_divide_leaves_the_layer_dense():
    model = Model(nnx.Rngs(0))
    report = quantize(model, bits=4, group_size=128)
    skipped = {s.path: s.reason for s in report.skipped}
    assert skipped["head/layers/2"] == "group_size=128 does not divide its 96 inputs"
    assert type(model.head.layers[2]) is nnx.Linear
    assert isinstance(model.head.layers[0], QuantizedLinear)
    assert "group_size=128 does not divide its 96 inputs" in str(report)


def test_predicate_chooses_and_overrides():
    seen = {}

    def predicate(path, layer):
        seen[path] = layer
        if path.startswith("blocks"):
            return False
        return {"bits": 8, "group_size": None, "mode": "integer_zeros"} if path == "head/layers/2" else True

    model = Model(nnx.Rngs(0))
    report = quantize(model, group_size=64, predicate=predicate)
    # A layer held twice is asked about once.
    assert len(seen) == 9 and all(isinstance(layer, nnx.Linear) for layer in seen.values())
    schemes = {layer.path: layer.scheme for layer in report.layers}
    assert schemes["head/layers/2"] == "int8, per channel, zeros"
    assert schemes["head/layers/0"] == "int4, group 64"
    assert sum(s.reason == "the predicate says no" for s in report.skipped) == 6
    assert type(model.blocks[2].down) is nnx.Linear


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"predicate": lambda path, layer: "yes"}, TypeError, "predicate"),
        ({"predicate": lambda path, layer: {"size": 4}}, TypeError, "'size'"),
        ({"predicate": lambda path, layer: {"bits": 3} if "head" in path else True}, ValueError, "head/layers/0"),
        ({"predicate": lambda path, layer: {"group_size": 64}}, ValueError, "head/layers/2"),
        ({"bits": 5}, ValueError, "bits"),
        ({"mode": "best"}, ValueError, "mode"),
        ({"groups": 5}, TypeError, "'groups'"),
    ],
)
def test_bad_arguments_change_nothing(options, error, match):
    model = Model(nnx.Rngs(0))
    before = nnx.graphdef(model)
    with pytest.raises(error, match=match):
        quantize(model, **options)
    assert nnx.graphdef(model) == before


def test_a_kernel_with_nan_changes_nothing():
    model = nnx.Sequential(linear(64, 64), linear(64, 64))
    model.layers[1].kernel[...] = model.layers[1].kernel[...].at[3, 4].set(jnp.nan)
    with pytest.raises(ValueError, match="layers/1 holds NaN"):
        quantize(model, group_size=64)
    assert type(model.layers[0]) is nnx.Linear


def test_only_modules_with_layers_below_them():
    with pytest.raises(TypeError, match="model"):
        quantize({"kernel": jnp.ones((64, 64))})
    with pytest.raises(ValueError, match="from_dense"):
        quantize(linear(64, 64))


def test_subclasses_are_replaced_unless_they_compute_something_else():
    class Plain(nnx.Linear):
        pass

    model = nnx.Sequential(
        Plain(64, 64, rngs=nnx.Rngs(0)),
        nnx.LoRALinear(64, 64, lora_rank=2, rngs=nnx.Rngs(0)),
        nnx.Linear(64, 64, dot_general=lambda *a, **k: jax.lax.dot_general(*a, **k), rngs=nnx.Rngs(0)),
        nnx.Conv(64, 64, (3, 3), rngs=nnx.Rngs(0)),
    )
    report = quantize(model, group_size=64)
    assert [(layer.path, layer.type) for layer in report.layers] == [("layers/0", "Plain")]
    reasons = {s.path: s.reason for s in report.skipped}
    assert "__call__" in reasons["layers/1"]
    assert "dot_general" in reasons["layers/2"]
    assert "Conv is none of" in reasons["layers/3/kernel"]


def test_each_dense_kernel_is_freed_before_the_next(monkeypatch):
    model = nnx.Sequential(*(linear(128, 128, seed) for seed in range(6)))
    kernels = [weakref.ref(layer.kernel[...]) for layer in model.layers]
    alive = []
    from_dense = QuantizedLinear.from_dense

    def count(*args, **options):
        alive.append(sum(kernel() is not None for kernel in kernels))
        return from_dense(*args, **options)

    monkeypatch.setattr(QuantizedLinear, "from_dense", count)
    quantize(model)
    assert sum(kernel() is not None for kernel in kernels) == 0
    # One that was just replaced may still be on the stack.
    assert all(count <= 6 - i + 1 for i, count in enumerate(alive)), alive


def test_split_merge_jit_and_gradients():
    model = Block(64, nnx.Rngs(0))
    quantize(model, bits=4, group_size=32)
    x = jax.random.normal(jax.random.key(0), (5, 64)) + 0.3
    expected = model(x)

    graph, codes, rest = nnx.split(model, QuantizedParam, ...)
    assert {leaf.dtype for leaf in jax.tree.leaves(codes)} == {jnp.dtype("uint32"), jnp.dtype("float32")}
    assert sorted(leaf.shape for leaf in jax.tree.leaves(rest)) == [(64,), (128,)]
    np.testing.assert_array_equal(nnx.merge(graph, codes, rest)(x), expected)
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(model, x), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        jax.jit(lambda s, x: nnx.merge(graph, s, rest)(x))(codes, x), expected, rtol=1e-5, atol=1e-5
    )

    # dx against the same network with dense weights.
    up, down = (jw.dequantize(layer.kernel) for layer in (model.up, model.down))
    cotangent = jax.random.normal(jax.random.key(1), (5, 64))

    def dense(x):
        return x + nnx.relu(x @ up + model.up.bias[...]) @ down + model.down.bias[...]

    _, pull = jax.vjp(model, x)
    _, pull_dense = jax.vjp(dense, x)
    np.testing.assert_allclose(pull(cotangent)[0], pull_dense(cotangent)[0], rtol=1e-4, atol=1e-4)

    # A gradient over nnx.Param sees the biases alone.
    gradients = nnx.grad(lambda m: (m(x) * cotangent).sum())(model)
    assert sorted(leaf.shape for leaf in jax.tree.leaves(gradients)) == [(64,), (128,)]
    np.testing.assert_allclose(gradients["down"]["bias"][...], cotangent.sum(0), rtol=1e-4, atol=1e-4)


def test_stacked_layers_scan():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return nnx.Linear(64, 64, rngs=rngs)

    stack = make(nnx.Rngs(0))

    class Stack(nnx.Module):
        def __init__(self):
            self.layers = stack

    model = Stack()
    dense = np.asarray(stack.kernel[...], np.float64)
    report = quantize(model, bits=8, group_size=32)
    assert report.layers[0].shape == (3, 64, 64)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def apply(layer, x):
        return layer(x)

    x = jax.random.normal(jax.random.key(2), (4, 64))
    expected = np.asarray(x, np.float64)
    for i in range(3):
        expected = expected @ np.asarray(jw.dequantize(model.layers.kernel[i]), np.float64)
    y = apply(model.layers, x)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    assert np.linalg.norm(y - x @ dense[0] @ dense[1] @ dense[2]) < 0.05 * np.linalg.norm(y)


def test_abstract_models_quantize():
    def build():
        model = Block(64, nnx.Rngs(0))
        quantize(model, bits=4, group_size=32)
        return model

    abstract = nnx.state(nnx.eval_shape(build))
    concrete = nnx.state(build())
    assert jax.tree.structure(abstract) == jax.tree.structure(concrete)
    shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(abstract)]
    assert shapes == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(concrete)]


def test_report_as_text_and_json():
    model = Model(nnx.Rngs(0))
    report = quantize(model, bits=4, group_size=128)
    values = json.loads(report.to_json())
    assert len(values["layers"]) == len(report.layers) == 8
    assert values["bytes_before"] == sum(layer["bytes_before"] for layer in values["layers"])
    assert values["model_bytes_after"] == report.model_bytes_after
    text = str(report)
    assert "blocks/*/down  x 3" in text and "8 of 10 layers quantized" in text and "embeddings=True" in text


def test_progress_goes_to_standard_error(capsys):
    quantize(nnx.Sequential(linear(64, 64), linear(64, 64)), group_size=64, progress=True)
    captured = capsys.readouterr()
    assert "2/2 layers" in captured.err and not captured.out
