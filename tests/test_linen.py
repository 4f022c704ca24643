"""Quantized parameters of Flax Linen models."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nn = pytest.importorskip("flax.linen")

import jax_wonly as jw  # noqa: E402
from jax_wonly import linen  # noqa: E402

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def drawn(model, *inputs):
    """Parameters of a mean that is not zero, so that biases and zeros matter."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(0.05, 0.2, a.shape), a.dtype), shapes)


def dequantized(params, layers):
    """The same parameters with dense kernels, for the model as it was."""

    def walk(node, path):
        if isinstance(node, jw.QuantizedTensor):
            layer = layers["/".join(path[:-1])]
            kernel = layer.kernel
            dense = jw.dequantize(node, dtype=jnp.float32)
            stacked = dense.ndim - 2 - len(kernel.batch)
            order = (*kernel.batch, *kernel.inputs, *kernel.outputs)
            sizes = kernel.sizes(layer.shape)
            dense = dense.reshape(*dense.shape[:stacked], *(sizes[label] for label in order))
            return dense.transpose(*range(stacked), *(stacked + order.index(label) for label in kernel.axes))
        return {name: walk(value, (*path, name)) for name, value in node.items()} if isinstance(node, dict) else node

    return walk(params, ())


def check(model, *inputs, bits=8, group_size=32, embeddings=False):
    """Quantizes a model, and compares it with itself on dequantized kernels."""
    params = drawn(model, *inputs)
    found = linen.layers(model, {"params": params}, *inputs)
    quantized, report = linen.quantize(
        params, bits=bits, group_size=group_size, layers=found, embeddings=embeddings, mode="integer_zeros"
    )
    y = jax.jit(functools.partial(linen.apply, model))({"params": quantized}, *inputs)
    apply = jax.jit(model.apply)
    expected = apply({"params": dequantized(quantized, found)}, *inputs)
    scale = float(jnp.abs(expected).max())
    np.testing.assert_allclose(y / scale, expected / scale, atol=2e-5)
    dense = apply({"params": params}, *inputs)
    assert y.dtype == dense.dtype and y.shape == dense.shape
    assert np.linalg.norm(y - dense) < (0.03 if bits == 8 else 0.3) * np.linalg.norm(dense)
    return params, quantized, report


def random(shape, seed=5, dtype=jnp.float32):
    return (jax.random.normal(jax.random.key(seed), shape) + 0.3).astype(dtype)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(96, name="up")(x))
        return nn.Dense(20, use_bias=False, name="down")(nn.LayerNorm()(x))


def test_dense_without_knowing_the_model():
    model, x = MLP(), random((3, 5, 64))
    params = drawn(model, x)
    before = jax.tree.map(np.asarray, params)
    quantized, report = linen.quantize(params, bits=4, group_size=32)
    jax.tree.map(np.testing.assert_array_equal, params, before)
    assert isinstance(quantized["up"]["kernel"], jw.QuantizedTensor)
    assert [layer.path for layer in report.layers] == ["down", "up"] and not report.skipped
    up, down = (np.asarray(jw.dequantize(quantized[name]["kernel"]), np.float64) for name in ("up", "down"))
    expected = model.apply({"params": {**params, "up": {**params["up"], "kernel": up}, "down": {"kernel": down}}}, x)
    np.testing.assert_allclose(linen.apply(model, {"params": quantized}, x), expected, **CLOSE)
    with linen.intercept():
        np.testing.assert_allclose(model.apply({"params": quantized}, x), expected, **CLOSE)
    values = json.loads(report.to_json())
    assert values["model_bytes_after"] == sum(a.nbytes for a in jax.tree.leaves(quantized))
    assert values["model_bytes_before"] == sum(a.nbytes for a in jax.tree.leaves(params))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dense(40),
        nn.Dense(40, use_bias=False),
        nn.DenseGeneral((3, 24), use_bias=False),
        nn.DenseGeneral(24, axis=(-2, -1)),
        nn.DenseGeneral((5, 4), axis=(3, 1)),
        nn.DenseGeneral((5, 4), axis=(2, 3), batch_dims=(0, 1)),
        nn.Einsum((64, 3, 8), "...d,dhk->...hk"),
        nn.Einsum((3, 64, 8, 32), "abcd,hdkc->abhk"),
        nn.Einsum((8, 64, 4), "btcd,kdb->bctk", use_bias=False),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers(layer):
    check(layer, random((4, 2, 32, 64)), bits=4)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("input_dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_promote_as_in_the_dense_layer(dtype, input_dtype, param_dtype):
    x = jnp.ones((2, 64), input_dtype)
    params = {"kernel": jnp.ones((64, 8), param_dtype), "bias": jnp.ones(8, param_dtype)}
    quantized, _ = linen.quantize(params, bits=8, group_size=64, measure_error=False)
    for layer in (nn.Dense(8, dtype=dtype), nn.DenseGeneral(8, dtype=dtype)):
        y = jax.eval_shape(functools.partial(linen.apply, layer), {"params": quantized}, x)
        assert y.dtype == jax.eval_shape(layer.apply, {"params": params}, x).dtype


class Tied(nn.Module):
    dtype: type | None = None

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(70, 64, dtype=self.dtype)
        return embed.attend(nn.relu(nn.Dense(64, dtype=self.dtype)(embed(ids))))


def test_embedding():
    ids = jnp.array([[0, 69, 13], [5, -1, 2]])
    params, quantized, report = check(Tied(), ids, embeddings=True)
    assert quantized["Embed_0"]["embedding"].shape == (64, 70)
    kept, report = linen.quantize(params, group_size=32)
    assert isinstance(kept["Embed_0"]["embedding"], jax.Array)
    assert [(s.path, s.reason) for s in report.skipped] == [("Embed_0/embedding", "embeddings=True was not asked for")]
    embed = nn.Embed(70, 64)
    variables = {"params": quantized["Embed_0"]}
    dense = {"params": params["Embed_0"]}
    for bad in (jnp.array([70, 3]), jnp.array([-71, 3])):
        rows = [np.isnan(y).all(-1) for y in (linen.apply(embed, variables, bad), embed.apply(dense, bad))]
        np.testing.assert_array_equal(*rows)
    assert linen.apply(nn.Embed(70, 64, dtype=jnp.bfloat16), variables, ids).dtype == jnp.bfloat16


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = nn.MultiHeadDotProductAttention(num_heads=4)(x, x)
        return x + 0.1 * nn.Dense(x.shape[-1])(nn.tanh(nn.Dense(96)(h))), None


class Stack(nn.Module):
    lift: str

    @nn.compact
    def __call__(self, x):
        if self.lift == "remat":
            return nn.remat(Block)()(x)[0]
        if self.lift == "vmap":
            block = nn.vmap(Block, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=0)
            return block()(jnp.stack([x, -x, 2 * x]))[0]
        return nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()(x, None)[
            0
        ]


@pytest.mark.parametrize("lift", ["remat", "vmap", "scan of remat"])
def test_lifted_transformations(lift):
    params, quantized, report = check(Stack(lift), random((2, 5, 64)))
    assert len(report.layers) == 6 and not report.skipped
    query = next(iter(quantized.values()))["MultiHeadDotProductAttention_0"]["query"]["kernel"]
    assert query.shape == ((64, 64) if lift == "remat" else (3, 64, 64))
    # Without the layers nothing with more than two axes is touched.
    kept, report = linen.quantize(params, group_size=32)
    assert all(len(layer.shape) == 2 for layer in report.layers)
    assert all("pass layers" in s.reason for s in report.skipped) and report.skipped


def test_lifted_layers_themselves():
    layer = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=0)(24)
    _, quantized, _ = check(layer, random((3, 5, 64)))
    assert quantized["kernel"].shape == (3, 64, 24)


def test_stacked_along_another_axis_stays_dense():
    layer = nn.vmap(nn.Dense, variable_axes={"params": 1}, split_rngs={"params": True}, in_axes=0)(24)
    x = random((3, 5, 64))
    params = layer.init(jax.random.key(0), x)["params"]
    quantized, report = linen.quantize(params, layers=linen.layers(layer, {"params": params}, x), group_size=32)
    assert quantized["kernel"] is params["kernel"]
    assert "(64, 3, 24), not (64, 24)" in report.skipped[0].reason


def test_gradients_reach_input_and_bias():
    model, x = MLP(), random((7, 64))
    params = drawn(model, x)
    found = linen.layers(model, {"params": params}, x)
    quantized, _ = linen.quantize(params, bits=8, group_size=32)
    dense = dequantized(quantized, found)

    def loss(apply, params, bias, x):
        params = {**params, "up": {**params["up"], "bias": bias}}
        return (apply({"params": params}, x) ** 2).sum()

    bias = params["up"]["bias"]
    got = jax.jit(jax.grad(lambda *a: loss(functools.partial(linen.apply, model), quantized, *a), (0, 1)))(bias, x)
    expected = jax.grad(lambda *a: loss(model.apply, dense, *a), (0, 1))(bias, x)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * float(jnp.abs(b).max()))


def test_predicate_and_reasons():
    class Odd(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(50, name="a")(x)
            x = nn.Dense(64, name="b")(x)
            x = nn.Dense(64, name="c")(x)
            x = nn.Dense(64, name="d", dot_general=lambda *a, **k: jax.lax.dot_general(*a, **k))(x)
            x = nn.Einsum((64, 4), "bd,de->b", name="e", use_bias=False)(x)
            return nn.ConvTranspose(8, (3,), name="f")(jnp.broadcast_to(x[:, None], (2, 64)))

    model, x = Odd(), random((2, 64))
    variables = model.init(jax.random.key(0), x)
    asked = []

    def predicate(path, kernel):
        asked.append((path, kernel.shape))
        return {"a": {"group_size": 32}, "b": {"group_size": None, "bits": 8}, "c": False}[path]

    found = linen.layers(model, variables, x)
    _, report = linen.quantize(variables["params"], group_size=64, predicate=predicate, layers=found)
    assert asked == [("a", (64, 50)), ("b", (50, 64)), ("c", (64, 64))]
    assert {layer.path: layer.scheme for layer in report.layers} == {"a": "int4, group 32", "b": "int8, per channel"}
    reasons = {s.path: s.reason for s in report.skipped}
    assert reasons["c/kernel"] == "the predicate says no"
    assert "dot_general" in reasons["d/kernel"]
    assert "sums the axis 'e' of the kernel alone" in reasons["e/kernel"]
    assert "no Dense" in reasons["f/kernel"]
    _, report = linen.quantize(variables["params"], group_size=64, layers=found)
    assert {s.path: s.reason for s in report.skipped}["b/kernel"] == "group_size=64 does not divide its 50 inputs"


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"predicate": lambda path, kernel: "yes"}, TypeError, "predicate"),
        ({"predicate": lambda path, kernel: {"size": 4}}, TypeError, "'size'"),
        ({"predicate": lambda path, kernel: {"group_size": 256}}, ValueError, "layer up"),
        ({"bits": 5}, ValueError, "bits"),
        ({"groups": 5}, TypeError, "'groups'"),
        ({"group_size": 100}, ValueError, "group_size=100 is not supported"),
        ({"layers": {"up": 3}}, TypeError, "layers={'up': 3}"),
    ],
)
def test_bad_arguments(options, error, match):
    params = MLP().init(jax.random.key(0), random((2, 64)))["params"]
    with pytest.raises(error, match=match):
        linen.quantize(params, **{"group_size": 32} | options, donate=True)
    jax.tree.map(np.asarray, params)  # nothing was deleted


def test_bad_trees():
    variables = MLP().init(jax.random.key(0), random((2, 64)))
    with pytest.raises(ValueError, match="variables\\['params'\\]"):
        linen.quantize(variables)
    with pytest.raises(TypeError, match="mapping"):
        linen.quantize(variables["params"]["up"]["kernel"])
    quantized, _ = linen.quantize(variables["params"], group_size=32)
    with pytest.raises(ValueError, match="quantized already .*up/kernel"):
        linen.quantize(quantized)
    boxed = nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.ones_init(), ("a", "b")))
    params = boxed.init(jax.random.key(0), random((2, 64)))["params"]
    _, report = linen.quantize(params)
    assert "nn.unbox" in report.skipped[0].reason
    for library in (jnp, np):
        with pytest.raises(ValueError, match="the kernel of up holds NaN"):
            linen.quantize({"up": {"kernel": library.full((64, 64), np.nan, np.float32)}}, group_size=64)
    with pytest.raises(TypeError, match="kernel_init has an unknown option 'modes'"):
        linen.kernel_init(modes="offsets")
    for call in (linen.layers, linen.apply):
        with pytest.raises(TypeError, match="model is a dict"):
            call({}, variables, random((2, 64)))
    with pytest.raises(ValueError, match="variables hold quantized kernels"):
        linen.layers(MLP(), {"params": quantized}, random((2, 64)))


def test_checkpoints_restore_quantized_parameters(tmp_path):
    """Into the abstract form, which ``quantize`` gives without a weight, or by Flax's own serialization."""
    orbax = pytest.importorskip("orbax.checkpoint")
    from flax import serialization

    model, x = nn.MultiHeadDotProductAttention(num_heads=4), random((2, 5, 64))
    variables = model.init(jax.random.key(0), x)
    options = {"group_size": 32, "mode": "integer_zeros", "layers": linen.layers(model, variables, x)}
    params, report = linen.quantize(variables["params"], **options)
    abstract, of_shapes = linen.quantize(jax.eval_shape(model.init, jax.random.key(0), x)["params"], **options)
    assert [layer.bytes_after for layer in of_shapes.layers] == [layer.bytes_after for layer in report.layers]
    assert len(report.layers) == 4 and of_shapes.layers[0].relative_error is None
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", params)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "params", abstract)
    read = serialization.from_bytes(params, serialization.to_bytes(params))
    for found in (restored, read):
        assert jax.tree.structure(found) == jax.tree.structure(params)
        jax.tree.map(np.testing.assert_array_equal, found, params)
    y = linen.apply(model, {"params": params}, x)
    np.testing.assert_array_equal(linen.apply(model, {"params": read}, x), y)
    other, _ = linen.quantize(variables["params"], **options | {"group_size": 64})
    with pytest.raises(ValueError, match="the state of a quantized kernel has the arrays"):
        serialization.from_bytes(other, serialization.to_bytes(params))


def test_a_kernel_that_its_module_cannot_use_is_named():
    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("kernel", nn.initializers.ones_init(), (64, 8))

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Own(name="inner")(x)

    x = random((2, 64))
    quantized, _ = linen.quantize(Outer().init(jax.random.key(0), x)["params"], group_size=32)
    with pytest.raises(TypeError, match="inner is a Own"):
        linen.apply(Outer(), {"params": quantized}, x)
    dense, _ = linen.quantize(nn.Dense(8).init(jax.random.key(0), x)["params"], group_size=32)
    with pytest.raises(ValueError, match="accepted for an input"):
        linen.apply(nn.Dense(8), {"params": dense}, random((2, 32)))
    with pytest.raises(ValueError, match="accepted for an input"):
        linen.apply(nn.Dense(9), {"params": dense}, x)


def test_donation_frees_each_dense_kernel(monkeypatch):
    params = {f"Dense_{i}": {"kernel": random((64, 64), i), "bias": jnp.zeros(64)} for i in range(4)}
    kernels = [layer["kernel"] for layer in params.values()]
    deleted = []
    quantize = linen.quantize_array
    monkeypatch.setattr(
        linen, "quantize_array", lambda *a, **k: deleted.append([x.is_deleted() for x in kernels]) or quantize(*a, **k)
    )
    quantized, _ = linen.quantize(params, group_size=32, donate=True)
    assert deleted == [[j < i for j in range(4)] for i in range(4)]
    assert all(kernel.is_deleted() for kernel in kernels)
    y = linen.apply(nn.Dense(64), {"params": quantized["Dense_2"]}, random((2, 64)))
    assert np.isfinite(y).all()


@pytest.mark.parametrize("donate", [False, True])
def test_failure_in_the_middle(monkeypatch, donate):
    """Parameters are as they were, unless some were donated: the largest is the first, so not for want of memory."""
    params = {f"Dense_{i}": {"kernel": random((64, n), i)} for i, n in enumerate((64, 32, 128, 64))}
    original, calls = linen.quantize_array, []

    def failing(w, **options):
        calls.append(w.shape[-1])
        if len(calls) == fails:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return original(w, **options)

    monkeypatch.setattr(linen, "quantize_array", failing)
    for fails in (1, 3):
        calls.clear()
        with pytest.raises(RuntimeError) as caught:
            linen.quantize(params, group_size=32, donate=donate)
        assert calls == [128, 64, 32][:fails]
        deleted = [name for name, layer in params.items() if layer["kernel"].is_deleted()]
        assert deleted == (["Dense_0", "Dense_2"] if donate and fails == 3 else [])
        assert bool(deleted) == hasattr(caught.value, "__notes__")


def test_quantized_dense_is_dense_then_quantized():
    x = random((3, 5, 64))
    options = {"bits": 4, "group_size": 32}
    ones = nn.initializers.ones_init()
    layer = linen.QuantizedDense(40, quantize_options={"mode": "offsets"}, bias_init=ones, **options)
    variables = layer.init(jax.random.key(3), x)
    params = nn.Dense(40, bias_init=ones).init(jax.random.key(3), x)["params"]
    expected, _ = linen.quantize(params, mode="offsets", **options)
    jax.tree.map(np.testing.assert_array_equal, variables["params"], expected)
    y = np.asarray(x, np.float64) @ np.asarray(variables["params"]["kernel"].dequantize(), np.float64) + 1
    np.testing.assert_allclose(layer.apply(variables, x), y, **CLOSE)
    relu = linen.QuantizedDense(40, activation="relu", **options)
    np.testing.assert_allclose(jax.jit(relu.apply)(variables, x), np.maximum(y, 0), **CLOSE)
    # Parameters of another scheme, which the model does not have to know.
    other, _ = linen.quantize(params, bits=8, group_size=None)
    np.testing.assert_allclose(
        layer.apply({"params": other}, x), linen.apply(nn.Dense(40), {"params": other}, x), **CLOSE
    )
    with pytest.raises(ValueError, match="is dense"):
        layer.apply({"params": params}, x)


def test_lifted_quantized_dense():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + linen.QuantizedDense(64, group_size=32, name="dense")(x), None

    lift = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    chain, side = nn.scan(nn.remat(Block), length=3, **lift)(), nn.vmap(Block, in_axes=(0, None), **lift)()
    x = random((2, 64))
    variables = chain.init(jax.random.key(0), x, None)
    weights = np.asarray(variables["params"]["dense"]["kernel"].dequantize(), np.float64)
    assert weights.shape == (3, 64, 64) and not np.array_equal(weights[0], weights[1])
    y = np.asarray(x, np.float64)
    for weight in weights:
        y = y + y @ weight
    np.testing.assert_allclose(jax.jit(chain.apply)(variables, x, None)[0], y, **CLOSE)
    xs = random((3, 2, 64))
    y = np.asarray(xs, np.float64) + np.asarray(xs, np.float64) @ weights
    np.testing.assert_allclose(side.apply(variables, xs, None)[0], y, **CLOSE)


def test_dot_general_hook_needs_no_interception():
    def dense(dot_general_cls=linen.DotGeneral):
        return nn.Dense(
            40,
            kernel_init=linen.kernel_init(bits=4, group_size=32),
            promote_dtype=linen.promote_dtype,
            dot_general_cls=dot_general_cls,
        )

    x = random((3, 5, 64))
    layer = dense()
    variables = layer.init(jax.random.key(3), x)
    params, _ = linen.quantize(nn.Dense(40).init(jax.random.key(3), x)["params"], bits=4, group_size=32)
    jax.tree.map(np.testing.assert_array_equal, variables["params"], params)
    y = layer.apply({"params": params}, x)
    np.testing.assert_allclose(y, linen.apply(nn.Dense(40), {"params": params}, x), **CLOSE)
    np.testing.assert_allclose(linen.apply(layer, {"params": params}, x), y, **CLOSE)

    # A dense kernel takes the usual way, and batches of quantized ones are one product each.
    plain = nn.Dense(40, dot_general_cls=linen.DotGeneral)
    np.testing.assert_array_equal(plain.apply(plain.init(jax.random.key(0), x), x).shape, (3, 5, 40))
    stacked = jw.quantize(random((3, 64, 40)), group_size=32)
    got = linen.DotGeneral()(x, stacked, (((2,), (1,)), ((0,), (0,))))
    np.testing.assert_allclose(got, np.asarray(x) @ np.asarray(stacked.dequantize()), **CLOSE)
    with pytest.raises(ValueError, match="dimension_numbers"):
        linen.DotGeneral()(x, stacked, (((2,), (2,)), ((), ())))
