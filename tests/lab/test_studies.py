"""Studies: what they measure, their records, and that training is not touched by a monitor."""

import json
import math
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from madam_lab import queue, recipes, records, studies
from madam_lab.cli import main
from madam_lab.models.mlp import deep_mlp
from madam_lab.progress import Progress
from madam_lab.report.numbers import problems
from madam_lab.studies import largest
from madam_lab.studies.breakdown import DIRECTIONS, digits_for
from madam_lab.trainer import Limits, Run, Stopped
from torchmadam import Madam


@pytest.mark.parametrize("name", studies.names())
def test_the_smoke_variant_of_every_study_runs_repeats_itself_and_leaves_a_record(name, tmp_path):
    study = studies.get(name).as_smoke()
    said = []
    outcome = queue.work([study], [0, 1], results=tmp_path, folder=tmp_path / "runs", say=said.append)
    assert outcome.done == [f"{name}+smoke seed 0", f"{name}+smoke seed 1"]
    record = records.read(tmp_path / f"{name}+smoke" / "0.json")
    assert f"{name}+smoke seed 0: {len(record['points'])} points" in said[0]
    assert record["settings"]["smoke"]
    assert record["points"] == study.measure(seed=0, **study.options)
    assert record["points"] != records.read(tmp_path / f"{name}+smoke" / "1.json")["points"]
    assert problems(tmp_path) == ([], 2)
    assert queue.work([study], [0], results=tmp_path, folder=tmp_path / "runs").skipped == [f"{name}+smoke seed 0"]


def test_a_step_of_size_s_may_break_l_layers_by_what_the_product_says():
    study = studies.get("breakdown_tanh").as_smoke()
    points = study.measure(seed=0, **study.options)
    assert {(p["depth"], p["direction"], p["size"]) for p in points} == {
        (depth, direction, size) for depth in (2, 3) for direction in DIRECTIONS for size in (1e-3, 0.1)
    }
    for p in points:
        assert p["median"] <= p["worst"]
        exact = (1 + p["size"]) ** p["depth"] - 1
        if p["direction"] == "sign rule":  # weights of pixels that are never inked have no gradient, and stay
            assert 0.8 * exact < p["trust"] <= exact * (1 + 1e-12)
        else:
            assert p["trust"] == pytest.approx(exact)
    small, large = ([p["worst"] for p in points if p["size"] == size] for size in (1e-3, 0.1))
    assert all(a < b for a, b in zip(small, large, strict=True))


def test_the_largest_lr_is_where_the_loss_stops_falling():
    options = {"network": "tanh", "depths": (3,), "width": 16, "examples": 50}
    points = {p["rule"]: p for p in largest.largest_lr(seed=3, **options)}
    torch.manual_seed(3)
    model = deep_mlp(3, 16, "tanh").double()
    x, y = digits_for(model, 50)
    before = F.cross_entropy(model(x), y)
    before.backward()
    for rule, p in points.items():
        for factor, falls in ((0.01, True), (0.5, True), (0.999, True), (1.002, False)):
            moved = largest._moved(model, largest.RULES[rule], p["lr"] * factor)
            assert (F.cross_entropy(moved(x), y) < before).item() == falls, (rule, factor)
    assert points["layer-wise"]["size"] == pytest.approx(points["layer-wise"]["lr"])
    assert points["layer-wise"]["bound"] == pytest.approx(2 ** (1 / 3) - 1)
    rates = [float(p.grad.norm() / p.detach().norm()) for p in model.parameters()]
    bound = points["gradient descent"]["bound"]
    assert math.prod(1 + bound * rate for rate in rates) == pytest.approx(2)
    cosines = [
        float((p.detach().abs() * p.grad.abs()).sum() / p.detach().norm() / p.grad.norm()) for p in model.parameters()
    ]
    assert points["sign rule"]["bound"] == pytest.approx(math.log1p(min(cosines)) / 3)


def test_a_loss_that_falls_everywhere_or_nowhere_ends_the_search():
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.ones_like(model.weight)
    sgd = largest.RULES["gradient descent"]
    assert largest._largest(model, sgd, lambda m: m.weight.sum(), model.weight.item(), 2.0) >= 2000
    assert largest._largest(model, sgd, lambda m: -m.weight.sum(), -model.weight.item(), 2.0) == 0.0


def test_deep_networks_keep_the_size_of_signals():
    torch.manual_seed(0)
    x = torch.randn(200, 64, dtype=torch.float64)
    for activation, low, high in (("tanh", 0.3, 1.0), ("leaky_relu", 0.3, 3.0)):
        model = deep_mlp(50, 64, activation).double()
        assert sum(isinstance(m, torch.nn.Linear) for m in model) == 50
        assert low < model[:-1](x).detach().square().mean().sqrt() < high


def test_studies_are_listed_run_and_overridden_like_recipes(capsys, tmp_path):
    where = ["--results", str(tmp_path / "r"), "--runs", str(tmp_path / "u")]
    assert main(["run", "breakdown_tanh", "--set", "depths=(2,)", "--set", "examples=30", *where]) == 0
    assert "breakdown_tanh+depths=_2,_,examples=30 seed 0: 27 points" in capsys.readouterr().out
    assert main(["verify", "--results", str(tmp_path / "r")]) == 0
    assert main(["list", "breakdown_*", "--results", str(tmp_path / "r")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["breakdown_resnet18", "missing"]
    assert main(["run", "breakdown_tanh", "--set", "epochs=1", *where]) == 1
    assert "breakdown_tanh has no option 'epochs'" in capsys.readouterr().err
    assert main(["run", "breakdwn_tanh", *where]) == 1
    assert "did you mean breakdown_tanh" in capsys.readouterr().err


@pytest.fixture
def record(tmp_path):
    return studies.get("largest_lr_tanh").as_smoke().run(0, tmp_path / "made")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r.pop("commit"), "missing"),
        (lambda r: r.update(recipe="digits_madam"), "unknown"),
        (lambda r: r.update(points=[]), "no points"),
        (lambda r: r.update(points="many"), "points is 'many'"),
        (lambda r: r["points"][1].pop("lr"), "no point like the first"),
        (lambda r: r["points"][1].update(lr=[1]), "which is no number"),
        (lambda r: r.update(seconds=-1.0), "positive"),
    ],
)
def test_a_study_record_that_is_not_whole_is_refused(record, change, says, tmp_path):
    change(record)
    with pytest.raises(records.RecordError, match=says):
        records.write(record, tmp_path)


def test_verify_finds_a_study_that_has_changed_or_is_gone(record, tmp_path):
    path = tmp_path / "made" / "largest_lr_tanh+smoke" / "0.json"
    record["settings"]["width"] = 9
    path.write_text(json.dumps(record))
    assert "the study has changed since, in width" in problems(tmp_path / "made")[0][0]
    record["study"] = "nothing+smoke"
    path.unlink()
    records.write(record, tmp_path / "made")
    assert "there is no study nothing" in problems(tmp_path / "made")[0][0]


# ---- recipes with a monitor


def trained(recipe, folder, tiny=None, limits=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run(recipe, 0, data=tiny, folder=folder / "runs", results=folder, device=torch.device("cpu"))
        return run, run.train(limits or Limits(), Progress("", 1, quiet=True))


@pytest.mark.parametrize("name", ["digits_trust", "digits_trust_signed8", "cifar10_trust_12bit", "wikitext2_trust"])
def test_a_run_is_the_same_bit_for_bit_with_and_without_a_monitor(name, tiny, tmp_path):
    recipe = replace(recipes.get(name).as_smoke(), epochs=3)
    plain, without = trained(replace(recipe, monitor=None), tmp_path / "plain", tiny)
    watched, record = trained(recipe, tmp_path / "watched", tiny)
    for key in ("curve", "codes", "test", "train", "weights", "bytes"):
        assert record[key] == without[key]
    for a, b in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(*(p.codes() if hasattr(p, "codes") else p.detach() for p in (a, b)))
    assert "trust" not in without
    assert "monitor" not in without["settings"]
    steps = 3 * watched.task.steps
    assert [seen["step"] for seen in record["trust"]] == list(range(0, steps, 3))
    assert record["trust"][1]["epoch"] == 3 / watched.task.steps
    matrices = [name for name, p in watched.model.named_parameters() if p.dim() >= 2]
    for seen in record["trust"]:
        assert list(seen["layers"]) == matrices
        assert all(0 < layer["cosine"] <= 1 for layer in seen["layers"].values())
        assert all(("moved" in layer) == (recipe.ladder is not None) for layer in seen["layers"].values())


def test_a_monitored_run_that_is_stopped_sees_what_one_that_never_was_sees(tmp_path):
    class Soon(Limits):
        left = 5

        def reached(self):
            self.left -= 1
            return self.left < 0

    recipe = recipes.get("digits_trust_12bit").as_smoke()
    _, whole = trained(recipe, tmp_path / "whole")
    with pytest.raises(Stopped):
        trained(recipe, tmp_path / "parts", limits=Soon())
    _, record = trained(recipe, tmp_path / "parts")
    assert (record["trust"], record["curve"]) == (whole["trust"], whole["curve"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r.pop("trust"), "missing"),
        (lambda r: r["settings"].pop("monitor"), "unknown"),
        (lambda r: r["trust"].append(3), "nothing that a monitor saw"),
        (lambda r: r["trust"][0].pop("lr"), "trust is"),
        (lambda r: r["trust"][0]["layers"].update({"0.weight": {"cosine": 1.0}}), "trust in 0.weight"),
        (lambda r: r["trust"][0]["layers"]["0.weight"].update(cosine="high"), "which is no number"),
    ],
)
def test_what_a_monitor_saw_is_checked(change, says, tmp_path):
    _, record = trained(recipes.get("digits_trust").as_smoke(), tmp_path)
    change(record)
    with pytest.raises(records.RecordError, match=says):
        records.check(record)


def test_a_monitor_is_attached_only_to_steps_that_are_looked_at(tmp_path):
    """And is handed to them: on a GPU they are replayed from a graph, in which its hooks do not run."""
    seen = []
    recipe = recipes.get("digits_trust").as_smoke()
    run = Run(recipe, 0, folder=tmp_path / "runs", results=tmp_path, device=torch.device("cpu"))
    made = run.stepper.step

    def step(batch, monitor=None):
        seen.append((monitor is not None, len(run.optimiser._optimizer_step_pre_hooks)))
        made(batch, monitor)

    run.stepper.step = step
    run.train(Limits(), Progress("", 1, quiet=True))
    assert isinstance(run.optimiser, Madam)
    assert seen == [(done % 3 == 0, int(done % 3 == 0)) for done in range(2 * run.task.steps)]
