"""The text that the language model learns: what Python and a few packages say about themselves, cut into tokens.

    python examples/llm/corpus.py [--output build/llm]

Documents are the topics of Python's ``help()`` and the docstrings of the standard library and of packages that JAX and
Flax bring along; modules and topics are held out whole, by a hash of their name. Writes ``tokenizer.json``, a byte-pair
tokenizer trained on the rest, and ``corpus.npz``, which ``train.py`` reads.
"""

import argparse
import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PACKAGES = ("numpy", "scipy", "jax", "flax", "optax", "orbax-checkpoint")
MODULES = {"orbax-checkpoint": "orbax"}  # where the name differs
END = "<|end|>"
HELD_OUT = 20  # one in so many modules and topics is held out
SHORTEST = 200  # characters of a docstring worth reading


def documents(packages: tuple[str, ...] = PACKAGES) -> Iterator[tuple[str, str]]:
    """Yields pairs of a source (a topic or a module) and a text, each text once, in a fixed order."""
    from pydoc_data.topics import topics

    for topic, text in sorted(topics.items()):
        yield f"topic {topic}", text.strip() + "\n"
    library = Path(sysconfig.get_paths()["stdlib"])
    roots = [(library, "")]
    for package in packages:
        name = MODULES.get(package, package)
        found = importlib.util.find_spec(name)
        if found is None or not found.submodule_search_locations:
            raise ModuleNotFoundError(f"{package} is not installed; corpus.py --packages names those to read")
        roots.append((Path(next(iter(found.submodule_search_locations))), name + "."))
    seen = set()
    for root, prefix in roots:
        for file in sorted(root.rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            if {"site-packages", "test", "tests", "idle_test", "lib2to3"} & set(parts):
                continue
            module = prefix + ".".join(part for part in parts if part != "__init__")
            for name, text in docstrings(file, module.rstrip(".")):
                if len(text) >= SHORTEST and text not in seen:
                    seen.add(text)
                    yield module, f"{name}\n\n{text}\n"


def docstrings(file: Path, module: str) -> Iterator[tuple[str, str]]:
    """Yields the qualified names of a module and of what it defines, each with its docstring."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    pending: list[tuple[ast.AST, str]] = [(tree, module)]
    while pending:
        node, name = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield name, text
        for child in reversed(list(ast.iter_child_nodes(node))):
            inner = getattr(child, "name", None) if isinstance(child, ast.stmt) else None
            pending.append((child, f"{name}.{inner}" if inner else name))


def held_out(source: str) -> bool:
    return int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "big") % HELD_OUT == 0


def split(packages: tuple[str, ...] = PACKAGES) -> tuple[list[str], list[str]]:
    """Returns the texts to learn and those held out."""
    texts: tuple[list[str], list[str]] = [], []
    for source, text in documents(packages):
        texts[held_out(source)].append(text)
    return texts


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Returns a byte-level byte-pair tokenizer; every text can be encoded, and comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=sys.stderr.isatty()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Returns the tokenizer that ``main`` wrote.

    Raises:
      FileNotFoundError: the file is not there.
      ValueError: it is no tokenizer.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; examples/llm/corpus.py writes such a file")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more exact
        raise ValueError(f"{path} is no tokenizer: {error}") from error


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Returns the tokens of all texts in a row, uint16, with an end token after each."""
    end = tokenizer.token_to_id(END)
    return np.concatenate([np.array([*encoded.ids, end], np.uint16) for encoded in tokenizer.encode_batch(texts)])


def facts(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Returns the versions of what the text comes from."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/llm"), help="folder to write (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=2048, help="tokens (default: %(default)s)")
    parser.add_argument("--packages", nargs="*", default=PACKAGES, help="to read docstrings of (default: %(default)s)")
    args = parser.parse_args(arguments)
    packages = tuple(args.packages)
    try:
        learned, kept = split(packages)
    except ModuleNotFoundError as error:
        sys.exit(f"corpus: {error}")
    if not learned or not kept:
        sys.exit("there is too little text to hold some of it out: name more packages")
    tokenizer = train_tokenizer(learned, args.vocab_size)
    tokens = {"train": encode(tokenizer, learned), "held_out": encode(tokenizer, kept)}
    about = {
        "sources": facts(packages),
        "vocab_size": tokenizer.get_vocab_size(),
        "train_documents": len(learned),
        "train_characters": sum(map(len, learned)),
        "train_tokens": len(tokens["train"]),
        "held_out_documents": len(kept),
        "held_out_bytes": sum(len(text.encode()) for text in kept),
        "held_out_tokens": len(tokens["held_out"]),
    }
    args.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.output / "tokenizer.json"))
    np.savez_compressed(args.output / "corpus.npz", about=json.dumps(about), **tokens)
    print(json.dumps(about, indent=1))
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
