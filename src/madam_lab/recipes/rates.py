"""The learning-rate figure beyond the paper's: our setting; and every optimiser with a rate that falls, or an average.

The paper's figure keeps rates constant. Who trains lets them fall, or averages weights: then a large one costs less.
"""

from dataclasses import replace
from functools import partial

from madam_lab.recipes import cifar, digits, wikitext  # noqa: F401 - they register what these are made of
from madam_lab.recipes.crossing import OURS, RECENT
from madam_lab.recipes.paper import LEARNING_RATES
from madam_lab.recipes.recipe import Recipe, get, register


def with_ours(of_paper: str) -> Recipe:
    """A point of the learning-rate figure, with our arguments instead of the paper's."""
    return replace(get(of_paper), arguments=OURS)


def falling(constant: str, lr: float) -> Recipe:
    """The same point with a rate that falls from there to zero, by a cosine."""
    return replace(get(constant), schedule="cosine", lr=lr)


def averaged(constant: str) -> Recipe:
    """The same point, evaluated with an average of the weights whose memory grows with training."""
    return replace(get(constant), recent=RECENT)


for _task in ("cifar10", "cifar100", "wikitext2", "digits"):
    for _lr in LEARNING_RATES:
        register(f"{_task}_lr_ours_{_lr:g}", partial(with_ours, f"{_task}_lr_madam_{_lr:g}"))
        for _kind in ("sgd", "adam", "madam", "ours"):
            _name = f"{_task}_lr_{_kind}"
            register(f"{_name}_cosine_{_lr:g}", partial(falling, f"{_name}_{_lr:g}", _lr))
            register(f"{_name}_recent_{_lr:g}", partial(averaged, f"{_name}_{_lr:g}"))
