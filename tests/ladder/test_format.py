"""Number systems: rungs, codes, rounding and steps."""

import math

import pytest
import torch

from torchmadam import LadderFormat, noise

PAPER = [LadderFormat.paper(bits, math.log(60) / (2**bits - 1)) for bits in range(1, 16)]
SIGNED = [LadderFormat.signed(bits, crossing) for bits in range(2, 16) for crossing in (0.1, 1 / 3, 1.0, 3.0)]
PRESETS = [LadderFormat.preset(n) for n in ("paper12", "paper10", "paper8", "signed12", "signed8", "synapse")]


def every_code(ladder):
    if ladder.is_signed:
        return torch.arange(ladder.levels, dtype=torch.int32)
    k = torch.arange(ladder.levels, dtype=torch.int32)
    return torch.cat([k, k | (1 << ladder.code_bits)])


@pytest.mark.parametrize("ladder", PAPER + SIGNED + PRESETS, ids=str)
@pytest.mark.parametrize("limit", [1.0, 0.0123, 7.3])
def test_encoding_a_rung_gives_its_code_back(ladder, limit):
    codes, limit = every_code(ladder), torch.tensor(limit)
    assert torch.equal(ladder.encode(ladder.decode(codes, limit), limit), codes)


def test_the_papers_ladder_is_its_formula():
    ladder, limit = LadderFormat.preset("paper12"), 0.3
    codes = every_code(ladder)
    expected = [limit * math.exp(-k * 0.001) for k in range(4096)]
    decoded = ladder.decode(codes, torch.tensor(limit)).double()
    torch.testing.assert_close(
        decoded, torch.tensor(expected + [-w for w in expected], dtype=torch.float64), rtol=1e-6, atol=0
    )


def test_the_signed_ladder_is_its_formula_with_its_ends_at_the_limit():
    ladder = LadderFormat.signed(8, 1 / 3)
    expected = [0.5 / 3 * math.sinh(k * ladder.spacing) for k in range(-127, 128)]
    decoded = ladder.decode(every_code(ladder), torch.tensor(0.5)).double()
    torch.testing.assert_close(decoded, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-9)
    assert decoded[127] == 0
    assert decoded[-1].item() == pytest.approx(0.5, rel=1e-6)
    assert decoded[0].item() == pytest.approx(-0.5, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ladder", PRESETS, ids=str)
def test_a_code_has_the_same_weight_among_few_and_among_many(ladder, dtype):
    codes, limit = every_code(ladder).flip(0), torch.tensor(0.0123)
    many = ladder.decode(codes.repeat(3, 1), limit, dtype)
    few = torch.stack([ladder.decode(code, limit, dtype) for code in codes])
    assert many.dtype == few.dtype == dtype
    assert torch.equal(many, few.repeat(3, 1))
    assert torch.equal(few, ladder.decode(codes, limit).to(dtype))


def test_presets_are_the_papers_numbers():
    for name, stored, spacing, reach in [
        ("paper12", 13, 0.001, 60.04),
        ("paper10", 11, 0.004, 59.86),
        ("paper8", 9, 0.016, 59.15),
        ("synapse", 6, math.log(60) / 25, 60.0),
    ]:
        ladder = LadderFormat.preset(name)
        assert ladder.stored_bits == stored
        assert ladder.spacing == pytest.approx(spacing)
        assert ladder.dynamic_range == pytest.approx(reach, abs=0.01)
    assert LadderFormat.preset("synapse").levels == 26
    assert [LadderFormat.preset(n).stored_bits for n in ("signed8", "signed12")] == [8, 12]


def test_formats_are_frozen_hashable_and_equal_by_value():
    assert LadderFormat.paper(12) == LadderFormat.paper(12, 0.001)
    assert len({LadderFormat.paper(12), LadderFormat.paper(12, 0.001), LadderFormat.paper(10)}) == 2
    with pytest.raises(AttributeError):
        LadderFormat.paper(12).spacing = 1.0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LadderFormat.paper(), "exactly one of the two"),
        (lambda: LadderFormat.paper(12, levels=4096), "exactly one of the two"),
        (lambda: LadderFormat.paper(11), "no spacing is known for bits=11"),
        (lambda: LadderFormat.paper(levels=26), "no spacing is known"),
        (lambda: LadderFormat.paper(16, 0.001), "1 to 15 bits"),
        (lambda: LadderFormat.paper(15, 0.016), "more than float32 can hold"),
        (lambda: LadderFormat.paper(12, -0.001), "make no ladder"),
        (lambda: LadderFormat.paper(12, math.nan), "make no ladder"),
        (lambda: LadderFormat.signed(8, 0.0), r"crossing 0 is LadderFormat\.paper"),
        (lambda: LadderFormat.signed(1), "2 to 15"),
        (lambda: LadderFormat(256, 0.01, 1.0), "must be odd"),
        (lambda: LadderFormat(255, 1000.0, 1.0), r"use LadderFormat\.signed"),
        (lambda: LadderFormat.paper(8.5, 0.001), "1 to 15 bits"),
        (lambda: LadderFormat(4096.0, 0.001), "must be a whole number"),
        (lambda: LadderFormat.preset("paper9"), "no ladder is named 'paper9'"),
    ],
)
def test_contradictory_arguments_raise(make, says):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize("ladder", PRESETS, ids=str)
def test_values_off_the_ladder_go_to_its_ends(ladder):
    limit = torch.tensor(0.5)
    decoded = ladder.decode(ladder.encode(torch.tensor([9.0, -9.0, 0.0, 1e-12]), limit), limit)
    torch.testing.assert_close(decoded[:2], torch.tensor([0.5, -0.5]))
    least = 0.0 if ladder.is_signed else 0.5 / ladder.dynamic_range
    torch.testing.assert_close(decoded[2:], torch.tensor([least, least]))


@pytest.mark.parametrize("ladder", PRESETS, ids=str)
def test_a_limit_of_zero_decodes_to_zeros_and_encodes_them(ladder):
    limit = torch.zeros(())
    assert torch.equal(ladder.decode(ladder.encode(torch.zeros(5), limit), limit), torch.zeros(5))


def test_nearest_rounds_half_to_even():
    ladder = LadderFormat.paper(8)
    u = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    codes = torch.full((6,), 100, dtype=torch.int32)
    assert ladder.climbed(codes, u, 1.0, 0.0, None)[0].tolist() == [100, 102, 102, 100, 98, 98]


def test_stochastic_rounding_moves_by_the_fraction_on_average():
    ladder, n = LadderFormat.signed(8), 1 << 16
    bits = noise.random_bits(torch.Size([n]), noise.stream(0, 0), torch.tensor(1.0))
    for fraction in (0.01, 0.3, -1.7):
        moved = ladder.climbed(torch.full((n,), 127, dtype=torch.int32), torch.full((n,), -fraction), 1.0, 0.0, bits)[0]
        assert moved.double().mean().item() - 127 == pytest.approx(fraction, abs=5 * 0.5 / math.sqrt(n))
        assert moved.unique().numel() == 2


@pytest.mark.parametrize("name", ["paper12", "signed8"])
def test_a_gradient_along_the_weight_shrinks_it_and_codes_stay_on_the_ladder(name):
    ladder, limit = LadderFormat.preset(name), torch.tensor(1.0)
    codes = every_code(ladder)
    w = ladder.decode(codes, limit)
    for u, smaller in ((torch.sign(w), True), (-torch.sign(w), False)):
        after = ladder.climbed(codes, u, 3.0, 0.0, None)[0]
        assert after.min() >= 0
        assert after.max() <= codes.max()
        size = ladder.decode(after, limit).abs()
        change = (size <= w.abs() + 1e-9) if smaller else (size >= w.abs() - 1e-9)
        assert change[w != 0].all() if not ladder.is_signed else change[w.abs() > 0.05].all()
    if not ladder.is_signed:
        assert torch.equal(ladder.decode(ladder.climbed(codes, -w, 1e9, 0.0, None)[0], limit).sign(), w.sign())


def test_weight_decay_on_codes_is_a_relative_shrinking():
    for name in ("paper12", "signed12"):
        ladder, limit = LadderFormat.preset(name), torch.tensor(1.0)
        w = torch.tensor([0.9, -0.5, 0.3])
        codes = ladder.encode(w, limit)
        rungs = 20.0
        after = ladder.decode(ladder.climbed(codes, torch.zeros(3), 0.0, rungs, None)[0], limit)
        torch.testing.assert_close(after, w * math.exp(-rungs * ladder.spacing), rtol=2e-3, atol=0)
