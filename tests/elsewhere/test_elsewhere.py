"""Training on a device without float64 and without kernels of ours, beside the same on the CPU."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from torchmadam import (
    Madam,
    average,
    doubles,
    load,
    memory,
    release_gradients,
    save,
    scales_of,
    summary,
    theory,
    to_dense_,
    to_ladder_,
)

STEPS = 5
RULES = {
    "default": {},
    "paper": {"momentum": 0.0, "crossing": 0.0, "bound": 3.0, "weight_decay": 0.0},
    "8-bit moments": {"second_moment": "8bit"},
    "no moments": {"second_moment": "none", "momentum": 0.0},
    "a mean only": {"second_moment": "none"},
    "uncorrected, uphill": {"bias_correction": False, "maximize": True},
    "no memory": {"beta": 0.0, "momentum": 0.0},
    "no bound": {"bound": None, "crossing": 5.0},
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 4))


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 32, 16, generator=generator) for _ in range(STEPS)]


def loss_of(model, batch):
    """Of a task that a small network can learn something about."""
    place = model[0].weight.device
    x, noise = (part.to(place, model[0].weight.dtype) for part in batch)
    return nn.functional.cross_entropy(model(x), (x + 0.1 * noise)[:, :4].argmax(1))


def train(model, optimizer, count=STEPS):
    losses = []
    for batch in batches()[:count]:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def home(value):
    return value.detach().cpu()


def test_the_device_refuses_float64_and_other_devices_tensors(there):
    assert not doubles.are_on(there)
    x = torch.ones(3).to(there)
    assert x.device == there
    assert not x.is_cpu
    with pytest.raises(TypeError, match="float64"):
        x.double()
    with pytest.raises(TypeError, match="float64"):
        torch.zeros(3, dtype=torch.float64, device=there)
    with pytest.raises(TypeError, match="float64"):
        torch.ones(3).double().to(there)
    with pytest.raises(RuntimeError, match="one device"):
        x + torch.ones(3)
    assert doubles.are_on(torch.device("cpu"))
    assert doubles.doubled(x).dtype == torch.float64


def test_whether_there_is_float64_is_a_constant_to_the_compiler():
    doubles._tried.cache_clear()
    told = torch.compile(lambda x: x + doubles._answers(x.device), backend="eager", fullgraph=True)
    assert told(torch.zeros(2)).tolist() == [1.0, 1.0]


def test_whether_there_is_float64_is_not_asked_of_fake_tensors():
    doubles._tried.cache_clear()
    with FakeTensorMode():
        assert doubles._answers(torch.device("cpu"))
    assert doubles._answers(torch.device("cpu"))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_floats_train_as_on_the_cpu(rule, dtype, there):
    here = network().to(dtype)
    moved = copy.deepcopy(here).to(there)
    ours, theirs = (Madam(model.named_parameters(), **RULES[rule]) for model in (here, moved))
    assert train(moved, theirs) == pytest.approx(train(here, ours), rel=1e-5 if dtype == torch.float32 else 1e-2)
    for (name, a), b in zip(here.named_parameters(), moved.parameters(), strict=True):
        assert b.device == there
        off = (home(b).float() - a.detach().float()).abs() / a.detach().float().abs().clamp(min=1e-3)
        # Two roundings may go either way; a rule that is another one is off everywhere.
        assert float(off.median()) < (1e-5 if dtype == torch.float32 else 1e-2), name
    assert theirs.nonfinite_count() == ours.nonfinite_count() == 0


@pytest.mark.parametrize("ladder", ["paper8", "paper12", "signed8", "signed12"])
@pytest.mark.parametrize("rule", ["default", "paper", "8-bit moments", "a mean only"])
def test_codes_train_as_on_the_cpu(ladder, rule, there):
    arguments = {name: value for name, value in RULES[rule].items() if name not in ("crossing", "bound")}
    if ladder == "paper8" and arguments.get("momentum") != 0:
        arguments["rounding"] = "stochastic"  # nearest would freeze it, and say so
    here, moved = network(), network().to(there)
    for model in (here, moved):
        to_ladder_(model, ladder)
    for a, b in zip(here.parameters(), moved.parameters(), strict=True):
        assert torch.equal(home(b.data.codes()), a.data.codes())  # encoded there, to the last code
    ours, theirs = (Madam(model.named_parameters(), **arguments) for model in (here, moved))
    assert train(moved, theirs) == pytest.approx(train(here, ours), rel=1e-4)
    same = total = 0
    for a, b in zip(here.parameters(), moved.parameters(), strict=True):
        assert {plane.device for plane in b.planes} == {there}
        same += int((home(b.data.codes()) == a.data.codes()).sum())
        total += a.numel()
    assert same >= 0.99 * total


@pytest.mark.parametrize(("where", "dtype"), [("cpu", torch.float32), ("cpu", torch.float64), ("there", torch.float32)])
def test_a_learning_rate_may_be_a_tensor(where, dtype, there):
    here, moved = network(), network().to(there)
    ours = Madam(here.named_parameters())
    lr = torch.tensor(0.01, dtype=dtype).to(there if where == "there" else "cpu")
    theirs = Madam(moved.named_parameters(), lr=lr)
    assert train(moved, theirs) == pytest.approx(train(here, ours), rel=1e-5)


def test_it_learns(there):
    model = to_ladder_(network().to(there), 8)
    optimizer = Madam(model.named_parameters(), lr=0.03)
    losses = [loss for _ in range(15) for loss in train(model, optimizer)]
    assert sum(losses[-STEPS:]) < 0.6 * sum(losses[:STEPS])


@pytest.mark.parametrize("ladder", [None, "paper12", "signed8"])
def test_a_run_goes_on_from_its_checkpoint_and_moves_between_devices(ladder, there, tmp_path):
    model = network().to(there)
    if ladder:
        to_ladder_(model, ladder)
    optimizer = Madam(model.named_parameters())
    train(model, optimizer)
    save(model, tmp_path / "model.safetensors")
    state = tree_map_only(torch.Tensor, home, optimizer.state_dict())

    resumed = []
    for place in (there, torch.device("cpu")):
        again = network()
        if ladder:
            to_ladder_(again, ladder)
        again = load(tmp_path / "model.safetensors", again.to(place))
        other = Madam(again.named_parameters())
        other.load_state_dict(state)
        held = [value for own in other.state.values() for value in own.values() if isinstance(value, torch.Tensor)]
        assert {value.device for value in held} == {place}
        resumed.append(train(again, other))
    expected = train(model, optimizer)
    for losses in resumed:
        assert losses == pytest.approx(expected, rel=1e-4)


def test_all_else_that_looks_at_weights(there, tmp_path):
    model = network().to(there)
    assert scales_of(model) == pytest.approx(scales_of(network()), rel=1e-12)
    to_ladder_(model, "signed8")
    optimizer = Madam(model.named_parameters())
    mean = average(model)
    train(model, optimizer)
    mean.update()
    with mean.applied():
        assert model(batches()[0][0].to(there)).device == there
    assert str(summary(model)).count("\n") >= len(list(model.parameters()))
    assert memory(model, optimizer).codes == sum(p.numel() for p in model.parameters())
    released = release_gradients(model, optimizer)
    loss_of(model, batches()[0]).backward()
    released.remove()
    assert to_dense_(model)[0].weight.device == there


@pytest.mark.parametrize("ladder", [None, "signed8"])
def test_the_theory_finds_what_it_finds_on_the_cpu(ladder, there):
    found = []
    for place in (torch.device("cpu"), there):
        model = network().to(place)
        if ladder:
            to_ladder_(model, ladder)
        optimizer = Madam(model.named_parameters())

        def closure(model=model):
            return loss_of(model, batches()[0])

        train(model, optimizer, 1)
        with theory.TrustMonitor(optimizer, every=1) as monitor:
            train(model, optimizer, 2)
        seen = monitor.observations[-1].layers["0.weight"]
        report = theory.descent_report(model, closure, optimizer)
        found.append([
            seen.relative_size, seen.cosine, theory.safe_lr(model, closure, optimizer),
            theory.layer_angles(model, optimizer)["0.weight"], report.trust,
        ])  # fmt: skip
    assert found[1] == pytest.approx(found[0], rel=1e-4)
