"""Optimisers beside ours: that they are as their authors give them, and are evaluated where they want to be."""

import inspect
from dataclasses import replace
from importlib import import_module, metadata

import pytest
import torch

from madam_lab import optimisers, recipes, records
from madam_lab.progress import Progress
from madam_lab.recipes.untuned import AS_THEY_COME
from madam_lab.trainer import Limits, Run

CPU = torch.device("cpu")


def run_of(recipe, folder, data=None):
    return Run(recipe, 0, data=data, folder=folder / "runs", results=folder, device=CPU)


def trained(recipe, folder, data=None):
    run = run_of(recipe, folder, data)
    return run, run.train(Limits(), Progress("", 1, quiet=True))


@pytest.mark.parametrize("kind", AS_THEY_COME)
def test_who_needs_no_tuning_is_as_it_comes(kind):
    package, called = optimisers.PEERS[kind]
    own = getattr(import_module(package), called)
    recipe = recipes.get(f"small_vae_{kind}")
    assert recipe.lr_at(0.0) == inspect.signature(own).parameters["lr"].default
    assert recipe.arguments == {}
    made = optimisers.build_optimiser(recipe, torch.nn.Linear(3, 2), CPU)
    plain = own(torch.nn.Linear(3, 2).parameters())
    assert type(made) is own
    passing = {"params", "train_mode"}
    assert {k: v for k, v in made.param_groups[0].items() if k not in passing} == {
        k: v for k, v in plain.param_groups[0].items() if k not in passing
    }


def test_batch_norm_has_no_statistics_of_weights_that_it_never_saw():
    assert recipes.names(["cifar*_100e_prodigy"]) == ["cifar10_100e_prodigy", "cifar100_100e_prodigy"]
    with pytest.raises(KeyError):
        recipes.names(["cifar*schedule_free*"])


@pytest.mark.parametrize("kind", ["schedule_free_adamw", "schedule_free_radam"])
def test_a_schedule_free_run_is_evaluated_at_its_mean_and_trains_elsewhere(kind, tmp_path):
    recipe = replace(recipes.get(f"digits_60e_{kind}"), epochs=3)
    run, record = trained(recipe, tmp_path)
    beside = run.task.scores(run.model.eval(), ("test",))["test"]
    here = [p.clone() for p in run.model.parameters()]
    with run.stepper.averaged():
        assert run.task.scores(run.model.eval(), ("test",))["test"] == record["test"]
        assert any(not torch.equal(a, b) for a, b in zip(here, run.model.parameters(), strict=True))
        # Gradients are taken at y, between the mean x of all z, and the last of them.
        for y, x in zip(here, run.model.parameters(), strict=True):
            torch.testing.assert_close(y, 0.9 * x + 0.1 * run.optimiser.state[x]["z"], rtol=1e-4, atol=1e-6)
    for a, b in zip(here, run.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert run.optimiser.param_groups[0]["train_mode"]
    assert beside != record["test"] or beside == 0


def test_the_best_epoch_of_a_schedule_free_run_is_tested_with_its_own_mean(tiny, tmp_path):
    recipe = recipes.get("wikitext2_20e_schedule_free_adamw").as_smoke()
    recipe = replace(recipe, epochs=4, schedule=((0, 0.01), (1, 3.0)))  # worse and worse after the first
    run, record = trained(recipe, tmp_path, tiny)
    assert record["status"] == "finished"
    valid = [point["valid"] for point in record["curve"]]
    assert min(valid) == valid[0] < valid[-1]
    assert run.stepper.evaluate("valid") == pytest.approx(valid[0], rel=1e-4)


def test_a_record_says_which_version_of_a_peer_it_ran(tmp_path):
    recipe = replace(recipes.get("digits_60e_prodigy"), epochs=1)
    _, record = trained(recipe, tmp_path)
    assert record["versions"]["prodigyopt"] == metadata.version("prodigyopt")
    records.check(record)
    _, plain = trained(replace(recipes.get("digits_adam"), epochs=1), tmp_path)
    assert "prodigyopt" not in plain["versions"]


def test_a_peer_that_is_not_installed_is_named_with_what_brings_it(tmp_path, monkeypatch):
    monkeypatch.setitem(optimisers.PEERS, "prodigy", ("no_such_package", "Prodigy"))
    with pytest.raises(ValueError, match=r'no_such_package, which is not installed; pip install "\.\[peers\]"'):
        run_of(recipes.get("digits_60e_prodigy"), tmp_path)


def test_steps_that_look_at_numbers_on_the_way_are_not_captured():
    assert not any(optimisers.is_capturable(recipes.get(f"small_vae_{kind}")) for kind in AS_THEY_COME)
    assert all(optimisers.is_capturable(recipes.get(name)) for name in ("digits_adam", "digits_sgd", "digits_madam"))
