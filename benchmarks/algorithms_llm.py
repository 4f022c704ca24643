"""Perplexity of the small language model of examples/llm with the algorithms of jax_wonly.algorithms, at 4 bits.

    python benchmarks/algorithms_llm.py --output benchmarks/results/algorithms-llm.json

Windows of the text that the model was trained on calibrate; held-out text tests, as in examples/llm/perplexity.py. All
models read the same windows: ``gain`` is by how much the loss is below that of round-to-nearest in the same group and
mode, in nats for each token, with the standard error of that difference over the batches of windows.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "llm"))

from algorithms import CASES, add_arguments, error_of_mean, facts  # noqa: E402

import corpus  # noqa: E402
import llama  # noqa: E402
from generate import CHECKPOINT  # noqa: E402
from jax_wonly.algorithms import calibrate, quantize_model  # noqa: E402
from jax_wonly.progress import progress  # noqa: E402
from perplexity import measure, windows  # noqa: E402


def sums_of(model: nnx.Module, batches: np.ndarray, dense: list[jax.Array] | None) -> tuple[list, np.ndarray]:
    """The logits of each batch, and ``[batches, 3]``: loss, divergence from dense logits, agreement, for a token."""
    graph, state = nnx.split(model)
    found = [measure(graph, state, batch, None if dense is None else dense[i]) for i, batch in enumerate(batches)]
    return [logits for logits, _ in found], np.array([sums for _, sums in found], np.float64) / batches[0, :, 1:].size


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument(
        "--calibration", type=int, default=32768, help="tokens to calibrate with (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=65536, help="tokens to test with (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="windows in a batch (default: %(default)s)")
    options = parser.parse_args(arguments)

    about = facts(options)
    dense = llama.load(CHECKPOINT / "model.safetensors", jnp.float32)
    length = dense.config.max_position_embeddings
    seen = corpus.encode(Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")), corpus.split()[0])
    starts = np.linspace(0, len(seen) - length, options.calibration // length).astype(int)
    chosen = np.stack([seen[start : start + length] for start in starts]).astype(np.int32)
    whole = len(chosen) // options.batch * options.batch
    calibration = calibrate(dense, list(chosen[:whole].reshape(-1, options.batch, length)), progress=True)
    batches = windows(CHECKPOINT, dense.config, options.tokens, options.batch)
    logits, reference = sums_of(dense, batches, None)
    rows: list[dict] = []

    def add(
        name: str, mode: str | None, group: int | None, sums: np.ndarray, plain: np.ndarray | None, seconds
    ) -> None:
        loss, kl, agreement = sums.mean(0).tolist()
        gain = None if plain is None else plain[:, 0] - sums[:, 0]
        perplexity, first = math.exp(loss), math.exp(reference[:, 0].mean())
        rows.append(
            {
                "method": name,
                "mode": mode,
                "group_size": group,
                "perplexity": round(perplexity, 4),
                "increase_percent": round(100 * (perplexity / first - 1), 3),
                "kl": round(kl, 6),
                "agreement": round(agreement, 5),
                "gain": None if gain is None else round(float(gain.mean()), 5),
                "gain_error": None if gain is None else round(error_of_mean(gain), 5),
                "seconds": seconds and round(seconds, 2),
            }
        )
        print(
            f"{group or '-':>4} {mode or '-':14} {name:24} {perplexity:8.4f} {rows[-1]['gain'] or 0:+.5f}", flush=True
        )

    add("dense", None, None, reference, None, None)
    nearest: dict[tuple, np.ndarray] = {}
    cases = [(group, *case) for group in options.groups for case in CASES]
    for group, name, method, mode, more in progress(cases, "algorithms", unit="cases"):
        model = nnx.clone(dense)
        start = time.perf_counter()
        with_ = {"calibration": calibration} | more
        quantize_model(model, method=method, mode=mode, group_size=group, measure_error=False, **with_)
        seconds = time.perf_counter() - start
        _, sums = sums_of(model, batches, logits)
        plain = nearest.setdefault((group, mode), sums)
        add(name, mode, group, sums, None if name == "round to nearest" else plain, seconds)
        if options.output:  # after each case, so that a long run that is stopped has something to show
            measured = about | {
                "calibration_tokens": whole * length,
                "tokens": batches[:, :, 1:].size,
                "text": corpus.facts(),
            }
            options.output.write_text(json.dumps(measured | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
