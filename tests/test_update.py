"""The rule of update.py: its properties, and agreement with a float64 transcription of the formula."""

import copy
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from torchmadam import update

RULE = {
    "lr": 0.01,
    "momentum": 0.0,
    "beta": 0.999,
    "max_step": 8.0,
    "bound": 3.0,
    "weight_decay": 0.0,
    "bias_correction": True,
    "rounding": None,
    "maximize": False,
}
sizes = st.sampled_from([(1,), (7,), (37, 53), (3, 1, 5)])
learning_rates = st.sampled_from([1e-4, 0.01, 0.1, 1.0])


class Slot:
    """One parameter with its state, stepped by the function under test."""

    def __init__(self, w, *, scale=None, crossing=0.0, moment=True, mean=False):
        self.w = w.clone()
        self.means = [torch.zeros_like(w, dtype=torch.bfloat16)] if mean else []
        self.moments = [torch.zeros_like(w, dtype=torch.float32)] if moment else []
        self.step = torch.zeros(())
        rms = w.double().square().mean().sqrt().float() if w.numel() else torch.zeros(())
        self.scale = rms if scale is None else torch.tensor(scale)
        self.crossing = crossing
        self.nonfinite = torch.zeros((), dtype=torch.int64)
        self.rule = {}

    def move(self, grad, **rule):
        update.madam_(
            [self.w],
            [grad],
            self.means,
            self.moments,
            [],
            [self.step],
            [self.scale],
            [self.nonfinite],
            streams=[1],
            crossings=[self.crossing],
            **{**RULE, **self.rule, **rule},
        )
        return self.w


def draw(shape, seed, spread=1.0):
    """Numbers spread over several orders of magnitude, no two alike."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(shape, generator=generator))


def transcription(w, v, g, t, *, lr, beta, max_step, sigma_max, crossing, weight_decay=0.0, bias_correction=True):
    """PAPER.md's formulas and DESIGN's textbook form of crossing, in float64, independent of the library."""
    w, v, g = (np.asarray(x, dtype=np.float64) for x in (w, v, g))
    v = beta * v + (1 - beta) * g**2
    gbar = np.sqrt(v / (1 - beta**t if bias_correction else 1))
    u = np.clip(np.divide(g, gbar, out=np.zeros_like(g), where=gbar > 0), -max_step, max_step)
    a = lr * u
    if crossing:
        width = crossing * sigma_max
        w = width * np.sinh(np.arcsinh(w / width) - a)
    else:
        w = w * np.exp(-a * np.sign(w))
    return np.clip(w * math.exp(-lr * weight_decay), -sigma_max, sigma_max), v


@settings(deadline=None, max_examples=60)
@given(
    sizes,
    learning_rates,
    st.sampled_from([0.0, 0.1, 1.0, 3.0]),
    st.sampled_from([0.0, 0.1]),
    st.booleans(),
    st.integers(0, 999),
)
def test_steps_agree_with_a_float64_transcription_at_every_lr(shape, lr, crossing, decay, correction, seed):
    slot = Slot(draw(shape, seed), crossing=crossing)
    w, v, sigma_max = slot.w.double().numpy(), np.zeros(shape), 3 * slot.scale.double().item()
    for t in range(1, 4):
        g = draw(shape, seed + 1000 * t, spread=2.0)
        size = np.maximum(np.abs(w), crossing * sigma_max) * math.exp(8 * lr)  # both terms of the rule lie below this
        w, v = transcription(
            w, v, g, t, lr=lr, beta=0.999, max_step=8.0, sigma_max=sigma_max, crossing=crossing,
            weight_decay=decay, bias_correction=correction,
        )  # fmt: skip
        slot.move(g, lr=lr, weight_decay=decay, bias_correction=correction)
        assert np.all(np.abs(slot.w.numpy() - w) <= 1e-5 * size)
        np.testing.assert_allclose(slot.moments[0].numpy(), v, rtol=1e-5)
        w = slot.w.double().numpy().copy()


@settings(deadline=None, max_examples=40)
@given(sizes, learning_rates, st.sampled_from([1.0, 8.0]), st.integers(0, 999))
def test_a_weight_changes_by_at_most_exp_lr_max_step_and_keeps_its_sign(shape, lr, max_step, seed):
    before = draw(shape, seed, spread=3.0)
    after = Slot(before).move(draw(shape, seed + 1), lr=lr, max_step=max_step, bound=None)
    ratio = after.double() / before.double()
    limit = math.exp(lr * max_step) * (1 + 1e-6)
    assert torch.all(ratio <= limit)
    assert torch.all(ratio >= 1 / limit)


@settings(deadline=None, max_examples=40)
@given(
    sizes, st.sampled_from([0.0, 0.3, 3.0]), st.sampled_from([0.5, 1.0, 3.0]), learning_rates, st.integers(0, 999),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_no_weight_leaves_the_bound_in_any_dtype(shape, crossing, bound, lr, seed, dtype):
    slot = Slot(draw(shape, seed).to(dtype), crossing=crossing)
    for t in range(3):
        slot.move(draw(shape, seed + t), lr=lr, bound=bound)
        assert torch.all(slot.w.double().abs() <= bound * slot.scale.double() * (1 + 2e-7))


@settings(deadline=None, max_examples=30)
@given(sizes, st.sampled_from([0.0, 1.0]), st.integers(-20, 20), st.integers(0, 999))
def test_scaling_every_gradient_by_a_power_of_two_leaves_the_path_unchanged(shape, crossing, power, seed):
    plain, scaled = (Slot(draw(shape, seed), crossing=crossing) for _ in range(2))
    for t in range(5):
        grad = draw(shape, seed + 1 + t)
        assert torch.equal(plain.move(grad), scaled.move(grad * 2.0**power))


@settings(deadline=None, max_examples=30)
@given(sizes, learning_rates, st.integers(0, 999))
def test_the_rule_is_continuous_as_crossing_goes_to_zero(shape, lr, seed):
    w, grad = draw(shape, seed), draw(shape, seed + 1)
    pure = Slot(w).move(grad, lr=lr)
    for crossing in (1e-6, 1e-12, 1e-30, 1e-44):
        near = Slot(w, crossing=crossing).move(grad, lr=lr)
        width = crossing * 3 * w.square().mean().sqrt()
        assert torch.all((near - pure).abs() <= 1e-6 * pure.abs() + width * math.exp(8 * lr))


def test_crossing_zero_is_the_papers_algorithm_1_to_the_letter():
    w, g = draw((37, 53), 0), draw((37, 53), 1)
    sigma_max = 3 * w.square().mean().sqrt()
    gbar = torch.sqrt((1 - 0.999) * g**2 + 0.999 * torch.zeros_like(g))
    expected = (w * torch.exp(-0.01 * torch.sign(w) * torch.clamp(g / gbar, -8, 8))).clamp(-sigma_max, sigma_max)
    after = Slot(w).move(g, bias_correction=False)
    torch.testing.assert_close(after, expected, rtol=3e-7, atol=0)


def test_without_a_second_moment_the_rule_is_the_sign_rule():
    w, g = draw((37, 53), 0), draw((37, 53), 1)
    expected = w * torch.exp(-0.01 * torch.sign(w) * torch.sign(g))
    assert torch.equal(Slot(w, moment=False).move(g, bound=None), expected)


def test_zero_weights_leave_zero_only_when_crossing_is_allowed():
    g = torch.tensor([1.0, -1.0, 0.0])
    assert torch.equal(Slot(torch.zeros(3), scale=1.0).move(g), torch.zeros(3))
    moved = Slot(torch.zeros(3), scale=1.0, crossing=1.0).move(g)
    torch.testing.assert_close(moved, torch.tensor([-1.0, 1.0, 0.0]) * 3 * math.sinh(0.01), rtol=1e-4, atol=0)


def test_weights_cross_zero_when_crossing_is_allowed():
    slot = Slot(torch.tensor([0.05, -2.0]), crossing=1.0)
    for _ in range(20):
        slot.move(torch.tensor([1.0, -1.0]))
    assert slot.w[0] < 0
    assert slot.w[1] > -2


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 3e38, 2e19])
@pytest.mark.parametrize("decay", [0.0, 10.0])
def test_a_gradient_without_a_finite_square_moves_nothing_and_is_forgotten(bad, decay):
    w = draw((5,), 0)
    slot, clean = Slot(w), Slot(w)
    slot.rule = clean.rule = {"weight_decay": decay}
    for t in range(3):
        grad = draw((5,), t + 1)
        clean.move(grad)
        slot.move(grad)
    moment, weight = slot.moments[0].clone(), slot.w.clone()
    grad = draw((5,), 9)
    grad[2] = bad
    slot.move(grad)
    clean.move(torch.where(grad == grad[2], 0.0, grad) if not math.isnan(bad) else grad.nan_to_num(0.0))
    assert slot.nonfinite.item() == 1
    assert slot.w[2] == weight[2]
    assert slot.moments[0][2] == moment[2]
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(slot.w[others], clean.w[others])
    slot.move(draw((5,), 10))
    assert slot.w[2] != weight[2]
    assert torch.isfinite(slot.w).all()
    assert torch.isfinite(slot.moments[0]).all()


@pytest.mark.parametrize("arguments", [{"lr": 0.0, "weight_decay": 0.1}, {"lr": 0.01}])
@pytest.mark.parametrize("crossing", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_of_size_zero_changes_nothing_not_even_weights_beyond_the_bound(arguments, crossing, dtype):
    w = draw((37, 53), 0).to(dtype)
    assert (w.float().abs() > 3 * w.float().square().mean().sqrt()).any()
    grad = torch.zeros(37, 53) if arguments["lr"] else draw((37, 53), 1)
    assert torch.equal(Slot(w, crossing=crossing).move(grad, **arguments), w)


@pytest.mark.parametrize(
    ("dtype", "least"),
    [(torch.float32, 2.0**-126), (torch.bfloat16, 2.0**-126), (torch.float16, 2.0**-24), (torch.float64, 2.0**-1022)],
)
@pytest.mark.parametrize("rounding", [None, "nearest"])
def test_frozen_signs_survive_any_amount_of_shrinking(dtype, least, rounding):
    slot = Slot(torch.tensor([0.1, -0.1, 0.0], dtype=dtype), moment=False)
    for _ in range(800):
        slot.move(torch.tensor([1.0, -1.0, 1.0]), lr=1.0, rounding=rounding)
    assert slot.w.tolist() == [least, -least, 0.0]


def test_float16_without_a_bound_grows_to_its_largest_number_and_no_further():
    slot = Slot(torch.tensor([0.1, -0.1], dtype=torch.float16), moment=False)
    for _ in range(30):
        slot.move(torch.tensor([-1.0, 1.0]), lr=1.0, bound=None)
    assert slot.w.tolist() == [65504.0, -65504.0]


def test_without_a_bound_the_crossing_zone_is_measured_in_sigma():
    moved = Slot(torch.zeros(2), scale=0.5, crossing=2.0).move(torch.tensor([1.0, -1.0]), bound=None)
    torch.testing.assert_close(moved, torch.tensor([-1.0, 1.0]) * math.sinh(0.01), rtol=1e-4, atol=0)


def test_beta_zero_is_the_sign_rule():
    w, g = draw((37, 53), 0), draw((37, 53), 1)
    torch.testing.assert_close(Slot(w).move(g, beta=0.0), Slot(w, moment=False).move(g), rtol=1e-6, atol=0)


def test_gradients_too_small_to_square_count_as_zero():
    slot = Slot(draw((5,), 0))
    before = slot.w.clone()
    assert torch.equal(slot.move(torch.full((5,), 1e-30)), before)


def test_a_large_lr_is_not_cut_short():
    after = Slot(torch.tensor([1e-3, 1.0]), moment=False).move(torch.tensor([-1.0, 1.0]), lr=20.0, bound=None)
    torch.testing.assert_close(after, torch.tensor([1e-3 * math.exp(20), math.exp(-20)]), rtol=1e-5, atol=0)


def test_steps_far_beyond_float32_stay_finite_and_end_at_the_bound():
    slot = Slot(torch.tensor([1e-3, -1.0, 0.5]), crossing=1.0)
    slot.move(torch.tensor([1.0, 1.0, -1.0]), lr=1e6)
    limit = 3 * slot.scale.item()
    torch.testing.assert_close(slot.w, torch.tensor([-limit, -limit, limit]))


def test_maximize_is_descent_on_the_negative_gradient():
    w, g = draw((37, 53), 0), draw((37, 53), 1)
    assert torch.equal(Slot(w).move(g, maximize=True), Slot(w).move(-g))


def test_weight_decay_multiplies_by_exp_minus_lr_decay():
    w = draw((7,), 0)
    after = Slot(w).move(torch.zeros(7), weight_decay=5.0, bound=None)
    torch.testing.assert_close(after, w * math.exp(-0.05))


@pytest.mark.parametrize("crossing", [0.0, 1.0])
def test_memory_format_and_strides_do_not_change_the_path(crossing):
    w, g = draw((4, 6, 5, 3), 0), draw((4, 6, 5, 3), 1)
    plain, strided, sliced = (Slot(w, crossing=crossing) for _ in range(3))
    strided.w = strided.w.to(memory_format=torch.channels_last)
    strided.moments = [torch.zeros_like(strided.w, dtype=torch.float32)]
    sliced.w = torch.stack([sliced.w, sliced.w], dim=-1)[..., 0]
    for _ in range(3):
        plain.move(g)
        strided.move(g.to(memory_format=torch.channels_last))
        sliced.move(g)
    assert torch.equal(plain.w, strided.w)
    assert torch.equal(plain.w, sliced.w)


def laid_out(tensor, layout):
    """The same numbers, elsewhere in memory."""
    if layout == "channels_last":
        return tensor.to(memory_format=torch.channels_last)
    if layout == "transposed":
        return tensor.transpose(0, 3).contiguous().transpose(0, 3)
    return torch.stack([tensor, tensor], dim=-1)[..., 0] if layout == "gaps" else tensor.contiguous()


@pytest.mark.parametrize("crossing", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("layout", "grad_layout"),
    [
        ("contiguous", "contiguous"), ("channels_last", "channels_last"), ("transposed", "transposed"),
        ("gaps", "gaps"),
        ("contiguous", "channels_last"), ("contiguous", "gaps"), ("channels_last", "contiguous"),
    ],
)  # fmt: skip
def test_a_step_in_pieces_is_the_step_in_one_piece(monkeypatch, layout, grad_layout, dtype, crossing):
    shape = (13, 7, 3, 5)
    whole, pieces, sign = (
        Slot(laid_out(draw(shape, 0).to(dtype), layout), crossing=crossing, moment=moment, mean=True)
        for moment in (True, True, False)
    )
    whole.rule = pieces.rule = sign.rule = {"weight_decay": 0.1, "momentum": 0.9}
    sign_pieces = copy.deepcopy(sign)
    stepped = {"pieces": 0}
    direction_ = update.direction_

    def counted(*arguments, **rule):
        stepped["pieces"] += 1
        return direction_(*arguments, **rule)

    monkeypatch.setattr(update, "direction_", counted)
    for t in range(3):
        grad = draw(shape, t + 1)
        if t == 1:
            grad[0, 0, 0, 0], grad[5, 5, 1, 1], grad[12, 6, 2, 4] = math.inf, math.nan, 3e38
        grad = laid_out(grad.to(dtype), grad_layout)
        for size, slots in ((2**15, (whole, sign)), (101, (pieces, sign_pieces))):
            monkeypatch.setattr(update, "_CHUNK", size)
            for slot in slots:
                slot.move(grad)
    alike = layout == grad_layout and layout != "gaps"
    assert stepped["pieces"] == 3 * 2 * (1 + (14 if alike else 1))
    for a, b in ((whole, pieces), (sign, sign_pieces)):
        assert torch.equal(a.w, b.w)
        assert a.nonfinite.item() == b.nonfinite.item() == 3
    assert torch.equal(whole.moments[0], pieces.moments[0])


@pytest.mark.parametrize("a", [0.0, 1e-30, -1e-8, 0.01, -0.3, 5.0, -80.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sinh_has_all_its_digits_wherever_a_number_lies(a, dtype):
    at = torch.full((37,), a, dtype=dtype)
    torch.testing.assert_close(update.sinh(at), torch.full_like(at, math.sinh(a)), rtol=3e-7, atol=0)
    assert len(update.sinh(at).unique()) == 1
