"""Steps that are made again as they were, without preparing them again: on a GPU that takes longer than the step."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchmadam.ladder.layout import CodeLayout
from torchmadam.ladder.tensor import LadderTensor

Launch = Callable[[float | Tensor], None]
_STRIDED = torch.strided
_MOST = 16  # for each parameter: gradients move between a few places from step to step
_ARGUMENTS = (
    "beta", "max_step", "bound", "crossing", "second_moment", "bias_correction", "rounding", "seed", "weight_decay",
    "maximize",
)  # fmt: skip


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
    """Where all tensors of a group are; None if its next step will not be like any later one."""
    lr = group["lr"]
    key: list[Hashable] = [lr.data_ptr() if isinstance(lr, Tensor) and lr.is_cuda else None]
    key += [group[name] for name in _ARGUMENTS]
    written: list[Tensor] = []
    codings: list[CodeLayout] = []
    has_moment = group["second_moment"] != "none"
    add = key.append
    for p in group["params"]:
        g = p.grad
        if g is None:
            add(None)
            continue
        held = state.get(p)
        if held is None or g.layout is not _STRIDED:
            return None
        if has_moment:
            moment, exponents = held.get("second_moment"), held.get("exponents")
            if moment is None:
                return None
            key += (moment.data_ptr(), moment.dtype, None if exponents is None else exponents.data_ptr())
        if isinstance(p, LadderTensor):  # whose layout says all about its shape
            planes, coding = p.planes, p.coding
            written += planes
            codings.append(coding)
            add(id(coding))
            for plane in planes:
                add(plane.data_ptr())
        else:
            key += (p.data_ptr(), p.shape, p.stride(), p.dtype, held["scale"].data_ptr(), held.get("crossing"))
        written.append(p)
        key += (
            g.data_ptr(), g.stride(), g.dtype, held["step"].data_ptr(), held["nonfinite"].data_ptr(), held["index"]
        )  # fmt: skip
    return Situation(tuple(key), written, codings, len(group["params"]))
