"""Where a cell of ours is worse than the paper's: one controlled run a hypothesis, with one thing changed.

12-bit Madam on CIFAR-100, in a third of the epochs, to be cheap; and SGD on CIFAR-10, whose first epochs are unstable.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from madam_lab.recipes import cifar
from madam_lab.recipes.recipe import Recipe, register

SHORT = "cifar100_100e_12bit"
# What may be the cause, and what a run changes to find out.
HYPOTHESES: dict[str, Mapping[str, Any]] = {
    "float32": {"precision": "float32"},
    "affine": {"model": {"affine": True}},
    "clamp_8": {"arguments": {"bound": 1.0, "max_step": 8.0}},
    "uncorrected": {"arguments": {"bound": 1.0, "max_step": 10.0, "bias_correction": False}},
    "stochastic": {"arguments": {"bound": 1.0, "max_step": 10.0, "rounding": "stochastic"}},
    "nearest_init": {"conversion": {"init": "nearest", "bound": 1.0}},
}


def short() -> Recipe:
    """12-bit Madam on CIFAR-100: 100 epochs, eta of 16, 4 and 1 spacings, a third each."""
    return replace(cifar.cifar100_madam_12bit(), epochs=100, schedule=((0, 0.016), (33, 0.004), (67, 0.001)))


def control(changes: Mapping[str, Any]) -> Recipe:
    """The same with something changed."""
    return replace(short(), **changes)


register(SHORT, short)
for _name, _changes in HYPOTHESES.items():
    register(f"{SHORT}_{_name}", partial(control, _changes))
register("cifar10_sgd_float32", lambda: replace(cifar.cifar10_sgd(), precision="float32"))
