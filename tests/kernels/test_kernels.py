"""Triton kernels against the references: codes and moments exactly, floats to the last few bits."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import triton.language as tl

import ptx
from torchmadam import LadderFormat, moment8, noise, update
from torchmadam.kernels import launch, launch_decode
from torchmadam.ladder.layout import CodeLayout

# The interpreter computes in NumPy, which warns where a hash wraps around or a gradient is not finite.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SHAPES = [(1,), (37, 53), (5, 1), (3, 27), (64, 8), (2, 3, 5, 7), (1300,), (1, 2100), (), (32, 64)]
RULE = {
    "lr": 0.013, "momentum": 0.0, "beta": 0.999, "max_step": 8.0, "weight_decay": 0.0, "bias_correction": True,
    "maximize": False,
}  # fmt: skip


def draw(shape, seed, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(shape, generator=generator))


def gradients(t, dtype=torch.float32):
    grads = [draw(shape, 100 * t + i, 2.0).to(dtype) for i, shape in enumerate(SHAPES)]
    grads[1].view(-1)[5], grads[1].view(-1)[700] = float("nan"), float("inf")
    if dtype == torch.float32:
        grads[1].view(-1)[9] = 3e38
    grads[3].view(-1)[::3] = 0.0
    return grads


class State:
    """What a step changes, besides the weights."""

    def __init__(self, device, momentum=0.0, moment=True, grouped=None):
        self.means = [torch.zeros(s, dtype=torch.bfloat16, device=device) for s in SHAPES] if momentum else []
        dtype = torch.uint8 if moment == "8bit" else torch.float32
        self.moments = [torch.zeros(s, dtype=dtype, device=device) for s in SHAPES] if moment else []
        self.exponents = []
        if moment == "8bit":
            counts = [moment8.count_groups(grouped(s)) for s in SHAPES]
            self.exponents = [torch.zeros(n, dtype=torch.uint8, device=device) for n in counts]
        self.steps = [torch.full((), float(i % 3), device=device) for i in range(len(SHAPES))]
        self.nonfinite = [torch.zeros((), dtype=torch.int64, device=device) for _ in SHAPES]

    def arguments(self):
        return self.means, self.moments, self.exponents, self.steps

    def assert_equals(self, other):
        for name in ("means", "moments", "exponents", "steps", "nonfinite"):
            for i, (a, b) in enumerate(zip(getattr(self, name), getattr(other, name), strict=True)):
                assert torch.equal(a.cpu(), b.cpu()), (name, SHAPES[i])


STREAMS = [noise.stream(7, i) for i in range(len(SHAPES))]


# ---- floats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bound": None},
        {"weight_decay": 0.3},
        {"maximize": True, "bias_correction": False},
        {"lr": 1.0},
        {"rounding": "nearest"},
        {"moment": False},
        {"grad": torch.bfloat16},
        {"grad": torch.float16},
        {"tensor": True, "weight_decay": 0.3},
        {"beta": 0.0},
        {"moment": "8bit"},
        {"moment": "8bit", "grad": torch.bfloat16, "bias_correction": False},
        {"momentum": 0.9},
        {"momentum": 0.9, "grad": torch.bfloat16, "bias_correction": False, "maximize": True},
        {"momentum": 0.5, "moment": "8bit", "weight_decay": 0.3},
        {"momentum": 0.99, "moment": False},
        {"momentum": 0.9, "beta": 0.0},
    ],
    ids=str,
)
def test_float_steps_agree_with_the_reference(dtype, changes, device):
    changes = dict(changes)
    grad_dtype, moment, tensor = (
        changes.pop("grad", torch.float32),
        changes.pop("moment", True),
        changes.pop("tensor", False),
    )
    rule = {**RULE, "bound": 3.0, "rounding": None, **changes}
    crossings = [0.0, 0.0, 1.0, 0.3, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0][: len(SHAPES)]
    weights = [draw(s, i).to(dtype) for i, s in enumerate(SHAPES)]
    if len(weights[3]):
        weights[3].view(-1)[:4] = 0.0
    scales = [w.float().square().mean().sqrt() if w.numel() else torch.zeros(()) for w in weights]
    theirs, ours = [w.clone() for w in weights], [w.clone().to(device) for w in weights]
    reference, state = (State(d, rule["momentum"], moment, lambda shape: (math.prod(shape),)) for d in ("cpu", device))
    lr = rule.pop("lr")
    for t in range(3):
        grads = gradients(t, grad_dtype)
        update.madam_(
            theirs, grads, *reference.arguments(), scales, reference.nonfinite, streams=STREAMS, crossings=crossings,
            lr=torch.tensor(lr) if tensor else lr, **rule,
        )  # fmt: skip
        launch.float_step(
            ours, [g.to(device) for g in grads], *state.arguments(), [s.to(device) for s in scales], state.nonfinite,
            streams=STREAMS, crossings=crossings, lr=torch.tensor(lr, device=device) if tensor else lr, **rule,
        )  # fmt: skip
        state.assert_equals(reference)
        for w, v, shape in zip(theirs, ours, SHAPES, strict=True):
            if dtype == torch.float32:
                size = torch.maximum(w.abs(), w.abs().mean() if w.numel() else w.abs())
                assert torch.all((v.cpu() - w).abs() <= 3e-6 * (1 + lr) * size), shape
            else:
                differ = (v.cpu() != w).float()
                assert differ.sum() <= 1 + 0.01 * differ.numel(), shape
                step = {torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
                # A weight that rounded the other way at an earlier step, when it was larger, may since have shrunk.
                torch.testing.assert_close(v.cpu().float(), w.float(), rtol=step, atol=step)


def test_steps_on_the_same_tensors_are_each_counted_once(device):
    """A table that is used again must be as it was: the programs of a step without a clock count themselves in it."""
    shapes, rule = [(700,), (3, 5)], {**RULE, "bound": 3.0, "rounding": None}
    params, grads = ([draw(s, seed).to(device) for s in shapes] for seed in (0, 1))
    moments, steps = [torch.zeros(s, device=device) for s in shapes], [torch.zeros((), device=device) for _ in shapes]
    scales = [torch.ones((), device=device) for _ in shapes]
    bad = [torch.zeros((), dtype=torch.int64, device=device) for _ in shapes]
    for t in (1, 2, 3):
        launch.float_step(
            params, grads, [], moments, [], steps, scales, bad, streams=STREAMS[:2], crossings=[0.0, 1.0], **rule
        )
        assert [float(step) for step in steps] == [t, t]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_weight_without_gradients_stays_where_it_is_when_its_moment_has_all_but_vanished(momentum, device):
    shape, rule = (600,), {**RULE, "momentum": momentum, "bound": 3.0, "rounding": None}
    w = draw(shape, 0).to(device)
    before = w.clone()
    means = [torch.zeros(shape, dtype=torch.bfloat16, device=device)] if momentum else []
    launch.float_step(
        [w], [torch.zeros_like(w)], means, [torch.full_like(w, 1e-40)], [], [torch.full((), 1e5, device=device)],
        [torch.ones((), device=device)], [torch.zeros((), dtype=torch.int64, device=device)], streams=[1],
        crossings=[1.0], **rule,
    )  # fmt: skip
    assert torch.equal(w, before)


def test_float_steps_take_any_dense_memory_order(device):
    shape, rule = (4, 6, 5, 3), {**RULE, "bound": 3.0, "rounding": None}
    w, g = draw(shape, 0), draw(shape, 1)
    plain, last = w.clone().to(device), w.clone().to(device).to(memory_format=torch.channels_last)
    moments = [torch.zeros(shape, device=device), torch.zeros_like(last)]
    for p, v in zip((plain, last), moments, strict=True):
        launch.float_step(
            [p], [g.to(device)], [], [v], [], [torch.zeros((), device=device)], [torch.ones((), device=device)],
            [torch.zeros((), dtype=torch.int64, device=device)], streams=[1], crossings=[0.0], **rule,
        )  # fmt: skip
    assert torch.equal(plain, last)
    assert torch.equal(*moments)


# ---- codes

LADDERS = {
    "paper12": LadderFormat.preset("paper12"),
    "paper10": LadderFormat.preset("paper10"),
    "paper8": LadderFormat.preset("paper8"),
    "signed8": LadderFormat.preset("signed8"),
    "signed12": LadderFormat.preset("signed12"),
    "synapse": LadderFormat.preset("synapse"),
    "paper15": LadderFormat.paper(15, 0.000125),
    "signed3": LadderFormat.signed(3, 0.5),
}


def coded(ladder, signs, device):
    codings = [CodeLayout.contiguous(ladder, s, signs, sign_key=noise.stream(3, i)) for i, s in enumerate(SHAPES)]
    planes = []
    for i, coding in enumerate(codings):
        generator = torch.Generator().manual_seed(i)
        codes = torch.randint(0, ladder.levels, (coding.rows, coding.columns), generator=generator, dtype=torch.int32)
        if not ladder.is_signed and signs == "plane":
            codes |= torch.randint(0, 2, codes.shape, generator=generator, dtype=torch.int32) << ladder.code_bits
        planes.append([p.to(device) for p in coding.pack(codes)])
    return codings, planes


CASES = [
    *itertools.product(LADDERS, ["plane"], ["nearest", "stochastic"], [{}]),
    ("paper12", "seed", "nearest", {}),
    ("paper12", "seed", "stochastic", {}),
    ("paper8", "positive", "nearest", {}),
    ("paper12", "plane", "stochastic", {"maximize": True, "bias_correction": False}),
    ("paper12", "plane", "nearest", {"grad": torch.bfloat16}),
    ("signed8", "plane", "stochastic", {"grad": torch.bfloat16}),
    ("signed8", "plane", "stochastic", {"moment": False}),
    ("paper12", "plane", "nearest", {"weight_decay": 0.5}),
    ("signed8", "plane", "stochastic", {"tensor": True}),
    ("paper12", "plane", "nearest", {"tensor": True}),
    ("paper12", "plane", "stochastic", {"moment": "8bit", "grad": torch.bfloat16}),
    ("signed8", "plane", "stochastic", {"moment": "8bit"}),
    ("paper10", "seed", "nearest", {"moment": "8bit"}),
    ("signed8", "plane", "stochastic", {"moment": "8bit", "beta": 0.0}),
    ("paper12", "plane", "nearest", {"lr": 5e5}),  # moves that no integer has room for
    ("paper12", "plane", "nearest", {"lr": 0.0017, "weight_decay": 0.5 / 1.7, "moment": False}),  # half a rung
    ("paper12", "plane", "stochastic", {"moment": "8bit", "beta": 0.3}),
    *itertools.product(["paper12", "paper10", "signed8"], ["plane"], ["nearest", "stochastic"], [{"momentum": 0.9}]),
    ("paper12", "seed", "nearest", {"momentum": 0.9, "grad": torch.bfloat16, "weight_decay": 0.5}),
    ("paper12", "plane", "stochastic", {"momentum": 0.9, "moment": "8bit", "grad": torch.bfloat16}),
    ("signed8", "plane", "stochastic", {"momentum": 0.9, "moment": "8bit", "weight_decay": 0.3}),
    ("signed12", "plane", "stochastic", {"momentum": 0.9, "moment": False, "maximize": True}),
    ("signed8", "plane", "nearest", {"momentum": 0.99, "beta": 0.0}),  # a mean far larger than its moment
    ("paper12", "plane", "stochastic", {"momentum": 0.5, "bias_correction": False, "tensor": True}),
]


@pytest.mark.parametrize(("name", "signs", "rounding", "changes"), CASES, ids=str)
def test_coded_steps_give_exactly_the_codes_of_the_reference(name, signs, rounding, changes, device):
    changes = dict(changes)
    grad_dtype, moment, tensor = (
        changes.pop("grad", torch.float32),
        changes.pop("moment", True),
        changes.pop("tensor", False),
    )
    rule = {**RULE, "rounding": rounding, **changes}
    lr = 0.03125 if tensor else rule["lr"]  # as a float32 tensor, a number that is one
    rule.pop("lr")
    ladder = LADDERS[name]
    codings, theirs = coded(ladder, signs, "cpu")
    _, ours = coded(ladder, signs, device)
    shapes = {coding.shape: (coding.rows, coding.columns) for coding in codings}
    reference, state = (State(d, rule["momentum"], moment, lambda shape: shapes[shape]) for d in ("cpu", device))
    for t in range(3):
        grads = gradients(t, grad_dtype)
        update.madam_coded_(
            theirs, codings, grads, *reference.arguments(), reference.nonfinite, streams=STREAMS,
            lr=torch.tensor(lr) if tensor else lr, **rule,
        )  # fmt: skip
        launch.coded_step(
            ours, codings, [g.to(device) for g in grads], *state.arguments(), state.nonfinite, streams=STREAMS,
            lr=torch.tensor(lr, device=device) if tensor else lr, **rule,
        )  # fmt: skip
        level_means(reference.means, state.means)
        state.assert_equals(reference)
        for a, b, shape in zip(theirs, ours, SHAPES, strict=True):
            for plane, other in zip(a, b, strict=True):
                assert torch.equal(plane, other.cpu()), (t, shape)


def level_means(theirs, ours, slack=1e-37):
    """What rounding drops goes into means as the fast arithmetic has it: see whether they are alike, and level them."""
    for a, b in zip(theirs, ours, strict=True):
        off = (a.double() - b.cpu().double()).abs()
        assert torch.all(off <= 2.0**-6 * a.double().abs() + slack)
        # Where a step and what it dropped cancel, what is left of a mean is what rounding left.
        assert (off > 1e-3 * slack).double().mean() < 0.05 or a.numel() < 100
        b.copy_(a)


def stepped_both_ways(grad, moment, exponents, device, step, **changes):
    """The codes after one step, the reference's and the kernel's, from the middle of the paper's ladder."""
    coding = CodeLayout.contiguous(LADDERS["paper12"], tuple(grad.shape))
    codes = torch.full(grad.shape, 2048, dtype=torch.int32)
    found = []
    for step_, on in ((update.madam_coded_, "cpu"), (launch.coded_step, device)):
        planes = [p.to(on) for p in coding.pack(codes)]
        step_(
            [planes], [coding], [grad.to(on)], [], [moment.clone().to(on)], [e.clone().to(on) for e in exponents],
            [torch.tensor(step, device=on)], [torch.zeros((), dtype=torch.int64, device=on)], streams=[11],
            **{**RULE, "rounding": "stochastic", **changes},
        )  # fmt: skip
        found.append(coding.unpack([p.cpu() for p in planes]))
    return found


def test_a_step_that_decay_cancels_is_as_exact_as_the_step_was_large(device):
    grad = -torch.rand(64, 512, generator=torch.Generator().manual_seed(0)) - 0.5
    changes = {"beta": 0.0, "lr": 10.0, "weight_decay": 1.0, "max_step": 1.0}
    expected, found = stepped_both_ways(grad, torch.zeros_like(grad), [], device, 0.0, **changes)
    assert torch.equal(expected, found)


def test_tiny_gradients_are_clamped_exactly_where_an_8_bit_moment_is_larger(device):
    grad = torch.empty(64, 1024).uniform_(1, 4, generator=torch.Generator().manual_seed(0)) * (1e-4 * 2.0**-62.5)
    moment, exponents = torch.zeros(64, 1024, dtype=torch.uint8), torch.full((512,), 2, dtype=torch.uint8)
    changes = {"lr": 2e-3, "max_step": 1e-4}
    expected, found = stepped_both_ways(grad, moment, [exponents], device, 1e6, **changes)
    assert torch.equal(expected, found)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("name", "moment"), [("paper12", "8bit"), ("signed8", True), ("paper12", True), ("paper10", True)]
)
def test_large_and_small_steps_give_exactly_the_codes_of_the_reference(
    name, moment, momentum, large, device, monkeypatch
):
    """Without masks, for tensors that end with a block; and with programs of a single block."""
    monkeypatch.setattr(launch, *(("LARGE", 0) if large else ("PROGRAMS", 40_000)))
    monkeypatch.setattr(launch, "CODED_LINE", min(launch.CODED_LINE, 256))  # so that every ladder has several blocks
    changes = {"moment": moment, "momentum": momentum, "grad": torch.bfloat16}
    test_coded_steps_give_exactly_the_codes_of_the_reference(name, "plane", "stochastic", changes, device)


@pytest.mark.parametrize(("name", "moment"), [("paper12", "8bit"), ("paper10", True)])
def test_the_permutes_of_a_gpu_give_what_plain_triton_does(name, moment, device, monkeypatch):
    if device.type == "cuda":
        pytest.skip("a GPU runs them in every other test")
    ran = []
    found = lambda *a, **k: ran.append(a) or ptx.inline_asm_elementwise(*a, **k)  # noqa: E731
    monkeypatch.setattr(tl, "inline_asm_elementwise", found)
    monkeypatch.setattr(launch, "_takes_ptx", lambda device: True)
    changes = {"moment": moment, "grad": torch.bfloat16}
    test_coded_steps_give_exactly_the_codes_of_the_reference(name, "plane", "stochastic", changes, device)
    assert ran


@pytest.mark.parametrize(
    ("kind", "clock"), [("float", "empty"), ("8bit", "large"), ("coded", "empty"), ("coded", "large")]
)
def test_steps_with_a_clock_give_what_those_without_do(kind, clock, device, monkeypatch):
    """Of a list with an empty tensor, whose steps no program would count; and of one that is called large."""
    shapes = [*SHAPES[:2], (0,), *SHAPES[3:5]] if clock == "empty" else SHAPES[:5]
    monkeypatch.setitem(globals(), "SHAPES", shapes)
    monkeypatch.setitem(globals(), "STREAMS", STREAMS[: len(shapes)])
    if clock == "large":
        monkeypatch.setattr(launch, "LARGE", 0)
    launched = []
    monkeypatch.setattr(launch, "_add_clock", lambda *a, to=launch._add_clock: launched.append(a) or to(*a))
    if kind == "coded":
        changes = {"momentum": 0.9}
        test_coded_steps_give_exactly_the_codes_of_the_reference("paper12", "plane", "stochastic", changes, device)
    else:
        changes = {"momentum": 0.9, "moment": "8bit" if kind == "8bit" else True}
        test_float_steps_agree_with_the_reference(torch.float32, changes, device)
    assert launched  # and in no other test of such lists


@pytest.mark.parametrize("lr", [1e-4, 0.013, 1.0, 0.0])
@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.99])
@pytest.mark.parametrize(("name", "moment"), [("paper12", True), ("signed8", "8bit"), ("signed8", False)])
def test_gradients_of_all_sizes_give_exactly_the_codes_of_the_reference(name, moment, momentum, lr, device):
    """Where the fast arithmetic cannot be trusted: squares below the smallest number, moments near the largest."""
    ladder, shape = LADDERS[name], (60, 24)
    coding = CodeLayout.contiguous(ladder, shape)
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, ladder.levels, shape, generator=generator, dtype=torch.int32)
    sizes = torch.linspace(-44, 30, shape[0])[:, None] + torch.rand(shape, generator=generator)
    theirs, ours = coding.pack(codes), [p.to(device) for p in coding.pack(codes)]
    kind = torch.uint8 if moment == "8bit" else torch.float32
    states = []
    for on in (torch.device("cpu"), device):
        exponents = torch.zeros(moment8.count_groups(shape), dtype=torch.uint8, device=on)
        moments = [torch.zeros(shape, dtype=kind, device=on)] if moment else []
        means = [torch.zeros(shape, dtype=torch.bfloat16, device=on)] if momentum else []
        bad = torch.zeros((), dtype=torch.int64, device=on)
        states.append((means, moments, [exponents] if moment == "8bit" else [], [torch.zeros((), device=on)], [bad]))
    rule = {**RULE, "lr": lr, "momentum": momentum, "rounding": "stochastic", "streams": [11]}
    largest = torch.zeros(shape, dtype=torch.float64)
    for t in range(4):
        shift = 0 if t < 2 else 20 * (t % 2)  # small gradients after large ones
        signs = torch.randn(shape, generator=generator).sign()
        grad = (signs.double() * 10 ** (sizes.double() - shift)).float()
        grad[:, t] = 0
        update.madam_coded_([theirs], [coding], [grad], *states[0], **rule)
        launch.coded_step([ours], [coding], [grad.to(device)], *states[1], **rule)
        for a, b in zip(theirs, ours, strict=True):
            assert torch.equal(a, b.cpu()), t
        size = grad.double().abs()
        largest = torch.maximum(largest, size)
        # The fast root takes tiny moments for zeros, of which nothing comes back; else it may be up to a rung.
        slack = torch.where(largest < 1e-17, largest * max(lr, ladder.spacing), 1e-3 * size * lr)
        level_means(*(state[0] for state in states), slack=slack + 1e-37)
        for a, b in zip(*(itertools.chain.from_iterable(state) for state in states), strict=True):
            assert torch.equal(a, b.cpu()), t


def overflowing(t, grad, rule):
    """A moment that was of the last gradient only, and is then taken for that of a few of a thousand."""
    return torch.full_like(grad, 9e18), {**rule, "beta": 0.999 if t else 0.0}


def unusable(t, grad, rule):
    """Gradients that are not finite, or too large, of weights whose means are no longer zero."""
    if t:
        grad.view(-1)[:4] = torch.tensor([math.nan, math.inf, -math.inf, 3e38])
    return grad, rule


def beyond(t, grad, rule):
    """Steps of more rungs than any ladder has."""
    return grad, {**rule, "lr": 5e5}


@pytest.mark.parametrize("case", [overflowing, unusable, beyond])
@pytest.mark.parametrize(("name", "moment"), [("paper12", "8bit"), ("paper12", True), ("signed8", True)])
def test_means_are_those_of_the_reference_where_nothing_can_be_owed(name, moment, case, device):
    """What rounding drops goes into a mean in units of the moment's root, which here is infinite, or not to be used."""
    shape, generator = (9, 24), torch.Generator().manual_seed(2)
    coding = CodeLayout.contiguous(LADDERS[name], shape)
    codes = torch.randint(0, LADDERS[name].levels, shape, generator=generator, dtype=torch.int32)
    kind = torch.uint8 if moment == "8bit" else torch.float32
    runs = []
    for step, on in ((update.madam_coded_, torch.device("cpu")), (launch.coded_step, device)):
        exponents = torch.zeros(moment8.count_groups(shape), dtype=torch.uint8, device=on)
        state = (
            [torch.zeros(shape, dtype=torch.bfloat16, device=on)], [torch.zeros(shape, dtype=kind, device=on)],
            [exponents] if moment == "8bit" else [], [torch.zeros((), device=on)],
            [torch.zeros((), dtype=torch.int64, device=on)],
        )  # fmt: skip
        runs.append((step, [p.to(on) for p in coding.pack(codes)], state))
    for t in range(4):
        grad, rule = case(t, torch.randn(shape, generator=generator), {**RULE, "momentum": 0.9})
        for step, planes, state in runs:
            step([planes], [coding], [grad.to(planes[0].device)], *state, rounding="stochastic", streams=[11], **rule)
        (_, theirs, reference), (_, ours, state) = runs
        assert reference[0][0].isfinite().all()
        # What the fast arithmetic has of a rung is exact to 21 bits, and rounded with the mean.
        level_means(reference[0], state[0], slack=0.0)
        for a, b in zip((*theirs, *itertools.chain(*reference)), (*ours, *itertools.chain(*state)), strict=True):
            assert torch.equal(a, b.cpu()), t


# ---- decoding


@pytest.mark.parametrize("name", LADDERS)
@pytest.mark.parametrize("signs", ["plane", "seed", "positive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decoding_agrees_with_the_reference_on_every_shape_and_range_of_rows(name, signs, dtype, device):
    ladder = LADDERS[name]
    if ladder.is_signed and signs != "plane":
        signs = "plane"
    codings, planes = coded(ladder, signs, device)
    limit = torch.tensor(0.37, device=device)
    for coding, own in zip(codings, planes, strict=True):
        for first, last in {(0, coding.rows), (min(1, coding.rows), coding.rows)}:
            part = [p[first:last] for p in own]
            found = launch_decode.decode(part, limit, coding, first, dtype)
            expected = ladder.decode(coding.unpack([p.cpu() for p in part], first), limit.cpu()).to(dtype)
            assert found.shape == expected.shape
            assert found.dtype == dtype
            tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
            torch.testing.assert_close(
                found.cpu(), expected, rtol=tolerance, atol=1e-7 if dtype == torch.float32 else 2**-20
            )


@pytest.mark.parametrize("name", LADDERS)
@pytest.mark.parametrize("signs", ["plane", "seed", "positive"])
def test_codes_come_out_as_the_reference_unpacks_them(name, signs, device):
    signs = "plane" if LADDERS[name].is_signed else signs
    codings, planes = coded(LADDERS[name], signs, device)
    for coding, own in zip(codings, planes, strict=True):
        first = min(1, coding.rows)
        part = [p[first:] for p in own]
        found = launch_decode.codes(part, coding, first)
        assert found.dtype == torch.int32
        assert torch.equal(found.cpu(), coding.unpack([p.cpu() for p in part], first))


@pytest.mark.parametrize("name", ["paper12", "signed8"])
def test_decoding_again_gives_the_same_wherever_the_planes_lie(name, device):
    """A kernel that was compiled for planes at even addresses must not be used for others."""
    coding = CodeLayout.contiguous(LADDERS[name], (33, 64))
    planes, limit = coding.pack(torch.arange(33 * 64).reshape(33, 64) % 255), torch.tensor(0.37, device=device)
    expected = LADDERS[name].decode(coding.unpack(planes, 0), limit.cpu())
    for shift in (0, 0, 1, 1, 16, 0, 24):
        moved = []
        for plane in planes:
            memory = torch.zeros(plane.numel() + 32, dtype=torch.uint8, device=device)
            moved.append(memory[shift : shift + plane.numel()].view(plane.shape).copy_(plane))
        found = launch_decode.decode(moved, limit, coding, 0, torch.float32)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-7)
        found = launch_decode.codes(moved, coding, 0)
        assert torch.equal(found.cpu(), coding.unpack(planes, 0))


def test_what_lies_beside_a_tensor_is_not_touched(device):
    """Planes, moments and weights are cut out of poisoned memory, which must come back as it was."""
    ladder = LadderFormat.preset("paper12")
    coding = CodeLayout.contiguous(ladder, (3, 27))
    cuts, planes = [], []
    for rows, width in coding.plane_shapes:
        memory = torch.full((rows * width + 64,), 0xA5, dtype=torch.uint8, device=device)
        planes.append(memory[32 : 32 + rows * width].view(rows, width))
        cuts.append(memory)
    memories = [torch.full((81 + 32,), 7.0, dtype=d, device=device) for d in (torch.bfloat16, torch.float32)]
    mean, moment = (memory[16 : 16 + 81].view(3, 27) for memory in memories)
    launch.coded_step(
        [planes], [coding], [draw((3, 27), 0).to(device)], [mean], [moment], [], [torch.zeros((), device=device)],
        [torch.zeros((), dtype=torch.int64, device=device)], streams=[1], rounding="stochastic",
        **{**RULE, "momentum": 0.9},
    )  # fmt: skip
    for memory in cuts:
        assert torch.all(memory[:32] == 0xA5)
        assert torch.all(memory[-32:] == 0xA5)
    for memory in memories:
        assert torch.all(memory[:16] == 7)
        assert torch.all(memory[-16:] == 7)
        assert not torch.any(memory[16:-16] == 7)


# ---- shards


@pytest.mark.parametrize("name", ["paper12", "paper10", "signed8"])
def test_planes_and_moments_may_lie_at_odd_addresses(name, device):
    """Where words of several bytes cannot be loaded."""
    coding = CodeLayout.contiguous(LADDERS[name], (6, 40))
    codes = torch.randint(
        0, LADDERS[name].levels, (6, 40), dtype=torch.int32, generator=torch.Generator().manual_seed(0)
    )
    found = []
    for cut in (0, 1):

        def placed(tensor, cut=cut):
            memory = torch.zeros(tensor.numel() + 16, dtype=torch.uint8, device=device)
            memory[cut : cut + tensor.numel()] = tensor.flatten().to(device)
            return memory[cut : cut + tensor.numel()].view(tensor.shape)

        planes = [placed(plane) for plane in coding.pack(codes)]
        moment, exponents = placed(torch.full((6, 40), 200, dtype=torch.uint8)), torch.full((2,), 90, dtype=torch.uint8)
        mean = torch.zeros(6 * 40 + 1, dtype=torch.bfloat16, device=device)[cut : cut + 240].view(6, 40)
        launch.coded_step(
            [planes], [coding], [draw((6, 40), 0).to(device)], [mean], [moment], [exponents.to(device)],
            [torch.zeros((), device=device)], [torch.zeros((), dtype=torch.int64, device=device)], streams=[1],
            rounding="stochastic", **{**RULE, "momentum": 0.9},
        )  # fmt: skip
        found.append([*planes, mean, moment])
    for even, odd in zip(*found, strict=True):
        assert torch.equal(even, odd)


@pytest.mark.parametrize("moment", [True, "8bit"])
@pytest.mark.parametrize(("name", "signs"), [("paper12", "seed"), ("signed8", "plane")])
def test_a_coded_step_of_shards_is_the_step_of_the_whole(name, signs, moment, device):
    """Beyond 2^31 too: the tensor is cut so that its last rows lie there, and only those are stepped."""
    ladder, columns = LADDERS[name], 24
    for first in (3, 2**31 // columns + 5):
        coding = CodeLayout.contiguous(ladder, (9, columns), signs, sign_key=5)
        coding = replace(coding, first_row=first, whole_rows=first + 9)
        codes = torch.randint(0, ladder.levels, (9, columns), dtype=torch.int32)
        grad = draw((9, columns), 1)
        ours, theirs = coding.pack(codes), coding.pack(codes)
        kind = torch.uint8 if moment == "8bit" else torch.float32

        def state(on):
            exponents = [torch.zeros(moment8.count_groups((9, columns)), dtype=torch.uint8, device=on)]
            return (
                [torch.zeros((9, columns), dtype=torch.bfloat16, device=on)],
                [torch.zeros((9, columns), dtype=kind, device=on)],
                exponents if moment == "8bit" else [],
                [torch.zeros((), device=on)],
                [torch.zeros((), dtype=torch.int64, device=on)],
            )

        rule = {**RULE, "momentum": 0.9, "rounding": "stochastic", "streams": [11]}
        reference, own = state("cpu"), state(device)
        ours = [p.to(device) for p in ours]
        update.madam_coded_([theirs], [coding], [grad], *reference, **rule)
        launch.coded_step([ours], [coding], [grad.to(device)], *own, **rule)
        for a, b in zip(theirs, ours, strict=True):
            assert torch.equal(a, b.cpu())
        assert torch.equal(reference[0][0], own[0][0].cpu())
        assert torch.equal(reference[1][0], own[1][0].cpu())
        elsewhere = coding.pack(codes)
        update.madam_coded_([elsewhere], [replace(coding, first_row=0)], [grad], *state("cpu"), **rule)
        assert not torch.equal(elsewhere[0], theirs[0])


def test_a_float_step_of_shards_is_the_step_of_the_whole(device):
    rule = {**RULE, "momentum": 0.9, "bound": 3.0, "rounding": None, "streams": [11], "crossings": [0.0]}
    w, g = draw((1000,), 0).bfloat16(), draw((1000,), 1)
    scale = torch.ones((), device=device)

    def state(size):
        counts = [torch.zeros((), device=device)], [scale], [torch.zeros((), dtype=torch.int64, device=device)]
        return [torch.zeros(size, dtype=torch.bfloat16, device=device)], [torch.zeros(size, device=device)], [], *counts

    whole = w.clone().to(device)
    launch.float_step([whole], [g.to(device)], *state(1000), **rule)
    for first, last in ((0, 301), (301, 1000)):
        part = w[first:last].clone().to(device)
        launch.float_step([part], [g[first:last].clone().to(device)], *state(last - first), firsts=[first], **rule)
        assert torch.equal(part, whole[first:last])
