"""Automatic partitioning over eight fake devices: values, and which collectives the compiled program has."""

import dataclasses
import os
import re
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from activation_cases import assert_quantized_product, quantize
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference import MODES, random_weight, random_x

import jax_wonly as jw

DEVICES = 8
_FLAG = f"--xla_force_host_platform_device_count={DEVICES}"

if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    # The number of devices is fixed when JAX starts, and the other tests want the machine as it is.
    def environment_of(flag):
        return os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}", "JAX_PLATFORMS": "cpu"}

    def test_on_eight_devices():
        environment = environment_of(_FLAG)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, result.stdout + result.stderr

    def test_two_processes():
        """``jax.distributed``: every process has two of the four devices, and a shard of the weights on each."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        seed = os.environ["JAX_WONLY_TEST_SEED"]
        command = [sys.executable, str(Path(__file__).with_name("distributed_process.py")), address, seed]
        environment = environment_of("--xla_force_host_platform_device_count=2")
        processes = [
            subprocess.Popen(
                [*command, str(i)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for i in range(2)
        ]
        try:
            texts = [process.communicate(timeout=120)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert all(process.returncode == 0 for process in processes), "\n".join(texts)

else:

    def mesh(*sizes_and_names):
        names = tuple(n for n, _ in sizes_and_names)
        sizes = tuple(s for _, s in sizes_and_names)
        return jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))

    def put(qt, m, k=None, n=None, lead=None):
        """The tensor split like a dense kernel with ``P(lead, k, n)``."""
        return jw.device_put(qt, NamedSharding(m, P(*(lead,) * (qt.ndim - 2), k, n)))

    def collectives(compiled) -> list[str]:
        names = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
        return sorted(re.findall(names, compiled.as_text()))

    def check(f, args, plain, expected, **close):
        compiled = jax.jit(f).lower(*args).compile()
        got = compiled(*args)
        np.testing.assert_allclose(got, plain, **(close or {"rtol": 2e-5, "atol": 2e-4}))
        assert collectives(compiled) == expected
        return got

    @pytest.mark.parametrize(
        ("mode", "bits", "epilogue"), [*((mode, 4, True) for mode in MODES), (MODES[0], 8, False), (MODES[-1], 8, True)]
    )
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
        whole_x = jax.device_put(x, NamedSharding(m, P()))
        check(f, (whole_x, put(weight.qt, m, k="tp")), plain, ["all-reduce"])

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

    @pytest.mark.parametrize("split", ["k", "n"])
    def test_fsdp(rng, split):
        """Tokens and weights split over one axis: the weights are gathered, or what is smaller is."""
        weight = random_weight(rng, 512, 512, group_size=64)
        m = mesh(("fsdp", 8))
        x = random_x(rng, (16, 512))
        tokens = NamedSharding(m, P("fsdp"))
        x, qt = jax.device_put(x, tokens), put(weight.qt, m, **{split: "fsdp"})

        def forward(x, qt):
            return jax.lax.with_sharding_constraint(jw.matmul(x, qt), tokens)

        def dx(x, qt):
            return jax.lax.with_sharding_constraint(jax.grad(lambda x: (forward(x, qt) ** 2).sum() / 2)(x), tokens)

        y = np.asarray(jw.matmul(np.asarray(x), weight.qt))
        check(forward, (x, qt), y, ["all-gather"] * 2)
        compiled = jax.jit(dx).lower(x, qt).compile()
        np.testing.assert_allclose(compiled(x, qt), y @ weight.dense.T, rtol=1e-3, atol=1e-1)
        assert set(collectives(compiled)) == {"all-gather"}

    def test_data_parallel_gradient(rng):
        """dx of tokens that are split needs no exchange."""
        weight = random_weight(rng, 128, 70, group_size=64)
        m = mesh(("dp", 8))
        x = jax.device_put(random_x(rng, (16, 128)), NamedSharding(m, P("dp")))

        def dx(x, qt):
            return jax.grad(lambda x: (jw.matmul(x, qt) ** 2).sum() / 2)(x)

        plain = (np.asarray(x, np.float64) @ weight.dense) @ weight.dense.T
        check(dx, (x, put(weight.qt, m)), plain, [], rtol=1e-3, atol=1e-1)

    def test_gradient_of_scales(rng):
        """Rows are summed over their devices; outputs and whole groups of inputs stay where they are."""

        def ds(x, qt, dy):
            return jax.vjp(lambda s: jw.matmul(x, dataclasses.replace(qt, scales=s)), qt.scales)[1](dy)[0]

        x, dy = random_x(rng, (16, 512)), random_x(rng, (16, 1024))
        for group_size in (64, None):
            weight = random_weight(rng, 512, 1024, group_size=group_size)
            plain, close = np.asarray(ds(x, weight.qt, dy)), {"rtol": 2e-5, "atol": 2e-3}
            m = mesh(("d", 8))

            def split(a, *dims, m=m):
                return jax.device_put(a, NamedSharding(m, P(*dims)))

            check(ds, (split(x, "d"), put(weight.qt, m), split(dy, "d")), plain, ["all-reduce"], **close)
            check(ds, (split(x), put(weight.qt, m, n="d"), split(dy, None, "d")), plain, [], **close)
            by_inputs = (split(x, None, "d"), put(weight.qt, m, k="d"), split(dy))
            check(ds, by_inputs, plain, [] if group_size else ["all-reduce"], **close)
            both = mesh(("d", 2), ("t", 4))
            operands = split(x, "d", m=both), put(weight.qt, both, n="t"), split(dy, "d", "t", m=both)
            check(ds, operands, plain, ["all-reduce"], **close)

        stack = random_weight(rng, 512, 1024, group_size=64, lead=(8,))
        sizes = jnp.asarray([3, 0, 5, 1, 0, 2, 4, 0], jnp.int32)

        def of_experts(x, qt, dy):
            return jax.vjp(lambda s: jw.ragged_dot(x, dataclasses.replace(qt, scales=s), sizes), qt.scales)[1](dy)[0]

        plain = np.asarray(of_experts(x, stack.qt, dy))
        operands = split(x), put(stack.qt, m, lead="d"), split(dy)
        check(of_experts, operands, plain, [], **close)
        operands = split(x, "d"), put(stack.qt, m), split(dy, "d")
        check(of_experts, operands, plain, ["all-reduce"], **close)

    def test_placement_errors(rng):
        m = mesh(("a", 2), ("b", 4))
        int4 = random_weight(rng, 512, 192, group_size=256, lead=(6,)).qt
        int8 = random_weight(rng, 96, 512, bits=8, group_size=32).qt
        for qt, spec, message in [
            (
                int4,
                P(None, "b", None),
                r"K = 512 .* over 4 devices: shards of 128 would split a group of 256; .* 1, 2 de",
            ),
            (int4, P(None, None, "a"), r"N = 192 .* shards of 96 would split a tile of 64; accepted: 1, 3 devices"),
            (int4, P(None, None, ("a", "b")), r"over 8 devices: shards of 24 would split a tile of 64"),
            (int4, P("b"), "leading axis 0 = 6 .* 4 devices do not divide it; accepted: 1, 2, 3, 6 devices"),
            (int8, P("a"), r"K = 96 .* shards of 48 would split a tile of 32; accepted: 1, 3 devices"),
            (int8, P(None, None, "a"), r"has 3 axes; accepted: at most the 2 of a weight of shape \(96, 512\)"),
        ]:
            with pytest.raises(ValueError, match=message):
                jw.device_put(qt, NamedSharding(m, spec))
        with pytest.raises(TypeError, match="accepted: jax.sharding.NamedSharding"):
            jw.device_put(int4, P())
        with pytest.raises(TypeError, match="qt is a"):
            jw.shardings(int4.scales, NamedSharding(m, P()))

    def test_shardings_for_jit(rng):
        """Quantized on the devices that keep the shards, from a spec of shapes alone."""
        m = mesh(("a", 2), ("b", 4))
        w = random_x(rng, (512, 512))

        def quantize(w):
            return jw.quantize(w, group_size=64, mode="offsets")

        where = jw.shardings(jax.eval_shape(quantize, w), NamedSharding(m, P("b", "a")))
        assert where.zeros is None and where.qvalue.spec == P("a", "b", None) and where.scales.spec == P("b", "a")
        qt = jax.jit(quantize, out_shardings=where)(w)
        assert qt.qvalue.sharding == where.qvalue and qt.offsets.sharding == where.offsets
        np.testing.assert_allclose(qt.dequantize(), quantize(w).dequantize(), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("product", ["ids", "sizes"])
    @pytest.mark.parametrize("axes", ["auto", "explicit"])
    def test_ragged(rng, product, axes):
        """Every way to split experts' products, forward and dx."""
        weight = random_weight(rng, 512, 512, group_size=64, mode="offsets", lead=(8,))
        x, bias = random_x(rng, (16, 512)), random_x(rng, (8, 512))
        if product == "ids":
            rows = jnp.asarray(rng.integers(-1, 9, (16, 2)), jnp.int32)

            def f(x, qt, rows, bias):
                return jw.gather_matmul(x[:, None], qt, rows, bias=bias, activation="silu")
        else:
            rows = jnp.asarray([3, 0, 2, 5, 1, 0, 0, 2], jnp.int32)

            def f(x, qt, rows, bias):
                return jw.ragged_dot(x, qt, rows, bias=bias, activation="silu")

        def dx(x, *args):
            return jax.grad(lambda x: (f(x, *args) ** 2).sum())(x)

        make = mesh if axes == "auto" else explicit
        m, m2 = make(("d", 8)), make(("a", 2), ("b", 4))
        plain, plain_dx = np.asarray(f(x, weight.qt, rows, bias)), np.asarray(dx(x, weight.qt, rows, bias))
        for on, x_spec, weight_spec, forward, backward in [
            (m, P(), {"n": "d"}, 0, 1),
            (m, P(None, "d"), {"k": "d"}, 1, 1),
            (m, P(), {"lead": "d"}, 1, 2),
            (m, P("d"), {}, 0, 0),
            (m2, P("a"), {"lead": "b"}, 1, 2),
            (m2, P(), {"lead": "a", "n": "b"}, 1, 2),
        ]:
            whole = NamedSharding(on, P())
            split = jax.device_put(x, NamedSharding(on, x_spec))
            args = (split, put(weight.qt, on, **weight_spec), *jax.device_put((rows, bias), whole))
            check(f, args, plain, ["all-reduce"] * forward)
            check(dx, args, plain_dx, ["all-reduce"] * backward, rtol=1e-3, atol=1e-3 * np.abs(plain_dx).max())

    @pytest.mark.parametrize("spec", [P(None, "tp"), P("tp")])
    def test_shard_map_of_a_tensor(rng, spec):
        """A QuantizedTensor goes into shard_map as a whole, and a device sees its own K and N."""
        weight = random_weight(rng, 512, 512, bits=8, group_size=64, mode="integer_zeros")
        x = random_x(rng, (4, 512))
        m = mesh(("tp", 8))
        inputs, outputs = (*spec, None)[:2]

        def local(x, qt):
            y = jw.matmul(x, jw.local_shard(qt, spec))
            return jax.lax.psum(y, "tp") if inputs else y

        f = jax.shard_map(
            local,
            mesh=m,
            in_specs=(P(None, inputs), jw.partition_specs(weight.qt, spec, m)),
            out_specs=P(None, outputs),
        )
        np.testing.assert_allclose(jax.jit(f)(x, weight.qt), jw.matmul(x, weight.qt), rtol=2e-5, atol=2e-4)

    def test_expert_parallel_shard_map(rng):
        """Each device with its experts: ids of others are out of range, sizes of others are skipped."""
        weight = random_weight(rng, 64, 64, group_size=32, lead=(8,))
        x, ids = random_x(rng, (16, 64)), jnp.sort(jnp.asarray(rng.integers(0, 8, 16), jnp.int32))
        sizes = jnp.bincount(ids, length=8).astype(jnp.int32)
        m = mesh(("ep", 4), ("other", 2))
        spec = P("ep")

        def by_ids(x, qt, ids):
            first = jax.lax.axis_index("ep") * qt.shape[0]
            return jax.lax.psum(jw.gather_matmul(x, qt, ids - first), "ep")

        def by_sizes(x, qt, sizes):
            first = jax.lax.axis_index("ep") * qt.shape[0]
            return jax.lax.psum(jw.ragged_dot(x, qt, sizes, group_offset=first), "ep")

        for f, rows in ((by_ids, ids), (by_sizes, sizes)):
            g = jax.shard_map(f, mesh=m, in_specs=(P(), jw.partition_specs(weight.qt, spec, m), P()), out_specs=P())
            np.testing.assert_allclose(
                jax.jit(g)(x, weight.qt, rows), jw.gather_matmul(x, weight.qt, ids), rtol=2e-5, atol=2e-4
            )
            dx = jax.jit(jax.grad(lambda x, g=g, rows=rows: g(x, weight.qt, rows).sum()))(x)
            np.testing.assert_allclose(dx, weight.dense.sum(-1)[np.asarray(ids)], rtol=1e-4, atol=1e-3)

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
        check(dx, (split, put(weight.qt, m, k="tp")), plain, [], rtol=1e-4, atol=1e-3)

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

    @pytest.mark.parametrize(
        ("mode", "epilogue", "group_size"),
        [*((mode, True, 64) for mode in MODES), (MODES[0], False, None), (MODES[-1], True, None)],
    )
    def test_explicit_axes(rng, mode, epilogue, group_size):
        weight = random_weight(rng, 512, 512, group_size=group_size, mode=mode)
        x = random_x(rng, (4, 3, 512))
        bias = random_x(rng, (512,)) if epilogue else None
        m = explicit(("dp", 2), ("tp", 4))

        def f(x, qt, bias):
            return jw.matmul(x, qt, bias=bias, activation="relu" if epilogue else None)

        plain = np.asarray(f(x, weight.qt, bias))
        plain_dx = jax.grad(lambda x: (f(x, weight.qt, bias) ** 2).sum())(x)
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
            got = check(f, args, plain, expected)
            assert got.sharding.spec == out_spec
            loss = jax.jit(jax.grad(lambda x, qt, b: (f(x, qt, b) ** 2).sum()))
            np.testing.assert_allclose(loss(*args), plain_dx, rtol=1e-3, atol=1e-3 * np.abs(plain_dx).max())

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

    @pytest.mark.parametrize("axes", ["auto", "explicit"])
    def test_convolution(rng, axes):
        """Images and outputs split without communication; what the devices do not divide is gathered, and right."""
        weight = random_weight(rng, 64, 256, group_size=32, mode="offsets", lead=(3, 3))
        x, bias = random_x(rng, (4, 6, 5, 64)), random_x(rng, (256,))
        m = (mesh if axes == "auto" else explicit)(("dp", 2), ("tp", 4))

        def f(x, qt, bias):
            return jw.conv_general_dilated(x, qt, (2, 1), "SAME", bias=bias, activation="relu")

        def dx(x, qt, bias):
            return jax.grad(lambda x: (f(x, qt, bias) ** 2).sum())(x)

        plain, plain_dx = np.asarray(f(x, weight.qt, bias)), np.asarray(dx(x, weight.qt, bias))
        b = jax.device_put(bias, NamedSharding(m, P()))
        for x_spec, n, free in [
            (P(), None, True),
            (P("dp"), None, True),
            (P("dp"), "tp", True),
            (P(None, "dp"), None, False),
        ]:
            args = (jax.device_put(x, NamedSharding(m, x_spec)), put(weight.qt, m, n=n), b)
            compiled = jax.jit(f).lower(*args).compile()
            np.testing.assert_allclose(compiled(*args), plain, rtol=1e-4, atol=1e-3)
            assert collectives(compiled) == [] or not free
            got = jax.jit(dx)(*args)
            np.testing.assert_allclose(got, plain_dx, rtol=1e-3, atol=1e-3 * np.abs(plain_dx).max())
        odd = random_weight(rng, 64, 70, lead=(3, 3))
        args = (jax.device_put(x[:3], NamedSharding(m, P())), jax.device_put(odd.qt, NamedSharding(m, P())), b[:70])
        np.testing.assert_allclose(jax.jit(f)(*args), f(x[:3], odd.qt, bias[:70]), rtol=1e-4, atol=1e-3)
        split = jax.device_put(x, NamedSharding(m, P("dp")))
        conv = put(weight.qt, m, n="tp")

        def one_tap(x, qt, bias):
            return jw.conv_general_dilated(x, qt[:1, :1], (1, 2), "VALID", bias=bias)

        got = jax.jit(one_tap)(split, conv, b)
        np.testing.assert_allclose(got, one_tap(x, weight.qt, bias), rtol=1e-4, atol=1e-3)

    def test_quantized_activations(rng):
        """Shards of x are quantized where they are, by whole groups."""
        weight = random_weight(rng, 512, 256, group_size=64)
        x = random_x(rng, (4, 512))
        values = quantize(x, 64, "int8", True).values
        m = mesh(("dp", 2), ("tp", 4))
        plain = np.asarray(jw.matmul(x, weight.qt, activation_quantization="int8"))
        assert_quantized_product(plain, values, weight, out_dtype="float32")
        product = partial(jw.matmul, activation_quantization="int8")
        check(product, (jax.device_put(x, NamedSharding(m, P("dp"))), put(weight.qt, m, n="tp")), plain, [])
        split_x = jax.device_put(x, NamedSharding(m, P("dp", "tp")))
        check(product, (split_x, put(weight.qt, m, k="tp")), plain, ["all-reduce"])
