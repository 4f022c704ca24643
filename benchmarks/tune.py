"""Builds kernel_sweep.cu with nvcc, checks every kernel configuration, and times those that could be the best.

    python benchmarks/tune.py [--bits 4] [--group-size 128] [--mode symmetric] [--dtype bf16] [--m 1,8,16,64]
        [--shapes 8192x8192,...]
    python benchmarks/tune.py --check [--every 1]

Prints the fastest configurations of each product. The numbers in ffi/cuda/matmul.cu are read off this table.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "kernel_sweep"
SHAPES = "8192x28672,8192x8192,4096x14336,14336x4096,4096x4096,2048x8192,3584x18944,7168x2048"


# Programs in C++, and the kernels that each of them launches. The sweep's ragged ones are launched by others of it.
PROGRAMS = {
    "kernel_sweep": ("benchmarks", ("matmul_[!t]*.cu", "matmul_tiled*.cu", "ragged_stream_*.cu", "tensor_map.cu")),
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
    flags = ["-std=c++17", "-O3", f"-I{ROOT / 'ffi'}", "--expt-relaxed-constexpr", "-lineinfo"]
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
    parser.add_argument("--top", type=int, default=4, help="configurations to show of each product")
    args = parser.parse_args()
    program = build(tuple(args.define), args.program)
    if args.build:
        print(program)
        return
    if args.check:
        sys.exit(subprocess.run([program, "check", str(args.every)], check=False).returncode)
    words = ["time", str(args.bits), str(args.group_size), args.dtype, args.m, args.shapes, args.mode]
    output = subprocess.run([program, *words], capture_output=True, text=True, check=True).stdout
    products: dict[tuple, list] = defaultdict(list)
    for line in output.splitlines():
        k, n, m, *config, us, gbps = line.split()
        products[int(k), int(n), int(m)].append((float(us), gbps, config))
    for (k, n, m), rows in products.items():
        for us, gbps, (strips, tiles, warps, cluster, ctas) in sorted(rows)[: args.top]:
            if strips == "-1":
                name = f"decode: {tiles} parts, cluster {cluster}"
            elif strips == "-2":
                name = f"tiled: {8 * int(tiles)} tokens, {warps} splits"
            elif strips == "-3":
                name = f"mma: {8 * int(tiles)} tokens, {warps} splits"
            elif strips == "0":
                name = f"warpgroup: {8 * int(tiles)} tokens, {warps} warpgroups, cluster {cluster}"
            else:
                name = (
                    f"stream: {strips} strips, {tiles} token tiles, {warps} warps, cluster {cluster}, {ctas} CTAs a SM"
                )
            print(f"{k:6} x {n:6} M {m:4} {us:8.2f} us {gbps:>5} GB/s  {name}")


if __name__ == "__main__":
    main()
