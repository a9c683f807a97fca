"""Does deep relative trust hold? The breakdown of gradients, measured, beside the product that should exceed it."""

import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from madam_lab.models.mlp import deep_mlp
from madam_lab.models.resnet import ResNet18
from madam_lab.studies.study import Point, register
from madam_lab.tasks.digits import load
from torchmadam import theory

SIZES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
DEPTHS = (2, 3, 5, 10, 20, 30, 50)
DIRECTIONS = ("sign rule", "layer-wise", "random signs")


def breakdown(
    *, seed: int, network: str, depths: Sequence[int], width: int, examples: int, sizes: Sequence[float]
) -> list[Point]:
    """|g_k(W + dW) - g_k(W)| / |g_k(W)| of every layer k, at initial weights on digits, in float64.

    ``network`` is "tanh", "leaky_relu" or "resnet18", whose depth is its own. Steps move all layers by the same
    relative size: along the paper's sign rule, against the gradient layer by layer, and at random, w (1 +- size).
    """
    points: list[Point] = []
    for depth in depths:
        torch.manual_seed(seed)
        model = network_of(network, depth, width).double()
        x, y = digits_for(model, examples)

        def closure(model: nn.Module = model, x: Tensor = x, y: Tensor = y) -> Tensor:
            return F.cross_entropy(model(x), y)

        layers = {name: p for name, p in model.named_parameters() if p.dim() >= 2}
        gradients = dict(zip(layers, torch.autograd.grad(closure(), list(layers.values())), strict=True))
        for direction in DIRECTIONS:
            unit = {name: _unit(direction, p.detach(), gradients[name]) for name, p in layers.items()}
            for size in sizes:
                step = {name: size * u for name, u in unit.items()}
                found = theory.gradient_breakdown(model, closure, step, points=1)
                broken = [found[name] for name in layers]
                points.append(
                    {
                        "depth": len(layers),
                        "direction": direction,
                        "size": size,
                        "worst": max(broken),
                        "median": statistics.median(broken),
                        "trust": theory.deep_relative_trust(model, step),
                    }
                )
    return points


def network_of(kind: Any, depth: int, width: int) -> nn.Module:
    """A freshly initialised network; ResNet-18 has no gains in its norms, as under Madam in the paper."""
    return ResNet18(10, width, affine=False) if kind == "resnet18" else deep_mlp(depth, width, kind)


def digits_for(model: nn.Module, examples: int) -> tuple[Tensor, Tensor]:
    """The first digits of the training set, 64 numbers or, for a ResNet, 8 x 8 pixels in three equal channels."""
    data = load()
    x, y = data.train_x[:examples].double(), data.train_y[:examples]
    return (x.view(-1, 1, 8, 8).expand(-1, 3, 8, 8), y) if isinstance(model, ResNet18) else (x, y)


def _unit(direction: str, weight: Tensor, g: Tensor) -> Tensor:
    """A step as long as the weights."""
    if direction == "sign rule":
        return -weight.abs() * g.sign()
    if direction == "layer-wise":
        return -g * float(weight.norm() / g.norm())
    signs: Tensor = 2.0 * torch.randint(0, 2, weight.shape) - 1.0
    return weight * signs


for _kind in ("tanh", "leaky_relu"):
    register(
        f"breakdown_{_kind}",
        breakdown,
        {"network": _kind, "depths": DEPTHS, "width": 64, "examples": 512, "sizes": SIZES},
        {"depths": (2, 3), "width": 8, "examples": 20, "sizes": (1e-3, 0.1)},
    )
register(
    "breakdown_resnet18",
    breakdown,
    {"network": "resnet18", "depths": (18,), "width": 16, "examples": 256, "sizes": SIZES},
    {"width": 2, "examples": 8, "sizes": (1e-3, 0.1)},
)
