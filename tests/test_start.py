"""Where tensors start: their size, their zone around zero, how far they may grow, and what that does not change."""

import copy
import math
import pickle
import weakref

import pytest
import torch
from torch import nn

from compiler import needs_cc
from torchmadam import LadderFormat, Madam, groups, held, start, to_dense_, to_ladder_
from torchmadam.theory.sums import width_of

EVERY_FORM = [{}, pytest.param({"compile": True}, marks=needs_cc)]
CODES = LadderFormat.signed(8)
VECTORS = [(), (1,), (6,), (6, 1, 1), (1, 6, 1, 1), (1, 1, 6)]


def start_of(tensor, ladder=None, make=Madam, **arguments):
    (group,) = make([nn.Parameter(tensor)], **arguments).param_groups
    (found,) = start.starts(group, [None], group["params"], ladder)
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
    assert start_of(w) == start.Start(pytest.approx(w.square().mean().sqrt().item()))


@pytest.mark.parametrize(
    ("shape", "inputs"),
    [((3, 16), 16), ((7, 4, 2, 2), 16), ((100, 25), 25), ((2, 10_000), None)],
)
@pytest.mark.parametrize("size", [0.0, 1e-5])
@pytest.mark.parametrize("ladder", [None, CODES])
def test_matrices_of_zeros_or_next_to_it_have_the_size_that_their_inputs_ask_for(shape, inputs, size, ladder):
    silent = torch.full(shape, size)
    expected = 0.01 if inputs is None else 0.5 / math.sqrt(inputs)
    assert start_of(silent, ladder) == start.Start(pytest.approx(expected), is_zeros=size == 0)
    assert start_of(silent, ladder, zero_scale=2.0).sigma == 2.0
    assert start_of(silent, ladder, scale=0.02).sigma == 0.02
    assert start_of(silent, ladder, make=Madam.paper).sigma == 0.01


@pytest.mark.parametrize(("shape", "inputs"), [((1, 25), 25), ((9, 1), 1)])
def test_a_matrix_of_one_row_or_column_moves_as_a_matrix_and_grows_as_a_vector(shape, inputs):
    """It may be a layer of one output or input, or somebody's bias."""
    silent, sigma = torch.zeros(shape), 0.5 / math.sqrt(inputs)
    floats, codes = start_of(silent), start_of(silent, CODES)
    assert (floats.sigma, codes.sigma) == pytest.approx((sigma, sigma))
    assert (floats.scale * 5, codes.scale * 5) == pytest.approx((100.0, 5.0))
    assert start_of(torch.full(shape, 0.03)).scale * 5 == pytest.approx(100.0)
    assert start_of(torch.full(shape, 0.03), CODES).room == 1.0


@pytest.mark.parametrize("value", [1e-3, 1.01e-4])
def test_small_matrices_that_are_no_zeros_keep_their_own_size(value):
    assert start_of(torch.full((3, 16), value)) == start.Start(pytest.approx(value))


@pytest.mark.parametrize("shape", VECTORS)
@pytest.mark.parametrize("value", [0.0, 1e-5, 0.03, 1.0])
@pytest.mark.parametrize("bound", [2.0, 5.0, 50.0])
def test_vectors_have_a_zone_of_their_own_size_and_may_grow_to_twenty_times_the_bound(shape, value, bound):
    found = start_of(torch.full(shape, value), bound=bound)
    sigma = 0.01 if value < 1e-4 else value
    assert found.sigma == pytest.approx(sigma)
    assert found.scale * bound == pytest.approx(20 * bound)
    width = found.share(groups.usual_crossing(bound)) * found.scale * bound
    assert width == pytest.approx(min(bound, 5.0) * sigma)


def test_vectors_that_begin_beyond_their_bound_stay_there():
    assert start_of(torch.full((6,), 400.0)).scale * 5 == pytest.approx(2000.0)  # of their own size
    far = torch.tensor([1e3] + [0.0] * 999)
    assert start_of(far).scale * 5 == pytest.approx(1e3, rel=1e-5)


@pytest.mark.parametrize("shape", VECTORS)
@pytest.mark.parametrize("bound", [5.0, 20.0])
def test_coded_vectors_of_zeros_may_grow_to_the_bound_itself_and_others_as_ever(shape, bound):
    for value in (0.0, 1e-5):
        assert start_of(torch.full(shape, value), CODES, bound=bound).scale == pytest.approx(1.0)
        assert start_of(torch.full(shape, value), LadderFormat.signed(3), bound=bound).scale == pytest.approx(1.0)
        # Whose only rungs are its ends and zero.
        assert start_of(torch.full(shape, value), LadderFormat.signed(2), bound=bound).scale == pytest.approx(0.01)
    assert start_of(torch.full(shape, 0.03), CODES, bound=bound) == start.Start(pytest.approx(0.03))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (2, 0, 4)])
@pytest.mark.parametrize("ladder", [None, CODES])
@pytest.mark.parametrize("zero_scale", [0.01, 0.0])
def test_what_is_empty_starts_somewhere(shape, ladder, zero_scale):
    found = start_of(torch.empty(shape), ladder, zero_scale=zero_scale)
    assert (found.room, found.is_zeros) == (1.0, False)


@pytest.mark.parametrize("arguments", [{"scale": 0.03}, {"make": Madam.paper}, {"bound": None}])
def test_a_given_scale_the_papers_rule_and_no_bound_need_no_room(arguments):
    for tensor in (torch.full((6,), 0.03), torch.tensor([[0.0] * 99 + [9.0]])):
        assert start_of(tensor, **arguments).room == 1.0


@pytest.mark.parametrize(
    ("make", "arguments", "sigma", "stuck"),
    [
        (Madam.paper, {}, 0.01, False),
        (Madam.paper, {"scale": 0.1}, 0.1, False),
        (Madam.paper, {"zero_scale": 0.0}, 0.0, True),
        (Madam.paper, {"zero_scale": 0.0, "scale": 0.1}, 0.1, True),
        (Madam, {"zero_scale": torch.tensor(0.02), "bound": torch.tensor(5.0)}, pytest.approx(0.02), False),
        (Madam, {"zero_scale": 0.0}, 0.0, True),
        (Madam, {"zero_scale": 0.0, "scale": 0.1}, 0.1, False),
        (Madam, {"scale": 0.1}, 0.1, False),
    ],
)
def test_zeros_move_unless_they_have_no_scale_or_no_zone(make, arguments, sigma, stuck):
    found = start_of(torch.zeros(3), make=make, **arguments)
    assert (found.sigma, found.is_stuck, found.is_zeros) == (sigma, stuck, True)
    assert not stuck or found.scale == sigma
    assert type(found.sigma) is type(found.room) is float
    zone = 0.0 if stuck else 1 / found.room
    assert (found.share(0.0), found.share(1.0)) == (zone, zone)
    if not stuck:
        (moved,), _ = trained([torch.zeros(3)], make=make, **arguments)
        assert torch.all(moved > 0)
        return
    with pytest.warns(UserWarning, match="a multiplicative step can never move it"):
        (stays,), _ = trained([torch.zeros(3)], make=make, **arguments)
    assert not stays.any()


def test_no_share_of_others_is_a_zone_under_the_papers_rule():
    assert start_of(torch.ones(3, 3), make=Madam.paper).share(0.0) == 0.0


@pytest.mark.parametrize(
    ("dtype", "form"),
    [(dtype, {}) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)]
    + [pytest.param(dtype, {"compile": True}, marks=needs_cc) for dtype in (torch.float32, torch.bfloat16)],
)
def test_a_bias_grows_beyond_its_zone_and_moves_within_it_as_ever(dtype, form):
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
    (zeros, bias), _ = trained(shapes, steps=99, lr=0.1, **form)
    for found in (zeros, bias):
        torch.testing.assert_close(found.float(), torch.full((40,), 100.0), rtol=0.004, atol=0)


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
    assert state["scale"] * 5 == pytest.approx(40.0, rel=1e-5)
    (grown,), _ = trained([outlier], steps=50, **form)
    assert grown.max().item() == pytest.approx(40.0, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_rounding_of_the_limit_cuts_what_it_was_made_for(dtype):
    torch.manual_seed(0)
    for _ in range(200):
        w = (torch.randn(10, 10) * 0.05).to(dtype)
        w[0, 0] = 1 + torch.rand(())
        before = w[0, 0].item()
        (found,), _ = trained([w], lr=1e-7, rounding="nearest")
        assert found[0, 0].item() >= before


def test_the_papers_rule_and_codes_cut_as_they_did():
    outlier = torch.cat([torch.full((99,), 0.1), torch.tensor([9.0])]).view(10, 10)
    sigma = outlier.square().mean().sqrt().item()
    (found,), _ = trained([outlier], make=Madam.paper)
    assert found.max().item() == pytest.approx(3 * sigma)
    assert start_of(outlier, CODES).room == 1.0


@pytest.mark.parametrize(
    ("arguments", "crossing"),
    [
        ({}, 1.0),
        ({"bound": 3.0}, 1.0),
        ({"bound": 10}, 0.5),
        ({"bound": torch.tensor(10.0)}, 0.5),
        ({"bound": None}, 5.0),
        ({"bound": 10, "crossing": 1}, 1.0),
        ({"bound": 1e7}, 5e-7),
    ],
)
def test_the_zone_is_five_sigma_or_the_bound_unless_told_otherwise(arguments, crossing):
    def crossings(optimizer):
        return [pytest.approx(groups.crossing_of(group)) for group in optimizer.param_groups]

    p, q = nn.Parameter(torch.full((2, 3), 0.1)), nn.Parameter(torch.full((2, 3), 0.1))
    assert crossings(Madam([p], **arguments)) == [crossing]
    optimizer = Madam([{"params": [p]}, {"params": [q], **arguments}])
    again = Madam([{"params": [p]}, {"params": [q]}])
    again.load_state_dict(optimizer.state_dict())
    for each in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), again):
        assert crossings(each) == [1.0, crossing]


def test_a_group_that_is_given_the_defaults_steps_by_them():
    p = nn.Parameter(torch.full((2, 3), 0.1))
    optimizer = Madam([p])
    optimizer.param_groups[0].update(optimizer.defaults)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.all(p < 0.1)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, "five"])
def test_a_bound_that_cannot_work_is_refused_for_what_it_is(bound):
    with pytest.raises((ValueError, TypeError), match="bound="):
        Madam([nn.Parameter(torch.ones(2, 2))], bound=bound)


def test_without_a_bound_steps_are_those_with_one_that_is_far_away():
    torch.manual_seed(0)
    tensors = [torch.rand(20, 30) - 0.5, torch.zeros(4, 25), torch.zeros(6), torch.full((6,), 0.03)]
    usual, *others = (trained(tensors, steps=30, bound=bound)[0] for bound in (5.0, None, 20.0, 1000.0))
    for other in others:
        torch.testing.assert_close(other, usual, rtol=1e-4, atol=1e-6)


def test_a_zone_that_is_changed_later_changes_for_all():
    tensors = [torch.full((4, 4), 0.1), torch.full((4,), 0.1), torch.zeros(4)]
    _, optimizer = trained(tensors)
    (group,) = optimizer.param_groups
    for crossing in (None, 0.1, 0.0):
        group["crossing"] = crossing
        widths = [float(width_of(p, optimizer, group, None)) for p in group["params"]]
        expected = {None: [0.5, 0.5, 0.05], 0.1: [0.05, 0.05, 0.005], 0.0: [0.0, 0.0, 0.05]}
        assert widths == pytest.approx(expected[crossing])


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


@pytest.mark.parametrize("make", [Madam, Madam.paper])
def test_which_entries_a_state_has_does_not_depend_on_what_was_drawn(make):
    w = torch.rand(30, 20) - 0.5
    outlier = w.clone()
    outlier[0, 0] = 9.0
    tensors = [w, outlier, torch.zeros(3, 4), torch.zeros(4), torch.ones(4)]
    _, optimizer = trained(tensors, make=make)
    assert len({frozenset(state) for state in optimizer.state.values()}) == 1


@pytest.mark.parametrize(("crossing", "kept"), [(1.0, 1.0), (0.3, 1.0), (0.0, 1.0), (0.0, 0.0), (1.0, 0.0)])
def test_zeros_of_a_state_from_before_keep_the_zone_that_they_had(crossing, kept):
    """It was a share of their limit; others had none of their own."""
    own, others = {"scale": torch.tensor(0.01), "crossing": kept}, {"scale": torch.tensor(0.1)}
    states = dict(zip((nn.Parameter(torch.ones(2)) for _ in range(2)), (own, others), strict=True))
    group = {"crossing": crossing, "bound": 5.0, "params": [*states, nn.Parameter(torch.ones(2))]}
    for _ in range(2):
        held.renew(group, states)
        assert "crossing" not in own | others
        assert held.crossing_of(group, own) == pytest.approx(kept)
        assert held.crossing_of(group, others) == crossing


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_pytorchs_goes_into_a_model_that_began_otherwise(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def made(outlier):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 20), nn.LayerNorm(20))
        if outlier:
            model[0].weight.data[0, 0] = 8.0
        return model, Madam(model.named_parameters())

    def stepped(model, optimizer):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    for outlier in (False, True):
        model, optimizer = made(outlier)
        stepped(model, optimizer)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / str(outlier))
        other, theirs = made(not outlier)
        weights, state = get_state_dict(other, theirs)
        loaded = {"model": weights, "optim": state}
        dcp.load(loaded, checkpoint_id=tmp_path / str(outlier))
        set_state_dict(other, theirs, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
        for each in ((model, optimizer), (other, theirs)):
            stepped(*each)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=0)


def test_sizes_are_those_of_the_whole_tensor_in_chunks(monkeypatch):
    monkeypatch.setattr(start, "_CHUNK", 7)
    w = torch.arange(-5.0, 24.0)
    assert start.sizes([w, torch.empty(0), w.to(torch.complex64)[:2]]) == [
        (pytest.approx(w.square().mean().sqrt().item()), 23.0),
        (0.0, 0.0),
        (pytest.approx(math.sqrt((25 + 16) / 4)), 5.0),
    ]


def test_sizes_hold_one_chunk_in_float64_at_a_time(monkeypatch):
    alive, most = [0], [0]
    taken = start.doubles.doubled

    def counted(chunk):
        wide = taken(chunk)
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        weakref.finalize(wide, lambda: alive.__setitem__(0, alive[0] - 1))
        return wide

    monkeypatch.setattr(start, "_CHUNK", 7)
    monkeypatch.setattr(start.doubles, "doubled", counted)
    start.sizes([torch.arange(100.0), torch.arange(50.0)])
    assert most[0] <= 2


@pytest.mark.parametrize("bits", [3, 8, 12])
@pytest.mark.parametrize("bound", [None, 5.0, 20.0])
def test_a_coded_bias_of_zeros_grows_to_the_bound_in_steps_of_its_zone(bits, bound):
    model = to_ladder_(nn.LayerNorm(200), bits, bound=bound)
    optimizer = Madam(model.parameters(), weight_decay=0.0)
    assert model.bias.limit.item() == pytest.approx(bound or 5.0)
    zone = model.bias.limit.item() * model.bias.coding.format.crossing
    assert 0.025 < zone <= 0.0501  # powers of two of the limit
    for t in range(700):
        model.bias.grad = -torch.ones(200)
        optimizer.step()
        if t == 0:
            first = model.bias.decode().mean().item()
    assert bits < 8 or first == pytest.approx(zone * 0.01, rel=0.3)
    assert model.bias.decode().mean() > (4.0 if bits > 3 else 3.0)


def test_theory_knows_the_zone_of_a_float_whose_state_is_from_when_it_was_codes():
    model = to_ladder_(nn.Linear(4, 4, bias=False), 8)
    first = Madam(model.parameters())
    model.weight.grad = torch.ones(4, 4)
    first.step()
    sigma = to_dense_(model).weight.square().mean().sqrt().item()
    second = Madam(model.parameters())
    second.load_state_dict(first.state_dict())
    assert float(width_of(model.weight, second, second.param_groups[0], None)) == pytest.approx(5 * sigma)
