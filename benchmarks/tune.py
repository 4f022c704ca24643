"""Builds kernel_sweep.cu with nvcc, checks every kernel configuration, and times those that could be the best.

    python benchmarks/tune.py [--bits 4] [--group-size 128] [--mode symmetric] [--dtype bf16] [--m 1,8,16,64]
        [--shapes 8192x8192,...]
    python benchmarks/tune.py --check [--every 1]
    python benchmarks/tune.py --record     measures what benchmarks/fit_costs.py needs, into its file
    python benchmarks/tune.py --random 600 [--seed 0]     the same of products drawn at random, into another file
    python benchmarks/tune.py --few 900 [--seed 0]     of products of few tokens, by matmul_resident and others
    python benchmarks/tune.py --parts 300 [--seed 0]     of those that two kernels are chosen for: them, and the one
        that would be chosen otherwise, into another file
    python benchmarks/tune.py --even 300 [--seed 0]     the same of those whose stages CTAs share out evenly

Prints the fastest configurations of each product, or, of random ones, how much longer than those the chosen ones take.
"""

import argparse
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import fit_costs
import jax.numpy as jnp
from _common import command, revision

from jax_wonly import _cuda_costs, _cuda_dispatch
from jax_wonly._abi import ShiftMode
from jax_wonly.progress import progress

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "kernel_sweep"
SHAPES = "8192x28672,8192x8192,4096x14336,14336x4096,4096x4096,2048x8192,3584x18944,7168x2048"
RECORD = fit_costs.RECORDS[90]
# Of models from many kinds of people, and between.
OTHERS = (
    "1024x1024,1024x4096,1024x8192,1024x28672,1536x4608,1536x8960,1536x24576,2048x1024,2048x2048,2048x7168,2048x16384,"
    "2560x2560,2560x10240,3072x3072,3072x8192,3072x768,3584x3584,3584x4608,4096x512,4096x1024,4096x2560,4096x6144,"
    "4096x11008,4096x12288,5120x1280,5120x5120,5120x7168,5120x13824,5120x27648,6144x6144,6144x16384,7168x4608,7168x7168,"
    "7168x18432,8192x1024,8192x2048,8192x3072,8192x10240,8960x1536,10240x2560,11008x4096,12288x4096,13824x5120,"
    "16384x1024,16384x6144,18432x7168,18944x3584,27648x5120,28672x8192"
)
FEW = "4,8,9,16,17,24,32,33,48,64,65,72,80,96,104,112,120,128"
MANY = (
    "160,192,208,224,240,256,272,288,304,320,352,384,400,416,432,448,464,480,512,513,544,560,600,640,700,768,850,900,"
    "1024,1100,1281,1536"
)
# What is recorded of the kernels whose configuration follows from a model of costs: bits, group size, type, shift,
# tokens and shapes.
SWEEPS = (
    (4, 128, "bf16", "symmetric", FEW, SHAPES),
    (4, 128, "bf16", "symmetric", "3,8,16", OTHERS),
    (4, 128, "bf16", "symmetric", MANY, "8192x8192,4096x14336,14336x4096,4096x4096,2048x8192"),
    *((8, group, "bf16", "symmetric", "8,16,32,48,64,96,128", "8192x8192,4096x14336") for group in (128, 0)),
    *(
        (4, group, "bf16", shift, "16,32,64,96,112,128", "8192x8192,4096x14336,4096x4096,5120x5120")
        for group in (32, 64, 128)
        for shift in ("symmetric", "offsets", "float_zeros")
        if (group, shift) != (128, "symmetric")
    ),
    (4, 128, "bf16", "offsets", "192,256,400,512,600", "8192x8192,4096x4096"),
    *((4, g, "bf16", shift, "8", SHAPES) for g in (32, 64) for shift in ("symmetric", "integer_zeros", "offsets")),
    (4, 128, "bf16", "offsets", "8", SHAPES),
    (4, 128, "f32", "symmetric", "1,4,8,16,24,32,48,64,96,128,256,512", SHAPES),
    *((b, g, "f32", "symmetric", "4,8,16,32,64,128", "8192x8192,4096x4096") for b, g in ((4, 32), (4, 64), (8, 0))),
    (4, 64, "bf16", "table", "192,256,512,1024", "8192x8192,4096x4096"),
)


SCHEME, COLUMNS = ("bits", "group_size", "dtype", "mode"), ("k", "n", "m", "kernel", "config", "us")  # of a record
# Schemes of random products, and how often.
SCHEMES = {
    (4, 128, "bf16", "symmetric"): 12,
    (4, 128, "bf16", "integer_zeros"): 5,
    (4, 128, "bf16", "offsets"): 2,
    (4, 64, "bf16", "symmetric"): 5,
    (4, 64, "bf16", "integer_zeros"): 2,
    (4, 64, "bf16", "offsets"): 2,
    (4, 32, "bf16", "symmetric"): 5,
    (4, 32, "bf16", "integer_zeros"): 3,
    (4, 32, "bf16", "float_zeros"): 1,
    (4, 0, "bf16", "symmetric"): 1,
    (4, 128, "f16", "symmetric"): 5,
    (4, 128, "f16", "integer_zeros"): 2,
    (4, 32, "f16", "symmetric"): 2,
    (8, 128, "bf16", "symmetric"): 5,
    (8, 0, "bf16", "symmetric"): 3,
    (8, 128, "bf16", "integer_zeros"): 1,
    (8, 128, "bf16", "offsets"): 1,
    (8, 64, "bf16", "symmetric"): 3,
    (8, 32, "bf16", "symmetric"): 3,
    (8, 32, "bf16", "integer_zeros"): 2,
    (8, 128, "f16", "symmetric"): 2,
}
# The same with up to as many tokens as matmul_resident takes.
FEW_SCHEMES = {
    (4, 128, "bf16", "symmetric"): 8,
    (4, 128, "bf16", "integer_zeros"): 2,
    (4, 128, "bf16", "offsets"): 4,
    (4, 64, "bf16", "float_zeros"): 1,
    (4, 32, "bf16", "symmetric"): 3,
    (4, 32, "bf16", "float_zeros"): 1,
    (4, 128, "f16", "symmetric"): 2,
    (4, 128, "bf16/f32", "symmetric"): 4,
    (4, 128, "bf16/f32", "float_zeros"): 1,
    (4, 32, "bf16/f32", "offsets"): 2,
    (4, 128, "f32", "symmetric"): 5,
    (4, 32, "f32", "integer_zeros"): 1,
    (8, 128, "bf16", "symmetric"): 8,
    (8, 0, "bf16", "symmetric"): 3,
    (8, 128, "bf16", "integer_zeros"): 2,
    (8, 128, "bf16", "offsets"): 4,
    (8, 64, "bf16", "float_zeros"): 1,
    (8, 32, "bf16", "symmetric"): 2,
    (8, 32, "bf16", "float_zeros"): 1,
    (8, 128, "f16", "symmetric"): 2,
    (8, 128, "bf16/f32", "symmetric"): 4,
    (8, 32, "bf16/f32", "offsets"): 1,
    (8, 128, "f32", "symmetric"): 5,
    (8, 32, "f32", "integer_zeros"): 2,
}
INPUTS = (768, 1024, 1536, 2048, 2304, 2560, 2880, 3072, 3584, 4096, 5120, 6144, 6656, 7168, 8192, 9728, 10240, 11008)
INPUTS += (12288, 14336, 18944, 27648)
TOKENS = (9, 1600)  # of random products; by kernels of other rules beyond
FEW_TOKENS = (1, 16)
MODES = {"symmetric": ShiftMode.NONE, "offsets": ShiftMode.OFFSETS}  # others are zeros
DTYPES = {"bf16": "bfloat16", "f16": "float16"}
OF_TWO = -5  # two kernels, as kernel_sweep has it
PLAUSIBLE, MOST_TRIED = 1.4, 20  # times the fastest expected: configurations that are timed, and how many at most
FEW_OTHERS = 3  # of matmul_warpgroup that few tokens are timed with


# Programs in C++, and the kernels that each of them launches. The sweep's ragged ones are launched by others of it.
_PRODUCTS = ("matmul_[!t]*.cu", "matmul_tiled*.cu", "ragged_[ds]*_*.cu", "launch.cu", "tensor_map.cu")
PROGRAMS = {
    "kernel_sweep": ("benchmarks", _PRODUCTS),
    "host": ("benchmarks", ("aligned_rows.cu", "matmul.cu", *_PRODUCTS)),
    "launches": ("tests/gpu", ("*.cu",)),
}


def build(definitions: tuple[str, ...] = (), program: str = "kernel_sweep") -> Path:
    """Compiles a program for the local GPU; only what changed since."""
    folder = BUILD.with_name("_".join((BUILD.name, *definitions)))
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc is None:
        sys.exit("benchmarks/tune.py needs nvcc on the PATH, or CUDACXX set to it")
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    capability = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0].replace(".", "")
    architecture = capability + ("a" if int(capability) >= 90 else "")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, ROOT / "ffi" / "cuda" / "costs.py", folder], check=True)
    flags = ["-std=c++17", "-O3", f"-I{ROOT / 'ffi'}", f"-I{folder}", "--expt-relaxed-constexpr", "-lineinfo"]
    flags += [f"-D{name}" for name in definitions]
    flags.append(f"-gencode=arch=compute_{architecture},code=sm_{architecture}")
    place, patterns = PROGRAMS[program]
    sources = [ROOT / place / f"{program}.cu"]
    sources += sorted({path for pattern in patterns for path in (ROOT / "ffi" / "cuda").glob(pattern)})
    headers = [p for suffix in ("*.h", "*.cuh") for p in (ROOT / "ffi").rglob(suffix)]
    newest = max(p.stat().st_mtime for p in headers)
    jobs, objects = [], []
    for source in sources:
        target = folder / f"{source.stem}.{architecture}.o"
        objects.append(str(target))
        if not target.is_file() or target.stat().st_mtime < max(newest, source.stat().st_mtime):
            print(f"compiling {source.name} for sm_{architecture}", flush=True)
            jobs.append(subprocess.Popen([nvcc, *flags, "-c", str(source), "-o", str(target)]))
    if any(job.wait() for job in jobs):
        sys.exit("nvcc failed")
    executable = folder / f"{program}.{architecture}"
    subprocess.run([nvcc, *flags, *objects, "-cudart", "static", "-o", str(executable)], check=True)
    return executable


def config_of(strips: int, tiles: int, warps: int, cluster: int, ctas: int) -> tuple[str, dict[str, int]]:
    """The kernel that a line of kernel_sweep tells of, and its configuration."""
    match strips:
        case -1:
            return "decode", {"parts": tiles, "cluster": cluster}
        case -2:
            return "tiled", {"tokens": 8 * tiles, "splits": warps}
        case -4:
            return "resident", {"cluster": cluster, "parts": tiles, "strips": warps}
        case -3:
            return "mma", {"tokens": 8 * tiles, "splits": warps}
        case 0:
            return "warpgroup", {"tokens": 8 * tiles, "warpgroups": warps, "cluster": cluster}
    return "stream", {"strips": strips, "tiles": tiles, "warps": warps, "cluster": cluster, "ctas": ctas}


def line_of(kernel: str, numbers: Sequence[int]) -> tuple[int, ...]:
    """The other way round, of the kernels whose configuration follows from a model of costs."""
    match kernel:
        case "tiled":
            tokens, splits = numbers
            return -2, tokens // 8, splits, 2, 1
        case "resident":
            cluster, parts, strips = numbers
            return -4, parts, strips, cluster, 1
        case "decode":
            parts, cluster = numbers
            return -1, parts, 0, cluster, 1
    tokens, warpgroups, cluster, *teams = numbers
    return 0, tokens // 8, warpgroups, cluster, *(teams or (1,))


def random_product(draw: random.Random, few: bool = False) -> tuple[dict, int, int, int]:
    """A scheme, and K, N and M: every other product of the dimensions of models, all with tokens in any number, or a
    few of them.
    """
    schemes = FEW_SCHEMES if few else SCHEMES
    scheme = dict(zip(SCHEME, draw.choices(list(schemes), list(schemes.values()))[0], strict=True))
    low, high = FEW_TOKENS if few else TOKENS
    m = round(low * (high / low) ** draw.random())
    if draw.random() < 0.5:
        k, n = map(int, draw.choice(f"{SHAPES},{OTHERS}".split(",")).split("x"))
        return scheme, k, n, m
    k = draw.choice([k for k in INPUTS if scheme["group_size"] == 0 or k % scheme["group_size"] == 0])
    return scheme, k, round(k * 2 ** draw.uniform(-1.5, 2.5) / 64) * 64, m


def chosen(product: _cuda_dispatch.Product, *, two: bool = True, evenly: bool = True) -> list[tuple[str, tuple]]:
    """The kernel of a product of many tokens with its configuration, or, if there are `two`, these with the outputs of
    the first before them. evenly: whether CTAs may share stages out so.
    """
    costs = _cuda_dispatch._WARPGROUPS
    _cuda_dispatch._parts_on.cache_clear()
    try:
        if not evenly:
            _cuda_dispatch._WARPGROUPS = costs._replace(even_tiles=0)
        if two and (parts := _cuda_dispatch._parts(product)):
            return [("parts", (parts.outputs,)), *map(without_ctas, parts[:2])]
        times = [(("matmul_warpgroup", config), us) for config, us in _cuda_dispatch._warpgroup_times(product)]
        if _cuda_dispatch.tiled_kernel(product) and product.m >= _cuda_dispatch._least_tiled_tokens(product):
            times += [(("matmul_tiled", config), us) for config, us in _cuda_dispatch._tiled_times(product)]
        return [without_ctas(min(times, key=lambda pair: pair[1])[0])]
    finally:
        _cuda_dispatch._WARPGROUPS = costs


def is_even(kernel: tuple[str, tuple]) -> bool:
    name, config = kernel
    return name == "matmul_warpgroup" and config[2] == _cuda_costs.EVENLY


def record_other(program: Path, output: Path, commit: str | None, count: int, seed: int, kind: str) -> None:
    """Measures random products for which one of the other ways of `kind` is chosen, "parts" or "even": by that, and by
    what is chosen without it.
    """
    draw, rows, gains = random.Random(seed), defaultdict(list), []
    process = subprocess.Popen([program, "race"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    for _ in progress(range(count), label="products"):
        while True:
            scheme, k, n, m = random_product(draw)
            if m <= _cuda_dispatch.STREAM_TOKENS:
                continue
            dtype, mode = jnp.dtype(DTYPES[scheme["dtype"]]), MODES.get(scheme["mode"], ShiftMode.ZEROS)
            shift = None if mode == ShiftMode.NONE else dtype
            shift = jnp.dtype("uint8") if scheme["mode"] == "integer_zeros" else shift
            groups = k // (scheme["group_size"] or k)
            product = _cuda_dispatch.Product(m, k, n, 1, scheme["bits"], dtype, dtype, mode, shift, groups=groups)
            kernels = chosen(product)
            if kernels[0][0] == "parts" if kind == "parts" else any(map(is_even, kernels)):
                break
        both = (chosen(product, two=kind != "parts", evenly=kind != "even"), kernels)
        words = [scheme["bits"], scheme["group_size"], scheme["dtype"], k, n, m, scheme["mode"]]
        for name, config in itertools.chain(*both):
            short = name.removeprefix("matmul_")
            words += (OF_TWO, *config, 0, 0, 0) if short == "parts" else line_of(short, config)
        print(*words, file=process.stdin, flush=True)
        us = []
        while line := process.stdout.readline().strip():
            us.append(float(line.split()[-2]))
        if process.poll() or len(us) != 2:
            sys.exit("kernel_sweep failed")
        for (first, *others), took in zip(both, us, strict=True):
            config = [*first[1], *itertools.chain(*others)]
            rows[tuple(scheme.values())].append([k, n, m, first[0].removeprefix("matmul_"), config, took])
        gains.append(us[0] / us[1])
    process.stdin.close()
    of = {key: dict(zip(SCHEME, key, strict=True)) for key in sorted(rows)}
    write(output, commit, [of[key] | {"columns": COLUMNS, "rows": rows[key]} for key in of])
    print(f"written to {output}")
    mean = math.exp(sum(map(math.log, gains)) / len(gains))
    print(
        f"{count} products: {kind} {mean:.4f} times as fast as without on average, {max(gains):.3f} at best, "
        f"{min(gains):.3f} at worst, {sum(gain < 0.99 for gain in gains)} below 0.99"
    )


def without_ctas(kernel: tuple[str, tuple]) -> tuple[str, tuple]:
    """Of matmul_tiled all but the CTAs of a cluster, of which products have as many as there are."""
    name, config = kernel
    return name, config[:2] if name == "matmul_tiled" else config


def with_few_tokens(expected: list[tuple[tuple, float]], n: int, m: int) -> list[tuple]:
    """What is tried of a product of few tokens, of configurations from the fastest to the slowest expected one."""
    resident = [config for config, _ in expected if config[0] == "resident"]
    if not resident:
        return []
    others = [config for config, _ in expected if config[0] == "warpgroup"][:FEW_OTHERS]
    strips = -(-n // 16)
    decode = [("decode", min(strips, fit_costs.MULTIPROCESSORS // cluster), cluster) for cluster in (1, 2)]
    return resident + others + decode * (m <= _cuda_dispatch._DECODE.tokens)


def record_random(program: Path, output: Path, commit: str | None, count: int, seed: int, few: bool) -> None:
    """Measures what may be the fastest of the configurations of products drawn at random."""
    draw, file = random.Random(seed), _cuda_costs.read(90)
    products: list[tuple[dict, int, int, int, list]] = []
    while len(products) < count:
        scheme, k, n, m = random_product(draw, few)
        expected = sorted(fit_costs.expected(scheme, k, n, m)(file), key=lambda pair: pair[1])
        if few:
            tried = with_few_tokens(expected, n, m)
        else:
            tried = [config for config, us in expected if us < PLAUSIBLE * expected[0][1]][:MOST_TRIED]
        if len(tried) > 1:
            products.append((scheme, k, n, m, tried))
    process = subprocess.Popen([program, "race"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    rows: dict[tuple, list] = defaultdict(list)
    sweeps: list[dict] = []
    for number, (scheme, k, n, m, tried) in enumerate(progress(products, label="products")):
        lines = (" ".join(map(str, line_of(kernel, numbers))) for kernel, *numbers in tried)
        words = (scheme["bits"], scheme["group_size"], scheme["dtype"], k, n, m, scheme["mode"], *lines)
        print(*words, file=process.stdin, flush=True)
        by_line = {line_of(kernel, numbers): (kernel, numbers) for kernel, *numbers in tried}
        while line := process.stdout.readline().strip():
            *numbers, us, _ = line.split()
            kernel, config = by_line[tuple(map(int, numbers[3:]))]
            rows[tuple(scheme.values())].append([k, n, m, kernel, list(config), float(us)])
        if process.poll():
            sys.exit("kernel_sweep failed")
        if number % 20 == 19 or number == count - 1:
            of = {key: dict(zip(SCHEME, key, strict=True)) for key in sorted(rows)}
            sweeps = [of[key] | {"columns": COLUMNS, "rows": rows[key]} for key in of]
            write(output, commit, sweeps)
    process.stdin.close()
    print(f"written to {output}")
    fit_costs.show(file, list(fit_costs.products({"sweeps": sweeps})))


def write(output: Path, commit: str | None, sweeps: list[dict]) -> None:
    query = command("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    device, driver = query.split("\n")[0].split(", ")
    head = json.dumps({"device": device, "driver": driver, "commit": revision(commit)})[1:-1]
    lines = ",\n".join(json.dumps(sweep).replace("], [", "],\n [") for sweep in sweeps)
    output.write_text(f'{{{head}, "sweeps": [\n{lines}\n]}}\n')


def timed(
    program: Path, bits: int, group_size: int, dtype: str, mode: str, m: str, shapes: str, models: bool = False
) -> list[dict]:
    words = ["time", str(bits), str(group_size), dtype, m, shapes, mode, *["models"] * models]
    output = subprocess.run([program, *words], capture_output=True, text=True, check=True).stdout
    rows = []
    for line in output.splitlines():
        k, n, m_, *config, us, gbps = line.split()
        kernel, names = config_of(*map(int, config))
        of = {"k": int(k), "n": int(n), "m": int(m_), "kernel": kernel, "config": names}
        rows.append(of | {"us": float(us), "gbps": int(gbps)})
    return rows


def record(program: Path, output: Path, commit: str | None) -> None:
    """Measures ``SWEEPS``, those of the kernels that the program's architecture has."""
    sweeps = []
    for bits, group_size, dtype, mode, m, shapes in progress(SWEEPS, label="sweeps"):
        rows = timed(program, bits, group_size, dtype, mode, m, shapes, models=True)
        table = [[list(row[c].values()) if c == "config" else row[c] for c in COLUMNS] for row in rows]
        of = dict(zip(SCHEME, (bits, group_size, dtype, mode), strict=True))
        sweeps.append(of | {"columns": COLUMNS, "rows": table})
        write(output, commit, sweeps)
    print(f"written to {output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="store_true", help="only build, and print where the program is")
    parser.add_argument("--program", default="kernel_sweep", choices=PROGRAMS, help="to build")
    parser.add_argument("--define", nargs="*", default=[], metavar="NAME", help="preprocessor symbols to define")
    parser.add_argument("--check", action="store_true", help="check instead of time")
    parser.add_argument("--every", type=int, default=1, help="check one case in this many (default: %(default)s)")
    parser.add_argument("--bits", type=int, default=4, choices=(4, 8))
    parser.add_argument("--group-size", type=int, default=128, help="0: one scale per output")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "f16", "f32"))
    parser.add_argument(
        "--mode", default="symmetric", choices=("symmetric", "integer_zeros", "float_zeros", "offsets", "table")
    )
    parser.add_argument("--m", default="1,8,16,32,64,128")
    parser.add_argument("--shapes", default=SHAPES, help="K x N (default: %(default)s)")
    parser.add_argument("--record", nargs="?", type=Path, const=RECORD, metavar="FILE", help="(default: %(const)s)")
    parser.add_argument("--random", type=int, metavar="COUNT", help="products drawn at random, beside one another")
    parser.add_argument("--few", type=int, metavar="COUNT", help="the same of few tokens")
    parser.add_argument("--parts", type=int, metavar="COUNT", help="the same that two kernels are chosen for")
    parser.add_argument("--even", type=int, metavar="COUNT", help="the same whose stages CTAs share out evenly")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument(
        "--output",
        type=Path,
        help="of random ones (default: h100-tune-random.json, -few.json, -parts.json or -even.json of the results)",
    )
    parser.add_argument("--executable", type=Path, help="kernel_sweep, built before")
    parser.add_argument("--commit", help="of this tree, where git cannot tell")
    parser.add_argument("--top", type=int, default=4, help="configurations to show of each product")
    args = parser.parse_args()
    program = args.executable or build(tuple(args.define), args.program)
    if args.build:
        print(program)
        return
    if args.check:
        sys.exit(subprocess.run([program, "check", str(args.every)], check=False).returncode)
    if count := args.random or args.few:
        output = args.output or fit_costs.RANDOM_RECORD.with_name(f"h100-tune-{'few' if args.few else 'random'}.json")
        record_random(program, output, args.commit, count, args.seed, args.few is not None)
        return
    for kind, count in (("parts", args.parts), ("even", args.even)):
        if count:
            output = args.output or fit_costs.RANDOM_RECORD.with_name(f"h100-tune-{kind}.json")
            record_other(program, output, args.commit, count, args.seed, kind)
            return
    if args.record:
        record(program, args.record, args.commit)
        return
    products: dict[tuple, list] = defaultdict(list)
    for row in timed(program, args.bits, args.group_size, args.dtype, args.mode, args.m, args.shapes):
        products[row["k"], row["n"], row["m"]].append(row)
    for (k, n, m), rows in products.items():
        for row in sorted(rows, key=lambda row: row["us"])[: args.top]:
            config = ", ".join(f"{value} {name}" for name, value in row["config"].items())
            print(f"{k:6} x {n:6} M {m:4} {row['us']:8.2f} us {row['gbps']:5} GB/s  {row['kernel']}: {config}")


if __name__ == "__main__":
    main()
