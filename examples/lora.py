"""Fine-tunes adapters (LoRA) over an int4 sentence encoder, on the Python language reference.

    python examples/lora.py

MiniLM-L6 is quantized to int4, which costs it accuracy, and stays frozen. Low-rank adapters over its linear layers
learn to bring the two halves of a passage of Python's ``help()`` together. Passages of topics that were held out show
how often the second half is found from the first among all of them: for the dense model, the int8 and the int4 model,
the int4 model with adapters, and with the adapters merged into int8 or int4 layers.
"""

import argparse
import dataclasses
import json
import platform
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from semantic_search import model_bytes, split_topics

import jax_wonly.nnx
import minilm
from jax_wonly.progress import progress

TOKENS = 48  # of each half; what is longer is cut
TEMPERATURE = 0.05  # of the softmax over the other halves of a batch


@dataclasses.dataclass(frozen=True)
class Halves:
    """First and second halves of passages: token ids and masks ``[2, passages, TOKENS]``."""

    ids: np.ndarray
    mask: np.ndarray

    @classmethod
    def of(cls, texts: list[str], tokenizer) -> "Halves":
        words = [text.split() for text in texts]
        halves = [" ".join(w[: len(w) // 2]) for w in words] + [" ".join(w[len(w) // 2 :]) for w in words]
        ids = np.zeros((len(halves), TOKENS), np.int32)
        mask = np.zeros((len(halves), TOKENS), bool)
        for row, encoded in enumerate(tokenizer.encode_batch(halves)):
            tokens = encoded.ids[:TOKENS]
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, True
        return cls(*(a.reshape(2, len(texts), TOKENS) for a in (ids, mask)))

    def __len__(self) -> int:
        return self.ids.shape[1]

    def __getitem__(self, passages) -> "Halves":
        return Halves(self.ids[:, passages], self.mask[:, passages])


@nnx.jit
def similarities(model: nnx.Module, ids: jax.Array, mask: jax.Array) -> jax.Array:
    """Cosine of every first half with every second one, ``[passages, passages]``."""
    first, second = jnp.split(model(ids.reshape(-1, TOKENS), mask.reshape(-1, TOKENS)), 2)
    return first @ second.T


def loss(model: nnx.Module, ids: jax.Array, mask: jax.Array) -> jax.Array:
    """How surprising it is, from both sides, which half belongs to which."""
    logits = similarities(model, ids, mask) / TEMPERATURE
    labels = jnp.arange(logits.shape[0])
    both = [optax.softmax_cross_entropy_with_integer_labels(side, labels).mean() for side in (logits, logits.T)]
    return sum(both) / 2


@nnx.jit
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, ids: jax.Array, mask: jax.Array) -> jax.Array:
    value, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, ids, mask)
    optimizer.update(model, gradients)
    return value


def scores_of(model: nnx.Module, halves: Halves, batch: int) -> np.ndarray:
    """Cosine of every first half with every second one, ``[passages, passages]``, ``batch`` passages at a time."""
    embed = nnx.jit(lambda model, ids, mask: model(ids, mask))
    sides = []
    for ids, mask in zip(halves.ids, halves.mask, strict=True):
        rows = []
        for i in range(0, len(ids), batch):
            pad = ((0, max(0, i + batch - len(ids))), (0, 0))
            rows.append(np.asarray(embed(model, np.pad(ids[i : i + batch], pad), np.pad(mask[i : i + batch], pad))))
        sides.append(np.concatenate(rows)[: len(ids)])
    return sides[0] @ sides[1].T


def quality(scores: np.ndarray, dense: np.ndarray) -> dict[str, float]:
    """How often the right second half is first, the mean of one over its rank, and how often the first is dense's."""
    ranks = 1 + (scores > np.diagonal(scores)[:, None]).sum(1)
    same = scores.argmax(1) == dense.argmax(1)
    return {
        "first": float((ranks == 1).mean()),
        "reciprocal_rank": float((1 / ranks).mean()),
        "same": float(same.mean()),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="of training (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="passages in a step (default: %(default)s)")
    parser.add_argument(
        "--learning-rate", type=float, default=1e-3, help="at first; falls to zero (default: %(default)s)"
    )
    parser.add_argument("--limit", type=int, default=0, help="use so many passages only")
    parser.add_argument("--seed", type=int, default=0, help="of adapters and batches (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args(arguments)
    for name, least in (("rank", 1), ("steps", 1), ("batch", 1), ("limit", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be {least} or more")

    try:
        model = minilm.load()
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    tokenizer = minilm.load_tokenizer()
    passages = [p for p in split_topics(tokenizer) if len(p.text.split()) >= 20]
    passages = passages[: options.limit or None]
    # Every fourth topic is held out.
    topics = sorted({p.topic for p in passages})
    held_out = set(topics[::4])
    train, test = (
        Halves.of([p.text for p in passages if (p.topic in held_out) == held], tokenizer) for held in (False, True)
    )
    if len(train) < options.batch:
        parser.error(f"--batch {options.batch} is more than the {len(train)} passages to train on")
    print(f"{len(train)} passages of {len(topics) - len(held_out)} topics to train on, {len(test)} of others to test")

    rows = []
    dense_scores = scores_of(model, test, options.batch)

    def add(name: str, model: nnx.Module, scores: np.ndarray | None = None) -> None:
        scores = scores_of(model, test, options.batch) if scores is None else scores
        rows.append({"model": name, "bytes": model_bytes(model), **quality(scores, dense_scores)})
        row = rows[-1]
        print(
            f"{name:<22} {row['bytes'] / 1e6:6.1f} MB   right first {row['first']:6.1%}   "
            f"mean reciprocal rank {row['reciprocal_rank']:.3f}   first as dense {row['same']:6.1%}",
            flush=True,
        )

    add("dense float32", model, dense_scores)
    int8 = nnx.clone(model)
    jax_wonly.nnx.quantize(int8, bits=8, group_size=128)
    add("int8", int8)
    del int8
    jax_wonly.nnx.quantize(model, bits=4, group_size=128)
    add("int4", model)

    jax_wonly.nnx.add_lora(model, options.rank, rngs=nnx.Rngs(options.seed))
    schedule = optax.cosine_decay_schedule(options.learning_rate, options.steps)
    optimizer = nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.LoRAParam)
    trained = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
    print(f"training {trained:,} weights of adapters of rank {options.rank}")
    rng = np.random.default_rng(options.seed)
    start = time.perf_counter()
    losses = []
    for _ in progress(range(options.steps), "train", unit="steps"):
        batch = train[rng.choice(len(train), options.batch, replace=False)]
        losses.append(float(train_step(model, optimizer, batch.ids, batch.mask)))
    seconds = time.perf_counter() - start
    tenth = max(1, options.steps // 10)
    print(f"loss {np.mean(losses[:tenth]):.3f} -> {np.mean(losses[-tenth:]):.3f} in {seconds:.0f} s")
    add("int4 + adapters", model)

    graph, state = nnx.split(model)
    for bits in (8, 4):
        model = nnx.merge(graph, state)
        jax_wonly.nnx.merge_lora(model, bits=bits)
        add(f"merged into int{bits}", model)

    if options.json:
        machine = {"device": jax.devices()[0].platform, "jax": jax.__version__, "python": platform.python_version()}
        settings = {key: value for key, value in vars(options).items() if key not in ("json", "limit")}
        facts = settings | {"test_passages": len(test), "trained_weights": trained}
        options.json.write_text(json.dumps(facts | machine | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
