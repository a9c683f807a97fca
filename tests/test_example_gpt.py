"""The language model of examples/gpt: every method, every command, and stopping at any step."""

import importlib.util
import json
import os
import random
import signal
import subprocess
from contextlib import nullcontext
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from examples.gpt import memory as memory_command
from examples.gpt.__main__ import main
from examples.gpt.data import Bytes, Corpus, restored
from examples.gpt.methods import METHODS, Method, build, training_step
from examples.gpt.model import Shape
from examples.gpt.sample import read
from examples.gpt.train import Run

import torchmadam

CPU = torch.device("cpu")
MODEL = ["--layers", "2", "--width", "16", "--heads", "2", "--length", "16", "--device", "cpu"]
needs_tokenizers = pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="needs tokenizers")


@pytest.fixture
def text(tmp_path):
    words = random.Random(0).choices(["the", "cat", "sat", "on", "a", "mat,", "thé", "and", "slept.\n"], k=1500)
    path = tmp_path / "text.txt"
    path.write_text(" ".join(words), encoding="utf-8")
    return path


def train(tmp_path, text, *arguments, name="run", status=0):
    files = ["--text", str(text), "--out", str(tmp_path / f"{name}.json"), "--checkpoint", str(tmp_path / f"{name}.pt")]
    assert main(["train", *files, *MODEL, "--batch", "8", "--valid-tokens", "256", *arguments]) == status
    return tmp_path / f"{name}.json", tmp_path / f"{name}.pt"


def stop_at(monkeypatch, step):
    """The process gets a signal in the middle of this step."""
    advance = Run._advance

    def advanced(run):
        if run.step + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return advance(run)

    monkeypatch.setattr(Run, "_advance", advanced)


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_same(left, right)
    elif isinstance(a, torchmadam.LadderTensor):
        assert a.coding == b.coding
        assert torch.equal(a.codes(), b.codes())
        assert torch.equal(a.limit, b.limit)
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_and_its_record_says_what_ran(method, tmp_path, text):
    arguments = ["--method", method, "--steps", "12", "--valid-every", "4", "--seed", "3"]
    out, _ = train(tmp_path, text, *arguments, *(["--release"] if method == "madam-signed8" else []))
    found = json.loads(out.read_text())
    first, middle, last = found["curve"]
    assert first["train"] > middle["train"] > last["train"]
    assert first["valid"] > middle["valid"] > last["valid"]
    assert found["status"] == "finished"
    assert found["perplexity"] == pytest.approx(np.exp(last["valid"]))
    assert last["bits_per_byte"] == pytest.approx(last["valid"] / np.log(2))  # a byte is a token here
    assert found["tokens"] == 12 * 8 * 16
    settings = found["settings"]
    assert (settings["method"]["name"], settings["seed"], settings["shape"]["width"]) == (method, 3, 16)
    assert settings["method"]["lr"] == (3e-4 if method.startswith("adamw") else 0.01)
    count = 256 * 16 + 2 * (12 * 16**2 + 2 * 16) + 16
    held = found["bytes"]
    assert held["weights"] == count
    each = {"adamw": (4, 8, 4), "adamw-bf16": (2, 4, 2), "madam": (4, 4, 4), "madam-12bit": (0, 4, 2)}
    floats, moments, gradients = each.get(method, (0, 4, 0))
    assert (held["floats"], held["moments"], held["gradients"]) == (floats * count, moments * count, gradients * count)
    assert (held["codes"] > 0) == (floats == 0)
    assert held["total"] == sum(size for kind, size in held.items() if kind not in ("weights", "total"))
    assert found["peak"] > held["total"]
    assert {"commit", "dirty", "source", "versions", "device", "started", "seconds", "text"} <= found.keys()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--method", "adamw"],
        ["--method", "madam-12bit"],
        ["--method", "madam-12bit", "--release", "--checkpoint-activations", "--no-tied"],
    ],
    ids=" ".join,
)
def test_a_run_that_was_stopped_ends_as_one_that_was_not_bit_for_bit(arguments, tmp_path, text, monkeypatch):
    arguments = [*arguments, "--steps", "7", "--valid-every", "3"]
    _, whole = train(tmp_path, text, *arguments, name="whole")
    with monkeypatch.context() as patched:
        stop_at(patched, 5)
        out, halves = train(tmp_path, text, *arguments, name="halves", status=130)
    assert read(halves)["step"] == 5
    assert not out.exists()
    train(tmp_path, text, *arguments, name="halves", status=2)  # without --resume it would begin again
    train(tmp_path, text, *arguments, "--resume", name="halves")
    a, b = read(whole), read(halves)
    for name in ("settings", "text", "step", "model", "optimiser", "random", "loss"):
        assert_same(a[name], b[name])
    for p, q in zip(a["curve"], b["curve"], strict=True):
        assert {**p, "seconds": 0} == {**q, "seconds": 0}


def test_a_run_that_crashed_goes_on_from_its_last_checkpoint(tmp_path, text, monkeypatch):
    arguments = ["--method", "madam", "--release", "--steps", "6", "--save-steps", "2", "--deterministic"]
    advance = Run._advance

    def crashing(run):
        if run.step == 5:
            raise ZeroDivisionError
        return advance(run)

    try:
        _, whole = train(tmp_path, text, *arguments, name="whole")
        with monkeypatch.context() as patched:
            patched.setattr(Run, "_advance", crashing)
            with pytest.raises(ZeroDivisionError):
                train(tmp_path, text, *arguments, name="crashed")
        assert read(tmp_path / "crashed.pt")["step"] == 4
        _, crashed = train(tmp_path, text, *arguments, "--resume", name="crashed")
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(read(whole)["model"], read(crashed)["model"])


def test_resuming_with_other_arguments_or_another_text_is_refused(tmp_path, text, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        stop_at(patched, 1)
        train(tmp_path, text, "--method", "madam", "--steps", "3", status=130)
    train(tmp_path, text, "--method", "madam", "--steps", "4", "--resume", status=2)
    assert "begun with another steps" in capsys.readouterr().err
    text.write_text(text.read_text(encoding="utf-8") + "more", encoding="utf-8")
    train(tmp_path, text, "--method", "madam", "--steps", "3", "--resume", status=2)
    assert "begun with another text" in capsys.readouterr().err


def test_what_cannot_work_is_refused_before_training(tmp_path, text, capsys):
    train(tmp_path, text, "--method", "adamw", "--release", status=2)
    assert "--moment and --release are Madam's" in capsys.readouterr().err
    train(tmp_path, text, "--length", "100000", status=2)
    assert "use more text" in capsys.readouterr().err
    train(tmp_path, text, "--tokens", "words", status=2)
    assert "use bytes, or bpe:8192" in capsys.readouterr().err
    train(tmp_path, text, "--heads", "3", status=2)
    assert "make it a multiple of 6" in capsys.readouterr().err
    (tmp_path / "run.json").write_text("{}")
    train(tmp_path, text, status=2)
    assert "records are written once" in capsys.readouterr().err


def test_checkpointed_activations_change_no_weight(tmp_path, text):
    arguments = ["--method", "madam-signed8", "--steps", "2"]
    _, plain = train(tmp_path, text, *arguments, name="plain")
    _, checkpointed = train(tmp_path, text, *arguments, "--checkpoint-activations", name="checkpointed")
    assert_same(read(plain)["model"], read(checkpointed)["model"])


@pytest.mark.parametrize("release", [False, True])
def test_tied_weights_are_one_parameter_that_is_stepped_once(release):
    shape = Shape(1, 16, 2, vocabulary=50, length=8)
    method = Method.of("madam-12bit", release=release)
    model, optimiser = build(shape, method, CPU, seed=0)
    before = model.embedding.weight.codes()
    tokens = torch.arange(8)[None]  # so that only the output's gradient reaches the other 42 rows
    for _ in range(2):
        training_step(model, optimiser, method, tokens, tokens.roll(1, 1))
    assert {int(state["step"]) for state in optimiser.state.values()} == {2}
    moved = (model.embedding.weight.codes() != before).any(1)
    assert moved.all()
    assert "output.weight" not in model.state_dict()
    untied, _ = build(Shape(1, 16, 2, vocabulary=50, length=8, tied=False), method, CPU, seed=0)
    assert torchmadam.memory(untied).weights == torchmadam.memory(model).weights + 50 * 16


def test_blocks_of_a_coded_model_start_from_codes_of_their_own_and_know_their_names():
    model, _ = build(Shape(2, 16, 2, vocabulary=50, length=8), Method.of("madam-12bit"), CPU, seed=0)
    first, second = (block.up.weight for block in model.blocks)
    assert (first.codes() != second.codes()).float().mean() > 0.9
    assert second.label == "blocks.1.up.weight"
    assert all(isinstance(p, torchmadam.LadderTensor) and p.dtype == torch.bfloat16 for p in model.parameters())


def test_attention_sees_no_future_and_positions_matter():
    model, _ = build(Shape(2, 16, 2, vocabulary=50, length=8), Method.of("madam"), CPU, seed=0)
    tokens = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5], [2, 1, 3, 4]])
    with torch.no_grad():
        logits = model(tokens)
    assert torch.equal(logits[0, :3], logits[1, :3])
    assert not torch.allclose(logits[0, 3], logits[2, 3])


def test_learning_rates_rise_and_fall_to_nothing():
    adamw = Method.of("adamw", warmup=0.2)
    rates = [adamw.lr_at(step, 10) / adamw.lr for step in range(11)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.5)  # halfway down a cosine
    assert rates[10] == pytest.approx(0.0)
    assert sorted(rates[2:], reverse=True) == rates[2:]
    madam = Method.of("madam")
    assert [madam.lr_at(step, 4) for step in range(4)] == [0.01, 0.0075, 0.005, 0.0025]


def test_an_epoch_sees_every_window_once_and_the_next_one_in_another_order(text):
    corpus = Corpus([text], "bytes", 0.1)
    steps = (len(corpus.train) - 16) // 16 // 4
    rows = {tuple(row.tolist()) for step in range(steps) for row in corpus.batch(step, 4, 16, 0)[0]}
    windows = {tuple(corpus.train[i : i + 16].tolist()) for i in range(len(corpus.train))}
    assert rows <= windows
    epochs = [torch.cat([corpus.batch(e * steps + s, 4, 16, 0)[0] for s in range(steps)]) for e in (0, 1)]
    assert len(epochs[0]) == 4 * steps
    assert not torch.equal(*epochs)
    inputs, targets = corpus.batch(steps - 1, 4, 16, 0)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_bytes_round_trip(text):
    data = text.read_bytes()
    assert Bytes().decode(Bytes().encode(data).tolist()).encode() == data
    assert restored(None).vocabulary == 256


@needs_tokenizers
def test_bpe_round_trips_is_shorter_than_bytes_and_can_be_restored(tmp_path, text):
    corpus = Corpus([text], "bpe:300", 0.1)
    data = text.read_bytes()
    assert 256 < corpus.tokenizer.vocabulary <= 300
    again = restored(corpus.tokenizer.saved)
    for strange in (data, "naïve 😀\r\n\ttabs  and   spaces".encode()):  # bytes that the text has not
        tokens = again.encode(strange)
        assert np.array_equal(tokens, corpus.tokenizer.encode(strange))
        assert again.decode(tokens.tolist()).encode() == strange
    assert len(again.encode(data)) < len(data) / 2
    assert corpus.bytes_per_token > 2
    out, checkpoint = train(tmp_path, text, "--method", "madam", "--tokens", "bpe:300", "--steps", "4")
    last = json.loads(out.read_text())["curve"][-1]
    assert last["bits_per_byte"] < last["valid"] / np.log(2) / 2
    assert read(checkpoint)["tokenizer"] is not None
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"\xff\xfe" * 100)
    with pytest.raises(ValueError, match="is no UTF-8"):
        Corpus([bad], "bpe:300", 0.1)


def test_without_tokenizers_the_error_says_what_to_install(text, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ImportError, match="pip install tokenizers"):
        Corpus([text], "bpe:300", 0.1)


def test_sampling_continues_the_prompt_in_the_text_it_has_learnt(tmp_path, text, capsys):
    _, checkpoint = train(tmp_path, text, "--method", "madam", "--lr", "0.1", "--steps", "60")
    capsys.readouterr()
    command = [
        "sample",
        "--checkpoint",
        str(checkpoint),
        "--device",
        "cpu",
        "--prompt",
        "the cat",
        "--count",
        "40",
        "--top",
        "5",
    ]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert first.startswith("the cat")
    assert len(first.encode()) >= 40
    assert set(first) <= set(text.read_text(encoding="utf-8")) | {"\N{REPLACEMENT CHARACTER}"}
    assert main([*command, "--seed", "1"]) == 0
    assert capsys.readouterr().out != first
    assert main([*command, "--temperature", "0", "--top", "0"]) == 0
    assert main(["sample", "--checkpoint", str(text), "--device", "cpu"]) == 2
    assert "is no checkpoint of this program" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["adamw-bf16", "madam-12bit"])
def test_memory_mode_prints_the_numbers_of_torchmadam_memory(method, tmp_path, capsys):
    out = tmp_path / "memory.json"
    assert main(["memory", *MODEL, "--vocabulary", "64", "--method", method, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    model, optimiser = build(Shape(2, 16, 2, 64, 16), Method.of(method), CPU, seed=0)
    training_step(model, optimiser, Method.of(method), torch.zeros(1, 16, dtype=torch.int64), torch.ones(1, 16).long())
    expected = torchmadam.memory(model, optimiser)
    assert str(expected) in printed
    found = json.loads(out.read_text())
    assert (found["parameters"], found["bytes"]["total"]) == (expected.weights, expected.total)
    assert f"{found['peak']:,}" in printed
    assert found["tokens"] / found["seconds"] > 0


def test_an_eight_bit_second_moment_is_passed_on(tmp_path, text):
    out, _ = train(tmp_path, text, "--method", "madam-12bit", "--moment", "8bit", "--steps", "6", "--valid-every", "3")
    found = json.loads(out.read_text())
    assert found["bytes"]["moments"] < 2 * found["bytes"]["weights"]
    assert found["curve"][0]["train"] > found["curve"][1]["train"]


def test_a_model_that_does_not_fit_ends_with_a_status_of_its_own(monkeypatch, tmp_path, capsys):
    command = ["memory", *MODEL, "--out", str(tmp_path / "memory.json")]
    for error, status in (
        (torch.OutOfMemoryError("tried to allocate"), 3),
        (RuntimeError("Triton Error [CUDA]: out of memory"), 3),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), 3),
        (RuntimeError("misaligned address"), None),
    ):
        monkeypatch.setattr(memory_command, "measure", Mock(side_effect=error))
        if status is None:
            with pytest.raises(RuntimeError, match="misaligned"):
                main(command)
        else:
            assert main(command) == status
    assert not (tmp_path / "memory.json").exists()
    assert "too large for CPU" in capsys.readouterr().err


@pytest.mark.parametrize(("capacity", "limit"), [(21.5, 21), (21.5, 19), (3.0, 25), (1000.0, 1), (0.5, 2), (5e5, 67)])
@pytest.mark.parametrize("power", [1, 3])
def test_the_largest_model_is_found_even_where_the_guess_is_wrong(power, capacity, limit, monkeypatch):
    tried = []

    def probe(arguments, layers, width):
        tried.append((layers, width))
        size = layers**power
        return {"parameters": size, "peak": size + 5, "capacity": capacity} if layers <= limit else None

    monkeypatch.setattr(memory_command, "_probe", probe)
    found = memory_command.largest([], 256 if power == 1 else None)
    assert found["parameters"] == limit**power
    assert dict(tried)[limit] == (256 if power == 1 else 128 * limit)
    assert len(tried) == len(found["probes"]) == len(set(tried))
    assert limit + 1 in {layers for layers, _ in tried}


def test_the_largest_model_takes_few_probes_where_memory_grows_evenly(monkeypatch):
    def probe(arguments, layers, width):
        parameters = 12 * layers * width**2 + 32768 * width
        peak = 2.1 * parameters + 24 * width**2 + 10**9
        return {"parameters": parameters, "peak": peak, "capacity": 150e9} if peak < 149e9 else None

    monkeypatch.setattr(memory_command, "_probe", probe)
    assert len(memory_command.largest([], None)["probes"]) <= 6


def test_nothing_fitting_and_failures_other_than_memory_are_errors(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(memory_command, "_probe", lambda arguments, layers, width: None)
    with pytest.raises(RuntimeError, match="not even a model of one layer"):
        memory_command.largest([], None)
    monkeypatch.undo()
    for status, error in ((3, None), (1, "for another reason than memory:\nwrong")):
        with monkeypatch.context() as patched:
            done = subprocess.CompletedProcess([], status, stderr="wrong")
            patched.setattr(subprocess, "run", Mock(return_value=done))
            with nullcontext() if error is None else pytest.raises(RuntimeError, match=error):
                assert memory_command._probe([], 1, 128) is None
    arguments = ["--vocabulary", "64", "--length", "16", "--device", "cpu", "--method", "adamw"]
    assert memory_command._probe(arguments, 1, 128)["parameters"] == 64 * 128 + 12 * 128**2 + 3 * 128
    assert main(["memory", "--largest", "--device", "cpu", "--out", str(tmp_path / "largest.json")]) == 2
    assert "--largest fills a GPU" in capsys.readouterr().err
