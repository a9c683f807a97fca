"""Many runs, one after another: skip what is done, stop in time, go on where it stopped."""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from madam_lab import ranks, records
from madam_lab.progress import Progress
from madam_lab.recipes import Recipe
from madam_lab.studies import Study
from madam_lab.trainer import Limits, Run, Stopped, kept_at


@dataclass
class Outcome:
    """What became of a queue."""

    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # of several processes; a single one ends with the first failure
    signalled: bool = False


def work(
    recipes: Sequence[Recipe | Study],
    seeds: Sequence[int],
    *,
    data: Path | None = None,
    results: Path = records.RESULTS,
    folder: Path = Path("runs"),
    budget: float = math.inf,
    save_every: float = 30.0,
    device: torch.device | None = None,
    overrides: dict[str, Any] | None = None,
    scales: Path | None = None,
    keep: Path | None = None,
    compiled: bool | None = None,
    quiet: bool = False,
    say: Callable[[str], None] = print,
    left: Callable[[float], None] | None = None,
) -> Outcome:
    """Run every recipe or study with every seed, the first seed of all of them first.

    A run whose record is there is not repeated. When the budget (in seconds) is spent, or a signal comes, the run in
    progress saves itself; the same call goes on from there. ``left`` is told how many seconds a run still needs.
    """
    limits = Limits(deadline=time.monotonic() + budget, save_every=save_every)
    outcome = Outcome()
    team = ranks.here()
    if not team.is_first:
        quiet, say = True, _silently
    with limits.watching_signals():
        for seed in seeds:
            for recipe in recipes:
                label = f"{recipe.name} seed {seed}"
                path = records.path_of(recipe.name, seed, results)
                if team.agreed(path.exists()):
                    skip(outcome, recipe, seed, path, keep, say)
                elif team.agreed(limits.reached()):
                    outcome.left.append(label)
                else:
                    lock = folder / recipe.name / f"{seed}.lock"
                    with _claim(lock) if team.is_first else nullcontext(True) as ours:
                        if not team.agreed(ours):
                            say(f"{label}: another process is at it")
                            outcome.left.append(label)
                            continue
                        if team.agreed(path.exists()):
                            skip(outcome, recipe, seed, path, keep, say)
                            continue
                        if isinstance(recipe, Study):  # short, so that it is never stopped half-way
                            record = team.agreed(recipe.run(seed, results, overrides) if team.is_first else None)
                            outcome.done.append(label)
                            say(described(record))
                            continue
                        if team.is_first:
                            records.check_writable(path)
                        progress = Progress(label, recipe.epochs, quiet, left)
                        try:
                            run = Run(
                                recipe, seed, data=data, device=device, folder=folder, results=results,
                                overrides=overrides, compiled=compiled, scales=scales, keep=keep,
                            )  # fmt: skip
                            record = run.train(limits, progress)
                        except Stopped:
                            outcome.left.append(label)
                            continue
                        finally:
                            progress.close()
                    outcome.done.append(label)
                    say(described(record))
    outcome.signalled = limits.signalled
    return outcome


def skip(
    outcome: Outcome, recipe: Recipe | Study, seed: int, path: Path, keep: Path | None, say: Callable[[str], None]
) -> None:
    """A run that was done before; says so if its weights were wanted, and nobody has kept them."""
    label = f"{recipe.name} seed {seed}"
    outcome.skipped.append(label)
    if keep is not None and isinstance(recipe, Recipe) and not kept_at(keep, recipe.name, seed).exists():
        say(f"{label}: done before, and its weights are not in {keep}; remove {path} to train it again")


@contextmanager
def _claim(path: Path) -> Iterator[bool]:
    """Whether a run is ours; a lock that its owner's death releases. Without such locks (Windows) it always is."""
    try:
        import fcntl
    except ImportError:
        yield True
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            if not _is_at(file, path):  # its owner has removed it since it was opened here
                continue
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)
            return


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _silently(_: str) -> None:
    """Say nothing: the first rank does."""


def described(record: dict[str, Any]) -> str:
    """One line about a finished run."""
    name = f"{records.name_of(record)} seed {record['seed']}"
    if "study" in record:
        return f"{name}: {len(record['points'])} points, {record['seconds']:.0f} s"
    if record["status"] == "diverged":
        return f"{name}: diverged after {len(record['curve'])} epochs"
    return f"{name}: {record['metric']} {record['test']:.2f} (train {record['train']:.2f}), {record['seconds']:.0f} s"
