"""The paper's numbers, by the name of the recipe that repeats them. Lower is better everywhere.

Means and ranges over three repeats, from its three tables; the learning-rate grid is one run a point, from its
authors' public notebook. Recipes that nobody has run have their numbers here all the same: tables show what is missing.
"""

from dataclasses import dataclass

LEARNING_RATES = (1.0, 0.1, 0.01, 0.001, 0.0001)


@dataclass(frozen=True)
class Paper:
    """A number of the paper: mean and range on the test set and, where it is given, in training."""

    test: float
    test_range: float = 0.0
    train: float | None = None
    train_range: float | None = None


PAPER: dict[str, Paper] = {
    "cifar10_sgd": Paper(8.2, 1.3, 0.01, 0.01),
    "cifar10_adam": Paper(6.6, 0.2, 0.01, 0.01),
    "cifar10_madam": Paper(7.8, 0.2, 0.01, 0.01),
    "cifar10_madam_12bit": Paper(7.0, 0.1),
    "cifar10_madam_10bit": Paper(7.8, 0.3),
    "cifar10_madam_8bit": Paper(8.6, 1.5),
    "cifar100_sgd": Paper(29.1, 0.2, 0.03, 0.01),
    "cifar100_adam": Paper(29.8, 0.4, 0.02, 0.01),
    "cifar100_madam": Paper(30.2, 0.1, 2.35, 0.08),
    "cifar100_madam_12bit": Paper(27.6, 0.3),
    "cifar100_madam_10bit": Paper(29.5, 0.3),
    "cifar100_madam_8bit": Paper(33.9, 1.1),
    "imagenet_sgd": Paper(24.1, 0.1, 17.7, 0.1),
    "imagenet_adam": Paper(26.7, 0.3, 19.8, 0.2),
    "imagenet_madam": Paper(28.9, 0.1, 25.4, 0.1),
    "imagenet_madam_12bit": Paper(31.1, 0.1),
    "imagenet_madam_10bit": Paper(34.8, 0.3),
    "imagenet_madam_8bit": Paper(50.5, 0.5),
    "cgan_sgd": Paper(34.0, 1.0, 34.0, 1.0),
    "cgan_adam": Paper(23.9, 0.9, 23.1, 0.8),
    "cgan_madam": Paper(19.0, 2.0, 19.0, 2.0),
    "cgan_madam_12bit": Paper(19.8, 0.8),
    "cgan_madam_10bit": Paper(23.4, 0.4),
    "cgan_madam_8bit": Paper(36.0, 6.0),
    "wikitext2_sgd": Paper(169.6, 0.6, 149.9, 0.2),
    "wikitext2_adam": Paper(173.4, 0.9, 109.8, 0.5),
    "wikitext2_madam": Paper(173.3, 0.6, 126.9, 0.2),
    "wikitext2_madam_12bit": Paper(182.3, 0.6),
    "wikitext2_madam_10bit": Paper(218.0, 0.6),
    "wikitext2_madam_8bit": Paper(262.0, 2.0),
}

# Where the paper's table of B-bit Madam has another number for FP32 Madam than its main table.
BITS_TABLE = {"cgan_madam": Paper(19.3, 0.7)}

# Test accuracy in per cent for eta = 1, .1, .01, .001, .0001.
_ACCURACIES = {
    "cifar10_lr_madam": (20.2, 80.0, 90.5, 83.5, 71.9),
    "cifar10_lr_sgd": (87.8, 92.6, 91.6, 86.8, 78.4),
    "cifar10_lr_adam": (10.0, 91.4, 92.2, 93.3, 89.7),
    "cifar100_lr_madam": (10.0, 67.2, 69.9, 47.7, 19.6),
    "cifar100_lr_sgd": (59.6, 70.0, 67.2, 58.8, 36.1),
    "cifar100_lr_adam": (1.0, 61.2, 61.2, 70.5, 62.8),
}
# Perplexities and FIDs.
_DIRECT = {
    "cgan_lr_madam": (256.0, 116.0, 29.2, 39.3, 83.7),
    "cgan_lr_sgd": (679.0, 380.0, 41.8, 55.0, 110.0),
    "cgan_lr_adam": (496.0, 496.0, 300.0, 107.0, 26.8),
    "wikitext2_lr_madam": (3791.0, 368.0, 214.0, 268.0, 552.0),
    "wikitext2_lr_sgd": (204.0, 375.0, 792.0, 2005.0, 16328.0),
    "wikitext2_lr_adam": (float("inf"), 25519.0, 1526.0, 258.0, 200.0),
}
for _name, _values in _ACCURACIES.items():
    for _lr, _value in zip(LEARNING_RATES, _values, strict=True):
        PAPER[f"{_name}_{_lr:g}"] = Paper(round(100 - _value, 1))
for _name, _values in _DIRECT.items():
    for _lr, _value in zip(LEARNING_RATES, _values, strict=True):
        PAPER[f"{_name}_{_lr:g}"] = Paper(_value)
