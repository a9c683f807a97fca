"""Small tasks of many kinds, a few seconds to half a minute each on one core of a CPU, as codes up to a minute.

Real data, and networks that the large tasks do not have: what does the default do for those it was not chosen on?
"""

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from madam_lab.data import DataError
from madam_lab.models import small
from madam_lab.models.mlp import mlp
from madam_lab.tasks import digits
from madam_lab.tasks.cifar import read_batch
from madam_lab.tasks.task import Batch, Task, classification_sums, error_percent, generator

_FOR_TEST = -1  # what random numbers are for, beside the epochs' own
_AT_ONCE = 512  # in evaluation
_LENGTH = 64  # of a piece of text, in letters
_LETTERS = 96  # the most frequent ones; all others are one


class Small(Task):
    """Examples that fit in memory, in batches, with what is random about them drawn anew in every epoch."""

    evaluations = 10
    dataset: ClassVar[str]  # `madam data` knows it by this name
    again: ClassVar[int] = 1  # how often the test examples are drawn

    def __init__(self, root: Path | None, device: torch.device, *, batch: int, seed: int, smoke: bool = False) -> None:
        if root is None and self.dataset != "digits":
            raise DataError("no folder with data was given", self.dataset)
        self.device, self.seed, self.batch = device, seed, batch
        self.splits: dict[str, Batch] = {}
        for split, examples in self.load(root or Path()).items():
            keep = 3 * batch - 2 if smoke else len(examples[0])
            self.splits[split] = tuple(t[:keep].to(device) for t in examples)
        self.steps = -(-len(self.splits["train"][0]) // batch)

    @abstractmethod
    def load(self, root: Path) -> dict[str, Batch]:
        """Examples for "train" and "test", each a tuple of tensors with a row an example."""

    def drawn(self, count: int, g: torch.Generator) -> Batch:
        """What is random about so many examples, beside their order."""
        return ()

    @abstractmethod
    def losses(self, forward: Any, batch: Batch) -> Tensor:
        """The loss of each example."""

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Shuffled batches."""
        g = generator(self.seed, number)
        count = len(self.splits["train"][0])
        order = torch.randperm(count, generator=g).to(self.device)
        noise = tuple(t.to(self.device) for t in self.drawn(count, g))
        for rows in order.split(self.batch)[start:]:
            yield tuple(t[rows] for t in (*self.splits["train"], *noise))

    def batches(self, split: str) -> Iterator[Batch]:
        """The test examples, always with the same random numbers."""
        examples = self.splits[split]
        g = generator(0, _FOR_TEST)
        for _ in range(self.again):
            every = (*examples, *(t.to(self.device) for t in self.drawn(len(examples[0]), g)))
            yield from zip(*(t.split(_AT_ONCE) for t in every), strict=True)

    def loss(self, forward: Callable[[Tensor], Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean over the batch."""
        each = self.losses(forward, batch).float()
        none = torch.zeros((), device=each.device)
        return each.mean(), torch.stack([each.detach().sum(), none, none + len(each)])

    def score(self, sums: Tensor) -> float:
        """The mean loss."""
        return float(sums[0] / sums[2])


# ---- text


class _Letters(Small):
    """The next letter of WikiText-2's first million, in pieces of 64."""

    metric = "test bits a letter"
    dataset = "wikitext2"

    def load(self, root: Path) -> dict[str, Batch]:
        """Pieces of 65 letters, the last of which is the first of the next piece."""
        texts = {}
        for name, split, most in (("train", "train", 1_000_000), ("test", "valid", 60_000)):
            path = root / "wikitext-2" / f"{split}.txt"
            try:
                texts[name] = path.read_text(encoding="utf-8")[:most]
            except FileNotFoundError:
                raise DataError(f"{path} is missing", self.dataset) from None
        numbers = {letter: i for i, (letter, _) in enumerate(Counter(texts["train"]).most_common(_LETTERS - 1))}
        splits: dict[str, Batch] = {}
        for name, text in texts.items():
            letters = torch.tensor([numbers.get(letter, _LETTERS - 1) for letter in text])
            splits[name] = (letters.unfold(0, _LENGTH + 1, _LENGTH),)
        return splits

    def losses(self, forward: Any, batch: Batch) -> Tensor:
        """Cross entropy a letter."""
        (letters,) = batch
        logits = forward(letters[:, :-1]).float()
        return (
            F.cross_entropy(logits.flatten(0, 1), letters[:, 1:].flatten(), reduction="none").view(-1, _LENGTH).mean(1)
        )

    def score(self, sums: Tensor) -> float:
        """In bits."""
        return float(sums[0] / sums[2]) / math.log(2)


class Lstm(_Letters):
    """An LSTM of 118,000 weights."""

    name = "small_lstm"
    compiles = False  # PyTorch's own layer, of which Dynamo makes no graph

    def model(self) -> nn.Module:
        """As PyTorch initialises it."""
        return small.Letters(_LETTERS)


class Gpt(_Letters):
    """A transformer of two layers, 116,000 weights."""

    name = "small_gpt"

    def model(self) -> nn.Module:
        """Pre-norm."""
        return small.Gpt(_LETTERS, _LENGTH)


# ---- pictures


class Cnn(Small):
    """Ten thousand pictures of CIFAR-10, a network without norms."""

    name = "small_cnn"
    metric = "test error %"
    dataset = "cifar10"

    def load(self, root: Path) -> dict[str, Batch]:
        """The first fifth of the training pictures, and all test pictures, from -2 to 2."""
        splits: dict[str, Batch] = {}
        for split, file in (("train", "data_batch_1"), ("test", "test_batch")):
            images, labels = read_batch(root / "cifar-10-batches-py" / file, b"labels", self.dataset, 10)
            splits[split] = ((images.permute(0, 3, 1, 2) / 255 - 0.5) * 4, labels)
        return splits

    def model(self) -> nn.Module:
        """357,000 weights."""
        return small.plain_cnn()

    def losses(self, forward: Any, batch: Batch) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(forward(batch[0]).float(), batch[1], reduction="none")

    def loss(self, forward: Callable[[Tensor], Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean over the batch, and how many answers were wrong."""
        logits = forward(batch[0]).float()
        loss = F.cross_entropy(logits, batch[1])
        return loss, classification_sums(logits, batch[1], loss)

    def score(self, sums: Tensor) -> float:
        """Error in per cent."""
        return error_percent(sums)


class _Regression(Small):
    """Numbers from numbers: the squared error, of the variance of what was to be said."""

    metric = "test unexplained %"
    dataset = "digits"

    def target(self, batch: Batch) -> Tensor:
        """What is to be said."""
        return batch[-1]

    def said(self, forward: Any, batch: Batch) -> Tensor:
        """What the network says."""
        answer: Tensor = forward(batch[0])
        return answer

    def losses(self, forward: Any, batch: Batch) -> Tensor:
        """Squared errors."""
        return (self.said(forward, batch).float() - self.target(batch)).square().mean(1)

    def score(self, sums: Tensor) -> float:
        """In per cent."""
        return 100 * float(sums[0] / sums[2]) / self.variance()

    def variance(self) -> float:
        """Of the test examples' targets, each number about its own mean."""
        return float(self.target(self.splits["test"]).var(0, correction=0).mean())


class Picture(_Regression):
    """A mosaic of sixteen test pictures of CIFAR-10, as a function of the place; the test is the whole of it."""

    name = "small_siren"
    dataset = "cifar10"

    def load(self, root: Path) -> dict[str, Batch]:
        """Places and colours from -1 to 1."""
        images, _ = read_batch(root / "cifar-10-batches-py" / "test_batch", b"labels", self.dataset, 10)
        across = min(4, math.isqrt(len(images)))
        tiles = images[: across**2].unflatten(0, (across, across)).transpose(1, 2).reshape(32 * across, 32 * across, 3)
        side = torch.linspace(-1, 1, len(tiles))
        places = torch.stack(torch.meshgrid(side, side, indexing="ij"), dim=-1).view(-1, 2)
        pixels: Batch = (places, tiles.reshape(-1, 3) / 127.5 - 1)
        return {"train": pixels, "test": pixels}

    def model(self) -> nn.Module:
        """33,800 weights."""
        return small.Siren()


# ---- handwritten digits


def _digits(of: Callable[[Tensor], Batch]) -> dict[str, Batch]:
    held = digits.load(standardised=False)
    return {"train": of(held.train_x), "test": of(held.test_x)}


class Halves(_Regression):
    """The lower half of a digit from the upper one, in raw levels from 0 to 16: nothing is standardised."""

    name = "small_halves"

    def load(self, root: Path) -> dict[str, Batch]:
        """Upper and lower halves."""
        return _digits(lambda x: (16 * x[:, :32], 16 * x[:, 32:]))

    def model(self) -> nn.Module:
        """A perceptron."""
        return mlp(32, 128, 32)


class Autoencoder(_Regression):
    """Digits through eight numbers and back, by a network of eight layers."""

    name = "small_autoencoder"

    def load(self, root: Path) -> dict[str, Batch]:
        """Digits from 0 to 1."""
        return _digits(lambda x: (x,))

    def model(self) -> nn.Module:
        """With tanh."""
        return small.autoencoder()


class Diffusion(_Regression):
    """The noise in a noisy digit, for all amounts of it."""

    name = "small_diffusion"
    again = 10

    def load(self, root: Path) -> dict[str, Batch]:
        """Digits from -1 to 1."""
        return _digits(lambda x: (2 * x - 1,))

    def model(self) -> nn.Module:
        """A residual perceptron that knows the time."""
        return small.Denoiser()

    def drawn(self, count: int, g: torch.Generator) -> Batch:
        """Times from 0 to 1, and noise."""
        return torch.rand(count, generator=g), torch.randn(count, 64, generator=g)

    def said(self, forward: Any, batch: Batch) -> Tensor:
        """Of cos(t) picture + sin(t) noise, t a quarter turn."""
        x, time, noise = batch
        turn = (time * (math.pi / 2)).unsqueeze(1)
        answer: Tensor = forward(turn.cos() * x + turn.sin() * noise, time)
        return answer

    def variance(self) -> float:
        """Of the noise."""
        return 1.0


class Autoencoding(Small):
    """A variational autoencoder of digits: what it takes to say one, in nats."""

    name = "small_vae"
    metric = "test nats"
    dataset = "digits"
    again = 10

    def load(self, root: Path) -> dict[str, Batch]:
        """Digits from 0 to 1, which count as probabilities."""
        return _digits(lambda x: (x,))

    def model(self) -> nn.Module:
        """Eight codes."""
        return small.Vae()

    def drawn(self, count: int, g: torch.Generator) -> Batch:
        """Of the codes."""
        return (torch.randn(count, 8, generator=g),)

    def losses(self, forward: Any, batch: Batch) -> Tensor:
        """Cross entropy of the pixels, and the divergence of the codes from a normal distribution."""
        x, noise = batch
        logits, mean, spread = (t.float() for t in forward(x, noise))
        pixels = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)
        codes: Tensor = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(1)
        return pixels + codes


SMALL = (Lstm, Gpt, Cnn, Picture, Autoencoding, Diffusion, Halves, Autoencoder)
