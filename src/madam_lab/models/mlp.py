"""A perceptron."""

from torch import nn


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Two hidden layers with ReLU, initialised as PyTorch does."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )  # fmt: skip
