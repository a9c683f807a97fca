"""ImageNet as the paper ran it, and the same on Imagenette, which is not ImageNet.

ResNet-50, 90 epochs, eta divided by 10 every 30, after a linear warm-up of 5 epochs that B-bit Madam does without.
Batch norm keeps its gains and biases; under Madam, biases that would be zero begin as N(0, .2). The authors' 12-bit run
here had 2,048 levels. Batches are of 800 over all processes. On Imagenette, crops are of 112 pixels, batches of 128,
and 12 bits are 4,096 levels.
"""

from dataclasses import replace

from madam_lab.recipes.recipe import Recipe, Steps, recipe
from torchmadam import LadderFormat

_ZEROS = 0.2


def _photographs(optimiser: str, lr: float, **more: object) -> Recipe:
    schedule = ((0, lr), (30, lr / 10), (60, lr / 100))
    return Recipe(
        task="imagenet", epochs=90, batch=800, optimiser=optimiser, schedule=schedule, warm_up=5, **more  # type: ignore[arg-type]
    )  # fmt: skip


def _imagenette(base: Recipe) -> Recipe:
    return replace(base, task="imagenette", batch=128)


@recipe
def imagenet_sgd() -> Recipe:
    """Momentum .9, weight decay 1e-4."""
    return _photographs("sgd", 0.1, arguments={"momentum": 0.9, "weight_decay": 1e-4})


@recipe
def imagenet_adam() -> Recipe:
    """PyTorch's defaults."""
    return _photographs("adam", 0.001)


@recipe
def imagenet_madam() -> Recipe:
    """FP32 Madam, untuned."""
    return _photographs("madam", 0.01, arguments={"bound": 3.0, "max_step": 10.0}, model={"zeros": _ZEROS})


def _bits(ladder: LadderFormat, schedule: Steps) -> Recipe:
    base = imagenet_madam()
    conversion = {"init": "uniform", "bound": base.arguments["bound"]}
    return replace(base, ladder=ladder, schedule=schedule, conversion=conversion, warm_up=None)


_TWELVE: Steps = ((0, 0.016), (30, 0.004), (60, 0.001))


@recipe
def imagenet_madam_12bit() -> Recipe:
    """Spacing .001, 2,048 levels; eta is 16, 4 and 1 spacings."""
    return _bits(LadderFormat.paper(levels=2048, spacing=0.001), _TWELVE)


@recipe
def imagenet_madam_10bit() -> Recipe:
    """Spacing .004; eta is 4 spacings, then 1."""
    return _bits(LadderFormat.paper(10), ((0, 0.016), (30, 0.004)))


@recipe
def imagenet_madam_8bit() -> Recipe:
    """Spacing .016; eta is 1 spacing throughout."""
    return _bits(LadderFormat.paper(8), ((0, 0.016),))


@recipe
def imagenette_sgd() -> Recipe:
    """Momentum .9, weight decay 1e-4."""
    return _imagenette(imagenet_sgd())


@recipe
def imagenette_adam() -> Recipe:
    """PyTorch's defaults."""
    return _imagenette(imagenet_adam())


@recipe
def imagenette_madam() -> Recipe:
    """FP32 Madam, untuned."""
    return _imagenette(imagenet_madam())


@recipe
def imagenette_madam_12bit() -> Recipe:
    """Spacing .001, 4,096 levels; eta is 16, 4 and 1 spacings."""
    return _imagenette(_bits(LadderFormat.paper(12), _TWELVE))


@recipe
def imagenette_madam_8bit() -> Recipe:
    """Spacing .016; eta is 1 spacing throughout."""
    return _imagenette(imagenet_madam_8bit())
