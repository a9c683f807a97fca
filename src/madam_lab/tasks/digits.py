"""Handwritten digits: 1,797 pictures of 8 x 8 pixels, small enough to ship with the package.

The pictures are those of `sklearn.datasets.load_digits`, the test part of *Optical Recognition of Handwritten Digits*
(E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998, doi 10.24432/C50P49, CC BY 4.0).
"""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from madam_lab.models.mlp import mlp
from madam_lab.tasks.task import Batch, Task, classification_sums, error_percent, generator

TEST_SIZE = 360


@dataclass(frozen=True)
class DigitsData:
    """Inputs of 64 pixels and labels 0 to 9, split once and for all by a fixed permutation."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def load(*, standardised: bool = True) -> DigitsData:
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
    return DigitsData(x[train], y[train], x[test], y[test])


class Digits(Task):
    """Ten classes, a perceptron with two hidden layers, test error in per cent."""

    name = "digits"
    metric = "test error %"

    def __init__(
        self, root: Path | None, device: torch.device, *, batch: int, seed: int, smoke: bool = False, width: int = 128
    ) -> None:
        data = load()
        keep = 4 * batch if smoke else len(data.train_x)
        self.device, self.seed, self.batch, self.width = device, seed, batch, width
        self.train = (data.train_x[:keep].to(device), data.train_y[:keep].to(device))
        self.test = (data.test_x.to(device), data.test_y.to(device))
        self.steps = -(-len(self.train[0]) // batch)

    def model(self) -> nn.Module:
        """A perceptron of 26,122 weights at the default width."""
        return mlp(64, self.width, 10)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Shuffled batches."""
        x, y = self.train
        order = torch.randperm(len(x), generator=generator(self.seed, number)).to(self.device)
        for rows in order.split(self.batch)[start:]:
            yield x[rows], y[rows]

    def loss(self, forward: Callable[[Tensor], Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross entropy."""
        x, y = batch
        logits = forward(x)
        loss = F.cross_entropy(logits, y)
        return loss, classification_sums(logits, y, loss)

    def batches(self, split: str) -> Iterator[Batch]:
        """All test pictures at once."""
        yield self.test

    def score(self, sums: Tensor) -> float:
        """Error in per cent."""
        return error_percent(sums)
