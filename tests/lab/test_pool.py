"""Runs in processes of their own."""

import multiprocessing
import signal
import subprocess
import sys
import types

import pytest

from madam_lab import pool, queue, ranks, recipes, records
from madam_lab.cli import main
from madam_lab.queue import Outcome


def _places(folder):
    return ["--results", str(folder / "r"), "--runs", str(folder / "u"), "--device", "cpu"]


def test_runs_side_by_side_are_the_runs_one_after_another(tmp_path, capsys):
    chosen = [recipes.get(f"digits_{kind}").overridden({"epochs": 2}) for kind in ("sgd", "madam_12bit")]
    queue.work(chosen, [0], results=tmp_path / "alone", folder=tmp_path / "runs", quiet=True)
    arguments = ["run", "digits_sgd", "digits_madam_12bit", "--set", "epochs=2", "--at-once", "2", *_places(tmp_path)]
    arguments += ["--keep", str(tmp_path / "kept")]
    assert main(arguments) == 0
    assert "2 done, 0 were done before, 0 left" in capsys.readouterr().out
    kept = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert kept == [f"digits_{kind}+epochs=2-0.safetensors" for kind in ("madam_12bit", "sgd")]
    for recipe in chosen:
        alone, beside = (
            records.read(records.path_of(recipe.name, 0, folder)) for folder in (tmp_path / "alone", tmp_path / "r")
        )
        assert beside["curve"] == alone["curve"]
    assert main(arguments) == 0
    assert "0 done, 2 were done before, 0 left" in capsys.readouterr().out


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path, capfd):
    blocked = tmp_path / "r" / "digits_sgd+epochs=1"
    blocked.parent.mkdir()
    blocked.write_text("a file where the record's folder should be")
    arguments = ["run", "digits_sgd", "digits_adam", "--set", "epochs=1", "--ahead", "1s", *_places(tmp_path)]
    assert main(arguments) == 1
    said = capfd.readouterr()
    assert "Not a directory" in said.out
    assert "digits_sgd+epochs=1 seed 0: failed" in said.out
    assert "1 done, 0 were done before, 0 left, 1 failed" in said.out
    assert "Traceback" not in said.err


def test_a_signal_makes_all_runs_save_themselves(tmp_path):
    command = [sys.executable, "-u", "-m", "madam_lab", "run", "digits_sgd", "--seeds", "0,1,2", "--at-once", "2"]
    with subprocess.Popen(
        [*command, "--set", "epochs=100000", *_places(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = ""
        while not all(f"seed {seed}: epoch 1/" in said for seed in (0, 1)):
            line = process.stdout.readline()
            assert line, said
            said += line
        process.send_signal(signal.SIGTERM)
        said = process.stdout.read()
    assert process.returncode == 130
    assert "0 done, 0 were done before, 3 left" in said
    assert sorted(path.name for path in (tmp_path / "u").rglob("*.pt")) == ["0.pt", "1.pt"]


def test_runs_save_themselves_when_whoever_began_them_is_gone(tmp_path):
    command = [sys.executable, "-u", "-m", "madam_lab", "run", "digits_sgd", "--ahead", "1s", "--set", "epochs=100000"]
    with subprocess.Popen([*command, *_places(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "epoch 1/" in process.stdout.readline()
        process.kill()
        process.stdout.read()  # which ends when the run's process does
    assert [path.name for path in (tmp_path / "u").rglob("*.pt")] == ["0.pt"]


def test_when_time_is_up_what_was_done_before_is_not_left(tmp_path, capsys):
    short = ["run", "digits_sgd", "--set", "epochs=1", *_places(tmp_path)]
    assert main(short) == 0
    assert main([*short, "--seeds", "0,1", "--at-once", "2", "--budget", "0s"]) == 0
    assert "0 done, 1 were done before, 1 left" in capsys.readouterr().out


def test_no_more_is_begun_when_all_that_was_fails(tmp_path, capfd):
    chosen = ["cifar100_madam", "cifar100_sgd", "cifar100_adam", "digits_sgd"]  # there is no such data here
    arguments = ["run", *chosen, "--set", "epochs=1", "--ahead", "1s", "--data", str(tmp_path), *_places(tmp_path)]
    assert main(arguments) == 1
    assert "0 done, 0 were done before, 2 left, 2 failed" in capfd.readouterr().out


@pytest.mark.parametrize(("left", "overlap"), [(60.0, False), (15.0, True)])
def test_the_next_run_begins_when_the_last_one_nears_its_end(monkeypatch, tmp_path, left, overlap):
    begun = []

    def begin(recipe, seed, until, how):
        """A run that has said all it will say: how long it takes, and that it is done."""
        running.append([worker.outcome is None for worker in begun])
        ours, theirs = multiprocessing.Pipe(duplex=False)
        label = f"{recipe.name} seed {seed}"
        theirs.send(left)
        theirs.send(Outcome(done=[label]))
        theirs.close()
        begun.append(pool._Worker(label, types.SimpleNamespace(join=lambda: None), ours))
        return begun[-1]

    running: list[list[bool]] = []
    monkeypatch.setattr(pool, "_begun", begin)
    chosen = [recipes.get("digits_sgd"), recipes.get("digits_adam")]
    outcome = pool.work(chosen, [0], at_once=1, ahead=16.0, results=tmp_path)
    assert outcome.done == ["digits_sgd seed 0", "digits_adam seed 0"]
    assert running == [[], [overlap]]


@pytest.mark.parametrize("option", [("--at-once", "2"), ("--compile",)])
def test_ranks_of_one_run_are_neither_runs_at_once_nor_compiled(option, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("madam_lab.ranks.here", lambda: ranks.Ranks(0, 2))
    assert main(["run", "digits_sgd", *option, *_places(tmp_path)]) == 1
    assert "not under torchrun" in capsys.readouterr().err
