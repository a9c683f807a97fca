"""What a study is, and the register of all of them."""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from madam_lab import records
from madam_lab.recipes import matching
from madam_lab.recipes.recipe import plain

# One thing that was measured: numbers and words by name, the same names in all points of a study.
Point = dict[str, float | int | str]


@dataclass(frozen=True)
class Study:
    """A function that measures something in a minute or two, on a CPU, and its settings; all but the seed.

    Attributes:
        name: what everybody calls it.
        measure: called with ``seed=`` and the options; returns points.
        options: everything that determines what is measured.
        tiny: the options that a smoke run has instead.
        smoke: whether this is one.
    """

    name: str
    measure: Callable[..., list[Point]]
    options: Mapping[str, Any]
    tiny: Mapping[str, Any] = field(default_factory=dict)
    smoke: bool = False

    def settings(self) -> dict[str, Any]:
        """Everything that determines the result, but the seed, as plain values."""
        found: dict[str, Any] = plain({**self.options, "smoke": self.smoke})
        return found

    def as_smoke(self) -> "Study":
        """The same in seconds, to show that it works."""
        return replace(self, options={**self.options, **self.tiny}, smoke=True, name=f"{self.name}+smoke")

    def overridden(self, changes: Mapping[str, Any]) -> "Study":
        """With some options changed, and a name that says so."""
        for key in changes:
            if key not in self.options:
                raise ValueError(f"{self.name} has no option {key!r}; it has {', '.join(sorted(self.options))}")
        suffix = re.sub(r"[^\w.=,+-]", "_", ",".join(f"{k}={v}" for k, v in sorted(changes.items())))
        return replace(
            self, options={**self.options, **changes}, name=f"{self.name}+{suffix}" if suffix else self.name
        )  # fmt: skip

    def run(
        self, seed: int, results: Path = records.RESULTS, overrides: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Measure, and write the record."""
        provenance, started, clock = records.provenance(), datetime.now(UTC), time.monotonic()
        record = {
            "schema": records.SCHEMA,
            "study": self.name,
            "settings": self.settings(),
            "overrides": overrides or {},
            "seed": seed,
            "points": self.measure(seed=seed, **self.options),
            "seconds": round(time.monotonic() - clock, 2),
            "started": started.isoformat(timespec="seconds"),
            "device": "CPU",
            **provenance,
        }
        records.write(record, results)
        return record


_REGISTER: dict[str, Study] = {}


def register(
    name: str, measure: Callable[..., list[Point]], options: Mapping[str, Any], tiny: Mapping[str, Any]
) -> None:
    """Register a study under this name."""
    if name in _REGISTER:
        raise ValueError(f"there are two studies called {name}")
    _REGISTER[name] = Study(name, measure, options, tiny)


def names(patterns: Iterable[str] = ("*",)) -> list[str]:
    """The registered names that match any of these patterns, in the order in which they were registered."""
    return matching(patterns, _REGISTER)


def get(name: str) -> Study:
    """The study of this name."""
    return _REGISTER[names([name])[0]]
