"""The study of conversion as a table: the loss before weights become codes, at the switch, and after training on.

examples/hf/convert.py makes its records.
"""

import statistics
from typing import Any

from madam_lab import records
from madam_lab.report.numbers import Results
from madam_lab.report.tables import Table

(STUDY,) = records.OF_EXAMPLES
KINDS = {
    "AdamW": "AdamW goes on, float32",
    "float32": "Madam, float32",
    "paper12": "Madam, 12-bit codes",
    "signed8": "Madam, signed 8-bit codes",
}


def conversion_table(results: Results) -> Table:
    """One row a kind of weights and learning rate; means over the seeds."""
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    studied = results.study(STUDY)
    for record in studied:
        for point in record["points"]:
            found.setdefault((point["kind"], point["lr"]), []).append(point)
    rows = [
        (KINDS[kind], f"{lr:g}", *(_cell([p[when] for p in found[kind, lr]]) for when in ("before", "switch", "after")))
        for kind, lr in sorted(found, key=lambda key: (list(KINDS).index(key[0]), -key[1]))
    ]
    note = f"Mean of {len(studied)} seed{'s' if len(studied) != 1 else ''}; lower is better."
    return Table("Going on from trained weights", note, ("", "lr", "before", "at the switch", "after"), rows, studied)


def _cell(losses: list[float | None]) -> str:
    """A mean, and half the range where there are several seeds."""
    finite = [loss for loss in losses if loss is not None]
    if len(finite) < len(losses):
        return "diverged"
    spread = f" ±{(max(finite) - min(finite)) / 2:.4f}" if len(finite) > 1 else ""
    return f"{statistics.fmean(finite):.4f}{spread}"


TABLES = {"conversion": conversion_table}
