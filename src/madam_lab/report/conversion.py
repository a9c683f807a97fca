"""The study of conversion as a table: the loss before weights become codes, at the switch, and after training on.

examples/hf/convert.py makes its records.
"""

import statistics
from typing import Any

from madam_lab import records
from madam_lab.report.numbers import Results
from madam_lab.report.tables import Table

(STUDY,) = records.OF_EXAMPLES
RULES = {"AdamW": "AdamW goes on", "Madam": "Madam, no decay", "Madam.paper": "the paper's Madam"}
KINDS = {
    "float32": "float32",
    "signed12": "signed 12-bit codes",
    "paper12": "the paper's 12-bit codes",
    "signed8": "signed 8-bit codes",
}
_WHEN = ("before", "switch", "after")


def conversion_table(results: Results) -> Table:
    """One row a kind of weights and learning rate; means over the seeds."""
    found: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    studied = results.study(STUDY)
    for record in studied:
        for point in record["points"]:
            found.setdefault((point["rule"], point["kind"], point["lr"]), []).append(point)
    rows = [
        (f"{RULES[rule]}, {KINDS[kind]}", f"{lr:g}", *(_cell([p[when] for p in points]) for when in _WHEN))
        for (rule, kind, lr), points in sorted(found.items(), key=_order)
    ]
    note = f"Mean of {len(studied)} seed{'s' if len(studied) != 1 else ''}; lower is better."
    return Table("Going on from trained weights", note, ("", "lr", "before", "at the switch", "after"), rows, studied)


def _order(item: tuple[tuple[str, str, float], Any]) -> tuple[int, int, float]:
    rule, kind, lr = item[0]
    return list(RULES).index(rule), list(KINDS).index(kind), -lr


def _cell(losses: list[float | None]) -> str:
    """A mean, and half the range where there are several seeds."""
    finite = [loss for loss in losses if loss is not None]
    if len(finite) < len(losses):
        return "diverged"
    spread = f" ±{(max(finite) - min(finite)) / 2:.4f}" if len(finite) > 1 else ""
    return f"{statistics.fmean(finite):.4f}{spread}"


TABLES = {"conversion": conversion_table}
