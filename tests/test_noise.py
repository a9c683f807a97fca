"""Randomness keyed by place and time, and the rounding built on it."""

import math

import numpy as np
import pytest
import torch

from torchmadam import noise

STEP = torch.tensor(7.0)


def words_in_numpy(position, key, step):
    """What both generators make of positions, in unsigned integers, independent of the library."""
    word = (step * 0x9E3779B97F4A7C15 + key) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    word ^= word >> 31
    bits = (position & 0xFFFFFFFF).astype(np.uint32) ^ np.uint32(word & 0xFFFFFFFF)
    bits = (bits ^ (bits >> 16)) * np.uint32(0x21F0AAAD)
    return bits ^ (bits >> 15) ^ np.uint32(word >> 32) ^ (position >> 32).astype(np.uint32)


def bits_in_numpy(n, key, step):
    bits = words_in_numpy(np.arange(n, dtype=np.uint64), key, step) * np.uint32(0xD35A2D97)
    return (bits ^ (bits >> 15)).view(np.int32)


def shared_bits_in_numpy(first, n, key, step):
    position = np.arange(first, first + n, dtype=np.uint64)
    multiplier = np.uint32(0xA7E4D12D) + (position % 8).astype(np.uint32) * np.uint32(0xF6FD7916)
    return (words_in_numpy(position // 8, key, step) * multiplier).view(np.int32)


@pytest.mark.parametrize("step", [0, 1, 12345])
@pytest.mark.parametrize("index", [0, 3])
def test_bits_follow_their_definition_in_unsigned_integers(step, index):
    key = noise.stream(5, index)
    ours = noise.random_bits(torch.Size([37, 53]), key, torch.tensor(float(step)))
    assert np.array_equal(ours.numpy().ravel(), bits_in_numpy(37 * 53, key, step))


@pytest.mark.parametrize("first", [0, 5, 2**31 - 100, 2**35 + 3])
def test_shared_bits_follow_their_definition_in_unsigned_integers(first):
    key = noise.stream(5, 2)
    ours = noise.shared_bits(torch.Size([37, 53]), key, torch.tensor(9.0), first)
    assert np.array_equal(ours.numpy().ravel(), shared_bits_in_numpy(first, 37 * 53, key, 9))


def test_bits_of_a_tensor_go_by_its_elements_positions_in_memory():
    key, shape = noise.stream(5, 1), (4, 6, 5, 3)
    flat = noise.random_bits(torch.Size([360]), key, STEP)
    assert torch.equal(noise.random_bits_like(torch.empty(shape), key, STEP).flatten(), flat)
    last = torch.empty(shape, memory_format=torch.channels_last)
    assert torch.equal(noise.random_bits_like(last, key, STEP).permute(0, 2, 3, 1).flatten(), flat)
    gaps = torch.empty(4, 6, 5, 3, 2)[..., 0]
    assert torch.equal(noise.random_bits_like(gaps, key, STEP).flatten(), flat)
    assert noise.random_bits_like(torch.empty(()), key, STEP).shape == ()


def test_every_bit_is_fair_and_independent_of_its_neighbours_in_place_and_time():
    n = 1 << 18
    tolerance = 5 / math.sqrt(n)
    runs = [
        noise.random_bits(torch.Size([n]), noise.stream(0, i), torch.tensor(float(t))) for i in (0, 1) for t in (1, 2)
    ]
    signs = [torch.stack([(run >> b) & 1 for b in range(32)]).double() * 2 - 1 for run in runs]
    for s in signs:
        assert s.mean(1).abs().max() < tolerance
        assert (s[:, 1:] * s[:, :-1]).mean(1).abs().max() < tolerance
        assert (s @ s.T / n - torch.eye(32)).abs().max() < tolerance
    for other in signs[1:]:
        assert (signs[0] * other).mean(1).abs().max() < tolerance


def test_any_two_neighbours_that_share_a_word_round_independently():
    """As numbers between 0 and 1 any two of eight, and any one at two steps, are uncorrelated; and so are roundings."""
    n = 1 << 18
    steps = [noise.shared_bits(torch.Size([n, 8]), noise.stream(0, 1), torch.tensor(float(t))) for t in (1, 2)]
    first, second = ((bits >> 8).double() / 2**24 + 0.5 for bits in steps)
    tolerance = 5 / math.sqrt(n)
    for dither in (first - 0.5, *((first < p).double() - p for p in (0.01, 0.3, 0.5, 0.9))):
        assert dither.mean(0).abs().max() < tolerance
        assert (torch.corrcoef(dither.T) - torch.eye(8)).abs().max() < tolerance
    for a, b in zip(first.T, second.T, strict=True):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < tolerance
    # Uniform in the square of every two: each of 16 x 16 boxes has its share.
    for i in range(8):
        for j in range(i):
            boxes = (first[:, i] * 16).long() * 16 + (first[:, j] * 16).long()
            counts = torch.bincount(boxes, minlength=256).double()
            assert ((counts - n / 256) ** 2 / (n / 256)).sum() < 255 + 5 * math.sqrt(510), (i, j)


@pytest.mark.parametrize("generator", [noise.random_bits, noise.shared_bits])
def test_the_top_byte_is_uniform(generator):
    n = 1 << 20
    bits = generator(torch.Size([n]), noise.stream(1, 2), STEP)
    counts = torch.bincount((bits >> 24) & 0xFF, minlength=256).double()
    chi_square = ((counts - n / 256) ** 2 / (n / 256)).sum()
    assert 255 - 5 * math.sqrt(510) < chi_square < 255 + 5 * math.sqrt(510)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [1.003, -0.7771, 3e-5, -1e-6, 6.2e-5, 2.0**-24 * 1.503])
def test_stochastic_rounding_is_unbiased_and_lands_on_a_neighbour(dtype, value):
    n = 1 << 16
    rounded = noise.round_stochastic(
        torch.full((n,), value), dtype, noise.random_bits(torch.Size([n]), noise.stream(0, 0), STEP)
    )
    assert rounded.dtype == dtype
    found = rounded.double().unique()
    exact = torch.tensor(value).double()
    spacing = found.max() - found.min()
    assert len(found) == 2
    assert found.min() < exact < found.max()
    nearest = torch.tensor(value).to(dtype).double()
    assert nearest in found
    assert (rounded.double().mean() - exact).abs() < 5 * spacing / math.sqrt(n)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_representable_values_do_not_move(dtype):
    values = torch.randn(1000).to(dtype).float()
    values[:4] = torch.tensor([0.0, -0.0, 2.0**-20, -(2.0**-24)])
    rounded = noise.round_stochastic(values, dtype, noise.random_bits(values.shape, 3, STEP))
    assert torch.equal(rounded.float(), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_largest_below_is_representable_and_tight(dtype):
    limits = torch.rand(1000) * 3 + 1e-3
    below = noise.largest_below(limits, dtype)
    assert torch.all(below <= limits)
    assert torch.equal(below.to(dtype).float(), below)
    assert torch.all((below.to(dtype).view(torch.int16) + 1).view(dtype).float() > limits)
