"""What ranks do in the tests of the lab's runs."""

import warnings
from dataclasses import replace

import numpy as np
import torch

from madam_lab import queue, recipes
from madam_lab.progress import Progress
from madam_lab.tasks import TASKS
from madam_lab.tasks.wikitext import read_words
from madam_lab.trainer import Limits, Run, Stopped
from tiny_data import lay_cifar, lay_wikitext

NAMES = ("digits_madam_12bit", "wikitext2_madam_12bit", "cifar10_sgd")


def lay_data(root):
    rng = np.random.default_rng(0)
    lay_cifar(root, rng)
    lay_wikitext(root, rng)


def chosen():
    digits, *others = (recipes.get(name) for name in NAMES)
    return [replace(digits, epochs=2, batch=255), *(replace(other.as_smoke(), epochs=2) for other in others)]


def take_tiny_data(root):
    TASKS["cifar10"].sizes = (45, 9)
    TASKS["wikitext2"].sizes = {name: len(words) for name, words in read_words(root)[0].items()}


class StopAfter(Limits):
    """Asks a run to stop after so many steps."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def reached(self):
        self.steps -= 1
        return self.steps < 0


def work(rank, data, folder, count):
    """So many recipes whole, then the first ones once more, stopped every few steps."""
    warnings.simplefilter("ignore")
    take_tiny_data(data)
    said = []
    outcome = queue.work(
        chosen()[:count], [0], data=data, results=folder / "whole", folder=folder / "runs", device=torch.device("cpu"),
        quiet=True, say=said.append,
    )  # fmt: skip
    assert len(outcome.done) == count
    assert len(said) == (count if rank == 0 else 0)
    for recipe in chosen()[: min(count, 2)]:
        stops = 0
        while True:
            run = Run(
                recipe, 0, data=data, folder=folder / "runs", results=folder / "parts", device=torch.device("cpu")
            )
            try:
                run.train(StopAfter(4) if rank == 0 else Limits(), Progress("", 1, quiet=True))
                break
            except Stopped:
                stops += 1
        assert stops >= 1
