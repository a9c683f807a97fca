"""The small tasks: their data, their metrics, and what the report makes of them."""

import math

import pytest
import torch
from torch import nn

from madam_lab import recipes, records
from madam_lab.models import small as models
from madam_lab.report.numbers import Results
from madam_lab.report.small import TITLES, rates_table, small_table
from madam_lab.tasks import TASKS
from madam_lab.tasks.small import SMALL
from tiny_records import made

CPU = torch.device("cpu")


def task(name, tiny, batch=4):
    return TASKS[name](tiny, CPU, batch=batch, seed=0)


@pytest.mark.parametrize("name", list(recipes.small.BUDGETS))
def test_batches_are_the_same_again_from_any_step_and_others_in_another_epoch(name, tiny):
    found = task(name, tiny)
    whole = list(found.epoch(1))
    assert len(whole) == found.steps
    assert sum(len(batch[0]) for batch in whole) == len(found.splits["train"][0])
    for batch, again in zip(whole[-2:], found.epoch(1, found.steps - 2), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(batch, again, strict=True))
    assert not torch.equal(whole[0][-1], next(iter(found.epoch(2)))[-1])
    tested = [list(found.batches("test")) for _ in range(2)]
    for batch, again in zip(*tested, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(batch, again, strict=True))


@pytest.mark.parametrize("kind", SMALL)
def test_a_loss_is_the_mean_of_the_losses_and_reaches_every_weight(kind, tiny):
    found = task(kind.name, tiny)
    torch.manual_seed(0)
    model = found.model()
    batch = next(iter(found.epoch(0)))
    loss, sums = found.loss(model, batch)
    each = found.losses(model, batch)
    assert each.shape == (4,)
    assert loss.item() == pytest.approx(each.mean().item(), rel=1e-6)
    assert sums[0].item() == pytest.approx(each.sum().item(), rel=1e-5)
    loss.backward()
    if kind.name != "small_diffusion":  # whose last layer begins as zeros, and hides all others
        assert all(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("name", ["small_siren", "small_halves", "small_autoencoder"])
def test_who_always_says_the_mean_explains_nothing(name, tiny):
    found = task(name, tiny)
    mean = found.target(found.splits["test"]).mean(0)
    assert found.evaluate(lambda *x: mean.expand(len(x[0]), -1), "test") == pytest.approx(100, rel=1e-4)
    answers = {"small_siren": 1, "small_halves": 1, "small_autoencoder": 0}
    right = iter(found.batches("test"))
    assert found.evaluate(lambda *x: next(right)[answers[name]], "test") == 0


def test_who_says_that_there_is_no_noise_explains_none_of_it(tiny):
    found = task("small_diffusion", tiny)
    assert found.evaluate(found.model().eval(), "test") == pytest.approx(100, rel=0.02)  # zeros, to begin with


def test_letters_that_are_all_alike_take_the_logarithm_of_their_number(tiny):
    found = task("small_lstm", tiny)
    assert found.evaluate(lambda x: torch.zeros(*x.shape, 96), "test") == pytest.approx(math.log2(96))
    (pieces,) = found.splits["train"]
    assert pieces.shape[1] == 65
    assert torch.equal(pieces[:-1, 64], pieces[1:, 0])


def test_the_elbo_is_that_of_normal_codes():
    class Blind(nn.Module):
        def forward(self, x, noise):
            return torch.zeros_like(x), torch.full((len(x), 8), 0.5), torch.full((len(x), 8), -1.0)

    vae = TASKS["small_vae"](None, CPU, batch=5, seed=0)
    prior = torch.distributions.Normal(0.0, 1.0)
    posterior = torch.distributions.Normal(0.5, math.exp(-0.5))
    expected = 64 * math.log(2) + 8 * float(torch.distributions.kl_divergence(posterior, prior))
    assert vae.evaluate(Blind(), "test") == pytest.approx(expected, rel=1e-5)


def test_the_transformer_of_letters_does_not_look_ahead():
    torch.manual_seed(0)
    model = models.Gpt(30, 9, width=8, heads=2)
    letters = torch.randint(30, (2, 9))
    changed = letters.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 30
    torch.testing.assert_close(model(letters)[:, :5], model(changed)[:, :5])
    assert not torch.allclose(model(letters)[:, 5:], model(changed)[:, 5:])


def test_what_is_called_ours_is_the_librarys_default():
    ours = recipes.crossing.OURS
    for name in recipes.small.BUDGETS:
        assert recipes.get(f"{name}_ours").arguments == ours
        assert recipes.get(f"{name}_ours").lr == 0.01
        coded = recipes.get(f"{name}_ours_8bit")
        assert (coded.ladder.stored_bits, coded.conversion) == (8, {"bound": ours["bound"]})
        assert coded.arguments == {key: ours[key] for key in ("weight_decay", "momentum")}
        assert recipes.get(f"{name}_ours_no_decay_lr_0.1").arguments == {**ours, "weight_decay": 0.0}
        assert recipes.get(f"{name}_ours_no_decay_8bit").arguments == {**coded.arguments, "weight_decay": 0.0}
        assert set(TITLES) == set(recipes.small.BUDGETS)


def test_the_table_takes_the_best_of_a_whole_grid(tmp_path):
    assert not small_table(Results(tmp_path)).has_results
    for i, lr in enumerate(recipes.small.SGD_RATES):
        records.write(made(f"small_vae_sgd_{lr:g}", 0, 30.0 - i), tmp_path)
    for seed, value in enumerate((24.0, 25.0)):
        records.write(made("small_vae_ours", seed, value), tmp_path)
    for lr in recipes.small.RATES:
        records.write(made(f"small_vae_ours_lr_{lr:g}", 0, 24.5), tmp_path)
    records.write(made("small_vae_adamw_0.001_0.01", 0, 25.5), tmp_path)
    row = next(row for row in small_table(Results(tmp_path)).rows if "variational" in row[0])
    assert row[1:] == ("23.0 at 3", "missing", "25.5", "missing", "24.5", *["missing"] * 5)
    row = next(row for row in rates_table(Results(tmp_path)).rows if "variational" in row[0])
    assert row[1:] == ("3", "missing", "0.01", "missing")


def test_one_rate_for_all_tasks_is_the_one_that_loses_least_on_the_worst(tmp_path):
    for i, name in enumerate(TITLES):
        results = {
            1e-4: 50.0,
            1e-3: 10.0,
            1e-2: 11.0,
            0.03: 9.0 if i else 14.0,
            0.1: 30.0,
            0.3: 40.0,
            1.0: 60.0,
            3.0: 70.0,
        }
        for lr, test in results.items():
            records.write(made(f"{name}_sgd_{lr:g}", 0, test), tmp_path)
    last = rates_table(Results(tmp_path)).rows[-1]
    assert last[1:] == ("0.001: up to 1.11 times the best", *["missing"] * 3)
