"""Training runs by name: every cell of the paper's tables, every point of its figures."""

from madam_lab.recipes import cifar, controls, crossing, digits, gan, imagenet, rates, small, untuned, wikitext
from madam_lab.recipes.paper import PAPER, Paper
from madam_lab.recipes.recipe import Recipe, get, matching, names

__all__ = [
    "PAPER",
    "Paper",
    "Recipe",
    "cifar",
    "controls",
    "crossing",
    "digits",
    "gan",
    "get",
    "imagenet",
    "matching",
    "names",
    "rates",
    "small",
    "untuned",
    "wikitext",
]
