"""One run of one recipe: a loop that can stop at any step and go on later as if it had not."""

import copy
import io
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from madam_lab import looks, optimisers, png, ranks, records
from madam_lab.progress import Progress
from madam_lab.recipes import Recipe
from madam_lab.scales import borrowing
from madam_lab.stepping import Stepper, settle
from madam_lab.tasks import TASKS
from madam_lab.tasks.task import Batch
from torchmadam import save, to_ladder_
from torchmadam.files import write_atomically

# What a run has to remember of its own past, beside weights, optimiser and random numbers.
_PROGRESS = ("epoch", "step", "seconds", "started", "devices", "curve", "codes", "trust", "best")
_COMPILED = "CPU, compiled"
# What an optimiser's groups have for a device, which those of a run that was begun on another one have otherwise.
_FOR_A_DEVICE = ("lr", "fused", "foreach", "capturable", "compile")


class Stopped(Exception):  # noqa: N818 (not an error: the run goes on another time)
    """The run was asked to stop, and has saved itself."""


@dataclass
class Limits:
    """When to stop, and how often to save."""

    deadline: float = math.inf  # of time.monotonic()
    save_every: float = 30.0  # seconds
    signalled: bool = False

    def reached(self) -> bool:
        """Whether the run has to leave now."""
        return self.signalled or time.monotonic() >= self.deadline

    @contextmanager
    def watching_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM make the run save and leave, instead of ending it at once."""

        def noted(number: int, frame: FrameType | None) -> None:
            self.signalled = True

        held = {number: signal.signal(number, noted) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in held.items():
                signal.signal(number, handler)


@contextmanager
def _named(recipe: Recipe, what: str) -> Iterator[None]:
    """An argument that nobody takes is a recipe's mistake, and not the program's."""
    try:
        yield
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        raise ValueError(f"{recipe.name}: mistaken {what}: {error}") from error


class Run:
    """A recipe with a seed, on a device. Its unfinished state lives in ``folder``, until its record is written."""

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        *,
        data: Path | None = None,
        device: torch.device | None = None,
        folder: Path = Path("runs"),
        results: Path = records.RESULTS,
        overrides: dict[str, Any] | None = None,
        compiled: bool | None = None,
        scales: Path | None = None,
        keep: Path | None = None,
    ) -> None:
        """``compiled``: also on a CPU (None: on a GPU only). ``scales``: the file that the recipe's scales come from.

        ``keep``: a folder for the trained weights.
        """
        self.recipe, self.seed, self.results = recipe, seed, results
        self.overrides = overrides or {}
        self.ranks = ranks.here()
        self.provenance = records.provenance()  # now: the files may change while it runs
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.compiled = self.device.type == "cuda" if compiled is None else compiled
        self.checkpoint = folder / recipe.name / f"{seed}.pt"
        if self.compiled and self.device.type == "cpu":
            _require_a_compiler()
        settle(self.device)
        if recipe.task not in TASKS:
            raise ValueError(f"task {recipe.task!r} is unknown; use one of {', '.join(TASKS)}")
        with _named(recipe, "model"):
            self.task = TASKS[recipe.task](
                data, self.device, batch=recipe.batch, seed=seed, smoke=recipe.smoke, **recipe.model
            )
        if self.task.takes_slices:
            self.task.rank, self.task.ranks, self.task.total = self.ranks.rank, self.ranks.world, self.ranks.total
        torch.manual_seed(seed)
        self.model = self.task.model()
        if recipe.scales is not None:
            recipe = borrowing(recipe, self.model, scales)
        if recipe.ladder is not None:
            # The paper's bound, where a recipe has none of its own, whatever the library's default is.
            with _named(recipe, "conversion"):
                to_ladder_(self.model, recipe.ladder, seed=seed, **{"bound": 3.0, **recipe.conversion})
        self.model.to(self.device)
        self.keep = keep
        with _named(recipe, "arguments"):
            self.optimiser = optimisers.build_optimiser(recipe, self.model, self.device, self.compiled)
        self.stepper = Stepper(recipe, self.task, self.model, self.optimiser, self.compiled)
        self.epoch, self.step, self.seconds = 0, 0, 0.0
        self.devices = [self._device_name()]  # one after the other
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.curve: list[dict[str, Any]] = []
        self.codes: list[dict[str, Any]] = []
        self.trust: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None
        # Dropout, apart from the initial weights, and on each rank its own.
        torch.manual_seed(seed + 1 + 1_000_003 * self.ranks.rank)

    def train(self, limits: Limits, progress: Progress) -> dict[str, Any]:
        """Train to the end and write the record; or save and raise :class:`Stopped`."""
        if self.ranks.agreed(self.checkpoint.exists()):
            self._restore()
        else:
            self._look_at_codes()
        if self.ranks.agreed(limits.reached()):  # it took long to begin, and the first step may, too
            raise Stopped
        clock, saved = time.monotonic(), time.monotonic()
        self.model.train()
        while self.epoch < self.recipe.epochs:
            for batch in self.task.epoch(self.epoch, self.step):
                self.stepper.set_lr(self.recipe.lr_at(self.epoch + self.step / self.task.steps))
                self._step(batch)
                self.step += 1
                now = time.monotonic()
                leaves, saves = self.ranks.agreed((limits.reached(), now - saved > limits.save_every))
                if leaves or saves:
                    clock = saved = self._pause(clock)
                    if leaves:
                        raise Stopped
                progress.step(self.epoch + self.step / self.task.steps)
            if not self._end_epoch(progress):
                break
            if self.task.saves_epochs and self.epoch < self.recipe.epochs:
                clock = saved = self._pause(clock)
        self._synchronise()
        self.seconds += time.monotonic() - clock
        return self._finish()

    def _step(self, batch: Batch) -> None:
        """One step, looked at where the recipe says so."""
        done = self.epoch * self.task.steps + self.step
        if self.recipe.monitor is None or done % self.recipe.monitor:
            self.stepper.step(batch)
        else:
            layers = looks.step_looked_at(self.stepper, batch)
            lr = self.recipe.lr_at(self.epoch + self.step / self.task.steps)
            self.trust.append({"step": done, "epoch": done / self.task.steps, "lr": lr, "layers": layers})

    def _look_at_codes(self) -> None:
        found = looks.codes_of(self.model)
        if found is not None:
            self.codes.append({"epoch": self.epoch, **found})

    def _end_epoch(self, progress: Progress) -> bool:
        """Note what the epoch brought; False ends the run."""
        lr = self.recipe.lr_at(self.epoch + (self.task.steps - 1) / self.task.steps)
        self.epoch, self.step = self.epoch + 1, 0
        sums = self.stepper.take_sums()
        loss = float(sums[0] / sums[2])
        point: dict[str, Any] = {"epoch": self.epoch, "lr": lr, "loss": loss, "train": self.task.score(sums)}
        self.curve.append(point)
        if not math.isfinite(loss):
            return False
        every = max(1, self.recipe.epochs // self.task.evaluations)
        if self.task.selects_best:
            point["valid"] = self.stepper.evaluate("valid")
            if self.best is None or point["valid"] < self.best["valid"]:
                state = copy.deepcopy(self.model.state_dict())
                self.best = {"valid": point["valid"], "epoch": self.epoch, "model": state, **self._beside()}
        elif self.epoch % every == 0 or self.epoch == self.recipe.epochs:
            point |= self.stepper.scores(self.task.evaluated)
        if self.epoch in _snapshots(self.recipe.epochs):
            self._look_at_codes()
        for notes in self.ranks.gathered(self.task.notes()):
            point |= {name: point.get(name, 0) + count for name, count in notes.items()}
        progress.epoch(self.epoch, point)
        return True

    def _finish(self) -> dict[str, Any]:
        diverged = not math.isfinite(self.curve[-1]["loss"])
        test: float | None = None
        if not diverged and self.best is not None:
            self.model.load_state_dict(self.best["model"])
            self._set_beside(self.best)
            test = self.stepper.evaluate("test")
        elif not diverged:
            test = self.curve[-1]["test"]
        if test is not None and not math.isfinite(test):
            diverged, test = True, None
        count = sum(p.numel() for p in self.model.parameters())
        record = {
            "schema": records.SCHEMA,
            "recipe": self.recipe.name,
            "settings": self.recipe.settings(),
            "overrides": self.overrides,
            "seed": self.seed,
            "status": "diverged" if diverged else "finished",
            "metric": self.task.metric,
            "test": test,
            "train": self.curve[-1]["train"],
            "curve": self.curve,
            "weights": count,
            "bytes": {
                "weights": looks.held_bytes(self.model),
                "optimiser": looks.state_bytes(self.optimiser),
                "float32": 4 * count,
            },
            "codes": self.codes or None,
            "seconds": round(self.seconds, 2),
            "started": self.started,
            "device": self.ranks.on(", then ".join(self.devices)),
            **self.provenance,
            "versions": self.provenance["versions"] | optimisers.versions(self.recipe),
        }
        if self.recipe.monitor is not None:
            record["trust"] = self.trust
        if (fingerprint := self.task.fingerprint()) is not None:
            record["data"] = fingerprint
        if self.keep is not None and self.ranks.is_first:
            self.keep.mkdir(parents=True, exist_ok=True)
            with self.stepper.averaged():
                save(self.model, kept_at(self.keep, self.recipe.name, self.seed))
        drawn = self.stepper.pictures()
        if self.ranks.is_first:
            if drawn is not None:
                path = records.picture_of(self.recipe.name, self.seed, self.results)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, [png.encoded(drawn)])
            records.write(record, self.results)
            self.checkpoint.unlink(missing_ok=True)
        return record

    def _device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return _COMPILED if self.compiled else "CPU"

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---- stopping and going on

    def _pause(self, clock: float) -> float:
        """Save, with the time since the clock was last read; returns what it reads afterwards."""
        self._synchronise()
        self.seconds += time.monotonic() - clock
        self._save()
        return time.monotonic()

    def _save(self) -> None:
        state = {
            "settings": self.recipe.settings(),
            "source": self.provenance["source"],
            "data": self.task.fingerprint(),
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "random": self.ranks.gathered(torch.get_rng_state()),
            "random_cuda": self.ranks.gathered(
                torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
            ),
            "sums": self.ranks.gathered(self.stepper.sums.cpu()),
            **{name: getattr(self, name) for name in _PROGRESS},
            **self._beside(),
        }
        if not self.ranks.is_first:
            return
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.checkpoint, [buffer.getbuffer()])

    def _restore(self) -> None:
        try:
            state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        except (OSError, MemoryError, torch.OutOfMemoryError):  # of the machine, and not of the file
            raise
        except Exception as error:  # torch's unpickler raises whatever the bytes make of it
            raise ValueError(f"{self.checkpoint} is damaged; remove it to begin the run again") from error
        if state["settings"] != self.recipe.settings():
            raise ValueError(
                f"{self.checkpoint} was begun with other settings than {self.recipe.name} has now; remove it"
            )
        if state.get("data", self.task.fingerprint()) != self.task.fingerprint():
            raise ValueError(
                f"{self.checkpoint} was begun with other files of {self.task.name} than there are now; put them back, "
                f"or remove it"
            )
        here = self.devices
        begun = state.get("devices") or [_device_of(state, here[-1])]
        if {begun[-1], *here} == {"CPU", _COMPILED}:
            how = "with" if begun[-1] == _COMPILED else "without"
            raise ValueError(f"{self.checkpoint} was begun {how} --compile; go on {how} it, or remove the file")
        if state["source"] != self.provenance["source"]:
            self.provenance |= {"dirty": True, "source": "mixed"}  # other code began the run
        own = {name: self._own(state[name]) for name in ("random", "random_cuda", "sums")}
        self.model.load_state_dict(state["model"])
        for saved, own_group in zip(state["optimiser"]["param_groups"], self.optimiser.param_groups, strict=True):
            saved.update({name: own_group[name] for name in _FOR_A_DEVICE if name in own_group})
        self.optimiser.load_state_dict(state["optimiser"])
        torch.set_rng_state(own["random"].cpu())
        if own["random_cuda"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(own["random_cuda"].cpu(), self.device)
        self.stepper.sums.copy_(own["sums"])
        self._set_beside(state)
        for name in _PROGRESS:
            setattr(self, name, state.get(name, getattr(self, name)))  # a run may have begun before there was such
        self.devices = begun if begun[-1:] == here else [*begun, *here]

    def _beside(self) -> dict[str, Any]:
        """What the model is evaluated with, beside its weights, as a part of what is saved."""
        if self.stepper.average is not None:
            return {"average": self.stepper.average.state_dict()}
        if optimisers.evaluates_elsewhere(self.optimiser):
            return {"optimiser": copy.deepcopy(self.optimiser.state_dict())}
        return {}

    def _set_beside(self, saved: dict[str, Any]) -> None:
        if self.stepper.average is not None:
            self.stepper.average.load_state_dict(saved["average"])
        elif optimisers.evaluates_elsewhere(self.optimiser):
            self.optimiser.load_state_dict(saved["optimiser"])

    def _own(self, saved: Any) -> Any:
        """What is this rank's of what every rank has for itself; runs used to have one process, and no list."""
        every = saved if isinstance(saved, list) else [saved]
        if len(every) != self.ranks.world:
            raise ValueError(f"{self.checkpoint} was begun on {len(every)} processes; go on with as many, or remove it")
        return every[self.ranks.rank]


def _device_of(state: dict[str, Any], here: str) -> str:
    """Where a run was that did not say so yet."""
    saved = state["random_cuda"]
    if any(each is not None for each in (saved if isinstance(saved, list) else [saved])):
        return "a GPU" if here in ("CPU", _COMPILED) else here
    return _COMPILED if state.get("compiled") else "CPU"


def _require_a_compiler() -> None:
    """PyTorch's own generates C++ for a CPU, and would say so in the midst of a traceback."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError as error:
        raise ValueError(
            "--compile needs a C++ compiler, and none was found; install g++ (or set CXX), or go without --compile"
        ) from error


def kept_at(folder: Path, recipe: str, seed: int) -> Path:
    """Where the trained weights of a run go that are kept."""
    return folder / f"{recipe}-{seed}.safetensors"


def _snapshots(epochs: int) -> set[int]:
    """The epochs after which the codes are looked at: the first, a few between, the last."""
    return {1, epochs // 10, epochs // 3, 2 * epochs // 3, epochs} - {0}
