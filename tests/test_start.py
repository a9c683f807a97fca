"""Where tensors start: their size, their zone around zero, how far they may grow, and what that does not change."""

import copy
import math

import pytest
import torch
from torch import nn

from compiler import needs_cc
from torchmadam import Madam, start
from torchmadam.theory.sums import width_of

EVERY_FORM = [{}, pytest.param({"compile": True}, marks=needs_cc)]


def group_of(params, **arguments):
    return Madam(params, **arguments).param_groups[0]


def start_of(tensor, coded=False, make=Madam, **arguments):
    (group,) = make([nn.Parameter(tensor)], **arguments).param_groups
    (found,) = start.starts(group, [None], group["params"], coded=coded)
    return found


def trained(tensors, steps=1, grad=-1.0, make=Madam, **arguments):
    params = [nn.Parameter(t.clone()) for t in tensors]
    optimizer = make(params, **{"weight_decay": 0.0, **arguments})
    for _ in range(steps):
        for p in params:
            p.grad = torch.full_like(p, grad)
        optimizer.step()
    return [p.detach() for p in params], optimizer


def test_a_matrix_has_its_rms_and_nothing_more():
    torch.manual_seed(0)
    w = torch.rand(6, 5) - 0.5
    assert start_of(w) == start.Start(pytest.approx(w.square().mean().sqrt().item()), 1.0)


@pytest.mark.parametrize(
    ("shape", "inputs"), [((3, 16), 16), ((1, 20), 20), ((7, 4, 2, 2), 16), ((100, 25), 25), ((2, 10_000), None)]
)
@pytest.mark.parametrize("size", [0.0, 1e-5])
def test_matrices_of_zeros_or_next_to_it_have_the_size_that_their_inputs_ask_for(shape, inputs, size):
    silent = torch.full(shape, size)
    expected = 0.01 if inputs is None else 0.5 / math.sqrt(inputs)
    found = start_of(silent)
    assert (found.sigma, found.crossing, found.room) == (pytest.approx(expected), 1.0, 1.0)
    assert found.is_zeros == (size == 0)
    assert start_of(silent, zero_scale=2.0).sigma == 2.0
    assert start_of(silent, scale=0.02).sigma == 0.02
    assert start_of(silent, make=Madam.paper).sigma == 0.01
    assert start_of(silent, coded=True).sigma == pytest.approx(expected)


def test_small_matrices_that_are_no_zeros_keep_their_own_size():
    assert start_of(torch.full((3, 16), 1e-3)).sigma == pytest.approx(1e-3)


@pytest.mark.parametrize("shape", [(), (1,), (6,), (6, 1), (6, 1, 1), (1, 6, 1, 1), (1, 1, 6)])
@pytest.mark.parametrize("value", [0.0, 1e-5, 0.03, 1.0])
def test_vectors_have_a_zone_of_their_own_size_and_no_clamp_to_speak_of(shape, value):
    found = start_of(torch.full(shape, value))
    sigma = 0.01 if value < 1e-4 else value
    assert found.sigma == pytest.approx(sigma)
    assert found.scale * 5 == pytest.approx(3e4)
    assert found.share * found.scale == pytest.approx(sigma)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (2, 0, 4)])
@pytest.mark.parametrize("coded", [False, True])
def test_what_is_empty_starts_somewhere(shape, coded):
    assert start_of(torch.empty(shape), coded).room == 1.0


@pytest.mark.parametrize("arguments", [{"scale": 0.03}, {"make": Madam.paper}, {"bound": None}])
def test_a_given_scale_the_papers_rule_and_no_bound_need_no_room(arguments):
    for tensor in (torch.full((6,), 0.03), torch.tensor([[0.0] * 99 + [9.0]])):
        assert start_of(tensor, **arguments).room == 1.0


def test_zeros_by_the_papers_rule_have_a_zone_and_are_stuck_without_a_scale():
    assert start_of(torch.zeros(3), make=Madam.paper) == start.Start(0.01, 1.0, is_zeros=True)
    stuck = start_of(torch.zeros(3), zero_scale=0.0)
    assert (stuck.is_stuck, stuck.share) == (True, 0.0)
    assert not start_of(torch.zeros(3), zero_scale=0.0, scale=0.1).is_stuck


@pytest.mark.parametrize("form", EVERY_FORM)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_bias_grows_beyond_its_zone_and_moves_within_it_as_ever(dtype, form):
    if form and dtype not in (torch.float32, torch.bfloat16):
        pytest.skip("not compiled")
    shapes = [torch.zeros(40, dtype=dtype), torch.full((40,), 0.03, dtype=dtype)]
    (zeros, bias), _ = trained(shapes, **form)
    step = math.sinh(0.01)
    rtol = 0.02 if dtype in (torch.bfloat16, torch.float16) else 1e-3
    torch.testing.assert_close(zeros.float(), torch.full((40,), 0.05 * step), rtol=rtol, atol=0)
    x = math.asinh(0.03 / 0.15) + 0.01
    torch.testing.assert_close(bias.float().mean(), torch.tensor(0.15 * math.sinh(x)), rtol=3e-3, atol=0)
    (zeros, bias), _ = trained(shapes, steps=700, **form)
    assert torch.all(zeros > 15)
    assert torch.all(bias > 15)


@pytest.mark.parametrize("form", EVERY_FORM)
def test_what_a_tensor_begins_with_is_not_cut_and_does_not_make_other_steps_larger(form):
    torch.manual_seed(0)
    plain = torch.rand(20, 30) - 0.5
    outlier = plain.clone()
    outlier[0, 0] = 40.0
    sigma = outlier.square().mean().sqrt().item()
    ((found,), optimizer), ((cut,), _) = trained([outlier], **form), trained([outlier], scale=sigma, **form)
    assert found[0, 0] > 40.0 * 0.999
    assert cut[0, 0] == pytest.approx(5 * sigma)
    torch.testing.assert_close(found[1:], cut[1:], rtol=1e-5, atol=1e-6)
    (state,) = optimizer.state.values()
    assert state["scale"] * 5 == pytest.approx(40.0)
    (grown,), _ = trained([outlier], steps=50, **form)
    assert grown.max().item() == pytest.approx(40.0)


def test_the_papers_rule_and_codes_cut_as_they_did():
    outlier = torch.cat([torch.full((99,), 0.1), torch.tensor([9.0])]).view(10, 10)
    sigma = outlier.square().mean().sqrt().item()
    (found,), _ = trained([outlier], make=Madam.paper)
    assert found.max().item() == pytest.approx(3 * sigma)
    assert start_of(outlier, coded=True).room == 1.0
    assert start_of(torch.full((6,), 0.03), coded=True).room == 1.0


@pytest.mark.parametrize(
    ("arguments", "crossing"),
    [
        ({}, 1.0),
        ({"bound": 3.0}, 1.0),
        ({"bound": 10}, 0.5),
        ({"bound": None}, 5.0),
        ({"bound": 10, "crossing": 1}, 1.0),
    ],
)
def test_the_zone_is_five_sigma_or_the_bound_unless_told_otherwise(arguments, crossing):
    p, q = nn.Parameter(torch.full((2, 3), 0.1)), nn.Parameter(torch.full((2, 3), 0.1))
    assert group_of([p], **arguments)["crossing"] == crossing
    optimizer = Madam([{"params": [p]}, {"params": [q], **arguments}])
    assert [group["crossing"] for group in optimizer.param_groups] == [1.0, crossing]
    assert [group["crossing"] for group in copy.deepcopy(optimizer).param_groups] == [1.0, crossing]


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, "five"])
def test_a_bound_that_cannot_work_is_refused_for_what_it_is(bound):
    with pytest.raises((ValueError, TypeError), match="bound="):
        Madam([nn.Parameter(torch.ones(2, 2))], bound=bound)


def test_without_a_bound_steps_are_those_with_one_that_is_far_away():
    torch.manual_seed(0)
    w = torch.rand(20, 30) - 0.5
    runs = [trained([w], steps=30, bound=bound)[0][0] for bound in (None, 5.0, 20.0)]
    torch.testing.assert_close(runs[0], runs[1])
    torch.testing.assert_close(runs[0], runs[2])


@pytest.mark.parametrize("bound", [5.0, None, 3.0])
def test_theory_knows_the_zone_before_the_first_step_and_after_it(bound):
    outlier = torch.full((10, 10), 0.1)
    outlier[0, 0] = 9.0
    params = [nn.Parameter(t) for t in (outlier, torch.zeros(4), torch.full((4,), 0.03), torch.zeros(3, 4))]
    optimizer = Madam(params, bound=bound)
    (group,) = optimizer.param_groups

    def widths():
        return [float(width_of(p, optimizer, group, None)) for p in params]

    before = widths()
    sigmas = [outlier.square().mean().sqrt().item(), 0.01, 0.03, 0.25]
    assert before == pytest.approx([(bound or 5.0) * sigma for sigma in sigmas])
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert widths() == pytest.approx(before)


def test_sizes_are_those_of_the_whole_tensor_in_chunks(monkeypatch):
    monkeypatch.setattr(start, "_CHUNK", 7)
    w = torch.arange(-5.0, 24.0)
    assert start.sizes([w, torch.empty(0), w.to(torch.complex64)[:2]]) == [
        (pytest.approx(w.square().mean().sqrt().item()), 23.0),
        (0.0, 0.0),
        (pytest.approx(math.sqrt((25 + 16) / 4)), 5.0),
    ]
