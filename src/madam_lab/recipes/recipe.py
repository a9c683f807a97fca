"""What a recipe is, and the register of all of them."""

import difflib
import fnmatch
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from madam_lab.recipes.paper import PAPER, Paper
from torchmadam import LadderFormat

OPTIMISERS = ("sgd", "adam", "adamw", "madam", "prodigy", "schedule_free_adamw", "schedule_free_radam")
# The learning rate from an epoch on, counted from 0: ((0, 0.01), (100, 0.001)).
Steps = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Recipe:
    """One training run, but for its seed. A variant changes one line: ``replace(cifar10_madam(), epochs=100)``.

    Attributes:
        task: of :mod:`madam_lab.tasks`.
        epochs, batch: the budget.
        optimiser: one of ``OPTIMISERS``.
        schedule: the learning rate, as steps; "cosine" or "linear" goes from ``lr`` to zero.
        lr: the learning rate that "cosine" and "linear" start from; with steps, none.
        arguments: of the optimiser, the learning rate apart.
        ladder: the number system of the weights; None: float32.
        conversion: arguments of ``to_ladder_``.
        model: arguments of the task's model.
        clip: the largest norm of the whole gradient.
        precision: of the forward and backward passes on a GPU, "bf16" or "float32", whose matrix products are TF32
            there; a CPU computes in float32, unless it is told to compile (``--compile``).
        monitor: after how many steps a :class:`torchmadam.theory.TrustMonitor` looks again; None: there is none. It
            changes no weight on a CPU; on a GPU a step that is looked at runs outside of the CUDA graph.
        warm_up: epochs in which the learning rate climbs from zero to the schedule's; None: none.
        scales: a hash of the file whose tensors lend Madam their scales (``--scales``); None: there is none.
        floor: the smallest weight that Madam may leave behind, as a share of the clamp sigma*; None: there is none.
        average: the decay, a step, of an average of the weights to evaluate with; None: there is none.
        recent: for an average whose memory grows, the share of all steps so far that it remembers.
        smoke: a tiny run that shows that the recipe works.
        name, paper: given by the register: what everybody calls it, and the number to compare with.
    """

    task: str
    epochs: int
    batch: int
    optimiser: str
    schedule: Steps | str
    lr: float | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ladder: LadderFormat | None = None
    conversion: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    clip: float | None = None
    precision: str = "bf16"
    monitor: int | None = None
    floor: float | None = None
    warm_up: int | None = None
    scales: str | None = None
    average: float | None = None
    recent: float | None = None
    smoke: bool = False
    name: str = ""
    paper: Paper | None = None

    def __post_init__(self) -> None:
        """Refuse what no run could be made of."""
        for name in ("epochs", "batch", "monitor"):
            value = getattr(self, name)
            if name == "monitor" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number above 0")
        for name, known in (("precision", ("bf16", "float32")), ("optimiser", OPTIMISERS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; use one of {', '.join(known)}")
        for name in ("arguments", "conversion", "model"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"{name} is {getattr(self, name)!r}; set one of its entries, such as {name}.bound=2")
        self._check_rates()
        if self.conversion and self.ladder is None:
            raise ValueError(f"conversion is {dict(self.conversion)!r}, and there is no ladder to convert to")
        if self.floor is not None and not (self.optimiser == "madam" and self.ladder is None and 0 < self.floor < 1):
            raise ValueError(f"floor is {self.floor!r}; it is a share of the clamp, and of Madam on floats")
        if self.average is not None and self.recent is not None:
            raise ValueError(f"average is {self.average!r} and recent is {self.recent!r}; a run has one average")
        if self.scales is not None and self.optimiser != "madam":
            raise ValueError(f"{self.name}: only Madam has scales to take from a file, and this is {self.optimiser}")
        if self.ladder is not None and not isinstance(self.ladder, LadderFormat):
            raise ValueError(f"ladder is {self.ladder!r}; give a LadderFormat, or a preset's name to --set")

    def _check_rates(self) -> None:
        """A schedule has rates of its own, or a name and one rate to begin with."""
        if isinstance(self.schedule, str):
            if self.schedule not in ("cosine", "linear"):
                raise ValueError(f"schedule {self.schedule!r} is unknown; use steps, 'cosine' or 'linear'")
            if self.lr is None:
                raise ValueError(f"a {self.schedule!r} schedule needs lr=")
            rates: list[Any] = [self.lr]
        else:
            if self.lr is not None:
                raise ValueError(
                    f"lr is {self.lr!r}, and the schedule has rates of its own; "
                    f"set schedule=, such as ((0, {self.lr!r}),)"
                )
            try:
                starts, rates = (list(column) for column in zip(*self.schedule, strict=True))
            except (TypeError, ValueError):
                starts = []
            if starts[:1] != [0] or sorted(set(starts)) != starts:
                raise ValueError(
                    f"schedule is {self.schedule!r}; it has pairs of an epoch, the first one 0, and a rate"
                )
        for name, values, least in (("lr", rates, 0.0), ("clip", [self.clip], 1e-30), ("warm_up", [self.warm_up], 0)):
            for value in values:
                if value is not None and not (isinstance(value, int | float) and least <= value < math.inf):
                    raise ValueError(f"{name} is {value!r}; it must be a positive number")

    def lr_at(self, progress: float) -> float:
        """The learning rate after so many epochs, fractions included."""
        climbed = min(1.0, progress / self.warm_up) if self.warm_up else 1.0
        return climbed * self._scheduled(progress)

    def _scheduled(self, progress: float) -> float:
        if isinstance(self.schedule, str):
            first, left = self.lr or 0.0, max(0.0, 1 - progress / self.epochs)
            return first * (left if self.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left)))
        return [lr for start, lr in self.schedule if start <= progress][-1]

    def settings(self) -> dict[str, Any]:
        """Everything that determines the run, but the seed, as plain values."""
        values = asdict(self)
        for name in ("name", "paper"):
            del values[name]
        for name in ("monitor", "floor", "warm_up", "scales", "average", "recent"):
            if values[name] is None:  # as in records from before there was one
                del values[name]
        found: dict[str, Any] = plain(values)
        return found

    def as_smoke(self) -> "Recipe":
        """The same recipe on a handful of examples and a tiny model: two epochs, the schedule's ends."""
        steps = self.schedule
        if not isinstance(steps, str):
            steps = ((0, steps[0][1]), (1, steps[-1][1]))
        monitor = None if self.monitor is None else 3
        warm_up = None if self.warm_up is None else 1
        return replace(
            self, epochs=2, batch=6, schedule=steps, monitor=monitor, warm_up=warm_up, smoke=True,
            name=f"{self.name}+smoke", paper=None,
        )  # fmt: skip

    def overridden(self, changes: Mapping[str, Any]) -> "Recipe":
        """With some fields changed, and a name that says so. ``arguments.bound=2`` reaches into a mapping."""
        values: dict[str, Any] = {}
        known = {f.name for f in fields(self)} - {"name", "paper", "smoke"}
        for key, value in changes.items():
            name, _, inner = key.partition(".")
            if name not in known:
                raise ValueError(f"a recipe has no field {name!r}; it has {', '.join(sorted(known))}")
            if inner:
                held = values.get(name, getattr(self, name))
                if not isinstance(held, Mapping):
                    raise ValueError(f"{key}: {name} is {held!r}, which has nothing inside to set")
                values[name] = {**held, inner: value}
            elif name == "ladder" and isinstance(value, str):
                values[name] = LadderFormat.preset(value)
            else:
                values[name] = value
        suffix = ",".join(f"{key}={value}" for key, value in sorted(changes.items()))
        suffix = re.sub(r"[^\w.=,+-]", "_", suffix)  # it becomes the name of a folder
        return replace(self, **values, paper=None, name=f"{self.name}+{suffix}" if suffix else self.name)


def plain(value: Any) -> Any:
    """Mappings as dicts and sequences as lists, all the way down: as JSON would give them back."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


_REGISTER: dict[str, Callable[[], Recipe]] = {}


def recipe(make: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """Register a function under its own name."""
    return register(make.__name__, make)


def register(name: str, make: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """Register a function that makes a recipe, which gets this name."""
    if name in _REGISTER:
        raise ValueError(f"there are two recipes called {name}")

    def named() -> Recipe:
        return replace(make(), name=name, paper=PAPER.get(name))

    named.__name__, named.__doc__ = name, make.__doc__
    _REGISTER[name] = named
    return named


def names(patterns: Iterable[str] = ("*",)) -> list[str]:
    """The registered names that match any of these patterns, in the order in which they were registered."""
    return matching(patterns, _REGISTER)


def matching(patterns: Iterable[str], known: Collection[str]) -> list[str]:
    """Those of some known names that match any of these patterns, in their order; a pattern must match something."""
    found: dict[str, None] = {}
    for pattern in patterns:
        fitting = [name for name in known if fnmatch.fnmatchcase(name, pattern)]
        if not fitting:
            close = difflib.get_close_matches(pattern, known, n=3)
            hint = f"; did you mean {', '.join(close)}?" if close else "; `madam list` shows them all"
            raise KeyError(f"no recipe matches {pattern!r}{hint}")
        found.update(dict.fromkeys(fitting))
    return list(found)


def get(name: str) -> Recipe:
    """The recipe of this name."""
    return _REGISTER[names([name])[0]]()
