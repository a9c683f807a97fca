"""The class-conditional GAN on CIFAR-10: two players in turn, and the FID of what the generator makes."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from madam_lab import fid, png
from madam_lab.data import DataError
from madam_lab.models.gan import Gan
from madam_lab.tasks.cifar import Cifar10
from madam_lab.tasks.task import Batch, Player, Task, generator

_CLASSES = 10
_SAMPLES = 10_000  # for a FID, and as many real pictures of either split
_AT_ONCE = 500
_REFRESHING = 16  # batches that batch norm's statistics are measured on before pictures are made
_ROWS = 6  # of the sheet, each of one noise for all classes
# What random numbers are for, beside the epochs' own.
_FOR_SAMPLES, _FOR_STATISTICS, _FOR_SHEET = -1, -2, -3


class ConditionalGan(Task):
    """Make pictures of a class. A step is one of the discriminator, then one of the generator, each with its own noise.

    The metric is the FID of 10,000 made pictures against the 10,000 test pictures, and against the first 10,000 of
    training. They are made with statistics of batch norm that belong to the weights at hand, measured over many
    batches, and not with the running ones, which lag behind weights that move.
    """

    name = "cgan"
    metric = "FID"
    evaluated = ("train", "test")
    evaluations = 6

    def __init__(
        self,
        root: Path | None,
        device: torch.device,
        *,
        batch: int,
        seed: int,
        smoke: bool = False,
        width: int = 64,
        statistics: Path | None = None,
    ) -> None:
        """``statistics``: where those of real pictures are kept; None: beside the data."""
        if root is None:
            raise DataError("no folder with data was given", "cifar10")
        cifar = Cifar10(root, device, batch=batch, seed=seed, smoke=smoke)
        self.splits = {"train": cifar.train, "test": cifar.test}
        self.device, self.batch, self.seed = device, batch, seed
        self.width, self.samples, self.refreshing = (4, 10, 1) if smoke else (width, _SAMPLES, _REFRESHING)
        self.steps = len(cifar.train[0]) // batch  # what is left over waits for another epoch's order
        self._network = fid.Inception(root, device, any_network=smoke)
        self._folder = statistics or root / "fid-statistics"
        self._real: dict[str, fid.Statistics] = {}

    def model(self) -> nn.Module:
        """Both players, channels_last."""
        net: nn.Module = Gan(_CLASSES, self.width)
        return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Shuffled whole batches: pictures and classes, then noise and classes for either player's turn."""
        images, labels = self.splits["train"]
        g = generator(self.seed, number)
        order = torch.randperm(len(images), generator=g)
        noise = torch.randn(self.steps, 2, self.batch, 80, generator=g)
        wanted = torch.randint(_CLASSES, (self.steps, 2, self.batch), generator=g)
        order, noise, wanted = (t.to(self.device) for t in (order, noise, wanted))
        for step in range(start, self.steps):
            rows = order[step * self.batch : (step + 1) * self.batch]
            turns = (t for turn in range(2) for t in (noise[step, turn], wanted[step, turn]))
            yield self.scaled(images[rows]), labels[rows], *turns

    def scaled(self, images: Tensor) -> Tensor:
        """Bytes, n x 32 x 32 x 3, to -1 .. 1, n x 3 x 32 x 32 in channels_last."""
        return (images / 127.5 - 1).permute(0, 3, 1, 2)

    def players(self, model: nn.Module) -> Sequence[Player]:
        """The discriminator, then the generator."""
        return (model.discriminator, self.loss), (model.generator, self.generator_loss)  # type: ignore[return-value]

    def loss(self, forward: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """The discriminator's: mean max(D(fake), -1) - mean min(D(real), 1). Both go through it as one batch."""
        real, classes, z, wanted = batch[:4]
        fake = forward.generator(z, wanted).detach()
        verdict = forward.discriminator(torch.cat([real, fake]), torch.cat([classes, wanted]))
        on_real, on_fake = verdict.chunk(2)
        loss = on_fake.clamp(min=-1).mean() - on_real.clamp(max=1).mean()
        return loss, _sums(loss, len(real), 0)

    def generator_loss(self, forward: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """The generator's: -mean D(fake)."""
        z, wanted = batch[4:]
        loss = -forward.discriminator(forward.generator(z, wanted), wanted).mean()
        return loss, _sums(loss, len(z), 1)

    def batches(self, split: str) -> Iterator[Batch]:
        """The real pictures of a split that the made ones are compared with."""
        images, labels = self.splits[split]
        for first in range(0, min(self.samples, len(images)), _AT_ONCE):
            rows = slice(first, min(first + _AT_ONCE, self.samples))
            yield images[rows], labels[rows]

    def score(self, sums: Tensor) -> float:
        """Losses of two players say nothing about pictures."""
        return math.nan

    @torch.no_grad()
    def scores(self, forward: Any, splits: Sequence[str]) -> dict[str, float]:
        """FIDs of the same pictures against each of these splits."""
        wanted = torch.arange(self.samples, device=self.device) % _CLASSES
        made = self.made(forward, self._noise(_FOR_SAMPLES, self.samples), wanted)
        if made is None:
            return dict.fromkeys(splits, math.inf)
        ours = fid.statistics(self._network(made))
        return {split: fid.distance(self._statistics_of(split), ours) for split in splits}

    def evaluate(self, forward: Any, split: str) -> float:
        """The FID against one split."""
        return self.scores(forward, (split,))[split]

    def _statistics_of(self, split: str) -> fid.Statistics:
        if split not in self._real:
            pictures = torch.cat([images for images, _ in self.batches(split)])
            self._real[split] = fid.cached_statistics(self._network, pictures, self._folder)
        return self._real[split]

    @torch.no_grad()
    def made(self, forward: Any, z: Tensor, wanted: Tensor) -> Tensor | None:
        """Pictures of these classes as bytes, n x 32 x 32 x 3; None if the generator makes no numbers any more."""
        self._refresh(forward)
        parts = [forward(a, b) for a, b in zip(z.split(_AT_ONCE), wanted.split(_AT_ONCE), strict=True)]
        pictures = torch.cat(parts).float().permute(0, 2, 3, 1)
        if not bool(pictures.isfinite().all()):
            return None
        return ((pictures + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)

    @torch.no_grad()
    def pictures(self, forward: Any) -> Tensor | None:
        """A sheet: a column a class, a row a noise."""
        z = self._noise(_FOR_SHEET, _ROWS).repeat_interleave(_CLASSES, 0)
        made = self.made(forward, z, torch.arange(_CLASSES, device=self.device).repeat(_ROWS))
        return None if made is None else png.sheet(made, _CLASSES)

    def _refresh(self, forward: Any) -> None:
        """Batch norm's statistics for the weights at hand."""
        norms = [m for m in forward.generator.modules() if isinstance(m, nn.BatchNorm2d)]
        held = [m.momentum for m in norms]
        for m in norms:
            m.reset_running_stats()
            m.momentum = None  # every batch counts alike
            m.train()
        z = self._noise(_FOR_STATISTICS, self.refreshing * self.batch)
        wanted = torch.arange(len(z), device=self.device) % _CLASSES
        for a, b in zip(z.split(self.batch), wanted.split(self.batch), strict=True):
            forward(a, b)
        for m, momentum in zip(norms, held, strict=True):
            m.momentum = momentum
            m.eval()

    def _noise(self, purpose: int, count: int) -> Tensor:
        return torch.randn(count, 80, generator=generator(self.seed, purpose)).to(self.device)


def _sums(loss: Tensor, count: int, player: int) -> Tensor:
    """The discriminator's loss, the generator's, and the number of pictures, which the discriminator counts."""
    total = loss.detach().float() * count
    none = torch.zeros_like(total)
    return torch.stack([none, total, none] if player else [total, none, none + count])
