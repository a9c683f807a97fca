"""How wide the plateau of good learning rates is: the learning-rate figure as numbers."""

import math
from collections.abc import Mapping

from madam_lab.report.figures import COMPARED, SCHEDULES, TASK_TITLES, by_rate
from madam_lab.report.numbers import Results
from madam_lab.report.tables import Table

WORSE = 1.25  # what still counts as good, in multiples of the best result


def plateau(found: Mapping[float, float], worse: float = WORSE) -> tuple[float, bool]:
    """How many decades of learning rates around the best one give at most ``worse`` times its result.

    Between two rates the logarithm of the result is taken to be linear in that of the rate. And whether the plateau
    reaches the end of the grid, where it may go on.
    """
    rates = sorted(found)
    most = math.log(worse) + math.log(max(min(found.values()), 1e-12))
    heights = [math.log(max(found[lr], 1e-12)) - most for lr in rates]
    best = heights.index(min(heights))
    width, open_ended = 0.0, False
    for step in (-1, 1):
        at = best
        while 0 <= at + step < len(rates) and heights[at + step] <= 0:
            width += abs(math.log10(rates[at + step] / rates[at]))
            at += step
        if not 0 <= at + step < len(rates):
            open_ended = True
        elif math.isfinite(heights[at + step]):
            share = heights[at] / (heights[at] - heights[at + step])
            width += share * abs(math.log10(rates[at + step] / rates[at]))
    return width, open_ended


def plateau_table(results: Results) -> Table:
    """A row a task, a column an optimiser."""
    rows = []
    for task, title in TASK_TITLES.items():
        for schedule, how in SCHEDULES.items():
            found = [by_rate(results, task, kind, schedule) for kind in COMPARED]
            if any(found):
                rows.append((f"{title}, {how}", *(_cell(each) for each in found)))
    note = (
        f"Decades of learning rates whose result is within {WORSE:g} times the best of the same optimiser, and the "
        "best rate. Five rates a decade apart; they stay constant, or fall to zero by a cosine, or stay and what is "
        "evaluated is an average of the weights. In between results are interpolated, and where a rate at the grid's "
        "end is still good there may be more. Madam by the paper's rule, and ours."
    )
    return Table("How wide is the plateau?", note, ("", *COMPARED.values()), rows, rows)


def _cell(found: Mapping[float, float]) -> str:
    if not found:
        return "missing"
    width, open_ended = plateau(found)
    best = min(found, key=lambda lr: found[lr])
    return f"{width:.1f}{' or more' if open_ended else ''}, at {best:g}"


TABLES = {"plateau": plateau_table}
