"""A shard that knows where it begins takes the step that the whole tensor takes, to the last bit."""

from dataclasses import replace

import pytest
import torch

from compiler import needs_cc
from torchmadam import LadderFormat, LadderTensor, held, noise, update
from torchmadam.kernels import compiled
from torchmadam.ladder.layout import SEED, CodeLayout

RULE = {
    "lr": 0.013, "momentum": 0.0, "beta": 0.999, "max_step": 8.0, "weight_decay": 0.0, "bias_correction": True,
    "maximize": False,
}  # fmt: skip


def scalars():
    return [torch.zeros(())], [torch.ones(())], [torch.zeros((), dtype=torch.int64)]


@pytest.mark.parametrize("step", [update.madam_, pytest.param(compiled.float_step, marks=needs_cc)])
def test_narrow_floats_round_by_their_place_in_the_whole_tensor(step):
    w, g = torch.randn(1000).bfloat16(), torch.randn(1000).bfloat16()
    rule = {**RULE, "bound": 3.0, "rounding": None, "streams": [5], "crossings": [0.0]}
    whole = w.clone()
    step([whole], [g], [], [torch.zeros(1000)], [], *scalars(), **rule)
    for first, last in ((0, 301), (301, 1000), (1000, 1000)):
        part, moment = w[first:last].clone(), torch.zeros(last - first)
        step([part], [g[first:last].clone()], [], [moment], [], *scalars(), firsts=[first], **rule)
        assert torch.equal(part, whole[first:last])
    stranger = w[301:].clone()
    step([stranger], [g[301:].clone()], [], [torch.zeros(699)], [], *scalars(), **rule)
    assert not torch.equal(stranger, whole[301:])


@pytest.mark.parametrize("step", [update.madam_, pytest.param(compiled.float_step, marks=needs_cc)])
def test_means_round_by_their_place_in_the_whole_tensor(step):
    w, g = torch.randn(1000), torch.randn(1000)
    rule = {**RULE, "momentum": 0.9, "bound": 3.0, "rounding": None, "streams": [5], "crossings": [1.0]}

    def mean(rows, **more):
        held = torch.zeros(len(w[rows]), dtype=torch.bfloat16)
        step([w[rows].clone()], [g[rows].clone()], [held], [torch.zeros(len(held))], [], *scalars(), **rule, **more)
        return held

    whole = mean(slice(None))
    assert torch.equal(mean(slice(301, 1000), firsts=[301]), whole[301:])
    assert not torch.equal(mean(slice(301, 1000)), whole[301:])


@needs_cc
def test_compiled_steps_know_positions_beyond_32_bits():
    w, g = torch.randn(64).bfloat16(), torch.randn(64).bfloat16()
    rule = {**RULE, "bound": 3.0, "rounding": None, "streams": [5], "crossings": [0.0], "firsts": [2**33 + 7]}
    reference, ours = w.clone(), w.clone()
    update.madam_([reference], [g], [], [torch.zeros(64)], [], *scalars(), **rule)
    compiled.float_step([ours], [g], [], [torch.zeros(64)], [], *scalars(), **rule)
    assert torch.equal(reference, ours)


@pytest.mark.parametrize("signs", ["plane", SEED])
def test_codes_round_and_take_their_signs_by_their_place_in_the_whole_tensor(signs):
    coding = CodeLayout.contiguous(LadderFormat.paper(12), (13, 21), signs, noise.stream(3, 1))
    codes = torch.randint(0, 4096, (13, 21), dtype=torch.int32)
    planes, g = coding.pack(codes), torch.randn(13, 21)
    rule = {**RULE, "rounding": "stochastic", "streams": [5]}

    def stepped(own, layout, grad):
        own = [p.clone() for p in own]
        steps, _, nonfinite = scalars()
        update.madam_coded_([own], [layout], [grad], [], [torch.zeros(grad.shape)], [], steps, nonfinite, **rule)
        return own

    whole = stepped(planes, coding, g)
    for first, last in ((0, 4), (4, 12), (12, 13)):
        layout = replace(coding, shape=(last - first, 21), first_row=first, whole_rows=13)
        part = stepped([p[first:last] for p in planes], layout, g[first:last])
        assert all(torch.equal(a, b[first:last]) for a, b in zip(part, whole, strict=True))
        assert torch.equal(layout.unpack(part), coding.unpack(whole)[first:last])


def test_a_moment_that_becomes_8_bit_on_a_shard_is_dithered_by_its_place_in_the_whole_tensor():
    coding = CodeLayout.contiguous(LadderFormat.paper(12), (16, 24), "plane")
    planes = coding.pack(torch.randint(0, 4096, (16, 24), dtype=torch.int32))
    moment = torch.rand(16, 24)
    found = []
    for first, last in ((0, 16), (5, 16)):
        layout = coding if first == 0 else replace(coding, shape=(last - first, 24), first_row=first, whole_rows=16)
        p = LadderTensor([plane[first:last].contiguous() for plane in planes], torch.ones(()), layout)
        state = {"second_moment": moment[first:last].clone(), "step": torch.tensor(3.0)}
        held.prepare(state, p, "8bit", 0.0, 77)
        found.append(held.as_float(state, p))
    assert torch.equal(found[0][5:], found[1])
