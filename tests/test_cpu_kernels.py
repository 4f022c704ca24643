"""The CPU custom calls, called directly, on every instruction set of this machine, against float64."""

import concurrent.futures
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantize_cases
from cpu_cases import DTYPES, MODES, SCHEMES, SHAPES, Problem
from reference import UNITS

from jax_wonly import _abi, _ffi, _format

_cpu = pytest.importorskip("jax_wonly._cpu")
if _ffi.ensure_registered()["cpu"] is not None:
    pytest.skip("the CPU kernels are not registered", allow_module_level=True)

ISAS = _cpu.isas()


@pytest.fixture(params=ISAS)
def isa(request):
    _cpu.force_isa(request.param)
    yield request.param
    _cpu.force_isa("")


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_matmul_against_float64(rng, isa, bits, mode, x_dtype):
    for i, shape in enumerate(SHAPES):
        Problem(rng, *shape, bits=bits, mode=mode, x_dtype=x_dtype, scale_dtype=DTYPES[i % 3]).check()


@pytest.mark.parametrize(("bits", "mode"), SCHEMES)
def test_transposed_against_float64(rng, isa, bits, mode):
    for i, shape in enumerate(SHAPES):
        for x_dtype in DTYPES:
            problem = Problem(rng, *shape, bits=bits, mode=mode, x_dtype=x_dtype, scale_dtype=DTYPES[i % 3])
            problem.check_transposed(rng)


@pytest.mark.parametrize("x_dtype", DTYPES)
def test_tables_against_float64(rng, isa, x_dtype):
    for i, shape in enumerate(SHAPES):
        problem = Problem(rng, *shape, mode="table", x_dtype=x_dtype, scale_dtype=DTYPES[i % 3])
        problem.check()
        dequantized = jax.ffi.ffi_call(_abi.DEQUANTIZE, jax.ShapeDtypeStruct((1, *shape[1:3]), jnp.float32))(
            problem.qw, problem.scales, problem.shift, bits=np.int64(4), shift_mode=np.int64(3)
        )
        table, codes = np.asarray(problem.shift)[0, 0], problem.codes
        np.testing.assert_array_equal(
            dequantized, table[codes] * np.repeat(np.asarray(problem.scales, np.float32), problem.group, 1)
        )


@pytest.mark.parametrize("mode", [*MODES, "table"])
def test_broadcast_operands(rng, isa, mode):
    """Every operand alone with a leading size of 1, and every one alone with the full size, at few rows and at many."""
    names = ("x", "qw", "scales", "shift", "bias")
    for name in names:
        for m in (3, 20):
            others = {other: 1 for other in names if other != name}
            Problem(rng, m, 96, 70, 32, mode=mode, batch=3, leading=others, bias="float32").check()
            Problem(rng, m, 96, 70, 32, mode=mode, batch=3, leading={name: 1}, bias="float16").check()


@pytest.mark.parametrize("activation", range(5))
def test_epilogue_and_mixed_types(rng, isa, activation):
    for m in (2, 30):
        for x_dtype, out_dtype, bias in zip(DTYPES, DTYPES[1:] + DTYPES[:1], DTYPES[2:] + DTYPES[:2], strict=True):
            problem = Problem(rng, m, 128, 96, 64, x_dtype=x_dtype, scale_dtype=bias, bias=bias)
            problem.check(out_dtype, activation)
            Problem(rng, m, 128, 96, 64, x_dtype=x_dtype).check(out_dtype, activation)


def test_activations_of_extreme_sums(rng, isa):
    """Saturated and non-finite sums, through the bias, as jax.nn computes them."""
    values = np.array([0, -0.0, 1e-30, 3, 6, 7, -5, 88, -88, 120, -120, 1e30, -1e30, np.inf, np.nan], np.float32)
    problem = Problem(rng, 1, 32, len(values), 32, bias="float32")
    problem.x = jnp.zeros_like(problem.x)
    problem.bias = jnp.asarray(values[None])
    functions = (lambda v: v, jax.nn.relu, jax.nn.relu6, jax.nn.gelu, jax.nn.silu)
    for activation, function in enumerate(functions):
        got = problem.call(activation=activation)[0, 0]
        np.testing.assert_allclose(got, function(values), rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_nan_and_inf_propagate(rng, isa, bits, mode, x_dtype):
    for m in (3, 8, 21):
        problem = Problem(rng, m, 192, 67, 64, bits=bits, mode=mode, x_dtype=x_dtype)
        x = np.array(problem.x, np.float32)
        x[0, 0, 70] = np.inf
        x[0, 1, 3] = -np.inf
        x[0, 1, 180] = np.inf
        x[0, 2, 100] = np.nan
        problem.x = jnp.asarray(x, x_dtype)
        with np.errstate(invalid="ignore"):
            want = np.matmul(np.asarray(x, np.float64), problem.weights()[0])
        got = np.asarray(problem.call(), np.float64)
        assert np.isinf(want[0, 0]).any() and np.isnan(want[0, 1]).any()
        for row in range(3):
            np.testing.assert_array_equal(got[0, row], want[0, row])
        # The other rows are untouched.
        np.testing.assert_allclose(got[0, 3:], want[0, 3:], rtol=2 * UNITS[x_dtype], atol=1e-3)


@pytest.mark.parametrize("x_dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(rng, isa, x_dtype):
    """Within the kernel's range of row counts a row gives the same bits, whatever is beside it."""
    problem = Problem(rng, 61, 320, 128, 64, x_dtype=x_dtype)
    whole = np.asarray(problem.call(), np.float32)
    x = problem.x
    for begin, count in ((0, 17), (13, 29), (40, 21)):
        problem.x, problem.m = x[:, begin : begin + count], count
        np.testing.assert_array_equal(np.asarray(problem.call(), np.float32), whole[:, begin : begin + count])


def test_float32_accuracy_is_that_of_float32(rng, isa):
    """The error of float32 x stays near one float32 rounding of the result's natural size, at every row count."""
    for bits in (4, 8):
        for m in (1, 4, 16, 40):
            problem = Problem(rng, m, 2048, 64, 128, bits=bits)
            w = problem.weights()[0]
            x = np.asarray(problem.x, np.float64)
            size = np.sqrt(np.matmul(x**2, w**2))
            assert np.max(np.abs(np.asarray(problem.call(), np.float64) - np.matmul(x, w)) / size) < 4e-6


@pytest.mark.parametrize("m", [1, 3, 24])
@pytest.mark.parametrize("mode", MODES)
def test_rows_of_mixed_magnitude_keep_their_small_inputs(rng, isa, mode, m):
    """An input a million times its neighbours, where its weight is zero, costs no accuracy in its row or others."""
    problem = Problem(rng, m, 256, 70, 64, mode=mode, batch=2, leading={"qw": 1, "scales": 1, "shift": 1})
    where = 37
    if mode == "symmetric":
        problem.codes[:, where] = 8
    elif mode == "offsets":
        problem.codes[:, where] = 0
        problem.shift = problem.shift.at[:, 0].set(0)
    else:
        problem.codes[:, where] = 4
        problem.shift = problem.shift.at[:, 0].set(4)
    problem.qw = _format.pack(jnp.asarray(problem.codes, jnp.uint8), 4)
    problem.check()
    problem.x = problem.x.at[0, ::2, where].set(3e6)
    problem.x = problem.x.at[1, m - 1, where].set(-1e30)
    problem.x = problem.x.at[1, 0, 64:].multiply(1e-30)  # tiny inputs are kept as well
    problem.check()


def test_largest_codes_and_digits(rng, isa):
    """All codes and inputs as large as they get: integer sums that hold these hold all."""
    for bits in (4, 8):
        problem = Problem(rng, 1, 512, 64, 256, bits=bits, mode="integer zeros")
        problem.codes[:] = (1 << bits) - 1
        problem.codes[..., ::2] = 0
        problem.qw = _format.pack(jnp.asarray(problem.codes, jnp.uint8), bits)
        # Digits of 127 and -128 in every plane, and what rounds to the largest that are taken.
        values = (127 * 65793, -127 * 65793, -128 * 257 - 126 * 65536, 2**23, 2**22, 2**22 - 0.5)
        for value in (*values, *rng.normal(0, 1, 9)):
            problem.x = jnp.full_like(problem.x, value)
            x, w = np.asarray(problem.x, np.float64), problem.weights()[0]
            want, size = np.matmul(x, w), np.matmul(np.abs(x), np.abs(w))
            # Sums of like numbers are rounded alike.
            np.testing.assert_array_less(np.abs(np.asarray(problem.call(), np.float64) - want), 3e-5 * size + 1e-30)


def test_zeros_outside_the_codes(rng, isa):
    """uint8 zeros up to 255 with four-bit codes, and float zeros far away."""
    for x_dtype in DTYPES:
        for m in (2, 20):
            problem = Problem(rng, m, 128, 64, 64, mode="integer zeros", x_dtype=x_dtype)
            problem.shift = jnp.asarray(rng.integers(0, 256, problem.shift.shape), jnp.uint8)
            problem.check()


def test_empty_results(isa, rng):
    for m, batch in ((0, 1), (3, 0)):
        problem = Problem(rng, m, 64, 64, 64, batch=batch, leading={"qw": 1, "scales": 1})
        assert problem.call().shape == (batch, m, 64)


def test_threads(rng, isa):
    """Calls from many threads at once give the bits of a call alone."""
    kinds = ((1, "float32", "offsets"), (16, "bfloat16", "symmetric"), (48, "float32", "integer zeros"))
    problems = [Problem(rng, m, 512, 1024, 128, x_dtype=x_dtype, mode=mode) for m, x_dtype, mode in kinds]
    alone = [np.asarray(p.call(), np.float32) for p in problems]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for i, y in enumerate(pool.map(lambda i: np.asarray(problems[i % 3].call(), np.float32), range(60))):
            np.testing.assert_array_equal(y, alone[i % 3])


@pytest.mark.parametrize("mode", quantize_cases.reference.MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_quantize_is_the_definition(rng, isa, bits, mode):
    for dtype, scale_dtype, group_size, k, n in (
        ("float32", "float32", 32, 96, 67),
        ("bfloat16", "float16", None, 75, 33),
        ("float16", "bfloat16", 128, 256, 130),
    ):
        types = {"dtype": dtype, "scale_dtype": scale_dtype, "implementation": "cpu"}
        quantize_cases.check_codes(rng, bits=bits, group_size=group_size, mode=mode, k=k, n=n, **types)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
def test_dequantize_rounds_each_step(rng, isa, bits, mode):
    for i, (k, n, group) in enumerate(((96, 67, 32), (75, 33, 75), (1200, 64, 12), (2, 130, 1))):
        problem = Problem(rng, 1, k, n, group, bits=bits, mode=mode, scale_dtype=DTYPES[i % 3], batch=2)
        out_dtype = DTYPES[(i + 1) % 3]
        operands = [a for a in (problem.qw, problem.scales, problem.shift) if a is not None]
        call = jax.ffi.ffi_call(_abi.DEQUANTIZE, jax.ShapeDtypeStruct((2, k, n), out_dtype))
        got = call(*operands, bits=np.int64(bits), shift_mode=np.int64(problem.shift_mode))
        codes = problem.codes.astype(np.float32)
        s = np.repeat(np.asarray(problem.scales, np.float32), group, 1)
        z = None if problem.shift is None else np.repeat(np.asarray(problem.shift, np.float32), group, 1)
        if problem.shift_mode == 2:
            want = codes * s + z
        else:
            want = (codes - (np.float32(1 << (bits - 1)) if z is None else z)) * s
        np.testing.assert_array_equal(np.asarray(got), np.asarray(jnp.asarray(want, out_dtype)))


def test_quantize_of_nan_and_inf_is_harmless(rng, isa):
    w = rng.normal(0.2, 1.0, (1, 64, 70)).astype(np.float32)
    w[0, 3, 5], w[0, 40, 6], w[0, :, 7] = np.nan, np.inf, np.nan
    for mode in range(4):
        results = quantize_call(jnp.asarray(w), mode=mode)
        codes = np.asarray(_format.unpack(results[0], 4, 64, 70))
        assert codes.max() <= 15 and np.isfinite(np.asarray(results[1], np.float64)[..., :5]).all()


def quantize_call(
    w, *, bits=4, group_size=32, mode=0, scale_dtype="float32", shift_dtype=None, groups=None, results=None
):
    b, k, n = w.shape
    groups = groups or k // max(group_size, 1)
    out = [
        jax.ShapeDtypeStruct((b, *_format.packed_shape(bits if bits in (4, 8) else 4, k, n)), jnp.uint32),
        jax.ShapeDtypeStruct((b, groups, n), scale_dtype),
    ]
    if (results if results is not None else mode in (1, 2, 3)) and mode != 0:
        out.append(jax.ShapeDtypeStruct((b, groups, n), shift_dtype or (jnp.uint8 if mode == 1 else scale_dtype)))
    call = jax.ffi.ffi_call(_abi.QUANTIZE, out)
    return call(w, bits=np.int64(bits), group_size=np.int64(group_size), quantize_mode=np.int64(mode))


class TestBadOperands:
    """The handlers check what they are given: an error that names the operand, never a crash."""

    def product(self, rng, match, **changes):
        problem = Problem(rng, 2, 64, 64, 32, mode="integer zeros", bias="float32", batch=2)
        problem.__dict__.update(changes)
        with pytest.raises(jax.errors.JaxRuntimeError, match=match):
            problem.call(activation=changes.get("activation", 0)).block_until_ready()

    def test_matmul(self, rng):
        zeros = jnp.zeros
        self.product(rng, "bits = 5", bits=5)
        self.product(rng, "shift_mode = 4", shift_mode=4)
        self.product(rng, "activation = 9", activation=9)
        self.product(rng, "1 optional operands; the attributes call for 2", bias=None, has_bias=1)
        self.product(rng, "optional operands", shift_mode=0)
        self.product(rng, r"x has element type S32", x=zeros((2, 2, 64), jnp.int32))
        self.product(rng, r"x has shape \[2, 64\]", x=zeros((2, 64)))
        self.product(rng, r"x has shape \[3, 2, 64\]", x=zeros((3, 2, 64)))
        self.product(rng, r"qw has shape", x=zeros((2, 2, 128)))
        self.product(rng, r"qw has element type S32", qw=zeros((2, 1, 1, 512), jnp.int32))
        self.product(rng, r"qw has shape \[2, 1, 2, 512\]", qw=zeros((2, 1, 2, 512), jnp.uint32))
        self.product(rng, r"qw has shape \[2, 1, 1, 512\]", bits=8)
        self.product(rng, r"scales has 3 groups", scales=zeros((2, 3, 64)))
        self.product(rng, r"scales has 0 groups", scales=zeros((2, 0, 64)))
        self.product(rng, r"scales has shape \[2, 2, 65\]", scales=zeros((2, 2, 65)))
        self.product(rng, r"scales has shape \[64\]", scales=zeros((64,)))
        self.product(rng, r"scales has element type U8", scales=zeros((2, 2, 64), jnp.uint8))
        self.product(rng, r"zeros has shape \[2, 1, 64\]", shift=zeros((2, 1, 64), jnp.uint8))
        self.product(rng, r"offsets has element type U8", shift_mode=2)
        self.product(rng, r"bias has shape \[2, 65\]", bias=zeros((2, 65)))

    def test_quantize(self):
        w = jnp.zeros((1, 64, 64))
        for match, changes in (
            ("bits = 3", {"bits": 3}),
            ("group_size = 48 does not divide", {"group_size": 48}),
            ("group_size = 0 does not divide", {"group_size": 0, "groups": 1}),
            ("quantize_mode = 4", {"mode": 4}),
            ("2 results", {"mode": 1, "results": False}),
            ("shift has element type F32; accepted: U8", {"mode": 1, "shift_dtype": "float32"}),
            ("shift has element type F16; accepted: F32", {"mode": 2, "shift_dtype": "float16"}),
            ("scales has shape", {"groups": 3}),
            ("scales has element type", {"scale_dtype": "int32"}),
        ):
            with pytest.raises(jax.errors.JaxRuntimeError, match=match):
                jax.block_until_ready(quantize_call(w, **changes))
        with pytest.raises(jax.errors.JaxRuntimeError, match="w has element type"):
            jax.block_until_ready(quantize_call(jnp.zeros((1, 64, 64), jnp.int8)))

    def test_dequantize(self):
        qw, scales = jnp.zeros((1, 1, 1, 512), jnp.uint32), jnp.ones((1, 2, 64))
        for match, operands, dtype, attributes in (
            ("the result has element type", (qw, scales), "int8", {}),
            ("optional operands", (qw, scales, scales), "float32", {}),
            ("0 optional operands; the attributes call for 1", (qw, scales), "float32", {"shift_mode": 1}),
            ("qw has shape", (qw[:, :, :, :100], scales), "float32", {}),
            ("bits = 0", (qw, scales), "float32", {"bits": 0}),
        ):
            call = jax.ffi.ffi_call(_abi.DEQUANTIZE, jax.ShapeDtypeStruct((1, 64, 64), dtype))
            attributes = {"bits": 4, "shift_mode": 0} | attributes
            with pytest.raises(jax.errors.JaxRuntimeError, match=match):
                call(*operands, **{k: np.int64(v) for k, v in attributes.items()}).block_until_ready()


def test_choice_of_instruction_set():
    assert ISAS[-1] == "generic" and _cpu.active_isa() in ISAS
    for name in ISAS:
        _cpu.force_isa(name)
        assert _cpu.active_isa() == name
    _cpu.force_isa("")
    with pytest.raises(ValueError, match="isa = 'sse9' is not an instruction set.*accepted here: .*generic"):
        _cpu.force_isa("sse9")


@pytest.mark.parametrize("name", ["generic", "amx9"])
def test_instruction_set_from_the_environment(name):
    program = """
import jax, numpy as np
from jax_wonly import _abi, _cpu, _ffi
_ffi.ensure_registered()
try:
    print("isa", _cpu.active_isa())
except ValueError as error:
    print("query", error)
call = jax.ffi.ffi_call(_abi.DEQUANTIZE, jax.ShapeDtypeStruct((1, 64, 64), "float32"))
try:
    operands = np.zeros((1, 1, 1, 512), np.uint32), np.ones((1, 1, 64), np.float32)
    w = call(*operands, bits=np.int64(4), shift_mode=np.int64(0))
    print("call", float(w[0, 0, 0]))
except jax.errors.JaxRuntimeError as error:
    print("call", error)
"""
    environment = os.environ | {"JAX_WONLY_CPU_ISA": name, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    if name == "generic":
        assert "isa generic" in result.stdout and "call -8.0" in result.stdout
    else:
        assert "query JAX_WONLY_CPU_ISA = 'amx9' is not an instruction set" in result.stdout
        assert "INVALID_ARGUMENT" in result.stdout.split("call", 1)[1]
