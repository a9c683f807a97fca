"""The theorem's numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchmadam.theory import GAUSSIAN_COSINE, depth_for, descent_bound, stretch


def test_forty_layers_of_gaussian_weights_allow_a_rate_of_a_hundredth():
    assert descent_bound(0.64, 40) == pytest.approx(0.0124, abs=5e-5)
    assert descent_bound(GAUSSIAN_COSINE, 40, exponential=True) == pytest.approx(math.log(1 + 2 / math.pi) / 40)
    assert depth_for(0.01) == 49
    torch.manual_seed(0)
    a, b = torch.randn(2, 1_000_000).abs()
    assert torch.nn.functional.cosine_similarity(a, b, dim=0) == pytest.approx(GAUSSIAN_COSINE, abs=2e-3)


@given(st.floats(0.01, 1), st.integers(1, 500), st.booleans())
def test_depth_for_is_the_inverse_of_the_bound(cosine, depth, exponential):
    lr = descent_bound(cosine, depth, exponential=exponential)
    assert depth_for(lr * (1 - 1e-9), cosine, exponential=exponential) == depth
    assert depth_for(lr * (1 + 1e-9), cosine, exponential=exponential) == depth - 1


@given(st.floats(0.01, 1), st.lists(st.floats(1, 50), min_size=1, max_size=30))
def test_stretched_layers_meet_the_condition_with_equality(cosine, stretches):
    lr = descent_bound(cosine, len(stretches), stretches=stretches)
    assert math.prod(1 + lr * c for c in stretches) == pytest.approx(1 + cosine, rel=1e-9)
    lr = descent_bound(cosine, len(stretches), stretches=stretches, exponential=True)
    assert math.exp(lr * sum(stretches)) == pytest.approx(1 + cosine, rel=1e-9)


def test_the_worst_layer_decides_and_ones_are_no_stretch():
    assert descent_bound([0.9, 0.2, 0.6], 7) == descent_bound(0.2, 7)
    assert descent_bound(0.5, 7, stretches=[1.0] * 7) == pytest.approx(descent_bound(0.5, 7))
    assert stretch(0.0, 0.1) == 1
    assert stretch(0.3, 0.1) == pytest.approx(math.sqrt(10))


def test_what_makes_no_sense_is_refused():
    for arguments in ((0.5, 0), (1.5, 3), (-0.1, 3)):
        with pytest.raises(ValueError, match="layers are 1 or more"):
            descent_bound(*arguments)
    with pytest.raises(ValueError, match="as many stretches"):
        descent_bound(0.5, 3, stretches=[1.0, 2.0])
    with pytest.raises(ValueError, match="must be above 0"):
        depth_for(0.0)
