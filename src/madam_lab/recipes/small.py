"""The default on tasks that it was not chosen on: eight small ones, beside baselines that are tuned on each of them.

In float32, with a cosine schedule. Names say what is trained and how: ``small_vae_ours`` is the default,
``small_vae_adamw_0.003_0.01`` a point of a baseline's grid. Without a schedule, at a constant rate: ``*_constant``; and
``*_recent``, whose weights are averaged for evaluation.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from madam_lab.recipes.crossing import OURS, RECENT
from madam_lab.recipes.recipe import Recipe, get, register
from torchmadam import LadderFormat

# Task, epochs and batch: some 1,000 to 3,000 steps.
BUDGETS = {
    "small_lstm": (2, 32),
    "small_gpt": (2, 32),
    "small_cnn": (6, 64),
    "small_siren": (190, 2048),
    "small_vae": (130, 64),
    "small_diffusion": (130, 64),
    "small_halves": (90, 64),
    "small_autoencoder": (130, 64),
}
# How Madam is used, its learning rate apart: the default and that without its decay, each in floats and as codes.
_FLOATS = {"ours": OURS, "ours_no_decay": {**OURS, "weight_decay": 0.0}}
KINDS: dict[str, Mapping[str, Any]] = {
    "paper": {"arguments": {}},
    **{kind: {"arguments": arguments} for kind, arguments in _FLOATS.items()},
    **{
        f"{kind}_{bits}bit": {
            "arguments": {name: value for name, value in arguments.items() if name not in ("crossing", "bound")},
            "ladder": LadderFormat.preset(f"signed{bits}"),
            "conversion": {"bound": arguments["bound"]},
        }
        for kind, arguments in _FLOATS.items()
        for bits in (12, 8)
    },
}
# The same zone around zero, and nothing to be clamped at: weights that have to grow can.
UNBOUNDED = {
    f"{kind}_no_bound": {"arguments": {**arguments, "crossing": OURS["crossing"] * OURS["bound"], "bound": None}}
    for kind, arguments in _FLOATS.items()
}
# Of both; 0.01 is `ours` and `ours_no_decay` themselves. Grids of rates reach to where the best of a task is inside,
# but for SGD on the autoencoder; of AdamW's decays the lower one, PyTorch's, is always the better.
RATES = (0.001, 0.003, 0.03, 0.1, 0.3)
ADAMW_RATES, ADAMW_DECAYS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1), (0.01, 1.0)
SGD_RATES = (1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, 3.0)
# What there is without a schedule. Averages are tried at every rate that schedules are.
USUAL = "adamw_0.001_0.01"  # PyTorch's default
_AVERAGED = [
    *KINDS,
    *(f"{kind}_lr_{lr:g}" for kind in _FLOATS for lr in RATES),
    *(f"adamw_{lr:g}_{ADAMW_DECAYS[0]:g}" for lr in ADAMW_RATES),
]
_CONSTANT = ["paper", *_FLOATS, USUAL]


def small(task: str, optimiser: str, lr: float, changes: Mapping[str, Any]) -> Recipe:
    """One of the tasks with an optimiser."""
    epochs, batch = BUDGETS[task]
    return Recipe(
        task=task, epochs=epochs, batch=batch, optimiser=optimiser, schedule="cosine", lr=lr, precision="float32",
        **changes,
    )  # fmt: skip


def constant(name: str, recent: float | None = None) -> Recipe:
    """The same at the rate it begins with, to the end; and, perhaps, with an average to evaluate."""
    falling = get(name)
    assert falling.lr is not None
    return replace(falling, schedule=((0, falling.lr),), lr=None, recent=recent)


for _task in BUDGETS:
    for _kind, _changes in {**KINDS, **UNBOUNDED}.items():
        register(f"{_task}_{_kind}", partial(small, _task, "madam", 0.01, _changes))
    for _kind in _FLOATS:
        for _lr in RATES:
            register(f"{_task}_{_kind}_lr_{_lr:g}", partial(small, _task, "madam", _lr, KINDS[_kind]))
    for _lr in ADAMW_RATES:
        for _decay in ADAMW_DECAYS:
            _changes = {"arguments": {"weight_decay": _decay}}
            register(f"{_task}_adamw_{_lr:g}_{_decay:g}", partial(small, _task, "adamw", _lr, _changes))
    for _lr in SGD_RATES:
        register(f"{_task}_sgd_{_lr:g}", partial(small, _task, "sgd", _lr, {"arguments": {"momentum": 0.9}}))
    for _kind in _CONSTANT:
        register(f"{_task}_{_kind}_constant", partial(constant, f"{_task}_{_kind}"))
    for _kind in _AVERAGED:
        register(f"{_task}_{_kind}_recent", partial(constant, f"{_task}_{_kind}", RECENT))
