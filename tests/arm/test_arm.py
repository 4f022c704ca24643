"""The kernels for AArch64, compiled here and emulated: what tests/test_cpu_kernels.py asks of this machine's own.

pip install ziglang unicorn && pytest tests/arm
"""

import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
import quantize_cases
import reference
from cpu_cases import DTYPES, SCHEMES, SHAPES, Problem

import jax_wonly as jw

pytest.importorskip("ziglang", reason="compiles for AArch64: pip install ziglang")
pytest.importorskip("unicorn", reason="emulates AArch64: pip install unicorn")

from arm.machine import Machine, compile_program

ROOT = Path(__file__).parents[2]
ENGINES = ("generic", "neon", "neon_dotprod")
TYPES = {"float16": 0, "bfloat16": 1, "float32": 2, "uint8": 3}
MATMUL, TRANSPOSED, QUANTIZE, DEQUANTIZE = range(4)
FIELDS = ("engine", "op", "bits", "shift_mode", "k", "n", "groups", "rows", "activation", "quantize_mode")
FIELDS += (
    "x_type",
    "scale_type",
    "shift_type",
    "y_type",
    "x",
    "qw",
    "scales",
    "shift",
    "bias",
    "y",
    "memory",
    "planes",
)
SCRATCH = 1 << 24


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    flags = ["-O3", "-DNDEBUG", "-std=c++17", "-DWONLY_CPU_ARM=1", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'ffi'}"]
    flags += ["-isystem", str(Path(jaxlib.__file__).parent / "include")]
    flags += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]  # ffi/cpu/sources.cmake
    engines = ROOT / "ffi" / "cpu"
    sources = [(engines / f"engine_{name}.cc", []) for name in ("generic", "neon")]
    # What gcc, clang and CMake call armv8.2-a+dotprod.
    sources += [(engines / "engine_neon_dotprod.cc", ["-mcpu=generic+dotprod"]), (ROOT / "tests/arm/driver.cc", [])]
    return compile_program(sources, flags, tmp_path_factory.mktemp("arm"), "run")


@pytest.fixture(scope="module")
def machine(program):
    return Machine(program)


def place_call(machine: Machine, values: dict[str, int]) -> int:
    """The address of a call of tests/arm/driver.cc; what is not among the values is zero."""
    assert values.keys() <= set(FIELDS)
    return machine.place(struct.pack(f"<{len(FIELDS)}q", *(values.get(name, 0) for name in FIELDS)))


class ArmProblem(Problem):
    """A problem of one batch entry, computed by an engine of the emulated machine."""

    machine: Machine
    engine: str
    planes = 0  # rows of the last call that ran in fixed point
    counts, instructions = False, 0  # of the last call, if they are counted

    def _run(self, x, result, **fields):
        machine, k = self.machine, self.codes.shape[1]
        machine.clear()
        arrays = {"x": x, "qw": self.qw, "scales": self.scales, "shift": self.shift, "bias": self.bias}
        values = {name: machine.place(np.asarray(a).tobytes()) for name, a in arrays.items() if a is not None}
        poison = np.full(result.shape, np.nan, result.dtype)
        values |= {"engine": ENGINES.index(self.engine), "bits": self.bits, "shift_mode": self.shift_mode, "k": k}
        values |= {
            "n": self.n,
            "groups": self.scales.shape[1],
            "rows": x.shape[1],
            "y": machine.place(poison.tobytes()),
        }
        values |= {"x_type": TYPES[x.dtype.name], "y_type": TYPES[poison.dtype.name], **fields}
        values |= {"scale_type": TYPES[self.scales.dtype.name], "memory": machine.place(SCRATCH)}
        if self.shift is not None:
            values["shift_type"] = TYPES[self.shift.dtype.name]
        call = place_call(machine, values)
        if self.counts:
            self.instructions = machine.count(call)
        else:
            machine.call(call)
        self.planes = struct.unpack("<q", machine.read(call + 8 * FIELDS.index("planes"), 8))[0]
        y = np.frombuffer(machine.read(values["y"], poison.nbytes), poison.dtype)
        return jnp.asarray(y.reshape(result.shape))

    def call(self, out_dtype=None, activation=0):
        result = jax.ShapeDtypeStruct((1, self.m, self.n), out_dtype or self.x.dtype)
        return self._run(self.x, result, op=MATMUL, activation=activation)

    def call_transposed(self, dy):
        result = jax.ShapeDtypeStruct((1, self.m, self.codes.shape[1]), dy.dtype)
        return self._run(dy, result, op=TRANSPOSED)

    def dequantize(self):
        result = jax.ShapeDtypeStruct(self.codes.shape, jnp.float32)
        return self._run(jnp.zeros((1, 0, 0)), result, op=DEQUANTIZE)


@pytest.fixture(params=ENGINES)
def problem(request, machine):
    """What makes problems for one engine."""
    return type("EngineProblem", (ArmProblem,), {"machine": machine, "engine": request.param})


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize(("bits", "mode"), SCHEMES)
def test_matmul_against_float64(rng, problem, bits, mode, x_dtype):
    planes = 0
    for i, shape in enumerate(SHAPES):
        case = problem(rng, *shape, bits=bits, mode=mode, x_dtype=x_dtype, scale_dtype=DTYPES[i % 3])
        case.check()
        planes += case.planes
    assert (planes > 0) == (problem.engine == "neon_dotprod" and mode != "table")


@pytest.mark.parametrize(("bits", "mode"), SCHEMES)
def test_transposed_against_float64(rng, problem, bits, mode):
    for i, shape in enumerate(SHAPES):
        case = problem(rng, *shape, bits=bits, mode=mode, x_dtype=DTYPES[i % 3], scale_dtype=DTYPES[i // 3 % 3])
        case.check_transposed(rng)


@pytest.mark.parametrize("activation", range(5))
def test_epilogue(rng, problem, activation):
    for m in (2, 30):
        for x_dtype, out_dtype in zip(DTYPES, DTYPES[1:] + DTYPES[:1], strict=True):
            problem(rng, m, 128, 96, 64, x_dtype=x_dtype, bias="float32").check(out_dtype, activation)


def test_zeros_outside_the_codes(rng, problem):
    for m in (2, 20):
        case = problem(rng, m, 128, 64, 64, mode="integer zeros")
        case.shift = jnp.asarray(rng.integers(0, 256, case.shift.shape), jnp.uint8)
        case.check()


def test_rows_of_all_forms(rng, problem):
    """Rows that fixed point does not hold go as float32, beside others; infinities and NaN come through."""
    case = problem(rng, 21, 192, 67, 64, mode="integer zeros")
    x = np.array(case.x)
    x[0, 0, 70], x[0, 1, 3], x[0, 1, 180], x[0, 2, 100], x[0, 3, 64:] = np.inf, -np.inf, np.inf, np.nan, 1e-30
    x[0, 4, 37] = 3e6
    case.x = jnp.asarray(x)
    with np.errstate(invalid="ignore"):
        want = np.matmul(np.asarray(x, np.float64), case.weights()[0])
    got = np.asarray(case.call(), np.float64)
    np.testing.assert_array_equal(got[0, :3], want[0, :3])
    np.testing.assert_allclose(got[0, 3:], want[0, 3:], rtol=1e-5, atol=1e-3)
    assert case.planes == (17 if problem.engine == "neon_dotprod" else 0)


def test_a_row_does_not_depend_on_the_others(rng, problem):
    case = problem(rng, 41, 320, 128, 64)
    whole, x = np.asarray(case.call()), case.x
    for begin, count in ((0, 17), (13, 9), (40, 1)):
        case.x, case.m = x[:, begin : begin + count], count
        if problem.engine == "neon_dotprod" or count > 4:  # else one or the other is added up in another order
            np.testing.assert_array_equal(np.asarray(case.call()), whole[:, begin : begin + count])


def test_float32_accuracy_is_that_of_float32(rng, problem):
    for bits in (4, 8):
        for m in (1, 4, 16):
            case = problem(rng, m, 2048, 64, 128, bits=bits)
            w, x = case.weights()[0], np.asarray(case.x, np.float64)
            size = np.sqrt(np.matmul(x**2, w**2))
            assert np.max(np.abs(np.asarray(case.call(), np.float64) - np.matmul(x, w)) / size) < 4e-6


# Measured with Clang 22: 1.74 / 1.30 / 0.59 with one row, 0.75 / 0.42 / 0.38 with 64.
@pytest.mark.parametrize(("m", "most"), [(1, (1.9, 1.45, 0.65)), (64, (0.85, 0.47, 0.42))])
def test_instructions_for_a_weight_and_a_row(rng, problem, m, most):
    """Nobody here has such a machine to time: what is counted stands for it."""
    case = problem(rng, m, 512, 1024, 128)
    case.counts = True
    case.check()
    assert case.instructions < most[ENGINES.index(problem.engine)] * m * 512 * 1024, case.instructions


@pytest.mark.parametrize(("bits", "mode"), SCHEMES)
def test_dequantize(rng, problem, bits, mode):
    for shape in SHAPES:
        case = problem(rng, *shape, bits=bits, mode=mode)
        w, magnitude = case.weights()
        np.testing.assert_array_less(np.abs(np.asarray(case.dequantize(), np.float64) - w), 1e-6 * magnitude + 1e-12)


@pytest.mark.parametrize("mode", reference.MODES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("engine", ENGINES)
def test_quantize_is_the_definition(rng, machine, engine, bits, mode):
    for dtype, scale_dtype, group_size, k, n in (
        ("float32", "float32", 32, 96, 67),
        ("bfloat16", "bfloat16", None, 75, 33),
        ("float16", "float16", 128, 256, 130),
    ):
        w = quantize_cases.awkward_weight(rng, k, n, dtype)
        want = jw.quantize(jnp.asarray(w), bits=bits, group_size=group_size, mode=mode, scale_dtype=scale_dtype)
        shift = want.offsets if mode == "offsets" else want.zeros
        machine.clear()
        values = {"engine": ENGINES.index(engine), "op": QUANTIZE, "bits": bits, "k": k}
        values |= {"n": n, "groups": want.scales.shape[0], "quantize_mode": reference.MODES.index(mode)}
        values |= {"x_type": TYPES[dtype], "scale_type": TYPES[scale_dtype], "x": machine.place(w.tobytes())}
        results = {"qw": want.qvalue, "scales": want.scales} | ({} if shift is None else {"shift": shift})
        values |= {name: machine.place(np.asarray(a).nbytes) for name, a in results.items()}
        if shift is not None:
            values["shift_type"] = TYPES[shift.dtype.name]
        machine.call(place_call(machine, values))
        for name, a in results.items():
            array = np.asarray(a)
            got = np.frombuffer(machine.read(values[name], array.nbytes), array.dtype).reshape(array.shape)
            np.testing.assert_array_equal(got, array, err_msg=name)  # -0 is 0
