"""Checkpoints loaded into Flax nnx models, and models saved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compat_cases import dense, gptq_arrays

import jax_wonly as jw

nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from jax_wonly import checkpoint  # noqa: E402
from jax_wonly.checkpoint.nnx import PermutedLinear, load_into, tensors_of  # noqa: E402
from jax_wonly.nnx import QuantizedEmbed, QuantizedLinear  # noqa: E402


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.up = nnx.Linear(64, 96, rngs=rngs)
        self.down = nnx.Linear(96, 64, use_bias=False, rngs=rngs, param_dtype=jnp.bfloat16)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(40, 64, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.conv = nnx.Conv(64, 64, (3,), rngs=rngs)
        self.tied = self.blocks[0].up

    def __call__(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.conv(x)


RENAME = [(r"^model\.layers\.(\d+)\.", r"blocks.\1."), (r"^model\.", ""), ("inv_freq", None)]


def torch_like(rng):
    """A checkpoint with PyTorch's names and layouts, and the dense weights ``[K, N]`` that it stands for."""
    tensors, values = {}, {}

    def normal(*shape):
        return rng.normal(0.1, 0.3, shape).astype(np.float32)

    for i in range(2):
        prefix = f"model.layers.{i}"
        for name, k, n in (("up", 64, 96), ("down", 96, 64)):
            w = jnp.asarray(normal(k, n))
            weight = jw.quantize(w, bits=4, group_size=32, mode="integer_zeros")
            if name == "up" and i == 1:
                weight = jw.compat.gptq.decode(*gptq_arrays(rng, k, n, 32, 4, 1, True)[:-1])
            tensors[f"{prefix}.{name}.weight"] = weight
            values[f"blocks.{i}.{name}"] = dense(weight)
        tensors[f"{prefix}.up.bias"] = normal(96)
        tensors[f"{prefix}.norm.weight"], tensors[f"{prefix}.norm.bias"] = normal(64), normal(64)
    tensors["model.embed.weight"] = jw.quantize(jnp.asarray(normal(64, 40)), bits=8, group_size=32)
    tensors["model.conv.weight"], tensors["model.conv.bias"] = normal(64, 64, 3), normal(64)
    tensors["model.rotary.inv_freq"] = normal(4)
    return tensors, values


@pytest.mark.parametrize("abstract", [False, True])
def test_load_into(rng, tmp_path, abstract):
    tensors, values = torch_like(rng)
    checkpoint.save(tmp_path / "a.safetensors", tensors)
    ck = checkpoint.load(tmp_path / "a.safetensors")
    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0))) if abstract else Model(nnx.Rngs(0))
    report = checkpoint.load_into(model, ck, RENAME)
    assert not report.missing and not report.unexpected and not report.dequantized
    assert len(report.loaded) == len(tensors) - 1

    for path, value in values.items():
        block, name = model.blocks[int(path.split(".")[1])], path.split(".")[2]
        layer = getattr(block, name)
        assert type(layer) is (PermutedLinear if path == "blocks.1.up" else QuantizedLinear)
        weight = layer.weight if isinstance(layer, PermutedLinear) else layer.kernel
        np.testing.assert_array_equal(dense(weight), value)
        if name == "up":
            np.testing.assert_array_equal(layer.bias[...], tensors[f"model.layers.{path[7]}.up.bias"])
        else:
            assert layer.bias is None and layer.param_dtype == jnp.bfloat16
    assert model.tied is model.blocks[0].up
    assert type(model.embed) is QuantizedEmbed
    np.testing.assert_array_equal(dense(model.embed.kernel), dense(tensors["model.embed.weight"]))
    np.testing.assert_array_equal(model.conv.kernel[...], tensors["model.conv.weight"].transpose(2, 1, 0))
    np.testing.assert_array_equal(model.blocks[0].norm.scale[...], tensors["model.layers.0.norm.weight"])

    # The whole model against the dense one with the same values.
    reference = Model(nnx.Rngs(1))
    for i, block in enumerate(reference.blocks):
        for name in ("up", "down"):
            kernel = getattr(block, name).kernel
            kernel[...] = jnp.asarray(values[f"blocks.{i}.{name}"], kernel.dtype)
        block.up.bias[...] = tensors[f"model.layers.{i}.up.bias"]
        block.norm.scale[...], block.norm.bias[...] = (
            tensors[f"model.layers.{i}.norm.{n}"] for n in ("weight", "bias")
        )
    reference.embed.embedding[...] = dense(model.embed.kernel).T
    reference.conv.kernel[...], reference.conv.bias[...] = model.conv.kernel[...], model.conv.bias[...]
    ids = jnp.arange(12).reshape(2, 6)
    y, expected = nnx.jit(lambda m, i: m(i))(model, ids), reference(ids)
    assert np.linalg.norm(y - expected) < 0.02 * np.linalg.norm(expected)  # the reference rounds `down` to bfloat16

    # And again into the model that is quantized already, from what it saves itself.
    checkpoint.save(tmp_path / "b", model)
    other = Model(nnx.Rngs(5))
    report = load_into(other, checkpoint.load(tmp_path / "b"))
    np.testing.assert_array_equal(other(ids), model(ids))
    assert set(report.loaded) == set(tensors_of(model)) == set(tensors_of(other))
    load_into(other, checkpoint.load(tmp_path / "b"))
    np.testing.assert_array_equal(other(ids), model(ids))


def unchanged(model, before):
    return nnx.graphdef(model) == before[0] and all(
        a is b for a, b in zip(jax.tree.leaves(nnx.state(model)), before[1], strict=True)
    )


def test_what_does_not_fit_changes_nothing(rng):
    tensors, _ = torch_like(rng)
    model = Model(nnx.Rngs(0))
    before = nnx.graphdef(model), jax.tree.leaves(nnx.state(model))

    class Damaged(dict):
        def __getitem__(self, name):
            if name == "model.conv.bias":
                raise checkpoint.FormatError("jax_wonly: damaged")
            return super().__getitem__(name)

    without = {name: value for name, value in tensors.items() if "conv" not in name}
    wide = jw.quantize(jnp.ones((64, 64)), group_size=32)
    for bad, rename, match in [
        (without, RENAME, "missing in the checkpoint: conv.kernel, conv.bias"),
        (tensors | {"model.other.weight": wide}, RENAME, "not in the model: other.weight"),
        (tensors, RENAME[:2], "rotary.inv_freq"),
        (tensors | {"model.layers.0.up.weight": wide}, RENAME, r"\(64, 64\).*\(64, 96\).*blocks.0.up"),
        (tensors | {"model.conv.bias": np.ones(65)}, RENAME, r"\(65,\)"),
        (tensors | {"embed.embedding": np.ones((40, 64))}, RENAME, "both 'embed.embedding'"),
        (Damaged(tensors), RENAME, "damaged"),
    ]:
        with pytest.raises(ValueError, match=match):
            load_into(model, bad, rename)
        assert unchanged(model, before)
    with pytest.raises(TypeError, match="dict"):
        load_into({}, tensors)
    with pytest.raises(ValueError, match="itself a Linear"):
        load_into(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), {})

    report = load_into(model, without | {"model.other.weight": wide}, RENAME, strict=False)
    assert report.missing == ("conv.kernel", "conv.bias") and report.unexpected == ("other.weight",)
    assert "missing in the checkpoint: conv.kernel" in str(report) and isinstance(model.tied, QuantizedLinear)
    with pytest.raises(ValueError, match="dense array"):
        load_into(model, tensors | {"model.layers.0.up.weight": np.ones((96, 64))}, RENAME)


def test_layers_that_compute_something_else_get_dense_weights(rng):
    class Scaled(nnx.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    class Outer(nnx.Module):
        def __init__(self):
            self.scaled = Scaled(64, 32, use_bias=False, rngs=nnx.Rngs(0))
            self.plain = nnx.data((nnx.Linear(64, 32, use_bias=False, rngs=nnx.Rngs(0)), {"a": jnp.ones(2)}))

    weight = jw.quantize(jnp.asarray(rng.normal(size=(64, 32)).astype(np.float32)), group_size=32)
    model = Outer()
    names = {"a": "scaled.kernel", "b": "plain/0/kernel"}
    report = load_into(model, {"a": weight, "b": weight, "c": weight}, names.get)
    assert report.dequantized == ("scaled.kernel",) and type(model.scaled) is Scaled
    np.testing.assert_array_equal(model.scaled.kernel[...], dense(weight))
    assert isinstance(model.plain[0], QuantizedLinear)


def test_progress(rng, capsys):
    tensors, _ = torch_like(rng)
    load_into(Model(nnx.Rngs(0)), tensors, RENAME, progress=True)
    assert f"{len(tensors) - 1}/{len(tensors) - 1} tensors" in capsys.readouterr().err


def test_quantized_layers_take_other_schemes(rng):
    """int4 to int8, act-order into a layer without and the other way around; activation and bias stay."""

    class Outer(nnx.Module):
        def __init__(self):
            self.layer = QuantizedLinear(64, 32, group_size=32, activation="relu", rngs=nnx.Rngs(0))
            self.layer.bias[...] = jnp.arange(32.0)
            self.general = nnx.LinearGeneral((2, 32), (4, 8), axis=(-2, -1), use_bias=False, rngs=nnx.Rngs(0))

    model = Outer()
    weight = jw.quantize(
        jnp.asarray(rng.normal(size=(64, 32)).astype(np.float32)), bits=8, mode="offsets", group_size=64
    )
    permuted = jw.compat.gptq.decode(*gptq_arrays(rng, 64, 32, 32, 4, 1, True)[:-1])
    x = rng.normal(0.2, 1, (3, 64)).astype(np.float32)
    for value, type_ in ((permuted, PermutedLinear), (weight, PermutedLinear), (permuted, PermutedLinear)):
        load_into(model, {"layer.kernel": value, "general.kernel": weight}, strict=False)
        assert type(model.layer) is type_ and model.layer.bits == (8 if value is weight else 4)
        expected = np.maximum(x.astype(np.float64) @ dense(value) + np.arange(32), 0)
        np.testing.assert_allclose(model.layer(x), expected, rtol=1e-4, atol=1e-3)
    y = model.general(x.reshape(3, 2, 32))
    np.testing.assert_allclose(y.reshape(3, 32), x @ dense(weight), rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match="permuted inputs"):
        load_into(model, {"general.kernel": permuted}, strict=False)
