"""WikiText-2: a small language model of words, as in PyTorch's word-language-model example."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from madam_lab.data import DataError
from madam_lab.models.transformer import WordTransformer
from madam_lab.tasks.task import Batch, Task, perplexity

_FOLDER = "wikitext-2"
_SPLITS = ("train", "valid", "test")
_EVALUATION_BATCH = 10
# In evaluation: pieces do not depend on each other, and a GPU would rather wait for memory than for launches.
_PIECES_AT_ONCE, _PIECES_AT_ONCE_ON_A_GPU = 8, 32


def read_words(root: Path) -> tuple[dict[str, Tensor], int]:
    """The three splits as word numbers, with <eos> at the end of every line, and the number of different words."""
    numbers: dict[str, int] = {}
    splits = {}
    for split in _SPLITS:
        path = root / _FOLDER / f"{split}.txt"
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except FileNotFoundError:
            raise DataError(f"{path} is missing", "wikitext2") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is damaged ({error})", "wikitext2") from error
        if lines[-1] == "":
            lines.pop()  # after the last line break there is no further line
        words = [word for line in lines for word in (*line.split(), "<eos>")]
        splits[split] = torch.tensor([numbers.setdefault(word, len(numbers)) for word in words])
    return splits, len(numbers)


class WikiText2(Task):
    """Predict the next word; perplexity on the test set with the weights that were best on the validation set."""

    name = "wikitext2"
    metric = "test perplexity"
    selects_best = True
    batch_dim = 1  # columns of text
    sizes: ClassVar[dict[str, int]] = {"train": 2_088_628, "valid": 217_646, "test": 245_569}

    def __init__(
        self, root: Path | None, device: torch.device, *, batch: int, seed: int, smoke: bool = False, length: int = 35
    ) -> None:
        if root is None:
            raise DataError("no folder with data was given", self.name)
        splits, self.words = read_words(root)
        for name, expected in self.sizes.items() if not smoke else ():
            if len(splits[name]) != expected:
                raise DataError(f"{name}.txt has {len(splits[name])} words instead of {expected}", self.name)
        self.device, self.smoke = device, smoke
        self.length = 5 if smoke else length
        self.columns = {"train": batch, "valid": _EVALUATION_BATCH, "test": _EVALUATION_BATCH}
        if smoke:
            splits = {name: words[: 17 * self.columns[name]] for name, words in splits.items()}
        self.splits = {name: _in_columns(words, self.columns[name]).to(device) for name, words in splits.items()}
        for name, words in self.splits.items():
            if len(words) < 2:
                raise DataError(f"the {name} split is too short for {self.columns[name]} columns", self.name)
        self.steps = -(-(len(self.splits["train"]) - 1) // self.length)

    def model(self) -> nn.Module:
        """The paper's transformer of 13,828,478 weights."""
        if self.smoke:
            return WordTransformer(self.words, width=8, hidden=8)
        return WordTransformer(self.words)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The text in its own order, in pieces; the last one may be shorter."""
        return self._pieces("train", start)

    def _pieces(self, split: str, start: int = 0) -> Iterator[Batch]:
        words = self.splits[split]
        for first in range(start * self.length, len(words) - 1, self.length):
            last = min(first + self.length, len(words) - 1)
            yield words[first:last], words[first + 1 : last + 1]

    def loss(self, forward: Callable[[Tensor], Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross entropy a word, in float32."""
        x, y = batch
        logits = forward(x)
        loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        count = torch.full_like(loss, y.numel())
        return loss, torch.stack([loss.detach() * y.numel(), torch.zeros_like(count), count]).detach()

    def batches(self, split: str) -> Iterator[Batch]:
        """A split in ten columns, several pieces side by side; what is left at the end may be shorter pieces."""
        waiting: list[Batch] = []
        most = _PIECES_AT_ONCE_ON_A_GPU if self.device.type == "cuda" else _PIECES_AT_ONCE
        for piece in self._pieces(split):
            if waiting and (len(waiting) == most or len(piece[0]) != len(waiting[0][0])):
                yield _side_by_side(waiting)
                waiting = []
            waiting.append(piece)
        yield _side_by_side(waiting)

    def score(self, sums: Tensor) -> float:
        """Perplexity."""
        return perplexity(sums)


def _side_by_side(pieces: list[Batch]) -> Batch:
    return tuple(torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True))


def _in_columns(words: Tensor, columns: int) -> Tensor:
    rows = len(words) // columns
    return words[: rows * columns].view(columns, rows).t().contiguous()
