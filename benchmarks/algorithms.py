"""Compares the algorithms of jax_wonly.algorithms on a sentence encoder, MiniLM-L6, at 4 bits.

    python benchmarks/algorithms.py --output benchmarks/results/algorithms.json

Passages of the Python language reference calibrate; passages of other topics test. For each layer the relative error of
its outputs is taken on the inputs that the dense model has on the test passages. For the whole model: how far its
embeddings are from the dense ones, and how often the second half of a test passage is found from the first among all of
them, as in examples/lora.py. Differences of the reciprocal rank to round-to-nearest are of the same passages, so that
their standard error is smaller than that of the ranks themselves.
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import jax
import numpy as np
from _common import revision
from flax import nnx

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from lora import TOKENS, Halves  # noqa: E402
from semantic_search import split_topics  # noqa: E402

import jax_wonly.nnx  # noqa: E402
import minilm  # noqa: E402
from jax_wonly.algorithms import calibrate, output_error, quantize_model  # noqa: E402
from jax_wonly.progress import progress  # noqa: E402

# Name in the table, method, mode, options; within a mode, round-to-nearest first.
CASES = (
    ("round to nearest", "absmax", "symmetric", {}),
    ("MSE clip", "mse", "symmetric", {"calibration": None}),
    ("MSE clip, of outputs", "mse", "symmetric", {}),
    ("AWQ", "awq", "symmetric", {}),
    ("GPTQ, no clip", "gptq", "symmetric", {"clip": False}),
    ("GPTQ", "gptq", "symmetric", {}),
    ("GPTQ, act-order", "gptq", "symmetric", {"act_order": True}),
    ("GPTQ, static act-order", "gptq", "symmetric", {"act_order": "static"}),
    ("round to nearest", "minmax", "integer_zeros", {}),
    ("MSE clip", "mse", "integer_zeros", {"calibration": None}),
    ("AWQ", "awq", "integer_zeros", {}),
    ("GPTQ", "gptq", "integer_zeros", {}),
    ("GPTQ, act-order", "gptq", "integer_zeros", {"act_order": True}),
    ("round to nearest", "minmax", "float_zeros", {}),
    ("HQQ", "hqq", "float_zeros", {}),
)


@nnx.jit
def embed(model: nnx.Module, ids: jax.Array, mask: jax.Array) -> jax.Array:
    return model(ids, mask)


def batches_of(halves: Halves, batch: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Whole batches of both halves alike."""
    ids, mask = (a.reshape(-1, TOKENS) for a in (halves.ids, halves.mask))
    return [(ids[i : i + batch], mask[i : i + batch]) for i in range(0, len(ids) - batch + 1, batch)]


def embeddings(model: nnx.Module, halves: Halves, batch: int) -> np.ndarray:
    """Of both halves, ``[2, passages, hidden]``."""
    ids, mask = (a.reshape(-1, TOKENS) for a in (halves.ids, halves.mask))
    rows = []
    for i in range(0, len(ids), batch):
        pad = ((0, max(0, i + batch - len(ids))), (0, 0))
        rows.append(np.asarray(embed(model, *(np.pad(a[i : i + batch], pad) for a in (ids, mask)))))
    return np.concatenate(rows)[: len(ids)].reshape(2, len(halves), -1)


def reciprocal_ranks(both: np.ndarray) -> np.ndarray:
    scores = both[0] @ both[1].T
    return 1 / (1 + (scores > np.diagonal(scores)[:, None]).sum(1))


def error_of_mean(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--groups", type=int, nargs="+", default=[128, 32], help="group sizes (default: 128 32)")
    parser.add_argument("--output", type=Path, help="write the results to this file")
    parser.add_argument("--commit", help="of the measured code; by default what git says")


def facts(options: argparse.Namespace) -> dict:
    """Of the machine and the code, for a file of results."""
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": revision(options.commit),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument(
        "--calibration", type=int, default=256, help="passages to calibrate with (default: %(default)s)"
    )
    parser.add_argument("--limit", type=int, default=0, help="use so many passages only")
    parser.add_argument("--batch", type=int, default=32, help="halves in a batch (default: %(default)s)")
    options = parser.parse_args(arguments)

    try:
        dense = minilm.load()
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    about = facts(options)
    tokenizer = minilm.load_tokenizer()
    passages = [p for p in split_topics(tokenizer) if len(p.text.split()) >= 20]
    passages = passages[: options.limit or None]
    held_out = set(sorted({p.topic for p in passages})[::4])  # every fourth topic, as in examples/lora.py
    train, test = (
        Halves.of([p.text for p in passages if (p.topic in held_out) == held], tokenizer) for held in (False, True)
    )
    chosen = np.unique(np.linspace(0, len(train) - 1, min(options.calibration, len(train))).astype(int))
    train = train[chosen]
    calibration = calibrate(dense, batches_of(train, options.batch), progress=True)
    unseen = calibrate(dense, batches_of(test, options.batch), progress=True)
    kernels = {
        "/".join(map(str, path)): layer.kernel[...]
        for path, layer in nnx.iter_modules(dense)
        if isinstance(layer, nnx.Linear)
    }
    reference = embeddings(dense, test, options.batch)
    ranks = reciprocal_ranks(reference)
    rows = [
        {
            "method": "dense",
            "mode": None,
            "group_size": None,
            "layer_error": 0.0,
            "largest_layer_error": 0.0,
            "layers_better": None,
            "embedding_error": 0.0,
            "first": float((ranks == 1).mean()),
            "reciprocal_rank": float(ranks.mean()),
            "reciprocal_rank_error": error_of_mean(ranks),
            "gain": None,
            "gain_error": None,
            "seconds": None,
        }
    ]
    cases = [(group, *case) for group in options.groups for case in CASES]
    nearest: dict[tuple, tuple[dict[str, float], np.ndarray]] = {}
    for group, name, method, mode, more in progress(cases, "algorithms", unit="cases"):
        model = nnx.clone(dense)
        arguments_ = {"calibration": calibration} | more
        start = time.perf_counter()
        quantize_model(model, method=method, mode=mode, group_size=group, measure_error=False, **arguments_)
        seconds = time.perf_counter() - start
        errors = {}
        for path, layer in nnx.iter_modules(model):
            if isinstance(layer, jax_wonly.nnx.QuantizedLinear):
                path = "/".join(map(str, path))
                errors[path] = output_error(kernels[path], getattr(layer, "weight", layer.kernel), unseen[path])
        both = embeddings(model, test, options.batch)
        ranks = reciprocal_ranks(both)
        plain_errors, plain_ranks = nearest.setdefault((group, mode), (errors, ranks))
        gain = None if name == "round to nearest" else ranks - plain_ranks
        rows.append(
            {
                "method": name,
                "mode": mode,
                "group_size": group,
                "layer_error": float(np.mean(list(errors.values()))),
                "largest_layer_error": max(errors.values()),
                "layers_better": None if gain is None else sum(errors[p] < plain_errors[p] for p in errors),
                "embedding_error": float(np.sqrt(((both - reference) ** 2).sum() / (reference**2).sum())),
                "first": float((ranks == 1).mean()),
                "reciprocal_rank": float(ranks.mean()),
                "reciprocal_rank_error": error_of_mean(ranks),
                "gain": None if gain is None else float(gain.mean()),
                "gain_error": None if gain is None else error_of_mean(gain),
                "seconds": seconds,
            }
        )
        row = rows[-1]
        print(
            f"{group:4} {mode:14} {name:24} layers {row['layer_error']:.4f} (largest "
            f"{row['largest_layer_error']:.4f})  embeddings {row['embedding_error']:.4f}  first {row['first']:.3f}  "
            f"reciprocal rank {row['reciprocal_rank']:.4f} +- {row['reciprocal_rank_error']:.4f}  "
            f"gain {row['gain'] or 0:+.4f} +- {row['gain_error'] or 0:.4f}  {seconds:.1f} s",
            flush=True,
        )
        if options.output:  # after each case, so that a long run that is stopped has something to show
            measured = about | {
                "calibration_tokens": int(next(iter(calibration.counts.values()))),
                "test_passages": len(test),
                "layers": len(kernels),
            }
            options.output.write_text(json.dumps(measured | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
