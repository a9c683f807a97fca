"""The compiled step of floats on a CPU against the rule, and compile=True as an argument of Madam."""

import copy
import math
import subprocess
import warnings

import pytest
import torch
from torch import nn

from compiler import needs_cc
from torchmadam import Madam, moment8, noise, update
from torchmadam.kernels import compiled

# Those of the perceptron that the digits are trained on, and awkward ones.
SHAPES = [(128, 64), (128,), (10, 128), (37, 53), (1,), (), (0,), (2, 3, 5, 7)]
RULE = {
    "lr": 0.01, "momentum": 0.0, "beta": 0.999, "max_step": 8.0, "bound": 3.0, "weight_decay": 0.0,
    "bias_correction": True, "rounding": None, "maximize": False,
}  # fmt: skip


def draw(shape, seed, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(shape, generator=generator))


class Run:
    """Parameters with their state, stepped by one function or the other."""

    def __init__(self, step, dtype, crossings, moment, mean):
        self.step = step
        self.weights = [draw(shape, i).to(dtype) for i, shape in enumerate(SHAPES)]
        self.weights[3][::7] = 0.0
        self.weights[2][0, :2] = torch.tensor([1.2e-38, -1.2e-38])
        self.means = [torch.zeros(shape, dtype=torch.bfloat16) for shape in SHAPES] if mean else []
        self.moments, self.exponents = [torch.zeros(shape) for shape in SHAPES] if moment else [], []
        if moment == "8bit":
            self.moments = [torch.zeros(shape, dtype=torch.uint8) for shape in SHAPES]
            counts = [moment8.count_groups((w.numel(),)) for w in self.weights]
            self.exponents = [torch.zeros(count, dtype=torch.uint8) for count in counts]
        self.steps = [torch.zeros(()) for _ in SHAPES]
        self.scales = [w.float().square().mean().sqrt().nan_to_num() for w in self.weights]
        self.bad = [torch.zeros((), dtype=torch.int64) for _ in SHAPES]
        self.crossings = crossings

    def go(self, rule):
        streams = [noise.stream(3, i) for i in range(len(SHAPES))]
        for t in range(20):
            grads = [draw(shape, 100 * t + i + 50, 2.0).to(self.weights[0].dtype) for i, shape in enumerate(SHAPES)]
            grads[3].view(-1)[:3] = torch.tensor([math.inf, math.nan, -math.inf])
            grads[3][-1], grads[0][0, 0], grads[0][0, 1] = 0.0, 3e38, 1e-30
            self.step(
                self.weights, grads, self.means, self.moments, self.exponents, self.steps, self.scales, self.bad,
                streams=streams, crossings=self.crossings, **rule,
            )  # fmt: skip


@needs_cc
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("crossing", [0.0, 1.0, None])
@pytest.mark.parametrize(
    ("moment", "changes"),
    [
        (True, {}),
        (True, {"lr": torch.tensor(0.1), "bound": None}),
        (True, {"lr": 3.0, "weight_decay": 0.1}),
        (True, {"maximize": True, "bias_correction": False, "max_step": 0.5}),
        (True, {"beta": 0.0, "weight_decay": 0.5, "rounding": "nearest"}),
        (True, {"lr": 0.0}),
        (False, {}),
        (False, {"lr": 1.0, "maximize": True, "max_step": 0.1}),
        (False, {"lr": 100.0, "bound": None}),
        (True, {"momentum": 0.9}),
        (True, {"momentum": 0.5, "maximize": True, "bias_correction": False, "rounding": "nearest"}),
        ("8bit", {}),
        ("8bit", {"lr": 0.1, "weight_decay": 0.1, "beta": 0.5}),
        ("8bit", {"momentum": 0.9}),
    ],
)
def test_twenty_compiled_steps_are_twenty_steps_of_the_rule(monkeypatch, moment, changes, crossing, dtype):
    monkeypatch.setattr(compiled, "_ALONE", 1)
    rule = {**RULE, **changes}
    crossings = [float(i % 2) if crossing is None else crossing for i in range(len(SHAPES))]
    plain, fast = (
        Run(step, dtype, crossings, moment, "momentum" in changes) for step in (update.madam_, compiled.float_step)
    )
    plain.go(rule)
    torch.set_num_threads(1 if changes else 2)
    try:
        fast.go(rule)
    finally:
        torch.set_num_threads(1)
    for name in ("steps", "bad", "scales"):
        assert getattr(plain, name) == getattr(fast, name)
    assert plain.bad[3] == 60
    for a, b in zip(plain.means, fast.means, strict=True):
        # The last place of what was a larger number may have been rounded the other way.
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7 * float(a.abs().sum()))
        assert (a != b).sum() <= 2 + a.numel() / 20
    for a, b in zip(plain.moments, fast.moments, strict=True):
        if moment == "8bit":  # the last place of a float decides one in a million otherwise, by a rung
            assert (a != b).sum() <= a.numel() / 1000
            assert a.any() or not a.numel()
        else:
            torch.testing.assert_close(a, b, rtol=5e-6, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(plain.exponents, fast.exponents, strict=True))
    for w, (a, b) in enumerate(zip(plain.weights, fast.weights, strict=True)):
        if moment == "8bit":
            alike = plain.moments[w] == fast.moments[w]
            a, b = a[alike], b[alike]
        if dtype == torch.bfloat16:  # of two numbers alike but for the last place, one may round up and the other down
            assert (a != b).sum() <= 2 + a.numel() / (500 if plain.means else 1000), SHAPES[w]
            torch.testing.assert_close(a, b, rtol=2**-6, atol=0)
        else:
            # Weights that pass through zero lose the digits that they have in common with their steps.
            coarse = max(1.0, float(rule["lr"])) * (200 if plain.means else 1)
            torch.testing.assert_close(a, b, rtol=5e-6 * coarse, atol=2e-6 * coarse if crossings[w] else 0)


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(20, 7)).to(dtype)


def put_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))


@needs_cc
def test_the_step_is_compiled_once_whatever_the_shapes_and_however_lr_changes(monkeypatch):
    commands = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: commands.append(a) or run(*a, **k))
    compiled.built.cache_clear()
    plain, fast = network(), network().to(memory_format=torch.channels_last)
    lr = torch.tensor(0.01)
    optimizers = [Madam.paper(m.parameters(), lr, compile=m is fast) for m in (plain, fast)]
    for t in range(6):
        lr.fill_(0.01 / (t + 1))
        for m, optimizer in zip((plain, fast), optimizers, strict=True):
            if t > 3:
                optimizer.param_groups[0]["lr"] = 0.05 * t
            put_gradients(m, t)
            versions = [p._version for p in m.parameters()]
            optimizer.step()
            assert all(p._version > v for p, v in zip(m.parameters(), versions, strict=True))
    assert 1 <= len(commands) <= len(compiled._WISHES)
    for p, q in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=3e-6, atol=1e-7)


@needs_cc
def test_what_is_not_compiled_steps_as_it_would_without():
    def parameters():
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(7, 10, generator=generator)
        return [
            nn.Parameter(table.double()),
            nn.Parameter(table.half()),
            nn.Parameter(table[:, ::2]),  # gaps
        ]

    runs = []
    for compile in (False, True):
        params = parameters()
        optimizer = Madam([{"params": params[:2]}, {"params": params[2:]}], compile=compile)
        for t in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(t)).to(p.dtype)
            optimizer.step()
        runs.append([p.detach().clone() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@needs_cc
def test_complex_parameters_are_compiled_as_pairs():
    runs = []
    for compile in (False, True):
        p = nn.Parameter(torch.complex(*torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))))
        optimizer = Madam([p], compile=compile)
        p.grad = torch.complex(*torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1)))
        optimizer.step()
        runs.append(p.detach())
    torch.testing.assert_close(*runs, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("compiler", "says"),
    [
        (None, "needs a C compiler, and cc, gcc or clang is not here; install gcc or clang.*or use compile=False"),
        ("no-such-compiler -v", "needs a C compiler, and no-such-compiler is not here"),
        ("/bin/sh -c 'echo this is wrong >&2; exit 1'", "needs a working C compiler; use compile=False.*this is wrong"),
    ],
)
def test_without_a_working_compiler_the_step_raises_and_says_what_to_do(monkeypatch, compiler, says):
    monkeypatch.delenv("CC", raising=False)
    if compiler is None:
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setenv("CC", compiler)
    compiled.built.cache_clear()
    model = network()
    put_gradients(model, 0)
    before = copy.deepcopy(model.state_dict())
    optimizer = Madam(model.parameters(), compile=True)
    with pytest.raises(RuntimeError, match=f"(?s){says}"):
        optimizer.step()
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    assert all(state["step"] == 0 for state in optimizer.state.values())


@needs_cc
def test_the_argument_belongs_to_a_group_and_to_this_machine_not_to_a_state():
    model = network()
    first, *others = model.parameters()
    optimizer = Madam([{"params": [first], "compile": True}, {"params": others}])
    assert [g["compile"] for g in optimizer.param_groups] == [True, False]
    put_gradients(model, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    fresh = Madam([{"params": [first]}, {"params": others, "compile": True}])
    fresh.load_state_dict(saved)
    assert [g["compile"] for g in fresh.param_groups] == [False, True]
    for group in saved["param_groups"]:  # as it was before there was such an argument
        del group["compile"]
    fresh = Madam([{"params": [first]}, {"params": others}], compile=True)
    fresh.load_state_dict(saved)
    assert [g["compile"] for g in fresh.param_groups] == [True, True]
    fresh.step()


def test_inside_torch_compile_the_argument_changes_nothing():
    torch._dynamo.reset()
    runs = []
    for compile in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        put_gradients(model, 0)
        optimizer = Madam(model.parameters(), torch.tensor(0.01), compile=compile)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)()
        runs.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@needs_cc
def test_an_8_bit_moment_is_stepped_in_c(monkeypatch):
    plain, fast = (network().to(memory_format=torch.channels_last) for _ in range(2))
    optimizers = [Madam(m.parameters(), second_moment="8bit", compile=m is fast) for m in (plain, fast)]
    for t in range(3):
        for model, optimizer in zip((plain, fast), optimizers, strict=True):
            put_gradients(model, t)
            with monkeypatch.context() as patched:
                if model is fast:
                    patched.setattr(update, "madam_", None)
                optimizer.step()
    for p, q in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@needs_cc
def test_a_tensor_steps_alike_whatever_else_is_stepped_with_it():
    """In vectors that begin at the same weights, however many threads share the work."""
    torch.manual_seed(0)
    shapes = [(331, 301), (331,), (401, 331), (401,), (7, 401)]
    together = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    apart = copy.deepcopy(together)
    one, each = Madam(together, compile=True), [Madam([p], compile=True) for p in apart]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(3):
            for p, q in zip(together, apart, strict=True):
                p.grad = torch.randn_like(p)
                q.grad = p.grad.clone()
            one.step()
            for number, optimizer in enumerate(each):  # which keys the dither of means
                optimizer.state[apart[number]]["index"] = number
                optimizer.step()
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(p, q) for p, q in zip(together, apart, strict=True))


@needs_cc
@pytest.mark.parametrize("threads", [2, 3, 4])
@pytest.mark.parametrize("sizes", [[100_060, 100_062], [90_000, 300] * 6, [65_535, 1, 65_537, 64], [40_001] * 5])
def test_every_weight_moves_once_wherever_threads_are_cut(sizes, threads):
    """Just past a tensor's end too, where one thread once began with weights that another had moved."""
    torch.manual_seed(0)
    alone = [nn.Parameter(torch.randn(size)) for size in sizes]
    shared = copy.deepcopy(alone)
    before = torch.get_num_threads()
    for params, count in ((alone, 1), (shared, threads)):
        torch.manual_seed(1)
        for p in params:
            p.grad = torch.randn_like(p)
        torch.set_num_threads(count)
        try:
            Madam(params, compile=True).step()
        finally:
            torch.set_num_threads(before)
    for p, q in zip(alone, shared, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-7)


@needs_cc
def test_weights_far_beyond_their_scale_stay_numbers():
    plain, fast = (nn.Parameter(torch.tensor([1.0, -2.0, 0.5])) for _ in range(2))
    for p, compile in ((plain, False), (fast, True)):
        optimizer = Madam([p], scale=1e-21, compile=compile, weight_decay=0.0, bound=None)
        p.grad = torch.tensor([0.0, 1.0, -1.0])
        optimizer.step()
    torch.testing.assert_close(fast, plain)
