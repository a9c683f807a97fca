"""What to run for which table or figure, how much of that has a record, and how long a run took."""

import statistics
from collections import Counter

from madam_lab import recipes, studies
from madam_lab.recipes import controls, crossing
from madam_lab.report.numbers import Results
from madam_lab.report.tables import Table

_TASKS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "wikitext2": "WikiText-2"}
_OF_PAPER = "{0}_sgd {0}_adam {0}_madam {0}_madam_*bit"
_OURS = crossing.OURS_NAMED["8 bits"].replace("signed8", "*")
_BESIDE_OURS = " ".join(f"{{0}}_{name}" for name in ("madam", "paper*", "sgd_*", "adamw_[0-9]*", _OURS))
# What is shown, and the patterns of `madam run` that it is made of.
SHOWN = [
    *((f"the paper's tables: {title}", _OF_PAPER.format(task)) for task, title in _TASKS.items()),
    ("… the GAN, and two rows of ours", "cgan_sgd cgan_adam cgan_madam*"),
    ("… ImageNet", "imagenet_*"),
    ("… Imagenette instead of it", "imagenette_*"),
    *((f"learning rates, {title}", f"{task}_lr_*") for task, title in _TASKS.items()),
    ("learning rates, the GAN", "cgan_lr_*"),
    ("learning rates, digits", "digits_lr_*"),
    ("bounds", "cifar10_bound_*"),
    ("what differs from the paper", f"{controls.SHORT}* cifar10_sgd_float32"),
    *(
        (f"one setting for all: {title}", _BESIDE_OURS.format(f"{task}_{epochs}"))
        for (task, title), epochs in zip(_TASKS.items(), ("100e", "100e", "20e"), strict=True)
    ),
    ("small tasks", "small_*"),
    ("the theory", "breakdown_* largest_lr_* *_trust*"),
]


def effort_table(results: Results) -> Table:
    """A row a command."""
    rows, ours = [], []
    known = [*recipes.names(), *studies.names()]
    for title, patterns in SHOWN:
        names = recipes.matching(patterns.split(), known)
        found = [record for name in names for record in (results.of(name) or results.study(name))[:1]]
        ours += found
        command = " ".join(f"'{each}'" if "*" in each else each for each in patterns.split())
        rows.append((title, f"`{command}`", f"{len(names)}", f"{len(found)}", _took(found)))
    note = (
        "`madam run` takes what is in the second column; `--seeds 0,1,2` makes three of each. Seconds are the median "
        "and the range of the records that there are; some runs had others beside them."
    )
    head = ("", "what to run", "runs", "of them measured", "seconds a run")
    return Table("What to run", note, head, rows, ours)


def _took(found: list[dict[str, object]]) -> str:
    """The median and the range on the device that most of these records are from."""
    if not found:
        return ""
    device = Counter(str(record["device"]) for record in found).most_common(1)[0][0]
    times = [float(str(record["seconds"])) for record in found if record["device"] == device]
    median, least, most = statistics.median(times), min(times), max(times)
    spread = f" ({least:.0f} to {most:.0f})" if f"{least:.0f}" != f"{most:.0f}" else ""
    return f"{median:.0f}{spread}, {device}"


TABLES = {"effort": effort_table}
