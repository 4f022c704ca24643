"""Random inputs: results against float64, bad arguments and damaged files against clear errors.

Every property is a Hypothesis strategy and a check. ``main`` runs many examples of each, tests/test_reliability.py a
few.
"""

import argparse
import functools
import importlib
import json
import math
import os
import re
import resource
import struct
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import activation_cases
import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy
import static_cases
from conv_cases import check_conv
from experts_cases import check_gather_matmul, check_ragged_dot
from hypothesis import strategies as st
from matmul_cases import rounds_weights
from quantize_cases import check_codes, check_dequantize
from reference import DTYPES, MODES, UNITS, assert_product, random_weight, random_x
from reliability.record import measured, save
from test_checkpoint import GOOD_GGUF, GOOD_SAFETENSORS, gguf_bytes
from test_checkpoint_fuzz import damaged, sound

import jax_wonly as jw
from jax_wonly import _abi, _format, _selftest, checkpoint, compat

OWN = "cuda" if jax.default_backend() == "gpu" else "cpu"
# CUDA has not all of them.
TARGETS = sorted(importlib.import_module(f"jax_wonly._{OWN}").registrations())
SECONDS = 20  # of the processor that a file may take
GROWTH = 512 << 20  # bytes that it may make the process grow by

dtypes, modes, bits = st.sampled_from(sorted(DTYPES)), st.sampled_from(MODES), st.sampled_from([4, 8])
activations = st.sampled_from([None, "relu", "relu6", "gelu", "silu"])
implementations = st.sampled_from([None, OWN, "xla", "dequantize"])
seeds = st.integers(0, 2**32 - 1)
groupings = st.one_of(
    st.tuples(st.integers(1, 300), st.none()),
    st.sampled_from([32, 64, 128, 256]).flatmap(
        lambda g: st.tuples(st.integers(1, 512 // g).map(g.__mul__), st.just(g))
    ),
)  # K and the group size


def check_product(k_group, n, m, lead, weight_lead, bits, mode, x_dtype, scale_dtype, **rest) -> None:
    rng = np.random.default_rng(rest["seed"])
    k, group_size = k_group
    weight = random_weight(
        rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=scale_dtype, lead=weight_lead
    )
    x = random_x(rng, (*lead, m, k) if m is not None else (k,), x_dtype)
    bias = random_x(rng, (n,), rest["bias"]) if rest["bias"] else None
    options = {name: rest[name] for name in ("activation", "preferred_element_type", "implementation")}
    product = functools.partial(jw.matmul, **options)
    y = (jax.jit(product) if rest["jit"] else product)(x, weight.qt, bias=bias)
    assert_product(
        y,
        x,
        weight,
        bias=bias,
        activation=rest["activation"],
        out_dtype=rest["preferred_element_type"],
        rounded_weights=rounds_weights(rest["implementation"], x, weight.qt),
    )


def check_in_axes(k_group, n, mode, axes, implementation, seed) -> None:
    """vmap over any axes of any operands, against float64 slice by slice."""
    rng = np.random.default_rng(seed)
    (k, group_size), size = k_group, 3
    weights = [random_weight(rng, k, n, group_size=group_size, mode=mode) for _ in range(size)]
    xs, biases = random_x(rng, (size, 4, k)), random_x(rng, (size, n))
    parts = [part for part in ("qvalue", "scales", "zeros", "offsets") if getattr(weights[0].qt, part) is not None]
    mapped = {part: axis for part, axis in zip(parts, axes[2:], strict=False)}
    used = [  # the weight of each slice, whose parts are its own or the first one's
        jw.QuantizedTensor(
            **{p: getattr(weights[i if mapped[p] is not None else 0].qt, p) for p in parts}, bits=4, k=k, n=n
        )
        for i in range(size)
    ]

    def stacked(values, axis):
        return values[0] if axis is None else jnp.asarray(np.stack(list(map(np.asarray, values)), axis))

    arrays = {p: stacked([getattr(qt, p) for qt in used], mapped[p]) for p in parts}
    if axes[0] is None and axes[1] is None and all(axis is None for axis in mapped.values()):
        axes = (0, *axes[1:])

    def product(x, bias, arrays):
        qt = jw.QuantizedTensor(**arrays, bits=4, k=k, n=n)
        return jw.matmul(x, qt, bias=bias, implementation=implementation)

    unpack = jax.jit(lambda qw: jw.unpack(qw, 4, k, n))
    got = jax.vmap(product, in_axes=(axes[0], axes[1], mapped))(stacked(xs, axes[0]), stacked(biases, axes[1]), arrays)
    for i in range(size):
        x, bias = (a[0 if axis is None else i] for a, axis in zip((xs, biases), axes, strict=False))
        codes = np.asarray(unpack(used[i].qvalue), np.float64)
        s, shift = (
            None if a is None else np.repeat(np.asarray(a, np.float64), used[i].group_size, 0)
            for a in (used[i].scales, used[i].zeros if used[i].zeros is not None else used[i].offsets)
        )
        dense = codes * s + shift if mode == "offsets" else (codes - (8 if shift is None else shift)) * s
        size_of = (
            (codes + np.abs(8 if shift is None else shift)) * s if mode != "offsets" else codes * s + np.abs(shift)
        )
        exact = np.asarray(x, np.float64) @ dense + np.asarray(bias, np.float64)
        bound = 2.0**-18 * (np.abs(np.asarray(x, np.float64)) @ size_of + np.abs(np.asarray(bias))) + 1e-6
        assert (np.abs(np.asarray(got[i]) - exact) <= bound).all()


def check_gradient(k_group, n, m, bits, mode, dtype, implementation, seed) -> None:
    """The gradient of x, whose kernel reads packed weights the other way."""
    rng = np.random.default_rng(seed)
    k, group_size = k_group
    weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode)
    x, dy = random_x(rng, (m, k), dtype), random_x(rng, (m, n), dtype)
    dx = jax.vjp(lambda x: jw.matmul(x, weight.qt, implementation=implementation), x)[1](dy)[0]
    exact = np.asarray(dy).astype(np.float64) @ weight.dense.T
    magnitude = np.abs(np.asarray(dy).astype(np.float64)) @ weight.magnitude.T
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-22}[dtype]
    bound = 2.0**-18 * magnitude + 1.01 * unit * np.abs(exact) + 1e-6
    if implementation != "cpu":
        # CUDA's kernels round the weights, and before that what is no integer of zeros, and offsets; XLA's dense
        # product may round weights, and on CPUs its sums.
        bound = bound + (2 if mode in ("float_zeros", "offsets") else 1) * unit * magnitude
    assert dx.dtype == x.dtype and (np.abs(np.asarray(dx).astype(np.float64) - exact) <= bound).all()


def check_codes_of(k_group, n, seed, **options) -> None:
    check_codes(np.random.default_rng(seed), k=k_group[0], group_size=k_group[1], n=n, **options)


def check_dense_of(k_group, n, seed, **options) -> None:
    check_dequantize(np.random.default_rng(seed), k=k_group[0], group_size=k_group[1], n=n, **options)


def check_round_trip(k_group, n, bits, mode, dtype, implementation, seed) -> None:
    """A dense weight comes back within half a step, or where the range has to hold the zero, a step."""
    k, group_size = k_group
    w = random_x(np.random.default_rng(seed), (k, n), dtype)
    qt = jw.quantize(w, bits=bits, group_size=group_size, mode=mode, implementation=implementation)
    back = np.asarray(qt.dequantize(jnp.float32)).astype(np.float64)
    step = np.repeat(np.asarray(qt.scales).astype(np.float64), qt.group_size, 0)
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-22}[dtype]
    dense = np.asarray(w).astype(np.float64)
    # Scales, zeros and offsets are rounded to their type, which moves the extremes by that part of the whole range.
    bound = 0.5 * step + 2 * unit * 2**bits * step + 2 * unit * np.abs(dense).max()
    if mode == "integer_zeros":
        bound = bound + 0.5 * step
    single = step == 0 if mode == "symmetric" else np.zeros_like(step, bool)
    assert ((np.abs(back - dense) <= bound) | single).all()


def check_ragged(k_group, seed, **options) -> None:
    check_ragged_dot(np.random.default_rng(seed), k=k_group[0], group_size=k_group[1], **options)


def check_gathered(leads, n, seed, **options) -> None:
    check_gather_matmul(np.random.default_rng(seed), x_lead=leads[0], ids_lead=leads[1], n=n, **options)


def check_convolution(axes, explicit, padding, spread, k_group, seed, **options) -> None:
    sizes, window, strides, dilation, *pads = zip(*axes, strict=True)
    check_conv(
        np.random.default_rng(seed),
        sizes=sizes,
        window=window,
        strides=strides,
        rhs_dilation=dilation,
        padding=tuple(zip(*pads, strict=True)) if explicit else padding,
        lhs_dilation=(spread,) * len(sizes) if explicit else None,
        k=k_group[0],
        group_size=k_group[1],
        rounded_weights=True,
        **options,
    )


def check_grouped_convolution(k, groups, each, **options) -> None:
    check_convolution(k_group=(k, None), n=groups * each, groups=groups, **options)


def check_activation(k_group, n, m, codes, grouped, bits, mode, dtype, seed) -> None:
    """Codes to the bit, and their product against float64."""
    rng = np.random.default_rng(seed)
    (k, group_size), (code, symmetric) = k_group, codes
    bits = 4 if code == activation_cases.FLOAT8 else bits
    weight = random_weight(rng, k, n, bits=bits, group_size=group_size, mode=mode)
    x, x_group = random_x(rng, (m, k), dtype), group_size if grouped else None
    xq = jw.quantize_activation(x, group_size=x_group, dtype=code, symmetric=symmetric)
    expected = activation_cases.check_codes(x, xq, x_group, code, symmetric)
    product, how = jax.jit(jw.matmul), {}
    if OWN == "cuda" and _abi.QUANTIZED_MATMUL in product.lower(xq, weight.qt).as_text():
        how = {"unit": activation_cases.KERNEL_UNITS[code]}
    elif OWN == "cuda":
        how = {"noise": UNITS[dtype]}  # without a kernel activations are rounded to the result's type
    activation_cases.assert_quantized_product(product(xq, weight.qt), expected.values, weight, out_dtype=dtype, **how)


def check_static(k, n, m, bits, activation, seed) -> None:
    """int8 in and out, to the bit."""
    rng = np.random.default_rng(seed)
    layer, weights, *_ = static_cases.random_layer(rng, k, n, bits=bits, activation=activation)
    q = rng.integers(-128, 128, (m, k)).astype(np.int8)
    np.testing.assert_array_equal(jw.static.matmul(q, layer), static_cases.expected_codes(q, layer, weights))


# Bad arguments.

X = np.linspace(-1, 1, 6 * 128, dtype=np.float32).reshape(6, 128)


@functools.cache
def good_calls() -> dict[str, tuple[Callable, dict[str, Any]]]:
    """Every function with arguments that it accepts."""
    w = np.sin(np.arange(128 * 70, dtype=np.float32)).reshape(128, 70)
    qt = jw.quantize(w, group_size=64, mode="offsets")
    stack = jw.quantize(np.stack([w, -w, 2 * w]), group_size=64)
    host = {"scales": np.asarray(qt.scales), "offsets": np.asarray(qt.offsets)}
    product = {"preferred_element_type": None, "precision": None, "implementation": None}
    epilogue = {"bias": np.ones(70, np.float32), "activation": None}
    equation = {"equation": "mk,kn->mn", "x": X, "qt": qt, "axis_sizes": None}
    window = {
        "lhs": np.sin(np.arange(2 * 5 * 4 * 64, dtype=np.float32)).reshape(2, 5, 4, 64),
        "rhs": jw.quantize(np.sin(np.arange(9 * 64 * 70, dtype=np.float32)).reshape(3, 3, 64, 70), group_size=64),
        "window_strides": (1, 1),
        "padding": "SAME",
        "lhs_dilation": None,
        "rhs_dilation": None,
        "dimension_numbers": None,
        "feature_group_count": 1,
        "batch_group_count": 1,
    }
    numbers = {"dimension_numbers": (((1,), (0,)), ((), ()))}
    good_files()  # writes one of them
    return {
        "matmul": (
            jw.matmul,
            {"x": X, "qw": np.asarray(qt.qvalue), **host, "zeros": None, "bits": None, **epilogue, **product},
        ),
        "quantize": (
            jw.quantize,
            {"w": w, "bits": 4, "group_size": 64, "mode": "symmetric", "scale_dtype": None, "implementation": None},
        ),
        "dequantize": (
            jw.dequantize,
            {"qw": np.asarray(qt.qvalue), **host, "k": 128, "bits": None, "dtype": None, "implementation": None},
        ),
        "ragged_dot": (
            jw.ragged_dot,
            {"lhs": X, "rhs": stack, "group_sizes": np.array([2, 0, 3]), "group_offset": None, **epilogue, **product},
        ),
        "gather_matmul": (
            jw.gather_matmul,
            {"x": X, "qt": stack, "expert_ids": np.array([0, 2, 1, 1, 0, 2]), **epilogue, **product},
        ),
        "einsum": (jw.einsum, {**equation, **product}),
        "conv_general_dilated": (jw.conv_general_dilated, {**window, **product, **epilogue}),
        "dot_general": (jw.dot_general, {"lhs": X, "rhs": qt, **numbers, **product}),
        "load": (
            _load_all,
            {"path": _folder() / "good.safetensors", "format": "auto", "inexact": "error", "config": None},
        ),
        "pack": (jw.pack, {"codes": np.ones((128, 70), np.uint8), "bits": 4}),
        "unpack": (jw.unpack, {"qw": np.asarray(qt.qvalue), "bits": 4, "k": 128, "n": 70}),
        **_good_conversions(),
    }


def _good_conversions() -> dict[str, tuple[Callable, dict[str, Any]]]:
    w = np.cos(np.arange(64 * 64, dtype=np.float32)).reshape(64, 64)
    plain, zeros, offsets = (
        jw.quantize(w, group_size=32, mode=mode, scale_dtype="float16")
        for mode in ("symmetric", "integer_zeros", "offsets")
    )
    encoded = compat.awq.encode(zeros), compat.gptq.encode(zeros), compat.compressed_tensors.encode_packed(plain)
    of_awq, of_gptq, packed = ({name: np.asarray(a) for name, a in arrays.items()} for arrays in encoded)
    del of_gptq["g_idx"]
    mlx = {name: np.asarray(a) for name, a in compat.mlx.encode(offsets).items()}
    half, one = np.zeros((64, 32), np.uint8), np.ones((128, 1), np.float32)
    per_group = {"scale": one.reshape(2, 64), "zero_point": one.reshape(2, 64)}
    hqq = {"w_q": half, "scale": one, "zero": one, "shape": (64, 64), "bits": 4, "group_size": 32, "axis": 1}
    layout = {"qvalue": np.asarray(plain.qvalue), "bits": 4, "k": 64, "n": 64, "arch": 80}
    ct = {"weight_packed": packed["weight_packed"], "weight_scale": packed["weight_scale"], "shape": (64, 64)}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("a",))
    return {
        "awq.decode": (compat.awq.decode, of_awq),
        "gptq.decode": (compat.gptq.decode, {**of_gptq, "bits": 4, "version": 1, "group_size": None}),
        "gptq.encode": (compat.gptq.encode, {"qt": zeros, "version": 1}),
        "mlx.decode": (compat.mlx.decode, {**mlx, "group_size": 32, "bits": 4}),
        "mlx.encode": (compat.mlx.encode, {"qt": offsets}),
        "compressed_tensors.decode_packed": (
            compat.compressed_tensors.decode_packed,
            {**ct, "weight_zero_point": None, "bits": 4, "group_size": None},
        ),
        "torchao.decode": (compat.torchao.decode, {"qdata": half, **per_group}),
        "hqq.decode": (compat.hqq.decode, hqq),
        "llama_cpp.decode": (compat.llama_cpp.decode, {"blocks": np.zeros((4, 36), np.uint8), "kind": "Q4_0"}),
        "paddle.weight_quantize": (
            compat.paddle.weight_quantize,
            {"x": w, "algo": "weight_only_int8", "arch": None, "group_size": -1},
        ),
        "faster_transformer.encode": (compat.faster_transformer.encode, layout),
        "partition_specs": (
            jw.partition_specs,
            {"qt": plain, "spec": jax.sharding.PartitionSpec(None, "a"), "mesh": mesh},
        ),
    }


def _load_all(path, **options: Any) -> list[Any]:
    return [value for _, value in checkpoint.load(path, **options).items()]


@functools.cache
def hostile_values() -> list[Any]:
    """What no argument should be, and some of what one or the other may be."""
    return [
        *(None, True, -1, 0, 1, 3, 10**30, 1.5, float("nan"), 1j, "x", "", b"x", "float64", "\0", [], [1, 2], (), {}),
        *({"a": 1}, {1, 2}, object(), int, len, slice(1), Ellipsis, np.int64(7), np.float32(2), np.float64("inf")),
        *(np.array(2), np.zeros(0), np.zeros((2, 3), np.complex64), np.array(["a"]), np.array([None])),
        *(np.zeros((1,) * 20), np.zeros(3, "datetime64[s]"), np.zeros(2, [("a", "f4")]), np.zeros((6, 128), ">f4")),
        *(np.ma.zeros((6, 128)), np.array([4]), np.array(4), np.array("relu")),
        *(np.full((6, 128), np.nan, np.float32), np.zeros((6, 0), np.float32), np.zeros((0, 128), np.float32)),
        *(jnp.zeros((6, 128), jnp.int4), jnp.zeros((6, 128), jnp.float8_e4m3fn), jax.random.key(0)),
        *(jax.ShapeDtypeStruct((6, 128), np.float32), good_calls()["ragged_dot"][1]["rhs"], jnp.float64, "bfloat16"),
        *(jw.QuantizedTensor(None, None, bits=4, k=128, n=70), jw.QuantizedTensor(X, X, X, X, bits=3, k=-1, n=0)),
        *(jw.PermutedTensor(None, None), jnp.bfloat16, [[1.0, 2.0]], ((1,), (0,)), "mk,kn->", "mk,kn", "...,...->..."),
    ]


CHANGES: dict[str, Callable[[np.ndarray], Any]] = {
    "without its first axis": lambda a: a[0],
    "with one axis more": lambda a: a[None],
    "with two axes more": lambda a: np.stack([a[None]] * 2),
    "without its last entries": lambda a: a[..., :-1],
    "without its first entries": lambda a: a[1:],
    "empty": lambda a: a[..., :0],
    "swapped": lambda a: a.T,
    "a list": lambda a: a.tolist(),
    "float64": lambda a: a.astype(np.float64),
    "int32": lambda a: a.astype(np.int32),
    "bool": lambda a: a.astype(bool),
    "negative": lambda a: -a.astype(np.int32) - 1,
    "NaN": lambda a: a * np.float32("nan"),
    "strided": lambda a: np.repeat(a, 2, -1)[..., ::2],
    "read-only": lambda a: np.broadcast_to(a, a.shape),
}


def check_bad_arguments(function: str, picks: list[tuple[int, int]]) -> None:
    """TypeError or ValueError that names an argument, or a result; nothing else."""
    call, arguments = good_calls()[function]
    changed = dict(arguments)
    names = list(arguments)
    for where, what in picks:
        name = names[where % len(names)]
        value = changed[name]
        choices = [*hostile_values(), *(CHANGES.values() if isinstance(value, np.ndarray) and value.ndim else ())]
        choice = choices[what % len(choices)]
        changed[name] = choice(value) if any(choice is change for change in CHANGES.values()) else choice
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            jax.block_until_ready(call(**changed))
    except (TypeError, ValueError, FileNotFoundError) as error:
        text = str(error)
        assert "jax_wonly" in text, f"{type(error).__name__} of another library: {text[:300]}"
        # Where two do not fit each other, either may be named; a path by itself, a weight also as one or by its sizes.
        words = "|".join((*names, "weight", "qw", "scales", "K="))
        said = re.search(rf"\b({words})", text) or str(changed.get("path", "?")) in text
        assert said, f"no argument is named: {text[:300]}"


def check_each_bad_argument() -> dict[str, Any]:
    """Every one of those values in the place of every argument."""
    cases, failures = 0, 0
    for function, (_, arguments) in good_calls().items():
        for where, value in enumerate(arguments.values()):
            changes = len(CHANGES) if isinstance(value, np.ndarray) and value.ndim else 0
            for what in range(len(hostile_values()) + changes):
                cases += 1
                try:
                    check_bad_arguments(function, [(where, what)])
                except Exception:
                    traceback.print_exc()
                    failures += 1
    return {"what": "each bad value in the place of each argument", "cases": cases, "failures": failures}


def _call_of(rng, target: str) -> tuple[list, list, dict[str, Any]]:
    """Operands, results and attributes of a custom call that is sound."""
    on_gpu = jax.default_backend() == "gpu"
    batch, m, g, groups, n = (int(rng.integers(1, high)) for high in (3, 20, 80, 3, 140))
    if groups > 1 and on_gpu:  # whose kernels take groups of certain sizes
        g = 128 if target in (_abi.QUANTIZE_ACTIVATION, _abi.QUANTIZED_MATMUL) else int(rng.choice([32, 64, 128]))
    conv, ragged = target == _abi.CONV, target in (_abi.RAGGED_MATMUL, _abi.RAGGED_MATMUL_TRANSPOSED)
    transposed = target in (_abi.MATMUL_TRANSPOSED, _abi.RAGGED_MATMUL_TRANSPOSED)
    dtype, dtype2 = (DTYPES[str(rng.choice(sorted(DTYPES)))] for _ in range(2))
    bits = int(rng.choice([4, 8]))
    # Products with a table, and convolutions, are of 16 bits on a GPU, and of so many inputs.
    narrow = conv or (on_gpu and bits == 4 and not transposed and rng.integers(4) == 0)
    if narrow and target != _abi.DEQUANTIZE:
        g, dtype = -(-g // 8) * 8, DTYPES[str(rng.choice(["bfloat16", "float16"]))]
    k, shift_mode = g * groups, int(rng.integers(3))
    if bits == 4 and (narrow if on_gpu else rng.integers(4) == 0) and not conv and target != _abi.QUANTIZED_MATMUL:
        shift_mode = int(_abi.ShiftMode.TABLE)
    size = [1, 1, *rng.integers(1, 4, 2)] if conv else []
    lead = int(np.prod(size[2:])) if conv else batch
    if conv:
        dtype2 = dtype if rng.integers(2) else DTYPES["float32"]
        if rng.integers(2):  # what the kernel for few tiles takes, if types are too
            k, n = 64 * groups * int(rng.integers(1, 3)), -(-n // 16) * 16

    def normal(*shape, dtype=dtype):
        return rng.normal(0, 1, shape).astype(dtype)

    def result(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    qw = rng.integers(0, 2**32, (lead, *_format.packed_shape(bits, k, n)), np.uint32)
    scales = normal(lead, groups, n, dtype=dtype2)
    shift = [] if shift_mode == 0 else [normal(lead, groups, n, dtype=dtype if conv else dtype2)]
    if shift_mode == _abi.ShiftMode.TABLE:
        shift = [normal(1, 1, 16, dtype=np.float32)]
    elif shift_mode == _abi.ShiftMode.ZEROS and rng.integers(2):
        shift = [rng.integers(0, 2**bits, scales.shape).astype(np.uint8)]
    elif conv and shift:  # whose kernel takes float zeros and offsets beside scales of their type alone
        scales = scales.astype(dtype)
    weights = {"bits": bits, "shift_mode": shift_mode}

    if target == _selftest.CONVERSIONS:
        number, outputs = _conversion(rng)
        words = rng.integers(0, 2**32, m, np.uint32)
        return [words], [result(m, outputs, dtype=np.uint32)], {"conversion": number}
    if target == _abi.SCALES_GRADIENT:
        k, n, dtype = -(-k // 8) * 8, -(-n // 8) * 8, DTYPES[str(rng.choice(["bfloat16", "float16"]))]
        block, limits = int(rng.choice([32, 64, 128])), []
        table = [normal(1, 1, 16, dtype=np.float32)] if bits == 4 and rng.integers(2) else []
        if rng.integers(2):  # of experts, as they should be, or in any order and beyond the rows
            limit = rng.integers(-(2**31), 2**31, batch + 1).astype(np.int32)
            limits = [np.sort(limit % (m + 1)) if rng.integers(2) else limit]
        x, dy = (normal(1 if limits else batch, m, size, dtype=dtype) for size in (k, n))
        qw = rng.integers(0, 2**32, (batch, *_format.packed_shape(bits, k, n)), np.uint32)
        y = result(batch, -(-k // block), n, dtype=np.float32)
        return [x, qw, dy, *table, *limits], [y], {"bits": bits, "block": block, "has_table": len(table)}
    if target == _abi.QUANTIZE:
        mode = int(rng.integers(4))
        results = [result(*qw.shape, dtype=np.uint32), result(*scales.shape, dtype=dtype2)]
        results += [] if mode == 0 else [result(*scales.shape, dtype=np.uint8 if mode == 1 else dtype2)]
        return [normal(batch, k, n)], results, {"bits": bits, "group_size": g, "quantize_mode": mode}
    if target == _abi.DEQUANTIZE:
        return [qw, scales, *shift], [result(batch, k, n)], weights
    if target in (_abi.QUANTIZE_ACTIVATION, _abi.QUANTIZED_MATMUL, _abi.STATIC_MATMUL):
        float8 = target != _abi.STATIC_MATMUL and (bits == 4 or target == _abi.QUANTIZE_ACTIVATION) and rng.integers(2)
        offsets = int(not float8 and target != _abi.STATIC_MATMUL and rng.integers(2))
        codes = rng.integers(-127, 128, (batch, m, -(-k // 16) * 16)).astype(np.int8)
        codes = codes.astype(ml_dtypes.float8_e4m3fn if float8 else np.int8)
        codes[..., k:] = 0
        x_scales, sums = (normal(batch, m, groups, dtype=t) for t in (np.float32, np.float32 if float8 else np.int32))
        if target == _abi.QUANTIZE_ACTIVATION:
            results = [result(*a.shape[1:], dtype=a.dtype) for a in (codes, x_scales, sums, *[x_scales] * offsets)]
            return [normal(m, k)], results, {}
        if target == _abi.STATIC_MATMUL:
            fused = rng.integers(-100, 100, n).astype(np.int32)
            operands = [codes[0], qw[0], np.full(n, 1e-3, np.float32), fused]
            return operands, [result(m, n, dtype=np.int8)], {"k": k, "bits": bits, "zero": 3, "low": -128, "high": 127}
        flags = {"k": k, "has_bias": 0, "activation": int(rng.integers(5)), "has_sums": 1, "has_offsets": offsets}
        operands = [codes, x_scales, qw, scales, sums, *[x_scales] * offsets, *shift]
        return operands, [result(batch, m, n)], weights | flags
    if target == _abi.DIRECT_CONV:
        return _direct_conv_call(rng, bits, shift_mode if bits == 4 else shift_mode % 3)
    inputs, outputs = (n, k) if transposed else (k, n)
    epilogue = {} if transposed else {"has_bias": int(rng.integers(2)), "activation": int(rng.integers(5))}
    bias = [normal(1 if conv else batch, n)] if epilogue.get("has_bias") else []
    if conv:
        strides, low, dilation = rng.integers(1, 4, 2), rng.integers(-1, 3, 2), rng.integers(1, 3, 2)
        spread = np.where((rng.integers(3, size=2) == 0) & (np.array(size[2:]) > 1), 2, 1)  # of a transposed one
        strides, dilation = np.where(spread > 1, 1, strides), np.where(spread > 1, 1, dilation)
        y = result(batch, *(rng.integers(1, 7, 2) * spread).tolist(), n)
        scratch = result(_abi.conv_scratch(int(np.prod(y.shape[:-1])), n), dtype=np.int32)
        window = [*size[2:], *strides, *low, *dilation, *(spread if spread.max() > 1 else [])]
        x = normal(batch, *rng.integers(1, 9, 2), k)
        return [x, qw, scales, *shift, *bias], [y, scratch], weights | epilogue | {"window": [int(v) for v in window]}
    if not ragged:
        scratch = [] if transposed or rng.integers(2) else [result(int(rng.integers(2000)), dtype=np.int32)]
        results = [result(batch, m, outputs), *scratch]
        return [normal(batch, m, inputs), qw, scales, *shift, *bias], results, weights | epilogue
    ids = int(rng.integers(2))
    rows = rng.integers(-(2**31), 2**31, m if ids else batch, np.int64).astype(np.int32)
    rows = rows % (batch + 2) - 1 if rng.integers(2) else rows
    scratch = _abi.ragged_scratch(m, batch, ordered=-(-max(k, n) // 2))
    results = [result(m, outputs), result(scratch, dtype=np.int32)]
    return [normal(m, inputs), qw, scales, rows, *shift, *bias], results, {"row_mode": ids} | weights | epilogue


def _direct_conv_call(rng, bits: int, shift_mode: int) -> tuple[list, list, dict[str, Any]]:
    """As ``_call_of``: depthwise, or groups of several inputs of 16 bits, of which there are multiples of 8."""
    depthwise = rng.integers(2)
    names = sorted(DTYPES) if depthwise else ["bfloat16", "float16"]
    dtype, scale_dtype, shift_dtype = (DTYPES[str(rng.choice(of))] for of in (names, sorted(DTYPES), sorted(DTYPES)))
    k, features = (1, int(rng.integers(1, 100))) if depthwise else (int(rng.choice([2, 4, 8, 40])), 80)
    n = features * (int(rng.integers(1, 3)) if depthwise else 2)
    size = rng.integers(1, 4 if depthwise else 3, 3).tolist()  # CUDA's kernel of several inputs takes few taps
    taps, sets = math.prod(size), int(rng.choice([1, math.prod(size)]))
    window = [*size, *rng.integers(1, 4, 3), *rng.integers(-1, 3, 3), *rng.integers(1, 3, 3)]

    def normal(*shape, dtype):
        return rng.normal(0, 1, shape).astype(dtype)

    shift = [] if shift_mode == 0 else [normal(sets, 1, n, dtype=shift_dtype)]
    if shift_mode == _abi.ShiftMode.TABLE:
        shift = [normal(1, 1, 16, dtype=np.float32)]
    bias = [normal(1, n, dtype=dtype)] if rng.integers(2) else []
    qw = rng.integers(0, 2**32, (taps, *_format.packed_shape(bits, k, n)), np.uint32)
    x = normal(2, *rng.integers(1, 9, 3), features, dtype=dtype)
    y = jax.ShapeDtypeStruct((2, *rng.integers(1, 7, 3).tolist(), n), dtype)
    attributes = {"bits": bits, "shift_mode": shift_mode, "has_bias": len(bias), "activation": int(rng.integers(5))}
    attributes |= {"groups": features // k, "window": [int(v) for v in window]}
    return [x, qw, normal(sets, 1, n, dtype=scale_dtype), *shift, *bias], [y], attributes


def _conversion(rng) -> tuple[int, int]:
    """One of the conversions of codes, and how many words it makes of one."""
    found = importlib.import_module("jax_wonly._cpu").conversions()
    number = int(rng.integers(len(found)))
    return number, found[number][1]


def check_custom_call(target: str, seed: int, changes: int) -> None:
    """The handlers themselves, past the checks in Python: a result, or an error that the handler gives."""
    rng = np.random.default_rng(seed)
    operands, results, attributes = _call_of(rng, target)
    for _ in range(changes):
        kind, i = int(rng.integers(6)), int(rng.integers(8))
        if kind == 0 and attributes:
            name = sorted(attributes)[i % len(attributes)]
            value = int(rng.choice([-1, 0, 1, 2, 3, 5, 7, 64, -(2**63), 2**63 - 1, 2**32 + 4]))
            if isinstance(entries := attributes[name], list) and i % 4:
                value = [*entries[: i % 8], value, *entries[i % 8 + i // 7 % 2 :]]
            attributes[name] = value
        elif kind == 1 and len(operands) > 1:
            del operands[i % len(operands)]
        elif kind == 2:
            operands.insert(i % (len(operands) + 1), operands[int(rng.integers(len(operands)))])
        elif kind == 3:
            a = operands[i % len(operands)]
            other = [a[:0], a[..., :-1], a[1:], a[None], a.reshape(-1), np.concatenate([a, a]), a[..., None]]
            operands[i % len(operands)] = np.ascontiguousarray(other[int(rng.integers(len(other)))])
        elif kind == 4:
            a, dtype = operands[i % len(operands)], rng.choice([np.int8, np.uint8, np.int32, np.float32, np.uint32])
            with np.errstate(all="ignore"):
                operands[i % len(operands)] = a.astype(dtype)
        else:
            r = results[i % len(results)]
            sizes = [max(0, s + int(rng.integers(-1, 2)) * int(rng.choice([1, 64]))) for s in r.shape]
            other = [tuple(sizes), r.shape[1:], (*r.shape, 1)][int(rng.integers(3))]
            results[i % len(results)] = jax.ShapeDtypeStruct(other, r.dtype)
    call = jax.ffi.ffi_call(target, results)
    values = {name: np.array(v, np.int64) if isinstance(v, list) else np.int64(v) for name, v in attributes.items()}
    try:
        jax.block_until_ready(call(*operands, **values))
    except Exception as error:
        # The handler's own words, or those of XLA's decoder where the number of buffers is another one.
        assert changes and re.search("INVALID_ARGUMENT|jax_wonly|Wrong number|Buffer|buffer", str(error)), error


# Files.


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="jax_wonly_fuzz_"))


@functools.cache
def good_files() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    qt = jw.quantize(np.sin(np.arange(64 * 70, dtype=np.float32)).reshape(64, 70), group_size=32)
    path = _folder() / "good.safetensors"
    checkpoint.save(path, {"a": qt, "b": np.arange(6.0, dtype=np.float32)})
    blocks = {2: 18, 3: 20, 8: 34, 12: 144, 14: 210, 6: 22}
    tensors = []
    for kind, size in blocks.items():
        content = rng.integers(0, 100, 512 // (256 if size > 40 else 32) * size, np.uint8).tobytes()
        tensors.append((f"t{kind}", kind, (2, 256), content))
    return {
        "awq.safetensors": GOOD_SAFETENSORS,
        "own.safetensors": path.read_bytes(),
        "q4_0.gguf": GOOD_GGUF,
        "many.gguf": gguf_bytes(tensors, [("general.alignment", struct.pack("<II", 4, 32))]),
    }


def reads_or_says(path: Path, **options: Any) -> int:
    """Reads a checkpoint twice. Returns how many tensors it has; -1: it was refused.

    A refusal is a ValueError of this package. What is read has the shape that was said, twice the same bits, and takes
    neither time nor memory that the file is not worth.
    """
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first, second = (checkpoint.load(path, **options) for _ in range(2))
            for name in first:
                values = [jax.tree.leaves(ck[name]) for ck in (first, second)]
                assert tuple(first[name].shape) == tuple(first.info(name).shape)
                for a, b in zip(*values, strict=True):
                    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        return len(first)
    except ValueError as error:
        assert "jax_wonly" in str(error), f"{type(error).__name__} of another library: {error}"
        return -1
    finally:
        seconds = time.process_time() - start
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        assert seconds < SECONDS and grown < GROWTH, (seconds, grown)


def check_damaged_bytes(file: str, edits: list[tuple[int, int, int]], cut: int, header: bool) -> None:
    """Bytes and whole numbers overwritten, inserted and removed, mostly in the header; ends cut off."""
    data = bytearray(good_files()[file])
    span = min(len(data), 700) if header else len(data)
    numbers = [b"\xff" * 8, b"\x00" * 8, b"\x7f" + b"\xff" * 7, (1 << 40).to_bytes(8, "little"), b"\xff\xff\xff\x7f"]
    for kind, where, what in edits:
        at = where % max(min(span, len(data)), 1)
        if kind == 0 and data:
            data[at] = what
        elif kind == 1:
            number = numbers[what % len(numbers)]
            data[at : at + len(number)] = number
        elif kind == 2:
            data[at:at] = bytes([what]) * (1 + what % 9)
        else:
            del data[at : at + 1 + what % 16]
    data = data[: len(data) - cut % (len(data) + 1)]
    path = _folder() / file
    path.write_bytes(data)
    reads_or_says(path)


def check_damaged_header(header: Any, size: int | None, tail: int) -> None:
    """A safetensors file with any JSON, of any stated length, in the place of its header."""
    text = json.dumps(header).encode()
    path = _folder() / "header.safetensors"
    path.write_bytes((len(text) if size is None else size).to_bytes(8, "little") + text + bytes(tail))
    reads_or_says(path)


def check_damaged_weights(format: str, seed: int) -> None:
    """Weights of a format in which tensors are missing or of other shapes and types, or the configuration lies."""
    rng = np.random.default_rng(seed)
    tensors, config, header = sound(rng, format)
    damaged(rng, tensors, config, header)
    metadata = {"jax_wonly": json.dumps({"version": 1, "tensors": {"x": header}})} if format == "jax_wonly" else None
    path = _folder() / "weights.safetensors"
    path.write_bytes(safetensors.numpy.save({"x" + s: np.ascontiguousarray(v) for s, v in tensors.items()}, metadata))
    reads_or_says(path, format="compressed-tensors" if "quantized" in format else format, config=config)


numbers = st.sampled_from([-1, 0, 1, 2, 4, 64, 2**31, 2**53, 2**63, 2**64 - 1, 10**30, 1.5])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I32", "U8", "F8_E4M3", "X", "", 3, None]),
        "shape": st.lists(numbers, max_size=4) | numbers | st.none(),
        "data_offsets": st.lists(numbers, max_size=3) | st.none(),
    }
)
tensor_names = st.sampled_from(["x.qweight", "x.qzeros", "x.scales", "w.qvalue", "__metadata__", "../x", "", "\0"])
headers = st.dictionaries(tensor_names, entries | numbers | st.none() | st.text(max_size=3), max_size=5)
formats = ["awq", "gptq", "pack-quantized", "int-quantized", "hqq", "mlx", "torchao", "jax_wonly"]


class Property(NamedTuple):
    what: str
    check: Callable[..., None]
    given: dict[str, st.SearchStrategy]


small = st.integers(1, 150)
shared = {"bits": bits, "mode": modes, "seed": seeds}
windows = {
    "axes": st.lists(
        st.tuples(*(st.integers(low, high) for low, high in ((3, 7), (1, 3), (1, 3), (1, 2), (0, 3), (0, 3)))),
        min_size=1,
        max_size=2,
    ),
    "explicit": st.booleans(),
    "padding": st.sampled_from(["SAME", "VALID"]),
    "spread": st.sampled_from([1, 1, 2]),
    "images": st.integers(0, 3),
    "x_dtype": dtypes,
    "activation": activations,
    "with_bias": st.booleans(),
    "implementation": st.sampled_from([None, "xla", "dequantize"]),
    **shared,
}
PROPERTIES = {
    "products": Property(
        "matmul against float64: shapes, types, schemes, epilogues, leading axes, implementations",
        check_product,
        {
            "k_group": groupings,
            "n": st.integers(1, 200),
            "m": st.none() | st.integers(0, 70),
            "lead": st.sampled_from([(), (), (2,), (1,), (3, 1)]),
            "weight_lead": st.sampled_from([(), (), (), (2,), (1,)]),
            "x_dtype": dtypes,
            "scale_dtype": dtypes,
            "bias": st.none() | dtypes,
            "activation": activations,
            "preferred_element_type": st.none() | dtypes,
            "implementation": implementations,
            "jit": st.booleans(),
            **shared,
        },
    ),
    "in_axes": Property(
        "vmap over any axis of any operand, against float64",
        check_in_axes,
        {
            "k_group": groupings,
            "n": small,
            "mode": modes,
            "axes": st.tuples(
                st.sampled_from([None, 0, 1, 2, -1]),
                st.sampled_from([None, 0, 1]),
                *[st.sampled_from([None, 0, 1])] * 3,
            ),
            "implementation": st.sampled_from([OWN, "xla"]),
            "seed": seeds,
        },
    ),
    "gradients": Property(
        "gradients of x against float64",
        check_gradient,
        {"k_group": groupings, "n": small, "m": st.integers(1, 40), "dtype": dtypes, **shared}
        | {"implementation": st.sampled_from([OWN, "xla", "dequantize"])},
    ),
    "quantize": Property(
        "quantize: every code, scale and zero equal to the definition",
        check_codes_of,
        {"k_group": groupings, "n": small, "dtype": dtypes, "scale_dtype": dtypes, **shared}
        | {"implementation": st.sampled_from([OWN, "xla"])},
    ),
    "dequantize": Property(
        "dequantize against float64",
        check_dense_of,
        {"k_group": groupings, "n": small, "dtype": dtypes, "scale_dtype": dtypes, **shared}
        | {"implementation": st.sampled_from([OWN, "xla"]), "lead": st.sampled_from([(), (2,), (1, 3)])},
    ),
    "round trips": Property(
        "dequantize(quantize(w)) within half a step of w",
        check_round_trip,
        {"k_group": groupings, "n": small, "dtype": dtypes, **shared, "implementation": st.sampled_from([OWN, "xla"])},
    ),
    "ragged_dot": Property(
        "ragged_dot against float64",
        check_ragged,
        {
            "k_group": groupings,
            "n": small,
            "experts": st.integers(1, 9),
            "rows": st.integers(0, 90),
            "dtype": dtypes,
            "activation": st.sampled_from([None, "relu", "gelu", "silu"]),
            "bias": st.sampled_from([None, "shared", "each"]),
            "implementation": st.sampled_from([None, "xla", "dequantize"]),
            **shared,
        },
    ),
    "gather_matmul": Property(
        "gather_matmul against float64, ids in and out of range",
        check_gathered,
        {
            "leads": st.sampled_from(
                [((7,), (7,)), ((5, 1), (5, 3)), ((), (4,)), ((6,), ()), ((2, 4), (2, 1)), ((0,), (0,))]
            ),
            "n": small,
            "experts": st.integers(1, 9),
            "dtype": dtypes,
            "implementation": st.sampled_from([None, "xla", "dequantize"]),
            **shared,
        },
    ),
    "convolutions": Property(
        "convolutions against float64: windows, strides, dilations, paddings, schemes",
        check_convolution,
        {
            **windows,
            "k_group": groupings,
            "n": small | st.integers(1, 9).map((16).__mul__),
        },
    ),
    "convolutions in groups": Property(
        "convolutions in groups of features against float64: as those",
        check_grouped_convolution,
        {
            **windows,
            "k": st.sampled_from([1, 1, 2, 3, 4, 8, 24]),
            "groups": st.integers(2, 20),
            "each": st.integers(1, 8),
        },
    ),
    "activations": Property(
        "quantized activations: codes to the bit, products against float64",
        check_activation,
        {
            "k_group": groupings,
            "n": small,
            "m": st.integers(0, 40),
            "codes": st.sampled_from(activation_cases.SCHEMES),
            "grouped": st.booleans(),
            "dtype": st.sampled_from(["float32", "bfloat16"]),
            **shared,
        },
    ),
    "static": Property(
        "static int8 products, to the bit",
        check_static,
        {
            "k": st.integers(1, 300),
            "n": small,
            "m": st.integers(0, 40),
            "bits": bits,
            "activation": st.sampled_from([None, "relu", "relu6"]),
            "seed": seeds,
        },
    ),
    "bad arguments": Property(
        "bad arguments of every function: an error that names one, or a result",
        check_bad_arguments,
        {
            "function": st.sampled_from(sorted(good_calls())),
            "picks": st.lists(st.tuples(st.integers(0, 20), st.integers(0, 200)), min_size=1, max_size=2),
        },
    ),
    "custom calls": Property(
        "custom calls with any attributes, types and shapes: an error, or a result",
        check_custom_call,
        {"target": st.sampled_from(TARGETS), "seed": seeds, "changes": st.integers(0, 3)},
    ),
    "bytes of files": Property(
        "safetensors and GGUF files with damaged bytes: an error, or read as it says",
        check_damaged_bytes,
        {
            "file": st.sampled_from(sorted(good_files())),
            "edits": st.lists(
                st.tuples(st.integers(0, 3), st.integers(0, 2**20), st.integers(0, 255)), min_size=1, max_size=4
            ),
            "cut": st.sampled_from([0, 0, 0, 1, 9, 100, 10**4]),
            "header": st.sampled_from([True, True, True, False]),
        },
    ),
    "headers of files": Property(
        "safetensors files with any header: an error, or read as it says",
        check_damaged_header,
        {
            "header": headers | st.recursive(st.none() | st.text(max_size=2), lambda x: st.lists(x, max_size=2)),
            "size": st.none() | st.sampled_from([0, 1, 2**20, 2**31, 2**40, 2**63, 2**64 - 1]),
            "tail": st.sampled_from([0, 1, 64, 4096]),
        },
    ),
    "weights in files": Property(
        "files of eight formats with missing, damaged or lying tensors: an error, or read as it says",
        check_damaged_weights,
        {"format": st.sampled_from(formats), "seed": seeds},
    ),
}


# These compile little or nothing, and get more examples.
QUICK = {"bad arguments", "custom calls", "bytes of files", "headers of files"}


def run(name: str, examples: int, seed: int) -> dict[str, Any]:
    """So many examples of one property; a failure is printed with the example that Hypothesis has reduced it to."""
    what, check, strategies = PROPERTIES[name]
    done = [0]

    @functools.wraps(check)
    def counted(**arguments: Any) -> None:
        done[0] += 1
        check(**arguments)

    test = hypothesis.given(**strategies)(counted)
    test = hypothesis.settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )(hypothesis.seed(seed)(test))
    failures = 0
    try:
        test()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        traceback.print_exc()
        failures = 1
    return {"what": what, "cases": done[0], "failures": failures}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="reliability fuzz", description=__doc__)
    parser.add_argument("--examples", type=int, default=200, help="of each property (default: %(default)s)")
    parser.add_argument("--quick", type=int, default=2000, help="of those that compile little (default: %(default)s)")
    parser.add_argument("--only", nargs="*", choices=sorted(PROPERTIES), default=list(PROPERTIES))
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--output", default=None)
    options = parser.parse_args(words)
    count = {name: options.quick if name in QUICK else options.examples for name in options.only}
    rows = [measured(name, run, name, count[name], options.seed) for name in options.only]
    backend = jax.default_backend()
    default = "reliability-fuzz.json" if backend == "cpu" else f"reliability-fuzz-{backend}.json"
    if options.only == list(PROPERTIES):
        rows.append(measured("each bad argument", check_each_bad_argument))
    return save(options.output or default, rows, seed=options.seed)
