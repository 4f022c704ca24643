"""What ``_cuda_dispatch`` and ``_cuda_experts`` say of kernels, against the C++ that launches them, on no GPU.

Linked without kernels; what launches those of ragged products is there, too, which may say that one does not fit.
"""

import fcntl
import itertools
import math
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import pytest
from matmul_cases import SHARED_STRIPS

from jax_wonly import _abi, _cuda_dispatch, _cuda_experts
from jax_wonly._abi import RowMode, ShiftMode
from jax_wonly._cuda_dispatch import Product
from jax_wonly.primitives.conv import Window

ROOT = Path(__file__).parent.parent
FFI = ROOT / "ffi"
SOURCES = [f"matmul_{name}" for name in ("decode", "parts", "resident", "stream", "tiled", "transposed", "warpgroup")]
SOURCES += [f"ragged_{name}" for name in ("matmul", "resident", "tiled", "warpgroup")]
SOURCES += ["conv", "direct_conv", "launch", "matmul"]
# With kernels, of an architecture that most of them are empty for.
KERNELS = ["aligned_rows", "matmul_mma", "ragged_plan"]
RAGGED = ("decode", "resident", "stream", "tiled", "warpgroup", "transposed_stream", "transposed_warpgroup")
KERNELS += [f"ragged_{name}_kernels" for name in (*RAGGED, "resident_eight_bits")]
KERNELS.append("ragged_transposed_warpgroup_f32")
TYPES = ("float16", "bfloat16", "float32", "uint8")  # DType of abi.h
H100 = (90, 132, 232448, 233472)  # architecture, multiprocessors, shared memory of a CTA and of a multiprocessor
A100 = (80, 108, 166912, 167936)
L40S = (89, 142, 101376, 102400)
T4 = (75, 40, 65536, 65536)
PART_OF_H100 = (90, 16, *H100[2:])

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
    pytest.mark.skipif(not FFI.is_dir(), reason="needs the sources"),
]


def build(program: Path) -> None:
    folder = program.parent
    subprocess.run([sys.executable, FFI / "cuda" / "costs.py", folder], check=True)
    nvcc = ["nvcc", "-std=c++17", "-O0", "-I", FFI, "-I", folder, "-Xcompiler", "-ffunction-sections"]
    # To PTX, which nothing assembles: that would take four fifths of the time.
    quick = ["--expt-relaxed-constexpr", "-gencode", "arch=compute_80,code=compute_80", "-Xcicc", "-O0"]
    sources = {Path(__file__).with_name("dispatcher.cc"): ["-x", "c++"]}
    sources |= {FFI / "cuda" / f"{name}.cu": ["-x", "c++"] for name in SOURCES}
    sources |= {FFI / "cuda" / f"{name}.cu": quick for name in KERNELS}

    def compile_one(source: Path) -> Path:
        to = folder / f"{source.stem}.o"
        subprocess.run([*nvcc, *sources[source], "-c", source, "-o", to], check=True)
        return to

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    # Without the functions that are not called, as the kernels are not there that those launch.
    wrapped = ["cudaGetDevice", "cudaDeviceGetAttribute", "cudaFuncGetAttributes", "cudaFuncSetAttribute"]
    wrapped += ["cudaGetFuncBySymbol", "cudaGetDriverEntryPointByVersion", "__cudaRegisterFunction"]
    options = ["--gc-sections", *(f"--wrap={name}" for name in wrapped)]
    linked = [flag for option in options for flag in ("-Xlinker", option)]
    subprocess.run(["nvcc", *linked, *objects, "-o", program], check=True)


@pytest.fixture(scope="module")
def dispatcher(tmp_path_factory):
    """Calls ``dispatcher(gpu, lines)``, which gives a kernel with its configuration for every line."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root  # one for all workers
    folder = root / "dispatcher"
    folder.mkdir(exist_ok=True)
    program = folder / "dispatcher"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            build(program)

    def run(gpu, lines) -> list[tuple]:
        text = "\n".join(" ".join(map(str, line)) for line in lines)
        result = subprocess.run([program, *map(str, gpu)], input=text, capture_output=True, text=True, check=True)
        said = [tuple(int(w) if w.isdecimal() else w for w in line.split()) for line in result.stdout.splitlines()]
        assert len(said) == len(lines)
        return said

    return run


def on(monkeypatch, gpu):
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: (f"{gpu[0] // 10}.{gpu[0] % 10}", gpu[1]))


def products(rng, count: int) -> list[Product]:
    """Many where kernels meet."""
    found = []
    rows = [*range(1, 21), 24, 31, 33, 40, 48, 64, 65, 80, 96, 97, 100, 128, 129, 150, 200, 256, 300, 400, 513, 700]
    inputs = [64, 384, 512, 1000, 1024, 1088, 1120, 2048, 2304, 4096, 4100, 5120, 7168, 8192, 8256, 11008, 14336, 28672]
    outputs = [16, 17, 72, 137, 321, 512, 768, 1001, 1024, 1536, 2048, 4096, 4104, 7001, 8192, 14336, 16896, 28672]
    modes = [ShiftMode.NONE, ShiftMode.NONE, *ShiftMode]
    while len(found) < count:
        m, batch = int(rng.choice([*rows, 1024, 5000])), int(rng.choice([1, 1, 1, 1, 2, 3, 8, 32]))
        k, n, bits = int(rng.choice(inputs)), int(rng.choice(outputs)), int(rng.choice([4, 4, 8]))
        group_size = int(rng.choice([32, 64, 128, 256, k]))
        k = -(-k // group_size) * group_size
        x, other = (str(rng.choice(TYPES[:3])) for _ in range(2))
        mode, scales = modes[rng.integers(len(modes))], x if rng.random() < 0.7 else other
        if mode == ShiftMode.TABLE and bits == 8:
            continue
        shift = {ShiftMode.NONE: None, ShiftMode.TABLE: "float32"}.get(mode, scales)
        if mode == ShiftMode.ZEROS and rng.random() < 0.5:
            shift = "uint8"
        dtypes = jnp.dtype(x), jnp.dtype(scales), mode, shift and jnp.dtype(shift)
        found.append(Product(m, k, n, batch, bits, *dtypes, groups=k // group_size))
    return found


def line(operation: str, p: Product, scratch: int = 0) -> tuple:
    """As ``dispatcher`` reads it, with bytes of scratch."""
    types = [TYPES.index(str(dtype)) for dtype in (p.x_dtype, p.scale_dtype, p.shift_dtype or "uint8")]
    return operation, p.m, p.k, p.n, p.batch, p.bits, p.groups, *types, int(p.shift_mode), scratch


def times(p: Product) -> dict[tuple, float]:
    """What every configuration of the kernels with a model is expected to take, at best where several costs are its."""
    of = {
        "matmul_tiled": _cuda_dispatch._tiled_times(p),
        "matmul_mma": _cuda_dispatch._mma_times(p),
        "matmul_warpgroup": _cuda_dispatch._warpgroup_times(p),
        "matmul_resident": _cuda_dispatch._resident_times(p),
        "matmul_stream": [((), _cuda_dispatch._stream(p))],
    }
    found: dict[tuple, float] = {}
    for name, configs in of.items():
        for config, us in configs:
            found[name, *config] = min(us, found.get((name, *config), math.inf))
    return found


def check_parts(p: Product, said: list | None, single: float) -> None:
    """Two kernels that C++ takes (None: it takes one, which takes ``single``) and those of Python: the same, or where
    both take as long in float32.
    """
    parts, least = _cuda_dispatch._parts(p), _cuda_dispatch._PARTS.gain * single
    if said is None:
        assert parts is not None and parts.us >= least * (1 - 1e-5), p
        return
    outputs, *words = said
    second = next(i for i in range(1, len(words)) if isinstance(words[i], str))
    kernels = tuple(words[:second]), tuple(words[second:])
    assert _cuda_dispatch._may_be_first((kernels[0][0], kernels[0][1:]), outputs), (p, said)
    of = [times(p._replace(n=n, parameter_row=p.row)) for n in (outputs, p.n - outputs)]
    us = _cuda_dispatch._PARTS.join + sum(us[kernel] for us, kernel in zip(of, kernels, strict=True))
    if parts is None:
        assert us >= least * (1 - 1e-5), (p, said)
    else:
        assert us <= parts.us * (1 + 1e-5), (p, said, parts)


@pytest.mark.parametrize("gpu", [H100, A100, L40S], ids=["sm_90", "sm_80", "sm_89"])
def test_products(rng, monkeypatch, dispatcher, gpu):
    """The kernel, and its configuration, with the scratch that the custom call has."""
    on(monkeypatch, gpu)
    cases = products(rng, 3000)
    lines = [line("matmul", product, 4 * _cuda_dispatch.scratch(product, product.batch)) for product in cases]
    seen = set()
    for product, (name, *config) in zip(cases, dispatcher(gpu, lines), strict=True):
        said, us = _cuda_dispatch.kernel(product), times(product)
        seen.add(name)
        least: dict[str, float] = {}  # of each kernel
        for (other, *_), t in us.items():
            least[other] = min(t, least.get(other, math.inf))
        if name == "matmul_parts" or " + " in said:
            kernels = [least["matmul_warpgroup"], least["matmul_tiled"]]
            in_tiles = product.m >= _cuda_dispatch._least_tiled_tokens(product) and _cuda_dispatch.tiled_kernel(product)
            single = min(kernels[: 1 + in_tiles])
            check_parts(product, config if name == "matmul_parts" else None, single)
            continue
        if said != name:  # either, where both take as long in float32
            assert math.isclose(least.get(name, math.nan), least.get(said, math.nan), rel_tol=1e-5), (
                product,
                name,
                said,
            )
        if (name, *config) in us:
            assert us[name, *config] <= least[name] * (1 + 1e-5), (product, name, config, us[name, *config], least)
        else:
            assert name in ("matmul_decode", "matmul_stream"), (product, name, config)
    kernels = {"tiled", "warpgroup", "parts", "resident", "decode"} if gpu == H100 else {"mma"}
    assert seen == {f"matmul_{kernel}" for kernel in kernels | {"stream"}}


def test_repeated_products(rng, dispatcher):
    """Choices are remembered, by all that they depend on: each is the same after any others."""
    lines = [line("matmul", product, scratch) for product in products(rng, 300) for scratch in (0, 1 << 22)]
    once = dispatcher(H100, lines)
    order = rng.integers(len(lines), size=5000)
    order[1::2] = order[::2]  # each twice in a row, too
    for i, said in zip(order, dispatcher(H100, [lines[i] for i in order]), strict=True):
        assert said == once[i], lines[i]
    assert any(a != b for a, b in zip(once[::2], once[1::2], strict=True))  # scratch matters


def test_transposed(rng, monkeypatch, dispatcher):
    for gpu in (H100, A100):
        on(monkeypatch, gpu)
        cases = products(rng, 500)
        scratch = [4 * _cuda_dispatch.transposed_scratch(product, product.batch, product.batch) for product in cases]
        lines = [line("transposed", *case) for case in zip(cases, scratch, strict=True)]
        for product, (name, *_) in zip(cases, dispatcher(gpu, lines), strict=True):
            if not _cuda_dispatch.use_transposed_kernel(product, forced=True):
                assert name == "none", product
            else:
                assert _cuda_dispatch.transposed_kernel(product) == name, product


def test_strips_of_gradients(dispatcher):
    """CTAs of eight warps where strips of inputs fill the GPU; otherwise more of fewer warps, that all run at once."""
    bf16, f32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
    expected = {  # inputs, outputs, rows, types of them and of scales: CTAs of a cluster, and warps
        (8192, 8192, 1, bf16, bf16): (1, 8),
        (8192, 8192, 1, bf16, f32): (2, 8),
        (4096, 4096, 16, bf16, bf16): (2, 8),
        (5120, 1024, 1, bf16, bf16): (1, 8),
        (5120, 13824, 16, bf16, bf16): (4, 4),
        (4608, 9216, 16, bf16, bf16): (4, 4),
        (4608, 9216, 24, bf16, bf16): (3, 4),
        (5120, 13824, 24, bf16, bf16): (1, 8),
        (11008, 4096, 1, f32, bf16): (2, 4),
        (11008, 4096, 16, f32, bf16): (1, 8),
        (18944, 3584, 8, bf16, bf16): (2, 3),
        (28672, 8192, 1, bf16, bf16): (1, 8),
    }
    cases = [Product(m, k, n, 1, 4, x, scale, groups=k // 128) for k, n, m, x, scale in expected]
    sizes = [(k, n, batch) for k in range(64, 40000, 448) for n, batch in ((4096, 1), (4160, 1), (4160, 3))]
    cases += [Product(1, k, n, batch, 4, bf16, bf16, groups=1) for k, n, batch in sizes]
    said = dispatcher(H100, [line("transposed", product) for product in cases])
    assert [(cluster, warps) for _, _, cluster, warps, _ in said[: len(expected)]] == list(expected.values())
    _, multiprocessors, _, shared = H100
    seen = set()
    for product, (name, _, cluster, warps, shared_bytes) in zip(cases, said, strict=True):
        assert name == "matmul_transposed_stream"
        ctas = -(-product.batch * -(-product.k // 64) * cluster // multiprocessors)  # of a multiprocessor
        seen.add((cluster, warps))
        units = -(-(shared_bytes + 1024) // 128)  # that shared memory is dealt out in
        assert warps == 8 or (ctas * 128 * units <= shared and ctas * warps <= 16), product
    assert {(1, 8), (2, 8), (4, 4), (2, 4), (2, 3), (1, 4)} <= seen


@pytest.mark.parametrize("m", SHARED_STRIPS)
def test_shared_strips(dispatcher, m):
    """What the emulator is to compute in CTAs of fewer warps is so on a GPU as small as its own."""
    x = jnp.dtype("bfloat16")
    multiprocessors, expected = SHARED_STRIPS[m]
    cases = [Product(m, 64 * strips, n, 1, 4, x, x, groups=strips) for strips, n in expected]
    said = dispatcher((90, multiprocessors, *H100[2:]), [line("transposed", product) for product in cases])
    assert [(cluster, warps) for _, _, cluster, warps, _ in said] == list(expected.values())


def test_strips_of_gradients_of_experts(dispatcher):
    """Two warps to a CTA where there are many strips of few outputs."""
    x = jnp.dtype("bfloat16")
    expected = {(128, 2048, 1536): 64, (256, 7168, 256): 64, (128, 768, 2048): 64, (8, 4096, 14336): 256}  # threads
    for m_of_expert in (1, 8, 16):
        cases = [Product(m_of_expert * e, k, n, e, 4, x, x, groups=k // 128) for e, k, n in expected]
        lines = [
            (*line("ragged_transposed", p, scratch_of(p, RowMode.SIZES, transpose=True)), int(RowMode.SIZES))
            for p in cases
        ]
        for threads, said in zip(expected.values(), dispatcher(H100, lines), strict=True):
            *_, (name, _, _, launched, cluster, _) = launches(said)
            assert (name, launched, cluster) == ("transposed_stream_matmul", threads, 1)


def test_products_before_tensor_cores_of_bf16(rng, monkeypatch, dispatcher):
    """Where there is no kernel for the type of the activations, none is asked for."""
    on(monkeypatch, T4)
    cases = products(rng, 500)
    for product, (name, *_) in zip(cases, dispatcher(T4, [line("matmul", p) for p in cases]), strict=True):
        there = _cuda_dispatch.has_kernels(product.x_dtype)
        assert name == (_cuda_dispatch.kernel(product) if there else "none"), product


RAGGED = {  # what the functions on the GPU are called
    "ragged_resident_matmul": "ragged_resident",
    "decode_matmul": "matmul_decode",
    "stream_matmul": "matmul_stream",
    "tiled_matmul": "ragged_tiled",
    "ragged_warpgroup_matmul": "ragged_warpgroup",
    "transposed_stream_matmul": "matmul_transposed_stream",
    "transposed_warpgroup_matmul": "matmul_transposed_warpgroup",
}


def ragged_products(rng, count: int) -> list[tuple[Product, RowMode]]:
    """Whose batch are experts: rows about where kernels meet, and sizes about what they take."""
    found = []
    shares = [1 / 16, 1 / 2, 1, 2, 4, 8, 16, 40, 48, 56, 64, 128, 384]
    inputs = [64, 1000, 1016, 1024, 4096, 4100, 23296, 32768, 60000, 116000]
    outputs = [17, 264, 1536, 7001, 28672, 131072, 131080, 300000]
    for p in products(rng, count):
        experts = int(rng.choice([1, 2, 4, 8, 14, 58, 60, 128, 136, 255, 512, 513, 2000]))
        m = p.m if rng.random() < 0.4 else max(1, int(experts * rng.choice(shares)) + int(rng.integers(-1, 2)))
        k = int(rng.choice(inputs)) if rng.random() < 0.3 else p.k
        n = int(rng.choice(outputs)) if rng.random() < 0.3 else p.n
        size = p.group_size if p.groups > 1 and p.k != k else k
        groups = p.groups if k == p.k else -(-k // size)
        product = p._replace(m=m, k=k if k == p.k else groups * size, n=n, batch=experts, groups=groups)
        found.append((product, RowMode(int(rng.integers(2)))))
    return found


def launches(said: tuple) -> list[tuple]:
    """Kernels with CTAs along x and y, threads, CTAs of a cluster, and bytes of shared memory."""
    return [said[i : i + 6] for i in range(0, len(said), 6)]


def assert_launchable(gpu, kernels: list[tuple], case) -> None:
    for name, x, y, threads, cluster, shared in kernels:
        room = gpu[2] - (_cuda_experts._STATIC if name == "decode_matmul" else 0)
        assert shared <= room and threads <= 1024 and cluster <= (8 if gpu[0] >= 90 else 1), (case, kernels)
        assert 0 < x < 2**31 and 0 < y < 2**16 and x * y % cluster == 0, (case, kernels)


def scratch_of(product: Product, mode: RowMode, *, transpose: bool = False) -> int:
    """Bytes."""
    own = product.batch  # scales
    return 4 * _cuda_experts.scratch(product, ids=mode == RowMode.IDS, transpose=transpose, parameter_batch=own)


GPUS = pytest.mark.parametrize(
    "gpu", [H100, PART_OF_H100, A100, L40S, T4], ids=["sm_90", "part of sm_90", "sm_80", "sm_89", "sm_75"]
)


@pytest.mark.parametrize("inputs", [1 << 20, (1 << 20) + 128, 1 << 26, 1 << 28])
def test_more_inputs_than_fit(monkeypatch, dispatcher, inputs):
    """Kernels that keep a row's inputs in shared memory leave what does not fit to others, however much it is."""
    on(monkeypatch, H100)
    shifts = {ShiftMode.TABLE: "float32", ShiftMode.NONE: None, ShiftMode.ZEROS: "uint8"}
    for x, mode in itertools.product(TYPES[:3], ShiftMode):
        shift = shifts.get(mode, x)
        dtypes = jnp.dtype(x), jnp.dtype(x), mode, shift and jnp.dtype(shift)
        cases = [Product(m, inputs, n, 1, 4, *dtypes, groups=1) for m in (1, 2, 3, 4, 8, 16) for n in (16, 2128)]
        lines = [line("matmul", p, 4 * _cuda_dispatch.scratch(p, 1)) for p in cases]
        assert [name for name, *_ in dispatcher(H100, lines)] == [_cuda_dispatch.kernel(p) for p in cases]
        for rows in RowMode:
            experts = [p._replace(batch=8) for p in cases]
            lines = [(*line("ragged", p, scratch_of(p, rows)), int(rows)) for p in experts]
            for p, said in zip(experts, dispatcher(H100, lines), strict=True):
                assert_launchable(H100, launches(said), p)
                name = RAGGED[launches(said)[-1][0]]
                assert name == _cuda_experts.kernel(p, ids=rows == RowMode.IDS) != "ragged_resident", p


@GPUS
def test_ragged_products(rng, monkeypatch, dispatcher, gpu):
    """The kernel, that it can be launched, and the rows of a tile where it is one that has two kinds."""
    on(monkeypatch, gpu)
    cases = ragged_products(rng, 5000)
    lines = [(*line("ragged", p, scratch_of(p, mode)), int(mode)) for p, mode in cases]
    seen = set()
    for (product, mode), said in zip(cases, dispatcher(gpu, lines), strict=True):
        there = _cuda_dispatch.has_kernels(product.x_dtype)
        if not there:
            assert said == ("none",), (product, mode, said)
            continue
        kernels, ids = launches(said), mode == RowMode.IDS
        assert_launchable(gpu, kernels, (product, mode))
        name, _, _, threads, *_ = kernels[-1]
        assert RAGGED[name] == _cuda_experts.kernel(product, ids=ids), (product, mode, kernels)
        seen.add(RAGGED[name])
        if name == "ragged_warpgroup_matmul":  # four warpgroups of low tiles, two of high ones, and one that copies
            rows = 64 if product.split else {640: 64, 384: 128}[threads]
            assert rows == _cuda_experts.tile_rows(product, ids=ids), (product, mode, kernels)
        warpgroups = name == "ragged_warpgroup_matmul"
        ordered = ids and (name == "tiled_matmul" or (warpgroups and not product.split))
        assert ("order_rows" in said) == ordered, (product, mode, kernels)
        assert ("split_activations" in said) == (warpgroups and product.split), (product, mode, kernels)
    kernels = {"ragged_resident", "ragged_warpgroup", "ragged_tiled", "matmul_decode"}
    assert seen == (kernels if gpu[0] == 90 else set()) | {"matmul_stream"}


@GPUS
def test_transposed_ragged_products(rng, monkeypatch, dispatcher, gpu):
    on(monkeypatch, gpu)
    cases = ragged_products(rng, 2000)
    lines = [(*line("ragged_transposed", p, scratch_of(p, mode, transpose=True)), int(mode)) for p, mode in cases]
    seen = set()
    for (product, mode), said in zip(cases, dispatcher(gpu, lines), strict=True):
        there = _cuda_experts.use_transposed_kernel(product, forced=True)
        if said == ("none",):
            assert not there, product
            continue
        kernels = launches(said)
        assert_launchable(gpu, kernels, (product, mode))
        assert RAGGED[kernels[-1][0]] == _cuda_experts.transposed_kernel(product), (product, mode, kernels)
        assert there
        seen.add(_cuda_experts.transposed_kernel(product))
    streams, warpgroups = {"matmul_transposed_stream"}, {"matmul_transposed_warpgroup"}
    assert seen == {H100: streams | warpgroups, PART_OF_H100: streams | warpgroups, T4: set()}.get(gpu, streams)


def test_decode_of_experts_fits(monkeypatch, dispatcher):
    """Inputs and experts with which all of the shared memory would be asked for, beside what is static."""
    on(monkeypatch, H100)
    x = jnp.dtype("bfloat16")
    for stages, experts, groups in ((182, 50, 1), (181, 128, 1), (180, 206, 1), (177, 86, 2), (176, 166, 2)):
        for more in (0, 1, 8, 9):
            k = 128 * stages
            product = Product(16, k, 1024, experts + more, 8, x, x, groups=k // 64 if groups == 2 else 1)
            case = (*line("ragged", product, scratch_of(product, RowMode.SIZES)), int(RowMode.SIZES))
            (said,) = dispatcher(H100, [case])
            assert_launchable(H100, launches(said), product)
            assert RAGGED[said[-6]] == _cuda_experts.kernel(product, ids=False)
            assert (said[-6] == "decode_matmul") == (more == 0)


def windows(rng, count: int, *, transposed: bool) -> list[tuple[int, tuple[int, ...], Window]]:
    """Images, their sizes and a window with a result."""
    found = []

    def padding() -> int:
        return int(rng.choice([0, 1, 2, 3, 126, 128, 129], p=[0.3, 0.3, 0.2, 0.17, 0.01, 0.01, 0.01]))

    while len(found) < count:
        axes = int(rng.integers(1, 3 if transposed else 4))
        size = tuple(int(rng.choice([1, 2, 3, 3, 5, 7])) for _ in range(axes))
        spread = int(rng.choice([1, 1, 1, 2, 3])) if transposed else 1
        window = Window(
            size,
            tuple(int(rng.choice([1, 1, 1, 2, 3, 8, 9], p=[0.3, 0.3, 0.2, 0.08, 0.06, 0.03, 0.03])) for _ in size),
            tuple((padding(), padding()) for _ in size),
            tuple(spread for _ in size),
            tuple(int(rng.choice([1, 1, 1, 2])) for _ in size),
        )
        sizes = tuple(int(rng.choice([1, 7, 14, 28, 56, 100, 200, 252, 256])) for _ in size)
        if all(window.results(sizes)):
            found.append((int(rng.choice([1, 2, 8, 32])), sizes, window))
    return found


def geometry(images: int, groups: int, sizes, window: Window) -> tuple:
    """As ``dispatcher`` reads it, with axes of one pixel before those that there are."""
    low = [low for low, _ in window.padding]
    of = zip(
        *(sizes, window.results(sizes), window.size, window.strides, low, window.rhs_dilation, window.lhs_dilation),
        strict=True,
    )
    missing = 3 - len(sizes)
    return images, groups, *missing * (1, 1, 1, 1, 0, 1, 1), *(number for axis in of for number in axis)


def test_convolutions(rng, monkeypatch, dispatcher):
    """Whether there is a kernel, which, and its configuration."""
    on(monkeypatch, H100)
    lines, cases = [], []
    for images, sizes, window in windows(rng, 1500, transposed=True):
        k, n, bits = int(rng.choice([4, 8, 16, 32, 64, 96, 128, 512])), int(rng.choice([20, 64, 96, 256, 1024])), 4
        pixels, group_size = images * math.prod(window.results(sizes)), int(rng.choice([32, 64, k]))
        if k % group_size or (group_size == 32 and k == 64):
            group_size = k
        x = jnp.dtype(str(rng.choice(TYPES[:3])))
        product = Product(pixels, k, n, 1, bits, x, x, groups=k // group_size)
        lines.append(line("conv", product, 4 * _abi.conv_scratch(pixels, n)) + geometry(images, 1, sizes, window))
        cases.append((images, sizes, window, k, n, bits, group_size, x))
    seen = set()
    for case, said in zip(cases, dispatcher(H100, lines), strict=True):
        images, sizes, window, k, n, bits, group_size, x = case
        results = window.results(sizes)
        there = _cuda_dispatch.conv_kernel(x, k, sizes, results, window)
        assert there == (said != ("none",)), case
        seen.add(said[0])
        if not there:
            continue
        warpgroups = k % 64 == 0 and group_size % 64 == 0 and n % 8 == 0
        phases, pixels = math.prod(window.lhs_dilation), images * math.prod(results)
        us = _cuda_dispatch.conv_times(pixels, k, n, window.taps, bits, phases, warpgroups and phases == 1)
        bands = _cuda_dispatch.band_conv_time((images, *sizes, k), x, k, n, 1, results, window)
        if bands is not None:
            us[("bands",)] = bands
        least = min(us.values())
        if phases == 1:
            assert us[said] <= least * (1 + 1e-5), (case, said, us[said], least)
        else:  # tiles are not shared by more clusters than the shortest phase has stages
            assert (said[0], said[1], said[3]) == ("tiled", *min(us, key=lambda c: us[c])[1::2]), (case, said)
    assert seen == {"none", "tiled", "warpgroup", "bands"}


@pytest.mark.parametrize("gpu", [H100, A100, T4], ids=["sm_90", "sm_80", "sm_75"])
def test_convolutions_in_groups(rng, monkeypatch, dispatcher, gpu):
    on(monkeypatch, gpu)
    lines, cases = [], []
    for images, sizes, window in windows(rng, 1000, transposed=False):
        k, groups, each = int(rng.choice([1, 1, 2, 4, 8, 12, 32])), int(rng.choice([2, 8, 24, 64])), 1
        if rng.random() < 0.3:
            each = int(rng.choice([2, 3]))
        n, x = (groups * each if k == 1 else groups * k * each), jnp.dtype(str(rng.choice(TYPES[:3])))
        product = Product(images * math.prod(window.results(sizes)), k, n, 1, 4, x, x)
        lines.append(line("direct", product) + geometry(images, groups, sizes, window))
        cases.append((images, sizes, window, k, n, groups, x))
    seen = set()
    for case, (name,) in zip(cases, dispatcher(gpu, lines), strict=True):
        images, sizes, window, k, n, groups, x = case
        shape, results = (images, *sizes, k * groups), window.results(sizes)
        seen.add(name)
        assert _cuda_dispatch.direct_conv_kernel(shape, x, k, n, groups, results, window) == (name != "none"), case
        if name in ("bands", "grouped"):
            bands = _cuda_dispatch.band_conv_time(shape, x, k, n, groups, results, window)
            assert len(sizes) == 3 or (bands is not None) == (name == "bands"), case
    kernels = {H100: {"grouped", "bands"}, A100: {"grouped"}, T4: set()}
    assert seen == {"none", "depthwise"} | kernels[gpu]
