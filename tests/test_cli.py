"""The command line, called in this process: what it prints, writes, refuses and leaves alone."""

import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as tree
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_wonly as jw
from jax_wonly import _abi, _cuda_dispatch, _selftest, _svg
from jax_wonly.cli import _common, main, quantize

safetensors = pytest.importorskip("safetensors.numpy")


def run(*words) -> int:
    return main([str(word) for word in words])


@pytest.fixture
def dense(rng, tmp_path):
    """A folder as PyTorch's libraries write it, with a configuration and a tokenizer."""
    folder = tmp_path / "dense"
    folder.mkdir()
    tensors = {}
    for i in range(2):
        tensors[f"model.layers.{i}.up.weight"] = rng.standard_t(4, (64, 128)).astype(np.float16)
        tensors[f"model.layers.{i}.odd.weight"] = rng.normal(size=(64, 100)).astype(np.float16)
        tensors[f"model.layers.{i}.norm.weight"] = np.ones(128, np.float16)
    tensors["head.kernel"] = rng.normal(0.1, 1, (128, 64)).astype(np.float32)
    tensors["model.embed_tokens.weight"] = rng.normal(size=(40, 128)).astype(np.float16)
    tensors["model.position_ids"] = np.arange(64)[None]
    safetensors.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder, tensors


def relative(found, exact) -> float:
    exact = exact.astype(np.float64)
    return float(np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact))


def test_quantize_inspect_convert_compare(dense, tmp_path, capsys):
    folder, tensors = dense
    out, report = tmp_path / "out", tmp_path / "report.json"
    assert run("quantize", folder, out, "--group-size", "64", "--algorithm", "absmax", "--report", report) == 0
    text = capsys.readouterr().out
    assert "3 of 7 layers quantized" in text and "groups of 64 do not divide its inputs" in text
    assert {p.name for p in out.iterdir()} == {"model.safetensors", "config.json", "tokenizer.json"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dense", "out", "report.json"]
    ck = jw.checkpoint.load(out)
    assert set(ck) == set(tensors)
    errors = {layer["path"]: layer["relative_error"] for layer in json.loads(report.read_text())["layers"]}
    for name, value in tensors.items():
        if name in errors:
            exact = value if name.endswith("kernel") else value.T
            expected = jw.quantize(jnp.asarray(exact), bits=4, group_size=64)
            np.testing.assert_array_equal(ck[name].qvalue, expected.qvalue)
            assert errors[name] == pytest.approx(relative(ck[name].dequantize(jnp.float32), exact), rel=2e-3)
        else:
            np.testing.assert_array_equal(ck[name], value)

    assert run("inspect", out) == 0
    text = capsys.readouterr().out
    assert "model.layers.*.up.weight  x 2" in text and "4 bits, groups of 64" in text
    assert run("inspect", out, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["format"] == "jax_wonly" and {t["name"] for t in facts["tensors"]} == set(tensors)

    for target in ("gptq", "jax_wonly"):
        there = tmp_path / target
        assert run("convert", out, there, "--to", target, "--quiet") == 0
        config = json.loads((there / "config.json").read_text())
        assert config["model_type"] == "llama" and ("quantization_config" in config) == (target != "jax_wonly")
        assert (there / "tokenizer.json").is_file()
        assert jw.checkpoint.load(there).format == target
        capsys.readouterr()
        assert run("compare", out, there, "--json", "-") == 0
        facts = json.loads(capsys.readouterr().out)
        assert not facts["missing"] and not facts["unexpected"]
        assert {row["error"] for row in facts["tensors"]} == {0.0}

    plot = tmp_path / "plot.svg"
    assert run("compare", folder, tmp_path / "gptq", "--plot", plot, "--quiet") == 0
    text = capsys.readouterr().out
    assert "9 tensors in both, 6 of them equal" in text and f"{max(errors.values()):.3%}" in text
    assert "<svg" in plot.read_text() and "model.layers.1.up.weight" in plot.read_text()
    assert run("compare", folder, out, "--quiet", "--fail-above", min(errors.values()) / 2) == 1
    assert run("compare", folder, out, "--quiet", "--fail-above", 1.0) == 0


@pytest.mark.parametrize(("algorithm", "mode"), [("minmax", "offsets"), ("mse", None)])
def test_algorithms(dense, tmp_path, algorithm, mode):
    folder, tensors = dense
    out = tmp_path / "out.safetensors"
    options = ["--mode", mode] if mode else []
    patterns = ["--include", "kernel"]
    assert run("quantize", folder, out, "--algorithm", algorithm, *options, *patterns, "--bits", 8, "--quiet") == 0
    function = getattr(jw.algorithms, algorithm)
    expected = function(jnp.asarray(tensors["head.kernel"]), bits=8, **({"mode": mode} if mode else {}))
    ck = jw.checkpoint.load(out)
    np.testing.assert_array_equal(ck["head.kernel"].qvalue, expected.qvalue)
    assert [name for name in ck if ck.info(name).bits] == ["head.kernel"]


def test_an_interrupted_command_goes_on(dense, tmp_path, monkeypatch, capsys):
    folder, _ = dense
    done: list[str] = []
    original = quantize._quantize_one

    def stops(checkpoint, name, *rest):
        if len(done) == 2:
            raise KeyboardInterrupt
        original(checkpoint, name, *rest)
        done.append(name)

    words = ("quantize", folder, tmp_path / "out", "--group-size", 32, "--algorithm", "absmax")
    monkeypatch.setattr(quantize, "_quantize_one", stops)
    assert run(*words) == 130
    assert not (tmp_path / "out").exists() and (tmp_path / "out.partial").is_dir()
    first = list(done)
    done[:] = []
    assert run(*words) == 0
    assert "2 of 3 layers are in" in capsys.readouterr().err
    assert len(done) == 1 and done[0] not in first
    assert not (tmp_path / "out.partial").exists()
    monkeypatch.setattr(quantize, "_quantize_one", original)
    assert run("quantize", folder, tmp_path / "whole", *words[3:], "--quiet") == 0
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


def test_layers_of_another_command_are_not_taken(dense, tmp_path, monkeypatch):
    folder, _ = dense
    out = tmp_path / "out"
    original = quantize._quantize_one
    calls = []

    def stops(checkpoint, name, *rest):
        if calls:
            raise KeyboardInterrupt
        calls.append(name)
        original(checkpoint, name, *rest)

    monkeypatch.setattr(quantize, "_quantize_one", stops)
    assert run("quantize", folder, out, "--algorithm", "absmax", "--group-size", 32, "--quiet") == 130
    monkeypatch.setattr(quantize, "_quantize_one", original)
    assert run("quantize", folder, out, "--algorithm", "absmax", "--group-size", 64, "--quiet") == 0
    ck = jw.checkpoint.load(out)
    assert {ck.info(name).group_size for name in ck if ck.info(name).bits} == {64}


def test_bad_input_gives_one_sentence(dense, tmp_path, capsys):
    folder, tensors = dense
    file = folder / "model.safetensors"
    (tmp_path / "cut.safetensors").write_bytes(file.read_bytes()[:-100])
    (tmp_path / "pickle.bin").write_bytes(b"\x80\x04.")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("dear")
    (tmp_path / "blocked.partial").mkdir()
    assert run("quantize", folder, tmp_path / "q", "--quiet", "--algorithm", "absmax") == 0
    names = {p.name for p in tmp_path.iterdir()}
    out = tmp_path / "new"
    for words, said in [
        (("inspect", tmp_path / "absent"), "absent does not exist"),
        (("inspect", tmp_path / "cut.safetensors"), "not a sound safetensors file"),
        (("inspect", tmp_path / "pickle.bin"), "pickle"),
        (("inspect", tmp_path / "empty"), "safetensors"),
        (("quantize", tmp_path / "absent", out), "absent does not exist"),
        (("quantize", tmp_path / "cut.safetensors", out), "not a sound safetensors file"),
        (("quantize", folder, out, "--include", "nothing_like_it"), "matches none of the 9 tensors"),
        (("quantize", folder, out, "--exclude", "(", "--quiet"), "is not a regular expression"),
        (("quantize", folder, out, "--exclude", "."), "nothing in"),
        (("quantize", folder, out, "--group-size", 48), "group_size=48"),
        (("quantize", folder, out, "--algorithm", "gptq"), "needs calibration data"),
        (("quantize", folder, out, "--algorithm", "hqq", "--mode", "symmetric"), "accepted: float_zeros"),
        (("quantize", folder, tmp_path / "q"), "exists; --force replaces it"),
        (("quantize", folder, tmp_path / "mine", "--force"), "no checkpoint of safetensors"),
        (("quantize", folder, tmp_path / "blocked"), "in the way"),
        (("quantize", folder, folder / "inner"), "lie in each other"),
        (("quantize", folder, tmp_path, "--force"), "lie in each other"),
        (("quantize", folder, tmp_path / "no/where"), "is not a folder"),
        (("quantize", tmp_path / "q", out), "quantized already"),
        (("convert", folder, out, "--to", "gptq"), "holds no quantized weight"),
        (("convert", tmp_path / "q", tmp_path / "x.safetensors", "--to", "gptq", "--quiet"), "a folder"),
        (("compare", folder, tmp_path / "absent"), "absent does not exist"),
        (("compare", folder, tmp_path / "q", "--plot", tmp_path / "no/p.svg", "--quiet"), "is not a folder"),
        (("bench", "--shapes", "100x64", "--rows", 1), "does not divide K = 100"),
        (("bench", "--shapes", "big"), "is no shape"),
        (("bench", "--rows", 0), "whole number"),
        (("nonsense",), "invalid choice"),
        ((), "required"),
    ]:
        capsys.readouterr()
        assert run(*words) == 2, words
        text = capsys.readouterr().err
        assert said in text and "Traceback" not in text, (words, text)
        if "usage:" not in text:
            assert len([line for line in text.splitlines() if "[" not in line]) == 1, text
    assert {p.name for p in tmp_path.iterdir()} == names
    assert set(jw.checkpoint.load(tmp_path / "q")) == set(tensors)


def test_what_stood_at_out_is_kept_unless_all_went_well(dense, tmp_path, monkeypatch, capsys):
    folder, _ = dense
    out = tmp_path / "out"
    words = ("quantize", folder, out, "--quiet", "--algorithm", "absmax")
    assert run(*words) == 0
    before = (out / "model.safetensors").read_bytes()
    again = (*words, "--force", "--bits", 8)
    monkeypatch.setattr(quantize, "copy_companions", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert run(*again) == 2
    assert "No space left" in capsys.readouterr().err
    assert (out / "model.safetensors").read_bytes() == before
    monkeypatch.undo()
    assert run(*again) == 0
    assert (out / "model.safetensors").read_bytes() != before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dense", "out"]


def test_act_order_and_other_layouts(rng, tmp_path, capsys):
    """What is permuted compares as what it stands for, and inputs-first matrices are not transposed."""
    w = rng.normal(size=(128, 128)).astype(np.float32)
    safetensors.save_file({"a.weight": w}, tmp_path / "a.safetensors")
    out, quick = tmp_path / "b.safetensors", ("--algorithm", "absmax", "--quiet")
    assert run("quantize", tmp_path / "a.safetensors", out, "--layout", "inputs-first", "--bits", 8, *quick) == 0
    weight = jw.checkpoint.load(out)["a.weight"]
    assert relative(weight.dequantize(), w) < 0.02
    order = np.argsort(rng.random(128)).astype(np.int32)
    inner = jw.quantize(jnp.asarray(w.T[order]), bits=8, group_size=32)
    jw.checkpoint.save(tmp_path / "p", {"a.weight": jw.PermutedTensor(inner, jnp.asarray(order))})
    capsys.readouterr()
    assert run("compare", tmp_path / "a.safetensors", tmp_path / "p", "--json", "-") == 0
    (row,) = json.loads(capsys.readouterr().out)["tensors"]
    assert row["error"] == pytest.approx(relative(inner.dequantize(), w.T[order]), rel=1e-4) and row["error"] < 0.02


def test_info(capsys):
    assert run("info") == 0
    assert "cpu: registered" in capsys.readouterr().out
    assert run("info", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["jax_wonly"] == jw.__version__
    assert facts["modules"]["cpu"]["chosen"] in facts["modules"]["cpu"]["instruction_sets"]
    assert [row["path"] for row in facts["chosen"]["rows"]] == ["kernel"] * 5


def few(cases, count=1):
    return {target: lambda *a, f=f: itertools.islice(f(*a), count) for target, f in cases.items()}


def test_doctor(tmp_path, monkeypatch, capsys):
    assert set(_abi.TARGETS) | set(_selftest.registered("cpu")) <= set(_selftest.CASES)
    monkeypatch.setattr(_selftest, "CASES", few(_selftest.CASES))
    assert run("doctor", "--json", tmp_path / "d.json") == 0
    text = capsys.readouterr().out
    assert "all is well" in text and "skipped: kernels on cuda: JAX has no such device here" in text
    found = json.loads((tmp_path / "d.json").read_text())
    assert {row["target"] for row in found["results"]} == {*_selftest.registered("cpu"), "XLA's operations"}
    from jax_wonly import _cpu

    assert {row["variant"] for row in found["results"] if row["target"] == _abi.MATMUL} == set(_cpu.isas())
    default = _cpu.active_isa()
    _cpu.force_isa("")
    assert _cpu.active_isa() == default


def test_doctor_reaches_every_kernel_of_a_gpu():
    cases = _selftest.CASES[_abi.MATMUL](np.random.default_rng(0), "cuda")
    assert {case.kernel for case in cases} == {
        f"matmul_{name}" for name in ("decode", "resident", "stream", "tiled", "warpgroup")
    }


@pytest.mark.parametrize("capability", ["7.5", "8.0", "9.0", "10.0"])
def test_doctor_tests_what_a_gpu_has(monkeypatch, capability):
    """Its cases call what they test on every GPU, and reach what kernels that has."""
    monkeypatch.setattr(_selftest._ffi, "ensure_registered", lambda: {"cpu": None, "cuda": None})
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: (capability, 132))
    kernels = {}
    for target in (
        *(_abi.MATMUL, _abi.MATMUL_TRANSPOSED, _abi.RAGGED_MATMUL, _abi.RAGGED_MATMUL_TRANSPOSED),
        *(_abi.CONV, _abi.DIRECT_CONV, _abi.SCALES_GRADIENT),
    ):
        cases = list(_selftest.CASES[target](np.random.default_rng(0), "cuda"))
        for case in cases[:: 7 if target == _abi.MATMUL else 1]:
            lowered = jax.jit(case.function).trace(*case.operands).lower(lowering_platforms=("cuda",))
            assert f"@{target}(" in lowered.as_text(), (target, case.what)
        kernels[target] = {case.kernel for case in cases}
    stream, back = {"matmul_stream"}, {"matmul_transposed_stream"}
    hopper, newer = capability == "9.0", capability != "7.5"
    several = stream | {"ragged_resident", "ragged_warpgroup", "ragged_tiled"}
    assert kernels[_abi.RAGGED_MATMUL] == (several if hopper else stream)
    backs = back | {"matmul_transposed_warpgroup"} if hopper else back if newer else set()
    assert kernels[_abi.RAGGED_MATMUL_TRANSPOSED] == backs
    assert bool(kernels[_abi.MATMUL_TRANSPOSED]) == newer and bool(kernels[_abi.CONV]) == hopper
    assert kernels[_abi.MATMUL] and kernels[_abi.DIRECT_CONV] and bool(kernels[_abi.SCALES_GRADIENT]) == hopper


def test_doctor_finds_what_is_wrong(monkeypatch, capsys):
    real = _selftest.matmul
    monkeypatch.setattr(_selftest, "CASES", few(_selftest.CASES))
    monkeypatch.setattr(_selftest, "registered", lambda platform: [_abi.MATMUL])
    monkeypatch.setattr(_selftest, "matmul", lambda *a, **k: real(*a, **k) * 1.02)
    assert run("doctor") == 1
    text = capsys.readouterr().out
    assert "FAILED" in text and "times what is allowed" in text
    monkeypatch.setattr(_selftest, "matmul", lambda x, *a, **k: real(x, *a, **k | {"implementation": "xla"}))
    monkeypatch.setattr(_selftest, "registered", lambda platform: [_abi.MATMUL, "wonly_new_v1"])
    assert run("doctor") == 1
    text = capsys.readouterr().out
    assert "does not call wonly_matmul_v1" in text and "wonly_new_v1 is registered on cpu, and nothing tests it" in text


def test_bench(tmp_path, capsys):
    files = tmp_path / "b.json", tmp_path / "b.svg"
    words = ("--shapes", "256x128", "--rows", 1, 5, "--bits", 8, "--seconds", 0.05, "--json", files[0], "--plot")
    assert run("bench", *words, files[1]) == 0
    text = capsys.readouterr().out
    assert "256 x 128" in text and "int8 g128" in text
    report = json.loads(files[0].read_text())
    assert [(row["bits"], row["m"]) for row in report["rows"]] == [(8, 1), (8, 5)]
    for row in report["rows"]:
        assert min(row["us"], row["dense_us"], row["xla_us"], row["core_ratio"]) > 0
        assert row["ratio"] == pytest.approx(row["dense_us"] / row["us"], rel=0.02)
    assert files[1].read_text().count("<circle") == 2


class Terminal:
    encoding = "utf-8"

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return True


def test_colour_only_where_the_terminal_has_it(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def printed():
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        _common.print_table(("name", "share"), [("a", _common.bar(0.5, 4))], ["red"])
        return terminal.text

    text = printed()
    assert "\x1b[31m" in text and "\u2588\u2588" in text
    monkeypatch.setenv("NO_COLOR", "1")
    text = printed()
    assert "\x1b" not in text and "\u2588" not in text


def test_a_closed_pipe_is_no_error(dense):
    command = f"{sys.executable} -m jax_wonly inspect {dense[0]} --all | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert done.stdout.count("\n") == 1 and not done.stderr and done.returncode == 0


def test_charts():
    """Points lie where their values say, and names cannot break the markup."""
    series = [_svg.Series("<a>", [(1, 1.0), (4, 3.0)], ["one & one"])]
    text = _svg.line_chart(series, x_label="x", y_label="y", log_x=True, reference=(2.0, "middle"))
    tree.fromstring(text)
    (x0, y0), (x1, y1) = (map(float, p) for p in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', text))
    at = float(re.search(r'M64 ([\d.]+)H544" stroke="#555"', text)[1])
    assert x0 < x1 and y0 > at > y1 and at == pytest.approx((y0 + y1) / 2, abs=0.2)
    tree.fromstring(_svg.line_chart([_svg.Series("p", [(3, 0.0)])], x_label="", y_label="", log_x=True))
    text = _svg.bar_chart([("a<b", 2.0), ("c", 1.0), ("d", 0.0)], label="l", unit="%")
    tree.fromstring(text)
    widths = [float(w) for w in re.findall(r'width="([\d.]+)" height="16"', text)]
    assert widths[0] == pytest.approx(2 * widths[1]) and widths[2] == 0


def test_the_page_shows_what_is_printed(tmp_path, monkeypatch, capsys):
    """The console blocks of docs/cli.md, in turn, on the language model of the examples."""
    root = Path(__file__).parents[1]
    shutil.copytree(root / "examples/llm/checkpoint", tmp_path / "lm")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```console\n\$ jax-wonly (.*)\n((?:.*\n)*?)```", (root / "docs/cli.md").read_text())
    assert len(blocks) == 6
    for command, said in blocks:
        status = main(shlex.split(command))
        printed = capsys.readouterr()
        assert printed.out + printed.err == said
        assert status == (2 if printed.err else 0)
