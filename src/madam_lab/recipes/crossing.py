"""Can Madam at lr = 0.01 beat tuned SGD and AdamW? One change at a time, 100 epochs of CIFAR-10 and 20 of WikiText-2.

And 60 of the handwritten digits, which take seconds on a CPU. Names say what differs from ``cifar10_100e_madam`` and
its like, which are the paper's rule with a cosine schedule. The baselines are tuned: a grid of learning rates and
weight decays at the same epochs, batch, schedule and precision.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from madam_lab.recipes import cifar, digits, wikitext
from madam_lab.recipes.paper import LEARNING_RATES
from madam_lab.recipes.recipe import Recipe, get, register
from torchmadam import LadderFormat

BASES = {
    "cifar10_100e": replace(cifar.cifar10_madam(), epochs=100, schedule="cosine", lr=0.01, arguments={}),
    "cifar100_100e": replace(cifar.cifar100_madam(), epochs=100, schedule="cosine", lr=0.01, arguments={}),
    "wikitext2_20e": replace(wikitext.wikitext2_madam(), epochs=20, schedule="cosine", lr=0.01, arguments={}),
    "digits_60e": replace(digits.digits_madam(), epochs=60, schedule="cosine", lr=0.01),
}
CROSSED: Mapping[str, Any] = {"arguments": {"crossing": 1.0}}
# Name, and what it changes. Over a whole run, weight decay multiplies a weight by about exp(-25 decay) on CIFAR-10, by
# exp(-300 decay) on WikiText-2.
VARIANTS: dict[str, Mapping[str, Any]] = {
    "madam": {},
    **{f"crossing_{c:g}": {"arguments": {"crossing": c}} for c in (0.1, 0.3, 1.0, 3.0)},
    "crossing_1_steps": {**CROSSED, "schedule": "thirds", "lr": None},
    "crossing_1_linear": {**CROSSED, "schedule": "linear"},
    **{f"crossing_1_bound_{b:g}": {"arguments": {"crossing": 1.0, "bound": b}} for b in (2.0, 5.0)},
    "crossing_1_bound_none": {"arguments": {"crossing": 1.0, "bound": None}},
    **{f"crossing_1_decay_{d:g}": {"arguments": {"crossing": 1.0, "weight_decay": d}} for d in (0.03, 0.1, 0.3)},
    **{
        f"crossing_{c:g}_decay_{d:g}": {"arguments": {"crossing": c, "weight_decay": d}}
        for c in (0.3, 3.0)
        for d in (0.03, 0.1)
    },
    # The zone of additive steps ends at crossing times bound: 10 sigma instead of 3. Without a bound nothing else is.
    "crossing_1_bound_10": {"arguments": {"crossing": 1.0, "bound": 10.0}},
    **{
        f"crossing_1_bound_10_decay_{d:g}": {"arguments": {"crossing": 1.0, "bound": 10.0, "weight_decay": d}}
        for d in (0.03, 0.1, 0.3)
    },
    "crossing_1_bound_20_decay_0.1": {"arguments": {"crossing": 1.0, "bound": 20.0, "weight_decay": 0.1}},
    "crossing_10_bound_none_decay_0.1": {"arguments": {"crossing": 10.0, "bound": None, "weight_decay": 0.1}},
    # An average instead of a schedule, or beside one.
    "crossing_1_average": {**CROSSED, "average": 0.99},
    "crossing_1_constant": {**CROSSED, "schedule": "constant", "lr": None},
    "crossing_1_constant_average": {**CROSSED, "schedule": "constant", "lr": None, "average": 0.998},
    # If small weights are stuck because their steps are proportional to their size, a floor should already help.
    "madam_floor": {"floor": 1 / 60},
    # If what counts is the relative step of a layer, crossing 1 at 0.01 should resemble crossing 0 at 0.03.
    "madam_lr_0.03": {"lr": 0.03},
    "signed8": {"ladder": LadderFormat.preset("signed8")},
    "signed12": {"ladder": LadderFormat.preset("signed12")},
    "signed8_nearest": {"ladder": LadderFormat.preset("signed8"), "arguments": {"rounding": "nearest"}},
    **{
        f"{name}_decay_{d:g}": {"ladder": LadderFormat.preset(name), "arguments": {"weight_decay": d}}
        for name in ("signed8", "signed12")
        for d in (0.03, 0.1)
    },
    **{
        f"{name}_bound_10_decay_0.1": {
            "ladder": LadderFormat.preset(name),
            "conversion": {"bound": 10.0},
            "arguments": {"weight_decay": 0.1},
        }
        for name in ("signed8", "signed12")
    },
    "crossing_1_moment_8bit": {"arguments": {"crossing": 1.0, "second_moment": "8bit"}},
    "signed8_moment_8bit": {"ladder": LadderFormat.preset("signed8"), "arguments": {"second_moment": "8bit"}},
}
# For tasks whose norms have gains to leave out.
ONLY_CIFAR = {"crossing_1_affine": {**CROSSED, "model": {"affine": True}}}
# Grids of the baselines: learning rates and weight decays. AdamW's 1.0 at 0.001 is what 0.1 is for Madam at 0.01.
TUNED = {
    ("cifar10_100e", "sgd"): ((0.03, 0.1, 0.3), (1e-4, 5e-4, 2e-3), {"momentum": 0.9}),
    ("cifar10_100e", "adamw"): ((3e-4, 1e-3, 3e-3), (0.01, 0.1, 1.0), {}),
    ("cifar100_100e", "sgd"): ((0.03, 0.1, 0.3), (1e-4, 5e-4, 2e-3), {"momentum": 0.9}),
    ("cifar100_100e", "adamw"): ((3e-4, 1e-3, 3e-3), (0.01, 0.1, 1.0), {}),
    ("wikitext2_20e", "sgd"): ((0.3, 1.0, 3.0), (0.0, 1e-4), {}),
    ("wikitext2_20e", "adamw"): ((1e-4, 3e-4, 1e-3), (0.01, 0.1, 1.0), {}),
    ("digits_60e", "sgd"): ((0.01, 0.03, 0.1), (1e-4, 1e-3, 1e-2), {"momentum": 0.9}),
    ("digits_60e", "adamw"): ((1e-3, 3e-3, 1e-2), (0.01, 0.1, 1.0), {}),
}


def variant(base: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """A recipe with something changed; "thirds" is eta divided by 10 after each third, "constant" 0.01 to the end."""
    changed = replace(base, **{name: value for name, value in changes.items() if name != "schedule"})
    if changes.get("schedule") == "thirds":
        third = base.epochs // 3
        return replace(changed, schedule=((0, 0.01), (third, 0.001), (2 * third, 0.0001)))
    if changes.get("schedule") == "constant":
        return replace(changed, schedule=((0, 0.01),))
    return replace(changed, schedule=changes.get("schedule", base.schedule))


def learning_rate_point(of_paper: str) -> Recipe:
    """A point of the learning-rate figure, but for crossing that of the paper's rule."""
    base = get(of_paper)
    return replace(base, arguments={**base.arguments, "crossing": 1.0})


def baseline(base: Recipe, optimiser: str, lr: float, decay: float, more: Mapping[str, Any]) -> Recipe:
    """A point of a baseline's grid, with the gains of its norms, and the gradient clipped where the paper did."""
    clip = 0.25 if (base.task, optimiser) == ("wikitext2", "sgd") else None
    return replace(base, optimiser=optimiser, lr=lr, arguments={**more, "weight_decay": decay}, model={}, clip=clip)


for _task, _base in BASES.items():
    for _name, _changes in {**VARIANTS, **(ONLY_CIFAR if _base.task.startswith("cifar") else {})}.items():
        register(f"{_task}_{_name}", partial(variant, _base, _changes))
for (_task, _kind), (_rates, _decays, _more) in TUNED.items():
    for _lr in _rates:
        for _decay in _decays:
            register(f"{_task}_{_kind}_{_lr:g}_{_decay:g}", partial(baseline, BASES[_task], _kind, _lr, _decay, _more))
for _task in ("cifar10", "cifar100", "wikitext2"):
    for _lr in LEARNING_RATES:
        register(f"{_task}_lr_crossing_{_lr:g}", partial(learning_rate_point, f"{_task}_lr_madam_{_lr:g}"))
