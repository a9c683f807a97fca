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
from madam_lab.recipes.recipe import Recipe, register
from torchmadam import LadderFormat

BASES = {
    "cifar10_100e": replace(cifar.cifar10_madam(), epochs=100, schedule="cosine", lr=0.01, arguments={}),
    "cifar100_100e": replace(cifar.cifar100_madam(), epochs=100, schedule="cosine", lr=0.01, arguments={}),
    "wikitext2_20e": replace(wikitext.wikitext2_madam(), epochs=20, schedule="cosine", lr=0.01, arguments={}),
    "digits_60e": replace(digits.digits_madam(), epochs=60, schedule="cosine", lr=0.01),
}
CROSSED: Mapping[str, Any] = {"arguments": {"crossing": 1.0}}
# What won, and is the library's default: named by what it changes, as all the others are.
OURS: Mapping[str, Any] = {"crossing": 1.0, "bound": 5.0, "weight_decay": 0.2, "momentum": 0.9}
RECENT = 0.05  # the memory of an average that takes a schedule's place, as a share of the steps so far: the default's
OURS_NAMED = {
    "float32": "crossing_1_bound_5_decay_0.2_momentum",
    "12 bits": "signed12_bound_5_decay_0.2_momentum",
    "8 bits": "signed8_bound_5_decay_0.2_momentum",
}
# Schedules of equal parts. The paper's ladders, which round to nearest, step by 16, 4 and 1 spacings.
PARTS = {"thirds": (0.01, 0.001, 0.0001), "constant": (0.01,), "spacings": (0.016, 0.004, 0.001), "spacing": (0.016,)}
PAPER_BITS: Mapping[str, Any] = {"conversion": {"init": "uniform", "bound": 3.0}, "lr": None}
# Name, and what it changes. Over a whole run, weight decay multiplies a weight by about exp(-25 decay) on CIFAR-10, by
# exp(-300 decay) on WikiText-2.
VARIANTS: dict[str, Mapping[str, Any]] = {
    "madam": {},
    **{f"crossing_{c:g}": {"arguments": {"crossing": c}} for c in (0.1, 0.3, 1.0, 3.0)},
    "crossing_1_steps": {**CROSSED, "schedule": "thirds", "lr": None},
    "crossing_1_linear": {**CROSSED, "schedule": "linear"},
    **{f"crossing_1_bound_{b:g}": {"arguments": {"crossing": 1.0, "bound": b}} for b in (2.0, 5.0)},
    "crossing_1_bound_none": {"arguments": {"crossing": 1.0, "bound": None}},
    **{f"crossing_1_decay_{d:g}": {"arguments": {"crossing": 1.0, "weight_decay": d}} for d in (0.01, 0.03, 0.1, 0.3)},
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
    # On such a zone steps are large from the first one on; on one of 3 sigma they become so as decay shrinks weights.
    **{
        f"crossing_1{bound}_decay_0.3_warm": {
            "arguments": {"crossing": 1.0, "weight_decay": 0.3, **more},
            "warm_up": 0.05,
        }
        for bound, more in (("", {}), ("_bound_5", {"bound": 5.0}), ("_bound_10", {"bound": 10.0}))
    },
    **{  # 0.2: ours without momentum
        f"crossing_1_bound_5_decay_{d:g}": {"arguments": {"crossing": 1.0, "bound": 5.0, "weight_decay": d}}
        for d in (0.2, 0.3)
    },
    "crossing_1_decay_0.3_linear": {"arguments": {"crossing": 1.0, "weight_decay": 0.3}, "schedule": "linear"},
    "crossing_1_decay_1": {"arguments": {"crossing": 1.0, "weight_decay": 1.0}},
    "crossing_1_decay_0.3_step_3": {"arguments": {"crossing": 1.0, "weight_decay": 0.3, "max_step": 3.0}},
    "crossing_1_bound_20_decay_0.1": {"arguments": {"crossing": 1.0, "bound": 20.0, "weight_decay": 0.1}},
    # A decay alone may be enough to hold weights: the same zone of 3 sigma, and nothing to be clamped at.
    **{
        f"crossing_3_bound_none_decay_{d:g}": {"arguments": {"crossing": 3.0, "bound": None, "weight_decay": d}}
        for d in (0.1, 0.3)
    },
    # A first moment, as Adam's: steps as large as a decay of 0.3 makes them shake without it.
    **{
        f"crossing_1_bound_{b:g}_decay_{d:g}_momentum": {
            "arguments": {"crossing": 1.0, "bound": b, "weight_decay": d, "momentum": 0.9}
        }
        for b in (3.0, 5.0, 10.0)
        for d in (0.03, 0.1, 0.2, 0.3)
    },
    **{
        f"{name}_bound_{b:g}_decay_{d:g}_momentum": {
            "ladder": LadderFormat.preset(name),
            "conversion": {"bound": b},
            "arguments": {"weight_decay": d, "momentum": 0.9},
        }
        for name in ("signed8", "signed12")
        for b in (3.0, 5.0, 10.0)
        for d in (0.1, 0.2, 0.3)
    },
    # Ours with one thing changed: the schedule, an average, the bound, rounding.
    **{
        f"{OURS_NAMED['float32']}_{name}": {"arguments": OURS, **change}
        for name, change in (
            ("linear", {"schedule": "linear"}),
            ("steps", {"schedule": "thirds", "lr": None}),
            ("average", {"average": 0.99}),
            ("constant_average", {"schedule": "constant", "lr": None, "average": 0.998}),
            ("constant", {"schedule": "constant", "lr": None}),
            ("constant_recent", {"schedule": "constant", "lr": None, "recent": RECENT}),
        )
    },
    # Without decay, which an average does not need on small tasks.
    "crossing_1_bound_5_momentum": {"arguments": {**OURS, "weight_decay": 0.0}},
    "crossing_1_bound_5_momentum_constant_recent": {
        "arguments": {**OURS, "weight_decay": 0.0},
        "schedule": "constant",
        "lr": None,
        "recent": RECENT,
    },
    "crossing_5_bound_none_decay_0.2_momentum": {"arguments": {**OURS, "crossing": 5.0, "bound": None}},
    f"{OURS_NAMED['8 bits']}_nearest": {
        "ladder": LadderFormat.preset("signed8"),
        "conversion": {"bound": 5.0},
        "arguments": {"weight_decay": 0.2, "momentum": 0.9, "rounding": "nearest"},
    },
    # Codes average as floats do, and what is evaluated then is floats.
    f"{OURS_NAMED['8 bits']}_constant_recent": {
        "ladder": LadderFormat.preset("signed8"),
        "conversion": {"bound": 5.0},
        "arguments": {"weight_decay": 0.2, "momentum": 0.9},
        "schedule": "constant",
        "lr": None,
        "recent": RECENT,
    },
    "crossing_10_bound_none_decay_0.1": {"arguments": {"crossing": 10.0, "bound": None, "weight_decay": 0.1}},
    # An average instead of a schedule, or beside one.
    "crossing_1_average": {**CROSSED, "average": 0.99},
    "crossing_1_constant": {**CROSSED, "schedule": "constant", "lr": None},
    "crossing_1_constant_average": {**CROSSED, "schedule": "constant", "lr": None, "average": 0.998},
    # If small weights are stuck because their steps are proportional to their size, a floor should already help.
    "madam_floor": {"floor": 1 / 60},
    # If what counts is the relative step of a layer, crossing 1 at 0.01 should resemble crossing 0 at 0.03.
    "madam_lr_0.03": {"lr": 0.03},
    "paper12": {**PAPER_BITS, "ladder": LadderFormat.preset("paper12"), "schedule": "spacings"},
    "paper8": {**PAPER_BITS, "ladder": LadderFormat.preset("paper8"), "schedule": "spacing"},
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
# For tasks whose norms have gains, which the paper leaves out, and the baselines do not.
ONLY_CIFAR: dict[str, Mapping[str, Any]] = {
    "crossing_1_affine": {**CROSSED, "model": {"affine": True}},
    **{
        f"crossing_1_decay_{d:g}_affine": {
            "arguments": {"crossing": 1.0, "weight_decay": d},
            "model": {"affine": True},
        }
        for d in (0.1, 0.3)
    },
}
# Grids of the baselines: learning rates and weight decays. AdamW's 1.0 at 0.001 is what 0.1 is for Madam at 0.01.
TUNED = {
    ("cifar10_100e", "sgd"): ((0.03, 0.1, 0.3), (1e-4, 5e-4, 2e-3, 5e-3), {"momentum": 0.9}),
    ("cifar10_100e", "adamw"): ((3e-4, 1e-3, 3e-3, 1e-2), (0.01, 0.1, 1.0, 3.0), {}),
    ("cifar100_100e", "sgd"): ((0.03, 0.1, 0.3), (1e-4, 5e-4, 2e-3, 5e-3), {"momentum": 0.9}),
    ("cifar100_100e", "adamw"): ((3e-4, 1e-3, 3e-3, 1e-2), (0.01, 0.1, 1.0, 3.0), {}),
    ("wikitext2_20e", "sgd"): ((0.3, 1.0, 3.0), (0.0, 1e-4), {}),
    ("wikitext2_20e", "adamw"): ((1e-4, 3e-4, 1e-3), (0.01, 0.1, 1.0), {}),
    ("digits_60e", "sgd"): ((0.01, 0.03, 0.1), (1e-4, 1e-3, 1e-2), {"momentum": 0.9}),
    ("digits_60e", "adamw"): ((1e-3, 3e-3, 1e-2), (0.01, 0.1, 1.0), {}),
}


def variant(base: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """A recipe with something changed; a schedule may be one of the ``PARTS``, and a warm-up is a share of the run."""
    changes = dict(changes)
    schedule = changes.pop("schedule", base.schedule)
    if "warm_up" in changes:
        changes["warm_up"] = round(base.epochs * changes["warm_up"])
    if schedule in PARTS:
        rates = PARTS[schedule]
        schedule = tuple((i * (base.epochs // len(rates)), lr) for i, lr in enumerate(rates))
    return replace(base, **changes, schedule=schedule)


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
# What AdamW owes to its first moment, which Madam does not have.
for _lr, _decay in ((1e-3, 1.0), (3e-3, 1.0)):
    register(
        f"cifar10_100e_adamw_no_first_moment_{_lr:g}_{_decay:g}",
        partial(baseline, BASES["cifar10_100e"], "adamw", _lr, _decay, {"betas": (0.0, 0.999)}),
    )
