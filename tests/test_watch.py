"""Warnings about float tensors that are held back by their bound, those that began as zeros among them."""

import warnings

import pytest
import torch
from torch import nn

from torchmadam import LadderFormat, Madam, to_ladder_, watch


def trained(model, steps=120, **madam):
    optimizer = Madam(model.named_parameters(), lr=0.1, **madam)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            for p in model.parameters():
                p.grad = -torch.ones_like(p)  # all want to grow
            optimizer.step()
    return [str(w.message) for w in caught]


def zeroed(shape=(4, 8)):
    model = nn.Linear(*shape)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def test_a_matrix_that_began_as_zeros_and_reached_its_bound_is_named_once():
    (message,) = trained(zeroed())
    assert message.startswith("100 % of weight is at its bound, 5 x 0.25: it began as zeros")
    assert "a larger zero_scale= for it, such as 0.8" in message


@pytest.mark.parametrize(
    ("model", "madam"),
    [
        (zeroed(), {"bound": None}),
        (nn.Linear(4, 8), {}),  # only its bias grew out of zeros, or reached the bound of what it began with
    ],
    ids=["no bound", "not zeros"],
)
def test_there_is_no_warning_where_nothing_is_held_back_from_zero(model, madam):
    assert [said for said in trained(model, **madam) if "began as zeros" in said] == []


def test_other_floats_that_reached_their_bound_are_named_with_what_to_do():
    said = trained(nn.Linear(8, 64))
    assert [message.split(" is at")[0].split(" % of ")[1] for message in said] == ["weight", "bias"]
    assert "5 x its scale" in said[0]  # about half of it
    assert "or no bound (bound=None), or rescale" in said[0]
    assert said[1].startswith("100 % of bias is at its bound, 100: it wants to grow; use no bound (bound=None), or")


def test_what_began_with_weights_beyond_its_bound_is_told_of_the_bound_that_it_has():
    w = torch.full((10, 30), 0.1)
    w[:5], w[0, 0] = 0.9, 2.0
    p = nn.Parameter(w)
    model = nn.Module()
    model.weight = p
    (message,) = trained(model, crossing=3.0, bound=2.0)
    assert "% of weight is at its bound, 2: it wants to grow; use no bound" in message


def test_zeros_whose_scale_was_given_are_told_of_that():
    (message,) = trained(zeroed(), scale=0.1)
    assert "is at its bound, 5 x its scale 0.1: it wants to grow; use a larger scale=" in message


def test_a_network_that_learns_within_its_bound_is_not_warned_of():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = Madam(model.parameters())
    x = torch.randn(256, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(301):
            optimizer.zero_grad()
            (model(x) - torch.sin(x.sum(1, keepdim=True))).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_vectors_are_not_held_back_by_their_bound_but_by_the_papers_rule(value):
    def train(make, **arguments):
        p = nn.Parameter(torch.full((), value))
        optimizer = make([p], lr=0.05, **arguments)
        for _ in range(101):
            p.grad = -torch.ones_like(p)
            optimizer.step()
        return p.item()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(Madam) > 1
    with pytest.warns(UserWarning, match="began as zeros" if value == 0 else "wants to grow"):
        assert train(Madam.paper) == pytest.approx(3 * (value or 0.01))


def test_without_names_matrices_are_described_by_their_shape():
    p = nn.Parameter(torch.zeros(4, 8))
    optimizer = Madam([p], lr=0.1)

    def train():
        for _ in range(120):
            p.grad = torch.ones_like(p)
            optimizer.step()

    with pytest.warns(UserWarning, match=r"a tensor of shape \(4, 8\) is at its bound"):
        train()


class Policy(nn.Module):
    """As in policy gradients: a vector of logarithms that begins as zeros, of few weights."""

    def __init__(self):
        super().__init__()
        self.mean, self.log_std = nn.Linear(8, 4), nn.Parameter(torch.zeros(4))


def test_few_weights_are_named_when_most_of_them_are_held_back():
    said = trained(Policy(), bound=3.0, crossing=0.0)
    assert [message for message in said if message.startswith("100 % of log_std is at its bound, 3 x 0.01")]
    codes = to_ladder_(Policy(), 8)
    assert [message for message in trained(codes) if "100 % of the codes of log_std are at the upper end" in message]


def test_half_of_few_weights_at_their_bound_are_no_matter():
    p = nn.Parameter(torch.full((2, 2), 0.1))
    optimizer = Madam([("gates", p)], lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(120):
            p.grad = torch.tensor([[-1.0, -1.0], [0.0, 0.0]])
            optimizer.step()
    assert int((p > 0.49).sum()) == 2


def test_a_group_without_parameters_is_no_trouble():
    p = nn.Parameter(torch.zeros(4, 8))
    optimizer = Madam([{"params": [p]}, {"params": [], "weight_decay": 0.1}])
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert (p < 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_short_types_at_their_bound_are_seen(dtype):
    def train(p):
        optimizer = Madam([p], lr=1.0)
        for _ in range(20):
            p.grad = -torch.ones_like(p)
            optimizer.step()

    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        with pytest.warns(UserWarning, match="100 % of a tensor of shape"):
            train(nn.Parameter(torch.rand(8, 8, generator=generator).to(dtype)))


def test_what_began_as_zeros_is_known_after_a_resume():
    model = zeroed()
    first = Madam(model.named_parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = -torch.ones_like(p)
    first.step()
    second = Madam(model.named_parameters(), lr=0.1)
    second.load_state_dict(first.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(120):
            second.step()
    (message,) = [str(w.message) for w in caught]  # and none of the bias
    assert "of weight" in message
    assert "began as zeros" in message


@pytest.mark.parametrize("bound", [0.5, 1.0])
def test_bounds_that_weights_begin_at_say_nothing(bound):
    assert trained(nn.Linear(8, 64), bound=bound) == []


@pytest.mark.parametrize(
    ("arguments", "ladder", "told"),
    [
        ({"crossing": 0.3, "bound": None}, "paper12", "bound=, crossing=: Madam has this for floats"),
        ({"scale": 5.0}, "signed8", "scale=: Madam has this for floats"),
        ({"crossing": 0.3}, LadderFormat.signed(8, crossing=0.3), None),  # as it is, but for biases
        ({"crossing": 1.0}, "signed8", None),
        ({"bound": 10.0}, "signed8", "bound=: Madam has this for floats"),
        ({"crossing": 0.0, "bound": 3.0}, "paper12", None),  # Madam.paper's
        ({}, "paper12", None),
        ({"crossing": 0.0}, "signed8", "crossing=: Madam has this for floats"),
        ({"bound": 3.0}, "signed8", "bound=: Madam has this for floats"),
        ({"weight_decay": 0.1}, "paper12", None),
    ],
)
def test_arguments_that_codes_do_not_have_are_named_once(arguments, ladder, told):
    def said(model):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = Madam(model.parameters(), **arguments)
            for _ in range(3):
                for p in model.parameters():
                    p.grad = torch.zeros(p.shape)
                optimizer.step()
        return [str(w.message) for w in caught]

    def network():
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

    messages = said(to_ladder_(network(), ladder))
    assert len(messages) == (told is not None)
    assert all(told in message for message in messages)
    some = to_ladder_(network(), ladder, filter=lambda name, p: not name.endswith("bias"))
    assert said(some) == []  # it is for the biases


def test_what_is_usual_for_floats_is_what_madam_has_by_default():
    p = nn.Parameter(torch.ones(2))
    for make, usual in ((Madam, watch._OF_FLOATS), (Madam.paper, watch._OF_PAPER)):
        (group,) = make([p]).param_groups
        assert {name: group[name] for name in usual} == usual


@pytest.mark.parametrize(("momentum", "told"), [(0.0, False), (0.9, True)])
def test_a_mean_of_noisy_gradients_may_be_too_small_for_rounding_to_nearest(momentum, told):
    model = to_ladder_(nn.Linear(4, 4), "paper8")
    optimizer = Madam(model.parameters(), momentum=momentum)
    for p in model.parameters():
        p.grad = torch.zeros(p.shape)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    said = [str(w.message) for w in caught]
    assert len(said) == told
    assert all("at momentum=0.9 makes steps of 0.0023" in message for message in said)
    assert all("or momentum=0" in message for message in said)


def lossy(model, finite, start=None, steps=10, trained=lambda name: True):
    """What is said while this share of a step's gradients is finite; ``start`` is the optimizer's state."""
    optimizer = Madam(model.parameters(), lr=1e-4)
    if start is not None:
        optimizer.load_state_dict(start)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(steps):
            for name, p in model.named_parameters():
                p.grad = torch.ones_like(p) if t < 2 or trained(name) else None
                if trained(name):
                    p.grad.view(-1)[round(p.numel() * finite) :] = (
                        complex("nan+nanj") if p.is_complex() else float("nan")
                    )
            optimizer.step()
    return [str(w.message) for w in caught], optimizer.state_dict()


@pytest.mark.parametrize("kind", ["float", "codes", "complex"])
@pytest.mark.parametrize(("finite", "said"), [(0.0, "100 %"), (0.6, "40 %"), (0.8, None)])
def test_a_loss_that_is_nan_is_noticed_once(finite, said, kind):
    model = nn.Linear(10, 20, bias=False, dtype=torch.complex64 if kind == "complex" else None)
    if kind == "codes":
        to_ladder_(model, "signed8")
    found, _ = lossy(model, finite, steps=120)
    assert [message.split(" of all elements of the last 9 gradients")[0] for message in found] == (
        [said] if said else []
    )


def test_what_has_no_gradients_any_more_does_not_hide_those_that_are_lost():
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 2))
    (message,), _ = lossy(model, 0.0, steps=120, trained=lambda name: name.startswith("1."))
    assert "% of all elements of the last 90 gradients" in message  # of which the trunk had two


def test_a_single_bad_step_is_nothing_to_warn_of():
    p = nn.Parameter(torch.ones(()))
    optimizer = Madam([p], lr=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in range(12):
            p.grad = torch.full((), float("inf") if t == 4 else 1.0)
            optimizer.step()


def test_gradients_that_were_lost_before_a_resume_are_not_counted_again():
    model = nn.Linear(10, 20)
    _, state = lossy(model, 0.0, steps=5)
    assert lossy(model, 1.0, state)[0] == []
    (message,), _ = lossy(model, 0.5, state)
    assert message.startswith("50 % of all elements of the last 9 gradients")


def test_a_state_that_is_loaded_between_two_looks_is_not_taken_for_lost_gradients():
    model = nn.Linear(10, 20)
    _, some = lossy(model, 1.0, steps=200)
    for each in some["state"].values():
        each["nonfinite"] += 20 * 200  # of 200 steps, a tenth was bad
    _, none = lossy(model, 1.0, steps=1)
    optimizer = Madam(model.parameters(), lr=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(301):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            if step in (50, 200):
                optimizer.load_state_dict(some if step == 50 else none)


def test_only_what_is_too_coarse_for_lr_is_said_to_freeze():
    """A norm's bias begins as zeros, and its ladder is finer around zero but coarser elsewhere."""
    model = to_ladder_(nn.Sequential(nn.Linear(20, 20), nn.LayerNorm(20)), 8)
    optimizer = Madam(model.parameters(), momentum=0.0, rounding="nearest")
    for p in model.parameters():
        p.grad = torch.zeros(p.shape)
    with pytest.warns(
        UserWarning, match=r"freezes the 4\.3 % of the weights that are signed 8-bit, crossing 0\.0078"
    ) as said:
        optimizer.step()
    assert len(said) == 1
