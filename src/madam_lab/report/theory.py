"""The theory's figures and tables: angles during training, gradients that break down, the largest lr that helps."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from madam_lab.report.chart import Series, line_chart
from madam_lab.report.numbers import Results
from madam_lab.report.tables import Table
from torchmadam.theory import GAUSSIAN_COSINE

NETWORKS = {"tanh": "tanh perceptron", "leaky_relu": "leaky-ReLU perceptron", "resnet18": "narrow ResNet-18"}
RULES = ("sign rule", "layer-wise", "gradient descent")
DIRECTIONS = ("sign rule", "layer-wise", "random signs")
_AT = 0.01  # the relative step size of the table, Madam's default lr

Numbers = dict[tuple[Any, ...], list[dict[str, float]]]


def _grouped(results: Results, study: str, *names: str) -> Numbers:
    """The points of all seeds of a study, by the values of some of their entries."""
    found: Numbers = {}
    for record in results.study(study):
        for point in record["points"]:
            found.setdefault(tuple(point[name] for name in names), []).append(point)
    return found


def _median(points: list[dict[str, float]], value: Callable[[dict[str, float]], float]) -> float:
    return statistics.median(value(p) for p in points)


def _seeds(results: Results, study: str) -> str:
    count = len(results.study(study))
    return "one network" if count == 1 else f"median of {count} networks"


# ---- gradients that break down


def _share(point: dict[str, float]) -> float:
    return point["worst"] / point["trust"]


def breakdown(results: Results, network: str, direction: str | None = None) -> str | None:
    """Measured breakdown over what the product allows, against the size of the step.

    A line for every depth, with steps in one direction; or, without a direction, a line for every direction.
    """
    study = f"breakdown_{network}"
    found = _grouped(results, study, "direction", "depth", "size")
    if not found:
        return None
    keys = [k for k in found if direction in (None, k[0])]
    lines = list(dict.fromkeys(k[:2] for k in keys))
    series = []
    for i, (kind, depth) in enumerate(lines):
        own = sorted((k for k in keys if k[:2] == (kind, depth)), key=lambda k: float(k[2]))
        points = [(k[2], _median(found[k], _share)) for k in own]
        tips = [
            f"{_median(found[k], lambda p: p['worst']):.3g} at steps of {k[2]:g}, where the product is "
            f"{_median(found[k], lambda p: p['trust']):.3g}"
            for k in own
        ]
        name = kind if direction is None else f"{depth} layers" if i == len(lines) - 1 else f"{depth}"
        series.append(Series(name, points, tips=tips, shade=None if direction is None else (i + 1) / len(lines)))
    ends = min(k[2] for k in keys), max(k[2] for k in keys)
    series.append(Series("assumed at most", [(ends[0], 1.0), (ends[1], 1.0)], dashed=True))
    what = "three directions" if direction is None else f"direction: {direction}"
    return line_chart(
        series,
        title=f"Does deep relative trust hold? {NETWORKS[network]}",
        note=f"Worst layer's breakdown / product; {what}; digits, {_seeds(results, study)}",
        x_label="relative size of the step, the same in every layer",
        y_label="measured / product",
        x_log=True,
        y_log=True,
        y_range=(1e-2, 1e3),
    )


def breakdown_table(results: Results) -> Table:
    """Measured breakdown over the product at steps of a hundredth."""
    rows = []
    for network, title in NETWORKS.items():
        found = _grouped(results, f"breakdown_{network}", "depth", "direction", "size")
        for depth in dict.fromkeys(k[0] for k in found):
            cells = [found.get((depth, direction, _AT)) for direction in DIRECTIONS]
            shown = ["" if cell is None else f"{_median(cell, _share):.2g}" for cell in cells]
            rows.append((title, f"{depth}", *shown))
    note = f"Breakdown of the worst layer / what the product allows, at steps of {_AT:g}; above 1 the assumption fails."
    return Table("Deep relative trust", note, ("network", "layers", *DIRECTIONS), rows, rows)


# ---- the largest lr that helps


def largest_lr(results: Results, network: str) -> str | None:
    """The largest lr that decreased the loss in one step, and the bound, against depth."""
    study = f"largest_lr_{network}"
    found = _grouped(results, study, "rule", "depth")
    if not found:
        return None
    series = []
    for rule in RULES:
        own = sorted((k for k in found if k[0] == rule), key=lambda k: int(k[1]))
        for what in ("lr", "bound"):
            values = {k: [p[what] for p in found[k]] for k in own}
            points = [(k[1], statistics.median(values[k])) for k in own]
            said = "the bound is " if what == "bound" else ""
            tips = [
                f"{said}{y:.3g} with {k[1]} layers ({min(values[k]):.3g} to {max(values[k]):.3g})"
                for k, (_, y) in zip(own, points, strict=True)
            ]
            series.append(Series(rule, points, tips=tips, dashed=what == "bound"))
    return line_chart(
        series,
        title=f"The largest lr that helps: {NETWORKS[network]}s",
        note=f"One full-batch step on digits, {_seeds(results, study)}; dashed: below it the theorem promises descent",
        x_label="layers",
        y_label="learning rate",
        x_log=True,
        y_log=True,
    )


def largest_table(results: Results) -> Table:
    """The largest lr that helped, and in how many networks it was above the bound."""
    rows = []
    for network in ("tanh", "leaky_relu"):
        found = _grouped(results, f"largest_lr_{network}", "depth", "rule")
        for depth in dict.fromkeys(k[0] for k in found):
            cells = []
            for rule in RULES:
                points = found[depth, rule]
                lr, bound = (statistics.median(p[what] for p in points) for what in ("lr", "bound"))
                kept = sum(p["lr"] >= p["bound"] for p in points)
                short = "" if kept == len(points) else f" ({kept} of {len(points)})"
                cells.append(f"{lr:.2g} / {bound:.2g}{short}")
            rows.append((NETWORKS[network], f"{depth}", *cells))
    note = (
        "Largest lr that decreased the loss in one step / bound, medians; in brackets, where it is not all of them, in "
        "how many networks the loss fell up to the bound, as promised."
    )
    return Table("The largest lr that helps", note, ("network", "layers", *RULES), rows, rows)


# ---- what a monitor saw


def _over_layers(seen: Mapping[str, Any], name: str) -> list[float]:
    return [layer[name] for layer in seen["layers"].values() if layer.get(name) is not None]


def angles(results: Results, recipe: str) -> str | None:
    """Cos gamma of a run's layers against epoch, and 2/pi."""
    record = next(iter(results.of(recipe)), None)
    watched = [seen for seen in (record or {}).get("trust", []) if _over_layers(seen, "cosine")]
    if not watched:
        return None
    kinds: dict[str, Callable[[list[float]], float]] = {
        "smallest layer": min, "median layer": statistics.median, "largest layer": max
    }  # fmt: skip
    series = [
        Series(name, [(seen["epoch"], pick(_over_layers(seen, "cosine"))) for seen in watched])
        for name, pick in kinds.items()
    ]
    last = watched[-1]["epoch"]
    series.append(Series("2/π", [(0.0, GAUSSIAN_COSINE), (last, GAUSSIAN_COSINE)], dashed=True))
    return line_chart(
        series,
        title=f"cos gamma during training: {recipe}",
        note=f"Angle of |g| and |W|, {len(watched[0]['layers'])} layers, one seed; 2/π is that of Gaussian numbers",
        x_label="epoch",
        y_label="cos gamma",
        y_range=(0.0, 1.0),
        dots=False,
    )


def codes_moving(results: Results, recipe: str) -> str | None:
    """How many codes move in a step, change sign, and sit at the ends of their ladder, against epoch."""
    record = next(iter(results.of(recipe)), None)
    watched = [seen for seen in (record or {}).get("trust", []) if _over_layers(seen, "moved")]
    if not watched:
        return None
    names = {
        "moved": "move in a step",
        "flips": "change sign",
        "upper": "at upper end",
        "lower": "at lower end",
    }
    series = [
        Series(title, [(seen["epoch"], 100 * statistics.fmean(_over_layers(seen, name))) for seen in watched])
        for name, title in names.items()
    ]
    rungs = statistics.median(statistics.fmean(_over_layers(seen, "rungs")) for seen in watched)
    return line_chart(
        series,
        title=f"How codes move: {recipe}",
        note=f"Mean over layers, one seed; a step moves a code by {rungs:.2g} rungs on average",
        x_label="epoch",
        y_label="% of weights",
        dots=False,
    )


def trust_table(results: Results) -> Table:
    """What monitors saw, a run a row."""
    rows = []
    for name in watched_runs(results):
        record = results.of(name)[0]
        seen = [s for s in record["trust"] if _over_layers(s, "cosine")]
        if not seen:
            continue
        middle = [statistics.median(_over_layers(s, "cosine")) for s in seen]
        least = min(x for s in seen for x in _over_layers(s, "cosine"))
        sizes = [statistics.median(_over_layers(s, "relative_size")) / s["lr"] for s in seen if s["lr"]]
        flips = statistics.fmean(x for s in seen for x in _over_layers(s, "flips"))
        moved = [x for s in seen for x in _over_layers(s, "moved")]
        cells = (f"{middle[0]:.2f}", f"{statistics.median(middle):.2f}", f"{middle[-1]:.2f}", f"{least:.2f}")
        codes = f"{100 * statistics.fmean(moved):.0f} %" if moved else ""
        rows.append((name, *cells, f"{statistics.median(sizes):.2g}", f"{100 * flips:.2g} %", codes))
    note = "cos gamma of the median layer at the first look, over the run and at the last; of any layer at any look."
    head = ("run", "first", "median", "last", "least", "step / lr", "flips a step", "codes that move")
    return Table("Angles during training", note, head, rows, rows)


def watched_runs(results: Results) -> list[str]:
    """Recipes with a monitor that there are records of; smoke runs and overridden ones are not shown."""
    return [name for name in sorted(results.by_recipe) if "trust" in results.of(name)[0] and "+" not in name]


def figures(results: Results) -> list[str | None]:
    """All of the theory's figures that there are records for."""
    runs = watched_runs(results)
    return [
        *(largest_lr(results, network) for network in ("tanh", "leaky_relu")),
        *(angles(results, name) for name in runs),
        *(codes_moving(results, name) for name in runs),
        *(breakdown(results, network, kind) for network in ("tanh", "leaky_relu") for kind in DIRECTIONS[::2]),
        breakdown(results, "resnet18"),
    ]


TABLES = {"breakdown": breakdown_table, "largest_lr": largest_table, "trust": trust_table}
