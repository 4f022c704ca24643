"""Decoding and prefill at the size of Llama-3-8B with random weights: bf16, int8 and int4 in one process.

    python benchmarks/decode.py [--weights int4 int8 bf16] [--batch 1 8 32 64] [--append] [--output FILE]
    python benchmarks/decode.py --profile [--weights int4] [--batch 1]

The model and its decode loop are those of examples/llm: one program generates all tokens. A step attends to the 449 to
512 tokens that a cache of 512 then holds. Weights are made on the device layer by layer, and those of one kind are
freed before the next are made. Times are of the host, from the call to the last token, the median of several calls.
``peak_bytes`` is what a run needs: weights, cache, results and XLA's temporary memory; ``allocator_peak_bytes`` what
the device's allocator has seen since the process began, making the weights included, and null where an earlier case had
more. ``--profile`` writes the kernels of a decode step instead, by CUPTI.
"""

import argparse
import collections
import dataclasses
import functools
import gc
import re
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import jax_wonly as jw
import jax_wonly.nnx
from jax_wonly._timing import short_name
from jax_wonly.progress import progress

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples" / "llm"), str(ROOT / "benchmarks")]
from _common import kept_rows, require_gpu, save  # noqa: E402

import llama  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
BITS = {"int4": 4, "int8": 8, "bf16": None}  # in the order of their memory, for the allocator's peak
SMALL = llama.Config(512, 256, 512, 2, 4, 2)


@dataclasses.dataclass(frozen=True)
class Sizes:
    config: llama.Config
    context: int  # tokens of the cache
    steps: int  # tokens generated in one call
    prompt: int  # tokens of prefill


class Case:
    """One compiled program and its operands, ready to be called again and again."""

    def __init__(self, phase: str, batch: int, sizes: Sizes, graph, state):
        self.state, self.phase, self.batch = state, phase, batch
        self.tokens = sizes.steps if phase == "decode" else sizes.prompt
        capacity = sizes.context if phase == "decode" else sizes.prompt
        self.cache = llama.empty_cache(sizes.config, batch, capacity, jnp.bfloat16)
        key = jax.random.key(batch)
        if phase == "decode":
            token = jax.random.randint(key, (batch,), 0, sizes.config.vocab_size)
            self.operands = token, jnp.int32(sizes.context - sizes.steps), key
            function = functools.partial(llama.decode.lower, steps=sizes.steps)
        else:
            ids = jax.random.randint(key, (batch, sizes.prompt), 0, sizes.config.vocab_size)
            self.operands = ids, jnp.int32(sizes.prompt), key
            function = llama.prefill.lower
        start = time.perf_counter()
        self.compiled = function(graph, state, self.cache, *self.operands).compile()
        self.compile_seconds = time.perf_counter() - start
        self.run()

    def run(self) -> float:
        """Returns the seconds of one call."""
        start = time.perf_counter()
        *tokens, self.cache = self.compiled(self.state, self.cache, *self.operands)
        jax.block_until_ready(tokens)
        return time.perf_counter() - start

    def peak_bytes(self) -> int:
        analysis = self.compiled.memory_analysis()
        results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        return analysis.argument_size_in_bytes + results + analysis.temp_size_in_bytes


def build(config: llama.Config, bits: int | None, group_size: int, prompt: str, step: str) -> llama.Llama:
    """Returns a model with random weights, never more than one dense layer of it in memory beside quantized ones."""
    rngs = nnx.Rngs(0)
    options = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": rngs}
    options |= {"attention": prompt, "fused_decode": step == "fused"}
    model = llama.Llama(dataclasses.replace(config, num_hidden_layers=0), **options)
    model.config = config

    def quantize(module: nnx.Module) -> None:
        if bits:
            report = jw.nnx.quantize(module, bits, group_size, measure_error=False)
            if any(layer.type == "Linear" for layer in report.skipped):
                raise ValueError(f"not every layer can be quantized:\n{report}")

    quantize(model)
    for _ in progress(range(config.num_hidden_layers), "make weights", unit="layers"):
        block = llama.Block(config, **options)
        quantize(block)
        model.blocks.append(block)
        jax.block_until_ready(nnx.state(block))  # the host would run ahead, and many dense layers be alive at once
    return model


def prompt_attention(chosen: str) -> str:
    """cuDNN's fused attention for prompts where it works; a program that it cannot compile shows it."""
    if chosen != "auto":
        return chosen
    if jax.default_backend() != "gpu":
        return "xla"
    q, k = jnp.zeros((1, 64, 8, 128), jnp.bfloat16), jnp.zeros((1, 64, 2, 128), jnp.bfloat16)
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    try:
        jax.block_until_ready(jax.jit(attend)(q, k, k))
    except Exception as error:  # whatever stands in cuDNN's way, XLA's own attention is there
        print(f"prefill without cuDNN's attention: {str(error).splitlines()[0]}", file=sys.stderr)
        return "xla"
    return "cudnn"


def step_attention(chosen: str, sizes: Sizes) -> str:
    """The fused kernel for single tokens, where it gives the logits that XLA's operations give."""
    if chosen != "auto":
        return chosen
    if jax.default_backend() != "gpu":
        return "xla"
    config = dataclasses.replace(sizes.config, vocab_size=64, num_hidden_layers=1)
    ids, logits = jnp.ones((2, 1), jnp.int32), []
    try:
        for fused in (False, True):
            types = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
            graph, state = nnx.split(llama.Llama(config, fused_decode=fused, rngs=nnx.Rngs(0), **types))
            shape = (2, config.num_key_value_heads, sizes.context, config.head_size)
            cache = [tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(1)))]
            step = jax.jit(lambda graph, state, cache, at: nnx.merge(graph, state)(ids, cache, at), static_argnums=0)
            logits.append(step(graph, state, cache, jnp.int32(sizes.context - 3))[0])
        error = float(jnp.linalg.norm(logits[1] - logits[0]) / jnp.linalg.norm(logits[0]))
        if not error < 0.02:
            raise ValueError(f"its logits differ by {error:.3g}")
    except Exception as error:  # as above
        print(f"decoding without the fused attention: {str(error).splitlines()[0]}", file=sys.stderr)
        return "xla"
    return "fused"


def allocator_peak() -> int:
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def measure(case: Case, context: int, rounds: int, peak_before: int) -> dict:
    seconds = statistics.median(case.run() for _ in range(rounds))
    peak = allocator_peak()
    return {
        "phase": case.phase,
        "batch": case.batch,
        "context": context,
        "tokens_per_s": round(case.batch * case.tokens / seconds, 1),
        "ms": round(1e3 * seconds / (case.tokens if case.phase == "decode" else 1), 4),  # of a step, or of the prompt
        "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(case.state)),
        "peak_bytes": case.peak_bytes(),
        "allocator_peak_bytes": peak if peak > peak_before else None,
        "compile_s": round(case.compile_seconds, 1),
    }


def kernels(case: Case) -> list[dict]:
    """Returns the kernels of a decode step: launches and microseconds of each, and what the step takes beside them."""
    from jax._src.lib import mosaic_gpu as mosaic_gpu_lib

    wall = 1e6 * statistics.median(case.run() for _ in range(3)) / case.tokens
    cupti = mosaic_gpu_lib._mosaic_gpu_ext
    cupti._cupti_init()
    try:
        case.run()
    finally:
        timings = cupti._cupti_get_timings(True)
    found: dict[str, list[float]] = collections.defaultdict(list)
    for name, milliseconds in timings:
        # The same operation of another layer has another number.
        found[re.sub(r"(_\d+)+$", "", short_name(name))].append(1e3 * milliseconds)
    rows = [
        {
            "kernel": name,
            "launches": round(len(times) / case.tokens, 2),
            "us": round(sum(times) / case.tokens, 2),
            "us_each": round(statistics.mean(times), 2),
        }
        for name, times in sorted(found.items(), key=lambda item: -sum(item[1]))
    ]
    between = wall - sum(row["us"] for row in rows)
    launches = round(sum(row["launches"] for row in rows), 2)
    return [*rows, {"kernel": "(between kernels)", "launches": launches, "us": round(between, 2), "us_each": None}]


def compare(rows: list[dict]) -> None:
    """Adds to each row how it stands to the same case with bf16 weights."""
    dense = {(row["phase"], row["batch"], row["context"]): row for row in rows if row["weights"] == "bf16"}
    for row in rows:
        other = dense.get((row["phase"], row["batch"], row["context"]))
        row["speedup"] = other and round(row["tokens_per_s"] / other["tokens_per_s"], 3)
        row["peak_ratio"] = other and round(row["peak_bytes"] / other["peak_bytes"], 4)


def show(rows: list[dict]) -> None:
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


def order(row: dict) -> tuple:
    return row["phase"], row["batch"], list(BITS).index(row["weights"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", choices=BITS, default=list(BITS), help="kinds (default: all)")
    parser.add_argument("--batch", nargs="+", type=int, help="texts decoded at once (default: 1 8 32 64)")
    parser.add_argument("--phase", nargs="+", choices=("decode", "prefill"), default=["decode", "prefill"])
    parser.add_argument("--group-size", type=int, default=128, help="inputs that share a scale (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="timed calls of each program (default: %(default)s)")
    parser.add_argument("--prompt-attention", choices=("auto", "xla", "cudnn"), default="auto", help="in prefill")
    parser.add_argument("--step-attention", choices=("auto", "xla", "fused"), default="auto", help="in decoding")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a decode step instead")
    parser.add_argument("--small", action="store_true", help="a tiny model, which any CPU runs")
    parser.add_argument("--output", type=Path, help="result file (default: in benchmarks/results)")
    parser.add_argument("--append", action="store_true", help="keep the file's rows that are not measured again")
    parser.add_argument("--commit", help="of this tree, where git cannot tell")
    args = parser.parse_args(arguments)
    if min([args.rounds, *(args.batch or ())]) < 1:
        parser.error("--rounds and --batch must be 1 or more")
    device = jax.devices()[0]
    if not args.small:
        require_gpu("decode.py", " or --small")
    if device.platform != "gpu" and args.profile:
        sys.exit(f"--profile needs an NVIDIA GPU; JAX has {device.platform}")
    sizes = Sizes(SMALL, 64, 8, 32) if args.small else Sizes(llama.LLAMA_3_8B, 512, 64, 2048)
    output = args.output
    if output is None:
        # A tiny model's figures say nothing.
        folder = ROOT / "build" if args.small else RESULTS
        output = folder / ("h100-decode-profile.json" if args.profile else "h100-decode.json")
    cases = [("decode", batch) for batch in args.batch or (1, 8, 32, 64)]
    if not args.profile:
        cases = [case for case in [*cases, ("prefill", 1)] if case[0] in args.phase]
    attention = prompt_attention(args.prompt_attention), step_attention(args.step_attention, sizes)

    identity = ("weights", "phase", "batch", "context", "kernel" if args.profile else "group_size")
    rows = kept_rows(output, args.append, identity)
    for weights in [name for name in BITS if name in args.weights]:
        peak = 0 if weights == "int4" else allocator_peak()
        model = build(sizes.config, BITS[weights], args.group_size, *attention)
        graph, state = nnx.split(model)
        del model
        for phase, batch in progress(cases, f"{weights}", unit="programs"):
            case = Case(phase, batch, sizes, graph, state)
            context = sizes.context if phase == "decode" else sizes.prompt
            about = {"weights": weights, "group_size": args.group_size if BITS[weights] else None}
            if args.profile:
                new = [about | {"phase": phase, "batch": batch, "context": context} | row for row in kernels(case)]
            else:
                new = [about | measure(case, context, args.rounds, peak)]
            peak = allocator_peak()
            del case
            for row in new:
                rows[tuple(row[name] for name in identity)] = row
            if not args.profile:
                compare(list(rows.values()))
            found = {"prompt attention": attention[0], "step attention": attention[1]}
            save(output, sorted(rows.values(), key=order), args.commit, **found)
        del state
        gc.collect()
    show(list(rows.values()))
    print(f"written to {output}")


if __name__ == "__main__":
    main()
