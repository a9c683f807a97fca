"""Train a perceptron on the digits, the way a user would: a plain loop around a plain optimiser."""

import torch
import torch.nn.functional as F

from madam_lab.models.mlp import mlp


def train(seed, data, make_optimiser, *, epochs, dtype=torch.float32, batch=64):
    """The test accuracy after so many epochs; ``make_optimiser`` gets the network and may convert it first."""
    torch.manual_seed(seed)
    net = mlp(64, 128, 10).to(dtype)
    optimiser = make_optimiser(net)
    generator = torch.Generator().manual_seed(seed)
    x = data.train_x.to(dtype)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(batch):
            optimiser.zero_grad()
            F.cross_entropy(net(x[rows]), data.train_y[rows]).backward()
            optimiser.step()
    with torch.no_grad():
        return (net(data.test_x.to(dtype)).argmax(1) == data.test_y).double().mean().item()
