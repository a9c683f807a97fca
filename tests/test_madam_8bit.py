"""Madam with the 8-bit second moment: floats and codes, resumed, moved, and beside the float32 one."""

import copy

import pytest
import torch
from torch import nn

import torchmadam
from compiler import needs_a_compiler
from digits_training import train
from madam_lab.tasks import digits
from torchmadam import LadderTensor, Madam, moment8, update


def network(ladder=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 25))
    return net if ladder is None else torchmadam.to_ladder_(net, ladder)


def put_gradients(model, seed, share=1.0):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        g = torch.randn(p.shape, generator=generator) * (torch.rand(p.shape, generator=generator) < share)
        p.grad = g.to(p)


def same(a, b):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        codes = [w.codes() if hasattr(w, "codes") else w.detach() for w in (p, q)]
        if not torch.equal(*codes):
            return False
    return True


def walk(model, optimizer, steps, first=0):
    for t in range(first, first + steps):
        put_gradients(model, t)
        optimizer.step()


@pytest.mark.parametrize("ladder", [None, "paper12", "signed8"])
def test_state_is_a_byte_a_weight_and_an_exponent_for_128(ladder):
    model = network(ladder)
    optimizer = Madam(model.parameters(), second_moment="8bit", momentum=0.0)
    walk(model, optimizer, 2)
    for p in model.parameters():
        state = optimizer.state[p]
        assert state["second_moment"].dtype == state["exponents"].dtype == torch.uint8
        assert state["second_moment"].shape == p.shape
    wide = optimizer.state[model[4].weight]
    assert len(wide["exponents"]) == -(-64 * 25 // 128)
    found = torchmadam.memory(model, optimizer)
    assert found.weights <= found.moments <= 1.2 * found.weights  # rows of 27 and of 1 are filled up


@pytest.mark.parametrize("ladder", [None, "paper12", "signed8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_is_bit_exact(ladder, dtype, tmp_path):
    model = network()
    model = torchmadam.to_ladder_(model, ladder, dtype=dtype) if ladder else model.to(dtype)
    optimizer = Madam(model.parameters(), second_moment="8bit")
    walk(model, optimizer, 3)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    other = copy.deepcopy(model)
    resumed = Madam(other.parameters())  # the kind of moment comes with the state
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    walk(model, optimizer, 5, 3)
    walk(other, resumed, 5, 3)
    assert same(model, other)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for name in ("second_moment", "exponents"):
            assert torch.equal(optimizer.state[p][name], resumed.state[q][name])


@pytest.mark.parametrize("ladder", [None, "paper12"])
def test_a_piece_at_a_time_gives_what_the_whole_gives(ladder, monkeypatch):
    models = [network(ladder), network(ladder)]
    optimizers = [Madam(m.parameters(), second_moment="8bit") for m in models]
    for model, optimizer, size in zip(models, optimizers, (2**16, 128), strict=True):
        monkeypatch.setattr(update, "_CHUNK", size)
        walk(model, optimizer, 4)
    assert same(*models)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        for name in ("second_moment", "exponents"):
            assert torch.equal(optimizers[0].state[p][name], optimizers[1].state[q][name])


@pytest.mark.parametrize("ladder", [None, "paper12"])
def test_another_memory_order_keeps_the_moment(ladder):
    model = network(ladder)
    optimizer = Madam(model.parameters(), second_moment="8bit")
    walk(model, optimizer, 50)
    weight = model[2].weight
    before = float_moment(optimizer, weight)
    model.to(memory_format=torch.channels_last)
    weight = model[2].weight
    put_gradients(model, 99, share=0.0)
    optimizer.step()
    assert optimizer.state[weight]["second_moment"].stride() == weight.stride()
    torch.testing.assert_close(float_moment(optimizer, weight), before, rtol=0.21, atol=0)
    assert (float_moment(optimizer, weight) == before).float().mean() > 0.95


def float_moment(optimizer, p):
    """The decoded moment, in logical order."""
    state = optimizer.state[p]
    own = state["second_moment"]
    codes = p.coding.matrix(own) if isinstance(p, LadderTensor) else own
    still = torch.zeros((), dtype=torch.int32)
    value = moment8.Piece(codes, state["exponents"], still, 0, isinstance(p, LadderTensor)).decoded()
    return value.flatten().as_strided(p.shape, own.stride()).contiguous() if value.shape != p.shape else value


@pytest.mark.parametrize("ladder", [None, "signed8"])
def test_a_moment_changes_its_kind_when_the_group_does(ladder):
    model = network(ladder)
    optimizer = Madam(model.parameters())
    walk(model, optimizer, 20)
    exact = {p: optimizer.state[p]["second_moment"].clone() for p in model.parameters()}
    put_gradients(model, 7, share=0.0)
    for kind, dtype in (("8bit", torch.uint8), ("float32", torch.float32)):
        optimizer.param_groups[0]["second_moment"] = kind
        optimizer.step()
        for p in model.parameters():
            assert optimizer.state[p]["second_moment"].dtype == dtype
            assert ("exponents" in optimizer.state[p]) == (kind == "8bit")
    for p in model.parameters():
        torch.testing.assert_close(optimizer.state[p]["second_moment"], exact[p], rtol=0.25, atol=1e-12)


@pytest.mark.parametrize("ladder", [None, "paper12"])
def test_a_gradient_that_is_not_finite_leaves_the_moment_as_it_is(ladder):
    model = network(ladder)
    optimizer = Madam(model.parameters(), second_moment="8bit")
    walk(model, optimizer, 5)
    p = model[4].weight
    before = float_moment(optimizer, p)
    put_gradients(model, 5)
    p.grad = torch.full_like(p.grad, float("nan"))
    optimizer.step()
    # Exponents may follow a largest moment that was rounded up to the next octave, and codes with them.
    torch.testing.assert_close(float_moment(optimizer, p), before, rtol=1.2e-7, atol=0)
    assert optimizer.nonfinite_count() == p.numel()


def test_a_foreign_kind_is_refused():
    with pytest.raises(ValueError, match="'float32', '8bit', 'none'"):
        Madam(network().parameters(), second_moment="4bit")


@pytest.mark.filterwarnings("ignore:.* of the codes of")
@pytest.mark.parametrize("ladder", [None, "signed8"])
def test_digits_are_learnt_as_with_the_float32_moment(ladder):
    data = digits.load()

    def score(kind):
        def make(net):
            if ladder is not None:
                torchmadam.to_ladder_(net, ladder)
            return Madam(net.parameters(), second_moment=kind)

        return train(0, data, make, epochs=15)

    scores = {kind: score(kind) for kind in ("float32", "8bit")}
    assert scores["8bit"] > 0.95
    assert abs(scores["8bit"] - scores["float32"]) < 0.015


@needs_a_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in parts of PyTorch that its compiler imports
def test_a_compiled_step_leaves_no_group_out():
    torch.manual_seed(0)
    models = [nn.Linear(184, 1, bias=False)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [Madam(m.parameters(), second_moment="8bit") for m in models]
    steps = [optimizers[0].step, torch.compile(optimizers[1].step)]
    for t in range(3):
        for model, step in zip(models, steps, strict=True):
            put_gradients(model, t)
            step()
    assert same(*models)


def test_a_step_that_moved_a_moment_is_not_kept_to_be_made_again(monkeypatch):
    model = network()
    optimizer = Madam(model.parameters())
    monkeypatch.setattr("torchmadam.madam.is_launched", lambda group: True)
    step = Madam._step_parts
    monkeypatch.setattr(Madam, "_step_parts", lambda self, group: [step(self, group)] and [lambda lr: None])
    put_gradients(model, 0)
    optimizer.step()  # makes the state
    assert len(optimizer._repeats._kept) == 0
    optimizer.step()
    assert len(optimizer._repeats._kept) == 1
    for kind in ("8bit", "float32"):
        before = len(optimizer._repeats._kept)
        optimizer.param_groups[0]["second_moment"] = kind
        optimizer.step()
        assert len(optimizer._repeats._kept) == before
        optimizer.step()
        assert len(optimizer._repeats._kept) in (before, before + 1)


@pytest.mark.parametrize(("shape", "other"), [((5, 3), "paper12"), ((40, 27), "signed8"), ((16, 8), "signed8")])
def test_the_state_of_floats_is_refused_by_codes_and_the_reverse(shape, other):
    floats = nn.Linear(shape[1], shape[0], bias=False)
    codes = torchmadam.to_ladder_(copy.deepcopy(floats), other)
    optimizers = [Madam(m.parameters(), second_moment="8bit") for m in (floats, codes)]
    for model, optimizer in zip((floats, codes), optimizers, strict=True):
        put_gradients(model, 0)
        optimizer.step()
    for one, another in (optimizers, optimizers[::-1]):
        with pytest.raises(ValueError, match="another kind of weights"):
            one.load_state_dict(another.state_dict())
