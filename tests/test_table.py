"""Weights whose codes index a table: NF4, FP4, and tables of one's own."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen, nnx
from matmul_cases import check_cross_product, check_epilogue
from reference import DTYPES, middles, near_middles, random_weight, random_x

import jax_wonly as jw
from jax_wonly._sharding import local_shard, partition_specs
from jax_wonly._table import FP4, NF4
from jax_wonly._take import take_outputs


def quantize_nf4(w, group_size):
    """Codes ``[K, N]`` and scales, by counting the middles between entries, times the scale, that a value is above."""
    groups = w.reshape(-1, group_size, w.shape[-1])
    scales = np.abs(groups).max(1, keepdims=True)
    return (groups[..., None] > middles(NF4) * scales[..., None]).sum(-1).reshape(w.shape), scales[:, 0]


def test_nf4_is_the_nearest_entry(rng):
    w = rng.normal(0.2, 1, (256, 70)).astype(np.float32)
    qt = jw.quantize(w, mode="nf4", group_size=64)
    codes, scales = quantize_nf4(w, 64)
    assert qt.table == NF4 and qt.zeros is None and qt.offsets is None and "nf4" in repr(qt)
    np.testing.assert_array_equal(jw.unpack(qt.qvalue, 4, 256, 70), codes)
    np.testing.assert_array_equal(qt.scales, scales)
    expected = np.asarray(NF4, np.float32)[codes] * np.repeat(scales, 64, 0)
    for implementation in (None, "xla"):
        np.testing.assert_array_equal(qt.dequantize(implementation=implementation), expected)
        rounded = qt.dequantize(jnp.bfloat16, implementation=implementation)
        np.testing.assert_array_equal(rounded, expected.astype(ml_dtypes.bfloat16))
    # Every entry, and zeros of a group that is all zero, are exact.
    for table, mode in ((NF4, "nf4"), (FP4, "fp4")):
        entries = np.repeat(np.asarray(table, np.float32), 4)[:, None] * np.float32([3, 0.5, 0])
        np.testing.assert_array_equal(jw.quantize(entries, mode=mode, group_size=64).dequantize(), entries)


def test_values_halfway_between_entries(rng):
    """The codes are defined to the last place, where quotients round otherwise."""
    w = near_middles(rng, NF4, 70)
    codes, scales = quantize_nf4(w, 64)
    qt = jw.quantize(w, mode="nf4", group_size=64)
    np.testing.assert_array_equal(jw.unpack(qt.qvalue, 4, *w.shape), codes)
    rounded = (w.reshape(-1, 64, 70) / scales[:, None])[..., None] > middles(NF4)
    assert (rounded.sum(-1).reshape(w.shape) != codes).any()


@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_no_entry_is_nearer(rng, scale_dtype):
    w = rng.normal(0, 1, (96, 33)).astype(np.float32)
    for mode in ("nf4", "fp4"):
        qt = jw.quantize(w, mode=mode, group_size=32, scale_dtype=scale_dtype)
        assert str(qt.scales.dtype) == scale_dtype
        s = np.repeat(np.asarray(qt.scales, np.float64), 32, 0)
        distance = np.abs(np.asarray(qt.table)[:, None, None] * s - w)
        codes = np.asarray(jw.unpack(qt.qvalue, 4, 96, 33))
        of_code = np.take_along_axis(distance, codes[None].astype(np.int64), 0)[0]
        assert (of_code <= distance.min(0) * (1 + 1e-5) + 1e-7).all()


@pytest.mark.parametrize("x_dtype", DTYPES)
def test_products(rng, x_dtype):
    for implementation, group_size in ((None, 32), ("cpu", 64), ("xla", 256), ("dequantize", None)):
        options = {"bits": 4, "mode": "table", "x_dtype": x_dtype, "implementation": implementation}
        check_cross_product(rng, scale_dtype="bfloat16", group_size=group_size, rows=(1, 20), **options)
    check_epilogue(rng, activation="gelu", out_dtype="float32", **options)


def test_transformations(rng):
    weight = random_weight(rng, 128, 70, group_size=32, mode="table", lead=(3,))
    x = random_x(rng, (3, 5, 128))
    expected = np.asarray(x, np.float64) @ weight.dense
    close = {"rtol": 1e-4, "atol": 1e-3}
    np.testing.assert_allclose(jax.jit(jax.vmap(jw.matmul))(x, weight.qt), expected, **close)
    np.testing.assert_allclose(jax.lax.map(lambda a: jw.matmul(*a), (x, weight.qt)), expected, **close)
    np.testing.assert_allclose(x[1] @ weight.qt[1], expected[1], **close)

    dy = random_x(rng, expected.shape)

    def loss(x, scales):
        return jnp.sum(jw.matmul(x, dataclasses.replace(weight.qt, scales=scales)) * dy)

    dx, dscales = jax.grad(loss, (0, 1))(x, weight.qt.scales)
    dy64 = np.asarray(dy, np.float64)
    np.testing.assert_allclose(dx, dy64 @ weight.dense.swapaxes(1, 2), **close)
    dw = np.asarray(x, np.float64).swapaxes(1, 2) @ dy64
    s = np.repeat(np.asarray(weight.qt.scales, np.float64), 32, 1)
    np.testing.assert_allclose(dscales, (dw * weight.dense / s).reshape(3, 4, 32, 70).sum(2), rtol=1e-3, atol=1e-3)


def test_experts(rng):
    weight = random_weight(rng, 64, 40, group_size=32, mode="table", lead=(3,))
    x = random_x(rng, (7, 64))
    ids = np.array([2, 0, 0, 1, 2, 1, 0])
    expected = np.einsum("mk,mkn->mn", np.asarray(x, np.float64), weight.dense[ids])
    for implementation in (None, "xla", "dequantize"):
        y = jw.gather_matmul(x, weight.qt, ids, implementation=implementation)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
        y = jw.ragged_dot(
            x[np.argsort(ids, kind="stable")], weight.qt, np.array([3, 2, 2]), implementation=implementation
        )
        np.testing.assert_allclose(y, expected[np.argsort(ids, kind="stable")], rtol=1e-4, atol=1e-4)
    dx = jax.grad(lambda x: jw.gather_matmul(x, weight.qt, ids).sum())(x)
    np.testing.assert_allclose(dx, weight.dense[ids].sum(-1), rtol=1e-4, atol=1e-4)


def test_single_outputs(rng):
    weight = random_weight(rng, 96, 70, group_size=32, mode="table")
    rows = take_outputs(weight.qt, jnp.array([3, 69, 0]))
    np.testing.assert_array_equal(rows, np.asarray(weight.qt.dequantize()).T[[3, 69, 0]])


def test_sharded_parts_keep_the_table(rng):
    qt = random_weight(rng, 128, 128, group_size=32, mode="table").qt
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d", None)

    def product(x, qt):
        assert qt.table == local_shard(qt, spec).table
        return jax.lax.psum(jw.matmul(x, local_shard(qt, spec)), "d")

    x = random_x(rng, (3, 128))
    specs = (jax.sharding.PartitionSpec(None, "d"), partition_specs(qt, spec, mesh))
    y = jax.jit(jax.shard_map(product, mesh=mesh, in_specs=specs, out_specs=jax.sharding.PartitionSpec()))(x, qt)
    np.testing.assert_allclose(y, jw.matmul(x, qt), rtol=1e-6)
    placed = jw.device_put(qt, jax.sharding.NamedSharding(mesh, spec))
    np.testing.assert_array_equal(placed.dequantize(), qt.dequantize())


def test_arrays_and_export(rng, tmp_path):
    qt = random_weight(rng, 64, 40, group_size=32, mode="table").qt
    arrays, metadata = qt.to_arrays("a")
    assert metadata["a.format_version"] == "2" and all(isinstance(v, str) for v in metadata.values())
    again = jw.QuantizedTensor.from_arrays(arrays, json.loads(json.dumps(metadata)), "a")
    assert again.table == qt.table
    np.testing.assert_array_equal(again.dequantize(), qt.dequantize())
    for table in ("{", "[1, 2]", "7", json.dumps([float("nan")] * 16), json.dumps([0.0] * 16), json.dumps(["x"] * 16)):
        with pytest.raises(ValueError, match="table"):
            jw.QuantizedTensor.from_arrays(arrays, metadata | {"a.table": table}, "a")
    x = random_x(rng, (3, 64))
    exported = jax.export.export(jax.jit(jw.matmul), disabled_checks=jw.export_disabled_checks())(x, qt)
    y = jax.export.deserialize(exported.serialize()).call(x, qt)
    np.testing.assert_array_equal(y, jw.matmul(x, qt))

    path = tmp_path / "checkpoint"
    jw.checkpoint.save(path, {"w": qt})
    loaded = jw.checkpoint.load(path)["w"]
    assert loaded.table == qt.table
    np.testing.assert_array_equal(loaded.dequantize(), qt.dequantize())
    for format in ("gptq", "compressed-tensors"):
        with pytest.raises(ValueError, match="table"):
            jw.checkpoint.save(tmp_path / format, {"w": qt}, format=format)


def test_models(rng):
    x = random_x(rng, (3, 64))
    model = nnx.Sequential(nnx.Linear(64, 128, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(128, 32, rngs=nnx.Rngs(1)))
    dense = model(x)
    report = jw.nnx.quantize(model, mode="nf4", group_size=32)
    assert {layer.scheme for layer in report.layers} == {"nf4, group 32"}
    assert model.layers[0].kernel.table == NF4
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(model, x), dense, atol=0.5)
    graph, state = nnx.split(model)
    np.testing.assert_array_equal(nnx.merge(graph, state)(x), model(x))

    layer = linen.Dense(40)
    params, _ = jw.linen.quantize(layer.init(jax.random.key(0), x)["params"], mode="nf4", group_size=64)
    weight = params["kernel"]
    assert weight.table == NF4
    y = jw.linen.apply(layer, {"params": params}, x)
    np.testing.assert_allclose(y, x @ weight.dequantize(), rtol=1e-5, atol=1e-5)


def test_the_way_on_a_gpu():
    qt = jw.quantize(jnp.ones((4096, 4096), jnp.bfloat16), mode="nf4", group_size=64)
    for m, dtype, path, why, kernel in [
        (1, jnp.bfloat16, "kernel", "one pass", "matmul_resident"),
        (1, jnp.float16, "kernel", "one pass", "matmul_resident"),
        (64, jnp.float16, "kernel", "the model expects", "matmul_warpgroup"),  # scales of another type
        (512, jnp.float16, "kernel", "the model expects", "matmul_tiled"),
        (512, jnp.bfloat16, "kernel", "the model expects", "matmul_tiled"),
        (1, jnp.float32, "kernel", "one pass", "matmul_resident"),
        (64, jnp.float32, "kernel", "the model expects", "matmul_warpgroup"),
        (512, jnp.float32, "kernel", "the model expects", "matmul_warpgroup"),
    ]:
        found = jw.explain(jax.ShapeDtypeStruct((m, 4096), dtype), qt, platform="cuda")
        assert found.path == path and why in found.reason and found.kernel == kernel
        assert found.scheme == "nf4, group 64"


def test_bad_tables(rng):
    qt = random_weight(rng, 64, 40, group_size=32, mode="table").qt
    x = random_x(rng, (3, 64))
    for table, error in (
        ((1.0,), ValueError),
        ((float("inf"),) * 16, ValueError),
        ((1e3,) * 16, ValueError),
        (3, TypeError),
    ):
        for use in (lambda t: jw.matmul(x, t), lambda t: t.dequantize()):
            with pytest.raises(error, match="table="):
                use(dataclasses.replace(qt, table=table))
    with pytest.raises(TypeError, match="taken apart"):
        qw, scales = qt
    with pytest.raises(ValueError, match="without zeros"):
        jw.matmul(x, dataclasses.replace(qt, zeros=qt.scales))
    with pytest.raises(ValueError, match="bits=8"):
        jw.quantize(jnp.ones((64, 8)), bits=8, mode="nf4")
    with pytest.raises(ValueError, match="nf4"):
        jw.quantize(jnp.ones((64, 8)), mode="nf5")


@pytest.mark.skipif(not jw.status().cpu, reason="the CPU kernels are not registered")
def test_the_custom_call_refuses(rng):
    weight = random_weight(rng, 64, 64, group_size=32, mode="table")
    x, qw, s = random_x(rng, (1, 2, 64)), weight.qt.qvalue[None], weight.qt.scales[None]
    call = jax.ffi.ffi_call("wonly_matmul_v1", jax.ShapeDtypeStruct((1, 2, 64), jnp.float32))
    rest = {"has_bias": np.int64(0), "activation": np.int64(0), "shift_mode": np.int64(3)}
    good = jnp.zeros((1, 1, 16))
    call(x, qw, s, good, bits=np.int64(4), **rest)
    for table, bits, said in [
        (good[..., :15], 4, "table has shape"),
        (good.astype(jnp.bfloat16), 4, "table has element type"),
        (jnp.zeros((2, 1, 16)), 4, "table has shape"),
        (good, 8, "bits = 8 with a table"),
    ]:
        qw8 = jnp.concatenate([qw, qw], 2) if bits == 8 else qw
        with pytest.raises(jax.errors.JaxRuntimeError, match=said):
            jax.block_until_ready(call(x, qw8, s, table, bits=np.int64(bits), **rest))
