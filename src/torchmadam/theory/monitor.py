"""Watching a training run: angles, relative steps, and where codes are and go, at one step in so many."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from torchmadam import groups
from torchmadam.doubles import doubled
from torchmadam.ladder.tensor import LadderTensor
from torchmadam.messages import warn
from torchmadam.theory.bounds import descent_bound
from torchmadam.theory.sums import Layers, as_float, cosine, matrices, ratio, reach, trust_product, width_of


@dataclass(frozen=True)
class LayerTrust:
    """What one step did to one layer. Shares are of its weights; what speaks of codes is None where there are none.

    Attributes:
        cosine: cos gamma between |g| and |W|; with ``crossing``, between |g| and sqrt(W^2 + beta_w^2).
        alignment: cos theta between the step and the negative gradient.
        relative_size: |dW| / |W|.
        flips: share whose sign changed. Zero counts as positive, so a weight that passes through zero flips once,
            even if it rests there.
        upper, lower: share of codes at the upper and the lower end of their ladder, after the step.
        rungs: mean distance by which codes moved [mean |dk|].
        moved: share of codes that moved at all.
    """

    cosine: float
    alignment: float
    relative_size: float
    flips: float
    upper: float | None = None
    lower: float | None = None
    rungs: float | None = None
    moved: float | None = None


@dataclass(frozen=True)
class Observation:
    """One step that was looked at: how many steps went before it, and its layers by name."""

    step: int
    layers: dict[str, LayerTrust]

    @property
    def trust(self) -> float:
        """prod_l (1 + |dW_l| / |W_l|) - 1: the breakdown of gradients that deep relative trust allows for this step."""
        return trust_product(layer.relative_size for layer in self.layers.values())

    @property
    def bound(self) -> float:
        """The largest relative step, equal in all layers, at which the theorem promises descent for these angles.

        Of layers that have a gradient: others make no angle with anything. Not a number if none has.
        """
        # A layer of zeros has no angle with its gradient either, but its step has: nothing is promised of it.
        cosines = [layer.cosine for layer in self.layers.values() if layer.cosine != 0 or layer.alignment != 0]
        return math.nan if not cosines or any(map(math.isnan, cosines)) else descent_bound(cosines, len(cosines))


class Writer(Protocol):
    """What TensorBoard's SummaryWriter is to a monitor."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Take one number."""


class TrustMonitor:
    """Looks at one step of an optimiser in ``every``, the first included, and leaves training as it is, bit for bit.

        with TrustMonitor(optimizer, every=100) as monitor:
            train()
        monitor.observations[-1].layers["fc.weight"].cosine

    It works on float and coded parameters, with Madam and any other optimiser, through the hooks of ``step``. Between
    observed steps it costs a comparison and holds nothing but numbers; in an observed step it holds a copy of the
    layers' weights (codes, where they are codes). A step that is replayed from a CUDA graph runs no hooks; say where it
    is, and let ``grad`` be what the graph writes gradients to, as it is after the capture:

        with monitor.step():
            graph.replay()

    Args:
        optimizer: give it ``named_parameters()``, and layers have their names; else they are "parameter 0" and so on.
        every: how many steps from one observation to the next.
        layers: a parameter's layer, from its name and itself; by default every tensor of two or more dimensions is one.
            What belongs to none is not looked at.
        writer: a TensorBoard ``SummaryWriter``, or whatever has its ``add_scalar``; gets "trust/cosine/NAME" and so on.

    Attributes:
        observations: what was seen, oldest first.
        steps: how many steps have been made; set it where training goes on from a checkpoint.
    """

    def __init__(
        self, optimizer: Optimizer, every: int = 100, *, layers: Layers = matrices, writer: Writer | None = None
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every}: the number of steps from one look to the next is 1 or more")
        self.every, self.steps = every, 0
        self.observations: list[Observation] = []
        self._optimizer, self._layers, self._writer = optimizer, layers, writer
        self._before: dict[Tensor, Tensor] = {}
        self._is_told = False  # of a step, by :meth:`step`
        if not any(True for _ in self._members()):
            raise ValueError("none of the optimiser's parameters belongs to a layer; choose others with layers=")
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._ahead),
            optimizer.register_step_post_hook(self._behind),
        ]

    def remove(self) -> None:
        """Stop looking. What was seen stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._before.clear()

    @contextmanager
    def step(self) -> Iterator[None]:
        """What happens inside is one step, and is looked at in its turn; for steps that run no hooks."""
        self._ahead()
        self._is_told = True
        try:
            yield
        except BaseException:
            self._before.clear()
            raise
        finally:
            self._is_told = False
        self._behind()

    def __enter__(self) -> "TrustMonitor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    # The hooks decide, since what they call costs some 20 microseconds even where it has nothing to do. A compiler that
    # traces a step is kept away from the count, which would be a constant to it.

    def _ahead(self, *_: Any) -> None:
        if self._is_told:
            return
        if torch.compiler.is_compiling() or self.steps % self.every == 0:
            self._keep()

    def _behind(self, *_: Any) -> None:
        if self._is_told:
            return
        if torch.compiler.is_compiling() or self._before:
            self._look()
        else:
            self.steps += 1

    @_disable_dynamo
    @torch.no_grad()
    def _keep(self) -> None:
        self._before.clear()
        if self.steps % self.every:
            return
        members = [p for _, p, _, _ in self._members()]
        if any(p.is_cuda for p in members) and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a TrustMonitor cannot look at a step that is being captured in a CUDA graph; attach it after the "
                "capture, and replay the graph inside of `with monitor.step():`, since a replay runs no hooks"
            )
        # A gradient may be made by the closure that step is given, so every layer is kept.
        self._before = {p: p.detach().clone() for p in members}

    @_disable_dynamo
    @torch.no_grad()
    def _look(self) -> None:
        before, self._before = self._before, {}
        step, self.steps = self.steps, self.steps + 1
        if not before:
            return
        names: list[str] = []
        sums: list[list[Tensor | float]] = []
        for layer, p, name, group in self._members():
            if p.grad is not None and p in before:
                names.append(layer)
                sums.append(_summed(p, p.grad, before.pop(p), width_of(p, self._optimizer, group, name)))
        if not names:
            warn(
                "the TrustMonitor found no gradients after optimizer.step(), so there was nothing to observe; "
                "release_gradients frees them before"
            )
            return
        seen = Observation(step, _layers(names, sums))
        self.observations.append(seen)
        for layer, trust in seen.layers.items() if self._writer is not None else ():
            for field in fields(trust):
                value = getattr(trust, field.name)
                if value is not None:
                    self._writer.add_scalar(f"trust/{field.name}/{layer}", value, step)  # type: ignore[union-attr]

    def _members(self) -> Iterator[tuple[str, Tensor, str, dict[str, Any]]]:
        """Layer, parameter, its name and its group, of all that belong to a layer."""
        number = 0
        for group in self._optimizer.param_groups:
            given = group.get("param_names") or [None] * len(group["params"])
            for known, p in zip(given, group["params"], strict=True):
                name = known or getattr(p, "label", None) or f"parameter {number}"
                number += 1
                layer = self._layers(name, p) if p.requires_grad else None
                if layer is not None:
                    yield layer, p, name, group


def _summed(p: Tensor, g: Tensor, before: Tensor, width: float | Tensor) -> list[Tensor | float]:
    """What a layer's numbers are made of, summed over one parameter; see :func:`_layer`.

    In float64, on the parameter's device where that has it. Few operations, because a small tensor takes as long as
    its launches.
    """
    counted: list[Tensor | float] = [0.0] * 5
    if isinstance(p, LadderTensor) and isinstance(before, LadderTensor):
        ladder, old, codes = p.coding.format, before.codes(), p.codes()
        weight, after = (doubled(ladder.decode(c, p.limit)) for c in (old, codes))
        distance = (codes - old).abs()  # of k: signs on the paper's ladder lie above it and are frozen
        ends = ladder.at_upper_end(codes), ladder.at_lower_end(codes)
        counted = [float(p.numel()), distance.sum(), torch.count_nonzero(distance), *map(torch.count_nonzero, ends)]
    else:
        weight, after = (doubled(groups.as_real(as_float(t))) for t in (before, p))
    g = doubled(groups.as_real(g.to_dense() if g.is_sparse else g))
    size, move = reach(weight, width), after - weight
    return [
        torch.linalg.vector_norm(size * g, 1),  # a size is not negative
        (g * move).sum(),
        *map(torch.linalg.vector_norm, (size, g, move, weight)),
        float(weight.numel()),
        torch.count_nonzero((weight < 0) != (after < 0)),
        *counted,
    ]


def _layers(names: list[str], sums: list[list[Tensor | float]]) -> dict[str, LayerTrust]:
    """The layers from the sums of their parameters, read in one synchronisation a device and dtype."""
    totals: dict[str, list[float]] = {}
    for name, row in zip(names, _read(sums), strict=True):
        row[2:6] = [length * length for length in row[2:6]]
        held = totals.get(name, [0.0] * len(row))
        totals[name] = [a + b for a, b in zip(held, row, strict=True)]
    return {name: _layer(*totals[name]) for name in dict.fromkeys(names)}


def _read(rows: list[list[Tensor | float]]) -> list[list[float]]:
    """Numbers, from numbers and tensors that hold one."""
    found = [[0.0 if isinstance(part, Tensor) else part for part in row] for row in rows]
    places: dict[tuple[torch.device, torch.dtype], list[tuple[int, int, Tensor]]] = {}
    for i, row in enumerate(rows):
        for j, part in enumerate(row):
            if isinstance(part, Tensor):
                places.setdefault((part.device, part.dtype), []).append((i, j, part))
    for own in places.values():
        for (i, j, _), value in zip(own, torch.stack([part for _, _, part in own]).tolist(), strict=True):
            found[i][j] = float(value)
    return found


def _layer(
    reach_g: float, g_step: float, reach2: float, g2: float, step2: float, weight2: float, count: float, flips: float,
    coded: float, moves: float, moved: float, upper: float, lower: float,
) -> LayerTrust:  # fmt: skip
    shares = [part / coded for part in (upper, lower, moves, moved)] if coded else []
    return LayerTrust(
        cosine(reach_g, reach2, g2), cosine(-g_step, step2, g2), ratio(step2, weight2), flips / max(count, 1.0), *shares
    )  # fmt: skip
