"""State dicts of plain tensors: programs that know nothing of codes can save and load them."""

import copy

import pytest
import safetensors.torch
import torch
from torch import nn

from torchmadam import LadderFileError, LadderFormat, LadderTensor, Madam, load, plain_state_dict_, save, to_ladder_


class Tied(nn.Module):
    """Two names for one tensor, a buffer, a convolution in channels_last, and one parameter left as floats."""

    def __init__(self, bits=12, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 5)
        self.output = nn.Linear(5, 7, bias=False)
        self.output.weight = self.embedding.weight
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        to_ladder_(self, bits, filter=lambda name, _: not name.startswith("norm"))


def codes(model):
    return {name: p.codes() for name, p in model.named_parameters() if isinstance(p, LadderTensor)}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("bits", [12, 10, "signed8", LadderFormat.signed(5)], ids=str)
def test_a_plain_state_dict_goes_through_safetensors_and_comes_back_code_for_code(bits, tmp_path):
    model, other = plain_state_dict_(Tied(bits)), plain_state_dict_(Tied(bits, seed=1))
    assert not same(codes(model), codes(other))
    assert all(type(value) is torch.Tensor for value in model.state_dict().values())
    safetensors.torch.save_file(model.state_dict(), tmp_path / "x")
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "x"))
    assert same(codes(model), codes(other))
    assert other.output.weight is other.embedding.weight
    assert other.convolution.weight.stride() == model.convolution.weight.stride()


def test_names_may_have_a_prefix_and_coded_state_dicts_are_still_taken():
    model = nn.ModuleDict({"inner": plain_state_dict_(Tied())})
    other = nn.ModuleDict({"inner": plain_state_dict_(Tied(seed=1))})
    assert "inner.embedding.weight.plane0" in model.state_dict()
    assert "inner.output.weight.plane0" not in model.state_dict()
    other.load_state_dict(model.state_dict())
    assert same(codes(model), codes(other))
    coded, third = Tied(seed=2), plain_state_dict_(Tied(seed=1))
    third.load_state_dict(coded.state_dict())
    assert same(codes(coded), codes(third))


def test_planes_of_another_ladder_are_refused_even_where_their_shapes_agree():
    wide, narrow = LadderFormat.paper(8, spacing=0.02), LadderFormat.paper(8, spacing=0.01)
    model, other = plain_state_dict_(Tied(wide)), plain_state_dict_(Tied(narrow, seed=1))
    before = codes(other)
    with pytest.raises(RuntimeError, match="one ladder"):
        other.load_state_dict(model.state_dict())
    assert same(before, codes(other))


def test_damaged_parts_are_refused_with_their_name():
    model = plain_state_dict_(Tied())
    for part, damage in (
        ("limit", torch.tensor(-1.0)),
        ("plane0", None),
        ("ladder", torch.zeros(3, dtype=torch.uint8)),
    ):
        state = model.state_dict()
        if damage is None:
            state[f"embedding.weight.{part}"] = state[f"embedding.weight.{part}"][:3]
        else:
            state[f"embedding.weight.{part}"] = damage
        with pytest.raises(LadderFileError, match=r"^embedding\.weight"):
            model.load_state_dict(state)


def test_what_torchmadam_writes_and_trains_stays_as_it_was(tmp_path):
    model, twin = Tied(), plain_state_dict_(plain_state_dict_(Tied()))
    save(model, tmp_path / "a")
    save(twin, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    other = plain_state_dict_(Tied(seed=1))
    load(tmp_path / "b", other)
    assert same(codes(twin), codes(other))
    copied = copy.deepcopy(twin)
    copied.load_state_dict(twin.state_dict())
    assert all(isinstance(p, LadderTensor) for p in twin.state_dict(keep_vars=True).values() if p.dim() > 1)
    for m in (model, copied):
        m.embedding(torch.arange(7)).sum().backward()
        Madam(m.parameters()).step()
    assert same(codes(model), codes(copied))
