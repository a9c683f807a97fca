"""Others of which it is said that they need no tuning, as they come, where our default is measured.

Prodigy finds its rate while it trains, and is to have a schedule; schedule-free optimisers are to have none.
"""

from dataclasses import replace
from functools import partial

from madam_lab.recipes import small
from madam_lab.recipes.crossing import BASES
from madam_lab.recipes.recipe import Recipe, register

# Rate and schedule, as their authors' packages have them.
AS_THEY_COME = {
    "prodigy": (1.0, "cosine"),
    "schedule_free_adamw": (0.0025, "constant"),
    "schedule_free_radam": (0.0025, "constant"),
}


def untuned(base: Recipe, optimiser: str) -> Recipe:
    """One of them, with the gains of norms, as the baselines have them."""
    lr, schedule = AS_THEY_COME[optimiser]
    if schedule == "constant":
        return replace(base, optimiser=optimiser, arguments={}, model={}, lr=None, schedule=((0, lr),))
    return replace(base, optimiser=optimiser, arguments={}, model={}, lr=lr, schedule=schedule)


for _kind in AS_THEY_COME:
    for _task in small.BUDGETS:
        register(f"{_task}_{_kind}", partial(untuned, small.small(_task, "madam", 0.01, {}), _kind))
    for _task, _base in BASES.items():
        # What schedule-free optimisers are evaluated with are weights that batch norm has no statistics of.
        if _kind == "prodigy" or not _task.startswith("cifar"):
            register(f"{_task}_{_kind}", partial(untuned, _base, _kind))
