"""One training step, plain or compiled on a CPU; compiled and captured as a CUDA graph on a GPU."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from madam_lab import optimisers, ranks
from madam_lab.recipes import Recipe
from madam_lab.tasks.task import Batch, Task
from torchmadam import LadderTensor, average, compile_options
from torchmadam.theory import TrustMonitor

_Grads = list[tuple[Tensor, Tensor | None]]

# Steps of a batch's shape that run before they are captured: compilers, kernels and optimiser state warm up in them.
_WARM_UP = 3


def settle(device: torch.device) -> None:
    """How a GPU computes: TF32 where float32 is asked for, and so that a resumed run is one that never stopped."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.deterministic = True


class Move(nn.Module):
    """One player's move as a module, which gradients that travel want: the loss of a model on a batch."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss, and its sums."""
        found: tuple[Tensor, Tensor] = self._loss(self.model, batch)
        return found


def only_(model: nn.Module, player: nn.Module) -> None:
    """Let only one player get gradients: an optimiser steps what has some."""
    model.requires_grad_(False)
    player.requires_grad_(True)


class Stepper:
    """Forward, backward and optimiser step on one batch, and evaluation; keeps the sums of an epoch on the device.

    ``compiled``: as on a GPU, through torch.compile and in the recipe's precision.
    """

    def __init__(
        self, recipe: Recipe, task: Task, model: nn.Module, optimiser: torch.optim.Optimizer, compiled: bool
    ) -> None:
        self.recipe, self.task, self.model, self.optimiser = recipe, task, model, optimiser
        self.average = None
        if recipe.average is not None or recipe.recent is not None:
            self.average = average(model, recent=recipe.recent, decay=recipe.average)
        self.on_gpu = task.device.type == "cuda"
        self.ranks = ranks.here()
        if self.average is not None and self.ranks.are_many:
            raise ValueError(f"{recipe.name}: an average is of one process's weights and statistics; train in one")
        players = task.players(model)
        self._captures = self.on_gpu and not self.ranks.are_many and optimisers.is_capturable(recipe)
        self._trained: Any = self.ranks.wrapped(model) if len(players) == 1 else model
        self.sums = torch.zeros(3, device=task.device)
        self._autocast = (self.on_gpu or compiled) and recipe.precision == "bf16"
        # Compiled for the shape of a full batch; a smaller one at an epoch's end is not worth a second compilation.
        self._full: tuple[int, ...] | None = None
        if compiled and task.compiles and not self.ranks.are_many:  # what travels is neither compiled nor captured
            torch.compiler.reset()  # earlier runs in this process must not count against the limit of recompilations
            coded = any(isinstance(p, LadderTensor) for p in model.parameters())
            options = compile_options() if coded else None
            self._full = tuple(next(iter(task.epoch(0)))[0].shape)
        self._moves: list[tuple[nn.Module, Any, Any]] = []
        for player, loss in players:
            plain: Any = self._applied(loss)
            if len(players) > 1 and self.ranks.are_many:
                only_(model, player)
                plain = self.ranks.wrapped(Move(model, loss))
            fast = torch.compile(plain, dynamic=False, fullgraph=True, options=options) if self._full else plain
            self._moves.append((player, plain, fast))
        self._seen: dict[tuple[int, ...], int] = {}
        self._graphs: dict[tuple[int, ...], tuple[Any, Batch, _Grads]] = {}
        self._stream: Any = torch.cuda.Stream(task.device) if self.on_gpu else None

    def set_lr(self, lr: float) -> None:
        """For the steps from now on."""
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def step(self, batch: Batch, monitor: TrustMonitor | None = None) -> None:
        """One step of training, which a monitor of the optimiser may look at."""
        self._step(batch, monitor)
        if self.average is not None:
            self.average.update()

    def _step(self, batch: Batch, monitor: TrustMonitor | None) -> None:
        if not self._captures:
            self._run(batch)
            return
        shape = tuple(batch[0].shape)
        self._seen[shape] = self._seen.get(shape, 0) + 1
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if self._seen[shape] <= _WARM_UP or (monitor is not None and not self._can_watch(shape)):
                self._run(batch)
            else:
                if shape not in self._graphs:
                    self._capture(shape, batch)
                self._replay(*self._graphs[shape], batch, monitor)
        torch.cuda.current_stream().wait_stream(self._stream)

    def _capture(self, shape: tuple[int, ...], batch: Batch) -> None:
        inputs = tuple(t.clone(memory_format=torch.preserve_format) for t in batch)
        graph = torch.cuda.CUDAGraph()
        # What a loader's thread does meanwhile, such as pinning memory, is no part of it.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._run(inputs)
        self._graphs[shape] = graph, inputs, [(p, p.grad) for p in self.model.parameters()]

    def _can_watch(self, shape: tuple[int, ...]) -> bool:
        """Whether a replay is one step of the optimiser, seen from outside; it is two or more where players move."""
        return shape in self._graphs and len(self._moves) == 1

    @staticmethod
    def _replay(graph: Any, inputs: Batch, grads: _Grads, batch: Batch, monitor: TrustMonitor | None) -> None:
        for held, new in zip(inputs, batch, strict=True):
            held.copy_(new)
        if monitor is None:
            graph.replay()
            return
        for p, grad in grads:  # the graph's own, which steps outside of it have replaced
            p.grad = grad
        with monitor.step():
            graph.replay()

    def _applied(self, loss: Any) -> Callable[[Batch], tuple[Tensor, Tensor]]:
        def of(batch: Batch) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor] = loss(self._trained, batch)
            return found

        return of

    def _run(self, batch: Batch) -> None:
        batch, weight = self._share(batch)
        for player, plain, fast in self._moves:
            if len(self._moves) > 1:
                only_(self.model, player)
            self.optimiser.zero_grad(set_to_none=True)
            loss_of = fast if tuple(batch[0].shape) == self._full else plain
            with torch.autocast(self.task.device.type, torch.bfloat16, enabled=self._autocast):
                loss, sums = loss_of(batch)
            (loss if weight == 1 else loss * weight).backward()
            if self.recipe.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
            self.optimiser.step()
            self.sums += sums if weight else 0 * sums

    def _share(self, batch: Batch) -> tuple[Batch, float]:
        """Our part of a batch, and what its mean loss counts."""
        if self.task.takes_slices:
            return batch, len(batch[0]) * self.ranks.world / self.recipe.batch if self.ranks.are_many else 1.0
        return self.ranks.share(batch, self.task.batch_dim)

    def take_sums(self) -> Tensor:
        """The sums since the last call, on the CPU, and begin anew."""
        taken = self.sums.to("cpu", copy=True)
        self.sums.zero_()
        return self.ranks.total(taken)

    def evaluate(self, split: str) -> float:
        """The metric on a split, in evaluation mode."""
        return self.scores((split,))[split]

    def scores(self, splits: Sequence[str]) -> dict[str, float]:
        """The metric on several splits, in evaluation mode."""
        with self._evaluating():
            found = self.ranks.agreed(self.task.scores(self.model, splits))
        return {split: score if math.isfinite(score) else math.inf for split, score in found.items()}

    def pictures(self) -> Tensor | None:
        """What the task shows of the model."""
        with self._evaluating():
            return self.task.pictures(self.model)

    def averaged(self) -> AbstractContextManager[object]:
        """Inside it the model has the weights that it is evaluated with."""
        return optimisers.evaluating(self.optimiser) if self.average is None else self.average.applied()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.model.eval()
        if self.task.takes_slices:
            self.ranks.same_(self.model.buffers())  # every rank evaluates a part of what the first one has learned
        with self.averaged(), torch.autocast(self.task.device.type, torch.bfloat16, enabled=self._autocast):
            yield
        self.model.train()
