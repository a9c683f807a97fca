"""Bytes by kind."""

import torch
from torch import nn

from torchmadam import Madam, memory, to_ladder_


def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 16, bias=False))
    model.append(nn.Linear(16, 16, bias=False))
    model[4].weight = nn.Parameter(torch.randn(16, 16))
    model.append(nn.Linear(16, 16, bias=False))
    model[5].weight = model[4].weight
    return model


def trained(model, optimizer):
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    return memory(model, optimizer)


def test_every_byte_is_counted_once_and_by_kind():
    model = net()
    found = trained(model, Madam(model.parameters()))
    count = 3 * 8 * 9 + 8 + 8 + 8 + 8 * 36 * 16 + 256
    assert found.weights == count
    assert found.floats == found.moments == found.gradients == 4 * count
    assert found.codes == found.scales == 0
    assert found.counters == 6 * (4 + 4 + 8)  # a step, a scale, a count of bad gradients for each of six tensors
    assert found.buffers == 8 * 4 * 2 + 8
    assert found.total == 12 * count + found.counters + found.buffers
    assert found.per_weight == found.total / count


def test_codes_and_released_gradients_shrink_it():
    model = to_ladder_(net(), "signed8", dtype=torch.bfloat16)
    model.to(torch.float32)
    optimizer = Madam(model.parameters())
    found = trained(model, optimizer)
    assert found.floats == 0
    assert found.codes == found.weights  # eight bits a weight
    assert found.scales == 6 * 4
    optimizer.zero_grad()
    assert memory(model, optimizer).gradients == 0


def test_other_optimisers_are_counted_too_and_the_table_adds_up():
    model = net()
    found = trained(model, torch.optim.Adam(model.parameters()))
    assert found.moments == 8 * found.weights
    table = str(found)
    assert f"bytes of {found.weights:,} weights" in table
    assert f"{found.total:,}" in table.splitlines()[-1]
    assert memory(model).moments == 0
