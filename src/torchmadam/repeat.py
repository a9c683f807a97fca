"""Steps that are made again as they were, without preparing them again: on a GPU that takes longer than the step."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from torchmadam import shards
from torchmadam.ladder.layout import CodeLayout
from torchmadam.ladder.tensor import LadderTensor

Launch = Callable[[float | Tensor], None]
_MOST = 16  # for each parameter: gradients move between a few places from step to step
_ARGUMENTS = itemgetter(
    "beta", "momentum", "max_step", "bound", "crossing", "second_moment", "bias_correction", "rounding", "seed",
    "weight_decay", "maximize",
)  # fmt: skip
_MOMENTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "float32": ("second_moment",),
    "8bit": ("second_moment", "exponents"),
}
_STEP, _NONFINITE, _SCALE, _INDEX = map(itemgetter, ("step", "nonfinite", "scale", "index"))
_START = itemgetter("room", "zeros")
_PLANES, _CODING, _DTYPE, _SHAPE = map(attrgetter, ("planes", "coding", "dtype", "shape"))


@dataclass(frozen=True)
class Situation:
    """Everything that a group's step depends on but the value of lr; and the tensors that it writes."""

    key: Hashable
    written: Sequence[Tensor]
    codings: Sequence[CodeLayout]  # which the key knows by their ids
    parameters: int


class Repeats:
    """The launches of earlier steps, by the situation they were made in."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Sequence[Launch], Situation]] = {}
        self._size = 0  # parameters, over all that is kept

    def again(self, situation: Situation, lr: float | Tensor) -> bool:
        """Make the step that was made in this situation before; False: there was none."""
        kept = self._kept.get(situation.key)
        if kept is None:
            return False
        for launch in kept[0]:
            launch(on_device(lr))
        torch.autograd.graph.increment_version(situation.written)
        return True

    def keep(self, situation: Situation, launches: Sequence[Launch], parameters: int) -> None:
        """Remember how a step was launched, of an optimiser with so many parameters."""
        while self._kept and self._size + situation.parameters > _MOST * parameters:
            _, oldest = self._kept.pop(next(iter(self._kept)))
            self._size -= oldest.parameters
        self._kept[situation.key] = launches, replace(situation, written=())
        self._size += situation.parameters


def on_device(lr: float | Tensor) -> float | Tensor:
    """The learning rate as a kernel can have it: a number, or a tensor on a GPU."""
    return float(lr) if isinstance(lr, Tensor) and not lr.is_cuda else lr


def is_launched(group: dict[str, Any]) -> bool:
    """Whether the group's steps are launches on a GPU, and not being captured, with buffers that belong to a graph."""
    params = group["params"]
    return bool(params) and params[0].is_cuda and not torch.cuda.is_current_stream_capturing()


def situation_of(group: dict[str, Any], state: Mapping[Tensor, dict[str, Any]]) -> Situation | None:
    """Where all tensors of a group are; None if its next step will not be like any later one.

    This is most of what a small step costs, so it asks all tensors the same question at a time, without a loop.
    """
    lr = group["lr"]
    params = group["params"]
    grads = [p.grad for p in params]
    if not all(grad is not None for grad in grads):
        params = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
        grads = [grad for grad in grads if grad is not None]
    held: list[Any] = [*map(state.get, params)]
    if not held or not all(held):
        return None  # nothing to step, or the first step of some
    if not group["momentum"] and any("first_moment" in own or "step_moment" in own for own in held):
        return None  # the first step without momentum of some, which drops theirs
    if group["second_moment"] == "none" and any("second_moment" in own for own in held):
        return None  # likewise
    try:
        moments = [each[name] for name in _MOMENTS[group["second_moment"]] for each in held]
        if group["momentum"]:
            moments += [each["step_moment"] if "step_moment" in each else each["first_moment"] for each in held]
    except KeyError:
        return None  # the first step with this kind of moment
    here = params
    if shards.are_any_sharded(params):
        here, grads, moments = ([*map(shards.local, each)] for each in (params, grads, moments))
    floats, own = here, held
    coded: list[Tensor] = []
    if shards.are_any(here, LadderTensor):
        floats = [p for p in here if not isinstance(p, LadderTensor)]
        coded = here if not floats else [p for p in here if isinstance(p, LadderTensor)]
        own = [each for each, p in zip(held, here, strict=True) if not isinstance(p, LadderTensor)]
    planes = [*chain.from_iterable(map(_PLANES, coded))]
    codings = [*map(_CODING, coded)]  # each says all about its parameter's shape
    others = chain(map(_STEP, held), map(_NONFINITE, held), map(_SCALE, own))
    try:
        places = tuple(map(Tensor.data_ptr, chain(grads, moments, others, planes, floats)))
        strides = tuple(map(Tensor.stride, chain(grads, floats)))
        starts = tuple(map(_START, own))
    except (RuntimeError, KeyError):
        return None  # a sparse gradient has neither; and a state from codes no scale yet
    key = (
        lr.data_ptr() if isinstance(lr, Tensor) and lr.is_cuda else None,
        _ARGUMENTS(group),
        tuple(map(id, chain(params, codings))),
        places,
        strides,
        tuple(map(_DTYPE, chain(grads, floats))),  # a moment's is the group's argument
        tuple(map(_SHAPE, floats)),
        tuple(map(_INDEX, held)),
        starts,
    )
    return Situation(key, planes + params, codings, len(group["params"]))
