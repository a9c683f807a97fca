"""The study of crossing as a table: Madam's variants beside the best of each tuned baseline."""

import math

from madam_lab.recipes import crossing
from madam_lab.report.numbers import Results
from madam_lab.report.tables import Table

TITLES = {
    "cifar10_100e": "CIFAR-10, 100 epochs, error %",
    "cifar100_100e": "CIFAR-100, 100 epochs, error %",
    "wikitext2_20e": "WikiText-2, 20 epochs, perplexity",
    "digits_60e": "digits, 60 epochs, error %",
}


def crossing_table(results: Results) -> Table:
    """One row a variant, one column a task of which there are records; baselines by the best point of their grids."""
    tasks = [task for task in crossing.BASES if any(results.of(name) for name in _names(task))]
    rows, ours = _baselines(results, tasks)
    for variant in (*crossing.VARIANTS, *crossing.ONLY_CIFAR):
        names = [f"{task}_{variant}" for task in tasks]
        known = [task.startswith("cifar") or variant in crossing.VARIANTS for task in tasks]
        ours += [record for name in names for record in results.of(name)]
        if not any(results.of(name) for name in names):
            continue  # not tried, or not yet
        cells = [results.ours(name) if has else "" for name, has in zip(names, known, strict=True)]
        rows.append((variant.replace("_", " "), *cells))
    note = (
        "Madam at lr = 0.01 with one thing changed, beside baselines tuned at the same epochs: the best points of "
        "their grids, by the test set itself. Lower is better."
    )
    if without := [TITLES[task].split(",")[0] for task in crossing.BASES if task not in tasks]:
        note += f" No records yet: {', '.join(without)}."
    head = ("", *(TITLES[task] for task in tasks))
    return Table("Letting weights cross zero", note, head, rows, ours)


def ours_table(results: Results) -> Table:
    """The paper's rule and ours, as floats and as codes, beside the best of each tuned baseline."""
    tasks = [task for task in TITLES if task != "digits_60e"]
    rows, ours = _baselines(results, tasks)
    rows.append(_untuned(results, tasks))
    paper = {"float32": "madam", "12 bits and a sign": "paper12", "8 bits and a sign": "paper8"}
    for title, names in (("Madam, the paper's", paper), ("Madam, ours", crossing.OURS_NAMED)):
        for bits, variant in names.items():
            found = [f"{task}_{variant}" for task in tasks]
            ours += [record for name in found for record in results.of(name)]
            rows.append((f"{title}, {bits}", *(results.ours(name) for name in found)))
    settings = ", ".join(f"{name} {value:g}" for name, value in crossing.OURS.items())
    note = (
        f"Ours: {settings}; its codes are signed ladders. The paper's: its rule with a bound of 3 on every task, "
        "its codes with the ladders and the steps of its classifiers, and a sign beside the bits. lr is 0.01 with a "
        "cosine schedule; for the paper's codes 0.016, at 12 bits in steps down to 0.001. The baselines are the best "
        "points of their grids, by the first seed on the test set itself; for AdamW also the one point that is the "
        "best for all tasks, by the mean logarithm. Lower is better."
    )
    return Table("One setting for all", note, ("", *(TITLES[task] for task in tasks)), rows, ours)


def _baselines(results: Results, tasks: list[str]) -> tuple[list[tuple[str, ...]], list[object]]:
    """A row each for SGD and AdamW, with the best point of every task's grid; and the records."""
    rows: list[tuple[str, ...]] = []
    ours: list[object] = []
    for kind, title in (("sgd", "SGD, tuned"), ("adamw", "AdamW, tuned")):
        cells = []
        for task in tasks:
            names = _grid(task, kind)
            found = [name for name in names if results.of(name)]
            ours += found
            best = min(found or names[:1], key=results.first)
            lr, decay = best.rsplit("_", 2)[1:]
            missing = f", {len(found)} of {len(names)} points" if len(found) < len(names) else ""
            cells.append(f"{results.ours(best)} at lr {lr}, decay {decay}{missing}" if found else results.ours(best))
        rows.append((title, *cells))
    return rows, ours


def _untuned(results: Results, tasks: list[str]) -> tuple[str, ...]:
    """AdamW at the best of those points that all tasks have in their grids and their records."""
    known = [task for task in tasks if any(results.of(name) for name in _grid(task, "adamw"))]
    points: dict[str, list[float]] = {}
    for task in known:
        for name in _grid(task, "adamw"):
            if results.of(name):
                points.setdefault(name.removeprefix(f"{task}_adamw_"), []).append(math.log(results.first(name)))
    common = {point: sum(logs) for point, logs in points.items() if len(logs) == len(known)}
    if not common:
        return ("AdamW, one setting for all", *["missing"] * len(tasks))
    best = min(common, key=lambda point: common[point])
    title = "AdamW, one setting for all: lr {}, decay {}".format(*best.split("_"))
    return (title, *(results.ours(f"{task}_adamw_{best}") for task in tasks))


def _grid(task: str, kind: str) -> list[str]:
    rates, decays, _ = crossing.TUNED[task, kind]
    return [f"{task}_{kind}_{lr:g}_{decay:g}" for lr in rates for decay in decays]


def _names(task: str) -> list[str]:
    variants = [f"{task}_{variant}" for variant in (*crossing.VARIANTS, *crossing.ONLY_CIFAR)]
    return [*variants, *_grid(task, "sgd"), *_grid(task, "adamw")]


TABLES = {"ours": ours_table, "crossing": crossing_table}
