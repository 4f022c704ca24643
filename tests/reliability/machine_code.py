"""Kernels whose machine code lets the lanes of a warp part and not meet again.

Where one lane, or some, arrive at a barrier or store behind a branch, what follows may write to registers that the
whole warp has once, such as the address that those lanes still need. ptxas 13.0 leaves out the instruction at which the
others would wait for them in some kernels (docs/performance.md, log 173); PTX does not show it.
"""

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from reliability.record import measured, save

_MOST_APART = 4  # instructions of a branch that is searched
_MEETS = ("BSYNC", "WARPSYNC")
_ACTS = ("SYNCS", "STG")  # on barriers of shared memory, and global memory
_FUNCTION = re.compile(r"\s*Function : (\S+)")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_BRANCH_OF_SOME = re.compile(r"@!?P\d BRA (0x[0-9a-f]+)")


def kernels(lines: Iterable[str]) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Names and instructions, with their addresses, of what ``cuobjdump -sass`` prints."""
    name, code = "", []
    for line in lines:
        if found := _FUNCTION.match(line):
            if name:
                yield name, code
            name, code = found[1], []
        elif found := _INSTRUCTION.match(line):
            code.append((int(found[1], 16), found[2]))
    if name:
        yield name, code


def partings(code: list[tuple[int, str]]) -> list[int]:
    """Addresses of branches from which some lanes go around a few instructions that act on memory, to a place where
    nobody waits for the others."""
    places = {address: i for i, (address, _) in enumerate(code)}
    found = []
    for i, (address, text) in enumerate(code):
        branch = _BRANCH_OF_SOME.fullmatch(text)
        if not branch or (meeting := places.get(int(branch[1], 16))) is None:
            continue
        apart = []
        for _, other in code[i + 1 : i + 2 + _MOST_APART]:
            if "BRA" in other or "EXIT" in other:
                acts = any(word in a for a in apart for word in _ACTS)
                if other == f"BRA {branch[1]}" and acts and not code[meeting][1].startswith(_MEETS):
                    found.append(address)
                break
            apart.append(other)
    return found


def check(module: Path, cuobjdump: str) -> dict[str, Any]:
    with subprocess.Popen([cuobjdump, "-sass", module], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        cases = failures = 0
        for name, code in kernels(process.stdout):
            cases += 1
            if places := partings(code):
                failures += 1
                print(name, *map(hex, places))
    if process.returncode or not cases:
        raise SystemExit(f"{cuobjdump} -sass {module} failed, or found no kernels")
    return {"what": "kernels in which lanes part and do not meet again", "cases": cases, "failures": failures}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="machine-code", description=__doc__)
    parser.add_argument("--module", type=Path, help="a built CUDA module (default: that of the package here)")
    parser.add_argument("--cuobjdump", default="cuobjdump", help="the program of the CUDA toolkit")
    args = parser.parse_args(words)
    if not shutil.which(args.cuobjdump):
        sys.exit(f"machine-code: {args.cuobjdump} not found; it is a part of the CUDA toolkit (--cuobjdump PATH)")
    module = args.module
    if module is None:
        spec = importlib.util.find_spec("jax_wonly._cuda")
        if spec is None or spec.origin is None:
            sys.exit("machine-code: this build of jax_wonly has no CUDA kernels (--module PATH)")
        module = Path(spec.origin)
    return save("reliability-machine-code.json", [measured("convergence", check, module, args.cuobjdump)])
