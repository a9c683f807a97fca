"""WikiText-2 as the paper ran it.

Twenty epochs of 20 x 35 words, eta divided by 10 after ten; weights clamped to 2 times their initial RMS; zero biases
stay at zero. Below 12 bits the spacings are others than for the classifiers, and so are the ranges.
"""

from dataclasses import replace
from functools import partial

from madam_lab.recipes.paper import LEARNING_RATES
from madam_lab.recipes.recipe import Recipe, Steps, recipe, register
from torchmadam import LadderFormat


def _language_model(optimiser: str, lr: float, **more: object) -> Recipe:
    schedule = ((0, lr), (10, lr / 10))
    return Recipe(task="wikitext2", epochs=20, batch=20, optimiser=optimiser, schedule=schedule, **more)  # type: ignore[arg-type]


@recipe
def wikitext2_sgd() -> Recipe:
    """Plain gradient descent with the gradient's norm clipped at .25."""
    return _language_model("sgd", 1.0, clip=0.25)


@recipe
def wikitext2_adam() -> Recipe:
    """PyTorch's defaults but for eta."""
    return _language_model("adam", 0.0001)


@recipe
def wikitext2_madam() -> Recipe:
    """FP32 Madam, untuned."""
    return _language_model(
        "madam",
        0.01,
        arguments={"bound": 2.0, "max_step": 10.0, "zero_scale": 0.0},
    )


def _bits(ladder: LadderFormat, schedule: Steps) -> Recipe:
    base = wikitext2_madam()
    conversion = {"init": "uniform", "bound": base.arguments["bound"], "zero_scale": 0.0}
    return replace(base, ladder=ladder, schedule=schedule, conversion=conversion)


@recipe
def wikitext2_madam_12bit() -> Recipe:
    """Spacing .001; eta is 10 spacings, then 5."""
    return _bits(LadderFormat.paper(12, 0.001), ((0, 0.01), (10, 0.005)))


@recipe
def wikitext2_madam_10bit() -> Recipe:
    """Spacing .005; eta is 2 spacings, then 1."""
    return _bits(LadderFormat.paper(10, 0.005), ((0, 0.01), (10, 0.005)))


@recipe
def wikitext2_madam_8bit() -> Recipe:
    """Spacing .01; eta is 1 spacing throughout."""
    return _bits(LadderFormat.paper(8, 0.01), ((0, 0.01),))


@recipe
def wikitext2_trust() -> Recipe:
    """Angles and relative steps while FP32 Madam trains, three times an epoch."""
    return replace(wikitext2_madam(), monitor=1000)


@recipe
def wikitext2_trust_12bit() -> Recipe:
    """And where the codes are and go."""
    return replace(wikitext2_madam_12bit(), monitor=1000)


def learning_rate_point(base: Recipe, lr: float) -> Recipe:
    """A point of the learning-rate figure: 10 epochs at a constant eta."""
    return replace(base, schedule=((0, lr),), epochs=10)


for _base in (wikitext2_madam, wikitext2_sgd, wikitext2_adam):
    for _lr in LEARNING_RATES:
        register(f"{_base.__name__.replace('_', '_lr_')}_{_lr:g}", partial(learning_rate_point, _base(), _lr))
