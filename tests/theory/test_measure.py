"""The theory's quantities on live networks."""

import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchmadam import Madam, theory, to_ladder_
from torchmadam.theory import (
    LayerWise,
    deep_relative_trust,
    descent_report,
    gradient_breakdown,
    layer_angles,
    safe_lr,
)


def network(depth, seed, width=12, dtype=torch.float64, bias=True):
    torch.manual_seed(seed)
    layers = [m for _ in range(depth - 1) for m in (nn.Linear(width, width, bias), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(width, 3, bias)).to(dtype)


def loss_of(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(20, 12, generator=generator, dtype=torch.float64)
    y = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    return lambda: nn.functional.mse_loss(model(x.to(model[0].weight.dtype)).double(), y)


OPTIMISERS = {
    "madam": lambda p, lr: Madam(p, lr),
    "sign rule": lambda p, lr: Madam(p, lr, second_moment="none", bound=None),
    "crossing": lambda p, lr: Madam(p, lr, crossing=0.5),
    "layer-wise": lambda p, lr: LayerWise(p, lr),
    "sgd": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9),
    "adam": lambda p, lr: torch.optim.Adam(p, lr),
}


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 6), st.integers(0, 1000), st.sampled_from(list(OPTIMISERS)), st.floats(1e-3, 0.3))
def test_lemma_1_holds_on_random_networks(depth, seed, kind, lr):
    model = network(depth, seed)
    closure = loss_of(model, seed)
    before = [p.detach().clone() for p in model.parameters()]
    report = descent_report(model, closure, OPTIMISERS[kind](model.parameters(), lr), points=20)
    # A maximum over 20 points is a little below the maximum over all t.
    slack = 0.1 * sum(math.hypot(row.predicted, 1e-12) + row.breakdown * abs(row.predicted) for row in report.layers)
    assert report.actual <= report.bound + slack
    if report.promises_descent:
        assert report.actual < slack
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_linear_network_of_one_layer_has_everything_in_closed_form():
    """L = sum((W x - y)^2) / 2 with x the unit vectors: g = W - Y, so g(W + t dW) - g(W) = t dW."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False).double()
    target = torch.randn(3, 4, dtype=torch.float64)

    def closure():
        return 0.5 * (model.weight - target).square().sum()

    w = model.weight.detach().clone()
    g = w - target
    optimizer = LayerWise(model.parameters(), 0.1)
    report = descent_report(model, closure, optimizer)
    step = -0.1 * w.norm() / g.norm() * g
    (row,) = report.layers
    assert row.theta == pytest.approx(0, abs=1e-6)
    assert row.gamma == pytest.approx(math.acos(float((w.abs() * g.abs()).sum() / w.norm() / g.norm())))
    assert row.relative_size == pytest.approx(0.1)
    assert row.breakdown == pytest.approx(float(step.norm() / g.norm()))
    assert report.trust == pytest.approx(0.1)
    assert report.predicted == pytest.approx(float((g * step).sum()))
    assert report.actual == pytest.approx(float((g * step).sum() + 0.5 * step.square().sum()))
    assert report.bound == pytest.approx(float((g * step).sum() + step.square().sum()))
    assert report.lemma_held
    assert "deep relative trust allows" in str(report)


@given(st.integers(1, 6), st.floats(1e-3, 1.0), st.booleans())
@settings(max_examples=25, deadline=None)
def test_linear_networks_scaled_as_a_whole_break_down_like_products(depth, size, quadratic):
    """f = W_L ... W_1, all scaled by 1 + s: g_k grows by (1 + s)^(L-1), and the loss's derivative by its own factor.

    Under a loss that is linear in f the assumption holds. Under f^2 / 2 the derivative is f, which grows by (1 + s)^L,
    and the assumption, which leaves it out, fails at every depth above one.
    """
    torch.manual_seed(depth)
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(depth)]).double()
    x, c = torch.eye(4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)

    def closure():
        return 0.5 * model(x).square().sum() if quadratic else (model(x) * c).sum()

    step = {name: size * p.detach() for name, p in model.named_parameters()}
    found = gradient_breakdown(model, closure, step)
    exact = (1 + size) ** (depth - 1 + depth * quadratic) - 1
    assert list(found.values()) == pytest.approx([exact] * depth, rel=1e-9, abs=1e-12)
    trust = deep_relative_trust(model, step)
    assert trust == pytest.approx((1 + size) ** depth - 1)
    if depth > 1:
        assert (exact > trust) == quadratic


def test_the_sign_rule_descends_below_the_bound_where_trust_holds():
    descended = trusted = 0
    for seed in range(20):
        model = network(2, seed, bias=False)
        closure = loss_of(model, seed)
        lr = 0.9 * safe_lr(model, closure)
        optimizer = Madam(model.parameters(), lr, second_moment="none", bound=None, zero_scale=0.0)
        report = descent_report(model, closure, optimizer)
        trusted += report.trust_held
        descended += report.actual < 0
        if report.trust_held:
            assert report.actual < 0
    assert trusted >= 10
    assert descended == 20


def test_a_step_of_madam_is_the_one_that_is_reported():
    model = network(3, 1)
    closure = loss_of(model, 1)
    optimizer = Madam(model.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        closure().backward()
        optimizer.step()
    state = {k: v.clone() for k, v in optimizer.state[model[0].weight].items() if isinstance(v, torch.Tensor)}
    report = descent_report(model, closure, optimizer)
    assert all(torch.equal(optimizer.state[model[0].weight][k], v) for k, v in state.items())
    before = closure().item()
    optimizer.zero_grad()
    closure().backward()
    optimizer.step()
    assert report.loss == pytest.approx(before)
    assert report.actual == pytest.approx(closure().item() - before, rel=1e-6)


@pytest.mark.parametrize("ladder", ["paper12", "signed8"])
def test_coded_networks_are_measured_and_come_back_exactly(ladder):
    model = to_ladder_(network(3, 0, dtype=torch.float32), ladder)
    closure = loss_of(model)
    parameters, codes = list(model.parameters()), [p.codes() for p in model.parameters()]
    optimizer = Madam(model.parameters(), 0.02)
    report = descent_report(model, closure, optimizer)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(p.codes(), c) for p, c in zip(parameters, codes, strict=True))
    assert report.lemma_held
    before = closure().item()
    closure().backward()
    optimizer.step()
    assert report.actual == pytest.approx(closure().item() - before, abs=1e-6)
    if ladder == "signed8":  # its steps are longer, relative to a layer
        assert safe_lr(model, closure) < theory.descent_bound(theory.GAUSSIAN_COSINE, 3, exponential=True)


def test_buffers_dropout_and_tied_weights_are_left_as_they_were():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Dropout(0.5), nn.Linear(12, 12), nn.Linear(12, 3))
    model[3].weight = model[0].weight
    x = torch.randn(20, 12)
    buffers = [b.clone() for b in model.buffers()]
    state = torch.get_rng_state()
    first, second = (
        descent_report(model, lambda: model(x).square().mean(), Madam(model.parameters())) for _ in range(2)
    )
    assert first == second
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert model[3].weight is model[0].weight
    assert [row.name for row in first.layers if row.is_layer] == ["0.weight", "4.weight"]


def test_a_report_holds_no_more_than_three_copies_of_the_parameters():
    """Counts the storages of a weight's size that operators have touched and that are still alive."""

    class Live(TorchDispatchMode):
        made, most = {}, 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen = tree_leaves((args, out))
            self.made.update({id(t): weakref.ref(t) for t in seen if isinstance(t, torch.Tensor)})
            storages = [t.untyped_storage() for made in self.made.values() if (t := made()) is not None]
            bytes_of = {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in own}
            self.most = max(self.most, sum(size == 64 * 64 * 8 for size in bytes_of.values()))
            return out

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(12)]).double()
    x = torch.randn(3, 64, dtype=torch.float64)
    optimizer = Madam(model.parameters())
    model(x).square().mean().backward()
    optimizer.step()
    for state in optimizer.state.values():  # float32 would not be counted
        state["second_moment"] = state["second_moment"].double()
    held = [t for p in model.parameters() for t in (p, p.grad, optimizer.state[p]["second_moment"])]
    own = {t.untyped_storage().data_ptr() for t in held}
    with Live() as live:
        descent_report(model, lambda: model(x).square().mean(), optimizer)
    assert 3 * 12 <= live.most <= 3 * 12 + 8  # and some temporaries of one tensor


def test_layers_are_the_users_choice():
    model = network(3, 0)
    closure = loss_of(model)
    closure().backward()
    assert list(layer_angles(model)) == ["0.weight", "2.weight", "4.weight"]
    together = layer_angles(model, layers=lambda name, p: name.partition(".")[0])
    assert list(together) == ["0", "2", "4"]
    weight, bias = model[0].weight, model[0].bias
    a = torch.cat([weight.detach().flatten(), bias.detach()]).abs()
    b = torch.cat([weight.grad.flatten(), bias.grad]).abs()
    assert together["0"] == pytest.approx(math.acos(float(a @ b / a.norm() / b.norm())))
    step = {name: 0.1 * p.detach() for name, p in model.named_parameters()}
    assert deep_relative_trust(model, step) == pytest.approx(1.1**3 - 1)
    assert deep_relative_trust(model, {"0.weight": step["0.weight"]}) == pytest.approx(0.1)
    found = gradient_breakdown(model, closure, {name: 0 * s for name, s in step.items()})
    assert set(found.values()) == {0.0}
    with pytest.raises(ValueError, match="no layers"):
        safe_lr(model, closure, layers=lambda name, p: None)
    with pytest.raises(TypeError, match="the closure returned a float; it must return the loss, a tensor"):
        safe_lr(model, lambda: 1.0)


def test_with_crossing_the_angle_and_the_size_of_a_layer_change():
    model = network(2, 0)
    closure = loss_of(model)
    closure().backward()
    optimizer = Madam.paper(model.parameters(), 1e-4, crossing=0.5, second_moment="none", bound=2.0)
    weight = model[0].weight
    rms = float(weight.detach().square().mean().sqrt())
    width = 0.5 * 2.0 * rms
    reach = (weight.detach() ** 2 + width**2).sqrt()
    expected = float((reach * weight.grad.abs()).sum() / reach.norm() / weight.grad.norm())
    assert layer_angles(model, optimizer)["0.weight"] == pytest.approx(math.acos(expected), rel=1e-6)
    row = next(r for r in descent_report(model, closure, optimizer).layers if r.name == "0.weight")
    assert row.relative_size == pytest.approx(1e-4 * theory.stretch(width, rms), rel=1e-3)
    assert math.cos(row.theta) == pytest.approx(expected, rel=1e-3)  # the step is that far from the gradient


def test_the_layer_wise_rule_moves_every_layer_by_the_same_relative_amount():
    model = network(3, 0)
    loss_of(model)().backward()
    before = [p.detach().clone() for p in model.parameters()]
    LayerWise(model.parameters(), 0.1).step()
    for a, p in zip(before, model.parameters(), strict=True):
        step = p.detach() - a
        assert float(step.norm() / a.norm()) == pytest.approx(0.1)
        assert float((step * p.grad).sum() / step.norm() / p.grad.norm()) == pytest.approx(-1)


def test_layers_without_a_gradient_do_not_count():
    """An unused head, or one that is frozen, moves nothing and endangers nothing."""

    class WithHead(nn.Sequential):
        def forward(self, x):
            for layer in [*self][:-1]:
                x = layer(x)
            return x

    plain = network(2, 0)
    model = WithHead(*plain, nn.Linear(12, 4).double())
    optimizer = Madam.paper(model.named_parameters(), 1e-6)
    closure = loss_of(model)
    assert safe_lr(model, closure, optimizer) == pytest.approx(safe_lr(plain, closure))
    assert theory.descent_report(model, closure, optimizer).promises_descent
    model[0].requires_grad_(False)
    report = theory.descent_report(model, closure, Madam.paper(model[2].parameters(), 1e-6))
    assert report.promises_descent
    assert report.actual < 0
    with pytest.raises(ValueError, match="no layer has a gradient"):
        safe_lr(model, lambda: 0 * closure())
