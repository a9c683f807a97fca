"""Lengths and angles of layers from sums over their tensors, and how far a rule reaches from each weight."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchmadam import groups, held
from torchmadam.doubles import doubled
from torchmadam.ladder.tensor import LadderTensor
from torchmadam.madam import Madam
from torchmadam.start import starts

# Which layer a parameter belongs to, by its name and itself; None: to none.
Layers = Callable[[str, Tensor], str | None]


def matrices(name: str, parameter: Tensor) -> str | None:
    """Every tensor of two or more dimensions is a layer: what is taken for one unless you say otherwise."""
    return name if parameter.dim() >= 2 else None


def as_float(p: Tensor) -> Tensor:
    """The weights of a parameter, codes decoded."""
    return p.decode() if isinstance(p, LadderTensor) else p.detach()


def squared_length(a: Tensor) -> float:
    """The square of a tensor's length."""
    return float(doubled(a).square().sum())


def dot(a: Tensor, b: Tensor) -> float:
    """The product of two tensors."""
    return float((doubled(a) * doubled(b)).sum())


def width_of(p: Tensor, optimizer: Optimizer | None, group: dict[str, Any] | None, name: str | None) -> float | Tensor:
    """beta_w of a parameter, crossing times the clamp; 0 where the rule has no crossing. As float64."""
    if isinstance(p, LadderTensor):
        crossing = p.coding.format.crossing
        return doubled(p.limit) * crossing if crossing else 0.0
    if not isinstance(optimizer, Madam) or group is None or not p.requires_grad:
        return 0.0
    bound = 1.0 if group["bound"] is None else group["bound"]
    state = optimizer.state.get(p)
    if not state or "scale" not in state:  # of codes that are floats now, perhaps
        (start,) = starts(group, [name], [p])
        return start.scale * start.share(groups.crossing_of(group)) * bound
    crossing = held.crossing_of(group, state)
    return doubled(state["scale"]) * (crossing * bound) if crossing else 0.0


def reach(weight: Tensor, width: float | Tensor) -> Tensor:
    """How far a step of lr = 1 would move each weight: |w|, or sqrt(w^2 + beta_w^2) with ``crossing``; in float64."""
    weight = doubled(weight)
    return weight.abs() if isinstance(width, float) and width == 0 else torch.sqrt(weight**2 + width**2)


def gamma_sums(weight: Tensor, g: Tensor, width: float | Tensor) -> tuple[float, float, float]:
    """What :func:`angle` makes gamma of: the product of |W| (or its reach) and |g|, and their squares."""
    size = reach(weight, width)
    return dot(size, g.abs()), squared_length(size), squared_length(g)


def add(sums: list[float], *parts: float) -> None:
    """Add to sums, place by place."""
    for i, part in enumerate(parts):
        sums[i] += part


def ratio(square: float, other: float) -> float:
    """The ratio of two lengths, from their squares."""
    if other == 0:
        return 0.0 if square == 0 else math.inf
    return math.sqrt(square / other)


def trust_product(sizes: Iterable[float]) -> float:
    """prod_l (1 + |dW_l| / |W_l|) - 1, from the relative sizes; infinite where that overflows."""
    total = math.fsum(math.log1p(size) for size in sizes)
    return math.inf if total > 709 else math.expm1(total)


def cosine(product: float, square: float, other: float) -> float:
    """The cosine of two vectors' angle, from their product and squares; 0 where one of them is zero."""
    if square == 0 or other == 0:
        return 0.0
    found = product / (math.sqrt(square) * math.sqrt(other))
    return found if math.isnan(found) else max(-1.0, min(1.0, found))


def angle(product: float, square: float, other: float) -> float:
    """The angle of two vectors, from their product and their squares; a right one where one of them is zero."""
    return math.acos(cosine(product, square, other))
