"""Recipes: the paper's facts, and that every one of them runs."""

import math
import warnings
from dataclasses import fields, replace

import pytest
import torch

from madam_lab import queue, recipes, records
from madam_lab.optimisers import build_optimiser
from madam_lab.recipes import PAPER
from torchmadam import LadderFormat, Madam, groups, to_ladder_

TASKS = ("cifar10", "cifar100", "wikitext2")
KINDS = ("sgd", "adam", "madam", "madam_12bit", "madam_10bit", "madam_8bit")


def test_there_is_a_recipe_for_every_cell_and_every_point_of_the_papers_figures():
    names = set(recipes.names())
    cells = {f"{task}_{kind}" for task in (*TASKS, "imagenet", "cgan") for kind in KINDS}
    points = {
        f"{task}_lr_{kind}_{lr:g}"
        for task in (*TASKS, "cgan")
        for kind in KINDS[:3]
        for lr in (1, 0.1, 0.01, 0.001, 0.0001)
    }
    bounds = {"cifar10_bound_1", "cifar10_bound_2", "cifar10_madam", "cifar10_bound_5"}
    assert cells | points | bounds <= names
    assert all(recipes.get(name).paper == PAPER[name] for name in cells | points)


@pytest.mark.parametrize(
    ("name", "schedule", "bound", "ladder"),
    [
        ("cifar10_madam", [0.01, 0.001, 0.0001], 3, None),
        ("cifar100_madam", [0.01, 0.001, 0.0001], 1, None),
        ("cifar10_madam_12bit", [0.016, 0.004, 0.001], 3, LadderFormat.paper(12, 0.001)),
        ("cifar10_madam_10bit", [0.016, 0.004, 0.004], 3, LadderFormat.paper(10, 0.004)),
        ("cifar10_madam_8bit", [0.016, 0.016, 0.016], 3, LadderFormat.paper(8, 0.016)),
        ("cifar100_madam_8bit", [0.016, 0.016, 0.016], 1, LadderFormat.paper(8, 0.016)),
        ("cifar10_sgd", [0.1, 0.01, 0.001], None, None),
        ("cifar100_adam", [0.001, 0.0001, 0.00001], None, None),
    ],
)
def test_classifiers_state_the_papers_schedule_bound_and_spacing(name, schedule, bound, ladder):
    recipe = recipes.get(name)
    assert (recipe.epochs, recipe.batch) == (300, 1024)
    assert [recipe.lr_at(e) for e in (0, 99.9, 100, 199.9, 200, 299.9)] == pytest.approx(
        [v for v in schedule for _ in "ab"]
    )
    assert recipe.arguments.get("bound") == bound
    assert recipe.ladder == ladder
    if ladder:
        assert recipe.conversion == {"init": "uniform", "bound": bound}
    assert recipe.model.get("affine", True) == (recipe.optimiser != "madam")


@pytest.mark.parametrize(
    ("name", "schedule", "spacing"),
    [
        ("wikitext2_sgd", [1.0, 0.1], None),
        ("wikitext2_adam", [0.0001, 0.00001], None),
        ("wikitext2_madam", [0.01, 0.001], None),
        ("wikitext2_madam_12bit", [0.01, 0.005], 0.001),
        ("wikitext2_madam_10bit", [0.01, 0.005], 0.005),
        ("wikitext2_madam_8bit", [0.01, 0.01], 0.01),
    ],
)
def test_language_models_state_the_papers_schedule_and_spacing(name, schedule, spacing):
    recipe = recipes.get(name)
    assert (recipe.epochs, recipe.batch) == (20, 20)
    assert [recipe.lr_at(e) for e in (0, 10)] == pytest.approx(schedule)
    assert (recipe.ladder.spacing if recipe.ladder else None) == spacing
    assert recipe.clip == (0.25 if name == "wikitext2_sgd" else None)
    if recipe.optimiser == "madam":
        assert recipe.arguments["bound"] == 2


@pytest.mark.parametrize(
    ("name", "rates", "spacing"),
    [
        ("cgan_sgd", [0.01, 0.001], None),
        ("cgan_adam", [0.0001, 0.00001], None),
        ("cgan_madam", [0.01, 0.001], None),
        ("cgan_madam_12bit", [0.01, 0.001], 0.001),
        ("cgan_madam_10bit", [0.01, 0.0025], 0.0025),
        ("cgan_madam_8bit", [0.01, 0.01], 0.01),
    ],
)
def test_gans_state_the_papers_schedule_and_spacing(name, rates, spacing):
    recipe = recipes.get(name)
    assert (recipe.epochs, recipe.batch) == (120, 256)
    assert [recipe.lr_at(e) for e in (99.9, 100)] == pytest.approx(rates)
    assert (recipe.ladder.spacing if recipe.ladder else None) == spacing
    if recipe.optimiser == "madam":
        assert recipe.arguments["bound"] == 3
    if recipe.optimiser == "adam":
        assert recipe.arguments == {"betas": (0.0, 0.999)}
    if recipe.optimiser == "sgd":
        assert not recipe.arguments


def test_the_gans_default_is_the_librarys_to_the_letter():
    recipe = recipes.get("cgan_madam_signed8_default")
    models = [torch.nn.Linear(30, 20) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    to_ladder_(models[0], recipe.ladder, **recipe.conversion)
    to_ladder_(models[1], 8)
    assert models[0].weight.coding == models[1].weight.coding
    assert torch.equal(models[0].weight.codes(), models[1].weight.codes())
    optimisers = build_optimiser(recipe, models[0], torch.device("cpu")), Madam(models[1].parameters())
    of_floats = ("params", "param_names", "bound", "crossing")
    mine, default = ({k: v for k, v in o.param_groups[0].items() if k not in of_floats} for o in optimisers)
    assert mine == default
    base = recipes.get("cgan_madam_signed8").settings()
    assert {**recipe.settings(), "arguments": None} == {**base, "arguments": None}


def test_schedules_that_fall_to_zero():
    recipe = recipes.get("cifar10_adam").overridden({"schedule": "cosine", "lr": 0.002})
    assert [recipe.lr_at(e) for e in (0, 150, 300)] == pytest.approx([0.002, 0.001, 0.0])
    recipe = recipes.get("cifar10_adam").overridden({"schedule": "linear", "lr": 0.002})
    assert recipe.lr_at(75) == pytest.approx(0.0015)
    with pytest.raises(ValueError, match="needs lr="):
        recipes.get("cifar10_adam").overridden({"schedule": "cosine"}).lr_at(0)


def test_overrides_change_fields_and_the_name():
    base = recipes.get("cifar10_madam")
    changed = base.overridden({"arguments.bound": 2.0, "epochs": 10})
    assert changed.arguments == {"bound": 2.0, "max_step": 10.0}
    assert changed.name == "cifar10_madam+arguments.bound=2.0,epochs=10"
    assert base.arguments["bound"] == 3.0
    with pytest.raises(ValueError, match="a recipe has no field 'epoch'"):
        base.overridden({"epoch": 1})


def test_names_match_patterns_and_a_typo_gets_a_hint():
    assert recipes.names(["cifar10_madam_*bit"]) == [f"cifar10_madam_{b}bit" for b in (12, 10, 8)]
    with pytest.raises(KeyError, match=r"did you mean.*cifar10_madam"):
        recipes.get("cifar10_madm")


@pytest.mark.parametrize("name", recipes.names())
def test_the_smoke_variant_of_every_recipe_runs(name, tiny, tmp_path):
    recipe = recipes.get(name).as_smoke()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zero biases that stay, rates below a spacing: the paper's own choices
        outcome = queue.work([recipe], [0], data=tiny, results=tmp_path, folder=tmp_path / "runs", quiet=True)
    assert outcome.done == [f"{name}+smoke seed 0"]
    assert not (tmp_path / name).exists()  # a real run's place
    record = records.read(tmp_path / f"{name}+smoke" / "0.json")
    too_fast = "_lr_" in name or (name.startswith("small_") and "_sgd_" in name)  # at the end of a grid
    assert record["status"] == "finished" or too_fast
    assert record["settings"]["smoke"]
    assert len(record["curve"]) == 2 or record["status"] == "diverged"
    assert (record["codes"] is not None) == (recipe.ladder is not None)
    if recipe.ladder is not None:
        assert record["bytes"]["weights"] < record["bytes"]["float32"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"epochs": "abc"}, "epochs is 'abc'"),
        ({"epochs": 0}, "above 0"),
        ({"batch": 2.5}, "batch is 2.5"),
        ({"precision": "fp99"}, "use one of bf16, float32"),
        ({"optimiser": "lion"}, "use one of sgd"),
        ({"clip.x": 1}, "nothing inside"),
        ({"ladder": "paper13"}, "paper13"),
        ({"ladder": 8}, "give a LadderFormat"),
        ({"lr": 0.1}, r"lr is 0.1, and the schedule has rates of its own; set schedule=, such as \(\(0, 0.1\),\)"),
        ({"schedule": "cosine"}, "a 'cosine' schedule needs lr="),
        ({"schedule": "foo", "lr": 0.1}, "schedule 'foo' is unknown; use steps, 'cosine' or 'linear'"),
        ({"schedule": []}, "it has pairs of an epoch, the first one 0, and a rate"),
        ({"schedule": 5}, "it has pairs of an epoch"),
        ({"schedule": [(5, 0.1)]}, "the first one 0"),
        ({"schedule": [(0, math.nan)]}, "lr is nan; it must be a positive number"),
        ({"schedule": "cosine", "lr": -1}, "lr is -1; it must be"),
        ({"clip": -1}, "clip is -1"),
        ({"warm_up": -1}, "warm_up is -1"),
        ({"model": "foo"}, "model is 'foo'; set one of its entries"),
        ({"conversion.bound": 7}, "there is no ladder to convert to"),
    ],
)
def test_an_override_that_makes_no_sense_is_refused(changes, says):
    with pytest.raises((ValueError, KeyError), match=says):
        recipes.get("digits_madam").overridden(changes)


def test_overrides_name_a_folder_and_cannot_leave_it():
    name = recipes.get("digits_madam").overridden({"arguments.x": "../../escaped"}).name
    assert name == "digits_madam+arguments.x=.._.._escaped"


def test_a_ladder_can_be_overridden_by_the_name_of_a_preset():
    changed = recipes.get("digits_madam").overridden({"ladder": "signed8"})
    assert changed.ladder == LadderFormat.preset("signed8")
    assert changed.settings()["ladder"]["levels"] == 255


# ---- the study of crossing


def test_the_study_changes_one_thing_at_a_time_and_tunes_its_baselines():
    base = recipes.get("cifar10_100e_madam")
    assert (base.epochs, base.batch, base.lr, base.schedule, base.arguments) == (100, 1024, 0.01, "cosine", {})
    for task in recipes.crossing.BASES:
        base = recipes.get(f"{task}_madam")
        for name, changes in recipes.crossing.VARIANTS.items():
            found = recipes.get(f"{task}_{name}")
            differ = {f.name for f in fields(base) if getattr(found, f.name) != getattr(base, f.name)} - {"name"}
            assert differ == set(changes), name
    warm = recipes.get("cifar10_100e_crossing_1_decay_0.3_warm")
    assert [warm.lr_at(e) for e in (0, 2.5)] == [0, pytest.approx(0.005, rel=0.01)]
    assert warm.lr_at(5) == replace(warm, warm_up=None).lr_at(5)
    thirds = recipes.get("cifar10_100e_crossing_1_steps")
    assert [thirds.lr_at(e) for e in (0, 33, 66)] == [0.01, 0.001, 0.0001]
    grid = recipes.names(["cifar10_100e_sgd_*", "cifar10_100e_adamw_*"])
    assert len(grid) == 28 + 2  # and two controls
    assert all(recipes.get(n).model.get("affine", True) for n in grid)
    assert recipes.get("cifar10_100e_adamw_0.001_0.1").arguments == {"weight_decay": 0.1}


@pytest.mark.parametrize("task", ["cifar10", "cifar100", "wikitext2", "digits"])
def test_our_learning_rate_figure_differs_from_the_papers_by_our_arguments_alone(task):
    mine, theirs = (recipes.get(f"{task}_lr_{kind}_0.1").settings() for kind in ("ours", "madam"))
    assert mine.pop("arguments") == dict(recipes.crossing.OURS)
    theirs.pop("arguments")
    assert mine == theirs


def test_what_is_called_ours_is_so_in_every_number_of_bits():
    ours = recipes.crossing.OURS
    defaults = Madam([torch.nn.Parameter(torch.ones(2))]).param_groups[0]
    assert {name: defaults[name] for name in ours} == {**ours, "crossing": None}
    assert groups.crossing_of(defaults) == ours["crossing"]
    named = {bits: recipes.get(f"cifar10_100e_{name}") for bits, name in recipes.crossing.OURS_NAMED.items()}
    assert named["float32"].arguments == ours
    for bits in ("12 bits", "8 bits"):
        coded = named[bits]
        assert coded.ladder.crossing == ours["crossing"]
        assert f"{coded.ladder.stored_bits} bits" == bits
        assert coded.conversion == {"bound": ours["bound"]}
        assert coded.arguments == {name: ours[name] for name in ("weight_decay", "momentum")}
    twelve, eight = (recipes.get(f"cifar10_100e_paper{bits}") for bits in (12, 8))
    assert [twelve.lr_at(e) for e in (0, 33, 66)] == [0.016, 0.004, 0.001]
    assert [eight.lr_at(e) for e in (0, 99)] == [0.016, 0.016]


def test_a_control_changes_one_thing_of_the_papers_recipe():
    paper, base = recipes.get("cifar100_madam_12bit"), recipes.get(recipes.controls.SHORT)
    assert replace(base, epochs=300, schedule=paper.schedule).settings() == paper.settings()
    assert [base.lr_at(epoch) for epoch in (0, 33, 67)] == [paper.lr_at(epoch) for epoch in (0, 100, 200)]
    for name, changes in recipes.controls.HYPOTHESES.items():
        mine, theirs = (r.settings() for r in (recipes.get(f"{recipes.controls.SHORT}_{name}"), base))
        assert {key for key in mine if mine[key] != theirs[key]} == set(changes), name
        inner = [(mine[key], theirs[key]) for key in changes if isinstance(mine[key], dict)]
        assert all(sum(a.get(k) != b.get(k) for k in {*a, *b}) == 1 for a, b in inner), name


def test_a_floor_lifts_small_weights_keeps_signs_and_leaves_zeros():
    model = torch.nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1e-6, 1e-9, 0.0]]))
    optimiser = build_optimiser(recipes.get("cifar10_100e_madam_floor"), model, torch.device("cpu"))
    model.weight.grad = torch.full((1, 4), 1e-3)
    optimiser.step()
    least = 3 * 0.5 / 60
    assert model.weight[0, 1:].tolist() == pytest.approx([-least, least, 0.0])
    with pytest.raises(ValueError, match="of Madam on floats"):
        recipes.get("cifar10_sgd").overridden({"floor": 0.1})
