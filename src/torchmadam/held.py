"""The second moment in an optimiser's state: made, changed from one kind to another, kept in its parameter's order."""

from typing import Any

import torch
from torch import Tensor

from torchmadam import groups, moment8, noise
from torchmadam.ladder.tensor import LadderTensor


def prepare(state: dict[str, Any], p: Tensor, kind: str, stream: int) -> None:
    """See to it that a parameter's state has a second moment of this kind, in the parameter's memory order.

    That order changes with ``model.to(memory_format=...)``, the kind when somebody edits a param group.
    """
    if kind == "none":
        return
    real = groups.as_real(p)
    held = state.get("second_moment")
    if held is None:
        state["step"].zero_()  # which is how many gradients the moment has seen
        held = _empty(real, torch.float32 if kind == "float32" else torch.uint8).zero_()
        state["second_moment"] = held
        if kind == "8bit":
            count = moment8.count_groups(_as_grouped(held, p).shape)
            state["exponents"] = torch.zeros(count, dtype=torch.uint8, device=held.device)
        return
    wanted = torch.float32 if kind == "float32" else torch.uint8
    if held.dtype == wanted and held.stride() == real.stride():
        return
    new = _empty(real, wanted)
    if held.dtype == wanted and held.stride() == new.stride():
        return  # a parameter that is a slice of something has gaps, which its moment has not
    value = held
    if held.dtype == torch.uint8:
        value = torch.empty_like(held, dtype=torch.float32)
        _as_grouped(value, p).copy_(moment8.decoded(_as_grouped(held, p), state.pop("exponents")))
    state["second_moment"] = new
    if wanted == torch.float32:
        new.copy_(value)
        return
    ordered = torch.empty_like(new, dtype=torch.float32).copy_(value)
    codes = _as_grouped(new, p)
    state["exponents"] = torch.empty(moment8.count_groups(codes.shape), dtype=torch.uint8, device=held.device)
    moment8.encode_(codes, state["exponents"], _as_grouped(ordered, p), moment8.phase(stream, state["step"]))


def _empty(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Dense, with a parameter's shape and memory order."""
    strides = torch.empty_like(torch.empty_strided(p.shape, p.stride(), device="meta")).stride()
    return torch.empty_strided(p.shape, strides, dtype=dtype, device=p.device)


def _as_grouped(moment: Tensor, p: Tensor) -> Tensor:
    """A dense moment as it lies in memory: flat, or, of a coded parameter, as its matrix of codes."""
    flat = noise.in_memory_order(moment)
    return flat.view(p.coding.rows, p.coding.columns) if isinstance(p, LadderTensor) else flat
