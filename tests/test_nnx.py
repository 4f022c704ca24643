"""Quantized Flax nnx layers and the in-place quantization of models."""

import functools
import gc
import json
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

import jax_wonly as jw  # noqa: E402
from jax_wonly.nnx import (  # noqa: E402
    QuantizedEinsum,
    QuantizedEmbed,
    QuantizedExperts,
    QuantizedLinear,
    QuantizedLinearGeneral,
    QuantizedParam,
    quantize,
)

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


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
    with pytest.raises(ValueError, match="implementation='fast'"):
        QuantizedLinear(64, 64, group_size=64, implementation="fast", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="implementation='fast'"):
        QuantizedEmbed(64, 64, group_size=64, implementation="fast", rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="unknown option 'modes'; accepted: mode, scale_dtype"):
        QuantizedLinear(64, 64, quantize_options={"modes": "offsets"}, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="unknown option 'bits'"):
        QuantizedLinear(64, 64, quantize_options={"bits": 8}, rngs=nnx.Rngs(0))
    for make in (QuantizedLinear, functools.partial(QuantizedExperts, 2)):
        with pytest.raises(ValueError, match="activation='tanh'"):
            make(64, 64, group_size=64, activation="tanh", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="activation='tanh'"):
        QuantizedLinear.from_linear(linear(64, 64), group_size=64, activation="tanh")


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
        ({"group_size": 100}, ValueError, "group_size=100 is not supported; accepted: 32"),
        ({"group_size": 0}, ValueError, "group_size=0"),
        ({"group_size": "64"}, TypeError, "group_size='64'"),
        ({"bits": 3, "predicate": lambda path, layer: False}, ValueError, "bits=3"),
        ({"predicate": "head"}, TypeError, "predicate is a str"),
        ({"groups": 5}, TypeError, "'groups'"),
    ],
)
def test_bad_arguments_change_nothing(options, error, match):
    model = Model(nnx.Rngs(0))
    before = nnx.graphdef(model)
    with pytest.raises(error, match=match):
        quantize(model, **options)
    assert nnx.graphdef(model) == before


def test_numpy_numbers_choose_too():
    model = nnx.Sequential(linear(96, 64), linear(64, 64), linear(64, 64))
    report = quantize(model, np.int64(4), np.int64(64), lambda path, layer: np.bool_(path != "layers/2"))
    assert [layer.scheme for layer in report.layers] == ["int4, per channel"]
    reasons = [s.reason for s in report.skipped]
    assert reasons == ["group_size=64 does not divide its 96 inputs", "the predicate says no"]


def test_a_kernel_with_nan_changes_nothing():
    model = nnx.Sequential(linear(64, 64), linear(64, 64))
    model.layers[1].kernel[...] = model.layers[1].kernel[...].at[3, 4].set(jnp.nan)
    with pytest.raises(ValueError, match="layers/1 holds NaN"):
        quantize(model, group_size=64)
    assert type(model.layers[0]) is nnx.Linear


def failing_at(monkeypatch, call: int) -> None:
    """Quantizing raises in the place of its ``call``-th layer."""
    original, calls = QuantizedLinear.from_dense, iter(range(1000))

    def from_dense(*args, **options):
        if next(calls) == call:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return original(*args, **options)

    monkeypatch.setattr(QuantizedLinear, "from_dense", from_dense)


@pytest.mark.parametrize("call", [0, 1, 5, 8])
def test_failure_in_the_middle(monkeypatch, call):
    """The largest layer is the first; after it, what is done stays quantized, everywhere, and the rest stays dense."""
    model, ids = Model(nnx.Rngs(0)), jnp.arange(6)
    before, graph = jax.tree.map(np.asarray, nnx.state(model)), nnx.graphdef(model)
    expected = np.asarray(model(ids))
    options = {"group_size": 32, "bits": 8}
    failing_at(monkeypatch, call)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        quantize(model, **options)
    done = [path for path, module in nnx.iter_modules(model) if isinstance(module, QuantizedLinear)]
    assert len(done) == call
    if call == 0:
        assert nnx.graphdef(model) == graph and not hasattr(caught.value, "__notes__")
        jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)
    else:
        assert f"{call} of 9 layers" in caught.value.__notes__[0]
        assert isinstance(model.blocks[0].down, QuantizedLinear)  # the first of the largest
    assert model.named.first is model.blocks[0].up
    assert model.plain["list"][0] is model.blocks[1].up
    np.testing.assert_allclose(model(ids), expected, rtol=0, atol=0.02)


def test_layer_that_needs_most_is_first(monkeypatch):
    model = nnx.Sequential(linear(64, 64), nnx.LinearGeneral(64, (64,), rngs=nnx.Rngs(0)), linear(64, 128))
    report = quantize(model, group_size=32)
    assert [layer.path for layer in report.layers] == ["layers/0", "layers/1", "layers/2"]
    model = nnx.Sequential(linear(64, 64), nnx.LinearGeneral(64, (64,), rngs=nnx.Rngs(0)), linear(64, 128))
    failing_at(monkeypatch, 0)
    with pytest.raises(RuntimeError):
        quantize(model, group_size=32)
    # It needs less than the codes of the last one, but beside them its kernel again.
    assert [type(layer).__name__ for layer in model.layers] == ["Linear", "QuantizedLinearGeneral", "Linear"]


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
        nnx.ConvTranspose(64, 64, (3, 3), rngs=nnx.Rngs(0)),
    )
    report = quantize(model, group_size=64)
    assert [(layer.path, layer.type) for layer in report.layers] == [("layers/0", "Plain")]
    reasons = {s.path: s.reason for s in report.skipped}
    assert "__call__" in reasons["layers/1"]
    assert "dot_general" in reasons["layers/2"]
    assert "ConvTranspose is none of" in reasons["layers/3/kernel"]


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


# Other layers.


def random(shape, seed=5, dtype=jnp.float32):
    return (jax.random.normal(jax.random.key(seed), shape) + 0.3).astype(dtype)


def dense_kernel(layer, kernel) -> jax.Array:
    """The dequantized weight of a LinearGeneral or an Einsum in the axes of its dense kernel, by an independent way."""
    weight = jw.dequantize(layer.kernel, dtype=jnp.float32)
    if isinstance(layer, QuantizedLinearGeneral):
        return weight.reshape(kernel.shape)
    # Every element of the kernel finds its place by the place of its index.
    lhs, rest = layer.einsum_str.split(",")
    rhs, result = rest.split("->")
    batch = [a for a in rhs if a in lhs and a in result]
    inputs = [a for a in rhs if a in lhs and a not in result]
    outputs = [a for a in rhs if a not in lhs]
    ids = np.arange(kernel.size).reshape(kernel.shape)
    ids = np.einsum(f"{rhs}->{''.join(batch + inputs + outputs)}", ids).ravel()
    dense = np.empty(kernel.size, np.float32)
    dense[ids] = np.asarray(weight).ravel()
    return jnp.asarray(dense.reshape(kernel.shape))


GENERAL = [
    dict(in_features=64, out_features=(3, 24)),
    dict(in_features=(32, 64), out_features=20, axis=(-2, -1)),
    dict(in_features=(2, 64), out_features=(5, 4), axis=(3, 1), use_bias=False),
    dict(in_features=64, out_features=(5, 4), batch_axis={0: 4}),
]
EINSUM = [
    ("...d,dhk->...hk", (64, 3, 8), (3, 8)),
    ("abcd,hdkc->abhk", (3, 64, 8, 32), None),
    ("btcd,kdb->bckt", (8, 64, 4), (4, 8)),
]


@pytest.mark.parametrize("case", range(len(GENERAL) + len(EINSUM)))
def test_general_linear_and_einsum(case):
    bits = 4 + 4 * (case % 2)
    x = random((4, 2, 32, 64))
    if case < len(GENERAL):
        options = dict(GENERAL[case])
        if case == 2:
            options["in_features"] = (64, 2)[::-1]  # nnx sorts the axes, so sizes are those of axes 1 and 3
        dense = nnx.LinearGeneral(rngs=nnx.Rngs(1), bias_init=nnx.initializers.normal(), **options)
        type_ = QuantizedLinearGeneral
    else:
        equation, shape, bias = EINSUM[case - len(GENERAL)]
        dense = nnx.Einsum(equation, shape, bias, rngs=nnx.Rngs(1), bias_init=nnx.initializers.normal())
        type_ = QuantizedEinsum
    layer = type_.from_dense(dense, bits=bits, group_size=32, mode="offsets")
    y, expected = nnx.jit(lambda m, x: m(x))(layer, x), dense(x)
    assert y.shape == expected.shape and y.dtype == expected.dtype
    assert np.linalg.norm(y - expected) < (0.02 if bits == 8 else 0.2) * np.linalg.norm(expected)
    if case < len(GENERAL) or "..." not in layer.einsum_str:
        dense.kernel[...] = dense_kernel(layer, dense.kernel[...])
        np.testing.assert_allclose(y, dense(x), rtol=1e-4, atol=1e-4 * float(jnp.abs(y).max()))
    assert layer.bias is dense.bias

    # The constructor draws what the dense one does.
    new = {"rngs": nnx.Rngs(1), "bits": bits, "group_size": 32, "quantize_options": {"mode": "offsets"}}
    new["bias_init"] = nnx.initializers.normal()
    made = type_(**options, **new) if case < len(GENERAL) else type_(equation, shape, bias, **new)
    for a, b in zip(jax.tree.leaves(nnx.state(made)), jax.tree.leaves(nnx.state(layer)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("equation", "why"),
    [
        ("bd,de->b", "sums the axis 'e' of the kernel alone"),
        ("btd,de->be", "sums the axis 't' of the input alone"),
        ("bdd,de->be", "repeats an axis"),
        ("bd,dde->be", "repeats an axis"),
        ("bd,de->bde", "sums over nothing"),
        ("bd,...de->b...e", "kernel has an ellipsis"),
        ("...d,de->e", "only one of input and result"),
        ("bd,de->bf", "no operand has the axis 'f'"),
        ("bd,de,ef->bf", "not of the form"),
        ("bd,de", "not of the form"),
        ("b1,1e->be", "not letters"),
    ],
)
def test_equations_of_more_than_one_product_are_refused(equation, why):
    with pytest.raises(ValueError, match=why):
        QuantizedEinsum(equation, (64, 64), rngs=nnx.Rngs(0))


def test_an_equation_of_more_than_one_product_stays_dense():
    model = nnx.Sequential(
        nnx.Einsum("bd,de->b", (64, 8), rngs=nnx.Rngs(0)),
        nnx.Einsum("bd,de->be", (64, 8), einsum_op=lambda *a, **k: jnp.einsum(*a, **k), rngs=nnx.Rngs(0)),
        nnx.LinearGeneral(64, 8, dot_general_cls=lambda: jax.lax.dot_general, rngs=nnx.Rngs(0)),
        nnx.LinearGeneral((3, 64), 8, axis=(-2, -1), rngs=nnx.Rngs(0)),
    )
    report = quantize(model, group_size=128)
    reasons = [s.reason for s in report.skipped]
    assert "of the kernel alone" in reasons[0] and "einsum_op" in reasons[1] and "dot_general" in reasons[2]
    assert reasons[3] == "group_size=128 does not divide its 192 inputs"
    assert type(model.layers[0]) is nnx.Einsum and not report.layers
    quantize(model, group_size=64)
    assert type(model.layers[3]) is QuantizedLinearGeneral


def test_equation_of_one_call():
    layer = QuantizedEinsum("btd,dhk->bthk", (64, 3, 8), bits=8, group_size=32, rngs=nnx.Rngs(0))
    x = random((2, 5, 64))
    np.testing.assert_allclose(layer(x, "btd,dhk->bhtk"), layer(x).swapaxes(1, 2), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="another way"):
        layer(random((2, 5, 3)), "bth,dhk->btdk")
    with pytest.raises(ValueError, match="axes"):
        layer(x[0])
    with pytest.raises(ValueError, match=r"accepted: 64 in axis 2"):
        layer(x[..., :32])
    with pytest.raises(ValueError, match="kernel_shape"):
        QuantizedEinsum("bd,de->be", (64, 3, 8), rngs=nnx.Rngs(0))
    for options in ({"einsum_op": jnp.dot}, {"kernel_metadata": {"a": 1}}):
        with pytest.raises(ValueError, match=next(iter(options))):
            QuantizedEinsum("bd,de->be", (64, 8), rngs=nnx.Rngs(0), **options)
    with pytest.raises(ValueError, match="dot_general_cls"):
        QuantizedLinearGeneral(64, 8, dot_general_cls=lambda: None, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("bits", "mode", "group_size", "features"),
    [(8, "symmetric", 32, 96), (4, "offsets", None, 70), (8, "float_zeros", 64, 128), (4, "integer_zeros", 32, 64)],
)
def test_embedding(bits, mode, group_size, features):
    dense = nnx.Embed(83, features, rngs=nnx.Rngs(2))
    dense.embedding[...] = random((83, features))
    layer = QuantizedEmbed.from_dense(dense, bits=bits, group_size=group_size, mode=mode)
    table = np.asarray(jw.dequantize(layer.kernel, dtype=jnp.float32)).T
    assert table.shape == (83, features)
    ids = jnp.asarray(np.random.default_rng(0).permutation(83).reshape(83, 1))
    np.testing.assert_allclose(layer(ids), table[ids], rtol=1e-6, atol=1e-6)
    assert np.linalg.norm(layer(ids) - dense(ids)) < (0.02 if bits == 8 else 0.2) * np.linalg.norm(dense(ids))
    query = random((3, 5, features), 7)
    expected = np.asarray(query, np.float64) @ np.asarray(table.T, np.float64)
    np.testing.assert_allclose(layer.attend(query), expected, rtol=1e-4, atol=1e-3)

    made = QuantizedEmbed(
        83,
        features,
        bits=bits,
        group_size=group_size,
        quantize_options={"mode": mode},
        embedding_init=lambda key, shape, dtype: random(shape),
        rngs=nnx.Rngs(2),
    )
    for a, b in zip(jax.tree.leaves(nnx.state(made)), jax.tree.leaves(nnx.state(layer)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_embedding_keeps_the_meaning_of_ids_and_types(dtype):
    dense = nnx.Embed(83, 64, dtype=dtype, rngs=nnx.Rngs(2))
    layer = QuantizedEmbed.from_dense(dense, bits=8, group_size=64)
    for ids in (jnp.array([0, 82, -1, -83, 83, -84, 1000], jnp.int32), jnp.array([[200, 3]], jnp.uint8), jnp.int32(4)):
        y, expected = layer(ids), dense(ids)
        assert y.shape == expected.shape and y.dtype == expected.dtype
        np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
        np.testing.assert_allclose(y, expected, atol=0.02)
    query = random((3, 64), dtype=jnp.float16)
    assert layer.attend(query).dtype == dense.attend(query).dtype
    one = nnx.Embed(1, 64, rngs=nnx.Rngs(0))
    ids = jnp.array([0, 5])
    np.testing.assert_allclose(QuantizedEmbed.from_dense(one, bits=8, group_size=64)(ids), one(ids), atol=0.02)
    with pytest.raises(TypeError, match="integers"):
        layer(jnp.ones(3))


def test_embeddings_only_when_asked_for():
    model = Model(nnx.Rngs(0))
    asked = []
    report = quantize(model, embeddings=True, predicate=lambda path, layer: bool(asked.append(path)) or True)
    assert "embed" in asked and isinstance(model.embed, QuantizedEmbed)
    assert {"embed": (10, 128)}.items() <= {layer.path: layer.shape for layer in report.layers}.items()
    assert np.isfinite(model(jnp.arange(10))).all()


def test_embedding_gathers_instead_of_dequantizing():
    layer = QuantizedEmbed(50_000, 128, rngs=nnx.Rngs(0))
    compiled = jax.jit(lambda ids: layer(ids)).lower(jnp.zeros((4, 16), jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


@pytest.mark.parametrize("bits", [4, 8])
def test_experts(bits, rng):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return nnx.Linear(64, 40, bias_init=nnx.initializers.normal(), rngs=rngs)

    dense = make(nnx.Rngs(0))
    layer = QuantizedExperts.from_dense(dense, bits=bits, group_size=32, mode="integer_zeros")
    weights = np.asarray(jw.dequantize(layer.kernel), np.float64)
    biases = np.asarray(dense.bias[...], np.float64)
    x = rng.normal(0.3, 1, (11, 64)).astype(np.float32)
    sizes = np.array([4, 0, 5])
    expected = np.zeros((11, 40))
    for row, expert in enumerate(np.repeat(np.arange(3), sizes)):
        expected[row] = x[row].astype(np.float64) @ weights[expert] + biases[expert]
    np.testing.assert_allclose(nnx.jit(lambda m, *a: m(*a))(layer, x, jnp.asarray(sizes)), expected, **CLOSE)

    ids = rng.integers(0, 3, (11, 2))
    expected = np.einsum("mk,mjkn->mjn", x.astype(np.float64), weights[ids]) + biases[ids]
    np.testing.assert_allclose(layer.gather(jnp.asarray(x)[:, None], jnp.asarray(ids)), expected, **CLOSE)

    made = QuantizedExperts(3, 64, 40, bits=bits, group_size=32, activation="relu", rngs=nnx.Rngs(1))
    assert made.kernel.shape == (3, 64, 40) and made.bias.shape == (3, 40)
    assert (made(jnp.asarray(x), jnp.asarray(sizes)) >= 0).all()
    assert not np.array_equal(made.kernel[0].dequantize(), made.kernel[1].dequantize())
    with pytest.raises(ValueError, match=r"\(64, 64\), not \[experts"):
        QuantizedExperts.from_dense(linear(64, 64))


# What JAX and Flax do with whole models.


class Everything(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(40, 64, rngs=rngs)
        self.query = nnx.LinearGeneral(64, (4, 16), rngs=rngs)
        self.out = nnx.Einsum("...hk,hkd->...d", (4, 16, 64), (64,), rngs=rngs)
        self.head = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        return self.embed.attend(self.head(x + self.out(jnp.tanh(self.query(x)))))


def test_checkpoints_restore_the_quantized_model(tmp_path):
    orbax = pytest.importorskip("orbax.checkpoint")

    def build():
        model = Everything(nnx.Rngs(0))
        quantize(model, bits=4, group_size=32, embeddings=True, mode="integer_zeros", scale_dtype=jnp.bfloat16)
        return model

    model, ids = build(), jnp.array([[1, 2, 39]])
    graph, abstract = nnx.split(nnx.eval_shape(build))
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", nnx.state(model))
        checkpointer.wait_until_finished()
        restored = nnx.merge(graph, checkpointer.restore(tmp_path / "model", abstract))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(restored), nnx.state(model))
    np.testing.assert_array_equal(restored(ids), model(ids))


def test_transformations_of_a_whole_model():
    model = Everything(nnx.Rngs(0))
    quantize(model, bits=8, group_size=32, embeddings=True)
    ids = jnp.array([[1, 2, 39], [0, 1, 5]])
    expected = nnx.jit(lambda m, ids: m(ids))(model, ids)
    np.testing.assert_allclose(nnx.vmap(lambda m, ids: m(ids), in_axes=(None, 0))(model, ids), expected, **CLOSE)
    graph, state = nnx.split(model)
    np.testing.assert_allclose(jax.jit(lambda s, ids: nnx.merge(graph, s)(ids))(state, ids), expected, **CLOSE)

    def loss(m, ids, remat):
        call = nnx.remat(lambda m, ids: m(ids)) if remat else lambda m, ids: m(ids)
        return (call(m, ids) ** 2).sum()

    plain, again = (nnx.jit(nnx.grad(functools.partial(loss, remat=remat)))(model, ids) for remat in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), plain, again)
    assert len(jax.tree.leaves(plain)) == 3  # biases

    # Layers made by nnx.vmap over their constructor, applied one after the other and side by side.
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return nnx.Sequential(
            nnx.LinearGeneral(64, (4, 16), rngs=rngs), nnx.Einsum("...hk,hkd->...d", (4, 16, 64), rngs=rngs)
        )

    stack = make(nnx.Rngs(1))
    report = quantize(stack, bits=8, group_size=32)
    assert [layer.shape for layer in report.layers] == [(3, 64, 4, 16), (3, 4, 16, 64)]
    assert all(layer.relative_error < 0.01 for layer in report.layers)
    x = random((3, 5, 64))
    one = [nnx.merge(nnx.graphdef(stack), jax.tree.map(lambda a, i=i: a[i], nnx.state(stack))) for i in range(3)]
    side = nnx.vmap(lambda m, x: m(x), in_axes=(0, 0))(stack, x)
    np.testing.assert_allclose(side, jnp.stack([m(a) for m, a in zip(one, x, strict=True)]), **CLOSE)
    chain = nnx.scan(nnx.remat(lambda m, x: m(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(stack, x)
    np.testing.assert_allclose(chain, one[2](one[1](one[0](x))), **CLOSE)


def test_peak_memory_is_the_dense_model_and_one_layer(monkeypatch):
    size, count = 512, 6
    dense, packed = 4 * size * size, size * size // 2 + 4 * size * size // 128
    model = nnx.Sequential(*(nnx.Linear(size, size, use_bias=False, rngs=nnx.Rngs(i)) for i in range(count)))
    seen = []

    def live():
        return sum(a.nbytes for a in jax.live_arrays())

    gc.collect()  # what other tests left behind must not go away in the middle

    def report_layer(*args):
        seen.append(live())
        return original(*args)

    module = sys.modules["jax_wonly.nnx._replace"]
    original = module.report_layer
    monkeypatch.setattr(module, "report_layer", report_layer)
    before = live()
    quantize(model)
    # Where the most is there, a layer is packed and its dense kernel not freed yet.
    expected = [before - i * dense + (i + 1) * packed for i in range(count)]
    np.testing.assert_allclose(seen, expected, rtol=0, atol=8192)
    assert live() <= before - count * (dense - packed) + 8192


def test_error_is_measured_in_pieces(monkeypatch):
    import jax_wonly._model as module

    for shape in ((96, 200), (3, 64, 130)):
        kernel = random(shape)
        weight = jw.quantize(kernel, bits=4, group_size=32, mode="offsets")
        whole = module.relative_error(kernel, weight)
        with monkeypatch.context() as patch:
            patch.setattr(module, "_ERROR_PIECE", 64 * shape[-2])
            assert module.relative_error(kernel, weight) == pytest.approx(whole, rel=1e-5)
        dense = np.asarray(kernel, np.float64)
        expected = np.linalg.norm(np.asarray(weight.dequantize(), np.float64) - dense) / np.linalg.norm(dense)
        assert whole == pytest.approx(expected, rel=1e-4)


def test_quantize_abstract_model():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(256, 64, rngs=rngs)
            self.heads = nnx.LinearGeneral((4, 64), (2, 32), axis=(-2, -1), rngs=rngs)
            self.embed = nnx.Embed(100, 96, rngs=rngs)

    concrete, abstract = Model(nnx.Rngs(0)), nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    options = {"embeddings": True, "predicate": lambda path, layer: {"group_size": 32} if path == "embed" else True}
    expected, report = quantize(concrete, measure_error=False, **options), quantize(abstract, **options)
    assert {layer.path: layer for layer in report.layers} == {layer.path: layer for layer in expected.layers}
    assert len(report.layers) == 3 and abstract.linear.kernel.shape == (256, 64)
    shapes = [jax.tree.map(lambda a: (a.shape, a.dtype), nnx.state(model)) for model in (abstract, concrete)]
    assert jax.tree.leaves(shapes[0]) == jax.tree.leaves(shapes[1])
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(abstract)))
