"""Handwritten digits: the learning-rate figure in a minute, for SGD, Adam and three kinds of Madam."""

from dataclasses import replace
from functools import partial

from madam_lab.recipes.paper import LEARNING_RATES
from madam_lab.recipes.recipe import Recipe, recipe, register
from torchmadam import LadderFormat


@recipe
def digits_madam() -> Recipe:
    """FP32 Madam, the paper's rule."""
    return Recipe(
        task="digits", epochs=40, batch=64, optimiser="madam", schedule=((0, 0.01),), precision="float32"
    )  # fmt: skip


@recipe
def digits_madam_12bit() -> Recipe:
    """The paper's 12-bit ladder."""
    return replace(digits_madam(), ladder=LadderFormat.preset("paper12"))


@recipe
def digits_madam_signed8() -> Recipe:
    """The signed ladder in 8 bits."""
    return replace(digits_madam(), ladder=LadderFormat.preset("signed8"))


@recipe
def digits_sgd() -> Recipe:
    """Without momentum."""
    return replace(digits_madam(), optimiser="sgd", schedule=((0, 0.1),))


@recipe
def digits_adam() -> Recipe:
    """PyTorch's defaults."""
    return replace(digits_madam(), optimiser="adam", schedule=((0, 0.001),))


@recipe
def digits_trust() -> Recipe:
    """Angles and relative steps while FP32 Madam trains."""
    return replace(digits_madam(), monitor=40)


@recipe
def digits_trust_12bit() -> Recipe:
    """And where the codes of the paper's ladder are and go."""
    return replace(digits_madam_12bit(), monitor=40)


@recipe
def digits_trust_signed8() -> Recipe:
    """And where those of the signed ladder do."""
    return replace(digits_madam_signed8(), monitor=40)


def learning_rate_point(base: Recipe, lr: float) -> Recipe:
    """A point of the learning-rate figure: a constant eta; on ladders rounding is stochastic, so that any eta works."""
    rounding = {"rounding": "stochastic"} if base.ladder is not None else {}
    return replace(base, schedule=((0, lr),), arguments={**base.arguments, **rounding})


for _base in (digits_sgd, digits_adam, digits_madam, digits_madam_12bit, digits_madam_signed8):
    for _lr in LEARNING_RATES:
        _kind = _base.__name__.removeprefix("digits_")
        register(f"digits_lr_{_kind}_{_lr:g}", partial(learning_rate_point, _base(), _lr))
