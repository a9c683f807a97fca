"""Numbers from records: means, ranges, and whether they can be trusted."""

import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from madam_lab import recipes, records, studies

MISSING = "missing"
# Of the library: since then biases and other vectors are not clamped, if weights may cross zero.
_UNCLAMPED = (0, 2)


class Results:
    """The records of a folder, by recipe and by study; its benchmarks, one a device; the runs of examples/gpt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.by_recipe: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.by_study: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for record in records.read_all(folder):
            kind = self.by_study if "study" in record else self.by_recipe
            kind[records.name_of(record)].append(record)
        self.benchmarks, self.language = (
            [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{apart}/*.json"))]
            for apart in records.APART
        )

    def of(self, name: str) -> list[dict[str, Any]]:
        """The records of a recipe, in order of their seeds."""
        return sorted(self.by_recipe.get(name, []), key=lambda record: record["seed"])

    def study(self, name: str) -> list[dict[str, Any]]:
        """The records of a study, in order of their seeds."""
        return sorted(self.by_study.get(name, []), key=lambda record: record["seed"])

    def studied(self, name: str) -> str:
        """Whether a study was made, as a cell of a table; marked if no commit has its code."""
        found = self.study(name)
        if not found:
            return MISSING
        mark = "" if all(is_traceable(record) for record in found) else "*"
        return f"measured{mark} ({len(found)} seed{'s' if len(found) > 1 else ''})"

    def picture(self, record: dict[str, Any]) -> bytes | None:
        """The PNG file beside a record, if there is one."""
        path = records.picture_of(record["recipe"], record["seed"], self.folder)
        return path.read_bytes() if path.exists() else None

    def values(self, name: str, which: str = "test") -> list[float]:
        """The test (or train) metric of every seed that finished."""
        finished = [record[which] for record in self.of(name) if not has_diverged(record)]
        return [float(value) for value in finished if value is not None]  # a GAN has no training error

    def mean(self, name: str) -> float | None:
        """Mean of the test metric; infinite if a seed diverged, None where there is no record."""
        found = self.of(name)
        if any(map(has_diverged, found)):
            return math.inf
        return statistics.fmean(self.values(name)) if found else None

    def first(self, name: str) -> float:
        """What a point of a grid is chosen by: its first seed, which all points have; infinite if any seed diverged."""
        found = self.of(name)
        return float(found[0]["test"]) if found and not any(map(has_diverged, found)) else math.inf

    def ours(self, name: str, which: str = "test") -> str:
        """Our number as a cell of a table: mean, half the range, number of seeds; marked if no commit has its code."""
        found = self.of(name)
        if not found:
            return MISSING
        if diverged := sum(map(has_diverged, found)):
            return f"diverged ({diverged} of {len(found)})"
        values = self.values(name, which)
        if not values:
            return ""
        mark = "" if all(is_traceable(record) for record in found) else "*"
        if len(values) == 1:
            return f"{_short(values[0])}{mark} (1 seed)"
        return (
            f"{_short(statistics.fmean(values))} ±{_short((max(values) - min(values)) / 2)}{mark} ({len(values)} seeds)"
        )

    @staticmethod
    def paper(recipe: recipes.Recipe) -> str:
        """The paper's number for a recipe, as a cell."""
        return paper_cell(recipe.paper)


def has_diverged(record: dict[str, Any]) -> bool:
    """Whether a run ended without a result."""
    return bool(record["status"] == "diverged")


def is_traceable(record: dict[str, Any]) -> bool:
    """Whether a commit holds the code that made this record: the one it names, or one with the same source.

    True as well where there are no commits to ask: nothing is known against it, unless it was made by several sources.
    """
    if not record["dirty"]:
        return True
    if record["source"] == "mixed":
        return False
    return not records.knows_commits() or records.commit_with(record["source"]) is not None


def is_by_an_earlier_rule(record: dict[str, Any]) -> bool:
    """Whether this is a run of Madam whose rule the library no longer has."""
    settings = record["settings"]
    if settings.get("optimiser") != "madam":
        return False
    rule = settings["ladder"] or settings["arguments"]
    version = tuple(map(int, record["versions"]["torchmadam"].split(".")[:2]))
    return bool(rule.get("crossing")) and version < _UNCLAMPED


def paper_cell(paper: recipes.Paper | None, which: str = "test") -> str:
    """A number of the paper as a cell of a table; empty where it has none."""
    if paper is None:
        return ""
    value, spread = (paper.test, paper.test_range) if which == "test" else (paper.train, paper.train_range)
    if value is None:
        return ""
    return f"{value:g} ±{spread:g}" if spread else f"{value:g}"


def _short(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.1f}"


def problems(folder: Path) -> tuple[list[str], int]:
    """What is wrong with the records of a folder, and how many records there are."""
    found: list[str] = []
    paths = [path for path in sorted(folder.glob("*/*.json")) if path.parent.name not in records.APART]
    for path in paths:
        try:
            record = records.read(path)
        except records.RecordError as error:
            found.append(str(error))
            continue
        base = records.name_of(record).partition("+")[0]
        kind: Any = "study" if "study" in record else "recipe"
        register: Any = studies if kind == "study" else recipes
        if base in records.OF_EXAMPLES:
            continue
        if base not in register.names():
            found.append(f"{path}: there is no {kind} {base}")
            continue
        now = register.get(base).overridden(record["overrides"])
        now = now.as_smoke() if record["settings"].get("smoke") else now
        settings, then = now.settings(), record["settings"]
        if settings != then:
            changed = sorted(k for k in settings.keys() | then.keys() if settings.get(k) != then.get(k))
            found.append(f"{path}: the {kind} has changed since, in {', '.join(changed)}; run it again")
    return found, len(paths)
