"""Steps of codes in C give the codes, the moments and the counts of the reference, to the last bit."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from compiler import needs_cc
from torchmadam import LadderFormat, Madam, noise, to_ladder_, update
from torchmadam.kernels import compiled, compiled_codes, ops

pytestmark = [needs_cc, pytest.mark.filterwarnings("ignore:lr=:UserWarning")]  # too small for the coarse ladders
# Rows that end within a byte, that are longer than a block of step_coded.c, and single weights.
SHAPES = [(5, 3, 3, 3), (7, 33), (3, 700), (40,), (), (2, 256), (0, 4)]
LADDERS = {
    **{name: LadderFormat.preset(name) for name in ("paper12", "paper10", "paper8", "signed8", "signed12", "synapse")},
    "paper of 15 bits": LadderFormat.paper(15, 0.0001),
    "signed of 3 bits": LadderFormat.signed(3, 1.0),
}
RULES = [
    {},
    {"weight_decay": 0.3, "rounding": "stochastic"},
    {"rounding": "nearest", "lr": torch.tensor(0.05)},
    {"rounding": "stochastic", "bias_correction": False, "maximize": True},
    {"second_moment": "none", "weight_decay": 0.1},
    {"beta": 0.0, "max_step": 0.5},
    {"momentum": 0.9, "maximize": True},
    {"momentum": 0.9, "weight_decay": 0.2},  # as Madam has by default
    {"second_moment": "8bit"},
    {"second_moment": "8bit", "momentum": 0.9, "weight_decay": 0.2, "maximize": True},
    {"second_moment": "8bit", "beta": 0.5, "bias_correction": False},
]


def parameters(ladder, sign_seed=None, channels_last=False, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    holder = nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES)
    if channels_last:
        holder[0].data = holder[0].data.to(memory_format=torch.channels_last)
    to_ladder_(holder, ladder, sign_seed=sign_seed, dtype=dtype)
    return list(holder.parameters())


def trained(params, steps=5, **rule):
    """Parameters after some steps, in which some gradients cannot be used, or are zero."""
    optimizer = Madam.paper(params, **rule)
    for t in range(steps):
        generator = torch.Generator().manual_seed(t)
        for i, p in enumerate(params):
            grad = torch.randn(p.shape, generator=generator, dtype=torch.float32) * 10.0 ** (i - 3)
            if t == 2 and grad.numel():
                grad.view(-1)[:: max(1, grad.numel() // 3)] = float("nan")
            if t == 3:
                grad = grad * (grad > 0)
            if t == 4 and grad.numel() > 9:  # about the largest that can be used, and beyond
                ends = [2.0**63, -(2.0**63), 2.0**63 * 1.0001, float("inf")]
                grad.view(-1)[:4] = torch.tensor(ends, dtype=torch.float32)
            p.grad = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype).copy_(grad)
        optimizer.step()
    return optimizer


def assert_alike(plain, fast):
    a, b = (o.param_groups[0]["params"] for o in (plain, fast))
    assert all(torch.equal(p.codes(), q.codes()) for p, q in zip(a, b, strict=True))
    for p, q in zip(a, b, strict=True):
        assert plain.state[p].keys() == fast.state[q].keys()
        for name, value in plain.state[p].items():
            other = fast.state[q][name]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name
    assert plain.nonfinite_count() == fast.nonfinite_count() > 0


@pytest.fixture
def only_compiled(monkeypatch):
    """From here on the reference must not run."""

    def refuse(*_, **__):
        raise AssertionError("the reference stepped codes")

    def forbid():
        monkeypatch.setattr(update, "madam_coded_", refuse)

    return forbid


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("name", LADDERS)
def test_compiled_steps_give_the_codes_of_the_reference(name, rule, monkeypatch, only_compiled):
    monkeypatch.setattr(compiled, "_ALONE", 64)  # several threads, if there are
    plain = trained(parameters(LADDERS[name]), **rule)
    only_compiled()
    torch.set_num_threads(2)
    try:
        fast = trained(parameters(LADDERS[name]), compile=True, **rule)
    finally:
        torch.set_num_threads(1)
    assert_alike(plain, fast)


@pytest.mark.parametrize("name", ["paper12", "signed8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["float32", "8bit"])
def test_gradients_of_short_types_and_channels_last(name, dtype, kind, only_compiled):
    plain = trained(parameters(name, channels_last=True, dtype=dtype), second_moment=kind)
    only_compiled()
    fast = trained(parameters(name, channels_last=True, dtype=dtype), second_moment=kind, compile=True)
    assert_alike(plain, fast)


def test_signs_from_a_seed_in_row_major_order(only_compiled):
    plain = trained(parameters("paper10", sign_seed=3))
    only_compiled()
    assert_alike(plain, trained(parameters("paper10", sign_seed=3), compile=True))


def test_what_is_not_taken_steps_as_it_would_without():
    more = {"sign_seed": 3, "channels_last": True}
    plain, fast = (trained(parameters("paper12", **more), compile=c) for c in (False, True))
    assert_alike(plain, fast)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("ladder", "sign_seed"), [("signed8", None), ("paper10", 3)])
def test_a_shard_steps_as_its_rows_of_the_whole(ladder, sign_seed, momentum):
    """Random bits, signs from a seed and the dither of means go by the position in the whole tensor."""
    holder = nn.ParameterList([nn.Parameter(torch.ones(12, 37))])
    to_ladder_(holder, ladder, init="uniform", sign_seed=sign_seed)
    planes, coding = holder[0].planes, holder[0].coding
    grad = torch.randn(12, 37, generator=torch.Generator().manual_seed(2))
    rule = {
        "lr": 0.01, "momentum": momentum, "beta": 0.9, "max_step": 8.0, "weight_decay": 0.0, "bias_correction": True,
        "rounding": "stochastic", "maximize": False, "streams": [noise.stream(0, 0)], "compile": True,
    }  # fmt: skip
    found = []
    for rows in (slice(0, 12), slice(5, 9)):
        shape = (rows.stop - rows.start, 37)
        own = replace(coding, shape=shape, first_row=rows.start, whole_rows=12)
        parts = [plane[rows].clone() for plane in planes]
        state = torch.zeros(shape), torch.zeros(()), torch.zeros((), dtype=torch.int64)
        means = [torch.zeros(shape, dtype=torch.bfloat16)] if momentum else []
        ops.coded_step_([parts], [own], [grad[rows]], means, [state[0]], [], [state[1]], [state[2]], **rule)
        found.append((own.unpack(parts), *means))
    for whole, shard in zip(*found, strict=True):
        assert torch.equal(whole[5:9], shard)
    assert not torch.equal(found[1][0], coding.unpack(planes)[5:9])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_neither_the_reference_nor_c_depends_on_the_default_dtype(dtype):
    rule = {"weight_decay": 0.3, "rounding": "stochastic"}
    usual = trained(parameters("signed8"), **rule)
    compiled_codes._tanhs.cache_clear()
    params = [parameters("signed8") for _ in range(2)]
    torch.set_default_dtype(dtype)
    try:
        others = [trained(own, compile=c, **rule) for own, c in zip(params, (False, True), strict=True)]
    finally:
        torch.set_default_dtype(torch.float32)
    later = trained(parameters("signed8"), compile=True, **rule)
    for p, *own in zip(*(o.param_groups[0]["params"] for o in (usual, *others, later)), strict=True):
        assert all(torch.equal(p.codes(), q.codes()) for q in own)


def test_steps_too_large_for_float32_end_at_the_ladders_ends_without_a_decay():
    plain, fast = (trained(parameters("paper12"), compile=c, lr=1e37) for c in (False, True))
    assert_alike(plain, fast)


def test_codes_that_are_not_on_the_ladder_step_as_in_the_reference():
    found = []
    for compile in (False, True):
        (p,) = to_ladder_(nn.ParameterList([nn.Parameter(torch.ones(4, 8))]), "signed8").parameters()
        p.planes[0].fill_(255)
        p.grad = torch.ones(4, 8)
        Madam([p], compile=compile, weight_decay=0.5).step()
        found.append(p.planes[0].clone())
    assert torch.equal(*found)


def test_gradients_that_are_negated_views():
    found = []
    for compile in (False, True):
        holder = to_ladder_(nn.ParameterList([nn.Parameter(torch.ones(4, 8))]), "signed8")
        plain = nn.Parameter(torch.ones(4, 8))
        for p in (holder[0], plain):
            p.grad = torch._neg_view(torch.arange(32.0).view(4, 8) - 9)
        Madam([holder[0], plain], compile=compile).step()
        found.append((holder[0].codes(), plain.detach()))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])


def test_the_halves_of_a_key_are_those_of_tensors():
    for key, step in ((0, 0), (-(2**63), 1), (2**63 - 1, 123_456), (noise.stream(7, 5), 2**24)):
        expected = [int(half) & 0xFFFFFFFF for half in noise.halves(key, torch.tensor(step))]
        assert list(noise.key_halves(key, step)) == expected


def test_positions_beyond_31_bits_are_not_taken():
    coding = parameters("signed8")[1].coding
    far = replace(coding, first_row=2**31 // 33, whole_rows=2**32)
    assert compiled_codes.takes(coding, [])
    assert not compiled_codes.takes(far, [])
