"""Madam as a PyTorch optimiser: arguments, groups, state, and what surrounds a step."""

import copy
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import torchmadam
from compiler import needs_a_compiler
from torchmadam import Madam, to_ladder_
from torchmadam.repeat import situation_of

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def network(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Complex modules are a new feature")
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


def put_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"lr": -0.01}, "lr=-0.01 cannot work.*maximize=True"),
        ({"lr": math.nan}, "lr=nan"),
        ({"lr": torch.tensor([0.1, 0.1])}, "Tensor lr must be 1-element"),
        ({"beta": 1.0}, "beta=1.0 cannot work.*0 <= beta < 1"),
        ({"beta": -0.1}, "beta=-0.1"),
        ({"momentum": 1.0}, "momentum=1.0 cannot work.*0 <= momentum < 1"),
        ({"max_step": 0.0}, "max_step=0.0 cannot work"),
        ({"lr": math.inf}, "lr=inf cannot work"),
        ({"lr": None}, "lr=None cannot work: it must be a number"),
        ({"bound": 0.0}, "bound=0.0 cannot work.*bound > 0"),
        ({"bound": math.inf}, "bound=inf cannot work.*None for no clamp"),
        ({"bound": "3"}, "bound='3' cannot work: it must be a number"),
        ({"crossing": 1e-46}, "crossing=1e-46 cannot work"),
        ({"crossing": -1.0}, "crossing=-1.0 cannot work"),
        ({"scale": 0.0}, "scale=0.0 cannot work.*scales_of"),
        ({"zero_scale": -1.0}, "zero_scale=-1.0 cannot work"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0 cannot work"),
        ({"second_moment": "float8"}, "second_moment='float8' is unknown; choose one of 'float32', '8bit', 'none'"),
        ({"rounding": "up"}, "rounding='up' is unknown; choose one of None, 'nearest', 'stochastic'"),
        ({"seed": 1.5}, "seed=1.5 must be an integer"),
        ({"compile": "yes"}, "compile='yes' cannot work.*True or False"),
        ({"scale": {"0.weight": 1.0}}, "matched by parameter name.*named_parameters"),
    ],
)
def test_a_bad_argument_raises_a_value_error_that_says_what_to_do(arguments, says):
    with pytest.raises(ValueError, match=says):
        Madam(network().parameters(), **arguments)
    with pytest.raises(ValueError, match=says):
        Madam([{"params": list(network().parameters()), **arguments}])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("betas", "did you mean 'beta'"),
        ("nesterov", "it would do nothing; remove it"),
        ("learning_rate", "it would do nothing; remove it"),
        ("weight_decays", "did you mean 'weight_decay'"),
        ("crosing", "did you mean 'crossing'"),
        ("beta1", "did you mean 'beta'"),
        ("beta_1", "did you mean 'beta'"),
        ("wd", "it would do nothing; remove it"),
        ("max_grad_norm", "it would do nothing; remove it"),
    ],
)
def test_a_misspelt_or_foreign_group_argument_raises_and_a_label_does_not(name, says):
    with pytest.raises(ValueError, match=says):
        Madam([{"params": list(network().parameters()), name: 0.9}])
    own = {"label": "encoder", "lr_scale": 0.5, "initial_lr": 0.01, "layer": 3, "lr_mult": 2.0, "fix_lr": True}
    own |= {"weight_decay_mult": 1.0, "base_weight_decay": 0.1, "min_scale": 0.5}
    schedules = {"max_lr": 1.0, "min_lr": 0.0, "base_lr": 0.1, "swa_lr": 0.1, "base_momentum": 0.8, "max_momentum": 0.9}
    Madam([{"params": list(network().parameters()), **own, **schedules, "note": None}])


@pytest.mark.parametrize("bound", [-1, "3"])
def test_a_refused_group_is_not_added(bound):
    first, second = network(seed=0), network(seed=1)
    optimizer = Madam(first.parameters())
    with pytest.raises(ValueError, match="bound"):
        optimizer.add_param_group({"params": second.parameters(), "bound": bound})
    assert len(optimizer.param_groups) == 1


def test_every_argument_lives_in_the_param_groups():
    model = network()
    optimizer = Madam([{"params": model[0].parameters(), "lr": 0.1, "bound": 1.0}, {"params": model[2].parameters()}])
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.01]
    assert [g["bound"] for g in optimizer.param_groups] == [1.0, 5.0]
    expected = {
        "lr", "beta", "momentum", "max_step", "bound", "crossing", "scale", "zero_scale", "second_moment",
        "bias_correction", "rounding", "seed", "weight_decay", "maximize",
    }  # fmt: skip
    assert expected <= optimizer.param_groups[0].keys()


def test_a_sparse_gradient_raises_and_names_the_parameter():
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = Madam(table.named_parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"'weight' has a gradient of layout torch.sparse_coo.*sparse=False"):
        optimizer.step()


# ---- scales and zeros


def test_sigma_is_the_rms_at_the_first_step_and_stays():
    model = network()
    put_gradients(model, 0)
    optimizer = Madam(model.parameters())
    with torch.no_grad():
        model[0].weight.mul_(2)
    rms = model[0].weight.square().mean().sqrt()
    for _ in range(5):
        optimizer.step()
    torch.testing.assert_close(optimizer.state[model[0].weight]["scale"], rms.detach())


def test_a_number_gives_every_tensor_its_scale():
    model = network()
    put_gradients(model, 0)
    optimizer = Madam(model.parameters(), scale=0.02, bound=2.0)
    optimizer.step()
    assert max(p.abs().max() for p in model.parameters()) <= 0.04 + 1e-8


def test_scales_of_a_trained_model_are_matched_by_name_through_wrappers():
    trained = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))
    with torch.no_grad():
        trained[0].weight.mul_(10)
    scales = torchmadam.scales_of(trained.state_dict())
    assert scales == torchmadam.scales_of(trained)
    assert set(scales) == {"0.weight", "0.bias", "1.weight", "2.weight", "2.bias"}  # 1.bias is zero, the rest buffers

    fresh = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))
    named = [("module._orig_mod." + name, p) for name, p in fresh.named_parameters()]
    with pytest.warns(UserWarning, match=r"no scale for 1\.bias: their own RMS is used"):
        optimizer = Madam(named, scale=scales)
    put_gradients(fresh, 0)
    optimizer.step()
    assert optimizer.state[fresh[0].weight]["scale"].item() == pytest.approx(scales["0.weight"])


def test_unmatched_scales_are_reported():
    with (
        pytest.warns(UserWarning, match=r"scales that match no parameter: head\.weight"),
        pytest.warns(UserWarning, match=r"no scale for 0\.bias, 2\.bias, 2\.weight"),
    ):
        Madam(network().named_parameters(), scale={"0.weight": 1.0, "head.weight": 2.0})


def test_scales_of_a_later_group_are_not_reported_as_unmatched():
    model = network()
    scales = torchmadam.scales_of(model)
    with pytest.warns(UserWarning, match=r"match no parameter: 2\.bias, 2\.weight"):
        optimizer = Madam([(f"0.{n}", p) for n, p in model[0].named_parameters()], scale=scales)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.add_param_group({"params": [(f"2.{n}", p) for n, p in model[2].named_parameters()]})
    with pytest.warns(UserWarning, match=r"no scale for other\.weight"):
        optimizer.add_param_group({"params": [("other.weight", nn.Parameter(torch.ones(2)))]})


def test_scales_of_leaves_out_what_cannot_be_a_scale():
    source = {"mask": torch.full((2, 2), -math.inf), "zero": torch.zeros(3), "ids": torch.arange(3), "w": torch.ones(3)}
    assert torchmadam.scales_of(source) == {"w": 1.0}


def test_the_scale_of_a_large_tensor_does_not_lose_digits():
    # One float32 sum over as many elements saturates on a CPU, at 0.71 for this tensor.
    p = nn.Parameter(torch.ones(1).expand(2**28).reshape(2**28))
    assert torchmadam.start.sizes([p]) == [(1.0, 1.0)]


@pytest.mark.parametrize("size", [1e-60, 1e60])
def test_a_scale_beyond_float32_serves_float64_weights(size):
    p = nn.Parameter(torch.randn(50, dtype=torch.float64) * size)
    before = p.detach().clone()
    p.grad = torch.randn(50, dtype=torch.float64)
    Madam.paper([p], bound=10.0).step()
    torch.testing.assert_close(
        (p.detach() / before).log().abs(), torch.full((50,), 0.01, dtype=torch.float64), rtol=1e-4, atol=0
    )


def test_a_scale_that_float16_cannot_hold_is_refused():
    p = nn.Parameter(torch.full((3,), 1e-3, dtype=torch.float16))
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"which torch\.float16 rounds to zero"):
        Madam([p], scale=1e-9).step()


def test_a_given_scale_also_serves_tensors_of_zeros():
    p = nn.Parameter(torch.zeros(4))
    p.grad = torch.ones(4)
    Madam.paper([p], scale=0.5).step()
    torch.testing.assert_close(p.detach(), torch.full((4,), -1.5 * math.sinh(0.01)), rtol=1e-4, atol=0)
    q = nn.Parameter(torch.zeros(4))
    q.grad = torch.ones(4)
    Madam.paper([q], scale=0.5, zero_scale=0.0, crossing=2.0).step()  # the group's own crossing moves it
    torch.testing.assert_close(q.detach(), torch.full((4,), -3 * math.sinh(0.01)), rtol=1e-4, atol=0)


def test_a_tensor_lr_of_one_element_keeps_a_number_a_number():
    p = nn.Parameter(torch.tensor(0.5))
    p.grad = torch.tensor(1.0)
    Madam([p], lr=torch.tensor([0.01])).step()
    assert p.shape == ()


def test_an_all_zero_tensor_moves_by_the_signed_rule_on_zero_scale():
    bias, gain = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))
    optimizer = Madam.paper([bias, gain])
    for p in (bias, gain):
        p.grad = torch.tensor([1.0, -1.0, 1.0, 0.0])
    optimizer.step()
    torch.testing.assert_close(
        bias.detach(), torch.tensor([-1.0, 1.0, -1.0, 0.0]) * 0.03 * math.sinh(0.01), rtol=1e-4, atol=0
    )
    for _ in range(2000):
        optimizer.step()
    torch.testing.assert_close(bias.detach(), torch.tensor([-0.03, 0.03, -0.03, 0.0]))
    assert torch.all(gain > 0)


@pytest.mark.parametrize(
    ("rule", "width"),
    [
        ({}, 0.05),
        ({"bound": None, "crossing": 5.0}, 0.05),
        ({"bound": 100}, 0.05),
        ({"bound": None}, 0.05),
        ({"bound": 2.0}, 0.02),
        ({"crossing": 0.1}, 0.005),
        ({"crossing": 0.0}, 0.05),  # since nothing multiplied by zero moves
        ({"crossing": 0.0, "bound": None}, 0.01),
    ],
)
def test_zeros_have_the_zone_that_others_have(rule, width):
    for shape in ((3,), (1, 3)):
        weight = nn.Parameter(torch.zeros(shape))
        weight.grad = torch.tensor([1.0, -1.0, 0.0]).view(shape)
        Madam([weight], weight_decay=0.0, zero_scale=0.01 if len(shape) == 1 else 10.0, **rule).step()
        wide = width if len(shape) == 1 else 1000 * width
        expected = torch.tensor([-1.0, 1.0, 0.0]).view(shape) * wide * math.sinh(0.01)
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-4, atol=0)


def test_zero_scale_zero_leaves_zeros_alone_and_says_so_once_by_name():
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.bias)
    put_gradients(model, 0)
    with pytest.warns(UserWarning, match="parameter 1: all zeros, and zero_scale=0"):
        Madam(model.parameters(), zero_scale=0.0).step()
    optimizer = Madam(model.named_parameters(), zero_scale=0.0)
    with pytest.warns(UserWarning, match="bias: all zeros, and zero_scale=0") as caught:
        optimizer.step()
    assert caught[0].filename == __file__  # it points at the user's line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert torch.equal(model.bias, torch.zeros(2))


def test_weights_that_are_not_finite_raise_at_the_first_step():
    model = network()
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    put_gradients(model, 0)
    with pytest.raises(ValueError, match=r"'0.weight' holds a value that is not finite"):
        Madam(model.named_parameters()).step()


# ---- shapes and dtypes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (37, 53)])
def test_every_shape_and_dtype_steps_with_a_float32_second_moment(dtype, shape):
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(shape).to(dtype))
    before = p.detach().clone()
    p.grad = torch.randn(shape).to(dtype)
    optimizer = Madam.paper([p], lr=0.1)
    optimizer.step()
    assert optimizer.state[p]["second_moment"].dtype == torch.float32
    assert p.dtype == dtype
    expected = before.double() * torch.exp(-0.1 * torch.sign(before.double() * p.grad.double()))
    expected = expected.clamp(-3 * optimizer.state[p]["scale"].double(), 3 * optimizer.state[p]["scale"].double())
    tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(dtype, 1e-5)
    torch.testing.assert_close(p.detach().double(), expected, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters_step_as_pairs_of_reals(dtype):
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(5, 4, dtype=dtype))
    pairs = nn.Parameter(torch.view_as_real(whole.detach().clone()))
    optimizers = [Madam([whole]), Madam([pairs])]
    for _ in range(5):
        whole.grad = torch.randn_like(whole)
        pairs.grad = torch.view_as_real(whole.grad)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(torch.view_as_real(whole.detach()), pairs.detach())


def test_complex_gradients_that_await_their_conjugation_are_what_they_mean():
    start = torch.randn(6, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    lazy, plain = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    lazy.conj().abs().sum().backward()
    assert lazy.grad.is_conj()
    plain.grad = lazy.grad.resolve_conj()
    for p in (lazy, plain):
        Madam([p]).step()
    assert torch.equal(lazy.detach(), plain.detach())
    assert not torch.equal(lazy.detach(), start)


def test_numbers_of_numpy_are_numbers():
    optimizer = Madam([nn.Parameter(torch.ones(2))], lr=np.float32(0.5), weight_decay=np.float64(0.25))
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.5, 0.25)
    assert type(optimizer.param_groups[0]["lr"]) is float


def test_a_parameter_without_a_gradient_has_no_state_and_starts_its_own_clock_later():
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = Madam([a, b])
    a.grad = torch.ones(3)
    optimizer.step()
    assert b not in optimizer.state
    b.grad = torch.ones(3)
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in (a, b)] == [2, 1]
    a.grad = None
    before = a.detach().clone()
    optimizer.step()
    assert torch.equal(a, before)
    assert [int(optimizer.state[p]["step"]) for p in (a, b)] == [2, 2]


def test_without_a_second_moment_there_is_no_state_per_weight():
    model = network()
    put_gradients(model, 0)
    optimizer = Madam(model.parameters(), second_moment="none", momentum=0.0)
    optimizer.step()
    held = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    assert all(v.dim() == 0 for v in held)


def test_nonfinite_gradients_are_counted():
    model = network()
    optimizer = Madam(model.parameters())
    assert optimizer.nonfinite_count() == 0
    put_gradients(model, 0)
    model[0].weight.grad[0, :2] = math.inf
    model[2].bias.grad[1] = math.nan
    optimizer.step()
    put_gradients(model, 1)
    optimizer.step()
    assert optimizer.nonfinite_count() == 3
    assert all(torch.isfinite(p).all() for p in model.parameters())


# ---- saving and resuming


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64])
@pytest.mark.parametrize("how", ["state_dict", "file", "deepcopy", "pickle"])
@pytest.mark.parametrize("second_moment", ["float32", "none"])
def test_a_resumed_run_is_bit_for_bit_the_run_that_never_stopped(dtype, how, second_moment, tmp_path):
    model = network(dtype)
    optimizer = Madam(model.parameters(), crossing=0.3, seed=5, second_moment=second_moment)
    for t in range(5):
        put_gradients(model, t)
        optimizer.step()

    if how in ("state_dict", "file"):
        resumed_model = network(dtype, seed=9)
        resumed_model.load_state_dict(model.state_dict())
        resumed = Madam(resumed_model.parameters(), lr=0.5, seed=1)
        state = optimizer.state_dict()
        if how == "file":
            torch.save(state, tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt", weights_only=True)
        resumed.load_state_dict(state)
    else:
        both = (model, optimizer)
        resumed_model, resumed = copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))

    for p, q in zip(model.parameters(), resumed_model.parameters(), strict=True):
        for name, value in optimizer.state[p].items():
            other = resumed.state[q][name]
            if isinstance(value, torch.Tensor):
                assert value.dtype == other.dtype
                assert torch.equal(value, other)
                assert value.data_ptr() != other.data_ptr()
            else:
                assert value == other
    for t in range(5, 10):
        for m, o in ((model, optimizer), (resumed_model, resumed)):
            put_gradients(m, t)
            o.step()
        assert same(weights(model), weights(resumed_model))


def test_the_state_of_another_optimiser_is_refused_with_a_reason():
    model = network()
    put_gradients(model, 0)
    adam = torch.optim.Adam(model.parameters())
    adam.step()
    with pytest.raises(ValueError, match=r"written by another optimiser.*exp_avg.*start its own state"):
        Madam(model.parameters()).load_state_dict(adam.state_dict())


@pytest.mark.parametrize("wrong", [{"model": {}}, {"0.weight": torch.ones(2)}])
def test_what_is_no_optimiser_state_is_refused_with_a_reason(wrong):
    with pytest.raises(ValueError, match=r"not the state of an optimiser.*optimizer\.state_dict\(\)"):
        Madam(network().parameters()).load_state_dict(wrong)


def test_a_state_of_another_shape_is_refused_and_leaves_the_optimiser_as_it_was():
    small, large = nn.Linear(2, 3), nn.Linear(5, 3)
    optimizers = [Madam(m.parameters()) for m in (small, large)]
    for m, o in zip((small, large), optimizers, strict=True):
        put_gradients(m, 0)
        o.step()
    before = copy.deepcopy(optimizers[1].state_dict())
    with pytest.raises(ValueError, match=r"shape \(3, 2\) where the parameter has \(3, 5\)"):
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    after = optimizers[1].state_dict()
    assert torch.equal(before["state"][0]["second_moment"], after["state"][0]["second_moment"])
    optimizers[1].step()


def test_a_second_moment_switched_on_later_starts_its_own_clock():
    model = network()
    optimizer = Madam.paper(model.parameters(), second_moment="none")
    put_gradients(model, 0)
    for _ in range(3):
        optimizer.step()
    optimizer.param_groups[0]["second_moment"] = "float32"
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}
    ratio = (model[0].weight / before).log().abs().detach()
    torch.testing.assert_close(ratio.max(), torch.tensor(0.01), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("bound", "decay", "momentum"), [(3.0, 0.3, 0.0), (10.0, 0.3, 0.0), (10.0, 0.6, 0.0), (5.0, 0.2, 0.9)]
)
def test_with_a_decay_weights_settle_where_the_theory_says(bound, decay, momentum):
    """docs/theory.md: at an RMS of beta_w sqrt(lr / (2 decay)), where a step turns a layer by sqrt(2 lr decay)."""
    lr, sigma = 0.02, 0.05
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(sigma * torch.randn(4000, generator=generator))
    optimizer = Madam([p], lr, crossing=1.0, bound=bound, weight_decay=decay, momentum=momentum)
    scale = p.detach().square().mean().sqrt()
    for _ in range(round(3 / (lr * decay))):
        before = p.detach().clone()
        p.grad = torch.randn(4000, generator=generator)
        optimizer.step()
    after = p.detach()
    assert (after.square().mean().sqrt() / scale).item() == pytest.approx(bound * math.sqrt(lr / (2 * decay)), rel=0.1)
    turned = math.sqrt(2 * lr * decay * (1 - momentum) / (1 + momentum))
    assert ((after - before).norm() / before.norm()).item() == pytest.approx(turned, rel=0.1)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_group_without_any_gradient_has_nothing_to_repeat(momentum):
    """Which a GPU asks before every step; with released gradients, at the end of every one."""
    model = network()
    optimizer = Madam(model.parameters(), momentum=momentum)
    put_gradients(model, 0)
    optimizer.step()
    assert situation_of(optimizer.param_groups[0], optimizer.state) is not None
    optimizer.zero_grad()
    assert situation_of(optimizer.param_groups[0], optimizer.state) is None
    optimizer.step()


def test_the_papers_rule_is_one_call_away_whatever_the_defaults():
    params = [nn.Parameter(torch.ones(3))]
    (group,) = Madam.paper(params).param_groups
    names = ("lr", "beta", "momentum", "max_step", "bound", "crossing", "weight_decay", "bias_correction")
    assert [group[name] for name in names] == [0.01, 0.999, 0.0, 8.0, 3.0, 0.0, 0.0, True]
    (group,) = Madam.paper(params, 0.1, bound=2.0, weight_decay=0.5, seed=3).param_groups
    assert [group[name] for name in ("lr", "bound", "weight_decay", "seed")] == [0.1, 2.0, 0.5, 3]


def test_an_argument_missing_from_an_old_state_takes_its_default():
    model = network()
    put_gradients(model, 0)
    optimizer = Madam(model.parameters())
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    del state["param_groups"][0]["weight_decay"]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["weight_decay"] == optimizer.defaults["weight_decay"]
    optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert "differentiable" not in optimizer.param_groups[1]


def test_rounding_depends_on_the_seed_and_on_nothing_else():
    def path(seed):
        model = network(torch.bfloat16)
        optimizer = Madam(model.parameters(), seed=seed)
        for t in range(5):
            torch.rand(t + 1)  # the global generator must not matter
            put_gradients(model, t)
            optimizer.step()
        return weights(model)

    assert same(path(1), path(1))
    assert not same(path(1), path(2))


# ---- the loop around a step


def test_a_closure_runs_with_gradients_and_its_loss_comes_back():
    model, x = network(), torch.randn(8, 6)
    optimizer = Madam(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    for _ in range(50):
        last = optimizer.step(closure)
    assert last < first


def test_a_group_added_later_trains_with_its_own_arguments():
    first, second = network(seed=0), network(seed=1)
    optimizer = Madam.paper(first.parameters())
    put_gradients(first, 0)
    optimizer.step()
    optimizer.add_param_group({"params": second.parameters(), "lr": 0.1})
    put_gradients(second, 1)
    before = second[0].weight.detach().clone()
    optimizer.step()
    ratio = (second[0].weight / before).log().abs().detach()
    torch.testing.assert_close(ratio.max(), torch.tensor(0.1), rtol=1e-3, atol=0)
    assert [optimizer.state[p]["index"] for p in second.parameters()] == [4, 5, 6, 7]


def test_a_tensor_lr_gives_the_path_of_a_float_lr():
    paths = []
    for lr in (0.01, torch.tensor(0.01), torch.tensor([0.01], dtype=torch.float64)):
        model = network()
        optimizer = Madam(model.parameters(), lr=lr, weight_decay=0.1)
        for t in range(5):
            put_gradients(model, t)
            optimizer.step()
        paths.append(weights(model))
    for path in paths[1:]:
        for a, b in zip(paths[0], path, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.1),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=8, cycle_momentum=False),
        lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 3),
    ],
)
@pytest.mark.parametrize("tensor", [False, True])
def test_schedulers_drive_the_size_of_a_step(schedule, tensor):
    p = nn.Parameter(torch.full((4,), 1.0))
    optimizer = Madam.paper([p], lr=torch.tensor(0.01) if tensor else 0.01, bound=None, second_moment="none")
    scheduler = schedule(optimizer)
    for _ in range(6):
        lr = float(optimizer.param_groups[0]["lr"])
        before = p.detach().clone()
        p.grad = torch.ones(4)
        optimizer.step()
        scheduler.step()
        torch.testing.assert_close((p.detach() / before).log(), torch.full((4,), -lr), rtol=1e-3, atol=1e-6)


def test_reduce_on_plateau_works():
    model = network()
    optimizer = Madam(model.parameters())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for loss in (1.0, 1.0, 1.0):
        put_gradients(model, 0)
        optimizer.step()
        scheduler.step(loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0001)


def test_a_grad_scaler_skips_overflowed_steps_and_rescales_the_others():
    plain, scaled = network(), network()
    x = torch.randn(8, 6)
    optimizers = [Madam(m.parameters()) for m in (plain, scaled)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plain(x).square().mean().backward()
    optimizers[0].step()
    scaler.scale(scaled(x).square().mean()).backward()
    scaler.step(optimizers[1])
    scaler.update()
    assert same(weights(plain), weights(scaled))

    before = weights(scaled)
    put_gradients(scaled, 0)
    scaled[0].weight.grad[0, 0] = math.inf
    scaler.step(optimizers[1])
    scaler.update()
    assert same(before, weights(scaled))
    assert scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_step_is_one_graph_and_a_changing_lr_does_not_recompile_it(dtype):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, compiled = network(dtype), network(dtype)
    lr = torch.tensor(0.01)
    optimizers = [Madam(m.parameters(), lr=lr) for m in (eager, compiled)]
    step = torch.compile(optimizers[1].step, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own deprecations
        for t in range(5):
            lr.fill_(0.01 / (t + 1))
            for m in (eager, compiled):
                put_gradients(m, t)
            optimizers[0].step()
            step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for a, b in zip(weights(eager), weights(compiled), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=0)


BACKENDS = ["aot_eager", pytest.param("inductor", marks=needs_a_compiler)]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_step_with_a_float_lr_settles_after_one_recompilation_and_follows_lr(backend, momentum):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, compiled = network(), network()
    optimizers = [Madam.paper(m.parameters(), weight_decay=5.0, momentum=momentum) for m in (eager, compiled)]
    step = torch.compile(optimizers[1].step, backend=backend, fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for t in range(6):
            for m, o in zip((eager, compiled), optimizers, strict=True):
                o.param_groups[0]["lr"] = 0.01 * (t + 1)
                put_gradients(m, t)
            optimizers[0].step()
            step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    for a, b in zip(weights(eager), weights(compiled), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=0)


# ---- groups from a model


def test_param_groups_sorts_a_model_into_weights_embeddings_norms_and_biases():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 4)
            self.bag = nn.EmbeddingBag(5, 4)
            self.norm = nn.LayerNorm((3, 4))
            self.out = nn.Linear(4, 5)
            self.out.weight = self.table.weight  # tied
            self.body = nn.Conv1d(4, 4, 1)
            self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
            self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)

    model = Net()
    groups = torchmadam.param_groups(model, weight_decay=0.1, embeddings={"bound": 4.0})
    named = {g["kind"]: [name for name, _ in g["params"]] for g in groups}
    assert named == {
        "weights": ["body.weight", "attention.in_proj_weight", "attention.out_proj.weight"],
        "embeddings": ["table.weight", "bag.weight"],
        "norms_and_biases": [
            "norm.weight", "norm.bias", "out.bias", "body.bias", "attention.in_proj_bias", "attention.bias_k",
            "attention.bias_v", "attention.out_proj.bias",
        ],
    }  # fmt: skip
    optimizer = Madam(groups)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0, 0.0]
    for make, decay in ((Madam, 0.2), (Madam.paper, 0.0)):
        assert [g["weight_decay"] for g in make(torchmadam.param_groups(model)).param_groups] == [decay, 0.0, 0.0]
    assert [g["bound"] for g in optimizer.param_groups] == [5.0, 4.0, 5.0]
    put_gradients(model, 0)
    optimizer.step()


def test_second_moments_follow_their_parameters_into_another_memory_order():
    torch.manual_seed(0)
    moved, still = (nn.Conv2d(3, 4, 3) for _ in range(2))
    still.load_state_dict(moved.state_dict())
    optimizers = [Madam(m.parameters(), momentum=0.0) for m in (moved, still)]
    for t in range(4):
        if t == 2:
            moved.to(memory_format=torch.channels_last)
        for m, optimizer in zip((moved, still), optimizers, strict=True):
            put_gradients(m, t)
            optimizer.step()
    state = optimizers[0].state[moved.weight]
    assert state["second_moment"].stride() == moved.weight.stride() == (27, 1, 9, 3)
    torch.testing.assert_close(moved.weight, still.weight, rtol=1e-6, atol=0)
    assert torch.equal(state["second_moment"], optimizers[1].state[still.weight]["second_moment"])


@pytest.mark.parametrize("size", [1e-5, 1e-6])
def test_gains_next_to_zero_grow_as_those_that_are_zero(size):
    p, zero = (nn.Parameter(torch.full((32,), value)) for value in (size, 0.0))
    optimizer = Madam([p, zero])
    for _ in range(80):
        for each in (p, zero):
            each.grad = -torch.ones_like(each)
        optimizer.step()
    torch.testing.assert_close(p, zero, rtol=0.01, atol=2e-5)  # means are dithered
    assert optimizer.state[p]["scale"] / optimizer.state[p]["room"] == pytest.approx(0.01)
    random = nn.Parameter(torch.full((32,), 2e-4))
    other = Madam([random, nn.Parameter(torch.full((4,), 1e-5))], zero_scale=0.0)
    for each in other.param_groups[0]["params"]:
        each.grad = torch.ones_like(each)
    other.step()
    widths = [float(state["scale"]) / state["room"] for state in other.state.values()]
    assert widths == pytest.approx([2e-4, 1e-5])


def test_a_scale_follows_the_dtype_of_its_parameter():
    model = nn.Linear(8, 8).double()
    optimizer = Madam(model.parameters())
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model.to(dtype)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        wide = torch.promote_types(dtype, torch.float32)
        assert {state["scale"].dtype for state in optimizer.state.values()} == {wide}


def test_a_parameter_of_a_new_group_gets_random_bits_of_its_own():
    a, b, c = (nn.Parameter(torch.randn(8).bfloat16()) for _ in range(3))
    optimizer = Madam([{"params": [a]}, {"params": [b]}])
    for p in (a, b, c):
        p.grad = torch.ones_like(p)
    optimizer.step()
    del optimizer.param_groups[0]
    optimizer.add_param_group({"params": [c]})
    optimizer.step()
    indices = [optimizer.state[p]["index"] for p in (a, b, c)]
    assert len(set(indices)) == 3


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("kind", ["float32", "8bit"])
def test_a_second_moment_that_is_not_wanted_any_more_is_dropped(kind, coded):
    model = nn.Linear(16, 16)
    if coded:
        to_ladder_(model)
    optimizer = Madam(model.parameters(), second_moment=kind)
    for wanted in (kind, "none", kind):
        optimizer.param_groups[0]["second_moment"] = wanted
        for p in model.parameters():
            p.grad = torch.ones(p.shape)
        optimizer.step()
        for state in optimizer.state.values():
            assert ("second_moment" in state) == (wanted != "none")
            assert ("exponents" in state) == (wanted == "8bit")


@pytest.mark.parametrize("bits", [None, 12])
def test_looking_at_a_state_that_is_not_there_yet_changes_nothing(bits, tmp_path):
    """It is a defaultdict, as every optimiser's: a look leaves an empty entry."""
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    if bits:
        for model in models:
            to_ladder_(model, bits=bits, init="nearest")
    plain, looked = (Madam(model.parameters()) for model in models)
    for part in (0, 1):  # the second layer's gradients come later
        for p in models[1].parameters():
            assert "step" not in looked.state[p] or part
        assert looked.nonfinite_count() == 0
        for a, b in zip(*(model[part].parameters() for model in models), strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        torchmadam.distributed.save(tmp_path / str(part), models[1], looked)
        plain.step()
        looked.step()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)
        assert plain.state[a]["index"] == looked.state[b]["index"]
