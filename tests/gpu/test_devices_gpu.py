"""Several GPUs of one host: the same bits on each of them, and products split over all of them."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import UNITS, random_weight, random_x

import jax_wonly as jw

pytestmark = [pytest.mark.gpu, pytest.mark.device]

# Tokens of every kernel: few, tens, tiles, and tiles of a last wave that several CTAs share.
TOKENS = (1, 2, 8, 16, 60, 130, 300, 1100)


@pytest.fixture(autouse=True)
def _several():
    if jax.device_count() < 2:
        pytest.skip("one GPU; this needs two or more of one host")


def mesh(name):
    """Of as many devices as the sizes here can be split over."""
    count = 1 << (min(jax.device_count(), 4).bit_length() - 1)
    return jax.make_mesh((count,), (name,), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])


def sharded(m, a, *spec):
    place = jw.device_put if isinstance(a, jw.QuantizedTensor) else jax.device_put
    return place(a, NamedSharding(m, P(*spec)))


def calls(rng, dtype):
    """Products, their gradients, experts' products and quantization: functions and arguments."""
    for bits, mode in (4, "symmetric"), (4, "offsets"), (8, "integer_zeros"):
        qt = random_weight(rng, 1024, 1032, bits=bits, group_size=128, mode=mode, scale_dtype=dtype).qt
        for m in TOKENS:
            yield lambda x, qt: jw.matmul(x, qt, activation="silu"), (random_x(rng, (m, 1024), dtype), qt)
            yield (
                lambda dy, qt: jax.linear_transpose(
                    lambda x: jw.matmul(x, qt), jax.ShapeDtypeStruct((dy.shape[0], 1024), dy.dtype)
                )(dy)[0],
                (random_x(rng, (m, 1032), dtype), qt),
            )
        experts = random_weight(rng, 512, 520, bits=bits, group_size=64, mode=mode, scale_dtype=dtype, lead=(6,)).qt
        for m in 5, 90, 1500:
            sizes = jnp.asarray(rng.multinomial(m, [0.3, 0, 0.4, 0.1, 0.1, 0.1]), jnp.int32)
            yield jw.ragged_dot, (random_x(rng, (m, 512), dtype), experts, sizes)
            ids = jnp.asarray(rng.integers(-1, 7, m), jnp.int32)
            yield jw.gather_matmul, (random_x(rng, (m, 512), dtype), experts, ids)
        yield lambda w, b=bits, z=mode: jw.quantize(w, bits=b, group_size=64, mode=z), (random_x(rng, (640, 200)),)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_device(rng, dtype):
    """A thread for each device, without waiting for single results: what a device keeps of a kernel is its own."""
    functions, arguments = zip(*calls(rng, dtype), strict=True)
    jitted = [jax.jit(f) for f in functions]
    found: dict[int, list] = {}

    def work(index, device):
        args = [jax.device_put(a, device) for a in arguments]
        results = [f(*a) for f, a in zip(jitted, args, strict=True)]
        assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(results))
        found[index] = jax.tree.map(np.asarray, results)

    # The last device is the first to launch a kernel.
    work(-1, jax.devices()[-1])
    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(jax.devices())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(-1, jax.device_count()))
    for results in found.values():
        jax.tree.map(np.testing.assert_array_equal, results, found[-1])


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize(("bits", "mode"), [(4, "symmetric"), (4, "offsets"), (8, "integer_zeros")])
def test_tensor_parallel(rng, m, bits, mode):
    """Outputs split, inputs split with one all-reduce, and tokens split: products and the activations' gradients."""
    dtype = ("bfloat16", "float32")[int(rng.integers(2))]
    weight = random_weight(rng, 1024, 2048, bits=bits, group_size=128, mode=mode, scale_dtype=dtype)
    x, dy = random_x(rng, (m, 1024), dtype), random_x(rng, (m, 2048), dtype)
    on = mesh("tp")

    def both(x, qt, dy):
        y, pullback = jax.vjp(lambda x: jw.matmul(x, qt), x)
        return y, pullback(dy)[0]

    operands = [
        (sharded(on, x), sharded(on, weight.qt, None, "tp"), sharded(on, dy, None, "tp")),
        (sharded(on, x, None, "tp"), sharded(on, weight.qt, "tp"), sharded(on, dy)),
    ]
    if m % on.size == 0:
        operands.append((sharded(on, x, "tp"), sharded(on, weight.qt), sharded(on, dy, "tp")))
    # Sums of shards may be rounded to the activations' type before they are added: a unit for each of them.
    close = 3 * on.size * UNITS[dtype] if dtype == "bfloat16" else 3e-5
    y = np.asarray(x).astype(np.float64) @ weight.dense
    dx = np.asarray(dy).astype(np.float64) @ weight.dense.T
    for args in operands:
        for result, exact in zip(jax.jit(both)(*args), (y, dx), strict=True):
            assert len(result.devices()) == on.size
            error = np.abs(np.asarray(result).astype(np.float64) - exact).max() / np.abs(exact).max()
            assert error <= close, [a.sharding for a in jax.tree.leaves(args)]


@pytest.mark.parametrize("m", [3, 40, 700])
def test_expert_parallel(rng, m):
    """Each device with its experts, in ``shard_map``: forward and the activations' gradient."""
    weight = random_weight(rng, 512, 256, group_size=64, mode="offsets", lead=(8,))
    sizes = jnp.asarray(rng.multinomial(m, rng.dirichlet(np.ones(8))), jnp.int32)
    x, dy = random_x(rng, (m, 512)), random_x(rng, (m, 256))
    on = mesh("ep")

    def local(x, qt, sizes):
        first = jax.lax.axis_index("ep") * qt.shape[0]
        return jax.lax.psum(jw.ragged_dot(x, qt, sizes, group_offset=first), "ep")

    specs = P(), jw.partition_specs(weight.qt, P("ep"), on), P()
    split = jax.shard_map(local, mesh=on, in_specs=specs, out_specs=P())
    qt = sharded(on, weight.qt, "ep")
    y, pullback = jax.vjp(lambda x: jax.jit(split)(x, qt, sizes), sharded(on, x))
    plain, plain_pullback = jax.vjp(lambda x: jw.ragged_dot(x, weight.qt, sizes), x)
    np.testing.assert_allclose(y, plain, rtol=2e-5, atol=2e-4)
    (dx,), (plain_dx,) = pullback(sharded(on, dy)), plain_pullback(dy)
    np.testing.assert_allclose(dx, plain_dx, rtol=1e-4, atol=1e-4 * np.abs(plain_dx).max())
