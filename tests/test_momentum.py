"""Momentum: a first moment in bfloat16, against the formulas written out once more, and in everything around a step."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

import torchmadam
from compiler import needs_cc
from torchmadam import LadderFormat, Madam, held, mean, moment, release_gradients, to_ladder_
from torchmadam.repeat import situation_of

RULES = [
    {"momentum": 0.9},
    {"momentum": 0.5, "crossing": 0.3, "maximize": True},
    {"momentum": 0.95, "bias_correction": False, "bound": None},
    {"momentum": 0.9, "second_moment": "none"},
    {"momentum": 0.9, "beta": 0.9, "max_step": 0.5, "lr": 0.1},
    {"momentum": 0.9, "second_moment": "8bit"},
]
either = pytest.mark.parametrize("compile", [False, pytest.param(True, marks=needs_cc)])
every_rule = pytest.mark.parametrize("rule", RULES, ids=str)
every_kind = pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, "signed8", "paper12"], ids=str)


class Plain:
    """A tensor under the rule with momentum, in float64 but for what is defined by its rounding."""

    def __init__(self, w, momentum, lr=0.01, beta=0.999, max_step=8.0, bound=3.0, crossing=0.0, pace=1.0, **more):
        self.w, self.t, self.more = w.double(), 0, more
        self.pace = torch.as_tensor(pace)  # lr of codes, whose means are of steps
        self.momentum, self.lr, self.beta, self.max_step = momentum, lr, beta, max_step
        limit = float(self.w.square().mean().sqrt()) * (bound or 1.0)
        self.width, self.limit = crossing * limit, limit if bound else math.inf
        if crossing:  # what it begins with is not cut
            self.limit = max(self.limit, float(self.w.abs().max()))
        self.m, self.v = torch.zeros(w.shape, dtype=torch.bfloat16), torch.zeros(w.shape, dtype=torch.float64)

    def direction(self, grad):
        g = -grad.float() if self.more.get("maximize") else grad.float()
        usable = g.isfinite() & (g.double() ** 2 <= 2.0**126)
        self.t += 1
        fresh = (1 - self.momentum) * self.pace * g
        mean = torch.where(usable, self.momentum * self.m.float() + fresh, self.m.float())
        self.mean = mean
        self.v = torch.where(usable, self.beta * self.v + (1 - self.beta) * g.double() ** 2, self.v)
        if self.more.get("second_moment") == "none":
            return mean.double().sign() * float(self.pace), usable
        corrected = self.more.get("bias_correction", True)
        first, second = (1 - beta**self.t if corrected else 1.0 for beta in (self.momentum, self.beta))
        u = (mean.double() / first) / (self.v / second).sqrt()
        return u.nan_to_num(0.0).clamp(-self.max_step * self.pace, self.max_step * self.pace), usable

    def go_on_from(self, held, rtol):
        """From one of the two neighbours of the mean in bfloat16, which the optimiser has; to a last place in C."""
        below = (self.mean.view(torch.int32) & -65536).view(torch.float32)
        above = (below.view(torch.int32) + 65536).view(torch.float32)
        near = torch.minimum((held.float() - below).abs(), (held.float() - above).abs())
        assert torch.all((near <= rtol * self.mean.abs()) & ((below != self.mean) | (held == below) | (rtol > 0)))
        self.m = held.clone()

    def step(self, grad):
        u, usable = self.direction(grad)
        if self.width:
            new = self.width * torch.sinh(torch.asinh(self.w / self.width) - self.lr * u)
        else:
            new = self.w * torch.exp(-self.lr * u * self.w.sign())
        self.w = torch.where(usable, new.clamp(-self.limit, self.limit), self.w)


def draw(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradient(shape, t):
    g = draw(shape, 100 + t) * 10.0 ** torch.linspace(-1, 1, math.prod(shape)).view(shape)
    if t == 3:
        g.view(-1)[:5] = torch.tensor([math.nan, math.inf, -math.inf, 2.0**63 * 1.01, -3e38])
    return g


def network(kind=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 25))
    return model.to(kind) if isinstance(kind, torch.dtype) else to_ladder_(model, kind)


def started(kind=torch.float32, steps=3, **arguments):
    model = network(kind)
    return walk((model, Madam(model.parameters(), **{"momentum": 0.9, **arguments})), range(steps))


def walk(run, steps):
    for t in steps:
        for i, p in enumerate(run[0].parameters()):
            p.grad = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype).copy_(draw(p.shape, 100 * t + i))
        run[1].step()
    return run


def values(model, optimizer):
    weights = [p.codes() if hasattr(p, "codes") else p.detach().clone() for p in model.parameters()]
    return weights + [optimizer.state[p][held.mean_name(p)] for p in model.parameters()]


def same(*runs):
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*(values(*run) for run in runs), strict=True))


@either
@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_steps_follow_the_formulas(dtype, rule, compile):
    p = nn.Parameter(draw((13, 7), 0).to(dtype))
    plain, optimizer = Plain(p.detach(), **rule), Madam.paper([p], rounding="nearest", compile=compile, **rule)
    for t in range(7):
        if dtype in (torch.bfloat16, torch.float16):
            plain.w = p.detach().double()  # the rounding of weights is not what this is about
        p.grad = gradient(p.shape, t).to(dtype)
        plain.step(p.grad)
        optimizer.step()
        plain.go_on_from(optimizer.state[p]["first_moment"], 1e-5 if compile else 0)
    eps = torch.finfo(dtype).eps
    rtol, atol = 0.02 if "8bit" in rule.values() else max(eps, 5e-6), eps if "crossing" in rule else 0
    torch.testing.assert_close(p.detach().double(), plain.w, rtol=rtol, atol=atol)


@either
@every_rule
@pytest.mark.parametrize("ladder", ["paper12", "paper8", "signed8", "signed12"])
def test_codes_climb_by_the_same_direction(ladder, rule, compile):
    (p,) = to_ladder_(nn.ParameterList([nn.Parameter(draw((13, 7), 0))]), ladder).parameters()
    rule = {"lr": 0.05, **{k: v for k, v in rule.items() if k not in ("crossing", "bound")}}
    form = LadderFormat.preset(ladder)
    pace = torch.tensor(rule["lr"] / form.spacing) * form.spacing
    plain = Plain(p.detach().decode(torch.float32), pace=pace, **rule)
    optimizer = Madam.paper([p], rounding="nearest", compile=compile, **rule)
    signs = p.codes() & 1 << form.code_bits if not form.is_signed else torch.zeros((13, 7), dtype=torch.int32)
    way = -1.0 if form.is_signed else torch.where(signs > 0, -1.0, 1.0)
    for t in range(7):
        before = p.codes() - signs
        p.grad = gradient(p.shape, t)
        optimizer.step()
        u, usable = plain.direction(p.grad)
        exact = torch.where(usable, (before + way * u / form.spacing).clamp(0, form.levels - 1), before)
        slack = 0.501 + (exact - before).abs() * 0.3 * ("8bit" in rule.values())
        assert torch.all((p.codes() - signs - exact).abs() < slack)
        plain.go_on_from(optimizer.state[p]["step_moment"], 0)


def beside_exact_steps(ladder, compile, rate, steps, momentum=0.9, drift=0.0, **arguments):
    """Where codes have gone, in rungs, and where steps that are not rounded would have; weights of both signs."""
    form, count, decay = LadderFormat.preset(ladder), 2048, arguments.get("weight_decay", 0.0)
    weights = nn.Parameter(torch.full((count,), 0.1) * torch.tensor([1.0, -1.0]).repeat(count // 2))
    (p,) = to_ladder_(nn.ParameterList([weights]), ladder, scale=0.1, init="nearest", bound=3.0).parameters()
    optimizer = Madam.paper(
        [p], rate * form.spacing, beta=0.9, momentum=momentum, rounding="stochastic", compile=compile, **arguments
    )
    begin, mean, v, exact = p.codes().double(), torch.zeros(count), torch.zeros(count), torch.zeros(count)
    way = -1.0 if form.is_signed else weights.detach().sign()
    for t in range(1, steps + 1):
        pull = -torch.tanh((p.codes() - form.top) * form.spacing) if form.is_signed else 1.0
        p.grad = g = draw((count,), t) + drift
        optimizer.step()
        mean, v = momentum * mean + (1 - momentum) * g, 0.9 * v + 0.1 * g * g
        u = (mean / (1 - momentum**t)) / (v / (1 - 0.9**t)).sqrt()
        exact = exact + rate * (way * u + pull * decay)
    return p.codes() - begin, exact


def rms(x):
    return float(x.double().square().mean().sqrt())


@either
@pytest.mark.parametrize("decay", [0.0, 1.0])
@pytest.mark.parametrize("ladder", ["signed8", "paper8"])
def test_what_rounding_drops_comes_with_later_steps(ladder, decay, compile):
    """Codes stay near where exact steps would be; stochastic rounding by itself is a random walk away from there."""
    alone, fed = (beside_exact_steps(ladder, compile, 0.3, 200, momentum=m, weight_decay=decay) for m in (0.0, 0.9))
    assert rms(alone[0] - alone[1]) > 4.5  # rungs: the root of 200 times 0.11, about
    assert rms(fed[0] - fed[1]) < (1.5 if decay and ladder == "paper8" else 1.05)  # 1.37, 0.98, 0.92, 0.91
    assert abs(float((fed[0] - fed[1]).mean())) < 0.1


@either
@pytest.mark.parametrize("ladder", ["signed8", "paper8"])
def test_rates_far_below_a_rung_move_weights_as_far_as_floats(ladder, compile):
    """The largest step is then a small part of what a rung owes, and must not cut that off."""
    moved, exact = beside_exact_steps(ladder, compile, 0.002, 1000, drift=0.5)
    if ladder == "paper8":  # of sizes, to which every other gradient is opposed
        moved, exact = (x * torch.tensor([1, -1]).repeat(1024) for x in (moved, exact))
    assert abs(float(exact.mean())) > 0.7
    assert float(moved.mean()) == pytest.approx(float(exact.mean()), rel=0.08)


@either
@pytest.mark.parametrize("bits", [8, 12])
def test_another_ladder_goes_on_with_steps_of_the_same_size(bits, compile):
    """A mean is in units of lr, not of the rungs that it was made on."""
    model, optimizer = started(20 - bits, steps=20, compile=compile)
    sizes = []
    for ladder in (20 - bits, bits):
        coded = to_ladder_(torchmadam.to_dense_(copy.deepcopy(model)), ladder)
        other = Madam(coded.parameters(), compile=compile)
        other.load_state_dict(optimizer.state_dict())
        before = [p.decode(torch.float32).detach() for p in coded.parameters()]
        for p in coded.parameters():
            p.grad = torch.zeros(p.shape)
        other.step()
        sizes.append(
            sum((p.decode(torch.float32) - w).abs().sum() for p, w in zip(coded.parameters(), before, strict=True))
        )
    assert float(sizes[1]) == pytest.approx(float(sizes[0]), rel=0.2)


@either
@every_kind
def test_a_gradient_that_is_not_finite_leaves_the_mean_as_it_is(kind, compile):
    run = model, optimizer = started(kind, compile=compile)
    before = [value.clone() for value in values(*run)]
    for p in model.parameters():
        p.grad = torch.full(p.shape, math.nan, dtype=p.dtype)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, values(*run), strict=True))


def test_what_a_small_rate_owes_is_not_paid_by_a_large_one():
    (p,) = to_ladder_(nn.ParameterList([nn.Parameter(draw((4096,), 0))]), "signed8").parameters()
    optimizer = Madam([p], 1e-5, weight_decay=0.0)
    for t in range(30):
        p.grad = draw((4096,), t)
        optimizer.step()
    before = p.codes()
    optimizer.param_groups[0]["lr"] = 0.01
    p.grad = torch.zeros(4096)
    optimizer.step()
    assert (p.codes() - before).abs().max() <= 1


def test_means_of_floats_are_not_taken_for_those_of_codes():
    model, optimizer = started()
    coded = to_ladder_(copy.deepcopy(model), 8)
    other = Madam(coded.parameters())
    other.load_state_dict(optimizer.state_dict())
    walk((coded, other), [3])
    for p in coded.parameters():
        assert "first_moment" not in other.state[p]
        assert "step_moment" in other.state[p]


@either
def test_codes_stand_still_at_lr_0_however_large_steps_may_be(compile):
    run = model, optimizer = started("signed8", steps=9, compile=compile, max_step=math.inf)
    before = [p.codes() for p in model.parameters()]
    optimizer.param_groups[0]["lr"] = 0.0
    walk(run, range(9, 12))
    assert all(torch.equal(p.codes(), codes) for p, codes in zip(model.parameters(), before, strict=True))


def test_a_mean_of_another_shape_is_refused():
    model, optimizer = started("signed8", second_moment="none")
    state = optimizer.state_dict()
    state["state"][0]["step_moment"] = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"shape \(2, 3\) where the parameter has \(8, 3, 3, 3\)"):
        Madam(model.parameters(), second_moment="none").load_state_dict(state)


def test_a_mean_neither_stops_short_of_a_gradient_that_stays_nor_of_zero():
    optimizer = Madam([p := nn.Parameter(torch.ones(64))], momentum=0.997, lr=0.0)
    p.grad, late = torch.linspace(0.5, 2.0, 64), []
    for t in range(6000):
        optimizer.step()
        if t >= 3000:
            late.append(optimizer.state[p]["first_moment"].double())
    torch.testing.assert_close(torch.stack(late).mean(0), p.grad.double(), rtol=2e-3, atol=0)
    p.grad = torch.zeros(64)
    for _ in range(4000):
        optimizer.step()
    assert optimizer.state[p]["first_moment"].abs().max() < 1e-4


def test_groups_have_their_own():
    model, one, other = network(), started()[0], started(momentum=0.0)[0]
    groups = [{"params": model[:3].parameters(), "momentum": 0.9}, {"params": model[4].parameters(), "momentum": 0.0}]
    walk((model, Madam(groups)), range(3))
    assert torch.equal(model[2].weight, one[2].weight)
    assert torch.equal(model[4].weight, other[4].weight)


@either
@every_kind
def test_it_can_be_dropped_and_taken_up_again_from_zero(kind, compile):
    run = _, optimizer = started(kind, compile=compile)
    optimizer.param_groups[0]["momentum"] = 0.0
    walk(run, range(3, 5))
    assert not any(name in state for state in optimizer.state.values() for name in held.MEANS)
    optimizer.param_groups[0]["momentum"] = 0.5
    for p in walk(run, [5])[0].parameters():
        mean = optimizer.state[p][held.mean_name(p)].float()
        if hasattr(p, "codes"):  # of steps, and what rounding dropped
            assert (mean * p.grad.float() >= 0).float().mean() > 0.6
        else:
            torch.testing.assert_close(mean, p.grad.float() * 0.5, rtol=2**-7, atol=0)


@every_kind
@pytest.mark.parametrize(
    ("name", "has", "has_not"),
    [("second_moment", "float32", "none"), ("second_moment", "8bit", "none"), ("momentum", 0.9, 0.0)],
)
def test_a_step_that_drops_a_moment_repeats_none_that_had_nothing_to_drop(name, has, has_not, kind):
    """A GPU makes a step again if it knows the situation; the moment would stay for whoever takes it up later."""
    run = _, optimizer = started(kind, **{name: has})
    (group,), state = optimizer.param_groups, optimizer.state
    assert situation_of(group, state) is not None
    group[name] = has_not
    assert situation_of(group, state) is None
    others = group["params"][1:]
    grads = [p.grad for p in others]
    for p in others:
        p.grad = None
    optimizer.step()  # drops the first one's only
    for p, grad in zip(others, grads, strict=True):
        p.grad = grad
    assert situation_of(group, state) is None
    walk(run, [3])
    assert situation_of(group, state) is not None
    left = {key for own in state.values() for key in own}
    assert not left & ({"second_moment", "exponents"} if name == "second_moment" else set(held.MEANS))


@pytest.mark.parametrize("ladder", [None, "signed12", "paper12"])
def test_a_new_second_moment_does_not_make_the_steps_of_an_old_first_moment_longer(ladder):
    model = nn.ParameterList([nn.Parameter(torch.full((4,), 0.5))])
    if ladder is not None:
        to_ladder_(model, ladder, init="nearest", bound=5.0)
    (p,) = model.parameters()
    optimizer = Madam([p], momentum=0.9, second_moment="none", weight_decay=0.0)
    p.grad = torch.ones(4)
    for _ in range(30):
        optimizer.step()
    before = p.detach().clone()
    optimizer.param_groups[0]["second_moment"] = "float32"
    optimizer.step()
    width = 0.0 if ladder == "paper12" else 2.5
    moves = [
        math.asinh(float(w[0]) / width) if width else math.log(float(w[0])) for w in (before * 1.0, p.detach() * 1.0)
    ]
    assert 0.008 < moves[0] - moves[1] < 0.012


@either
@every_kind
def test_a_mean_follows_its_parameter_into_another_memory_order(kind, compile):
    moved, still = (started(kind, rounding="nearest", lr=0.05, compile=compile) for _ in range(2))
    moved[0].to(memory_format=torch.channels_last)
    for a, b in zip(*(values(*walk(run, range(3, 5))) for run in (moved, still)), strict=True):
        coarse = 1 if a.dtype == torch.int32 else 2**-6 * (0.05 if isinstance(kind, str) else 1)  # rounded by place
        torch.testing.assert_close(a, b, rtol=2**-6, atol=coarse)
    weight = moved[0][2].weight
    assert moved[1].state[weight][held.mean_name(weight)].stride() == (72, 1, 24, 8)


@pytest.mark.parametrize("make", [lambda o: OneCycleLR(o, 0.1, total_steps=9), lambda o: CyclicLR(o, 0.01, 0.1)])
def test_schedules_cycle_it_and_their_groups_make_another_optimiser(make):
    run, found = started(), []
    schedule = make(run[1])
    for t in range(3, 9):
        found.append(walk(run, [t])[1].param_groups[0]["momentum"])
        schedule.step()
    assert 0.8 <= min(found) < max(found) <= 0.95
    Madam(run[1].param_groups)


@pytest.mark.parametrize("bad", [1.0, -0.1, math.nan, math.inf, "0.9", None, (0.9, 0.999), 0.9j, torch.ones(2) * 0.9])
def test_what_is_no_memory_is_refused(bad):
    with pytest.raises(
        ValueError, match=r"momentum=.* cannot work: it (.*momentum < 1, usually 0\.9|must be a number)"
    ):
        Madam([{"params": network().parameters(), "momentum": bad}])


@every_kind
@pytest.mark.parametrize("second_moment", ["float32", "8bit", "none"])
@pytest.mark.parametrize("way", ["state dict", "pickle", "deepcopy"])
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(way, kind, second_moment, tmp_path):
    run = started(kind, second_moment=second_moment)
    if way == "state dict":
        other = (model := copy.deepcopy(run[0])), Madam(model.parameters())  # momentum comes with the state
        torch.save(run[1].state_dict(), tmp_path / "state.pt")
        other[1].load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    else:
        other = copy.deepcopy(run) if way == "deepcopy" else pickle.loads(pickle.dumps(run))
    assert same(run, other)
    assert same(walk(run, range(3, 6)), walk(other, range(3, 6)))


def test_a_pickle_from_before_there_was_momentum_has_none():
    _, old = started(momentum=0.0)
    for group in (*old.param_groups, old.defaults):
        del group["momentum"]
    assert pickle.loads(pickle.dumps(old)).param_groups[0]["momentum"] == 0.0


@every_kind
def test_gradients_can_be_released_while_momentum_is_scheduled_and_a_mean_takes_two_bytes_a_weight(kind):
    runs = [started(kind, 0, rounding="stochastic") for _ in range(2)]
    release_gradients(*runs[1])
    for model, optimizer in runs:
        schedule = OneCycleLR(optimizer, 0.1, total_steps=9)
        for t in range(4):
            optimizer.zero_grad()
            model(draw((2, 3, 8, 8), t).to(model[0].weight.dtype)).square().mean().backward()
            optimizer.step()
            schedule.step()
        assert torchmadam.memory(model, optimizer).moments == 6 * torchmadam.memory(model).weights
    assert same(*runs)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_is_the_step():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    runs = [(model := network()[4], Madam(model.parameters(), torch.tensor(0.01), momentum=0.9)) for _ in range(2)]
    runs[1][1].step = torch.compile(runs[1][1].step, backend="aot_eager", fullgraph=True)
    for t in range(5):
        for run in runs:
            walk(run, [t])
    for a, b in zip(*(values(*run) for run in runs), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7 if a.dtype == torch.bfloat16 else 1e-5, atol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_what_is_returned_comes_whole_within_the_room_for_it():
    for m, share in ((0.9, 1 / 9), (0.5, 1.0), (0.3, 1.0), (0.0, 0.0)):
        assert mean.returned(m) == pytest.approx(share)
        # A step takes m of what its mean holds, so that this much of a rung comes with one step at most.
        assert mean.room(m) == pytest.approx(m * share)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=needs_cc)])
def test_a_moment_that_overflows_leaves_no_mean_that_is_no_number(compile):
    (p,) = to_ladder_(nn.ParameterList([nn.Parameter(torch.randn(64))]), 8).parameters()
    optimizer = Madam([p], beta=0.9, compile=compile)
    p.grad = torch.full((64,), 5e18)
    optimizer.step()
    optimizer.param_groups[0]["beta"] = 0.999  # v / (1 - beta^t) is infinite for a while
    for _ in range(3):
        optimizer.step()
    assert optimizer.state[p]["step_moment"].isfinite().all()


def test_the_largest_step_goes_where_the_gradients_are():
    """A GPU refuses to clamp by a tensor that is elsewhere."""
    seen = []

    class Watched(torch.Tensor):
        def clamp_(self, low, high):
            seen.append((low.device.type, high.device.type))
            return self

    there = torch.ones(3, device="meta")
    moment.normalised(there.as_subclass(Watched), there, None, max_step=torch.tensor(8.0))
    assert seen == [("meta", "meta")]
