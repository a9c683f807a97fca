"""PyTorch's own optimiser suite, driven with an OptimizerInfo of Madam.

`torch.testing._internal.common_optimizers` ships the descriptions and helpers; the checks themselves live in PyTorch's
repository, not in the wheel, and are written here against the same descriptions, one test a check of theirs.
"""

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch import nn

from torchmadam import Madam

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing PyTorch's internals is noisy
    from torch.testing._internal.common_optimizers import (
        ErrorOptimizerInput,
        OptimizerErrorEnum,
        OptimizerInfo,
        OptimizerInput,
        TensorTracker,
        get_error_inputs_for_all_optims,
        optim_db,
    )
    from torch.testing._internal.common_utils import TestCase


PAPER = {"momentum": 0.0, "crossing": 0.0, "bound": 3.0, "weight_decay": 0.0}


def madam_inputs(device, dtype=None):
    """Constructor arguments to run every check with, `params` excluded."""
    return [
        OptimizerInput(None, {}, "default"),
        OptimizerInput(None, {"lr": 0.02}, "non-default lr"),
        OptimizerInput(None, {"lr": torch.tensor(0.02)}, "tensor lr"),
        OptimizerInput(None, {"weight_decay": 0.1}, "weight_decay"),
        OptimizerInput(None, {"weight_decay": 0.1, "maximize": True}, "maximize"),
        OptimizerInput(None, {"crossing": 0.3}, "crossing"),
        OptimizerInput(None, {"second_moment": "none"}, "sign rule"),
        OptimizerInput(None, {"momentum": 0.5}, "momentum"),
        OptimizerInput(None, PAPER, "the paper's rule"),
        OptimizerInput(None, {**PAPER, "bias_correction": False, "bound": None}, "the paper's text, unbounded"),
    ]


def madam_errors(device, dtype):
    return [
        *get_error_inputs_for_all_optims(device, dtype),
        ErrorOptimizerInput(
            OptimizerInput(None, {"beta": 1.0}, "beta"), error_type=ValueError, error_regex="beta=1.0 cannot work"
        ),
        ErrorOptimizerInput(
            OptimizerInput(None, {"bound": -1.0}, "bound"), error_type=ValueError, error_regex="bound=-1.0 cannot work"
        ),
    ]


MADAM = OptimizerInfo(
    Madam,
    optim_inputs_func=madam_inputs,
    optim_error_inputs_func=madam_errors,
    scheduler_inputs=next(info for info in optim_db if info.name == "Adam").scheduler_inputs,
    supported_impls=(),
    not_og_supported_flags=(),
    supports_fused_on=(),
)
CONFIGS = MADAM.optim_inputs_func(device="cpu")
every_config = pytest.mark.parametrize("config", CONFIGS, ids=[c.desc for c in CONFIGS])
case = TestCase()


def build(params, config, **more):
    return MADAM.optim_cls(params, **copy.deepcopy(config.kwargs), **more)


def two_params(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(10, 5, dtype=dtype)), nn.Parameter(torch.randn(10, dtype=dtype))


def closure_for(weight, bias, optimizer):
    x = torch.randn(5, generator=torch.Generator().manual_seed(1)).to(weight.dtype)

    def closure():
        optimizer.zero_grad()
        loss = (weight.mv(x) + bias).pow(2).sum()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("error", MADAM.optim_error_inputs_func("cpu", torch.float32))
def test_errors(error):
    given = error.optimizer_error_input
    params = given.params if given.params is not None else [nn.Parameter(torch.randn(1))]
    assert error.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
    if issubclass(error.error_type, Warning):
        with pytest.warns(error.error_type, match=error.error_regex):
            Madam(params, **given.kwargs)
    else:
        with pytest.raises(error.error_type, match=error.error_regex):
            Madam(params, **given.kwargs)


@every_config
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("with_scheduler", [True, False])
def test_forloop_goes_right_direction(config, contiguous, with_scheduler):
    for schedulers in MADAM.scheduler_inputs if with_scheduler else [[]]:
        weight, bias = two_params()
        if not contiguous:
            weight, bias = (nn.Parameter(torch.stack([p.detach(), p.detach()], -1)[..., 0]) for p in (weight, bias))
            assert not weight.is_contiguous()
        optimizer = build([weight, bias], config)
        chain = [make(optimizer) for make in schedulers]
        closure = closure_for(weight, bias, optimizer)
        before = closure().item()
        for _ in range(20):
            loss = optimizer.step(closure)
            for scheduler in chain:
                plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(loss.detach()) if plateau else scheduler.step()
        after = closure().item()
        assert after > before if config.kwargs.get("maximize") else after < before


@every_config
@pytest.mark.filterwarnings("ignore:.* is at its bound")  # of what is to grow for ever
def test_param_groups_lr_and_decay(config):
    weight, bias = two_params()
    optimizer = build([{"params": [weight], "lr": 0.1}, {"params": [bias]}], config)
    closure = closure_for(weight, bias, optimizer)
    before = closure().item()
    for _ in range(20):
        optimizer.step(closure)
    after = closure().item()
    assert after > before if config.kwargs.get("maximize") else after < before


@every_config
@pytest.mark.parametrize("dims", [0, 1])
def test_tensor_lr(config, dims):
    paths = []
    for tensor in (False, True):
        weight, bias = two_params()
        optimizer = build([weight, bias], OptimizerInput(None, {**config.kwargs, "lr": 0.01}))
        if tensor:
            optimizer.param_groups[0]["lr"] = torch.full((1,) * dims, 0.01)
        closure = closure_for(weight, bias, optimizer)
        for _ in range(10):
            optimizer.step(closure)
        paths.append((weight, bias))
    torch.testing.assert_close(paths[0], paths[1])


@every_config
def test_step_is_noop_when_params_have_no_grad(config):
    params = two_params()
    before = copy.deepcopy(params)
    optimizer = build(params, config)
    optimizer.step()
    assert torch.equal(params[0], before[0])
    assert len(optimizer.state) == 0


@every_config
def test_step_is_noop_for_zero_grads(config):
    param = nn.Parameter(torch.randn(200, 5, generator=torch.Generator().manual_seed(0)))
    before = param.detach().clone()
    optimizer = build([param], config)
    for _ in range(3):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    group = optimizer.param_groups[0]
    if group["weight_decay"]:
        limit, expected = (group["bound"] or math.inf) * before.square().mean().sqrt(), before
        for _ in range(3):
            expected = (expected * math.exp(-group["lr"] * group["weight_decay"])).clamp(-limit, limit)
        torch.testing.assert_close(param.detach(), expected, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(param, before)


@every_config
def test_optimizer_can_be_printed(config):
    assert "Parameter Group 0" in repr(build(two_params(), config))


@every_config
@pytest.mark.parametrize("named", [False, True])
def test_state_dict_deterministic(config, named):
    weight, bias = two_params()
    given = [("w", weight), ("b", bias)] if named else [weight, bias]
    optimizer = build(given, config)
    closure = closure_for(weight, bias, optimizer)
    for _ in range(3):
        optimizer.step(closure)
    weight_c, bias_c = (nn.Parameter(p.detach().clone()) for p in (weight, bias))
    other = build([("w", weight_c), ("b", bias_c)] if named else [weight_c, bias_c], config)
    closure_c = closure_for(weight_c, bias_c, other)
    saved = copy.deepcopy(optimizer.state_dict())
    other.load_state_dict(optimizer.state_dict())
    case.assertEqual(saved, optimizer.state_dict())
    for _ in range(3):
        optimizer.step(closure)
        other.step(closure_c)
        assert torch.equal(weight, weight_c)
        assert torch.equal(bias, bias_c)
    case.assertEqual(optimizer.state_dict(), other.state_dict())
    assert optimizer.state_dict()["param_groups"][0].get("param_names") == (["w", "b"] if named else None)


@every_config
def test_can_load_from_and_to_a_named_state_dict(config):
    for first_named in (True, False):
        weight, bias = two_params()
        names = ["w", "b"]
        given = list(zip(names, (weight, bias), strict=True)) if first_named else [weight, bias]
        first = build(given, config)
        first.step(closure_for(weight, bias, first))
        second = build([weight, bias] if first_named else list(zip(names, (weight, bias), strict=True)), config)
        second.load_state_dict(first.state_dict())
        second.step(closure_for(weight, bias, second))
        assert second.param_groups[0]["param_names"] == names


@every_config
def test_save_load_equality_with_weights_only(config, tmp_path):
    weight, bias = two_params()
    optimizer = build([weight, bias], config)
    closure = closure_for(weight, bias, optimizer)
    for _ in range(3):
        optimizer.step(closure)
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    case.assertEqual(torch.load(tmp_path / "o.pt", weights_only=True), optimizer.state_dict())


@every_config
def test_load_nontensor_step(config):
    weight, bias = two_params()
    optimizer = build([weight, bias], config)
    closure = closure_for(weight, bias, optimizer)
    optimizer.step(closure)
    state = copy.deepcopy(optimizer.state_dict())
    for held in state["state"].values():
        held["step"] = held["step"].item()
    optimizer.load_state_dict(state)
    optimizer.step(closure)
    assert all(held["step"].item() == 2 for held in optimizer.state.values())


@every_config
def test_complex(config):
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(10, 5, dtype=torch.complex64))
    pairs = nn.Parameter(torch.view_as_real(whole.detach()).clone())
    optimizers = [build([whole], config), build([pairs], config)]
    tracked = [TensorTracker(), TensorTracker()]
    for _ in range(3):
        whole.grad = torch.randn_like(whole)
        pairs.grad = torch.view_as_real(whole.grad)
        for optimizer, tracker in zip(optimizers, tracked, strict=True):
            optimizer.step()
            for held in optimizer.state.values():
                for value in held.values():
                    if isinstance(value, torch.Tensor):
                        tracker.add(value)
        assert torch.equal(torch.view_as_real(whole.detach()), pairs.detach())
    for a, b in zip(tracked[0].tensors, tracked[1].tensors, strict=True):
        assert torch.equal(a, b)


@every_config
def test_mixed_dtypes_in_one_group(config):
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
    torch.manual_seed(0)
    together = [nn.Parameter(torch.randn(4, 3, dtype=d)) for d in dtypes]
    alone = copy.deepcopy(together)
    one = build(together, config)
    # A group each, in the same order: rounding is keyed by a parameter's place in its optimiser.
    many = build([{"params": [p]} for p in alone], config)
    for _ in range(3):
        for p, q in zip(together, alone, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        one.step()
        many.step()
    assert all(torch.equal(p, q) for p, q in zip(together, alone, strict=True))


@every_config
def test_step_hooks_run_in_order_and_may_change_the_closure(config):
    params = two_params()
    optimizer = build(params, config)
    calls = []

    def replace_the_closure(o, args, kwargs):
        calls.append("pre")
        return (o, lambda: calls.append("other closure")), kwargs

    pre = optimizer.register_step_pre_hook(replace_the_closure)
    post = optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append("post"))
    optimizer.step(lambda: calls.append("closure"))
    assert calls == ["pre", "other closure", "post"]
    pre.remove()
    post.remove()
    optimizer.step()
    assert calls == ["pre", "other closure", "post"]


@every_config
def test_state_dict_hooks_see_and_replace_the_dict(config):
    weight, bias = two_params()
    optimizer = build([weight, bias], config)
    optimizer.step(closure_for(weight, bias, optimizer))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "extra": 1})
    saved = optimizer.state_dict()
    assert saved["extra"] == 1

    other = build([weight, bias], config)
    seen = []

    def advance_the_clock(o, state):
        state = copy.deepcopy(state)
        for held in state["state"].values():
            held["step"] = held["step"] * 100
        return state

    other.register_load_state_dict_pre_hook(advance_the_clock)
    other.register_load_state_dict_post_hook(lambda o: seen.extend(h["step"].item() for h in o.state.values()))
    other.load_state_dict(saved)
    assert seen == [100.0, 100.0]
    assert optimizer.state[weight]["step"].item() == 1


@every_config
def test_deepcopy_copies_all_public_attrs(config):
    optimizer = build(two_params(), config)

    def public(o):
        return {k for k in o.__dict__ if not k.startswith("_")}

    assert public(optimizer) == public(copy.deepcopy(optimizer)) == public(pickle.loads(pickle.dumps(optimizer)))


@every_config
def test_non_empty_state(config):
    weight, bias = two_params()
    optimizer = build([weight, bias], config)
    optimizer.step(closure_for(weight, bias, optimizer))
    assert all(len(held) > 0 for held in optimizer.state.values())


@every_config
def test_gradients_are_never_written_to(config):
    params = two_params()
    optimizer = build(params, config)
    for p in params:
        p.grad = torch.randn_like(p)
    before = [(p.grad.clone(), p.grad._version) for p in params]
    optimizer.step()
    for p, (value, version) in zip(params, before, strict=True):
        assert torch.equal(p.grad, value)
        assert p.grad._version == version


@every_config
def test_the_parameter_version_counter_rises(config):
    weight, bias = two_params()
    optimizer = build([weight, bias], config)
    before = weight._version
    optimizer.step(closure_for(weight, bias, optimizer))
    assert weight._version > before


@every_config
def test_freeze_and_unfreeze(config):
    weight, bias = two_params()
    optimizer = build([weight, bias], config)
    closure = closure_for(weight, bias, optimizer)
    optimizer.step(closure)
    optimizer.zero_grad()
    weight.requires_grad_(False)
    frozen = weight.detach().clone()
    optimizer.step(closure)
    assert torch.equal(weight, frozen)
    weight.requires_grad_(True)
    optimizer.step(closure)
    assert not torch.equal(weight, frozen)


@every_config
def test_default_dtype_does_not_matter(config):
    paths = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        weight, bias = two_params()
        optimizer = build([weight, bias], config)
        closure = closure_for(weight, bias, optimizer)
        torch.set_default_dtype(dtype)
        try:
            for _ in range(3):
                optimizer.step(closure)
        finally:
            torch.set_default_dtype(torch.float32)
        paths.append((weight, bias))
        assert {v.dtype for h in optimizer.state.values() for v in h.values() if isinstance(v, torch.Tensor)} <= {
            torch.float32,
            torch.bfloat16,
            torch.int64,
        }
    for path in paths[1:]:
        torch.testing.assert_close(paths[0], path, rtol=1e-6, atol=0)


@every_config
def test_empty_and_zero_dimensional_parameters(config):
    params = [nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(3, 0))]
    optimizer = build(params, config)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert params[0].item() != 0.5
    assert torch.isfinite(params[0])
