"""Controlled runs where a cell differs from the paper's: what was changed, and what it changed."""

from madam_lab.recipes import controls
from madam_lab.report.numbers import Results
from madam_lab.report.tables import Table


def controls_table(results: Results) -> Table:
    """One row a hypothesis, beside the run that it is compared with."""
    runs = [
        ("12-bit Madam, CIFAR-100, 100 epochs", controls.SHORT),
        *((f"… {name.replace('_', ' ')}", f"{controls.SHORT}_{name}") for name in controls.HYPOTHESES),
        ("SGD, CIFAR-10, 300 epochs", "cifar10_sgd"),
        ("… float32", "cifar10_sgd_float32"),
    ]
    rows = [(title, results.ours(name, "train"), results.ours(name)) for title, name in runs]
    ours = [r for _, name in runs if name != "cifar10_sgd" for r in results.of(name)]
    note = "The paper's recipe, and below it the same with one thing changed. Errors in per cent."
    return Table("What is it that differs?", note, ("", "train", "test"), rows, ours)


TABLES = {"controls": controls_table}
