"""Bytes by kind."""

from pathlib import Path

import torch
from torch import nn

from torchmadam import LadderFormat, Madam, memory, moment8, to_ladder_


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
    found = trained(model, Madam(model.parameters(), momentum=0.0))
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


def test_the_table_of_docs_memory_is_the_sum_of_its_parts():
    moments = {"float32": 4.0, "8-bit": 1 + 1 / moment8.GROUP}
    weights = {"float32": 4.0, "12-bit": 12 / 8, "8-bit": 1.0}
    expected = {
        "AdamW, float32": 4 * 4.0,
        "AdamW, bfloat16": 4 * 2.0,
        "Madam, float32": weights["float32"] + 4 + 2 + moments["float32"],
        "Madam, float32, no momentum": weights["float32"] + 4 + moments["float32"],
        "Madam, float32, no momentum, 8-bit moment": weights["float32"] + 4 + moments["8-bit"],
    }
    for ladder in ("12-bit", "8-bit"):
        for momentum, mean in (("", 2), (", no momentum", 0)):
            for kind in ("float32", "8-bit"):
                for gradient, size in (("bfloat16 gradient", 2), ("gradients released", 0)):
                    name = f"Madam {ladder}{momentum}, {kind} moment, {gradient}"
                    expected[name] = weights[ladder] + size + mean + moments[kind]
    page = (Path(__file__).parents[1] / "docs" / "memory.md").read_text(encoding="utf-8")
    rows = page.split("<!-- checked by tests/test_memory.py -->")[1].split("\n\n")[0].strip().splitlines()[2:]
    assert len(rows) == 13
    for row in rows:
        name, *numbers = (cell.strip() for cell in row.strip("|").split("|"))
        each = expected[name]
        assert numbers == [f"{each:.2f}", *(f"{each * n:.1f}" for n in (1, 7, 70))], name
    stored = LadderFormat.preset("signed12").stored_bits, LadderFormat.preset("signed8").stored_bits
    assert stored == (12, 8)


def test_moments_of_single_and_of_complex_weights_are_moments():
    model = nn.ParameterList([nn.Parameter(torch.randn(10, dtype=torch.complex64)), nn.Parameter(torch.tensor(1.0))])
    optimizer = Madam(model.parameters())
    for p in model:
        p.grad = torch.ones_like(p)
    optimizer.step()
    found = memory(model, optimizer)
    assert found.moments == 6 * 21  # four bytes and two for each number
    assert found.counters == 2 * (4 + 8 + 4)  # step, count and scale
