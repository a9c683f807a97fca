"""Many runs, each in a process of its own: several at once, and the next one begun before the last one ends.

A run on a GPU spends its first seconds on imports, data and compilers, and small networks leave most of the GPU idle.
"""

import math
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from madam_lab import queue, records
from madam_lab.errors import EXPECTED, told
from madam_lab.queue import Outcome
from madam_lab.recipes import Recipe
from madam_lab.studies import Study
from madam_lab.trainer import Limits


@dataclass
class _Worker:
    """A run in progress.

    Attributes:
        label: its name and seed.
        process, pipe: where it is, and what it says: text to print, seconds left, its outcome.
        over: when it expects to end, of time.monotonic().
        outcome: what became of it, once it has said so.
    """

    label: str
    process: SpawnProcess
    pipe: Connection
    over: float = math.inf
    outcome: Outcome | None = None

    def listen(self, say: Callable[[str], None]) -> bool:
        """Take what it says; False when there is nothing more to come."""
        try:
            message = self.pipe.recv()
        except EOFError:
            return False
        if isinstance(message, str):
            say(message)
        elif isinstance(message, Outcome):
            self.outcome = message
        else:
            self.over = time.monotonic() + message
        return True


def work(
    recipes: Sequence[Recipe | Study],
    seeds: Sequence[int],
    *,
    at_once: int,
    ahead: float,
    results: Path = records.RESULTS,
    budget: float = math.inf,
    keep: Path | None = None,
    say: Callable[[str], None] = print,
    **how: Any,
) -> Outcome:
    """As :func:`madam_lab.queue.work`, with ``at_once`` runs side by side.

    When one says that it needs no more than ``ahead`` seconds, the next one begins. A run that fails is named, and
    the others go on; unless two fail before any has ended well, when nothing more is begun.
    """
    limits = Limits(deadline=time.monotonic() + budget)
    until = time.time() + budget  # which all processes know
    outcome = Outcome()
    waiting = deque((recipe, seed) for seed in seeds for recipe in recipes)
    workers: list[_Worker] = []
    never: list[str] = []
    told = False
    most = 2 * at_once if ahead else at_once  # one that said so may take longer
    with limits.watching_signals():
        while waiting or workers:
            soon = time.monotonic() + ahead
            if waiting and (limits.reached() or (len(outcome.failed) > 1 and not outcome.done)):
                for recipe, seed in waiting:
                    path = records.path_of(recipe.name, seed, results)
                    if path.exists():
                        queue.skip(outcome, recipe, seed, path, keep, say)
                    else:
                        never.append(_label(recipe, seed))
                waiting.clear()
            elif waiting and len(workers) < most and sum(w.over > soon for w in workers) < at_once:
                recipe, seed = waiting.popleft()
                path = records.path_of(recipe.name, seed, results)
                if path.exists():
                    queue.skip(outcome, recipe, seed, path, keep, say)
                else:
                    workers.append(_begun(recipe, seed, until, {"results": results, "keep": keep, **how}))
            else:
                if limits.signalled and not told:
                    told = True
                    for worker in workers:
                        worker.process.terminate()  # which makes a run save itself
                ready = wait([w.pipe for w in workers], timeout=0.5)
                for worker in [w for w in workers if w.pipe in ready]:
                    if not worker.listen(say):
                        workers.remove(worker)
                        _end(worker, outcome, say, limits.signalled)
    outcome.left += never  # after those that have begun, and go on first
    outcome.signalled = limits.signalled
    return outcome


def _label(recipe: Recipe | Study, seed: int) -> str:
    return f"{recipe.name} seed {seed}"


def _begun(recipe: Recipe | Study, seed: int, until: float, how: dict[str, Any]) -> _Worker:
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, recipe, seed, until, how))
    process.start()
    theirs.close()
    return _Worker(_label(recipe, seed), process, ours)


def _run(pipe: Connection, recipe: Recipe | Study, seed: int, until: float, how: dict[str, Any]) -> None:
    """What a process does."""

    def tell(message: Any) -> None:
        try:
            pipe.send(message)
        except OSError:  # nobody is there any more
            signal.raise_signal(signal.SIGTERM)  # which makes a run save itself

    try:
        tell(queue.work([recipe], [seed], budget=until - time.time(), say=tell, left=tell, **how))
    except EXPECTED as error:
        tell(f"{_label(recipe, seed)}: {told(error)}")


def _end(worker: _Worker, outcome: Outcome, say: Callable[[str], None], signalled: bool) -> None:
    worker.process.join()
    if worker.outcome is None and signalled:  # it had not got so far as to listen to signals
        outcome.left.append(worker.label)
    elif worker.outcome is None:
        say(f"{worker.label}: failed")
        outcome.failed.append(worker.label)
    else:
        for name in ("done", "skipped", "left"):
            getattr(outcome, name).extend(getattr(worker.outcome, name))
