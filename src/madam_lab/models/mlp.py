"""Perceptrons."""

from itertools import pairwise
from typing import Literal

from torch import nn


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Two hidden layers with ReLU, initialised as PyTorch does."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )  # fmt: skip


def deep_mlp(
    depth: int, width: int, activation: Literal["tanh", "leaky_relu"], *, inputs: int = 64, outputs: int = 10
) -> nn.Sequential:
    """So many layers without biases; Gaussian weights of a size at which signals neither grow nor fade."""
    act = {"tanh": nn.Tanh, "leaky_relu": nn.LeakyReLU}[activation]
    sizes = [inputs, *[width] * (depth - 1), outputs]
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(pairwise(sizes)):
        linear = nn.Linear(before, after, bias=False)
        last = i == depth - 1
        gain = 1.0 if last else nn.init.calculate_gain(activation)
        nn.init.normal_(linear.weight, std=gain / before**0.5)
        layers += [linear] if last else [linear, act()]
    return nn.Sequential(*layers)
