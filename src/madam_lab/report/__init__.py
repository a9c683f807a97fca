"""Tables and pictures made from records, and nothing else."""

from collections.abc import Sequence
from pathlib import Path

from madam_lab.recipes.paper import LEARNING_RATES
from madam_lab.report import (
    controls,
    conversion,
    crossing,
    effort,
    gan,
    language,
    photographs,
    plateau,
    small,
    theory,
)
from madam_lab.report.figures import learning_rates
from madam_lab.report.numbers import Results
from madam_lab.report.page import page
from madam_lab.report.tables import PARTS, TABLES, fill_in

# The task of the picture on top of the README: the first of these whose figure is complete.
_PICTURED = ("wikitext2", "cifar10", "cifar100", "digits")


def write(
    folder: Path,
    target: Path,
    tables: Sequence[Path],
    picture: Path | None = None,
    theory_picture: Path | None = None,
) -> list[Path]:
    """Write the page and the pictures, fill in the marked tables of those Markdown files that are there.

    Returns what was written.
    """
    results = Results(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(results), encoding="utf-8")
    written = [target]
    known = TABLES | PARTS
    for module in (controls, conversion, crossing, effort, gan, language, photographs, plateau, small, theory):
        known |= module.TABLES
    for path in tables:
        if path.exists():
            fill_in(path, results, known)
            written.append(path)
    pictures = (picture, _learning_rate_picture(results)), (theory_picture, theory.largest_lr(results, "tanh"))
    for where, drawn in pictures:
        if where is not None and drawn is not None:
            where.parent.mkdir(parents=True, exist_ok=True)
            where.write_text(drawn, encoding="utf-8")
            written.append(where)
    return written


def _learning_rate_picture(results: Results) -> str | None:
    for task in _PICTURED:
        names = [f"{task}_lr_{kind}_{lr:g}" for kind in ("sgd", "adam", "madam") for lr in LEARNING_RATES]
        if all(results.of(name) for name in names):
            return learning_rates(results, task)
    return None
