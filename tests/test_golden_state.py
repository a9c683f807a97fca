"""A state written by an earlier version of the optimiser must load, and continue as it did then, for ever.

Each file was written by `python tests/test_golden_state.py` when that state was defined. Do not write it again: a new
STATE_VERSION gets a file of its own, and these must still load.
"""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from torchmadam import Madam
from torchmadam.state import STATE_VERSION

FILES = Path(__file__).parent / "golden"


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [
        ("weight", nn.Parameter(torch.randn(5, 3, generator=generator))),
        ("narrow", nn.Parameter(torch.randn(7, generator=generator).bfloat16())),
        ("half", nn.Parameter(torch.randn(7, generator=generator).half())),
        ("double", nn.Parameter(torch.randn(7, generator=generator).double())),
        ("bias", nn.Parameter(torch.zeros(3))),
        ("complex", nn.Parameter(torch.complex(*torch.randn(2, 4, generator=generator)))),
    ]


def groups_of(params):
    first = {"params": params[:3], "lr": torch.tensor(0.02), "scale": {name: 0.9 for name, _ in params[:3]}}
    return [first, {"params": params[3:]}]


def train(params, optimizer, steps):
    for t in steps:
        for i, (_, p) in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * t + i)).to(p.dtype)
        optimizer.step()


def write():
    params = parameters()
    optimizer = Madam(groups_of(params), crossing=0.1, weight_decay=0.01, seed=3)
    train(params, optimizer, range(4))
    golden = {"weights": {n: p.detach().clone() for n, p in params}, "state": copy.deepcopy(optimizer.state_dict())}
    train(params, optimizer, range(4, 8))
    golden["after"] = {n: p.detach().clone() for n, p in params}
    torch.save(golden, FILES / f"madam_state_v{STATE_VERSION}.pt")


@pytest.mark.parametrize("version", range(1, STATE_VERSION + 1))
def test_a_state_loads_and_continues_as_it_did(version):
    golden = torch.load(FILES / f"madam_state_v{version}.pt", weights_only=True)
    assert {group["state_version"] for group in golden["state"]["param_groups"]} == {version}
    params = parameters()
    for name, p in params:
        p.data = golden["weights"][name].clone()
    optimizer = Madam([{"params": params[:3]}, {"params": params[3:]}])
    optimizer.load_state_dict(golden["state"])
    assert optimizer.param_groups[1]["crossing"] == 0.1
    # Of which there was none yet in the first version.
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9 if version > 1 else 0.0] * 2
    assert {group["state_version"] for group in optimizer.param_groups} == {STATE_VERSION}
    assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.02))
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}
    train(params, optimizer, range(4, 8))
    for name, p in params:
        rtol = {"narrow": 2**-7, "half": 2**-10}.get(name, 1e-6)
        torch.testing.assert_close(p.detach(), golden["after"][name], rtol=rtol, atol=0)


@pytest.mark.filterwarnings("ignore:100 % of bias is at its bound")
def test_the_rule_that_a_version_had_goes_on_in_this_one():
    """Under version 1 vectors were clamped as matrices are, and the default was a bound of 3."""
    golden = torch.load(FILES / "madam_state_v1.pt", weights_only=True)
    params = parameters()
    for name, p in params:
        p.data = golden["weights"][name].clone()
    optimizer = Madam([{"params": params[:3]}, {"params": params[3:]}])
    optimizer.load_state_dict(golden["state"])
    bias = dict(params)["bias"]
    for _ in range(300):
        bias.grad = torch.full((3,), -1.0)
        optimizer.step()
    assert bias.tolist() == pytest.approx([0.03] * 3)


def test_a_newer_version_is_refused():
    golden = torch.load(FILES / "madam_state_v1.pt", weights_only=True)
    for group in golden["state"]["param_groups"]:
        group["state_version"] = 99
    with pytest.raises(ValueError, match=r"newer torchmadam \(version \{99\}"):
        Madam(groups_of(parameters())).load_state_dict(golden["state"])


if __name__ == "__main__":
    write()
