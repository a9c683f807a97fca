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
from stopping import StopAfter
from tiny_data import lay_cifar, lay_inception, lay_photographs, lay_wikitext

NAMES = ("digits_madam_12bit", "wikitext2_madam_12bit", "cifar10_sgd", "imagenette_madam_8bit", "cgan_madam_12bit")


def lay_data(root):
    rng = np.random.default_rng(0)
    lay_cifar(root, rng)
    lay_wikitext(root, rng)
    lay_inception(root)
    lay_photographs(root, rng)


def chosen():
    digits, *others = (recipes.get(name) for name in NAMES)
    return [replace(digits, epochs=2, batch=255), *(replace(other.as_smoke(), epochs=2) for other in others)]


def take_tiny_data(root):
    TASKS["cifar10"].sizes = (45, 9)
    TASKS["wikitext2"].sizes = {name: len(words) for name, words in read_words(root)[0].items()}


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


def step_and_evaluate(rank, name, data, folder):
    """Three steps; then ranks compare their weights, and a score over slices with one over everything."""
    warnings.simplefilter("ignore")
    take_tiny_data(data)
    run = Run(recipes.get(name).as_smoke(), 0, data=data, folder=folder, results=folder, device=torch.device("cpu"))
    for number in range(2):
        for batch in run.task.epoch(number):
            run.stepper.set_lr(0.01)
            run.stepper.step(batch)
    one, other = run.ranks.gathered([p.detach() * 1.0 for p in run.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    if run.task.takes_slices:
        assert len(next(iter(run.task.epoch(0)))[0]) == 3
        together = run.stepper.evaluate("test")
        run.task.rank, run.task.ranks, run.task.total = 0, 1, lambda sums: sums
        assert together == run.stepper.evaluate("test")
