"""Madam on codes: the paper's B-bit rule, exactly, and training that resumes."""

import copy
import math
import statistics
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import torchmadam
from digits_training import train
from madam_lab.tasks import digits
from torchmadam import LadderFormat, LadderTensor, Madam, update


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 7))


def put_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def codes(model):
    return [p.codes() for p in model.parameters() if isinstance(p, LadderTensor)]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("bits", "spacing"), [(12, 0.001), (10, 0.004), (8, 0.016)])
@pytest.mark.parametrize("lr", [0.016, 0.01])
def test_200_steps_give_the_codes_of_the_papers_rule(bits, spacing, lr):
    """k <- clamp(k + s round(u eta / eta0), 0, 2^B - 1), transcribed from the paper in NumPy float32."""
    rng = np.random.default_rng(bits)
    top = 2**bits - 1
    k, s = rng.integers(0, top + 1, (13, 29)), rng.choice([-1, 1], (13, 29))
    p = nn.Parameter(torch.from_numpy(0.05 * s * np.exp(-k * spacing)).float())
    holder = nn.ParameterList([p])
    torchmadam.to_ladder_(holder, LadderFormat.paper(bits, spacing), init="nearest", bound=1.0, scale=0.05)
    coded = holder[0]
    optimizer = Madam.paper([coded], lr=lr)

    f = np.float32
    v = np.zeros((13, 29), f)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 8 bits at lr = .01 lie below their spacing
        for t in range(1, 201):
            g = rng.standard_normal((13, 29)).astype(f) * np.exp(rng.standard_normal((13, 29))).astype(f)
            v = v * f(0.999) + (g * g) * f(1 - 0.999)
            gbar = np.sqrt(v / f(1 - 0.999**t))
            u = np.clip(g / gbar, f(-8), f(8))
            k = np.clip(k + s * np.rint(u * f(lr / spacing)).astype(np.int64), 0, top)
            coded.grad = torch.from_numpy(g)
            optimizer.step()
            ours = coded.codes().numpy()
            assert np.array_equal(ours & top, k), f"step {t}"
            assert np.array_equal(1 - 2 * (ours >> bits), s)


@pytest.mark.parametrize("name", ["paper12", "signed8"])
def test_no_float_copy_of_a_weight_is_held_anywhere(name):
    model = torchmadam.to_ladder_(network(), name)
    optimizer = Madam(model.parameters(), second_moment="none", momentum=0.0)
    put_gradients(model, 0)
    optimizer.step()
    floats = [
        t
        for p in model.parameters()
        for t in (*vars(p).values(), *optimizer.state[p].values())
        if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel() > 1
    ]
    assert floats == []


@pytest.mark.parametrize("name", ["paper12", "paper8", "signed8", "signed12", "synapse"])
@pytest.mark.parametrize("how", ["state_dict", "file"])
def test_train_save_load_resume_gives_the_codes_of_never_having_stopped(name, how, tmp_path):
    def made():
        return torchmadam.to_ladder_(network(), name)

    model = made()
    optimizer = Madam(model.parameters(), lr=0.02, rounding="stochastic", seed=3)
    for t in range(5):
        put_gradients(model, t)
        optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    if how == "file":
        torchmadam.save(model, tmp_path / "m.safetensors")
        other = torchmadam.load(tmp_path / "m.safetensors", network(seed=9))
    else:
        torch.save(model.state_dict(), tmp_path / "m.pt")
        other = torchmadam.to_ladder_(network(seed=9), name)
        other.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True))
    resumed = Madam(other.parameters())
    resumed.load_state_dict(torch.load(tmp_path / "o.pt", weights_only=True))
    assert same(codes(model), codes(other))
    for t in range(5, 10):
        for m, o in ((model, optimizer), (other, resumed)):
            put_gradients(m, t)
            o.step()
        assert same(codes(model), codes(other))
    again = made()
    repeated = Madam(again.parameters(), lr=0.02, rounding="stochastic", seed=3)
    for t in range(10):
        put_gradients(again, t)
        repeated.step()
    assert same(codes(model), codes(again))


@pytest.mark.parametrize("name", ["paper12", "signed8"])
def test_channels_last_walks_the_same_path(name):
    model = torchmadam.to_ladder_(network(), name, filter=lambda name, p: name != "1.bias")  # zeros would not move
    other = copy.deepcopy(model)
    optimizers = [Madam.paper(m.parameters(), rounding="nearest") for m in (model, other)]
    for t in range(6):
        if t == 3:
            other.to(memory_format=torch.channels_last)  # in the middle of training, second moments and all
            assert other[0].weight.is_contiguous(memory_format=torch.channels_last)
        for m, o in zip((model, other), optimizers, strict=True):
            put_gradients(m, t)
            o.step()
        assert same(codes(model), codes(other))


def test_schedulers_reach_codes_untouched():
    p = nn.ParameterList([nn.Parameter(torch.full((64,), 0.5))])
    torchmadam.to_ladder_(p, "paper12", init="nearest", scale=0.5)
    optimizer = Madam.paper(p.parameters(), lr=0.01, second_moment="none")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for rungs in (10, 5, 2):  # .01, .005, .0025 over .001, the last half to even
        before = p[0].codes()
        p[0].grad = torch.ones(64)
        optimizer.step()
        scheduler.step()
        assert torch.equal(p[0].codes() - before, torch.full((64,), rungs))


def test_stochastic_rounding_lets_lr_decay_below_the_spacing():
    p = nn.ParameterList([nn.Parameter(torch.full((4096,), 0.5))])
    torchmadam.to_ladder_(p, "paper12", init="nearest", scale=0.5)
    optimizer = Madam.paper(p.parameters(), lr=1e-4, second_moment="none", rounding="stochastic")
    before = p[0].codes().double().mean()
    for _ in range(100):
        p[0].grad = torch.ones(4096)
        optimizer.step()
    assert (p[0].codes().double().mean() - before).item() == pytest.approx(10, abs=0.3)


def test_a_nonfinite_gradient_leaves_its_code_alone():
    model = torchmadam.to_ladder_(network(), "signed8")
    optimizer = Madam(model.parameters(), weight_decay=5.0)
    put_gradients(model, 0)
    model[4].weight.grad[2, 3] = math.nan
    before = model[4].weight.codes()
    optimizer.step()
    after = model[4].weight.codes()
    assert after[2, 3] == before[2, 3]
    assert (after != before).float().mean() > 0.3
    assert optimizer.nonfinite_count() == 1


def test_float_and_coded_parameters_train_in_one_group():
    model = torchmadam.to_ladder_(network(), "paper12", filter=lambda name, p: name == "4.weight")
    optimizer = Madam(model.named_parameters())
    put_gradients(model, 0)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert [isinstance(p, LadderTensor) for p in model.parameters()] == [False] * 4 + [True, False]


def test_a_view_of_codes_is_refused_as_a_parameter():
    weight = torchmadam.to_ladder_(nn.Linear(3, 5), "paper12").weight
    for view in (weight.detach().t(), weight.detach()[1:]):
        with pytest.raises(ValueError, match="is a view of codes"):
            Madam([nn.Parameter(view)])


# ---- warnings


def test_an_lr_below_the_spacing_warns_once_under_nearest_only():
    model = torchmadam.to_ladder_(network(), "paper12")
    optimizer = Madam.paper(model.parameters(), lr=0.0005)
    put_gradients(model, 0)
    with pytest.warns(UserWarning, match=r"lr=0.0005 is at most half the ladder's spacing 0.001.*stochastic") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        for lr, rounding in ((0.001, None), (0.0005, "stochastic"), (0.0, None)):
            quiet = Madam.paper(model.parameters(), lr=lr, rounding=rounding)
            quiet.step()


@pytest.mark.parametrize("name", ["paper12", "signed8"])
def test_codes_piling_up_at_the_upper_end_warn_once_and_name_the_tensor(name):
    model = torchmadam.to_ladder_(network(), name, filter=lambda name, p: "weight" in name)
    # Two groups, and no names given: the tensors remember theirs.
    optimizer = Madam([{"params": model[0].parameters()}, {"params": model[4].parameters()}], lr=0.1)
    grow = 4.0 * torch.sign(model[4].weight.detach())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(250):
            put_gradients(model, t)
            model[4].weight.grad = -grow
            optimizer.step()
    messages = [str(w.message) for w in caught if "upper end" in str(w.message)]
    assert len([m for m in messages if "4.weight" in m]) == 1
    assert "% of the codes of 4.weight are at the upper end" in messages[0]


@pytest.mark.parametrize("ladder", ["paper12", "paper8", "signed8", "signed12", "synapse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_watch_counts_weights_at_the_upper_end_as_the_codes_say(ladder, dtype):
    from torchmadam.watch import _share_at_the_end

    torch.manual_seed(0)
    model = torchmadam.to_ladder_(nn.Linear(40, 30, bias=False), ladder, bound=0.5, dtype=dtype)
    p = model.weight
    share = p.coding.format.at_upper_end(p.codes()).float().mean()
    assert float(_share_at_the_end(p)) == pytest.approx(float(share))


# ---- accuracy


def accuracy(seed, data, ladder):
    def make(net):
        if ladder is not None:
            torchmadam.to_ladder_(net, ladder)
        return Madam(net.parameters())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # output layers do pile up a little at the end
        return train(seed, data, make, epochs=30)


def test_12_bit_and_signed_8_bit_networks_learn_digits_as_float32_does():
    data = digits.load()
    scores = {ladder: statistics.fmean(accuracy(s, data, ladder) for s in range(5)) for ladder in (None, 12, "signed8")}
    assert scores[None] > 0.97
    assert abs(scores[12] - scores[None]) < 0.01
    assert abs(scores["signed8"] - scores[None]) < 0.01


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("second_moment", ["float32", "8bit", "none"])
@pytest.mark.parametrize(
    ("ladder", "seed"), [("paper12", None), ("paper12", 5), ("paper10", None), ("signed8", None), ("synapse", None)]
)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_coded_step_in_pieces_is_the_step_in_one_piece(
    monkeypatch, ladder, seed, second_moment, rounding, memory_format
):
    momentum = 0.9 if rounding == "stochastic" else 0.0
    arguments = {
        "lr": 0.1,
        "second_moment": second_moment,
        "rounding": rounding,
        "weight_decay": 0.1,
        "momentum": momentum,
    }
    steps = []
    for size in (2**15, 100):
        monkeypatch.setattr(update, "_CHUNK", size)
        model = network().to(memory_format=memory_format)
        torchmadam.to_ladder_(model, ladder, sign_seed=seed)
        optimizer = Madam.paper(model.parameters(), **arguments)
        for t in range(3):
            put_gradients(model, t)
            model[0].weight.grad[4, 1, 1, 2] = math.inf
            optimizer.step()
        moments = [state["second_moment"] for state in optimizer.state.values() if "second_moment" in state]
        steps.append((codes(model) + moments, optimizer.nonfinite_count()))
    assert same(steps[0][0], steps[1][0])
    assert steps[0][1] == steps[1][1] == 3


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("lr", [0.01, 0.0037, 0.1])
def test_a_learning_rate_in_a_tensor_is_the_number_in_it(lr, momentum):
    """A GPU's kernels get the number; divided by the spacing in float32, it would send some codes elsewhere."""
    for dtype in (torch.float32, torch.float64):
        given = torch.tensor(lr, dtype=dtype)
        arguments = {"momentum": momentum, "max_step": 8.0, "weight_decay": 0.2, "feeds": momentum > 0}
        for spacing in (0.001, 0.0069, 0.01, 0.3):
            ours, theirs = (update.Pace.of(each, spacing, **arguments) for each in (given, float(given)))
            assert ours == theirs
