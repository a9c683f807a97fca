"""Madam trains real networks at its default, in float32 and in bfloat16."""

import statistics

import pytest
import torch
from torch import nn

from digits_training import train
from madam_lab.tasks import digits
from torchmadam import Madam

SEEDS = range(5)
EPOCHS = 40


def accuracy(seed, data, dtype=torch.float32, make=Madam, **arguments):
    return train(seed, data, lambda net: make(net.parameters(), **arguments), epochs=EPOCHS, dtype=dtype)


@pytest.fixture(scope="module")
def float32_accuracy():
    data = digits.load()
    return statistics.fmean(accuracy(seed, data) for seed in SEEDS)


def test_digits_reach_97_percent_at_the_untouched_default(float32_accuracy):
    assert float32_accuracy >= 0.97


def test_a_bfloat16_model_trains_as_well_as_its_float32_twin(float32_accuracy):
    data = digits.load()
    narrow = statistics.fmean(accuracy(seed, data, torch.bfloat16) for seed in SEEDS)
    assert abs(narrow - float32_accuracy) < 0.005


def test_at_a_small_lr_a_bfloat16_model_needs_stochastic_rounding_to_follow_its_twin():
    data = digits.load()
    full = accuracy(0, data, make=Madam.paper, lr=0.001)
    assert abs(accuracy(0, data, torch.bfloat16, Madam.paper, lr=0.001) - full) < 0.02
    assert accuracy(0, data, torch.bfloat16, Madam.paper, lr=0.001, rounding="nearest") < full - 0.1


@pytest.mark.slow
def test_unscaled_non_negative_inputs_cost_frozen_signs_one_to_three_points():
    data = digits.load(standardised=False)
    frozen, best = (
        statistics.fmean(accuracy(seed, each, make=Madam.paper) for seed in SEEDS) for each in (data, digits.load())
    )
    assert 0.01 < best - frozen < 0.035


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_steps_survive_stochastic_rounding_and_not_rounding_to_nearest(dtype):
    def shrink(dtype, rounding):
        p = nn.Parameter(torch.full((4096,), 0.7, dtype=dtype))
        optimizer = Madam.paper([p], lr=1e-4, second_moment="none", rounding=rounding)
        for _ in range(1000):
            p.grad = torch.ones_like(p)
            optimizer.step()
        return p.detach().double().mean().item()

    exact = shrink(torch.float32, None)
    assert exact == pytest.approx(0.7 * 2.718281828**-0.1, rel=1e-4)
    assert shrink(dtype, None) == pytest.approx(exact, rel=2e-3)
    assert shrink(dtype, "nearest") == pytest.approx(0.7, rel=4e-3)  # it never moved


@pytest.mark.parametrize("seed", [0, 1])
def test_frozen_signs_cost_a_linear_regression_about_half_of_its_variance(seed):
    """What README says, and what it says to do."""
    shares = []
    for crossing in (0.0, 1.0):
        torch.manual_seed(seed)
        x = torch.randn(256, 16)
        y = x @ torch.randn(16, 4)
        y /= y.std()
        model = nn.Linear(16, 4)
        optimizer = Madam.paper(model.parameters(), crossing=crossing, bound=None)
        for _ in range(1000):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
        shares.append(loss.item())
    assert 0.3 < shares[0] < 0.7
    assert shares[1] < 0.05
