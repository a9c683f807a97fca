"""The benchmarks run, and a wrong step gets no time."""

import json
import sys
import time
import warnings
from dataclasses import replace

import pytest
import torch
from benchmarks import imagenet, linear
from benchmarks.__main__ import _median, _time
from benchmarks.registry import ENTRIES, Missing
from benchmarks.training import RandomPictures, Training
from benchmarks.workloads import gpt, odd, resnet18

from compiler import needs_cc
from madam_lab.models.resnet50 import ResNet50
from torchmadam import Madam

CPU = torch.device("cpu")


def test_workloads_have_the_sizes_that_the_tables_name():
    assert (len(gpt()), round(sum(torch.Size(s).numel() for s in gpt()) / 1e9, 2)) == (163, 0.91)
    assert (len(resnet18()), round(sum(torch.Size(s).numel() for s in resnet18()) / 1e6, 1)) == (22, 11.2)


@pytest.mark.parametrize(
    "entry",
    [pytest.param(e, id=e.name, marks=needs_cc if "compile" in e.name else ()) for e in ENTRIES if "cpu" in e.devices],
)
def test_every_entry_is_timed(entry):
    assert not entry.ours or entry.check(CPU) is None
    row = _time(entry, odd(), CPU, 0.001, None, 1e9)
    assert row["ms"] > 0
    assert ("floor_ms" in row) == (entry.traffic is not None)


def test_rounds_make_one_row_with_the_median_of_their_times():
    rows = [{"name": "x", "ours": True, "ms": ms} for ms in (3.0, 9.0, 4.0)]
    assert _median(rows) == {"name": "x", "ours": True, "ms": 4.0, "each_ms": [3.0, 9.0, 4.0]}
    assert _median(rows[1:2]) == rows[1]
    missing = {"name": "x", "ours": False, "missing": "not installed"}
    assert _median([missing, missing]) == missing


def test_a_step_that_differs_from_the_reference_is_noticed_and_not_timed():
    made = []

    def drifting(params, device):
        made.append(0.01 * (2 + len(made)))
        return Madam(params, made[-1]).step

    for name in ("Madam float32", "Madam float32, compile=True", "Madam 8-bit"):
        made.clear()
        entry = replace(next(e for e in ENTRIES if e.name == name), make=drifting)
        problem = entry.check(CPU)
        assert "differ from the reference" in problem
        row = _time(entry, odd(), CPU, 0.001, problem, 1e9)
        assert "ms" not in row
        assert row["missing"].startswith("wrong")


def test_resnet50_trains_at_any_size_on_generated_pictures():
    tiny = lambda classes: ResNet50(classes, width=2, stages=(1, 1, 1, 1))  # noqa: E731
    for name, recipe in imagenet.kinds().items():
        if name in ("SGD momentum fused", "Madam 12-bit"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # zero biases on a ladder
                assert Training(recipe, CPU, RandomPictures(CPU, 2, 32, 1000, tiny)).pictures_a_second(1) > 0


def test_what_is_measured_apart_is_put_together_unless_the_code_has_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(imagenet, "ResNet50", lambda classes: ResNet50(classes, width=2, stages=(1, 1, 1, 1)))
    path = tmp_path / "cpu-imagenet.json"
    common = ["x", "--device", "cpu", "--batch", "2", "--side", "32", "--steps", "1", "--out", str(tmp_path), "--only"]
    for only in ("SGD", "float32"):
        monkeypatch.setattr(sys, "argv", [*common, only])
        imagenet.main()
    found = json.loads(path.read_text())
    assert list(found["imagenet"]["rows"]) == ["SGD momentum fused", "Madam float32"]
    path.write_text(json.dumps({**found, "source": "other"}))
    imagenet.main()
    assert list(json.loads(path.read_text())["imagenet"]["rows"]) == ["Madam float32"]


def test_what_warms_up_is_measured_at_its_full_rate():
    tiny = lambda classes: ResNet50(classes, width=2, stages=(1, 1, 1, 1))  # noqa: E731
    run = Training(imagenet.kinds()["SGD momentum fused"], CPU, RandomPictures(CPU, 2, 32, 1000, tiny))
    assert run._stepper.optimiser.param_groups[0]["lr"] == 0.1


def test_a_monitor_takes_the_time_that_a_look_takes_longer(monkeypatch):
    def look(stepper, batch):
        stepper.step(batch)
        time.sleep(0.3)

    monkeypatch.setattr("benchmarks.training.step_looked_at", look)
    tiny = lambda classes: ResNet50(classes, width=2, stages=(1, 1, 1, 1))  # noqa: E731
    recipe = imagenet.kinds()["SGD momentum fused"]
    run = Training(recipe, CPU, RandomPictures(CPU, 2, 32, 10, tiny))
    once, seldom = (run.monitor_share(1, every) for every in (1, 1000))
    assert once > 0.1  # a step takes less than three seconds
    assert 0 < seldom < once / 10


def test_a_peer_that_is_not_installed_shows_as_missing():
    def absent(params, device):
        raise Missing("not installed")

    assert _time(replace(ENTRIES[0], make=absent), odd(), CPU, 0.001, None, 1e9)["missing"] == "not installed"


def test_linear_layers_of_codes_are_timed_beside_bfloat16(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.linear._bandwidth", lambda device, seconds: 1e9)
    small = ["--device", "cpu", "--shapes", "32x64", "--batches", "1", "--ladders", "paper8", "signed8"]
    monkeypatch.setattr("sys.argv", ["linear", *small, "--seconds", "0.001", "--out", str(tmp_path)])
    linear.main()
    (found,) = json.loads((tmp_path / "cpu-linear.json").read_text())["linear"]
    assert (found["shape"], found["batch"]) == ([32, 64], 1)
    assert [row["weights"] for row in found["rows"]] == ["bfloat16", "paper8", "signed8"]
    assert all(row["ms"] > 0 and row["floor_ms"] > 0 for row in found["rows"])


def test_a_wrong_product_is_noticed_and_not_timed(monkeypatch):
    def drifting(x, weight):
        return plain(x, weight) * 1.1

    plain = torch.nn.functional.linear
    monkeypatch.setattr("benchmarks.linear.functional.linear", drifting)
    _, row = linear.measured((32, 64), 1, ["signed8"], CPU, 0.001, 1e9)
    assert "ms" not in row
    assert row["missing"].startswith("wrong")


def test_a_sweep_leaves_the_plans_as_they_were(monkeypatch, capsys):
    launch_linear = pytest.importorskip("torchmadam.kernels.launch_linear")
    before = dict(launch_linear.PLANS)
    for name, values in linear.SPACE.items():
        monkeypatch.setitem(linear.SPACE, name, values[:1])
    monkeypatch.setitem(linear.SPACE, "warps", [1, 2])
    linear.sweep((32, 64), 1, "signed8", CPU, 0.001)
    assert capsys.readouterr().out.count("32x64 batch 1 signed8") == 2
    assert before == launch_linear.PLANS
    assert launch_linear.FITTED
