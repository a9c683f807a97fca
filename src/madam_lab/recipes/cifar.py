"""CIFAR-10 and CIFAR-100 as the paper ran them: its tables, its learning-rate figure, its clipping figure.

The facts are the paper's and its authors': ResNet-18, batch 1024, 300 epochs, eta divided by 10 at 100 and 200,
weights clamped to 3 (CIFAR-10) or 1 (CIFAR-100) times their initial RMS, steps to 10 times eta, no learnable gains in
batch norm under Madam. B-bit Madam starts at eta = .016, and eta decays towards the ladder's spacing.
"""

from dataclasses import replace
from functools import partial

from madam_lab.recipes.paper import LEARNING_RATES
from madam_lab.recipes.recipe import Recipe, Steps, recipe, register
from torchmadam import LadderFormat

BY_TENS = 100, 200  # the epochs at which eta is divided by 10


def _classifier(task: str, optimiser: str, lr: float, **more: object) -> Recipe:
    first, second = BY_TENS
    schedule = ((0, lr), (first, lr / 10), (second, lr / 100))
    return Recipe(task=task, epochs=300, batch=1024, optimiser=optimiser, schedule=schedule, **more)  # type: ignore[arg-type]


@recipe
def cifar10_sgd() -> Recipe:
    """Momentum .9, no weight decay."""
    return _classifier("cifar10", "sgd", 0.1, arguments={"momentum": 0.9})


@recipe
def cifar10_adam() -> Recipe:
    """PyTorch's defaults."""
    return _classifier("cifar10", "adam", 0.001)


@recipe
def cifar10_madam() -> Recipe:
    """FP32 Madam, untuned."""
    return _classifier(
        "cifar10",
        "madam",
        0.01,
        arguments={"bound": 3.0, "max_step": 10.0},
        model={"affine": False},
    )


def _twelve_bits(base: Recipe) -> Recipe:
    """Spacing .001; eta is 16, 4 and 1 spacings."""
    schedule = ((0, 0.016), (100, 0.004), (200, 0.001))
    return _bits(base, LadderFormat.paper(12), schedule)


def _ten_bits(base: Recipe) -> Recipe:
    """Spacing .004; eta is 4 spacings, then 1."""
    return _bits(base, LadderFormat.paper(10), ((0, 0.016), (100, 0.004)))


def _eight_bits(base: Recipe) -> Recipe:
    """Spacing .016; eta is 1 spacing throughout."""
    return _bits(base, LadderFormat.paper(8), ((0, 0.016),))


def _bits(base: Recipe, ladder: LadderFormat, schedule: Steps) -> Recipe:
    conversion = {"init": "uniform", "bound": base.arguments["bound"]}
    return replace(base, ladder=ladder, schedule=schedule, conversion=conversion)


@recipe
def cifar10_madam_12bit() -> Recipe:
    """12-bit Madam: 13 stored bits a weight."""
    return _twelve_bits(cifar10_madam())


@recipe
def cifar10_madam_10bit() -> Recipe:
    """10-bit Madam: 11 stored bits a weight."""
    return _ten_bits(cifar10_madam())


@recipe
def cifar10_madam_8bit() -> Recipe:
    """8-bit Madam: 9 stored bits a weight."""
    return _eight_bits(cifar10_madam())


@recipe
def cifar100_sgd() -> Recipe:
    """Momentum .9, no weight decay."""
    return _classifier("cifar100", "sgd", 0.1, arguments={"momentum": 0.9})


@recipe
def cifar100_adam() -> Recipe:
    """PyTorch's defaults."""
    return _classifier("cifar100", "adam", 0.001)


@recipe
def cifar100_madam() -> Recipe:
    """FP32 Madam with the tighter bound that the paper chose here."""
    return replace(cifar10_madam(), task="cifar100", arguments={"bound": 1.0, "max_step": 10.0})


@recipe
def cifar100_madam_12bit() -> Recipe:
    """12-bit Madam."""
    return _twelve_bits(cifar100_madam())


@recipe
def cifar100_madam_10bit() -> Recipe:
    """10-bit Madam."""
    return _ten_bits(cifar100_madam())


@recipe
def cifar100_madam_8bit() -> Recipe:
    """8-bit Madam."""
    return _eight_bits(cifar100_madam())


@recipe
def cifar10_trust() -> Recipe:
    """Angles and relative steps while FP32 Madam trains, every two epochs, in a third of the time."""
    return _watched(cifar10_madam())


@recipe
def cifar10_trust_12bit() -> Recipe:
    """And where the codes are and go."""
    return _watched(cifar10_madam_12bit())


def _watched(base: Recipe) -> Recipe:
    assert not isinstance(base.schedule, str)
    steps = tuple((epoch // 3, lr) for epoch, lr in base.schedule)
    return replace(base, epochs=base.epochs // 3, schedule=steps, monitor=98)


def bound_point(bound: float) -> Recipe:
    """A curve of the clipping figure: FP32 Madam on CIFAR-10 with another bound. 3 is cifar10_madam itself."""
    base = cifar10_madam()
    return replace(base, arguments={**base.arguments, "bound": bound})


def learning_rate_point(base: Recipe, lr: float) -> Recipe:
    """A point of the learning-rate figure: 30 epochs at a constant eta."""
    return replace(base, schedule=((0, lr),), epochs=30)


for _bound in (1.0, 2.0, 5.0):
    register(f"cifar10_bound_{_bound:g}", partial(bound_point, _bound))

for _base in (cifar10_madam, cifar10_sgd, cifar10_adam, cifar100_madam, cifar100_sgd, cifar100_adam):
    for _lr in LEARNING_RATES:
        register(f"{_base.__name__.replace('_', '_lr_')}_{_lr:g}", partial(learning_rate_point, _base(), _lr))
