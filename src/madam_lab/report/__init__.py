"""Tables and pictures made from records, and nothing else."""

from collections.abc import Sequence
from pathlib import Path

from madam_lab.report.numbers import Results
from madam_lab.report.page import page
from madam_lab.report.tables import fill_in


def write(folder: Path, target: Path, tables: Sequence[Path]) -> list[Path]:
    """Write the page, and fill in the marked tables of those Markdown files that are there; return what was written."""
    results = Results(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(results), encoding="utf-8")
    written = [target]
    for path in tables:
        if path.exists():
            fill_in(path, results)
            written.append(path)
    return written
