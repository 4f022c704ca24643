"""Searches the Python language reference by meaning, with a dense, an int8 and an int4 model side by side.

    python examples/semantic_search.py "how do I read a file line by line"

The sentence encoder MiniLM-L6 embeds the topics of Python's own ``help()``, first with its dense weights, then with
every linear layer quantized. The embeddings are kept in a cache, so that a second question is answered in seconds.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_wonly as jw
import jax_wonly.nnx
import minilm
from jax_wonly.progress import progress

QUESTION = "how do I read a file line by line"
LENGTHS = (32, 64, 128)  # tokens that a batch is padded to: one compilation for each
PASSAGE_TOKENS = LENGTHS[-1] - 2  # without the two tokens that the tokenizer adds


@dataclasses.dataclass(frozen=True)
class Passage:
    topic: str
    text: str


@dataclasses.dataclass
class Result:
    """What one model gave: its size, how long it took, and how near it stays to the dense one."""

    name: str
    bytes: int
    linear_bytes: int
    seconds: float  # of embedding every passage, without compilation
    cached: bool
    cosine_mean: float
    cosine_min: float
    best: list[tuple[float, Passage]]  # score and passage, best first
    queries: np.ndarray = dataclasses.field(repr=False)
    passages: np.ndarray = dataclasses.field(repr=False)


def split_topics(tokenizer) -> list[Passage]:
    """Returns the help topics in passages of whole paragraphs, each short enough for the model."""
    from pydoc_data.topics import topics

    passages = []
    for topic, text in sorted(topics.items()):
        text = re.sub(r"[-=~^*+|]{3,}|(?<=\s)[|+](?=\s)", "", text)  # underlines, and the borders of tables
        paragraphs = [p for p in text.split("\n\n") if p.strip()]
        pieces = []
        for paragraph, encoded in zip(
            paragraphs, tokenizer.encode_batch(paragraphs, add_special_tokens=False), strict=True
        ):
            if len(encoded) <= PASSAGE_TOKENS:
                pieces.append((paragraph, len(encoded)))
                continue
            # Too long a paragraph is cut where the model's window ends.
            for i in range(0, len(encoded), PASSAGE_TOKENS):
                spans = encoded.offsets[i : i + PASSAGE_TOKENS]
                pieces.append((paragraph[spans[0][0] : spans[-1][1]], len(spans)))
        passage, size = [], 0
        for piece, tokens in pieces:
            if passage and size + tokens > PASSAGE_TOKENS:
                passages.append(Passage(topic, "\n\n".join(passage)))
                passage, size = [], 0
            passage.append(piece)
            size += tokens
        if passage:
            passages.append(Passage(topic, "\n\n".join(passage)))
    return passages


class Encoder:
    """Embeds texts with one model, in batches of few static shapes so that it compiles few times."""

    def __init__(self, model: nnx.Module, tokenizer, batch: int):
        self.model, self.tokenizer, self.batch = model, tokenizer, batch
        self.forward = nnx.jit(lambda model, ids, mask: model(ids, mask))
        self.compiled: set[tuple[int, int]] = set()

    def __call__(self, texts: list[str], label: str | None = None) -> tuple[np.ndarray, float]:
        """Returns the embeddings ``[texts, hidden]`` and the seconds they took, compilation left out."""
        encoded = self.tokenizer.encode_batch(texts)
        order = sorted(range(len(texts)), key=lambda i: len(encoded[i]))  # near lengths share a batch
        groups = [order[i : i + self.batch] for i in range(0, len(order), self.batch)]
        rows = self.batch if len(texts) > 1 else 1
        shapes = [(rows, pad_to(max(len(encoded[i]) for i in group))) for group in groups]
        for shape in set(shapes) - self.compiled:
            self.forward(self.model, jnp.zeros(shape, jnp.int32), jnp.ones(shape, bool)).block_until_ready()
            self.compiled.add(shape)

        embeddings: list[np.ndarray] = [np.empty(0)] * len(texts)
        start = time.perf_counter()
        batches = list(zip(groups, shapes, strict=True))
        for group, shape in progress(batches, label, unit="batches") if label else batches:
            ids, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
            for row, i in enumerate(group):
                tokens = encoded[i].ids[: shape[1]]
                ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, True
            for i, embedding in zip(group, np.asarray(self.forward(self.model, ids, mask)), strict=False):
                embeddings[i] = embedding
        return np.stack(embeddings), time.perf_counter() - start


def pad_to(length: int) -> int:
    return next((size for size in LENGTHS if size >= length), LENGTHS[-1])


def model_bytes(model: nnx.Module) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


def cache_file(options: argparse.Namespace, name: str, dtype, passages: list[Passage]) -> Path:
    """Returns where the embeddings of these passages by this model are kept."""
    what = [
        name,
        str(options.group_size),
        options.mode,
        str(options.batch),
        jnp.dtype(dtype).name,
        jax.default_backend(),
    ]
    what += [jw.__version__, jax.__version__, platform.python_version(), *(p.text for p in passages)]
    key = hashlib.sha256("\0".join(what).encode()).hexdigest()[:24]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jax_wonly" / "semantic_search"
    return folder / f"{key}.npz"


def embed_passages(encoder: Encoder, name: str, passages: list[Passage], file: Path | None, quiet: bool):
    """Returns the embeddings, the seconds they took, and whether they came from the cache."""
    if file is not None and file.is_file():
        with np.load(file) as saved:
            return saved["embeddings"], float(saved["seconds"]), True
    embeddings, seconds = encoder([p.text for p in passages], None if quiet else f"embed, {name}")
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_name(f"{file.stem}.{os.getpid()}.npz")
            np.savez(partial, embeddings=embeddings, seconds=seconds)
            partial.replace(file)
        except OSError as error:
            print(f"the embeddings are not cached: {error}", file=sys.stderr)
    return embeddings, seconds, False


def search(options: argparse.Namespace) -> tuple[list[Result], int]:
    """Returns one result for the dense model and one for each of ``options.bits``, and how many passages there are."""
    # bfloat16 halves the memory on a GPU; few CPUs compute in it.
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    tokenizer = minilm.load_tokenizer()
    passages = split_topics(tokenizer)
    if options.limit:  # spread over all topics
        passages = [passages[i] for i in np.unique(np.linspace(0, len(passages) - 1, options.limit).astype(int))]
    dense = minilm.load(dtype)
    linear_bytes = sum(
        layer.kernel[...].nbytes for _, layer in nnx.iter_modules(dense) if isinstance(layer, nnx.Linear)
    )

    results: list[Result] = []
    for bits in (None, *options.bits):
        name = f"dense {jnp.dtype(dtype).name}" if bits is None else f"int{bits}"
        model, held = dense, linear_bytes
        if bits is not None:
            model = nnx.clone(dense)
            report = jw.nnx.quantize(
                model, bits=bits, group_size=options.group_size, mode=options.mode, progress=not options.json
            )
            if any(layer.type == "Linear" for layer in report.skipped):
                raise ValueError(f"not every layer can be quantized:\n{report}")
            held = linear_bytes - report.bytes_before + report.bytes_after
        encoder = Encoder(model, tokenizer, options.batch)
        file = None if options.no_cache else cache_file(options, name, dtype, passages)
        embedded, seconds, cached = embed_passages(encoder, name, passages, file, options.json)
        query, _ = encoder([options.question])
        reference = results[0].passages if results else embedded
        cosine = np.clip((embedded * reference).sum(1), -1, 1)  # the embeddings have length one
        scores = embedded @ query[0]
        best = [(float(scores[i]), passages[i]) for i in np.argsort(-scores, kind="stable")[: options.top]]
        results.append(
            Result(
                name,
                model_bytes(model),
                held,
                seconds,
                cached,
                float(cosine.mean()),
                float(cosine.min()),
                best,
                query,
                embedded,
            )
        )
    return results, len(passages)


def print_results(results: list[Result], passages: int, question: str) -> None:
    """Prints the best passages in one column for each model, then the models in a table."""
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120)
    column = (width - 3 * (len(results) - 1)) // len(results)

    def print_row(cells: list[str]) -> None:
        print(" | ".join(f"{cell:<{column}}" for cell in cells).rstrip())

    print(f'\n"{question}"\n')
    print_row([result.name for result in results])
    print_row(["-" * column] * len(results))
    for rank in range(max(len(result.best) for result in results)):
        cells = []
        for result in results:
            score, passage = result.best[rank]
            text = textwrap.wrap(" ".join(passage.text.split()), column, max_lines=4, placeholder=" ...")
            cells.append([f"{rank + 1}. {score:.3f}  {passage.topic}"[:column], *text])
        for line in range(max(map(len, cells))):
            print_row([cell[line] if line < len(cell) else "" for cell in cells])
        print_row([""] * len(results))

    dense = {passage for _, passage in results[0].best}
    print(f"{passages} passages on {jax.devices()[0].device_kind}")
    print(f"{'':<15}{'model':>10}{'linear':>11}{'time':>10}{'rate':>10}{'cosine mean / min':>20}{'same best':>11}")
    for result in results:
        same = sum(passage in dense for _, passage in result.best)
        print(
            f"{result.name:<15}{megabytes(result.bytes):>10}{megabytes(result.linear_bytes):>11}"
            f"{result.seconds:>8.1f} s{passages / result.seconds:>8.0f}/s"
            f"{result.cosine_mean:>11.4f} / {result.cosine_min:.4f}{f'{same}/{len(result.best)}':>11}"
        )
    if any(result.cached for result in results):
        print("embeddings and their times come from the cache; --no-cache computes them again")


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def to_json(results: list[Result], passages: int, question: str) -> str:
    models = [
        {
            "name": result.name,
            "bytes": result.bytes,
            "linear_bytes": result.linear_bytes,
            "seconds": result.seconds,
            "cached": result.cached,
            "cosine_mean": result.cosine_mean,
            "cosine_min": result.cosine_min,
            "best": [{"score": score, "topic": p.topic, "text": p.text} for score, p in result.best],
        }
        for result in results
    ]
    device = jax.devices()[0]
    return json.dumps(
        {"question": question, "passages": passages, "device": device.device_kind, "rows": models}, indent=2
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    def positive(text: str) -> int:
        value = int(text)
        if value < 1:
            raise argparse.ArgumentTypeError(f"{text} is not a positive number")
        return value

    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("question", nargs="?", default=QUESTION, help="what to look for")
    parser.add_argument("--top", type=positive, default=3, help="how many passages to print")
    parser.add_argument("--bits", type=int, nargs="*", choices=(4, 8), default=[8, 4], help="widths to compare")
    parser.add_argument("--group-size", type=int, default=128, help="inputs that share a scale")
    parser.add_argument("--mode", default="integer_zeros", help="quantization mode, as in jax_wonly.quantize")
    parser.add_argument("--batch", type=positive, default=32, help="passages embedded at once")
    parser.add_argument("--limit", type=positive, help="embed only so many passages, spread over all topics")
    parser.add_argument("--no-cache", action="store_true", help="neither read nor write the cache of embeddings")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and no progress")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        minilm.model_folder()
    except FileNotFoundError as error:
        print(f"semantic_search: {error}", file=sys.stderr)
        return 1
    try:
        results, passages = search(options)
    except ValueError as error:
        print(f"semantic_search: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(to_json(results, passages, options.question))
    else:
        print_results(results, passages, options.question)
    return 0


if __name__ == "__main__":
    sys.exit(main())
