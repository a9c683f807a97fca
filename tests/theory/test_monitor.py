"""Watching training without touching it."""

import copy
import math
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchmadam import LadderFormat, Madam, release_gradients, to_ladder_
from torchmadam.theory import TrustMonitor, layer_angles


def network(seed=0, width=12):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1), nn.Tanh(), nn.Linear(width, 3))


def trained(model, optimizer, steps=12, width=12):
    torch.manual_seed(1)
    x, y = torch.randn(30, width), torch.randn(30, 3)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


# ---- what it sees


def test_a_step_of_sgd_in_closed_form():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, -4.0], [0.1, 0.0]]))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.5)
    with TrustMonitor(optimizer, every=1) as monitor:
        model.weight.grad = torch.tensor([[1.0, 2.0], [2.0, 0.0]])
        model.bias.grad = torch.ones(2)
        optimizer.step()
    (seen,) = monitor.observations
    assert list(seen.layers) == ["weight"]  # a bias is no layer
    layer = seen.layers["weight"]
    length = math.sqrt(9 + 16 + 0.01)
    assert layer.cosine == pytest.approx((3 * 1 + 4 * 2 + 0.1 * 2) / (length * 3))
    assert layer.alignment == pytest.approx(1.0)
    assert layer.relative_size == pytest.approx(0.5 * 3 / length)
    assert layer.flips == 1 / 4  # 0.1 - 1 is negative
    assert (layer.upper, layer.lower, layer.rungs, layer.moved) == (None,) * 4
    assert seen.trust == pytest.approx(layer.relative_size)
    assert seen.bound == pytest.approx(layer.cosine)  # one layer: (1 + cos)^(1/1) - 1


def coded(weights, ladder, limit):
    """A layer of one row whose weights are rungs of a ladder."""
    model = nn.Linear(len(weights), 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([weights]))
    rms = model.weight.detach().square().mean().sqrt().item()
    return to_ladder_(model, ladder, init="nearest", bound=limit / rms)


def test_codes_on_the_papers_ladder_against_counts_by_hand():
    ladder = LadderFormat.paper(2, spacing=0.5)  # k in 0 .. 3
    rung = [math.exp(-0.5 * k) for k in range(4)]
    model = coded([rung[0], -rung[0], rung[1], -rung[2], rung[3]], ladder, 1.0)
    assert (model.weight.codes() & 3).tolist() == [[0, 0, 1, 2, 3]]
    optimizer = Madam(model.parameters(), lr=0.5, second_moment="none")  # a rung a step
    with TrustMonitor(optimizer, every=1) as monitor:
        model.weight.grad = torch.tensor([[1.0, 1.0, -1.0, 0.0, 1.0]])
        optimizer.step()
    # The first shrinks; the second is negative, would grow, and cannot; the third grows; the last cannot shrink.
    assert (model.weight.codes() & 3).tolist() == [[1, 0, 0, 2, 3]]
    (layer,) = monitor.observations[0].layers.values()
    assert (layer.upper, layer.lower, layer.rungs, layer.moved, layer.flips) == (2 / 5, 1 / 5, 2 / 5, 2 / 5, 0.0)
    step = 1 - rung[1]
    assert layer.relative_size == pytest.approx(math.sqrt(2 * step**2 / sum(w**2 for w in (1, *rung))), rel=1e-6)


def test_codes_on_a_signed_ladder_flip_once_when_they_pass_through_zero():
    ladder = LadderFormat.signed(3, 1.0)  # k in -3 .. 3
    rung = [math.sinh(ladder.spacing * k) for k in range(-3, 4)]
    model = coded([rung[3 + k] for k in (-3, -1, 0, 1, 3)], ladder, 1.0)
    optimizer = Madam(model.parameters(), lr=2 * ladder.spacing, second_moment="none", rounding="nearest")
    monitor = TrustMonitor(optimizer, every=1)
    seen = []
    for sign in (1.0, -1.0):
        model.weight.grad = torch.tensor([[sign, -sign, sign, sign, -sign]])
        optimizer.step()
        seen.append((model.weight.codes() - 3).flatten().tolist())
    assert seen == [[-3, 1, -2, -1, 3], [-1, -1, 0, 1, 1]]
    first, second = (o.layers[next(iter(o.layers))] for o in monitor.observations)
    assert (first.upper, first.lower, first.moved, first.rungs) == (2 / 5, 0.0, 3 / 5, 6 / 5)
    assert (second.upper, second.lower, second.moved, second.rungs) == (0.0, 1 / 5, 1.0, 2.0)
    assert first.flips == 3 / 5  # -1 to 1, 0 to -2, 1 to -1
    assert second.flips == 3 / 5  # 1 to -1, -2 to 0, -1 to 1


def test_the_angle_is_the_one_that_the_theory_measures_with_crossing_too():
    for make in (
        lambda m: Madam(m.named_parameters(), crossing=0.5),
        lambda m: Madam(m.named_parameters()),
        lambda m: Madam(to_ladder_(m, "signed8").named_parameters()),
        lambda m: torch.optim.Adam(m.named_parameters()),
    ):
        model = network()
        optimizer = make(model)
        trained(model, optimizer, 3)
        torch.manual_seed(2)
        model(torch.randn(30, 12)).square().mean().backward()
        expected = layer_angles(model, optimizer)
        with TrustMonitor(optimizer, every=1) as monitor:
            optimizer.step()
        found = {name: layer.cosine for name, layer in monitor.observations[0].layers.items()}
        assert found == pytest.approx({name: math.cos(gamma) for name, gamma in expected.items()})


def test_under_the_sign_rule_the_step_is_as_far_from_the_gradient_as_the_weights_are():
    model = network().double()
    optimizer = Madam.paper(model.named_parameters(), 1e-5, second_moment="none", bound=None)
    with TrustMonitor(optimizer, every=1) as monitor:
        torch.manual_seed(1)
        model(torch.randn(30, 12, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    for layer in monitor.observations[0].layers.values():
        assert layer.relative_size == pytest.approx(1e-5, rel=1e-4)
        assert layer.alignment == pytest.approx(layer.cosine, rel=1e-4)


def test_training_that_has_blown_up_is_observed_as_it_is():
    model = network()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=1e30)
    with TrustMonitor(optimizer, every=1) as monitor:
        trained(model, optimizer, 4)
    first, last = monitor.observations[0], monitor.observations[-1]
    assert first.trust > 1e20
    assert math.isnan(last.layers["0.weight"].cosine)
    assert math.isnan(last.bound)


def test_a_layer_whose_gradient_is_zero_does_not_bound_the_step():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].bias.fill_(-100)  # nothing passes
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    with TrustMonitor(optimizer, every=1) as monitor:
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
    (seen,) = monitor.observations
    cosines = [layer.cosine for layer in seen.layers.values()]
    assert cosines[:2] == [0, 0]
    assert seen.bound == pytest.approx(cosines[2])


def test_nothing_is_promised_of_a_layer_of_zeros_that_moves():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    nn.init.zeros_(model[1].weight)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    with TrustMonitor(optimizer, every=1) as monitor:
        (model(torch.randn(3, 4)) - 1).square().sum().backward()
        optimizer.step()
    assert monitor.observations[0].bound == 0


def test_layers_are_the_users_choice_and_may_mix_floats_and_codes():
    model = network()
    to_ladder_(model[0], "signed8")
    optimizer = Madam(model.named_parameters())
    monitor = TrustMonitor(optimizer, every=1, layers=lambda name, p: "all")
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    trained(model, optimizer, 1)
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    (layer,) = monitor.observations[0].layers.values()
    assert layer.relative_size == pytest.approx(float((after - weights).norm() / weights.norm()), rel=1e-5)
    assert 0 < layer.moved <= 1  # of the codes, not of all weights
    with pytest.raises(ValueError, match="choose others with layers="):
        TrustMonitor(optimizer, layers=lambda name, p: None)
    with pytest.raises(ValueError, match="every=0"):
        TrustMonitor(optimizer, every=0)


def test_parameters_without_names_are_numbered_and_the_gradient_may_come_from_a_closure():
    model = network()
    optimizer = Madam(model.parameters())
    monitor = TrustMonitor(optimizer)

    def closure():
        loss = model(torch.ones(4, 12)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert list(monitor.observations[0].layers) == ["parameter 0", "parameter 2"]
    assert monitor.observations[0].layers["parameter 0"].cosine > 0


@pytest.mark.parametrize("ladder", [None, "paper12", "signed8"])
def test_steps_that_run_no_hooks_are_seen_where_they_are_said_to_be(ladder):
    """A replayed graph changes weights behind the optimiser's back; here the optimiser's own step does, unhooked."""
    seen = []
    for told in (False, True):
        model = network() if ladder is None else to_ladder_(network(), ladder)
        optimizer = Madam(model.named_parameters())
        torch.manual_seed(1)
        with TrustMonitor(optimizer, every=3) as monitor:
            for _ in range(7):
                optimizer.zero_grad()
                model(torch.randn(5, 12)).square().sum().backward()
                if told:
                    with monitor.step(), torch.no_grad():
                        for group in optimizer.param_groups:
                            optimizer.step_group(group)
                else:
                    optimizer.step()
        seen.append(monitor.observations)
        assert monitor.steps == 7
    assert seen[0] == seen[1]
    assert [each.step for each in seen[0]] == [0, 3, 6]


def test_a_step_that_is_told_of_and_runs_hooks_counts_once_and_one_that_fails_not_at_all():
    model = network()
    optimizer = Madam(model.named_parameters())
    with TrustMonitor(optimizer, every=1) as monitor:
        with monitor.step():
            trained(model, optimizer, steps=1)
        assert (monitor.steps, len(monitor.observations)) == (1, 1)
        with pytest.raises(ZeroDivisionError), monitor.step():
            raise ZeroDivisionError
        assert (monitor.steps, len(monitor.observations), monitor._before) == (1, 1, {})
        trained(model, optimizer, steps=1)
    assert [each.step for each in monitor.observations] == [0, 1]


def test_numbers_go_to_a_summary_writer():
    written = {}

    class Writer:
        def add_scalar(self, tag, scalar_value, global_step):
            written[tag, global_step] = scalar_value

    model = to_ladder_(network(), "paper12")
    optimizer = Madam(model.named_parameters())
    monitor = TrustMonitor(optimizer, every=5, writer=Writer())
    trained(model, optimizer, 8)
    names = ("cosine", "alignment", "relative_size", "flips", "upper", "lower", "rungs", "moved")
    assert set(written) == {
        (f"trust/{n}/{layer}.weight", step) for n in names for layer in (0, 3) for step in (0, 5)
    }  # fmt: skip
    assert written["trust/rungs/0.weight", 5] == monitor.observations[1].layers["0.weight"].rungs


def test_released_gradients_leave_nothing_to_see_and_a_warning_says_so():
    model = network()
    optimizer = Madam(model.named_parameters())
    release_gradients(model, optimizer)
    monitor = TrustMonitor(optimizer)
    with pytest.warns(UserWarning, match="release_gradients frees them"):
        trained(model, optimizer, 1)
    assert monitor.observations == []


# ---- what it leaves alone


KINDS = {
    "float": lambda m: Madam(m.named_parameters()),
    "bfloat16": lambda m: Madam(m.to(torch.bfloat16).named_parameters()),
    "crossing": lambda m: Madam(m.named_parameters(), crossing=1.0),
    "paper": lambda m: Madam(to_ladder_(m, "paper12").named_parameters(), rounding="stochastic"),
    "signed": lambda m: Madam(to_ladder_(m, "signed8").named_parameters()),
    "adam": lambda m: torch.optim.Adam(m.named_parameters()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_same_bit_for_bit_with_and_without(kind):
    ends = []
    for every in (None, 1, 3):
        model = network(width=16)
        optimizer = KINDS[kind](model)
        if every:
            monitor = TrustMonitor(optimizer, every)
        torch.manual_seed(1)
        x, y = torch.randn(30, 16), torch.randn(30, 3)
        for _ in range(12):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x.to(model[0].weight.dtype)).float(), y).backward()
            optimizer.step()
        if every:
            assert [o.step for o in monitor.observations] == list(range(0, 12, every))
        tensors = [p.codes() if hasattr(p, "codes") else p.detach() for p in model.parameters()]
        tensors += [t for p in model.parameters() for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
        ends.append([*tensors, torch.get_rng_state()])
    for other in ends[1:]:
        assert len(ends[0]) == len(other)
        assert all(torch.equal(a, b) for a, b in zip(ends[0], other, strict=True))


def test_a_run_that_goes_on_is_observed_at_the_same_steps():
    model = network()
    optimizer = Madam(model.named_parameters())
    with TrustMonitor(optimizer, every=4) as whole:
        trained(model, optimizer, 10)
    model = network()
    optimizer = Madam(model.named_parameters())
    with TrustMonitor(optimizer, every=4) as first:
        trained(model, optimizer, 6)
    second = TrustMonitor(optimizer, every=4)
    second.steps = first.steps
    trained(model, optimizer, 4)
    assert [o.step for o in first.observations + second.observations] == [o.step for o in whole.observations]


def test_removed_monitors_see_nothing_more():
    model = network()
    optimizer = Madam(model.named_parameters())
    with TrustMonitor(optimizer, every=1) as monitor:
        trained(model, optimizer, 2)
    trained(model, optimizer, 2)
    assert len(monitor.observations) == 2
    monitor.remove()  # a second time does no harm
    copy.deepcopy(optimizer)


class Counting(TorchDispatchMode):
    """Counts operators and the elements that they make, and remembers the tensors weakly."""

    def __init__(self):
        super().__init__()
        self.operators, self.elements, self.made = 0, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.operators += 1
        self.elements += sum(t.numel() for t in tensors)
        self.made += [weakref.ref(t) for t in tensors]
        return out


@pytest.mark.parametrize("ladder", [None, "paper12", "signed8"])
def test_steps_that_are_not_observed_do_no_work_and_observed_ones_a_few_passes(ladder):
    """An observed step makes up to 72 tensors of the weights' size: at one in a hundred, less than one a step."""
    counts = []
    for every in (None, 100):
        model = network(width=64)
        if ladder is not None:
            to_ladder_(model, ladder)
        optimizer = Madam(model.named_parameters())
        monitor = TrustMonitor(optimizer, every) if every else None
        work = []
        for step in range(3):
            for p in model.parameters():
                p.grad = torch.ones(p.shape)
            with warnings.catch_warnings(), Counting() as counting:
                warnings.simplefilter("ignore")
                optimizer.step()
            work.append((counting.operators, counting.elements))
            if every and step == 0:  # nothing of the observed step is held
                assert len(monitor.observations) == 1
                own = {id(t) for state in optimizer.state.values() for t in state.values()}
                alive = [t for made in counting.made if (t := made()) is not None and id(t) not in own]
                assert sum(t.numel() for t in alive) < 64
        counts.append(work)
    plain, watched = counts
    assert plain[1:] == watched[1:]
    weights = 64 * 64 + 64 * 3
    assert 0 < watched[0][1] - plain[0][1] < 75 * weights
    assert watched[0][0] - plain[0][0] < 2 * 105  # two layers


def test_a_compiled_step_is_observed_and_counted():
    torch._dynamo.reset()
    model = network()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    monitor = TrustMonitor(optimizer, every=2)
    torch.manual_seed(1)
    model(torch.randn(30, 12)).square().mean().backward()
    step = torch.compile(optimizer.step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, while it compiles
        for _ in range(5):
            step()
    assert [seen.step for seen in monitor.observations] == [0, 2, 4]
    assert monitor.observations[1].layers["0.weight"].relative_size > 0
