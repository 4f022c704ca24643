"""The language model of examples/llm: the model against NumPy, generation, training and the programs around it."""

import dataclasses
import functools
import importlib.util
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
LLM = ROOT / "examples" / "llm"

for needed in ("flax", "optax", "safetensors", "tokenizers"):
    pytest.importorskip(needed)

from flax import nnx  # noqa: E402

sys.path.insert(0, str(LLM))
import corpus  # noqa: E402
import decode_attention  # noqa: E402
import generate  # noqa: E402
import jax_wonly as jw  # noqa: E402
import jax_wonly.nnx  # noqa: E402
import llama  # noqa: E402
import perplexity  # noqa: E402
import train  # noqa: E402

TINY = llama.Config(384, 128, 256, 2, 4, 2, max_position_embeddings=96, rope_theta=500.0)
TEXTS = ["The with statement wraps a block.\n", "caf\u00e9 \u2192 \U0001f40d\n", "    indented(code)\n\n\n", ""]


def tiny_model(rng):
    """A model whose norms are not all ones, and whose logits differ by much."""
    graph, state = nnx.split(nnx.eval_shape(lambda: llama.Llama(TINY, rngs=nnx.Rngs(0))))

    def random(leaf):
        values = rng.normal(size=leaf.shape) * (0.1 if leaf.ndim == 1 else 2 * leaf.shape[0] ** -0.5)
        return jnp.asarray(values + (leaf.ndim == 1), jnp.float32)

    return nnx.merge(graph, jax.tree.map(random, state))


@functools.partial(jax.jit, static_argnames="graph")
def continue_text(graph, state, ids, cache, position):
    return nnx.merge(graph, state)(ids, cache, position)


def logits_of(model, ids, at=None):
    """Logits of whole texts, in one program."""
    graph, state = nnx.split(model)
    return jax.jit(lambda state, ids: nnx.merge(graph, state)(ids, at=at)[0])(state, jnp.asarray(ids))


def llama_in_float64(model, ids):
    """The decoder written again, token by token and head by head: logits ``[length, vocabulary]`` of one text."""
    config = model.config
    weights = {
        ".".join(map(str, path)): np.asarray(variable[...], np.float64)
        for path, variable in nnx.to_flat_state(nnx.state(model))
    }
    size, heads, shared = config.head_size, config.num_attention_heads, config.num_key_value_heads

    def norm(x, name):
        return x / np.sqrt((x**2).mean() + config.rms_norm_eps) * weights[f"{name}.scale"]

    def rotated(x, position):
        """Pairs as complex numbers, turned by their angles."""
        angles = position * config.rope_theta ** (-2 * np.arange(size // 2) / size)
        turned = (x[: size // 2] + 1j * x[size // 2 :]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag])

    past = [[([], []) for _ in range(shared)] for _ in range(config.num_hidden_layers)]
    logits = []
    for position, token in enumerate(ids):
        x = weights["embed.embedding"][token]
        for layer in range(config.num_hidden_layers):
            name = f"blocks.{layer}"
            qkv = (norm(x, f"{name}.attention_norm") @ weights[f"{name}.qkv.kernel"]).reshape(-1, size)
            for head, (keys, values) in enumerate(past[layer]):
                keys.append(rotated(qkv[heads + head], position))
                values.append(qkv[heads + shared + head])
            attended = []
            for head in range(heads):
                keys, values = past[layer][head // (heads // shared)]
                scores = np.array(keys) @ rotated(qkv[head], position) / np.sqrt(size)
                probabilities = np.exp(scores - scores.max())
                attended.append(probabilities / probabilities.sum() @ np.array(values))
            x = x + np.concatenate(attended) @ weights[f"{name}.output.kernel"]
            gate, up = np.split(norm(x, f"{name}.mlp_norm") @ weights[f"{name}.gate_up.kernel"], 2)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{name}.down.kernel"]
        logits.append(norm(x, "norm") @ weights["head.kernel"])
    return np.array(logits)


def test_model_is_a_llama(rng):
    model = tiny_model(rng)
    ids = rng.integers(0, TINY.vocab_size, (2, 23))
    for row, text in zip(logits_of(model, ids), ids, strict=True):
        expected = llama_in_float64(model, text)
        assert expected.std() > 0.5
        np.testing.assert_allclose(row, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("bits", [None, 8])
def test_cached_tokens_give_the_logits_of_the_whole_text(rng, bits):
    """A prompt, then chunks and single tokens, against one pass over everything; the cache starts as garbage."""
    model = tiny_model(rng)
    if bits:
        report = jw.nnx.quantize(model, bits, 32)
        assert len(report.layers) == 4 * TINY.num_hidden_layers + 1 and len(report.skipped) == 1
    ids = rng.integers(0, TINY.vocab_size, (2, 17))
    whole = logits_of(model, ids)
    graph, state = nnx.split(model)
    cache = jax.tree.map(lambda a: a + 1e3, llama.empty_cache(TINY, 2, 32, jnp.float32))
    _, cache = jax.jit(lambda state, cache: nnx.merge(graph, state)(ids[:, :9], cache))(state, cache)
    parts = []
    for start, stop in ((9, 12), (12, 13), (13, 14), (14, 17)):
        logits, cache = continue_text(graph, state, ids[:, start:stop], cache, start)
        parts.append(logits)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole[:, 9:], atol=1e-4 * float(jnp.abs(whole).max()))
    np.testing.assert_allclose(logits_of(model, ids, at=7)[:, 0], whole[:, 7], atol=1e-4 * float(jnp.abs(whole).max()))


def test_decode_is_greedy_generation(rng):
    """Tokens of the compiled loop, with a padded prompt, are those of a pass over the whole text for each."""
    model = tiny_model(rng)
    jw.nnx.quantize(model, 4, 64)
    prompt, steps = rng.integers(0, TINY.vocab_size, (3, 10)), 12
    graph, state = nnx.split(model)
    padded = np.concatenate([prompt, rng.integers(0, TINY.vocab_size, (3, 6))], 1).astype(np.int32)
    cache = llama.empty_cache(TINY, 3, 32, jnp.float32)
    key = jax.random.key(0)
    token, cache = llama.prefill(graph, state, cache, padded, jnp.int32(10), key)
    donated = cache[0][0]
    first, last, cache = llama.decode(graph, state, cache, token, jnp.int32(10), key, steps=5)
    assert donated.is_deleted(), "the cache is copied"
    np.testing.assert_array_equal(first[:, -1], last)
    second, _, _ = llama.decode(graph, state, cache, last, jnp.int32(15), key, steps=steps - 6)
    tokens = np.concatenate([np.asarray(token)[:, None], first, second], 1)
    # Teacher forcing: every chosen token is the likeliest, up to rounding, after all before it.
    before = np.asarray(logits_of(model, np.concatenate([prompt, tokens], 1)))[:, 9:-1]
    chosen = np.take_along_axis(before, tokens[..., None], -1)[..., 0]
    assert tokens.shape == (3, steps)
    assert (chosen >= before.max(-1) - 1e-3 * np.abs(before).max()).all()


@pytest.mark.parametrize(("position", "splits"), [(0, None), (1, 1), (17, 3), (47, None), (47, 2)])
def test_fused_attention_of_one_token(rng, position, splits):
    """The kernel against XLA's operations; what the cache holds after the token, NaN, must not be read."""
    batch, heads, shared, capacity, size = 3, 6, 2, 48, 32
    config = llama.Config(1, heads * size, 1, 1, heads, shared)
    qkv = rng.normal(size=(batch, heads + 2 * shared, size)).astype(np.float32)
    squares = rng.uniform(1, 9, batch).astype(np.float32)
    keys, values = (rng.normal(size=(batch, shared, capacity, size)).astype(np.float32) for _ in range(2))
    turn = llama.rotation(config, jnp.array([position]))
    cos, sin = (a[0, 0] for a in turn)
    scaled = (qkv / np.sqrt(squares / 7 + 1e-3)[:, None, None])[:, None]
    q, k = (llama.rotate(scaled[:, :, part], *turn) for part in (slice(0, heads), slice(heads, heads + shared)))
    expected_keys, expected_values = keys.copy(), values.copy()
    expected_keys[:, :, position], expected_values[:, :, position] = k[:, 0], scaled[:, 0, heads + shared :]
    expected = llama.attend(q, jnp.asarray(expected_keys), jnp.asarray(expected_values), position)[:, 0]
    for cache in (keys, values, expected_keys, expected_values):
        cache[:, :, position + 1 :] = np.nan
    options = {"heads": heads, "width": 7, "epsilon": 1e-3, "splits": splits, "interpret": True}
    y, *cache = decode_attention.decode_attention(qkv, squares, cos, sin, keys, values, jnp.int32(position), **options)
    np.testing.assert_allclose(y, expected, atol=1e-5 * float(jnp.abs(expected).max()))
    np.testing.assert_allclose(cache[0], expected_keys, atol=1e-5)
    np.testing.assert_allclose(cache[1], expected_values, atol=1e-5)


def test_sampling(rng):
    logits = jnp.asarray(rng.normal(size=(500, 50)) * 2 + 7, jnp.float32)
    np.testing.assert_array_equal(llama.Sampling()(logits, jax.random.key(0)), logits.argmax(-1))
    drawn = np.asarray(llama.Sampling(0.7, 5)(logits, jax.random.key(1)))
    rank = (np.asarray(logits) > np.take_along_axis(np.asarray(logits), drawn[:, None], 1)).sum(1)
    assert rank.max() == 4 and len(set(rank)) == 5
    one = jnp.tile(jnp.log(jnp.array([0.1, 0.2, 0.7])), (20000, 1))
    shares = np.bincount(np.asarray(llama.Sampling(1.0, 3)(one, jax.random.key(2))), minlength=3) / 20000
    np.testing.assert_allclose(shares, [0.1, 0.2, 0.7], atol=0.02)  # six standard deviations


def test_save_and_load(tmp_path, rng):
    model = tiny_model(rng)
    llama.save(model, tmp_path / "model.safetensors")
    loaded = llama.load(tmp_path / "model.safetensors")
    assert loaded.config == TINY
    for old, new in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(loaded)), strict=True):
        np.testing.assert_array_equal(new, old.astype(jnp.bfloat16).astype(jnp.float32))
    with pytest.raises(FileNotFoundError, match=r"train\.py"):
        llama.load(tmp_path / "absent.safetensors")


def test_config_refuses_heads_that_do_not_fit():
    with pytest.raises(ValueError, match="num_key_value_heads=3"):
        llama.Config(384, 128, 256, 2, 4, 3)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A small corpus with its tokenizer."""
    folder = tmp_path_factory.mktemp("llm")
    learned = [f"{name}\n\n{text}\n" for name, text in corpus.docstrings(Path(argparse_file()), "argparse")] * 20
    tokenizer = corpus.train_tokenizer(learned, 384)
    tokenizer.save(str(folder / "tokenizer.json"))
    train_tokens, kept = corpus.encode(tokenizer, learned), corpus.encode(tokenizer, learned[:20])
    about = json.dumps({"vocab_size": tokenizer.get_vocab_size()})
    np.savez(folder / "corpus.npz", train=train_tokens, held_out=kept, about=about)
    return folder


def argparse_file():
    return importlib.util.find_spec("argparse").origin


def test_tokenizer_gives_back_every_text(data):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    ids = corpus.encode(tokenizer, TEXTS)
    ends = np.flatnonzero(ids == tokenizer.token_to_id(corpus.END))
    starts = [0, *(ends[:-1] + 1)]
    assert [tokenizer.decode(ids[a:b]) for a, b in zip(starts, ends, strict=True)] == TEXTS
    assert len(tokenizer.encode("argument").ids) < 4


def test_docstrings_have_names(tmp_path):
    file = tmp_path / "m.py"
    file.write_text('"""Module."""\nclass A:\n    """A."""\n    def f(self):\n        """f."""\n\ndef g():\n    "g."\n')
    assert sorted(corpus.docstrings(file, "m")) == [("m", "Module."), ("m.A", "A."), ("m.A.f", "f."), ("m.g", "g.")]
    file.write_text("def broken(:\n")
    assert list(corpus.docstrings(file, "m")) == []


def options(**changes):
    values = dict(batch=4, length=16, chunk=2, learning_rate=1e-2, warmup=4, weight_decay=0.1, dropout=0.1, seed=3)
    return train.Options(**(values | changes))


def test_an_epoch_reads_every_window_once():
    tokens = jnp.arange(16 * 41 + 5, dtype=jnp.uint16)
    seen = np.concatenate([train.windows(options(), tokens, jnp.int32(step)) for step in range(10)])
    assert seen.shape == (40, 17)
    np.testing.assert_array_equal(np.diff(seen, axis=1), 1)
    starts = seen[:, 0]
    assert len(set(starts)) == 40 and len(set(starts % 16)) == 1 and (np.diff(starts) < 0).any()
    again = train.windows(options(), tokens, jnp.int32(10))
    assert not np.array_equal(again, seen[:4])


def test_learning_rate():
    rates = [float(train.learning_rate(options(), step, 24)) for step in range(25)]
    np.testing.assert_allclose(rates[:4], [2.5e-3, 5e-3, 7.5e-3, 1e-2], rtol=1e-5)
    assert (np.diff(rates[4:]) < 0).all()
    np.testing.assert_allclose(rates[24], 1e-3, rtol=1e-5)


TRAIN = ["--batch", "4", "--length", "32", "--chunk", "10", "--evaluate", "20", "--steps", "60", "--warmup", "20"]
TRAIN += ["--learning-rate", "1e-2"]
SIZES = '{"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}'


def run_training(data, output, *more):
    train.main(["--data", str(data / "corpus.npz"), "--output", str(output), "--config", SIZES, *TRAIN, *more])
    return json.loads((output / "training.json").read_text())


@pytest.fixture(scope="module")
def checkpoint(data):
    log = run_training(data, data / "run")
    (data / "run" / "tokenizer.json").write_bytes((data / "tokenizer.json").read_bytes())
    return data / "run", log


def test_training_learns_and_resumes(data, checkpoint, tmp_path):
    folder, log = checkpoint
    losses = [row["held_out_loss"] for row in log["rows"]]
    assert [row["step"] for row in log["rows"]] == [20, 40, 60]
    assert losses[-1] < np.log(384) - 1 and log["best_step"] == 20 * (1 + int(np.argmin(losses)))
    run_training(data, tmp_path, "--stop", "20")
    resumed = run_training(data, tmp_path, "--resume")
    assert [row["held_out_loss"] for row in resumed["rows"]] == losses
    with np.load(folder / "state.npz") as whole, np.load(tmp_path / "state.npz") as parts:
        for name in whole.files:
            if name != "log":  # it has times in it
                np.testing.assert_array_equal(whole[name], parts[name])
    with pytest.raises(SystemExit, match="other options"):
        run_training(data, tmp_path, "--resume", "--seed", "5")


def test_held_out_loss_is_the_mean_over_the_text(data, checkpoint):
    folder, log = checkpoint
    model = llama.load(folder / "model.safetensors")
    with np.load(data / "corpus.npz") as saved:
        batches = train.held_out_batches(saved["held_out"], 32, 4)
    flat = np.asarray(batches).reshape(-1, 33)
    total = 0.0
    for row in flat[:: len(flat) // 5]:
        logits = llama_in_float64(model, row[:-1])
        total += np.mean(np.log(np.exp(logits).sum(-1)) - logits[np.arange(32), row[1:]])
    graph, params = nnx.split(model)
    chosen = jnp.asarray(flat[:: len(flat) // 5])[None]
    np.testing.assert_allclose(train.held_out_loss(graph, params, chosen), total / chosen.shape[1], rtol=1e-4)
    best = min(row["held_out_loss"] for row in log["rows"])
    # The checkpoint is in bfloat16.
    np.testing.assert_allclose(train.held_out_loss(graph, params, batches), best, rtol=1e-2)


def test_generate(checkpoint, capsys):
    arguments = ["argparse", "--checkpoint", str(checkpoint[0]), "--tokens", "21", "--seed", "4"]
    assert generate.main(arguments) == 0
    text, notes = capsys.readouterr()
    assert text.startswith("argparse") and "tokens/s" in notes and "4.50 bits per weight" in notes
    assert generate.main([*arguments, "--quiet"]) == 0
    assert capsys.readouterr() == (text, "")
    assert generate.main([*arguments, "--weights", "dense"]) == 0
    text, notes = capsys.readouterr()
    assert text.startswith("argparse") and "dense: " in notes and "bits" not in notes


def test_generate_errors(checkpoint, tmp_path, capsys):
    assert generate.main(["x", "--checkpoint", str(tmp_path)]) == 1
    assert "is not there" in capsys.readouterr().err
    assert generate.main(["x", "--checkpoint", str(checkpoint[0]), "--tokens", "600"]) == 1
    assert "more than the 512" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        generate.main(["x", "--tokens", "0"])
    # Nothing would be quantized: not text that says it is of int4.
    assert generate.main(["x", "--checkpoint", str(checkpoint[0]), "--group-size", "100"]) == 1
    assert "group_size=100 is not supported" in capsys.readouterr().err
    model = (checkpoint[0] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(model)
    assert generate.main(["x", "--checkpoint", str(tmp_path)]) == 1
    assert "tokenizer.json is not there" in capsys.readouterr().err
    (tmp_path / "tokenizer.json").write_text("{}")
    assert generate.main(["x", "--checkpoint", str(tmp_path)]) == 1
    assert "is no tokenizer" in capsys.readouterr().err
    (tmp_path / "model.safetensors").write_bytes(model[:-1])
    for program in (generate, perplexity):
        assert program.main(["--checkpoint", str(tmp_path)]) == 1
        assert "cannot be read" in capsys.readouterr().err


def test_errors_of_the_other_programs(data, checkpoint, tmp_path, monkeypatch, capsys):
    for argument in ("--tokens", "--batch"):
        with pytest.raises(SystemExit):
            perplexity.main([argument, "0"])
        assert f"{argument} 0 is less than 1" in capsys.readouterr().err
    monkeypatch.setattr(corpus, "split", lambda: ([], ["a few words"]))
    assert perplexity.main(["--checkpoint", str(checkpoint[0])]) == 1
    assert "--batch 4 is more than the 0 windows" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"corpus\.py writes such a file"):
        train.main(["--data", str(tmp_path / "absent.npz")])
    for config in ('{"layers": 3}', "[3]", '{"hidden_size": 100, "num_attention_heads": 3}'):
        with pytest.raises(SystemExit, match="--config"):
            train.main(["--data", str(data / "corpus.npz"), *TRAIN, "--config", config])
    with pytest.raises(SystemExit):
        train.main(["--batch", "0"])


def test_stream_ends_and_waits_for_whole_characters(data):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    ids = tokenizer.encode("a \U0001f40d b").ids
    pieces = list(generate.stream(tokenizer, ([i] for i in ids), len(ids)))
    assert "".join(text for text, _ in pieces) == "a \U0001f40d b" and pieces[-1][1] == len(ids)
    assert not any("\ufffd" in text for text, _ in pieces)
    end = tokenizer.token_to_id(corpus.END)
    assert list(generate.stream(tokenizer, iter([ids[:1], [ids[0], end, ids[0]], ids]), 99)) == [("a", 1), ("a", 2)]


def test_perplexity(checkpoint, tmp_path, monkeypatch, capsys):
    folder, _ = checkpoint
    texts = [text for _, text in corpus.docstrings(Path(argparse_file()), "argparse")] * 8
    monkeypatch.setattr(corpus, "split", lambda: ([], texts))
    monkeypatch.setattr(perplexity, "SCHEMES", [(8, 128, "symmetric"), (4, 128, "integer_zeros")])
    output, plot = tmp_path / "p.json", tmp_path / "p.svg"
    paths = ["--checkpoint", str(folder), "--output", str(output), "--plot", str(plot)]
    assert perplexity.main([*paths, "--tokens", "2048", "--batch", "2"]) == 0
    dense, int8, int4 = json.loads(output.read_text())["rows"]
    graph, params = nnx.split(llama.load(folder / "model.safetensors"))
    batches = perplexity.windows(folder, llama.load(folder / "model.safetensors").config, 2048, 2)
    np.testing.assert_allclose(dense["loss"], train.held_out_loss(graph, params, batches), rtol=1e-4)
    np.testing.assert_allclose(dense["perplexity"], np.exp(dense["loss"]), rtol=1e-4)
    assert dense["kl"] == 0 and dense["agreement"] == 1
    assert 0 < int8["kl"] < 1e-3 < int4["kl"] and int8["agreement"] > int4["agreement"] > 0.5
    assert (int8["bits_per_weight"], int4["bits_per_weight"]) == (8.125, 4.188)
    assert "<svg" in plot.read_text() and "int4, 128" in plot.read_text()


def test_decode_benchmark_runs_without_a_gpu(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("decode_benchmark", ROOT / "benchmarks" / "decode.py")
    benchmark = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = benchmark
    spec.loader.exec_module(benchmark)
    output = tmp_path / "decode.json"
    options = ["--small", "--output", str(output), "--batch", "2", "--rounds", "1"]
    benchmark.main([*options, "--weights", "bf16"])
    benchmark.main([*options, "--weights", "int4", "--append"])
    capsys.readouterr()
    rows = {(row["weights"], row["phase"]): row for row in json.loads(output.read_text())["rows"]}
    assert set(rows) == {("int4", "decode"), ("int4", "prefill"), ("bf16", "decode"), ("bf16", "prefill")}
    for row in rows.values():
        assert row["tokens_per_s"] > 0 and row["speedup"] > 0
        assert row["peak_bytes"] > row["weight_bytes"] > 0
    assert rows["int4", "decode"]["weight_bytes"] < 0.35 * rows["bf16", "decode"]["weight_bytes"]
    with pytest.raises(ValueError, match="group_size=256 does not divide its 128 inputs"):
        benchmark.build(dataclasses.replace(benchmark.SMALL, hidden_size=128), 4, 256, "xla", "xla")
    with pytest.raises(SystemExit):
        benchmark.main([*options, "--batch", "0"])
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        benchmark.main(["--output", str(output)])


def test_sizes():
    graph, state = nnx.split(nnx.eval_shape(lambda: llama.Llama(llama.LLAMA_3_8B, rngs=nnx.Rngs(0))))
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == 8_030_261_248
    small = nnx.eval_shape(lambda: llama.Llama(llama.SMALL, rngs=nnx.Rngs(0)))
    assert 2 * sum(leaf.size for leaf in jax.tree.leaves(nnx.state(small))) < 12e6
    assert dataclasses.asdict(small.config) == dataclasses.asdict(llama.SMALL)
    for _, layer in nnx.iter_modules(small):
        if isinstance(layer, nnx.Linear):
            assert layer.in_features % 128 == 0
