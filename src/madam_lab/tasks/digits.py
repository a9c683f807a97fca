"""Handwritten digits: 1,797 pictures of 8 x 8 pixels, small enough to ship with the package.

The pictures are those of `sklearn.datasets.load_digits`, the test part of *Optical Recognition of Handwritten Digits*
(E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998, doi 10.24432/C50P49, CC BY 4.0).
"""

import io
from dataclasses import dataclass
from importlib.resources import files

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TEST_SIZE = 360


@dataclass(frozen=True)
class Digits:
    """Inputs of 64 pixels and labels 0 to 9, split once and for all by a fixed permutation."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def load(*, standardised: bool = True) -> Digits:
    """The digits, each pixel with mean 0 and variance 1 over the training set; or raw, from 0 to 1."""
    import numpy as np

    packed = files("madam_lab").joinpath("tasks/digits.npz").read_bytes()
    with np.load(io.BytesIO(packed), allow_pickle=False) as archive:
        x = torch.from_numpy(archive["images"]).flatten(1).float() / 16
        y = torch.from_numpy(archive["labels"]).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_SIZE], order[TEST_SIZE:]
    if standardised:
        std, mean = torch.std_mean(x[train], dim=0)
        x = (x - mean) / std.where(std > 0, torch.ones(()))  # some pixels of the border are never inked
    return Digits(x[train], y[train], x[test], y[test])


def model(width: int = 128) -> nn.Sequential:
    """A perceptron with two hidden layers, initialised as PyTorch does."""
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )  # fmt: skip


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer, data: Digits, *, epochs: int, seed: int, batch: int = 64
) -> None:
    """Plain epochs over shuffled batches, shuffled alike for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(len(data.train_x), generator=generator).split(batch):
            optimizer.zero_grad()
            F.cross_entropy(net(data.train_x[rows]), data.train_y[rows]).backward()
            optimizer.step()


@torch.no_grad()
def test_error(net: nn.Module, data: Digits) -> float:
    """Share of the test pictures that are classified wrongly."""
    return float((net(data.test_x).argmax(1) != data.test_y).double().mean())


test_error.__test__ = False  # type: ignore[attr-defined]  # not a test, whatever pytest thinks of the name
