"""The 8-bit second moment: what its codes mean, and that it follows the float32 one."""

import pytest
import torch

from torchmadam import moment, moment8

BETA = 0.999


def coded(v, *, t=1, key=0, first=0):
    codes = torch.full(v.shape, 99, dtype=torch.uint8)
    exponents = torch.full((moment8.count_groups(v.shape),), 99, dtype=torch.uint8)
    moment8.encode_(codes, exponents, v, moment8.phase(key, torch.tensor(float(t))), first)
    return codes, exponents


@pytest.mark.parametrize("numel", [0, 1, 3, 4, 5, 127, 128, 129, 130, 131, 132, 1000, 1023])
def test_rungs_are_fixed_points_whatever_the_dither(numel):
    v = 10 ** (torch.rand(numel) * 12 - 12)
    rungs = moment8.decoded(*coded(v))
    for t in (1, 2, 3, 1000, 123_456):
        # Where the largest left its octave, a rung may come back a last bit off.
        torch.testing.assert_close(moment8.decoded(*coded(rungs, t=t, key=-5)), rungs, rtol=1.2e-7, atol=0)


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (40, 27), (3, 128), (9, 1000), (0, 5), (5, 0)])
def test_rows_of_a_matrix_are_filled_up_to_whole_groups_of_8(shape):
    v = 10 ** (torch.rand(shape) * 12 - 12)
    codes, exponents = coded(v)
    rows, columns = shape
    assert len(exponents) == -(-rows * (-(-columns // 8) * 8) // 128)
    back = moment8.decoded(codes, exponents)
    torch.testing.assert_close(back, v, rtol=0.2, atol=0)
    if columns % 8 == 0 and v.numel():
        flat = coded(v.flatten())
        assert torch.equal(codes.flatten(), flat[0])
        assert torch.equal(exponents, flat[1])


def test_a_code_is_a_fifth_of_an_octave():
    exponents = torch.tensor([100, 100], dtype=torch.uint8)
    rungs = moment8.decoded(torch.arange(256, dtype=torch.uint8), exponents)
    expected = [2.0 ** (100 - 127 + c // 5) * (1 + c % 5 / 5) for c in range(256)]
    torch.testing.assert_close(rungs, torch.tensor(expected), rtol=2e-7, atol=0)


def test_the_largest_of_a_group_sets_its_exponent_and_what_is_far_below_gets_the_lowest_rung():
    v = torch.zeros(384)
    v[0], v[1], v[2] = 1.0, 2.0**-49, 2.0**-80  # 80 octaves below
    v[200] = 2.0**-100
    codes, exponents = coded(v)
    assert exponents.tolist() == [127 - 50, 0, 0]
    back = moment8.decoded(codes, exponents)
    assert (back[0], back[200]) == (1.0, 2.0**-100)
    assert back[1] == pytest.approx(2.0**-49, rel=0.2)
    assert back[2:128].tolist() == [2.0**-50] * 126
    assert back[v == 0].max() <= 2.0**-50
    assert back[256:].max() == 0.0  # a group in which nothing ever happened


@pytest.mark.parametrize("v", [moment.LARGEST, 1.0, 2.0**-126, 2.0**-149])
def test_extremes_survive(v):
    codes, exponents = coded(torch.full((8,), v))
    back = moment8.decoded(codes, exponents)
    assert torch.isfinite(back).all()
    if v >= 2.0**-126:
        torch.testing.assert_close(back, torch.full((8,), v), rtol=0.2, atol=0)


def test_rounding_keeps_the_mean_over_time():
    v = 1 + torch.rand(128)
    total = torch.zeros(128, dtype=torch.float64)
    for t in range(2000):
        total += moment8.decoded(*coded(v, t=t)).double()
    torch.testing.assert_close(total / 2000, v.double(), rtol=4e-4, atol=0)


def test_pieces_are_the_whole():
    v = torch.rand(128 * 5 + 6)
    whole = coded(v, t=7, key=3)
    parts = [coded(v[:256], t=7, key=3), coded(v[256:], t=7, key=3, first=256)]
    for i in range(2):
        assert torch.equal(whole[i], torch.cat([part[i] for part in parts]))


@pytest.mark.parametrize("share", [1.0, 0.01])
def test_gbar_stays_near_the_float32_one_for_5000_noisy_steps(share):
    """Gradients over six orders of magnitude in every group, all of them present or one in a hundred."""
    generator = torch.Generator().manual_seed(0)
    size = 10 ** (torch.rand(2048, generator=generator) * 6 - 6)
    exact = torch.zeros(2048)
    codes = torch.zeros(2048, dtype=torch.uint8)
    exponents = torch.zeros(moment8.count_groups(codes.shape), dtype=torch.uint8)
    for t in range(1, 5001):
        g = torch.randn(2048, generator=generator) * size * (torch.rand(2048, generator=generator) < share)
        exact.mul_(BETA).add_(g * g * (1 - BETA))
        v = moment8.decoded(codes, exponents) * BETA + g * g * (1 - BETA)
        moment8.encode_(codes, exponents, v, moment8.phase(12345, torch.tensor(float(t))))
    ratio = (moment8.decoded(codes, exponents) / exact).sqrt()
    low, high = torch.quantile(ratio, torch.tensor([0.01, 0.99])).tolist()
    assert low > 0.75
    assert high < 1.3
    assert 0.93 < float(ratio.median()) < 1.03
