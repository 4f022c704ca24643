"""Tests every compiled kernel on this machine against float64 and integer references.

Each custom call that is registered here runs on each platform that is present, and on CPUs with each instruction set
that the machine has. Exit status 1 if anything is wrong, or a platform is present without its kernels.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from jax_wonly import _abi, _ffi, _selftest
from jax_wonly._selftest import Outcome
from jax_wonly.cli._common import coloured, decorated, print_table, write_json
from jax_wonly.progress import progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of the random operands (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON (-: print it)")


def _devices() -> dict[str, list]:
    """The devices of each platform, by the name of its kernels."""
    found: dict[str, list] = {}
    for device in jax.devices():
        found.setdefault("cuda" if device.platform == "gpu" else device.platform, []).append(device)
    if "cpu" not in found:
        try:
            found["cpu"] = jax.devices("cpu")
        except RuntimeError:  # JAX_PLATFORMS leaves it out
            pass
    return found


def run(args: argparse.Namespace) -> int:
    begin = time.perf_counter()
    outcomes: list[Outcome] = []
    problems: list[str] = []
    skipped: list[str] = []
    reasons = _ffi.ensure_registered()
    devices = _devices()
    work: list[tuple[str, str, Any, list]] = []
    for platform, found in devices.items():
        if len(found) > 1:
            skipped.append(f"{len(found) - 1} further {platform} devices: they run the same code as the first")
        work.append((platform, "", found[0], []))
        if platform not in _ffi.PLATFORMS:
            skipped.append(f"kernels on {platform}: there are none for it")
            continue
        if (reason := reasons[platform]) is not None:
            problems.append(f"{platform} is here and has no kernels: {reason}")
            continue
        targets = _selftest.registered(platform)
        absent = [target for target in _abi.TARGETS if target not in targets]
        if absent:
            skipped.append(f"{', '.join(absent)} on {platform}: not among its kernels, XLA's operations instead")
        for target in targets:
            if target not in _selftest.CASES:
                problems.append(f"{target} is registered on {platform}, and nothing tests it")
            elif target == _selftest.CONVERSIONS and reasons["cpu"] is not None:
                skipped.append(f"{target}: its table is in the CPU module, which is not there")
            else:
                work.append((platform, target, found[0], _variants(platform)))
    for platform in _ffi.PLATFORMS:
        if platform not in devices:
            why = "is not among JAX_PLATFORMS" if platform == "cpu" else "JAX has no such device here"
            skipped.append(f"kernels on {platform}: {why}")

    show = args.json != "-" and decorated(sys.stderr)
    with _selftest.compilers() as pool:
        prepared = [
            _selftest.prepare(target, platform, device, args.seed, pool) if target else None
            for platform, target, device, _ in work
        ]
        steps = list(zip(prepared, work, strict=True))
        for cases, (platform, _, device, variants) in progress(steps, "doctor", unit="calls") if show else steps:
            try:
                if cases is not None:
                    outcomes += _selftest.run_cases(cases, variants)
                else:
                    outcomes.append(_selftest.run_xla(platform, device, args.seed))
            finally:
                if platform == "cpu" and variants:
                    importlib.import_module("jax_wonly._cpu").force_isa("")

    seconds = time.perf_counter() - begin
    problems += [f"{o.target} on {o.platform} {o.variant}: {failure}" for o in outcomes for failure in o.failures]
    if args.json:
        write_json(
            args.json,
            {
                "ok": not problems,
                "seconds": round(seconds, 2),
                "results": [vars(outcome) | {"ok": outcome.ok} for outcome in outcomes],
                "problems": problems,
                "skipped": skipped,
            },
        )
    if args.json != "-":
        _print(outcomes, problems, skipped, seconds)
    return int(bool(problems))


def _variants(platform: str) -> list[tuple[str, Callable[[], Any]]]:
    """Instruction sets of a CPU, each with what switches to it."""
    if platform != "cpu":
        return [("", lambda: None)]
    module = importlib.import_module("jax_wonly._cpu")
    return [(name, lambda name=name: module.force_isa(name)) for name in module.isas()]


def _print(outcomes: list[Outcome], problems: list[str], skipped: list[str], seconds: float) -> None:
    rows, colours = [], []
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.platform, outcome.target), []).append(outcome)
    for (platform, target), group in groups.items():
        worst = max(o.worst for o in group)
        error = "exact" if worst == 0 else f"{worst:.2f}" if worst <= 1 else "too large"
        failed = [o.variant or "all" for o in group if not o.ok]
        result = f"FAILED ({', '.join(failed)})" if failed else "ok"
        kernels = ", ".join(o.variant for o in group if o.variant) or "-"
        rows.append((platform, target, str(sum(o.cases for o in group)), error, result, kernels))
        colours.append("red" if failed else "")
    print_table(("platform", "custom call", "cases", "error/bound", "result", "kernels"), rows, colours)
    for line in skipped:
        print(f"skipped: {line}")
    for line in problems:
        print(coloured(f"problem: {line}", "red"))
    cases = sum(o.cases for o in outcomes)
    verdict = coloured("all is well", "green") if not problems else coloured(f"{len(problems)} problems", "red")
    print(f"{verdict}: {cases} cases in {seconds:.1f} s")
