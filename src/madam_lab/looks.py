"""What a run looks at beside its loss: where its codes are, what a step does to its layers, what bytes it holds."""

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from madam_lab.stepping import Stepper
from madam_lab.tasks.task import Batch
from torchmadam import LadderTensor
from torchmadam.theory import TrustMonitor

_HISTOGRAM_BINS = 64


def step_looked_at(stepper: Stepper, batch: Batch) -> dict[str, dict[str, float]]:
    """Make the step that would have been made anyway, and say what it did to each layer, and to its codes if any."""
    with TrustMonitor(stepper.optimiser, every=1) as monitor:
        stepper.step(batch, monitor)
    (seen,) = monitor.observations
    named = {name: asdict(layer) for name, layer in seen.layers.items()}
    return {name: {k: v for k, v in entries.items() if v is not None} for name, entries in named.items()}


@torch.no_grad()
def codes_of(model: nn.Module) -> dict[str, Any] | None:
    """Where the codes of all coded weights are on the ladder, and how many sit at its ends."""
    coded = [p for p in model.parameters() if isinstance(p, LadderTensor) and float(p.limit) > 0]
    if not coded:
        return None
    ladder = coded[0].coding.format
    counts = torch.zeros(_HISTOGRAM_BINS, dtype=torch.int64)
    upper = lower = total = 0
    for p in coded:
        codes = p.codes()
        k = codes if ladder.is_signed else ladder.split(codes)[0]
        counts += torch.bincount(
            (k.flatten().long() * _HISTOGRAM_BINS) // ladder.levels, minlength=_HISTOGRAM_BINS
        ).cpu()
        upper += int(ladder.at_upper_end(codes).sum())
        lower += int(ladder.at_lower_end(codes).sum())
        total += codes.numel()
    share = [round(c / total, 6) for c in counts.tolist()]
    return {"histogram": share, "upper": upper / total, "lower": lower / total}


def held_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters as they are held: planes and limits of coded ones, elements of the others."""
    return sum(
        sum(t.numel() for t in p.planes) + p.limit.element_size()
        if isinstance(p, LadderTensor)
        else p.numel() * p.element_size()
        for p in model.parameters()
    )


def state_bytes(optimiser: torch.optim.Optimizer) -> int:
    """Bytes of an optimiser's state tensors."""
    tensors = [t for state in optimiser.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)
