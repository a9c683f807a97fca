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
    wanted = torch.float32 if kind == "float32" else torch.uint8
    if held is not None and held.dtype == wanted and _is_ordered(held, real):
        return
    if p.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a second moment is made, or changes its kind or memory order, in a CUDA graph, which would do that again "
            "at every replay; make one step outside of the capture first"
        )
    if held is None:
        state["step"].zero_()  # which is how many gradients the moment has seen
        held = _empty(real, wanted).zero_()
        state["second_moment"] = held
        if kind == "8bit":
            state["exponents"] = torch.zeros(count_exponents(p), dtype=torch.uint8, device=held.device)
        return
    new, value = _empty(real, wanted), held
    if held.dtype == torch.uint8:
        value = torch.empty_like(held, dtype=torch.float32)
        _as_grouped(value, p).copy_(moment8.decoded(_as_grouped(held, p), state.pop("exponents")))
    state["second_moment"] = new
    if wanted == torch.float32:
        new.copy_(value)
        return
    ordered = torch.empty_like(new, dtype=torch.float32).copy_(value)
    codes = _as_grouped(new, p)
    state["exponents"] = torch.empty(count_exponents(p), dtype=torch.uint8, device=held.device)
    moment8.encode_(codes, state["exponents"], _as_grouped(ordered, p), moment8.phase(stream, state["step"]))


def count_exponents(p: Tensor) -> int:
    """Of the 8-bit moment of a parameter."""
    return moment8.count_groups(
        (p.coding.rows, p.coding.columns) if isinstance(p, LadderTensor) else (groups.as_real(p).numel(),)
    )


def _empty(p: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(p.shape, _strides(p), dtype=dtype, device=p.device)


def _is_ordered(moment: Tensor, p: Tensor) -> bool:
    return moment.stride() == p.stride() or moment.stride() == _strides(p)


def _strides(p: Tensor) -> tuple[int, ...]:
    """Of a dense tensor in a parameter's memory order. A slice of something has gaps, and its moment has not."""
    return torch.empty_like(torch.empty_strided(p.shape, p.stride(), device="meta")).stride()


def _as_grouped(moment: Tensor, p: Tensor) -> Tensor:
    """A dense moment as it lies in memory: flat, or, of a coded parameter, as its matrix of codes."""
    flat = noise.in_memory_order(moment)
    return flat.view(p.coding.rows, p.coding.columns) if isinstance(p, LadderTensor) else flat
