"""Perplexity of the small language model on held-out text, dense and quantized.

    python examples/llm/perplexity.py [--tokens 65536] [--output benchmarks/results/llm-perplexity.json]

The text is what ``corpus.py`` holds out of the Python and the packages that are installed here. Every model reads the
same windows; ``kl`` is the mean Kullback-Leibler divergence of the next token's distribution from the dense model's, in
nats, ``agreement`` how often both find the same token likeliest. Also draws a plot, as SVG.
"""

import argparse
import dataclasses
import functools
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import corpus
import jax_wonly as jw
import jax_wonly.nnx
import llama
from generate import CHECKPOINT
from jax_wonly._svg import Series, line_chart
from jax_wonly.progress import progress

ROOT = Path(__file__).parents[2]
SCHEMES = [(8, 128, "symmetric")] + [(4, g, mode) for mode in ("symmetric", "integer_zeros") for g in (32, 64, 128)]


@dataclasses.dataclass
class Variant:
    """One way of keeping the weights, and what was measured of it."""

    weights: str
    bits: int
    group_size: int | None
    mode: str | None
    bits_per_weight: float
    linear_bytes: int
    graph: nnx.GraphDef
    state: nnx.State
    sums: np.ndarray


@functools.partial(jax.jit, static_argnames="graph")
def measure(graph, state, batch: jax.Array, dense: jax.Array | None):
    """Returns logits, and the sums over ``batch [batch, length + 1]`` of loss, divergence and agreement."""
    logits, _ = nnx.merge(graph, state)(batch[:, :-1])
    logs = jax.nn.log_softmax(logits)
    reference = logs if dense is None else jax.nn.log_softmax(dense)
    loss = -jnp.take_along_axis(logs, batch[:, 1:, None], axis=-1).sum()
    divergence = (jnp.exp(reference) * (reference - logs)).sum()
    agreement = (reference.argmax(-1) == logs.argmax(-1)).sum()
    return logits, jnp.stack([loss, divergence, agreement.astype(jnp.float32)])


def variants(model: llama.Llama, quiet: bool) -> list[Variant]:
    linear = sum(layer.kernel[...].size for _, layer in nnx.iter_modules(model) if isinstance(layer, nnx.Linear))
    # The checkpoint's values are bfloat16, whatever type this machine computes in.
    found = [Variant("bfloat16", 16, None, None, 16.0, 2 * linear, *nnx.split(model), np.zeros(3))]
    for bits, group_size, mode in SCHEMES if quiet else progress(SCHEMES, "quantize", unit="models"):
        copy = nnx.clone(model)
        report = jw.nnx.quantize(copy, bits, group_size, mode=mode, scale_dtype=jnp.bfloat16)
        if any(layer.type == "Linear" for layer in report.skipped):
            raise ValueError(f"not every layer can be quantized:\n{report}")
        size = report.bytes_after
        found.append(
            Variant(f"int{bits}", bits, group_size, mode, 8 * size / linear, size, *nnx.split(copy), np.zeros(3))
        )
    return found


def windows(folder: Path, config: llama.Config, tokens: int, batch: int) -> np.ndarray:
    """Returns held-out tokens, int32 ``[batches, batch, length + 1]``, from windows spread over all of the text.

    Raises:
      FileNotFoundError, ModuleNotFoundError: the tokenizer, or a package that the text is of, is not there.
      ValueError: the text is less than one batch.
    """
    tokenizer = corpus.load_tokenizer(folder / "tokenizer.json")
    text = corpus.encode(tokenizer, corpus.split()[1])
    length = config.max_position_embeddings
    count = (len(text) - 1) // length
    if count < batch:
        raise ValueError(f"--batch {batch} is more than the {count} windows of {length} tokens that are held out")
    batches = min(-(-tokens // (batch * length)), count // batch)
    chosen = np.unique(np.linspace(0, count - 1, batches * batch).astype(int))
    return text[chosen[:, None] * length + np.arange(length + 1)].reshape(batches, batch, -1).astype(np.int32)


def plot(rows: list[dict]) -> str:
    """Returns an SVG of perplexity over bits per weight; the dense model is the dashed line."""
    series = []
    for mode in ("symmetric", "integer_zeros"):
        chosen = sorted((row for row in rows[1:] if row["mode"] == mode), key=lambda row: row["bits_per_weight"])
        points = [(row["bits_per_weight"], row["perplexity"]) for row in chosen]
        labels = [f"{row['weights']}, {row['group_size']}" for row in chosen]
        series.append(Series(mode, points, labels, joined=sum(row["bits"] == 4 for row in chosen)))
    most = math.ceil(max(row["bits_per_weight"] for row in rows[1:])) + 0.5
    return line_chart(
        series,
        x_label="bits per weight, scales included",
        y_label="perplexity",
        x_range=(4, most),
        reference=(rows[0]["perplexity"], "dense"),
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="folder of model and tokenizer")
    parser.add_argument("--tokens", type=int, default=65536, help="how many to read (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="windows at once (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "llm-perplexity.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "llm-perplexity.svg")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    args = parser.parse_args(arguments)
    for name in ("tokens", "batch"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} is less than 1")
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    try:
        model = llama.load(args.checkpoint / "model.safetensors", dtype)
        batches = windows(args.checkpoint, model.config, args.tokens, args.batch)
    except (FileNotFoundError, ModuleNotFoundError, ValueError) as error:
        print(f"perplexity: {error}", file=sys.stderr)
        return 1
    measured = variants(model, args.quiet)
    for batch in batches if args.quiet else progress(batches, "perplexity", unit="batches"):
        dense = None
        for variant in measured:
            logits, sums = measure(variant.graph, variant.state, batch, dense)
            dense = logits if dense is None else dense
            variant.sums += np.asarray(sums, np.float64)

    count = batches[:, :, 1:].size
    rows: list[dict] = []
    for variant in measured:
        loss, kl, agreement = (variant.sums / count).tolist()
        perplexity = math.exp(loss)
        rows.append(
            {
                "weights": variant.weights,
                "bits": variant.bits,
                "group_size": variant.group_size,
                "mode": variant.mode,
                "bits_per_weight": round(variant.bits_per_weight, 3),
                "linear_bytes": variant.linear_bytes,
                "loss": round(loss, 5),
                "perplexity": round(perplexity, 4),
                "increase_percent": round(100 * (perplexity / rows[0]["perplexity"] - 1), 3) if rows else 0.0,
                "kl": round(kl, 6),
                "agreement": round(agreement, 5),
            }
        )
    result = {
        "device": jax.devices()[0].device_kind,
        "tokens": count,
        "compute": jnp.dtype(dtype).name,
        "jax_wonly": jw.__version__,
        "text": corpus.facts(),
        "rows": rows,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    args.plot.write_text(plot(rows))
    print(f"{'weights':<10}{'group':>6}  {'mode':<14}{'bits':>6}{'perplexity':>12}{'more':>9}{'kl':>10}{'same':>8}")
    for row in rows:
        print(
            f"{row['weights']:<10}{row['group_size'] or '-':>6}  {row['mode'] or '-':<14}{row['bits_per_weight']:>6.2f}"
            f"{row['perplexity']:>12.3f}{row['increase_percent']:>8.2f}%{row['kl']:>10.5f}{row['agreement']:>8.3f}"
        )
    print(f"{count} tokens; written to {args.output} and {args.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
