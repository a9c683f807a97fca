"""Gradients that are used and freed inside backward."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchmadam import Madam, release_gradients, to_ladder_


class Tied(nn.Module):
    """A language model in miniature whose output weights are its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())
        self.output = nn.Linear(8, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        return self.output(self.middle(self.embedding(tokens)))


def loss_of(model, t):
    tokens = torch.randint(11, (6, 5), generator=torch.Generator().manual_seed(t))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten())


def values(model):
    return [p.codes() if hasattr(p, "codes") else p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("ladder", [None, "paper12", "signed8"])
@pytest.mark.parametrize("named", [False, True])
def test_released_steps_are_ordinary_steps_bit_for_bit(ladder, named):
    torch.manual_seed(0)
    ordinary = Tied()
    if ladder:
        to_ladder_(ordinary, ladder)
    released = copy.deepcopy(ordinary)
    optimizers = [
        Madam(m.named_parameters() if named else m.parameters(), weight_decay=0.1, rounding="stochastic")
        for m in (ordinary, released)
    ]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in optimizers]
    release_gradients(released, optimizers[1])
    for t in range(5):
        for m, optimizer, schedule in zip((ordinary, released), optimizers, schedules, strict=True):
            optimizer.zero_grad()
            loss_of(m, t).backward()
            if m is released:
                assert all(p.grad is None for p in m.parameters())
            optimizer.step()
            schedule.step()
        assert all(torch.equal(a, b) for a, b in zip(values(ordinary), values(released), strict=True))
    steps = {int(s["step"]) for s in optimizers[1].state.values()}
    assert steps == {5}  # the tied weight was stepped once a backward


def test_released_steps_follow_the_learning_rate_after_a_state_dict_is_loaded():
    torch.manual_seed(0)
    ordinary = Tied()
    released = copy.deepcopy(ordinary)
    optimizers = [Madam(m.named_parameters()) for m in (ordinary, released)]
    release_gradients(released, optimizers[1])
    for t, lr in enumerate((0.01, 0.1)):
        for m, optimizer in zip((ordinary, released), optimizers, strict=True):
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = lr
            loss_of(m, t).backward()
            optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert all(torch.equal(a, b) for a, b in zip(values(ordinary), values(released), strict=True))


def test_only_one_gradient_is_alive_at_a_time():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(6)])
    optimizer = Madam(model.parameters())
    alive = []
    step_group = optimizer.step_group

    def counted(group):
        alive.append(sum(p.grad is not None for p in model.parameters()))
        step_group(group)

    optimizer.step_group = counted
    release_gradients(model, optimizer)
    model(torch.randn(3, 16)).sum().backward()
    assert alive == [1] * 6


def test_a_second_backward_before_the_step_raises_and_names_the_weight():
    model = Tied()
    optimizer = Madam(model.named_parameters())
    release_gradients(model, optimizer)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"(middle|embedding).*second gradient before optimizer.step\(\)"):
        loss_of(model, 1).backward()
    optimizer.step()


def test_reentrant_checkpointing_over_a_tied_weight_raises_and_the_other_kind_works():
    class Checkpointed(Tied):
        reentrant = True

        def forward(self, tokens):
            x = self.middle(self.embedding(tokens))
            return checkpoint(self.output, x, use_reentrant=self.reentrant)

    torch.manual_seed(0)
    model = Checkpointed()
    optimizer = Madam(model.named_parameters())
    release_gradients(model, optimizer)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        loss_of(model, 0).backward()
    optimizer.step()
    model.reentrant = False
    before = model.embedding.weight.detach().clone()
    loss_of(model, 0).backward()
    optimizer.step()
    assert not torch.equal(before, model.embedding.weight)


def test_a_grad_scaler_raises():
    model = Tied()
    optimizer = Madam(model.parameters())
    release_gradients(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(RuntimeError, match="train in bfloat16"):
        scaler.step(optimizer)
    optimizer.step()  # without the scaler


def test_after_remove_gradients_are_kept_again_and_a_scaler_works():
    model = Tied()
    optimizer = Madam(model.parameters())
    handle = release_gradients(model, optimizer)
    with pytest.raises(RuntimeError, match="released already"):
        release_gradients(model, optimizer)
    handle.remove()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    assert all(p.grad is not None for p in model.parameters())
    before = values(model)
    scaler.step(optimizer)
    assert not torch.equal(before[0], values(model)[0])
    release_gradients(model, optimizer)


def test_what_cannot_work_is_refused():
    model = Tied()
    with pytest.raises(TypeError, match=r"works with torchmadam\.Madam, and this is a SGD"):
        release_gradients(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match=r"does not have middle\.0\.weight"):
        release_gradients(model, Madam([model.embedding.weight]))
