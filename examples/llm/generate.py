"""Writes text with the small language model that is kept beside this file.

    python examples/llm/generate.py "The with statement" [--weights int4] [--tokens 200]

The text appears on standard output as it is generated; everything else goes to standard error.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

import corpus
import jax_wonly as jw
import jax_wonly.nnx
import llama

CHECKPOINT = Path(__file__).parent / "checkpoint"
WEIGHTS = {"dense": None, "int8": 8, "int4": 4}
PROMPT = 'The "with" statement'
CHUNK = 8  # tokens between two prints: one call of the device for each


class Generator:
    """A model, compiled for one size of prompt, that yields tokens in chunks.

    Args:
      model: dense or quantized.
      prompt: how many tokens a prompt has room for.
      tokens: how many it may generate after it.
      sampling: how tokens are chosen.
    """

    def __init__(self, model: llama.Llama, prompt: int, tokens: int, sampling: llama.Sampling):
        self.graph, self.state = nnx.split(model)
        self.chunks = -(-(tokens - 1) // CHUNK)
        self.dtype = model.embed.dtype
        self.prompt = prompt
        self.config = model.config
        key, ids, zero = jax.random.key(0), jnp.zeros((1, prompt), jnp.int32), jnp.int32(0)
        cache = self.cache()
        self.prefill = llama.prefill.lower(self.graph, self.state, cache, ids, zero, key, sampling=sampling).compile()
        self.decode = llama.decode.lower(
            self.graph, self.state, cache, ids[:, 0], zero, key, steps=CHUNK, sampling=sampling
        ).compile()

    def cache(self) -> llama.Cache:
        return llama.empty_cache(self.config, 1, self.prompt + self.chunks * CHUNK, self.dtype)

    def __call__(self, ids: list[int], seed: int) -> Iterator[list[int]]:
        """Yields what follows the prompt ``ids``: one token first, then chunks of ``CHUNK``."""
        padded = np.zeros((1, self.prompt), np.int32)
        padded[0, : len(ids)] = ids
        key = jax.random.key(seed)
        token, cache = self.prefill(self.state, self.cache(), padded, jnp.int32(len(ids)), key)
        yield [int(np.asarray(token)[0])]
        for i in range(self.chunks):
            position = jnp.int32(len(ids) + i * CHUNK)
            tokens, token, cache = self.decode(self.state, cache, token, position, key)
            yield np.asarray(tokens)[0].tolist()


def stream(tokenizer: Tokenizer, chunks: Iterator[list[int]], limit: int) -> Iterator[tuple[str, int]]:
    """Yields pieces of text, and how many tokens there are so far, up to the end token or the limit."""
    end = tokenizer.token_to_id(corpus.END)
    ids: list[int] = []
    shown = 0
    for chunk in chunks:
        done = end in chunk or len(ids) + len(chunk) >= limit
        ids += chunk[: chunk.index(end)] if end in chunk else chunk
        ids = ids[:limit]
        text = tokenizer.decode(ids)
        if not done and text.endswith("\ufffd"):  # a character that the next tokens complete
            continue
        yield text[shown:], len(ids)
        shown = len(text)
        if done:
            return


def load(folder: Path, weights: str, group_size: int, mode: str, progress: bool) -> tuple[llama.Llama, Tokenizer]:
    """Returns the checkpoint's model, quantized if asked for, and its tokenizer."""
    # Half the memory on a GPU; few CPUs compute in bfloat16.
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    model, tokenizer = llama.load(folder / "model.safetensors", dtype), corpus.load_tokenizer(folder / "tokenizer.json")
    bits = WEIGHTS[weights]
    if bits:
        report = jw.nnx.quantize(
            model, bits=bits, group_size=group_size, progress=progress, mode=mode, scale_dtype=jnp.bfloat16
        )
        if progress:
            print(report, file=sys.stderr)
    return model, tokenizer


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("prompt", nargs="?", default=PROMPT, help="what the text begins with")
    parser.add_argument("--weights", choices=WEIGHTS, default="int4", help="how the weights are kept")
    parser.add_argument("--group-size", type=int, default=32, help="inputs that share a scale")
    parser.add_argument("--mode", default="symmetric", help="quantization mode, as in jax_wonly.quantize")
    parser.add_argument("--tokens", type=int, default=200, help="how many to generate at most")
    parser.add_argument("--temperature", type=float, default=0.6, help="0: always the likeliest token")
    parser.add_argument("--top-k", type=int, default=40, help="draw from so many likeliest tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="folder of model and tokenizer")
    parser.add_argument("--quiet", action="store_true", help="print the text alone")
    args = parser.parse_args(arguments)
    for name, least in (("tokens", 1), ("top_k", 1), ("temperature", 0)):
        if not getattr(args, name) >= least:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} is less than {least}")

    def note(text: str) -> None:
        if not args.quiet:
            print(text, file=sys.stderr, flush=True)

    try:
        model, tokenizer = load(args.checkpoint, args.weights, args.group_size, args.mode, not args.quiet)
    except (FileNotFoundError, ValueError) as error:
        print(f"generate: {error}", file=sys.stderr)
        return 1
    ids = tokenizer.encode(args.prompt).ids or [tokenizer.token_to_id(corpus.END)]
    window = model.config.max_position_embeddings
    if len(ids) + args.tokens > window:
        print(
            f"generate: {len(ids)} tokens of prompt and {args.tokens} to generate are more than the {window} that the "
            "model learned; use a shorter prompt or fewer --tokens",
            file=sys.stderr,
        )
        return 1
    start = time.perf_counter()
    sampling = llama.Sampling(args.temperature, args.top_k)
    generator = Generator(model, -(-len(ids) // 32) * 32, args.tokens, sampling)  # few sizes to compile
    note(f"compiled in {time.perf_counter() - start:.1f} s on {jax.devices()[0].device_kind}\n")

    print(args.prompt, end="", flush=True)
    start = time.perf_counter()
    shown: list[tuple[float, int]] = []  # when, and how many tokens
    for text, count in stream(tokenizer, generator(ids, args.seed), args.tokens):
        print(text, end="", flush=True)
        shown.append((time.perf_counter() - start, count))
    print()
    (first, before), (seconds, count) = shown[0], shown[-1]
    rate = f", {(count - before) / (seconds - first):.0f} tokens/s after the first" if count > before else ""
    read = f"{len(ids)} tokens read in {1e3 * first:.0f} ms"
    note(f"\n{args.weights}: {read}, {count} generated in {seconds:.2f} s{rate}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
