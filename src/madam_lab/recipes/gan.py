"""The class-conditional GAN on CIFAR-10 as the paper ran it.

Batches of 256, 120 epochs, eta to its last value after 100 of them, the same eta for both players, which take turns;
weights clamped to 3 times their initial RMS. B-bit Madam starts at eta = .01, and the spacings below 12 bits are others
than for the classifiers: .0025 and .01.
"""

from dataclasses import replace
from functools import partial

from madam_lab.recipes.paper import LEARNING_RATES
from madam_lab.recipes.recipe import Recipe, Steps, recipe, register
from torchmadam import LadderFormat

LAST = 100  # the epoch at which eta falls


def _gan(optimiser: str, lr: float, **more: object) -> Recipe:
    schedule = ((0, lr), (LAST, lr / 10))
    return Recipe(task="cgan", epochs=120, batch=256, optimiser=optimiser, schedule=schedule, **more)  # type: ignore[arg-type]


@recipe
def cgan_sgd() -> Recipe:
    """No momentum."""
    return _gan("sgd", 0.01)


@recipe
def cgan_adam() -> Recipe:
    """No first moment, as is usual for GANs."""
    return _gan("adam", 0.0001, arguments={"betas": (0.0, 0.999)})


@recipe
def cgan_madam() -> Recipe:
    """FP32 Madam, untuned."""
    return _gan("madam", 0.01, arguments={"bound": 3.0, "max_step": 10.0})


def _bits(ladder: LadderFormat, schedule: Steps) -> Recipe:
    base = cgan_madam()
    conversion = {"init": "uniform", "bound": base.arguments["bound"]}
    return replace(base, ladder=ladder, schedule=schedule, conversion=conversion)


@recipe
def cgan_madam_12bit() -> Recipe:
    """Spacing .001; eta is 10 spacings, then 1."""
    return _bits(LadderFormat.paper(12, 0.001), ((0, 0.01), (LAST, 0.001)))


@recipe
def cgan_madam_10bit() -> Recipe:
    """Spacing .0025; eta is 4 spacings, then 1."""
    return _bits(LadderFormat.paper(10, 0.0025), ((0, 0.01), (LAST, 0.0025)))


@recipe
def cgan_madam_8bit() -> Recipe:
    """Spacing .01; eta is 1 spacing throughout."""
    return _bits(LadderFormat.paper(8, 0.01), ((0, 0.01),))


@recipe
def cgan_madam_signed8() -> Recipe:
    """The library's 8 bits, from the initial weights, without its momentum and decay, which two players do not bear."""
    return replace(cgan_madam(), ladder=LadderFormat.preset("signed8"), conversion={"bound": 5.0})


@recipe
def cgan_madam_signed8_default() -> Recipe:
    """The library's default for 8 bits to the letter, momentum and decay included."""
    return replace(cgan_madam_signed8(), arguments={"momentum": 0.9, "weight_decay": 0.2})


def learning_rate_point(base: Recipe, lr: float) -> Recipe:
    """A point of the learning-rate figure: 12 epochs at a constant eta."""
    return replace(base, schedule=((0, lr),), epochs=12)


for _base in (cgan_madam, cgan_sgd, cgan_adam):
    for _lr in LEARNING_RATES:
        register(f"{_base.__name__.replace('_', '_lr_')}_{_lr:g}", partial(learning_rate_point, _base(), _lr))
