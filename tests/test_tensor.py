"""QuantizedTensor: an array in all that JAX does with one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import MODES, random_weight, random_x

import jax_wonly as jw


def test_properties(rng):
    qt = random_weight(rng, 256, 130, bits=4, group_size=64, mode="integer_zeros", scale_dtype="bfloat16", lead=(3,)).qt
    assert qt.shape == (3, 256, 130) and qt.ndim == 3
    assert (qt.bits, qt.k, qt.n, qt.group_size, qt.dtype) == (4, 256, 130, 64, jnp.bfloat16)
    assert qt.nbytes == 3 * (3 * 4 * 2048 + 4 * 130 * 2 + 4 * 130)
    assert qt.nbytes == sum(a.nbytes for a in jax.tree.leaves(qt))
    assert qt.nbytes_dense == 3 * 256 * 130 * 2
    assert len(list(qt)) == 3
    assert len(jax.tree.leaves(qt)) == 3


def test_repr(rng):
    symmetric = random_weight(rng, 256, 130, bits=4, group_size=128, scale_dtype="bfloat16").qt
    assert repr(symmetric) == "QuantizedTensor(int4[256, 130], group_size=128, symmetric, scales bfloat16, 24.5 KiB)"
    offsets = random_weight(rng, 64, 3, bits=8, group_size=None, mode="offsets", lead=(2,)).qt
    assert repr(offsets) == "QuantizedTensor(int8[2, 64, 3], group_size=64, offsets float32, scales float32, 8.0 KiB)"
    assert "zeros uint8" in repr(random_weight(rng, 32, 3, mode="integer_zeros").qt)
    assert repr(jax.tree.map(lambda a: "x", symmetric)).startswith("QuantizedTensor(qvalue='x'")
    shapes = jax.eval_shape(lambda q: q, symmetric)
    assert "int4[256, 130]" in repr(shapes)


def test_indexing(rng):
    qt = random_weight(rng, 64, 70, group_size=32, mode="offsets", lead=(4, 3)).qt
    dense = np.asarray(qt.dequantize())
    for index in (2, -1, slice(1, 3), (1, 2), (slice(None), 1), np.array([3, 0]), (...,), ..., (0, ...), None):
        got = qt[index]
        expected = dense[index]
        assert got.shape == expected.shape
        np.testing.assert_array_equal(got.dequantize(), expected)
    mask = np.array([True, False, True, False])
    np.testing.assert_array_equal(qt[mask].dequantize(), dense[mask])
    for index in ((0, 0, 0), (slice(None),) * 3, (..., 0)):
        with pytest.raises(IndexError, match="leading axes"):
            qt[index]
    with pytest.raises(IndexError, match="leading axes"):
        qt[0, 0][0]


def test_operators(rng):
    weight = random_weight(rng, 64, 70, group_size=32)
    for x in (random_x(rng, (3, 64)), np.asarray(random_x(rng, (3, 64)))):
        np.testing.assert_array_equal(x @ weight.qt, jw.matmul(x, weight.qt))
    with pytest.raises(TypeError, match="x @ qt"):
        weight.qt @ jnp.ones((70, 2))
    with pytest.raises(TypeError, match="Quantize w.T"):
        weight.qt.T  # noqa: B018
    with pytest.raises(TypeError, match="dequantize"):
        np.asarray(weight.qt)
    half = weight.qt.astype(jnp.bfloat16)
    assert half.dtype == jnp.bfloat16 and half.qvalue is weight.qt.qvalue


@pytest.mark.parametrize("mode", MODES)
def test_transformations(rng, mode):
    weight = random_weight(rng, 64, 64, group_size=32, mode=mode, lead=(3,))
    qt = weight.qt
    x = random_x(rng, (5, 64)) / 8

    looped = x
    for layer in range(3):
        looped = jnp.tanh(jw.matmul(looped, qt[layer]))
    scanned, _ = jax.jit(lambda x, qt: jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, qt))(x, qt)
    np.testing.assert_allclose(scanned, looped, rtol=2e-5, atol=2e-5)

    seen = []

    def inside(x, w):
        seen.append(w.shape)
        return x @ w

    mapped = jax.vmap(inside, in_axes=(None, 0))(x, qt)
    assert seen == [(64, 64)]
    np.testing.assert_allclose(mapped, x @ qt, rtol=1e-6)

    doubled = jax.tree.map(lambda a: a * 2 if jnp.issubdtype(a.dtype, jnp.floating) else a, qt)
    assert isinstance(doubled, jw.QuantizedTensor) and doubled.shape == qt.shape
    same = jax.jit(lambda t: t)(qt)
    assert repr(same) == repr(qt) and jax.tree.structure(same) == jax.tree.structure(qt)
    stacked = jax.tree.map(lambda *a: jnp.stack(a), qt[0], qt[1])
    np.testing.assert_array_equal(stacked.dequantize(), qt[:2].dequantize())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float32"])
def test_safetensors(rng, tmp_path, mode, scale_dtype):
    safetensors_flax = pytest.importorskip("safetensors.flax")
    safetensors = pytest.importorskip("safetensors")
    tensors = {
        "layers.0.up": random_weight(rng, 64, 70, group_size=32, mode=mode, scale_dtype=scale_dtype, lead=(2,)).qt,
        "layers.0.down": random_weight(rng, 128, 5, bits=8, mode=mode, scale_dtype=scale_dtype).qt,
    }
    arrays, metadata = {}, {}
    for name, qt in tensors.items():
        a, m = qt.to_arrays(name)
        arrays |= a
        metadata |= m
    path = tmp_path / "model.safetensors"
    safetensors_flax.save_file(arrays, path, metadata)
    loaded = safetensors_flax.load_file(path)
    with safetensors.safe_open(path, "flax") as file:
        metadata = file.metadata()
    for name, qt in tensors.items():
        back = jw.QuantizedTensor.from_arrays(loaded, metadata, name)
        assert jax.tree.structure(back) == jax.tree.structure(qt)
        jax.tree.map(np.testing.assert_array_equal, back, qt)


def test_orbax(rng, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    params = {
        "layer": random_weight(rng, 64, 70, group_size=32, mode="integer_zeros", scale_dtype="bfloat16").qt,
        "bias": jnp.arange(3.0),
    }
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", params)
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "checkpoint", jax.tree.map(jnp.zeros_like, params))
    assert isinstance(back["layer"], jw.QuantizedTensor)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_from_arrays_errors(rng):
    qt = random_weight(rng, 64, 70, group_size=32).qt
    arrays, metadata = qt.to_arrays()
    assert all(isinstance(v, str) for v in metadata.values())
    assert repr(jw.QuantizedTensor.from_arrays(arrays, metadata)) == repr(qt)
    for change, message in [
        ({"format_version": "3"}, "format_version='3'.*accepted: '1'"),
        ({"format": "marlin"}, "format='marlin'; accepted: 'jax_wonly'"),
        ({"bits": "four"}, "must be integers"),
        ({"bits": "8"}, r"qw has shape \(2, 1, 512\); accepted: \[..., 2, 2, 512\]"),
        ({"n": "71"}, "scales has shape"),
        ({"k": "128"}, "qw has shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            jw.QuantizedTensor.from_arrays(arrays, metadata | change)
    with pytest.raises(ValueError, match="metadata has no 'format'"):
        jw.QuantizedTensor.from_arrays(arrays, {})
    with pytest.raises(ValueError, match="arrays have no 'scales'"):
        jw.QuantizedTensor.from_arrays({"qvalue": arrays["qvalue"]}, metadata)
    with pytest.raises(ValueError, match="metadata has no 'a.format'"):
        jw.QuantizedTensor.from_arrays(arrays, metadata, "a")
