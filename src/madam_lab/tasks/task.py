"""What a task is."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
# Who moves in a step, and the loss it minimises, a function of the whole model and a batch.
Player = tuple[nn.Module, Callable[[Any, Batch], tuple[Tensor, Tensor]]]


class Task(ABC):
    """Something to learn: data on a device, a model for it, a loss and a metric. No optimiser is named here.

    Counting is done in *sums*, a tensor of three numbers: the summed loss, the number of wrong answers, and the number
    of answers. They stay on the device until somebody asks.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    # Test with the weights of the best epoch on the validation set, instead of the last ones.
    selects_best: ClassVar[bool] = False
    # Splits to evaluate on; where "train" is not among them, the train metric is that of an epoch's own batches.
    evaluated: ClassVar[tuple[str, ...]] = ("test",)
    # About so many points on the test curve of a long run.
    evaluations: ClassVar[int] = 60

    # The dimension of a batch's tensors that counts examples: several processes share a batch along it.
    batch_dim: ClassVar[int] = 0
    # Save a run after every epoch, however long one takes, and not only every so many seconds.
    saves_epochs: ClassVar[bool] = False
    # Whether torch.compile takes the model. Where it does not, a GPU's steps are still captured.
    compiles: ClassVar[bool] = True
    # Whether batches, of training and of evaluation, are this rank's share already, so that no rank loads another's.
    takes_slices: ClassVar[bool] = False

    device: torch.device
    steps: int  # batches in an epoch
    # Set by whoever trains on several ranks, before the first batch; ``total`` adds up the sums of all of them.
    rank: int = 0
    ranks: int = 1
    total: Callable[[Tensor], Tensor] = staticmethod(lambda sums: sums)

    @abstractmethod
    def model(self) -> nn.Module:
        """A freshly initialised network, on the CPU, from PyTorch's generator."""

    @abstractmethod
    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from number ``start`` on; the same for the same seed and number, every time."""

    @abstractmethod
    def loss(self, forward: Callable[[Tensor], Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean loss of a batch, to differentiate, and its sums, detached."""

    def players(self, model: nn.Module) -> Sequence[Player]:
        """Who moves in a step, one after another, while the others stay as they are; mostly the model as a whole."""
        return ((model, self.loss),)

    @abstractmethod
    def batches(self, split: str) -> Iterator[Batch]:
        """What to evaluate on: "test", or "valid" where there is one."""

    @abstractmethod
    def score(self, sums: Tensor) -> float:
        """The metric, lower is better."""

    @torch.no_grad()
    def evaluate(self, forward: Callable[[Tensor], Tensor], split: str) -> float:
        """The metric on a split; the model must be in the mode the caller wants."""
        sums = torch.zeros(3, device=self.device)
        for batch in self.batches(split):
            sums += self.loss(forward, batch)[1]
        return self.score(self.total(sums.cpu()))

    def scores(self, forward: Any, splits: Sequence[str]) -> dict[str, float]:
        """The metric on several splits."""
        return {split: self.evaluate(forward, split) for split in splits}

    def fingerprint(self) -> str | None:
        """Which data this is, where a name does not say it; a run goes on with the same, and its record has it."""
        return None

    def notes(self) -> dict[str, float]:
        """What else to write down about the epoch that is over: counts of what was wrong with its data, say."""
        return {}

    def pictures(self, forward: Any) -> Tensor | None:
        """A picture of what was learned, height x width x 3 bytes, to keep with the record; mostly there is none."""
        return None


def error_percent(sums: Tensor) -> float:
    """Wrong answers per hundred."""
    wrong, count = float(sums[1]), float(sums[2])
    return 100 * wrong / max(count, 1)


def perplexity(sums: Tensor) -> float:
    """The exponential of the mean loss; infinite where that overflows."""
    total, count = float(sums[0]), float(sums[2])
    mean = total / max(count, 1)
    return math.exp(mean) if mean < 700 else math.inf


def classification_sums(logits: Tensor, targets: Tensor, mean_loss: Tensor) -> Tensor:
    """The sums of one batch of classified pictures."""
    wrong = (logits.detach().argmax(1) != targets).sum()
    return torch.stack(
        [mean_loss.detach().float() * len(targets), wrong.float(), torch.full_like(mean_loss, len(targets)).float()]
    )


def generator(*key: int) -> torch.Generator:
    """A CPU generator for this seed, epoch and purpose, so that the random numbers are the same on every device."""
    seed = 0
    for part in key:
        seed = (seed * 1_000_003 + part + 1) % 2**62
    return torch.Generator().manual_seed(seed)
