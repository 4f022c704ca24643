"""Automatic partitioning over eight fake devices: values, and which collectives the compiled program has."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference import MODES, random_weight, random_x

import jax_wonly as jw

DEVICES = 8
_FLAG = f"--xla_force_host_platform_device_count={DEVICES}"

if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    # The number of devices is fixed when JAX starts, and the other tests want the machine as it is.
    def test_on_eight_devices():
        environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}", "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, result.stdout + result.stderr

else:

    def mesh(*sizes_and_names):
        names = tuple(n for n, _ in sizes_and_names)
        sizes = tuple(s for _, s in sizes_and_names)
        return jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))

    def put(qt, m, k=None, n=None, lead=None):
        """The tensor split like a dense kernel with ``P(lead, k, n)``."""
        leading = (lead,) * (qt.ndim - 2)
        per_group = None if qt.group_size == qt.k else k

        def of(a):
            spec = P(*leading, n, k, None) if a.ndim == qt.ndim + 1 else P(*leading, per_group, n)
            return jax.device_put(a, NamedSharding(m, spec))

        return jax.tree.map(of, qt)

    def collectives(f, *args) -> list[str]:
        text = jax.jit(f).lower(*args).compile().as_text()
        return sorted(re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(", text))

    def check(f, args, plain, expected, **close):
        got = jax.jit(f)(*args)
        np.testing.assert_allclose(got, plain, **(close or {"rtol": 2e-5, "atol": 2e-4}))
        assert collectives(f, *args) == expected

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("bits", [4, 8])
    @pytest.mark.parametrize("epilogue", [False, True])
    def test_tensor_parallel(rng, mode, bits, epilogue):
        weight = random_weight(rng, 512, 1024, bits=bits, group_size=64, mode=mode)
        x = random_x(rng, (4, 512))
        bias = random_x(rng, (1024,)) if epilogue else None

        def f(x, qt):
            return jw.matmul(x, qt, bias=bias, activation="silu" if epilogue else None)

        plain = np.asarray(f(x, weight.qt))
        m = mesh(("tp", 8))
        check(f, (x, put(weight.qt, m, n="tp")), plain, [])
        split_x = jax.device_put(x, NamedSharding(m, P(None, "tp")))
        check(f, (split_x, put(weight.qt, m, k="tp")), plain, ["all-reduce"])
        check(f, (x, put(weight.qt, m, k="tp")), plain, ["all-reduce"])

    def test_per_channel_scales(rng):
        weight = random_weight(rng, 512, 1024, mode="float_zeros")
        x = random_x(rng, (4, 512))
        m = mesh(("tp", 8))
        plain = np.asarray(jw.matmul(x, weight.qt))
        check(jw.matmul, (x, put(weight.qt, m, k="tp")), plain, ["all-reduce"])
        check(jw.matmul, (x, put(weight.qt, m, n="tp")), plain, [])

    def test_data_and_tensor_parallel(rng):
        weight = random_weight(rng, 512, 512, group_size=64)
        m = mesh(("dp", 2), ("tp", 4))
        x = random_x(rng, (4, 3, 512))
        plain = np.asarray(jw.matmul(x, weight.qt))
        split = jax.device_put(x, NamedSharding(m, P("dp")))
        check(jw.matmul, (split, put(weight.qt, m, n="tp")), plain, [])
        check(jw.matmul, (split, put(weight.qt, m, k="tp")), plain, ["all-reduce"])

    def test_experts(rng):
        weight = random_weight(rng, 64, 64, group_size=32, mode="offsets", lead=(8,))
        m = mesh(("ep", 8))
        x = random_x(rng, (8, 5, 64))
        plain = np.asarray(jw.matmul(x, weight.qt))
        split = jax.device_put(x, NamedSharding(m, P("ep")))
        check(jw.matmul, (split, put(weight.qt, m, lead="ep")), plain, [])
        check(jax.vmap(jw.matmul), (split, put(weight.qt, m, lead="ep")), plain, [])

    def test_gradients(rng):
        weight = random_weight(rng, 512, 512, group_size=64)
        x = random_x(rng, (4, 512))
        m = mesh(("tp", 8))

        def dx(x, qt):
            return jax.grad(lambda x: jw.matmul(x, qt)[:, :7].sum())(x)

        plain = np.asarray(dx(x, weight.qt))
        check(dx, (x, put(weight.qt, m, n="tp")), plain, ["all-reduce"])
        split = jax.device_put(x, NamedSharding(m, P(None, "tp")))
        np.testing.assert_allclose(jax.jit(dx)(split, put(weight.qt, m, k="tp")), plain, rtol=1e-4, atol=1e-3)

    @pytest.mark.parametrize(("k", "n"), [(96, 128), (64, 70), (512, 192), (192, 512)])
    def test_meshes_that_do_not_divide(rng, k, n):
        """Right whatever the shapes, if only by gathering."""
        weight = random_weight(rng, k, n, group_size=32, mode="integer_zeros")
        for m in (mesh(("tp", 8)), mesh(("a", 2), ("b", 4))):
            name = m.axis_names[0]
            x = random_x(rng, (8, k))
            plain = np.asarray(jw.matmul(x, weight.qt))
            for spec in (P(), P(name), P(None, name) if k % m.shape[name] == 0 else P()):
                split = jax.device_put(x, NamedSharding(m, spec))
                whole = jax.device_put(weight.qt, NamedSharding(m, P()))
                np.testing.assert_allclose(jax.jit(jw.matmul)(split, whole), plain, rtol=2e-5, atol=2e-4)

    def test_manual(rng):
        """Full-manual shard_map: the sum is the caller's."""
        weight = random_weight(rng, 512, 64, group_size=64)
        x = random_x(rng, (4, 512))
        m = mesh(("tp", 8))

        def local(x, qw, scales):
            return jax.lax.psum(jw.matmul(x, qw, scales, bits=4), "tp")

        f = jax.shard_map(local, mesh=m, in_specs=(P(None, "tp"), P(None, "tp"), P("tp")), out_specs=P())
        np.testing.assert_allclose(jax.jit(f)(x, *weight.qt), jw.matmul(x, weight.qt), rtol=2e-5, atol=2e-4)
        dx = jax.jit(jax.grad(lambda x: f(x, *weight.qt).sum()))(x)
        np.testing.assert_allclose(dx, np.tile(weight.dense.sum(1), (4, 1)), rtol=1e-4, atol=1e-3)

    def test_partly_manual(rng):
        weight = random_weight(rng, 128, 512, group_size=64)
        x = random_x(rng, (4, 128))
        m = mesh(("dp", 2), ("tp", 4))
        f = jax.shard_map(
            lambda x, qt: jw.matmul(x, qt), mesh=m, in_specs=(P("dp"), P()), out_specs=P("dp"), axis_names={"dp"}
        )
        got = jax.jit(f)(x, put(weight.qt, m, n="tp"))
        np.testing.assert_allclose(got, jw.matmul(x, weight.qt), rtol=2e-5, atol=2e-4)

    def test_scan_over_sharded_layers(rng):
        weight = random_weight(rng, 512, 512, group_size=64, lead=(3,))
        x = random_x(rng, (4, 512)) / 32
        m = mesh(("tp", 8))

        def f(x, qt):
            return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, qt)[0]

        stacked = put(weight.qt, m, n="tp")
        np.testing.assert_allclose(jax.jit(f)(x, stacked), f(x, weight.qt), rtol=1e-4, atol=1e-4)

    def explicit(*sizes_and_names):
        names = tuple(n for n, _ in sizes_and_names)
        sizes = tuple(s for _, s in sizes_and_names)
        return jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Explicit,) * len(names))

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("epilogue", [False, True])
    @pytest.mark.parametrize("group_size", [64, None])
    def test_explicit_axes(rng, mode, epilogue, group_size):
        weight = random_weight(rng, 512, 512, group_size=group_size, mode=mode)
        x = random_x(rng, (4, 3, 512))
        bias = random_x(rng, (512,)) if epilogue else None
        m = explicit(("dp", 2), ("tp", 4))

        def f(x, qt, bias):
            return jw.matmul(x, qt, bias=bias, activation="relu" if epilogue else None)

        plain = np.asarray(f(x, weight.qt, bias))
        for x_spec, k, n, out_spec, expected in [
            (P(), None, None, P(None, None, None), []),
            (P("dp"), None, "tp", P("dp", None, "tp"), []),
            (P("dp", None, "tp"), "tp", None, P("dp", None, None), ["all-reduce"]),
            (P("dp"), "tp", None, P("dp", None, None), ["all-reduce"]),
            (P("dp", None, "tp"), None, None, P("dp", None, None), ["all-reduce"]),
        ]:
            split = jax.device_put(x, NamedSharding(m, x_spec))
            b = None if bias is None else jax.device_put(bias, NamedSharding(m, P()))
            args = (split, put(weight.qt, m, k=k, n=n), b)
            check(f, args, plain, expected)
            assert jax.typeof(jax.jit(f)(*args)).sharding.spec == out_spec
            loss = jax.jit(jax.grad(lambda x, qt, b: (f(x, qt, b) ** 2).sum()))
            dx = jax.grad(lambda x: (f(x, weight.qt, bias) ** 2).sum())(x)
            np.testing.assert_allclose(loss(*args), dx, rtol=1e-3, atol=1e-3 * np.abs(dx).max())

    def test_explicit_experts_and_odd_shapes(rng):
        weight = random_weight(rng, 64, 70, group_size=32, mode="offsets", lead=(8,))
        m = explicit(("ep", 4), ("dp", 2))
        x = random_x(rng, (2, 8, 5, 64))
        plain = np.asarray(jw.matmul(x, weight.qt))
        split = jax.device_put(x, NamedSharding(m, P("dp", "ep")))
        check(jw.matmul, (split, put(weight.qt, m, lead="ep")), plain, [])
        got = jax.jit(jw.matmul)(jax.device_put(x, NamedSharding(m, P(None, None, None, "ep"))), put(weight.qt, m))
        np.testing.assert_allclose(got, plain, rtol=2e-5, atol=2e-4)
        with jax.set_mesh(m):
            got = jw.matmul(jax.device_put(x[0, 0, 0], P("dp")), jax.device_put(weight.qt[0], P()))
        np.testing.assert_allclose(got, plain[0, 0, 0], rtol=2e-5, atol=2e-4)
