"""Trains the small language model on the tokens that ``corpus.py`` wrote.

    python examples/llm/corpus.py --output build/llm
    python examples/llm/train.py --data build/llm/corpus.npz --output build/llm [--seconds 200] [--resume]

AdamW with a warm-up and a cosine; windows of the text in an order that the seed fixes. Writes ``model.safetensors``,
the parameters with the best held-out loss so far in bfloat16, ``training.json``, the log, and ``state.npz``, from which
``--resume`` goes on as if it had not been interrupted. Runs on one device, in bfloat16 on a GPU.
"""

import argparse
import dataclasses
import functools
import json
import math
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import llama


@dataclasses.dataclass(frozen=True)
class Options:
    """What decides the result of a training run, apart from the data."""

    batch: int
    length: int
    chunk: int  # steps in one call of the device
    learning_rate: float
    warmup: int
    weight_decay: float
    dropout: float
    seed: int


def optimizer(options: Options) -> optax.GradientTransformation:
    """AdamW without its learning rate, which depends on how many steps there will be."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(options.weight_decay, mask=lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree)),
    )


def learning_rate(options: Options, step, total):
    """Rises linearly, then falls to a tenth along a cosine."""
    done = jnp.clip((step - options.warmup) / jnp.maximum(total - options.warmup, 1), 0, 1)
    fallen = 0.1 + 0.45 * (1 + jnp.cos(jnp.pi * done))
    return options.learning_rate * jnp.minimum((step + 1) / options.warmup, fallen)


def windows(options: Options, tokens: jax.Array, step: jax.Array) -> jax.Array:
    """Returns what step ``step`` learns, int32 ``[batch, length + 1]``.

    An epoch cuts the text into windows from a random start on and shuffles them.
    """
    each = (len(tokens) - options.length) // options.length  # windows of an epoch, whatever its start
    steps = each // options.batch
    key = jax.random.fold_in(jax.random.key(options.seed), step // steps)
    start = jax.random.randint(key, (), 0, options.length)
    order = jax.random.permutation(key, each)
    chosen = lax.dynamic_slice_in_dim(order, step % steps * options.batch, options.batch)
    return tokens[start + chosen[:, None] * options.length + jnp.arange(options.length + 1)].astype(jnp.int32)


def loss(graph, params, batch, key=None, rate=0.0):
    """Mean cross-entropy of the next token, in nats."""
    logits, _ = nnx.merge(graph, params)(batch[:, :-1], key=key, rate=rate)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


@functools.partial(jax.jit, static_argnames=("graph", "options"), donate_argnames=("params", "moments"))
def train_steps(graph, options: Options, params, moments, tokens, first, total):
    """Takes ``options.chunk`` steps; returns parameters, moments and the mean loss."""

    def step(carry, step):
        params, moments = carry
        key = jax.random.fold_in(jax.random.key(options.seed + 1), step)
        batch = windows(options, tokens, step)
        value, gradients = jax.value_and_grad(loss, argnums=1)(graph, params, batch, key, options.dropout)
        updates, moments = optimizer(options).update(gradients, moments, params)
        rate = learning_rate(options, step, total)
        params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        return (params, moments), value

    (params, moments), values = lax.scan(step, (params, moments), first + jnp.arange(options.chunk))
    return params, moments, values.mean()


@functools.partial(jax.jit, static_argnames="graph")
def held_out_loss(graph, params, batches):
    return lax.map(lambda batch: loss(graph, params, batch), batches).mean()


def held_out_batches(tokens: np.ndarray, length: int, batch: int) -> jax.Array:
    """Returns int32 ``[batches, batch, length + 1]``: the whole text but a rest shorter than a batch."""
    count = (len(tokens) - 1) // length
    batch = min(batch, count)
    count -= count % batch
    index = np.arange(count)[:, None] * length + np.arange(length + 1)
    return jnp.asarray(tokens[index].reshape(-1, batch, length + 1).astype(np.int32))


def load_data(path: Path, options: Options) -> tuple[np.ndarray, np.ndarray, dict]:
    if not path.is_file():
        sys.exit(f"{path} is not there; examples/llm/corpus.py writes such a file")
    with np.load(path) as data:
        tokens, held_out, about = data["train"], data["held_out"], json.loads(str(data["about"]))
    if len(tokens) < options.length * (options.batch + 1) or len(held_out) <= options.length:
        sys.exit(f"{path} has too few tokens for batches of {options.batch} x {options.length}")
    return tokens, held_out, about


def save_state(path: Path, log: dict, step: int, total: int, params, moments) -> None:
    leaves = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves((params, moments)))}
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, log=json.dumps(log), step=step, total=total, **leaves)
    partial.replace(path)


def load_state(path: Path, params, moments):
    with np.load(path) as saved:
        leaves, tree = jax.tree.flatten((params, moments))
        shapes = [saved[f"leaf{i}"].shape if f"leaf{i}" in saved else None for i in range(len(leaves))]
        if shapes != [leaf.shape for leaf in leaves]:
            sys.exit(f"{path} is of a model of another size")
        params, moments = jax.tree.unflatten(tree, [jnp.asarray(saved[f"leaf{i}"]) for i in range(len(leaves))])
        return params, moments, json.loads(str(saved["log"])), int(saved["step"]), int(saved["total"])


def train(args: argparse.Namespace, options: Options) -> dict:
    """Returns the log."""
    tokens, held_out, about = load_data(args.data, options)
    on_gpu = jax.default_backend() == "gpu"
    try:
        config = dataclasses.replace(llama.SMALL, vocab_size=about["vocab_size"], **args.config)
    except (TypeError, ValueError) as error:
        sys.exit(f"--config {args.config}: {error}")
    model = llama.Llama(
        config,
        dtype=jnp.bfloat16 if on_gpu else jnp.float32,
        attention=args.attention,
        rngs=nnx.Rngs(options.seed),
    )
    graph, params = nnx.split(model)
    del model
    moments = optimizer(options).init(params)
    log = {
        "config": dataclasses.asdict(config),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "options": dataclasses.asdict(options),
        "data": about,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "rows": [],
    }
    step, total = 0, args.steps
    args.output.mkdir(parents=True, exist_ok=True)
    state_file = args.output / "state.npz"
    if args.resume and state_file.is_file():
        expected = {name: log[name] for name in ("config", "options", "data")}
        params, moments, log, step, total = load_state(state_file, params, moments)
        if any(log[name] != value for name, value in expected.items()):
            sys.exit(f"{state_file} is of a run with other options or other data; leave --resume out to start anew")
        print(f"resumed after step {step} of {total}")
    tokens = jnp.asarray(tokens)
    batches = held_out_batches(held_out, options.length, options.batch)
    print(f"{log['parameters'] / 1e6:.2f} M parameters, {len(tokens) / 1e6:.2f} M tokens, {log['device']}", flush=True)

    before = log["rows"][-1]["seconds"] if log["rows"] else 0.0
    start = chunk_start = time.perf_counter()
    stop = min(total, args.stop or total)
    losses = []
    while step < stop:
        params, moments, value = train_steps(graph, options, params, moments, tokens, step, total)
        losses.append(float(value))  # waits for the device
        if not math.isfinite(losses[-1]):
            sys.exit(f"the loss is {losses[-1]} at step {step}: try a lower --learning-rate")
        step += options.chunk
        now = time.perf_counter()
        if args.seconds and step == 2 * options.chunk:  # compilation was in the first chunk
            affordable = int((args.seconds - (now - start)) / (now - chunk_start)) * options.chunk + step
            total = max(min(total, affordable), 2 * options.warmup)
            stop = min(total, args.stop or total)
            print(f"{total} steps fit into {args.seconds} s", flush=True)
        rate = options.chunk * options.batch * options.length / (now - chunk_start)
        if step % args.evaluate == 0 or step >= stop:
            row = {
                "step": step,
                "tokens": step * options.batch * options.length,
                "seconds": round(before + now - start, 1),
                "loss": round(float(np.mean(losses)), 4),
                "held_out_loss": round(float(held_out_loss(graph, params, batches)), 4),
                "learning_rate": float(f"{float(learning_rate(options, step - 1, total)):.3g}"),
            }
            best = all(row["held_out_loss"] < other["held_out_loss"] for other in log["rows"])
            log["rows"].append(row)
            log["best_step"] = step if best else log["best_step"]
            if best:
                llama.save(nnx.merge(graph, params), args.output / "model.safetensors")
            (args.output / "training.json").write_text(json.dumps(log, indent=1) + "\n")
            save_state(state_file, log, step, total, params, moments)
            losses = []
            left = (total - step) / options.chunk * (now - chunk_start)
            print(
                f"step {step}/{total}  loss {row['loss']:.3f}  held out {row['held_out_loss']:.3f}"
                f"{' *' if best else '  '} {rate:,.0f} tokens/s  {left:.0f} s left",
                flush=True,
            )
        chunk_start = time.perf_counter()
    return log


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog="* marks the best so far"
    )
    parser.add_argument("--data", type=Path, default=Path("build/llm/corpus.npz"), help="of corpus.py (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("build/llm"), help="folder to write (%(default)s)")
    parser.add_argument("--steps", type=int, default=4000, help="at most (%(default)s)")
    parser.add_argument("--seconds", type=float, help="take as many steps as fit, at the speed of the first ones")
    parser.add_argument("--stop", type=int, help="interrupt the run after this step; --resume goes on")
    parser.add_argument("--resume", action="store_true", help="go on from state.npz, if it is there")
    parser.add_argument("--evaluate", type=int, default=200, help="steps between two evaluations (%(default)s)")
    parser.add_argument("--attention", choices=("xla", "cudnn"), default="xla", help="implementation (%(default)s)")
    parser.add_argument("--config", type=json.loads, default={}, help="sizes that differ from llama.SMALL, as JSON")
    for name, default, what in (
        ("batch", 128, "windows in a step"),
        ("length", 512, "tokens in a window"),
        ("chunk", 50, "steps in one call of the device"),
        ("learning-rate", 2e-3, "at its highest"),
        ("warmup", 200, "steps in which it rises"),
        ("weight-decay", 0.1, "of matrices"),
        ("dropout", 0.1, "share of each layer's additions that a step drops"),
        ("seed", 0, "of parameters, order and dropout"),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{what} (%(default)s)")
    args = parser.parse_args(arguments)
    options = Options(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Options)})
    for name in ("batch", "length", "chunk", "warmup"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} is less than 1")
    for name in ("steps", "evaluate", "stop"):
        value = getattr(args, name)
        if value is not None and (value < 1 or value % options.chunk):
            parser.error(f"--{name} {value} is not a multiple of --chunk {options.chunk}")
    if args.seconds and options.warmup < 2 * options.chunk:
        parser.error(f"--seconds needs --warmup of at least two chunks, {2 * options.chunk} steps")
    log = train(args, options)
    best = next((row for row in log["rows"] if row["step"] == log["best_step"]), None)
    if best:
        print(f"best held-out loss {best['held_out_loss']} at step {best['step']}; written to {args.output}")


if __name__ == "__main__":
    main()
