"""The lab's runs on several processes."""

import json
import subprocess
import sys

import pytest
import torch
from tests.distributed import lab_work

from madam_lab import queue, records
from ranks import on_ranks


def without_clock(record):
    return {name: value for name, value in record.items() if name not in ("seconds", "started")}


@pytest.mark.parametrize("tasks", [1, pytest.param(len(lab_work.NAMES), marks=pytest.mark.slow)])
def test_two_ranks_train_a_task_to_one_record_and_stopping_them_changes_nothing(tasks, tmp_path):
    lab_work.lay_data(tmp_path)
    on_ranks(2, lab_work.work, tmp_path, tmp_path, tasks)
    for recipe in lab_work.chosen()[:tasks]:
        files = list((tmp_path / "whole" / recipe.name).glob("*.json"))
        assert len(files) == 1
        record = records.read(files[0])
        assert record["device"] == "CPU x 2"
        if recipe.name in lab_work.NAMES[:1] or recipe.task == "wikitext2":
            parts = records.read(tmp_path / "parts" / recipe.name / "0.json")
            assert without_clock(parts) == without_clock(record)
    assert not list((tmp_path / "runs").glob("*/*.pt"))
    # Digits have neither dropout nor batch norms, so that two ranks learn what one process does.
    digits = lab_work.chosen()[0]
    queue.work(
        [digits], [0], results=tmp_path / "alone", folder=tmp_path / "runs", device=torch.device("cpu"), quiet=True
    )
    alone, shared = (records.read(tmp_path / where / digits.name / "0.json") for where in ("alone", "whole"))
    for one, two in zip(alone["curve"], shared["curve"], strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cgan_madam_12bit", "cgan_adam", "imagenette_sgd"])
def test_ranks_keep_the_same_weights_whoever_moves_and_evaluate_the_whole_together(name, tmp_path):
    lab_work.lay_data(tmp_path)
    on_ranks(2, lab_work.step_and_evaluate, name, tmp_path, tmp_path)


@pytest.mark.slow
def test_torchrun_gives_one_record(tmp_path):
    where = ["--results", tmp_path / "results", "--runs", tmp_path / "runs", "--device", "cpu"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "madam_lab", "run", "digits_madam_12bit", "digits_adam", "--smoke", *map(str, where)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.count("2 done, 0 were done before, 0 left") == 1
    found = list((tmp_path / "results").glob("*/*.json"))
    assert len(found) == 2
    assert {json.loads(path.read_text())["device"] for path in found} == {"CPU x 2"}
